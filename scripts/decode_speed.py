"""Measure the decoding speed of litft, and of transformers' generate with its dynamic and static
cache.

    python scripts/decode_speed.py --checkpoint_dir DIR --precision bf16    # needs pip install -e
    '.[test]' python scripts/decode_speed.py --checkpoint_dir FOLDER_WITH_A_CONFIG_JSON --only_litft
    --accelerator cuda

All contenders run in one process and take turns, answer by answer. They have the same model, dtype,
threads and prompt, decode greedily, and generate the same number of tokens. The time of an answer
covers prefill, all decode steps and the choice of tokens. In fp32 the tokens must be equal;
otherwise the comparison is refused. The last line relates litft's speed
to the copy bandwidth of the device: a decode step reads every weight and the KV cache once. If the
folder has no weights, they are random.
"""

import json
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
from litft.args.parser import parse
from litft.args.value_checks import below_minimum
from litft.cli import COMMANDS, user_errors
from litft.pretrained.build import base_model


@dataclass
class SpeedArgs:
    """Measure the decoding speed of litft, alone or compared with transformers."""

    checkpoint_dir: str | None = None
    """The folder of the model. If it has only a config.json, the weights are random."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """The dtype of weights and computation."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """The device type to run on. auto: cuda if available."""
    compile: bool = False
    """Compile litft's prefill and decode steps."""
    only_litft: bool = False
    """Do not measure transformers."""
    rows: int = 1
    """Number of sequences to decode at the same time."""
    prompt_tokens: int = 32
    """Number of random tokens in the prompt."""
    new_tokens: int = 128
    """Number of tokens per answer."""
    rounds: int = 5
    """Number of measured answers per contender, after one warmup answer."""
    busy: int = 0
    """Number of other processes that keep a core busy during the measurement."""
    out: str | None = None
    """A JSON file to write the results to. Default: no file."""

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        if self.checkpoint_dir:
            missing = []
        else:
            missing = ["--checkpoint_dir is missing: name the folder of the model"]
        positive = ("rows", "prompt_tokens", "new_tokens", "rounds")
        return (
            missing
            + impossible_numbers(self)
            + below_minimum(self, "", 1, *positive)
            + below_minimum(self, "", 0, "busy")
        )


def main(args: SpeedArgs) -> None:
    """Measure all contenders and print the results."""
    import torch

    from litft.distributed.devices import limit_threads, pick_accelerator
    from litft.inference.fused_linears import fuse_linears
    from litft.pretrained.folder import resolve

    device = torch.device(pick_accelerator(args.accelerator))
    source = resolve(args.checkpoint_dir)
    has_weights = any(Path(args.checkpoint_dir).glob("*.safetensors"))
    if has_weights:
        model = base_model(source, args.precision, device)
    else:
        model = random_network(source, args.precision, device)
    fuse_linears(model, pack=not args.compile)
    limit_threads(model, args.rows)  # as litft's commands do; applies to all contenders
    prompt = torch.randint(
        0,
        model.config.vocab_size,
        (1, args.prompt_tokens),
        generator=torch.Generator().manual_seed(0),
    )
    contenders = {"litft": litft_answer(model, prompt, args)}
    if not args.only_litft:
        contenders |= transformers_answers(args, has_weights, device, prompt)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    tokens: dict[str, list[int]] = {}
    for _ in range(args.rounds + 1):
        for name, answer in contenders.items():
            start = time.perf_counter()
            tokens[name] = answer()
            seconds[name].append(time.perf_counter() - start)
    if (
        has_weights
        and args.precision == "fp32"
        and any(other != tokens["litft"] for other in tokens.values())
    ):
        raise ValueError(
            "the contenders generated different tokens, so their speeds cannot be compared; "
            "measure litft with --only_litft"
        )
    report(args, model, {name: times[1:] for name, times in seconds.items()}, device)


def random_network(source, precision: str, device):
    """Return the network of a folder with random weights, for inference."""
    from litft.distributed.devices import DTYPES
    from litft.model.placement import allocate

    model = source.meta_model(DTYPES[precision]).requires_grad_(False).eval()
    allocate(model, device)
    model.rotaries.to_empty(device=device)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    return model


