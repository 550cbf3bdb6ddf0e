"""What a model family is: how its config.json is read, and how its weights are named."""

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from litft.checkpoints.peft_module_names import ModuleNames
from litft.checkpoints.rules import Rule
from litft.model.config import Config

# takes a tensor's name, and returns its shape in the weight files; None if it is not there
ShapeOf = Callable[[str], tuple[int, ...] | None]
# as most multimodal classes have it
LANGUAGE_MODEL = ModuleNames("model.language_model.")


def declarations(package: str, path: Iterable[str], name: str) -> Iterator[Any]:
    """Import every file of a package, and yield its `name`, for those that have one."""
    for info in pkgutil.iter_modules(path):
        found = getattr(import_module(f"{package}.{info.name}"), name, None)
        if found is not None:
            yield found


def no_rules(config: Config) -> list[Rule]:
    """Return no rules: PEFT names all modules as the checkpoint does."""
    return []


@dataclass(frozen=True)
class Family:
    """Model types that share their code; each file of this folder has one as `FAMILY`.

    The helper functions in llama.py cover most of what a family needs. A new field of config.json
    is declared in model/config_fields.py: a family sees no other fields.
    """

    # values of `model_type` in config.json
    model_types: tuple[str, ...]
    # from the content of config.json; missing fields have transformers' defaults
    config: Callable[[dict[str, Any]], Config]
    # litft's tensors as the checkpoint's, and back (see checkpoints/rules.py)
    rules: Callable[[Config], list[Rule]]
    # the language model's part of a multimodal config.json
    text_config: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    # for modules that PEFT names differently from the checkpoint, such as stacked experts
    peft_rules: Callable[[Config], list[Rule]] = no_rules
    # the names of the language model's modules in the family's multimodal class in transformers
    wrapper: ModuleNames = LANGUAGE_MODEL
    # whether transformers' AutoModelForCausalLM opens the text model of a multimodal folder; for
    # other families it opens the whole model
    has_text_class: bool = False
    # whether the activations of its published models stay in the range of fp16
    fits_fp16: bool = True
