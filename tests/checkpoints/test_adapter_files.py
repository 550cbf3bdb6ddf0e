"""Adapters of fused Linears and experts, exchanged with PEFT in both directions, and published
adapters."""

import json

import pytest
import torch
import transformers
from parity import ROWS, draw, load_hf, perturb, relative
from safetensors.torch import save_file

import litft
from litft.args import LoRAArgs, MergeArgs
from litft.checkpoints.adapter_reader import read_adapter_config
from litft.commands.merge_lora import merge
from litft.methods import LoRA
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.pretrained.save import check_written

FUSED = [
    ("gpt_neox", "parallel, partial"),
    ("gpt_neox", "no bias, tied, full"),
    ("falcon", "7B: one key head"),
    ("falcon", "40B: groups, two norms"),
    ("falcon", "sequential, biases, all heads"),
    ("phi3", "fused"),
    ("gpt2", "tied"),
    ("gpt_bigcode", "one key head"),
    ("gpt_bigcode", "all heads, untied"),
    ("glm4", "norms on both sides"),
]
EXPERTS = [
    ("mixtral", "4 experts"),
    ("qwen2_moe", "some dense, renormalized"),
    ("qwen3_moe", "renormalized"),
    ("olmoe", "experts"),
    ("granitemoe", "experts"),
    ("gpt_oss", "sinks, experts"),
    ("deepseek_v3", "groups, correction"),  # with dense layers and a shared expert
    ("glm4_moe", next(iter(ROWS["glm4_moe"][1]))),
    # stored as (E, in, out), which PEFT does not know
    (
        "llama4_text",
        "chunks, NoPE, experts",
    ),
    ("gemma3n_text", "four streams, shared keys"),  # modules that are named by numbers
]


CASES = [pytest.param(case, id=": ".join(case)) for case in FUSED + EXPERTS]
# for tests that need not run on every layout: all projections fused, two pairs fused, experts
THREE_LAYOUTS = [
    case
    for case in CASES
    if case.values[0][0] in ("gpt_neox", "phi3", "qwen3_moe")
    and "tied" not in case.values[0][1]
]


@pytest.fixture(scope="module", params=CASES)
def folder(request, make_model):
    """A model folder whose checkpoint fuses Linears or stacks experts."""
    family, name = request.param
    config_class, variations = ROWS[family]
    return make_model(getattr(transformers, config_class), **variations[name])[1]


def write_random_adapter(folder, out, **values):
    """Return (model, method, source) for a model with random factors that is saved as an
    adapter."""
    torch.manual_seed(5)
    source = resolve(folder)
    model, method = base_model(source), LoRA(LoRAArgs(**{"r": 3, "alpha": 5, **values}))
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    perturb(method.parameters(model).values())
    out.mkdir(exist_ok=True)
    method.write(
        out, source, method.values(model), {"base_model_name_or_path": str(folder)}
    )
    return model, method, source


@torch.no_grad()
def test_experts_that_peft_finds_by_the_names_of_linears(make_model, tmp_path):
    """transformers 5 stacks experts, so PEFT writes gate_up_proj for gate_proj and up_proj."""
    from peft import LoraConfig, get_peft_model

    _, folder = make_model(
        transformers.Qwen3MoeConfig, **ROWS["qwen3_moe"][1]["renormalized"]
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=names)).eval()
    perturb({name: p for name, p in model.named_parameters() if "lora_" in name}.values())
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert set(config["target_parameters"]) == {"gate_up_proj", "down_proj"}
    tokens = draw(2, 20, seed=3)
    ours = litft.load(tmp_path, base_dir=folder)[0](tokens)
    assert relative(ours, model(tokens).logits) <= 1e-5


@pytest.mark.parametrize("folder", CASES, indirect=True)
@torch.no_grad()
@pytest.mark.halved
def test_what_is_written_opens(folder, tmp_path):
    """Also DoRA of stacked experts: a run opens its result once before it says that it is done."""
    model, _, source = write_random_adapter(folder, tmp_path, dora=True)
    check_written(tmp_path, source)
    assert relative(litft.load(tmp_path, base_dir=folder)[0](TOKENS), model(TOKENS)) <= 1e-5


