"""Records of preferences to conversations: a chosen and a rejected answer to one prompt, or one
answer with a label.

The prompt is explicit (`prompt`, `question`, `instruction`, `conversations`, `messages`), or the
common beginning of two dialogues.
"""

import re
from typing import Any, NamedTuple

import numpy as np

from litft.data.chat_template import Message, user_content
from litft.data.formats import (
    FORMATS,
    Example,
    Record,
    preference_kind,
    read_label,
    read_template_args,
    system_message,
)
from litft.data.messages import (
    SYSTEM_ROLES,
    check_messages,
    json_type,
    read_tools,
    sharegpt_turn,
    text_field,
)
from litft.data.tokenizer_backends import common_prefix_length

QUESTIONS = ("prompt", "question", "instruction")  # fields that may have the prompt as text
# fields that may have it as messages, and their formats
CONVERSATIONS = {"conversations": "sharegpt", "messages": "messages"}
ANSWERS = ("chosen", "rejected", "completion", "label")
# of records with preferences; `read_fields` says which of them one record uses
PREFERENCE_FIELDS = (*ANSWERS, *QUESTIONS, "input", *CONVERSATIONS, "system", "tools")
# of dialogues as one text, as in Anthropic/hh-rlhf
_HUMAN_ASSISTANT = re.compile(r"\n\n(Human|Assistant):")


class Dialogue(NamedTuple):
    """A prompt with an answer."""

    messages: list[Message]
    # the messages of a prompt with a field of its own; None: the answer's field has the prompt, too
    num_prompt: int | None


class Preference(NamedTuple):
    """Answers to one prompt as conversations: chosen and rejected, or a single one that is
    `desirable` or not."""

    answers: tuple[Example, ...]
    desirable: bool | None = None  # None: a pair

    @property
    def has_different_prompts(self) -> bool:
        """Whether something else than an answer follows what both dialogues of a pair have in
        common."""
        if self.desirable is not None:
            return False
        for example in self.answers:
            for message in example.messages:
                if message.get("train", True):
                    if message["role"] != "assistant":
                        return True
                    break
        return False


def to_preferences(
    record: Record, where: str, template: str, kind: str
) -> list[Preference]:
    """Convert a record; raise ValueError naming the record if it has other fields, or invalid
    values.

    kind: "pairs", or "labels" for answers with a label, of which a pair has two. template: see
    `formats.to_example`.
    """
    tools = read_tools(record.get("tools"), where)
    variables = read_template_args(record, where)
    if preference_kind(record) == "pairs":
        chosen = _dialogue(record, "chosen", where, template)
        rejected = _dialogue(record, "rejected", where, template)
        shared = _num_prompt_messages(chosen, rejected)
        better = Example(_masked(chosen.messages, shared), tools, variables)
        worse = Example(_masked(rejected.messages, shared), tools, variables)
        if kind == "pairs":
            return [Preference((better, worse))]
        return [Preference((better,), True), Preference((worse,), False)]
    # also a label of another meaning, which `_label` refuses by its value
    if kind == "labels" and record.get("label") is not None:
        messages, shared = _labelled(record, where, template)
        answer = Example(_masked(messages, shared), tools, variables)
        return [Preference((answer,), _label(record["label"], where))]
    if preference_kind(record) == "labels":
        raise ValueError(
            f"{where}: an answer with a label is no pair of chosen and rejected answers; use "
            "--objective kto"
        )
    if kind == "pairs":
        needed = "chosen and rejected"
    else:
        needed = "prompt, completion and label, or chosen and rejected"
    names = ", ".join(map(repr, record))[:200] or "none"
    remedy = (
        "name those of the file, as in --data.columns chosen=better,rejected=worse, or use "
        "--objective sft"
    )
    raise ValueError(
        f"{where}: preferences need the fields {needed}, found {names}; {remedy}"
    )


