"""litft fine-tunes GPT-style language models from the command line, on Lightning Fabric.

The public face: `litft.load`, `litft.stream`, `litft.finetune`; what they import is loaded on first use, so that --help
answers at once.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["finetune", "load", "stream"]

_HOMES = {"load": "litft.pretrained", "stream": "litft.inference.generation", "finetune": "litft.training.trainer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'litft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
