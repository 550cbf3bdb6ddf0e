"""What one record tells about the quality of the data: facts that `review` compares with those of
the file's other records."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from litft.data.chat_template import Message
from litft.data.digests import hash64
from litft.data.messages import SYSTEM_ROLES
from litft.data.reasoning import REASONING_FIELDS
from litft.data.similarity import contains_word, text_signature, words_of_label

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

# the language of an answer with fewer letters is unknown
FEWEST_LETTERS = 60
READ_LETTERS = 500  # characters of an answer that are read for its language
SURE = 0.9  # the least probability of a language
CODE_BLOCK = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
# the first sentence of an answer, and the last one; shorter ones say little
SENTENCE = re.compile(r"[^.!?\n:]+[.!?:]*")
SENTENCE_LENGTHS = range(12, 121)
# an answer that stops in a line of prose: so long, and without the mark that ends a sentence
FEWEST_WORDS = 8
LIST_ITEM = re.compile(r"\s*(?:[-*•#>|]|\d+[.)]|[A-Za-z][.)])")
OPEN_ENDS = ",;-([{"


@dataclass(frozen=True)
class RecordFacts:
    """What is compared between the records of a file."""

    content: int  # hash of all messages, or of a text
    # hash of the messages before the last answer; None of texts, of preferences, and without answer
    prompt: int | None = None
    answer: int = 0  # hash of the messages from there on
    # hash of the system prompt, of an empty text without one; None of a text
    system: int | None = None
    # the first and the last sentence of each answer that has more text
    sentences: frozenset[str] = frozenset()
    language: str = ""  # of the answers, by its ISO 639 code; empty: unknown
    is_prose: bool = False  # whether an answer ends with a line of prose
    is_unfinished: bool = False  # and that line does not end a sentence


@dataclass(frozen=True)
class ComparedConversation:
    """A conversation as it is compared with others."""

    messages: Sequence[Message]
    # the indices of the answers that are learned; empty: the conversation is a prompt
    learned: Collection[int]
    # of preferences, the conversations with the other answers: a prompt usually has several
    others: Sequence[Sequence[Message]] | None = None
    setting: Any = (
        None  # what the prompt has besides messages: tools, variables of the template
    )
    # what else makes a record another one: what is learned of it, and for rewards the columns
    rest: Any = None
    label: Any = (
        None  # what nearly equal records must have in common: a label, an expected answer
    )

    @property
    def prompt(self) -> Sequence[Message]:
        """The messages before the last answer that is learned."""
        return self.messages[: max(self.learned, default=len(self.messages))]

    @property
    def system(self) -> str:
        """The system prompt; empty without one."""
        if self.messages[0]["role"] in SYSTEM_ROLES:
            return self.messages[0]["content"]
        return ""

    def signatures(self) -> np.ndarray:
        """Return the signatures of the whole conversation and of its prompt, (2, 128): see
        `similarity`. Conversations with different system prompts, settings, labels or answers of
        symbols alone are not nearly equal, nor those with one answer if it is short: beside a long
        prompt, the word "positive" counts for nothing."""
        texts = [_text_of(self.messages)]
        answers = [self.messages[number]["content"] for number in sorted(self.learned)]
        for other in self.others or ():
            texts.append(_text_of(other[len(self.prompt) :]))
            answers.append(other[-1]["content"])
        whole = "\n".join(texts)
        symbols = []
        for answer in answers:
            if not contains_word(answer):
                symbols.append(answer.strip())
        only = words_of_label(answers[0]) if len(answers) == 1 else None
        salt = str(_hash_of(self.system, self.setting, self.label, symbols, only))
        return np.stack(
            (text_signature(whole, salt), text_signature(_text_of(self.prompt)))
        )

    def facts(self) -> RecordFacts:
        """Return what is compared between the records of a file."""
        answers = [self.messages[number]["content"] for number in sorted(self.learned)]
        sentences: set[str] = set()
        for answer in answers:
            sentences |= outer_sentences(answer)
        prose = [line for line in map(last_line_of_prose, answers) if line]
        has_prompt = self.learned and self.others is None
        answer = self.messages[len(self.prompt) :]
        return RecordFacts(
            content=_hash_of(
                self.messages, self.others, self.setting, self.rest, self.label
            ),
            prompt=_hash_of(self.prompt, self.setting) if has_prompt else None,
            answer=_hash_of(answer),
            system=hash64(self.system),
            sentences=frozenset(sentences),
            language=language_of("\n".join(answers)),
            is_prose=bool(prose),
            is_unfinished=any(_stops_within(line) for line in prose),
        )


def text_facts(text: str) -> RecordFacts:
    """Return the facts of a text to continue, or of token ids as a text."""
    return RecordFacts(content=hash64(text))


def text_signatures(text: str) -> np.ndarray:
    """Return the signatures of a text to continue, which has no prompt, (2, 128): see
    `similarity`."""
    return np.stack((text_signature(text), text_signature("")))


def _hash_of(*content: Any) -> int:
    return hash64(json.dumps(content, sort_keys=True, default=str))


def _text_of(messages: Sequence[Message]) -> str:
    """Return what a conversation says, without its system prompt, which many have in common."""
    texts = []
    for message in messages:
        if message["role"] in SYSTEM_ROLES:
            continue
        texts.append(message["content"])
        for name in REASONING_FIELDS:
            if message.get(name):
                texts.append(str(message[name]))
        if message.get("tool_calls"):
            texts.append(json.dumps(message["tool_calls"], default=str))
    return "\n".join(texts)


def outer_sentences(answer: str) -> set[str]:
    """Return the first and the last sentence of an answer, if it has more text and they are
    neither very short nor very long."""
    sentences = [match.strip() for match in SENTENCE.findall(answer)]
    sentences = [sentence for sentence in sentences if sentence]
    if len(sentences) < 2:
        return set()
    return {text for text in (sentences[0], sentences[-1]) if len(text) in SENTENCE_LENGTHS}


def last_line_of_prose(answer: str) -> str:
    """Return the last line of an answer if it is a sentence of several words; empty if it is an
    item of a list, a verse, code, a number or a name."""
    if answer.count("```") % 2:
        # cut within a block of code, which nothing closes
        return answer.rstrip()[-1:] + ","
    lines = [line for line in answer.rstrip().splitlines() if line.strip()]
    if not lines or LIST_ITEM.match(lines[-1]) or "```" in lines[-1]:
        return ""
    if len(lines[-1].split()) < FEWEST_WORDS:
        return ""
    # verses and rows of tables end without a mark, too
    if len(lines) > 1 and _stops_within(lines[-2].rstrip()):
        return ""
    return lines[-1]


def _stops_within(line: str) -> bool:
    """Return whether a line of prose stops before its sentence ends."""
    return line[-1].islower() or line[-1] in OPEN_ENDS


def language_of(text: str) -> str:
    """Return the language of a text, an ISO 639 code; empty if it is too short to tell, or
    code."""
    prose = CODE_BLOCK.sub("", text)[:READ_LETTERS]
    if sum(map(str.isalpha, prose)) < FEWEST_LETTERS:
        return ""
    language, probability = _identifier().classify(prose)
    if probability < SURE:
        return ""
    return language


@cache
def _identifier() -> "LanguageIdentifier":
    # imported here because it takes half a second
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
