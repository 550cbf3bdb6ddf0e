"""How runs end: by signals, time, patience, NaN, memory and full disks; and that they go on from there, to the bit."""

import json
import math
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, rows_of, script, start
from forkserver import Process
from safetensors.torch import load_file, save_file

import litft
from litft.args import DataArgs, EvalArgs, FullFinetuneArgs, LoRAArgs, LoRAFinetuneArgs, SaveArgs, TrainArgs, seconds
from litft.errors import Interrupted
from litft.signals import Signals
from litft.training.run_state import Saver


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows_of(run) if "loss" in row]


def weights(run: Path) -> bytes:
    return (run / "final" / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def args(tiny, examples, tmp_path) -> LoRAFinetuneArgs:
    """A run of twelve steps."""
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
def test_a_signal_saves_and_the_run_goes_on(args, name, tmp_path):
    """In a step that no interval would save; the run that goes on ends as one that nobody stopped."""

    def callback(row):
        if row["step"] == 3:
            os.kill(os.getpid(), getattr(signal, name))

    with pytest.raises(
        Interrupted, match=f"{name}: stopped after step 4, and saved; --resume --out_dir .*/run continues"
    ) as stopped:
        litft.finetune(args, callback)
    assert stopped.value.code == 128 + getattr(signal, name)
    run = Path(args.out_dir)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]
    assert "stopped after step 4" in (run / "report.html").read_text()
    if name != "SIGTERM":  # what follows does not depend on the signal
        return
    litft.finetune(replace(args, resume=True))
    whole = litft.finetune(replace(args, out_dir=str(tmp_path / "whole"))).folder
    assert weights(run) == weights(whole) and losses(run) == losses(whole)


