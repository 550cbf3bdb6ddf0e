"""Fake CUDA tensors on torch's CPU build: shapes, dtypes and devices are those of a GPU, and
nothing is computed.

    import fake_cuda  # before torch: it registers a CUDA device, which torch looks up once a
    process import torch

    with fake_cuda.fake_cuda():
        x = torch.empty(4, 8, device="cuda", requires_grad=True)
        (x @ x.mT).sum().backward()

README.md says what this shows and what it cannot.
"""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
SOURCES = [HERE / "guard.cpp", HERE / "hooks.cpp"]
NAMES = {
    (7, 5): "Tesla T4",
    (8, 0): "NVIDIA A100-SXM4-80GB",
    (8, 9): "NVIDIA L40S",
    (9, 0): "NVIDIA H100 80GB HBM3",
}


def build() -> Path:
    """The library of `SOURCES`, made by g++ in a few seconds, once for each torch and each change
    of the sources."""
    torch_dir = Path(importlib.util.find_spec("torch").origin).parent
    version = (torch_dir / "version.py").read_text("utf-8")
    key = hashlib.sha256(
        "".join(
            [version, str(torch_dir), *(path.read_text("utf-8") for path in SOURCES)]
        ).encode()
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fake_cuda"
    library = cache / f"{key.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    headers = [
        f"-I{torch_dir / 'include'}",
        f"-I{torch_dir / 'include/torch/csrc/api/include'}",
    ]
    libraries = [
        f"-L{torch_dir / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{torch_dir / 'lib'}",
    ]
    # moved into place when it is whole: several may build it
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        out = Path(folder) / "out.so"
        flags = ["-O1", "-std=c++20", "-fPIC", "-shared"]
        subprocess.run(
            ["g++", *flags, *headers, *map(str, SOURCES), *libraries, "-o", str(out)],
            check=True,
        )
        out.rename(library)
    return library


if "torch" in sys.modules:
    raise ImportError("import fake_cuda before torch: torch looks for CUDA once a process")
ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

if torch.version.cuda:
    raise ImportError(
        f"fake_cuda is for torch's CPU build, and this is {torch.__version__}"
    )

aten = torch.ops.aten


class HostWaits(RuntimeError):
    """The host would wait for the GPU here."""


class NoWaits(TorchDispatchMode):
    """Raises HostWaits where a GPU's number is read, and where tensors are copied without
    `non_blocking=True`.

    FakeTensorMode itself raises where a shape depends on data (nonzero, boolean indices, unique,
    repeat_interleave).
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_cuda:
            raise HostWaits(
                "a number of a CUDA tensor is read (.item(), .tolist(), float(), bool())"
            )
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            self.check(
                args[0].device, kwargs["device"], kwargs.get("non_blocking", False), args[0]
            )
        elif func is aten.copy_.default:
            self.check(
                args[1].device,
                args[0].device,
                args[2] if len(args) > 2 else kwargs.get("non_blocking"),
                args[1],
            )
        return func(*args, **kwargs)

    @staticmethod
    def check(
        source: torch.device, target: torch.device, non_blocking: bool, tensor: Tensor
    ) -> None:
        """HostWaits for a blocking copy between host and device."""
        if (
            not non_blocking
            and {source.type, target.type} == {"cpu", "cuda"}
            and tensor.numel()
        ):
            raise HostWaits(
                f"a tensor {tuple(tensor.shape)} is copied from {source} to {target} without "
                "non_blocking=True"
            )


def properties(capability: tuple[int, int], memory: int, name: str) -> SimpleNamespace:
    """What torch.cuda.get_device_properties says of the device."""
    major, minor = capability
    sizes = dict(
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        L2_cache_size=50 * 2**20,
    )
    shared = dict(
        shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=227 * 2**10
    )
    return SimpleNamespace(
        name=name, major=major, minor=minor, total_memory=memory, **sizes, **shared
    )


def _patches(capability: tuple[int, int], memory: int, name: str) -> Iterator[Any]:
    """What Python asks of torch.cuda; what it does there is left out."""

    def returns(value: Any) -> Callable:
        return lambda *_, **__: value

    nothing = returns(None)
    device = properties(capability, memory, name)
    event = dict(
        record=nothing,
        wait=nothing,
        query=returns(True),
        synchronize=nothing,
        elapsed_time=returns(0.0),
    )
    stream = SimpleNamespace(
        wait_stream=nothing, wait_event=nothing, synchronize=nothing, record_event=nothing
    )
    answers = dict(
        is_available=returns(True),
        is_initialized=returns(True),
        _is_compiled=returns(True),
        _lazy_init=nothing,
        init=nothing,
        _lazy_call=lambda call, **_: call(),
        device_count=returns(1),
        current_device=returns(0),
        set_device=nothing,
        _exchange_device=returns(0),
        _maybe_exchange_device=returns(0),
        get_device_name=returns(name),
        get_device_properties=returns(device),
        get_device_capability=returns(capability),
        is_bf16_supported=returns(capability >= (8, 0)),
        mem_get_info=returns((memory, memory)),
        memory_allocated=returns(0),
        max_memory_allocated=returns(0),
        reset_peak_memory_stats=nothing,
        empty_cache=nothing,
        synchronize=nothing,
        is_current_stream_capturing=returns(False),
        current_stream=returns(stream),
        default_stream=returns(stream),
        Stream=returns(stream),
        Event=lambda *_, **__: SimpleNamespace(**event),
        stream=lambda *_: nullcontext(),
        default_generators=(torch.Generator(),),
    )
    yield mock.patch.multiple(torch.cuda, **answers)
    yield mock.patch.multiple(
        torch.cuda.random,
        **{n: answers[n] for n in ("current_device", "device_count", "_lazy_call")},
    )
    yield mock.patch.object(Tensor, "pin_memory", lambda self, *_: self)
    yield mock.patch.object(Tensor, "record_stream", nothing)
    # it would make a real CUDA tensor
    yield mock.patch.object(fake_tensor, "init_gpu_context", nothing)


class _Mode(FakeTensorMode):
    """FakeTensorMode that makes `torch.tensor(..., device="cuda")` on the CPU first: there is no
    CUDA kernel to copy with.

    `torch.tensor(..., device="meta")` is not fake in torch 2.13, and becomes so when it is used.
    """

    avoid_device_init = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = [
            self.from_tensor(each) if type(each) is Tensor and each.is_meta else each
            for each in args
        ]
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def fake_cuda(
    capability: tuple[int, int] = (9, 0), memory: int = 80 * 2**30, waits: str = "raise"
) -> Iterator[FakeTensorMode]:
    """Inside, tensors are fake, and torch sees one GPU of this compute capability and memory.

    waits: what happens where the host would wait for the GPU, "raise" (HostWaits) or "allow", which
    allows blocking copies; a number of a fake tensor does not exist, so reading one raises either
    way. Operators without a fake implementation
    raise, too: a kernel of the CPU is never run in their place.
    """
    mode = _Mode(allow_fallback_kernels=False, allow_non_fake_inputs=False)
    name = NAMES.get(capability, f"CUDA device {capability[0]}.{capability[1]}")
    with ExitStack() as stack:
        for patch in _patches(capability, memory, name):
            stack.enter_context(patch)
        stack.enter_context(mode)
        if waits == "raise":
            stack.enter_context(NoWaits())
        yield mode


def faked(mode: FakeTensorMode, values: Any) -> Any:
    """Real CPU tensors, alone or in lists, tuples and dicts, as fake ones on the CPU."""
    return tree_map_only(Tensor, mode.from_tensor, values)