# what is trained beside, or instead of, the factors of experts and routers
WHOLE_PARTS = {
    "biases of adapted experts": ("gpt_oss", "sinks, experts", dict(bias="lora")),
    "all biases": ("gpt_oss", "sinks, experts", dict(bias="all")),
    "one of two stacks": (
        "mixtral",
        "4 experts",
        dict(targets=["q_proj"], modules_to_save=["down_proj"]),
    ),
    "a router with a correction": (
        "deepseek_v3",
        "groups, correction",
        dict(targets=["q_proj", "q_a_proj"], modules_to_save=["router"]),
    ),
}
# routers whose correction has another place in the files, and modules with others in them
ROUTERS = (
    "ernie4_5_moe exaone_moe minimax_m2 sarvam_moe kimi_linear gemma4_text afmoe nemotron_h"
)
BLOCKS = "gpt_oss granite_swa lfm2_moe gemma3n_text falcon_h1"
for families, modules in ((ROUTERS, "*.router"), (BLOCKS, "blocks.1.*")):
    for family in families.split():
        # the last variation of Gemma 4 and others has experts
        variation = list(ROWS[family][1])[-1]
        WHOLE_PARTS[f"{modules} of {family}"] = (
            family,
            variation,
            dict(targets=["q_proj", "down_proj"], modules_to_save=[modules]),
        )


@pytest.mark.parametrize("case", WHOLE_PARTS)
@torch.no_grad()
def test_trained_parts_of_mixtures_open_in_peft(make_model, tmp_path, case):
    """PEFT names biases after all wrappers of a module, and opens only whole modules."""
    from peft import PeftModel

    family, variation, values = WHOLE_PARTS[case]
    config_class, variations = ROWS[family]
    _, folder = make_model(getattr(transformers, config_class), **variations[variation])
    present = resolve(folder).meta_model().named_modules()
    names = {name.rpartition(".")[2] for name, _ in present}
    if "targets" in values:
        targets = [name for name in values["targets"] if name in names]
        values = values | {"targets": targets}
    model, method, _ = write_random_adapter(folder, tmp_path, **values)
    expected = model(TOKENS)
    base = load_hf(folder)
    assert relative(base(TOKENS).logits, expected) > 1e-3
    opened = PeftModel.from_pretrained(base, tmp_path).eval()
    # delta rules are computed in another order
    tolerance = 2e-5 if family == "kimi_linear" else 1e-5
    assert relative(opened(TOKENS).logits, expected) <= tolerance

    # and as it was trained, here
    read, _ = LoRA.read(tmp_path, resolve(tmp_path, folder))
    assert sorted(read.trained_in_full) == sorted(method.trained_in_full)
    assert relative(litft.load(tmp_path, base_dir=folder)[0](TOKENS), expected) <= 1e-5


TOKENS = draw(2, 23, seed=8)


@pytest.mark.parametrize(
    "folder, rslora",
    [pytest.param(*case.values, False, id=f"{case.id}-lora") for case in CASES]
    + [pytest.param(*case.values, True, id=f"{case.id}-rslora") for case in THREE_LAYOUTS],
    indirect=["folder"],
)
@torch.no_grad()
def test_reads_what_peft_wrote(folder, tmp_path, rslora):
    from peft import LoraConfig, get_peft_model

    base = load_hf(folder)
    stacks = [
        n
        for n, p in base.named_parameters()
        if p.dim() == 3 and n.endswith(("gate_up_proj", "down_proj"))
    ]
    config = LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules="all-linear",
        target_parameters=stacks,
        use_rslora=rslora,
    )
    # Llama 4's is a Linear that returns two tensors, which PEFT cannot wrap
    config.exclude_modules = ["router"]
    reference = get_peft_model(base, config).eval()
    perturb(p for n, p in reference.named_parameters() if "lora_" in n)
    reference.save_pretrained(tmp_path)
    model, _ = litft.load(tmp_path, base_dir=folder)
    assert relative(model(TOKENS), reference(TOKENS).logits) <= 1e-5
    assert relative(model(TOKENS), litft.load(folder)[0](TOKENS)) >= 1e-2


