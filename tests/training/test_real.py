"""End to end on real data: SmolLM2-135M-Instruct learns from Alpaca, and PEFT and transformers open
the result.

Each test takes a minute or more, hence slow. LITFT_TEST_BATCH=16 is the default of the command and
takes several times as long:

    LITFT_TEST_BATCH=16 pytest -n 0 -m slow tests/training/test_real.py
"""

import csv
import json
import os
import re

import pytest
import torch
from conftest import script, write_records

import litft
from litft.args import DataArgs, TrainArgs
from litft.data.dataset import load_data
from litft.data.packing import collate
from litft.data.sampler import SampleOrder
from litft.evaluation.scoring import evenly_spaced
from litft.training.lr_schedule import learning_rate

pytestmark = pytest.mark.slow

BATCH = int(os.environ.get("LITFT_TEST_BATCH", 4))
STEPS, VALIDATION = 3, BATCH  # VALIDATION is in samples; a micro-batch has four
RATE = 5e-4
MESSAGES = [{"role": "user", "content": "Name three primary colours."}]


@pytest.fixture(scope="module")
def examples(shared, tmp_path_factory):
    """Two hundred of Alpaca's examples, each answer cut at the first sentence that ends after a
    hundred characters."""
    records = json.loads((shared / "data" / "alpaca_2k.json").read_text("utf-8"))[:200]
    for record in records:
        start, rest = record["output"][:100], record["output"][100:]
        record["output"] = start + re.match(r"[^.!?\n]*[.!?]?", rest)[0]
    return write_records(tmp_path_factory.mktemp("alpaca") / "short.json", records)


@pytest.fixture(scope="module")
def run(checkpoints, examples, tmp_path_factory):
    """The run folder out/smol."""
    folder = tmp_path_factory.mktemp("real")
    command = (
        f"finetune/lora.py --checkpoint_dir {checkpoints['SmolLM2-135M-Instruct']} --out_dir "
        "out/smol "
    )
    command += (
        f"--data.path {examples} --train.max_steps {STEPS} --train.learning_rate {RATE} "
    )
    command += (
        f"--train.global_batch_size {BATCH} --eval.max_batches {VALIDATION // BATCH} "
    )
    command += f"--eval.interval {STEPS} --eval.max_new_tokens 8"
    done = script(*command.split(), cwd=folder)
    (folder / "out" / "smol" / "stdout.txt").write_text(done.stdout)
    return folder / "out" / "smol"


@pytest.mark.weekly
def test_the_process_takes_what_is_said_at_the_start(run):
    text = (run / "stdout.txt").read_text()
    least, most = map(
        float, re.search(r"the process takes ([\d.]+) to ([\d.]+) GiB", text).groups()
    )
    peak = float(re.search(r"peak memory of the process ([\d.]+) GiB", text)[1])
    assert 0.9 * least < peak < 1.1 * most and most < 1.6 * least


def peft_loss(model, samples):
    """Return the summed loss of a micro-batch."""
    batch = collate([[sample] for sample in samples])
    mask = (
        torch.arange(batch.tokens.size(1))
        < torch.tensor([[s.tokens.numel()] for s in samples])
    ).long()
    logits = model(
        input_ids=batch.tokens, attention_mask=mask, use_cache=False
    ).logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(
        logits, batch.targets.flatten(), ignore_index=-100, reduction="sum"
    )


def mean_loss(model, samples) -> float:
    model.eval()
    with torch.no_grad():
        total = sum(
            float(peft_loss(model, samples[i : i + 4])) for i in range(0, len(samples), 4)
        )
    model.train()
    return total / sum(sample.supervised for sample in samples)


def train_with_peft(folder, data) -> tuple[float, float]:
    """Return the validation loss before and after the same steps, from PEFT's own
    initialization."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), config
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    held_out = evenly_spaced(data.val, VALIDATION)
    before = mean_loss(model, held_out)
    order = SampleOrder([len(data.train)], 42)
    for step in range(STEPS):
        samples = [data.train[i] for i in order.indices(step * BATCH, (step + 1) * BATCH)]
        optimizer.param_groups[0]["lr"] = learning_rate(
            TrainArgs(learning_rate=RATE), step, STEPS
        )
        for start in range(0, BATCH, 4):
            (
                peft_loss(model, samples[start : start + 4])
                / sum(sample.supervised for sample in samples)
            ).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return before, mean_loss(model, held_out)


def test_the_loss_falls_as_far_as_with_peft(run, checkpoints, examples):
    folder = checkpoints["SmolLM2-135M-Instruct"]
    _, tokenizer = litft.load(folder)
    data = load_data(DataArgs(path=[str(examples)]), tokenizer, 49152, 8192)
    before, after = train_with_peft(folder, data)
    with (run / "metrics.csv").open() as file:
        losses = [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]
    print(
        f"validation loss: litft {losses[0]:.5f} -> {losses[-1]:.5f}, peft {before:.5f} -> "
        f"{after:.5f}"
    )
    assert losses[0] == pytest.approx(before, rel=1e-4)
    assert before - after > 0.01
    assert losses[0] - losses[-1] >= 0.9 * (before - after)


@torch.no_grad()
def test_peft_and_transformers_open_the_result(run, checkpoints, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    script(
        "scripts/merge_lora.py",
        "--checkpoint_dir",
        run / "final",
        "--out_dir",
        "merged",
        "--precision",
        "fp32",
        cwd=tmp_path,
    )
    model, tokenizer = litft.load(run / "final", precision="fp32")
    tokens = torch.tensor(
        [tokenizer.encode(tokenizer.apply_chat_template(MESSAGES), bos=False)]
    )
    expected = model(tokens)
    base = AutoModelForCausalLM.from_pretrained(
        checkpoints["SmolLM2-135M-Instruct"], dtype="float32"
    )
    assert not torch.allclose(base(tokens).logits, expected, atol=0.1)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    for logits in (
        PeftModel.from_pretrained(base, run / "final")(tokens).logits,
        litft.load(run, precision="fp32")[0](tokens),
        litft.load(tmp_path / "merged")[0](tokens),
        merged(tokens).logits,
    ):
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_fine_tuned_model_answers(run, tmp_path):
    flags = [
        "--checkpoint_dir",
        run / "final",
        "--temperature",
        "0",
        "--max_new_tokens",
        "40",
    ]
    done = script(
        "generate/base.py", *flags, "--prompt", MESSAGES[0]["content"], cwd=tmp_path
    )
    assert "blue" in done.stdout.lower()
    lines = ["Name three primary colours.", "What is the capital of France?", "Say hello."]
    answers = script("generate/chat.py", *flags, cwd=tmp_path, text="\n".join(lines)).stdout
    assert (
        "blue" in answers.lower() and "Paris" in answers and len(answers.splitlines()) >= 3
    )
