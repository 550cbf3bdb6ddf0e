"""Reasoning of earlier answers: inference has it where training has it."""

import json
from pathlib import Path

import pytest
from conftest import ROOT
from quirks import QUIRKS

from litft.data.history import readable_history
from litft.data.tokenizer import Tokenizer
from litft.inference.streaming import prompt_ids

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Warm.", "reasoning_content": "The town matters."},
    {"role": "user", "content": "And?"},
]
# a template that reads one field, and one that takes reasoning inline
READS = (
    "{%- for m in messages %}[{{ m.role }}]{{ m.FIELD or '' }}|{{ m.content }}{%- endfor %}"
)
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
    assert (
        "[assistant]<think>\nThe town matters.\n</think>\n\nWarm.[user]And?[assistant]"
        in text
    )


def test_inline_reasoning_is_read_as_in_training():
    """Clients send it back within the content. A template with a field gets it there, one that
    reads `<think>` as it is, and one without reasoning as a part of the answer."""
    content = "<think>\nThe town matters.\n</think>\n\nWarm."
    chat = [CHAT[0], {"role": "assistant", "content": content}, CHAT[2]]
    text = rendered(READS.replace("FIELD", "thinking"), chat)
    assert "[assistant]The town matters.|Warm.[user]" in text
    for source in (INLINE, INLINE.replace("{# <think> #}", "")):
        assert f"[assistant]{content}[user]" in rendered(source, chat)


@pytest.mark.parametrize(
    ("written_before_answers", "expected"),
    [
        # the mark is a part of the content, or the template writes it
        ("", "[assistant]<think>\nThe town matters.\n</think>\n\nWarm.[user]"),
        ("<think>", "[assistant]<think>The town matters.\n</think>\n\nWarm.[user]"),
    ],
)
def test_inline_reasoning_has_one_opening_mark(written_before_answers, expected):
    """The prompt has the mark, and the answers that were sampled after it do not."""
    source = (
        "{%- for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
        f"{written_before_answers}{{% endif %}}{{{{ m.content }}}}{{%- endfor %}}"
        "{%- if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    )
    content = "The town matters.\n</think>\n\nWarm."
    chat = [CHAT[0], {"role": "assistant", "content": content}, CHAT[2]]
    assert expected in rendered(source, chat)


def test_a_system_prompt_that_the_template_leaves_out_is_refused():
    chat = [{"role": "system", "content": "Answer in French."}, CHAT[0]]
    without = (
        "{%- for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}"
        "{% endif %}{%- endfor %}"
    )
    with pytest.raises(
        ValueError, match="leaves out the system prompt; write it into the first"
    ):
        rendered(without, chat)
    assert "French" in rendered(INLINE, chat)


def test_inline_reasoning_that_a_template_only_mentions_is_written_in_its_field():
    """Qwen 3.8: `<think>` is around the field, and inline reasoning would be a second thought."""
    source = (
        "{%- for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<think>"
        "{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}{%- endfor %}"
    )
    for content in (
        "<think>\nThe town matters.\n</think>\n\nWarm.",
        "The town matters.\n</think>\n\nWarm.",
    ):
        chat = [CHAT[0], {"role": "assistant", "content": content}, CHAT[2]]
        assert "[assistant]<think>The town matters.</think>Warm." in rendered(source, chat)


def test_reasoning_that_the_template_reads_is_left_as_it_is():
    """White space around it is a part of what the model has written. Inline reasoning too, also
    where the template has a field for it."""
    source = (
        "{%- for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}{%- endfor %}"
    )
    inline = "<think>The town matters.</think>Warm."
    chat = [CHAT[0], {"role": "assistant", "content": inline}, CHAT[2]]
    assert f"[assistant]{inline}[user]" in rendered(source, chat)
    thought = " The town\n matters. \n"
    chat = [CHAT[0], {**CHAT[1], "reasoning_content": thought}, CHAT[2]]
    text = rendered(READS.replace("FIELD", "reasoning_content"), chat)
    assert f"[assistant]{thought}|Warm.[user]" in text


def test_reasoning_beside_calls_is_asked_for_with_a_call():
    """Gemma 4 reads it only there, gpt-oss not beside a content."""
    source = (
        "{%- for m in messages %}[{{ m.role }}]"
        "{%- if m.reasoning and m.tool_calls %}({{ m.reasoning }}){% endif %}"
        "{%- if m.thinking and m.content %}{{ raise_exception('not both') }}{% endif %}"
        "{%- for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{%- endfor %}"
    )
    answer = {**CALLS[1], "thinking": "The hour matters."}
    text = rendered(source, [CALLS[0], answer, CALLS[2]])
    assert "[assistant](The hour matters.)clock{}" in text
    # a content beside the call, in a field that the template does not read
    source = source.replace("m.reasoning", "m.thinking")
    answer = {**CALLS[1], "reasoning_content": "The hour matters.", "content": "Wait."}
    text = rendered(source, [CALLS[0], answer, CALLS[2]])
    assert "[assistant]clock{}Wait.[tool]" in text


def test_an_end_token_after_an_earlier_answer_is_removed():
    """As training removes it."""
    chat = [CHAT[0], {"role": "assistant", "content": "Warm.</s>"}, CHAT[2]]
    assert "Warm.[user]" in rendered(INLINE, chat)


def test_a_template_without_reasoning_gets_it_within_the_answer():
    """There a model learns thoughts as a part of its answers, and `chat` and `serve` take them out
    of what it writes. A template that cuts them away still does."""
    text = rendered(QUIRKS["plain"], CHAT)
    assert "<|turn|>assistant\n<think>\nThe town matters.\n</think>\n\nWarm.<|end|>" in text
    assert "town" not in rendered(QUIRKS["reasoning is cut away"], CHAT)
    # a template with marks of its own, which leaves out the thoughts of earlier answers
    assert "town" not in rendered(QUIRKS["channels"], CHAT)


def test_messages_in_parts_are_left_as_they_are():
    # as a program may send it
    parts = [
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "thinking": "b"}
    ]
    tokenizer = Tokenizer(Path(ROOT) / "tests" / "stories")
    assert readable_history(tokenizer, parts) == parts


