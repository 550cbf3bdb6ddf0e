"""Records are compared with each other: what is planted in a file is reported with its records, and
a clean file has no note."""

import random
import re
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conftest import write_records

import litft
from litft.args import DataArgs, LoRAFinetuneArgs
from litft.data.dataset import load_data
from litft.data.notes import (
    COPY,
    CUT,
    EMPTY,
    FOREIGN_MARKS,
    NEAR_COPY,
    OTHER_ANSWER,
    OTHER_SYSTEM,
    REFUSAL,
    UNFINISHED,
    USER_TWICE,
)
from litft.data.record_facts import ComparedConversation, language_of
from litft.data.review import Review
from litft.data.similarity import (
    NEAR,
    WORDS_IN_A_ROW,
    copied_texts,
    similarity,
    text_signature,
)
from litft.training.data_report import data_lines
from litft.training.schedule import Schedule

WORDS = """river stone market window garden bridge letter mountain teacher engine harbour forest
kitchen village doctor station library valley orchestra captain ladder meadow painter railway
cottage lantern blanket compass orchard theatre sailor furnace carpet basket whistle tunnel
fountain cabinet shoulder curtain""".split()
VERBS = """crossed repaired painted counted carried followed measured opened noticed borrowed
polished described guarded lifted answered gathered""".split()
GERMAN = (
    "Der alte Lehrer ging am Morgen durch das Dorf und sprach mit dem Arzt, der gerade die Fenster "
    "der kleinen Bibliothek reparierte."
)
SYSTEM = "You are a careful assistant."
SLOGAN = "Please rate this answer on our page today."


def sentence(draw):
    """Return an English sentence of twenty words."""
    first, second, third, fourth, fifth = draw.sample(WORDS, 5)
    verbs = draw.sample(VERBS, 3)
    return (
        f"The {first} near the {second} was {verbs[0]} before the {third} {verbs[1]} every "
        f"{fourth} and {verbs[2]} the {fifth}."
    )


def conversation(draw, number):
    """Return a system prompt, a question and an answer that no other record has."""
    asked = draw.sample(WORDS, 2)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"What about {asked[0]} {number} and the {asked[1]}?"},
        {"role": "assistant", "content": " ".join(sentence(draw) for _ in range(3))},
    ]


def clean_records():
    draw = random.Random(7)
    return [{"messages": conversation(draw, number)} for number in range(300)]


def plant(records):
    """Put each fault into a few records; return the expected records by note."""
    expected = {}

    def messages(number):
        return records[number]["messages"]

    def mark(note, numbers):
        expected[note] = list(numbers)
        return numbers

    for number in mark(COPY, range(10, 17)):
        records[number] = {"messages": [dict(turn) for turn in messages(number - 10)]}
    for number in mark(NEAR_COPY, range(120, 126)):
        turns = [dict(turn) for turn in messages(number - 100)]
        turns[-1]["content"] += " Indeed."
        records[number] = {"messages": turns}
    for number in mark(OTHER_ANSWER, range(30, 35)):
        messages(number)[1]["content"] = messages(number + 5)[1]["content"]
    # near copies have the same prompt, too, but one finding is enough
    expected[OTHER_ANSWER] = [*range(35, 40)]
    for number in mark(EMPTY, range(40, 44)):
        messages(number)[-1]["content"] = ""
    for number in mark(UNFINISHED, range(50, 55)):
        messages(number)[-1]["content"] = messages(number)[-1]["content"][:-12].rstrip(" .")
    for number in mark(REFUSAL, range(60, 64)):
        messages(number)[-1]["content"] = f"I cannot help with point {number} of that."
    slogan = f'with an answer that begins or ends with "{SLOGAN}", as many do'
    slogan += " (remove it, unless every answer is to have it)"
    for number in mark(slogan, range(70, 90)):
        messages(number)[-1]["content"] += f" {SLOGAN}"
    for number in mark(FOREIGN_MARKS, range(90, 93)):
        messages(number)[-1]["content"] += "\n### Response:\nYes."
    german = (
        "with an answer in de, where most are in en (leave them out, unless that is meant)"
    )
    for number in mark(german, range(100, 104)):
        messages(number)[-1]["content"] = f"{GERMAN} Das war {number}."
    for number in mark(CUT, range(130, 133)):
        words = random.Random(number).choices(WORDS, k=900)
        messages(number)[-1]["content"] = " ".join(words) + "."
    for number in mark(USER_TWICE, range(140, 144)):
        messages(number).insert(1, {"role": "user", "content": f"Hello, number {number}!"})
    for number in mark(OTHER_SYSTEM, range(150, 156)):
        messages(number)[0]["content"] = "You are a pirate."
    return expected


