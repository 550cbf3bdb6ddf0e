"""Train with several processes and with one, and print the table of loss differences in
tutorials/scaling.md.

python scripts/strategy_table.py [--write]     (takes a few minutes)
"""

import json
import sys
import tempfile
from pathlib import Path

from tables import ROOT, main

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def demo(folder: Path) -> tuple[Path, Path]:
    """Return the folder of the demo model and a new file with 40 of its examples."""
    from litft.pretrained.folder import DEMO

    lines = (DEMO / "train.jsonl").read_text("utf-8").splitlines()[:40]
    data = folder / "examples.json"
    data.write_text(json.dumps([json.loads(line) for line in lines]), "utf-8")
    return DEMO / "base", data


def difference(one: dict[str, list[float]], several: dict[str, list[float]]) -> str:
    """Return the largest difference of any step's training loss or any validation loss."""
    pairs = (
        pair
        for name in ("loss", "val_loss")
        for pair in zip(one[name], several[name], strict=True)
    )
    return f"{max(abs(a - b) for a, b in pairs):.0e}"


def table() -> str:
    """Return a Markdown table: per method and base, the largest difference of losses over all steps
    and validations."""
    from strategies import METHODS, PROCESSES, cases, losses

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = demo(folder)
        results = {
            strategy: losses(model, data, folder, strategy, cases(strategy))
            for strategy in PROCESSES
        }
    several = []
    for strategy in PROCESSES:
        if strategy != "single":
            several.append(strategy)
    head = [f"{strategy}, {PROCESSES[strategy]} processes" for strategy in several]
    lines = [
        f"| method, base | loss, first to last step | {' | '.join(head)} |",
        "|---" * (len(head) + 2) + "|",
    ]
    for case in sorted(results["single"], key=lambda case: METHODS.index(case.split()[0])):
        one = results["single"][case]["loss"]
        cells = [
            difference(results["single"][case], results[s][case])
            if case in results[s]
            else "-"
            for s in several
        ]
        lines.append(
            f"| {case.replace(' none', '').replace(' ', ', ')} | {one[0]:.2f} → {one[-1]:.2f} | "
            f"{' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(__doc__, "tutorials/scaling.md", "strategies", table)
