"""The vocabulary of a tokenizer, written to a GGUF file."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from litft.data.tokenizer import Tokenizer
from litft.export.gguf.vocabulary import (
    BYTES,
    NO_MERGE_SCORE,
    PHI3,
    PRE_TOKENIZERS,
    PreTokenizer,
    StoredTokens,
    TokenType,
)


def add_tokenizer(writer: Any, tokenizer: Tokenizer, size: int) -> None:
    """Add a tokenizer, its chat template and its stop tokens to a gguf.GGUFWriter, padded to a
    vocabulary of `size`.

    Raise ValueError if llama.cpp would tokenize text differently.
    """
    if tokenizer.vocab_size > size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model only {size}; use the "
            "model's own tokenizer"
        )
    name, content = tokenizer.serialized()
    definition = json.loads(content) if name == "tokenizer.json" else None
    _note_stripped(definition)
    # byte_fallback tells sentencepiece's BPE from byte-level BPE
    if definition and not definition["model"].get("byte_fallback"):
        pre = _pre_tokenizer_name(definition, tokenizer.folder)
        tokens = _pad(_texts_and_types(tokenizer), {}, size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(
            [" ".join(merge) for merge in definition["model"]["merges"]]
        )
    else:
        tokens, adds_space = _sentencepiece_tokens(definition, content, tokenizer, size)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(tokens.scores)
        writer.add_add_space_prefix(adds_space)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.types)
    for kind, text in tokenizer.special.items():
        token_id = tokenizer.token_id(text)
        if token_id is not None and kind != "eos_token":
            getattr(writer, f"add_{kind}_id")(token_id)

    _add_stop_ids(writer, tokenizer)
    writer.add_add_bos_token(tokenizer.adds_bos)
    writer.add_add_eos_token(False)
    _note_prefix(tokenizer)
    if tokenizer.has_template:
        writer.add_chat_template(_templates(tokenizer))


def _add_stop_ids(writer: Any, tokenizer: Tokenizer) -> None:
    """Add the stop tokens: GGUF has one for the end of a text, one for the end of a turn, and one
    for that of a message, after which tools answer."""
    first, *_ = tokenizer.stop_ids
    if tokenizer.eos_id in tokenizer.stop_ids:
        eos_id = tokenizer.eos_id
    else:
        eos_id = first
    writer.add_eos_token_id(eos_id)
    others = [stop_id for stop_id in tokenizer.stop_ids if stop_id != eos_id]
    if others:
        writer.add_eot_token_id(others[0])
    if others[1:]:
        writer.add_eom_token_id(others[1])
    if others[2:]:
        texts = tokenizer.decode(others[2:], skip_special=False)
        print(
            f"note: llama.cpp may not stop at {texts}: a GGUF file has three stop tokens",
            file=sys.stderr,
        )


def _templates(tokenizer: Tokenizer) -> str | list[dict[str, str]]:
    """Return the chat template, or if there are several, a list of all."""
    if not tokenizer.named_templates:
        return tokenizer.chat_template
    templates = [{"name": "default", "template": tokenizer.chat_template}]
    for name, source in tokenizer.named_templates.items():
        templates.append({"name": name, "template": source})
    return templates


def model_name(name: str, tokenizer: Tokenizer | None) -> str:
    """Return general.name: if it contains "phi-3", llama.cpp strips spaces after special tokens, as
    Phi-3 does."""
    kind, content = tokenizer.serialized() if tokenizer else ("", b"")
    if kind == "tokenizer.json":
        added = json.loads(content)["added_tokens"]
    else:
        added = []
    strips_spaces = any(token["rstrip"] for token in added) and any(
        token["content"] == "<|endoftext|>" for token in added
    )
    if strips_spaces != bool(PHI3.search(name)):
        if strips_spaces:
            return f"{name} (phi-3)"
        return PHI3.sub("phi 3", name)
    return name


def _pre_tokenizer_name(definition: dict[str, Any], folder: Path) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a tokenizer.json; raise ValueError if there
    is none."""
    normalizer = definition.get("normalizer")
    # NFC changes only texts in which a letter and its accent are two characters; published
    # tokenizers with it have names
    if normalizer is not None and not _is_nfc(normalizer):
        reason = (
            f"the normalizer of its tokenizer.json changes texts ({json.dumps(normalizer)[:300]}), "
            "and llama.cpp has none"
        )
        raise ValueError(f"{folder}: {reason}; keep the Hugging Face folder")

    # its steps must be those of a pre-tokenizer that llama.cpp has a name for
    step = definition["pre_tokenizer"] or {}
    steps = step.get("pretokenizers", [step])
    splits = []
    for s in steps:
        if s.get("type") == "Split":
            splits.append(s)
    # None for a plain text in place of a regex: it equals that of no candidate
    patterns = [s["pattern"].get("Regex") for s in splits]
    # ByteLevel's regex is that of GPT-2
    pre_tokenizer = PreTokenizer(
        tuple(patterns),
        digits=any(s.get("type") == "Digits" for s in steps),
        gpt2=any(s.get("type") == "ByteLevel" and s["use_regex"] for s in steps),
        ignore_merges=bool(definition["model"].get("ignore_merges")),
    )
    is_plain = all(s.get("behavior") == "Isolated" and not s.get("invert") for s in splits)
    if is_plain and {s.get("type") for s in steps} <= {"Split", "Digits", "ByteLevel"}:
        for name, candidate in PRE_TOKENIZERS.items():
            if candidate == pre_tokenizer:
                _check_details(definition, steps, folder)
                return name
    reason = (
        "llama.cpp's name for the pre-tokenizer of its tokenizer.json is unknown "
        f"({json.dumps(steps)[:300]})"
    )
    raise ValueError(f"{folder}: {reason}; supported: {', '.join(PRE_TOKENIZERS)}")


