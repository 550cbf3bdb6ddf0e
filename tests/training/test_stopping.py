"""How runs end (signals, time limits, patience, NaN, out of memory, full disks), and that they
resume bit-identically."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
import traceback
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, STORIES, copy_tokenizer, rows_of, script, start, write_records
from forkserver import Process
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

import litft
from litft import run_dir
from litft.args import (
    DataArgs,
    EvalArgs,
    FullFinetuneArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    SaveArgs,
    TrainArgs,
    parse_duration,
)
from litft.commands.runs import read_run
from litft.errors import Interrupted
from litft.signals import Signals
from litft.training.output.recorder import Recorder
from litft.training.output.run_checkpoints import Saver, _plain_errors
from litft.training.trainer import Trainer
from litft.training.validation import Validation


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows_of(run) if "loss" in row]


def weights(run: Path) -> bytes:
    return (run / "final" / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def args(tiny, examples, tmp_path) -> LoRAFinetuneArgs:
    """Arguments of a LoRA run of twelve steps."""
    return LoRAFinetuneArgs(
        checkpoint_dir=str(tiny),
        out_dir=str(tmp_path / "run"),
        data=DataArgs(path=[str(examples)], val_fraction=0.2),
        train=TrainArgs(max_steps=12, global_batch_size=4, learning_rate=5e-3),
        eval=EvalArgs(interval=2, max_new_tokens=0),
        save=SaveArgs(interval=5),
        lora=LoRAArgs(dropout=0.2),
    )


# signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_a_checkpoint_and_the_run_resumes(args, name, tmp_path):
    """The step has no scheduled checkpoint; the resumed run ends like an uninterrupted one."""

    def callback(row):
        if row["step"] == 3:
            os.kill(os.getpid(), getattr(signal, name))

    shown = "Ctrl-C" if name == "SIGINT" else name
    message = (
        f"{shown}: stopped after step 4, and saved; to continue: .*lora.* --resume --out_dir "
        ".*/run$"
    )
    with pytest.raises(Interrupted, match=message) as error:
        litft.finetune(args, callback)
    assert error.value.code == 128 + getattr(signal, name)
    run = Path(args.out_dir)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]
    assert "stopped after step 4" in (run / "report.html").read_text()
    if name != "SIGTERM":  # what follows does not depend on the signal
        return
    litft.finetune(replace(args, resume=True))
    uninterrupted = litft.finetune(replace(args, out_dir=str(tmp_path / "whole"))).folder
    assert weights(run) == weights(uninterrupted) and losses(run) == losses(uninterrupted)


def start_training(run: Path, flags: list, cwd: Path) -> Process:
    """Start a run and return its process once it has made its first steps."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = start("finetune/lora.py", *flags, "--out_dir", run, cwd=cwd, **pipes)
    while (
        not (run / "metrics.csv").is_file()
        or len((run / "metrics.csv").read_text().splitlines()) < 6
    ):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.weekly
def test_a_signal_from_another_process(tiny, examples, tmp_path, devices):
    """With two processes one receives the signal and both stop; a single process resumes at the
    very next example."""
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--devices",
        str(devices),
        "--eval.interval",
        "0",
    ]
    flags += (
        "--train.max_steps 2000 --train.global_batch_size 4 --save.interval 1000".split()
    )
    flags += "--train.lr_schedule constant --train.warmup_fraction 0".split()
    run = tmp_path / "run"
    process = start_training(run, flags, tmp_path)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert (
        "SIGTERM: stopped after step" in err
        and f"--resume --out_dir {run}\n" in err
        and "Traceback" not in err
    )
    (step,) = [
        int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir()
    ]
    assert 5 <= step < 2000 and step == int(rows_of(run)[-1]["step"])
    script(
        "finetune/lora.py",
        "--resume",
        "--out_dir",
        run,
        "--devices",
        "1",
        "--train.max_steps",
        step + 9,
        cwd=tmp_path,
    )
    script(
        "finetune/lora.py",
        *flags[:4],
        *flags[6:],
        "--train.max_steps",
        step + 9,
        "--out_dir",
        "whole",
        cwd=tmp_path,
    )
    assert [row["samples"] for row in rows_of(run)] == [
        row["samples"] for row in rows_of(tmp_path / "whole")
    ]
    assert losses(run) == pytest.approx(
        losses(tmp_path / "whole"), rel=1e-4 if devices > 1 else 1e-9
    )


def test_a_second_ctrl_c_interrupts_at_once(capfd):
    before = signal.getsignal(signal.SIGINT)
    with (
        pytest.raises(KeyboardInterrupt, match="stopped at once, without saving"),
        Signals() as signals,
    ):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals.caught == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("saving after this step") == 1
    with pytest.raises(KeyboardInterrupt), Signals():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
    assert (
        capfd.readouterr().err
        == "\nCtrl-C: saving after this step (again: stop at once, without saving)\n"
    )


