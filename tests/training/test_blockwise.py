"""Compiling, recomputing and offloading block by block change no result."""

import pytest
import torch
import torch._dynamo.utils
from conftest import script
from graphs import counted_graphs
from parity import ROWS, relative
from torch import nn

from litft.args import LoRAArgs, LoRAFinetuneArgs, TrainArgs
from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.methods import LoRA
from litft.model.config import NormConfig
from litft.model.mlp import ACTIVATIONS, _Gated
from litft.model.norm import Norm
from litft.model.rope import rotate
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.training.memory.allocations import AllocationTracker
from litft.training.memory_saving import activation_checkpointing, cpu_offload
from litft.training.memory_saving.activation_checkpointing import recompute
from litft.training.memory_saving.compile import (
    compile_blocks,
    is_compiled,
    run_uncompiled,
    uncompiled,
)
from litft.training.memory_saving.cpu_offload import offload_activations, offload_parameters


def learner(folder, quantize=None, **lora):
    """Return a model with LoRA whose B is not zero, and the LoRA parameters."""
    source, method = resolve(folder), LoRA(LoRAArgs(r=4, **lora))
    method.select_targets(source.meta_model(), source.adapter_rules)
    torch.manual_seed(0)
    model = base_model(source, "fp32", "cpu", quantize).train()
    method.attach(model)
    parameters = method.parameters(model)
    for parameter in parameters.values():
        parameter.data.normal_(std=0.05)
    return model, parameters


def batches(row_tokens=128, rows=1, seed=0):
    """Return the micro-batches of six samples."""
    torch.manual_seed(seed)
    samples = [
        Sample(*torch.randint(512, (2, length))) for length in (30, 61, 44, 17, 80, 25)
    ]
    return BatchLayout(rows, row_tokens).batches(samples)


def gradients(model, parameters, micro_batches):
    """Return the total loss and the gradients."""
    torch.manual_seed(1)
    total = 0.0
    for batch in micro_batches:
        loss, _ = model(batch.tokens, **batch.inputs())
        loss.backward()
        total += float(loss.detach())
    grads = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return total, grads


