"""Files to samples: formats, masks, splits, and what is said about a bad record."""

import json

import pytest
import torch

import litft
from litft.args import DataArgs
from litft.data.records import read_records, to_messages
from litft.data.samples import load_data, make_sample
from litft.folder import DEMO
from litft.loss import IGNORED
from litft.tokenizer import Tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "Who\nare you?"},
    {"role": "assistant", "content": " I am a model."},
]


def write(path, records):
    lines = path.suffix == ".jsonl"
    path.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records), "utf-8")
    return path


def said(sample, tokenizer) -> str:
    """What the loss counts, as text."""
    return tokenizer.decode(sample.targets[sample.targets != IGNORED].tolist(), skip_special=False)


@pytest.fixture(params=["SmolLM2-135M-Instruct", "stories260K", "demo", "llama-3.1", "qwen2.5", "tinyllama-1.1b-chat"])
def tokenizer(request, shared, checkpoints):
    """Tokenizers with and without BOS and a template of their own; in SmolLM2 and the demo pad is the end token."""
    folders = {**checkpoints, "demo": DEMO / "base"}
    return Tokenizer(folders.get(request.param, shared / "tokenizers" / request.param))


def test_the_loss_counts_each_answer_and_its_end(tokenizer):
    sample = make_sample(TALK, tokenizer, True, "here")
    text = said(sample, tokenizer)
    first, second = (text.index(part) for part in ("Hi there.", "I am a model."))
    rest = text.replace("Hi there.", "").replace("I am a model.", "").replace(" ", "").replace("\n", "")
    end = tokenizer.decode([int(sample.targets[sample.targets != IGNORED][-1])], skip_special=False)
    assert first < second and rest == end * 2
    assert tokenizer.token_id(end) in tokenizer.special_ids
    assert "Hello?" not in text and "Be brief" not in text


def test_all_tokens_on_request(tokenizer):
    sample = make_sample(TALK, tokenizer, False, "here")
    assert sample.supervised == sample.targets.numel() and torch.equal(sample.targets[:-1], sample.tokens[1:])


def test_training_reads_what_inference_reads(tokenizer):
    """One BOS where the tokenizer has one, the rendered text's own tokens, and the prompt of inference as a prefix."""
    sample = make_sample(TALK, tokenizer, True, "here")
    if tokenizer.adds_bos:
        assert sample.tokens[0] == tokenizer.bos_id
        assert (sample.tokens == tokenizer.bos_id).sum() == 1
    prompt = tokenizer.encode(tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True), bos=False)
    start = int((sample.targets != IGNORED).nonzero()[0])
    first = tokenizer.encode(tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True), bos=False)
    assert sample.tokens[: start + 1].tolist() == first
    assert sample.tokens[: len(prompt)].tolist() == prompt


def test_the_rendered_text_is_transformers(checkpoints, shared):
    from transformers import AutoTokenizer

    folder = checkpoints["SmolLM2-135M-Instruct"]
    tokenizer, reference = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for where, record in read_records(shared / "data" / "alpaca_2k.json")[:200]:
        messages = to_messages(record, where, tokenizer.chat_template)
        expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert make_sample(messages, tokenizer, True, where).tokens.tolist() == expected[:-1]


def test_formats_mean_the_same(tmp_path):
    alpaca = [{"instruction": "Add.", "input": "", "output": "3"}]
    talk = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}]
    parts = [dict(m, content=[{"type": "text", "value": m["content"]}]) for m in talk]
    files = [
        write(tmp_path / "a.json", alpaca),
        write(tmp_path / "b.jsonl", alpaca),
        write(tmp_path / "c.jsonl", [{"messages": talk}]),
        write(tmp_path / "d.json", [{"messages": parts}]),
    ]
    for path in files:
        ((where, record),) = read_records(path)
        assert to_messages(record, where, "") == talk


def test_cut_and_skipped_examples_are_counted(tmp_path, tiny):
    _, tokenizer = litft.load(tiny)
    record = {"instruction": "a", "input": "", "output": "once upon a time " * 20}
    long = {"instruction": "once upon a time " * 30, "input": "", "output": "a"}
    path = write(tmp_path / "a.jsonl", [record, long, {"instruction": "a", "input": "", "output": "b"}])
    data = load_data(DataArgs(path=str(path), val_fraction=0, max_seq_length=150), tokenizer, 512, 256)
    assert (len(data.train), data.truncated, data.skipped) == (2, 2, 1)
    assert max(sample.tokens.numel() for sample in data.train) == 150
    assert min(sample.supervised for sample in data.train) > 0
    with pytest.raises(ValueError, match="no example has an answer within 5 tokens: all 3 were skipped"):
        load_data(DataArgs(path=str(path), val_fraction=0, max_seq_length=5), tokenizer, 512, 256)


