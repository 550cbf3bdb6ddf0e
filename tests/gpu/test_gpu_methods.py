"""Every method on every base, ten steps on a GPU beside the CPU's; and the optimizers."""

import copy

import pytest
import torch
import transformers
from method_cases import METHODS, tokens_for
from parity import TINY, draw, redraw

from gpu.comparisons import CUDA, PRETENDED
from litft.args import FullFinetuneArgs, TrainArgs
from litft.families import family, peft_rules, read_config
from litft.methods import Full
from litft.model.quantization import QuantizedTensor, is_quantizable, quantize_modules
from litft.model.transformer import GPT
from litft.training.memory_saving.activation_checkpointing import recompute
from litft.training.memory_saving.compile import compile_blocks
from litft.training.optimizers.make import OPTIMIZERS, make_optimizer, set_learning_rate

CONFIG = read_config(
    transformers.LlamaConfig(
        **{**TINY, "hidden_size": 64, "intermediate_size": 128}
    ).to_dict()
)
RULES = [*peft_rules(CONFIG), *family("llama").rules(CONFIG)]
QUICK = ("lora", "dora", "adapter_v2", "full")


def quantize(model, kind, unquantized):
    """Quantize the frozen Linears of a network on the CPU, in place."""
    names = {
        name.rpartition(".")[0]
        for name, _ in model.named_parameters()
        if is_quantizable(name, model)
    } - unquantized
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in names}
    quantize_modules(model, sorted(names), kind)
    for name, weight in weights.items():
        module = model.get_submodule(name)
        module.fill(QuantizedTensor.quantize(weight.flatten(0, -2), kind))
    return model


def base():
    """Return a tiny Llama in fp32 whose widths are multiples of the quantization's blocks."""
    model = GPT(CONFIG)
    redraw(model)
    return model.requires_grad_(False)


def losses(model, method, device, args, steps=10):
    """Return the losses of training steps on the same tokens."""
    trained = {name: p for name, p in method.parameters(model).items() if p.requires_grad}
    optimizer = make_optimizer(args, method, trained)
    tokens, values = tokens_for(method).to(device), []
    for _ in range(steps):
        loss, count = model.train()(tokens[:, :-1], targets=tokens[:, 1:])
        (loss / count).backward()
        set_learning_rate(optimizer, args.learning_rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        values.append(loss.detach() / count)
    return torch.stack(values).cpu()


def check_losses(on_gpu, on_cpu, limit):
    """Check that losses are those of the CPU, which fall."""
    assert on_gpu.shape == on_cpu.shape
    assert on_cpu[-1] < on_cpu[0] - 0.1
    if not PRETENDED:
        torch.testing.assert_close(on_gpu, on_cpu, rtol=limit, atol=limit)


@pytest.mark.parametrize("kind", ["none", "nf4", "int8"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.quick] if n in QUICK else []) for n in METHODS],
)
def test_ten_steps_equal_the_cpus(name, kind):
    """A method's values are drawn on the CPU; both then take the same steps in fp32."""
    method = METHODS[name]()
    if kind != "none" and method.saves_full_model:
        pytest.skip("full fine-tuning quantizes nothing")
    model = base()
    method.select_targets(model, RULES)
    if kind != "none":
        quantize(model, kind, method.unquantized_modules())
    torch.manual_seed(0)
    method.attach(model, keep=False)
    on_gpu = copy.deepcopy(model).to(CUDA)
    args = TrainArgs(
        learning_rate=0.3 if name.startswith("adapter") and "v2" not in name else 2e-2
    )
    check_losses(
        losses(on_gpu, method, CUDA, args),
        losses(model, method, "cpu", args),
        0.05 if kind == "int8" else 2e-3,
    )


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_and_compiled_steps_equal_the_cpus(kind, compiled):
    method, model = METHODS["lora"](), base()
    method.select_targets(model, RULES)
    torch.manual_seed(0)
    method.attach(model, keep=False)
    on_gpu = copy.deepcopy(model).to(CUDA)
    recompute(on_gpu, kind)
    if compiled:
        compile_blocks(on_gpu)
    args = TrainArgs(learning_rate=2e-2)
    check_losses(
        losses(on_gpu, method, CUDA, args), losses(model, method, "cpu", args), 2e-3
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "schedule_free"])
def test_every_optimizer_takes_the_cpus_steps(name):
    """fp32 weights; 8-bit moments are rounded in another order."""
    method, model = Full(FullFinetuneArgs()), base()
    method.select_targets(model, RULES)
    method.attach(model, keep=False)
    on_gpu = copy.deepcopy(model).to(CUDA)
    args = TrainArgs(
        optimizer=name, learning_rate={"adafactor": 1e-1, "sgd": 3e-2}.get(name, 3e-3)
    )
    limit = 0.05 if "8bit" in name or name == "lion" else 2e-3
    check_losses(
        losses(on_gpu, method, CUDA, args), losses(model, method, "cpu", args), limit
    )


@pytest.mark.quick
@pytest.mark.parametrize("in_backward", [False, True])
def test_bf16_weights_are_rounded_stochastically(in_backward):
    """The mean of many rounded updates is the exact one, and no step waits for the GPU."""
    method, model = Full(FullFinetuneArgs()), base().to(CUDA, torch.bfloat16)
    method.select_targets(model, RULES)
    method.attach(model, keep=False)
    args = TrainArgs(
        learning_rate=1e-2, optimizer_in_backward=in_backward, max_grad_norm=0.0
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(args, method, trained)
    tokens = draw(2, 23, seed=8).to(CUDA)
    before = model.blocks[0].mlp.up_proj.weight.detach().clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            loss, count = model.train()(
                tokens[:, :-1],
                targets=tokens[:, 1:],
                target_indices=torch.arange(44, device=CUDA),
            )
            with optimizer.stepping() if in_backward else torch.enable_grad():
                (loss / count).backward()
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert model.blocks[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert PRETENDED or not torch.equal(before, model.blocks[0].mlp.up_proj.weight)
