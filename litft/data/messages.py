"""Messages of a conversation, from the forms that records have them in to OpenAI's, which chat
templates read."""

import json
from typing import Any

from litft.data.chat_template import Message
from litft.data.reasoning import REASONING_FIELDS, InlineThought

SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(
        ("gpt", "assistant", "chatgpt", "bard", "bing", "model", "function_call"),
        "assistant",
    ),
    **dict.fromkeys(("observation", "tool", "function_response", "ipython"), "tool"),
    "system": "system",
}
# names of other programs, which a message about an unknown role translates
OTHER_ROLES = SHAREGPT_ROLES | dict.fromkeys(("bot", "chatbot", "ai", "agent"), "assistant")
# fields of a turn that say whether the loss is computed on it
LOSS_FIELDS = ("train", "loss_weight", "weight")
# of a message, which templates may show
TEXT_FIELDS = (
    "name",
    "tool_call_id",
    *REASONING_FIELDS,
)
# fields of a message that are read in one form or another
MESSAGE_FIELDS = {
    "role",
    "content",
    "from",
    "value",
    "tool_calls",
    "function_call",
    *TEXT_FIELDS,
    *LOSS_FIELDS,
}

# entries of a message that say what is learned of it; no template sees them
LEARNED_ENTRIES = ("train", "parts")


