"""The command `serve`: an OpenAI-compatible HTTP server for an `Engine`, with a chat page."""

import asyncio
import copy
import hmac
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send

    from litft.serving.openai_api import ApiError, ApiRequest, ChatRequest, CompletionRequest, Reply, parse_request
except ModuleNotFoundError as error:
    raise ValueError(f"serving needs the package {error.name}; pip install 'litft[serve]'") from None

from litft.args import ServeArgs
from litft.args.processes import local_rank
from litft.distributed.devices import device_memory, is_out_of_memory
from litft.errors import summary
from litft.inference.decoder import BrokenModel
from litft.inference.generation import GenerationChunk, Request
from litft.inference.session import Session, open_sessions, source_of
from litft.serving.engine import Engine, Overloaded, Stopping

PAGE = Path(__file__).parent / "page.html"
KEY_VARIABLE = "LITFT_API_KEY"
LINGER_SECONDS = 5  # on shutdown, time for clients to receive the end of their answers
REQUEST_TIMEOUT = 60  # seconds that a client may take to send a request
DEFAULT_CAPACITY = 4096  # default maximum length of prompt plus answer, in tokens
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
# the page is a single file and connects to this server only
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
HEADERS = {
    "Content-Security-Policy": POLICY + "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def serve(args: ServeArgs) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the running answers."""
    # of several processes only the first listens; the others do not return from `_open_models`
    is_first = local_rank() == "0"
    with _listener(args.host, args.port) if is_first else nullcontext() as listener:
        engine = _engine(args, _open_models(args))
        settings = uvicorn.Config(
            Endpoint(engine, args).app(), server_header=False, lifespan="off", log_config=_log_config()
        )
        asyncio.run(Server(settings, engine, _welcome_text(listener, args, engine)).serve([listener]))
        engine.join()
        print("stopped", file=sys.stderr)


def _log_config() -> dict[str, Any]:
    """Return uvicorn's log settings: one line per request, and warnings, all on stderr."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["loggers"]["uvicorn.error"]["level"] = "WARNING"
    return config


def _engine(args: ServeArgs, models: dict[str, Session]) -> Engine:
    """Return a running engine that has been warmed up. Raise ValueError if its KV cache does not fit into memory."""
    model = next(iter(models.values())).model
    context = model.config.max_positions
    if (args.max_seq_length or 0) > context:
        raise ValueError(f"--max_seq_length {args.max_seq_length}: the model's context length is {context}; lower it")
    engine = Engine(models, args.batch_size, args.max_seq_length or min(DEFAULT_CAPACITY, context), args.max_waiting)
    remedy = f"lower --batch_size {engine.rows} or --max_seq_length {engine.capacity}"
    if (required := engine.memory * len(models)) > device_memory(model.device):
        raise ValueError(f"the KV cache needs {required / 2**30:,.0f} GiB, more than the device has; {remedy}")
    engine.start()
    try:
        engine.warm_up()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"not enough memory for the KV cache ({summary(error)}); {remedy}") from None
    return engine


@contextmanager
def _listener(host: str, port: int) -> Iterator[socket.socket]:
    """Open the listening socket, before time is spent on loading a model. Raise ValueError if that fails."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot listen on --host {host} --port {port}: {reason}; choose another, or stop the process that uses it"
        ) from None
    with listener:
        yield listener


def _open_models(args: ServeArgs) -> dict[str, Session]:
    """Return the sessions to serve, by model name. Raise ValueError if two have the same name."""
    adapter_folders = {name: folder for name, _, folder in (item.partition("=") for item in args.adapters)}
    base_name = args.model_name or source_of(args).name
    if base_name in adapter_folders:
        raise ValueError(f"--adapters {base_name}=...: the base model has the same name; rename it with --model_name")
    return dict(zip([base_name, *adapter_folders], open_sessions(args, list(adapter_folders.values())), strict=True))


def _welcome_text(listener: socket.socket, args: ServeArgs, engine: Engine) -> str:
    host, port = listener.getsockname()[:2]
    memory = f"{engine.memory / 2**20:,.0f} MiB{' for each of the models' * (len(engine.models) > 1)}"
    lines = [f"serving {', '.join(engine.models)} at http://{f'[{host}]' if ':' in host else host}:{port}"]
    lines += [
        f"up to {engine.rows} answers at once, of {engine.capacity:,} tokens with their prompts: the KV cache takes {memory}"
    ]
    if args.host not in LOCAL_HOSTS and not _required_key(args):
        lines.append(
            f"warning: anyone who can reach {args.host} can use this server; require a key with --api_key or {KEY_VARIABLE}"
        )
    return "\n".join(lines)


