"""A sample, the unit of training: its tokens and targets, and how they are stored."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from litft.data.chat_template import Message
from litft.model.loss import IGNORED

# a sample is stored as token ids (T + 1,), uint32, whose two highest bits are flags:
# the token is a target
SUPERVISED = np.uint32(1 << 31)
# the token is in a complete answer
IN_ANSWER = np.uint32(1 << 30)
ID_MASK = np.uint32((1 << 30) - 1)


class PromptRecord(NamedTuple):
    """What reward functions get of a prompt."""

    messages: list[Message]
    # by name: `answer`, and the record's other fields
    columns: dict[str, Any]


class TeacherValues(NamedTuple):
    """What a teacher says of a sample's N targets, see `litft.model.distillation`."""

    ids: Tensor  # (N, K) int32: its likeliest tokens
    log_probs: Tensor  # (N, K + 1) fp16: of them, and of all others together


@dataclass(frozen=True)
class Sample:
    """Inputs and targets of one example, both (T,) int64: `targets[t]` is the token after
    `tokens[t]`, or IGNORED.

    A pair of answers is one sample with two documents, the chosen answer and the rejected one, each
    with its prompt.
    """

    tokens: Tensor
    targets: Tensor
    # (prompt, answer): the last complete answer and the tokens before it
    answer: tuple[Tensor, Tensor] | None = None
    # the length of each document; empty: there is one
    documents: tuple[int, ...] = ()
    desirable: bool | None = None  # the label of an answer; None: no label
    # of each document: its targets' summed log-probability in the reference model
    reference: tuple[float, ...] = ()
    # the prompt with the answer of another example, for KTO
    mismatch: "Sample | None" = None
    # of a prompt, or of a completion of it
    prompt: PromptRecord | None = None
    # of a completion: how much better than others it was rated
    advantage: float | None = None
    # of a completion, for each target (N,), fp32: the log-probability that the decoder saw, that
    # before the step's updates, and that in the reference model
    decoded: Tensor | None = None
    old: Tensor | None = None
    reference_tokens: Tensor | None = None
    # of a completion: the tokens at its beginning that other completions of its prompt have, too
    shared_tokens: int = 0
    teacher: TeacherValues | None = None
    is_own: bool = (
        False  # the student that learns from the teacher has written the answer itself
    )

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """The number of tokens of each document."""
        return self.documents or (self.tokens.numel(),)

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of a prompt, without the room for its completion, which is its answer."""
        assert self.answer is not None
        return self.answer[0].tolist()

    @property
    def is_preference(self) -> bool:
        """Whether it is a pair, or an answer with a label."""
        return bool(self.documents) or self.desirable is not None

    @cached_property
    def supervised(self) -> int:
        """The number of target tokens."""
        return int((self.targets != IGNORED).sum())

    def split(self) -> "list[Sample]":
        """Return each document as a sample of its own."""
        lengths = list(self.document_lengths)
        parts = zip(self.tokens.split(lengths), self.targets.split(lengths), strict=True)
        return [Sample(tokens, targets) for tokens, targets in parts]


def to_sample(
    stored: np.ndarray, first_size: int = 0, desirable: bool | None = None
) -> Sample:
    """Convert stored token ids with flags to a sample: one document (T + 1,) uint32, or two, the
    first with `first_size`."""
    if first_size:
        documents = [stored[:first_size], stored[first_size:]]
    else:
        documents = [stored]
    tokens = []
    targets = []
    for document in documents:
        ids = torch.from_numpy((document & ID_MASK).astype(np.int64))
        supervised = torch.from_numpy((document & SUPERVISED) > 0)
        tokens.append(ids)
        targets.append(torch.where(supervised, ids, IGNORED)[1:])
    # the answer that is generated to compare: of a
    # pair, the chosen one; of a conversation, the last
    in_answer = (documents[0] & IN_ANSWER) > 0
    # start, end of each answer
    bounds = np.flatnonzero(np.diff(in_answer, prepend=False, append=False))
    if len(bounds):
        answer = (tokens[0][: bounds[-2]], tokens[0][bounds[-2] : bounds[-1]])
    else:
        answer = None
    inputs = [ids[:-1] for ids in tokens]
    if not first_size:
        return Sample(inputs[0], targets[0], answer, desirable=desirable)
    return Sample(torch.cat(inputs), torch.cat(targets), answer, tuple(map(len, inputs)))
