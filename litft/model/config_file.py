"""Read JSON files of a checkpoint, and check their values. Does not import torch."""

import json
import math
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object; raise ValueError if it does not."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({str(error)[:200]}); download or copy it again"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must contain a JSON object, found {type(content).__name__}; download or copy "
            "it again"
        )
    return content


def is_positive(value: Any) -> bool:
    """Return whether a value from a file is a finite number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # a whole number that no float can hold
        return False
