"""LLaMA-Adapter v1 (arXiv 2303.16199) and v2 (2304.15010): learned prefixes that attention sees, and affine Linears."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from litft.args import AdapterArgs, AdapterV2Args
from litft.args.checks import LARGEST_SIZE
from litft.checkpoints.conversion import Rule
from litft.checkpoints.peft_format import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    read_adapter_config,
    read_tensors,
    read_token_ids,
    write_tensors,
)
from litft.methods.base import BaseFolder, Method, Values
from litft.methods.mixins import Mixin, norm_names, train_parameters
from litft.model.attention_eager import eager_attention
from litft.model.config import Config
from litft.model.kv_cache import LayerCache
from litft.model.mlp import ExpertLinear, Grouping, by_expert
from litft.model.packed_sequences import PackedSequences
from litft.model.transformer import GPT

# B batch, T tokens, C channels, H query heads, K key/value heads, D head dim, P prefix length, E experts


class PrefixAttention(Mixin):
    """Attention whose queries also see a learned prefix, by a softmax of its own and through a gate that begins at zero.

    The prefix's keys and values are made by the layer's own projections, and not rotated. Its share is added before
    `o_proj`. This is PEFT's AdaptionPrompt: one scalar gate a layer, without the tanh of the paper's code.
    """

    def add_prefix(self, length: int) -> None:
        """Register the prompt (1, P, C), standard normal, and the gate (1,), in fp32."""
        weight = self.q_proj.weight
        self.adaption_prompt = nn.Parameter(torch.empty(1, length, self.q_proj.in_features, device=weight.device))
        self.adaption_gate = nn.Parameter(torch.empty(1, device=weight.device))

    def reset_parameters(self) -> None:
        """As in the paper: the gate is shut."""
        super().reset_parameters()
        nn.init.normal_(self.adaption_prompt)
        nn.init.zeros_(self.adaption_gate)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedSequences | None, cache: LayerCache | None) -> Tensor:
        """What the queries see of the tokens, and the gate's part of what they see of the prefix."""
        y = super().attend(q, k, v, documents, cache)
        if not self.on:
            return y
        keys, values = self.keys_values(self.adaption_prompt.to(q.dtype))  # (1, K, P, D)
        everything = torch.ones(1, keys.size(2), dtype=torch.bool, device=q.device)
        seen = eager_attention(q, keys, values, everything, self.softcap, scale=self.scale)
        return y + (self.adaption_gate * seen).to(y.dtype)

    def remove(self) -> None:
        """Undo `add_prefix`."""
        del self.adaption_prompt, self.adaption_gate


class AffineLinear(Mixin):
    """A Linear whose outputs are scaled and shifted: s * (W x + b + bias), s beginning at one and bias at zero."""

    def add_affine(self, bias: bool) -> None:
        """Register scale and bias, (out,) or (E, out) of experts, in fp32."""
        shape = (self.count, self.out_features) if isinstance(self, ExpertLinear) else (self.out_features,)
        self.adapter_scale = nn.Parameter(torch.empty(shape, device=self.weight.device))
        self.register_parameter(
            "adapter_bias", nn.Parameter(torch.empty(shape, device=self.weight.device)) if bias else None
        )

    def reset_parameters(self) -> None:
        """The Linear as it is."""
        super().reset_parameters()
        nn.init.ones_(self.adapter_scale)
        if self.adapter_bias is not None:
            nn.init.zeros_(self.adapter_bias)

    def forward(self, x: Tensor, *grouping: Grouping) -> Tensor:
        y = super().forward(x, *grouping)
        if not self.on:
            return y
        scale, bias = self.adapter_scale, self.adapter_bias
        if grouping:  # of experts: rows (N, out) sorted by expert
            scale = by_expert(scale, *grouping)
            bias = bias if bias is None else by_expert(bias, *grouping)
        return (scale * (y if bias is None else y + bias)).to(y.dtype)

    def remove(self) -> None:
        """Undo `add_affine`."""
        del self.adapter_scale, self.adapter_bias


