"""What is learned of conversations in chat templates, as a table: `python tests/learned_spans.py
FILE.jinja ...`.

One rule for every template: the learned part of a turn contains its content, every call with name
and arguments, and its reasoning; it begins with no empty thought and ends with a token that ends
the turn; and prompt + learned part is a text that the template renders. A conversation of which a
template cannot render all is refused with the reason. `findings` returns what breaks the rule;
`tests/data/test_turns.py` runs it over our templates and those of ../shared.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from litft.data.chat_template import Message, render
from litft.data.turn_ends import EndTokens
from litft.data.turns import Turn, assistant_turns

QUESTION = {"role": "user", "content": "How warm is it?"}
AGAIN = {"role": "user", "content": "And there?"}
ANSWER = "It is warm."
FIRST = "Just a moment."
LAST = "It is cold there."
REASONING = "The town matters."
ARGUMENTS = {"town": 'Köln "x"', "days": 3}
TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "</s>",
}
SWITCHES = (
    {},
    {"enable_thinking": True, "thinking": True},
    {"enable_thinking": False, "thinking": False},
)
EMPTY_THOUGHT = re.compile(r"\s*(<[^<>]*think[^<>]*>)?\s*</[^<>]*think[^<>]*>")
OPEN_THOUGHT = re.compile(r"<[\w:]*think[\w:]*>\s*\Z")
# JSON that is a text within JSON
ARGUMENTS_AS_TEXT = re.compile(r'"\{\\"')
# what looks like a special token; the token that ends a turn is one of them
SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]+[|｜]>|<(?:start|end)_of_turn>|<turn\|>|<\|tool_response>|</s>|\[e~\[|</assistant>"
)


def tool(name: str) -> dict[str, Any]:
    """Return the declaration of a function with a town and a number of days."""
    text = {"type": "string", "description": "the town"}
    days = {"type": "integer", "description": "the days"}
    parameters = {
        "type": "object",
        "properties": {"town": text, "days": days},
        "required": ["town"],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": parameters},
    }


TOOLS = [tool("weather"), tool("clock")]


def answer(content: str | None = ANSWER, **fields: Any) -> Message:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content, **fields}


def calls(*names: str, arguments: dict[str, Any] = ARGUMENTS) -> list[dict[str, Any]]:
    """Return calls of these functions."""
    return [
        {
            "type": "function",
            "id": f"a1b2c3d4{n}",
            "function": {"name": name, "arguments": arguments},
        }
        for n, name in enumerate(names)
    ]


ANSWERS: dict[str, Message] = {
    "plain": answer(),
    "call": answer("", tool_calls=calls("weather")),
    "text and call": answer(tool_calls=calls("weather")),
    "two calls": answer("", tool_calls=calls("weather", "clock")),
    "empty arguments": answer("", tool_calls=calls("weather", arguments={})),
    "reasoning_content": answer(reasoning_content=REASONING),
    "reasoning": answer(reasoning=REASONING),
    "thinking": answer(thinking=REASONING),
    "inline": answer(f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"),
    "inline, not opened": answer(f"{REASONING}\n</think>\n\n{ANSWER}"),
    "inline, empty": answer(f"<think>\n\n</think>\n\n{ANSWER}"),
    "reasoning and call": answer(
        "", reasoning_content=REASONING, tool_calls=calls("weather")
    ),
    "thinking and call": answer("", thinking=REASONING, tool_calls=calls("weather")),
    "inline and call": answer(
        f"<think>\n{REASONING}\n</think>\n\n", tool_calls=calls("weather")
    ),
    "call, no content": answer(None, tool_calls=calls("weather")),
}


def conversations() -> Iterator[tuple[str, list[Message]]]:
    """Yield conversations with each kind of answer, the last message and followed by others."""
    yield "system", [{"role": "system", "content": "Be brief."}, QUESTION, answer()]
    yield "two turns", [QUESTION, answer(FIRST), AGAIN, answer()]
    for name, message in ANSWERS.items():
        yield name, [QUESTION, message]
        results = [
            {
                "role": "tool",
                "name": call["function"]["name"],
                "tool_call_id": call["id"],
                "content": '{"celsius": 21}',
            }
            for call in message.get("tool_calls", [])
        ]
        if results:
            yield f"{name}, result", [QUESTION, message, *results, answer(LAST)]
        yield (
            f"{name}, later",
            [
                QUESTION,
                message,
                *results,
                *([answer(FIRST)] if results else []),
                AGAIN,
                answer(LAST),
            ],
        )


@dataclass(frozen=True)
class Outcome:
    """What became of a conversation: the learned text of each answer, or why it is refused; and
    what breaks the rule."""

    learned: list[str]
    refused: str = ""
    findings: tuple[str, ...] = ()


def end_tokens(source: str, stops: tuple[str, ...] = ()) -> EndTokens:
    """Return the special tokens in a template's source."""
    special = dict.fromkeys([*SPECIAL.findall(source), TOKENS["eos_token"], *stops])
    return EndTokens(tuple(special), (*stops, TOKENS["eos_token"]))


