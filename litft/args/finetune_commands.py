"""The flags of fine-tuning, one class for each method."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from litft.args.finetune import FinetuneArgs
from litft.args.methods import AdapterArgs, AdapterV2Args, LoRAArgs


@dataclass
class LoRAFinetuneArgs(FinetuneArgs):
    """Fine-tune with LoRA: train low-rank updates of frozen weights."""

    lora: LoRAArgs = field(default_factory=LoRAArgs)

    def problems(self) -> list[str]:
        """Return the problems of the common flags plus those of the LoRA flags."""
        return super().problems() + self.lora.problems()


@dataclass
class AdapterFinetuneArgs(FinetuneArgs):
    """Fine-tune with LLaMA-Adapter: train prefixes for attention, with gates initialized to
    zero."""

    default_learning_rate: ClassVar[float] = 2e-2

    adapter: AdapterArgs = field(default_factory=AdapterArgs)

    def problems(self) -> list[str]:
        """Return the problems of the common flags plus those of the adapter flags."""
        return super().problems() + self.adapter.problems()


@dataclass
class AdapterV2FinetuneArgs(FinetuneArgs):
    """Fine-tune with LLaMA-Adapter v2: train prefixes, a scale and bias for every Linear, and the
    norms."""

    default_learning_rate: ClassVar[float] = 1e-3

    adapter: AdapterV2Args = field(default_factory=AdapterV2Args)

    def problems(self) -> list[str]:
        """Return the problems of the common flags plus those of the adapter flags."""
        return super().problems() + self.adapter.problems()


@dataclass
class FullFinetuneArgs(FinetuneArgs):
    """Fine-tune all weights of the model."""

    default_learning_rate: ClassVar[float] = 5e-5

    precision: Literal["auto", "bf16", "bf16-true", "fp16", "fp32"] = "auto"
    """The dtype of the computation; weights and optimizer state stay fp32. bf16-true: weights are
    bf16 too, with stochastic rounding so that no update is lost. fp16 scales the loss. auto: on a
    GPU with bf16 arithmetic, bf16, or bf16-true if memory does not suffice; fp16 on a T4, V100 or
    RTX 20; otherwise fp32."""

    def problems(self) -> list[str]:
        """Return the problems of the common flags, and reject quantization: no weights are
        frozen."""
        problems = super().problems()
        if self.quantize != "none":
            reason = (
                "full fine-tuning cannot train quantized weights: an update is smaller than their "
                "4- or 8-bit steps"
            )
            problems.append(
                f"--quantize {self.quantize}: {reason}; use finetune/lora.py (QLoRA), or leave it "
                "out"
            )
        return problems


FINETUNE: dict[str, type[FinetuneArgs]] = {  # by method name
    "lora": LoRAFinetuneArgs,
    "adapter": AdapterFinetuneArgs,
    "adapter_v2": AdapterV2FinetuneArgs,
    "full": FullFinetuneArgs,
}
