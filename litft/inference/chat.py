"""The command `chat`: a conversation whose history stays in the key/value cache, and what can be done with it."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

from litft.args import NUMBERS, ChatArgs
from litft.data.chat_template import Message
from litft.data.formats import check_messages
from litft.data.tokenizer import check_text
from litft.inference.generation import GenerationChunk, generate_batch, prompt_ids
from litft.inference.session import Session, make_drafter, open_session
from litft.inference.speculative import Drafter
from litft.inference.terminal import THOUGHT, Screen, screen
from litft.methods.mixins import mixins
from litft.run_dir import write_whole
from litft.signals import Signals

ROOM = 2048  # tokens that a conversation has room for at first


class Conversation:
    """Messages, and the decoder that has read them."""

    def __init__(self, session: Session, drafter: Drafter | None = None, system: str | None = None) -> None:
        self.session, self.drafter, self.tokenizer = session, drafter, session.tokenizer
        self.decoder = session.decoder(1, ROOM)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.spoken: tuple[str, list[int]] = ("", [])  # the text and tokens up to the end of the last answer
        self.asked = 0
        self.last: GenerationChunk | None = None  # of the answer before
        self.read = self.written = ""  # what the model read and said, special tokens too

    @property
    def system(self) -> str | None:
        """The system message."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[self.system is not None :]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    @property
    def context(self) -> int:
        """How many tokens the model can see."""
        return self.session.model.config.max_positions

    @property
    def tokens(self) -> int:
        """How many tokens the messages take."""
        text = self.tokenizer.apply_chat_template(self.messages) if self.messages else ""
        return len(self.tokenizer.encode(text, bos=False))

    def reset(self) -> None:
        """Forget all but the system message."""
        self.last = None
        self.messages = self.messages[: self.system is not None]

    def undo(self) -> str | None:
        """Forget the last question and its answer; returns the question, None where there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                question = self.messages[index]["content"]
                del self.messages[index:]
                self.last = None
                return question
        return None

    def answer(self, question: str, notice: Callable[[str], None]) -> Iterator[GenerationChunk]:
        """Ask, and keep the question with what has been answered when the iteration ends, or is given up.

        notice: is told what has to be left out. ValueError, and nothing is kept, for a question that is too long.
        """
        before, text = list(self.messages), ""
        self.messages.append({"role": "user", "content": question})
        try:
            request = self.session.request(self._prompt(notice), self.asked)
        except ValueError:
            self.messages = before
            raise
        self.decoder.reserve(len(request.ids) + request.max_new_tokens)
        request = replace(request, max_length=self.decoder.capacity)  # as for the turns before, whose keys stay
        tokens, self.asked = [], self.asked + 1
        try:
            pieces = (piece for _, piece in generate_batch(self.decoder, self.tokenizer, [request], self.drafter))
            for piece in pieces:
                tokens += piece.tokens
                text, self.last = text + piece, piece
                yield piece
        except ValueError:
            self.messages = before
            raise
        finally:
            self.messages += [] if self.messages is before else [{"role": "assistant", "content": text}]
            self.written = self.tokenizer.decode(tokens, skip_special=False)
            whole = bool(tokens) and tokens[-1] in self.tokenizer.special_ids
            self.spoken = (self.read + self.written, [*request.ids, *tokens]) if whole else ("", [])

    def _prompt(self, notice: Callable[[str], None]) -> list[int]:
        """What the model reads: as many of the messages as its context has room for, beside an answer."""
        room, dropped = self.context - min(self.session.max_new_tokens, self.context // 4), 0
        while len(ids := self._ids()) > room and (turn := self._oldest_turn()):
            start, end = turn
            del self.messages[start:end]
            dropped += 1
        if len(ids) >= self.context:
            raise ValueError(f"the prompt has {len(ids)} tokens and the model's context is {self.context}; shorten it")
        if dropped:
            notice(f"the context of {self.context:,} tokens is full: the oldest {dropped} turns are left out from now on")
        return ids

    def _oldest_turn(self) -> tuple[int, int] | None:
        """Where the oldest question begins and the next one; None where there is one question only."""
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        return (asked[0], asked[1]) if len(asked) > 1 else None

    def _ids(self) -> list[int]:
        """The messages' tokens; an answer's own where its text is still the same, which may be cut otherwise."""
        self.read = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)
        text, ids = self.spoken
        if text and self.read.startswith(text):
            return [*ids, *self.tokenizer.encode(self.read[len(text) :], bos=False)]
        return self.tokenizer.encode(self.read, bos=False)

    def base_answer(self, question: str) -> Iterator[GenerationChunk]:
        """What the model without its adapter answers to a question here; nothing of it is kept."""
        decoder = self.session.decoder(1, ROOM, compiled=False)
        asked = [*self.messages, {"role": "user", "content": question}]
        request = self.session.request(prompt_ids(self.tokenizer, asked), self.asked)
        decoder.reserve(len(request.ids) + request.max_new_tokens)
        with self.session.as_base():
            yield from (piece for _, piece in generate_batch(decoder, self.tokenizer, [request]))


class Chat:
    """A conversation with somebody at a screen: messages are answered, words that begin with / are commands."""

    def __init__(self, conversation: Conversation, screen: Screen, debug: bool = False) -> None:
        self.conversation, self.screen, self.debug = conversation, screen, debug
        self.commands: dict[str, Callable[[str], None]] = {
            name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }
        self.commands["exit"] = self.do_quit

    def run(self) -> None:
        """Until the end."""
        self.screen.notice("Type a message; /help lists the commands, /quit or Ctrl-D ends.", terminal_only=True)
        while (line := self.screen.read()) is not None:
            try:
                self._take(line)
            except EOFError:
                return
            except KeyboardInterrupt:  # in a terminal the second, which does not wait for the next word
                if not self.screen.is_terminal:
                    raise
                self.screen.notice("stopped")

    def _take(self, line: str) -> None:
        """A command, or a message; EOFError ends the chat."""
        name, _, rest = line.removeprefix("/").partition(" ")
        if line.startswith("/") and name in self.commands:
            try:
                self.commands[name](rest.strip())
            except ValueError as error:
                self.screen.notice(f"error: {error}")
            except OSError as error:
                self.screen.notice(f"error: {error.filename}: {error.strerror}")
        elif line.startswith("/") and self.screen.is_terminal and "/" not in name:
            self.screen.notice(f"/{name} is no command; /help lists them")
        elif line:
            self.say(line)

    def say(self, question: str) -> None:
        """Ask, and show the answer; a question that is too long is dropped."""
        conversation = self.conversation
        try:
            self._show(conversation.answer(question, self.screen.notice))
        except ValueError as error:
            remedy = "/system none leaves the system message out" if conversation.system else "/reset begins anew"
            self.screen.notice(f"error: {error}; this message is dropped, {remedy}")
            return
        if self.debug:
            self.screen.notice(f"--- the model reads\n{conversation.read}\n---")
            self.screen.notice(f"--- the model says\n{conversation.written}\n---")

    def _show(self, pieces: Iterator[GenerationChunk]) -> None:
        """An answer as it comes, and its speeds; Ctrl-C ends it."""
        noted = (signal.SIGINT,) if self.screen.is_terminal else ()
        with closing(pieces), Signals(noted, promise=None) as signals:
            first = next(pieces)  # an error is told before anything is shown
            with self.screen.answering(self.conversation.read.rstrip().endswith(THOUGHT[0])) as show:
                for piece in chain([first], pieces):
                    show(piece)
                    if signals.caught:
                        break
        self.screen.notice(f"{'stopped: ' if signals.caught else ''}{piece.stats}", terminal_only=True)

    # the commands; the docstring is what /help says

    def do_help(self, rest: str) -> None:
        """list the commands"""
        lines = [f"/{name:<8} {command.__doc__}" for name, command in self.commands.items() if name != "exit"]
        keys = "Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D ends."
        self.screen.notice("\n".join([*lines, keys]))

    def do_reset(self, rest: str) -> None:
        """forget the conversation, but for the system message"""
        self.conversation.reset()

    def do_undo(self, rest: str) -> None:
        """forget the last question and its answer"""
        if self.conversation.undo() is None:
            self.screen.notice("there is nothing to undo")

    def do_retry(self, rest: str) -> None:
        """answer the last question again"""
        if (question := self.conversation.undo()) is None:
            raise ValueError("there is no question to answer again")
        self.say(question)

    def do_system(self, rest: str) -> None:
        """TEXT: have this as the system message; none: have none; without a text, show it"""
        if rest:
            self.conversation.system = None if rest.lower() == "none" else rest
        else:
            self.screen.notice(self.conversation.system or "there is no system message")

    def do_save(self, rest: str) -> None:
        """FILE: write the conversation as JSON, as --data.path reads it"""
        if not rest:
            raise ValueError("name a file: /save talk.json")
        content = json.dumps([{"messages": self.conversation.messages}], indent=2, ensure_ascii=False)
        write_whole(Path(rest), check_text(content) + "\n")
        self.screen.notice(f"saved to {rest}")

    def do_load(self, rest: str) -> None:
        """FILE: go on with a conversation that was saved"""
        if not rest:
            raise ValueError("name a file: /load talk.json")
        try:
            content = json.loads(Path(rest).read_text("utf-8"))
            messages = (content[0] if isinstance(content, list) else content)["messages"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(f"{rest} holds no conversation: JSON with 'messages'") from None
        check_text(json.dumps(messages, ensure_ascii=False))
        self.conversation.messages = check_messages(messages, rest)
        self.screen.notice(f"{len(messages)} messages")

    def do_set(self, rest: str) -> None:
        """NAME=VALUE: temperature, top_k, top_p, min_p, seed, max_new_tokens, {repetition,presence,frequency}_penalty"""
        session = self.conversation.session
        name, _, value = (part.strip() for part in rest.partition("="))
        known = sorted((*NUMBERS, "max_new_tokens"))
        if name not in known:
            raise ValueError(f"there is no {name or 'setting without a name'}; /set temperature=0.7, or {', '.join(known)}")
        number = None if value.lower() == "none" and name in ("top_k", "seed") else _number(name, value)
        if name == "max_new_tokens":
            if number < 1:
                raise ValueError(f"max_new_tokens {number}: must be at least 1")
            self.conversation.session = session._replace(max_new_tokens=number)
            return
        sampling = replace(session.sampling, **{name: number})
        if problems := sampling.problems():
            raise ValueError("; ".join(problems).replace("--", ""))
        self.conversation.session = session._replace(sampling=sampling)

    def do_stats(self, rest: str) -> None:
        """show what the conversation takes of the context, and how tokens are drawn"""
        conversation = self.conversation
        last, taken = conversation.last, f"{conversation.tokens:,} of {conversation.context:,} tokens of context"
        lines = [f"{len(conversation.messages)} messages, {taken}"]
        lines += [f"{conversation.decoder.processed:,} tokens went through the network"]
        lines += [f"the last answer: {last.stats}"] if last is not None else []
        session = conversation.session
        settings = {name: getattr(session.sampling, name) for name in NUMBERS} | {"max_new_tokens": session.max_new_tokens}
        self.screen.notice("\n".join([*lines, ", ".join(f"{name}={value}" for name, value in settings.items())]))

    def do_base(self, rest: str) -> None:
        """[TEXT]: answer this, or the last question again, without the adapter; nothing of it is kept"""
        conversation = self.conversation
        if not mixins(conversation.session.model):
            raise ValueError("there is no adapter: this is the base")
        kept = list(conversation.messages)
        try:
            question = rest or conversation.undo()
            if question is None:
                raise ValueError("there is no question to answer; /base TEXT asks one")
            self._show(conversation.base_answer(question))
        finally:
            conversation.messages = kept

    def do_quit(self, rest: str) -> None:
        """end"""
        raise EOFError


def _number(name: str, value: str) -> int | float:
    whole = name in ("top_k", "seed", "max_new_tokens")
    try:
        return int(value) if whole else float(value)
    except ValueError:
        raise ValueError(f"{name} {value!r}: expected {'a whole number' if whole else 'a number'}") from None


def chat(args: ChatArgs) -> None:
    """Talk over several turns; without a terminal, read a message a line and print the answers alone."""
    session = open_session(args)
    session.limit_threads(1)
    drafter = make_drafter(args, session, ROOM)
    chat = Chat(Conversation(session, drafter, args.system), screen(), args.debug)
    chat.run()
