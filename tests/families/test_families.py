"""Every family against transformers: configs are read from disk, and every tensor has random
values.

There is one row per variation. `python scripts/parity_table.py` writes tutorials/families.md from
the same rows.
"""

import copy
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from conftest import config_folder
from parity import (
    LLAMA3,
    ROWS,
    TINY,
    cached_difference,
    draw,
    noisy_difference,
    packed_difference,
    padded_difference,
    plain_difference,
    relative,
    rounding_noise,
    tolerance,
)

import litft
from litft.args import ConvertArgs
from litft.checkpoints.conversion import mappings_to_hf
from litft.checkpoints.peft_module_names import PREFIX, missing_modules
from litft.checkpoints.peft_targets import peft_targets
from litft.commands.convert_hf_checkpoint import convert
from litft.families import family as module_of
from litft.families import peft_rules, read_config, unread_fields
from litft.model.config_fields import declared_fields
from litft.model.mlp import CONSTANTS
from litft.model.transformer import GPT
from litft.pretrained.folder import resolve


class Variation(NamedTuple):
    """A variation of a family."""

    reference: torch.nn.Module  # of transformers
    folder: Path  # where it was saved
    model: GPT  # loaded by litft from that folder
    number: int  # index among the variations of the family


CASES = [(family, name) for family, (_, variations) in ROWS.items() for name in variations]


@pytest.fixture(
    scope="module", params=CASES, ids=[f"{family}: {name}" for family, name in CASES]
)
def variation(request, make_model) -> "Variation":
    """A variation of a family, in transformers and in litft."""
    family, name = request.param
    config_class, variations = ROWS[family]
    reference, folder = make_model(getattr(transformers, config_class), **variations[name])
    model, tokenizer = litft.load(folder)
    assert tokenizer is None
    return Variation(reference, folder, model, list(variations).index(name))


# names in adapters that the class does not have: transformers fuses the convolutions of three, and
# Kimi Linear's other parameters of a mixer have other names there; none of them is a Linear
NOT_IN_THE_CLASS = {
    "olmo_hybrid": r"\.[qkv]_conv1d",
    "kimi_linear": r"\.[qkv]_conv1d|\.A_log|\.dt_bias",
}


def test_names_in_adapters_are_those_of_transformers_class(variation):
    """PEFT finds modules and parameters by these names, and ignores others without an error."""
    source = resolve(variation.folder)
    outline = source.meta_model()
    modules = dict(variation.reference.named_modules())
    parameters = dict(variation.reference.named_parameters())
    parameters |= dict(variation.reference.named_buffers())
    missing = []
    keys = []
    for target in peft_targets(outline, source.adapter_rules).values():
        keys.append(f"{PREFIX}{target.name}.lora_A.weight")
        if target.name not in modules and target.name not in parameters:
            missing.append(target.name)
    names = [name for name, _ in outline.named_parameters()]
    for mapping in mappings_to_hf(source.adapter_rules, names):
        for name in mapping.targets:
            if name not in parameters and name != "lm_head.weight":
                missing.append(name)
    allowed = NOT_IN_THE_CLASS.get(outline.config.model_type, "$^")
    # a router's correction is not trained
    allowed = re.compile(rf"{allowed}|correction|expert_bias|e_score")
    assert [name for name in missing if not allowed.search(name)] == []
    # a run looks them up in its base before it says that it is done
    patterns = [rule.hf_name for rule in peft_rules(source.config)]
    assert not missing_modules(
        keys, source.checkpoint.names, source.adapter_names, patterns
    )


REAL_CONFIGS = (
    "gemma-2-2b llama-3-8b llama-3.2-1b phi-2 pythia-6.9b qwen2-7b qwen3-0.6b qwen3-30b-a3b "
    "tinyllama-1.1b".split()
)


@pytest.mark.parametrize("name", REAL_CONFIGS)
def test_a_real_config_gives_the_parameters_of_transformers(name):
    """The number, names and shapes of the parameters are equal, on the meta device."""
    path = config_folder(name) / "config.json"
    config = read_config(json.loads(path.read_text("utf-8")))
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(path)
        )
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in reference.parameters()
    )
    reference_shapes = {
        name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()
    }
    params = dict(model.named_parameters())
    for mapping in mappings_to_hf(module_of(config.model_type).rules(config), params):
        if "embed_out" in mapping.targets[0] or ".experts." in mapping.targets[0]:
            continue  # transformers 5 has different names for these in memory and on disk
        for target, tensor in zip(
            mapping.targets,
            mapping.convert([params[name] for name in mapping.sources]),
            strict=True,
        ):
            assert reference_shapes[target] == tuple(tensor.shape)


