"""The OpenAI API's response formats: generated text to JSON, whole or streamed."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from litft.data.answer_parser import AnswerParser, AnswerPart
from litft.data.tokenizer import Tokenizer
from litft.inference.chat_answers import api_call_entry
from litft.inference.generation import GenerationChunk


class Reply:
    """Formats the answers to a request, as one response or as chunks of a stream."""

    object_type: str
    chunk_type: str
    id_prefix: str

    def __init__(
        self, model: str, tokenizer: Tokenizer, num_choices: int, with_logprobs: bool
    ) -> None:
        # num_choices: per prompt
        self.tokenizer = tokenizer
        self.num_choices = num_choices
        self.with_logprobs = with_logprobs
        # after this token, others keep their leading space when decoded
        self.leading = tokenizer.encode("a", bos=False)[-1:]
        self.header = {
            "id": f"{self.id_prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

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

    def deltas(self, index: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """Return choices with the text of one chunk; none if the text is held back."""
        raise NotImplementedError

    def usage(self, last_chunks: Sequence[GenerationChunk]) -> dict[str, Any]:
        """Return the token counts, from the last chunk of each choice. Each prompt counts once."""
        prompt_tokens = 0
        computed_tokens = 0
        # each prompt has `num_choices` answers in a row, and counts once
        for chunk in last_chunks[:: self.num_choices]:
            prompt_tokens += chunk.stats.prompt_tokens
            computed_tokens += chunk.stats.prefill_tokens
        # all answers count, also those to the same prompt
        new_tokens = sum(chunk.stats.new_tokens for chunk in last_chunks)
        counts = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        }
        return counts | {
            "prompt_tokens_details": {"cached_tokens": prompt_tokens - computed_tokens}
        }

    def token_logprobs(
        self, chunks: Sequence[GenerationChunk]
    ) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """Return (token, log-probability, alternatives) of each token, without the stop token that
        ends an answer.

        The sampled token is among the alternatives, the last of them if it is not one of the
        likeliest.
        """
        entries = []
        for chunk in chunks:
            for token, logprob, top in zip(
                chunk.tokens, chunk.logprobs, chunk.top, strict=True
            ):
                alternatives = [(other, finite_logprob(value)) for other, value in top]
                # the sampled token is shown even if it is not among the likeliest
                if top and token not in dict(top):
                    alternatives.append((token, finite_logprob(logprob)))
                entries.append((token, finite_logprob(logprob), alternatives))
        if (
            entries
            and chunks[-1].finish_reason == "stop"
            and entries[-1][0] in self.tokenizer.stop_ids
        ):
            entries.pop()
        return entries

    def text_of(self, token: int) -> str:
        """Return the text of a single token; part of a character becomes U+FFFD."""
        # decoded after another token, since alone it would lose its leading space
        leading_text = self.tokenizer.decode(self.leading, skip_special=False)
        full_text = self.tokenizer.decode([*self.leading, token], skip_special=False)
        return full_text[len(leading_text) :]


class ChatReply(Reply):
    """Formats answers of /v1/chat/completions. make_parser: makes what takes one answer apart."""

    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        num_choices: int,
        with_logprobs: bool,
        make_parser: Callable[[], AnswerParser],
    ) -> None:
        super().__init__(model, tokenizer, num_choices, with_logprobs)
        self.make_parser = make_parser
        self.parsers: dict[int, AnswerParser] = {}  # of streamed choices
        self.num_calls: Counter[int] = Counter()  # of streamed choices

    def choice(self, index: int, chunks: Sequence[GenerationChunk]) -> dict[str, Any]:
        parsed = self.make_parser().parse("".join(chunks), chunks[-1].is_cut)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            # as in OpenAI's API: no content besides calls is null
            message["content"] = parsed.content or None
            message["tool_calls"] = [api_call_entry(call) for call in parsed.calls]
        reason = self._finish_reason(chunks[-1], has_calls=bool(parsed.calls))
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(chunks),
            "finish_reason": reason,
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def deltas(self, index: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        parser = self.parsers.setdefault(index, self.make_parser())
        parts = parser.push(chunk)
        if chunk.finish_reason:
            parts += parser.finish(chunk.is_cut)
        deltas = [self._delta(index, part) for part in parts]
        # an end, or log-probabilities, are sent even without text
        if not deltas and (chunk.finish_reason or (self.with_logprobs and chunk.tokens)):
            deltas = [{}]
        choices = []
        for number, delta in enumerate(deltas):
            # once for the chunk, with its last delta
            is_last = number == len(deltas) - 1
            if is_last:
                reason = self._finish_reason(chunk, has_calls=bool(self.num_calls[index]))
            else:
                reason = None
            logprobs = self._logprobs([chunk]) if is_last else None
            choices.append(
                {
                    "index": index,
                    "delta": delta,
                    "logprobs": logprobs,
                    "finish_reason": reason,
                }
            )
        return choices

    def _delta(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """Return what one part adds to a streamed message. A call is complete at once."""
        if part.call is None:
            if part.kind == "reasoning":
                return {"reasoning_content": part.text}
            return {"content": part.text}
        number = self.num_calls[index]
        self.num_calls[index] += 1
        return {"tool_calls": [{"index": number, **api_call_entry(part.call)}]}

    def _finish_reason(self, chunk: GenerationChunk, has_calls: bool) -> str | None:
        reason = finish_reason(chunk)
        if reason == "stop" and has_calls:
            return "tool_calls"
        return reason

    def _logprobs(self, chunks: Sequence[GenerationChunk]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return {"content": [self._entry(*entry) for entry in self.token_logprobs(chunks)]}

    def _entry(
        self, token: int, logprob: float, top: list[tuple[int, float]] | None = None
    ) -> dict[str, Any]:
        text = self.text_of(token)
        entry = {
            "token": text,
            "logprob": logprob,
            # the bytes of an incomplete character are not known
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }
        if top is None:
            return entry
        return entry | {"top_logprobs": [self._entry(*alternative) for alternative in top]}


class CompletionReply(Reply):
    """Formats answers of /v1/completions."""

    object_type = "text_completion"
    chunk_type = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # text position of each choice's next token
        self.offsets: Counter[int] = Counter()

    def choice(self, index: int, chunks: Sequence[GenerationChunk]) -> dict[str, Any]:
        logprobs = self._logprobs(index, chunks) if self.with_logprobs else None
        return {
            "index": index,
            "text": "".join(chunks),
            "logprobs": logprobs,
            "finish_reason": finish_reason(chunks[-1]),
        }

    def deltas(self, index: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        return [self.choice(index, [chunk])]

    def _logprobs(self, index: int, chunks: Sequence[GenerationChunk]) -> dict[str, list]:
        entries = self.token_logprobs(chunks)
        texts = [self.text_of(token) for token, _, _ in entries]
        offsets = [self.offsets[index]]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        self.offsets[index] = offsets[-1]
        top = []
        for _, _, alternatives in entries:
            by_text: dict[str, float] = {}
            for token, logprob in alternatives:
                # the parts of a character have one text; the most likely comes first
                by_text.setdefault(self.text_of(token), logprob)
            top.append(by_text)
        logprobs = [logprob for _, logprob, _ in entries]
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": offsets[:-1],
        }


def finite_logprob(logprob: float) -> float:
    """Return a log-probability that JSON can represent: OpenAI uses -9999 for minus infinity."""
    return max(logprob, -9999.0)


def finish_reason(chunk: GenerationChunk) -> str | None:
    """Return the API's finish reason of a chunk; None if the answer continues."""
    if chunk.finish_reason == "context":
        return "length"
    return chunk.finish_reason
