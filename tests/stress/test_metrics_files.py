"""metrics.csv with random damage: its whole rows are read, or a message says that it has no
header."""

import random

import pytest
from mistakes import failure

from litft.run_dir import metrics_rows

ROWS = "".join(f"{step},{4 * step},1.5,\n" for step in range(1, 20))
CONTENT = f"step,samples,loss,note\n{ROWS}".encode()


def damaged(generator):
    """Return the file with zero bytes, other bytes, quotes, a byte order mark or a copied part; or
    cut."""
    content = bytearray(CONTENT)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(content))
        kind = generator.choice(("zeros", "zeros", "byte", "cut", "quote", "mark", "copy"))
        if kind == "zeros":
            content[at : at + generator.randint(1, 40)] = bytes(generator.randint(1, 40))
        elif kind == "byte":
            content[at] = generator.randrange(256)
        elif kind == "cut":
            del content[at + 1 :]
        elif kind == "quote":
            content[at:at] = b'"'
        elif kind == "mark":
            content[at:at] = b"\xff\xfe"
        else:
            start = generator.randrange(len(content))
            content[at:at] = content[start : start + generator.randint(1, 60)]
    return bytes(content)


def test_damaged_files(tmp_path, cases):
    path = tmp_path / "metrics.csv"
    failures = []
    for number in range(cases(300)):
        path.write_bytes(damaged(random.Random(number)))
        problem = failure(lambda: list(metrics_rows(path)))
        if problem:
            failures.append(f"{number}: {problem}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    "damage", ['2,"3.0\n', "2,\0\0\0\n"], ids=["a quotation mark", "zero bytes"]
)
def test_rows_around_the_damage_are_kept(tmp_path, damage):
    """A quotation mark opens a cell that ends at the next one; zero bytes are refused before Python
    3.11."""
    rows = "".join(f"{step},1.5\n" for step in range(3, 60_000))
    (tmp_path / "metrics.csv").write_text(f"step,loss\n1,2.0\n{damage}{rows}")
    steps = [int(row["step"]) for row in metrics_rows(tmp_path / "metrics.csv")]
    assert steps[0] == 1 and steps[-1] == 59_999 and len(steps) >= 59_997
