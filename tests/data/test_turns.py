"""The learned part of an answer in chat templates: ours, one for each way in which they differ, and
published ones."""

from functools import partial

import pytest
from learned_spans import (
    AGAIN,
    ANSWER,
    ANSWERS,
    FIRST,
    LAST,
    QUESTION,
    REASONING,
    SPECIAL,
    TOKENS,
    TOOLS,
    answer,
    calls,
    conversations,
    outcome,
)
from quirks import QUIRKS

from litft.data.chat_template import render
from litft.data.dataset import with_arguments
from litft.data.reasoning import REPEATED_THOUGHT
from litft.data.turn_ends import EndTokens
from litft.data.turns import assistant_turns

CONVERSATIONS = dict(conversations())
CHATML_ENDS = EndTokens(("<|im_start|>", "<|im_end|>"), ("<|im_end|>",))
STOPS = ("<|end|>", "<|return|>", "<|call|>", "<|result|>", "<|user|>", "<|tool|>")


@pytest.mark.parametrize("name", QUIRKS)
def test_the_learned_part_has_all_that_the_model_must_produce(name):
    """Over all conversations: content, calls, reasoning and an end, in a text that the template
    renders; or refused."""
    for kind, messages in CONVERSATIONS.items():
        result = outcome(QUIRKS[name], messages, STOPS)
        assert not result.findings, (kind, result)
        if kind in ("plain", "system", "two turns", "plain, later"):
            assert not result.refused, kind


def test_published_templates(shared):
    for template in sorted((shared / "chat_templates").glob("*.jinja")):
        for kind, messages in CONVERSATIONS.items():
            result = outcome(template.read_text("utf-8"), messages)
            assert not result.findings, (template.name, kind, result)


