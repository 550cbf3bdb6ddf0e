"""Decoding: tokens one at a time with a KV cache, as text that streams; the commands `generate` and `chat`."""

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from litft import runs
from litft.args import ChatArgs, GenerateArgs, ModelArgs
from litft.cache import KVCache
from litft.data.files import read_records
from litft.data.formats import check_messages
from litft.folder import resolve
from litft.model import GPT
from litft.parallel import pick_accelerator, pick_precision
from litft.prompts import Message
from litft.tokenizer import Tokenizer


@torch.no_grad()  # not inference_mode: what a sharded network gathers within it could not be trained with afterwards
def stream_ids(
    model: GPT,
    ids: list[int],
    *,
    max_new_tokens: int,
    stop_ids: list[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[int]:
    """Token ids that continue `ids`, one at a time, up to a stop token (which is not given out) or the model's context.

    temperature 0 takes the likeliest token. Raises ValueError for an empty prompt, one longer than the context, or ids
    outside the vocabulary.
    """
    check_prompt(model, ids)
    if not (temperature >= 0 and math.isfinite(temperature) and 0 < top_p <= 1 and (top_k is None or top_k >= 1)):
        raise ValueError(f"temperature {temperature}, top_k {top_k}, top_p {top_p}: need at least 0, at least 1, (0, 1]")
    weight = model.embed.weight
    generator = torch.Generator(weight.device).manual_seed(seed) if seed is not None else None
    planned = min(len(ids) + max_new_tokens, model.config.context)
    cache = KVCache(model.config, 1, planned, weight.device, model.dtype)
    tokens = torch.tensor([ids], device=weight.device)
    for _ in range(planned - len(ids)):
        logits = last_logits(model, tokens, cache)
        tokens = sample(logits, temperature, top_k, top_p, generator)[None, None]
        if (token := int(tokens)) in stop_ids:
            return
        yield token


def check_prompt(model: GPT, ids: list[int]) -> None:
    """ValueError for a prompt that is empty, longer than the context, or not in the model's vocabulary."""
    config = model.config
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    if len(ids) > config.context:
        raise ValueError(f"the prompt has {len(ids)} tokens and the model's context is {config.context}; shorten it")
    if max(ids) >= config.vocab_size:
        reason = f"token id {max(ids)} is outside the model's vocabulary of {config.vocab_size}"
        raise ValueError(f"{reason}; the tokenizer belongs to another model: copy the right one into the folder")


def last_logits(model: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
    """Logits (V,) in fp32 after the last of tokens (1, T); long prompts do not make logits for every position."""
    if tokens.size(1) > 1:
        model(tokens[:, :-1], cache=cache, targets=torch.full_like(tokens[:, :-1], -100))  # fills the cache, no head
    return model(tokens[:, -1:], cache=cache)[0, -1].float()


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator | None = None
) -> Tensor:
    """One token id drawn from logits (V,): scaled by temperature, cut to the top k, then to the top p, as transformers."""
    if temperature == 0:
        return logits.argmax()
    top = logits.max()
    if top.isnan():
        raise ValueError("the model's logits are NaN; look for NaN or infinity in its weights")
    logits = (logits - top) / temperature  # the largest is 0: no temperature overflows
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses the threshold stays
        probabilities = probabilities.index_fill(0, order[beyond], 0.0)
    return torch.multinomial(probabilities, 1, generator=generator)[0]


def stream(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | list[Message],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[str]:
    """Pieces of text that continue a prompt (text, continued as it stands) or answer messages (through the template)."""
    ids = prompt_ids(tokenizer, prompt)
    new = stream_ids(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        stop_ids=tokenizer.stop_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    yield from stream_text(tokenizer, ids, new)


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[Message]) -> list[int]:
    """What the model reads: text with the tokenizer's BOS, or messages rendered up to the answer."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode(tokenizer.apply_chat_template(prompt, add_generation_prompt=True), bos=False)


def stream_text(tokenizer: Tokenizer, before: list[int], new: Iterator[int]) -> Iterator[str]:
    """Token ids to text, holding back bytes that are no whole character yet.

    A token's text depends on those before it (a word's leading space), so a window of ids is decoded with and without the
    new ones, and the difference given out.
    """
    window, start = before[-4:], len(before[-4:])
    for token in new:
        window.append(token)
        old, text = tokenizer.decode(window[:start]), tokenizer.decode(window)
        if len(text) > len(old) and not text.endswith("\ufffd"):
            yield text[len(old) :]
            window, start = window[start:], len(window) - start
    if (rest := tokenizer.decode(window)[len(tokenizer.decode(window[:start])) :]) and len(window) > start:
        yield rest


def open_model(args: ModelArgs) -> tuple[GPT, Tokenizer]:
    """The model and tokenizer that a command names, or those of the newest finished run."""
    device = torch.device(pick_accelerator(args.accelerator))
    folder = args.checkpoint_dir or runs.newest_finished()
    source = resolve(folder, args.base_dir)
    if warning := source.another_quantization(source.quantization(args.quantize)):
        print(warning, file=sys.stderr)
    model, tokenizer = source.model(pick_precision(args.precision, device), device, args.quantize), source.tokenizer()
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it")
    return model, tokenizer


def _sampling(args: ModelArgs) -> dict[str, Any]:
    """The flags that say how tokens are drawn."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    return {name: getattr(args, name) for name in names}


def generate(args: GenerateArgs) -> None:
    """Complete one prompt on stdout, with speeds on stderr; or a file of prompts, all of them checked first."""
    records = read_prompts(Path(args.prompts), args.out) if args.prompts else [{"prompt": args.prompt}]
    model, tokenizer = open_model(args)
    in_template = args.template == "auto" and tokenizer.own_template
    prompts = [prompt_ids(tokenizer, _prompt(record, in_template)) for record in records]
    for ids in prompts:
        check_prompt(model, ids)
    count, start = 0, time.perf_counter()

    def counted(new: Iterator[int]) -> Iterator[int]:
        nonlocal count
        for token in new:
            count += 1
            yield token

    with open(args.out, "w", encoding="utf-8") if args.out else nullcontext(sys.stdout) as out:
        for record, ids in zip(records, prompts, strict=True):
            pieces = []
            new = stream_ids(model, ids, stop_ids=tokenizer.stop_ids, **_sampling(args))
            text = stream_text(tokenizer, ids, counted(new))
            for piece in said(text) if in_template or record.get("messages") else text:
                pieces.append(piece)
                if not args.prompts:
                    print(piece, end="", flush=True)
            answered = {**record, "completion": "".join(pieces)}
            print(json.dumps(answered, ensure_ascii=False) if args.prompts else "", file=out, flush=True)
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s", file=sys.stderr)


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


def chat(args: ChatArgs) -> None:
    """Talk over several turns; without a terminal, read a message a line and print the answers alone."""
    model, tokenizer = open_model(args)
    system = [{"role": "system", "content": args.system}] if args.system else []
    messages, terminal = list(system), sys.stdin.isatty()
    sys.stdin.reconfigure(errors="replace")
    if terminal:
        print("Type a message; /reset begins anew, /exit or Ctrl-D ends.", file=sys.stderr)
    while (line := _read_line(terminal)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(system)
            continue
        if not line:
            continue
        if terminal and line.startswith("/"):
            print(f"{line.split()[0]} is no command; /reset begins anew, /exit ends", file=sys.stderr)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _say(model, tokenizer, args, messages)
        except ValueError as error:
            messages.pop()
            print(f"error: {error}; this message is dropped, /reset begins anew", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})


def _say(model: GPT, tokenizer: Tokenizer, args: ChatArgs, messages: list[Message]) -> str:
    """Print the model's answer as it comes, and return it."""
    if args.debug:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        print(f"--- the model reads\n{text}\n---", file=sys.stderr)
    answer = ""
    for piece in said(stream(model, tokenizer, messages, **_sampling(args))):
        answer += piece
        print(piece, end="", flush=True)
    print(flush=True)
    return answer


def said(pieces: Iterable[str]) -> Iterator[str]:
    """An answer's pieces without the space that some templates leave for the answer's first token to make."""
    begun = False
    for piece in pieces:
        piece = piece if begun else piece.lstrip()
        begun = begun or bool(piece)
        if piece:
            yield piece


def _read_line(terminal: bool) -> str | None:
    """The next message; None at the end."""
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        return None
