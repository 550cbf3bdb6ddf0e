"""Tokenizers of each kind that litft reads, trained by the tests within seconds on stories and on
text in other scripts.

- `bytes`: byte-level BPE, ChatML's tokens, no BOS; as Qwen's.
- `header`: byte-level BPE that adds a BOS, with special tokens around roles; as Llama 3's.
- `fallback`: sentencepiece's BPE with bytes for unknown characters, as tokenizer.json; as Llama
2's.
- `sentencepiece`: the same as tokenizer.model.
- `unigram`: sentencepiece's Unigram with bytes for unknown characters, as tokenizer.model.
- `words`: Unigram as tokenizer.json, with an unknown token; as T5's.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

from make_stories import story, train_sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SIZE = 700
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' "
    "}}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADER = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{%- endfor %}{%- if "
    "add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif "
    "%}"
)
INST = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}"
    "{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{% endif %}{%- endfor %}"
)
OTHER_SCRIPTS = (
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça coûte 5 €, naïve café.",
    "日本語の文を書きます。你好，世界！ 서울의 봄 שלום עולם नमस्ते दुनिया δείγμα 🦙🦊",
    "def add(a, b):\n    return a + b  # {'k': [1, 2]}\n\n\tx = 1_000.5e-3 <b>2</b> & 3\n",
)
# a part of a number, words with their space, runs of spaces; as in GPT-4's and Llama 3's tokenizers
LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def corpus() -> list[str]:
    """Return the texts on which the tokenizers are trained."""
    generator = random.Random(0)
    texts = [story(generator) for _ in range(300)]
    return texts + list(OTHER_SCRIPTS) * 3


def write_bytes(folder: Path) -> None:
    """Write byte-level BPE with ChatML's tokens."""
    backend = _byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    backend.save(str(folder / "tokenizer.json"))
    _write_config(folder, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def write_header(folder: Path) -> None:
    """Write byte-level BPE that adds a BOS."""
    special = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>".split()
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = _byte_level(pre_tokenizers.Sequence([split, byte_level]), special)
    bos_id = backend.token_to_id(special[0])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A",
        pair=f"{special[0]} $A {special[0]} $B",
        special_tokens=[(special[0], bos_id)],
    )
    backend.save(str(folder / "tokenizer.json"))
    _write_config(folder, HEADER, bos_token=special[0], eos_token=special[1])


def _byte_level(splitter: pre_tokenizers.PreTokenizer, special: list[str]) -> Tokenizer:
    """Return byte-level BPE; the special tokens come after the learned ones, as in published
    files."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(corpus(), trainer)
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    return backend


def write_sentencepiece(folder: Path) -> None:
    """Write sentencepiece's BPE as tokenizer.model."""
    (folder / "tokenizer.model").write_bytes(_sentencepiece("bpe"))
    _write_config(folder, INST, **_SENTENCEPIECE_TOKENS)


def write_unigram(folder: Path) -> None:
    """Write sentencepiece's Unigram as tokenizer.model."""
    (folder / "tokenizer.model").write_bytes(_sentencepiece("unigram"))
    _write_config(folder, INST, **_SENTENCEPIECE_TOKENS)


def write_fallback(folder: Path) -> None:
    """Write sentencepiece's BPE as tokenizer.json: a merge for each way to put a piece together,
    the best piece first."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(_sentencepiece("bpe"))
    ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    merges = []
    for piece in proto.pieces:
        for cut in range(1, len(piece.piece)):
            left, right = piece.piece[:cut], piece.piece[cut:]
            if left in ids and right in ids:
                merges.append((-piece.score, ids[left], ids[right], left, right))
    merges.sort()
    pairs = [(left, right) for *_, left, right in merges]
    backend = Tokenizer(
        models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in ("<unk>", "<s>", "</s>")
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A",
        pair="<s> $A <s> $B",
        special_tokens=[("<s>", ids["<s>"])],
    )
    backend.save(str(folder / "tokenizer.json"))
    _write_config(folder, INST, **_SENTENCEPIECE_TOKENS)


def write_words(folder: Path) -> None:
    """Write Unigram as tokenizer.json."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE,
        special_tokens=special,
        unk_token="<unk>",
        show_progress=False,
        n_sub_iterations=1,
    )
    backend.train_from_iterator(corpus(), trainer)
    backend.save(str(folder / "tokenizer.json"))
    _write_config(
        folder,
        INST.replace("{{- bos_token }}", ""),
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


_SENTENCEPIECE_TOKENS = dict(
    bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True, legacy=True
)
_SENTENCEPIECE_TOKENS |= dict(tokenizer_class="LlamaTokenizer")


def _sentencepiece(model_type: str) -> bytes:
    """Return a model of sentencepiece that has no pieces for rare characters."""
    return train_sentencepiece(
        "\n".join(corpus()).split("\n"),
        model_type=model_type,
        vocab_size=SIZE,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        character_coverage=0.995,
    )


def _write_config(folder: Path, template: str, **settings: object) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")


WRITERS: dict[str, Callable[[Path], None]] = {
    "bytes": write_bytes,
    "header": write_header,
    "fallback": write_fallback,
    "sentencepiece": write_sentencepiece,
    "unigram": write_unigram,
    "words": write_words,
}


def put_before_texts(folder: Path, texts: tuple[str, ...]) -> None:
    """Give tokenizer.json a post-processor that puts these tokens before each text."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    ids = dict(content["model"]["vocab"])
    for token in content["added_tokens"]:
        ids[token["content"]] = token["id"]
    before = []
    tokens = {}
    for text in texts:
        before.append({"SpecialToken": {"id": text, "type_id": 0}})
        tokens[text] = {"id": text, "ids": [ids[text]], "tokens": [text]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": tokens,
    }
    path.write_text(json.dumps(content), "utf-8")
