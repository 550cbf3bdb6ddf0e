"""Measure attention kernels on packed rows, forward and backward: varlen, FlexAttention, SDPA with
a mask, and cuDNN.

    python scripts/attention_speed.py --out attention.json

The row has documents of 512 tokens, and four query heads for each key head. Needs a GPU.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from decode_speed import timed

from litft.args.parser import parse
from litft.cli import user_errors


@dataclass
class AttentionArgs:
    """Measure attention kernels on packed rows."""

    tokens: int = 8192
    """Tokens of the row."""
    heads: int = 32
    """Query heads; a quarter as many key heads."""
    head_dim: int = 128
    """Size of each head."""
    rounds: int = 5
    """Measured rounds, after two to warm up."""
    out: str | None = None
    """A JSON file to write the results to. Default: no file."""

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        if self.tokens % 512:
            return [f"--tokens {self.tokens}: must be a multiple of 512"]
        return []


def kernels(args: AttentionArgs, device: object) -> dict[str, Callable]:
    """Return a function of q, k and v for each kernel."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import flex_attention

    from litft.model.attention import _attend_varlen
    from litft.model.attention_eager import attention_mask
    from litft.model.packed_sequences import PackedSequences

    ids = torch.arange(args.tokens, device=device)[None] // 512
    documents = PackedSequences.of(ids).with_masks({None})
    scale = args.head_dim**-0.5
    compiled_flex = torch.compile(flex_attention)

    def masked(q, k, v):
        mask = attention_mask(q, k, documents, None)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )

    def cudnn(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )

    return {
        "varlen": lambda q, k, v: _attend_varlen(q, k, v, documents, None, scale),
        "flex": lambda q, k, v: compiled_flex(
            q, k, v, None, documents.masks[None], scale, True
        ),
        "sdpa with a mask": masked,
        "cudnn, causal, one document": cudnn,
    }


def main(args: AttentionArgs) -> None:
    """Measure every kernel and print its milliseconds."""
    import torch

    from litft.distributed.devices import pick_accelerator

    device = torch.device(pick_accelerator("cuda"))
    shapes = [
        (1, count, args.tokens, args.head_dim)
        for count in (args.heads, args.heads // 4, args.heads // 4)
    ]
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    )
    figures: dict[str, float | str] = {}
    for name, kernel in kernels(args, device).items():

        def run(kernel=kernel):
            y = kernel(q, k, v)
            torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

        try:
            times = [1000 * timed(run, device) for _ in range(args.rounds + 2)]
            figures[name] = statistics.median(times[2:])
            print(f"{name}: {figures[name]:.2f} ms")
        except Exception as error:  # kernels refuse for many reasons
            figures[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            print(f"{name}: {figures[name]}")
    if args.out:
        Path(args.out).write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    with user_errors():
        main(parse(AttentionArgs, sys.argv[1:]))
