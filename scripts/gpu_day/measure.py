"""Measure one subject in one process: each figure is a line of results.jsonl at once.

    python scripts/gpu_day/measure.py --subject lora --model llama-3.1-8b --out OUT --seconds 140

Weights are random, and no file outside of the repository is needed. What does not fit into the time
is skipped, with a line that says so. `--accelerator cpu --model tiny` tries the command.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(SCRIPTS.parent), str(SCRIPTS), str(SCRIPTS / "peers")]

from litft.args.parser import parse  # noqa: E402
from litft.cli import user_errors  # noqa: E402


@dataclass
class MeasureArgs:
    """Measure one subject on a GPU."""

    subject: Literal["lora", "qlora", "recomputation", "decoding"] = "lora"
    """What is measured."""
    model: str = "llama-3.1-8b"
    """A folder of scripts/configs."""
    out: str = "."
    """The folder of results.jsonl and kernels.txt."""
    seconds: float = 150.0
    """The time that the process may take."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """The device type to run on. auto: cuda if available."""

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        problems = []
        if not (SCRIPTS / "configs" / self.model / "config.json").is_file():
            problems.append(
                f"--model {self.model}: no folder of scripts/configs has this name"
            )
        if not Path(self.out).is_dir():
            problems.append(f"--out {self.out}: the folder does not exist; create it")
        return problems


def main(args: MeasureArgs) -> None:
    """Measure the subject."""
    import torch
    from decoded_tokens import measure_decoding
    from figures import Figures
    from training_steps import measure_lora, measure_qlora, measure_recomputation

    from litft.distributed.devices import pick_accelerator

    subjects = {
        "lora": measure_lora,
        "qlora": measure_qlora,
        "recomputation": measure_recomputation,
        "decoding": measure_decoding,
    }
    figures = Figures(Path(args.out), args.seconds)
    device = torch.device(pick_accelerator(args.accelerator))
    torch.manual_seed(0)
    subjects[args.subject](figures, args.model, device, Path(args.out))
    figures.write(f"{args.subject} {args.model}: end")


if __name__ == "__main__":
    with user_errors():
        main(parse(MeasureArgs, sys.argv[1:]))
