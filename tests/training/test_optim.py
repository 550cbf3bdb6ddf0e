"""Optimizers: stochastic rounding of bf16 weights, rates and decay by kind of parameter, resuming,
stepping in backward."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import rows_of, script
from lightning_fabric import Fabric
from parity import ROWS, draw
from safetensors.torch import load_file
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW

import litft
from litft.args import (
    AdapterV2Args,
    DataArgs,
    EvalArgs,
    FullFinetuneArgs,
    LoRAArgs,
    TrainArgs,
)
from litft.commands.finetune import prepare_run
from litft.methods import AdapterV2, Full, LoRA
from litft.model.norm import Norm
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.training.memory.allocations import AllocationTracker
from litft.training.memory.probe import MemoryProbe
from litft.training.optimizers import rounded
from litft.training.optimizers.adafactor import Adafactor
from litft.training.optimizers.make import (
    ELEMENTWISE,
    OPTIMIZERS,
    ChainedOptimizer,
    averaged_weights,
    is_hidden,
    make_optimizer,
    set_learning_rate,
)
from litft.training.optimizers.rounded import (
    FP32_BYTES,
    ROUNDING_BYTES,
    StochasticRounding,
    stochastically_rounded,
)
from litft.training.output import run_checkpoints

TOKENS = draw(2, 17, seed=4)
PROGRESS = {"identity": {}, "samples": 0, "elapsed": 0.0}


@pytest.fixture(scope="module")
def folder(make_model):
    """A Llama whose weights are exact in bf16, wide enough for averages over a matrix."""
    from transformers import LlamaConfig

    model, folder = make_model(
        LlamaConfig, hidden_size=128, intermediate_size=160, num_hidden_layers=2
    )
    model.bfloat16().float().save_pretrained(folder)
    return folder


def displacement(folder, precision, make=make_optimizer):
    """Return each matrix's change after 200 steps at 1e-6, trained as `finetune/full.py` trains
    it."""
    source, method = resolve(folder), Full(FullFinetuneArgs())
    model = base_model(source, method.storage(precision))
    method.attach(model)
    method.set_compute_dtype(model, precision)
    parameters = method.parameters(model)
    before = {
        name: p.detach().float().clone() for name, p in parameters.items() if p.dim() == 2
    }
    optimizer = make(TrainArgs(), method, parameters)
    set_learning_rate(optimizer, 1e-6)
    torch.manual_seed(0)
    for _ in range(200):
        loss, count = model.train()(TOKENS[:, :-1], targets=TOKENS[:, 1:])
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: parameters[name].detach().float() - value for name, value in before.items()
    }


def projections(changes, expected):
    """Return each matrix's change along the fp32 run's change, as a fraction of it."""
    return {
        name: float((changes[name] * change).sum() / change.square().sum())
        for name, change in expected.items()
    }


@pytest.mark.slow
@pytest.mark.halved
def test_bf16_weights_lose_no_updates(folder):
    """Stochastic rounding and fp32 master weights lose no update; rounding to nearest loses most
    updates."""

    def plain(args, method, parameters):
        optimizer = torch.optim.AdamW(
            parameters.values(), betas=(0.9, 0.95), weight_decay=0.0
        )
        optimizer.param_groups[0]["factor"] = 1.0
        return optimizer

    expected = displacement(folder, "fp32")
    for precision in ("bf16", "bf16-true"):
        fractions = projections(displacement(folder, precision), expected)
        print(precision, min(fractions.values()), max(fractions.values()))
        assert all(0.95 <= fraction <= 1.05 for fraction in fractions.values()), fractions
    nearest_fractions = projections(displacement(folder, "bf16-true", plain), expected)
    print("nearest", min(nearest_fractions.values()), max(nearest_fractions.values()))
    assert all(abs(fraction) < 0.2 for fraction in nearest_fractions.values()), (
        nearest_fractions
    )


def test_stochastic_rounding_is_unbiased():
    value = torch.tensor([1.0 + 2**-9, -3.0 - 2**-10, 1e-30, 0.0, 65280.0 + 64])
    torch.manual_seed(0)
    drawn = torch.stack([stochastically_rounded(value) for _ in range(4000)]).double()
    for n, exact in enumerate(value.double()):
        neighbours = drawn[:, n].unique()
        assert len(neighbours) <= 2 and neighbours.min() <= exact <= neighbours.max()
        spread = float(neighbours.max() - neighbours.min())
        assert abs(float(drawn[:, n].mean() - exact)) <= 0.04 * spread + 1e-38


def test_stochastic_rounding_equals_adamw_for_fp32_weights():
    """fp32 weights are bit-identical to those of torch's AdamW."""
    weights = [torch.nn.Parameter(draw(8, 8, seed=1).float()) for _ in range(2)]
    groups = [{"params": [weights[1]], "factor": 1.0, "lr": 0.1}]
    optimizers = [
        torch.optim.AdamW([weights[0]], lr=0.1),
        StochasticRounding(groups, torch.optim.AdamW, in_slices=False),
    ]
    for _ in range(5):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            (weight**2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*weights)
    assert {tensor.dtype for tensor in optimizers[1].state[weights[1]].values()} == {
        torch.float32
    }


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_weight_that_is_stepped_in_slices_equals_one_stepped_whole(monkeypatch, name):
    """Both the weight and the optimizer's state after three steps."""
    monkeypatch.setattr(rounded, "SLICE", 64)

    def learner(in_slices):
        weight = torch.nn.Parameter(draw(8, 40, seed=1).float())
        group = {"params": [weight], "factor": 1.0, "lr": 0.1, "weight_decay": 0.1}
        optimizer = StochasticRounding([group], OPTIMIZERS[name].make, in_slices)
        return weight, optimizer

    def step(weight, optimizer, number):
        weight.grad = draw(8, 40, seed=10 + number).float()
        optimizer.step()

    whole, of_whole = learner(in_slices=False)
    sliced, of_slices = learner(in_slices=True)
    for number in range(3):
        step(whole, of_whole, number)
        step(sliced, of_slices, number)
    assert torch.equal(whole, sliced)
    whole_state = of_whole.state[whole]
    sliced_state = of_slices.state[sliced]
    assert whole_state.keys() == sliced_state.keys()
    for kind, value in whole_state.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(sliced_state[kind])), (
            kind
        )


