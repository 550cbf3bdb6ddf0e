"""How a checkpoint's tensors map to ours and back: a list of rules a family, each knowing both directions.

A pattern is a tensor name in which `{}` stands for a number, `{a|b}` for either text, of which `a` is written, and `{*}`
for any text.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

# E experts or heads, I in, O out


class _SingleTensorRule:
    """A rule that reads one tensor there."""

    hf_name: str

    @property
    def axis(self) -> int:
        """Where the rows lie, from the end."""
        return -1 if self.hf_name.endswith("bias") else -2

    def sources(self, name: str, match: re.Match) -> tuple[str, ...]:
        """All tensors that belong to the one called `name`."""
        return (name,)


@dataclass(frozen=True)
class Rename(_SingleTensorRule):
    """One tensor here is one tensor there; `transposed` where it is stored (in, out), as GPT-2's Conv1D does."""

    hf_name: str
    name: str
    transposed: bool = False

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Theirs, as a list, to ours."""
        return [_flipped(tensor, self.transposed) for tensor in tensors]

    to_hf = from_hf

    def split_rows(self, rows: Tensor) -> list[Tensor]:
        """Rows of theirs, as `Split` has them: one Linear's."""
        return [rows]

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `split_rows`."""
        return parts[0]


@dataclass(frozen=True)
class Split(_SingleTensorRule):
    """One tensor there holds the rows of several Linears of ours.

    Its rows are `groups` times (sizes[0] rows of the first, sizes[1] of the second, ...): a plain concatenation is one
    group, GPT-NeoX interleaves q, k and v head by head. Biases are split alike, stacks (E, O, I) along O.
    """

    hf_name: str
    name: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: int = 1
    transposed: bool = False

    def split_rows(self, rows: Tensor) -> list[Tensor]:
        """(..., groups * sum(sizes), I) to one (..., groups * size, I) a part."""
        grouped = rows.unflatten(self.axis, (self.groups, sum(self.sizes)))
        return [part.flatten(self.axis - 1, self.axis) for part in grouped.split(self.sizes, dim=self.axis)]

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `split_rows`."""
        grouped = [p.unflatten(self.axis, (self.groups, n)) for p, n in zip(parts, self.sizes, strict=True)]
        return torch.cat(grouped, dim=self.axis).flatten(self.axis - 1, self.axis)

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Theirs, as a list of one, to ours."""
        return self.split_rows(_flipped(tensors[0], self.transposed))

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Ours to theirs, as a list of one."""
        return [_flipped(self.join_rows(tensors), self.transposed)]


@dataclass(frozen=True)
class Interleave(_SingleTensorRule):
    """Theirs pairs the rotated entries 2 i and 2 i + 1 of a head, ours i and i + D / 2: the same rows in another order."""

    hf_name: str
    name: str
    heads: int

    def split_rows(self, rows: Tensor) -> list[Tensor]:
        """(..., heads * D, I) of theirs to ours, as a list of one."""
        pairs = rows.unflatten(self.axis, (self.heads, -1, 2))
        return [pairs.transpose(self.axis - 1, self.axis).flatten(self.axis - 2, self.axis)]

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `split_rows`."""
        halves = parts[0].unflatten(self.axis, (self.heads, 2, -1))
        return halves.transpose(self.axis - 1, self.axis).flatten(self.axis - 2, self.axis)

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Theirs, as a list of one, to ours."""
        return self.split_rows(tensors[0])

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Ours, as a list of one, to theirs."""
        return [self.join_rows(tensors)]


@dataclass(frozen=True)
class Shift(_SingleTensorRule):
    """Theirs is ours with a number added: llama.cpp has Gemma's norms as what they multiply by."""

    hf_name: str
    name: str
    by: float

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Theirs, as a list, to ours."""
        return [tensor - self.by for tensor in tensors]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Ours, as a list, to theirs."""
        return [tensor + self.by for tensor in tensors]


