"""Both splits of tokenized samples from the flags, checked against the model that will read
them."""

import copy
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from litft.args import DataArgs
from litft.data.division import Part, distinct_entries, split
from litft.data.encoder import Encoder
from litft.data.encoding_report import EncodingReport
from litft.data.formats import FORMATS
from litft.data.notes import BLANK, CUT_AWAY, EMPTY, EQUAL, MASKED, NO_ROOM, WITHOUT
from litft.data.preferences import PREFERENCE_FIELDS
from litft.data.similarity import count_near
from litft.data.sources import File, HubSplit, used_sources
from litft.data.template_choice import (
    after_training,
    choose_template,
    has_conversations,
    learned_template,
    mentioned_arguments,
    with_arguments,
    with_template,
)
from litft.data.token_cache import tokenized
from litft.data.token_store import Samples, TokenStore
from litft.data.tokenizer import CONTROL_TOKEN, Tokenizer

# what decides the split; a resumed run must use the same rule
SPLIT_RULE = "by content"
NUM_BARS = 10  # of the histogram


@dataclass
class DataSplits:
    """Both splits, and the reports of their encoding."""

    train: Samples
    val: Samples
    # how often an epoch passes over each training store
    weights: list[float]
    reports: dict[str, EncodingReport]  # by label of the file
    limit: int  # the most input tokens of a sample
    # where the chat template comes from, for messages
    template: str
    # with the template, the day and the stop tokens of this data
    tokenizer: Tokenizer
    context: int  # the model's maximum number of tokens
    kind: str = "supervised"  # or "pairs", "labels", "prompts": see `Encoder`
    # the labels of training files with weight 0
    unused: list[str] = field(default_factory=list)
    # of each validation store; empty: they are one set
    val_names: tuple[str, ...] = ()
    replayed: str = ""  # the label of the model's own answers, see --data.replay
    dedup: str = "none"  # what --data.dedup leaves out
    # the entries of training files that it leaves out, by label
    left_out: dict[str, int] = field(default_factory=dict)
    # all files by label, with the findings on every record
    stores: dict[str, TokenStore] = field(default_factory=dict)

    def count(self, *notes: str) -> int:
        """Return the number of examples in both splits with any of these notes."""
        return sum(
            report.notes.get(note, [0])[0]
            for report in self.reports.values()
            for note in notes
        )

    @property
    def skipped(self) -> int:
        """The number of examples without target tokens."""
        return self.count(CUT_AWAY, MASKED, EMPTY, BLANK, EQUAL, NO_ROOM)

    @cached_property
    def val_sets(self) -> dict[str, np.ndarray]:
        """The indices of the validation samples of each named set; empty if there is one set."""
        numbers = {}
        for name in self.val_names:
            numbers[name] = [i for i, other in enumerate(self.val_names) if other == name]
        return {
            name: np.flatnonzero(np.isin(self.val.store_numbers, of_set))
            for name, of_set in numbers.items()
        }

    @property
    def is_plain_text(self) -> bool:
        """Whether all records are texts to continue."""
        return all(set(report.formats) <= {"text"} for report in self.reports.values())

    @property
    def system_prompt(self) -> str:
        """The system prompt, if all conversations have the same one; otherwise empty."""
        systems = {system for report in self._own_reports() for system in report.systems}
        if len(systems) == 1:
            return systems.pop()
        return ""

    @property
    def share_with_tools(self) -> float:
        """The share of the records whose prompts list functions that the model may call."""
        with_tools = sum(report.with_tools for report in self._own_reports())
        return with_tools / max(1, sum(report.records for report in self._own_reports()))

    def _own_reports(self) -> list[EncodingReport]:
        """Return the reports on the files of the user: not on the model's own answers."""
        return [report for label, report in self.reports.items() if label != self.replayed]

    @cached_property
    def special_ids(self) -> set[int]:
        """The special tokens, and those of --data.new_tokens, that occur in the data."""
        return {token for report in self.reports.values() for token in report.special}

    @cached_property
    def duplicates(self) -> np.ndarray:
        """Indices of the training samples that are also in the validation set, token for token."""
        if len(self.val):
            return np.flatnonzero(np.isin(self.train.digests, self.val.digests))
        return np.zeros(0, int)

    @cached_property
    def near_held_out(self) -> int:
        """The number of validation examples with nearly the prompt of a training example."""
        return count_near(self.train.prompt_signatures(), self.val.prompt_signatures())

    @cached_property
    def train_digest(self) -> str:
        """The hash of the training samples and their order."""
        return _digest(self.train, self.weights)

    @cached_property
    def val_digest(self) -> str:
        """The hash of the validation samples."""
        return _digest(self.val)