@pytest.fixture
def load(tiny, tmp_path):
    """Return a function that loads records with flags."""
    _, tokenizer = litft.load(tiny)

    def load(records, name="data.jsonl", kind="supervised", **flags):
        path = write_records(tmp_path / name, records)
        args = DataArgs(**{"path": [str(path)], "max_seq_length": 1024} | flags)
        return load_data(
            args,
            tokenizer,
            vocab_size=1 << 20,
            context=2048,
            kind=kind,
            completion_tokens=4,
        )

    return load


def notes_of(data):
    """Return the numbers of the first records of each note, and the counts."""
    (report,) = data.reports.values()
    found = {}
    counts = {}
    for note, (count, places) in report.notes.items():
        lines = [int(re.search(r"line (\d+)", place)[1]) for place in places]
        found[note] = [line - 1 for line in lines]
        counts[note] = count
    return found, counts


def test_every_planted_fault_is_reported_with_its_records(load):
    records = clean_records()
    expected = plant(records)
    data = load(records)
    found, counts = notes_of(data)
    assert counts == {note: len(numbers) for note, numbers in expected.items()}
    assert found == {note: numbers[:10] for note, numbers in expected.items()}
    (report,) = data.reports.values()
    # what is repeated is named, too
    assert re.fullmatch(r".*line 11 \(as .*line 1\)", report.notes[COPY][1][0])

    # the store has all of them, not only the first ten
    (store,) = data.stores.values()
    all_records = {}
    for finding in store.findings():
        number = int(re.search(r"line (\d+)$", finding["record"])[1])
        all_records.setdefault(finding["finding"], []).append(number - 1)
        if finding["finding"] == COPY:
            assert finding["earlier"].endswith(f"line {number - 10}")
    assert all_records == expected


def test_a_clean_file_has_no_note(load):
    data = load(clean_records())
    assert notes_of(data) == ({}, {})
    assert data.near_held_out == 0


