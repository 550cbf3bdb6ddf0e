"""A network whose layers lie on several devices, each computed where it lies: for what one device cannot hold."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from litft.methods.mixins import mixed
from litft.model.kv_cache import KVCache, LayerCache
from litft.model.packed_sequences import PackedSequences
from litft.model.placement import WeightPlacement, allocate
from litft.model.quantization import QuantizedModule
from litft.model.rope import CosSin
from litft.model.transformer import GPT

ROOM = 4096  # tokens of keys and values that are left room for, where the context is not shorter
SPARE = 0.9  # of the free memory; the rest is for what passes through


class DeviceMap(WeightPlacement):
    """Whole tensors, of which a layer's lie together; what is not of a layer is on the first device.

    counts: how many layers each device gets; None: as many as fit, and the host the rest.
    """

    def __init__(self, devices: Sequence[torch.device], counts: Sequence[int] | None) -> None:
        self.devices, self.counts = list(devices), counts

    def allocate(self, model: GPT, device: torch.device | str) -> None:
        """As Share's. ValueError where the counts are not the layers'."""
        devices, counts = self.devices, self.counts
        if counts is None:
            free = [torch.cuda.mem_get_info(each)[0] if each.type == "cuda" else None for each in devices]
            layers = [_bytes(block) for block in model.blocks]
            counts = fit_layers(free, [size + _cache_bytes(model) for size in layers], _bytes(model) - sum(layers))
            devices = [*devices, torch.device("cpu")]
        elif sum(counts) != len(model.blocks):
            given = ",".join(map(str, counts))
            raise ValueError(
                f"--layers_per_device {given}: these are {sum(counts)}, and the model has {len(model.blocks)} layers; "
                "give numbers that add up to that"
            )
        places = [place for place, count in zip(devices, counts, strict=True) for _ in range(count)]
        for block, place in zip(model.blocks, places, strict=True):
            allocate(block, place)
        super().allocate(model, device)

    def connect(self, model: GPT) -> GPT:
        """As Share's."""
        for block, place in zip(model.blocks, model.block_devices, strict=True):
            block.__class__, block.place, block.onward = mixed(PlacedBlock, type(block)), place, None
        model.blocks[-1].onward = model.embed.weight.device
        return model


class PlacedBlock(nn.Module):
    """A block to which its inputs come; `onward`: where its output goes, None: it stays."""

    def forward(
        self, x: Tensor, cos_sin: CosSin | None, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        x = x.to(self.place)
        if cos_sin is not None:
            cos_sin = CosSin(*(each if each is None else each.to(self.place) for each in cos_sin))
        x = super().forward(x, cos_sin, documents, cache)
        return x if self.onward is None else x.to(self.onward)


def fit_layers(free: Sequence[int | None], layers: Sequence[int], ends: int) -> list[int]:
    """How many layers each device has room for, in their order, and then how many are left.

    free: bytes on each device; None: enough. layers: bytes of each. ends: bytes besides, on the first device.
    """
    counts, waiting = [], list(layers)
    for index, room in enumerate(free):
        room = None if room is None else room * SPARE - (0 if index else ends)
        count = 0
        while waiting and (room is None or waiting[0] <= room):
            size = waiting.pop(0)
            room = None if room is None else room - size
            count += 1
        counts.append(count)
    return [*counts, len(waiting)]


def _bytes(module: nn.Module) -> int:
    """Of parameters, and of the scales of those in 4 bits."""
    scales = sum(each.weight.nbytes // 8 for each in module.modules() if isinstance(each, QuantizedModule))
    return scales + sum(parameter.nbytes for parameter in module.parameters())


def _cache_bytes(model: GPT) -> int:
    """Of one layer's keys and values."""
    config = model.config
    return min(ROOM, config.max_positions) * KVCache.token_bytes(config, model.dtype) // len(config.layers)
