"""What is done block by block changes nothing that is computed: compiled, recomputed, offloaded."""

import pytest
import torch
import torch._dynamo.utils
from conftest import script
from torch import nn

from litft.args import LoRAArgs, LoRAFinetuneArgs, TrainArgs
from litft.data.encoder import Sample
from litft.data.packing import Layout
from litft.methods import LoRA
from litft.model.config import NormConfig
from litft.model.mlp import ACTIVATIONS, _Gated
from litft.model.norm import Norm
from litft.model.rope import rotate
from litft.pretrained import resolve
from litft.training import cpu_offload
from litft.training.activation_checkpointing import recompute
from litft.training.compile import compile_blocks, is_compiled, run_uncompiled, uncompiled
from litft.training.cpu_offload import offload_activations, offload_parameters
from litft.training.memory_trace import AllocationTracker


def learner(folder, quantize=None, **lora):
    """A model with LoRA on it whose B is not zero."""
    source, method = resolve(folder), LoRA(LoRAArgs(r=4, **lora))
    method.choose(source.meta_model(), source.adapter_rules)
    torch.manual_seed(0)
    model = source.base_model("fp32", "cpu", quantize).train()
    method.attach(model)
    parameters = method.parameters(model)
    for parameter in parameters.values():
        parameter.data.normal_(std=0.05)
    return model, parameters


def batches(room=128, rows=1, seed=0):
    """Some samples, laid out."""
    torch.manual_seed(seed)
    samples = [Sample(*torch.randint(512, (2, length))) for length in (30, 61, 44, 17, 80, 25)]
    return Layout(rows, room).batches(samples)


def gradients(model, parameters, given):
    """The loss, and what it leaves."""
    torch.manual_seed(1)
    total = 0.0
    for batch in given:
        loss, _ = model(batch.tokens, **batch.inputs())
        loss.backward()
        total += float(loss.detach())
    found = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return total, found


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed_is_kept_to_the_bit(tiny, kind, dropout):
    """With dropout the same numbers are drawn again."""
    model, parameters = learner(tiny, dropout=dropout)
    loss, expected = gradients(model, parameters, batches())
    recompute(model, kind)
    again, found = gradients(model, parameters, batches())
    assert loss == again and all(torch.equal(found[name], expected[name]) for name in expected)


def test_recomputed_keeps_less(tiny):
    """Of a batch's activations: the MLPs' alone, or all but the blocks' inputs."""
    kept = {}
    (batch,) = batches(room=512)
    for kind in ("none", "selective", "full"):
        model, _ = learner(tiny)
        recompute(model, kind)
        with AllocationTracker() as alive:
            loss, _ = model(batch.tokens, **batch.inputs())
            kept[kind] = alive.current
        del loss
    assert kept["full"] < 0.4 * kept["none"] and kept["full"] < kept["selective"] < 0.8 * kept["none"]


def test_offloaded_is_kept_to_the_bit(tiny, monkeypatch):
    """On a CPU the copies lie beside the originals, and come back in the order that a GPU would see."""
    monkeypatch.setattr(cpu_offload, "MIN_OFFLOAD_BYTES", 1)
    model, parameters = learner(tiny)
    loss, expected = gradients(model, parameters, batches())
    offload_activations(model, torch.device("cpu"))
    packed = []
    monkeypatch.setattr(cpu_offload.SavedTensorOffload, "pack", count_calls(cpu_offload.SavedTensorOffload.pack, packed))
    again, found = gradients(model, parameters, batches())
    numbers = [number for number in packed if isinstance(number, int)]
    assert len(packed) > len(numbers) > len(set(numbers)) > 20  # weights stay; what several products keep is copied once
    assert loss == again and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dora", [False, True])
def test_weights_that_wait_are_there_to_the_bit(tiny, monkeypatch, dora):
    """Each block's own while it runs, forward and again backward, and those of the next; no others."""
    monkeypatch.setattr(cpu_offload, "MIN_OFFLOAD_BYTES", 1)
    model, parameters = learner(tiny, dora=dora)
    loss, expected = gradients(model, parameters, batches())
    offload_parameters(model, torch.device("cpu"))
    recompute(model, "full")
    weights, ran = model.blocks[0].weights, []
    assert [len(waiting) for waiting in weights.by_block] == [9] * len(model.blocks)  # 7 matrices, 2 norms

    def look(block, _):
        there = [w.parameter.data_ptr() != w.host.data_ptr() for waiting in weights.by_block for w in waiting]
        assert sum(there) == 9 and len(weights.fetched) <= 2
        ran.append([block.number, *(number for number in weights.fetched if number != block.number)])

    for block in model.blocks:
        block.attention_norm.register_forward_pre_hook(lambda _, x, block=block: look(block, x))
    (batch,) = batches(room=512)
    gradients(model, parameters, [batch])
    last = len(model.blocks) - 1
    up, down = [[number, number + 1] for number in range(last)], [[number, number - 1] for number in range(last, 0, -1)]
    assert ran == [*up, [last], *down, [0, 1]]
    again, found = gradients(model, parameters, batches())
    assert loss == again and all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(w.parameter.data_ptr() == w.host.data_ptr() for waiting in weights.by_block for w in waiting)


