"""The OpenAI API's shapes: what requests may say, as `Request`s, and answers as the API words them.

Source: OpenAI's API reference, chat completions and completions; top_k, min_p and repetition_penalty are vLLM's additions.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from litft.args import Sampling
from litft.data.formats import check_messages, read_tools
from litft.data.tokenizer import Tokenizer
from litft.inference.decoder import check_prompt
from litft.inference.generation import GenerationChunk, Request
from litft.inference.session import Session

MOST_CHOICES = 128  # of one request, as OpenAI has it
MOST_STOPS, LONGEST_STOP = 32, 1000
DEFAULT_COMPLETION = 16  # tokens of a completion that says nothing, as OpenAI has it


class ApiError(Exception):
    """What is wrong with a request, as clients of the API are told."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The API's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """What a stream tells besides."""

    include_usage: bool | None = None


class Asked(BaseModel):
    """What both kinds of requests may say; what is null counts as not said."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    # of whom, or for what: the answer does not hang on these
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    in_template: ClassVar[bool]
    about: ClassVar[str]  # the field of what the model reads

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """What the model is to read."""
        raise NotImplementedError

    @property
    def texts(self) -> int:
        """How many prompts there are."""
        return 1

    @property
    def top(self) -> int | None:
        """How many likely tokens are told beside each that is taken; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def most(self) -> int | None:
        """How many tokens an answer may have; None: as many as there is room for."""
        return self.max_tokens

    def unknown(self) -> Iterator[tuple[str, str]]:
        """What is asked for that there is not: the field, and what to do."""
        yield from ()

    def reply(self, name: str, tokenizer: Tokenizer) -> "Reply":
        """How answers are worded."""
        raise NotImplementedError

    def requests(self, session: Session, capacity: int, limit: int | None) -> list[Request]:
        """A request a choice; ApiError for what cannot be. capacity: of prompt and answer; limit: of any answer."""
        for param, reason in self.unknown():
            raise ApiError(400, f"{param}: {reason}", "unsupported_parameter", param)
        if (count := self.texts * (self.n or 1)) > MOST_CHOICES:
            raise ApiError(400, f"{count} answers at once, and at most {MOST_CHOICES} may be; send several requests")
        sampling, stop = self._sampling(session), [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stop:
            raise ApiError(400, "stop: an empty text stands everywhere; leave it out", param="stop")
        if len(stop) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in stop):  # each is looked for at every token
            reason = f"stop: at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters each may be"
            raise ApiError(400, reason, param="stop")
        # Python's generator would take -1 for 1
        first = None if sampling.seed is None else sampling.seed % 2**64
        draws = [replace(sampling, seed=None if first is None else first + n) for n in range(self.n or 1)]
        found = []
        for ids in self._checked_prompts(session, capacity):
            most = min(filter(None, (capacity - len(ids), self.most, limit)))
            stops = session.tokenizer.stop_ids, [*session.stop, *stop]
            found += [Request(ids, most, draw, *stops, self.top or 0, trimmed=self.in_template) for draw in draws]
        return found

    def _checked_prompts(self, session: Session, capacity: int) -> list[list[int]]:
        try:
            prompts = self.prompts(session.tokenizer)
            longest = max(map(len, prompts), default=0)
            if longest >= capacity:
                reason = f"the prompt has {longest} tokens, and prompt and answer together may have {capacity}"
                raise ApiError(400, f"{reason}; shorten it", "context_length_exceeded", self.about)
            for ids in prompts:
                check_prompt(session.model, ids)
        except ValueError as error:
            raise ApiError(400, str(error), param=self.about) from None
        return prompts

    def _sampling(self, session: Session) -> Sampling:
        """As the request says, and where it says nothing as the command and the folder do."""
        names = [item.name for item in fields(Sampling)]
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        vocab_size = session.model.config.vocab_size
        if outside := [token for token in self.logit_bias or () if not 0 <= token < vocab_size]:
            raise ApiError(400, f"logit_bias: token {outside[0]}, and the model has {vocab_size}", param="logit_bias")
        if too_much := [value for value in (self.logit_bias or {}).values() if not abs(value) <= 100]:
            raise ApiError(400, f"logit_bias {too_much[0]}: must lie in [-100, 100]", param="logit_bias")
        if self.logit_bias:
            given["logit_bias"] = session.sampling.logit_bias | self.logit_bias
        sampling = replace(session.sampling, **given)
        for problem in sampling.problems():
            problem = problem.removeprefix("--")
            raise ApiError(400, problem, param=problem.split()[0])
        return sampling


class ChatAsked(Asked):
    """A body of /v1/chat/completions."""

    in_template, about = True, "messages"
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    functions: Any = None
    parallel_tool_calls: Any = None  # the template knows nothing of it

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The conversation in the model's template, up to the answer."""
        messages = check_messages(self.messages, "the request")
        tools = None if self.tool_choice == "none" else read_tools(self.tools, "the request")
        if tools and "tools" not in tokenizer.chat_template:
            raise ValueError("the model's chat template has no place for tools; leave them out")
        text = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True)
        return [tokenizer.encode(text, bos=False)]

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def unknown(self) -> Iterator[tuple[str, str]]:
        if self.tool_choice not in (None, "none", "auto"):
            yield "tool_choice", "the model decides by itself here; use auto or none"
        if self.response_format and self.response_format.get("type") != "text":
            yield "response_format", "answers are text here, whatever they hold; leave it out"
        if self.functions:
            yield "functions", "it is tools today; send those"
        if self.top_logprobs and not self.logprobs:
            yield "top_logprobs", "it is told with logprobs; set that to true"

    def reply(self, name: str, tokenizer: Tokenizer) -> "Reply":
        return ChatReply(name, tokenizer, self.n or 1, self.top is not None)


