"""Build the network of a folder: on the meta device first, then filled from its files."""

from collections.abc import Collection

import torch

from litft.checkpoints.weight_files import load_weights, packed_modules
from litft.model.placement import SINGLE_DEVICE, WeightPlacement
from litft.model.quantization import quantize_modules
from litft.model.transformer import GPT
from litft.pretrained.folder import PretrainedFolder


def base_model(
    source: PretrainedFolder,
    precision: str | None = None,
    device: torch.device | str = "cpu",
    quantize: str | None = None,
    unquantized: Collection[str] = (),
    placement: WeightPlacement = SINGLE_DEVICE,
) -> GPT:
    """Load the base model in eval mode, with all parameters frozen."""
    model = unfilled_model(
        source, precision, quantize, unquantized, placement
    ).requires_grad_(False)
    fill_model(source, model, precision, device, placement)
    return model.eval()


def unfilled_model(
    source: PretrainedFolder,
    precision: str | None,
    quantize: str | None = None,
    unquantized: Collection[str] = (),
    placement: WeightPlacement = SINGLE_DEVICE,
) -> GPT:
    """Create the base network on the meta device, with quantized Linears except for those in
    `unquantized`."""
    source.check()
    model = source.meta_model(source.dtype(precision), placement)
    kind = source.quantization(quantize)
    # on the meta device: the unquantized network is never in memory
    if kind:
        quantize_modules(
            model,
            list(
                packed_modules(
                    model, source.checkpoint, source.checked_mappings, unquantized
                )
            ),
            kind,
        )
    return model


def weight_bytes(
    source: PretrainedFolder, precision: str | None = None, quantize: str | None = None
) -> int:
    """Return the bytes of a network's weights and buffers once it is loaded."""
    model = unfilled_model(source, precision, quantize)
    size = 0
    for tensor in (*model.parameters(), *model.buffers()):
        size += tensor.nbytes
    return size


def fill_model(
    source: PretrainedFolder,
    model: GPT,
    precision: str | None,
    device: torch.device | str,
    placement: WeightPlacement = SINGLE_DEVICE,
) -> None:
    """Allocate the network from `unfilled_model` on `device` and load its weights.

    The network may be sharded and have a method."""
    placement.allocate(model, device)
    load_weights(
        model,
        source.checkpoint,
        source.checked_mappings,
        source.dtype(precision),
        placement,
    )
    # a method has untied them
    if source.config.tied and model.lm_head.weight is not model.embed.weight:
        placement.copy_in(
            "lm_head.weight",
            model.lm_head.weight,
            source.tensor("embed.weight").__getitem__,
        )
    _check_filled(source, model)
    model.rotaries.to_empty(device=device)  # cos/sin tables are computed, not loaded


def _check_filled(source: PretrainedFolder, model: GPT) -> None:
    """Raise RuntimeError if a parameter of the base has no value from the files: it would be
    whatever memory held."""
    # what the files have filled: by identity, as a parameter may have several names
    filled = set()
    for mapping in source.checked_mappings:
        for name in mapping.targets:
            module, _, leaf = name.rpartition(".")
            filled.add(id(getattr(model.get_submodule(module), leaf, None)))
    if source.config.tied:
        filled.add(id(model.lm_head.weight))
    base_names = {
        name for name, _ in source.outline.named_parameters(remove_duplicate=False)
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in base_names and id(parameter) not in filled:
            raise RuntimeError(
                f"{name} was built, but not filled from {source.base}; this is a fault of litft"
            )
