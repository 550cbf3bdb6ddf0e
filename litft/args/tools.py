"""The flags of what comes before and after fine-tuning: looking, generating, merging, converting."""

import json
import re
from dataclasses import dataclass, field, fields
from typing import Literal

from litft.args.checks import LARGEST, below, impossible_numbers, size
from litft.args.finetune import DataArgs, Optimizers
from litft.args.methods import AdapterV2Args, LoRAArgs
from litft.args.sampling import LARGEST_NUMBER, NUMBERS, Sampling

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


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


@dataclass
class OpenArgs:
    """Which model, and how it is held."""

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
    devices: int = 1
    """Cut the network between so many GPUs, or processes on a CPU: each holds some of its heads and hidden units."""
    layers_per_device: str | None = None
    """Whole layers a GPU instead, one GPU after the other: as many as fit with auto, the rest on the host; or 20,12."""

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        return impossible_numbers(self) + below(self, "", 1, "devices") + self._layer_problems()

    def _layer_problems(self) -> list[str]:
        """Of --layers_per_device: text that is no number a device."""
        given = self.layers_per_device
        if given in (None, "auto"):
            return []
        counts = given.split(",")
        if all(count.strip().isdecimal() for count in counts) and len(counts) == self.devices:
            return []
        return [f"--layers_per_device {given}: expected auto, or a number for each of --devices {self.devices}, as 20,12"]


@dataclass
class ModelArgs(OpenArgs):
    """Which model to run, and how its answers are made."""

    compile: Literal["auto", "true", "false"] = "auto"
    """Compile reading and decoding; that takes a minute at the start. auto: on a GPU."""
    max_new_tokens: int | None = None
    """Stop an answer after so many tokens. Default: generation_config.json's, else 256."""
    temperature: float | None = None
    """Higher is more varied; 0 always takes the likeliest token. Default: generation_config.json's, else 0.7."""
    top_k: int | None = None
    """Choose among the k likeliest tokens only."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability. Default: generation_config.json's; 0.9 where
    that says nothing of sampling."""
    min_p: float | None = None
    """Choose among tokens that have at least this part of the likeliest one's probability."""
    repetition_penalty: float | None = None
    """Above 1: what prompt and answer hold is less likely."""
    presence_penalty: float | None = None
    """Above 0: what the answer holds is less likely."""
    frequency_penalty: float | None = None
    """Above 0: what the answer holds often is less likely."""
    logit_bias: str | None = None
    """Numbers to add to tokens' logits, as JSON by token id: '{"262": -100}'."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, as JSON if one has a comma: '["\\n\\n", "User:"]'."""
    seed: int | None = None
    """Makes the sampling repeatable."""

    def problems(self) -> list[str]:
        """Everything wrong with the values that can be seen before anything is loaded."""
        found = super().problems() + below(self, "", 1, "max_new_tokens")
        given = {name: getattr(self, name) for name in NUMBERS}
        found += Sampling(**{name: value for name, value in given.items() if value is not None}).problems()
        if "" in self.stop:
            found.append("--stop: an empty text stands everywhere; leave it out")
        if self.logit_bias is not None and not _is_bias(self.logit_bias):
            found.append(f"--logit_bias {self.logit_bias}: expected JSON such as '{{\"262\": -100}}', numbers by token id")
        return found


def _is_bias(text: str) -> bool:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and all(
        key.isdecimal() and type(value) in (int, float) and abs(value) <= LARGEST_NUMBER for key, value in values.items()
    )


@dataclass
class GuessArgs(ModelArgs):
    """The same, where one answer is made at a time: it may be guessed ahead."""

    draft_dir: str | None = None
    """A smaller model with the same tokens, which guesses ahead: the same answers, faster where it is often right."""
    lookup: bool = False
    """Guess that a text goes on as it did before: faster where answers quote, as in summaries and code."""

    def problems(self) -> list[str]:
        """As for every model, and that one of the two guesses."""
        both = ["--draft_dir and --lookup: one of them guesses; leave the other out"]
        return super().problems() + (both if self.draft_dir and self.lookup else [])