@pytest.mark.parametrize(
    "measure",
    [
        plain_difference,
        padded_difference,
        cached_difference,
        packed_difference,
        noisy_difference,
    ],
)
def test_logits_equal_transformers(variation, measure):
    reference, model = variation.reference, variation.model
    difference = measure(reference, model)
    # some networks amplify a rounding beyond the bound, transformers' own as well
    assert difference <= tolerance(model.config) or difference <= 2 * rounding_noise(
        reference
    )


@torch.no_grad()
def test_packed_documents_are_isolated(variation):
    model = variation.model
    packed, documents = draw(1, 32, seed=3), torch.tensor([[0] * 12 + [1] * 20])
    logits = model(packed, documents=documents)
    packed[0, 3] = (packed[0, 3] + 1) % 96
    changed_logits = model(packed, documents=documents)
    if any(layer.experts for layer in model.config.layers):
        # experts now multiply a different number of rows, and rounding depends on it
        assert relative(changed_logits[:, 12:], logits[:, 12:]) <= 1e-6
    else:
        assert torch.equal(changed_logits[:, 12:], logits[:, 12:])
    assert not torch.equal(changed_logits[:, :12], logits[:, :12])


PUBLISHED = {
    "gemma, its first spelling": (
        "GemmaConfig",
        dict(head_dim=16),
        dict(hidden_act="gelu", hidden_activation=None),
    ),
    "mixtral without a base": (
        "MixtralConfig",
        dict(head_dim=8, num_local_experts=4),
        dict(rope_parameters=None),
    ),
    "ministral 8b, as mistral": (
        "MinistralConfig",
        dict(
            head_dim=8,
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
        dict(model_type="mistral", architectures=["MistralForCausalLM"]),
    ),
    "llama, whole heads": ("LlamaConfig", {}, dict(partial_rotary_factor=0.5)),
    "yarn without its context": (
        "LlamaConfig",
        {},
        dict(
            rope_parameters=None, rope_theta=1e4, rope_scaling=dict(type="yarn", factor=4.0)
        ),
    ),
    "rope_scaling, added as a card says": (
        "LlamaConfig",
        {},
        dict(
            rope_theta=5e3,
            rope_scaling=dict(
                rope_type="yarn", factor=4.0, original_max_position_embeddings=16
            ),
        ),
    ),
    "cohere2_moe, windows by rule": (
        "Cohere2MoeConfig",
        dict(
            head_dim=8,
            num_experts=5,
            num_hidden_layers=6,
            sliding_window=6,
            first_k_dense_replace=2,
        ),
        dict(layer_types=None, mlp_layer_types=None, first_k_dense_replace=2),
    ),
    "ernie4_5_moe, biases": (
        "Ernie4_5_MoeConfig",
        dict(moe_num_experts=5, moe_k=2, use_bias=True),
        {},
    ),
    "kimi_linear, attention alone": (
        "KimiLinearConfig",
        dict(
            num_local_experts=5,
            num_experts_per_tok=2,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            moe_intermediate_size=24,
            num_key_value_heads=4,
            layer_types=["full_attention"] * 3,
        ),
        {},
    ),
    "lfm2, the old name of its width": (
        "Lfm2Config",
        dict(
            layer_types=["conv", "full_attention", "conv"],
            intermediate_size=48,
            block_multiple_of=8,
        ),
        dict(intermediate_size=None, block_ff_dim=48),
    ),
    "gemma4, bidirectional images": (
        "Gemma4TextConfig",
        dict(
            head_dim=8,
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
        ),
        dict(use_bidirectional_attention="vision", vocab_size_per_layer_input=0),
    ),
}


QWEN_VL = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
@torch.no_grad()
def test_folders_of_qwen_vl_with_the_fields_side_by_side(tmp_path, name):
    """As published: without text_config, and with M-RoPE, whose positions are one for text."""
    mrope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    # transformers changes the dictionary that it gets
    values = QWEN_VL | {"rope_scaling": dict(mrope), "rope_theta": 1e6}
    tower = dict(depth=1, hidden_size=32, num_heads=2, embed_dim=16, intermediate_size=24)
    if name == "Qwen2_5_VL":
        tower = tower | {"out_hidden_size": 32}
    config = getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    wrapped = config(text_config=values, vision_config=tower, tie_word_embeddings=False)
    model = model_class(wrapped).eval()
    model.save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text("utf-8"))
    text = hf.pop("text_config")
    for field in ("model_type", "rope_parameters"):
        text.pop(field, None)
    flat = {**text, **hf, "rope_scaling": mrope, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    tokens = draw(2, 40, seed=1) % 90
    assert relative(litft.load(tmp_path, "fp32")[0](tokens), model(tokens).logits) <= 1e-5


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_defaults_and_spellings_of_published_files(make_model, tmp_path, name):
    """Variants of config.json that others have published are read as in transformers."""
    config_class, values, change = PUBLISHED[name]
    _, folder = make_model(getattr(transformers, config_class), **values)
    hf = json.loads((folder / "config.json").read_text("utf-8")) | change
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                k: v
                for k, v in hf.items()
                if v or k not in ("rope_parameters", "intermediate_size")
            }
        )
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="float32", attn_implementation="eager"
    )
    assert plain_difference(reference.eval(), litft.load(tmp_path)[0]) <= 1e-5


