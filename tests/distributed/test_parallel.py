"""Several processes give the same losses and files as one with every strategy, and report the
failure of one of them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import conftest
import pytest
import torch
import transformers
from conftest import ENV, FORKS, ROOT, rows_of, script, write_records
from parity import ROWS
from safetensors.torch import load_file, save_file
from strategies import free_port, losses, torchrun_env

import litft.training.planned_run
from litft.args import DataArgs, FullFinetuneArgs, LoRAFinetuneArgs, PlanArgs, TrainArgs
from litft.args.finetune import apply_launcher
from litft.args.processes import cores
from litft.commands.finetune import prepare_run
from litft.commands.plan import plan_on_paper
from litft.data.dataset import load_data
from litft.distributed.devices import cgroup_limit, check_devices, device_memory
from litft.distributed.process_group import peer_failure
from litft.methods import method_of
from litft.model.placement import local_slices, placement
from litft.pretrained.folder import resolve
from litft.training.memory.activations import Shape
from litft.training.memory.communication import Cluster, communication_volume
from litft.training.memory.plan import predict
from litft.training.output import run_checkpoints
from litft.training.planned_run import plan_run
from litft.training.run_description import plan_lines
from litft.training.run_setup import resolve_setup
from litft.training.schedule import Schedule

FAST = {"ddp": ["lora nf4"], "fsdp": ["full none", "lora nf4"]}
REST = {  # with FAST and OTHERS, every supported combination of method, base and strategy
    "ddp": ["full none", "dora int8", "adapter int8", "adapter_v2 int8"],
    "fsdp": ["dora nf4", "adapter none"],
    # several micro-batches per step; the replicas all-reduce after the last one
    "hsdp": [
        "full none --train.micro_batch_size 1",
        "dora none",
        "adapter nf4",
        "adapter_v2 nf4",
    ],
}
OTHERS = [  # other options of a sharded run
    "full none --train.optimizer sgd --train.learning_rate 0.02",
    "full none --train.optimizer schedule_free --train.lr_schedule constant",
    "full none --train.activation_checkpointing full --train.freeze blocks.0.*",
    "full none --data.new_tokens <x>,<y>",
    "lora none --train.compile",
    "lora none --data.packing true --lora.modules_to_save embed,lm_head",
    "lora nf4-dq --lora.r 8 --lora.dora --lora.init pissa",
    "lora int8",
    "adapter_v2 none --data.new_tokens <x>,<y>",
]


def tensors(run):
    """Return the tensors of a finished run."""
    (path,) = (run / "final").glob("*model.safetensors")
    return load_file(path)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Examples that all differ: the processes' parts of what is held out have other losses and
    answers of other lengths."""
    records = [
        {
            "instruction": f"Say {n}",
            "input": "",
            "output": "once upon a time " * (n % 5 * 3 + 1),
        }
        for n in range(30)
    ]
    return write_records(tmp_path_factory.mktemp("data") / "examples.json", records)


@pytest.fixture(scope="module")
def single_runs(tiny, examples, tmp_path_factory):
    """A function that runs cases in one process, each only once, and returns their losses and their
    folder."""
    results, folder = {}, tmp_path_factory.mktemp("alone")

    def runs(case_names):
        if missing := [case for case in case_names if case not in results]:
            results.update(losses(tiny, examples, folder, "single", missing))
        return results, folder

    return runs


def compare(tiny, examples, folder, strategy, case_names, single_runs):
    """Compare losses, validation losses and final weights of several processes with those of
    one."""
    expected, single_folder = single_runs(case_names)
    results = losses(tiny, examples, folder, strategy, case_names)
    for case, values in results.items():
        assert expected[case]["loss"][0] - expected[case]["loss"][-1] > 0.15, case
        for name in ("loss", "val_loss", "num_answers"):
            assert values[name] == pytest.approx(expected[case][name], abs=1e-5), case
        assert values["grad_norm"] == pytest.approx(
            expected[case]["grad_norm"], rel=1e-3
        ), case
        single_dir, parallel_dir = (
            run / f"{prefix}-{case.replace(' ', '')}"
            for run, prefix in ((single_folder, "single"), (folder, strategy))
        )
        reference, actual = tensors(single_dir), tensors(parallel_dir)
        assert reference.keys() == actual.keys()
        for name in reference:
            torch.testing.assert_close(
                actual[name], reference[name], rtol=1e-3, atol=1e-3, msg=f"{case}: {name}"
            )
        assert (single_dir / "best").is_dir() and (parallel_dir / "best").is_dir()


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_losses_and_files_equal_those_of_one_process(
    tiny, examples, tmp_path, strategy, single_runs
):
    compare(tiny, examples, tmp_path, strategy, FAST[strategy], single_runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", pytest.param("hsdp", marks=pytest.mark.weekly)]
)
@pytest.mark.halved
def test_losses_and_files_equal_those_of_one_process_with_every_method_and_base(
    tiny, examples, tmp_path, strategy, single_runs
):
    compare(tiny, examples, tmp_path, strategy, REST[strategy], single_runs)