ALL, PARTS = ["all-linear"], [["q_proj", "down_proj"], ["v_proj", "blocks.1.mlp.*up_proj"]]


@pytest.mark.parametrize(
    "folder, targets",
    [pytest.param(*case.values, ALL, id=f"{case.id}-{ALL}") for case in CASES]
    + [
        pytest.param(*case.values, targets, id=f"{case.id}-{targets}")
        for case in THREE_LAYOUTS
        for targets in PARTS
    ],
    indirect=["folder"],
)
@torch.no_grad()
@pytest.mark.halved
def test_peft_reads_what_we_wrote(folder, tmp_path, targets):
    """Also if only some of the Linears fused in one tensor are adapted; reading the adapter back
    gives equal factors."""
    from peft import PeftModel

    if any(layer.experts for layer in resolve(folder).config.layers):
        targets = [*targets, "*.router"]
    model, method, source = write_random_adapter(folder, tmp_path, targets=targets)
    logits = model(TOKENS)
    assert (
        relative(
            PeftModel.from_pretrained(load_hf(folder), tmp_path).eval()(TOKENS).logits,
            logits,
        )
        <= 1e-5
    )
    assert any(name.endswith(".router") for name in method.specs) == ("*.router" in targets)
    reread, values = LoRA.read(tmp_path, source)
    assert reread.specs == method.specs
    assert values.keys() == method.parameters(model).keys()
    assert all(
        torch.equal(value, model.get_parameter(name)) for name, value in values.items()
    )


@torch.no_grad()
@pytest.mark.halved
def test_merged_equals_unmerged(folder, tmp_path):
    model, _, _ = write_random_adapter(folder, tmp_path / "adapter")
    merge(
        MergeArgs(
            checkpoint_dir=[str(tmp_path / "adapter")], out_dir=str(tmp_path / "merged")
        )
    )
    expected = model(TOKENS)
    assert relative(litft.load(tmp_path / "merged")[0](TOKENS), expected) <= 1e-5
    assert relative(load_hf(tmp_path / "merged")(TOKENS).logits, expected) <= 1e-5


@pytest.mark.parametrize("folder", THREE_LAYOUTS, indirect=True)
def test_experts_factors_are_initialized_like_those_of_linears(folder):
    """A is uniform within 1 / sqrt(in_features), as in PEFT, for any number of experts; B is
    zero."""
    source = resolve(folder)
    model, method = base_model(source), LoRA(LoRAArgs(r=16))
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    for name in method.specs:
        module = model.get_submodule(name)
        assert 0.9 <= module.lora_a.abs().max() * module.in_features**0.5 <= 1, name
        assert not module.lora_b.any()


@pytest.mark.parametrize("folder", THREE_LAYOUTS, indirect=True)
def test_every_factor_gets_a_gradient(folder, tmp_path):
    """B is nonzero and every expert receives a token here; no frozen parameter gets a gradient."""
    model, _, _ = write_random_adapter(folder, tmp_path)
    loss, _ = model(TOKENS, targets=TOKENS.roll(-1, 1))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.any()) == ("lora_" in name), (
            name
        )