def test_a_rope_scaling_that_loses_the_base_is_refused(make_model):
    """transformers ignores all of rope_parameters where there is a rope_scaling."""
    _, folder = make_model(transformers.LlamaConfig)
    hf = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(
        json.dumps(hf | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    )
    with pytest.raises(
        ValueError,
        match=r"only the latter has rope_theta; .* \(rope_type, factor\) into rope_parameters",
    ):
        litft.load(folder)


def test_fields_that_no_family_reads_are_found():
    """They may mean another network, where a folder is read as another family."""
    read = dict(
        hidden_size=8,
        first_k_dense_replace=1,
        partial_rotary_factor=0.5,
        torch_dtype="bfloat16",
    )
    assert unread_fields(read | dict(hidden_sizes=8, attention_of_my_own=True)) == [
        "attention_of_my_own",
        "hidden_sizes",
    ]


def test_a_family_sees_only_declared_fields():
    """What a family reads has a type and a range: a field without a declaration has no effect."""
    read = dict(
        hidden_size=8, my_own_size=10**30, rope_scaling=dict(factor=2.0, my_factor="x")
    )
    assert declared_fields(read) == dict(hidden_size=8, rope_scaling=dict(factor=2.0))
    with pytest.raises(
        ValueError,
        match=r"^config.json: rope_scaling.factor must be a number above 0, or null, found 'x'$",
    ):
        declared_fields(dict(rope_scaling=dict(factor="x")))


# transformers' own default config of these lacks a field, or has values that do not fit together
INCOMPLETE_DEFAULTS = {
    "deepseek_v2": dict(num_experts_per_tok=2),
    "glm4_moe": dict(num_attention_heads=64),
    "dots1": dict(n_routed_experts=8, num_experts_per_tok=2),
}


@pytest.mark.parametrize("family", ROWS)
def test_missing_fields_have_the_defaults_of_transformers(family):
    """Without each field of the default config in turn, the Config is the same, or an error names
    the field."""
    hf = getattr(transformers, ROWS[family][0])(
        **INCOMPLETE_DEFAULTS.get(family, {})
    ).to_dict()
    expected = read_config(hf)
    for name in hf:
        partial = {key: value for key, value in hf.items() if key != name}
        try:
            assert read_config(partial) == expected, name
        except ValueError as error:
            assert "lacks the field" in str(error), name


REFUSED = [
    (
        "llama",
        "grouped",
        dict(is_causal=False),
        "is_causal false: each token would see those",
    ),
    (
        "qwen3_moe",
        "renormalized",
        dict(num_local_experts=None),
        "num_local_experts must be a whole number from 0 to 10,000",
    ),
    (
        "qwen3_moe",
        "renormalized",
        dict(num_local_experts=10**12),
        "num_local_experts must be a whole number from 0 to",
    ),
    (
        "qwen3_moe",
        "renormalized",
        dict(num_experts_per_tok=9),
        "num_experts_per_tok 9 is more than the 5 experts",
    ),
    (
        "llama",
        "grouped",
        dict(num_hidden_layers="8"),
        "num_hidden_layers must be a whole number from 1 to 1,000, found '8'",
    ),
    (
        "gpt2",
        "tied",
        dict(n_head=3),
        "hidden_size 32 is not divisible by num_attention_heads 3",
    ),
    (
        "qwen2",
        "late windows",
        dict(max_window_layers=None),
        "max_window_layers must be a whole number from 0 to 10,000, found None",
    ),
    (
        "qwen2",
        "late windows",
        dict(layer_types=[[], [], []]),
        "layer_types must be a list of texts, or null",
    ),
    (
        "gemma3_text",
        "two rope bases",
        dict(rope_parameters=dict(full_attention=[1])),
        "must be an object, or null, found",
    ),
    (
        "gpt_neox",
        "sequential",
        dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)),
        "dynamic with 2 rotated",
    ),
    (
        "qwen3_moe",
        "renormalized",
        dict(num_experts_per_tok=0),
        "num_experts_per_tok 0 selects no expert",
    ),
    (
        "llama",
        "grouped",
        dict(hidden_act="snake"),
        "activation 'snake' is not supported; known: silu",
    ),
    (
        "mamba2",
        next(iter(ROWS["mamba2"][1])),
        dict(hidden_act="gelu"),
        "hidden_act 'gelu' is not supported in a network with recurrent layers",
    ),
    (
        "nemotron_h",
        next(iter(ROWS["nemotron_h"][1])),
        dict(mamba_hidden_act="gelu"),
        "mamba_hidden_act 'gelu' is not supported in a network with recurrent layers",
    ),
    (
        "llama",
        "grouped",
        dict(rope_parameters=dict(LLAMA3, low_freq_factor=4.5, rope_theta=1e4)),
        "low_freq_factor 4.5 (must be below high_freq_factor, 4.0)",
    ),
    (
        "llama",
        "grouped",
        dict(rope_parameters=dict(rope_type="default", rope_theta=0.8)),
        "rope_theta 0.8 (must be above 1)",
    ),
    ("falcon", "untied", dict(alibi=True), "alibi true is not supported"),
    (
        "ernie4_5_moe",
        next(iter(ROWS["ernie4_5_moe"][1])),
        dict(moe_norm_min=0.5),
        "moe_norm_min 0.5 is not supported",
    ),
]


