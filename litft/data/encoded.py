"""What becomes of a record: its samples, or its error."""

import hashlib
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Encoded:
    """The samples of a record, or the error."""

    where: str
    form: str = ""
    samples: list[np.ndarray] = field(default_factory=list)
    # of each sample: the hash that decides its split
    units: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # of each sample: see Samples.names
    # of each pair: the number of tokens of the chosen answer
    first_sizes: list[int] = field(default_factory=list)
    labels: list[bool] = field(default_factory=list)  # of each answer with a label
    # the samples are the consecutive spans of a text
    text: bool = False
    notes: list[str] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)  # the tokens that end its answers
    # the system prompt of its conversation; empty without one, None for a text
    system: str | None = None
    has_tools: bool = False  # whether its prompt lists functions to call
    # of a record of token ids whose last token is learned
    last_token: int | None = None
    answers: int = 0  # answers that are learned
    # those with an empty thought of the template, which is not learned
    empty_thoughts: int = 0
    unused: list[str] = field(default_factory=list)  # fields with a value that nothing reads
    error: str | None = None


def hash64(data: str | bytes) -> int:
    """Return a 64-bit hash of text or bytes."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