def begun(run: Path, words: list, cwd: Path) -> Process:
    """A run that has made its first steps."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = start("finetune/lora.py", *words, "--out_dir", run, cwd=cwd, **pipes)
    while not (run / "metrics.csv").is_file() or len((run / "metrics.csv").read_text().splitlines()) < 6:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_from_outside(tiny, examples, tmp_path, devices):
    """Of two processes one gets it, and both stop; one goes on where they were, on the very next example."""
    words = ["--checkpoint_dir", tiny, "--data.path", examples, "--devices", str(devices), "--eval.interval", "0"]
    words += "--train.max_steps 2000 --train.global_batch_size 4 --save.interval 1000".split()
    words += "--train.lr_schedule constant --train.warmup_fraction 0".split()
    run = tmp_path / "run"
    process = begun(run, words, tmp_path)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "SIGTERM: stopped after step" in err and f"--resume --out_dir {run} continues" in err and "Traceback" not in err
    (step,) = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir()]
    assert 5 <= step < 2000 and step == int(rows_of(run)[-1]["step"])
    script("finetune/lora.py", "--resume", "--out_dir", run, "--devices", "1", "--train.max_steps", step + 9, cwd=tmp_path)
    script("finetune/lora.py", *words[:4], *words[6:], "--train.max_steps", step + 9, "--out_dir", "whole", cwd=tmp_path)
    assert [row["samples"] for row in rows_of(run)] == [row["samples"] for row in rows_of(tmp_path / "whole")]
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=1e-4 if devices > 1 else 1e-9)


def test_a_second_ctrl_c_interrupts_at_once(capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Signals() as signals:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals.caught == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("saving after this step") == 1


# from Python, and other ends


def test_finetune_from_python_is_the_same_run(args, tmp_path):
    seen = []
    found = litft.finetune(args, callback=seen.append)
    assert found.folder == Path(args.out_dir) and (found.folder / "final").is_dir()
    rows = rows_of(found.folder)
    assert [row["step"] for row in seen] == [row["step"] for row in rows]
    assert seen[-1]["loss"] == pytest.approx(rows[-1]["loss"]) == pytest.approx(found.metrics["loss"])
    assert found.metrics["val_loss"] == pytest.approx(rows[-1]["val_loss"])
    assert rows[-1]["val_perplexity"] == pytest.approx(math.exp(rows[-1]["val_loss"]), rel=1e-6)
    assert all(0 <= row["data_share"] < 1 for row in rows if "loss" in row)
    stored = yaml.safe_load((found.folder / "config.yaml").read_text())
    assert not {"out_dir", "resume", "overwrite"} & stored.keys()
    script("finetune/lora.py", "--config", found.folder / "config.yaml", cwd=tmp_path)
    again = tmp_path / "out" / "lora"
    assert weights(again) == weights(found.folder) and losses(again) == losses(found.folder)


@pytest.mark.parametrize("disk", ["fast", "slow"])
def test_patience_ends_a_run_and_the_best_is_kept(args, disk, monkeypatch):
    """At a rate that overshoots, the validation loss soon rises; a slow disk has a checkpoint when the next one is due."""
    monkeypatch.setattr(Saver, "poll", Saver.finish if disk == "fast" else lambda saver: None)
    args.train.learning_rate, args.train.max_steps, args.train.lr_schedule = 0.1, 200, "constant"
    args.eval.patience, args.save.best = 3, True
    folder, metrics = litft.finetune(args)
    measured = {row["step"]: row["val_loss"] for row in rows_of(folder) if "val_loss" in row and row["step"]}
    best = min(measured, key=measured.get)
    assert list(measured)[-1] == metrics["step"] == best + 6 < 200
    assert not any(value < measured[best] for value in measured.values())
    for name, step in (("best", best), ("final", metrics["step"])):
        model, _ = litft.load(folder / name)
        assert held_out_loss(model, args) == pytest.approx(measured[step], rel=1e-5), name
    resumed = litft.finetune(replace(args, resume=True))
    assert resumed.metrics["step"] == metrics["step"], "a run that has ended trained on"


def held_out_loss(model, args) -> float:
    """The loss on the validation part, sample after sample."""
    from litft.data.dataset import load_data
    from litft.pretrained import resolve

    data = load_data(args.data, resolve(args.checkpoint_dir).tokenizer(), 512, 256)
    with torch.no_grad():
        found = [model(s.tokens[None], targets=s.targets[None]) for s in data.val]
    return float(sum(loss for loss, _ in found) / sum(count for _, count in found))


def test_what_goes_by_validation_needs_some(args):
    args.data.val_fraction, args.eval.patience = 0.0, 3
    with pytest.raises(ValueError, match=r"--eval.patience: it needs a validation loss, and nothing is held out"):
        litft.finetune(args)


def test_time_is_a_limit_and_the_rate_has_fallen_by_then(args):
    args.train.max_steps, args.train.max_time, args.eval.interval = None, "4s", 0
    args.train.epochs = 10_000.0
    begun = time.monotonic()
    folder, metrics = litft.finetune(args)
    assert time.monotonic() - begun < 20
    rows = [row for row in rows_of(folder) if "loss" in row]
    assert 5 < len(rows) == metrics["step"]
    assert max(row["learning_rate"] for row in rows) > 0.8 * 5e-3
    assert rows[-1]["learning_rate"] < 0.4 * max(row["learning_rate"] for row in rows)
    again = litft.finetune(replace(args, resume=True))
    assert again.metrics["step"] == metrics["step"], "its time was over"


def test_times_in_words():
    found = {text: seconds(text) for text in ("90m", "1h30m", "45s", "1.5h", "2d", "1h 3", "5", "", "h", "1.2.3s", "0s")}
    assert found == {"90m": 5400, "1h30m": 5400, "45s": 45, "1.5h": 5400, "2d": 172800} | dict.fromkeys(
        ("1h 3", "5", "", "h", "1.2.3s", "0s")
    )


# numbers that are none


@pytest.fixture
def poisoned(args, tmp_path) -> LoRAFinetuneArgs:
    """One example of 31 has a token whose embedding is infinite."""
    from litft.pretrained import resolve

    model = tmp_path / "model"
    model.mkdir()
    for path in Path(args.checkpoint_dir).iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tokenizer = resolve(model).tokenizer()
    tensors = load_file(model / "model.safetensors")
    (token,) = {token for token in tokenizer.encode("Z", bos=False) if "Z" in tokenizer.decode([token])}
    tensors["model.embed_tokens.weight"][token] = torch.inf
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    records = json.loads(Path(args.data.path[0]).read_text())
    assert not any("Z" in json.dumps(record) for record in records)
    records[17]["instruction"] += " Z"
    (tmp_path / "data.json").write_text(json.dumps(records))
    args.checkpoint_dir, args.data = str(model), DataArgs(path=[str(tmp_path / "data.json")], val_fraction=0.0)
    return args


def test_a_loss_that_is_no_number_ends_the_run_with_its_examples(poisoned):
    from litft.data.sampler import Sampler

    with pytest.raises(ValueError, match="is nan, so training cannot continue") as error:
        litft.finetune(poisoned)
    order = Sampler([30], poisoned.seed).indices(0, 48)
    step = order.index(17) // 4
    examples = ", ".join(map(str, order[step * 4 : step * 4 + 4]))
    assert f"step {step + 1}: " in str(error.value) and f"training examples: {examples} (--train.skip_nan" in str(
        error.value
    )
    saved = [int(path.name.removeprefix("step-")) for path in Path(poisoned.out_dir, "checkpoints").glob("step-*")]
    assert all(number <= step for number in saved)


def test_a_step_that_is_no_number_can_be_left_out(poisoned, capfd):
    """It moves nothing, neither weights nor moments: the run is that of the other steps, and resumes to the bit."""
    poisoned.train.skip_nan = True
    folder, metrics = litft.finetune(poisoned)
    bad = [row["step"] for row in rows_of(folder) if math.isnan(row["loss"])]
    assert metrics["step"] == 12 and 1 <= len(bad) <= 2
    said = capfd.readouterr().out
    assert all(f"step {int(step)} is left out: its loss or gradient is not finite" in said for step in bad)
    whole = load_file(folder / "final" / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() for tensor in whole.values())
    for path in (folder / "checkpoints").glob("step-*12"):
        (path / "progress.json").unlink()
    litft.finetune(replace(poisoned, resume=True))
    assert all(map(torch.equal, load_file(folder / "final" / "adapter_model.safetensors").values(), whole.values()))


def test_when_every_step_is_no_number_the_run_ends(poisoned):
    poisoned.train.skip_nan, poisoned.train.max_steps = True, 40
    path = Path(poisoned.data.path[0])
    path.write_text(json.dumps([{"instruction": "Z", "output": "Z"}] * 30))
    with pytest.raises(ValueError, match="step 10: 10 steps in a row are not finite; start another run with a lower"):
        litft.finetune(poisoned)


def test_a_loss_that_explodes_ends_the_run(args, shared):
    args.checkpoint_dir = str(shared / "checkpoints" / "stories260K")
    train = TrainArgs(max_steps=12, global_batch_size=4, learning_rate=1.0)
    full = FullFinetuneArgs(checkpoint_dir=args.checkpoint_dir, out_dir=args.out_dir, data=args.data, train=train)
    with pytest.raises(
        ValueError,
        match=r"the loss is [\d.e+]+ and was [\d.]+, so training .*; start another run with a lower",
    ):
        litft.finetune(full)


# memory and disk


WORKER = """
import re, resource, sys
sys.path[:0] = [{tests!r}]
import litft, litft.training.finetune
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
    data=DataArgs(path=[{data!r}], val_fraction=0.0, packing={packing}, max_seq_length={length}),
    train=TrainArgs(max_steps={at} + 1, global_batch_size={size}, micro_batch_size={rows}, oom_retry={retry}),
    eval=EvalArgs(max_new_tokens=0))
