"""Examples become samples: masks, length limits, splits, the token cache, and errors for bad
records."""

import copy
import csv
import datetime
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ENV, write_records
from own_tokenizers import WRITERS
from quirks import QUIRKS

import litft
from litft.args import DataArgs
from litft.data import digests, encoder, token_cache
from litft.data.chat_template import STYLES
from litft.data.dataset import histogram, load_data
from litft.data.digests import digest_of
from litft.data.encoder import Encoder
from litft.data.notes import (
    CONTROL,
    CUT,
    CUT_AWAY,
    EMPTY,
    END_TEXT,
    MARK_IGNORED,
    MASKED,
    UNANSWERED,
    WITHIN_TOKEN,
)
from litft.data.readers import read_records
from litft.data.sample import ID_MASK, SUPERVISED, to_sample
from litft.data.tokenizer import Tokenizer
from litft.model.loss import IGNORED
from litft.pretrained.folder import DEMO

THOUGHTS_DROPPED = QUIRKS["thoughts of earlier answers are dropped"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "Who\nare you?"},
    {"role": "assistant", "content": " I am a model."},
]


def encode_record(record, tokenizer, **settings):
    """Encode one record. Raise ValueError if it is bad."""
    settings = {"limit": 2048, **settings}
    result = Encoder(tokenizer, **settings)("here", record)
    if result.error:
        raise ValueError(result.error)
    return result


def make_sample(messages, tokenizer, mask_prompt=True):
    """Return the only sample of a conversation."""
    (encoded,) = encode_record(
        {"messages": messages}, tokenizer, mask_prompt=mask_prompt
    ).samples
    return to_sample(encoded)


def load(path, tokenizer, vocab_size=512, context=256, **settings):
    """Load both splits of a file. By default nothing is held out."""
    args = DataArgs(path=[str(path)], **{"val_fraction": 0.0, **settings})
    return load_data(args, tokenizer, vocab_size, context)


def supervised_text(sample, tokenizer) -> str:
    """Decode the supervised tokens."""
    return tokenizer.decode(
        sample.targets[sample.targets != IGNORED].tolist(), skip_special=False
    )


NAMES = [
    *WRITERS,
    "stories",
    "demo",
    "SmolLM2-135M-Instruct",
    "llama-3.1",
    "qwen2.5",
    "tinyllama-1.1b-chat",
]


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request, tokenizer_folder, checkpoints):
    """Tokenizers with and without BOS and chat template.

    In SmolLM2 and the demo, the padding token is the end token.
    """
    name = request.param
    if name in ("demo", "stories", "SmolLM2-135M-Instruct"):
        return Tokenizer(checkpoints[name])
    return Tokenizer(tokenizer_folder(name))


def test_the_loss_is_computed_on_each_answer_and_its_end_token(tokenizer):
    sample = make_sample(CHAT, tokenizer)
    text = supervised_text(sample, tokenizer)
    first, second = (text.index(part) for part in ("Hi there.", "I am a model."))
    rest = (
        text.replace("Hi there.", "")
        .replace("I am a model.", "")
        .replace(" ", "")
        .replace("\n", "")
    )
    end_token = tokenizer.decode(
        [int(sample.targets[sample.targets != IGNORED][-1])], skip_special=False
    )
    assert first < second and rest == end_token * 2
    assert tokenizer.token_id(end_token) in tokenizer.special_ids
    assert "Hello?" not in text and "Be brief" not in text


def test_plain_prompts_have_no_marks(tokenizer):
    """The plain template leaves prompt and completion as they are, with the loss on the completion
    and the end token."""
    plain = copy.copy(tokenizer)
    plain.use_template(STYLES["plain"])
    (encoded,) = encode_record(
        {"prompt": "Add: 2 + 2 =", "completion": " four"}, plain
    ).samples
    sample = to_sample(encoded)
    end = tokenizer.decode([tokenizer.eos_id], skip_special=False)
    whole = tokenizer.decode(
        [*sample.tokens.tolist(), tokenizer.eos_id], skip_special=False
    )
    assert (
        whole.removeprefix(tokenizer.special.get("bos_token", "")).strip()
        == f"Add: 2 + 2 = four{end}"
    )
    assert supervised_text(sample, tokenizer).strip() == f"four{end}"


def test_all_tokens_are_supervised_without_a_prompt_mask(tokenizer):
    sample = make_sample(CHAT, tokenizer, False)
    assert sample.supervised == sample.targets.numel() and torch.equal(
        sample.targets[:-1], sample.tokens[1:]
    )


def test_training_tokens_equal_inference_tokens(tokenizer):
    """There is one BOS if the tokenizer adds it, and the inference prompt is a prefix of the
    sample."""
    sample = make_sample(CHAT, tokenizer)
    if tokenizer.adds_bos:
        assert sample.tokens[0] == tokenizer.bos_id
        assert (sample.tokens == tokenizer.bos_id).sum() == 1
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True), bos=False
    )
    start = int((sample.targets != IGNORED).nonzero()[0])
    first_prompt = tokenizer.encode(
        tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True), bos=False
    )
    assert sample.tokens[: start + 1].tolist() == first_prompt
    assert sample.tokens[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("mask_prompt", [True, False])
def test_a_sample_has_its_last_answer_and_the_prompt_for_generation(tokenizer, mask_prompt):
    prompt, answer = make_sample(CHAT, tokenizer, mask_prompt).answer
    text = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True)
    assert prompt.tolist() == tokenizer.encode(text, bos=False)
    assert tokenizer.decode(answer.tolist()).strip() == "I am a model."


def test_rendered_text_equals_transformers(checkpoints, shared):
    from transformers import AutoTokenizer

    folder = checkpoints["SmolLM2-135M-Instruct"]
    tokenizer, reference = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for _, record in [
        pair
        for pair, _ in zip(
            read_records(shared / "data" / "alpaca_2k.json"), range(200), strict=False
        )
    ]:
        (encoded,) = encode_record(record, tokenizer).samples
        content = "\n\n".join(filter(None, (record["instruction"], record["input"])))
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": record["output"]},
        ]
        expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert (encoded & ID_MASK).tolist() == expected


def test_cut_and_skipped_examples_are_counted(tmp_path, tiny):
    _, tokenizer = litft.load(tiny)
    record = {"instruction": "a", "input": "", "output": "once upon a time " * 20}
    long = {"instruction": "once upon a time " * 30, "input": "", "output": "a"}
    path = write_records(
        tmp_path / "a.jsonl",
        [record, long, {"instruction": "a", "input": "", "output": "b"}],
    )
    data = load(path, tokenizer, max_seq_length=150)
    assert (len(data.train), data.count(CUT, CUT_AWAY), data.skipped) == (2, 2, 1)
    assert max(sample.tokens.numel() for sample in data.train) == 150
    assert min(sample.supervised for sample in data.train) > 0
    # a truncated answer is no expected answer
    assert [sample.answer is not None for sample in data.train] == [False, True]
    assert data.train.lengths.tolist() == [sample.tokens.numel() for sample in data.train]
    assert data.train.supervised.tolist() == [sample.supervised for sample in data.train]
    with pytest.raises(
        ValueError, match="no example has an answer within 5 tokens: all 3 were skipped"
    ):
        load(path, tokenizer, max_seq_length=5)


QUESTION, ANSWER = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
)


