"""report.html: a self-contained page about a run, which fetches nothing."""

import base64
import hashlib
import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from litft import __version__
from litft.atomic import atomic_write
from litft.evaluation.scoring import HardExample, SampleAnswer
from litft.run_dir import CONFIG, metrics_rows

# maximum number of points of a curve; longer curves are averaged over intervals
POINTS = 400
TICKS = 4
COLORS = 6  # of curves, in report.css
STYLE, SCRIPT = (
    (Path(__file__).parent / f"report.{kind}").read_text("utf-8") for kind in ("css", "js")
)
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# no other script runs
REPORT_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{DIGEST}'"
)
CONTROLS = (
    "<div class=controls><label><input type=checkbox id=logarithmic> logarithmic "
    "loss</label><label>smoothing <input type=range id=smoothing min=0 max=0.98 step=0.02 "
    "value=0></label></div>"
)
SHOWN = 600  # characters of a validation example
# the most prompts whose answers are shown
PROMPTS = 5
# the folders of an absolute path, which the page leaves out; URLs do not match
ABSOLUTE = re.compile(r"(?<![\w./:<\[~-])~?/(?:[^\s/:,;'\"()<>]+/)+(?=[^\s/])")

Points = list[tuple[float, float]]


class SummaryTile(NamedTuple):
    """A result in large type."""

    title: str
    value: str


@dataclass(frozen=True)
class Report:
    """What the page shows in addition to the run's config.yaml and metrics.csv."""

    title: str
    state: str  # finished, running, or why the run ended
    tiles: Sequence[SummaryTile]
    flags: Mapping[str, str]  # those that matter most
    setup: Sequence[str]  # the data and the plan
    machine: Sequence[str]
    # histogram: tokens from, tokens to, number of examples
    lengths: Sequence[tuple[int, int, int]]
    answers: Sequence[SampleAnswer]
    loss: str  # what the loss is
    hardest: Sequence[HardExample] = ()
    verdicts: Sequence[str] = ()  # how the result differs from the model before training
    # further columns of the validations, and their titles
    scores: Mapping[str, str] = field(default_factory=dict)


# title, columns, whether the y-axis starts at 0
CHARTS = (
    ("Reward", ("reward", "val_reward"), False),
    ("Spread of the rewards of a prompt (standard deviation)", ("reward_std",), True),
    ("Prompts whose completions all have one reward", ("equal_rewards",), True),
    ("Tokens of a completion", ("completion_tokens",), True),
    ("Completions cut at the length limit", ("truncated",), True),
    ("Entropy of a token", ("entropy",), True),
    ("KL divergence from the reference", ("kl",), True),
    ("{loss}", ("loss", "val_loss"), False),
    ("Cross-entropy of the labels", ("cross_entropy", "val_cross_entropy"), False),
    ("Divergence from the teacher", ("divergence", "val_divergence"), True),
    ("Accuracy of the rewards", ("accuracy", "val_accuracy"), True),
    ("Margin between the rewards", ("margin", "val_margin"), False),
    (
        "Log-probability of the chosen (desirable) answers",
        ("chosen_logp", "val_chosen_logp"),
        False,
    ),
    (
        "Log-probability of the rejected (undesirable) answers",
        ("rejected_logp", "val_rejected_logp"),
        False,
    ),
    ("Learning rate", ("learning_rate",), True),
    ("Gradient norm (L2), before clipping", ("grad_norm",), True),
    ("Tokens per second", ("tokens_per_second",), True),
    ("Peak memory, GiB", ("memory_gib",), True),
)
# of named validation sets
SET_COLUMNS = ("val_loss_", "val_reward_")
TRAINING_COLUMNS = {column for _, columns, _ in CHARTS for column in columns}
SCORES = (
    ("step", "step", "{:.0f}"),
    ("epoch", "epoch", "{:.2f}"),
    ("val_loss", "validation loss", "{:.4f}"),
    ("val_perplexity", "perplexity", "{:.4g}"),
    ("exact_match", "exact match", "{:.1%}"),
    ("val_accuracy", "accuracy", "{:.1%}"),
    ("val_margin", "margin", "{:.3g}"),
    ("val_chosen_reward", "chosen reward", "{:.3g}"),
    ("val_rejected_reward", "rejected reward", "{:.3g}"),
    ("val_kl", "KL", "{:.3g}"),
    ("val_cross_entropy", "cross-entropy of the labels", "{:.4f}"),
    ("val_divergence", "divergence from the teacher", "{:.4f}"),
    ("val_reward", "reward", "{:.4f}"),
    ("val_pass_1", "pass@1", "{:.1%}"),
)


