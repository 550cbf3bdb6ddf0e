"""Every method on six families and three kinds of base: the base at init, trained in all its parts,
saved, reloaded."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import transformers
from method_cases import FAMILIES as TRANSFORMERS
from method_cases import METHODS, RECURRENT, TOKENS, save_result, tokens_for
from parity import ROWS, load_hf, perturb, relative, tolerance
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensorMode

import litft
from litft.args import (
    AdapterV2Args,
    ConvertArgs,
    LoRAArgs,
    MergeArgs,
)
from litft.commands.convert_hf_checkpoint import convert
from litft.commands.merge_lora import merge
from litft.methods import AdapterV2, LoRA, detach, disabled
from litft.methods.mixins import Mixin, TrainedWeight
from litft.model.mlp import CONSTANTS, grouped_product, looped_product
from litft.pretrained.build import base_model, fill_model, unfilled_model
from litft.pretrained.folder import resolve

# methods that can be merged; one that cannot is excluded here
MERGE = [
    name
    for name in METHODS
    if not name.startswith("adapter") or name.startswith("adapter_v2, no prefix")
]
QUANTIZED = [None, "nf4", "int8"]
FAMILIES = TRANSFORMERS | RECURRENT


def grouped_reference(x, weight, offs):
    """Multiply the rows of one expert after another."""
    counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
    return torch.cat(
        [
            rows @ expert_weight
            for rows, expert_weight in zip(x.split(counts), weight, strict=True)
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_equals_a_loop_over_experts(dtype):
    """Also with unused experts: first, last and in between."""
    x, weight = (
        torch.randn(20, 16).to(dtype).requires_grad_(),
        torch.randn(5, 16, 8).to(dtype).requires_grad_(),
    )
    ends = torch.tensor([0, 7, 7, 20, 20], dtype=torch.int32)
    output, expected = (
        F.grouped_mm(x, weight, offs=ends),
        grouped_reference(x, weight, ends),
    )
    grad = torch.randn_like(output)
    for a, b in zip(
        (output, *torch.autograd.grad(output, (x, weight), grad)),
        (expected, *torch.autograd.grad(expected, (x, weight), grad)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def covering_cases() -> list[tuple[str, str, str | None]]:
    """Return cases with every pair of (method, family), (method, base), (family, base); full takes
    no quantized base."""
    return [
        (
            method,
            family,
            None
            if method.startswith("full")
            else QUANTIZED[(row + column) % len(QUANTIZED)],
        )
        for row, method in enumerate(METHODS)
        for column, family in enumerate(FAMILIES)
    ]


CASES = [pytest.param(*case, id=" / ".join(map(str, case))) for case in covering_cases()]
# alternate cases: each half has every method with three families and with every base
HALVES = [
    [case for at, case in enumerate(CASES) if sum(divmod(at, len(FAMILIES))) % 2 == half]
    for half in (0, 1)
]
# a finite difference takes two forward passes per parameter: skip methods with the kernels of lora
# and adapter_v2, and use a plain, a fused and an expert family
SAME_KERNELS = (
    "rslora",
    "olora",
    "lora, new tokens",
    "adapter, new tokens",
    "adapter_v2, no prefix, new tokens",
)
DIFFERENTIATED = [
    case
    for case in HALVES[1]
    if case.values[0] not in SAME_KERNELS
    and case.values[1] in ("llama", "phi3", "qwen3_moe")
]


def test_cases_cover_every_pair():
    cases = [case.values for case in CASES]
    assert {case[:2] for case in cases} == set(product(METHODS, FAMILIES))
    quantizable = [method for method in METHODS if not method.startswith("full")]
    assert {(method, kind) for method, _, kind in cases} >= set(
        product(quantizable, QUANTIZED)
    )
    assert {case[1:] for case in cases} == set(product(FAMILIES, QUANTIZED))
    for half in HALVES:
        cases = [case.values for case in half]
        assert {(method, kind) for method, _, kind in cases} >= set(
            product(quantizable, QUANTIZED)
        )
        assert {case[1:] for case in cases} == set(product(FAMILIES, QUANTIZED)) and len(
            cases
        ) == len(CASES) // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_supports_any_width(dtype):
    """Also rows that are not a multiple of 16 bytes, which grouped_mm rejects, and fake tensors, as
    in a memory plan."""
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    x, weight = torch.randn(10, 24, dtype=dtype), torch.randn(3, 24, 25, dtype=dtype)
    torch.testing.assert_close(
        grouped_product(x, weight, ends),
        grouped_reference(x, weight, ends),
        rtol=2e-2,
        atol=2e-2,
    )
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (x, weight, ends)]
        assert grouped_product(*fakes).shape == (10, 25)


def test_experts_one_by_one_equal_the_grouped_product():
    """What a GPU runs in fp32, with its gradients; one expert has no rows."""
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    results = []
    for product_of in (looped_product, grouped_product):
        generator = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randn(shape, generator=generator, requires_grad=True)
            for shape in ((10, 24), (3, 24, 16))
        )
        y = product_of(x, weight, ends)
        results.append(
            (
                y,
                *torch.autograd.grad(
                    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), (x, weight)
                ),
            )
        )
    torch.testing.assert_close(*results)


@pytest.fixture(scope="module")
def folders(make_model):
    """Return a function from a family's name to its model folder, which is created on first use."""
    folder_by_family = {}

    def folder(family):
        if family not in folder_by_family:
            config_class, variations = ROWS[family]
            folder_by_family[family] = make_model(
                getattr(transformers, config_class), **variations[FAMILIES[family]]
            )[1]
        return folder_by_family[family]

    return folder


