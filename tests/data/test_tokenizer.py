"""Both tokenizer back-ends against ids of llama.cpp and transformers; exactly one BOS."""

import itertools
import json
import shutil

import pytest
from conftest import ROOT, SHARED, copy_unpacked
from own_tokenizers import (
    OTHER_SCRIPTS,
    WRITERS,
    corpus,
    put_before_texts,
    write_sentencepiece,
)
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from litft.data.tokenizer import Tokenizer
from litft.data.tokenizer_backends import common_prefix_length
from litft.inference.detokenizer import Detokenizer

GOLDEN = {
    "llama-2-7b": "llama-spm",
    "tinyllama-1.1b-chat": "llama-spm",
    "llama-3.1": "llama-bpe",
    "gpt2": "gpt-2",
    "falcon-40b": "falcon",
    "qwen2.5": "qwen2",
}


def golden(shared, name) -> list[tuple[str, list[int]]]:
    """Return the test texts and ids of llama.cpp."""
    folder = shared / "golden_ids"
    texts = (folder / f"{name}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / f"{name}.out").read_text("utf-8").split("\n")
    return [
        (text, [int(word) for word in line.split()])
        for text, line in zip(texts, lines, strict=False)
    ]


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_equal_the_golden_ids(shared, name):
    tokenizer = Tokenizer(shared / "tokenizers" / name)
    pairs = golden(shared, GOLDEN[name])
    assert len(pairs) >= 45
    for text, ids in pairs:
        assert tokenizer.encode(text, bos=False) == ids, repr(text)


OWN_FAST = ("bytes", "header", "fallback", "words")  # those with a tokenizer.json
PROPERTIES = [
    (name, values)
    for name in OWN_FAST
    for values in itertools.product((False, True), repeat=4)
]
# writing a large vocabulary takes seconds: here, each pair of values of two properties occurs
for name in ("tinyllama-1.1b-chat", "qwen2.5"):
    PROPERTIES += [
        (name, tuple(value == "1" for value in word))
        for word in ("0000", "0111", "1011", "1101", "1110")
    ]


@pytest.mark.parametrize(("name", "properties"), PROPERTIES, ids=str)
def test_boundaries_at_added_tokens_equal_those_of_the_text_alone(
    tokenizer_folder, tmp_path, name, properties
):
    """A token may strip the spaces around it (Phi-3's <|end|> does), and its offsets then include
    them."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    lstrip, rstrip, normalized, single_word = properties
    shutil.copytree(tokenizer_folder(name), tmp_path / name)
    path = tmp_path / name / "tokenizer.json"
    backend = Backend.from_file(str(path))
    options = dict(
        lstrip=lstrip, rstrip=rstrip, normalized=normalized, single_word=single_word
    )
    backend.add_tokens([AddedToken("<|stop|>", special=True, **options)])
    backend.save(str(path))
    tokenizer = Tokenizer(tmp_path / name)
    texts = ["a <|stop|>  b\n<|stop|>"]
    if not single_word:  # elsewhere such a token may be none in the text alone
        texts += ["Yes<|stop|>\n<|stop|>\n\nNo", "<|stop|> <|stop|>c", "d<|stop|>e"]
    for text in texts:
        marks = [n for n in range(len(text)) if text.startswith("<|stop|>", n)]
        boundaries = sorted({b for n in marks for b in (n, n + 8, min(n + 9, len(text)))})
        ids, counts = tokenizer.encode_with_boundaries(text, boundaries)
        assert ids == tokenizer.encode(text, bos=False)
        for boundary, count in zip(boundaries, counts, strict=True):
            alone = tokenizer.encode(text[:boundary], bos=False)
            assert count == common_prefix_length(ids, alone), (text, boundary)


@pytest.mark.parametrize("turns", [3, 40])
def test_boundaries_of_sentencepiece_do_not_depend_on_their_number(tmp_path, turns):
    """Beyond 64, the ends of tokens are computed, and the space before a part is none of it."""
    write_sentencepiece(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    text = ""
    boundaries = []
    for number in range(turns):
        text += f"[INST] Who {number}? [/INST]"
        boundaries.append(len(text))
        text += f" Lily {number}.</s>"
        boundaries.append(len(text))
        text += " "
    ids, counts = tokenizer.encode_with_boundaries(text, boundaries)
    assert ids == tokenizer.encode(text, bos=False)
    ends = [number + 1 for number, token in enumerate(ids) if token == tokenizer.end_id]
    assert counts[1::2] == ends
    for first in range(0, len(boundaries), 8):
        few = boundaries[first : first + 8]
        _, of_few = tokenizer.encode_with_boundaries(text, few)
        assert counts[first : first + 8] == of_few


NAMES = """
    falcon-40b gemma-2 gpt-neox-20b gpt2 llama-2-7b llama-3.1 mistral-7b-instruct-v0.3 phi-2
    qwen2.5 tinyllama-1.1b-chat
""".split()
# AutoTokenizer of transformers 5 rebuilds these, and then splits leading spaces unlike
# sentencepiece and the golden ids
REBUILT_BY_TRANSFORMERS = ("llama-2-7b", "tinyllama-1.1b-chat", "fallback")


@pytest.fixture(scope="module")
def texts():
    """Stories, code, several scripts and odd spaces; prose, chats and JSON from real data where
    there are."""
    data = SHARED / "data"
    own_texts = [*corpus()[:20], *OTHER_SCRIPTS, "  two  leading, \t tab\r\n\n\n end "]
    own_texts += ["\u00a0½ ﬁ ≠ 🦙👩‍👩‍👧 \u200b日本語 العربية ภาษาไทย", " ", "\n"]
    if not data.is_dir():
        return own_texts
    parts = [(data / "wikitext2_valid.txt").read_text("utf-8")[:6000]]
    parts += [
        json.dumps(json.loads((data / name).read_text("utf-8"))[:30], ensure_ascii=False)
        for name in JSON_FILES
    ]
    parts += [
        (data / name).read_text("utf-8")[:6000]
        for name in ("gsm8k_500.jsonl", "samsum_1400.jsonl", "messages_500.jsonl")
    ]
    return parts + own_texts


JSON_FILES = ("alpaca_2k.json", "sharegpt_500.json", "tool_calls_300.json")


# their files take seconds to read; the fast tests only compare their golden ids
LARGE = ("falcon-40b", "gemma-2", "llama-3.1", "qwen2.5")


@pytest.mark.parametrize(
    "name",
    [
        *OWN_FAST,
        *(pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in NAMES),
    ],
)
def test_ids_and_texts_equal_transformers(tokenizer_folder, texts, tmp_path, name):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = copy_unpacked(tokenizer_folder(name), tmp_path / name)
    if name in (*REBUILT_BY_TRANSFORMERS, "gpt-neox-20b"):
        reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    else:
        reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer(folder)
    for text in texts:
        ids = reference(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text, bos=False) == ids, text[:80]
        for skip in (True, False):
            expected = reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert tokenizer.decode(ids, skip_special=skip) == expected, text[:80]
        assert "".join(pieces_of(tokenizer, [], ids[:400])).rstrip(
            "\ufffd"
        ) == tokenizer.decode(ids[:400]).rstrip("\ufffd")
    special_text = "".join(reference.all_special_tokens) + "a"
    assert (
        tokenizer.encode(special_text, bos=False)
        == reference(special_text, add_special_tokens=False).input_ids
    )


@pytest.mark.parametrize("name", ["sentencepiece", "unigram"])
def test_ids_and_texts_equal_sentencepiece(tokenizer_folder, texts, name):
    folder = tokenizer_folder(name)
    reference = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = Tokenizer(folder)
    for original in texts:
        # WikiText has it; litft reads special tokens in a text
        text = original.replace("<unk>", "unknown")
        ids = reference.encode(text)
        assert tokenizer.encode(text, bos=False) == ids, text[:80]
        assert tokenizer.decode(ids) == reference.decode(ids), text[:80]


def without_json(folder, tmp_path) -> Tokenizer:
    """Return a tokenizer that has both files, in the sentencepiece back-end."""
    shutil.copytree(
        folder, tmp_path / "sentencepiece", ignore=shutil.ignore_patterns("tokenizer.json")
    )
    return Tokenizer(tmp_path / "sentencepiece")


def test_sentencepiece_ids_equal_the_golden_ids(shared, tokenizer_folder, tmp_path):
    tokenizer = without_json(tokenizer_folder("llama-2-7b"), tmp_path)
    for text, ids in golden(shared, "llama-spm"):
        assert tokenizer.encode(text, bos=False) == ids, repr(text)


@pytest.mark.parametrize("name", ["own", "llama-2-7b"])
def test_both_back_ends_agree(tokenizer_folder, texts, tmp_path, name):
    if name == "own":
        fast = Tokenizer(tokenizer_folder("fallback"))
        sentencepiece = Tokenizer(tokenizer_folder("sentencepiece"))
    else:
        fast = Tokenizer(tokenizer_folder(name))
        sentencepiece = without_json(tokenizer_folder(name), tmp_path)
    for text in texts:
        ids = fast.encode(text)
        assert sentencepiece.encode(text) == ids, text[:80]
        assert sentencepiece.decode(ids) == fast.decode(ids), text[:80]
    for attribute in ("bos_id", "eos_id", "stop_ids"):
        assert getattr(fast, attribute) == getattr(sentencepiece, attribute)


def test_special_tokens_in_a_text_are_parsed(tokenizer_folder):
    tokenizer = Tokenizer(tokenizer_folder("sentencepiece"))
    assert tokenizer.encode("<s>[INST] a</s>", bos=False)[0] == 1
    assert tokenizer.encode("<s>[INST] a</s>", bos=False)[-1] == 2
    (word,) = tokenizer.encode("a", bos=False)
    assert tokenizer.decode([1, word, 2]) == "a"
    assert tokenizer.decode([1, word, 2], skip_special=False) == "<s>a</s>"


@pytest.mark.parametrize("name", [*WRITERS, "llama-2-7b", "llama-3.1", "qwen2.5"])
def test_exactly_one_bos(tokenizer_folder, name):
    tokenizer = Tokenizer(tokenizer_folder(name))
    bos = None if name in ("bytes", "words", "qwen2.5") else tokenizer.bos_id
    assert tokenizer.bos_id == bos
    messages = [{"role": "user", "content": "hi"}]
    texts = [
        tokenizer.encode("hi"),
        tokenizer.encode(tokenizer.apply_chat_template(messages), bos=False),
    ]
    texts.append(tokenizer.encode(tokenizer.apply_chat_template(messages)))
    for ids in texts:
        assert ids.count(bos) == (bos is not None) and (bos is None or ids[0] == bos)


def test_bos_and_eos_on_request(tokenizer_folder):
    tokenizer = Tokenizer(tokenizer_folder("fallback"))
    plain = tokenizer.encode("hi", bos=False)
    assert tokenizer.encode("hi", bos=True, eos=True) == [1, *plain, 2]
    with pytest.raises(ValueError, match="names no bos_token"):
        Tokenizer(tokenizer_folder("bytes")).encode("hi", bos=True)


def pieces_of(tokenizer, prompt_ids, ids):
    """Return the non-empty pieces of streamed text."""
    stream = Detokenizer(tokenizer, prompt_ids)
    return [text for text in (*map(stream.push, ids), stream.rest()) if text]


@pytest.mark.parametrize(
    "name",
    "bytes header fallback sentencepiece unigram llama-2-7b llama-3.1 qwen2.5".split(),
)
def test_streamed_pieces_join_to_the_full_text(tokenizer_folder, name):
    text = "The Äpfel cost 5 €, 日本語 and 🦙🦙 too.\n\n  - indented\n\tδείγμα"
    tokenizer = Tokenizer(tokenizer_folder(name))
    prompt_ids = tokenizer.encode("Question: what?\nAnswer:")
    ids = tokenizer.encode("Question: what?\nAnswer: " + text)
    assert ids[: len(prompt_ids)] == prompt_ids
    pieces = pieces_of(tokenizer, prompt_ids, ids[len(prompt_ids) :])
    assert "".join(pieces).strip() == text
    assert len(pieces) > 10 and not any("\ufffd" in piece for piece in pieces)


def test_tokens_of_the_config_alone_are_tokens(tmp_path):
    """As in transformers. An end token that is no token would be learned as characters."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(ROOT / "litft" / "demo" / "base", tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    entry = dict(
        content="<a>",
        lstrip=False,
        rstrip=False,
        normalized=False,
        single_word=False,
        special=True,
    )
    path.write_text(json.dumps(config | {"added_tokens_decoder": {"1024": entry}}))
    expected = AutoTokenizer.from_pretrained(folder)(
        "the <a> cat", add_special_tokens=False
    )["input_ids"]
    assert (
        1024 in expected and Tokenizer(folder).encode("the <a> cat", bos=False) == expected
    )
    path.write_text(json.dumps(config | {"added_tokens_decoder": {"1030": entry}}))
    with pytest.raises(
        ValueError,
        match=r"'<a>' is to have the id 1030, but tokenizer\.json lacks it",
    ):
        Tokenizer(folder)
    path.write_text(json.dumps(config | {"eos_token": "<zzz>"}))
    with pytest.raises(ValueError, match="the eos_token '<zzz>' is not in the vocabulary"):
        Tokenizer(folder)