class InterruptedWrite(io.RawIOBase):
    """A file during whose second write Ctrl-C is pressed twice."""

    writes = 0

    def writable(self):
        return True

    def write(self, content):
        self.writes += 1
        if self.writes == 2:
            raise KeyboardInterrupt("stopped at once, without saving")
        return len(content)


def test_a_second_ctrl_c_while_a_checkpoint_is_written(tmp_path):
    """torch's file writer raises a RuntimeError about its position then."""
    with pytest.raises(RuntimeError) as caught:
        torch.save({"weight": torch.ones(1000)}, InterruptedWrite())
    failed = CheckpointException("save", {0: (caught.value, traceback.extract_stack())})
    with (
        pytest.raises(KeyboardInterrupt, match="stopped at once, without saving"),
        _plain_errors(tmp_path),
    ):
        raise failed


# runs from Python, patience and time limits


def test_finetune_from_python_equals_the_command(args, tmp_path):
    callback_rows = []
    result = litft.finetune(args, callback=callback_rows.append)
    assert result.folder == Path(args.out_dir) and (result.folder / "final").is_dir()
    rows = rows_of(result.folder)
    assert [row["step"] for row in callback_rows] == [row["step"] for row in rows]
    assert (
        callback_rows[-1]["loss"]
        == pytest.approx(rows[-1]["loss"])
        == pytest.approx(result.metrics["loss"])
    )
    assert result.metrics["val_loss"] == pytest.approx(rows[-1]["val_loss"])
    assert rows[-1]["val_perplexity"] == pytest.approx(
        math.exp(rows[-1]["val_loss"]), rel=1e-6
    )
    assert all(0 <= row["data_share"] < 1 for row in rows if "loss" in row)
    config = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert not {"out_dir", "resume", "overwrite"} & config.keys()
    script("finetune/lora.py", "--config", result.folder / "config.yaml", cwd=tmp_path)
    rerun = tmp_path / "out" / "lora"
    assert weights(rerun) == weights(result.folder) and losses(rerun) == losses(
        result.folder
    )


@pytest.mark.parametrize("disk", ["fast", "slow"])
@pytest.mark.halved
def test_patience_ends_a_run_and_the_best_is_kept(args, disk, monkeypatch):
    """The learning rate overshoots, so the loss soon rises.

    On a slow disk a save is pending when the next is due.
    """
    monkeypatch.setattr(
        Saver, "poll", Saver.finish if disk == "fast" else lambda saver: None
    )
    args.train.learning_rate, args.train.max_steps, args.train.lr_schedule = (
        0.1,
        200,
        "constant",
    )
    args.eval.patience, args.save.best = 3, True
    folder, metrics = litft.finetune(args)
    val_losses = {
        row["step"]: row["val_loss"]
        for row in rows_of(folder)
        if "val_loss" in row and row["step"]
    }
    best_step = min(val_losses, key=val_losses.get)
    assert list(val_losses)[-1] == metrics["step"] == best_step + 6 < 200
    assert not any(loss < val_losses[best_step] for loss in val_losses.values())
    for name, step in (("best", best_step), ("final", metrics["step"])):
        model, _ = litft.load(folder / name)
        assert held_out_loss(model, args) == pytest.approx(val_losses[step], rel=1e-5), name
    resumed = litft.finetune(replace(args, resume=True))
    assert resumed.metrics["step"] == metrics["step"], "a run that has ended trained on"


def held_out_loss(model, args) -> float:
    """Return the loss on the validation set, computed one sample at a time."""
    from litft.data.dataset import load_data
    from litft.pretrained.folder import resolve

    data = load_data(args.data, resolve(args.checkpoint_dir).tokenizer(), 512, 256)
    with torch.no_grad():
        losses_and_counts = [
            model(sample.tokens[None], targets=sample.targets[None]) for sample in data.val
        ]
    return float(
        sum(loss for loss, _ in losses_and_counts)
        / sum(count for _, count in losses_and_counts)
    )


def test_patience_needs_validation_data(args):
    args.data.val_fraction, args.eval.patience = 0.0, 3
    with pytest.raises(
        ValueError,
        match=r"--eval.patience: it needs a validation loss, and nothing is held out",
    ):
        litft.finetune(args)


def test_a_run_without_a_checkpoint_is_measured_again_before_its_first_step(args):
    """Its base, or its rewards, may have changed since."""
    args.save.interval = 0

    def crash(row):
        assert row["step"] < 1, "the crash"

    with pytest.raises(AssertionError, match="the crash"):
        litft.finetune(args, crash)
    path = Path(args.out_dir) / run_dir.VERDICT
    measured = json.loads(path.read_text())
    # as another base would have measured
    other = json.loads(path.read_text())
    for key in other["before"]["loss"]:
        key[-1] = 99.0
    path.write_text(json.dumps(other))
    litft.finetune(replace(args, resume=True))
    assert json.loads(path.read_text())["before"] == measured["before"]


