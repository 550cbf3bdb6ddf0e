"""The Hugging Face hub: models by id, `owner/name` or `owner/name@revision`, fetched once and pinned to a commit.

huggingface_hub does what touches the network, and is imported only then. A commit that is here whole is taken as it is,
without a question to the hub.
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

# what a tokenizer consists of: copied beside every model and adapter that litft writes
TOKENIZER_FILES = (
    "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "chat_template.jinja generation_config.json"
).split()
_ID = re.compile(rf"({HUB_NAME.pattern})(?:@((?!.*\.\.)\w[\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BESIDE = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)[\w.-]*|README\.md", re.IGNORECASE)  # what its use is bound to
_ORIGIN = Path(".cache", "huggingface", "origin.json")  # within a folder of `download`, where the hub's own notes lie
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")  # of a model the first there is


class HubId(NamedTuple):
    """A repository, and which of its commits: a branch, a tag, a hash; None: the newest."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def is_pinned(self) -> bool:
        """Whether it can mean one thing only."""
        return bool(self.revision and _COMMIT.fullmatch(self.revision))


def hub_id(text: str | Path) -> HubId | None:
    """What a flag's value means on the hub; None where it is a path: one that exists, or is written as one."""
    match = _ID.fullmatch(str(text))
    if match is None or Path(text).exists() or Path(str(text).partition("/")[0]).is_dir():
        return None
    return HubId(*match.groups())


def needed(names: list[str]) -> list[str]:
    """Of a repository's files those that litft reads, and its licence; weights last, in one format."""
    known = {"config.json", "adapter_config.json", *TOKENIZER_FILES}
    small = [name for name in names if name in known or _BESIDE.fullmatch(name)]
    for stem in WEIGHTS[:2]:
        kind, ending = stem.split(".")
        shard = re.compile(rf"{kind}(-\d+-of-\d+)?\.{ending}(\.index\.json)?")
        if weights := [name for name in names if shard.fullmatch(name)]:
            return small + weights
    return small + [name for name in names if name == WEIGHTS[2]]


def fetch(wanted: HubId, token: str | None = None, folder: Path | None = None) -> tuple[Path, HubId]:
    """The folder of a model or an adapter, and its id with the commit; downloaded where it is not here.

    folder: where to put it, rather than into the cache of huggingface_hub. Goes on with a download that was cut off.
    ValueError for whatever the hub refuses, for no network, and where the disk has too little room.
    """
    if folder is None and wanted.is_pinned and (there := _cached(wanted)):
        return there, wanted
    hub = library()
    with told(wanted):
        try:
            info = hub.HfApi(token=token).model_info(wanted.name, revision=wanted.revision, files_metadata=True)
        except Exception as error:
            if folder is not None or not _is_unreachable(error) or not (there := _cached(wanted)):
                raise
            print(f"the hub cannot be reached; {wanted} is taken from {there}", file=sys.stderr)
            return there, HubId(wanted.name, there.name)
        found, sizes = HubId(wanted.name, info.sha), {str(file.rfilename): int(file.size or 0) for file in info.siblings}
        assert found.is_pinned, f"the commit {info.sha!r}"
    names = needed(sorted(sizes))
    if not {"config.json", "adapter_config.json"} & set(names):
        raise ValueError(f"{wanted}: the repository has neither config.json nor adapter_config.json; it is no model")
    _check_room(folder or _cache(found.name), names, sizes, found)
    for part in _in_order(names):  # weights last: where they are whole everything is
        with told(wanted):
            there = hub.snapshot_download(
                found.name, revision=found.revision, allow_patterns=part, token=token, local_dir=folder
            )
    if folder is not None:
        (folder / _ORIGIN).write_text(json.dumps(found._asdict()) + "\n", "utf-8")
        return folder, found
    if not wanted.is_pinned:  # what the branch means, as huggingface_hub notes it: for when the hub cannot be asked
        note = _cache(wanted.name) / "refs" / (wanted.revision or "main")
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(info.sha)
    return Path(there), found


