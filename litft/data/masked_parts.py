"""Parts of a joined turn that are not learned."""

from collections.abc import Sequence

from litft.data.formats import strip_end_token
from litft.data.turns import Turn


def masked_ranges(
    turn: Turn, parts: list[dict], own_ends: Sequence[str]
) -> list[tuple[int, int]]:
    """Return the ranges of a turn's text that are not learned: parts of a joined message with
    `train` false.

    A part reaches to the beginning of the next one, the last one to the end of the turn. A part
    without text is a call.
    """
    if not parts:
        return []
    starts = []
    position = turn.answer  # the reasoning belongs to the first part
    for number, part in enumerate(parts):
        text = part["text"].strip()
        if not text and number and not parts[number - 1]["text"].strip():
            raise ValueError(
                "the calls of one turn have different weights; give them the same one"
            )
        found = turn.text.find(text, position, turn.end)
        # an end token that the file has after it was removed
        if found < 0:
            text = strip_end_token(text, own_ends).strip()
            found = turn.text.find(text, position, turn.end)
        if found < 0:
            raise ValueError(
                "the chat template changes an answer of which a part is not learned; give it one "
                "weight"
            )
        starts.append(found if number else turn.start)
        position = found + len(text)
    ends = [*starts[1:], turn.end]
    ranges = []
    for part, start, end in zip(parts, starts, ends, strict=True):
        if not part["train"]:
            ranges.append((start, end))
    return ranges
