"""Before a run: dry runs, prepare_data and plan, the largest micro-batch, and a million samples."""

import json
import os
import pty
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
from conftest import config_folder, rows_of, script, write_records

from litft.data.packing import BatchLayout, num_slots
from litft.data.sampler import SampleOrder, largest_micro_batch

RECORDS = [
    {"instruction": f"Say {n}", "input": "", "output": "once upon a time " * (n % 7)}
    for n in range(40)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """42 records: six have an empty answer, two an end token after an answer, and one of those ends
    without an answer."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b</s>"}]
    records = [*RECORDS, {"messages": talk}, {"messages": [*talk, talk[0]]}]
    return write_records(tmp_path_factory.mktemp("preview") / "data.jsonl", records)


def test_a_dry_run_shows_everything_and_writes_nothing(tiny, data, tmp_path):
    command = [
        "finetune/lora.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        data,
        "--dry_run",
    ]
    done = script(
        *command, "--data.val_fraction", "0.1", "--data.max_seq_length", "128", cwd=tmp_path
    )
    text = done.stdout
    assert "42 records (alpaca 40, messages 2)" in text
    assert "6 skipped: the answer is empty" in text and "line 1, line 8, line 15" in text
    assert (
        "2 with an end token written after an answer" in text
        and "1 ending in a turn without an answer" in text
    )
    counts = r"(\d+) training and (\d+) validation examples; (\d+) steps of 16, 3 epochs of (\d+), on 1 device"
    training, held_out, steps, epoch = map(int, re.search(counts, text).groups())
    assert (
        training + held_out == 36
        and 1 <= held_out <= 9
        and epoch == training
        and steps == -(-3 * training // 16)
    )
    # no two examples fit into a row
    assert (
        f"a row for each example: {3 * training / steps:.1f} rows a step" in text
        and "% padding" in text
    )
    assert text.count("--- training example") == 3 and "once upon a time</s>⟧" in text
    assert "58,336 parameters; lora trains 46,848 (80.31%)" in text
    assert "MiB at its peak, with micro-batches of 1 x" in text and "of its peak" in text
    assert not list(tmp_path.iterdir())


def test_a_run_prints_its_data_and_memory(tiny, data, tmp_path):
    command = [
        "finetune/lora.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        data,
        "--train.max_steps",
        "2",
    ]
    text = script(*command, cwd=tmp_path).stdout
    assert (
        "42 records (alpaca 40, messages 2)" in text
        and "6 skipped: the answer is empty" in text
    )
    assert "packed into rows of at most 256 tokens" in text and "MiB at its peak" in text


def test_a_terminal_gets_colour_and_a_file_gets_marks(tiny, data, tmp_path):
    command = [
        "scripts/prepare_data.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        data,
        "--show",
        "1",
    ]
    assert "⟦" in script(*command, cwd=tmp_path).stdout
    controller, terminal = pty.openpty()
    process = conftest.start(*command, stdout=terminal, cwd=tmp_path)
    os.close(terminal)
    output = b""
    try:
        while chunk := os.read(controller, 65536):
            output += chunk
    except OSError:  # the terminal is closed
        pass
    assert process.wait() == 0 and b"\033[32m" in output and "⟦".encode() not in output


@pytest.mark.parametrize(
    "name, counts",
    [
        pytest.param("alpaca_2k.json", "2,000 records (alpaca)", marks=pytest.mark.weekly),
        pytest.param("gsm8k_500.jsonl", "500 records (question)", marks=pytest.mark.slow),
        pytest.param(
            "messages_500.jsonl", "500 records (messages)", marks=pytest.mark.slow
        ),
        ("tool_calls_300.json", "300 records (sharegpt)"),
        pytest.param("samsum_1400.jsonl", "1,400 records (prompt)", marks=pytest.mark.slow),
        pytest.param("sharegpt_500.json", "500 records (sharegpt)", marks=pytest.mark.slow),
        pytest.param("wikitext2_valid.txt", "1 record (text)", marks=pytest.mark.slow),
    ],
)
def test_real_files_are_prepared(checkpoints, shared, tmp_path, name, counts):
    folder, template = (
        checkpoints["SmolLM2-135M-Instruct"],
        shared / "chat_templates" / "Qwen-Qwen2.5-7B-Instruct.jinja",
    )
    command = [
        "scripts/prepare_data.py",
        "--checkpoint_dir",
        folder,
        "--data.path",
        shared / "data" / name,
    ]
    # SmolLM2's own template leaves out tool calls
    tools = ["--data.template", template] if name.startswith("tool") else []
    text = script(*command, *tools, cwd=tmp_path).stdout
    print(text)
    assert counts in text and "bad" not in text
    train, val = (
        int(n.replace(",", ""))
        for n in re.findall(r"([\d,]+) (?:training and|validation)", text)[:2]
    )
    skipped = sum(int(n.replace(",", "")) for n in re.findall(r"([\d,]+) skipped", text))
    assert name.startswith("wikitext") or train + val + skipped == int(
        counts.split()[0].replace(",", "")
    )


def test_all_findings_are_written_to_a_file(tiny, tmp_path):
    """A report names ten records of each finding; the file has all, and replaces no other file."""
    records = [{"prompt": "Name it.", "completion": "It is the same for all of them."}] * 14
    records += [{"prompt": f"Number {n}?", "completion": ""} for n in range(12)]
    data = write_records(tmp_path / "data.jsonl", records)
    command = ["scripts/prepare_data.py", "--checkpoint_dir", tiny, "--data.path", data]
    done = script(*command, "--findings", "findings.jsonl", cwd=tmp_path)
    assert "25 findings are in findings.jsonl" in done.stderr
    assert "all of them: prepare_data --findings FILE" in done.stdout
    found = [
        json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()
    ]
    copies = []
    empty = []
    for finding in found:
        assert finding["file"] == str(data)
        if finding["finding"].startswith("equal to an earlier record"):
            assert finding["earlier"] == "line 1"
            copies.append(finding["number"])
        elif "the answer is empty" in finding["finding"]:
            empty.append(finding["record"])
    assert copies == list(range(2, 15))
    assert empty == [f"line {number}" for number in range(15, 27)]

    # it is written again, but the data is not overwritten
    script(*command, "--findings", "findings.jsonl", cwd=tmp_path)
    before = data.read_text()
    done = script(*command, "--findings", data, cwd=tmp_path, code=2)
    assert "the file exists and has other content; name another" in done.stderr
    assert data.read_text() == before


def test_a_template_that_leaves_out_a_tool_call_is_reported(checkpoints, shared, tmp_path):
    path = shared / "data" / "tool_calls_300.json"
    flags = ["--checkpoint_dir", checkpoints["SmolLM2-135M-Instruct"], "--data.path", path]
    done = script("scripts/prepare_data.py", *flags, cwd=tmp_path, code=2)
    message = "record 0: the chat template leaves out a tool call (no built-in template has tools)"
    assert f"{message}; pass another --data.template" in done.stderr


def test_template_tokens_that_the_tokenizer_lacks_are_reported(tiny, data, tmp_path):
    command = [
        "scripts/prepare_data.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        data,
        "--data.template",
        "chatml",
    ]
    text = script(*command, cwd=tmp_path).stdout
    assert (
        "has no token for the template's <|im_start|>,<|im_end|>; --data.new_tokens" in text
    )
    text = script(
        *command, "--data.new_tokens", "<|im_start|>,<|im_end|>", cwd=tmp_path
    ).stdout
    assert "does not know" not in text


def test_new_tokens_that_no_example_has_are_reported(tiny, tmp_path):
    """Such as two tokens that are separated by a space instead of a comma."""
    records = [{"prompt": f"<q> {n}", "completion": "once <a>"} for n in range(20)]
    path = write_records(tmp_path / "a.jsonl", records)
    command = [
        "finetune/lora.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        path,
        "--dry_run",
    ]
    warning = (
        "warning: no example has the new {}, so nothing trains it; commas separate tokens"
    )
    done = script(*command, "--data.new_tokens", "<q> <a>,<q>", cwd=tmp_path)
    assert warning.format("'<q> <a>'") in done.stdout
    # one that the vocabulary has, and that is no special token
    done = script(*command, "--data.new_tokens", "<q>,<a>,once", cwd=tmp_path)
    assert "no example has the new" not in done.stdout


def test_duplicates_of_validation_samples_are_reported(tiny, tmp_path):
    write_records(tmp_path / "train.json", RECORDS)
    write_records(tmp_path / "val.json", RECORDS[3:6])
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        "train.json",
        "--data.val_path",
        "val.json",
    ]
    text = script("scripts/prepare_data.py", *flags, cwd=tmp_path).stdout
    assert "warning: 3 training examples are also in the validation set" in text


def test_several_paths_and_other_columns_on_the_command_line(tiny, tmp_path):
    write_records(tmp_path / "a.json", RECORDS[1:6])
    write_records(tmp_path / "b.jsonl", [{"q": "Why?", "a": "So."}] * 5)
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        "a.json,b.jsonl",
        "--data.columns",
        "question=q,answer=a",
    ]
    flags += [
        "--data.weights",
        "2,0.5",
        "--train.epochs",
        "1",
        "--data.val_fraction",
        "0",
        "--dry_run",
    ]
    text = script(
        "finetune/lora.py", *flags, "--train.global_batch_size", "4", cwd=tmp_path
    ).stdout
    assert "a.json: 5 records (alpaca)" in text and "b.jsonl: 5 records (question)" in text
    # 2 x 5 + 5 / 2 examples
    assert "10 training and 0 validation examples; 3 steps of 4, 1 epoch of 12" in text


@pytest.mark.slow
def test_a_data_set_from_the_hub(tiny, tmp_path):
    """Read from the cache of `datasets`, since there is no network."""
    pytest.importorskip("datasets")
    (tmp_path / "cache.py").write_text(HUB)
    script(tmp_path / "cache.py", cwd=tmp_path)
    command = ["scripts/prepare_data.py", "--checkpoint_dir", tiny, "--data.path"]
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = script(*command, "owner/name", cwd=tmp_path, env=env)
    assert (
        "owner/name, train: 10 records (alpaca)" in done.stdout
        and "10 training and 3 validation examples" in done.stdout
    )
    for words in (["owner/name", "--data.split", "train_sft"], ["owner/name:train_sft"]):
        done = script(
            *command,
            *words,
            "--data.val_path",
            "owner/name:test_sft",
            cwd=tmp_path,
            env=env,
        )
        assert (
            "owner/name, train_sft: 7 records" in done.stdout
            and "7 training and 2 validation" in done.stdout
        )
    done = script(*command, "owner/name:train_rl", cwd=tmp_path, env=env, code=2)
    assert (
        "owner/name has no split train_rl; it has train, validation, train_sft, test_sft"
        in done.stderr
    )
    done = script(
        *command,
        "owner/name",
        "--data.val_path",
        "owner/name",
        cwd=tmp_path,
        env=env,
        code=2,
    )
    assert (
        "--data.val_path owner/name: no such file; for a data set on the hub, name its split"
        in done.stderr
    )
    done = script(*command, "owner/name,owner/name:validation", cwd=tmp_path, env=env)
    # not both trained on and validated
    assert "held out" not in done.stdout and "13 records" not in done.stdout
    done = script(
        *command, "data.json", "--data.split", "train_sft", cwd=tmp_path, env=env, code=2
    )
    assert "--data.split train_sft: no --data.path is a data set on the hub" in done.stderr
    done = script(*command, "owner/other", cwd=tmp_path, env=env, code=2)
    assert (
        "owner/other is not a local file or folder, and not a data set on the hub"
        in done.stderr
    )


HUB = """
import os
from datasets import Dataset, DatasetInfo, SplitInfo
from datasets.arrow_writer import ArrowWriter
from datasets.splits import SplitDict
folder = "hf/datasets/owner___name/default/0.0.0/" + "0123456789" * 4
os.makedirs(folder)
splits = SplitDict(dataset_name="name")
for split, count in (("train", 10), ("validation", 3), ("train_sft", 7), ("test_sft", 2)):
    rows = Dataset.from_list([{"instruction": f"Say {split} {n}", "input": "", "output": str(n)} for n in range(count)])
    with ArrowWriter(path=f"{folder}/name-{split}.arrow", features=rows.features) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    splits.add(SplitInfo(split, num_examples=count, dataset_name="name"))
values = dict(builder_name="json", dataset_name="name", config_name="default", version="0.0.0")
DatasetInfo(features=rows.features, splits=splits, **values).write_to_directory(folder)
"""


def test_a_plan_needs_only_a_config(tmp_path):
    command = [
        "scripts/plan.py",
        "--checkpoint_dir",
        config_folder("llama-3-8b"),
        "--chip",
        "H100",
    ]
    text = script(*command, cwd=tmp_path).stdout
    assert "8,030,261,248 parameters; lora trains 83,886,080 (1.04%)" in text
    assert "weights 15.2" in text and "minutes at 40% of its peak" in text
    quantized = script(*command, "--quantize", "nf4", cwd=tmp_path).stdout
    # 6.98e9 x (1/2 + 4/64), the embedding and the head in bf16, factors in fp32
    assert "weights 5.93" in quantized
    unknown = script(*command, "--chip", "abacus", cwd=tmp_path, code=2).stderr
    assert (
        "its peak is not known; known chips:" in unknown
        and "RTX 3060" in unknown
        and "H100," in unknown
    )
    budget = [
        "scripts/plan.py",
        "--checkpoint_dir",
        config_folder("llama-3.2-1b"),
        "--budget",
        "80GB",
    ]
    without_chip = script(*budget, cwd=tmp_path).stdout
    assert "H100" not in without_chip and "--chip NAME adds the time" in without_chip
    assert "1 x RTX 3090" in script(*budget, "--chip", "RTX 3090", cwd=tmp_path).stdout
    done = script(*command, "--method", "full", "--quantize", "nf4", cwd=tmp_path, code=2)
    assert "full fine-tuning changes every weight" in done.stderr


@pytest.mark.parametrize(
    "layout", [BatchLayout(4), BatchLayout(1, 100), BatchLayout(3, 60, 2)]
)
def test_the_largest_micro_batch_of_a_run_is_found(layout):
    """Compare with all micro-batches of all steps."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        lengths = generator.integers(1, 60, generator.integers(5, 200))
        order, size = (
            SampleOrder([len(lengths)], int(generator.integers(100))),
            int(generator.integers(1, 20)),
        )
        samples = SimpleNamespace(
            lengths=lengths,
            supervised=lengths - generator.integers(0, lengths),
            document_lengths=lengths.__getitem__,
        )
        largest = largest_micro_batch(samples, order, layout, 2 * len(lengths), size)
        max_slots, max_targets, max_documents, counts = 0, 0, 0, []
        for start in range(0, 2 * len(lengths), size):
            indices = np.array(order.indices(start, min(start + size, 2 * len(lengths))))
            batches = layout.plan(lengths[indices].tolist())
            max_slots = max(
                max_slots, *(num_slots(lengths[indices], rows) for rows in batches)
            )
            max_targets = max(
                max_targets,
                *(
                    sum(samples.supervised[indices[row]].sum() for row in rows)
                    for rows in batches
                ),
            )
            # the padding of a row counts as a document
            for rows in batches:
                max_documents = max(max_documents, sum(map(len, rows)) + len(rows))
            counts.append(len(batches) // layout.ranks)
        assert num_slots(lengths, largest.rows) == max_slots
        assert largest.max_documents == max_documents
        assert largest.max_targets == max_targets and largest.accumulates == (
            max(counts) > 1
        )


def test_the_largest_micro_batch_is_tried_at_step_1(tiny, tmp_path):
    """One of thirty examples is forty times as long and comes late, but memory peaks at the first
    step."""
    records = [
        {"instruction": "a", "output": "b" * (2 if n != 7 else 1500)} for n in range(30)
    ]
    write_records(tmp_path / "a.json", records)
    config = Path(shutil.copytree(tiny, tmp_path / "model")) / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048})
    )
    flags = [
        "--checkpoint_dir",
        "model",
        "--data.path",
        "a.json",
        "--data.val_fraction",
        "0",
    ]
    flags += ["--data.max_seq_length", "1600"]
    flags += ["--train.global_batch_size", "1", "--train.epochs", "1", "--out_dir", "run"]
    script("finetune/full.py", *flags, cwd=tmp_path)
    rows = rows_of(tmp_path / "run")
    tokens = np.diff([0, *(int(row["tokens"]) for row in rows if row["step"] != "0")])
    memory = [float(row["memory_gib"]) for row in rows if row["step"] != "0"]
    assert tokens.argmax() > 0 and memory[-1] - memory[0] < 0.005, (tokens.argmax(), memory)


