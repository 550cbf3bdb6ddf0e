"""The flags of the commands that write model folders: merge, convert, export."""

from dataclasses import dataclass, field
from typing import Literal

from litft.args.value_checks import impossible_numbers


@dataclass
class WriteArgs:
    """Where and how a model folder is written."""

    out_dir: str | None = None
    """The folder to write; it must not exist or be empty."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """The dtype of the written weights; merging computes in fp32. auto: the dtype of the base
    model."""
    shard_gb: float = 5.0
    """Maximum size of a weight file in GB (10^9 bytes). Memory use stays near the size of one
    file."""

    @property
    def target_dir(self) -> str:
        """--out_dir, which `problems` requires."""
        assert self.out_dir is not None
        return self.out_dir

    def problems(self) -> list[str]:
        """Return the problems of the target folder and the shard size."""
        problems = impossible_numbers(self)
        if not self.out_dir:
            problems.append("--out_dir is missing: name the folder to write to")
        if self.shard_gb <= 0:
            problems.append(f"--shard_gb {self.shard_gb}: must be above 0")
        return problems


@dataclass
class ConvertArgs(WriteArgs):
    """Convert a model folder to safetensors of one dtype, and compare every written tensor with its
    source."""

    checkpoint_dir: str | None = None
    """The folder to read."""
    family: str | None = None
    """Read config.json as this model_type, such as llama, if the folder's own model_type is unknown
    but means the same network. Names and shapes of all tensors must fit. The written folder has
    this model_type."""

    @property
    def source_dir(self) -> str:
        """--checkpoint_dir, which `problems` requires."""
        assert self.checkpoint_dir is not None
        return self.checkpoint_dir

    def problems(self) -> list[str]:
        """Return the problems of source and target."""
        if self.checkpoint_dir:
            missing = []
        else:
            missing = ["--checkpoint_dir is missing: name the model folder to convert"]
        return missing + super().problems()


@dataclass
class MergedArgs(WriteArgs):
    """What adapters are merged into."""

    base_dir: str | None = None
    """The folder of the base model, if it has moved. Default: the path stored with the adapter."""
    dequantized_base: bool = False
    """Merge into the dequantized weights that the adapter was trained on (--quantize), not into the
    original weights."""
    multimodal: bool = False
    """If the base is a multimodal model: write all of it, with the tensors outside of the language
    model unchanged. false: write the language model alone. For a fully fine-tuned model, --base_dir
    names the multimodal folder."""
    quantize: Literal["none", "fp8"] = "none"
    """Store the weights of Linears in 8 bits, one scale a row, in the format of compressed-tensors,
    for vLLM; it scales activations while it runs. Head, routers and experts are not quantized."""

    def problems(self) -> list[str]:
        """Return the problems of the target, and of what cannot be quantized."""
        problems = super().problems()
        if self.quantize == "fp8" and self.multimodal:
            problems.append(
                "--quantize fp8 writes the language model alone: leave --multimodal out"
            )
        if self.quantize == "fp8" and self.precision == "fp16":
            problems.append(
                "--quantize fp8 has scales in bf16 or fp32: pass another --precision"
            )
        return problems


@dataclass
class MergeArgs(MergedArgs):
    """Merge an adapter, or several of the same base, into the base model and write the result as a
    model folder."""

    checkpoint_dir: list[str] = field(default_factory=list)
    """An adapter folder or a run folder; several are combined. Default: the newest finished run
    in out/ itself."""
    weights: list[float] = field(default_factory=list)
    """The factor of each adapter's change, such as 0.7,0.3. Default: 1 for each."""
    combination: Literal["linear", "ties"] = "linear"
    """How changes of several adapters are combined. linear: their weighted sum. ties: of each, only
    the largest changes are kept, and of these the ones with the sign that most of them have, by
    sum; their weighted mean is added (TIES, arXiv 2306.01708)."""
    density: float = 0.5
    """With --combination ties: the share of each weight matrix's changes that is kept."""

    def problems(self) -> list[str]:
        """Return the problems of the target, and of the number of weights."""
        problems = super().problems()
        count = max(1, len(self.checkpoint_dir))
        if self.weights and len(self.weights) != count:
            problems.append(
                f"--weights has {len(self.weights)} numbers for {count} adapters: pass one for each"
            )
        if self.dequantized_base and count == 1 and self.weights not in ([], [1.0]):
            problems.append(
                "--weights scales the update, and --dequantized_base also changes the base's "
                "weights; leave one of them out"
            )
        if self.dequantized_base and count > 1:
            problems.append(
                "--dequantized_base is for one adapter: the quantized weights of several need not "
                "be the same; leave it out"
            )
        if self.combination == "ties" and count < 2:
            problems.append(
                "--combination ties needs several adapters: --checkpoint_dir A,B"
            )
        if not 0 < self.density <= 1:
            problems.append(f"--density {self.density}: must be above 0 and at most 1")
        elif self.combination == "linear" and self.density != 0.5:
            problems.append(
                "--density is for --combination ties: add it, or leave --density out"
            )
        return problems


