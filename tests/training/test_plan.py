"""The plan of a run: FLOPs against closed forms, memory against torch's MemTracker, peak FLOP/s of
chips by name."""

import random
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import plan_pairs
import pytest
import torch
from conftest import ENV, config_folder, script
from tracked_memory import tracked_peak
from transformers import Qwen3MoeConfig

import litft.training.planned_run
from litft.args import (
    AdapterFinetuneArgs,
    AdapterV2FinetuneArgs,
    DataArgs,
    FullFinetuneArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    PlanArgs,
    TrainArgs,
)
from litft.commands.plan import (
    STEP,
    longest_row,
    model_and_method,
    planner,
    print_longest,
    within_budget,
)
from litft.data.dataset import load_data
from litft.data.sample import Sample
from litft.methods import LoRA, method_of
from litft.model.quantization import QuantizedLinear
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.training.memory.activations import Shape
from litft.training.memory.flops import Flops, chip_peak_flops, peak_flops
from litft.training.memory.plan import USABLE_FRACTION, predict
from litft.training.memory_saving import activation_checkpointing
from litft.training.memory_saving.activation_checkpointing import OF_BLOCKS
from litft.training.optimizers.make import OPTIMIZERS
from litft.training.optimizers.rounded import FP32_BYTES, ROUNDING_BYTES
from litft.training.planned_run import plan_run
from litft.training.run_setup import resolve_setup
from litft.training.schedule import Schedule


def test_flops_of_a_tiny_llama(tiny):
    """Per weight and token: two forward, two for the input gradient, two more for the gradient of a
    trained weight."""
    source = resolve(tiny)
    model, method = base_model(source), LoRA(LoRAArgs(r=4))
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    tokens = torch.zeros(10, dtype=torch.int64)
    targets = torch.tensor([-100] * 7 + [1, 2, 3])
    linears = 3 * (32 * 32 * 2 + 32 * 16 * 2 + 32 * 56 * 3)
    factors = 3 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 56))
    pairs = 10 * 11 // 2 * 3  # query-key pairs in three layers
    expected = 10 * (4 * linears + 6 * factors) + 3 * 4 * 32 * 512 + pairs * 12 * 32
    assert Flops(model)([Sample(tokens, targets)]) == expected


def test_flops_of_experts(make_model):
    """Each token passes through two of five experts; the router scores all five."""
    values = dict(
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=8,
        num_hidden_layers=1,
    )
    source = resolve(make_model(Qwen3MoeConfig, **values)[1])
    model, method = base_model(source), LoRA(LoRAArgs(r=4))
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    linears = 32 * 32 * 2 + 32 * 16 * 2 + 32 * 5 + 2 * 3 * 32 * 24
    factors = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 2 * 3 * (32 + 24))
    expected = 4 * linears + 6 * factors + 4 * 32 * 96 + 12 * 32
    assert (
        Flops(model)(
            [Sample(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))]
        )
        == expected
    )


