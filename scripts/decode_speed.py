"""Decoding speed of litft, beside transformers' generate with its dynamic and its static cache; needs the `test` extra.

    python scripts/decode_speed.py --checkpoint_dir DIR --precision bf16
    python scripts/decode_speed.py --checkpoint_dir FOLDER_WITH_A_CONFIG_JSON --only_litft --accelerator cuda

All take turns in one process, answer by answer: the same model, dtype, threads and prompt, greedy, so many new tokens
whatever they are; an answer is reading the prompt, every step, and the choice of tokens. The tokens must agree (in fp32), or
the comparison is refused. Beside it the device's speed of copying memory, and what part of that decoding reaches: a token
reads every weight once, and the keys and values so far. Without weights in the folder they are random ones.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

from litft.args import impossible_numbers
from litft.args.checks import below_minimum
from litft.args.parser import parse
from litft.cli import COMMANDS, user_errors


@dataclass
class SpeedArgs:
    """Measure decoding, alone or beside transformers'."""

    checkpoint_dir: str | None = None
    """The model's folder, or one with its config.json alone: then the weights are random."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """The dtype of weights and computation."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    compile: bool = False
    """Compile litft's reading and decoding."""
    only_litft: bool = False
    """Leave transformers out."""
    rows: int = 1
    """How many texts at once."""
    prompt_tokens: int = 32
    """The length of the prompt, random tokens."""
    new_tokens: int = 128
    """How many tokens each answer has."""
    speculative_rounds: int = 5
    """How often each takes its turn, after one that is not counted."""
    busy: int = 0
    """Measure beside so many other processes that each use a core all the time."""

    def problems(self) -> list[str]:
        """What is missing, or impossible."""
        missing = [] if self.checkpoint_dir else ["--checkpoint_dir is missing: name a model's folder"]
        positive = ("rows", "prompt_tokens", "new_tokens", "rounds")
        return (
            missing + impossible_numbers(self) + below_minimum(self, "", 1, *positive) + below_minimum(self, "", 0, "busy")
        )


def main(args: SpeedArgs) -> None:
    """Measure, and print a line each."""
    import torch

    from litft.distributed.devices import DTYPES, limit_threads, pick_accelerator
    from litft.inference.fused_linears import fuse_linears
    from litft.model.placement import allocate
    from litft.pretrained import resolve

    device = torch.device(pick_accelerator(args.accelerator))
    source = resolve(args.checkpoint_dir)
    has_weights = any(Path(args.checkpoint_dir).glob("*.safetensors"))
    if has_weights:
        model = source.base_model(args.precision, device)
    else:
        model = source.meta_model(DTYPES[args.precision]).requires_grad_(False).eval()
        allocate(model, device)
        model.rotaries.to_empty(device=device)
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    fuse_linears(model, pack=not args.compile)
    limit_threads(model, args.rows)  # as the commands do, and for all contenders
    prompt = torch.randint(0, model.config.vocab_size, (1, args.prompt_tokens), generator=torch.Generator().manual_seed(0))
    contenders = {"litft": ours(model, prompt, args)}
    if not args.only_litft:
        contenders |= theirs(args, has_weights, device, prompt)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    tokens: dict[str, list[int]] = {}
    for _ in range(args.speculative_rounds + 1):
        for name, answer in contenders.items():
            began = time.perf_counter()
            tokens[name] = answer()
            found[name].append(time.perf_counter() - began)
    if has_weights and args.precision == "fp32" and any(other != tokens["litft"] for other in tokens.values()):
        raise ValueError("the contenders say different things: there is nothing to compare")
    report(args, model, {name: seconds[1:] for name, seconds in found.items()}, device)


def ours(model, prompt, args: SpeedArgs) -> Callable[[], list[int]]:
    """litft's answer: the decoder that `litft generate` has, and its greedy choice."""
    from litft.args import Sampling
    from litft.inference.decoder import Decoder
    from litft.inference.generation import Request, generate_batch

    class Silent:
        """No text is made: transformers makes none either."""

        def decode(self, ids: list[int], skip_special: bool = True) -> str:
            return ""

    ids = prompt[0].tolist()
    decoder = Decoder(model, args.rows, args.prompt_tokens + args.new_tokens, args.compile)
    requests = [Request(ids, args.new_tokens, Sampling(0.0))] * args.rows

    def answer() -> list[int]:
        for row in range(args.rows):
            decoder.truncate(row, 0)
        pieces = list(generate_batch(decoder, Silent(), requests))
        return [token for number, piece in pieces if number == 0 for token in piece.tokens]

    return answer


def theirs(args: SpeedArgs, has_weights: bool, device, prompt) -> dict[str, Callable[[], list[int]]]:
    """transformers' answers, with its two caches."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.precision]
    if has_weights:
        model = AutoModelForCausalLM.from_pretrained(args.checkpoint_dir, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.checkpoint_dir), dtype=dtype)
    model.to(device).eval()
    inputs = prompt.expand(args.rows, -1).to(device)
    settings = dict(max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, do_sample=False, eos_token_id=None)

    def answer(cache: str) -> list[int]:
        # without a mask, generate takes the end tokens of earlier turns for padding
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), cache_implementation=cache, **settings)
        return out[0, args.prompt_tokens :].tolist()

    return {f"transformers, {cache} cache": (lambda cache=cache: answer(cache)) for cache in ("dynamic", "static")}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Inside, so many other processes compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def report(args: SpeedArgs, model, found: dict[str, list[float]], device) -> None:
    """A line each, and what part of the memory's speed litft reaches."""
    import torch

    config, rates = model.config, {}
    for name, seconds in found.items():
        rates[name] = args.rows * args.new_tokens / statistics.median(seconds)
        spread = f"{args.rows * args.new_tokens / max(seconds):.1f} to {args.rows * args.new_tokens / min(seconds):.1f}"
        print(f"{name}: {rates[name]:.1f} tokens/s ({spread})")
    if others := [rate for name, rate in rates.items() if name != "litft"]:
        print(f"litft / the faster one: {rates['litft'] / max(others):.2f}")
    weights = sum(p.nbytes for p in model.parameters()) - (0 if config.tied else model.embed.weight.nbytes)
    keys = 2 * len(config.layers) * config.n_kv_heads * config.head_dim * (args.prompt_tokens + args.new_tokens / 2)
    read = weights + args.rows * keys * model.dtype.itemsize
    copied = copy_speed(device)
    reached = read * rates["litft"] / args.rows
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{read / 1e9:.2f} GB a step: {reached / 1e9:.1f} GB/s, {reached / copied:.0%} of the copy bandwidth "
        f"({copied / 1e9:.1f} GB/s); {args.precision}, {hardware}, torch {torch.__version__}, {date.today()}"
    )


def copy_speed(device, size: int = 2**28) -> float:
    """Bytes a second that a copy reads and writes, together."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(8):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size / statistics.median(seconds[2:])


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", COMMANDS["generate"].spin_count)
    with user_errors():
        args = parse(SpeedArgs, sys.argv[1:])
        with busy_processes(args.busy):
            main(args)
