"""Records to examples: the table FORMATS lists the fields of each format and the function that
converts its records.

The format of a record is detected from its fields, in the order of the table, unless
`--data.format` names it. Conversations have OpenAI's form, which chat templates also read: roles,
text, `tool_calls`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from litft.data.chat_template import Message, user_content
from litft.data.messages import (
    MESSAGE_FIELDS,
    SYSTEM_ROLES,
    check_messages,
    joined_messages,
    json_type,
    parse_json,
    read_tools,
    sharegpt_turn,
    text_field,
    text_fields,
)
from litft.data.reasoning import REASONING_FIELDS

# the label of a token that the loss ignores, in transformers
NO_TARGET = -100
# characters of text above which a record is divided between training and validation
LONG_TEXT = 65_536
# fields that records of several formats may have
TEMPLATE_ARGS = "chat_template_kwargs"
COMMON_FIELDS = ("system", "tools", TEMPLATE_ARGS)
# variables of a template that are the conversation, or what renders it
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "self", "source", "day")
EMPTY_VALUES = (None, "", [], {})
# accepted labels of an answer, as text, and whether they mean that the answer is desirable
LABELS = {
    "true": True,
    "1": True,
    "desirable": True,
    "false": False,
    "0": False,
    "-1": False,
    "undesirable": False,
}
# written after every answer in some files, and removed: the chat template ends answers with the
# model's own token
END_TOKENS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A conversation with the tools it may call, a plain text if `text` is not None, or
    `token_ids`.

    The loss is not computed on messages with `train` false. A text may be a part of a longer one:
    `begins` and `ends` say whether it has the beginning and the end. Text files and texts above
    LONG_TEXT are `divided` between training and validation; other records are not.
    """

    messages: list[Message]
    tools: list | None = None
    # variables of the chat template, of this record
    template_args: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    begins: bool = True
    ends: bool = True
    divided: bool = False
    token_ids: list[int] | None = None
    supervised: list[bool] = field(default_factory=list)  # of each token id


class Format(NamedTuple):
    """The fields of a format, and a function that converts (record, label, chat template) to an
    example."""

    fields: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Record, str, str], Example]


def to_example(
    record: Record, where: str, template: str, form: str | None = None
) -> Example:
    """Convert a record; raise ValueError naming the record if it has no supported format, or
    invalid values.

    template: the jinja source, whose style decides how an instruction and its input become one
    message.
    """
    form = form or detect_format(record, where)
    missing = []
    for name in FORMATS[form].fields:
        if name not in record:
            missing.append(name)
    if missing:
        raise ValueError(
            f"{where}: --data.format {form} needs the fields {', '.join(missing)}"
        )
    example = FORMATS[form].convert(record, where, template)
    return replace(example, template_args=read_template_args(record, where))


def read_template_args(record: Record, where: str) -> dict[str, Any]:
    """Return the variables of the chat template that a record sets, as in transformers and TRL."""
    variables = record.get(TEMPLATE_ARGS)
    if isinstance(variables, str):
        if variables.strip():
            variables = parse_json(variables, f"{where}: {TEMPLATE_ARGS}")
        else:
            variables = None
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise ValueError(
            f"{where}: {TEMPLATE_ARGS} must be an object, found {json_type(variables)}"
        )
    reserved = []
    for name in variables:
        if name in RESERVED_VARIABLES or not name.isidentifier():
            reserved.append(name)
    if reserved:
        raise ValueError(
            f"{where}: {TEMPLATE_ARGS} cannot set {reserved[0]!r}; give it as a field of the record"
        )
    # data sets with columns write null for a variable that a record does not set
    return {name: value for name, value in variables.items() if value is not None}


def unused_fields(record: Record, read: Collection[str]) -> list[str]:
    """Return the fields of a record that have a value, but are not in `read`; those of messages as
    messages[].name."""
    unused = {}  # a dict keeps the order
    for name, value in record.items():
        if name not in read:
            if value not in EMPTY_VALUES:
                unused[name] = None
            continue
        turns = value if isinstance(value, list) else []
        for turn in turns:
            if not isinstance(turn, dict) or not turn.keys() & {"role", "from"}:
                continue
            for key, inner in turn.items():
                if key not in MESSAGE_FIELDS and inner not in EMPTY_VALUES:
                    unused[f"{name}[].{key}"] = None
    return list(unused)


def read_label(value: Any) -> bool | None:
    """Return whether a label means that an answer is desirable; None if it has another meaning."""
    # tables may have 1.0 for 1
    return LABELS.get(str(value).lower().removesuffix(".0"))


def preference_kind(record: Record) -> str | None:
    """Return "pairs" for a record with a chosen and a rejected answer, "labels" for a labelled
    answer, otherwise None."""
    if record.get("chosen") is not None and record.get("rejected") is not None:
        return "pairs"
    has_answer = any(
        record.get(name) for name in ("completion", "messages", "conversations")
    )
    if has_answer and read_label(record.get("label")) is not None:
        return "labels"
    return None


