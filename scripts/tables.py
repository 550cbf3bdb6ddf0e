"""Shared by the scripts that print a table: write it into its page, between `<!-- NAME: begin -->`
and its end comment."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write(page: Path, name: str, text: str) -> None:
    """Replace the text between the comments of the table `name` by `text`."""
    begin = f"<!-- {name}: begin -->\n"
    end = f"<!-- {name}: end -->"
    old = page.read_text("utf-8")
    assert begin in old and end in old, (
        f"{page} lacks the comments `<!-- {name}: begin -->` and end; add them where the table "
        "belongs"
    )
    new = re.sub(
        f"{re.escape(begin)}.*?{re.escape(end)}",
        lambda _: begin + text + end,
        old,
        flags=re.DOTALL,
    )
    page.write_text(new, "utf-8")


def parser(description: str | None, page: str) -> argparse.ArgumentParser:
    """Return the parser of a script that prints tables; --write puts them into the page."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--write", action="store_true", help=f"Replace what is in {page}.")
    return made


def main(description: str, page: str, name: str, table: Callable[[], str]) -> None:
    """Print the table. With --write, also put it into the page."""
    args = parser(description, page).parse_args()
    text = table()
    print(text, end="")
    if args.write:
        write(ROOT / page, name, text)
