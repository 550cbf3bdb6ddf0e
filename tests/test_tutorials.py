"""The tutorials' commands, run unchanged, and the results of the demo, which the quickstart runs
first."""

import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENV, FORKS, ROOT, STORIES, script
from hub import Hub
from parity import ROWS

from litft.families import families
from litft.pretrained.folder import DEMO

RECORDS = [
    {
        "instruction": f"Tell me story {n}.",
        "input": "",
        "output": "Once upon a time " * (n % 4 + 1),
    }
    for n in range(60)
]


# the model and the examples of a guide
SETUP = re.compile(r"^export (?:CHECKPOINT_DIR|REPO)=.*\n", re.MULTILINE)
EXAMPLE = re.compile("^export CHECKPOINT_DIR=", re.MULTILINE)  # it needs no download
# of guides whose later blocks go on with the run of the first example
AS_IN_THE_GUIDES = {
    "CHECKPOINT_DIR": "litft/demo/base",
    "DATA": "litft/demo/train.jsonl",
}


def blocks(path: Path) -> list[tuple[str, str]]:
    """Return the code blocks of a guide as (language, text)."""
    return re.findall(r"```(bash|python)\n(.*?)```", path.read_text("utf-8"), re.DOTALL)


def run_guide(
    name: str, folder: Path, paths: dict[str, str], example_as_it_stands: bool = True
) -> list[str]:
    """Run the code blocks of a guide; return the output of each.

    The first example runs as it stands: with the demo's model and data, and nothing set before it.
    The other blocks have `paths`, whose model and data are smaller.
    """
    env = {
        **ENV,
        "PATH": f"{FORKS}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    outputs = []
    for language, text in blocks(ROOT / "tutorials" / name):
        as_it_stands = example_as_it_stands and bool(EXAMPLE.search(text))
        if not as_it_stands:
            text = SETUP.sub("", text)
        preset = "".join(f"{name} = {value!r}\n" for name, value in paths.items())
        command = (
            ["bash", "-euo", "pipefail", "-c", text]
            if language == "bash"
            else [sys.executable, "-c", preset + text]
        )
        set_paths = {} if as_it_stands else paths
        done = subprocess.run(
            command, cwd=folder, env=env | set_paths, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr
        outputs.append(done.stdout)
    return outputs


def link_scripts(folder: Path) -> None:
    """Make a folder look like a clone of the repository."""
    for name in ("finetune", "generate", "scripts", "tests", "litft"):
        (folder / name).symlink_to(ROOT / name)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A folder with links to the scripts, and the paths that a reader of the guides sets."""
    folder = tmp_path_factory.mktemp("clone")
    link_scripts(folder)
    (folder / "examples.json").write_text(json.dumps(RECORDS))
    return folder, {"CHECKPOINT_DIR": str(STORIES), "DATA": "examples.json"}


@pytest.fixture(scope="module")
def quickstart(clone) -> tuple[Path, list[str]]:
    """The folder in which the quickstart ran, and the output of each block."""
    folder, paths = clone
    return folder, run_guide("quickstart.md", folder, paths, example_as_it_stands=False)


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_demo_learns_to_answer(quickstart):
    folder, printed = quickstart
    first, *_, last = [
        row for row in rows_of(folder / "out" / "lora") if row["exact_match"]
    ]
    assert float(first["exact_match"]) < 0.05 and float(last["exact_match"]) >= 0.80
    assert float(last["val_loss"]) < float(first["val_loss"])
    assert float(last["seconds"]) <= 180
    for text in (
        "exact match 0.0% (208 answers)",
        "exact match: 0.0% -> ",
        "python generate/chat.py --checkpoint_dir out/lora/final",
    ):
        assert text in printed[0]
    assert printed[1].splitlines() == ["mice", "7"]


@pytest.mark.weekly
def test_the_demo_learns_nothing_from_shuffled_answers(tmp_path):
    """The adapter learns to answer from what the base model has read, so wrong answers must not
    score."""
    records = [
        json.loads(line) for line in (DEMO / "train.jsonl").read_text("utf-8").splitlines()
    ]
    answers = [record["output"] for record in records]
    random.Random(0).shuffle(answers)
    wrong = [
        dict(record, output=answer) for record, answer in zip(records, answers, strict=True)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, wrong)))
    (tmp_path / "val.jsonl").write_bytes((DEMO / "val.jsonl").read_bytes())
    flags = [
        "--config",
        DEMO / "lora.yaml",
        "--checkpoint_dir",
        DEMO / "base",
        "--data.path",
        tmp_path,
        "--out_dir",
        "run",
    ]
    flags += ["--train.epochs", "2", "--eval.max_batches", "3"]
    script("finetune/lora.py", *flags, cwd=tmp_path)
    assert (
        float(
            [row for row in rows_of(tmp_path / "run") if row["exact_match"]][-1][
                "exact_match"
            ]
        )
        < 0.20
    )


def test_the_demo_data_is_as_documented():
    records = {
        name: [json.loads(line) for line in (DEMO / f"{name}.jsonl").open()]
        for name in ("train", "val")
    }
    assert len(records["train"]) >= 1500 and len(records["val"]) == 208
    train_questions = {record["instruction"] for record in records["train"]}
    assert not train_questions & {record["instruction"] for record in records["val"]}
    assert (
        sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= 8 * 2**20
    )
    # held out by entity: no name in a held-out question occurs in a training example
    text = " ".join(record["instruction"] for record in records["train"])
    people = {
        name
        for r in records["val"]
        for name in re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", r["instruction"])
    }
    assert len(people) > 10 and not any(re.search(rf"\b{name}\b", text) for name in people)


@pytest.mark.slow
def test_the_quickstart_writes_its_outputs(quickstart):
    folder, printed = quickstart
    assert (
        len(rows_of(folder / "out" / "mine")) == 21
        and len(rows_of(folder / "out" / "more")) == 6
    )
    answer = json.loads((folder / "out" / "answers.jsonl").read_text())
    assert answer["prompt"] == "Tell me a story." and answer["completion"]
    assert (folder / "out" / "merged" / "model.safetensors").is_file()
    assert printed[-1] == "exit code 2\n"


@pytest.mark.slow
def test_the_example_of_the_quickstart_runs_as_it_stands(tmp_path):
    link_scripts(tmp_path)
    (text,) = (
        text
        for _, text in blocks(ROOT / "tutorials" / "quickstart.md")
        if EXAMPLE.search(text)
    )
    env = {**ENV, "PATH": f"{FORKS}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]


def test_every_guide_is_run():
    tests = Path(__file__).read_text("utf-8")
    for path in (ROOT / "tutorials").glob("*.md"):
        if EXAMPLE.search(path.read_text("utf-8")):
            assert f'"{path.name}"' in tests or f'"{path.stem}"' in tests, path.name


def test_every_guide_says_what_it_leads_to():
    for path in (ROOT / "tutorials").glob("*.md"):
        # a table, and a guide for developers
        if path.stem not in (
            "families",
            "add_a_family",
        ):
            assert "\nAt the end of this page, " in path.read_text("utf-8")[:200], path.name


@pytest.mark.slow
def test_the_guide_to_converting(clone):
    folder, paths = clone
    run_guide("convert.md", folder, paths)
    assert {path.name for path in (folder / "out").iterdir()} >= {
        "clean",
        "run",
        "early",
        "adapter",
    }


@pytest.mark.slow
def test_the_guide_to_data(clone):
    printed = run_guide("prepare_data.md", *clone)
    assert "records (alpaca)" in printed[0] and "MiB at its peak" in printed[1]
    assert "2 records (question)" in printed[2] and "on 1 device" in printed[2]
    assert (
        "2 records (prompt)" in printed[3]
        and "stories.jsonl (with other settings, 2): 1 record" in printed[3]
    )
    assert printed[4].count("⟦") == 1 and "Good morning!" in printed[4].partition("⟦")[2]
    assert "2 records (prompt)" in printed[5] and "⟦" not in printed[5]
    assert (clone[0] / "clean.jsonl").read_text() == (
        clone[0] / "stories.jsonl"
    ).read_text()
    assert "60 records (alpaca)" in printed[7] and "⟦" not in printed[7]  # without copies
    assert "full trains" in printed[8] and "1 x A100" in printed[8]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["finetune_lora", "finetune_adapter", "finetune_full", "quantize", "resume_and_faults"],
)
def test_the_guides_to_methods(clone, name):
    folder, paths = clone
    run_guide(f"{name}.md", folder, paths)
    out_dirs = set(
        re.findall(
            r"--out_dir (\S+)", (ROOT / "tutorials" / f"{name}.md").read_text("utf-8")
        )
    )
    assert out_dirs and all(
        any((folder / out).glob("**/*.safetensors")) for out in out_dirs
    )


@pytest.mark.slow
def test_the_guide_to_performance(clone):
    folder, paths = clone
    printed = run_guide("performance.md", folder, paths)
    assert (
        "full trains" in printed[0]
        and "with 102.4 MiB left to CUDA: --train.micro_batch_size" in printed[1]
    )
    assert (
        "blocks are recomputed" in printed[2]
        and (folder / "out" / "small" / "final" / "model.safetensors").is_file()
    )


@pytest.mark.slow
def test_the_guides_to_many_devices(clone):
    folder, paths = clone
    first, resumed, plan = run_guide("scaling.md", folder, AS_IN_THE_GUIDES)
    assert (
        "(fsdp, as asked for)" in first
        and "continuing after step 4" in resumed
        and "on 1 device" in resumed
    )
    assert "memory of each:" in plan and "GB from other nodes" in plan
    (printed,) = run_guide("multi_node.md", folder, paths)
    assert "on 2 devices" in printed and (folder / "out" / "torchrun" / "final").is_dir()


@pytest.mark.slow
def test_the_guides_to_generating(clone):
    folder, paths = clone
    first, samples, _, drafted, devices, pieces = run_guide("inference.md", folder, paths)
    assert (
        first.strip()
        and len(samples.splitlines()) >= 2
        and drafted.strip()
        and "tokens/s" in pieces
    )
    assert len(devices.splitlines()) >= 2
    answers = [
        json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()
    ]
    assert [answer["prompt"] for answer in answers] == [
        "One day",
        "The cat and the dog",
    ] and answers[0]["id"] == 1
    run_guide("chat.md", folder, paths)
    assert len(json.loads((folder / "talk.json").read_text())[0]["messages"]) == 2


@pytest.mark.weekly
def test_the_guide_to_python(clone):
    first, faq, _, answer = run_guide("python.md", *clone)
    assert first.splitlines()[-1].startswith("out/demo ")
    assert (
        re.search(r"^step 0: .*^step 30: ", faq, re.DOTALL | re.MULTILINE)
        and faq.splitlines()[-1] == "1.0"
    )
    assert answer == "By the river.\n"


@pytest.mark.slow
def test_the_guide_to_serving(clone):
    folder, paths = clone
    _, complete, streamed, shutdown = run_guide("serve.md", folder, paths)
    assert (
        json.loads(complete)["model"] == "mine"
        and json.loads(complete)["usage"]["completion_tokens"]
        and streamed.strip()
    )
    assert "SIGTERM: finishing running answers" in shutdown and "stopped" in shutdown


@pytest.mark.slow
def test_the_guide_to_preferences(clone):
    folder, paths = clone
    first, shown = run_guide("finetune_preferences.md", folder, paths)
    assert (
        "validation accuracy" in first
        and re.search(r"^\| accuracy over the base +\|", first, re.MULTILINE)
        and ", rejected: " in shown
    )
    row = next(row for row in rows_of(folder / "out" / "dpo") if row["val_loss"])
    assert float(row["val_loss"]) == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.weekly
def test_the_guide_to_rewards(clone):
    """The demo raises exact match from below 40 % to above 90 % by rewards alone."""
    folder, paths = clone
    demo, own = run_guide("finetune_rewards.md", folder, paths)
    scores = re.search(r"exact_match \| +\S+ \| +(\S+)", demo)
    assert scores is not None and float(scores[1]) > 0.9, demo
    first, last = re.search(r"validation reward: (\S+) -> (\S+)", demo).groups()
    assert float(first) < 0.4 < float(last)
    assert "validation reward" in own


@pytest.mark.weekly
def test_the_guide_to_teachers(clone):
    """The student learns most of what the teacher knows from half of its examples."""
    (output,) = run_guide("distill.md", *clone)
    matches = re.findall(r"exact match: \S+ -> (\S+)%", output)
    assert float(matches[-1]) > 90, output


@pytest.mark.slow
def test_the_guide_to_scores(clone):
    examples, ranks, task = run_guide("evaluate.md", *clone)
    assert (
        "exact_match" in examples
        and re.search(r"base \| +tuned", examples)
        and "expected:" in examples
    )
    assert (
        re.search(r"^\| r=8 +\| +\d", ranks, re.MULTILINE)
        and "out/ranks/sweep.html" in ranks
    )
    assert "capitals: acc" in task


@pytest.mark.slow
def test_the_guide_to_exports(clone):
    folder, paths = clone
    trained, _, _, _, back = run_guide("export.md", folder, paths)
    assert "final" in trained and back.strip()
    assert (folder / "out/gguf/Modelfile").read_text().startswith("FROM ./model-F16.gguf")
    assert (folder / "out/gguf-adapter/adapter-F32.gguf").is_file()
    assert (folder / "out/gguf-q4/model-Q4_K_M.gguf").is_file()


@pytest.mark.slow
def test_the_guide_to_the_hub(clone, tmp_path):
    folder, paths = clone
    with Hub(tale=Path(paths["CHECKPOINT_DIR"])) as hub:
        trained, download, dry = run_guide(
            "download.md",
            folder,
            {**paths, "REPO": "me/tale", **hub.env(tmp_path / "home")},
        )
        assert f"checkpoint_dir: me/tale@{hub.commit('me/tale')}" in trained
    assert download.startswith("models/mine\n") and "base_model: me/tale" in dry


@pytest.mark.slow
def test_decode_speed_script(tmp_path):
    """Against transformers' caches, and litft alone with random weights."""
    folder = STORIES
    flags = ["--precision", "fp32", "--new_tokens", "20", "--rounds", "2"]
    done = script(
        "scripts/decode_speed.py", "--checkpoint_dir", folder, *flags, cwd=tmp_path
    )
    assert (
        "litft / the faster one:" in done.stdout and "of the copy bandwidth" in done.stdout
    )
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    done = script(
        "scripts/decode_speed.py",
        "--checkpoint_dir",
        tmp_path,
        *flags,
        "--only_litft",
        "--rows",
        "3",
        cwd=tmp_path,
    )
    assert "litft: " in done.stdout and "transformers" not in done.stdout


BENCHMARK = [
    "scripts/benchmark.py",
    "--steps",
    "2",
    "--warmup",
    "1",
    "--data.max_seq_length",
    "256",
]


@pytest.mark.weekly
def test_benchmark_script(tmp_path):
    """Compares litft, padded litft and PEFT, runs other methods on random weights, and rejects
    unknown peers."""
    data = tmp_path / "data.json"
    data.write_text(json.dumps(RECORDS))
    real = [*BENCHMARK, "--checkpoint_dir", STORIES, "--data.path", data]
    done = script(
        *real, "--peer", "padded,full,peft", "--out", tmp_path / "out.json", cwd=tmp_path
    )
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert set(figures) == {
        "litft",
        "litft, padded",
        "litft, full",
        "peft, padded",
        "peft, unpadded",
    }
    assert all(
        row["seconds_per_step"] > 0 and row["peak_memory_gib"] > 0
        for row in figures.values()
    )
    assert figures["litft"]["litft_is_faster_by"] == 1 and "| peft, padded |" in done.stdout
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text((STORIES / "config.json").read_text())
    done = script(*BENCHMARK, "--checkpoint_dir", config, "--method", "full", cwd=tmp_path)
    assert "| litft |" in done.stdout
    done = script(*real, "--peer", "nobody", cwd=tmp_path, code=2)
    assert "--peer nobody: neither a peer nor a commit" in done.stderr


@pytest.mark.weekly
def test_benchmark_script_compares_preferences_with_trl(tmp_path):
    words = [*BENCHMARK, "--checkpoint_dir", STORIES]
    pairs = tmp_path / "pairs.json"
    pairs.write_text(
        json.dumps(
            [
                {"prompt": r["instruction"], "chosen": r["output"], "rejected": "No."}
                for r in RECORDS
            ]
        )
    )
    flags = ["--data.path", pairs, "--objective", "dpo", "--peer", "trl"]
    script(*words, *flags, "--out", tmp_path / "trl.json", cwd=tmp_path)
    assert set(json.loads((tmp_path / "trl.json").read_text())["figures"]) == {
        "litft",
        "trl",
        "trl, precomputed",
    }


@pytest.mark.slow
def test_plan_accuracy_script_measures_and_resumes(tiny, tmp_path):
    cells = [
        f"{tiny} lora fp32 none 1 64 {recomputed} eager 1"
        for recomputed in ("none", "full")
    ]
    words = ["scripts/plan_accuracy.py", "--accelerator", "cpu", "--cells"]
    first = script(*words, cells[0], cwd=tmp_path)
    (cell,) = json.loads((tmp_path / "plan_accuracy.json").read_text()).values()
    assert (
        0 < cell["planned_gib"] < cell["measured_gib"]
        and "1 of 1 cells ran" in first.stdout
    )
    resumed = script(*words, ",".join(cells), cwd=tmp_path)
    measured = json.loads((tmp_path / "plan_accuracy.json").read_text())
    assert (
        len(measured) == 2
        and cell in measured.values()
        and resumed.stderr.count("step 1 of 2") == 1
    )


@pytest.mark.slow
def test_the_commands_of_the_family_guide_run():
    # in one process: three would each collect all tests of families
    printed = run_guide("add_a_family.md", ROOT, {"PYTEST_ADDOPTS": "-n 0"})
    assert "passed" in printed[0] and "| `exaone4` |" in printed[0]


def test_the_family_guide_quotes_the_files():
    guide = (ROOT / "tutorials" / "add_a_family.md").read_text("utf-8")
    assert (ROOT / "litft" / "families" / "exaone4.py").read_text("utf-8") in guide
    row = re.search(r"```text\n(    \"exaone4.*?)```", guide, re.DOTALL)[1]
    assert row in (ROOT / "tests" / "parity.py").read_text("utf-8")


def test_the_table_of_families_has_every_family():
    page = (ROOT / "tutorials" / "families.md").read_text("utf-8")
    listed = re.findall(r"^\| `([\w-]+)` \|.*e-0[5678]", page, re.MULTILINE)
    assert listed == list(ROWS)
    assert f"\n{len(families())} model types are supported" in page
    for name in ("README.md", "tutorials/comparison.md"):
        text = (ROOT / name).read_text("utf-8")
        counts = set(re.findall(r"(\d+) (?:model types|types, text)", text))
        assert counts == {str(len(families()))}, name


def test_the_test_command_is_the_same_everywhere():
    """README, CONTRIBUTING, .ci/run and the public workflow."""
    (command,) = [text for _, text in blocks(ROOT / "README.md") if "pytest" in text]
    for name in ("CONTRIBUTING.md", ".ci/run", ".github/workflows/test.yml"):
        assert command.strip() in (ROOT / name).read_text("utf-8"), name
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