def test_a_run_that_ends_by_time_is_measured_once(args, monkeypatch):
    """What it learned and forgot takes a while, also where a validation is due at the end."""
    args.train.max_time, args.eval.interval = "10m", 1
    measured = []
    measure_after = Validation.measure_after
    train_step = Trainer._train_step

    def counted(validation, *arguments):
        measured.append(arguments)
        measure_after(validation, *arguments)

    def long_step(trainer, *arguments):
        train_step(trainer, *arguments)
        # the third step takes more than ten minutes
        if trainer.step == 3:
            trainer.start_time -= 700

    monkeypatch.setattr(Validation, "measure_after", counted)
    monkeypatch.setattr(Trainer, "_train_step", long_step)
    folder, _ = litft.finetune(args)
    assert rows_of(folder)[-1]["step"] == 3 and len(measured) == 1


@pytest.mark.weekly
def test_max_time_ends_a_run_with_a_decayed_learning_rate(args):
    args.train.max_steps, args.train.max_time, args.eval.interval = None, "4s", 0
    args.train.epochs = 10_000.0
    start_time = time.monotonic()
    folder, metrics = litft.finetune(args)
    assert time.monotonic() - start_time < 20
    rows = [row for row in rows_of(folder) if "loss" in row]
    assert 5 < len(rows) == metrics["step"]
    assert max(row["learning_rate"] for row in rows) > 0.8 * 5e-3
    assert rows[-1]["learning_rate"] < 0.4 * max(row["learning_rate"] for row in rows)
    resumed = litft.finetune(replace(args, resume=True))
    assert resumed.metrics["step"] == metrics["step"], "its time was over"


def test_durations_are_parsed():
    parsed = {
        text: parse_duration(text)
        for text in (
            "90m",
            "1h30m",
            "45s",
            "1.5h",
            "2d",
            "1h 3",
            "5",
            "",
            "h",
            "1.2.3s",
            "0s",
        )
    }
    assert parsed == {
        "90m": 5400,
        "1h30m": 5400,
        "45s": 45,
        "1.5h": 5400,
        "2d": 172800,
    } | dict.fromkeys(("1h 3", "5", "", "h", "1.2.3s", "0s"))


# losses and gradients that are not finite


@pytest.fixture
def poisoned(args, tmp_path) -> LoRAFinetuneArgs:
    """Arguments of a run in which one of 30 examples has a token whose embedding is infinite."""
    from litft.pretrained.folder import resolve

    model = tmp_path / "model"
    model.mkdir()
    for path in Path(args.checkpoint_dir).iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tokenizer = resolve(model).tokenizer()
    tensors = load_file(model / "model.safetensors")
    (token,) = {
        token
        for token in tokenizer.encode("Z", bos=False)
        if "Z" in tokenizer.decode([token])
    }
    tensors["model.embed_tokens.weight"][token] = torch.inf
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    records = json.loads(Path(args.data.path[0]).read_text())
    assert not any("Z" in json.dumps(record) for record in records)
    records[17]["instruction"] += " Z"
    (tmp_path / "data.json").write_text(json.dumps(records))
    args.checkpoint_dir, args.data = (
        str(model),
        DataArgs(path=[str(tmp_path / "data.json")], val_fraction=0.0),
    )
    return args


def test_a_nan_loss_ends_the_run_and_names_its_examples(poisoned):
    from litft.data.sampler import SampleOrder

    with pytest.raises(ValueError, match="is nan, so training cannot continue") as error:
        litft.finetune(poisoned)
    order = SampleOrder([30], poisoned.seed).indices(0, 48)
    step = order.index(17) // 4
    examples = ", ".join(map(str, order[step * 4 : step * 4 + 4]))
    assert f"step {step + 1}: " in str(
        error.value
    ) and f"training examples: {examples} (--train.skip_nan" in str(error.value)
    assert "failed: step" in Path(poisoned.out_dir, "report.html").read_text("utf-8")
    saved_steps = [
        int(path.name.removeprefix("step-"))
        for path in Path(poisoned.out_dir, "checkpoints").glob("step-*")
    ]
    assert all(saved_step <= step for saved_step in saved_steps)


def test_a_step_that_is_not_finite_can_be_skipped(poisoned, capfd):
    """A skipped step changes neither weights nor optimizer state, and the run resumes
    bit-identically."""
    poisoned.train.skip_nan = True
    folder, metrics = litft.finetune(poisoned)
    skipped_steps = [row["step"] for row in rows_of(folder) if math.isnan(row["loss"])]
    assert metrics["step"] == 12 and 1 <= len(skipped_steps) <= 2
    stdout = capfd.readouterr().out
    assert all(
        f"step {int(step)} is left out: its loss or gradient is not finite" in stdout
        for step in skipped_steps
    )
    uninterrupted = load_file(folder / "final" / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() for tensor in uninterrupted.values())
    for path in (folder / "checkpoints").glob("step-*12"):
        (path / "progress.json").unlink()
    litft.finetune(replace(poisoned, resume=True))
    assert all(
        map(
            torch.equal,
            load_file(folder / "final" / "adapter_model.safetensors").values(),
            uninterrupted.values(),
        )
    )


