"""Hugging Face hub: models by id, `owner/name` or `owner/name@revision`, downloaded once and pinned
to a commit.

huggingface_hub does all network access and is only imported when needed. A commit whose files are
all in the cache is used without contacting the hub.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from litft.args.hub import HUB_NAME

# the files of a tokenizer, copied into every model and adapter folder that litft writes
TOKENIZER_FILES = (
    "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json merges.txt chat_template.jinja generation_config.json"
).split()
# how a multimodal model prepares images, video and sound
PROCESSOR_FILES = (
    "processor_config.json preprocessor_config.json video_preprocessor_config.json "
    "chat_template.json".split()
)
_ID = re.compile(rf"({HUB_NAME.pattern})(?:@((?!.*\.\.)\w[\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# terms of use
_LICENSE_FILE = re.compile(
    r"(LICEN[CS]E|NOTICE|USE_POLICY)[\w.-]*|README\.md", re.IGNORECASE
)
_NAMED_TEMPLATE = re.compile(r"additional_chat_templates/[\w-]+\.jinja")
# in a downloaded folder, next to huggingface_hub's own files
_ORIGIN_FILE = Path(".cache", "huggingface", "origin.json")
# in order of preference
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")


class HubId(NamedTuple):
    """A repository and a revision (branch, tag or commit hash; None: the latest commit of the
    default branch)."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        if self.revision:
            return f"{self.name}@{self.revision}"
        return self.name

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit hash, which always refers to the same files."""
        return bool(self.revision and _COMMIT.fullmatch(self.revision))


def hub_id(text: str | Path) -> HubId | None:
    """Parse a flag's value as a hub id; return None if it is a path (it exists, or does not have
    the form of an id)."""
    match = _ID.fullmatch(str(text))
    # if the first part is a folder, it is a path with a mistake rather than an id
    if match is None or Path(text).exists() or Path(str(text).partition("/")[0]).is_dir():
        return None
    return HubId(*match.groups())


def files_to_transfer(names: list[str]) -> list[str]:
    """Select the files that litft reads, plus the license files; weights come last and in one
    format only."""
    supported = {
        "config.json",
        "adapter_config.json",
        "litft.json",
        *TOKENIZER_FILES,
        *PROCESSOR_FILES,
    }
    small_files = []
    for name in names:
        if (
            name in supported
            or _LICENSE_FILE.fullmatch(name)
            or _NAMED_TEMPLATE.fullmatch(name)
        ):
            small_files.append(name)
    # safetensors are preferred to pickles, and an adapter has weights of its own
    for stem in WEIGHTS[:2]:
        base, extension = stem.split(".")
        shard = re.compile(rf"{base}(-\d+-of-\d+)?\.{extension}(\.index\.json)?")
        weights = list(filter(shard.fullmatch, names))
        if weights:
            return small_files + weights
    return small_files + [name for name in names if name == WEIGHTS[2]]


def _check_same_commit(folder: Path | None, pinned: HubId) -> None:
    """Raise ValueError if a folder has the files of another commit: those that the new one lacks
    would stay beside its own."""
    existing = downloaded_from(folder) if folder else None
    if existing and existing.revision not in (None, pinned.revision):
        raise ValueError(
            f"{folder} contains {existing}, and {pinned} has other files; choose another folder, "
            "or delete it"
        )


def fetch(
    repo: HubId, token: str | None = None, folder: Path | None = None
) -> tuple[Path, HubId]:
    """Return the local folder of a model or an adapter, and its id pinned to a commit; download it
    if necessary.

    folder: download into this folder instead of the cache of huggingface_hub. Interrupted downloads
    are resumed. Raise ValueError if the hub refuses the request, the network is unavailable or the
    disk has too little free space.
    """
    if folder is None and repo.is_pinned and (snapshot := _cached_snapshot(repo)):
        return snapshot, repo
    hub = import_hub()
    with translate_hub_errors(repo):
        try:
            info = hub.HfApi(token=token).model_info(
                repo.name, revision=repo.revision, files_metadata=True
            )
        # without a network, a complete snapshot will do: the branch's commit at the last request
        except Exception as error:
            if (
                folder is not None
                or not _is_unreachable(error)
                or not (snapshot := _cached_snapshot(repo))
            ):
                raise
            print(
                f"the hub cannot be reached; using {repo} from {snapshot}", file=sys.stderr
            )
            return snapshot, HubId(repo.name, snapshot.name)
        pinned = HubId(repo.name, info.sha)
        sizes = {str(file.rfilename): int(file.size or 0) for file in info.siblings}
        assert pinned.is_pinned, f"unexpected commit {info.sha!r}"
    _check_same_commit(folder, pinned)

    # download what is missing
    names = files_to_transfer(sorted(sizes))
    if not {"config.json", "adapter_config.json"} & set(names):
        raise ValueError(
            f"{repo}: the repository has no config.json and no adapter_config.json; name a model "
            "repository"
        )
    _check_disk_space(folder or _cache_folder(pinned.name), names, sizes, pinned)
    # first, so that the files of an interrupted download are not mixed with those of another one
    if folder is not None:
        origin = folder / _ORIGIN_FILE
        origin.parent.mkdir(parents=True, exist_ok=True)
        origin.write_text(json.dumps(pinned._asdict()) + "\n", "utf-8")
    # weights last: once they are complete, all files are
    snapshots = []
    for patterns in _weights_last(names):
        with translate_hub_errors(repo):
            snapshots.append(
                hub.snapshot_download(
                    pinned.name,
                    revision=pinned.revision,
                    allow_patterns=patterns,
                    token=token,
                    local_dir=folder,
                )
            )
    if folder is not None:
        return folder, pinned
    # record the commit of the branch as huggingface_hub does, for offline use
    if not repo.is_pinned:
        ref = _cache_folder(repo.name) / "refs" / (repo.revision or "main")
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(info.sha)
    # of one commit, so all are the same folder
    return Path(snapshots[-1]), pinned


def pin_dataset(repo: HubId) -> HubId:
    """Pin a dataset's id to a commit; return it unchanged if the hub is unavailable (`datasets`
    then uses its cache)."""
    if repo.is_pinned:
        return repo
    hub = import_hub()
    try:
        return HubId(
            repo.name, hub.HfApi().dataset_info(repo.name, revision=repo.revision).sha
        )
    except Exception as error:
        if not (isinstance(error, hub.errors.HfHubHTTPError) or _is_unreachable(error)):
            raise
        return repo


def downloaded_from(folder: Path) -> HubId | None:
    """Return the pinned id that `fetch` downloaded a folder from, or None for other folders."""
    folder = Path(os.path.realpath(folder))
    # in the cache: models--OWNER--NAME/snapshots/COMMIT
    owner, _, name = folder.parent.parent.name.removeprefix("models--").partition("--")
    if folder.parent.name == "snapshots" and name and _COMMIT.fullmatch(folder.name):
        return HubId(f"{owner}/{name}", folder.name)
    try:
        # in a folder of the user, `fetch` has left a note
        repo = HubId(**json.loads((folder / _ORIGIN_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if _ID.fullmatch(str(repo)):
        return repo
    return None


@contextmanager
def translate_hub_errors(repo: HubId) -> Iterator[None]:
    """Within the context, errors of the hub or the network become ValueErrors that suggest a
    remedy."""
    hub = import_hub()
    errors = hub.errors
    login = "set HF_TOKEN or run `hf auth login`"
    page = f"{hub.constants.ENDPOINT}/{repo.name}"
    try:
        yield
    except errors.GatedRepoError:
        raise ValueError(
            f"{repo} is gated: accept its terms at {page} and {login}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(
            f"{repo.name} has no revision {repo.revision!r}; see {page}/tree/main"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise ValueError(
            f"{repo} is not in the cache, and HF_HUB_OFFLINE is set; unset it or pass a local "
            "folder"
        ) from None
    except errors.RepositoryNotFoundError:
        reason = f"{repo.name} is neither a local folder nor a public repository on the hub"
        raise ValueError(
            f"{reason}; check the spelling, or if it is private, {login}"
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            reason = "the token is invalid or lacks the permission"
        else:
            reason = str(error).split("\n")[0][:200]
        raise ValueError(f"{repo}: the hub returned status {status}: {reason}") from None
    # HTTP libraries differ between versions of huggingface_hub, and so do their exceptions
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[:150]
        if not (
            isinstance(error, errors.LocalEntryNotFoundError) or _is_unreachable(error)
        ):
            if isinstance(error, OSError):  # an error of the disk
                raise
            raise ValueError(
                f"{repo}: {hub.constants.ENDPOINT} sent no valid response ({reason}); check "
                "HF_ENDPOINT"
            ) from None
        remedy = (
            "check the network and try again (downloaded files are kept), "
            "or pass a local folder"
        )
        raise ValueError(
            f"{repo}: {hub.constants.ENDPOINT} cannot be reached ({reason}); {remedy}"
        ) from None


def import_hub() -> Any:
    """Import huggingface_hub with its telemetry disabled."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors

    return huggingface_hub


