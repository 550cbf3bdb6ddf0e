"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): each process has some heads and some hidden
units of each MLP.

A process's part is a GPT of ordinary modules with fewer heads and hidden units, so methods work
unchanged. A weight is quantized as a whole, and then divided (`QuantizedTensor.part`). The residual
stream is complete on every process: the outputs of `o_proj` and `down_proj` are all-reduced.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from litft.methods.mixins import change_class
from litft.model.config import Config, ExpertsConfig
from litft.model.linear import Linear
from litft.model.norm import Norm
from litft.model.placement import WeightPlacement, copy_into_local
from litft.model.transformer import GPT

# B batch, T tokens, C channels, H heads, D head dim, V vocabulary

# may have fewer heads than there are processes
KEY_VALUE = ("k_proj", "v_proj", "k_norm")
# sharded along the output dimension
COLUMN_PARALLEL = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "q_b_proj",
    "kv_b_proj",
)
ROW_PARALLEL = ("o_proj", "down_proj")  # sharded along the input dimension
OUTPUT_DIM = {
    "weight": -2,
    "lora_b": -2,
    "bias": -1,
    "lora_m": -1,
    "adapter_scale": -1,
    "adapter_bias": -1,
}
INPUT_DIM = {"weight": -1, "lora_a": -1}
# highest number of processes that the error message suggests
MAX_SUGGESTED_PROCESSES = 64


def check_divides(config: Config, processes: int) -> None:
    """Raise ValueError if a model has layers that cannot be split, or sizes that cannot be split
    evenly over so many processes."""
    for layer in config.layers:
        if layer.mixer or layer.head_dim or layer.n_kv_heads or layer.sparsity:
            reason = (
                "tensor parallelism does not support recurrent mixers, sparse MLPs, or heads that "
                "differ between layers"
            )
            raise ValueError(
                f"--devices {processes}: {reason}; use one device, or several that hold a part of "
                "the layers each"
            )

    # sizes that must be multiples of the number of processes
    counts = [("num_attention_heads", config.n_heads)]
    for layer in config.layers:
        if layer.experts:
            counts.append(("an expert's hidden size", layer.experts.hidden_dim))
            counts.append(("the shared expert's hidden size", layer.experts.shared_dim))
        if layer.hidden_dim:
            counts.append(("the hidden size of some layers", layer.hidden_dim))
        elif not layer.experts:
            counts.append(("the MLP's hidden size", config.hidden_dim))

    def uneven(processes: int) -> list[str]:
        kv_heads = config.n_kv_heads  # several processes may share one
        sizes = []
        for name, count in dict.fromkeys(counts):
            if count % processes:
                sizes.append(f"{name} {count}")
        if kv_heads % processes and processes % kv_heads:
            sizes.append(f"num_key_value_heads {kv_heads}")
        return sizes

    sizes = uneven(processes)
    if sizes:
        supported = []
        for count in range(1, MAX_SUGGESTED_PROCESSES + 1):
            if not uneven(count):
                supported.append(str(count))
        raise ValueError(
            f"--devices {processes} cannot evenly split {', '.join(sizes)}; this model supports "
            f"{', '.join(supported)}"
        )


