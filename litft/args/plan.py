"""The flags of `plan` and `prepare_data`: what a run would do."""

from dataclasses import dataclass, field
from typing import Literal

from litft.args.checks import LARGEST, below, impossible_numbers, size
from litft.args.finetune import DataArgs, Optimizers
from litft.args.methods import AdapterV2Args, LoRAArgs


@dataclass
class PrepareArgs:
    """Tokenize a data set into the cache, and show what became of it: counts, lengths, packing, samples."""

    checkpoint_dir: str | None = None
    """The model's folder, of which the tokenizer and config.json are read."""
    base_dir: str | None = None
    """Where an adapter folder's base model lies now, if it has moved."""
    global_batch_size: int = 16
    """Examples a step, which are packed together."""
    show: int = 3
    """How many examples to show as the model reads them."""
    data: DataArgs = field(default_factory=DataArgs)

    def problems(self) -> list[str]:
        """What is missing, or impossible."""
        found = impossible_numbers(self) + self.data.problems()
        for name, value in (("checkpoint_dir", self.checkpoint_dir), ("data.path", self.data.path)):
            found += [] if value else [f"--{name} is missing"]
        return found + below(self, "", 1, "global_batch_size") + below(self, "", 0, "show")


@dataclass
class PlanArgs:
    """Say what training a model will need, from its config.json alone: parameters, memory by kind, FLOPs, hours."""

    checkpoint_dir: str | None = None
    """A folder with the model's config.json."""
    method: Literal["lora", "adapter", "adapter_v2", "full"] = "lora"
    """How it is trained."""
    precision: Literal["bf16", "bf16-true", "fp32"] = "bf16"
    """What the network computes in; bf16-true, of full fine-tuning, keeps the weights in it too."""
    quantize: Literal["none", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8"] = "none"
    """Keep the frozen Linears in 4 or 8 bits."""
    optimizer: Optimizers = "adamw"
    """What makes the steps."""
    activation_checkpointing: Literal["none", "selective", "full"] | None = None
    """What is recomputed in the backward pass: nothing, the MLPs, or whole blocks. Default: with --budget what is fastest,
    else nothing, or blocks whose weights wait."""
    cpu_offload: Literal["none", "parameters"] = "none"
    """Whether the blocks' frozen weights wait in the host's memory."""
    budget: str | None = None
    """Find the fastest micro-batches, recomputation, quantization, offload that fit into so much memory: 24GiB, 80GB."""
    max_seq_length: int | None = None
    """Tokens of a row. Default: the model's context, at most 2048."""
    micro_batch_size: int | None = None
    """Rows at once on one device. Default: with --budget what is fastest, else 1."""
    micro_batches: int = 2
    """How many micro-batches a step has on each device."""
    devices: int = 1
    """How many chips of each node work together."""
    num_nodes: int = 1
    """How many nodes."""
    strategy: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """Whether each holds all of the weights, or a part: among all (fsdp), or among --shard_size (hsdp)."""
    shard_size: int | None = None
    """hsdp: how many devices hold all of the weights together. Default: those of a node."""
    node_gbs: float = 450.0
    """GB/s that a device receives from those of its node: 450 by NVLink 4, 64 by PCIe 5."""
    network_gbs: float = 50.0
    """GB/s that it receives from other nodes: 50 by a port of 400 Gbit/s for each device."""
    chip: str = "H100"
    """The name of a chip, for the hours: H100, A100, L4, RTX 4090, ..."""
    tokens: int = 10_000_000
    """How many tokens are trained on, for the hours."""
    lora: LoRAArgs = field(default_factory=LoRAArgs)
    adapter: AdapterV2Args = field(default_factory=AdapterV2Args)

    def problems(self) -> list[str]:
        """What is missing, or impossible."""
        found = impossible_numbers(self) + self.lora.problems() + self.adapter.problems()
        found += [] if self.checkpoint_dir else ["--checkpoint_dir is missing: name a folder with a config.json"]
        found += below(self, "", 1, "max_seq_length", "micro_batch_size", "devices", "tokens", "num_nodes", "micro_batches")
        found += below(self, "", 1, "shard_size")
        for name in ("node_gbs", "network_gbs"):
            found += [] if getattr(self, name) > 0 else [f"--{name} {getattr(self, name)}: must be above 0"]
        size_of, everywhere = self.shard_size or self.devices, self.devices * self.num_nodes
        if self.strategy != "ddp" and everywhere == 1:
            found.append(f"--strategy {self.strategy}: one device has no other to share the weights with; give --devices")
        elif self.shard_size and self.strategy != "hsdp":
            found.append(f"--shard_size {self.shard_size} is of --strategy hsdp; add that, or leave it out")
        elif self.strategy == "hsdp" and (everywhere % size_of or max(size_of, self.devices) % min(size_of, self.devices)):
            found.append(f"--shard_size {size_of}: {self.num_nodes} nodes of {self.devices} do not divide into such groups")
        if (self.max_seq_length or 1) * (self.micro_batch_size or 1) > LARGEST:
            found.append(
                f"--max_seq_length {self.max_seq_length} x --micro_batch_size {self.micro_batch_size}: too many tokens"
            )
        if self.budget is not None and not size(self.budget):
            found.append(f"--budget {self.budget}: expected a size such as 24GiB or 80GB")
        if self.method == "full" and self.quantize != "none":
            found.append(f"--quantize {self.quantize}: full fine-tuning changes every weight; use another method")
        if self.cpu_offload != "none" and (self.method == "full" or self.quantize != "none"):
            found.append(f"--cpu_offload {self.cpu_offload}: only frozen weights wait that are not quantized; leave it out")
        if self.cpu_offload != "none" and self.activation_checkpointing not in (None, "full"):
            found.append(
                f"--cpu_offload {self.cpu_offload}: such blocks are recomputed; leave --activation_checkpointing out"
            )
        if self.method != "full" and self.precision == "bf16-true":
            found.append(
                "--precision bf16-true is of full fine-tuning; the other methods keep frozen weights in bf16 anyway"
            )
        return found
