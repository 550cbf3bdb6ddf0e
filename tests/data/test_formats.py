"""Records of every format become the same conversation; errors name bad records."""

import json

import pytest

from litft.args import Formats
from litft.data.formats import FORMATS, rename_columns, strip_end_token, to_example
from litft.data.readers import read_records

CHAT = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "3"}]
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = [
    dict(
        m,
        content=[
            {"type": "text", "text": m["content"][:2]},
            {"type": "text", "value": m["content"][2:]},
        ],
    )
    for m in CHAT
]
TOOL = {"name": "add", "parameters": {"type": "object"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_CHAT = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three."},
]
SHAREGPT = [
    {"from": "human", "value": "1+2?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
    {"from": "observation", "value": "3"},
    {"from": "gpt", "value": "Three."},
]
ARGUMENTS_AS_TEXT = {
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}


@pytest.mark.parametrize(
    "form, record, expected",
    [
        ("messages", {"messages": CHAT}, CHAT),
        ("messages", {"messages": PARTS}, CHAT),
        ("messages", {"messages": [SYSTEM, *CHAT]}, [SYSTEM, *CHAT]),
        ("messages", {"messages": CHAT, "system": "Be brief."}, [SYSTEM, *CHAT]),
        ("messages", {"messages": [SYSTEM, *CHAT], "system": "Be long."}, [SYSTEM, *CHAT]),
        (
            "messages",
            {
                "messages": [
                    TOOL_CHAT[0],
                    dict(TOOL_CHAT[1], content=None, tool_calls=[ARGUMENTS_AS_TEXT]),
                ]
            },
            TOOL_CHAT[:2],
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "human", "value": "Add 1 and 2."},
                    {"from": "gpt", "value": "3"},
                ]
            },
            CHAT,
        ),
        ("sharegpt", {"conversations": ["Add 1 and 2.", "3"], "source": "lima"}, CHAT),
        (
            "sharegpt",
            {"conversations": SHAREGPT, "tools": json.dumps([TOOL]), "system": "Be brief."},
            [SYSTEM, *TOOL_CHAT],
        ),
        (
            "prompt",
            {"prompt": [SYSTEM, *CHAT[:1]], "completion": CHAT[1:], "system": "Be long."},
            [SYSTEM, *CHAT],
        ),
        ("alpaca", {"instruction": "Add 1 and 2.", "input": "", "output": "3"}, CHAT),
        (
            "alpaca",
            {"instruction": "Add 1 and 2.", "output": "3", "system": "Be brief."},
            [SYSTEM, *CHAT],
        ),
        (
            "dolly",
            {
                "instruction": "Add 1 and 2.",
                "context": "",
                "response": "3",
                "category": "qa",
            },
            CHAT,
        ),
        ("prompt", {"prompt": "Add 1 and 2.", "completion": "3"}, CHAT),
        ("prompt", {"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT),
        ("question", {"question": "Add 1 and 2.", "answer": "3"}, CHAT),
        ("text", {"text": "### Human: Add 1 and 2.### Assistant: 3"}, CHAT),
        ("text", {"text": "### Human: Add 1 and 2.\n### Assistant: 3"}, CHAT),
    ],
)
def test_a_format_is_detected_and_converted_to_messages(form, record, expected):
    assert to_example(record, "here", "").messages == expected
    assert to_example(record, "here", "", form).messages == expected


def test_every_format_can_be_selected_by_name():
    assert tuple(FORMATS) == Formats.__args__


def test_dialogues_and_plain_text():
    example = to_example({"dialogue": "A: hi", "summary": "They greet."}, "here", "")
    assert (
        example.messages[0]["content"].endswith("A: hi")
        and example.messages[1]["content"] == "They greet."
    )
    assert to_example({"text": "Once upon a time"}, "here", "").text == "Once upon a time"
    older = {
        "from": "gpt",
        "value": "",
        "function_call": {"name": "add", "arguments": '{"a": 1}'},
    }
    turns = [SHAREGPT[0], older, *SHAREGPT[2:]]
    assert to_example({"conversations": turns}, "here", "").messages == TOOL_CHAT
    tools = to_example(
        {"conversations": SHAREGPT, "tools": json.dumps([TOOL])}, "here", ""
    ).tools
    assert tools == [{"type": "function", "function": TOOL}]
    for record in (
        {"prompt": "Add 1 and 2.", "completion": "3"},
        {"conversations": ["Add 1 and 2.", "3"]},
    ):
        assert to_example(record | {"tools": [TOOL]}, "here", "").tools == tools


def test_an_input_is_formatted_for_the_template():
    record = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    assert to_example(record, "here", "").messages[0]["content"] == "Add.\n\n1, 2"
    assert (
        to_example(record, "here", "### Response:").messages[0]["content"]
        == "Add.\n\n### Input:\n1, 2"
    )
    # as in LLaMA-Factory: no empty lines before an input alone
    alone = record | {"instruction": ""}
    assert to_example(alone, "here", "").messages[0]["content"] == "1, 2"


def test_unsupervised_turns_are_marked():
    for mark in ({"train": False}, {"loss_weight": 0.0}, {"weight": 0}):
        messages = to_example({"messages": [CHAT[0], CHAT[1] | mark]}, "here", "").messages
        assert messages[1]["train"] is False and "train" not in messages[0]


def test_consecutive_turns_of_one_speaker_are_joined():
    turns = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b", "weight": 1},
        {"from": "gpt", "value": "c", "weight": 0},
    ]
    message = to_example({"conversations": turns}, "here", "").messages[-1]
    parts = [{"text": "b", "train": True}, {"text": "c", "train": False}]
    assert message == {"role": "assistant", "content": "b\n\nc", "parts": parts}
    masked = [turn | {"weight": 0} for turn in turns]
    message = to_example({"conversations": masked}, "here", "").messages[-1]
    assert message == {"role": "assistant", "content": "b\n\nc", "train": False}


