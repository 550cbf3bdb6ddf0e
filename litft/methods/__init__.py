"""Methods: what each adds to the network, which parameters are its own, and how they are saved.

A method gives a module a class that mixes a part over the type it has (`parts.py`): base weight names never change, no
`forward` is copied, and it works alike on nn.Linear and on what derives from it. A method is a class with `Method`'s face.
"""

from pathlib import Path

from litft.args import AdapterFinetuneArgs, AdapterV2FinetuneArgs, FinetuneArgs, FullFinetuneArgs, LoRAFinetuneArgs
from litft.checkpoints.peft_format import ADAPTER_CONFIG, read_adapter_config
from litft.methods.base import BaseFolder, Method, Values
from litft.methods.full import Full
from litft.methods.llama_adapter import Adapter, AdapterV2
from litft.methods.lora import LoRA
from litft.methods.mixins import detach, disabled

__all__ = ["Adapter", "AdapterV2", "Full", "LoRA", "Method", "Values", "detach", "disabled"]

METHODS = {
    LoRAFinetuneArgs: lambda args: LoRA(args.lora),
    AdapterFinetuneArgs: lambda args: Adapter(args.adapter),
    AdapterV2FinetuneArgs: lambda args: AdapterV2(args.adapter),
    FullFinetuneArgs: Full,
}
SAVED = (LoRA, Adapter, AdapterV2)


def method_of(args: FinetuneArgs) -> Method:
    """The method that a fine-tuning command stands for."""
    return METHODS[type(args)](args)


def read_method(folder: Path, source: BaseFolder) -> tuple[Method, Values]:
    """The method of an adapter folder, litft's or PEFT's, and what it has learned; ValueError where none is known."""
    kind = read_adapter_config(folder).get("peft_type")
    for method in SAVED:
        if kind in method.peft_types:
            return method.read(folder, source)
    known = ", ".join(name for method in SAVED for name in method.peft_types)
    raise ValueError(f"{folder / ADAPTER_CONFIG}: peft_type {kind!r} is not supported; litft reads {known}")
