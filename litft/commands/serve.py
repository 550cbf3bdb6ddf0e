"""The command `serve`: an OpenAI-compatible HTTP server, with a chat page."""

import sys
from contextlib import nullcontext

from litft.args import ServeArgs
from litft.args.processes import is_first_on_node
from litft.serving.server import make_engine, open_listener, open_models, run_server


def serve(args: ServeArgs) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the running answers."""
    # of several processes only the first listens; the others do not return from `open_models`
    is_first = is_first_on_node()
    with open_listener(args.host, args.port) if is_first else nullcontext() as listener:
        engine = make_engine(args, open_models(args))
        # this is the first process
        assert listener is not None
        run_server(engine, args, listener)
        engine.join()
        print("stopped", file=sys.stderr)