CALL = {"type": "function", "id": "a1", "function": {"name": "clock", "arguments": {}}}
CALLS = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "clock", "tool_call_id": "a1", "content": "noon"},
]
# as DeepSeek R1's: a call is written only where the content is null
BESIDE_NO_CONTENT = (
    "{%- for m in messages %}[{{ m.role }}]"
    "{%- if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{%- else %}{{ m.content }}{% endif %}{%- endfor %}"
)


def test_calls_are_written_where_the_template_wants_no_content():
    assert "[assistant]clock{}[tool]noon" in rendered(BESIDE_NO_CONTENT, CALLS)


def test_a_template_that_leaves_out_earlier_calls_is_refused():
    """Also one that lists the tools: their names are no calls."""
    source = "{%- for m in messages %}[{{ m.role }}]{{ m.content }}{%- endfor %}"
    with pytest.raises(ValueError, match="leaves out the tool calls of earlier answers"):
        rendered(source, CALLS)
    tokenizer = Tokenizer(Path(ROOT) / "tests" / "stories")
    tokenizer.use_template("{{ tools | tojson }}" + source)
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    with pytest.raises(ValueError, match="leaves out the tool calls of earlier answers"):
        readable_history(tokenizer, CALLS, [tool])
    # one that fails on null would be asked with an empty text, without the calls
    tokenizer.use_template(source.replace("m.content }}", "m.content + ' ' }}"))
    with pytest.raises(ValueError, match="leaves out the tool calls of earlier answers"):
        readable_history(tokenizer, CALLS)


def test_python_reads_messages_as_training_does():
    """Arguments as text and typed parts are OpenAI's forms; an unknown role is an error."""
    tokenizer = Tokenizer(Path(ROOT) / "tests" / "stories")
    tokenizer.use_template(
        "{%- for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
        "{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{%- endfor %}"
    )
    arguments = {"town": "Oslo"}
    texts = []
    for form in (arguments, json.dumps(arguments)):
        call = {**CALL, "function": {"name": "clock", "arguments": form}}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "When?"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            CALLS[2],
        ]
        texts.append(tokenizer.decode(prompt_ids(tokenizer, messages)))
    assert texts[0] == texts[1]
    assert "When?" in texts[0] and "type" not in texts[0]
    with pytest.raises(ValueError, match="message 0 has the role 'human'"):
        prompt_ids(tokenizer, [{"role": "human", "content": "Hi"}])


def test_the_template_of_conversations_with_tools_is_asked():
    """A tokenizer may have another one for them."""
    tokenizer = Tokenizer(Path(ROOT) / "tests" / "stories")
    tokenizer.use_template(INLINE)
    tokenizer.named_templates = {
        "tool_use": "{%- for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]"
        "{{ m.thinking or '' }}|{{ m.content }}{% endif %}{%- endfor %}{{ tools }}"
    }
    tool = {"type": "function", "function": {"name": "f"}}
    history = readable_history(tokenizer, CHAT, [tool])
    assert history[1]["thinking"] == "The town matters."
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(ValueError, match="leaves out the system prompt"):
        readable_history(tokenizer, [system, *CHAT], [tool])
    assert readable_history(tokenizer, [system, *CHAT])[0] == system
