"""Where an assistant turn ends: after the token that ends generation."""

import re
from dataclasses import dataclass

from litft.data.turn_rendering import (
    OTHER_TEMPLATE,
    TurnRendering,
    common_length,
    places_of,
)


@dataclass(frozen=True)
class EndTokens:
    """Special tokens as text. `stops` are those at which generation ends."""

    special: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()

    @property
    def special_stops(self) -> tuple[str, ...]:
        """The special tokens at which generation ends."""
        return tuple(text for text in self.stops if text and text in self.special)


NO_ENDS = EndTokens()

OPENS_TURN = re.compile("start|begin|open", re.IGNORECASE)  # in the name of a token
# the mark at the end of a turn's calls
CLOSING_MARK = re.compile(r"</\w+>\Z")


def turn_end(
    rendering: TurnRendering, text: str, tail: str | None, ends: EndTokens
) -> tuple[str, int]:
    """Return the text up to the end of the turn or longer, and the position of the end; `tail`
    follows the turn's values.

    The turn ends with the first token in the tail that ends generation. The end token may also be
    what the template writes before the next message.
    """
    beginning = len(text) - len(tail or "")
    found = _ends_in(tail or "", ends.special)
    # a tail with several tokens: what is also written before a further message belongs to the turn
    if tail and len(found) > 1:
        common = tail[: _common_end(rendering, tail)]
        is_whole = common == tail
        found = _closing_tokens(common, is_whole or bool(rendering.calls), ends) or found
        if (
            rendering.calls
            and not is_whole
            and not any(token in ends.stops for token, _ in found)
        ):
            # no token is known to end the turn; what follows is the beginning of the next one
            token, position = next(
                (item for item in found if OPENS_TURN.search(item[0])), found[0]
            )
            position = beginning + len(tail[: position - len(token)].rstrip())
            return text[:position], position
    stops = [end for token, end in found if token in ends.stops]
    if stops:
        position = beginning + stops[0]
    elif found:
        position = beginning + found[-1][1]
    else:
        if tail is None or rendering.following:
            written = None
        else:
            written = _written_next(rendering, tail, ends)
        if written is not None:
            return text[:beginning] + written, beginning + len(written)
        position = len(text.rstrip()) or len(text)
    if rendering.following and not found:
        raise ValueError(
            f"the chat template does not show where a turn ends; {OTHER_TEMPLATE}"
        )
    # what follows was only added to find the turn
    if rendering.following:
        text = text[:position]
    return text, position


def _ends_in(text: str, tokens: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the tokens in a text, each with the position after it, in order."""
    found = []
    for token in tokens:
        position = text.find(token)
        while token and position >= 0:
            found.append((token, position + len(token)))
            position = text.find(token, position + 1)
    return sorted(found, key=lambda item: item[1])


def _closing_tokens(
    common: str, is_closing: bool, ends: EndTokens
) -> list[tuple[str, int]]:
    """Return the tokens that may end a turn in `common`, the part of a tail that is written if
    another message follows.

    Phi 3.5 ends the last turn with <|end|> and EOS, others with <|end|> alone. is_closing: all of
    the part belongs to the turn; otherwise the first token does, and the rest is the beginning of
    the next turn.
    """
    found = _ends_in(common, ends.special)
    if is_closing:
        return found
    return found[:1] + [item for item in found if item[0] in ends.stops]


def _common_end(rendering: TurnRendering, tail: str) -> int:
    """Return the length of the part of a tail that is also written if another message follows."""
    return common_length(tail, _later_tail(rendering))


def _written_next(rendering: TurnRendering, tail: str, ends: EndTokens) -> str | None:
    """Return a tail with the special token that the template writes next, if another message
    follows."""
    later = _later_tail(rendering)
    written = tail.rstrip()
    if later.startswith(written):
        rest = later[len(written) :]
    else:
        # the turn itself is written differently, such as with the ids of its calls: what follows
        # its last mark
        mark = CLOSING_MARK.search(written)
        if mark is None or mark[0] not in later:
            return None
        rest = later.rpartition(mark[0])[2]
    space = rest[: len(rest) - len(rest.lstrip())]
    tokens = []
    for token in ends.special:
        if token and rest.startswith(token, len(space)):
            tokens.append(token)
    if tokens:
        return written + space + max(tokens, key=len)
    return None


def _later_tail(rendering: TurnRendering) -> str:
    """Return what follows the turn's values if another message follows."""
    later = rendering.followed()
    try:
        return places_of(later, later.text()).tail or ""
    except ValueError:
        return ""
