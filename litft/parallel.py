"""Devices, dtypes, processes and their memory: what Fabric is given, and what it is not.

Fabric launches, moves, wraps in DDP and reduces. It is given no precision plugin: `bf16-true` would cast the fp32 factors
too. The base is loaded in its dtype, what is trained stays in fp32, and every module casts where the two meet.
"""

import os
import platform
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed

from litft.args import FinetuneArgs

if TYPE_CHECKING:  # its import takes a second, which those who only generate or convert need not wait for
    from lightning_fabric import Fabric

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_fabric(args: FinetuneArgs) -> "Fabric":
    """A Fabric for these devices, not launched yet; ValueError where the machine does not have them."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    accelerator = pick_accelerator(args.accelerator)
    if accelerator == "cuda" and args.devices > torch.cuda.device_count():
        raise ValueError(f"--devices {args.devices}: this machine has {torch.cuda.device_count()} GPUs")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # views: or DDP's buckets would hold every gradient a second time
    strategy = DDPStrategy(gradient_as_bucket_view=True) if args.devices > 1 or args.strategy == "ddp" else "auto"
    return Fabric(accelerator=accelerator, devices=args.devices, strategy=strategy)


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
    """For training the whole model: on a GPU fp32 weights where they, their gradients, AdamW's moments and the bf16 copies
    fit (18 bytes a parameter, in nine tenths of the memory), else bf16 weights and gradients (12 bytes)."""
    precision, asked = pick_precision(precision, device), precision
    if asked != "auto" or device.type != "cuda":
        return precision
    return "bf16" if 18 * parameters < 0.9 * memory_there(device) else "bf16-true"


class HostGroup:
    """What all processes agree on, from host to host: no GPU is waited for."""

    def __init__(self, processes: int) -> None:
        self.group = distributed.new_group(backend="gloo") if processes > 1 else None

    def most(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        if self.group is None:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=self.group)
        return shared.tolist()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory, or the machine's, did not suffice."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def machine_lines(device: torch.device, processes: int) -> list[str]:
    """What a run ran on."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    return [
        f"{processes} x {chip}, {memory_there(device) / 2**30:.0f} GiB",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}",
    ]


def memory_there(device: torch.device) -> int:
    """Bytes of the device's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory(device: torch.device) -> float:
    """The most memory held so far in GiB: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if status.is_file():  # Linux's ru_maxrss would count the process that started this one, where that was larger
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # macOS, in bytes
