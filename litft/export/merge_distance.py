"""How far the predictions of a merged model are from those of the adapter on its quantized base."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from litft.data.tokenizer import Tokenizer
from litft.distributed.devices import device_memory, is_out_of_memory, pick_accelerator
from litft.evaluation.forgetting import neutral_samples
from litft.model.transformer import GPT
from litft.pretrained.build import base_model, weight_bytes
from litft.pretrained.folder import PretrainedFolder, resolve
from litft.pretrained.load import load_network
from litft.pretrained.save import Result

NUM_TOKENS = 256
# what the weights may take of the memory; the rest is for activations, logits and other programs
USABLE_MEMORY = 0.8


@dataclass(frozen=True)
class MergeDistance:
    """The difference between two models' predictions for the same texts."""

    divergence: float  # KL divergence from the first model to the second, nats per token
    agreement: (
        float  # share of the tokens after which both have the same most probable token
    )
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"a KL divergence of {self.divergence:.2g} nats per token, and the same most probable "
            f"token after {self.agreement:.1%} of {self.num_tokens} tokens of neutral text"
        )


def merge_distance_line(
    source: PretrainedFolder, update: Result, merged: Path, precision: str | None
) -> str | None:
    """Compare a merged model with the adapter on its quantized base. Return what to print: the
    difference, or why it was not measured; None if there is no tokenizer.

    precision: of the merged weights; None: that of the base.
    """
    tokenizer = source.tokenizer()
    if tokenizer is None:
        return None
    result = resolve(merged)
    device = torch.device(pick_accelerator("auto"))
    available = device_memory(device)
    needed = weight_bytes(result, precision)
    if needed > USABLE_MEMORY * available:
        return (
            "not compared with the adapter on the quantized base: the weights of the merged model "
            f"take {needed / 2**30:.1f} GiB, and the memory is {available / 2**30:.1f} GiB"
        )

    def load_trained() -> GPT:
        # files that are quantized say themselves how
        kind = None if source.checkpoint.is_quantized else update.trained_with
        unquantized = update.method.unquantized_modules()
        model = base_model(source, precision, device, kind, unquantized)
        update.method.load(model, update.values)
        return model.eval()

    texts = _short_texts(tokenizer, source.config.max_positions)
    try:
        before = _log_probs(load_trained(), texts)
        after = _log_probs(load_network(result, precision, device, None), texts)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return (
            "not compared with the adapter on the quantized base: the memory is too small"
        )
    return f"compared with the adapter on the quantized base: {distance(before, after)}"


def distance(before: Tensor, after: Tensor) -> MergeDistance:
    """Return the difference between two models' log-probabilities (N, V) of the next token.

    KL divergence: the sum over the vocabulary of p (log p - log q), averaged over the N tokens.
    """
    divergence = F.kl_div(after, before, log_target=True, reduction="batchmean")
    agreement = (before.argmax(-1) == after.argmax(-1)).float().mean()
    return MergeDistance(float(divergence), float(agreement), before.size(0))


def _short_texts(tokenizer: Tokenizer, limit: int) -> list[Tensor]:
    """Return texts of NUM_TOKENS tokens in all: the beginning of the neutral text."""
    texts = []
    missing = NUM_TOKENS
    for sample in neutral_samples(tokenizer, limit):
        if missing > 0:
            texts.append(sample.tokens[:missing])
            missing -= sample.tokens.numel()
    return texts


@torch.no_grad()
def _log_probs(model: GPT, texts: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities of all tokens of each text, (N, V) fp32 on the CPU."""
    rows = []
    for tokens in texts:
        logits = model(tokens[None].to(model.device))[0]
        rows.append(logits.float().log_softmax(-1).cpu())
    return torch.cat(rows)
