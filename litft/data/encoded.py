"""What becomes of a record: its samples, or its error; and the hash that decides its split."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from litft.data.chat_template import Message, mentions_variable
from litft.data.digests import hash64
from litft.data.formats import TEMPLATE_ARGS, Example
from litft.data.messages import LEARNED_ENTRIES, SYSTEM_ROLES
from litft.data.notes import CONTROL, RESULTS_LOST, SYSTEM_LOST, TOOLS_LOST
from litft.data.preferences import Preference
from litft.data.reasoning import REASONING_FIELDS
from litft.data.record_facts import (
    ComparedConversation,
    RecordFacts,
    text_facts,
    text_signatures,
)
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
    # fields with a value that nothing reads
    unused: list[str] = field(default_factory=list)
    # of each prompt: what reward functions get, see `prompts.PromptExample`
    columns: list[bytes] = field(default_factory=list)
    # tokens of answers that are learned, and how many of them the length limit cuts away
    answer_tokens: int = 0
    lost_tokens: int = 0
    # what is compared with other records, see `review`; None: nothing
    facts: RecordFacts | None = None
    signatures: np.ndarray | None = None  # (2, 128) uint32
    error: str | None = None

    def compare(self, conversation: ComparedConversation) -> None:
        """Let a conversation be compared with those of other records."""
        self.facts = conversation.facts()
        self.signatures = conversation.signatures()

    def compare_example(
        self, example: Example, messages: list[Message], learned: set[int]
    ) -> None:
        """Let an example be compared with others; messages: as they are learned."""
        mask = [(turn.get("train", True), turn.get("parts")) for turn in example.messages]
        setting = [example.tools, example.template_args]
        self.compare(ComparedConversation(messages, learned, setting=setting, rest=mask))

    def compare_preferences(self, preferences: Sequence[Preference]) -> None:
        """Let the preferences of a record be compared with others: the conversation with each of
        the answers, and their labels."""
        answers = []
        for preference in preferences:
            answers.extend(preference.answers)
        messages = [without_learned(message) for message in answers[0].messages]
        # with their calls and thoughts, and the earlier turns of each
        others = []
        for other in answers[1:]:
            others.append([without_learned(message) for message in other.messages])
        self.compare(
            ComparedConversation(
                messages,
                learned={len(messages) - 1},
                others=others,
                setting=[answers[0].tools, answers[0].template_args],
                label=[preference.desirable for preference in preferences],
            )
        )

    def compare_prompt(
        self, whole: Example, prompt_size: int, columns: dict[str, Any]
    ) -> None:
        """Let a prompt be compared with others, which have the same columns if they are equal, and
        the same expected answer if they are nearly so. whole: with the answer, if it has one."""
        messages = [without_learned(message) for message in whole.messages]
        self.compare(
            ComparedConversation(
                messages,
                learned=range(prompt_size, len(messages)),
                setting=[whole.tools, whole.template_args],
                rest=columns,
                label=columns.get("answer"),
            )
        )

    def count_tokens(self, answer: int, lost: int) -> None:
        """Count the tokens of an answer, and those that the length limit cuts away."""
        self.answer_tokens += answer
        self.lost_tokens += lost

    def compare_token_ids(self, ids: list[int], supervised: list[bool]) -> None:
        """Let token ids be compared with others: they are equal, or not alike at all."""
        self.facts = text_facts(json.dumps([ids, supervised]))
        self.signatures = text_signatures("")

    def compare_text(self, text: str) -> None:
        """Let a text be compared with others."""
        self.facts = text_facts(text)
        self.signatures = text_signatures(text)

    def describe(self, messages: list[Message], tools: list | None) -> None:
        """Take note of a conversation's system prompt and of whether it has tools."""
        self.system = ""
        if messages[0]["role"] in SYSTEM_ROLES:
            self.system = messages[0]["content"]
        self.has_tools = bool(tools)

    def note_unused(
        self, messages: list[Message], example: Example, tokenizer: Tokenizer
    ) -> None:
        """Note variables that the template does not have, and that it shows the model nothing of
        the system prompt, of the tools it may call or of their results.

        messages: the conversation, with or without its last answer.
        """
        source = tokenizer.template_for(example.tools)
        for name in example.template_args:
            if not mentions_variable(source, name):
                self.unused.append(f"{TEMPLATE_ARGS}.{name}")
        # the messages before the first answer, with a part and without: the same text has nothing
        # of the part in it
        answers = [
            n for n, message in enumerate(messages) if message["role"] == "assistant"
        ]
        prompt = messages[: answers[0] if answers else len(messages)]

        def rendered(messages: list[Message], tools: list | None) -> str | None:
            try:
                return tokenizer.apply_chat_template(
                    messages, tools, **example.template_args
                )
            except ValueError:  # with the answer it may render
                return None

        whole = rendered(prompt, example.tools)
        if whole is None:
            return
        if example.tools and whole == rendered(prompt, None):
            self.notes.append(TOOLS_LOST)
        has_system = len(prompt) > 1 and prompt[0]["role"] in SYSTEM_ROLES
        if has_system and whole == rendered(prompt[1:], example.tools):
            self.notes.append(SYSTEM_LOST)
        # results of tools, and system prompts after the first message
        for roles, note in ((("tool",), RESULTS_LOST), (SYSTEM_ROLES, SYSTEM_LOST)):
            later = [message for message in messages[1:] if message["role"] not in roles]
            if len(later) == len(messages[1:]) or note in self.notes:
                continue
            without = rendered([messages[0], *later], example.tools)
            if without is not None and without == rendered(messages, example.tools):
                self.notes.append(note)

    def note_controls(self, texts: list[str], tokenizer: Tokenizer) -> None:
        """Note that one of the texts contains that of a control token."""
        if tokenizer.control_text and any(map(tokenizer.control_text.search, texts)):
            self.notes.append(CONTROL)


def learned_texts(messages: Sequence[Message], tools: list | None) -> list[str]:
    """Return the texts of a conversation that a template renders: contents, reasoning, and calls
    and tools as JSON."""
    texts = [json.dumps(tools, ensure_ascii=False)] if tools else []
    for message in messages:
        for name in ("content", *REASONING_FIELDS):
            if isinstance(message.get(name), str):
                texts.append(message[name])
        if message.get("tool_calls"):
            texts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return texts


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
