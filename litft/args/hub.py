"""The flags of `download` and `upload`."""

import re
from dataclasses import dataclass

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass
class DownloadArgs:
    """Fetch a model or an adapter from the Hugging Face hub: the files that litft reads, and the licence."""

    repo_id: str | None = None
    """owner/name, or owner/name@revision: a branch, a tag or a commit."""
    out_dir: str | None = None
    """Where to put it; what is there of it already is kept. Default: the cache of huggingface_hub."""
    token: str | None = None
    """For private and gated models. Default: HF_TOKEN, or what `hf auth login` has stored."""

    def problems(self) -> list[str]:
        """The name is needed."""
        return [] if self.repo_id else ["--repo_id is missing: name a model of the hub as owner/name"]


@dataclass
class UploadArgs:
    """Put a run's result, or any folder, on the Hugging Face hub, with a model card written from the run."""

    checkpoint_dir: str | None = None
    """A run's folder, a model or an adapter. Default: the newest finished run under out/."""
    base_dir: str | None = None
    """Where an adapter folder's base model lies now, if it has moved."""
    repo_id: str | None = None
    """owner/name: where to put it. It is made if it is not there."""
    run: str | None = None
    """The run that a merged or converted folder comes from, for its card. Default: the one that the folder lies in."""
    base_model: str | None = None
    """The base model's id on the hub. Default: as known, of a base that came from there."""
    licence: str | None = None
    """The licence's id on the hub: apache-2.0, mit, llama3.1. Default: the base model's, where its README says it."""
    private: bool = False
    """Make a repository that only you see."""
    message: str = "Upload from litft"
    """What the commit says."""
    token: str | None = None
    """One that may write. Default: HF_TOKEN, or what `hf auth login` has stored."""
    dry_run: bool = False
    """Show the card on stdout, the files on stderr, and send nothing."""

    def problems(self) -> list[str]:
        """The name is needed, and of its shape."""
        found = []
        for name in ("repo_id", "base_model"):
            given = getattr(self, name)
            if given is None and name == "repo_id":
                found.append("--repo_id is missing: name where to put it as owner/name")
            elif given is not None and not HUB_NAME.fullmatch(given.partition("@")[0] if name == "base_model" else given):
                found.append(f"--{name} {given}: expected owner/name")
        return found