def _digest(samples: Samples, *more: Any) -> str:
    sha256 = hashlib.sha256(
        json.dumps([*more, *(store.report.content for store in samples.stores)]).encode()
    )
    sha256.update(samples.identity)
    return sha256.hexdigest()


def load_data(
    args: DataArgs,
    tokenizer: Tokenizer,
    vocab_size: int,
    context: int,
    timeout: float = math.inf,
    kind: str = "supervised",
    completion_tokens: int = 0,
) -> DataSplits:
    """Load both splits, with a tokenizer that has the chat template and stop tokens of the data.

    context: the model's maximum number of tokens. timeout: seconds to wait for another process that
    tokenizes the same file and makes no progress. kind: what the records are, see `Encoder`;
    completion_tokens: of prompts, the most tokens of a completion. Uses no collectives, so it can
    run before the process group exists. Raise ValueError naming file and record for unreadable
    data, and for tokens outside the model's vocabulary.
    """
    of_folder = tokenizer
    tokenizer, template = with_template(tokenizer, args)
    limit = length_limit(args.max_seq_length, context)
    encoder = Encoder(
        tokenizer,
        limit,
        form=args.format,
        columns=_columns(args.columns, kind),
        mask_prompt=args.mask_prompt,
        last_only=args.train_on == "last",
        reasoning=args.reasoning,
        kind=kind,
        completion_tokens=completion_tokens,
    )

    # the files, each tokenized once
    sources = used_sources(args)
    stores = {}
    rendered = {}
    for file in sources.train:
        own = _encoder_of(file, encoder, args.template_args, of_folder)
        stores[file] = tokenized(file, own, args.skip_bad, timeout)
        if stores[file].report.has_conversations:
            rendered[sources.labels[file]] = own.tokenizer
    # from here on, as answers are generated afterwards; so are validation sets without a template
    tokenizer, template = learned_template(tokenizer, template, rendered)
    for_val = replace(encoder, tokenizer=tokenizer)
    for _, file in sources.val:
        if file not in stores:
            own = _encoder_of(file, for_val, args.template_args, of_folder)
            stores[file] = tokenized(file, own, args.skip_bad, timeout)
    by_label = {sources.labels[file]: store for file, store in stores.items()}
    reports = {label: store.report for label, store in by_label.items()}
    for report in reports.values():
        _check_vocabulary(report, tokenizer, vocab_size)
    _check_all_columns(encoder.columns, sources.labels, reports)
    tokenizer = after_training(tokenizer, of_folder, reports)
    if not has_conversations(reports):
        template = "not used: the data is text"

    parts = distinct_entries([stores[file] for file in sources.train], args.dedup)
    for_validation = [stores[file] for _, file in sources.val]
    training, held_out = _divided(parts, for_validation, args)
    names = tuple(name for name, _ in sources.val)
    data = DataSplits(
        train=Samples.of(training, limit),
        val=Samples.of(held_out, limit),
        weights=sources.weights,
        reports=reports,
        unused=sources.unused,
        limit=limit,
        template=template,
        tokenizer=tokenizer,
        context=context,
        kind=kind,
        val_names=names if len(set(names)) > 1 else (),
        dedup=args.dedup,
        left_out=_left_out([sources.labels[file] for file in sources.train], parts),
        stores=by_label,
    )
    _check_weights(data, [sources.labels[file] for file in sources.train])
    _check_samples(data)
    return data


