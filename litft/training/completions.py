"""Completions of prompts by the network that is trained, as it is: with the method in it, nothing
merged or copied."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from litft.args.sampling import Sampling
from litft.data.digests import hash64
from litft.data.sample import Sample
from litft.data.tokenizer import Tokenizer
from litft.distributed.devices import is_out_of_memory
from litft.distributed.process_group import Processes, join_uneven
from litft.inference.decoder import Decoder
from litft.inference.generation import Completion, Request, generate_completions
from litft.model.loss import IGNORED
from litft.model.transformer import GPT, eval_mode
from litft.training.memory_saving.compile import uncompiled


@dataclass(frozen=True)
class Draw:
    """A completion to draw."""

    # what it draws depends on the run's seed and on this text alone
    key: str
    prompt_ids: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class DrawSettings:
    """How completions are drawn."""

    temperature: float
    top_p: float
    # completions that a device generates at once
    rows: int
    # tokens from this one on are not drawn; None: all are
    vocab_size: int | None = None


class CompletionWriter:
    """Generates completions with the network of a run, each process its own."""

    def __init__(
        self,
        processes: Processes,
        model: GPT,
        tokenizer: Tokenizer,
        settings: DrawSettings,
        seed: int,
        retries: bool,
    ) -> None:
        # retries: generate fewer completions at once after an out-of-memory error
        self.cpu_group = processes.cpu_group
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.seed = seed
        self.retries = retries and processes.fabric.world_size == 1
        self.rows = settings.rows
        # bans the tokens that must not be drawn
        size = model.config.vocab_size
        self.bias = dict.fromkeys(range(settings.vocab_size or size, size), -math.inf)

    def write(self, draws: Sequence[Draw]) -> list[Completion]:
        """Return the completions of this process; every process takes part, if only with none."""
        requests = [self._request(draw) for draw in draws]
        with eval_mode(self.model), uncompiled(), join_uneven(self.model, self.cpu_group):
            if not requests:
                return []
            capacity = 0
            for request in requests:
                capacity = max(capacity, len(request.ids) + request.max_new_tokens)
            while True:
                rows = min(len(requests), self.rows)
                try:
                    decoder = Decoder(self.model, rows, capacity)
                    return generate_completions(decoder, self.tokenizer, requests)
                except RuntimeError as error:
                    if not self.retries or rows == 1 or not is_out_of_memory(error):
                        raise
                self.rows = rows // 2

    def _request(self, draw: Draw) -> Request:
        """Return what the decoder is asked for."""
        sampling = Sampling(
            logit_bias=self.bias,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            seed=hash64(f"{self.seed}, {draw.key}"),
        )
        return Request(
            draw.prompt_ids,
            max_new_tokens=draw.max_new_tokens,
            sampling=sampling,
            stop_ids=self.tokenizer.stop_ids,
            shown_special_ids=self.tokenizer.answer_ids,
        )


def completed_sample(prompt_ids: Sequence[int], completion: Completion) -> Sample:
    """Return a completion as a sample, whose targets are its tokens."""
    tokens = torch.tensor([*prompt_ids, *completion.tokens])
    targets = tokens[1:].clone()
    targets[: len(prompt_ids) - 1] = IGNORED
    return Sample(tokens[:-1], targets)