def test_what_excludes_waiting_weights_is_told(tiny, examples, tmp_path):
    given = dict(cpu_offload="parameters", compile=True, activation_checkpointing="selective")
    found = LoRAFinetuneArgs(train=TrainArgs(**given), devices=2, strategy="ddp").problems()
    remedies = ["leave --train.compile true out", "leave --train.activation_checkpointing selective out"]
    assert [line.split("; ")[1] for line in found if "cpu_offload" in line] == ["add --strategy fsdp", *remedies]
    words = ["--checkpoint_dir", tiny, "--data.path", examples, "--train.cpu_offload", "parameters", "--out_dir", "run"]
    done = script("finetune/lora.py", *words, "--accelerator", "cpu", cwd=tmp_path, code=2)
    assert "without a GPU all is in the host's memory" in done.stderr and not (tmp_path / "run").exists()


def count_calls(function, calls):
    def counted(*words):
        calls.append(function(*words))
        return calls[-1]

    return counted


@pytest.mark.slow
@pytest.mark.parametrize("kind, quantize", [("none", None), ("full", "nf4-dq")])
def test_compiled_is_eager_in_two_graphs(tiny, quantize, kind):
    """Rows of any length and count of documents; what is compiled for the first step is all there is."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, parameters = learner(tiny, quantize)
    given = [batches(), batches(100, seed=3), batches(90, seed=4)]
    expected = [gradients(model, parameters, step) for step in given]
    recompute(model, kind)
    compile_blocks(model)
    assert is_compiled(model)
    for step, (loss, grads) in zip(given, expected, strict=True):
        again, found = gradients(model, parameters, step)
        assert again == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            assert float((found[name] - grad).norm() / grad.norm()) < 1e-4, name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the first block's input has no gradient
    assert not torch._dynamo.utils.counters["graph_break"]
    with torch.no_grad(), uncompiled():
        model(torch.zeros(1, 9, dtype=torch.int64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_compiler_that_fails_is_done_without(tiny):
    model, parameters = learner(tiny)
    loss, _ = gradients(model, parameters, batches())
    compile_blocks(model)
    with pytest.warns(UserWarning, match="run uncompiled, since torch.compile fails: no compiler"):
        run_uncompiled(model, "no compiler")
    assert not is_compiled(model) and gradients(model, parameters, batches())[0] == loss


# ---- gradients that say themselves what they are ----------------------------------------------------------------------


def same_gradients(found, expected, inputs):
    """Of two results with regard to the same inputs."""
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    for a, b in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape, over", [((32,), 1), ((4, 8), 1), ((4, 8), 2)])
@pytest.mark.parametrize("weight", [True, False])
def test_rms_norm_is_torchs(shape, over, weight):
    norm = Norm(NormConfig(kind="rms", eps=1e-5, offset=1.0 if weight else 0.0, weight=weight), *shape, num_dims=over)
    x = torch.randn(2, 7, *shape, requires_grad=True)
    if weight:
        norm.weight.data.normal_()
    expected = nn.functional.rms_norm(x, shape[-over:], None, 1e-5)
    expected = expected * (norm.weight.view(shape) + 1) if weight else expected
    same_gradients(norm(x), expected, [x, *norm.parameters()])


def test_rotation_is_its_products():
    x = torch.randn(2, 3, 5, 16, requires_grad=True)
    cos, sin = torch.randn(2, 2, 1, 5, 6)
    first, second, rest = x[..., :6], x[..., 6:12], x[..., 12:]
    tables = torch.cat((cos, cos), -1), torch.cat((sin, -sin), -1)
    same_gradients(rotate(x, *tables), torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1), [x])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gate_is_its_product(name):
    gate, up = torch.randn(2, 5, 9, requires_grad=True), torch.randn(2, 5, 9, requires_grad=True)
    same_gradients(_Gated.apply(gate, up, ACTIVATIONS[name]), ACTIVATIONS[name](gate) * up, [gate, up])
