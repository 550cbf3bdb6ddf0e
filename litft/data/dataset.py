"""From the flags to both splits of tokenized samples, checked against the model that will read them."""

import hashlib
import json
import math
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from litft.args import DataArgs
from litft.data.chat_template import STYLES
from litft.data.encoder import BLANK, CUT_AWAY, EMPTY, MASKED, WITHOUT, Encoder
from litft.data.formats import FORMATS
from litft.data.sampler import Sampler
from litft.data.sources import locate
from litft.data.token_cache import prepare
from litft.data.token_store import EncodingReport, Samples, TokenStore
from litft.data.tokenizer import CONTROL, Tokenizer

SPLIT = "by content"  # how it is decided what is held out; a run that is resumed has to share it
BARS = 10  # of the histogram


@dataclass
class DataSplits:
    """Both splits, and what happened on the way."""

    train: Samples
    val: Samples
    weights: list[float]  # how often an epoch passes over each of the training stores
    reports: dict[str, EncodingReport]  # by what the file is called
    limit: int  # tokens of the longest sample
    template: str  # whose it is
    context: int  # tokens that the model was made for

    def count(self, *notes: str) -> int:
        """Examples of both splits that one of these things happened to."""
        return sum(report.notes.get(note, [0])[0] for report in self.reports.values() for note in notes)

    @property
    def skipped(self) -> int:
        """Examples of which nothing is learned."""
        return self.count(CUT_AWAY, MASKED, EMPTY, BLANK)

    @cached_property
    def special(self) -> set[int]:
        """Special tokens that occur."""
        return {token for report in self.reports.values() for token in report.special}

    @cached_property
    def duplicates(self) -> np.ndarray:
        """Numbers of the training samples that are a validation sample too, token for token."""
        return np.flatnonzero(np.isin(self.train.digests, self.val.digests)) if len(self.val) else np.zeros(0, int)

    @cached_property
    def digest(self) -> str:
        """Which training samples these are, in which order."""
        return _digest(self.train, self.weights)

    @cached_property
    def held_out(self) -> str:
        """Which validation samples these are."""
        return _digest(self.val)


def _digest(samples: Samples, *more: Any) -> str:
    found = hashlib.sha256(json.dumps([*more, *(store.report.content for store in samples.stores)]).encode())
    found.update(samples.identity)
    return found.hexdigest()


def load_data(args: DataArgs, tokenizer: Tokenizer, vocab_size: int, context: int, timeout: float = math.inf) -> DataSplits:
    """Both splits; `tokenizer` takes on the template, and the tokens that end its answers.

    No other process is spoken to, so it can run before they meet; for one that tokenizes the same it waits so many seconds
    at most without progress. Raises ValueError naming file and record for unreadable
    data, and for tokens that the model has no embedding for.
    """
    template = choose_template(args.template, tokenizer)
    tokenizer.day = args.date or (date.today().isoformat() if tokenizer.tells_date else None)
    limit = length_limit(args.max_seq_length, context)
    encoder = Encoder(tokenizer, limit, args.format, _columns(args), args.mask_prompt, args.train_on == "last")
    train, val = locate(args)
    stores = {file: prepare(file, encoder, args.skip_bad, timeout) for file in dict.fromkeys([*train, *val])}
    for store in stores.values():
        _check_vocabulary(store.report, tokenizer, vocab_size)
    halves = split([stores[file] for file in train], 0.0 if val else args.val_fraction, args.seed)
    held_out = [(stores[file], np.arange(len(stores[file].units))) for file in val] or [(s, out) for s, _, out in halves]
    weights = args.weights or [1.0] * len(train)
    reports = {file.label: store.report for file, store in stores.items()}
    data = DataSplits(
        Samples.of([(s, kept) for s, kept, _ in halves], limit),
        Samples.of(held_out, limit),
        weights,
        reports,
        limit,
        template,
        context,
    )
    if len(data.train) and not Sampler(data.train.sizes, args.seed, weights).size:
        raise ValueError(f"--data.weights {weights} leave no example of {data.train.sizes}; raise them")
    _check_columns(args.columns, reports)
    if not len(data.train):
        raise ValueError(_nothing_left(data, context))
    if (longest := max(int(half.lengths.max()) for half in (data.train, data.val) if len(half))) > context:
        reason = f"the longest example has {longest:,} tokens, and the model was made for {context:,}"
        remedy = f"give {context}, or say in the model's config.json how its positions are scaled (rope_scaling)"
        raise ValueError(f"--data.max_seq_length {limit}: {reason}; {remedy}")
    # generation must stop at the special tokens that close a turn here, also where no file names them
    ends = {token for report in reports.values() for token in report.ends}
    tokenizer.stop_ids += sorted((ends & tokenizer.special_ids) - set(tokenizer.stop_ids))
    return data


