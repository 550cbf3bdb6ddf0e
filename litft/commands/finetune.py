"""Fine-tuning, from the flags to a run's folder: `litft.finetune`, and the four commands."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import litft
from litft import run_dir
from litft.args import FinetuneArgs
from litft.args.finetune import apply_launcher
from litft.args.flag_types import values_of_flags
from litft.args.processes import (
    is_first_on_node,
    is_first_process,
    launch_id,
    may_be_restarted,
)
from litft.checkpoints.hub import fetch, hub_id, pin_dataset
from litft.data.dataset import load_data
from litft.data.sources import hub_dataset
from litft.distributed.devices import check_devices, make_fabric, pick_accelerator
from litft.distributed.process_group import Processes, launch
from litft.evaluation.rewards.reward import Reward
from litft.evaluation.scoring import Metric
from litft.folder_lock import locked_folder
from litft.model.quantization import bitsandbytes
from litft.pretrained.folder import DEMO, resolve
from litft.training.dry_run import dry_run
from litft.training.memory.check import check_memory
from litft.training.memory.flops import check_chip, peak_flops
from litft.training.objectives import OBJECTIVES
from litft.training.output.loggers import check_logger
from litft.training.output.metrics import COLUMNS, INTERNAL, Row
from litft.training.output.recorder import Observers
from litft.training.output.screen import open_screen
from litft.training.planned_run import PlannedRun, plan_run
from litft.training.replay import add_replay
from litft.training.resume_identity import setup_identity
from litft.training.run_description import description, run_title
from litft.training.run_setup import RunSetup, resolve_setup
from litft.training.schedule import Schedule
from litft.training.teacher_report import check_teacher
from litft.training.trainer import Trainer

Callback = Callable[[Row], None]


class RunResult(NamedTuple):
    """A finished run: its folder, and the newest value of every column of its metrics.csv."""

    folder: Path
    metrics: Row


def run_finetuning(
    args: FinetuneArgs,
    callback: Callback | None = None,
    metrics: Mapping[str, Metric] | None = None,
    rewards: Sequence[Reward] = (),
) -> RunResult | None:
    """Train with these arguments; see `litft.finetune`."""
    _check_metrics(metrics or {})
    # what can be refused is refused before the processes meet and weights are read
    args, named = _complete_args(args)
    if metrics and args.objective == "grpo":
        raise ValueError(
            "metrics: they compare answers with those of the data, which --objective grpo does not "
            "validate; give reward functions"
        )
    run = prepare_run(args, rewards)
    if metrics and not len(run.schedule.data.val):
        reason = "metrics: they are of the validation examples, and nothing is held out"
        raise ValueError(f"{reason}; give data.val_fraction or data.val_path")
    if args.dry_run:
        check_chip(args.chip)
        dry_run(run)
        return None
    check_memory(run)
    # the lock ends with this function; the other processes of the run rely on the first one's
    with ExitStack() as lock:
        if named and is_first_process():
            lock.enter_context(locked_folder(named))
            # again: another run may have ended between the first check and the lock
            _check_folder(args, named)
        return _train(run, named, lock, callback=callback, metrics=metrics)


def _train(
    run: PlannedRun,
    named: Path | None,
    lock: ExitStack,
    *,
    callback: Callback | None,
    metrics: Mapping[str, Metric] | None,
) -> RunResult:
    """Start the processes, take the run's folder, and train.

    named: the folder if the flags name it; `lock` holds it then, and is given one that is claimed
    here.
    """
    fabric = make_fabric(run.setup.args, run.settings.strategy)
    cpu_group = launch(fabric, run.setup.args.timeout)

    # Only the first process makes the folder. Every process has checked its earlier content in
    # `_complete_args`, before the processes met.
    name = ""
    if fabric.global_rank == 0:
        name = str(named or run_dir.claim(run.setup.method.title))
    folder = Path(fabric.broadcast(name))
    if not named and fabric.global_rank == 0:
        lock.enter_context(locked_folder(folder))

    # torchrun may have told a single node to resume: then all processes do
    if any(cpu_group.all_reduce_max(run.setup.args.resume)):
        resumed = replace(run.setup.args, resume=True, overwrite=False)
        run = replace(run, setup=replace(run.setup, args=resumed))
    cpu_group.check_equal(_facts_equal_on_all_ranks(run))
    screen = open_screen(fabric.global_rank == 0)
    # before the weights are read, which takes long
    if fabric.global_rank == 0:
        peak = peak_flops(fabric.device, run.settings.precision)
        screen.header(run_title(run.setup), str(folder), description(run, peak))

    # the run itself
    observers = Observers(screen, callback)
    trainer = Trainer(Processes(fabric, cpu_group), run, folder, observers, metrics)
    trainer.fit()
    return RunResult(folder, trainer.metrics.newest)


def _check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Raise ValueError for a metric that is not callable, or has the name of a column of
    metrics.csv."""
    if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
        raise ValueError("metrics: expected functions by name, such as {'rouge': rouge}")
    scores = {score for objective in OBJECTIVES.values() for score in objective.scores}
    for name in metrics:
        is_taken = name in {
            *COLUMNS,
            *INTERNAL,
            *scores,
            "validation_loss",
        } or name.startswith("val_")
        if is_taken or not name.isidentifier():
            raise ValueError(
                f"metrics: {name!r} cannot be a column of metrics.csv; choose another name, such "
                "as rouge"
            )


