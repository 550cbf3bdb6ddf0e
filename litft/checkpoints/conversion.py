"""Map Hugging Face tensors to litft tensors and back: each model family has a list of rules that
work in both directions."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from litft.checkpoints.rules import (
    Dequantize,
    Drop,
    Rename,
    Rule,
    Split,
    Stack,
    Writable,
    fill,
    match_name,
)


@dataclass(frozen=True)
class TensorMapping:
    """Names of source and target tensors; `convert` turns the sources into the targets, `revert`
    does the inverse."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Callable[[list[Tensor]], list[Tensor]]
    revert: Callable[[list[Tensor]], list[Tensor]]
    is_copy: bool = False  # one tensor, copied unchanged
    # the target stacks the sources along dim 0
    is_stack: bool = False


def untransposed(rules: Iterable[Rule], packed: Collection[str]) -> list[Rule]:
    """Return the rules for a folder whose packed matrices are all (out, in): bitsandbytes
    transposes GPT-2's when it quantizes them, and leaves others as they are, such as the stacked
    experts of gpt-oss."""
    changed = []
    for rule in rules:
        is_packed = any(match_name(rule.hf_name, name) for name in packed)
        if is_packed and isinstance(rule, (Rename, Split)):
            rule = replace(rule, transposed=False)
        changed.append(rule)
    return changed


def mappings_from_hf(
    rules: Iterable[Rule], names: Iterable[str]
) -> tuple[list[TensorMapping], list[str]]:
    """Return the mappings from checkpoint tensors to litft tensors, and the names that match no
    rule.

    A mapping lists all the sources it needs, including those missing from `names`. Tensors of a
    `Drop` are in neither result; a second name of one tensor is among those without a rule.
    """
    mappings: dict[tuple, TensorMapping] = {}
    unknown = []
    for name in names:
        found = _rule_that_reads(rules, name)
        if found is None:
            unknown.append(name)
            continue
        rule, match = found
        if not isinstance(rule, Drop):
            # the last number of a stack's name is the position in the stack
            if isinstance(rule, Stack):
                numbers = match.groups()[:-1]
            else:
                numbers = match.groups()
            # one mapping for all tensors that are converted together
            if (rule, numbers) not in mappings:
                is_copy = isinstance(rule, Rename) and not rule.transposed
                sources = rule.sources(name, match)
                targets = tensor_names(rule, numbers)
                mapping = TensorMapping(
                    sources,
                    targets,
                    rule.from_hf,
                    rule.to_hf,
                    is_copy=is_copy,
                    is_stack=isinstance(rule, Stack),
                )
                mappings[rule, numbers] = mapping
            elif name not in mappings[rule, numbers].sources:
                # two names for one tensor: the first is used, and the other reported
                unknown.append(name)
    return list(mappings.values()), unknown


def mappings_to_hf(rules: Iterable[Rule], names: Iterable[str]) -> list[TensorMapping]:
    """Return the mappings from litft tensors to checkpoint tensors; a name without a rule is a bug
    in the family's rules."""
    mappings: dict[tuple, TensorMapping] = {}
    for name in names:
        rule, numbers = rule_of(rules, name)
        # tensors with the same rule and numbers are converted by one mapping
        mappings[rule, numbers] = TensorMapping(
            tensor_names(rule, numbers), rule.hf_names(numbers), rule.to_hf, rule.from_hf
        )
    return list(mappings.values())


def rule_of(rules: Iterable[Rule], name: str) -> tuple[Writable, tuple[str, ...]]:
    """Return the rule that writes the litft tensor `name`, and the numbers in that name."""
    for rule in rules:
        if not isinstance(rule, Writable):
            continue
        for pattern in _names(rule):
            match = match_name(pattern, name)
            if match:
                return rule, match.groups()
    raise AssertionError(f"no rule exports {name}")


def hf_tensor_name(rule: Rule, numbers: tuple[str, ...]) -> str:
    """Return the name of a rule's Hugging Face tensor."""
    return fill(rule.hf_name, numbers)


def hf_module_name(rule: Rule, numbers: tuple[str, ...]) -> str:
    """Return the name of the module that has a rule's Hugging Face tensor; for a `Stack` the module
    list of the experts."""
    if isinstance(rule, Stack):
        pattern = rule.hf_name.rpartition(".{}")[0]
    else:
        pattern = rule.hf_name.rpartition(".")[0]
    return fill(pattern, numbers)


def tensor_names(rule: Writable | Dequantize, numbers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all litft tensors that a rule converts from one Hugging Face tensor."""
    return tuple(fill(pattern, numbers) for pattern in _names(rule))


def _names(rule: Writable | Dequantize) -> tuple[str, ...]:
    if isinstance(rule.name, tuple):
        return rule.name
    return (rule.name,)


def _rule_that_reads(rules: Iterable[Rule], hf_name: str) -> tuple[Rule, re.Match] | None:
    for rule in rules:
        match = match_name(rule.hf_name, hf_name)
        if match:
            return rule, match
    return None
