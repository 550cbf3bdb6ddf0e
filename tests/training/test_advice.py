"""What a dry run advises, and the warnings of settings that are known to fail."""

from dataclasses import replace

import pytest
from conftest import write_records

from litft.args import DataArgs, FullFinetuneArgs, LoRAArgs, LoRAFinetuneArgs, TrainArgs
from litft.commands.finetune import prepare_run
from litft.training.advice import FAR, advice_lines, warnings_of_settings
from litft.training.usual_rates import default_lora_rate, usual_rate


@pytest.fixture
def prepared(tiny, tmp_path):
    """Return a function that prepares a run on some records with flags."""

    def prepare(cls=LoRAFinetuneArgs, count=40, words=5, **values):
        records = []
        for number in range(count):
            answer = f"Number {number} " + "word " * words
            records.append({"prompt": f"Question {number}?", "completion": answer})
        path = write_records(tmp_path / f"{count}.jsonl", records)
        data = DataArgs(path=[str(path)])
        return prepare_run(
            cls(checkpoint_dir=str(tiny), data=data, precision="fp32", **values)
        )

    return prepare


@pytest.mark.parametrize(
    "model_type, width, method, expected",
    [
        ("llama", 4096, "lora", 2.86e-4),
        ("qwen3", 2560, "lora", 4.9e-4),
        ("llama", 2000, "full", 5e-5),
    ],
)
def test_the_usual_rate_is_that_of_the_source(
    monkeypatch, prepared, model_type, width, method, expected
):
    """As `get_lr` of Thinking Machines' cookbook gives it."""
    setup = prepared(FullFinetuneArgs if method == "full" else LoRAFinetuneArgs).setup
    config = replace(setup.source.config, model_type=model_type, dim=width)
    assert usual_rate(method, setup.args, config) == pytest.approx(expected, rel=0.01)


def test_the_default_rate_of_lora_is_by_width(prepared):
    """At most the rate that was best for small models; other objectives have their own."""
    setup = prepared().setup
    rates = {}
    for width in (288, 576, 2048, 4096, 8192):
        config = replace(setup.source.config, dim=width)
        rates[width] = default_lora_rate(setup.args, config)
    assert rates == {288: 1e-3, 576: 1e-3, 2048: 4.9e-4, 4096: 2.9e-4, 8192: 1.7e-4}
    assert setup.args.train.learning_rate == 1e-3
    pairs = replace(setup.args, objective="dpo")
    assert default_lora_rate(pairs, setup.source.config) is None


def test_the_rank_has_room_for_what_is_learned(prepared):
    run = prepared(lora=LoRAArgs(r=1, alpha=2))
    (line,) = [line for line in advice_lines(run.setup, run.schedule) if "rank" in line]
    learned = int(run.schedule.data.train.supervised.sum())
    assert f"rank: 1 is enough for {learned:,} learned tokens" in line
    assert "it is 1, with" in line


def test_rates_of_the_other_method_are_warned_about(prepared):
    full = prepared(FullFinetuneArgs)
    usual = usual_rate("full", full.setup.args, full.setup.source.config)

    def warned(cls, rate):
        run = prepared(cls, train=TrainArgs(learning_rate=rate))
        return list(warnings_of_settings(run.setup, run.schedule))

    (line,) = warned(FullFinetuneArgs, usual * FAR * 1.1)
    assert "is a rate for LoRA" in line
    assert warned(FullFinetuneArgs, usual * FAR * 0.9) == []
    (line,) = warned(LoRAFinetuneArgs, usual * 10 / FAR * 0.9)
    assert "is a rate for full fine-tuning" in line
    assert warned(LoRAFinetuneArgs, usual * 10 / FAR * 1.1) == []
    # a rate for nothing
    (line,) = warned(FullFinetuneArgs, 50)
    assert "50 is far too high: full fine-tuning usually takes" in line
    (line,) = warned(LoRAFinetuneArgs, 50)
    assert "50 is far too high" in line
    # defaults are measured
    assert warned(LoRAFinetuneArgs, None) == []


def test_many_epochs_of_many_examples_are_warned_about(prepared):
    def warned(count, epochs):
        run = prepared(count=count, train=TrainArgs(epochs=epochs))
        return list(warnings_of_settings(run.setup, run.schedule))

    (line,) = warned(1100, 9)
    assert "9 epochs of" in line and "--save.best" in line
    assert warned(1100, 3) == warned(40, 9) == []


def test_a_batch_size_that_gives_enough_steps_is_named(prepared):
    run = prepared(count=400)
    (line,) = [line for line in advice_lines(run.setup, run.schedule) if "epochs" in line]
    batch = 4 * len(run.schedule.data.train) // 100
    assert (
        1 < batch < 16
        and f"--train.global_batch_size, {batch}, has about 100 steps" in line
    )
