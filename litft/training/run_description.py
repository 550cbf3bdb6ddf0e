"""What a run is, as text: its title, data and plan, the first lines of every run."""

from collections.abc import Iterator

import torch

from litft.args import FinetuneArgs
from litft.args.ignored import ignored_flags
from litft.checkpoints.hub import downloaded_from
from litft.data.sources import notes_on_sources
from litft.distributed.devices import lacks_bf16, malloc_name, no_gpu_line, num_shards
from litft.model.mixers import kernels
from litft.training.advice import warnings_of_settings
from litft.training.data_report import count_of, data_lines
from litft.training.intervals import (
    FEWEST_VALIDATIONS,
    validation_cost,
    validation_interval,
)
from litft.training.memory.communication import UTILIZATION
from litft.training.memory.flops import peak_flops
from litft.training.memory.plan import format_bytes, process_line
from litft.training.planned_run import DeviceSettings, PlannedRun
from litft.training.run_setup import RunSetup
from litft.training.schedule import Schedule
from litft.training.teacher_report import teacher_flops, teacher_lines

# a CPU without bf16 arithmetic is slower in bf16 by at least this factor
SLOW_BF16 = 1.5

STRATEGIES = {
    "ddp": "each device holds all of the weights",
    "fsdp": "each device holds a part of the weights and of the optimizer's state",
    "hsdp": "each device holds a part of the weights and of the optimizer's state, and each {size} "
    "devices all of them",
}


def run_title(setup: RunSetup) -> str:
    """What is trained, and how."""
    source = setup.source
    repo = downloaded_from(source.folder)
    if repo:
        name = repo.name
    else:
        name = source.name
    return f"{method_title(setup)} on {name}"


def method_title(setup: RunSetup) -> str:
    """The method, and the objective if it is not the supervised one."""
    objective = setup.objective
    if objective.name == "sft":
        return setup.method.title
    return f"{setup.method.title}, {objective.title}"


def description(run: PlannedRun, peak: float | None) -> list[str]:
    """The data and the plan, with warnings: what a run prints before it reads the weights."""
    setup = run.setup
    schedule = run.schedule
    args = setup.args
    lines = []
    lines += device_lines(setup, run.settings)
    lines += [*data_lines(schedule, setup.tokenizer), *plan_lines(run, peak)]
    if setup.source.adapter:
        lines.append(
            "training continues from this adapter, with its ranks, targets and tokens"
        )
        lines += filter(None, [setup.source.quantization_warning(setup.quantize)])

    lines += warnings_of_settings(setup, schedule)
    lines += notes_on_flags(setup, schedule)
    if (
        setup.quantize != "none"
        and run.settings.device.type == "cpu"
        and args.eval.max_new_tokens
    ):
        lines.append(
            "note: on a CPU, quantized weights are dequantized again for each token, so the sample "
            "answers take long; --eval.max_new_tokens 0 leaves them out"
        )
    if args.eval.exact_match and not len(schedule.data.val):
        lines.append(
            "note: --eval.exact_match has no effect: nothing is held out for validation"
        )

    # tokens that the method cannot teach
    tokens = setup.untrained_tokens(schedule.data.special_ids)
    if tokens:
        remedy = f"--data.new_tokens '{','.join(tokens)}' trains them"
        lines.append(
            f"warning: the embeddings of the template's {', '.join(tokens)} look untrained; "
            f"{remedy}"
        )
    validations = num_validations(args, schedule)
    if (args.save.best or args.eval.patience) and validations < FEWEST_VALIDATIONS:
        flag = "--save.best" if args.save.best else "--eval.patience"
        count = count_of(validations, "validation")
        lines.append(
            f"warning: {flag} chooses among {count} during training; lower --eval.interval"
        )
    return lines


def notes_on_flags(setup: RunSetup, schedule: Schedule) -> Iterator[str]:
    """Yield notes on flags that have no effect, because of other flags, of the chat template or of
    the number of steps."""
    args = setup.args
    yield from ignored_flags(args)
    yield from notes_on_sources(args.data)
    # the template of a single file may print the date, too
    prints_date = setup.tokenizer.uses_date or args.data.has_file_templates
    if args.data.date and (schedule.data.is_plain_text or not prints_date):
        yield f"note: --data.date {args.data.date} has no effect: the chat template prints no date"
    yield from setup.method.ignored_flags()
    steps = schedule.steps
    warmup_steps = args.train.warmup_steps
    if warmup_steps is not None and warmup_steps > steps:
        yield (
            f"warning: --train.warmup_steps {warmup_steps:,} is more than the run's "
            f"{count_of(steps, 'step')}: the learning rate never reaches its full value"
        )
    interval = args.eval.interval
    if args.eval.patience and interval is not None and interval >= steps:
        yield (
            f"note: --eval.patience {args.eval.patience} has no effect: --eval.interval "
            f"{interval:,} validates only before and after the {count_of(steps, 'step')}"
        )