def test_control_tokens_in_reasoning_and_calls_are_noted(tiny):
    """A template renders them, and the model reads them as control tokens."""
    tokenizer = Tokenizer(tiny)
    tokenizer.use_template(QUIRKS["an empty thought"])
    call = {"name": "say", "arguments": {"text": "</s>"}}
    for more in (
        {"reasoning_content": "It ends with </s> here."},
        {"tool_calls": [{"type": "function", "function": call}]},
    ):
        result = encode_record({"messages": [QUESTION, ANSWER | more]}, tokenizer)
        assert CONTROL in result.notes
    assert CONTROL not in encode_record({"messages": [QUESTION, ANSWER]}, tokenizer).notes
    tools = [{"type": "function", "function": {"name": "say", "description": "a </s>"}}]
    record = {"messages": [QUESTION, ANSWER], "tools": tools}
    assert CONTROL in encode_record(record, tokenizer).notes


def test_arguments_of_calls_that_are_not_json_are_one_message(tiny):
    tokenizer = Tokenizer(tiny)
    tokenizer.use_template(QUIRKS["plain"])
    call = {"name": "say", "arguments": {"day": datetime.date(2026, 1, 2)}}
    calling = ANSWER | {"tool_calls": [{"type": "function", "function": call}]}
    with pytest.raises(ValueError, match="the arguments of say are not JSON"):
        encode_record({"messages": [QUESTION, calling]}, tokenizer)


@pytest.mark.parametrize(
    "messages, settings, supervised, notes",
    [
        ([QUESTION, ANSWER, QUESTION, ANSWER], {}, "two two", []),
        (
            [QUESTION, ANSWER | {"content": "three"}, QUESTION, ANSWER],
            {"last_only": True},
            "two",
            [],
        ),
        ([QUESTION, ANSWER | {"train": False}, QUESTION, ANSWER], {}, "two", []),
        ([QUESTION, ANSWER | {"loss_weight": 0}], {}, None, [MASKED]),
        ([QUESTION, ANSWER, QUESTION], {}, "two", [UNANSWERED]),
        ([QUESTION, ANSWER | {"content": " "}], {}, None, [EMPTY]),
        ([QUESTION, ANSWER | {"content": "two<|endoftext|>\n"}], {}, "two", [END_TEXT]),
        ([QUESTION, ANSWER | {"content": "two</s>"}], {}, "two", [END_TEXT]),
        ([QUESTION, ANSWER | {"content": "two</s>two"}], {}, "two two", [CONTROL]),
        ([QUESTION | {"content": "<s>"}, ANSWER], {}, "two", [CONTROL]),
    ],
)
def test_which_turns_are_supervised(tiny, messages, settings, supervised, notes):
    tokenizer = Tokenizer(tiny)
    result = encode_record({"messages": messages}, tokenizer, **settings)
    assert result.notes == notes
    texts = [
        supervised_text(to_sample(encoded), tokenizer).replace("</s>", " ").split()
        for encoded in result.samples
    ]
    assert texts == ([supervised.split()] if supervised else [])


def test_the_models_own_end_token_after_an_answer_is_removed():
    """It is in no list of well-known ones, and the template writes it once more."""
    tokenizer = Tokenizer(DEMO / "base")
    end = tokenizer.decode([tokenizer.end_id], skip_special=False)
    messages = [QUESTION, ANSWER | {"content": f"two {end}\n"}]
    result = encode_record({"messages": messages}, tokenizer)
    expected = encode_record({"messages": [QUESTION, ANSWER]}, tokenizer)
    assert result.notes == [END_TEXT] and expected.notes == []
    assert [sample.tolist() for sample in result.samples] == [
        sample.tolist() for sample in expected.samples
    ]


def test_a_mark_that_has_no_effect_is_named(tiny):
    """--data.mask_prompt false learns every token."""
    messages = [QUESTION, ANSWER | {"train": False}, QUESTION, ANSWER]
    tokenizer = Tokenizer(tiny)
    for mask_prompt, notes in ((True, []), (False, [MARK_IGNORED])):
        result = encode_record({"messages": messages}, tokenizer, mask_prompt=mask_prompt)
        assert result.notes == notes


# the third keeps the reasoning of a field for the last answer only, and that of a content is
# rewritten for it
LONG_CHAT_TEMPLATES = (
    "chatml",
    "thoughts of earlier answers are dropped",
    "an empty thought",
    "the system prompt comes last",
)


@pytest.mark.parametrize("template", LONG_CHAT_TEMPLATES)
@pytest.mark.parametrize("settings", [{}, {"last_only": True}], ids=str)
@pytest.mark.halved
def test_turns_beyond_the_limit_are_not_rendered(tiny, monkeypatch, template, settings):
    """The samples are the same, and a conversation of 2,000 messages takes seconds, not minutes."""
    tokenizer = Tokenizer(tiny)
    tokenizer.use_template(STYLES.get(template) or QUIRKS[template])
    messages = [{"role": "system", "content": "Be brief."}]
    for number in range(1000):
        thought = (
            "<think>\n" + "hm " * 20 + "\n</think>\n\n" if "thought" in template else ""
        )
        answer = f"{thought}answer {number}" + " so" * (number * 7 % 20)
        messages += [
            {"role": "user", "content": f"ask {number}"},
            {"role": "assistant", "content": answer},
        ]
    for limit in (100, 400):
        results = []
        for threshold in (40, 10_000):
            monkeypatch.setattr(encoder, "LONG_CONVERSATION", threshold)
            results.append(
                Encoder(tokenizer, limit=limit, **settings)(
                    "here", {"messages": messages[:81]}
                )
            )
        short, whole = results
        assert (
            short.notes == whole.notes
            and short.turns == whole.turns
            and short.ends == whole.ends
        )
        assert all(map(np.array_equal, short.samples, whole.samples)) and len(
            short.samples
        ) == len(whole.samples)
    monkeypatch.setattr(encoder, "LONG_CONVERSATION", 40)
    began = time.monotonic()
    Encoder(tokenizer, limit=400, **settings)("here", {"messages": messages})
    assert time.monotonic() - began < 10


def test_a_template_that_rewrites_history_gives_each_turn_a_sample(tiny):
    tokenizer = Tokenizer(tiny)
    tokenizer.use_template(THOUGHTS_DROPPED)
    answer = {"role": "assistant", "content": "<think>\n1+1\n</think>\n\ntwo"}
    result = encode_record({"messages": [QUESTION, answer, QUESTION, answer]}, tokenizer)
    samples = [to_sample(encoded) for encoded in result.samples]
    assert len(samples) == 2 and len(set(result.units)) == 1
    assert all(
        "1+1" in supervised_text(sample, tokenizer)
        and "two" in supervised_text(sample, tokenizer)
        for sample in samples
    )
    second = tokenizer.decode(samples[1].tokens.tolist())
    assert second.count("1+1") == 1  # earlier reasoning is not in the prompt


def test_a_text_becomes_windows_in_which_each_token_is_a_target_once(tmp_path, tiny):
    tokenizer = Tokenizer(tiny)
    text = "".join(f"once upon a time there were {n} girls " for n in range(600))
    (tmp_path / "a.txt").write_text(text)
    data = load(tmp_path / "a.txt", tokenizer, max_seq_length=64)
    ids = tokenizer.encode(text, eos=True)
    assert (
        data.train.lengths[:-1].tolist() == [64] * (len(data.train) - 1)
        and len(data.train) > 4
    )
    assert torch.cat([sample.targets for sample in data.train]).tolist() == ids[1:]
    assert torch.cat([sample.tokens for sample in data.train]).tolist() == ids[:-1]
    split_data = load(tmp_path / "a.txt", tokenizer, max_seq_length=64, val_fraction=0.3)
    starts = np.concatenate(
        [split.sample_index.starts for split in (split_data.train, split_data.val)]
    )
    # the first token of a run is not a target
    runs = sum(start not in starts + 64 for start in starts)
    assert (
        runs > 3
        and split_data.train.lengths.sum() + split_data.val.lengths.sum() == len(ids) - runs
    )


