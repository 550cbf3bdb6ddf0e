"""Let every method learn the demo of rewards, with weights in bf16 and in nf4, and print a table.

    python scripts/rewards_methods.py --out_dir out/rewards

The tuned adapter of the demo is merged first, so that all methods begin with the same weights. Each
run has the settings of `--config grpo-demo` but for its learning rate.
"""

import csv
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from litft.args.parser import parse
from litft.cli import user_errors

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "litft" / "demo"


@dataclass(frozen=True)
class Learner:
    """A method and its learning rate."""

    script: str  # in finetune/
    learning_rate: float
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name in the table."""
        return " ".join((self.script, *self.flags))


LEARNERS = (
    Learner("lora", 1e-3),
    Learner("lora", 1e-3, ("--lora.dora",)),
    Learner("adapter", 2e-2),
    Learner("adapter_v2", 5e-3),
    Learner("full", 1e-4),
)


@dataclass
class RewardsMethodsArgs:
    """Learn the demo of rewards with every method."""

    out_dir: str = "out/rewards_methods"
    """The folder of the runs, which must not exist."""
    max_steps: int = 120
    """Optimizer steps of a run."""

    def problems(self) -> list[str]:
        """Return the problem of a folder that exists."""
        if Path(self.out_dir).exists():
            return [f"--out_dir {self.out_dir}: it exists; name another"]
        return []


def run(*words: object) -> None:
    """Run a script of this repository without its output."""
    command = [sys.executable, *map(str, words)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def learn(learner: Learner, quantize: str, base: Path, folder: Path, max_steps: int) -> str:
    """Train, and return the row of the table."""
    flags = [
        "--config",
        DEMO / "grpo-demo.yaml",
        "--checkpoint_dir",
        base,
        "--data.path",
        DEMO,
    ]
    flags += ["--precision", "bf16", "--quantize", quantize, "--out_dir", folder]
    flags += [
        "--train.learning_rate",
        learner.learning_rate,
        "--train.max_steps",
        max_steps,
    ]
    run(f"finetune/{learner.script}.py", *flags, *learner.flags)
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    rewards = [float(row["val_reward"]) for row in rows if row["val_reward"]]
    return (
        f"| {learner.name} | {quantize} | {learner.learning_rate:g} | {rewards[0]:.2f} "
        f"| {rewards[-1]:.2f} |"
    )


def main() -> None:
    """Print the table."""
    with user_errors():
        args = parse(RewardsMethodsArgs, sys.argv[1:])
    out = Path(args.out_dir).absolute()
    base = out / "base"
    run("scripts/merge_lora.py", "--checkpoint_dir", DEMO / "tuned", "--out_dir", base)
    print("| method | base | learning rate | reward before | after |")
    print("|---|---|---|---|---|")
    for number, learner in enumerate(LEARNERS):
        # full fine-tuning changes every weight, so it has none that are quantized
        kinds = ("none",) if learner.script == "full" else ("none", "nf4")
        for quantize in kinds:
            folder = out / f"{number}-{learner.script}-{quantize}"
            row = learn(learner, quantize, base, folder, args.max_steps)
            print(row, flush=True)


if __name__ == "__main__":
    main()
