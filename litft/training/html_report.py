"""report.html: a run on one page that needs nothing else, neither scripts nor the network."""

import csv
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from litft.run_dir import CONFIG, write_whole

POINTS = 400  # of a curve; longer ones are drawn as the means of as many stretches
TICKS = 4

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Report:
    """What a page tells beside the run's own files: config.yaml and metrics.csv."""

    title: str
    summary: Sequence[str]  # what came out
    setup: Sequence[str]  # the data, the plan
    machine: Sequence[str]
    lengths: Sequence[tuple[int, int, int]]  # tokens from, to, and how many examples have as many
    answers: Sequence[dict[str, str | int]]  # step, prompt, answer


# title, columns, whether the axis begins at 0
CHARTS = (
    ("Loss a token", ("loss", "val_loss"), False),
    ("Learning rate", ("learning_rate",), True),
    ("Gradient's 2-norm, before clipping", ("grad_norm",), True),
    ("Tokens a second", ("tokens_per_second",), True),
)
SCORES = (
    ("step", "step", "{:.0f}"),
    ("epoch", "epoch", "{:.2f}"),
    ("val_loss", "validation loss", "{:.4f}"),
    ("val_perplexity", "perplexity", "{:.4g}"),
    ("exact_match", "exact match", "{:.1%}"),
)
NAMES = {"loss": "training", "val_loss": "validation"}


def write_report(folder: Path, report: Report) -> None:
    """Write the page into a run's folder."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    charts = [chart(title, {c: points(rows, c) for c in columns}, zero) for title, columns, zero in CHARTS]
    parts = [
        f"<h1>{html.escape(report.title)}</h1>",
        f"<p class=where>{html.escape(str(folder))}</p>",
        _list(report.summary, "summary"),
        f"<div class=charts>{''.join(charts)}</div>",
        _validations(rows),
        _answers(report.answers),
        "<h2>The examples by length</h2>",
        _bars(report.lengths),
        "<h2>The data and the plan</h2>",
        _list(report.setup),
        "<h2>The machine</h2>",
        _list(report.machine),
        f"<details><summary>{CONFIG}</summary><pre>{html.escape((folder / CONFIG).read_text('utf-8'))}</pre></details>",
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(report.title)}</title><style>{STYLE}</style></head>"
    )
    write_whole(folder / "report.html", f"{head}<body><main>{''.join(filter(None, parts))}</main></body></html>\n")


def points(rows: list[dict[str, float]], column: str) -> Points:
    """A column by step, its values that are numbers, in as many points as are drawn."""
    found = [(row["step"], row[column]) for row in rows if math.isfinite(row.get(column, math.nan))]
    size = -(-len(found) // POINTS) or 1
    stretches = [found[start : start + size] for start in range(0, len(found), size)]
    return [tuple(math.fsum(values) / len(values) for values in zip(*stretch, strict=True)) for stretch in stretches]


def chart(title: str, series: dict[str, Points], zero: bool) -> str:
    """Curves over the steps; nothing where there are no points."""
    every = [point for points in series.values() for point in points]
    if not every:
        return ""
    right = max(x for x, _ in every)
    lowest, highest = min(y for _, y in every), max(y for _, y in every)
    marks = ticks(0.0 if zero else lowest, highest)
    low, high = marks[0], marks[-1]

    def at(value: float) -> str:
        return f"{100 * (high - value) / (high - low):.2f}"

    def across(step: float) -> str:
        return f"{100 * step / max(right, 1):.2f}"

    lines, legend = [], []
    for number, (column, curve) in enumerate(series.items()):
        path = " ".join(f"{across(x)},{at(y)}" for x, y in curve)
        if len(curve) == 1:
            path += f" {across(curve[0][0] + right / 100)},{at(curve[0][1])}"
        lines.append(f'<polyline class="curve c{number}" points="{path}"/>')
        if len(series) > 1 and curve:
            legend.append(f'<span class="key c{number}">{NAMES[column]} {curve[-1][1]:.4g}</span>')
    grid = "".join(f'<line x1="0" x2="100" y1="{at(y)}" y2="{at(y)}"/>' for y in marks)
    labels = "".join(f'<span style="top:{at(y)}%">{_short(y)}</span>' for y in marks)
    steps = "".join(f'<span style="left:{across(x)}%">{_short(x)}</span>' for x in ticks(0, max(right, 1)) if x <= right)
    label = f"{title}, from {lowest:.4g} to {highest:.4g} over {right:.0f} steps"
    return (
        f"<figure><figcaption>{html.escape(title)}{''.join(legend)}</figcaption><div class=plot>"
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{html.escape(label)}">'
        f"{grid}{''.join(lines)}</svg><div class=y>{labels}</div><div class=x>{steps}</div></div></figure>"
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, evenly apart, of which the first is not above `low` and the last not below `high`."""
    span = (high - low) or abs(high) or 1.0
    raw = span / TICKS
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [number * step for number in range(first, last + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _list(lines: Sequence[str], kind: str = "") -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _validations(rows: list[dict[str, float]]) -> str:
    """A table of the validations."""
    found = [row for row in rows if "val_loss" in row]
    if not found:
        return ""
    there = [item for item in SCORES if any(item[0] in row for row in found)]
    head = "".join(f"<th>{title}</th>" for _, title, _ in there)
    body = ""
    for row in found:
        num_slots = (form.format(row[name]) if name in row else "" for name, _, form in there)
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in num_slots)}</tr>"
    return f"<h2>Validations</h2><div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def _answers(answers: Sequence[dict[str, str | int]]) -> str:
    """Every prompt with the answers before and after, and those between behind a fold."""
    if not answers:
        return ""
    asked: dict[str, list[tuple[int, str]]] = {}
    for item in answers:
        asked.setdefault(str(item["prompt"]), []).append((int(item["step"]), str(item["answer"])))
    blocks = ""
    for prompt, given in asked.items():
        ends = "".join(_answer(*item) for item in ([given[0], given[-1]] if len(given) > 1 else given))
        between = "".join(_answer(*item) for item in given[1:-1])
        fold = f"<details><summary>{len(given) - 2} between</summary>{between}</details>" if between else ""
        blocks += f"<section><blockquote>{html.escape(prompt)}</blockquote>{ends}{fold}</section>"
    return f"<h2>What the model answers</h2>{blocks}"


