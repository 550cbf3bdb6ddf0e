"""The command `serve`: an OpenAI-compatible endpoint over an `Engine`, and a chat page that uses it."""

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

    from litft.serving.openai_api import ApiError, Asked, ChatAsked, CompletionAsked, Reply, parsed
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
KEY = "LITFT_API_KEY"
LINGER = 5  # seconds that clients have for their last answers' ends
PATIENCE = 60  # and for sending a request
CAPACITY = 4096  # tokens of a prompt with its answer, where nothing is asked for
LOCAL = ("127.0.0.1", "localhost", "::1")
# the page is one file, and talks to nobody else
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
HEADERS = {
    "Content-Security-Policy": POLICY + "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def serve(args: ServeArgs) -> None:
    """Answer until SIGTERM or Ctrl-C; then finish what has begun."""
    # of several processes the first one listens; the others stay in `_open`
    first = local_rank() == "0"
    with _listening(args.host, args.port) if first else nullcontext() as listener:
        engine = _engine(args, _open(args))
        settings = uvicorn.Config(Endpoint(engine, args).app(), server_header=False, lifespan="off", log_config=_logs())
        asyncio.run(Server(settings, engine, _welcome(listener, args, engine)).serve([listener]))
        engine.join()
        print("stopped", file=sys.stderr)


def _logs() -> dict[str, Any]:
    """A line a request, on stderr as all that is said here, and what goes wrong."""
    found = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    found["handlers"]["access"]["stream"] = "ext://sys.stderr"
    found["loggers"]["uvicorn.error"]["level"] = "WARNING"
    return found


def _engine(args: ServeArgs, models: dict[str, Session]) -> Engine:
    """What answers, and has answered once; ValueError where there is no room for what is asked for."""
    model = next(iter(models.values())).model
    context = model.config.max_positions
    if (args.max_seq_length or 0) > context:
        raise ValueError(f"--max_seq_length {args.max_seq_length}: the model's context is {context}; lower it")
    engine = Engine(models, args.batch_size, args.max_seq_length or min(CAPACITY, context), args.max_waiting)
    remedy = f"lower --batch_size {engine.rows} or --max_seq_length {engine.capacity}"
    if (asked := engine.memory * len(models)) > device_memory(model.device):
        raise ValueError(f"{asked / 2**30:,.0f} GiB for the texts are more than there are; {remedy}")
    engine.start()
    try:
        engine.warm()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"there is no memory for the texts ({summary(error)}); {remedy}") from None
    return engine


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is there before a model is loaded in vain; ValueError where it cannot be."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot listen at --host {host} --port {port}: {reason}; choose another, or end who is there"
        ) from None
    with listener:
        yield listener


def _open(args: ServeArgs) -> dict[str, Session]:
    """What is served, by name; ValueError for two of one name."""
    named = {name: folder for name, _, folder in (item.partition("=") for item in args.adapters)}
    first = args.model_name or source_of(args).name
    if first in named:
        raise ValueError(f"--adapters {first}=...: the first model is called so too; give it another with --model_name")
    return dict(zip([first, *named], open_sessions(args, list(named.values())), strict=True))


def _welcome(listener: socket.socket, args: ServeArgs, engine: Engine) -> str:
    host, port = listener.getsockname()[:2]
    memory = f"{engine.memory / 2**20:,.0f} MiB{' for each of the models' * (len(engine.models) > 1)}"
    lines = [f"serving {', '.join(engine.models)} at http://{f'[{host}]' if ':' in host else host}:{port}"]
    lines += [f"{engine.rows} answers at once, of {engine.capacity:,} tokens with their prompts: they take {memory}"]
    if args.host not in LOCAL and not _key(args):
        lines.append(f"warning: everybody who reaches {args.host} may use this; --api_key, or {KEY}, asks for a key")
    return "\n".join(lines)


def _key(args: ServeArgs) -> str | None:
    key = args.api_key or os.environ.get(KEY) or None
    if key is not None and not key.isascii():
        raise ValueError(f"{KEY} holds more than ASCII, and clients send it in a header; choose another")
    return key