def json_type(value: Any) -> str:
    """Return the name of a value's JSON type, for messages."""
    names = {
        dict: "an object",
        list: "an array",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def text_field(record: dict[str, Any], name: str, where: str) -> str:
    """Return a field that must be text; null and a missing field are empty."""
    value = record.get(name)
    if not isinstance(value, str | None):
        raise ValueError(
            f"{where}: field {name!r} must be text, found {json_type(value)}; write it in quotes"
        )
    return value or ""


def check_messages(messages: Any, where: str) -> list[Message]:
    """Return the messages with plain text content; typed text parts are joined.

    Raise ValueError for anything else.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: 'messages' must be a list with at least one message")
    checked = []
    for number, message in enumerate(messages):
        checked.append(_message(message, f"{where}: message {number}"))
    return checked


def _message(message: Any, where: str) -> Message:
    # OpenAI's older name
    if isinstance(message, dict) and message.get("role") == "function":
        message = {**message, "role": "tool"}
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        if isinstance(message, dict) and "role" not in message:
            given = ", ".join(map(repr, message)) or "none"
            raise ValueError(
                f"{where} has the fields {given}; litft needs role and content: rename them in the "
                "file"
            )
        role = message.get("role") if isinstance(message, dict) else message
        remedy = f"known: {', '.join(ROLES)}"
        if isinstance(role, str) and role.lower() in OTHER_ROLES:
            remedy = f"write {OTHER_ROLES[role.lower()]!r}"
        raise ValueError(f"{where} has the role {role!r}; {remedy}")
    calls = _calls(message.get("tool_calls"), where)
    if message.get("function_call") and not calls:  # OpenAI's older form of a single call
        calls = _calls([message["function_call"]], where)
    content = message.get("content")

    # content: text, typed parts, or null beside calls and reasoning
    thoughts = []
    if content is None and (calls or any(message.get(name) for name in REASONING_FIELDS)):
        content = ""
    if isinstance(content, list):
        texts = []
        for part in content:
            thought = _thought(part)
            if thought is None:
                texts.append(_part(part, where))
            else:
                thoughts.append(thought)
        content = "".join(texts)
    if not isinstance(content, str):
        raise ValueError(f"{where} must have text as its 'content'")
    checked = {"role": message["role"], "content": content} | text_fields(message, where)
    # parts are joined to one text, so reasoning after the text would lose its place
    if thoughts:
        if (
            any(name in checked for name in REASONING_FIELDS)
            or _thought(message["content"][0]) is None
        ):
            raise ValueError(
                f"{where} has reasoning in several places; give it once, before the text"
            )
        checked["reasoning_content"] = "\n".join(thoughts)
    checked["content"] = _without_repeated_thought(checked)
    if calls:
        checked["tool_calls"] = calls
    if not _is_supervised(message, where):
        checked["train"] = False
    return checked


def _without_repeated_thought(message: Message) -> str:
    """Return a message's content without reasoning that a field has as well: some servers answer
    with both."""
    content = message["content"]
    thought = InlineThought.of(content)
    if thought is None:
        return content
    for name in REASONING_FIELDS:
        # a message without the field does not have an empty thought twice
        if name in message and message[name].strip() == thought.reasoning.strip():
            return thought.answer
    return content


def text_fields(message: Message, where: str) -> Message:
    """Return the fields with text that templates may show. Blank reasoning is none."""
    found = {}
    for name in TEXT_FIELDS:
        value = message.get(name)
        if name in REASONING_FIELDS and value is not None and not isinstance(value, str):
            raise ValueError(f"{where}: {name} must be text, found {json_type(value)}")
        if isinstance(value, str) and (value.strip() or name not in REASONING_FIELDS):
            found[name] = value
    thoughts = {found[name] for name in REASONING_FIELDS if name in found}
    if len(thoughts) > 1:
        raise ValueError(
            f"{where} has different reasoning in two fields; give one of "
            f"{', '.join(REASONING_FIELDS)}"
        )
    return found


def _thought(part: Any) -> str | None:
    """Return the reasoning that a part of type thinking or reasoning has; None for other parts."""
    if not isinstance(part, dict) or part.get("type") not in ("thinking", "reasoning"):
        return None
    # the text is in a field named like the type, or in `text`
    text = part.get(part["type"], part.get("text"))
    if isinstance(text, list):  # Mistral's parts have a list of texts
        texts = []
        for inner in text:
            if isinstance(inner, dict) and isinstance(inner.get("text"), str):
                texts.append(inner["text"])
        text = "".join(texts)
    if isinstance(text, str):
        return text
    return None


def _part(part: Any, where: str) -> str:
    """Return the text of one typed part."""
    if not isinstance(part, dict):
        raise ValueError(
            f"{where} has a part that is {json_type(part)}; expected an object with type and text"
        )
    if part.get("type") != "text":
        raise ValueError(
            f"{where} has a part of type {part.get('type')!r}, but litft reads text only; remove it"
        )
    text = part.get("text", part.get("value"))
    if not isinstance(text, str):
        raise ValueError(f"{where} has a part without text")
    return text


def _is_supervised(message: Message, where: str) -> bool:
    """Return whether the loss is computed on a turn, which any of LOSS_FIELDS may exclude."""
    for name in LOSS_FIELDS:
        value = message.get(name)
        if value is not None and (
            not isinstance(value, (bool, int, float)) or value not in (0, 1)
        ):
            raise ValueError(
                f"{where}: {name} is {value!r}; use true (1) to compute the loss on the turn, or "
                "false (0)"
            )
    return all(message.get(name) in (None, 1) for name in LOSS_FIELDS)


def _calls(calls: Any, where: str) -> list[dict]:
    """Return OpenAI's tool calls with their arguments as an object, as templates expect."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls must be a list, found {json_type(calls)}")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> dict:
    if isinstance(call, dict):
        function = call.get("function", call)
    else:
        function = None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where}: a tool call needs a name and arguments, found {str(call)[:80]!r}"
        )
    arguments = _arguments_of(function, call, where)
    if arguments == "":  # OpenAI's form of a call without any
        arguments = {}
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{where}: the arguments of {function['name']}")
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:  # a date from Parquet
        raise ValueError(
            f"{where}: the arguments of {function['name']} are not JSON ({error}); fix or remove "
            "them"
        ) from None
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        "type": "function",
        **call_id,
        "function": {"name": function["name"], "arguments": arguments},
    }


# what a call has beside its arguments
CALL_FIELDS = {
    "name",
    "tool_name",
    "id",
    "type",
    "index",
    "description",
    "strict",
    "function",
}


