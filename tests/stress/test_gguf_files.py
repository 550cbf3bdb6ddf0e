"""GGUF files with random damage: they are converted, or end in one message."""

import random
import struct
from pathlib import Path

import pytest
from mistakes import failure

from litft.args import GgufConvertArgs, GgufExportArgs
from litft.commands.convert_gguf_checkpoint import read
from litft.commands.convert_to_gguf import write


@pytest.fixture(scope="module")
def content(tiny, tmp_path_factory) -> bytes:
    """A GGUF file of a tiny model."""
    folder = write(
        GgufExportArgs(
            checkpoint_dir=str(tiny),
            out_dir=str(tmp_path_factory.mktemp("gguf") / "file"),
            outtype="f32",
        )
    )
    return next(folder.glob("*.gguf")).read_bytes()


def damaged(content: bytes, generator: random.Random) -> bytes:
    """Return a file with a few flipped bits, other numbers, or missing bytes, most of them in what
    describes the tensors."""
    described = content.index(b"\0" * 64) if generator.random() < 0.8 else len(content)
    kind = generator.choice(("bits", "bits", "number", "cut", "gap", "repeat"))
    changed = bytearray(content)
    for _ in range(generator.randint(1, 3)):
        position = generator.randrange(described)
        if kind == "bits":
            changed[position] ^= 1 << generator.randrange(8)
        elif kind == "number":  # a count or a size of eight bytes
            number = generator.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1))
            changed[position : position + 8] = number.to_bytes(8, "little")
        elif kind == "cut":
            del changed[position:]
            break
        elif kind == "gap":
            del changed[position : position + generator.randint(1, 40)]
        else:
            changed[position:position] = changed[
                position : position + generator.randint(1, 40)
            ]
    return bytes(changed)


def convert(path: Path, out: Path) -> str | None:
    """Return how the conversion of a file failed."""
    return failure(
        lambda: read(GgufConvertArgs(checkpoint_dir=str(path), out_dir=str(out)))
    )


def test_damaged_files(content, tmp_path, cases):
    failures = []
    for number in range(cases(20)):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged(content, random.Random(number)))
        problem = convert(path, tmp_path / f"out{number}")
        if problem:
            failures.append(f"{number}: {problem}")
        path.unlink()
    assert not failures, "\n".join(failures)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "name",
    [
        "x-00001-of-00000.gguf",
        "x-00000-of-00001.gguf",
        "x-00001-of-99999.gguf",
        "x-2-of-1.gguf",
    ],
)
def test_names_of_parts_that_do_not_exist(content, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(content)
    assert convert(path, tmp_path / "out") is None


def test_weights_that_are_no_numbers(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content[:-4] + struct.pack("<f", float("nan")))
    with pytest.raises(
        ValueError, match="contains NaN or infinity in float32: the weights that it is made"
    ):
        read(GgufConvertArgs(checkpoint_dir=str(path), out_dir=str(tmp_path / "out")))
