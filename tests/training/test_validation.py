"""Validation: the loss and exact matches on held-out examples."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import rows_of, write_records
from lightning_fabric import Fabric

import litft
from litft import run_dir
from litft.args import DataArgs, EvalArgs, LoRAFinetuneArgs, PreferenceArgs, TrainArgs
from litft.data.chat_template import STYLES
from litft.data.dataset import load_data
from litft.data.packing import BatchLayout
from litft.data.tokenizer import Tokenizer
from litft.distributed.process_group import CpuProcessGroup, Processes
from litft.evaluation.forgetting import loss_parts
from litft.evaluation.scoring import (
    evenly_spaced,
    exact_match,
    greedy_answers,
    hardest_examples,
    question_text,
    validation_answers,
)
from litft.evaluation.verdict import mean_of, parts_in
from litft.training.objectives import KTO, ORPO, Supervised
from litft.training.objectives.objective import Totals
from litft.training.validation import Measured, Validation
from litft.training.validation_losses import validation_scores

SUPERVISED = Supervised(PreferenceArgs())


def test_sets_of_which_a_part_is_measured_count_whole(tiny, tmp_path):
    """Each set has one example many times, so that a part has the loss of the whole."""
    train = [{"prompt": f"q {n}", "completion": "a b"} for n in range(8)]
    paths = []
    for name, record, count in (
        ("x", {"prompt": "What is it?", "completion": "It is the sun."}, 40),
        ("y", {"prompt": "Go on.", "completion": "No, no, no, no, no, no, no, no, no."}, 4),
    ):
        path = write_records(tmp_path / f"{name}.jsonl", [record] * count)
        paths.append(f"{name}={path}")
    data = DataArgs(path=[str(write_records(tmp_path / "t.jsonl", train))], val_path=paths)
    losses = []
    for max_batches in (1, None):
        args = LoRAFinetuneArgs(
            checkpoint_dir=str(tiny),
            data=data,
            train=TrainArgs(max_steps=1, global_batch_size=4),
            eval=EvalArgs(max_new_tokens=0, forgetting=False, max_batches=max_batches),
            out_dir=str(tmp_path / f"run-{max_batches}"),
            precision="fp32",
        )
        folder = litft.finetune(args).folder
        losses.append(float(rows_of(folder)[0]["val_loss"]))
        # the verdict, sweeps and cards compare the same mean
        for when, row in (("before", rows_of(folder)[0]), ("after", rows_of(folder)[-1])):
            parts = parts_in(folder / run_dir.VERDICT, when)
            assert mean_of(parts["loss"]) == pytest.approx(float(row["val_loss"]), rel=1e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_an_answer_counts_as_one_however_few_of_its_set_have_one():
    """Of the second set, 38 of 40 measured examples are texts."""
    sets = SimpleNamespace(sets={"a": np.arange(20), "b": np.arange(20, 60)})
    answered = [*range(20), 58, 59]
    assert set(Validation._weights_of(sets, answered, range(60))) == {1.0}
    # every second one is measured
    assert set(Validation._weights_of(sets, answered[::2], range(0, 60, 2))) == {2.0}


SETS = [Totals(4, 10, 3, 1), Totals(8, 90, 6, 2)]


def test_several_sets_of_pairs_count_as_one():
    """The odds are a mean over pairs, the loss of the chosen answers one over tokens."""
    orpo = ORPO(PreferenceArgs())
    # sums over all pairs and tokens of each set
    odds = [2.0, 4.0]
    log_probs = [-30.0, -45.0]
    by_set = []
    for counts, of_odds, of_tokens in zip(SETS, odds, log_probs, strict=True):
        loss = of_odds / counts.samples - of_tokens / counts.tokens
        by_set.append({"loss": loss, "chosen_logp": of_tokens / counts.samples})
    together = orpo.together(by_set, SETS)
    assert together["loss"] == pytest.approx(sum(odds) / 12 - sum(log_probs) / 100)
    assert together["chosen_logp"] == pytest.approx(sum(log_probs) / 12)


def test_several_sets_of_labels_count_as_one():
    kto = KTO(PreferenceArgs(sft_weight=0.5))
    by_set = []
    for number, counts in enumerate(SETS):
        log_probs = [-30.0, -45.0][number]
        by_set.append(
            {
                "loss": [1.0, 2.0][number] - 0.5 * log_probs / counts.tokens,
                "margin": 9.0,
                "chosen_reward": [1.0, 4.0][number],
                "rejected_reward": [-3.0, 6.0][number],
                "chosen_logp": log_probs / counts.desirable,
            }
        )
    together = kto.together(by_set, SETS)
    assert together["loss"] == pytest.approx((1 * 4 + 2 * 8) / 12 + 0.5 * 75 / 100)
    # means over 9 desirable and 3 undesirable answers
    assert together["margin"] == pytest.approx((1 * 3 + 4 * 6) / 9 - (-3 * 1 + 6 * 2) / 3)


class Named(list):
    """Samples, each of a record of its own."""

    @property
    def names(self):
        return [(number + 1, 0, 0) for number in range(len(self))]


@pytest.fixture(scope="module")
def model_and_samples(tiny, examples):
    """A model, its tokenizer, twelve samples, of which every third has the model's own answer, and
    all data."""
    model, tokenizer = litft.load(tiny, precision="fp32")
    data = load_data(DataArgs(path=[str(examples)], val_fraction=0.0), tokenizer, 512, 256)
    samples = data.train[:12]
    prompts = [
        torch.cat((sample.answer[0], torch.tensor([5 + n]))).tolist()
        for n, sample in enumerate(samples)
    ]
    # otherwise the answers of a random model never end
    tokenizer.stop_ids = [last_greedy_token(model, prompt, 4) for prompt in prompts[::3]]
    generated = [
        greedy_answers(model, tokenizer, [(prompt, 20)])[0].text.strip()
        for prompt in prompts
    ]
    answers = [
        torch.tensor(tokenizer.encode(text, bos=False))
        if number % 3 == 0
        else sample.answer[1]
        for number, (sample, text) in enumerate(zip(samples, generated, strict=True))
    ]
    triples = zip(samples, prompts, answers, strict=True)
    samples = [
        replace(sample, answer=(torch.tensor(prompt), answer))
        for sample, prompt, answer in triples
    ]
    return model, tokenizer, samples, data


@torch.no_grad()
def last_greedy_token(model, prompt, count):
    """Return the last of `count` greedy tokens, generated without a KV cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-1]