@dataclass
class GenerateArgs(GuessArgs):
    """Complete one prompt, or a file of prompts; the completion alone goes to stdout."""

    prompt: str | None = None
    """The prompt."""
    prompts: str | None = None
    """A .jsonl file with a `prompt` (or `messages`) a line, in place of --prompt."""
    out: str | None = None
    """Where to write the completions of --prompts, one JSON object a line, in the prompts' order. Default: stdout."""
    resume: bool = False
    """Go on with an --out that was begun."""
    overwrite: bool = False
    """Write --out anew if it exists."""
    batch_size: int = 8
    """How many answers are made at once."""
    num_samples: int = 1
    """How many answers each prompt gets."""
    template: Literal["auto", "none"] = "auto"
    """auto: put the prompt into the model's chat template. none: continue the bare text."""

    def problems(self) -> list[str]:
        """As for every model, and that there is just one source of prompts."""
        found = super().problems() + below(self, "", 1, "batch_size", "num_samples")
        if (self.prompt is None) == (self.prompts is None):
            found.append("give either --prompt TEXT or --prompts FILE.jsonl")
        if self.out and not self.prompts:
            found.append("--out needs --prompts: a single completion goes to stdout")
        for name in ("resume", "overwrite"):
            if getattr(self, name) and not self.out:
                found.append(f"--{name} is of --out FILE; name one")
        if self.resume and self.overwrite:
            found.append("--resume goes on with --out and --overwrite begins it anew; leave one out")
        return found


@dataclass
class ChatArgs(GuessArgs):
    """Chat with a model; without a terminal, one message a line on stdin and the answers alone on stdout."""

    system: str | None = None
    """A system message to begin with."""
    debug: bool = False
    """Show on stderr exactly what the model reads and says, its special tokens too."""


MOST_ROWS = 4096  # of a batch


@dataclass
class ServeArgs(ModelArgs):
    """Serve a model, and adapters over it, to clients of the OpenAI API, with a chat page at /."""

    max_new_tokens: int | None = None
    """The most tokens that an answer may have. Default: as many as there is room for."""
    host: str = "127.0.0.1"
    """The address to listen at. Default: this machine alone; 0.0.0.0 for every network it is in."""
    port: int = 8000
    """The port; 0 takes a free one, which is printed."""
    model_name: str | None = None
    """What requests call the model. Default: the folder's name."""
    adapters: list[str] = field(default_factory=list)
    """More models over the same base, as NAME=DIR: an adapter's folder or its run's, chosen by a request's `model`."""
    batch_size: int = 8
    """How many answers of a model are made at once; others wait."""
    max_seq_length: int | None = None
    """Tokens of a prompt with its answer; there is memory for --batch_size of them. Default: 4096, or the context."""
    max_waiting: int = 256
    """How many requests may wait; more are refused with 503."""
    max_body_mb: float = 4.0
    """Requests of more megabytes are refused with 413."""
    api_key: str | None = None
    """Only answer clients that send this as their bearer key. Default: the environment's LITFT_API_KEY, else anybody."""

    def problems(self) -> list[str]:
        """As for every model, and what cannot be served."""
        found = super().problems() + below(self, "", 1, "batch_size")
        if self.max_seq_length is not None:
            found += below(self, "", 2, "max_seq_length")
        found += below(self, "", 0, "max_waiting")
        if self.batch_size > MOST_ROWS:
            found.append(f"--batch_size {self.batch_size}: must be at most {MOST_ROWS}")
        if not 0 <= self.port < 65536:
            found.append(f"--port {self.port}: must lie in [0, 65535]")
        if self.max_body_mb <= 0:
            found.append(f"--max_body_mb {self.max_body_mb}: must be above 0")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key.strip()):
            found.append("--api_key: must be printable ASCII, and not empty, as it travels in a header")
        names = [name for name, _, _ in (item.partition("=") for item in self.adapters)]
        found += [f"--adapters {item}: expected NAME=DIR" for item in self.adapters if not all(item.partition("="))]
        if twice := {name for name in names if names.count(name) > 1 or name == self.model_name}:
            found.append(f"--adapters: {', '.join(sorted(twice))} twice; give each a name of its own")
        if self.adapters and self.devices > 1 and not self.layers_per_device:
            found.append("--adapters with --devices: a network that is cut has one adapter; leave one of the two out")
        return found


@dataclass
class RunEvalArgs(OpenArgs):
    """Score a model, and its base beside it: lm-evaluation-harness tasks, or loss and answers on your own examples."""

    tasks: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness, by name or as the path of a YAML file."""
    include_path: str | None = None
    """A folder with more tasks."""
    num_fewshot: int | None = None
    """Examples before each question. Default: the task's own."""
    chat_template: bool = False
    """Put the tasks' questions into the model's chat template."""
    data: DataArgs = field(default_factory=lambda: DataArgs(val_fraction=0.0))
    against: str | None = None
    """Another model's folder to score beside this one; none: score this one alone. Default: of an adapter its base."""
    limit: int | None = None
    """Only so many examples, of each task and of --data."""
    batch_size: int = 8
    """Texts that go through the network at once."""
    max_new_tokens: int | None = None
    """Tokens of an answer to --data. Default: those of the expected one, and 8 more."""
    show: int = 3
    """How many answers to --data are printed."""
    out: str | None = None
    """Write flags, scores, all answers and the tasks' samples there, as JSON."""

    def problems(self) -> list[str]:
        """As for every model, and that there is something to score."""
        found = super().problems() + self.data.problems() + below(self, "", 1, "limit", "batch_size", "max_new_tokens")
        found += below(self, "", 0, "show", "num_fewshot")
        for name in ("new_tokens", "weights"):
            if getattr(self.data, name):
                found.append(f"--data.{name} is of training; leave it out")
        if self.devices > 1 and not self.layers_per_device:
            found.append(
                f"--devices {self.devices}: texts are scored whole; spread the layers with --layers_per_device auto"
            )
        return found

    def model(self, folder: str | None, base_dir: str | None = None) -> ModelArgs:
        """How a folder is opened, held as these say. Texts have all lengths: compiling would take longer than it gains."""
        held = {item.name: getattr(self, item.name) for item in fields(OpenArgs)}
        return ModelArgs(**held | {"checkpoint_dir": folder, "base_dir": base_dir}, compile="false")


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