def _check_details(
    definition: dict[str, Any], steps: Sequence[dict[str, Any]], folder: Path
) -> None:
    """Raise ValueError for settings of byte-level BPE that llama.cpp does not have."""
    model = definition["model"]
    problems = []
    for step in steps:
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            problems.append("puts a space before each text (add_prefix_space)")
        if step.get("type") == "Digits" and not step.get("individual_digits"):
            problems.append("splits off whole numbers (individual_digits false)")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            problems.append(f"marks parts of words ({name} {model[name]!r})")
    if problems:
        raise ValueError(
            f"{folder}: its tokenizer.json {' and '.join(problems)}, which llama.cpp does not do; "
            "keep the Hugging Face folder"
        )


def _check_sentencepiece(definition: dict[str, Any], folder: Path) -> None:
    """Raise ValueError for a normalizer that does more than sentencepiece's spaces."""
    normalizer = definition.get("normalizer") or {}
    for step in normalizer.get("normalizers", [normalizer]):
        is_space = step.get("type") == "Replace" and step.get("pattern") == {"String": " "}
        if step and step.get("type") != "Prepend" and not is_space:
            raise ValueError(
                f"{folder}: the normalizer of its tokenizer.json changes texts "
                f"({json.dumps(step)[:300]}), and llama.cpp has none; keep the Hugging Face folder"
            )
    if not _divides_as_sentencepiece(definition):
        step = json.dumps(definition["pre_tokenizer"])[:300]
        raise ValueError(
            f"{folder}: the pre-tokenizer of its tokenizer.json divides texts ({step}), and "
            "llama.cpp does not; keep the Hugging Face folder"
        )


def _divides_as_sentencepiece(definition: dict[str, Any]) -> bool:
    """Return whether the pre-tokenizer of a tokenizer.json changes no token."""
    step = definition.get("pre_tokenizer")
    if step is None:
        return True
    # Gemma's, after its normalizer has replaced all spaces
    if step.get("type") == "Split" and step.get("pattern") == {"String": " "}:
        return True
    if step.get("type") != "Metaspace":
        return False
    # to divide before each space changes nothing where no token continues after one
    divides = step.get("split", True)
    return not divides or not any(
        "\u2581" in text[1:] for text in definition["model"]["vocab"]
    )


def _note_prefix(tokenizer: Tokenizer) -> None:
    """Print a note on tokens before plain text for which GGUF has no field: all but a BOS token."""
    lost = tokenizer.prefix_ids[int(tokenizer.adds_bos) :]
    if lost:
        text = tokenizer.decode(lost, skip_special=False)
        print(
            f"note: llama.cpp does not put {text} before a text that is no conversation, as this "
            "tokenizer does",
            file=sys.stderr,
        )


def _note_stripped(definition: dict[str, Any] | None) -> None:
    """Print notes on special tokens that strip the spaces around them."""
    added = definition["added_tokens"] if definition else []
    # see `model_name`
    is_phi3 = any(token["content"] == "<|endoftext|>" for token in added)
    for side, place in (("lstrip", "before"), ("rstrip", "after")):
        texts = [token["content"] for token in added if token[side]]
        if texts and not (side == "rstrip" and is_phi3):
            print(
                f"note: llama.cpp keeps the space {place} {', '.join(texts[:5])}, which this "
                "tokenizer removes",
                file=sys.stderr,
            )


def _is_nfc(normalizer: dict[str, Any]) -> bool:
    """Return whether a normalizer of a tokenizer.json does nothing but NFC."""
    steps = normalizer.get("normalizers", [normalizer])
    return all(step.get("type") == "NFC" for step in steps)