@pytest.fixture(scope="module")
def single_process():
    fabric = Fabric(accelerator="cpu", devices=1)
    return fabric, CpuProcessGroup(1, "60s")


def matches_one_by_one(model, tokenizer, samples):
    """Return whether each sample's answer is generated exactly, decoding one sample at a time."""
    matches = []
    for sample in samples:
        prompt, expected = (ids.tolist() for ids in sample.answer)
        (answer,) = greedy_answers(model, tokenizer, [(prompt, len(expected) + 8)])
        matches += [
            answer.ended and answer.text.strip() == tokenizer.decode(expected).strip()
        ]
    return matches


@torch.no_grad()
def test_batched_answers_equal_answers_one_by_one(model_and_samples, single_process):
    model, tokenizer, samples, _ = model_and_samples
    expected = matches_one_by_one(model, tokenizer, samples)
    assert 0 < sum(expected) < len(samples)
    for rows in (1, 5, 12):
        answers = validation_answers(*single_process, model, tokenizer, samples, rows)
        assert len(answers) == len(samples) and exact_match(answers) == sum(expected) / len(
            samples
        )
    unanswered = [replace(samples[0], answer=None)]
    moved = [answer._replace(number=answer.number + 1) for answer in answers]
    assert (
        validation_answers(*single_process, model, tokenizer, unanswered + samples, 5)
        == moved
    )
    assert validation_answers(*single_process, model, tokenizer, unanswered) == []


