"""What a run reports: loggers, samples, the lines on the terminal, report.html."""

import html
import json
import logging
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import rows_of, script, write_records

import litft
from litft.args import DataArgs, EvalArgs, LoRAFinetuneArgs, SaveArgs, TrainArgs
from litft.training.output.loggers import make_logger, row_sink
from litft.training.output.report import (
    POINTS,
    SCRIPT,
    Report,
    chart,
    points,
    public,
    ticks,
    write_report,
)


@pytest.fixture
def args(tiny, examples, tmp_path, monkeypatch) -> LoRAFinetuneArgs:
    monkeypatch.chdir(tmp_path)
    return LoRAFinetuneArgs(
        checkpoint_dir=str(tiny),
        out_dir="run",
        data=DataArgs(path=[str(examples)], val_fraction=0.2),
        train=TrainArgs(max_steps=4, global_batch_size=4),
        eval=EvalArgs(interval=2, max_new_tokens=5),
        save=SaveArgs(interval=2),
    )


def train_and_resume(args: LoRAFinetuneArgs, steps: int = 4) -> None:
    """Train, delete the last checkpoint, and resume from the one before, up to `steps` steps."""
    litft.finetune(args)
    for path in Path("run/checkpoints/step-000004").iterdir():
        path.unlink()
    args.resume, args.train.max_steps = True, steps
    litft.finetune(args)


def test_tensorboard_has_every_row_once(args):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args.logger = "tensorboard"
    train_and_resume(args)
    events = EventAccumulator("run/tensorboard").Reload()
    for column in ("loss", "val_loss", "learning_rate", "data_share"):
        expected = [
            (row["step"], row[column]) for row in rows_of(Path("run")) if column in row
        ]
        assert [(e.step, e.value) for e in events.Scalars(column)] == [
            pytest.approx(pair) for pair in expected
        ], column