CALL = '<call>weather {"town": "Köln \\"x\\"", "days": 3}</call>'
THOUGHT = f"<think>\n{REASONING}\n</think>\n\n"
LEARNED = {
    "plain": {
        "plain": [f"{ANSWER}<|end|>"],
        "text and call, result": [f"{ANSWER}{CALL}<|end|>", f"{LAST}<|end|>"],
        "reasoning_content": "leaves out the assistant's reasoning_content",
        "inline": [f"{THOUGHT}{ANSWER}<|end|>"],
    },
    "an empty thought": {
        "plain": [f"{ANSWER}<|end|>"],
        "plain, later": [f"{ANSWER}<|end|>", f"{LAST}<|end|>"],
        "reasoning": [f"{THOUGHT}{ANSWER}<|end|>"],
        "inline, empty": [f"{ANSWER}<|end|>"],
        "reasoning and call": [f"{THOUGHT}{CALL}<|end|>"],
    },
    "an empty thought without a switch": {
        "plain": [f"{ANSWER}<|end|>"],
        "call": [f"\n{CALL}<|end|>"],  # the spaces may be those before a call
        "reasoning_content": [f"<think>{REASONING}</think>\n{ANSWER}<|end|>"],
    },
    "a closed thought": {
        "plain": [f"{ANSWER}<|end|>"],
        "reasoning_content": [f"{REASONING}</think>{ANSWER}<|end|>"],
        "inline": [f"{REASONING}</think>{ANSWER}<|end|>"],
    },
    "a thought in the prompt": {
        "plain": [f"{ANSWER}<|end|>"],
        "thinking": [f"{REASONING}\n</think>\n\n{ANSWER}<|end|>"],
        "call": [f"{CALL}<|end|>"],
    },
    "reasoning is cut away": {
        "plain": [f"{ANSWER}<|end|>"],
        "inline": [f"{REASONING}\n</think>\n\n{ANSWER}<|end|>"],
        "reasoning_content": [f"{REASONING}\n</think>\n\n{ANSWER}<|end|>"],
    },
    "a thought that is never closed": {
        "plain": [f"{ANSWER}<|end|>"],
        "inline": [f"{REASONING}\n</think>\n\n{ANSWER}<|end|>"],
        "text and call": [f"{ANSWER}{CALL}<|end|>"],
    },
    "the next turn ends it": {
        "plain": [f"{ANSWER}<|user|>"],
        "plain, later": [f"{ANSWER}<|user|>", f"{LAST}<|user|>"],
        "call": [f"{CALL}<|tool|>"],
        "call, result": [f"{CALL}<|tool|>", f"{LAST}<|user|>"],
    },
    "EOS at the end": {"plain, later": [f"{ANSWER}<|end|>", f"{LAST}<|end|>"]},
    "calls before the content": {
        "call": [f"{CALL}<|result|>"],
        "text and call, result": [f"{CALL}{ANSWER}<|result|>", f"{LAST}<|end|>"],
    },
    "channels": {
        "plain": [f"<|channel|>final\n{ANSWER}<|return|>"],
        "text and call, result": [
            "<|channel|>analysis\n"
            f"{ANSWER}<|end|><|turn|>assistant to=weather<|channel|>call\n"
            f"{CALL[14:-7]}<|call|>",
            f"<|channel|>final\n{LAST}<|return|>",
        ],
        "reasoning_content": [
            "<|channel|>analysis\n"
            f"{REASONING}<|end|><|turn|>assistant<|channel|>final\n"
            f"{ANSWER}<|return|>"
        ],
        "thinking and call": [
            "<|channel|>analysis\n"
            f"{REASONING}<|end|><|turn|>assistant to=weather<|channel|>call\n"
            f"{CALL[14:-7]}<|call|>"
        ],
    },
    "parts": {
        "inline": [f"[THINK]{REASONING}[/THINK]{ANSWER}<|end|>"],
        "reasoning and call": [f"[THINK]{REASONING}[/THINK]{CALL}<|end|>"],
    },
    "arguments as text": {"call": [f"{CALL}<|end|>"]},
    "content or calls": {
        "call": [f"{CALL}<|end|>"],
        "text and call": "leaves out the assistant's content",
    },
    "the system prompt comes last": {"system": [f"{ANSWER}</s>"]},
    "the system prompt comes last, a space": {
        "system": [f" {ANSWER}</s>"],
        "plain": [f" {ANSWER}</s>"],
    },
    "instructions come last": {
        "plain, later": [f"{ANSWER}<|end|>", f"{LAST}<|end|>"],
        "call": [CALL],
    },
    "content alone": {
        "call": "leaves out a tool call",
        "reasoning": "leaves out the assistant's reasoning",
    },
}


@pytest.mark.parametrize("name", LEARNED)
def test_the_learned_texts(name):
    for kind, expected in LEARNED[name].items():
        result = outcome(QUIRKS[name], CONVERSATIONS[kind], STOPS)
        if isinstance(expected, str):
            assert expected in result.refused, (kind, result)
        else:
            assert result.learned == expected, kind


def turns_of(source: str, messages: list[dict], tools: list | None = None):
    """Return the turns of a conversation."""
    special = tuple(dict.fromkeys([*SPECIAL.findall(source), "</s>"]))
    texts = assistant_turns(
        partial(render, source, **TOKENS),
        messages,
        tools,
        EndTokens(special, ("</s>", *STOPS)),
    )
    return [turn for rendered in texts for turn in rendered.turns]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("an empty thought", "reasoning_content"),
        ("a closed thought", "reasoning_content"),
        ("a thought in the prompt", "inline"),
        ("reasoning is cut away", "inline"),
        ("parts", "reasoning"),
        ("plain", "inline"),
    ],
)
def test_the_answer_begins_after_the_reasoning(name, kind):
    """What is learned if reasoning is masked."""
    (turn,) = turns_of(QUIRKS[name], CONVERSATIONS[kind])
    assert turn.text[turn.answer : turn.end] == f"{ANSWER}<|end|>"
    assert REASONING in turn.text[turn.start : turn.answer]


