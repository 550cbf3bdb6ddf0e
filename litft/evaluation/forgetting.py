"""What a model has forgotten, measured as by PEFT's comparison of methods: how much its loss rises
on ordinary text that it was not tuned on, and on the answers that it gave before."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.data.tokenizer import Tokenizer
from litft.evaluation.log_probs import sample_log_probs
from litft.evaluation.scoring import greedy_request
from litft.evaluation.verdict import Key, Part
from litft.inference.session import Session
from litft.inference.streaming import prompt_ids
from litft.model.loss import IGNORED
from litft.model.transformer import GPT

# the scores: see `verdict.OF_FORGETTING`
NEUTRAL = "loss on neutral text"
OWN_ANSWERS = "loss on its earlier answers"
TEXTS = Path(__file__).parent / "texts"
NUM_QUESTIONS = 40
ANSWER_TOKENS = 64  # the most of an answer
MOST_TOKENS = 512  # of a paragraph

# sums values over the processes of a run
Sum = Callable[[Tensor], Tensor]


@cache
def neutral_paragraphs() -> list[str]:
    """Return the paragraphs of the neutral text: 50 kB of facts, written for litft."""
    text = (TEXTS / "neutral.txt").read_text("utf-8")
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]


@cache
def ordinary_questions() -> list[str]:
    """Return questions and requests to a chat assistant, written for litft. The first
    NUM_QUESTIONS measure what was forgotten; the others may be learned, see `--data.replay`."""
    return (TEXTS / "questions.txt").read_text("utf-8").splitlines()


def neutral_samples(tokenizer: Tokenizer, limit: int) -> list[Sample]:
    """Return the paragraphs of the neutral text as samples of at most `limit` input tokens."""
    samples = []
    for paragraph in neutral_paragraphs():
        ids = torch.tensor(tokenizer.encode(paragraph)[: min(limit, MOST_TOKENS) + 1])
        samples.append(Sample(ids[:-1], ids[1:]))
    return samples


def question_prompts(
    tokenizer: Tokenizer, questions: Sequence[str], system: str = "", is_text: bool = False
) -> list[list[int]]:
    """Return the tokens of questions as the model reads them.

    system: the system prompt before them. is_text: they are texts to continue, without a template.
    """
    prompts = []
    for question in questions:
        if is_text:
            prompts.append(prompt_ids(tokenizer, question))
            continue
        messages = [{"role": "user", "content": question}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        prompts.append(prompt_ids(tokenizer, messages))
    return prompts


def answer_sample(
    prompt: Sequence[int], answer: Sequence[int], limit: int
) -> Sample | None:
    """Return a prompt with an answer as a sample, with a loss on the answer only; None if nothing
    of the answer is within `limit` input tokens."""
    ids = torch.tensor([*prompt, *answer][: limit + 1])
    targets = ids[1:].clone()
    targets[: len(prompt) - 1] = IGNORED
    if not (targets != IGNORED).any():
        return None
    return Sample(ids[:-1], targets)


def answer_samples(
    pairs: Sequence[tuple[list[int], list[int]]], limit: int
) -> list[Sample]:
    """Return pairs (prompt, answer) as samples, without those of which nothing of the answer is
    within the limit."""
    samples = []
    for prompt, answer in pairs:
        sample = answer_sample(prompt, answer, limit)
        if sample is not None:
            samples.append(sample)
    return samples


def loss_parts(
    model: GPT,
    samples: Sequence[Sample],
    layout: BatchLayout,
    rank: int = 0,
    sum_over_processes: Sum = lambda values: values,
    before_batch: Callable[[], object] = lambda: None,
) -> dict[Key, Part]:
    """Return what each sample adds to the loss per token: every process takes part."""
    log_probs, _ = sample_log_probs(
        model, samples, layout, model.device, rank, before_batch
    )
    losses = sum_over_processes(-log_probs).tolist()
    parts: dict[Key, Part] = {}
    for number, (loss, sample) in enumerate(zip(losses, samples, strict=True)):
        parts[(number,)] = Part(loss, float(sample.supervised))
    return parts


class Remembered(NamedTuple):
    """What a model knew before it was tuned: ordinary text, and its own answers."""

    neutral: list[Sample]
    answers: list[Sample]

    @classmethod
    def of(cls, session: Session, rows: int) -> "Remembered":
        """Ask a model, generating `rows` answers at once."""
        model = session.model
        tokenizer = session.tokenizer
        limit = model.config.max_positions
        prompts = question_prompts(tokenizer, ordinary_questions()[:NUM_QUESTIONS])
        requests = []
        for prompt in prompts:
            requests.append(greedy_request(model, tokenizer, prompt, ANSWER_TOKENS))
        answers = session.generate(requests, rows, "answers to ordinary questions")
        pairs = []
        for prompt, answer in zip(prompts, answers, strict=True):
            pairs.append((prompt, answer.tokens))
        return cls(neutral_samples(tokenizer, limit), answer_samples(pairs, limit))

    def fits(self, tokenizer: Tokenizer) -> bool:
        """Return whether a tokenizer divides text alike: otherwise a loss per token has another
        meaning."""
        own = self.neutral[0].tokens.tolist()
        return tokenizer.encode(neutral_paragraphs()[0])[: len(own)] == own

    def parts(self, session: Session, rows: int) -> dict[str, dict[Key, Part]]:
        """Return what each text adds to the losses of a model. On a terminal, a bar shows how far
        the measurement is."""
        layout = BatchLayout(rows=rows)
        parts = {}
        for score, samples in ((NEUTRAL, self.neutral), (OWN_ANSWERS, self.answers)):
            batches = -(-len(samples) // rows)
            with tqdm(total=batches, desc=score, unit=" batches", disable=None) as bar:
                parts[score] = loss_parts(
                    session.model,
                    samples,
                    layout,
                    before_batch=lambda bar=bar: bar.update(),
                )
        return parts