def test_no_content_is_lost():
    guanaco = to_example(
        {"text": "### System: Be nice\n### Human: a### Assistant: b"}, "here", ""
    )
    assert guanaco.messages[0] == {"role": "system", "content": "Be nice"}
    from_lists = to_example(
        {"prompt": CHAT[:1], "completion": CHAT[1:], "system": "Be brief."}, "here", ""
    )
    assert from_lists.messages == [SYSTEM, *CHAT]
    answer = {"role": "assistant", "content": "3", "reasoning_content": "1+2"}
    assert to_example({"messages": [CHAT[0], answer]}, "here", "").messages[-1] == answer
    with pytest.raises(ValueError, match="field 'system' must be text"):
        to_example({"instruction": "a", "output": "b", "system": 3}, "here", "")


def test_empty_columns_do_not_determine_the_format():
    for empty in (None, ""):
        record = {
            "messages": empty,
            "instruction": "Add 1 and 2.",
            "output": "3",
            "input": empty,
            "system": empty,
        }
        assert to_example(record, "here", "").messages == CHAT


def test_capitals_and_spaces_of_field_names_do_not_matter():
    assert rename_columns({"Question": "a", "Answer ": "b", "ID": 1}, {}) == {
        "question": "a",
        "answer": "b",
        "ID": 1,
    }
    exact = {"text": "a", "Text": "b"}
    assert rename_columns(exact, {}) == exact
    assert rename_columns({"Text": "b", "Notes": "c"}, {"text": "Notes"}) == {
        "Text": "b",
        "text": "c",
    }


