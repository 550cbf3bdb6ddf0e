"""From the hub and to it: `download` fetches a model, `upload` puts a run's result there with a card written from it."""

import json
import sys
from io import BytesIO
from pathlib import Path

from litft import __version__, run_dir
from litft.args import DownloadArgs, UploadArgs
from litft.args.parser import finetune_args
from litft.checkpoints.hub import HubId, fetch, hub_id, library, needed, origin, told
from litft.checkpoints.peft_format import ADAPTER_CONFIG, read_adapter_config
from litft.export.model_card import CardInfo, licence_of, model_card
from litft.model.config import read_object
from litft.pretrained import PretrainedFolder, resolve

CARD = "README.md"


def download(args: DownloadArgs) -> Path:
    """Fetch a model or an adapter of the hub, or the rest of it; prints where it is."""
    wanted, out = hub_id(args.repo_id), Path(args.out_dir) if args.out_dir else None
    if wanted is None:
        raise ValueError(f"--repo_id {args.repo_id}: expected owner/name or owner/name@revision, and no path that is here")
    if out and (held := origin(out)) and held.name != wanted.name:
        raise ValueError(f"--out_dir {out} holds {held}; name another folder")
    begun = out and (out / ".cache" / "huggingface").is_dir()
    if out and not begun and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out_dir {out} is not empty and holds no download; name another folder")
    folder, found = fetch(wanted, args.token, out)
    print(f"{found} is here; --checkpoint_dir takes this folder, or that id:", file=sys.stderr)
    print(folder)
    return folder


def upload(args: UploadArgs) -> None:
    """Put a folder's model and its card on the hub, in one commit; --dry_run shows both and sends nothing."""
    source = resolve(args.checkpoint_dir or run_dir.newest_finished(), args.base_dir)
    subject = _subject(source, args)
    files = {CARD: model_card(subject).encode(), **_files(subject)}
    if args.dry_run:
        print(files[CARD].decode())
        sizes = {name: len(part) if isinstance(part, bytes) else part.stat().st_size for name, part in files.items()}
        listed = [f"{size:>16,}  {name}" for name, size in sizes.items()]
        print("\n".join([*listed, f"{sum(sizes.values()):>16,}  bytes would go to {args.repo_id}"]), file=sys.stderr)
        return
    hub, wanted = library(), HubId(args.repo_id)
    with told(wanted):
        api = hub.HfApi(token=args.token, library_name="litft", library_version=__version__)
        page = api.create_repo(wanted.name, private=args.private, exist_ok=True)
        parts = {name: BytesIO(part) if isinstance(part, bytes) else str(part) for name, part in files.items()}
        operations = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=part) for name, part in parts.items()]
        api.create_commit(page.repo_id, operations, commit_message=args.message)
    print(page)


def _subject(source: PretrainedFolder, args: UploadArgs) -> CardInfo:
    """What the card is about; ValueError where nobody could tell what an adapter's base is."""
    parent = Path(args.run) if args.run else source.folder.resolve().parent
    if args.run and not run_dir.is_run(parent):
        raise ValueError(f"--run {args.run} is no run of litft; name the folder with its config.yaml")
    trained = finetune_args(parent) if run_dir.is_run(parent) else None
    config = read_adapter_config(source.adapter) if source.adapter else {}
    if args.base_model:
        name, _, revision = args.base_model.partition("@")
        base = HubId(name, revision or None)
    elif source.adapter:
        base = origin(source.base) or hub_id(config.get("base_model_name_or_path") or "")
    else:
        known = trained.checkpoint_dir if trained else ""
        base = hub_id(known) or origin(Path(known)) if known else None
    if source.adapter and base is None:
        reason = f"{source.adapter} is an adapter of {source.base}, which others do not have"
        raise ValueError(f"{reason}; pass --base_model with its id on the hub, or merge it first")
    subject = CardInfo(args.repo_id, source, parent if trained else None, trained, base, config, args.licence)
    return subject if args.licence else subject._replace(licence=licence_of(subject.base_folder))


def _files(subject: CardInfo) -> dict[str, Path | bytes]:
    """What is uploaded beside the card, by its name there; no path of this machine is among it."""
    folder, base = subject.source.folder, subject.base
    names = needed(sorted(path.name for path in folder.iterdir() if path.is_file()))
    found: dict[str, Path | bytes] = {name: folder / name for name in names if name != CARD}
    for name, private in (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path")):
        if name in found and private in (content := read_object(folder / name)):
            content.pop(private)
            found[name] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    if config := subject.config:
        own = {name: value for name, value in config.get("litft", {}).items() if name != "base_path"}
        config = config | {"base_model_name_or_path": base.name, "revision": base.revision, "litft": own}
        found[ADAPTER_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return found