class Server(uvicorn.Server):
    """uvicorn's, which ends with code 0 after what the engine has begun is done; a second signal ends at once."""

    def __init__(self, config: uvicorn.Config, engine: Engine, welcome: str) -> None:
        super().__init__(config)
        self.engine, self.welcome = engine, welcome

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Instead of raising them again afterwards."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        yield

    def _end(self, number: signal.Signals) -> None:
        if self.should_exit:
            os._exit(128 + number)
        print(f"{number.name}: finishing what has begun", file=sys.stderr, flush=True)
        self.should_exit = True
        self.engine.stop()
        self.leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Wait for the answers, and no longer for clients that do not read them, or have not said what they want."""
        await asyncio.to_thread(self.engine.join)
        await asyncio.sleep(LINGER)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # each request that is cut off now has a traceback
        self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where, once it listens."""
        await super().startup(sockets)
        print(self.welcome, file=sys.stderr, flush=True)


Handler = Callable[[HttpRequest], Awaitable[Response]]


class Endpoint:
    """What is answered under which address."""

    def __init__(self, engine: Engine, args: ServeArgs) -> None:
        self.engine, self.models, self.capacity = engine, engine.models, engine.capacity
        self.limit, self.most_bytes = args.max_new_tokens, round(args.max_body_mb * 1e6)
        self.key, self.is_local = _key(args), args.host in LOCAL
        self.page = PAGE.read_text("utf-8")

    def app(self) -> Starlette:
        """The routes. Errors have the API's shape everywhere."""
        routes = [
            Route("/", self.show_page),
            Route("/health", self.health),
            Route("/v1/models", self.guarded(self.list_models)),
            Route("/v1/models/{name:path}", self.guarded(self.show_model)),
            Route("/v1/chat/completions", self.guarded(partial(self.answer, ChatAsked)), methods=["POST"]),
            Route("/v1/completions", self.guarded(partial(self.answer, CompletionAsked)), methods=["POST"]),
        ]
        # a page elsewhere may make a browser send requests here under its own name (DNS rebinding)
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL[:2], "[::1]"], www_redirect=False)
        handlers = {HTTPException: _http_error, ApiError: _api_error, Exception: _unexpected}
        return Starlette(routes=routes, middleware=[hosts] if self.is_local else [], exception_handlers=handlers)

    def guarded(self, handler: Handler) -> Handler:
        """For those with the key, where there is one."""

        async def checked(request: HttpRequest) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            # in a time that says nothing of the key
            if self.key is not None and not hmac.compare_digest(given.encode(), self.key.encode()):
                raise ApiError(401, "the bearer key is missing or wrong", "invalid_api_key")
            return await handler(request)

        return checked

    async def show_page(self, request: HttpRequest) -> Response:
        """The chat."""
        return HTMLResponse(self.page, headers=HEADERS)

    async def health(self, request: HttpRequest) -> Response:
        """Whether answers are made, and how many."""
        alive = self.engine.alive
        return JSONResponse({"status": "ok" if alive else "failed", **self.engine.counts}, 200 if alive else 503)

    async def list_models(self, request: HttpRequest) -> Response:
        """Everything that `model` may be."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.models]})

    async def show_model(self, request: HttpRequest) -> Response:
        """One of them."""
        return JSONResponse(self._model(self._named(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "litft", "max_model_len": self.capacity}

    def _named(self, name: str) -> str:
        if name not in self.models:
            reason = f"the model {name[:80]!r} does not exist; there is {', '.join(self.models)}"
            raise ApiError(404, reason, "model_not_found", "model")
        return name

    async def answer(self, kind: type[Asked], request: HttpRequest) -> Response:
        """Answers, whole or streamed; whoever goes away frees the place."""
        body = await self._body(request)
        asked = parsed(kind, body)
        name = self._named(asked.model) if asked.model else next(iter(self.models))
        session = self.models[name]
        # long prompts take long to tokenize: others are served meanwhile
        requests = await asyncio.to_thread(asked.requests, session, self.capacity, self.limit)
        if len(requests) > self.engine.most:
            raise ApiError(400, f"{len(requests)} answers: this server makes and queues {self.engine.most}; ask for fewer")
        choices = Choices(self.engine, name, requests)
        reply = asked.reply(name, session.tokenizer)
        if asked.stream:
            wants_usage = bool(asked.stream_options and asked.stream_options.include_usage)
            first = await _unless_gone(request, choices.next())  # an error has a status of its own while nothing is sent
            return Stream(choices, _events(choices, reply, first, wants_usage))
        return JSONResponse(await _unless_gone(request, _whole(choices, reply)))

    async def _body(self, request: HttpRequest) -> bytes:
        """A JSON body that is not too long, read no further than that."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a page elsewhere cannot send without being asked about
            raise ApiError(415, f"content type {kind!r}: send application/json")
        try:
            return await asyncio.wait_for(self._read(request), PATIENCE)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the request did not come whole within {PATIENCE} seconds", "timeout") from None
        except (ClientDisconnect, asyncio.CancelledError):  # or the server ends
            raise ApiError(499, "the request did not come whole") from None  # which nobody reads

    async def _read(self, request: HttpRequest) -> bytes:
        found = bytearray()
        async for part in request.stream():
            found += part
            if len(found) > self.most_bytes:
                raise ApiError(413, f"the request is longer than {self.most_bytes:,} bytes; shorten it", "request_too_large")
        return bytes(found)


