"""What a fine-tuning command comes to once its folder is known: the tokenizer, the method, and where the method begins."""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from litft.args import FinetuneArgs
from litft.checkpoints.peft_format import adapter_digest
from litft.distributed.devices import DTYPES, pick_full_precision, pick_precision
from litft.distributed.fsdp import shard
from litft.methods import Method, Values, method_of
from litft.methods.base import means
from litft.methods.new_tokens import untrained
from litft.model.placement import copy_into_local
from litft.model.transformer import GPT
from litft.pretrained import PretrainedFolder, fingerprint

# flags whose change would make a resumed run another one, without a word
SHARED = "global_batch_size learning_rate lr_schedule warmup_fraction min_lr_ratio weight_decay max_grad_norm".split()
SHARED += "freeze label_smoothing neftune_alpha optimizer decay_fraction compile".split()


class Setup:
    """A command's method, chosen or held by the adapter folder that it goes on with; ValueError for what cannot be."""

    def __init__(self, args: FinetuneArgs, source: PretrainedFolder) -> None:
        self.args, self.source = args, source
        self.quantize = source.quantization(args.quantize) or "none"
        self.tokenizer = source.tokenizer()
        if self.tokenizer is None:
            raise ValueError(f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it")
        self.method, self.begin = self._method()
        self._add_tokens()
        self.method.frozen = self._frozen()
        if self.method.saves_full_model and self.quantize != "none":
            raise ValueError(f"{source.base} is quantized, and full fine-tuning changes every weight; use finetune/lora.py")

    def _method(self) -> tuple[Method, Values | None]:
        method = method_of(self.args)
        held = self.source.read_adapter()
        if held is None:
            method.choose(self.source.meta_model(), self.source.adapter_rules)
            return method, None
        if type(held[0]) is not type(method):
            reason = f"{self.source.adapter} is an adapter of another method ({held[0].title})"
            raise ValueError(f"{reason}, which {method.title} cannot go on with; {self._remedy(*held)}")
        default = type(method.args)()
        given = [
            f"--{method.name}.{item.name}"
            for item in dataclasses.fields(method.args)
            if item.name not in method.changeable and getattr(method.args, item.name) != getattr(default, item.name)
        ]
        if given:
            raise ValueError(f"{', '.join(given)}: an adapter goes on with its own; leave them out, or merge it first")
        held[0].go_on(method.args)
        return held

    def _remedy(self, method: Method, values: Values) -> str:
        """How else to build on an adapter."""
        try:
            method.check_merge([name for name, _ in self.source.meta_model().named_parameters()], values)
        except ValueError:
            return f"it cannot be merged, so begin with its base, {self.source.base}"
        return f"merge it first: python scripts/merge_lora.py --checkpoint_dir {self.source.adapter}"

    def _add_tokens(self) -> None:
        """Make tokens of --data.new_tokens; an adapter that has them goes on with its own."""
        texts = self.args.data.new_tokens
        if self.begin is None:
            self.method.tokens = self.tokenizer.add_tokens(texts)
        elif missing := [text for text in texts if self.tokenizer.token_id(text) not in self.method.tokens]:
            reason = "an adapter goes on with the tokens that it has"
            raise ValueError(f"--data.new_tokens {missing[0]!r}: {reason}; merge it first to add others")

    def _frozen(self) -> set[str]:
        """The parameters that --train.freeze names; ValueError where it names none."""
        if not self.args.train.freeze:
            return set()
        names = [name for name, parameter in self._on_meta().items() if parameter.requires_grad]
        found: set[str] = set()
        for pattern in self.args.train.freeze:
            hits = {name for name in names if means(pattern, name, name.rpartition(".")[0])}
            if not hits:
                raise ValueError(f"--train.freeze {pattern}: nothing that is trained has that name, such as {names[0]}")
            found |= hits
        if found == set(names):
            raise ValueError(f"--train.freeze {','.join(self.args.train.freeze)}: nothing is left to train")
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The method's own parameters, by name."""
        return {name: tuple(p.shape) for name, p in self._on_meta().items()}

    def _on_meta(self) -> dict[str, nn.Parameter]:
        model = self.source.meta_model()
        self.method.attach(model)
        return self.method.parameters(model)

    def precision(self, device: torch.device, shards: int = 1) -> str:
        """What the network computes in, as asked for or as fits where the weights are in so many parts."""
        if not self.method.saves_full_model:
            return pick_precision(self.args.precision, device)
        size = sum(p.numel() for p in self.source.meta_model().parameters())
        return pick_full_precision(self.args.precision, device, size // shards)

    def build(
        self, precision: str, device: torch.device, mesh: DeviceMesh | None = None
    ) -> tuple[GPT, dict[str, nn.Parameter]]:
        """The network with the method on it, and the method's own parameters; the same on every rank, or a rank's part.

        It is put together without memory, so that each rank makes and reads what it holds of it.
        """
        storage, on_host = self.method.storage(precision), self.args.train.cpu_offload == "parameters"
        model = self.source.unfilled(storage, self.args.quantize, self.method.unquantized_modules())
        self.method.attach(model, keep=False)
        self.method.compute_in(model, precision)
        for name in self.method.frozen:
            model.get_parameter(name).requires_grad_(False)
        if mesh is not None:
            shard(model, mesh, DTYPES["bf16"] if self.method.saves_full_model and precision == "bf16" else None, on_host)
        self.source.fill(model, storage, "cpu" if on_host else device)
        torch.manual_seed(self.args.seed)
        self.method.reset_parameters(model)
        parameters = self.method.parameters(model)
        for name, value in (self.begin or {}).items():
            copy_into_local(parameters[name], value.__getitem__)
        model.computes_on = device if on_host else None
        model.label_smoothing, model.neftune_alpha = self.args.train.label_smoothing, self.args.train.neftune_alpha
        return model, parameters

    def untrained_tokens(self, special: set[int]) -> list[str]:
        """Which of the `special` tokens of the data have embeddings that look untrained, and stay so with this method."""
        used = special - self.method.tokens.keys()
        if ("embed.weight" in self.shapes() and "embed.weight" not in self.method.frozen) or not used:
            return []
        table = self.source.tensor("embed.weight")
        return [self.tokenizer.decode([token], skip_special=False) for token in untrained(table, used)]

    def identity(self) -> dict[str, Any]:
        """What a run must share with the one it continues, of what the command and its folder say."""
        flags = dataclasses.asdict(self.args)
        own = flags.get(self.method.name, {})
        return {
            "method": self.method.title,
            "quantize": self.quantize,
            **{f"train.{name}": flags["train"][name] for name in SHARED},
            **{f"{self.method.name}.{name}": value for name, value in own.items()},
            "data.new_tokens": self.args.data.new_tokens,
            "base model": fingerprint(self.source.checkpoint),
            "adapter": adapter_digest(self.source.adapter) if self.source.adapter else None,
        }
