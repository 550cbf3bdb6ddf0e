"""Evaluation on lm-evaluation-harness tasks and on a user's examples."""

import importlib.util
import json
import math
import re
from dataclasses import replace
from shutil import copyfile, copytree

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import adapted, refused, script, write_records
from transformers import AutoModelForCausalLM, LlamaConfig

import litft
from litft.args import (
    DataArgs,
    EvalArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    RunEvalArgs,
    TrainArgs,
)
from litft.args.parser import parse
from litft.data.dataset import load_data
from litft.data.tokenizer import Tokenizer
from litft.evaluation.examples import (
    _apply_overrides,
    _train_files,
    compared_sources,
    kind_of,
    notes_on_adapter,
    readable_by_all,
    resolve_data,
)
from litft.inference.session import open_session, source_of
from litft.methods import LoRA
from litft.pretrained.folder import resolve

if importlib.util.find_spec("lm_eval") is None:  # not imported here: that takes seconds
    pytest.skip("needs lm-eval, of the extra 'eval'", allow_module_level=True)
QUESTIONS = [
    {
        "question": "What is the capital of France?",
        "choices": ["Paris", "London", "a potato"],
        "answer": 0,
    },
    {
        "question": "What do calves drink?",
        "choices": ["water", "milk", "petrol"],
        "answer": 1,
    },
    {"question": "2 + 2 =", "choices": ["5", "4", "seventeen"], "answer": 1},
    {"question": "The sky is", "choices": ["green", "blue"], "answer": 1},
    {
        "question": "Who wrote Hamlet?",
        "choices": ["Goethe", "Shakespeare", "Plato"],
        "answer": 1,
    },
    {
        "question": "Water boils at",
        "choices": ["a hundred degrees", "ten degrees"],
        "answer": 0,
    },
]
TASK_HEADER = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/questions.jsonl
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
metadata:
  version: 1
"""
KINDS = {
    "choice": """\
output_type: multiple_choice
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
""",
    "said": """\
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: !function judge.holds
    aggregation: mean
    higher_is_better: true
""",
    "text": """\
output_type: loglikelihood_rolling
doc_to_target: "{{question}} {{choices}}"
metric_list:
  - metric: word_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
""",
}
# imports the package `evaluate`, which no file in scripts/ may shadow
JUDGE = """\
import evaluate

def holds(predictions, references):
    assert callable(evaluate.load) and "site-packages" in evaluate.__file__
    return float(references[0].lower() in predictions[0].lower())
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with one YAML task of each kind, the questions and the metric."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    )
    (folder / "judge.py").write_text(JUDGE)
    for name, text in KINDS.items():
        (folder / f"{name}.yaml").write_text(
            TASK_HEADER.format(name=f"own_{name}", folder=folder) + text
        )
    return folder


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints["stories"]


@pytest.fixture(scope="module")
def tuned(folder, tmp_path_factory):
    method = LoRA(LoRAArgs(r=4, targets=["v_proj", "down_proj"]))
    return adapted(folder, tmp_path_factory.mktemp("tuned") / "tuned", method)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "own.jsonl"
    texts = [
        ("Who is it?", "Lily"),
        ("What did she see?", "a big dog in the park"),
        ("And then?", "they were happy"),
    ] * 3
    path.write_text(
        "".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in texts)
    )
    return path


def run_eval(tmp_path, *arguments, code=0):
    """Run scripts/run_eval.py; return its JSON output and the finished process."""
    # tested in test_forgetting.py
    flags = ["--out", "out.json", "--forgetting", "false"]
    done = script("scripts/run_eval.py", *flags, *arguments, cwd=tmp_path, code=code)
    return (json.loads((tmp_path / "out.json").read_text()) if code == 0 else None), done