def outcome(source: str, messages: list[Message], stops: tuple[str, ...] = ()) -> Outcome:
    """Return what is learned of a conversation in a template."""
    tools = TOOLS if any(message.get("tool_calls") for message in messages) else None
    ends = end_tokens(source, stops)
    renderer = partial(render, source, **TOKENS)
    try:
        texts = assistant_turns(renderer, messages, tools, ends)
    except ValueError as error:
        return Outcome([], str(error))
    turns = [turn for rendered in texts for turn in rendered.turns]
    learned = [
        turn.text[turn.answer if turn.empty_thought else turn.start : turn.end]
        for turn in turns
    ]
    found = []
    for turn, text in zip(turns, learned, strict=True):
        found += _missing(messages[turn.message], text)
        if ARGUMENTS_AS_TEXT.search(text) and not _has_arguments_as_text(
            renderer, messages[: turn.message + 1], tools
        ):
            found.append("has arguments as text within JSON")
        found += _wrong(turn, text, ends)
        if not _is_rendered(renderer, messages[: turn.message + 1], tools, turn):
            found.append("is not rendered by the template")
    return Outcome(learned, findings=tuple(dict.fromkeys(found)))


def _has_arguments_as_text(
    renderer: Any, messages: list[Message], tools: list | None
) -> bool:
    """Return whether the template writes arguments as text within JSON, from the conversation as it
    is."""
    try:
        return bool(ARGUMENTS_AS_TEXT.search(renderer(messages, tools=tools)))
    except ValueError:
        return True


def _missing(message: Message, text: str) -> Iterator[str]:
    """Yield what a message has and its learned text lacks."""
    parts = {ANSWER, FIRST, LAST} & set((message["content"] or "").split("\n"))
    has_reasoning = REASONING in (message["content"] or "") or REASONING in message.values()
    for part in [*parts, *([REASONING] if has_reasoning else [])]:
        if part not in text:
            yield f"lacks {part!r}"
    for call in message.get("tool_calls", []):
        if call["function"]["name"] not in text:
            yield "lacks a call"
        for name in call["function"]["arguments"]:
            if name not in text:
                yield "lacks an argument"


def _wrong(turn: Turn, text: str, ends: EndTokens) -> Iterator[str]:
    """Yield what is wrong with a learned text on its own."""
    prompt = turn.text[: turn.start]
    if EMPTY_THOUGHT.match(text):
        yield "learns an empty thought"
    if OPEN_THOUGHT.search(prompt) and not re.search(
        r"</[\w:]*think", turn.text[turn.start :]
    ):
        yield "is inside a thought that is never closed"
    if (
        prompt[-20:].count("<think>")
        - prompt[-20:].count("</think>")
        + text.count("<think>")
        > 1
    ):
        yield "opens a thought twice"
    if not text.endswith(ends.special) and any(
        token in turn.text[turn.end :] for token in ends.special
    ):
        yield "has no end token"