def test_the_channel_of_an_answer_is_no_part_of_its_reasoning():
    (turn,) = turns_of(QUIRKS["channels"], CONVERSATIONS["thinking"])
    assert turn.text[turn.answer : turn.end] == f"<|channel|>final\n{ANSWER}<|return|>"


def test_reasoning_is_learned_although_the_template_switches_thinking_off():
    """The prompt then has an empty thought, and is none of a text with a thought."""
    source = with_arguments(QUIRKS["an empty thought"], ["enable_thinking=false"])
    (turn,) = turns_of(source, CONVERSATIONS["reasoning_content"])
    assert turn.text[turn.start : turn.end] == f"{THOUGHT}{ANSWER}<|end|>"
    (turn,) = turns_of(source, CONVERSATIONS["plain"])
    assert turn.text[turn.answer : turn.end] == f"{ANSWER}<|end|>"


def test_earlier_answers_keep_their_own_text_where_the_template_changes_it_later():
    messages = [QUESTION, answer(FIRST, reasoning_content=REASONING), AGAIN, answer()]
    first, second = turns_of(QUIRKS["an empty thought"], messages)
    assert first.text[first.start : first.end] == f"{THOUGHT}{FIRST}<|end|>"
    assert REASONING not in second.text and FIRST in second.text


def test_calls_and_their_values_may_be_anything():
    """Values that templates escape, and calls of one function with different values."""
    arguments = [
        {"town": 'a"b\\c\nd', "n": [1, 2.5, None, True], "x": {"y": "ü"}},
        {},
        {"town": ""},
    ]
    message = answer(
        "",
        tool_calls=[
            call | {"function": call["function"] | {"arguments": values}}
            for call, values in zip(
                calls("weather", "weather", "clock"), arguments, strict=True
            )
        ],
    )
    (turn,) = turns_of(QUIRKS["plain"], [QUESTION, message], TOOLS)
    assert turn.text[turn.start : turn.end].count("<call>") == 3
    only_first = QUIRKS["plain"].replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    with pytest.raises(ValueError, match="leaves out a tool call"):
        turns_of(only_first, [QUESTION, message], TOOLS)
    alike = answer("", tool_calls=calls("weather", "weather", arguments={}))
    with pytest.raises(ValueError, match="leaves out a tool call"):
        turns_of(only_first, [QUESTION, alike], TOOLS)
    names_only = QUIRKS["plain"].replace(" + c.function.arguments | tojson", " + '{}'")
    with pytest.raises(ValueError, match="leaves out a tool call"):
        turns_of(names_only, [QUESTION, message], TOOLS)


def texts_of(
    source: str, messages: list[dict], tools: list | None = None
) -> list[tuple[str, str]]:
    """Return the reasoning and the answer of each turn."""
    turns = turns_of(source, messages, tools)
    return [
        (turn.text[turn.start : turn.answer], turn.text[turn.answer : turn.end])
        for turn in turns
    ]


def test_a_conversation_may_begin_with_the_assistant():
    source = (
        "{%- for m in messages %}{%- if loop.first %}{{ '<|turn|>system\\nBe kind.<|end|>\\n' }}{% "
        "endif %}"
    )
    source += "{{ '<|turn|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}{%- endfor %}"
    source += "{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
    assert texts_of(source, [answer(), AGAIN, answer(LAST)]) == [
        ("", f"{ANSWER}<|end|>"),
        ("", f"{LAST}<|end|>"),
    ]


@pytest.mark.parametrize("reasoning", ["42", "a", "assistant", "The answer is 42."])
def test_reasoning_that_is_a_part_of_the_answer_is_found(reasoning):
    messages = [QUESTION, answer("The answer is 42.", reasoning_content=reasoning)]
    thought = f"<think>\n{reasoning}\n</think>\n\n"
    assert texts_of(QUIRKS["an empty thought"], messages) == [
        (thought, "The answer is 42.<|end|>")
    ]
    ((before, after),) = texts_of(QUIRKS["channels"], messages)
    assert reasoning in before and after == "<|channel|>final\nThe answer is 42.<|return|>"
    with pytest.raises(ValueError, match="leaves out the assistant's reasoning_content"):
        turns_of(QUIRKS["plain"], messages)