def harness_requests(*arguments, kind="loglikelihood"):
    """Return the harness's request objects."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, request, index) for index, request in enumerate(arguments)]


@pytest.fixture(scope="module")
def harness_model(folder):
    from litft.evaluation.lm_eval_model import HarnessModel

    args = RunEvalArgs(tasks=["any"], precision="fp32")
    return HarnessModel(open_session(args.model(str(folder))), batch_size=3)


PAIRS = [
    ("Once upon a", " time there was"),
    ("", "The dog"),
    ("Lily ", "ran"),
    ("Lily", " ran"),
    ("Lily", " saw"),
    ("a " * 400, "b"),
]


@torch.no_grad()
def test_log_probabilities_equal_the_models(harness_model, folder):
    """In batches of different lengths, with truncated texts and with choices that share a
    context."""
    model, tokenizer = litft.load(folder, "fp32")
    results = harness_model.loglikelihood(harness_requests(*PAIRS), disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(PAIRS, results, strict=True):
        all_ids = (
            tokenizer.encode(context + continuation)
            if context
            else [*tokenizer.encode("The dog")]
        )
        context_length = len(tokenizer.encode(context.rstrip())) if context else 1
        window_ids = all_ids[-model.config.max_positions - 1 :]
        logprobs = model(torch.tensor([window_ids[:-1]]))[0].log_softmax(-1)[
            -(len(all_ids) - context_length) :
        ]
        ids = torch.tensor(all_ids[context_length:])
        assert math.isclose(
            total, float(logprobs.gather(1, ids[:, None]).sum()), abs_tol=1e-3
        )
        assert greedy == bool((logprobs.argmax(-1) == ids).all())


@torch.no_grad()
def test_rolling_windows_predict_each_token_once(harness_model, folder):
    model, tokenizer = litft.load(folder, "fp32")
    text = "Lily and Tom went to the park. They saw a big dog. " * 70
    (log_likelihood,) = harness_model.loglikelihood_rolling(
        harness_requests((text,)), disable_tqdm=True
    )
    ids, context, total = tokenizer.encode(text), model.config.max_positions, 0.0
    assert len(ids) > 2 * context
    prefixed_ids = [harness_model.prefix_token_id, *ids]
    for start in range(0, len(ids), context):
        end = min(start + context, len(ids))
        window_start = max(0, end - context)  # the last window is full too
        logprobs = model(torch.tensor([prefixed_ids[window_start:end]]))[0].log_softmax(-1)
        total += float(
            logprobs.gather(
                1, torch.tensor(prefixed_ids[window_start + 1 : end + 1])[:, None]
            )[start - window_start :].sum()
        )
    assert math.isclose(log_likelihood, total, rel_tol=1e-4)


def test_answers_end_at_the_tasks_stop_texts(harness_model, folder):
    model = litft.load(folder, "fp32")
    settings = {"until": ["."], "max_gen_toks": 40, "do_sample": False}
    prompts = ["Once upon a time", "Lily saw", "a " * 500]
    answers = harness_model.generate_until(
        harness_requests(
            *((prompt, settings) for prompt in prompts), kind="generate_until"
        ),
        disable_tqdm=True,
    )
    default_settings = {"until": ["."], "max_gen_toks": 40}  # greedy by default
    default_answers = harness_model.generate_until(
        harness_requests(
            *((prompt, default_settings) for prompt in prompts), kind="generate_until"
        ),
        disable_tqdm=True,
    )
    assert default_answers == answers
    # as the harness's own backend: the answer's tokens are decoded without the prompt
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    for prompt, text in zip(prompts[:2], answers[:2], strict=True):
        chunks = litft.stream(*model, prompt, max_new_tokens=40, temperature=0)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert text == reference.decode(tokens).partition(".")[0]
    assert not answers[0].startswith(" ")
    assert answers[2]
    sampled = {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 2.0}
    samples = harness_model.generate_until(
        harness_requests(*[(prompts[0], sampled)] * 4, kind="generate_until"),
        disable_tqdm=True,
    )
    assert len(set(samples)) > 1


def test_answers_to_tasks_have_the_penalty_of_the_folder(folder, tmp_path):
    """As those of the harness's own backend, which calls transformers' generate."""
    from lm_eval.models.huggingface import HFLM

    from litft.evaluation.lm_eval_model import HarnessModel

    copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**config, "repetition_penalty": 5.0}))
    args = RunEvalArgs(tasks=["any"], precision="fp32").model(str(tmp_path / "model"))
    ours = HarnessModel(open_session(args), batch_size=1)
    theirs = HFLM(str(tmp_path / "model"), device="cpu", dtype="float32", batch_size=1)
    settings = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}
    requests = harness_requests(("Once upon a time", settings), kind="generate_until")
    answers = ours.generate_until(requests, disable_tqdm=True)
    assert answers == theirs.generate_until(requests, disable_tqdm=True)
    plain = HarnessModel(open_session(replace(args, checkpoint_dir=str(folder))), 1)
    assert answers != plain.generate_until(requests, disable_tqdm=True)


@pytest.mark.weekly
def test_scores_equal_the_harness_hugging_face_backend(checkpoints, tasks, tmp_path):
    """All log-probabilities, answers and scores of SmolLM2."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from litft.evaluation.lm_eval_model import HarnessModel

    folder = checkpoints["SmolLM2-135M-Instruct"]
    hf_model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)
    litft_model = HarnessModel(
        open_session(RunEvalArgs(tasks=["any"], precision="fp32").model(str(folder))), 4
    )
    pairs = [
        (f"Question: {item['question']}\nAnswer:", f" {choice}")
        for item in QUESTIONS[:3]
        for choice in item["choices"]
    ]
    for (expected, greedy), actual in zip(
        *(
            model.loglikelihood(harness_requests(*pairs))
            for model in (hf_model, litft_model)
        ),
        strict=True,
    ):
        assert math.isclose(expected, actual[0], abs_tol=2e-3) and greedy == actual[1]
    settings = {"until": ["\n"], "max_gen_toks": 20, "do_sample": False}
    prompts = [
        (f"Question: {item['question']}\nAnswer:", settings) for item in QUESTIONS[:3]
    ]
    assert litft_model.generate_until(
        harness_requests(*prompts)
    ) == hf_model.generate_until(harness_requests(*prompts))
    names = [str(tasks / f"{name}.yaml") for name in KINDS]
    expected = lm_eval.simple_evaluate(
        hf_model, tasks=names, task_manager=TaskManager(), log_samples=False
    )["results"]
    output, _ = run_eval(
        tmp_path,
        "--checkpoint_dir",
        folder,
        "--precision",
        "fp32",
        "--tasks",
        ",".join(names),
    )
    results = output["harness"][folder.name]["results"]
    assert results.keys() == expected.keys() and len(results) == 3
    for task, scores in expected.items():
        for name, value in scores.items():
            if "," in name and isinstance(value, float):
                assert math.isclose(results[task][name], value, rel_tol=1e-4), (task, name)


