"""The flags of fine-tuning: groups that all methods share, and the command of each."""

import os
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Literal

from litft.args.checks import below, impossible_numbers, seconds, wrong_types
from litft.args.methods import AdapterArgs, AdapterV2Args, LoRAArgs
from litft.args.processes import counted, started_by

Formats = Literal["messages", "sharegpt", "alpaca", "dolly", "prompt", "question", "summary", "text"]

Optimizers = Literal[
    "adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "lion", "adafactor", "muon", "sgd", "schedule_free"
]


_BLOCKS = "a part of a weight would have other 8-bit blocks than the whole"
UNSHARDED = {  # optimizers that need whole weights, and why
    "adafactor": "it needs whole rows and columns, and each device holds a part",
    "adamw_8bit": _BLOCKS,
    "paged_adamw_8bit": _BLOCKS,
}


@dataclass
class DataArgs:
    """The examples."""

    path: list[str] = field(default_factory=list)
    """Examples: a .json, .jsonl, .csv, .tsv, .parquet or .txt file, also with .gz or .zst behind; a folder with train.* and
    val.*; or a data set's hub id. Several: a,b. Needed wherever --checkpoint_dir is given."""
    weights: list[float] = field(default_factory=list)
    """How often an epoch passes over each of several paths: 1,0.5. Default: once."""
    subset: str | None = None
    """Which part of a hub's data set that has several."""
    format: Formats | None = None
    """How a record is read. Default: as its fields say."""
    columns: list[str] = field(default_factory=list)
    """Fields under other names, OURS=THEIRS: instruction=question,output=reply."""
    skip_bad: float = 0.0
    """This part of a file's records may be bad, and is then left out. 0: the first bad record ends the run."""
    val_path: str | None = None
    """A file of validation examples. Default: the folder's val.*, or a part held out of `path`."""
    val_fraction: float = 0.05
    """The part held out for validation where there is no validation file. 0: no validation."""
    template: str = "auto"
    """How a conversation becomes text: auto (the checkpoint's chat template, Alpaca style where it has none), the path of a
    jinja file, or a style: alpaca, chatml, gemma, guanaco, llama2, llama3, mistral, phi-3, vicuna, zephyr."""
    mask_prompt: bool = True
    """Learn from the answers only. false: from every token."""
    train_on: Literal["all", "last"] = "all"
    """Learn from all answers of a conversation, or from its last."""
    max_seq_length: int | None = None
    """Longer examples are cut, in tokens; longer texts become several. Default: the model's context, at most 2048."""
    packing: bool = True
    """Put a step's examples one behind the other, in rows of at most max_seq_length, none seeing another."""
    date: str | None = None
    """The day that a template writes where it writes today's, 2026-11-21. Default: today, and of a resumed run its first."""
    new_tokens: list[str] = field(default_factory=list)
    """Texts that become tokens of their own, with trained rows in the embedding and the head."""
    seed: int = 42
    """Chooses what is held out."""

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        wrong = [item for item in self.columns if "=" not in item.strip("=")]
        found = [f"--data.columns {item}: expected OURS=THEIRS, such as output=reply" for item in wrong]
        if self.weights and len(self.weights) != len(self.path):
            found.append(f"--data.weights has {len(self.weights)} numbers for {len(self.path)} paths; give each one")
        if any(weight < 0 for weight in self.weights) or (self.weights and not any(self.weights)):
            found.append("--data.weights must not be negative, and not all 0")
        if any(weight > 1000 for weight in self.weights):
            found.append("--data.weights must be at most 1000")
        if not 0 <= self.val_fraction < 1:
            found.append(f"--data.val_fraction {self.val_fraction}: must be at least 0, and less than 1")
        if not 0 <= self.skip_bad <= 1:
            found.append(f"--data.skip_bad {self.skip_bad}: must lie between 0 and 1")
        if self.max_seq_length is not None and self.max_seq_length < 1:
            found.append(f"--data.max_seq_length {self.max_seq_length}: must be at least 1")
        if self.date is not None and not _is_day(self.date):
            found.append(f"--data.date {self.date}: expected a day such as 2026-11-21")
        return found


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


