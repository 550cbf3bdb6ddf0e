"""The pages of the site that are not in tutorials/, for mkdocs.yml; and llms.txt, the list of all
pages for language models (llmstxt.org).

python scripts/site_hooks.py     (writes llms.txt, from the navigation in mkdocs.yml)
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
GUIDES = "tutorials"
LLMS = ROOT / "llms.txt"
# a page of the site -> the file that it is made of
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "code.md": "litft/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "tests.md": "tests/README.md",
    "gpu_tests.md": "tests/gpu/README.md",
}
API_PAGE = "api.md"
# the public functions, and where they are defined
API = {
    "finetune": "litft.python_api.finetune",
    "load": "litft.pretrained.load.load",
    "generate": "litft.inference.streaming.generate",
    "stream": "litft.inference.streaming.stream",
}
API_TEXT = """# The functions of litft

[From Python](python.md) shows them in use.

"""
# [text](target), and the same of a picture; links within a page or to other sites stay
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
ANY_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
GOAL = re.compile(r"At the end of this page, (.*?[.])(?:\s|$)", re.DOTALL)


class Page(NamedTuple):
    """A page in the navigation: its section, its name in the site, and its file."""

    section: str
    name: str
    path: Path | None  # None: made for the site


def pages() -> list[Page]:
    """Return the pages in the order of the navigation."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    found = []
    for entry in navigation:
        for section, names in entry.items():
            for name in names:
                source = OUTSIDE.get(name, f"{GUIDES}/{name}")
                found.append(
                    Page(section, name, None if name == API_PAGE else ROOT / source)
                )
    return found


def in_site(text: str, source: str) -> str:
    """Return a page of the repository with links as they are in the site.

    source: its path in the repository. Links to files that the site lacks become their text.
    """
    names = {path: name for name, path in OUTSIDE.items()}

    def replaced(match: re.Match[str]) -> str:
        picture, label, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in names:
            return f"{picture}[{label}]({names[path]}{anchor or ''})"
        if path.startswith(f"{GUIDES}/"):
            return f"{picture}[{label}]({path.removeprefix(f'{GUIDES}/')}{anchor or ''})"
        return label

    return LINK.sub(replaced, text)


def api_page() -> str:
    """Return the page of the functions, which mkdocstrings fills from their docstrings."""
    text = API_TEXT
    for name, place in API.items():
        text += f"::: {place}\n    options: {{heading: litft.{name}}}\n\n"
    return text


def llms_text() -> str:
    """Return llms.txt: what litft is, and every page with what a reader knows after it."""
    readme = (ROOT / "README.md").read_text("utf-8")
    # the paragraph below the title
    summary = " ".join(readme.split("\n\n")[1].split())
    lines = ["# litft", "", "> " + ANY_LINK.sub(r"\1", summary), ""]
    lines.append(
        "`litft COMMAND --help` lists the flags of a command; `litft schema --command all`"
    )
    lines.append("prints all of them as JSON Schema.")
    section = ""
    for page in pages():
        if page.path is None:
            continue
        if page.section != section:
            section = page.section
            lines += ["", f"## {section}", ""]
        lines.append(
            f"- [{title_of(page.path)}]({page.path.relative_to(ROOT)}){about(page.path)}"
        )
    return "\n".join(lines) + "\n"


def title_of(path: Path) -> str:
    """Return the title of a page."""
    return path.read_text("utf-8").partition("\n")[0].removeprefix("# ")


def about(path: Path) -> str:
    """Return `: ` and what a reader knows at the end of a guide; nothing for other pages."""
    goal = GOAL.search(path.read_text("utf-8")[:1500])
    if not goal:
        return ""
    return ": " + ANY_LINK.sub(r"\1", " ".join(goal[1].split()))


def of_site(text: str) -> str:
    """Return llms.txt with the addresses of the site in place of files."""
    for page in pages():
        if page.path is not None:
            address = f"{page.name.removesuffix('.md')}/"
            text = text.replace(f"({page.path.relative_to(ROOT)})", f"({address})")
    return text.replace("(index/)", "(./)")


def generated() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each page that is not in tutorials/."""
    for name, source in OUTSIDE.items():
        yield name, in_site((ROOT / source).read_text("utf-8"), source)
    yield API_PAGE, api_page()
    yield "llms.txt", of_site(llms_text())


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside of tutorials/. Called by mkdocs."""
    from mkdocs.structure.files import File

    for name, text in generated():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a guide with links as they are in the site. Called by mkdocs."""
    if page.file.src_uri in OUTSIDE or page.file.src_uri == API_PAGE:
        return markdown
    return in_site(markdown, f"{GUIDES}/{page.file.src_uri}")


if __name__ == "__main__":
    LLMS.write_text(llms_text(), "utf-8")
