"""Locks of folders: one process owns a run's folder or the folder of an export; a dead owner is
replaced."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ENV, rows_of, script, start
from forkserver import Process

from litft import folder_lock
from litft.atomic import atomic_folder, atomic_write
from litft.export.model_folder import _check_mount, write_folder
from litft.folder_lock import LOCK, locked_folder, owner_text
from litft.run_dir import clear, write_config

HOLD = """
import sys, time
from pathlib import Path
from litft.folder_lock import locked_folder

with locked_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
FILL = """
import sys, time
from litft.export.model_folder import write_folder

def fill(partial):
    (partial / "model.safetensors").write_bytes(b"half")
    print("half", flush=True)
    time.sleep(600)

write_folder(sys.argv[1], fill)
"""


@pytest.fixture
def begin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Process]:
    """Return a function that starts a process that holds a folder, and waits until it does."""

    def start_and_wait(code: str, folder: Path) -> Process:
        path = tmp_path_factory.mktemp("script") / "hold.py"
        path.write_text(code)
        process = start(path, folder, cwd=path.parent, stdout=subprocess.PIPE)
        assert process.stdout.readline()
        return process

    return start_and_wait


def end(process: Process, number: signal.Signals) -> int:
    """End a process by a signal; return its exit code."""
    process.send_signal(number)
    with process.stdout:
        return process.wait(timeout=60)


def test_a_living_owner_is_named_and_a_dead_one_is_replaced(begin, tmp_path):
    folder = tmp_path / "run"
    process = begin(HOLD, folder)
    with (
        pytest.raises(ValueError, match=f"run is in use by process {process.pid} on "),
        locked_folder(folder),
    ):
        pass
    # the table of runs asks without taking the lock
    assert owner_text(folder).startswith(f"process {process.pid} on ")
    assert end(process, signal.SIGKILL) == -9 and (folder / LOCK).is_file()
    assert owner_text(folder) == ""
    # nor does a damaged lock count as a process
    killed = (folder / LOCK).read_text()
    owner = {"host": socket.gethostname(), "process": "x", "since": ""}
    (folder / LOCK).write_text(json.dumps(owner))
    assert owner_text(folder) == ""
    (folder / LOCK).write_text(killed)
    with locked_folder(folder):
        assert str(os.getpid()) in (folder / LOCK).read_text()
    assert not folder.exists()  # it is empty


def test_a_link_to_nothing_is_no_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with (
        pytest.raises(ValueError, match=r"link is a link to .*gone, which does not exist"),
        locked_folder(tmp_path / "link"),
    ):
        pass


def test_a_folder_has_one_owner_within_a_process_too(tmp_path):
    (tmp_path / "kept").write_text("kept")
    refusals = []

    def second() -> None:
        try:
            with locked_folder(tmp_path):
                pass
        except ValueError as error:
            refusals.append(str(error))

    with locked_folder(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert "is in use by this process" in refusals[0]
    with locked_folder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_lock_of_another_host_is_awaited(begin, tmp_path, monkeypatch):
    """A file server releases the locks of a host that is gone after a while."""
    folder = tmp_path / "run"
    process = begin(HOLD, folder)
    owner = json.loads((folder / LOCK).read_text())
    (folder / LOCK).write_text(json.dumps(owner | {"host": "elsewhere"}))
    monkeypatch.setattr(folder_lock, "LEASE", 0.3)
    with (
        pytest.raises(ValueError, match=f"in use by process {process.pid} on elsewhere"),
        locked_folder(folder),
    ):
        pass
    monkeypatch.setattr(folder_lock, "LEASE", 60.0)
    threading.Timer(0.5, process.kill).start()
    with locked_folder(folder):
        assert process.wait() == -9
    process.stdout.close()


def test_of_two_starts_into_one_folder_one_is_refused(tiny, examples, tmp_path, cases):
    command = [
        "finetune/lora.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--eval.max_new_tokens",
        "0",
    ]
    for number in range(cases(1)):
        run = tmp_path / f"run{number}"
        flags = [*command, "--out_dir", run, "--train.max_steps"]
        first = start(*flags, "4", cwd=tmp_path, stderr=subprocess.PIPE)
        # at once, or a moment later
        time.sleep(random.Random(number).random() * (number % 3))
        second = start(*flags, "5", cwd=tmp_path, stderr=subprocess.PIPE)
        processes = [first, second]
        errors = [process.communicate(timeout=120)[1] for process in processes]
        codes = [process.returncode for process in processes]
        assert sorted(codes) == [0, 2], (number, errors)
        winner = codes.index(0)
        refused = errors[1 - winner]
        # the winner may not have written its name yet
        assert f"{run.name} is in use by " in refused or "already contains a run" in refused
        steps = 4 + winner
        assert [int(row["step"]) for row in rows_of(run) if "loss" in row] == list(
            range(1, steps + 1)
        )
        assert f"max_steps: {steps}" in (run / "config.yaml").read_text()


def test_a_run_is_not_resumed_or_overwritten_while_it_runs(begin, tiny, examples, tmp_path):
    command = [
        "finetune/lora.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--out_dir",
        "run",
    ]
    script(*command, "--train.max_steps", "2", cwd=tmp_path)
    before = {
        path: path.read_bytes() for path in tmp_path.glob("run/**/*") if path.is_file()
    }
    process = begin(HOLD, tmp_path / "run")
    for flag in ("--resume", "--overwrite"):
        done = script(*command, flag, cwd=tmp_path, code=2)
        assert f"run is in use by process {process.pid}" in done.stderr
    end(process, signal.SIGKILL)
    (tmp_path / "run" / LOCK).unlink()
    assert {
        path: path.read_bytes() for path in tmp_path.glob("run/**/*") if path.is_file()
    } == before


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["SIGTERM", "SIGKILL"],
)
def test_an_interrupted_export_leaves_nothing_after_the_next_one(
    begin, tmp_path, number, code
):
    process = begin(FILL, tmp_path / "out")
    with pytest.raises(ValueError, match=f"out is in use by process {process.pid}"):
        write_folder(str(tmp_path / "out"), lambda partial: None)
    assert end(process, number) == code
    if number != signal.SIGKILL:
        assert not list(tmp_path.iterdir())
    write_folder(
        str(tmp_path / "out"), lambda partial: (partial / "model").write_text("whole")
    )
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.glob("**/*"))] == [
        "out",
        "out/model",
    ]


