"""What in a conversation is probably not meant: refusals, the marks of other chat formats in its
messages, and messages out of order."""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from litft.data.chat_template import Message
from litft.data.messages import SYSTEM_ROLES
from litft.data.notes import (
    ANSWER_FIRST,
    AS_AN_AI,
    FOREIGN_MARKS,
    REFUSAL,
    SYSTEM_LATE,
    USER_TWICE,
)

# characters at the beginning of an answer where a refusal stands
BEGINNING = 200
SPEAKING_AS_AI = re.compile(
    r"\bas an? (?:ai|artificial intelligence)(?: language)?(?: model| assistant)?\b",
    re.IGNORECASE,
)
REFUSALS = re.compile(
    r"\bI(?:'m| am) (?:sorry|afraid),? (?:but )?I (?:can't|cannot|can not|am not able|am unable)"
    r"|\bI(?:'m| am) (?:unable|not able) to (?:help|assist|provide|fulfil|answer|comply)"
    r"|\bI (?:can't|cannot|can not) (?:help|assist|provide|fulfil|comply)"
    r"|\bI must decline\b",
    re.IGNORECASE,
)
# marks of Alpaca, ChatML, Llama 2 and 3, Gemma, Phi, Zephyr and plain dialogues, and those that
# templates write around the result of a tool
MARKS = re.compile(
    r"^### ?(?:Response|Instruction|Input|Human|Assistant|User|System):"
    r"|<\|im_(?:start|end)\|>|\[/?INST\]|<</?SYS>>|<\|(?:start|end)_header_id\|>|<\|eot_id\|>"
    r"|<(?:start|end)_of_turn>|</?tool_response>|<\|(?:assistant|user|system)\|>"
    r"|^(?:Human|Assistant|USER|ASSISTANT): ",
    re.MULTILINE,
)


def suspicions(messages: Sequence[Message], supervised: Collection[int]) -> Iterator[str]:
    """Yield the notes on a conversation. supervised: the indices of messages that are learned."""
    for number in sorted(supervised):
        # apostrophes as word processors write them
        beginning = messages[number]["content"][:BEGINNING].replace("\u2019", "'")
        if REFUSALS.search(beginning):
            yield REFUSAL
            break
        if SPEAKING_AS_AI.search(beginning):
            yield AS_AN_AI
            break
    for message in messages:
        if MARKS.search(message["content"]):
            yield FOREIGN_MARKS
            break
    yield from _of_order([message["role"] for message in messages])


def _of_order(roles: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the order of messages: a system prompt comes first, then the user,
    and no two users follow each other."""
    turns = list(roles)
    if turns[0] in SYSTEM_ROLES:
        del turns[0]
    if turns and turns[0] == "assistant":
        yield ANSWER_FIRST
    if any(role in SYSTEM_ROLES for role in turns):
        yield SYSTEM_LATE
    if ("user", "user") in pairwise(turns):
        yield USER_TWICE
