"""The command `generate`: one prompt's completion on stdout, or those of a file of prompts."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from litft import runs
from litft.args import GenerateArgs, ModelArgs
from litft.config import read_object
from litft.data.files import read_records
from litft.data.formats import check_messages
from litft.decode import Decoder, check_prompt
from litft.folder import Source, resolve
from litft.joined import join
from litft.model import GPT
from litft.parallel import pick_accelerator, pick_precision
from litft.prompts import Message
from litft.sampling import Sampling
from litft.speculate import Draft, Guesser, Lookup
from litft.streaming import Piece, Request, Speeds, answers, prompt_ids
from litft.tokenizer import Tokenizer

MAX_NEW_TOKENS = 256


class Opened(NamedTuple):
    """What a command works with."""

    model: GPT
    tokenizer: Tokenizer
    sampling: Sampling
    max_new_tokens: int
    stop: list[str]
    compiled: bool

    def request(self, ids: list[int], number: int = 0) -> Request:
        """To answer a prompt; of many with one seed each has another."""
        seed = None if self.sampling.seed is None else self.sampling.seed + number
        sampling = replace(self.sampling, seed=seed)
        return Request(ids, self.max_new_tokens, sampling, self.tokenizer.stop_ids, self.stop)


def open_model(args: ModelArgs) -> Opened:
    """The model that a command names, or that of the newest finished run; flags win over its generation_config.json."""
    device = torch.device(pick_accelerator(args.accelerator))
    source = resolve(args.checkpoint_dir or runs.newest_finished(), args.base_dir)
    given = _settings(args, source)
    sampling = Sampling(**{item.name: given[item.name] for item in fields(Sampling) if item.name in given})
    if problems := sampling.problems():
        raise ValueError("\n".join(problems))
    if warning := source.another_quantization(source.quantization(args.quantize)):
        print(warning, file=sys.stderr)
    model, tokenizer = _open(source, args.precision, device, args.quantize)
    if outside := [token for token in sampling.logit_bias if token >= model.config.vocab_size]:
        raise ValueError(f"--logit_bias {outside[0]}: the model's vocabulary has {model.config.vocab_size} tokens")
    compiled = args.compile == "true" or (args.compile == "auto" and device.type == "cuda")
    return Opened(model, tokenizer, sampling, given.get("max_new_tokens") or MAX_NEW_TOKENS, given["stop"], compiled)


def _open(source: Source, precision: str, device: torch.device, quantize: str) -> tuple[GPT, Tokenizer]:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ValueError(f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it")
    model = source.model(pick_precision(precision, device), device, quantize)
    join(model.requires_grad_(False))
    return model, tokenizer


def _settings(args: ModelArgs, source: Source) -> dict[str, Any]:
    """What the folder's generation_config.json says, as transformers would go by it, and the flags above it."""
    path = next(
        (f for f in (folder / "generation_config.json" for folder in (source.folder, source.base)) if f.is_file()), None
    )
    stored = read_object(path) if path else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
    found = {name: stored[name] for name in names if stored.get(name) is not None}
    if stored.get("do_sample") is False:
        found["temperature"] = 0.0
    elif stored.get("do_sample"):  # what it leaves out is transformers' own then
        found = {"temperature": 1.0, "top_k": 50} | found
    stop, banned = stored.get("stop_strings") or [], stored.get("suppress_tokens") or []
    stop = [stop] if isinstance(stop, str) else stop
    odd = [f"{name} {value!r}" for name, value in found.items() if type(value) not in (int, float)]
    odd += [f"suppress_tokens {banned!r}"] if not all(type(token) is int and token >= 0 for token in banned) else []
    odd += [f"stop_strings {stop!r}"] if not all(isinstance(text, str) and text for text in stop) else []
    if odd:
        raise ValueError(f"{path}: {', '.join(odd)} cannot be; mend the file, or leave that out")
    found["top_k"] = found.get("top_k") or None  # 0: all
    flags = {name: getattr(args, name) for name in (*names, "presence_penalty", "seed")}
    bias = {int(token): float(value) for token, value in json.loads(args.logit_bias or "{}").items()}
    found |= {name: value for name, value in flags.items() if value is not None}
    return found | {"stop": args.stop or stop, "logit_bias": dict.fromkeys(banned, float("-inf")) | bias}


def make_guesser(args: ModelArgs, opened: Opened, capacity: int) -> Guesser | None:
    """What guesses ahead, where that is asked for; ValueError for a draft model with other tokens."""
    if args.lookup:
        return Lookup()
    if args.draft_dir is None:
        return None
    device = opened.model.embed.weight.device
    model, tokenizer = _open(resolve(args.draft_dir), args.precision, device, "none")
    if tokenizer.vocabulary() != opened.tokenizer.vocabulary():
        raise ValueError(
            f"--draft_dir {args.draft_dir}: it has other tokens than the model; name a model of the same family"
        )
    return Draft(Decoder(model, 1, capacity, opened.compiled), opened.model.config.vocab_size)


