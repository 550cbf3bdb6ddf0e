"""Mutation testing from a table: `tests/mutations.toml` lists small bugs, and the tests that must
fail on each.

    python tests/mutate.py                  # every entry
    python tests/mutate.py attention -n 2   # whose file, description or tests contain the text
    python tests/mutate.py --check          # only check that each entry's code occurs once
    python tests/mutate.py --move           # find the new place of code that has moved

An entry names its code by file, function and syntax (see mutation_places.py), so that formatting
does not matter. It is applied to a copy of the tree, in which its tests are run, and is killed if
each of its tests fails. Surviving entries are listed, and the exit code is then 1.
"""

import argparse
import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mutation_places import Source, parse_pattern

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "mutations.toml"
IGNORED = shutil.ignore_patterns(
    ".git", ".pytest_cache", "__pycache__", ".ruff_cache", "*.egg-info", "out", "dist"
)
LIMIT = 600  # seconds for the tests of one entry; a bug may make a loop endless


@dataclass(frozen=True)
class Mutation:
    """One entry of the table."""

    what: str  # the bug in a sentence
    file: str
    # is in the function exactly once; in files of other languages, a text that is in the file
    # exactly once
    code: str
    bug: str  # what replaces it
    # node ids; without parameters, at least one case of the test must fail
    tests: list[str]
    function: str = (
        ""  # or class, with its outer ones (`Decoder.step`); empty: the module itself
    )

    @property
    def is_python(self) -> bool:
        """Whether the code is found by its syntax."""
        return self.file.endswith(".py")

    def count(self, source: Source | str) -> int:
        """Return how often the code is in its place."""
        if isinstance(source, str):
            return source.count(self.code)
        return len(source.find(self.function, parse_pattern(self.code)))

    def applied(self, source: Source | str) -> str:
        """Return the file's text with the bug."""
        if isinstance(source, str):
            return source.replace(self.code, self.bug)
        (place,) = source.find(self.function, parse_pattern(self.code))
        return source.replaced(place, self.bug)


def read_table(pattern: str = "") -> list[Mutation]:
    """Return the entries whose file, description or tests contain the pattern."""
    entries = [
        Mutation(**entry) for entry in tomllib.loads(TABLE.read_text("utf-8"))["mutation"]
    ]
    return [
        entry
        for entry in entries
        if pattern in " ".join((entry.file, entry.what, *entry.tests))
    ]


def test_names(path: Path) -> set[str]:
    """Return the functions of a test file."""
    return {
        node.name
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


@cache
def read_source(path: Path) -> Source | str:
    """Return a Python file's text and functions, or the text of another file; an empty text if
    there is no file."""
    text = path.read_text("utf-8") if path.is_file() else ""
    return Source(text) if path.suffix == ".py" else text


def problems(entries: list[Mutation], root: Path = ROOT) -> list[str]:
    """Return messages about code that is not there once, bugs that are not valid Python, and
    missing tests."""
    messages = []
    names: dict[str, set[str]] = {}
    for entry in entries:
        message = _problem_of_code(entry, root)
        if message:
            messages.append(message)
        if entry.code == entry.bug or not entry.tests:
            messages.append(
                f"{entry.file}: {entry.code!r} needs a bug that differs, and tests that fail on it"
            )
        for test in entry.tests:
            file, _, name = test.split("[")[0].partition("::")
            if file not in names:
                names[file] = test_names(root / file) if (root / file).is_file() else set()
            if name not in names[file]:
                messages.append(f"{test}: no such test ({entry.what})")
    repeated = {
        entry.what
        for entry in entries
        if sum(other.what == entry.what for other in entries) > 1
    }
    return messages + [f"described twice: {what}" for what in sorted(repeated)]


def missing_cases(entries: list[Mutation], collected: list[str]) -> list[str]:
    """Return messages about tests that are none of the collected ids: their parameters have
    changed."""
    ids = set(collected)
    ids.update(test.partition("[")[0] for test in collected)
    messages = []
    for entry in entries:
        for test in entry.tests:
            if test not in ids:
                messages.append(f"{test}: no such case ({entry.what})")
    return messages


def collect_tests() -> list[str]:
    """Return the ids of all tests, slow ones included.

    Raises RuntimeError if pytest cannot collect them.
    """
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"pytest --collect-only ended with {done.returncode}:\n{done.stdout[-2000:]}"
        )
    return [line for line in done.stdout.splitlines() if "::" in line]


