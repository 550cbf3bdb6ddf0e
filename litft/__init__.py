"""litft fine-tunes GPT-style language models from the command line, on Lightning Fabric.

The public API is `litft.load`, `litft.generate`, `litft.stream` and `litft.finetune`. Their modules
are imported on first use to keep --help fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from litft.environment import TRAINING_SPINS, set_defaults, system_problem

if TYPE_CHECKING:
    from litft.inference.streaming import generate, stream
    from litft.pretrained.load import load
    from litft.python_api import finetune

__version__ = "0.1.0"
__all__ = ["finetune", "generate", "load", "stream"]

_MODULES = {
    "finetune": "litft.python_api",
    "generate": "litft.inference.streaming",
    "load": "litft.pretrained.load",
    "stream": "litft.inference.streaming",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'litft' has no attribute {name!r}")
    problem = system_problem()
    if problem:
        raise OSError(problem)
    if name == "finetune":
        # as the commands do; without effect if torch is imported already
        set_defaults(TRAINING_SPINS)
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
