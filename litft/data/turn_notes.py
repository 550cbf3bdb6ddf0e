"""What is to be said of an answer that is learned: where inference has other tokens before it, or
reads it otherwise."""

from collections.abc import Iterator

from litft.data.answer_reading import answer_parser
from litft.data.chat_template import Message
from litft.data.notes import CALL_UNREAD, OTHER_PROMPT, THOUGHT_IS_OFF, WITHIN_TOKEN
from litft.data.tokenizer import Tokenizer
from litft.data.turns import Turn


def turn_notes(
    tokenizer: Tokenizer,
    turn: Turn,
    prompt_ids: list[int],
    answer_ids: list[int],
    message: Message,
    tools: list | None,
) -> Iterator[str]:
    """Yield the notes on a turn; prompt_ids, answer_ids: the tokens before and after its start.

    message: the turn's, in the record.
    """
    if turn.other_prompt:
        yield OTHER_PROMPT
    if turn.thought_is_off:
        yield THOUGHT_IS_OFF
    prompt = turn.text[: turn.start]
    if _splits_token(tokenizer, turn, prompt_ids):
        yield WITHIN_TOKEN
    # without the tools, an answer has no calls to look for
    if message.get("tool_calls") and tools:
        answer = tokenizer.decode_answer(answer_ids)
        parsed = answer_parser(tokenizer, prompt, tools).parse(answer)
        found = [(call.name, call.arguments) for call in parsed.calls]
        written = []
        for call in message["tool_calls"]:
            function = call["function"]
            written.append((function["name"], function["arguments"]))
        if found != written:
            yield CALL_UNREAD


def _splits_token(tokenizer: Tokenizer, turn: Turn, prompt_ids: list[int]) -> bool:
    """Return whether a turn begins within a token; prompt_ids: the tokens before it."""
    # a letter begins a token after a special token, and after a single line break: GPT-2 divides
    # several of them before a letter; many tokenizers join it with any sign before it
    before = turn.text[max(0, turn.start - 2) : turn.start]
    first = turn.text[turn.start : turn.start + 1]
    is_line = before.endswith("\n") and not before[:-1].isspace()
    special = tokenizer.special_texts
    if first.isalnum() and (is_line or turn.text.endswith(special, 0, turn.start)):
        return False
    return tokenizer.encode(turn.text[: turn.start], bos=False) != prompt_ids
