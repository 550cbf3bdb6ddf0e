"""The flags of the commands that load a model and generate text: `generate`, `chat`."""

import json
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from litft.args.methods import Quantization
from litft.args.sampling import LARGEST_NUMBER, NUMBERS, Sampling
from litft.args.value_checks import below_minimum, impossible_numbers


@dataclass
class OpenArgs:
    """Which model to load, and how."""

    checkpoint_dir: str | None = None
    """A model folder, an adapter folder or a run folder. Default: the newest finished run in
    out/ itself."""
    base_dir: str | None = None
    """The folder of an adapter's base model, if it has moved. Default: the path stored with the
    adapter."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The dtype of weights and computation. auto: bf16 on a GPU that has bf16 arithmetic, fp16 on
    others where the model fits, otherwise fp32. To generate text, auto is also bf16 for bf16
    weights on a CPU with bf16 arithmetic."""
    quantize: Quantization = "none"
    """Quantize Linear weights to 4 or 8 bits with bitsandbytes; -dq also quantizes their scales
    (double quantization)."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """The kind of device to run on. auto: a GPU if there is one, otherwise the CPU."""
    devices: int = 1
    """Number of GPUs (on a CPU: processes) for tensor parallelism: each has a part of the heads and
    hidden units."""
    layers_per_device: str | None = None
    """Place whole layers on each GPU instead of splitting them. auto: as many as fit, the rest in
    host memory; or one number per device, such as 20,12."""

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is loaded."""
        return (
            impossible_numbers(self)
            + below_minimum(self, "", 1, "devices")
            + self._layer_problems()
        )

    def _layer_problems(self) -> list[str]:
        """Return a problem if --layers_per_device is not auto or one number per device."""
        layers = self.layers_per_device
        if layers in (None, "auto"):
            return []
        counts = layers.split(",")
        if (
            all(count.strip().isdecimal() for count in counts)
            and len(counts) == self.devices
        ):
            return []
        return [
            f"--layers_per_device {layers}: expected auto, or a number for each of --devices "
            f"{self.devices}, like 20,12"
        ]