@pytest.mark.parametrize(
    "family, name, change, message", REFUSED, ids=[message for *_, message in REFUSED]
)
def test_invalid_values_are_reported(make_model, tmp_path, family, name, change, message):
    config_class, variations = ROWS[family]
    _, folder = make_model(getattr(transformers, config_class), **variations[name])
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text("utf-8")) | change)
    )
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        litft.load(tmp_path)


def to_older_config(hf: dict) -> dict:
    """Return a config.json with the older rotary fields, as in most files on the hub."""
    hf = dict(hf)
    rope = hf.pop("rope_parameters", None) or {}
    if "full_attention" in rope:
        hf["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    fraction = rope.pop("partial_rotary_factor", None)
    theta = rope.pop("rope_theta", None)
    neox = hf["model_type"] == "gpt_neox"
    hf |= {"rotary_emb_base" if neox else "rope_theta": theta} if theta else {}
    hf |= {"rotary_pct" if neox else "partial_rotary_factor": fraction} if fraction else {}
    # newer families never had the older name
    key = "rope_type" if "rope_local_base_freq" in hf else "type"
    hf["rope_scaling"] = (
        {key: rope.pop("rope_type"), **rope}
        if rope.get("rope_type", "default") != "default"
        else None
    )
    return hf


@pytest.mark.parametrize("family", ROWS)
def test_older_configs_are_read_as_newer_ones(family):
    """Older rotary fields are read like the newer ones, in every variation."""
    config_class, variations = ROWS[family]
    for name, values in variations.items():
        hf = getattr(transformers, config_class)(**{**TINY, **values}).to_dict()
        assert read_config(to_older_config(hf)) == read_config(hf), name


OLDER = [
    "llama: linear",
    "llama: dynamic",
    "llama: llama3",
    "llama: yarn mscale",
    "llama: longrope",
]
OLDER += [
    "gpt_neox: parallel, partial",
    "gemma3_text: scaled, six layers",
    "phi3: longrope, partial, tied",
    "phi: partial",
]


@pytest.mark.parametrize("case", OLDER)
@torch.no_grad()
def test_older_configs_equal_transformers(make_model, tmp_path, case):
    """One file per rotary type with the older fields, read by transformers and by litft."""
    family, name = case.split(": ")
    folder = make_model(getattr(transformers, ROWS[family][0]), **ROWS[family][1][name])[1]
    hf = json.loads((folder / "config.json").read_text("utf-8"))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(to_older_config(hf)))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="float32", attn_implementation="eager"
    )
    model, _ = litft.load(tmp_path)
    assert plain_difference(reference.eval(), model) <= 1e-5


