"""The command `runs`: what is in the run folders. Imports no torch."""

from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from litft import run_dir
from litft.args import RunsArgs
from litft.folder_lock import owner_text

# of folders; they do not tell which model it is
COMMON_NAMES = ("final", "best", "base", "merged", "model")


class Run(NamedTuple):
    """A run as its folder describes it."""

    folder: Path
    # the last time that it was started or resumed
    started: datetime
    method: str
    model: str
    steps: int
    # the newest "validation loss" and "loss", where there is one
    losses: dict[str, float]
    state: str
    verdict: str  # whether the result is better; empty: not known


def list_runs(args: RunsArgs) -> None:
    """Print a table of the runs under a folder, sorted by start time.

    Raise ValueError if there are no runs.
    """
    runs = sorted(find_runs(Path(args.folder)), key=lambda run: run.started)
    if not runs:
        raise ValueError(
            f"--folder {args.folder} has no runs; name the folder in which a run's --out_dir is"
        )
    table = Table(box=None, pad_edge=False)
    for title in ("run", "last start", "method", "model"):
        table.add_column(title, overflow="fold")
    for title in ("steps", "loss", "validation loss"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    table.add_column("state", overflow="fold")
    for run in runs:
        # a run may have no validation
        losses = (
            f"{run.losses[name]:.4g}" if name in run.losses else ""
            for name in ("loss", "validation loss")
        )
        started = f"{run.started:%Y-%m-%d %H:%M}"
        table.add_row(
            str(run.folder),
            started,
            run.method,
            run.model,
            f"{run.steps:,}",
            *losses,
            run.verdict,
            run.state,
        )
    # wider than a terminal: a name that is cut cannot be copied
    Console(width=10_000, highlight=False, markup=False).print(table)


def find_runs(folder: Path) -> list[Run]:
    """Return the runs in a folder and in its subfolders."""
    return [
        read_run(path.parent)
        for path in folder.rglob(run_dir.CONFIG)
        if run_dir.is_run(path.parent)
    ]


def read_run(folder: Path) -> Run:
    """Return a run's description; files that are damaged or not written yet leave it incomplete."""
    config = _config(folder)
    newest = _newest_metrics(folder)
    # a run that has just begun has neither
    losses = {}
    for column, title in (("loss", "loss"), ("val_loss", "validation loss")):
        if column in newest:
            losses[title] = newest[column]
    # of a run that learns from rewards, it is minus the reward
    if "val_reward" in newest:
        losses.pop("validation loss", None)
    method = run_dir.method(folder)
    objective = config.get("objective", "sft")
    if objective != "sft":
        method += f", {objective}"
    return Run(
        folder=folder,
        started=datetime.fromtimestamp((folder / run_dir.CONFIG).stat().st_mtime),
        method=method,
        model=_model_name(Path(str(config.get("checkpoint_dir", "")))),
        steps=int(newest.get("step", 0)),
        losses=losses,
        state=_state(folder),
        # while a finished run is being continued, verdict.json is that of its earlier result
        verdict=_verdict(folder) if run_dir.finished(folder) else "",
    )


def _verdict(folder: Path) -> str:
    """Return whether a run's result is better than the model before it, and what it has forgotten,
    without the intervals."""
    parts = []
    for number, text in enumerate(run_dir.verdict_texts(folder)):
        if number == 0 or text.startswith("forgotten"):
            parts.append(text.partition(" (")[0])
    return "; ".join(parts)


def _model_name(path: Path) -> str:
    """Return the name of a model's folder, with that of its parent where the name says little."""
    if path.name in COMMON_NAMES:
        return str(Path(path.parent.name, path.name))
    return path.name


def _state(folder: Path) -> str:
    """Return whether a run has finished, or is running, and where it would go on."""
    owner = owner_text(folder)
    if owner:
        return f"running: {owner}"
    if run_dir.finished(folder):
        return "finished"
    steps = [
        run_dir.checkpoint_step(checkpoint) for checkpoint in run_dir.checkpoints(folder)
    ]
    if not steps:
        return "not finished; no checkpoint yet"
    return f"not finished; --resume continues after step {steps[-1]:,}"


def _config(folder: Path) -> dict[str, Any]:
    """Return a run's flags, an empty dictionary if they cannot be read."""
    try:
        config = yaml.safe_load((folder / run_dir.CONFIG).read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    if isinstance(config, dict):
        return config
    return {}


def _newest_metrics(folder: Path) -> dict[str, float]:
    """Return the newest value of each column of a run's metrics.csv, none if it has no header."""
    try:
        rows = run_dir.metrics_rows(folder / "metrics.csv")
        return {name: float(value) for row in rows for name, value in row.items()}
    except ValueError:
        return {}