def test_ten_steps_in_a_row_that_are_not_finite_end_the_run(poisoned):
    poisoned.train.skip_nan, poisoned.train.max_steps = True, 40
    path = Path(poisoned.data.path[0])
    path.write_text(json.dumps([{"instruction": "Z", "output": "Z"}] * 30))
    with pytest.raises(
        ValueError,
        match="step 10: 10 steps in a row are not finite; start another run with a lower",
    ):
        litft.finetune(poisoned)


def test_an_exploding_loss_ends_the_run(args):
    args.checkpoint_dir = str(STORIES)
    train = TrainArgs(max_steps=12, global_batch_size=4, learning_rate=1.0)
    full_args = FullFinetuneArgs(
        checkpoint_dir=args.checkpoint_dir,
        out_dir=args.out_dir,
        data=args.data,
        train=train,
    )
    with pytest.raises(
        ValueError,
        match=r"the loss is [\d.e+]+ and was [\d.]+, so training .*; start another run with a lower",
    ):
        litft.finetune(full_args)


# memory and disk


WORKER = """
import re, resource, sys
sys.path[:0] = [{tests!r}]
import litft, litft.commands.finetune
from litft.args import DataArgs, EvalArgs, LoRAFinetuneArgs, SaveArgs, TrainArgs
from litft.cli import user_errors

def allow(more):
    size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))

{body}
"""

LARGE = """
args = LoRAFinetuneArgs(
    checkpoint_dir={model!r}, out_dir={out!r},
    objective={objective!r}, data=DataArgs(path=[{data!r}], val_fraction=0.0, packing={packing}, max_seq_length={length}),
    train=TrainArgs(max_steps={at} + 1, global_batch_size={size}, micro_batch_size={rows}, oom_retry={retry}),
    eval=EvalArgs(max_new_tokens=0))
at = {at}
if at == 0:
    allow({more})
with user_errors():
    litft.finetune(args, lambda row: allow({more}) if row["step"] == at else None)
"""


@pytest.fixture(scope="module")
def large(make_model, tmp_path_factory):
    """A model whose activations for 64 rows of 256 tokens take more than a GiB, and 64 examples."""

    from transformers import LlamaConfig

    _, folder = make_model(
        LlamaConfig,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=3072,
        num_hidden_layers=2,
        max_position_embeddings=8192,
    )
    copy_tokenizer(STORIES, folder)
    data = tmp_path_factory.mktemp("large") / "data.json"
    records = [
        {"instruction": f"{n} times", "output": "once upon a time there was " * 60}
        for n in range(64)
    ]
    data.write_text(json.dumps(records))
    return folder, data


def run_limited(large, tmp_path, name, code=0, **settings):
    """Run with at most `more` additional bytes of memory, from the beginning or from step `at`
    on."""
    settings = {
        "rows": 64,
        "size": 64,
        "length": 256,
        "packing": False,
        "retry": True,
        "at": 0,
        "more": 1 << 40,
    } | settings
    settings = {"objective": "sft", "data": str(large[1])} | settings
    body = LARGE.format(model=str(large[0]), out=str(tmp_path / name), **settings)
    (tmp_path / f"{name}.py").write_text(
        WORKER.format(tests=str(ROOT / "tests"), body=body)
    )
    return script(tmp_path / f"{name}.py", cwd=tmp_path, code=code)


@pytest.mark.weekly
def test_out_of_memory_names_the_longest_row_and_remedies(large, tmp_path):
    done = run_limited(
        large, tmp_path, "none", code=2, retry=False, at=1, rows=32, size=32, more=300 << 20
    )
    assert (
        "micro-batches of up to 32 x 256 tokens do not fit into cpu's memory" in done.stderr
    )
    assert (
        "the longest row has training example" in done.stderr
        and "with its 256 tokens" in done.stderr
    )
    savings = dict(re.findall(r"(--[\w.]+ \w+) saves about ([\d.]+ [MG]iB)", done.stderr))
    assert savings.keys() == {
        "--train.activation_checkpointing full",
        "--train.micro_batch_size 16",
    }
    assert "--train.oom_retry halves micro-batches automatically" in done.stderr


@pytest.mark.weekly
def test_smaller_micro_batches_give_the_same_losses(large, tmp_path):
    """Micro-batches of packed rows are halved in the middle of a run."""
    settings = {"at": 1, "rows": 1, "length": 8192, "packing": True}
    run_limited(large, tmp_path, "whole", **settings)
    done = run_limited(large, tmp_path, "halved", more=600 << 20, **settings)
    assert "do not fit into memory; continuing with" in done.stdout
    assert losses(tmp_path / "halved") == pytest.approx(
        losses(tmp_path / "whole"), rel=1e-5
    )