@pytest.mark.parametrize(
    "name, bf16",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA L40S", 362.05),
        ("RTX4090", 165.2),
        ("rtx-4090", 165.2),
        ("4090", 165.2),
        ("NVIDIA GeForce RTX 4060 Ti", None),
        ("RTX 4090 Laptop GPU", None),
        ("RTX 4070 Ti SUPER", None),
        ("RTX 4090 D", None),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_chips_by_the_names_that_torch_reports_and_people_type(name, bf16):
    assert chip_peak_flops(name, "bf16") == (bf16 and bf16 * 1e12)


def test_the_peak_of_a_cpu_is_measured():
    assert 1e9 < peak_flops(torch.device("cpu"), "fp32") < 1e14


# ---- memory
# -------------------------------------------------------------------------------------------------

LORA, DORA = LoRAFinetuneArgs(), LoRAFinetuneArgs(lora=LoRAArgs(dora=True))
DROPOUT = LoRAFinetuneArgs(lora=LoRAArgs(dropout=0.1, targets=["q_proj", "v_proj"]))
NORMS = LoRAFinetuneArgs(lora=LoRAArgs(modules_to_save=["norm"]))
ATTENTION = LoRAFinetuneArgs(lora=LoRAArgs(targets=["q_proj"]))
HEAD = LoRAFinetuneArgs(lora=LoRAArgs(targets=["lm_head", "q_proj"]))
# model, number of its layers, method, precision, micro-batch (rows, tokens, whether a step has
# several)
CASES = {
    "LoRA, fp32": ("smollm2-135m", 2, LORA, "fp32", Shape(1, 1024)),
    "LoRA, two chunks of logits": ("smollm2-135m", 2, LORA, "bf16", Shape(1, 2048, True)),
    "full, fp32": ("smollm2-135m", 2, FullFinetuneArgs(), "fp32", Shape(1, 2048)),
    "full, fp32 masters": (
        "smollm2-135m",
        2,
        FullFinetuneArgs(),
        "bf16",
        Shape(1, 2048, True),
    ),
    "full, bf16 weights": (
        "qwen3-0.6b",
        2,
        FullFinetuneArgs(),
        "bf16-true",
        Shape(1, 2048),
    ),
    "LoRA, fp16": ("smollm2-135m", 2, LORA, "fp16", Shape(1, 1024, True)),
    "full, fp16": ("smollm2-135m", 2, FullFinetuneArgs(), "fp16", Shape(1, 1024)),
    "LoRA on a Llama 3": ("llama-3-8b", 2, LORA, "bf16", Shape(1, 2048)),
    "LLaMA-Adapter": ("llama-3.2-1b", 4, AdapterFinetuneArgs(), "fp32", Shape(2, 512)),
    "LLaMA-Adapter v2": (
        "tinyllama-1.1b",
        4,
        AdapterV2FinetuneArgs(),
        "bf16",
        Shape(2, 1024),
    ),
    "soft caps and windows": ("gemma-2-2b", 2, LORA, "bf16", Shape(1, 1024)),
    "dropout, a parallel block": ("phi-2", 2, DROPOUT, "bf16", Shape(2, 1024)),
    "DoRA": ("pythia-6.9b", 2, DORA, "bf16", Shape(1, 1024)),
    "trained norms, accumulated": ("qwen2-7b", 2, NORMS, "bf16", Shape(4, 512, True)),
    "experts": ("qwen3-30b-a3b", 1, ATTENTION, "bf16", Shape(1, 1024)),
    "preferences": ("smollm2-135m", 2, LORA, "bf16", Shape(1, 2048, True, None, True)),
    "preferences, a trained head": (
        "smollm2-135m",
        2,
        FullFinetuneArgs(),
        "bf16",
        Shape(1, 2048, True, None, True),
    ),
    "preferences, an adapted head": (
        "llama-3.2-1b",
        2,
        HEAD,
        "bf16",
        Shape(1, 2048, False, None, True),
    ),
}


@pytest.fixture(autouse=True)
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


# together with RECOMPUTED, each method, precision and kind of model; the other cases are slow
QUICK = ("LoRA, two chunks of logits", "LoRA, fp16")
# of these, one of each kind; the rest runs once a week
SLOW = (
    "full, bf16 weights",
    "full, fp16",
    "LLaMA-Adapter v2",
    "experts",
    "preferences, an adapted head",
)
RECOMPUTED = (
    pytest.param("full, fp32 masters", "full", marks=pytest.mark.slow),
    ("dropout, a parallel block", "selective"),
    ("LoRA on a Llama 3", "elementwise"),
    ("LoRA on a Llama 3", "tiled"),
)


def marks_of(case: str) -> list[pytest.MarkDecorator]:
    if case in QUICK:
        return []
    return [pytest.mark.slow if case in SLOW else pytest.mark.weekly]


@pytest.mark.parametrize(
    "case, recomputed",
    [pytest.param(case, "none", marks=marks_of(case)) for case in CASES] + [*RECOMPUTED],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.halved
def test_planned_memory_matches_training_steps(monkeypatch, case, recomputed):
    """Within 3 % of MemTracker under fake tensors."""
    # several pieces of a row, and a shorter one
    monkeypatch.setattr(activation_checkpointing, "PIECE_TOKENS", 300)
    name, layers, args, precision, shape = CASES[case]
    source = resolve(config_folder(name))
    source = replace(
        source, config=replace(source.config, layers=source.config.layers[:layers])
    )
    method = method_of(args)
    method.select_targets(source.meta_model(), source.adapter_rules)
    planned = predict(
        source, method, precision, "none", shape, recomputed=recomputed, device="cpu"
    ).memory.peak
    expected = tracked_peak(source, method, args.train, precision, shape, recomputed)
    print(
        f"{case}, {recomputed}: {planned / 2**20:,.0f} MiB, {expected / 2**20:,.0f} tracked, "
        f"{planned / expected - 1:+.2%}"
    )
    assert planned == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    "args, recomputed",
    [
        pytest.param(LoRAFinetuneArgs(), "none", id="lora", marks=pytest.mark.slow),
        pytest.param(FullFinetuneArgs(), "full", id="full", marks=pytest.mark.slow),
        pytest.param(
            AdapterV2FinetuneArgs(), "none", id="adapter_v2", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.weekly
def test_planned_memory_matches_real_tensors(checkpoints, args, recomputed):
    """Within 3 % on a small model that is trained with real tensors."""
    source, method, shape = (
        resolve(checkpoints["stories15M"]),
        method_of(args),
        Shape(2, 200, True),
    )
    method.select_targets(source.meta_model(), source.adapter_rules)
    planned = predict(
        source, method, "fp32", "none", shape, recomputed=recomputed, device="cpu"
    ).memory.peak
    expected = tracked_peak(
        source, method, args.train, "fp32", shape, recomputed, nullcontext
    )
    print(
        f"{planned / 2**20:,.1f} MiB predicted, {expected / 2**20:,.1f} tracked, "
        f"{planned / expected - 1:+.2%}"
    )
    assert planned == pytest.approx(expected, rel=0.03)


# seeds of: few targets; a peak in the optimizer's step; a trained embedding; steps in the backward
# pass
PAIRS = (
    3,
    5,
    pytest.param(62, marks=pytest.mark.slow),
    pytest.param(190, marks=pytest.mark.weekly),
)


@pytest.mark.parametrize("number", PAIRS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("shared")
def test_memory_of_random_flags_and_data(number, tmp_path):
    """The plan is at most 1 % below and 5 % above two steps of the run."""
    planned, expected, description = plan_pairs.compare(
        *plan_pairs.random_pair(random.Random(number)), tmp_path
    )
    assert -0.01 <= planned / expected - 1 <= 0.05, description


# streams with steps in the backward pass, KDA, Mamba-2, a gated delta net
@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        1,
        pytest.param(5, marks=pytest.mark.weekly),
        pytest.param(9, marks=pytest.mark.weekly),
        14,
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("shared")
def test_memory_of_networks_of_other_kinds(number, tmp_path):
    """The plan is within 3 % of two steps of the run."""
    pair = plan_pairs.random_pair(random.Random(number), networks=True)
    planned, expected, description = plan_pairs.compare(*pair, tmp_path)
    assert planned == pytest.approx(expected, rel=0.03), description


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.weekly)])
@pytest.mark.filterwarnings("ignore")
def test_memory_of_large_micro_batches_of_a_parallel_block(layers):
    """Its norm saves no input.

    With a single block, which passes no gradient on, memory peaks in the forward pass.
    """
    source, args = (
        resolve(config_folder("phi-2")),
        LoRAFinetuneArgs(lora=LoRAArgs(targets=["q_proj"])),
    )
    source = replace(
        source, config=replace(source.config, layers=source.config.layers[:layers])
    )
    method, shape = method_of(args), Shape(4, 2048)
    method.select_targets(source.meta_model(), source.adapter_rules)
    planned = predict(source, method, "bf16", "none", shape, device="cpu").memory.peak
    assert planned == pytest.approx(
        tracked_peak(source, method, args.train, "bf16", shape), rel=0.005
    )


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.halved
def test_every_optimizer_in_backward_has_a_plan(tiny, optimizer):
    source, method = resolve(tiny), method_of(FullFinetuneArgs())
    method.select_targets(source.meta_model(), source.adapter_rules)
    for precision in ("fp32", "bf16-true") if optimizer != "schedule_free" else ("fp32",):
        values = dict(optimizer=optimizer, in_backward=True)
        assert (
            predict(source, method, precision, "none", Shape(1, 8), **values).memory.peak
            > 0
        )


LARGE = "llama-3-8b"


@pytest.mark.parametrize(
    "values",
    [
        dict(),
        dict(recomputed="full"),
        dict(recomputed="full", shards=2),
        dict(recomputed="full", cpu_offload="parameters"),
        dict(cpu_offload="activations"),
    ],
    ids=str,
)
def test_printed_parts_add_up_to_the_peak(values):
    """The parts add up at whichever moment of the step the peak occurs."""
    source, method = first_layers(2), method_of(LoRAFinetuneArgs())
    method.select_targets(source.meta_model(), source.adapter_rules)
    memory = predict(source, method, "bf16", "none", Shape(8, 512, True), **values).memory
    printed = re.search(r"^([\d.]+) GiB at its peak, .*\((.*?)\)", memory.line())
    parts = [float(part.rpartition(" ")[2]) for part in printed[2].split(", ")]
    assert sum(parts) == pytest.approx(float(printed[1]), abs=0.006 * len(parts))
    assert ("in host memory" in memory.line()) == bool(values.get("cpu_offload"))


def first_layers(layers):
    """Return a large model's source with only its first `layers` layers."""
    source = resolve(config_folder(LARGE))
    return replace(
        source, config=replace(source.config, layers=source.config.layers[:layers])
    )


@pytest.mark.parametrize("device, mlp_mib", [("cuda", 128), ("cpu", 112)])
def test_pinned_weights_take_powers_of_two(device, mlp_mib):
    """CUDA's host allocator rounds up: a matrix of 4,096 x 14,336 takes 128 MiB instead of 112."""
    source, method = first_layers(2), method_of(LoRAFinetuneArgs())
    method.select_targets(source.meta_model(), source.adapter_rules)
    settings = dict(cpu_offload="parameters", recomputed="full", device=device)
    memory = predict(source, method, "bf16", "none", Shape(1, 512), **settings).memory
    attention_mib = 32 + 8 + 8 + 32
    assert memory.host / 2**20 == pytest.approx(2 * (attention_mib + 3 * mlp_mib), abs=0.1)


def test_offloaded_memory_is_planned_on_the_host():
    source, method = first_layers(4), method_of(FullFinetuneArgs())
    cases = dict(
        stays={},
        paged=dict(optimizer="paged_adamw"),
        offloaded=dict(cpu_offload="activations"),
    )
    cases |= dict(sharded=dict(shards=2), waiting=dict(shards=2, cpu_offload="parameters"))
    plans = {
        name: predict(source, method, "bf16", "none", Shape(4, 512), **settings).memory
        for name, settings in cases.items()
    }
    assert (
        plans["stays"].host == 0
        and plans["paged"].optimizer == 0 < plans["stays"].optimizer == plans["paged"].host
    )
    # of four blocks; two of them are on the GPU
    assert plans["offloaded"].host == plans["stays"].activations
    assert plans["stays"].activations == pytest.approx(
        2 * plans["offloaded"].activations, rel=0.02
    )
    on_host, sharded = plans["waiting"], plans["sharded"]
    assert (on_host.weights, on_host.gradients, on_host.optimizer) == (0, 0, 0)
    assert on_host.host == sharded.weights + sharded.gradients + sharded.optimizer
    rounded = [
        predict(
            source, method, "bf16-true", "none", Shape(4, 512), shards=n
        ).memory.stepping
        for n in (1, 2)
    ]
    assert rounded[0] == 2 * rounded[1] > 0
    on_cpu = predict(
        source, method, "bf16", "none", Shape(4, 512), optimizer="paged_adamw", device="cpu"
    ).memory
    assert on_cpu.host == 0 < on_cpu.optimizer


def test_discarded_gradients_need_no_memory(tiny):
    source, method = resolve(tiny), method_of(FullFinetuneArgs())
    stored, discarded = (
        predict(source, method, "fp32", "none", Shape(1, 8), in_backward=in_backward).memory
        for in_backward in (False, True)
    )
    assert discarded.gradients == 0 and discarded.peak < stored.peak


def test_rounding_in_the_backward_pass_is_planned(tiny):
    """A bf16 weight is stepped as fp32 while its block's backward pass runs."""
    source, method = resolve(tiny), method_of(FullFinetuneArgs())
    memory = predict(
        source, method, "bf16-true", "none", Shape(1, 8), in_backward=True
    ).memory
    largest = max(parameter.numel() for parameter in source.meta_model().parameters())
    assert memory.backward >= (FP32_BYTES + ROUNDING_BYTES) * largest


def plan_script(cwd, *flags, code=0):
    command = [
        "scripts/plan.py",
        "--checkpoint_dir",
        config_folder("llama-3-8b"),
        "--max_seq_length",
        "2048",
    ]
    return script(*command, *flags, cwd=cwd, code=code)


@pytest.mark.slow
def test_the_longest_row_fits_and_a_longer_one_does_not(tiny, capsys):
    args = PlanArgs(checkpoint_dir=str(tiny), budget="96MiB", longest=True, quantize="nf4")
    print_longest(args)
    printed = capsys.readouterr().out
    longest = int(
        re.search(r"fits into 96MiB: ([\d,]+) tokens", printed)[1].replace(",", "")
    )
    assert "--quantize nf4 --train.cpu_offload activations" in printed
    assert "(the model reads at most 256)" in printed
    source, method = model_and_method(args)
    limit = USABLE_FRACTION * 96 * 2**20
    assert "--train.activation_checkpointing tiled" in printed
    peaks = []
    for tokens in (longest, longest + STEP):
        plan = planner(args, source, method, tokens)(1, "tiled", "nf4", "activations")
        peaks.append(plan.memory.peak)
    assert peaks[0] <= limit < peaks[1]
    with pytest.raises(ValueError, match="a row of 64 tokens needs"):
        print_longest(replace(args, budget="1MiB"))
    # a given way of recomputing is kept
    given = longest_row(replace(args, activation_checkpointing="full"))
    assert given.fit.recomputed == "full" and given.tokens < longest


@pytest.mark.slow
def test_no_longer_row_is_tried_than_asked_for(tiny):
    args = PlanArgs(checkpoint_dir=str(tiny), budget="78MiB", quantize="nf4")
    longest = longest_row(args).tokens
    assert longest_row(args, at_most=longest - 1).tokens == longest - 1
    assert longest_row(args, at_most=longest + 200).tokens == longest


@pytest.mark.slow
def test_a_budget_offloads_activations_where_nothing_else_fits(tiny):
    """Only their kind differs: the settings that were found before are still preferred."""
    args = PlanArgs(checkpoint_dir=str(tiny), budget="100MiB", max_seq_length=16384)
    source, method = model_and_method(args)
    make_plan = planner(args, source, method, 16384)
    without = min(make_plan(1, kind, "nf4", "none").memory.peak for kind in OF_BLOCKS)
    with_offload = min(
        make_plan(1, kind, "nf4", "activations").memory.peak for kind in OF_BLOCKS
    )
    assert with_offload < without
    between = (without + with_offload) // 2
    size = f"{between / USABLE_FRACTION / 2**20:.2f}MiB"
    args = replace(args, budget=size, quantize="nf4")
    assert within_budget(args, 16384, make_plan).cpu_offload == "activations"
    # another kind of recomputation than the one that was asked for is not tried
    full = make_plan(1, "full", "nf4", "activations").memory.peak
    size = f"{full / USABLE_FRACTION / 2**20 - 0.1:.2f}MiB"
    too_small = replace(args, budget=size)
    assert within_budget(too_small, 16384, make_plan).recomputed == "tiled"
    with pytest.raises(ValueError, match="this needs at least"):
        within_budget(replace(too_small, activation_checkpointing="full"), 16384, make_plan)
    # CUDA needs some of the memory, too
    tight = replace(args, budget=f"{with_offload / 2**20 + 0.1:.2f}MiB")
    with pytest.raises(ValueError, match="this needs at least"):
        within_budget(tight, 16384, make_plan)
    enough = replace(args, budget="1GiB")
    assert within_budget(enough, 16384, make_plan).cpu_offload == "none"


def test_what_the_longest_row_needs():
    problems = PlanArgs(checkpoint_dir="m", longest=True, max_seq_length=9).problems()
    assert "--longest needs --budget" in problems[0]
    assert "--max_seq_length: --longest finds the length" in problems[1]


@pytest.mark.weekly
def test_a_budget_selects_the_fastest_settings(tmp_path):
    """More memory buys weights on the device, then bf16, then no recomputation.

    A too small budget reports the minimum.
    """
    flags = {
        size: plan_script(tmp_path, "--budget", size).stdout.split("\n")[0]
        for size in ("6GiB", "9GiB", "80GiB")
    }
    assert flags["6GiB"].endswith(
        "--train.activation_checkpointing full --train.cpu_offload parameters"
    )
    assert flags["9GiB"].endswith("--train.activation_checkpointing full --quantize nf4")
    assert flags["80GiB"].endswith("--train.activation_checkpointing none")
    for size, line in flags.items():
        settings = dict(zip(*[iter(line.split(": ")[1].split())] * 2, strict=True))
        settings = {
            name.removeprefix("--train.").removeprefix("--"): value
            for name, value in settings.items()
        }
        stdout = plan_script(
            tmp_path,
            *(word for name, value in settings.items() for word in (f"--{name}", value)),
        ).stdout
        assert (
            float(re.search(r"memory: ([\d.]+) GiB", stdout)[1])
            <= 0.9 * float(size.removesuffix("GiB")) + 0.005
        )
    fixed = plan_script(
        tmp_path,
        "--budget",
        "20GiB",
        "--micro_batch_size",
        "4",
        "--activation_checkpointing",
        "full",
    )
    assert "micro_batch_size 4 --train.activation_checkpointing full" in fixed.stdout
    stderr = plan_script(tmp_path, "--budget", "3GiB", code=2).stderr
    assert "this needs at least" in stderr and "--train.cpu_offload parameters" in stderr
    assert (
        "expected a size such as 24GiB"
        in plan_script(tmp_path, "--budget", "lots", code=2).stderr
    )


@pytest.mark.weekly
def test_a_run_recomputes_as_little_as_its_memory_allows(tiny, examples, monkeypatch):
    """With `--train.micro_batch_size auto` it also takes as many rows as fit."""
    train = TrainArgs(micro_batch_size="auto", global_batch_size=32)
    args = LoRAFinetuneArgs(
        checkpoint_dir=str(tiny),
        data=DataArgs(path=[str(examples)], packing=False),
        train=train,
    )
    source = resolve(tiny)
    setup = resolve_setup(args, source)
    data = load_data(
        args.data, setup.tokenizer, source.config.vocab_size, source.config.max_positions
    )
    choices = []
    for available in (2**40, 10 * 2**20, 4 * 2**20, 1):
        monkeypatch.setattr(
            litft.training.planned_run,
            "device_memory",
            lambda device, processes, available=available: available,
        )
        run = plan_run(setup, Schedule(args, data, 1), torch.device("cpu"))
        choices.append((run.schedule.layout.rows, run.settings.recomputed))
        assert available == 1 or run.settings.plan.memory.peak <= 0.9 * available
    assert choices[0] == (32, "none") and choices[-1] == (1, "full")
    assert choices[0][0] > choices[1][0] > choices[2][0]


@pytest.mark.parametrize("kind", ["nf4", "nf4-dq", "int8"])
def test_weights_of_a_quantized_base(checkpoints, kind):
    """The plan has as many bytes as the loaded model."""
    source = resolve(checkpoints["demo"])
    method = method_of(LORA)
    method.select_targets(source.meta_model(), source.adapter_rules)
    memory = predict(source, method, "fp32", kind, Shape(1, 64)).memory
    model = base_model(source, "fp32", "cpu", kind)
    total = sum(
        {
            p.untyped_storage()._cdata: p.untyped_storage().nbytes()
            for p in model.parameters()
        }.values()
    )
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            state = module.quantized.state
            tensors = (
                [state]
                if torch.is_tensor(state)
                else [state.absmax, *([state.state2.absmax] if state.nested else [])]
            )
            total += sum(tensor.nbytes for tensor in tensors)
    factors = sum(p.numel() for p in factors_of(source, method)) * 4
    assert memory.weights - factors == pytest.approx(total, rel=0.01)


def test_a_trained_embedding_makes_the_blocks_save_activations(checkpoints):
    """The blocks save activations even if nothing in them is trained."""
    source, activations = resolve(checkpoints["demo"]), {}
    for targets in (["q_proj"], ["embed"], ["lm_head"]):
        method = method_of(LoRAFinetuneArgs(lora=LoRAArgs(targets=targets)))
        method.select_targets(source.meta_model(), source.adapter_rules)
        activations[targets[0]] = predict(
            source, method, "fp32", "none", Shape(1, 64)
        ).memory.activations
    assert (
        activations["embed"] > 0.8 * activations["q_proj"]
        and activations["lm_head"] < 0.1 * activations["q_proj"]
    )


def factors_of(source, method):
    return method.parameters(attached(source, method)).values()


def test_the_parameters_of_real_models_are_counted():
    """The counts equal those in the model cards and papers."""
    published_counts = {
        "llama-3-8b": 8_030_261_248,
        "qwen3-30b-a3b": 30_532_122_624,
        "phi-2": 2_779_683_840,
    }
    for name, count in published_counts.items():
        source, method = resolve(config_folder(name)), method_of(LORA)
        method.select_targets(source.meta_model(), source.adapter_rules)
        plan = predict(source, method, "bf16", "none", Shape(1, 128))
        assert plan.parameters == count
        assert plan.memory.weights == pytest.approx(2 * count + 4 * plan.trained, rel=1e-3)


def test_a_frozen_parameter_has_no_gradient_in_the_plan(tiny):
    source, method = resolve(tiny), method_of(LORA)
    method.select_targets(source.meta_model(), source.adapter_rules)
    unfrozen = predict(source, method, "fp32", "none", Shape(1, 64))
    method.frozen = {
        name
        for name in method.parameters(attached(source, method))
        if name.startswith("blocks.0.")
    }
    frozen = predict(source, method, "fp32", "none", Shape(1, 64))
    assert (
        frozen.trained == unfrozen.trained * 2 // 3
        and frozen.memory.gradients == unfrozen.memory.gradients * 2 // 3
    )
    assert frozen.memory.activations < unfrozen.memory.activations


def attached(source, method):
    model = source.meta_model()
    method.attach(model)
    return model


@pytest.mark.slow
def test_peak_memory_excludes_the_parent_process():
    """A parent of 1 GiB starts a child that needs a fifth of that."""
    child = (
        "import torch; from litft.distributed.devices import peak_memory; "
        "print(peak_memory(torch.device('cpu')))"
    )
    parent = (
        "import subprocess, sys; held = bytearray(b'x') * 2**30; subprocess.run([sys.executable, "
        f"'-c', {child!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], env=ENV, capture_output=True, text=True, check=True
    )
    assert 0.05 < float(done.stdout) < 0.7


@pytest.mark.slow
def test_the_plan_of_a_gpu_traces_its_kernels():
    """Soft-capped scores are stored whole on a GPU, chunk by chunk on a CPU; the loss takes 16
    times as many rows at once.

    7.20 GiB were measured with torch's CUDA allocator (torch 2.15, scripts/plan_accuracy.py).
    """
    source, method = resolve(config_folder("gemma-2-2b")), LoRA(LoRAArgs(r=8))
    method.select_targets(source.meta_model(), source.adapter_rules)
    on_gpu, on_cpu = (
        predict(
            source,
            method,
            "bf16",
            "none",
            Shape(1, 512),
            recomputed="none",
            device=device,
            compiled=False,
        ).memory.peak
        for device in ("cuda", "cpu")
    )
    assert on_gpu / 2**30 == pytest.approx(7.20, rel=0.01) and on_cpu < 0.99 * on_gpu


def test_blocks_that_save_nothing_are_planned_without_activations():
    """With LoRA in the last block alone, the blocks below save nothing, compiled or not."""
    source = resolve(config_folder("gemma-2-2b"))
    planned = []
    for targets in (["blocks.25.*"], ["all-linear"]):
        method = LoRA(LoRAArgs(targets=targets))
        method.select_targets(source.meta_model(), source.adapter_rules)
        planned.append(
            predict(
                source, method, "bf16", "none", Shape(1, 512), device="cuda", compiled=True
            ).memory
        )
    assert 0 < planned[0].activations < planned[1].activations / 10


def test_the_buffer_of_packed_attention_grows_with_its_documents():
    """FlashAttention's backward pass rounds each document up to 128 rows of 32 heads of 64 numbers
    and a sum, in fp32."""
    source, method = resolve(config_folder("llama-3.2-1b")), LoRA(LoRAArgs())
    method.select_targets(source.meta_model(), source.adapter_rules)
    backward = []
    for count in (None, 2048, 3072):
        shape = Shape(1, 8192, max_documents=count)
        plan = predict(source, method, "bf16", "none", shape, device="cuda", compiled=False)
        backward.append(plan.memory.backward)
    assert backward[2] - backward[1] == 1024 * 128 * 32 * (64 + 1) * 4
    # few documents need less than the MLP's backward pass
    assert backward[1] > backward[0]
