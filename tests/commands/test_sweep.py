"""`litft sweep`: what is missing is run, and differences are called real where they are."""

import json
import shutil
import signal
import time

import numpy as np
import pytest
from conftest import refused, start
from safetensors.torch import load_file, save_file
from scipy.stats import ttest_rel

from litft import run_dir
from litft.args import SweepArgs, setting_name
from litft.args.parser import parse
from litft.cli import run as command
from litft.commands.sweep import (
    _check_same,
    _compared_score,
    _explain,
    _folder,
    _rows,
    _scaled_scores,
    _with_one_kind_of_loss,
)
from litft.evaluation.settings import RunScores, RunsOfSetting, difference, ranked
from litft.evaluation.verdict import Part
from litft.folder_lock import locked_folder


@pytest.fixture
def base(tiny, examples, tmp_path, monkeypatch):
    """A folder with base.yaml, the flags that all runs share."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(
        f"checkpoint_dir: {tiny}\n"
        f"data: {{path: [{examples}], val_fraction: 0.5, max_seq_length: 128}}\n"
        "train: {max_steps: 2, global_batch_size: 2}\n"
        "eval: {max_new_tokens: 0, interval: 0}\n"
    )
    return tmp_path


@pytest.mark.slow
def test_the_grid_is_run_and_compared(base, capsys):
    """Both seeds of both settings; the second time, only what is missing."""
    flags = ["--config", "base.yaml", "--seeds", "2", "--out_dir", "sweep"]
    grid = ["--grid", "train.learning_rate=0,0.05", "lora.r=2"]
    command("sweep", [*flags, *grid])
    first = capsys.readouterr().out
    folder = base / "sweep"
    names = ["learning_rate=0, r=2", "learning_rate=0.05, r=2"]
    figures = json.loads((folder / "sweep.json").read_text())
    assert list(figures["settings"]) == names
    for name in names:
        runs = [folder / f"{name.replace(', ', '_')}_seed={seed}" for seed in (1, 2)]
        assert all(run_dir.finished(run) for run in runs)
        last = [
            list(run_dir.metrics_rows(run / "metrics.csv"))[-1]["val_loss"] for run in runs
        ]
        found = [item["scores"]["loss"] for item in figures["settings"][name]]
        assert found == pytest.approx([float(loss) for loss in last])
    # a rate of 0 learns nothing: both seeds have the loss of the base
    untrained, trained = (figures["settings"][name] for name in names)
    assert untrained[0]["scores"] == untrained[1]["scores"]
    assert trained[0]["scores"]["loss"] < untrained[0]["scores"]["loss"]
    assert figures["table"][1][0] == names[1] and "learning_rate=0.05, r=2" in first
    page = (folder / "sweep.html").read_text()
    assert names[0] in page and page.count("<svg") == 2

    shutil.rmtree(folder / "learning_rate=0_r=2_seed=2")
    command("sweep", [*flags, *grid])
    second = capsys.readouterr().out
    assert second.count("done before") == 3
    assert json.loads((folder / "sweep.json").read_text()) == figures


@pytest.mark.slow
def test_another_base_is_not_mixed_with_finished_runs(base, capsys):
    flags = ["--config", "base.yaml", "--grid", "lora.r=2", "--out_dir", "sweep"]
    command("sweep", flags)
    capsys.readouterr()
    (base / "base.yaml").write_text(
        (base / "base.yaml").read_text() + "save: {interval: 0}\n"
    )
    assert "started with another --config" in refused("sweep", *flags, capsys=capsys)


def test_other_examples_are_not_mixed_with_finished_runs(base, examples, capsys):
    path = base / "examples.json"
    path.write_bytes(examples.read_bytes())
    flags = ["--config", "base.yaml", f"--flags=--data.path={path}", "--out_dir", "sweep"]
    flags += ["--grid", "lora.r=2"]
    args = parse(SweepArgs, flags)
    (base / "sweep").mkdir()
    _check_same(base / "sweep", args)
    _check_same(base / "sweep", args)
    path.write_text(examples.read_text().replace("Say it", "Shout it"))
    assert f"another content of {path}" in refused("sweep", *flags, capsys=capsys)


def test_another_model_or_reward_is_not_mixed_with_finished_runs(base, tiny, capsys):
    """Folders and files may have another content under the same name."""
    shutil.copytree(tiny, base / "model")
    (base / "r.py").write_text("def f(completion): return 1.0")
    words = (
        "--checkpoint_dir model --objective grpo --reward r.py:f --eval.exact_match false"
    )
    flags = ["--config", "base.yaml", f"--flags={words}", "--out_dir", "sweep"]
    flags += ["--grid", "lora.r=2"]
    args = parse(SweepArgs, flags)
    (base / "sweep").mkdir()
    _check_same(base / "sweep", args)
    _check_same(base / "sweep", args)
    (base / "r.py").write_text("def f(completion): return 0.0")
    assert "another content of r.py" in refused("sweep", *flags, capsys=capsys)
    (base / "r.py").write_text("def f(completion): return 1.0")
    weights = load_file(base / "model" / "model.safetensors")
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    save_file(changed, base / "model" / "model.safetensors", {"format": "pt"})
    assert "another content of model" in refused("sweep", *flags, capsys=capsys)


def test_other_flags_of_a_named_file_are_not_mixed(base):
    """Of a YAML file that --flags names, and of the chat template of the model's folder."""
    (base / "more.yaml").write_text("train: {warmup_steps: 1}\n")
    words = ["--config", "base.yaml", "--flags=--config more.yaml", "--out_dir", "sweep"]
    args = parse(SweepArgs, [*words, "--grid", "lora.r=2"])
    folder = base / "sweep"
    folder.mkdir()
    _check_same(folder, args)
    # another value of a flag in the grid is the same sweep
    _check_same(folder, parse(SweepArgs, [*words, "--grid", "lora.r=4"]))
    (base / "more.yaml").write_text("train: {warmup_steps: 2}\n")
    with pytest.raises(ValueError, match=r"started with another --train\.warmup_steps"):
        _check_same(folder, args)