@dataclass(frozen=True)
class Stack:
    """`count` tensors there, counted by the last `{}` of the pattern, are one here with a leading dimension."""

    hf_name: str
    name: str
    count: int

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """All of theirs to ours, as a list of one."""
        return [torch.stack(tensors)]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Ours, as a list of one, to all of theirs."""
        return list(tensors[0].unbind())

    def sources(self, name: str, match: re.Match) -> tuple[str, ...]:
        """All tensors of the stack, whether the checkpoint has them or not."""
        start, end = match.span(match.lastindex)
        return tuple(f"{name[:start]}{n}{name[end:]}" for n in range(self.count))


# The values of FP4 E2M1, by their bits (OCP Microscaling Formats 1.0, section 5.3.3)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Dequantize:
    """MXFP4 on reading: `<theirs>_blocks` (..., I / 32, 16) of two numbers a byte, `<theirs>_scales` powers of two.

    `rule` says where the dequantized tensor (..., I), in bf16, goes. Never written.
    """

    rule: Rename | Split

    @property
    def hf_name(self) -> str:
        """The pattern of both tensors."""
        return f"{self.rule.hf_name}_{{blocks|scales}}"

    @property
    def name(self) -> str | tuple[str, ...]:
        """As of the rule within."""
        return self.rule.name

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """[blocks, scales] to ours."""
        blocks, scales = tensors
        table = torch.tensor(FP4, dtype=torch.bfloat16, device=blocks.device)
        pairs = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), dim=-1)  # (..., I / 32, 16, 2)
        numbers = torch.ldexp(pairs.flatten(-2), scales[..., None].int() - 127)
        return self.rule.from_hf([numbers.flatten(-2).bfloat16()])

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """The shapes and dtypes that [blocks, scales] must have; the numbers cannot be got back."""
        *rows, width = self.rule.to_hf(tensors)[0].shape
        if width % 32:
            raise ValueError(
                f"config.json: MXFP4 holds weights in blocks of 32, and {self.rule.hf_name} has {width} columns"
            )
        like = tensors[0].new_empty((*rows, width // 32, 16), dtype=torch.uint8, device="meta")
        return [like, like[..., 0]]

    def sources(self, name: str, match: re.Match) -> tuple[str, ...]:
        """Blocks and scales."""
        stem = name.rpartition("_")[0]
        return (f"{stem}_blocks", f"{stem}_scales")


@dataclass(frozen=True)
class Drop:
    """A tensor of the checkpoint that the network recomputes, shares or has no use for: read over, never written."""

    hf_name: str


Writable = Rename | Split | Interleave | Shift | Stack
Rule = Writable | Dequantize | Drop


@dataclass(frozen=True)
class TensorMapping:
    """Tensors to read, the names to write them under, how to turn the first into the second, and back."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Callable[[list[Tensor]], list[Tensor]]
    revert: Callable[[list[Tensor]], list[Tensor]]
    is_plain: bool = False  # one tensor is one tensor, as it lies
    stacks: bool = False  # tensors are one, one below the other


def untransposed(rules: Iterable[Rule]) -> list[Rule]:
    """The rules of a folder whose matrices all lie (out, in): bitsandbytes packs GPT-2's the other way around."""
    return [replace(rule, transposed=False) if isinstance(rule, (Rename, Split)) else rule for rule in rules]


