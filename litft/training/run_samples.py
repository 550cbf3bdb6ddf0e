"""The samples of a run's steps and validations, with what their objective needs of another model:
of a teacher, or of the reference, which is the model as it stands before the first step.

The log-probabilities of answers in the reference model are computed once, one number for each
answer, so that no second model is in memory, and kept in the run's folder. A resumed run builds the
same model again before it reads its checkpoint, so what is missing can still be computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning_fabric import Fabric
from torch.distributed.device_mesh import DeviceMesh

from litft.data.sample import Sample
from litft.data.token_store import Samples
from litft.distributed.process_group import Processes
from litft.model.transformer import GPT
from litft.training.measured_samples import all_measured
from litft.training.objectives import Objective
from litft.training.output.run_folder import RunFolder
from litft.training.output.screen import Screen
from litft.training.planned_run import PlannedRun
from litft.training.reference_values import (
    FOLDER,
    SAMPLES_AT_ONCE,
    LogProbFile,
    digest,
    log_probs,
    progress_bar,
)
from litft.training.schedule import Schedule
from litft.training.teacher import Teacher, TeacherPass, TeacherReader


class KLPairs(Sequence[Sample]):
    """The prompts of samples, each with the answer of another one; read on access."""

    def __init__(
        self,
        samples: Samples,
        partners: Callable[[int], tuple[int, int]],
        limit: int,
        size: int,
    ) -> None:
        # partners: from a position to the sample with the prompt, and the one with the answer
        self.samples = samples
        self.partners = partners
        self.limit = limit
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> Sample:
        return self.samples.mismatched(*self.partners(position), self.limit)


class SamplesWithReference(Sequence[Sample]):
    """A lazy view of samples that adds log-probabilities in the reference model, one for each
    document, and the samples of KTO's KL term."""

    def __init__(
        self,
        samples: Sequence[Sample],
        all_values: Mapping[str, np.ndarray],
        name: str,
        mismatches: "SamplesWithReference | None" = None,
    ) -> None:
        self.samples = samples
        # by name of the part; empty until they are computed
        self.all_values = all_values
        self.name = name
        self.mismatches = mismatches

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        values = self.all_values.get(self.name)
        if values is None:
            reference = ()
        else:
            reference = tuple(values[index].tolist())
        sample = replace(self.samples[index], reference=reference)
        if self.mismatches is None:
            return sample
        return replace(sample, mismatch=self.mismatches[index])


class SamplesWithTeacher(Sequence[Sample]):
    """A lazy view of samples that adds what a teacher says of their targets."""

    def __init__(self, samples: Sequence[Sample], read: TeacherReader) -> None:
        self.samples = samples
        self.read = read

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return replace(self.samples[index], teacher=self.read(index))