def test_another_chat_template_is_another_model(base, tiny):
    model = shutil.copytree(tiny, base / "model")
    words = ["--config", "base.yaml", f"--flags=--checkpoint_dir {model}"]
    args = parse(SweepArgs, [*words, "--out_dir", "sweep", "--grid", "lora.r=2"])
    folder = base / "sweep"
    folder.mkdir()
    _check_same(folder, args)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="started with another content of"):
        _check_same(folder, args)


@pytest.mark.slow
def test_a_run_that_fails_does_not_end_the_others(base, capsys):
    """Its last line is shown, and the sweep itself fails at the end."""
    flags = ["--config", "base.yaml", "--out_dir", "sweep"]
    with pytest.raises(SystemExit):
        command("sweep", [*flags, "--grid", "data.val_fraction=0.5,0.0", "eval.patience=1"])
    captured = capsys.readouterr()
    assert "1 of 2 runs have failed" in captured.err
    assert "failed: error: --eval.patience" in captured.out
    assert "| val_fraction=0.5, patience=1" in captured.out


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "--grid is missing"),
        (["--grid", "lora.r"], "expected FLAG=VALUE,VALUE"),
        (["--grid", "lora.rank=2"], "--lora.rank does not exist; here it is --lora.r 2"),
        (["--grid", "seed=1,2"], "--grid seed: the sweep sets it itself"),
        (["--grid", "lora.r=2,2"], "a value is there twice"),
        (["--grid", "lora.r="], "a value is empty"),
        (["--grid", "lora.r+lora.alpha=2+"], "a value is empty"),
        (["--grid", "lora.r+lora.alpha=2+4,2 + 4"], "a value is there twice"),
        (["--grid", "lora.r+lora.alpha=2+4,8"], "8 has 1 of 2 values; write one for"),
        (
            ["--grid", "lora.r=2", "lora.r+lora.alpha=2+4"],
            "--grid lora.r: the flag is there twice",
        ),
        (["--grid", "lora.r=two"], "--lora.r two: expected a whole number"),
        (["--grid", "=4,8"], "expected FLAG=VALUE,VALUE"),
        (
            ["--grid", "lora.r=2", "--flags=--x 'y"],
            "No closing quotation; close the quotation",
        ),
        (["--grid", "lora.r=2", "--method", "dora"], "--method dora: expected one of"),
        (["--grid", "lora.r=2", "--seeds", "0"], "--seeds"),
        (["--grid", "lora.r=2", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_mistakes_are_found_before_the_first_run(base, capsys, flags, message):
    assert message in refused("sweep", "--out_dir", "sweep", *flags, capsys=capsys)
    assert not (base / "sweep").exists()


def test_values_with_commas_are_divided_by_bars():
    args = SweepArgs(grid=["lora.targets=q_proj", "v_proj|q_proj", "lora.r=2", "4"])
    assert args.axes() == {
        "lora.targets": ["q_proj,v_proj", "q_proj"],
        "lora.r": ["2", "4"],
    }
    assert len(args.settings()) == 4


def test_flags_may_change_together():
    args = SweepArgs(grid=["lora.r+lora.alpha=8+16", "16+32", "data.path=c++.json"])
    assert args.settings() == [
        {"lora.r": "8", "lora.alpha": "16", "data.path": "c++.json"},
        {"lora.r": "16", "lora.alpha": "32", "data.path": "c++.json"},
    ]


def test_a_flag_may_be_there_several_times():
    assert SweepArgs(grid=["lora.r=4", "lora.r=8"]).axes() == {"lora.r": ["4", "8"]}


def test_settings_have_folders_of_their_own():
    args = SweepArgs(grid=["data.path=a/b.jsonl", "a-b.jsonl", "a b.jsonl"])
    folders = {_folder(args, setting, 1) for setting in args.settings()}
    assert len(folders) == 3 and all("/" not in folder.name for folder in folders)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_saves_its_run_and_goes_on(base, number):
    """Ctrl-C in a terminal reaches all processes of a group, kill only one."""
    (base / "base.yaml").write_text(
        (base / "base.yaml").read_text().replace("max_steps: 2", "max_steps: 4000")
    )
    words = ["--config", "base.yaml", "--grid", "lora.r=2", "--out_dir", "sweep"]
    process = start("scripts/sweep.py", *words, cwd=base)
    run = base / "sweep" / "r=2_seed=1"
    while len(list(run_dir.metrics_rows(run / "metrics.csv"))) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 130
    log = run.with_name(f"{run.name}.log").read_text()
    assert "and saved; to continue" in log
    assert run_dir.checkpoints(run)


def test_a_run_that_is_still_running_is_not_started_again(base, capsys):
    """A sweep that was killed leaves it."""
    with locked_folder(base / "sweep" / "r=2_seed=1"), pytest.raises(SystemExit):
        command(
            "sweep", ["--config", "base.yaml", "--grid", "lora.r=2", "--out_dir", "sweep"]
        )
    assert "failed: " in capsys.readouterr().out


def test_a_damaged_base_is_another_base(base, capsys):
    (base / "sweep").mkdir()
    for text in ("", "[]"):
        (base / "sweep" / "base.json").write_text(text)
        flags = ["--config", "base.yaml", "--grid", "lora.r=2", "--out_dir", "sweep"]
        assert "started with another" in refused("sweep", *flags, capsys=capsys)


def setting(name, losses, noise, seeds=3):
    """Return a setting: losses of examples, and what each seed adds to all of them."""
    runs = []
    for seed in range(seeds):
        parts = {
            (n + 1,): Part(4 * (loss + noise[seed]), 4.0) for n, loss in enumerate(losses)
        }
        scores = {"loss": float(np.mean(losses) + noise[seed])}
        runs.append(RunScores(seed + 1, scores, {"loss": parts}))
    return RunsOfSetting(name, runs)


def test_a_difference_is_real_over_examples_and_over_seeds():
    draw = np.random.default_rng(0)
    losses = draw.normal(2.0, 0.5, 100)
    noise = [0.0, 0.01, -0.01]
    best = setting("best", losses, noise)
    worse = setting("worse", losses + draw.normal(0.1, 0.05, 100), [0.005, 0.0, 0.01])
    # the seeds differ more than the settings
    uncertain = setting("uncertain", losses + 0.1, [-0.3, 0.4, 0.0])
    found = difference(best, worse, "loss")
    assert found.is_real and str(found).startswith("real: +0.1")
    first = [run.scores["loss"] for run in best.runs]
    second = [run.scores["loss"] for run in worse.runs]
    expected = ttest_rel(second, first).confidence_interval(0.95)
    assert found.over_seeds == pytest.approx((expected.low, expected.high))
    unclear = difference(best, uncertain, "loss")
    assert unclear.over_examples.outcome == "worse" and not unclear.is_real
    assert not difference(uncertain, best, "loss").is_real
    # equal settings differ in nothing
    assert not difference(best, best, "loss").is_real
    # the other way round, of few examples
    few = difference(
        setting("a", losses[:5], noise), setting("b", losses[:5] + 1, noise), "loss"
    )
    assert not few.is_real
    assert [item.name for item in ranked([worse, best], "loss")] == ["best", "worse"]
    assert [item.name for item in ranked([worse, best], "exact_match")] == ["worse", "best"]


@pytest.mark.parametrize("count", [1023, 1024])
def test_scores_of_some_of_the_examples_are_named(base, capsys, count):
    """A run measures more than what is compared example by example."""
    args = parse(
        SweepArgs, ["--config", "base.yaml", "--grid", "lora.r=2", "--out_dir", "o"]
    )
    _explain(args, [setting("r=2", np.ones(count), [0.0], seeds=1)], [["setting"], [""]])
    assert ("means over 1,024 of them" in capsys.readouterr().out) == (count == 1024)


def shares(name, correct_of_seeds):
    """Return a setting whose examples are answered right or wrong."""
    runs = []
    for seed, correct in enumerate(correct_of_seeds, 1):
        parts = {(n,): Part(float(n < correct), 1.0) for n in range(8)}
        runs.append(RunScores(seed, {"exact_match": correct / 8}, {"exact_match": parts}))
    return RunsOfSetting(name, runs)


def test_settings_of_flags_with_one_last_word_have_names_of_their_own():
    """Their runs would have the same folder."""
    assert setting_name({"lora.r": "8", "lora.alpha": "16"}) == "r=8, lora.alpha=16"
    assert setting_name({"distill.alpha": "0.5"}) == "distill.alpha=0.5"
    assert setting_name({"quantize": "nf4"}) == "quantize=nf4"
    assert setting_name({"distill.quantize": "nf4"}) == "distill.quantize=nf4"


def test_equal_differences_of_shares_are_no_certainty():
    """Two seeds of eight examples: both settings differ by one example twice."""
    found = difference(shares("a", [4, 6]), shares("b", [5, 7]), "exact_match")
    low, high = found.over_seeds
    assert low < 0 < high and not found.is_real
    # ten seeds that all differ by four of eight examples leave no doubt
    many = difference(shares("a", [1, 3] * 5), shares("b", [5, 7] * 5), "exact_match")
    assert many.over_seeds[0] > 0.4


def test_losses_of_two_kinds_are_not_averaged():
    """A run without its verdict has the loss of its objective."""
    runs = setting("a", np.linspace(1, 2, 40), noise=[0.0, 0.1], seeds=2).runs
    damaged = runs[1]._replace(scores={"loss": 0.3, "exact_match": 0.5}, parts={})
    (kept,) = _with_one_kind_of_loss([RunsOfSetting("a", [runs[0], damaged])])
    assert kept.values("loss").keys() == {1} and kept.values("exact_match") == {2: 0.5}
    alone = [RunsOfSetting("a", [damaged])]
    assert _with_one_kind_of_loss(alone) == alone


def test_a_difference_is_not_real_if_the_intervals_disagree():
    losses = np.linspace(1.0, 2.0, 50)
    noise = [0.0, 0.001, -0.001]
    best = setting("best", losses, noise)
    # the runs' own losses, of all examples, are higher, and those of the same examples lower
    other = setting("other", losses - 0.5 + 0.01 * np.sin(losses), noise)
    moved = []
    for run in other.runs:
        moved.append(run._replace(scores={"loss": run.scores["loss"] + 1.5}))
    assert not difference(best, RunsOfSetting("other", moved), "loss").is_real
    # another validation set is not compared at all
    fewer = setting("fewer", losses[:40], noise)
    assert str(difference(best, fewer, "loss")) == (
        "not compared: other validation examples, or other tokens of them"
    )


def test_other_tokens_of_the_same_examples_are_not_compared():
    """As with another template, mask or tokenizer."""
    losses = np.linspace(1, 2, 40)
    first = setting("first", losses, noise=[0.0, 0.01, 0.02])
    second = setting("second", losses - 0.5, noise=[0.0, 0.01, 0.02])
    assert difference(first, second, "loss").is_real
    runs = []
    for run in second.runs:
        parts = {
            key: Part(2 * value, 2 * weight)
            for key, (value, weight) in run.parts["loss"].items()
        }
        runs.append(run._replace(parts={"loss": parts}))
    other = RunsOfSetting("other", runs)
    assert not difference(first, other, "loss").is_real
    # one run fewer has the same tokens
    fewer = difference(first, RunsOfSetting("fewer", second.runs[:2]), "loss")
    assert fewer.is_comparable and fewer.over_examples is not None


def test_a_margin_is_not_compared_where_the_grid_scales_it():
    parts = {(number,): Part(1.0) for number in range(30)}
    scores = {"margin": 1.0, "accuracy": 1.0}
    run = RunScores(1, scores, {"margin": parts, "accuracy": parts})
    settings = [RunsOfSetting("a", [run])]
    grids = {
        "preference.beta=0.1,0.5": "accuracy",
        "lora.r=2,4": "margin",
        # wins relative to the base, and wins as such
        "objective=dpo,simpo": None,
    }
    for grid, score in grids.items():
        args = SweepArgs(grid=[grid])
        assert _compared_score(settings, _scaled_scores(args)) == score


@pytest.mark.parametrize(
    "score, grid",
    [
        ("margin", "preference.desirable_weight=0.5,1"),
        ("reward", "reward=exact|number"),
        ("reward", "grpo.temperature=0.7,1.0"),
    ],
)
def test_settings_are_not_ranked_where_the_grid_changes_every_score(score, grid):
    """Of KTO and GRPO one score is measured by example; the loss of metrics.csv has its scale."""
    settings = []
    for name, value in (("a", 2.0), ("b", 1.0)):
        parts = {(number,): Part(value) for number in range(30)}
        run = RunScores(1, {"loss": value, score: value}, {score: parts})
        settings.append(RunsOfSetting(name, [run]))
    rows = _rows(settings, _scaled_scores(SweepArgs(grid=[grid])))
    assert [row[0] for row in rows] == ["setting", "a", "b"]
    assert all(row[-1].startswith("not compared") for row in rows[1:])


def test_losses_that_are_no_number_show_nothing():
    odd = setting("odd", [np.nan] * 30, [0.0, 0.0, 0.0])
    found = difference(setting("even", [1.0] * 30, [0.0, 0.1, 0.2]), odd, "loss")
    assert not found.is_real and str(found).startswith("not shown")
