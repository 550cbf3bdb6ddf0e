"""The tools that a model may call, read from a file."""

import json
from pathlib import Path
from typing import Any

from litft.data.messages import read_tools
from litft.data.readers import read_records, require_file
from litft.errors import missing_path


def read_tool_file(name: str) -> list[dict[str, Any]]:
    """Return the tools of a file, in OpenAI's form: a JSON list of them, or those of the first
    example with the field `tools`.

    Raises ValueError if the file has none.
    """
    path = Path(name)
    if not path.exists():
        remedy = "name a JSON list of functions, or examples with the field 'tools'"
        raise ValueError(missing_path(path, remedy))
    require_file(path)
    tools = _tool_list(path)
    if tools is None:
        tools = _tools_of_example(path)
    checked = read_tools(tools, name)
    if not checked:
        raise ValueError(
            f"{name} has no tools; expected a JSON list of functions in OpenAI's form, or examples "
            "with the field 'tools'"
        )
    return checked


def _tool_list(path: Path) -> list[Any] | None:
    """Return the list of tools that is the whole file; None if the file has something else."""
    if path.suffix.lower() != ".json":
        return None
    try:
        content = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError):
        # read_records says what is wrong, and where
        return None
    if not isinstance(content, list):
        return None
    for item in content:
        # an example may have a column `name`, but not alone
        if not isinstance(item, dict) or item.keys() & {
            "messages",
            "conversations",
            "tools",
        }:
            return None
        if not item.keys() & {"function", "name"}:
            return None
    return content


def _tools_of_example(path: Path) -> Any:
    """Return the tools of the first example that has some; None if there is no such example."""
    for _, record in read_records(path):
        if isinstance(record, ValueError):
            raise record
        if record.get("tools"):
            return record["tools"]
    return None
