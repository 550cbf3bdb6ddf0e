"""LLaMA-Adapter v1 (arXiv 2303.16199) and v2 (2304.15010): learned prefixes in attention, and
scaled and shifted Linears."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from litft.args import AdapterArgs, AdapterV2Args
from litft.args.value_checks import LARGEST_SIZE
from litft.checkpoints.adapter_reader import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    read_adapter_config,
    read_tensors,
    read_token_ids,
)
from litft.checkpoints.peft_writer import write_tensors
from litft.checkpoints.rules import Rule
from litft.methods.base import AdapterTensors, BaseFolder, Method
from litft.methods.mixins import Mixin, make_trainable, norm_names
from litft.model.attention_eager import eager_attention
from litft.model.config import Config
from litft.model.mlp import ExpertLinear, Grouping, by_expert
from litft.model.transformer import GPT

# B batch, T tokens, C channels, H query heads, K
# key/value heads, D head dim, P prefix length, E experts, N rows of expert inputs


class PrefixAttention(Mixin):
    """Attention whose output adds attention to a learned prefix, with a separate softmax, times a
    gate.

    Keys and values of the prefix come from the layer's own projections, without rotation; the sum
    is the input of `o_proj`. This is PEFT's AdaptionPrompt: one scalar gate per layer, without the
    tanh of the paper's code.
    """

    # of the attention, Attention or LatentAttention
    o_proj: nn.Linear
    softcap: float | None
    scale: float | None
    keys_values: Callable[[Tensor], tuple[Tensor, Tensor]]

    def add_prefix(self, length: int) -> None:
        """Register the prefix (1, P, C) and the gate (1,), in fp32."""
        # o_proj exists in every kind of attention; its output has the size of the residual stream
        weight = self.o_proj.weight
        dim = self.o_proj.out_features
        self.adaption_prompt = nn.Parameter(
            torch.empty(1, length, dim, device=weight.device)
        )
        self.adaption_gate = nn.Parameter(torch.empty(1, device=weight.device))

    def reset_parameters(self) -> None:
        """Initialize the prefix from a standard normal distribution and, as in the paper, the gate
        to zero."""
        super().reset_parameters()
        nn.init.normal_(self.adaption_prompt)
        nn.init.zeros_(self.adaption_gate)

    def add_attended(self, q: Tensor, y: Tensor) -> Tensor:
        """Return y (B, H, T, D) plus attention of q (B, H, T, D) to the prefix.

        In latent attention the heads of q are longer than those of y; see
        `LatentAttention.add_attended`.
        """
        # of the attention that this class is mixed over
        y = super().add_attended(q, y)  # pyright: ignore[reportAttributeAccessIssue]
        if not self.enabled:
            return y
        keys, values = self.keys_values(self.adaption_prompt.to(q.dtype))  # (1, K, P, D)
        # every query sees the whole prefix
        mask = torch.ones(1, keys.size(2), dtype=torch.bool, device=q.device)
        prefix_output = eager_attention(
            q, keys, values, mask, self.softcap, scale=self.scale
        )
        # a gate of 0 leaves y bitwise unchanged at the start
        return y + (self.adaption_gate * prefix_output).to(y.dtype)

    def remove(self) -> None:
        """Undo `add_prefix`."""
        del self.adaption_prompt, self.adaption_gate


class AffineLinear(Mixin):
    """A Linear whose outputs are shifted and scaled: scale * (W x + b + bias)."""

    # of the Linear or ExpertLinear
    weight: nn.Parameter
    out_features: int
    adapter_scale: nn.Parameter
    adapter_bias: nn.Parameter | None

    def add_affine(self, bias: bool) -> None:
        """Register the scale and, if `bias`, the bias, in fp32; (out,), or (E, out) for experts."""
        shape: tuple[int, ...]
        if isinstance(self, ExpertLinear):
            shape = (self.count, self.out_features)
        else:
            shape = (self.out_features,)
        self.adapter_scale = nn.Parameter(torch.empty(shape, device=self.weight.device))
        if bias:
            self.adapter_bias = nn.Parameter(torch.empty(shape, device=self.weight.device))
        else:
            self.register_parameter("adapter_bias", None)

    def reset_parameters(self) -> None:
        """Initialize the scale to one and the bias to zero, which leaves the output unchanged."""
        super().reset_parameters()
        nn.init.ones_(self.adapter_scale)
        if self.adapter_bias is not None:
            nn.init.zeros_(self.adapter_bias)

    def forward(self, x: Tensor, *grouping: Grouping) -> Tensor:
        """Return scale * (W x + b + bias), (..., out), for x (..., in).

        Experts take x (N, in), its rows sorted by expert, and a grouping; they return (N, out).
        """
        y = super().forward(x, *grouping)
        if not self.enabled:
            return y
        scale = self.adapter_scale
        bias = self.adapter_bias
        # experts: y (N, out) has its rows sorted by expert
        if grouping:
            scale = by_expert(scale, *grouping)
            if bias is not None:
                bias = by_expert(bias, *grouping)
        dtype = y.dtype
        if bias is not None:
            y = y + bias
        return (scale * y).to(dtype)

    def remove(self) -> None:
        """Undo `add_affine`."""
        del self.adapter_scale, self.adapter_bias


class Adapter(Method):
    """LLaMA-Adapter v1: a learned prefix in the attention of every layer from `start_layer` on."""

    name = "adapter"
    title = "adapter"
    peft_types = ("ADAPTION_PROMPT", "LITFT_ADAPTER")
    flags: ClassVar[type] = AdapterArgs
    needs_prefix: ClassVar[bool] = True  # whether it trains nothing else

    def __init__(self, args: AdapterArgs) -> None:
        super().__init__(args)
        self.layers: list[int] = []

    def select_targets(self, model: GPT, rules: list[Rule]) -> None:
        """Select the layers with a prefix; raise ValueError if `start_layer` is beyond the last
        layer."""
        num_layers = len(model.blocks)
        start = self.args.start_layer
        if self.args.prompt_length and start >= num_layers:
            raise ValueError(
                f"--adapter.start_layer {start}: this model has {num_layers} layers; choose a "
                "smaller number"
            )
        if self.args.prompt_length:
            self.layers = [layer for layer in attention_layers(model) if layer >= start]
        else:
            self.layers = []
        # v2 may run without prefixes, since it trains more than them
        if self.needs_prefix and self.args.prompt_length and not self.layers:
            reason = (
                "no layer from there on has attention, to which a prefix could be added"
            )
            raise ValueError(
                f"--adapter.start_layer {start}: {reason}; choose a smaller number, or lora.py"
            )

    def inject(self, model: GPT, keep: bool) -> None:
        """Add the prefixes to `model` and freeze all other parameters."""
        model.requires_grad_(False)
        for index in self.layers:
            attention = model.get_submodule(f"blocks.{index}.attention")
            PrefixAttention.convert_module(attention).add_prefix(self.args.prompt_length)
        self.inject_extra(model, keep)
        self.attach_tokens(model)

    def inject_extra(self, model: GPT, keep: bool) -> None:
        """Add what a subclass trains in addition to prefixes and new tokens."""

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """Return prefixes, gates and rows of new tokens."""
        names = []
        for n in self.layers:
            for leaf in PREFIX:
                names.append(f"blocks.{n}.attention.{leaf}")
        return {name: model.get_parameter(name) for name in names} | self.token_rows(model)

    def write(
        self,
        folder: Path,
        source: BaseFolder,
        values: AdapterTensors,
        record: dict[str, Any],
    ) -> None:
        """Write PEFT's two files, or, if PEFT would compute another output, files with a
        `peft_type` that PEFT rejects."""
        config: dict[str, Any] = {
            "peft_type": self.peft_types[-1],
            "task_type": "CAUSAL_LM",
            "adapter_len": self.args.prompt_length,
            "adapter_layers": len(self.layers),
            "inference_mode": True,
        }

        # With v2's parameters, new tokens or another architecture, PEFT would open the file and
        # compute something else.
        if (
            "ADAPTION_PROMPT" in self.peft_types
            and is_peft_compatible(source.outline.config)
            and not self.tokens
        ):
            config |= {"peft_type": "ADAPTION_PROMPT", "target_modules": "self_attn"}
            values = {_to_peft(name): value for name, value in values.items()}

        if self.tokens:
            config["trainable_token_indices"] = list(self.tokens)
        write_tensors(folder, values, config | record)

    @classmethod
    def read(cls, folder: Path, source: BaseFolder) -> tuple["Adapter", AdapterTensors]:
        """Read a folder of litft or of PEFT's AdaptionPrompt; raise ValueError if it does not fit
        the base model."""
        config = read_adapter_config(folder)
        values = {_from_peft(n): v.float() for n, v in read_tensors(folder).items()}
        model = source.meta_model()
        length = config.get("adapter_len")
        layers = config.get("adapter_layers")
        tokens = read_token_ids(config, folder)
        if not (_is_size(length) and _is_size(layers) and layers <= len(model.blocks)):
            raise ValueError(
                f"{folder / ADAPTER_CONFIG}: adapter_len {length!r} and adapter_layers {layers!r} "
                "do not fit the base model"
            )
        # the file has only the number of layers: they are the last ones that have attention
        with_prefix = attention_layers(model)[-layers:] if layers else []

        start_layer = min(with_prefix, default=len(model.blocks))
        method = cls(cls.flags(prompt_length=length, start_layer=start_layer))
        method.layers = with_prefix
        method.tokens = {token: [] for token in tokens}
        method.select_extra(model, values)

        # on the meta device, to learn which names and shapes the file must have
        method.attach(model)
        _check_values(values, method.parameters(model), folder / ADAPTER_WEIGHTS)
        return method, values

    def select_extra(self, model: GPT, values: AdapterTensors) -> None:
        """Infer from the names in an adapter file what a subclass trains in addition to prefixes
        and new tokens."""

    def check_merge(self, names: list[str], values: AdapterTensors) -> None:
        """Raise ValueError if a gate is not zero: a prefix cannot be expressed as a change of
        weights."""
        # a prefix whose gate is 0 adds nothing, and can be left out
        for key, value in values.items():
            if key.endswith(".adaption_gate") and value.any():
                reason = (
                    "its prefixes change attention, which no weights of the "
                    "base model can express"
                )
                raise ValueError(
                    f"this adapter cannot be merged: {reason}; open it with its base model instead"
                )


class AdapterV2(Adapter):
    """LLaMA-Adapter v2: v1 with a scale and bias on every Linear, and trained norms."""

    name = "adapter"
    title = "adapter_v2"
    peft_types = ("LITFT_ADAPTER_V2",)
    flags = AdapterV2Args
    needs_prefix = False

    def __init__(self, args: AdapterV2Args) -> None:
        super().__init__(args)
        self.linears: list[str] = []
        self.norms: list[str] = []

    def select_targets(self, model: GPT, rules: list[Rule]) -> None:
        """Select the layers with a prefix as in v1, all Linears and all norms."""
        super().select_targets(model, rules)
        self.linears = []
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, ExpertLinear)):
                self.linears.append(name)
        self.norms = norm_names(model)

    def inject_extra(self, model: GPT, keep: bool) -> None:
        """Add scales and biases, and make the norms trainable."""
        # also in quantized modules, which are subclasses of nn.Linear and ExpertLinear
        for name in self.linears:
            AffineLinear.convert_module(model.get_submodule(name)).add_affine(
                self.args.bias
            )
        make_trainable(model, self.norms, keep=keep)

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """Return v1's parameters, scales, biases and norms."""
        names = []
        for name in self.linears:
            names.append(f"{name}.adapter_scale")
            if self.args.bias:
                names.append(f"{name}.adapter_bias")
        names += self.norms
        return super().parameters(model) | {
            name: model.get_parameter(name) for name in names
        }

    def select_extra(self, model: GPT, values: AdapterTensors) -> None:
        """Select all Linears and norms; train biases if the adapter file has any."""
        # `select_targets` takes Linears and norms, but also layers; those of the file are restored
        # below
        layers = self.layers
        self.args.bias = any(name.endswith(".adapter_bias") for name in values)
        # `select_targets` refuses a layer that the model does not have
        self.args.start_layer = min(self.args.start_layer, len(model.blocks) - 1)
        self.select_targets(model, [])
        self.layers = layers

    def merged(self, name: str, weight: Tensor, values: AdapterTensors) -> Tensor:
        """Return scale * W or scale * (b + bias) of a Linear, in fp32 and the base's shape; norms
        are replaced.

        weight: W (out, in) and b (out,), or (E, out, in) and (E, out) of experts; other tensors may
        have any shape. New tokens lengthen embedding and head as in `add_token_rows`.
        """
        module, _, leaf = name.rpartition(".")
        scale = values.get(f"{module}.adapter_scale")
        if scale is not None:
            # scale * (W x + b + bias): only the base's bias is shifted
            if leaf == "weight":
                shift = 0
            else:
                shift = values.get(f"{module}.adapter_bias", 0)
            base_weight = weight
            weight = (weight.float() + shift) * (
                scale[..., None] if leaf == "weight" else scale
            )
            # the logit of a new token is not scaled and keeps the base's bias
            if name == "lm_head.bias":
                ids = []
                for token in self.tokens:
                    if token < len(base_weight):
                        ids.append(token)
                weight[ids] = base_weight.float()[ids]
        return super().merged(name, weight, values)

    def check_merge(self, names: list[str], values: AdapterTensors) -> None:
        """Raise ValueError as in v1, or if a Linear with a learned bias has no bias among the
        parameters `names`."""
        super().check_merge(names, values)
        for key, value in values.items():
            module = key.removesuffix(".adapter_bias")
            if module != key and value.any() and f"{module}.bias" not in names:
                reason = (
                    f"it has a bias for {module}, but Linears of this model family are stored "
                    "without one"
                )
                raise ValueError(
                    f"this adapter cannot be merged: {reason}; train with --adapter.bias false to "
                    "merge"
                )

    def unties_head(self) -> bool:
        """Return True: the head is scaled, the embedding is not."""
        return True


