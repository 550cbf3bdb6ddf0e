"""The server's HTTP endpoints: check a request, submit it to the engine, and send the reply."""

import asyncio
import hmac
import json
import mmap
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from litft.args import ServeArgs
from litft.inference.decoder import BrokenModel
from litft.inference.generation import GenerationChunk, Request
from litft.serving.engine import Engine, Failed, Overloaded, Stopping
from litft.serving.openai_replies import Reply
from litft.serving.openai_requests import (
    ApiError,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    parse_request,
)

PAGE = Path(__file__).parent / "page"
KEY_VARIABLE = "LITFT_API_KEY"
# seconds that a client may take to send a request
REQUEST_TIMEOUT = 60
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
# The page loads its own files only, and connects to this server only. Scripts within HTML never
# run, and HTML is inserted only as DOMPurify returns it.
PAGE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for "
    "'script'; trusted-types dompurify"
)
HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # an upgrade may change any of the files
}
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
Handler = Callable[[HttpRequest], Awaitable[Response]]


def required_key(args: ServeArgs) -> str | None:
    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is not None and not key.isascii():
        raise ValueError(
            f"{KEY_VARIABLE} has non-ASCII characters, but clients send it in a header; choose "
            "another key"
        )
    return key


class Endpoint:
    """The HTTP routes and their handlers."""

    def __init__(self, engine: Engine, args: ServeArgs) -> None:
        self.engine = engine
        self.models = engine.models
        self.capacity = engine.capacity
        self.limit = args.max_new_tokens
        self.max_bytes = round(args.max_body_mb * 1e6)
        self.key = required_key(args)
        self.is_local = args.host in LOCAL_HOSTS
        self.allowed_hosts = args.allow_host
        self.cors_origins = args.cors_origin
        # a model's time of creation is a field of OpenAI's API; here: when it was loaded
        self.created = int(time.time())
        self.page_files = {
            path.name: path.read_bytes()
            for path in PAGE.rglob("*")
            if path.suffix in MEDIA_TYPES
        }

    def app(self) -> Starlette:
        """Return the application. All errors have the API's format."""
        routes = [
            Route("/", self.show_page),
            Route("/assets/{name}", self.show_page),
            Route("/health", self.health),
            Route("/v1/models", self.require_key(self.list_models)),
            Route("/v1/models/{name:path}", self.require_key(self.show_model)),
            Route(
                "/v1/chat/completions",
                self.require_key(partial(self.answer, ChatRequest)),
                methods=["POST"],
            ),
            Route(
                "/v1/completions",
                self.require_key(partial(self.answer, CompletionRequest)),
                methods=["POST"],
            ),
        ]
        handlers = {
            HTTPException: _http_error,
            ApiError: _api_error,
            Exception: _unexpected,
        }
        return Starlette(
            routes=routes, middleware=self._middleware(), exception_handlers=handlers
        )

    def _middleware(self) -> list[Middleware]:
        """Return what requests pass before they reach a handler: the check of their host, and CORS
        headers."""
        middleware = []
        # a server for this machine alone answers only to its own names
        if self.is_local:
            allowed = [*LOCAL_HOSTS[:2], "[::1]", *self.allowed_hosts]
            middleware.append(Middleware(HostCheck, allowed_hosts=allowed))
        if self.cors_origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=self.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
            middleware.append(cors)
        return middleware

    def require_key(self, handler: Handler) -> Handler:
        """Return the handler, restricted to clients that send the key, if one is set."""

        async def checked(request: HttpRequest) -> Response:
            scheme, _, sent_key = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer":  # the scheme has no case (RFC 7235)
                sent_key = ""
            # constant-time comparison
            if self.key is not None and not hmac.compare_digest(
                sent_key.strip().encode(), self.key.encode()
            ):
                raise ApiError(401, "the bearer key is missing or wrong", "invalid_api_key")
            return await handler(request)

        return checked

    async def show_page(self, request: HttpRequest) -> Response:
        """Return the chat page, or one of its files."""
        name = request.path_params.get("name", "index.html")
        if name not in self.page_files:
            raise HTTPException(404, "not a file of the chat page")
        return Response(
            self.page_files[name],
            headers=HEADERS,
            media_type=MEDIA_TYPES[Path(name).suffix],
        )

    async def health(self, request: HttpRequest) -> Response:
        """Return whether the engine runs, and its request counts."""
        alive = self.engine.alive
        return JSONResponse(
            {"status": "ok" if alive else "failed", **self.engine.counts},
            200 if alive else 503,
        )

    async def list_models(self, request: HttpRequest) -> Response:
        """List the models that requests can name."""
        return JSONResponse(
            {"object": "list", "data": [self._model(name) for name in self.models]}
        )

    async def show_model(self, request: HttpRequest) -> Response:
        """Return one model's entry."""
        return JSONResponse(self._model(self._check_model(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, Any]:
        sampling = self.models[name].sampling
        defaults = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": self.limit,
        }
        entry = {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "litft",
        }
        return entry | {"max_model_len": self.capacity, "defaults": defaults}

    def _check_model(self, name: str) -> str:
        if name not in self.models:
            reason = f"the model {name[:80]!r} does not exist; available: {', '.join(self.models)}"
            raise ApiError(404, reason, "model_not_found", "model")
        return name

    async def answer(
        self, request_type: type[ApiRequest], request: HttpRequest
    ) -> Response:
        """Answer a request, as one response or a stream.

        A client's disconnect cancels its answers.
        """
        api_request = parse_request(request_type, await self._body(request))
        if api_request.model:
            name = self._check_model(api_request.model)
        else:
            name = next(iter(self.models))
        session = self.models[name]
        # in a thread, because tokenizing long prompts would block other requests
        requests = await asyncio.to_thread(
            api_request.requests, session, self.capacity, self.limit
        )
        # it would never be accepted, however long the client waits
        if len(requests) > self.engine.max_requests:
            raise ApiError(
                400,
                f"{len(requests)} answers: this server accepts at most {self.engine.max_requests}; "
                "ask for fewer",
            )
        choices = Choices(self.engine, name, requests)
        reply = api_request.reply(name, session.tokenizer)
        if api_request.stream:
            wants_usage = bool(
                api_request.stream_options and api_request.stream_options.include_usage
            )
            # an error can still set the HTTP status
            first_chunk = await _run_until_disconnect(request, choices.next())
            return Stream(choices, _events(choices, reply, first_chunk, wants_usage))
        return JSONResponse(await _run_until_disconnect(request, _collect(choices, reply)))

    async def _body(self, request: HttpRequest) -> bytes:
        """Read a JSON body. Raise ApiError if it is too long, without reading the rest."""
        content_type = (
            request.headers.get("content-type", "").partition(";")[0].strip().lower()
        )
        # other sites cannot send this type without a CORS preflight
        if content_type != "application/json":
            raise ApiError(415, f"content type {content_type!r}: send application/json")
        try:
            return await asyncio.wait_for(self._read(request), REQUEST_TIMEOUT)
        except asyncio.TimeoutError:
            raise ApiError(
                408,
                f"the request was not complete within {REQUEST_TIMEOUT} seconds",
                "timeout",
            ) from None
        except (ClientDisconnect, asyncio.CancelledError):  # or the server stops
            # not sent: the client is gone
            raise ApiError(499, "the request was incomplete") from None

    async def _read(self, request: HttpRequest) -> bytes:
        """Return the whole body.

        Its parts are collected in pages of their own, which the system gets back at once.

        In the heap, buffers that grow side by side leave gaps: 2,000 aborted uploads of 4 MB kept
        110 MiB.
        """
        length = 0
        # takes memory only where it is written
        with mmap.mmap(-1, self.max_bytes + 1) as buffer:
            async for part in request.stream():
                length += len(part)
                # refused before the rest is read
                if length > self.max_bytes:
                    reason = (
                        f"the request is longer than {self.max_bytes:,} bytes; shorten it"
                    )
                    raise ApiError(413, reason, "request_too_large")
                buffer.write(part)
            return buffer[:length]


class HostCheck:
    """Refuses requests to other host names, with an error in the API's format.

    This protects against DNS rebinding: a web page that makes the browser send requests here under
    its own host name.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: list[str]) -> None:
        self.app = app
        self.check = TrustedHostMiddleware(self._pass, allowed_hosts, www_redirect=False)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["litft.host_is_allowed"] = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""

        async def drop(message: Message) -> None:
            """Receive the plain text that starlette would answer."""

        # an allowed host sets the mark in `_pass`, and the refusal of others goes to `drop`
        await self.check(scope, receive, drop)
        if scope.get("litft.host_is_allowed"):
            await self.app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")[:200]
        reason = (
            f"the host name {host!r} is not allowed; start the server with --allow_host "
            f"{host.split(':')[0]}"
        )
        await JSONResponse(ApiError(400, reason, "invalid_host").body, 400)(
            scope, receive, send
        )


class Choices:
    """The answers to one request, received from the engine's thread."""

    def __init__(self, engine: Engine, name: str, requests: list[Request]) -> None:
        self.engine = engine
        self.num_unfinished = len(requests)
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue()
        try:
            self._numbers = engine.submit(
                name,
                [
                    (request, partial(self._deliver, index))
                    for index, request in enumerate(requests)
                ],
            )
        except (Overloaded, Stopping, Failed) as error:
            raise as_api_error(error) from None

    @property
    def count(self) -> int:
        """Number of choices."""
        return len(self._numbers)

    def _deliver(self, index: int, item: GenerationChunk | Exception) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))

    async def next(self) -> tuple[int, GenerationChunk]:
        """Return (index of the choice, next chunk).

        Raise ApiError if the engine fails. Cancelling cancels the answers.
        """
        try:
            index, item = await self._queue.get()
        except asyncio.CancelledError:
            self.cancel()
            raise

        # an error ends all answers to the request
        if isinstance(item, Exception):
            self.cancel()
            raise as_api_error(item)
        self.num_unfinished -= item.finish_reason is not None
        return index, item

    def cancel(self) -> None:
        """Cancel the unfinished answers, which frees their rows."""
        if self.num_unfinished:
            self.engine.cancel(self._numbers)


