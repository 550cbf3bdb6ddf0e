"""The command `sweep`: runs of a grid of settings, with several seeds each, as one table and one
page."""

import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.table import Table

from litft import run_dir
from litft.args import (
    FINETUNE,
    DataArgs,
    FinetuneArgs,
    LoRAFinetuneArgs,
    Setting,
    SweepArgs,
    setting_name,
)
from litft.args.flag_types import values_of_flags
from litft.args.parser import parse
from litft.atomic import atomic_write
from litft.data.digests import digest_of, hash64
from litft.data.sources import File, find_sources
from litft.evaluation.comparison import print_table
from litft.evaluation.settings import RunScores, RunsOfSetting, difference, ranked
from litft.evaluation.verdict import LOSS, mean_of, parts_in
from litft.folder_lock import locked_folder
from litft.model.config_file import read_object
from litft.pretrained.folder import model_digest, resolve
from litft.training.output.report import Points, points, write_sweep_page
from litft.training.run_description import format_duration
from litft.training.validation import SEARCHED

RESULTS = "sweep.json"
PAGE = "sweep.html"


def sweep(args: SweepArgs) -> None:
    """Run what is missing, and print and write the table."""
    # what can be refused is refused before the first run
    for setting in args.settings():
        parse(FINETUNE[args.method], _flags(args, setting, seed=1))
    folder = Path(args.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _check_same(folder, args)

    failed = []
    settings = []
    runs = [
        (setting, seed) for setting in args.settings() for seed in range(1, args.seeds + 1)
    ]
    print(f"{len(runs)} runs in {folder}, where each has a log", flush=True)
    for number, (setting, seed) in enumerate(runs, 1):
        line = _run(args, setting, seed)
        print(
            f"{number}/{len(runs)} {setting_name(setting)}, seed {seed}: {line}", flush=True
        )
        if line.startswith("failed"):
            failed.append(line)

    for setting in args.settings():
        scores = []
        for seed in range(1, args.seeds + 1):
            run = _folder(args, setting, seed)
            if run_dir.finished(run):
                scores.append(_scores(run, seed))
        settings.append(RunsOfSetting(setting_name(setting), scores))
    settings = _with_one_kind_of_loss(settings)
    rows = _rows(settings, _scaled_scores(args))
    _print(rows)
    _explain(args, settings, rows)
    _write(args, settings, rows)
    print(f"the curves are in {folder / PAGE}, the figures in {folder / RESULTS}")
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(runs)} runs have failed; mend the cause and start the same "
            "sweep again, which runs only what is missing"
        )


def _check_same(folder: Path, args: SweepArgs) -> None:
    """Raise ValueError if the folder has another sweep, whose runs would be taken for these."""
    shared = _shared(args)
    runs = []
    for setting in args.settings():
        runs.append(parse(FINETUNE[args.method], _flags(args, setting, seed=1)))
    files = _digests(runs)
    values = _shared_values(args, runs)
    path = folder / "base.json"
    if path.is_file():
        earlier = _flags_in(path)
        changed = [name for name in shared if shared[name] != earlier.get(name)]
        files_before = _mapping(earlier, "files")
        values_before = _mapping(earlier, "values")
        changed += [f"content of {label}" for label in _changes(files_before, files)]
        changed += [f"--{name}" for name in _changes(values_before, values)]
        if changed:
            raise ValueError(
                f"--out_dir {folder}: its runs were started with another {' and '.join(changed)}; "
                "name another folder, or delete this one"
            )
        # also those that settings of an earlier grid alone have
        files = {**files_before, **files}
        values = {**values_before, **values}
    record = shared | {"files": files, "values": values}
    atomic_write(path, json.dumps(record) + "\n")


def _mapping(record: dict[str, Any], name: str) -> dict[str, str]:
    """Return an entry of base.json; an empty one if it is missing or damaged."""
    entry = record.get(name)
    return entry if isinstance(entry, dict) else {}