@torch.no_grad()
def test_exact_match_uses_the_samples_of_the_loss(
    model_and_samples, single_process, tmp_path
):
    model, tokenizer, samples, data = model_and_samples
    # four of twelve, evenly spaced
    expected = matches_one_by_one(model, tokenizer, samples)[::3]
    args = EvalArgs(max_batches=2, exact_match=True, max_new_tokens=0)
    measured = Measured(tokenizer, replace(data, val=samples), args)
    validation = Validation(
        Processes(*single_process), model, measured, tmp_path / "samples.jsonl"
    )
    row = validation.measure(0, BatchLayout(rows=3), 2)
    assert (
        row["exact_match"]
        == sum(expected) / 4
        != sum(matches_one_by_one(model, tokenizer, samples)) / 12
    )
    # not only before the first step
    assert (
        validation.measure(7, BatchLayout(rows=3), 2)["exact_match"] == row["exact_match"]
    )
    (loss,) = validation_scores(
        single_process[0], SUPERVISED, model, samples[::3], BatchLayout(rows=1)
    )
    assert row["val_loss"] == pytest.approx(loss, rel=1e-5)


@torch.no_grad()
def test_exact_match_counts_sets_of_which_a_part_is_measured_whole(
    model_and_samples, single_process, tmp_path, monkeypatch
):
    """As the loss does beside it, and the verdict."""
    model, tokenizer, samples, data = model_and_samples
    matches = matches_one_by_one(model, tokenizer, samples)
    # of the second set all are measured, of the first one a fifth
    hits = [number for number, is_hit in enumerate(matches) if is_hit]
    misses = [number for number, is_hit in enumerate(matches) if not is_hit]
    assert hits and misses
    chosen = [samples[hits[0]]] * 10 + [samples[misses[0]]] * 2
    sets = {"large": np.arange(10), "small": np.arange(10, 12)}
    data = replace(data, val=Named(chosen))
    monkeypatch.setattr(type(data), "val_sets", sets)
    args = EvalArgs(max_batches=1, exact_match=True, max_new_tokens=0)
    validation = Validation(
        Processes(*single_process),
        model,
        Measured(tokenizer, data, args),
        tmp_path / "samples.jsonl",
    )
    row = validation.measure(0, BatchLayout(rows=3), 2)
    assert row["exact_match"] == pytest.approx(10 / 12)
    validation.measure_before(BatchLayout(rows=3), 2)
    parts = validation.before_after.before["exact_match"]
    assert mean_of(parts) == pytest.approx(row["exact_match"])


@torch.no_grad()
def test_metrics_without_an_answer_are_measured_once(
    model_and_samples, single_process, tmp_path
):
    """A step that is measured is not measured again."""
    model, tokenizer, samples, data = model_and_samples
    texts = [replace(sample, answer=None) for sample in samples]
    args = EvalArgs(exact_match=True, max_new_tokens=0)
    validation = Validation(
        Processes(*single_process),
        model,
        Measured(tokenizer, replace(data, val=Named(texts)), args),
        tmp_path / "samples.jsonl",
    )
    assert "exact_match" not in validation.measure(3, BatchLayout(rows=3), 2)
    assert math.isnan(validation.metric_values["exact_match"][3])


