"""A litft server in its own process, and clients for it."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import openai
from conftest import start

NEVER = -100  # a logit bias that keeps a token from being sampled


class Server:
    """`generate/serve.py` in its own process. Within the context, it accepts requests at `url`."""

    def __init__(self, folder: Path, *words: str | Path, **env: str) -> None:
        flags = [
            "--checkpoint_dir",
            folder,
            "--port",
            "0",
            "--temperature",
            "0",
            "--precision",
            "fp32",
            *words,
        ]
        self.process = start(
            "generate/serve.py", *flags, cwd="/", env=env, stderr=subprocess.PIPE
        )
        self.stderr_lines: list[str] = []
        self.reader = threading.Thread(
            target=lambda: self.stderr_lines.extend(self.process.stderr), daemon=True
        )

    def __enter__(self) -> "Server":
        self.reader.start()
        deadline = time.monotonic() + 120
        while not (match := re.search(r"at (http://\S+)", self.log)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.05)
        self.url = match[1]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        """The stderr output so far."""
        return "".join(self.stderr_lines)

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the process and return its exit code."""
        self.process.send_signal(signum)
        code = self.process.wait(timeout=60)
        self.reader.join()
        return code

    def client(
        self, key: str = "none", client_class: type = openai.OpenAI
    ) -> openai.OpenAI:
        """Return an OpenAI client that does not retry."""
        return client_class(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=600
        )

    @property
    def health(self) -> dict:
        """The response of /health."""
        return httpx.get(f"{self.url}/health").json()

    def wait_until_idle(self, seconds: float = 5) -> None:
        """Wait until no request is running or waiting."""
        deadline = time.monotonic() + seconds
        while self.health != {"status": "ok", "running": 0, "waiting": 0}:
            assert time.monotonic() < deadline, self.health
            time.sleep(0.02)

    @property
    def memory(self) -> int:
        """The resident memory of the process in bytes."""
        return int(
            Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        ) * os.sysconf("SC_PAGESIZE")

    def settled_memory(self, seconds: float = 15) -> int:
        """Return the resident memory once it no longer changes, in bytes.

        /health does not count a request whose body is still being read.
        """
        self.wait_until_idle(30)
        deadline = time.monotonic() + seconds
        before = -1
        while abs(self.memory - before) > 2**20:
            assert time.monotonic() < deadline, f"{self.memory} bytes, and still changing"
            before = self.memory
            time.sleep(1)
        return before


def copy_with_context(folder: Path, target: Path, max_positions: int) -> Path:
    """Copy a model folder and raise its context length; text beyond the original length may be
    nonsense."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": max_positions})
    )
    return target
