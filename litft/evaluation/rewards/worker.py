"""A process that calls reward functions: JSON lines in from stdin, JSON lines out to the pipe whose
number is its argument.

What a function prints goes nowhere near the results, and what it breaks is this process alone.
"""

import json
import os
import sys
from collections.abc import Callable

from litft.evaluation.rewards.call import (
    Completed,
    call_with_lists,
    call_with_one,
    takes_lists,
)
from litft.evaluation.rewards.reward import load_function


def answer_requests() -> None:
    """Answer requests until stdin ends."""
    process = os.getpid()
    functions: dict[str, Callable] = {}
    with os.fdopen(int(sys.argv[1]), "w") as out:
        for line in sys.stdin:
            answer = _answer(json.loads(line), functions)
            # a function that has forked would return twice
            if os.getpid() != process:
                os._exit(0)
            out.write(json.dumps(answer) + "\n")
            out.flush()


def _answer(request: dict, functions: dict[str, Callable]) -> dict:
    """Return the rewards of the items of a request, or the error of one of them by its number."""
    values: list[float | None] = []
    try:
        source = request["source"]
        if source not in functions:
            functions[source] = load_function(source)
        function = functions[source]
        items = [Completed(**item) for item in request["items"]]
        if takes_lists(function):
            return {
                "values": call_with_lists(function, items) if items else [],
                "lists": True,
            }
        for item in items:
            values.append(call_with_one(function, item))
        return {"values": values, "lists": False}
    except Exception as error:
        reason = str(error)
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {error}"
        return {"error": reason + _place(error, request["source"]), "number": len(values)}


def _place(error: BaseException, source: str) -> str:
    """Return the line of the reward's file where an error was raised."""
    path = source.rpartition(":")[0]
    place = ""
    frame = error.__traceback__
    while frame is not None:
        if path and frame.tb_frame.f_code.co_filename.endswith(path):
            place = f", at {path}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


if __name__ == "__main__":
    answer_requests()
