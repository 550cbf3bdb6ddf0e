"""Conversion of tokenizers between GGUF files and Hugging Face's files.

Three of GGUF's tokenizer types are supported.

"gpt2" is byte-level BPE with merges (tokenizer.json); GGUF stores llama.cpp's name for its
pre-tokenizer. "llama" is
sentencepiece BPE with scores: tokenizer.model, or a tokenizer.json that was converted from one, as
is done here. "gemma4" is sentencepiece BPE with merges; it is only read, since "llama" says the
same.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from litft.data.tokenizer import NAMED_TEMPLATES
from litft.export.gguf.files import GgufFile, gguf

TokenType = gguf.TokenType
SPACE = "\u2581"  # sentencepiece's character for a space
# for tokens that no merge produces, as in llama.cpp's own converter
NO_MERGE_SCORE = -1000.0


PHI3 = re.compile(r"phi-?3", re.IGNORECASE)


class PreTokenizer(NamedTuple):
    """How text is split before byte-level BPE: by `digits`, then by each of the patterns, then by
    `gpt2`."""

    patterns: tuple[str, ...] = ()
    digits: bool = False  # split into single digits
    gpt2: bool = True  # split by GPT-2's pattern
    # a piece that is a token in the vocabulary is not split by merges
    ignore_merges: bool = False


_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CASED2 = rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED = (
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
_KOREAN = (
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)"
    "|\\s+",
)
_THREES = rf"{_ENGLISH}{_WORD}|\p{{N}}{{1,3}}{_REST}"
# keyed by llama.cpp's name (tokenizer.ggml.pre); ALIASES are further names of the same
# pre-tokenizers
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": PreTokenizer((_THREES,), gpt2=False, ignore_merges=True),
    "dbrx": PreTokenizer((_THREES,), gpt2=False),
    "qwen2": PreTokenizer((rf"{_ENGLISH}{_WORD}|\p{{N}}{_REST}",), gpt2=False),
    "tekken": PreTokenizer(
        (rf"{_CASED}{_CASED2}|\p{{N}}|{_SLASHED}",), gpt2=False, ignore_merges=True
    ),
    "gpt-4o": PreTokenizer(
        (rf"{_CASED}{_ENGLISH}?{_CASED2}{_ENGLISH}?|\p{{N}}{{1,3}}|{_SLASHED}",), gpt2=False
    ),
    "qwen35": PreTokenizer((_ENGLISH + _MARKED,), gpt2=False),
    "exaone-moe": PreTokenizer((_ENGLISH + _KOREAN,), gpt2=False),
    "deepseek-v3": PreTokenizer(_DEEPSEEK, gpt2=False),
}
PRE_TOKENIZER_NAMES = {
    **dict.fromkeys(
        "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2".split(), "llama-bpe"
    ),
    **dict.fromkeys(
        "phi-2 mpt olmo jina-es jina-de gigachat a.x-4.0 mellum exaone4 granite-docling".split(),
        "gpt-2",
    ),
    **dict.fromkeys("starcoder refact command-r exaone mellum2".split(), "smollm"),
    **dict.fromkeys(
        "deepseek-r1-qwen stablelm2 megrez hunyuan solar-open kormo".split(), "qwen2"
    ),
    **dict.fromkeys("smaug-bpe chatglm-bpe glm4 glm5".split(), "dbrx"),
    **dict.fromkeys("llama4 kanana2 minimax-m2".split(), "gpt-4o"),
    **dict.fromkeys("hunyuan-dense joyai-llm".split(), "deepseek-v3"),
}
# llama.cpp adds the BOS token unless the file says otherwise
ADD_BOS = {"llama-bpe", "tekken"}
# to NFC; llama.cpp leaves this to its callers
NORMALIZED = {"qwen2", "qwen35"}
# if the file names no end-of-turn token, the first of these in the vocabulary is used
TURN_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|>".split()
)
TURN_ENDS += "<EOT> _<EOT> [EOT]".split()


HARMONY_CALL = "<|call|>"
HARMONY = {"<|return|>", "<|end|>", HARMONY_CALL}
# the metadata of a chat template, which may have a name after a dot
TEMPLATE = "tokenizer.chat_template"


class StoredTokens(NamedTuple):
    """The tokens of a vocabulary, ordered by id."""

    texts: list[str]
    # gguf.TokenType, the same as sentencepiece's
    types: list[int]
    scores: list[float]


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write tokenizer, chat template and stop tokens as Hugging Face's files; raise ValueError if
    one is unsupported."""
    stored = _stored(file)
    kind = stored.get("model")
    texts = stored.get("tokens")
    if kind not in ("gpt2", "llama", "gemma4") or not isinstance(texts, list):
        supported = "gpt2 (byte-level BPE), llama and gemma4 (sentencepiece)"
        reason = f"its tokenizer type {kind!r} is not supported; supported: {supported}"
        raise ValueError(f"{file.folder}: {reason}; use the model in Hugging Face's format")

    # special tokens
    tokens = _read_tokens(stored, texts, file.meta("token_embd.weight").size(0))
    ids = _special_ids(stored, len(tokens.texts))
    special = _special_texts(tokens.texts, ids)
    # as the file says, or else as llama.cpp does by default
    adds_bos = (
        stored.get("add_bos_token", kind == "llama" or _pre_tokenizer(stored) in ADD_BOS)
        and "bos_token" in special
    )

    # tokenizer.json
    if kind == "gpt2":
        make_backend = _byte_level_bpe
    else:
        make_backend = _sentencepiece_bpe
    try:
        backend = make_backend(stored, tokens, special.get("unk_token"))
    except ValueError as error:
        raise ValueError(f"{file.folder}: {error}") from None
    except Exception as error:
        # the package tokenizers raises plain Exception
        raise ValueError(
            f"{file.folder}: its tokenizer cannot be read ({error}); download the file again"
        ) from None

    if adds_bos:
        bos = special["bos_token"]
        backend.post_processor = _bos_processor(bos, tokens.texts.index(bos))
    _add_special_tokens(
        backend,
        tokens,
        strips_spaces=PHI3.search(str(file.metadata.get("general.name"))) is not None,
    )
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), "utf-8")

    # tokenizer_config.json, chat template, and generation_config.json with the stop tokens
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": bool(adds_bos),
    }
    _write_json(
        folder / "tokenizer_config.json", config | {"clean_up_tokenization_spaces": False}
    )
    _write_templates(file, folder)
    stop_ids = _stop_ids(tokens.texts, ids)
    if not stop_ids:
        raise ValueError(
            f"{file.folder} has no stop token: tokenizer.ggml.eos_token_id is missing; download "
            "the file again"
        )
    _write_json(folder / "generation_config.json", _generation_config(ids, stop_ids))


