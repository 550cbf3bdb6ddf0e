"""The chat: history, commands, context window and screen, with pipes and in a real terminal."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest
from conftest import ENV, ROOT, script
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from quirks import QUIRKS
from rich.console import Console

import litft
from litft.args import AdapterArgs, Sampling
from litft.data.chat_template import STYLES
from litft.data.tokenizer import Tokenizer
from litft.inference.chat import Chat, Conversation
from litft.inference.session import Session
from litft.inference.speculative import PromptLookup
from litft.inference.terminal import (
    AnswerBlock,
    Blocks,
    ChatScreen,
    ChatTerminal,
    render_block,
    typed_lines,
)
from litft.methods import Adapter


class ScriptedScreen(ChatScreen):
    """A screen that reads given lines and records the notices."""

    def __init__(self, lines=()):
        self.lines, self.notices = list(lines), []

    def read(self):
        return self.lines.pop(0) if self.lines else None

    def notice(self, text, terminal_only=False):
        self.notices.append(text)


def open_session(folder, max_new_tokens=16, **settings):
    model, tokenizer = litft.load(folder, precision="fp32")
    return Session(
        model,
        tokenizer,
        Sampling(**{"temperature": 0} | settings),
        max_new_tokens,
        [],
        False,
    )


@pytest.fixture(scope="module")
def session(checkpoints):
    return open_session(checkpoints["demo"])


def ask(conversation, question, notice=lambda text: None):
    return "".join(
        part.text for step in conversation.answer(question, notice) for part in step.parts
    )


def test_a_chat_remembers_its_turns(checkpoints, tmp_path):
    folder = checkpoints["stories"]
    model, tokenizer = litft.load(folder, precision="fp32")
    system, answers, messages = (
        "You are terse.",
        [],
        [{"role": "system", "content": "You are terse."}],
    )
    lines = ["What is the capital of France?", "Which country did I ask about?"]
    for line in lines:
        messages.append({"role": "user", "content": line})
        # the white space before an answer is no part of its content
        answers.append(
            "".join(
                litft.stream(model, tokenizer, messages, max_new_tokens=16, temperature=0)
            ).lstrip()
        )
        messages.append({"role": "assistant", "content": answers[-1]})
    flags = ["--system", system, "--max_new_tokens", "16", "--temperature", "0", "--debug"]
    done = script(
        "generate/chat.py",
        "--checkpoint_dir",
        folder,
        *flags,
        cwd=tmp_path,
        text="\n".join(lines) + "\n",
    )
    assert done.stdout == "".join(answer + "\n" for answer in answers)
    assert (
        tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
        in done.stderr
    )
    assert (
        "note: the model has no chat template, so messages are written in Alpaca style"
        in done.stderr
    )


def test_a_message_that_is_too_long_is_dropped(checkpoints, tmp_path):
    flags = ["--max_new_tokens", "8", "--temperature", "0"]
    command = ["generate/chat.py", "--checkpoint_dir", checkpoints["stories"], *flags]
    plain = script(*command, cwd=tmp_path, text="Hello\n").stdout
    done = script(*command, cwd=tmp_path, text="once upon a time " * 600 + "\nHello\n")
    assert "shorten it; this message is dropped" in done.stderr and done.stdout == plain


def test_reset_clears_the_history(checkpoints, tmp_path):
    flags = ["--max_new_tokens", "8", "--temperature", "0", "--debug"]
    command = ["generate/chat.py", "--checkpoint_dir", checkpoints["stories"], *flags]
    done = script(*command, cwd=tmp_path, text="Hello\n\n/reset\nHello\n/exit\nnever\n")
    first, second = done.stderr.split("--- the model reads\n")[1:]
    assert first == second and "never" not in done.stderr


def test_only_new_tokens_are_computed(session):
    """Each turn computes the question with its template tokens, and the answer's tokens except the
    last."""
    conversation, decoder = (chat := Conversation(session)), chat.decoder
    for question in (
        "What is the capital of France?",
        "Which country did I ask about?",
        "Thanks",
    ):
        processed, cached = decoder.processed, len(decoder.texts[0])
        ask(conversation, question)
        ids = session.tokenizer.encode(conversation.prompt_text, bos=False)
        new_tokens = conversation.last_chunk.stats.new_tokens
        assert conversation.last_chunk.stats.prefill_tokens == len(ids) - cached
        assert decoder.processed - processed == len(ids) - cached + new_tokens - 1


def test_an_answer_keeps_its_generated_tokens(checkpoints):
    """The answer is generated letter by letter; the tokenizer would encode the same text with fewer
    tokens."""
    session = open_session(checkpoints["SmolLM2-135M-Instruct"])
    tokenizer = session.tokenizer
    (letter,) = tokenizer.encode("a", bos=False)
    bias = {letter: 100.0} | dict.fromkeys(tokenizer.stop_ids, 110.0)
    conversation = Conversation(
        session._replace(sampling=Sampling(8.0, logit_bias=bias, seed=2), max_new_tokens=60)
    )
    pieces = [step.chunk for step in conversation.answer("Hello", print)][:-1]
    tokens = [token for piece in pieces for token in piece.tokens]
    assert pieces[-1].finish_reason == "stop" and len(tokens) > len(
        tokenizer.encode(conversation.output_text, bos=False)
    )
    cached_ids = list(conversation.decoder.texts[0])
    next(iter(conversation.answer("And now?", print)))
    assert conversation.decoder.texts[0][: len(cached_ids) + 1] == [*cached_ids, tokens[-1]]
    assert conversation.last_chunk.stats.prefill_tokens < 30


def test_answers_equal_those_without_a_cache(session):
    conversation, messages = (
        Conversation(session, PromptLookup(), "You are terse."),
        [{"role": "system", "content": "You are terse."}],
    )
    for question in ("What is the capital of France?", "Which country did I ask about?"):
        messages.append({"role": "user", "content": question})
        expected = "".join(
            litft.stream(
                session.model, session.tokenizer, messages, max_new_tokens=16, temperature=0
            )
        )
        assert ask(conversation, question) == expected.lstrip()
        messages.append({"role": "assistant", "content": expected.lstrip()})
    assert conversation.messages == messages


def test_an_interrupted_answer_keeps_its_partial_text(session):
    conversation = Conversation(session)
    steps = conversation.answer("Tell me a story.", print)
    partial = "".join(next(steps).chunk for _ in range(3))
    steps.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": partial.lstrip()}
    assert ask(conversation, "Go on") == ask_without_cache(
        session, conversation.messages[:-1]
    )


def ask_without_cache(session, messages):
    return "".join(
        litft.stream(
            session.model, session.tokenizer, messages, max_new_tokens=16, temperature=0
        )
    ).lstrip()


def test_the_oldest_turns_are_dropped_when_the_context_is_full(session):
    from dataclasses import replace

    model = session.model
    original_config, notices = model.config, []
    conversation = Conversation(session, system="Be brief.")
    try:
        model.config = replace(original_config, max_positions=200)
        conversation.decoder.capacity = 200
        for number in range(6):
            ask(
                conversation,
                f"Question {number}: what is {number} plus {number}?",
                notices.append,
            )
    finally:
        model.config = original_config
    assert conversation.messages[0]["content"] == "Be brief." and "Question 0" not in str(
        conversation.messages
    )
    assert "Question 5" in conversation.messages[-2]["content"]
    assert (
        notices
        and "the context of 200 tokens is full: the oldest 1 turns are dropped"
        in notices[0]
    )


def test_a_question_longer_than_the_context_is_refused(checkpoints):
    conversation = Conversation(open_session(checkpoints["stories"], 8))
    with pytest.raises(ValueError, match="shorten it"):
        ask(conversation, "once upon a time " * 600)
    assert conversation.messages == [] and ask(conversation, "Hello")


def test_commands(checkpoints, tmp_path):
    path = tmp_path / "talk.json"
    lines = [
        "Hello",
        "/undo",
        "Hi there",
        "/retry",
        f"/save {path}",
        "/system Be ill.",
        "/system none",
        "/system Be kind.",
        "/system",
        "/stats",
        "/load nowhere.json",
    ]
    lines += [
        "/set temperature=0.5",
        "/set top_k=none",
        "/set top_p=7",
        "/set nothing=1",
        "/set max_new_tokens=3",
        "/set seed=x",
    ]
    lines.insert(0, f"/save {path}")
    screen = ScriptedScreen([*lines, "/base", "/help", "/quit", "never"])
    chat = Chat(Conversation(open_session(checkpoints["stories"], 8)), screen)
    chat.run()
    notices = "\n".join(screen.notices)
    # there is nothing to save before the first message
    assert screen.notices[1] == "error: there are no messages to save"
    saved = json.loads(path.read_text())[0]["messages"]
    assert [m["role"] for m in saved] == ["user", "assistant"] and saved[0][
        "content"
    ] == "Hi there"
    assert chat.conversation.messages == [{"role": "system", "content": "Be kind."}, *saved]
    for part in (
        "Be kind.",
        "tokens of context",
        "nowhere.json",
        "top_p 7.0: must lie in",
        "unknown setting nothing",
        "seed 'x': expected",
    ):
        assert part in notices, part
    assert (
        "there is no adapter" in notices
        and "/retry" in notices
        and screen.lines == ["never"]
    )
    settings = chat.conversation.session
    assert (
        settings.sampling.temperature == 0.5
        and settings.sampling.top_k is None
        and settings.max_new_tokens == 3
    )
    loaded = Chat(
        Conversation(open_session(checkpoints["stories"], 8)),
        ScriptedScreen([f"/load {path}", "/reset", "/stats", "/undo", "/retry"]),
    )
    loaded.run()
    assert "0 messages, 0 of" in loaded.screen.notices[-3]
    assert loaded.screen.notices[-2:] == [
        "there is nothing to undo",
        "error: there is no question to answer again",
    ]


def test_results_of_calls_follow_in_their_order(session):
    """Also where the calls have no ids, as in training data."""
    functions = [
        {"function": {"name": name, "arguments": {}}} for name in ("first", "second")
    ]
    conversation = Conversation(session, tools=[{"name": "first"}])
    for ids in ([], ["a", "b"]):
        calls = [
            {**call, "id": call_id} for call, call_id in zip(functions, ids, strict=False)
        ]
        calling = {"role": "assistant", "content": "", "tool_calls": calls or functions}
        conversation.messages = [{"role": "user", "content": "Now?"}, calling]
        conversation.add_result("one")
        (left,) = conversation.open_calls
        assert left["function"]["name"] == "second"
        conversation.add_result("two")
        assert conversation.open_calls == []
        results = conversation.messages[2:]
        assert [message["name"] for message in results] == ["first", "second"]
        assert [message.get("tool_call_id") for message in results] == (ids or [None, None])


def test_tools_that_the_template_leaves_out_are_refused(checkpoints, tmp_path):
    """Also those of a loaded conversation."""
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "weather", "parameters": {"type": "object"}}]')
    command = [
        "generate/chat.py",
        "--checkpoint_dir",
        checkpoints["demo"],
        "--tools",
        tools,
    ]
    assert "tools" in script(*command, cwd=tmp_path, code=2).stderr
    message = script(*command[:-1], "nowhere.json", cwd=tmp_path, code=2).stderr
    assert (
        "nowhere.json does not exist" in message
        and "name a JSON list of functions" in message
    )
    talk = tmp_path / "talk.json"
    record = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": json.loads(tools.read_text()),
    }
    talk.write_text(json.dumps([record]))
    screen = ScriptedScreen([f"/load {talk}"])
    chat = Chat(Conversation(open_session(checkpoints["demo"], 8)), screen)
    chat.run()
    assert "error: " in screen.notices[-1] and not chat.conversation.messages
    # the record's system prompt is a field of its own in files of examples
    record = {"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}
    talk.write_text(json.dumps([record]))
    chat = Chat(Conversation(open_session(checkpoints["demo"], 8)), ScriptedScreen([]))
    chat.do_load(str(talk))
    system = {"role": "system", "content": "Be brief."}
    assert chat.conversation.messages == [system, *record["messages"]]
    # a file with neither tools nor examples that have some
    tools.write_text('[{"text": "a"}]')
    assert "has no tools; expected" in script(*command, cwd=tmp_path, code=2).stderr


def test_base_answers_without_the_adapter_and_keeps_the_history_unchanged(
    checkpoints, capsys
):
    session = open_session(checkpoints["stories"], 8)
    expected = ask(Conversation(session), "Hello")
    method = Adapter(AdapterArgs())
    method.select_targets(session.model, [])
    method.attach(session.model)
    for block in session.model.blocks:
        if hasattr(block.attention, "adaption_gate"):
            block.attention.adaption_gate.data.fill_(3.0)
    chat = Chat(Conversation(session), ScriptedScreen(["Hello", "/base", "/base Hello"]))
    chat.run()
    with_adapter, base, asked = capsys.readouterr().out.split("\n")[:3]
    assert base == expected != with_adapter and asked != expected
    assert [m["content"] for m in chat.conversation.messages] == ["Hello", with_adapter]


def test_blocks_end_at_empty_lines_outside_code_and_at_thoughts():
    thought = "Let me\n\nsee"
    content = "One *line*\n\n```py\na\n\nb\n```\n\nlast"
    expected = [
        ("Let me", "reasoning"),
        ("see", "reasoning"),
        ("One *line*", "content"),
        ("```py\na\n\nb\n```", "content"),
        ("last", "content"),
    ]
    for size in (1, 3, 1000):
        blocks = Blocks()
        found = []
        for text, kind in ((thought, "reasoning"), (content, "content")):
            for start in range(0, len(text), size):
                found += blocks.push(text[start : start + size], kind)
        assert found + list(blocks.rest()) == expected


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("content", "<answer>\n42\n</answer>", ["<answer>", "42", "</answer>"]),
        (
            "content",
            "roses are red\nviolets are blue",
            ["roses are red", "violets are blue"],
        ),
        ("content", "std::vector<int> v = f<T>(1);", ["std::vector<int> v = f<T>(1);"]),
        ("content", r"\(x^2\) in C:\_dir\*.txt", [r"\(x^2\) in C:\_dir\*.txt"]),
        ("content", "&lt;b&gt;", ["&lt;b&gt;"]),
        ("content", "[1]: http://x.org/a", ["[1]: http://x.org/a"]),
        ("content", "a *word*", ["a word"]),
        ("content", "- one\n- two", [" • one", " • two"]),
        ("call", 'run({"a": "2*3*4 __x__ <p>"})', ['run({"a": "2*3*4 __x__ <p>"})']),
    ],
)
def test_a_terminal_shows_the_text_of_an_answer(kind, text, shown):
    """Markdown is formatted; HTML and line breaks are text."""
    console = Console(width=80, file=io.StringIO(), highlight=False)
    console.print(render_block(AnswerBlock(text, kind)))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert [line for line in lines if line] == shown


def test_a_terminal_writes_names_between_colons_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        terminal = ChatTerminal()
    terminal.console.file = io.StringIO()
    terminal.notice("user:id:7, key:on:x")
    assert "user:id:7, key:on:x" in terminal.console.file.getvalue()


def test_thoughts_are_left_out_of_the_history_if_the_template_drops_them(checkpoints):
    session = open_session(checkpoints["stories"])
    session.tokenizer.chat_template = QUIRKS["thoughts of earlier answers are dropped"]
    conversation = Conversation(session)
    conversation.messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nAdd them up.\n</think>\n\nFour."},
    ]
    ask(conversation, "And 3 + 3?")
    assert (
        "Four." in conversation.prompt_text
        and "Add them up." not in conversation.prompt_text
    )


class TerminalOutput:
    """The output of a terminal, read in steps."""

    def __init__(self, terminal):
        self.terminal, self.text, self.position, self.queries = terminal, "", 0, 0

    def until(self, text, seconds=120):
        """Return the output from the current position to the end of the next occurrence of a text,
        and move there."""
        end = time.monotonic() + seconds
        while (start := self.text.find(text, self.position)) < 0:
            assert time.monotonic() < end, self.text[self.position :][-2000:]
            if select.select([self.terminal], [], [], 0.2)[0]:
                self.text += os.read(self.terminal, 65536).decode(errors="replace")
            # prompt_toolkit asks where the cursor is
            if (queries := self.text.count("\x1b[6n")) > self.queries:
                os.write(self.terminal, b"\x1b[1;1R")
                self.queries = queries
        previous, self.position = self.position, start + len(text)
        return self.text[previous : self.position]


@pytest.mark.slow
def test_in_a_terminal(checkpoints, tmp_path):
    """Prompt, Markdown, speeds, lines typed ahead and while the model is opened, Ctrl-C that stops
    only the answer, history, Ctrl-D."""
    controller, terminal = pty.openpty()
    os.write(controller, b"Name a city.\rName a river.\rName a")
    flags = [
        "--checkpoint_dir",
        checkpoints["SmolLM2-135M-Instruct"],
        "--temperature",
        "0",
        "--max_new_tokens",
        "60",
    ]
    flags += ["--precision", "fp32"]
    env = ENV | {
        "XDG_STATE_HOME": str(tmp_path),
        "TERM": "xterm",
        "COLUMNS": "100",
        "LINES": "30",
    }
    command = [sys.executable, ROOT / "generate" / "chat.py", *map(str, flags)]
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=env,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(terminal)
    output = TerminalOutput(controller)
    output.until("/help lists the commands")
    for message in ("> Name a city.", "> Name a river."):
        output.until(message)
        output.until("tokens/s, the first after")
    # the line without its end waits in the prompt
    output.until(">")
    os.write(controller, b" mountain.\r")
    output.until("tokens/s, the first after")
    output.until(">")
    os.write(controller, b"What is the capital of France?\r")
    output.until("of France?")
    time.sleep(1)  # the answer has begun
    os.write(controller, b"Name a colour.\rName a number.\r")
    assert "Paris" in output.until("tokens/s, the first after")
    for _ in range(2):
        output.until("tokens/s, the first after")
    output.until(">")
    os.write(controller, b"Tell me a very long story about a king.\r")
    output.until("about a king.")
    time.sleep(1)
    os.write(controller, b"\x03")
    assert "stopped: " in output.until("tokens/s, the first after")
    output.until(">")
    os.write(controller, b"\x04")
    assert process.wait(60) == 0
    history = (tmp_path / "litft" / "chat_history").read_text()
    for message in ("Name a city.", "Name a river.", "Name a mountain."):
        assert f"+{message}\n\n#" in history
    assert "+What is the capital of France?" in history
    assert "+Name a colour.\n\n#" in history, "two lines typed ahead are two messages"


def test_lines_before_the_first_prompt_end_at_ctrl_d(monkeypatch):
    controller, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(controller, b"Name a city.\r\rName a river.\r\x04")
        assert typed_lines() == ["Name a city.", "Name a river.", None]
    os.close(controller)


@pytest.mark.parametrize("template", ["zephyr", "plain"])
@pytest.mark.parametrize("kind", ["sentencepiece", "unigram", "fallback"])
def test_a_later_turn_is_tokenized_as_a_part_of_the_conversation(
    template, kind, tokenizer_folder
):
    """Some tokenizers begin every text with a space: a turn alone would have other tokens."""
    tokenizer = Tokenizer(tokenizer_folder(kind))
    tokenizer.use_template(STYLES[template])
    messages = [
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "Less"},
    ]
    text = tokenizer.apply_chat_template(messages)
    conversation = Conversation.__new__(Conversation)
    conversation.tokenizer = tokenizer
    conversation.tools = None
    conversation.history = (text, tokenizer.encode(text, bos=False))
    conversation.messages = [*messages, {"role": "user", "content": "Again"}]
    whole = tokenizer.apply_chat_template(conversation.messages, add_generation_prompt=True)
    assert conversation._encode() == tokenizer.encode(whole, bos=False)