def detect_format(
    record: Record,
    where: str,
    missing: Sequence[str] = (),
    mapped: Collection[str] = (),
) -> str:
    """Return the name of a record's format; raise ValueError if no format matches its fields, or if
    it has a label.

    missing: names in --data.columns that the record does not have, for the message. mapped: the
    fields of formats that --data.columns fills.
    """
    if preference_kind(record) == "labels":
        reason = (
            "the field label says whether the answer is desirable, and --objective sft would learn "
            "both kinds"
        )
        raise ValueError(
            f"{where}: {reason}; add --objective kto, or name the format with --data.format to "
            "ignore it"
        )
    # a table may have columns of several formats, which are empty in the records of the others
    num_filled = {}
    for name, form in FORMATS.items():
        if all(field in record for field in form.fields):
            filled = [field for field in form.fields if record[field] not in (None, "")]
            num_filled[name] = len(filled)
    # first the formats with the most required fields in --data.columns
    num_mapped = {}
    for name in num_filled:
        num_mapped[name] = sum(
            record[field] not in (None, "")
            for field in FORMATS[name].fields
            if field in mapped
        )
    in_order = sorted(num_filled, key=lambda name: -num_mapped[name])
    # the text is often the rendered example: a record with an empty answer is not one of that text.
    # Token ids beside it may be of another tokenizer.
    others = []
    for name in in_order:
        if name not in ("text", "tokens") or num_mapped[name]:
            others.append(name)
    for name in others:
        if num_filled[name] == len(FORMATS[name].fields):
            return name
    for name in (*others, *in_order):
        if num_filled[name]:
            return name
    if in_order:
        return in_order[0]

    raise ValueError(f"{where}: {_without_format(record, where, missing)}")


def _without_format(record: Record, where: str, missing: Sequence[str]) -> str:
    """Return why a record has no format, and what to do. missing: as for `detect_format`."""
    # the remedies are tried from the most general to the most specific, and the last
    # one that applies is shown
    field_names = ", ".join(map(repr, record))[:200] or "none"
    formats = "; ".join(
        f"{name}: {', '.join(form.fields)}" for name, form in FORMATS.items()
    )
    remedy = f"map the fields with --data.columns OURS=THEIRS,... (formats: {formats})"
    texts = [name for name, value in record.items() if isinstance(value, str)]
    if len(texts) == 2:
        remedy = (
            "if they are question and answer: --data.columns "
            f"'prompt={texts[0]},completion={texts[1]}'"
        )
    if re.search(r"\.[ct]sv\b", where):
        # a name that is long, or ends like a sentence, is a value
        is_record = any(
            len(name) > 40 or name.rstrip().endswith(("?", ".")) for name in record
        )
        names = "the first line of a table must have the names of its fields"
        if is_record:
            remedy = f"its first line seems to be a record; {names}: question,answer"
        else:
            remedy = f"{remedy}; {names}"
    absent = _one_missing_field(record)
    if absent:
        missing_field = f"the field {absent[1]!r} is missing, which belongs to"
        missing_field = f"{missing_field} {', '.join(absent[0])}"
        # two texts are more often a question and an answer under other names
        remedy = f"{remedy}; {missing_field}" if len(texts) == 2 else missing_field
    name = field_with_records(record)
    if name is not None:
        count = f"{len(record[name]):,}"
        remedy = (
            f"its field {name!r} has {count} records: write each on a line of its own, in a .jsonl "
            "file"
        )
    if missing:
        remedy = (
            f"--data.columns OURS=THEIRS: it has no field {', '.join(map(repr, missing))}"
        )
    if preference_kind(record) == "pairs":
        remedy = "these are preferences: add --objective dpo"
    return f"no known format has the fields {field_names}; {remedy}"


def _one_missing_field(record: Record) -> tuple[list[str], str] | None:
    """Return the fields that a record has of a format, and the only one that it lacks; None if
    there is no such format."""
    for form in FORMATS.values():
        present = []
        for name in form.fields:
            if record.get(name) is not None:
                present.append(name)
        absent = []
        for name in form.fields:
            if name not in present:
                absent.append(name)
        if present and len(absent) == 1:
            return present, absent[0]
    return None


def field_with_records(record: Record) -> str | None:
    """Return the field that holds a list of records, if an object is no record itself; None if
    there is none."""
    for name, value in record.items():
        if (
            isinstance(value, list)
            and value
            and isinstance(value[0], dict)
            and name not in KNOWN_FIELDS
        ):
            return name
    return None