def _changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the names that both have, with different values."""
    return [name for name, value in now.items() if before.get(name, value) != value]


def _shared_values(args: SweepArgs, runs: list[FinetuneArgs]) -> dict[str, str]:
    """Return the flags outside the grid that all runs share, by name: those of the command line and
    of YAML files that it names."""
    of_grid = {"out_dir"}
    for setting in args.settings():
        of_grid.update(setting)
    first, *others = (values_of_flags(run) for run in runs)
    values = {}
    for name, value in first.items():
        # a name in the grid may be short
        is_of_grid = name in of_grid or name.rpartition(".")[2] in of_grid
        if not is_of_grid and all(flags[name] == value for flags in others):
            values[name] = str(value)
    return values


def _digests(runs: list[FinetuneArgs]) -> dict[str, str]:
    """Return the digests of all local files that the runs read: examples, models, templates and
    reward functions, by their labels."""
    digests: dict[str, str] = {}
    for given in runs:
        _add_examples(digests, given.data)
        for folder, base_dir in (
            (given.checkpoint_dir, given.base_dir),
            (given.teacher, None),
        ):
            if folder and folder not in digests and Path(folder).is_dir():
                digests[folder] = model_digest(resolve(folder, base_dir))
        names = [given.data.template]
        names += [item.template for item in given.data.paths if item.template]
        for item in given.reward:
            # FILE.py:FUNCTION
            names.append(f"{item.partition('.py:')[0]}.py")
        for name in names:
            if Path(name).is_file():
                digests[name] = digest_of(Path(name))
    return digests


def _add_examples(digests: dict[str, str], data: DataArgs) -> None:
    """Add the digests of the local files of examples that are not among them."""
    train, validation = find_sources(data)
    for file in [*train, *(file for _, file in validation)]:
        if isinstance(file, File) and file.label not in digests:
            digests[file.label] = file.digest()


def _flags_in(path: Path) -> dict[str, Any]:
    """Return what an earlier sweep shared; nothing if the file is damaged."""
    try:
        return read_object(path)
    except ValueError:
        return {}


def _shared(args: SweepArgs) -> dict[str, Any]:
    """Return what all runs of a sweep share, by the flag that names it."""
    content = args.config
    if args.config and Path(args.config).is_file():
        content = Path(args.config).read_text("utf-8")
    return {"--method": args.method, "--flags": args.flags, "--config": content}


def _folder(args: SweepArgs, setting: Setting, seed: int) -> Path:
    """Return the folder of a run."""
    name = setting_name(setting).replace(", ", "_")
    safe = re.sub(r"[^\w=.,+-]", "-", name)
    # other settings may have the same name without these characters
    if safe != name:
        safe = f"{safe[:80]}-{hash64(name):08x}"[:100]
    return Path(args.out_dir) / f"{safe}_seed={seed}"


def _flags(args: SweepArgs, setting: Setting, seed: int) -> list[str]:
    """Return the flags of a run."""
    words = []
    if args.config:
        words += ["--config", args.config]
    words += shlex.split(args.flags)
    for name, value in setting.items():
        words.append(f"--{name}={value}")
    return [*words, f"--seed={seed}", f"--out_dir={_folder(args, setting, seed)}"]


def _run(args: SweepArgs, setting: Setting, seed: int) -> str:
    """Run one setting with one seed, unless that is done; return what came of it."""
    folder = _folder(args, setting, seed)
    if run_dir.finished(folder):
        return "done before"
    words = _flags(args, setting, seed)
    if run_dir.is_run(folder):
        words.append("--resume")
    command = [sys.executable, "-m", "litft", "finetune", args.method, *words]
    # a run that outlived an earlier sweep
    try:
        with locked_folder(folder):
            pass
    except ValueError as error:
        return f"failed: {error}"
    start = time.monotonic()
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w", encoding="utf-8") as file:
        code = _run_to_its_end(command, file)
    if code:
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
        return f"failed: {lines[-1] if lines else code} (see {log})"
    losses = _scores(folder, seed).scores
    value = f"loss {losses[LOSS]:.4f}, " if LOSS in losses else ""
    return f"{value}{format_duration(time.monotonic() - start)}"


def _run_to_its_end(command: list[str], log: TextIO) -> int:
    """Run a command, and return its exit code. Ctrl-C and SIGTERM are passed on, and the run saves
    its state; then KeyboardInterrupt is raised."""
    # in a session of its own, so that Ctrl-C reaches it once, from here
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    caught: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        caught.append(number)
        process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, pass_on) for number in numbers]
    try:
        code = process.wait()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt(
            "interrupted; the same command goes on where the sweep stopped"
        )
    return code


def _scores(run: Path, seed: int) -> RunScores:
    """Return the scores of a finished run: those at its end."""
    scores: dict[str, float] = {}
    for row in run_dir.metrics_rows(run / "metrics.csv"):
        for column, name in (("val_loss", LOSS), ("exact_match", "exact_match")):
            # of rewards, the loss is minus the reward
            if column in row and not (name == LOSS and "val_reward" in row):
                scores[name] = float(row[column])
        if "val_reward" in row:
            scores["reward"] = float(row["val_reward"])
    # The verdict's loss is the cross-entropy. That of metrics.csv is the objective's, which a grid
    # may scale.
    parts = parts_in(run / run_dir.VERDICT, "after")
    for name, by_key in parts.items():
        scores[name] = mean_of(by_key)
    return RunScores(seed, scores, parts)


def _with_one_kind_of_loss(settings: list[RunsOfSetting]) -> list[RunsOfSetting]:
    """Return the settings without the losses of runs whose verdict is damaged, if others have one:
    the losses of these runs are the objective's, not the cross-entropy."""
    if not any(LOSS in run.parts for setting in settings for run in setting.runs):
        return settings
    comparable = []
    for setting in settings:
        runs = []
        for run in setting.runs:
            scores = dict(run.scores)
            if LOSS not in run.parts:
                scores.pop(LOSS, None)
            runs.append(run._replace(scores=scores))
        comparable.append(RunsOfSetting(setting.name, runs))
    return comparable