def test_rates_and_decay_by_kind(tiny):
    source, method = resolve(tiny), LoRA(LoRAArgs(lr_ratio=16.0, dora=True))
    method.select_targets(source.meta_model(), source.adapter_rules)
    model = base_model(source)
    method.attach(model)
    parameters = method.parameters(model)
    optimizer = make_optimizer(TrainArgs(weight_decay=0.1), method, parameters)
    set_learning_rate(optimizer, 1e-3)
    names = {id(p): name for name, p in parameters.items()}
    group_settings = {
        names[id(p)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    expected = {"lora_a": (1e-3, 0.1), "lora_b": (1.6e-2, 0.1), "lora_m": (1e-3, 0.0)}
    assert group_settings == {
        name: pytest.approx(expected[name.rpartition(".")[2]]) for name in parameters
    }


def test_vectors_of_stacked_experts_do_not_decay(make_model):
    _, folder = make_model(
        transformers.Qwen3MoeConfig, **ROWS["qwen3_moe"][1]["renormalized"]
    )
    source, method = resolve(folder), AdapterV2(AdapterV2Args())
    method.select_targets(source.meta_model(), source.adapter_rules)
    model = base_model(source)
    method.attach(model)
    parameters = method.parameters(model)
    assert any(
        p.dim() == 2 for name, p in parameters.items() if name.endswith(".adapter_scale")
    )
    optimizer = make_optimizer(TrainArgs(weight_decay=0.1), method, parameters)
    decayed = {
        id(p)
        for group in optimizer.param_groups
        for p in group["params"]
        if group["weight_decay"]
    }
    assert {
        name.rpartition(".")[2] for name, p in parameters.items() if id(p) in decayed
    } == {"adaption_prompt"}


@pytest.mark.parametrize(
    "family, variation",
    [("cohere", "q/k norms, biases"), ("stablelm", "q/k norms, biases")],
)
def test_norm_weights_with_two_dimensions_do_not_decay(make_model, family, variation):
    """Norm weights per head have two dimensions, but do not decay and are not stepped by Muon."""
    kind, variations = ROWS[family]
    model, method, parameters = trainable(
        make_model(getattr(transformers, kind), **variations[variation])[1]
    )
    norms = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, Norm)
    }
    norms &= parameters.keys()
    assert any(parameters[name].dim() == 2 for name in norms)
    optimizer = make_optimizer(TrainArgs(weight_decay=0.1), method, parameters)
    decayed = {
        id(p)
        for group in optimizer.param_groups
        for p in group["params"]
        if group["weight_decay"]
    }
    assert {
        name
        for name, p in parameters.items()
        if id(p) not in decayed and not name.endswith("bias")
    } == norms
    assert not any(is_hidden(name, parameters[name]) for name in norms)


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3n_text", "lfm2", "qwen3_next"])
def test_muon_steps_no_filter_of_a_convolution(make_model, family):
    """A convolution with a filter for each channel multiplies no vector of activations. Its weight
    has two dimensions here, and three in transformers, which torch's Muon refuses."""
    kind, variations = ROWS[family]
    values = next(iter(variations.values()))
    model, _, parameters = trainable(make_model(getattr(transformers, kind), **values)[1])
    linears = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            linears.add(f"{name}.weight")
    hidden = {name for name, parameter in parameters.items() if is_hidden(name, parameter)}
    assert hidden
    assert hidden <= linears