@pytest.mark.parametrize("kind", ["elementwise", "selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_is_bit_identical(tiny, kind, dropout):
    """Dropout draws the same numbers again."""
    model, parameters = learner(tiny, dropout=dropout)
    loss, expected = gradients(model, parameters, batches())
    recompute(model, kind)
    recomputed_loss, grads = gradients(model, parameters, batches())
    assert loss == recomputed_loss and all(
        torch.equal(grads[name], expected[name]) for name in expected
    )


def test_recomputing_saves_memory(tiny):
    """`elementwise` recomputes norms and gates, `selective` the MLPs' activations, `full` everything
    but the blocks' inputs."""
    nbytes = {}
    (batch,) = batches(row_tokens=512)
    for kind in ("none", "elementwise", "selective", "full"):
        model, _ = learner(tiny, targets=["all-linear"])
        recompute(model, kind)
        with AllocationTracker() as tracker:
            loss, _ = model(batch.tokens, **batch.inputs())
            nbytes[kind] = tracker.current
        del loss
    assert (
        nbytes["full"] < 0.4 * nbytes["none"]
        and nbytes["full"] < nbytes["selective"] < 0.8 * nbytes["none"]
        and nbytes["elementwise"] < 0.8 * nbytes["none"]
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_mlps_in_pieces_compute_the_same(tiny, make_model, monkeypatch, family):
    """Pieces that end within documents, and a last one that is shorter."""
    folder = tiny
    if family == "qwen3_moe":
        config_class, values = ROWS[family][0], next(iter(ROWS[family][1].values()))
        _, folder = make_model(config_class, **values | {"vocab_size": 512})
    monkeypatch.setattr(activation_checkpointing, "PIECE_TOKENS", 23)
    model, parameters = learner(folder, targets=["all-linear"])
    loss, expected = gradients(model, parameters, batches())
    recompute(model, "tiled")
    tiled_loss, grads = gradients(model, parameters, batches())
    assert tiled_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        assert relative(grads[name], gradient) <= 1e-5, name


def test_dropout_of_a_piece_draws_the_same_numbers_again(tiny, monkeypatch):
    """The gradients are those of pieces that save everything."""
    monkeypatch.setattr(activation_checkpointing, "PIECE_TOKENS", 23)
    model, parameters = learner(tiny, targets=["all-linear"], dropout=0.3)
    recompute(model, "tiled")
    loss, grads = gradients(model, parameters, batches())

    def saving(run, *inputs, **settings):
        return run(*inputs)

    monkeypatch.setattr(activation_checkpointing, "checkpoint", saving)
    expected_loss, expected = gradients(model, parameters, batches())
    assert loss == expected_loss
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_mlps_in_pieces_halve_the_peak_of_the_backward_pass(tiny, monkeypatch):
    """Of a row that is long beside a piece, whose MLP has wide hidden values."""
    monkeypatch.setattr(activation_checkpointing, "PIECE_TOKENS", 16)
    peaks = {}
    (batch,) = batches(row_tokens=512)
    for kind in ("full", "tiled"):
        model, _ = learner(tiny, targets=["gate_proj", "up_proj", "down_proj"])
        recompute(model, kind)
        with AllocationTracker() as tracker:
            loss, _ = model(batch.tokens, **batch.inputs())
            saved = tracker.current
            tracker.reset_peak()
            loss.backward()
            peaks[kind] = tracker.peak - saved
        del loss
    assert peaks["tiled"] < 0.7 * peaks["full"], peaks


def saved_bytes(loss):
    """Return the bytes that the compiled blocks of a loss have saved."""
    nodes = [loss.grad_fn]
    seen = set()
    storages = {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in type(node).__name__:
            for tensor in node.saved_tensors:
                storages[tensor.data_ptr()] = tensor.nbytes
        nodes += [following for following, _ in node.next_functions]
    return sum(storages.values())


@pytest.mark.slow
def test_compiled_blocks_do_not_save_what_they_recompute(tiny, monkeypatch):
    """The same part as without a compiler: the outputs of norms and gates."""
    compile_with = torch.compile

    # the partition of the graph without generated code
    def compiled(function, **settings):
        return compile_with(function, backend="aot_eager_decomp_partition", **settings)

    monkeypatch.setattr(torch, "compile", compiled)
    nbytes = {}
    (batch,) = batches(row_tokens=512)
    for kind in ("none", "elementwise"):
        torch._dynamo.reset()
        model, _ = learner(tiny, targets=["all-linear"])
        recompute(model, kind)
        compile_blocks(model)
        model.compiled_loss = False
        loss, _ = model(batch.tokens, **batch.inputs())
        nbytes[kind] = saved_bytes(loss)
    assert 0 < nbytes["elementwise"] < 0.9 * nbytes["none"]


def test_offloading_activations_is_bit_identical(tiny, monkeypatch):
    """On a CPU the copies are next to the originals, and return in the order in which a GPU would
    get them."""
    monkeypatch.setattr(cpu_offload, "MIN_OFFLOAD_BYTES", 1)
    model, parameters = learner(tiny)
    loss, expected = gradients(model, parameters, batches())
    offload_activations(model, torch.device("cpu"))
    packed = []
    monkeypatch.setattr(
        cpu_offload.SavedTensorOffload,
        "pack",
        count_calls(cpu_offload.SavedTensorOffload.pack, packed),
    )
    offloaded_loss, grads = gradients(model, parameters, batches())
    numbers = [number for number in packed if isinstance(number, int)]
    # weights are not copied; a tensor that several products save is copied once
    assert len(packed) > len(numbers) > len(set(numbers)) > 20
    assert loss == offloaded_loss and all(
        torch.equal(grads[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("kind", ["none", "full"])
def test_offloaded_activations_of_two_blocks_are_on_the_device(tiny, monkeypatch, kind):
    """Each tensor leaves the device once and returns once, while the neighbouring block runs."""
    monkeypatch.setattr(cpu_offload, "MIN_OFFLOAD_BYTES", 1)
    model, parameters = learner(tiny)
    recompute(model, kind)
    offload_activations(model, torch.device("cpu"))
    copies = model.copies
    begin_forward = copies.begin_block
    begin_backward = cpu_offload.SavedTensorOffload._begin_block
    to_device = copies.to_device
    saved_before = []  # of each block: whether all that is held is of the block before
    fetched_for = []  # (block, those whose tensors are on the device) in the backward pass
    returned = []
    hooks = []

    def record_forward():
        leaving = list(copies.leaving)
        begin_forward()
        saved_before.append(copies.left_before == leaving and not copies.leaving)

    def record_backward(self, block):
        begin_backward(self, block)
        hooks.append(self)
        blocks = {self.saved[index].block for index in self.fetched}
        fetched_for.append((block, blocks))

    def record_copy(host):
        returned.append(host)
        return to_device(host)

    monkeypatch.setattr(copies, "begin_block", record_forward)
    monkeypatch.setattr(copies, "to_device", record_copy)
    monkeypatch.setattr(cpu_offload.SavedTensorOffload, "_begin_block", record_backward)
    (batch,) = batches(row_tokens=512)
    gradients(model, parameters, [batch])
    assert saved_before == [True] * len(model.blocks)
    assert [block for block, _ in fetched_for] == list(range(len(model.blocks), 0, -1))
    for block, blocks in fetched_for:
        # the block after has tensors that this one uses too: cosines and sines
        assert {block} <= blocks <= {block - 1, block, block + 1}
        assert block - 1 in blocks or block == 1
    assert len(returned) == len(set(map(id, returned))) == len(hooks[0].saved)
    assert not hooks[0].fetched


@pytest.mark.slow
def test_compiled_blocks_offload_their_activations(tiny, monkeypatch):
    """They expect tensors with the strides that they have saved."""
    monkeypatch.setattr(cpu_offload, "MIN_OFFLOAD_BYTES", 1)
    model, parameters = learner(tiny)
    loss, expected = gradients(model, parameters, batches())
    compile_blocks(model)
    offload_activations(model, torch.device("cpu"))
    offloaded_loss, grads = gradients(model, parameters, batches())
    assert offloaded_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        assert relative(grads[name], gradient) <= 1e-4, name


@pytest.mark.parametrize("dora", [False, True])
def test_offloading_parameters_is_bit_identical(tiny, monkeypatch, dora):
    """Only the weights of the running block and of the next are on the device, forward, recomputed
    and backward."""
    monkeypatch.setattr(cpu_offload, "MIN_OFFLOAD_BYTES", 1)
    model, parameters = learner(tiny, dora=dora)
    loss, expected = gradients(model, parameters, batches())
    offload_parameters(model, torch.device("cpu"))
    recompute(model, "full")
    weights, fetched = model.blocks[0].weights, []
    # 7 matrices, 2 norms
    assert [len(block_weights) for block_weights in weights.by_block] == [9] * len(
        model.blocks
    )

    def check_block(block, _):
        on_device = [
            w.parameter.data_ptr() != w.host.data_ptr()
            for block_weights in weights.by_block
            for w in block_weights
        ]
        assert sum(on_device) == 9 and len(weights.fetched) <= 2
        fetched.append(
            [
                block.number,
                *(number for number in weights.fetched if number != block.number),
            ]
        )

    for block in model.blocks:
        block.attention_norm.register_forward_pre_hook(
            lambda _, x, block=block: check_block(block, x)
        )
    (batch,) = batches(row_tokens=512)
    gradients(model, parameters, [batch])
    last = len(model.blocks) - 1
    forward, backward = (
        [[number, number + 1] for number in range(last)],
        [[number, number - 1] for number in range(last, 0, -1)],
    )
    assert fetched == [*forward, [last], *backward, [0, 1]]
    offloaded_loss, grads = gradients(model, parameters, batches())
    assert loss == offloaded_loss and all(
        torch.equal(grads[name], expected[name]) for name in expected
    )
    assert all(
        w.parameter.data_ptr() == w.host.data_ptr()
        for block_weights in weights.by_block
        for w in block_weights
    )


def test_conflicts_with_offloading_parameters_are_reported(tiny, examples, tmp_path):
    settings = dict(
        cpu_offload="parameters", compile=True, activation_checkpointing="selective"
    )
    problems = LoRAFinetuneArgs(
        train=TrainArgs(**settings), devices=2, strategy="ddp"
    ).problems()
    remedies = [
        "leave --train.compile true out",
        "leave --train.activation_checkpointing selective out",
    ]
    assert [line.split("; ")[1] for line in problems if "cpu_offload" in line] == [
        "add --strategy fsdp",
        *remedies,
    ]
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--train.cpu_offload",
        "parameters",
        "--out_dir",
        "run",
    ]
    done = script("finetune/lora.py", *flags, "--accelerator", "cpu", cwd=tmp_path, code=2)
    assert (
        "without a GPU all is in the host's memory" in done.stderr
        and not (tmp_path / "run").exists()
    )


def count_calls(function, calls):
    def counted(*arguments):
        calls.append(function(*arguments))
        return calls[-1]

    return counted


@pytest.mark.slow
@pytest.mark.parametrize("kind, quantize", [("none", None), ("full", "nf4-dq")])
def test_compiled_equals_eager_in_two_graphs(tiny, quantize, kind):
    """Rows of any length and number of documents; nothing is compiled after the first step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, parameters = learner(tiny, quantize)
    steps = [batches(), batches(100, seed=3), batches(90, seed=4)]
    expected = [gradients(model, parameters, step) for step in steps]
    recompute(model, kind)
    compile_blocks(model)
    assert is_compiled(model)
    for step, (loss, grads) in zip(steps, expected, strict=True):
        compiled_loss, compiled_grads = gradients(model, parameters, step)
        assert compiled_loss == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            assert float((compiled_grads[name] - grad).norm() / grad.norm()) < 1e-4, name
    # of a block, and of the loss
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    with torch.no_grad(), uncompiled():
        model(torch.zeros(1, 9, dtype=torch.int64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_all_blocks_share_one_graph(tiny):
    """The first block's input requires a gradient as the others' do; LoRA's scale and the rotary
    width are constants."""
    model, parameters = learner(tiny, alpha=12)
    recompute(model, "full")
    with counted_graphs() as counts:
        compile_blocks(model)
        for step in (batches(), batches(100, seed=3), batches(90, rows=2, seed=4)):
            gradients(model, parameters, step)
        made, _ = counts.reset()
    # a block for one row and for several, and the loss
    assert made == 3 and not counts.breaks
    # x (B, T, C), of which C is then found to be constant; the tables (B, 1, T, width); the
    # documents; the loss's rows
    sizes = {name.removeprefix("L['inputs']") for graph in counts.symbols for name in graph}
    tables = {f"[1].{table}.size()[{dim}]" for table in ("cos", "sin") for dim in (0, 2)}
    others = {f"[0].size()[{dim}]" for dim in range(3)} | {
        "[2].cu_seqlens.size()[0]",
        "L['logits'].size()[0]",
        "L['targets'].size()[0]",
        "L['targets']._base.size()[0]",
    }
    # torch 2.11 lists the ids, too
    assert sizes - {f"[2].ids.size()[{dim}]" for dim in (0, 1)} == tables | others


def test_a_row_as_long_as_the_model_is_wide_needs_no_graph_of_its_own(tiny):
    """Its length is no constant of the code, so that the next row needs no other code."""
    model, _ = learner(tiny)
    width = model.config.dim
    with counted_graphs() as counts:
        compile_blocks(model)
        for length in (width, width + 9, width - 5):
            tokens = torch.randint(0, model.config.vocab_size, (1, length))
            model(tokens).sum().backward()
        made, _ = counts.reset()
    assert made == 1 and not counts.breaks


def test_compiled_blocks_below_the_first_trained_one_need_no_gradient(tiny):
    model, parameters = learner(tiny, targets=["blocks.2.*"])
    needs_gradient = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda module, inputs, output: needs_gradient.append(output.requires_grad)
        )
    with counted_graphs():
        compile_blocks(model)
        gradients(model, parameters, batches()[:1])
    assert needs_gradient == [False, False, True]


def test_a_compiler_that_fails_is_not_used(tiny):
    model, parameters = learner(tiny)
    loss, _ = gradients(model, parameters, batches())
    compile_blocks(model)
    with pytest.warns(
        UserWarning, match="run uncompiled, since torch.compile fails: no compiler"
    ):
        run_uncompiled(model, "no compiler")
    assert not is_compiled(model) and gradients(model, parameters, batches())[0] == loss


# ---- custom autograd functions
# ---------------------------------------------------------------------------------------


def assert_same_gradients(actual, expected, inputs):
    """Assert that two results and their gradients with respect to the inputs are equal."""
    torch.testing.assert_close(actual, expected)
    grad_output = torch.randn_like(actual)
    for actual_grad, expected_grad in zip(
        torch.autograd.grad(actual, inputs, grad_output),
        torch.autograd.grad(expected, inputs, grad_output),
        strict=True,
    ):
        torch.testing.assert_close(actual_grad, expected_grad)


@pytest.mark.parametrize("shape, over", [((32,), 1), ((4, 8), 1), ((4, 8), 2)])
@pytest.mark.parametrize("weight", [True, False])
def test_rms_norm_equals_torch(shape, over, weight):
    norm = Norm(
        NormConfig(kind="rms", eps=1e-5, offset=1.0 if weight else 0.0, weight=weight),
        *shape,
        num_dims=over,
    )
    x = torch.randn(2, 7, *shape, requires_grad=True)
    if weight:
        norm.weight.data.normal_()
    expected = nn.functional.rms_norm(x, shape[-over:], None, 1e-5)
    expected = expected * (norm.weight.view(shape) + 1) if weight else expected
    assert_same_gradients(norm(x), expected, [x, *norm.parameters()])


def test_the_rotary_embedding_equals_its_products():
    x = torch.randn(2, 3, 5, 16, requires_grad=True)
    cos, sin = torch.randn(2, 2, 1, 5, 6)
    first, second, rest = x[..., :6], x[..., 6:12], x[..., 12:]
    tables = torch.cat((cos, cos), -1), torch.cat((sin, -sin), -1)
    assert_same_gradients(
        rotate(x, *tables),
        torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1),
        [x],
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gated_activation_equals_its_product(name):
    gate, up = (
        torch.randn(2, 5, 9, requires_grad=True),
        torch.randn(2, 5, 9, requires_grad=True),
    )
    assert_same_gradients(
        _Gated.apply(gate, up, ACTIVATIONS[name]), ACTIVATIONS[name](gate) * up, [gate, up]
    )
