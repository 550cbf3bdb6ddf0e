"""The flags of `serve`."""

import re
from dataclasses import dataclass, field
from typing import ClassVar

from litft.args.inference import ModelArgs
from litft.args.value_checks import below_minimum

MAX_BATCH_SIZE = 4096
MAX_BODY_MB = 1000


@dataclass
class ServeArgs(ModelArgs):
    """Serve a model and adapters of it through an OpenAI-compatible API, with a chat page at /."""

    for_speed: ClassVar[bool] = True

    max_new_tokens: int | None = None
    """Maximum length of an answer in tokens, which requests can only lower. Default: limited by
    --max_seq_length only."""
    host: str = "127.0.0.1"
    """The address to listen on. The default accepts connections from this machine only; 0.0.0.0:
    from all networks."""
    allow_host: list[str] = field(default_factory=list)
    """Host names by which clients reach this server, besides localhost: those of a proxy or tunnel
    in front of it. Other names are refused while --host is a local address, which protects against
    DNS rebinding; '*' allows all."""
    cors_origin: list[str] = field(default_factory=list)
    """Web pages that may call this API from a browser, as origins: https://app.example or
    http://localhost:3000; '*' allows all. Default: only the server's own chat page."""
    port: int = 8000
    """The port to listen on. 0: any free port, which is printed."""
    model_name: str | None = None
    """The model's name in requests. Default: the name of its folder."""
    adapters: list[str] = field(default_factory=list)
    """Adapters of the same base model to serve too, NAME=DIR: adapter or run folders, selected by a
    request's `model`."""
    with_base: bool = False
    """Serve the base model of --checkpoint_dir too, so that the chat page can compare the two: that
    of an adapter, which shares its weights, or that of a fully fine-tuned run, which needs its own
    memory."""
    batch_size: int = 8
    """Number of answers generated at once per model; further requests wait."""
    max_seq_length: int | None = None
    """Maximum length of prompt plus answer in tokens. The KV cache is allocated for --batch_size
    sequences of this length.
    Default: 4096, or the model's context length if that is shorter."""
    max_waiting: int = 256
    """Maximum number of waiting requests. Further ones are rejected with status 503."""
    max_body_mb: float = 4.0
    """Maximum size of a request body in megabytes, at most 1000. Larger ones are rejected with
    status 413."""
    api_key: str | None = None
    """The key that clients must send as bearer token. Default: the environment variable
    LITFT_API_KEY, otherwise none."""

    def problems(self) -> list[str]:
        """Return the problems of the model flags plus those of the server flags."""
        problems = super().problems() + below_minimum(self, "", 1, "batch_size")
        # room for one token of the prompt and one of the answer
        if self.max_seq_length is not None:
            problems += below_minimum(self, "", 2, "max_seq_length")
        problems += below_minimum(self, "", 0, "max_waiting")
        if self.batch_size > MAX_BATCH_SIZE:
            problems.append(
                f"--batch_size {self.batch_size}: must be at most {MAX_BATCH_SIZE}"
            )
        for origin in self.cors_origin:
            # an origin is a scheme and a host, with or without a port, but without a path
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                problems.append(
                    f"--cors_origin {origin}: expected an origin such as https://app.example, or *"
                )
        # a name may begin with *. for all of its subdomains
        for host in self.allow_host:
            if not re.fullmatch(r"\*|(\*\.)?[\w.\-]+", host):
                problems.append(
                    f"--allow_host {host}: expected a host name without scheme and port, or *"
                )
        if not 0 <= self.port < 65536:
            problems.append(f"--port {self.port}: must lie in [0, 65535]")
        if not 0 < self.max_body_mb <= MAX_BODY_MB:
            problems.append(
                f"--max_body_mb {self.max_body_mb}: must be above 0 and at most {MAX_BODY_MB}"
            )
        if self.api_key is not None and not (
            self.api_key.isascii() and self.api_key.isprintable() and self.api_key.strip()
        ):
            problems.append(
                "--api_key: must be printable ASCII and not empty, since it is sent in a header"
            )
        names = []
        for item in self.adapters:
            name, equals, folder = item.partition("=")
            names.append(name)
            if not (name and equals and folder):
                problems.append(f"--adapters {item}: expected NAME=DIR")

        # requests select a model by its name
        duplicates = set()
        for name in names:
            if names.count(name) > 1 or name == self.model_name:
                duplicates.add(name)
        if duplicates:
            problems.append(
                f"--adapters: {', '.join(sorted(duplicates))} occurs twice; give each model its "
                "own name"
            )
        for flag in ("adapters", "with_base"):
            if getattr(self, flag) and self.devices > 1 and not self.layers_per_device:
                problems.append(
                    f"--{flag} with --devices: tensor parallelism serves one model only; leave one "
                    "of the two out"
                )
        return problems
