"""Every flag, as typed and documented fields. The text under a field is its --help; a default stands here only."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

GROUPS = ("data", "train", "eval", "save", "lora", "adapter")
LARGEST_SIZE = 2**14  # of a rank or a prefix: beyond it memory would run out before a message
LARGEST = 2**31 - 1  # of any whole number here: beyond it seeds overflow, and nothing else is meant


def _numbers(args: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every flag that holds a number, by its dotted name."""
    for item in dataclasses.fields(args):
        value = getattr(args, item.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{item.name}.")
        elif isinstance(value, (int, float)):
            yield prefix + item.name, value


def impossible_numbers(args: Any) -> list[str]:
    """Problems with numbers that no flag may hold."""
    found = []
    for name, value in _numbers(args):
        if isinstance(value, float) and not math.isfinite(value):
            found.append(f"--{name} {value}: must be a finite number")
        elif abs(value) > LARGEST:
            found.append(f"--{name} {value}: must be at most {LARGEST:,}")
        elif name.endswith("seed") and value < 0:
            found.append(f"--{name} {value}: must not be negative")
    return found


@dataclass
class DataArgs:
    """The examples."""

    path: str | None = None
    """A .json or .jsonl file of examples (Alpaca fields or `messages`), or a folder with train.* and val.*. Needed
    wherever --checkpoint_dir is given."""
    val_path: str | None = None
    """A file of validation examples. Default: the folder's val.*, or a part held out of `path`."""
    val_fraction: float = 0.05
    """The part held out for validation where there is no validation file. 0: no validation."""
    template: str = "auto"
    """How a conversation becomes text: auto (the checkpoint's chat template, Alpaca style where it has none), alpaca, or
    the path of a jinja file."""
    mask_prompt: bool = True
    """Learn from the answers only. false: from every token."""
    max_seq_length: int | None = None
    """Longer examples are cut, in tokens. Default: the model's context, at most 2048."""
    new_tokens: list[str] = field(default_factory=list)
    """Texts that become tokens of their own, with trained rows in the embedding and the head."""
    seed: int = 42
    """Chooses what is held out."""


@dataclass
class TrainArgs:
    """The optimization."""

    epochs: float | None = None
    """Passes over the data. Default: 3, or as many as max_steps needs."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, even within an epoch."""
    global_batch_size: int = 16
    """Examples a step, over all devices and micro-batches."""
    micro_batch_size: int = 4
    """Examples that go through the network at once on one device. Changes speed and memory, not the result."""
    learning_rate: float = 5e-4
    """The peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_fraction: float = 0.05
    """The part of the run over which the learning rate rises to its peak. May be 0."""
    min_lr_ratio: float = 0.1
    """Where the schedule ends, as a part of the peak."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, of matrices."""
    max_grad_norm: float = 1.0
    """Gradients with a larger 2-norm are scaled down to it. 0: no clipping."""
    freeze: list[str] = field(default_factory=list)
    """Names or patterns of what is not trained though the method would (blocks.0.*, *.lora_a); saved all the same."""
    label_smoothing: float = 0.0
    """This part of each target's probability is spread over the vocabulary."""
    neftune_alpha: float = 0.0
    """NEFTune's noise on the embeddings, 5 to 15 in its paper. 0: none."""
    log_interval: int | None = None
    """Write metrics.csv every so many steps. Default: 1 on a CPU, 10 on a GPU."""


@dataclass
class EvalArgs:
    """Validation, before training, at intervals, and at the end."""

    interval: int = 100
    """Compute the validation loss every so many steps. 0: only before and after."""
    max_batches: int | None = 64
    """Use at most so many micro-batches of the validation data (a device). null: all of it."""
    exact_match: bool = False
    """Before and after, answer every validation question greedily and count the answers that are right to the letter."""


@dataclass
class SaveArgs:
    """Checkpoints to resume from."""

    interval: int = 200
    """Save the run's state every so many steps. 0: only at the end."""
    keep_last: int = 2
    """Delete all but so many of the newest checkpoints."""


@dataclass
class LoRAArgs:
    """LoRA, low-rank adaptation (arXiv 2106.09685)."""

    r: int = 8
    """The rank of the update of each weight matrix."""
    alpha: float = 16
    """The update is scaled by alpha / r."""
    dropout: float = 0.0
    """The part of the inputs to the update that is dropped while training."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """What to adapt: names or patterns, litft's or the checkpoint's (q_proj, blocks.1?.mlp.*, embed, lm_head), or all-linear
    (every Linear, each expert's too, but the head and what chooses the experts)."""
    rank_pattern: list[str] = field(default_factory=list)
    """Other ranks for some of them, NAME=RANK (down_proj=16,blocks.0.*=4); the first that fits counts."""
    alpha_pattern: list[str] = field(default_factory=list)
    """Other alphas for some of them, NAME=ALPHA."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)."""
    dora: bool = False
    """Learn the length of each row of the adapted weight too (DoRA, arXiv 2402.09353)."""
    init: Literal["default", "pissa", "olora"] = "default"
    """Where the factors begin: A random and B zero; the weight's first singular vectors (PiSSA, arXiv 2404.02948); its QR
    decomposition (OLoRA, arXiv 2406.01775)."""
    lr_ratio: float = 1.0
    """B's learning rate as a multiple of A's (LoRA+, arXiv 2402.12354, which advises 16)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained whole, names or patterns (embed, lm_head, norm)."""
    bias: Literal["none", "lora", "all"] = "none"
    """Which of the base's biases are trained: none, those of adapted Linears, all."""

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        found = []
        if not 1 <= self.r <= LARGEST_SIZE:
            found.append(f"--lora.r {self.r}: must be at least 1, and at most {LARGEST_SIZE:,}")
        if self.alpha <= 0:
            found.append(f"--lora.alpha {self.alpha}: must be above 0")
        if not 0 <= self.dropout < 1:
            found.append(f"--lora.dropout {self.dropout}: must lie in [0, 1)")
        if not self.targets:
            found.append("--lora.targets is empty: name at least one Linear, or all-linear")
        if self.lr_ratio <= 0:
            found.append(f"--lora.lr_ratio {self.lr_ratio}: must be above 0")
        for flag in ("rank_pattern", "alpha_pattern"):
            found += [f"--lora.{flag} {p}: {why}" for p in getattr(self, flag) if (why := _no_pattern(p, flag))]
        return found


def _no_pattern(text: str, flag: str) -> str | None:
    """What is wrong with NAME=NUMBER, if anything."""
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    largest = LARGEST_SIZE if flag == "rank_pattern" else LARGEST
    wanted = f"a whole number from 1 to {largest:,}" if flag == "rank_pattern" else "a number above 0"
    fits = name and 0 < value <= largest and (value.is_integer() or flag != "rank_pattern")
    return None if fits else f"expected NAME={wanted}"


@dataclass
class AdapterArgs:
    """LLaMA-Adapter (arXiv 2303.16199)."""

    fewest: ClassVar[int] = 1  # learned vectors
    prompt_length: int = 10
    """How many learned vectors each layer's attention sees besides the tokens."""
    start_layer: int = 2
    """The first layer that has them; those below have none."""

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        found = []
        if not self.fewest <= self.prompt_length <= LARGEST_SIZE:
            bounds = f"at least {self.fewest}, and at most {LARGEST_SIZE:,}"
            found.append(f"--adapter.prompt_length {self.prompt_length}: must be {bounds}")
        if self.start_layer < 0:
            found.append(f"--adapter.start_layer {self.start_layer}: must not be negative")
        return found


@dataclass
class AdapterV2Args(AdapterArgs):
    """LLaMA-Adapter v2 (arXiv 2304.15010)."""

    fewest: ClassVar[int] = 0
    prompt_length: int = 10
    """How many learned vectors each layer's attention sees besides the tokens. 0: none, so that the result can be merged."""
    bias: bool = True
    """Learn a bias for each Linear besides its scale. false: merges in families without biases."""


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
    """How many devices (on a CPU: processes)."""
    strategy: Literal["auto", "ddp"] = "auto"
    """How several devices work together. auto: ddp where there are several."""
    seed: int = 42
    """Seeds initialization, order and dropout."""
    deterministic: bool = False
    """Bit-equal repeats on CUDA too, at some cost in speed (a CPU always repeats)."""
    data: DataArgs = field(default_factory=DataArgs)
    train: TrainArgs = field(default_factory=TrainArgs)
    eval: EvalArgs = field(default_factory=EvalArgs)
    save: SaveArgs = field(default_factory=SaveArgs)

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        t = self.train
        at_least_one = {
            "devices": self.devices,
            "train.global_batch_size": t.global_batch_size,
            "train.micro_batch_size": t.micro_batch_size,
            "train.max_steps": t.max_steps,
            "train.log_interval": t.log_interval,
            "data.max_seq_length": self.data.max_seq_length,
            "eval.max_batches": self.eval.max_batches,
            "save.keep_last": self.save.keep_last,
        }
        not_negative = {
            "train.learning_rate": t.learning_rate,
            "train.weight_decay": t.weight_decay,
            "train.max_grad_norm": t.max_grad_norm,
            "train.neftune_alpha": t.neftune_alpha,
            "eval.interval": self.eval.interval,
            "save.interval": self.save.interval,
        }
        parts = {
            "train.warmup_fraction": t.warmup_fraction,
            "train.min_lr_ratio": t.min_lr_ratio,
            "train.label_smoothing": t.label_smoothing,
            "data.val_fraction": self.data.val_fraction,
        }
        found = impossible_numbers(self)
        found += [f"--{n} {v}: must be at least 1" for n, v in at_least_one.items() if v is not None and v < 1]
        found += [f"--{n} {v}: must not be negative" for n, v in not_negative.items() if v < 0]
        found += [f"--{n} {v}: must lie between 0 and 1" for n, v in parts.items() if not 0 <= v <= 1]
        if t.epochs is not None and t.epochs <= 0:
            found.append(f"--train.epochs {t.epochs}: must be above 0")
        if self.resume and self.overwrite:
            found.append("--resume and --overwrite exclude each other: one keeps the run, the other deletes it")
        if self.checkpoint_dir and not self.data.path:
            found.append("--data.path is missing: name the file of examples to learn from")
        if self.data.path and not self.checkpoint_dir:
            found.append("--checkpoint_dir is missing: name the folder of the model to train")
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


@dataclass
class ModelArgs:
    """Which model to run."""

    checkpoint_dir: str | None = None
    """A model folder, an adapter folder, or a run's folder. Default: the newest finished run under out/."""
    base_dir: str | None = None
    """Where an adapter folder's base model lies now, if it has moved."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The dtype of weights and computation. auto: bf16 on a GPU, else fp32."""
    quantize: Literal["none", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8"] = "none"
    """Keep the Linears in 4 or 8 bits, by bitsandbytes."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    max_new_tokens: int = 256
    """Stop an answer after so many tokens."""
    temperature: float = 0.8
    """Higher is more varied; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among the k likeliest tokens only."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    seed: int | None = None
    """Makes the sampling repeatable."""

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        found = impossible_numbers(self)
        if self.max_new_tokens < 1:
            found.append(f"--max_new_tokens {self.max_new_tokens}: must be at least 1")
        if self.temperature < 0:
            found.append(f"--temperature {self.temperature}: must not be negative; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            found.append(f"--top_k {self.top_k}: must be at least 1")
        if not 0 < self.top_p <= 1:
            found.append(f"--top_p {self.top_p}: must lie in (0, 1]")
        return found


@dataclass
class GenerateArgs(ModelArgs):
    """Complete one prompt, or a file of prompts; the completion alone goes to stdout."""

    prompt: str | None = None
    """The prompt."""
    prompts: str | None = None
    """A .jsonl file with a `prompt` (or `messages`) a line, in place of --prompt."""
    out: str | None = None
    """Where to write the completions of --prompts, one JSON object a line. Default: stdout."""
    template: Literal["auto", "none"] = "auto"
    """auto: put the prompt into the model's chat template. none: continue the bare text."""

    def problems(self) -> list[str]:
        """As for every model, and that there is just one source of prompts."""
        found = super().problems()
        if (self.prompt is None) == (self.prompts is None):
            found.append("give either --prompt TEXT or --prompts FILE.jsonl")
        if self.out and not self.prompts:
            found.append("--out needs --prompts: a single completion goes to stdout")
        return found


@dataclass
class ChatArgs(ModelArgs):
    """Chat with a model; without a terminal, one message a line on stdin and the answers alone on stdout."""

    system: str | None = None
    """A system message to begin with."""
    debug: bool = False
    """Show on stderr the text that the model reads."""


@dataclass
class WriteArgs:
    """Where and how a model folder is written."""

    checkpoint_dir: str | None = None
    """What to read."""
    out_dir: str | None = None
    """Where to write; must not exist or be empty."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """The dtype to write; sums are made in fp32. auto: the base's own."""
    shard_gb: float = 5.0
    """Start another file after so many GB (10^9 bytes). Memory stays near one such shard."""

    def problems(self) -> list[str]:
        """The target is needed."""
        found = impossible_numbers(self)
        if not self.out_dir:
            found.append("--out_dir is missing: name the folder to write to")
        if self.shard_gb <= 0:
            found.append(f"--shard_gb {self.shard_gb}: must be above 0")
        return found


@dataclass
class ConvertArgs(WriteArgs):
    """Rewrite a model folder as clean safetensors in one dtype, and compare every tensor afterwards."""

    def problems(self) -> list[str]:
        """The source is needed too."""
        missing = [] if self.checkpoint_dir else ["--checkpoint_dir is missing: name the model folder to convert"]
        return missing + super().problems()


@dataclass
class MergeArgs(WriteArgs):
    """Merge an adapter into its base: a model folder of its own."""

    checkpoint_dir: str | None = None
    """The adapter's folder, or its run's. Default: the newest finished run under out/."""
    base_dir: str | None = None
    """Where the base model lies now, if it has moved."""
    dequantized_base: bool = False
    """Add to the weights that the adapter was trained on, rounded by --quantize, rather than to the original ones."""


@dataclass
class ExportArgs(MergeArgs):
    """Write a folder to open out of a run, finished or not, or of one of its checkpoints."""

    checkpoint_dir: str | None = None
    """A run's folder, its final/, or one of its checkpoints/step-NNNNNN. Default: the newest finished run under out/."""
    merge: bool = True
    """Write the whole model. false: the adapter by itself, as PEFT reads it."""

    def problems(self) -> list[str]:
        """As for every model, and what has no meaning without merging."""
        found = super().problems()
        if not self.merge and (self.dequantized_base or self.precision != "auto"):
            found.append("--merge false writes the adapter as it is: leave --dequantized_base and --precision out")
        return found
