"""The flags of fine-tuning that all methods share."""

import os
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from litft.args.data import DataArgs
from litft.args.distill import DistillArgs
from litft.args.grpo import GrpoArgs
from litft.args.methods import Quantization
from litft.args.preference import DATA_KINDS, Objectives, PreferenceArgs
from litft.args.processes import process_counts, started_by
from litft.args.value_checks import (
    below_minimum,
    impossible_numbers,
    parse_duration,
    sharding_problems,
    wrong_types,
)

Optimizers = Literal[
    "adamw",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "lion",
    "adafactor",
    "muon",
    "sgd",
    "schedule_free",
]


# optimizers without --train.betas: muon has one momentum for the matrices that nearly all
# parameters are
WITHOUT_BETAS = ("adafactor", "sgd", "muon")
_BLOCK_REASON = "the 8-bit blocks of a weight's shard differ from those of the whole weight"
# optimizers that cannot run on shards of a weight, and why
CANNOT_SHARD = {
    "adafactor": "it needs whole rows and columns, and each device holds only a shard",
    "adamw_8bit": _BLOCK_REASON,
    "paged_adamw_8bit": _BLOCK_REASON,
}
OFFLOADS_GATHERED = "gathered weights would be offloaded too"


def sharding_clash(flag: str, value: str, strategy: str, reason: str) -> str:
    """Return the problem of a flag's value that sharded weights exclude; flag: with its group."""
    return (
        f"--{flag} {value} with --strategy {strategy}: {reason}; leave it out, or use ddp"
    )


def whole_weights_problem(flag: str) -> str:
    """Return the problem of offloaded weights, by `flag`, where each device needs all of them."""
    return (
        f"--{flag} parameters: with ddp each device needs all weights; add --strategy fsdp"
    )


