"""The optimizer: no update of a bf16 weight is lost, rates by kind of parameter, decay of matrices."""

import pytest
import torch
import transformers
from parity import ROWS, draw

from litft.args import AdapterV2Args, FullFinetuneArgs, LoRAArgs, TrainArgs
from litft.folder import resolve
from litft.optim import Rounded, make_optimizer, set_rate, stochastically_rounded
from litft.peft import AdapterV2, Full, LoRA

TOKENS = draw(2, 17, seed=4)


@pytest.fixture(scope="module")
def folder(make_model):
    """A Llama whose weights are bf16 numbers, wide enough for means over a matrix."""
    from transformers import LlamaConfig

    model, folder = make_model(LlamaConfig, hidden_size=256, intermediate_size=320, num_hidden_layers=2)
    model.bfloat16().float().save_pretrained(folder)
    return folder


def displacement(folder, precision, make=make_optimizer):
    """What 200 steps at 1e-6 change in each matrix, as a run of `finetune/full.py` makes them."""
    source, method = resolve(folder), Full(FullFinetuneArgs())
    model = source.base_model(method.storage(precision))
    method.attach(model)
    method.compute_in(model, precision)
    parameters = method.parameters(model)
    before = {name: p.detach().float().clone() for name, p in parameters.items() if p.dim() == 2}
    optimizer = make(TrainArgs(), method, parameters)
    set_rate(optimizer, 1e-6)
    torch.manual_seed(0)
    for _ in range(200):
        loss, count = model.train()(TOKENS[:, :-1], targets=TOKENS[:, 1:])
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameters[name].detach().float() - value for name, value in before.items()}


def projections(found, expected):
    """How much of the fp32 run's way each matrix has gone."""
    return {name: float((found[name] * way).sum() / way.square().sum()) for name, way in expected.items()}


def test_bf16_weights_lose_no_updates(folder):
    """Rounded by chance, or kept in fp32; rounded to the nearest most updates are lost."""

    def plain(args, method, parameters):
        optimizer = torch.optim.AdamW(parameters.values(), betas=(0.9, 0.95), weight_decay=0.0)
        optimizer.param_groups[0]["factor"] = 1.0
        return optimizer

    expected = displacement(folder, "fp32")
    for precision in ("bf16", "bf16-true"):
        found = projections(displacement(folder, precision), expected)
        print(precision, min(found.values()), max(found.values()))
        assert all(0.95 <= value <= 1.05 for value in found.values()), found
    lost = projections(displacement(folder, "bf16-true", plain), expected)
    print("nearest", min(lost.values()), max(lost.values()))
    assert all(abs(value) < 0.2 for value in lost.values()), lost


def test_rounding_by_chance_is_unbiased():
    value = torch.tensor([1.0 + 2**-9, -3.0 - 2**-10, 1e-30, 0.0, 65280.0 + 64])
    torch.manual_seed(0)
    drawn = torch.stack([stochastically_rounded(value) for _ in range(4000)]).double()
    for n, exact in enumerate(value.double()):
        neighbours = drawn[:, n].unique()
        assert len(neighbours) <= 2 and neighbours.min() <= exact <= neighbours.max()
        spread = float(neighbours.max() - neighbours.min())
        assert abs(float(drawn[:, n].mean() - exact)) <= 0.04 * spread + 1e-38


def test_rounded_is_adamw_where_nothing_is_lost():
    """On fp32 weights it is torch's own, to the bit."""
    weights = [torch.nn.Parameter(draw(8, 8, seed=1).float()) for _ in range(2)]
    optimizers = [torch.optim.AdamW([weights[0]], lr=0.1), Rounded([{"params": [weights[1]], "factor": 1.0}], lr=0.1)]
    for _ in range(5):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            (weight**2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*weights)
    assert {tensor.dtype for tensor in optimizers[1].state[weights[1]].values()} == {torch.float32}


def test_rates_and_decay_by_kind(tiny):
    source, method = resolve(tiny), LoRA(LoRAArgs(lr_ratio=16.0, dora=True))
    method.choose(source.meta_model(), source.adapter_rules)
    model = source.base_model()
    method.attach(model)
    parameters = method.parameters(model)
    optimizer = make_optimizer(TrainArgs(weight_decay=0.1), method, parameters)
    set_rate(optimizer, 1e-3)
    names = {id(p): name for name, p in parameters.items()}
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    expected = {"lora_a": (1e-3, 0.1), "lora_b": (1.6e-2, 0.1), "lora_m": (1e-3, 0.0)}
    assert found == {name: pytest.approx(expected[name.rpartition(".")[2]]) for name in parameters}


def test_vectors_of_stacked_experts_do_not_decay(make_model):
    _, folder = make_model(transformers.Qwen3MoeConfig, **ROWS["qwen3_moe"][1]["renormalized"])
    source, method = resolve(folder), AdapterV2(AdapterV2Args())
    method.choose(source.meta_model(), source.adapter_rules)
    model = source.base_model()
    method.attach(model)
    parameters = method.parameters(model)
    assert any(p.dim() == 2 for name, p in parameters.items() if name.endswith(".adapter_scale"))
    optimizer = make_optimizer(TrainArgs(weight_decay=0.1), method, parameters)
    decayed = {id(p) for group in optimizer.param_groups for p in group["params"] if group["weight_decay"]}
    assert {name.rpartition(".")[2] for name, p in parameters.items() if id(p) in decayed} == {"adaption_prompt"}
