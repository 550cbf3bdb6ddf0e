"""Devices, dtypes and processes: what Fabric is given, and what it is not.

Fabric launches, moves, wraps in DDP and reduces. It is given no precision plugin: `bf16-true` would cast the fp32 factors
too. The base is loaded in its dtype, what is trained stays in fp32, and every module casts where the two meet.
"""

import os

import torch
from lightning_fabric import Fabric

from litft.args import FinetuneArgs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_fabric(args: FinetuneArgs) -> Fabric:
    """A Fabric for these devices, not launched yet; ValueError where the machine does not have them."""
    accelerator = pick_accelerator(args.accelerator)
    if accelerator == "cuda" and args.devices > torch.cuda.device_count():
        raise ValueError(f"--devices {args.devices}: this machine has {torch.cuda.device_count()} GPUs")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    strategy = "ddp" if args.devices > 1 or args.strategy == "ddp" else "auto"
    return Fabric(accelerator=accelerator, devices=args.devices, strategy=strategy)


def pick_accelerator(accelerator: str) -> str:
    """cpu or cuda; ValueError for a GPU that is not there."""
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("--accelerator cuda: torch sees no GPU; use cpu, or install a CUDA build of torch")
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return accelerator


def pick_precision(precision: str, device: torch.device) -> str:
    """The base's dtype: bf16 on a GPU, fp32 on a CPU, unless asked for."""
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" else "fp32"
