"""Load networks with their adapters, and tokenizers: `litft.load`."""

import copy
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from litft.data.tokenizer import Tokenizer
from litft.distributed.fsdp import shard
from litft.model.placement import SINGLE_DEVICE, WeightPlacement, copy_into_local
from litft.model.quantization import KINDS, is_quantizable
from litft.model.transformer import GPT
from litft.pretrained.build import base_model, fill_model, unfilled_model
from litft.pretrained.folder import PretrainedFolder, resolve


def load_network(
    source: PretrainedFolder,
    precision: str | None,
    device: torch.device | str,
    quantize: str | None,
    placement: WeightPlacement = SINGLE_DEVICE,
) -> GPT:
    """Load the network, or this rank's shard of it, with the adapter if the folder is one."""
    return load_models([source], precision, device, quantize, placement)[0]


def load_models(
    sources: Sequence[PretrainedFolder],
    precision: str | None,
    device: torch.device | str,
    quantize: str | None,
    placement: WeightPlacement = SINGLE_DEVICE,
) -> list[GPT]:
    """Load the network of each folder for inference; all have the same base model and share its
    tensors.

    Raise ValueError if only some of several adapters train full modules of a base to be quantized.
    """
    adapters = [source.read_adapter() for source in sources]
    unquantized = set()
    for adapter in adapters:
        if adapter:
            method, _ = adapter
            unquantized |= method.unquantized_modules()
    kind = sources[0].quantization(quantize)
    if unquantized and kind and len(sources) > 1:
        # the head, the embedding and norms are never quantized
        outline = sources[0].outline
        unquantized = {
            name for name in unquantized if is_quantizable(f"{name}.weight", outline)
        }
    if unquantized and kind and len(sources) > 1:
        reason = (
            f"{len(unquantized)} modules ({min(unquantized)}) are trained in full by one adapter "
            f"but {kind} for the others"
        )
        raise ValueError(f"{reason}; load that adapter alone, or all of them unquantized")
    base = base_model(sources[0], precision, device, quantize, unquantized, placement)
    # the last model is the base itself, so the others are copied before a method changes it
    models = [*(share_weights(base) for _ in adapters[1:]), base]
    for model, adapter in zip(models, adapters, strict=True):
        if adapter:
            method, values = adapter
            method.load(model, values, placement)
        placement.connect(model.eval())
    return models


def load_sharded(
    source: PretrainedFolder,
    precision: str | None,
    device: torch.device | str,
    quantize: str | None,
    mesh: DeviceMesh,
) -> GPT:
    """Load this process's shard of the frozen network, with the adapter if the folder is one.

    Every process calls `forward` equally often: it gathers the shards.
    """
    adapter = source.read_adapter()
    unquantized: set[str] = set()
    if adapter:
        unquantized = adapter[0].unquantized_modules()

    # on the meta device, so that no process ever holds the whole network
    model = unfilled_model(source, precision, quantize, unquantized)
    if adapter:
        adapter[0].attach(model, keep=False)
    model.requires_grad_(False)
    shard(model, mesh)

    # the base's values, then the adapter's
    fill_model(source, model, precision, device)
    if adapter:
        method, values = adapter
        method.reset_parameters(model)
        for name, parameter in method.parameters(model).items():
            copy_into_local(parameter, values[name].__getitem__)
    return model.eval()


def share_weights(model: GPT) -> GPT:
    """Copy the network's modules but share its tensors, so that a method only changes the modules
    of the copy."""
    # deepcopy takes what is in the memo as it is
    memo = {
        id(tensor): tensor
        for tensor in itertools.chain(model.parameters(), model.buffers())
    }
    return copy.deepcopy(model, memo)


def load(
    folder: str | Path,
    precision: str | None = None,
    device: torch.device | str = "cpu",
    base_dir: str | Path | None = None,
    quantize: str | None = None,
) -> tuple[GPT, Tokenizer | None]:
    """Load a model and its tokenizer from the folder of a base model, an adapter (litft or PEFT), a
    merged model or a run.

    Args:
        folder: a path or a hub id (`owner/name` or `owner/name@revision`).
        precision: bf16, fp16 or fp32; None or auto: the dtype of the folder.
        device: where the weights are, such as `cuda`.
        base_dir: the base model of an adapter, instead of the one named in its config.
        quantize: nf4, nf4-dq, fp4, fp4-dq or int8; None: as stored in the folder.

    Returns:
        The model, and its tokenizer; None if the folder has none.

    Raises:
        ValueError: if the folder cannot be loaded.
    """
    if quantize not in (None, "none", *KINDS):
        raise ValueError(f"quantize {quantize!r} is not supported; use {', '.join(KINDS)}")

    if precision == "auto":
        precision = None
    source = resolve(folder, base_dir)
    source.check_base_dir(base_dir)
    warning = source.quantization_warning(source.quantization(quantize))
    if warning:
        warnings.warn(warning.removeprefix("warning: "), stacklevel=2)
    return load_network(source, precision, device, quantize), source.tokenizer()
