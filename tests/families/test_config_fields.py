"""Fields of config.json that few files have: they mean what they mean in transformers."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import transformers
from parity import ROWS, plain_difference, tolerance

import litft
from litft.families import read_config, text_config
from litft.model.config_fields import FIELD_TYPES

FAMILIES = Path(litft.__file__).parent / "families"
# parts of a multimodal model's file, which are read before the fields are checked
NESTED = {"text_config", "llm_config"}


def fields_read(path):
    """Yield the names that a family's code reads from `hf`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name("hf"), attr="get" | "pop"),
                args=[ast.Constant(name), *_],
            ):
                yield name
            case ast.Subscript(value=ast.Name("hf"), slice=ast.Constant(name)):
                yield name
            case ast.Compare(left=ast.Constant(name), comparators=[ast.Name("hf")]):
                yield name


def test_what_a_family_reads_is_declared():
    """A field without a declaration never reaches a family."""
    read = {}
    for path in FAMILIES.glob("*.py"):
        read |= dict.fromkeys(fields_read(path), path.name)
    assert "rope_scaling" in read and "n_inner" in read
    undeclared = read.keys() - FIELD_TYPES.keys() - NESTED
    assert not undeclared, {name: read[name] for name in undeclared}


YARN = dict(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    attention_factor=1.3,
)
# as it was written before transformers 4.45
OLD_YARN = {"type": "yarn", "factor": 4.0}
BY_KIND = dict(
    sliding_attention=dict(rope_type="default", rope_theta=5e5),
    full_attention=dict(rope_type="default", rope_theta=5e5),
)
# a family, the fields that replace those of its file, and the fields that are left out
CASES = {
    "OLMo Hybrid, base beside the parameters": (
        "olmo_hybrid",
        dict(rope_theta=5e5, rope_parameters=dict(rope_type="default")),
    ),
    "OLMo Hybrid, older names": (
        "olmo_hybrid",
        dict(rope_parameters=None, rope_scaling=dict(rope_type="linear", factor=2.0)),
    ),
    "OLMo Hybrid, no RoPE": (
        "olmo_hybrid",
        dict(rope_parameters=dict(rope_type="default", rope_theta=None)),
    ),
    "OLMo Hybrid, null parameters": ("olmo_hybrid", dict(rope_parameters=None)),
    "OLMo 3, added YaRN": ("olmo3", dict(rope_parameters=BY_KIND, rope_scaling=YARN)),
    "GPT-NeoX, two bases": (
        "gpt_neox",
        dict(rope_parameters=None, rope_theta=9, rotary_emb_base=400, rotary_pct=1.0),
    ),
    "Nemotron-H, another name of the smallest step": (
        "nemotron_h",
        dict(mamba_dt_min=0.9, time_step_min=...),
    ),
    "Qwen3.5, unnormalized": ("qwen3_5_moe_text", dict(norm_topk_prob=False)),
    "StarCoder, scaled by layer": (
        "gpt_bigcode",
        dict(scale_attn_by_inverse_layer_idx=True),
    ),
    "CWM, another base": ("cwm", dict(rope_theta=500.0, rope_parameters=...)),
    "Gemma 3, softcap": ("gemma3_text", dict(attn_logit_softcapping=0.1)),
    "gpt-oss, plain RoPE": ("gpt_oss", dict(rope_parameters={})),
    "Ministral 3, scaled queries without YaRN": (
        "ministral3",
        dict(
            rope_parameters=dict(
                llama_4_scaling_beta=0.3,
                original_max_position_embeddings=32,
                rope_theta=1e4,
            )
        ),
    ),
    "LFM3, a kind without its base": (
        "lfm3",
        dict(rope_parameters={**BY_KIND, "sliding_attention": dict(rope_type="default")}),
    ),
    "Llama, a context below one turn": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="yarn",
                factor=4.0,
                rope_theta=3.0,
                original_max_position_embeddings=4,
                truncate=False,
            )
        ),
    ),
    "Falcon, two activations": ("falcon", dict(hidden_act="relu", activation="gelu")),
}


@pytest.mark.parametrize("case", CASES)
def test_rare_fields_mean_what_they_mean_in_transformers(make_model, tmp_path, case):
    """The logits are equal; `...` leaves a field out."""
    family, changed = CASES[case]
    class_name, variations = ROWS[family]
    _, folder = make_model(
        getattr(transformers, class_name), **next(iter(variations.values()))
    )
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    for name, value in changed.items():
        fields.pop(name, None)
        if value is not ...:
            fields[name] = value
    (tmp_path / "config.json").write_text(json.dumps(fields), "utf-8")
    shutil.copy(folder / "model.safetensors", tmp_path)

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    model, _ = litft.load(tmp_path)
    assert plain_difference(reference, model) <= tolerance(model.config)


def test_a_multimodal_qwen3_normalizes_its_routers():
    """The class has no such field; files from the text model's class have it."""
    text = dict(model_type="qwen3_vl_moe_text", norm_topk_prob=False, vocab_size=64)
    text |= dict(num_experts=4, num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    text |= dict(num_key_value_heads=1, num_experts_per_tok=2, moe_intermediate_size=16)
    text["intermediate_size"] = 32
    whole = dict(model_type="qwen3_vl_moe", text_config=text)
    config = read_config(text_config(whole))
    assert config.layers[0].experts.renormalize


def test_published_names_of_bloom():
    fields = dict(model_type="bloom", n_embed=64, n_layer=2, num_attention_heads=4)
    config = read_config(fields | dict(vocab_size=100))
    assert (config.dim, len(config.layers)) == (64, 2)


@pytest.mark.parametrize(
    "fields,message",
    [
        (
            dict(model_type="olmo3", rope_parameters=YARN, vocab_size=64),
            "name no kind of layer; put them under full_attention",
        ),
        (
            dict(model_type="olmo3", rope_scaling=OLD_YARN, vocab_size=64),
            "rope_scaling has type 'yarn', which transformers does not read for olmo3",
        ),
        (
            dict(model_type="gemma3_text", rope_scaling=OLD_YARN, vocab_size=64),
            "rope_scaling has type 'yarn', which transformers does not read for gemma3_text",
        ),
        (
            dict(model_type="codegen", head_dim=128, n_embd=64, n_head=4, vocab_size=64),
            "head_dim 128 is CodeGen2's",
        ),
        (
            dict(model_type="cohere2_moe", rope_scaling=YARN, vocab_size=64),
            "transformers ignores rope_scaling of cohere2_moe",
        ),
        (
            dict(model_type="deepseek_v3", head_dim=3, qk_rope_head_dim=4, vocab_size=64),
            "head_dim 3 contradicts qk_rope_head_dim 4",
        ),
        (
            dict(
                model_type="smollm3",
                num_attention_heads=4,
                num_hidden_layers=1,
                hidden_size=32,
                intermediate_size=56,
                vocab_size=64,
                sliding_window=8,
                layer_types=["sliding_attention"],
            ),
            "use_sliding_window is not true",
        ),
    ],
)
def test_what_would_be_another_network_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        read_config(fields)
