"""The teacher of --objective distill: its pass over the data, before the student is in memory.

What it says of each target is kept in the run's folder, so that a killed run continues from there.
"""

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from lightning_fabric import Fabric
from torch.distributed.device_mesh import DeviceMesh
from xxhash import xxh3_64_intdigest

from litft import run_dir
from litft.args.parser import method_name
from litft.data.packing import BatchLayout
from litft.data.sample import Sample, TeacherValues
from litft.distributed.devices import is_out_of_memory
from litft.distributed.process_group import Processes
from litft.errors import Interrupted, RankError
from litft.evaluation.log_probs import sample_batches
from litft.model.distillation import TeacherQuestion
from litft.pretrained.load import load_network, load_sharded
from litft.signals import Signals
from litft.training.output.run_folder import RunFolder
from litft.training.output.screen import Screen
from litft.training.planned_run import PlannedRun
from litft.training.reference_values import (
    FOLDER,
    SAMPLES_AT_ONCE,
    digest,
    progress_bar,
)

# N targets of a sample, K tokens of the teacher

# returns what a teacher says of the sample with this number; None if it was not asked
TeacherReader = Callable[[int], TeacherValues | None]


class Teacher:
    """The network of the teacher, which says what it would have written at each target.

    Over a mesh, each process holds a shard of it.
    """

    def __init__(self, fabric: Fabric, run: PlannedRun, mesh: DeviceMesh | None) -> None:
        setup = run.setup
        assert setup.teacher is not None  # of --objective distill alone
        precision = run.settings.precision.removesuffix("-true")
        quantize = setup.args.distill.quantize
        self.fabric = fabric
        self.folder = setup.teacher.folder
        self.question = TeacherQuestion(
            count=setup.args.distill.top_k,
            vocab_size=setup.method.vocab_size(setup.source.config),
            temperature=setup.args.distill.temperature,
        )
        if mesh is None:
            self.model = load_network(setup.teacher, precision, fabric.device, quantize)
            self.model.requires_grad_(False)
        else:
            self.model = load_sharded(
                setup.teacher, precision, fabric.device, quantize, mesh
            )

    @torch.no_grad()
    def judge(
        self,
        samples: Sequence[Sample],
        layout: BatchLayout,
        before_batch: Callable[[], object] = lambda: None,
    ) -> list[TeacherValues | None]:
        """Return what the teacher says of each sample's targets; None for a sample that another
        process reads. before_batch: called before each micro-batch."""
        values: list[TeacherValues | None] = [None] * len(samples)
        for order, batch in sample_batches(samples, layout, self.fabric.global_rank):
            before_batch()
            batch = batch.to(self.fabric.device)
            ids, log_probs = self.model(
                batch.tokens, **batch.inputs(), question=self.question
            )
            counts = [samples[index].supervised for index in order]
            on_host = log_probs.cpu()
            if not on_host.isfinite().all():
                raise ValueError(
                    f"--teacher {self.folder}: its logits are not all finite; look for NaN or "
                    "infinity in its weights and config.json, or name another teacher"
                )
            parts = zip(ids.cpu().split(counts), on_host.split(counts), strict=True)
            for index, part in zip(order, parts, strict=True):
                values[index] = TeacherValues(*part)
        return values


