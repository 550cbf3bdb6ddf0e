"""Devices, dtypes and memory, and the setup of Lightning Fabric.

Fabric launches processes, moves tensors, wraps the model in DDP and reduces gradients. It gets no
precision plugin, because `bf16-true` would also cast the fp32 LoRA weights: the base is loaded in
its dtype, trained parameters stay in fp32, and each module casts where the two meet.
"""

import inspect
import logging
import os
import platform
import re
import resource
import sys
import warnings
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from litft.args import FinetuneArgs, PlanArgs, parse_duration
from litft.args.processes import cores, is_first_on_node, started_by
from litft.errors import is_host_memory_error

# importing it takes a second, which generation and conversion do not need
if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.strategy import Strategy

# Multiplications per decode step up to which one thread is as fast as two. Two threads synchronize
# after every operation, and stall when another program uses one of their cores. Measurements are in
# tutorials/inference.md.
MAX_SINGLE_THREAD_WORK = 64e6
MAX_PROCESSES_PER_CORE = 4
# compute capabilities from which a GPU has bf16 arithmetic, and tensor cores for fp16
BF16_CAPABILITY = (8, 0)
FP16_CAPABILITY = (7, 0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_fabric(args: FinetuneArgs, strategy: str | None = None) -> "Fabric":
    """Return a Fabric for the devices of `args`, not launched yet; raise ValueError if the machine
    lacks these devices.

    strategy: single, ddp, fsdp or hsdp; None: ddp if there are several devices.
    """
    from lightning_fabric.strategies.ddp import DDPStrategy
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    accelerator = pick_accelerator(args.accelerator)
    # torch refuses deterministic matrix products in cuBLAS without this setting
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    is_distributed = args.devices * args.num_nodes > 1
    timeout = limit_of(args.timeout)
    fabric_strategy: Strategy | str = "auto"
    # build_trained_network shards the network before it loads the weights
    if strategy in ("fsdp", "hsdp"):
        world_size = args.devices * args.num_nodes
        fabric_strategy = ModelParallelStrategy(
            lambda model, mesh: model, world_size, 1, True, _backend(accelerator), timeout
        )
    elif is_distributed or strategy == "ddp":
        supported = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        # bucket views avoid a second copy of all gradients; no initial sync, as all ranks have read
        # the same weights
        ddp = partial(
            DDPStrategy, gradient_as_bucket_view=True, init_sync=False, timeout=timeout
        )
        # broadcast_buffers is the name up to torch 2.12
        if "forward_sync_buffers" in supported:
            fabric_strategy = ddp(forward_sync_buffers=False)
        else:
            fabric_strategy = ddp(broadcast_buffers=False)
    return _fabric(accelerator, args.devices, args.num_nodes, fabric_strategy)


def limit_of(timeout: str) -> timedelta:
    """Return the duration of a --timeout."""
    limit = parse_duration(timeout)
    assert limit is not None, timeout  # the check of the flags refuses other texts
    return timedelta(seconds=limit)


def make_inference_fabric(accelerator: str, devices: int) -> "Fabric":
    """Return a Fabric for inference, not launched yet; raise ValueError if the machine lacks the
    devices."""
    from lightning_fabric.strategies.ddp import DDPStrategy

    accelerator = pick_accelerator(accelerator)
    return _fabric(
        accelerator, devices, 1, DDPStrategy(process_group_backend=_backend(accelerator))
    )


def _fabric(
    accelerator: str, devices: int, nodes: int, strategy: "Strategy | str"
) -> "Fabric":
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    # silence Fabric's banner; litft prints the relevant facts itself
    for name in (
        "lightning_fabric.utilities.distributed",
        "lightning_fabric.utilities.rank_zero",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    check_devices(accelerator, devices)
    # without this, Fabric would treat any process within a SLURM job as started by srun
    environment = None
    if started_by() is None:
        environment = LightningEnvironment()
    return Fabric(
        accelerator=accelerator,
        strategy=strategy,
        plugins=environment,
        devices=devices,
        num_nodes=nodes,
    )


@cache
def check_devices(accelerator: str, devices: int) -> None:
    """Raise ValueError if the machine has too few GPUs or far too few cores; warn if it has fewer
    cores than processes."""
    if accelerator == "cpu" and devices > 1 and started_by() is None and is_first_on_node():
        reason = (
            f"--devices {devices}: on a CPU each device is a process, and this machine has "
            f"{cores()} cores"
        )
        if devices > MAX_PROCESSES_PER_CORE * cores():
            raise ValueError(f"{reason}; pass at most {MAX_PROCESSES_PER_CORE * cores()}")
        if devices > cores():
            print(
                f"warning: {reason}; the processes will compete for them", file=sys.stderr
            )
    if accelerator == "cuda" and devices > torch.cuda.device_count():
        raise ValueError(
            f"--devices {devices}: this machine has {torch.cuda.device_count()} GPUs; pass at most "
            "that many"
        )


def _backend(accelerator: str) -> str | None:
    """Return the process group backends, for CPU tensors too (offloaded weights need them); None:
    torch's default."""
    if accelerator == "cuda":
        return "cpu:gloo,cuda:nccl"
    return None


def mesh_of(args: FinetuneArgs, strategy: str, device: torch.device) -> DeviceMesh | None:
    """Return the mesh to shard over: (shard,) for fsdp, (replicate, shard) for hsdp, None for other
    strategies."""
    if strategy not in ("fsdp", "hsdp"):
        return None
    size = num_shards(args, strategy)
    world_size = args.devices * args.num_nodes
    if strategy == "fsdp":
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type, (world_size // size, size), mesh_dim_names=("replicate", "shard")
    )


def num_shards(args: FinetuneArgs | PlanArgs, strategy: str) -> int:
    """Return the number of shards that the weights are split into."""
    return {
        "fsdp": args.devices * args.num_nodes,
        "hsdp": args.shard_size or args.devices,
    }.get(strategy, 1)


# of torch's compiler, about what litft has chosen: fp32 stays fp32, and how it compiles a softmax
COMPILER_WARNINGS = (r"TensorFloat32 tensor cores", r"\s*Online softmax is disabled")


def pick_accelerator(accelerator: str) -> str:
    """Return cpu or cuda; raise ValueError for cuda if no GPU is available.

    On a GPU, attention runs without cuDNN from now on: it is torch's first choice on Hopper, but
    prepares each new shape for some 0.4 s, and prompts and unpacked rows have new shapes all the
    time.
    """
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--accelerator cuda: torch finds no GPU; {_gpu_remedy()}, or use cpu"
        )
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
        for message in COMPILER_WARNINGS:
            warnings.filterwarnings("ignore", message, UserWarning)
    return accelerator


def _gpu_remedy() -> str:
    """Return what to look at where torch finds no GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: install a CUDA build"
    built = f"torch {torch.__version__} was built for CUDA {torch.version.cuda}"
    return f"{built}: check with nvidia-smi that the driver runs and is new enough"


def no_gpu_line() -> str:
    """Return what a run on a CPU says first; with a remedy if there is a GPU that torch does not
    find."""
    line = "no GPU was found: running on the CPU"
    if Path("/proc/driver/nvidia/version").is_file():
        return f"{line} ({_gpu_remedy()})"
    return line


def pick_precision(precision: str, device: torch.device, fits_fp16: bool = True) -> str:
    """Return the compute precision.

    "auto" becomes bf16 on a GPU with bf16 arithmetic, fp16 on one with tensor cores for it alone
    (T4, V100, RTX 20), otherwise fp32. fits_fp16: whether the model's activations stay in the range
    of fp16.
    """
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "fp32"
    # not torch.cuda.is_bf16_supported: a T4 emulates bf16
    capability = torch.cuda.get_device_capability(device)
    if capability >= BF16_CAPABILITY:
        return "bf16"
    if has_fp16_cores(device) and fits_fp16:
        return "fp16"
    return "fp32"


def has_fp16_cores(device: torch.device) -> bool:
    """Return whether a GPU has tensor cores for fp16; a GTX 16 has the capability of a T4 alone."""
    is_new_enough = torch.cuda.get_device_capability(device) >= FP16_CAPABILITY
    return is_new_enough and "GTX 16" not in torch.cuda.get_device_name(device)


def pick_generation_precision(
    precision: str, device: torch.device, stored: torch.dtype, fits_fp16: bool
) -> str:
    """Return the compute precision for generating text; "auto" is also bf16 on a CPU with bf16
    arithmetic.

    stored: the dtype of the weights in their folder; fp32 weights stay fp32 on a CPU. fits_fp16: as
    in `pick_precision`. On an EPYC
    with AVX512-BF16, bf16 decodes 1.6 times as fast as fp32 (SmolLM2-135M, 1 and 8 rows).
    """
    if (
        precision == "auto"
        and device.type == "cpu"
        and stored == torch.bfloat16
        and cpu_has_bf16()
    ):
        return "bf16"
    return pick_precision(precision, device, fits_fp16)


def cpu_has_bf16() -> bool:
    """Return whether the CPU has bf16 arithmetic, rather than only conversions."""
    # torch has no public name for them
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def lacks_bf16(device: torch.device, chosen: str) -> str | None:
    """Return what to tell a user whose GPU has no bf16 arithmetic (compute capability below 8.0);
    None for other devices. chosen: the precision that was picked."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= BF16_CAPABILITY:
        return None
    if chosen == "fp32" and has_fp16_cores(device):
        chosen += ", since fp16 does not suit this model or these flags"
    name = torch.cuda.get_device_name(device)
    return (
        f"{name} has no bf16 arithmetic (compute capability {'.'.join(map(str, capability))}): "
        f"precision auto is {chosen}"
    )


def pick_full_precision(
    precision: str, device: torch.device, num_parameters: int, fits_fp16: bool = True
) -> str:
    """Return the precision for full fine-tuning of `num_parameters` parameters on one device.

    On a GPU, "auto" becomes bf16 (fp32 weights, gradients and AdamW moments plus a bf16 copy, 18
    bytes per parameter) if that fits into 90% of its memory, else bf16-true (bf16 weights and
    gradients, 12 bytes per parameter).
    """
    precision, requested = pick_precision(precision, device, fits_fp16), precision
    if requested != "auto" or precision != "bf16":
        return precision
    if 18 * num_parameters < 0.9 * device_memory(device):
        return "bf16"
    return "bf16-true"


def limit_threads(model: nn.Module, rows: int) -> None:
    """Make torch use a single CPU thread if decoding `rows` sequences at once is too little work
    for two."""
    parameters = list(model.parameters())
    on_cpu = not any(parameter.is_cuda for parameter in parameters)
    if (
        on_cpu
        and rows * sum(parameter.numel() for parameter in parameters)
        <= MAX_SINGLE_THREAD_WORK
    ):
        torch.set_num_threads(1)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that GPU or CPU memory was exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or is_host_memory_error(error)


def machine_lines(device: torch.device, processes: int) -> list[str]:
    """Describe the hardware and software of a run: devices, memory, system, Python and torch
    versions."""
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    else:
        chip = f"CPU, {os.cpu_count()} cores"
    return [
        f"{processes} x {chip}, {device_memory(device) / 2**30:.0f} GiB",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}",
    ]


