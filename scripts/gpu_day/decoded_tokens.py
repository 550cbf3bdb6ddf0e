"""Decoding with a random model: prefill and tokens apart, eager and compiled."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from decode_speed import bytes_of_a_step, copy_speed, random_network, timed
from figures import Figures, Values
from profile_step import PRETENDED
from training_steps import measure_kernels

from litft.inference.decoder import Decoder
from litft.inference.fused_linears import fuse_linears
from litft.model.transformer import GPT
from litft.pretrained.folder import resolve

NEW_TOKENS = 32
# the first steps compile, or capture a CUDA graph
WARMUP_TOKENS = 4


@dataclass(frozen=True)
class Setting:
    """A way to decode."""

    rows: int
    prompt: int  # tokens
    capacity: int  # tokens of the KV cache
    compiled: bool

    def __str__(self) -> str:
        mode = "compiled" if self.compiled else "eager"
        return f"{mode} {self.rows} x {self.prompt}, capacity {self.capacity:,}"


def measure_decoding(
    figures: Figures, model: str, device: torch.device, folder: Path
) -> None:
    """One row and eight, short and long prompts, compiled and eager."""
    configs = Path(__file__).resolve().parent.parent / "configs"
    network = random_network(resolve(str(configs / model)), "bf16", device)
    fuse_linears(network)
    bandwidth = copy_speed(device)
    settings = [Setting(1, 32, 512, compiled=True), Setting(1, 32, 512, compiled=False)]
    if device.type == "cuda":
        settings += [
            Setting(1, 2000, 16384, compiled=True),
            Setting(8, 32, 512, compiled=True),
            Setting(1, 15000, 16384, compiled=True),
            Setting(1, 2000, 16384, compiled=False),
            Setting(8, 32, 512, compiled=False),
        ]
    for setting in settings:
        title = f"{model} decode {setting}"
        measured = Measured(network, setting, device, bandwidth)
        figures.measure(title, measured.figures, needs=20 if setting.compiled else 10)
        if measured.step is not None:
            measure_kernels(figures, title, measured.step, folder)


class Measured:
    """The figures of one setting, and the step that was measured."""

    def __init__(
        self, network: GPT, setting: Setting, device: torch.device, bandwidth: float
    ) -> None:
        self.network = network
        self.setting = setting
        self.device = device
        self.bandwidth = bandwidth  # bytes a second
        self.step: Callable[[], None] | None = None
        # every prompt differs from the others, so that no row's prefix is copied
        self.seeds = count()

    def figures(self) -> Values:
        """Measure prefill and decoded tokens."""
        setting = self.setting
        decoder = Decoder(self.network, setting.rows, setting.capacity, setting.compiled)
        start = time.perf_counter()
        for row in range(setting.rows):
            decoder.prefill(row, self._prompt())
        self._wait()
        first_prefill = time.perf_counter() - start

        # the tokens stay on the device, as in an answer
        tokens = torch.zeros(setting.rows, dtype=torch.long, device=self.device)
        active = [True] * setting.rows

        def step() -> None:
            tokens.copy_(decoder.step(tokens, active).argmax(-1))

        start = time.perf_counter()
        for _ in range(WARMUP_TOKENS):
            step()
        self._wait()
        first_tokens = time.perf_counter() - start

        prefills = []
        for _ in range(3):
            decoder.truncate(0, 0)
            ids = self._prompt()
            prefills.append(timed(lambda ids=ids: decoder.prefill(0, ids), self.device))

        host_seconds = []

        def answer() -> None:
            start = time.perf_counter()
            for _ in range(NEW_TOKENS):
                step()
            host_seconds.append((time.perf_counter() - start) / NEW_TOKENS)

        decoder.lengths = [setting.prompt] * setting.rows
        seconds = timed(answer, self.device) / NEW_TOKENS
        if PRETENDED:
            seconds = 1.0
        self.step = step
        length = setting.prompt + NEW_TOKENS / 2
        bytes_read = bytes_of_a_step(self.network, setting.rows, length)
        return {
            "tokens_per_second": setting.rows / seconds,
            "seconds": seconds,
            "host_seconds": host_seconds[0],
            "share_of_copy_bandwidth": bytes_read / seconds / self.bandwidth,
            "prefill_seconds": statistics.median(prefills),
            "first_prefill": first_prefill,
            "first_tokens": first_tokens,
            "is_compiled": decoder._forward_token is not self.network,
        }

    def _prompt(self) -> list[int]:
        rng = random.Random(next(self.seeds))
        return rng.choices(range(self.network.config.vocab_size), k=self.setting.prompt)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
