"""Text to token ids and back: `tokenizer.json` (tokenizers) or `tokenizer.model` (sentencepiece), one face."""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from litft.data.chat_template import ALPACA, Message, render
from litft.model.config import read_object

MANY = 64  # places of a text that are found by the lengths of its pieces: exact unless a model rewrites characters
# a control token as chat templates write them
CONTROL = re.compile(r"<[|｜][^|｜<>\s]+[|｜]>|<(?:start|end)_of_turn>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class _Fast:
    """The `tokenizers` back-end."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self.backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path} is no valid tokenizer ({error}); download it again") from None
        self.backend.no_truncation()
        self.backend.no_padding()
        self.size = self.backend.get_vocab_size()
        self.special_ids = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_to(self, text: str, places: list[int]) -> tuple[list[int], list[int]]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        ends = [end for _, end in encoding.offsets]
        return encoding.ids, [bisect_right(ends, place) for place in places]

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def vocabulary(self) -> dict[str, int]:
        return self.backend.get_vocab()

    def add(self, texts: list[str], special: set[str]) -> None:
        from tokenizers import AddedToken

        self.backend.add_tokens([AddedToken(text, normalized=False, special=text in special) for text in texts])
        self.size = self.backend.get_vocab_size()
        self.special_ids |= {self.backend.token_to_id(text) for text in special}

    def serialized(self) -> tuple[str, bytes]:
        return "tokenizer.json", self.backend.to_str().encode(errors="surrogatepass")

    def state(self) -> bytes:
        return self.serialized()[1]

    def added_ids(self) -> set[int]:
        return set(self.backend.get_added_tokens_decoder())

    def save(self, folder: Path) -> None:
        self.backend.save(str(folder / "tokenizer.json"))
        names = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
        known = self.backend.get_added_tokens_decoder().items()
        _write_added(folder, {i: {name: getattr(token, name) for name in names} for i, token in known})

    def adds_bos(self, bos_id: int | None) -> bool:
        """Whether the file's own post-processor begins every text with BOS."""
        ids = self.backend.encode("a", add_special_tokens=True).ids
        return bos_id is not None and ids[:1] == [bos_id]


class _SentencePiece:
    """The sentencepiece back-end; special tokens in the text become their ids, as in transformers."""

    def __init__(self, path: Path, special: list[str], added: dict[str, int]) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self.backend = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path} is no valid sentencepiece model ({error}); download it again") from None
        size = self.backend.vocab_size()
        self.added = {text: i for text, i in added.items() if i >= size}  # tokens that the file itself does not know
        self.special: dict[str, int] = {}
        self.special = {token: found for token in special if (found := self.token_id(token)) is not None}
        self.special_ids = set(self.special.values())
        self._know()

    def _know(self) -> None:
        """Texts that are tokens whole."""
        whole = sorted({**self.special, **self.added}, key=len, reverse=True)
        self.size = max([self.backend.vocab_size() - 1, *self.added.values(), *self.special.values()]) + 1
        self._split = re.compile("(" + "|".join(map(re.escape, whole)) + ")") if whole else None

    def encode(self, text: str) -> list[int]:
        ids, whole = [], {**self.special, **self.added}
        for part in self._split.split(text) if self._split else [text]:
            ids += [whole[part]] if part in whole else self.backend.encode(part)
        return ids

    def encode_to(self, text: str, places: list[int]) -> tuple[list[int], list[int]]:
        if len(places) < MANY:
            ids = self.encode(text)
            return ids, [common_prefix_length(ids, self.encode(text[:place])) for place in places]
        ids, ends, at, whole = [], [], 0, {**self.special, **self.added}
        for part in self._split.split(text) if self._split else [text]:
            found = [whole[part]] if part in whole else self.backend.encode(part)
            ids += found
            ends += [at + width for width in ([len(part)] if part in whole else self._widths(part, found))]
            at += len(part)
        return ids, [bisect_right(ends, place) for place in places]

    def _widths(self, text: str, ids: list[int]) -> Iterator[int]:
        """How many characters end with each token, where the model changes none."""
        pieces = [self.backend.id_to_piece(token) for token in ids]
        # of the bytes of a character the first counts; the space that the model puts before a text stands for nothing
        widths = [len(p) if not (byte := _BYTE.fullmatch(p)) else int(byte[1], 16) & 0xC0 != 0x80 for p in pieces]
        front = bool(pieces) and pieces[0].startswith("▁") and not text.startswith((" ", "▁"))
        return accumulate(widths[1:], initial=widths[0] - front) if pieces else iter(())

    def decode(self, ids: list[int], skip_special: bool) -> str:
        if skip_special:
            ids = [i for i in ids if i not in self.special_ids]
        names = {i: token for token, i in {**self.special, **self.added}.items()}
        known = self.backend.get_piece_size()  # a model may have more rows, which stand for nothing
        ids = [i for i in ids if i < known or i in names]
        if not any(i in names for i in ids):
            return self.backend.decode(ids)
        text, plain = "", []
        for i in [*ids, None]:
            if i is None or i in names:
                text += self.backend.decode(plain) + names.get(i, "")
                plain = []
            else:
                plain.append(i)
        return text

    def vocabulary(self) -> dict[str, int]:
        return {self.backend.id_to_piece(i): i for i in range(self.backend.get_piece_size())} | self.special | self.added

    def token_id(self, token: str) -> int | None:
        if (known := {**self.special, **self.added}.get(token)) is not None:
            return known
        found = self.backend.piece_to_id(token)
        return found if self.backend.id_to_piece(found) == token else None

    def add(self, texts: list[str], special: set[str]) -> None:
        for text in texts:
            (self.special if text in special else self.added)[text] = self.size
            self._know()
        self.special_ids = set(self.special.values())

    def serialized(self) -> tuple[str, bytes]:
        return "tokenizer.model", self.backend.serialized_model_proto()

    def added_ids(self) -> set[int]:
        return {*self.special.values(), *self.added.values()}

    def state(self) -> bytes:
        return self.serialized()[1] + json.dumps([self.special, self.added]).encode()

    def save(self, folder: Path) -> None:
        plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
        special = {i: {"content": text, **plain, "special": True} for text, i in self.special.items()}
        added = {i: {"content": text, **plain, "special": False} for text, i in self.added.items()}
        _write_added(folder, special | added)

    def adds_bos(self, bos_id: int | None) -> bool:
        return bos_id is not None  # transformers' default for these files


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    `chat_template` is jinja source; where the folder has none it is Alpaca style. It begins with the BOS token wherever the
    tokenizer adds one to plain text, so that a conversation has exactly one. `stop_ids` end a generation.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = _read_json(folder / "tokenizer_config.json")
        self.special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        added = _added_tokens(config)
        self._has_new = False
        self.day: str | None = None  # that templates write for today; None: today
        if (path := folder / "tokenizer.json").is_file():
            self._backend = _Fast(path)
        elif (path := folder / "tokenizer.model").is_file():
            special = [text for text, entry in added.items() if entry["special"]]
            self._backend = _SentencePiece(path, [*self.special.values(), *special], {t: e["id"] for t, e in added.items()})
        else:
            raise ValueError(f"{folder} holds no tokenizer.json or tokenizer.model; copy the model's tokenizer into it")
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        adds = config.get("add_bos_token")
        self.adds_bos = self.bos_id is not None and (adds if adds is not None else self._backend.adds_bos(self.bos_id))
        self.stop_ids = _stop_ids(folder, self.eos_id)
        # an end token is one also where the file does not call it special
        self.special_ids = self._backend.special_ids | (set(self.stop_ids) & ({self.eos_id} | self.added_ids))
        if not self.stop_ids:
            raise ValueError(f"{folder}: neither tokenizer_config.json nor generation_config.json names an end token (eos)")
        if "eos_token" not in self.special:  # GPT-2's own folder knows its id alone
            self.special["eos_token"] = self._backend.decode(self.stop_ids[:1], skip_special=False)
        self.own_template = _own_template(folder, config)
        self.chat_template = ""
        self.use_template(self.own_template or ALPACA)

    def _id(self, kind: str) -> int | None:
        return self._backend.token_id(self.special[kind]) if kind in self.special else None

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer knows; the model's vocabulary may be padded beyond."""
        return self._backend.size

    def vocabulary(self) -> dict[str, int]:
        """Every token's id."""
        return self._backend.vocabulary()

    def token_id(self, token: str) -> int | None:
        """The id of a token given as text; None where it is not one."""
        return self._backend.token_id(token)

    @property
    def tells_date(self) -> bool:
        """Whether the template writes today's date."""
        return "strftime_now" in self.chat_template

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The special tokens as they stand in a text."""
        return tuple(filter(None, (self.decode([i], skip_special=False).strip() for i in sorted(self.special_ids))))

    @cached_property
    def control_text(self) -> re.Pattern | None:
        """Finds the text of a special token."""
        return re.compile("|".join(map(re.escape, self.special_texts))) if self.special_texts else None

    def digest(self) -> str:
        """Which tokenizer and template this is: the same text gives the same tokens where it is equal."""
        own = [self.special, self.chat_template, self.adds_bos, self.stop_ids, self.day if self.tells_date else None]
        return hashlib.sha256(self._backend.state() + json.dumps(own).encode()).hexdigest()

    def vocabulary_digest(self) -> str:
        """Which tokens these are, whatever the template and what ends an answer."""
        return hashlib.sha256(json.dumps(sorted(self.vocabulary().items())).encode()).hexdigest()

    @property
    def added_ids(self) -> set[int]:
        """The tokens that are found in a text before all else, special or not."""
        return self._backend.added_ids()

    def serialized(self) -> tuple[str, bytes]:
        """The content of tokenizer.json or tokenizer.model, and which of them."""
        return self._backend.serialized()

    def add_tokens(self, texts: list[str]) -> dict[int, list[int]]:
        """Make each text one token from now on: its id, and the ids it had before; ValueError for an empty text.

        One that looks like a control token is special: it may end an answer, and is no part of what is said.
        """
        texts = list(dict.fromkeys(texts))
        if any(not text.strip() for text in texts):
            raise ValueError("a new token must be a text with more than spaces")
        pieces = [self._backend.encode(text) for text in texts]
        for text, before in zip(texts, pieces, strict=True):
            if (known := self.token_id(text)) is not None and before != [known]:
                raise ValueError(
                    f"{text!r} is how the tokenizer spells a piece of its own, not a text; choose another token"
                )
        if new := [text for text in texts if self.token_id(text) is None]:
            special = set(filter(CONTROL.fullmatch, new))
            self._backend.add(new, special)
            self.special_ids |= {self.token_id(text) for text in special}
            for name in ("special_texts", "control_text"):
                self.__dict__.pop(name, None)
            self._has_new = True
        return {self.token_id(text): before for text, before in zip(texts, pieces, strict=True)}

    def save_added(self, folder: Path) -> None:
        """Write what `add_tokens` has changed beside the other files."""
        if self._has_new:
            self._backend.save(folder)

    def encode(self, text: str, bos: bool | None = None, eos: bool = False) -> list[int]:
        """Token ids of `text`. bos None: a BOS where the checkpoint's tokenizer adds one and the text has none yet."""
        ids = self._backend.encode(check_text(text))
        if bos is None:
            bos = self.adds_bos and ids[:1] != [self.bos_id]
        for wanted, kind, known in ((bos, "bos_token", self.bos_id), (eos, "eos_token", self.eos_id)):
            if wanted and known is None:
                raise ValueError(f"{self.folder}: tokenizer_config.json names no {kind} to add")
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def encode_to(self, text: str, places: list[int]) -> tuple[list[int], list[int]]:
        """Token ids of `text` as it stands, and how many of them end at or before each of these places in it."""
        return self._backend.encode_to(check_text(text), places)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are no valid UTF-8 yet come out as U+FFFD."""
        return self._backend.decode([int(i) for i in ids if not (skip_special and int(i) in self.special_ids)], skip_special)

    def apply_chat_template(
        self, messages: list[Message], tools: list | None = None, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """The conversation as the text the model reads; encode it with `bos=False`. `variables` are the template's own."""
        return render(self.chat_template, messages, tools, add_generation_prompt, self.day, **self.special, **variables)

    def choices(self) -> dict[str, Any]:
        """What a run has decided beside the folder's files."""
        return {"chat_template": self.chat_template, "stop_ids": self.stop_ids}

    def choose_again(self, choices: Any) -> None:
        """Take on what `choices` once gave; ValueError where it did not."""
        template, stops = (
            choices.get(name) if isinstance(choices, dict) else None for name in ("chat_template", "stop_ids")
        )
        if not (isinstance(template, str) and isinstance(stops, list) and stops and all(type(i) is int for i in stops)):
            raise ValueError(f"{str(choices)[:80]!r} is no template with stop tokens")
        self.chat_template, self.stop_ids = template, stops

    def use_template(self, source: str) -> None:
        """Render with `source` from now on; a BOS is put before it where the tokenizer adds one and it does not."""
        self.chat_template = source
        if self.adds_bos:
            probe = [{"role": "user", "content": "a"}]
            if not self.apply_chat_template(probe).startswith(self.special["bos_token"]):
                self.chat_template = "{{ bos_token }}" + source