@pytest.mark.weekly
def test_other_options_of_a_sharded_run(tiny, examples, tmp_path, single_runs):
    compare(tiny, examples, tmp_path, "fsdp", OTHERS, single_runs)


SHARDED = {
    "mixtral": ("4 experts", dict(num_local_experts=3)),  # three experts on two processes
    "deepseek_v3": ("groups, correction", {}),
    "qwen3_5_text": ("delta nets", {}),
    "falcon_h1": ("side by side", {}),
    "gemma3n_text": ("four streams, shared keys", dict(vocab_size_per_layer_input=512)),
}


# only the losses of training are compared
SHARDED_FLAGS = " --train.max_steps 3 --data.val_fraction 0 --save.best false"
# larger steps of this network amplify rounding beyond the bound
SHARDED_RATES = {"falcon_h1": " --train.learning_rate 5e-4"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        pytest.param("deepseek_v3", marks=pytest.mark.weekly),
        pytest.param("qwen3_5_text", marks=pytest.mark.weekly),
        "falcon_h1",
        "gemma3n_text",
    ],
)
@pytest.mark.halved
def test_networks_of_every_kind_are_sharded(make_model, tiny, examples, tmp_path, family):
    """Experts, latent attention, recurrent mixers, and what blocks pass to each other, in fp32."""
    variation, changes = SHARDED[family]
    config_class, variations = ROWS[family]
    sizes = {
        **variations[variation],
        "vocab_size": 512,
        "max_position_embeddings": 256,
        **changes,
    }
    folder = make_model(getattr(transformers, config_class), **sizes)[1]
    for path in tiny.glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    more = SHARDED_FLAGS + SHARDED_RATES.get(family, "")
    cases = [case + more for case in ("full none", "lora nf4")]
    single = losses(folder, examples, tmp_path, "single", cases)
    sharded = losses(folder, examples, tmp_path, "fsdp", cases)
    for case in single:
        assert sharded[case]["loss"] == pytest.approx(single[case]["loss"], abs=3e-5), case


# ---- shards


def test_shards_are_equal_where_possible():
    """Tensors are split along the first dimension that divides evenly, otherwise along dimension
    0."""
    assert [placement(shape, 4).dim for shape in ((8, 3), (6, 8), (3, 5), (8,), (1,))] == [
        0,
        1,
        0,
        0,
        0,
    ]
    assert local_slices(torch.empty(3, 5)) == (slice(0, 3), slice(0, 5))


SHARD_WORKER = """
import sys, torch
sys.path[:0] = [{tests!r}]
from litft.args.parser import parse
from litft.cli import COMMANDS
from litft.pretrained.folder import resolve
from litft.training.network import build_trained_network
from litft.training.run_setup import resolve_setup
from litft.distributed.devices import make_fabric, mesh_of
from litft.model.placement import full_tensor, local
from litft.distributed.process_group import launch
args = parse(COMMANDS["finetune lora"].args, {words!r})
fabric = make_fabric(args, "fsdp")
launch(fabric, "60s")
setup = resolve_setup(args, resolve(args.checkpoint_dir))
network = build_trained_network(setup, "fp32", fabric.device, mesh_of(args, "fsdp", fabric.device))
model, parameters = network.model, network.parameters
found = {{name: (local(p).nbytes, p.numel() * p.itemsize) for name, p in model.named_parameters()}}
q = model.blocks[0].attention.q_proj
found["scales"] = (q.state.absmax.numel(), q.in_features * q.out_features // 64)
found["weight"] = full_tensor(q.weight)
from litft.model.quantization import QuantizedTensor
found["expected"] = QuantizedTensor.quantize(setup.source.tensor("blocks.0.attention.q_proj.weight").float(), "nf4").data
torch.save(found, f"{out}{{fabric.global_rank}}.pt")
"""


def test_each_process_holds_its_shard_of_the_quantized_weights(tiny, examples, tmp_path):
    """A process has half of the bytes of every tensor and all scales; the gathered weight equals
    that of one process."""
    argv = [
        "--checkpoint_dir",
        str(tiny),
        "--data.path",
        str(examples),
        "--devices",
        "2",
        "--strategy",
        "fsdp",
    ]
    argv += ["--quantize", "nf4"]
    program = SHARD_WORKER.format(
        tests=str(ROOT / "tests"), words=argv, out=str(tmp_path / "found")
    )
    (tmp_path / "worker.py").write_text(program)
    script(tmp_path / "worker.py", cwd=tmp_path)
    for rank in range(2):
        sizes = torch.load(tmp_path / f"found{rank}.pt", weights_only=True)
        scales, expected_scales = sizes.pop("scales")
        assert scales == expected_scales
        assert torch.equal(sizes.pop("weight"), sizes.pop("expected"))
        assert all(
            local_bytes * 2 == full_bytes for local_bytes, full_bytes in sizes.values()
        )


