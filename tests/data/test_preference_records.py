"""Records of preferences: formats, what is learned, what is cut or skipped, and which split they go
into."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import script, write_records
from quirks import QUIRKS

from litft.args import DataArgs
from litft.data.dataset import load_data
from litft.data.encoder import Encoder
from litft.data.notes import (
    CUT,
    EARLIER_TURNS,
    EMPTY,
    EQUAL,
    OTHER_QUESTION,
    PROMPT_CUT,
)
from litft.data.preferences import to_preferences
from litft.data.tokenizer import Tokenizer
from litft.model.loss import IGNORED

USER, SYSTEM = (
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "system", "content": "Be brief."},
)
GOOD, BAD = {"role": "assistant", "content": "3"}, {"role": "assistant", "content": "12"}
MORE = {"role": "user", "content": "And 4?"}
TEXTS = {"chosen": "3", "rejected": "12"}


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "Add 1 and 2.", **TEXTS}, [USER]),
        ({"question": "Add 1 and 2.", "system": "Be brief.", **TEXTS}, [SYSTEM, USER]),
        (
            {"instruction": "Add.", "input": "1, 2", **TEXTS},
            [{"role": "user", "content": "Add.\n\n1, 2"}],
        ),
        ({"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]}, [SYSTEM, USER]),
        ({"prompt": [USER], "chosen": GOOD, "rejected": BAD}, [USER]),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, [SYSTEM, USER]),
        (
            {"prompt": "Add 1 and 2.", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            [USER],
        ),
        (
            {
                "prompt": "Add 1 and 2.",
                "chosen": [SYSTEM, USER, GOOD],
                "rejected": [SYSTEM, USER, BAD],
            },
            [SYSTEM, USER],
        ),
        (
            {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, GOOD, MORE, BAD]},
            [USER, GOOD, MORE],
        ),
        ({"conversations": [human("Add 1 and 2.")], **TEXTS}, [USER]),
        # UltraFeedback: `messages` is the chosen dialogue again; a prompt that differs in white
        # space
        (
            {
                "prompt": "Add 1 and 2. ",
                "chosen": [USER, GOOD],
                "rejected": [USER, BAD],
                "messages": [USER, GOOD],
            },
            [USER],
        ),
        (
            {
                "prompt": "And 4?",
                "chosen": [USER, GOOD, MORE, GOOD],
                "rejected": [USER, GOOD, MORE, BAD],
            },
            [USER, GOOD, MORE],
        ),
        (
            {"system": "Be brief.", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            [SYSTEM, USER],
        ),
        ({"system": "Be brief.", "prompt": [SYSTEM, USER], **TEXTS}, [SYSTEM, USER]),
        (
            {"system": None, "prompt": "\n\nHuman: Add 1 and 2.\n\nAssistant:", **TEXTS},
            [USER],
        ),
        (
            {
                "conversations": [human("Add 1 and 2.")],
                "chosen": {"from": "gpt", "value": "3"},
                "rejected": {"from": "gpt", "value": "12"},
            },
            [USER],
        ),
        (
            {
                "chosen": "\n\nHuman: Add 1 and 2.\n\nAssistant: 3",
                "rejected": "\n\nHuman: Add 1 and 2.\n\nAssistant: 12",
            },
            [USER],
        ),
    ],
)
def test_the_prompt_is_explicit_or_common(record, prompt):
    (pair,) = to_preferences(record, "here", "", "pairs")
    for answer, expected in zip(pair.answers, (GOOD, BAD), strict=True):
        assert answer.messages == [{**message, "train": False} for message in prompt] + [
            expected
        ]
    # a pair is an answer of each kind
    answers = to_preferences(record, "here", "", "labels")
    assert [(a.answers, a.desirable) for a in answers] == [
        ((pair.answers[0],), True),
        ((pair.answers[1],), False),
    ]


def test_answers_to_an_explicit_prompt_are_compared_whole():
    """Also where both begin with the same turns, as in TRL; without a prompt these are one."""
    answers = {"chosen": [GOOD, MORE, GOOD], "rejected": [GOOD, MORE, BAD]}
    (pair,) = to_preferences({"prompt": [USER], **answers}, "here", "", "pairs")
    for answer in pair.answers:
        learned = [message.get("train", True) for message in answer.messages]
        assert learned == [False, True, True, True]
    dialogues = {name: [USER, *turns] for name, turns in answers.items()}
    (pair,) = to_preferences(dialogues, "here", "", "pairs")
    for answer in pair.answers:
        learned = [message.get("train", True) for message in answer.messages]
        assert learned == [False, False, False, True]


def test_a_call_in_the_prompt_is_no_part_of_a_labelled_answer():
    call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    prompt = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    answer = {"role": "assistant", "content": "It is five."}
    record = {"prompt": prompt, "completion": [answer], "label": True}
    (labelled,) = to_preferences(record, "here", "", "labels")
    messages = labelled.answers[0].messages
    assert [message.get("train", True) for message in messages] == [
        False,
        False,
        False,
        True,
    ]
    # but a call in the answer is
    record = {"prompt": prompt[:1], "completion": [*prompt[1:], answer], "label": True}
    (labelled,) = to_preferences(record, "here", "", "labels")
    messages = labelled.answers[0].messages
    assert [message.get("train", True) for message in messages] == [False, True, True, True]


@pytest.mark.parametrize(
    ("record", "desirable"),
    [
        ({"prompt": "Add 1 and 2.", "completion": "3", "label": True}, True),
        ({"prompt": [USER], "completion": [GOOD], "label": 0}, False),
        ({"messages": [USER, GOOD], "label": "1"}, True),
        (
            {"prompt": None, "completion": None, "messages": [USER, GOOD], "label": "1"},
            True,
        ),
        ({"prompt": [USER], "completion": [USER, GOOD], "label": True}, True),
        ({"prompt": "Add 1 and 2.", "completion": "3", "label": 0.0}, False),
    ],
)
def test_answers_with_labels(record, desirable):
    (answer,) = to_preferences(record, "here", "", "labels")
    assert answer.desirable is desirable and answer.answers[0].messages == [
        {**USER, "train": False},
        GOOD,
    ]


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            "pairs",
            "need the fields chosen and rejected, found 'prompt', 'completion'",
        ),
        ({"chosen": "a", "rejected": "b"}, "pairs", "there is no prompt"),
        (
            {"messages": [USER, GOOD], "chosen": "a", "rejected": "b"},
            "pairs",
            "the prompt ends with an answer",
        ),
        (
            {"prompt": "a", "completion": "b", "label": "maybe"},
            "labels",
            "label is 'maybe'",
        ),
        ({"completion": "b", "label": True}, "labels", "there is no prompt"),
        ({"prompt": "a", "label": True}, "labels", "there is no answer"),
        (
            {"prompt": "a", "chosen": 3, "rejected": "b"},
            "pairs",
            "chosen must be text or a list of messages, found a number",
        ),
    ],
)
def test_records_without_what_is_needed_are_refused(record, kind, message):
    with pytest.raises(ValueError, match="here") as error:
        to_preferences(record, "here", "", kind)
    assert message in str(error.value)


@pytest.fixture(scope="module")
def encoder(tokenizer_folder) -> Encoder:
    return Encoder(Tokenizer(tokenizer_folder("bytes")), 64, kind="pairs")


def texts(encoder: Encoder, sample) -> list[tuple[str, str]]:
    """The inputs and the targets of each document, as text."""
    return [
        (
            encoder.tokenizer.decode(d.tokens.tolist(), skip_special=False),
            encoder.tokenizer.decode(
                d.targets[d.targets != IGNORED].tolist(), skip_special=False
            ),
        )
        for d in sample.split()
    ]


def samples_of(encoder: Encoder, tmp_path: Path, records: list[dict], **values):
    """The samples of records, and the report."""
    path = write_records(tmp_path / "records.jsonl", records)
    limit = values.pop("limit", encoder.limit)
    args = DataArgs(path=[str(path)], val_fraction=0.0, max_seq_length=limit, **values)
    data = load_data(args, encoder.tokenizer, 200_000, 4096, kind=encoder.kind)
    return [data.train[n] for n in range(len(data.train))], data.reports[str(path)], data


def test_both_answers_are_learned_after_the_prompt(encoder, tmp_path):
    records = [
        {"prompt": "Add 1 and 2.", **TEXTS},
        {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, GOOD, MORE, BAD]},
    ]
    (first, second), report, data = samples_of(encoder, tmp_path, records)
    (chosen, learned), (rejected, learned_too) = texts(encoder, first)
    assert chosen.endswith("<|im_start|>assistant\n3<|im_end|>") and rejected.endswith(
        "assistant\n12<|im_end|>"
    )
    assert (learned, learned_too) == ("3<|im_end|>", "12<|im_end|>")
    assert [learned for _, learned in texts(encoder, second)] == [
        "3<|im_end|>",
        "12<|im_end|>",
    ]
    assert encoder.tokenizer.decode(first.answer[1].tolist()) == "3"
    assert report.formats == {"pairs": 2} and report.samples == 2
    assert (
        report.tokens
        == first.tokens.numel() + second.tokens.numel()
        == data.train.lengths.sum()
    )
    assert data.train.supervised.tolist() == [first.supervised, second.supervised]
    assert data.train.document_lengths([1, 0]).tolist() == [
        *second.documents,
        *first.documents,
    ]


def test_unusable_pairs_are_skipped_with_a_reason(encoder, tmp_path):
    records = [
        {"prompt": "Hi", "chosen": "same", "rejected": "same"},
        {"prompt": "Hi", "chosen": "good", "rejected": " "},
        {"prompt": "Hi", "chosen": "", "rejected": "bad"},
        {"prompt": "Hi", "chosen": "good", "rejected": "bad"},
        {"prompt": "Hi", "chosen": "good"},
    ]
    samples, report, data = samples_of(encoder, tmp_path, records, skip_bad=0.5)
    assert len(samples) == 1 and data.skipped == 3 and report.bad[0] == 1
    assert {note: count for note, (count, _) in report.notes.items()} == {
        EQUAL: 1,
        EMPTY: 2,
    }


def test_the_prompt_is_cut_before_the_answers(encoder, tmp_path):
    """By the same tokens on both sides; then the ends of the answers."""
    long = " ".join(map(str, range(60)))
    records = [{"prompt": long, "chosen": "yes it is", "rejected": "no"}]
    (sample,), report, _ = samples_of(encoder, tmp_path, records, limit=32)
    (chosen, learned), (rejected, learned_too) = texts(encoder, sample)
    assert (learned, learned_too) == ("yes it is<|im_end|>", "no<|im_end|>")
    assert (
        sample.documents[0] == 32 and PROMPT_CUT in report.notes and CUT not in report.notes
    )
    common = chosen.partition("yes")[0]
    assert (
        rejected.startswith(common)
        and common.startswith("<|im_start|>")
        and "59<|im_end|>" in common
    )
    (sample,), report, _ = samples_of(
        encoder, tmp_path, [{"prompt": "Hi", "chosen": long, "rejected": "no"}], limit=32
    )
    assert (
        {PROMPT_CUT, CUT} <= report.notes.keys()
        and sample.documents[0] == 32
        and sample.answer is None
    )
    with pytest.raises(ValueError, match="no example"):
        samples_of(
            encoder,
            tmp_path,
            [{"prompt": "Hi", "chosen": "yes", "rejected": "no"}],
            limit=1,
        )


def test_pairs_of_one_prompt_go_into_one_split(encoder, tmp_path):
    records = [
        {
            "prompt": f"prompt {n // 4}",
            "chosen": f"good {n}",
            "rejected": f"bad {n}",
            "id": n,
        }
        for n in range(200)
    ]
    path = write_records(tmp_path / "records.jsonl", records)
    args = DataArgs(path=[str(path)], val_fraction=0.2, max_seq_length=64)
    data = load_data(args, encoder.tokenizer, 200_000, 4096, kind="pairs")
    prompts = [
        {texts(encoder, s[n])[0][0].split("assistant\n")[0] for n in range(len(s))}
        for s in (data.train, data.val)
    ]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]
    assert len(data.train) + len(data.val) == 200


def test_equal_answers_are_not_both_desirable_and_undesirable(tokenizer_folder, tmp_path):
    encoder = Encoder(Tokenizer(tokenizer_folder("bytes")), 64, kind="labels")
    records = [
        {"prompt": "Hi", "chosen": "same", "rejected": "same"},
        {"prompt": "Hi", "chosen": "a", "rejected": "b"},
    ]
    samples, report, _ = samples_of(encoder, tmp_path, records)
    assert [sample.desirable for sample in samples] == [True, False] and report.notes[
        EQUAL
    ][0] == 1


def test_mismatches_have_the_answer_of_another_example(tokenizer_folder, tmp_path):
    encoder = Encoder(Tokenizer(tokenizer_folder("bytes")), 64, kind="labels")
    records = [
        {"prompt": f"prompt {n}", "completion": f"answer {n}", "label": n > 0}
        for n in range(3)
    ]
    samples, _, data = samples_of(encoder, tmp_path, records)
    assert [sample.desirable for sample in samples] == [False, True, True]
    ((text, learned),) = texts(encoder, data.train.mismatched(0, 2, 64))
    assert "prompt 0" in text and learned == "answer 2<|im_end|>"
    assert data.train.mismatched(0, 2, 5).tokens.numel() == 5


def test_the_dry_run_shows_both_sides(tiny, tmp_path):
    write_records(
        tmp_path / "pairs.jsonl",
        [{"prompt": "Hi", "chosen": "good", "rejected": "bad"}] * 2,
    )
    flags = f"--checkpoint_dir {tiny} --data.path pairs.jsonl --data.val_fraction 0 --objective dpo"
    for command, more in (
        ("finetune/lora.py", "--dry_run"),
        ("scripts/prepare_data.py", "--show 1"),
    ):
        text = script(command, *flags.split(), *more.split(), cwd=tmp_path).stdout
        assert (
            ", chosen: " in text
            and ", rejected: " in text
            and "⟦good</s>⟧" in text
            and "⟦bad</s>⟧" in text
        )
        assert "2 records (pairs)" in text


@pytest.mark.parametrize(
    ("record", "kind", "remedy"),
    [
        (
            {"prompt": "a", "completion": "b", "label": False},
            "supervised",
            "add --objective kto",
        ),
        (
            {"messages": [USER, GOOD], "label": "undesirable"},
            "supervised",
            "add --objective kto",
        ),
        (
            {"prompt": "a", "completion": "b", "label": False},
            "pairs",
            "use --objective kto",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "supervised",
            "add --objective dpo",
        ),
    ],
)
def test_data_for_another_objective_is_pointed_to_it(
    tokenizer_folder, record, kind, remedy
):
    encoder = Encoder(Tokenizer(tokenizer_folder("bytes")), 64, kind=kind)
    assert remedy in encoder("here", record).error


@pytest.mark.parametrize("label", ["sports", None, 7])
def test_a_label_with_another_meaning_is_ignored(tokenizer_folder, label):
    encoder = Encoder(Tokenizer(tokenizer_folder("bytes")), 64)
    assert (
        len(encoder("here", {"prompt": "a", "completion": "b", "label": label}).samples)
        == 1
    )
    assert (
        len(
            replace(encoder, form="prompt")(
                "here", {"prompt": "a", "completion": "b", "label": 1}
            ).samples
        )
        == 1
    )
    assert len(encoder("here", {"text": "a b c d", "label": 1}).samples) == 1


def test_equal_reasons_are_said_once(tokenizer_folder, tmp_path):
    encoder = Encoder(Tokenizer(tokenizer_folder("bytes")), 64, kind="pairs")
    records = [{"prompt": "a", "completion": "b"}] * 9 + [{"chosen": "a", "rejected": "b"}]
    with pytest.raises(ValueError, match="there is no prompt") as error:
        samples_of(encoder, tmp_path, records)
    assert str(error.value).count(
        "preferences need the fields"
    ) == 1 and "(and 8 more like it)" in str(error.value)


def test_preferences_without_an_objective_are_pointed_to_it(tiny, tmp_path):
    write_records(
        tmp_path / "pairs.jsonl", [{"prompt": "Hi", "chosen": "good", "rejected": "bad"}]
    )
    flags = ["--checkpoint_dir", tiny, "--data.path", "pairs.jsonl", "--dry_run"]
    assert (
        "add --objective dpo"
        in script("finetune/lora.py", *flags, cwd=tmp_path, code=2).stderr
    )


@pytest.mark.parametrize(
    ("record", "unused"),
    [
        ({"prompt": "P", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ["prompt"]),
        ({"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, []),
        ({"prompt": "P", "question": "Q", **TEXTS}, ["question"]),
        ({"prompt": "P", "messages": [USER], **TEXTS}, ["messages"]),
        ({"messages": [USER], "conversations": [human("C")], **TEXTS}, ["messages"]),
        ({"instruction": "P", "input": "I", **TEXTS}, []),
        ({"system": "S", "prompt": [SYSTEM, USER], **TEXTS}, ["system"]),
        ({"system": SYSTEM["content"], "prompt": [SYSTEM, USER], **TEXTS}, []),
    ],
)
def test_a_second_prompt_is_named(encoder, record, unused):
    assert encoder("here", record).unused == unused


def test_answers_after_different_prompts_are_noted(encoder):
    other = {"role": "user", "content": "Add 3 and 4."}
    record = {"chosen": [USER, GOOD], "rejected": [other, BAD]}
    assert OTHER_QUESTION in encoder("here", record).notes
    # one that begins with a system prompt
    record = {"chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}
    assert OTHER_QUESTION in encoder("here", record).notes
    record = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    assert OTHER_QUESTION not in encoder("here", record).notes


def test_the_prompt_beside_messages_with_a_label_is_named(tokenizer_folder):
    """The labelled answer is the end of the messages, so these are read."""
    encoder = Encoder(Tokenizer(tokenizer_folder("bytes")), 512, kind="labels")
    record = {"prompt": "P", "messages": [USER, GOOD], "label": True}
    assert encoder("here", record).unused == ["prompt"]


def test_answers_of_several_turns_that_are_not_one_text_are_noted(tokenizer_folder):
    """The template renders the first turn without its reasoning once the second follows, so only
    the second is compared."""
    first = GOOD | {"reasoning_content": "One more is two."}
    record = {"prompt": [USER], "chosen": [first, MORE, GOOD], "rejected": [BAD]}
    tokenizer = Tokenizer(tokenizer_folder("bytes"))
    tokenizer.use_template(QUIRKS["thoughts of earlier answers are dropped"])
    encoded = Encoder(tokenizer, 4096, kind="pairs")("here", record)
    assert encoded.error is None and EARLIER_TURNS in encoded.notes

    # a template that renders both turns in one text
    record = {"prompt": [USER], "chosen": [GOOD, MORE, GOOD], "rejected": [BAD]}
    tokenizer = Tokenizer(tokenizer_folder("header"))
    encoded = Encoder(tokenizer, 4096, kind="pairs")("here", record)
    assert encoded.error is None and EARLIER_TURNS not in encoded.notes
