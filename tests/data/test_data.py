"""Examples to samples: masks, limits, splits, the cache, and what is said about a bad record."""

import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ENV, write_records

import litft
from litft.args import DataArgs
from litft.data import digests, token_cache
from litft.data.chat_template import STYLES
from litft.data.dataset import load_data
from litft.data.digests import digest_of
from litft.data.encoder import (
    CONTROL,
    CUT,
    CUT_AWAY,
    EMPTY,
    END_TEXT,
    ID_MASK,
    MASKED,
    SUPERVISED,
    UNANSWERED,
    Encoder,
    to_sample,
)
from litft.data.readers import read_records
from litft.data.tokenizer import Tokenizer
from litft.model.loss import IGNORED
from litft.pretrained import DEMO

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "Who\nare you?"},
    {"role": "assistant", "content": " I am a model."},
]


def encoded(record, tokenizer, **settings):
    """What becomes of one record; what is wrong with it is raised."""
    settings = {"limit": 2048, **settings}
    found = Encoder(tokenizer, **settings)("here", record)
    if found.error:
        raise ValueError(found.error)
    return found


def make_sample(messages, tokenizer, mask_prompt=True):
    """The one sample of a conversation."""
    (kept,) = encoded({"messages": messages}, tokenizer, mask_prompt=mask_prompt).samples
    return to_sample(kept)


def load(path, tokenizer, vocab_size=512, context=256, **settings):
    """Both splits of a file, nothing held out unless asked for."""
    args = DataArgs(path=[str(path)], **{"val_fraction": 0.0, **settings})
    return load_data(args, tokenizer, vocab_size, context)


def said(sample, tokenizer) -> str:
    """What the loss counts, as text."""
    return tokenizer.decode(sample.targets[sample.targets != IGNORED].tolist(), skip_special=False)


NAMES = ["SmolLM2-135M-Instruct", "stories260K", "demo", "llama-3.1", "qwen2.5", "tinyllama-1.1b-chat"]


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request, shared, checkpoints):
    """Tokenizers with and without BOS and a template of their own; in SmolLM2 and the demo pad is the end token."""
    folders = {**checkpoints, "demo": DEMO / "base"}
    return Tokenizer(folders.get(request.param, shared / "tokenizers" / request.param))


def test_the_loss_counts_each_answer_and_its_end(tokenizer):
    sample = make_sample(TALK, tokenizer)
    text = said(sample, tokenizer)
    first, second = (text.index(part) for part in ("Hi there.", "I am a model."))
    rest = text.replace("Hi there.", "").replace("I am a model.", "").replace(" ", "").replace("\n", "")
    end = tokenizer.decode([int(sample.targets[sample.targets != IGNORED][-1])], skip_special=False)
    assert first < second and rest == end * 2
    assert tokenizer.token_id(end) in tokenizer.special_ids
    assert "Hello?" not in text and "Be brief" not in text


def test_all_tokens_on_request(tokenizer):
    sample = make_sample(TALK, tokenizer, False)
    assert sample.supervised == sample.targets.numel() and torch.equal(sample.targets[:-1], sample.tokens[1:])


def test_training_reads_what_inference_reads(tokenizer):
    """One BOS where the tokenizer has one, the rendered text's own tokens, and the prompt of inference as a prefix."""
    sample = make_sample(TALK, tokenizer)
    if tokenizer.adds_bos:
        assert sample.tokens[0] == tokenizer.bos_id
        assert (sample.tokens == tokenizer.bos_id).sum() == 1
    prompt = tokenizer.encode(tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True), bos=False)
    start = int((sample.targets != IGNORED).nonzero()[0])
    first = tokenizer.encode(tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True), bos=False)
    assert sample.tokens[: start + 1].tolist() == first
    assert sample.tokens[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("mask_prompt", [True, False])
def test_the_last_answer_and_what_generation_reads_before_it(tokenizer, mask_prompt):
    prompt, answer = make_sample(TALK, tokenizer, mask_prompt).answer
    text = tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True)
    assert prompt.tolist() == tokenizer.encode(text, bos=False)
    assert tokenizer.decode(answer.tolist()).strip() == "I am a model."