def length_limit(asked: int | None, context: int) -> int:
    """Tokens of the longest sample: as asked for, or the model's context, at most 2048."""
    return asked or min(context, 2048)


def _columns(args: DataArgs) -> dict[str, str]:
    """Our name of each field that has another in the files; ValueError for one that no format has."""
    pairs = (item.split("=", 1) for item in args.columns)
    columns = {ours.strip(): theirs.strip() for ours, theirs in pairs}
    known = sorted({name for form in FORMATS.values() for name in form.fields + form.optional})
    if unknown := [ours for ours in columns if ours not in known]:
        raise ValueError(f"--data.columns {unknown[0]}=...: no format has that field; known: {', '.join(known)}")
    return columns


def _check_columns(columns: list[str], reports: dict[str, EncodingReport]) -> None:
    """ValueError for a field of --data.columns that no record of any file has."""
    for item in columns:
        theirs = item.split("=", 1)[1].strip()
        missing = sum(report.notes.get(f"{WITHOUT} {theirs}", [0])[0] for report in reports.values())
        if missing == sum(report.records for report in reports.values()):
            raise ValueError(f"--data.columns {item}: no record has the field {theirs!r}; name one that they have")


def _nothing_left(data: DataSplits, context: int) -> str:
    notes = {note: count for report in data.reports.values() for note, (count, _) in report.notes.items()}
    if CUT_AWAY in notes:
        remedy = f"all {data.skipped} were skipped; raise --data.max_seq_length (the model's context is {context})"
        return f"no example has an answer within {data.limit} tokens: {remedy}"
    return f"nothing is left to learn from: {'; '.join(f'{count:,} {note}' for note, count in notes.items())}"


def choose_template(choice: str, tokenizer: Tokenizer) -> str:
    """Make `tokenizer` render with the template asked for: auto (its own, else Alpaca), a style by name, or a jinja file.

    Returns whose it is, in words.
    """
    if choice in STYLES:
        tokenizer.use_template(STYLES[choice])
    elif choice != "auto":
        if not Path(choice).is_file():
            raise ValueError(
                f"--data.template {choice}: no such file; use auto, {', '.join(STYLES)}, or a jinja file's path"
            )
        try:
            tokenizer.use_template(Path(choice).read_text("utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"--data.template {choice} is no UTF-8 text; name a jinja file") from None
    if choice == "auto":
        return "the checkpoint's own" if tokenizer.own_template else "Alpaca style, since the checkpoint has none"
    return choice


def unknown_tokens(tokenizer: Tokenizer) -> list[str]:
    """Control tokens that the template writes and the tokenizer does not know: they are spelled out in pieces."""
    written = dict.fromkeys(CONTROL.findall(tokenizer.chat_template))
    return [text for text in written if tokenizer.token_id(text) is None]


def split(stores: list[TokenStore], fraction: float, seed: int) -> list[tuple[TokenStore, np.ndarray, np.ndarray]]:
    """Each store, the numbers of its entries that are kept, and of those held out: about this part of what is different.

    An entry's side is decided by its own content and the seed alone, whatever else is in the file and however it is read.
    Where that holds out nothing, the entry with the lowest place is; where it would leave nothing, the highest stays.
    """
    places = [_places(store.units, seed) for store in stores]
    known = np.sort(np.concatenate(places))
    most = 0.0
    if fraction and len(known):  # the lowest is below it, the highest is not
        most = min(max(fraction, np.nextafter(known[0], 1.0)), known[-1])
    outs = [place < most for place in places]
    return [(store, np.flatnonzero(~out), np.flatnonzero(out)) for store, out in zip(stores, outs, strict=True)]


def _places(units: np.ndarray, seed: int) -> np.ndarray:
    """A place from 0 to 1 of each unit's hash, by the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    x = units + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) / 2.0**64


def _check_vocabulary(report: EncodingReport, tokenizer: Tokenizer, vocab_size: int) -> None:
    largest, where = report.largest
    if largest >= vocab_size:
        token = tokenizer.decode([largest], skip_special=False)
        raise ValueError(
            f"{where}: token {token!r} has the id {largest}, but the model's vocabulary ends at {vocab_size - 1}; "
            f"{tokenizer.folder} holds the tokenizer of another model: copy the right one there"
        )


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """How many samples have how many tokens: the least and most of each bar, and its count."""
    edges = np.unique(np.linspace(lengths.min() - 1, lengths.max(), BARS + 1).astype(int))
    counts, _ = np.histogram(lengths, edges + 1)
    return [tuple(map(int, bar)) for bar in zip(edges[:-1] + 1, edges[1:], counts, strict=True)]
