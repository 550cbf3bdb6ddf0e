"""The base class of all methods: the interface that training, checkpoints and export use."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from litft.checkpoints.conversion import mappings_to_hf
from litft.checkpoints.peft_module_names import ModuleNames
from litft.checkpoints.rules import Rule
from litft.methods.mixins import mixins
from litft.methods.new_tokens import TOKEN_ROW_PARAMETERS, add_tokens, extend_table
from litft.model.config import Config
from litft.model.placement import SINGLE_DEVICE, WeightPlacement, summon_full
from litft.model.transformer import GPT

# C channels, V vocabulary

# the learned tensors of a method, by litft name, as stored in checkpoints and adapter files
AdapterTensors = dict[str, Tensor]


class BaseFolder(Protocol):
    """What a method needs from the base model's folder; implemented by
    `litft.pretrained.folder.PretrainedFolder`."""

    @property
    def adapter_rules(self) -> list[Rule]:
        """The rules that map litft names to the names in PEFT's adapter files."""
        ...

    @property
    def adapter_names(self) -> ModuleNames:
        """The names of modules in the class that opens the base folder, for adapter files."""
        ...

    def meta_model(self) -> GPT:
        """Create the network on the meta device."""
        ...

    @cached_property
    def outline(self) -> GPT:
        """The network on the meta device, for names and shapes. It must not be changed."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return the base's tensor, of any shape, with a litft name."""
        ...


class Method:
    """Interface of a fine-tuning method. A subclass must implement `inject` and `parameters`.

    A method that saves adapters also implements `write`, a classmethod `read(folder, source) ->
    (method, values)`, and sets `peft_types`. `read` raises ValueError naming the file if names or
    shapes do not fit the base or a value is not finite, and returns fp32 values; a `peft_type` that
    PEFT does not have begins with `LITFT_`. By default, `merged` replaces a base tensor by the
    learned one of the same name.

    Order of calls in a training run:

    1. `select_targets` chooses what to train, on a meta model. When training continues from an
       adapter, `read` and `update_args` replace it. The caller then sets `tokens` and `frozen`.
    2. The network is built in the dtype `storage(precision)`, and quantized except for
       `unquantized_modules`. `attach` adds the method's modules, then `set_compute_dtype` sets the
       compute dtype.
    3. The network is sharded and filled, and `reset_parameters` initializes what `attach` has
       added.
    4. The optimizer updates the `parameters` that require gradients, at the learning rate times
       `lr_multiplier`.
    5. `values` are saved: by `write` as an adapter, or tensor by tensor by `merged` as a full
       model.

    A saved adapter is opened by `read`, then `load`.
    """

    name: ClassVar[str]  # the group of its flags, as in --lora.r
    # its name in FINETUNE, in messages and in the run folder
    title: ClassVar[str]
    # values of peft_type in adapter_config.json that `read` accepts
    peft_types: ClassVar[tuple[str, ...]] = ()
    # flags that may change when training continues from an adapter
    changeable: ClassVar[tuple[str, ...]] = ()
    # whether it saves a full model rather than an adapter
    saves_full_model: ClassVar[bool] = False

    def __init__(self, args: Any) -> None:
        self.args = args
        # id of a new token -> ids that its text was encoded as before
        self.tokens: dict[int, list[int]] = {}
        # whether a tied embedding and head are two tensors with this adapter, as in some from PEFT
        self.untied = False
        # names of `parameters` that are not trained (--train.freeze), but saved
        self.frozen: set[str] = set()

    def select_targets(self, model: GPT, rules: list[Rule]) -> None:
        """Select what to train from the flags; raise ValueError if they select nothing.

        model: on the meta device. rules: map litft names to the names in PEFT's adapter files.
        """

    def ignored_flags(self) -> Iterator[str]:
        """Yield notes on flags of the method that have no effect on the targets chosen."""
        yield from ()

    def storage(self, precision: str) -> str:
        """Return the dtype in which the base's weights are stored when the network computes in
        `precision`."""
        return precision

    def unquantized_modules(self) -> set[str]:
        """Return the names of modules that are not quantized with the base because their own weight
        is trained."""
        return set()

    def attach(self, model: GPT, keep: bool = True) -> None:
        """Add the method to `model` and freeze what is not trained.

        keep: keep the base's values of trained parameters, which `disabled` and `detach` need.
        """
        self.inject(model, keep)
        # on the meta device there is nothing to initialize yet
        if not model.embed.weight.is_meta:
            self.reset_parameters(model)

    def inject(self, model: GPT, keep: bool) -> None:
        """Add the method's parameters to `model`, uninitialized, and set which parameters require
        gradients.

        To support new tokens, also call `attach_tokens`, and include `token_rows` in `parameters`.
        """
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self, model: GPT) -> None:
        """Initialize what `attach` has added.

        The model has its weights; a sharded one is gathered module by module.
        """
        for module in mixins(model):
            # a weight that is not read is not gathered
            ignored = () if module.reads_weight else ("weight",)
            with summon_full(module, *ignored):
                module.reset_parameters()

    def set_compute_dtype(self, model: GPT, precision: str) -> None:
        """Make the network compute in `precision` if its weights are stored in another dtype."""

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """Return the parameters that the method saves and counts, by name; those that require
        gradients are trained."""
        raise NotImplementedError

    def lr_multiplier(self, name: str) -> float:
        """Return the factor of a parameter's learning rate."""
        return 1.0

    def values(self, model: GPT) -> AdapterTensors:
        """Return the current values of `parameters`, detached but not copied."""
        return {
            name: parameter.detach() for name, parameter in self.parameters(model).items()
        }

    def load(
        self, model: GPT, values: AdapterTensors, placement: WeightPlacement = SINGLE_DEVICE
    ) -> None:
        """Attach the method and fill its parameters with `values`."""
        self.attach(model)
        for name, parameter in self.parameters(model).items():
            placement.copy_in(name, parameter, values[name].__getitem__)

    def write(
        self,
        folder: Path,
        source: BaseFolder,
        values: AdapterTensors,
        record: dict[str, Any],
    ) -> None:
        """Write an adapter folder; `record` is added to the method's fields in
        adapter_config.json."""
        raise NotImplementedError

    def merged(self, name: str, weight: Tensor, values: AdapterTensors) -> Tensor:
        """Return the merged tensor of `name`, given the base's tensor `weight`, of any shape.

        The shape stays, but for the rows of new tokens that embedding and head get. Call
        `check_merge` first.
        """
        return self.add_token_rows(name, values.get(name, weight), values)

    def check_merge(self, names: list[str], values: AdapterTensors) -> None:
        """Raise ValueError if the learned values cannot be merged into base parameters with these
        names."""

    def update_args(self, args: Any) -> None:
        """Take the `changeable` flags from a command that continues training an adapter."""

    def check_tokens(self) -> None:
        """Raise ValueError if the method cannot train new tokens beside what it changes in
        embedding and head."""

    def unties_head(self) -> bool:
        """Return whether an embedding and a head that are tied in the base are two tensors in the
        merged model."""
        return False

    def vocab_size(self, config: Config) -> int:
        """Return the vocabulary size of the base extended by the new tokens."""
        return max([config.vocab_size, *(token + 1 for token in self.tokens)])

    def attach_tokens(self, model: GPT) -> None:
        """Add trained rows for the new tokens to embedding and head."""
        if self.tokens:
            add_tokens(model, list(self.tokens), list(self.tokens.values()), self.untied)

    def token_rows(self, model: GPT) -> dict[str, nn.Parameter]:
        """Return the rows of new tokens by name: one parameter if the head is tied, otherwise
        two."""
        return {
            name: model.get_parameter(name) for name in self.token_row_names(model.config)
        }

    def token_row_names(self, config: Config) -> tuple[str, ...]:
        """Return the names of the rows of new tokens in a network; none without new tokens."""
        if not self.tokens:
            return ()
        if config.tied and not self.untied:
            return TOKEN_ROW_PARAMETERS[:1]
        return TOKEN_ROW_PARAMETERS

    def add_token_rows(self, name: str, weight: Tensor, values: AdapterTensors) -> Tensor:
        """Insert the rows of new tokens into a merged embedding or head (V, C), or a head's bias
        (V,); return other tensors, of any shape, unchanged.

        One that gets rows then has max(V, largest new id + 1) of them.
        """
        if not self.tokens or name not in (
            "embed.weight",
            "lm_head.weight",
            "lm_head.bias",
        ):
            return weight
        # a shared parameter is stored under the embedding's name
        rows = values.get(
            f"{name.partition('.')[0]}.token_rows", values[TOKEN_ROW_PARAMETERS[0]]
        )
        # a bias has no trained rows: it is only extended by zeros
        if name.endswith("bias"):
            rows = None
        return extend_table(weight, list(self.tokens), rows)


