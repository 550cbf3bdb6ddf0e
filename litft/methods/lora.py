"""LoRA (arXiv 2106.09685) and its variants rsLoRA, DoRA, LoRA+, PiSSA and OLoRA, for Linears,
embeddings and experts."""

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from litft.args import LoRAArgs
from litft.checkpoints.conversion import hf_module_name, rule_of
from litft.checkpoints.peft_reader import read_adapter
from litft.checkpoints.peft_targets import (
    LoraWeights,
    PeftTarget,
    adaptable_modules,
    adaptable_size,
    peft_targets,
)
from litft.checkpoints.peft_writer import TABLES, LoraAdapter, write_adapter
from litft.checkpoints.rules import Rule
from litft.methods.base import (
    AdapterTensors,
    BaseFolder,
    Method,
    match_patterns,
    pattern_matches,
    with_fused,
)
from litft.methods.lora_modules import LORA_PARAMETERS, lora_class, norm_ratios
from litft.methods.mixins import make_trainable
from litft.methods.new_tokens import TOKEN_ROW_PARAMETERS
from litft.model.mixers.mamba2 import Mamba2
from litft.model.mlp import ROUTERS
from litft.model.quantization import KINDS, is_quantizable, quantize_dequantize
from litft.model.transformer import GPT

# C channels, V vocabulary, E experts, N rows of expert inputs, R rank

# of an update, without --lora.alpha
DEFAULT_SCALE = 2
TrainedBiases = Literal["none", "lora", "all"]  # the values of --lora.bias


class LoraSpec(NamedTuple):
    """Rank and scale of one module's update."""

    r: int
    scale: float  # multiplies B A


# modules whose weight has a row for each token or position, which LoRA sees as a Linear (C, V)
EMBEDDINGS = ("embed", "embed_positions", "per_layer.embed")


