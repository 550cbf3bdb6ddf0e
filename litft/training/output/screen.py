"""What a run prints: plain lines in a pipe or a log file, a panel, one live bar and a table in a
terminal."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from html import escape
from importlib import import_module

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from litft.training.output.metrics import Row
from litft.training.output.report import STYLE, chart, points

# between two updates of a notebook's output
UPDATE_SECONDS = 0.5


class Screen:
    """Prints nothing: of the processes of a run that do not write its folder."""

    def say(self, text: str) -> None:
        """Print a line, or several."""

    def header(self, title: str, folder: str, lines: Sequence[str]) -> None:
        """Print what the run is about to do."""

    @contextmanager
    def showing_activity(self, what: str) -> Iterator[None]:
        """Show the current activity while the context is open."""
        yield

    @contextmanager
    def bar(self, step: int, steps: int, what: str) -> Iterator[None]:
        """Within the context, a bar shows the steps done. what: shown until the first row."""
        yield

    def advance(self, step: int) -> None:
        """Move the bar."""

    def record(self, rows: Sequence[Row]) -> None:
        """Receive all rows of metrics.csv when they are written."""

    def row(self, row: Row, steps: int, left: str) -> None:
        """Show the newest row of metrics.csv. left: the time that is left; empty if it is
        unknown."""

    def results(self, scores: Mapping[str, Sequence[str]], lines: Sequence[str]) -> None:
        """Print the first and the last value of each score, and lines about the whole run."""


class Lines(Screen):
    """Plain lines on stdout, without escape codes."""

    def say(self, text: str) -> None:
        """Print without buffering.

        If stdout is a pipe whose reader has exited, the run continues without output.
        """
        try:
            print(text, flush=True)
        except BrokenPipeError:
            # from here on, prints go nowhere rather than fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            with suppress(OSError):
                print(
                    "warning: stdout is closed; the run goes on without printing",
                    file=sys.stderr,
                    flush=True,
                )

    def header(self, title: str, folder: str, lines: Sequence[str]) -> None:
        """Print the lines."""
        self.say("\n".join(lines))

    def row(self, row: Row, steps: int, left: str) -> None:
        """Print a line for the row."""
        rate = f"norm {row['grad_norm']:.3g}, rate {row['learning_rate']:.3g}"
        speed = (
            f"{row['tokens_per_second']:,.0f} tokens/s, memory {row['memory_gib']:.2f} GiB"
        )
        self.say(
            f"step {row['step']:.0f}/{steps}: {_scores(row)}, {rate}, {speed}{_left(left)}"
        )

    def results(self, scores: Mapping[str, Sequence[str]], lines: Sequence[str]) -> None:
        """Print a line for each score."""
        score_lines = [f"{name}: {' -> '.join(values)}" for name, values in scores.items()]
        self.say("\n".join([*score_lines, *lines]))


class Terminal(Screen):
    """A terminal. Lines scroll above the bar; rich heeds NO_COLOR."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.progress: Progress | None = None

    def say(self, text: str) -> None:
        """Print above the bar; warnings are yellow."""
        for line in text.split("\n"):
            if line.startswith("warning"):
                shown = Text(line, style="yellow")
            else:
                shown = Text(line)
            self.console.print(shown, soft_wrap=True)

    def header(self, title: str, folder: str, lines: Sequence[str]) -> None:
        """Print a panel, and the warnings below it."""
        # warnings below the panel stay visible, and keep their colour
        facts = [line for line in lines if not line.startswith("warning")]
        settings = {
            "title": Text(title, "bold"),
            "subtitle": Text(folder),
            "title_align": "left",
            "subtitle_align": "right",
        }
        self.console.print(Panel(Text("\n".join(facts)), border_style="dim", **settings))
        for line in lines:
            if line not in facts:
                self.say(line)

    @contextmanager
    def showing_activity(self, what: str) -> Iterator[None]:
        """Show a spinner, or the text next to the bar instead of the newest row, if there is
        one."""
        if self.progress is None:
            with self.console.status(Text(what)):
                yield
            return
        task = self.progress.tasks[0]
        before = task.description
        self.progress.update(task.id, description=what, refresh=True)
        yield
        self.progress.update(task.id, description=before)

    @contextmanager
    def bar(self, step: int, steps: int, what: str) -> Iterator[None]:
        """Show a bar of the steps, followed by the newest row."""
        text = TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        )
        columns = (BarColumn(bar_width=12), MofNCompleteColumn(), text)
        with Progress(
            *columns, console=self.console, refresh_per_second=4
        ) as self.progress:
            self.progress.add_task(what, total=steps, completed=step)
            yield
        self.progress = None

    def advance(self, step: int) -> None:
        """Move the bar."""
        assert self.progress is not None  # steps are taken within `bar`
        self.progress.update(self.progress.task_ids[0], completed=step)

    def row(self, row: Row, steps: int, left: str) -> None:
        """Show the row after the bar."""
        # the last row, which waits for the last validation
        if self.progress is None:
            self.say(f"step {row['step']:.0f}/{steps}: {_scores(row)}")
        else:
            speed = f"{row['tokens_per_second']:,.0f} tokens/s  {row['memory_gib']:.1f} GiB"
            text = f"{_scores(row, '  ')}  {speed}{_left(left, '  ')}"
            self.progress.update(self.progress.task_ids[0], description=text, total=steps)

    def results(self, scores: Mapping[str, Sequence[str]], lines: Sequence[str]) -> None:
        """Print a table."""
        table = Table("", "before", "after", border_style="dim")
        for name, values in scores.items():
            table.add_row(name, values[0], f"[bold]{values[-1]}")
        if scores:
            self.console.print(table)
        self.say("\n".join(lines))


