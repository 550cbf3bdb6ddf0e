"""Several processes: the same losses and the same files as one, whatever the strategy; and no silence when one fails."""

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
from conftest import ENV, FORKS, ROOT, rows_of, script
from safetensors.torch import load_file, save_file
from strategies import free_port, losses, torchrun_env

import litft.training.settings
from litft.args import DataArgs, FullFinetuneArgs, LoRAFinetuneArgs, PlanArgs, TrainArgs
from litft.args.finetune import apply_launcher
from litft.args.processes import cores
from litft.data.dataset import load_data
from litft.distributed.devices import cgroup_limit, check_devices, device_memory
from litft.distributed.process_group import peer_failure
from litft.methods import method_of
from litft.model.placement import local_slices, placement
from litft.pretrained import resolve
from litft.training import run_state
from litft.training.communication_plan import Cluster, communication_volume
from litft.training.dry_run import plan_lines
from litft.training.finetune import prepare
from litft.training.memory_plan import predict
from litft.training.memory_trace import Shape
from litft.training.plan_command import plan_on_paper
from litft.training.schedule import Schedule
from litft.training.settings import choose
from litft.training.setup import Setup

FAST = {"ddp": ["lora nf4"], "fsdp": ["full none", "lora nf4"]}
REST = {  # with FAST and OTHERS, every pair of method, base and strategy that there is
    "ddp": ["full none", "dora int8", "adapter int8", "adapter_v2 int8"],
    "fsdp": ["dora nf4", "adapter none"],
    # with several micro-batches a step, after the last of which the replicas reduce
    "hsdp": ["full none --train.micro_batch_size 1", "lora none", "dora none", "adapter nf4", "adapter_v2 nf4"],
}
OTHERS = [  # what else a run may be told, sharded
    "full none --train.optimizer sgd --train.learning_rate 0.02",
    "full none --train.optimizer schedule_free --train.lr_schedule constant",
    "full none --train.activation_checkpointing full --train.freeze blocks.0.*",
    "full none --data.new_tokens <x>,<y>",
    "lora none --train.compile",
    "lora none --data.packing true --lora.modules_to_save embed,lm_head",
    "lora nf4-dq --lora.dora --lora.init pissa",
    "lora int8",
    "adapter_v2 none --data.new_tokens <x>,<y>",
]


def tensors(run):
    """What a run has left to open."""
    (path,) = (run / "final").glob("*model.safetensors")
    return load_file(path)


@pytest.fixture(scope="module")
def alone(tiny, examples, tmp_path_factory):
    """The runs of some cases in one process, each made once: what they showed, and where they are."""
    known, folder = {}, tmp_path_factory.mktemp("alone")

    def runs(chosen):
        if missing := [case for case in chosen if case not in known]:
            known.update(losses(tiny, examples, folder, "single", missing))
        return known, folder

    return runs


def compare(tiny, examples, folder, strategy, chosen, alone):
    """Losses, validation losses and final weights of several processes against those of one."""
    expected, there = alone(chosen)
    found = losses(tiny, examples, folder, strategy, chosen)
    for case, values in found.items():
        assert expected[case]["loss"][0] - expected[case]["loss"][-1] > 0.15, case
        for name in ("loss", "val_loss"):
            assert values[name] == pytest.approx(expected[case][name], abs=1e-5), case
        assert values["grad_norm"] == pytest.approx(expected[case]["grad_norm"], rel=1e-3), case
        single, many = (run / f"{n}-{case.replace(' ', '')}" for run, n in ((there, "single"), (folder, strategy)))
        one, several = tensors(single), tensors(many)
        assert one.keys() == several.keys()
        for name in one:
            torch.testing.assert_close(several[name], one[name], rtol=1e-3, atol=1e-3, msg=f"{case}: {name}")
        assert (single / "best").is_dir() and (many / "best").is_dir()


