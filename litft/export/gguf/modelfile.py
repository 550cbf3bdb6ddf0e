"""Ollama's Modelfile for a GGUF file: path of the weights, chat template and stop tokens.

Ollama 0.30 and newer renders the jinja template in the GGUF file. Older versions need TEMPLATE, a
Go template; it can be written if the text of each message does not depend on the other messages.
https://docs.ollama.com/modelfile
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from litft.data.chat_template import Message
from litft.data.tokenizer import Tokenizer

# characters of a private use area, which no template contains
_MARK = "\ue000words\ue000"
_PROBES = (
    "system user",
    "user assistant user",
    "system user assistant user assistant user",
)


# Ollama's names of the settings of sampling
PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


def modelfile(name: str, tokenizer: Tokenizer, sampling: Mapping[str, Any]) -> str:
    """Return the Modelfile for the GGUF file `name` in the same folder.

    sampling: how answers are drawn here, by the fields of `Sampling`; Ollama has other defaults.
    """
    lines = [f"FROM ./{name}"]
    stop_texts = [
        tokenizer.decode([number], skip_special=False) for number in tokenizer.stop_ids
    ]
    parameters = []
    for field, parameter in PARAMETERS.items():
        if sampling.get(field) is not None:
            parameters.append(f"PARAMETER {parameter} {sampling[field]:g}")
    for text in stop_texts:
        parameters.append(f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}")
    # Ollama then continues the prompt as it is
    if not tokenizer.has_template:
        return "\n".join([*lines, *parameters]) + "\n"
    parts = None
    # a Go template could print neither the day of a question nor tools
    has_tools = "tools" in tokenizer.template_for([{}])
    if not has_tools and not tokenizer.uses_date:
        parts = _template_parts(tokenizer)
    # these marks would end a string of the Modelfile, or begin an action in Go
    if parts and not any(text in "".join(filter(None, parts)) for text in ('"""', "{{")):
        lines.append(f'TEMPLATE """{_go_template(parts)}"""')
    else:
        lines.append("# the chat template in the GGUF file is used (Ollama 0.30 and newer)")
    return "\n".join([*lines, *parameters]) + "\n"


class _Parts(NamedTuple):
    """Text before and after the content of each role, before a conversation without system prompt,
    and at the end."""

    # None: the template does not support a system prompt
    before_system: str | None
    after_system: str | None
    before_user: str
    after_user: str
    before_assistant: str
    after_assistant: str
    without_system: str
    prompt: str

    def text(self, messages: list[Message]) -> str:
        """Render a conversation as Ollama renders it with the template of `_go_template`."""
        text = "" if messages[0]["role"] == "system" else self.without_system
        for message in messages:
            # the first six fields are the texts before and after each role
            index = ("system", "user", "assistant").index(message["role"]) * 2
            text += f"{self[index]}{message['content']}{self[index + 1]}"
        return text + self.prompt


def _go_template(parts: _Parts) -> str:
    """Return the Go template that renders messages with these parts."""
    if parts.without_system:
        condition = '{{ if and (eq $i 0) (ne .Role "system") }}'
        beginning = f"{condition}{parts.without_system}{{{{ end }}}}"
    else:
        beginning = ""
    roles = [
        f'{{{{ {keyword} eq .Role "{role}" }}}}{parts[index]}{{{{ .Content }}}}{parts[index + 1]}'
        for index, keyword, role in (
            (0, "if", "system"),
            (2, "else if", "user"),
            (4, "else if", "assistant"),
        )
    ]
    # the first branch must begin with `if`
    if parts.before_system is None:
        branches = [roles[1].replace("else if", "if"), roles[2]]
    else:
        branches = roles
    return (
        f"{{{{ range $i, $_ := .Messages }}}}{beginning}{''.join(branches)}{{{{ end }}}}{{{{ end "
        f"}}}}{parts.prompt}"
    )


def _template_parts(tokenizer: Tokenizer) -> _Parts | None:
    """Return the parts of the tokenizer's chat template, or None if the text of a message depends
    on other messages."""
    try:
        return _with_system(tokenizer, _without_system(tokenizer))
    except (ValueError, _ContextDependent):
        return None


class _ContextDependent(Exception):
    """The text that a template renders for a message depends on other messages."""


def _render(tokenizer: Tokenizer, roles: str, prompt: bool = False) -> str:
    """Render a conversation of these roles without the BOS token, which Ollama adds."""
    messages = [{"role": role, "content": _MARK} for role in roles.split()]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
    if tokenizer.adds_bos:
        return text.removeprefix(tokenizer.special["bos_token"])
    return text


def _remove_prefix(text: str, prefix: str) -> str:
    """Return the rest of `text` after `prefix`; raise _ContextDependent if it does not begin with
    it."""
    if not text.startswith(prefix):
        raise _ContextDependent
    return text[len(prefix) :]


def _around(text: str) -> tuple[str, str]:
    """Return the text before and after the content of a single message."""
    before, mark, after = text.partition(_MARK)
    if not mark or _MARK in after:
        raise _ContextDependent
    return before, after


def _without_system(tokenizer: Tokenizer) -> _Parts:
    """Return the parts of conversations that begin with a user turn."""
    one_turn, two_turns, three_turns = (
        _render(tokenizer, roles)
        for roles in ("user", "user assistant", "user assistant user")
    )
    # each turn is what it adds to the conversation before it
    user = _around(_remove_prefix(three_turns, two_turns))
    assistant = _around(_remove_prefix(two_turns, one_turn))
    first = _around(one_turn)
    # the first turn may only differ from a later one in what precedes it
    if not first[0].endswith(user[0]) or first[1] != user[1]:
        raise _ContextDependent
    prompt = _remove_prefix(_render(tokenizer, "user", prompt=True), one_turn)
    return _Parts(None, None, *user, *assistant, first[0].removesuffix(user[0]), prompt)


def _with_system(tokenizer: Tokenizer, parts: _Parts) -> _Parts | None:
    """Add the parts of a system turn if the template supports it; return None if the parts do not
    reproduce its text."""
    try:
        two_turns = _render(tokenizer, "system user")
        # the system turn is all that precedes the user's
        text, mark, after_user = two_turns.rpartition(parts.before_user + _MARK)
        before, after = _around(text)
        if not mark or after_user != parts.after_user:
            raise _ContextDependent
        parts = parts._replace(before_system=before, after_system=after)
        probes = _PROBES
    except ValueError:  # the template refuses a system turn
        probes = _PROBES[1:2]

    # all parts together must give the template's own text
    for roles in probes:
        messages = [{"role": role, "content": _MARK} for role in roles.split()]
        if parts.text(messages) != _render(tokenizer, roles, prompt=True):
            return None
    return parts