@dataclass
class TrainArgs:
    """The optimization."""

    epochs: float | None = None
    """Passes over the data. Default: 3, or as many as max_steps needs."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, even within an epoch."""
    max_time: str | None = None
    """Make no step after this much time on the clock, 90m or 1h30m, that of an interrupted run's earlier part too; the
    learning rate has fallen by then, and the last validation and final/ follow. Default: no limit."""
    global_batch_size: int = 16
    """Examples a step, over all devices and micro-batches."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Rows that go through the network at once on one device. Changes speed and memory, not the result. auto: as many as
    are fastest and fit. Default: 1 row of packed examples, or 4 of one example."""
    compile: bool | None = None
    """Compile the blocks with torch.compile: most of a minute before the first step, and faster ones after it. Default: on a
    GPU."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Recompute the MLPs (selective) or whole blocks (full) in the backward pass instead of keeping what it needs. auto: as
    little of it as fits into memory."""
    cpu_offload: Literal["none", "activations", "parameters"] = "none"
    """What waits in the host's memory while a GPU works: what the backward pass needs, or the blocks' frozen weights, each
    block's being fetched while the one before it runs (blocks are recomputed then, and not compiled)."""
    optimizer: Optimizers = "adamw"
    """What makes the steps. 8-bit and paged AdamW and Lion come from bitsandbytes, schedule_free from its package (pip
    install 'litft[schedulefree]'), the others from torch. Each needs a learning_rate of its own."""
    optimizer_in_backward: bool = False
    """Step each weight as soon as its gradient is there, which is then forgotten: full fine-tuning without room for all
    gradients. A step must be one micro-batch, and max_grad_norm 0."""
    learning_rate: float = 2e-4
    """The peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up. wsd: not before the last part of the run."""
    decay_fraction: float = 0.2
    """The last part of the run, over which wsd falls."""
    warmup_fraction: float = 0.05
    """The part of the run over which the learning rate rises to its peak. May be 0."""
    min_lr_ratio: float = 0.1
    """Where the schedule ends, as a part of the peak."""
    weight_decay: float = 0.0
    """Decoupled weight decay, of matrices."""
    max_grad_norm: float = 1.0
    """Gradients with a larger 2-norm are scaled down to it. 0: no clipping."""
    freeze: list[str] = field(default_factory=list)
    """Names or patterns of what is not trained though the method would (blocks.0.*, *.lora_a); saved all the same."""
    label_smoothing: float = 0.0
    """This part of each target's probability is spread over the vocabulary."""
    neftune_alpha: float = 0.0
    """NEFTune's noise on the embeddings, 5 to 15 in its paper. 0: none."""
    skip_nan: bool = False
    """Leave out a step whose loss or gradient is not finite, and go on. It costs a GPU a little speed."""
    oom_retry: bool = False
    """Where memory does not suffice, halve the micro-batches and go on: the same steps, and the same losses."""
    log_interval: int | None = None
    """Write metrics.csv and a line on the screen every so many steps. Default: 1 on a CPU, 10 on a GPU."""

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        found = below(self, "train", 1, "global_batch_size", "max_steps", "log_interval")
        found += below(self, "train", 1, "micro_batch_size") if self.micro_batch_size != "auto" else []
        found += below(self, "train", 0, "learning_rate", "weight_decay", "max_grad_norm", "neftune_alpha")
        for name in ("warmup_fraction", "decay_fraction", "min_lr_ratio", "label_smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                found.append(f"--train.{name} {getattr(self, name)}: must lie between 0 and 1")
        if self.epochs is not None and self.epochs <= 0:
            found.append(f"--train.epochs {self.epochs}: must be above 0")
        if self.max_time is not None and not seconds(self.max_time):
            found.append(f"--train.max_time {self.max_time}: expected a time such as 90m, 1h30m or 45s")
        if self.optimizer_in_backward:
            clashes = {"max_grad_norm": self.max_grad_norm, "skip_nan": self.skip_nan, "oom_retry": self.oom_retry}
            reason = "the first weights are stepped before all gradients are known"
            found += [
                f"--train.optimizer_in_backward: {reason}; add --train.{name} {'0' if name == 'max_grad_norm' else 'false'}"
                for name, value in clashes.items()
                if value
            ]
            if self.optimizer == "schedule_free":
                found.append("--train.optimizer_in_backward: schedule_free averages all weights at once; choose another")
        if self.cpu_offload == "parameters":
            kept = "" if self.activation_checkpointing in ("auto", "full") else self.activation_checkpointing
            clashes = {"compile true": self.compile, f"activation_checkpointing {kept}": kept}
            reason = "weights are fetched anew for the backward pass"
            found += [
                f"--train.cpu_offload parameters: {reason}; leave --train.{name} out" for name, on in clashes.items() if on
            ]
        if self.optimizer == "schedule_free" and self.lr_schedule != "constant":
            reason = "it averages the weights where others let the rate fall"
            found.append(f"--train.optimizer schedule_free: {reason}; add --train.lr_schedule constant")
        return found


@dataclass
class EvalArgs:
    """Validation, before training, at intervals, and at the end."""

    interval: int = 100
    """Compute the validation loss every so many steps. 0: only before and after."""
    max_batches: int | None = 16
    """Use at most so many times global_batch_size validation examples, taken evenly from all. null: all of them."""
    patience: int | None = None
    """End the run after so many validations in a row without a new lowest loss. Default: never."""
    prompts: list[str] = field(default_factory=list)
    """What the model is asked at each validation, its answers shown and kept: texts, or files with a prompt a line. Texts
    with commas: '["Well, who are you?"]'. Default: the first validation example's question."""
    max_new_tokens: int = 64
    """Answers to them end after so many tokens. 0: nothing is asked."""
    exact_match: bool = False
    """Before and after, answer the validation questions greedily and count the answers that are right to the letter."""

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        return below(self, "eval", 1, "max_batches", "patience") + below(self, "eval", 0, "interval", "max_new_tokens")


@dataclass
class SaveArgs:
    """Checkpoints to resume from."""

    interval: int = 200
    """Save the run's state every so many steps. 0: only at the end."""
    keep_last: int = 2
    """Delete all but so many of the newest checkpoints."""
    best: bool = False
    """Keep in best/ what had the lowest validation loss, in the form of final/."""

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        return below(self, "save", 1, "keep_last") + below(self, "save", 0, "interval")


@dataclass
class FinetuneArgs:
    """What every fine-tuning method shares."""

    checkpoint_dir: str | None = None
    """A Hugging Face model folder, or an adapter folder to go on training. With neither this nor --data.path, the embedded
    demo is trained, with flags of its own (litft/demo/lora.yaml)."""
    base_dir: str | None = None
    """Where an adapter folder's base model lies now, if it has moved."""
    out_dir: str | None = None
    """The run's folder. Default: the first free out/<method>[-n]."""
    resume: bool = False
    """Continue from the newest complete checkpoint in out_dir (default: of the newest unfinished run)."""
    overwrite: bool = False
    """Delete the run that out_dir holds and begin again."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The dtype of the frozen weights and the computation; what is trained stays fp32. auto: bf16 on a GPU, else fp32."""
    quantize: Literal["none", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8"] = "none"
    """Keep the frozen Linears in 4 or 8 bits, by bitsandbytes; -dq packs their scales too. A folder that is quantized
    already stays as it is."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    devices: int = 1
    """How many devices of each node (on a CPU: processes). Under torchrun or srun: as many as were started."""
    num_nodes: int = 1
    """How many machines; the command runs on each of them."""
    strategy: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """How several devices work together: each holds all of the weights (ddp), a part of them and of the optimizer's state
    (fsdp), or a part among those of its node (hsdp). auto: ddp if the plan fits on each device, else fsdp."""
    shard_size: int | None = None
    """hsdp: how many devices hold all of the weights together. Default: those of a node."""
    timeout: str = "10m"
    """End the run with a message when a process has waited so long for another (30s, 10m, 1h)."""
    seed: int = 42
    """Seeds initialization, order and dropout."""
    logger: Literal["csv", "tensorboard", "wandb", "mlflow"] = "csv"
    """Who gets the rows of metrics.csv besides (pip install 'litft[tensorboard]', 'litft[wandb]', 'litft[mlflow]')."""
    logger_project: str | None = None
    """The project of Weights & Biases, or the experiment of MLflow. Default: what WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME
    say, else litft; WANDB_ENTITY, WANDB_NAME and MLFLOW_RUN_NAME are heard, too."""
    dry_run: bool = False
    """Prepare the data, show it and what the run will need, and end before the weights are read."""
    deterministic: bool = False
    """Bit-equal repeats on CUDA too, at some cost in speed (a CPU always repeats)."""
    data: DataArgs = field(default_factory=DataArgs)
    train: TrainArgs = field(default_factory=TrainArgs)
    eval: EvalArgs = field(default_factory=EvalArgs)
    save: SaveArgs = field(default_factory=SaveArgs)

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        if found := wrong_types(self):
            return found
        found = impossible_numbers(self) + below(self, "", 1, "devices", "num_nodes", "shard_size")
        if self.logger_project and self.logger not in ("wandb", "mlflow"):
            found.append(f"--logger_project {self.logger_project}: add --logger wandb or mlflow, which have projects")
        if self.resume and self.overwrite:
            found.append("--resume and --overwrite exclude each other: one keeps the run, the other deletes it")
        if not 0 < (seconds(self.timeout) or 0) <= 365 * 86400:
            found.append(f"--timeout {self.timeout}: expected a time such as 30s, 10m or 1h, at most 365d")
        try:
            found += as_started(self).clashes(self.strategy)
        except ValueError as error:
            found.append(str(error))
        found += [*self.data.problems(), *self.train.problems(), *self.eval.problems(), *self.save.problems()]
        if self.checkpoint_dir and not self.data.path:
            found.append("--data.path is missing: name the file of examples to learn from")
        if self.data.path and not self.checkpoint_dir:
            found.append("--checkpoint_dir is missing: name the folder of the model to train")
        return found

    def clashes(self, strategy: str) -> list[str]:
        """What several devices cannot do, or a strategy, with the reason."""
        found, train, everywhere = [], self.train, self.devices * self.num_nodes
        if everywhere > 1 and train.optimizer_in_backward:
            found.append(f"--train.optimizer_in_backward: {everywhere} devices add their gradients up first; use one")
        if self.shard_size and self.strategy != "hsdp":
            found.append(f"--shard_size {self.shard_size} is of --strategy hsdp; add that, or leave it out")
        if strategy not in ("fsdp", "hsdp"):
            if everywhere > 1 and strategy == "ddp" and train.cpu_offload == "parameters":
                found.append("--train.cpu_offload parameters: with ddp each device would hold all; add --strategy fsdp")
            return found
        size = self.shard_size or self.devices
        if everywhere == 1:
            found.append(f"--strategy {strategy}: one device has no other to share the weights with; give --devices")
        elif strategy == "hsdp" and (everywhere % size or size in (1, everywhere)):
            reason = f"{everywhere} devices cannot be split into several equal groups of {size}"
            found.append(f"--strategy hsdp: {reason}; give another --shard_size, or use fsdp")
        for flag, value, reason in (
            ("optimizer", train.optimizer in UNSHARDED and train.optimizer, UNSHARDED.get(train.optimizer)),
            ("oom_retry", train.oom_retry, "a process that runs out of memory leaves the others waiting"),
            ("cpu_offload", train.cpu_offload == "activations" and "activations", "gathered weights would go there, too"),
        ):
            if value:
                found.append(f"--train.{flag} {value} with --strategy {strategy}: {reason}; leave it out, or use ddp")
        return found


@dataclass
class LoRAFinetuneArgs(FinetuneArgs):
    """Fine-tune with LoRA: small trained factors beside frozen weights."""

    lora: LoRAArgs = field(default_factory=LoRAArgs)

    def problems(self) -> list[str]:
        """As for every method, and LoRA's own."""
        return super().problems() + self.lora.problems()


@dataclass
class AdapterFinetuneArgs(FinetuneArgs):
    """Fine-tune with LLaMA-Adapter: learned prefixes that attention sees, through gates that begin at zero."""

    train: TrainArgs = field(default_factory=lambda: TrainArgs(learning_rate=2e-2))
    adapter: AdapterArgs = field(default_factory=AdapterArgs)

    def problems(self) -> list[str]:
        """As for every method, and the adapter's own."""
        return super().problems() + self.adapter.problems()


@dataclass
class AdapterV2FinetuneArgs(FinetuneArgs):
    """Fine-tune with LLaMA-Adapter v2: prefixes, a scale and a bias on every Linear, trained norms."""

    train: TrainArgs = field(default_factory=lambda: TrainArgs(learning_rate=1e-3))
    adapter: AdapterV2Args = field(default_factory=AdapterV2Args)

    def problems(self) -> list[str]:
        """As for every method, and the adapter's own."""
        return super().problems() + self.adapter.problems()


@dataclass
class FullFinetuneArgs(FinetuneArgs):
    """Fine-tune the whole model."""

    train: TrainArgs = field(default_factory=lambda: TrainArgs(learning_rate=5e-5))
    precision: Literal["auto", "bf16", "bf16-true", "fp32"] = "auto"
    """What the network computes in; weights and optimizer stay fp32. bf16-true: the weights are bf16 too, rounded by chance
    so that no update is lost. auto: on a GPU bf16, or bf16-true where memory does not suffice; on a CPU fp32."""

    def problems(self) -> list[str]:
        """As for every method; and there is nothing frozen to quantize."""
        found = super().problems()
        if self.quantize != "none":
            reason = "full fine-tuning changes every weight by less than 4 or 8 bits can hold"
            found.append(f"--quantize {self.quantize}: {reason}; use finetune/lora.py, or leave it out")
        return found


FINETUNE: dict[str, type[FinetuneArgs]] = {  # by the method's name
    "lora": LoRAFinetuneArgs,
    "adapter": AdapterFinetuneArgs,
    "adapter_v2": AdapterV2FinetuneArgs,
    "full": FullFinetuneArgs,
}


def as_started(args: FinetuneArgs) -> FinetuneArgs:
    """The flags with the processes that there are, where torchrun or SLURM has started them; a restarted run goes on."""
    if started_by() is None:
        return args
    devices, nodes = counted(*((1, 1) if args.resume else (args.devices, args.num_nodes)))  # a resumed run may change them
    again = (os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or "0") != "0"
    args = replace(args, devices=devices, num_nodes=nodes)
    return replace(args, resume=True, overwrite=False) if again else args