def test_the_rendered_text_is_transformers(checkpoints, shared):
    from transformers import AutoTokenizer

    folder = checkpoints["SmolLM2-135M-Instruct"]
    tokenizer, reference = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for _, record in [pair for pair, _ in zip(read_records(shared / "data" / "alpaca_2k.json"), range(200), strict=False)]:
        (kept,) = encoded(record, tokenizer).samples
        content = "\n\n".join(filter(None, (record["instruction"], record["input"])))
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": record["output"]}]
        expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert (kept & ID_MASK).tolist() == expected


def test_cut_and_skipped_examples_are_counted(tmp_path, tiny):
    _, tokenizer = litft.load(tiny)
    record = {"instruction": "a", "input": "", "output": "once upon a time " * 20}
    long = {"instruction": "once upon a time " * 30, "input": "", "output": "a"}
    path = write_records(tmp_path / "a.jsonl", [record, long, {"instruction": "a", "input": "", "output": "b"}])
    data = load(path, tokenizer, max_seq_length=150)
    assert (len(data.train), data.count(CUT, CUT_AWAY), data.skipped) == (2, 2, 1)
    assert max(sample.tokens.numel() for sample in data.train) == 150
    assert min(sample.supervised for sample in data.train) > 0
    assert data.train.lengths.tolist() == [sample.tokens.numel() for sample in data.train]
    assert data.train.supervised.tolist() == [sample.supervised for sample in data.train]
    with pytest.raises(ValueError, match="no example has an answer within 5 tokens: all 3 were skipped"):
        load(path, tokenizer, max_seq_length=5)


QUESTION, ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}


