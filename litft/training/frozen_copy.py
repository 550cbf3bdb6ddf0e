"""The reference of rewards: a copy of the trained weights before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from litft.model.placement import local
from litft.model.transformer import GPT


class FrozenCopy:
    """A copy of the trained weights of a network, or of this process's shards of them."""

    def __init__(self, model: GPT) -> None:
        # FSDP2 moves a shard to other memory in the first forward pass, to pad or to pin it, so
        # that only the parameter itself is kept
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.values = [local(p).detach().clone() for p in self.parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the context, the network has the copied weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the values of network and copy, one tensor after the other."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            shard = local(parameter)
            current = shard.clone()
            shard.copy_(value)
            value.copy_(current)