class Adapter(Method):
    """LLaMA-Adapter v1: a prefix in every layer from `start_layer` on."""

    name, title = "adapter", "adapter"
    peft_types = ("ADAPTION_PROMPT", "LITFT_ADAPTER")
    flags: ClassVar[type] = AdapterArgs

    def __init__(self, args: AdapterArgs) -> None:
        super().__init__(args)
        self.layers = range(0)

    def choose(self, model: GPT, rules: list[Rule]) -> None:
        """The layers that get a prefix; ValueError where there are not so many."""
        count, start = len(model.blocks), self.args.start_layer
        if self.args.prompt_length and start >= count:
            raise ValueError(f"--adapter.start_layer {start}: this model has {count} layers, so none would have a prefix")
        self.layers = range(start, count) if self.args.prompt_length else range(0)

    def inject(self, model: GPT, keep: bool) -> None:
        """Add the prefixes to `model` and freeze everything else."""
        model.requires_grad_(False)
        for index in self.layers:
            PrefixAttention.mix_over(model.blocks[index].attention).add_prefix(self.args.prompt_length)
        self.arrange_besides(model, keep)
        self.attach_tokens(model)

    def arrange_besides(self, model: GPT, keep: bool) -> None:
        """What is trained besides prefixes and tokens."""

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """Prompts and gates, and rows of new tokens."""
        names = [f"blocks.{n}.attention.{leaf}" for n in self.layers for leaf in PREFIX]
        return {name: model.get_parameter(name) for name in names} | self.token_rows(model)

    def write(self, folder: Path, source: BaseFolder, values: Values, record: dict[str, Any]) -> None:
        """PEFT's two files where PEFT computes the same, else ours under a `peft_type` that PEFT refuses."""
        config: dict[str, Any] = {
            "peft_type": self.peft_types[-1],
            "task_type": "CAUSAL_LM",
            "adapter_len": self.args.prompt_length,
            "adapter_layers": len(self.layers),
            "inference_mode": True,
        }
        if "ADAPTION_PROMPT" in self.peft_types and is_pefts(source.meta_model().config) and not self.tokens:
            config |= {"peft_type": "ADAPTION_PROMPT", "target_modules": "self_attn"}
            values = {_to_peft(name): value for name, value in values.items()}
        if self.tokens:
            config["trainable_token_indices"] = list(self.tokens)
        write_tensors(folder, values, config | record)

    @classmethod
    def read(cls, folder: Path, source: BaseFolder) -> tuple["Adapter", Values]:
        """From a folder of litft's, or of PEFT's AdaptionPrompt."""
        config, values = read_adapter_config(folder), {_from_peft(n): v.float() for n, v in read_tensors(folder).items()}
        model = source.meta_model()
        length, count, tokens = config.get("adapter_len"), config.get("adapter_layers"), read_token_ids(config, folder)
        if not (all(type(n) is int and 0 <= n <= LARGEST_SIZE for n in (length, count)) and count <= len(model.blocks)):
            raise ValueError(f"{folder / ADAPTER_CONFIG}: adapter_len {length!r} and adapter_layers {count!r} do not fit")
        method = cls(cls.flags(prompt_length=length, start_layer=len(model.blocks) - count))
        method.layers = range(len(model.blocks) - count, len(model.blocks))
        method.tokens = {token: [] for token in tokens}
        method.recognize(model, values)
        method.attach(model)
        expected = {name: tuple(p.shape) for name, p in method.parameters(model).items()}
        found = {name: tuple(value.shape) for name, value in values.items()}
        if expected != found:
            odd = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))[0]
            reason = f"{odd} should be {expected.get(odd)}, is {found.get(odd)}"
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: the adapter does not fit its base model: {reason}")
        if odd := [name for name, value in values.items() if not value.isfinite().all()]:
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {odd[0]} holds NaN or infinity")
        return method, values

    def recognize(self, model: GPT, values: Values) -> None:
        """What is trained besides prefixes and tokens, told by the names that a folder holds."""

    def check_merge(self, names: list[str], values: Values) -> None:
        """ValueError where a gate is open: a prefix is no change of any weight."""
        if any(value.any() for key, value in values.items() if key.endswith(".adaption_gate")):
            reason = "its prefixes are seen by attention, and no weights of the base model can say that"
            raise ValueError(f"this adapter cannot be merged: {reason}; open it with its base model instead")


