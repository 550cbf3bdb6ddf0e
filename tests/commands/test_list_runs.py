"""`litft runs`, `litft --version` and `python -m litft`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import litft
from litft.args import DataArgs, EvalArgs, LoRAFinetuneArgs, SaveArgs, TrainArgs
from litft.commands.runs import find_runs, read_run
from litft.folder_lock import locked_folder
from litft.run_dir import write_config


def command(*words: str, cwd: Path, code: int = 0) -> str:
    """What `python -m litft` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "litft", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_runs_are_listed_with_their_state(tiny, tmp_path):
    """A finished run, one with a checkpoint and a torn metrics.csv, one that has only begun, and a
    folder that is none."""
    args = LoRAFinetuneArgs(
        checkpoint_dir=str(tiny),
        out_dir=str(tmp_path / "out" / "whole"),
        data=DataArgs(path=[str(litft.__path__[0]) + "/demo"]),
        train=TrainArgs(max_steps=2, global_batch_size=2),
        eval=EvalArgs(max_new_tokens=0, max_batches=1),
        save=SaveArgs(interval=1),
    )
    outcome = litft.finetune(args)
    whole, stopped, begun = (
        tmp_path / "out" / name for name in ("whole", "stopped", "begun")
    )
    for folder in (stopped, begun):
        shutil.copytree(whole, folder)
        shutil.rmtree(folder / "final")
    with (stopped / "metrics.csv").open("a") as file:
        file.write("3,0.1,6,70")
    shutil.rmtree(begun / "checkpoints")
    (begun / "metrics.csv").unlink()
    (tmp_path / "out" / "other").mkdir()
    (tmp_path / "out" / "other" / "config.yaml").write_text("a: 1\n")
    runs = {run.folder.name: run for run in find_runs(tmp_path / "out")}
    assert runs.keys() == {"whole", "stopped", "begun"}
    assert (
        runs["whole"].state == "finished"
        and runs["whole"].method == "lora"
        and runs["whole"].model == tiny.name
    )
    assert (
        runs["stopped"].state == "not finished; --resume continues after step 2"
        and runs["stopped"].steps == 2
    )
    # the verdict of a run that was continued is of its earlier result
    assert runs["whole"].verdict and not runs["stopped"].verdict
    assert (
        runs["begun"].state == "not finished; no checkpoint yet"
        and not runs["begun"].losses
    )
    with locked_folder(begun):
        assert read_run(begun).state.startswith(f"running: process {os.getpid()} on ")
    expected = {
        "loss": outcome.metrics["loss"],
        "validation loss": outcome.metrics["val_loss"],
    }
    for name, value in expected.items():
        assert abs(runs["stopped"].losses[name] - value) < 1e-6
    config = (whole / "config.yaml").read_text()
    (whole / "config.yaml").write_text(config.replace(str(tiny), "models/smol/base"))
    assert read_run(whole).model == "smol/base"
    lines = command("runs", cwd=tmp_path).splitlines()
    assert len(lines) == 4 and lines[0].split()[:5] == [
        "run",
        "last",
        "start",
        "method",
        "model",
    ]
    assert "has no runs" in command("runs", "--folder", "nothing", cwd=tmp_path, code=2)


def test_the_validation_loss_of_a_run_with_rewards_is_none(tmp_path):
    """It is minus the reward."""
    write_config(tmp_path, "lora", "checkpoint_dir: m\nobjective: grpo\n", launch=None)
    (tmp_path / "metrics.csv").write_text(
        "step,loss,val_loss,val_reward\n0,,-0.75,0.75\n1,0.1,,\n"
    )
    assert read_run(tmp_path).losses == {"loss": 0.1}


def test_the_version_is_printed(tmp_path):
    assert command("--version", cwd=tmp_path) == f"litft {litft.__version__}\n"
    assert "usage: litft COMMAND" in command(cwd=tmp_path)
    for other, ours in {
        "train": "finetune lora",
        "inference": "chat",
        "preprocess": "prepare_data",
        "cat": "chat",
        "lora": "finetune lora",
    }.items():
        message = command(other, cwd=tmp_path, code=2)
        assert f"no command '{other}'; did you mean litft {ours}? `litft --help`" in message
        # the hint does not scroll away
        assert message.count("\n") == 1
    assert "it needs a method: litft finetune lora" in command(
        "finetune", cwd=tmp_path, code=2
    )
    message = command("finetune", "qlora", cwd=tmp_path, code=2)
    assert "use litft finetune lora --quantize nf4; `litft --help`" in message
    usage = command("finetune", "--help", cwd=tmp_path)
    assert "usage: litft finetune METHOD" in usage and "litft finetune adapter_v2" in usage
