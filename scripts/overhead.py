"""What logging and checkpoints cost: the time between steps as a part of the time in them, in one run.

python scripts/overhead.py --checkpoint_dir DIR --data.path FILE [--method full] [any flag of finetune/<method>.py]

Whatever passes between the end of a step and the beginning of the next is measured: rows, lines, checkpoints, signals.
"""

import sys
import time
from statistics import median

from litft.args.parser import parse
from litft.cli import COMMANDS, user_errors

DEFAULTS = (
    "--eval.interval 0 --eval.max_new_tokens 0 --data.val_fraction 0 --train.log_interval 1 --save.interval 10".split()
)


def main(method: str, words: list[str]) -> None:
    """Run it, and print the overhead of each ten steps."""
    from litft.training.finetune import finetune

    args = parse(COMMANDS[f"finetune {method}"].args, [*DEFAULTS, *words])
    marks: list[tuple[int, float, float]] = []

    def callback(row: dict[str, float]) -> None:
        marks.append((int(row["step"]), time.perf_counter(), row["seconds"]))

    finetune(args, callback)
    size = args.save.interval
    windows = [(b[1] - a[1], b[2] - a[2]) for a, b in zip(marks, marks[size:], strict=False) if a[0] % size == 1]
    shares = [wall / stepping - 1 for wall, stepping in windows]
    step = median(stepping for _, stepping in windows) / size
    print(f"overhead of each {size} steps: {', '.join(f'{share:.2%}' for share in shares)}; median {median(shares):.2%}")
    print(f"a step takes {step:.3f} s")


if __name__ == "__main__":
    given = sys.argv[1:]
    chosen = given.pop(given.index("--method") + 1) if "--method" in given else "lora"
    with user_errors():
        main(chosen, [word for word in given if word != "--method"])