def test_near_copies_are_those_of_a_quadratic_comparison():
    """Outside of the estimate's error around the threshold, all of them and no others are found."""
    draw = random.Random(3)
    texts = [draw.choices(WORDS + VERBS, k=draw.randint(20, 150)) for _ in range(400)]
    for _ in range(200):
        copy = list(draw.choice(texts[:400]))
        for _ in range(draw.randint(0, len(copy) // 12)):
            copy[draw.randrange(len(copy))] = draw.choice(WORDS)
        texts.append(copy)
    signatures = np.stack([text_signature(" ".join(text)) for text in texts])
    is_copy = copied_texts(signatures) != np.arange(len(texts))

    shingles = []
    for text in texts:
        rows = [text[start : start + WORDS_IN_A_ROW] for start in range(len(text) - 2)]
        shingles.append(set(map(tuple, rows)))
    closest = np.zeros(len(texts))
    errors = []
    for later in range(len(texts)):
        for earlier in range(later):
            shared = len(shingles[earlier] & shingles[later])
            exact = shared / len(shingles[earlier] | shingles[later])
            if not is_copy[earlier]:
                closest[later] = max(closest[later], exact)
            if exact > 0.5:
                errors.append(similarity(signatures[earlier], signatures[later]) - exact)
    is_clear = abs(closest - NEAR) > 0.06
    assert is_clear.sum() > 500 and (closest[is_clear] > NEAR).sum() > 40
    np.testing.assert_array_equal(is_copy[is_clear], closest[is_clear] > NEAR)
    assert abs(np.mean(errors)) < 0.01 and np.std(errors) < 0.05


def test_a_text_is_no_copy_of_one_that_is_left_out():
    """A dialogue that is saved after every second turn: each copy is nearly equal to the one
    before, and the last one is not even half equal to the first."""
    words = [f"w{number}" for number in range(1000)]
    lengths = range(250, 1001, 50)
    signatures = np.stack([text_signature(" ".join(words[:size])) for size in lengths])
    copied = copied_texts(signatures).tolist()
    kept = [number for number, original in enumerate(copied) if number == original]
    assert 4 <= len(kept) < len(lengths)
    assert set(copied) == set(kept)
    for number, original in enumerate(copied):
        assert lengths[original] / lengths[number] > 0.7


@pytest.mark.parametrize(
    "answers, are_near", [(("\U0001f642", "\U0001f641"), False), (("<", "<"), True)]
)
def test_answers_of_symbols_make_other_records(answers, are_near):
    """Words alone are compared otherwise, so that opposite answers would be copies."""
    conversations = []
    for answer in answers:
        messages = [
            {"role": "user", "content": "Translate the smiley into one symbol, please"}
        ]
        messages.append({"role": "assistant", "content": answer})
        conversations.append(ComparedConversation(messages, learned={1}))
    whole = np.stack([conversation.signatures()[0] for conversation in conversations])
    assert (copied_texts(whole).tolist() == [0, 0]) == are_near


REVIEW = (
    "the film was very slow at first but then the actors carried the whole story to a moving end "
    "that nobody in the audience had expected and many people left the cinema with tears"
)


@pytest.mark.parametrize(
    ("answers", "are_near"),
    [
        (["positive", "negative"], False),
        (["Positive.", "positive"], True),
        # several words that differ in one, which are compared as others
        ([f"It is, I think, {word} in the end." for word in ("good", "bad")], True),
        # a dialogue that goes on
        (["yes", "yes", "no"], True),
    ],
    ids=str,
)
def test_a_contradicting_label_is_no_near_copy(answers, are_near):
    """Beside a long prompt, its word is one of many."""
    conversations = []
    if len(answers) == 3:
        turns = []
        for answer in answers:
            turns += [{"role": "user", "content": REVIEW}]
            turns += [{"role": "assistant", "content": answer}]
        conversations.append(ComparedConversation(turns[:4], learned={1, 3}))
        conversations.append(ComparedConversation(turns, learned={1, 3, 5}))
    else:
        for answer in answers:
            messages = [
                {"role": "user", "content": REVIEW},
                {"role": "assistant", "content": answer},
            ]
            conversations.append(ComparedConversation(messages, learned={1}))
    whole = np.stack([conversation.signatures()[0] for conversation in conversations])
    assert (copied_texts(whole).tolist() == [0, 0]) == are_near


def test_copies_are_left_out_where_that_is_asked_for(load):
    """exact: the first of equal records stays; near: of nearly equal ones, too."""
    records = clean_records()
    expected = plant(records)
    usable = 300 - len(expected[EMPTY])
    sizes = {}
    for dedup in ("none", "exact", "near"):
        data = load(records, dedup=dedup, val_fraction=0.1)
        sizes[dedup] = len(data.train) + len(data.val)
        assert sum(data.left_out.values()) == usable - sizes[dedup]
        assert data.train.copies()[0] + data.val.copies()[0] == (
            7 if dedup == "none" else 0
        )
    assert sizes == {"none": usable, "exact": usable - 7, "near": usable - 13}


def test_copies_of_another_file_are_left_out(load, tmp_path):
    records = clean_records()[:40]
    other = write_records(tmp_path / "other.jsonl", records[30:])
    paths = [str(tmp_path / "data.jsonl"), str(other)]
    data = load(records, path=paths, dedup="exact", val_fraction=0.0)
    assert data.train.sizes == [40, 0]
    assert list(data.left_out.values()) == [0, 10]


def test_held_out_prompts_near_trained_ones_are_counted(load, tmp_path):
    """The held-out record is another one, but its question is nearly that of a trained record."""
    records = clean_records()[:60]
    held_out = []
    for number in range(5):
        turns = [dict(turn) for turn in records[number]["messages"]]
        turns[1]["content"] = turns[1]["content"].upper()
        turns[2]["content"] = f"Nobody knows about number {number}."
        held_out.append({"messages": turns})
    held_out += records[50:]
    del records[50:]
    val = write_records(tmp_path / "val.jsonl", held_out)
    data = load(records, val_path=[str(val)])
    assert data.near_held_out == 5
    assert not len(data.duplicates)


def test_the_share_of_answer_tokens_that_the_limit_cuts_is_reported(load, tiny):
    records = clean_records()[:50]
    long = load(records)
    (report,) = long.reports.values()
    assert report.lost_tokens == 0
    limit = int(np.median(long.train.lengths))
    short = load(records, max_seq_length=limit)
    (cut,) = short.reports.values()
    assert cut.answer_tokens == report.answer_tokens
    assert cut.lost_tokens == report.supervised - cut.supervised > 0

    args = LoRAFinetuneArgs(checkpoint_dir=str(tiny))
    lines = list(data_lines(Schedule(args, short, ranks=1), short.tokenizer))
    share = cut.lost_tokens / cut.answer_tokens
    text = f"{cut.lost_tokens:,} of {cut.answer_tokens:,} answer tokens ({share:.1%})"
    (line,) = [line for line in lines if text in line]
    assert line.startswith("warning: ") == (share >= 0.1)


def test_a_language_is_told_of_prose_only():
    assert language_of(GERMAN) == "de"
    assert language_of("Ja.") == ""
    assert language_of(f"```python\n{'x = open(path).read()' * 9}\n```") == ""


def test_where_most_answers_stop_so_it_is_how_the_file_is_written(load):
    """Verses, titles and lists of names have no full stop."""
    records = clean_records()[:40]
    for record in records:
        record["messages"][-1]["content"] = record["messages"][-1]["content"].rstrip(".")
    assert notes_of(load(records)) == ({}, {})


def test_prompts_that_vary_their_system_prompt_have_no_usual_one(load):
    records = clean_records()[:40]
    for number, record in enumerate(records):
        record["messages"][0]["content"] = f"You are assistant {number}."
    (note,) = notes_of(load(records))[0]
    assert "none is the usual one" in note


@pytest.mark.weekly
def test_100_000_records_are_compared_within_a_minute():
    """On two cores; each process that tokenizes gathers the facts of its records."""
    draw = random.Random(5)
    records = []
    for number in range(4000):
        turns = conversation(draw, number)
        turns[-1]["content"] = " ".join(sentence(draw) for _ in range(8))  # 160 words
        records.append(turns)
    language_of(GERMAN)  # loads the tables
    review = Review()
    signatures = []
    start = time.perf_counter()
    for number, turns in enumerate(records):
        compared = ComparedConversation(turns, {2})
        review.add(f"line {number}", compared.facts())
        signatures.append(compared.signatures()[0])
    gathering = time.perf_counter() - start

    # the facts of 100,000 different records
    hashes = np.random.default_rng(0).integers(0, 1 << 32, (100_000, 128), dtype=np.uint32)
    many = Review()
    for number in range(100_000):
        facts = replace(review.facts[number % 4000], content=number, prompt=number)
        many.add(f"line {number}", facts)
    start = time.perf_counter()
    assert sum(1 for _ in many.findings(hashes)) > 3
    comparing = time.perf_counter() - start
    assert gathering / 4000 * 100_000 / 2 + comparing < 60, (gathering, comparing)


QUESTION = {
    "role": "user",
    "content": "Which of the two words is longer, please, and why is it so?",
}
ANSWER = (
    "The second one is longer, since it has nine letters and the first one only has six."
)


def turns(**of_answer):
    return [QUESTION, {"role": "assistant", "content": ANSWER, **of_answer}]


def labelled(label):
    return {"prompt": QUESTION["content"], "completion": ANSWER, "label": label}


def tool(name):
    return [
        {
            "type": "function",
            "function": {"name": name, "description": "-", "parameters": {}},
        }
    ]


LATER = [
    *turns(),
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "No."},
]
WITH_THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
UNEQUAL = {
    "labels": ("labels", [labelled(True), labelled(False)]),
    "labels of other answers": (
        "labels",
        [
            {"prompt": QUESTION["content"], "chosen": "six", "rejected": text}
            for text in ("a wrong answer", "something else")
        ],
    ),
    "thoughts of rejected answers": (
        "pairs",
        [
            {
                "prompt": [QUESTION],
                "chosen": turns()[1:],
                "rejected": [
                    {
                        "role": "assistant",
                        "content": "no",
                        "thinking": sentence(random.Random(seed)),
                    }
                ],
            }
            for seed in range(2)
        ],
    ),
    "columns of prompts": (
        "prompts",
        [{"prompt": QUESTION["content"], "answer": "six"}, {"prompt": QUESTION["content"]}],
    ),
    "tools": (
        "supervised",
        [{"messages": turns(), "tools": tool(name)} for name in ("a", "b")],
    ),
    "system prompts": (
        "supervised",
        [
            {"messages": [{"role": "system", "content": text}, *turns()]}
            for text in ("You are a pirate.", "You are a lawyer.")
        ],
    ),
    "thoughts": (
        "supervised",
        [
            {"messages": turns(reasoning_content=sentence(random.Random(seed)))}
            for seed in range(2)
        ],
    ),
}


@pytest.mark.parametrize("kind, records", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("dedup", ["exact", "near"])
def test_records_that_differ_outside_of_their_texts_are_no_copies(
    load, tmp_path, kind, records, dedup
):
    """A dropped label, tool or thought would be lost without a message."""
    (tmp_path / "own.jinja").write_text(WITH_THOUGHTS)
    load = partial(load, template=str(tmp_path / "own.jinja"))
    size = len(load(records, dedup="none", kind=kind, val_fraction=0.0).train)
    data = load(records, dedup=dedup, kind=kind, val_fraction=0.0)
    assert len(data.train) == size and sum(data.left_out.values()) == 0
    twice = load(records * 2, "twice.jsonl", dedup=dedup, kind=kind, val_fraction=0.0)
    assert len(twice.train) == size and sum(twice.left_out.values()) == size


def test_what_is_learned_of_a_conversation_makes_it_another_one(load):
    other = [dict(turn) for turn in LATER]
    other[1]["train"] = False
    data = load([{"messages": LATER}, {"messages": other}], dedup="exact", val_fraction=0.0)
    assert len(data.train) == 2
    assert not any("another answer" in note for note in notes_of(data)[0])


def test_copies_of_token_ids_are_left_out(load):
    ids = []
    for number in range(6):
        last = number % 2 + 8
        ids.append({"input_ids": [5, 6, 7, last], "labels": [-100, 6, 7, last]})
    data = load(ids, dedup="exact", val_fraction=0.0)
    assert len(data.train) == 2 and list(data.left_out.values()) == [4]


@pytest.mark.parametrize("dedup", ["exact", "near"])
@pytest.mark.parametrize("first", ["", " "])
def test_a_record_without_an_example_is_no_copys_original(load, dedup, first):
    """The answer of the first record is empty; the second one is learned."""
    question = sentence(random.Random(1))
    records = [
        {"prompt": question, "completion": first},
        {"prompt": question, "completion": "Yes."},
        {"prompt": question, "completion": "Yes."},
    ]
    data = load(records, dedup=dedup, val_fraction=0.0)
    assert len(data.train) == 1