class Stream(StreamingResponse):
    """A stream of server-sent events. If it ends early, its answers are cancelled."""

    def __init__(self, choices: Choices, events: AsyncIterator[str]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self.choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.choices.cancel()


async def _collect(choices: Choices, reply: Reply) -> dict[str, Any]:
    """Return the complete response."""
    chunks: list[list[GenerationChunk]] = [[] for _ in range(choices.count)]
    while choices.num_unfinished:
        index, chunk = await choices.next()
        chunks[index].append(chunk)
    return reply.full(chunks)


async def _events(
    choices: Choices,
    reply: Reply,
    first_chunk: tuple[int, GenerationChunk],
    wants_usage: bool,
) -> AsyncIterator[str]:
    """Yield the server-sent events of a stream; the last one is [DONE]."""
    last_chunks: dict[int, GenerationChunk] = {}
    try:
        indexed_chunk = first_chunk
        while True:
            index, chunk = indexed_chunk
            opening = [] if index in last_chunks else reply.opening(index)
            last_chunks[index] = chunk
            # OpenAI's API has the field in every chunk if
            # usage is requested, and its value in the last one
            for choice in (*opening, *reply.deltas(index, chunk)):
                yield _event(
                    reply.chunk([choice], **({"usage": None} if wants_usage else {}))
                )
            if not choices.num_unfinished:
                break
            indexed_chunk = await choices.next()
        if wants_usage:
            yield _event(
                reply.chunk(
                    [],
                    usage=reply.usage(
                        [last_chunks[index] for index in sorted(last_chunks)]
                    ),
                )
            )
        yield "data: [DONE]\n\n"
    except ApiError as error:  # too late for an HTTP status
        yield _event(error.body)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _run_until_disconnect(
    request: HttpRequest, work: Coroutine[Any, Any, Any]
) -> Any:
    """Return the result of `work`. It is cancelled if the client disconnects."""
    task = asyncio.create_task(work)
    disconnect = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client disconnected")  # not sent
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()


async def _disconnected(request: HttpRequest) -> None:
    # after its body, a request has no other messages
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_api_error(error: Exception) -> ApiError:
    """Convert an error of the engine to the response that the client gets."""
    if isinstance(error, Overloaded):
        return ApiError(503, "too many requests are waiting; try again later", "overloaded")
    if isinstance(error, Stopping):
        return ApiError(503, "the server is shutting down", "stopping")
    if isinstance(error, Failed):
        message = (
            "the engine has failed, see the server's log; the server must be started again"
        )
        return ApiError(503, message, "failed")
    if isinstance(error, BrokenModel):
        return ApiError(500, str(error), "broken_model")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(
        500, f"generation failed ({type(error).__name__}); see the server's log"
    )


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    # the app calls a handler for errors of its class alone
    assert isinstance(error, ApiError)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(
        error.status, {}
    )
    return JSONResponse(error.body, error.status, headers)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404 and request.url.path.startswith("/v1/"):
        reason += "; this server has /v1/chat/completions, /v1/completions and /v1/models"
    return JSONResponse(
        ApiError(error.status_code, reason).body, error.status_code, error.headers
    )


async def _unexpected(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(
        ApiError(500, "internal server error; see the server's log").body, 500
    )
