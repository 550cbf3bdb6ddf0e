"""The flags of `schema`."""

from dataclasses import dataclass


@dataclass
class SchemaArgs:
    """Print the flags of a command as JSON Schema: an editor completes and checks a --config file
    with it, and a program reads every flag with its type, default and help text."""

    command: str = "finetune lora"
    """The command: `finetune lora`, `serve`, and so on; or all, for an object with the schema of
    each."""
