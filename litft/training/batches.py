"""The samples of a run's steps and validations, with what their objective needs of the reference
model: the model as it stands before the first step.

The log-probabilities of answers in the reference model are computed once, one number for each
answer, so that no second model is in memory, and kept in the run's folder. A resumed run builds the
same model again before it reads its checkpoint, so what is missing can still be computed.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning_fabric import Fabric
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from litft.data.packing import BatchLayout
from litft.data.sample import Sample, TeacherValues
from litft.data.token_store import Samples
from litft.distributed.process_group import sum_over_processes
from litft.evaluation.log_probs import document_log_probs
from litft.model.transformer import GPT
from litft.training.objectives import Objective
from litft.training.schedule import Schedule

FOLDER = "reference"  # within the run's folder
# returns what a teacher says of the sample with this number; None if it was not asked
TeacherReader = Callable[[int], TeacherValues | None]
# samples of a process that are laid out at once, and written together
SAMPLES_AT_ONCE = 64


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


class Batches:
    """The samples of a run's steps and validations, with what their objective needs of the
    reference model."""

    def __init__(
        self,
        objective: Objective,
        schedule: Schedule,
        val_indices: Sequence[int],
        teacher: Mapping[str, TeacherReader] | None = None,
    ) -> None:
        # teacher: of the parts "train" and "val"
        self.teacher = teacher or {}
        self.objective = objective
        self.schedule = schedule
        data = schedule.data
        self.width = 2 if objective.data == "pairs" else 1
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
                data.train, self._train_partners, data.limit, schedule.samples
            )
            of_val = KLPairs(
                data.val,
                lambda index: (index, (index + 1) % len(data.val)),
                data.limit,
                len(data.val),
            )
            self.parts["train_mismatches"] = (of_train, range(schedule.samples))
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

    def step(self, step: int) -> list[Sample]:
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

    def validation(self) -> Sequence[Sample]:
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
        if name in self.teacher:
            return SamplesWithTeacher(samples, self.teacher[name])
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


def digest(facts: dict[str, Any]) -> str:
    """Return a short hash of facts."""
    text = json.dumps(facts, default=str)
    # config.yaml turns some whole numbers into floats
    text = json.dumps(json.loads(text, parse_int=float), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def progress_bar(total: int, whose: str, title: str, fabric: Fabric) -> tqdm:
    """Return a progress bar that the first process shows on a terminal; whose: the model that reads
    the examples."""
    if fabric.global_rank == 0:
        hidden = None
    else:
        hidden = True
    return tqdm(total=total, desc=f"{whose}, {title}", unit=" examples", disable=hidden)


def log_probs(
    fabric: Fabric,
    model: GPT,
    layout: BatchLayout,
    samples: list[Sample],
    before_batch: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Return the summed log-probability of each document's targets, (len(samples), documents) fp64,
    on every process."""
    values, _ = document_log_probs(
        model, samples, layout, fabric.device, fabric.global_rank, before_batch
    )
    return sum_over_processes(fabric, values).cpu().numpy()


class LogProbFile:
    """A file of rows, each with the index of a sample, its log-probabilities, and a hash of both.

    A last row that a crash has cut short is ignored, and so are rows that have changed since they
    were written.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.path = path
        self.row = np.dtype(
            [("index", np.int64), ("values", np.float64, (width,)), ("hash", np.uint64)]
        )

    def rows(self) -> np.ndarray:
        """Return the rows that are as they were written."""
        if not self.path.is_file():
            return np.empty(0, self.row)
        rows = np.fromfile(self.path, self.row, self._num_complete())
        return rows[rows["hash"] == self._hashes(rows)]

    def read_into(self, values: np.ndarray) -> None:
        """Set the rows of `values` that the file has, and remove an incomplete last row from the
        file."""
        rows = self.rows()
        # or the next row would be appended to half a row
        if self.path.is_file():
            with self.path.open("r+b") as file:
                file.truncate(self._num_complete() * self.row.itemsize)
        rows = rows[(rows["index"] >= 0) & (rows["index"] < len(values))]
        values[rows["index"]] = rows["values"]

    def append(self, indices: list[int], values: np.ndarray) -> None:
        """Add rows."""
        rows = np.zeros(len(indices), self.row)
        rows["index"] = indices
        rows["values"] = values
        rows["hash"] = self._hashes(rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(rows.tobytes())

    def _num_complete(self) -> int:
        """Return the number of rows that were written to their end."""
        return self.path.stat().st_size // self.row.itemsize

    def _hashes(self, rows: np.ndarray) -> np.ndarray:
        """Return a hash of each row's index and log-probabilities."""
        # the hash is the last field of a row
        hashed = self.row.itemsize - np.dtype(np.uint64).itemsize
        contents = rows.tobytes()
        hashes = np.empty(len(rows), np.uint64)
        for number in range(len(rows)):
            start = number * self.row.itemsize
            hashes[number] = xxh3_64_intdigest(contents[start : start + hashed])
        return hashes