def write_report(folder: Path, report: Report) -> None:
    """Write report.html into the run folder."""
    # the data of the page
    rows = _rows(folder)
    config = (folder / CONFIG).read_text("utf-8")
    of_sets = []
    for column in report.scores:
        if column.startswith(SET_COLUMNS):
            of_sets.append(column)

    # the charts, of which those without data are empty texts
    charts = []
    for title, columns, from_zero in CHARTS:
        series = {}
        for column in columns:
            series[column] = points(rows, column)
        # the sets are drawn with the loss, or the reward, of all of them together
        for column in of_sets:
            if "_".join(column.split("_")[:2]) in columns:
                series[column] = points(rows, column)
        charts.append(chart(title.format(loss=report.loss), series, from_zero))

    # the page, from top to bottom
    parts = [
        f"<h1>{html.escape(report.title)}</h1>",
        f"<p class=where>{datetime.now():%Y-%m-%d %H:%M}, litft {__version__}, run "
        f"{html.escape(folder.name)}</p>",
        f"<p class=state>{html.escape(public(report.state))}</p>",
        _tiles(report.tiles),
        _verdicts(report.verdicts),
        f"{CONTROLS}<div class=charts>{''.join(charts)}</div>",
        _validations(rows, report.scores),
        _answers(report.answers),
        _hardest(report.hardest),
        "<h2>Example lengths</h2>",
        _bars(report.lengths),
        "<h2>Data and plan</h2>",
        _list(map(public, report.setup)),
        "<h2>Settings</h2>",
        _flags(report.flags),
        "<h2>Machine</h2>",
        _list(report.machine),
        f"<details><summary>{CONFIG}, with shortened "
        f"paths</summary><pre>{html.escape(public(config))}</pre></details>",
    ]
    _write_page(folder / "report.html", report.title, parts)


def write_sweep_page(
    path: Path,
    table: Sequence[Sequence[str]],
    val_losses: Mapping[str, Points],
    losses: Mapping[str, Points],
) -> None:
    """Write the page of a sweep: its table, header first, and the curves of each setting."""
    header, *rows = table
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    charts = [
        chart("Validation loss", dict(val_losses), from_zero=False),
        chart("Training loss", dict(losses), from_zero=False),
    ]
    _write_page(
        path,
        f"Sweep in {path.parent.name}",
        [
            f"<h1>Sweep in {html.escape(path.parent.name)}</h1>",
            f"<p class=where>{datetime.now():%Y-%m-%d %H:%M}, litft {__version__}</p>",
            f"<table><tr>{head}</tr>{body}</table>",
            f"{CONTROLS}<div class=charts>{''.join(charts)}</div>",
        ],
    )


def _write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Write a self-contained page."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{REPORT_POLICY}">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
    )
    body = (
        f"<body><main>{''.join(filter(None, parts))}</main><script>{SCRIPT}</script></body>"
    )
    atomic_write(path, f"{head}{body}</html>\n")


def _verdicts(verdicts: Sequence[str]) -> str:
    """Return how the result differs from the model before training; empty if that is not known."""
    if not verdicts:
        return ""
    explanation = (
        "Measured on the same examples of the validation set before and after. A lower loss is "
        "better. The interval contains the true difference with a probability of 95 %."
    )
    if any(line.startswith("forgotten") for line in verdicts):
        explanation += (
            " Where something was forgotten, a lower learning rate, fewer epochs or "
            "--data.replay 0.1 keeps more of it."
        )
    return (
        f"<h2>Compared with the model before training</h2>{_list(verdicts)}"
        f"<p>{html.escape(explanation)}</p>"
    )


def _rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv."""
    rows = []
    for row in metrics_rows(folder / "metrics.csv"):
        values = {name: float(value) for name, value in row.items()}
        # it is minus the reward
        if "val_reward" in values:
            del values["val_loss"]
        rows.append(values)
    return rows


def points(rows: list[dict[str, float]], column: str) -> Points:
    """Return the (step, value) pairs of a column with finite values, averaged to at most POINTS
    points."""
    values = []
    for row in rows:
        if math.isfinite(row.get(column, math.nan)):
            values.append((row["step"], row[column]))

    # longer curves are means over intervals of `size` points
    size = -(-len(values) // POINTS) or 1
    means = []
    for start in range(0, len(values), size):
        interval = values[start : start + size]
        steps, numbers = zip(*interval, strict=True)
        means.append((_mean(steps), _mean(numbers)))
    return means


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True)
class _Axes:
    """The ranges of a chart's axes: steps from 0 to `last_step`, and values."""

    last_step: float
    low: float
    high: float

    def x(self, step: float) -> str:
        """Return the distance from the left edge in percent."""
        return f"{100 * step / max(self.last_step, 1):.2f}"

    def y(self, value: float) -> str:
        """Return the distance from the upper edge in percent."""
        return f"{100 * (self.high - value) / (self.high - self.low):.2f}"


