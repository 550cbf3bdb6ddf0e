"""Throughput of `litft serve` at several numbers of clients, beside transformers' own server; needs the `test` extra.

    pip install fastapi   # which `transformers serve` wants
    python scripts/serve_speed.py --checkpoint_dir DIR

Each server is a process of its own, and they take turns, number by number: while one is asked the others wait. A client asks
one question after the other, each another, greedily, and reads the whole answer. Counted are the tokens that the servers say
they have made, over the time from the first question to the last answer; the median of the rounds is told.
"""

import asyncio
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal

from litft.args import impossible_numbers
from litft.args.checks import below_minimum
from litft.args.parser import parse
from litft.cli import user_errors

ROOT = Path(__file__).parent.parent
THINGS = "story poem letter speech recipe review report joke song riddle".split()
MATTERS = "the sea, a small dog, an old clock, two friends, the moon, a lost key, winter, bread, a train, rain".split(", ")


@dataclass
class ServeSpeedArgs:
    """Measure servers."""

    checkpoint_dir: str | None = None
    """The model's folder."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """The dtype of weights and computation."""
    accelerator: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    clients: list[str] = field(default_factory=lambda: ["1", "8", "32"])
    """How many ask at once, one number after the other."""
    questions: int = 2
    """How many questions each client asks."""
    new_tokens: int = 64
    """The most tokens of an answer."""
    speculative_rounds: int = 3
    """How often each server takes its turn, after one that is not counted."""

    def problems(self) -> list[str]:
        """What is missing, or impossible."""
        missing = [] if self.checkpoint_dir else ["--checkpoint_dir is missing: name a model's folder"]
        wrong = [f"--clients {text}: expected numbers such as 1,8,32" for text in self.clients if not text.isdecimal()]
        return missing + wrong + impossible_numbers(self) + below_minimum(self, "", 1, "questions", "new_tokens", "rounds")


def commands(args: ServeSpeedArgs) -> dict[str, list[str]]:
    """How each server is started, but for its port."""
    most, folder = str(max(map(int, args.clients))), str(Path(args.checkpoint_dir).resolve())
    ours = [sys.executable, str(ROOT / "generate/serve.py"), "--checkpoint_dir", folder, "--batch_size", most]
    ours += ["--max_seq_length", "512", "--precision", args.precision, "--accelerator", args.accelerator]
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[args.precision]
    program = Path(sys.executable).parent / "transformers"
    theirs = [str(program), "serve", folder, "--dtype", dtype, "--device", args.accelerator]
    return {
        "litft serve": ours,
        "transformers serve": theirs,
        "transformers serve --continuous-batching": [*theirs, "--continuous-batching"],
    }


@contextmanager
def started(command: list[str]):
    """A server's address; ends with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"serve-speed-{port}.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=said, stderr=said, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    import httpx

    for _ in range(600):
        if process.poll() is not None:
            raise ValueError(f"a server has not started: {log.read_text()[-500:]}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise ValueError(f"a server has not started within five minutes; see {log}")


async def throughput(url: str, model: str, clients: int, args: ServeSpeedArgs) -> float:
    """Tokens a second."""
    import httpx

    async def client(own: int) -> int:
        made = 0
        for number in range(args.questions):
            at = own * args.questions + number
            text = f"Write a long {THINGS[at % 10]} about {MATTERS[at // 10 % 10]}."
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": args.new_tokens, "temperature": 0}
            reply = await http.post(f"{url}/v1/chat/completions", json=body | {"model": model})
            reply.raise_for_status()
            made += reply.json()["usage"]["completion_tokens"]
        return made

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(timeout=1200, limits=limits) as http:
        began = time.perf_counter()
        made = await asyncio.gather(*map(client, range(clients)))
        return sum(made) / (time.perf_counter() - began)


def main(args: ServeSpeedArgs) -> None:
    """Measure, and print a Markdown table."""
    import torch

    folder = str(Path(args.checkpoint_dir).resolve())
    found: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        urls = {name: stack.enter_context(started(command)) for name, command in commands(args).items()}
        models = {name: Path(folder).name if name.startswith("litft") else folder for name in urls}
        for turn in range(args.speculative_rounds + 1):
            for clients in map(int, args.clients):
                for name, url in urls.items():
                    speed = asyncio.run(throughput(url, models[name], clients if turn else min(clients, 4), args))
                    print(f"{turn} {clients:>3} {name}: {speed:.1f} tokens/s", file=sys.stderr, flush=True)
                    if turn:
                        found.setdefault((name, clients), []).append(speed)
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    machine = f"{cpu[1] if cpu else ''}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{Path(folder).name}, {args.precision}, {machine}, {date.today()}; tokens/s\n")
    print(f"| clients | {' | '.join(urls)} |\n|--:|{'--:|' * len(urls)}")
    for clients in map(int, args.clients):
        print(f"| {clients} | {' | '.join(f'{statistics.median(found[name, clients]):.1f}' for name in urls)} |")


if __name__ == "__main__":
    with user_errors():
        main(parse(ServeSpeedArgs, sys.argv[1:]))
