"""Special and added tokens in the files beside tokenizer.json or tokenizer.model. Where two files
differ, the one counts that transformers prefers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litft.model.config_file import read_object

STANDARD_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# lists of special tokens without a name; the second may also be an object of names
EXTRA_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class AddedEntry:
    """A token that is added to a vocabulary."""

    text: str
    token_id: int
    special: bool
    # lstrip, rstrip, normalized, single_word; what a file does not say keeps the library's default
    flags: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class DeclaredTokens:
    """What the files say of a tokenizer's tokens."""

    # texts by name, such as "eos_token": chat templates have them as variables
    named: dict[str, str]
    extra: list[str]  # special tokens without a name
    added: dict[str, AddedEntry]  # by text

    @property
    def special(self) -> list[str]:
        """The texts of special tokens."""
        added = [text for text, entry in self.added.items() if entry.special]
        return list(dict.fromkeys([*self.named.values(), *self.extra, *added]))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no file."""
    if path.is_file():
        return read_object(path)
    return {}


def read_declared(folder: Path) -> DeclaredTokens:
    """Return what tokenizer_config.json, special_tokens_map.json and added_tokens.json declare.

    As in transformers, the last two count only where tokenizer_config.json has no
    `added_tokens_decoder`; special_tokens_map.json then has priority.
    """
    config = read_json(folder / "tokenizer_config.json")
    mapped = read_json(folder / "special_tokens_map.json")
    of_config = _named(config)
    of_map = {name: text for name, text in _named(mapped).items() if name in STANDARD_NAMES}
    entries = config.get("added_tokens_decoder")
    if isinstance(entries, dict):
        # a folder that names its tokens in the other file alone keeps them
        named = of_map | of_config
        return DeclaredTokens(named, _extra(config), _entries(entries))
    named = of_config | of_map
    extra = list(dict.fromkeys([*_extra(config), *_extra(mapped)]))
    special = {*named.values(), *extra}
    added = {}
    for text, token_id in read_json(folder / "added_tokens.json").items():
        if type(token_id) is int:
            is_special = text in special
            flags = {"normalized": not is_special}
            added[text] = AddedEntry(text, token_id, is_special, flags)
    return DeclaredTokens(named, extra, added)


def _text(value: Any) -> str | None:
    """Return the text of a token, which is given as such or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    if isinstance(value, str):
        return value
    return None


def _named(source: dict[str, Any]) -> dict[str, str]:
    """Return the tokens that a file names: the standard ones, and those of the model alone."""
    named = {}
    for name, value in source.items():
        text = _text(value) if name in STANDARD_NAMES else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    for name, text in _own_names(source).items():
        if name.endswith("_token"):
            named[name] = text
    return named


def _own_names(source: dict[str, Any]) -> dict[str, str]:
    """Return the tokens that a file names in an object of their own."""
    own_names = source.get("extra_special_tokens")
    texts = {}
    if isinstance(own_names, dict):
        for name, value in own_names.items():
            text = _text(value)
            if text is not None:
                texts[name] = text
    return texts


def _extra(source: dict[str, Any]) -> list[str]:
    """Return the special tokens that a file lists without names, or with names that are not those
    of variables."""
    texts = []
    for name, text in _own_names(source).items():
        if not name.endswith("_token"):
            texts.append(text)
    for name in EXTRA_LISTS:
        values = source.get(name)
        if isinstance(values, list):
            texts += filter(None, map(_text, values))
    return texts


def _entries(entries: dict[str, Any]) -> dict[str, AddedEntry]:
    """Return the entries of `added_tokens_decoder`; those of another form are left out."""
    added = {}
    for token_id, entry in entries.items():
        if not (isinstance(entry, dict) and token_id.isdecimal()):
            continue
        text = _text(entry)
        if text is None:
            continue
        flags = {}
        for name in ("lstrip", "rstrip", "normalized", "single_word"):
            if name in entry:
                flags[name] = bool(entry[name])
        added[text] = AddedEntry(text, int(token_id), bool(entry.get("special")), flags)
    return added