def generate(args: GenerateArgs) -> None:
    """Complete one prompt on stdout, with speeds on stderr; or a file of prompts, all of them checked first."""
    records = read_prompts(Path(args.prompts), args.out) if args.prompts else [{"prompt": args.prompt}]
    done = finished(args, records)
    opened = open_model(args)
    tokenizer = opened.tokenizer
    in_template = args.template == "auto" and tokenizer.own_template
    prompts = [prompt_ids(tokenizer, _prompt(record, in_template)) for record in records]
    for ids in prompts:
        check_prompt(opened.model, ids)
    capacity = max(map(len, prompts)) + opened.max_new_tokens
    guesser = make_guesser(args, opened, capacity)
    asked = range(done * args.num_samples, len(records) * args.num_samples)
    decoder = Decoder(opened.model, 1 if guesser else max(1, min(args.batch_size, len(asked))), capacity, opened.compiled)
    requests = (opened.request(prompts[number // args.num_samples], number) for number in asked)
    pieces = answers(decoder, tokenizer, requests, guesser)
    trimmed = [in_template or bool(record.get("messages")) for record in records]
    if args.prompts:
        _write_all(args, records[done:], trimmed[done:], pieces)
    else:
        _print_all(args.num_samples, trimmed[0], pieces)


def _print_all(samples: int, trimmed: bool, pieces: Iterator[tuple[int, Piece]]) -> None:
    """One answer as it comes; of several each when it is done."""
    if samples == 1:
        speeds = None
        for piece in said((piece for _, piece in pieces), trimmed):
            speeds = piece.speeds
            print(piece, end="", flush=True)
        print(flush=True)
        print(speeds, file=sys.stderr)
        return
    for number, text, speeds in _in_order(pieces, [trimmed] * samples):
        print(f"--- {number + 1} of {samples}: {speeds}", file=sys.stderr, flush=True)
        print(text, flush=True)


def _write_all(
    args: GenerateArgs, records: list[dict[str, Any]], trimmed: list[bool], pieces: Iterator[tuple[int, Piece]]
) -> None:
    """The records with their answers, a line each, in their order; every line is there when it is done."""
    began, tokens, count = time.perf_counter(), 0, args.num_samples
    doubled = [own for own in trimmed for _ in range(count)]
    mode = "a" if args.resume else "w"
    with open(args.out, mode, encoding="utf-8") if args.out else nullcontext(sys.stdout) as out:
        texts: list[str] = []
        for number, text, speeds in _in_order(pieces, doubled):
            texts.append(text)
            tokens += speeds.new_tokens
            if len(texts) == count:
                found = {"completion": texts[0]} if count == 1 else {"completions": texts}
                print(json.dumps(records[number // count] | found, ensure_ascii=False), file=out, flush=True)
                texts = []
    seconds = time.perf_counter() - began
    print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s", file=sys.stderr)


def _in_order(pieces: Iterator[tuple[int, Piece]], trimmed: list[bool]) -> Iterator[tuple[int, str, Speeds]]:
    """Whole answers in the order of their requests: number (from 0), text, speeds."""
    texts: dict[int, str] = {}
    done: dict[int, Speeds] = {}
    following = 0
    for number, piece in pieces:
        texts[number] = texts.get(number, "") + piece
        if piece.finish_reason:
            done[number] = piece.speeds
        while following in done:
            text = texts.pop(following)
            yield following, text.lstrip() if trimmed[following] else text, done.pop(following)
            following += 1


def said(pieces: Iterator[Piece], trimmed: bool) -> Iterator[Piece]:
    """An answer's pieces, without the space that some templates leave for the answer's first token to make."""
    begun = not trimmed
    for piece in pieces:
        text = piece if begun else piece.lstrip()
        begun = begun or bool(text)
        yield piece if text == piece else piece.saying(text)


def finished(args: GenerateArgs, records: list[dict[str, Any]]) -> int:
    """How many of the prompts an --out that was begun has answered; ValueError where it is not these prompts'."""
    path = Path(args.out) if args.out else None
    if path is None or not path.exists() or args.overwrite:
        return 0
    if not args.resume:
        raise ValueError(f"--out {path} exists; --resume goes on with it, --overwrite begins it anew")
    whole = path.read_text("utf-8").rpartition("\n")[0]  # what a crash has cut short is made again
    lines = whole.split("\n") if whole else []
    key = "completion" if args.num_samples == 1 else "completions"
    for number, line in enumerate(lines):
        try:
            found = json.loads(line)
            own = found.pop(key) is not None and number < len(records) and found == records[number]
        except (ValueError, KeyError, AttributeError, RecursionError):
            own = False
        if not own:
            raise ValueError(
                f"--resume: line {number + 1} of {path} answers no prompt of {args.prompts}; --overwrite begins anew"
            )
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return len(lines)


def read_prompts(path: Path, out: str | None) -> list[dict[str, Any]]:
    """A file's records with a `prompt` or `messages`; ValueError naming the one that has neither."""
    if out and Path(out).resolve() == path.resolve():
        raise ValueError(f"--out {out} is the file of the prompts; name another")
    records = []
    for where, record in read_records(path):
        if isinstance(record, ValueError):
            raise record
        if record.get("messages") is not None:
            record = {**record, "messages": check_messages(record["messages"], where)}
        elif not isinstance(record.get("prompt"), str):
            raise ValueError(f"{where}: needs 'prompt' (text) or 'messages' (a list)")
        records.append(record)
    return records


def _prompt(record: dict[str, Any], in_template: bool) -> str | list[Message]:
    if record.get("messages"):
        return record["messages"]
    return [{"role": "user", "content": record["prompt"]}] if in_template else record["prompt"]
