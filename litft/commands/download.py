"""The command `download`: fetch a model or an adapter from the Hugging Face hub."""

import sys
from pathlib import Path

from litft.args import DownloadArgs
from litft.checkpoints.hub import (
    downloaded_from,
    fetch,
    hub_id,
)


def download(args: DownloadArgs) -> Path:
    """Download a model or adapter from the hub, or resume its download; print its folder."""
    repo = hub_id(args.repository)
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
        f"downloaded {pinned}; pass this folder, or that id, as --checkpoint_dir:",
        file=sys.stderr,
    )
    print(folder)
    return folder
