"""Compare what a small student learns from labels alone with what it learns from a teacher, too.

    python scripts/benchmark_distill.py [--seeds 3]

The teacher is the demo's base, fine-tuned in full on all of the demo's examples; the student begins
from the base and sees a part of them. The table has the cross-entropy and the exact match on the
demo's validation examples, which neither has seen. Six minutes on two CPU cores.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import litft
from litft.args.parser import parse
from litft.cli import user_errors
from litft.pretrained.folder import DEMO

# how much the loss is the teacher's, and at which temperature
CONTENDERS: dict[str, dict[str, Any]] = {
    "labels alone": {},
    "half from the teacher": {"objective": "distill", "distill_temperature": 2.0},
    "all from the teacher": {
        "objective": "distill",
        "distill_alpha": 0.0,
        "distill_temperature": 2.0,
    },
}


@dataclass
class DistillBenchmarkArgs:
    """Compare learning from labels with learning from a teacher."""

    seeds: int = 3
    """Runs of each contender."""
    examples: int = 1200
    """Training examples of the student."""

    def problems(self) -> list[str]:
        """Return no problems: all values have a meaning."""
        return []


def compare(
    args: DistillBenchmarkArgs, folder: Path
) -> dict[str, list[tuple[float, float]]]:
    """Return the cross-entropy and the exact match of each contender, by seed."""
    teacher = litft.finetune(
        model=DEMO / "base",
        data=DEMO / "train.jsonl",
        method="full",
        out_dir=folder / "teacher",
        **{
            "data_val_path": str(DEMO / "val.jsonl"),
            "train_epochs": 6,
            "train_global_batch_size": 32,
            "train_micro_batch_size": 8,
            "train_learning_rate": 3e-4,
            "eval_max_new_tokens": 0,
        },
    )
    lines = (DEMO / "train.jsonl").read_text("utf-8").splitlines(keepends=True)
    few = folder / "few.jsonl"
    few.write_text("".join(lines[: args.examples]), "utf-8")

    scores: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for seed in range(args.seeds):
        for name, settings in CONTENDERS.items():
            settings = dict(settings)
            if settings:
                settings["teacher"] = str(teacher.folder / "final")
            run = litft.finetune(
                model=DEMO / "base",
                data=few,
                out_dir=folder / "student",
                overwrite=True,
                seed=seed,
                **{
                    "data_val_path": str(DEMO / "val.jsonl"),
                    "train_epochs": 6,
                    "train_learning_rate": 1e-3,
                    "train_micro_batch_size": 8,
                    "lora_r": 16,
                    "lora_alpha": 32,
                    "lora_targets": ["all-linear"],
                    "eval_exact_match": True,
                    "eval_max_new_tokens": 0,
                    "eval_interval": 0,
                    **settings,
                },
            )
            values = run.metrics
            loss = values.get("val_cross_entropy", values["val_loss"])
            scores[name].append((loss, values["exact_match"]))
    return scores


def main() -> None:
    """Print a table with a line for each contender."""
    with user_errors():
        args = parse(DistillBenchmarkArgs, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        scores = compare(args, Path(folder))
    print("learned from           cross-entropy of each seed      exact match of each seed")
    for name, values in scores.items():
        losses = "  ".join(f"{loss:.4f}" for loss, _ in values)
        matches = "  ".join(f"{match:.1%}" for _, match in values)
        print(f"{name:22} {losses:31} {matches}")


if __name__ == "__main__":
    main()
