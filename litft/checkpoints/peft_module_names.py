"""Names of modules in PEFT's files: those of a text model, or those of the multimodal model around
it.

transformers opens a multimodal folder (Gemma 3, Mistral 3, Llama 4, Qwen3.5, ...) as a model whose
language model is a part. PEFT and vLLM find a module of an adapter by its name in that model, and
pass over names that do not exist without an error.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

PREFIX = "base_model.model."  # of every key in PEFT's files

# in which other names of a wrapper's language model begin, and what the text model calls it
_WRAPPED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    # in files of Nemotron 3 Omni
    "language_model.backbone.": "model.",
    "language_model.lm_head": "lm_head",
    "model.text_model.": "model.",
    "text_model.model.": "model.",
    "text_model.lm_head": "lm_head",
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class ModuleNames:
    """Where the class that opens a folder has the text model's `model.` and `lm_head`."""

    model: str = "model."
    head: str = "lm_head"

    @property
    def is_wrapper(self) -> bool:
        """Whether the class is a multimodal one."""
        return self != TEXT_NAMES

    def of(self, name: str) -> str:
        """Return the name of a module or parameter in this class, given that in the text model."""
        if name == "lm_head" or name.startswith("lm_head."):
            return self.head + name.removeprefix("lm_head")
        if name.startswith("model."):
            return self.model + name.removeprefix("model.")
        return name


TEXT_NAMES = ModuleNames()


def text_name(name: str) -> str:
    """Return the name in the text model of a module or parameter of any class."""
    for wrapped, plain in _WRAPPED.items():
        if name.startswith(wrapped):
            return plain + name.removeprefix(wrapped)
    return name


def names_of_class(names: Iterable[str]) -> ModuleNames:
    """Return where a class has the text model's modules, given names of its modules or
    parameters."""
    model = TEXT_NAMES.model
    head = TEXT_NAMES.head
    for name in names:
        for wrapped, plain in _WRAPPED.items():
            if name.startswith(wrapped) and plain == TEXT_NAMES.model:
                model = wrapped
            elif name.startswith(wrapped):
                head = wrapped
    return ModuleNames(model, head)


def target_regex(adapted: Iterable[str], adaptable: Collection[str]) -> str:
    """Return a regular expression that matches the names in `adapted` alone, short where it covers
    all layers.

    Full names keep it from matching modules of the same name in a vision tower.
    """
    all_numbers = _numbers_by_form(adaptable)
    alternatives = []
    for form, numbers in _numbers_by_form(adapted).items():
        # all layers: no need to list their numbers
        if numbers == all_numbers[form]:
            digits = r"\d+"
        else:
            digits = f"({'|'.join(numbers)})"
        alternatives.append(re.escape(form).replace(re.escape("{}"), digits))
    return "|".join(alternatives)


def _numbers_by_form(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the layer numbers of each form of a name: `model.layers.{}.mlp`."""
    forms: dict[str, list[str]] = defaultdict(list)
    for name in names:
        number = _NUMBER.search(name)
        form = _NUMBER.sub("{}", name, count=1)
        if number:
            forms[form].append(number[0])
        else:
            forms[form].append("")
    return forms


def missing_modules(
    keys: Iterable[str],
    base_names: Iterable[str],
    names: ModuleNames,
    class_patterns: Iterable[str] = (),
) -> list[str]:
    """Return the keys of an adapter file whose block is not in the base model, in the class that
    opens the folder.

    base_names: of the tensors in the base's files, whose wrapper may have an older spelling. A text
    model may have another name in its files (`backbone.layers.3`) than in its class: only
    `layers.3` is compared then. class_patterns: what modules are called in the class, such as
    `model.layers.{}.mlp`, where that differs from the files (`transformer.h.3.mlp` in EXAONE 3).
    """
    lists = {_list_of_layers(pattern) for pattern in class_patterns} - {""}
    # in a wrapper, full names tell the language model's blocks from a vision tower's
    is_wrapper = names.is_wrapper
    blocks = set()
    for name in base_names:
        block = _block(text_name(name))
        if block is None:
            continue
        if is_wrapper:
            blocks.add(names.of(block))
        else:
            blocks.add(_without_model_name(block))
            number = block.rpartition(".")[2]
            blocks |= {f"{layers}.{number}" for layers in lists}
    missing = []
    for key in keys:
        block = _block(key.removeprefix(PREFIX))
        if block is None:
            continue
        if not is_wrapper:
            block = _without_model_name(block)
        if block not in blocks:
            missing.append(key)
    return missing


def _block(name: str) -> str | None:
    """Return the beginning of a name up to its layer number: model.layers.3."""
    number = _NUMBER.search(name)
    if number:
        return name[: number.end()]
    return None


def _list_of_layers(pattern: str) -> str:
    """Return what the list of the layers is called in a pattern of names: `layers` of
    `model.layers.{}.mlp`; "" without one."""
    beginning, number, _ = pattern.partition(".{}.")
    if not number:
        return ""
    return beginning.rpartition(".")[2]


def _without_model_name(block: str) -> str:
    """Return the last two parts of a block's name: layers.3 of model.layers.3."""
    return ".".join(block.split(".")[-2:])