@pytest.mark.parametrize(
    "messages, settings, learned, notes",
    [
        ([QUESTION, ANSWER, QUESTION, ANSWER], {}, "two two", []),
        ([QUESTION, ANSWER | {"content": "three"}, QUESTION, ANSWER], {"last_only": True}, "two", []),
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
def test_which_turns_are_learned(tiny, messages, settings, learned, notes):
    tokenizer = Tokenizer(tiny)
    found = encoded({"messages": messages}, tokenizer, **settings)
    assert found.notes == notes
    texts = [said(to_sample(kept), tokenizer).replace("</s>", " ").split() for kept in found.samples]
    assert texts == ([learned.split()] if learned else [])


def test_a_template_that_rewrites_history_gives_each_turn_a_sample(tiny, shared):
    tokenizer = Tokenizer(tiny)
    tokenizer.use_template((shared / "chat_templates" / "Qwen-QwQ-32B.jinja").read_text("utf-8"))
    thought = {"role": "assistant", "content": "<think>\n1+1\n</think>\n\ntwo"}
    found = encoded({"messages": [QUESTION, thought, QUESTION, thought]}, tokenizer)
    samples = [to_sample(kept) for kept in found.samples]
    assert len(samples) == 2 and len(set(found.units)) == 1
    assert all("1+1" in said(sample, tokenizer) and "two" in said(sample, tokenizer) for sample in samples)
    second = tokenizer.decode(samples[1].tokens.tolist())
    assert second.count("1+1") == 1  # what was thought before is not read again


def test_a_text_becomes_windows_in_which_each_token_is_a_target_once(tmp_path, tiny):
    tokenizer = Tokenizer(tiny)
    text = "".join(f"once upon a time there were {n} girls " for n in range(600))
    (tmp_path / "a.txt").write_text(text)
    data = load(tmp_path / "a.txt", tokenizer, max_seq_length=64)
    ids = tokenizer.encode(text, eos=True)
    assert data.train.lengths[:-1].tolist() == [64] * (len(data.train) - 1) and len(data.train) > 4
    assert torch.cat([sample.targets for sample in data.train]).tolist() == ids[1:]
    assert torch.cat([sample.tokens for sample in data.train]).tolist() == ids[:-1]
    held = load(tmp_path / "a.txt", tokenizer, max_seq_length=64, val_fraction=0.3)
    runs = np.concatenate([half.sample_index.starts for half in (held.train, held.val)])
    runs = sum(start not in runs + 64 for start in runs)  # of which the first token is no target
    assert runs > 3 and held.train.lengths.sum() + held.val.lengths.sum() == len(ids) - runs


@pytest.mark.parametrize("text", ["Once upon", "<s>Once upon", "Once upon</s>", "<s>Once upon</s>"])
def test_a_text_has_one_beginning_and_one_end(tiny, text):
    """design.md 4.3: also one that brings them."""
    tokenizer = Tokenizer(tiny)
    (kept,) = encoded({"text": text}, tokenizer).samples
    ids = (kept & ID_MASK).tolist()
    assert ids == tokenizer.encode("Once upon", eos=True) and ids.count(tokenizer.bos_id) == 1


def test_splits(tmp_path, tiny):
    _, tokenizer = litft.load(tiny)
    records = [{"instruction": str(n), "input": "", "output": str(n)} for n in range(20)]
    whole = write_records(tmp_path / "whole.json", records)
    first, again, other = (load(whole, tokenizer, val_fraction=0.25, seed=seed) for seed in (1, 1, 2))
    names = [{tuple(s.tokens.tolist()) for s in data.val} for data in (first, again, other)]
    assert len(first.train) + len(first.val) == 20 and len(first.val) and names[0] == names[1] != names[2]
    assert first.train_digest == again.train_digest != other.train_digest
    assert not names[0] & {tuple(s.tokens.tolist()) for s in first.train}
    (tmp_path / "folder").mkdir()
    write_records(tmp_path / "folder" / "train.jsonl", records[:12])
    write_records(tmp_path / "folder" / "validation.json", records[12:])
    data = load(tmp_path / "folder", tokenizer, val_fraction=0.5)
    assert (len(data.train), len(data.val)) == (12, 8)


@pytest.mark.parametrize("name, text", [("a.txt", "once upon a time there was a girl " * 90), ("a.json", None)])
def test_examples_longer_than_the_models_context_are_refused(tmp_path, tiny, name, text):
    """Rows of packed examples may be longer; no example in them is."""
    tokenizer = Tokenizer(tiny)
    if text:
        (tmp_path / name).write_text(text)
    else:
        write_records(tmp_path / name, [{"instruction": "Count.", "output": "one two three " * n} for n in (1, 2, 70)])
    with pytest.raises(ValueError, match=r"max_seq_length 4000: the longest example has .* was made for 256; use 256"):
        load(tmp_path / name, tokenizer, max_seq_length=4000)
    write_records(tmp_path / "short.json", [{"instruction": "Count.", "output": "one two " * n} for n in (1, 2, 3)])
    assert load(tmp_path / "short.json", tokenizer, max_seq_length=4000).limit == 4000


def numbers(samples, tokenizer):
    """The records that samples are of, each of which says its number first."""
    return {int(re.search(r"No (\d+)", tokenizer.decode(sample.tokens.tolist()))[1]) for sample in samples}


def test_each_record_stays_on_its_side(tmp_path, tiny):
    """design.md 4.16: whatever else is in the file, and however it is read."""
    records = [
        {"instruction": f"No {n}", "input": "x" * (n % 3 * 30), "output": "once upon a time " * (n % 9)}
        for n in range(1, 300)
    ]
    path, base = write_records(tmp_path / "a.json", records), dict(val_fraction=0.1)
    tokenizer = Tokenizer(tiny)
    data = load(path, tokenizer, **base)
    train, val = numbers(data.train, tokenizer), numbers(data.val, tokenizer)
    assert 15 <= len(val) <= 45 and not train & val
    shuffled = random.Random(0).sample(records, len(records))
    questions = [{"question": r["instruction"], "say": r["input"], "answer": r["output"]} for r in records]
    for other, settings in (
        (records, dict(max_seq_length=232)),  # loses some
        (records, dict(template="chatml")),
        (records, dict(mask_prompt=False)),
        (shuffled, {}),
        (records[7:], {}),
        ([r for r in records if r["input"]] * 2, {}),
    ):
        data = load(write_records(tmp_path / "b.json", other), Tokenizer(tiny), **base, **settings)
        assert not numbers(data.train, tokenizer) & val and not numbers(data.val, tokenizer) & train
        assert len(data.train) + len(data.val) + data.skipped == len(other)
        assert "max_seq_length" not in settings or 20 < data.skipped < 150
    both = [r["instruction"] for r in records if not r["input"]]
    again = load(
        write_records(tmp_path / "c.json", questions),
        Tokenizer(tiny),
        columns=["instruction=question", "output=answer"],
        **base,
    )
    assert numbers(again.val, tokenizer) & {int(text[3:]) for text in both} == val & {int(text[3:]) for text in both}


def test_text_stays_on_its_side_whatever_its_windows(tmp_path, tiny, checkpoints):
    (tmp_path / "a.txt").write_text(text := "".join(f"There were {n} girls in town {n % 97}.\n" for n in range(3000)))
    sides = []
    for folder, limit in ((tiny, 64), (tiny, 200), (checkpoints["stories15M"], 200)):
        tokenizer = Tokenizer(folder)
        halves = load(tmp_path / "a.txt", tokenizer, vocab_size=32000, max_seq_length=limit, val_fraction=0.1)
        learned = [torch.cat([sample.targets for sample in half]) for half in (halves.train, halves.val)]
        read = [tokenizer.decode(ids.tolist()) for ids in learned]
        sides.append([set(re.findall(r"were (\d+) girls", each)) for each in read])
        assert 0.03 * len(text) < len(read[1]) < 0.25 * len(text) and len(sides[-1][0] & sides[-1][1]) < 40
    for train, val in sides[1:]:  # but for what lies across an edge
        assert len(train ^ sides[0][0]) < 60 and len(val ^ sides[0][1]) < 60


def test_something_is_held_out_and_something_stays(tmp_path, tiny):
    tokenizer = Tokenizer(tiny)
    records = [{"instruction": f"No {n}", "output": "Yes."} for n in range(4)]
    for count, fraction, held in ((4, 1e-9, 1), (4, 0.999999, 3), (1, 0.5, 0), (4, 0.0, 0)):
        data = load(write_records(tmp_path / f"{count}.json", records[:count]), tokenizer, val_fraction=fraction)
        assert (len(data.train), len(data.val)) == (count - held, held)
    data = load(write_records(tmp_path / "same.json", records[:2] * 50), tokenizer, val_fraction=0.5)
    assert (len(data.train), len(data.val)) == (50, 50) and not len(data.duplicates)


def test_turns_of_a_conversation_stay_in_one_split(tmp_path, tiny, shared):
    tokenizer = Tokenizer(tiny)
    thoughts = [{"role": "assistant", "content": f"<think>\n{n}\n</think>\n\n{n}"} for n in range(40)]
    path = write_records(tmp_path / "a.json", [{"messages": [QUESTION, t, QUESTION, t]} for t in thoughts])
    template = str(shared / "chat_templates" / "Qwen-QwQ-32B.jinja")
    data = load(path, tokenizer, val_fraction=0.25, template=template)
    kept, out = ({said(sample, tokenizer) for sample in half} for half in (data.train, data.val))
    assert len(data.train) == 2 * len(kept) and len(data.val) == 2 * len(out) > 0 and not kept & out


def test_a_duplicate_of_a_validation_sample_is_found(tmp_path, tiny):
    tokenizer = Tokenizer(tiny)
    records = [{"instruction": str(n), "input": "", "output": str(n)} for n in range(10)]
    train, val = (
        write_records(tmp_path / "train.json", records),
        write_records(tmp_path / "val.json", [records[3], records[8], {"text": "x"}]),
    )
    data = load(train, tokenizer, val_path=str(val))
    assert data.duplicates.tolist() == [3, 8]


def test_texts_that_begin_alike_are_no_duplicates(tmp_path, tiny):
    """Windows are the same token for token, or they are not."""
    tokenizer, start = Tokenizer(tiny), "once upon a time there was a licence. " * 60
    for name in ("a", "b"):
        own = "".join(f"{name} saw {n} dogs. " for n in range(300))
        (tmp_path / f"{name}.txt").write_text(start + own)
    data = load(tmp_path / "a.txt", tokenizer, val_path=str(tmp_path / "b.txt"), max_seq_length=100)
    held_out = {tuple(sample.tokens.tolist()) for sample in data.val}
    alike = [number for number, sample in enumerate(data.train) if tuple(sample.tokens.tolist()) in held_out]
    assert data.duplicates.tolist() == alike and 2 < len(alike) < len(data.train) / 2


def test_an_answer_has_one_name_whatever_the_template(tmp_path, tiny, shared):
    """Of a conversation one template makes one example, and another one of each turn."""
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\n1\n</think>\n\none"}]
    path, found = write_records(tmp_path / "a.json", [{"messages": talk + talk}] * 2), []
    for template in ("alpaca", str(shared / "chat_templates" / "Qwen-QwQ-32B.jinja")):
        tokenizer = Tokenizer(tiny)
        data = load(path, tokenizer, vocab_size=600, template=template).train
        found.append({name: sample.answer[1].tolist() for name, sample in zip(data.names, data, strict=True)})
    one, each = found
    assert len(one) == 2 and len(each) == 4 and one.keys() <= each.keys()
    assert {turn for _, turn, _ in one} == {6} and {turn for _, turn, _ in each} == {2, 6}


def test_an_example_with_a_cut_answer_has_a_name_of_its_own(tmp_path, tiny):
    """Its loss counts tokens of that answer, of which the example without it has none."""
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one"}]
    path = write_records(
        tmp_path / "a.json", [{"messages": [*talk, talk[0], {"role": "assistant", "content": "two " * 50}]}]
    )
    found = set()
    for length in (140, 200):
        samples = load(path, Tokenizer(tiny), template="vicuna", val_fraction=0.0, max_seq_length=length).train
        found |= {turn for _, turn, _ in samples.names}
    assert found == {2, 3}


def test_several_paths_with_weights(tmp_path, tiny):
    from litft.data.sampler import Sampler

    tokenizer = Tokenizer(tiny)
    paths = []
    for name, count in (("a", 10), ("b", 6)):
        paths.append(
            str(write_records(tmp_path / f"{name}.json", [{"instruction": name, "output": str(n)} for n in range(count)]))
        )
    args = DataArgs(path=paths, weights=[0.5, 2], val_fraction=0.0)
    data = load_data(args, tokenizer, 512, 256)
    order = Sampler(data.train.sizes, 1, data.weights)
    assert data.train.sizes == [10, 6] and order.size == 17
    for epoch in range(3):
        drawn = order.indices(17 * epoch, 17 * (epoch + 1))
        counts = np.bincount(drawn, minlength=16)
        assert counts[:10].sum() == 5 and counts[:10].max() == 1 and (counts[10:] == 2).all()
    assert set(order.indices(0, 17)) != set(order.indices(17, 34))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", '[{"instruction": "a", "output": "b"}, {"foo": "c"}]', "record 1: no known format has the fields 'foo'"),
        ("a.json", '[{"instruction": "a", "output": 3}]', "record 0: field 'output' must be text, found a number"),
        ("a.json", '[{"messages": [{"role": "user", "content": "a"}]}]', "record 0: no message is from the assistant"),
        ("a.jsonl", '{"text": "a"}\n{"x": }\n3', "(?s)line 2: invalid JSON.*line 3: an example must.*2 of 3 records"),
        ("a.json", '[{"text": "a"}', "line 1: invalid JSON"),
    ],
)
def test_a_bad_file_is_named_with_line_or_record(tmp_path, tiny, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name, Tokenizer(tiny))
    assert not list(token_cache.cache_folder().glob("*.partial"))


