"""Input and output of the chat: a terminal with line editing and Markdown, or plain lines without a
terminal."""

import io
import json
import os
import select
import sys
import termios
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from litft.data.answer_parser import AnswerPart

Show = Callable[[AnswerPart], None]
MAX_TYPED = 65536  # bytes of a line


def shown_text(part: AnswerPart) -> str:
    """Return the text of a part; a call as its name and arguments."""
    if part.call is None:
        return part.text
    return f"\n{part.call.name}({json.dumps(part.call.arguments, ensure_ascii=False)})\n"


class ChatScreen:
    """Plain lines: messages on stdin, answers on stdout, everything else on stderr."""

    is_terminal = False

    def read(self) -> str | None:
        """Return the next message, or None at the end of the input."""
        line = sys.stdin.readline() if sys.stdin else ""
        if line:
            return line.strip()
        return None

    def notice(self, text: str, terminal_only: bool = False) -> None:
        """Show a text that is not part of an answer."""
        if not terminal_only:
            print(text, file=sys.stderr, flush=True)

    def loading(self) -> AbstractContextManager[None]:
        """Return a context in which the model is opened."""
        return nullcontext()

    @contextmanager
    def answering(self) -> Iterator[Show]:
        """Yield a function that shows an answer part by part."""

        def show(part: AnswerPart) -> None:
            stream = sys.stderr if part.kind == "reasoning" else sys.stdout
            print(shown_text(part), end="", file=stream, flush=True)

        yield show
        print(flush=True)


class ChatTerminal(ChatScreen):
    """A terminal: prompt_toolkit reads lines; rich streams Markdown, with thoughts dimmed."""

    is_terminal = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings
        from rich.console import Console

        # in multi-line mode Enter would insert a line break: it sends instead
        keys = KeyBindings()
        keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
        for names in (("escape", "enter"), ("c-j",)):
            keys.add(*names)(lambda event: event.current_buffer.insert_text("\n"))
        # :smile: stays as it is written
        self.console = Console(highlight=False, emoji=False)
        self.session: Any = PromptSession(
            history=FileHistory(str(history_file())),
            auto_suggest=AutoSuggestFromHistory(),
            key_bindings=keys,
            multiline=True,
            prompt_continuation="  ",
        )
        # messages from before the first prompt; None: Ctrl-D
        self.typed: deque[str | None] = deque()

    def read(self) -> str | None:
        """Return the next message, or None at Ctrl-D. Ctrl-C discards the line."""
        if self.typed:
            line = self.typed.popleft()
            if line is None:
                return None
            self.console.print(f"> {line}", markup=False)
            self.session.history.append_string(line)
            return line
        while True:
            try:
                return self.session.prompt("> ").strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None

    def notice(self, text: str, terminal_only: bool = False) -> None:
        """Show a text dimmed."""
        self.console.print(text, style="dim", markup=False)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within the context, the model is opened; lines that are typed meanwhile become
        messages."""
        yield
        self.typed.extend(typed_lines())

    @contextmanager
    def answering(self) -> Iterator[Show]:
        """Print each Markdown block when it is complete, and redraw the last one as it grows."""
        from rich.live import Live

        live = Live(
            console=self.console,
            refresh_per_second=12,
            transient=True,
            vertical_overflow="crop",
        )
        with no_echo(), live:
            blocks = Blocks()

            def show(part: AnswerPart) -> None:
                for block in blocks.push(shown_text(part), part.kind):
                    self.console.print(render_block(block))
                live.update(Tail(render_block(blocks.pending)))

            try:
                yield show
            finally:
                live.update("")
                for block in blocks.rest():
                    self.console.print(render_block(block))


@contextmanager
def no_echo() -> Iterator[None]:
    """Within the context, typed characters are not echoed: an echo, even of Ctrl-C, would shift the
    live display.

    Lines that are typed ahead keep their Enter: the terminal would turn it into a line break within
    one message.
    """
    saved = termios.tcgetattr(sys.stdin)
    settings = [*saved]
    # input flags: Enter stays a carriage return; local flags: no echo, no line editing
    settings[0] &= ~termios.ICRNL
    settings[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


def typed_lines() -> list[str | None]:
    """Return the complete lines that were typed at the terminal and are not read yet, without blank
    ones. The last one is None if Ctrl-D follows them.

    The terminal has turned their Enter into a line break, which the prompt would take as one
    within a message.
    """
    lines: list[str | None] = []
    while select.select([sys.stdin], [], [], 0)[0]:
        typed = os.read(sys.stdin.fileno(), MAX_TYPED)
        if not typed:
            lines.append(None)
            break
        line = typed.decode(errors="replace").strip()
        if line:
            lines.append(line)
    return lines


class AnswerBlock(NamedTuple):
    """A part of an answer that is printed at once."""

    text: str
    kind: str  # content, reasoning or call


class Blocks:
    """Split streamed text into blocks: at empty lines outside code, and where another kind of part
    begins."""

    def __init__(self) -> None:
        self.text = ""
        self.kind = "content"

    def push(self, text: str, kind: str) -> Iterator[AnswerBlock]:
        """Add text of a kind and yield the blocks that are complete now."""
        if kind != self.kind:
            yield from self.rest()
            self.text = ""
            self.kind = kind
        self.text += text
        # blocks end at an empty line, except within a code fence that is still open
        start = 0
        while (end := self.text.find("\n\n", start)) >= 0:
            if self.text[:end].count("```") % 2:
                start = end + 2
                continue
            block = self.text[:end]
            self.text = self.text[end + 2 :]
            start = 0
            if block.strip():
                yield AnswerBlock(block, kind)

    @property
    def pending(self) -> AnswerBlock:
        """The last, incomplete block."""
        return AnswerBlock(self.text, self.kind)

    def rest(self) -> Iterator[AnswerBlock]:
        """Yield the last block, unless it is empty."""
        if self.text.strip():
            yield self.pending


def render_block(block: AnswerBlock) -> Any:
    """Convert a block to a rich renderable: content is Markdown, whose HTML is text and whose line
    breaks stay."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown
    from rich.text import Text

    if block.kind == "reasoning":
        return Text(block.text.strip("\n"), style="dim italic")
    # a call has signs of Markdown that are its own
    if block.kind == "call":
        return Text(block.text.strip("\n"))
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    # which remove characters that models write for what they are: \\(x\\), &lt; and [1]: http://...
    parser.disable(["escape", "entity", "reference"])
    rendered = Markdown(block.text)
    rendered.parsed = parser.parse(block.text)
    for token in rendered.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return rendered


class Tail:
    """The last lines of a renderable, as many as fit the terminal."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        lines = console.render_lines(self.content, options, pad=False)
        # a live display cannot scroll: the lines above are shown when their block is complete
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def history_file() -> Path:
    """Return the file of the input history, in the XDG state directory; readable only by its
    owner."""
    state_home = os.environ.get("XDG_STATE_HOME")
    if state_home:
        folder = Path(state_home) / "litft"
    else:
        folder = Path.home() / ".local" / "state" / "litft"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "chat_history"
    path.touch(mode=0o600)
    return path


def make_screen() -> ChatScreen:
    """Return a ChatTerminal if stdin and stdout are one, else a plain ChatScreen."""
    if sys.stdin is None:  # closed
        return ChatScreen()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty() and sys.stdout.isatty():
        return ChatTerminal()
    return ChatScreen()
