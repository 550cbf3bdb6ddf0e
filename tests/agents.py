"""Small models that litft trains to call a function, in the formats of several families."""

import json
from pathlib import Path

import pytest
from parity import build

import litft
from litft.args import DataArgs, EvalArgs, FullFinetuneArgs, TrainArgs

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
ARGUMENTS = {"town": "Oslo", "days": 2}
QUESTION = {"role": "user", "content": "How warm is it?"}
ANSWER = "It is warm."
# The server gives each call a random id, and some templates write it. The model knows only this one.
CALL_ID = "a1b2c3d40"
# Gemma 4's syntax
GEMMA = """
{%- if tools %}{{ '<|turn>system\\n' + tools | tojson + '<turn|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + '{' }}
{%- for key, value in call.function.arguments.items() %}
{{- key + ':' + ('<|"|>' + value + '<|"|>' if value is string else value | tojson) + (',' if not loop.last else '') }}
{%- endfor %}{{- '}<tool_call|>' }}
{%- endfor %}{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}
"""
FORMATS = {
    "Qwen": ("Qwen-Qwen2.5-7B-Instruct.jinja", ["<|im_start|>", "<|im_end|>"]),
    "Llama": (
        "meta-llama-Llama-3.1-8B-Instruct.jinja",
        [
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ],
    ),
    "Mistral": (
        "mistralai-Mistral-Nemo-Instruct-2407.jinja",
        ["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    ),
    "gpt-oss": (
        "openai-gpt-oss-120b.jinja",
        [
            "<|start|>",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ],
    ),
    "Gemma 4": (None, ["<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>']),
}


def follow_up(message: dict) -> list[dict]:
    """Return the message of a call, and its result, with the id that the model knows."""
    (call,) = message["tool_calls"]
    known_call = call | {"id": CALL_ID}
    result = {
        "role": "tool",
        "name": "weather",
        "tool_call_id": CALL_ID,
        "content": "20 degrees",
    }
    return [message | {"tool_calls": [known_call]}, result]


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes, and an end token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


@pytest.fixture(scope="module")
def trained(shared, tmp_path_factory):
    """Return a function that trains a small model to call the function, and then to answer, in a
    format."""
    from transformers import LlamaConfig

    def train(name: str) -> Path:
        template, tokens = FORMATS[name]
        folder = tmp_path_factory.mktemp("agent")
        base = folder / "base"
        # a head size that vLLM has on a CPU
        sizes = dict(
            hidden_size=64,
            head_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
        )
        build(LlamaConfig, base, vocab_size=320, max_position_embeddings=4096, **sizes)
        write_byte_tokenizer(base)
        path = folder / "template.jinja"
        path.write_text(
            GEMMA
            if template is None
            else (shared / "chat_templates" / template).read_text("utf-8")
        )
        call = {
            "type": "function",
            "id": CALL_ID,
            "function": {"name": "weather", "arguments": ARGUMENTS},
        }
        messages = [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {
                "role": "tool",
                "name": "weather",
                "tool_call_id": CALL_ID,
                "content": "20 degrees",
            },
            {"role": "assistant", "content": ANSWER},
        ]
        data = folder / "data.jsonl"
        data.write_text(json.dumps({"messages": messages, "tools": [TOOL]}) + "\n")
        args = FullFinetuneArgs(
            checkpoint_dir=str(base),
            out_dir=str(folder / "run"),
            accelerator="cpu",
            data=DataArgs(
                path=[str(data)],
                template=str(path),
                new_tokens=tokens,
                max_seq_length=4096,
                val_fraction=0,
            ),
            train=TrainArgs(
                max_steps=120, global_batch_size=1, learning_rate=1e-2, warmup_steps=3
            ),
            eval=EvalArgs(max_new_tokens=0),
        )
        litft.finetune(args)
        return folder / "run" / "final"

    return train
