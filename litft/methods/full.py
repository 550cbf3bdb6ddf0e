"""Full fine-tuning: the whole network is the method's own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.methods.base import Method, Values
from litft.methods.mixins import train_parameters
from litft.methods.new_tokens import first_rows
from litft.model.placement import summon_full
from litft.model.transformer import GPT


class Full(Method):
    """Every parameter trained: in fp32 where the network computes in bf16, or in bf16 itself (`bf16-true`)."""

    name, title = "full", "full"
    saves_full_model = True

    def storage(self, precision: str) -> str:
        """fp32 wherever trained weights would lose updates; `optim.StochasticRounding` keeps them in bf16."""
        return "bf16" if precision == "bf16-true" else "fp32"

    def inject(self, model: GPT, keep: bool) -> None:
        """Train all of `model`."""
        if self.tokens:
            self._grow(model)
        model.requires_grad_(True)

    @torch.no_grad()
    def reset_parameters(self, model: GPT) -> None:
        """The rows of new tokens; all else is the base's."""
        super().reset_parameters(model)
        ids, pieces = list(self.tokens), list(self.tokens.values())
        for module in ([model.embed] if model.config.tied else [model.embed, model.lm_head]) if ids else ():
            with summon_full(module):
                module.weight[ids] = first_rows(module.weight[: self.known], pieces).to(module.weight.dtype)
                if (bias := getattr(module, "bias", None)) is not None:
                    bias[self.known :] = 0

    def compute_in(self, model: GPT, precision: str) -> None:
        """bf16 with fp32 masters: these are rounded for each use, and what is frozen needs no master."""
        if precision == "bf16":
            names = [name for name, _ in model.named_parameters() if name not in self.frozen]
            train_parameters(model, names, torch.bfloat16, keep=False)
            for name in self.frozen:
                model.get_parameter(name).data = model.get_parameter(name).data.bfloat16()

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """All there are; a tied head's weight once."""
        return dict(model.named_parameters())

    def merged(self, name: str, weight: Tensor, values: Values) -> Tensor:
        """What it has become; what is frozen is the base's own, which training may have rounded."""
        return weight if name in self.frozen else values[name]

    def _grow(self, model: GPT) -> None:
        """Lengthen embedding and head by the new tokens' rows."""
        head, self.known = model.lm_head, model.embed.weight.size(0)
        behind = max(0, max(self.tokens) + 1 - self.known)
        for module in [model.embed] if model.config.tied else [model.embed, head]:
            module.weight = nn.Parameter(F.pad(module.weight.detach(), (0, 0, 0, behind)))
        if head.bias is not None:
            head.bias = nn.Parameter(F.pad(head.bias.detach(), (0, behind)))
        model.tie()
        model.embed.num_embeddings = head.out_features = head.weight.size(0)
        model.set_vocabulary(head.weight.size(0))
