"""Decoding: tokens one at a time with a KV cache, as text that streams; the commands `generate` and `chat`."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from litft import runs
from litft.args import ChatArgs, GenerateArgs, ModelArgs
from litft.cache import KVCache
from litft.data.records import read_records
from litft.folder import load
from litft.model import GPT
from litft.parallel import pick_accelerator, pick_precision
from litft.prompts import Message
from litft.tokenizer import Tokenizer


@torch.inference_mode()
def stream_ids(
    model: GPT,
    ids: list[int],
    *,
    max_new_tokens: int,
    stop_ids: list[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Token ids that continue `ids`, one at a time, up to a stop token (which is not given out) or the model's context.

    temperature 0 takes the likeliest token. Raises ValueError for an empty prompt, one longer than the context, or ids
    outside the vocabulary.
    """
    room = model.config.context - len(ids)
    if not ids or room < 0:
        reason = f"the prompt has {len(ids)} tokens and the model's context is {model.config.context}"
        raise ValueError(f"{reason}; shorten it" if ids else "the prompt is empty; give at least one token")
    if max(ids) >= model.config.vocab_size:
        reason = f"token id {max(ids)} is outside the model's vocabulary of {model.config.vocab_size}"
        raise ValueError(f"{reason}; the tokenizer belongs to another model: copy the right one into the folder")
    weight = model.embed.weight
    planned = len(ids) + min(max_new_tokens, room)
    cache = KVCache(model.config, 1, planned, weight.device, weight.dtype)
    tokens = torch.tensor([ids], device=weight.device)
    for _ in range(planned - len(ids)):
        logits = last_logits(model, tokens, cache)
        tokens = sample(logits, temperature, top_k, top_p, generator)[None, None]
        if (token := int(tokens)) in stop_ids:
            return
        yield token


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
    logits = logits / temperature
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
    generator = None
    if seed is not None:
        generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    ids = prompt_ids(tokenizer, prompt)
    new = stream_ids(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        stop_ids=tokenizer.stop_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
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
    model, tokenizer = load(folder, pick_precision(args.precision, device), device, args.base_dir)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it")
    return model, tokenizer


def _answer(model: GPT, tokenizer: Tokenizer, args: ModelArgs, prompt: str | list[Message]) -> Iterator[str]:
    return stream(
        model,
        tokenizer,
        prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )


def generate(args: GenerateArgs) -> None:
    """Complete one prompt on stdout, with speeds on stderr; or a file of prompts."""
    records = [({"prompt": args.prompt})]
    if args.prompts:
        records = [_checked(record, where) for where, record in read_records(Path(args.prompts))]
    model, tokenizer = open_model(args)
    count, start = 0, time.perf_counter()
    with open(args.out, "w", encoding="utf-8") if args.out else nullcontext(sys.stdout) as out:
        for record in records:
            prompt = record.get("messages") or record["prompt"]
            if isinstance(prompt, str) and args.template == "auto" and tokenizer.own_template:
                prompt = [{"role": "user", "content": prompt}]
            text = ""
            for piece in _answer(model, tokenizer, args, prompt):
                text += piece
                if not args.prompts:
                    print(piece, end="", flush=True)
            count += len(tokenizer.encode(text, bos=False))
            line = json.dumps({**record, "completion": text}, ensure_ascii=False) if args.prompts else ""
            print(line, file=out, flush=True)
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s", file=sys.stderr)


def _checked(record: dict, where: str) -> dict:
    if not (isinstance(record.get("prompt"), str) or isinstance(record.get("messages"), list)):
        raise ValueError(f"{where}: needs 'prompt' (text) or 'messages' (a list)")
    return record


def chat(args: ChatArgs) -> None:
    """Talk over several turns; without a terminal, read a message a line and print the answers alone."""
    model, tokenizer = open_model(args)
    system = [{"role": "system", "content": args.system}] if args.system else []
    messages, terminal = list(system), sys.stdin.isatty()
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
        messages.append({"role": "user", "content": line})
        if args.debug:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            print(f"--- the model reads\n{text}\n---", file=sys.stderr)
        answer = ""
        for piece in _answer(model, tokenizer, args, messages):
            # where the template's prompt ends in a word, the space behind it is the answer's first token, not its text
            piece = piece if answer else piece.lstrip()
            answer += piece
            print(piece, end="", flush=True)
        print(flush=True)
        messages.append({"role": "assistant", "content": answer})


def _read_line(terminal: bool) -> str | None:
    """The next message; None at the end."""
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        return None
