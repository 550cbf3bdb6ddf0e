"""Prompts to learn from rewards: what of a record is the prompt, and what reward functions get."""

import numpy as np
import pytest
from conftest import STORIES, write_records

from litft.args import DataArgs
from litft.data.dataset import load_data
from litft.data.notes import SYSTEM_LOST, TOOLS_LOST
from litft.data.prompts import to_prompt
from litft.data.tokenizer import Tokenizer

USER = {"role": "user", "content": "2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ROOM = 8


@pytest.mark.parametrize(
    ("record", "messages", "columns"),
    [
        ({"prompt": "2 + 2?", "answer": "4"}, [USER], {"answer": "4"}),
        ({"prompt": "2 + 2?"}, [USER], {}),
        ({"prompt": [SYSTEM, USER], "answer": "4"}, [SYSTEM, USER], {"answer": "4"}),
        ({"prompt": "2 + 2?", "completion": "4"}, [USER], {"answer": "4"}),
        (
            {"question": "2 + 2?", "answer": "4", "tests": ["a"]},
            [USER],
            {"question": "2 + 2?", "answer": "4", "tests": ["a"]},
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "4"}], "level": 3},
            [USER],
            {"answer": "4", "level": 3},
        ),
        ({"messages": [SYSTEM, USER], "answer": "4"}, [SYSTEM, USER], {"answer": "4"}),
        # for reward functions; other objectives learn from it
        (
            {"prompt": "2 + 2?", "completion": "4", "label": True},
            [USER],
            {"answer": "4", "label": True},
        ),
        # an earlier answer is a part of the prompt
        (
            {"messages": [USER, {"role": "assistant", "content": "5"}, USER]},
            [USER, {"role": "assistant", "content": "5"}, USER],
            {},
        ),
        (
            {"instruction": "Add.", "input": "2 and 2", "output": "4"},
            [{"role": "user", "content": "Add.\n\n2 and 2"}],
            {"instruction": "Add.", "input": "2 and 2", "output": "4", "answer": "4"},
        ),
        (
            {"prompt": "2 + 2?", "system": "Be brief."},
            [SYSTEM, USER],
            {},
        ),
        # as in TRL: the prompt that was made of the question
        (
            {"prompt": [SYSTEM, USER], "question": "2 + 2?", "answer": "4"},
            [SYSTEM, USER],
            {"question": "2 + 2?", "answer": "4"},
        ),
        (
            {"prompt": "2 + 2?", "question": "Two and two?", "answer": "4"},
            [USER],
            {"question": "Two and two?", "answer": "4"},
        ),
        # a text that the messages repeat is not
        (
            {
                "prompt": "2 + 2?",
                "messages": [SYSTEM, USER, {"role": "assistant", "content": "4"}],
            },
            [SYSTEM, USER],
            {"answer": "4"},
        ),
        # a column of its own wins
        (
            {
                "messages": [USER, {"role": "assistant", "content": "It is 4."}],
                "answer": "4",
            },
            [USER],
            {"answer": "4"},
        ),
    ],
    ids=str,
)
def test_prompts_and_columns(record, messages, columns):
    prompt = to_prompt(record, "line 1", "")
    assert prompt.example.messages == messages
    assert prompt.columns == columns


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a story"}, "this is a text to continue"),
        ({"input_ids": [1, 2]}, "this is a text to continue"),
        (
            {"messages": [{"role": "assistant", "content": "4"}]},
            "no prompt before the answer",
        ),
        ({"chosen": "4"}, "chosen"),
        (
            {
                "prompt": [
                    {"role": "user", "content": "Plural of mouse?"},
                    {"role": "assistant", "content": "The plural is"},
                ],
                "answer": "mice",
            },
            "ends with a message of the assistant",
        ),
    ],
    ids=str,
)
def test_records_without_a_prompt_are_refused(record, message):
    with pytest.raises(ValueError, match=message):
        to_prompt(record, "line 1", "")


TURNS = [{"from": "human", "value": "3 + 3?"}, {"from": "gpt", "value": "6"}]
CHAT = [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]


@pytest.mark.parametrize(
    ("mapped", "record", "content"),
    [
        ("question", {"question": "2 + 2?", "messages": CHAT}, "2 + 2?"),
        ("prompt", {"prompt": "2 + 2?", "messages": CHAT}, "2 + 2?"),
        ("question", {"question": "2 + 2?", "prompt": "3 + 3?"}, "2 + 2?"),
        ("messages", {"prompt": [USER], "messages": CHAT}, "3 + 3?"),
        ("messages", {"question": "2 + 2?", "answer": "4", "messages": CHAT}, "3 + 3?"),
        ("conversations", {"conversations": TURNS, "messages": [USER]}, "3 + 3?"),
        ("question", {"question": "2 + 2?", "answer": "4", "messages": CHAT}, "2 + 2?"),
    ],
    ids=str,
)
def test_columns_say_what_the_prompt_is(mapped, record, content):
    prompt = to_prompt(record, "line 1", "", mapped=[mapped])
    assert [message["content"] for message in prompt.example.messages] == [content]


def test_columns_of_a_file_say_what_the_prompt_is(tmp_path):
    path = write_records(tmp_path / "a.jsonl", [{"problem": "2 + 2?", "messages": CHAT}])
    data = load(path, val_fraction=0.0, columns=["question=problem"])
    text = Tokenizer(STORIES).decode(data.train[0].answer[0].tolist())
    assert "2 + 2?" in text and "3 + 3?" not in text
    (report,) = data.reports.values()
    assert report.unused == {"messages": 1}