def read_fields(record: Record, where: str) -> set[str]:
    """Return the fields of a record that are read: of those that may have the prompt, one.

    A question that the answers' own dialogues repeat counts as read.
    """
    read = {*ANSWERS}
    question = _name_of_question(record)
    dialogues = []
    for name in ("chosen", "rejected", "completion"):
        if record.get(name) is not None:
            answer = _answer(record[name], f"{where}: {name}", is_dialogue=question is None)
            if _has_prompt(answer):
                dialogues.append(answer)
    if dialogues:
        for name in QUESTIONS:
            if any(message["content"] == record.get(name) for message in dialogues[0]):
                read.add(name)
        return read
    # a labelled answer without a field of its own is the end of the messages
    is_within_messages = "label" in record and not any(
        record.get(name) is not None for name in ("completion", "chosen")
    )
    if question is not None and not is_within_messages:
        return read | {question, "input"}
    for name in CONVERSATIONS:
        if record.get(name):
            return read | {name}
    return read


def _has_prompt(answer: list[Message]) -> bool:
    """Return whether an answer is a whole dialogue, which begins with the prompt."""
    return answer[0]["role"] != "assistant" and answer[-1]["role"] == "assistant"


def _name_of_question(record: Record) -> str | None:
    """Return the field with the prompt; None without one."""
    for name in QUESTIONS:
        if record.get(name):
            return name
    return None


def _label(value: Any, where: str) -> bool:
    """Return whether a label means that the answer is desirable."""
    label = read_label(value)
    if label is None:
        raise ValueError(
            f"{where}: label is {value!r}; use true for a desirable answer, or false for an "
            "undesirable one"
        )
    return label


def _dialogue(record: Record, name: str, where: str, template: str) -> Dialogue:
    """Return the prompt with the answer in field `name`, which may be a whole dialogue."""
    question = _prompt_field(record, where, template)
    answer = _answer(record[name], f"{where}: {name}", is_dialogue=not question)
    if _has_prompt(answer):
        return Dialogue(_with_system(answer, record, where), num_prompt=None)
    # a field such as `question` comes before a list such as `messages`
    prompt = question or _message_list(record, where, template)
    if not prompt:
        raise ValueError(
            f"{where}: there is no prompt; give the field prompt, or dialogues that begin with it"
        )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"{where}: the prompt ends with an answer; it must end with the turn to be answered"
        )
    messages = _with_system(prompt + answer, record, where)
    return Dialogue(messages, len(messages) - len(answer))


def _labelled(record: Record, where: str, template: str) -> tuple[list[Message], int]:
    """Return a dialogue whose last turn is the labelled answer, and how many messages come before
    it."""
    if record.get("completion") is None:
        dialogue = _with_system(_message_list(record, where, template), record, where)
        if not dialogue or dialogue[-1]["role"] != "assistant":
            raise ValueError(
                f"{where}: there is no answer; give the field completion, or messages that end "
                "with one"
            )
        return dialogue, len(dialogue) - 1
    messages, num_prompt = _dialogue(record, "completion", where, template)
    if num_prompt is not None:
        # the prompt may end with a call and its result
        return messages, num_prompt

    # calls and their results within the answer belong to it
    num_before = len(messages)
    while num_before and messages[num_before - 1]["role"] in ("assistant", "tool"):
        num_before -= 1
    return messages, num_before


def _prompt_field(record: Record, where: str, template: str) -> list[Message]:
    """Return the prompt of a record with a separate field for it, else an empty list."""
    name = _name_of_question(record)
    if name is None:
        return []
    if isinstance(record[name], list):
        return check_messages(record[name], where)
    text = text_field(record, name, where)
    dialogue = _split_dialogue(text)
    # as in hh-rlhf: the prompt ends with "Assistant:", after which the answer begins
    if dialogue and dialogue[-1] == {"role": "assistant", "content": ""}:
        return dialogue[:-1]
    return [
        {
            "role": "user",
            "content": user_content(text, text_field(record, "input", where), template),
        }
    ]


