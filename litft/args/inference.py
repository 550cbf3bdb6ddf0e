"""The flags of the commands that open a model and generate: `generate`, `chat`."""

import json
from dataclasses import dataclass, field
from typing import Literal

from litft.args.checks import below, impossible_numbers
from litft.args.sampling import LARGEST_NUMBER, NUMBERS, Sampling


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
class SpeculativeArgs(ModelArgs):
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
class GenerateArgs(SpeculativeArgs):
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
class ChatArgs(SpeculativeArgs):
    """Chat with a model; without a terminal, one message a line on stdin and the answers alone on stdout."""

    system: str | None = None
    """A system message to begin with."""
    debug: bool = False
    """Show on stderr exactly what the model reads and says, its special tokens too."""
