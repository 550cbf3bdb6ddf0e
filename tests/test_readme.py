"""The README: its length, its recipes, its records; and the flags of every command in it and in the
tutorials."""

import json
import re
import shlex

import pytest
from args.test_cli import SCRIPTS
from conftest import ROOT

from litft.args.parser import parse
from litft.args.recipes import recipes
from litft.cli import COMMANDS
from litft.data.formats import FORMATS, detect_format, preference_kind
from litft.run_dir import command

README = (ROOT / "README.md").read_text("utf-8")
GALLERY = (ROOT / "tutorials" / "gallery.md").read_text("utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "tutorials").glob("*.md"))]
NAMES = {path: name for name, path in SCRIPTS.items()}


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of litft in the code blocks of a page, each with its flags."""
    found = []
    for block in re.findall(r"```(?:text|bash)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(
                r"(?:.*&& )?(?:python ((?:finetune|generate|scripts)/\w+\.py)|litft (.*))",
                line,
            ):
                words = shlex.split(
                    line[match.end(1) :] if match[1] else match[2], comments=True
                )
                size = 2 if words[:1] == ["finetune"] and not match[1] else 1
                name = NAMES.get(match[1]) if match[1] else " ".join(words[:size])
                found.append((name, words if match[1] else words[size:]))
    return [(name, words) for name, words in found if name in COMMANDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_has_flags_that_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    files = set(re.findall(r"cat > (\S+\.yaml)", text))  # written by the page
    for name, words in commands(text):
        # the first reads the flags of a run
        if "--resume" not in words and not files & {*words}:
            ends = [
                number
                for number, word in enumerate(words)
                if word in ("|", "&", "&&", ">", "2>", "||", ";")
            ]
            parse(COMMANDS[name].args, words[: min(ends, default=len(words))])


def test_every_command_that_a_program_suggests_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there are no scripts
    suggested = set()
    for path in (ROOT / "litft").rglob("*.py"):
        suggested |= set(
            re.findall(r"""command\(["']([\w/]+\.py)["']\)""", path.read_text("utf-8"))
        )
    assert {"generate/base.py", "generate/chat.py", "scripts/merge_lora.py"} <= suggested
    for script in suggested:
        assert command(script) == f"litft {NAMES[script]}"


def test_the_readme_is_short_and_names_every_tutorial():
    assert len(README.splitlines()) <= 150
    assert len(commands(README)) >= 9
    for path in PAGES[1:]:
        assert f"tutorials/{path.name}" in README, path.name


def test_the_gallery_has_every_recipe():
    rows = re.findall(
        r"^\| (?:(\d) x )?(\d+ GB) \| `(\S+)` \| (\S+) \| (\d+) x ([\d,]+) \| (.*) \|$",
        GALLERY,
        re.MULTILINE,
    )
    for (devices, memory, name, model, rows_fed, tokens, peak), recipe in zip(
        rows, recipes(), strict=True
    ):
        assert (
            name == recipe.name
            and recipe.model.endswith(f"/{model}")
            and peak == recipe.planned_peak
        )
        assert memory.replace(" ", "") == recipe.memory_of_gpu and int(
            devices or 1
        ) == recipe.flags.get("devices", 1)
        assert int(rows_fed) == recipe.flags["train"]["micro_batch_size"]
        assert int(tokens.replace(",", "")) == recipe.flags.get("data", {}).get(
            "max_seq_length", 2048
        )


def test_the_readmes_records_have_the_formats_that_are_read():
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    records = [json.loads(line) for line in block.splitlines()]
    kinds = [preference_kind(record) for record in records]
    formats = [
        detect_format(record, "README")
        for record, kind in zip(records, kinds, strict=True)
        if kind is None
    ]
    assert sorted(formats) == sorted(FORMATS) and {*kinds} == {None, "pairs", "labels"}
