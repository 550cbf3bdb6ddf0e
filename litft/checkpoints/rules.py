"""The rules that map a Hugging Face tensor to litft's and back: renamed, split, stacked, reordered,
dequantized or dropped.

A pattern is a tensor name with placeholders: `{}` matches a number, `{1,5}` one of these numbers,
`{a|b}` either text (`a` is used for writing), and `{*}` any text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# Dimensions: E experts or heads, I input features, O output features, D head dim


class _SingleTensorRule:
    """A rule that reads a single Hugging Face tensor."""

    hf_name: str

    @property
    def axis(self) -> int:
        """The dimension of the rows, counted from the end."""
        if self.hf_name.endswith("bias"):
            return -1
        return -2

    def sources(self, name: str, match: re.Match) -> tuple[str, ...]:
        """Return the names of all Hugging Face tensors that are converted together with `name`."""
        return (name,)

    def hf_names(self, numbers: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of all Hugging Face tensors that are written, given the numbers in the
        litft names."""
        return (fill(self.hf_name, numbers),)


@dataclass(frozen=True)
class Rename(_SingleTensorRule):
    """One litft tensor is one Hugging Face tensor; `transposed` if that is stored as (in, out), as
    in GPT-2's Conv1D."""

    hf_name: str
    name: str
    transposed: bool = False
    # whether transformers' class of experts has `is_transposed`, which PEFT reads
    known_to_peft: bool = True

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [Hugging Face tensor] to [litft tensor]."""
        return [_transposed_if(tensor, self.transposed) for tensor in tensors]

    to_hf = from_hf

    def split_rows(self, rows: Tensor) -> list[Tensor]:
        """Return the rows unchanged in a list, one element per Linear as in `Split.split_rows`."""
        return [rows]

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        """Invert `split_rows`."""
        return parts[0]


@dataclass(frozen=True)
class Split(_SingleTensorRule):
    """One Hugging Face tensor fuses the rows of several litft Linears.

    Its rows repeat `groups` times: sizes[0] rows of the first Linear, sizes[1] rows of the second,
    and so on. A simple concatenation has one group; GPT-NeoX interleaves q, k and v per head.
    Biases are split the same way, stacks (E, O, I) along O. squeezed: an additional dimension of
    size 1 in the Hugging Face tensor, for the weight of a convolution.
    """

    hf_name: str
    name: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    squeezed: int | None = None
    known_to_peft: bool = True  # as in Rename

    def split_rows(self, rows: Tensor) -> list[Tensor]:
        """Split (..., groups * sum(sizes), I) into one (..., groups * size, I) per Linear."""
        grouped = rows.unflatten(self.axis, (self.groups, sum(self.sizes)))
        parts = grouped.split(self.sizes, dim=self.axis)
        return [part.flatten(self.axis - 1, self.axis) for part in parts]

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        """Invert `split_rows`."""
        grouped = []
        for part, size in zip(parts, self.sizes, strict=True):
            grouped.append(part.unflatten(self.axis, (self.groups, size)))
        return torch.cat(grouped, dim=self.axis).flatten(self.axis - 1, self.axis)

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [fused Hugging Face tensor] to one litft tensor per Linear."""
        fused = _transposed_if(tensors[0], self.transposed)
        if self.squeezed is not None:
            fused = fused.squeeze(self.squeezed)
        return self.split_rows(fused)

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert one litft tensor per Linear to [fused Hugging Face tensor]."""
        fused = _transposed_if(self.join_rows(tensors), self.transposed)
        return [fused if self.squeezed is None else fused.unsqueeze(self.squeezed)]


@dataclass(frozen=True)
class Interleave(_SingleTensorRule):
    """Reorder the rows for RoPE: Hugging Face rotates the pair (2 i, 2 i + 1) of a head, litft
    rotates (i, i + D / 2)."""

    hf_name: str
    name: str
    heads: int

    def split_rows(self, rows: Tensor) -> list[Tensor]:
        """Reorder the Hugging Face rows (..., heads * D, I); returns [rows]."""
        pairs = rows.unflatten(self.axis, (self.heads, -1, 2))
        return [pairs.transpose(self.axis - 1, self.axis).flatten(self.axis - 2, self.axis)]

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        """Invert `split_rows`."""
        halves = parts[0].unflatten(self.axis, (self.heads, 2, -1))
        return halves.transpose(self.axis - 1, self.axis).flatten(self.axis - 2, self.axis)

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [Hugging Face tensor] to [litft tensor]."""
        return self.split_rows(tensors[0])

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [litft tensor] to [Hugging Face tensor]."""
        return [self.join_rows(tensors)]


@dataclass(frozen=True)
class Shift(_SingleTensorRule):
    """The stored tensor is the litft tensor plus `offset`: llama.cpp stores 1 + weight for Gemma's
    norms."""

    hf_name: str
    name: str
    offset: float

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [stored tensor] to [litft tensor]."""
        return [tensor - self.offset for tensor in tensors]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [litft tensor] to [stored tensor]."""
        return [tensor + self.offset for tensor in tensors]


@dataclass(frozen=True)
class InterleaveValueHeads(_SingleTensorRule):
    """llama.cpp stores the first value head of every key head, then the second of every one, and so
    on (Qwen3.5).

    `sizes` are the rows of the fused tensors, of which the last consists of value heads. columns:
    they are columns. decay: the stored tensor is -exp of the litft tensor.
    """

    hf_name: str
    name: str | tuple[str, ...]
    sizes: tuple[int, ...]
    key_heads: int
    head_dim: int
    columns: bool = False
    decay: bool = False

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [stored tensor] to the litft tensors."""
        *others, last = tensors[0].split(self.sizes, dim=self.dim)
        # (heads per key head, key heads, D), to be exchanged
        last = last.unflatten(self.dim, (-1, self.key_heads, self.head_dim))
        last = last.transpose(self.dim, self.dim + 1).flatten(self.dim, self.dim + 2)
        return [*others, (-last).log() if self.decay else last]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert the litft tensors to [stored tensor]."""
        *others, last = tensors
        last = last.unflatten(self.dim, (self.key_heads, -1, self.head_dim))
        last = last.transpose(self.dim, self.dim + 1).flatten(self.dim, self.dim + 2)
        if self.decay:
            last = -last.exp()
        return [torch.cat((*others, last), dim=self.dim)]

    @property
    def dim(self) -> int:
        """The dimension of the heads."""
        return int(self.columns)


@dataclass(frozen=True)
class Squeeze(_SingleTensorRule):
    """The Hugging Face tensor has additional dimensions of size 1, such as the weight of a
    depthwise convolution."""

    hf_name: str
    name: str
    dims: tuple[int, ...]

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [Hugging Face tensor] to [litft tensor]."""
        return [tensor.squeeze(self.dims) for tensor in tensors]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [litft tensor] to [Hugging Face tensor]."""
        tensor = tensors[0]
        for dim in self.dims:
            tensor = tensor.unsqueeze(dim)
        return [tensor]


@dataclass(frozen=True)
class Reshape(_SingleTensorRule):
    """The same numbers in another shape: `stored` in the file, `shape` here. decay: -exp of the
    litft tensor is stored."""

    hf_name: str
    name: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    decay: bool = False

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [stored tensor] to [litft tensor]."""
        tensor = tensors[0].reshape(self.shape)
        return [(-tensor).log() if self.decay else tensor]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [litft tensor] to [stored tensor]."""
        tensor = tensors[0].reshape(self.stored)
        return [-tensor.exp() if self.decay else tensor]


@dataclass(frozen=True)
class Stack:
    """`count` Hugging Face tensors, numbered by the last `{}` of the pattern, are stacked into one
    litft tensor."""

    hf_name: str
    name: str
    count: int

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert `count` Hugging Face tensors to [litft tensor (count, ...)]."""
        return [torch.stack(tensors)]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [litft tensor (count, ...)] to `count` Hugging Face tensors."""
        return list(tensors[0].unbind())

    def sources(self, name: str, match: re.Match) -> tuple[str, ...]:
        """Return the names of all tensors of the stack, including those missing from the
        checkpoint."""
        # the tensors of a stack differ in the last number alone
        start, end = match.span(match.re.groups)
        return tuple(f"{name[:start]}{n}{name[end:]}" for n in range(self.count))

    def hf_names(self, numbers: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of all tensors of the stack."""
        return tuple(fill(self.hf_name, (*numbers, str(n))) for n in range(self.count))


