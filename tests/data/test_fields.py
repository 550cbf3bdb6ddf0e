"""Fields of records: which are read, what is learned of joined answers, and which are named because
nothing reads them."""

import json

import pytest
from quirks import QUIRKS

from litft.args import DataArgs
from litft.data.dataset import load_data
from litft.data.encoder import Encoder
from litft.data.formats import to_example
from litft.data.notes import EMPTY_PROMPT, RESULTS_LOST, SYSTEM_LOST, TOOLS_LOST
from litft.data.sample import SUPERVISED
from litft.data.tokenizer import Tokenizer
from litft.training.data_report import file_line

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def tokenizer(tiny):
    """A tokenizer with the template whose last answer has a thought."""
    tokenizer = Tokenizer(tiny)
    tokenizer.add_tokens(["<|turn|>", "<|end|>"])
    tokenizer.use_template(QUIRKS["an empty thought"])
    return tokenizer


def learned(tokenizer, record, **settings):
    """Return the text that the loss is computed on, and what is noted."""
    encoded = Encoder(tokenizer, 500, **settings)("here", record)
    assert encoded.error is None
    (sample,) = encoded.samples
    ids = [int(x & 0x0FFFFFFF) for x in sample if x & SUPERVISED]
    return tokenizer.decode(ids, skip_special=False), encoded


def chat(**fields):
    """Return a record of messages, whose answer has these fields."""
    answer = {"role": "assistant", "content": "Warm."} | fields
    return {"messages": [{"role": "user", "content": "And?"}, answer]}


@pytest.mark.parametrize(
    "reasoning, expected",
    [
        ("learn", "Warm.<|end|>"),
        ("mask", "Warm.<|end|>"),
        ("drop", "Warm.<|end|>"),
        ("learn_empty", "<think>\n\n</think>\n\nWarm.<|end|>"),
    ],
)
def test_an_empty_thought_is_learned_on_demand_only(tokenizer, reasoning, expected):
    text, encoded = learned(tokenizer, chat(), reasoning=reasoning)
    assert text == expected
    assert (encoded.answers, encoded.empty_thoughts) == (1, reasoning != "learn_empty")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_learned_masked_or_dropped(tokenizer, field):
    record = chat(**{field: "So."})
    assert learned(tokenizer, record)[0] == "<think>\nSo.\n</think>\n\nWarm.<|end|>"
    assert learned(tokenizer, record, reasoning="mask")[0] == "Warm.<|end|>"
    text, encoded = learned(tokenizer, record, reasoning="drop")
    assert text == "Warm.<|end|>" and encoded.empty_thoughts == 1
    single = {"prompt": "And?", "completion": "Warm.", field: "So."}
    assert learned(tokenizer, single)[0] == "<think>\nSo.\n</think>\n\nWarm.<|end|>"


def test_a_dry_run_counts_empty_thoughts_and_fields_that_are_not_used(tokenizer, tmp_path):
    records = [chat() | {"source": "web", "empty": None} for _ in range(12)]
    records[3]["messages"][0]["audio"] = "a.wav"
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    data = load_data(
        DataArgs([str(tmp_path / "data.jsonl")]), tokenizer, tokenizer.vocab_size, 500
    )
    line = file_line(next(iter(data.reports.values())))
    assert "12 of 12 answers have an empty thought: not learned" in line
    assert line.endswith(
        "fields that are not used: source in 12 records, messages[].audio in 1 record"
    )


def test_variables_of_the_template_come_with_the_record(tokenizer):
    """As in transformers: SmolLM3's data for /no_think says so in this field."""
    tokenizer.use_template(
        "{%- for m in messages %}{{ m.role + (' quick' if quick else '') + ': ' + m.content + "
        "'<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{ 'assistant' + (' quick' if "
        "quick else '') + ': ' }}{% endif %}"
    )
    encoder = Encoder(tokenizer, 500)
    for value in (
        {"quick": True},
        json.dumps({"quick": True}),
        {"quick": True, "slow": None},
    ):
        (sample,) = encoder("here", chat() | {"chat_template_kwargs": value}).samples
        text = tokenizer.decode([int(x & 0x0FFFFFFF) for x in sample], skip_special=False)
        assert "user quick: And?<|end|>assistant quick: Warm.<|end|>" in text
    assert (
        "must be an object" in encoder("here", chat() | {"chat_template_kwargs": 3}).error
    )


def test_earlier_turns_of_alpaca():
    record = {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]}
    roles = [
        (message["role"], message["content"])
        for message in to_example(record, "here", "").messages
    ]
    assert roles == [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    with pytest.raises(ValueError, match="history must be a list of pairs"):
        to_example(record | {"history": ["a"]}, "here", "")


def test_openais_older_calls_are_read():
    call = {"name": "weather", "arguments": '{"town": "Bonn"}'}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Let me see.", "function_call": call},
        {"role": "function", "name": "weather", "content": "21"},
        {"role": "assistant", "content": "21 °C"},
    ]
    example = to_example({"messages": messages}, "here", "")
    assert example.messages[1]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"town": "Bonn"},
    }
    assert (
        example.messages[1]["content"] == "Let me see."
        and example.messages[2]["role"] == "tool"
    )


def test_parts_with_a_thought_are_read():
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "So."}]},
        {"type": "text", "text": "Warm."},
    ]
    (_, answer) = to_example(chat(content=parts), "here", "").messages
    assert (answer["content"], answer["reasoning_content"]) == ("Warm.", "So.")


