"""LoRA (arXiv 2106.09685) and its kin: rsLoRA, DoRA, LoRA+, PiSSA, OLoRA; on Linears, embeddings and experts."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.args import LoRAArgs
from litft.checkpoints.conversion import Rule, hf_module_name, rule_of
from litft.checkpoints.peft_format import (
    LoraAdapter,
    LoraWeights,
    PeftTarget,
    adaptable,
    peft_targets,
    read_adapter,
    write_adapter,
)
from litft.methods.base import BaseFolder, Method, Values, matching, means, siblings
from litft.methods.mixins import Mixin, train_parameters
from litft.methods.new_tokens import ROWS
from litft.model.mlp import CHOOSERS, ExpertLinear, Grouping, by_expert, expert_linear
from litft.model.quantization import KINDS, dense_weight, is_quantizable, quantize_dequantize
from litft.model.transformer import GPT

# E experts, R rank


LEAVES = ("lora_a", "lora_b", "lora_m", "lora_a0", "lora_b0")


class LoRALinear(Mixin):
    """A Linear y = W x with a low-rank update beside it: y + scale * B A x (arXiv 2106.09685, section 4.1).

    DoRA (2402.09353) makes each row of W + scale * B A as long as `lora_m` says. PiSSA (2404.02948) and OLoRA (2406.01775)
    begin with factors of W itself; what they begin with, `lora_a0` and `lora_b0`, is taken off again, so that W stays.
    """

    def add_factors(self, r: int, scale: float, dropout: float, dora: bool = False, init: str = "default") -> None:
        """Register A (R, in) and B (out, R) in fp32 on the weight's device; by default PEFT's uniform A, and B zero."""
        *stack, height, width = self.stack_shape()
        self.lora_scale, self.lora_dropout, self.init, self.squares = scale, dropout, init, None

        def room(*shape: int, trained: bool = True) -> nn.Parameter:
            return nn.Parameter(torch.empty(*stack, *shape, device=self.weight.device), requires_grad=trained)

        self.lora_a, self.lora_b = room(r, width), room(height, r)
        again = init != "default"  # what they begin with is taken off
        self.register_parameter("lora_a0", room(r, width, trained=False) if again else None)
        self.register_parameter("lora_b0", room(height, r, trained=False) if again else None)
        self.register_parameter("lora_m", room(height) if dora else None)
        self.reads_weight |= dora or again

    def reset_parameters(self) -> None:
        """Draw the factors; DoRA's lengths are the rows' own."""
        super().reset_parameters()
        nn.init.zeros_(self.lora_b)
        self.draw()
        if self.lora_a0 is not None:
            self.lora_a0.copy_(self.lora_a)
            self.lora_b0.copy_(self.lora_b)
        if self.lora_m is not None:
            self.squares = self.matrix().float().square().sum(-1)  # (out,), of the frozen rows
            self.lora_m.copy_(self.lengths())

    def draw(self) -> None:
        """Where the factors begin."""
        if not self.lora_a.numel():  # DoRA's lengths alone, of a Linear beside others in one tensor
            return
        if self.init == "default":
            nn.init.kaiming_uniform_(self.lora_a.data.view(-1, self.lora_a.size(-1)), a=math.sqrt(5))
            return
        r, weight = self.lora_a.size(-2), self.matrix().float()
        if self.init == "olora":
            q, upper = torch.linalg.qr(weight)
            b, a = q[..., :r], upper[..., :r, :]
        else:
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            root = (s[..., :r] / self.lora_scale).sqrt()
            b, a = u[..., :r] * root[..., None, :], root[..., None] * v[..., :r, :]
        self.lora_b.copy_(b)
        self.lora_a.copy_(a)

    def stack_shape(self) -> tuple[int, ...]:
        """(out, in); the weight itself may be packed."""
        return (self.out_features, self.in_features)

    def matrix(self) -> Tensor:
        """The base's weight as (out, in)."""
        return dense_weight(self)

    def _apply(self, fn: Callable, recurse: bool = True) -> "LoRALinear":
        """DoRA's lengths of the frozen rows go where these go; in fp32."""
        super()._apply(fn, recurse)
        if getattr(self, "squares", None) is not None:
            self.squares = self.squares.to(self.weight.device)
        return self

    def remove(self) -> None:
        """Undo `add_factors`."""
        del self.lora_scale, self.lora_dropout, self.init, self.squares
        for name in LEAVES:
            delattr(self, name)

    def forward(self, x: Tensor, *grouping: Grouping) -> Tensor:
        y = super().forward(x, *grouping)
        if not self.on:
            return y
        y = self.updated(y, x, *grouping)
        if self.lora_m is None:
            return y
        # where the lengths have not changed it stays what it is, to the bit; beside 1 a small change would be rounded off
        change = self.by_row(ratios(self.lora_m, self.lengths()) - 1, *grouping).to(y.dtype)
        bias = getattr(self, "bias", None)
        return torch.addcmul(y, y if bias is None else y - self.by_row(bias, *grouping), change)

    def updated(self, y: Tensor, x: Tensor) -> Tensor:
        """y (..., out) with what the factors add, which is summed in fp32 and rounded with y: a small one is not lost."""
        a, b = self.factors(x.dtype)
        low = F.linear(F.dropout(x, self.lora_dropout, self.training), a)
        return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), b.mT).view_as(y)

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and scale * B, rounded to what the product is made in.

        Of PiSSA and OLoRA scale * (B A - B0 A0) = scale * (B (A - A0) + (B - B0) A0), of twice the rank: the differences
        are made in fp32, where rounding A and A0 would leave little of them.
        """
        a, b = self.lora_a, self.lora_b
        if self.lora_a0 is not None:
            a, b = torch.cat((a - self.lora_a0, self.lora_a0), -2), torch.cat((b, b - self.lora_b0), -1)
        return a.to(dtype), (b * self.lora_scale).to(dtype)

    @torch.no_grad()
    def lengths(self) -> Tensor:
        """The 2-norm (out,) of each row of W + scale * B A; a constant to the gradient (arXiv 2402.09353, section 4.3).

        |w + s b A|^2 = |w|^2 + 2 s (w A^T) b + s^2 b (A A^T) b^T: no matrix of W's size is made but a quantized W's numbers.
        """
        a, b, s = self.lora_a, self.lora_b, self.lora_scale
        if self.lora_a0 is not None:
            a, b = torch.cat((a, self.lora_a0), dim=-2), torch.cat((b, -self.lora_b0), dim=-1)
        weight = self.matrix()
        cross = (weight @ a.to(weight.dtype).mT).to(a.dtype)
        squares = self.squares.to(b.device) + 2 * s * (cross * b).sum(-1) + s * s * ((b @ (a @ a.mT)) * b).sum(-1)
        return self.summed(squares).clamp(min=0).sqrt()

    def summed(self, squares: Tensor) -> Tensor:
        """Of each whole row (out,): the seam of a network whose rows are cut."""
        return squares

    def by_row(self, values: Tensor) -> Tensor:
        """Values (out,) to multiply an output (..., out) with."""
        return values


class LoRAExpertLinear(LoRALinear):
    """The same beside each expert of an ExpertLinear: A (E, R, in), B (E, out, R)."""

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As above; of a rank with zeros behind that makes it a multiple of 8, which grouped_mm wants of rows on a GPU."""
        a, b = super().factors(dtype)
        behind = -a.size(-2) % 8
        return (F.pad(a, (0, 0, 0, behind)), F.pad(b, (0, behind))) if behind else (a, b)

    def stack_shape(self) -> tuple[int, ...]:
        """(E, out, in)"""
        return (self.count, self.out_features, self.in_features)

    def updated(self, y: Tensor, x: Tensor, grouping: Grouping) -> Tensor:
        """y (N, out) of rows sorted by expert, with what each expert's factors add."""
        if not self.lora_a.numel():  # DoRA's lengths alone
            return y
        a, b = self.factors(x.dtype)
        low = expert_linear(F.dropout(x, self.lora_dropout, self.training), a, None, grouping)
        return y + expert_linear(low, b, None, grouping)

    def by_row(self, values: Tensor, grouping: Grouping) -> Tensor:
        """Values (E, out) to the rows (N, out)."""
        return by_expert(values, grouping)


