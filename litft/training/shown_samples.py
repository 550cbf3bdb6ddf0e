"""Samples as the model reads them, as text: of `prepare_data` and of a dry run."""

import os
import sys
from collections.abc import Iterator

import numpy as np

from litft.data.dataset import DataSplits
from litft.data.sample import Sample
from litft.data.tokenizer import Tokenizer
from litft.model.loss import IGNORED
from litft.training.schedule import Schedule

GREEN = "\033[32m"
OFF = "\033[0m"
MARKS = "⟦", "⟧"  # without colours


def samples_lines(schedule: Schedule, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """The first samples of the run, as the model reads them."""
    colour = (
        sys.stdout.isatty()
        and "NO_COLOR" not in os.environ
        and os.environ.get("TERM") != "dumb"
    )
    train = schedule.data.train
    last = schedule.group_size * min(count, schedule.order.epoch_size)
    # a prompt is there group_size times in a row, and is shown once
    numbers = list(dict.fromkeys(schedule.order.indices(0, last)))
    # at least one of each path: the order may have none of it among its first ones
    if len(train.stores) > 1 and count:
        missing = set(train.store_numbers.tolist())
        for number in numbers:
            missing.discard(int(train.store_numbers[number]))
        for store in sorted(missing):
            numbers.append(int(np.argmax(train.store_numbers == store)))
    for number in numbers:
        sample = train[number]
        if sample.prompt is not None:
            yield f"\n--- prompt {number}{_path_of(schedule.data, number)}"
            yield prompt_text(sample, tokenizer)
            continue
        for title, document in zip(_titles(sample), sample.split(), strict=True):
            size = f"{document.tokens.numel():,} tokens, {document.supervised:,} learned"
            yield f"\n--- training example {number}{_path_of(schedule.data, number)}{title}: {size}"
            yield marked_text(document, tokenizer, colour)


def _path_of(data: DataSplits, number: int) -> str:
    """Where a training sample comes from, if there are several paths."""
    if len(data.train.stores) == 1:
        return ""
    report = data.train.stores[data.train.store_numbers[number]].report
    text = ""
    for name, other in data.reports.items():
        if other is report:
            text += f" of {name}"
    return text


def _titles(sample: Sample) -> list[str]:
    """What each document of a sample is."""
    if sample.documents:
        return [", chosen", ", rejected"]
    return [{True: ", desirable", False: ", undesirable", None: ""}[sample.desirable]]


def marked_text(sample: Sample, tokenizer: Tokenizer, colour: bool) -> str:
    """A sample's text, with its target tokens in colour or between marks."""
    counted = (sample.targets != IGNORED).tolist()
    ids = sample.tokens.tolist()
    # targets[i] is the token after tokens[i]
    is_target = [False, *counted[:-1]]
    if counted[-1]:
        # the last target is not among the tokens
        ids.append(int(sample.targets[-1]))
        is_target.append(True)
    if colour:
        begin = GREEN
        end = OFF
    else:
        begin, end = MARKS
    text = ""
    shown = 0
    # decodes whole prefixes, since the bytes of a character may be spread over several tokens
    for at in range(1, len(ids) + 1):
        # only at the end of a run of tokens that are all targets, or all none
        if at < len(ids) and is_target[at] == is_target[at - 1]:
            continue
        prefix = tokenizer.decode(ids[:at], skip_special=False)
        part = prefix[shown:]
        if is_target[at - 1]:
            part = f"{begin}{part}{end}"
        text += part
        shown = len(prefix)
    return text


def prompt_text(sample: Sample, tokenizer: Tokenizer) -> str:
    """Return a prompt as the model reads it, with its length."""
    ids = sample.prompt_ids
    size = f"{len(ids):,} tokens, and at most {sample.supervised:,} of a completion"
    return f"{tokenizer.decode(ids, skip_special=False)}\n({size})"
