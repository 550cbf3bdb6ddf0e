"""Chat templates of our own, one for each way in which published ones differ in what they render of
an answer."""

# each renders the user's turns, tool results and system prompts in the same way
_OTHERS = (
    "{%- if m.role in ('user', 'system', 'tool') %}{{ '<|turn|>' + m.role + '\\n' + m.content + "
    "'<|end|>\\n' }}{% endif %}"
)
_CALLS = (
    "{%- for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' + c.function.arguments "
    "| tojson + '</call>' }}{%- endfor %}"
)
_TOOLS = (
    "{%- if tools %}{{ '<|turn|>tools\\n' + tools | tojson + '<|end|>\\n' }}{% endif %}"
)


def _template(answer: str, prompt: str = "<|turn|>assistant\\n", before: str = "") -> str:
    """Return a template from what it renders for an answer `m`, and as the generation prompt."""
    return (
        f"{before}{_TOOLS}{{%- for m in messages %}}{_OTHERS}"
        f"{{%- if m.role == 'assistant' %}}{answer}{{% endif %}}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )


_HEAD = "{{ '<|turn|>assistant\\n' }}"
_BODY = "{{ m.content }}" + _CALLS
_END = "{{ '<|end|>\\n' }}"
_THOUGHT = "{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
_SPLIT = "{%- set parts = m.content.split('</think>') %}"

QUIRKS = {
    "plain": _template(_HEAD + _BODY + _END),
    # as Qwen 3: the last answer has a thought, which is empty without reasoning; earlier answers
    # have none
    "an empty thought": _template(
        _HEAD + "{%- if loop.last %}{{ '<think>\\n' + (m.reasoning_content or '') + "
        "'\\n</think>\\n\\n' }}{% endif %}" + _BODY + _END
    )
    + "{%- if add_generation_prompt and enable_thinking is false %}{{ "
    "'<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    # as GLM-4.6: an empty thought that no prompt has
    "an empty thought without a switch": _template(
        _HEAD
        + "{{ '<think>' + (m.reasoning_content or '') + '</think>\n' }}"
        + _BODY
        + _END
    ),
    # as GLM-4.7: the prompt opens a thought, and an answer without reasoning closes one that is not
    # open
    "a closed thought": _template(
        _HEAD
        + "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else "
        "'</think>' }}" + _BODY + _END,
        "<|turn|>assistant\\n<think>",
    ),
    # as MiniMax M2: the prompt opens a thought, an answer without reasoning has none
    "a thought in the prompt": _template(
        _HEAD + _THOUGHT + "{% endif %}" + _BODY + _END, "<|turn|>assistant\\n<think>\\n"
    ),
    # as DeepSeek R1: the prompt opens a thought, and no reasoning is rendered
    "reasoning is cut away": _template(
        _HEAD + _SPLIT + "{{ parts[-1] }}" + _CALLS + _END, "<|turn|>assistant\\n<think>\\n"
    ),
    # as DeepSeek V3.1: the same, but the prompt opens a thought only where thinking is switched on
    "reasoning is cut away, thinking is off": _template(
        _HEAD + "{{ '</think>' }}" + _SPLIT + "{{ parts[-1] }}" + _CALLS + _END,
        "<|turn|>assistant\\n' + ('<think>' if thinking else '</think>') + '",
    ),
    # as QwQ: the prompt opens a thought, and only the last answer keeps its own
    "thoughts of earlier answers are dropped": _template(
        _HEAD
        + "{%- if loop.last %}{{ m.content }}"
        + "{%- else %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}"
        + _CALLS
        + _END,
        "<|turn|>assistant\\n<think>\\n",
    ),
    # as Nemotron Nano 2: the last answer repeats the opening of the prompt and does not close it
    "a thought that is never closed": _template(
        _HEAD
        + "{%- if loop.last and not m.tool_calls %}{{ '<think>\\n' }}{% endif %}"
        + _BODY
        + _END,
        "<|turn|>assistant\\n<think>\\n",
    ),
    # as GLM-4: no token ends an answer but that of the next turn
    "the next turn ends it": _template(_HEAD + _BODY)
    .replace("<|end|>\\n", "")
    .replace("'<|turn|>' + m.role", "'<|' + m.role + '|>'"),
    # as Phi 3.5: EOS after the last answer
    "EOS at the end": _template(_HEAD + _BODY + _END)
    + "{%- if not add_generation_prompt %}{{ eos_token }}{% endif %}",
    # as Gemma 4: calls come first, and end the turn with another token
    "calls before the content": _template(
        _HEAD
        + _CALLS
        + "{{ m.content }}"
        + "{{ '<|result|>' if m.tool_calls else '<|end|>\\n' }}"
    ),
    # as gpt-oss: channels; reasoning before a call, not beside content there; an answer's end
    # depends on its place
    "channels": _template(
        "{%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}{% "
        "endif %}{%- set thought = m.thinking or (m.content if m.tool_calls) %}{%- if thought and "
        "(m.tool_calls or loop.last) %}{{ '<|turn|>assistant<|channel|>analysis\\n' + thought + "
        "'<|end|>' }}{% endif %}{%- if m.tool_calls %}{%- for c in m.tool_calls %}{{ "
        "'<|turn|>assistant to=' + c.function.name + '<|channel|>call\\n' + c.function.arguments | "
        "tojson + '<|call|>' }}{%- endfor %}{% else %}{{ '<|turn|>assistant<|channel|>final\\n' + "
        "m.content + ('<|return|>' if loop.last else '<|end|>') }}{% endif %}",
        "<|turn|>assistant",
    ),
    # as Mistral's reasoning models: content in parts
    "parts": _template(
        _HEAD
        + "{%- if m.content is string %}{{ m.content }}{% else %}{%- for p in m.content %}"
        + "{{ '[THINK]' + p.thinking + '[/THINK]' if p.type == 'thinking' else p.text }}{%- "
        "endfor %}{% endif %}" + _CALLS + _END
    ),
    # as DeepSeek R1: arguments are text
    "arguments as text": _template(
        _HEAD
        + _BODY.replace(" + c.function.arguments | tojson", " + c.function.arguments")
        + _END
    ),
    # as Llama 3.1: a call without its text
    "content or calls": _template(
        _HEAD
        + "{%- if m.tool_calls %}"
        + _CALLS
        + "{% else %}{{ m.content }}{% endif %}"
        + _END
    ),
    # as Mistral Nemo: the system prompt is rendered with the last message, if that is the user's
    "the system prompt comes last": (
        "{%- set ns = namespace(system='') %}{%- for m in messages %}{%- if m.role == 'system' "
        "%}{%- set ns.system = m.content + '\\n' %}{%- elif m.role == 'user' %}{{ '[INST]' + "
        "(ns.system if loop.last else '') + m.content + '[/INST]' }}{%- elif m.role == 'tool' %}{{ "
        "'[RESULT]' + m.content + '[/RESULT]' }}{%- else %}"
        + _BODY
        + "{{ eos_token }}{% endif %}{%- endfor %}"
    ),
    # as Mistral 7B v0.3: the same, and a space before the answer that its prompt lacks
    "the system prompt comes last, a space": (
        "{%- set ns = namespace(system='') %}{{ bos_token }}{%- for m in messages %}{%- if m.role "
        "== 'system' %}{%- set ns.system = m.content + '\n"
        "' %}{%- elif m.role == 'user' %}{{ '[INST] ' + (ns.system if loop.last else '') + "
        "m.content + '[/INST]' }}{%- elif m.role == 'tool' %}{{ '[RESULT]' + m.content + "
        "'[/RESULT]' }}{%- else %}{{ ' ' }}"
        + _BODY
        + "{{ eos_token }}{% endif %}{%- endfor %}"
    ),
    # as Command-R+: instructions after the last message, whatever it is; a call has no end token
    "instructions come last": _template(
        _HEAD + _BODY + "{%- if not m.tool_calls %}" + _END + "{% endif %}"
    ).replace(
        "{%- if add_generation_prompt %}",
        "{{ '<|turn|>system\nWrite a list of actions.<|end|>\n' }}{%- if add_generation_prompt %}",
    ),
    # thoughts and calls are no part of it
    "content alone": _template(_HEAD + "{{ m.content }}" + _END),
    # no end token at all
    "no end token": "{%- for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}
