"""The command `generate`: one prompt's completion on stdout, or those of a file of prompts."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from litft.args import GenerateArgs
from litft.data.formats import check_messages
from litft.data.readers import read_records
from litft.inference.decoder import check_prompt
from litft.inference.generation import GenerationChunk, GenerationStats, generate_batch, prompt_ids
from litft.inference.session import Session, make_drafter, open_session


def generate(args: GenerateArgs) -> None:
    """Complete one prompt on stdout, with speeds on stderr; or a file of prompts, all of them checked first."""
    key = "completion" if args.num_samples == 1 else "completions"
    found = read_prompts(Path(args.prompts), args.out, key) if args.prompts else [("", {"prompt": args.prompt})]
    records = [record for _, record in found]
    done = finished(args, records)
    if args.prompts and done == len(records):
        print(f"{args.out} answers all {done} prompts already", file=sys.stderr)
        return
    session = open_session(args)
    tokenizer = session.tokenizer
    in_template = args.template == "auto" and bool(tokenizer.own_template)
    prompts = [_ids(session, where, record, in_template) for where, record in found]
    capacity = max(map(len, prompts)) + session.max_new_tokens
    drafter = make_drafter(args, session, capacity)
    asked = range(done * args.num_samples, len(records) * args.num_samples)
    rows = 1 if drafter else max(1, min(args.batch_size, len(asked)))
    session.limit_threads(rows)
    decoder = session.decoder(rows, capacity)
    trimmed = [in_template or bool(record.get("messages")) for record in records]
    places = ((number, number // args.num_samples) for number in asked)
    requests = (session.request(prompts[place], number, trimmed[place]) for number, place in places)
    pieces = generate_batch(decoder, tokenizer, requests, drafter)
    if args.prompts:
        _write_all(args, records[done:], pieces)
    else:
        _print_all(args.num_samples, pieces)


def _print_all(samples: int, pieces: Iterator[tuple[int, GenerationChunk]]) -> None:
    """One answer as it comes; of several each when it is done."""
    if samples == 1:
        stats = None
        for _, piece in pieces:
            stats = piece.stats
            print(piece, end="", flush=True)
        print(flush=True)
        print(stats, file=sys.stderr)
        return
    for number, text, stats in _in_order(pieces):
        print(f"--- {number + 1} of {samples}: {stats}", file=sys.stderr, flush=True)
        print(text, flush=True)


def _write_all(args: GenerateArgs, records: list[dict[str, Any]], pieces: Iterator[tuple[int, GenerationChunk]]) -> None:
    """The records with their answers, a line each, in their order; every line is there when it is done."""
    began, tokens, count = time.perf_counter(), 0, args.num_samples
    mode = "a" if args.resume else "w"
    with open(args.out, mode, encoding="utf-8") if args.out else nullcontext(sys.stdout) as out:
        texts: list[str] = []
        for number, text, stats in _in_order(pieces):
            texts.append(text)
            tokens += stats.new_tokens
            if len(texts) == count:
                if sys.stderr.isatty():
                    print(f"\r{number // count + 1} of {len(records)}", end="", file=sys.stderr, flush=True)
                found = {"completion": texts[0]} if count == 1 else {"completions": texts}
                print(json.dumps(records[number // count] | found, ensure_ascii=False), file=out, flush=True)
                texts = []
    seconds = time.perf_counter() - began
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s", file=sys.stderr)


def _in_order(pieces: Iterator[tuple[int, GenerationChunk]]) -> Iterator[tuple[int, str, GenerationStats]]:
    """Whole answers in the order of their requests: number (from 0), text, speeds."""
    texts: dict[int, str] = {}
    done: dict[int, GenerationStats] = {}
    following = 0
    for number, piece in pieces:
        texts[number] = texts.get(number, "") + piece
        if piece.finish_reason:
            done[number] = piece.stats
        while following in done:
            yield following, texts.pop(following), done.pop(following)
            following += 1


def finished(args: GenerateArgs, records: list[dict[str, Any]]) -> int:
    """How many of the prompts an --out that was begun has answered; ValueError where it is not these prompts'."""
    path = Path(args.out) if args.out else None
    if path is None or not path.exists() or args.overwrite:
        return 0
    if not args.resume:
        raise ValueError(f"--out {path} exists; --resume goes on with it, --overwrite begins it anew")
    whole = path.read_bytes().rpartition(b"\n")  # what a crash has cut short is made again
    lines = whole[0].split(b"\n") if whole[1] else []
    for number, line in enumerate(lines):
        if number >= len(records) or not _answers(line, records[number], args.num_samples):
            reason = f"line {number + 1} of {path} is no answer to {args.prompts} with --num_samples {args.num_samples}"
            raise ValueError(f"--resume: {reason}; --overwrite begins anew")
    os.truncate(path, len(whole[0] + whole[1]))
    return len(lines)


def _answers(line: bytes, record: dict[str, Any], samples: int) -> bool:
    """Whether a line is what this record's answers were written as."""
    try:
        found = json.loads(line)
        texts = [found.pop("completion")] if samples == 1 else found.pop("completions")
        return len(texts) == samples and found == record
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False


def read_prompts(path: Path, out: str | None, key: str) -> list[tuple[str, dict[str, Any]]]:
    """A file's records with a `prompt` or `messages`, and where each stands; ValueError naming one that cannot be answered.

    key: what the answers are written as.
    """
    if out and Path(out).exists() and path.exists() and Path(out).samefile(path):
        raise ValueError(f"--out {out} is the file of the prompts; name another")
    records = []
    for where, record in read_records(path):
        if isinstance(record, ValueError):
            raise record
        if record.get("messages") is not None:
            record = {**record, "messages": check_messages(record["messages"], where)}
        elif not isinstance(record.get("prompt"), str):
            raise ValueError(f"{where}: needs 'prompt' (text) or 'messages' (a list)")
        if key in record:
            raise ValueError(f"{where}: has a {key!r} of its own, which the answer's would replace; rename that field")
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:  # a date of Parquet's, half of a surrogate pair
            raise ValueError(f"{where}: cannot be written beside its answer ({error}); mend it, or leave it out") from None
        records.append((where, record))
    return records


def _ids(session: Session, where: str, record: dict[str, Any], in_template: bool) -> list[int]:
    """A record's prompt as the model reads it; ValueError saying where it cannot be read."""
    prompt = record.get("messages") or record["prompt"]
    if in_template and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    try:
        ids = prompt_ids(session.tokenizer, prompt)
        check_prompt(session.model, ids)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None
    return ids