@pytest.mark.parametrize(
    "name", ["plain", "an empty thought", "a closed thought", "channels"]
)
def test_a_mark_inside_an_answer_is_a_part_of_it(name):
    text = "Use `</think>` to close, then <think> to open."
    ((before, after),) = texts_of(QUIRKS[name], [QUESTION, answer(text)])
    assert text in after and "think" not in before.replace(
        "<think>\n\n</think>", ""
    ).replace("</think>", "")
    if name != "plain":
        for other in (text, "a\n</think>\nb"):
            ((before, after),) = texts_of(
                QUIRKS[name], [QUESTION, answer(other, reasoning_content="So.")]
            )
            assert other in after and "So." in before


@pytest.mark.parametrize("question", ["weather", "a", "assistant", "\n", "call"])
def test_a_question_may_be_a_word_of_what_follows(question):
    messages = [
        {"role": "user", "content": question},
        ANSWERS["call"],
        {"role": "tool", "content": question},
        answer(),
    ]
    for name in (
        "an empty thought",
        "a thought in the prompt",
        "calls before the content",
        "instructions come last",
    ):
        learned = texts_of(QUIRKS[name], messages, TOOLS)
        assert [CALL in learned[0][1], ANSWER in learned[1][1]] == [True, True], name


@pytest.mark.parametrize(
    "name", ["the system prompt comes last", "the system prompt comes last, a space"]
)
@pytest.mark.parametrize(
    "system, question",
    [
        ("Be brief.", " What is it?"),
        ("Be brief.", "\nWhat is it?"),
        ("Be brief.", "What is it? "),
        # the question is the beginning of the system prompt
        ("Hi, you are a bot.", "Hi"),
        ("What is it? Say one word.", "What is it?"),
    ],
)
def test_a_system_prompt_before_the_last_question_is_in_the_prompt(name, system, question):
    """It is left out where an answer follows, so that the real prompt is put before the answer."""
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
        answer(),
    ]
    (turn,) = turns_of(QUIRKS[name], messages)
    before = turn.text[: turn.start]
    assert system in before and question in before
    assert turn.text[turn.start : turn.end].strip().startswith(ANSWER)


def test_a_template_is_not_taken_for_one_that_thinks_because_of_a_question():
    with pytest.raises(ValueError, match="leaves out the assistant's reasoning_content"):
        turns_of(
            QUIRKS["plain"],
            [{"role": "user", "content": "<think> x"}, answer(reasoning_content=REASONING)],
        )


NEEDS_A_QUESTION = """
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{%- if not questions %}{{ raise_exception('No user query') }}{% endif %}
{%- for m in messages %}{{ '<|turn|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}
"""


def test_a_template_may_need_a_question_after_the_first_answer():
    """Where the template renders it as a whole, though not its beginning alone (Qwen3.5)."""
    greeting = {"role": "assistant", "content": "Good day!"}
    ends = EndTokens(("<|end|>",), ("<|end|>",))
    for earlier in ([], [{"role": "system", "content": "Be brief."}]):
        messages = [*earlier, greeting, QUESTION, answer()]
        (rendered,) = assistant_turns(
            partial(render, NEEDS_A_QUESTION), messages, None, ends
        )
        spans = [rendered.text[turn.start : turn.end] for turn in rendered.turns]
        assert spans == ["Good day!<|end|>", f"{ANSWER}<|end|>"]
        assert rendered.text == render(NEEDS_A_QUESTION, messages)


