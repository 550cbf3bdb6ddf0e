"""Full fine-tuning: all parameters of the network are trained."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.methods.base import AdapterTensors, Method
from litft.methods.mixins import make_trainable
from litft.methods.new_tokens import initial_rows
from litft.model.mlp import CONSTANTS, stored_dtype
from litft.model.placement import summon_full
from litft.model.transformer import GPT

# of the computation, where it is not that of the weights
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Full(Method):
    """Train every parameter, stored in fp32 even if the network computes in bf16, or in bf16 with
    `bf16-true`."""

    name = "full"
    title = "full"
    saves_full_model = True

    def storage(self, precision: str) -> str:
        """Return bf16 for bf16-true, where the optimizer rounds stochastically; else fp32, as bf16
        loses small updates."""
        if precision == "bf16-true":
            return "bf16"
        return "fp32"

    def inject(self, model: GPT, keep: bool) -> None:
        """Extend embedding and head by the new tokens' rows, and make all parameters trainable."""
        if self.tokens:
            self._extend_vocabulary(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(CONSTANTS))

    @torch.no_grad()
    def reset_parameters(self, model: GPT) -> None:
        """Initialize the rows of new tokens; all other parameters keep the base's values."""
        super().reset_parameters(model)
        ids = list(self.tokens)
        pieces = list(self.tokens.values())
        for module in (
            ([model.embed] if model.config.tied else [model.embed, model.lm_head])
            if ids
            else ()
        ):
            with summon_full(module):
                # the mean of the base's rows alone: new rows have no values yet
                module.weight[ids] = initial_rows(
                    module.weight[: self.base_vocab_size], pieces
                ).to(module.weight.dtype)
                bias = getattr(module, "bias", None)
                if bias is not None:
                    bias[self.base_vocab_size :] = 0

    def set_compute_dtype(self, model: GPT, precision: str) -> None:
        """For bf16 and fp16, keep trained parameters in fp32 and round them at each use; frozen
        parameters are stored in that dtype."""
        if precision in ("bf16", "fp16"):
            dtype = COMPUTE_DTYPES[precision]
            names = []
            for name, _ in model.named_parameters():
                if name not in self.frozen:
                    names.append(name)
            # keep=False: there is no adapter that could be
            # disabled, and a copy of the base costs memory
            make_trainable(model, names, dtype, keep=False)
            for name in self.frozen:
                parameter = model.get_parameter(name)
                parameter.data = parameter.data.to(stored_dtype(name, dtype))

    def parameters(self, model: GPT) -> dict[str, nn.Parameter]:
        """Return all parameters of the network; a tied head's weight appears once."""
        return dict(model.named_parameters())

    def merged(self, name: str, weight: Tensor, values: AdapterTensors) -> Tensor:
        """Return the trained tensor of `name`, of any shape; embedding and head have the rows of
        new tokens already.

        A frozen one is `weight`, from the base, because training may have rounded it.
        """
        if name in self.frozen:
            return weight
        return values[name]

    def _extend_vocabulary(self, model: GPT) -> None:
        """Append rows for the new tokens to embedding and head."""
        head = model.lm_head
        self.base_vocab_size = model.embed.weight.size(0)
        # 0 if the new tokens have unused rows; `reset_parameters` fills the rows that are added
        num_new = max(0, max(self.tokens) + 1 - self.base_vocab_size)

        row_padding = (0, 0, 0, num_new)
        model.embed.weight = nn.Parameter(F.pad(model.embed.weight.detach(), row_padding))
        if not model.config.tied:
            head.weight = nn.Parameter(F.pad(head.weight.detach(), row_padding))
        if head.bias is not None:
            head.bias = nn.Parameter(F.pad(head.bias.detach(), (0, num_new)))

        # both have new parameters, so a tied head must share again
        model.tie()
        vocab_size = head.weight.size(0)
        model.embed.num_embeddings = vocab_size
        head.out_features = vocab_size
        model.set_vocabulary(vocab_size)