def attached(folder, name, kind):
    """Return (model, method, source) for a model with a fresh method."""
    source, method = resolve(folder), METHODS[name]()
    method.select_targets(source.meta_model(), source.adapter_rules)
    model = base_model(
        source, "fp32", quantize=kind, unquantized=method.unquantized_modules()
    )
    torch.manual_seed(3)
    method.attach(model)
    return model, method, source


@pytest.mark.parametrize("name, family, kind", HALVES[0])
@torch.no_grad()
def test_at_init_it_equals_the_base(folders, name, family, kind):
    """Bit for bit, except with PiSSA and OLoRA; after detaching, it equals the base whatever was
    trained."""
    model, method, source = attached(folders(family), name, kind)
    base = base_model(
        source, "fp32", quantize=kind, unquantized=method.unquantized_modules()
    )
    expected = base(TOKENS)
    tokens = TOKENS if not method.tokens else TOKENS.masked_fill(TOKENS == 40, 41)
    if "pissa" in name or "olora" in name:
        assert relative(model(TOKENS), expected) <= 1e-6
    # new tokens' logits come last; those of existing tokens are unchanged
    elif method.tokens:
        assert (
            torch.equal(model(tokens)[..., :40], base(tokens)[..., :40])
            and model(tokens).size(-1) == 98
        )
    else:
        assert torch.equal(model(TOKENS), expected)
    if method.saves_full_model:
        return
    perturb(method.parameters(model).values())
    assert relative(model(TOKENS)[..., :96], expected) >= 5e-4
    with disabled(model):
        assert torch.equal(model(tokens)[..., :96], base(tokens))
    detach(model)
    assert torch.equal(model(TOKENS), expected)
    assert not any(isinstance(module, Mixin) for module in model.modules())
    assert dict(model.named_parameters()).keys() == dict(base.named_parameters()).keys()


@pytest.mark.parametrize("name, family, kind", HALVES[1])
def test_all_trainable_parameters_learn_and_no_others(folders, name, family, kind):
    """After two steps with a validation in between: some gates and factors have no gradient before
    the first step."""
    model, method, _ = attached(folders(family), name, kind)
    parameters = method.parameters(model)
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    optimizer, tokens = torch.optim.AdamW(trained.values(), lr=1e-2), tokens_for(method)
    for _ in range(3):
        optimizer.zero_grad()
        loss, count = model.train()(tokens[:, :-1], targets=tokens[:, 1:])
        (loss / count).backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(tokens)
    for n, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (n in trained), n
        assert parameter.grad is None or parameter.grad.abs().max() > 0, n


