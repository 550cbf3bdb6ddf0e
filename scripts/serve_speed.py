"""Measure the throughput of `litft serve` and of transformers' own server at several numbers of
clients.

    pip install -e '.[test]' fastapi   # `transformers serve` needs fastapi
    python scripts/serve_speed.py --checkpoint_dir DIR

Each server is its own process. The servers take turns at every number of clients: while one
answers, the others are idle. Each client asks its own questions, one after the other, with greedy
decoding, and reads the complete answer. The throughput is the number of tokens that the server
reports, divided by the time from the first question to the last answer. The table has the median
over the rounds.
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
from litft.args.parser import parse
from litft.args.value_checks import below_minimum
from litft.cli import user_errors

ROOT = Path(__file__).parent.parent
TEXT_KINDS = "story poem letter speech recipe review report joke song riddle".split()
TOPICS = (
    "the sea, a small dog, an old clock, two friends, the moon, a lost key, winter, bread, a "
    "train, rain".split(", ")
)


@dataclass
class ServeSpeedArgs:
    """Measure the throughput of servers."""

    checkpoint_dir: str | None = None
    """The folder of the model."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """The dtype of weights and computation."""
    accelerator: Literal["cpu", "cuda"] = "cpu"
    """The device type to run on."""
    clients: list[str] = field(default_factory=lambda: ["1", "8", "32"])
    """Numbers of concurrent clients, measured one after the other: a,b,c."""
    questions: int = 2
    """Number of questions per client."""
    new_tokens: int = 64
    """Maximum length of an answer, in tokens."""
    rounds: int = 3
    """Number of measured rounds, after one warmup round."""

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        if self.checkpoint_dir:
            missing = []
        else:
            missing = ["--checkpoint_dir is missing: name the folder of the model"]
        invalid = []
        for text in self.clients:
            if not text.isdecimal():
                invalid.append(f"--clients {text}: expected numbers such as 1,8,32")
        return (
            missing
            + invalid
            + impossible_numbers(self)
            + below_minimum(self, "", 1, "questions", "new_tokens", "rounds")
        )


def commands(args: ServeSpeedArgs) -> dict[str, list[str]]:
    """Return the command of each server by name, without the port."""
    max_clients = str(max(map(int, args.clients)))
    folder = str(Path(args.checkpoint_dir).resolve())
    litft = [
        sys.executable,
        str(ROOT / "generate/serve.py"),
        "--checkpoint_dir",
        folder,
        "--batch_size",
        max_clients,
    ]
    litft += [
        "--max_seq_length",
        "512",
        "--precision",
        args.precision,
        "--accelerator",
        args.accelerator,
    ]
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[args.precision]
    program = Path(sys.executable).parent / "transformers"
    transformers = [
        str(program),
        "serve",
        folder,
        "--dtype",
        dtype,
        "--device",
        args.accelerator,
    ]
    return {
        "litft serve": litft,
        "transformers serve": transformers,
        "transformers serve --continuous-batching": [
            *transformers,
            "--continuous-batching",
        ],
    }


@contextmanager
def running_server(command: list[str]):
    """Start a server on a free port and yield its URL. Stop the server on exit."""
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"serve-speed-{port}.log"
    with log.open("w") as log_file:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=log_file,
            stderr=log_file,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
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
            raise ValueError(
                f"a server ended before it was ready; the end of its log: {log.read_text()[-500:]}"
            )
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise ValueError(f"a server was not ready within five minutes; see {log}")


async def throughput(url: str, model: str, clients: int, args: ServeSpeedArgs) -> float:
    """Return the throughput in tokens/s with so many concurrent clients."""
    import httpx

    async def client(client_index: int) -> int:
        num_tokens = 0
        for number in range(args.questions):
            index = client_index * args.questions + number
            text = (
                f"Write a long {TEXT_KINDS[index % 10]} about {TOPICS[index // 10 % 10]}."
            )
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": args.new_tokens,
                "temperature": 0,
            }
            reply = await http.post(
                f"{url}/v1/chat/completions", json=body | {"model": model}
            )
            reply.raise_for_status()
            num_tokens += reply.json()["usage"]["completion_tokens"]
        return num_tokens

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(timeout=1200, limits=limits) as http:
        start = time.perf_counter()
        token_counts = await asyncio.gather(*map(client, range(clients)))
        return sum(token_counts) / (time.perf_counter() - start)


def main(args: ServeSpeedArgs) -> None:
    """Measure all servers and print a Markdown table."""
    import torch

    folder = str(Path(args.checkpoint_dir).resolve())
    speeds: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(running_server(command))
            for name, command in commands(args).items()
        }
        models = {
            name: Path(folder).name if name.startswith("litft") else folder for name in urls
        }
        for round_number in range(args.rounds + 1):
            for clients in map(int, args.clients):
                for name, url in urls.items():
                    speed = asyncio.run(
                        throughput(
                            url,
                            models[name],
                            clients if round_number else min(clients, 4),
                            args,
                        )
                    )
                    print(
                        f"{round_number} {clients:>3} {name}: {speed:.1f} tokens/s",
                        file=sys.stderr,
                        flush=True,
                    )
                    if round_number:
                        speeds.setdefault((name, clients), []).append(speed)
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    machine = f"{cpu[1] if cpu else ''}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{Path(folder).name}, {args.precision}, {machine}, {date.today()}; tokens/s\n")
    print(f"| clients | {' | '.join(urls)} |\n|--:|{'--:|' * len(urls)}")
    for clients in map(int, args.clients):
        print(
            f"| {clients} | "
            f"{' | '.join(f'{statistics.median(speeds[name, clients]):.1f}' for name in urls)} |"
        )


if __name__ == "__main__":
    with user_errors():
        main(parse(ServeSpeedArgs, sys.argv[1:]))