@dataclass
class TrainArgs:
    """Optimization: steps, batches, memory and learning rate."""

    epochs: float | None = None
    """Number of passes over the training data; may be fractional. Default: 3, or as many as
    max_steps needs."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, even in the middle of an epoch. Default: no limit."""
    max_time: str | None = None
    """Stop after this much wall-clock time, such as 90m or 1h30m, which includes the time before a
    resume. The learning rate schedule is fitted to it; the last validation and the writing of
    final/ come on top. Default: no limit."""
    global_batch_size: int = 16
    """Examples (pairs of answers count once) per optimizer step, summed over all devices and
    micro-batches."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Rows per forward pass on one device. It affects speed and memory, not the result, but for
    what dropout and NEFTune draw. auto: the fastest number that fits into memory. Default: 1 row of
    packed examples, or 4 rows without packing."""
    compile: bool | None = None
    """Compile the transformer blocks with torch.compile. The first step starts up to a minute
    later, and all steps are faster. Default: true on a GPU, false on a CPU."""
    activation_checkpointing: Literal[
        "auto", "none", "elementwise", "selective", "full", "tiled"
    ] = "auto"
    """Save memory by recomputing activations in the backward pass: none, those of norms and gates
    (elementwise), those of the MLPs (selective), those of whole blocks (full), or the same with
    MLPs in pieces of the row, for long rows (tiled; uncompiled). auto: the least recomputation that
    fits into memory."""
    cpu_offload: Literal["none", "activations", "parameters"] = "none"
    """What to keep in host memory instead of GPU memory: saved activations, or the blocks' frozen
    weights (parameters). Each block's weights are fetched while the previous block runs; blocks are
    then recomputed and not compiled."""
    optimizer: Optimizers = "adamw"
    """The optimizer. 8-bit and paged AdamW and Lion come from bitsandbytes, schedule_free from the
    package schedulefree (pip install 'litft[schedulefree]'), the others from PyTorch. Each needs
    its own learning_rate."""
    optimizer_in_backward: bool = False
    """Update each weight as soon as its gradient is computed, then free the gradient. This saves
    the memory of all gradients in full fine-tuning. Requires one micro-batch per step and
    max_grad_norm 0."""
    learning_rate: float | None = None
    """The peak learning rate, reached after the warmup. Default, with --objective sft: lora
    by the width of the model, at most 1e-3 and 2.9e-4 for Llama 3.1 8B; adapter 2e-2, adapter_v2
    1e-3, full 5e-5. Preferences need less: with dpo, lora 5e-5 and full 5e-6
    (tutorials/finetune_preferences.md)."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate decays after the warmup. wsd (warmup, stable, decay): constant until
    the last decay_fraction of the run."""
    decay_fraction: float = 0.2
    """The fraction of the run, at its end, over which wsd decays the learning rate. Other schedules
    ignore it."""
    warmup_fraction: float = 0.05
    """The fraction of the run over which the learning rate rises linearly to its peak. 0: no
    warmup."""
    warmup_steps: int | None = None
    """The steps over which the learning rate rises, given directly. Default: warmup_fraction of the
    run."""
    min_lr_ratio: float = 0.1
    """The learning rate at the end of the schedule, as a fraction of the peak."""
    weight_decay: float = 0.0
    """Decoupled weight decay, applied to matrices only (no biases or norms)."""
    betas: list[float] = field(default_factory=list)
    """The decay rates of AdamW's and Lion's two moments. Default: 0.9,0.95; with lion, 0.9,0.99."""
    eps: float | None = None
    """The constant in the denominator of AdamW's update, and of Muon's normalization. Default:
    1e-8; of Muon's, 1e-7."""
    max_grad_norm: float = 1.0
    """Clip gradients whose global 2-norm is larger to this norm. 0: no clipping."""
    freeze: list[str] = field(default_factory=list)
    """Names or patterns of parameters to freeze although the method trains them: litft's
    (blocks.0.*, *.lora_a) or the checkpoint's (model.layers.0.*). They are saved."""
    label_smoothing: float = 0.0
    """The fraction of each target's probability that is spread over the vocabulary. 0: no
    smoothing."""
    neftune_alpha: float = 0.0
    """Scale of NEFTune's noise on the embeddings during training (arXiv 2310.05914, which uses 5 to
    15). 0: no noise."""
    skip_nan: bool = False
    """Skip steps whose loss or gradient is not finite, instead of ending the run. Slightly slower
    on a GPU."""
    oom_retry: bool = False
    """When memory runs out, halve the micro-batch size and continue. Steps and losses stay the
    same, but for what dropout and NEFTune draw."""
    ignore_memory_plan: bool = False
    """Start a run that needs more memory than there is according to its plan, which is refused
    otherwise."""
    log_interval: int | None = None
    """Print a line and write the rows of metrics.csv every this many steps. Default: 10 on a GPU;
    on a CPU, where steps are slow, 1 to 10, so that about 50 lines are printed."""

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is loaded."""
        problems = below_minimum(
            self, "train", 1, "global_batch_size", "max_steps", "log_interval"
        )

        # the micro-batch size may be the word auto
        if self.micro_batch_size != "auto":
            problems += below_minimum(self, "train", 1, "micro_batch_size")
        problems += below_minimum(
            self,
            "train",
            0,
            "learning_rate",
            "weight_decay",
            "max_grad_norm",
            "neftune_alpha",
        )
        problems += (
            below_minimum(self, "train", 0, "warmup_steps", "eps") + self._moment_problems()
        )
        for name in (
            "warmup_fraction",
            "decay_fraction",
            "min_lr_ratio",
            "label_smoothing",
        ):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(
                    f"--train.{name} {getattr(self, name)}: must lie between 0 and 1"
                )
        if self.epochs is not None and self.epochs <= 0:
            problems.append(f"--train.epochs {self.epochs}: must be above 0")
        if self.max_time is not None and not parse_duration(self.max_time):
            problems.append(
                f"--train.max_time {self.max_time}: expected a time such as 90m, 1h30m or 45s"
            )

        # an update within the backward pass cannot be undone or scaled afterwards
        if self.optimizer_in_backward:
            clashes = {
                "max_grad_norm 0": self.max_grad_norm,
                "skip_nan false": self.skip_nan,
                "oom_retry false": self.oom_retry,
            }
            reason = "the first weights are updated before all gradients are computed"
            for remedy, is_set in clashes.items():
                if is_set:
                    problems.append(
                        f"--train.optimizer_in_backward: {reason}; add --train.{remedy}"
                    )
            if self.optimizer == "schedule_free":
                problems.append(
                    "--train.optimizer_in_backward: schedule_free averages all weights at once; "
                    "choose another"
                )

        problems += self._offloading_problems()
        # schedule-free averaging takes the place of a decay
        if self.optimizer == "schedule_free" and self.lr_schedule != "constant":
            reason = "it averages the weights instead of decaying the learning rate"
            problems.append(
                f"--train.optimizer schedule_free: {reason}; add --train.lr_schedule constant"
            )
        return problems

    def _offloading_problems(self) -> list[str]:
        """Return the problems of --train.cpu_offload and --train.activation_checkpointing."""
        problems = []
        if (
            self.cpu_offload == "activations"
            and self.activation_checkpointing == "elementwise"
        ):
            problems.append(
                "--train.activation_checkpointing elementwise: --train.cpu_offload activations "
                "saves everything on the host; choose one of them"
            )
        if self.compile and self.activation_checkpointing == "tiled":
            problems.append(
                "--train.compile true: blocks whose MLPs run in pieces are not compiled; leave it "
                "out, or use --train.activation_checkpointing full"
            )
        # auto and full agree with what offloading does anyway: it recomputes whole blocks
        if self.cpu_offload == "parameters":
            if self.activation_checkpointing in ("auto", "full"):
                recomputation = ""
            else:
                recomputation = self.activation_checkpointing
            clashes = {
                "compile true": self.compile,
                f"activation_checkpointing {recomputation}": recomputation,
            }
            reason = "weights are fetched again for the backward pass"
            for name, is_set in clashes.items():
                if is_set:
                    problems.append(
                        f"--train.cpu_offload parameters: {reason}; leave --train.{name} out"
                    )
        return problems

    def _moment_problems(self) -> list[str]:
        """Return the problems of the flags of AdamW's and Lion's moments."""
        problems = []
        if self.betas and (
            len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)
        ):
            text = ",".join(map(str, self.betas))
            problems.append(
                f"--train.betas {text}: expected two numbers from 0 to below 1, such as 0.9,0.999"
            )

        # betas and eps that the optimizer would ignore
        for name, without in (
            ("betas", WITHOUT_BETAS),
            ("eps", ("adafactor", "sgd", "lion")),
        ):
            if getattr(self, name) not in (None, []) and self.optimizer in without:
                problems.append(
                    f"--train.{name}: --train.optimizer {self.optimizer} has no such setting; "
                    "leave it out"
                )
        return problems


@dataclass
class EvalArgs:
    """Validation before training, at intervals and at the end."""

    interval: int | None = None
    """Compute the validation loss every this many steps. 0: only before and after training.
    Default: about ten times in a run, less often if that would take more than half as long as the
    training. Nothing held out: sample answers by the same rule."""
    max_batches: int | None = 16
    """Use at most max_batches * global_batch_size validation examples, spread evenly over the set.
    null: all examples."""
    patience: int | None = None
    """Stop early after this many consecutive validations without a new lowest loss; that before
    training does not count. Default: never."""
    prompts: list[str] = field(default_factory=list)
    """Prompts to answer at each validation; the answers are printed and written to samples.jsonl.
    Texts, files with one prompt per line, or .jsonl files as `generate --prompts` reads them. Texts
    with commas: '["Well, who are you?"]'. Default: the first validation example's question."""
    max_new_tokens: int = 64
    """Maximum length of these answers in tokens. 0: answer no prompts."""
    exact_match: bool = False
    """At each validation, answer the validation questions greedily and report the fraction of exact
    matches."""
    forgetting: bool | None = None
    """Measure before and after the run what the model forgets: its loss on 50 kB of neutral text,
    and on its own earlier answers to 40 ordinary questions. Default: if that takes less than about
    a fifth of the training's time."""

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is loaded."""
        return below_minimum(self, "eval", 1, "max_batches", "patience") + below_minimum(
            self, "eval", 0, "interval", "max_new_tokens"
        )


@dataclass
class SaveArgs:
    """Checkpoints to resume from."""

    interval: int | None = None
    """Save a checkpoint every this many steps. 0: only at the end. Default: every ten minutes and
    after each tenth of the run, but at most one a minute."""
    keep_last: int = 2
    """Keep this many of the newest checkpoints and delete older ones."""
    best: bool = False
    """Also write the weights with the lowest validation loss to best/, in the format of final/."""
    text_names: bool = False
    """Write adapters of a multimodal base for transformers' text class (AutoModelForCausalLM of
    Llama 4 and Qwen3.5; the other families have none), not for the multimodal class. litft reads
    both."""

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is loaded."""
        return below_minimum(self, "save", 1, "keep_last") + below_minimum(
            self, "save", 0, "interval"
        )


