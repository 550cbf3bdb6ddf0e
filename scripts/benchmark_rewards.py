"""Measure steps of `--objective grpo` against TRL's GRPOTrainer without vLLM, one after the other.

    python scripts/benchmark_rewards.py --checkpoint_dir DIR --data.path PROMPTS.jsonl --out FILE

Needs `pip install -e '.[test]'`. Both train the same LoRA targets and rank on the same number of
prompts, completions and tokens a step, in one precision with the same threads. Each turn starts a
process of its own, takes `steps` steps and reports the median time of all but the first; the
contenders alternate. A record has a `prompt` or a `question`. With `--reward length` every group
has an advantage, so both train on all completions. With `--reward number` the last number must be
that of the record's `answer`: litft leaves completions without an advantage out of the update.
"""

import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal

from litft.args import DataArgs
from litft.args.parser import parse
from litft.cli import user_errors

ROOT = Path(__file__).parent.parent
REWARD = "def length(completion):\n    return float(len(completion))\n"


@dataclass
class RewardBenchmarkArgs:
    """Measure steps of learning from rewards against TRL."""

    checkpoint_dir: str | None = None
    """The folder of the model."""
    prompts: int = 32
    """Prompts of a step."""
    group_size: int = 8
    """Completions of a prompt."""
    max_new_tokens: int = 64
    """Tokens of a completion."""
    steps: int = 3
    """Steps of a turn; the first is not counted."""
    turns: int = 2
    """Turns of each contender."""
    threads: int = 2
    """CPU threads."""
    reward: Literal["length", "number"] = "length"
    """The length of a completion, or whether its last number is that of the answer."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """The dtype of the frozen weights and of the computation."""
    out: str | None = None
    """A JSON file to write the results to. Default: no file."""
    data: DataArgs = field(default_factory=DataArgs)

    def problems(self) -> list[str]:
        """Return the problems of missing values."""
        problems = []
        for name, value in (
            ("checkpoint_dir", self.checkpoint_dir),
            ("data.path", self.data.path),
        ):
            if not value:
                problems.append(f"--{name} is missing")
        return problems


def litft_seconds(args: RewardBenchmarkArgs, folder: Path) -> list[float]:
    """Return the seconds of each step of a litft run."""
    reward = args.reward
    if reward == "length":
        (folder / "rewards.py").write_text(REWARD)
        reward = f"{folder}/rewards.py:length"
    command = [sys.executable, ROOT / "finetune" / "lora.py", "--objective", "grpo"]
    command += ["--checkpoint_dir", args.checkpoint_dir, "--data.path", args.data.path[0]]
    command += ["--reward", reward, "--data.val_fraction", "0"]
    command += [
        "--grpo.group_size",
        args.group_size,
        "--grpo.max_new_tokens",
        args.max_new_tokens,
    ]
    command += ["--grpo.rollout_rows", args.prompts * args.group_size]
    command += ["--train.global_batch_size", args.prompts, "--train.max_steps", args.steps]
    command += [
        "--train.log_interval",
        1,
        "--train.micro_batch_size",
        8,
        "--precision",
        args.precision,
    ]
    command += [
        "--lora.targets",
        "q_proj,v_proj",
        "--lora.r",
        16,
        "--eval.max_new_tokens",
        0,
    ]
    command += ["--save.interval", 0, "--out_dir", folder / "run"]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    subprocess.run(list(map(str, command)), check=True, env=env, stdout=subprocess.DEVNULL)
    with (folder / "run" / "metrics.csv").open() as file:
        totals = [float(row["seconds"]) for row in csv.DictReader(file) if row["loss"]]
    return [after - before for before, after in zip([0.0, *totals], totals, strict=False)]


def trl_seconds(args: RewardBenchmarkArgs, folder: Path) -> list[float]:
    """Return the seconds of each step of a TRL run."""
    setup = folder / "setup.json"
    setup.write_text(json.dumps(asdict(args)))
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    script = ROOT / "scripts" / "peers" / "run_trl_rewards.py"
    done = subprocess.run(
        [sys.executable, str(script), str(setup)],
        check=True,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Let the contenders take turns, and print the medians and their ratio."""
    with user_errors():
        args = parse(RewardBenchmarkArgs, sys.argv[1:])
    seconds: dict[str, list[float]] = {"litft": [], "trl": []}
    for _ in range(args.turns):
        for name, measure in (("litft", litft_seconds), ("trl", trl_seconds)):
            with tempfile.TemporaryDirectory() as folder:
                seconds[name] += measure(args, Path(folder))[1:]
            print(f"{name}: {statistics.median(seconds[name]):.1f} s a step", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"TRL takes {medians['trl'] / medians['litft']:.2f} times as long")
    if args.out:
        result = {
            "date": str(date.today()),
            "machine": platform.processor(),
            "seconds": seconds,
        }
        Path(args.out).write_text(json.dumps(result | {"args": asdict(args)}, indent=1))


if __name__ == "__main__":
    main()
