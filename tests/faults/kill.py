"""Kill a run again and again, a third of the times while it saves, and let it go on: it has to end as if nothing was.

python tests/faults/kill.py --checkpoint_dir ../shared/checkpoints/stories260K --kills 30

After every kill the newest checkpoint has to be whole and at most twice --interval steps old, since one is written beside
the steps, and in the end the weights have to have the sha256 of those of a run that nobody killed. Each run is a process of
its own that begins as a copy of this one, with everything imported: thirty starts would take longer than thirty runs.
"""

import argparse
import csv
import hashlib
import json
import os
import random
import signal
import tempfile
import time
from importlib import import_module
from pathlib import Path

from litft.cli import run
from litft.training import run_state


def start(words: list[str], log: Path) -> int:
    """Begin a run in a process of its own; returns its number."""
    if child := os.fork():
        return child
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        run(words[0], words[1:])
        os._exit(0)
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


def alive(child: int) -> bool:
    """Whether a run still runs; one that failed ends this script too."""
    found, status = os.waitpid(child, os.WNOHANG)
    assert not status, f"a run ended with status {status}"
    return not found


def wait(child: int, folder: Path, saving: bool, longest: float, last: float) -> None:
    """Until it is time to kill: at random, or a moment after a save begins; not long after the step `last` in any case."""
    deadline = time.monotonic() + random.uniform(0.05, 1) * longest
    while True:
        if not alive(child):
            raise SystemExit("a run ended before it was killed; raise --steps")
        names = sorted(path.name for path in folder.glob("checkpoints/step-*"))
        late = time.monotonic() > deadline or (names and int(names[-1][5:11]) > last)
        if late and not saving:
            return
        if late and any(name.endswith(".partial") for name in names):
            time.sleep(random.uniform(0, 0.02))
            return
        time.sleep(0.0005)


def peer_failure(folder: Path) -> int:
    """How many steps a kill has cost: those in metrics.csv beyond the newest checkpoint, which has to be whole."""
    path, newest = folder / "metrics.csv", run_state.newest(folder)
    saved = run_state.read_progress(newest)["step"] if newest else 0
    if newest:
        run_state.read_parameters(newest)
    with path.open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if (row["step"] or "").isdigit()]
    return max([0, *steps]) - saved


def digest(folder: Path) -> str:
    """The sha256 of a finished run's weights."""
    files = sorted((folder / "final").glob("*.safetensors"))
    assert files, f"{folder} did not finish"
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint_dir", type=Path, required=True)
    parser.add_argument("--method", default="lora")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--interval", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", default="", help="more flags of the run, with spaces between them")
    args = parser.parse_args()
    random.seed(args.seed)
    import_module("litft.training.finetune")  # what a run needs is there before the first begins
    top = Path(tempfile.mkdtemp(prefix="litft-kills-"))
    records = [{"instruction": f"Count to {n}", "output": " ".join(map(str, range(1, n % 12 + 2)))} for n in range(60)]
    (top / "data.json").write_text(json.dumps(records), "utf-8")
    words = [f"finetune {args.method}", "--checkpoint_dir", str(args.checkpoint_dir), "--data.path", str(top / "data.json")]
    words += f"--train.max_steps {args.steps} --train.global_batch_size 4 --save.interval {args.interval}".split()
    words += f"--eval.interval 50 --data.val_fraction 0.1 {args.flags}".split()
    begun = time.monotonic()
    child = start([*words, "--out_dir", str(top / "undisturbed")], top / "log")
    assert os.waitpid(child, 0)[1] == 0, (top / "log").read_text()
    longest = 1 + 1.5 * (time.monotonic() - begun) / args.kills  # a run's life: its start, and some steps
    worst = inside = kills = 0
    folder = top / "killed"
    while kills < args.kills:
        child = start([*words, "--out_dir", str(folder), "--resume"], top / "log")
        wait(child, folder, kills % 3 == 2, longest, last=args.steps * (kills + 1) / (args.kills + 2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        inside += any((folder / "checkpoints").glob("step-*.partial"))
        worst = max(worst, peer_failure(folder) if (folder / "metrics.csv").is_file() else 0)
    child = start([*words, "--out_dir", str(folder), "--resume"], top / "log")
    assert os.waitpid(child, 0)[1] == 0, (top / "log").read_text()[-3000:]
    same = digest(folder) == digest(top / "undisturbed")
    print(f"{kills} kills, {inside} of them inside a save; at most {worst} steps lost; equal weights: {same}")
    assert same and worst <= 2 * args.interval and inside >= kills // 3, top


if __name__ == "__main__":
    main()
