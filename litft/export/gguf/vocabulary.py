"""Tokenizers: what llama.cpp keeps of one in a GGUF file, and Hugging Face's files. Two kinds are known.

"gpt2" there is byte-level BPE with merges: tokenizer.json, whose way of cutting text first llama.cpp knows by a name.
"llama" there is sentencepiece's BPE by scores: tokenizer.model, or a tokenizer.json that was made of one, as it is here.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from litft.data.tokenizer import Tokenizer
from litft.export.gguf.files import GgufFile, gguf

_KINDS = gguf.TokenType
SPACE = "\u2581"  # how sentencepiece spells a space
UNREACHED = -1000.0  # the score that llama.cpp's own converter gives what no merge makes


_PHI3 = re.compile(r"phi-?3", re.IGNORECASE)


class Cut(NamedTuple):
    """How text is cut before byte-level BPE merges: by the patterns, one after the other, then GPT-2's own if it is to."""

    patterns: tuple[str, ...] = ()
    digits: bool = False  # each by itself, before all else
    gpt2: bool = True
    ignore_merges: bool = False  # a whole piece that is a token is not looked at further


_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CASED2 = rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREES = rf"{_ENGLISH}{_WORD}|\p{{N}}{{1,3}}{_REST}"
# by llama.cpp's name for it (tokenizer.ggml.pre), the first of several for one and the same
CUTS = {
    "gpt-2": Cut(),
    "smollm": Cut(digits=True),
    "llama-bpe": Cut((_THREES,), gpt2=False, ignore_merges=True),
    "dbrx": Cut((_THREES,), gpt2=False),
    "qwen2": Cut((rf"{_ENGLISH}{_WORD}|\p{{N}}{_REST}",), gpt2=False),
    "tekken": Cut((rf"{_CASED}{_CASED2}|\p{{N}}|{_SLASHED}",), gpt2=False, ignore_merges=True),
    "gpt-4o": Cut((rf"{_CASED}{_ENGLISH}?{_CASED2}{_ENGLISH}?|\p{{N}}{{1,3}}|{_SLASHED}",), gpt2=False),
}
ALIASES = {
    **dict.fromkeys("llama3 llama-v3 falcon3 pixtral".split(), "llama-bpe"),
    **dict.fromkeys("phi-2 mpt olmo jina-es jina-de gigachat a.x-4.0 mellum".split(), "gpt-2"),
    **dict.fromkeys("starcoder refact command-r".split(), "smollm"),
    **dict.fromkeys("deepseek-r1-qwen stablelm2 megrez".split(), "qwen2"),
    **dict.fromkeys("smaug-bpe chatglm-bpe glm4".split(), "dbrx"),
    "llama4": "gpt-4o",
}
ADD_BOS = {"llama-bpe", "tekken"}  # where llama.cpp adds it though the file says nothing
NORMALIZED = {"qwen2"}  # to NFC, which llama.cpp leaves to whoever calls it
# what ends a turn where the file does not say: the first of these that is a token
TURN_ENDS = "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT]".split()


class _Tokens(NamedTuple):
    """A vocabulary in the order of its ids, as the file lists it."""

    texts: list[str]
    kinds: list[int]  # llama.cpp's, which are sentencepiece's
    scores: list[float]


