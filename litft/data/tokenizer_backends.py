"""The two tokenizer libraries behind one interface: `tokenizers` for tokenizer.json, sentencepiece
for tokenizer.model."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from litft.data.declared_tokens import DeclaredTokens, read_json

# with more boundaries, sentencepiece's are computed from the lengths of pieces: exact unless the
# model rewrites characters
MANY_BOUNDARIES = 64
LARGEST_ID = 2**24  # of a token
TOKEN_FIELDS = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class FastBackend:
    """The `tokenizers` backend."""

    def __init__(self, path: Path, declared: DeclaredTokens) -> None:
        """Read tokenizer.json, and add the tokens that it lacks of those in `declared`."""
        from tokenizers import Tokenizer as Backend

        try:
            self.backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(
                f"{path} is not a valid tokenizer ({error}); download it again"
            ) from None
        # some files have the truncation and the padding with which the tokenizer was trained
        self.backend.no_truncation()
        self.backend.no_padding()

        self._add_entries(declared, path.parent)
        self._add_special(declared.special)
        self.size = self.backend.get_vocab_size()
        added_tokens = self._added_tokens().items()
        self.special_ids = {i for i, token in added_tokens if token.special}
        self._stripping_ids = {i for i, token in added_tokens if token.rstrip}

    def _add_entries(self, declared: DeclaredTokens, folder: Path) -> None:
        """Add the tokens of tokenizer_config.json, which also decides how they are matched; raise
        ValueError if their ids belong to other tokens."""
        from tokenizers import AddedToken

        known = {token.content: token for token in self._added_tokens().values()}
        named = set(declared.named.values())
        changed = []
        new = []
        # in the order of their ids, since the library gives the next free id to each new token
        for entry in sorted(declared.added.values(), key=lambda entry: entry.token_id):
            special = entry.special or entry.text in named
            token = AddedToken(entry.text, special=special, **entry.flags)
            before = known.get(entry.text)
            if before is not None and _matching(before) == _matching(token):
                continue
            changed.append(token)
            if self.backend.token_to_id(entry.text) is None:
                new.append(entry)
        # at once: after each call, the library prepares its search for all tokens again
        self.backend.add_tokens(changed)
        for entry in new:
            if self.backend.token_to_id(entry.text) != entry.token_id:
                reason = (
                    f"the token {entry.text!r} is to have the id {entry.token_id}, but "
                    "tokenizer.json lacks it"
                )
                raise ValueError(
                    f"{folder}: {reason}, and has other tokens up to there; download "
                    "tokenizer.json and tokenizer_config.json again"
                )

    def _add_special(self, texts: list[str]) -> None:
        """Make tokens of the vocabulary special, so that no text is divided within them."""
        from tokenizers import AddedToken

        known = {token.content for token in self._added_tokens().values()}
        tokens = []
        for text in texts:
            # a token that the model has no row for stays text
            if text not in known and self.backend.token_to_id(text) is not None:
                tokens.append(AddedToken(text, special=True))
        self.backend.add_tokens(tokens)

    @cached_property
    def adds_prefix_space(self) -> bool:
        """Whether a text gets a space in front."""
        text = "a"
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        if self.backend.pre_tokenizer is not None:
            text = self.backend.pre_tokenizer.pre_tokenize_str(text)[0][0]
        return text != "a"

    def _added_tokens(self) -> dict[int, Any]:
        """Return the library's added tokens, by their ids."""
        return self.backend.get_added_tokens_decoder()

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_with_boundaries(
        self, text: str, boundaries: list[int]
    ) -> tuple[list[int], list[int]]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        ends = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # the offsets of a token that strips the spaces after it include them
            if token_id in self._stripping_ids:
                end = start + len(text[start:end].rstrip())
            ends.append(end)
        return encoding.ids, [bisect_right(ends, boundary) for boundary in boundaries]

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def vocabulary(self) -> dict[str, int]:
        return self.backend.get_vocab()

    def add(self, texts: list[str], special: set[str]) -> None:
        from tokenizers import AddedToken

        # normalized=False: the text is matched as it is, before the normalizer changes it
        self.backend.add_tokens(
            [AddedToken(text, normalized=False, special=text in special) for text in texts]
        )
        self.size = self.backend.get_vocab_size()
        for text in special:
            token_id = self.backend.token_to_id(text)
            # it has been added above
            assert token_id is not None
            self.special_ids.add(token_id)

    def serialized(self) -> tuple[str, bytes]:
        largest = max(self.vocabulary().values(), default=0)
        # the library writes a line for each id up to it
        if largest > LARGEST_ID:
            raise ValueError(
                f"tokenizer.json has the token id {largest:,}, which no model has; download it "
                "again"
            )
        return "tokenizer.json", self.backend.to_str().encode(errors="surrogatepass")

    def state(self) -> bytes:
        return self.serialized()[1]

    def added_ids(self) -> set[int]:
        return set(self._added_tokens())

    def save(self, folder: Path) -> None:
        self.backend.save(str(folder / "tokenizer.json"))
        entries = {}
        for token_id, token in self._added_tokens().items():
            entries[token_id] = {name: getattr(token, name) for name in TOKEN_FIELDS}
        _write_added(folder, entries)

    def text_prefix(self, bos_id: int | None, configured: bool | None) -> list[int]:
        """Return the tokens that the file's post-processor puts before every text.

        As in transformers 5, `configured`, the add_bos_token of tokenizer_config.json, is ignored.
        """
        # the library does not say what its post-processor adds; an example does
        plain = self.backend.encode("a", add_special_tokens=False).ids
        ids = self.backend.encode("a", add_special_tokens=True).ids
        if not plain:
            # the vocabulary lacks the example, so that all is added
            return ids[:1] if ids[:1] == [bos_id] else []
        # what follows the text is hardly the text again
        for start in reversed(range(len(ids) - len(plain) + 1)):
            if ids[start : start + len(plain)] == plain:
                return ids[:start]
        return []