def mappings_from_hf(rules: Iterable[Rule], names: Iterable[str]) -> tuple[list[TensorMapping], list[str]]:
    """The moves from a checkpoint's tensors to ours, and the names that no rule knows.

    A move names every tensor that it needs, whether it is among `names` or not.
    """
    mappings: dict[tuple, TensorMapping] = {}
    unknown = []
    for name in names:
        rule, match = _first((rule, _match(rule.hf_name, name)) for rule in rules)
        if rule is None:
            unknown.append(name)
        elif not isinstance(rule, Drop):
            numbers = match.groups()[:-1] if isinstance(rule, Stack) else match.groups()
            if (rule, numbers) not in mappings:
                plain = isinstance(rule, Rename) and not rule.transposed
                sources, targets = rule.sources(name, match), tensor_names(rule, numbers)
                mapping = TensorMapping(sources, targets, rule.from_hf, rule.to_hf, plain, isinstance(rule, Stack))
                mappings[rule, numbers] = mapping
            elif name not in mappings[rule, numbers].sources:
                unknown.append(name)  # a second spelling of a tensor that is already there
    return list(mappings.values()), unknown


def mappings_to_hf(rules: Iterable[Rule], names: Iterable[str]) -> list[TensorMapping]:
    """The moves from our tensors to the checkpoint's; a name without a rule is a mistake of ours."""
    mappings: dict[tuple, TensorMapping] = {}
    for name in names:
        rule, numbers = rule_of(rules, name)
        counts = [(*numbers, str(n)) for n in range(rule.count)] if isinstance(rule, Stack) else [numbers]
        targets = tuple(hf_tensor_name(rule, each) for each in counts)
        mappings[rule, numbers] = TensorMapping(tensor_names(rule, numbers), targets, rule.to_hf, rule.from_hf)
    return list(mappings.values())


def rule_of(rules: Iterable[Rule], name: str) -> tuple[Writable, tuple[str, ...]]:
    """The rule that writes our tensor `name`, and the numbers in that name."""
    rule, match = _first((r, _match(p, name)) for r in rules if isinstance(r, Writable) for p in _names(r))
    assert rule is not None, f"no rule exports {name}"
    return rule, match.groups()


def hf_tensor_name(rule: Rule, numbers: tuple[str, ...]) -> str:
    """The name that a rule gives a tensor of theirs."""
    return _fill(rule.hf_name, numbers)


def hf_module_name(rule: Rule, numbers: tuple[str, ...]) -> str:
    """The module that a rule gives a tensor of theirs; of a stack's tensors the list of their modules."""
    pattern = rule.hf_name.rpartition(".{}")[0] if isinstance(rule, Stack) else rule.hf_name.rpartition(".")[0]
    return _fill(pattern, numbers)


def tensor_names(rule: Rule, numbers: tuple[str, ...]) -> tuple[str, ...]:
    """The names of all of ours that a rule makes from one tensor of theirs."""
    return tuple(_fill(pattern, numbers) for pattern in _names(rule))


def _names(rule: Writable | Dequantize) -> tuple[str, ...]:
    return rule.name if isinstance(rule.name, tuple) else (rule.name,)


def _first(candidates: Iterable[tuple[Rule, re.Match | None]]) -> tuple[Rule | None, re.Match | None]:
    return next((pair for pair in candidates if pair[1]), (None, None))


def _flipped(tensor: Tensor, transposed: bool) -> Tensor:
    return tensor.transpose(-2, -1) if transposed else tensor


@cache
def _compiled(pattern: str) -> re.Pattern:
    pieces = re.split(r"\{([^}]*)\}", pattern)  # text, choices, text, choices, ..., text
    pieces[::2] = [re.escape(text) for text in pieces[::2]]
    pieces[1::2] = [_choice(text) for text in pieces[1::2]]
    return re.compile("".join(pieces))


def _choice(text: str) -> str:
    if text in ("", "*"):
        return {"": r"(\d+)", "*": ".*"}[text]
    return f"(?:{'|'.join(map(re.escape, text.split('|')))})"


def _match(pattern: str, name: str) -> re.Match | None:
    return _compiled(pattern).fullmatch(name)


def _fill(pattern: str, numbers: Iterable[str]) -> str:
    numbers = iter(numbers)
    return re.sub(r"\{([^}]*)\}", lambda found: found[1].split("|")[0] if found[1] else next(numbers), pattern)
