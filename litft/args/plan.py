"""The flags of `plan` and `prepare_data`, which predict what a run would do."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from litft.args.data import DataArgs
from litft.args.finetune import (
    CANNOT_SHARD,
    OFFLOADS_GATHERED,
    Optimizers,
    sharding_clash,
    whole_weights_problem,
)
from litft.args.grpo import GrpoArgs
from litft.args.methods import AdapterV2Args, LoRAArgs, Quantization
from litft.args.preference import Objectives
from litft.args.value_checks import (
    LARGEST,
    below_minimum,
    impossible_numbers,
    parse_size,
    sharding_problems,
)

# of a file of findings
FINDINGS_BEGINNING = '{"file": '


@dataclass
class PrepareArgs:
    """Tokenize a dataset into the cache and print statistics: counts, lengths, packing and
    samples."""

    checkpoint_dir: str | None = None
    """The model folder; only its tokenizer and config.json are read."""
    base_dir: str | None = None
    """The folder of an adapter's base model, if it has moved. Default: the path stored with the
    adapter."""
    global_batch_size: int = 16
    """Examples per optimizer step, which are packed together."""
    show: int = 3
    """Number of examples to print as the model sees them."""
    findings: str | None = None
    """A file to write, with every finding on every record: JSON objects with file, record, its
    number, what was found, and the earlier record that it repeats."""
    objective: Objectives = "sft"
    """What the examples are for: sft, an objective that learns from preferences, or grpo."""
    max_new_tokens: int = GrpoArgs.max_new_tokens
    """grpo: the maximum length of a completion, which has room after its prompt."""
    data: DataArgs = field(default_factory=DataArgs)

    @property
    def source_dir(self) -> str:
        """--checkpoint_dir, which `problems` requires."""
        assert self.checkpoint_dir is not None
        return self.checkpoint_dir

    def problems(self) -> list[str]:
        """Return the problems of missing or invalid values."""
        problems = impossible_numbers(self) + self.data.problems()
        for name, value in (
            ("checkpoint_dir", self.checkpoint_dir),
            ("data.path", self.data.path),
        ):
            if not value:
                problems.append(f"--{name} is missing")
        if self.data.replay:
            problems.append(
                f"--data.replay {self.data.replay:g}: the model's own answers are generated when a "
                "run begins; leave it out"
            )
        return (
            problems
            + self._problems_of_findings()
            + below_minimum(self, "", 1, "global_batch_size", "max_new_tokens")
            + below_minimum(self, "", 0, "show")
        )

    def _problems_of_findings(self) -> list[str]:
        """Return the problems of the file to write: any other file is not replaced."""
        if self.findings is None:
            return []
        path = Path(self.findings)
        if not path.parent.is_dir():
            return [
                f"--findings {path}: the folder {path.parent} does not exist; create it"
            ]
        if path.is_dir():
            return [f"--findings {path}: this is a folder; name a file"]
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                beginning = file.read(len(FINDINGS_BEGINNING))
            if beginning not in ("", FINDINGS_BEGINNING):
                return [
                    f"--findings {path}: the file exists and has other content; name another"
                ]
        return []


@dataclass
class PlanArgs:
    """Predict what training a model needs, from its config.json alone: parameters, memory by kind,
    FLOPs and hours."""

    checkpoint_dir: str | None = None
    """A folder with the config.json of the model; weights are not needed."""
    method: Literal["lora", "adapter", "adapter_v2", "full"] = "lora"
    """The fine-tuning method."""
    precision: Literal["bf16", "bf16-true", "fp16", "fp32"] = "bf16"
    """The dtype of the computation. bf16-true (full fine-tuning only): the weights are bf16 too."""
    quantize: Quantization = "none"
    """Quantize the frozen Linear weights to 4 or 8 bits; -dq also quantizes their scales (double
    quantization)."""
    optimizer: Optimizers = "adamw"
    """The optimizer, whose state takes memory."""
    activation_checkpointing: (
        Literal["none", "elementwise", "selective", "full", "tiled"] | None
    ) = None
    """Activations to recompute in the backward pass: none, those of norms and gates (elementwise),
    of the MLPs (selective), of whole blocks (full), or of whole blocks with MLPs in pieces of the
    row (tiled).
    Default: the fastest with --budget, full with --cpu_offload, otherwise none."""
    cpu_offload: Literal["none", "activations", "parameters"] = "none"
    """What to keep in host memory: saved activations, or the frozen weights of the blocks."""
    budget: str | None = None
    """Find the fastest micro-batch size, recomputation, quantization and offload that fit into this
    memory: 24GiB, 80GB."""
    longest: bool = False
    """Find the longest row that fits into --budget, with all that saves memory. Weights are
    quantized (nf4) only if they do not fit otherwise."""
    max_seq_length: int | None = None
    """Tokens per row. Default: the model's context length, at most 2048."""
    micro_batch_size: int | None = None
    """Rows per forward pass on one device. Default: the fastest with --budget, otherwise 1."""
    micro_batches: int = 2
    """Number of micro-batches per step on each device."""
    devices: int = 1
    """Number of devices per node."""
    num_nodes: int = 1
    """Number of nodes."""
    strategy: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """Whether each device holds all weights (ddp) or a shard: over all devices (fsdp) or groups of
    --shard_size (hsdp)."""
    shard_size: int | None = None
    """For hsdp: the number of devices over which the weights are sharded. Default: the devices of a
    node."""
    node_gbs: float = 450.0
    """Bandwidth in GB/s at which a device receives from others of its node: 450 for NVLink 4, 64
    for PCIe 5."""
    network_gbs: float = 50.0
    """Bandwidth in GB/s at which a device receives from other nodes: 50 for one 400 Gbit/s port per
    device."""
    chip: str | None = None
    """The GPU model, for the estimated hours: H100, A100, L4, RTX 4090, ... Default: H100; with
    --budget, no estimate."""
    tokens: int = 10_000_000
    """Number of tokens to train on, for the estimated hours."""
    lora: LoRAArgs = field(default_factory=LoRAArgs)
    adapter: AdapterV2Args = field(default_factory=AdapterV2Args)

    @property
    def source_dir(self) -> str:
        """--checkpoint_dir, which `problems` requires."""
        assert self.checkpoint_dir is not None
        return self.checkpoint_dir

    @property
    def budget_bytes(self) -> int:
        """--budget in bytes, if it is given; `problems` requires a size."""
        assert self.budget is not None
        num_bytes = parse_size(self.budget)
        assert num_bytes is not None
        return num_bytes

    @property
    def may_offload_activations(self) -> bool:
        """Whether the flags leave it open to move activations to the host."""
        return self.cpu_offload == "none" and self.strategy == "ddp"

    def problems(self) -> list[str]:
        """Return the problems of missing or invalid values."""
        problems = impossible_numbers(self) + self.lora.problems() + self.adapter.problems()
        if not self.checkpoint_dir:
            problems.append("--checkpoint_dir is missing: name a folder with a config.json")
        problems += below_minimum(
            self,
            "",
            1,
            "max_seq_length",
            "micro_batch_size",
            "devices",
            "tokens",
            "num_nodes",
            "micro_batches",
        )
        problems += below_minimum(self, "", 1, "shard_size")
        for name in ("node_gbs", "network_gbs"):
            if not getattr(self, name) > 0:
                problems.append(f"--{name} {getattr(self, name)}: must be above 0")
        group_size = self.shard_size or self.devices
        problems += sharding_problems(
            self.strategy, self.shard_size, self.devices, self.num_nodes
        )
        if self.strategy == "hsdp" and max(group_size, self.devices) % min(
            group_size, self.devices
        ):
            reason = (
                f"the traffic is estimated only for groups that divide a node of {self.devices} "
                "devices, or span nodes"
            )
            problems.append(f"--shard_size {group_size}: {reason}; choose another")
        # each is in range, but their product may not be
        if (self.max_seq_length or 1) * (self.micro_batch_size or 1) > LARGEST:
            problems.append(
                f"--max_seq_length {self.max_seq_length} x --micro_batch_size "
                f"{self.micro_batch_size}: too many tokens; lower one of them"
            )
        if self.budget is not None and not parse_size(self.budget):
            problems.append(
                f"--budget {self.budget}: expected a size such as 24GiB or 80GB"
            )
        if self.method == "full" and self.quantize != "none":
            problems.append(
                f"--quantize {self.quantize}: full fine-tuning changes every weight; use another "
                "method"
            )
        problems += self._offloading_problems()
        if self.longest and not self.budget:
            problems.append(
                "--longest needs --budget: the memory of the GPU, such as 24GiB"
            )
        for name in ("micro_batch_size", "max_seq_length"):
            if self.longest and getattr(self, name):
                problems.append(
                    f"--{name}: --longest finds the length of one row; leave it out"
                )
        if self.method != "full" and self.precision == "bf16-true":
            problems.append(
                "--precision bf16-true applies only to full fine-tuning; other methods keep frozen "
                "weights in bf16 anyway"
            )
        return problems

    def _offloading_problems(self) -> list[str]:
        """Return the problems of --cpu_offload, and of what sharded weights exclude."""
        problems = []
        is_sharded = self.strategy != "ddp"
        num_devices = self.devices * self.num_nodes
        if self.cpu_offload == "activations" and is_sharded:
            problems.append(
                sharding_clash(
                    "cpu_offload", "activations", self.strategy, OFFLOADS_GATHERED
                )
            )
        offloads_weights = self.cpu_offload == "parameters"
        if offloads_weights and not is_sharded and num_devices > 1:
            problems.append(whole_weights_problem("cpu_offload"))
        if self.optimizer in CANNOT_SHARD and is_sharded:
            reason = CANNOT_SHARD[self.optimizer]
            problems.append(
                sharding_clash("optimizer", self.optimizer, self.strategy, reason)
            )
        if offloads_weights and (self.method == "full" or self.quantize != "none"):
            problems.append(
                f"--cpu_offload {self.cpu_offload}: only frozen, unquantized weights can be "
                "offloaded; leave it out"
            )
        if offloads_weights and self.activation_checkpointing not in (None, "full"):
            problems.append(
                f"--cpu_offload {self.cpu_offload}: offloaded blocks are recomputed; leave "
                "--activation_checkpointing out"
            )
        if (
            self.cpu_offload == "activations"
            and self.activation_checkpointing == "elementwise"
        ):
            problems.append(
                "--activation_checkpointing elementwise: --cpu_offload activations moves all of "
                "them; leave it out, or use selective or full"
            )
        return problems