@dataclass
class ExportArgs(MergedArgs):
    """Export a run, finished or not, or one of its checkpoints as a folder that Hugging Face
    libraries can load."""

    checkpoint_dir: str | None = None
    """A run folder, its final/, or one of its checkpoints/step-NNNNNN. Default: the newest finished
    run in out/ itself."""
    merge: bool = True
    """Write the merged model. false: write only the adapter, in PEFT's format."""
    text_names: bool = False
    """With --merge false: write an adapter of a multimodal base for transformers' text class, not
    for the multimodal one."""

    def problems(self) -> list[str]:
        """Return the problems of the target, and of flags that only apply to merging or to
        adapters."""
        problems = super().problems()
        if self.merge and self.text_names:
            problems.append("--text_names is about adapters: add --merge false")
        # flags that change what is merged
        if not self.merge and (
            self.dequantized_base
            or self.multimodal
            or self.precision != "auto"
            or self.quantize != "none"
        ):
            flags = "--dequantized_base, --multimodal, --quantize and --precision"
            problems.append(
                f"--merge false writes the adapter unchanged: leave {flags} out"
            )
        return problems


@dataclass
class GgufConvertArgs(WriteArgs):
    """Convert a llama.cpp GGUF file to a model folder, with tokenizer and chat template."""

    checkpoint_dir: str | None = None
    """A .gguf file (of a split file, its first part), or the folder that contains it."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """The dtype of the written weights. auto: the dtype of the file, or bf16 if its weights are
    quantized."""

    @property
    def source_dir(self) -> str:
        """--checkpoint_dir, which `problems` requires."""
        assert self.checkpoint_dir is not None
        return self.checkpoint_dir

    def problems(self) -> list[str]:
        """Return the problems of source and target."""
        if self.checkpoint_dir:
            missing = []
        else:
            missing = ["--checkpoint_dir is missing: name the .gguf file to convert"]
        return missing + super().problems()


@dataclass
class GgufExportArgs:
    """Export a run or model folder as a GGUF file for llama.cpp and Ollama: the merged model, or a
    LoRA adapter alone."""

    checkpoint_dir: str | None = None
    """A run folder, one of its checkpoints, or a model or adapter folder. Default: the newest
    finished run in out/ itself."""
    base_dir: str | None = None
    """The folder of the base model, if it has moved. Default: the path stored with the adapter."""
    out_dir: str | None = None
    """The folder to write; it must not exist or be empty."""
    outtype: Literal[
        "auto", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "mxfp4"
    ] = "auto"
    """The data type of matrices, or one of llama.cpp's mixtures (q4_k_m: 4.8 bits a weight). auto:
    bf16 if the folder has bf16 weights, otherwise f16; f32 for an adapter."""
    merge: bool = True
    """Write the merged model. false: write only the LoRA adapter, for llama.cpp's --lora."""
    dequantized_base: bool = False
    """Merge into the dequantized weights that the adapter was trained on (--quantize), not into the
    original weights."""

    @property
    def target_dir(self) -> str:
        """--out_dir, which `problems` requires."""
        assert self.out_dir is not None
        return self.out_dir

    def problems(self) -> list[str]:
        """Return the problems of the target, and of flags that only apply to merging."""
        if self.out_dir:
            problems = []
        else:
            problems = ["--out_dir is missing: name the folder to write to"]
        if not self.merge and self.dequantized_base:
            problems.append(
                "--merge false writes the adapter unchanged: leave --dequantized_base out"
            )
        return problems
