"""Kill a run many times, a third of them during a save, and resume it: its final weights must not
change.

python tests/faults/kill.py --checkpoint_dir tests/stories --kills 30

After every kill the newest checkpoint must be complete and at most twice --interval steps old,
since checkpoints are written in the background. At the end the weights must have the sha256 of an
uninterrupted run. Each run is a fork of this process,
with everything imported: thirty starts would take longer than thirty runs.
"""

import argparse
import csv
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from litft.cli import run
from litft.training.output import run_checkpoints

ROOT = Path(__file__).parents[2]


def start(arguments: list[str], log: Path) -> int:
    """Start a run in a forked process and return its process id."""
    if child := os.fork():
        return child
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        command, *flags = arguments
        sys.argv = [
            str(ROOT / f"{command.replace(' ', '/')}.py"),
            *flags,
        ]  # which the other processes of a run are started with
        run(command)
        os._exit(0)
    except SystemExit as exit_request:
        os._exit(int(exit_request.code or 0))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


def alive(child: int) -> bool:
    """Return whether a run is still running; raise AssertionError if it failed."""
    pid, status = os.waitpid(child, os.WNOHANG)
    assert not status, f"a run ended with status {status}"
    return not pid


def wait(
    child: int, folder: Path, saving: bool, max_seconds: float, max_step: float
) -> None:
    """Wait until a random time, soon after the step `max_step` at the latest; if `saving`, until
    the next save has begun."""
    deadline = time.monotonic() + random.uniform(0.05, 1) * max_seconds
    while True:
        if not alive(child):
            raise SystemExit("a run ended before it was killed; raise --steps")
        checkpoint_names = sorted(path.name for path in folder.glob("checkpoints/step-*"))
        due = time.monotonic() > deadline or (
            checkpoint_names and int(checkpoint_names[-1][5:11]) > max_step
        )
        if due and not saving:
            return
        if due and any(name.endswith(".partial") for name in checkpoint_names):
            time.sleep(random.uniform(0, 0.02))
            return
        time.sleep(0.0005)


def lost_steps(folder: Path) -> int:
    """Return the number of steps in metrics.csv after the newest checkpoint, which must be
    complete."""
    path, newest = folder / "metrics.csv", run_checkpoints.newest(folder)
    saved = run_checkpoints.read_progress(newest)["step"] if newest else 0
    if newest:
        run_checkpoints.read_parameters(newest)
    with path.open(newline="") as file:
        steps = [
            int(row["step"])
            for row in csv.DictReader(file)
            if (row["step"] or "").isdigit()
        ]
    return max([0, *steps]) - saved


def digest(folder: Path) -> str:
    """Return the sha256 of a finished run's weights."""
    files = sorted((folder / "final").glob("*.safetensors"))
    assert files, f"{folder} did not finish"
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def main() -> None:
    """Kill runs as the flags say, and compare the final weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint_dir", type=Path, required=True)
    parser.add_argument("--method", default="lora")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--interval", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--flags", default="", help="more flags of the run, with spaces between them"
    )
    args = parser.parse_args()
    random.seed(args.seed)
    import_module("litft.commands.finetune")  # imported once, before the first fork
    root = Path(tempfile.mkdtemp(prefix="litft-kills-"))
    records = []
    for n in range(60):
        answer = " ".join(map(str, range(1, n % 12 + 2)))
        if "--objective" in args.flags:
            records.append(
                {"prompt": f"Count to {n}", "chosen": answer, "rejected": f"{n}"}
            )
        else:
            records.append({"instruction": f"Count to {n}", "output": answer})
    (root / "data.json").write_text(json.dumps(records), "utf-8")
    arguments = [
        f"finetune {args.method}",
        "--checkpoint_dir",
        str(args.checkpoint_dir),
        "--data.path",
        str(root / "data.json"),
    ]
    arguments += (
        f"--train.max_steps {args.steps} --train.global_batch_size 4 --save.interval "
        f"{args.interval}".split()
    )
    arguments += f"--eval.interval 50 --data.val_fraction 0.1 {args.flags}".split()
    started_at = time.monotonic()
    child = start([*arguments, "--out_dir", str(root / "undisturbed")], root / "log")
    assert os.waitpid(child, 0)[1] == 0, (root / "log").read_text()
    # of one run: its start and some steps
    max_seconds = 1 + 1.5 * (time.monotonic() - started_at) / args.kills
    max_lost = during_save = kills = 0
    folder = root / "killed"
    while kills < args.kills:
        child = start([*arguments, "--out_dir", str(folder), "--resume"], root / "log")
        wait(
            child,
            folder,
            kills % 3 == 2,
            max_seconds,
            max_step=args.steps * (kills + 1) / (args.kills + 2),
        )
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        during_save += any((folder / "checkpoints").glob("step-*.partial"))
        max_lost = max(
            max_lost, lost_steps(folder) if (folder / "metrics.csv").is_file() else 0
        )
    child = start([*arguments, "--out_dir", str(folder), "--resume"], root / "log")
    assert os.waitpid(child, 0)[1] == 0, (root / "log").read_text()[-3000:]
    equal = digest(folder) == digest(root / "undisturbed")
    print(
        f"{kills} kills, {during_save} of them inside a save; at most {max_lost} steps lost; equal "
        f"weights: {equal}"
    )
    assert equal and max_lost <= 2 * args.interval and during_save >= kills // 3, root


if __name__ == "__main__":
    main()
