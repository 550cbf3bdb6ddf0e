"""Find the folder of a model: from a path, a hub id, or what an adapter says about its base."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from litft import run_dir
from litft.checkpoints.adapter_reader import read_adapter_config
from litft.checkpoints.hub import fetch, hub_id
from litft.errors import missing_path
from litft.model.config_file import read_object


def local_folder(folder: str | Path) -> Path:
    """Return the folder of a path or a hub id, downloading the latter if necessary."""
    repo = hub_id(folder)
    if repo:
        return fetch(repo)[0]
    if not Path(folder).exists():
        remedy = "name a model folder in Hugging Face format, an adapter folder or a hub id"
        raise ValueError(missing_path(folder, remedy))
    return Path(folder)


def find_base(adapter: Path, base_dir: str | Path | None) -> Path:
    """Find an adapter's base model: `base_dir`, else the path recorded by litft, else PEFT's
    base_model_name_or_path."""
    if base_dir:
        return local_folder(base_dir)
    config = read_adapter_config(adapter)
    base_path = config.get("litft", {}).get("base_path")
    base_name = config.get("base_model_name_or_path") or ""
    # litft's path is relative to the adapter, so it survives a move of both
    # the folder itself, if the adapter is opened by a link
    candidates = [adapter.resolve() / base_path] if base_path else []
    if base_name:
        candidates.append(Path(base_name))
    for path in candidates:
        if path.is_dir():
            return Path(os.path.normpath(path))
    reason = (
        f"{adapter}: its base model {base_name!r} is not a local folder; pass --base_dir"
    )
    revision = config.get("revision")
    # the hub comes last, since it means a download
    repo = hub_id(f"{base_name}@{revision}") if revision else hub_id(base_name)
    if not repo:
        raise ValueError(reason)
    try:
        return fetch(repo)[0]
    except ValueError as error:
        raise ValueError(f"{reason} ({error})") from None


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read config.json of a model folder; raise ValueError saying what to name if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        inside = sorted(str(file.parent) for file in folder.glob("*/config.json"))[:3]
        remedy = (
            gguf_remedy(folder.iterdir())
            or "name the folder of a Hugging Face model, with its config.json and weights"
        )
        if inside:
            remedy = f"did you mean {' or '.join(inside)}?"
        raise ValueError(f"{folder} has no config.json; {_run_remedy(folder) or remedy}")
    return read_object(path)


def _run_remedy(folder: Path) -> str | None:
    """Return what to name instead of a checkpoint of a run, or of a folder of runs; None if it is
    neither."""
    if run_dir.is_run(folder.resolve().parent.parent) and folder.name.startswith("step-"):
        command = f"{run_dir.command('scripts/convert_to_hf.py')} --checkpoint_dir {folder}"
        return f"it is a checkpoint of a run; make a model of it first: {command} --out_dir NEW"
    finished = []
    for config in sorted(folder.glob(f"*/{run_dir.CONFIG}")):
        if run_dir.is_run(config.parent) and run_dir.finished(config.parent):
            finished.append(str(config.parent))
    if finished:
        return f"did you mean a run in it: {' or '.join(finished[:3])}?"
    return None


def gguf_remedy(files: Iterable[Path]) -> str | None:
    """Suggest the conversion of the first GGUF file; return None if there is none."""
    for path in files:
        if path.suffix == ".gguf":
            command = "python scripts/convert_gguf_checkpoint.py"
            return f"convert it with {command} --checkpoint_dir {path}"
    return None
