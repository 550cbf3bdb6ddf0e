"""The folders of a run's result, final/ and best/: an adapter as PEFT opens it, or all weights."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path

from torch import Tensor

from litft.atomic import atomic_folder
from litft.checkpoints.adapter_reader import note_step
from litft.checkpoints.weight_writer import SHARD_BYTES
from litft.model.placement import full_tensor
from litft.pretrained.folder import PretrainedFolder, base_record
from litft.pretrained.save import Result, check_written, copy_tokenizer, write_result
from litft.training.network import TrainedNetwork
from litft.training.planned_run import PlannedRun


class ResultWriter:
    """Writes the trained network into folders that can be opened.

    The first process writes; all of them take part in what has to be gathered.
    """

    def __init__(
        self, run: PlannedRun, network: TrainedNetwork, folder: Path, is_writer: bool
    ) -> None:
        # folder: of the run
        self.setup = run.setup
        self.precision = run.settings.precision
        self.network = network
        self.folder = folder
        self.is_writer = is_writer

    def write(self, name: str, step: int | None = None) -> None:
        """Write a folder, which gets its name only when it is complete. step: noted in it, if
        given.

        A sharded network is gathered tensor by tensor, with all processes; the first one writes.
        """
        # None: only take part
        with (
            atomic_folder(self.folder / name)
            if self.is_writer
            else nullcontext() as partial
        ):
            if self.setup.method.saves_full_model:
                self._write_full_model(partial)
            else:
                self._write_adapter(partial, self.folder / name)
            if partial is None:
                return
            copy_tokenizer(self.setup.tokenizer, partial)
            check_written(partial, self._base())
            if step is not None:
                note_step(partial, step)

    def _write_full_model(self, partial: Path | None) -> None:
        """Write all weights; None: only take part in gathering them."""
        # a whole network needs no other process
        if partial is None and not self.network.sharded:
            return
        source = self.setup.source
        result = Result(self.setup.method, self._values())
        write_result(partial, source, source.dtype(None), result, SHARD_BYTES / 1e9)

    def _write_adapter(self, partial: Path | None, final: Path) -> None:
        """Write the adapter; None: only take part in gathering it. final: the folder's later name,
        since the record has the path of the base relative to it."""
        values = self._values()
        if self.network.sharded:
            values = {name: full_tensor(value) for name, value in values.items()}
        if partial is None:
            return
        base = self._base()
        record = base_record(base, final)
        training = {"quantize": self.setup.quantize, "precision": self.precision}
        record = record | {"litft": record["litft"] | training}
        self.setup.method.write(partial, base, values, record)

    def _values(self) -> dict[str, Tensor]:
        """The parameters that are saved; of a sharded network, this process's part."""
        values = {}
        for name, parameter in self.network.parameters.items():
            values[name] = parameter.detach()
        return values

    def _base(self) -> PretrainedFolder:
        """The folder of the base, with the names of modules that adapters are written with."""
        source = self.setup.source
        if self.setup.method.saves_full_model:
            return source
        text_names = self.setup.args.save.text_names
        return dataclasses.replace(source, text_names=text_names)