def litft_answer(model, prompt, args: SpeedArgs) -> Callable[[], list[int]]:
    """Return a function that generates an answer as `litft generate` does, greedily, and returns
    its token ids."""
    from litft.args import Sampling
    from litft.inference.decoder import Decoder
    from litft.inference.generation import Request, generate_batch

    class Silent:
        """A tokenizer without text, because transformers' generate decodes none either."""

        special_ids = frozenset()

        def encode(self, text: str, bos: bool | None = None) -> list[int]:
            return []

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


def transformers_answers(
    args: SpeedArgs, has_weights: bool, device, prompt
) -> dict[str, Callable[[], list[int]]]:
    """Return the same functions for transformers, by name: one with the dynamic and one with the
    static cache."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.precision]
    if has_weights:
        model = AutoModelForCausalLM.from_pretrained(args.checkpoint_dir, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(args.checkpoint_dir), dtype=dtype
        )
    model.to(device).eval()
    inputs = prompt.expand(args.rows, -1).to(device)
    settings = dict(
        max_new_tokens=args.new_tokens,
        min_new_tokens=args.new_tokens,
        do_sample=False,
        eos_token_id=None,
    )

    def answer(cache: str) -> list[int]:
        # without a mask, generate would treat stop tokens in the prompt as padding
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            cache_implementation=cache,
            **settings,
        )
        return output[0, args.prompt_tokens :].tolist()

    return {
        f"transformers, {cache} cache": (lambda cache=cache: answer(cache))
        for cache in ("dynamic", "static")
    }


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Within the context, `count` other processes each keep a core busy."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def report(args: SpeedArgs, model, times: dict[str, list[float]], device) -> None:
    """Print the tokens/s of each contender, and the share of the copy bandwidth that litft
    reaches."""
    import torch

    rates = {}
    for name, seconds in times.items():
        rates[name] = args.rows * args.new_tokens / statistics.median(seconds)
        spread = (
            f"{args.rows * args.new_tokens / max(seconds):.1f} to "
            f"{args.rows * args.new_tokens / min(seconds):.1f}"
        )
        print(f"{name}: {rates[name]:.1f} tokens/s ({spread})")
    others = [rate for name, rate in rates.items() if name != "litft"]
    if others:
        print(f"litft / the faster one: {rates['litft'] / max(others):.2f}")
    bytes_read = bytes_of_a_step(model, args.rows, args.prompt_tokens + args.new_tokens / 2)
    bandwidth = copy_speed(device)
    read_speed = bytes_read * rates["litft"] / args.rows
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{bytes_read / 1e9:.2f} GB per step: {read_speed / 1e9:.1f} GB/s, "
        f"{read_speed / bandwidth:.0%} of the copy bandwidth ({bandwidth / 1e9:.1f} GB/s); "
        f"{args.precision}, {hardware}, torch {torch.__version__}, {date.today()}"
    )
    if args.out:
        figures = {
            "tokens_per_second": rates,
            "bandwidth": bandwidth,
            "share": read_speed / bandwidth,
        }
        Path(args.out).write_text(json.dumps(figures), "utf-8")


def bytes_of_a_step(model, rows: int, length: float) -> float:
    """Return what a decoded token of each row reads: all weights, and the keys and values of `rows`
    texts of `length` tokens."""
    config = model.config
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not config.tied:
        weights -= model.embed.weight.nbytes
    values_of_token = 2 * len(config.layers) * config.n_kv_heads * config.head_dim
    return weights + rows * length * values_of_token * model.dtype.itemsize


def copy_speed(device, size: int | None = None) -> float:
    """Return the copy bandwidth of the device in bytes/s: bytes read plus bytes written.

    size: of the copy, by default 2 GB on a GPU, where the time of a launch must not count, and 268
    MB on a CPU.
    """
    import torch

    size = size or (2 * 10**9 if device.type == "cuda" else 2**28)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return (
        2
        * size
        / statistics.median(
            [timed(lambda: target.copy_(source), device) for _ in range(8)][2:]
        )
    )


def timed(function: Callable, device) -> float:
    """Return the seconds that `function` takes on the device."""
    import torch

    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", COMMANDS["generate"].spin_count)
    with user_errors():
        args = parse(SpeedArgs, sys.argv[1:])
        with busy_processes(args.busy):
            main(args)
