"""Measure a training pass over completions that share their prompts, and over separate ones.

    python scripts/shared_prompts_speed.py --checkpoint_dir DIR

Both compute the losses of random completions and the gradients of LoRA in fp32. They take turns,
and each turn is printed: CPU seconds depend less on what else the machine does than the time.
"""

import sys
import time
from dataclasses import dataclass

import torch

from litft.args import LoRAArgs
from litft.args.parser import parse
from litft.cli import user_errors
from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.evaluation.log_probs import sample_batches
from litft.methods import LoRA
from litft.model.loss import IGNORED
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve


@dataclass
class SharedPromptsArgs:
    """Measure training passes with and without shared prompts."""

    checkpoint_dir: str | None = None
    """The folder of the model."""
    prompts: int = 4
    """Prompts of a pass."""
    group_size: int = 8
    """Completions of a prompt."""
    prompt_tokens: int = 90
    """Tokens of a prompt."""
    completion_tokens: int = 64
    """Tokens of a completion."""
    row_tokens: int = 2048
    """Tokens of a row."""
    turns: int = 3
    """Turns of each."""

    def problems(self) -> list[str]:
        """Return the problems of missing values."""
        return [] if self.checkpoint_dir else ["--checkpoint_dir is missing"]


def random_completions(args: SharedPromptsArgs, vocab_size: int) -> list[Sample]:
    """Return completions of random tokens."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(args.prompts):
        prompt = torch.randint(vocab_size, (args.prompt_tokens,), generator=generator)
        for _ in range(args.group_size):
            answer = torch.randint(
                vocab_size, (args.completion_tokens,), generator=generator
            )
            tokens = torch.cat((prompt, answer))
            targets = tokens[1:].clone()
            targets[: args.prompt_tokens - 1] = IGNORED
            shared = args.prompt_tokens - 1
            samples.append(
                Sample(tokens[:-1], targets, advantage=1.0, shared_tokens=shared)
            )
    return samples


def main() -> None:
    """Print the CPU seconds and the seconds of each turn."""
    with user_errors():
        args = parse(SharedPromptsArgs, sys.argv[1:])
    assert args.checkpoint_dir is not None  # `problems`
    source = resolve(args.checkpoint_dir)
    model = base_model(source, "fp32")
    method = LoRA(LoRAArgs(r=16, targets=["q_proj", "v_proj"]))
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    model.train()
    samples = random_completions(args, source.config.vocab_size)
    for _ in range(args.turns):
        for shares_prompts in (False, True):
            layout = BatchLayout(1, args.row_tokens, shares_prompts=shares_prompts)
            start = time.perf_counter()
            cpu_start = time.process_time()
            for _, batch in sample_batches(samples, layout, 0):
                model(batch.tokens, **batch.inputs(), reduction="none").sum().backward()
            name = "shared" if shares_prompts else "separate"
            cpu = time.process_time() - cpu_start
            print(
                f"{name}: {cpu:.1f} CPU s, {time.perf_counter() - start:.1f} s", flush=True
            )


if __name__ == "__main__":
    main()