def trainable(folder, precision="fp32"):
    """Return a model, its method and its parameters, as `finetune/full.py` trains them."""
    source, method = resolve(folder), Full(FullFinetuneArgs())
    model = base_model(source, method.storage(precision))
    method.attach(model)
    method.set_compute_dtype(model, precision)
    return model, method, method.parameters(model)


def optimizer_of(name, method, parameters, **settings):
    schedule = "constant" if name == "schedule_free" else "cosine"
    return make_optimizer(
        TrainArgs(optimizer=name, lr_schedule=schedule, **settings), method, parameters
    )


def train_steps(model, optimizer, count, first=0, rate=1e-3):
    """Train for `count` steps and return their losses."""
    losses = []
    for number in range(first, first + count):
        torch.manual_seed(number)
        tokens = draw(2, 17, seed=number % 2)
        loss, targets = model.train()(tokens[:, :-1], targets=tokens[:, 1:])
        (loss / targets).backward()
        set_learning_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss / targets))
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(tiny, name):
    model, method, parameters = trainable(tiny)
    rate = {"adafactor": 1e-1, "sgd": 1e-2}.get(name, 2e-3)
    losses = train_steps(model, optimizer_of(name, method, parameters), 30, rate=rate)
    assert sum(losses[-4:]) / 4 < losses[0] - 0.3, losses


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"adafactor", "sgd"}))
def test_moments_have_the_given_settings(tiny, name):
    """With constant gradients, only the given rates and eps lead to other weights; AdamW's equal
    torch's own."""
    settings = {"betas": [0.5, 0.6]} | ({} if name == "lion" else {"eps": 0.1})

    def trained(make) -> dict[str, torch.Tensor]:
        _, method, parameters = trainable(tiny)
        optimizer = make(method, parameters)
        for scale in (1.0, -3.0, 0.5):
            for p in parameters.values():
                p.grad = torch.full_like(p, scale)
            optimizer.step()
        return {key: p.detach() for key, p in parameters.items()}

    def with_settings(**given):
        return trained(
            lambda method, parameters: optimizer_of(
                name, method, parameters, learning_rate=0.1, **given
            )
        )

    default, actual = with_settings(), with_settings(**settings)
    has_moments = [
        key for key in default if name != "muon" or not is_hidden(key, default[key])
    ]
    assert all(not torch.equal(default[key], actual[key]) for key in has_moments)
    if name == "adamw":
        expected = trained(
            lambda _, parameters: AdamW(
                parameters.values(), lr=0.1, weight_decay=0.0, **settings
            )
        )
        for key, p in expected.items():
            torch.testing.assert_close(actual[key], p, rtol=1e-6, atol=1e-7, msg=key)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"betas": [0.9]}, "--train.betas 0.9: expected two numbers"),
        ({"betas": [0.9, 1.0]}, "--train.betas 0.9,1.0: expected two numbers"),
        (
            {"optimizer": "sgd", "betas": [0.9, 0.99]},
            "--train.betas: --train.optimizer sgd has no such setting",
        ),
        (
            {"optimizer": "lion", "eps": 1e-6},
            "--train.eps: --train.optimizer lion has no such setting",
        ),
        ({"warmup_steps": -1}, "--train.warmup_steps -1"),
    ],
)
def test_impossible_moments_are_refused(values, message):
    assert any(problem.startswith(message) for problem in TrainArgs(**values).problems())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_decoupled_and_of_matrices(tiny, name):
    """Without a gradient, each step shrinks a matrix by rate times decay and leaves a vector
    unchanged: no momentum."""
    _, method, parameters = trainable(tiny)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = optimizer_of(name, method, parameters, weight_decay=0.5)
    set_learning_rate(optimizer, 0.1)
    num_steps = 1 if name == "schedule_free" else 2  # its second step involves an average
    for _ in range(num_steps):
        for p in parameters.values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for key, p in parameters.items():
        expected = before[key] * (0.95**num_steps if p.dim() > 1 else 1.0)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-7, msg=key)


