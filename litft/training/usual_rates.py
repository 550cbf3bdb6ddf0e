"""Learning rates by the width of the model: a published rule, and the default of LoRA from it."""

from math import floor, log10

from litft.args import FinetuneArgs
from litft.args.preference import DATA_KINDS
from litft.model.config import Config

# Schulman and Thinking Machines, "LoRA Without Regret", 2025 (thinkingmachines.ai/blog/lora), and
# `get_lr` of its cookbook: the rate of a model 2,000 wide, and the power of 2,000 / width
FULL_RATE = 5e-5
LORA_FACTOR = 10
REFERENCE_WIDTH = 2000
POWER = 0.781  # of Llama
POWER_OF_QWEN = 0.0775
RATE_SOURCE = "LoRA Without Regret, 2025"
# of two small models, 288 and 576 wide, with rank 32: tutorials/finetune_lora.md
HIGHEST_LORA_RATE = 1e-3


def usual_rate(method: str, args: FinetuneArgs, config: Config) -> float | None:
    """Return about the best learning rate for a method and the width of a model; None where no rule
    is known."""
    if method not in ("lora", "full") or DATA_KINDS[args.objective] != "supervised":
        return None
    power = POWER_OF_QWEN if config.model_type.startswith("qwen") else POWER
    rate = FULL_RATE * (REFERENCE_WIDTH / config.dim) ** power
    return rate * LORA_FACTOR if method == "lora" else rate


def default_lora_rate(args: FinetuneArgs, config: Config) -> float | None:
    """Return the default learning rate of LoRA, with two digits; None for objectives that have
    their own."""
    rate = usual_rate("lora", args, config)
    if rate is None:
        return None
    digits = 1 - floor(log10(rate))
    return min(HIGHEST_LORA_RATE, round(rate, digits))