# --- out of a GGUF file ---


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the file's tokenizer, chat template and stop tokens as Hugging Face's files; ValueError where it has none."""
    stored = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    kind, texts = stored.get("model"), stored.get("tokens")
    if kind not in ("gpt2", "llama") or not isinstance(texts, list):
        reason = f"its tokenizer is of the kind {kind!r}, and litft reads gpt2 (byte-level BPE) and llama (sentencepiece)"
        raise ValueError(f"{file.folder}: {reason}; take the model in Hugging Face's format")
    tokens = _listed(stored, texts, file.meta("token_embd.weight").size(0))
    ids = _ids(stored, len(tokens.texts))
    special = {f"{name}_token": tokens.texts[number] for name, number in ids.items() if name in ("bos", "eos", "unk", "pad")}
    adds_bos = stored.get("add_bos_token", kind == "llama" or _pre(stored) in ADD_BOS) and "bos_token" in special
    try:
        backend = (_byte_level if kind == "gpt2" else _scored)(stored, tokens, special.get("unk_token"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file.folder}: its tokenizer cannot be read ({error})") from None
    if adds_bos:
        pairs = [(special["bos_token"], tokens.texts.index(special["bos_token"]))]
        template = processors.TemplateProcessing(single=[special["bos_token"], "$A"], pair=None, special_tokens=pairs)
        backend.post_processor = template
    _add_whole(backend, tokens, drops=_PHI3.search(str(file.metadata.get("general.name"))) is not None)
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "add_bos_token": bool(adds_bos)}
    _write_json(folder / "tokenizer_config.json", config | {"clean_up_tokenization_spaces": False})
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    turn = next((tokens.texts.index(text) for text in TURN_ENDS if text in tokens.texts), None)
    stops = [number for number in dict.fromkeys((ids.get("eos"), ids.get("eot", turn))) if number is not None]
    if not stops:
        raise ValueError(f"{file.folder}: no token ends an answer: tokenizer.ggml.eos_token_id is missing")
    begins = {"bos_token_id": ids["bos"]} if "bos" in ids else {}
    _write_json(folder / "generation_config.json", begins | {"eos_token_id": stops[0] if len(stops) == 1 else stops})


def _listed(stored: dict[str, Any], texts: list[str], rows: int) -> _Tokens:
    """The tokens, without those at the end that only pad the vocabulary."""
    count = len(texts)
    if count != rows:
        raise ValueError(f"there are {count} tokens for {rows} rows of token_embd.weight; download the file again")
    kinds, scores = stored.get("token_type", [int(_KINDS.NORMAL)] * count), stored.get("scores", [0.0] * count)
    fit = all(isinstance(values, list) and len(values) == count for values in (kinds, scores))
    if not fit or not set(kinds) <= set(map(int, _KINDS)) or not all(isinstance(score, (int, float)) for score in scores):
        raise ValueError(f"token_type and scores are not what {count} tokens need, a kind and a number each")
    while count and kinds[count - 1] == _KINDS.UNUSED:
        count -= 1
    if len(set(texts[:count])) != count:
        twice = next(text for text in texts if texts.count(text) > 1)
        raise ValueError(f"the token {twice!r} is in the file twice; litft cannot tell which is meant")
    return _Tokens(texts[:count], kinds[:count], scores[:count])


def _ids(stored: dict[str, Any], count: int) -> dict[str, int]:
    """The ids of bos, eos, eot, unk and pad that are tokens; sentencepiece's usual ones where they are not said."""
    usual = {"bos": 1, "eos": 2, "unk": 0} if stored["model"] == "llama" else {}
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding"}
    found = {}
    for name, key in keys.items():
        candidates = (stored.get(f"{key}_token_id"), usual.get(name))
        found[name] = next((i for i in candidates if type(i) is int and 0 <= i < count), None)
    return {name: i for name, i in found.items() if i is not None}


def _pre(stored: dict[str, Any]) -> str:
    return ALIASES.get(name := stored.get("pre", "gpt-2"), name)


