"""The flags of the methods."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from litft.args.checks import LARGEST, LARGEST_SIZE


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