def with_replay(data: DataSplits, file: File, timeout: float = math.inf) -> DataSplits:
    """Return the data with the conversations of a file in its training examples; none of them is
    held out."""
    encoder = Encoder(data.tokenizer, data.limit, form="messages")
    store = tokenized(file, encoder, 0.0, timeout)
    added = Samples.of([(store, np.arange(len(store.units)))], data.limit)
    return replace(
        data,
        train=data.train.followed_by(added),
        weights=[*data.weights, 1.0],
        reports=data.reports | {file.label: store.report},
        replayed=file.label,
    )


def _left_out(labels: list[str], parts: list[Part]) -> dict[str, int]:
    """Return how many entries of each training file --data.dedup has left out."""
    left_out = Counter()
    for label, (store, entries) in zip(labels, parts, strict=True):
        left_out[label] += len(store.units) - len(entries)
    return left_out


def _divided(
    parts: list[Part], for_validation: list[TokenStore], args: DataArgs
) -> tuple[list[Part], list[Part]]:
    """Return the entries to learn from and those that are held out: all of the validation files,
    without which a part of each training file is held out."""
    fraction = 0.0 if for_validation else args.val_fraction
    training = []
    held_out = []
    for store, kept, rest in split(parts, fraction, args.seed):
        training.append((store, kept))
        held_out.append((store, rest))
    if for_validation:
        held_out = [(store, np.arange(len(store.units))) for store in for_validation]
    return training, held_out


def _check_weights(data: DataSplits, labels: list[str]) -> None:
    """Raise ValueError if a file has no example in an epoch, because of its weight."""
    for label, size, weight in zip(labels, data.train.sizes, data.weights, strict=True):
        if size and not round(size * weight):
            raise ValueError(
                f"--data.weights {weight:g}: an epoch would have none of the {size} examples of "
                f"{label}; raise it, or give 0"
            )


def _check_samples(data: DataSplits) -> None:
    """Raise ValueError if a set has no samples, or a sample is longer than the model's context."""
    if not len(data.train):
        raise ValueError(_no_samples_message(data, data.context))
    empty = []
    for name, indices in data.val_sets.items():
        if not len(indices):
            empty.append(name)
    if empty:
        notes = _notes(data.reports)
        raise ValueError(
            f"--data.val_path: no example of the set {empty[0]} is left ({notes}); leave it out, "
            "or mend it"
        )
    # samples are cut to --data.max_seq_length, which may be above the model's context
    context = data.context
    non_empty = []
    for samples in (data.train, data.val):
        if len(samples):
            non_empty.append(samples)
    longest = max(
        int(samples.document_lengths(np.arange(len(samples))).max())
        for samples in non_empty
    )
    if longest > context:
        reason = (
            f"the longest example has {longest:,} tokens, but the model was "
            f"made for {context:,}"
        )
        remedy = f"use {context}, or set rope_scaling in the model's config.json"
        raise ValueError(f"--data.max_seq_length {data.limit}: {reason}; {remedy}")


def length_limit(max_seq_length: int | None, context: int) -> int:
    """Return the most input tokens of a sample: `max_seq_length` if given, else the model's context
    but at most 2048."""
    return max_seq_length or min(context, 2048)


def _encoder_of(
    file: File | HubSplit, encoder: Encoder, template_args: list[str], of_folder: Tokenizer
) -> Encoder:
    """Return the encoder of a file, which may have a format, columns and a template of its own.

    template_args: of the flags; they apply to the template if it mentions them. of_folder: the
    tokenizer as its folder describes it, with the template that `auto` means.
    """
    form, columns, template = file.reading
    # a copy: other files are rendered with the template of the flags
    if template is not None:
        own = copy.copy(of_folder)
        own.day = encoder.tokenizer.day
        choose_template(template, own)
        source = own.chat_template
        own.chat_template = with_arguments(
            source, mentioned_arguments(source, template_args)
        )
        encoder = replace(encoder, tokenizer=own)
    own_columns = _columns(
        [f"{name}={file_name}" for name, file_name in columns], encoder.kind
    )
    return replace(
        encoder, form=form or encoder.form, columns=encoder.columns | own_columns
    )


