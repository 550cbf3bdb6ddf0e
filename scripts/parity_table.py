"""Measure how far litft's logits are from transformers', and print the table in
tutorials/families.md.

python scripts/parity_table.py [--families llama,gemma2] [--write]
"""

import sys
import tempfile
from pathlib import Path

from tables import ROOT, parser, write

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PAGE = "tutorials/families.md"


def table(families: list[str]) -> str:
    """Return a Markdown table: per family the worst difference of its variations, relative to the
    largest logit."""
    import parity

    import litft

    measures = {
        "plain": parity.plain_difference,
        "right-padded": parity.padded_difference,
        "cached": parity.cached_difference,
        "packed": parity.packed_difference,
    }
    lines = [
        f"| family | variations | {' | '.join(measures)} |",
        "|---" * (len(measures) + 2) + "|",
    ]
    for family in families:
        config_class, variations = parity.ROWS[family]
        worst = dict.fromkeys(measures, 0.0)
        for values in variations.values():
            with tempfile.TemporaryDirectory() as folder:
                reference = parity.build(config_class, Path(folder), **values)
                model, _ = litft.load(folder)
                worst = {
                    name: max(worst[name], measure(reference, model))
                    for name, measure in measures.items()
                }
        figures = " | ".join(f"{value:.0e}" for value in worst.values())
        lines.append(f"| `{family}` | {'; '.join(variations)} | {figures} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table. With --write, also put it into its page."""
    arguments = parser(__doc__, PAGE)
    arguments.add_argument(
        "--families", help="Measure only these families: a,b,c. Default: all."
    )
    args = arguments.parse_args()
    try:
        import parity
    except ImportError as error:
        parser.error(f"{error}; run pip install -e '.[test]'")
    if args.families:
        families = args.families.split(",")
    else:
        families = list(parity.ROWS)
    unknown = []
    for name in families:
        if name not in parity.ROWS:
            unknown.append(name)
    if unknown:
        parser.error(
            f"--families: no row for {', '.join(unknown)}; choose from: {', '.join(parity.ROWS)}"
        )
    if args.write and args.families:
        parser.error("--write replaces the complete table; leave --families out")
    text = table(families)
    print(text, end="")
    if args.write:
        write(ROOT / PAGE, "parity", text)


if __name__ == "__main__":
    main()