@pytest.fixture(scope="module")
def two_gigabytes(tiny, tmp_path_factory):
    """The folder of a bf16 model with a single file of 2 GB."""
    folder = tmp_path_factory.mktemp("large")
    for path in tiny.glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    config = json.loads((tiny / "config.json").read_text())
    config |= {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    config |= {
        "intermediate_size": 7680,
        "head_dim": 128,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    from litft.checkpoints.conversion import mappings_to_hf

    source = resolve(folder)
    model = source.meta_model(torch.bfloat16)
    mappings = mappings_to_hf(source.rules, [name for name, _ in model.named_parameters()])
    weights = {
        mapping.targets[0]: torch.empty_like(
            model.get_parameter(mapping.sources[0]), device="cpu"
        )
        for mapping in mappings
    }
    save_file(
        {name: value.fill_(0.02) for name, value in weights.items()},
        folder / "model.safetensors",
    )
    yield folder
    shutil.rmtree(folder)


WAITING = """
import torch
from litft.args.parser import parse
from litft.cli import COMMANDS
from litft.pretrained.folder import resolve
from litft.training.network import build_trained_network
from litft.training.run_setup import resolve_setup
from litft.training.optimizers.make import make_optimizer
from litft.distributed.devices import make_fabric, mesh_of
from litft.model.placement import full_tensor
from litft.distributed.process_group import launch, sync_gradients
args = parse(COMMANDS["finetune full"].args, {words!r})
fabric = make_fabric(args, "fsdp")
launch(fabric, "60s")
for args.train.cpu_offload in ("none", "parameters"):
    setup = resolve_setup(args, resolve(args.checkpoint_dir))
    network = build_trained_network(setup, "fp32", fabric.device, mesh_of(args, "fsdp", fabric.device))
    model, parameters = network.model, network.parameters
    wrapped, optimizer = fabric.setup(model, make_optimizer(setup.args.train, setup.method, parameters))
    tokens = torch.randint(512, (2, 33), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        with sync_gradients(fabric, wrapped, last=True):
            loss, _ = wrapped(tokens[:, :-1], targets=tokens[:, 1:])
            fabric.backward(loss)
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        if fabric.global_rank == 0:
            print(f"\\n{{args.train.cpu_offload}} {{loss.item()}} {{norm.item()}}", flush=True)
"""


@pytest.mark.slow
def test_offloaded_sharded_weights_train_the_same(tiny, examples, tmp_path):
    """On a CPU, where the command rejects offloading, losses and gradient norms are the same as
    without it."""
    argv = [
        "--checkpoint_dir",
        str(tiny),
        "--data.path",
        str(examples),
        "--devices",
        "2",
        "--strategy",
        "fsdp",
    ]
    (tmp_path / "worker.py").write_text(WAITING.format(words=argv))
    stdout = script(tmp_path / "worker.py", cwd=tmp_path).stdout
    in_memory, offloaded = (
        re.findall(rf"^{name} (.*)$", stdout, re.MULTILINE)
        for name in ("none", "parameters")
    )
    assert len(in_memory) == 3 and len(set(in_memory)) == 3 and in_memory == offloaded


LOADED = """
import sys
from litft.args.parser import parse
from litft.cli import COMMANDS
from litft.pretrained.folder import resolve
from litft.training.network import build_trained_network
from litft.training.run_setup import resolve_setup
from litft.distributed.devices import make_fabric, mesh_of, peak_memory
from litft.distributed.process_group import launch
from litft.checkpoints.weight_files import Checkpoint
args = parse(COMMANDS["finetune lora"].args, {words!r})
fabric = make_fabric(args, "fsdp")
launch(fabric, "60s")
before, stored, read = peak_memory(fabric.device), Checkpoint._read_stored, []
def noted(*args):
    tensor = stored(*args)
    read.append(tensor.nbytes)
    return tensor
Checkpoint._read_stored = noted
setup = resolve_setup(args, resolve(args.checkpoint_dir))
network = build_trained_network(setup, "bf16", fabric.device, mesh_of(args, "fsdp", fabric.device))
model = network.model
print(f"\\nread {{sum(read)}} held {{(peak_memory(fabric.device) - before) * 2**30:.0f}}", flush=True)
fabric.barrier()
"""


@pytest.mark.slow
def test_no_process_holds_the_full_model_while_it_loads(two_gigabytes, examples, tmp_path):
    """Peak resident memory, without the imports, stays below 60 % of the model plus 600 MB."""
    size = (two_gigabytes / "model.safetensors").stat().st_size
    assert size > 2e9
    argv = [
        "--checkpoint_dir",
        str(two_gigabytes),
        "--data.path",
        str(examples),
        "--devices",
        "2",
        "--strategy",
        "fsdp",
    ]
    (tmp_path / "worker.py").write_text(LOADED.format(words=argv))
    measurements = re.findall(
        r"read (\d+) held (\d+)", script(tmp_path / "worker.py", cwd=tmp_path).stdout
    )
    print(
        f"the model {size / 1e9:.2f} GB; each process read, and held at its peak:",
        measurements,
    )
    assert len(measurements) == 2
    assert all(
        int(read) < 0.51 * size and int(peak) < 0.6 * size + 600e6
        for read, peak in measurements
    )


# ---- checkpoints


def flags(tiny, examples, *more):
    """Return the flags of a short run whose last step is not a multiple of the save interval."""
    argv = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--train.max_steps",
        "8",
        "--save.interval",
        "3",
    ]
    argv += [
        "--save.keep_last",
        "9",
        "--eval.interval",
        "0",
        "--eval.max_new_tokens",
        "0",
        "--train.learning_rate",
        "5e-3",
    ]
    return [*argv, "--timeout", "60s", *more]


def back_to(run, step):
    """Reset a run to the state right after its checkpoint of this step was written."""
    shutil.rmtree(run / "final")
    run_checkpoints.delete_after(run, step)


@pytest.mark.slow
@pytest.mark.parametrize("method, first", [("lora", 2), ("full", 1)])
def test_saved_on_two_resumed_on_one_and_back(tiny, examples, tmp_path, method, first):
    """Sharded on 2 devices and resumed on 1, and vice versa: the loaded tensors equal the saved
    ones bit for bit."""
    device_flags = {1: ["--devices", "1"], 2: ["--devices", "2", "--strategy", "fsdp"]}
    command, run = (
        [f"finetune/{method}.py", *flags(tiny, examples), "--out_dir", "run"],
        tmp_path / "run",
    )
    script(*command, *device_flags[first], cwd=tmp_path)
    final, uninterrupted = tensors(run), rows_of(run)
    shutil.rmtree(run / "final")
    script(*command, *device_flags[3 - first], "--resume", cwd=tmp_path)
    # the state of the last step
    assert all(torch.equal(value, final[key]) for key, value in tensors(run).items())
    back_to(run, 3)
    script(*command, *device_flags[3 - first], "--resume", cwd=tmp_path)
    resumed = rows_of(run)
    assert [row["step"] for row in resumed] == [row["step"] for row in uninterrupted]
    actual, expected = (
        [row["loss"] for row in rows if "loss" in row] for rows in (resumed, uninterrupted)
    )
    assert actual == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
# the test with a killed worker below uses fsdp
@pytest.mark.parametrize("strategy", ["ddp"])
def test_a_killed_run_of_two_processes_resumes_bit_for_bit(
    tiny, examples, tmp_path, strategy
):
    argv = flags(
        tiny,
        examples,
        "--devices",
        "2",
        "--strategy",
        strategy,
        "--lora.dropout",
        "0.1",
        "--save.interval",
        "1",
    )
    script("finetune/lora.py", *argv, "--out_dir", "whole", cwd=tmp_path)
    process = conftest.start("finetune/lora.py", *argv, "--out_dir", "run", cwd=tmp_path)
    while not (tmp_path / "run" / "checkpoints" / "step-000003").is_dir():
        assert process.poll() is None
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    script("finetune/lora.py", *argv, "--out_dir", "run", "--resume", cwd=tmp_path)
    uninterrupted, resumed = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)