@pytest.mark.parametrize(
    "text", ["Once upon", "<s>Once upon", "Once upon</s>", "<s>Once upon</s>"]
)
def test_a_text_has_one_bos_and_one_eos(tiny, text):
    """design.md 4.3: also if the text already contains them."""
    tokenizer = Tokenizer(tiny)
    (encoded,) = encode_record({"text": text}, tokenizer).samples
    ids = (encoded & ID_MASK).tolist()
    assert (
        ids == tokenizer.encode("Once upon", eos=True) and ids.count(tokenizer.bos_id) == 1
    )


def test_splits(tmp_path, tiny):
    _, tokenizer = litft.load(tiny)
    records = [{"instruction": str(n), "input": "", "output": str(n)} for n in range(20)]
    path = write_records(tmp_path / "whole.json", records)
    first, again, other = (
        load(path, tokenizer, val_fraction=0.25, seed=seed) for seed in (1, 1, 2)
    )
    val_tokens = [
        {tuple(sample.tokens.tolist()) for sample in data.val}
        for data in (first, again, other)
    ]
    assert (
        len(first.train) + len(first.val) == 20
        and len(first.val)
        and val_tokens[0] == val_tokens[1] != val_tokens[2]
    )
    assert first.train_digest == again.train_digest != other.train_digest
    assert not val_tokens[0] & {tuple(sample.tokens.tolist()) for sample in first.train}
    (tmp_path / "folder").mkdir()
    write_records(tmp_path / "folder" / "train.jsonl", records[:12])
    write_records(tmp_path / "folder" / "validation.json", records[12:])
    data = load(tmp_path / "folder", tokenizer, val_fraction=0.5)
    assert (len(data.train), len(data.val)) == (12, 8)


@pytest.mark.parametrize(
    "name, text", [("a.txt", "once upon a time there was a girl " * 90), ("a.json", None)]
)
def test_examples_longer_than_the_models_context_are_refused(tmp_path, tiny, name, text):
    """Packed rows may be longer than the context, but no example in them may."""
    tokenizer = Tokenizer(tiny)
    if text:
        (tmp_path / name).write_text(text)
    else:
        write_records(
            tmp_path / name,
            [{"instruction": "Count.", "output": "one two three " * n} for n in (1, 2, 70)],
        )
    with pytest.raises(
        ValueError,
        match=r"max_seq_length 4000: the longest example has .* was made for 256; use 256",
    ):
        load(tmp_path / name, tokenizer, max_seq_length=4000)
    write_records(
        tmp_path / "short.json",
        [{"instruction": "Count.", "output": "one two " * n} for n in (1, 2, 3)],
    )
    assert load(tmp_path / "short.json", tokenizer, max_seq_length=4000).limit == 4000


def record_numbers(samples, tokenizer):
    """Return the record numbers of samples; the text of each record contains its number."""
    return {
        int(re.search(r"No (\d+)", tokenizer.decode(sample.tokens.tolist()))[1])
        for sample in samples
    }


def test_each_record_stays_in_its_split(tmp_path, tiny):
    """design.md 4.16: the split of a record depends neither on other records nor on the
    settings."""
    records = [
        {
            "instruction": f"No {n}",
            "input": "x" * (n % 3 * 30),
            "output": "once upon a time " * (n % 9),
        }
        for n in range(1, 300)
    ]
    path, flags = write_records(tmp_path / "a.json", records), dict(val_fraction=0.1)
    tokenizer = Tokenizer(tiny)
    data = load(path, tokenizer, **flags)
    train, val = record_numbers(data.train, tokenizer), record_numbers(data.val, tokenizer)
    assert 15 <= len(val) <= 45 and not train & val
    shuffled = random.Random(0).sample(records, len(records))
    questions = [
        {
            "question": record["instruction"],
            "say": record["input"],
            "answer": record["output"],
        }
        for record in records
    ]
    for changed_records, settings in (
        (records, dict(max_seq_length=232)),  # skips some records
        (records, dict(template="chatml")),
        (records, dict(mask_prompt=False)),
        (shuffled, {}),
        (records[7:], {}),
        ([record for record in records if record["input"]] * 2, {}),
    ):
        data = load(
            write_records(tmp_path / "b.json", changed_records),
            Tokenizer(tiny),
            **flags,
            **settings,
        )
        assert (
            not record_numbers(data.train, tokenizer) & val
            and not record_numbers(data.val, tokenizer) & train
        )
        assert len(data.train) + len(data.val) + data.skipped == len(changed_records)
        assert "max_seq_length" not in settings or 20 < data.skipped < 150
    plain = [record["instruction"] for record in records if not record["input"]]
    renamed = load(
        write_records(tmp_path / "c.json", questions),
        Tokenizer(tiny),
        columns=["instruction=question", "output=answer"],
        **flags,
    )
    assert record_numbers(renamed.val, tokenizer) & {
        int(text[3:]) for text in plain
    } == val & {int(text[3:]) for text in plain}


def test_text_stays_in_its_split_for_every_window_length(tmp_path, tiny, checkpoints):
    (tmp_path / "a.txt").write_text(
        text := "".join(f"There were {n} girls in town {n % 97}.\n" for n in range(3000))
    )
    numbers = []
    for folder, limit in ((tiny, 64), (tiny, 200), (checkpoints["demo"], 200)):
        tokenizer = Tokenizer(folder)
        data = load(
            tmp_path / "a.txt",
            tokenizer,
            vocab_size=32000,
            max_seq_length=limit,
            val_fraction=0.1,
        )
        targets = [
            torch.cat([sample.targets for sample in split])
            for split in (data.train, data.val)
        ]
        texts = [tokenizer.decode(ids.tolist()) for ids in targets]
        numbers.append(
            [set(re.findall(r"were (\d+) girls", split_text)) for split_text in texts]
        )
        assert (
            0.03 * len(text) < len(texts[1]) < 0.25 * len(text)
            and len(numbers[-1][0] & numbers[-1][1]) < 40
        )
    for train, val in numbers[1:]:  # except lines that cross a split boundary
        assert len(train ^ numbers[0][0]) < 60 and len(val ^ numbers[0][1]) < 60


def test_extreme_val_fractions(tmp_path, tiny):
    tokenizer = Tokenizer(tiny)
    records = [{"instruction": f"No {n}", "output": "Yes."} for n in range(4)]
    for count, fraction, val_count in (
        (4, 1e-9, 1),
        (4, 0.999999, 3),
        (1, 0.5, 0),
        (4, 0.0, 0),
    ):
        data = load(
            write_records(tmp_path / f"{count}.json", records[:count]),
            tokenizer,
            val_fraction=fraction,
        )
        assert (len(data.train), len(data.val)) == (count - val_count, val_count)
    data = load(
        write_records(tmp_path / "same.json", records[:2] * 50), tokenizer, val_fraction=0.5
    )
    assert (len(data.train), len(data.val)) == (50, 50) and not len(data.duplicates)


