"""Records to prompts, for learning from rewards: a conversation up to the last answer, and the
columns that the reward functions get."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from litft.data.chat_template import Message, user_content
from litft.data.encoded import Encoded, learned_texts, unit_hash, without_learned
from litft.data.formats import (
    COMMON_FIELDS,
    FORMATS,
    Example,
    Record,
    detect_format,
    earlier_turns,
    read_template_args,
    to_example,
    with_system,
)
from litft.data.history import readable_history
from litft.data.messages import check_messages, read_tools, text_field
from litft.data.notes import NO_ROOM
from litft.data.sample import IN_ANSWER, SUPERVISED
from litft.data.tokenizer import Tokenizer

# fields with a conversation
CONVERSATIONS = ("messages", "conversations")
# fields that may be the prompt of a record without an answer
PROMPT_FIELDS = ("prompt", "question", "instruction")
# fields of a record that are the conversation, or would hide what a function gets by that name
NOT_COLUMNS = {
    "messages",
    "conversations",
    "prompt",
    "completion",
    "completions",
    *COMMON_FIELDS,
}


@dataclass(frozen=True)
class PromptExample:
    """A conversation that ends before an answer."""

    example: Example
    # the whole record, which decides its split: that of supervised fine-tuning, so that what one
    # run has held out the next one holds out, too
    whole: Example
    # what the reward functions get by name: `answer`, and the record's other fields
    columns: dict[str, Any]
    # the fields with a value that nothing reads
    unused: list[str] = field(default_factory=list)

    def as_json(self, where: str) -> bytes:
        """Return the messages and the columns; raise ValueError for a value that is not JSON."""
        try:
            return json.dumps(
                [self.example.messages, self.columns], ensure_ascii=False
            ).encode()
        except (TypeError, ValueError) as error:  # a date from Parquet, a lone surrogate
            raise ValueError(
                f"{where}: cannot be given to the reward functions ({error}); fix or remove it"
            ) from None


def to_prompt(
    record: Record,
    where: str,
    template: str,
    form: str | None = None,
    mapped: Collection[str] = (),
) -> PromptExample:
    """Convert a record of any format, or one with a prompt alone; raise ValueError naming the
    record.

    template: see `formats.to_example`. mapped: the fields that --data.columns fills.
    """
    stated = None if form else _stated_prompt(record, where, template, mapped)
    if stated is None or form or has_format(record):
        # a label, which other objectives learn from, may be a column for reward functions
        known = {name: value for name, value in record.items() if name != "label"}
        form = form or detect_format(known, where, mapped=mapped)
        whole = to_example(record, where, template, form)
    else:
        whole = stated
    example = stated or whole
    if example.text is not None or example.token_ids is not None:
        raise ValueError(
            f"{where}: --objective grpo answers prompts, and this is a text to continue; give the "
            "field prompt, question or messages"
        )

    # the last answer is not a part of the prompt, but a column
    messages = example.messages
    answer = None
    if messages[-1]["role"] == "assistant":
        answer = messages[-1]["content"]
        messages = messages[:-1]
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{where}: there is no prompt before the answer; add a question")
    columns = {}
    for name, value in record.items():
        if name not in NOT_COLUMNS:
            columns[name] = value
    if answer is not None:
        columns.setdefault("answer", answer)
    messages = [without_learned(message) for message in messages]
    unused = []
    if stated is not None:
        # a conversation beside the prompt: a function could get it only under these names
        unused = [name for name in CONVERSATIONS if record.get(name)]
    return PromptExample(replace(example, messages=messages), whole, columns, unused)


def has_format(record: Record) -> bool:
    """Whether a record has all fields of a format with answers."""
    for form in FORMATS.values():
        if form.fields != ("text",) and all(record.get(name) for name in form.fields):
            return True
    return False


def _stated_prompt(
    record: Record, where: str, template: str, mapped: Collection[str]
) -> Example | None:
    """Return the conversation of a record's prompt, maybe as messages; None if the record's format
    says what it is.

    As in TRL, the field `prompt` is the prompt beside a question and an answer, which the reward
    functions get. It is none beside its completion, and as a text beside a conversation, whose
    beginning it repeats. What --data.columns names comes before all of that.
    """
    prompt = record.get("prompt")
    conversations = [name for name in CONVERSATIONS if record.get(name)]
    named = [name for name in PROMPT_FIELDS if name in mapped and record.get(name)]
    is_stated = bool(prompt)
    if not isinstance(prompt, list) and conversations:
        is_stated = False
    if named:
        is_stated = True
    elif any(name in mapped for name in conversations):
        is_stated = False
    if record.get("completion"):
        is_stated = False
    if not is_stated and has_format(record):
        return None
    for name in dict.fromkeys((*named, *PROMPT_FIELDS)):
        value = record.get(name)
        if not value:
            continue
        messages: list[Message]
        if isinstance(value, list):
            messages = check_messages(value, where)
            if messages[-1]["role"] == "assistant":
                raise ValueError(
                    f"{where}: {name} ends with a message of the assistant, and completions do not "
                    "continue one; end it with the user's, or give the conversation as messages"
                )
        else:
            text = text_field(record, name, where)
            if name == "instruction" and record.get("input"):
                text = user_content(text, text_field(record, "input", where), template)
            messages = [*earlier_turns(record, where), {"role": "user", "content": text}]
        return Example(
            with_system(messages, record, where),
            read_tools(record.get("tools"), where),
            template_args=read_template_args(record, where),
        )
    return None


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts, each with room for a completion: tokens that the completion's replace."""

    tokenizer: Tokenizer
    limit: int  # the most input tokens of prompt and completion
    completion_tokens: int
    form: str | None = None

    def encode(
        self,
        record: Record,
        where: str,
        encoded: Encoded,
        mapped: Collection[str] = (),
    ) -> None:
        """Add the sample of a record; mapped: the fields that --data.columns fills."""
        encoded.form = "prompts"
        # without a template: the split does not depend on it
        plain = to_prompt(record, where, "", self.form, mapped=mapped)
        template = self.tokenizer.chat_template
        prompt = to_prompt(record, where, template, self.form, mapped=mapped)
        example = prompt.example
        texts = learned_texts(example.messages, example.tools)
        encoded.note_controls(texts, self.tokenizer)
        encoded.describe(example.messages, example.tools)
        encoded.unused += prompt.unused
        encoded.note_unused(example.messages, example, self.tokenizer)
        encoded.compare_prompt(plain.whole, len(example.messages), plain.columns)
        text = self._rendered(example, where)
        ids = self.tokenizer.encode(text, bos=False)
        # the last token of a sample is only a target
        if len(ids) + self.completion_tokens > self.limit + 1:
            encoded.notes.append(NO_ROOM)
            return
        room = np.full(self.completion_tokens, self.tokenizer.end_id, np.uint32)
        encoded.samples.append(
            np.concatenate([np.array(ids, np.uint32), room | SUPERVISED | IN_ANSWER])
        )
        encoded.units.append(unit_hash(plain.whole))
        encoded.turns.append(0)
        encoded.columns.append(prompt.as_json(where))

    def _rendered(self, example: Example, where: str) -> str:
        """Return the text of a prompt, with earlier reasoning and calls where the template reads
        them; raise ValueError for calls that it leaves out."""
        try:
            messages = readable_history(
                self.tokenizer,
                example.messages,
                example.tools,
                checks_system=False,
                variables=example.template_args,
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return self.tokenizer.apply_chat_template(
            messages, example.tools, add_generation_prompt=True, **example.template_args
        )