@pytest.mark.slow
def test_mlflow_continues_the_same_run(args, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    args.logger = "mlflow"
    train_and_resume(args)
    client = MlflowClient("sqlite:///mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("litft").experiment_id])
    assert run.data.params["train/max_steps"] == "4" and run.info.status == "FINISHED"
    losses = {
        item.step: item.value for item in client.get_metric_history(run.info.run_id, "loss")
    }
    assert losses == {
        row["step"]: pytest.approx(row["loss"])
        for row in rows_of(Path("run"))
        if "loss" in row
    }


@pytest.mark.slow
def test_wandb_continues_the_same_run(args, monkeypatch):
    for name, value in (
        ("MODE", "offline"),
        ("PROJECT", "theirs"),
        ("ENTITY", "they"),
        ("NAME", "a-run"),
    ):
        monkeypatch.setenv(f"WANDB_{name}", value)
    args.logger = "wandb"
    train_and_resume(args)
    stored = b"".join(
        path.read_bytes() for path in Path("run/wandb").glob("offline-run-*/*.wandb")
    )
    assert b"theirs" in stored and b"they" in stored and b"a-run" in stored
    names = {
        path.name.rpartition("-")[2] for path in Path("run/wandb").glob("offline-run-*")
    }
    progress = json.loads(Path("run/checkpoints/step-000004/progress.json").read_text())
    assert ["wandb", *names] == progress["logger"]


@pytest.mark.parametrize(
    "project, expected",
    [
        pytest.param(None, "theirs", marks=pytest.mark.weekly),
        pytest.param("mine", "mine", marks=pytest.mark.slow),
    ],
)
def test_the_project_flag_precedes_the_environment(
    tmp_path, monkeypatch, project, expected
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logger = make_logger("mlflow", tmp_path / "run", {"a": 1}, 0, None, project)
    assert logger.experiment.get_experiment(logger.experiment_id).name == expected
    assert (
        LoRAFinetuneArgs(logger_project="mine")
        .problems()[0]
        .startswith("--logger_project mine: add --logger wandb")
    )


def test_a_logger_that_fails_does_not_end_the_run():
    class Down:
        def log_metrics(self, metrics, step):
            raise ConnectionError("no answer")

    messages = []
    sink = row_sink(Down(), messages.append)
    for step in (3, 4):
        sink({"step": step, "loss": 1.0})
    assert messages == [
        "warning: logging failed at step 3 (no answer); later rows are only in metrics.csv"
    ]


@pytest.mark.slow
def test_a_logger_that_cannot_start_is_reported(args, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////dev/null/mlflow.db")
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    args.logger = "mlflow"
    with pytest.raises(ValueError, match="--logger mlflow: "):
        litft.finetune(args)


def test_answers_are_generated_at_every_validation(args, capfd):
    Path("prompts.txt").write_text("Say it 2 times\n\nSay it, please\n")
    args.eval.prompts = ["Who are you?", "prompts.txt"]
    litft.finetune(args)
    samples = [
        json.loads(line)
        for line in Path("run/samples.jsonl").read_text("utf-8").splitlines()
    ]
    prompts = ["Who are you?", "Say it 2 times", "Say it, please"]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (step, prompt) for step in (0, 2, 4) for prompt in prompts
    ]
    model, tokenizer = litft.load("run/final")
    messages = [{"role": "user", "content": "Who are you?"}]
    answer = "".join(
        litft.stream(model, tokenizer, messages, temperature=0, max_new_tokens=5)
    )
    assert answer.strip() == samples[6]["answer"]
    stdout = capfd.readouterr().out
    assert stdout.count("  Who are you?\n  -> ") == 3
    assert (
        "step 1/4: loss " in stdout
        and "tokens/s" in stdout
        and "waiting for data" not in stdout
        and " left\n" in stdout
    )


def test_without_validation_the_answers_are_to_trained_questions(args, capfd):
    args.data.val_fraction = 0.0
    litft.finetune(args)
    samples = [
        json.loads(line)
        for line in Path("run/samples.jsonl").read_text("utf-8").splitlines()
    ]
    questions = [sample["prompt"] for sample in samples if sample["step"] == 0]
    records = json.loads(Path(args.data.path[0]).read_text())
    assert len(questions) == 3 and set(questions) <= {
        record["instruction"] for record in records
    }
    assert [sample["prompt"] for sample in samples if sample["step"] == 4] == questions
    assert "the sample answers are to trained questions" in capfd.readouterr().out


def test_answers_after_the_resumed_checkpoint_are_dropped(args):
    train_and_resume(args, steps=3)
    sample_steps = [
        json.loads(line)["step"]
        for line in Path("run/samples.jsonl").read_text("utf-8").splitlines()
    ]
    assert sample_steps == [0, 2, 3]


def test_prompts_of_plain_text_are_continued_unchanged(args, tmp_path, capfd):
    """The end of the run names the command that does the same."""
    (tmp_path / "texts.jsonl").write_text(
        '{"text": "once upon a time there was a dog"}\n' * 20
    )
    args.data.path, args.eval.prompts = ["texts.jsonl"], ["once upon"]
    litft.finetune(args)
    model, tokenizer = litft.load("run/final")
    suggested = capfd.readouterr().out.partition("next:")[2]
    assert "--template none --prompt TEXT" in suggested and "chat" not in suggested
    answer = "".join(
        litft.stream(model, tokenizer, "once upon", temperature=0, max_new_tokens=5)
    )
    samples = [
        json.loads(line)
        for line in Path("run/samples.jsonl").read_text("utf-8").splitlines()
    ]
    assert answer.strip() == samples[-1]["answer"]


def test_the_suggested_chat_has_the_system_prompt_of_the_examples(args, tmp_path, capfd):
    """Without it, the template writes its own default, or none, which the model was not trained
    with. The same for the functions that it may call."""
    system = {"role": "system", "content": "You're the club's clerk."}
    chats = []
    for number in range(20):
        turns = [
            {"role": "user", "content": f"Ask {number}"},
            {"role": "assistant", "content": "Yes."},
        ]
        chats.append({"messages": [system, *turns]})
    tools = [{"name": "weather", "parameters": {"type": "object"}}]
    write_records(tmp_path / "chats.jsonl", [chat | {"tools": tools} for chat in chats])
    args.data.path = [str(tmp_path / "chats.jsonl")]
    litft.finetune(args)
    suggested = capfd.readouterr().out.partition("next:")[2]
    (command,) = [line for line in suggested.splitlines() if "--system" in line]
    words = shlex.split(command, comments=True)
    assert words[words.index("--system") + 1] == system["content"]
    assert words[words.index("--tools") + 1] == str(tmp_path / "chats.jsonl")
    assert "# with the system prompt and the functions of the examples" in command
    # not where some examples have none
    write_records(
        tmp_path / "chats.jsonl", [*chats[1:], {"messages": chats[0]["messages"][1:]}]
    )
    args.overwrite = True
    litft.finetune(args)
    suggested = capfd.readouterr().out.partition("next:")[2]
    assert "--system" not in suggested and "--tools" not in suggested
    # both commands where half of the examples have functions
    half = [*chats[:10], *(chat | {"tools": tools} for chat in chats[10:])]
    write_records(tmp_path / "chats.jsonl", half)
    litft.finetune(args)
    suggested = capfd.readouterr().out.partition("next:")[2]
    first, second = [line for line in suggested.splitlines() if "--system" in line]
    assert "--tools" not in first and "--tools" in second


def test_prompts_of_records_are_conversations(args, tmp_path):
    """A .jsonl file has the prompts of `generate --prompts`, not a prompt a line."""
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    answered = [*turns, {"role": "assistant", "content": "No."}]
    records = [{"prompt": "Zero?"}, {"messages": turns}, {"messages": answered}]
    # the same question, but another conversation
    records.append({"prompt": "Two?", "system": "Be brief."})
    args.eval.prompts = [str(write_records(tmp_path / "asked.jsonl", records))]
    args.eval.interval = 0
    litft.finetune(args)
    lines = Path("run/samples.jsonl").read_text("utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["prompt"] for sample in samples[:4]] == ["Zero?", "Two?", "Two?", "Two?"]
    assert samples[1]["answer"] == samples[2]["answer"] != samples[3]["answer"]
    # each prompt with its own answers, although three have one question
    shown = re.findall(
        r"<div class=pair>(.*?)</div>", Path("run/report.html").read_text("utf-8")
    )
    for first, last, pair in zip(samples[:3], samples[-4:], shown, strict=False):
        for sample in (first, last):
            text = html.escape(sample["answer"]) or "(empty)"
            assert f"<b>step {sample['step']}</b> {text}</p>" in pair
    (tmp_path / "asked.jsonl").write_text('{"question": "Zero?"}\n')
    args.overwrite = True
    with pytest.raises(ValueError, match=r"asked\.jsonl, line 1: needs 'prompt' .text. or"):
        litft.finetune(args)


def test_invalid_prompts_are_reported(args):
    args.eval.prompts = ["nofile.txt"]
    with pytest.raises(ValueError, match=r"--eval.prompts nofile.txt: no such file"):
        litft.finetune(args)
    Path("binary").write_bytes(b"\xf8\x00" * 9)
    args.eval.prompts = ["binary"]
    with pytest.raises(ValueError, match=r"--eval.prompts binary is not a UTF-8 text file"):
        litft.finetune(args)
    args.eval.prompts = ["Tell me a long story. " * 12]
    assert litft.finetune(args).metrics["step"] == 4


@pytest.mark.slow
def test_another_logger_takes_over(args, monkeypatch):
    """The other logger starts a run of its own."""
    args.logger = "tensorboard"
    litft.finetune(args)
    monkeypatch.setenv("WANDB_MODE", "offline")
    longer = replace(
        args, resume=True, logger="wandb", train=replace(args.train, max_steps=6)
    )
    litft.finetune(longer)
    (name,) = [path.name for path in Path("run/wandb").glob("offline-run-*")]
    assert not name.endswith("tensorboard")
    litft.finetune(replace(longer, resume=False, out_dir="second"))
    assert len(list(Path("second/wandb").glob("offline-run-*"))) == 1


@pytest.mark.parametrize("interval", [1, 3])
def test_a_line_and_a_row_at_every_log_interval(args, interval, capfd):
    args.train.max_steps, args.train.log_interval, args.eval.interval = 7, interval, 0
    callback_rows = []
    litft.finetune(
        args, lambda row: callback_rows.append((row["step"], len(rows_of(Path("run")))))
    )
    lines = [
        line.split(":")[0]
        for line in capfd.readouterr().out.splitlines()
        if line.startswith("step") and "/7" in line
    ]
    saves = {2, 4, 6, 7}
    assert lines == [f"step {n}/7" for n in range(1, 8) if n % interval == 0 or n in saves]
    assert [step for step, _ in callback_rows] == list(range(8))


# report.html


class Page(HTMLParser):
    """Everything a page would fetch, the number of its scripts, its text, and the tags that are
    still open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.external, self.text, self.open, self.scripts = [], "", [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open += [tag] if tag not in ("meta", "input") else []
        self.external += [tag] if tag in ("link", "img", "iframe") else []
        self.scripts += tag == "script"
        self.external += [
            name for name, _ in attrs if name in ("src", "href") or name.startswith("on")
        ]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_report_contains_everything_of_the_run(args):
    args.eval.prompts = ["<script>alert(1)</script>"]
    litft.finetune(args)
    text = Path("run/report.html").read_text("utf-8")
    page = Page(text)
    assert (
        not page.external
        and not page.open
        and "url(" not in text
        and "http:" not in text
        and "https:" not in text
    )
    assert page.scripts == 1 and text.count(f"<script>{SCRIPT}</script>") == 1
    rows = rows_of(Path("run"))
    for word in (
        f"{rows[-1]['val_loss']:.4f}",
        "<script>alert(1)</script>",
        "global_batch_size: 4",
        "24 training and 6 validation examples",
        "torch",
        "Loss per token",
        "Gradient norm (L2)",
        "perplexity",
    ):
        assert word in page.text, word
    assert "prefers-color-scheme: dark" in text and text.count("<polyline") == 6


def test_the_report_is_there_from_the_first_validation_on(args):
    """A run that is killed leaves the curves so far."""
    states = {}

    def callback(row):
        if Path("run/report.html").is_file():
            states[row["step"]] = Page(Path("run/report.html").read_text("utf-8")).text

    litft.finetune(args, callback)
    assert "running: 0 of 4 steps" in states[1] and "running: 2 of 4 steps" in states[3]
    tiles = Page(Path("run/report.html").read_text("utf-8")).text
    rows = [row["val_loss"] for row in rows_of(Path("run")) if "val_loss" in row]
    assert (
        "finished" in tiles
        and f"{rows[0]:.4f} \u2192 {rows[-1]:.4f}" in tiles
        and "peak memory" in tiles
    )


def test_the_report_shows_no_private_paths(args, tmp_path):
    args.data.path = [str(Path(args.data.path[0]).resolve())]
    litft.finetune(args)
    text = Path("run/report.html").read_text("utf-8")
    assert str(tmp_path) not in text and Path(args.data.path[0]).name in text
    assert str(Path(args.checkpoint_dir).parent) not in text


@pytest.mark.parametrize(
    "text, shown",
    [
        ("/home/me/data/a.jsonl: 3 records", "a.jsonl: 3 records"),
        ("path:\n- /home/me/a b.json\n", "path:\n- a b.json\n"),
        ("~/models/llama in bf16", "llama in bf16"),
        (f"{Path.home()}/secret name/a.json", "~/secret name/a.json"),
        (
            "tokens </think>, [/INST] and </tool_call>",
            "tokens </think>, [/INST] and </tool_call>",
        ),
        (
            "owner/name, 1/2 of https://host/a/b, 3 tokens/s",
            "owner/name, 1/2 of https://host/a/b, 3 tokens/s",
        ),
    ],
)
def test_absolute_paths_are_shortened(text, shown):
    assert public(text) == shown


def test_a_report_that_cannot_be_written_does_not_end_the_run(args, capsys):
    """A folder is in its place."""

    def callback(row):
        if row["step"] == 0:
            Path("run/report.html/x").mkdir(parents=True)

    litft.finetune(args, callback)
    assert (
        "warning: report.html could not be written" in capsys.readouterr().out
        and Path("run/final").is_dir()
    )


def test_a_run_that_ends_early_says_so(args):
    args.train.learning_rate, args.eval.patience, args.eval.interval = 1e-30, 1, 1
    litft.finetune(args)
    assert "finished after 2 of 4 steps" in Path("run/report.html").read_text("utf-8")


def test_a_curve_is_drawn_at_its_values():
    svg = chart("loss", {"loss": [(0, 1.0), (50, 3.0), (100, 2.0)]}, from_zero=False)
    assert 'points="0.00,100.00 50.00,0.00 100.00,50.00"' in svg
    assert chart("loss", {"loss": []}, from_zero=True) == ""


@pytest.mark.parametrize(
    "low, high",
    [
        (0, 1),
        (2.9, 4.1),
        (0, 0),
        (5, 5),
        (1e-9, 3e-9),
        (0, 123456),
        (-3, 2),
        (0.398826389, 0.39882638900000006),
    ],
)
def test_ticks_are_round_and_contain_the_values(low, high):
    marks = ticks(low, high)
    assert (
        marks[0] <= low + 1e-9 * abs(low)
        and marks[-1] >= high - 1e-9 * abs(high)
        and 2 <= len(marks) <= 8
    )
    assert len({f"{value:.4g}" for value in marks}) == len(marks)


def test_long_runs_are_drawn_as_means_without_nan():
    rows = [{"step": n, "loss": float("nan") if n == 7 else 2.0} for n in range(1, 10_001)]
    curve = points(rows, "loss")
    assert len(curve) <= POINTS and {value for _, value in curve} == {2.0}


def test_a_report_of_a_run_without_rows(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n")
    (tmp_path / "config.yaml").write_text("a: 1\n")
    write_report(
        tmp_path, Report("nothing", "failed", [], {}, [], [], [(1, 2, 3)], [], "Loss")
    )
    assert not Page((tmp_path / "report.html").read_text()).open


def test_a_missing_package_is_reported(args, tmp_path):
    (tmp_path / "wandb.py").write_text("raise ImportError('no wandb here')")
    (tmp_path / "go.py").write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "from litft.cli import run\n"
        f"run('finetune lora', ['--checkpoint_dir', {args.checkpoint_dir!r}, '--data.path', "
        f"{args.data.path[0]!r}, '--logger', 'wandb'])\n"
    )
    done = script(tmp_path / "go.py", cwd=tmp_path, code=2)
    assert (
        "--logger wandb needs the package" in done.stderr
        and "pip install 'litft[wandb]'" in done.stderr
    )


def test_what_only_the_resumed_part_has_measured_says_so(tiny, examples, tmp_path, capsys):
    """A score of step 2 is none of the model before its training, and best/ was not kept then."""
    args = LoRAFinetuneArgs(
        checkpoint_dir=str(tiny),
        data=DataArgs(path=[str(examples)], val_fraction=0.5, max_seq_length=128),
        train=TrainArgs(max_steps=2, global_batch_size=2, learning_rate=1e-20),
        eval=EvalArgs(interval=1, max_new_tokens=0, exact_match=False, forgetting=False),
        out_dir=str(tmp_path / "run"),
        precision="fp32",
    )
    litft.finetune(args)
    capsys.readouterr()
    more = replace(
        args,
        resume=True,
        train=replace(args.train, max_steps=3),
        eval=replace(args.eval, exact_match=True, max_new_tokens=4),
        save=replace(args.save, best=True),
    )
    litft.finetune(more)
    said = capsys.readouterr().out
    assert "exact match (since step 2): " in said
    assert "validation loss: " in said
    assert (
        "lowest at step 1" in said
        and "best/ is empty: that step was before --save.best" in said
    )


def test_a_best_that_is_no_longer_kept_is_named(tiny, examples, tmp_path, capsys):
    args = LoRAFinetuneArgs(
        checkpoint_dir=str(tiny),
        data=DataArgs(path=[str(examples)], val_fraction=0.5, max_seq_length=128),
        train=TrainArgs(max_steps=1, global_batch_size=4, learning_rate=1e-3),
        eval=EvalArgs(interval=1, max_new_tokens=0, forgetting=False),
        out_dir=str(tmp_path / "run"),
        precision="fp32",
    )
    args.save.best = True
    litft.finetune(args)
    assert ", which is in best/" in capsys.readouterr().out
    more = replace(args, resume=True, train=replace(args.train, max_steps=4))
    litft.finetune(replace(more, save=replace(args.save, best=False)))
    said = capsys.readouterr().out
    assert "lowest at step 4" in said
    assert "; best/ has step 1" in said
