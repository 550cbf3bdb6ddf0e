"""Measure the overhead of logging and checkpoints: the time between steps relative to the time in
steps, in one run.

python scripts/overhead.py --checkpoint_dir DIR --data.path FILE [--method full] [any flag of
finetune/<method>.py]

The time between steps includes metrics rows, printed lines, checkpoints and signal handling.
"""

import sys
import time
from statistics import median

from litft.args.parser import parse
from litft.cli import COMMANDS, user_errors

DEFAULTS = (
    "--eval.interval 0 --eval.max_new_tokens 0 --data.val_fraction 0 --train.log_interval 1 "
    "--save.interval 10".split()
)


def main(method: str, words: list[str]) -> None:
    """Train, then print the overhead of each window of save.interval steps (default 10)."""
    from litft.python_api import finetune

    args = parse(COMMANDS[f"finetune {method}"].args, [*DEFAULTS, *words])
    marks: list[tuple[int, float, float]] = []

    def callback(row: dict[str, float]) -> None:
        marks.append((int(row["step"]), time.perf_counter(), row["seconds"]))

    finetune(args, callback)
    interval = args.save.interval
    windows = []
    for start, end in zip(marks, marks[interval:], strict=False):
        if start[0] % interval == 1:
            windows.append((end[1] - start[1], end[2] - start[2]))
    shares = [wall_time / in_steps - 1 for wall_time, in_steps in windows]
    step = median(in_steps for _, in_steps in windows) / interval
    print(
        f"overhead of each {interval} steps: {', '.join(f'{share:.2%}' for share in shares)}; "
        f"median {median(shares):.2%}"
    )
    print(f"a step takes {step:.3f} s")


if __name__ == "__main__":
    argv = sys.argv[1:]
    if "--method" in argv:
        method = argv.pop(argv.index("--method") + 1)
    else:
        method = "lora"
    with user_errors():
        main(method, [word for word in argv if word != "--method"])
