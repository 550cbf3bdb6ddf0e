"""Reasoning in answers, and arguments of chat templates."""

import json
import random
import re
import time
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from litft.args import DataArgs
from litft.data.chat_template import STYLES
from litft.data.dataset import load_data, with_arguments
from litft.data.encoder import Encoder
from litft.data.reasoning import InlineThought
from litft.data.sample import SUPERVISED
from litft.data.tokenizer import Tokenizer

# as in Qwen 3: the reasoning of the last answer is rendered, and a prompt without thinking opens
# with an empty thought
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content or '' }}\n"
    "</think>\n"
    "\n"
    "{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n"
    "\n"
    "</think>\n"
    "\n"
    "{% endif %}{% endif %}"
)
FIELD = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "two and two", "content": "four"},
]
CONTENT = [
    FIELD[0],
    {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\nfour"},
]


def learned(tokenizer, messages, **settings):
    """Return the text that the loss is computed on."""
    encoded = Encoder(tokenizer, 500, **settings)("here", {"messages": messages})
    assert encoded.error is None
    (sample,) = encoded.samples
    return tokenizer.decode(
        [int(x & ~SUPERVISED & 0x0FFFFFFF) for x in sample if x & SUPERVISED],
        skip_special=False,
    )


@pytest.fixture
def tokenizer(tokenizer_folder):
    """A tokenizer with ChatML tokens and the template above."""
    tokenizer = Tokenizer(tokenizer_folder("bytes"))
    tokenizer.use_template(TEMPLATE)
    return tokenizer


def test_reasoning_is_learned_or_masked(tokenizer):
    """It is a field of the message, or a part of its content."""
    assert learned(tokenizer, FIELD) == "<think>\ntwo and two\n</think>\n\nfour<|im_end|>"
    assert learned(tokenizer, FIELD, reasoning="mask") == "four<|im_end|>"
    # some servers write it into both
    twice = [*FIELD[:-1], {**FIELD[-1], "content": "<think>two and two</think>four"}]
    for mode in ("learn", "mask", "drop"):
        expected = learned(tokenizer, FIELD, reasoning=mode)
        assert learned(tokenizer, twice, reasoning=mode) == expected
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.use_template(
        plain + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert "two and two" in learned(tokenizer, CONTENT)
    assert learned(tokenizer, CONTENT, reasoning="mask").strip() == "four<|im_end|>"


@pytest.mark.parametrize(
    "name", ["alpaca", "guanaco", "llama2", "mistral", "plain", "vicuna"]
)
def test_a_style_without_tools_refuses_their_results(tokenizer, name):
    """They would be learned as answers, or read as questions."""
    tokenizer.use_template(STYLES[name])
    messages = [
        *CONTENT,
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "a"},
    ]
    with pytest.raises(ValueError, match="no place for the result of a function"):
        tokenizer.apply_chat_template(messages)


def test_template_arguments_become_defaults_of_the_saved_template(
    tokenizer_folder, tmp_path
):
    """transformers renders the saved template like litft, and its callers can still pass another
    value."""
    folder = tokenizer_folder("bytes")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    records = [
        {"messages": [FIELD[0], FIELD[1] | {"content": content}]} for content in "abcdef"
    ]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    tokenizer = Tokenizer(folder)
    arguments = ["enable_thinking=false"]
    args = DataArgs(
        [str(tmp_path / "data.jsonl")],
        template=str(tmp_path / "template.jinja"),
        template_args=arguments,
    )
    with pytest.raises(
        ValueError, match="the chat template has no variable enable_thinkng"
    ):
        load_data(
            replace(args, template_args=["enable_thinkng=false"]),
            Tokenizer(folder),
            tokenizer.vocab_size,
            500,
        )
    tokenizer = load_data(args, tokenizer, tokenizer.vocab_size, 500).tokenizer
    rendered = tokenizer.apply_chat_template(FIELD[:1], add_generation_prompt=True)
    assert rendered.endswith("<think>\n\n</think>\n\n")
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = tokenizer.chat_template
    options = dict(tokenize=False, add_generation_prompt=True)
    assert theirs.apply_chat_template(FIELD[:1], **options) == rendered
    thinking = theirs.apply_chat_template(FIELD[:1], enable_thinking=True, **options)
    assert thinking.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("value", "literal"),
    [("False", "false"), ("True", "true"), ("None", "none"), ("no", '"no"')],
)
def test_template_arguments_may_have_pythons_words(value, literal):
    source = with_arguments("{{ enable_thinking }}", [f"enable_thinking={value}"])
    assert f"set enable_thinking = {literal} %" in source


@pytest.mark.parametrize("item", ["thinking", "=1", "a b=1", "{{x}}=1"])
def test_invalid_template_arguments_are_reported(item):
    assert any(
        "expected NAME=VALUE" in problem
        for problem in DataArgs(["x"], template_args=[item]).problems()
    )


# what InlineThought finds, in one expression, which needs quadratic time for runs of white space
INLINE = re.compile(
    r"(?P<open>\s*<think>\s*)(?P<reasoning>.*?)(?P<close>\s*</think>\s*)"
    r"|(?P<unopened>(?:(?!<think>).)*?)(?P<close_line>\s*^[ \t]*</think>[ \t]*$\s*)",
    re.DOTALL | re.MULTILINE,
)


def test_inline_thoughts_are_those_of_the_expression():
    rng = random.Random(0)
    parts = ["<think>", "</think>", "\n", " ", "\t", "a", "b\n", "\u2003"]
    num_thoughts = 0
    for _ in range(5000):
        content = "".join(rng.choices(parts, k=rng.randint(0, 9)))
        found = INLINE.match(content)
        thought = InlineThought.of(content)
        assert (found is None) == (thought is None), content
        if found is None:
            continue
        num_thoughts += 1
        answer = content[found.end() :]
        if found["open"] is None:
            expected = InlineThought("", found["unopened"], found["close_line"], answer)
        else:
            expected = InlineThought(
                found["open"], found["reasoning"], found["close"], answer
            )
        assert thought == expected, content
    assert num_thoughts > 500


def test_white_space_before_a_closing_mark_takes_linear_time():
    began = time.monotonic()
    assert InlineThought.of("x" + "\n    " * 200_000 + "</think>y") is None
    assert InlineThought.of("x" + "\n    " * 200_000 + "</think>").reasoning == "x"
    assert time.monotonic() - began < 5