def test_only_the_first_records_of_each_path_are_read(tmp_path, tiny):
    """Of training paths; the same file as validation data is read whole, and the cache keeps
    both."""
    tokenizer = Tokenizer(tiny)
    records = [{"instruction": f"No {n}", "output": "Yes."} for n in range(9)]
    paths = [write_records(tmp_path / f"{name}.json", records) for name in "ab"]
    for limit, count in ((2, 2), (None, 9), (20, 9), (2, 2)):
        data = load(paths[0], tokenizer, limit=limit, val_path=[str(paths[1])])
        assert (len(data.train), len(data.val)) == (count, 9)
    data = load(paths[0], tokenizer, limit=3, val_path=[str(paths[0])])
    assert (len(data.train), len(data.val)) == (3, 9)
    texts = [tokenizer.decode(data.train[n].tokens.tolist()) for n in range(3)]
    assert all(f"No {n}" in text for n, text in enumerate(texts))
    both = load_data(
        DataArgs(path=list(map(str, paths)), val_fraction=0.0, limit=4), tokenizer, 512, 256
    )
    assert both.train.sizes == [4, 4]
    assert DataArgs(limit=0).problems() == ["--data.limit 0: must be at least 1"]


def test_turns_of_a_conversation_stay_in_one_split(tmp_path, tiny):
    tokenizer = Tokenizer(tiny)
    answers = [
        {"role": "assistant", "content": f"<think>\n{n}\n</think>\n\n{n}"}
        for n in range(40)
    ]
    path = write_records(
        tmp_path / "a.json",
        [{"messages": [QUESTION, answer, QUESTION, answer]} for answer in answers],
    )
    template = tmp_path / "thoughts_dropped.jinja"
    template.write_text(THOUGHTS_DROPPED)
    data = load(path, tokenizer, val_fraction=0.25, template=str(template))
    train_texts, val_texts = (
        {supervised_text(sample, tokenizer) for sample in split}
        for split in (data.train, data.val)
    )
    assert (
        len(data.train) == 2 * len(train_texts)
        and len(data.val) == 2 * len(val_texts) > 0
        and not train_texts & val_texts
    )


def test_duplicates_of_validation_samples_are_reported(tmp_path, tiny):
    tokenizer = Tokenizer(tiny)
    records = [{"instruction": str(n), "input": "", "output": str(n)} for n in range(10)]
    train, val = (
        write_records(tmp_path / "train.json", records),
        write_records(tmp_path / "val.json", [records[3], records[8], {"text": "x"}]),
    )
    data = load(train, tokenizer, val_path=[str(val)])
    assert data.duplicates.tolist() == [3, 8]


def test_texts_with_a_common_start_are_not_duplicates(tmp_path, tiny):
    """Only windows with the same tokens are duplicates."""
    tokenizer, start = Tokenizer(tiny), "once upon a time there was a licence. " * 60
    for name in ("a", "b"):
        rest = "".join(f"{name} saw {n} dogs. " for n in range(300))
        (tmp_path / f"{name}.txt").write_text(start + rest)
    data = load(
        tmp_path / "a.txt",
        tokenizer,
        val_path=[str(tmp_path / "b.txt")],
        max_seq_length=100,
    )
    val_tokens = {tuple(sample.tokens.tolist()) for sample in data.val}
    duplicates = [
        number
        for number, sample in enumerate(data.train)
        if tuple(sample.tokens.tolist()) in val_tokens
    ]
    assert (
        data.duplicates.tolist() == duplicates and 2 < len(duplicates) < len(data.train) / 2
    )


def test_names_of_answers_do_not_depend_on_the_template(tmp_path, tiny):
    """One template turns a conversation into one example, another into one example per turn."""
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\n1\n</think>\n\none"},
    ]
    path, answers = write_records(tmp_path / "a.json", [{"messages": chat + chat}] * 2), []
    thoughts_dropped = tmp_path / "thoughts_dropped.jinja"
    thoughts_dropped.write_text(THOUGHTS_DROPPED)
    for template in ("alpaca", str(thoughts_dropped)):
        tokenizer = Tokenizer(tiny)
        data = load(path, tokenizer, vocab_size=600, template=template).train
        answers.append(
            {
                name: sample.answer[1].tolist()
                for name, sample in zip(data.names, data, strict=True)
            }
        )
    per_chat, per_turn = answers
    assert len(per_chat) == 2 and len(per_turn) == 4 and per_chat.keys() <= per_turn.keys()
    assert {turn for _, turn, _ in per_chat} == {6} and {
        turn for _, turn, _ in per_turn
    } == {2, 6}


