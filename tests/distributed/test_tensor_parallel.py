"""A tensor-parallel model gives the logits of the unsplit one, for every family, method and
quantization."""

from dataclasses import replace

import pytest
import torch
import transformers
from method_cases import FAMILIES, METHODS, save_result, tokens_for
from parity import ROWS, draw, perturb, relative
from tp_logits import logits

import litft
from litft.distributed.tensor_parallel import TensorParallelPlacement, check_divides
from litft.inference.tp_decoding import note_on_cut_blocks
from litft.model.quantization import is_quantizable, quantize_dequantize
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve

TOKENS = draw(2, 20, seed=1)


@pytest.fixture(scope="module")
def folders(make_model):
    """The model folders of every variation of every family, by name."""
    return {
        f"{family}: {name}": make_model(getattr(transformers, config_class), **values)[1]
        for family, (config_class, variations) in ROWS.items()
        for name, values in variations.items()
    }


def compare(cases, results, bound=1e-5):
    """Compare each case's logits with those of one device."""
    for name, case, actual in zip(cases, cases.values(), results, strict=True):
        assert not isinstance(actual, str), f"{name}: {actual}"
        model, _ = litft.load(case["folder"], case.get("precision", "fp32"))
        with torch.inference_mode():
            assert relative(actual, model(torch.tensor(case["tokens"]))) <= bound, name


# plain, with norms, with sinks
SHARED_HEADS = ("llama: grouped", "olmo2: norms after", "gpt_oss: sinks, experts")


def supports_split(folder):
    """Whether tensor parallelism supports a network: not with mixers, sparse MLPs, or heads that
    differ between layers."""
    layers = resolve(folder).config.layers
    return not any(
        layer.mixer or layer.head_dim or layer.n_kv_heads or layer.sparsity
        for layer in layers
    )


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_every_family(folders, tmp_path, processes):
    """Two processes have two heads each; of four, some share key/value heads.

    The split leaves rotary embeddings alone.
    """
    rotations = {
        f"llama: {name}"
        for name, values in ROWS["llama"][1].items()
        if "rope_parameters" in values
    }
    selected = {
        name: folder
        for name, folder in folders.items()
        if name not in rotations and supports_split(folder)
    }
    if processes == 4:
        selected = {name: folders[name] for name in SHARED_HEADS}
    cases = {
        name: {"folder": str(folder), "tokens": TOKENS.tolist()}
        for name, folder in selected.items()
    }
    compare(cases, logits(list(cases.values()), tmp_path, processes))


# one of each way to change a module: low-rank factors and magnitudes, every kind of target,
# prefixes with scales and biases
EVERYWHERE = ("dora", "lora, all it has", "adapter_v2")


@torch.no_grad()
def test_every_method(folders, tmp_path):
    """All methods on Llama; one of each kind on the other families, whose layouts differ."""
    cases = {}
    for family, variation in FAMILIES.items():
        source = resolve(folders[f"{family}: {variation}"])
        for index, name in enumerate(METHODS if family == "llama" else EVERYWHERE):
            method = METHODS[name]()
            method.select_targets(source.meta_model(), source.adapter_rules)
            model = base_model(source, "fp32", unquantized=method.unquantized_modules())
            method.attach(model)
            perturb(method.parameters(model).values())
            folder = save_result(model, method, source, tmp_path / f"{family}{index}")
            cases[f"{name} / {family}"] = {
                "folder": str(folder),
                "tokens": tokens_for(method).tolist(),
            }
    compare(cases, logits(list(cases.values()), tmp_path))


@pytest.mark.slow
@torch.no_grad()
def test_quantized_weights_are_those_of_one_device(make_model, tmp_path):
    """Scales are those of the whole weight: rows of int8, blocks, and blocks of scales."""
    sizes = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    experts = dict(moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2)
    llama = make_model(transformers.LlamaConfig, intermediate_size=256, **sizes)[1]
    moe = make_model(transformers.Qwen3MoeConfig, **experts, **sizes)[1]
    cases = []
    for folder in (llama, moe):
        for kind in ("nf4", "nf4-dq", "fp4", "int8"):
            case = {"folder": str(folder), "tokens": TOKENS.tolist(), "quantize": kind}
            cases.append(case)
    for case, actual in zip(cases, logits(cases, tmp_path), strict=True):
        model, _ = litft.load(case["folder"], "fp32", quantize=case["quantize"])
        assert relative(actual, model(TOKENS)) <= 1e-5, case
        placement = TensorParallelPlacement(model.config, 0, 2)
        source = resolve(case["folder"])
        assert note_on_cut_blocks(source, placement, case["quantize"]) is None


