"""What becomes of a record: its samples, or its error; and the hash that decides its split."""

import hashlib
import json
from dataclasses import dataclass, field

import numpy as np

from litft.data.chat_template import Message
from litft.data.formats import Example
from litft.data.messages import LEARNED_ENTRIES
from litft.data.notes import CONTROL
from litft.data.tokenizer import Tokenizer


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
    # of each prompt: what reward functions get, see `prompts.PromptExample`
    columns: list[bytes] = field(default_factory=list)
    error: str | None = None

    def describe(self, messages: list[Message], tools: list | None) -> None:
        """Take note of a conversation's system prompt and of whether it has tools."""
        self.system = ""
        if messages[0]["role"] in ("system", "developer"):
            self.system = messages[0]["content"]
        self.has_tools = bool(tools)

    def note_controls(self, texts: list[str], tokenizer: Tokenizer) -> None:
        """Note that one of the texts contains that of a control token."""
        if tokenizer.control_text and any(map(tokenizer.control_text.search, texts)):
            self.notes.append(CONTROL)


def hash64(data: str | bytes) -> int:
    """Return a 64-bit hash of text or bytes."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def without_learned(message: Message) -> Message:
    """Return a message without the entries that say what is learned of it."""
    return {name: value for name, value in message.items() if name not in LEARNED_ENTRIES}


def unit_hash(example: Example) -> int:
    """Return the hash of a conversation, independent of which turns are supervised."""
    if example.token_ids is not None:
        return hash64(json.dumps(example.token_ids))
    # a record stays on its side of the split if only its mask changes
    messages = [without_learned(message) for message in example.messages]
    return hash64(json.dumps([messages, example.tools], sort_keys=True))
