"""The OpenAI API's formats: convert request bodies to `Request`s, and answers to response bodies.

Source: OpenAI's API reference, chat completions and completions; top_k, min_p and
repetition_penalty are vLLM's additions.
"""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from litft.args import Sampling
from litft.data.answer_format import FINAL_HEADER, end_of_thought, opens_thought
from litft.data.answer_reading import answer_parser
from litft.data.history import readable_history
from litft.data.messages import check_messages, read_tools
from litft.data.tokenizer import Tokenizer
from litft.data.tool_calls import tool_names
from litft.inference.decoder import check_prompt
from litft.inference.generation import Request
from litft.inference.sampling import Constraint
from litft.inference.session import Session
from litft.serving.openai_replies import ChatReply, CompletionReply, Reply

MAX_CHOICES = 128  # per request, as in OpenAI's API
# characters for each token of the capacity; longer texts are tokenized in parts
MANY_CHARACTERS = 8
# the beginning of a text may have this many tokens more than the whole text
CUT_TOKENS = 64
MAX_STOPS = 32
MAX_STOP_LENGTH = 1000
RESERVED_VARIABLES = {
    "self",
    "source",
    "messages",
    "tools",
    "add_generation_prompt",
    "day",
    "strftime_now",
}
# for a completion without max_tokens, as in OpenAI's API
DEFAULT_COMPLETION_TOKENS = 16


class ApiError(Exception):
    """An error response: HTTP status, message, and the API's error code and parameter name."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The API's error object."""
        if self.status < 500:
            error_type = "invalid_request_error"
        else:
            error_type = "server_error"
        return {
            "error": {
                "message": str(self),
                "type": error_type,
                "param": self.param,
                "code": self.code,
            }
        }


# kinds of response_format -> their fields; OpenAI's json_object has no schema
FORMATS = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "json_schema"),
}
SCHEMA_FIELDS = ("name", "description", "schema", "strict")


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    # accepted and ignored: chunks have no padding
    include_obfuscation: Any = None


