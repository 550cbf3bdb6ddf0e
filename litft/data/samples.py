"""Records to samples: rendered, tokenized, masked, truncated; and the split into training and validation."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from litft.args import DataArgs
from litft.data.records import SUFFIXES, read_records, to_messages
from litft.loss import IGNORED
from litft.prompts import ALPACA, Message, assistant_spans
from litft.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """One example, shifted: `targets[t]` is the token after `tokens[t]`, or IGNORED. Both (T,), int64."""

    tokens: Tensor
    targets: Tensor
    messages: list[Message]

    @cached_property
    def supervised(self) -> int:
        """How many tokens the loss counts."""
        return int((self.targets != IGNORED).sum())


@dataclass
class Data:
    """Both splits, and what happened on the way."""

    train: list[Sample]
    val: list[Sample]
    truncated: int = 0
    skipped: int = 0  # no supervised token was left

    @cached_property
    def digest(self) -> str:
        """Which training samples these are."""
        found = hashlib.sha256()
        for sample in self.train:
            found.update(sample.tokens.numpy().tobytes() + sample.targets.numpy().tobytes())
        return found.hexdigest()


def load_data(args: DataArgs, tokenizer: Tokenizer, vocab_size: int, context: int) -> Data:
    """Read, render and tokenize both splits; `tokenizer` takes on the template, and the tokens that end its answers.

    Raises ValueError naming file and record for unreadable data, and for tokens that the model has no embedding for.
    """
    choose_template(args.template, tokenizer)
    data, ends = Data([], []), set()
    limit = args.max_seq_length or min(context, 2048)
    train, val = split_records(args)
    for records, samples in ((train, data.train), (val, data.val)):
        for where, record in records:
            messages = to_messages(record, where, tokenizer.chat_template)
            sample = make_sample(messages, tokenizer, args.mask_prompt, where)
            _check_vocabulary(sample, where, tokenizer, vocab_size)
            if sample.tokens.numel() > limit:
                data.truncated += 1
                sample = Sample(sample.tokens[:limit], sample.targets[:limit], messages)
            elif sample.supervised:
                ends.add(int(sample.targets[sample.targets != IGNORED][-1]))
            if sample.supervised:
                samples.append(sample)
            else:
                data.skipped += 1
    if not data.train:
        raise ValueError(
            f"no example has an answer within {limit} tokens: all {data.skipped} were skipped; raise --data.max_seq_length "
            f"(the model's context is {context})"
        )
    # generation must stop at the special tokens that close a turn here, also where no file names them
    tokenizer.stop_ids += sorted((ends & tokenizer.special_ids) - set(tokenizer.stop_ids))
    return data


def choose_template(choice: str, tokenizer: Tokenizer) -> None:
    """Make `tokenizer` render with the template asked for: auto (its own, else Alpaca), alpaca, or a jinja file."""
    if choice == "alpaca":
        tokenizer.use_template(ALPACA)
    elif choice != "auto":
        if not Path(choice).is_file():
            raise ValueError(f"--data.template {choice}: no such file; use auto, alpaca, or the path of a jinja file")
        tokenizer.use_template(Path(choice).read_text("utf-8"))


def split_records(args: DataArgs) -> tuple[list, list]:
    """Training and validation records: two files, a folder with train.* and val.*, or a fraction held out by seed."""
    path = Path(args.path)
    if path.is_dir():
        files = {
            name: next((f for s in SUFFIXES if (f := path / f"{name}{s}").is_file()), None) for name in ("train", "val")
        }
        if not files["train"]:
            raise ValueError(f"{path} holds no train.json or train.jsonl; name the file itself with --data.path")
        train = read_records(files["train"])
        val_path = Path(args.val_path) if args.val_path else files["val"]
    else:
        train, val_path = read_records(path), Path(args.val_path) if args.val_path else None
    if val_path:
        return train, read_records(val_path)
    held_out = min(round(len(train) * args.val_fraction), len(train) - 1)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(args.seed)).tolist()
    return [train[i] for i in sorted(order[held_out:])], [train[i] for i in sorted(order[:held_out])]


def make_sample(messages: list[Message], tokenizer: Tokenizer, mask_prompt: bool, where: str) -> Sample:
    """Tokenize a conversation as one text; the tokens after each prompt, as inference would see it, are supervised."""
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{where}: the last message is the {messages[-1]['role']}'s; there is no answer to learn")
    try:
        text, spans = assistant_spans(tokenizer.apply_chat_template, messages)
        ids = tokenizer.encode(text, bos=False)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not ids or not spans:
        raise ValueError(f"{where}: the chat template renders nothing; pass another --data.template")
    bounds = [tuple(_shared(ids, tokenizer.encode(text[:at], bos=False)) for at in span) for span in spans]
    if ids[bounds[-1][1] - 1] not in tokenizer.special_ids:  # the template leaves the answer open: end it ourselves
        ids = [*tokenizer.encode(text[: spans[-1][1]], bos=False), tokenizer.stop_ids[-1]]
        bounds[-1] = (bounds[-1][0], len(ids))
    said = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in bounds if mask_prompt else [(0, len(ids))]:
        said[start:end] = True
    tokens = torch.tensor(ids)
    return Sample(tokens[:-1], torch.where(said, tokens, IGNORED)[1:], messages)


def _shared(ids: list[int], prefix: list[int]) -> int:
    """How many ids a text has in common with a beginning of it: the tokens that end before or at that place."""
    return next((i for i, (a, b) in enumerate(zip(ids, prefix, strict=False)) if a != b), min(len(ids), len(prefix)))


def _check_vocabulary(sample: Sample, where: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    largest = int(torch.maximum(sample.tokens.max(), sample.targets.max()))
    if largest >= vocab_size:
        token = tokenizer.decode([largest], skip_special=False)
        raise ValueError(
            f"{where}: token {token!r} has the id {largest}, but the model's vocabulary ends at {vocab_size - 1}; "
            f"{tokenizer.folder} holds the tokenizer of another model: copy the right one there"
        )