FULL = """
args = LoRAFinetuneArgs(checkpoint_dir={model!r}, out_dir={out!r}, resume={resume}, data=DataArgs(path=[{data!r}]),
    train=TrainArgs(max_steps=6, global_batch_size=4), eval=EvalArgs(max_new_tokens=0), save=SaveArgs(interval=2))

def fill(row):
    if row["step"] == 3 and {full}:  # from now on no file can grow beyond that
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

with user_errors():
    litft.finetune(args, fill)
"""


def test_a_full_disk_leaves_the_last_good_checkpoint(tiny, examples, tmp_path):
    def train(out, code=0, resume=False, full=True):
        body = FULL.format(
            model=str(tiny),
            data=str(examples),
            out=str(tmp_path / out),
            resume=resume,
            full=full,
        )
        (tmp_path / "worker.py").write_text(
            WORKER.format(tests=str(ROOT / "tests"), body=body)
        )
        return script(tmp_path / "worker.py", cwd=tmp_path, code=code)

    train("whole", full=False)
    done = train("full", code=2)
    assert (
        "step-000002 is complete: --resume continues from it" in done.stderr
        and "File too large" in done.stderr
    )
    assert [path.name for path in (tmp_path / "full" / "checkpoints").iterdir()] == [
        "step-000002"
    ]
    train("full", resume=True, full=False)
    assert weights(tmp_path / "full") == weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, kills, flags",
    [
        ("lora", 6, "--lora.dropout 0.1 --train.optimizer paged_adamw_8bit"),
        pytest.param("adapter_v2", 4, "--save.best", marks=pytest.mark.weekly),
    ],
)
@pytest.mark.halved
def test_a_run_killed_at_any_moment_ends_the_same(method, kills, flags):
    arguments = ["--checkpoint_dir", STORIES, "--method", method, "--kills", str(kills)]
    arguments += [
        "--steps",
        str(40 + 6 * kills),
        "--flags",
        f"--eval.max_new_tokens 0 {flags}",
    ]
    done = script("tests/faults/kill.py", *arguments, cwd=ROOT)
    print(done.stdout)
    assert f"{kills} kills" in done.stdout and "equal weights: True" in done.stdout


# signals during validation, crashes, damaged files


def interrupt_validation(args, monkeypatch, step: int | None, where: str):
    """Send SIGTERM in the validation after `step` steps, in its method `where`, and return the
    run's message. step: None for methods that are called once and have no such argument."""
    original = getattr(Validation, where)

    def signalled(self, first, *arguments):
        if step is None or first == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, first, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Validation, where, signalled)
        with pytest.raises(Interrupted) as error:
            litft.finetune(args)
    return str(error.value)


@pytest.mark.parametrize(
    "step, where",
    [
        (12, "measure"),
        *(
            pytest.param(6, where, marks=pytest.mark.slow)
            for where in ("measure", "generate_answers")
        ),
    ],
)
@pytest.mark.halved
def test_a_signal_during_validation_saves_at_once(args, tmp_path, monkeypatch, step, where):
    """Also in the final validation, which can be long. The resumed run measures what was missed."""
    args.eval.max_new_tokens = 3
    message = interrupt_validation(args, monkeypatch, step, where)
    stop = f"after step {step}, and saved"
    if step == 12:
        stop = "after the last step, 12, before the result was written; saved"
    assert f"SIGTERM: stopped {stop}" in message
    run = Path(args.out_dir)
    assert (
        f"step-{step:06d}" in {path.name for path in (run / "checkpoints").iterdir()}
        and not (run / "final").exists()
    )
    litft.finetune(replace(args, resume=True))
    uninterrupted = litft.finetune(replace(args, out_dir=str(tmp_path / "whole"))).folder
    assert weights(run) == weights(uninterrupted) and losses(run) == losses(uninterrupted)
    val_losses, expected = (
        {row["step"]: row["val_loss"] for row in rows_of(path) if "val_loss" in row}
        for path in (run, uninterrupted)
    )
    assert val_losses == expected
    steps = [(row["step"], row["epoch"], row["samples"]) for row in rows_of(run)]
    assert steps == [
        (row["step"], row["epoch"], row["samples"]) for row in rows_of(uninterrupted)
    ]
    assert (run / "samples.jsonl").read_text() == (
        uninterrupted / "samples.jsonl"
    ).read_text()


@pytest.mark.slow
def test_a_signal_while_the_verdict_is_measured_loses_nothing(args, tmp_path, monkeypatch):
    """metrics.csv has the metrics of the last validation, but not what each example adds to
    them."""
    args.eval.exact_match = True
    interrupt_validation(args, monkeypatch, None, "measure_after")
    litft.finetune(replace(args, resume=True))
    whole = litft.finetune(replace(args, out_dir=str(tmp_path / "whole"))).folder
    found = json.loads((Path(args.out_dir) / "verdict.json").read_text())
    assert {"loss", "exact_match"} <= found["after"].keys()
    assert found == json.loads((whole / "verdict.json").read_text())