class ApiRequest(BaseModel):
    """The fields that both kinds of requests have. null means not set."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
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
    # accepted and ignored: they do not affect the answer
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    uses_template: ClassVar[bool]
    prompt_field: ClassVar[str]  # name of the field with the prompt

    @property
    def begins_answer(self) -> bool:
        """Whether the text is an answer from its beginning, so that the white space before it is no
        part of it."""
        return self.uses_template

    def prompts(self, tokenizer: Tokenizer, capacity: int) -> list[list[int]]:
        """Return the token ids of each prompt.

        Raise ApiError for a text of far more than `capacity` tokens.
        """
        raise NotImplementedError

    def encode(
        self, tokenizer: Tokenizer, text: str, capacity: int, bos: bool | None = None
    ) -> list[int]:
        """Return the token ids of a text; tokenize no more of it than shows that it is too long."""
        # the beginning of a long text is tokenized first,
        # and doubled until it is known to be too long
        end = MANY_CHARACTERS * capacity
        while end < len(text):
            count = len(tokenizer.encode(text[:end], bos=bos))
            if count >= capacity + CUT_TOKENS:
                raise _too_long(f"more than {capacity}", capacity, self.prompt_field)
            end *= 2
        return tokenizer.encode(text, bos=bos)

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return 1

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of alternatives reported with each token's log-probability; None: report no
        log-probabilities."""
        raise NotImplementedError

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum length of an answer in tokens; None: limited by the capacity only."""
        return self.max_tokens

    def unsupported(self) -> Iterator[tuple[str, str]]:
        """Yield (field, remedy) for each unsupported setting of the request."""
        yield from ()

    def reply(self, name: str, tokenizer: Tokenizer) -> "Reply":
        """Return the formatter of the response."""
        raise NotImplementedError

    def requests(self, session: Session, capacity: int, limit: int | None) -> list[Request]:
        """Return one request per choice. Raise ApiError for invalid values.

        capacity: maximum length of prompt plus answer in tokens; limit: of the answer, set by the
        server.
        """
        for param, reason in self.unsupported():
            raise ApiError(400, f"{param}: {reason}", "unsupported_parameter", param)
        count = self.num_prompts * (self.n or 1)
        if count > MAX_CHOICES:
            raise ApiError(
                400,
                f"{count} answers requested, at most {MAX_CHOICES} are allowed; send several "
                "requests",
            )
        sampling = self._sampling(session)
        stop = self._stop_texts()
        # Python's generator treats the seed -1 like 1
        first_seed = None if sampling.seed is None else sampling.seed % 2**64
        requests = []
        for ids in self._checked_prompts(session, capacity):
            # limits that are not set are None; none is 0: a checked prompt leaves room
            max_tokens = min(
                filter(None, (capacity - len(ids), self.max_new_tokens, limit))
            )
            for number in range(self.n or 1):
                # different seeds, or all answers to a prompt would be the same
                seed = None if first_seed is None else first_seed + number
                request = Request(
                    ids,
                    max_tokens,
                    sampling=replace(sampling, seed=seed),
                    stop_ids=session.tokenizer.stop_ids,
                    stop=[*session.stop, *stop],
                    top_logprobs=self.num_top_logprobs or 0,
                    strip_leading=self.begins_answer,
                    shown_special_ids=session.tokenizer.answer_ids
                    if self.uses_template
                    else frozenset(),
                    constraint=self.constraint(session),
                )
                requests.append(request)
        return requests

    def _stop_texts(self) -> list[str]:
        """Return the texts that end an answer.

        Raise ApiError if one is empty, or if they would take long to search.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stop:
            raise ApiError(
                400, "stop: an empty string occurs everywhere; leave it out", param="stop"
            )
        # each is searched for after every token
        if len(stop) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in stop):
            reason = (
                f"stop: at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters each "
                "are allowed"
            )
            raise ApiError(400, reason, param="stop")
        return stop

    def constraint(self, session: Session) -> Constraint | None:
        """Return what the text of one answer must follow; None: anything."""
        return None

    def _checked_prompts(self, session: Session, capacity: int) -> list[list[int]]:
        try:
            prompts = self.prompts(session.tokenizer, capacity)
            longest = max(map(len, prompts), default=0)
            if longest >= capacity:
                raise _too_long(str(longest), capacity, self.prompt_field)
            for ids in prompts:
                check_prompt(session.model, ids)
        except ValueError as error:
            raise ApiError(400, str(error), param=self.prompt_field) from None
        return prompts

    def _sampling(self, session: Session) -> Sampling:
        """Return the sampling settings of the request, with those of the server as defaults."""
        names = [item.name for item in fields(Sampling)]
        settings = {
            name: value for name in names if (value := getattr(self, name)) is not None
        }
        vocab_size = session.model.config.vocab_size

        # logit_bias, whose limits are those of OpenAI's API
        invalid_ids = []
        for token in self.logit_bias or ():
            if not 0 <= token < vocab_size:
                invalid_ids.append(token)
        if invalid_ids:
            raise ApiError(
                400,
                f"logit_bias: token {invalid_ids[0]} is not in the vocabulary of {vocab_size} "
                "tokens",
                param="logit_bias",
            )
        invalid_biases = [
            value for value in (self.logit_bias or {}).values() if not abs(value) <= 100
        ]
        if invalid_biases:
            raise ApiError(
                400,
                f"logit_bias {invalid_biases[0]}: must lie in [-100, 100]",
                param="logit_bias",
            )

        # biases of the server stay for other tokens
        settings["logit_bias"] = session.sampling.logit_bias | (self.logit_bias or {})
        # numbers are checked as those of the command line are
        sampling = replace(session.sampling, **settings)
        for problem in sampling.problems():
            problem = problem.removeprefix("--")
            raise ApiError(400, problem, param=problem.split()[0])
        return sampling


