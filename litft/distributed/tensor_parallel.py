"""A network of which each process holds a part (Megatron-LM, arXiv 1909.08053): some heads, some hidden units of each MLP.

The part is a network of ordinary modules, with fewer heads and units, so that methods and quantization work on it as on any.
The residual stream is whole everywhere: what `o_proj` and `down_proj` add to it is summed over the processes.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from litft.methods.mixins import mixed
from litft.model.config import Config
from litft.model.linear import Linear
from litft.model.norm import Norm
from litft.model.placement import WeightPlacement, copy_into_local
from litft.model.transformer import GPT

# B batch, T tokens, C channels, H heads, D head dim, V vocabulary

KEYS = ("k_proj", "v_proj", "k_norm")  # of which there may be fewer heads than processes
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # make some of the outputs
ROWS = ("o_proj", "down_proj")  # read some of the inputs
OUTPUTS = {"weight": -2, "lora_b": -2, "bias": -1, "lora_m": -1, "adapter_scale": -1, "adapter_bias": -1}
INPUTS = {"weight": -1, "lora_a": -1}
MOST = 64  # processes that a message counts up to


def check_divides(config: Config, processes: int) -> None:
    """ValueError naming what so many processes cannot have equal parts of."""
    counts = {"num_attention_heads": config.n_heads}
    if not all(layer.experts for layer in config.layers):
        counts["the MLP's hidden size"] = config.hidden_dim
    for each in (layer.experts for layer in config.layers if layer.experts):
        counts |= {"an expert's hidden size": each.hidden_dim, "the shared expert's hidden size": each.shared_dim}

    def odd(processes: int) -> list[str]:
        heads = config.n_kv_heads  # of which several processes may have the same
        found = [f"{name} {count}" for name, count in counts.items() if count % processes]
        return [*found, *([f"num_key_value_heads {heads}"] if heads % processes and processes % heads else [])]

    if found := odd(processes):
        known = ", ".join(str(count) for count in range(1, MOST + 1) if not odd(count))
        raise ValueError(f"--devices {processes} cannot have equal parts of {', '.join(found)}; this model takes {known}")


class TensorParallelPlacement(WeightPlacement):
    """What process `rank` of `size` holds of the tensors of a network with this whole `config`."""

    def __init__(self, config: Config, rank: int, size: int) -> None:
        self.config, self.rank, self.size = config, rank, size

    def narrowed(self, config: Config) -> Config:
        """Of the part: heads and hidden units are fewer, heads are as wide."""

        def narrow(experts):
            return replace(experts, hidden_dim=experts.hidden_dim // self.size, shared_dim=experts.shared_dim // self.size)

        layers = (replace(layer, experts=layer.experts and narrow(layer.experts)) for layer in config.layers)
        return replace(
            config,
            n_heads=config.n_heads // self.size,
            n_kv_heads=max(1, config.n_kv_heads // self.size),
            hidden_dim=config.hidden_dim // self.size,
            layers=tuple(layers),
        )

    def network(self, config: Config) -> GPT:
        """As Share's."""
        model = GPT(self.narrowed(config))
        if config.qk_norm and config.qk_norm_over == "all":
            for block in model.blocks:
                for name, heads in (("q_norm", config.n_heads), ("k_norm", config.n_kv_heads)):
                    norm = Norm(config.qk_norm, heads, config.head_dim, over=2)
                    norm.__class__, norm.slices = mixed(NormOverAll, Norm), self
                    setattr(block.attention, name, norm)
        return model

    @torch.no_grad()
    def copy_in(self, name: str, tensor: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
        """As Share's; what is added after the sum over processes the first one adds."""
        place = self._place(name)
        if place is None and self.rank and name.split(".")[-2] in ROWS and name.endswith("bias"):
            tensor.zero_()
        elif place is None:
            copy_into_local(tensor, read)
        else:
            dim, index, _ = place
            wanted, count = [slice(0, size) for size in tensor.shape], tensor.size(dim)
            wanted[dim] = slice(index * count, (index + 1) * count)
            tensor.copy_(read(tuple(wanted)))

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """As Share's."""
        place = self._place(name)
        return tensor if place is None else tensor.chunk(place[2], place[0])[place[1]]

    def _place(self, name: str) -> tuple[int, int, int] | None:
        """The dimension along which a parameter is cut, which piece is held, and of how many; None: it is held whole."""
        owner, leaf = name.split(".")[-2:]
        dim = OUTPUTS.get(leaf) if owner in COLUMNS else INPUTS.get(leaf) if owner in ROWS else None
        if leaf == "sinks" or (owner in ("q_norm", "k_norm") and self.config.qk_norm_over == "heads"):
            dim = 0
        if dim is None:
            return None
        pieces = min(self.size, self.config.n_kv_heads) if owner in KEYS else self.size
        return dim, self.rank * pieces // self.size, pieces

    @torch.no_grad()
    def connect(self, model: GPT) -> GPT:
        """As Share's."""
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in ROWS:
                module.__class__ = mixed(RowParallel, type(module))
        head = model.lm_head
        if type(head) is Linear:  # what a method has changed it has changed as a whole
            each = -(-head.out_features // self.size)
            mine = slice(each * self.rank, each * (self.rank + 1))
            for leaf, whole in list(head.named_parameters()):
                rows = whole[mine] if self.config.tied else whole[mine].clone()
                setattr(head, leaf, nn.Parameter(rows, requires_grad=False))
            head.__class__, head.each = mixed(AllGatherHead, Linear), each
        return model


class RowParallel(nn.Module):
    """A module that reads some of the inputs: its outputs, or their squares, are summed over the processes."""

    def forward(self, x: Tensor, *inputs) -> Tensor:
        return all_reduce_sum(super().forward(x, *inputs))

    def summed(self, squares: Tensor) -> Tensor:
        """Of whole rows (out,), from those of the part: the seam of DoRA's lengths."""
        return all_reduce_sum(squares)


class AllGatherHead(nn.Module):
    """A head of `each` rows, or of those that are left; its logits (..., V) are all processes'."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return all_gather(F.pad(y, (0, self.each - y.size(-1))))[..., : self.out_features]


class NormOverAll(nn.Module):
    """A norm over all heads' entries (B, T, H, D) together, of which each process has some heads."""

    def forward(self, x: Tensor) -> Tensor:
        slices, heads = self.slices, x.size(-2)
        copies = slices.size * heads // self.shape[0]  # processes that have the same heads
        whole = all_gather(x.transpose(-1, -2)).transpose(-1, -2)  # all heads, some of them more than once
        y = super().forward(whole.unflatten(-2, (-1, copies, heads))[..., 0, :, :].flatten(-3, -2))
        return y.narrow(-2, slices.rank // copies * heads, heads)


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of all processes' x, to the same bit in each."""
    if x.is_cuda:
        distributed.all_reduce(x)
        return x
    return _all(x).sum(0, dtype=torch.float32).to(x.dtype)  # gloo's own sum of small tensors takes three times as long


def all_gather(x: Tensor) -> Tensor:
    """All processes' x (..., n), one behind the other: (..., processes * n)."""
    return _all(x).movedim(0, -2).flatten(-2)


def _all(x: Tensor) -> Tensor:
    """(processes, *x.shape)"""
    found = x.new_empty((distributed.get_world_size(), *x.shape))
    # its newer name is not in torch 2.11
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(found.view(-1), x.contiguous().view(-1))
    return found