class Notebook(Lines):
    """A notebook's cell: lines, and one output with a bar and the loss curve, which is updated in
    its place."""

    def __init__(self) -> None:
        display = import_module("IPython.display")
        self.html = display.HTML
        self.display = display.display
        self.output = None
        self.rows = []
        self.text = ""
        self.step = 0
        self.steps = 1
        self.next_update = 0.0
        self.in_bar = True

    @contextmanager
    def bar(self, step: int, steps: int, what: str) -> Iterator[None]:
        """Show the bar and the curve."""
        self.step = step
        self.steps = steps
        self.text = what
        self.output = self.display(self.html(self.page()), display_id=True)
        yield
        self.in_bar = False
        self.update()

    def update(self) -> None:
        """Show the newest values: at most a few times per second, but always after the last
        step."""
        if self.output is not None and (
            time.monotonic() >= self.next_update or not self.in_bar
        ):
            self.output.update(self.html(self.page()))
            self.next_update = time.monotonic() + UPDATE_SECONDS

    def advance(self, step: int) -> None:
        """Move the bar."""
        self.step = step
        self.update()

    def record(self, rows: Sequence[Row]) -> None:
        """Keep the rows for the curve; those of the last validation come after the bar has
        ended."""
        self.rows += rows
        self.update()

    def row(self, row: Row, steps: int, left: str) -> None:
        """Show the row next to the bar."""
        self.steps = steps
        speed = f"{row['tokens_per_second']:,.0f} tokens/s, {row['memory_gib']:.1f} GiB"
        self.text = f"{_scores(row)}, {speed}{_left(left)}"

    def page(self) -> str:
        """Return the output. Its style does not affect the rest of the notebook."""
        # @scope keeps the page's style from the rest of the notebook
        style = (
            f"@scope (.litft) {{ {STYLE.replace(':root', ':scope')} :scope {{ color: var(--ink); "
            "max-width: 640px } }"
        )
        bar = (
            f'<progress value="{self.step}" max="{self.steps}"></progress> '
            f"{self.step:,}/{self.steps:,} {escape(self.text)}"
        )
        series = {
            "loss": points(self.rows, "loss"),
            "val_loss": points(self.rows, "val_loss"),
        }
        curve = chart("Loss", series, from_zero=False)
        return f'<div class="litft"><style>{style}</style><p>{bar}</p>{curve}</div>'


def open_screen(writes: bool) -> Screen:
    """Return the screen of this process. writes: whether it is the one that writes the run's
    folder."""
    if not writes:
        return Screen()
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel"):  # not in IPython's terminal
        return Notebook()
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return Lines()
    if (sys.stdout.encoding or "").lower().startswith("utf"):
        return Terminal()
    return Lines()


def _left(left: str, separator: str = ", ") -> str:
    if left:
        return f"{separator}{left} left"
    return ""


def _scores(row: Row, separator: str = ", ") -> str:
    # the loss of rewards says little: it is about 0 at every step
    if "reward" in row:
        length = f"{row['completion_tokens']:.0f} tokens each"
        return separator.join([f"reward {row['reward']:.3g}", length])
    scores = (f"{name} {row[name]:.3g}" for name in ("accuracy", "margin") if name in row)
    return separator.join([f"loss {row['loss']:.4g}", *scores])


def shorten_left(text: str, width: int = 100) -> str:
    """Return the end of a text on one line: of a prompt, whose question comes last."""
    return shorten(text[::-1], width)[::-1]


def shorten(text: str, width: int = 100) -> str:
    """Return the beginning of a text on one line."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    return f"{text[:width]}..."
