"""The Triton kernels of flash-linear-attention, which replace the plain forms of recurrent mixers
on a GPU.

They multiply in bf16 and keep decays and states in fp32. `pip install 'litft[kernels]'` installs
them; without them, for other dtypes, and with `--deterministic` (they pick their block sizes by
timing), the plain forms run. The convolution is that of `causal-conv1d` where this package is
installed.
"""

# the packages of the kernels are optional, and only some GPUs run them
# pyright: reportMissingImports=false

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor

from litft.model.config import Config, ShortConvConfig
from litft.model.device_type import device_type, is_planned
from litft.model.packed_sequences import PackedSequences

# B batch, T tokens, H heads, G groups of heads that share queries and keys, K key dim, V value dim,
# N documents, C channels

MAX_KEY_DIM = 256  # of the kernels of the delta rule
HOPPER = 9  # major compute capability
# versions of Triton with wrong gradients on Hopper GPUs
WRONG_FROM = (3, 4, 0)
RIGHT_FROM = (3, 7, 1)


@cache
def are_installed() -> bool:
    """Return whether flash-linear-attention can be imported."""
    return find_spec("fla") is not None and find_spec("triton") is not None


@cache
def triton_without_backward() -> str | None:
    """Return the version of Triton if flash-linear-attention refuses to compute gradients with it
    on this GPU; None if it computes them.

    On Hopper GPUs, these versions of Triton give wrong gradients of recurrences with a decay
    (https://github.com/fla-org/flash-linear-attention/issues/640).
    """
    if not are_installed() or not torch.cuda.is_available() or find_spec("tilelang"):
        return None
    is_hopper = torch.cuda.get_device_capability()[0] == HOPPER
    installed = version("triton")
    numbers = tuple(map(int, re.findall(r"\d+", installed)[:3]))
    if is_hopper and WRONG_FROM <= numbers < RIGHT_FROM:
        return installed
    return None


def note(config: Config, device: str) -> str | None:
    """Return a warning if the network has recurrent mixers that are trained without kernels on
    `device`, or None."""
    mixers = []
    for layer in config.layers:
        if layer.mixer:
            mixers.append(layer.mixer)
    if device != "cuda" or not mixers:
        return None
    has_recurrence = not all(isinstance(mixer, ShortConvConfig) for mixer in mixers)
    triton = triton_without_backward()
    if has_recurrence and triton:
        return (
            f"warning: the recurrent layers train without GPU kernels, whose gradients are wrong "
            f"with Triton {triton} on this GPU; faster: a torch with Triton 3.7.1 or newer, or "
            "pip install tilelang"
        )
    if are_installed():
        return None
    what = "recurrent layers" if has_recurrence else "convolutions"
    return (
        f"warning: the {what} run without GPU kernels; faster: pip install 'litft[kernels]' "
        "(flash-linear-attention)"
    )


def can_run(*inputs: Tensor) -> bool:
    """Return whether the kernels compute with these inputs, of any shape: on a GPU, with all or
    some of them in bf16."""
    return (
        device_type(inputs[0]) == "cuda"
        and any(x.dtype == torch.bfloat16 for x in inputs)
        and not torch.are_deterministic_algorithms_enabled()
        and are_installed()
    )


def can_run_recurrence(*inputs: Tensor) -> bool:
    """Return whether the kernels of recurrences compute with these inputs, and their gradients if
    these are needed."""
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if needs_gradients and triton_without_backward():
        return False
    return can_run(*inputs)


@contextmanager
def without_launches() -> Iterator[None]:
    """Within the context, kernels compute nothing, so that the memory around them can be traced on
    fake tensors."""
    if not are_installed():
        yield
        return
    from triton.runtime.jit import KernelInterface

    # kernel[grid] returns a function that launches the
    # kernel; here it returns one that does nothing
    before = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: lambda *args, **kwargs: None
    try:
        yield
    finally:
        KernelInterface.__getitem__ = before


def fused_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    documents: PackedSequences | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return y (B, T, H, V) and the state after the last token (B, H, K, V), or None with
    documents; see `recurrence`.

    q, k: (B, T, G, K). v: (B, T, H, V). g: (B, T, H), or (B, T, H, K), which needs the delta rule.
    b: (B, T, H). state: (B, H, K, V).
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    # the narrowest dtype: the inputs of a kernel have
    # one dtype, and `can_run` needs one input in bf16
    dtype = min((q.dtype, k.dtype, v.dtype), key=lambda dtype: dtype.itemsize)
    heads = v.size(2)
    kernel = chunk_simple_gla
    if b is not None:
        kernel = chunk_gated_delta_rule if g.dim() == 3 else chunk_kda
    elif heads > q.size(2):
        # only the kernels of the delta rule share queries and keys
        q, k = (x.repeat_interleave(heads // x.size(2), dim=2) for x in (q, k))
    inputs = [
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        g.float(),
        *([] if b is None else [b.float()]),
    ]
    # the caller has scaled the queries
    settings = {"scale": 1.0, "initial_state": None if state is None else state.float()}
    y, state = kernel(
        *_one_row(inputs, documents),
        **settings,
        output_final_state=documents is None,
        **_lengths(documents),
    )
    return y.view_as(v), state


def _one_row(inputs: Iterable[Tensor], documents: PackedSequences | None) -> list[Tensor]:
    """Return inputs (B, T, ...) as one row (1, B T, ...) if documents end within rows."""
    if documents is None:
        return [*inputs]
    return [x.flatten(0, 1)[None] for x in inputs]


def _lengths(documents: PackedSequences | None) -> dict[str, Tensor | None]:
    """Return the arguments that tell a kernel where documents start; none while planning, when they
    have no values."""
    if documents is None or is_planned():
        return {}
    return {"cu_seqlens": documents.cu_seqlens, "cu_seqlens_cpu": documents.host_cu_seqlens}


def fused_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: PackedSequences | None
) -> Tensor:
    """Return the causal convolution of x (B, T, C) with `weight` (C, width) and `bias` (C,) within
    each document."""
    from fla.modules.causal_conv1d import causal_conv1d

    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    # limits of the package's CUDA kernel
    has_cuda_form = x.size(2) % 8 == 0 and 2 <= weight.size(1) <= 4 and _has_causal_conv1d()
    backend = "cuda" if has_cuda_form else "triton"
    y, _ = causal_conv1d(
        *_one_row([x], documents), weight, bias, backend=backend, **_lengths(documents)
    )
    return y.view_as(x)


@cache
def _has_causal_conv1d() -> bool:
    """Return whether causal-conv1d is installed and was built for this version of torch."""
    # a build for another version of torch is found, but fails to load
    try:
        import causal_conv1d  # noqa: F401
    except ImportError:
        return False
    return True