def test_a_signal_before_the_first_step_is_reported(args, monkeypatch):
    message = interrupt_validation(args, monkeypatch, 0, "measure")
    assert "SIGTERM: stopped before the first step" in message
    assert litft.finetune(replace(args, resume=True)).metrics["step"] == 12


def test_resuming_discards_a_later_best_checkpoint(args, monkeypatch):
    """A best checkpoint from after the resumed step is discarded."""
    args.save.best, args.save.interval, args.eval.interval = True, 4, 3
    # step 4's checkpoint is complete at step 5
    monkeypatch.setattr(Saver, "poll", Saver.finish)
    best_weights = []  # best/ at step 5, written at step 3

    def callback(row):
        if row["step"] == 5:
            best_weights.append(
                (Path(args.out_dir) / "best" / "adapter_model.safetensors").read_bytes()
            )
        assert row["step"] != 7 or len(best_weights) > 1, "the crash"

    with pytest.raises(AssertionError, match="the crash"):
        litft.finetune(args, callback)
    folder = litft.finetune(
        replace(args, resume=True, eval=EvalArgs(interval=0, max_new_tokens=0)), callback
    ).folder
    assert best_weights[0] == best_weights[1]
    val_losses = {
        row["step"]: row["val_loss"]
        for row in rows_of(folder)
        if "val_loss" in row and row["step"]
    }
    model, _ = litft.load(folder / "best")
    assert held_out_loss(model, args) == pytest.approx(min(val_losses.values()), rel=1e-5)
    assert not list(folder.glob("*.partial"))


def test_the_best_weights_of_an_interrupted_validation_are_written_later(args, monkeypatch):
    """A signal stops the run before a validation; a crash ends the resumed run between sample
    answers and best/."""
    args.save.best, args.train.max_steps = True, 2
    args.eval = EvalArgs(interval=2, max_new_tokens=4, prompts=["Say it"])
    args.save.interval = 2
    interrupt_validation(args, monkeypatch, 2, "measure")
    resumed = replace(args, resume=True)

    def crash(recorder, step):
        raise AssertionError("the crash")

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="the crash"):
        patch.setattr(Recorder, "write_best", crash)
        litft.finetune(resumed)
    folder = Path(args.out_dir)
    assert not (folder / "best").exists()
    litft.finetune(resumed)
    val_losses = {
        row["step"]: row["val_loss"]
        for row in rows_of(folder)
        if "val_loss" in row and row["step"]
    }
    assert json.loads((folder / "best" / "litft.json").read_text())["step"] == min(
        val_losses, key=val_losses.get
    )
    model, _ = litft.load(folder / "best")
    assert held_out_loss(model, args) == pytest.approx(min(val_losses.values()), rel=1e-5)


def test_a_signal_during_sample_answers_stops_before_the_next_step(
    args, monkeypatch, capfd
):
    """The run saves after the answers.

    Resumed, it writes the weights and answers of an uninterrupted run, and knows the most memory
    that was used before.
    """
    args.train.max_steps = 4
    args.eval = EvalArgs(interval=2, max_new_tokens=4, prompts=["Say it"])
    expected = weights(
        litft.finetune(replace(args, out_dir=f"{args.out_dir}-whole")).folder
    )
    assert "stopped after step 2" in interrupt_validation(
        args, monkeypatch, 2, "generate_answers"
    )
    metrics = Path(args.out_dir) / "metrics.csv"
    header, first, *rows = metrics.read_text().splitlines()
    values = first.split(",")
    values[header.split(",").index("memory_gib")] = "77"
    metrics.write_text("\n".join([header, ",".join(values), *rows]) + "\n")
    folder = litft.finetune(replace(args, resume=True)).folder
    assert weights(folder) == expected
    assert "peak memory of the process 77.00 GiB" in capfd.readouterr().out
    samples = [
        json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()
    ]
    assert [sample["step"] for sample in samples] == [0, 2, 4]


def test_a_finished_run_that_is_continued_is_not_finished_until_its_end(args, monkeypatch):
    args.train.max_steps = 4
    folder = litft.finetune(args).folder
    first = weights(folder)
    longer = replace(args, resume=True, train=replace(args.train, max_steps=8))

    def callback(row):
        assert row["step"] != 6, "the crash"

    with pytest.raises(AssertionError, match="the crash"):
        litft.finetune(longer, callback)
    assert not run_dir.finished(folder) and read_run(folder).state.startswith(
        "not finished"
    )
    assert (folder / "previous" / "adapter_model.safetensors").read_bytes() == first
    monkeypatch.setattr(run_dir, "OUT", folder.parent)
    assert run_dir.newest_run(is_finished=False) == folder
    litft.finetune(longer)
    assert (
        run_dir.finished(folder)
        and weights(folder) != first
        and not (folder / "previous").exists()
    )
    litft.finetune(longer)  # there is nothing left to do
    assert run_dir.finished(folder) and not (folder / "previous").exists()


