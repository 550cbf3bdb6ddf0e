"""What a fine-tuning command stands for once its folder is known: the tokenizer, the method and its
first values."""

import dataclasses
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from litft.args import FinetuneArgs
from litft.checkpoints.adapter_reader import adapter_digest
from litft.distributed.devices import DTYPES, pick_full_precision, pick_precision
from litft.distributed.fsdp import shard
from litft.methods import Method, Values, method_of
from litft.methods.base import pattern_matches
from litft.methods.new_tokens import untrained_ids
from litft.model.mlp import CONSTANTS
from litft.model.placement import copy_into_local
from litft.model.transformer import GPT
from litft.pretrained.build import fill_model, unfilled_model
from litft.pretrained.folder import PretrainedFolder, fingerprint
from litft.training.memory_saving.activation_checkpointing import recompute
from litft.training.memory_saving.compile import compile_blocks, compiles
from litft.training.memory_saving.cpu_offload import offload_activations, offload_parameters
from litft.training.objectives import objective_of

# flags that a resumed run must share with its beginning, or it would silently become another run
SHARED = (
    "global_batch_size learning_rate lr_schedule warmup_fraction warmup_steps min_lr_ratio".split()
)
SHARED += "weight_decay betas eps max_grad_norm freeze label_smoothing neftune_alpha".split()
SHARED += "optimizer decay_fraction compile".split()