def test_an_example_with_a_truncated_answer_has_another_name(tmp_path, tiny):
    """Its loss includes tokens of that answer, unlike the example without it."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one"}]
    path = write_records(
        tmp_path / "a.json",
        [{"messages": [*chat, chat[0], {"role": "assistant", "content": "two " * 50}]}],
    )
    turns = set()
    for length in (125, 200):
        samples = load(
            path,
            Tokenizer(tiny),
            template="vicuna",
            val_fraction=0.0,
            max_seq_length=length,
        ).train
        turns |= {turn for _, turn, _ in samples.names}
    assert turns == {2, 3}


def test_several_paths_with_weights(tmp_path, tiny):
    from litft.data.sampler import SampleOrder

    tokenizer = Tokenizer(tiny)
    paths = []
    for name, count in (("a", 10), ("b", 6)):
        paths.append(
            str(
                write_records(
                    tmp_path / f"{name}.json",
                    [{"instruction": name, "output": str(n)} for n in range(count)],
                )
            )
        )
    args = DataArgs(path=paths, weights=[0.5, 2], val_fraction=0.0)
    data = load_data(args, tokenizer, 512, 256)
    sampler = SampleOrder(data.train.sizes, 1, data.weights)
    assert data.train.sizes == [10, 6] and sampler.size == 17
    for epoch in range(3):
        drawn = sampler.indices(17 * epoch, 17 * (epoch + 1))
        counts = np.bincount(drawn, minlength=16)
        assert (
            counts[:10].sum() == 5 and counts[:10].max() == 1 and (counts[10:] == 2).all()
        )
    assert set(sampler.indices(0, 17)) != set(sampler.indices(17, 34))


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "a.json",
            '[{"instruction": "a", "output": "b"}, {"foo": "c"}]',
            "record 1: no known format has the fields 'foo'",
        ),
        (
            "a.json",
            '[{"instruction": "a", "output": 3}]',
            "record 0: field 'output' must be text, found a number",
        ),
        (
            "a.json",
            '[{"messages": [{"role": "user", "content": "a"}]}]',
            "record 0: no message is from the assistant",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n{"x": }\n3',
            "(?s)line 2: invalid JSON.*line 3: an example must.*2 of 3 records",
        ),
        ("a.json", '[{"text": "a"}', "line 1: invalid JSON"),
        (
            "a.csv",
            "Are you open?,Yes.\nWhere?,Here.",
            "line 2: .*; its first line seems to be a record; the first line of",
        ),
    ],
)
def test_errors_name_the_file_and_the_line_or_record(
    tmp_path, tiny, name, content, message
):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name, Tokenizer(tiny))
    assert not list(token_cache.cache_folder().glob("*.partial"))


def as_numpy_prints(value) -> str:
    """Return what pandas writes for an array of objects: no commas between them."""
    if isinstance(value, str):
        return value
    return "[" + "\n ".join(map(str, value)) + "]"


@pytest.mark.parametrize("write", [json.dumps, str, as_numpy_prints])
def test_messages_in_the_cells_of_a_table(tmp_path, tiny, write):
    """They are what the same lists are in a JSON file, not a text to learn."""
    turns = [
        {"role": "user", "content": "It's?"},
        {"role": "assistant", "content": 'A "b".'},
    ]
    records = [{"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}]
    tokenizer = Tokenizer(tiny)
    for number, record in enumerate(records):
        table = tmp_path / f"{number}.csv"
        with table.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(record)
            rows.writerow(map(write, record.values()))
        (expected,) = load(
            write_records(tmp_path / f"{number}.json", [record]), tokenizer
        ).train
        (sample,) = load(table, tokenizer).train
        assert sample.tokens.tolist() == expected.tokens.tolist()
        assert sample.targets.tolist() == expected.targets.tolist()
    # a .jsonl file is not read as a table, also with .csv or .tsv in its path
    texts = {name: json.dumps(value) for name, value in records[1].items()}
    for name in ("a.csv.jsonl", "x.tsv/part.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(texts) + "\n")
        (sample,) = load(path, tokenizer).train
        assert '"role"' in supervised_text(sample, tokenizer)
    # an answer that is such a list after a question that is none stays a text
    answer = write_records(
        tmp_path / "text.json",
        [{"prompt": "Invent a talk.", "completion": json.dumps(turns)}],
    )
    (sample,) = load(answer, tokenizer).train
    assert '"role"' in supervised_text(sample, tokenizer)


def test_answers_in_the_cells_of_a_table(tmp_path, tiny):
    """As UltraFeedback is saved: the prompt is a text, and the answers are lists."""
    tokenizer = Tokenizer(tiny)
    question = {"role": "user", "content": "Which?"}
    answers = {
        name: [question, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "This."), ("rejected", "That one."))
    }
    record = {"prompt": "Which?", **answers}
    table = tmp_path / "pairs.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(record)
        rows.writerow(
            [record["prompt"], *(as_numpy_prints(answer) for answer in answers.values())]
        )
    samples = []
    for path in (write_records(tmp_path / "pairs.json", [record]), table):
        args = DataArgs(path=[str(path)], val_fraction=0)
        (sample,) = load_data(args, tokenizer, 512, 256, kind="pairs").train
        samples.append(sample.tokens.tolist())
    assert samples[0] == samples[1]
    # a mixture stays a text, and the report says so
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion"], [str([question]), "This."]])
    data = load(table, tokenizer)
    assert any("learned as text" in note for note in data.reports[str(table)].notes)


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path, tiny, monkeypatch):
    write_records(tmp_path / "faq_good.jsonl", [{"text": "a"}])
    tokenizer = Tokenizer(tiny)
    with pytest.raises(ValueError, match=r"did you mean .*/faq_good\.jsonl\?"):
        load(tmp_path / "faq_god.jsonl", tokenizer)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=rf"^other\.csv does not exist in {tmp_path}; name a file"
    ):
        load("other.csv", tokenizer)
    with pytest.raises(ValueError, match="there is no folder data either"):
        load("data/a.jsonl", tokenizer)


def test_a_share_of_bad_records_can_be_allowed(tmp_path, tiny):
    records = [{"instruction": "a", "output": "b"}] * 18 + [{"foo": 1}, {"bar": 2}]
    path = write_records(tmp_path / "a.json", records)
    with pytest.raises(
        ValueError,
        match=r"(?s)record 18.*record 19.*2 of 20 records .* are bad; --data.skip_bad 0.1 skips",
    ):
        load(path, Tokenizer(tiny), skip_bad=0.05)
    data = load(path, Tokenizer(tiny), skip_bad=0.1)
    count, first = data.reports[str(path)].bad
    assert (
        len(data.train) == 18
        and count == 2
        and "record 18" in first[0]
        and "record 19" in first[1]
    )
    with pytest.raises(ValueError, match=r"2 of 20 records"):
        load(path, Tokenizer(tiny), skip_bad=0.05)  # also when read from the cache
    # 0.29 * 100 is less than 29 in floating point
    records = [{"instruction": "a", "output": "b"}] * 71 + [{"foo": 1}] * 29
    path = write_records(tmp_path / "b.json", records)
    with pytest.raises(
        ValueError, match=r"29 of 100 records .* --data.skip_bad 0.29 skips"
    ):
        load(path, Tokenizer(tiny), skip_bad=0.28)
    assert len(load(path, Tokenizer(tiny), skip_bad=0.29).train) == 71


def test_a_format_and_columns_by_name(tmp_path, tiny):
    tokenizer = Tokenizer(tiny)
    path = write_records(tmp_path / "a.json", [{"text": "one", "label": "two"}])
    ((sample),) = load(path, tokenizer, columns=["prompt=text", "completion=label"]).train
    assert supervised_text(sample, tokenizer).split() == ["two</s>"]
    with pytest.raises(
        ValueError,
        match=r"--data.columns foo=...: no format has that field; known: answer, ",
    ):
        load(path, tokenizer, columns=["foo=text"])
    with pytest.raises(ValueError, match=r"is a folder; name a file of examples in it"):
        load(
            path,
            tokenizer,
            val_path=[str(tmp_path)],
            columns=["prompt = text", "completion=label"],
        )
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(
        ValueError, match=r"is a pipe or a device, which can be read only once"
    ):
        load(
            path,
            tokenizer,
            val_path=[str(tmp_path / "pipe.jsonl")],
            columns=["prompt = text", "completion=label"],
        )
    with pytest.raises(
        ValueError,
        match=r"record 0: --data.format alpaca needs the fields instruction, output",
    ):
        load(path, tokenizer, format="alpaca")


def test_the_end_token_of_a_turn_becomes_a_stop_token(tmp_path, tokenizer_folder):
    """Also if only the template contains it, but never from a truncated example."""
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello there, you"},
    ]
    path = write_records(tmp_path / "a.jsonl", [{"messages": chat}])
    for limit in (None, 10):
        tokenizer = Tokenizer(tokenizer_folder("header"))
        turn_end = tokenizer.token_id("<|eot_id|>")
        for mask_prompt in (True, False):
            tokenizer.stop_ids = [tokenizer.eos_id]
            settings = {"max_seq_length": limit, "mask_prompt": mask_prompt}
            if limit and mask_prompt:
                with pytest.raises(ValueError, match="all 1 were skipped"):
                    load(path, tokenizer, 1000, 4096, **settings)
                continue
            data = load(path, tokenizer, 1000, 4096, **settings)
            expected = [tokenizer.eos_id] if limit else [tokenizer.eos_id, turn_end]
            assert data.tokenizer.stop_ids == expected, settings


def test_an_end_token_outside_the_vocabulary_is_reported(tmp_path, tokenizer_folder):
    """The end token is the last target and never an input."""
    path = write_records(tmp_path / "a.json", [{"instruction": "hi", "output": "hello"}])
    tokenizer = Tokenizer(tokenizer_folder("header"))
    end = tokenizer.token_id("<|eot_id|>")
    # a template without BOS, whose id is also outside the vocabulary
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ '<|eot_id|>' if m.role == 'assistant' }}{% "
        "endfor %}"
    )
    with pytest.raises(
        ValueError, match=rf"eot_id.* has the id {end}, .* vocabulary ends at {end - 1}"
    ):
        load(path, tokenizer, end, 4096)


def test_ids_outside_the_vocabulary_are_reported(tmp_path, tiny):
    path = write_records(tmp_path / "a.json", [{"instruction": "a", "output": "zebra"}])
    with pytest.raises(
        ValueError,
        match=r"record 0: token .* has the id \d+, but the model's vocabulary ends at 63",
    ):
        load(path, Tokenizer(tiny), 64)
    largest = max(
        store.report.largest[0] for store in load(path, Tokenizer(tiny)).train.stores
    )
    assert len(load(path, Tokenizer(tiny), largest + 1).train) == 1
    with pytest.raises(
        ValueError,
        match=f"has the id {largest}, but the model's vocabulary ends at {largest - 1}",
    ):
        load(path, Tokenizer(tiny), largest)


# ---- the cache
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """An empty cache for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "litft"


