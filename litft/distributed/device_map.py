"""Layers spread over several devices, each computed on its own device: for models that do not fit
on one device."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from litft.methods.mixins import change_class
from litft.model.kv_cache import KVCache, LayerCache
from litft.model.packed_sequences import PackedSequences
from litft.model.per_layer_input import BlockExtra
from litft.model.placement import WeightPlacement, allocate
from litft.model.quantization import QuantizedModule
from litft.model.rope import CosSin
from litft.model.transformer import GPT

# tokens of KV cache to reserve memory for; fewer if the model's context is shorter
MAX_CACHE_TOKENS = 4096
# fraction of the free memory to fill with weights and KV cache; the rest is left for activations
USABLE_MEMORY = 0.9


class DeviceMap(WeightPlacement):
    """Whole layers placed on `devices` in order; embedding, final norm and head are on the first
    device.

    counts: number of layers per device; None: as many as fit on each device, and the remaining ones
    on the CPU.
    """

    def __init__(
        self, devices: Sequence[torch.device], counts: Sequence[int] | None
    ) -> None:
        self.devices = list(devices)
        self.counts = counts

    def allocate(self, model: GPT, device: torch.device | str) -> None:
        """See WeightPlacement.

        Raise ValueError if the counts do not add up to the number of layers.
        """
        devices = self.devices
        counts = self.counts
        if counts is None:
            free_bytes: list[int | None] = []
            for gpu in devices:
                if gpu.type == "cuda":
                    free_bytes.append(torch.cuda.mem_get_info(gpu)[0])
                else:
                    free_bytes.append(None)
            block_bytes = [_weight_bytes(block) for block in model.blocks]
            layer_bytes = [size + _cache_bytes(model) for size in block_bytes]
            other_bytes = _weight_bytes(model) - sum(block_bytes)
            counts = fit_layers(free_bytes, layer_bytes, other_bytes)
            devices = [*devices, torch.device("cpu")]
        elif sum(counts) != len(model.blocks):
            value = ",".join(map(str, counts))
            raise ValueError(
                f"--layers_per_device {value}: the counts add up to {sum(counts)}, but the model "
                f"has {len(model.blocks)} layers; pass counts with that sum"
            )

        # each block on its device, and then what is outside of the blocks
        block_devices = []
        for target, count in zip(devices, counts, strict=True):
            for _ in range(count):
                block_devices.append(target)
        for block, block_device in zip(model.blocks, block_devices, strict=True):
            allocate(block, block_device)
        super().allocate(model, device)

    def connect(self, model: GPT) -> GPT:
        """See WeightPlacement.

        Each block moves its inputs to its device; the last one moves its output to the head's.
        """
        placed = [change_class(block, PlacedBlock) for block in model.blocks]
        for block, block_device in zip(placed, model.block_devices, strict=True):
            block.input_device = block_device
            block.output_device = None
        # the head is next to the embedding
        placed[-1].output_device = model.embed.weight.device
        return model


class PlacedBlock(nn.Module):
    """Block that moves its inputs to `input_device`, and its output to `output_device` (None: it is
    not moved)."""

    input_device: torch.device
    output_device: torch.device | None

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        *extra: BlockExtra,
    ) -> Tensor:
        x = x.to(self.input_device)
        moved = []
        for item in extra:
            if item.token_input is not None:
                item = item._replace(token_input=item.token_input.to(x.device))
            moved.append(item)
        if cos_sin is not None:
            query_scale = cos_sin.query_scale
            if query_scale is not None:
                query_scale = query_scale.to(x.device)
            cos_sin = CosSin(
                cos_sin.cos.to(x.device), cos_sin.sin.to(x.device), query_scale
            )
        if documents is not None:
            documents = documents.to(lambda tensor: tensor.to(x.device))
        x = super().forward(x, cos_sin, documents, cache, *moved)
        if self.output_device is None:
            return x
        return x.to(self.output_device)


def fit_layers(
    free_bytes: Sequence[int | None], layer_bytes: Sequence[int], other_bytes: int
) -> list[int]:
    """Return how many consecutive layers fit on each device, followed by the number of layers left
    over.

    free_bytes: free memory per device; None: unlimited. layer_bytes: size per layer. other_bytes:
    embedding, final norm and head, on the first device.
    """
    # greedy, since layers must stay in order
    counts = []
    remaining = list(layer_bytes)
    for index, room in enumerate(free_bytes):
        if room is not None:
            room = room * USABLE_MEMORY - (0 if index else other_bytes)
        count = 0
        while remaining and (room is None or remaining[0] <= room):
            size = remaining.pop(0)
            room = None if room is None else room - size
            count += 1
        counts.append(count)
    return [*counts, len(remaining)]


def _weight_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters, and of the scales of quantized weights."""
    # blocks of 64 values of 4 bits have an fp32 scale: 4 bytes for every 32
    scales = 0
    for layer in module.modules():
        if isinstance(layer, QuantizedModule):
            scales += layer.weight.nbytes // 8
    return scales + sum(parameter.nbytes for parameter in module.parameters())


def _cache_bytes(model: GPT) -> int:
    """Return the bytes of one layer's KV cache."""
    config = model.config
    return (
        min(MAX_CACHE_TOKENS, config.max_positions)
        * KVCache.token_bytes(config, model.dtype)
        // len(config.layers)
    )