class LoRAEmbedding(LoRALinear):
    """The same beside an embedding, as a Linear on one-hot tokens: A (R, V), zero at first, and B (C, R)."""

    def stack_shape(self) -> tuple[int, ...]:
        """(C, V)"""
        return (self.embedding_dim, self.num_embeddings)

    def matrix(self) -> Tensor:
        """(C, V)"""
        return self.weight.detach().mT

    def draw(self) -> None:
        """As PEFT: A zero and B normal."""
        nn.init.zeros_(self.lora_a)
        nn.init.normal_(self.lora_b)

    def updated(self, y: Tensor, tokens: Tensor) -> Tensor:
        """y (..., C) with what the factors add; dropping parts of a one-hot would drop words, so there is no dropout."""
        tokens = tokens.clamp(max=self.num_embeddings - 1)
        return (y + F.linear(F.embedding(tokens, self.lora_a.mT), self.lora_b) * self.lora_scale).to(y.dtype)


class LoraSpec(NamedTuple):
    """The size of one module's update."""

    r: int
    scale: float


def lora_class(module: nn.Module) -> type[LoRALinear]:
    """The class that puts factors beside a module's weight."""
    if isinstance(module, nn.Embedding):
        return LoRAEmbedding
    return LoRAExpertLinear if isinstance(module, ExpertLinear) else LoRALinear


