"""How alike texts are: MinHash signatures (Broder, 1997, by datasketch), and nearly equal texts,
found by locality-sensitive hashing (Leskovec, Rajaraman and Ullman, 2014, chapter 3).

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
# Two texts are compared if all hashes of one of the bands are equal. With 21 bands of 6 hashes,
# that is so for 99.8 % of the pairs with a similarity of 0.8, and for 28 % of those with 0.5.
BANDS = 21
HASHES_PER_BAND = 6
WORDS_IN_A_ROW = 3
# Words; in scripts without spaces (Thai to Khmer, Chinese, Japanese, Korean), characters.
WORD = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+"
)
# words of an answer that may be a label
LONGEST_LABEL = 5
SHINGLES_AT_ONCE = 10_000
MOST_WORDS = 100_000  # of a text that are compared
MOST_IN_BUCKET = 16
NO_BUCKET = -1


def contains_word(text: str) -> bool:
    """Return whether a text has a word: symbols and emoji are none."""
    return WORD.search(text) is not None


def words_of_label(text: str) -> str | None:
    """Return the words of a text that may be a label, without case and punctuation; None for a
    longer one."""
    matches = islice(WORD.finditer(text.lower()), LONGEST_LABEL + 1)
    words = [match.group() for match in matches]
    if len(words) > LONGEST_LABEL:
        return None
    return " ".join(words)


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


class NearTexts:
    """Finds texts that are nearly equal, by the signatures (N, 128) of all of them.

    Texts are compared with those that were added. Of many that are alike without being nearly
    equal, only the first MOST_IN_BUCKET of a bucket are compared. Texts without words have no
    equal.
    """

    def __init__(self, signatures: np.ndarray) -> None:
        self.signatures = signatures
        self.buckets = _shared_buckets(signatures)
        self.added: dict[int, list[int]] = {}  # by bucket

    def alone(self) -> np.ndarray:
        """Return which texts share no bucket with another one, (N,) bool."""
        return (self.buckets == NO_BUCKET).all(axis=1)

    def add(self, number: int) -> None:
        """Let later texts be compared with this one."""
        for bucket in self._buckets_of(number):
            in_bucket = self.added.setdefault(bucket, [])
            if len(in_bucket) < MOST_IN_BUCKET:
                in_bucket.append(number)

    def find(self, number: int) -> int | None:
        """Return the first text that was added and is nearly equal to this one; None
        if there is none."""
        found = set()
        for bucket in self._buckets_of(number):
            found.update(self.added.get(bucket, ()))
        candidates = sorted(found)
        if not candidates:
            return None
        is_near = similarity(self.signatures[candidates], self.signatures[number]) >= NEAR
        if not is_near.any():
            return None
        return candidates[int(is_near.argmax())]

    def _buckets_of(self, number: int) -> list[int]:
        buckets = self.buckets[number]
        return buckets[buckets != NO_BUCKET].tolist()


def _shared_buckets(signatures: np.ndarray) -> np.ndarray:
    """Return the bucket of each text in each band, (N, BANDS) int64: the texts of a bucket have
    equal hashes there. NO_BUCKET: no other text has them, or the text has no words."""
    buckets = np.full((len(signatures), BANDS), NO_BUCKET)
    numbers = np.flatnonzero(has_words(signatures))
    for band in range(BANDS):
        keys = _band_keys(signatures[numbers], band)
        _, groups, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        is_shared = sizes[groups] > 1
        # each band has numbers of its own
        buckets[numbers[is_shared], band] = groups[is_shared] * BANDS + band
    return buckets


def _band_keys(signatures: np.ndarray, band: int) -> np.ndarray:
    """Return the hashes of a band as one value for each of the signatures (N, 128), (N,)."""
    first = band * HASHES_PER_BAND
    hashes = np.ascontiguousarray(signatures[:, first : first + HASHES_PER_BAND])
    # numpy sorts the bytes of the hashes as one value
    key_type = np.dtype((np.void, HASHES_PER_BAND * hashes.itemsize))
    return hashes.view(key_type).ravel()


def copied_texts(signatures: np.ndarray) -> np.ndarray:
    """Return for each text the number of the text that it nearly equals, (N,) int64, or its own.

    A text that copies another one is no original: texts that are nearly equal to it, but not to
    the one that it copies, stay.
    """
    copied = np.arange(len(signatures))
    texts = NearTexts(signatures)
    for number in np.flatnonzero(~texts.alone()).tolist():
        original = texts.find(number)
        if original is None:
            texts.add(number)
        else:
            copied[number] = original
    return copied


def count_near(known: np.ndarray, others: np.ndarray) -> int:
    """Return how many of the other texts nearly equal a known one, by their signatures (N, 128)
    and (M, 128)."""
    texts = NearTexts(np.concatenate((known, others)))
    count = 0
    for number in np.flatnonzero(~texts.alone()).tolist():
        if number < len(known):
            texts.add(number)
        elif texts.find(number) is not None:
            count += 1
    return count


def first_equal(values: np.ndarray) -> np.ndarray:
    """Return for each value the index of the first one that equals it, (N,) int64."""
    _, first, group = np.unique(values, return_index=True, return_inverse=True)
    return first[group]
