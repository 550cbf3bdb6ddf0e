"""NCCL: DDP, FSDP2, HSDP and tensor parallelism on 2 and 4 GPUs; with one GPU, a world of one."""

import csv

import pytest

from gpu.comparisons import script

FLAGS = (
    "--accelerator cuda --train.max_steps 4 --eval.interval 2 --save.interval 2 "
    "--eval.max_new_tokens 8".split()
)


def losses(run):
    """Return the losses in a run's metrics.csv."""
    with (run / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


@pytest.mark.quick
@pytest.mark.numbers
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_world_of_one_over_nccl(strategy, tmp_path):
    """The collectives run, and change nothing."""
    for name in ("single", strategy):
        flags = [*FLAGS, "--precision", "fp32", "--strategy", name, "--out_dir", name]
        script("finetune/lora.py", *flags, cwd=tmp_path)
    assert losses(tmp_path / strategy) == pytest.approx(
        losses(tmp_path / "single"), rel=1e-4
    )


CASES = [
    pytest.param(2, "ddp", "lora", "", marks=pytest.mark.devices(2)),
    pytest.param(2, "fsdp", "lora", "", marks=pytest.mark.devices(2)),
    pytest.param(2, "fsdp", "full", "", marks=pytest.mark.devices(2)),
    pytest.param(2, "fsdp", "lora", "--quantize nf4", marks=pytest.mark.devices(2)),
    pytest.param(2, "ddp", "lora", "--quantize nf4", marks=pytest.mark.devices(2)),
    pytest.param(4, "hsdp", "lora", "--shard_size 2", marks=pytest.mark.devices(4)),
    pytest.param(
        4, "fsdp", "full", "--train.cpu_offload parameters", marks=pytest.mark.devices(4)
    ),
]


@pytest.mark.numbers
@pytest.mark.parametrize("devices, strategy, method, more", CASES)
def test_several_gpus_train_as_one(devices, strategy, method, more, tmp_path):
    """Losses as on one GPU; a sharded checkpoint resumes."""
    shared = [*FLAGS, "--precision", "fp32", *more.replace("--shard_size 2", "").split()]
    single = [flag for flag in shared if flag not in ("--train.cpu_offload", "parameters")]
    script(f"finetune/{method}.py", *single, "--out_dir", "one", cwd=tmp_path)
    flags = [
        "--devices",
        devices,
        "--strategy",
        strategy,
        *(["--shard_size", "2"] if strategy == "hsdp" else []),
    ]
    script(
        f"finetune/{method}.py",
        *shared,
        *flags,
        "--out_dir",
        "several",
        "--train.max_time",
        "1s",
        cwd=tmp_path,
    )
    script(
        f"finetune/{method}.py",
        *shared,
        *flags,
        "--out_dir",
        "several",
        "--resume",
        cwd=tmp_path,
    )
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


@pytest.mark.numbers
@pytest.mark.devices(2)
def test_tensor_parallel_answers_equal_one_gpus(tmp_path):
    """Greedy answers of a run's result on one GPU and on two."""
    script("finetune/lora.py", *FLAGS, "--out_dir", "run", cwd=tmp_path)
    prompt = [
        "--checkpoint_dir",
        "run",
        "--accelerator",
        "cuda",
        "--precision",
        "fp32",
        "--temperature",
        "0",
    ]
    prompt += ["--prompt", "Hello", "--max_new_tokens", "16"]
    answers = [
        script("generate/base.py", *prompt, "--devices", n, cwd=tmp_path) for n in (1, 2)
    ]
    assert answers[0] == answers[1]