def test_a_share_of_bad_records_can_be_allowed(tmp_path, tiny):
    records = [{"instruction": "a", "output": "b"}] * 18 + [{"foo": 1}, {"bar": 2}]
    path = write_records(tmp_path / "a.json", records)
    with pytest.raises(ValueError, match=r"(?s)record 18.*record 19.*2 of 20 records .* are bad; --data.skip_bad"):
        load(path, Tokenizer(tiny), skip_bad=0.05)
    data = load(path, Tokenizer(tiny), skip_bad=0.1)
    count, first = data.reports[str(path)].bad
    assert len(data.train) == 18 and count == 2 and "record 18" in first[0] and "record 19" in first[1]
    with pytest.raises(ValueError, match=r"2 of 20 records"):
        load(path, Tokenizer(tiny), skip_bad=0.05)  # also out of the cache


def test_a_format_and_columns_by_name(tmp_path, tiny):
    tokenizer = Tokenizer(tiny)
    path = write_records(tmp_path / "a.json", [{"text": "one", "label": "two"}])
    ((sample),) = load(path, tokenizer, columns=["prompt=text", "completion=label"]).train
    assert said(sample, tokenizer).split() == ["two</s>"]
    with pytest.raises(ValueError, match=r"--data.columns foo=...: no format has that field; known: answer, "):
        load(path, tokenizer, columns=["foo=text"])
    with pytest.raises(ValueError, match=r"is a folder; name a file of examples in it"):
        load(path, tokenizer, val_path=str(tmp_path), columns=["prompt = text", "completion=label"])
    with pytest.raises(ValueError, match=r"record 0: --data.format alpaca needs the fields instruction, output"):
        load(path, tokenizer, format="alpaca")