def cache_entries(folder) -> set[str]:
    return {
        path.name for path in folder.iterdir() if path.is_dir() and path.name != "digests"
    }


def test_the_cache_key_contains_all_that_affects_the_tokens(tmp_path, tiny, cache_dir):
    """design.md 4.13: data, tokenizer, template, mask policy, length, and code."""
    path = write_records(tmp_path / "a.json", [{"messages": CHAT[1:]}])
    load(path, Tokenizer(tiny))
    (first,) = cache_entries(cache_dir)
    load(path, Tokenizer(tiny))
    assert cache_entries(cache_dir) == {first}
    changes = [
        {"mask_prompt": False},
        {"train_on": "last"},
        {"max_seq_length": 250},
        {"template": "vicuna"},
    ]
    changes += [{"columns": ["messages=messages"]}, {"format": "messages"}]
    for number, change in enumerate(changes, 2):
        load(path, Tokenizer(tiny), **change)
        assert len(cache_entries(cache_dir)) == number, change
    before = load(path, Tokenizer(tiny)).train_digest
    tokenizer = Tokenizer(tiny)
    tokenizer.add_tokens(["there"])
    load(path, tokenizer, 600)
    assert len(cache_entries(cache_dir)) == len(changes) + 2
    write_records(path, [{"messages": CHAT[1:3]}])
    assert load(path, Tokenizer(tiny)).train_digest != before
    assert len(cache_entries(cache_dir)) == len(changes) + 3


def test_another_version_of_the_code_tokenizes_again(
    tmp_path, tiny, cache_dir, monkeypatch
):
    path = write_records(tmp_path / "a.json", [{"messages": CHAT[1:]}])
    load(path, Tokenizer(tiny))
    monkeypatch.setattr(token_cache, "version", lambda name: "another")
    token_cache._code_version.cache_clear()
    load(path, Tokenizer(tiny))
    token_cache._code_version.cache_clear()
    assert len(cache_entries(cache_dir)) == 2


def test_parallel_tokenization_gives_the_same_samples(tokenizer_folder, tmp_path):
    encoder = Encoder(Tokenizer(tokenizer_folder("bytes")), 512)
    records = (list(read_records(DEMO / "train.jsonl")) * 3)[:600]
    sequential = [encoder(where, record) for where, record in records]
    chunks = iter([records[start : start + 50] for start in range(0, 600, 50)])
    with (tmp_path / "lock").open("w") as lock:
        pool = token_cache._make_pool(encoder, 2, lock)
        parallel = list(token_cache._in_parallel(chunks, pool, 2))
    assert [result.where for result in parallel] == [result.where for result in sequential]
    for one, other in zip(sequential, parallel, strict=True):
        assert all(map(np.array_equal, one.samples, other.samples)) and len(
            one.samples
        ) == len(other.samples)


def test_one_process_tokenizes_where_processes_cannot_share_memory(tiny, tmp_path, capsys):
    """As in a container whose /dev/shm is full: semaphores are files there."""
    encoder = Encoder(Tokenizer(tiny), 512)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "lock").open("w") as lock:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            pool = token_cache._make_pool(encoder, 2, lock)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert pool is None and "note: one process tokenizes" in capsys.readouterr().err


PREPARE = """
import sys
from litft.args import DataArgs
from litft.data.dataset import load_data
from litft.data.tokenizer import Tokenizer
from pathlib import Path
data = load_data(DataArgs(path=[sys.argv[1]]), Tokenizer(Path(sys.argv[2])), 512, 256)
print(data.train_digest, len(data.train), len(data.val))
"""