class Twice(list):
    """Samples, each record having two of them."""

    @property
    def names(self):
        return [(number // 2 + 1, 0, number % 2) for number in range(len(self))]


@torch.no_grad()
def test_answers_of_one_record_are_one_example(model_and_samples, single_process, tmp_path):
    """An interval draws them together."""
    model, tokenizer, samples, data = model_and_samples
    args = EvalArgs(exact_match=True, max_new_tokens=0)
    measured = Measured(tokenizer, replace(data, val=Twice(samples)), args)
    validation = Validation(
        Processes(*single_process), model, measured, tmp_path / "samples.jsonl"
    )
    validation.measure_before(BatchLayout(rows=3), 2)
    parts = validation.before_after.before["exact_match"]
    assert len(parts) == len(samples) // 2
    assert {part.weight for part in parts.values()} == {2.0}


@torch.no_grad()
def test_the_loss_is_a_mean_over_target_tokens(model_and_samples, single_process):
    """Micro-batches with few targets count less than those with many."""
    model, _, _, data = model_and_samples
    # the shortest and the longest
    samples = [sample for number, sample in enumerate(data.train) if number % 5 in (0, 4)]
    losses, counts = zip(
        *(model(sample.tokens[None], targets=sample.targets[None]) for sample in samples),
        strict=True,
    )
    expected = float(sum(losses) / sum(counts))
    mean_of_means = sum(
        float(loss / count) for loss, count in zip(losses, counts, strict=True)
    ) / len(samples)
    assert abs(mean_of_means / expected - 1) > 1e-3
    for rows in (1, 5):
        (loss,) = validation_scores(
            single_process[0], SUPERVISED, model, samples, BatchLayout(rows)
        )
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_truncated_answer_is_no_exact_match(model_and_samples, single_process):
    """At the end of the context only the beginning of an answer is generated."""
    model, tokenizer, samples, _ = model_and_samples
    prompts = [
        [1, *range(20 + n, 20 + n + model.config.max_positions - 2)] for n in range(20)
    ]
    answers = greedy_answers(model, tokenizer, [(prompt, 12) for prompt in prompts])
    prompt, text = next(
        (ids, answer.text)
        for ids, answer in zip(prompts, answers, strict=True)
        if answer.text.strip() and not answer.ended
    )
    truncated = replace(
        samples[0],
        answer=(torch.tensor(prompt), torch.tensor(tokenizer.encode(text, bos=False))),
    )
    (answer,) = validation_answers(*single_process, model, tokenizer, [truncated])
    assert answer.answer == answer.expected and exact_match([answer]) == 0


@pytest.mark.parametrize(
    "layout",
    [BatchLayout(rows=1), BatchLayout(rows=5), BatchLayout(rows=1, row_tokens=256)],
    ids=str,
)
@torch.no_grad()
def test_the_hardest_examples_have_the_largest_losses(model_and_samples, layout):
    model, tokenizer, _, data = model_and_samples
    samples, losses = data.train[:12], {}
    for number, sample in enumerate(samples):
        loss, count = model(sample.tokens[None], targets=sample.targets[None])
        losses[number] = float(loss / count)
    expected = sorted(losses, key=losses.get, reverse=True)[:3]
    parts = loss_parts(model, samples, layout)
    mean_losses = [part.value / part.weight for part in parts.values()]
    hardest = hardest_examples(tokenizer, samples, mean_losses, 3)
    assert [example.loss for example in hardest] == pytest.approx(
        [losses[number] for number in expected], rel=1e-5
    )
    for example, number in zip(hardest, expected, strict=True):
        ids = samples[number].answer
        prompt, answer = (
            question_text(tokenizer, ids[0].tolist()),
            tokenizer.decode(ids[1].tolist()).strip(),
        )
        assert (example.prompt, example.answer, example.tokens) == (
            prompt,
            answer,
            samples[number].supervised,
        )
    assert len(hardest_examples(tokenizer, samples[:2], mean_losses, 5)) == 2


@torch.no_grad()
def test_the_models_own_answers_are_short(model_and_samples, single_process, tmp_path):
    """A run whose expected answers are long would otherwise not end for minutes; packed rows are
    answered together."""
    model, tokenizer, samples, data = model_and_samples
    batches = []
    for max_new_tokens in (0, 2):
        args = EvalArgs(max_batches=2, max_new_tokens=max_new_tokens)
        path = tmp_path / "samples.jsonl"
        measured = Measured(tokenizer, replace(data, val=Named(samples)), args)
        validation = Validation(Processes(*single_process), model, measured, path)
        validation.before_batch = lambda: batches.append(1)
        validation.measure_after(BatchLayout(rows=1, row_tokens=2048), 4)
        owns = [example.own for example in validation.hardest]
        if not max_new_tokens:
            assert len(owns) == 5 and not any(owns)
            batches.clear()
    assert len(batches) < 5  # of the losses and of the answers
    for example in validation.hardest:
        chosen = evenly_spaced(samples, 8)[example.number]
        (answer,) = greedy_answers(model, tokenizer, [(chosen.answer[0].tolist(), 2)])
        assert example.own == answer.text.strip() + (" …" if not answer.ended else "")
    assert any(own.endswith(" …") for own in owns)


QUESTION = "Is 2 < 3?\n\nTell me, please."
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": QUESTION}],
    "two turns": [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": QUESTION},
    ],
}


# as Qwen's template writes the result of a tool, and as Llama's
_TURNS = (
    "{% for m in messages %}{% if m.role == 'tool' %}RESULT{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATES = {
    "tools_as_user_turns": _TURNS.replace(
        "RESULT",
        "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n",
    ),
    "tools_with_a_role": _TURNS.replace(
        "RESULT", "<|im_start|>ipython\n{{ m.content }}<|im_end|>\n"
    ),
}


@pytest.mark.parametrize("style", sorted({*STYLES} - {"llama2", "plain"}))
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_the_last_user_message_is_shown(tokenizer_folder, style, kind):
    tokenizer = Tokenizer(tokenizer_folder("bytes"))
    tokenizer.use_template(STYLES[style])
    rendered = tokenizer.apply_chat_template(
        CONVERSATIONS[kind], add_generation_prompt=True
    )
    assert question_text(tokenizer, tokenizer.encode(rendered, bos=False)) == QUESTION


CALL = {
    "type": "function",
    "id": "a1b2c3d40",
    "function": {"name": "f", "arguments": {"a": 1}},
}
AFTER_A_CALL = [
    *CONVERSATIONS["two turns"],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a1b2c3d40", "name": "f", "content": "open"},
]


@pytest.mark.parametrize("style", ["tools_as_user_turns", "tools_with_a_role"])
def test_the_question_is_shown_for_an_answer_after_a_call(tokenizer_folder, style):
    """Some templates write the result of a tool as a message of the user."""
    tokenizer = Tokenizer(tokenizer_folder("bytes"))
    tokenizer.use_template(TOOL_TEMPLATES[style])
    rendered = tokenizer.apply_chat_template(AFTER_A_CALL, add_generation_prompt=True)
    assert question_text(tokenizer, tokenizer.encode(rendered, bos=False)) == QUESTION


def test_a_prompt_without_a_known_beginning_is_shown_whole(tokenizer_folder):
    tokenizer = Tokenizer(tokenizer_folder("bytes"))
    assert (
        question_text(tokenizer, tokenizer.encode("Once upon a time")) == "Once upon a time"
    )
    tokenizer.use_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert (
        question_text(tokenizer, tokenizer.encode("Once upon a time")) == "Once upon a time"
    )


@torch.no_grad()
def test_answers_of_special_tokens_are_compared(model_and_samples, single_process):
    """Texts without them would all be equal."""
    model, tokenizer, samples, _ = model_and_samples
    tokenizer = copy.copy(tokenizer)
    label = tokenizer.encode("x", bos=False)[-1]
    tokenizer.special_ids = {*tokenizer.special_ids, label}
    prompt, _ = samples[0].answer
    labelled = replace(samples[0], answer=(prompt, torch.tensor([label, tokenizer.end_id])))
    (result,) = validation_answers(*single_process, model, tokenizer, [labelled])
    assert result.expected == tokenizer.decode([label], skip_special=False).strip() != ""


@pytest.mark.parametrize("rollouts", [None, object()])
def test_the_line_of_the_best_step_names_a_better_base(rollouts):
    """Step 0 is never the best, but a run that has made the model worse says so."""
    validation = SimpleNamespace(losses={0: 0.5, 2: 0.9, 4: 0.7}, rollouts=rollouts, best=4)
    text = Validation.best_text.fget(validation)
    assert "at step 4" in text and "and before the first step" in text
    validation.losses[0] = 0.8
    assert "before" not in Validation.best_text.fget(validation)