def device_memory(device: torch.device, processes: int = 1) -> int:
    """Return the memory of a GPU in bytes, or for the CPU one process's share of the machine's
    memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical_memory, cgroup_limit()) // processes


def cgroup_limit(
    membership: Path = Path("/proc/self/cgroup"), mount_point: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the memory limit of a container or SLURM job in bytes: the lowest limit of the
    process's control groups.

    Both versions are read (docs.kernel.org/admin-guide/cgroup-v2.html): memory.max and
    memory.limit_in_bytes.
    """
    limits = [1 << 62]
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # version 1 has a line for each controller, version 2 one line without any
        if controllers and "memory" not in controllers.split(","):
            continue
        if controllers:
            root = mount_point / "memory"
            name = "memory.limit_in_bytes"
        else:
            root = mount_point
            name = "memory.max"

        # the limits of the groups above this one hold, too
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                if text.isdecimal():
                    limits.append(int(text))
    return min(limits)


def malloc_name(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the allocator that serves this process: tcmalloc, jemalloc, mimalloc or glibc; ""
    where that is unknown."""
    if not maps.is_file():
        return ""
    loaded = maps.read_text()
    for name in ("tcmalloc", "jemalloc", "mimalloc"):
        if f"lib{name}" in loaded:
            return name
    if "libc.so.6" in loaded:
        return "glibc"
    return ""


def peak_memory(device: torch.device) -> float:
    """Return the peak memory so far in GiB: allocated on the GPU, or resident in this process on a
    CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    # on Linux, ru_maxrss also counts the parent process from before exec, if that was larger
    if status.is_file():
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert peak is not None  # Linux writes it for every process
        return int(peak[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # in bytes on macOS