def test_a_folder_that_was_filled_in_the_meantime_is_kept(tmp_path):
    """The second export has looked before the first one was complete."""

    def fill(partial: Path) -> None:
        raise AssertionError("the folder is not free")

    (tmp_path / "out").mkdir()
    with (
        pytest.raises(ValueError, match="already exists"),
        atomic_folder(tmp_path / "out") as partial,
    ):
        (partial / "model").write_text("first")
        (tmp_path / "out" / "model").write_text("first")
        write_folder(str(tmp_path / "out"), fill)
    assert (tmp_path / "out" / "model").read_text() == "first"


def test_texts_of_two_writers_are_whole(tmp_path):
    path = tmp_path / "config.yaml"
    code = "import sys; from pathlib import Path; from litft.atomic import atomic_write\n"
    code += "for _ in range(200): atomic_write(Path(sys.argv[1]), sys.argv[2] * 4000)"
    writers = [
        subprocess.Popen([sys.executable, "-c", code, path, letter], env=ENV)
        for letter in "ab"
    ]
    while any(writer.poll() is None for writer in writers):
        text = path.read_text() if path.is_file() else ""
        assert len(set(text)) <= 1 and len(text) in (0, 4000)
    assert [writer.returncode for writer in writers] == [0, 0]
    atomic_write(path, "whole")
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_what_is_put_into_the_folder_meanwhile_is_kept(tmp_path):
    """The export is refused at its end; at its beginning for a mount point, such as /."""
    out = tmp_path / "out"

    def fill(partial):
        out.mkdir()
        (out / "notes.txt").write_text("mine")

    with pytest.raises(ValueError, match="already exists and is not an empty folder"):
        write_folder(str(out), fill)
    assert (out / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="is a mount point; name a folder in it"):
        mount_point = next(path for path in ("/proc", "/dev/shm") if os.path.ismount(path))
        _check_mount(Path(mount_point), mount_point)


def test_a_folder_that_its_owner_deletes_meanwhile_is_made_again(tmp_path, monkeypatch):
    """Between the two steps of the next process: to make the folder and to open its lock."""
    folder = tmp_path / "run"
    open_file = Path.open

    def open_later(path, *args, **kwargs):
        if path.name == LOCK and not deleted:
            deleted.append(path)
            folder.rmdir()
        return open_file(path, *args, **kwargs)

    deleted: list[Path] = []
    monkeypatch.setattr(Path, "open", open_later)
    with locked_folder(folder):
        (folder / "config.yaml").write_text("a")
    assert deleted and (folder / "config.yaml").is_file()


def test_a_run_that_is_deleted_is_one_until_its_end(tmp_path, monkeypatch):
    """After a kill, --overwrite deletes the rest."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, "lora", "seed: 1\n", launch=None)
    (folder / "metrics.csv").write_text("step\n")
    deleted = []
    monkeypatch.setattr(Path, "iterdir", lambda path: sorted(path.glob("*")))
    monkeypatch.setattr(Path, "unlink", lambda path: deleted.append(path.name))
    clear(folder)
    assert deleted == ["metrics.csv", "config.yaml"]