def test_earlier_turns_are_a_part_of_a_prompt():
    record = {"prompt": "And 3?", "history": [["2 + 2?", "4"]]}
    messages = to_prompt(record, "line 1", "").example.messages
    assert [message["content"] for message in messages] == ["2 + 2?", "4", "And 3?"]


def load(path, **flags):
    tokenizer = Tokenizer(STORIES)
    args = DataArgs(path=[str(path)], template="chatml", **flags)
    return load_data(args, tokenizer, 1 << 20, 512, kind="prompts", completion_tokens=ROOM)


def test_samples_are_the_prompt_with_room_for_a_completion(tmp_path):
    records = [{"prompt": "word " * (n + 1), "answer": str(n), "n": n} for n in range(20)]
    data = load(
        write_records(tmp_path / "a.jsonl", records), val_fraction=0.3, max_seq_length=60
    )
    tokenizer = data.tokenizer
    longest = 0
    for samples in (data.train, data.val):
        for sample, length in zip(samples, samples.lengths, strict=True):
            messages, columns = sample.prompt
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            ids = tokenizer.encode(text, bos=False)
            assert sample.answer[0].tolist() == ids
            assert sample.supervised == ROOM
            assert length == len(ids) + ROOM - 1
            assert messages[0]["content"] == "word " * (columns["n"] + 1)
            longest = max(longest, length)
    assert longest <= 60
    skipped = 20 - len(data.train) - len(data.val)
    assert skipped and data.skipped == skipped


def test_the_split_is_that_of_supervised_fine_tuning(tmp_path):
    """A run that goes on from a supervised one holds out the same records."""
    records = [{"question": f"question {n}", "answer": str(n)} for n in range(40)]
    path = write_records(tmp_path / "a.jsonl", records)
    rewarded = load(path, val_fraction=0.3)
    args = DataArgs(path=[str(path)], template="chatml", val_fraction=0.3)
    supervised = load_data(args, Tokenizer(STORIES), 1 << 20, 512)
    assert len(supervised.val)
    assert set(rewarded.val.sample_index.units) == set(supervised.val.sample_index.units)


def test_a_conversation_beside_messages_of_the_prompt_is_unused(tmp_path):
    records = [
        {
            "prompt": [USER],
            "messages": [USER, {"role": "assistant", "content": "4"}],
            "n": n,
        }
        for n in range(4)
    ]
    data = load(write_records(tmp_path / "a.jsonl", records), val_fraction=0.0)
    (report,) = data.reports.values()
    assert report.unused == {"messages": 4}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}


def test_tools_and_calls_that_the_template_leaves_out_are_named(tmp_path):
    """As for supervised fine-tuning: tools by a note, calls as a bad record."""
    path = write_records(tmp_path / "a.jsonl", [{"prompt": [USER], "tools": [TOOL]}])
    (report,) = load(path, val_fraction=0.0).reports.values()
    assert report.notes[TOOLS_LOST][0] == 1

    silent = tmp_path / "silent.jinja"
    silent.write_text(
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    )
    path = write_records(tmp_path / "c.jsonl", [{"prompt": [SYSTEM, USER]}])
    args = DataArgs(path=[str(path)], template=str(silent), val_fraction=0.0)
    data = load_data(
        args, Tokenizer(STORIES), 1 << 20, 512, kind="prompts", completion_tokens=ROOM
    )
    (report,) = data.reports.values()
    assert report.notes[SYSTEM_LOST][0] == 1

    calls = [USER, CALLING, {"role": "tool", "content": "4"}, USER]
    path = write_records(tmp_path / "b.jsonl", [{"prompt": calls}, {"prompt": [USER]}])
    with pytest.raises(
        ValueError, match=r"b\.jsonl.* leaves out the tool calls of earlier answers"
    ):
        load(path, val_fraction=0.0)


def test_earlier_reasoning_is_where_the_template_reads_it(tmp_path):
    template = tmp_path / "thinks.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{% if m.thinking %}({{ m.thinking }}){% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]"
        "{% endif %}"
    )
    thought = {"role": "assistant", "content": "5", "reasoning_content": "Two and two."}
    path = write_records(tmp_path / "a.jsonl", [{"prompt": [USER, thought, USER]}])
    args = DataArgs(path=[str(path)], template=str(template), val_fraction=0.0)
    tokenizer = Tokenizer(STORIES)
    data = load_data(args, tokenizer, 1 << 20, 512, kind="prompts", completion_tokens=ROOM)
    assert "(Two and two.)5" in tokenizer.decode(data.train[0].answer[0].tolist())


def test_the_split_of_prompts_does_not_depend_on_columns(tmp_path):
    records = [{"prompt": f"question {n}", "answer": str(n)} for n in range(40)]
    first = load(write_records(tmp_path / "a.jsonl", records), val_fraction=0.3)
    changed = [record | {"answer": "other", "more": 1} for record in records]
    second = load(write_records(tmp_path / "b.jsonl", changed), val_fraction=0.3)
    assert len(first.val)
    np.testing.assert_array_equal(
        first.val.sample_index.units, second.val.sample_index.units
    )
    # but what the reward functions get is a part of what the data is
    assert first.train_digest != second.train_digest


def test_a_column_that_is_not_json_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be given to the reward functions"):
        to_prompt({"prompt": "a", "when": {1, 2}}, "line 1", "").as_json("line 1")