def test_splits(tmp_path, tiny):
    _, tokenizer = litft.load(tiny)
    records = [{"instruction": str(n), "input": "", "output": str(n)} for n in range(20)]
    whole = write(tmp_path / "whole.json", records)
    first, again, other = (
        load_data(DataArgs(path=str(whole), val_fraction=0.25, seed=seed), tokenizer, 512, 256) for seed in (1, 1, 2)
    )
    names = [{s.messages[0]["content"] for s in data.val} for data in (first, again, other)]
    assert (len(first.train), len(first.val)) == (15, 5) and names[0] == names[1] != names[2]
    assert not names[0] & {s.messages[0]["content"] for s in first.train}
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", records[:12])
    write(tmp_path / "folder" / "val.json", records[12:])
    data = load_data(DataArgs(path=str(tmp_path / "folder")), tokenizer, 512, 256)
    assert (len(data.train), len(data.val)) == (12, 8)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", '[{"instruction": "a",\n "output" "b"}]', r"a.json, line 2: no valid JSON"),
        ("a.jsonl", '{"instruction": "a", "output": "b"}\n\n{"x": }', r"a.jsonl, line 3: no valid JSON"),
        ("a.json", '{"instruction": "a"}\n{"instruction": "b"}', "one object a line is .jsonl: rename the file"),
        ("a.json", "[]", "holds no examples"),
        ("a.json", "", "holds no examples"),
        ("a.jsonl", "\n\n", "holds no examples"),
        ("a.json", '{"instruction": "a"}', "expected an array of examples, found an object"),
        ("a.json", '[{"instruction": "a", "output": "b"}, 3]', "record 1: an example must be an object"),
        ("a.json", '[{"instruction": "a", "output": "b"}, {"text": "c"}]', "record 1: needs 'instruction' and 'output'"),
        ("a.json", '[{"instruction": "a", "output": 3}]', "record 0: field 'output' must be text, found a number"),
        ("a.json", '[{"messages": []}]', "at least one message"),
        ("a.json", '[{"messages": [{"role": "robot", "content": "a"}]}]', "message 0 has the role 'robot'; known: system"),
        ("a.json", '[{"messages": [{"role": "user", "content": null}]}]', "message 0 has no text"),
        ("a.json", '[{"messages": [{"role": "user", "content": "a"}]}]', "record 0: the last message is the user's"),
        ("a.csv", "a,b", "cannot read .csv; use .json or .jsonl"),
    ],
)
def test_a_bad_file_is_named_with_line_or_record(tmp_path, tiny, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_data(DataArgs(path=str(tmp_path / name), val_fraction=0), Tokenizer(tiny), 512, 256)


def test_a_file_that_is_no_text_is_named(tmp_path, tiny):
    (tmp_path / "a.json").write_bytes(b'[{"instruction": "\xff\xfe"}]')
    with pytest.raises(ValueError, match=r"a.json is no UTF-8 text \(at byte 18\)"):
        load_data(DataArgs(path=str(tmp_path / "a.json")), Tokenizer(tiny), 512, 256)


def test_a_turns_end_becomes_a_stop_token(tmp_path, shared):
    """Also where only the template knows it, and never from an example that was cut."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there, you"}]
    path = write(tmp_path / "a.jsonl", [{"messages": talk}])
    for limit, expected in ((None, [128001, 128009]), (10, [128001])):
        tokenizer = Tokenizer(shared / "tokenizers" / "llama-3.1")
        tokenizer.stop_ids = [128001]
        for mask_prompt in (True, False):
            args = DataArgs(path=str(path), val_fraction=0, max_seq_length=limit, mask_prompt=mask_prompt)
            try:
                load_data(args, tokenizer, 128256, 4096)
            except ValueError as error:
                assert "all 1 were skipped" in str(error)
            assert tokenizer.stop_ids == expected, (limit, mask_prompt)


def test_an_end_token_outside_the_vocabulary_is_named_too(tmp_path, shared):
    """It is the last target and never an input."""
    path = write(tmp_path / "a.json", [{"instruction": "hi", "output": "hello"}])
    tokenizer = Tokenizer(shared / "tokenizers" / "llama-3.1")
    # without BOS, whose id is beyond the limit as well
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ '<|eot_id|>' if m.role == 'assistant' }}{% endfor %}"
    with pytest.raises(ValueError, match=r"eot_id.* has the id 128009, .* vocabulary ends at 127999"):
        load_data(DataArgs(path=str(path), val_fraction=0), tokenizer, 128000, 4096)


def test_ids_outside_the_vocabulary_are_named(tmp_path, tiny):
    path = write(tmp_path / "a.json", [{"instruction": "a", "output": "zebra"}])
    with pytest.raises(ValueError, match=r"record 0: token .* has the id \d+, but the model's vocabulary ends at 63"):
        load_data(DataArgs(path=str(path), val_fraction=0), Tokenizer(tiny), 64, 256)