def rename_columns(record: Record, columns: dict[str, str]) -> Record:
    """Rename the fields of a record; columns: the format's field name -> the name in the file.

    A field that differs from a format's field only in capitals and spaces, such as "Question ",
    gets the format's name.
    """
    others = dict(record)
    renamed = {}
    for name, file_name in columns.items():
        others.pop(file_name, None)
        if file_name in record:
            renamed[name] = record[file_name]
    for name in [name for name in others if name not in KNOWN_FIELDS]:
        plain = name.strip().lower()
        if plain in KNOWN_FIELDS and plain not in others and plain not in renamed:
            renamed[plain] = others.pop(name)
    return others | renamed


def strip_end_token(text: str, own: Iterable[str] = ()) -> str:
    """Remove an end token that the file has written after an answer; own: those of the
    tokenizer."""
    stripped = text.rstrip()
    for end in (*END_TOKENS, *own):
        if stripped.endswith(end):
            if end == "</s>" and "<s>" in stripped:  # HTML's strikethrough
                return text
            # a space before it belongs to the end token
            return stripped.removesuffix(end).rstrip()
    return text


def system_message(record: Record, where: str) -> list[Message]:
    """Return the record's system prompt as a list of one message, or an empty list."""
    text = text_field(record, "system", where)
    if text.strip():
        return [{"role": "system", "content": text}]
    return []


def with_system(messages: list[Message], record: Record, where: str) -> list[Message]:
    """Return messages with the record's system prompt in front, unless they begin with one of their
    own."""
    system = system_message(record, where)
    if messages[0]["role"] in SYSTEM_ROLES:
        return messages
    return system + messages


def _single_turn(
    question_field: str,
    answer_field: str,
    context_field: str | None = None,
    prefix: str = "",
) -> Callable[[Record, str, str], Example]:
    """Return the converter of a format with one question and one answer, given the names of its
    fields.

    prefix: the text before the question. Earlier turns may come from the field `history`.
    """

    def convert(record: Record, where: str, template: str) -> Example:
        tools = read_tools(record.get("tools"), where)
        question = record.get(question_field)
        answer = record.get(answer_field)
        # both are lists of messages, as in TRL: answers of the prompt are not learned
        if isinstance(question, list) and isinstance(answer, list):
            prompt = check_messages(question, where)
            for message in prompt:
                if message["role"] == "assistant":
                    message["train"] = False
            return Example(
                with_system(prompt + check_messages(answer, where), record, where), tools
            )
        text = prefix + text_field(record, question_field, where)
        if context_field:
            text = user_content(text, text_field(record, context_field, where), template)
        messages = [
            *system_message(record, where),
            *earlier_turns(record, where),
            {"role": "user", "content": text},
        ]
        reply = {"role": "assistant", "content": text_field(record, answer_field, where)}
        reasoning = {}
        for name in REASONING_FIELDS:
            if name in record:
                reasoning[name] = record[name]
        reply |= text_fields(reasoning, where)
        return Example([*messages, reply], tools)

    return convert


