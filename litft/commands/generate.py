"""The command `generate`: complete one prompt, or a file of prompts."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from litft.args import GenerateArgs
from litft.data.tokenizer import Tokenizer
from litft.inference.answer_file import (
    EXTRA_FIELDS,
    count_finished,
    remove_settings,
    write_settings,
)
from litft.inference.chat_answers import call_entry
from litft.inference.generation import GenerationChunk, Request, generate_batch
from litft.inference.prompt_files import (
    FinishedAnswer,
    Prompt,
    completed_in_order,
    encode_prompt,
    ends_with_answer,
    read_prompts,
)
from litft.inference.session import (
    Session,
    make_drafter,
    missing_template_note,
    open_session,
)


def run_generation(args: GenerateArgs) -> None:
    """Complete one prompt on stdout, with timings on stderr, or a file of prompts, all checked
    before the first answer."""
    located_records = _located_records(args)
    records = [record for _, record in located_records]
    num_done = count_finished(args, records)
    if args.prompts and num_done == len(records):
        print(f"{args.out} already has answers to all {num_done} prompts", file=sys.stderr)
        return

    session = open_session(args)
    prompts = _encoded(args, session, located_records)
    capacity = max(len(prompt.ids) for prompt in prompts) + session.max_new_tokens
    drafter = make_drafter(args, session, capacity)

    # one number for each answer: prompt i has the numbers from i * num_samples on
    numbers = range(num_done * args.num_samples, len(records) * args.num_samples)
    # speculative decoding runs one text at a time
    rows = 1 if drafter else max(1, min(args.batch_size, len(numbers)))
    session.limit_threads(rows)
    decoder = session.decoder(rows, capacity)

    chunks = generate_batch(
        decoder,
        session.tokenizer,
        _requests(session, prompts, numbers, args.num_samples),
        drafter,
    )
    if not args.prompts and args.num_samples == 1:
        _print_one(session.tokenizer, prompts[0], chunks)
        return

    answers = completed_in_order(
        session.tokenizer, prompts[num_done:], chunks, args.num_samples
    )
    if args.prompts:
        write_settings(args)
        _write_all(args, records[num_done:], answers)
        remove_settings(args)
    else:
        _print_all(args.num_samples, answers)


def _encoded(
    args: GenerateArgs, session: Session, located_records: list[tuple[str, dict[str, Any]]]
) -> list[Prompt]:
    """Return the prompts; each is checked before the first answer, since a file may take hours."""
    in_template = args.template == "auto" and bool(session.tokenizer.own_template)
    prompts = []
    for where, record in located_records:
        if args.template == "none" and record.get("messages") is not None:
            raise ValueError(
                f"{where}: --template none continues plain text, but the record has messages; "
                "leave out the flag, or write a prompt instead"
            )
        prompts.append(encode_prompt(session, where, record, in_template))
    # messages were written in a style, since the model has no template
    note = missing_template_note(session.tokenizer)
    if note and any(prompt.is_chat for prompt in prompts):
        print(note, file=sys.stderr)
    return prompts


def _located_records(args: GenerateArgs) -> list[tuple[str, dict[str, Any]]]:
    """Return the records to answer, each with its place in the file; name those that end with an
    answer."""
    if not args.prompts:
        return [("", {"prompt": args.prompt})]
    key = "completion" if args.num_samples == 1 else "completions"
    located_records = read_prompts(Path(args.prompts), args.out, key)
    answered = sum(ends_with_answer(record) for _, record in located_records)
    if answered:
        print(
            f"note: {answered:,} of {len(located_records):,} records end with an answer, which is "
            "left out of the prompt",
            file=sys.stderr,
        )
    return located_records


def _requests(
    session: Session, prompts: list[Prompt], numbers: range, num_samples: int
) -> Iterator[Request]:
    """Yield the request of each answer."""
    for number in numbers:
        prompt = prompts[number // num_samples]
        yield session.request(prompt.ids, number, is_chat=prompt.is_chat)


def _print_one(
    tokenizer: Tokenizer, prompt: Prompt, chunks: Iterator[tuple[int, GenerationChunk]]
) -> None:
    """Print an answer as it is generated: the content on stdout, the reasoning on stderr."""
    parser = prompt.parser(tokenizer)
    stats = None
    for _, chunk in chunks:
        stats = chunk.stats
        parts = parser.push(chunk)
        if chunk.finish_reason:
            parts += parser.finish(chunk.is_cut)
        for part in parts:
            stream = sys.stderr if part.kind == "reasoning" else sys.stdout
            if part.call is None:
                text = part.text
            else:
                text = json.dumps(call_entry(part.call), ensure_ascii=False) + "\n"
            print(text, end="", file=stream, flush=True)
    print(flush=True)
    print(stats, file=sys.stderr)


def _print_all(num_samples: int, answers: Iterator[FinishedAnswer]) -> None:
    """Print several answers one by one as they complete."""
    for answer in answers:
        print(
            f"--- {answer.number + 1} of {num_samples}: {answer.stats}",
            file=sys.stderr,
            flush=True,
        )
        if answer.parsed.reasoning:
            print(answer.parsed.reasoning, file=sys.stderr, flush=True)
        calls = [
            json.dumps(call_entry(call), ensure_ascii=False) for call in answer.parsed.calls
        ]
        print("\n".join(filter(None, [answer.parsed.content, *calls])), flush=True)


def _write_all(
    args: GenerateArgs, records: list[dict[str, Any]], answers: Iterator[FinishedAnswer]
) -> None:
    """Write the records with their answers, one JSON line each, in order; each line as soon as it
    is complete. records: those without answers; the numbers of answers count from the first of
    them."""
    start = time.perf_counter()
    tokens = 0
    mode = "a" if args.resume else "w"
    # with --resume, the file holds only whole lines of this run, see `count_finished`
    with (
        open(args.out, mode, encoding="utf-8")
        if args.out
        else nullcontext(sys.stdout) as out
    ):
        fields: list[dict[str, Any]] = []
        for answer in answers:
            fields.append(answer.fields())
            tokens += answer.stats.new_tokens
            if len(fields) < args.num_samples:
                continue
            # a line has all samples of its prompt
            index = answer.number // args.num_samples
            if sys.stderr.isatty():
                print(
                    f"\r{index + 1} of {len(records)}", end="", file=sys.stderr, flush=True
                )
            line = records[index] | _answer_fields(fields)
            print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
            fields = []
    seconds = time.perf_counter() - start
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(
        f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s",
        file=sys.stderr,
    )


def _answer_fields(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of an output line.

    Those of several answers are lists; reasoning and calls only where there are.
    """
    if len(answers) == 1:
        return answers[0]
    fields: dict[str, Any] = {"completions": [answer["completion"] for answer in answers]}
    for name in EXTRA_FIELDS:
        if any(name in answer for answer in answers):
            fields[name] = [answer.get(name) for answer in answers]
    return fields
