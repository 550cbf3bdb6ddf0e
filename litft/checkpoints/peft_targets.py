"""What LoRA can adapt in a network, and what PEFT calls it: Linears, embeddings and stacked
experts."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from litft.checkpoints.conversion import hf_tensor_name, rule_of, tensor_names
from litft.checkpoints.rules import Interleave, Rename, Rule, Split, Writable
from litft.model.mlp import ExpertLinear
from litft.model.transformer import GPT

# the modules that LoRA can adapt
ADAPTABLE = (nn.Linear, ExpertLinear, nn.Embedding)


class LoraWeights(NamedTuple):
    """LoRA weights of one Linear with the update scale * B A: A (R, in) and B (out, R), with a
    leading E for experts.

    m: DoRA's magnitudes (row norms), (out,) or (E, out).
    """

    a: Tensor
    b: Tensor
    scale: float
    m: Tensor | None = None


@dataclass(frozen=True)
class PeftTarget:
    """A unit that PEFT adapts with one pair of factors: a module, or a parameter with stacked
    experts."""

    # in the checkpoint; without ".weight" for a module
    name: str
    linears: tuple[str, ...]  # litft names, in the order of the rows
    rule: Writable
    experts: int = 0  # number of stacked experts; 0: a module
    embedding: bool = False
    # whether PEFT adapts it as a parameter, rather than as a module
    is_parameter: bool = False

    @property
    def config_name(self) -> str:
        """The name in PEFT's target_modules or target_parameters and in its rank and alpha
        patterns."""
        if self.is_parameter and not self.experts:
            return f"{self.name}.weight"
        return self.name

    @property
    def row_rule(self) -> Rename | Split | Interleave:
        """The rule, as one that splits and joins the rows of the Linears; some of llama.cpp's do
        not."""
        assert isinstance(self.rule, (Rename, Split, Interleave)), (
            f"{self.name}: {self.rule}"
        )
        return self.rule

    @property
    def transposed(self) -> bool:
        """Whether the checkpoint stores the weight as (in, out)."""
        return isinstance(self.rule, (Rename, Split)) and self.rule.transposed

    @property
    def swapped(self) -> bool:
        """Whether PEFT takes experts that are stored as (E, in, out) for (E, out, in), and so A for
        B."""
        if not isinstance(self.rule, (Rename, Split)):
            return False
        return bool(self.experts) and self.rule.transposed and not self.rule.known_to_peft

    def fuse(self, factors: dict[str, LoraWeights]) -> LoraWeights:
        """Combine the factors of the Linears (some may have none) into one pair in PEFT's
        layout."""
        # the A's are stacked; B is block-diagonal
        loras = [factors[name] for name in self.linears if name in factors]
        first_factors = [lora.a for lora in loras]
        a = torch.cat(first_factors, dim=-2)
        # PEFT has one scale for the pair, so B takes up the differences: it is divided by this
        # one, which must not be 0 (lora_alpha 0)
        scales = [lora.scale for lora in loras if lora.scale]
        scale = scales[0] if scales else 1.0
        b = self._block_diagonal(factors, a, scale)
        if loras[0].m is None:
            m = None
        else:
            # DoRA is for all Linears or for none
            columns = [lora.m[..., None] for lora in loras if lora.m is not None]
            m = self.row_rule.join_rows(columns).squeeze(-1)

        # stacked experts, in the layout of PEFT's ParamWrapper
        if self.experts:
            if self.swapped:
                transposed = a.mT
                a = b.mT
                b = transposed
            a = a.flatten(0, 1)
            b = b.permute(1, 2, 0).flatten(1)  # (E R, in), (out, R E)
        return LoraWeights(a.contiguous(), b.contiguous(), scale, m)

    def _block_diagonal(
        self, factors: dict[str, LoraWeights], a: Tensor, scale: float
    ) -> Tensor:
        """Return the B of all Linears for their stacked A's, (..., out, sum of ranks); `scale` is
        that of the pair."""
        loras = [factors[name] for name in self.linears if name in factors]
        blocks = []
        start = 0
        for name, row_count in zip(self.linears, self.row_counts(loras), strict=True):
            block = loras[0].b.new_zeros((*a.shape[:-2], row_count, a.size(-2)))
            lora = factors.get(name)
            if lora is not None:
                # the columns of this Linear's A
                end = start + lora.b.size(-1)
                block[..., start:end] = lora.b * (lora.scale / scale)
                start = end
            blocks.append(block)
        return self.row_rule.join_rows(blocks)

    def row_counts(self, loras: list[LoraWeights]) -> list[int]:
        """Return the number of rows of each Linear; `loras`: the LoRA weights of the adapted
        ones."""
        if isinstance(self.rule, Split):
            return [self.rule.groups * size for size in self.rule.sizes]
        return [loras[0].b.size(-2)]

    def split(self, fused: LoraWeights) -> dict[str, LoraWeights]:
        """Invert `fuse`: each Linear gets A and its rows of B, without the ranks that are zero in
        these rows."""
        a, b, scale, m = fused

        # undo the layout of ParamWrapper
        if self.experts:
            a = a.unflatten(0, (self.experts, -1))
            b = b.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
            a, b = (b.mT, a.mT) if self.swapped else (a, b)
        if isinstance(self.rule, Rename):
            return {self.linears[0]: LoraWeights(a, b, scale, m)}
        if m is None:
            magnitudes = [None] * len(self.linears)
        else:
            magnitudes = [
                part.squeeze(-1) for part in self.row_rule.split_rows(m[..., None])
            ]
        factors = {}

        # B is zero before training, and then does not tell which ranks belong to a Linear
        untrained = not b.any()
        for name, rows, magnitude in zip(
            self.linears, self.row_rule.split_rows(b), magnitudes, strict=True
        ):
            used_ranks = rows.flatten(0, -2).any(0) | untrained  # (R,)
            if used_ranks.any() or magnitude is not None:
                factors[name] = LoraWeights(
                    a[..., used_ranks, :], rows[..., used_ranks], scale, magnitude
                )
        return factors


def adaptable_modules(model: GPT) -> dict[str, nn.Linear | ExpertLinear | nn.Embedding]:
    """Return all modules that can be adapted, by litft name: Linears, stacked Linears and
    embeddings."""
    modules = {}
    for name, module in model.named_modules():
        if isinstance(module, ADAPTABLE):
            modules[name] = module
    return modules


class AdaptableSize(NamedTuple):
    """The sizes that a module's factors must have: A (R, in) and B (out, R), for each expert."""

    in_features: int
    out_features: int


