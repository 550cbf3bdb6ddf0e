"""Devices, dtypes, processes and their memory: what Fabric is given, and what it is not.

Fabric launches, moves, wraps in DDP and reduces. It is given no precision plugin: `bf16-true` would cast the fp32 factors
too. The base is loaded in its dtype, what is trained stays in fp32, and every module casts where the two meet.
"""

import inspect
import logging
import os
import platform
import re
import resource
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from litft.args import FinetuneArgs, PlanArgs, seconds
from litft.args.processes import cores, local_rank, started_by

if TYPE_CHECKING:  # its import takes a second, which those who only generate or convert need not wait for
    from lightning_fabric import Fabric

# Multiplications of a decoding step up to which one thread is as fast as two. Two threads wait for each other after every
# operation, and stall when another program takes one of their cores: tutorials/inference.md has the measurements.
ONE_THREAD = 64e6
MOST_OF_A_CORE = 4  # processes
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_fabric(args: FinetuneArgs, strategy: str | None = None) -> "Fabric":
    """A Fabric for these devices, not launched yet; ValueError where the machine does not have them.

    strategy: single, ddp, fsdp or hsdp; None: ddp where there are several devices.
    """
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    accelerator = pick_accelerator(args.accelerator)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    several, timeout = args.devices * args.num_nodes > 1, timedelta(seconds=seconds(args.timeout))
    chosen: Any = "auto"
    if strategy in ("fsdp", "hsdp"):  # Job.build shards the network, before it is read
        everywhere = args.devices * args.num_nodes  # what waits on the host is reduced there
        chosen = ModelParallelStrategy(lambda model, mesh: model, everywhere, 1, True, _backend(accelerator), timeout)
    elif several or strategy == "ddp":
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # until torch 2.12
        # views: or DDP's buckets would hold every gradient a second time. All have read the same weights
        chosen = DDPStrategy(gradient_as_bucket_view=True, init_sync=False, timeout=timeout, **{buffers: False})
    return _fabric(accelerator, args.devices, args.num_nodes, chosen)


def make_inference_fabric(accelerator: str, devices: int) -> "Fabric":
    """A Fabric for processes that do not train, not launched yet; ValueError where the machine does not have the devices."""
    from lightning_fabric.strategies import DDPStrategy

    accelerator = pick_accelerator(accelerator)
    return _fabric(accelerator, devices, 1, DDPStrategy(process_group_backend=_backend(accelerator)))


def _fabric(accelerator: str, devices: int, nodes: int, strategy: Any) -> "Fabric":
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment

    # its banner; what matters is in our own first lines
    for name in ("lightning_fabric.utilities.distributed", "lightning_fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    check_devices(accelerator, devices)
    # else Fabric would take any job of SLURM for one that srun has started
    environment = [LightningEnvironment()] if started_by() is None else []
    return Fabric(accelerator=accelerator, strategy=strategy, plugins=environment, devices=devices, num_nodes=nodes)


@cache
def check_devices(accelerator: str, devices: int) -> None:
    """ValueError where the machine does not have so many GPUs, or far fewer cores; a warning where it has fewer."""
    if accelerator == "cpu" and devices > 1 and started_by() is None and local_rank() == "0":
        reason = f"--devices {devices}: on a CPU each is a process, and there are {cores()} cores"
        if devices > MOST_OF_A_CORE * cores():
            raise ValueError(f"{reason}; give at most {MOST_OF_A_CORE * cores()}")
        if devices > cores():
            print(f"warning: {reason}; they will wait for each other", file=sys.stderr)
    if accelerator == "cuda" and devices > torch.cuda.device_count():
        raise ValueError(f"--devices {devices}: this machine has {torch.cuda.device_count()} GPUs")


def _backend(accelerator: str) -> str | None:
    """How processes speak to each other, also of what lies in the host's memory; None: as torch has it."""
    return "cpu:gloo,cuda:nccl" if accelerator == "cuda" else None


def mesh_of(args: FinetuneArgs, strategy: str, device: torch.device) -> DeviceMesh | None:
    """The processes over which weights are sharded, those of a row together; None: they are not."""
    if strategy not in ("fsdp", "hsdp"):
        return None
    size, everywhere = shards(args, strategy), args.devices * args.num_nodes
    if strategy == "fsdp":
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (everywhere // size, size), mesh_dim_names=("replicate", "shard"))


def shards(args: FinetuneArgs | PlanArgs, strategy: str) -> int:
    """Into how many parts the weights are cut."""
    return {"fsdp": args.devices * args.num_nodes, "hsdp": args.shard_size or args.devices}.get(strategy, 1)


def pick_accelerator(accelerator: str) -> str:
    """cpu or cuda; ValueError for a GPU that is not there."""
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("--accelerator cuda: torch sees no GPU; use cpu, or install a CUDA build of torch")
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return accelerator


def pick_precision(precision: str, device: torch.device) -> str:
    """What the network computes in: bf16 on a GPU, fp32 on a CPU, unless asked for."""
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" else "fp32"


def pick_full_precision(precision: str, device: torch.device, parameters: int) -> str:
    """For training so many parameters on one device: on a GPU fp32 weights where they, their gradients, AdamW's moments and
    the bf16 copies fit (18 bytes a parameter, in nine tenths of the memory), else bf16 weights and gradients (12 bytes)."""
    precision, asked = pick_precision(precision, device), precision
    if asked != "auto" or device.type != "cuda":
        return precision
    return "bf16" if 18 * parameters < 0.9 * device_memory(device) else "bf16-true"


def limit_threads(model: nn.Module, rows: int) -> None:
    """Let torch use one thread on the CPU from now on if decoding `rows` texts at once is too little work for two."""
    parameters = list(model.parameters())
    on_cpu = not any(parameter.is_cuda for parameter in parameters)
    if on_cpu and rows * sum(parameter.numel() for parameter in parameters) <= ONE_THREAD:
        torch.set_num_threads(1)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory, or the machine's, did not suffice."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def machine_lines(device: torch.device, processes: int) -> list[str]:
    """What a run ran on."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    return [
        f"{processes} x {chip}, {device_memory(device) / 2**30:.0f} GiB",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}",
    ]


def device_memory(device: torch.device, processes: int = 1) -> int:
    """Bytes of the device's memory; of a machine's that so many processes share, one's part."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, cgroup_limit()) // processes


def cgroup_limit(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that a container, or a job of SLURM, may use: the least that the process's control groups allow.

    Both versions' are read (docs.kernel.org/admin-guide/cgroup-v2.html): memory.max, and memory.limit_in_bytes.
    """
    found = [1 << 62]
    for line in proc.read_text().splitlines() if proc.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (mounted / "memory", "memory.limit_in_bytes") if controllers else (mounted, "memory.max")
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                found += [int(text)] if text.isdecimal() else []
    return min(found)


def peak_memory(device: torch.device) -> float:
    """The most memory held so far in GiB: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if status.is_file():  # Linux's ru_maxrss would count the process that started this one, where that was larger
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # macOS, in bytes
