"""tutorials/troubleshooting.md has a row for every warning that litft prints, and for every error
that does not say itself what to do."""

import ast
import re

from conftest import ROOT

PAGE = ROOT / "tutorials" / "troubleshooting.md"
PREFIX = "warning: "
ERRORS = ("ValueError", "RankError", "PeerLost")
# words with which a message says what to do
REMEDY = re.compile(
    r";|expected|must|needs? |pip install|such as|is missing|give |name a|there are|at least|at most"
    r"|allowed|choose|use |remove|leave|pass |: add |instead|accept"
)
# their errors are caught by their callers
CAUGHT = {"data/tool_calls.py", "data/stored_messages.py"}


def texts_of(tree):
    """Yield the texts in a file, with \0 in place of values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = []
            for value in node.values:
                pieces.append(value.value if isinstance(value, ast.Constant) else "\0")
            yield "".join(pieces)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def warnings():
    """Return the fixed parts of each warning, the longest first."""
    found = {}
    for path in sorted((ROOT / "litft").rglob("*.py")):
        for text in texts_of(ast.parse(path.read_text("utf-8"))):
            if text.startswith(PREFIX) and text != PREFIX:
                parts = text.removeprefix(PREFIX).split("\0")
                found[text] = sorted((part.strip(" ,;:()") for part in parts), key=len)[
                    ::-1
                ]
    # a text that is formatted is found once more as the constant at its beginning
    whole = {}
    for text, parts in found.items():
        if not any(text != other and other.startswith(text) for other in found):
            whole[text] = parts
    return whole


def text_of(node):
    """Return the text of an expression, with \0 in place of values; empty if it is no text."""
    if isinstance(node, ast.JoinedStr | ast.Constant):
        return next(texts_of(node), "")
    return ""


def raised(tree):
    """Yield the texts of the errors that a file raises."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        if getattr(node.exc.func, "id", "") in ERRORS and node.exc.args:
            yield text_of(node.exc.args[0])


def problems(tree):
    """Yield the texts of the problems of flags."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
            text = text_of(node.args[0])
            if text.startswith("--"):
                yield text


def errors():
    """Return the texts of all errors."""
    found = []
    library = ROOT / "litft"
    for path in sorted(library.rglob("*.py")):
        name = str(path.relative_to(library))
        if name in CAUGHT:
            continue
        tree = ast.parse(path.read_text("utf-8"))
        found += raised(tree)
        if name.startswith("args/"):
            found += problems(tree)
    return found


def needs_a_row(text):
    """Whether a message does not say what to do; one without words of its own passes on another."""
    words = re.findall(r"[a-z]{4,}", re.sub(r"--[\w.]+", "", text))
    return len(words) >= 2 and not REMEDY.search(text)


def rows(title="Warnings"):
    """Return the first cell of each row of a table, without its quotes."""
    table = PAGE.read_text("utf-8").partition(f"## {title}")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)


def test_every_warning_has_a_row_and_every_row_a_warning():
    listed = rows()
    assert len(listed) == len(set(listed)) >= 25
    found = warnings()
    for text in found:
        plain = text.replace("\0", "")
        assert any(row.strip(" ;") in plain or row in text for row in listed), text
    for row in listed:
        assert any(row.strip(" ;") in text.replace("\0", "") for text in found), row


def is_row_of(row, text):
    """Whether a row is about a message: its pieces are in it, in their order."""
    return (
        re.search(".*".join(map(re.escape, row.split(" ... "))), text, re.DOTALL)
        is not None
    )


def test_every_error_says_what_to_do_or_has_a_row():
    listed = rows("Errors")
    assert len(listed) == len(set(listed)) >= 35
    messages = errors()
    assert len(messages) > 500
    for text in filter(needs_a_row, messages):
        assert any(is_row_of(row, text) for row in listed), text
    for row in listed:
        assert any(is_row_of(row, text) for text in messages), row


def test_symptoms_name_flags_that_exist():
    from litft.args import ARGS
    from litft.args.flag_types import types_of_flags

    known = set()
    for kind in ARGS.values():
        known |= set(types_of_flags(kind))
    # of Docker and vLLM
    known |= {
        "shm-size",
        "ipc",
        "enable-lora",
        "max-lora-rank",
        "lora-modules",
        "standalone",
    }
    known |= {"enable-auto-tool-choice", "tool-call-parser"}
    for flag in re.findall(r"--([a-z][a-z_.-]*)", PAGE.read_text("utf-8")):
        # --data.*: the flags of a group
        is_group = flag.endswith(".") and any(name.startswith(flag) for name in known)
        assert flag in known or is_group, flag