def test_adafactor_equals_torchs(tiny):
    """It computes with tensors what torch reads to the host; the state in a checkpoint is the
    same."""
    results = []
    for make in (Adafactor, torch.optim.Adafactor):
        model, _, parameters = trainable(tiny)
        optimizer = make(
            [{"params": [*parameters.values()], "factor": 1.0}], weight_decay=0.1
        )
        train_steps(model, optimizer, 4, rate=3e-2)
        states = [
            value
            for state in optimizer.state_dict()["state"].values()
            for value in state.items()
        ]
        results.append([*((name, p.detach()) for name, p in parameters.items()), *states])
    for (name, value), (expected_name, expected) in zip(*results, strict=True):
        assert name == expected_name
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_lion_matches_its_paper(tiny):
    """arXiv 2302.06675: the update is the sign of an average of momentum and gradient; the momentum
    is another average."""
    _, method, parameters = trainable(tiny)
    optimizer = optimizer_of("lion", method, parameters)
    p = parameters["blocks.0.mlp.up_proj.weight"]
    expected, momentum = p.detach().clone(), torch.zeros_like(p)
    for number in range(4):
        grad = draw(*p.shape, seed=number).float() - 256
        p.grad = grad.clone()
        set_learning_rate(optimizer, 1e-2)
        optimizer.step()
        expected -= 1e-2 * (0.9 * momentum + 0.1 * grad).sign()
        momentum = 0.99 * momentum + 0.01 * grad
    torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-6)


def test_sgd_has_momentum(tiny):
    _, method, parameters = trainable(tiny)
    optimizer = optimizer_of("sgd", method, parameters)
    p = parameters["norm.weight"]
    before = p.detach().clone()
    for _ in range(2):
        p.grad = torch.ones_like(p)
        set_learning_rate(optimizer, 0.1)
        optimizer.step()
    torch.testing.assert_close(p.detach(), before - 0.1 * (1 + 1.9))


def test_muon_steps_hidden_matrices_and_adamw_the_rest(tiny):
    model, method, parameters = trainable(tiny)
    optimizer = optimizer_of("muon", method, parameters)
    train_steps(model, optimizer, 1)
    assert isinstance(optimizer, ChainedOptimizer)
    for name, p in parameters.items():
        kinds = set(optimizer.state[p])
        assert kinds == (
            {"momentum_buffer"} if is_hidden(name, p) else {"step", "exp_avg", "exp_avg_sq"}
        ), name
    hidden = {name for name, p in parameters.items() if is_hidden(name, p)}
    assert (
        "embed.weight" not in hidden
        and "lm_head.weight" not in hidden
        and "blocks.0.attention.q_proj.weight" in hidden
    )