@pytest.mark.parametrize("strategy", FAST)
def test_losses_and_files_are_one_processes(tiny, examples, tmp_path, strategy, alone):
    compare(tiny, examples, tmp_path, strategy, FAST[strategy], alone)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", REST)
def test_losses_and_files_are_one_processes_with_every_method_and_base(tiny, examples, tmp_path, strategy, alone):
    compare(tiny, examples, tmp_path, strategy, REST[strategy], alone)


@pytest.mark.slow
def test_whatever_a_sharded_run_is_told(tiny, examples, tmp_path, alone):
    compare(tiny, examples, tmp_path, "fsdp", OTHERS, alone)


@pytest.mark.slow
def test_experts_are_shared_out(make_model, tiny, examples, tmp_path):
    """Three of them on two processes, in fp32."""
    from transformers import MixtralConfig

    sizes = dict(vocab_size=512, max_position_embeddings=256, num_local_experts=3, num_experts_per_tok=2)
    folder = make_model(MixtralConfig, **sizes)[1]
    for path in tiny.glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    one, two = (losses(folder, examples, tmp_path, strategy, ["full none", "lora nf4"]) for strategy in ("single", "fsdp"))
    for case in one:
        assert two[case]["loss"] == pytest.approx(one[case]["loss"], abs=1e-5), case


# ---- parts


def test_parts_are_equal_where_they_can_be():
    """Cut along the first dimension that leaves no process with less; else along the first."""
    assert [placement(shape, 4).dim for shape in ((8, 3), (6, 8), (3, 5), (8,), (1,))] == [0, 1, 0, 0, 0]
    assert local_slices(torch.empty(3, 5)) == (slice(0, 3), slice(0, 5))


SHARD_WORKER = """
import sys, torch
sys.path[:0] = [{tests!r}]
from litft.args.parser import parse
from litft.cli import COMMANDS
from litft.pretrained import resolve
from litft.training.setup import Setup
from litft.distributed.devices import make_fabric, mesh_of
from litft.model.placement import full_tensor, local
from litft.distributed.process_group import launch
args = parse(COMMANDS["finetune lora"].args, {words!r})
fabric = make_fabric(args, "fsdp")
launch(fabric, "60s")
setup = Setup(args, resolve(args.checkpoint_dir))
model, parameters = setup.build("fp32", fabric.device, mesh_of(args, "fsdp", fabric.device))
found = {{name: (local(p).nbytes, p.numel() * p.itemsize) for name, p in model.named_parameters()}}
q = model.blocks[0].attention.q_proj
found["scales"] = (q.state.absmax.numel(), q.in_features * q.out_features // 64)
found["weight"] = full_tensor(q.weight)
from litft.model.quantization import QuantizedTensor
found["expected"] = QuantizedTensor.quantize(setup.source.tensor("blocks.0.attention.q_proj.weight").float(), "nf4").data
torch.save(found, f"{out}{{fabric.global_rank}}.pt")
"""


def test_each_process_holds_its_share_of_the_bits(tiny, examples, tmp_path):
    """Half of the bytes of every tensor, all scales; together they are what one process would hold."""
    words = ["--checkpoint_dir", str(tiny), "--data.path", str(examples), "--devices", "2", "--strategy", "fsdp"]
    words += ["--quantize", "nf4"]
    text = SHARD_WORKER.format(tests=str(ROOT / "tests"), words=words, out=str(tmp_path / "found"))
    (tmp_path / "worker.py").write_text(text)
    script(tmp_path / "worker.py", cwd=tmp_path)
    for rank in range(2):
        found = torch.load(tmp_path / f"found{rank}.pt", weights_only=True)
        held, full = found.pop("scales")
        assert held == full
        assert torch.equal(found.pop("weight"), found.pop("expected"))
        assert all(mine * 2 == whole for mine, whole in found.values())