@pytest.mark.weekly
def test_a_run_of_many_samples_resumes_quickly(tiny, tmp_path, cases):
    """pytest --stress 5: a million samples."""
    count = cases(200_000)
    with (tmp_path / "a.jsonl").open("w") as file:
        for n in range(count):
            file.write(json.dumps({"text": str(n)}) + "\n")
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        "a.jsonl",
        "--train.max_steps",
        "2",
        "--out_dir",
        "run",
    ]
    flags += ["--save.interval", "1", "--eval.interval", "0"]
    start_time = time.perf_counter()
    script("finetune/lora.py", *flags, cwd=tmp_path)
    first_seconds = time.perf_counter() - start_time
    start_time = time.perf_counter()
    text = script("finetune/lora.py", *flags, "--resume", cwd=tmp_path).stdout
    resumed_seconds = time.perf_counter() - start_time
    print(
        f"{count:,} samples: {first_seconds:.0f} s at first, {resumed_seconds:.1f} s when resumed, "
        "interpreter and all"
    )
    assert (
        f"{count:,} records" in text
        and "all 2 steps are done" in text
        and resumed_seconds < 15
    )


FEW = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(6)]


def test_a_step_of_far_more_examples_than_there_are_is_refused(tiny, tmp_path):
    path = write_records(tmp_path / "few.jsonl", FEW)
    words = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        path,
        "--data.val_fraction",
        "0",
        "--dry_run",
    ]
    words += ["--train.max_steps", "1", "--train.global_batch_size", "60000"]
    done = script("finetune/lora.py", *words, cwd=tmp_path, code=2)
    assert (
        "--train.global_batch_size 60,000: a step would have each of the 6 training examples more "
        "than" in done.stderr
    )


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("lora", ["--lora.bias", "all"]),
        ("lora", ["--train.learning_rate", "5"]),
        ("full", []),
    ],
)
def test_no_rate_is_advised_for_few_examples(tiny, tmp_path, command, flags):
    """LoRA's default is right for them, and a higher one, of a user or of full fine-tuning, would
    diverge."""
    path = write_records(tmp_path / "few.jsonl", FEW)
    words = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        path,
        "--data.val_fraction",
        "0",
        "--train.decay_fraction",
        "0.5",
        "--train.warmup_steps",
        "500",
        "--data.date",
        "2026-11-21",
        "--dry_run",
        *flags,
    ]
    done = script(f"finetune/{command}.py", *words, cwd=tmp_path)
    assert "warning: --train.warmup_steps 500 is more than the run's 2 steps" in done.stdout
    assert "too few to learn much" in done.stdout
    assert (
        "note: --train.decay_fraction 0.5 has no effect: only --train.lr_schedule wsd"
        in (done.stdout)
    )
    assert (
        "note: --data.date 2026-11-21 has no effect: the chat template prints no date"
        in (done.stdout)
    )
    about_biases = "note: --lora.bias all has no effect: the base has no biases"
    assert (about_biases in done.stdout) == ("--lora.bias" in flags)
    assert "try --train.epochs 20 --train.global_batch_size 4\n" in done.stdout
    assert "nothing is held out for validation: --data.val_fraction is 0" in done.stdout
    assert done.stdout.count("no GPU was found: running on the CPU") == 1


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            [{"prompt": "word " * 3000, "completion": "x"}],
            "nothing is held out for validation: no example of --data.val_path can be used; see "
            "above why",
        ),
        (
            [{"prompt": "Is it held out?", "completion": "Yes."}],
            "warning: 1 validation example cannot tell how good the model is; give more of them in "
            "--data.val_path",
        ),
    ],
)
def test_a_validation_file_with_too_few_examples_is_named(
    tiny, tmp_path, records, expected
):
    path = write_records(tmp_path / "few.jsonl", FEW)
    held_out = write_records(tmp_path / "held_out.jsonl", records)
    flags = ["--data.path", path, "--data.val_path", held_out]
    done = script(
        "finetune/lora.py", "--checkpoint_dir", tiny, *flags, "--dry_run", cwd=tmp_path
    )
    assert expected in done.stdout