@pytest.mark.parametrize(
    "record, message",
    [
        ({"foo": 1}, "no known format has the fields 'foo'.*--data.columns OURS=THEIRS"),
        (
            {"messages": [{"speaker": "a", "text": "b"}]},
            "message 0 has the fields 'speaker', 'text'; litft needs role and",
        ),
        ({"instruction": "a", "output": 3}, "field 'output' must be text, found a number"),
        ({"messages": []}, "at least one message"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "message 0 has the role 'robot'; known: system",
        ),
        (
            {"messages": [{"role": "human", "content": "a"}]},
            "the role 'human'; write 'user'",
        ),
        (
            {"messages": [{"role": "Bot", "content": "a"}]},
            "the role 'Bot'; write 'assistant'",
        ),
        (
            {"instruction": "a", "answer_text": "b"},
            "no known format has the fields 'instruction', 'answer_text'; [^(]*$",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "message 0 must have text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of type 'image_url', but litft reads",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "weight": 0.5}]},
            "weight is 0.5; use true .1. to compute the loss",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": 3}]},
            "tool_calls must be a list, found a number",
        ),
        ({"messages": CHAT, "tools": "{"}, "tools: invalid JSON"),
        ({"messages": CHAT, "tools": {"a": 1}}, "tools must be a list of objects"),
        (
            {"conversations": [{"from": "cat", "value": "a"}]},
            "turn 0 is from 'cat'; known: human",
        ),
        (
            {"conversations": [{"from": "gpt"}]},
            "turn 0 must have text as its 'value', found null",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "add"}]},
            "turn 0: invalid JSON",
        ),
        (
            {
                "conversations": [
                    {"from": "function_call", "value": '{"name": "add", "args": {"a": 1}}'}
                ]
            },
            "the call of add has no arguments, but args; name them arguments",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"function": {"name": "add"}, "arguments": {"a": 1}}
                        ],
                    },
                ]
            },
            "the call of add has no arguments, but arguments; .* beside the name",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": '{"name": "clock"}'},
                    {"from": "gpt", "value": "I called it."},
                ]
            },
            "turn 2: a call is followed by text of the same speaker",
        ),
        ({"conversations": []}, "at least one turn"),
        ({"prompt": 1, "completion": "a"}, "field 'prompt' must be text, found a number"),
    ],
)
def test_errors_name_the_record_and_the_reason(record, message):
    with pytest.raises(ValueError, match=message) as error:
        to_example(record, "data.json, record 7", "")
    assert str(error.value).startswith("data.json, record 7")


@pytest.mark.parametrize("name", ["arguments", "parameters"])
def test_both_names_of_the_arguments_of_a_call_are_read(name):
    """Llama calls them parameters; a table has both columns, one of them empty."""
    call = {"name": "add", "arguments": None, name: {"a": 1}}
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": json.dumps(call)},
    ]
    message = to_example({"conversations": turns}, "here", "").messages[-1]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "name, form, count, turns",
    [
        ("alpaca_2k.json", "alpaca", 2000, 4000),
        ("sharegpt_500.json", "sharegpt", 500, None),
        ("messages_500.jsonl", "messages", 500, 1000),
        ("samsum_1400.jsonl", "prompt", 1400, 2800),
        ("tool_calls_300.json", "sharegpt", 300, None),
        ("gsm8k_500.jsonl", "question", 500, 1000),
        ("wikitext2_valid.txt", "text", 1, 0),
    ],
)
def test_real_files(shared, name, form, count, turns):
    from litft.data.formats import detect_format

    records = list(read_records(shared / "data" / name))
    assert len(records) == count and {
        detect_format(record, where) for where, record in records
    } == {form}
    messages = [to_example(record, where, "").messages for where, record in records]
    assert turns is None or sum(map(len, messages)) == turns


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        # an empty answer is that of its format, also beside a rendered text
        ({"instruction": "a", "input": "", "output": "", "text": "a text"}, "alpaca"),
        ({"instruction": "", "input": "b", "output": "c", "text": "a text"}, "alpaca"),
        ({"prompt": "a", "completion": None, "text": "a text"}, "prompt"),
        # token ids beside a text may be of another tokenizer
        ({"text": "a text", "input_ids": [1, 2]}, "text"),
        ({"text": "", "input_ids": [1, 2]}, "tokens"),
        # columns of another format are empty
        ({"instruction": None, "output": None, "question": "a", "answer": "b"}, "question"),
        ({"instruction": "", "output": "", "text": "a text"}, "text"),
        ({"instruction": "", "output": ""}, "alpaca"),
        # records of two formats in one table
        ({"instruction": "a", "output": None, "context": "b", "response": "c"}, "dolly"),
        ({"instruction": "a", "output": "", "context": "b", "response": "c"}, "dolly"),
    ],
)
def test_an_empty_answer_does_not_change_the_format(record, expected):
    from litft.data.formats import detect_format

    assert detect_format(record, "here") == expected


def test_the_space_before_an_end_token_goes_with_it():
    assert strip_end_token("bad </s>\n") == "bad"
    assert strip_end_token("bad ") == "bad "
    assert strip_end_token("<s>no</s>") == "<s>no</s>"