def test_a_longer_run_resumes_at_the_next_example(args):
    """With 24 examples and steps of 16, an epoch ends with a step of 8."""
    args.train = TrainArgs(epochs=1, global_batch_size=16)
    litft.finetune(args)
    longer = replace(args, resume=True, train=replace(args.train, epochs=2))
    folder, metrics = litft.finetune(longer)
    rows = [row for row in rows_of(folder) if "loss" in row]
    assert [row["samples"] for row in rows] == [16, 24, 40, 48] and metrics["epoch"] == 2
    step_tokens = [
        rows[0]["tokens"],
        *(row["tokens"] - previous["tokens"] for previous, row in pairwise(rows)),
    ]
    assert step_tokens[0] + step_tokens[1] == step_tokens[2] + step_tokens[3], (
        "each epoch feeds every example once"
    )
    # it is finished, though a run of two epochs from the beginning has one step less
    weights = (folder / "final" / "adapter_model.safetensors").read_bytes()
    litft.finetune(longer)
    assert (folder / "final" / "adapter_model.safetensors").read_bytes() == weights


def test_a_longer_run_has_no_more_steps_than_asked_for(args):
    """The last step of the first run had 8 of 16 examples; the others are not made up for."""
    args.train = TrainArgs(epochs=1, global_batch_size=16)
    litft.finetune(args)
    train = replace(args.train, epochs=None, max_steps=3)
    for _ in range(2):
        folder, _ = litft.finetune(replace(args, resume=True, train=train))
        rows = [row for row in rows_of(folder) if "loss" in row]
        assert [row["samples"] for row in rows] == [16, 24, 40]


def test_resuming_a_finished_run_writes_its_validation(args):
    litft.finetune(args)
    callback_rows = []
    eval_args = replace(args.eval, exact_match=True)
    result = litft.finetune(
        replace(args, resume=True, eval=eval_args), callback_rows.append
    )
    assert (
        "exact_match" in result.metrics
        and "exact_match" in rows_of(result.folder)[-1]
        and callback_rows
    )


