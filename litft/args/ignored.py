"""Flags of fine-tuning that have no effect beside others. Imports no torch."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from litft.args.finetune import FinetuneArgs
from litft.args.finetune_commands import LoRAFinetuneArgs


def ignored_flags(args: FinetuneArgs) -> Iterator[str]:
    """Yield a note for each flag that was given another value than its default, but has no effect
    beside other flags."""
    train = args.train
    data = args.data
    if args.chip and not args.dry_run:
        yield f"note: --chip {args.chip} has no effect: only --dry_run estimates the time of a GPU"
    if train.lr_schedule != "wsd":
        reason = f"only --train.lr_schedule wsd has it, not {train.lr_schedule}"
        yield from _note("train", train, "decay_fraction", reason)
    if train.lr_schedule == "constant":
        yield from _note(
            "train", train, "min_lr_ratio", "a constant learning rate does not decay"
        )
    if train.warmup_steps is not None:
        reason = f"--train.warmup_steps {train.warmup_steps} counts"
        yield from _note("train", train, "warmup_fraction", reason)
    if data.val_path:
        reason = "--data.val_path names the validation examples"
        for name in ("val_fraction", "seed"):
            yield from _note("data", data, name, reason)
    elif data.val_fraction == 0:
        reason = "--data.val_fraction 0 chooses no examples"
        yield from _note("data", data, "seed", reason)
    if isinstance(args, LoRAFinetuneArgs) and args.lora.rslora and args.lora.alpha is None:
        yield (
            "note: --lora.rslora has no effect: without --lora.alpha, updates are scaled by 2 at "
            "every rank"
        )
    if not data.mask_prompt:
        reason = "--data.mask_prompt false learns every token"
        yield from _note("data", data, "train_on", reason)
        if data.reasoning == "mask":
            yield from _note("data", data, "reasoning", reason)
    if args.objective == "grpo":
        reason = "--objective grpo learns completions, not the answers of the data"
        for name in ("train_on", "reasoning"):
            yield from _note("data", data, name, reason)
        if args.grpo.updates == 1:
            reason = "with --grpo.updates 1, probabilities are compared with themselves"
            for name in ("clip_low", "clip_high"):
                yield from _note("grpo", args.grpo, name, reason)
        elif args.grpo.loss == "cispo":
            reason = "--grpo.loss cispo limits the ratio only above"
            yield from _note("grpo", args.grpo, "clip_low", reason)
    if args.objective == "distill" and args.distill.on_policy == 0:
        reason = "--distill.on_policy 0 learns the answers of the data"
        yield from _note("distill", args.distill, "max_new_tokens", reason)
    if args.eval.max_new_tokens == 0:
        reason = "--eval.max_new_tokens 0 answers no prompts"
        yield from _note("eval", args.eval, "prompts", reason)
    if args.eval.interval == 0:
        reason = "--eval.interval 0 validates only before and after the training"
        yield from _note("eval", args.eval, "patience", reason)


def _note(group: str, args: Any, name: str, reason: str) -> Iterator[str]:
    """Yield the note on a field of a group of flags, unless it has its default."""
    for item in fields(args):
        if item.name != name:
            continue
        if item.default_factory is MISSING:
            default = item.default
        else:
            default = item.default_factory()
        if getattr(args, name) != default:
            yield f"note: --{group}.{name} {getattr(args, name)} has no effect: {reason}"
