"""Reasoning of earlier answers: inference has it where training has it."""

from pathlib import Path

import pytest
from conftest import ROOT
from quirks import QUIRKS

from litft.data.history import readable_history
from litft.data.tokenizer import Tokenizer

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Warm.", "reasoning_content": "The town matters."},
    {"role": "user", "content": "And?"},
]
# a template that reads one field, and one that takes reasoning inline
READS = "{%- for m in messages %}[{{ m.role }}]{{ m.FIELD or '' }}|{{ m.content }}{%- endfor %}"
INLINE = (
    "{# <think> #}{%- for m in messages %}[{{ m.role }}]{{ m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}[assistant]{% endif %}"
)


def rendered(source: str, messages: list) -> str:
    """Return the prompt of an answer to the messages."""
    tokenizer = Tokenizer(Path(ROOT) / "tests" / "stories")
    tokenizer.use_template(source)
    history = readable_history(tokenizer, messages)
    return tokenizer.apply_chat_template(history, add_generation_prompt=True)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_in_the_field_that_the_template_reads(field):
    text = rendered(READS.replace("FIELD", field), CHAT)
    assert "[assistant]The town matters.|Warm.[user]" in text


def test_reasoning_is_inline_where_the_template_takes_it_so():
    text = rendered(INLINE, CHAT)
    assert "[assistant]<think>\nThe town matters.\n</think>\n\nWarm.[user]And?[assistant]" in text


def test_a_template_without_reasoning_gets_none():
    assert "town" not in rendered(QUIRKS["plain"], CHAT)
    # as a program may send it
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "thinking": "b"}]
    tokenizer = Tokenizer(Path(ROOT) / "tests" / "stories")
    assert readable_history(tokenizer, parts) == parts
