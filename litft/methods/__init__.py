"""Fine-tuning methods: what each adds to the network, which parameters it trains, and how they are
saved.

A method is a subclass of `Method` (base.py). It changes a module by mixing a class over the
module's own type (mixins.py): the names of the base's weights never change, no `forward` is copied,
and subclasses of nn.Linear work like nn.Linear. METHODS maps a command's flags to its method; SAVED
lists the methods that save adapters. litft/README.md lists what else a new method
needs.
"""

from pathlib import Path

from litft.args import (
    AdapterFinetuneArgs,
    AdapterV2FinetuneArgs,
    FinetuneArgs,
    FullFinetuneArgs,
    LoRAFinetuneArgs,
)
from litft.checkpoints.adapter_reader import ADAPTER_CONFIG, read_adapter_config
from litft.methods.base import AdapterTensors, BaseFolder, Method
from litft.methods.full import Full
from litft.methods.llama_adapter import Adapter, AdapterV2
from litft.methods.lora import LoRA
from litft.methods.mixins import detach, disabled

__all__ = [
    "Adapter",
    "AdapterTensors",
    "AdapterV2",
    "Full",
    "LoRA",
    "Method",
    "detach",
    "disabled",
]

# the flags of a fine-tuning command -> its method
METHODS = {
    LoRAFinetuneArgs: lambda args: LoRA(args.lora),
    AdapterFinetuneArgs: lambda args: Adapter(args.adapter),
    AdapterV2FinetuneArgs: lambda args: AdapterV2(args.adapter),
    FullFinetuneArgs: Full,
}
# methods that save adapters and have a `read`
SAVED = (LoRA, Adapter, AdapterV2)


def method_of(args: FinetuneArgs) -> Method:
    """Return the method of a fine-tuning command."""
    return METHODS[type(args)](args)


def read_method(folder: Path, source: BaseFolder) -> tuple[Method, AdapterTensors]:
    """Read an adapter folder written by litft or PEFT: the method and its learned values.

    Raise ValueError if the folder's `peft_type` is not supported.
    """
    peft_type = read_adapter_config(folder).get("peft_type")
    for method in SAVED:
        if peft_type in method.peft_types:
            return method.read(folder, source)
    supported = []
    for method in SAVED:
        supported += method.peft_types
    raise ValueError(
        f"{folder / ADAPTER_CONFIG}: peft_type {peft_type!r} is not supported; litft reads "
        f"{', '.join(supported)}"
    )