def match_patterns(
    patterns: Iterable[str], hf_names: dict[str, str]
) -> dict[str, list[str]]:
    """Return the litft names that each pattern matches; hf_names maps litft names to the
    checkpoint's names."""
    matches: dict[str, list[str]] = {}
    for pattern in patterns:
        matches[pattern] = []
        for name, hf_name in hf_names.items():
            if pattern_matches(pattern, name, hf_name):
                matches[pattern].append(name)
    return matches


def pattern_matches(pattern: str, name: str, hf_name: str) -> bool:
    """Return whether a pattern from a flag matches a module, by its litft name or its name in the
    checkpoint.

    A pattern is a full name, its last components (`q_proj`, `attention.q_proj`), or a shell pattern
    (`blocks.1?.mlp.*`).
    """
    for full_name in (name, hf_name):
        last = full_name.rpartition(".")[2]
        # shell patterns match the full name or the last component, plain endings at a dot
        if fnmatch(full_name, pattern) or fnmatch(last, pattern):
            return True
        if full_name.endswith(f".{pattern}"):
            return True
    return False


def with_fused(rules: list[Rule], names: Iterable[str]) -> list[str]:
    """Return these parameters and all parameters that the checkpoint stores in the same tensor as
    one of them."""
    # a dict keeps the order and removes duplicates
    sources: dict[str, None] = {}
    for mapping in mappings_to_hf(rules, names):
        sources |= dict.fromkeys(mapping.sources)
    return list(sources)