def _answer(step: int, text: str) -> str:
    return f"<p class=answer><b>step {step}</b> {html.escape(text) or '(nothing)'}</p>"


def _bars(lengths: Sequence[tuple[int, int, int]]) -> str:
    """A histogram."""
    most = max(count for _, _, count in lengths)
    rows = "".join(
        f"<span>{low:,} to {high:,}</span><i><b style='width:{100 * count / most:.1f}%'></b></i><span>{count:,}</span>"
        for low, high, count in lengths
    )
    return f"<div class=bars><em>tokens</em><em></em><em>examples</em>{rows}</div>"


STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9dce1; --paper: #fff; --panel: #f6f7f9;
  --c0: #3b7dd8; --c1: #d9480f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa0a8; --line: #3a3f46; --paper: #16181c;
  --panel: #1e2126; --c0: #6ba6f5; --c1: #ff9f5a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 32px 0 10px; }
.where, em, .soft { color: var(--soft); font-style: normal; margin: 0; overflow-wrap: anywhere; }
ul { padding-left: 20px; margin: 8px 0; } li { overflow-wrap: anywhere; }
ul.summary { list-style: none; padding: 12px 16px; background: var(--panel); border-radius: 8px; margin: 16px 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 20px; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: 8px; display: flex; flex-wrap: wrap; gap: 4px 14px; }
.key { font-weight: 400; color: var(--soft); } .key::before { content: ""; display: inline-block; width: 14px; height: 3px;
  margin-right: 6px; vertical-align: middle; background: var(--c0); } .key.c1::before { background: var(--c1); }
.plot { position: relative; height: 200px; margin: 0 12px 24px 56px; }
svg { width: 100%; height: 100%; overflow: visible; display: block; }
svg line { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.curve { fill: none; stroke: var(--c0); stroke-width: 1.8; vector-effect: non-scaling-stroke; stroke-linejoin: round;
  stroke-linecap: round; } .curve.c1 { stroke: var(--c1); stroke-width: 2.4; }
.y span, .x span { position: absolute; color: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.y span { right: calc(100% + 8px); transform: translateY(-50%); } .x span { top: calc(100% + 4px);
  transform: translateX(-50%); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); } th { color: var(--soft);
  font-weight: 500; }
section { background: var(--panel); border-radius: 8px; padding: 12px 16px; margin: 0 0 12px; }
blockquote { margin: 0 0 8px; color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere; }
.answer { margin: 4px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.answer b { color: var(--soft); font-weight: 500; margin-right: 8px; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 4px 12px; align-items: center;
  font-variant-numeric: tabular-nums; } .bars span { text-align: right; } .bars i { display: block; }
.bars b { display: block; height: 12px; background: var(--c0); border-radius: 2px; }
pre { overflow-x: auto; background: var(--panel); padding: 12px 16px; border-radius: 8px; font-size: 13px; }
details { margin-top: 20px; } summary { cursor: pointer; color: var(--soft); }
"""