def _required_key(args: ServeArgs) -> str | None:
    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is not None and not key.isascii():
        raise ValueError(f"{KEY_VARIABLE} has non-ASCII characters, but clients send it in a header; choose another key")
    return key


class Server(uvicorn.Server):
    """uvicorn's server, which exits with code 0 once running answers are finished. A second signal exits at once."""

    def __init__(self, config: uvicorn.Config, engine: Engine, welcome: str) -> None:
        super().__init__(config)
        self.engine, self.welcome = engine, welcome

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT. uvicorn would raise them again after its shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_signal, number)
        yield

    def _handle_signal(self, number: signal.Signals) -> None:
        if self.should_exit:
            os._exit(128 + number)
        print(f"{number.name}: finishing running answers", file=sys.stderr, flush=True)
        self.should_exit = True
        self.engine.stop()
        self.shutdown_task = asyncio.create_task(self._shut_down())

    async def _shut_down(self) -> None:
        """Wait for the running answers, then drop clients that do not read them or have not sent their request."""
        await asyncio.to_thread(self.engine.join)
        await asyncio.sleep(LINGER_SECONDS)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # each aborted request would log a traceback
        self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Print the address once the server listens."""
        await super().startup(sockets)
        print(self.welcome, file=sys.stderr, flush=True)


Handler = Callable[[HttpRequest], Awaitable[Response]]


class Endpoint:
    """The HTTP routes and their handlers."""

    def __init__(self, engine: Engine, args: ServeArgs) -> None:
        self.engine, self.models, self.capacity = engine, engine.models, engine.capacity
        self.limit, self.max_bytes = args.max_new_tokens, round(args.max_body_mb * 1e6)
        self.key, self.is_local = _required_key(args), args.host in LOCAL_HOSTS
        self.page = PAGE.read_text("utf-8")

    def app(self) -> Starlette:
        """Return the application. All errors have the API's format."""
        routes = [
            Route("/", self.show_page),
            Route("/health", self.health),
            Route("/v1/models", self.require_key(self.list_models)),
            Route("/v1/models/{name:path}", self.require_key(self.show_model)),
            Route("/v1/chat/completions", self.require_key(partial(self.answer, ChatRequest)), methods=["POST"]),
            Route("/v1/completions", self.require_key(partial(self.answer, CompletionRequest)), methods=["POST"]),
        ]
        # protects against DNS rebinding: a web page that makes the browser send requests here under its own host name
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_HOSTS[:2], "[::1]"], www_redirect=False)
        handlers = {HTTPException: _http_error, ApiError: _api_error, Exception: _unexpected}
        return Starlette(routes=routes, middleware=[hosts] if self.is_local else [], exception_handlers=handlers)

    def require_key(self, handler: Handler) -> Handler:
        """Return the handler, restricted to clients that send the key, if one is set."""

        async def checked(request: HttpRequest) -> Response:
            sent_key = request.headers.get("authorization", "").removeprefix("Bearer ")
            # constant-time comparison
            if self.key is not None and not hmac.compare_digest(sent_key.encode(), self.key.encode()):
                raise ApiError(401, "the bearer key is missing or wrong", "invalid_api_key")
            return await handler(request)

        return checked

    async def show_page(self, request: HttpRequest) -> Response:
        """Return the chat page."""
        return HTMLResponse(self.page, headers=HEADERS)

    async def health(self, request: HttpRequest) -> Response:
        """Return whether the engine runs, and its request counts."""
        alive = self.engine.alive
        return JSONResponse({"status": "ok" if alive else "failed", **self.engine.counts}, 200 if alive else 503)

    async def list_models(self, request: HttpRequest) -> Response:
        """List the models that requests can name."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.models]})

    async def show_model(self, request: HttpRequest) -> Response:
        """Return one model's entry."""
        return JSONResponse(self._model(self._check_model(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "litft", "max_model_len": self.capacity}

    def _check_model(self, name: str) -> str:
        if name not in self.models:
            reason = f"the model {name[:80]!r} does not exist; available: {', '.join(self.models)}"
            raise ApiError(404, reason, "model_not_found", "model")
        return name

    async def answer(self, request_type: type[ApiRequest], request: HttpRequest) -> Response:
        """Answer a request, as one response or a stream. A client's disconnect cancels its answers."""
        body = await self._body(request)
        api_request = parse_request(request_type, body)
        name = self._check_model(api_request.model) if api_request.model else next(iter(self.models))
        session = self.models[name]
        # in a thread, because tokenizing long prompts would block other requests
        requests = await asyncio.to_thread(api_request.requests, session, self.capacity, self.limit)
        if len(requests) > self.engine.max_requests:
            raise ApiError(
                400, f"{len(requests)} answers: this server accepts at most {self.engine.max_requests}; ask for fewer"
            )
        choices = Choices(self.engine, name, requests)
        reply = api_request.reply(name, session.tokenizer)
        if api_request.stream:
            wants_usage = bool(api_request.stream_options and api_request.stream_options.include_usage)
            first_chunk = await _run_until_disconnect(request, choices.next())  # an error can still set the HTTP status
            return Stream(choices, _events(choices, reply, first_chunk, wants_usage))
        return JSONResponse(await _run_until_disconnect(request, _collect(choices, reply)))

    async def _body(self, request: HttpRequest) -> bytes:
        """Read a JSON body. Raise ApiError if it is too long, without reading the rest."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":  # other sites cannot send this type without a CORS preflight
            raise ApiError(415, f"content type {content_type!r}: send application/json")
        try:
            return await asyncio.wait_for(self._read(request), REQUEST_TIMEOUT)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the request was not complete within {REQUEST_TIMEOUT} seconds", "timeout") from None
        except (ClientDisconnect, asyncio.CancelledError):  # or the server stops
            raise ApiError(499, "the request was incomplete") from None  # not sent: the client is gone

    async def _read(self, request: HttpRequest) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_bytes:
                raise ApiError(413, f"the request is longer than {self.max_bytes:,} bytes; shorten it", "request_too_large")
        return bytes(body)


class Choices:
    """The answers to one request, received from the engine's thread."""

    def __init__(self, engine: Engine, name: str, requests: list[Request]) -> None:
        self.engine, self.num_unfinished = engine, len(requests)
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue()
        try:
            self._numbers = engine.submit(
                name, [(request, partial(self._deliver, index)) for index, request in enumerate(requests)]
            )
        except (Overloaded, Stopping) as error:
            raise _as_api_error(error) from None

    @property
    def count(self) -> int:
        """Number of choices."""
        return len(self._numbers)

    def _deliver(self, index: int, item: GenerationChunk | Exception) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))

    async def next(self) -> tuple[int, GenerationChunk]:
        """Return (index of the choice, next chunk). Raise ApiError if the engine fails. Cancelling cancels the answers."""
        try:
            index, item = await self._queue.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, Exception):
            self.cancel()
            raise _as_api_error(item)
        self.num_unfinished -= item.finish_reason is not None
        return index, item

    def cancel(self) -> None:
        """Cancel the unfinished answers, which frees their rows."""
        if self.num_unfinished:
            self.engine.cancel(self._numbers)


