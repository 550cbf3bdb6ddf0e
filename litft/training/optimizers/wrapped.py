"""The optimizer within the wrapper that Fabric's `setup` returns."""

from lightning_fabric.wrappers import _FabricOptimizer
from torch.optim import Optimizer

from litft.training.optimizers.rounded import OptimizerInBackward


def unwrapped_in_backward(optimizer: Optimizer) -> OptimizerInBackward:
    """Return the optimizer of --train.optimizer_in_backward that Fabric has wrapped.

    The wrapper has the same methods, but they would set attributes of the wrapper alone.
    """
    assert isinstance(optimizer, _FabricOptimizer)
    unwrapped = optimizer.optimizer
    assert isinstance(unwrapped, OptimizerInBackward)
    return unwrapped
