"""Which records of the training files are learned: without copies, and without those that are held
out for validation."""

import numpy as np

from litft.data.similarity import copied_texts, first_equal
from litft.data.token_store import NO_ROW, TokenStore

# a store with some of its entries, in ascending order
Part = tuple[TokenStore, np.ndarray]


def distinct_entries(stores: list[TokenStore], dedup: str) -> list[Part]:
    """Return each store with its entries, without those that --data.dedup leaves out.

    exact: of records with equal content, in any of the stores, the first one stays. near: of those
    that are nearly equal, too.
    """
    if dedup == "none":
        return [(store, np.arange(len(store.units))) for store in stores]
    sizes = [len(store.contents) for store in stores]
    # a record that gave no example is no copy's original
    rows = np.flatnonzero(np.concatenate([_has_entry(store) for store in stores]))
    numbers = np.arange(len(rows))
    contents = np.concatenate([store.contents for store in stores])[rows]
    is_first = first_equal(contents) == numbers
    if dedup == "near":
        signatures = np.concatenate([store.signatures[:, 0] for store in stores])[rows]
        is_first &= copied_texts(signatures) == numbers
    is_kept = np.zeros(sum(sizes), bool)
    is_kept[rows] = is_first

    parts = []
    ends = np.cumsum(sizes)
    kept_by_store = np.split(is_kept, ends[:-1])
    for store, kept in zip(stores, kept_by_store, strict=True):
        # entries without a row have the last value: they are not compared, and stay
        entry_is_kept = np.append(kept, True)[store.rows]
        parts.append((store, np.flatnonzero(entry_is_kept)))
    return parts


def _has_entry(store: TokenStore) -> np.ndarray:
    """Return for each row of a store, (R,), whether one of its entries has it."""
    has_entry = np.zeros(len(store.contents), bool)
    has_entry[store.rows[store.rows != NO_ROW]] = True
    return has_entry


def split(
    parts: list[Part], fraction: float, seed: int
) -> list[tuple[TokenStore, np.ndarray, np.ndarray]]:
    """Return (store, training entries, validation entries) for each store with its entries; about
    `fraction` of the units are held out.

    The side of an entry depends only on its own content and the seed, not on the rest of the file
    or how it is encoded. Of two or more units at least one is held out (the lowest score) if
    `fraction` is not 0, and at least one is kept (the highest score).
    """
    scores = [_scores(store.units[entries], seed) for store, entries in parts]
    # thresholds between the lowest and the highest score keep both sides from being empty
    sorted_scores = np.sort(np.concatenate(scores))
    threshold = 0.0
    # above the lowest, and not above the highest
    if fraction and len(sorted_scores):
        threshold = min(
            max(fraction, np.nextafter(sorted_scores[0], 1.0)), sorted_scores[-1]
        )
    divided = []
    for (store, entries), of_store in zip(parts, scores, strict=True):
        is_held_out = of_store < threshold
        divided.append((store, entries[~is_held_out], entries[is_held_out]))
    return divided


def _scores(units: np.ndarray, seed: int) -> np.ndarray:
    """Map the hash of each unit to a number in [0, 1), by the finalizer of SplitMix64 (Steele et
    al., OOPSLA 2014)."""
    # SplitMix64's state, `seed` steps after the unit:
    # its increment is 2^64 divided by the golden ratio
    x = units + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) / 2.0**64
