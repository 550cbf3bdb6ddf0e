"""The flags of `runs`."""

from dataclasses import dataclass

from litft import run_dir


@dataclass
class RunsArgs:
    """List the runs under a folder with method, model, steps, loss and state."""

    folder: str = str(run_dir.OUT)
    """The folder to search for runs, with all its subfolders."""