@torch.no_grad()
def test_adapters_of_single_experts_from_before_transformers_5(make_model, tmp_path):
    """Old Mixtral adapters have a pair of factors for each w1, w2, w3; the reference merges them by
    hand."""
    config_class, variations = ROWS["mixtral"]
    _, folder = make_model(getattr(transformers, config_class), **variations["4 experts"])
    generator, tensors, tuned = torch.Generator().manual_seed(0), {}, load_hf(folder)
    for layer in range(3):
        experts = tuned.model.layers[layer].mlp.experts
        weights = {
            "w1": experts.gate_up_proj[:, :56],
            "w3": experts.gate_up_proj[:, 56:],
            "w2": experts.down_proj,
        }
        for expert in range(4):
            for name, weight in weights.items():
                a = 0.2 * torch.randn(4, weight.size(2), generator=generator)
                b = 0.2 * torch.randn(weight.size(1), 4, generator=generator)
                key = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
                weight[expert] += 2.0 * b @ a
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["w1", "w2", "w3"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model, _ = litft.load(tmp_path, base_dir=folder)
    assert relative(model(TOKENS), tuned(TOKENS).logits) <= 1e-5
    # what each expert began with would have to be subtracted
    changed = json.dumps(config | {"init_lora_weights": "pissa"})
    (tmp_path / "adapter_config.json").write_text(changed)
    with pytest.raises(ValueError, match="'pissa' of single experts is not supported"):
        litft.load(tmp_path, base_dir=folder)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    del tensors[
        "base_model.model.model.layers.1.block_sparse_moe.experts.2.w2.lora_B.weight"
    ]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"layers.1.block_sparse_moe.experts.2.w2 should be \(R, 56\) and \(32, R\)",
    ):
        litft.load(tmp_path, base_dir=folder)


@torch.no_grad()
def test_an_adapted_head_comes_with_a_copy_of_its_weight(make_model, tmp_path):
    from peft import LoraConfig, get_peft_model

    _, folder = make_model(transformers.LlamaConfig)
    reference = get_peft_model(
        load_hf(folder), LoraConfig(r=3, target_modules=["lm_head", "q_proj"])
    ).eval()
    perturb(p for n, p in reference.named_parameters() if "lora_" in n)
    reference.save_pretrained(tmp_path, save_embedding_layers=True)
    model, _ = litft.load(tmp_path, base_dir=folder)
    assert relative(model(TOKENS), reference(TOKENS).logits) <= 1e-5


PUBLISHED = {
    "gpt2_r8_c_attn_c_proj_tigrinya": (
        "GPT2Config",
        dict(num_hidden_layers=12, hidden_size=768, num_attention_heads=12),
    ),
    "gemma3-270m-it_r4_qkvo": (
        "Gemma3TextConfig",
        dict(
            num_hidden_layers=18,
            hidden_size=640,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
        ),
    ),
    "open-calm-1b_r1_neox_qkv": (
        "GPTNeoXConfig",
        dict(num_hidden_layers=24, hidden_size=2048, num_attention_heads=16),
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if "gpt2" in n else [pytest.mark.slow]) for n in PUBLISHED],
)
@torch.no_grad()
@pytest.mark.halved
def test_a_published_adapter_gives_pefts_logits(shared, make_model, tmp_path, name):
    """On a random base with the adapter's config; its B matrices are trained, so they are not
    zero."""
    from peft import PeftModel

    config_class, values = PUBLISHED[name]
    reference, base = make_model(getattr(transformers, config_class), **values)
    adapter = shared / "adapters" / name
    model, _ = litft.load(adapter, base_dir=base)
    base_logits = reference(TOKENS).logits
    expected = PeftModel.from_pretrained(reference, adapter).eval()(TOKENS).logits
    assert relative(model(TOKENS), expected) <= 1e-5
    assert relative(base_logits, expected) >= 1e-4


@pytest.mark.parametrize("file", ["litft.json", "adapter_config.json"])
@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"new_tokens": ["a"]}, "new_tokens must be a list of token ids"),
        ({"base_path": 5}, "base_path must be text"),
        ({"frozen": ["a", 1]}, "frozen must be a list of names"),
        (["base_path"], "object"),
    ],
)
def test_a_damaged_record_is_named_by_its_file(tmp_path, file, record, words):
    """Older adapters have litft's record in adapter_config.json."""
    config = {"peft_type": "LORA", "base_model_name_or_path": "base"}
    if file == "adapter_config.json":
        config["litft"] = record
    else:
        (tmp_path / file).write_text(json.dumps(record))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{file}.*{words}"):
        read_adapter_config(tmp_path)
