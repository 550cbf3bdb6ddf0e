"""Notes on answers: where inference would have other tokens, or read a call otherwise."""

import pytest
from learned_spans import QUESTION, TOOLS, answer, calls
from same_prompts import templates, tokenizer_with

from litft.data.encoder import Encoder
from litft.data.notes import CALL_UNREAD, OTHER_PROMPT, WITHIN_TOKEN

TEMPLATES = dict(templates())
# as LFM2: texts are not escaped
UNQUOTED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call_start|>[{{ c.function.name }}("
    "{% for name, value in c.function.arguments.items() %}{{ name }}="
    "{{ \"'\" + value + \"'\" if value is string else value }}{{ ', ' if not loop.last }}"
    "{% endfor %})]<|tool_call_end|>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# tools #}"
)


def notes_of(template, message, folder, tools=None, **flags):
    """Return the notes on a record with one answer."""
    encoder = Encoder(tokenizer_with(template, folder), limit=1000, **flags)
    encoded = encoder("line 1", {"messages": [QUESTION, message], "tools": tools})
    assert not encoded.error and encoded.samples
    return encoded.notes


@pytest.mark.parametrize(
    ("arguments", "tools", "is_noted"),
    [
        ({"town": "Oslo", "days": 3}, TOOLS, False),
        ({"town": "it's here"}, TOOLS, True),
        # without the tools, answers have no calls
        ({"town": "it's here"}, None, False),
    ],
    ids=str,
)
def test_a_call_that_cannot_be_read_is_noted(arguments, tools, is_noted, tmp_path):
    message = answer("", tool_calls=calls("weather", arguments=arguments))
    notes = notes_of(UNQUOTED, message, tmp_path, tools)
    assert (CALL_UNREAD in notes) == is_noted


@pytest.mark.parametrize("reasoning", ["learn", "learn_empty"])
def test_an_answer_after_an_empty_thought_begins_with_a_token(reasoning, tmp_path):
    """The prompt without thinking ends where the empty thought does. One that is learned begins
    after an opening mark and a line, within two lines that are a token."""
    template = TEMPLATES["qwen3_5_think"]
    notes = notes_of(template, answer(), tmp_path, reasoning=reasoning)
    assert (WITHIN_TOKEN in notes) == (reasoning == "learn_empty")


@pytest.mark.parametrize("reasoning", ["learn", "learn_empty"])
def test_an_empty_thought_of_the_prompt_cannot_be_learned(reasoning, tmp_path):
    """Nemotron 3: the prompt of generation opens a thought with a line, an empty one has none."""
    template = TEMPLATES["nemotron_3_nano"]
    notes = notes_of(template, answer(), tmp_path, reasoning=reasoning)
    assert (OTHER_PROMPT in notes) == (reasoning == "learn_empty")
