"""What a run would do: the commands that only look, the largest micro-batch, and a million samples."""

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
from conftest import rows_of, script, write_records

from litft.data.packing import Layout, num_slots
from litft.data.sampler import Sampler, largest_micro_batch

RECORDS = [{"instruction": f"Say {n}", "input": "", "output": "once upon a time " * (n % 7)} for n in range(40)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Forty examples: six have an empty answer, one a control token behind it, one ends without an answer."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b</s>"}]
    records = [*RECORDS, {"messages": talk}, {"messages": [*talk, talk[0]]}]
    return write_records(tmp_path_factory.mktemp("preview") / "data.jsonl", records)


def test_a_dry_run_shows_everything_and_writes_nothing(tiny, data, tmp_path):
    words = ["finetune/lora.py", "--checkpoint_dir", tiny, "--data.path", data, "--dry_run"]
    done = script(*words, "--data.val_fraction", "0.1", "--data.max_seq_length", "128", cwd=tmp_path)
    text = done.stdout
    assert "42 records (alpaca 40, messages 2)" in text
    assert "6 skipped: the answer is empty" in text and "line 1, line 8, line 15" in text
    assert "2 with an end token written after an answer" in text and "1 ending in a turn without an answer" in text
    counts = r"(\d+) training and (\d+) validation examples; (\d+) steps of 16, 3 epochs of (\d+), on 1 device"
    kept, held_out, steps, epoch = map(int, re.search(counts, text).groups())
    assert kept + held_out == 36 and 1 <= held_out <= 9 and epoch == kept and steps == -(-3 * kept // 16)
    assert f"a row for each example: {3 * kept / steps:.1f} rows a step" in text and "% padding" in text  # no two fit
    assert text.count("--- training example") == 3 and "once upon a time</s>⟧" in text
    assert "58,336 parameters; lora trains 11,712 (20.08%)" in text
    assert "MiB at its peak, with micro-batches of 1 x" in text and "of its peak" in text
    assert not list(tmp_path.iterdir())


def test_what_the_run_itself_says(tiny, data, tmp_path):
    words = ["finetune/lora.py", "--checkpoint_dir", tiny, "--data.path", data, "--train.max_steps", "2"]
    text = script(*words, cwd=tmp_path).stdout
    assert "42 records (alpaca 40, messages 2)" in text and "6 skipped: the answer is empty" in text
    assert "packed into rows of at most 256 tokens" in text and "MiB at its peak" in text


def test_a_terminal_gets_colour_and_a_file_gets_marks(tiny, data, tmp_path):
    words = ["scripts/prepare_data.py", "--checkpoint_dir", tiny, "--data.path", data, "--show", "1"]
    assert "⟦" in script(*words, cwd=tmp_path).stdout
    ours, theirs = pty.openpty()
    process = conftest.start(*words, stdout=theirs, cwd=tmp_path)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # how a terminal ends
        pass
    assert process.wait() == 0 and b"\033[32m" in shown and "⟦".encode() not in shown


@pytest.mark.parametrize(
    "name, counts",
    [
        ("alpaca_2k.json", "2,000 records (alpaca)"),
        ("gsm8k_500.jsonl", "500 records (question)"),
        ("messages_500.jsonl", "500 records (messages)"),
        ("tool_calls_300.json", "300 records (sharegpt)"),
        pytest.param("samsum_1400.jsonl", "1,400 records (prompt)", marks=pytest.mark.slow),
        pytest.param("sharegpt_500.json", "500 records (sharegpt)", marks=pytest.mark.slow),
        pytest.param("wikitext2_valid.txt", "1 record (text)", marks=pytest.mark.slow),
    ],
)
def test_real_files_prepare(checkpoints, shared, tmp_path, name, counts):
    folder, template = checkpoints["SmolLM2-135M-Instruct"], shared / "chat_templates" / "Qwen-Qwen2.5-7B-Instruct.jinja"
    words = ["scripts/prepare_data.py", "--checkpoint_dir", folder, "--data.path", shared / "data" / name]
    tools = ["--data.template", template] if name.startswith("tool") else []  # SmolLM2's own leaves calls out
    text = script(*words, *tools, cwd=tmp_path).stdout
    print(text)
    assert counts in text and "bad" not in text
    train, val = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:training and|validation)", text)[:2])
    skipped = sum(int(n.replace(",", "")) for n in re.findall(r"([\d,]+) skipped", text))
    assert name.startswith("wikitext") or train + val + skipped == int(counts.split()[0].replace(",", ""))