def pinned_data(wanted: HubId) -> HubId:
    """A data set's id with its commit; as it is where the hub cannot be asked, `datasets` looks into its cache then."""
    if wanted.is_pinned:
        return wanted
    hub = library()
    try:
        return HubId(wanted.name, hub.HfApi().dataset_info(wanted.name, revision=wanted.revision).sha)
    except Exception as error:
        if not (isinstance(error, hub.errors.HfHubHTTPError) or _is_unreachable(error)):
            raise
        return wanted


def origin(folder: Path) -> HubId | None:
    """Where a folder came from, if it is one of `fetch`'s."""
    folder = Path(os.path.realpath(folder))
    owner, _, name = folder.parent.parent.name.removeprefix("models--").partition("--")
    if folder.parent.name == "snapshots" and name and _COMMIT.fullmatch(folder.name):
        return HubId(f"{owner}/{name}", folder.name)
    try:
        found = HubId(**json.loads((folder / _ORIGIN).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if _ID.fullmatch(str(found)) else None


@contextmanager
def told(wanted: HubId) -> Iterator[None]:
    """Inside, whatever the hub refuses becomes a ValueError that says what to do."""
    hub = library()
    errors, login = hub.errors, "set HF_TOKEN, or run `hf auth login`"
    page = f"{hub.constants.ENDPOINT}/{wanted.name}"
    try:
        yield
    except errors.GatedRepoError:
        raise ValueError(f"{wanted} is gated: accept its terms at {page}, and {login}") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{wanted.name} has no revision {wanted.revision!r}; see {page}/tree/main") from None
    except errors.OfflineModeIsEnabled:
        raise ValueError(f"{wanted} is not here, and HF_HUB_OFFLINE is set; unset it, or name a folder") from None
    except errors.RepositoryNotFoundError:
        reason = f"{wanted.name} is no folder here, and not on the hub, or private"
        raise ValueError(f"{reason}; check its spelling, and for a private one {login}") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        reason = "the token is not valid, or may not do that" if status in (401, 403) else str(error).split("\n")[0][:200]
        raise ValueError(f"{wanted}: the hub answers {status}: {reason}") from None
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[:150]
        if not (isinstance(error, errors.LocalEntryNotFoundError) or _is_unreachable(error)):
            if isinstance(error, OSError):  # of the disk
                raise
            raise ValueError(f"{wanted}: {hub.constants.ENDPOINT} answers what no hub does ({reason})") from None
        remedy = "check the network and try again (what is here already is kept), or name a folder"
        raise ValueError(f"{wanted}: {hub.constants.ENDPOINT} cannot be reached ({reason}); {remedy}") from None


def library() -> Any:
    """huggingface_hub, which sends nothing about how it is used."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors

    return huggingface_hub


def _is_unreachable(error: Exception) -> bool:
    """Whether this is raised where there is no network; huggingface_hub has called it by several libraries in turn."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, (ConnectionError, TimeoutError)) or library in ("httpx", "httpx2", "httpcore", "requests")


def _cache(name: str) -> Path:
    """Where huggingface_hub keeps a model, once it is there: blobs/, snapshots/COMMIT/, refs/BRANCH."""
    return Path(library().constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")


def _cached(wanted: HubId) -> Path | None:
    """A commit that is in the cache whole; of a branch the one that it was when it was last asked for."""
    revision = wanted.revision or "main"
    try:
        commit = revision if wanted.is_pinned else (_cache(wanted.name) / "refs" / revision).read_text().strip()
    except OSError:
        return None
    there = _cache(wanted.name) / "snapshots" / commit
    return there if _COMMIT.fullmatch(commit) and is_whole(there) else None


def is_whole(folder: Path) -> bool:
    """Whether a folder's weights are all there."""
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


def _in_order(names: list[str]) -> list[list[str]]:
    weights = [name for name in names if name.endswith((".safetensors", ".bin"))]
    return [part for part in ([name for name in names if name not in weights], weights) if part]


def _check_room(folder: Path, names: list[str], sizes: dict[str, int], wanted: HubId) -> None:
    """ValueError where the disk cannot hold what is missing."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    missing, free = sum(sizes[name] for name in names) - held, shutil.disk_usage(place).free
    if missing > free:
        reason = f"{wanted} needs {missing / 2**30:.1f} GiB more in {place}, where {free / 2**30:.1f} are free"
        raise ValueError(f"{reason}; make room, or name another place with HF_HOME, or --out_dir of scripts/download.py")
