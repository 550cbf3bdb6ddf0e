"""The file of `generate --out`: how many prompts it answers, and with which settings."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from litft import run_dir
from litft.args import GenerateArgs
from litft.atomic import atomic_write

# fields of an output line in addition to the completion
EXTRA_FIELDS = ("reasoning_content", "tool_calls")
# flags that do not change the texts, or of which all are in the prompts
WITHOUT_EFFECT = (
    *("prompt", "prompts", "out", "resume", "overwrite", "num_samples"),
    *("batch_size", "compile", "accelerator", "devices", "layers_per_device"),
)


def count_finished(args: GenerateArgs, records: list[dict[str, Any]]) -> int:
    """Return how many prompts a partial --out answers.

    Raise ValueError if it does not belong to these prompts.
    """
    path = Path(args.out) if args.out else None
    if path is None or not path.exists() or args.overwrite:
        return 0
    if not args.resume:
        raise ValueError(
            f"--out {path} exists; --resume continues it, --overwrite replaces it"
        )
    # a line that a crash has cut short is generated again
    complete, newline, _ = path.read_bytes().rpartition(b"\n")
    lines = complete.split(b"\n") if newline else []
    for number, line in enumerate(lines):
        if number >= len(records) or not _is_answer(
            line, records[number], args.num_samples
        ):
            reason = (
                f"line {number + 1} of {path} does not answer {args.prompts} with --num_samples "
                f"{args.num_samples}"
            )
            raise ValueError(f"--resume: {reason}; use --overwrite to start over")

    _check_settings(args, path)
    # only now, when every line is known to belong to these prompts
    os.truncate(path, len(complete + newline))
    return len(lines)


def _is_answer(line: bytes, record: dict[str, Any], num_samples: int) -> bool:
    """Return whether an output line belongs to this record and has `num_samples` answers."""
    try:
        output_record = json.loads(line)
        if num_samples == 1:
            texts = [output_record.pop("completion")]
        else:
            texts = output_record.pop("completions")
        for name in EXTRA_FIELDS:
            output_record.pop(name, None)
        return len(texts) == num_samples and output_record == record
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False


def settings_path(out: Path) -> Path:
    """Return the file with the settings of an --out that is not complete yet."""
    return out.with_name(f"{out.name}.settings.json")


def write_settings(args: GenerateArgs) -> None:
    """Note the settings of the answers that are about to be written."""
    if args.out:
        text = json.dumps(_settings(args), indent=1, sort_keys=True)
        atomic_write(settings_path(Path(args.out)), text)


def remove_settings(args: GenerateArgs) -> None:
    """Remove the settings of answers that are complete."""
    if args.out:
        settings_path(Path(args.out)).unlink(missing_ok=True)


def _settings(args: GenerateArgs) -> dict[str, Any]:
    """Return the flags that the answers depend on."""
    settings = asdict(args)
    for name in WITHOUT_EFFECT:
        settings.pop(name, None)
    folder = settings["checkpoint_dir"] or str(run_dir.newest_finished())
    # the same folder by another name is no other setting
    if Path(folder).is_dir():
        folder = str(Path(folder).resolve())
    settings["checkpoint_dir"] = folder
    # trained again, the same folder is another model
    settings["model"] = _stamps(Path(folder))
    return settings


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Return the sizes and times of the files of a local model, or of a run's result."""
    final = folder / "final"
    stamps = {}
    for path in sorted((final if final.is_dir() else folder).glob("*")):
        if path.is_file():
            status = path.stat()
            stamps[path.name] = [status.st_size, status.st_mtime_ns]
    return stamps


def _check_settings(args: GenerateArgs, out: Path) -> None:
    """Raise ValueError if the answers that there are have other settings: one file would have
    answers of two kinds."""
    try:
        saved = json.loads(settings_path(out).read_text("utf-8"))
    except (OSError, ValueError):
        # a file that was complete, was copied, or is of an earlier version
        if out.stat().st_size:
            print(
                f"warning: {settings_path(out).name} is missing, so it is not known with which "
                f"model and settings the answers in {out} were made; the new ones have those of "
                "this command",
                file=sys.stderr,
            )
        return
    changes = []
    settings = _settings(args)
    before = saved.get("model", settings["model"]) if isinstance(saved, dict) else None
    if before != settings["model"]:
        raise ValueError(
            f"--resume: the files of the model have changed since the answers in {out} were made; "
            "use --overwrite to start over"
        )
    for name, now in settings.items():
        before = saved.get(name) if isinstance(saved, dict) else None
        if before != now and name != "model":
            changes.append(f"--{name} was {before}, and is {now}")
    if changes:
        raise ValueError(
            f"--resume: the answers in {out} have other settings: {'; '.join(changes)}; repeat "
            "them, or use --overwrite to start over"
        )
