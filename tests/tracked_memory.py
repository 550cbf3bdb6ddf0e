"""The peak memory of training steps, measured by torch's MemTracker on fake or real tensors."""

from collections import OrderedDict
from contextlib import nullcontext

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from litft.args import TrainArgs
from litft.distributed.devices import DTYPES
from litft.methods import Method
from litft.model.transformer import GPT
from litft.pretrained.folder import PretrainedFolder
from litft.training.memory.activations import Shape
from litft.training.memory_saving.activation_checkpointing import recompute
from litft.training.optimizers.make import make_optimizer
from litft.training.optimizers.rounded import OptimizerInBackward


class FakeValues(TorchDispatchMode):
    """Return 1 where Python needs the value of a fake tensor, which has none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return func(*args, **(kwargs or {}))


def tracked_peak(
    source: PretrainedFolder,
    method: Method,
    train: TrainArgs,
    precision: str,
    shape: Shape,
    recomputed: str = "none",
    mode: type = FakeTensorMode,
    supervised: int | None = None,
) -> int:
    """Return the peak of two training steps in bytes; the second has the optimizer's state.

    supervised: number of supervised tokens in a micro-batch; None: all.
    """
    with mode():
        torch.set_default_dtype(DTYPES[method.storage(precision)])
        model = GPT(source.config)
        torch.set_default_dtype(torch.float32)
        method.attach(model)
        method.set_compute_dtype(model, precision)
        for name in method.frozen:
            model.get_parameter(name).requires_grad_(False)
        recompute(model, recomputed)
        model.label_smoothing, model.neftune_alpha = (
            train.label_smoothing,
            train.neftune_alpha,
        )
        trained = {
            name: p for name, p in method.parameters(model).items() if p.requires_grad
        }
        optimizer = make_optimizer(train, method, trained)
        tracker, frozen = MemTracker(), RemovableHandle(OrderedDict())
        for parameter in model.parameters():
            # the tracker would register a gradient hook, which they do not support
            if not parameter.requires_grad:
                tracker._param_to_grad_hook_handles[parameter] = (frozen, frozen)
        tracker.track_external(model, optimizer)
        tokens = torch.zeros((shape.rows, shape.tokens), dtype=torch.int64)
        # fake tensors have no values to derive them from
        indices = torch.arange(supervised or tokens.numel())
        model.train()
        with FakeValues() if mode is FakeTensorMode else nullcontext(), tracker:
            for _ in range(2):
                with (
                    optimizer.stepping()
                    if isinstance(optimizer, OptimizerInBackward)
                    else nullcontext()
                ):
                    for _ in range(1 + shape.accumulated):
                        inputs = {"targets": tokens, "target_indices": indices}
                        if shape.per_token:
                            model(tokens, **inputs, reduction="none").sum().backward()
                        else:
                            model(tokens, **inputs)[0].backward()
                        tracker.reset_mod_stats()
                if not train.optimizer_in_backward:
                    nn.utils.clip_grad_norm_(
                        trained.values(), train.max_grad_norm or float("inf")
                    )
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