# the scores that a flag changes without any training, by the beginning of its name: margins are of
# an objective's own reward, most of them relative to the base, and rewards are of sampled answers
CHANGED_BY = {
    "preference.": {"margin"},
    "objective": {"margin", "accuracy"},
    "checkpoint_dir": {"margin", "accuracy"},
    "base_dir": {"margin", "accuracy"},
    "reward": {"reward"},
    "grpo.temperature": {"reward"},
    "grpo.top_p": {"reward"},
    "grpo.max_new_tokens": {"reward"},
}


def _scaled_scores(args: SweepArgs) -> set[str]:
    """Return the scores that the grid changes by itself, such as the margin by its beta."""
    scaled: set[str] = set()
    for setting in args.settings():
        for flag in setting:
            for beginning, scores in CHANGED_BY.items():
                if flag.startswith(beginning):
                    scaled |= scores
    return scaled


def _rows(settings: list[RunsOfSetting], scaled: set[str]) -> list[list[str]]:
    """Return the table with its header: the best setting first. scaled: scores that are not
    compared."""
    names: dict[str, None] = {}
    for setting in settings:
        for run in setting.runs:
            names |= dict.fromkeys(run.scores)
    compared = _compared_score(settings, scaled)
    if compared is None:
        title = "difference"
        order = settings
    else:
        title = f"difference in {compared} from the best"
        order = ranked(settings, compared)
    best = order[0]
    rows = [["setting", *names, title]]
    for setting in order:
        cells = [setting.name]
        for name in names:
            cells.append(_cell(setting, name))
        if compared is None:
            cells.append("not compared: the grid changes the scores themselves")
        elif setting is best or compared not in names:
            cells.append("")
        else:
            cells.append(str(difference(best, setting, compared)))
        rows.append(cells)
    return rows