class LoRA(Method):
    """Low-rank factors beside chosen weights; `sites` maps a module's name to its factors' size once the model is known.

    `trained` are the base's own parameters trained besides (`modules_to_save`, biases), `tokens` the ids of new tokens with
    the ids of their texts' pieces. `rules` are `Source.adapter_rules`: how PEFT and the checkpoint name the modules.
    """

    name, title = "lora", "lora"
    peft_types = ("LORA",)
    changeable = ("dropout", "lr_ratio")

    def __init__(self, args: LoRAArgs) -> None:
        super().__init__(args)
        self.sites: dict[str, LoraSpec] = {}
        self.trained: list[str] = []
        self.apart = False  # whether a tied embedding and its head are trained as two: PEFT's adapters may be

    def choose(self, model: GPT, rules: list[Rule]) -> None:
        """Find what `targets` and `modules_to_save` name; ValueError where one names nothing."""
        theirs = {name: slot.name for name, slot in peft_targets(model, rules).items()}
        whole = self._modules_to_save(model, rules)
        taken = whole | ({"lm_head"} if model.config.tied and "embed" in whole else set())  # the same weight
        chosen: dict[str, None] = {}
        for target, hits in matching(self.args.targets, theirs).items():
            hits = [name for name in theirs if is_inner_linear(model, name)] if target == "all-linear" else hits
            if not hits:
                known = ", ".join(sorted({n.rpartition(".")[2] for n in theirs}))
                raise ValueError(f"--lora.targets {target}: no Linear of this model has that name; known: {known}")
            chosen |= dict.fromkeys(hits)
        chosen = {name: None for name in theirs if name in chosen and name not in taken}
        if not chosen:
            raise ValueError(f"--lora.targets {','.join(self.args.targets)}: all of it is in --lora.modules_to_save already")
        self._check_patterns({name: theirs[name] for name in chosen})
        self.sites = {name: self._site(name, theirs[name], model) for name in chosen}
        self.trained = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in whole]
        biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
        if self.args.bias == "lora":
            biases = siblings(rules, [name for name in biases if name.removesuffix(".bias") in self.sites])
        if self.args.bias != "none":
            self.trained = list(dict.fromkeys([*self.trained, *biases]))

    def _modules_to_save(self, model: GPT, rules: list[Rule]) -> set[str]:
        """The modules that are trained whole, with all that share a tensor of the checkpoint with them."""
        theirs = _their_modules(model, rules) | ({"lm_head": "lm_head"} if model.config.tied else {})
        names = matching(self.args.modules_to_save, theirs)
        if missing := [pattern for pattern, hits in names.items() if not hits]:
            known = ", ".join(sorted({owner.rpartition(".")[2] for owner in theirs}))
            raise ValueError(f"--lora.modules_to_save {missing[0]}: no module of this model has that name; known: {known}")
        chosen = {"embed" if hit == "lm_head" and model.config.tied else hit for hits in names.values() for hit in hits}
        own = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in chosen]
        return {name.rpartition(".")[0] for name in siblings(rules, own)}

    def _check_patterns(self, adapted: dict[str, str]) -> None:
        """ValueError for a pattern that means nothing that is adapted."""
        for flag in ("rank_pattern", "alpha_pattern"):
            given = {text.rpartition("=")[0]: text for text in getattr(self.args, flag)}
            for pattern, hits in matching(given, adapted).items():
                if not hits:
                    reason = f"nothing that is adapted has that name, such as {next(iter(adapted))}"
                    raise ValueError(f"--lora.{flag} {given[pattern]}: {reason}")

    def _site(self, ours: str, theirs: str, model: GPT) -> LoraSpec:
        """The rank and scale of one module: the first pattern that means it, or the flags for all."""
        r = int(_by_pattern(self.args.rank_pattern, ours, theirs, self.args.r))
        alpha = _by_pattern(self.args.alpha_pattern, ours, theirs, self.args.alpha)
        module = model.get_submodule(ours)
        if self.args.init != "default" and not isinstance(module, nn.Embedding):
            largest = min(module.in_features, module.out_features)
            if r > largest:
                raise ValueError(f"--lora.r {r}: --lora.init {self.args.init} takes {largest} ranks at most from {ours}")
        return LoraSpec(r, alpha / (math.sqrt(r) if self.args.rslora else r))

    def unquantized_modules(self) -> set[str]:
        """What is trained whole."""
        return {name.removesuffix(".weight") for name in self.trained if name.endswith(".weight")}

    def inject(self, model: GPT, keep: bool) -> None:
        """Add the factors to `model` and freeze everything else."""
        model.requires_grad_(False)
        train_parameters(model, self.trained, keep=keep, apart=self.apart)
        for name, site in self.sites.items():
            module = model.get_submodule(name)
            init = "default" if isinstance(module, nn.Embedding) else self.args.init
            lora_class(module).mix_over(module).add_factors(*site, self.args.dropout, self.args.dora, init)
        self.attach_tokens(model)

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """Factors, the base's parameters that are trained besides, rows of new tokens."""
        leaves = ((f"{site}.{leaf}", getattr(model.get_submodule(site), leaf)) for site in self.sites for leaf in LEAVES)
        factors = {name: parameter for name, parameter in leaves if parameter is not None}
        return factors | {name: model.get_parameter(name) for name in self.trained} | self.token_rows(model)

    def lr_multiplier(self, name: str) -> float:
        """LoRA+ (arXiv 2402.12354): B learns faster than A."""
        return self.args.lr_ratio if name.endswith(".lora_b") else 1.0

    def factors(self, site: str, values: Values) -> LoraWeights:
        """The update of one site; what PiSSA and OLoRA began with is taken off by as many ranks again."""
        a, b, m, a0, b0 = (values.get(f"{site}.{leaf}") for leaf in LEAVES)
        if a0 is not None:
            a, b = torch.cat((a, a0), dim=-2), torch.cat((b, -b0), dim=-1)
        return LoraWeights(a, b, self.sites[site].scale, m)

    def write(self, folder: Path, source: BaseFolder, values: Values, record: dict[str, Any]) -> None:
        """PEFT's two files."""
        values = {name: value.cpu() for name, value in values.items()}
        model, factors = source.meta_model(), {site: self.factors(site, values) for site in self.sites}
        if self.args.dora:
            known, own = peft_targets(model, source.adapter_rules).values(), record.get("litft", {})
            factors |= _unchanged_parts(factors, known, source, own)
        rows = {name: values[name] for name in ROWS if name in values}
        trained = {name: values[name] for name in self.trained}
        adapter = LoraAdapter(factors, trained, list(self.tokens), rows, apart=self.apart)
        settings = {"lora_dropout": self.args.dropout, "use_dora": self.args.dora, "bias": _PEFT_BIAS[self.args.bias]}
        write_adapter(folder, model, source.adapter_rules, adapter, settings | record)

    @classmethod
    def read(cls, folder: Path, source: BaseFolder) -> tuple["LoRA", Values]:
        """From PEFT's two files, litft's or PEFT's own."""
        model = source.meta_model()
        adapter = read_adapter(folder, model, source.adapter_rules)
        bias = {theirs: ours for ours, theirs in _PEFT_BIAS.items()}[adapter.bias]
        method = cls(LoRAArgs(dora=any(f.m is not None for f in adapter.factors.values()), bias=bias))
        method.tokens = {token: [] for token in adapter.tokens}
        method.trained, method.apart = list(adapter.trained), adapter.apart
        method.sites = {n: LoraSpec(f.a.size(-2), f.scale) for n in adaptable(model) if (f := adapter.factors.get(n))}
        leaves = {f"{n}.{leaf}": getattr(adapter.factors[n], leaf[-1]) for n in method.sites for leaf in LEAVES[:3]}
        leaves = {name: value for name, value in leaves.items() if value is not None}
        return method, leaves | adapter.trained | adapter.token_rows

    def go_on(self, args: LoRAArgs) -> None:
        """Dropout and LoRA+'s ratio; ranks, scales and targets are the adapter's own."""
        self.args.dropout, self.args.lr_ratio = args.dropout, args.lr_ratio

    def merged(self, name: str, weight: Tensor, values: Values) -> Tensor:
        """W + scale * B A, each row as long as DoRA says, in fp32."""
        site, _, leaf = name.rpartition(".")
        weight = values.get(name, weight)
        if site in self.sites and leaf == "weight":
            turned = site in ("embed", "embed_positions")
            weight = merged_weight(weight.mT if turned else weight, self.factors(site, values))
            weight = weight.mT if turned else weight
        return self.with_tokens(name, weight, values)

    def unties(self) -> bool:
        """Where just one of the two uses of the embedding has factors, or they differ."""
        return self.apart or "embed" in self.sites or "lm_head" in self.sites