def without_added(folder):
    """An end token that tokenizer.json has in its vocabulary alone."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": []}))


def other_flags(folder):
    """tokenizer_config.json lets the end token take the white space beside it."""
    flags = dict(lstrip=True, rstrip=True, normalized=False, single_word=False)
    entry = dict(content="<|end|>", special=True, **flags)
    edit_config(folder, added_tokens_decoder={"0": entry})


def other_end(folder):
    """special_tokens_map.json names another end token, of the vocabulary alone."""
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "ther"}))


def listed_in_a_file(folder):
    """Tokens in added_tokens.json alone."""
    (folder / "added_tokens.json").write_text(json.dumps({"<x>": 1024, "<y>": 1025}))
    edit_config(folder, additional_special_tokens=["<x>"])


def with_a_prefix(folder):
    """A post-processor that puts two tokens before a text, of which none is called BOS."""
    put_before_texts(folder, ("a", "ther"))


def with_a_separator(folder):
    """Tokens with names that chat templates use."""
    template = (
        "{% for m in messages %}{{ m.content }}{{ sep_token }}{{ turn_token }}{% endfor %}"
    )
    edit_config(folder, sep_token="<|end|>", extra_special_tokens={"turn_token": "ther"})
    (folder / "chat_template.jinja").write_text(template)


def edit_config(folder, **values):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "change",
    [
        without_added,
        other_flags,
        other_end,
        listed_in_a_file,
        with_a_prefix,
        with_a_separator,
    ],
)
def test_all_files_declare_tokens_as_in_transformers(tmp_path, change):
    folder = shutil.copytree(ROOT / "litft" / "demo" / "base", tmp_path / "model")
    change(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer(folder)
    assert tokenizer.special["eos_token"] == reference.eos_token
    for text in ("weak <|end|>\n the cat", "a<x>b <y> c", "other"):
        expected = reference(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text, bos=False) == expected, text
        assert tokenizer.encode(text) == reference(text).input_ids, text
        assert tokenizer.decode(expected) == reference.decode(
            expected, skip_special_tokens=True
        )
    messages = [{"role": "user", "content": "a"}]
    if reference.chat_template:
        assert tokenizer.apply_chat_template(messages) == reference.apply_chat_template(
            messages, tokenize=False
        )


def test_added_tokens_of_a_sentencepiece_model(tmp_path):
    """In added_tokens.json alone; an id that belongs to another piece is refused."""
    write_sentencepiece(tmp_path)
    size = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": size}))
    assert Tokenizer(tmp_path).encode("<x>", bos=False) == [size]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 3}))
    with pytest.raises(
        ValueError, match=r"'<x>' is to have the id 3, which is '.*' in tok"
    ):
        Tokenizer(tmp_path)


def test_a_broken_file_is_reported(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ValueError, match=r"tokenizer.json is not a valid tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not a valid sentencepiece model"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"contains no tokenizer.json or tokenizer.model"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["bytes", "header", "fallback", "sentencepiece"])
@pytest.mark.parametrize("adds", [True, False])
def test_who_decides_whether_bos_is_added(tokenizer_folder, tmp_path, name, adds):
    """transformers ignores add_bos_token beside a tokenizer.json, whose post-processor decides."""
    folder = copy_unpacked(tokenizer_folder(name), tmp_path / "tokenizer")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": adds}))
    ids = AutoTokenizer.from_pretrained(folder)("Hello there")["input_ids"]
    assert Tokenizer(folder).encode("Hello there") == ids


def test_a_developer_is_the_system_where_the_template_knows_none(tiny):
    """In training, in the server and in chats: all render conversations by the same function."""
    tokenizer = Tokenizer(tiny)
    for source, role in (
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "system"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# developer #}",
            "developer",
        ),
    ):
        tokenizer.use_template(source)
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]
        assert tokenizer.apply_chat_template(messages).endswith(
            f"{role}: Be brief.\nuser: Hi\n"
        )
