"""What a model forgets: its loss on neutral text and on its earlier answers, before and after a
run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import script
from lightning_fabric import Fabric
from transformers import AutoModelForCausalLM

import litft
from litft import run_dir
from litft.args import (
    DataArgs,
    EvalArgs,
    LoRAFinetuneArgs,
    PreferenceArgs,
    SaveArgs,
    TrainArgs,
)
from litft.data.dataset import load_data
from litft.data.packing import BatchLayout
from litft.distributed.process_group import CpuProcessGroup, Processes
from litft.evaluation.forgetting import (
    NEUTRAL,
    NUM_QUESTIONS,
    OWN_ANSWERS,
    answer_sample,
    loss_parts,
    neutral_paragraphs,
    neutral_samples,
    ordinary_questions,
    question_prompts,
)
from litft.evaluation.scoring import MAX_ANSWER_ROWS
from litft.model.kv_cache import KVCache
from litft.training.before_after import (
    CACHE_BYTES,
    BeforeAfter,
    ComparedTexts,
    _answers_at_once,
    measures_forgetting,
)
from litft.training.objectives import Supervised
from litft.training.schedule import Schedule


def run_args(folder, examples, out, **values) -> LoRAFinetuneArgs:
    """Return the flags of a short run that measures what it forgets."""
    train = TrainArgs(max_steps=4, global_batch_size=2, learning_rate=0.02)
    settings = {
        "data": DataArgs(path=[str(examples)], val_fraction=0.2, max_seq_length=256),
        "train": train,
        "eval": EvalArgs(forgetting=True, exact_match=True),
        "save": SaveArgs(interval=2, keep_last=9),
        "precision": "fp32",
    }
    return LoRAFinetuneArgs(
        checkpoint_dir=str(folder), out_dir=str(out), **settings | values
    )


def scores_of(run):
    """Return the verdicts of a run by score, and its earlier answers."""
    content = json.loads((run / run_dir.VERDICT).read_text())
    return {found["score"]: found for found in content["verdicts"]}, content["own_answers"]


@pytest.fixture(scope="module")
def finished(tiny, examples, tmp_path_factory):
    """A finished run."""
    out = tmp_path_factory.mktemp("forgetting") / "run"
    litft.finetune(run_args(tiny, examples, out))
    return out


def test_the_embedded_texts_are_there():
    paragraphs = neutral_paragraphs()
    assert 50_000 < sum(map(len, paragraphs)) < 53_000 and len(paragraphs) >= 60
    questions = ordinary_questions()
    assert len(set(questions)) == len(questions) == 340


def test_the_mean_losses_are_per_token(tiny, examples, tmp_path):
    """The report shows the examples with the largest ones."""
    model, tokenizer = litft.load(tiny, precision="fp32")
    data = load_data(DataArgs(path=[str(examples)], val_fraction=0.5), tokenizer, 512, 256)
    samples = list(data.val)
    processes = Processes(Fabric(accelerator="cpu", devices=1), CpuProcessGroup(1, "60s"))
    compared = BeforeAfter(processes, model, tokenizer, data, tmp_path, lambda: None)
    texts = ComparedTexts(
        Supervised(PreferenceArgs()),
        forgetting=False,
        examples=samples,
        names=data.val.names,
    )
    compared.measure_before(texts, BatchLayout(rows=2))
    for sample, mean in zip(samples, compared.mean_losses, strict=True):
        loss, count = model(sample.tokens[None], targets=sample.targets[None])
        assert mean == pytest.approx(float(loss / count), rel=1e-5)


def test_the_cache_of_answers_at_once_is_bounded(tiny):
    """Also with a long system prompt, which is in every prompt."""
    model, _ = litft.load(tiny, precision="fp32")
    layout = BatchLayout(rows=1)
    assert _answers_at_once(model, layout, longest=40) == MAX_ANSWER_ROWS
    token_bytes = KVCache.token_bytes(model.config, torch.float32)
    longest = CACHE_BYTES // (3 * token_bytes)
    assert _answers_at_once(model, layout, longest) == 2
    assert _answers_at_once(model, layout, longest=100 * longest) == 1


def test_losses_equal_those_of_transformers(tiny):
    """Of each paragraph, and of an answer without its prompt."""
    model, tokenizer = litft.load(tiny, precision="fp32")
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    samples = neutral_samples(tokenizer, limit=64)[:5]
    prompt = question_prompts(tokenizer, ordinary_questions()[:1])[0]
    samples.append(answer_sample(prompt, [3, 1, 4], limit=len(prompt) + 1))
    parts = loss_parts(model, samples, BatchLayout(rows=2))
    for (total, count), sample in zip(parts.values(), samples, strict=True):
        labels = torch.cat((torch.tensor([-100]), sample.targets))[None]
        ids = torch.cat((sample.tokens, sample.targets[-1:].clamp(min=0)))[None]
        assert total / count == pytest.approx(
            float(reference(ids, labels=labels).loss), rel=1e-5
        )
    # the limit has room for two of the three tokens of the answer
    assert count == 2


def test_a_run_says_whether_it_is_better_and_what_it_forgot(finished, tiny, tmp_path):
    """Its figures are those that `run_eval` finds afterwards, and reports and runs show them."""
    found, answers = scores_of(finished)
    assert list(found) == ["loss", "exact_match", NEUTRAL, OWN_ANSWERS]
    assert len(answers) == NUM_QUESTIONS
    texts = run_dir.verdict_texts(finished)
    page = (finished / "report.html").read_text()
    assert all(text in page for text in texts)
    assert "--data.replay 0.1 keeps more of it" in page and "not measured" not in page
    done = script("scripts/runs.py", "--folder", finished, cwd=tmp_path)
    assert texts[0].partition(" (")[0] in done.stdout
    assert f"; forgotten: {OWN_ANSWERS}" in done.stdout

    flags = [
        "--checkpoint_dir",
        finished / "final",
        "--precision",
        "fp32",
        "--out",
        "out.json",
    ]
    script("scripts/run_eval.py", *flags, "--max_new_tokens", "8", cwd=tmp_path)
    evaluated = json.loads((tmp_path / "out.json").read_text())
    by_score = {verdict["score"]: verdict for verdict in evaluated["verdicts"]}
    # the run's length limit is the model's context
    for score in ("loss", NEUTRAL):
        assert by_score[score]["difference"] == pytest.approx(
            found[score]["difference"], rel=0.02
        )
    assert by_score[OWN_ANSWERS]["outcome"] == found[OWN_ANSWERS]["outcome"] == "worse"


def test_a_resumed_run_compares_with_the_model_before_its_first_step(
    finished, tiny, examples, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "step-000004")
    litft.finetune(run_args(tiny, examples, run, resume=True))
    assert (run / run_dir.VERDICT).read_bytes() == (finished / run_dir.VERDICT).read_bytes()


def test_forgetting_is_measured_where_it_takes_a_small_part_of_the_run(
    tiny, examples, tmp_path
):
    args = run_args(tiny, examples, tmp_path, eval=EvalArgs())
    _, tokenizer = litft.load(tiny)
    data = load_data(args.data, tokenizer, 512, 256)
    short = Schedule(args, data, ranks=1)
    args.train.max_steps = 100_000
    assert [
        measures_forgetting(args, s) for s in (short, Schedule(args, data, ranks=1))
    ] == [
        False,
        True,
    ]


@pytest.mark.slow
def test_two_processes_find_the_same(finished, tiny, examples, tmp_path):
    config = tmp_path / "config.yaml"
    shutil.copy(finished / "config.yaml", config)
    script(
        "finetune/lora.py",
        "--config",
        config,
        "--devices",
        "2",
        "--out_dir",
        "run",
        cwd=tmp_path,
    )
    alone, answers = scores_of(finished)
    together, answers_of_two = scores_of(tmp_path / "run")
    assert answers_of_two == answers
    for score, verdict in alone.items():
        np.testing.assert_allclose(
            together[score]["difference"], verdict["difference"], rtol=1e-3, atol=1e-6
        )


def test_a_damaged_verdict_is_no_verdict(tmp_path: Path):
    for text in ("", "{}", '{"verdicts": 3}', '{"verdicts": [{}]}'):
        (tmp_path / run_dir.VERDICT).write_text(text)
        assert run_dir.verdict_texts(tmp_path) == []


@pytest.mark.parametrize(
    "text", ["", '{"verdicts": []}', '{"before": {"loss": 3}}', "[[1]]"]
)
def test_a_run_with_a_damaged_verdict_is_resumed(finished, tiny, examples, tmp_path, text):
    """It ends without a comparison."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "step-000004")
    (run / run_dir.VERDICT).write_text(text)
    litft.finetune(run_args(tiny, examples, run, resume=True))
    assert run_dir.finished(run) and run_dir.verdict_texts(run) == []
