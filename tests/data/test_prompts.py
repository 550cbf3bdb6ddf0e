"""Chat templates against transformers' rendering, in the sandbox, and what the model itself says in them."""

from functools import partial

import pytest

from litft.data.chat_template import ALPACA, STYLES, assistant_turns, render, user_content

TALK = [
    {"role": "user", "content": "What is <b>2</b> & 3?"},
    {"role": "assistant", "content": "Five."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": 'Yes, "sure".'},
]
SYSTEM = {"role": "system", "content": "Be brief."}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = """
    HuggingFaceTB-SmolLM3-3B NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B Qwen-Qwen2.5-7B-Instruct
    deepseek-ai-DeepSeek-R1-Distill-Llama-8B google-gemma-2-2b-it ibm-granite-granite-3.3-2B-Instruct
    meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct microsoft-Phi-3.5-mini-instruct
    mistralai-Mistral-Nemo-Instruct-2407 openai-gpt-oss-120b
""".split()


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(shared, name):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama-2-7b")
    source = (shared / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    tokens = {"bos_token": reference.bos_token, "eos_token": reference.eos_token, "unk_token": "<unk>"}
    tools = [] if "tool_use" in name else None
    for messages in (TALK, TALK[:1], *([[SYSTEM, *TALK]] if "gemma" not in name else [])):
        for prompt in (False, True):
            settings = dict(chat_template=source, tokenize=False, add_generation_prompt=prompt, tools=tools)
            expected = reference.apply_chat_template(messages, **settings)
            assert render(source, messages, tools, prompt, **tokens) == expected


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The "weather" of a town & its <region>.',
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "weather", "arguments": {"town": "Köln"}}}
TOOL_TALK = [
    {"role": "user", "content": "How warm is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "a1b2c3d4e", "content": '{"celsius": 21}'},
    {"role": "assistant", "content": "21 °C."},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_conversations_render_as_transformers_do(shared, name):
    """Or are refused by the template itself, there as here."""
    from jinja2.exceptions import TemplateError
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama-2-7b")
    source = (shared / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    tokens = {"bos_token": reference.bos_token, "eos_token": reference.eos_token, "unk_token": "<unk>"}
    for messages in (TOOL_TALK[:1], TOOL_TALK[:3], TOOL_TALK):
        settings = dict(chat_template=source, tokenize=False, add_generation_prompt=True, tools=[TOOL])
        try:
            expected = reference.apply_chat_template(messages, **settings)
        except (TemplateError, TypeError):
            with pytest.raises(ValueError, match="cannot render this conversation"):
                render(source, messages, [TOOL], True, **tokens)
        else:
            assert render(source, messages, [TOOL], True, **tokens) == expected


def test_alpaca_is_stanfords_wording():
    text = render(ALPACA, [{"role": "user", "content": "Add."}], add_generation_prompt=True, **TOKENS)
    assert text == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Response:\n"
    )
    content = user_content("Add.", "1, 2", ALPACA)
    assert render(ALPACA, [{"role": "user", "content": content}, {"role": "assistant", "content": "3"}], **TOKENS) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n3</s>"
    )


SPECIAL = (
    "<|im_end|> <|eot_id|> <end_of_turn> <|end|> <|return|> <|call|> <|end_of_text|> <｜end▁of▁sentence｜> </s>".split()
)
# how a template ends a turn; gpt-oss also has channels, and R1's prompt opens a thought
ENDS = {
    "HuggingFaceTB": "<|im_end|>",
    "NousResearch": "<|im_end|>",
    "Qwen": "<|im_end|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "google": "<end_of_turn>",
    "ibm": "<|end_of_text|>",
    "meta": "<|eot_id|>",
    "microsoft": "<|end|>",
    "mistralai": "</s>",
    "openai": "<|return|>",
}
TAGGED = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
CALLED = {  # what is said to call a tool; the others leave calls out, or take no tools
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": TAGGED,
    "Qwen-QwQ-32B": TAGGED,
    "Qwen-Qwen2.5-7B-Instruct": TAGGED,
    "meta-llama-Llama-3.1-8B-Instruct": '{"name": "weather", "parameters": {"town": "Köln"}}',
    "meta-llama-Llama-3.2-3B-Instruct": '{"name": "weather", "parameters": {"town": "Köln"}}',
    "mistralai-Mistral-Nemo-Instruct-2407": '[TOOL_CALLS][{"name": "weather", '
    '"arguments": {"town": "Köln"}, "id": "a1b2c3d4e"}]',
    "openai-gpt-oss-120b": ' to=functions.weather<|channel|>commentary json<|message|>{"town": "Köln"}',
}


def rendering(shared, name):
    """The template as `assistant_turns` calls it."""
    source = STYLES.get(name) or (shared / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    return partial(render, source, **TOKENS)


def learned(texts) -> list[str]:
    return [turn.text[turn.start : turn.end] for _, turns in texts for turn in turns]


def of(name: str, text: str) -> str:
    """What a turn of plain words is in a template."""
    before = "<|channel|>final<|message|>" if "gpt-oss" in name else ""
    return before + text + next(end for start, end in ENDS.items() if name.startswith(start))


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_is_each_answer_and_its_end(shared, name):
    """design.md 4.3: with and without a system turn, over several turns, as the model would have said it at inference."""
    talks = [TALK, TALK[:2]] + ([[SYSTEM, *TALK]] if "gemma" not in name else [])
    for talk in talks:
        show = rendering(shared, name)
        texts = assistant_turns(show, talk, None, SPECIAL)
        assert learned(texts) == [of(name, m["content"]) for m in talk if m["role"] == "assistant"]
        for text, turns in texts:
            for turn in turns:
                assert text[: turn.start] == show(talk[: turn.message], add_generation_prompt=True)
        if len(texts) == 1 and not any(word in name for word in ("QwQ", "R1")):  # whose prompts open a thought
            assert texts[0][0] == show(talk)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_of_a_tool_conversation(shared, name):
    show = rendering(shared, name)
    if name not in CALLED:
        with pytest.raises(ValueError, match="leaves out a tool call"):
            assistant_turns(show, TOOL_TALK, [TOOL], SPECIAL)
        return
    called, answered = learned(assistant_turns(show, TOOL_TALK, [TOOL], SPECIAL))
    assert answered == of(name, "21 °C.")
    assert called == CALLED[name] + ("<|call|>" if "gpt-oss" in name else of(name, ""))


@pytest.mark.parametrize("name", STYLES)
def test_the_styles_render_in_one_text(shared, name):
    talk = [SYSTEM, *TALK]
    ((text, turns),) = assistant_turns(rendering(shared, name), talk, None, SPECIAL)
    assert [text[turn.start : turn.end].rstrip("<|>/setoumdnrif_").strip() for turn in turns] == ["Five.", 'Yes, "sure".']
    assert text.count("Be brief.") == 1 and text.count("What is <b>2</b> & 3?") == 1
    with pytest.raises(ValueError, match="leaves out a tool call"):
        assistant_turns(rendering(shared, name), TOOL_TALK, [TOOL], SPECIAL)


def test_calls_and_thoughts_that_a_template_shows_in_part_are_refused(shared):
    twice = [dict(TOOL_TALK[1], tool_calls=[CALL, CALL])]
    with pytest.raises(ValueError, match="leaves out a tool call"):
        assistant_turns(rendering(shared, "openai-gpt-oss-120b"), [TOOL_TALK[0], *twice], [TOOL], SPECIAL)
    thought = {"role": "assistant", "content": "Five.", "reasoning_content": "2+3"}
    with pytest.raises(ValueError, match="leaves out the assistant's reasoning_content"):
        assistant_turns(rendering(shared, "Qwen-Qwen2.5-7B-Instruct"), [TALK[0], thought], None, SPECIAL)


def test_the_generation_tag_is_rendered_as_what_stands_in_it():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    assert render(source, TALK[:2], **TOKENS) == "What is <b>2</b> & 3?;Five.;"


def test_thoughts_that_a_template_drops_later_are_learned_where_they_were_had(shared):
    talk = [dict(m, content=m["content"].replace("Five.", "<think>\n2+3\n</think>\n\nFive.")) for m in TALK]
    texts = assistant_turns(rendering(shared, "Qwen-QwQ-32B"), talk, None, SPECIAL)
    assert learned(texts) == ["2+3\n</think>\n\nFive.<|im_end|>", 'Yes, "sure".<|im_end|>']  # the prompt opens the thought
    assert texts[0][0].count("<think>") == texts[0][0].count("</think>") == 1
    assert "2+3" not in texts[1][0]
    session = learned(assistant_turns(rendering(shared, "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"), talk, None, SPECIAL))
    assert session[0] == "2+3\n</think>\n\nFive.<｜end▁of▁sentence｜>"  # its prompt has said <think>


def test_a_template_that_ends_no_turn_gives_each_its_own_text():
    """Or the model would never learn to stop but after the last."""
    show = partial(
        render,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        **TOKENS,
    )
    texts = assistant_turns(show, TALK, None, SPECIAL)
    assert learned(texts) == ["Five.", 'Yes, "sure".'] and len(texts) == 2


def test_a_template_that_leaves_the_words_out_is_refused():
    show = partial(render, "{% for m in messages %}{{ m.role }}{% endfor %}", **TOKENS)
    with pytest.raises(ValueError, match="leaves out the assistant's content"):
        assistant_turns(show, TALK, None, SPECIAL)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system turns here') }}",
        "{% if %}",
    ],
)
def test_a_hostile_or_broken_template_is_refused(source):
    with pytest.raises(ValueError, match="cannot render this conversation"):
        render(source, TALK, **TOKENS)