class TeacherFile:
    """A file with what a teacher says of samples, one after the other, each with the number of the
    sample and a hash.

    An entry that a crash has cut short, and all after one that is damaged, are computed again.
    """

    HEADER = np.dtype([("index", np.int64), ("hash", np.uint64)])

    def __init__(self, path: Path, counts: np.ndarray, top_k: int, vocab_size: int) -> None:
        # counts: the targets of each sample
        self.path = path
        self.counts = counts
        self.num_ids = min(top_k, vocab_size)
        self.num_log_probs = self.num_ids + (self.num_ids < vocab_size)
        # of each sample that the file has: where its entry begins
        self.offsets: dict[int, int] = {}

    def open(self, is_writer: bool) -> None:
        """Find the entries; the writer removes what follows the last whole one."""
        self.offsets = {}
        if not self.path.is_file():
            return
        end = 0
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while end + self.HEADER.itemsize <= size:
                file.seek(end)
                index, _ = self._header(file.read(self.HEADER.itemsize))
                if not 0 <= index < len(self.counts):
                    break
                following = end + self.HEADER.itemsize + self._size(index)
                if following > size:
                    break
                self.offsets[index] = end
                end = following
        if is_writer and end < size:
            os.truncate(self.path, end)

    def read(self, index: int) -> TeacherValues | None:
        """Return what the teacher says of a sample; None if the file does not have it.

        Raises OSError for an entry that has changed since it was written.
        """
        offset = self.offsets.get(index)
        if offset is None:
            return None
        with self.path.open("rb") as file:
            file.seek(offset)
            _, stored_hash = self._header(file.read(self.HEADER.itemsize))
            content = file.read(self._size(index))
        if self._hash(index, content) != stored_hash:
            raise OSError(
                f"{self.path} is damaged at byte {offset:,}: delete it, and the teacher reads the "
                "examples again"
            )
        count = int(self.counts[index])
        bytes_of_ids = 4 * count * self.num_ids
        ids = np.frombuffer(content[:bytes_of_ids], np.int32).reshape(count, self.num_ids)
        log_probs = np.frombuffer(content[bytes_of_ids:], np.float16)
        log_probs = log_probs.reshape(count, self.num_log_probs)
        # copies, since tensors of read-only memory are warned about
        return TeacherValues(
            torch.from_numpy(ids.copy()), torch.from_numpy(log_probs.copy())
        )

    def append(self, values: dict[int, TeacherValues]) -> None:
        """Add entries, by the number of the sample."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            for index, of_sample in values.items():
                content = b"".join(tensor.numpy().tobytes() for tensor in of_sample)
                header = np.array([(index, self._hash(index, content))], self.HEADER)
                file.write(header.tobytes() + content)

    def _header(self, content: bytes) -> tuple[int, int]:
        """Return the number of a sample, and the hash of its entry."""
        header = np.frombuffer(content, self.HEADER)[0]
        return int(header["index"]), int(header["hash"])

    def _size(self, index: int) -> int:
        """Return the bytes of a sample's entry: int32 tokens and fp16 log-probabilities."""
        return int(self.counts[index]) * (4 * self.num_ids + 2 * self.num_log_probs)

    def _hash(self, index: int, content: bytes) -> int:
        return xxh3_64_intdigest(content, seed=index)


