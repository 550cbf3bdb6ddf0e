"""A server as a user starts one, and what its clients need."""

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

NEVER = -100  # a bias that keeps a token from being said


class Server:
    """`generate/serve.py` in a process of its own; inside `with` it answers at `url`."""

    def __init__(self, folder: Path, *words: str | Path, **env: str) -> None:
        flags = ["--checkpoint_dir", folder, "--port", "0", "--temperature", "0", "--precision", "fp32", *words]
        self.process = start("generate/serve.py", *flags, cwd="/", env=env, stderr=subprocess.PIPE)
        self.said: list[str] = []
        self.reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True)

    def __enter__(self) -> "Server":
        self.reader.start()
        deadline = time.monotonic() + 120
        while not (found := re.search(r"at (http://\S+)", self.log)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.05)
        self.url = found[1]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        """What it has said on stderr."""
        return "".join(self.said)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Have it end; its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        self.reader.join()
        return code

    def client(self, key: str = "none", kind: type = openai.OpenAI) -> openai.OpenAI:
        """OpenAI's own; nothing is tried again."""
        return kind(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=600)

    @property
    def health(self) -> dict:
        """What /health says."""
        return httpx.get(f"{self.url}/health").json()

    def idle(self, seconds: float = 5) -> None:
        """Wait until nothing is being made."""
        deadline = time.monotonic() + seconds
        while self.health != {"status": "ok", "running": 0, "waiting": 0}:
            assert time.monotonic() < deadline, self.health
            time.sleep(0.02)

    @property
    def memory(self) -> int:
        """Bytes that the process holds."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def lengthened(folder: Path, into: Path, context: int) -> Path:
    """A model's folder with room for longer texts, which need not make sense there."""
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return into