def chart(title: str, series: dict[str, Points], from_zero: bool) -> str:
    """Return an SVG figure of curves over the steps; an empty string if no curve has points."""
    all_points = []
    for curve in series.values():
        all_points.extend(curve)
    if not all_points:
        return ""

    all_steps, all_values = zip(*all_points, strict=True)
    last_step = max(all_steps)
    lowest = min(all_values)
    highest = max(all_values)
    if from_zero:
        y_ticks = ticks(0.0, highest)
    else:
        y_ticks = ticks(lowest, highest)
    axes = _Axes(last_step, y_ticks[0], y_ticks[-1])

    curves = ""
    legend = ""
    for number, (column, curve) in enumerate(series.items()):
        colour = f"c{number % COLORS}"
        curves += _curve(column, curve, colour, axes)
        if len(series) > 1 and curve:
            legend += _legend_entry(column, curve, colour)
    label = f"{title}, from {lowest:.4g} to {highest:.4g} over {last_step:.0f} steps"
    return (
        f"<figure><figcaption>{html.escape(title)}{legend}</figcaption>"
        f"<div class=plot data-curves='{_data(series)}' "
        f'data-steps="{last_step:.0f}" data-low="{axes.low}" data-high="{axes.high}">'
        "<span class=tip hidden></span>"
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(label)}">'
        f"{_grid(y_ticks, axes)}{curves}</svg>{_labels(y_ticks, axes)}</div></figure>"
    )


def _curve(column: str, curve: Points, colour: str, axes: _Axes) -> str:
    """Return the SVG elements of one column's curve."""
    path = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in curve)
    # a curve of one point would be invisible
    if len(curve) == 1:
        ((x, y),) = curve
        path += f" {axes.x(x + axes.last_step / 100)},{axes.y(y)}"
    # validations are few, and between them nothing is
    # known; a line of length 0 with round ends is a point
    marks = ""
    if column.startswith("val_"):
        marks = "".join(f"M{axes.x(x)},{axes.y(y)}h0" for x, y in curve)
    return (
        f'<polyline class="curve {colour}" points="{path}"/>'
        f'<path class="point {colour}" d="{marks}"/>'
    )


def _legend_entry(column: str, curve: Points, colour: str) -> str:
    """Return the name of a curve with its last value."""
    if column.startswith(SET_COLUMNS):
        name = column.removeprefix("val_").partition("_")[2]
    elif column.startswith("val_"):
        name = "validation"
    elif column in TRAINING_COLUMNS:
        name = "training"
    else:  # of a sweep
        name = column
    last_value = f"{curve[-1][1]:.4g}"
    return f'<span class="key {colour}">{html.escape(name)} {last_value}</span>'


def _data(series: dict[str, Points]) -> str:
    """Return the values that the script shows under the pointer, as JSON."""
    curves = []
    for curve in series.values():
        curves.append([[round(x, 1), float(f"{y:.5g}")] for x, y in curve])
    return json.dumps(curves)


def _grid(y_ticks: list[float], axes: _Axes) -> str:
    """Return a line at each tick."""
    lines = ""
    for y in y_ticks:
        lines += f'<line x1="0" x2="100" y1="{axes.y(y)}" y2="{axes.y(y)}"/>'
    return lines


def _labels(y_ticks: list[float], axes: _Axes) -> str:
    """Return the numbers at both axes."""
    values = ""
    for y in y_ticks:
        values += f'<span style="top:{axes.y(y)}%">{_short(y)}</span>'
    steps = ""
    for x in ticks(0, max(axes.last_step, 1)):
        if x <= axes.last_step:
            steps += f'<span style="left:{axes.x(x)}%">{_short(x)}</span>'
    return f"<div class=y>{values}</div><div class=x>{steps}</div>"


def ticks(low: float, high: float) -> list[float]:
    """Return evenly spaced round numbers that cover the interval from `low` to `high`."""
    span = high - low
    if span <= 1e-9 * max(abs(low), abs(high)):  # equal but for rounding
        span = abs(high) or 1.0
    raw_step = span / TICKS
    scale = 10.0 ** math.floor(math.log10(raw_step))
    # the smallest round step with about TICKS intervals
    for factor in (1, 2, 2.5, 5, 10):
        step = scale * factor
        if step >= raw_step * 0.999:
            break
    # the tolerance keeps a value that lies on a tick there
    tolerance = 1e-9
    first = math.floor(low / step + tolerance)
    last = math.ceil(high / step - tolerance)
    # at least one interval
    last = max(last, first + 1)
    return [number * step for number in range(first, last + 1)]


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def public(text: str) -> str:
    """Return a text whose absolute paths are shortened to their last part; the home folder may have
    spaces."""
    home = str(Path.home())
    # a home of / would match every separator
    if len(home) > 1:
        text = text.replace(home, "~")
    return ABSOLUTE.sub("", text)


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    if items:
        return f"<ul>{items}</ul>"
    return ""