@dataclass
class ModelArgs(OpenArgs):
    """Which model to run, and how it generates."""

    # --precision auto is the fastest dtype, also on a CPU; scores need fp32 there
    for_speed: ClassVar[bool] = False

    compile: Literal["auto", "true", "false"] = "auto"
    """Compile prefill and decoding with torch.compile, which takes about 15 seconds at the start.
    On a GPU, the kernels of a token are then launched as one CUDA graph. auto: true on a GPU."""
    max_new_tokens: int | None = None
    """Maximum length of an answer in tokens. Default: from generation_config.json, otherwise
    256."""
    temperature: float | None = None
    """Sampling temperature: higher is more varied, 0 always takes the likeliest token (greedy).
    Default: from generation_config.json; 0.7 if it does not mention sampling, otherwise 1."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only; 0 and -1: from all. Default: from
    generation_config.json, where do_sample without top_k means 50; otherwise off."""
    top_p: float | None = None
    """Sample from the likeliest tokens whose probabilities add up to this. Default: from
    generation_config.json; 0.9 if it does not mention sampling."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the likeliest token's probability. Default:
    from generation_config.json, otherwise off."""
    repetition_penalty: float | None = None
    """Above 1: make tokens of prompt and answer less likely. 1: off. Default: from
    generation_config.json, otherwise 1."""
    presence_penalty: float | None = None
    """Subtract this from the logits of tokens that the answer already contains. Default: 0, off."""
    frequency_penalty: float | None = None
    """Subtract this from the logits of tokens once per occurrence in the answer. Default: 0,
    off."""
    logit_bias: str | None = None
    """Numbers to add to logits, as JSON by token id: '{"262": -100}'."""
    stop: list[str] = field(default_factory=list)
    """Strings that end an answer; they are not part of it, and white space counts. Several: a,b, or
    as JSON if one has a comma: '["\\n\\n", "User:"]'."""
    seed: int | None = None
    """Random seed that makes sampling repeatable. Rounding depends on the other answers of the
    batch, so that a draw may be another token: in fp32 about one in 10,000, in bf16 more. Default:
    different answers each time."""

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is loaded."""
        problems = super().problems() + below_minimum(self, "", 1, "max_new_tokens")
        sampling = {}
        for name in NUMBERS:
            value = getattr(self, name)
            # a flag that was left out has no value to check
            if value is not None:
                sampling[name] = value
        problems += Sampling(**sampling).problems()
        if "" in self.stop:
            problems.append("--stop: an empty string occurs everywhere; leave it out")
        if self.logit_bias is not None and not _is_bias(self.logit_bias):
            problems.append(
                f"--logit_bias {self.logit_bias}: expected JSON such as '{{\"262\": -100}}', "
                "numbers by token id"
            )
        return problems


def _is_bias(text: str) -> bool:
    try:
        biases = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(biases, dict):
        return False
    for key, value in biases.items():
        # JSON has only texts as keys, so the ids are digits
        if not key.isdecimal():
            return False
        if type(value) not in (int, float) or not abs(value) <= LARGEST_NUMBER:
            return False
    return True


@dataclass
class SpeculativeArgs(ModelArgs):
    """The flags of a model that can use speculative decoding."""

    for_speed: ClassVar[bool] = True

    draft_dir: str | None = None
    """A smaller model with the same vocabulary that drafts tokens ahead (speculative decoding). The
    distribution of answers stays the same; decoding is faster if many draft tokens are accepted."""
    lookup: bool = False
    """Draft tokens by looking up repeated text (prompt lookup decoding): faster if answers quote
    the prompt, as in summaries and code."""

    def problems(self) -> list[str]:
        """Return the problems of the model flags, and reject two drafters."""
        problems = super().problems()
        if self.draft_dir and self.lookup:
            problems.append(
                "--draft_dir and --lookup: only one of them can draft tokens; leave the other out"
            )
        return problems


@dataclass
class GenerateArgs(SpeculativeArgs):
    """Complete one prompt or a file of prompts. stdout has the completions only."""

    prompt: str | None = None
    """The prompt to complete."""
    prompts: str | None = None
    """A .jsonl file with a `prompt` (or `messages`) on each line, instead of --prompt."""
    out: str | None = None
    """The file for the completions of --prompts: one JSON object per line, in the order of the
    prompts. Default: stdout."""
    resume: bool = False
    """Continue an unfinished --out file."""
    overwrite: bool = False
    """Replace --out if it exists."""
    batch_size: int = 8
    """Number of answers generated at once; one with --lookup or --draft_dir."""
    num_samples: int = 1
    """Number of answers per prompt."""
    template: Literal["auto", "none"] = "auto"
    """auto: apply the model's chat template, if it has one, to the prompt. none: continue the plain
    text."""

    def problems(self) -> list[str]:
        """Return the problems of the model flags plus those of the prompts and the output file."""
        problems = super().problems() + below_minimum(
            self, "", 1, "batch_size", "num_samples"
        )
        # both, or neither
        if (self.prompt is None) == (self.prompts is None):
            problems.append("give either --prompt TEXT or --prompts FILE.jsonl")
        if self.out and not self.prompts:
            problems.append("--out needs --prompts: a single completion goes to stdout")
        for name in ("resume", "overwrite"):
            if getattr(self, name) and not self.out:
                problems.append(f"--{name} applies only to --out FILE; name one")
        if self.resume and self.overwrite:
            problems.append(
                "--resume continues --out and --overwrite replaces it; leave one out"
            )
        return problems


@dataclass
class ChatArgs(SpeculativeArgs):
    """Chat with a model.

    Without a terminal, read one message per line from stdin and write only the answers to stdout.
    """

    system: str | None = None
    """The system prompt. Default: none."""
    tools: str | None = None
    """The functions that the model may call: a JSON file with a list of them in OpenAI's form, or a
    file of examples, whose first `tools` are used. After a call, type its result. Default: none."""
    debug: bool = False
    """Print exactly what the model reads and generates to stderr, special tokens included."""