_PEFT_BIAS = {"none": "none", "lora": "lora_only", "all": "all"}


def merged_weight(weight: Tensor, factors: LoraWeights) -> Tensor:
    """W + scale * B A, in fp32; W (out, in) or (E, out, in). With magnitudes, rows of their length."""
    weight = weight.float() + (factors.b.float() @ factors.a.float()) * factors.scale
    if factors.m is None:
        return weight
    return weight * ratios(factors.m.float(), weight.norm(dim=-1))[..., None]


def ratios(wanted: Tensor, lengths: Tensor) -> Tensor:
    """By what rows of these lengths are multiplied to have the wanted ones; a row of zeros stays what it is."""
    return torch.where(lengths == 0, 1.0, wanted / torch.where(lengths == 0, 1.0, lengths))


def is_inner_linear(model: nn.Module, name: str) -> bool:
    """What `all-linear` means: every Linear and every expert's but the head and what chooses experts."""
    return not isinstance(model.get_submodule(name), nn.Embedding) and name != "lm_head" and not name.endswith(CHOOSERS)


def _by_pattern(patterns: list[str], ours: str, theirs: str, default: float) -> float:
    """The number of the first NAME=NUMBER that means a module."""
    pairs = (pattern.rpartition("=") for pattern in patterns)
    return next((float(number) for name, _, number in pairs if means(name, ours, theirs)), default)


