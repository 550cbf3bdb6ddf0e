"""The commands that a finished run suggests: how its result is tried."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from litft import run_dir
from litft.args import FinetuneArgs
from litft.checkpoints.adapter_reader import (
    ADAPTER_CONFIG,
    read_adapter_config,
    vllm_obstacles,
)
from litft.data.dataset import DataSplits
from litft.methods import Method

SHOWN_SYSTEM = 200  # characters of a system prompt in a command
# shares of examples with functions to call: fewer have no command, and above the other one there
# is no command without functions
FEW = 0.01
MOST = 0.9


def next_commands(
    final: Path, args: FinetuneArgs, data: DataSplits, method: Method
) -> Iterator[str]:
    """Yield commands that try the result in the folder `final`, each with what it does."""
    flags = f"--checkpoint_dir {shlex.quote(str(final))}"
    if args.quantize != "none":
        flags += f" --quantize {args.quantize}"
    if data.is_plain_text:
        base = run_dir.command("generate/base.py")
        yield f"{base} {flags} --template none --prompt TEXT   # continues a text, as trained"
    else:
        # both ways, where the examples have both
        if data.share_with_tools <= MOST:
            yield _chat_command(flags, args, data, with_tools=False)
        if data.share_with_tools > FEW:
            yield _chat_command(flags, args, data, with_tools=True)
        # otherwise the base has modules quantized that the result has not
        if args.quantize == "none" or not method.unquantized_modules():
            serve = f"{run_dir.command('generate/serve.py')} {flags} --with_base"
            yield f"{serve}   # a chat page that compares it with the base model"
    yield from _command_for_vllm(final)


def _chat_command(
    flags: str, args: FinetuneArgs, data: DataSplits, with_tools: bool
) -> str:
    """Return the command that chats with the result as it was trained: with the system prompt of
    its examples, and their functions if with_tools."""
    chat = f"{run_dir.command('generate/chat.py')} {flags}"
    shared = []
    system = data.system_prompt
    if system and len(system) <= SHOWN_SYSTEM:
        chat += f" --system {shlex.quote(system)}"
        shared.append("the system prompt")
    elif system:
        chat += " --system ..."
        shared.append("the system prompt, which the model expects,")
    if with_tools:
        chat += f" --tools {_tool_file(args, data)}"
        shared.append("the functions")
    if not shared:
        return chat
    return f"{chat}   # with {' and '.join(shared)} of the examples"


def _tool_file(args: FinetuneArgs, data: DataSplits) -> str:
    """Return the first file of examples with the field `tools`; FILE if there is none, as for data
    sets on the hub."""
    # then the field has another name in the files
    if any(item.startswith("tools=") for item in args.data.columns):
        return "FILE"
    for item in args.data.paths:
        report = data.reports.get(item.path)
        if report is not None and report.with_tools and Path(item.path).is_file():
            return shlex.quote(item.path)
    return "FILE"


def _command_for_vllm(final: Path) -> Iterator[str]:
    """Yield the command for vLLM, if it does not load the result as an adapter."""
    if not (final / ADAPTER_CONFIG).is_file():
        return
    config = read_adapter_config(final)
    if config.get("peft_type") != "LORA":
        return
    obstacles = vllm_obstacles(config)
    if obstacles:
        merge = run_dir.command("scripts/merge_lora.py")
        reason = f"for vLLM, which does not load {', '.join(obstacles)} as an adapter"
        folder = shlex.quote(str(final))
        yield f"{merge} --checkpoint_dir {folder} --out_dir DIR   # {reason}"
