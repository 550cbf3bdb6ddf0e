"""Chat templates: rendering as in transformers, the sandbox, and the supervised parts of the
text."""

from functools import partial

import pytest
from conftest import NEEDS_SHARED, SHARED
from quirks import QUIRKS

from litft.data.chat_template import ALPACA, STYLES, render, user_content
from litft.data.turn_ends import EndTokens
from litft.data.turns import assistant_turns

CHAT = [
    {"role": "user", "content": "What is <b>2</b> & 3?"},
    {"role": "assistant", "content": "Five."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": 'Yes, "sure".'},
]
SYSTEM = {"role": "system", "content": "Be brief."}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = """
    HuggingFaceTB-SmolLM3-3B NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B
    Qwen-Qwen2.5-7B-Instruct deepseek-ai-DeepSeek-R1-Distill-Llama-8B google-gemma-2-2b-it
    ibm-granite-granite-3.3-2B-Instruct meta-llama-Llama-3.1-8B-Instruct
    meta-llama-Llama-3.2-3B-Instruct microsoft-Phi-3.5-mini-instruct
    mistralai-Mistral-Nemo-Instruct-2407 openai-gpt-oss-120b
""".split()


OWN = {**QUIRKS, **STYLES}


def source_of(name: str) -> str:
    """Return a template of our own, or of ../shared, without which the test is skipped."""
    if name in OWN:
        return OWN[name]
    if not SHARED.is_dir():
        pytest.skip(NEEDS_SHARED)
    return (SHARED / "chat_templates" / f"{name}.jinja").read_text("utf-8")


@pytest.mark.parametrize("name", [*OWN, *TEMPLATES])
def test_rendered_text_equals_transformers(tokenizer_folder, name):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer_folder("fallback"))
    source = source_of(name)
    tokens = {
        "bos_token": reference.bos_token,
        "eos_token": reference.eos_token,
        "unk_token": "<unk>",
    }
    tools = [] if "tool_use" in name else None
    for messages in (CHAT, CHAT[:1], *([[SYSTEM, *CHAT]] if "gemma" not in name else [])):
        for prompt in (False, True):
            settings = dict(
                chat_template=source,
                tokenize=False,
                add_generation_prompt=prompt,
                tools=tools,
            )
            expected = reference.apply_chat_template(messages, **settings)
            assert render(source, messages, tools, prompt, **tokens) == expected


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The "weather" of a town & its <region>.',
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
        },
    },
}
CALL = {
    "type": "function",
    "id": "a1b2c3d4e",
    "function": {"name": "weather", "arguments": {"town": "Köln"}},
}
TOOL_CHAT = [
    {"role": "user", "content": "How warm is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {
        "role": "tool",
        "name": "weather",
        "tool_call_id": "a1b2c3d4e",
        "content": '{"celsius": 21}',
    },
    {"role": "assistant", "content": "21 °C."},
]


@pytest.mark.parametrize("name", [*OWN, *TEMPLATES])
def test_tool_conversations_render_as_transformers_do(tokenizer_folder, name):
    """If the template itself raises in transformers, it also does in litft."""
    from jinja2.exceptions import TemplateError
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer_folder("fallback"))
    source = source_of(name)
    tokens = {
        "bos_token": reference.bos_token,
        "eos_token": reference.eos_token,
        "unk_token": "<unk>",
    }
    for messages in (TOOL_CHAT[:1], TOOL_CHAT[:3], TOOL_CHAT):
        settings = dict(
            chat_template=source, tokenize=False, add_generation_prompt=True, tools=[TOOL]
        )
        try:
            expected = reference.apply_chat_template(messages, **settings)
        except (TemplateError, TypeError):
            with pytest.raises(ValueError, match="cannot render this conversation"):
                render(source, messages, [TOOL], True, **tokens)
        else:
            assert render(source, messages, [TOOL], True, **tokens) == expected


