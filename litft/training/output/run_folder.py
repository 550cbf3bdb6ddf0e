"""The folder of a run before the run is in it: whether it may be written, and config.yaml."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from litft import run_dir
from litft.args.processes import launch_id, started_by
from litft.atomic import atomic_write
from litft.data.sources import source_digests
from litft.distributed.process_group import Processes
from litft.training.output import run_checkpoints
from litft.training.planned_run import PlannedRun
from litft.training.resume_identity import run_identity


class RunFolder:
    """The folder of a run, which is begun without the network."""

    def __init__(self, processes: Processes, run: PlannedRun, folder: Path) -> None:
        self.fabric = processes.fabric
        self.run = run
        self.args = run.setup.args
        self.folder = folder
        self.has_config = False  # config.yaml is written

    def begin(self) -> None:
        """Make the folder of a new run and write its config.yaml; every process takes part.

        Called before the run is opened, since what the reference or the teacher says is written
        into the folder first. Raises ValueError if the run in the folder cannot be resumed with
        these settings.
        """
        if self.args.resume:
            run_checkpoints.check_resumable(self.folder, self.identity())
        is_old = self.args.resume and run_dir.is_run(self.folder)
        if self.fabric.global_rank == 0 and not is_old:
            self.write_config()
        self.fabric.barrier()

    def write_config(self) -> dict[str, Any]:
        """Make the folder, once without what was in it if it is to be overwritten; returns the
        flags."""
        if self.args.overwrite and not self.has_config:
            run_dir.clear(self.folder)
        self.has_config = True
        self.folder.mkdir(parents=True, exist_ok=True)
        config = dataclasses.asdict(self.args)
        # a resumed run may have other devices, and the launcher sets them
        from_launcher = ("devices", "num_nodes") if started_by() else ()
        for name in ("out_dir", "resume", "overwrite", *from_launcher):
            config.pop(name)
        data = self.args.data
        config["data"] |= {
            "path": [item.entry() for item in data.paths],
            "val_path": [item.entry() for item in data.val_paths],
        }
        text = yaml.safe_dump(config, sort_keys=False)
        digests = json.dumps(source_digests(data), indent=2)
        atomic_write(self.folder / run_dir.DATA, f"{digests}\n")
        run_dir.write_config(self.folder, self.run.setup.method.title, text, launch_id())
        return config

    def identity(self) -> dict[str, Any]:
        """What must be the same where a run is resumed, or it would silently become another run."""
        return run_identity(self.run)