class ChatRequest(ApiRequest):
    """A body of /v1/chat/completions."""

    uses_template = True
    prompt_field = "messages"
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    functions: Any = None
    parallel_tool_calls: Any = None  # chat templates do not use it
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    _prompt: str = PrivateAttr("")  # as rendered
    _continued: str = PrivateAttr("")  # the beginning of the answer in the prompt
    _tools: list[dict[str, Any]] | None = PrivateAttr(None)

    @property
    def begins_answer(self) -> bool:
        """Whether the answer is a new message, and not the continuation of the last one."""
        return not self.continue_final_message

    def prompts(self, tokenizer: Tokenizer, capacity: int) -> list[list[int]]:
        """Return the conversation in the model's chat template, up to the answer."""
        messages = check_messages(self.messages, "the request")
        if self.tool_choice == "none":
            tools = None
        else:
            tools = read_tools(self.tools, "the request")
        if len(tool_names(tools)) < len(tools or ()):
            raise ApiError(
                400, "tools: each needs a function with a name of its own", param="tools"
            )
        try:
            tokenizer.check_tools(tools)
        except ValueError as error:
            raise ApiError(400, str(error), param="tools") from None
        variables = dict(self.chat_template_kwargs or {})
        reserved = RESERVED_VARIABLES & variables.keys()
        if reserved:
            raise ValueError(
                f"chat_template_kwargs: {sorted(reserved)[0]} is set by other fields; remove it"
            )
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        messages = readable_history(tokenizer, messages, tools, variables=variables)
        if self.continue_final_message:
            self._prompt = tokenizer.continued_chat(messages, tools, **variables)
            self._continued = str(messages[-1]["content"])
        else:
            opens_answer = self.add_generation_prompt is not False
            self._prompt = tokenizer.apply_chat_template(
                messages, tools, opens_answer, **variables
            )
        self._tools = tools
        return [self.encode(tokenizer, self._prompt, capacity, bos=False)]

    def constraint(self, session: Session) -> Constraint | None:
        """Return the constraint that response_format asks for."""
        response_format = self.response_format or {}
        if response_format.get("type") not in ("json_object", "json_schema"):
            return None
        # other servers have the schema beside it
        schema: Any = response_format.get("schema")
        if schema is None:
            schema = {"type": "object"}
        if response_format["type"] == "json_schema":
            described = response_format.get("json_schema")
            if isinstance(described, dict):
                schema = described.get("schema")
            else:
                schema = None
        if not isinstance(schema, dict):
            reason = "response_format: json_schema needs an object with name and schema"
            raise ApiError(400, reason, param="response_format")
        answer_format = session.tokenizer.answer_format
        # the text after which the grammar begins: reasoning comes before it, without a grammar
        trigger = None
        if answer_format.channels:
            trigger = FINAL_HEADER
        elif opens_thought(self._prompt):
            closing = end_of_thought(answer_format, self._prompt)
            trigger = re.compile(re.escape(closing) + r"\Z")
        try:
            return json_grammars(session).constraint(schema, trigger)
        except ValueError as error:
            raise ApiError(
                400, f"response_format: {error}", param="response_format"
            ) from None

    @property
    def num_top_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        return None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def _unknown_fields_of_format(self) -> Iterator[tuple[str, str]]:
        """Yield what response_format has that nothing reads."""
        response_format = self.response_format
        if not response_format:
            return
        known = FORMATS.get(str(response_format.get("type")))
        if known is None:
            yield "response_format", f"its type must be one of {', '.join(FORMATS)}"
            return
        unknown = []
        described = response_format.get("json_schema")
        for fields_of, known_names in (
            (response_format, known),
            (described, SCHEMA_FIELDS),
        ):
            if isinstance(fields_of, dict):
                for name, value in fields_of.items():
                    if value is not None and name not in known_names:
                        unknown.append(name)
        if unknown:
            yield "response_format", f"unknown field {unknown[0]}"

    def unsupported(self) -> Iterator[tuple[str, str]]:
        if self.tool_choice not in (None, "none", "auto"):
            yield (
                "tool_choice",
                "the model decides whether to call a tool; use auto or none",
            )
        yield from self._unknown_fields_of_format()
        has_format = (
            bool(self.response_format) and self.response_format.get("type") != "text"
        )
        if has_format and self.tools and self.tool_choice != "none":
            yield (
                "response_format",
                "the answer may be a tool call; leave out the tools or the format, or pass "
                "tool_choice none",
            )
        if has_format and self.continue_final_message:
            yield (
                "response_format",
                "the format is that of a whole answer; leave it out with continue_final_message",
            )
        if self.continue_final_message and self.add_generation_prompt:
            yield (
                "add_generation_prompt",
                "continue_final_message continues the last message; leave one of the two out",
            )
        if self.functions:
            yield "functions", "it is deprecated; use tools"
        if self.top_logprobs and not self.logprobs:
            yield "top_logprobs", "it requires logprobs; set that to true"

    def reply(self, name: str, tokenizer: Tokenizer) -> "Reply":
        make_parser = partial(
            answer_parser,
            tokenizer,
            self._prompt,
            self._tools,
            reads_calls=bool(self._tools),
            continued=self._continued,
        )
        return ChatReply(
            name, tokenizer, self.n or 1, self.num_top_logprobs is not None, make_parser
        )


