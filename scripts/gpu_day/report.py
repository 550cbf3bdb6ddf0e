"""Merge the results of days with a GPU, and write their tables into README and tutorials.

    python scripts/gpu_day/report.py --days scripts/gpu_days
    python scripts/gpu_day/report.py --days OUT --print      # one day, before it is committed

A day is a folder with the files that scripts/gpu_day.sh writes. A later day replaces the figures of
an earlier one on the same card; a part that failed later keeps its earlier figures.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from figures import RESULTS, Values, has_figures, read_figures  # noqa: E402

from litft.args.parser import parse  # noqa: E402
from litft.atomic import atomic_write  # noqa: E402
from litft.cli import user_errors  # noqa: E402

PAGE = ROOT / "tutorials" / "performance.md"
# what stands between the marks is written by this script
MARKS = (
    "<!-- figures of a GPU: scripts/gpu_day/report.py -->",
    "<!-- end of the figures -->",
)
NONE_YET = "**No number of this guide was measured on a GPU yet.**"
# published elsewhere, for the same kind of step
PUBLISHED = (
    "Published for comparison: NeMo Automodel, Llama 3.1 8B, LoRA, rows of 4,096 tokens, one H100: "
    "12,473 tokens/s (42 % MFU)."
)


@dataclass
class ReportArgs:
    """Write the tables of days with a GPU."""

    days: str = "scripts/gpu_days"
    """A folder with a folder for each day, or the folder of one day."""
    print: bool = False
    """Print the tables instead of writing them into the guide."""

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        if Path(self.days).is_dir():
            return []
        return [f"--days {self.days}: the folder does not exist; name the results of a day"]


@dataclass
class Card:
    """What was measured on one kind of GPU, over all days."""

    title: str  # the card, the version of torch, the newest day
    parts: dict[str, Values]
    peer: dict[str, Values]  # by contender, from scripts/benchmark.py
    plan: dict[str, Values]  # by cell, from scripts/plan_accuracy.py
    failed: dict[str, str]


def day_folders(folder: Path) -> list[Path]:
    """Return the folders of days, the oldest first."""
    if (folder / RESULTS).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{RESULTS}"))


def read_cards(folders: list[Path]) -> list[Card]:
    """Return what was measured, by card."""
    cards: dict[str, Card] = {}
    for folder in folders:
        name, torch_version = _machine(folder)
        title = f"{name}, torch {torch_version}, {folder.name}"
        card = cards.setdefault(name, Card(title, {}, {}, {}, {}))
        card.title = title
        for part, values in read_figures(folder).items():
            if has_figures(values):
                card.parts[part] = values
                card.failed.pop(part, None)
            elif part not in card.parts:
                card.failed[part] = values.get("error") or values["skipped"]
        for part, status in _ended_parts(folder):
            if status != "0" and part not in card.parts:
                card.failed[part] = f"exit {status}"
        peer = _read_json(folder / "peft.json")
        card.peer |= peer.get("figures", {})
        card.plan |= _read_json(folder / "cells.json")
    return list(cards.values())


def _machine(folder: Path) -> tuple[str, str]:
    """Return the card and the version of torch of a day, from machine.txt."""
    path = folder / "machine.txt"
    text = path.read_text("utf-8") if path.is_file() else ""
    # the line that scripts/gpu_day.sh prints: interpreter, torch, CUDA, card
    found = re.search(r"^/\S+ (\d\S+) \S+ (.+)$", text, re.MULTILINE)
    if found is None:
        return "unknown GPU", "unknown"
    return found[2], found[1]


def _ended_parts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the parts of the calls of a day, with how each ended."""
    for path in sorted(folder.glob("parts-*.csv")):
        for name, status, _ in csv.reader(path.read_text("utf-8").splitlines()):
            yield name, status


def _read_json(path: Path) -> dict[str, Values]:
    if not path.is_file():
        return {}
    return json.loads(path.read_text("utf-8"))