def _texts_and_types(tokenizer: Tokenizer) -> dict[int, tuple[str, int]]:
    """Return the text and type of every token, by id."""
    special = tokenizer.special_ids
    added = tokenizer.added_ids
    types = {
        i: TokenType.CONTROL if i in special else TokenType.USER_DEFINED
        for i in special | added
    }
    return {
        i: (text, int(types.get(i, TokenType.NORMAL)))
        for text, i in tokenizer.vocabulary().items()
    }


def _pad(
    tokens: dict[int, tuple[str, int]], scores: dict[str, float], size: int
) -> StoredTokens:
    """Return the tokens ordered by id, with an unused token for each row of the embedding that has
    none."""
    rows = [tokens.get(i, (f"[PAD{i}]", int(TokenType.UNUSED))) for i in range(size)]
    texts = [text for text, _ in rows]
    return StoredTokens(
        texts,
        [token_type for _, token_type in rows],
        [scores.get(text, NO_MERGE_SCORE) for text in texts],
    )


def _sentencepiece_tokens(
    definition: dict[str, Any] | None, content: bytes, tokenizer: Tokenizer, size: int
) -> tuple[StoredTokens, bool]:
    """Return sentencepiece's tokens, and whether the tokenizer puts a space before a text."""
    tokens = _texts_and_types(tokenizer)
    if definition:
        _check_sentencepiece(definition, tokenizer.folder)
        scores = _merge_scores(definition["model"]["merges"])
        tokens = _name_bytes(tokens)
        types = dict.fromkeys(BYTES, TokenType.BYTE) | {
            definition["model"].get("unk_token"): TokenType.UNKNOWN
        }
        adds_space = _adds_space(definition)
    else:
        from sentencepiece import sentencepiece_model_pb2 as sentencepiece

        # protobuf makes the classes of this module when it is imported
        proto = sentencepiece.ModelProto  # pyright: ignore[reportAttributeAccessIssue]
        model = proto.FromString(content)
        if model.trainer_spec.model_type != model.trainer_spec.BPE:
            raise ValueError(
                f"{tokenizer.folder}: its tokenizer.model is not BPE, the only kind that llama.cpp "
                "supports"
            )
        scores = {p.piece: p.score for p in model.pieces}
        types = {}
        for p in model.pieces:
            # 1: a normal token
            if p.type != 1:
                types[p.piece] = p.type
        adds_space = model.normalizer_spec.add_dummy_prefix
        if model.normalizer_spec.precompiled_charsmap:
            name = model.normalizer_spec.name
            print(
                f"note: llama.cpp leaves out the normalization {name} of its tokenizer.model: of "
                "full-width letters and ligatures, for example",
                file=sys.stderr,
            )
        if model.normalizer_spec.remove_extra_whitespaces:
            spaces = (
                "leading, trailing and repeated spaces, and those next to special tokens"
            )
            print(
                f"note: llama.cpp keeps {spaces}, which this tokenizer removes",
                file=sys.stderr,
            )

    typed = {}
    for i, (text, kind) in tokens.items():
        # control tokens stay so, whatever sentencepiece says of them
        if kind != TokenType.CONTROL:
            kind = types.get(text, kind)
        # llama.cpp writes the text of added tokens as it is: Gemma's runs of spaces, which merges
        # form, would be \u2581
        if kind == TokenType.USER_DEFINED and "\u2581" in text:
            if text in scores:
                kind = TokenType.NORMAL
            else:
                text = text.replace("\u2581", " ")
        typed[i] = (text, int(kind))
    return _pad(typed, scores, size), adds_space


def _merge_scores(merges: Iterable[Sequence[str]]) -> dict[str, float]:
    """Return scores that make sentencepiece's BPE apply the merges in this order: earlier merges
    have higher scores."""
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        # a token of several merges has the score of the first
        scores.setdefault(left + right, -float(rank))
    return scores


def _name_bytes(tokens: dict[int, tuple[str, int]]) -> dict[int, tuple[str, int]]:
    """Rename byte tokens to sentencepiece's names: in transformers, Gemma's tab is a literal tab
    instead of <0x09>."""
    texts = {text for text, _ in tokens.values()}
    missing = {}
    for byte, name in enumerate(BYTES[:128]):
        if name not in texts:
            missing[chr(byte)] = name
    return {
        i: (missing.get(text, text), token_type) for i, (text, token_type) in tokens.items()
    }


def _adds_space(definition: dict[str, Any]) -> bool:
    """Whether a tokenizer.json puts a space before each text between special tokens, as
    sentencepiece does."""
    parts = json.dumps([definition["normalizer"], definition["pre_tokenizer"]])
    # such as Mistral's; chats begin with a special token and so get no space
    if '"prepend_scheme": "first"' in parts:
        print(
            "note: outside of chats, this tokenizer puts a space before a text, and llama.cpp does "
            "not",
            file=sys.stderr,
        )
    return '"Prepend"' in parts or '"prepend_scheme": "always"' in parts
