"""Count the launches and waits of a training step and of a decoded token on the pretended GPU.

    eval "$(tests/gpu/pretended_gpu/build.sh ENV)"
    python tests/gpu/pretended_gpu/launches.py step eager     # or: step compiled, token eager,
    token compiled

The model is Llama 3.1 8B with random weights: LoRA over 2,048 packed tokens, and decoding with a
capacity of 1,024 tokens.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from benchmark import BenchmarkArgs  # noqa: E402
from profile_step import first_step  # noqa: E402

from litft.args import DataArgs, TrainArgs  # noqa: E402
from litft.distributed.devices import pick_accelerator  # noqa: E402
from litft.inference.decoder import Decoder  # noqa: E402
from litft.inference.fused_linears import fuse_linears  # noqa: E402
from litft.model.placement import allocate  # noqa: E402
from litft.pretrained.folder import resolve  # noqa: E402

RUNTIME = ctypes.CDLL(os.environ["LD_PRELOAD"])
DRIVER = ctypes.CDLL(f"{os.environ['LD_LIBRARY_PATH']}/libcuda.so.1")
FOLDER = str(ROOT / "scripts" / "configs" / "llama-3.1-8b")
TOKENS = 2048


def counts() -> tuple[int, ...]:
    """Return launched kernels, waits of the host, and launched CUDA graphs so far."""
    launches = RUNTIME.fakecuda_launches() + DRIVER.fakecu_launches()
    return launches, RUNTIME.fakecuda_syncs(), RUNTIME.fakecuda_replays()


def training_step(compiled: bool) -> Callable[[], None]:
    """Return a LoRA step."""
    train = TrainArgs(
        compile=compiled,
        micro_batch_size=1,
        global_batch_size=1,
        activation_checkpointing="none",
    )
    args = BenchmarkArgs(
        FOLDER, precision="bf16", train=train, data=DataArgs(max_seq_length=TOKENS)
    )
    contender, samples, count = first_step(args, "cuda")

    def step() -> None:  # as `Contender.step`, without reading the loss
        contender.accumulate(samples, count)
        torch.nn.utils.clip_grad_norm_(contender.parameters, 1.0)
        contender.optimizer.step()
        contender.optimizer.zero_grad(set_to_none=True)

    return step


def decoded_token(compiled: bool) -> Callable[[], None]:
    """Return a decode step of one row."""
    model = resolve(FOLDER).meta_model(torch.bfloat16).requires_grad_(False).eval()
    allocate(model, "cuda")
    model.rotaries.to_empty(device="cuda")
    fuse_linears(model, pack=not compiled)
    decoder, token = Decoder(model, 1, 1024, compiled), torch.tensor([3], device="cuda")
    decoder.prefill(0, [5] * 40)

    def step() -> None:
        decoder.step(token, [True])
        decoder.append(0, 3)

    return step


def main() -> None:
    """Count one step after six others."""
    what, mode = sys.argv[1:]
    pick_accelerator("cuda")
    step = {"step": training_step, "token": decoded_token}[what](mode == "compiled")
    for _ in range(6):
        step()
    before = counts()
    step()
    launches, waits, graphs = (
        after - earlier for after, earlier in zip(counts(), before, strict=True)
    )
    print(f"{what}, {mode}: {launches} launches, {waits} waits, {graphs} CUDA graphs")


if __name__ == "__main__":
    main()
