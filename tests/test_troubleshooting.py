"""tutorials/troubleshooting.md has a row for every warning that litft prints."""

import ast
import re

from conftest import ROOT

PAGE = ROOT / "tutorials" / "troubleshooting.md"
PREFIX = "warning: "


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
                found[text] = sorted((part.strip(" ,;:()") for part in parts), key=len)[::-1]
    # a text that is formatted is found once more as the constant at its beginning
    whole = {}
    for text, parts in found.items():
        if not any(text != other and other.startswith(text) for other in found):
            whole[text] = parts
    return whole


def rows():
    """Return what the lines of the last table say."""
    table = PAGE.read_text("utf-8").partition("## Warnings")[2]
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


def test_symptoms_name_flags_that_exist():
    from litft.args import FullFinetuneArgs, GenerateArgs, LoRAFinetuneArgs, PlanArgs, ServeArgs
    from litft.args.flag_types import types_of_flags

    known = set()
    for kind in (FullFinetuneArgs, LoRAFinetuneArgs, PlanArgs, GenerateArgs, ServeArgs):
        known |= set(types_of_flags(kind))
    for flag in re.findall(r"--([a-z_.]+)", PAGE.read_text("utf-8")):
        assert flag in known, flag
