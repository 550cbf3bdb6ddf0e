"""How alike texts are: MinHash signatures (Broder, 1997, by datasketch), and pairs of nearly equal
texts, found by locality-sensitive hashing (Leskovec, Rajaraman and Ullman, 2014, chapter 3).

Similarity is Jaccard's: of two texts' sets of three words in a row, the share that both have.
"""

import re
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh32_intdigest

if TYPE_CHECKING:
    from datasketch import MinHash

# two texts are nearly equal from this similarity on
NEAR = 0.8
NUM_HASHES = 128
# A pair is compared if all hashes of one of the bands are equal. With 21 bands of 6 hashes, that
# is so for 99.8 % of the pairs with a similarity of 0.8, and for 28 % of those with 0.5.
BANDS = 21
HASHES_PER_BAND = 6
WORDS_IN_A_ROW = 3
# Words; in scripts without spaces (Thai to Khmer, Chinese, Japanese, Korean), characters.
WORD = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+"
)
SHINGLES_AT_ONCE = 10_000
MOST_WORDS = 100_000  # of a text that are compared
PAIRS_AT_ONCE = 100_000


def contains_word(text: str) -> bool:
    """Return whether a text has a word: symbols and emoji are none."""
    return WORD.search(text) is not None


def text_signature(text: str, salt: str = "") -> np.ndarray:
    """Return the MinHash signature of a text, (128,) uint32. Texts that differ only in case, spaces
    and punctuation have the same one; so have those that begin with the same 100,000 words.
    Texts with different salts have nothing in common."""
    minhash = _empty_minhash().copy()
    matches = islice(WORD.finditer(text.lower()), MOST_WORDS)
    words = [match.group() for match in matches]
    shingles = []
    for start in range(max(1, len(words) - WORDS_IN_A_ROW + 1)):
        shingle = salt + " ".join(words[start : start + WORDS_IN_A_ROW])
        shingles.append(shingle.encode("utf-8", "surrogatepass"))
    if words:
        # each of them takes 128 values for a moment
        for start in range(0, len(shingles), SHINGLES_AT_ONCE):
            minhash.update_batch(shingles[start : start + SHINGLES_AT_ONCE])
    return minhash.hashvalues.astype(np.uint32)


def has_words(signatures: np.ndarray) -> np.ndarray:
    """Return which of the signatures (N, 128) are of texts with a word, (N,) bool."""
    return (signatures != _empty_minhash().hashvalues.astype(np.uint32)).any(axis=1)


@cache
def _empty_minhash() -> "MinHash":
    # imported here because it takes half a second
    from datasketch import MinHash

    return MinHash(NUM_HASHES, hashfunc=xxh32_intdigest)


def similarity(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Estimate the similarity of texts by their signatures, (..., 128) each; the standard error is
    at most 0.045."""
    return (first == second).mean(axis=-1)


def near_pairs(signatures: np.ndarray) -> np.ndarray:
    """Return pairs (earlier, later) of nearly equal texts, (M, 2) int64, by their signatures
    (N, 128).

    Of many texts that are all alike, each is paired with the first ones only, so the number of
    pairs grows with that of the texts. Texts without words have no pair.
    """
    numbers = np.flatnonzero(has_words(signatures))
    found = [np.zeros((0, 2), np.int64)]
    for band in range(BANDS):
        first = band * HASHES_PER_BAND
        keys = signatures[numbers, first : first + HASHES_PER_BAND]
        found.append(_pairs_with_equal_keys(keys, numbers))
    candidates = np.unique(np.concatenate(found), axis=0)
    is_near = np.zeros(len(candidates), bool)
    for start in range(0, len(candidates), PAIRS_AT_ONCE):
        block = slice(start, start + PAIRS_AT_ONCE)
        earlier, later = candidates[block].T
        is_near[block] = similarity(signatures[earlier], signatures[later]) >= NEAR
    return candidates[is_near]


def _pairs_with_equal_keys(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return pairs (first, later) of numbers whose keys are equal, (M, 2).

    keys: (N, K) uint32; numbers: (N,), ascending.
    """
    size = keys.shape[1] * keys.itemsize
    # numpy sorts the bytes of a key as one value
    as_bytes = np.ascontiguousarray(keys).view(np.dtype((np.void, size))).ravel()
    earlier = numbers[first_equal(as_bytes)]
    is_pair = earlier != numbers
    return np.stack((earlier[is_pair], numbers[is_pair]), axis=1)


def first_of_group(signatures: np.ndarray) -> np.ndarray:
    """Return for each text the number of the first one of its group, (N,) int64; nearly equal texts
    are in one group, and so are those of other texts that are nearly equal to them."""
    # imported here because it takes half a second
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(signatures)
    earlier, later = near_pairs(signatures).T
    graph = coo_array((np.ones(len(earlier), bool), (earlier, later)), shape=(count, count))
    _, groups = connected_components(graph, directed=False)
    return first_equal(groups)


def first_equal(values: np.ndarray) -> np.ndarray:
    """Return for each value the index of the first one that equals it, (N,) int64."""
    _, first, group = np.unique(values, return_index=True, return_inverse=True)
    return first[group]
