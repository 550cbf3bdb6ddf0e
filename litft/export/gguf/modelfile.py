"""Ollama's Modelfile beside a GGUF file: where the weights are, the template in Ollama's own words, what ends an answer.

Ollama renders the jinja template in the file from version 0.30 on; older ones need TEMPLATE, a Go template, which can be
written where a template shows each message by itself. https://docs.ollama.com/modelfile
"""

import json
from typing import NamedTuple

from litft.data.chat_template import Message
from litft.data.tokenizer import Tokenizer

_MARK = "\ue000words\ue000"  # of a private use area: no template writes it
_PROBES = ("system user", "user assistant user", "system user assistant user assistant user")


def modelfile(name: str, tokenizer: Tokenizer) -> str:
    """The Modelfile for a file `name` beside it."""
    lines = [f"FROM ./{name}"]
    parts = _parts(tokenizer)
    if parts and not any(text in "".join(filter(None, parts)) for text in ('"""', "{{")):
        lines.append(f'TEMPLATE """{_go(parts)}"""')
    else:
        lines.append("# the chat template in the file is used, by Ollama 0.30 and newer")
    ends = [tokenizer.decode([number], skip_special=False) for number in tokenizer.stop_ids]
    return "\n".join([*lines, *(f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}" for end in ends)]) + "\n"


class _Parts(NamedTuple):
    """What stands before and behind each role's words, where a conversation begins without a system turn, and at the end."""

    before_system: str | None  # None: there is no place for one
    after_system: str | None
    before_user: str
    after_user: str
    before_assistant: str
    after_assistant: str
    without_system: str
    prompt: str

    def text(self, messages: list[Message]) -> str:
        """The conversation, as Ollama renders `_go` of these."""
        found = "" if messages[0]["role"] == "system" else self.without_system
        for message in messages:
            at = ("system", "user", "assistant").index(message["role"]) * 2
            found += f"{self[at]}{message['content']}{self[at + 1]}"
        return found + self.prompt


def _go(parts: _Parts) -> str:
    """The Go template that shows messages so."""
    first = (
        f'{{{{ if and (eq $i 0) (ne .Role "system") }}}}{parts.without_system}{{{{ end }}}}' if parts.without_system else ""
    )
    roles = [
        f'{{{{ {word} eq .Role "{role}" }}}}{parts[at]}{{{{ .Content }}}}{parts[at + 1]}'
        for at, word, role in ((0, "if", "system"), (2, "else if", "user"), (4, "else if", "assistant"))
    ]
    shown = [roles[1].replace("else if", "if"), roles[2]] if parts.before_system is None else roles
    return f"{{{{ range $i, $_ := .Messages }}}}{first}{''.join(shown)}{{{{ end }}}}{{{{ end }}}}{parts.prompt}"


def _parts(tokenizer: Tokenizer) -> _Parts | None:
    """How the tokenizer's template shows messages; None where it does not show each by itself."""
    try:
        return _with_system(tokenizer, _without_system(tokenizer))
    except (ValueError, _Entangled):
        return None


class _Entangled(Exception):
    """A template whose text of a message depends on the others."""


def _render(tokenizer: Tokenizer, roles: str, prompt: bool = False) -> str:
    """A conversation of these roles; the BOS is left to Ollama, which adds it."""
    messages = [{"role": role, "content": _MARK} for role in roles.split()]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
    return text.removeprefix(tokenizer.special["bos_token"]) if tokenizer.adds_bos else text


def _behind(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise _Entangled
    return text[len(beginning) :]


def _around(text: str) -> tuple[str, str]:
    """What stands before and behind the words of one message."""
    before, found, after = text.partition(_MARK)
    if not found or _MARK in after:
        raise _Entangled
    return before, after


def _without_system(tokenizer: Tokenizer) -> _Parts:
    """The parts of conversations that begin with a user's turn."""
    one, two, three = (_render(tokenizer, roles) for roles in ("user", "user assistant", "user assistant user"))
    user, assistant = _around(_behind(three, two)), _around(_behind(two, one))
    first = _around(one)
    if not first[0].endswith(user[0]) or first[1] != user[1]:
        raise _Entangled
    prompt = _behind(_render(tokenizer, "user", prompt=True), one)
    return _Parts(None, None, *user, *assistant, first[0].removesuffix(user[0]), prompt)


def _with_system(tokenizer: Tokenizer, plain: _Parts) -> _Parts | None:
    """The same with the system's turn, where the template has a place for one; None where they do not make its texts."""
    try:
        pair = _render(tokenizer, "system user")
        text, marked, user = pair.rpartition(plain.before_user + _MARK)
        before, after = _around(text)
        if not marked or user != plain.after_user:
            raise _Entangled
        plain = plain._replace(before_system=before, after_system=after)
        probes = _PROBES
    except ValueError:  # the template refuses a system turn
        probes = _PROBES[1:2]
    for roles in probes:
        messages = [{"role": role, "content": _MARK} for role in roles.split()]
        if plain.text(messages) != _render(tokenizer, roles, prompt=True):
            return None
    return plain
