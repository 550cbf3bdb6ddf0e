"""The OpenAI API's response formats: generated text to JSON, whole or streamed."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from litft.data.tokenizer import Tokenizer
from litft.inference.generation import GenerationChunk


class Reply:
    """Formats the answers to a request, as one response or as chunks of a stream."""

    object_type: str
    chunk_type: str
    id_prefix: str

    def __init__(self, model: str, tokenizer: Tokenizer, num_choices: int, with_logprobs: bool) -> None:
        # num_choices: per prompt
        self.tokenizer, self.num_choices, self.with_logprobs = tokenizer, num_choices, with_logprobs
        # after this token, others keep their leading space when decoded
        self.leading = tokenizer.encode("a", bos=False)[-1:]
        self.header = {"id": f"{self.id_prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}

    def full(self, choices: list[list[GenerationChunk]]) -> dict[str, Any]:
        """Return the complete response. choices: the chunks of each finished choice."""
        formatted = [self.choice(index, chunks) for index, chunks in enumerate(choices)]
        return self.header | {
            "object": self.object_type,
            "choices": formatted,
            "usage": self.usage([chunks[-1] for chunks in choices]),
        }

    def chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """Return one chunk of a stream."""
        return self.header | {"object": self.chunk_type, "choices": choices} | extra

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return what precedes a choice's first chunk in a stream."""
        return []

    def choice(self, index: int, chunks: Sequence[GenerationChunk]) -> dict[str, Any]:
        """Return a complete choice."""
        raise NotImplementedError

    def delta(self, index: int, chunk: GenerationChunk) -> dict[str, Any]:
        """Return a choice with the text of one chunk."""
        raise NotImplementedError

    def usage(self, last_chunks: Sequence[GenerationChunk]) -> dict[str, Any]:
        """Return the token counts, from the last chunk of each choice. Each prompt counts once."""
        prompt_tokens, computed_tokens = (
            sum(getattr(chunk.stats, name) for chunk in last_chunks[:: self.num_choices])
            for name in ("prompt_tokens", "prefill_tokens")
        )
        new_tokens = sum(chunk.stats.new_tokens for chunk in last_chunks)
        counts = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        }
        return counts | {"prompt_tokens_details": {"cached_tokens": prompt_tokens - computed_tokens}}

    def token_logprobs(self, chunks: Sequence[GenerationChunk]) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """Return (token, log-probability, alternatives) of each token, without the stop token that ends an answer."""
        stop_ids = set(self.tokenizer.stop_ids)
        entries = [entry for chunk in chunks for entry in zip(chunk.tokens, chunk.logprobs, chunk.top, strict=True)]
        entries = [(token, finite_logprob(p), [(other, finite_logprob(q)) for other, q in top]) for token, p, top in entries]
        return entries[:-1] if entries and chunks[-1].finish_reason == "stop" and entries[-1][0] in stop_ids else entries

    def text_of(self, token: int) -> str:
        """Return the text of a single token; part of a character becomes U+FFFD."""
        leading_text, full_text = (
            self.tokenizer.decode(ids, skip_special=False) for ids in (self.leading, [*self.leading, token])
        )
        return full_text[len(leading_text) :]


class ChatReply(Reply):
    """Formats answers of /v1/chat/completions."""

    object_type, chunk_type, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, index: int, chunks: Sequence[GenerationChunk]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(chunks)}
        return {"index": index, "message": message, **self._rest(chunks)}

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, index: int, chunk: GenerationChunk) -> dict[str, Any]:
        return {"index": index, "delta": {"content": str(chunk)} if chunk else {}, **self._rest([chunk])}

    def _rest(self, chunks: Sequence[GenerationChunk]) -> dict[str, Any]:
        logprobs = (
            {"content": [self._entry(*entry) for entry in self.token_logprobs(chunks)]} if self.with_logprobs else None
        )
        return {"logprobs": logprobs, "finish_reason": finish_reason(chunks[-1])}

    def _entry(self, token: int, logprob: float, top: list[tuple[int, float]] | None = None) -> dict[str, Any]:
        text = self.text_of(token)
        entry = {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
        return entry if top is None else entry | {"top_logprobs": [self._entry(*alternative) for alternative in top]}


class CompletionReply(Reply):
    """Formats answers of /v1/completions."""

    object_type, chunk_type, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.offsets: Counter[int] = Counter()  # text position of each choice's next token

    def choice(self, index: int, chunks: Sequence[GenerationChunk]) -> dict[str, Any]:
        logprobs = self._logprobs(index, chunks) if self.with_logprobs else None
        return {"index": index, "text": "".join(chunks), "logprobs": logprobs, "finish_reason": finish_reason(chunks[-1])}

    def delta(self, index: int, chunk: GenerationChunk) -> dict[str, Any]:
        return self.choice(index, [chunk])

    def _logprobs(self, index: int, chunks: Sequence[GenerationChunk]) -> dict[str, list]:
        entries = self.token_logprobs(chunks)
        texts, offsets = [self.text_of(token) for token, _, _ in entries], [self.offsets[index]]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        self.offsets[index] = offsets[-1]
        top = [{self.text_of(token): logprob for token, logprob in alternatives} for _, _, alternatives in entries]
        logprobs = [logprob for _, logprob, _ in entries]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets[:-1]}


def finite_logprob(logprob: float) -> float:
    """Return a log-probability that JSON can represent: OpenAI uses -9999 for minus infinity."""
    return max(logprob, -9999.0)


def finish_reason(chunk: GenerationChunk) -> str | None:
    """Return the API's finish reason of a chunk; None if the answer continues."""
    return "length" if chunk.finish_reason == "context" else chunk.finish_reason
