"""The families that litft reads: one file each, found by looking into this folder.

A family file holds MODEL_TYPES (values of `model_type` in config.json), `config(hf) -> Config` and `rules(config)`.
"""

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from litft.config import Config


@cache
def families() -> dict[str, ModuleType]:
    """The family module of every known model_type."""
    modules = [import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {model_type: module for module in modules for model_type in module.MODEL_TYPES}


def family(model_type: str) -> ModuleType:
    """The module of a model_type; ValueError listing the known ones otherwise."""
    if model_type not in families():
        known = ", ".join(sorted(families()))
        raise ValueError(f"config.json: model_type {model_type!r} is not a family that litft knows; known: {known}")
    return families()[model_type]


def read_config(hf: dict[str, Any]) -> Config:
    """config.json's content as a Config; ValueError naming the field where one is missing or unsupported."""
    try:
        return family(hf["model_type"]).config(hf)
    except KeyError as missing:
        raise ValueError(f"config.json lacks the field {missing}; is it the folder of a causal language model?") from None
