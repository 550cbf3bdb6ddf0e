"""What a run prints: plain lines in a pipe; a panel, one live bar and a table in a terminal."""

import os
import pty
import re
import subprocess
import sys
from io import StringIO
from types import SimpleNamespace

import pytest
from conftest import ENV, ROOT, start
from rich.console import Console

from litft.training.output.screen import (
    Lines,
    Screen,
    Terminal,
    open_screen,
    shorten,
    shorten_left,
)

ROW = {
    "step": 7.0,
    "loss": 1.2345,
    "margin": 0.5,
    "grad_norm": 2.0,
    "learning_rate": 2e-4,
    "tokens_per_second": 8123.0,
}
ROW |= {"memory_gib": 1.25, "mfu": 0.4, "data_share": 0.1}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def show_everything(screen: Screen) -> None:
    screen.header(
        "LoRA on base[v2]", "out/[/a]", ["80 examples [of 90]", "warning: a tensor is odd"]
    )
    with screen.showing_activity("reading models/[v2]/base"):
        pass
    with screen.bar(5, 10, "first step"):
        screen.advance(7)
        screen.row(ROW, 10, "3 minutes")
        with screen.showing_activity("validating"):
            pass
        screen.say("step 7: validation loss 1.1")
    screen.results({"validation loss": ["2.0000", "1.1000"]}, ["9 s of training"])


def test_lines_are_plain(capsys):
    show_everything(Lines())
    assert capsys.readouterr().out.splitlines() == [
        "80 examples [of 90]",
        "warning: a tensor is odd",
        "step 7/10: loss 1.234, margin 0.5, norm 2, rate 0.0002, 8,123 tokens/s, memory 1.25 GiB, "
        "3 minutes left",
        "step 7: validation loss 1.1",
        "validation loss: 2.0000 -> 1.1000",
        "9 s of training",
    ]


def test_a_closed_stdout_and_other_encodings_get_plain_lines(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert type(open_screen(True)) is Lines
    terminal = SimpleNamespace(isatty=lambda: True, encoding="iso-8859-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert type(open_screen(True)) is Lines and type(open_screen(False)) is Screen


@pytest.mark.weekly
def test_a_run_goes_on_if_nobody_reads_its_output(tmp_path):
    """As in `finetune/lora.py | head -2`."""
    done = subprocess.run(
        f"{sys.executable} {ROOT / 'finetune' / 'lora.py'} --max_steps 4 --eval.max_new_tokens 0 "
"--out_dir run | head -n 2",
        shell=True, cwd=tmp_path, capture_output=True, text=True, env=ENV,
    )  # fmt: skip
    assert (tmp_path / "run" / "final").is_dir() and len(done.stdout.splitlines()) == 2
    assert "warning: stdout is closed" in done.stderr and "Traceback" not in done.stderr


def test_processes_that_do_not_write_print_nothing(capsys):
    show_everything(Screen())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_shows_a_panel_a_bar_and_a_table(width, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = StringIO()
    console = Console(file=text, force_terminal=True, width=width, highlight=False)
    show_everything(Terminal(console))
    printed = text.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", printed)  # no colours
    lines = ESCAPE.sub("", printed).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    assert any("LoRA on base[v2]" in line and line.startswith("╭") for line in lines)
    assert any("out/[/a]" in line and line.startswith("╰") for line in lines)
    bar = "7/10 loss 1.234  margin 0.5  8,123 tokens/s  1.2 GiB  3 minutes left"
    assert any(line.rstrip().endswith(bar) for line in lines)
    assert any(line.rstrip().endswith("7/10 validating") for line in lines)
    assert "80 examples [of 90]" in printed and any(
        "2.0000" in line and "1.1000" in line for line in lines
    )
    assert "step 7/10" not in printed


def test_long_texts_are_shortened_to_the_side_that_matters():
    text = "a " * 60 + "z"
    assert shorten(text, 5) == "a a a..." and shorten_left(text, 5) == "...a a z"
    assert shorten_left("short") == shorten("short") == "short"


@pytest.mark.slow
def test_a_run_in_a_terminal(tiny, examples, tmp_path):
    """The whole command on a pseudo-terminal: no line per step, and the table at the end."""
    controller, terminal = pty.openpty()
    command = ["finetune/lora.py", "--checkpoint_dir", tiny, "--data.path", examples]
    command += [
        "--train.max_steps",
        "6",
        "--train.global_batch_size",
        "4",
        "--out_dir",
        tmp_path / "run",
    ]
    process = start(
        *command, stdout=terminal, cwd=tmp_path, env={"TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(terminal)
    printed = b""
    while True:
        try:
            chunk = os.read(controller, 4096)
        except OSError:  # the process has closed the terminal
            break
        printed += chunk
    assert process.wait() == 0
    text = ESCAPE.sub("", printed.decode())
    assert (
        "╭" in text
        and "6/6 loss" in text
        and "step 3/6" not in text
        and "before" in text
        and "report.html" in text
    )


@pytest.mark.weekly
def test_a_notebook_shows_a_bar_and_the_curve(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    source = (
        "import litft; litft.finetune(max_steps=12, eval_interval=6, "
        f"out_dir={str(tmp_path / 'run')!r}).metrics['step']"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(
        notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = notebook.cells[0].outputs
    (page,) = (
        output["data"]["text/html"]
        for output in outputs
        if output.output_type == "display_data"
    )
    assert (
        '<progress value="12" max="12"></progress> 12/12 loss ' in page
        and "tokens/s" in page
    )
    assert page.count("<polyline") == 2 and "over 12 steps" in page
    assert outputs[-1]["data"]["text/plain"] == "12"
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "step 6: validation loss" in printed and "step 12/12" not in printed
