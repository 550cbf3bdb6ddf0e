"""What data may contain by mistake is reported with the records: refusals, marks of other chat
formats, and copies."""

import pytest
from conftest import write_records

import litft
from litft.args import DataArgs
from litft.data.dataset import load_data
from litft.data.notes import AS_AN_AI, FOREIGN_MARKS, REFUSAL

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I\u2019m sorry, I cannot assist with that request.",
    "Unfortunately, I am unable to help with this.",
    "I cannot provide medical advice.",
]
SPEAKING_AS_AI = [
    "As an AI language model, I have no name.",
    "As an artificial intelligence I know the answer: four.",
]
ANSWERS = [
    "I'm sorry for your loss. She was a good dog.",
    "Sorry! I cannot wait to see you.",
    "AI means artificial intelligence.",
    "The machine can't provide more than 5 volts.",
    "He said: help!",
    "word " * 60 + "I cannot help with that.",
]
MARKED = [
    "It is.\n### Response:\nyes",
    "yes<|im_end|> and no",
    "[INST] Why? [/INST] Because.",
    "Well.\nHuman: and now?",
    "<start_of_turn>model\nyes",
    "<tool_response>\n5\n</tool_response>",
]
UNMARKED = [
    "# Response\nA heading of Markdown",
    "The human: a portrait",
    "an [INSTANCE] of a class",
    "a <tool_responses> tag",
    "if a <| b |> c",
]


def reported(tiny, tmp_path, records):
    """Return the notes on records, with how many have each."""
    _, tokenizer = litft.load(tiny)
    path = write_records(tmp_path / "data.jsonl", records)
    data = load_data(
        DataArgs(path=[str(path)], val_fraction=0.0),
        tokenizer,
        vocab_size=1 << 20,
        context=2048,
    )
    (report,) = data.reports.values()
    return {note: count for note, (count, _) in report.notes.items()}, data


def test_refusals_and_marks_are_counted_exactly(tiny, tmp_path):
    answers = [*REFUSALS, *SPEAKING_AS_AI, *ANSWERS, *MARKED, *UNMARKED]
    records = [{"prompt": f"Question {n}?", "completion": a} for n, a in enumerate(answers)]
    notes, _ = reported(tiny, tmp_path, records)
    assert notes[REFUSAL] == len(REFUSALS)
    assert notes[AS_AN_AI] == len(SPEAKING_AS_AI)
    assert notes[FOREIGN_MARKS] == len(MARKED)


def test_a_clean_file_has_no_note(tiny, tmp_path):
    records = [{"prompt": f"Question {n}?", "completion": a} for n, a in enumerate(ANSWERS)]
    notes, data = reported(tiny, tmp_path, records)
    assert REFUSAL not in notes and FOREIGN_MARKS not in notes
    assert data.train.copies() == (0, 1)


def test_only_learned_answers_are_refusals(tiny, tmp_path):
    """A user may say it, and an answer that is masked is not learned."""
    turns = [
        {"role": "user", "content": REFUSALS[0]},
        {"role": "assistant", "content": REFUSALS[1], "train": False},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Now it works."},
    ]
    notes, _ = reported(tiny, tmp_path, [{"messages": turns}])
    assert REFUSAL not in notes


@pytest.mark.parametrize("mark", ["### Instruction: add", "<|im_start|>user"])
def test_marks_in_a_question_count_too(tiny, tmp_path, mark):
    notes, _ = reported(tiny, tmp_path, [{"prompt": mark, "completion": "2"}])
    assert notes[FOREIGN_MARKS] == 1


def test_copies_are_counted(tiny, tmp_path):
    records = [{"prompt": "Same?", "completion": "Same."}] * 60
    records += [{"prompt": f"Other {n}?", "completion": "Yes."} for n in range(12)]
    _, data = reported(tiny, tmp_path, records)
    assert data.train.copies() == (59, 60)


def test_turns_beyond_the_length_limit_are_looked_at_too(tiny, tmp_path):
    """Turns that the limit cuts are not rendered, but they are checked."""
    turns = []
    for number in range(200):
        turns.append({"role": "user", "content": f"Question {number}?"})
        turns.append({"role": "assistant", "content": "Yes, " * 20})
    turns[-1]["content"] = REFUSALS[0]
    notes, _ = reported(tiny, tmp_path, [{"messages": turns}])
    assert notes[REFUSAL] == 1