def test_a_template_that_cannot_show_what_is_to_be_learned_is_named(checkpoints, shared, tmp_path):
    path = shared / "data" / "tool_calls_300.json"
    words = ["--checkpoint_dir", checkpoints["SmolLM2-135M-Instruct"], "--data.path", path]
    done = script("scripts/prepare_data.py", *words, cwd=tmp_path, code=2)
    assert "record 0: the chat template leaves out a tool call; pass another --data.template" in done.stderr


def test_a_styles_tokens_that_the_tokenizer_lacks_are_told(tiny, data, tmp_path):
    words = ["scripts/prepare_data.py", "--checkpoint_dir", tiny, "--data.path", data, "--data.template", "chatml"]
    text = script(*words, cwd=tmp_path).stdout
    assert "has no token for the template's <|im_start|>,<|im_end|>; --data.new_tokens" in text
    text = script(*words, "--data.new_tokens", "<|im_start|>,<|im_end|>", cwd=tmp_path).stdout
    assert "does not know" not in text


def test_duplicates_of_validation_samples_are_told(tiny, tmp_path):
    write_records(tmp_path / "train.json", RECORDS)
    write_records(tmp_path / "val.json", RECORDS[3:6])
    words = ["--checkpoint_dir", tiny, "--data.path", "train.json", "--data.val_path", "val.json"]
    text = script("scripts/prepare_data.py", *words, cwd=tmp_path).stdout
    assert "warning: 3 training examples are also in the validation set" in text


def test_several_paths_and_other_names_on_the_command_line(tiny, tmp_path):
    write_records(tmp_path / "a.json", RECORDS[1:6])
    write_records(tmp_path / "b.jsonl", [{"q": "Why?", "a": "So."}] * 5)
    words = ["--checkpoint_dir", tiny, "--data.path", "a.json,b.jsonl", "--data.columns", "question=q,answer=a"]
    words += ["--data.weights", "2,0.5", "--train.epochs", "1", "--data.val_fraction", "0", "--dry_run"]
    text = script("finetune/lora.py", *words, "--train.global_batch_size", "4", cwd=tmp_path).stdout
    assert "a.json: 5 records (alpaca)" in text and "b.jsonl: 5 records (question)" in text
    assert "10 training and 0 validation examples; 3 steps of 4, 1 epochs of 12" in text  # 2 x 5 + 5 / 2 examples


def test_a_data_set_of_the_hub(tiny, tmp_path):
    """As `datasets` keeps it once it has been downloaded: there is no network here."""
    pytest.importorskip("datasets")
    (tmp_path / "cache.py").write_text(HUB)
    script(tmp_path / "cache.py", cwd=tmp_path)
    words = ["scripts/prepare_data.py", "--checkpoint_dir", tiny, "--data.path"]
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = script(*words, "owner/name", cwd=tmp_path, env=env)
    assert "owner/name, train: 10 records (alpaca)" in done.stdout and "10 training and 3 validation examples" in done.stdout
    done = script(*words, "owner/other", cwd=tmp_path, env=env, code=2)
    assert "owner/other is not a local file or folder, and not a data set on the hub" in done.stderr


HUB = """
import os
from datasets import Dataset, DatasetInfo, SplitInfo
from datasets.arrow_writer import ArrowWriter
from datasets.splits import SplitDict
folder = "hf/datasets/owner___name/default/0.0.0/" + "0123456789" * 4
os.makedirs(folder)
splits = SplitDict(dataset_name="name")
for split, count in (("train", 10), ("validation", 3)):
    rows = Dataset.from_list([{"instruction": f"Say {split} {n}", "input": "", "output": str(n)} for n in range(count)])
    with ArrowWriter(path=f"{folder}/name-{split}.arrow", features=rows.features) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    splits.add(SplitInfo(split, num_examples=count, dataset_name="name"))
values = dict(builder_name="json", dataset_name="name", config_name="default", version="0.0.0")
DatasetInfo(features=rows.features, splits=splits, **values).write_to_directory(folder)
"""