class RunSamples:
    """The samples of a run's steps and validations, with what their objective needs of the
    reference model."""

    def __init__(
        self,
        objective: Objective,
        schedule: Schedule,
        val_indices: Sequence[int],
        readers: Mapping[str, TeacherReader] | None = None,
    ) -> None:
        # readers: of what a teacher says of the parts "train" and "val"
        self.readers = readers or {}
        self.objective = objective
        self.schedule = schedule
        data = schedule.data
        self.width = 2 if objective.data_kind == "pairs" else 1
        # by name: samples, and the indices whose log-probabilities a run needs
        self.parts: dict[str, tuple[Sequence[Sample], Sequence[int]]] = {}
        if objective.needs_reference:
            train_indices = schedule.distinct_indices()
            self.parts = {
                "train": (data.train, train_indices),
                "val": (data.val, val_indices),
            }

        # training pairs positions of the stream, validation pairs examples
        if objective.needs_mismatches:
            of_train = KLPairs(
                data.train, self._train_partners, data.limit, schedule.num_samples
            )
            of_val = KLPairs(
                data.val,
                lambda index: (index, (index + 1) % len(data.val)),
                data.limit,
                len(data.val),
            )
            self.parts["train_mismatches"] = (of_train, range(schedule.num_samples))
            self.parts["val_mismatches"] = (of_val, val_indices)
        self.values: dict[str, np.ndarray] = {}

    def _train_partners(self, position: int) -> tuple[int, int]:
        """Return the sample at a position of the stream, and the next one in the stream that is
        another."""
        order = self.schedule.order
        (index,) = order.indices(position, position + 1)
        for at in range(position + 1, position + 1 + order.size):
            (other,) = order.indices(at, at + 1)
            if other != index:
                return index, other
        # in a stream of a single example, its partner is itself
        return index, index

    def of_step(self, step: int) -> list[Sample]:
        """Return the samples of a step."""
        train = self._referenced("train", self.schedule.data.train)
        schedule = self.schedule
        indices = schedule.step_indices(step)
        # a prompt comes once for each of its completions, and is read once
        distinct = {index: train[index] for index in dict.fromkeys(indices)}
        samples = [distinct[index] for index in indices]
        if not self.objective.needs_mismatches:
            return samples
        mismatches = self._mismatches("train_mismatches")
        with_mismatches = []
        for at, sample in enumerate(samples, schedule.seen(step)):
            with_mismatches.append(replace(sample, mismatch=mismatches[at]))
        return with_mismatches

    def of_validation(self) -> Sequence[Sample]:
        """Return the validation samples."""
        mismatches = None
        if self.objective.needs_mismatches:
            mismatches = self._mismatches("val_mismatches")
        return self._referenced("val", self.schedule.data.val, mismatches)

    def _referenced(
        self,
        name: str,
        samples: Sequence[Sample],
        mismatches: SamplesWithReference | None = None,
    ) -> Sequence[Sample]:
        if name in self.readers:
            return SamplesWithTeacher(samples, self.readers[name])
        if self.parts:
            return SamplesWithReference(samples, self.values, name, mismatches)
        return samples

    def _mismatches(self, name: str) -> SamplesWithReference:
        return SamplesWithReference(self.parts[name][0], self.values, name)

    def compute_references(
        self,
        fabric: Fabric,
        model: GPT,
        folder: Path,
        identity: dict[str, Any],
        say: Callable[[str], None],
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the log-probabilities from the run's folder, compute those that are missing, and add
        them to it.

        identity: what they depend on. say: prints a line. before_batch: called by every process
        before each forward pass; it may raise.
        """
        # the name of the file has a hash of all that the values depend on
        key = digest(identity | {"limit": self.schedule.data.limit, "rows": "hashed"})
        for name, (samples, indices) in self.parts.items():
            file = LogProbFile(folder / FOLDER / f"{name}-{key}.bin", self.width)
            values = np.full((len(samples), self.width), np.nan)
            # the first process alone reads and writes the file
            if fabric.global_rank == 0:
                file.read_into(values)
            values = fabric.broadcast(values)
            missing = []
            for index in indices:
                if np.isnan(values[index, 0]):
                    missing.append(index)
            title = name.replace("_", " ")
            if len(indices):
                say(
                    f"reference log-probabilities of {len(indices):,} {title} examples: "
                    f"{len(indices) - len(missing):,} read from {FOLDER}/, "
                    f"{len(missing):,} to compute"
                )

            # written block by block: an interrupted run loses one block at most
            size = SAMPLES_AT_ONCE * fabric.world_size
            with progress_bar(len(missing), "reference", title, fabric) as bar:
                for start in range(0, len(missing), size):
                    block = missing[start : start + size]
                    part = [samples[index] for index in block]
                    values[block] = log_probs(
                        fabric, model, self.schedule.layout, part, before_batch
                    )
                    if fabric.global_rank == 0:
                        file.append(block, values[block])
                    bar.update(len(block))
            self.values[name] = values


class OpenedSamples(NamedTuple):
    """The samples of a run, and its teacher where the steps need it."""

    samples: RunSamples
    teacher: Teacher | None


def open_samples(
    processes: Processes,
    run: PlannedRun,
    folder: RunFolder,
    screen: Screen,
    mesh: DeviceMesh | None,
) -> OpenedSamples:
    """Return the samples of a run; a teacher, if it has one, reads them first.

    mesh: over which the networks are sharded; None: each process holds all of them.
    """
    args = run.setup.args
    schedule = run.schedule
    objective = run.setup.objective
    # what a reference or a teacher says is needed of all that is measured, of all sets
    measured = all_measured(schedule.data, args.eval, args.train.global_batch_size)
    if run.setup.teacher is None:
        return OpenedSamples(RunSamples(objective, schedule, measured), None)
    teacher_pass = TeacherPass(processes, run, folder, screen, measured, mesh)
    teacher_pass.read_examples()
    samples = RunSamples(objective, schedule, measured, teacher_pass.readers)
    return OpenedSamples(samples, teacher_pass.teacher)
