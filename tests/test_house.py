"""The house's own rules: who may import whom, no forbidden names, nothing that executes a checkpoint."""

import ast
import re
from pathlib import Path

import pytest
from conftest import COLLECTED, ROOT
from mutate import problems, read_table

LIBRARY = ROOT / "litft"
TIERS = [
    {"config", "args", "runs", "signals", "cli"},
    {"rope", "attention", "cache", "linear", "rules", "prompts", "sampling", "tokenizer", "hub", "loss", "mlp"},
    {"model", "families"},
    {"sharding"},
    {"weights", "quantize", "adapter_files", "peft", "data"},
    {
        "blockwise",
        "offload",
        "folder",
        "result",
        "optim",
        "flops",
        "metrics",
        "residence",
        "loggers",
        "report",
        "parallel",
        "together",
        "checkpoint",
        "joined",
        "tensor_parallel",
        "spread",
        "decode",
        "speculate",
        "streaming",
    },
    {
        "job",
        "memory_trace",
        "plan",
        "traffic",
        "preview",
        "remedies",
        "run",
        "train",
        "evaluate",
        "convert",
        "gguf",
        "card",
        "publish",
    },
    {"team", "opened", "generate", "chat", "terminal", "engine", "harness"},
    {"api", "serve", "examples", "scores"},
]
TIER = {name: level for level, names in enumerate(TIERS) for name in names}
TORCHLESS = {"config", "args", "runs", "signals", "cli"}


def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere, dotted."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = [path for path in LIBRARY.rglob("*.py") if path != LIBRARY / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_left_never_imports_right(path):
    room = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
    modules = imports(path)
    ours = {name.split(".")[1] for name in modules if name.startswith("litft.")} & TIER.keys()
    assert all(TIER[other] <= TIER[room] for other in ours), f"{room} imports {ours}"
    if room == "families":
        assert ours <= {"config", "rules", "families"}
    if room == "model":
        assert not ours & {"families", "peft"}
    if room in TORCHLESS:
        assert not any(name.split(".")[0] == "torch" for name in modules)


def test_every_room_has_its_tier():
    rooms = {path.relative_to(LIBRARY).parts[0].removesuffix(".py") for path in FILES}
    assert rooms == TIER.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_every_file_says_what_it_is_and_stays_readable(path):
    tree = ast.parse(path.read_text("utf-8"))
    assert ast.get_docstring(tree)
    assert path.stem not in ("utils", "common", "helpers")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_nothing_is_unpickled_but_weights_and_nothing_evaluated():
    banned = r"\bpickle\.loads?\(|\beval\(|\bexec\(|trust_remote_code|yaml\.load\("
    for path in FILES:
        text = path.read_text("utf-8")
        assert not re.search(banned, text.replace(".eval(", "")), path
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, path


def test_entry_scripts_hold_one_call():
    scripts = [
        ROOT / "scripts" / f"{name}.py"
        for name in ("merge_lora", "prepare_data", "plan", "convert_to_hf", "convert_to_gguf")
    ]
    for path in [*(ROOT / "finetune").glob("*.py"), *(ROOT / "generate").glob("*.py"), *scripts]:
        tree = ast.parse(path.read_text("utf-8"))
        assert f"python {path.relative_to(ROOT)}" in ast.get_docstring(tree)
        assert len(tree.body) == 3 and len(path.read_text().splitlines()) < 15


def test_the_mutation_table_names_lines_and_tests_that_exist(pytestconfig):
    """Every line is in its file once; where all tests were collected, the cases of the tests exist too."""
    entries, collected = read_table(), pytestconfig.stash[COLLECTED]
    assert problems(entries) == []
    files = {test.partition("::")[0] for test in collected}
    named = {test for entry in entries for test in entry.tests if "[" in test and test.partition("::")[0] in files}
    if files >= {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")}:
        assert named <= collected