def test_a_plan_needs_a_config_alone(shared, tmp_path):
    words = ["scripts/plan.py", "--checkpoint_dir", shared / "configs" / "llama-3-8b", "--chip", "H100"]
    text = script(*words, cwd=tmp_path).stdout
    assert "8,030,261,248 parameters; lora trains 20,971,520 (0.26%)" in text
    assert "weights 15.0" in text and "minutes at 40% of its peak" in text
    small = script(*words, "--quantize", "nf4", cwd=tmp_path).stdout
    assert "weights 5.69" in small  # 6.98e9 x (1/2 + 4/64), the embedding and the head in bf16, factors in fp32
    assert "whose peak is not known" in script(*words, "--chip", "abacus", cwd=tmp_path).stdout
    done = script(*words, "--method", "full", "--quantize", "nf4", cwd=tmp_path, code=2)
    assert "full fine-tuning changes every weight" in done.stderr


@pytest.mark.parametrize("layout", [Layout(4), Layout(1, 100), Layout(3, 60, 2)])
def test_the_largest_micro_batch_of_a_run_is_found(layout):
    """Against all micro-batches of all steps."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        lengths = draw.integers(1, 60, draw.integers(5, 200))
        order, size = Sampler([len(lengths)], int(draw.integers(100))), int(draw.integers(1, 20))
        samples = SimpleNamespace(lengths=lengths, supervised=lengths - draw.integers(0, lengths))
        found = largest_micro_batch(samples, order, layout, 2 * len(lengths), size)
        most, learned, counts = 0, 0, []
        for start in range(0, 2 * len(lengths), size):
            numbers = np.array(order.indices(start, min(start + size, 2 * len(lengths))))
            batches = layout.plan(lengths[numbers].tolist())
            most = max(most, *(num_slots(lengths[numbers], rows) for rows in batches))
            learned = max(learned, *(sum(samples.supervised[numbers[row]].sum() for row in rows) for rows in batches))
            counts.append(len(batches) // layout.ranks)
        assert num_slots(lengths, found.rows) == most
        assert found.max_targets == learned and found.accumulates == (max(counts) > 1)


def test_the_largest_micro_batch_comes_at_step_1(tiny, tmp_path):
    """One example of thirty is forty times as long, and the order puts it late: memory peaks at the first step."""
    records = [{"instruction": "a", "output": "b" * (2 if n != 7 else 1500)} for n in range(30)]
    write_records(tmp_path / "a.json", records)
    longer = Path(shutil.copytree(tiny, tmp_path / "model")) / "config.json"
    longer.write_text(json.dumps(json.loads(longer.read_text()) | {"max_position_embeddings": 2048}))
    words = ["--checkpoint_dir", "model", "--data.path", "a.json", "--data.val_fraction", "0"]
    words += ["--data.max_seq_length", "1600"]
    words += ["--train.global_batch_size", "1", "--train.epochs", "1", "--out_dir", "run"]
    script("finetune/full.py", *words, cwd=tmp_path)
    rows = rows_of(tmp_path / "run")
    tokens = np.diff([0, *(int(row["tokens"]) for row in rows if row["step"] != "0")])
    memory = [float(row["memory_gib"]) for row in rows if row["step"] != "0"]
    assert tokens.argmax() > 0 and memory[-1] - memory[0] < 0.005, (tokens.argmax(), memory)


@pytest.mark.slow
def test_a_million_samples_start_within_ten_seconds(tiny, tmp_path):
    with (tmp_path / "a.jsonl").open("w") as file:
        for n in range(1_000_000):
            file.write(json.dumps({"text": str(n)}) + "\n")
    words = ["--checkpoint_dir", tiny, "--data.path", "a.jsonl", "--train.max_steps", "2", "--out_dir", "run"]
    words += ["--save.interval", "1", "--eval.interval", "0"]
    begun = time.perf_counter()
    script("finetune/lora.py", *words, cwd=tmp_path)
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    text = script("finetune/lora.py", *words, "--resume", cwd=tmp_path).stdout
    again = time.perf_counter() - begun
    print(f"a million samples: {first:.0f} s at first, {again:.1f} s when resumed, interpreter and all")
    assert "1,000,000 records" in text and "all 2 steps are done" in text and again < 15