class AdapterV2(Adapter):
    """LLaMA-Adapter v2: v1, and scale and bias on every Linear, and trained norms."""

    name, title = "adapter", "adapter_v2"
    peft_types = ("LITFT_ADAPTER_V2",)
    flags = AdapterV2Args

    def __init__(self, args: AdapterV2Args) -> None:
        super().__init__(args)
        self.linears: list[str] = []
        self.norms: list[str] = []

    def choose(self, model: GPT, rules: list[Rule]) -> None:
        """As v1's; every Linear, and every norm."""
        super().choose(model, rules)
        kinds = (nn.Linear, ExpertLinear)
        self.linears = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        self.norms = norm_names(model)

    def arrange_besides(self, model: GPT, keep: bool) -> None:
        """Scales, biases and norms."""
        for name in self.linears:
            AffineLinear.mix_over(model.get_submodule(name)).add_affine(self.args.bias)
        train_parameters(model, self.norms, keep=keep)

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """v1's, scales and biases, norms."""
        leaves = ("adapter_scale", "adapter_bias") if self.args.bias else ("adapter_scale",)
        names = [*(f"{name}.{leaf}" for name in self.linears for leaf in leaves), *self.norms]
        return super().parameters(model) | {name: model.get_parameter(name) for name in names}

    def recognize(self, model: GPT, values: Values) -> None:
        """Everything, and biases where the folder has some."""
        layers = self.layers
        self.args.bias = any(name.endswith(".adapter_bias") for name in values)
        self.args.start_layer = min(self.args.start_layer, len(model.blocks) - 1)
        self.choose(model, [])
        self.layers = layers

    def merged(self, name: str, weight: Tensor, values: Values) -> Tensor:
        """s W and s (b + bias), in fp32."""
        module, _, leaf = name.rpartition(".")
        if (scale := values.get(f"{module}.adapter_scale")) is not None:
            shift = 0 if leaf == "weight" else values.get(f"{module}.adapter_bias", 0)
            before, weight = weight, (weight.float() + shift) * (scale[..., None] if leaf == "weight" else scale)
            if name == "lm_head.bias":  # a new token's logit is made beside the scaled head, with the bias it had
                ids = [token for token in self.tokens if token < len(before)]
                weight[ids] = before.float()[ids]
        return super().merged(name, weight, values)

    def check_merge(self, names: list[str], values: Values) -> None:
        """ValueError where a bias has no place among the base's parameters `names`."""
        super().check_merge(names, values)
        for key, value in values.items():
            module = key.removesuffix(".adapter_bias")
            if module != key and value.any() and f"{module}.bias" not in names:
                reason = f"{module} has no bias in this family's files, and the adapter gave it one"
                raise ValueError(f"this adapter cannot be merged: {reason}; train with --adapter.bias false to merge")

    def unties(self) -> bool:
        """The head is scaled, the embedding is not."""
        return True


PREFIX = ("adaption_prompt", "adaption_gate")


def is_pefts(config: Config) -> bool:
    """Whether PEFT knows the family and computes as we do: one size of heads and width, no norms, scales or bias between."""
    plain = config.qk_norm is None and config.attention_softcap is None and config.qkv_clip is None and not config.o_bias
    layers = all(layer.attention_scale is None and layer.rope and not layer.rope.query_beta for layer in config.layers)
    square = config.n_heads * config.head_dim == config.dim
    return config.model_type in ("llama", "mistral") and plain and layers and square


def _to_peft(name: str) -> str:
    return "base_model.model.model." + name.replace("blocks.", "layers.").replace(".attention.", ".self_attn.")


def _from_peft(key: str) -> str:
    if not key.startswith("base_model.model."):
        return key
    return key.removeprefix("base_model.model.model.").replace("layers.", "blocks.").replace(".self_attn.", ".attention.")