def prepare(path, folder) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE, str(path), str(folder)]
    env = {**ENV, "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_an_unchanged_file_is_hashed_once(tmp_path, cache_dir, monkeypatch):
    """A replaced file is hashed again, even if its size and modification time are the same."""
    hashed_paths = []
    hash_file = digests._hash_file
    monkeypatch.setattr(
        digests, "_hash_file", lambda path: hashed_paths.append(path) or hash_file(path)
    )
    path = tmp_path / "a.json"
    path.write_text("one")
    first = digest_of(path)
    # the file is too new to be cached
    assert digest_of(path) == first == hash_file(path) and len(hashed_paths) == 2
    monkeypatch.setattr(digests, "SETTLED", 0)
    assert digest_of(path) == first and len(hashed_paths) == 2
    times = path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (
        path.stat().st_mtime_ns == times.st_mtime_ns
        and digest_of(path) == hash_file(path) != first
    )
    replacement = tmp_path / "b.json"
    replacement.write_text("six")
    os.utime(replacement, ns=(times.st_atime_ns, times.st_mtime_ns))
    replacement.replace(path)
    assert digest_of(path) == hash_file(path)
    for entry in cache_dir.glob("digests/*"):
        entry.write_text("no JSON")
    assert digest_of(path) == hash_file(path)


def test_processes_that_prepare_at_the_same_time_do_not_collide(tmp_path, tiny, cache_dir):
    path = write_records(
        tmp_path / "a.jsonl",
        [{"instruction": str(n), "output": "once upon a time " * 9} for n in range(3000)],
    )
    processes = [prepare(path, tiny) for _ in range(2)]
    answers = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(set(answers)) == 1 and sum(map(int, answers[0].split()[1:])) == 3000
    assert len(cache_entries(cache_dir)) == 1 and not list(cache_dir.glob("*.partial"))


@pytest.mark.slow
def test_a_process_killed_during_preparation_does_not_block_the_next(
    tmp_path, tiny, cache_dir
):
    path = write_records(
        tmp_path / "a.jsonl",
        [{"instruction": str(n), "output": "once upon a time " * 30} for n in range(6000)],
    )
    process = prepare(path, tiny)
    while not list(cache_dir.glob("*.partial/tokens.bin")):
        assert process.poll() is None
        time.sleep(0.01)
    # not its process group: its workers must end by themselves
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(cache_dir.glob("*.partial"))
    assert len(load(path, Tokenizer(tiny)).train) == 6000
    assert len(cache_entries(cache_dir)) == 1 and not list(cache_dir.glob("*.partial"))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


DAMAGES = [
    "tokens cut",
    "tokens gone",
    "no report",
    "half a report",
    "empty report",
    "no units",
]
DAMAGES += ["a bit of the tokens", "a bit of the counts"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_entry_is_rebuilt(tmp_path, tiny, cache_dir, damage):
    path = write_records(tmp_path / "a.json", [{"messages": CHAT[1:]}] * 9)
    original = load(path, Tokenizer(tiny))
    expected = original.train[8].tokens.tolist()  # read before the file is damaged
    (entry,) = (cache_dir / name for name in cache_entries(cache_dir))
    report, tokens = entry / "report.json", entry / "tokens.bin"
    {
        "tokens cut": lambda: tokens.write_bytes(tokens.read_bytes()[:-200]),
        "tokens gone": tokens.unlink,
        "no report": report.unlink,
        "half a report": lambda: report.write_text(report.read_text()[:50]),
        "empty report": lambda: report.write_text("{}"),
        "no units": lambda: (entry / "units.npy").write_bytes(b""),
        "a bit of the tokens": lambda: flip_a_bit(tokens),
        "a bit of the counts": lambda: flip_a_bit(entry / "supervised.npy"),
    }[damage]()
    rebuilt = load(path, Tokenizer(tiny))
    assert (
        rebuilt.train_digest == original.train_digest
        and rebuilt.train[8].tokens.tolist() == expected
    )
    assert rebuilt.train.supervised.tolist() == original.train.supervised.tolist()


def test_a_complete_read_only_cache_is_used(tmp_path, tiny, cache_dir):
    path = write_records(tmp_path / "a.json", [{"messages": CHAT[1:]}])
    original = load(path, Tokenizer(tiny))
    for lock in cache_dir.glob("*.lock"):
        lock.unlink()
        lock.mkdir()  # not even root can open a folder for writing
    assert load(path, Tokenizer(tiny)).train_digest == original.train_digest


def test_a_date_in_the_template_is_part_of_the_data(tmp_path, tiny, cache_dir):
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}\n" + STYLES["vicuna"])
    path = write_records(tmp_path / "a.json", [{"messages": CHAT[1:]}])
    tokenizer = Tokenizer(tiny)
    days = [
        load(path, tokenizer, template=str(template), date=day)
        for day in ("2026-01-01", "2026-06-01", "2026-01-01")
    ]
    assert (
        days[0].train_digest == days[2].train_digest != days[1].train_digest
        and len(cache_entries(cache_dir)) == 2
    )
    assert "01 Jan 2026" in tokenizer.decode(days[0].train[0].tokens.tolist())


def test_an_unwritable_cache_raises_with_a_remedy(tmp_path, tiny, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = write_records(tmp_path / "a.json", [{"messages": CHAT[1:]}])
    with pytest.raises(
        ValueError, match="Not a directory; set XDG_CACHE_HOME to another folder"
    ):
        load(path, Tokenizer(tiny))


# ---- styles
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_every_style_supervises_each_answer_and_its_end_token(tiny, style):
    tokenizer = Tokenizer(tiny)
    tokenizer.use_template(STYLES[style])
    for chat in (CHAT, CHAT[1:]):
        result = encode_record({"messages": chat}, tokenizer)
        texts = "".join(
            supervised_text(to_sample(encoded), tokenizer) for encoded in result.samples
        )
        rest = (
            texts.replace("Hi there.", "")
            .replace("I am a model.", "")
            .replace(" ", "")
            .replace("\n", "")
        )
        assert rest.replace("</s>", "") in (
            "",
            "<|im_end|>" * 2,
            "<|eot_id|>" * 2,
            "<end_of_turn>" * 2,
            "<|end|>" * 2,
        )
        assert (
            texts.count("</s>") == 2 and "Hello?" not in texts and "Be brief" not in texts
        )


def test_guanaco_texts_are_conversations(tmp_path, tiny):
    """The detected format determines how --eval.prompts are formatted."""
    path = write_records(
        tmp_path / "a.jsonl", [{"text": "### Human: once### Assistant: upon"}] * 2
    )
    (report,) = load(path, Tokenizer(tiny)).reports.values()
    assert report.formats == {"guanaco": 2}


def test_a_supervised_prompt_is_supervised_once(tiny):
    """Also if the template renders each turn as a separate text."""
    tokenizer = Tokenizer(tiny)
    tokenizer.use_template(THOUGHTS_DROPPED)
    answer = {"role": "assistant", "content": "<think>\n1+1\n</think>\n\ntwo"}
    first, second = encode_record(
        {"messages": [QUESTION, answer, QUESTION, answer]}, tokenizer, mask_prompt=False
    ).samples
    common_length = next(
        i
        for i, (a, b) in enumerate(zip(first & ID_MASK, second & ID_MASK, strict=False))
        if a != b
    )
    assert (first & SUPERVISED).all() and not (second[:common_length] & SUPERVISED).any()
    assert (second[common_length:] & SUPERVISED).all() and common_length > 5


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([], "old answer"),
        (["prompt=better_q", "completion=better_a"], "new answer"),
        (["completion=better_a", "prompt=instruction"], "new answer"),
        (["text=better_a"], "new answer"),
        # fields that are not required, and one that is empty
        (["input=better_q"], "old answer"),
        (["system=better_q"], "old answer"),
        (["prompt=better_q", "completion=empty"], "old answer"),
    ],
)
def test_fields_that_are_mapped_come_before_others(tmp_path, tiny, columns, expected):
    record = {"instruction": "old question", "output": "old answer", "empty": ""}
    record |= {"better_q": "new question", "better_a": "new answer"}
    path = write_records(tmp_path / "data.jsonl", [record] * 2)
    tokenizer = Tokenizer(tiny)
    data = load(path, tokenizer, columns=columns)
    (text,) = {tokenizer.decode(sample.tokens.tolist()) for sample in data.train}
    answers = [answer for answer in ("old answer", "new answer") if answer in text]
    assert answers == [expected]


def test_columns_missing_from_all_records_are_reported(tmp_path, tiny):
    record = {"instruction": "a", "output": "b"}
    path = write_records(tmp_path / "a.jsonl", [record | {"ctx": "c"}, record])
    with pytest.raises(
        ValueError, match=r"--data.columns input=contxt: no record has the field 'contxt'"
    ):
        load(path, Tokenizer(tiny), columns=["input=contxt"])
    data = load(path, Tokenizer(tiny), columns=["input=ctx"])
    assert data.count("without the field ctx") == 1 and len(data.train) == 2


def test_an_end_token_that_is_not_special_is_supervised_once(tmp_path, tokenizer_folder):
    """Some checkpoints have such a token: the EOS ends an answer, but is not part of its text."""
    folder = shutil.copytree(tokenizer_folder("bytes"), tmp_path / "bytes")
    tokenizer_json = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for token in tokenizer_json["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    tokenizer = Tokenizer(folder)
    (encoded,) = encode_record({"prompt": "a", "completion": "b"}, tokenizer).samples
    assert (encoded & ID_MASK).tolist()[-2:].count(tokenizer.eos_id) == 1
    assert tokenizer.decode(to_sample(encoded).answer[1].tolist()).strip() == "b"


# ---- token ids


def test_token_ids_and_labels_are_used_as_they_are(tiny, tmp_path):
    """Those of a conversation's sample give the same sample; the loss is that of transformers."""
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer(tiny)
    chats = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(6)]
    expected = load(write_records(tmp_path / "chats.jsonl", chats), tokenizer).train
    records = []
    for sample in expected:
        ids = [*sample.tokens.tolist(), int(sample.targets[-1])]
        records.append(
            {
                "input_ids": ids,
                "labels": [IGNORED, *sample.targets.tolist()],
                "text": "not read",
            }
        )
    padded = [
        {
            **record,
            "input_ids": [0, *record["input_ids"]],
            "labels": [IGNORED, *record["labels"]],
        }
        for record in records
    ]
    padded = [
        {**record, "attention_mask": [0] + [1] * (len(record["input_ids"]) - 1)}
        for record in padded
    ]
    for name, variant in {"plain": records, "padded": padded}.items():
        data = load(
            write_records(tmp_path / f"{name}.jsonl", variant), tokenizer, format="tokens"
        )
        for ours, theirs in zip(data.train, expected, strict=True):
            assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(
                ours.targets, theirs.targets
            )
            assert ours.answer is None
    model, reference = (
        litft.load(tiny, "fp32")[0],
        AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32),
    )
    for record, sample in zip(records, data.train, strict=True):
        ids, labels = (torch.tensor([record[name]]) for name in ("input_ids", "labels"))
        loss, count = model(sample.tokens[None], targets=sample.targets[None])
        assert float(loss / count) == pytest.approx(
            float(reference(ids, labels=labels).loss), rel=1e-5
        )