at = {at}
if at == 0:
    allow({more})
with user_errors():
    litft.finetune(args, lambda row: allow({more}) if row["step"] == at else None)
"""


@pytest.fixture(scope="module")
def large(make_model, shared, tmp_path_factory):
    """A model whose activations for 64 rows of 256 tokens take more than a GiB, and 64 examples."""
    import shutil

    from transformers import LlamaConfig

    _, folder = make_model(
        LlamaConfig,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=3072,
        num_hidden_layers=2,
        max_position_embeddings=8192,
    )
    for path in (shared / "checkpoints" / "stories260K").glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    data = tmp_path_factory.mktemp("large") / "data.json"
    records = [{"instruction": f"{n} times", "output": "once upon a time there was " * 60} for n in range(64)]
    data.write_text(json.dumps(records))
    return folder, data


def limited(large, tmp_path, name, code=0, **settings):
    """A run whose process may take so many `more` bytes, from the beginning or from step `at` on."""
    settings = {"rows": 64, "size": 64, "length": 256, "packing": False, "retry": True, "at": 0, "more": 1 << 40} | settings
    body = LARGE.format(model=str(large[0]), data=str(large[1]), out=str(tmp_path / name), **settings)
    (tmp_path / f"{name}.py").write_text(WORKER.format(tests=str(ROOT / "tests"), body=body))
    return script(tmp_path / f"{name}.py", cwd=tmp_path, code=code)


def test_memory_that_does_not_suffice_is_told_with_the_longest_row(large, tmp_path):
    done = limited(large, tmp_path, "none", code=2, retry=False, at=1, rows=32, size=32, more=300 << 20)
    assert "micro-batches of up to 32 x 256 tokens do not fit into cpu's memory" in done.stderr
    assert "the longest row has training example" in done.stderr and "with its 256 tokens" in done.stderr
    saving = dict(re.findall(r"(--[\w.]+ \w+) saves about ([\d.]+ [MG]iB)", done.stderr))
    assert saving.keys() == {"--train.activation_checkpointing full", "--train.micro_batch_size 16"}
    assert "--train.oom_retry halves micro-batches automatically" in done.stderr


@pytest.mark.slow
def test_smaller_micro_batches_give_the_same_losses(large, tmp_path):
    """Of packed rows, in the middle of a run."""
    settings = {"at": 1, "rows": 1, "length": 8192, "packing": True}
    limited(large, tmp_path, "whole", **settings)
    done = limited(large, tmp_path, "halved", more=600 << 20, **settings)
    assert "do not fit into memory; continuing with" in done.stdout
    assert losses(tmp_path / "halved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


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
    def go(out, code=0, resume=False, full=True):
        body = FULL.format(model=str(tiny), data=str(examples), out=str(tmp_path / out), resume=resume, full=full)
        (tmp_path / "worker.py").write_text(WORKER.format(tests=str(ROOT / "tests"), body=body))
        return script(tmp_path / "worker.py", cwd=tmp_path, code=code)

    go("whole", full=False)
    done = go("full", code=2)
    assert "step-000002 is complete: --resume continues from it" in done.stderr and "File too large" in done.stderr
    assert [path.name for path in (tmp_path / "full" / "checkpoints").iterdir()] == ["step-000002"]
    go("full", resume=True, full=False)
    assert weights(tmp_path / "full") == weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, kills, flags",
    [
        ("lora", 12, "--lora.dropout 0.1 --train.optimizer paged_adamw_8bit"),
        ("adapter_v2", 4, "--save.best"),
    ],
)
def test_killed_at_any_moment_a_run_ends_the_same(shared, method, kills, flags):
    words = ["--checkpoint_dir", shared / "checkpoints" / "stories260K", "--method", method, "--kills", str(kills)]
    words += ["--steps", str(40 + 6 * kills), "--flags", f"--eval.max_new_tokens 0 {flags}"]
    done = script("tests/faults/kill.py", *words, cwd=ROOT)
    print(done.stdout)
    assert f"{kills} kills" in done.stdout and "equal weights: True" in done.stdout


# odd moments, odd files


def interrupted(args, monkeypatch, step: int, where: str):
    """A run that gets SIGTERM in its validation after `step` steps: while it measures, or while it answers."""
    from litft.training.validation import Validation

    real = getattr(Validation, where)

    def signalled(self, at, *words):
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, at, *words)

    with monkeypatch.context() as patch:
        patch.setattr(Validation, where, signalled)
        with pytest.raises(Interrupted) as stopped:
            litft.finetune(args)
    return str(stopped.value)


@pytest.mark.parametrize(
    "step, where",
    [(12, "measure"), *(pytest.param(6, where, marks=pytest.mark.slow) for where in ("measure", "generate_answers"))],
)
def test_a_signal_in_a_validation_saves_at_once(args, tmp_path, monkeypatch, step, where):
    """Also in the last, which can be long; the run that goes on makes up for what was not measured."""
    args.eval.max_new_tokens = 3
    said = interrupted(args, monkeypatch, step, where)
    assert f"SIGTERM: stopped after step {step}, and saved" in said
    run = Path(args.out_dir)
    assert f"step-{step:06d}" in {path.name for path in (run / "checkpoints").iterdir()} and not (run / "final").exists()
    litft.finetune(replace(args, resume=True))
    whole = litft.finetune(replace(args, out_dir=str(tmp_path / "whole"))).folder
    assert weights(run) == weights(whole) and losses(run) == losses(whole)
    found, expected = ({r["step"]: r["val_loss"] for r in rows_of(path) if "val_loss" in r} for path in (run, whole))
    assert found == expected
    steps = [(row["step"], row["epoch"], row["samples"]) for row in rows_of(run)]
    assert steps == [(row["step"], row["epoch"], row["samples"]) for row in rows_of(whole)]
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_a_signal_before_the_first_step_is_told(args, monkeypatch):
    said = interrupted(args, monkeypatch, 0, "measure")
    assert "SIGTERM: stopped before the first step" in said
    assert litft.finetune(replace(args, resume=True)).metrics["step"] == 12


def test_the_best_is_that_of_the_steps_that_happened(args, monkeypatch):
    """A best beyond the checkpoint is forgotten with its step."""
    args.save.best, args.save.interval, args.eval.interval = True, 4, 3
    monkeypatch.setattr(Saver, "poll", Saver.finish)  # step 4's is whole at step 5
    kept = []  # what best/ holds at step 5: that of step 3

    def callback(row):
        if row["step"] == 5:
            kept.append((Path(args.out_dir) / "best" / "adapter_model.safetensors").read_bytes())
        assert row["step"] != 7 or len(kept) > 1, "the crash"

    with pytest.raises(AssertionError, match="the crash"):
        litft.finetune(args, callback)
    folder = litft.finetune(replace(args, resume=True, eval=EvalArgs(interval=0, max_new_tokens=0)), callback).folder
    assert kept[0] == kept[1]
    measured = {row["step"]: row["val_loss"] for row in rows_of(folder) if "val_loss" in row and row["step"]}
    model, _ = litft.load(folder / "best")
    assert held_out_loss(model, args) == pytest.approx(min(measured.values()), rel=1e-5)
    assert not list(folder.glob("*.partial"))


def test_a_longer_run_goes_on_with_the_very_next_example(args):
    """Of 24 examples in steps of 16 an epoch ends in a step of 8."""
    args.train = TrainArgs(epochs=1, global_batch_size=16)
    litft.finetune(args)
    longer = replace(args, resume=True, train=replace(args.train, epochs=2))
    folder, metrics = litft.finetune(longer)
    rows = [row for row in rows_of(folder) if "loss" in row]
    assert [row["samples"] for row in rows] == [16, 24, 40, 48] and metrics["epoch"] == 2
    fed = [rows[0]["tokens"], *(b["tokens"] - a["tokens"] for a, b in pairwise(rows))]
    assert fed[0] + fed[1] == fed[2] + fed[3], "each epoch feeds every example once"


def test_a_validation_of_a_run_without_steps_left_is_written(args):
    litft.finetune(args)
    seen = []
    more = replace(args.eval, exact_match=True)
    found = litft.finetune(replace(args, resume=True, eval=more), seen.append)
    assert "exact_match" in found.metrics and "exact_match" in rows_of(found.folder)[-1] and seen


def test_rows_that_a_crash_has_spoiled_are_left_out(args):
    args.train.max_steps = 6
    folder = litft.finetune(args).folder
    path = folder / "metrics.csv"
    before = rows_of(folder)
    with path.open("ab") as file:
        file.write(b"4,x4637,1,2\n\xff\xfe,\n3,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,x\n7,")
    litft.finetune(replace(args, resume=True))
    assert [row["step"] for row in rows_of(folder)][: len(before)] == [row["step"] for row in before]
    path.write_text("1,2,3\n")
    with pytest.raises(ValueError, match=r"metrics.csv does not start with a row of column names"):
        litft.finetune(replace(args, resume=True))
    path.unlink()
    assert litft.finetune(replace(args, resume=True)).metrics["val_loss"]


def test_answers_that_a_crash_has_spoiled_are_left_out(args):
    args.eval.max_new_tokens, args.eval.prompts, args.train.max_steps = 2, ["a\u2028b\x85c"], 2
    folder = litft.finetune(args).folder
    before = (folder / "samples.jsonl").read_text("utf-8")
    spoiled = ["5", '{"prompt": "a"}', '{"step": "x", "prompt": "", "answer": ""}', "[]", '{"step": 1']  # the last one cut
    (folder / "samples.jsonl").write_text(before + "\n".join(spoiled), "utf-8")
    litft.finetune(replace(args, resume=True))
    assert (folder / "samples.jsonl").read_text("utf-8") == before


def test_a_progress_with_odd_content_is_damaged(args, capfd):
    args.train.max_steps, args.save.interval, args.train.optimizer = 4, 2, "adamw_8bit"
    folder = litft.finetune(args).folder
    path = folder / "checkpoints" / "step-000004" / "progress.json"
    whole = path.read_text()
    for spoil in (
        lambda p: p.pop("elapsed"),
        lambda p: p.pop("optimizer"),
        lambda p: p.update(step=2),
        lambda p: p.update(files=[1]),
        lambda p: p["optimizer"].update(groups=[]),
        lambda p: p["optimizer"].update(parameters={}, groups=[{"params": 1}]),
    ):
        progress = json.loads(whole)
        spoil(progress)
        path.write_text(json.dumps(progress))
        litft.finetune(replace(args, resume=True))  # which writes the checkpoint again
        said = capfd.readouterr().out
        assert "step-000004 is damaged" in said and "continuing after step 2" in said
        assert path.read_text() == whole or json.loads(path.read_text()).keys() == json.loads(whole).keys()


def test_a_loss_that_is_infinite_can_be_left_out_too(args, monkeypatch):
    import litft.training.trainer

    real, steps = litft.training.trainer.accumulate, []

    def infinite(*words):
        steps.append(real(*words))
        return steps[-1] * (torch.inf if len(steps) == 3 else 1.0)

    monkeypatch.setattr(litft.training.trainer, "accumulate", infinite)
    args.train.skip_nan = True
    folder, metrics = litft.finetune(args)
    assert metrics["step"] == 12 and math.isinf(rows_of(folder)[3]["loss"])


def test_checkpoints_beyond_a_million_steps(tmp_path):
    from litft.training import run_state

    for step in (999_900, 999_950, 1_000_000, 1_000_050):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    assert run_state.newest(tmp_path).name == "step-1000050"
    run_state.delete_after(tmp_path, 1_000_000)
    run_state.prune(tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1000000"]


@pytest.mark.slow
def test_two_processes_go_on(tiny, examples, tmp_path):
    """Three times, since they may race."""
    words = ["--checkpoint_dir", tiny, "--data.path", examples, "--devices", "2", "--train.max_steps", "4"]
    words += ["--eval.max_new_tokens", "3", "--eval.interval", "1", "--out_dir", "run"]
    script("finetune/lora.py", *words, cwd=tmp_path)
    whole = weights(tmp_path / "run")
    for _ in range(3):
        script("finetune/lora.py", "--resume", "--out_dir", "run", cwd=tmp_path)
        assert weights(tmp_path / "run") == whole