class Stream(StreamingResponse):
    """A stream of server-sent events. If it ends early, its answers are cancelled."""

    def __init__(self, choices: Choices, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
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
    choices: Choices, reply: Reply, first_chunk: tuple[int, GenerationChunk], wants_usage: bool
) -> AsyncIterator[str]:
    """Yield the server-sent events of a stream; the last one is [DONE]."""
    last_chunks: dict[int, GenerationChunk] = {}
    try:
        indexed_chunk = first_chunk
        while True:
            index, chunk = indexed_chunk
            opening = [] if index in last_chunks else reply.opening(index)
            last_chunks[index] = chunk
            for choice in (*opening, reply.delta(index, chunk)):
                yield _event(reply.chunk([choice], **({"usage": None} if wants_usage else {})))
            if not choices.num_unfinished:
                break
            indexed_chunk = await choices.next()
        if wants_usage:
            yield _event(reply.chunk([], usage=reply.usage([last_chunks[index] for index in sorted(last_chunks)])))
        yield "data: [DONE]\n\n"
    except ApiError as error:  # too late for an HTTP status
        yield _event(error.body)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _run_until_disconnect(request: HttpRequest, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`. It is cancelled if the client disconnects."""
    task, disconnect = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client disconnected")  # not sent
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _as_api_error(error: Exception) -> ApiError:
    """Convert an error of the engine to the response that the client gets."""
    if isinstance(error, Overloaded):
        return ApiError(503, "too many requests are waiting; try again later", "overloaded")
    if isinstance(error, Stopping):
        return ApiError(503, "the server is shutting down", "stopping")
    if isinstance(error, BrokenModel):
        return ApiError(500, str(error), "broken_model")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(500, f"generation failed ({type(error).__name__}); see the server's log")


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(error.status, {})
    return JSONResponse(error.body, error.status, headers)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    reason = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, reason).body, error.status_code, error.headers)


async def _unexpected(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "internal server error; see the server's log").body, 500)