@pytest.fixture(scope="module")
def two_gigabytes(tiny, tmp_path_factory):
    """A folder of 2 GB in bf16, in one file."""
    folder = tmp_path_factory.mktemp("large")
    for path in tiny.glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    hf = json.loads((tiny / "config.json").read_text())
    hf |= {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16}
    hf |= {"intermediate_size": 7680, "head_dim": 128, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(hf))
    from litft.checkpoints.conversion import mappings_to_hf

    source = resolve(folder)
    model = source.meta_model(torch.bfloat16)
    mappings = mappings_to_hf(source.rules, [name for name, _ in model.named_parameters()])
    drawn = {
        mapping.targets[0]: torch.empty_like(model.get_parameter(mapping.sources[0]), device="cpu") for mapping in mappings
    }
    save_file({name: value.uniform_(-0.02, 0.02) for name, value in drawn.items()}, folder / "model.safetensors")
    yield folder
    shutil.rmtree(folder)


WAITING = """
import torch
from litft.args.parser import parse
from litft.cli import COMMANDS
from litft.pretrained import resolve
from litft.training.setup import Setup
from litft.training.optimizers import make_optimizer
from litft.distributed.devices import make_fabric, mesh_of
from litft.model.placement import full_tensor
from litft.distributed.process_group import launch, sync_gradients
args = parse(COMMANDS["finetune full"].args, {words!r})
fabric = make_fabric(args, "fsdp")
launch(fabric, "60s")
for args.train.cpu_offload in ("none", "parameters"):
    setup = Setup(args, resolve(args.checkpoint_dir))
    model, parameters = setup.build("fp32", fabric.device, mesh_of(args, "fsdp", fabric.device))
    wrapped, optimizer = fabric.setup(model, make_optimizer(args.train, setup.method, parameters))
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
def test_sharded_weights_that_wait_on_the_host_learn_the_same(tiny, examples, tmp_path):
    """On a CPU, which has no other memory, the steps are those without; the command refuses it there."""
    words = ["--checkpoint_dir", str(tiny), "--data.path", str(examples), "--devices", "2", "--strategy", "fsdp"]
    (tmp_path / "worker.py").write_text(WAITING.format(words=words))
    said = script(tmp_path / "worker.py", cwd=tmp_path).stdout
    none, waiting = (re.findall(rf"^{name} (.*)$", said, re.MULTILINE) for name in ("none", "parameters"))
    assert len(none) == 3 and len(set(none)) == 3 and none == waiting


LOADED = """
import sys
from litft.args.parser import parse
from litft.cli import COMMANDS
from litft.pretrained import resolve
from litft.training.setup import Setup
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
setup = Setup(args, resolve(args.checkpoint_dir))
model, _ = setup.build("bf16", fabric.device, mesh_of(args, "fsdp", fabric.device))
print(f"\\nread {{sum(read)}} held {{(peak_memory(fabric.device) - before) * 2**30:.0f}}", flush=True)
fabric.barrier()
"""


@pytest.mark.slow
def test_no_process_holds_the_whole_while_it_loads(two_gigabytes, examples, tmp_path):
    """Peak resident memory above imports: under 60 % of the model and 600 MB."""
    size = (two_gigabytes / "model.safetensors").stat().st_size
    assert size > 2e9
    words = ["--checkpoint_dir", str(two_gigabytes), "--data.path", str(examples), "--devices", "2", "--strategy", "fsdp"]
    (tmp_path / "worker.py").write_text(LOADED.format(words=words))
    found = re.findall(r"read (\d+) held (\d+)", script(tmp_path / "worker.py", cwd=tmp_path).stdout)
    print(f"the model {size / 1e9:.2f} GB; each process read, and held at its peak:", found)
    assert len(found) == 2
    assert all(int(read) < 0.51 * size and int(peak) < 0.6 * size + 600e6 for read, peak in found)


# ---- checkpoints


def flags(tiny, examples, *more):
    """A short run with dropout, two epochs and a step that is no multiple of the save interval."""
    words = ["--checkpoint_dir", tiny, "--data.path", examples, "--train.max_steps", "8", "--save.interval", "3"]
    words += ["--save.keep_last", "9", "--eval.interval", "0", "--eval.max_new_tokens", "0", "--train.learning_rate", "5e-3"]
    return [*words, "--timeout", "60s", *more]


def back_to(run, step):
    """A run as it was when its checkpoint of this step was written, and before it went on."""
    shutil.rmtree(run / "final")
    run_state.delete_after(run, step)


@pytest.mark.slow
@pytest.mark.parametrize("method, first", [("lora", 2), ("full", 1)])
def test_saved_on_two_resumed_on_one_and_back(tiny, examples, tmp_path, method, first):
    """Sharded on 2, resumed on 1, and the other way round: what is read is what was written, to the bit."""
    how = {1: ["--devices", "1"], 2: ["--devices", "2", "--strategy", "fsdp"]}
    given, run = [f"finetune/{method}.py", *flags(tiny, examples), "--out_dir", "run"], tmp_path / "run"
    script(*given, *how[first], cwd=tmp_path)
    whole, rows = tensors(run), rows_of(run)
    shutil.rmtree(run / "final")
    script(*given, *how[3 - first], "--resume", cwd=tmp_path)
    assert all(torch.equal(value, whole[key]) for key, value in tensors(run).items())  # the state of the last step
    back_to(run, 3)
    script(*given, *how[3 - first], "--resume", cwd=tmp_path)
    again = rows_of(run)
    assert [row["step"] for row in again] == [row["step"] for row in rows]
    one, other = ([row["loss"] for row in found if "loss" in row] for found in (again, rows))
    assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp"])  # a killed worker, below, is one of fsdp
def test_a_killed_run_of_two_goes_on_bit_for_bit(tiny, examples, tmp_path, strategy):
    given = flags(tiny, examples, "--devices", "2", "--strategy", strategy, "--lora.dropout", "0.1", "--save.interval", "1")
    script("finetune/lora.py", *given, "--out_dir", "whole", cwd=tmp_path)
    process = conftest.start("finetune/lora.py", *given, "--out_dir", "run", cwd=tmp_path)
    while not (tmp_path / "run" / "checkpoints" / "step-000003").is_dir():
        assert process.poll() is None
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    script("finetune/lora.py", *given, "--out_dir", "run", "--resume", cwd=tmp_path)
    whole, found = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert all(torch.equal(found[name], whole[name]) for name in whole)


# ---- the choice


@pytest.fixture
def settled(tiny, examples, monkeypatch):
    """The strategy that a plan chooses with so much memory on each of two devices."""

    def settle(room, **given):
        args = LoRAFinetuneArgs(checkpoint_dir=str(tiny), data=DataArgs(path=[str(examples)]), devices=2, **given)
        monkeypatch.setattr(litft.training.settings, "device_memory", lambda device, processes: room)
        job = Setup(args, resolve(tiny))
        data = load_data(args.data, job.tokenizer, 512, 256)
        schedule = Schedule(args, data, 2)
        settings = choose(job, schedule, torch.device("cpu"))
        return settings, list(plan_lines(job, schedule, settings, 1e12)), schedule

    return settle


def test_auto_shards_what_does_not_fit(settled):
    """And says why."""
    settings, lines, _ = settled(2**30)
    assert settings.strategy == "ddp" and "each device holds all of the weights (ddp, since each needs" in lines[1]
    once, _, schedule = settled(2**30, train=TrainArgs(micro_batch_size=16))
    assert once.plan.memory.shape.accumulated and not schedule.shape().accumulated  # DDP's buckets are gradients
    settings, lines, _ = settled(settings.plan.memory.peak // 4)
    assert settings.strategy == "fsdp" and settings.plan.memory.weights < 2**20
    assert re.search(r"fsdp, since each needs .* MiB with all of the weights, and has [\d.]+ [MK]iB", lines[1])
    assert settled(1, strategy="ddp")[0].strategy == "ddp"  # asked for is asked for
    with pytest.raises(ValueError, match=r"adamw_8bit with --strategy fsdp: .* 8-bit blocks .*\(fsdp: since each needs"):
        settled(1000, train=TrainArgs(optimizer="adamw_8bit"))


@pytest.mark.parametrize(
    "given, reason",
    [
        (dict(strategy="fsdp"), "weights cannot be sharded over one device"),
        (dict(strategy="hsdp", devices=2), "2 devices cannot be split into several equal groups of 2"),
        (dict(strategy="hsdp", devices=6, shard_size=4), "equal groups of 4"),
        (dict(strategy="fsdp", devices=2, train=TrainArgs(optimizer="adafactor")), "whole rows and columns"),
        (dict(strategy="fsdp", devices=2, train=TrainArgs(oom_retry=True)), "other processes would wait"),
        (dict(strategy="fsdp", devices=2, train=TrainArgs(cpu_offload="activations")), "would be offloaded too"),
        (dict(strategy="ddp", devices=2, train=TrainArgs(cpu_offload="parameters")), "add --strategy fsdp"),
        (dict(devices=4, shard_size=2), "--shard_size 2 applies only to --strategy hsdp"),
        (dict(timeout="soon"), "--timeout soon: expected a time"),
    ],
)
def test_what_a_strategy_cannot_do_is_said_at_once(given, reason):
    assert any(reason in problem for problem in LoRAFinetuneArgs(**given).problems())


def test_processes_that_were_started_are_counted(monkeypatch):
    """torchrun's and SLURM's; a restarted run goes on."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    args = apply_launcher(LoRAFinetuneArgs(overwrite=True))
    assert (args.devices, args.num_nodes, args.resume, args.overwrite) == (4, 2, False, True)
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
    for name, value, reason in (("SLURM_NTASKS", "15", "not evenly divided"), ("SLURM_NNODES", "0", "SLURM_NNODES is '0'")):
        with monkeypatch.context() as changed, pytest.raises(ValueError, match=reason):
            changed.setenv(name, value)
            apply_launcher(LoRAFinetuneArgs())
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert apply_launcher(LoRAFinetuneArgs()).devices == 1
    monkeypatch.setenv("SLURM_JOB_NAME", "job")
    monkeypatch.setenv("SLURM_NTASKS", "1")  # a script of sbatch's that starts its processes itself
    assert apply_launcher(LoRAFinetuneArgs(devices=2)).devices == 2
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="not by torchrun or srun"):
        apply_launcher(LoRAFinetuneArgs())