@pytest.mark.weekly
def test_base_and_tuned_side_by_side(folder, tuned, tasks, examples, tmp_path):
    """Tasks and examples share one table; the base's column equals an evaluation of the base
    alone."""
    flags = [
        "--tasks",
        ",".join(str(tasks / f"{name}.yaml") for name in KINDS),
        "--data.path",
        examples,
        "--precision",
        "fp32",
    ]
    both, done = run_eval(tmp_path, "--checkpoint_dir", tuned, *flags)
    base_only, _ = run_eval(tmp_path, "--checkpoint_dir", folder, *flags)
    assert both["scores"].keys() == {"base", "tuned"} and base_only["scores"].keys() == {
        folder.name
    }
    for name, value in base_only["scores"][folder.name].items():
        assert math.isclose(both["scores"]["base"][name], value, rel_tol=1e-4), name
    assert both["scores"]["tuned"]["loss"] != both["scores"]["base"]["loss"]
    assert {
        "loss",
        "perplexity",
        "exact_match",
        "own_choice: acc",
        "own_said: holds",
        "own_text: word_perplexity",
    } <= both["scores"]["base"].keys()
    lines = done.stdout.splitlines()
    assert [cell.strip() for cell in lines[0].split("|")] == ["", "", "base", "tuned", ""]
    assert sum(line.startswith("|") for line in lines) == 2 + len(both["scores"]["base"])
    assert (
        "prompt:" in done.stdout
        and "expected: " in done.stdout
        and "tuned:    " in done.stdout
    )
    # a cut answer is marked, but not in the JSON file
    assert " ... (cut)" in done.stdout and "(cut)" not in json.dumps(both)
    assert f"base: {folder}" in done.stderr
    tuned_only, _ = run_eval(
        tmp_path,
        "--checkpoint_dir",
        tuned,
        "--data.path",
        examples,
        "--precision",
        "fp32",
        "--against",
        "none",
    )
    assert tuned_only["scores"].keys() == {"tuned"}
    against, _ = run_eval(
        tmp_path,
        "--checkpoint_dir",
        folder,
        "--data.path",
        examples,
        "--against",
        tuned,
        "--precision",
        "fp32",
    )
    assert list(against["scores"]) == ["tuned", folder.name]
    assert against["scores"]["tuned"] == tuned_only["scores"]["tuned"]


@torch.no_grad()
def test_scores_on_a_users_examples(folder, examples, tmp_path):
    """The loss per token equals transformers'; an answer counts only if it equals the expected text
    and ends there."""
    lines = examples.read_text().splitlines()
    question = [{"role": "user", "content": "Who is it?"}]
    pieces = litft.stream(
        *litft.load(folder, "fp32"), question, max_new_tokens=6, temperature=0
    )
    # a base model never ends an answer itself
    end_id = [token for piece in pieces for token in piece.tokens][-1]
    folder = copytree(folder, tmp_path / folder.name)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, end_id]})
    )
    model, tokenizer = litft.load(folder, "fp32")
    answer = "".join(
        litft.stream(model, tokenizer, question, max_new_tokens=6, temperature=0)
    )
    path = tmp_path / "mine.jsonl"
    path.write_text(
        "\n".join([*lines[:3], json.dumps({"prompt": "Who is it?", "completion": answer})])
        + "\n"
    )
    output, _ = run_eval(
        tmp_path,
        "--checkpoint_dir",
        folder,
        "--data.path",
        path,
        "--precision",
        "fp32",
        "--max_new_tokens",
        "6",
    )
    scores = output["scores"][folder.name]
    hf_model, total, count = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        0.0,
        0,
    )
    for line in path.read_text().splitlines():
        record = json.loads(line)
        messages = [{"role": "user", "content": record["prompt"]}]
        prompt_text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        full_text = tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": record["completion"]}]
        )
        ids = [*tokenizer.encode(full_text, bos=False)]
        ids += [] if ids[-1] in tokenizer.stop_ids else tokenizer.stop_ids[-1:]
        start = len(tokenizer.encode(prompt_text, bos=False))
        logits = hf_model(torch.tensor([ids])).logits[0]
        total += float(
            F.cross_entropy(
                logits[start - 1 : -1], torch.tensor(ids[start:]), reduction="sum"
            )
        )
        count += len(ids) - start
    assert math.isclose(scores["loss"], total / count, rel_tol=1e-4)
    assert math.isclose(scores["perplexity"], math.exp(scores["loss"]), rel_tol=1e-9)
    assert scores["examples"] == 4 and len(output["answers"]) == 4
    assert (
        output["answers"][3][folder.name]
        == answer.strip()
        == output["answers"][3]["expected"]
    )
    assert scores["exact_match"] == 0.25
    flags = ["--checkpoint_dir", folder, "--data.path", path, "--precision", "fp32"]
    # the same text, but not ended
    truncated, _ = run_eval(tmp_path, *flags, "--max_new_tokens", "5")
    assert (
        truncated["answers"][3][folder.name] == answer.strip()
        and truncated["scores"][folder.name]["exact_match"] == 0
    )