def _message_list(record: Record, where: str, template: str) -> list[Message]:
    """Return the messages of `conversations` or `messages`; an empty list without either."""
    for name, form in CONVERSATIONS.items():
        if record.get(name):
            return FORMATS[form].convert({name: record[name]}, where, template).messages
    return []


def _with_system(messages: list[Message], record: Record, where: str) -> list[Message]:
    """Return the messages after the record's system prompt, unless they have one."""
    has_system = any(message["role"] in SYSTEM_ROLES for message in messages[:1])
    if has_system or not messages:
        return messages
    return system_message(record, where) + messages


def _answer(value: Any, where: str, is_dialogue: bool) -> list[Message]:
    """Return an answer, or a dialogue that ends with it, as messages."""
    if isinstance(value, str):
        dialogue = _split_dialogue(value) if is_dialogue else None
        return dialogue or [{"role": "assistant", "content": value}]
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f"{where} must be text or a list of messages, found {json_type(value)}"
        )
    if not all(isinstance(turn, dict) and "from" in turn for turn in turns):
        return check_messages(turns, where)
    messages = []
    for number, turn in enumerate(turns):
        messages.append(sharegpt_turn(turn, f"{where}: turn {number}"))
    return messages


def _split_dialogue(text: str) -> list[Message]:
    """Return the messages of a dialogue as one text; an empty list if it is not one."""
    before, *parts = _HUMAN_ASSISTANT.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    # a text before the first speaker: these words are a part of an answer
    if before.strip():
        return []
    return [
        {"role": roles[speaker], "content": content.strip()} for speaker, content in turns
    ]


def _num_prompt_messages(chosen: Dialogue, rejected: Dialogue) -> int:
    """Return how many messages of both dialogues are the prompt: the explicit one, or what both
    begin with.

    All turns of the answers to an explicit prompt are compared, as in TRL, also equal first turns.
    """
    if chosen.num_prompt is not None and chosen.num_prompt == rejected.num_prompt:
        return chosen.num_prompt
    return _common_messages(chosen.messages, rejected.messages)


def _common_messages(first: list[Message], second: list[Message]) -> int:
    """Return the number of messages that two dialogues begin with, at most all but the last of the
    shorter one."""
    # the last message is the answer, also where both are equal
    count = min(len(first), len(second)) - 1
    for number in range(count):
        if first[number] != second[number]:
            return number
    return count


def _masked(messages: list[Message], count: int) -> list[Message]:
    """Return the messages with the first `count` excluded from the loss."""
    return [{**message, "train": False} for message in messages[:count]] + messages[count:]


def cut_together(
    answers: list[np.ndarray], limit: int, flag: np.uint32, mask: np.uint32
) -> tuple[list[np.ndarray], int]:
    """Cut the stored tokens (T + 1,) of answers to one prompt to `limit` input tokens, so that they
    stay comparable.

    The prompt is cut first, at its beginning but after its first token (BOS), by the same number of
    tokens in each; then the ends. flag: of target tokens; mask: of token ids. Return the tokens,
    and how many the prompt has lost.
    """
    # a sample has one token more than inputs
    excess = max(map(len, answers)) - (limit + 1)
    if excess <= 0:
        return answers, 0
    prompt = min(int(np.flatnonzero(answer & flag)[0]) for answer in answers)
    # the common prompt of both answers, before their first targets
    if len(answers) > 1:
        first, second = ((answer & mask).tolist() for answer in answers)
        prompt = min(prompt, common_prefix_length(first, second))
    # BOS and the last token of the prompt stay
    lost = max(0, min(excess, prompt - 2))
    cut = []
    for answer in answers:
        shortened = np.concatenate((answer[:1], answer[1 + lost :]))
        cut.append(shortened[: limit + 1])
    return cut, lost
