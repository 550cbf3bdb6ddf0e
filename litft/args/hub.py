"""The flags of `download` and `upload`."""

import re
from dataclasses import dataclass

# owner/name, neither of which begins with a dot
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass
class DownloadArgs:
    """Download a model or an adapter from the Hugging Face hub: the files that litft reads, and the
    licence."""

    repo_id: str | None = None
    """The repository: owner/name, or owner/name@revision with a branch, a tag or a commit."""
    out_dir: str | None = None
    """The folder to write; files that are already there are not downloaded again. Default: the
    cache of huggingface_hub."""
    token: str | None = None
    """Access token for private and gated models. Default: HF_TOKEN, or the token stored by `hf auth
    login`."""

    @property
    def repository(self) -> str:
        """--repo_id, which `problems` requires."""
        assert self.repo_id is not None
        return self.repo_id

    def problems(self) -> list[str]:
        """Return a problem if the repository is missing."""
        if self.repo_id:
            return []
        return ["--repo_id is missing: name a model of the hub as owner/name"]


@dataclass
class UploadArgs:
    """Upload a run's result, or any model folder, to the Hugging Face hub, with a model card
    generated from the run."""

    checkpoint_dir: str | None = None
    """A run folder, a model folder or an adapter folder. Default: the newest finished run in
    out/ itself."""
    base_dir: str | None = None
    """The folder of an adapter's base model, if it has moved. Default: the path stored with the
    adapter."""
    repo_id: str | None = None
    """The target repository, owner/name. It is created if it does not exist."""
    run: str | None = None
    """The run folder that a merged or converted model comes from, for its card. Default: the run
    above the folder."""
    base_model: str | None = None
    """The hub id of the base model, for the card. Default: known if the base was downloaded from
    the hub."""
    licence: str | None = None
    """The licence as a hub id: apache-2.0, mit, llama3.1. Default: that of the base model, if its
    README states it."""
    private: bool = False
    """Create the repository as private."""
    message: str = "Upload from litft"
    """The commit message."""
    token: str | None = None
    """Access token with write permission. Default: HF_TOKEN, or the token stored by `hf auth
    login`."""
    dry_run: bool = False
    """Print the card to stdout and the list of files to stderr, and upload nothing."""

    @property
    def repository(self) -> str:
        """--repo_id, which `problems` requires."""
        assert self.repo_id is not None
        return self.repo_id

    def problems(self) -> list[str]:
        """Return the problems of the repository names."""
        problems = []
        for name in ("repo_id", "base_model"):
            value = getattr(self, name)
            if value is None:
                if name == "repo_id":
                    problems.append(
                        "--repo_id is missing: name the target repository as owner/name"
                    )
                continue
            hub_name = value
            # the base of the card may have a revision; the target has none
            if name == "base_model":
                hub_name = value.partition("@")[0]
            if not HUB_NAME.fullmatch(hub_name):
                problems.append(f"--{name} {value}: expected owner/name")
        return problems