class LoRA(Method):
    """LoRA: the update of selected weights is a product of two low-rank matrices.

    After `select_targets` or `read`, `specs` maps the name of each adapted module to its rank and
    scale, and `trained` lists base parameters that are trained in full: those of `modules_to_save`,
    and biases.
    """

    name = "lora"
    title = "lora"
    peft_types = ("LORA",)
    changeable = ("dropout", "lr_ratio")

    def __init__(self, args: LoRAArgs) -> None:
        super().__init__(args)
        self.specs: dict[str, LoraSpec] = {}
        self.trained_in_full: list[str] = []

    def select_targets(self, model: GPT, rules: list[Rule]) -> None:
        """Select the modules of `targets` and `modules_to_save`; raise ValueError if a pattern
        matches nothing."""
        # litft name -> name in the checkpoint, for every
        # module that PEFT can adapt; patterns match both
        hf_names = {
            name: target.name for name, target in peft_targets(model, rules).items()
        }
        saved_modules = self._modules_to_save(model, rules)
        excluded = set(saved_modules)
        # a tied head has the weight of the embedding
        if model.config.tied and "embed" in saved_modules:
            excluded.add("lm_head")

        # A pattern that matches nothing is a typing error.
        # It is reported at once, with the names that exist.
        adapted: dict[str, None] = {}
        for pattern, matches in match_patterns(self.args.targets, hf_names).items():
            if pattern == "all-linear":
                matches = [name for name in hf_names if is_inner_linear(model, name)]
            if not matches:
                raise ValueError(
                    f"--lora.targets {pattern}: no Linear of this model has that name; choose from "
                    f"{_last_components(hf_names)}"
                )
            adapted |= dict.fromkeys(matches)

        # in the order of the network's modules, which a file that is read gives, too
        names = [name for name in hf_names if name in adapted and name not in excluded]
        if not names:
            raise ValueError(
                f"--lora.targets {','.join(self.args.targets)}: all of them are in "
                "--lora.modules_to_save; name others"
            )

        self._check_patterns({name: hf_names[name] for name in names})
        self.specs = {name: self._spec(name, hf_names[name], model) for name in names}

        # base parameters trained in full: those of `modules_to_save`, then biases
        self.trained_in_full = _parameters_of(model, saved_modules)
        if self.args.bias == "all":
            biases = _biases(model)
        elif self.args.bias == "lora":
            adapted_biases = []
            for name in _biases(model):
                if name.removesuffix(".bias") in self.specs:
                    adapted_biases.append(name)
            # a fused bias of the checkpoint is stored as one tensor, so it is trained as a whole
            biases = with_fused(rules, adapted_biases)
        else:
            biases = []
        self.trained_in_full = list(dict.fromkeys([*self.trained_in_full, *biases]))

    def ignored_flags(self) -> Iterator[str]:
        """Yield a note on --lora.bias for modules without biases."""
        has_bias = any(name.endswith(".bias") for name in self.trained_in_full)
        if self.args.bias != "none" and not has_bias:
            whose = "base has" if self.args.bias == "all" else "adapted modules have"
            yield f"note: --lora.bias {self.args.bias} has no effect: the {whose} no biases"

    def _modules_to_save(self, model: GPT, rules: list[Rule]) -> set[str]:
        """Return the names of modules trained in full, including modules fused with one of them in
        the checkpoint."""
        # a tied head has no parameters of its own, but may be named
        hf_names = dict(_hf_module_names(model, rules))
        if model.config.tied:
            hf_names["lm_head"] = "lm_head"
        by_pattern = match_patterns(self.args.modules_to_save, hf_names)
        unmatched = []
        for pattern, matches in by_pattern.items():
            if not matches:
                unmatched.append(pattern)
        if unmatched:
            raise ValueError(
                f"--lora.modules_to_save {unmatched[0]}: no module of this model has that name; "
                f"choose from {_last_components(hf_names)}"
            )

        modules = set()
        for names in by_pattern.values():
            modules.update(names)
        # the tied head's weight is a parameter of the embedding
        if model.config.tied and "lm_head" in modules:
            modules.remove("lm_head")
            modules.add("embed")

        # modules whose weights are one tensor in the checkpoint can only be saved together
        parameters = with_fused(rules, _parameters_of(model, modules))
        return {name.rpartition(".")[0] for name in parameters}

    def _check_patterns(self, adapted: dict[str, str]) -> None:
        """Raise ValueError if a pattern matches no adapted module; adapted maps litft names to
        checkpoint names."""
        for flag in ("rank_pattern", "alpha_pattern"):
            # NAME -> NAME=NUMBER, for messages
            flag_values = {
                text.rpartition("=")[0]: text for text in getattr(self.args, flag)
            }
            for pattern, matches in match_patterns(flag_values, adapted).items():
                if not matches:
                    reason = (
                        "no adapted module has that name; an example of one is "
                        f"{next(iter(adapted))}"
                    )
                    raise ValueError(f"--lora.{flag} {flag_values[pattern]}: {reason}")

    def _spec(self, name: str, hf_name: str, model: GPT) -> LoraSpec:
        """Return rank and scale of one module: from the first pattern that matches it, otherwise
        from --lora.r and alpha."""
        r = int(_by_pattern(self.args.rank_pattern, name, hf_name, self.args.r))
        divisor = math.sqrt(r) if self.args.rslora else r
        alpha = self.args.alpha
        if alpha is None:
            alpha = DEFAULT_SCALE * divisor
        alpha = _by_pattern(self.args.alpha_pattern, name, hf_name, alpha)
        module = model.get_submodule(name)
        # PiSSA and OLoRA factor the weight, whose rank is at most its shorter side
        if self.args.init != "default" and not isinstance(module, nn.Embedding):
            max_rank = min(adaptable_size(model, name))
            if r > max_rank:
                raise ValueError(
                    f"--lora.r {r}: --lora.init {self.args.init} allows at most rank {max_rank} "
                    f"for {name}"
                )
        return LoraSpec(r, alpha / divisor)

    def unquantized_modules(self) -> set[str]:
        """Return the modules whose weight is trained in full."""
        modules = set()
        for name in self.trained_in_full:
            if name.endswith(".weight"):
                modules.add(name.removesuffix(".weight"))
        return modules

    def inject(self, model: GPT, keep: bool) -> None:
        """Add A and B to the adapted modules, make `trained` trainable, and freeze all other
        parameters."""
        model.requires_grad_(False)
        make_trainable(model, self.trained_in_full, keep=keep, untied=self.untied)
        for name, spec in self.specs.items():
            module = model.get_submodule(name)
            # PiSSA and OLoRA are defined for matrices of Linears
            init = "default" if isinstance(module, nn.Embedding) else self.args.init
            lora_class(module).convert_module(module).add_factors(
                *spec, self.args.dropout, self.args.dora, init
            )
        # last: rows of new tokens replace the output of an adapted embedding or head
        self.attach_tokens(model)

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """Return A, B and magnitudes of the adapted modules, `trained` base parameters, and rows of
        new tokens."""
        parameters = {}
        for name in self.specs:
            module = model.get_submodule(name)
            for leaf in LORA_PARAMETERS:
                factor = getattr(module, leaf)
                if factor is not None:
                    parameters[f"{name}.{leaf}"] = factor
        for name in self.trained_in_full:
            parameters[name] = model.get_parameter(name)
        return parameters | self.token_rows(model)

    def lr_multiplier(self, name: str) -> float:
        """Return `lr_ratio` for B, otherwise 1: LoRA+ (arXiv 2402.12354) trains B at a higher
        learning rate than A."""
        if name.endswith(".lora_b"):
            return self.args.lr_ratio
        return 1.0

    def factors(self, name: str, values: AdapterTensors) -> LoraWeights:
        """Return the update of one module; PiSSA and OLoRA subtract the initial product, which
        doubles the rank."""
        a = values[f"{name}.lora_a"]
        b = values[f"{name}.lora_b"]
        a0 = values.get(f"{name}.lora_a0")
        if a0 is not None:
            # B A - B0 A0 as one product of twice the rank, for files that have no initial factors
            a = torch.cat((a, a0), dim=-2)
            b = torch.cat((b, -values[f"{name}.lora_b0"]), dim=-1)
        return LoraWeights(a, b, self.specs[name].scale, values.get(f"{name}.lora_m"))

    def write(
        self,
        folder: Path,
        source: BaseFolder,
        values: AdapterTensors,
        record: dict[str, Any],
    ) -> None:
        """Write PEFT's two files, adapter_config.json and adapter_model.safetensors."""
        values = {name: value.cpu() for name, value in values.items()}
        model = source.outline

        factors = {name: self.factors(name, values) for name in self.specs}
        if self.args.dora:
            targets = peft_targets(model, source.adapter_rules).values()
            factors |= _unadapted_linears(factors, targets, source, record.get("litft", {}))

        rows = {}
        for name in TOKEN_ROW_PARAMETERS:
            if name in values:
                rows[name] = values[name]
        in_full = {name: values[name] for name in self.trained_in_full}
        adapter = LoraAdapter(factors, in_full, list(self.tokens), rows, untied=self.untied)

        settings = {
            "lora_dropout": self.args.dropout,
            "use_dora": self.args.dora,
            "bias": _PEFT_BIAS[self.args.bias],
        }
        settings |= record

        size = self.vocab_size(model.config)
        # in PEFT, the base has to be resized first
        if size > model.config.vocab_size:
            settings["litft"] = settings.get("litft", {}) | {"vocab_size": size}
        write_adapter(
            folder,
            model,
            source.adapter_rules,
            adapter,
            settings,
            source.tensor,
            source.adapter_names,
        )

    @classmethod
    def read(cls, folder: Path, source: BaseFolder) -> tuple["LoRA", AdapterTensors]:
        """Read PEFT's two files, written by litft or by PEFT."""
        model = source.outline
        adapter = read_adapter(folder, model, source.adapter_rules, source.tensor)
        # targets and alpha are not read: specs hold the rank and scale of each module
        own_values: dict[str, TrainedBiases] = {
            peft_value: value for value, peft_value in _PEFT_BIAS.items()
        }
        bias = own_values[adapter.bias]
        has_magnitudes = any(weights.m is not None for weights in adapter.factors.values())
        args = LoRAArgs(dropout=adapter.dropout, dora=has_magnitudes, bias=bias)
        method = cls(args)
        method.tokens = {token: [] for token in adapter.tokens}
        method.trained_in_full = list(adapter.trained_in_full)
        method.untied = adapter.untied

        # in the order of the network's modules
        method.specs = {}
        for name in adaptable_modules(model):
            weights = adapter.factors.get(name)
            if weights:
                method.specs[name] = LoraSpec(weights.a.size(-2), weights.scale)

        factors: AdapterTensors = {}
        for name in method.specs:
            for leaf in LORA_PARAMETERS[:3]:
                # lora_a, lora_b and lora_m are the fields a, b and m
                value = getattr(adapter.factors[name], leaf[-1])
                if value is not None:
                    factors[f"{name}.{leaf}"] = value
        return method, factors | adapter.trained_in_full | adapter.token_rows

    def update_args(self, args: LoRAArgs) -> None:
        """Take dropout and LoRA+'s ratio from `args`; ranks, scales and targets remain the
        adapter's."""
        self.args.dropout = args.dropout
        self.args.lr_ratio = args.lr_ratio

    def merged(self, name: str, weight: Tensor, values: AdapterTensors) -> Tensor:
        """Return W + scale * B A for the weight of an adapted module, with DoRA's row norms, in
        fp32.

        weight: (out, in), (E, out, in) of experts, or a table (V, C) of tokens or positions; the
        result has the same shape, but for the rows of new tokens. Tensors of other modules may have
        any shape.
        """
        module_name, _, leaf = name.rpartition(".")
        # modules_to_save and trained biases replace the base's tensor
        weight = values.get(name, weight)
        if module_name in self.specs and leaf == "weight":
            factors = self.factors(module_name, values)
            if module_name in EMBEDDINGS:
                weight = merged_weight(weight.mT, factors).mT
            else:
                weight = merged_weight(weight, factors)
        return self.add_token_rows(name, weight, values)

    def check_tokens(self) -> None:
        """Raise ValueError for DoRA of a table: its magnitudes are norms over the rows of new
        tokens, too."""
        tables = []
        for name in TABLES:
            if name in self.specs:
                tables.append(name)
        if self.args.dora and self.tokens and tables:
            reason = (
                "--data.new_tokens with --lora.dora: no other program opens DoRA of "
                f"{' and '.join(tables)} with them"
            )
            raise ValueError(
                f"{reason}; leave embed_tokens and lm_head out of --lora.targets"
            )

    def unties_head(self) -> bool:
        """Return whether the embedding or the head is changed without the other."""
        return self.untied or "embed" in self.specs or "lm_head" in self.specs