def _stored(file: GgufFile) -> dict[str, Any]:
    """Return the metadata, without the prefix that those of the tokenizer have."""
    return {
        key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()
    }


def _special_texts(texts: list[str], ids: dict[str, int]) -> dict[str, str]:
    """Return the special tokens under their names in tokenizer_config.json."""
    special = {}
    for name, i in ids.items():
        if name in ("bos", "eos", "unk", "pad"):
            special[f"{name}_token"] = texts[i]
    return special


def _bos_processor(bos: str, bos_id: int) -> Any:
    """Return what puts BOS before each text."""
    return processors.TemplateProcessing(
        single=[bos, "$A"], pair=None, special_tokens=[(bos, bos_id)]
    )


def _generation_config(ids: dict[str, int], stop_ids: list[int]) -> dict[str, Any]:
    """Return generation_config.json. ids: of special tokens."""
    config: dict[str, Any] = {}
    if "bos" in ids:
        config["bos_token_id"] = ids["bos"]
    config["eos_token_id"] = stop_ids
    if len(stop_ids) == 1:
        config["eos_token_id"] = stop_ids[0]
    return config


def _write_templates(file: GgufFile, folder: Path) -> None:
    """Write the chat template, and those with a name."""
    template = file.metadata.get(TEMPLATE)
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    for key, named in file.metadata.items():
        name = key.removeprefix(f"{TEMPLATE}.")
        # a name of a file: no other characters
        if name == key or not isinstance(named, str) or not re.fullmatch(r"[\w-]+", name):
            continue
        templates = folder / NAMED_TEMPLATES
        templates.mkdir(exist_ok=True)
        (templates / f"{name}.jinja").write_text(named, "utf-8")


