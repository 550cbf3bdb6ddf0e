"""The flags of `runs`."""

from dataclasses import dataclass


@dataclass
class RunsArgs:
    """List the runs under a folder with method, model, steps, loss and state."""

    folder: str = "out"
    """The folder with the runs; runs in its subfolders are listed too."""
