"""The face that every method shows to the loop, to files and to checkpoints."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from litft.checkpoints.conversion import Rule, mappings_to_hf
from litft.methods.mixins import mixins
from litft.methods.new_tokens import ROWS, add_tokens, grown
from litft.model.config import Config
from litft.model.placement import UNSHARDED, WeightPlacement, summon_full
from litft.model.transformer import GPT

Values = dict[str, Tensor]  # what a method has learned, by our names: what files and checkpoints hold of it


class BaseFolder(Protocol):
    """What a method asks of the base model's folder (`folder.PretrainedFolder`)."""

    @property
    def adapter_rules(self) -> list[Rule]:
        """How an adapter's files name its modules."""

    def meta_model(self) -> GPT:
        """The network without weights."""

    def tensor(self, name: str) -> Tensor:
        """The base's tensor of one of our names."""


class Method:
    """What the loop, files and checkpoints ask of a method.

    `choose` looks at a network without weights and says what will be trained; `attach` does it to one with weights;
    `parameters` are the method's own: those it saves, counts and loads, of which those that require gradients are trained.
    `values` are these as tensors by their names. `tokens`: the ids of new tokens, each with the ids of its text's pieces.
    """

    name: ClassVar[str]  # the group of its flags
    title: ClassVar[str]  # what a person calls it, and its run's folder
    peft_types: ClassVar[tuple[str, ...]] = ()  # what adapter_config.json calls its folders
    changeable: ClassVar[tuple[str, ...]] = ()  # flags that may differ where an adapter is gone on with
    saves_full_model: ClassVar[bool] = False  # what it leaves is a model's folder, not an adapter's

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokens: dict[int, list[int]] = {}
        self.frozen: set[str] = set()  # parameters of the method's own that are left alone, and saved all the same

    def choose(self, model: GPT, rules: list[Rule]) -> None:
        """Find what the flags name; ValueError where they name nothing."""

    def storage(self, precision: str) -> str:
        """The dtype that the base's weights are kept in, for a network that computes in `precision`."""
        return precision

    def unquantized_modules(self) -> set[str]:
        """The modules whose own weight is trained: of a quantized base they are not quantized."""
        return set()

    def attach(self, model: GPT, keep: bool = True) -> None:
        """Change `model`, and freeze what is not trained.

        keep: hold the base's values of what is trained, for `disabled` and `detach`.
        """
        self.inject(model, keep)
        if not model.embed.weight.is_meta:
            self.reset_parameters(model)

    def inject(self, model: GPT, keep: bool) -> None:
        """Give `model` what the method adds, without values."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self, model: GPT) -> None:
        """The first values of what `attach` has added to a network without weights; of a sharded one, module by module."""
        for module in mixins(model):
            with summon_full(module, *(() if module.reads_weight else ("weight",))):
                module.reset_parameters()

    def compute_in(self, model: GPT, precision: str) -> None:
        """Make the network compute in `precision`, where its weights are kept in another."""

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """The method's own parameters."""
        raise NotImplementedError

    def lr_multiplier(self, name: str) -> float:
        """By what a parameter's learning rate is multiplied."""
        return 1.0

    def values(self, model: GPT) -> Values:
        """What the method has learned so far."""
        return {name: parameter.detach() for name, parameter in self.parameters(model).items()}

    def load(self, model: GPT, values: Values, placement: WeightPlacement = UNSHARDED) -> None:
        """Attach the method with these values."""
        self.attach(model)
        for name, parameter in self.parameters(model).items():
            placement.copy_in(name, parameter, values[name].__getitem__)

    def write(self, folder: Path, source: BaseFolder, values: Values, record: dict[str, Any]) -> None:
        """Write the folder to open; `record` goes into adapter_config.json beside the method's own fields."""
        raise NotImplementedError

    def merged(self, name: str, weight: Tensor, values: Values) -> Tensor:
        """The base's tensor `name` as the method has changed it; `check_merge` says where no tensor can say that."""
        return self.with_tokens(name, values.get(name, weight), values)

    def check_merge(self, names: list[str], values: Values) -> None:
        """ValueError where the base's parameters, of these names, cannot take what was learned."""

    def go_on(self, args: Any) -> None:
        """Take from the command's flags what may change where an adapter is trained further."""

    def unties(self) -> bool:
        """Whether embedding and head, one tensor in the base, are two once merged."""
        return False

    def vocab_size(self, config: Config) -> int:
        """The base's, with the new tokens."""
        return max([config.vocab_size, *(token + 1 for token in self.tokens)])

    def attach_tokens(self, model: GPT) -> None:
        """Give the model rows for the new tokens."""
        if self.tokens:
            add_tokens(model, list(self.tokens), list(self.tokens.values()))

    def token_rows(self, model: GPT) -> dict[str, nn.Parameter]:
        """The rows of new tokens: one set where the head is tied."""
        names = ROWS[: 1 if model.config.tied else 2] if self.tokens else ()
        return {name: model.get_parameter(name) for name in names}

    def with_tokens(self, name: str, weight: Tensor, values: Values) -> Tensor:
        """A merged tensor with the rows of new tokens, where it has any."""
        if not self.tokens or name not in ("embed.weight", "lm_head.weight", "lm_head.bias"):
            return weight
        rows = values.get(f"{name.partition('.')[0]}.token_rows", values[ROWS[0]])
        return grown(weight, list(self.tokens), None if name.endswith("bias") else rows)


def matching(patterns: Iterable[str], theirs: dict[str, str]) -> dict[str, list[str]]:
    """The names that each pattern means, of those given with what the checkpoint calls them."""
    return {pattern: [ours for ours, name in theirs.items() if means(pattern, ours, name)] for pattern in patterns}


def means(target: str, ours: str, theirs: str) -> bool:
    """Whether a text of the command line means a module: its name's last part, its whole path, or a pattern."""
    names = (ours, theirs)
    whole_or_last = (*names, *(name.rpartition(".")[2] for name in names))
    return any(fnmatch(name, target) for name in whole_or_last) or any(name.endswith(f".{target}") for name in names)


def siblings(rules: list[Rule], names: Iterable[str]) -> list[str]:
    """These of our parameters and all that lie in one tensor of the checkpoint with one of them."""
    return list(dict.fromkeys(source for mapping in mappings_to_hf(rules, names) for source in mapping.sources))
