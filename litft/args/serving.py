"""The flags of `serve`."""

from dataclasses import dataclass, field

from litft.args.checks import below
from litft.args.inference import ModelArgs

MOST_ROWS = 4096  # of a batch


@dataclass
class ServeArgs(ModelArgs):
    """Serve a model, and adapters over it, to clients of the OpenAI API, with a chat page at /."""

    max_new_tokens: int | None = None
    """The most tokens that an answer may have. Default: as many as there is room for."""
    host: str = "127.0.0.1"
    """The address to listen at. Default: this machine alone; 0.0.0.0 for every network it is in."""
    port: int = 8000
    """The port; 0 takes a free one, which is printed."""
    model_name: str | None = None
    """What requests call the model. Default: the folder's name."""
    adapters: list[str] = field(default_factory=list)
    """More models over the same base, as NAME=DIR: an adapter's folder or its run's, chosen by a request's `model`."""
    batch_size: int = 8
    """How many answers of a model are made at once; others wait."""
    max_seq_length: int | None = None
    """Tokens of a prompt with its answer; there is memory for --batch_size of them. Default: 4096, or the context."""
    max_waiting: int = 256
    """How many requests may wait; more are refused with 503."""
    max_body_mb: float = 4.0
    """Requests of more megabytes are refused with 413."""
    api_key: str | None = None
    """Only answer clients that send this as their bearer key. Default: the environment's LITFT_API_KEY, else anybody."""

    def problems(self) -> list[str]:
        """As for every model, and what cannot be served."""
        found = super().problems() + below(self, "", 1, "batch_size")
        if self.max_seq_length is not None:
            found += below(self, "", 2, "max_seq_length")
        found += below(self, "", 0, "max_waiting")
        if self.batch_size > MOST_ROWS:
            found.append(f"--batch_size {self.batch_size}: must be at most {MOST_ROWS}")
        if not 0 <= self.port < 65536:
            found.append(f"--port {self.port}: must lie in [0, 65535]")
        if self.max_body_mb <= 0:
            found.append(f"--max_body_mb {self.max_body_mb}: must be above 0")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key.strip()):
            found.append("--api_key: must be printable ASCII, and not empty, as it travels in a header")
        names = [name for name, _, _ in (item.partition("=") for item in self.adapters)]
        found += [f"--adapters {item}: expected NAME=DIR" for item in self.adapters if not all(item.partition("="))]
        if twice := {name for name in names if names.count(name) > 1 or name == self.model_name}:
            found.append(f"--adapters: {', '.join(sorted(twice))} twice; give each a name of its own")
        if self.adapters and self.devices > 1 and not self.layers_per_device:
            found.append("--adapters with --devices: a network that is cut has one adapter; leave one of the two out")
        return found