# --lora.bias -> PEFT's `bias`
_PEFT_BIAS: dict[TrainedBiases, str] = {"none": "none", "lora": "lora_only", "all": "all"}


def merged_weight(weight: Tensor, factors: LoraWeights) -> Tensor:
    """Return W + scale * B A in fp32, for W (out, in) or (E, out, in).

    With magnitudes, rows are scaled to these norms.
    """
    weight = weight.float() + (factors.b.float() @ factors.a.float()) * factors.scale
    if factors.m is None:
        return weight
    # DoRA: the magnitudes are the norms of the rows, (out,) or (E, out)
    return weight * norm_ratios(factors.m.float(), weight.norm(dim=-1))[..., None]


def is_inner_linear(model: nn.Module, name: str) -> bool:
    """Return whether `all-linear` selects a module: all Linears, also of experts, except the head
    and routers.

    Output projections of Mamba mixers are left out, too: their CUDA kernels read the weight, so
    PEFT refuses to adapt them.
    """
    if (
        isinstance(model.get_submodule(name), nn.Embedding)
        or name == "lm_head"
        or name.endswith(ROUTERS)
    ):
        return False
    # `out_proj` is also the name of other mixers' projections, which are adapted
    return not (
        name.endswith(".mixer.out_proj")
        and isinstance(model.get_submodule(name.removesuffix(".out_proj")), Mamba2)
    )