def _byte_level(stored: dict[str, Any], tokens: _Tokens, unknown: str | None) -> Backend:
    """Byte-level BPE by merges."""
    if (pre := _pre(stored)) not in CUTS:
        known = ", ".join([*CUTS, *ALIASES])
        raise ValueError(f"it cuts text as llama.cpp's {pre!r} does, which litft does not know; known: {known}")
    cut = CUTS[pre]
    merges = [(merge[: (at := merge.find(" ", 1))], merge[at + 1 :]) for merge in stored.get("merges", [])]
    backend = Backend(models.BPE(vocab=_numbered(tokens), merges=merges, ignore_merges=cut.ignore_merges))
    if pre in NORMALIZED:
        backend.normalizer = normalizers.NFC()
    prefix = bool(stored.get("add_space_prefix", False))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=cut.gpt2))
    backend.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _scored(stored: dict[str, Any], tokens: _Tokens, unknown: str | None) -> Backend:
    """sentencepiece's BPE, as transformers has it: the merges that make each piece, in the order of the pieces' scores."""
    numbers, merges = _numbered(tokens), []
    whole = {_KINDS.NORMAL, _KINDS.USER_DEFINED}
    for text, kind, score in zip(*tokens, strict=True):
        if kind in whole:
            halves = ((text[:at], text[at:]) for at in range(1, len(text)))
            own = [(-score, numbers[left], numbers[right]) for left, right in halves if left in numbers and right in numbers]
            merges += own
    pairs = [(tokens.texts[left], tokens.texts[right]) for _, left, right in sorted(merges)]
    backend = Backend(models.BPE(vocab=numbers, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces, prefix = normalizers.Replace(" ", SPACE), stored.get("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _numbered(tokens: _Tokens) -> dict[str, int]:
    return {text: number for number, text in enumerate(tokens.texts)}


def _add_whole(backend: Backend, tokens: _Tokens, drops: bool) -> None:
    """The tokens that are looked for before all else; drops: special ones with the spaces behind them, as Phi-3's."""
    keeps = ("<unk>", "<s>", "<|endoftext|>")
    special, plain = [], []
    for text, kind in zip(tokens.texts, tokens.kinds, strict=True):
        if kind in (_KINDS.CONTROL, _KINDS.UNKNOWN):
            special.append(AddedToken(text, special=True, normalized=False, rstrip=drops and text not in keeps))
        elif kind == _KINDS.USER_DEFINED:
            plain.append(AddedToken(text, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


# --- into a GGUF file ---


def add_tokenizer(writer: Any, tokenizer: Tokenizer, size: int) -> None:
    """Put a tokenizer, its chat template and its stop tokens into a gguf.GGUFWriter, padded to a vocabulary of `size`.

    ValueError where llama.cpp would make other tokens of a text.
    """
    if tokenizer.vocab_size > size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, and the model {size}; they are not of one model")
    name, content = tokenizer.serialized()
    definition = json.loads(content) if name == "tokenizer.json" else None
    if definition and not definition["model"].get("byte_fallback"):
        cut = _named_cut(definition, tokenizer.folder)
        tokens = _padded(_kinds_of(tokenizer), {}, size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_merges([" ".join(merge) for merge in definition["model"]["merges"]])
    else:
        tokens, prefix = _pieces(definition, content, tokenizer, size)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(tokens.scores)
        writer.add_add_space_prefix(prefix)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.kinds)
    for kind, text in tokenizer.special.items():
        if (number := tokenizer.token_id(text)) is not None and kind != "eos_token":
            getattr(writer, f"add_{kind}_id")(number)
    first, *others = tokenizer.stop_ids
    ended = tokenizer.eos_id if tokenizer.eos_id in tokenizer.stop_ids else first
    writer.add_eos_token_id(ended)
    if other := [number for number in (first, *others) if number != ended]:
        writer.add_eot_token_id(other[0])
    writer.add_add_bos_token(tokenizer.adds_bos)
    writer.add_add_eos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def model_name(name: str, tokenizer: Tokenizer | None) -> str:
    """What general.name says: where it reads phi-3 llama.cpp drops the spaces behind special tokens, as Phi-3 does."""
    kind, content = tokenizer.serialized() if tokenizer else ("", b"")
    added = json.loads(content)["added_tokens"] if kind == "tokenizer.json" else []
    drops = any(token["rstrip"] for token in added) and any(token["content"] == "<|endoftext|>" for token in added)
    if drops != bool(_PHI3.search(name)):
        return f"{name} (phi-3)" if drops else _PHI3.sub("phi 3", name)
    return name


def _named_cut(definition: dict[str, Any], folder: Path) -> str:
    """llama.cpp's name for how a tokenizer.json cuts text."""
    step = definition["pre_tokenizer"] or {}
    steps = step.get("pretokenizers", [step])
    patterns = [s["pattern"].get("Regex") for s in steps if s.get("type") == "Split"]
    digits = any(s.get("type") == "Digits" and s["individual_digits"] for s in steps)
    gpt2 = any(s.get("type") == "ByteLevel" and s["use_regex"] for s in steps)
    found = Cut(tuple(patterns), digits, gpt2, bool(definition["model"].get("ignore_merges")))
    if {s.get("type") for s in steps} <= {"Split", "Digits", "ByteLevel"}:
        for name, cut in CUTS.items():
            if cut == found:
                return name
    reason = (
        f"its tokenizer.json cuts text in a way that litft does not know llama.cpp's name of ({json.dumps(steps)[:300]})"
    )
    raise ValueError(f"{folder}: {reason}; known: {', '.join(CUTS)}")


def _kinds_of(tokenizer: Tokenizer) -> dict[int, tuple[str, int]]:
    """Text and kind of every token, by its id."""
    special, added = tokenizer.special_ids, tokenizer.added_ids
    kinds = {i: _KINDS.CONTROL if i in special else _KINDS.USER_DEFINED for i in special | added}
    return {number: (text, int(kinds.get(number, _KINDS.NORMAL))) for text, number in tokenizer.vocabulary().items()}


def _padded(known: dict[int, tuple[str, int]], scores: dict[str, float], size: int) -> _Tokens:
    """The tokens in order; rows that stand for nothing get a name that no text has."""
    entries = [known.get(number, (f"[PAD{number}]", int(_KINDS.UNUSED))) for number in range(size)]
    texts = [text for text, _ in entries]
    return _Tokens(texts, [kind for _, kind in entries], [scores.get(text, UNREACHED) for text in texts])


def _pieces(definition: dict[str, Any] | None, content: bytes, tokenizer: Tokenizer, size: int) -> tuple[_Tokens, bool]:
    """sentencepiece's tokens, and whether a text gets a space before it."""
    known = _kinds_of(tokenizer)
    if definition:
        scores = _ranks(definition["model"]["merges"])
        known = _spelled_bytes(known)
        own = dict.fromkeys(_BYTES, _KINDS.BYTE) | {definition["model"].get("unk_token"): _KINDS.UNKNOWN}
        prefix = _has_prefix(definition)
    else:
        from sentencepiece import sentencepiece_model_pb2 as sentencepiece

        model = sentencepiece.ModelProto.FromString(content)
        if model.trainer_spec.model_type != model.trainer_spec.BPE:
            raise ValueError(f"{tokenizer.folder}: its tokenizer.model is no BPE, and llama.cpp's for this model are")
        scores, own = {p.piece: p.score for p in model.pieces}, {p.piece: p.type for p in model.pieces if p.type != 1}
        prefix = model.normalizer_spec.add_dummy_prefix
        if model.normalizer_spec.remove_extra_whitespaces:
            spaces = "spaces at the ends of a text, beside special tokens, and several in a row"
            print(f"note: llama.cpp keeps {spaces}, which this tokenizer drops", file=sys.stderr)
    control = _KINDS.CONTROL
    known = {i: (text, int(own.get(text, kind) if kind != control else kind)) for i, (text, kind) in known.items()}
    return _padded(known, scores, size), prefix


def _ranks(merges: Iterable[Sequence[str]]) -> dict[str, float]:
    """Scores that make sentencepiece's BPE merge in this order: the earlier, the higher."""
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        scores.setdefault(left + right, -float(rank))
    return scores


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _spelled_bytes(known: dict[int, tuple[str, int]]) -> dict[int, tuple[str, int]]:
    """With every byte by sentencepiece's name: transformers calls Gemma's tab by itself."""
    texts = {text for text, _ in known.values()}
    missing = {chr(byte): name for byte, name in enumerate(_BYTES[:128]) if name not in texts}
    return {number: (missing.get(text, text), kind) for number, (text, kind) in known.items()}


def _has_prefix(definition: dict[str, Any]) -> bool:
    """Whether a tokenizer.json puts a space before each text between special tokens, as sentencepiece does."""
    parts = json.dumps([definition["normalizer"], definition["pre_tokenizer"]])
    if '"prepend_scheme": "first"' in parts:  # as in Mistral's: chats, which begin with a special token, have none
        print("note: llama.cpp puts no space before texts here, which this tokenizer does outside of chats", file=sys.stderr)
    return '"Prepend"' in parts or '"prepend_scheme": "always"' in parts
