"""The flags of the fine-tuning methods."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from litft.args.value_checks import LARGEST, LARGEST_SIZE

# how the frozen weights of the base are stored: 4 or 8
# bits; -dq: with quantized scales (arXiv 2305.14314)
Quantization = Literal["none", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8"]


@dataclass
class LoRAArgs:
    """LoRA, low-rank adaptation (arXiv 2106.09685)."""

    r: int = 32
    """The rank of the low-rank update of each adapted weight."""
    alpha: float | None = None
    """Scaling numerator: the update is multiplied by alpha / r. Default: a multiple of the rank, so
    that the update is multiplied by 2."""
    dropout: float = 0.0
    """Dropout probability on the input of the update, during training only."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Modules to adapt: names or patterns, in litft's or the checkpoint's naming (q_proj,
    blocks.1?.mlp.*, embed, lm_head), or all-linear: every Linear, experts included, except the
    output head, the expert routers and the out_proj of Mamba-2."""
    rank_pattern: list[str] = field(default_factory=list)
    """Different ranks for some targets, NAME=RANK (down_proj=16,blocks.0.*=4). The first match
    wins."""
    alpha_pattern: list[str] = field(default_factory=list)
    """Different alphas for some targets, NAME=ALPHA. The first match wins."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r (rsLoRA, arXiv 2312.03732)."""
    dora: bool = False
    """Also train the magnitude of each row of the adapted weights (DoRA, arXiv 2402.09353)."""
    init: Literal["default", "pissa", "olora"] = "default"
    """Initialization of the factors. default: A random, B zero; pissa: the top singular vectors of
    the weight (PiSSA, arXiv 2404.02948); olora: its QR decomposition (OLoRA, arXiv 2406.01775)."""
    lr_ratio: float = 1.0
    """Learning rate of B divided by that of A (LoRA+, arXiv 2402.12354, which recommends 16)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules to train fully and save with the adapter: names or patterns (embed, lm_head,
    norm)."""
    bias: Literal["none", "lora", "all"] = "none"
    """Biases of the base model to train: none, those of the adapted Linears (lora), or all."""

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is loaded."""
        problems = []
        if not 1 <= self.r <= LARGEST_SIZE:
            problems.append(
                f"--lora.r {self.r}: must be at least 1 and at most {LARGEST_SIZE:,}"
            )
        if self.alpha is not None and self.alpha <= 0:
            problems.append(f"--lora.alpha {self.alpha}: must be above 0")
        if not 0 <= self.dropout < 1:
            problems.append(f"--lora.dropout {self.dropout}: must lie in [0, 1)")
        if not self.targets:
            problems.append(
                "--lora.targets is empty: name at least one Linear, or all-linear"
            )
        if self.lr_ratio <= 0:
            problems.append(f"--lora.lr_ratio {self.lr_ratio}: must be above 0")
        for flag in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, flag):
                reason = _pattern_error(pattern, flag)
                if reason:
                    problems.append(f"--lora.{flag} {pattern}: {reason}")
        return problems


def _pattern_error(text: str, flag: str) -> str | None:
    """Return what is wrong with a NAME=NUMBER pattern, or None."""
    # the last =, since the pattern may contain others
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        # text that is no number fails the check of the range
        value = 0.0
    # a rank is a size of a matrix, an alpha only a factor
    if flag == "rank_pattern":
        maximum = LARGEST_SIZE
        expected = f"a whole number from 1 to {maximum:,}"
    else:
        maximum = LARGEST
        expected = "a number above 0"
    is_valid = (
        name and 0 < value <= maximum and (value.is_integer() or flag != "rank_pattern")
    )
    if is_valid:
        return None
    return f"expected NAME={expected}"


@dataclass
class AdapterArgs:
    """LLaMA-Adapter (arXiv 2303.16199)."""

    min_prompt_length: ClassVar[int] = 1
    prompt_length: int = 10
    """Number of trained prefix vectors that each layer's attention sees in addition to the
    tokens."""
    start_layer: int = 2
    """The first layer with a prefix, counted from 0."""

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is loaded."""
        problems = []
        if not self.min_prompt_length <= self.prompt_length <= LARGEST_SIZE:
            bounds = f"at least {self.min_prompt_length} and at most {LARGEST_SIZE:,}"
            problems.append(
                f"--adapter.prompt_length {self.prompt_length}: must be {bounds}"
            )
        if self.start_layer < 0:
            problems.append(
                f"--adapter.start_layer {self.start_layer}: must not be negative"
            )
        return problems


@dataclass
class AdapterV2Args(AdapterArgs):
    """LLaMA-Adapter v2 (arXiv 2304.15010)."""

    min_prompt_length: ClassVar[int] = 0
    prompt_length: int = 10
    """Number of trained prefix vectors that each layer's attention sees in addition to the tokens.
    0: no prefix, so that the result can be merged."""
    bias: bool = True
    """Train a bias for each Linear in addition to its scale. false: allows merging in families
    without biases."""
