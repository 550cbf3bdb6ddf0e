"""The README's table of families: what litft's logits differ by from transformers', measured now:

python scripts/parity_table.py [--families llama,gemma2] [--write]
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tables import ROOT, write

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def table(families: list[str]) -> str:
    """A Markdown table: for each family the worst of its variations, as parts of the largest logit."""
    import parity

    import litft

    measures = {
        "plain": parity.plain_difference,
        "right-padded": parity.padded_difference,
        "cached": parity.cached_difference,
        "packed": parity.packed_difference,
    }
    lines = [f"| family | variations | {' | '.join(measures)} |", "|---" * (len(measures) + 2) + "|"]
    for family in families:
        config_class, variations = parity.ROWS[family]
        worst = dict.fromkeys(measures, 0.0)
        for values in variations.values():
            with tempfile.TemporaryDirectory() as folder:
                reference = parity.build(config_class, Path(folder), **values)
                model, _ = litft.load(folder)
                worst = {name: max(worst[name], measure(reference, model)) for name, measure in measures.items()}
        figures = " | ".join(f"{value:.0e}" for value in worst.values())
        lines.append(f"| `{family}` | {'; '.join(variations)} | {figures} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or put it into the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help="Only these, a,b,c. Default: all.")
    parser.add_argument("--write", action="store_true", help="Put the table into README.md, in place of the one there.")
    args = parser.parse_args()
    try:
        import parity
    except ImportError as error:
        parser.error(f"{error}; pip install -e '.[test]'")
    families = args.families.split(",") if args.families else list(parity.ROWS)
    if unknown := [name for name in families if name not in parity.ROWS]:
        parser.error(f"no row for {', '.join(unknown)}; known: {', '.join(parity.ROWS)}")
    if args.write and args.families:
        parser.error("--write needs all families: the README's table is replaced as a whole")
    text = table(families)
    print(text, end="")
    if args.write:
        write(ROOT / "README.md", "parity", text)


if __name__ == "__main__":
    main()