def _is_unreachable(error: Exception) -> bool:
    """Whether an error means that the network is unavailable; HTTP libraries differ between
    huggingface_hub versions."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, (ConnectionError, TimeoutError)) or package in (
        "httpx",
        "httpx2",
        "httpcore",
        "requests",
    )


def _cache_folder(name: str) -> Path:
    """Return the cache folder of huggingface_hub for a model, with blobs/, snapshots/COMMIT/ and
    refs/BRANCH."""
    return Path(import_hub().constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")


def _cached_snapshot(repo: HubId) -> Path | None:
    """Return the complete snapshot in the cache, or None; for a branch, the commit of the last
    request to the hub."""
    revision = repo.revision or "main"
    try:
        if repo.is_pinned:
            commit = revision
        else:
            commit = (_cache_folder(repo.name) / "refs" / revision).read_text().strip()
    except OSError:
        return None
    snapshot = _cache_folder(repo.name) / "snapshots" / commit
    if _COMMIT.fullmatch(commit) and has_all_weights(snapshot):
        return snapshot
    return None


def has_all_weights(folder: Path) -> bool:
    """Whether a folder contains all of its weight files."""
    for stem in WEIGHTS:
        if (folder / stem).is_file():
            return True
        if (index := folder / f"{stem}.index.json").is_file():
            try:
                shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError):
                return False
            return all((folder / Path(str(name)).name).is_file() for name in shards)
    return False


def _weights_last(names: list[str]) -> list[list[str]]:
    weights = []
    others = []
    for name in names:
        if name.endswith((".safetensors", ".bin")):
            weights.append(name)
        else:
            others.append(name)
    return [group for group in (others, weights) if group]


def _check_disk_space(
    folder: Path, names: list[str], sizes: dict[str, int], repo: HubId
) -> None:
    """Raise ValueError if the remaining files do not fit on the disk."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    # a snapshot has links to blobs, which must not count twice
    downloaded = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            downloaded += path.stat().st_size
    missing = sum(sizes[name] for name in names) - downloaded
    free = shutil.disk_usage(parent).free
    if missing > free:
        reason = (
            f"{repo} needs {missing / 2**30:.1f} GiB more in {parent}, but only {free / 2**30:.1f} "
            "GiB are free"
        )
        raise ValueError(
            f"{reason}; free space, or choose another disk with HF_HOME or --out_dir of "
            "scripts/download.py"
        )