def _unchanged_parts(
    factors: dict[str, LoraWeights], known: Iterable[PeftTarget], source: BaseFolder, run: dict[str, Any]
) -> dict[str, LoraWeights]:
    """Linears without factors that lie in one tensor with some that have: in a DoRA file they need their own lengths.

    run: what the run says of itself: the lengths are those of the base as it was quantized then.
    """
    found, model = {}, source.meta_model()
    kind, dtype = run.get("quantize"), torch.bfloat16 if run.get("precision") == "bf16" else torch.float32
    for slot in known:
        own = [factors[name] for name in slot.linears if name in factors]
        for name in slot.linears if own else ():
            if name in factors:
                continue
            weight = source.tensor(f"{name}.weight").float()
            if kind in KINDS and is_quantizable(f"{name}.weight", model):
                weight = quantize_dequantize(weight, kind, dtype)
            *stack, height, width = weight.shape
            a, b = weight.new_zeros((*stack, 0, width)), weight.new_zeros((*stack, height, 0))
            found[name] = LoraWeights(a, b, own[0].scale, weight.norm(dim=-1))
    return found


def _their_modules(model: GPT, rules: list[Rule]) -> dict[str, str]:
    """Every module with parameters of its own, and what the checkpoint (or PEFT) calls it."""
    found = {}
    for name, _ in model.named_parameters():
        rule, numbers = rule_of(rules, name)
        found.setdefault(name.rpartition(".")[0], hf_module_name(rule, numbers))
    return found