class CompletionAsked(Asked):
    """A body of /v1/completions."""

    in_template, about = False, "prompt"
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def _several(self) -> list[Any]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)

    @property
    def texts(self) -> int:
        return len(self._several)

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Texts as they stand, after the tokenizer's BOS; or tokens."""
        several = self._several
        known = range(tokenizer.vocab_size)
        if odd := [token for ids in several if isinstance(ids, list) for token in ids if token not in known]:
            raise ValueError(f"token {odd[0]} is none; ids go from 0 to {len(known) - 1}")
        return [tokenizer.encode(text) if isinstance(text, str) else text for text in several or [[]]]

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def most(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION

    def unknown(self) -> Iterator[tuple[str, str]]:
        if self.echo:
            yield "echo", "the prompt is not sent back here; leave it out"
        if self.suffix:
            yield "suffix", "texts are only continued here; leave it out"
        if self.best_of not in (None, self.n or 1):
            yield "best_of", "every answer that is made is sent here; ask for n"

    def reply(self, name: str, tokenizer: Tokenizer) -> "Reply":
        return CompletionReply(name, tokenizer, self.n or 1, self.top is not None)


def parsed(kind: type[Asked], body: bytes) -> Asked:
    """A request's body; ApiError naming its first mistake."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where = "" if param is None else f"{param}: "
        reason = "it is not known here; leave it out" if first["type"] == "extra_forbidden" else first["msg"]
        raise ApiError(400, f"{where}{reason}", param=param) from None


class Reply:
    """An answer's wording, whole or in chunks."""

    kind: str  # the object's name
    chunk_kind: str
    prefix: str  # of ids

    def __init__(self, model: str, tokenizer: Tokenizer, each: int, tells_logprobs: bool) -> None:
        self.tokenizer, self.each, self.tells_logprobs = tokenizer, each, tells_logprobs  # each: choices of one prompt
        self.before = tokenizer.encode("a", bos=False)[-1:]  # a token behind which others keep the space they begin with
        self.head = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[list[GenerationChunk]]) -> dict[str, Any]:
        """All choices, each of which has ended."""
        worded = [self.choice(index, pieces) for index, pieces in enumerate(choices)]
        return self.head | {"object": self.kind, "choices": worded, "usage": self.usage([own[-1] for own in choices])}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A part of a stream."""
        return self.head | {"object": self.chunk_kind, "choices": choices} | more

    def opening(self, index: int) -> list[dict[str, Any]]:
        """What a choice's stream begins with."""
        return []

    def choice(self, index: int, pieces: Sequence[GenerationChunk]) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def delta(self, index: int, piece: GenerationChunk) -> dict[str, Any]:
        """A piece of a choice."""
        raise NotImplementedError

    def usage(self, last: Sequence[GenerationChunk]) -> dict[str, Any]:
        """What the answers have cost, by the last piece of each; a prompt counts once."""
        prompt, read = (
            sum(getattr(own.stats, name) for own in last[:: self.each]) for name in ("prompt_tokens", "read_tokens")
        )
        new = sum(own.stats.new_tokens for own in last)
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return counts | {"prompt_tokens_details": {"cached_tokens": prompt - read}}

    def told(self, pieces: Sequence[GenerationChunk]) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """Tokens with what is told of them: the one that ends an answer is no part of it."""
        stop = set(self.tokenizer.stop_ids)
        found = [own for piece in pieces for own in zip(piece.tokens, piece.logprobs, piece.top, strict=True)]
        found = [(token, sayable(own), [(each, sayable(p)) for each, p in top]) for token, own, top in found]
        return found[:-1] if found and pieces[-1].finish_reason == "stop" and found[-1][0] in stop else found

    def text_of(self, token: int) -> str:
        """A token by itself; a part of a character is U+FFFD."""
        before, both = (self.tokenizer.decode(ids, skip_special=False) for ids in (self.before, [*self.before, token]))
        return both[len(before) :]


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, index: int, pieces: Sequence[GenerationChunk]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(pieces)}
        return {"index": index, "message": message, **self._rest(pieces)}

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, index: int, piece: GenerationChunk) -> dict[str, Any]:
        return {"index": index, "delta": {"content": str(piece)} if piece else {}, **self._rest([piece])}

    def _rest(self, pieces: Sequence[GenerationChunk]) -> dict[str, Any]:
        told = {"content": [self._entry(*own) for own in self.told(pieces)]} if self.tells_logprobs else None
        return {"logprobs": told, "finish_reason": reason(pieces[-1])}

    def _entry(self, token: int, logprob: float, top: list[tuple[int, float]] | None = None) -> dict[str, Any]:
        text = self.text_of(token)
        entry = {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
        return entry if top is None else entry | {"top_logprobs": [self._entry(*own) for own in top]}


class CompletionReply(Reply):
    """Of /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.offsets: Counter[int] = Counter()  # where each choice's next token begins

    def choice(self, index: int, pieces: Sequence[GenerationChunk]) -> dict[str, Any]:
        told = self._told(index, pieces) if self.tells_logprobs else None
        return {"index": index, "text": "".join(pieces), "logprobs": told, "finish_reason": reason(pieces[-1])}

    def delta(self, index: int, piece: GenerationChunk) -> dict[str, Any]:
        return self.choice(index, [piece])

    def _told(self, index: int, pieces: Sequence[GenerationChunk]) -> dict[str, list]:
        found = self.told(pieces)
        texts, offsets = [self.text_of(token) for token, _, _ in found], [self.offsets[index]]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        self.offsets[index] = offsets[-1]
        top = [{self.text_of(token): logprob for token, logprob in likely} for _, _, likely in found]
        logprobs = [logprob for _, logprob, _ in found]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets[:-1]}


def sayable(logprob: float) -> float:
    """A log-probability in JSON, which has no infinity; -9999 is OpenAI's."""
    return max(logprob, -9999.0)


def reason(piece: GenerationChunk) -> str | None:
    """Why an answer has ended, in the API's words."""
    return "length" if piece.finish_reason == "context" else piece.finish_reason