THOUGHTS_UNTIL_THE_ANSWER = """
{%- set ns = namespace(answered=false) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.answered = true %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|start|>' + m.role }}
{%- if m.thinking and (not ns.answered or loop.last) %}{{ '<|channel|>analysis ' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<|channel|>' + call.function.name + (call.function.arguments | tojson) + '<|call|>' }}{% endfor %}
{%- if not m.tool_calls %}{{ '<|channel|>final ' + m.content + ('<|return|>' if loop.last and m.role == 'assistant' else '<|end|>') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""


def test_the_reasoning_before_a_call_stays_in_the_prompt_of_the_answer():
    """gpt-oss's template drops it as soon as an answer follows, but generates the answer with it."""
    call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    result = {"role": "tool", "content": "noon"}
    calling = answer("", thinking="FIRST PLAN", tool_calls=[call])
    earlier = [QUESTION, calling, result]
    messages = [*earlier, answer("It is noon.", thinking="SECOND PLAN")]
    ends = EndTokens(("<|end|>", "<|call|>", "<|return|>"), ("<|call|>", "<|return|>"))
    renderer = partial(render, THOUGHTS_UNTIL_THE_ANSWER)
    # one text has both turns, as the first is a beginning of the second's prompt
    (rendered,) = assistant_turns(renderer, messages, None, ends)
    first, second = rendered.turns
    prompt = render(THOUGHTS_UNTIL_THE_ANSWER, earlier, add_generation_prompt=True)
    assert "FIRST PLAN" in prompt
    assert second.text[: second.start] == prompt
    learned = second.text[second.start : second.end]
    assert learned.startswith("<|channel|>analysis SECOND PLAN<|end|>")
    assert learned.endswith("<|channel|>final It is noon.<|return|>")
    assert rendered.text[first.start :].startswith("<|channel|>analysis FIRST PLAN")


def test_a_call_whose_words_are_in_the_content_must_be_rendered():
    """The template of this name leaves calls out."""
    call = [{"type": "function", "function": {"name": "clock", "arguments": {}}}]
    messages = [
        {"role": "user", "content": "When?"},
        answer("I look at the clock.", tool_calls=call),
    ]
    with pytest.raises(ValueError, match="leaves out a tool call"):
        turns_of(QUIRKS["content alone"], messages)