def _problem_of_code(entry: Mutation, root: Path) -> str | None:
    """Return a message if an entry's code is not found once, or its bug is invalid; None if both
    are right."""
    source = read_source(root / entry.file)
    where = f"{entry.file}, {entry.function or 'outside of functions'}: {entry.code!r}"
    try:
        count = entry.count(source)
    except SyntaxError as error:
        return f"{where} is no statement, expression or header ({error.msg})"
    if count != 1:
        return (
            f"{where} is there {count} times, expected once "
            f"({entry.what}){_proposal(entry, root) if count == 0 else ''}"
        )
    if entry.is_python:
        try:
            ast.parse(entry.applied(source))
        except SyntaxError as error:
            return (
                f"{where}: with {entry.bug!r} it is no valid Python ({error.msg}, line "
                f"{error.lineno})"
            )
    return None


def new_places(entry: Mutation, root: Path = ROOT) -> list[tuple[str, str]]:
    """Return the files and functions that have an entry's code, of all files of the library."""
    if not entry.is_python:
        return []
    pattern = parse_pattern(entry.code)
    found = []
    for folder in ("litft", "scripts", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            source = read_source(path)
            for function in dict.fromkeys(name for name, _ in source.scopes):
                for place in source.find(function, pattern):
                    found.append((path.relative_to(root).as_posix(), place.function))
    return found


def _proposal(entry: Mutation, root: Path) -> str:
    """Return where an entry's code may be now, for a message."""
    places = new_places(entry, root)
    if places:
        listed = "; ".join(
            f"{file}, {function or 'outside of functions'}" for file, function in places[:5]
        )
        return f"\n    it is now in {listed}" + (": run --move" if len(places) == 1 else "")
    source = read_source(root / entry.file)
    if isinstance(source, str) or not source.text:
        return "\n    the file is gone"
    function, text, likeness = source.nearest(entry.function, entry.code)
    if likeness < 0.5:
        return ""
    return f"\n    the nearest is in {function or 'the module'}: {text!r}"


def move(entries: list[Mutation]) -> int:
    """Write the new places of entries whose code has moved, and is in one place, into the table;
    return their number."""
    blocks = TABLE.read_text("utf-8").split("[[mutation]]")
    moved = 0
    for index, entry in enumerate(entries, 1):
        if entry.count(read_source(ROOT / entry.file)):
            continue
        places = new_places(entry)
        if len(places) != 1:
            continue
        file, function = places[0]
        block = blocks[index].replace(f'file = "{entry.file}"', f'file = "{file}"', 1)
        blocks[index] = block.replace(
            f'function = "{entry.function}"', f'function = "{function}"', 1
        )
        moved += 1
    TABLE.write_text("[[mutation]]".join(blocks), "utf-8")
    return moved


def prepare_tree(folder: Path) -> Path:
    """Copy the tree, with a link to ../shared next to it."""
    tree = folder / "litft"
    shutil.copytree(ROOT, tree, ignore=IGNORED, symlinks=True)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return tree


def run_tests(tree: Path, tests: list[str], log: Path) -> None:
    """Run tests of a copy of the tree, in a forked process."""
    import pytest

    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(tree)
    os.environ |= {
        "PYTHONPATH": str(tree),
        "LITFT_TEST_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    sys.dont_write_bytecode = (
        True  # a file may change twice within a second and keep its size
    )
    sys.path[:1] = [str(tree), str(tree / "tests")]
    code = 3
    with contextlib.suppress(SystemExit):
        # the real checkpoints are in the tree's own cache
        options = [
            "-o",
            "addopts=",
            "-o",
            f"cache_dir={ROOT / '.pytest_cache'}",
            "-q",
            "-rfE",
            "--tb=short",
        ]
        code = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(code)


class Runner:
    """Runs the tests of several entries at a time, in forked processes, which need not import torch
    again."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self.survivors = folder, []
        self.trees = [prepare_tree(folder / str(number)) for number in range(count)]
        self.running: dict[int, tuple[Mutation, Path, float]] = {}  # by process id

    def start(self, entry: Mutation) -> None:
        """Apply an entry to a free tree and start its tests."""
        tree = self.trees.pop()
        path = tree / entry.file
        path.write_text(entry.applied(read_source(ROOT / entry.file)), "utf-8")
        if (pid := os.fork()) == 0:
            try:
                run_tests(tree, entry.tests, tree.parent / "log")
            finally:
                os._exit(3)
        self.running[pid] = entry, tree, time.monotonic()

    def wait(self) -> None:
        """Wait until one entry's tests end, report the result, and restore its tree."""
        while True:
            for pid, (entry, tree, start) in self.running.items():
                seconds = time.monotonic() - start
                timed_out = seconds > LIMIT
                if timed_out:
                    os.killpg(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0 if timed_out else os.WNOHANG)
                if ended:
                    del self.running[pid]
                    self.report(
                        entry,
                        seconds,
                        os.waitstatus_to_exitcode(status),
                        (tree.parent / "log").read_text(),
                    )
                    shutil.copyfile(ROOT / entry.file, tree / entry.file)
                    self.trees.append(tree)
                    return
            time.sleep(0.05)

    def report(self, entry: Mutation, seconds: float, code: int, log: str) -> None:
        """Print whether an entry was killed."""
        failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", log, re.MULTILINE)
        passing = [
            test
            for test in entry.tests
            if not any(name == test or name.startswith(f"{test}[") for name in failed)
        ]
        if seconds > LIMIT:
            verdict = "killed (by time)"
        elif code not in (0, 1) and not (passing == [] and code == 1):
            verdict = f"NOT RUN (pytest ended with {code})"
        else:
            verdict = "SURVIVED" if passing else "killed"
        print(f"{verdict:<9} {seconds:5.1f} s  {entry.file}: {entry.what}", flush=True)
        if not verdict.startswith("killed"):
            self.survivors.append(entry)
            print(
                "\n".join(f"          passes: {test}" for test in passing),
                *log.splitlines()[-6:],
                sep="\n",
                flush=True,
            )


def run_all(entries: list[Mutation], count: int) -> list[Mutation]:
    """Run the tests of every entry, `count` at a time; return the survivors."""
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="litft-mutations-") as folder:
        runner, waiting = Runner(count, Path(folder)), list(reversed(entries))
        while waiting or runner.running:
            if waiting and runner.trees:
                runner.start(waiting.pop())
            else:
                runner.wait()
        return runner.survivors


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="a part of the file, the description or a test",
    )
    parser.add_argument("-n", type=int, default=1, help="how many entries at a time")
    parser.add_argument(
        "--check", action="store_true", help="only check that the code and the tests exist"
    )
    parser.add_argument(
        "--move",
        action="store_true",
        help="write the new places of code that has moved into the table",
    )
    args = parser.parse_args()
    if args.move:
        print(f"{move(read_table())} entries have new places")
        return
    entries = read_table(args.pattern)
    if messages := problems(entries):
        sys.exit("\n".join(messages))
    if args.check:
        if messages := missing_cases(entries, collect_tests()):
            sys.exit("\n".join(messages))
        print(
            f"{len(entries)} mutations: every piece of code is there once, every test exists"
        )
        return
    start, survivors = time.monotonic(), run_all(entries, args.n)
    minutes = (time.monotonic() - start) / 60
    print(
        f"{len(entries) - len(survivors)} of {len(entries)} mutations killed, in {minutes:.1f} "
        "minutes"
    )
    sys.exit(1 if survivors or not entries else 0)


if __name__ == "__main__":
    main()