class Choices:
    """The answers to one request on their way from the engine's thread."""

    def __init__(self, engine: Engine, name: str, requests: list[Request]) -> None:
        self.engine, self.open = engine, len(requests)
        self._loop, self._came = asyncio.get_running_loop(), asyncio.Queue()
        try:
            self._numbers = engine.submit(name, [(own, partial(self._deliver, index)) for index, own in enumerate(requests)])
        except (Overloaded, Stopping) as error:
            raise _told(error) from None

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._numbers)

    def _deliver(self, index: int, what: GenerationChunk | Exception) -> None:
        with suppress(RuntimeError):  # the loop has ended, and whoever asked with it
            self._loop.call_soon_threadsafe(self._came.put_nowait, (index, what))

    async def next(self) -> tuple[int, GenerationChunk]:
        """The next piece and whose it is; ApiError where the engine fails. Whoever stops waiting gives the answers up."""
        try:
            index, what = await self._came.get()
        except asyncio.CancelledError:
            self.give_up()
            raise
        if isinstance(what, Exception):
            self.give_up()
            raise _told(what)
        self.open -= what.finish_reason is not None
        return index, what

    def give_up(self) -> None:
        """Free the places of those that are not done."""
        if self.open:
            self.engine.cancel(self._numbers)


class Stream(StreamingResponse):
    """Server-sent events about answers, which are given up with them."""

    def __init__(self, choices: Choices, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.choices.give_up()


async def _whole(choices: Choices, reply: Reply) -> dict[str, Any]:
    """Everything in one."""
    found: list[list[GenerationChunk]] = [[] for _ in range(choices.count)]
    while choices.open:
        index, piece = await choices.next()
        found[index].append(piece)
    return reply.whole(found)


async def _events(
    choices: Choices, reply: Reply, first: tuple[int, GenerationChunk], wants_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events, the last of them [DONE]."""
    last: dict[int, GenerationChunk] = {}
    try:
        following = first
        while True:
            index, piece = following
            opening = [] if index in last else reply.opening(index)
            last[index] = piece
            for choice in (*opening, reply.delta(index, piece)):
                yield _event(reply.chunk([choice], **({"usage": None} if wants_usage else {})))
            if not choices.open:
                break
            following = await choices.next()
        if wants_usage:
            yield _event(reply.chunk([], usage=reply.usage([last[index] for index in sorted(last)])))
        yield "data: [DONE]\n\n"
    except ApiError as error:  # too late for a status
        yield _event(error.body)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _unless_gone(request: HttpRequest, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` comes to; it is given up when the client goes away."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has gone")  # which nobody reads
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _told(error: Exception) -> ApiError:
    """An engine's error as the client hears of it."""
    if isinstance(error, Overloaded):
        return ApiError(503, "as many requests wait as may; try again later", "overloaded")
    if isinstance(error, Stopping):
        return ApiError(503, "the server is being stopped", "stopping")
    if isinstance(error, BrokenModel):
        return ApiError(500, str(error), "broken_model")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(500, f"the answer could not be made ({type(error).__name__}); the server's log says more")


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(error.status, {})
    return JSONResponse(error.body, error.status, headers)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    reason = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, reason).body, error.status_code, error.headers)


async def _unexpected(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the server has failed; its log says more").body, 500)