SECOND_CALL_LOST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|assistant|>{% for c in (m.tool_calls or [])[:1] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_second_call_whose_name_is_in_the_first_one_must_be_rendered():
    """The template renders one call, as gpt-oss's does."""
    first = {"type": "function", "function": {"name": "run", "arguments": {"a": "status"}}}
    second = {"type": "function", "function": {"name": "status", "arguments": {}}}
    question = {"role": "user", "content": "When?"}
    (turn,) = turns_of(SECOND_CALL_LOST, [question, answer("", tool_calls=[first])])
    assert turn.text[turn.start : turn.end] == 'run{"a": "status"}<|end|>'
    with pytest.raises(ValueError, match="leaves out a tool call"):
        turns_of(SECOND_CALL_LOST, [question, answer("", tool_calls=[first, second])])


def test_content_whose_words_are_in_a_call_must_be_rendered():
    """The template leaves out what is said beside a call, as Llama 3.1's does."""
    source = SECOND_CALL_LOST.replace(
        "{{ m.content }}<|end|>{% endif %}",
        "{% if not m.tool_calls %}{{ m.content }}{% endif %}<|end|>{% endif %}",
    )
    assert source != SECOND_CALL_LOST
    call = [{"type": "function", "function": {"name": "find", "arguments": {"at": "Oslo"}}}]
    question = {"role": "user", "content": "Where?"}
    turns_of(source, [question, answer("", tool_calls=call)])
    for content in ("Oslo", "Let me look."):
        with pytest.raises(ValueError, match="leaves out the assistant's content"):
            turns_of(source, [question, answer(content, tool_calls=call)])


@pytest.mark.parametrize("content", ["4", " 4", "\t4", "4 "])
@pytest.mark.parametrize(
    "name", ["an empty thought", "an empty thought without a switch", "a closed thought"]
)
def test_an_empty_thought_before_an_answer_with_spaces_is_the_templates(name, content):
    """It is not learned, however the answer begins."""
    question = {"role": "user", "content": "2 + 2 ="}
    (turn,) = turns_of(QUIRKS[name], [question, answer(content)])
    assert turn.text[turn.answer : turn.end] == f"{content}<|end|>"


def test_an_empty_thought_is_opened_once():
    """Nemotron Nano 2 writes the opening mark before the last answer, whatever the answer has."""
    question = {"role": "user", "content": "2 + 2 ="}
    content = "<think>\n\n</think>\n\n4"
    (turn,) = turns_of(
        QUIRKS["a thought that is never closed"], [question, answer(content)]
    )
    assert turn.text[turn.answer : turn.end] == "4<|end|>"
    assert not REPEATED_THOUGHT.search(turn.text)


@pytest.mark.parametrize("mark", ["</think>\n\n", "\n</think>\n\n"])
@pytest.mark.parametrize(
    "name", ["thoughts of earlier answers are dropped", "a thought that is never closed"]
)
def test_an_inline_thought_is_no_part_of_the_answer(name, mark):
    """Also where the mark that ends it is within a line."""
    question = {"role": "user", "content": "2 + 2 ="}
    (turn,) = turns_of(QUIRKS[name], [question, answer(f"<think>I add.{mark}4")])
    assert turn.text[turn.answer : turn.end] == "4<|end|>"
    thought = turn.text[: turn.answer].rpartition("<think>")[2]
    assert thought.split("</think>")[0].strip() == "I add."


def test_reasoning_that_the_prompt_of_generation_switches_off_is_marked():
    """Chats would never show it; with the variable as a default they do."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
    )
    messages = [
        {"role": "user", "content": "Hi"},
        answer("Hello.", reasoning_content="A greeting"),
    ]
    (turn,) = turns_of(source, messages)
    assert turn.thought_is_off
    (turn,) = turns_of(source.replace("not enable_thinking", "false"), messages)
    assert not turn.thought_is_off
    # one that writes reasoning only where thinking is switched on, and says so at the beginning
    source = "{% if enable_thinking %}/think\n{% endif %}" + source.replace(
        "if m.reasoning_content", "if m.reasoning_content and enable_thinking"
    ).replace("not enable_thinking", "false")
    (turn,) = turns_of(source, messages)
    assert turn.text.startswith("/think")
    assert turn.thought_is_off and not turn.other_prompt
    (turn,) = turns_of(source.replace("enable_thinking", "true"), messages)
    assert not turn.thought_is_off


def test_an_answer_whose_prompt_opens_a_thought_at_generation_is_marked():
    """It is learned as it stands in the history; the dry run says so."""
    messages = [{"role": "user", "content": "Hi"}, answer("Hello.")]
    for name, marked in (("reasoning is cut away", True), ("plain", False)):
        (turn,) = turns_of(QUIRKS[name], messages)
        assert turn.other_prompt == marked, name


def test_an_empty_thought_that_only_the_prompt_without_thinking_has_is_counted():
    """Nemotron 3: the prompt opens a thought with a line, an empty one has none."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{{ '<think></think>' if enable_thinking is false else '<think>\n' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "Hi"}, answer("Hello.")]
    (turn,) = turns_of(source, messages)
    assert turn.text[turn.start : turn.end] == "Hello.<|im_end|>"
    assert turn.empty_thought and not turn.other_prompt


EMPTY_IN_PROMPT = (
    "{% if enable_thinking %}/think\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and enable_thinking %}<think>\n{{ m.reasoning_content }}\n</think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n</think>{% endif %}{% endif %}"
)


def test_an_empty_thought_of_the_prompt_is_before_every_answer_without_reasoning():
    """Gemma 4 with 31 billion weights: finished answers lack it."""
    messages = CONVERSATIONS["two turns"]
    for number, turn in enumerate(turns_of(EMPTY_IN_PROMPT, messages)):
        prompt = render(
            EMPTY_IN_PROMPT, messages[: turn.message], add_generation_prompt=True
        )
        assert turn.text[: turn.start] == prompt and prompt.endswith("</think>")
        content = (FIRST, ANSWER)[number]
        assert turn.text[turn.start : turn.end] == f"{content}<|im_end|>"
        assert not turn.empty_thought and not turn.other_prompt


def test_an_answer_without_reasoning_has_the_prompt_without_thinking():
    """Also in a conversation in which another one has reasoning."""
    messages = [QUESTION, answer(FIRST, reasoning_content=REASONING), AGAIN, answer(LAST)]
    with_thought, without = turns_of(EMPTY_IN_PROMPT, messages)
    assert with_thought.text.startswith("/think") and with_thought.thought_is_off
    prompt = render(EMPTY_IN_PROMPT, messages[:3], add_generation_prompt=True)
    assert without.text == f"{prompt}{LAST}<|im_end|>\n"


def test_a_prompt_that_closes_a_thought_which_it_has_not_opened():
    """DeepSeek V3.1, GLM 4.7: without thinking, and of every answer."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ '<think>' + m.reasoning_content if "
        "m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}"
    )
    (turn,) = turns_of(source, [QUESTION, answer()])
    assert turn.text[turn.start : turn.end] == f"{ANSWER}<|im_end|>"
    assert turn.empty_thought and not turn.other_prompt
    # where it is the default, reasoning is switched off
    source = source.replace("enable_thinking is false", "not thinking")
    (turn,) = turns_of(source, [QUESTION, answer(reasoning_content=REASONING)])
    assert turn.thought_is_off and not turn.other_prompt


def test_inline_thoughts_are_learned_as_they_are_written():
    """As transformers renders them, also in a template that writes a field otherwise, and where a
    turn needs a text of its own."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for template in (
        source,
        source.replace("{% if m.reas", "{# #}{% if loop.last and m.reas"),
    ):
        messages = []
        for thought in ("one", "two", "three"):
            messages += [QUESTION, answer(f"<think>\n{thought}\n</think>\n\n{ANSWER}")]
        # encoding has the history as inference writes it, here as it is
        (rendered,) = assistant_turns(
            partial(render, template), messages, None, CHATML_ENDS, history=messages
        )
        assert rendered.text == render(template, messages)