def test_a_turns_end_becomes_a_stop_token(tmp_path, shared):
    """Also where only the template knows it, and never from an example that was cut."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there, you"}]
    path = write_records(tmp_path / "a.jsonl", [{"messages": talk}])
    for limit, expected in ((None, [128001, 128009]), (10, [128001])):
        tokenizer = Tokenizer(shared / "tokenizers" / "llama-3.1")
        for mask_prompt in (True, False):
            tokenizer.stop_ids = [128001]
            try:
                load(path, tokenizer, 128256, 4096, max_seq_length=limit, mask_prompt=mask_prompt)
            except ValueError as error:
                assert "all 1 were skipped" in str(error)
            assert tokenizer.stop_ids == expected, (limit, mask_prompt)


def test_an_end_token_outside_the_vocabulary_is_named_too(tmp_path, shared):
    """It is the last target and never an input."""
    path = write_records(tmp_path / "a.json", [{"instruction": "hi", "output": "hello"}])
    tokenizer = Tokenizer(shared / "tokenizers" / "llama-3.1")
    # without BOS, whose id is beyond the limit as well
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ '<|eot_id|>' if m.role == 'assistant' }}{% endfor %}"
    with pytest.raises(ValueError, match=r"eot_id.* has the id 128009, .* vocabulary ends at 127999"):
        load(path, tokenizer, 128000, 4096)


def test_ids_outside_the_vocabulary_are_named(tmp_path, tiny):
    path = write_records(tmp_path / "a.json", [{"instruction": "a", "output": "zebra"}])
    with pytest.raises(ValueError, match=r"record 0: token .* has the id \d+, but the model's vocabulary ends at 63"):
        load(path, Tokenizer(tiny), 64)
    largest = max(store.report.largest[0] for store in load(path, Tokenizer(tiny)).train.stores)
    assert len(load(path, Tokenizer(tiny), largest + 1).train) == 1
    with pytest.raises(ValueError, match=f"has the id {largest}, but the model's vocabulary ends at {largest - 1}"):
        load(path, Tokenizer(tiny), largest)


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "litft"


def entries(folder) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir() and path.name != "digests"}


def test_what_decides_the_tokens_decides_the_entry(tmp_path, tiny, own_cache):
    """design.md 4.13: data, tokenizer, template, mask policy, length, and code."""
    path = write_records(tmp_path / "a.json", [{"messages": TALK[1:]}])
    load(path, Tokenizer(tiny))
    (first,) = entries(own_cache)
    load(path, Tokenizer(tiny))
    assert entries(own_cache) == {first}
    changes = [{"mask_prompt": False}, {"train_on": "last"}, {"max_seq_length": 250}, {"template": "vicuna"}]
    changes += [{"columns": ["messages=messages"]}, {"format": "messages"}]
    for number, change in enumerate(changes, 2):
        load(path, Tokenizer(tiny), **change)
        assert len(entries(own_cache)) == number, change
    before = load(path, Tokenizer(tiny)).train_digest
    tokenizer = Tokenizer(tiny)
    tokenizer.add_tokens(["there"])
    load(path, tokenizer, 600)
    assert len(entries(own_cache)) == len(changes) + 2
    write_records(path, [{"messages": TALK[1:3]}])
    assert load(path, Tokenizer(tiny)).train_digest != before
    assert len(entries(own_cache)) == len(changes) + 3


def test_another_version_of_the_code_tokenizes_anew(tmp_path, tiny, own_cache, monkeypatch):
    path = write_records(tmp_path / "a.json", [{"messages": TALK[1:]}])
    load(path, Tokenizer(tiny))
    monkeypatch.setattr(token_cache, "version", lambda name: "another")
    token_cache._code_version.cache_clear()
    load(path, Tokenizer(tiny))
    token_cache._code_version.cache_clear()
    assert len(entries(own_cache)) == 2


def test_many_records_are_tokenized_in_parallel_to_the_same_samples(shared, checkpoints, tmp_path):
    encoder = Encoder(Tokenizer(checkpoints["SmolLM2-135M-Instruct"]), 512)
    records = list(read_records(shared / "data" / "alpaca_2k.json"))[:600]
    alone = [encoder(where, record) for where, record in records]
    chunks = iter([records[start : start + 50] for start in range(0, 600, 50)])
    with (tmp_path / "lock").open("w") as lock:
        together = list(token_cache._in_parallel(chunks, encoder, 2, lock))
    assert [found.where for found in together] == [found.where for found in alone]
    for one, other in zip(alone, together, strict=True):
        assert all(map(np.array_equal, one.samples, other.samples)) and len(one.samples) == len(other.samples)


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
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_file_is_hashed_once_while_nothing_of_it_has_changed(tmp_path, own_cache, monkeypatch):
    """What is written in its place is seen, also where its size and its time of change are those of the old one."""
    read = []
    hashed = digests._hash_file
    monkeypatch.setattr(digests, "_hash_file", lambda path: read.append(path) or hashed(path))
    path = tmp_path / "a.json"
    path.write_text("one")
    first = digest_of(path)
    assert digest_of(path) == first == hashed(path) and len(read) == 2  # too young to be sure
    monkeypatch.setattr(digests, "SETTLED", 0)
    assert digest_of(path) == first and len(read) == 2
    times = path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns and digest_of(path) == hashed(path) != first
    other = tmp_path / "b.json"
    other.write_text("six")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    assert digest_of(path) == hashed(path)
    for entry in own_cache.glob("digests/*"):
        entry.write_text("no JSON")
    assert digest_of(path) == hashed(path)


def test_processes_that_prepare_at_once_do_not_collide(tmp_path, tiny, own_cache):
    path = write_records(
        tmp_path / "a.jsonl", [{"instruction": str(n), "output": "once upon a time " * 9} for n in range(3000)]
    )
    processes = [prepare(path, tiny) for _ in range(2)]
    answers = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(set(answers)) == 1 and sum(map(int, answers[0].split()[1:])) == 3000
    assert len(entries(own_cache)) == 1 and not list(own_cache.glob("*.partial"))


def test_a_process_killed_while_it_prepares_leaves_nothing_in_the_way(tmp_path, tiny, own_cache):
    path = write_records(
        tmp_path / "a.jsonl", [{"instruction": str(n), "output": "once upon a time " * 30} for n in range(6000)]
    )
    process = prepare(path, tiny)
    while not list(own_cache.glob("*.partial/tokens.bin")):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)  # it alone: those that it has forked must go by themselves
    process.wait()
    assert list(own_cache.glob("*.partial"))
    assert len(load(path, Tokenizer(tiny)).train) == 6000
    assert len(entries(own_cache)) == 1 and not list(own_cache.glob("*.partial"))


@pytest.mark.parametrize("damage", ["tokens cut", "tokens gone", "no report", "half a report", "empty report", "no units"])
def test_a_damaged_entry_is_made_anew(tmp_path, tiny, own_cache, damage):
    path = write_records(tmp_path / "a.json", [{"messages": TALK[1:]}] * 9)
    whole = load(path, Tokenizer(tiny))
    expected = whole.train[8].tokens.tolist()  # before the file that it is read from is damaged
    (entry,) = (own_cache / name for name in entries(own_cache))
    report, tokens = entry / "report.json", entry / "tokens.bin"
    {
        "tokens cut": lambda: tokens.write_bytes(tokens.read_bytes()[:-200]),
        "tokens gone": tokens.unlink,
        "no report": report.unlink,
        "half a report": lambda: report.write_text(report.read_text()[:50]),
        "empty report": lambda: report.write_text("{}"),
        "no units": lambda: (entry / "units.npy").write_bytes(b""),
    }[damage]()
    again = load(path, Tokenizer(tiny))
    assert again.train_digest == whole.train_digest and again.train[8].tokens.tolist() == expected


def test_a_whole_cache_that_is_read_only_serves(tmp_path, tiny, own_cache):
    path = write_records(tmp_path / "a.json", [{"messages": TALK[1:]}])
    whole = load(path, Tokenizer(tiny))
    for lock in own_cache.glob("*.lock"):
        lock.unlink()
        lock.mkdir()  # which not even root can open for writing
    assert load(path, Tokenizer(tiny)).train_digest == whole.train_digest


def test_a_day_that_the_template_writes_is_part_of_the_data(tmp_path, tiny, own_cache):
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}\n" + STYLES["vicuna"])
    path = write_records(tmp_path / "a.json", [{"messages": TALK[1:]}])
    tokenizer = Tokenizer(tiny)
    days = [load(path, tokenizer, template=str(template), date=day) for day in ("2026-01-01", "2026-06-01", "2026-01-01")]
    assert days[0].train_digest == days[2].train_digest != days[1].train_digest and len(entries(own_cache)) == 2
    assert "01 Jan 2026" in tokenizer.decode(days[0].train[0].tokens.tolist())


def test_a_cache_that_cannot_be_written_says_where_else(tmp_path, tiny, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = write_records(tmp_path / "a.json", [{"messages": TALK[1:]}])
    with pytest.raises(ValueError, match="Not a directory; set XDG_CACHE_HOME to another folder"):
        load(path, Tokenizer(tiny))


# ---- styles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_every_style_learns_each_answer_and_its_end(tiny, style):
    tokenizer = Tokenizer(tiny)
    tokenizer.use_template(STYLES[style])
    for talk in (TALK, TALK[1:]):
        found = encoded({"messages": talk}, tokenizer)
        texts = "".join(said(to_sample(kept), tokenizer) for kept in found.samples)
        rest = texts.replace("Hi there.", "").replace("I am a model.", "").replace(" ", "").replace("\n", "")
        assert rest.replace("</s>", "") in ("", "<|im_end|>" * 2, "<|eot_id|>" * 2, "<end_of_turn>" * 2, "<|end|>" * 2)
        assert texts.count("</s>") == 2 and "Hello?" not in texts and "Be brief" not in texts


def test_guanacos_texts_are_conversations(tmp_path, tiny):
    """Which decides how --eval.prompts are asked."""
    path = write_records(tmp_path / "a.jsonl", [{"text": "### Human: once### Assistant: upon"}] * 2)
    (report,) = load(path, Tokenizer(tiny)).reports.values()
    assert report.formats == {"guanaco": 2}


def test_a_prompt_that_is_learned_is_learned_once(tiny, shared):
    """Also where a template shows each turn in a text of its own."""
    tokenizer = Tokenizer(tiny)
    tokenizer.use_template((shared / "chat_templates" / "Qwen-QwQ-32B.jinja").read_text("utf-8"))
    thought = {"role": "assistant", "content": "<think>\n1+1\n</think>\n\ntwo"}
    first, second = encoded({"messages": [QUESTION, thought, QUESTION, thought]}, tokenizer, mask_prompt=False).samples
    same = next(i for i, (a, b) in enumerate(zip(first & ID_MASK, second & ID_MASK, strict=False)) if a != b)
    assert (first & SUPERVISED).all() and not (second[:same] & SUPERVISED).any()
    assert (second[same:] & SUPERVISED).all() and same > 5


def test_columns_that_no_record_has_are_told(tmp_path, tiny):
    pair = {"instruction": "a", "output": "b"}
    path = write_records(tmp_path / "a.jsonl", [pair | {"ctx": "c"}, pair])
    with pytest.raises(ValueError, match=r"--data.columns input=contxt: no record has the field 'contxt'"):
        load(path, Tokenizer(tiny), columns=["input=contxt"])
    data = load(path, Tokenizer(tiny), columns=["input=ctx"])
    assert data.count("without the field ctx") == 1 and len(data.train) == 2


def test_an_end_token_that_is_not_special_is_learned_once(tmp_path, shared):
    """As some checkpoints have it: what the tokenizer calls its EOS ends an answer, and is no part of it."""
    folder = shutil.copytree(shared / "tokenizers" / "qwen2.5", tmp_path / "qwen")
    for path in folder.glob("*.gz"):
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    saved = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for token in saved["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer(folder)
    (kept,) = encoded({"prompt": "a", "completion": "b"}, tokenizer).samples
    assert (kept & ID_MASK).tolist()[-2:].count(tokenizer.eos_id) == 1
    assert tokenizer.decode(to_sample(kept).answer[1].tolist()).strip() == "b"