def _stop_ids(texts: list[str], ids: dict[str, int]) -> list[int]:
    """Return the tokens that end a text and a turn, without repetition. ids: of special tokens."""
    end_of_turn = None
    known = set(texts)
    candidates = TURN_ENDS
    # harmony: <|end|> ends every message of an answer, and <|call|> an answer
    if known >= HARMONY:
        candidates = [HARMONY_CALL]
    for text in candidates:
        if text in known:
            end_of_turn = texts.index(text)
            break
    stop_ids = []
    for i in dict.fromkeys((ids.get("eos"), ids.get("eot", end_of_turn), ids.get("eom"))):
        if i is not None:
            stop_ids.append(i)
    return stop_ids


def _read_tokens(stored: dict[str, Any], texts: list[str], rows: int) -> StoredTokens:
    """Return the tokens without the padding at the end of the vocabulary; raise ValueError for
    inconsistent metadata."""
    count = len(texts)
    if count != rows:
        raise ValueError(
            f"there are {count} tokens for {rows} rows of token_embd.weight; download the file "
            "again"
        )
    types = stored.get("token_type", [int(TokenType.NORMAL)] * count)
    scores = stored.get("scores", [0.0] * count)
    complete = all(
        isinstance(values, list) and len(values) == count for values in (types, scores)
    )
    if (
        not complete
        or not set(types) <= set(map(int, TokenType))
        or not all(isinstance(score, (int, float)) for score in scores)
    ):
        raise ValueError(
            f"token_type and scores do not contain a valid type and number for each of {count} "
            "tokens"
        )

    # unused tokens at the end are padding
    while count and types[count - 1] == TokenType.UNUSED:
        count -= 1
    if len(set(texts[:count])) != count:
        duplicate, _ = Counter(texts[:count]).most_common(1)[0]
        raise ValueError(
            f"the token {duplicate!r} occurs more than once, so its id is ambiguous; download the "
            "file again"
        )
    return StoredTokens(texts[:count], types[:count], scores[:count])


def _special_ids(stored: dict[str, Any], count: int) -> dict[str, int]:
    """Return the valid ids of bos, eos, eot, eom, unk and pad; ids missing from the file default to
    sentencepiece's."""
    if stored["model"] == "llama":
        defaults = {"bos": 1, "eos": 2, "unk": 0}
    else:
        defaults = {}
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom"}
    keys |= {"unk": "unknown", "pad": "padding"}
    ids = {}
    for name, key in keys.items():
        candidates = (stored.get(f"{key}_token_id"), defaults.get(name))
        ids[name] = next((i for i in candidates if type(i) is int and 0 <= i < count), None)
    return {name: i for name, i in ids.items() if i is not None}


# of files from before May 2024, which do not name it
PRE_OF_ARCHITECTURE = {
    **dict.fromkeys(("gpt2", "gptneox", "mpt", "phi2"), "gpt-2"),
    **dict.fromkeys(("qwen2", "qwen2moe"), "qwen2"),
}


def _pre_tokenizer(stored: dict[str, Any]) -> str:
    """Return our name of the pre-tokenizer; raise ValueError if the file does not say which it is:
    with another one, text is divided into other tokens."""
    architecture = stored.get("general.architecture", "")
    name = stored.get("pre") or PRE_OF_ARCHITECTURE.get(architecture)
    # sentencepiece models have no pre-tokenizer
    if name is None and stored["model"] == "gpt2":
        raise ValueError(
            "the file is from before May 2024, and does not name its pre-tokenizer; download a "
            "newer one, or the model in Hugging Face's format"
        )
    name = str(name)
    return PRE_TOKENIZER_NAMES.get(name, name)


