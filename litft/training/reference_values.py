"""Log-probabilities that the model before the first step gives to the answers of examples: how they
are computed, and the file in the run's folder that keeps them.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lightning_fabric import Fabric
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.distributed.process_group import sum_over_processes
from litft.evaluation.log_probs import document_log_probs
from litft.model.transformer import GPT

FOLDER = "reference"  # within the run's folder
# samples of a process that are laid out at once, and written together
SAMPLES_AT_ONCE = 64


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
        # the next row would be appended to half a row
        if self.path.is_file():
            with self.path.open("r+b") as file:
                file.truncate(self._num_complete() * self.row.itemsize)
        # none is expected: the file's name has a hash of all that the values depend on
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