@dataclass
class GgufConvertArgs(WriteArgs):
    """Turn a GGUF file of llama.cpp's into a model folder, with tokenizer and chat template."""

    checkpoint_dir: str | None = None
    """A .gguf file, the first of several parts, or the folder with it."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """The dtype to write. auto: the file's own; bf16 where its weights are quantized."""

    def problems(self) -> list[str]:
        """The source is needed too."""
        missing = [] if self.checkpoint_dir else ["--checkpoint_dir is missing: name the .gguf file to convert"]
        return missing + super().problems()


@dataclass
class GgufExportArgs:
    """Write a run, or any folder, as a GGUF file for llama.cpp and Ollama: merged, or the LoRA adapter by itself."""

    checkpoint_dir: str | None = None
    """A run's folder, one of its checkpoints, a model or an adapter. Default: the newest finished run under out/."""
    base_dir: str | None = None
    """Where the base model lies now, if it has moved."""
    out_dir: str | None = None
    """Where to write; must not exist or be empty."""
    outtype: Literal["auto", "f32", "f16", "bf16", "q8_0"] = "auto"
    """What matrices are stored in. auto: bf16 where the folder is, else f16; of an adapter f32."""
    merge: bool = True
    """Write the whole model. false: the LoRA adapter by itself, for llama.cpp's --lora."""
    dequantized_base: bool = False
    """Add to the weights that the adapter was trained on, rounded by --quantize, rather than to the original ones."""

    def problems(self) -> list[str]:
        """What is missing, or has no meaning without merging."""
        found = [] if self.out_dir else ["--out_dir is missing: name the folder to write to"]
        if not self.merge and self.dequantized_base:
            found.append("--merge false writes the adapter as it is: leave --dequantized_base out")
        return found


@dataclass
class DownloadArgs:
    """Fetch a model or an adapter from the Hugging Face hub: the files that litft reads, and the licence."""

    repo_id: str | None = None
    """owner/name, or owner/name@revision: a branch, a tag or a commit."""
    out_dir: str | None = None
    """Where to put it; what is there of it already is kept. Default: the cache of huggingface_hub."""
    token: str | None = None
    """For private and gated models. Default: HF_TOKEN, or what `hf auth login` has stored."""

    def problems(self) -> list[str]:
        """The name is needed."""
        return [] if self.repo_id else ["--repo_id is missing: name a model of the hub as owner/name"]


@dataclass
class UploadArgs:
    """Put a run's result, or any folder, on the Hugging Face hub, with a model card written from the run."""

    checkpoint_dir: str | None = None
    """A run's folder, a model or an adapter. Default: the newest finished run under out/."""
    base_dir: str | None = None
    """Where an adapter folder's base model lies now, if it has moved."""
    repo_id: str | None = None
    """owner/name: where to put it. It is made if it is not there."""
    run: str | None = None
    """The run that a merged or converted folder comes from, for its card. Default: the one that the folder lies in."""
    base_model: str | None = None
    """The base model's id on the hub. Default: as known, of a base that came from there."""
    licence: str | None = None
    """The licence's id on the hub: apache-2.0, mit, llama3.1. Default: the base model's, where its README says it."""
    private: bool = False
    """Make a repository that only you see."""
    message: str = "Upload from litft"
    """What the commit says."""
    token: str | None = None
    """One that may write. Default: HF_TOKEN, or what `hf auth login` has stored."""
    dry_run: bool = False
    """Show the card on stdout, the files on stderr, and send nothing."""

    def problems(self) -> list[str]:
        """The name is needed, and of its shape."""
        found = []
        for name in ("repo_id", "base_model"):
            given = getattr(self, name)
            if given is None and name == "repo_id":
                found.append("--repo_id is missing: name where to put it as owner/name")
            elif given is not None and not HUB_NAME.fullmatch(given.partition("@")[0] if name == "base_model" else given):
                found.append(f"--{name} {given}: expected owner/name")
        return found