# ---- the choice of a strategy


@pytest.fixture
def plan_with_memory(tiny, examples, monkeypatch):
    """A function that plans a run on two devices with the given memory each: (settings, lines,
    schedule)."""

    def plan(memory, **options):
        args = LoRAFinetuneArgs(
            checkpoint_dir=str(tiny),
            data=DataArgs(path=[str(examples)]),
            devices=2,
            **options,
        )
        monkeypatch.setattr(
            litft.training.planned_run, "device_memory", lambda device, processes: memory
        )
        setup = resolve_setup(args, resolve(tiny))
        data = load_data(args.data, setup.tokenizer, 512, 256)
        run = plan_run(setup, Schedule(args, data, 2), torch.device("cpu"))
        return run.settings, list(plan_lines(run, 1e12)), run.schedule

    return plan


@pytest.mark.weekly
def test_auto_shards_what_does_not_fit(plan_with_memory):
    """The plan also states the reason."""
    settings, lines, _ = plan_with_memory(2**30)
    assert (
        settings.strategy == "ddp"
        and "each device holds all of the weights (ddp, since each needs" in lines[1]
    )
    once, _, schedule = plan_with_memory(2**30, train=TrainArgs(micro_batch_size=16))
    # DDP's buckets are gradients
    assert once.plan.memory.shape.accumulated and not schedule.shape().accumulated
    settings, lines, _ = plan_with_memory(settings.plan.memory.peak // 4)
    assert settings.strategy == "fsdp" and settings.plan.memory.weights < 2**20
    assert re.search(
        r"fsdp, since each needs .* MiB with all of the weights, and has [\d.]+ [MK]iB",
        lines[1],
    )
    # an explicit strategy is kept
    assert plan_with_memory(1, strategy="ddp")[0].strategy == "ddp"
    with pytest.raises(
        ValueError,
        match=r"adamw_8bit with --strategy fsdp: .* 8-bit blocks .*\(fsdp: since each needs",
    ):
        plan_with_memory(1000, train=TrainArgs(optimizer="adamw_8bit"))


@pytest.mark.parametrize(
    "given, reason",
    [
        (dict(strategy="fsdp"), "weights cannot be sharded over one device"),
        (
            dict(strategy="hsdp", devices=2),
            "2 devices cannot be split into several equal groups of 2",
        ),
        (dict(strategy="hsdp", devices=6, shard_size=4), "equal groups of 4"),
        (
            dict(strategy="fsdp", devices=2, train=TrainArgs(optimizer="adafactor")),
            "whole rows and columns",
        ),
        (
            dict(strategy="fsdp", devices=2, train=TrainArgs(oom_retry=True)),
            "other processes would wait",
        ),
        (
            dict(strategy="fsdp", devices=2, train=TrainArgs(cpu_offload="activations")),
            "would be offloaded too",
        ),
        (
            dict(strategy="ddp", devices=2, train=TrainArgs(cpu_offload="parameters")),
            "add --strategy fsdp",
        ),
        (dict(devices=4, shard_size=2), "--shard_size 2 applies only to --strategy hsdp"),
        (dict(timeout="soon"), "--timeout soon: expected a time"),
    ],
)
def test_unsupported_settings_of_a_strategy_are_reported(given, reason):
    assert any(reason in problem for problem in LoRAFinetuneArgs(**given).problems())


def test_launched_processes_are_counted(monkeypatch):
    """Devices and nodes are read from torchrun and SLURM; a restarted run resumes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    args = apply_launcher(LoRAFinetuneArgs(overwrite=True))
    assert (args.devices, args.num_nodes, args.resume, args.overwrite) == (
        4,
        2,
        False,
        True,
    )
    with pytest.raises(ValueError, match="torchrun started 4 processes on 2 nodes"):
        apply_launcher(LoRAFinetuneArgs(devices=8))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    args = apply_launcher(LoRAFinetuneArgs(overwrite=True))
    assert (args.resume, args.overwrite) == (True, False)
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_NTASKS", "16")
    monkeypatch.setenv("SLURM_NNODES", "2")
    args = apply_launcher(LoRAFinetuneArgs())
    assert (args.devices, args.num_nodes) == (8, 2)
    for name, value, reason in (
        ("SLURM_NTASKS", "15", "not evenly divided"),
        ("SLURM_NNODES", "0", "SLURM_NNODES is '0'"),
    ):
        with monkeypatch.context() as changed, pytest.raises(ValueError, match=reason):
            changed.setenv(name, value)
            apply_launcher(LoRAFinetuneArgs())
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert apply_launcher(LoRAFinetuneArgs()).devices == 1
    monkeypatch.setenv("SLURM_JOB_NAME", "job")
    # an sbatch script that starts its own processes
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert apply_launcher(LoRAFinetuneArgs(devices=2)).devices == 2
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="not by torchrun or srun"):
        apply_launcher(LoRAFinetuneArgs())


@pytest.mark.parametrize("rank, prints_errors", [("0", True), ("1", False)])
def test_only_the_first_process_of_srun_prints_errors(tmp_path, rank, prints_errors):
    """srun passes the rank in its own environment variables."""
    env = {
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_LOCALID": rank,
        "SLURM_PROCID": rank,
    }
    done = script("finetune/lora.py", "--seed", "x", cwd=tmp_path, env=env, code=2)
    assert ("error: " in done.stderr) is prints_errors


def test_only_communication_errors_count_as_a_lost_process():
    """Timeouts of GPU kernels are not failures of another process."""
    closed = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
        "[127.0.0.1]:4711"
    )
    gloo = (
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms "
        "for recv operation"
    )
    nccl = (
        "NCCL: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 5000 "
        "milliseconds"
    )
    assert (
        peer_failure(RuntimeError(closed), "5s") == "another process of the run has ended"
    )
    assert all(
        "has not answered for 5s" in peer_failure(RuntimeError(text), "5s")
        for text in (gloo, nccl)
    )
    assert "not answered" in peer_failure(
        torch.distributed.DistBackendError("wait timeout after 5000ms"), "5s"
    )
    for text in (
        "CUDA error: the launch timed out and was terminated",
        "unexpected connection of operators",
    ):
        assert peer_failure(RuntimeError(text), "5s") is None


def test_more_processes_than_cores_are_reported_at_once(tiny, capsys, monkeypatch):
    count = cores()
    with pytest.raises(
        ValueError,
        match=f"--devices {4 * count + 1}: .* this machine has {count} cores; pass at most "
        f"{4 * count}",
    ):
        prepare_run(
            LoRAFinetuneArgs(
                checkpoint_dir=str(tiny),
                data=DataArgs(path=["nowhere"]),
                devices=4 * count + 1,
            )
        )
    check_devices("cpu", count + 1)
    assert (
        f"this machine has {count} cores; the processes will compete for them"
        in capsys.readouterr().err
    )
    check_devices("cpu", count)
    assert not capsys.readouterr().err
    for name, value in {
        "SLURM_NTASKS": "64",
        "SLURM_NNODES": "1",
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    check_devices.cache_clear()
    check_devices("cpu", 4 * count + 2)  # each srun task has its own cores
    assert not capsys.readouterr().err


def test_device_memory_respects_the_container_limit(tmp_path):
    """The smallest limit of all cgroups of the process applies, for cgroup v1 and v2."""

    def limit(lines):
        (tmp_path / "cgroup").write_text(lines)
        return cgroup_limit(tmp_path / "cgroup", tmp_path / "mounted")

    unlimited = limit("0::/a/b\n")
    assert unlimited > 2**60
    for path, text in (
        ("a/b/memory.max", "max"),
        ("a/memory.max", "5000000"),
        ("memory/c/memory.limit_in_bytes", "3000"),
    ):
        (tmp_path / "mounted" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / path).write_text(f"{text}\n")
    assert limit("0::/a/b\n") == 5_000_000
    assert limit("4:cpu:/c\n12:memory,pids:/c\n") == 3000
    assert limit("4:cpu:/c\n") == unlimited
    assert device_memory(torch.device("cpu")) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )


# ---- failures


def start(rank, port, argv, cwd):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return conftest.start(
        "finetune/lora.py", *argv, cwd=cwd, env=torchrun_env(rank, port, 2), **pipes
    )


def test_processes_with_different_settings_are_reported(tiny, examples, tmp_path):
    port, argv = free_port(), flags(tiny, examples, "--out_dir", "run")
    processes = [
        start(rank, port, [*argv, "--seed", 42 + rank], tmp_path) for rank in range(2)
    ]
    stderrs = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert (
        "process 1 differs from process 0 in --seed (42 on process 0, 43 on the other)"
        in stderrs[0]
    )
    assert not (tmp_path / "run" / "final").is_dir()


@pytest.mark.slow
def test_a_missing_process_is_reported(tiny, examples, tmp_path):
    start_time = time.monotonic()
    process = start(0, free_port(), flags(tiny, examples, "--timeout", "5s"), tmp_path)
    stderr = process.communicate(timeout=120)[1]
    assert (
        process.returncode == 2
        and "the processes did not all connect within --timeout 5s" in stderr
    )
    assert time.monotonic() - start_time < 60


@pytest.mark.parametrize(
    "signum, victim",
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.weekly),
    ],
)
def test_a_process_that_dies_or_hangs_is_noticed(tiny, examples, tmp_path, signum, victim):
    """The other process reports it and names the checkpoint to resume from."""
    reason = (
        "another process of the run "
        f"{'has ended' if signum == signal.SIGKILL else 'has not answered for 5s (--timeout)'}"
    )
    port = free_port()
    argv = flags(
        tiny,
        examples,
        "--out_dir",
        "run",
        "--train.max_steps",
        "100000",
        "--timeout",
        "5s",
        "--save.interval",
        "2",
    )
    processes = [start(rank, port, argv, tmp_path) for rank in range(2)]
    while not (tmp_path / "run" / "checkpoints" / "step-000002").is_dir():
        assert all(process.poll() is None for process in processes), [
            process.communicate() for process in processes
        ]
        time.sleep(0.01)
    os.kill(processes[victim].pid, signum)
    survivor = processes[1 - victim]
    stderr = survivor.communicate(timeout=60)[1]
    processes[victim].kill()
    assert (
        survivor.returncode == 2
        and reason in stderr
        and "is complete: --resume continues from it" in stderr
    )
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_waiting_for_unfinished_data_times_out(tiny, examples, tmp_path):
    """Another process has the lock of the token cache, but makes no progress."""
    import fcntl

    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [
        "finetune/lora.py",
        *flags(tiny, examples, "--timeout", "2s"),
        "--out_dir",
        "run",
    ]
    script(*command, "--dry_run", cwd=tmp_path, env=env)
    (entry,) = (tmp_path / "cache" / "litft").glob("*/report.json")
    shutil.rmtree(entry.parent)
    with entry.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = script(*command, cwd=tmp_path, env=env, code=2)
    assert "has written nothing for 2 s (--timeout)" in done.stderr


# ---- the plan


def test_a_sharded_plan_counts_the_memory_of_each_device(tiny):
    """Sharded sizes are per device; the gathered memory is that of the two largest units."""
    source = resolve(tiny)
    args = FullFinetuneArgs(checkpoint_dir=str(tiny))
    method = method_of(args)
    method.select_targets(source.meta_model(), source.adapter_rules)
    shape = Shape(2, 64)
    full, half = (predict(source, method, "fp32", "none", shape, shards=n) for n in (1, 2))
    model = source.meta_model()
    parameters, buffers = (
        sum(p.nbytes for p in model.parameters()),
        sum(b.nbytes for b in model.buffers()),
    )
    block, embedding = (
        sum(p.nbytes for p in model.blocks[0].parameters()),
        model.embed.weight.nbytes,
    )
    assert half.memory.weights - buffers == (full.memory.weights - buffers) / 2
    assert (
        half.memory.optimizer == full.memory.optimizer // 2
        and half.memory.gradients == full.memory.gradients // 2
    )
    assert (
        half.memory.gathered
        == model.lm_head.weight.nbytes + model.norm.weight.nbytes + embedding + block
    )  # the largest two
    assert half.gathered == parameters


def test_communication_volume_equals_that_of_rings(tiny):
    """The reference values are explicit sums over the devices of a ring."""
    source = resolve(tiny)
    method = method_of(FullFinetuneArgs(checkpoint_dir=str(tiny)))
    plan = predict(source, method, "fp32", "none", Shape(1, 64), shards=4)
    weights, gradients = plan.gathered, 4 * plan.trained
    fsdp = communication_volume(plan, Cluster(4, 1, 4, 1e9, 1e9), 3, 1e9, 1.0, 1e12)
    assert (
        fsdp.intra_node
        == pytest.approx(3 * sum(2 * weights / 4 + gradients / 4 for _ in range(3)))
        and fsdp.inter_node == 0
    )
    ddp = communication_volume(
        replace(plan, gathered=0), Cluster(4, 1, 1, 1e9, 1e9), 3, 1e9, 1.0, 1e12
    )
    # once per step
    assert ddp.intra_node == pytest.approx(2 * sum(gradients / 4 for _ in range(3)))
    hsdp = communication_volume(plan, Cluster(4, 2, 4, 1e9, 1e9), 3, 1e9, 1.0, 1e12)
    assert hsdp.intra_node == fsdp.intra_node and hsdp.inter_node == pytest.approx(
        2 * (gradients / 4) / 2
    )
    wide = communication_volume(plan, Cluster(4, 2, 8, 1e9, 1e9), 3, 1e9, 1.0, 1e12)
    assert wide.inter_node == pytest.approx(
        3 * (2 * weights + gradients) / 2 / 4
    )  # half of the traffic crosses nodes, over 4 ports
    slow = communication_volume(plan, Cluster(4, 2, 8, 1e9, 1e3), 3, 1e9, 1.0, 1e12)
    assert (
        slow.step_time > slow.transfer_time == pytest.approx(wide.inter_node / 1e3)
        and slow.share < 1e-3 < wide.share
    )


def test_plans_for_many_devices_without_hardware(tiny, tmp_path):
    argv = [
        "--checkpoint_dir",
        tiny,
        "--method",
        "full",
        "--devices",
        "8",
        "--num_nodes",
        "2",
        "--max_seq_length",
        "64",
    ]
    stdout = script("scripts/plan.py", *argv, "--strategy", "fsdp", cwd=tmp_path).stdout
    assert (
        "memory of each:" in stdout
        and "GB from other nodes" in stdout
        and "16 x H100" in stdout
    )
    memory = {
        strategy: plan_on_paper(
            PlanArgs(str(tiny), "full", strategy=strategy, devices=8, num_nodes=2)
        ).fit.plan.memory.weights
        for strategy in ("ddp", "fsdp", "hsdp")
    }
    assert memory["fsdp"] < memory["hsdp"] < memory["ddp"]


# ---- launchers

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# the workers are forked, in this network namespace
FORKING = {**ENV, "PYTHON_EXEC": str(FORKS / "bin" / "python")}


def children(pid):
    """Return the ids of the child processes."""
    return [
        int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


@pytest.mark.weekly
@pytest.mark.parametrize("strategy", ["fsdp"])
def test_a_killed_worker_is_restarted_and_the_run_ends_the_same(
    tiny, examples, tmp_path, strategy
):
    """After two `kill -9`, the third start resumes by itself."""
    argv = flags(
        tiny,
        examples,
        "--strategy",
        strategy,
        "--lora.dropout",
        "0.1",
        "--train.max_steps",
        "30",
    )
    argv = list(
        map(
            str,
            [
                ROOT / "finetune" / "lora.py",
                *argv,
                "--train.epochs",
                "99",
                "--save.keep_last",
                "2",
            ],
        )
    )
    command = [
        *TORCHRUN,
        "--standalone",
        "--nproc_per_node",
        "2",
        "--max-restarts",
        "2",
        *argv,
    ]
    subprocess.run(
        [*command, "--out_dir", "whole"],
        cwd=tmp_path,
        env=FORKING,
        check=True,
        capture_output=True,
    )
    pipe = subprocess.PIPE
    agent = subprocess.Popen(
        [*command, "--out_dir", "run"],
        cwd=tmp_path,
        env=FORKING,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    for step, worker in ((6, 1), (18, 0)):
        while not any(
            (tmp_path / "run" / "checkpoints" / f"step-{n:06d}").is_dir()
            for n in range(step, step + 9)
        ):
            assert agent.poll() is None, agent.communicate()
            time.sleep(0.01)
        os.kill(children(agent.pid)[worker], signal.SIGKILL)
    stdout = agent.communicate(timeout=120)[0]
    assert agent.returncode == 0 and stdout.count("continuing after step") == 2
    uninterrupted, restarted = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert all(torch.equal(restarted[name], uninterrupted[name]) for name in uninterrupted)
    expected, actual = (
        [row["loss"] for row in rows_of(tmp_path / name) if "loss" in row]
        for name in ("whole", "run")
    )
    assert len(expected) == 30 and expected == actual


@pytest.fixture
def two_hosts():
    """Two connected network namespaces, each as (command prefix, address, interface)."""
    names, links = ("litft-test-a", "litft-test-b"), ("litft-ta", "litft-tb")
    setup = [f"netns add {name}" for name in names]
    setup += [f"link add {links[0]} type veth peer name {links[1]}"]
    for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
        setup += [
            f"link set {link} netns {name}",
            f"-n {name} addr add 10.77.0.{number}/24 dev {link}",
        ]
        setup += [f"-n {name} link set lo up", f"-n {name} link set {link} up"]
    try:
        for line in setup:
            result = subprocess.run(["ip", *line.split()], capture_output=True, text=True)
            if result.returncode:
                pytest.skip(
                    f"network namespaces cannot be made here: ip {line}: {result.stderr.strip()}"
                )
        yield [
            (["ip", "netns", "exec", name], f"10.77.0.{i}", link)
            for i, (name, link) in enumerate(zip(names, links, strict=True), 1)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.weekly
def test_two_nodes_by_torchrun(tiny, examples, tmp_path, two_hosts):
    """Two agents, each in its own network namespace with two processes: weights are sharded within
    a node."""
    argv = flags(
        tiny,
        examples,
        "--strategy",
        "hsdp",
        "--out_dir",
        "run",
        "--train.micro_batch_size",
        "2",
    )
    agents = []
    for number, (prefix, address, link) in enumerate(two_hosts):
        torchrun_flags = [
            "--nnodes",
            "2",
            "--nproc_per_node",
            "2",
            "--rdzv_backend",
            "c10d",
            "--rdzv_id",
            "t",
            "--local_addr",
            address,
        ]
        torchrun_flags += [
            "--rdzv_endpoint",
            f"{two_hosts[0][1]}:29400",
            "--rdzv_conf",
            f"is_host={int(number == 0)}",
        ]
        command = list(
            map(
                str,
                [*prefix, *TORCHRUN, *torchrun_flags, ROOT / "finetune" / "lora.py", *argv],
            )
        )
        env = {**ENV, "GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1"}
        log = (tmp_path / f"{number}.log").open("w")
        agents.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT
            )
        )
    codes = [agent.wait(timeout=240) for agent in agents]
    logs = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
    assert codes == [0, 0], logs
    assert "on 4 devices" in logs[0] and "each 2 devices all of them (hsdp" in logs[0]
    single_argv = flags(tiny, examples, "--out_dir", "one", "--train.micro_batch_size", "2")
    script("finetune/lora.py", *single_argv, cwd=tmp_path)
    single_losses, parallel_losses = (
        [row["loss"] for row in rows_of(tmp_path / name) if "loss" in row]
        for name in ("one", "run")
    )
    assert parallel_losses == pytest.approx(single_losses, abs=1e-5)