def test_answers_are_rated_by_reward_functions(folder, tuned, examples, tmp_path):
    """Base and adapter side by side: the mean of a function of one's own, by hand."""
    (tmp_path / "rewards.py").write_text(
        "def vowels(completion, answer):\n"
        "    if len(answer.strip()) % 2:\n        return None\n"
        "    return sum(letter in 'aeiou' for letter in completion)\n"
    )
    flags = ["--checkpoint_dir", tuned, "--data.path", examples, "--max_new_tokens", "8"]
    flags += ["--limit", "6", "--show", "6", "--reward", "rewards.py:vowels=2,brief:4"]
    output, done = run_eval(tmp_path, *flags)
    expected = [item["expected"] for item in output["answers"]]
    assert len(expected) == 6
    for name in ("base", "tuned"):
        scores = output["scores"][name]
        answers = [item[name] for item in output["answers"]]
        vowels = []
        for answer, of_data in zip(answers, expected, strict=True):
            if not len(of_data) % 2:
                vowels.append(sum(letter in "aeiou" for letter in answer))
        assert scores["answers"] == 6 > len(vowels) > 0
        shown = [line for line in done.stdout.splitlines() if line.startswith(f"{name}:")]
        assert len(shown) == 6
        assert scores["answers cut"] == sum(line.endswith("(cut)") for line in shown)
        assert scores["reward_vowels"] == pytest.approx(sum(vowels) / len(vowels))
        assert 0 <= scores["reward_brief"] <= 1
    assert "reward_vowels" in done.stdout


@pytest.mark.parametrize("with_answer", [True, False])
def test_rewards_are_not_measured_on_other_prompts_than_were_held_out(
    tiny, tmp_path, with_answer
):
    """Pairs are held out by their prompts, prompts with an answer by both."""
    records = []
    for number in range(8):
        record = {"prompt": f"q{number}", "chosen": "yes", "rejected": "no"}
        if with_answer:
            record |= {"messages": [{"role": "user", "content": f"q{number}"}]}
            record["messages"].append({"role": "assistant", "content": "yes"})
        records.append(json.dumps(record))
    (tmp_path / "pairs.jsonl").write_text("\n".join(records))
    (tmp_path / "run").mkdir()
    paths = {"path": [str(tmp_path / "pairs.jsonl")], "val_fraction": 0.2}
    config = {"checkpoint_dir": str(tiny), "objective": "dpo"}
    config |= {"data": paths}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    args = RunEvalArgs(reward=["number"], data=DataArgs(**paths))
    if with_answer:
        with pytest.raises(ValueError, match="trained with dpo, which holds out other"):
            kind_of(args, tmp_path / "run")
    else:
        assert kind_of(args, tmp_path / "run") == "prompts"
    # all of a file of its own is measured
    whole = replace(args, data=replace(args.data, val_fraction=0.0))
    assert kind_of(whole, tmp_path / "run") == "prompts"


def test_plain_text_has_only_a_perplexity(folder, tmp_path):
    (tmp_path / "text.txt").write_text("Lily saw a dog. " * 20)
    output, _ = run_eval(tmp_path, "--checkpoint_dir", folder, "--data.path", "text.txt")
    assert (
        output["scores"][folder.name].keys() == {"examples", "loss", "perplexity"}
        and not output["answers"]
    )


def test_a_file_with_weight_0_is_not_scored(tmp_path):
    """The run did not read it, so it held nothing out of it."""
    paths = []
    for name in ("read", "unread"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"prompt": name, "completion": "x"}) + "\n")
        paths.append(str(path))
    trained = DataArgs(path=paths, weights=[2, 0], val_fraction=0.5)
    scored = _apply_overrides(RunEvalArgs().data, trained, tmp_path, ())
    assert scored.path_weights == [1.0, 0.0]
    assert _train_files(trained) == _train_files(DataArgs(path=paths[:1]))