def _complete_args(args: FinetuneArgs) -> tuple[FinetuneArgs, Path | None]:
    """Return the arguments with defaults filled in, and the run's folder if they name one.

    Raises ValueError for invalid flags.
    """
    args = apply_launcher(args)
    # those of a command line have been checked before; those of `litft.finetune` have not
    problems = args.problems()
    if problems:
        raise ValueError("\n".join(problems))
    if args.checkpoint_dir is None:
        args = _with_demo(args)
    args = _pin_hub_ids(args)
    return _choose_folder(args)


def _choose_folder(args: FinetuneArgs) -> tuple[FinetuneArgs, Path | None]:
    """Return the arguments, which resume a run that this launch has begun, and the run's folder if
    they name one."""
    folder = run_dir.named_or_newest(args.out_dir, args.resume)
    if folder and args.resume and not args.out_dir and is_first_on_node():
        print(f"--resume: continuing {folder}, the newest unfinished run", file=sys.stderr)
    # torchrun restarts all nodes after a failure, but tells only the node where a process has died;
    # so a folder that this launch has made is resumed
    goes_on = not args.overwrite or may_be_restarted()
    if goes_on and run_dir.launched_by(folder, launch_id()):
        if args.overwrite and is_first_on_node():
            print(
                f"--overwrite: this launch has made {folder}, so it goes on there",
                file=sys.stderr,
            )
        args = replace(args, resume=True, overwrite=False)
    if folder and not args.dry_run:
        _check_folder(args, folder)
    return args, folder


def _with_demo(args: FinetuneArgs) -> FinetuneArgs:
    """Return the arguments with the model and the data of the demo."""
    # completions that are sometimes right can be learned from; those of the base never are
    start = "tuned" if args.objective == "grpo" else "base"
    data = replace(args.data, path=[str(DEMO)])
    return replace(args, checkpoint_dir=str(DEMO / start), data=data)


def _check_folder(args: FinetuneArgs, folder: Path) -> None:
    """Raise ValueError if the run would overwrite other files, or delete what it reads."""
    items = (*args.data.paths, *args.data.val_paths)
    paths = []
    for item in items:
        paths.extend((item.path, item.template))
    inputs = (args.checkpoint_dir, args.base_dir, args.teacher, *paths, args.data.template)
    run_dir.check(folder, args.resume, args.overwrite, inputs)


def _pin_hub_ids(args: FinetuneArgs) -> FinetuneArgs:
    """Replace hub ids by the commits that they stand for now, so that config.yaml says which were
    used."""
    models = {}
    for name in ("checkpoint_dir", "base_dir", "teacher"):
        models[name] = hub_id(getattr(args, name) or "")
    pinned = {}
    for name, model in models.items():
        if model:
            pinned[name] = str(fetch(model)[1])
    data = args.data

    # an item of the data keeps its split, template and weight
    pinned_items = (
        [replace(item, path=_pinned(item.path)).text() for item in items]
        for items in (data.paths, data.val_paths)
    )
    data = replace(data, **dict(zip(("path", "val_path"), pinned_items, strict=True)))
    return replace(args, **pinned, data=data)