def test_a_base_that_has_changed_is_not_resumed(args, tiny, tmp_path):
    """Also where the first values of each tensor are the same.

    A file that was only copied again is.
    """
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    args.checkpoint_dir, args.train.max_steps, args.save.interval = str(base), 2, 1
    litft.finetune(args)
    path = base / "model.safetensors"
    os.utime(path, (1, 1))
    args.train.max_steps = 3
    litft.finetune(replace(args, resume=True))
    tensors = load_file(path)
    # at a place that the fingerprint does not look at
    tensors["model.layers.1.mlp.up_proj.weight"][1, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    args.train.max_steps = 4
    with pytest.raises(
        ValueError, match=r"model\.safetensors has changed since the run began"
    ):
        litft.finetune(replace(args, resume=True))
    shutil.copyfile(tiny / "model.safetensors", path)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    with pytest.raises(ValueError, match=r"saved with config\.json of the base"):
        litft.finetune(replace(args, resume=True))


def test_a_base_that_is_replaced_while_a_run_trains_is_noticed(args, tiny, tmp_path):
    """The checkpoint has size and time of the file that was hashed."""
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    args.checkpoint_dir, args.train.max_steps, args.save.interval = str(base), 4, 2
    path = base / "model.safetensors"

    def replace_base(row):
        if row["step"] == 3:
            tensors = load_file(path)
            tensors["model.layers.1.mlp.up_proj.weight"][1, 0] += 1
            save_file(tensors, base / "new", metadata={"format": "pt"})
            (base / "new").replace(path)

    litft.finetune(args, replace_base)
    args.train.max_steps = 5
    with pytest.raises(ValueError, match=r"model\.safetensors has changed since the run"):
        litft.finetune(replace(args, resume=True))


def test_other_stop_tokens_are_another_run(args, tiny, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    args.checkpoint_dir, args.train.max_steps = str(base), 2
    litft.finetune(args)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    args.train.max_steps = 3
    with pytest.raises(ValueError, match="saved with stop tokens"):
        litft.finetune(replace(args, resume=True))


def test_the_best_of_steps_that_are_taken_again_is_not_kept(args):
    """The newest checkpoint is damaged, so that the run goes back to one before the best."""
    args.save.best, args.save.interval, args.eval.interval = True, 4, 4
    folder = litft.finetune(args).folder
    assert json.loads((folder / "best" / "litft.json").read_text())["step"] == 12
    progress = folder / "checkpoints" / "step-000012" / "progress.json"
    progress.write_text(progress.read_text().replace("a", "b"))
    litft.finetune(replace(args, resume=True))
    best = json.loads((folder / "best" / "litft.json").read_text())["step"]
    val_losses = {}
    for row in rows_of(folder):
        if "val_loss" in row and row["step"]:
            val_losses[row["step"]] = row["val_loss"]
    assert best == min(val_losses, key=val_losses.get)
    model, _ = litft.load(folder / "best")
    assert held_out_loss(model, args) == pytest.approx(min(val_losses.values()), rel=1e-5)


def test_damaged_metrics_rows_are_dropped(args):
    args.train.max_steps = 6
    folder = litft.finetune(args).folder
    path = folder / "metrics.csv"
    rows_before = rows_of(folder)
    with path.open("ab") as file:
        file.write(
            b"4,x4637,1,2\n\xff\xfe,\n3,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,x\n7,"
        )
    litft.finetune(replace(args, resume=True))
    assert [row["step"] for row in rows_of(folder)][: len(rows_before)] == [
        row["step"] for row in rows_before
    ]
    path.write_text("1,2,3\n")
    with pytest.raises(
        ValueError, match=r"metrics.csv does not start with a row of column names"
    ):
        litft.finetune(replace(args, resume=True))
    path.unlink()
    assert litft.finetune(replace(args, resume=True)).metrics["val_loss"]


def test_damaged_samples_are_dropped(args):
    args.eval.max_new_tokens, args.eval.prompts, args.train.max_steps = (
        2,
        ["a\u2028b\x85c"],
        2,
    )
    folder = litft.finetune(args).folder
    before = (folder / "samples.jsonl").read_text("utf-8")
    damaged_lines = [
        "5",
        '{"prompt": "a"}',
        '{"step": "x", "prompt": "", "answer": ""}',
        "[]",
        '{"step": 1',
    ]
    (folder / "samples.jsonl").write_text(before + "\n".join(damaged_lines), "utf-8")
    litft.finetune(replace(args, resume=True))
    assert (folder / "samples.jsonl").read_text("utf-8") == before


def test_a_checkpoint_with_an_invalid_progress_json_is_damaged(args, capfd):
    args.train.max_steps, args.save.interval, args.train.optimizer = 4, 2, "adamw_8bit"
    folder = litft.finetune(args).folder
    path = folder / "checkpoints" / "step-000004" / "progress.json"
    original = path.read_text()
    for damage in (
        lambda p: p.pop("elapsed"),
        lambda p: p.pop("optimizer"),
        lambda p: p.update(step=2),
        lambda p: p.update(files=[1]),
        lambda p: p["optimizer"].update(groups=[]),
        lambda p: p["optimizer"].update(parameters={}, groups=[{"params": 1}]),
    ):
        progress = json.loads(original)
        del progress["hash"]  # otherwise every change is noticed by it
        damage(progress)
        path.write_text(json.dumps(progress))
        litft.finetune(replace(args, resume=True))  # which writes the checkpoint again
        stdout = capfd.readouterr().out
        assert "step-000004 is damaged" in stdout and "continuing after step 2" in stdout
        assert (
            path.read_text() == original
            or json.loads(path.read_text()).keys() == json.loads(original).keys()
        )


def test_an_infinite_loss_can_be_skipped(args, monkeypatch):
    import litft.training.updates

    original, step_losses = litft.training.updates.accumulate, []

    def infinite(*arguments, **flags):
        step_losses.append(original(*arguments, **flags))
        return step_losses[-1] * (torch.inf if len(step_losses) == 3 else 1.0)

    monkeypatch.setattr(litft.training.updates, "accumulate", infinite)
    args.train.skip_nan = True
    folder, metrics = litft.finetune(args)
    assert metrics["step"] == 12 and math.isinf(rows_of(folder)[3]["loss"])


def test_checkpoints_beyond_a_million_steps(tmp_path):
    from litft.training.output import run_checkpoints

    for step in (999_900, 999_950, 1_000_000, 1_000_050):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    assert run_checkpoints.newest(tmp_path).name == "step-1000050"
    run_checkpoints.delete_after(tmp_path, 1_000_000)
    run_checkpoints.prune(tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1000000"]


@pytest.mark.slow
def test_two_processes_resume(tiny, examples, tmp_path):
    """Repeat three times to catch race conditions."""
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--devices",
        "2",
        "--train.max_steps",
        "4",
    ]
    flags += ["--eval.max_new_tokens", "3", "--eval.interval", "1", "--out_dir", "run"]
    script("finetune/lora.py", *flags, cwd=tmp_path)
    expected = weights(tmp_path / "run")
    for _ in range(3):
        script("finetune/lora.py", "--resume", "--out_dir", "run", cwd=tmp_path)
        assert weights(tmp_path / "run") == expected


@pytest.mark.weekly
def test_the_reference_is_computed_in_smaller_micro_batches_after_an_out_of_memory_error(
    large, tmp_path
):
    records = [
        {
            "prompt": f"{n} times",
            "chosen": "once upon a time " * 60,
            "rejected": "the end " * 60,
        }
        for n in range(64)
    ]
    data = write_records(tmp_path / "pairs.jsonl", records)
    done = run_limited(
        large, tmp_path, "limited", objective="dpo", data=str(data), more=450 << 20
    )
    assert done.stdout.count("do not fit into memory; continuing with") >= 1
    assert done.stdout.count("reference log-probabilities of 64 train examples") >= 2
