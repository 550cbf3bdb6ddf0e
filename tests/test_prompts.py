"""Chat templates against transformers' rendering, in the sandbox, and what the model itself says in them."""

from functools import partial

import pytest

from litft.prompts import ALPACA, assistant_spans, render, user_content

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


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "alpaca"])
def test_spans_are_the_answers_with_their_ends(shared, name):
    source = ALPACA if name == "alpaca" else (shared / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    text, spans = assistant_spans(partial(render, source, **TOKENS), TALK)
    ends = {"Qwen": "<|im_end|>", "meta": "<|eot_id|>", "alpa": "</s>"}
    said = [text[start:end] for start, end in spans]
    assert said == [TALK[i]["content"] + ends[name[:4]] for i in (1, 3)]


def test_a_template_that_rewrites_history_is_refused(shared):
    source = (shared / "chat_templates" / "Qwen-QwQ-32B.jinja").read_text("utf-8")
    talk = [dict(m, content=m["content"].replace("Five.", "<think>2+3</think>Five.")) for m in TALK]
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        assistant_spans(partial(render, source, **TOKENS), talk)


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
