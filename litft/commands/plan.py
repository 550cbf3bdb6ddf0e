"""The command `plan`: memory and time of fine-tuning a model, from its config.json alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from litft.args import (
    AdapterFinetuneArgs,
    AdapterV2FinetuneArgs,
    FullFinetuneArgs,
    LoRAFinetuneArgs,
    PlanArgs,
)
from litft.args.methods import Quantization
from litft.data.dataset import length_limit
from litft.distributed.devices import num_shards
from litft.methods import Method, method_of
from litft.pretrained.folder import PretrainedFolder, resolve
from litft.training.memory.activations import Shape
from litft.training.memory.communication import (
    Cluster,
    CommunicationVolume,
    communication_volume,
)
from litft.training.memory.flops import check_chip, chip_peak_flops
from litft.training.memory.plan import (
    USABLE_FRACTION,
    Fit,
    Plan,
    fastest,
    format_bytes,
    predict,
)
from litft.training.memory_saving.activation_checkpointing import OF_BLOCKS, RECOMPUTED
from litft.training.run_description import time_line

DEFAULT_CHIP = "H100"
# --longest is exact to so many tokens
STEP = 64
# tokens of the largest micro-batch that --budget tries; larger ones are not faster
MAX_TOKENS = 32768


class PlanOnPaper(NamedTuple):
    """A plan from a config.json alone."""

    source: PretrainedFolder
    method: Method
    tokens: int  # per row
    fit: Fit
    peak: float | None  # FLOP/s of a chip; None if unknown
    # between devices, if there are several
    communication_volume: CommunicationVolume | None


def plan(args: PlanArgs) -> None:
    """Print what fine-tuning a model needs, from its config.json alone."""
    check_chip(args.chip)
    if args.longest:
        print_longest(args)
        return
    with _showing_search(args):
        source, method, tokens, fit, peak, volume = plan_on_paper(args)

    # the settings, and how they differ from the flags
    if args.budget:
        reserve = format_bytes(args.budget_bytes - int(USABLE_FRACTION * args.budget_bytes))
        print(
            f"the fastest settings that fit into {args.budget}, with {reserve} left to CUDA: "
            f"{setting_flags(fit)}"
        )
        if fit.quantize != args.quantize:
            print(
                f"--quantize {fit.quantize}: unquantized weights do not fit, or only with slower "
                "settings"
            )

    # parameters, memory and time
    fit_plan = fit.plan
    num_devices = args.devices * args.num_nodes
    flops = fit_plan.flops.for_lengths([tokens], [tokens]) / tokens * args.tokens
    what = f"{args.tokens:,} tokens, all supervised, in examples of {tokens:,}"
    print(f"{source.folder}: {fit_plan.title_line(method.title)}")
    print(f"memory{'' if num_devices == 1 else ' of each'}: {fit_plan.memory.line()}")
    # a budget of memory may be that of any GPU, so it names no time by itself
    if args.chip or not args.budget:
        print(
            time_line(
                flops, fit.slowdown, what, args.chip or DEFAULT_CHIP, peak, num_devices
            )
        )
    else:
        print("--chip NAME adds the time on a GPU of this memory, such as RTX 4090 or A100")
    if volume:
        print(volume.line(args.micro_batches))


@contextmanager
def _showing_search(args: PlanArgs) -> Iterator[None]:
    """Within the context, a terminal shows that settings are tried, which takes seconds to a
    minute."""
    if not args.budget:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"trying what fits into {args.budget}"):
        yield


def model_and_method(args: PlanArgs) -> tuple[PretrainedFolder, Method]:
    """Return the model, and the method with its targets chosen."""
    finetuning = {
        "lora": LoRAFinetuneArgs(lora=args.lora),
        "adapter": AdapterFinetuneArgs(adapter=args.adapter),
        "adapter_v2": AdapterV2FinetuneArgs(adapter=args.adapter),
        "full": FullFinetuneArgs(),
    }
    source = resolve(args.source_dir)
    method = method_of(finetuning[args.method])
    if source.adapter:
        raise ValueError(
            f"{source.adapter} is an adapter; pass its base, {source.base}, and the method's flags"
        )
    method.select_targets(source.outline, source.adapter_rules)
    return source, method


def planner(
    args: PlanArgs, source: PretrainedFolder, method: Method, tokens: int
) -> Callable[[int, str, str, str], Plan]:
    """Return the function from rows, recomputation, quantization and offload to the plan of rows of
    so many tokens."""
    shards = num_shards(args, args.strategy)

    def make_plan(rows: int, recomputed: str, quantize: str, offload: str) -> Plan:
        shape = Shape(rows, tokens, args.micro_batches > 1)
        options = {"cpu_offload": offload, "shards": shards}
        return predict(
            source,
            method,
            args.precision,
            quantize,
            shape,
            args.optimizer,
            recomputed,
            **options,
        )

    return make_plan


class LongestRow(NamedTuple):
    """The longest row that fits into a budget, and the settings with which it fits."""

    source: PretrainedFolder
    method: Method
    tokens: int
    fit: Fit


def open_quantizations(args: PlanArgs) -> list[Quantization]:
    """Return the quantizations that the flags leave open, the fastest first: theirs, and nf4 for
    frozen weights that are neither quantized, offloaded nor sharded."""
    is_plain = args.quantize == "none" and args.cpu_offload == "none"
    if is_plain and args.method != "full" and args.strategy == "ddp":
        return ["none", "nf4"]
    return [args.quantize]


def print_longest(args: PlanArgs) -> None:
    """Print the longest row that fits into --budget, and the flags that make it fit.

    Raises ValueError if not even a short one fits.
    """
    with _showing_search(args):
        source, method, longest, fit = longest_row(args)
    print(f"{source.folder}: {fit.plan.title_line(method.title)}")
    context = source.config.max_positions
    note = f" (the model reads at most {context:,})" if longest > context else ""
    print(
        f"the longest row that fits into {args.budget}: {longest:,} tokens{note}, "
        f"{setting_flags(fit)}"
    )
    if fit.quantize != args.quantize:
        print(f"--quantize {fit.quantize}: unquantized weights do not fit")
    print(f"memory: {fit.plan.memory.line()}")


def _smallest(
    make_plan: Callable[[int, str, str, str], Plan],
    quantize: Quantization,
    offload: str,
    recomputed: str | None,
) -> Fit:
    """Return the way of recomputing blocks that needs the least memory for one row; recomputed:
    that of the flags, if they name it."""
    if recomputed:
        kinds = (recomputed,)
    # offloaded weights are fetched for whole blocks
    elif offload == "parameters":
        kinds = ("full",)
    else:
        kinds = OF_BLOCKS
    fits = []
    for kind in kinds:
        fits.append(Fit(1, kind, quantize, offload, make_plan(1, kind, quantize, offload)))
    return min(fits, key=lambda fit: fit.plan.memory.peak)


def longest_row(args: PlanArgs, at_most: int | None = None) -> LongestRow:
    """Return the longest row that fits into --budget, to a multiple of `STEP` tokens.

    No row of more than `at_most` tokens is tried.

    Raises ValueError if not even a short one fits.
    """
    source, method = model_and_method(args)
    budget = int(USABLE_FRACTION * args.budget_bytes)
    offload = "activations" if args.may_offload_activations else args.cpu_offload

    @cache
    def fit_of(tokens: int, quantize: Quantization) -> Fit:
        make_plan = planner(args, source, method, tokens)
        return _smallest(make_plan, quantize, offload, args.activation_checkpointing)

    longest = STEP
    quantizations = open_quantizations(args)
    quantize = quantizations[-1]
    for kind in quantizations:
        if fit_of(longest, kind).plan.memory.peak <= budget:
            quantize = kind
            break

    def peak(tokens: int) -> int:
        return fit_of(tokens, quantize).plan.memory.peak

    if peak(longest) > budget:
        needed = format_bytes(round(peak(longest) / USABLE_FRACTION))
        raise ValueError(
            f"--budget {args.budget}: a row of {longest} tokens needs {needed}; choose another "
            "--quantize or --method"
        )
    if at_most is None:
        too_long = 2 * longest
        while peak(too_long) <= budget:
            longest, too_long = too_long, 2 * too_long
    elif peak(at_most) <= budget:
        return LongestRow(source, method, at_most, fit_of(at_most, quantize))
    else:
        too_long = at_most
    # the peak grows nearly by the same bytes with each token, so that few rows are tried; every
    # second one is in the middle, in case it does not
    in_the_middle = False
    while too_long - longest > STEP:
        share = 0.5
        if not in_the_middle:
            share = (budget - peak(longest)) / (peak(too_long) - peak(longest))
        steps = (too_long - longest) // STEP
        tokens = longest + STEP * min(max(1, int(share * steps)), steps - 1)
        if peak(tokens) <= budget:
            longest = tokens
        else:
            too_long = tokens
        in_the_middle = not in_the_middle
    return LongestRow(source, method, longest, fit_of(longest, quantize))


def plan_on_paper(args: PlanArgs) -> PlanOnPaper:
    """Return the plan with the settings of the flags, or the fastest that fit.

    Raises ValueError if none fit.
    """
    source, method = model_and_method(args)
    source.check_length("--max_seq_length", args.max_seq_length)
    tokens = length_limit(args.max_seq_length, source.config.max_positions)
    shards = num_shards(args, args.strategy)
    make_plan = planner(args, source, method, tokens)

    # the settings: the flags', or the fastest
    if args.budget:
        fit = within_budget(args, tokens, make_plan)
    else:
        kind = args.activation_checkpointing or (
            "none" if args.cpu_offload == "none" else "full"
        )
        rows = args.micro_batch_size or 1
        only_plan = make_plan(rows, kind, args.quantize, args.cpu_offload)
        fit = Fit(rows, kind, args.quantize, args.cpu_offload, only_plan)

    # the communication between devices
    peak = chip_peak_flops(args.chip or DEFAULT_CHIP, args.precision)
    volume = None
    if args.devices * args.num_nodes > 1 and peak:
        cluster = Cluster(
            args.devices,
            args.num_nodes,
            shards,
            args.node_gbs * 1e9,
            args.network_gbs * 1e9,
        )
        batch_flops = fit.plan.flops.for_lengths([tokens] * fit.rows, [tokens] * fit.rows)
        volume = communication_volume(
            fit.plan, cluster, args.micro_batches, batch_flops, fit.slowdown, peak
        )
    return PlanOnPaper(source, method, tokens, fit, peak, volume)


def within_budget(
    args: PlanArgs, tokens: int, make_plan: Callable[[int, str, str, str], Plan]
) -> Fit:
    """Return the fastest settings that fit, among those that the flags leave open.

    Raises ValueError if none fit.
    """
    rows = _open_rows(args, tokens)
    if args.activation_checkpointing:
        kinds = [args.activation_checkpointing]
    else:
        kinds = list(RECOMPUTED)
        # both replace what autograd saves
        if args.cpu_offload == "activations":
            kinds.remove("elementwise")
    of_blocks = [kind for kind in OF_BLOCKS if kind in kinds]
    weight_options = [(quantize, args.cpu_offload) for quantize in open_quantizations(args)]
    # with several options weights are frozen, plain and whole, so they may be offloaded, too; that
    # is slowest, so it comes last
    if len(weight_options) > 1 and "full" in kinds and args.devices * args.num_nodes == 1:
        weight_options.append(("none", "parameters"))
    budget = int(USABLE_FRACTION * args.budget_bytes)
    fit, smallest = fastest(make_plan, rows, kinds, weight_options, budget)
    # the last resort: only the inputs of blocks are saved, and they wait in host memory
    if fit is None and args.may_offload_activations and of_blocks:
        # weights that would be offloaded stay, so that one of the options may be there twice
        options = [(quantize, "activations") for quantize, offload in weight_options]
        last = fastest(make_plan, rows[:1], of_blocks, list(dict.fromkeys(options)), budget)
        fit = last[0]
        smallest = min(smallest, last[1], key=lambda fit: fit.plan.memory.peak)
    if fit is None:
        minimum = (
            f"{format_bytes(round(smallest.plan.memory.peak / USABLE_FRACTION))} with "
            f"{setting_flags(smallest)}"
        )
        remedy = "shorten --max_seq_length, or choose another method"
        if (args.micro_batch_size or 1) > 1:
            remedy = f"set --micro_batch_size 1, {remedy}"
        raise ValueError(f"--budget {args.budget}: this needs at least {minimum}; {remedy}")
    return fit


def _open_rows(args: PlanArgs, tokens: int) -> list[int]:
    """Return the micro-batch sizes that the flags leave open."""
    if args.micro_batch_size:
        return [args.micro_batch_size]
    rows = []
    for count in (1, 2, 4, 8, 16, 32):
        if count == 1 or count * tokens <= MAX_TOKENS:
            rows.append(count)
    return rows


def setting_flags(fit: Fit) -> str:
    """Return the settings as flags of a fine-tuning command."""
    flags = [
        f"--train.micro_batch_size {fit.rows}",
        f"--train.activation_checkpointing {fit.recomputed}",
    ]
    if fit.quantize != "none":
        flags.append(f"--quantize {fit.quantize}")
    if fit.cpu_offload != "none":
        flags.append(f"--train.cpu_offload {fit.cpu_offload}")
    return " ".join(flags)
