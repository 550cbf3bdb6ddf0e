"""Text to token ids and back: one class for `tokenizer.json` (tokenizers) and `tokenizer.model`
(sentencepiece)."""

import hashlib
import json
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from litft.data.answer_format import answer_format, is_structure
from litft.data.answer_parser import AnswerFormat
from litft.data.chat_template import ALPACA, Message, render
from litft.data.declared_tokens import read_declared, read_json
from litft.data.messages import with_arguments_as_text
from litft.data.tokenizer_backends import FastBackend, SentencePieceBackend
from litft.data.turn_ends import EndTokens

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"  # a folder, as in transformers
# the name of the template for conversations with tools
TOOL_USE = "tool_use"

# tokenizer classes that transformers 5 builds anew from parts of tokenizer.json
REBUILT = ("Qwen2", "GPT2", "CodeGen", "Llama", "CodeLlama")

CONTENT_END = "qzxcontentendxzq"  # in no text

# matches control tokens of chat templates: <|im_end|>,
# <start_of_turn>, Gemma 4's <|turn> and <turn|>
CONTROL_TOKEN = re.compile(
    r"<[|｜][^|｜<>\s]+[|｜]>|<(?:start|end)_of_turn>|<\|[^|<>\s]+>|<[^|<>\s]+\|>"
)
# and Mistral's [TOOL_CALLS], which other tokenizers have as plain text
NEW_CONTROL = re.compile(rf"{CONTROL_TOKEN.pattern}|\[/?[A-Z][A-Z_]+\]")


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    `chat_template` is jinja source, Alpaca style if the folder has none. It renders the BOS token
    if the tokenizer adds one to plain text, so that a conversation has exactly one.
    `named_templates` are for special purposes: with tools, the one named tool_use is used, as in
    transformers. `has_template`: whether the template is the folder's, or was trained with, so that
    it is saved. Generation ends at any of `stop_ids`.

    base: the folder of the model, if `folder` is that of an adapter. It names the stop tokens where
    the adapter's folder
    does not: PEFT and transformers save an adapter with a tokenizer, but without a
    generation_config.json.
    """

    def __init__(self, folder: Path, base: Path | None = None) -> None:
        self.folder = folder
        # the folders that may name stop tokens, in the order of their priority
        if base in (None, folder):
            self.generation_folders = [folder]
        else:
            self.generation_folders = [folder, base]
        config = read_json(folder / "tokenizer_config.json")
        declared = read_declared(folder)
        self.special = dict(declared.named)
        self._has_new_tokens = False
        # those of --data.new_tokens, which the folder's vocabulary may have already
        self.new_ids: frozenset[int] = frozenset()
        # the date that templates print as today's (ISO 8601); None: today
        self.day: str | None = None
        if (path := folder / "tokenizer.json").is_file():
            self._backend = FastBackend(path, declared)
        elif (path := folder / "tokenizer.model").is_file():
            self._backend = SentencePieceBackend(path, declared)
        else:
            raise ValueError(
                f"{folder} contains no tokenizer.json or tokenizer.model; copy the model's "
                "tokenizer into it"
            )

        # a missing end token would be learned as the characters of its text
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        if "eos_token" in self.special and self.eos_id is None:
            text = self.special["eos_token"]
            reason = (
                f"the eos_token {text!r} is not in the vocabulary, so answers would end with its "
                "characters"
            )
            raise ValueError(
                f"{folder / 'tokenizer_config.json'}: {reason}; name one of its tokens"
            )
        # the tokens before every text that is no conversation
        self.prefix_ids = self._backend.text_prefix(
            self.bos_id, config.get("add_bos_token")
        )
        self.adds_bos = bool(self.prefix_ids) and self.prefix_ids[0] == self.bos_id
        self.stop_ids = _stop_ids(self.generation_folders, self.eos_id)
        # end tokens are special even if the tokenizer file does not mark them so
        self.special_ids: set[int] = self._backend.special_ids | (
            set(self.stop_ids) & ({self.eos_id} | self.added_ids)
        )
        if not self.stop_ids:
            raise ValueError(
                f"{folder}: neither tokenizer_config.json nor generation_config.json names an end "
                "token (eos)"
            )
        if "eos_token" not in self.special:  # GPT-2's folder has only its id
            self.special["eos_token"] = self._backend.decode(
                self.stop_ids[:1], skip_special=False
            )
        self.chat_template = ""
        self.named_templates: dict[str, str] = {}
        self._set_templates(*_own_templates(folder, config))

    def take_templates(self, folder: Path) -> None:
        """Use the chat templates of another folder, if it has any."""
        config = read_json(folder / "tokenizer_config.json")
        template, named_templates = _own_templates(folder, config)
        if template is not None or named_templates:
            self._set_templates(template, named_templates)

    def _set_templates(self, template: str | None, named_templates: dict[str, str]) -> None:
        """Set a folder's chat templates; without one, the style of Alpaca."""
        self.own_template = template
        self.has_template = self.own_template is not None
        self.use_template(self.own_template or ALPACA)
        for name, source in named_templates.items():
            # a template for another purpose may need more than messages
            with suppress(ValueError):
                source = self._with_bos(source)
            self.named_templates[name] = source

    def _id(self, kind: str) -> int | None:
        if kind in self.special:
            return self._backend.token_id(self.special[kind])
        return None

    @property
    def vocab_size(self) -> int:
        """The number of tokens; the model's embedding may have more rows as padding."""
        return self._backend.size

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token."""
        return self._backend.vocabulary()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token given as text; None if the text is not one token."""
        return self._backend.token_id(token)

    @property
    def uses_date(self) -> bool:
        """Whether the template prints today's date."""
        sources = (self.chat_template, *self.named_templates.values())
        return any("strftime_now" in source for source in sources)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The special tokens as text."""
        texts = map(self.special_text, sorted(self.special_ids))
        return tuple(filter(None, texts))

    def special_text(self, token_id: int) -> str:
        """Return the text of a special token."""
        return self._special_text_by_id[token_id]

    @cached_property
    def _special_text_by_id(self) -> dict[int, str]:
        return {i: self.decode([i], skip_special=False).strip() for i in self.special_ids}

    @cached_property
    def structure_ids(self) -> frozenset[int]:
        """The special tokens that mark the reasoning and tool calls of an answer: parts of its
        text."""
        ends = {self.bos_id, self.eos_id}
        ids = set()
        for token_id, text in self._special_text_by_id.items():
            if is_structure(text) and token_id not in ends:
                ids.add(token_id)
        return frozenset(ids)

    @property
    def answer_format(self) -> AnswerFormat:
        """How the chat template writes answers."""
        # a call is written by the template for tools, if there is one of its own
        return answer_format(self.template_for([{}]), self.special, self.end_tokens)

    @property
    def end_tokens(self) -> EndTokens:
        """The special tokens as text, and those at which generation ends."""
        stops = tuple(
            self.decode([number], skip_special=False).strip() for number in self.stop_ids
        )
        return EndTokens(self.special_texts, stops)

    @property
    def end_id(self) -> int:
        """The token that ends an answer if the template writes none: EOS."""
        if self.eos_id is not None:
            return self.eos_id
        return self.stop_ids[0]

    @cached_property
    def control_text(self) -> re.Pattern | None:
        """A pattern that matches the text of any special token; None if there is none."""
        if self.special_texts:
            return re.compile("|".join(map(re.escape, self.special_texts)))
        return None

    def portability_note(self) -> str | None:
        """Return what a user of other programs has to know about the ids of texts; None if they are
        the same there."""
        if isinstance(self._backend, FastBackend):
            return self._other_settings()
        return (
            "note: the tokenizer is a tokenizer.model without a tokenizer.json; transformers 5 "
            "divides repeated spaces and text after special tokens differently, so that texts with "
            "them have other ids there"
        )

    def _other_settings(self) -> str | None:
        """Return a note on settings of tokenizer_config.json that transformers prefers to those of
        tokenizer.json, and litft does not."""
        config = read_json(self.folder / "tokenizer_config.json")
        names = []
        if self.has_other_prefix(config):
            names.append(f"add_prefix_space {str(config['add_prefix_space']).lower()}")
        if config.get("split_special_tokens"):
            names.append("split_special_tokens true")
        if not names:
            return None
        return (
            f"note: tokenizer_config.json has {' and '.join(names)}, which transformers applies; "
            "litft reads texts as tokenizer.json says, so that they have other ids there"
        )

    def has_other_prefix(self, config: dict[str, Any]) -> bool:
        """Return whether tokenizer_config.json says otherwise than tokenizer.json if a text gets a
        space in front, of a class for which transformers prefers the former."""
        value = config.get("add_prefix_space")
        is_rebuilt = str(config.get("tokenizer_class")).startswith(REBUILT)
        if not isinstance(self._backend, FastBackend) or not is_rebuilt or value is None:
            return False
        return bool(value) != self._backend.adds_prefix_space

    def digest(self) -> str:
        """Return the hash of everything that decides how texts and conversations are tokenized."""
        # a template without a date gives the same cache on every day
        templates = [self.chat_template, self.named_templates]
        settings = [
            self.special,
            templates,
            self.adds_bos,
            self.stop_ids,
            self.day if self.uses_date else None,
        ]
        # the cache has which of them occur
        if self.new_ids:
            settings.append(sorted(self.new_ids))
        return hashlib.sha256(
            self._backend.state() + json.dumps(settings).encode()
        ).hexdigest()

    def vocabulary_digest(self) -> str:
        """Return the hash of the tokens and their ids, independent of template and stop tokens."""
        return hashlib.sha256(
            json.dumps(sorted(self.vocabulary().items())).encode()
        ).hexdigest()

    @property
    def added_ids(self) -> set[int]:
        """The tokens, special or not, that are matched in a text before the model splits the
        rest."""
        return self._backend.added_ids()

    def serialized(self) -> tuple[str, bytes]:
        """Return the file name, tokenizer.json or tokenizer.model, and its content."""
        return self._backend.serialized()

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token of a tokenizer.model adds to a text."""
        assert isinstance(self._backend, SentencePieceBackend)
        return self._backend.token_bytes(token_id)

    def add_tokens(self, texts: list[str]) -> dict[int, list[int]]:
        """Make each text a single token; return {its new id: the ids of the text before}.

        A text that looks like a control token becomes special: it may end an answer, and is not
        part of decoded text. Raise ValueError for an empty text.
        """
        texts = list(dict.fromkeys(texts))
        if any(not text.strip() for text in texts):
            raise ValueError("a new token must contain more than whitespace")
        # encoded before the text becomes a token: the new embedding is computed from these pieces
        pieces = [self._backend.encode(text) for text in texts]
        for text, before in zip(texts, pieces, strict=True):
            token_id = self.token_id(text)
            if token_id is not None and before != [token_id]:
                raise ValueError(
                    f"{text!r} is the tokenizer's internal spelling of a token, not its text; "
                    "choose another token"
                )
        new = [text for text in texts if self.token_id(text) is None]
        if new:
            special = set(filter(NEW_CONTROL.fullmatch, new))
            self._backend.add(new, special)
            self.special_ids |= {self._known_id(text) for text in special}
            # cached values that depend on the special tokens
            for name in (
                "special_texts",
                "control_text",
                "structure_ids",
                "_special_text_by_id",
            ):
                self.__dict__.pop(name, None)
            self._has_new_tokens = True
        pieces_by_id = {}
        for text, before in zip(texts, pieces, strict=True):
            pieces_by_id[self._known_id(text)] = before
        self.new_ids = frozenset(pieces_by_id)
        return pieces_by_id

    def _known_id(self, token: str) -> int:
        """Return the id of a token that the vocabulary has, such as one just added."""
        token_id = self.token_id(token)
        assert token_id is not None
        return token_id

    def save_added(self, folder: Path) -> None:
        """Write the tokenizer files that `add_tokens` has changed into a folder with the other
        files."""
        if self._has_new_tokens:
            self._backend.save(folder)

    def encode(self, text: str, bos: bool | None = None, eos: bool = False) -> list[int]:
        """Return the token ids of `text`. bos None: what the checkpoint's tokenizer puts before a
        text, which is BOS, others or nothing, if the text does not begin with it."""
        ids = self._backend.encode(check_text(text))
        if bos is None and ids[: len(self.prefix_ids)] != self.prefix_ids:
            ids = [*self.prefix_ids, *ids]
        if bos:
            ids = [self._required(self.bos_id, "bos_token"), *ids]
        if eos:
            ids = [*ids, self._required(self.eos_id, "eos_token")]
        return ids

    def _required(self, token_id: int | None, kind: str) -> int:
        """Return the id of a token to add; raise ValueError if the tokenizer has none."""
        if token_id is None:
            raise ValueError(f"{self.folder}: tokenizer_config.json names no {kind} to add")
        return token_id

    def encode_with_boundaries(
        self, text: str, boundaries: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of `text`, without BOS, and for each character offset how many
        tokens end at or before it."""
        return self._backend.encode_with_boundaries(check_text(text), boundaries)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Return the text of token ids; incomplete UTF-8 sequences become U+FFFD."""
        shown = [int(token_id) for token_id in ids]
        if skip_special:
            shown = [token_id for token_id in shown if token_id not in self.special_ids]
        return self._backend.decode(shown, skip_special)

    @property
    def answer_ids(self) -> frozenset[int]:
        """Special tokens that may be a part of an answer: marks of reasoning and calls, and others
        that stand for a label; not those that begin, end or pad a text."""
        others = {self.bos_id, self.eos_id, *self.stop_ids}
        others |= {self._id("pad_token"), self._id("unk_token")}
        return frozenset(self.special_ids - others) | self.structure_ids

    def decode_answer(self, ids: list[int]) -> str:
        """Return the text of an answer's tokens, with the special tokens that are a part of it."""
        shown = []
        answer_ids = self.answer_ids
        for i in map(int, ids):
            if i not in self.special_ids or i in answer_ids:
                shown.append(i)
        # a call may end at a mark
        if shown and ids[-1] in self.stop_ids and shown[-1] == int(ids[-1]):
            shown.pop()
        return self._backend.decode(shown, skip_special=False)

    def apply_chat_template(
        self,
        messages: list[Message],
        tools: list | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation to the text the model reads; encode it with `bos=False`. variables:
        of the template."""
        variables = self.special | variables
        # OpenAI's newer name of the system prompt
        has_developer = any(message["role"] == "developer" for message in messages)
        if has_developer and "developer" not in self.template_for(tools):
            messages = [_with_known_role(message) for message in messages]
        # templates that print arguments as they are would print a dict in Python's form
        if (
            any(message.get("tool_calls") for message in messages)
            and self.answer_format.arguments_as_text
        ):
            messages = [with_arguments_as_text(message) for message in messages]
        return render(
            self.template_for(tools),
            messages,
            tools,
            add_generation_prompt,
            self.day,
            **variables,
        )

    def continued_chat(
        self, messages: list[Message], tools: list | None = None, **variables: Any
    ) -> str:
        """Render a conversation whose last answer is to be continued, up to the end of its content.

        Raises ValueError if the last message is no answer with content alone, or if the template
        changes the content.
        """
        last = messages[-1]
        content = str(last.get("content") or "")
        if last["role"] != "assistant" or not content.strip() or last.get("tool_calls"):
            raise ValueError(
                "the last message cannot be continued: it must be an answer with content alone"
            )
        # a mark after the content shows where it ends, also if the content occurs elsewhere
        marked = [*messages[:-1], {**last, "content": content + CONTENT_END}]
        text = self.apply_chat_template(marked, tools, **variables)
        before, mark, _ = text.partition(CONTENT_END)
        # templates may strip the beginning of a content, but a change at its end would be continued
        if not mark or not before.endswith(content.lstrip()):
            raise ValueError(
                "the chat template changes the content of the last message, so that it cannot be "
                "continued"
            )
        return before

    def template_for(self, tools: list | None) -> str:
        """Return the template that renders a conversation with these tools."""
        if tools:
            return self.named_templates.get(TOOL_USE, self.chat_template)
        return self.chat_template

    def check_tools(self, tools: list | None) -> None:
        """Raise ValueError if the template would leave tools out."""
        if tools and "tools" not in self.template_for(tools):
            raise ValueError(
                "the model's chat template does not support tools; leave them out"
            )

    def choices(self) -> dict[str, Any]:
        """Return the settings that a run has changed from the folder's files."""
        return {
            "chat_template": self.chat_template,
            "named_templates": self.named_templates,
            "has_template": self.has_template,
            "stop_ids": self.stop_ids,
        }

    def restore_choices(self, choices: Any) -> None:
        """Restore the settings that `choices` returned; raise ValueError if they are invalid."""
        choices = choices if isinstance(choices, dict) else {}
        template = choices.get("chat_template")
        ids = choices.get("stop_ids")
        if not (
            isinstance(template, str)
            and isinstance(ids, list)
            and ids
            and all(type(i) is int for i in ids)
        ):
            raise ValueError(f"{str(choices)[:80]!r} is not a template with stop tokens")
        self.chat_template = template
        self.named_templates = choices.get("named_templates", {})
        self.has_template = choices.get("has_template", True)
        self.stop_ids = ids

    def use_template(self, source: str) -> None:
        """Set the chat template for all purposes."""
        self.chat_template = self._with_bos(source)
        self.named_templates = {}

    def _with_bos(self, source: str) -> str:
        """Return a template that renders BOS, if the tokenizer adds one to plain text and the
        template does not."""
        if not self.adds_bos:
            return source
        # a short conversation shows whether the template writes BOS itself
        probe = [{"role": "user", "content": "a"}]
        text = render(
            source,
            probe,
            tools=None,
            add_generation_prompt=False,
            day=self.day,
            **self.special,
        )
        if text.startswith(self.special["bos_token"]):
            return source
        return "{{ bos_token }}" + source


def _with_known_role(message: Message) -> Message:
    if message["role"] == "developer":
        return {**message, "role": "system"}
    return message


def check_text(text: str) -> str:
    """Return the text; raise ValueError if it has unpaired surrogates, on which the libraries fail
    in various ways."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = (
            f"the character {text[error.start]!a} is half of a surrogate pair, which is not valid "
            "text"
        )
        raise ValueError(f"{reason}; fix it where it was written") from None
    return text


def _own_templates(
    folder: Path, config: dict[str, Any]
) -> tuple[str | None, dict[str, str]]:
    """Return the folder's chat template, and others by name.

    They are files of their own, or in tokenizer_config.json: one text, or a list of several with
    names.
    """
    entries = config.get("chat_template")
    named = {}

    # several templates as a list of names and texts, in older folders
    if isinstance(entries, list):
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                named[str(entry.get("name"))] = entry["template"]
        entries = named.pop("default", None)
    if not isinstance(entries, str | None):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be text, found "
            f"{type(entries).__name__}"
        )

    # files of their own have priority over tokenizer_config.json
    for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")):
        named[path.stem] = path.read_text("utf-8")
    path = folder / TEMPLATE_FILE
    return path.read_text("utf-8") if path.is_file() else entries, named


def _stop_ids(folders: list[Path], eos_id: int | None) -> list[int]:
    """Return the stop tokens: eos_token_id of the first generation_config.json or config.json, and
    the tokenizer's EOS."""
    eos_ids = []

    # the first file that names any, of the adapter's folder before the model's
    paths = []
    for folder in folders:
        paths += [folder / "generation_config.json", folder / "config.json"]
    for path in paths:
        found = read_json(path).get("eos_token_id")
        if found is not None:
            eos_ids = found if isinstance(found, list) else [found]
            break
    # a wrong id would never be generated, and answers would not end
    for value in eos_ids:
        if type(value) is not int or value < 0:
            raise ValueError(f"{path}: eos_token_id {value!r} is not a token id")
    if eos_id is not None:
        eos_ids = [*eos_ids, eos_id]
    return list(dict.fromkeys(eos_ids))
