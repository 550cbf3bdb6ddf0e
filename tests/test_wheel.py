"""The `litft` command of a built wheel, run in an empty folder."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENV, ROOT


@pytest.fixture(scope="module")
def litft(tmp_path_factory):
    """A function that runs the `litft` command of an installed wheel, outside the repository."""
    dist, site, empty = (
        tmp_path_factory.mktemp(name) for name in ("dist", "site", "empty")
    )
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", dist, ROOT], check=True
    )
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", site, *dist.glob("*.whl")], check=True
    )
    env = {**ENV, "PYTHONPATH": str(site)}

    def run(words: str, text: str = "", code: int = 0) -> subprocess.CompletedProcess:
        command = [site / "bin" / "litft", *words.split()]
        done = subprocess.run(
            command, cwd=empty, env=env, input=text, capture_output=True, text=True
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr[
            -3000:
        ]
        return done

    print_path = [sys.executable, "-c", "import litft; print(litft.__file__)"]
    library_path = subprocess.run(
        print_path, cwd=empty, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert Path(library_path.strip()).is_relative_to(site)
    run.folder, run.library = empty, site / "litft"
    return run


@pytest.mark.slow
def test_finetune_chat_merge_and_convert(litft):
    done = litft("finetune lora --train.max_steps 2")
    assert "litft chat --checkpoint_dir out/lora/final" in done.stdout
    assert (
        litft(
            "chat --temperature 0 --max_new_tokens 8", text="What is 2 plus 2?\n"
        ).stdout.count("\n")
        == 1
    )
    assert litft("generate --prompt hello --max_new_tokens 4").stdout
    litft("merge_lora --checkpoint_dir out/lora/final --out_dir merged")
    litft("convert_to_hf --checkpoint_dir out/lora --merge false --out_dir adapter")
    litft("convert_hf_checkpoint --checkpoint_dir merged --out_dir clean --precision bf16")
    assert (litft.folder / "merged" / "model.safetensors").is_file()


def test_the_wheel_contains_every_file(litft):
    """Also recipes, templates and the chat page."""
    library = ROOT / "litft"
    files = {
        path.relative_to(library)
        for path in library.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {
        path.relative_to(litft.library)
        for path in litft.library.rglob("*")
        if path.suffix != ".pyc"
    } >= files


@pytest.mark.weekly
def test_the_demo_of_another_method_on_two_processes(litft):
    """With the method's recipe; Fabric starts the second process by running the same command
    again."""
    done = litft(
        "finetune adapter --train.max_steps 2 --eval.exact_match false --devices 2"
    )
    assert (
        "adapter trains" in done.stdout
        and "litft chat --checkpoint_dir out/adapter/final" in done.stdout
    )
    assert (litft.folder / "out" / "adapter" / "final").is_dir()


def test_the_changelog_has_a_section_for_the_version():
    version = re.search(
        r'^__version__ = "(.*)"', (ROOT / "litft" / "__init__.py").read_text(), re.MULTILINE
    )[1]
    first = re.search(
        r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )[1]
    assert re.fullmatch(rf"{re.escape(version)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", first)


def test_help_and_mistakes(litft):
    assert (
        "litft finetune lora" in litft("").stdout and "litft chat" in litft("--help").stdout
    )
    assert litft("finetune lora --help").stdout.startswith("usage: litft finetune lora ")
    assert "no command 'finetune magic'" in litft("finetune magic", code=2).stderr
    assert "did you mean --lora.r?" in litft("finetune lora --lora.rr 3", code=2).stderr
