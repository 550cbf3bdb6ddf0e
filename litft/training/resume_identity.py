"""What a resumed run must share with its beginning, or it would silently become another run.

Each checkpoint has the identity of its run. `--resume` compares it with that of the flags, the data
and the model's folder as they are now.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from litft.data.dataset import SPLIT_RULE
from litft.evaluation.rewards.reward import FROM_PYTHON
from litft.training.intervals import num_measured
from litft.training.planned_run import PlannedRun
from litft.training.run_setup import RunSetup

# the flags of --train
FLAGS_FIXED_ON_RESUME = (
    "global_batch_size learning_rate lr_schedule warmup_fraction warmup_steps min_lr_ratio"
).split()
FLAGS_FIXED_ON_RESUME += (
    "weight_decay betas eps max_grad_norm freeze label_smoothing neftune_alpha".split()
)
FLAGS_FIXED_ON_RESUME += "optimizer decay_fraction compile".split()
# entries of a run's identity that are hashes of examples
TRAINING_DATA = "training data"
VALIDATION_DATA = "validation data (--data.val_path)"


def run_identity(run: PlannedRun) -> dict[str, Any]:
    """Return all that must be the same where a run is resumed."""
    data = run.schedule.data
    return setup_identity(run.setup) | {
        "seed": run.setup.args.seed,
        "precision": run.settings.precision,
        TRAINING_DATA: data.train_digest,
        "split": SPLIT_RULE,
        VALIDATION_DATA: data.val_digest,
        "measured examples (--eval.max_batches)": num_measured(run.setup.args, data),
    }


def setup_identity(setup: RunSetup) -> dict[str, Any]:
    """Return the part of a run's identity that the flags and the model's folder decide."""
    flags = asdict(setup.args)
    method_flags = flags.get(setup.method.name, {})
    objective = {}
    if setup.args.objective != "sft":
        objective = {"objective": setup.args.objective}
        objective |= {
            f"preference.{name}": value for name, value in flags["preference"].items()
        }
    if setup.args.objective == "grpo":
        names = [name.removeprefix(FROM_PYTHON) for name in setup.args.reward]
        objective["reward"] = ", ".join(names)
        for name, value in flags["grpo"].items():
            if name not in ("rollout_rows", "reward_timeout"):
                objective[f"grpo.{name}"] = value
    if setup.teacher is not None:
        objective |= {f"distill.{name}": value for name, value in flags["distill"].items()}
    return {
        "method": setup.method.title,
        "quantize": setup.quantize,
        **objective,
        **{f"train.{name}": flags["train"][name] for name in FLAGS_FIXED_ON_RESUME},
        **{f"{setup.method.name}.{name}": value for name, value in method_flags.items()},
        "data.new_tokens": setup.args.data.new_tokens,
        # those of generated answers, also of the rewarded ones
        "stop tokens": setup.tokenizer.stop_ids,
        **setup.identity_of_folders,
    }


def check_identity(
    folder: Path, progress: dict[str, Any], identity: dict[str, Any]
) -> None:
    """Raise ValueError if a checkpoint is of a run with another identity. progress: the content of
    its progress.json."""
    saved = progress.get("identity", {})

    # split and data have messages that name a cause: their hashes would say nothing
    if "split" in identity and saved.get("split") != identity["split"]:
        reason = (
            "with an older validation split, so it would now train on "
            "examples it was validated on"
        )
        remedy = "start another run, with this one's newest result as --checkpoint_dir"
        raise ValueError(f"{folder} was saved {reason}; {remedy}")
    other_run = "start another run with its newest result as --checkpoint_dir"

    # the data
    for entry, name in (
        (TRAINING_DATA, "training data"),
        (VALIDATION_DATA, "validation data"),
    ):
        if entry in identity and saved.get(entry) != identity[entry]:
            reason = (
                f"other {name}: a data file, a data flag or the tokenizer has changed since"
            )
            raise ValueError(
                f"{folder} was saved with {reason}; restore it to resume, or {other_run}"
            )

    # all other settings
    changed = identity_changes(progress, identity, is_whole=True)
    if changed:
        raise ValueError(
            f"{folder} was saved with {'; '.join(changed)}; resume with the original settings, or "
            f"{other_run}"
        )


def identity_changes(
    progress: dict[str, Any], identity: dict[str, Any], is_whole: bool
) -> list[str]:
    """Return the entries of `identity` that differ from the saved ones, each with its saved and its
    current value.

    is_whole: entries that only the saved identity has differ, too; otherwise `identity` is that of
    the model alone.
    """
    saved = progress.get("identity", {})
    changes = []
    names = list(identity)
    if is_whole:
        # an objective, or an adapter of the teacher, may be there no more
        names += [name for name in saved if name not in identity]
    for name in names:
        before = saved.get(name)
        now = identity.get(name)
        if before != now:
            changes.append(f"{name} {str(before)[:40]}, now {str(now)[:40]}")
    return changes
