"""The flags of the commands that write model folders: merging and converting."""

from dataclasses import dataclass
from typing import Literal

from litft.args.checks import impossible_numbers


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
