"""The command `generate`: complete one prompt, or a file of prompts."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from litft.args import GenerateArgs
from litft.data.messages import check_messages
from litft.data.readers import read_records
from litft.inference.decoder import check_prompt
from litft.inference.generation import GenerationChunk, GenerationStats, generate_batch
from litft.inference.session import Session, make_drafter, open_session
from litft.inference.streaming import prompt_ids


def generate(args: GenerateArgs) -> None:
    """Complete one prompt on stdout, with timings on stderr, or a file of prompts, all checked before the first answer."""
    key = "completion" if args.num_samples == 1 else "completions"
    located_records = read_prompts(Path(args.prompts), args.out, key) if args.prompts else [("", {"prompt": args.prompt})]
    records = [record for _, record in located_records]
    num_done = count_finished(args, records)
    if args.prompts and num_done == len(records):
        print(f"{args.out} already has answers to all {num_done} prompts", file=sys.stderr)
        return
    session = open_session(args)
    tokenizer = session.tokenizer
    in_template = args.template == "auto" and bool(tokenizer.own_template)
    prompts = [_encode_prompt(session, where, record, in_template) for where, record in located_records]
    capacity = max(map(len, prompts)) + session.max_new_tokens
    drafter = make_drafter(args, session, capacity)
    numbers = range(num_done * args.num_samples, len(records) * args.num_samples)
    rows = 1 if drafter else max(1, min(args.batch_size, len(numbers)))
    session.limit_threads(rows)
    decoder = session.decoder(rows, capacity)
    strip_leading = [in_template or bool(record.get("messages")) for record in records]
    numbered_prompts = ((number, number // args.num_samples) for number in numbers)
    requests = (session.request(prompts[index], number, strip_leading[index]) for number, index in numbered_prompts)
    chunks = generate_batch(decoder, tokenizer, requests, drafter)
    if args.prompts:
        _write_all(args, records[num_done:], chunks)
    else:
        _print_all(args.num_samples, chunks)


def _print_all(num_samples: int, chunks: Iterator[tuple[int, GenerationChunk]]) -> None:
    """Print a single answer as it is generated, or several answers one by one as they complete."""
    if num_samples == 1:
        stats = None
        for _, chunk in chunks:
            stats = chunk.stats
            print(chunk, end="", flush=True)
        print(flush=True)
        print(stats, file=sys.stderr)
        return
    for number, text, stats in _completed_in_order(chunks):
        print(f"--- {number + 1} of {num_samples}: {stats}", file=sys.stderr, flush=True)
        print(text, flush=True)


def _write_all(args: GenerateArgs, records: list[dict[str, Any]], chunks: Iterator[tuple[int, GenerationChunk]]) -> None:
    """Write the records with their answers, one JSON line each, in order; each line as soon as it is complete."""
    start, tokens, num_samples = time.perf_counter(), 0, args.num_samples
    mode = "a" if args.resume else "w"
    with open(args.out, mode, encoding="utf-8") if args.out else nullcontext(sys.stdout) as out:
        texts: list[str] = []
        for number, text, stats in _completed_in_order(chunks):
            texts.append(text)
            tokens += stats.new_tokens
            if len(texts) == num_samples:
                if sys.stderr.isatty():
                    print(f"\r{number // num_samples + 1} of {len(records)}", end="", file=sys.stderr, flush=True)
                answers = {"completion": texts[0]} if num_samples == 1 else {"completions": texts}
                print(json.dumps(records[number // num_samples] | answers, ensure_ascii=False), file=out, flush=True)
                texts = []
    seconds = time.perf_counter() - start
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s", file=sys.stderr)


def _completed_in_order(chunks: Iterator[tuple[int, GenerationChunk]]) -> Iterator[tuple[int, str, GenerationStats]]:
    """Yield complete answers in the order of their requests: index, text, stats."""
    texts: dict[int, str] = {}
    done: dict[int, GenerationStats] = {}
    next_number = 0
    for number, chunk in chunks:
        texts[number] = texts.get(number, "") + chunk
        if chunk.finish_reason:
            done[number] = chunk.stats
        while next_number in done:
            yield next_number, texts.pop(next_number), done.pop(next_number)
            next_number += 1


def count_finished(args: GenerateArgs, records: list[dict[str, Any]]) -> int:
    """Return how many prompts a partial --out answers. Raise ValueError if it does not belong to these prompts."""
    path = Path(args.out) if args.out else None
    if path is None or not path.exists() or args.overwrite:
        return 0
    if not args.resume:
        raise ValueError(f"--out {path} exists; --resume continues it, --overwrite replaces it")
    complete = path.read_bytes().rpartition(b"\n")  # a line that a crash has cut short is generated again
    lines = complete[0].split(b"\n") if complete[1] else []
    for number, line in enumerate(lines):
        if number >= len(records) or not _is_answer(line, records[number], args.num_samples):
            reason = f"line {number + 1} of {path} does not answer {args.prompts} with --num_samples {args.num_samples}"
            raise ValueError(f"--resume: {reason}; use --overwrite to start over")
    os.truncate(path, len(complete[0] + complete[1]))
    return len(lines)


def _is_answer(line: bytes, record: dict[str, Any], num_samples: int) -> bool:
    """Return whether an output line belongs to this record and has `num_samples` answers."""
    try:
        output_record = json.loads(line)
        texts = [output_record.pop("completion")] if num_samples == 1 else output_record.pop("completions")
        return len(texts) == num_samples and output_record == record
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False


def read_prompts(path: Path, out: str | None, key: str) -> list[tuple[str, dict[str, Any]]]:
    """Read records with a `prompt` or `messages`; return (location, record) pairs.

    key: the field that answers are written to. Raises ValueError with the location of the first invalid record.
    """
    if out and Path(out).exists() and path.exists() and Path(out).samefile(path):
        raise ValueError(f"--out {out} is the prompts file; name another")
    records = []
    for where, record in read_records(path):
        if isinstance(record, ValueError):
            raise record
        if record.get("messages") is not None:
            record = {**record, "messages": check_messages(record["messages"], where)}
        elif not isinstance(record.get("prompt"), str):
            raise ValueError(f"{where}: needs 'prompt' (text) or 'messages' (a list)")
        if key in record:
            raise ValueError(f"{where}: already has a field {key!r}, which the answer would overwrite; rename it")
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:  # a date from Parquet, a lone surrogate
            raise ValueError(f"{where}: cannot be written as JSON ({error}); fix or remove it") from None
        records.append((where, record))
    return records


def _encode_prompt(session: Session, where: str, record: dict[str, Any], in_template: bool) -> list[int]:
    """Tokenize the prompt of a record. Raise ValueError with its location if the model cannot read it."""
    prompt = record.get("messages") or record["prompt"]
    if in_template and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    try:
        ids = prompt_ids(session.tokenizer, prompt)
        check_prompt(session.model, ids)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None
    return ids
