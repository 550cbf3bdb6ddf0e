"""`litft.finetune` from Python: keywords, examples in memory, metrics, named validation sets;
`litft.generate`."""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from conftest import rows_of, write_records

import litft
from litft.args import FINETUNE, EvalArgs, LoRAFinetuneArgs
from litft.args.flag_types import types_of_flags
from litft.args.keywords import from_keywords, keyword_names
from litft.data.in_memory import stored_examples

RECORDS = [
    {"prompt": f"What is {n} plus {n}?", "completion": f"It is {2 * n}."} for n in range(40)
]
OTHERS = [
    {
        "prompt": f"Name the number {n}.",
        "completion": f"The number {n} has a rather long name.",
    }
    for n in range(12)
]


@pytest.fixture
def settings(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    return {
        "model": tiny,
        "max_steps": 3,
        "global_batch_size": 4,
        "eval_interval": 0,
        "eval_max_new_tokens": 0,
        "seed": 7,
    }


def losses(outcome):
    return [
        (row["loss"], row["grad_norm"]) for row in rows_of(outcome.folder) if "loss" in row
    ]


IN_MEMORY = {
    "list": lambda: RECORDS,
    "dataset": lambda: datasets.Dataset.from_list(RECORDS),
    "iterator": lambda: iter(RECORDS),
    "generator": lambda: (
        {"prompt": r["prompt"], "completion": r["completion"], "note": None}
        for r in RECORDS
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        "list",
        "generator",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dataset", "iterator")),
    ],
)
def test_examples_in_memory_train_like_a_file(settings, kind, tmp_path):
    path = write_records(tmp_path / "train.jsonl", RECORDS)
    expected = litft.finetune(data=path, **settings)
    outcome = litft.finetune(data=IN_MEMORY[kind](), **settings)
    assert losses(outcome) == losses(expected) and len(losses(outcome)) == 3
    stored = Path(
        litft.args.parser.parse(
            LoRAFinetuneArgs, ["--config", str(outcome.folder / "config.yaml")]
        ).data.path[0]
    )
    assert stored.parent == tmp_path / "share" / "litft" / "examples"
    assert [json.loads(line)["completion"] for line in stored.read_text().splitlines()] == [
        r["completion"] for r in RECORDS
    ]
    resumed = litft.finetune(
        data=RECORDS, **settings | {"max_steps": 4}, out_dir=outcome.folder, resume=True
    )
    assert len(losses(resumed)) == 4  # the same records have the same path
    assert len(list(stored.parent.iterdir())) == (2 if kind == "generator" else 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "contains no examples"),
        ([1], "record 0 must be a mapping with fields"),
        (
            ["a", {}],
            "record 0 must be a mapping with fields, such as messages, found text ('a')",
        ),
        ([{"text": b"bytes"}], "record 0 cannot be written as JSON"),
        (["Once upon a time"], "is no file; for texts give records, such as"),
        ({"train": RECORDS, "test": RECORDS}, "dict with train, test"),
        (7, "cannot use int as examples"),
        (
            [RECORDS[0], {"unknown": "a"}],
            "record 1 of the data: no known format has the fields 'unknown'",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_examples_are_reported(settings, data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        litft.finetune(data=data, **settings)


def test_every_flag_is_a_keyword():
    parameters = inspect.signature(litft.finetune).parameters
    assert parameters["max_steps"].default is None and parameters["lora_r"].default == 32
    assert parameters["eval_interval"].default is None and "interval" not in parameters
    for cls in FINETUNE.values():
        names = keyword_names(cls)
        assert names.keys() <= parameters.keys()
        assert types_of_flags(cls).keys() - set(names.values()) == {
            "checkpoint_dir",
            "data.path",
            "data.val_path",
        }
    assert "finetune" in dir(litft) and litft.finetune.__doc__


def test_keywords_equal_flags():
    args = from_keywords(
        "lora",
        {
            **{
                "checkpoint_dir": "a",
                "data_path": ["x,y.jsonl"],
                "max_steps": 3,
                "lora_r": 4,
                "train_learning_rate": 0.5,
            },
            **{
                "columns": {"instruction": "question"},
                "template_args": {"enable_thinking": False},
                "weights": [0.5],
            },
            **{
                "prompts": ["Well, who?"],
                "exact_match": True,
                "max_batches": None,
                "new_tokens": None,
                "lora_targets": "q_proj,v_proj",
                "limit": 3,
            },
        },
    )
    assert (
        args.checkpoint_dir == "a"
        and args.data.path == ["x,y.jsonl"]
        and args.train.max_steps == 3
    )
    assert (
        args.lora.r == 4
        and args.train.learning_rate == 0.5
        and args.data.columns == ["instruction=question"]
    )
    assert args.data.template_args == ["enable_thinking=false"] and args.data.weights == [
        0.5
    ]
    assert args.eval == EvalArgs(prompts=["Well, who?"], exact_match=True, max_batches=None)
    assert (
        args.lora.targets == ["q_proj", "v_proj"]
        and args.data.limit == 3
        and args.data.new_tokens == []
    )


def test_a_prompt_may_contain_commas():
    args = from_keywords("lora", {"eval_prompts": "Well, who are you?"})
    assert args.eval.prompts == ["Well, who are you?"]


def test_paths_have_weights(settings, tmp_path):
    """As with data_path, which has the paths as flags."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    write_records(paths[0], RECORDS)
    write_records(paths[1], OTHERS)
    weights = {"data_weights": [1, 0.5], "val_fraction": 0}
    run = litft.finetune(**settings, **weights, data=paths, out_dir=tmp_path / "run")
    expected = litft.finetune(
        **settings,
        **weights,
        data_path=list(map(str, paths)),
        out_dir=tmp_path / "expected",
    )
    assert losses(run) == losses(expected)


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        (
            {"num_train_epochs": 3},
            TypeError,
            "unexpected keyword argument 'num_train_epochs'; here it is epochs",
        ),
        ({"model_name_or_path": "a"}, TypeError, "here it is model"),
        (
            {"flash_attention": True},
            TypeError,
            "leave it out (the fastest attention is chosen)",
        ),
        ({"load_in_4bit": False}, TypeError, "'load_in_4bit'; leave it out"),
        (
            {"optimizer_in_backward": True},
            ValueError,
            "optimizer_in_backward=True: the first weights are updated",
        ),
        ({"output_dir": "out/a"}, TypeError, "here it is out_dir='out/a'"),
        ({"train_on_inputs": False}, TypeError, "here it is mask_prompt=True"),
        ({"max_step": 3}, TypeError, "did you mean max_steps?"),
        (
            {"method": "qlora"},
            ValueError,
            "method 'qlora' does not exist; use lora, adapter",
        ),
        ({"max_steps": "many"}, ValueError, "expected a whole number"),
        (
            {"args": LoRAFinetuneArgs(), "max_steps": 3},
            TypeError,
            "either args or keywords",
        ),
        (
            {"args": LoRAFinetuneArgs(), "rewards": [len]},
            ValueError,
            "does not learn from them",
        ),
        (
            {"model": "m", "checkpoint_dir": "n"},
            TypeError,
            "either model or checkpoint_dir",
        ),
        (
            {"data": "a.jsonl", "data_path": "b.jsonl"},
            TypeError,
            "either data or data_path",
        ),
        ({"args": "lora"}, TypeError, "takes keywords, as in finetune(method='lora')"),
        ({"metrics": {"loss": len}}, ValueError, "'loss' cannot be a column"),
        ({"metrics": {"margin": len}}, ValueError, "'margin' cannot be a column"),
        ({"metrics": {"flops": len}}, ValueError, "'flops' cannot be a column"),
        ({"metrics": [len]}, ValueError, "expected functions by name"),
        ({"metrics": {"rouge": 1.0}}, ValueError, "expected functions by name"),
        ({"data_limit": "ten", "data": RECORDS[:1]}, ValueError, "limit ten: expected"),
        ({"data": RECORDS[:1], "val_fraction": 2}, ValueError, "val_fraction 2.0: "),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_wrong_keywords_are_reported(keywords, kind, message):
    with pytest.raises(kind) as error:
        litft.finetune(**keywords)
    assert message in str(error.value) and "--" not in str(error.value)


def test_metrics_of_the_answers(settings, capfd):
    """A metric gets each validation question with the model's greedy answer, at each validation."""
    calls, rows = [], []

    def answer_length(answers):
        calls.append(answers)
        return sum(len(answer.answer) for answer in answers) / len(answers)

    settings |= {"eval_interval": 1, "eval_max_new_tokens": 12, "exact_match": True}
    settings |= {"callback": rows.append, "metrics": {"length": answer_length}}
    outcome = litft.finetune(data=RECORDS, val_data=OTHERS, **settings)
    assert len(calls) == 4 and all(len(answers) == len(OTHERS) for answers in calls)
    model, tokenizer = litft.load(outcome.folder)
    for answer, record in zip(calls[-1], OTHERS, strict=True):
        assert record["prompt"] in answer.prompt and answer.expected == record["completion"]
        question = [{"role": "user", "content": record["prompt"]}]
        room = max(12, 8 + len(tokenizer.encode(record["completion"], bos=False)))
        text = litft.generate(
            model, tokenizer, question, max_new_tokens=room + 9, temperature=0
        )
        assert text.strip().startswith(answer.answer) and answer.answer
    measured = {
        int(row["step"]): row["length"]
        for row in rows_of(outcome.folder)
        if "length" in row
    }
    assert measured == {
        step: pytest.approx(answer_length(answers))
        for step, answers in enumerate(calls[:4])
    }
    assert outcome.metrics["length"] == pytest.approx(measured[3]) and [
        row["step"] for row in rows
    ] == [0, 1, 2, 3]
    printed = capfd.readouterr().out
    assert f"exact match 0.0%, length {measured[3]:.4g} (12 answers)" in printed
    assert ">length</th>" in (outcome.folder / "report.html").read_text()

    # goes on without the function, as the command line does
    settings.pop("metrics")
    settings |= {"max_steps": 4, "out_dir": str(outcome.folder), "resume": True}
    litft.finetune(data=RECORDS, val_data=OTHERS, **settings)
    kept = {
        int(row["step"]): row["length"]
        for row in rows_of(outcome.folder)
        if "length" in row
    }
    assert kept == measured


@pytest.mark.parametrize("result", [None, ZeroDivisionError("no answers")], ids=str)
@pytest.mark.halved
def test_a_metric_that_fails_does_not_end_the_run(settings, capfd, result):
    def broken(answers):
        if isinstance(result, Exception):
            raise result

    outcome = litft.finetune(
        data=RECORDS, val_data=OTHERS, metrics={"broken": broken}, **settings
    )
    assert (outcome.folder / "final").is_dir() and "broken" not in outcome.metrics
    printed = capfd.readouterr().out
    assert "warning: the metric broken failed (" in printed
    assert (f", at {__file__}:" in printed) == isinstance(result, Exception)
    # without validation examples it would never be called
    with pytest.raises(
        ValueError, match="of the validation examples, and nothing is held out"
    ):
        settings["val_fraction"] = 0
        litft.finetune(data=RECORDS, metrics={"broken": broken}, **settings)


def test_an_endless_iterator_is_read_up_to_the_limit(settings, tmp_path):
    assert (
        litft.finetune(data=itertools.cycle(RECORDS), data_limit=6, **settings).metrics[
            "step"
        ]
        == 3
    )
    (stored,) = (tmp_path / "share" / "litft" / "examples").iterdir()
    assert len(stored.read_text().splitlines()) == 6


def test_keywords_override_the_file_of_config(tmp_path):
    (tmp_path / "c.yaml").write_text("train: {max_steps: 99, epochs: 2}")
    args = from_keywords("lora", {"max_steps": 5, "config": str(tmp_path / "c.yaml")})
    assert (args.train.max_steps, args.train.epochs) == (5, 2)


def test_named_validation_sets_have_their_own_losses(settings, tmp_path):
    """Each loss is that of a run with this set alone; the loss of all is their mean over target
    tokens."""
    sums = write_records(tmp_path / "sums.jsonl", RECORDS[:7])
    names = write_records(tmp_path / "names.jsonl", OTHERS)
    rows = {}
    for title, val_data in {
        "both": [f"a={sums}", f"b-c={names}"],
        "sums": sums,
        "names": names,
    }.items():
        outcome = litft.finetune(
            data=RECORDS,
            val_data=val_data,
            **settings | {"eval_interval": 2, "max_steps": 2},
        )
        rows[title] = {int(row["step"]): row for row in rows_of(outcome.folder)}
        if title == "both":
            report, folder = (outcome.folder / "report.html").read_text(), outcome.folder
    for step in (0, 2):
        both, alone = (
            rows["both"][step],
            [rows[title][step]["val_loss"] for title in ("sums", "names")],
        )
        assert [both["val_loss_a"], both["val_loss_b-c"]] == pytest.approx(alone, rel=1e-6)
        assert alone[0] != pytest.approx(alone[1], rel=1e-2)
    counts = _target_counts(settings["model"], [sums, names])
    mean = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(
        counts
    )
    assert both["val_loss"] == pytest.approx(mean, rel=1e-6)
    assert ">loss on b-c</th>" in report and '<span class="key c3">b-c ' in report
    resumed = litft.finetune(
        data=RECORDS,
        val_data=[f"a={sums}", f"b-c={names}"],
        **settings,
        out_dir=folder,
        resume=True,
    )
    assert {"val_loss_a", "val_loss_b-c"} <= rows_of(resumed.folder)[0].keys() & rows_of(
        resumed.folder
    )[-1].keys()


def _target_counts(model, paths):
    from litft.args import DataArgs
    from litft.data.dataset import load_data
    from litft.data.tokenizer import Tokenizer

    loaded = [
        load_data(
            DataArgs(path=[str(path)], val_fraction=0.0), Tokenizer(model), 10**6, 256
        )
        for path in paths
    ]
    return [int(sum(data.train.supervised)) for data in loaded]


def test_unnamed_sets_have_the_names_of_their_files(settings, tmp_path):
    first, second = (
        write_records(tmp_path / name, RECORDS[:4]) for name in ("a.val.jsonl", "b=c.jsonl")
    )
    outcome = litft.finetune(
        data=OTHERS, val_data=[first, second], **settings | {"max_steps": 1}
    )
    assert {"val_loss_a_val", "val_loss_b_c"} <= outcome.metrics.keys()
    (tmp_path / "en").mkdir()
    same = write_records(tmp_path / "en" / "a.val.jsonl", RECORDS[:4])
    with pytest.raises(ValueError, match="would have the same name, a_val; name them"):
        litft.finetune(data=OTHERS, val_data=[first, same], **settings)
    empty = write_records(tmp_path / "empty.jsonl", [{"prompt": "a", "completion": ""}])
    with pytest.raises(ValueError, match="no example of the set empty is left"):
        litft.finetune(data=OTHERS, val_data=[first, empty], **settings)
    with pytest.raises(ValueError, match=r"nowhere\.jsonl does not exist"):
        litft.finetune(data=OTHERS, val_data=["x=nowhere.jsonl"], **settings)


def test_generate_answers_or_continues(tiny, checkpoints):
    """A text is a message for a model with a chat template, and is continued otherwise."""
    model, tokenizer = litft.load(tiny)
    settings = {"max_new_tokens": 8, "temperature": 0}
    assert (
        litft.generate(model, tokenizer, "One", **settings)
        == "".join(litft.stream(model, tokenizer, "One", **settings))
        != ""
    )
    model, tokenizer = litft.load(checkpoints["SmolLM2-135M-Instruct"], "fp32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = litft.generate(model, tokenizer, "What is the capital of France?", **settings)
    assert (
        answer
        == litft.generate(model, tokenizer, messages, **settings)
        == "The capital of France is Paris."
    )


@pytest.mark.weekly
def test_training_threads_do_not_spin():
    """Next to other programs, spinning threads made steps 20 times as slow. torch reads the
    variable when it is imported."""
    code = (
        "import os, sys, litft; assert 'torch' not in sys.modules; litft.finetune; "
        "print(os.environ['GOMP_SPINCOUNT'])"
    )
    for given, expected in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        } | given
        assert (
            subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, text=True
            ).stdout
            == f"{expected}\n"
        )


def test_null_values_of_records_in_memory_are_kept(tmp_path, monkeypatch):
    """They may be arguments of calls; only Arrow adds them by itself."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    arguments = {"town": "Oslo", "unit": None}
    calls = [{"type": "function", "function": {"name": "w", "arguments": arguments}}]
    record = {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]}
    assert json.loads(stored_examples([record]).read_text()) == record
    dataset = datasets.Dataset.from_list([{"a": "x"}, {"a": "y", "b": "z"}])
    assert json.loads(stored_examples(dataset).read_text().splitlines()[0]) == {"a": "x"}
