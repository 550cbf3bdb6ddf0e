"""The command `chat`: a conversation whose history stays in the KV cache, and its slash
commands."""

import json
import signal
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from litft.args import NUMBERS
from litft.atomic import atomic_write
from litft.data.answer_parser import AnswerPart, ParsedAnswer
from litft.data.answer_reading import answer_parser
from litft.data.chat_template import Message
from litft.data.formats import TEMPLATE_ARGS, read_template_args, with_system
from litft.data.history import readable_history
from litft.data.messages import check_messages, read_tools
from litft.data.tokenizer import check_text
from litft.inference.chat_answers import answer_message
from litft.inference.generation import GenerationChunk, generate_batch
from litft.inference.session import Session
from litft.inference.speculative import Drafter
from litft.inference.terminal import ChatScreen
from litft.methods.mixins import mixins
from litft.signals import Signals

INITIAL_CAPACITY = 2048  # initial cache capacity in tokens


@dataclass(frozen=True)
class AnswerStep:
    """What an answer gained by a chunk of its text."""

    parts: list[AnswerPart]
    chunk: GenerationChunk


class Conversation:
    """The messages of a chat, and the decoder whose KV cache holds them."""

    def __init__(
        self,
        session: Session,
        drafter: Drafter | None = None,
        system: str | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        # tools: functions that the model may call, in OpenAI's form
        self.session = session
        self.drafter = drafter
        self.tokenizer = session.tokenizer
        self.decoder = session.decoder(1, INITIAL_CAPACITY)
        self.tools = tools
        self.messages: list[Message] = (
            [{"role": "system", "content": system}] if system else []
        )
        # text and token ids up to the end of the last answer
        self.history: tuple[str, list[int]] = ("", [])
        self.num_questions = 0
        self.last_chunk: GenerationChunk | None = None  # the end of the last answer
        # the last prompt and output, with special tokens
        self.prompt_text = self.output_text = ""

    @property
    def system(self) -> str | None:
        """The system message."""
        if self.messages and self.messages[0]["role"] == "system":
            return self.messages[0]["content"]
        return None

    @system.setter
    def system(self, text: str | None) -> None:
        turns = self.messages[self.system is not None :]
        if text:
            self.messages = [{"role": "system", "content": text}, *turns]
        else:
            self.messages = turns

    @property
    def context_length(self) -> int:
        """The model's context length in tokens."""
        return self.session.model.config.max_positions

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all messages."""
        if self.messages:
            text = self.tokenizer.apply_chat_template(self.messages, self.tools)
        else:
            text = ""
        return len(self.tokenizer.encode(text, bos=False))

    @property
    def open_calls(self) -> list[dict[str, Any]]:
        """The calls of the last answer whose results are missing; none if there are no tools."""
        if not self.tools:
            return []
        results = []
        for message in reversed(self.messages):
            if message["role"] == "tool":
                results.append(message.get("tool_call_id"))
                continue
            calls = message.get("tool_calls", [])
            # calls of training data may have no ids: then results follow in their order
            if all(call.get("id") for call in calls) and all(results):
                return [call for call in calls if call["id"] not in results]
            return calls[len(results) :]
        return []

    def add_result(self, text: str) -> None:
        """Add the result of the first open call."""
        self.messages.append(self._typed(text))

    def _typed(self, text: str) -> Message:
        """Return what the user has typed as a message: the result of a call, or a question."""
        calls = self.open_calls
        if not calls:
            return {"role": "user", "content": text}
        result = {"role": "tool", "name": calls[0]["function"]["name"], "content": text}
        if calls[0].get("id"):
            result["tool_call_id"] = calls[0]["id"]
        return result

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.last_chunk = None
        self.messages = self.messages[: self.system is not None]

    def undo(self) -> str | None:
        """Remove the last question and its answer; return the question, or None if there is
        none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                question = self.messages[index]["content"]
                del self.messages[index:]
                self.last_chunk = None
                return question
        return None

    def answer(
        self, question: str, notice: Callable[[str], None]
    ) -> Generator[AnswerStep, None, None]:
        """Stream the answer to a question, or to the result of an open call.

        Afterwards, or if the caller stops early, both are added to the messages.

        notice: called with a text if old turns are dropped. Raises ValueError if the question is
        too long; the messages are then unchanged.
        """
        original_messages = list(self.messages)
        self.messages.append(self._typed(question))
        try:
            request = self.session.request(self._prompt_ids(notice), self.num_questions)
        except ValueError:
            self.messages = original_messages
            raise

        self.decoder.reserve(len(request.ids) + request.max_new_tokens)
        # as in earlier turns: their cached keys stay valid
        request = replace(request, max_length=self.decoder.capacity)
        self.num_questions += 1

        tokens: list[int] = []
        parser = answer_parser(self.tokenizer, self.prompt_text, self.tools)
        parsed = ParsedAnswer()
        try:
            for _, chunk in generate_batch(
                self.decoder, self.tokenizer, [request], self.drafter
            ):
                tokens += chunk.tokens
                self.last_chunk = chunk
                parts = parser.push(chunk)
                parsed.add(parts)
                yield AnswerStep(parts, chunk)
            parts = parser.finish(is_cut=chunk.is_cut)
            parsed.add(parts)
            yield AnswerStep(parts, chunk)
        except ValueError:
            self.messages = original_messages
            raise
        finally:
            # Also reached if the caller stops early, by closing this generator; then the partial
            # answer is kept.
            if self.messages is not original_messages:
                # nothing, unless the caller has stopped early
                parsed.add(parser.finish(is_cut=True))
                self.messages.append(answer_message(parsed))
            self.output_text = self.tokenizer.decode(tokens, skip_special=False)
            # An answer that was cut has no end token, and the
            # template adds one: its ids cannot be continued.
            complete = bool(tokens) and tokens[-1] in self.tokenizer.special_ids
            if complete:
                self.history = (
                    self.prompt_text + self.output_text,
                    [*request.ids, *tokens],
                )
            else:
                self.history = ("", [])

    def _prompt_ids(self, notice: Callable[[str], None]) -> list[int]:
        """Return the prompt's token ids; drop the oldest turns if the context has no room for it
        and an answer."""
        # leave room for an answer: what the flags ask for, but at most a quarter of the context
        max_tokens = self.context_length - min(
            self.session.max_new_tokens, self.context_length // 4
        )
        dropped = 0
        # a turn is a question with all messages up to the next one; the system message stays
        while len(ids := self._encode()) > max_tokens and (turn := self._oldest_turn()):
            start, end = turn
            del self.messages[start:end]
            dropped += 1

        if len(ids) >= self.context_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the model's context is "
                f"{self.context_length}; shorten it"
            )
        if dropped:
            notice(
                f"the context of {self.context_length:,} tokens is full: the oldest {dropped} "
                "turns are dropped"
            )
        return ids

    def _oldest_turn(self) -> tuple[int, int] | None:
        """Return the indices of the two oldest questions, or None if there is only one."""
        question_indices = []
        for index, message in enumerate(self.messages):
            if message["role"] == "user":
                question_indices.append(index)
        if len(question_indices) > 1:
            return (question_indices[0], question_indices[1])
        return None

    def _encode(self) -> list[int]:
        """Tokenize the messages.

        Unchanged history keeps its generated token ids, which a new tokenization may not give.
        """
        self.prompt_text = self._render(self.messages)
        text, ids = self.history
        if text and self.prompt_text.startswith(text):
            # tokenized as a part of the whole: some tokenizers begin each text with a space
            all_ids, boundaries = self.tokenizer.encode_with_boundaries(
                self.prompt_text, [len(text)]
            )
            return [*ids, *all_ids[boundaries[0] :]]
        return self.tokenizer.encode(self.prompt_text, bos=False)

    def _render(self, messages: list[Message]) -> str:
        """Return the prompt for the answer to messages."""
        readable = readable_history(self.tokenizer, messages, self.tools)
        return self.tokenizer.apply_chat_template(
            readable, self.tools, add_generation_prompt=True
        )

    def base_answer(self, question: str) -> Generator[AnswerStep, None, None]:
        """Stream the answer of the model without its adapter; the messages stay unchanged."""
        # keys and values differ without the adapter, so the chat's decoder cannot be used
        decoder = self.session.decoder(1, INITIAL_CAPACITY, compiled=False)
        messages = [*self.messages, {"role": "user", "content": question}]
        text = self._render(messages)
        ids = self.tokenizer.encode(text, bos=False)
        request = self.session.request(ids, self.num_questions)
        # room for the longest answer
        decoder.reserve(len(request.ids) + request.max_new_tokens)
        parser = answer_parser(self.tokenizer, text, self.tools)
        with self.session.as_base():
            for _, chunk in generate_batch(decoder, self.tokenizer, [request]):
                parts = parser.push(chunk)
                yield AnswerStep(parts, chunk)
        yield AnswerStep(parser.finish(is_cut=chunk.is_cut), chunk)