PREFIX = ("adaption_prompt", "adaption_gate")


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= LARGEST_SIZE


def _check_values(
    values: AdapterTensors, parameters: dict[str, nn.Parameter], path: Path
) -> None:
    """Raise ValueError if the values of a file do not fit the parameters, or are not finite."""
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    stored = {name: tuple(value.shape) for name, value in values.items()}
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            reason = (
                f"{name} should have shape {expected.get(name)}, found {stored.get(name)}"
            )
            raise ValueError(f"{path}: the adapter does not fit its base model: {reason}")
    for name, value in values.items():
        if not value.isfinite().all():
            raise ValueError(f"{path}: {name} contains NaN or infinity")


def attention_layers(model: GPT) -> list[int]:
    """Return the layers with attention, whose queries can attend to a prefix too."""
    numbers = []
    for number, layer in enumerate(model.config.layers):
        # a layer that reuses keys has no projection that could make those of a prefix
        if model.blocks[number].attention is not None and layer.kv_sharing != "reuse":
            numbers.append(number)
    return numbers


def is_peft_compatible(config: Config) -> bool:
    """Return whether PEFT's AdaptionPrompt supports the architecture and computes the same output.

    It does for Llama and Mistral without q/k norms, softcap, clipping, attention scales or an
    output bias.
    """
    plain = (
        config.qk_norm is None
        and config.attention_softcap is None
        and config.qkv_clip is None
        and not config.o_bias
    )
    # PEFT rotates the queries, and scales scores by 1 / sqrt(D)
    for layer in config.layers:
        if layer.attention_scale is not None or not layer.rope or layer.rope.query_beta:
            return False
    square = config.n_heads * config.head_dim == config.dim
    return config.model_type in ("llama", "mistral") and plain and square


def _to_peft(name: str) -> str:
    return "base_model.model.model." + name.replace("blocks.", "layers.").replace(
        ".attention.", ".self_attn."
    )


def _from_peft(key: str) -> str:
    if not key.startswith("base_model.model."):
        return key
    return (
        key.removeprefix("base_model.model.model.")
        .replace("layers.", "blocks.")
        .replace(".self_attn.", ".attention.")
    )