class CompletionRequest(ApiRequest):
    """A body of /v1/completions."""

    uses_template = False
    prompt_field = "prompt"
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def _prompt_list(self) -> list[Any]:
        # a list of numbers is a single prompt
        if isinstance(self.prompt, str) or (
            self.prompt and isinstance(self.prompt[0], int)
        ):
            return [self.prompt]
        return list(self.prompt)

    @property
    def num_prompts(self) -> int:
        return len(self._prompt_list)

    def prompts(self, tokenizer: Tokenizer, capacity: int) -> list[list[int]]:
        """Return token ids unchanged, and texts encoded without a template, with the tokenizer's
        BOS."""
        prompts = self._prompt_list
        valid_ids = range(tokenizer.vocab_size)
        invalid_ids = []
        for ids in prompts:
            if isinstance(ids, list):
                for token in ids:
                    if token not in valid_ids:
                        invalid_ids.append(token)
        if invalid_ids:
            raise ValueError(
                f"token id {invalid_ids[0]} does not exist; ids go from 0 to {len(valid_ids) - 1}"
            )
        return [
            self.encode(tokenizer, prompt, capacity) if isinstance(prompt, str) else prompt
            for prompt in prompts or [[]]
        ]

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    def unsupported(self) -> Iterator[tuple[str, str]]:
        if self.echo:
            yield "echo", "returning the prompt is not supported; leave it out"
        if self.suffix:
            yield "suffix", "inserting text is not supported; leave it out"
        if self.best_of not in (None, self.n or 1):
            yield "best_of", "all generated answers are returned; use n"

    def reply(self, name: str, tokenizer: Tokenizer) -> "Reply":
        return CompletionReply(
            name, tokenizer, self.n or 1, self.num_top_logprobs is not None
        )


def _too_long(tokens: str, capacity: int, field: str) -> ApiError:
    """Return the error of a prompt that leaves no room for an answer."""
    reason = (
        f"the prompt has {tokens} tokens, but prompt plus answer are limited to {capacity}"
    )
    return ApiError(400, f"{reason}; shorten it", "context_length_exceeded", field)


def json_grammars(session: Session) -> Any:
    """Return what makes the JSON constraints of a model's answers.

    Raises ValueError if the package is missing.
    """
    return _json_grammars(session.tokenizer, session.model.config.vocab_size)


@lru_cache(maxsize=8)
def _json_grammars(tokenizer: Tokenizer, vocab_size: int) -> Any:
    from litft.inference.json_grammar import JsonGrammars  # the package is optional

    return JsonGrammars(tokenizer, vocab_size)


def parse_request(request_type: type[ApiRequest], body: bytes) -> ApiRequest:
    """Parse a request body. Raise ApiError that names its first invalid field."""
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        # one error is enough, and values are not repeated in it
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = errors[0]
        param = str(first["loc"][0]) if first["loc"] else None
        prefix = "" if param is None else f"{param}: "
        if first["type"] == "extra_forbidden":
            reason = "unknown field; leave it out"
        else:
            reason = first["msg"]
        raise ApiError(400, f"{prefix}{reason}", param=param) from None