class TeacherPass:
    """Reads the examples of a run with the teacher, and writes what it says into the run's folder.
    Every process takes part."""

    def __init__(
        self,
        processes: Processes,
        run: PlannedRun,
        folder: RunFolder,
        screen: Screen,
        val_indices: Sequence[int],
        mesh: DeviceMesh | None,
    ) -> None:
        # mesh: over which the teacher is sharded; None: each process holds all of it
        self.mesh = mesh
        self.fabric = processes.fabric
        self.cpu_group = processes.cpu_group
        self.run = run
        self.folder = folder
        self.screen = screen
        self.signals = Signals(notice="stopping after this micro-batch")
        self.layout = run.schedule.layout
        schedule = run.schedule
        data = schedule.data
        train_indices = schedule.distinct_indices()
        # by name: samples, and the indices that the run needs
        self.parts = {
            "train": (data.train, train_indices),
            "val": (data.val, list(val_indices)),
        }
        self.files: dict[str, TeacherFile] = {}
        # the network, where the steps need it, too
        self.teacher: Teacher | None = None

    def read_examples(self) -> None:
        """Let the teacher read the examples that the file does not have."""
        setup = self.run.setup
        args = setup.args.distill
        self.folder.begin()
        facts = self.folder.identity() | {
            "limit": self.run.schedule.data.limit,
            "files of the teacher": self._stamps(),
        }
        key = digest(facts)
        missing: dict[str, list[int]] = {}
        for name, (samples, indices) in self.parts.items():
            vocab_size = setup.method.vocab_size(setup.source.config)
            path = self.folder.folder / FOLDER / f"teacher-{name}-{key}.bin"
            file = TeacherFile(path, samples.supervised, args.top_k, vocab_size)
            self._open(file)
            self.files[name] = file
            missing[name] = [index for index in indices if index not in file.offsets]
            if indices:
                self.screen.say(
                    f"probabilities of the teacher for {len(indices):,} {name} examples: "
                    f"{len(indices) - len(missing[name]):,} read from {FOLDER}/, "
                    f"{len(missing[name]):,} to compute"
                )
        if not any(missing.values()) and not args.on_policy:
            return
        with self.screen.showing_activity(f"reading the weights of {setup.args.teacher}"):
            teacher = Teacher(self.fabric, self.run, self.mesh)
        with self.signals:
            for name, indices in missing.items():
                self._read(teacher, name, indices)
        if args.on_policy:
            self.teacher = teacher
        else:
            # a sharded network refers to itself, and would stay until the next collection
            del teacher
            gc.collect()

    def _stamps(self) -> list[tuple[str, int, int]]:
        """Return names, sizes and times of the teacher's weights: a teacher that was mended reads
        the examples again."""
        assert self.run.setup.teacher is not None  # there is no pass without one
        stamps = []
        for path in self.run.setup.teacher.weight_files:
            stat = path.stat()
            stamps.append((path.name, stat.st_size, stat.st_mtime_ns))
        return stamps

    @property
    def readers(self) -> dict[str, TeacherReader]:
        """What the teacher says of the samples of each part, by their numbers."""
        return {name: file.read for name, file in self.files.items()}

    def _open(self, file: TeacherFile) -> None:
        """Find the entries of a file; the first process alone changes it."""
        if self.fabric.global_rank == 0:
            file.open(is_writer=True)
        self.fabric.barrier()
        file.open(is_writer=False)

    def _read(self, teacher: Teacher, name: str, indices: list[int]) -> None:
        """Read samples block by block: an interrupted run loses one block at most."""
        file = self.files[name]
        samples, _ = self.parts[name]
        size = SAMPLES_AT_ONCE * self.fabric.world_size
        with closing(progress_bar(len(indices), "teacher", name, self.fabric)) as bar:
            for start in range(0, len(indices), size):
                block = indices[start : start + size]
                own = self._judge(teacher, [samples[index] for index in block])
                values = self.cpu_group.gather_parts(own)
                if self.fabric.global_rank == 0:
                    file.append(dict(zip(block, values, strict=True)))
                bar.update(len(block))
        self.fabric.barrier()
        file.open(is_writer=False)
        if len(file.offsets) < len(indices):
            raise OSError(
                f"{file.path}: this process does not see what the first one has written; put "
                "--out_dir on a file system that all nodes share"
            )

    def _judge(self, teacher: Teacher, samples: list[Sample]) -> list[TeacherValues | None]:
        """Return what the teacher says of the samples of this process; after an out-of-memory error
        in smaller micro-batches."""
        while True:
            try:
                return teacher.judge(samples, self.layout, self._check_signals)
            except RuntimeError as error:
                # with several processes the others would wait in a collective
                if self.fabric.world_size > 1 or not is_out_of_memory(error):
                    raise
                reason = str(error)
            longest = max(sample.tokens.numel() for sample in samples)
            layout = self.layout.halved(longest)
            if layout is None:
                raise RankError(
                    f"the teacher does not fit into memory ({reason}); quantize it "
                    "(--distill.quantize nf4), or shorten the examples (--data.max_seq_length)"
                )
            self.layout = layout

    def _check_signals(self) -> None:
        """Raise Interrupted on every process if one has caught a signal."""
        (caught,) = self.cpu_group.all_reduce_max(self.signals.caught)
        if caught:
            command = run_dir.command(
                f"finetune/{method_name(type(self.run.setup.args))}.py"
            )
            resume = f"{command} --resume --out_dir {self.folder.folder}"
            raise Interrupted(int(caught), 0, resume)