@dataclass(frozen=True)
class KeysAndValues:
    """llama.cpp stores the rows of latent attention's `kv_b` as keys (heads, I, D) and values
    (heads, D, I)."""

    hf_name: str  # of both tensors, with {k_b|v_b}
    name: str
    heads: int
    key_dim: int

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [keys, values] to [litft tensor], in which the keys and values of a head follow
        each other."""
        keys, values = tensors
        return [torch.cat((keys.mT, values), dim=1).flatten(0, 1)]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [litft tensor] to [keys, values]."""
        rows = tensors[0].unflatten(0, (self.heads, -1))
        return [rows[:, : self.key_dim].mT, rows[:, self.key_dim :]]

    def sources(self, name: str, match: re.Match) -> tuple[str, ...]:
        """Return the names of keys and values."""
        return self.hf_names(match.groups())

    def hf_names(self, numbers: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of keys and values."""
        keys = fill(self.hf_name, numbers)
        return keys, keys.replace("k_b", "v_b")


# Values of FP4 E2M1, indexed by bit pattern (OCP Microscaling Formats 1.0, section 5.3.3)
FP4 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)


@dataclass(frozen=True)
class Dequantize:
    """Dequantize MXFP4: `<name>_blocks` (..., I / 32, 16) has two values per byte, `<name>_scales`
    exponents of two.

    `rule` converts the dequantized bf16 tensor (..., I). MXFP4 is only read, never written.
    """

    rule: Rename | Split

    @property
    def hf_name(self) -> str:
        """The pattern that matches both tensors."""
        return f"{self.rule.hf_name}_{{blocks|scales}}"

    @property
    def name(self) -> str | tuple[str, ...]:
        """The litft name or names of `rule`."""
        return self.rule.name

    def from_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Convert [blocks, scales] to the litft tensors of `rule`."""
        blocks, scales = tensors
        table = torch.tensor(FP4, dtype=torch.bfloat16, device=blocks.device)
        # the lower four bits of a byte are the first value: (..., I / 32, 16, 2)
        pairs = torch.stack(
            (table[(blocks & 15).int()], table[(blocks >> 4).int()]), dim=-1
        )
        # scales are exponents with a bias of 127 (E8M0)
        values = torch.ldexp(pairs.flatten(-2), scales[..., None].int() - 127)
        return self.rule.from_hf([values.flatten(-2).bfloat16()])

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return meta tensors with the shapes and dtypes of [blocks, scales]; values are not
        quantized."""
        *rows, columns = self.rule.to_hf(tensors)[0].shape
        if columns % 32:
            raise ValueError(
                f"config.json: MXFP4 needs a multiple of 32 columns, {self.rule.hf_name} has "
                f"{columns}; download it again"
            )
        blocks = tensors[0].new_empty(
            (*rows, columns // 32, 16), dtype=torch.uint8, device="meta"
        )
        return [blocks, blocks[..., 0]]

    def sources(self, name: str, match: re.Match) -> tuple[str, ...]:
        """Return the names of blocks and scales."""
        stem = name.rpartition("_")[0]
        return (f"{stem}_blocks", f"{stem}_scales")


@dataclass(frozen=True)
class Drop:
    """A checkpoint tensor that the network recomputes, shares or does not use: ignored on reading,
    never written."""

    hf_name: str


Writable = (
    Rename
    | Split
    | Interleave
    | Shift
    | InterleaveValueHeads
    | Squeeze
    | Reshape
    | Stack
    | KeysAndValues
)
Rule = Writable | Dequantize | Drop


def _transposed_if(tensor: Tensor, transposed: bool) -> Tensor:
    if transposed:
        return tensor.transpose(-2, -1)
    return tensor


@cache
def _compiled(pattern: str) -> re.Pattern:
    pieces = re.split(r"\{([^}]*)\}", pattern)  # text, choices, text, choices, ..., text
    pieces[::2] = [re.escape(text) for text in pieces[::2]]
    pieces[1::2] = [_choice(text) for text in pieces[1::2]]
    return re.compile("".join(pieces))


def _choice(text: str) -> str:
    # numbers alone are groups, since they are carried over to the other name
    if text in ("", "*"):
        return {"": r"(\d+)", "*": ".*"}[text]
    if _is_numbers(text):
        return f"({text.replace(',', '|')})"
    return f"(?:{'|'.join(map(re.escape, text.split('|')))})"


def match_name(pattern: str, name: str) -> re.Match | None:
    """Return the match of a tensor name, with the numbers as its groups."""
    return _compiled(pattern).fullmatch(name)


def fill(pattern: str, numbers: Iterable[str]) -> str:
    """Return the tensor name that a pattern stands for, given its numbers."""
    numbers = iter(numbers)

    def text(match: re.Match) -> str:
        if not match[1] or _is_numbers(match[1]):
            return next(numbers)
        return match[1].split("|")[0]

    return re.sub(r"\{([^}]*)\}", text, pattern)


def _is_numbers(text: str) -> bool:
    return text.replace(",", "").isdigit()
