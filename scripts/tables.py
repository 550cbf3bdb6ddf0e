"""A measured table in its page, between `<!-- NAME: begin -->` and its end: what the scripts that make one share."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write(page: Path, name: str, text: str) -> None:
    """Put `text` in the place of what stands there."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    old = page.read_text("utf-8")
    assert begin in old and end in old, f"{page} has no place for {name}"
    new = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: begin + text + end, old, flags=re.DOTALL)
    page.write_text(new, "utf-8")


def main(description: str, page: str, name: str, table: Callable[[], str]) -> None:
    """Print the table, or put it into the page."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"Put the table into {page}, in place of the one there.")
    args = parser.parse_args()
    text = table()
    print(text, end="")
    if args.write:
        write(ROOT / page, name, text)