@pytest.mark.parametrize("name, family, kind", DIFFERENTIATED)
@pytest.mark.halved
def test_gradients_equal_finite_differences(folders, name, family, kind, monkeypatch):
    """In fp64, at each parameter's entry with the largest gradient; DoRA's norms are constants in
    the gradient."""
    model, method, _ = attached(folders(family), name, kind)
    perturb(method.parameters(model).values())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    # grouped_mm does not support fp64
    monkeypatch.setattr(F, "grouped_mm", grouped_reference)
    model, tokens = model.double(), tokens_for(method)
    for module in model.modules():
        if getattr(module, "lora_m", None) is not None:
            module.row_norms = partial(torch.clone, module.row_norms())
        if isinstance(module, TrainedWeight):
            module.dtype = torch.float64

    def loss():
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    loss().backward()
    for n, parameter in method.parameters(model).items():
        if not parameter.requires_grad:
            continue
        at = int(parameter.grad.abs().argmax())
        # too small to reroute
        flat, slope, step = (
            parameter.data.view(-1),
            float(parameter.grad.view(-1)[at]),
            1e-6,
        )
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                flat[at] += sign * step
                values.append(float(loss()))
                flat[at] -= sign * step
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(
            slope, rel=1e-3, abs=1e-7
        ), n


@pytest.mark.parametrize("name, family, kind", HALVES[0])
@torch.no_grad()
def test_saved_parameters_are_complete_and_reload(folders, tmp_path, name, family, kind):
    model, method, source = attached(folders(family), name, kind)
    perturb(method.parameters(model).values())
    out, tokens = (
        save_result(model, method, source, tmp_path / "out", kind),
        tokens_for(method),
    )
    reread, _ = litft.load(out, quantize=kind)
    # other sums: twice the rank, or one scale for fused Linears
    if "pissa" in name or "olora" in name or "rslora" in name:
        assert relative(reread(tokens), model(tokens)) <= tolerance(model.config)
    else:
        assert torch.equal(reread(tokens), model(tokens))
    if method.saves_full_model:
        with safe_open(out / "model.safetensors", "pt") as file:
            assert sorted(file.keys()) == source.checkpoint.names
        return
    reread_method, values = resolve(out).read_adapter()
    initial_factors = {
        n for n in method.parameters(model) if n.endswith(("lora_a0", "lora_b0"))
    }
    expected = method.parameters(model).keys() - initial_factors
    # for DoRA on part of a fused tensor, the file also contains the other rows' norms, as updates
    # of rank 0
    extra_modules = {n.rpartition(".")[0] for n in values.keys() - expected}
    assert expected <= values.keys() and all(
        reread_method.specs[n].r == 0 for n in extra_modules
    )
    assert not extra_modules or (
        "dora of some" in name and family in ("gpt_neox", "phi3", "falcon", "qwen3_moe")
    )
    assert reread_method.tokens.keys() == method.tokens.keys()


@pytest.mark.parametrize(
    "name, family, kind", [case for case in HALVES[1] if case.values[0] in MERGE]
)
@torch.no_grad()
def test_merged_equals_unmerged(folders, tmp_path, name, family, kind):
    """The update of a quantized base is added to the dequantized weights."""
    model, method, source = attached(folders(family), name, kind)
    if method.saves_full_model:
        return
    perturb(method.parameters(model).values())
    save_result(model, method, source, tmp_path / "adapter", kind)
    flags = dict(
        checkpoint_dir=[str(tmp_path / "adapter")],
        out_dir=str(tmp_path / "merged"),
        dequantized_base=bool(kind),
    )
    merge(MergeArgs(**flags))
    merged, tokens = litft.load(tmp_path / "merged")[0], tokens_for(method)
    assert relative(merged(tokens), model(tokens)) <= tolerance(model.config)
    assert relative(
        load_hf(tmp_path / "merged")(tokens).logits, model(tokens)
    ) <= tolerance(model.config)


