"""What a run measures on examples that it does not learn from."""

from dataclasses import replace

import pytest
import torch
from lightning_fabric import Fabric

import litft
from litft.args import DataArgs, EvalArgs
from litft.data.dataset import load_data
from litft.data.packing import Layout
from litft.distributed.process_group import HostGroup
from litft.training.validation import Validation, exact_match, greedy_answers, validation_loss


@pytest.fixture(scope="module")
def asked(tiny, examples):
    """A model, its tokenizer and twelve samples, of which every third is answered as the model answers."""
    model, tokenizer = litft.load(tiny, precision="fp32")
    data = load_data(DataArgs(path=[str(examples)], val_fraction=0.0), tokenizer, 512, 256)
    samples = data.train[:12]
    prompts = [torch.cat((sample.answer[0], torch.tensor([5 + n]))).tolist() for n, sample in enumerate(samples)]
    tokenizer.stop_ids = [plainly(model, prompt, 4) for prompt in prompts[::3]]  # or answers of a random model never end
    said = [greedy_answers(model, tokenizer, [(prompt, 20)])[0].text.strip() for prompt in prompts]
    answers = [
        torch.tensor(tokenizer.encode(text, bos=False)) if number % 3 == 0 else sample.answer[1]
        for number, (sample, text) in enumerate(zip(samples, said, strict=True))
    ]
    made = zip(samples, prompts, answers, strict=True)
    samples = [replace(sample, answer=(torch.tensor(prompt), answer)) for sample, prompt, answer in made]
    return model, tokenizer, samples, data


@torch.no_grad()
def plainly(model, prompt, count):
    """The last of so many greedy tokens."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-1]


@pytest.fixture(scope="module")
def alone():
    fabric = Fabric(accelerator="cpu", devices=1)
    return fabric, HostGroup(1, "60s")


def right_one_by_one(model, tokenizer, samples):
    """Which samples' answers are generated to the letter, each by a decoder of its own."""
    found = []
    for sample in samples:
        prompt, expected = (ids.tolist() for ids in sample.answer)
        (said,) = greedy_answers(model, tokenizer, [(prompt, len(expected) + 8)])
        found += [said.ended and said.text.strip() == tokenizer.decode(expected).strip()]
    return found


@torch.no_grad()
def test_answers_made_at_once_are_those_made_one_by_one(asked, alone):
    model, tokenizer, samples, _ = asked
    expected = right_one_by_one(model, tokenizer, samples)
    assert 0 < sum(expected) < len(samples)
    for rows in (1, 5, 12):
        assert exact_match(*alone, model, tokenizer, samples, rows) == (sum(expected), len(samples))
    cut = [replace(samples[0], answer=None)]
    assert exact_match(*alone, model, tokenizer, cut + samples, 5) == (sum(expected), len(samples))
    assert exact_match(*alone, model, tokenizer, cut) == (0, 0)


@torch.no_grad()
def test_exact_match_is_counted_of_as_many_as_the_loss(asked, alone, tmp_path):
    model, tokenizer, samples, data = asked
    expected = right_one_by_one(model, tokenizer, samples)[::3]  # four of twelve, from all over them
    args = EvalArgs(max_batches=2, exact_match=True, max_new_tokens=0)
    validation = Validation(*alone, model, tokenizer, replace(data, val=samples), args, tmp_path / "samples.jsonl")
    row = validation.measure(0, Layout(rows=3), 2, final=True)
    assert row["exact_match"] == sum(expected) / 4 != sum(right_one_by_one(model, tokenizer, samples)) / 12
    loss = validation_loss(alone[0], model, samples[::3], Layout(rows=1))
    assert row["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_an_answer_that_would_go_on_is_not_right(asked, alone):
    """Where the context ends, only its beginning is seen."""
    model, tokenizer, samples, _ = asked
    prompts = [[1, *range(20 + n, 20 + n + model.config.max_positions - 2)] for n in range(20)]
    said = greedy_answers(model, tokenizer, [(prompt, 12) for prompt in prompts])
    prompt, text = next(
        (p, each.text) for p, each in zip(prompts, said, strict=True) if each.text.strip() and not each.ended
    )
    cut = replace(samples[0], answer=(torch.tensor(prompt), torch.tensor(tokenizer.encode(text, bos=False))))
    assert exact_match(*alone, model, tokenizer, [cut]) == (0, 1)