def _byte_level_bpe(
    stored: dict[str, Any], tokens: StoredTokens, unknown: str | None
) -> Backend:
    """Return a byte-level BPE tokenizer, which needs no unknown token: bytes write any text."""
    pre = _pre_tokenizer(stored)
    if pre not in PRE_TOKENIZERS:
        supported = ", ".join([*PRE_TOKENIZERS, *PRE_TOKENIZER_NAMES])
        raise ValueError(
            f"llama.cpp's pre-tokenizer {pre!r} is not supported; supported: {supported}"
        )

    # the vocabulary and the merges
    split = PRE_TOKENIZERS[pre]
    backend = Backend(
        models.BPE(
            vocab=_token_ids(tokens),
            merges=_merges(stored),
            ignore_merges=split.ignore_merges,
        )
    )
    if pre in NORMALIZED:
        backend.normalizer = normalizers.NFC()

    # how text is cut into pieces before the merges
    prefix = bool(stored.get("add_space_prefix", False))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split.gpt2))
    if len(steps) == 1:
        backend.pre_tokenizer = steps[0]
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(stored: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the stored merges; the first text of a merge may begin with a space.

    Raise ValueError if there are none.
    """
    if not stored.get("merges"):
        raise ValueError(
            "the GGUF file has a BPE vocabulary without merges, so its tokens are unknown; use "
            "another file"
        )
    return [
        (merge[: (at := merge.find(" ", 1))], merge[at + 1 :])
        for merge in stored.get("merges", [])
    ]


def _merges_by_score(tokens: StoredTokens) -> list[tuple[str, str]]:
    """Return all merges that produce a token, sorted by its score, as transformers converts
    sentencepiece's BPE."""
    ids = _token_ids(tokens)
    merges = []
    text_types = {TokenType.NORMAL, TokenType.USER_DEFINED}
    for text, token_type, score in zip(*tokens, strict=True):
        if token_type in text_types:
            # every way to cut the token into two other ones
            halves = ((text[:i], text[i:]) for i in range(1, len(text)))
            text_merges = []
            for left, right in halves:
                if left in ids and right in ids:
                    text_merges.append((-score, ids[left], ids[right]))
            merges += text_merges
    return [(tokens.texts[left], tokens.texts[right]) for _, left, right in sorted(merges)]


def _sentencepiece_bpe(
    stored: dict[str, Any], tokens: StoredTokens, unknown: str | None
) -> Backend:
    """Return sentencepiece's BPE, with merges from the file or by the tokens' scores."""
    has_merges = stored["model"] == "gemma4"
    pairs = _merges(stored) if has_merges else _merges_by_score(tokens)
    ids = _token_ids(tokens)
    backend = Backend(
        models.BPE(
            vocab=ids, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    # by default, only tokenizers with scores ("llama") put a space before a text
    prefix = stored.get("add_space_prefix", not has_merges)
    if prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    else:
        backend.normalizer = spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    # the space that was put before the text is removed again
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1, right=0)] if prefix else steps
    )
    return backend


def _token_ids(tokens: StoredTokens) -> dict[str, int]:
    return {text: i for i, text in enumerate(tokens.texts)}


def _add_special_tokens(
    backend: Backend, tokens: StoredTokens, strips_spaces: bool
) -> None:
    """Add the tokens that are matched before BPE; strips_spaces: special tokens swallow spaces
    after them, as in Phi-3."""
    exceptions = ("<unk>", "<s>", "<|endoftext|>")
    special = []
    plain = []
    for text, token_type in zip(tokens.texts, tokens.types, strict=True):
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN):
            # they match a text as it is, before any normalization
            special.append(
                AddedToken(
                    text,
                    special=True,
                    normalized=False,
                    rstrip=strips_spaces and text not in exceptions,
                )
            )
        elif token_type == TokenType.USER_DEFINED:
            plain.append(AddedToken(text, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
