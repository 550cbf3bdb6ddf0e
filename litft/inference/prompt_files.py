"""Files of prompts for `generate`, and what is written for each answer."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litft.data.answer_parser import AnswerFormat, AnswerParser, ParsedAnswer, make_parser
from litft.data.answer_reading import answer_parser
from litft.data.chat_template import Message
from litft.data.formats import (
    COMMON_FIELDS,
    earlier_turns,
    read_template_args,
    with_system,
)
from litft.data.history import readable_history
from litft.data.messages import check_messages, read_tools
from litft.data.readers import read_records
from litft.data.stored_messages import TABLE, parse_messages, read_stored_messages
from litft.data.tokenizer import Tokenizer
from litft.inference.answer_file import EXTRA_FIELDS
from litft.inference.chat_answers import call_entry
from litft.inference.decoder import check_prompt
from litft.inference.generation import GenerationChunk, GenerationStats
from litft.inference.session import Session


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt: text to continue, or a conversation in the chat template."""

    ids: list[int]
    text: str = ""  # of a conversation, as rendered
    tools: list[dict[str, Any]] | None = None
    is_chat: bool = False

    def parser(self, tokenizer: Tokenizer) -> AnswerParser:
        """Return what takes an answer apart; a continued text is content as it is."""
        if self.is_chat:
            return answer_parser(tokenizer, self.text, self.tools)
        return make_parser(AnswerFormat(thoughts=()))


@dataclass(frozen=True)
class FinishedAnswer:
    """A complete answer to one of several requests."""

    number: int
    parsed: ParsedAnswer
    stats: GenerationStats

    def fields(self) -> dict[str, Any]:
        """Return the fields of an output line."""
        fields: dict[str, Any] = {"completion": self.parsed.content}
        if self.parsed.reasoning:
            fields["reasoning_content"] = self.parsed.reasoning
        if self.parsed.calls:
            fields["tool_calls"] = [call_entry(call) for call in self.parsed.calls]
        return fields


def completed_in_order(
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    chunks: Iterator[tuple[int, GenerationChunk]],
    num_samples: int,
) -> Iterator[FinishedAnswer]:
    """Yield complete answers in the order of their requests."""
    texts: dict[int, str] = {}
    done: dict[int, GenerationChunk] = {}  # the last chunk of an answer
    next_number = 0
    for number, chunk in chunks:
        texts[number] = texts.get(number, "") + chunk
        if chunk.finish_reason:
            done[number] = chunk
        # answers that finish early wait here for those before them
        while next_number in done:
            parser = prompts[next_number // num_samples].parser(tokenizer)
            last = done.pop(next_number)
            parsed = parser.parse(texts.pop(next_number), last.is_cut)
            yield FinishedAnswer(next_number, parsed, last.stats)
            next_number += 1


def read_prompts(path: Path, out: str | None, key: str) -> list[tuple[str, dict[str, Any]]]:
    """Read records with a `prompt` or `messages`; return (location, record) pairs.

    key: the field that answers are written to. Raises ValueError with the location of the first
    invalid record.
    """
    if out and Path(out).exists() and path.exists() and Path(out).samefile(path):
        raise ValueError(f"--out {out} is the prompts file; name another")
    records = []
    for where, record in read_records(path):
        if isinstance(record, ValueError):
            raise record
        record = _with_messages(record, where)
        messages = _conversation(record)
        if messages is not None:
            check_messages(messages, where)
        elif not isinstance(record.get("prompt"), str):
            raise ValueError(f"{where}: needs 'prompt' (text) or 'messages' (a list)")
        for name in (key, *EXTRA_FIELDS):
            if name in record:
                raise ValueError(
                    f"{where}: already has a field {name!r}, which the answer would overwrite; "
                    "rename it"
                )
        try:
            # fails now rather than when the answer is written
            json.dumps(record, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:  # a date from Parquet, a lone surrogate
            raise ValueError(
                f"{where}: cannot be written as JSON ({error}); fix or remove it"
            ) from None
        records.append((where, record))
    return records


def _with_messages(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a record of a table with its lists in place of texts that stand for them."""
    record = read_stored_messages(record, where)
    if TABLE.search(where):
        messages = parse_messages(record.get("prompt"))
        if messages is not None:
            record = {**record, "prompt": messages}
    return record


def _conversation(record: dict[str, Any]) -> list[Message] | None:
    """Return the messages of a record; None if its prompt is a text."""
    messages = record.get("messages")
    prompt = record.get("prompt")
    if messages is None and isinstance(prompt, list):
        return prompt
    return messages


def encode_prompt(
    session: Session, where: str, record: dict[str, Any], in_template: bool
) -> Prompt:
    """Tokenize the prompt of a record for a model.

    Raise ValueError with its location if the model cannot read it.
    """
    prompt = tokenize_prompt(session.tokenizer, where, record, in_template)
    try:
        check_prompt(session.model, prompt.ids)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None
    return prompt


def tokenize_prompt(
    tokenizer: Tokenizer, where: str, record: dict[str, Any], in_template: bool
) -> Prompt:
    """Tokenize the prompt of a record: in the chat template, or with in_template false, a text to
    continue.

    Raise ValueError with its location if the template cannot render it.
    """
    try:
        messages = messages_of(record, where, in_template)
        if messages:
            tools = read_tools(record.get("tools"), where)
            tokenizer.check_tools(tools)
            variables = read_template_args(record, where)
            text = tokenizer.apply_chat_template(
                readable_history(tokenizer, messages, tools, variables=variables),
                tools,
                add_generation_prompt=True,
                **variables,
            )
            prompt = Prompt(tokenizer.encode(text, bos=False), text, tools, is_chat=True)
        else:
            for name in (*COMMON_FIELDS, "history"):
                if record.get(name):
                    raise ValueError(
                        f"{name} needs a chat template, and the prompt is continued as text; "
                        "remove the field"
                    )
            prompt = Prompt(tokenizer.encode(record["prompt"]))
    except ValueError as error:
        # some errors name the record already
        if not where or str(error).startswith(where):
            message = str(error)
        else:
            message = f"{where}: {error}"
        raise ValueError(message) from None
    return prompt


def messages_of(record: dict[str, Any], where: str, in_template: bool) -> list[Message]:
    """Return the conversation of a record without its last answer, with its system prompt; empty
    for text to continue."""
    conversation = _conversation(record)
    if conversation is not None:
        messages = with_system(check_messages(conversation, where), record, where)
        return messages[:-1] if ends_with_answer(record) else messages
    if in_template:
        question = {"role": "user", "content": record["prompt"]}
        return with_system([*earlier_turns(record, where), question], record, where)
    return []


def ends_with_answer(record: dict[str, Any]) -> bool:
    """Return whether the last message of a record is the assistant's, as in training data."""
    messages = _conversation(record)
    return bool(messages) and messages[-1]["role"] == "assistant"
