"""`litft.finetune` for Python programs and notebooks: the flags as keywords, and examples in
memory."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from litft.args import FINETUNE, FinetuneArgs
from litft.args.keywords import from_keywords, name_keywords, signature
from litft.commands.finetune import Callback, RunResult, run_finetuning
from litft.data.in_memory import EXAMPLES, stored_examples
from litft.evaluation.rewards.reward import Reward, of_functions
from litft.evaluation.scoring import Metric

# how records in memory are named in messages
RECORD = re.compile(rf"\S*{EXAMPLES}/\w+\.jsonl(?:, line (\d+))?")
Examples = str | PathLike | Iterable[str | PathLike] | Iterable[Mapping[str, Any]]


def finetune(
    args: FinetuneArgs | None = None,
    callback: Callback | None = None,
    *,
    method: str | None = None,
    model: str | PathLike | None = None,
    data: Examples | None = None,
    val_data: Examples | None = None,
    metrics: Mapping[str, Metric] | None = None,
    rewards: Sequence[Callable[..., Any]] = (),
    **flags: Any,
) -> RunResult | None:
    """Fine-tune a model; return the run's folder and its newest metrics, or None after a dry run.

    Args:
        args: all flags as one object, instead of keywords; `callback`, `metrics` and `rewards`
            go with both.
        callback: called in the first process with every row of metrics.csv when it is written.
        method: lora (default), adapter, adapter_v2 or full.
        model: a model folder or a hub id. Without model and data, the built-in demo is trained.
        data: examples: a path, a hub id, a list of paths, or records: a list, a
            `datasets.Dataset`, or an iterator.
        val_data: validation examples, likewise.
        metrics: functions by name, called with the model's answers to the validation questions
            before and after training.
        rewards: for objective="grpo": functions like those of --reward, which they replace. They
            are called in this process, without a time limit.
        flags: all flags of the command, by their last name (`max_steps=100`), or by group_name
            (`lora_r=8`, `eval_interval=50`).

    Raises:
        TypeError: for an unknown keyword.
        ValueError: for mistakes of the user.
        litft.errors.Interrupted: if a signal ended the run after its state was saved.
    """
    if args is not None and not isinstance(args, FinetuneArgs):
        raise TypeError(
            f"finetune() takes keywords, as in finetune(method='lora'), or one FinetuneArgs; found "
            f"{args!r}"
        )
    if args is not None:
        if flags or any(value is not None for value in (method, model, data, val_data)):
            raise TypeError(
                "finetune() takes either args or keywords; set the fields of args instead"
            )
        return run_finetuning(args, callback, metrics, _rewards_for(args, rewards))
    method = method or "lora"
    _check_spellings(flags, model=model, data=data, val_data=val_data)
    try:
        if rewards:
            flags["reward"] = [reward.source for reward in of_functions(rewards)]
        if model is not None:
            flags["checkpoint_dir"] = fspath(model)
        if data is not None:
            flags["data_path"] = _given_paths(data) or ["in memory"]
        # raises for invalid flags before the records are read
        args = from_keywords(method, flags)
        data_args = args.data
        if data is not None:
            data_args = replace(data_args, path=_paths(data, args.data.limit))
        if val_data is not None:
            data_args = replace(data_args, val_path=_paths(val_data))
        args = replace(args, data=data_args)
        return run_finetuning(args, callback, metrics, _rewards_for(args, rewards))
    except (TypeError, ValueError) as error:
        # subclasses have messages that need no change
        if type(error) not in (TypeError, ValueError) or method not in FINETUNE:
            raise

        # files of records become "the data", and flags become keywords
        message = RECORD.sub(
            lambda m: f"record {int(m[1]) - 1} of the data" if m[1] else "the data",
            str(error),
        )
        message = name_keywords(message, method)
        # it may be an error of the callback, whose traceback is needed
        if message == str(error):
            raise
        raise type(error)(message) from None


def _rewards_for(args: FinetuneArgs, rewards: Sequence[Callable]) -> list[Reward]:
    """Return the reward functions; raise ValueError for an objective that does not learn from
    them."""
    if rewards and args.objective != "grpo":
        raise ValueError(
            f"rewards: objective {args.objective!r} does not learn from them; set grpo"
        )
    return of_functions(rewards)


def _check_spellings(flags: Mapping[str, Any], **keywords: Any) -> None:
    """Raise TypeError for a flag beside the keyword that says the same."""
    names = {"model": "checkpoint_dir", "data": "data_path", "val_data": "data_val_path"}
    for keyword, value in keywords.items():
        flag = names[keyword]
        if value is not None and flag in flags:
            raise TypeError(f"finetune() takes either {keyword} or {flag}")


def _given_paths(examples: Examples) -> list[str]:
    """Return the paths that examples are; empty for records."""
    if isinstance(examples, str | PathLike):
        return [fspath(examples)]
    if not isinstance(examples, list | tuple):
        return []
    paths = []
    for item in examples:
        if not isinstance(item, str | PathLike):
            return []
        paths.append(fspath(item))
    texts = [path for path in paths if _is_text(path)]
    if texts:
        raise ValueError(
            f"data: {texts[0][:60]!r} is no file; for texts give records, such as "
            f"[{{'text': {texts[0][:20]!r}}}]"
        )
    return paths


def _is_text(path: str) -> bool:
    """Return whether what was given as a path is a text: several words without a file's suffix."""
    if len(path.split()) == 1 or re.search(r"\.\w", path):
        return False
    return not Path(path).exists()


def _paths(examples: Examples, limit: int | None = None) -> list[str]:
    """Return the paths of examples; records are stored in a file."""
    paths = _given_paths(examples)
    if paths:
        return paths
    assert not isinstance(examples, str | PathLike)  # that is a path
    return [str(stored_examples(examples, limit))]


# the signature that editors show has every flag as a keyword
_own = [
    item
    for item in inspect.signature(finetune).parameters.values()
    if item.kind is not inspect.Parameter.VAR_KEYWORD
]
finetune.__signature__ = signature(_own)