def test_a_prompt_that_ends_within_a_token_is_noted(tokenizer_folder, tmp_path):
    """Its last token goes on into the answer, which generation does not do."""
    tokenizer = Tokenizer(tokenizer_folder("header"))
    spaced = {"prompt": "Q: Who is it?\nA: ", "completion": "the cat"}
    # a line break and that at the beginning of the answer are one token
    lines = {"prompt": "Q: Who is it?\n", "completion": "\nthe cat"}
    moved = {"prompt": "Q: Who is it?\nA:", "completion": " the cat"}
    assert len(tokenizer.encode("\n\n", bos=False)) == 1
    # Llama 3 and Qwen join a sign with the letters after it
    joined = {"prompt": "Q: Who is it?\nA:", "completion": "the cat"}
    is_joined = tokenizer.encode(":the", bos=False)[:1] != tokenizer.encode(":", bos=False)
    for record, noted in (
        (spaced, 1),
        (lines, 1),
        (joined, int(is_joined)),
        (moved, 0),
    ):
        path = write_records(tmp_path / "a.jsonl", [record])
        data = load(path, tokenizer, vocab_size=1000, template="plain")
        assert data.count(WITHIN_TOKEN) == noted
        (sample,) = data.train
        prompt = tokenizer.encode(record["prompt"])
        assert (sample.tokens[: len(prompt)].tolist() == prompt) == (not noted)


def test_masks_of_tokenized_records_say_what_is_learned(tiny, tmp_path):
    """As in TRL (`build_labels` of its SFTTrainer): a token is learned if every mask has it."""
    masks = {"completion_mask": [0, 0, 1, 1, 1, 1], "assistant_masks": [1, 1, 1, 0, 1, 1]}
    record = {"input_ids": [5, 6, 7, 8, 9, 10], **masks}
    path = write_records(tmp_path / "a.jsonl", [record])
    (sample,) = load(path, Tokenizer(tiny)).train
    assert sample.targets.tolist() == [IGNORED, 7, IGNORED, 9, 10]


def test_a_cut_record_of_token_ids_adds_no_stop_token(tokenizer_folder, tmp_path):
    """Where another program's length limit has cut one record, its last token is that of no
    answer."""
    tokenizer = Tokenizer(tokenizer_folder("header"))
    stops = list(tokenizer.stop_ids)
    end, cut = (tokenizer.token_id(text) for text in ("<|eot_id|>", "<|start_header_id|>"))
    records = [
        {"input_ids": [5, 6, 7, end], "labels": [IGNORED, IGNORED, 7, end]}
        for _ in range(20)
    ]
    records[3] = {"input_ids": [5, 6, 7, cut], "labels": [IGNORED, IGNORED, 7, cut]}
    path = write_records(tmp_path / "a.jsonl", records)
    data = load(path, tokenizer, vocab_size=1000, format="tokens")
    assert data.tokenizer.stop_ids == [*stops, end] and tokenizer.stop_ids == stops


def test_token_ids_are_cut_and_masked(tiny, tmp_path):
    tokenizer = Tokenizer(tiny)
    path = write_records(
        tmp_path / "a.jsonl",
        [{"input_ids": list(range(5, 25))}, {"input_ids": [1, 2], "labels": [-100, -100]}],
    )
    data = load(path, tokenizer, max_seq_length=8)
    (sample,) = data.train
    assert sample.tokens.tolist() == list(range(5, 13)) and sample.targets.tolist() == list(
        range(6, 14)
    )
    assert data.count(CUT) == 1 and data.count(MASKED) == 1
    path = write_records(
        tmp_path / "b.jsonl", [{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]
    )
    assert load(path, tokenizer).train[0].targets.tolist() == [IGNORED, 3]
    assert load(path, tokenizer, mask_prompt=False).train[0].targets.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "must have the same length"),
        (
            {"input_ids": [1, 2], "loss_mask": [1]},
            "input_ids and loss_mask must have the same",
        ),
        (
            {"input_ids": [1, 2], "labels": [-100, 3]},
            "the label 3 is neither -100 nor the token id",
        ),
        ({"input_ids": [1, -2]}, "a negative token id"),
        ({"input_ids": "1 2"}, "field 'input_ids' must be a list of whole numbers"),
        ({"input_ids": [1, 2.0]}, "must be a list of whole numbers"),
        ({"input_ids": [1, True]}, "must be a list of whole numbers"),
        ({"input_ids": [1, 2**40]}, "is larger than any vocabulary"),
        ({"input_ids": [2**70, 1]}, "is larger than any vocabulary"),
        ({"input_ids": [1, 100_000]}, "the model's vocabulary ends at 511"),
        ({"input_ids": []}, "no example is left to train on"),
    ],
    ids=str,
)
def test_bad_token_ids_are_reported(tiny, tmp_path, record, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(write_records(tmp_path / "a.jsonl", [record]), Tokenizer(tiny))


def test_no_bar_of_a_histogram_ends_beyond_the_longest_sample():
    lengths = np.array([3, 7, 40, 64, 64])
    bars = histogram(lengths)
    assert bars[0][0] == 3 and bars[-1][1] == 64 and sum(count for _, _, count in bars) == 5
    for shortest, longest, count in bars:
        assert count == int(((lengths >= shortest) & (lengths <= longest)).sum())


def test_a_weight_that_leaves_no_example_of_a_file_is_refused(tmp_path, tiny):
    paths = []
    for name in "ab":
        records = [{"instruction": name, "output": str(n)} for n in range(4)]
        paths.append(str(write_records(tmp_path / f"{name}.jsonl", records)))
    args = DataArgs(path=paths, weights=[1, 0.1], val_fraction=0.0)
    with pytest.raises(
        ValueError, match=r"--data.weights 0.1: an epoch would have none of the 4 "
    ):
        load_data(args, Tokenizer(tiny), 512, 256)
    args = replace(args, weights=[1, 0])
    assert len(load_data(args, Tokenizer(tiny), 512, 256).train) == 4

    # what is not trained is not measured, either, and is no original of a copy
    data = load_data(replace(args, val_fraction=0.5), Tokenizer(tiny), 512, 256)
    assert list(data.train.sizes) == [4 - len(data.val)] and len(data.val)
    assert list(data.reports) == [paths[0]] and data.unused == [paths[1]]
    # neither is a validation file beside it
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("train", "val"):
        write_records(folder / f"{name}.jsonl", [{"instruction": name, "output": "x"}])
    beside = replace(args, path=[paths[0], str(folder)], val_fraction=0.5)
    assert len(load_data(beside, Tokenizer(tiny), 512, 256).val) == len(data.val)
    same = replace(args, path=[paths[1], paths[1]], weights=[0, 1], dedup="exact")
    assert len(load_data(same, Tokenizer(tiny), 512, 256).train) == 4


def test_the_answer_to_compare_is_one_that_is_learned(tmp_path, tiny):
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "two", "train": False},
    ]
    data = load(
        write_records(tmp_path / "a.jsonl", [{"messages": messages}]), Tokenizer(tiny)
    )
    _, answer = data.train[0].answer
    assert data.tokenizer.decode_answer(answer.tolist()).strip() == "one"