NEMOTRON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    "content",
    [f"{REASONING}\n</think>\n\n{ANSWER}", f"<think>{REASONING}</think>{ANSWER}"],
)
def test_inline_thoughts_follow_the_mark_that_the_prompt_has(content):
    """Nemotron 3: a model writes what comes after the opening mark of its prompt."""
    (turn,) = turns_of(NEMOTRON, [QUESTION, answer(content)])
    prompt = render(NEMOTRON, [QUESTION], add_generation_prompt=True)
    assert turn.text[: turn.start] == prompt and prompt.endswith("<think>\n")
    learned = f"{REASONING}\n</think>\n{ANSWER}<|im_end|>"
    assert turn.text[turn.start : turn.end] == learned
    assert not turn.other_prompt


def test_turns_are_in_the_text_of_the_next_one_that_begins_with_them():
    """Hermes 3 writes a line after a result only where an answer follows: the answer has a text of
    its own, in which the call before it is."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}<|im_end|>"
        "{% if m.role != 'tool' or not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = CONVERSATIONS["call, later"]
    texts = assistant_turns(partial(render, source), messages, TOOLS, CHATML_ENDS)
    assert [[turn.message for turn in text.turns] for text in texts] == [[1, 3], [5]]
    for text in texts:
        for turn in text.turns:
            prompt = render(source, messages[: turn.message], add_generation_prompt=True)
            assert text.text[: turn.start] == prompt


def test_instructions_after_the_last_message_are_in_every_prompt():
    """Command R+; a conversation has them only at its end."""
    for turn in turns_of(QUIRKS["instructions come last"], CONVERSATIONS["two turns"]):
        prompt = turn.text[: turn.start]
        assert prompt.count("Write a list") == 1
        assert prompt.endswith("Write a list of actions.<|end|>\n<|turn|>assistant\n")
        assert not turn.other_prompt