def _by_pattern(patterns: list[str], name: str, hf_name: str, default: float) -> float:
    """Return the number of the first NAME=NUMBER whose NAME matches a module."""
    for assignment in patterns:
        pattern, _, number = assignment.rpartition("=")
        if pattern_matches(pattern, name, hf_name):
            return float(number)
    return default


def _parameters_of(model: GPT, modules: Collection[str]) -> list[str]:
    """Return the names of the parameters of modules, in the order of the network."""
    names = []
    for name, _ in model.named_parameters():
        if name.rpartition(".")[0] in modules:
            names.append(name)
    return names


def _biases(model: GPT) -> list[str]:
    names = []
    for name, _ in model.named_parameters():
        if name.endswith(".bias"):
            names.append(name)
    return names


def _last_components(names: Iterable[str]) -> str:
    """List what the names end with, for a message."""
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _unadapted_linears(
    factors: dict[str, LoraWeights],
    targets: Iterable[PeftTarget],
    source: BaseFolder,
    run_record: dict[str, Any],
) -> dict[str, LoraWeights]:
    """Return rank-0 updates, with magnitudes, for Linears without LoRA that are fused with an
    adapted one in the checkpoint.

    In a DoRA file, a fused tensor needs the magnitudes of all its rows. run_record: entries of the
    run in adapter_config.json; the magnitudes are the row norms of the base as it was quantized in
    that run.
    """
    unadapted = {}
    model = source.outline
    # the norms must be those of the weights as the run has seen them: quantized in its precision
    kind = run_record.get("quantize")
    # fp32 otherwise: bf16-true is for full fine-tuning alone
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes.get(str(run_record.get("precision")), torch.float32)

    for target in targets:
        adapted = [factors[name] for name in target.linears if name in factors]
        if not adapted:
            continue
        for name in target.linears:
            if name in factors:
                continue
            weight = source.tensor(f"{name}.weight").float()
            if kind in KINDS and is_quantizable(f"{name}.weight", model):
                weight = quantize_dequantize(weight, kind, dtype)
            # an update of rank 0 changes nothing; E is in front for experts
            *stack, out_dim, in_dim = weight.shape
            a = weight.new_zeros((*stack, 0, in_dim))
            b = weight.new_zeros((*stack, out_dim, 0))
            unadapted[name] = LoraWeights(a, b, adapted[0].scale, weight.norm(dim=-1))
    return unadapted


def _hf_module_names(model: GPT, rules: list[Rule]) -> dict[str, str]:
    """Return the name in the checkpoint (or in PEFT) of each module that has parameters."""
    hf_names = {}
    for name, _ in model.named_parameters():
        rule, numbers = rule_of(rules, name)
        hf_names.setdefault(name.rpartition(".")[0], hf_module_name(rule, numbers))
    return hf_names