def test_alpaca_is_stanfords_wording():
    text = render(
        ALPACA, [{"role": "user", "content": "Add."}], add_generation_prompt=True, **TOKENS
    )
    assert text == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n"
        "\n"
        "### Instruction:\n"
        "Add.\n"
        "\n"
        "### Response:\n"
    )
    content = user_content("Add.", "1, 2", ALPACA)
    assert render(
        ALPACA,
        [{"role": "user", "content": content}, {"role": "assistant", "content": "3"}],
        **TOKENS,
    ) == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n"
        "\n"
        "### Instruction:\n"
        "Add.\n"
        "\n"
        "### Input:\n"
        "1, 2\n"
        "\n"
        "### Response:\n"
        "3</s>"
    )


ENDS = EndTokens(
    tuple(
        "<|im_end|> <|eot_id|> <end_of_turn> <|end|> <|return|> <|call|> <|end_of_text|> "
        "<｜end▁of▁sentence｜> </s>".split()
    )
)
# the end token of a turn per template; gpt-oss also has channels, and the prompt of R1 contains
# <think>
END_TOKENS = {
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
TAGGED_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
)
# the text of a tool call; the other templates omit calls or do not support tools
RENDERED_CALLS = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": TAGGED_CALL,
    "Qwen-QwQ-32B": TAGGED_CALL,
    "Qwen-Qwen2.5-7B-Instruct": TAGGED_CALL,
    "meta-llama-Llama-3.1-8B-Instruct": '{"name": "weather", "parameters": {"town": "Köln"}}',
    "meta-llama-Llama-3.2-3B-Instruct": '{"name": "weather", "parameters": {"town": "Köln"}}',
    "mistralai-Mistral-Nemo-Instruct-2407": '[TOOL_CALLS][{"name": "weather", '
    '"arguments": {"town": "Köln"}, "id": "a1b2c3d4e"}]',
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"town": "Köln"}\n```<｜tool▁call▁end｜>',
    "openai-gpt-oss-120b": ' to=functions.weather<|channel|>commentary json<|message|>{"town": "Köln"}',
}


def renderer(name):
    """Return the render function of a template for `assistant_turns`."""
    return partial(render, source_of(name), **TOKENS)


def supervised(texts) -> list[str]:
    return [
        turn.text[turn.start : turn.end] for rendered in texts for turn in rendered.turns
    ]


def as_turn(name: str, text: str) -> str:
    """Return a plain answer as rendered by a template, with its end token."""
    prefix = "<|channel|>final<|message|>" if "gpt-oss" in name else ""
    return (
        prefix
        + text
        + next(
            end_token for family, end_token in END_TOKENS.items() if name.startswith(family)
        )
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_answer_and_its_end_token_are_supervised(name):
    """design.md 4.3: with and without a system prompt, over several turns, with the prompts of
    inference."""
    chats = [CHAT, CHAT[:2]] + ([[SYSTEM, *CHAT]] if "gemma" not in name else [])
    for chat in chats:
        render_chat = renderer(name)
        texts = assistant_turns(render_chat, chat, None, ENDS)
        assert supervised(texts) == [
            as_turn(name, m["content"]) for m in chat if m["role"] == "assistant"
        ]
        for rendered in texts:
            for turn in rendered.turns:
                prompt = render_chat(chat[: turn.message], add_generation_prompt=True)
                # a thought that R1's opens is none of an answer without one
                if prompt.endswith("<think>\n"):
                    prompt = prompt.removesuffix("<think>\n")
                assert rendered.text[: turn.start] == prompt
        # QwQ's prompt has an empty thought that the rendered conversation lacks
        if len(texts) == 1 and "QwQ" not in name:
            assert texts[0].text == render_chat(chat)


@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_texts_of_a_tool_conversation(name):
    render_chat = renderer(name)
    if name not in RENDERED_CALLS:
        with pytest.raises(ValueError, match="leaves out a tool call"):
            assistant_turns(render_chat, TOOL_CHAT, [TOOL], ENDS)
        return
    call, answer = supervised(assistant_turns(render_chat, TOOL_CHAT, [TOOL], ENDS))
    assert answer == as_turn(name, "21 °C.")
    # R1 writes no end token
    end = {
        "openai-gpt-oss-120b": "<|call|>",
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "",
    }
    assert call == RENDERED_CALLS[name] + end.get(name, as_turn(name, ""))


@pytest.mark.parametrize("name", STYLES)
def test_the_styles_render_in_one_text(name):
    chat = [SYSTEM, *CHAT]
    (rendered,) = assistant_turns(renderer(name), chat, None, ENDS)
    text, turns = rendered.text, rendered.turns
    assert [
        text[turn.start : turn.end].rstrip("<|>/setoumdnrif_").strip() for turn in turns
    ] == [
        "Five.",
        'Yes, "sure".',
    ]
    assert text.count("Be brief.") == 1 and text.count("What is <b>2</b> & 3?") == 1
    with pytest.raises(ValueError, match="leaves out a tool call"):
        assistant_turns(renderer(name), TOOL_CHAT, [TOOL], ENDS)


@pytest.mark.parametrize("name", ["content alone", "openai-gpt-oss-120b"])
def test_a_template_that_drops_tool_calls_is_refused(name):
    two_calls = [dict(TOOL_CHAT[1], tool_calls=[CALL, CALL])]
    with pytest.raises(ValueError, match="leaves out a tool call"):
        assistant_turns(renderer(name), [TOOL_CHAT[0], *two_calls], [TOOL], ENDS)


@pytest.mark.parametrize("name", ["content alone", "Qwen-Qwen2.5-7B-Instruct"])
def test_a_template_that_drops_reasoning_is_refused(name):
    answer = {"role": "assistant", "content": "Five.", "reasoning_content": "2+3"}
    with pytest.raises(ValueError, match="leaves out the assistant's reasoning_content"):
        assistant_turns(renderer(name), [CHAT[0], answer], None, ENDS)


def test_the_generation_tag_is_rendered_as_its_content():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    assert render(source, CHAT[:2], **TOKENS) == "What is <b>2</b> & 3?;Five.;"


THOUGHTFUL_CHAT = [
    dict(m, content=m["content"].replace("Five.", "<think>\n2+3\n</think>\n\nFive."))
    for m in CHAT
]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("thoughts of earlier answers are dropped", "<|end|>"),
        ("Qwen-QwQ-32B", "<|im_end|>"),
    ],
)
def test_reasoning_that_a_template_drops_later_is_supervised_in_its_own_turn(name, end):
    texts = assistant_turns(renderer(name), THOUGHTFUL_CHAT, None, ENDS)
    # the prompt contains <think>
    assert supervised(texts) == [f"2+3\n</think>\n\nFive.{end}", f'Yes, "sure".{end}']
    assert texts[0].text.count("<think>") == texts[0].text.count("</think>") == 1
    assert "2+3" not in texts[1].text


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("reasoning is cut away", "<|end|>"),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "<｜end▁of▁sentence｜>"),
    ],
)
def test_reasoning_that_a_template_never_renders_is_supervised(name, end):
    """Its prompt opens the thought."""
    texts = supervised(assistant_turns(renderer(name), THOUGHTFUL_CHAT, None, ENDS))
    assert texts[0] == f"2+3\n</think>\n\nFive.{end}"


def test_a_template_without_end_tokens_gives_each_turn_its_own_text():
    """Otherwise the model would learn to stop only after the last turn."""
    render_chat = partial(
        render,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        **TOKENS,
    )
    texts = assistant_turns(render_chat, CHAT, None, ENDS)
    assert supervised(texts) == ["Five.", 'Yes, "sure".'] and len(texts) == 2


def test_a_template_that_omits_the_content_is_refused():
    render_chat = partial(
        render, "{% for m in messages %}{{ m.role }}{% endfor %}", **TOKENS
    )
    with pytest.raises(ValueError, match="leaves out the assistant's content"):
        assistant_turns(render_chat, CHAT, None, ENDS)


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
        render(source, CHAT, **TOKENS)
