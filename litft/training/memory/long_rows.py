"""Bytes of long rows from those of shorter ones, for blocks whose trace takes time for each token.

A recurrent mixer runs chunk after chunk, so its trace on fake tensors takes about 1.5 ms for each
token of a row. All that it allocates grows by the same amount with each chunk.
"""

from collections.abc import Callable

from litft.training.memory.allocations import Trace

# tokens of the longest row that is traced itself
LONGEST = 4096
# a multiple of the sizes of chunks, which a row is padded to
CHUNKS = 256


def of_long_row(trace_of: Callable[[int], Trace], tokens: int) -> Trace:
    """Return the trace of a row of so many tokens: of itself up to `LONGEST`, otherwise on the line
    through two shorter ones.

    trace_of: the trace of a row of a number of tokens.
    """
    if tokens <= LONGEST:
        return trace_of(tokens)
    # rows that differ from the long one by whole chunks
    last = LONGEST + tokens % CHUNKS
    first = last - LONGEST // 2
    shorter, longer = trace_of(first), trace_of(last)
    steps = (tokens - last) / (last - first)
    values = {}
    for name in ("forward", "saved", "gradients", "backward"):
        num_bytes = getattr(longer, name)
        growth = num_bytes - getattr(shorter, name)
        values[name] = num_bytes + round(growth * steps)
    return longer._replace(**values)