def _compared_score(settings: list[RunsOfSetting], scaled: set[str]) -> str | None:
    """Return the score by which settings are compared: the loss, or of runs on preferences and on
    rewards, which do not have it by example, what they raise; None if all are in `scaled`."""
    for score in (LOSS, "margin", "accuracy", "reward", "exact_match"):
        if score in scaled:
            continue
        if any(score in run.parts for setting in settings for run in setting.runs):
            return score
    # the loss that is not by example is the objective's, with the same scale
    return None if scaled else LOSS


def _cell(setting: RunsOfSetting, score: str) -> str:
    """Return the mean of a score over the seeds, with its standard deviation."""
    mean = setting.mean(score)
    if math.isnan(mean):
        return ""
    spread = setting.spread(score)
    if math.isnan(spread):
        return f"{mean:.4f}"
    return f"{mean:.4f} ± {spread:.4f}"


def _print(rows: list[list[str]]) -> None:
    """Print the table as Markdown."""
    table = Table(box=box.MARKDOWN)
    for title in rows[0]:
        table.add_column(title, justify="left" if title == "setting" else "right")
    for row in rows[1:]:
        table.add_row(*row)
    print_table(table)


def _explain(args: SweepArgs, settings: list[RunsOfSetting], rows: list[list[str]]) -> None:
    """Print what the table does not say."""
    print()
    runs = [run for setting in settings for run in setting.runs]
    if any(len(by_key) >= SEARCHED for run in runs for by_key in run.parts.values()):
        print(
            f"scores of single examples (loss, margin, accuracy) are means over {SEARCHED:,} of "
            "them, evenly spaced; metrics.csv has those of all that a run measures"
        )
    if args.seeds > 1:
        print("±: the standard deviation over the seeds")
    if any("not shown" in row[-1] for row in rows):
        print(
            "not shown: with other examples or seeds, the best setting may be another; more "
            "--seeds, and more validation examples, narrow the intervals"
        )
    setting = args.settings()[0]
    if "lora.r" in setting and "lora.alpha" not in setting:
        # one alpha for all ranks, where the base names one
        given = parse(FINETUNE[args.method], _flags(args, setting, seed=1))
        if isinstance(given, LoRAFinetuneArgs) and given.lora.alpha is not None:
            print(
                "the scale of an update is lora.alpha / lora.r, so the ranks differ in it, too"
            )


def _write(args: SweepArgs, settings: list[RunsOfSetting], rows: list[list[str]]) -> None:
    """Write the figures and the page with the curves."""
    folder = Path(args.out_dir)
    figures = {}
    for setting in settings:
        figures[setting.name] = [
            {"seed": run.seed, "scores": dict(run.scores)} for run in setting.runs
        ]
    content = {"flags": asdict(args), "settings": figures, "table": rows}
    atomic_write(folder / RESULTS, json.dumps(content, indent=2) + "\n")
    curves: dict[str, dict[str, Points]] = {"val_loss": {}, "loss": {}}
    for setting in args.settings():
        for column, by_setting in curves.items():
            by_setting[setting_name(setting)] = _mean_curve(args, setting, column)
    write_sweep_page(folder / PAGE, rows, curves["val_loss"], curves["loss"])


def _mean_curve(args: SweepArgs, setting: Setting, column: str) -> Points:
    """Return the mean of a column over the runs of a setting, at the steps that all of them
    have."""
    curves = []
    for seed in range(1, args.seeds + 1):
        run = _folder(args, setting, seed)
        if run_dir.is_run(run):
            rows = []
            for row in run_dir.metrics_rows(run / "metrics.csv"):
                rows.append({name: float(value) for name, value in row.items()})
            curves.append(dict(points(rows, column)))
    if not curves:
        return []
    steps = set(curves[0]).intersection(*curves[1:])
    mean = []
    for step in sorted(steps):
        mean.append((step, sum(curve[step] for curve in curves) / len(curves)))
    return mean