@pytest.mark.parametrize("number, says", [("0", True), ("1", False)])
def test_of_processes_that_srun_has_started_the_first_speaks(tmp_path, number, says):
    """srun names the others by variables of its own."""
    env = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_LOCALID": number, "SLURM_PROCID": number}
    done = script("finetune/lora.py", "--seed", "x", cwd=tmp_path, env=env, code=2)
    assert ("error: " in done.stderr) is says


def test_another_process_is_lost_only_where_a_librarys_error_is_about_it():
    """A GPU's kernels have timeouts, too."""
    there = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
    silent = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"
    watched = "NCCL: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 5000 milliseconds"
    assert peer_failure(RuntimeError(there), "5s") == "another process of the run has ended"
    assert all("has not answered for 5s" in peer_failure(RuntimeError(text), "5s") for text in (silent, watched))
    assert "not answered" in peer_failure(torch.distributed.DistBackendError("wait timeout after 5000ms"), "5s")
    for text in ("CUDA error: the launch timed out and was terminated", "unexpected connection of operators"):
        assert peer_failure(RuntimeError(text), "5s") is None


def test_more_processes_than_cores_are_told_at_once(tiny, capsys, monkeypatch):
    count = cores()
    with pytest.raises(
        ValueError, match=f"--devices {4 * count + 1}: .* this machine has {count} cores; pass at most {4 * count}"
    ):
        prepare(LoRAFinetuneArgs(checkpoint_dir=str(tiny), data=DataArgs(path=["nowhere"]), devices=4 * count + 1))
    check_devices("cpu", count + 1)
    assert f"this machine has {count} cores; the processes will compete for them" in capsys.readouterr().err
    check_devices("cpu", count)
    assert not capsys.readouterr().err
    for name, value in {"SLURM_NTASKS": "64", "SLURM_NNODES": "1", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    check_devices.cache_clear()
    check_devices("cpu", 4 * count + 2)  # of srun's tasks each has cores of its own
    assert not capsys.readouterr().err


def test_a_containers_memory_is_what_it_may_use(tmp_path):
    """The least of all groups that the process is in, of either version."""

    def limit(lines):
        (tmp_path / "cgroup").write_text(lines)
        return cgroup_limit(tmp_path / "cgroup", tmp_path / "mounted")

    none = limit("0::/a/b\n")
    assert none > 2**60
    for path, text in (("a/b/memory.max", "max"), ("a/memory.max", "5000000"), ("memory/c/memory.limit_in_bytes", "3000")):
        (tmp_path / "mounted" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / path).write_text(f"{text}\n")
    assert limit("0::/a/b\n") == 5_000_000
    assert limit("4:cpu:/c\n12:memory,pids:/c\n") == 3000
    assert limit("4:cpu:/c\n") == none
    assert device_memory(torch.device("cpu")) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---- failures


def start(rank, port, words, cwd):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return conftest.start("finetune/lora.py", *words, cwd=cwd, env=torchrun_env(rank, port, 2), **pipes)


def test_processes_that_differ_are_told(tiny, examples, tmp_path):
    port, words = free_port(), flags(tiny, examples, "--out_dir", "run")
    pair = [start(rank, port, [*words, "--seed", 42 + rank], tmp_path) for rank in range(2)]
    said = [process.communicate(timeout=120)[1] for process in pair]
    assert [process.returncode for process in pair] == [2, 2]
    assert "process 1 differs from process 0 in --seed (42 on process 0, 43 on the other)" in said[0]
    assert not (tmp_path / "run" / "final").is_dir()


@pytest.mark.slow
def test_a_process_that_comes_alone_is_told(tiny, examples, tmp_path):
    began = time.monotonic()
    alone = start(0, free_port(), flags(tiny, examples, "--timeout", "5s"), tmp_path)
    said = alone.communicate(timeout=120)[1]
    assert alone.returncode == 2 and "the processes did not all connect within --timeout 5s" in said
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "number, dying",
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_or_hangs_is_noticed(tiny, examples, tmp_path, number, dying):
    """Whichever it is, the other says so, and what there is to go on with."""
    reason = (
        f"another process of the run {'has ended' if number == signal.SIGKILL else 'has not answered for 5s (--timeout)'}"
    )
    port = free_port()
    words = flags(
        tiny, examples, "--out_dir", "run", "--train.max_steps", "100000", "--timeout", "5s", "--save.interval", "2"
    )
    pair = [start(rank, port, words, tmp_path) for rank in range(2)]
    while not (tmp_path / "run" / "checkpoints" / "step-000002").is_dir():
        assert all(process.poll() is None for process in pair), [process.communicate() for process in pair]
        time.sleep(0.01)
    os.kill(pair[dying].pid, number)
    other = pair[1 - dying]
    said = other.communicate(timeout=60)[1]
    pair[dying].kill()
    assert other.returncode == 2 and reason in said and "is complete: --resume continues from it" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_data_that_nobody_finishes_is_not_waited_for(tiny, examples, tmp_path):
    """A process that tokenizes and is stopped in the middle of it."""
    import fcntl

    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["finetune/lora.py", *flags(tiny, examples, "--timeout", "2s"), "--out_dir", "run"]
    script(*command, "--dry_run", cwd=tmp_path, env=env)
    (entry,) = (tmp_path / "cache" / "litft").glob("*/report.json")
    shutil.rmtree(entry.parent)
    with entry.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = script(*command, cwd=tmp_path, env=env, code=2)
    assert "has written nothing for 2 s (--timeout)" in done.stderr


# ---- the plan


def test_a_sharded_plans_weights_are_what_is_held(tiny):
    """Those of each of two devices; gathered at once are the network's own, and two units besides."""
    source = resolve(tiny)
    args = FullFinetuneArgs(checkpoint_dir=str(tiny))
    method = method_of(args)
    method.choose(source.meta_model(), source.adapter_rules)
    shape = Shape(2, 64)
    one, two = (predict(source, method, "fp32", "none", shape, shards=n) for n in (1, 2))
    model = source.meta_model()
    every, buffers = sum(p.nbytes for p in model.parameters()), sum(b.nbytes for b in model.buffers())
    block, embedding = sum(p.nbytes for p in model.blocks[0].parameters()), model.embed.weight.nbytes
    assert two.memory.weights - buffers == (one.memory.weights - buffers) / 2
    assert two.memory.optimizer == one.memory.optimizer // 2 and two.memory.gradients == one.memory.gradients // 2
    assert (
        two.memory.gathered == model.lm_head.weight.nbytes + model.norm.weight.nbytes + embedding + block
    )  # the largest two
    assert two.gathered == every


def test_traffic_is_what_rings_move(tiny):
    """Against sums over the devices of a ring, written out."""
    source = resolve(tiny)
    method = method_of(FullFinetuneArgs(checkpoint_dir=str(tiny)))
    plan = predict(source, method, "fp32", "none", Shape(1, 64), shards=4)
    whole, gradients = plan.gathered, 4 * plan.trained
    fsdp = communication_volume(plan, Cluster(4, 1, 4, 1e9, 1e9), 3, 1e9, 1.0, 1e12)
    assert (
        fsdp.intra_node == pytest.approx(3 * sum(2 * whole / 4 + gradients / 4 for _ in range(3))) and fsdp.inter_node == 0
    )
    ddp = communication_volume(replace(plan, gathered=0), Cluster(4, 1, 1, 1e9, 1e9), 3, 1e9, 1.0, 1e12)
    assert ddp.intra_node == pytest.approx(2 * sum(gradients / 4 for _ in range(3)))  # once a step
    hsdp = communication_volume(plan, Cluster(4, 2, 4, 1e9, 1e9), 3, 1e9, 1.0, 1e12)
    assert hsdp.intra_node == fsdp.intra_node and hsdp.inter_node == pytest.approx(2 * (gradients / 4) / 2)
    wide = communication_volume(plan, Cluster(4, 2, 8, 1e9, 1e9), 3, 1e9, 1.0, 1e12)
    assert wide.inter_node == pytest.approx(
        3 * (2 * whole + gradients) / 2 / 4
    )  # half of it is elsewhere, and comes by 4 ports
    slow = communication_volume(plan, Cluster(4, 2, 8, 1e9, 1e3), 3, 1e9, 1.0, 1e12)
    assert slow.step_time > slow.transfer_time == pytest.approx(wide.inter_node / 1e3) and slow.share < 1e-3 < wide.share


def test_plans_of_many_devices_on_paper(tiny, tmp_path):
    words = ["--checkpoint_dir", tiny, "--method", "full", "--devices", "8", "--num_nodes", "2", "--max_seq_length", "64"]
    said = script("scripts/plan.py", *words, "--strategy", "fsdp", cwd=tmp_path).stdout
    assert "memory of each:" in said and "GB from other nodes" in said and "16 x H100" in said
    memory = {
        strategy: plan_on_paper(
            PlanArgs(str(tiny), "full", strategy=strategy, devices=8, num_nodes=2)
        ).fit.plan.memory.weights
        for strategy in ("ddp", "fsdp", "hsdp")
    }
    assert memory["fsdp"] < memory["hsdp"] < memory["ddp"]


# ---- launchers

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FORKING = {**ENV, "PYTHON_EXEC": str(FORKS / "bin" / "python")}  # the workers are forked, in this network namespace


def children(pid):
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp"])
def test_a_killed_worker_is_started_again_and_the_run_ends_as_if_nothing_was(tiny, examples, tmp_path, strategy):
    """`kill -9`, twice; the third start goes on by itself."""
    given = flags(tiny, examples, "--strategy", strategy, "--lora.dropout", "0.1", "--train.max_steps", "30")
    given = list(map(str, [ROOT / "finetune" / "lora.py", *given, "--train.epochs", "99", "--save.keep_last", "2"]))
    command = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", "--max-restarts", "2", *given]
    subprocess.run([*command, "--out_dir", "whole"], cwd=tmp_path, env=FORKING, check=True, capture_output=True)
    pipe = subprocess.PIPE
    agent = subprocess.Popen([*command, "--out_dir", "run"], cwd=tmp_path, env=FORKING, stdout=pipe, stderr=pipe, text=True)
    for step, worker in ((6, 1), (18, 0)):
        while not any((tmp_path / "run" / "checkpoints" / f"step-{n:06d}").is_dir() for n in range(step, step + 9)):
            assert agent.poll() is None, agent.communicate()
            time.sleep(0.01)
        os.kill(children(agent.pid)[worker], signal.SIGKILL)
    said = agent.communicate(timeout=120)[0]
    assert agent.returncode == 0 and said.count("continuing after step") == 2
    whole, found = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    one, two = ([row["loss"] for row in rows_of(tmp_path / name) if "loss" in row] for name in ("whole", "run"))
    assert len(one) == 30 and one == two


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: (how to run something there, address, interface) of each."""
    names, wires = ("litft-test-a", "litft-test-b"), ("litft-ta", "litft-tb")
    setup = [f"netns add {name}" for name in names]
    setup += [f"link add {wires[0]} type veth peer name {wires[1]}"]
    for number, (name, wire) in enumerate(zip(names, wires, strict=True), 1):
        setup += [f"link set {wire} netns {name}", f"-n {name} addr add 10.77.0.{number}/24 dev {wire}"]
        setup += [f"-n {name} link set lo up", f"-n {name} link set {wire} up"]
    try:
        for line in setup:
            done = subprocess.run(["ip", *line.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"network namespaces cannot be made here: ip {line}: {done.stderr.strip()}")
        yield [(["ip", "netns", "exec", n], f"10.77.0.{i}", w) for i, (n, w) in enumerate(zip(names, wires, strict=True), 1)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_two_nodes_by_torchrun(tiny, examples, tmp_path, two_hosts):
    """Two agents, each in a network of its own, with two processes each: weights are sharded within a node."""
    given = flags(tiny, examples, "--strategy", "hsdp", "--out_dir", "run", "--train.micro_batch_size", "2")
    agents = []
    for number, (inside, address, wire) in enumerate(two_hosts):
        words = [
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
        words += ["--rdzv_endpoint", f"{two_hosts[0][1]}:29400", "--rdzv_conf", f"is_host={int(number == 0)}"]
        command = list(map(str, [*inside, *TORCHRUN, *words, ROOT / "finetune" / "lora.py", *given]))
        env = {**ENV, "GLOO_SOCKET_IFNAME": wire, "OMP_NUM_THREADS": "1"}
        log = (tmp_path / f"{number}.log").open("w")
        agents.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT))
    codes = [agent.wait(timeout=240) for agent in agents]
    said = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
    assert codes == [0, 0], said
    assert "on 4 devices" in said[0] and "each 2 devices all of them (hsdp" in said[0]
    alone = flags(tiny, examples, "--out_dir", "one", "--train.micro_batch_size", "2")
    script("finetune/lora.py", *alone, cwd=tmp_path)
    one, four = ([row["loss"] for row in rows_of(tmp_path / name) if "loss" in row] for name in ("one", "run"))
    assert four == pytest.approx(one, abs=1e-5)