def _is_pair_of_texts(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return isinstance(pair[0], str) and isinstance(pair[1], str)


def earlier_turns(record: Record, where: str) -> list[Message]:
    """Return the earlier turns of a record with one question, as messages; its field `history` has
    pairs of instruction and answer."""
    history = record.get("history")
    if history in (None, "", []):
        return []
    if not isinstance(history, list) or not all(map(_is_pair_of_texts, history)):
        raise ValueError(
            f"{where}: history must be a list of pairs of texts, an instruction and its answer"
        )
    messages = []
    for question, answer in history:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return messages


def _messages(record: Record, where: str, template: str) -> Example:
    messages = with_system(check_messages(record["messages"], where), record, where)
    return Example(messages, read_tools(record.get("tools"), where))


def _conversations(record: Record, where: str, template: str) -> Example:
    """Convert ShareGPT's turns with `from` and `value`, or LIMA's list of alternating texts."""
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: 'conversations' must be a list with at least one turn")
    if all(isinstance(turn, str) for turn in turns):
        messages = system_message(record, where)
        for number, text in enumerate(turns):
            role = "assistant" if number % 2 else "user"
            messages.append({"role": role, "content": text})
        return Example(messages, read_tools(record.get("tools"), where))
    messages = []
    for number, turn in enumerate(turns):
        message = sharegpt_turn(turn, f"{where}: turn {number}")
        last = messages[-1] if messages else {}
        # an answer and its tool call
        if message["role"] == last.get("role") == "assistant":
            messages[-1] = joined_messages(last, message, f"{where}: turn {number}")
        else:
            messages.append(message)
    return Example(
        with_system(messages, record, where), read_tools(record.get("tools"), where)
    )


_GUANACO = re.compile(r"###\s*(Human|Assistant)\s*:")


def _text(record: Record, where: str, template: str) -> Example:
    """Convert guanaco's `### Human: ... ### Assistant: ...`, or plain text."""
    text = text_field(record, "text", where)
    # the pattern's group keeps the speakers: text before, speaker, content, speaker, content, ...
    before, *parts = _GUANACO.split(text)
    speakers = parts[::2]
    contents = parts[1::2]
    # text that only mentions these marks, but does not begin with them, stays a text
    if not (text.lstrip().startswith("###") and "Assistant" in speakers):
        return Example(
            messages=[],
            text=text,
            begins=record.get("begins") is not False,
            ends=record.get("ends") is not False,
            # only parts of a text file say whether they have the beginning
            divided="begins" in record or len(text) > LONG_TEXT,
        )
    messages = []
    system = re.sub(r"^\s*#+\s*System\s*:", "", before).strip()
    if system:
        messages.append({"role": "system", "content": system})
    roles = {"Human": "user", "Assistant": "assistant"}
    for speaker, content in zip(speakers, contents, strict=True):
        messages.append({"role": roles[speaker], "content": content.strip()})
    return Example(messages)


# fields of tokenized records that say which tokens are learned; TRL multiplies the first two
LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")


def _token_ids(record: Record, where: str, template: str) -> Example:
    """Convert token ids and labels as the models of transformers take them: a label is its token's
    id, or -100.

    Without labels, the masks of TRL's data sets have 1 at the tokens that are learned.
    """
    ids = _integers(record, "input_ids", where)
    labels = ids
    if record.get("labels") is not None:
        labels = _integers(record, "labels", where)
    mask = [1] * len(ids)
    if record.get("attention_mask") is not None:
        mask = _integers(record, "attention_mask", where)
    if not len(ids) == len(labels) == len(mask):
        raise ValueError(
            f"{where}: input_ids, labels and attention_mask must have the same length"
        )
    learned = [1] * len(ids)
    for name in LOSS_MASKS:
        if record.get(name) is None or record.get("labels") is not None:
            continue
        loss_mask = _integers(record, name, where)
        if len(loss_mask) != len(ids):
            raise ValueError(f"{where}: input_ids and {name} must have the same length")
        learned = [before and now for before, now in zip(learned, loss_mask, strict=True)]
    token_ids = []
    supervised = []
    for token, label, is_attended, is_learned in zip(
        ids, labels, mask, learned, strict=True
    ):
        if not is_attended:  # padding
            continue
        if label not in (NO_TARGET, token):
            raise ValueError(
                f"{where}: the label {label} is neither -100 nor the token id at its place"
            )
        token_ids.append(token)
        supervised.append(label != NO_TARGET and bool(is_learned))
    if min(token_ids, default=0) < 0:
        raise ValueError(f"{where}: input_ids has a negative token id")
    return Example([], token_ids=token_ids, supervised=supervised)


def _integers(record: Record, name: str, where: str) -> list[int]:
    values = record[name]
    # bool is a subclass of int, but no token id
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{where}: field {name!r} must be a list of whole numbers")
    return values


# of all formats with one question and one answer
_OF_SINGLE_TURNS = ("system", "history", *REASONING_FIELDS)
FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), ("tools",), _messages),
    "sharegpt": Format(("conversations",), ("system", "tools"), _conversations),
    "alpaca": Format(
        ("instruction", "output"),
        ("input", *_OF_SINGLE_TURNS),
        _single_turn("instruction", "output", "input"),
    ),
    "dolly": Format(
        ("instruction", "response"),
        ("context", *_OF_SINGLE_TURNS),
        _single_turn("instruction", "response", "context"),
    ),
    "prompt": Format(
        ("prompt", "completion"),
        _OF_SINGLE_TURNS,
        _single_turn("prompt", "completion"),
    ),
    "question": Format(
        ("question", "answer"),
        _OF_SINGLE_TURNS,
        _single_turn("question", "answer"),
    ),
    "summary": Format(
        ("dialogue", "summary"),
        _OF_SINGLE_TURNS,
        _single_turn("dialogue", "summary", prefix="Summarize this dialogue:\n\n"),
    ),
    "text": Format(("text",), ("begins", "ends"), _text),
    # last: records of tokenized data sets may still have the text, and ids of another tokenizer
    "tokens": Format(("input_ids",), ("labels", "attention_mask", *LOSS_MASKS), _token_ids),
}
KNOWN_FIELDS = {"chosen", "rejected", "label"}.union(
    *(form.fields + form.optional for form in FORMATS.values())
)


def has_other_system(record: Record, example: Example) -> bool:
    """Return whether a record has a system prompt that its conversation lacks, since that begins
    with one of its own."""
    text = record.get("system")
    if not isinstance(text, str) or not text.strip() or not example.messages:
        return False
    for message in example.messages:
        if message["role"] in SYSTEM_ROLES and message["content"] == text:
            return False
    return True
