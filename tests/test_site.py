"""The site: every page is in its navigation, llms.txt lists it, and links within it have targets."""

import re

import pytest
from conftest import ROOT, load_script

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(
        ROOT / name
        for name in ("litft/README.md", "tests/README.md", "tests/gpu/README.md")
    ),
    *sorted((ROOT / "tutorials").glob("*.md")),
]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.fixture(scope="module")
def hooks():
    """The module scripts/site_hooks.py."""
    return load_script("site_hooks")


def anchors(path):
    """Return the anchors that GitHub and mkdocs give to the headings of a page."""
    text = FENCE.sub("", path.read_text("utf-8"))
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        found.add(re.sub(r"\s", "-", plain))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_has_a_target(path):
    text = FENCE.sub("", path.read_text("utf-8"))
    for target, anchor in LINK.findall(text):
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), f"{target}#{anchor}"


def test_every_page_is_in_the_navigation(hooks):
    listed = {page.path for page in hooks.pages()}
    assert listed == {None, *PAGES}


def test_llms_txt_is_of_these_pages(hooks):
    assert hooks.LLMS.read_text("utf-8") == hooks.llms_text(), (
        "python scripts/site_hooks.py"
    )
    # each guide with what it is for
    for page in hooks.pages():
        if page.path in PAGES[6:]:
            line = f"({page.path.relative_to(ROOT)})"
            assert line in hooks.llms_text()


@pytest.mark.parametrize(
    "source, text, expected",
    [
        ("README.md", "[a](tutorials/chat.md)", "[a](chat.md)"),
        ("README.md", "![a](tutorials/images/demo.png)", "![a](images/demo.png)"),
        ("README.md", "[a](litft/README.md#the-rooms)", "[a](code.md#the-rooms)"),
        ("litft/README.md", "[a](../tutorials/chat.md)", "[a](chat.md)"),
        ("tutorials/chat.md", "[a](../tests/gpu/README.md)", "[a](gpu_tests.md)"),
        ("tutorials/chat.md", "[a](serve.md#clients)", "[a](serve.md#clients)"),
        ("tutorials/chat.md", "[a](../scripts/plan.py)", "a"),
        ("tutorials/chat.md", "[a](https://b.c) [d](#e)", "[a](https://b.c) [d](#e)"),
    ],
)
def test_links_are_those_of_the_site(hooks, source, text, expected):
    assert hooks.in_site(text, source) == expected


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_table_has_a_header(path):
    """A blank line within a table ends it: what follows would be shown as it is written."""
    text = FENCE.sub("", path.read_text("utf-8"))
    for block in re.split(r"\n\s*\n", text):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        if rows:
            assert len(rows) > 1 and re.fullmatch(r"\|(?:\s*:?-+:?\s*\|)+", rows[1]), rows[
                0
            ]