class TensorParallelPlacement(WeightPlacement):
    """Placement of the shards of process `rank` out of `size` processes; `config` describes the
    complete model."""

    def __init__(self, config: Config, rank: int, size: int) -> None:
        self.config = config
        self.rank = rank
        self.size = size

    def local_config(self, config: Config) -> Config:
        """Return the config of one process's part: fewer heads and hidden units, the same head
        dim."""

        def narrow(experts: ExpertsConfig) -> ExpertsConfig:
            return replace(
                experts,
                hidden_dim=experts.hidden_dim // self.size,
                shared_dim=experts.shared_dim // self.size,
            )

        layers = []
        for layer in config.layers:
            if layer.experts:
                layer = replace(layer, experts=narrow(layer.experts))
            if layer.hidden_dim:
                layer = replace(layer, hidden_dim=layer.hidden_dim // self.size)
            layers.append(layer)
        local_heads = config.n_heads // self.size
        return replace(
            config,
            n_heads=local_heads,
            alibi=config.alibi[self.rank * local_heads : (self.rank + 1) * local_heads],
            n_kv_heads=max(1, config.n_kv_heads // self.size),
            hidden_dim=config.hidden_dim // self.size,
            layers=tuple(layers),
        )

    def build_network(self, config: Config) -> GPT:
        """See WeightPlacement. Return this process's part of the network."""
        model = GPT(self.local_config(config))
        # the statistics of such a norm are over the heads of all processes
        if config.qk_norm and config.qk_norm_over == "all":
            for block in model.blocks:
                for name, heads in (
                    ("q_norm", config.n_heads),
                    ("k_norm", config.n_kv_heads),
                ):
                    whole = Norm(config.qk_norm, heads, config.head_dim, num_dims=2)
                    norm = change_class(whole, NormOverAll)
                    norm.placement = self
                    setattr(block.attention, name, norm)
        return model

    @torch.no_grad()
    def copy_in(
        self, name: str, tensor: Tensor, read: Callable[[tuple[slice, ...]], Tensor]
    ) -> None:
        """See WeightPlacement.

        Only rank 0 keeps row-parallel biases, as outputs are summed over ranks.
        """
        partition = self.partition(name)
        if (
            partition is None
            and self.rank
            and name.split(".")[-2] in ROW_PARALLEL
            and name.endswith("bias")
        ):
            tensor.zero_()
        elif partition is None:
            copy_into_local(tensor, read)
        else:
            dim, index, _ = partition
            slices = [slice(0, size) for size in tensor.shape]
            length = tensor.size(dim)
            slices[dim] = slice(index * length, (index + 1) * length)
            tensor.copy_(read(tuple(slices)))

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        """See WeightPlacement. Return this process's shard of a full tensor."""
        partition = self.partition(name)
        if partition is None:
            return tensor
        return tensor.chunk(partition[2], partition[0])[partition[1]]

    def partition(self, name: str) -> tuple[int, int, int] | None:
        """See WeightPlacement. Return the sharded dimension of any parameter, this process's shard
        index and the number of shards; None if every process has the full parameter."""
        owner, leaf = name.split(".")[-2:]
        if owner in COLUMN_PARALLEL:
            dim = OUTPUT_DIM.get(leaf)
        elif owner in ROW_PARALLEL:
            dim = INPUT_DIM.get(leaf)
        else:
            dim = None
        # one entry for each head
        if leaf == "sinks" or (
            owner in ("q_norm", "k_norm") and self.config.qk_norm_over == "heads"
        ):
            dim = 0
        if dim is None:
            return None

        # with fewer key/value heads than processes, neighbouring ranks have the same shard
        if owner in KEY_VALUE:
            shards = min(self.size, self.config.n_kv_heads)
        else:
            shards = self.size
        return dim, self.rank * shards // self.size, shards

    @torch.no_grad()
    def connect(self, model: GPT) -> GPT:
        """See WeightPlacement.

        Add the all-reduces of row-parallel Linears, and shard the head over the vocabulary.
        """
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in ROW_PARALLEL:
                change_class(module, RowParallel)
        head = model.lm_head
        # a head that a method has changed stays complete
        if type(head) is Linear:
            rows_per_rank = -(-head.out_features // self.size)
            local_rows = slice(rows_per_rank * self.rank, rows_per_rank * (self.rank + 1))
            for leaf, full in list(head.named_parameters()):
                # rows of a tied head are a view of the embedding; those of an untied one are
                # copied, which frees the rest
                if self.config.tied:
                    rows = full[local_rows]
                else:
                    rows = full[local_rows].clone()
                setattr(head, leaf, nn.Parameter(rows, requires_grad=False))
            change_class(head, AllGatherHead).rows_per_rank = rows_per_rank
        return model


class RowParallel(nn.Module):
    """Row-parallel module: it reads a shard of the inputs, and its partial outputs are summed over
    the processes."""

    def forward(self, x: Tensor, *inputs) -> Tensor:
        return all_reduce_sum(super().forward(x, *inputs))

    def sum_over_processes(self, squares: Tensor) -> Tensor:
        """Return the squared norms (out,) of full rows from those of row shards; overrides DoRA's
        method."""
        return all_reduce_sum(squares)


class AllGatherHead(nn.Module):
    """Head with `rows_per_rank` rows per process (the last may have fewer); returns the complete
    logits (..., V)."""

    rows_per_rank: int
    out_features: int  # of the Linear: V

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        # all ranks gather the same size: the last one is padded, and its padding cut off again
        padded = F.pad(y, (0, self.rows_per_rank - y.size(-1)))
        return all_gather(padded)[..., : self.out_features]


class NormOverAll(nn.Module):
    """Norm over the entries of all heads (B, T, H, D), which are spread over the processes."""

    placement: TensorParallelPlacement
    shape: tuple[int, ...]  # of the Norm: (H, D) of all processes

    def forward(self, x: Tensor) -> Tensor:
        placement = self.placement
        heads = x.size(-2)
        # number of processes with the same heads
        copies = placement.size * heads // self.shape[0]
        # all heads, each `copies` times
        gathered = all_gather(x.transpose(-1, -2)).transpose(-1, -2)
        # one copy of each head is enough, and of the result only this process's heads are needed
        y = super().forward(
            gathered.unflatten(-2, (-1, copies, heads))[..., 0, :, :].flatten(-3, -2)
        )
        return y.narrow(-2, placement.rank // copies * heads, heads)


def all_reduce_sum(x: Tensor) -> Tensor:
    """Return the sum of x over all processes, bitwise equal on each. On a GPU, x is overwritten."""
    if x.is_cuda:
        distributed.all_reduce(x)
        return x
    # gloo's all-reduce of small tensors takes three times as long; the sum is in fp32, and in the
    # same order on every rank
    return _gather(x).sum(0, dtype=torch.float32).to(x.dtype)


def all_gather(x: Tensor) -> Tensor:
    """Concatenate x (..., n) of all processes along the last dimension: (..., processes * n)."""
    return _gather(x).movedim(0, -2).flatten(-2)


def _gather(x: Tensor) -> Tensor:
    """Return x of all processes, stacked: (processes, *x.shape)."""
    stacked = x.new_empty((distributed.get_world_size(), *x.shape))
    # all_gather_single is the newer name; torch 2.11 does not have it
    gather = (
        getattr(distributed, "all_gather_single", None)
        or distributed.all_gather_into_tensor
    )
    gather(stacked.view(-1), x.contiguous().view(-1))
    return stacked