def _is_rendered(
    renderer: Any, messages: list[Message], tools: list | None, turn: Turn
) -> bool:
    """Return whether the template renders prompt + learned text, or this is what the model writes
    after its prompt."""
    text = turn.text[: turn.end].rstrip()
    # a token that the template writes before the next message; then it may also leave out the
    # reasoning
    without_end = SPECIAL.sub("", text[turn.start :])
    without_end = text[: turn.start] + without_end if SPECIAL.search(text[-30:]) else text
    following = (
        [],
        [AGAIN],
        [{"role": "tool", "name": "weather", "tool_call_id": "a1b2c3d40", "content": "21"}],
    )
    for spelled, switch, after in product(_spellings(messages), SWITCHES, following):
        try:
            rendered = renderer([*spelled, *after], tools=tools, **switch)
            if rendered.startswith(text) or rendered.rstrip() == without_end.rstrip():
                return True
        except ValueError:
            continue
    # DeepSeek R1's template renders no reasoning: its prompt opens a thought, and what follows is
    # cut before rendering
    for switch in SWITCHES:
        prompt = renderer(messages[:-1], tools=tools, add_generation_prompt=True, **switch)
        if OPEN_THOUGHT.search(prompt) and text.startswith(prompt) and REASONING in text:
            return True
    # the history of a prompt may differ: Mistral Nemo's has the system prompt, gpt-oss's the
    # reasoning before a call, Command R+'s the instructions; the rendered text has what follows
    for spelled in _spellings(messages):
        try:
            prompt = renderer(spelled[:-1], tools=tools, add_generation_prompt=True)
            rendered = renderer(spelled, tools=tools).rstrip()
        except ValueError:
            continue
        learned = text[len(prompt) :]
        if text.startswith(prompt) and learned in rendered:
            return True
    return False


def _spellings(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield a conversation with its reasoning in each field, as a part and inline, and with
    arguments as text."""
    names = (
        None,
        "reasoning_content",
        "reasoning",
        "thinking",
        "parts",
        "inline",
        "inline, not opened",
    )
    for spelling, as_text, no_content in product(names, (False, True), (False, True)):
        yield [_spelled(message, spelling, as_text, no_content) for message in messages]


def _spelled(
    message: Message, spelling: str | None, as_text: bool, no_content: bool
) -> Message:
    if message["role"] != "assistant":
        return message
    changed = dict(message)
    content = changed["content"] or ""
    reasoning = next(
        (
            changed.pop(name)
            for name in ("reasoning_content", "reasoning", "thinking")
            if name in changed
        ),
        "",
    )
    if "</think>" in content:
        thought, _, content = content.partition("</think>")
        reasoning = thought.removeprefix("<think>").strip()
        content = content.lstrip()
    if spelling is None:
        changed = dict(message)
    elif spelling == "parts" and reasoning:
        changed["content"] = [{"type": "thinking", "thinking": reasoning}]
        if content:
            changed["content"].append({"type": "text", "text": content})
    elif spelling.startswith("inline") and reasoning:
        opening = "<think>\n" if spelling == "inline" else ""
        changed["content"] = f"{opening}{reasoning}\n</think>\n\n{content}"
    else:
        changed["content"] = content
        if reasoning:
            changed[spelling] = reasoning
    if not message.get("tool_calls"):
        return changed
    if no_content and not changed["content"]:
        changed["content"] = None
    if as_text:
        text = json.dumps(
            message["tool_calls"][0]["function"]["arguments"], ensure_ascii=False
        )
        changed["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": text}}
            for call in message["tool_calls"]
        ]
    return changed


def main(paths: list[str]) -> int:
    """Print the table; return the number of templates with a finding."""
    with_findings = 0
    for path in paths:
        source = Path(path).read_text("utf-8")
        found = False
        print(f"\n{Path(path).name}")
        for name, messages in conversations():
            result = outcome(source, messages)
            found |= bool(result.findings)
            state = (
                "refused" if result.refused else "FINDING" if result.findings else "learned"
            )
            what = (
                result.refused
                or "; ".join(result.findings)
                or " | ".join(map(repr, result.learned))
            )
            print(f"  {name:28} {state}  {what[:160]}")
        with_findings += found
    print(f"\n{len(paths) - with_findings} of {len(paths)} templates without a finding")
    return with_findings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