def check_text(text: str) -> str:
    """The same text; ValueError where it holds what is none, on which the libraries end in ways of their own."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"the character {text[error.start]!a} is half of a surrogate pair and no text"
        raise ValueError(f"{reason}; mend it where it was written") from None
    return text


def common_prefix_length(ids: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike; of a text and a beginning of it, those that end by that place."""
    return next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))


def _write_added(folder: Path, entries: dict[int, dict[str, Any]]) -> None:
    """Name the added tokens where transformers looks for them, whatever the other files say."""
    path = folder / "tokenizer_config.json"
    config = _read_json(path)
    known = config.get("added_tokens_decoder") or {}
    config["added_tokens_decoder"] = {str(i): known.get(str(i), entry) for i, entry in sorted(entries.items())} | known
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as text; an entry is a string or a dict with its content. The first source wins."""
    tokens: dict[str, str] = {}
    for source in sources:
        for kind in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = source.get(kind)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens.setdefault(kind, value)
    return tokens


def _added_tokens(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries of `added_tokens_decoder` by their text, each with its id and whether it is special."""
    entries = config.get("added_tokens_decoder")
    entries = entries.items() if isinstance(entries, dict) else ()
    known = [(i, e) for i, e in entries if isinstance(e, dict) and isinstance(e.get("content"), str) and i.isdecimal()]
    return {e["content"]: {"id": int(i), "special": bool(e.get("special"))} for i, e in known}


def _own_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The folder's chat template: its own file, or an entry of tokenizer_config.json (one, or several with names)."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {e.get("name"): e.get("template") for e in found if isinstance(e, dict)}.get("default")
    if not isinstance(found, str | None):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template must be text, found {type(found).__name__}")
    return found


def _stop_ids(folder: Path, eos_id: int | None) -> list[int]:
    """What ends a generation: generation_config.json's eos_token_id (or config.json's), and the tokenizer's EOS."""
    configs = (_read_json(folder / name) for name in ("generation_config.json", "config.json"))
    stated = next((c["eos_token_id"] for c in configs if c.get("eos_token_id") is not None), [])
    stated = stated if isinstance(stated, list) else [stated]
    if odd := [value for value in stated if not isinstance(value, int) or value < 0]:
        raise ValueError(f"{folder}: eos_token_id {odd[0]!r} in generation_config.json or config.json is no token id")
    return list(dict.fromkeys([*stated, *([eos_id] if eos_id is not None else [])]))