@dataclass
class FinetuneArgs:
    """The flags that all fine-tuning methods share."""

    default_learning_rate: ClassVar[float] = 2e-4
    main_flags: ClassVar[tuple[str, ...]] = (  # those that --help lists first
        *(
            "checkpoint_dir",
            "data.path",
            "data.val_path",
            "out_dir",
            "config",
            "resume",
            "dry_run",
            "objective",
        ),
        *(
            "train.epochs",
            "train.learning_rate",
            "train.global_batch_size",
            "data.max_seq_length",
            "lora.r",
        ),
        *("quantize", "devices"),
    )

    checkpoint_dir: str | None = None
    """A Hugging Face model folder, or an adapter folder to continue training. Without this and
    --data.path, the built-in demo is trained, with its own flags (litft/demo/lora.yaml)."""
    base_dir: str | None = None
    """The folder of an adapter's base model, if it has moved. Default: the path stored with the
    adapter."""
    out_dir: str | None = None
    """The run folder to write. Default: the first free out/<method>[-n]."""
    resume: bool = False
    """Continue from the newest complete checkpoint in out_dir. Default out_dir: the newest
    unfinished run in out/ itself."""
    overwrite: bool = False
    """Delete the run in out_dir and start a new one there."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """The dtype of frozen weights and computation; trained parameters stay fp32. fp16 scales the
    loss, and leaves out updates whose gradients overflow. auto: bf16 on a GPU that has bf16
    arithmetic, fp16 on a T4, V100 or RTX 20, otherwise fp32."""
    quantize: Quantization = "none"
    """Quantize the frozen Linear weights to 4 or 8 bits with bitsandbytes; -dq also quantizes their
    scales (double quantization). A folder that bitsandbytes has quantized opens as it is; GPTQ,
    AWQ, FP8, MXFP4 and packed INT4 are quantized again."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """The kind of device to run on. auto: a GPU if there is one, otherwise the CPU."""
    devices: int = 1
    """Number of devices per node (on a CPU: processes). Under torchrun or srun: the number of
    started processes."""
    num_nodes: int = 1
    """Number of nodes; run the same command on each of them."""
    strategy: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """How devices share the work. ddp: each holds all weights. fsdp: weights and optimizer state
    are sharded over all devices. hsdp: they are sharded within groups of shard_size. auto: ddp if
    it fits into device memory, else fsdp."""
    shard_size: int | None = None
    """For hsdp: the number of devices over which the weights are sharded. Default: the devices of a
    node."""
    timeout: str = "10m"
    """End the run with an error when a process has waited this long for another one (30s, 10m,
    1h)."""
    seed: int = 42
    """Random seed of initialization, data order and dropout."""
    logger: Literal["csv", "tensorboard", "wandb", "mlflow"] = "csv"
    """Where to log metrics in addition to metrics.csv. Needs pip install 'litft[tensorboard]' (or
    wandb, mlflow)."""
    logger_project: str | None = None
    """The Weights & Biases project or MLflow experiment. Default: WANDB_PROJECT or
    MLFLOW_EXPERIMENT_NAME, otherwise litft. WANDB_ENTITY, WANDB_NAME and MLFLOW_RUN_NAME are used
    as well."""
    dry_run: bool = False
    """Prepare the data, print samples and the planned memory, and exit before the weights are
    loaded."""
    chip: str | None = None
    """For --dry_run: the GPU on which the time is estimated, such as H100 or RTX 4090. Default:
    this machine's."""
    deterministic: bool = False
    """Make repeated runs bit-identical on CUDA, at some cost in speed. On a CPU they always are."""
    objective: Objectives = "sft"
    """What to learn. sft: to predict the answers. dft: the same, with less weight on tokens that
    the model finds improbable. From preferences, dpo, ipo, simpo and orpo: pairs
    of a chosen and a rejected answer; kto: answers that are desirable or not. grpo: completions
    that --reward rates highly. distill: the probabilities of --teacher."""
    reward: list[str] = field(default_factory=list)
    """grpo: the reward functions, which are added up, each with an optional weight: number, exact,
    contains, math, regex:PATTERN, format:think, brief:TOKENS, or FILE.py:FUNCTION. Example:
    number,brief:200=0.1 (tutorials/finetune_rewards.md)."""
    teacher: str | None = None
    """distill: the folder or hub id of the model to learn from, which has the same vocabulary
    (tutorials/distill.md)."""
    data: DataArgs = field(default_factory=DataArgs)
    preference: PreferenceArgs = field(default_factory=PreferenceArgs)
    grpo: GrpoArgs = field(default_factory=GrpoArgs)
    distill: DistillArgs = field(default_factory=DistillArgs)
    train: TrainArgs = field(default_factory=TrainArgs)
    eval: EvalArgs = field(default_factory=EvalArgs)
    save: SaveArgs = field(default_factory=SaveArgs)

    @property
    def model_dir(self) -> str:
        """--checkpoint_dir, which is filled in before a run starts."""
        assert self.checkpoint_dir is not None
        return self.checkpoint_dir

    @property
    def timeout_seconds(self) -> float:
        """--timeout in seconds; `problems` requires a duration."""
        timeout = parse_duration(self.timeout)
        assert timeout is not None
        return timeout

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is loaded."""
        # the checks below compare numbers, and would fail on text
        problems = wrong_types(self)
        if problems:
            return problems
        problems = impossible_numbers(self) + below_minimum(
            self, "", 1, "devices", "num_nodes", "shard_size"
        )
        if self.logger_project and self.logger not in ("wandb", "mlflow"):
            problems.append(
                f"--logger_project {self.logger_project}: add --logger wandb or mlflow, which have "
                "projects"
            )
        if self.resume and self.overwrite:
            problems.append(
                "--resume and --overwrite exclude each other: one keeps the run, the other deletes "
                "it; leave one of them out"
            )
        if not 0 < (parse_duration(self.timeout) or 0) <= 365 * 86400:
            problems.append(
                f"--timeout {self.timeout}: expected a time such as 30s, 10m or 1h, at most 365d"
            )

        # devices and nodes are those that torchrun or srun has started, if any
        try:
            problems += apply_launcher(self).clashes(self.strategy)
        except ValueError as error:
            problems.append(str(error))
        problems += self.preference.problems(self.objective) + self.objective_clashes()
        problems += self.grpo.problems(self.objective, self.reward)
        problems += self.distill.problems(self.objective, self.teacher)
        problems += [
            *self.data.problems(),
            *self.train.problems(),
            *self.eval.problems(),
            *self.save.problems(),
        ]

        # without both, the demo is trained
        if self.checkpoint_dir and not self.data.path:
            problems.append("--data.path is missing: name the file of training examples")
        if self.data.path and not self.checkpoint_dir:
            problems.append(
                "--checkpoint_dir is missing: name the folder of the model to train"
            )
        return problems

    def objective_clashes(self) -> list[str]:
        """Return the problems of flags that have no meaning for the objective."""
        if self.objective == "sft":
            return []
        # a value that is true stands for a flag that was set
        clashes: dict[str, Any] = {"train.label_smoothing": self.train.label_smoothing}
        if self.objective != "dft":
            clashes["data.replay"] = self.data.replay
        if DATA_KINDS[self.objective] != "supervised":
            clashes |= {
                "data.format": self.data.format,
                # the value is shown as it was given
                "data.mask_prompt": not self.data.mask_prompt and "false",
            }
        # validations measure the rewards, and a step has several passes over its completions
        if self.objective == "grpo":
            clashes |= {
                "eval.exact_match": self.eval.exact_match and "true",
                "train.neftune_alpha": self.train.neftune_alpha,
                "train.optimizer_in_backward": self.train.optimizer_in_backward and "true",
            }
        reason = f"it does not apply to --objective {self.objective}; leave it out"
        problems = []
        for name, value in clashes.items():
            if value:
                problems.append(f"--{name} {value}: {reason}")
        if self.train.optimizer_in_backward and self.distill.on_policy:
            problems.append(
                "--train.optimizer_in_backward: each micro-batch is a step, and the student's own "
                "answers (--distill.on_policy) may make several of a step; leave it out"
            )
        return problems

    def clashes(self, strategy: str) -> list[str]:
        """Return the problems of flags that several devices, or the strategy, do not support."""
        problems = []
        train = self.train
        num_devices = self.devices * self.num_nodes
        if num_devices > 1 and train.optimizer_in_backward:
            problems.append(
                f"--train.optimizer_in_backward: {num_devices} devices sum their gradients first; "
                "use one device"
            )
        problems += sharding_problems(
            strategy, self.shard_size, self.devices, self.num_nodes
        )
        # auto is checked again once it is decided
        if strategy not in ("fsdp", "hsdp"):
            if num_devices > 1 and strategy == "ddp" and train.cpu_offload == "parameters":
                problems.append(whole_weights_problem("train.cpu_offload"))
            return problems

        # what sharded weights exclude
        if train.optimizer in CANNOT_SHARD:
            reason = CANNOT_SHARD[train.optimizer]
            problems.append(
                sharding_clash("train.optimizer", train.optimizer, strategy, reason)
            )
        if train.oom_retry:
            reason = "the other processes would wait for the one that ran out of memory"
            problems.append(sharding_clash("train.oom_retry", "true", strategy, reason))
        if train.cpu_offload == "activations":
            problems.append(
                sharding_clash(
                    "train.cpu_offload", train.cpu_offload, strategy, OFFLOADS_GATHERED
                )
            )
        return problems


def apply_launcher(args: FinetuneArgs) -> FinetuneArgs:
    """Return the flags with the process counts of torchrun or SLURM, if used; a restarted job
    resumes its run."""
    if started_by() is None:
        return args
    if args.resume:
        # a resumed run may have other process counts than its flags say
        devices, nodes = process_counts(1, 1)
    else:
        devices, nodes = process_counts(args.devices, args.num_nodes)
    # torchrun counts the restarts of its processes, SLURM those of a job that it has requeued
    restarted = (
        os.environ.get("TORCHELASTIC_RESTART_COUNT")
        or os.environ.get("SLURM_RESTART_COUNT")
        or "0"
    ) != "0"
    args = replace(args, devices=devices, num_nodes=nodes)
    # with --overwrite, each restart would delete the checkpoints that it has to continue from
    if restarted:
        return replace(args, resume=True, overwrite=False)
    return args