class Chat:
    """The interactive loop: answers messages and runs commands, which start with /."""

    def __init__(
        self, conversation: Conversation, screen: ChatScreen, debug: bool = False
    ) -> None:
        self.conversation = conversation
        self.screen = screen
        self.debug = debug
        # a method do_x is the command /x
        self.commands: dict[str, Callable[[str], None]] = {
            name.removeprefix("do_"): getattr(self, name)
            for name in dir(self)
            if name.startswith("do_")
        }
        self.commands["exit"] = self.do_quit

    def run(self) -> None:
        """Run until the user quits or the input ends."""
        self.screen.notice(
            "Type a message; /help lists the commands, /quit or Ctrl-D quits.",
            terminal_only=True,
        )
        while (line := self.screen.read()) is not None:
            try:
                self._handle(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                # in a terminal: a second Ctrl-C, which stops at once
                if not self.screen.is_terminal:
                    raise
                self.screen.notice("stopped")

    def _handle(self, line: str) -> None:
        """Run a command or answer a message. EOFError ends the chat."""
        name, _, rest = line.removeprefix("/").partition(" ")
        if line.startswith("/") and name in self.commands:
            try:
                self.commands[name](rest.strip())
            except ValueError as error:
                self.screen.notice(f"error: {error}")
            except OSError as error:
                self.screen.notice(f"error: {error.filename}: {error.strerror}")
        elif line.startswith("/") and name.isalpha():
            # a path such as /etc/hosts is a part of a question
            self.screen.notice(f"/{name} is not a command; /help lists them")
        elif line.strip().lower() in ("quit", "exit") and self.screen.is_terminal:
            self.screen.notice("/quit ends the chat")
        elif line:
            self.show(line)

    def show(self, question: str) -> None:
        """Show the answer to a question; a question that is too long is dropped.

        Results of several calls are collected before they are answered.
        """
        conversation = self.conversation
        if len(conversation.open_calls) > 1:
            conversation.add_result(question)
            self._ask_for_result()
            return
        try:
            self._show(conversation.answer(question, self.screen.notice))
        except ValueError as error:
            if conversation.system:
                remedy = "/system none removes the system message"
            else:
                remedy = "/reset starts over"
            self.screen.notice(f"error: {error}; this message is dropped, {remedy}")
            return
        self._ask_for_result()
        if self.debug:
            self.screen.notice(f"--- the model reads\n{conversation.prompt_text}\n---")
            self.screen.notice(f"--- the model says\n{conversation.output_text}\n---")

    def _ask_for_result(self) -> None:
        """Say which call the next message is the result of, if there is one."""
        calls = self.conversation.open_calls
        if calls:
            name = calls[0]["function"]["name"]
            self.screen.notice(
                f"the next message is the result of {name}; /undo asks something else"
            )

    def _show(self, steps: Generator[AnswerStep, None, None]) -> None:
        """Show an answer as it is generated, then its stats; Ctrl-C stops it."""
        signals_to_catch = (signal.SIGINT,) if self.screen.is_terminal else ()
        # closing ends `answer`, which then adds the partial answer to the messages
        with closing(steps), Signals(signals_to_catch, notice=None) as signals:
            # errors are raised before anything is shown
            first_step = next(steps)
            with self.screen.answering() as show:
                for step in chain([first_step], steps):
                    for part in step.parts:
                        show(part)
                    if signals.caught:
                        break
        self.screen.notice(
            f"{'stopped: ' if signals.caught else ''}{step.chunk.stats}", terminal_only=True
        )
        # a call that is cut is shown as text
        cut = step.chunk.finish_reason == "length"
        if cut and self.conversation.tools and not self.conversation.open_calls:
            self.screen.notice(
                "the answer is cut by max_new_tokens, so the next message is not the result of a "
                "call; /set max_new_tokens=N with a larger N, then /retry"
            )

    # commands: /help prints the docstrings

    def do_help(self, rest: str) -> None:
        """list the commands"""
        lines = []
        for name, command in self.commands.items():
            if name != "exit":
                lines.append(f"/{name:<8} {command.__doc__}")
        keys = "Enter sends, Alt-Enter inserts a new line, Ctrl-C stops an answer, Ctrl-D quits."
        self.screen.notice("\n".join([*lines, keys]))

    def do_reset(self, rest: str) -> None:
        """clear the conversation, but keep the system message"""
        self.conversation.reset()

    def do_undo(self, rest: str) -> None:
        """remove the last question and its answer"""
        if self.conversation.undo() is None:
            self.screen.notice("there is nothing to undo")

    def do_retry(self, rest: str) -> None:
        """answer the last question again"""
        question = self.conversation.undo()
        if question is None:
            raise ValueError("there is no question to answer again")
        self.show(question)

    def do_system(self, rest: str) -> None:
        """TEXT: set the system message; none: remove it; without TEXT: show it"""
        if rest:
            self.conversation.system = None if rest.lower() == "none" else rest
        else:
            self.screen.notice(self.conversation.system or "there is no system message")

    def do_save(self, rest: str) -> None:
        """FILE: save the conversation as JSON, in a format that --data.path reads"""
        if not rest:
            raise ValueError("name a file: /save talk.json")
        if not self.conversation.messages:
            raise ValueError("there are no messages to save")
        record: dict[str, Any] = {"messages": self.conversation.messages}
        if self.conversation.tools:
            record["tools"] = self.conversation.tools
        content = json.dumps([record], indent=2, ensure_ascii=False)
        atomic_write(Path(rest), check_text(content) + "\n")
        self.screen.notice(f"saved to {rest}")

    def do_load(self, rest: str) -> None:
        """FILE: continue a saved conversation"""
        if not rest:
            raise ValueError("name a file: /load talk.json")
        try:
            content = json.loads(Path(rest).read_text("utf-8"))
            # a list as written by /save, or a single conversation
            record = content[0] if isinstance(content, list) else content
            messages = record["messages"]
            tools = record.get("tools")
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(
                f"{rest} is not a conversation; expected JSON with 'messages'"
            ) from None
        check_text(json.dumps(messages, ensure_ascii=False))
        checked = with_system(check_messages(messages, rest), record, rest)
        if read_template_args(record, rest):
            raise ValueError(f"{rest}: {TEMPLATE_ARGS} is not read here; leave it out")
        loaded_tools = read_tools(tools, rest)
        self.conversation.tokenizer.check_tools(loaded_tools)
        self.conversation.tools = loaded_tools
        self.conversation.messages = checked
        self.screen.notice(f"{len(messages)} messages, {len(loaded_tools or [])} tools")

    def do_set(self, rest: str) -> None:
        """NAME=VALUE: temperature, top_k, top_p, min_p, seed, max_new_tokens,
        {repetition,presence,frequency}_penalty"""
        session = self.conversation.session
        name, _, value = (part.strip() for part in rest.partition("="))
        names = sorted((*NUMBERS, "max_new_tokens"))
        if name not in names:
            raise ValueError(
                f"unknown setting {name or '(no name)'}; use one of {', '.join(names)}, as in /set "
                "temperature=0.7"
            )
        if name == "max_new_tokens":
            count = _number(name, value)
            if count < 1:
                raise ValueError(f"max_new_tokens {count}: must be at least 1")
            self.conversation.session = session._replace(max_new_tokens=count)
            return
        if value.lower() == "none" and name in ("top_k", "seed"):
            number = None
        else:
            number = _number(name, value)
        sampling = replace(session.sampling, **{name: number})
        problems = sampling.problems()
        if problems:
            raise ValueError("; ".join(problems).replace("--", ""))
        self.conversation.session = session._replace(sampling=sampling)

    def do_stats(self, rest: str) -> None:
        """show context usage and sampling settings"""
        conversation = self.conversation
        last = conversation.last_chunk
        usage = f"{conversation.num_tokens:,} of {conversation.context_length:,} tokens of context"
        lines = [f"{len(conversation.messages)} messages, {usage}"]
        lines += [f"{conversation.decoder.processed:,} tokens went through the model"]
        if last is not None:
            lines.append(f"the last answer: {last.stats}")
        session = conversation.session
        settings = {name: getattr(session.sampling, name) for name in NUMBERS} | {
            "max_new_tokens": session.max_new_tokens
        }
        self.screen.notice(
            "\n".join(
                [*lines, ", ".join(f"{name}={value}" for name, value in settings.items())]
            )
        )

    def do_base(self, rest: str) -> None:
        """[TEXT]: answer TEXT, or the last question, without the adapter; the answer is not kept"""
        conversation = self.conversation
        if not mixins(conversation.session.model):
            raise ValueError(
                "there is no adapter: this is a whole model; serve --with_base compares a run with "
                "its base"
            )
        # /base alone takes the last question out; it is put back in any case
        original_messages = list(conversation.messages)
        try:
            question = rest or conversation.undo()
            if question is None:
                raise ValueError("there is no question to answer; /base TEXT asks one")
            self._show(conversation.base_answer(question))
        finally:
            conversation.messages = original_messages

    def do_quit(self, rest: str) -> None:
        """quit"""
        raise EOFError


def _number(name: str, value: str) -> int | float:
    is_integer = name in ("top_k", "seed", "max_new_tokens")
    try:
        if is_integer:
            return int(value)
        return float(value)
    except ValueError:
        raise ValueError(
            f"{name} {value!r}: expected {'a whole number' if is_integer else 'a number'}"
        ) from None
