"""What a chat shows and reads: a terminal with line editing and Markdown, or plain lines where there is none."""

import os
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

THOUGHT = ("<think>", "</think>")  # between these a reasoning model thinks (DeepSeek-R1, Qwen 3, QwQ)


class Screen:
    """Plain lines: messages on stdin, the answers alone on stdout, and everything else on stderr."""

    is_terminal = False

    def read(self) -> str | None:
        """The next message; None at the end."""
        line = sys.stdin.readline() if sys.stdin else ""
        return line.strip() if line else None

    def notice(self, text: str, terminal_only: bool = False) -> None:
        """What is not the model's."""
        if not terminal_only:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def answering(self, thinking: bool) -> Iterator[Callable[[str], None]]:
        """Inside, an answer is shown piece by piece; thinking: it begins within a thought."""
        yield lambda piece: print(piece, end="", flush=True)
        print(flush=True)


class Terminal(Screen):
    """A terminal: prompt_toolkit reads, rich shows Markdown as it comes, and thoughts dimmed."""

    is_terminal = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings
        from rich.console import Console

        keys = KeyBindings()
        keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
        for names in (("escape", "enter"), ("c-j",)):
            keys.add(*names)(lambda event: event.current_buffer.insert_text("\n"))
        self.console = Console(highlight=False)
        self.session: Any = PromptSession(
            history=FileHistory(str(history_file())),
            auto_suggest=AutoSuggestFromHistory(),
            key_bindings=keys,
            multiline=True,
            prompt_continuation="  ",
        )

    def read(self) -> str | None:
        """The next message; Ctrl-C gives up the line, Ctrl-D ends."""
        while True:
            try:
                return self.session.prompt("> ").strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None

    def notice(self, text: str, terminal_only: bool = False) -> None:
        """Dimmed."""
        self.console.print(text, style="dim", markup=False)

    @contextmanager
    def answering(self, thinking: bool) -> Iterator[Callable[[str], None]]:
        """Blocks of Markdown, each printed when it is whole; the last is shown as far as it has come."""
        from rich.live import Live

        live = Live(console=self.console, refresh_per_second=12, transient=True, vertical_overflow="crop")
        with unechoed(), live:
            blocks = Blocks(thinking)

            def show(piece: str) -> None:
                for block in blocks.push(piece):
                    self.console.print(rendered(block))
                live.update(Tail(rendered(blocks.pending)))

            try:
                yield show
            finally:
                live.update("")
                for block in blocks.rest():
                    self.console.print(rendered(block))


@contextmanager
def unechoed() -> Iterator[None]:
    """Inside, what is typed is not shown: an echo, a Ctrl-C's too, would move what is drawn."""
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Blocks:
    """A text that comes piece by piece, cut where Markdown's blocks end: at empty lines outside code; and at thoughts."""

    def __init__(self, thinking: bool) -> None:
        self.thinking, self.text = thinking, ""

    def push(self, piece: str) -> Iterator[tuple[str, bool]]:
        """The blocks that are whole now."""
        self.text += piece
        while (cut := self._cut()) is not None:
            end, following, thinking = cut
            block, self.text = (self.text[:end], self.thinking), self.text[following:]
            if block[0].strip():
                yield block
            self.thinking = thinking

    def _cut(self) -> tuple[int, int, bool] | None:
        """Where the first block ends, where the next begins, and whether that is a thought."""
        tag, start = THOUGHT[self.thinking], 0
        thought = self.text.find(tag)
        while (at := self.text.find("\n\n", start, thought if thought >= 0 else None)) >= 0:
            if self.text[:at].count("```") % 2 == 0:
                return at, at + 2, self.thinking
            start = at + 2
        return (thought, thought + len(tag), not self.thinking) if thought >= 0 else None

    @property
    def pending(self) -> tuple[str, bool]:
        """The last block, as far as it has come."""
        return self.text, self.thinking

    def rest(self) -> Iterator[tuple[str, bool]]:
        """The last block."""
        if self.text.strip():
            yield self.pending


def rendered(block: tuple[str, bool]) -> Any:
    """A block for rich."""
    from rich.markdown import Markdown
    from rich.text import Text

    text, thought = block
    return Text(text.strip("\n"), style="dim italic") if thought else Markdown(text)


class Tail:
    """The end of something, as much as the terminal has room for."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        lines = console.render_lines(self.content, options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def history_file() -> Path:
    """Where what was typed is kept, by the XDG base directory specification; readable by its owner alone."""
    state = os.environ.get("XDG_STATE_HOME")
    folder = (Path(state) if state else Path.home() / ".local" / "state") / "litft"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "chat_history"
    path.touch(mode=0o600)
    return path


def screen() -> Screen:
    """A terminal where both ends are one."""
    if sys.stdin is None:  # closed
        return Screen()
    sys.stdin.reconfigure(errors="replace")
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Screen()
