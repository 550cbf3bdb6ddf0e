"""Hugging Face hub transfers: `download` fetches a model, `upload` publishes a run's result with a
generated model card."""

import json
import sys
from io import BytesIO
from pathlib import Path

from litft import __version__, run_dir
from litft.args import DownloadArgs, UploadArgs
from litft.args.parser import finetune_args
from litft.checkpoints.adapter_reader import adapter_config_files, read_adapter_config
from litft.checkpoints.hub import (
    HubId,
    downloaded_from,
    fetch,
    files_to_transfer,
    hub_id,
    import_hub,
    translate_hub_errors,
)
from litft.export.model_card import CardInfo, licence_of, model_card
from litft.model.config_file import read_object
from litft.pretrained import PretrainedFolder, resolve

CARD = "README.md"


def download(args: DownloadArgs) -> Path:
    """Download a model or adapter from the hub, or resume its download; print its folder."""
    repo = hub_id(args.repo_id)
    out = Path(args.out_dir) if args.out_dir else None
    if repo is None:
        raise ValueError(
            f"--repo_id {args.repo_id}: expected owner/name or owner/name@revision, and not an "
            "existing path"
        )
    if out and (existing := downloaded_from(out)) and existing.name != repo.name:
        raise ValueError(f"--out_dir {out} contains {existing}; choose another folder")
    # huggingface_hub leaves this folder in its downloads
    is_resumed = out and (out / ".cache" / "huggingface").is_dir()
    if out and not is_resumed and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"--out_dir {out} is not empty and contains no download; choose another folder"
        )
    folder, pinned = fetch(repo, args.token, out)
    print(
        f"downloaded {pinned}; pass this folder, or that id, as --checkpoint_dir:", file=sys.stderr
    )
    print(folder)
    return folder


def upload(args: UploadArgs) -> None:
    """Upload a folder's model and a model card in one commit; with --dry_run, print the card and
    the files instead."""
    source = resolve(args.checkpoint_dir or run_dir.newest_finished(), args.base_dir)
    info = _card_info(source, args)
    files = {CARD: model_card(info).encode(), **_files(info)}
    if args.dry_run:
        print(files[CARD].decode())
        sizes = {
            name: len(part) if isinstance(part, bytes) else part.stat().st_size
            for name, part in files.items()
        }
        lines = [f"{size:>16,}  {name}" for name, size in sizes.items()]
        print(
            "\n".join(
                [*lines, f"{sum(sizes.values()):>16,}  bytes would be uploaded to {args.repo_id}"]
            ),
            file=sys.stderr,
        )
        return

    # all files in one commit, so that nobody downloads half of them
    hub = import_hub()
    repo = HubId(args.repo_id)
    with translate_hub_errors(repo):
        api = hub.HfApi(token=args.token, library_name="litft", library_version=__version__)
        page = api.create_repo(repo.name, private=args.private, exist_ok=True)
        parts = {
            name: BytesIO(part) if isinstance(part, bytes) else str(part)
            for name, part in files.items()
        }
        operations = [
            hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=part)
            for name, part in parts.items()
        ]
        api.create_commit(page.repo_id, operations, commit_message=args.message)
    print(page)


def _card_info(source: PretrainedFolder, args: UploadArgs) -> CardInfo:
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
        base = downloaded_from(source.base) or hub_id(
            adapter_config.get("base_model_name_or_path") or ""
        )
    else:
        base_dir = run_args.checkpoint_dir if run_args else ""
        if base_dir:
            base = hub_id(base_dir) or downloaded_from(Path(base_dir))
        else:
            base = None
    if source.adapter and base is None:
        reason = f"{source.adapter} is an adapter for {source.base}, which is not on the hub"
        raise ValueError(f"{reason}; pass its hub id as --base_model, or merge the adapter first")
    licence = {"license": args.licence} if args.licence else {}
    info = CardInfo(
        args.repo_id, source, parent if run_args else None, run_args, base, adapter_config, licence
    )
    if licence:
        return info
    return info._replace(licence=licence_of(info.base_folder, base))


def _files(info: CardInfo) -> dict[str, Path | bytes]:
    """Return the files to upload next to the card, by their names in the repository; local paths
    are removed from them."""
    folder = info.source.folder
    base = info.base
    names = files_to_transfer(sorted(path.name for path in folder.iterdir() if path.is_file()))
    files: dict[str, Path | bytes] = {name: folder / name for name in names if name != CARD}

    # paths of the machine that trained it
    for name, private in (
        ("config.json", "_name_or_path"),
        ("tokenizer_config.json", "name_or_path"),
    ):
        if name in files and private in (content := read_object(folder / name)):
            content.pop(private)
            files[name] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()

    # the adapter's base by its name on the hub
    config = info.adapter_config
    if config:
        settings = {
            name: value for name, value in config.get("litft", {}).items() if name != "base_path"
        }
        config = config | {
            "base_model_name_or_path": base.name,
            "revision": base.revision,
            "litft": settings,
        }
        files |= adapter_config_files(config)
    return files