def test_8_bit_moments_follow_32_bit_moments(tiny):
    """The cosine similarity of each matrix's change after 30 steps is above 0.98."""
    changes = {}
    for name in ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"):
        model, method, parameters = trainable(tiny)
        before = {key: p.detach().clone() for key, p in parameters.items()}
        train_steps(model, optimizer_of(name, method, parameters), 30)
        changes[name] = {
            key: parameters[key].detach() - value for key, value in before.items()
        }
    for name, bound in (
        ("paged_adamw", 0.99999),
        ("adamw_8bit", 0.98),
        ("paged_adamw_8bit", 0.98),
    ):
        for key, change in changes["adamw"].items():
            assert (
                torch.cosine_similarity(
                    changes[name][key].flatten(), change.flatten(), dim=0
                )
                > bound
            ), (name, key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plan_counts_the_optimizer_state(tiny, name):
    """Counters and bitsandbytes' two tables of 256 numbers are not counted."""
    model, method, parameters = trainable(tiny)
    optimizer = optimizer_of(name, method, parameters)
    train_steps(model, optimizer, 1)
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for p in parameters.values()
        for kind, tensor in optimizer.state[p].items()
        if kind != "step"
        and not kind.startswith("qmap")
        and isinstance(tensor, torch.Tensor)
    }
    expected = sum(OPTIMIZERS[name].state_bytes(key, p) for key, p in parameters.items())
    assert expected == pytest.approx(sum(tensors.values()), rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_identically(tiny, tmp_path, name, precision):
    if (name, precision) == ("schedule_free", "bf16-true"):
        pytest.skip("refused")
    fabric = Fabric(accelerator="cpu", devices=1)
    model, method, parameters = trainable(tiny, precision)
    model, optimizer = fabric.setup(
        model, optimizer_of(name, method, parameters, weight_decay=0.1)
    )
    losses = train_steps(model, optimizer, 3)
    run_checkpoints.Saver(tmp_path, True, None).begin(
        3, parameters, optimizer, PROGRESS, lambda: None, in_background=False
    )
    losses += train_steps(model, optimizer, 3, first=3)
    resumed_model, method, restored = trainable(tiny, precision)
    resumed_optimizer = optimizer_of(name, method, restored, weight_decay=0.1)
    progress, damaged = run_checkpoints.restore_newest(
        tmp_path, {}, restored, resumed_optimizer
    )
    assert progress["step"] == 3 and not damaged
    resumed_model, resumed_optimizer = fabric.setup(resumed_model, resumed_optimizer)
    assert train_steps(resumed_model, resumed_optimizer, 3, first=3) == losses[3:]
    assert all(torch.equal(restored[key], value) for key, value in parameters.items())
    for key, p in parameters.items():
        for kind, value in optimizer.state[p].items():
            same = (
                torch.equal(value, resumed_optimizer.state[restored[key]][kind])
                if isinstance(value, torch.Tensor)
                else None
            )
            assert (
                value == resumed_optimizer.state[restored[key]][kind]
                if same is None
                else same
            ), (key, kind)


@pytest.fixture
def mesh(tmp_path):
    """A device mesh of a single process."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_sharded_parameter_resumes_bit_identically(mesh):
    """bitsandbytes counts steps in a Python number, which must be restored too."""

    def make_learner():
        torch.manual_seed(0)
        weight = torch.nn.Parameter(distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)]))
        group = {
            "params": [weight],
            "lr": 0.01,
            "factor": 1.0,
            "weight_decay": 0.0,
            "hidden": True,
        }
        make = OPTIMIZERS["paged_adamw"].make
        return weight, StochasticRounding([group], make, in_slices=False)

    def step(weight, optimizer, number):
        torch.manual_seed(number)
        weight.grad = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])
        optimizer.step()

    original, optimizer = make_learner()
    for number in range(5):
        step(original, optimizer, number)
    restored, restored_optimizer = make_learner()
    run_checkpoints._init_state(restored_optimizer)
    with torch.no_grad():
        restored.copy_(original)
        for kind, value in optimizer.state[original].items():
            if isinstance(value, torch.Tensor):
                restored_optimizer.state[restored][kind].copy_(value)
    run_checkpoints._set_scalars(
        run_checkpoints._scalars({"w": original}, optimizer),
        {"w": restored},
        restored_optimizer,
    )
    for weight, its_optimizer in ((original, optimizer), (restored, restored_optimizer)):
        step(weight, its_optimizer, 5)
    assert torch.equal(original.full_tensor(), restored.full_tensor())


def test_a_background_checkpoint_is_a_copy(tiny, tmp_path):
    """It is written while training continues, and later steps do not change it."""
    model, method, parameters = trainable(tiny)
    optimizer, saved_steps = optimizer_of("adamw", method, parameters), []
    train_steps(model, optimizer, 2)
    snapshot = {name: p.detach().clone() for name, p in parameters.items()}
    saver = run_checkpoints.Saver(tmp_path, True, None)
    saver.begin(2, parameters, optimizer, PROGRESS, lambda: saved_steps.append(2))
    assert run_checkpoints.newest(tmp_path) is None
    train_steps(model, optimizer, 2, first=2)
    saver.finish()
    assert (
        run_checkpoints.newest(tmp_path).name == "step-000002"
        and saved_steps == [2]
        and saver.saved_step == 2
    )
    saved = run_checkpoints.read_parameters(run_checkpoints.newest(tmp_path))
    assert all(torch.equal(saved[name], value) for name, value in snapshot.items())
    assert not any(torch.equal(saved[name], p) for name, p in parameters.items())
    restored_optimizer = optimizer_of("adamw", method, parameters)
    run_checkpoints.restore_newest(tmp_path, {}, parameters, restored_optimizer)
    assert all(torch.equal(p, snapshot[name]) for name, p in parameters.items())


def test_schedule_free_keeps_an_average(tiny, tmp_path):
    """Reading the average changes no weight, and a checkpoint stores it: x = (1 - 1/b) z + y/b."""
    model, method, parameters = trainable(tiny)
    optimizer = optimizer_of("schedule_free", method, parameters)
    train_steps(model, optimizer, 5)
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    with averaged_weights(optimizer):
        averages = {name: p.detach().clone() for name, p in parameters.items()}
    for name, p in parameters.items():
        assert torch.equal(p, weights[name])
        z = optimizer.state[p]["z"]
        torch.testing.assert_close(
            averages[name], (1 - 1 / 0.9) * z + weights[name] / 0.9, rtol=1e-5, atol=1e-6
        )
    assert not torch.equal(averages["embed.weight"], weights["embed.weight"])
    run_checkpoints.Saver(tmp_path, True, None).begin(
        5, parameters, optimizer, PROGRESS, lambda: None, in_background=False
    )
    saved = run_checkpoints.read_parameters(run_checkpoints.newest(tmp_path))
    assert all(torch.equal(saved[name], value) for name, value in averages.items())


def test_schedule_free_needs_fp32_weights(tiny):
    _, method, parameters = trainable(tiny, "bf16-true")
    with pytest.raises(ValueError, match="schedule_free needs fp32 weights"):
        optimizer_of("schedule_free", method, parameters)


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
@pytest.mark.halved
def test_stepping_in_the_backward_pass_equals_stepping_after_it(
    tiny, examples, tmp_path, precision
):
    """fp32 weights are bit-identical, and losses and gradient norms are equal."""
    rows = {}
    for name, flags in (("after", []), ("within", ["--train.optimizer_in_backward"])):
        out = tmp_path / name
        script(
            "finetune/full.py", "--checkpoint_dir", tiny, "--data.path", examples, "--out_dir", out,
            "--precision", precision, "--train.max_steps", "3", "--train.micro_batch_size", "16",
            "--train.max_grad_norm", "0", "--train.global_batch_size", "8", *flags, cwd=tmp_path,
        )  # fmt: skip
        rows[name] = rows_of(out)
        tensors = load_file(out / "final" / "model.safetensors")
        rows[name + " weights"] = tensors
    for a, b in zip(rows["after"], rows["within"], strict=True):
        for column in {"loss", "grad_norm"} & a.keys():
            assert a[column] == pytest.approx(
                b[column], rel=1e-5 if precision == "fp32" else 5e-2
            )
    if precision == "fp32":
        for name, tensor in rows["after weights"].items():
            assert torch.equal(tensor, rows["within weights"][name]), name


def test_conflicts_with_optimizer_in_backward_are_reported(tiny, examples, tmp_path):
    train = TrainArgs(optimizer_in_backward=True, skip_nan=True)
    problems = "\n".join(
        FullFinetuneArgs(
            checkpoint_dir="x", data=DataArgs(path=["y"]), devices=2, train=train
        ).problems()
    )
    for word in ("add --train.max_grad_norm 0", "add --train.skip_nan false", "2 devices"):
        assert word in problems
    done = script(
        "finetune/full.py", "--checkpoint_dir", tiny, "--data.path", examples, "--out_dir", tmp_path / "x", "--dry_run",
        "--train.max_steps", "1", "--train.max_grad_norm", "0", "--train.optimizer_in_backward", "--data.packing", "false",
        cwd=tmp_path, code=2,
    )  # fmt: skip
    assert "the 16 examples of step 1 are several micro-batches" in done.stderr


def in_backward(tiny, path, **train):
    """Arguments of a run that steps each weight in the backward pass."""
    settings = dict(
        optimizer_in_backward=True,
        max_grad_norm=0.0,
        micro_batch_size=1,
        global_batch_size=4,
    )
    return FullFinetuneArgs(
        checkpoint_dir=str(tiny),
        data=DataArgs(path=[str(path)], val_fraction=0.0),
        train=TrainArgs(**settings | train),
        eval=EvalArgs(max_new_tokens=0),
    )


def test_optimizer_in_backward_needs_one_micro_batch_in_every_step(tiny, tmp_path):
    """One of 60 steps has a long example: its weights would be stepped twice."""
    records = [{"text": "once upon a time " * 90 if n == 7 else f"{n}"} for n in range(240)]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(records))
    args = next(
        args
        for seed in range(99)
        if step_of_longest_example(args := replace(in_backward(tiny, path), seed=seed)) > 30
    )
    step = step_of_longest_example(args)
    with pytest.raises(
        ValueError, match=f"the 4 examples of step {step + 1} are several micro-batches"
    ):
        prepare_run(args)
    prepare_run(replace(args, train=replace(args.train, max_steps=step)))


def step_of_longest_example(args):
    """Return the step that contains the longest example."""
    without_flag = replace(args, train=replace(args.train, optimizer_in_backward=False))
    schedule = prepare_run(without_flag).schedule
    longest = int(schedule.data.train.lengths.argmax())
    return next(
        step for step in range(schedule.steps) if longest in schedule.step_indices(step)
    )


def test_the_memory_probe_discards_gradients(tiny, examples, tmp_path, monkeypatch):
    """Otherwise a model that fits only without stored gradients would be refused.

    The probe steps no weight.
    """
    gradients_discarded, probe = [], MemoryProbe._try_largest

    def checked_probe(self, model, optimizer, resumed):
        parameters = self.network.trained.values()
        before = [parameter.detach().clone() for parameter in parameters]
        probe(self, model, optimizer, resumed)
        gradients_discarded.append(all(parameter.grad is None for parameter in parameters))
        assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))

    monkeypatch.setattr(MemoryProbe, "_try_largest", checked_probe)
    args = in_backward(tiny, examples, micro_batch_size=16, max_steps=1)
    litft.finetune(replace(args, out_dir=str(tmp_path / "run")))
    assert gradients_discarded == [True]


@pytest.mark.parametrize("discards", [False, True])
@pytest.mark.parametrize(
    "optimizer,slices,planned",
    [
        ("adamw", 1, FP32_BYTES + ROUNDING_BYTES),
        ("adamw", 16, (FP32_BYTES + ROUNDING_BYTES) / 16),
        # stepped whole, but rounded in slices
        ("paged_adamw", 16, FP32_BYTES + ROUNDING_BYTES / 16),
    ],
)
def test_the_memory_probe_needs_as_much_as_a_bf16_step(
    monkeypatch, optimizer, slices, planned, discards
):
    """Both need the same memory in addition to the gradient and the optimizer state of a weight."""
    monkeypatch.setattr(rounded, "SLICE", 512 * 256 // slices)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(512, 256, dtype=torch.bfloat16))
        args = TrainArgs(optimizer_in_backward=True, optimizer=optimizer)
        optimizer = make_optimizer(args, Full(FullFinetuneArgs()), {"weight": weight})
        with optimizer.stepping():
            weight.sum().backward()  # the first step makes the state
        with (
            AllocationTracker() as tracker,
            optimizer.discarding() if discards else optimizer.stepping(),
        ):
            weight.sum().backward()
    # and 2 of the gradient
    assert tracker.peak / weight.numel() == pytest.approx(planned + 2, rel=0.01)
