"""What a run would do, as text: samples as the model reads them, and the plan.

Used by the command `prepare_data` and the `--dry_run` of every fine-tuning command.
"""

from collections.abc import Iterable

from litft.args.processes import global_rank
from litft.training.advice import advice_lines, warnings_of_settings
from litft.training.data_report import data_report
from litft.training.memory.flops import chip_peak_flops, peak_flops
from litft.training.objectives import GRPO
from litft.training.planned_run import PlannedRun
from litft.training.reward_report import reward_lines
from litft.training.run_description import device_lines, notes_on_flags, plan_lines


def dry_run(run: PlannedRun) -> None:
    """Print what a run would do, in the first process."""
    if global_rank() != "0":
        return
    setup = run.setup
    settings = run.settings
    lines = [*data_report(run.schedule, setup.tokenizer, count=3), ""]
    if isinstance(setup.objective, GRPO):
        lines += reward_lines(setup.objective, run.schedule.data, setup.tokenizer)
    chip = setup.args.chip
    if chip:
        where = f"{settings.precision} on this machine"
        lines.append(
            f"the memory is planned for {where}; scripts/plan.py --chip '{chip}' plans it for that "
            "GPU"
        )
    else:
        lines += device_lines(setup, settings)
    if chip:
        peak = chip_peak_flops(chip, settings.precision)
    else:
        peak = peak_flops(settings.device, settings.precision)
    lines += plan_lines(run, peak, chip)
    lines += ["", *advice_lines(setup, run.schedule)]
    lines += warnings_of_settings(setup, run.schedule)
    lines += notes_on_flags(setup, run.schedule)
    print_hints_last(lines)


def print_hints_last(lines: Iterable[str]) -> None:
    """Print lines, with warnings and notes at the end, where they do not scroll away."""
    hints = []
    for line in lines:
        if line.startswith(("warning:", "note:")):
            hints.append(line)
        else:
            print(line)
    for line in hints:
        print(line)
