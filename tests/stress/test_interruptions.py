"""Exports that are interrupted at random moments, and runs whose files have flipped bits."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import adapted, script, start

import litft
from litft.args import DataArgs, EvalArgs, LoRAArgs, LoRAFinetuneArgs, SaveArgs, TrainArgs
from litft.cli import run as command
from litft.methods import LoRA

EXPORTS = (
    "scripts/merge_lora.py",
    "scripts/convert_to_hf.py",
    "scripts/convert_to_gguf.py",
)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory) -> Path:
    """A LoRA adapter of a tiny model."""
    return adapted(
        tiny, tmp_path_factory.mktemp("adapters") / "adapter", LoRA(LoRAArgs(r=4))
    )


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.halved
def test_interrupted_exports(adapter, tmp_path, cases, name):
    """The next export into the same folder is whole, and nothing else is left."""
    script(name, "--checkpoint_dir", adapter, "--out_dir", "whole", cwd=tmp_path)
    # the first process also starts the server that forks the others
    began = time.monotonic()
    script(name, "--checkpoint_dir", adapter, "--out_dir", "again", cwd=tmp_path)
    seconds = time.monotonic() - began
    expected = files_of(tmp_path / "whole")
    assert any(len(content) > 10_000 for content in expected.values())
    for number in range(cases(2)):
        generator = random.Random(number)
        folder = tmp_path / f"case{number}"
        folder.mkdir()
        process = start(name, "--checkpoint_dir", adapter, "--out_dir", "whole", cwd=folder)
        time.sleep(generator.random() * seconds)
        process.send_signal(generator.choice((signal.SIGTERM, signal.SIGKILL)))
        process.wait(60)
        if not (folder / "whole").exists():  # otherwise the signal was too late
            script(name, "--checkpoint_dir", adapter, "--out_dir", "whole", cwd=folder)
        assert [path.name for path in folder.iterdir()] == ["whole"], number
        assert files_of(folder / "whole") == expected, number
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def begun(tiny, examples, tmp_path_factory) -> Path:
    """A run of four steps that is to be continued, with a checkpoint, samples and the best weights
    so far."""
    folder = tmp_path_factory.mktemp("runs") / "begun"
    args = LoRAFinetuneArgs(
        checkpoint_dir=str(tiny),
        out_dir=str(folder),
        data=DataArgs(path=[str(examples)], val_fraction=0.2),
        train=TrainArgs(max_steps=4, global_batch_size=4, lr_schedule="constant"),
        eval=EvalArgs(interval=2, max_new_tokens=2),
        save=SaveArgs(interval=2, best=True),
    )
    litft.finetune(args)
    return folder


def resumed(folder: Path) -> bytes:
    """Continue a run for two steps and return its weights; raise SystemExit if it is refused."""
    command(
        "finetune lora", ["--resume", "--out_dir", str(folder), "--train.max_steps", "6"]
    )
    return (folder / "final" / "adapter_model.safetensors").read_bytes()


@pytest.mark.halved
def test_flipped_bits_in_a_run(begun, tmp_path, cases, capsys):
    """A bit in any file of a run changes nothing in what is learned, or is noticed."""
    whole = tmp_path / "whole"
    shutil.copytree(begun, whole)
    expected = resumed(whole)
    names = sorted(files_of(begun))
    silent = []
    for number in range(cases(4)):
        generator = random.Random(number)
        folder = tmp_path / f"case{number}"
        shutil.copytree(begun, folder)
        name = names[number % len(names)]
        path = folder / name
        content = bytearray(path.read_bytes())
        if not content:
            continue
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        capsys.readouterr()
        try:
            is_same = resumed(folder) == expected
        except SystemExit as error:
            assert error.code == 2
            is_same = True
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        if not is_same and "damaged" not in shown.out + shown.err:
            silent.append(f"{number}: {name}")
        shutil.rmtree(folder)
    assert not silent, silent
