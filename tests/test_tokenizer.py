"""Both back-ends against token ids made elsewhere, and the one BOS."""

import json
import shutil

import pytest

from litft.generate import stream_text
from litft.tokenizer import Tokenizer

GOLDEN = {
    "llama-2-7b": "llama-spm",
    "tinyllama-1.1b-chat": "llama-spm",
    "llama-3.1": "llama-bpe",
    "gpt2": "gpt-2",
    "falcon-40b": "falcon",
    "qwen2.5": "qwen2",
}


def golden(shared, name) -> list[tuple[str, list[int]]]:
    """llama.cpp's texts and ids."""
    folder = shared / "golden_ids"
    texts = (folder / f"{name}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / f"{name}.out").read_text("utf-8").split("\n")
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines, strict=False)]


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_are_the_golden_ones(shared, name):
    tokenizer = Tokenizer(shared / "tokenizers" / name)
    pairs = golden(shared, GOLDEN[name])
    assert len(pairs) >= 45
    for text, ids in pairs:
        assert tokenizer.encode(text, bos=False) == ids, repr(text)


@pytest.fixture
def sentencepiece(shared, tmp_path):
    """Llama 2's tokenizer through the sentencepiece back-end."""
    for path in (shared / "tokenizers" / "llama-2-7b").iterdir():
        if path.name != "tokenizer.json":
            shutil.copyfile(path, tmp_path / path.name)
    return Tokenizer(tmp_path)


def test_sentencepiece_ids_are_the_golden_ones(shared, sentencepiece):
    for text, ids in golden(shared, "llama-spm"):
        assert sentencepiece.encode(text, bos=False) == ids, repr(text)


def test_both_back_ends_agree(shared, sentencepiece):
    fast = Tokenizer(shared / "tokenizers" / "llama-2-7b")
    text = (shared / "data" / "wikitext2_valid.txt").read_text("utf-8")[:20000]
    ids = fast.encode(text)
    assert sentencepiece.encode(text) == ids
    assert sentencepiece.decode(ids) == fast.decode(ids)
    assert (fast.bos_id, fast.eos_id, fast.stop_ids) == (sentencepiece.bos_id, sentencepiece.eos_id, sentencepiece.stop_ids)


def test_special_tokens_in_a_text_are_tokens(sentencepiece):
    assert sentencepiece.encode("<s>[INST] a</s>", bos=False)[0] == 1
    assert sentencepiece.encode("<s>[INST] a</s>", bos=False)[-1] == 2
    assert sentencepiece.decode([1, 263, 2]) == "a"
    assert sentencepiece.decode([1, 263, 2], skip_special=False) == "<s>a</s>"


@pytest.mark.parametrize("name, bos", [("llama-2-7b", 1), ("llama-3.1", 128000), ("qwen2.5", None)])
def test_exactly_one_bos(shared, name, bos):
    tokenizer = Tokenizer(shared / "tokenizers" / name)
    messages = [{"role": "user", "content": "hi"}]
    texts = [tokenizer.encode("hi"), tokenizer.encode(tokenizer.apply_chat_template(messages), bos=False)]
    texts.append(tokenizer.encode(tokenizer.apply_chat_template(messages)))
    for ids in texts:
        assert ids.count(bos) == (bos is not None) and (bos is None or ids[0] == bos)


def test_bos_and_eos_on_request(shared):
    tokenizer = Tokenizer(shared / "tokenizers" / "llama-2-7b")
    plain = tokenizer.encode("hi", bos=False)
    assert tokenizer.encode("hi", bos=True, eos=True) == [1, *plain, 2]
    with pytest.raises(ValueError, match="names no bos_token"):
        Tokenizer(shared / "tokenizers" / "qwen2.5").encode("hi", bos=True)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1", "qwen2.5"])
def test_streamed_pieces_are_the_whole_text(shared, name, sentencepiece):
    text = "The Äpfel cost 5 €, 日本語 and 🦙🦙 too.\n\n  - indented\n\tδείγμα"
    for tokenizer in (Tokenizer(shared / "tokenizers" / name), sentencepiece):
        before = tokenizer.encode("Question: what?\nAnswer:")
        ids = tokenizer.encode("Question: what?\nAnswer: " + text)
        assert ids[: len(before)] == before
        pieces = list(stream_text(tokenizer, before, iter(ids[len(before) :])))
        assert "".join(pieces).strip() == text
        assert len(pieces) > 10 and not any("\ufffd" in piece for piece in pieces)


def test_a_broken_file_is_named(shared, tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ValueError, match=r"tokenizer.json is no valid tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="no valid sentencepiece model"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer.json or tokenizer.model"):
        Tokenizer(tmp_path)