def _pinned(path: str) -> str:
    """Return a path of data with a hub id replaced by the commit that it stands for now; a split is
    kept."""
    dataset, (_, colon, split) = hub_dataset(path), path.partition(":")
    if dataset:
        return f"{pin_dataset(dataset)}{colon}{split}"
    return path


def prepare_run(args: FinetuneArgs, rewards: Sequence[Reward] = ()) -> PlannedRun:
    """Prepare the method, the data and the plan, before the processes meet and without reading a
    weight; ValueError. rewards: functions in place of those of --reward."""
    # checks that need no data come first, so that they fail at once
    source = resolve(args.model_dir, args.base_dir)
    source.check_base_dir(args.base_dir)
    source.check()
    if args.save.text_names:
        source.check_text_names("--save.text_names")
    setup = resolve_setup(args, source, rewards)
    args = setup.args
    if setup.quantize != "none":
        # raises here rather than after the data has been read
        bitsandbytes()

    # the device, and what it cannot do
    device = torch.device(pick_accelerator(args.accelerator))
    check_devices(device.type, args.devices)
    _check_offload(setup, device)
    if not args.dry_run:
        check_logger(args.logger)

    # the data, which may take long to tokenize
    source.check_length("--data.max_seq_length", args.data.max_seq_length)
    vocab_size = setup.method.vocab_size(source.config)
    max_positions = source.config.max_positions
    timeout = args.timeout_seconds
    kind = setup.objective.data_kind
    data = load_data(
        args.data,
        setup.tokenizer,
        vocab_size,
        max_positions,
        timeout=timeout,
        kind=kind,
        completion_tokens=setup.objective.completion_tokens,
    )
    for flag, value in (
        ("--eval.patience", args.eval.patience),
        ("--save.best", args.save.best),
    ):
        if value and not len(data.val):
            reason = "it needs a validation loss, and nothing is held out"
            raise ValueError(f"{flag}: {reason}; give --data.val_fraction or val_path")
    setup = setup.with_tokenizer_of(data)
    args = setup.args
    data = add_replay(args, setup, data)
    ranks = args.devices * args.num_nodes
    schedule = Schedule(
        args,
        data,
        ranks,
        group_size=setup.objective.group_size,
        shares_prompts=setup.shares_prompts,
    )
    run = plan_run(setup, schedule, device)
    check_teacher(run)
    return run


def _check_offload(setup: RunSetup, device: torch.device) -> None:
    """Raise ValueError where --train.cpu_offload has nothing to move."""
    args, offload = setup.args, setup.args.train.cpu_offload
    if offload != "none" and device.type == "cpu":
        raise ValueError(
            f"--train.cpu_offload {offload}: without a GPU all is in the host's memory; leave it "
            "out"
        )
    is_full = setup.method.name == "full"
    one_device = args.devices * args.num_nodes == 1
    if one_device and offload == "parameters" and (setup.quantize != "none" or is_full):
        if is_full:
            reason = "trained weights stay on the GPU"
        else:
            reason = "quantized weights stay on the GPU"
        raise ValueError(f"--train.cpu_offload parameters: {reason}; leave it out")


def _facts_equal_on_all_ranks(run: PlannedRun) -> dict[str, Any]:
    """What must be the same on all processes of a run."""
    schedule = run.schedule
    values = values_of_flags(run.setup.args)
    flags = {f"--{name}": value for name, value in values.items()}
    versions = {"torch": torch.__version__, "litft": litft.__version__}
    chosen = {
        "strategy": run.settings.strategy,
        "recomputation": run.settings.recomputed,
        "rows": schedule.layout.rows,
    }
    data = {
        "training data": schedule.data.train_digest,
        "validation data": schedule.data.val_digest,
    }
    return {**versions, **chosen, **data, **setup_identity(run.setup), **flags}
