"""The files that `upload` publishes, and the facts for the model card."""

import json
from pathlib import Path
from typing import Any

from litft import run_dir
from litft.args import FinetuneArgs, UploadArgs
from litft.args.parser import finetune_args
from litft.checkpoints.adapter_reader import adapter_config_files, read_adapter_config
from litft.checkpoints.hub import (
    HubId,
    downloaded_from,
    files_to_transfer,
    hub_id,
)
from litft.data.tokenizer import NAMED_TEMPLATES
from litft.export.model_card import CardInfo, continued_adapter, licence_of
from litft.model.config_file import read_object
from litft.pretrained.folder import PretrainedFolder

CARD = "README.md"


def card_info(source: PretrainedFolder, args: UploadArgs) -> CardInfo:
    """Collect the facts for the card; raise ValueError for an adapter whose base is not on the
    hub."""
    parent = Path(args.run) if args.run else source.folder.resolve().parent
    if args.run and not run_dir.is_run(parent):
        raise ValueError(
            f"--run {args.run} is not a run of litft; pass the folder that contains its config.yaml"
        )
    run_args = finetune_args(parent) if run_dir.is_run(parent) else None
    if source.adapter:
        adapter_config = read_adapter_config(source.adapter)
    else:
        adapter_config = {}

    # the base on the hub, as stated, or as the adapter or the run names it
    if args.base_model:
        name, _, revision = args.base_model.partition("@")
        base = HubId(name, revision or None)
    elif source.adapter:
        base = _hub_base_of_adapter(source, adapter_config)
    else:
        base = _hub_base_of_run(run_args) if run_args else None
    if source.adapter and base is None:
        reason = (
            f"{source.adapter} is an adapter for {source.base}, which is not on the hub"
        )
        raise ValueError(
            f"{reason}; pass its hub id as --base_model, or merge the adapter first"
        )
    licence = {"license": args.licence} if args.licence else {}
    info = CardInfo(
        args.repository,
        source,
        parent if run_args else None,
        run_args,
        base,
        adapter_config,
        licence,
    )
    if licence:
        return info
    return info._replace(licence=licence_of(info.base_folder, base))


def _hub_base_of_run(args: FinetuneArgs) -> HubId | None:
    """Return the base model of a run on the hub; None if it is unknown."""
    start = continued_adapter(args)
    if start and start.adapter:
        return _hub_base_of_adapter(start, read_adapter_config(start.adapter))
    return hub_id(args.model_dir) or downloaded_from(Path(args.model_dir))


def _hub_base_of_adapter(source: PretrainedFolder, config: dict[str, Any]) -> HubId | None:
    """Return the base model of an adapter on the hub; None if it is unknown. config:
    adapter_config.json."""
    known = downloaded_from(source.base) or hub_id(
        config.get("base_model_name_or_path") or ""
    )
    if known and known.revision is None and config.get("revision"):
        return HubId(known.name, config["revision"])
    return known


def files_to_upload(info: CardInfo) -> dict[str, Path | bytes]:
    """Return the files to upload next to the card, by their names in the repository; local paths
    are removed from them."""
    folder = info.source.folder
    base = info.base
    paths = [path.name for path in folder.iterdir() if path.is_file()]
    for path in folder.glob(f"{NAMED_TEMPLATES}/*.jinja"):
        paths.append(path.relative_to(folder).as_posix())
    names = files_to_transfer(sorted(paths))
    files: dict[str, Path | bytes] = {name: folder / name for name in names if name != CARD}

    # paths of the machine that trained it
    for name, private in (
        ("config.json", "_name_or_path"),
        ("tokenizer_config.json", "name_or_path"),
    ):
        if name in files and private in (content := read_object(folder / name)):
            content.pop(private)
            files[name] = (
                json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            ).encode()

    # the adapter's base by its name on the hub
    config = info.adapter_config
    if config:
        # `card_info` refuses an adapter whose base is not on the hub
        assert base is not None
        settings = {
            name: value
            for name, value in config.get("litft", {}).items()
            if name != "base_path"
        }
        config = config | {
            "base_model_name_or_path": base.name,
            "revision": base.revision,
            "litft": settings,
        }
        files |= adapter_config_files(config)
    return files