def test_a_run_is_scored_on_its_held_out_examples(folder, tmp_path, monkeypatch):
    """Its data file may be named or left out; any other file is scored completely."""
    records = [
        {"q": f"Number {n}?", "completion": "Lily " * (n % 4 + 1)} for n in range(60)
    ]
    for name in ("mine", "other"):
        text = "".join(json.dumps(record | {"from": name}) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    data = DataArgs(
        path=["mine.jsonl"],
        columns=["prompt=q"],
        val_fraction=0.2,
        seed=3,
        template="chatml",
    )
    train = TrainArgs(max_steps=1, global_batch_size=2)
    run = litft.finetune(
        LoRAFinetuneArgs(
            checkpoint_dir=str(folder),
            data=data,
            train=train,
            quantize="nf4",
            out_dir=str(tmp_path / "run"),
        )
    ).folder
    tokenizer = Tokenizer(run / "final")
    held_out = load_data(data, tokenizer, 512, 256).val
    prompts = [
        tokenizer.decode(sample.answer[0].tolist(), skip_special=False)
        for sample in held_out
    ]
    assert 3 < len(prompts) < 25
    for flags in ([], ["--data.path", "mine.jsonl"]):
        output, done = run_eval(
            tmp_path, "--checkpoint_dir", run, "--max_new_tokens", "1", *flags
        )
        assert [answer["prompt"] for answer in output["answers"]] == prompts
        assert (
            "scoring the part that was held out (--data.val_fraction 0.2, --data.seed 3)"
            in done.stderr
        )
        assert f"{run} was trained on nf4 weights, and is scored on those" in done.stderr
    as_trained = RunEvalArgs(checkpoint_dir=str(run), quantize="nf4")
    (note,) = notes_on_adapter(as_trained, resolve(run), None)
    assert note == f"base: {folder}\n"
    (tmp_path / "other").mkdir()
    # same content, another name
    (tmp_path / "other" / "copy.jsonl").write_bytes((tmp_path / "mine.jsonl").read_bytes())
    flags = ["--data.path", "other/copy.jsonl", "--against", run, "--max_new_tokens", "1"]
    output, done = run_eval(tmp_path, "--checkpoint_dir", folder, *flags)
    assert len(output["answers"]) == len(prompts) and "held out" in done.stderr
    flags = [
        "--data.path",
        "copy.jsonl",
        "--data.columns",
        "prompt=q",
        "--max_new_tokens",
        "1",
    ]
    _, done = run_eval(tmp_path / "other", "--checkpoint_dir", run, *flags)
    assert "was trained on mine.jsonl, which is not found from this folder" in done.stderr
    flags = ["--data.path", "mine.jsonl,other.jsonl", "--data.columns", "prompt=q"]
    _, done = run_eval(tmp_path, "--checkpoint_dir", run, *flags, code=2)
    assert (
        "not the same files as" in done.stderr and "score other files alone" in done.stderr
    )
    # by default, the columns of the run
    for columns in (
        ["--data.columns", "prompt=q"],
        [],
    ):
        flags = ["--data.path", "other.jsonl", *columns, "--max_new_tokens", "1"]
        output, done = run_eval(tmp_path, "--checkpoint_dir", run / "final", *flags)
        assert len(output["answers"]) == 60 and "held out" not in done.stderr
    assert "with the columns of" in done.stderr


def test_a_run_is_scored_as_it_was_trained(folder, tmp_path, capsys):
    """A template file may change, and a flag may be given with its default's value."""
    records = [
        {"prompt": f"Number {n}?", "completion": "Lily " * (n % 4 + 1)} for n in range(60)
    ]
    path = write_records(tmp_path / "a.jsonl", records)
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    data = DataArgs(
        path=[str(path)], val_fraction=0.2, template=str(template), mask_prompt=False
    )
    run = litft.finetune(
        LoRAFinetuneArgs(
            checkpoint_dir=str(folder),
            data=data,
            train=TrainArgs(max_steps=1, global_batch_size=2),
            eval=EvalArgs(max_new_tokens=0, forgetting=False),
            out_dir=str(tmp_path / "run"),
        )
    ).folder
    source = resolve(run)

    def resolved(*words):
        return resolve_data(
            parse(RunEvalArgs, ["--checkpoint_dir", str(run), *words]), source
        )[0]

    template.write_text("another one")
    assert resolved().template == "auto" and not resolved().mask_prompt
    assert resolved("--data.mask_prompt", "true").mask_prompt
    assert resolved("--data.template", str(template)).template == str(template)
    assert "has changed" not in capsys.readouterr().err
    write_records(path, [*records[:-1], {"prompt": "Number?", "completion": "Lily."}])
    resolved()
    assert f"warning: {path}: the content has changed since" in capsys.readouterr().err


def test_examples_beyond_the_limit_are_counted(folder, tmp_path, capsys):
    records = [
        {"prompt": "a", "completion": "b " * 300},
        {"prompt": "a " * 300, "completion": "b"},
    ]
    path = write_records(
        tmp_path / "a.jsonl", [*records, {"prompt": "a", "completion": "b"}]
    )
    words = ["--checkpoint_dir", str(folder), "--data.path", str(path)]
    args = parse(RunEvalArgs, [*words, "--data.max_seq_length", "256"])
    readable_by_all(args, [resolve(folder)], "supervised")
    said = capsys.readouterr().err
    assert f"{path}: 1 of 3 records cut to the length limit" in said
    assert f"{path}: 1 of 3 records skipped: no part of an answer is within" in said
    assert "the limit is 256 tokens; --data.max_seq_length sets another one" in said


def test_models_are_scored_on_examples_that_all_can_read(
    folder, checkpoints, make_model, tmp_path
):
    """Models with different context lengths skip different records; answers to the same prompt stay
    paired."""
    short_context = make_model(LlamaConfig, vocab_size=512, max_position_embeddings=160)[1]
    for path in folder.glob("*token*"):
        copyfile(path, short_context / path.name)
    records = [
        {"prompt": "word " * (n * 7 % 60) + f"Say {n}?", "completion": "Lily."}
        for n in range(24)
    ]
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    flags = ["--data.path", "own.jsonl", "--max_new_tokens", "2"]
    output, done = run_eval(
        tmp_path, "--checkpoint_dir", folder, "--against", short_context, *flags
    )
    count = len(output["answers"])
    assert (
        4 < count < 24
        and "--data.max_seq_length 160, which all models can read" in done.stderr
    )
    assert {scores["examples"] for scores in output["scores"].values()} == {count}
    base_only, _ = run_eval(tmp_path, "--checkpoint_dir", folder, *flags)
    base_answers = {
        answer["prompt"]: answer[folder.name] for answer in base_only["answers"]
    }
    assert (
        all(
            base_answers[answer["prompt"]] == answer[folder.name]
            for answer in output["answers"]
        )
        and len(base_answers) == 24
    )
    # in windows of the same length
    (tmp_path / "story.txt").write_text("Once upon a time there was a girl. " * 80)
    flags = ["--data.path", "story.txt", "--limit", "2"]
    output, _ = run_eval(
        tmp_path, "--checkpoint_dir", folder, "--against", short_context, *flags
    )
    base_only, _ = run_eval(
        tmp_path, "--checkpoint_dir", folder, "--data.max_seq_length", "160", *flags
    )
    assert output["scores"][folder.name] == base_only["scores"][folder.name]


def test_different_tokenizers_are_scored_on_examples_that_all_can_read(
    folder, tokenizer_folder, tmp_path, capsys
):
    """The length of an example depends on the tokenizer; one that any model cannot read is skipped
    for all."""
    other = tmp_path / "other"
    copytree(tokenizer_folder("bytes"), other)
    for name in ("config.json", "model.safetensors"):
        copyfile(folder / name, other / name)
    records = [
        {"prompt": "日本語の文 " * (n * 7 % 15) + f"Number {n}?", "completion": "Lily."}
        for n in range(24)
    ]
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    data = DataArgs(
        path=[str(tmp_path / "own.jsonl")], val_fraction=0.0, max_seq_length=160
    )
    args = RunEvalArgs(str(folder), data=data, against=str(other))
    sources = compared_sources(args, source_of(args.model(str(folder))))
    common, other_only = (
        readable_by_all(args, part, "supervised") for part in (sources, sources[1:])
    )
    stderr = capsys.readouterr().err
    assert 4 < len(common) < 24 == len(other_only) and common < other_only
    skipped_count = 24 - len(common)
    assert (
        f"scoring the {len(common)} examples whose answers all models read to the same end, not "
        f"{skipped_count} others" in stderr
    )
    assert "the tokenizers differ" in stderr


@pytest.mark.slow
def test_a_base_without_the_new_tokens_uses_its_own_tokens(folder, examples, tmp_path):
    """The base reads the examples with its own tokens."""
    flags = [
        "--checkpoint_dir",
        folder,
        "--data.path",
        examples,
        "--data.new_tokens",
        "<who>,Lily",
        "--train.max_steps",
        "1",
    ]
    script("finetune/lora.py", *flags, "--out_dir", "tuned", cwd=tmp_path)
    both, _ = run_eval(
        tmp_path,
        "--checkpoint_dir",
        "tuned",
        "--data.path",
        examples,
        "--precision",
        "fp32",
    )
    held_out = ("--data.path", examples, "--data.val_fraction", "0.05")  # as in the run
    base_only, _ = run_eval(
        tmp_path, "--checkpoint_dir", folder, *held_out, "--precision", "fp32"
    )
    assert (
        both["scores"]["base"]
        == base_only["scores"][folder.name]
        != both["scores"]["tuned"]
    )
    done = script(
        "generate/chat.py",
        "--checkpoint_dir",
        "tuned",
        "--max_new_tokens",
        "5",
        cwd=tmp_path,
        text="/base hello\n",
    )
    assert done.stdout.strip()


def test_out_must_be_a_regular_file(folder, examples, tmp_path):
    done = script(
        "scripts/run_eval.py",
        "--checkpoint_dir",
        folder,
        "--data.path",
        examples,
        "--out",
        "/dev/null",
        cwd=tmp_path,
        code=2,
    )
    assert "/dev/null is not a file" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_quantized_models_have_similar_losses(checkpoints, examples, quantize, tmp_path):
    pytest.importorskip("bitsandbytes")
    flags = ["--data.path", examples, "--limit", "3"]
    unquantized, _ = run_eval(tmp_path, "--checkpoint_dir", checkpoints["stories"], *flags)
    quantized, _ = run_eval(
        tmp_path, "--checkpoint_dir", checkpoints["stories"], *flags, "--quantize", quantize
    )
    losses = [output["scores"]["stories"]["loss"] for output in (unquantized, quantized)]
    assert losses[0] != losses[1] and math.isclose(*losses, rel_tol=0.1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --data.path or --tasks"),
        pytest.param(
            ["--tasks", "hellaswagg"], "did you mean hellaswag?", marks=pytest.mark.slow
        ),
        (["--tasks", "nowhere.yaml"], "no such file"),
        (["--data.path", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["--data.path", "nowhere.jsonl", "--out", "nowhere/out.json"],
            "the folder nowhere does not exist",
        ),
        (["--data.path", "nowhere.jsonl", "--limit", "0"], "--limit 0"),
        (["--tasks", "piqa", "--devices", "2"], "--layers_per_device"),
    ],
    ids=str,
)
def test_invalid_flags_are_rejected(folder, flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused("run_eval", "--checkpoint_dir", folder, *flags, capsys=capsys)


@pytest.fixture(scope="module")
def manager():
    """The harness's task manager; building it takes seconds."""
    from litft.evaluation.lm_eval_model import find_tasks

    return find_tasks([], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [broken", "ParserError"),
        ("task: x", "TypeError"),
        (
            TASK_HEADER.replace("{{{{question}}}}", "{{{{qestion}}}}") + KINDS["choice"],
            "'qestion' is undefined",
        ),
        (
            TASK_HEADER.replace("{{{{question}}}}", "{{{{question}}") + KINDS["choice"],
            "TemplateSyntaxError",
        ),
    ],
    ids=["yaml", "no data", "field", "template"],
)
def test_a_broken_task_file_is_reported(folder, tasks, manager, text, message, tmp_path):
    from litft.evaluation.lm_eval_model import run_tasks

    (tmp_path / "wrong.yaml").write_text(text.format(name="wrong", folder=tasks))
    session = open_session(RunEvalArgs(tasks=["any"]).model(str(folder)))
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*look at the task's YAML"):
        run_tasks(session, [str(tmp_path / "wrong.yaml")], manager, 1, {})


@pytest.mark.parametrize("package", ["lm_eval", "evaluate"])
def test_a_missing_package_is_reported_with_the_install_command(folder, package, tmp_path):
    (tmp_path / f"{package}.py").write_text(
        f"raise ModuleNotFoundError('none', name='{package}')"
    )
    arguments = ["scripts/run_eval.py", "--checkpoint_dir", folder, "--tasks", "piqa"]
    done = script(*arguments, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, code=2)
    assert (
        done.stderr.splitlines()[-1]
        == f"error: --tasks needs the package {package}; pip install 'litft[eval]'"
    )


def finetuned_run(folder, tmp_path, name, **data):
    """Finetune for one step and return the run folder."""
    train = TrainArgs(max_steps=1, global_batch_size=2)
    args = LoRAFinetuneArgs(
        checkpoint_dir=str(folder),
        data=DataArgs(**data),
        train=train,
        out_dir=str(tmp_path / name),
    )
    return litft.finetune(args).folder


def test_the_data_of_an_earlier_run_may_be_gone(folder, tmp_path, monkeypatch):
    """What the model's own run held out is scored, with a warning about the earlier run."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        records = [{"prompt": f"{name} {n}?", "completion": "Lily"} for n in range(20)]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(text)
    first = finetuned_run(folder, tmp_path, "one", path=["first.jsonl"], val_fraction=0.3)
    second = finetuned_run(first, tmp_path, "two", path=["second.jsonl"], val_fraction=0.3)
    (tmp_path / "first.jsonl").unlink()
    output, done = run_eval(tmp_path, "--checkpoint_dir", second, "--max_new_tokens", "1")
    assert 0 < len(output["answers"]) < 20
    assert (
        "one was trained on first.jsonl, which is not found from this folder" in done.stderr
    )


@pytest.mark.weekly
def test_a_run_accepts_only_its_own_split(folder, tmp_path, monkeypatch, capsys):
    """A part of its files, another seed or another run would count training examples as held
    out."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "data/train", "data/val"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        records = ({"prompt": f"{name} {n}?", "completion": "Lily"} for n in range(20))
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = finetuned_run(
        folder, tmp_path, "run", path=["a.jsonl", "b.jsonl"], val_fraction=0.3
    )
    flags = ["--checkpoint_dir", run, "--max_new_tokens", "1"]
    capsys.readouterr()
    assert "not the same files" in refused(
        "run_eval", *flags, "--data.path", "b.jsonl", capsys=capsys
    )
    message = refused("run_eval", *flags, "--data.seed", "1", capsys=capsys)
    assert (
        "held out other examples (--data.seed 42)" in message and "leave it out" in message
    )
    message = refused(
        "run_eval", *flags, "--data.columns", "prompt=q,completion=a", capsys=capsys
    )
    assert "--data.columns prompt=q,completion=a: " in message
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "mixed.jsonl").write_text(
        "\n".join([*lines, json.dumps({"prompt": "New?", "completion": "Lily"})]) + "\n"
    )
    warnings = run_eval(tmp_path, *flags, "--data.path", "mixed.jsonl")[1].stderr
    count = int(re.search(r"trained on (\d+) of the 21 scored examples", warnings)[1])
    assert 10 <= count < 20  # the held-out ones are not counted
    limited = run_eval(tmp_path, *flags, "--data.path", "mixed.jsonl", "--limit", "5")[
        1
    ].stderr
    assert re.search(r"trained on [1-5] of the 5 scored examples", limited)
    other = finetuned_run(
        folder, tmp_path, "other", path=["a.jsonl", "b.jsonl"], val_fraction=0.0
    )
    capsys.readouterr()
    message = refused("run_eval", *flags, "--against", other, capsys=capsys)
    assert "was trained on some of what" in message
    chained = finetuned_run(
        run, tmp_path, "chained", path=["a.jsonl", "b.jsonl"], val_fraction=0.3, seed=3
    )
    capsys.readouterr()
    assert "was trained on some of what" in refused(
        "run_eval", "--checkpoint_dir", chained, capsys=capsys
    )
    assert "is the model itself" in refused(
        "run_eval", *flags, "--against", run, capsys=capsys
    )
    folder_run = finetuned_run(folder, tmp_path, "whole", path=["data"])
    capsys.readouterr()
    message = refused(
        "run_eval",
        "--checkpoint_dir",
        folder_run,
        "--data.val_path",
        "a.jsonl",
        capsys=capsys,
    )
    assert "held out other examples (without --data.val_path)" in message
    flags = [
        "--checkpoint_dir",
        folder_run,
        "--max_new_tokens",
        "1",
        "--data.path",
        "data/train.jsonl",
    ]
    # the same file under another name
    flags += ["--data.val_path", str(tmp_path / "data" / "val.jsonl")]
    # the held-out part is the folder's validation file
    output, _ = run_eval(tmp_path, *flags)
    assert (
        all("data/val" in answer["prompt"] for answer in output["answers"])
        and len(output["answers"]) == 20
    )


def test_tokens_within_a_padded_vocabulary_are_new_to_the_base(
    folder, make_model, tmp_path
):
    base = make_model(LlamaConfig, vocab_size=520, max_position_embeddings=256)[1]
    for path in folder.glob("*token*"):
        copyfile(path, base / path.name)
    (tmp_path / "own.jsonl").write_text(
        json.dumps({"prompt": "Who?", "completion": "Lily"}) + "\n"
    )
    run = finetuned_run(
        base, tmp_path, "run", path=[str(tmp_path / "own.jsonl")], new_tokens=["<who>"]
    )
    args = RunEvalArgs(str(run))
    source = source_of(args.model(str(run)))
    assert len(compared_sources(args, source)) == 2


@pytest.mark.weekly
def test_a_task_may_stop_at_a_special_token(checkpoints, tmp_path):
    """Many chat tasks of the harness stop at <|im_end|>, also for models whose own end token is
    another one."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = tmp_path / "other end"
    copytree(checkpoints["SmolLM2-135M-Instruct"], folder)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(fields | {"eos_token_id": 0}))
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(fields | {"eos_token": "<|endoftext|>"})
    )
    header = TASK_HEADER.format(name="stops", folder=tmp_path)
    header = re.sub(
        "doc_to_text: .*",
        r'doc_to_text: "<|im_start|>user\\n{{question}}<|im_end|>\\n<|im_start|>assistant\\n"',
        header,
    )
    body = 'output_type: generate_until\ndoc_to_target: "{{answer}}"\ngeneration_kwargs:\n'
    body += '  until: ["<|im_end|>"]\n  max_gen_toks: 60\n  do_sample: false\nmetric_list:\n  - metric: exact_match\n'
    (tmp_path / "stops.yaml").write_text(header + body)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer(folder)
    (end,) = tokenizer.encode("<|im_end|>", bos=False)
    lines = []
    for question in ("What is the capital of France?", "What is the capital of Italy?"):
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = torch.tensor([tokenizer.encode(prompt, bos=False)])
        output = model.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=end)
        output = output[0, ids.shape[1] :]
        answer, mark, _ = tokenizer.decode(output.tolist(), skip_special=False).partition(
            "<|im_end|>"
        )
        assert mark, "the answer does not end"
        lines.append(json.dumps({"question": question, "answer": answer}) + "\n")
    (tmp_path / "questions.jsonl").write_text("".join(lines))
    scores, _ = run_eval(
        tmp_path, "--checkpoint_dir", folder, "--tasks", "stops.yaml", "--precision", "fp32"
    )
    settings = {
        "model_args": {"pretrained": str(folder), "dtype": "float32"},
        "device": "cpu",
    }
    reference = simple_evaluate(
        "hf", tasks=[str(tmp_path / "stops.yaml")], task_manager=TaskManager(), **settings
    )
    assert reference["results"]["stops"]["exact_match,none"] == 1
    assert (
        "stops: exact_match" in str(scores)
        and scores["scores"][folder.name]["stops: exact_match"] == 1
    )
