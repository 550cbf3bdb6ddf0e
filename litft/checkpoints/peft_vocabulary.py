"""The tables of a PEFT adapter, embedding and head, whose rows may be others than the base's.

An adapter for a resized vocabulary has its tables of all rows: its new rows become rows of new
tokens.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from litft.checkpoints.adapter_reader import ADAPTER_WEIGHTS, read_token_ids
from litft.checkpoints.peft_coverage import matching_pattern
from litft.checkpoints.peft_module_names import ModuleNames
from litft.checkpoints.peft_targets import PeftTarget
from litft.checkpoints.peft_writer import TABLES, TOKEN_ROWS, ReadBase, base_table
from litft.checkpoints.rules import Rule
from litft.model.transformer import GPT

_LEAVES = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "m",
    "lora_magnitude_vector.weight": "m",
}
# endings under which PEFT saves a table of the
# vocabulary that is not trained, or not trained in full
_FROZEN_TABLES = (
    "base_layer.weight",
    "token_adapter.base_layer.weight",
    "original_module.weight",
)
# the share of a table's rows from which on the table was trained, not single rows
MOST_ROWS = 0.1
_SAVED_TABLE = "modules_to_save.weight"

# Dimensions: R rank, N new tokens, C hidden dim, V vocabulary of the base, W that of the adapter


@dataclass(frozen=True)
class AdapterReading:
    """An adapter folder that is read, and the base that it is for."""

    folder: Path
    config: dict[str, Any]
    init: str | None  # see `initial_update`
    # modules_to_save, by their names in the text model
    saved: list[str]
    model: GPT
    rules: list[Rule]
    targets: dict[str, PeftTarget]  # by litft name
    read_base: ReadBase
    names: ModuleNames  # in the class that the adapter was saved from

    @property
    def path(self) -> Path:
        """The file with the tensors, for messages."""
        return self.folder / ADAPTER_WEIGHTS


@dataclass
class Vocabulary:
    """The rows of an adapter that are not in the base's tables: of new tokens, and of tokens that
    are trained alone."""

    ids: list[int] = field(default_factory=list)
    rows: dict[str, Tensor] = field(default_factory=dict)  # litft module -> (N, C)


def split_key(key: str) -> tuple[str, str | None]:
    """Split a key into module and kind (a, b or m); for a base parameter return its full name and
    None."""
    for ending, leaf in _LEAVES.items():
        if key.endswith(f".{ending}"):
            return key.removesuffix(f".{ending}"), leaf
    return key, None


def update_scale(reading: AdapterReading, target: str, r: int) -> float:
    """Return the scaling factor of an update of rank `r`, whose module has the name `target` in the
    text model."""
    config = reading.config
    name = reading.names.of(target)
    alpha = matching_pattern(config, "alpha_pattern", name, config["lora_alpha"])
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def take_vocabulary(tensors: dict[str, Tensor], reading: AdapterReading) -> Vocabulary:
    """Take the rows of new tokens out of the tensors, which then fit the base's vocabulary; return
    the rows.

    PEFT saves the whole tables if the vocabulary was resized (more rows, or fewer, without the
    base's padding).
    """
    # rows of the config's new tokens, and rows that whole tables have in addition to the base's
    given_ids = read_token_ids(reading.config, reading.folder)
    given = {}
    own = {}
    for name in TABLES:
        given[name] = tensors.pop(f"{reading.targets[name].name}.{TOKEN_ROWS}", None)
        own[name] = _fit_table(name, tensors, reading)
    if given_ids and all(rows is None for rows in given.values()):
        raise ValueError(
            f"{reading.path}: {len(given_ids)} new tokens need rows; copy the adapter again"
        )

    # the tokens: those of the config first, in its order
    new_ids = sorted(own["embed"].keys() | own["lm_head"].keys())
    vocabulary = Vocabulary(list(dict.fromkeys([*given_ids, *new_ids])))
    if not vocabulary.ids:
        return vocabulary
    # one of the tables may have no rows of its own: then
    # those of the other if the two are tied, or the base's
    of_the_other = set()
    for name, other in (TABLES, TABLES[::-1]):
        if reading.model.config.tied and given[name] is None and not own[name]:
            given[name] = given[other]
            own[name] = own[other]
            of_the_other.add(name)

    # each table's rows: of its own, of the other table, or of the base
    for name in TABLES:
        rows = dict(own[name])
        if given[name] is not None:
            rows |= zip(given_ids, given[name].split(1), strict=False)
        if name in of_the_other:
            _add_update(rows, name, tensors, reading)
        _add_other_rows(rows, name, vocabulary.ids, tensors, reading)
        _check_rows(rows, vocabulary.ids, reading)
        vocabulary.rows[f"{name}.token_rows"] = torch.cat(
            [rows[token] for token in vocabulary.ids]
        )
    return vocabulary


def _add_update(
    rows: dict[int, Tensor], name: str, tensors: dict[str, Tensor], reading: AdapterReading
) -> None:
    """Add the LoRA update of a table to rows (1, C) that are those of the tied other one: PEFT adds
    it to all rows."""
    # the factors have been fitted to the base's vocabulary
    known = [token for token in rows if token < reading.model.config.vocab_size]
    if not known or not _are_factors(
        tensors, _factor_keys(tensors, reading.targets[name].name)
    ):
        return
    table = reading.read_base(base_table(name, reading.model)).float().clone()
    for token in known:
        table[token] = rows[token][0]
    table = _updated_table(table, name, tensors, reading)
    for token in known:
        rows[token] = table[token : token + 1]


def _updated_table(
    table: Tensor, name: str, tensors: dict[str, Tensor], reading: AdapterReading
) -> Tensor:
    """Return a table (V, C) with its LoRA update, if it has one.

    Raises ValueError for kinds of LoRA that change all rows.
    """
    target = reading.targets[name]
    factors = _factor_keys(tensors, target.name)
    if not _are_factors(tensors, factors):
        return table
    if "m" in factors or (reading.init and not target.embedding):
        reason = (
            f"{target.name} has LoRA that changes all rows, beside trained "
            "rows of the other table"
        )
        raise ValueError(f"{reading.path}: {reason}; merge the adapter in PEFT")
    return _with_update(table, target, tensors, reading)


def _add_other_rows(
    rows: dict[int, Tensor],
    name: str,
    ids: list[int],
    tensors: dict[str, Tensor],
    reading: AdapterReading,
) -> None:
    """Add the rows (1, C) of those tokens that a table does not train alone: as it has them with
    the rest of the adapter."""
    size = reading.model.config.vocab_size
    missing = [token for token in ids if token not in rows and token < size]
    if not missing:
        return
    target = reading.targets[name]
    table = tensors.get(f"{target.name}.weight")  # trained in full
    if table is None:
        table = reading.read_base(base_table(name, reading.model)).float()
    table = _updated_table(table, name, tensors, reading)
    for token in missing:
        rows[token] = table[token : token + 1]


def _check_rows(rows: dict[int, Tensor], ids: list[int], reading: AdapterReading) -> None:
    """Raise ValueError if a token has no row, or rows do not fit the network or are not finite."""
    dim = reading.model.config.dim
    for token in ids:
        if token not in rows or tuple(rows[token].shape) != (1, dim):
            found = tuple(rows[token].shape) if token in rows else "none"
            reason = (
                f"the token {token} needs a row of {dim} values in embedding and head, found "
                f"{found}"
            )
            raise ValueError(
                f"{reading.path}: {reason}; merge the adapter in PEFT, or save it with both tables "
                "(save_embedding_layers=True)"
            )
        if not rows[token].isfinite().all():
            raise ValueError(
                f"{reading.path}: the row of token {token} contains NaN or infinity; copy the "
                "adapter again"
            )


def _take_table(tensors: dict[str, Tensor], module: str) -> Tensor | None:
    """Take the table of a module out of the tensors: the trained one, if there are several."""
    table = None
    # in this order, so that a trained table replaces a frozen one
    for ending in (*_FROZEN_TABLES, "weight", _SAVED_TABLE):
        stored = tensors.pop(f"{module}.{ending}", None)
        table = table if stored is None else stored
    return table


def _fit_table(
    name: str, tensors: dict[str, Tensor], reading: AdapterReading
) -> dict[int, Tensor]:
    """Make table and factors of the embedding or the head fit the base's vocabulary.

    Returns the rows (1, C) that the base does not have, by token: those beyond its vocabulary, and
    single others. A table of which most rows differ from the base's is one that was trained.
    """
    target = reading.targets[name]
    table = _take_table(tensors, target.name)  # (W, C), all rows as PEFT saved them
    factors = _factor_keys(tensors, target.name)
    # the factor with a column, or a row, for each token
    leaf, dim = ("a", 1) if target.embedding else ("b", 0)
    has_lora = _are_factors(tensors, factors)
    if leaf in factors and not has_lora:
        return {}  # `_misfit` says what is wrong with them

    # the number of rows in the adapter
    size = reading.model.config.vocab_size
    width = size if table is None else table.size(0)
    if has_lora:
        width = tensors[factors[leaf]].size(dim)
    _check_table(table, width, "m" in factors, target, reading)
    if table is None:
        return {}
    if reading.init and has_lora and not target.embedding:
        if width != size:
            reason = (
                f"{target.name} is resized from {size} to {width} rows, with init_lora_weights "
                f"{reading.init!r}"
            )
            raise ValueError(f"{reading.path}: {reason}; merge the adapter in PEFT")
        # the table is what is left of the base's after the initial update
        return {}

    changed = _changed_rows(name, table, width, has_lora, tensors, reading)
    # litft's own new tokens, which are rows of a whole table beside LoRA or a trained table
    recorded = reading.config.get("litft", {}).get("new_tokens", [])
    tokens = {*changed, *recorded, *range(size, width)}
    unknown = set(changed) - set(recorded)
    if "m" in factors and unknown:
        raise ValueError(
            f"{reading.path}: {target.name} has {len(unknown)} rows that "
            "differ from the base's, beside DoRA; merge the adapter in PEFT, or pass --base_dir "
            "with the base that it was trained on"
        )
    rows = table
    # single rows are final values: the update of the module is part of them
    if has_lora:
        rows = _with_update(table, target, tensors, reading)
        tensors[factors[leaf]] = _resized(tensors[factors[leaf]], size, dim)
    return {token: rows[token : token + 1] for token in sorted(tokens)}


def _changed_rows(
    name: str,
    table: Tensor,
    width: int,
    has_lora: bool,
    tensors: dict[str, Tensor],
    reading: AdapterReading,
) -> list[int]:
    """Return the rows of a table (W, C) that differ from the base's.

    A table that was trained as a whole is put back into `tensors` instead.
    """
    size = reading.model.config.vocab_size
    target = reading.targets[name]
    base = reading.read_base(base_table(name, reading.model)).float()
    # without the base's padding, a table gets it back
    whole = torch.cat((table[:size], base[width:]))
    # PEFT saves the table in the dtype of the training, to which rounding is no change
    is_changed = (whole != base).any(1)
    for dtype in (torch.bfloat16, torch.float16):
        is_changed &= (whole != base.to(dtype).float()).any(1)
    changed = is_changed.nonzero().flatten().tolist()
    is_saved = any(target.name.endswith(pattern) for pattern in reading.saved)
    if is_saved or (len(changed) > MOST_ROWS * size and not has_lora):
        tensors[f"{target.name}.weight"] = whole
        return []
    return changed


def _with_update(
    table: Tensor, target: PeftTarget, tensors: dict[str, Tensor], reading: AdapterReading
) -> Tensor:
    """Return a table (V, C) with the LoRA update of its module added."""
    factors = _factor_keys(tensors, target.name)
    a = tensors[factors["a"]]
    b = tensors[factors["b"]]
    update = (b @ a).mT if target.embedding else b @ a  # (V, C)
    return table + update_scale(reading, target.config_name, a.size(0)) * update


def _factor_keys(tensors: dict[str, Tensor], module: str) -> dict[str, str]:
    """Return the keys of a module's LoRA tensors by kind: a, b or m."""
    keys = {}
    for key in tensors:
        owner, leaf = split_key(key)
        if owner == module and leaf:
            keys[leaf] = key
    return keys


def _are_factors(tensors: dict[str, Tensor], factors: dict[str, str]) -> bool:
    """Return whether a module has two matrices that can be multiplied."""
    if not {"a", "b"} <= factors.keys():
        return False
    a = tensors[factors["a"]]
    b = tensors[factors["b"]]
    return a.dim() == b.dim() == 2 and a.size(0) == b.size(1)


def _check_table(
    table: Tensor | None,
    width: int,
    has_magnitudes: bool,
    target: PeftTarget,
    reading: AdapterReading,
) -> None:
    """Raise ValueError if a table does not fit the network, or a resized one lacks what its rows
    are made of."""
    dim = reading.model.config.dim
    size = reading.model.config.vocab_size
    if table is not None and (table.dim() != 2 or table.size(1) != dim):
        raise ValueError(
            f"{reading.path}: {target.name} has shape {tuple(table.shape)}; pass --base_dir with "
            "its base"
        )
    if width == size:
        return
    what = f"{target.name} is resized from {size} to {width} rows"
    remedy = "merge the adapter in PEFT, or save it with save_embedding_layers=True"
    if table is None or len(table) != width:
        raise ValueError(
            f"{reading.path}: {what}, but the file has no table with them; {remedy}"
        )
    if has_magnitudes:
        raise ValueError(
            f"{reading.path}: {what}, with DoRA's magnitudes over all of them; {remedy}"
        )


def _resized(tensor: Tensor, size: int, dim: int) -> Tensor:
    """Return a tensor cut, or extended by zeros, to `size` along `dim`."""
    missing = size - tensor.size(dim)
    if missing <= 0:
        return tensor.narrow(dim, 0, size)
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)
