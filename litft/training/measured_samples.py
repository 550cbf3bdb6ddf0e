"""Which validation samples are measured: of each set the same ones every time."""

from collections.abc import Sequence

from litft.args import EvalArgs
from litft.data.dataset import DataSplits
from litft.evaluation.scoring import evenly_spaced


def measured_indices(
    data: DataSplits, args: EvalArgs, batch_size: int
) -> dict[str, Sequence[int]]:
    """Return the indices of the samples that a validation measures, by set; "" if there is one
    only.

    Of each set these are at most --eval.max_batches batches of `batch_size`, evenly spaced.
    """
    sets: dict[str, Sequence[int]] = {}
    for name, numbers in data.val_sets.items():
        sets[name] = numbers.tolist()
    if not sets:
        sets[""] = range(len(data.val))
    limit = (args.max_batches or len(data.val)) * batch_size
    return {name: evenly_spaced(indices, limit) for name, indices in sets.items()}


def all_measured(data: DataSplits, args: EvalArgs, batch_size: int) -> list[int]:
    """Return the indices of the samples that a validation measures, of all sets together."""
    measured: set[int] = set()
    for indices in measured_indices(data, args, batch_size).values():
        measured.update(indices)
    return sorted(measured)