class Setup:
    """A command's model folder, tokenizer and method; raises ValueError for combinations that
    cannot be.

    The method is a new one, or that of the adapter folder that training continues from, with its
    values.
    """

    def __init__(self, args: FinetuneArgs, source: PretrainedFolder) -> None:
        self.objective = objective_of(args)
        self.args = self._with_defaults(args)
        self.source = source
        self.quantize = source.quantization(args.quantize) or "none"
        self.tokenizer = source.tokenizer()
        if self.tokenizer is None:
            raise ValueError(
                f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it"
            )
        self.method, self.initial_values = self._method()
        self._add_tokens()
        self.method.frozen = self._frozen()
        if self.method.saves_full_model and self.quantize != "none":
            raise ValueError(
                f"{source.base} is quantized, and full fine-tuning changes every weight; use "
                "finetune/lora.py"
            )

    def _with_defaults(self, args: FinetuneArgs) -> FinetuneArgs:
        """Return the flags with the defaults that depend on the objective and the method."""
        if args.train.learning_rate is None:
            rate = self.objective.learning_rate(method_of(args).name, args.default_learning_rate)
            args = dataclasses.replace(
                args, train=dataclasses.replace(args.train, learning_rate=rate)
            )
        return dataclasses.replace(
            args, preference=dataclasses.replace(args.preference, beta=self.objective.beta)
        )

    def _method(self) -> tuple[Method, Values | None]:
        """The method, and the values of the adapter that training continues from."""
        method = method_of(self.args)

        # a new method
        adapter = self.source.read_adapter()
        if adapter is None:
            method.choose(self.source.outline, self.source.adapter_rules)
            return method, None
        saved_method, values = adapter

        # the method of the adapter that training continues from
        if type(saved_method) is not type(method):
            reason = f"{self.source.adapter} is an adapter of another method ({saved_method.title})"
            remedy = self._merge_remedy(saved_method, values)
            raise ValueError(f"{reason}, which {method.title} cannot go on with; {remedy}")
        # values that the adapter's tensors have fixed
        default = type(method.args)()
        fixed = []
        for item in dataclasses.fields(method.args):
            if item.name not in method.changeable and getattr(method.args, item.name) != getattr(
                default, item.name
            ):
                fixed.append(f"--{method.name}.{item.name}")
        if fixed:
            raise ValueError(
                f"{', '.join(fixed)}: an adapter goes on with its own; leave them out, or merge it "
                "first"
            )
        saved_method.update_args(method.args)
        return adapter

    def _merge_remedy(self, method: Method, values: Values) -> str:
        """How else to build on an adapter."""
        try:
            method.check_merge([name for name, _ in self.source.outline.named_parameters()], values)
        except ValueError:
            return f"it cannot be merged, so begin with its base, {self.source.base}"
        return (
            f"merge it first: python scripts/merge_lora.py --checkpoint_dir {self.source.adapter}"
        )

    def _add_tokens(self) -> None:
        """Add the tokens of --data.new_tokens; an adapter that has new tokens keeps them, and takes
        no others."""
        texts = self.args.data.new_tokens
        if self.initial_values is None:
            self.method.tokens = self.tokenizer.add_tokens(texts)
            self.method.check_tokens()
        elif missing := [
            text for text in texts if self.tokenizer.token_id(text) not in self.method.tokens
        ]:
            reason = "an adapter goes on with the tokens that it has"
            raise ValueError(
                f"--data.new_tokens {missing[0]!r}: {reason}; merge it first to add others"
            )

    def _frozen(self) -> set[str]:
        """The parameters that --train.freeze names, and constants; ValueError for a pattern that
        matches none."""
        parameters = self._meta_parameters()
        names = []
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                names.append(name)
        constants = set()
        for name in parameters:
            if name.endswith(CONSTANTS):
                constants.add(name)
        if not self.args.train.freeze:
            return constants

        # patterns of the user, on top of the constants
        frozen: set[str] = set()
        for pattern in self.args.train.freeze:
            matches = set()
            for name in names:
                if self._is_named(name, pattern):
                    matches.add(name)
            if not matches:
                raise ValueError(
                    f"--train.freeze {pattern}: nothing that is trained has that name, such as "
                    f"{names[0]}"
                )
            frozen |= matches
        if frozen == set(names):
            raise ValueError(
                f"--train.freeze {','.join(self.args.train.freeze)}: nothing is left to train"
            )
        return frozen | constants

    def _is_named(self, name: str, pattern: str) -> bool:
        """Whether a pattern matches a parameter's name, in litft or in the checkpoint."""
        module, _, leaf = name.rpartition(".")
        if pattern_matches(pattern, name, module):
            return True
        weight = f"{module}.weight"
        if weight not in self._stored_names:
            return False
        for stored in self._stored_names[weight]:
            stored_module = stored.rpartition(".")[0]
            if pattern_matches(pattern, f"{stored_module}.{leaf}", stored_module):
                return True
        return False

    @cached_property
    def _stored_names(self) -> dict[str, list[str]]:
        """The names in the checkpoint of each parameter of the base."""
        names: dict[str, list[str]] = {}
        for mapping in self.source.checked_mappings:
            for target in mapping.targets:
                names.setdefault(target, []).extend(mapping.sources)
        return names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the method's parameters, by name."""
        return {name: tuple(parameter.shape) for name, parameter in self._meta_parameters().items()}

    def _meta_parameters(self) -> dict[str, nn.Parameter]:
        model = self.source.meta_model()
        self.method.attach(model)
        return self.method.parameters(model)

    def precision(self, device: torch.device, shards: int = 1) -> str:
        """What the network computes in: as asked for, or what fits where the weights are cut into
        so many shards."""
        if not self.method.saves_full_model:
            return pick_precision(self.args.precision, device)
        size = sum(p.numel() for p in self.source.outline.parameters())
        return pick_full_precision(self.args.precision, device, size // shards)

    def build(
        self, precision: str, device: torch.device, mesh: DeviceMesh | None = None
    ) -> tuple[GPT, dict[str, nn.Parameter]]:
        """Build the network with the method attached; returns it and the method's parameters.

        It is built on the meta device, changed by the method, sharded over `mesh`, filled from the
        files and initialised last, so that no process ever holds more than its shard.
        """
        # on the meta device: the network, the method, and what is frozen
        storage = self.method.storage(precision)
        on_host = self.args.train.cpu_offload == "parameters"
        model = unfilled_model(
            self.source, storage, self.args.quantize, self.method.unquantized_modules()
        )
        self.method.attach(model, keep=False)
        self.method.compute_in(model, precision)
        for name in self.method.frozen:
            model.get_parameter(name).requires_grad_(False)

        # shards, before there is memory behind them
        if mesh is not None:
            # full fine-tuning keeps fp32 weights, and gathers them in bf16
            if self.method.saves_full_model and precision == "bf16":
                gather_in = DTYPES["bf16"]
            else:
                gather_in = None
            shard(model, mesh, gather_in, on_host)

        # values: the base's from its files, then the method's
        fill_model(self.source, model, storage, "cpu" if on_host else device)
        # the initial values depend on the seed alone, whatever was drawn before
        torch.manual_seed(self.args.seed)
        self.method.reset_parameters(model)
        parameters = self.method.parameters(model)
        for name, value in (self.initial_values or {}).items():
            copy_into_local(parameters[name], value.__getitem__)
        model.compute_device = device if on_host else None
        model.label_smoothing = self.args.train.label_smoothing
        model.neftune_alpha = self.args.train.neftune_alpha
        return model, parameters

    def blocks_on_host(self, sharded: bool) -> bool:
        """Whether the blocks' frozen weights wait in host memory; FSDP offloads those of a sharded
        network itself."""
        return self.args.train.cpu_offload == "parameters" and not sharded

    def prepare_blocks(
        self, model: GPT, recomputed: str, device: torch.device, sharded: bool
    ) -> None:
        """Offload, recompute and compile the blocks as the flags and the plan say."""
        train = self.args.train
        on_host = self.blocks_on_host(sharded)
        if on_host:
            offload_parameters(model, device)
        recompute(model, recomputed)
        if compiles(train.compile, device.type, on_host):
            compile_blocks(model)
        if train.cpu_offload == "activations":
            offload_activations(model, device)

    def untrained_tokens(self, special: set[int]) -> list[str]:
        """Those of the data's `special` tokens whose embeddings look untrained and stay so with
        this method, as text."""
        base_tokens = special - self.method.tokens.keys()
        trains_embedding = (
            "embed.weight" in self.shapes() and "embed.weight" not in self.method.frozen
        )
        if trains_embedding or not base_tokens:
            return []
        table = self.source.tensor("embed.weight")
        return [
            self.tokenizer.decode([token], skip_special=False)
            for token in untrained_ids(table, base_tokens)
        ]

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with its beginning, of what the command and the model's
        folder say."""
        flags = dataclasses.asdict(self.args)
        method_flags = flags.get(self.method.name, {})
        objective = {}
        if self.args.objective != "sft":
            objective = {"objective": self.args.objective}
            objective |= {
                f"preference.{name}": value for name, value in flags["preference"].items()
            }
        return {
            "method": self.method.title,
            "quantize": self.quantize,
            **objective,
            **{f"train.{name}": flags["train"][name] for name in SHARED},
            **{f"{self.method.name}.{name}": value for name, value in method_flags.items()},
            "data.new_tokens": self.args.data.new_tokens,
            "base model": fingerprint(self.source.checkpoint),
            "adapter": adapter_digest(self.source.adapter) if self.source.adapter else None,
        }