@pytest.mark.parametrize("rslora", [False, True])
def test_without_alpha_the_update_is_doubled_at_every_rank(tiny, rslora):
    """A given alpha is divided by the rank, or its root."""
    source = resolve(tiny)
    scales = set()
    for rank in (1, 8, 32):
        method = LoRA(LoRAArgs(r=rank, rslora=rslora, alpha_pattern=["down_proj=6"]))
        method.select_targets(source.meta_model(), source.adapter_rules)
        for name, spec in method.specs.items():
            if name.endswith("down_proj"):
                assert spec.scale == pytest.approx(6 / (rank**0.5 if rslora else rank))
            else:
                scales.add(round(spec.scale, 6))
    assert scales == {2.0}


def merged_folder(model, method, source, folder):
    """Merge a method with random values into its base and return the folder."""
    perturb(method.parameters(model).values())
    save_result(model, method, source, folder / "adapter")
    merge(
        MergeArgs(checkpoint_dir=[str(folder / "adapter")], out_dir=str(folder / "merged"))
    )
    return folder / "merged"


@torch.no_grad()
def test_new_tokens_keep_the_bias_of_the_head(make_model, tmp_path):
    """Phi's head has a bias; the rows of new tokens are separate from the scaled head."""
    _, folder = make_model(transformers.PhiConfig, **ROWS["phi"][1]["partial"])
    model, method, source = attached(folder, "adapter_v2, no prefix, new tokens", None)
    tokens = tokens_for(method)
    assert (
        relative(
            litft.load(merged_folder(model, method, source, tmp_path))[0](tokens),
            model(tokens),
        )
        <= 1e-5
    )


@torch.no_grad()
def test_adapter_v2_merges_scales_into_biases(make_model, tmp_path):
    """All Linears of this family have biases: each output is scale * (W x + b + adapter bias)."""
    _, folder = make_model(transformers.PhiConfig, **ROWS["phi"][1]["partial"])
    source, method = resolve(folder), AdapterV2(AdapterV2Args(prompt_length=0, bias=True))
    method.select_targets(source.meta_model(), source.adapter_rules)
    model = base_model(source, "fp32")
    method.attach(model)
    out = merged_folder(model, method, source, tmp_path)
    assert relative(litft.load(out)[0](TOKENS), model(TOKENS)) <= 1e-5
    assert relative(load_hf(out)(TOKENS).logits, model(TOKENS)) <= 1e-5


@torch.no_grad()
def test_a_fully_trained_tied_head_has_no_lora_factors(make_model, tmp_path):
    _, folder = make_model(transformers.LlamaConfig, tie_word_embeddings=True)
    source = resolve(folder)
    method = LoRA(LoRAArgs(targets=["q_proj", "lm_head"], modules_to_save=["embed"]))
    method.select_targets(source.meta_model(), source.adapter_rules)
    assert all(name.endswith("q_proj") for name in method.specs)
    model = base_model(source, "fp32")
    method.attach(model)
    assert (
        relative(
            litft.load(merged_folder(model, method, source, tmp_path))[0](TOKENS),
            model(TOKENS),
        )
        <= 1e-5
    )


def test_correction_biases_stay_in_fp32_and_unchanged(make_model, tmp_path):
    """Full fine-tuning in bf16 neither trains nor rounds what only selects experts, in memory and
    in files."""
    config_class, variations = ROWS["glm4_moe"]
    _, folder = make_model(getattr(transformers, config_class), **variations["q/k norms"])
    source, method = resolve(folder), METHODS["full"]()
    method.frozen = {
        name
        for name, _ in source.meta_model().named_parameters()
        if name.endswith(CONSTANTS)
    }
    model = unfilled_model(source, method.storage("bf16"))
    method.attach(model, keep=False)
    method.set_compute_dtype(model, "bf16")
    fill_model(source, model, method.storage("bf16"), "cpu")
    name = "blocks.1.mlp.correction_bias"
    assert (
        torch.equal(model.get_parameter(name), source.tensor(name))
        and not model.get_parameter(name).requires_grad
    )
    out = convert(
        ConvertArgs(
            checkpoint_dir=str(folder), out_dir=str(tmp_path / "out"), precision="bf16"
        )
    )
    assert (
        torch.equal(resolve(out).tensor(name), source.tensor(name))
        and source.tensor(name).any()
    )