def _tiles(tiles: Sequence[SummaryTile]) -> str:
    cells = ""
    for title, value in tiles:
        cells += f"<div><span>{html.escape(title)}</span><b>{html.escape(value)}</b></div>"
    if cells:
        return f"<div class=tiles>{cells}</div>"
    return ""


def _flags(flags: Mapping[str, str]) -> str:
    rows = ""
    for name, value in flags.items():
        rows += f"<dt>{html.escape(name)}</dt><dd>{html.escape(public(value))}</dd>"
    return f"<dl>{rows}</dl>"


def _validations(rows: list[dict[str, float]], scores: Mapping[str, str]) -> str:
    """Return a table of the validations. scores: the titles of further columns."""
    validations = [row for row in rows if row.keys() & {"val_loss", "val_reward"}]
    if not validations:
        return ""
    all_scores = list(SCORES)
    for column, title in scores.items():
        all_scores.append((column, title, "{:.4g}"))
    columns = []
    for item in all_scores:
        if any(item[0] in row for row in validations):
            columns.append(item)
    head = "".join(f"<th>{html.escape(title)}</th>" for _, title, _ in columns)
    body = ""
    for row in validations:
        cells = ""
        for name, _, form in columns:
            cell = ""
            if name in row:
                cell = form.format(row[name])
            cells += f"<td>{cell}</td>"
        body += f"<tr>{cells}</tr>"
    return (
        f"<h2>Validations</h2><div class=scroll><table><tr>{head}</tr>{body}</table></div>"
    )


def _answers(answers: Sequence[SampleAnswer]) -> str:
    """Return the first prompts, each with its first and last answer side by side; the others are in
    a collapsed section."""
    if not answers:
        return ""
    # several prompts may have the same question, so each is known by its number, too
    by_prompt: dict[tuple[int, str], list[tuple[int, str]]] = {}
    num_answered: Counter[int] = Counter()
    for item in answers:
        step = int(item["step"])
        key = num_answered[step], str(item["prompt"])
        num_answered[step] += 1
        answer = str(item["answer"])
        if "reward" in item:
            answer += f" (reward {item['reward']:.3g})"
        by_prompt.setdefault(key, []).append((step, answer))

    # the first and the last answer side by side, the others folded
    blocks = ""
    for (_, prompt), steps in list(by_prompt.items())[:PROMPTS]:
        ends = _answer(*steps[0])
        if len(steps) > 1:
            ends += _answer(*steps[-1])
        between = "".join(_answer(*item) for item in steps[1:-1])
        if between:
            details = f"<details><summary>{len(steps) - 2} in between</summary>{between}</details>"
        else:
            details = ""
        blocks += (
            f"<section><blockquote>{html.escape(prompt)}</blockquote><div "
            f"class=pair>{ends}</div>{details}</section>"
        )
    return f"<h2>Answers before and after</h2>{blocks}"


def _answer(step: int, text: str) -> str:
    return f"<p class=answer><b>step {step}</b> {html.escape(text) or '(empty)'}</p>"


def _hardest(examples: Sequence[HardExample]) -> str:
    """Return the validation examples with the largest losses: the expected answer and the model's
    own."""
    blocks = ""
    for example in examples:
        prompt = example.prompt
        # the question is at the end of a prompt
        if len(prompt) > SHOWN:
            prompt = f"...{prompt[-SHOWN:]}"
        quote = html.escape(prompt)
        if example.tokens == 1:
            size = "1 token"
        else:
            size = f"{example.tokens:,} tokens"
        about = f"expected, loss {example.loss:.3g}, {size}"
        answers = f"<p class=answer><b>{about}</b> {_shortened(example.answer)}</p>"
        if example.own:
            answers += (
                f"<p class=answer><b>the model's own</b> {_shortened(example.own)}</p>"
            )
        blocks += f"<section><blockquote>{quote}</blockquote>{answers}</section>"
    if blocks:
        return f"<h2>Validation examples with the largest loss per token</h2>{blocks}"
    return ""


def _shortened(text: str) -> str:
    """Return the beginning of a text as HTML."""
    if len(text) > SHOWN:
        text = f"{text[:SHOWN]}..."
    return html.escape(text)


def _bars(lengths: Sequence[tuple[int, int, int]]) -> str:
    """Return a histogram."""
    max_count = max(count for _, _, count in lengths)
    rows = ""
    for low, high, count in lengths:
        rows += (
            f"<span>{low:,} to {high:,}</span><i><b "
            f"style='width:{100 * count / max_count:.1f}%'></b></i><span>{count:,}</span>"
        )
    return f"<div class=bars><em>tokens</em><em></em><em>examples</em>{rows}</div>"
