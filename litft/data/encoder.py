"""Records to samples: rendered, tokenized, masked, and cut to length, with a word on whatever was lost on the way."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from litft.data.chat_template import Message, assistant_turns
from litft.data.formats import Example, Record, detect_format, rename_columns, to_example, without_end
from litft.data.tokenizer import Tokenizer, common_prefix_length
from litft.model.loss import IGNORED


@dataclass(frozen=True)
class Sample:
    """One example, shifted: `targets[t]` is the token after `tokens[t]`, or IGNORED. Both (T,), int64."""

    tokens: Tensor
    targets: Tensor
    answer: tuple[Tensor, Tensor] | None = None  # the tokens before its last whole answer, and the answer's own

    @cached_property
    def supervised(self) -> int:
        """How many tokens the loss counts."""
        return int((self.targets != IGNORED).sum())


# what happens to examples on the way, and how it is told
CUT = "cut to the length limit"
CUT_AWAY = "skipped: no part of an answer lies within the length limit"
MASKED = "skipped: every turn is masked"
EMPTY = "skipped: the answer is empty"
BLANK = "skipped: no text"
EMPTY_TURN = "with an empty answer, which is not learned"
UNANSWERED = "ended by a turn without an answer, which is left out"
CONTROL = "with the text of a control token inside, which is read as that token"
WITHOUT = "without the field"
END_TEXT = "with an end token written behind an answer, which is left out"


SPAN = 2048  # characters of a text file that go into the same split


# a sample is kept as its token ids (T + 1,), uint32, whose highest bits say what a token is
LEARNED, SAID = np.uint32(1 << 31), np.uint32(1 << 30)  # the loss counts it; it belongs to a whole answer
IDS = np.uint32((1 << 30) - 1)


@dataclass
class Encoded:
    """What became of a record: its samples, or what is wrong."""

    where: str
    form: str = ""
    samples: list[np.ndarray] = field(default_factory=list)
    units: list[int] = field(default_factory=list)  # of each sample: the hash by which it falls into a split
    turns: list[int] = field(default_factory=list)  # of each sample: see Samples.names
    text: bool = False  # the samples are a text's spans, one behind the other
    notes: list[str] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)  # the tokens that close its answers
    error: str | None = None


@dataclass(frozen=True)
class Encoder:
    """Turns a record into samples; what it does hangs on nothing but these values. Imports no torch of its own."""

    tokenizer: Tokenizer
    limit: int  # tokens of a sample that are fed to the network
    form: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    mask_prompt: bool = True
    last_only: bool = False

    @cached_property
    def digest(self) -> str:
        """Which encoder this is: records that are equal become equal samples where it is."""
        policy = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "tokenizer"}
        return hashlib.sha256((self.tokenizer.digest() + json.dumps(policy, sort_keys=True)).encode()).hexdigest()

    def __call__(self, where: str, record: Record | ValueError) -> Encoded:
        """Never raises for what is wrong with a record: that is in the result."""
        encoded = Encoded(where)
        try:
            if isinstance(record, ValueError):
                raise record
            missing = (theirs for theirs in self.columns.values() if theirs not in record)
            encoded.notes += [f"{WITHOUT} {theirs}" for theirs in missing]
            record = rename_columns(record, self.columns)
            form = self.form or detect_format(record, where)
            example = to_example(record, where, self.tokenizer.chat_template, form)
            encoded.form = "guanaco" if form == "text" and example.text is None else form
            self._encode(example, encoded)
            if not encoded.text:  # without a template's way of joining an instruction and its input
                encoded.units = [unit_of(to_example(record, where, "", form))] * len(encoded.samples)
        except ValueError as error:
            message = str(error)
            encoded.error = message if message.startswith(where) else f"{where}: {message}"
            encoded.samples, encoded.units, encoded.turns = [], [], []
        return encoded

    def _encode(self, example: Example, encoded: Encoded) -> None:
        if example.text is not None:
            self._note_controls([example.text], encoded)
            encoded.text = True
            for span, ids in self._spans(example):
                encoded.units.append(hashed(span))
                encoded.turns.append(0)
                encoded.samples.append(np.array(ids, np.uint32) | LEARNED)
            if not encoded.samples:
                encoded.notes.append(BLANK)
            return
        messages, learned = self._chosen(example, encoded)
        self._note_controls([message["content"] for message in messages], encoded)
        cut, before = False, []
        for ids, spans in self._texts(messages, example.tools):
            sample, whole, begun = np.array(ids, np.uint32), -1, False
            for turn, start, end in spans:
                sample[start:end] |= LEARNED if turn in learned else np.uint32(0)
                if end <= self.limit + 1:
                    whole = turn
                    sample[start:end] |= SAID
                elif start <= self.limit:
                    begun = turn in learned
            if not self.mask_prompt:  # of several texts each goes on from the one before, which is learned already
                sample[common_prefix_length(ids, before) :] |= LEARNED
            before = ids
            if len(ids) > self.limit + 1:
                cut, sample = True, sample[: self.limit + 1]
            elif learned:
                encoded.ends.add(ids[spans[-1][2] - 1])
            if (sample[1:] & LEARNED).any():
                encoded.samples.append(sample)
                encoded.turns.append(2 * whole + begun)
        if cut and encoded.samples:
            encoded.notes.append(CUT)
        elif not encoded.samples and EMPTY not in encoded.notes:
            encoded.notes.append(CUT_AWAY if learned else MASKED)

    def _note_controls(self, texts: list[str], encoded: Encoded) -> None:
        if self.tokenizer.control_text and any(map(self.tokenizer.control_text.search, texts)):
            encoded.notes.append(CONTROL)

    def _spans(self, example: Example) -> Iterator[tuple[str, list[int]]]:
        """A text and its tokens, divided every SPAN characters if it is to be divided; independent of the length limit."""
        text = example.text
        if not text.strip():
            return
        cuts = [*range(SPAN, len(text), SPAN)] if example.divided else []
        ids, places = self.tokenizer.encode_to(text, cuts)
        opening = self.tokenizer.encode("") if example.begins else []
        front = 0 if ids[: len(opening)] == opening else len(opening)
        if example.ends and ids[-1:] and ids[-1] not in self.tokenizer.stop_ids:
            ids.append(self.tokenizer.eos_id if self.tokenizer.eos_id is not None else self.tokenizer.stop_ids[-1])
        ids = opening[:front] + ids  # a BOS and an end token, unless the text brings its own
        if len(ids) < 2:
            return
        bounds = [0, *(front + place for place in places), len(ids)]
        for number, (start, end) in enumerate(pairwise(bounds)):
            if end > start:
                yield text[number * SPAN : (number + 1) * SPAN] if cuts else text, ids[start:end]

    def _chosen(self, example: Example, encoded: Encoded) -> tuple[list[Message], set[int]]:
        """The messages up to the last answer, and which of them are learned; ValueError where there is no answer."""
        turns = [n for n, message in enumerate(example.messages) if message["role"] == "assistant"]
        if not turns:
            last = example.messages[-1]["role"]
            raise ValueError(f"the last message is the {last}'s, and none the assistant's; there is no answer to learn")
        if turns[-1] + 1 < len(example.messages):
            encoded.notes.append(UNANSWERED)
        messages, template = [], self.tokenizer.chat_template
        for message in example.messages[: turns[-1] + 1]:
            clean = {name: value for name, value in message.items() if name != "train"}
            if message["role"] == "developer" and "developer" not in template:
                clean["role"] = "system"  # OpenAI's newer name of it
            if message["role"] == "assistant" and (bare := without_end(message["content"])) != message["content"]:
                encoded.notes += [END_TEXT] * (END_TEXT not in encoded.notes)
                clean["content"] = bare
            messages.append(clean)
        empty = {n for n in turns if not messages[n]["content"].strip() and not messages[n].get("tool_calls")}
        learned = {n for n in (turns[-1:] if self.last_only else turns) if example.messages[n].get("train", True)}
        if self.mask_prompt and learned & empty:
            encoded.notes.append(EMPTY_TURN if learned - empty else EMPTY)
        return messages, learned - empty

    def _texts(self, messages: list[Message], tools: list | None) -> Iterator[tuple[list[int], list[tuple[int, int, int]]]]:
        """Token ids with the spans of the assistant's turns in them, each (message, start, end)."""
        for text, turns in assistant_turns(
            self.tokenizer.apply_chat_template, messages, tools, self.tokenizer.special_texts
        ):
            ids, places = self.tokenizer.encode_to(text, [at for turn in turns for at in (turn.start, turn.end)])
            if not ids:
                raise ValueError("the chat template renders nothing; pass another --data.template")
            spans = [(turn.message, *places[2 * n : 2 * n + 2]) for n, turn in enumerate(turns)]
            index, start, end = spans[-1]
            if ids[end - 1] not in self.tokenizer.special_ids:  # the template leaves the answer open: end it ourselves
                ids = [*self.tokenizer.encode(turns[-1].text[: turns[-1].end], bos=False), self.tokenizer.stop_ids[-1]]
                spans[-1] = (index, start, len(ids))
            yield ids, spans


def unit_of(example: Example) -> int:
    """The hash of a conversation, whichever of its turns are learned."""
    messages = [{name: value for name, value in message.items() if name != "train"} for message in example.messages]
    return hashed(json.dumps([messages, example.tools], sort_keys=True))


def hashed(data: str | bytes) -> int:
    """A 64-bit hash of a text or of bytes."""
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def to_sample(kept: np.ndarray) -> Sample:
    """What is kept of a sample, shifted."""
    ids = torch.from_numpy((kept & IDS).astype(np.int64))
    learned = torch.from_numpy((kept & LEARNED) > 0)
    said = np.flatnonzero(np.diff((kept & SAID) > 0, prepend=False, append=False))  # where answers begin and end
    answer = (ids[: said[-2]], ids[said[-2] : said[-1]]) if len(said) else None
    return Sample(ids[:-1], torch.where(learned, ids, IGNORED)[1:], answer)
