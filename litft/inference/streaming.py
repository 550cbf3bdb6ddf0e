"""Generation from Python, one text at a time: `litft.generate` and `litft.stream`."""

from collections.abc import Iterator, Sequence
from typing import Any

from litft.args.sampling import USUAL
from litft.data.chat_template import Message
from litft.data.tokenizer import Tokenizer
from litft.inference.decoder import Decoder, check_prompt
from litft.inference.generation import GenerationChunk, Request, generate_batch
from litft.inference.sampling import Sampling
from litft.inference.speculative import Drafter
from litft.model.transformer import GPT


def generate(model: GPT, tokenizer: Tokenizer, prompt: str | list[Message], **settings: Any) -> str:
    """Return the answer to a text or to chat messages, without white space at its ends.

    A text is a user message if the model has a chat template, as with `generate/base.py --prompt`; otherwise it is
    continued, as by `stream`, and nothing is stripped. settings: those of `stream`.
    """
    if isinstance(prompt, str) and not tokenizer.own_template:
        return "".join(stream(model, tokenizer, prompt, **settings))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return "".join(stream(model, tokenizer, messages, **settings)).strip()


def stream(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | list[Message],
    *,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    drafter: Drafter | None = None,
    **sampling: Any,
) -> Iterator[GenerationChunk]:
    """Stream the continuation of a text prompt, or the answer to chat messages (rendered by the chat template).

    Each chunk is a str with `tokens`, `logprobs`, `finish_reason` (in the last: stop, length or context) and `stats`.
    sampling: the fields of `Sampling` (temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
    frequency_penalty, logit_bias, seed). stop: texts that end the answer. Raises ValueError if a setting is invalid, or the
    prompt is empty, longer than the context or outside the vocabulary.
    """
    settings = Sampling(**USUAL | sampling)
    if problems := settings.problems():
        raise ValueError("; ".join(problem.removeprefix("--") for problem in problems))
    ids = prompt_ids(tokenizer, prompt)
    check_prompt(model, ids)
    decoder = Decoder(model, capacity=len(ids) + max_new_tokens)
    request = Request(ids, max_new_tokens, settings, tokenizer.stop_ids, stop)
    yield from (chunk for _, chunk in generate_batch(decoder, tokenizer, [request], drafter))


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[Message]) -> list[int]:
    """Tokenize a prompt: text with the tokenizer's BOS, or messages rendered with the generation prompt."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode(tokenizer.apply_chat_template(prompt, add_generation_prompt=True), bos=False)