def adaptable_size(model: GPT, name: str) -> AdaptableSize:
    """Return the sizes of a module with a target; an embedding is a Linear with one-hot inputs."""
    module = model.get_submodule(name)
    assert isinstance(module, ADAPTABLE)  # only such modules have targets
    if isinstance(module, nn.Embedding):
        return AdaptableSize(module.num_embeddings, module.embedding_dim)
    return AdaptableSize(module.in_features, module.out_features)


def peft_targets(model: GPT, rules: list[Rule]) -> dict[str, PeftTarget]:
    """Return the target of each adaptable module, by litft name; `rules`: PEFT's names first, then
    the checkpoint's."""
    targets = {}
    has_experts = any(isinstance(module, ExpertLinear) for module in model.modules())
    for name, module in adaptable_modules(model).items():
        # PEFT's names come first in the rules, so they win
        rule, numbers = rule_of(rules, f"{name}.weight")
        weight_names = tensor_names(rule, numbers)
        linears = tuple(weight.removesuffix(".weight") for weight in weight_names)
        experts = module.count if isinstance(module, ExpertLinear) else 0
        hf_name = hf_tensor_name(rule, numbers).removesuffix(".weight")
        # Adapted as parameters: routers, which are bare parameters in transformers, and beside
        # experts all MLPs, since PEFT takes modules of these names for experts and drops them
        is_mlp = has_experts and hf_name.rpartition(".")[2] in (
            "gate_proj",
            "up_proj",
            "down_proj",
        )
        targets[name] = PeftTarget(
            name=hf_name,
            linears=linears,
            rule=rule,
            experts=experts,
            embedding=isinstance(module, nn.Embedding),
            is_parameter=experts > 0 or name.endswith(".router") or is_mlp,
        )
    return targets