@pytest.mark.slow
@torch.no_grad()
def test_parts_with_blocks_of_their_own(folders, tmp_path):
    """Where blocks cross the boundaries of parts, the logits equal those of an unsplit model whose
    parts were quantized one by one, and a line says so."""
    cases = []
    for name in ("llama: grouped", "phi3: fused", "qwen3_moe: renormalized"):
        cases.append((name, "nf4"))
    requests = [
        {"folder": str(folders[name]), "tokens": TOKENS.tolist(), "quantize": kind}
        for name, kind in cases
    ]
    for (name, kind), actual in zip(cases, logits(requests, tmp_path), strict=True):
        model, _ = litft.load(folders[name], "fp32")
        slices = [TensorParallelPlacement(model.config, rank, 2) for rank in range(2)]
        note = note_on_cut_blocks(resolve(folders[name]), slices[0], kind)
        assert "each device quantizes its part" in note
        for key, parameter in model.named_parameters():
            if is_quantizable(key, model):
                dim = -1 if key.split(".")[-2] in ("o_proj", "down_proj") else -2
                shards = [
                    quantize_dequantize(
                        placement.shard(key, parameter), kind, torch.float32
                    )
                    for placement in slices
                ]
                parameter.copy_(torch.cat(shards, dim))
        assert relative(actual, model(TOKENS)) <= 1e-5, (name, kind)


def test_real_models(checkpoints, tmp_path):
    """stories15M has 6 heads, stories 8 query heads with 4 key/value heads."""
    tokens = torch.randint(
        3, 500, (2, 24), generator=torch.Generator().manual_seed(0)
    ).tolist()
    cases = {
        name: {"folder": str(checkpoints[name]), "tokens": tokens}
        for name in ("stories15M", "stories")
    }
    compare(cases, logits(list(cases.values()), tmp_path))


@pytest.mark.slow
def test_heads_shared_by_several_processes(make_model, tmp_path):
    """Six query heads with one or three key/value heads on three processes."""
    sizes = dict(hidden_size=48, num_attention_heads=6, intermediate_size=48, head_dim=8)
    folders = {
        heads: make_model(transformers.LlamaConfig, num_key_value_heads=heads, **sizes)[1]
        for heads in (1, 3)
    }
    cases = {
        heads: {"folder": str(folder), "tokens": TOKENS.tolist()}
        for heads, folder in folders.items()
    }
    compare(cases, logits(list(cases.values()), tmp_path, 3))


def test_dimensions_that_do_not_divide_are_named(checkpoints, folders):
    config = resolve(checkpoints["SmolLM2-135M-Instruct"]).config
    with pytest.raises(
        ValueError,
        match="--devices 2 cannot evenly split num_attention_heads 9, num_key_value_heads 3",
    ):
        check_divides(config, 2)
    with pytest.raises(ValueError, match="this model supports 1, 3"):
        check_divides(config, 6)
    check_divides(config, 3)
    moe = resolve(folders["qwen2_moe: some dense, renormalized"]).config
    with pytest.raises(
        ValueError,
        match="an expert's hidden size 24, the shared expert's hidden size 16, the MLP's hidden",
    ):
        check_divides(moe, 64)
    # two key/value heads, each on two processes
    config = resolve(folders["llama: grouped"]).config
    check_divides(config, 4)
    # layers with sizes of their own, of which only the first does not divide
    first, second, *others = config.layers
    layers = (replace(first, hidden_dim=50), replace(second, hidden_dim=48), *others)
    with pytest.raises(ValueError, match="the hidden size of some layers 50"):
        check_divides(replace(config, layers=layers), 4)
