"""The command `upload`: publish a run's result on the Hugging Face hub, with a model card."""

import sys
from io import BytesIO

from litft import __version__, run_dir
from litft.args import UploadArgs
from litft.checkpoints.hub import (
    HubId,
    import_hub,
    translate_hub_errors,
)
from litft.export.model_card import model_card
from litft.export.upload_files import CARD, card_info, files_to_upload
from litft.pretrained.folder import resolve


def upload(args: UploadArgs) -> None:
    """Upload a folder's model and a model card in one commit; with --dry_run, print the card and
    the files instead."""
    source = resolve(args.checkpoint_dir or run_dir.newest_finished(), args.base_dir)
    info = card_info(source, args)
    if (
        not args.run
        and not source.adapter
        and not run_dir.is_run(source.folder.resolve().parent)
    ):
        print(
            "note: the card of this folder says nothing of its training; --run RUN adds the base "
            "model, the data and the scores",
            file=sys.stderr,
        )
    files = {CARD: model_card(info).encode(), **files_to_upload(info)}
    if args.dry_run:
        print(files[CARD].decode())
        sizes = {
            name: len(part) if isinstance(part, bytes) else part.stat().st_size
            for name, part in files.items()
        }
        lines = [f"{size:>16,}  {name}" for name, size in sizes.items()]
        print(
            "\n".join(
                [
                    *lines,
                    f"{sum(sizes.values()):>16,}  bytes would be uploaded to {args.repo_id}",
                ]
            ),
            file=sys.stderr,
        )
        return

    # all files in one commit, so that nobody downloads half of them
    hub = import_hub()
    repo = HubId(args.repository)
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
