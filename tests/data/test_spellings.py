"""One conversation has the same samples in every format that can say it: what is learned does not
depend on the field that a text is in."""

import random
from typing import Any

import numpy as np
import pytest
from same_prompts import templates, tokenizer_with

from litft.data.encoder import Encoder
from litft.data.reasoning import REPEATED_THOUGHT
from litft.data.sample import ID_MASK, SUPERVISED
from litft.data.tokenizer import Tokenizer
from litft.data.turn_rendering import writes_think_tags

# every seventh of the published templates, which have places for reasoning or none
TEMPLATES = dict(list(templates())[::7])
# pieces of texts, some of which look like marks
PIECES = (
    *(
        "Hello",
        "12",
        " é",
        "日本語",
        "x = 3\n\ty",
        "trail ",
        "\n\n",
        "\r\n",
        "{}",
        "[1]",
        "null",
    ),
    *("<|im_end|>", "</s>", "[INST]", "### Assistant:", "<tool_call>"),
    *("<think>", "</think>", "<think>\n\n</think>\n\n", "<think>a b\n</think>\n\n"),
)
MODES = ("learn", "learn_empty", "mask", "drop")


def text(random_: random.Random) -> str:
    """Return a text of a few pieces, which is not blank."""
    pieces = random_.choices(PIECES, k=random_.randint(1, 3))
    found = random_.choice(("", " ")).join(pieces)
    return found if found.strip() else "word"


def spellings(question: str, answer: str, system: str | None) -> dict[str, dict[str, Any]]:
    """Return the records of all formats that say the same."""
    beside = {} if system is None else {"system": system}
    first = [] if system is None else [{"role": "system", "content": system}]
    user = {"role": "user", "content": question}
    reply = {"role": "assistant", "content": answer}
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    parts = []
    for message in (user, reply):
        part = {"type": "text", "text": message["content"]}
        parts.append({"role": message["role"], "content": [part]})
    return {
        "messages": {"messages": [*first, user, reply]},
        "messages and system": {"messages": [user, reply], **beside},
        "parts": {"messages": [*first, *parts]},
        "sharegpt": {"conversations": turns, **beside},
        "alpaca": {"instruction": question, "output": answer, **beside},
        "dolly": {"instruction": question, "response": answer, "context": "", **beside},
        "prompt": {"prompt": question, "completion": answer, **beside},
        "lists of messages": {"prompt": [*first, user], "completion": [reply]},
        "question": {"question": question, "answer": answer, **beside},
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_that_say_the_same_have_the_same_samples(name, tmp_path, cases):
    tokenizer = tokenizer_with(TEMPLATES[name], tmp_path)
    random_ = random.Random(len(name))
    for _ in range(cases(10)):
        system = text(random_) if random_.random() < 0.4 else None
        records = spellings(text(random_), text(random_), system)
        encoder = Encoder(tokenizer, 1000, reasoning=random_.choice(MODES))
        expected = None
        for format_name, record in records.items():
            encoded = encoder("here", record)
            samples = None
            if encoded.error is None:
                samples = [sample.tolist() for sample in encoded.samples]
            if format_name == "messages":
                expected = samples
            assert samples == expected, (format_name, record, encoder.reasoning)


def think_templates() -> dict[str, str]:
    """Return the published templates that mention <think>."""
    found = {}
    for name, template in templates():
        # its prompts open a thought that no answer closes
        if "<think>" in template and name != "a thought that is never closed":
            found[name] = template
    return found


THINK_TEMPLATES = think_templates()


@pytest.mark.parametrize("name", THINK_TEMPLATES)
def test_thoughts_are_learned_after_the_mark_that_opens_them(name, tmp_path):
    """Data sampled from a model whose prompt ends with <think> has the closing mark alone."""
    tokenizer = tokenizer_with(THINK_TEMPLATES[name], tmp_path)
    if not writes_think_tags(tokenizer.apply_chat_template, None):
        pytest.skip("its prompts have no <think>, and the mark is text")

    for opening, closing in (("<think>\n", "\n</think>\n\n"), ("<think>", "</think>")):
        texts = []
        for beginning in ("", opening):
            contents = [f"{beginning}Two.{closing}4", f"{beginning}Three.{closing}6"]
            texts.append(learned_texts(tokenizer, contents))
        # spaces beside marks may be the template's own
        assert texts[0] and texts[0] == texts[1]


@pytest.mark.parametrize("name", THINK_TEMPLATES)
def test_an_empty_thought_is_there_once(name, tmp_path):
    """The prompt, or the template, may have one before an answer that was sampled with it."""
    tokenizer = tokenizer_with(THINK_TEMPLATES[name], tmp_path)
    if not writes_think_tags(tokenizer.apply_chat_template, None):
        pytest.skip("its prompts have no <think>, and the mark is text")

    for arguments in ({}, {"enable_thinking": False, "thinking": False}):
        for thought in ("<think>\n\n</think>\n\n", "\n</think>\n\n"):
            for mode in ("learn", "learn_empty"):
                contents = [f"{thought}4", f"{thought}6"]
                for text in learned_texts(tokenizer, contents, mode, arguments):
                    plain = text.replace("[", "").replace("]", "")
                    assert not REPEATED_THOUGHT.search(plain), (arguments, thought, mode)


def learned_texts(
    tokenizer: Tokenizer,
    contents: list[str],
    mode: str = "learn",
    arguments: dict[str, Any] | None = None,
) -> list[str]:
    """Return the samples of a conversation with these answers as texts: see `marked_text`."""
    conversation = []
    for content in contents:
        conversation.append({"role": "user", "content": "And?"})
        conversation.append({"role": "assistant", "content": content})
    record = {"messages": conversation, "chat_template_kwargs": arguments or {}}
    encoded = Encoder(tokenizer, 1000, reasoning=mode)("here", record)
    assert encoded.error is None
    return [marked_text(tokenizer, sample) for sample in encoded.samples]


def marked_text(tokenizer: Tokenizer, sample: np.ndarray) -> str:
    """Return the text of a sample without white space, with the learned tokens in brackets."""
    text = ""
    for value in sample:
        piece = tokenizer.decode([int(value & ID_MASK)], skip_special=False)
        text += f"[{piece}]" if value & SUPERVISED else piece
    return "".join(text.split()).replace("[]", "").replace("][", "")
