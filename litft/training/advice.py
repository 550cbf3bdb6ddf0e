"""What a run would set, and why: rules of thumb for its data and its model, each with its source.
`--dry_run` prints them; every run prints a warning of settings that are known to fail."""

import math
from collections.abc import Iterator

from litft.args import LoRAFinetuneArgs
from litft.args.preference import DATA_KINDS
from litft.training.data_report import FEW_STEPS as WARNED_STEPS
from litft.training.data_report import count_of
from litft.training.run_setup import RunSetup, default_rate
from litft.training.schedule import Schedule
from litft.training.usual_rates import LORA_FACTOR, RATE_SOURCE, usual_rate

# so many times more or less than the rule is far outside of what was ever found best
FAR = 8
# Allen-Zhu and Li, 2024 (arXiv 2404.05405): bits that a parameter holds
BITS_PER_PARAMETER = 2
# a token of an instruction's answer has about one bit that the model does not know
BITS_PER_TOKEN = 1
RANKS = (8, 16, 32, 64, 128, 256)
# Muennighoff et al., 2023 (arXiv 2305.16264): repeating data more often adds little
MOST_EPOCHS = 4
MANY_EXAMPLES = 1000  # fewer need more epochs for enough steps
FEW_STEPS = 100


def advice_lines(setup: RunSetup, schedule: Schedule) -> Iterator[str]:
    """Yield what is usual, with the reason, beside what is set; of examples with answers only."""
    if DATA_KINDS[setup.args.objective] != "supervised":
        return
    yield "what is usual for this model and this data:"
    rate = usual_rate(setup.method.name, setup.args, setup.source.config)
    if rate is not None:
        yield (
            f"  learning rate: about {rate:.1g} for {setup.method.title} on a model "
            f"{setup.source.config.dim:,} wide ({RATE_SOURCE}); it is "
            f"{setup.args.train.learning_rate:g}"
        )
    yield from _rank_line(setup, schedule)
    yield from _epochs_line(setup, schedule)
    longest = int(schedule.data.train.lengths.max())
    yield (
        f"  length limit: {longest:,} tokens, as the longest example that is left; it is "
        f"{schedule.data.limit:,}"
    )
    yield "  these are rules of thumb; litft sweep compares settings on your data"


def _epochs_line(setup: RunSetup, schedule: Schedule) -> Iterator[str]:
    """Yield how often the examples should be seen, and the batch size that gives enough steps."""
    epochs = schedule.epochs
    steps = count_of(schedule.steps, "step")
    text = (
        f"  epochs: up to {MOST_EPOCHS}, after which repeated data teaches little (Muennighoff et "
        f"al., 2023); it is {epochs:.3g}, with {steps}"
    )
    # for very few steps, a warning has the flags
    if schedule.steps < WARNED_STEPS and schedule.is_by_epochs:
        yield f"{text}, which is few: see the warning below"
        return
    batch = MOST_EPOCHS * schedule.order.epoch_size // FEW_STEPS
    if schedule.steps < FEW_STEPS and batch < setup.args.train.global_batch_size:
        text += (
            f"; a smaller --train.global_batch_size, {max(1, batch)}, has about {FEW_STEPS} steps "
            f"in {MOST_EPOCHS} epochs"
        )
    yield text


def _rank_line(setup: RunSetup, schedule: Schedule) -> Iterator[str]:
    """Yield how much the adapters can hold, and how much there is to learn."""
    if not isinstance(setup.args, LoRAFinetuneArgs):
        return
    learned = int(schedule.data.train.supervised.sum()) * BITS_PER_TOKEN
    rank = setup.args.lora.r
    parameters = sum(math.prod(shape) for shape in setup.shapes().values())
    enough = None
    # the run's own rank may be less than the usual ones
    for candidate in sorted({*RANKS, rank}):
        if parameters * candidate / rank * BITS_PER_PARAMETER >= learned:
            enough = candidate
            break
    if enough is None:
        usual = f"more than {RANKS[-1]}, or full fine-tuning,"
    else:
        usual = f"{enough} is enough"
    yield (
        f"  rank: {usual} for {learned:,} learned tokens, of {BITS_PER_TOKEN} bit each at "
        f"{BITS_PER_PARAMETER} bits a parameter (Allen-Zhu and Li, 2024); it is {rank}, with "
        f"{parameters:,} parameters"
    )


def warnings_of_settings(setup: RunSetup, schedule: Schedule) -> Iterator[str]:
    """Yield warnings of settings that are known to fail."""
    rate = setup.args.train.learning_rate
    usual = usual_rate(setup.method.name, setup.args, setup.source.config)
    # the defaults are measured
    is_default = rate == default_rate(setup.args, setup.objective, setup.source)
    if usual is not None and rate is not None and not is_default:
        if setup.method.name == "lora":
            method = "LoRA"
            largest = FAR * usual
        else:
            method = "full fine-tuning"
            largest = FAR * LORA_FACTOR * usual
        if rate > largest:
            yield (
                f"warning: --train.learning_rate {rate:g} is far too high: {method} "
                f"usually takes about {usual:.1g} here ({RATE_SOURCE})"
            )
        elif rate > FAR * usual:
            yield (
                f"warning: --train.learning_rate {rate:g} is a rate for LoRA; full fine-tuning "
                f"usually takes about {usual:.1g} here ({RATE_SOURCE})"
            )
        elif rate < usual / FAR and setup.method.name == "lora":
            yield (
                f"warning: --train.learning_rate {rate:g} is a rate for full fine-tuning; LoRA "
                f"usually takes about {usual:.1g} here ({RATE_SOURCE})"
            )
    epochs = schedule.epochs
    is_watched = setup.args.save.best or setup.args.eval.patience
    many = len(schedule.data.train) >= MANY_EXAMPLES
    if epochs > MOST_EPOCHS and many and not is_watched:
        yield (
            f"warning: {epochs:.3g} epochs of {len(schedule.data.train):,} examples may learn them "
            "by heart; add --save.best, which keeps the weights with the lowest validation loss"
        )
