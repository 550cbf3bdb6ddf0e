"""Text of tokens as they are generated: never half a character, and no stop text."""

from collections.abc import Sequence

from litft.data.tokenizer import Tokenizer

# what bytes decode to that are no complete character
REPLACEMENT = "\ufffd"
# how many tokens before the answer are decoded with it: as few as give whole characters
WINDOW_LENGTHS = (4, 16, 64, 256, 1024)
LONGEST_CHARACTER = 4  # bytes, each of which may be a token


class Detokenizer:
    """Convert token ids to text incrementally, holding back the bytes of incomplete characters.

    A token's text depends on the tokens before it (the leading space of a word). So a window of ids
    is decoded with and without the new ones, and the difference is returned. A character that the
    prompt begins belongs to the answer.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.window, self.start = self._first_window(before)

    def _first_window(self, before: Sequence[int]) -> tuple[list[int], int]:
        """Return the end of the prompt, and how many of its tokens have whole characters.

        The window must not begin within a character: some tokenizers decode a whole run of bytes to
        U+FFFD if any of its characters is incomplete.
        """
        # a prompt may end in the very character that stands for incomplete bytes
        ends_whole = self._ends_in_replacement(before)
        for length in (*WINDOW_LENGTHS, len(before)):
            window = list(before[-length:])
            is_prompt = len(window) == len(before)
            if ends_whole and (is_prompt or self._begins_whole(window)):
                return window, len(window)
            if ends_whole:
                continue
            num_whole = self._num_whole(window, is_prompt)
            if num_whole is not None:
                return window, num_whole
        # no window has whole characters: the prompt is not valid text
        shortest = list(before[-WINDOW_LENGTHS[0] :])
        return shortest, len(shortest)

    def _begins_whole(self, window: list[int]) -> bool:
        """Return whether the text of a window does not begin within a character."""
        return not self.tokenizer.decode(window).startswith(REPLACEMENT)

    def _num_whole(self, window: list[int], is_prompt: bool) -> int | None:
        """Return how many tokens of a window begin and end with a whole character, leaving out at
        most the last three; None if none do. is_prompt: the window is the whole prompt, which
        begins with a character, be it U+FFFD."""
        most_left_out = min(LONGEST_CHARACTER - 1, len(window))
        for left_out in range(most_left_out + 1):
            count = len(window) - left_out
            text = self.tokenizer.decode(window[:count])
            # without text, it is not known where a character begins
            if left_out and not text and not is_prompt:
                continue
            begins_whole = is_prompt or not text.startswith(REPLACEMENT)
            if begins_whole and not text.endswith(REPLACEMENT):
                return count
        return None

    def _ends_in_replacement(self, before: Sequence[int]) -> bool:
        """Return whether the prompt itself ends in U+FFFD, which is a whole character then."""
        end = list(before[-LONGEST_CHARACTER:])
        text = self.tokenizer.decode(end)
        if not text.endswith(REPLACEMENT):
            return False
        # encoded after a letter, since at the start of a text some tokenizers add a space
        alone = self.tokenizer.encode(f"a{REPLACEMENT}", bos=False)[1:]
        if not alone:
            return False
        # its tokens alone, or joined with characters before it
        joined = self.tokenizer.encode(f"a{text}", bos=False)
        count = len(alone)
        return end[-count:] in (alone, joined[-count:])

    def push(self, token: int, last: bool = False) -> str:
        """Add a token and return the text that is complete now."""
        self.window.append(token)
        return self.rest(last)

    def rest(self, last: bool = True) -> str:
        """Return the text not returned yet; an incomplete character only if `last`."""
        previous = self.tokenizer.decode(self.window[: self.start])
        text = self.tokenizer.decode(self.window)
        if last and text.endswith(REPLACEMENT):
            # decoded together, an incomplete character might spoil the characters before it
            return self._rest_by_character(previous)
        new = text[len(previous) :]
        # decoding may drop a leading space, so spaces stay in the window until a word follows
        if not new or (not last and (not new.strip(" ") or text.endswith(REPLACEMENT))):
            return ""
        self._advance(len(self.window))
        return new

    def _rest_by_character(self, previous: str) -> str:
        """Return the complete characters, and U+FFFD for the bytes of the last one."""
        complete = self.tokenizer.decode(self.window).rstrip(REPLACEMENT)
        # drop tokens from the end until the text is whole: this may give more than all together
        for end in range(len(self.window) - 1, self.start - 1, -1):
            text = self.tokenizer.decode(self.window[:end])
            if not text.endswith(REPLACEMENT):
                complete = max(complete, text, key=len)
                break
        self._advance(len(self.window))
        return complete[len(previous) :] + REPLACEMENT

    def _advance(self, end: int) -> None:
        """Keep the tokens whose text was just returned as the context of the next ones."""
        self.window = self.window[self.start :]
        self.start = end - self.start