def test_answers_in_the_prompt_are_not_learned(tokenizer):
    """As TRL's SFTTrainer does with prompt and completion of messages."""
    prompt = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    record = {"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}
    assert learned(tokenizer, record)[0] == "d<|end|>"


@pytest.mark.parametrize("empty", ["", None, " "])
def test_an_empty_prompt_is_counted(tokenizer, empty):
    assert learned(tokenizer, {"prompt": empty, "completion": "d"})[1].notes == [
        EMPTY_PROMPT
    ]


@pytest.mark.parametrize(
    "weights, expected",
    [((1, 0), "Yes."), ((0, 1), "<call>"), ((1, 1), "Yes.<call>"), ((0, 0), "")],
)
def test_each_part_of_a_joined_answer_has_its_weight(tokenizer, weights, expected):
    """An answer and the call after it are one turn of the assistant."""
    tokenizer.use_template(QUIRKS["plain"])
    call = json.dumps({"name": "weather", "arguments": {}})
    turns = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "Yes.", "weight": weights[0]},
        {"from": "function_call", "value": call, "weight": weights[1]},
    ]
    record = {"conversations": turns, "tools": [TOOL]}
    if weights == (0, 0):
        assert not Encoder(tokenizer, 500)("here", record).samples
        return
    text = learned(tokenizer, record)[0]
    assert text.replace("weather {}</call><|end|>", "") == expected
    assert text.endswith("<|end|>") == bool(weights[1])


def test_tools_that_the_template_leaves_out_are_noted(tokenizer):
    assert learned(tokenizer, chat() | {"tools": [TOOL]})[1].notes == []
    tokenizer.use_template(
        "{%- for m in messages %}{{ m.role + m.content + '<|end|>' }}{%- endfor %}"
    )
    assert TOOLS_LOST in learned(tokenizer, chat() | {"tools": [TOOL]})[1].notes


def test_results_that_the_template_leaves_out_are_noted(tokenizer):
    """The calls are text, so that no call is lost."""
    first, answer = chat()["messages"]
    call = {"role": "assistant", "content": "CALL weather(Oslo)"}
    result = {"role": "tool", "content": "sunny, 21 degrees"}
    record = {"messages": [first, call, result, answer]}
    tokenizer.use_template(
        "{%- for m in messages %}{%- if m.role in ('user', 'assistant') %}"
        "{{ m.role + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    )
    assert RESULTS_LOST in learned(tokenizer, record)[1].notes
    later = {"role": "system", "content": "Be brief."}
    for messages, is_noted in (
        ([first, answer, later, first, answer], True),
        ([first, answer], False),
    ):
        notes = learned(tokenizer, {"messages": messages})[1].notes
        assert (SYSTEM_LOST in notes) == is_noted
    tokenizer.use_template(
        "{%- for m in messages %}{{ m.role + m.content + '<|end|>' }}{%- endfor %}"
    )
    assert RESULTS_LOST not in learned(tokenizer, record)[1].notes


@pytest.mark.parametrize("reasoning", ["", " \n"])
def test_blank_reasoning_is_none(tokenizer, reasoning):
    text, encoded = learned(tokenizer, chat(reasoning_content=reasoning))
    assert text == "Warm.<|end|>" and encoded.empty_thoughts == 1


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"reasoning_content": ["step"]}, "reasoning_content must be text, found an array"),
        ({"reasoning": "a", "thinking": "b"}, "different reasoning in two fields"),
        (
            {
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "thinking", "thinking": "b"},
                ]
            },
            "reasoning in several places",
        ),
    ],
)
def test_reasoning_that_cannot_be_read_is_an_error(tokenizer, fields, message):
    assert message in Encoder(tokenizer, 500)("here", chat(**fields)).error


@pytest.mark.parametrize("name", ["messages", "self", "day", "tools"])
def test_reserved_variables_are_an_error_of_the_record(tokenizer, name):
    assert (
        "cannot set"
        in Encoder(tokenizer, 500)(
            "here", chat() | {"chat_template_kwargs": {name: []}}
        ).error
    )


def test_variables_that_the_template_does_not_have_are_named(tokenizer):
    record = chat() | {
        "chat_template_kwargs": {
            "enable_thinkin": False,
            "documents": [],
            "enable_thinking": True,
        }
    }
    assert learned(tokenizer, record)[1].unused == [
        f"chat_template_kwargs.{name}" for name in ("enable_thinkin", "documents")
    ]


def test_a_joined_answer_is_found_after_its_reasoning(tokenizer):
    turns = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "Yes", "reasoning_content": "Yes, and More", "weight": 0},
        {"from": "gpt", "value": "More</s>"},
    ]
    assert learned(tokenizer, {"conversations": turns})[0] == "More<|end|>"
    call = json.dumps({"name": "weather", "arguments": ""})
    calls = [
        {"from": "function_call", "value": call, "weight": weight} for weight in (1, 0)
    ]
    tokenizer.use_template(QUIRKS["plain"])
    record = {
        "conversations": [turns[0], {"from": "gpt", "value": "b", "weight": 0}, *calls],
        "tools": [TOOL],
    }
    assert (
        "the calls of one turn have different weights"
        in Encoder(tokenizer, 500)("here", record).error
    )


def test_a_second_system_prompt_is_named(tokenizer):
    """A conversation with a system prompt of its own keeps that; the field of the record is not
    read."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    assert learned(tokenizer, {"messages": messages, "system": "Be long."})[1].unused == [
        "system"
    ]
    assert learned(tokenizer, {"messages": messages, "system": "Be brief."})[1].unused == []
    assert (
        learned(tokenizer, {"messages": messages[1:], "system": "Be long."})[1].unused == []
    )
