"""Run folders: damaged and malicious checkpoints, changed settings, and overwriting; no data is
lost."""

import json
import os
import pickle
import random
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ENV, FORKS, ROOT, script, start
from safetensors.torch import load_file, save_file

import litft
from litft.atomic import atomic_folder
from litft.cli import run as command
from litft.training.output import run_checkpoints
from litft.training.output.file_hashes import HashingWriter

FLAGS = (
    "--train.max_steps 4 --train.global_batch_size 8 "
    "--save.interval 2 --data.val_fraction 0.1".split()
)


@pytest.fixture(scope="module")
def finished_run(tiny, examples, tmp_path_factory):
    """A folder with model/, data.json and the finished run a/."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(tiny, folder / "model")
    shutil.copyfile(examples, folder / "data.json")
    script(
        "finetune/lora.py",
        *"--checkpoint_dir model --data.path data.json --out_dir a".split(),
        *FLAGS,
        cwd=folder,
    )
    return folder


@pytest.fixture
def folder(finished_run, tmp_path, monkeypatch) -> Path:
    """A copy of `finished_run` that a test may damage, as the working directory."""
    monkeypatch.chdir(shutil.copytree(finished_run, tmp_path / "copy"))
    return Path()


def lora(*flags, capsys, code: int | None = 2) -> str:
    """Run `finetune/lora.py` in this process and return stderr."""
    if code is None:
        command("finetune lora", [str(flag) for flag in flags])
        return ""
    with pytest.raises(SystemExit) as error:
        command("finetune lora", [str(flag) for flag in flags])
    stderr = capsys.readouterr().err
    assert error.value.code == code and "error: " in stderr, stderr
    return stderr


FRESH = "--checkpoint_dir model --data.path data.json".split()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def weights(run: str) -> bytes:
    return Path(run, "final", "adapter_model.safetensors").read_bytes()


def damage(path: Path, how: str) -> None:
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20] if how == "truncate" else b"garbage" * 50)


def test_a_checkpoint_executes_nothing(folder, capsys):
    step = folder / "a" / "checkpoints" / "step-000004"
    (step / ".metadata").write_bytes(pickle.dumps(Evil()))
    progress = json.loads((step / "progress.json").read_text())
    progress["files"][".metadata"] = (step / ".metadata").stat().st_size
    # as in a checkpoint of an older version, or of an attacker
    del progress["hash"], progress["hashes"]
    (step / "progress.json").write_text(json.dumps(progress))
    lora("--resume", "--out_dir", "a", capsys=capsys, code=None)
    stdout = capsys.readouterr().out
    assert (
        "step-000004 is damaged" in stdout
        and "does not belong in a checkpoint's index" in stdout
        and not Path("executed").exists()
    )


@pytest.mark.parametrize(
    "name, how",
    [
        (".metadata", "truncate"),
        ("progress.json", "garbage"),
        ("__0_0.distcp", "delete"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(folder, capsys, name, how):
    expected = weights("a")
    damage(folder / "a" / "checkpoints" / "step-000004" / name, how)
    lora("--resume", "--out_dir", "a", capsys=capsys, code=None)
    stdout = capsys.readouterr().out
    assert "step-000004 is damaged" in stdout and "using the checkpoint before it" in stdout
    assert "continuing after step 2" in stdout and weights("a") == expected
    assert sorted(path.name for path in Path("a/checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
    ]


@pytest.mark.parametrize("name", [".metadata", "progress.json", "__0_0.distcp"])
def test_every_flipped_bit_of_a_checkpoint_is_noticed(folder, name):
    step = folder / "a" / "checkpoints" / "step-000004"
    path = step / name
    whole = path.read_bytes()
    run_checkpoints.check_files(step, run_checkpoints.read_progress(step))
    generator = random.Random(0)
    for position in sorted(generator.sample(range(len(whole)), 50)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(
            run_checkpoints.DamagedCheckpoint, match="step-000004 is damaged"
        ):
            run_checkpoints.check_files(step, run_checkpoints.read_progress(step))


def test_a_flipped_bit_falls_back_to_the_checkpoint_before(folder, capsys):
    expected = weights("a")
    path = folder / "a" / "checkpoints" / "step-000004" / "__0_0.distcp"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 16
    path.write_bytes(damaged)
    lora("--resume", "--out_dir", "a", capsys=capsys, code=None)
    stdout = capsys.readouterr().out
    assert (
        "__0_0.distcp has changed since it was written" in stdout
        and "using the checkpoint before it" in stdout
    )
    assert weights("a") == expected


def test_a_truncated_file_is_detected_by_its_size(folder, capsys):
    """It is detected before anything is loaded, even if only padding is missing."""
    path = folder / "a" / "checkpoints" / "step-000004" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    lora("--resume", "--out_dir", "a", capsys=capsys, code=None)
    assert "__0_0.distcp has" in capsys.readouterr().out


def test_without_an_intact_checkpoint_nothing_is_trained(folder, capsys):
    for step in (2, 4):
        damage(
            folder / "a" / "checkpoints" / f"step-00000{step}" / "progress.json", "truncate"
        )
    before = contents(folder)
    stderr = lora("--resume", "--out_dir", "a", capsys=capsys)
    assert (
        "step-000004 is damaged" in stderr
        and "step-000002 is damaged" in stderr
        and "--overwrite starts again from step 0" in stderr
    )
    assert contents(folder) == before


def test_a_damaged_checkpoint_is_not_kept_after_a_fallback(folder, capsys):
    """With one checkpoint to keep, the damaged one must not be kept."""
    damage(folder / "a" / "checkpoints" / "step-000004" / ".metadata", "truncate")
    flags = ["--train.max_steps", "3", "--save.keep_last", "1"]
    lora("--resume", "--out_dir", "a", *flags, capsys=capsys, code=None)
    assert [path.name for path in Path("a/checkpoints").iterdir()] == ["step-000003"]


@pytest.mark.parametrize("words", [["--resume", "--out_dir", "typo"], ["--resume"]])
def test_resume_without_a_run_trains_nothing(folder, capsys, words):
    stderr = lora(*words, capsys=capsys)
    assert (
        "name it with --out_dir, or start one with --checkpoint_dir and --data.path"
        in stderr
        and not Path("typo").exists()
    )


def test_resume_writes_only_into_a_run_folder(folder, capsys):
    before = contents(folder)
    assert "is not a litft run" in lora(
        *FRESH, "--resume", "--out_dir", "model", capsys=capsys
    )
    assert contents(folder) == before


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--train.learning_rate 0.1", "train.learning_rate 0.001, now 0.1"),
        ("--seed 7", "seed 42, now 7"),
        ("--lora.alpha 3", "lora.alpha None, now 3.0"),
        ("--train.global_batch_size 4", "train.global_batch_size 8, now 4"),
        ("--data.mask_prompt false", "training data"),
        ("--train.max_steps 3", "is beyond the run's 3 steps"),
    ],
)
def test_resume_with_changed_settings_is_refused(folder, capsys, flags, message):
    before = contents(folder)
    assert message in lora("--resume", "--out_dir", "a", *flags.split(), capsys=capsys)
    assert contents(folder) == before


def test_resume_with_another_base_or_data_is_refused(folder, capsys):
    records = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps(records[:20]))
    message = lora("--resume", "--out_dir", "a", capsys=capsys)
    assert (
        "was saved with other training data: a data file, a data flag or the tokenizer has changed"
        in message
    )
    (folder / "data.json").write_text(json.dumps(records))
    tensors = load_file(folder / "model" / "model.safetensors")
    save_file(
        {name: tensor + 0.01 for name, tensor in tensors.items()},
        folder / "model" / "model.safetensors",
    )
    assert "base model" in lora("--resume", "--out_dir", "a", capsys=capsys)


def test_a_run_that_split_its_examples_differently_is_not_resumed(folder, capsys):
    """design.md 4.16: a run from before examples were split by their content."""
    for path in (folder / "a" / "checkpoints").glob("*/progress.json"):
        progress = json.loads(path.read_text())
        assert progress["identity"].pop("split") and progress.pop("hash")
        path.write_text(json.dumps(progress))
    assert "would now train on examples it was validated on" in lora(
        "--resume", "--out_dir", "a", capsys=capsys
    )


@pytest.mark.parametrize(
    "given",
    [
        ["--checkpoint_dir", "a/final"],
        ["--checkpoint_dir", "a/model"],
        ["--data.path", "a/data.json"],
    ],
)
def test_overwrite_never_deletes_what_the_run_reads(folder, capsys, given):
    shutil.copytree("model", "a/model")
    shutil.copyfile("data.json", "a/data.json")
    before = contents(folder)
    stderr = lora(*FRESH, *given, "--out_dir", "a", "--overwrite", capsys=capsys)
    assert (
        f"--overwrite would delete {given[1]}, which this run reads" in stderr
        and contents(folder) == before
    )


@pytest.mark.parametrize(
    "flags",
    [
        "--train.learning_rate nan",
        "--train.max_grad_norm .inf",
        "--seed 99999999999",
        "--lora.targets no",
    ],
)
def test_an_invalid_flag_leaves_the_old_run(folder, capsys, flags):
    before = contents(folder)
    lora(*FRESH, "--out_dir", "a", "--overwrite", *flags.split(), capsys=capsys)
    assert contents(folder) == before


def test_a_folder_with_another_config_yaml_is_not_a_run(folder, capsys):
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("mine: 1\n")
    assert "is not a litft run" in lora(
        *FRESH, "--out_dir", "mine", "--overwrite", capsys=capsys
    )
    assert Path("mine/config.yaml").is_file()


@pytest.mark.parametrize("text", ["[1, 2]", "5", "train: {epochs: x}", "a: [", "b: 1"])
def test_a_broken_config_is_reported_on_resume(folder, capsys, text):
    Path("a/config.yaml").write_text(f"# A run of litft\n{text}")
    lora("--resume", "--out_dir", "a", capsys=capsys)
    assert Path("a/config.yaml").read_text().endswith(text)


def test_continuing_from_an_adapter_uses_the_new_dropout(folder, capsys):
    lora(
        "--checkpoint_dir",
        "a/final",
        *FRESH[2:],
        *FLAGS,
        "--lora.dropout",
        "0.5",
        "--out_dir",
        "b",
        capsys=capsys,
        code=None,
    )
    before, after = (
        json.loads(Path(f"{run}/final/adapter_config.json").read_text()) for run in "ab"
    )
    assert (before["lora_dropout"], after["lora_dropout"]) == (0.0, 0.5)
    before, after = (
        json.loads(Path(f"{run}/final/litft.json").read_text()) for run in "ab"
    )
    assert before["base_fingerprint"] == after["base_fingerprint"]
    assert Path("b/final", after["base_path"]).resolve() == Path("model").resolve()


def test_nan_is_found_before_training(folder, capsys):
    tensors = load_file(folder / "model" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, folder / "model" / "model.safetensors")
    stderr = lora(*FRESH, *FLAGS, "--out_dir", "b", capsys=capsys)
    assert "step 0: the validation loss is nan" in stderr and not Path("b/final").exists()


def test_a_run_that_diverges_stops(folder, capsys):
    stderr = lora(
        *FRESH, *FLAGS, "--train.learning_rate", "2e9", "--out_dir", "b", capsys=capsys
    )
    assert (
        "so training cannot continue; start another run with a lower --train.learning_rate (now "
        in stderr
        and not Path("b/final").exists()
    )


def test_an_unfinished_run_is_reported(folder, tmp_path):
    shutil.rmtree("a/final")
    done = script(
        "generate/base.py", "--checkpoint_dir", "a", "--prompt", "x", cwd=Path.cwd(), code=2
    )
    assert "is a run that has not finished; continue it with --resume" in done.stderr


def test_commands_without_a_folder_say_which_run_they_took(folder, capsys):
    shutil.copytree("a", "out/a")
    shutil.rmtree("out/a/final")
    command("finetune lora", ["--resume"])
    assert (
        f"--resume: continuing {Path('out/a')}, the newest unfinished run"
        in capsys.readouterr().err
    )
    done = script(
        "generate/base.py", "--prompt", "a", "--max_new_tokens", "2", cwd=Path.cwd()
    )
    assert (
        f"using {Path('out/a')}, the newest finished run; --checkpoint_dir names another model"
        in done.stderr
    )


def test_two_simultaneous_runs_get_separate_folders(folder):
    env = {"OMP_NUM_THREADS": "1"}
    runs = [
        start("finetune/lora.py", *FRESH, *FLAGS, cwd=Path.cwd(), env=env) for _ in range(2)
    ]
    assert [run.wait() for run in runs] == [0, 0]
    assert sorted(path.name for path in Path("out").iterdir()) == ["lora", "lora-2"]
    assert all((path / "final").is_dir() for path in Path("out").iterdir())


def test_a_path_that_cannot_be_used_gives_one_message(folder, capsys):
    assert "data.json" in lora(*FRESH, "--out_dir", "data.json/x", capsys=capsys)
    Path("deep").symlink_to("deep")
    assert "deep" in lora(*FRESH, "--out_dir", "deep/x", capsys=capsys)
    assert "name too long" in lora(*FRESH, "--out_dir", "x" * 5000, capsys=capsys).lower()


def test_a_closed_pipe_gives_no_traceback(folder):
    pipeline = (
        f"{FORKS}/bin/python {ROOT}/generate/base.py --checkpoint_dir model --prompt a "
        "--max_new_tokens 200 --seed 1"
    )
    done = subprocess.run(
        ["bash", "-c", f"{pipeline} | head -c 3"],
        env=ENV,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


def test_resume_keeps_the_validation_set(folder, capsys):
    """Losses on other examples could not be compared with the earlier ones, nor select the best
    checkpoint."""
    records = json.loads((folder / "data.json").read_text())
    for name, subset in (("first", records[:5]), ("second", records[5:9])):
        (folder / f"{name}.json").write_text(json.dumps(subset))
    lora(
        *FRESH,
        "--data.val_path",
        "first.json",
        "--train.max_steps",
        1,
        "--out_dir",
        "b",
        capsys=capsys,
        code=None,
    )
    flags = ["--resume", "--out_dir", "b", "--train.max_steps", 2]
    assert "validation data" in lora(
        *flags, "--data.val_path", "second.json", capsys=capsys
    )
    lora(*flags, capsys=capsys, code=None)


@pytest.mark.parametrize("line", ["out_dir: other", "overwrite: true"])
def test_a_run_continues_in_its_own_folder(folder, capsys, line):
    """A line that someone has added to config.yaml must not lead to another folder."""
    config = Path("a/config.yaml")
    config.write_text(config.read_text() + line + "\n")
    before = contents(folder)
    assert "is no setting of a run; remove the line" in lora(
        "--resume", "--out_dir", "a", capsys=capsys
    )
    assert contents(folder) == before


def test_a_base_for_what_is_no_adapter_is_refused(folder, capsys):
    shutil.rmtree("a")
    message = lora(
        "--checkpoint_dir",
        "model",
        "--data.path",
        "data.json",
        "--base_dir",
        "model",
        capsys=capsys,
    )
    assert "--base_dir model: model is no adapter, so it has no base model" in message
    with pytest.raises(ValueError, match="is no adapter"):
        litft.load("model", base_dir="model")


def test_the_cause_of_a_failed_write_is_named(tmp_path):
    """torch's own error is one of its zip writer.

    A limit on the size of files stands for a full disk.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with (
            pytest.raises(OSError, match="File too large"),
            HashingWriter(tmp_path).fs.create_stream(tmp_path / "file", "wb") as stream,
        ):
            torch.save(torch.zeros(2**20), stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    "error",
    [
        OSError("196608 requested and 73152 written"),  # numpy
        # safetensors
        OSError(
            0,
            "Error while serializing: I/O error: No space left on device (os error 28)",
            "x",
        ),
        # shutil, of the source
        OSError(28, "No space left on device", "base/tokenizer.json"),
    ],
)
def test_a_full_disk_is_named_while_a_folder_is_written(tmp_path, error):
    with (
        pytest.raises(OSError, match=r"the disk is full: .*out"),
        atomic_folder(tmp_path / "out"),
    ):
        raise error
    assert not list(tmp_path.iterdir())
