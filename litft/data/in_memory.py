"""Examples that a Python program passes instead of a file: stored once, so that the run can be
repeated and resumed."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from litft.data.digests import data_home
from litft.data.readers import drop_nulls

EXAMPLES = "litft/examples"  # the folder of the files


def stored_examples(records: Iterable[object], limit: int | None = None) -> Path:
    """Write records to a JSONL file named by its content in $XDG_DATA_HOME/litft/examples, and
    return its path.

    The default of XDG_DATA_HOME is ~/.local/share. It is no cache: the file is the run's only copy
    of the records.

    records: a list, a `datasets.Dataset`, or an iterator, which is read once. limit: the most
    records to read. Raise ValueError for anything else, and for a record that is not a mapping or
    cannot be written as JSON.
    """
    # a data set with several splits is a mapping
    if isinstance(records, Mapping) or not isinstance(records, Iterable):
        if isinstance(records, Mapping):
            names = f" with {', '.join(map(str, records))}"
        else:
            names = ""
        remedy = (
            "pass a list of records, an iterator, or one split of a data set (of a DataFrame: "
            "to_dict('records'))"
        )
        raise ValueError(
            f"data: cannot use {type(records).__name__}{names} as examples; {remedy}"
        )
    folder = data_home() / EXAMPLES
    folder.mkdir(parents=True, exist_ok=True)

    # the final name is known only at the end: it is the hash of the content
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".partial")
    try:
        sha256 = hashlib.sha256()
        with os.fdopen(handle, "wb") as file:
            # Arrow adds the fields of other records, as null; in a list, nulls are the user's own
            adds_nulls = hasattr(records, "features")
            for index, record in enumerate(islice(records, limit)):
                line = _line(record, index, adds_nulls)
                sha256.update(line)
                file.write(line)
        path = folder / f"{sha256.hexdigest()[:32]}.jsonl"
        # it keeps its times, and with them the cached hash of the file
        if path.is_file():
            os.unlink(temporary)
        else:
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def _line(record: Any, index: int, adds_nulls: bool) -> bytes:
    if not isinstance(record, Mapping):
        if isinstance(record, str):
            found = f"text ({record[:40]!r})"
        else:
            found = type(record).__name__
        raise ValueError(
            f"data: record {index} must be a mapping with fields, such as messages, found {found}"
        )
    try:
        content = drop_nulls(record) if adds_nulls else dict(record)
        return json.dumps(content).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"data: record {index} cannot be written as JSON ({error}); convert its fields first"
        ) from None