@pytest.mark.parametrize(
    ("family", "name"), CASES, ids=[f"{family}: {name}" for family, name in CASES]
)
def test_linears_have_the_names_of_transformers_in_memory(family, name):
    """PEFT names the modules that it adapts by these, whatever the checkpoint calls them."""
    config = getattr(transformers, ROWS[family][0])(**{**TINY, **ROWS[family][1][name]})
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config)
        model = GPT(read_config(config.to_dict()))
    targets = peft_targets(
        model, [*peft_rules(model.config), *module_of(family).rules(model.config)]
    ).values()
    is_linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    expected = {
        name for name, module in reference.named_modules() if isinstance(module, is_linear)
    }
    heads, parameters = (
        {"lm_head", "output_projection", "embed_out"},
        {name for name, _ in reference.named_parameters()},
    )
    routers = {name for name in expected if re.search(r"\b(router|wg)\b", name)}
    linears = [target for target in targets if not (target.experts or target.embedding)]
    named = {target.name for target in linears if not target.linears[0].endswith(".router")}
    assert named - heads == expected - heads - routers
    assert {target.name for target in targets if target.experts} <= parameters


@torch.no_grad()
@pytest.mark.halved
def test_every_tensor_matters(variation):
    model = variation.model
    tokens = draw(1, 40, seed=1)
    expected = model(tokens)
    one_per_kind = {
        re.sub(r"\d+", "N", name): parameter for name, parameter in model.named_parameters()
    }
    if not model.rotaries:
        # without rotation it shifts all scores of a query equally
        one_per_kind.pop("blocks.N.attention.k_proj.bias", None)
    one_per_kind.pop("blocks.N.mlp.activation.eps", None)  # a guard against rounding
    for kind, parameter in one_per_kind.items():
        original = parameter.clone()
        parameter.zero_()
        assert relative(model(tokens), expected) >= 1e-3, kind
        parameter.copy_(original)


@torch.no_grad()
def test_packed_loss_is_the_sum_of_single_losses(variation):
    reference, model = variation.reference, variation.model
    first, second = draw(2, 20, seed=4)
    documents = torch.tensor([[0] * 11 + [1] * 19])
    tokens = torch.cat((first[:11], second[:19]))[None]
    targets = torch.cat((first[1:12], second[1:20]))[None]
    loss, count = model(tokens, targets=targets, documents=documents)
    singles = [
        reference(x[None], labels=x[None]).loss * (len(x) - 1) for x in (first[:12], second)
    ]
    assert count == 30
    assert float(loss) == pytest.approx(float(sum(singles)), rel=tolerance(model.config))


@pytest.mark.halved
def test_gradients_equal_transformers(variation, tmp_path):
    """The gradients of transformers are saved as weights, so that they are read under litft's
    names."""
    reference, model = (
        copy.deepcopy(variation.reference),
        copy.deepcopy(variation.model).requires_grad_(True),
    )
    tokens = draw(2, 24, seed=7)
    reference(tokens, labels=tokens).loss.backward()
    for parameter in reference.parameters():
        parameter.data = (
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        )
    reference.save_pretrained(tmp_path)
    expected = dict(litft.load(tmp_path)[0].named_parameters())
    loss, count = model(tokens[:, :-1], targets=tokens[:, 1:])
    (loss / count).backward()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias") and not model.rotaries:
            continue  # it shifts all scores of a query equally, so its gradient is rounding
        if parameter.grad is not None:
            scale = max(expected[name].abs().max(), 1e-3 * largest)
            assert (parameter.grad - expected[name]).abs().max() <= 10 * tolerance(
                model.config
            ) * scale, name
        else:
            assert name.endswith(CONSTANTS), name


@torch.no_grad()
@pytest.mark.halved
def test_a_converted_folder_is_bit_identical(variation, tmp_path):
    """Folder -> litft -> folder. transformers loads the result for the first variation of each
    family."""
    from safetensors.torch import load_file

    reference, folder, model, number = variation
    out = convert(ConvertArgs(checkpoint_dir=str(folder), out_dir=str(tmp_path / "out")))
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file(out / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert litft.load(out)[0].config == model.config
    if number:
        return
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype="float32", attn_implementation="eager"
    ).eval()
    tokens = draw(1, 20, seed=6)
    assert relative(reloaded(tokens).logits, reference(tokens).logits) <= 1e-6