def device_lines(setup: RunSetup, settings: DeviceSettings) -> list[str]:
    """What a user may not have noticed of the device."""
    if setup.args.accelerator == "auto" and settings.device.type == "cpu":
        return [no_gpu_line()]
    return []


def num_validations(args: FinetuneArgs, schedule: Schedule) -> int:
    """The number of validations after steps of the run."""
    interval = validation_interval(
        args,
        schedule.steps,
        cost=validation_cost(args, schedule.data),
        has_losses=len(schedule.data.val) > 0,
    )
    if interval:
        return -(-schedule.steps // interval)
    return 1


def plan_lines(
    run: PlannedRun, peak: float | None, chip: str | None = None
) -> Iterator[str]:
    """What the run needs: parameters, strategy, memory and time on this machine, or on another
    chip.

    peak: FLOP/s of a device.
    """
    setup = run.setup
    schedule = run.schedule
    settings = run.settings
    plan = settings.plan
    device = settings.device
    if not chip and device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    chip = chip or "CPU"

    # the model
    if setup.quantize == "none":
        stored_in = settings.precision
    else:
        stored_in = setup.quantize
    yield f"{setup.source.folder} in {stored_in}: {plan.title_line(setup.method.title)}"
    whole = setup.source.multimodal
    if whole:
        yield (
            f"the base is multimodal ({whole['model_type']}): only its language model is trained "
            "and saved"
        )
        yield "convert_to_hf and merge_lora write the whole model with --multimodal true"
    if settings.strategy != "single":
        size = num_shards(setup.args, settings.strategy)
        yield (
            f"{STRATEGIES[settings.strategy].format(size=size)} ({settings.strategy}, "
            f"{settings.reason})"
        )

    # notes on the device
    lack = lacks_bf16(device, settings.precision)
    if setup.args.precision == "auto" and lack:
        yield lack
    note = kernels.note(setup.source.config, device.type)
    if note:
        yield note

    # memory and time
    recomputed = {
        "none": "",
        "elementwise": "; norms and gates are recomputed",
        "selective": "; MLPs are recomputed",
        "full": "; blocks are recomputed",
        "tiled": "; blocks are recomputed, with MLPs in pieces",
    }[settings.recomputed]
    if settings.strategy == "single":
        what = "memory"
    else:
        what = "memory of each"
    yield f"{what}: {plan.memory.line()}{recomputed}"
    if device.type == "cpu":
        yield process_line(plan.memory, malloc_name())
    yield from teacher_lines(run)
    yield time_line(
        schedule.flops(plan.flops, setup.objective) + teacher_flops(run),
        settings.slowdown,
        "the run",
        chip,
        peak,
        schedule.layout.ranks,
    )
    if chip == "CPU" and peak:
        yield from _bf16_warning(settings, peak)
    if plan.memory.peak > settings.device_bytes:
        if schedule.layout.rows > 1:
            flag = "--train.micro_batch_size"
        else:
            flag = "--data.max_seq_length"
        yield (
            f"warning: that is more than the {format_bytes(settings.device_bytes)} there are; "
            f"lower {flag}"
        )


def _bf16_warning(settings: DeviceSettings, peak: float) -> Iterator[str]:
    """Yield a warning if this CPU computes much slower in bf16 than in fp32. peak: FLOP/s."""
    peak_in_fp32 = peak_flops(settings.device, "fp32")
    if not settings.precision.startswith("bf16") or peak_in_fp32 is None:
        return
    slowdown = peak_in_fp32 / peak
    if slowdown > SLOW_BF16:
        yield (
            f"warning: this CPU computes {slowdown:.1f} times slower in bf16 than in fp32: "
            "--precision fp32 is faster, and takes more memory"
        )


def time_line(
    flops: float, slower: float, what: str, chip: str, peak: float | None, devices: int
) -> str:
    """The time of `flops` FLOPs on `devices` chips with `peak` FLOP/s each; times `slower`."""
    time = "whose peak is not known"
    if peak:
        seconds = flops * slower / (peak * UTILIZATION * devices)
        time = f"{format_duration(seconds)} at {UTILIZATION:.0%} of its peak"
        time += ", without validations and saving"
    if flops >= 1e13:
        size = f"{flops / 1e12:,.0f}"
    else:
        size = f"{flops / 1e12:.2g}"
    return f"{what}: {size} TFLOPs; on {devices} x {chip}, {time}"


def format_duration(seconds: float) -> str:
    """Return a time in the largest unit that fits, with two digits: 1 minute, 2.5 hours."""
    if 0 < seconds < 1:
        return "under 1 s"
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        # 59.9 minutes are not written as 60
        if seconds >= 0.995 * size:
            amount = seconds / size
            digits = 1 if amount < 9.95 else 0
            text = f"{amount:,.{digits}f}".removesuffix(".0")
            return f"{text} {unit}" if text == "1" else f"{text} {unit}s"
    return f"{seconds:.2g} s"