def _arguments_of(function: dict, call: dict, where: str) -> Any:
    """Return the arguments of a call, which Llama calls `parameters`; raise ValueError if they have
    another name, since the call would be learned without any."""
    for name in ("arguments", "parameters"):
        if function.get(name) is not None:
            return function[name]
    # a table has empty columns for the fields of other records
    others = []
    for name, value in {**call, **function}.items():
        if value is not None and name not in CALL_FIELDS:
            others.append(name)
    if others:
        raise ValueError(
            f"{where}: the call of {function['name']} has no arguments, but {', '.join(others)}; "
            "name them arguments, beside the name"
        )
    return {}


def with_arguments_as_text(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON, for templates that take them
    so."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    if calls:
        return {**message, "tool_calls": calls}
    return message


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: invalid JSON ({error})") from None


def read_tools(tools: Any, where: str) -> list | None:
    """Return the tools, given as a list or as its JSON, each as {"type": "function", "function":
    {...}}."""
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}: tools") if tools.strip() else None
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(
            f"{where}: tools must be a list of objects, found {json_type(tools)}"
        )
    wrapped = []
    for tool in tools:
        if "function" not in tool:
            # the Responses API has the type beside the name
            function = {name: value for name, value in tool.items() if name != "type"}
            tool = {"type": "function", "function": function}
        wrapped.append(tool)
    return wrapped


def joined_messages(first: Message, second: Message, where: str) -> Message:
    """Return two messages of the assistant as one; its `parts` say which of them are learned, if
    not all alike.

    Raises ValueError for a call before a text, since templates write the text first.
    """
    if first.get("tool_calls") and second["content"].strip():
        raise ValueError(
            f"{where}: a call is followed by text of the same speaker; add the result between "
            "them, or put the text before the call"
        )
    joined = {**first, **second}
    joined["content"] = "\n\n".join(filter(None, (first["content"], second["content"])))
    for name in REASONING_FIELDS:
        if first.get(name) and second.get(name):
            joined[name] = f"{first[name]}\n\n{second[name]}"
    calls = first.get("tool_calls", []) + second.get("tool_calls", [])
    if calls:
        joined["tool_calls"] = calls
    # the first message may be a joined one already, with parts of its own
    parts = [*(first.get("parts") or [_as_part(first)]), _as_part(second)]
    joined.pop("train", None)
    joined.pop("parts", None)
    # all parts alike: the message as a whole is learned or not
    if not any(part["train"] for part in parts):
        joined["train"] = False
    elif not all(part["train"] for part in parts):
        joined["parts"] = parts
    return joined


def _as_part(message: Message) -> dict[str, Any]:
    return {"text": message["content"], "train": message.get("train", True)}


def sharegpt_turn(turn: Any, where: str) -> Message:
    """Convert one of ShareGPT's turns."""
    if not isinstance(turn, dict):
        raise ValueError(
            f"{where} must be an object with 'from' and 'value', found {json_type(turn)}"
        )
    speaker = turn.get("from", turn.get("role"))
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(f"{where} is from {speaker!r}; known: {', '.join(SHAREGPT_ROLES)}")
    value = turn.get("value", turn.get("content"))

    # some files have a turn of their own for a call, with the call as its value
    if speaker == "function_call":
        if isinstance(value, str):
            function_call = parse_json(value, where)
        else:
            function_call = value
        if not isinstance(function_call, list):
            function_call = [function_call]
        calls = _calls(function_call, where)
        message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    elif isinstance(value, str):
        message = {"role": SHAREGPT_ROLES[speaker], "content": value}
    else:
        raise ValueError(f"{where} must have text as its 'value', found {json_type(value)}")
    message |= text_fields(turn, where)
    if message["role"] == "assistant":
        calls = _calls(turn.get("tool_calls") or None, where)
        if turn.get("function_call") and not calls:  # OpenAI's older form of a single call
            calls = _calls([turn["function_call"]], where)
        if calls:
            message["tool_calls"] = calls
    if _is_supervised(turn, where):
        return message
    return message | {"train": False}
