"""Answers of a chat model as messages: content, reasoning and tool calls."""

import json
import secrets
import string
from typing import Any

from litft.data.answer_parser import ParsedAnswer
from litft.data.chat_template import Message
from litft.data.tool_calls import ToolCall

# characters, the only length that Mistral's templates accept
ID_LENGTH = 9


class ChatAnswer(str):
    """The content of an answer as a str; its reasoning and tool calls are attributes."""

    reasoning_content: str
    # as in `message`: with the arguments as an object
    tool_calls: list[dict[str, Any]]

    def __new__(cls, parsed: ParsedAnswer) -> "ChatAnswer":
        """Create a str with two attributes, without white space at its ends."""
        answer = super().__new__(cls, parsed.content.strip())
        answer.reasoning_content = parsed.reasoning
        answer.tool_calls = list(map(call_entry, parsed.calls))
        return answer

    @property
    def message(self) -> Message:
        """The answer as a message, for the next turn of the conversation."""
        return _message(str(self), self.reasoning_content, self.tool_calls)


def answer_message(parsed: ParsedAnswer) -> Message:
    """Return an answer as a message, with its content as it is."""
    return _message(parsed.content, parsed.reasoning, list(map(call_entry, parsed.calls)))


def _message(content: str, reasoning: str, calls: list[dict[str, Any]]) -> Message:
    """Return a message of the assistant that has only the fields that are not empty."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def call_entry(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's form, with an id of its own and the arguments as an object, as
    templates read it."""
    alphabet = string.ascii_letters + string.digits
    call_id = "".join(secrets.choice(alphabet) for _ in range(ID_LENGTH))
    return {
        "type": "function",
        "id": call_id,
        "function": {"name": call.name, "arguments": call.arguments},
    }


def api_call_entry(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's form, with the arguments as JSON, as clients read it."""
    entry = call_entry(call)
    entry["function"]["arguments"] = json.dumps(call.arguments, ensure_ascii=False)
    return entry