def page(card: Card) -> list[str]:
    """Return the lines of a card's tables."""
    lines = [f"**{card.title}** (`scripts/gpu_day.sh`)", ""]
    lines += _training_table(card)
    lines += _peer_table(card)
    lines += _decoding_table(card)
    lines += _plan_line(card)
    if card.failed:
        reasons = [
            f"{name} ({reason[:120]})" for name, reason in sorted(card.failed.items())
        ]
        lines += [f"Not measured: {'; '.join(reasons)}.", ""]
    return lines


def _training_table(card: Card) -> list[str]:
    """Return the table of training steps."""
    rows = []
    for name, values in card.parts.items():
        if "peak_gib" not in values:
            continue
        launches = card.parts.get(f"kernels of {name}", {}).get("launches", "")
        off_by = values["peak_gib"] and values["planned_gib"] / values["peak_gib"] - 1
        cells = [
            name,
            f"{values['tokens_per_second']:,}",
            f"{values['mfu']:.0%}" if "mfu" in values else "",
            f"{values['seconds']:.3f}",
            f"{values['host_seconds']:.3f}",
            f"{values['peak_gib']:.2f}",
            f"{values['planned_gib']:.2f} ({off_by:+.1%})",
            f"{launches:,}" if launches else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    head = "| step | tokens/s | MFU | s | s of the host | peak, GiB | planned | launches |"
    return [head, "|---|---|---|---|---|---|---|---|", *rows, "", PUBLISHED, ""]


def _peer_table(card: Card) -> list[str]:
    """Return the table that compares litft with transformers and peft."""
    if not card.peer:
        return []
    lines = [
        "| 1 x 2,048 tokens | tokens/s | litft is faster by | peak, GiB |",
        "|---|---|---|---|",
    ]
    for name, values in card.peer.items():
        speed = f"{values['tokens_per_second']:,.0f} | {values['litft_is_faster_by']:.2f}"
        lines.append(f"| {name} | {speed} | {values['peak_memory_gib']:.2f} |")
    return [*lines, ""]


def _decoding_table(card: Card) -> list[str]:
    """Return the table of decoded tokens."""
    rows = []
    for name, values in card.parts.items():
        if "prefill_seconds" not in values:
            continue
        cells = [
            name,
            f"{values['tokens_per_second']:.1f}",
            f"{values['share_of_copy_bandwidth']:.0%}",
            f"{values['host_seconds'] * 1000:.2f}",
            f"{values['prefill_seconds']:.3f}",
            f"{values['first_prefill'] + values['first_tokens']:.1f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    head = (
        "| decoding | tokens/s | of the copy bandwidth | ms of the host | prefill, s | "
        "first tokens, s |"
    )
    return [head, "|---|---|---|---|---|---|", *rows, ""]


def _plan_line(card: Card) -> list[str]:
    """Return how far the plan was from the measured peaks."""
    errors = []
    for cell in card.plan.values():
        if cell["off_by"] is not None:
            errors.append(cell["off_by"])
    if not errors:
        return []
    span = f"{min(errors):+.1%} to {max(errors):+.1%}"
    return [f"The plan is off by {span} of the measured peak in {len(errors)} cells.", ""]


def main(args: ReportArgs) -> None:
    """Print the tables, or write them into the guide."""
    lines = []
    for card in read_cards(day_folders(Path(args.days))):
        lines += page(card)
    text = "\n".join(lines).strip() or NONE_YET
    if args.print:
        print(text)
        return
    guide = PAGE.read_text("utf-8")
    before, begin, rest = guide.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"{PAGE} has no marks {MARKS[0]!r} and {MARKS[1]!r}; restore them")
    atomic_write(PAGE, f"{before}{begin}\n\n{text}\n\n{end}{after}")


if __name__ == "__main__":
    with user_errors():
        main(parse(ReportArgs, sys.argv[1:]))