def _columns(items: list[str], kind: str) -> dict[str, str]:
    """Parse --data.columns to {field of a format: name in the files}; raise ValueError for a field
    that no format has."""
    pairs = (item.split("=", 1) for item in items)
    columns = {name.strip(): file_name.strip() for name, file_name in pairs}
    fields = sorted(
        {name for form in FORMATS.values() for name in form.fields + form.optional}
    )
    fields = fields if kind in ("supervised", "prompts") else sorted(PREFERENCE_FIELDS)
    unknown = []
    for name in columns:
        if name not in fields:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"--data.columns {unknown[0]}=...: no format has that field; known: {', '.join(fields)}"
        )
    return columns


def _check_all_columns(
    columns: dict[str, str],
    labels: Mapping[File | HubSplit, str],
    reports: dict[str, EncodingReport],
) -> None:
    """Check --data.columns and the columns of each file; see `_check_columns`."""
    _check_columns(columns, reports)
    for file, label in labels.items():
        _check_columns(dict(file.reading.columns), {label: reports[label]})


def _check_columns(columns: dict[str, str], reports: dict[str, EncodingReport]) -> None:
    """Raise ValueError for a field of --data.columns that no record of any file has."""
    for name, file_name in columns.items():
        missing = sum(
            report.notes.get(f"{WITHOUT} {file_name}", [0])[0]
            for report in reports.values()
        )
        if missing == sum(report.records for report in reports.values()):
            raise ValueError(
                f"--data.columns {name}={file_name}: no record has the field {file_name!r}; name "
                "one that they have"
            )


def _no_samples_message(data: DataSplits, context: int) -> str:
    if data.count(CUT_AWAY):
        if data.limit < context:
            remedy = f"raise --data.max_seq_length (the model's context is {context})"
        else:
            remedy = "that is the model's context: divide the examples"
        return (
            f"no example has an answer within {data.limit} tokens: all {data.skipped} were "
            f"skipped; {remedy}"
        )
    return f"no example is left to train on: {_notes(data.reports)}"


def _notes(reports: dict[str, EncodingReport]) -> str:
    """Return the notes on the examples, with how many have each."""
    notes = Counter({})
    for report in reports.values():
        notes.update({note: count for note, (count, _) in report.notes.items()})
    return "; ".join(f"{count:,} {note}" for note, count in notes.items())


def unknown_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the control tokens in the template that the tokenizer splits into several tokens."""
    control_tokens = dict.fromkeys(CONTROL_TOKEN.findall(tokenizer.chat_template))
    return [text for text in control_tokens if tokenizer.token_id(text) is None]


def _check_vocabulary(
    report: EncodingReport, tokenizer: Tokenizer, vocab_size: int
) -> None:
    largest, where = report.largest
    if largest >= vocab_size:
        token = tokenizer.decode([largest], skip_special=False)
        raise ValueError(
            f"{where}: token {token!r} has the id {largest}, but the model's vocabulary ends at "
            f"{vocab_size - 1}; {tokenizer.folder} contains the tokenizer of another model; copy "
            "the right one there"
        )


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (shortest length, longest length, number of samples) of each bar of a histogram with
    bars of equal width."""
    first = int(lengths.min())
    last = int(lengths.max())
    width = math.ceil((last - first + 1) / NUM_BARS)
    # lengths are whole numbers: a bar reaches from one edge, exclusive, to the next, inclusive
    edges = np.arange(first - 1, last + width, width)
    counts, _ = np.histogram(lengths, edges + 1)
    edges[-1] = last
    bars = []
    for number, count in enumerate(counts.tolist()):
        shortest = int(edges[number]) + 1
        longest = int(edges[number + 1])
        bars.append((shortest, longest, count))
    return bars