class SentencePieceBackend:
    """The sentencepiece backend; special tokens in the text become their ids, as in
    transformers."""

    def __init__(self, path: Path, declared: DeclaredTokens) -> None:
        """Read tokenizer.model, and add the tokens that it lacks of those in `declared`."""
        from sentencepiece import SentencePieceProcessor

        try:
            self.backend = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{path} is not a valid sentencepiece model ({error}); download it again"
            ) from None
        size = self.backend.vocab_size()
        # tokens that the file does not contain
        self.added: dict[str, int] = {}
        for text, entry in declared.added.items():
            if entry.token_id >= size:
                self.added[text] = entry.token_id
        # `token_id` reads both tables, so the second one has to exist before it is filled
        self.special: dict[str, int] = {}
        for text, entry in declared.added.items():
            if self.token_id(text) is None:
                piece = self.backend.id_to_piece(entry.token_id)
                raise ValueError(
                    f"{path.parent}: the token {text!r} is to have the id {entry.token_id}, which "
                    f"is {piece!r} in tokenizer.model; download both files again"
                )
        known = {}
        for text in declared.special:
            token_id = self.token_id(text)
            if token_id is not None:
                known[text] = token_id
        self.special = known
        self.special_ids = set(self.special.values())
        self._update_vocabulary()

    def _update_vocabulary(self) -> None:
        """Update the size, and the pattern that splits a text at special and added tokens."""
        # the longest first: a token may be the beginning of another one
        texts = sorted({**self.special, **self.added}, key=len, reverse=True)
        self.size = (
            max(
                [
                    self.backend.vocab_size() - 1,
                    *self.added.values(),
                    *self.special.values(),
                ]
            )
            + 1
        )
        if texts:
            self._split = re.compile("(" + "|".join(map(re.escape, texts)) + ")")
        else:
            self._split = None

    def encode(self, text: str) -> list[int]:
        ids = []
        added = {**self.special, **self.added}
        for part in self._parts(text):
            if part in added:
                ids.append(added[part])
            else:
                ids += self.backend.encode(part)
        return ids

    def _parts(self, text: str) -> list[str]:
        """Return the text divided at added tokens, which are parts themselves."""
        if self._split is None:
            return [text]
        # the group of the pattern keeps the tokens among the parts
        return self._split.split(text)

    def encode_with_boundaries(
        self, text: str, boundaries: list[int]
    ) -> tuple[list[int], list[int]]:
        # a few boundaries: tokenize each beginning of the text, which is exact
        if len(boundaries) < MANY_BOUNDARIES:
            ids = self.encode(text)
            positions = []
            for boundary in boundaries:
                beginning = self.encode(text[:boundary])
                positions.append(common_prefix_length(ids, beginning))
            return ids, positions

        # many: one pass, with the ends of tokens computed from the text
        ids = []
        ends = []
        at = 0
        added = {**self.special, **self.added}
        for part in self._parts(text):
            if part in added:
                ids.append(added[part])
                ends.append(at + len(part))
            else:
                part_ids = self.backend.encode(part)
                ids += part_ids
                ends += [at + end for end in self._token_ends(part, part_ids)]
            at += len(part)
        return ids, [bisect_right(ends, boundary) for boundary in boundaries]

    def _token_ends(self, text: str, ids: list[int]) -> Iterator[int]:
        """Yield the end of each token in characters of `text`, assuming that the model changes no
        characters."""
        pieces = [self.backend.id_to_piece(token) for token in ids]
        # of a character's byte tokens, the first counts; the space that the model adds before a
        # text has no width
        widths = []
        for piece in pieces:
            byte = _BYTE.fullmatch(piece)
            if byte:
                widths.append(int(byte[1], 16) & 0xC0 != 0x80)
            else:
                widths.append(len(piece))
        # the model adds one before a text that begins with a space, too
        added_space = bool(pieces) and pieces[0][:1] == "▁" and sum(widths) > len(text)
        if not pieces:
            return
        ends = list(accumulate(widths[1:], initial=widths[0] - added_space))
        # the added space alone is a token of the text that follows
        yield max(ends[0], 1)
        yield from ends[1:]

    def decode(self, ids: list[int], skip_special: bool) -> str:
        if skip_special:
            ids = [i for i in ids if i not in self.special_ids]
        # sentencepiece decodes runs of its own pieces;
        # special and added tokens are put between them
        names = {i: token for token, i in {**self.special, **self.added}.items()}
        # the model's embedding may have more rows, which are no tokens
        num_pieces = self.backend.get_piece_size()
        ids = [i for i in ids if i < num_pieces or i in names]
        if not any(i in names for i in ids):
            return self.backend.decode(ids)
        text = ""
        pending = []
        # the None at the end makes the last run complete
        for i in [*ids, None]:
            if i is None or i in names:
                text += self.backend.decode(pending)
                pending = []
                if i is not None:
                    text += names[i]
            else:
                pending.append(i)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text; nothing for an id without a token."""
        names = {i: token for token, i in {**self.special, **self.added}.items()}
        if token_id in names:
            return names[token_id].encode()
        if token_id >= self.backend.get_piece_size():
            return b""
        piece = self.backend.id_to_piece(token_id)
        byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()

    def vocabulary(self) -> dict[str, int]:
        return (
            {self.backend.id_to_piece(i): i for i in range(self.backend.get_piece_size())}
            | self.special
            | self.added
        )

    def token_id(self, token: str) -> int | None:
        added_id = {**self.special, **self.added}.get(token)
        if added_id is not None:
            return added_id
        piece_id = self.backend.piece_to_id(token)
        # for an unknown text, sentencepiece returns the id of <unk>
        if self.backend.id_to_piece(piece_id) == token:
            return piece_id
        return None

    def add(self, texts: list[str], special: set[str]) -> None:
        for text in texts:
            (self.special if text in special else self.added)[text] = self.size
            self._update_vocabulary()
        self.special_ids = set(self.special.values())

    def serialized(self) -> tuple[str, bytes]:
        return "tokenizer.model", self.backend.serialized_model_proto()

    def added_ids(self) -> set[int]:
        return {*self.special.values(), *self.added.values()}

    def state(self) -> bytes:
        return self.serialized()[1] + json.dumps([self.special, self.added]).encode()

    def save(self, folder: Path) -> None:
        options = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
        entries = {}
        for text, token_id in self.special.items():
            entries[token_id] = {"content": text, **options, "special": True}
        for text, token_id in self.added.items():
            entries[token_id] = {"content": text, **options, "special": False}
        _write_added(folder, entries)

    def text_prefix(self, bos_id: int | None, configured: bool | None) -> list[int]:
        """Return the tokens before every text. configured: add_bos_token of the folder."""
        # transformers' default for these files is to add it
        if bos_id is None or configured is False:
            return []
        return [bos_id]


def _matching(token: Any) -> tuple:
    """Return how a token of the library is matched and decoded."""
    return tuple(getattr(token, name) for name in TOKEN_FIELDS)


def common_prefix_length(ids: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    length = 0
    for token_id, other_id in zip(ids, other, strict=False):
        if token_id != other_id:
            break
        length += 1
    return length


def _write_added(folder: Path, entries: dict[int, dict[str, Any]]) -> None:
    """Add tokens to `added_tokens_decoder` in tokenizer_config.json, from which transformers reads
    them."""
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    existing = config.get("added_tokens_decoder") or {}
    # what the file says of a token already has priority
    merged = {}
    for token_id, entry in sorted(entries.items()):
        merged[str(token_id)] = existing.get(str(token_id), entry)
    config["added_tokens_decoder"] = merged | existing
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
