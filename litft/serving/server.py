"""The HTTP server of an `Engine`: its socket, its models, and its end."""

import asyncio
import copy
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

try:
    import uvicorn
    from uvicorn.config import LOGGING_CONFIG

    from litft.serving.routes import KEY_VARIABLE, LOCAL_HOSTS, Endpoint, required_key
except ModuleNotFoundError as error:
    raise ValueError(
        f"serving needs the package {error.name}; pip install 'litft[serve]'"
    ) from None

from litft import run_dir
from litft.args import ServeArgs
from litft.args.parser import finetune_args
from litft.checkpoints.hub import hub_id
from litft.distributed.devices import device_memory, is_out_of_memory
from litft.errors import first_line
from litft.inference.session import Session, missing_template_note, open_sessions, source_of
from litft.pretrained.folder import resolve
from litft.serving.engine import Engine

# on shutdown, time for clients to receive the end of their answers
LINGER_SECONDS = 5
# default maximum length of prompt plus answer, in tokens
DEFAULT_CAPACITY = 4096


def run_server(engine: Engine, args: ServeArgs, listener: socket.socket) -> None:
    """Answer the requests that arrive at the socket, until SIGTERM or Ctrl-C."""
    settings = uvicorn.Config(
        Endpoint(engine, args).app(),
        server_header=False,
        lifespan="off",
        log_config=_log_config(),
    )
    server = Server(settings, engine, _welcome_text(listener, args, engine))
    asyncio.run(server.serve([listener]))


def _log_config() -> dict[str, Any]:
    """Return uvicorn's log settings: one line per request, and warnings, all on stderr."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["loggers"]["uvicorn.error"]["level"] = "WARNING"
    return config


def make_engine(args: ServeArgs, models: dict[str, Session]) -> Engine:
    """Return a running engine that has been warmed up.

    Raise ValueError if its KV cache does not fit into memory.
    """
    model = next(iter(models.values())).model
    context = model.config.max_positions
    if (args.max_seq_length or 0) > context:
        raise ValueError(
            f"--max_seq_length {args.max_seq_length}: the model's context length is {context}; "
            "lower it"
        )
    engine = Engine(
        models,
        args.batch_size,
        args.max_seq_length or min(DEFAULT_CAPACITY, context),
        args.max_waiting,
    )
    remedy = f"lower --batch_size {engine.rows} or --max_seq_length {engine.capacity}"
    required = engine.memory * len(models)

    # refused before the memory is allocated
    if required > device_memory(model.device):
        raise ValueError(
            f"the KV cache needs {required / 2**30:,.0f} GiB, more than the device has; {remedy}"
        )
    engine.start()
    try:
        engine.warm_up()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"not enough memory for the KV cache ({first_line(error)}); {remedy}"
        ) from None
    return engine


@contextmanager
def open_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Open the listening socket, before time is spent on loading a model.

    Raise ValueError if that fails.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot listen on --host {host} --port {port}: {reason}; choose another, or stop the "
            "process that uses it"
        ) from None
    with listener:
        yield listener


def open_models(args: ServeArgs) -> dict[str, Session]:
    """Return the sessions to serve, by model name.

    Raise ValueError if two have the same name, or one is not an adapter.
    """
    source = source_of(args)
    name = args.model_name or source.name
    folders = dict(item.split("=", 1) for item in args.adapters)
    if name in folders:
        raise ValueError(
            f"--adapters {name}=...: the base model has the same name; rename it with --model_name"
        )
    adapters = {}
    for adapter_name, folder in folders.items():
        adapters[adapter_name] = resolve(folder, source.base)

    # adapters share the base's weights, so a full model cannot be among them
    not_adapters = []
    for adapter in adapters.values():
        if adapter.adapter is None:
            not_adapters.append(str(adapter.folder))
    if not_adapters:
        raise ValueError(
            f"--adapters {', '.join(not_adapters)}: no adapter; name folders with an "
            "adapter_config.json, or run folders"
        )
    sources = {name: source, **adapters}
    if not args.with_base:
        return dict(zip(sources, open_sessions(args, list(sources.values())), strict=True))
    if source.adapter:
        base = resolve(source.base)
    else:
        base = resolve(args.base_dir or _base_of(source.folder))
    if base.name in sources:
        raise ValueError(
            f"--with_base: another model has the base's name {base.name}; rename it with "
            "--model_name"
        )
    # the base of an adapter shares its weights; that of a full model is loaded on its own
    if source.adapter:
        groups = [{**sources, base.name: base}]
    else:
        groups = [sources, {base.name: base}]
    sessions = {}
    for group in groups:
        opened = open_sessions(args, list(group.values()))
        sessions |= dict(zip(group, opened, strict=True))
    return sessions


def _base_of(folder: Path) -> str:
    """Return the folder or hub id of the model that a full fine-tuning run began with."""
    run = folder.resolve().parent
    if not run_dir.is_run(run):
        raise ValueError(
            f"--with_base: {folder} is neither an adapter nor the result of a run; leave the flag "
            "out"
        )
    base = str(finetune_args(run).checkpoint_dir)
    if not (Path(base).exists() or hub_id(base)):
        raise ValueError(
            f"--with_base: {run} was trained on {base}, which is not found from here; pass "
            "--base_dir"
        )
    return base


def _welcome_text(listener: socket.socket, args: ServeArgs, engine: Engine) -> str:
    host, port = listener.getsockname()[:2]
    memory = f"{engine.memory / 2**20:,.0f} MiB"
    if len(engine.models) > 1:
        memory += " for each of the models"
    # an IPv6 address
    if ":" in host:
        host = f"[{host}]"
    address = f"http://{host}:{port}"
    lines = [f"serving {', '.join(engine.models)} at {address}"]
    if args.with_base:
        lines.append(
            f"to compare both: {address}/?compare={quote(list(engine.models)[-1])}"
        )

    # the limits of the server
    lines += [
        f"up to {engine.rows} answers at once, of {engine.capacity:,} tokens with their prompts: "
        f"the KV cache takes {memory}"
    ]
    note = missing_template_note(next(iter(engine.models.values())).tokenizer)
    if note:
        lines.append(note)
    # other machines can reach this address
    if args.host not in LOCAL_HOSTS and not required_key(args):
        lines.append(
            f"warning: anyone who can reach {args.host} can use this server; require a key with "
            f"--api_key or {KEY_VARIABLE}"
        )
    return "\n".join(lines)


class Server(uvicorn.Server):
    """uvicorn's server, which exits with code 0 once running answers are finished.

    A second signal exits at once.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, welcome: str) -> None:
        super().__init__(config)
        self.engine = engine
        self.welcome = welcome

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
        self.should_exit = True
        self.engine.stop()
        # kept in an attribute, since the event loop itself has only a weak reference
        self.shutdown_task = asyncio.create_task(self._shut_down())
        # may raise BrokenPipeError
        print(f"{number.name}: finishing running answers", file=sys.stderr, flush=True)

    async def _shut_down(self) -> None:
        """Wait for the running answers, then drop clients that do not read them or have not sent
        their request."""
        await asyncio.to_thread(self.engine.join)
        await asyncio.sleep(LINGER_SECONDS)
        # each aborted request would log a traceback
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Print the address once the server listens."""
        await super().startup(sockets)
        print(self.welcome, file=sys.stderr, flush=True)
