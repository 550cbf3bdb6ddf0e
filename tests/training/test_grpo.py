"""Learning from rewards: closed forms, draws that depend on nothing but their place, processes,
kills, and functions that fail."""

import json
import math
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, copy_tokenizer, kill_after, rows_of, script, write_records
from torch import nn

import litft
from litft import run_dir
from litft.args import (
    DataArgs,
    EvalArgs,
    FullFinetuneArgs,
    GrpoArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    TrainArgs,
)
from litft.commands.finetune import prepare_run, run_finetuning
from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.distributed.devices import make_fabric
from litft.distributed.process_group import Processes, launch
from litft.evaluation.verdict import mean_of, parts_in
from litft.model.loss import IGNORED
from litft.training.divergence import DivergenceGuard
from litft.training.memory.choose import rollout_bytes
from litft.training.objectives.grpo import GRPO
from litft.training.reward_report import reward_lines
from litft.training.rollouts import MeasuredRewards, _pass_rates, rewards_together
from litft.training.trainer import Trainer

NAN = math.nan


class Given(nn.Module):
    """Stands for a network: its losses are a parameter, one for each target."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = nn.Parameter(torch.tensor(losses))

    def forward(self, tokens, *, targets, target_indices, reduction, **inputs):
        return self.losses


def completion(size: int, advantage: float, old: list[float] | None = None) -> Sample:
    """Return a completion of `size` tokens after a prompt of two."""
    tokens = torch.arange(1, size + 3)
    targets = tokens[1:].clone()
    targets[0] = IGNORED
    values = None if old is None else torch.tensor(old)
    return Sample(tokens[:-1], targets, advantage=advantage, old=values)


def test_ratio_and_clip_of_two_tokens_by_hand():
    """Ratios 1.5 and 0.5 with advantage 2, then with -2."""
    old = [math.log(0.4), math.log(0.4)]
    network = Given([-math.log(0.6), -math.log(0.2)])
    for advantage, expected, clipped, slopes in (
        # min(1.5 * 2, 1.2 * 2) = 2.4 without a gradient, min(0.5 * 2, 0.8 * 2) = 1
        (2.0, -(2.4 + 1.0) / 2, 0.5, [0.0, 0.5]),
        # min(-3, -2.4) = -3, min(-1, -1.6) = -1.6 without a gradient
        (-2.0, -(-3.0 - 1.6) / 2, 0.5, [-1.5, 0.0]),
    ):
        objective = GRPO(GrpoArgs(updates=2), [])
        (batch,) = BatchLayout(1).batches([completion(2, advantage, old)])
        network.zero_grad()
        values = objective(
            network, batch, objective.totals([completion(2, advantage, old)])
        )
        values[0].backward()
        assert values[0].item() == pytest.approx(expected)
        assert values[2].item() == pytest.approx(clipped)
        # of a loss, which is minus a log-probability
        assert network.losses.grad.tolist() == pytest.approx(slopes)


def test_advantages():
    rewards = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [0.0, NAN, 4.0]])
    sqrt8 = math.sqrt(8)
    everything = torch.tensor([1.0, 2, 3, 5, 5, 5, 0, 4]).std().item()
    expected = {
        "group_mean": [[-1, 0, 1], [0, 0, 0], [-2, 0, 2]],
        "group": [
            [-1 / 1.0001, 0, 1 / 1.0001],
            [0, 0, 0],
            [-2 / (sqrt8 + 1e-4), 0, 2 / (sqrt8 + 1e-4)],
        ],
        "leave_one_out": [[-1.5, 0, 1.5], [0, 0, 0], [-4, 0, 4]],
        "batch": [
            [x / (everything + 1e-4) for x in row]
            for row in [[-1, 0, 1], [0, 0, 0], [-2, 0, 2]]
        ],
    }
    for kind, rows in expected.items():
        advantages = GRPO(GrpoArgs(advantages=kind), []).advantages(rewards)
        torch.testing.assert_close(advantages, torch.tensor(rows, dtype=torch.float32))
    # in one group no completion is rated, in the other one is
    unrated = torch.tensor([[NAN, NAN], [NAN, 3.0]])
    for kind in expected:
        assert GRPO(GrpoArgs(advantages=kind), []).advantages(unrated).tolist() == [
            [0, 0],
            [0, 0],
        ]


def test_advantages_do_not_depend_on_the_order_of_prompts():
    generator = torch.Generator().manual_seed(1)
    rewards = torch.rand(9, 4, generator=generator, dtype=torch.float64)
    order = torch.randperm(9, generator=generator)
    for kind in ("group", "group_mean", "leave_one_out", "batch"):
        objective = GRPO(GrpoArgs(advantages=kind), [])
        torch.testing.assert_close(
            objective.advantages(rewards)[order], objective.advantages(rewards[order])
        )


@pytest.fixture(scope="module")
def model(make_model) -> Path:
    from transformers import Qwen3Config

    _, folder = make_model(Qwen3Config, vocab_size=512, max_position_embeddings=128)
    copy_tokenizer(ROOT / "tests" / "stories", folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    names = "the little girl went to play in the park with her red ball".split()
    records = []
    for number in range(12):
        question = " ".join(random.Random(number).sample(names, 2 + number % 5))
        records.append({"prompt": question, "answer": names[number % 7], "number": number})
    write_records(path, records)
    return path


REWARDS = """
def vowels(completion, number, completion_tokens):
    return sum(c in "aeiou" for c in completion) / completion_tokens + 0.01 * number
"""


@pytest.fixture(scope="module")
def flags(model, prompts, tmp_path_factory) -> LoRAFinetuneArgs:
    file = tmp_path_factory.mktemp("rewards") / "rewards.py"
    file.write_text(REWARDS)
    template = file.with_name("template.jinja")
    template.write_text(
        "{% for m in messages %}{{ m.content }}{{ ':' if m.role == 'user' else eos_token }}"
        "{% endfor %}"
    )
    return LoRAFinetuneArgs(
        checkpoint_dir=str(model),
        objective="grpo",
        reward=[f"{file}:vowels", "brief:6=0.5"],
        grpo=GrpoArgs(group_size=4, max_new_tokens=8),
        data=DataArgs(
            path=[str(prompts)], val_fraction=0.2, max_seq_length=64, template=str(template)
        ),
        train=TrainArgs(
            max_steps=4, global_batch_size=3, learning_rate=1e-2, lr_schedule="constant"
        ),
        eval=EvalArgs(max_new_tokens=0, interval=2),
        lora=LoRAArgs(r=4),
    )


def trainer_of(args: LoRAFinetuneArgs, folder: Path) -> Trainer:
    run = prepare_run(args)
    fabric = make_fabric(args, run.settings.strategy)
    return Trainer(Processes(fabric, launch(fabric, args.timeout)), run, folder)


def test_a_run_learns_and_records_it(flags, tmp_path):
    args = replace(flags, out_dir=str(tmp_path / "run"))
    evaluation = replace(args.eval, max_new_tokens=8)
    result = run_finetuning(
        replace(args, train=replace(args.train, max_steps=12), eval=evaluation)
    )
    rows = [row for row in rows_of(tmp_path / "run") if "reward" in row]
    assert len(rows) == 12
    first, last = (sum(row["reward"] for row in part) for part in (rows[:3], rows[-3:]))
    assert last > first
    # the completions of one prompt at each validation, with their rewards
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    rated = [item for item in map(json.loads, lines) if "reward" in item]
    assert len(rated) == 4 * len(
        [row for row in rows_of(tmp_path / "run") if "val_reward" in row]
    )
    assert len({item["prompt"] for item in rated}) == 1
    assert len({item["answer"] for item in rated}) > 4
    assert "reward 0." in (tmp_path / "run" / "report.html").read_text()
    for row in rows:
        total = row["reward_vowels"] + 0.5 * row["reward_brief"]
        assert row["reward"] == pytest.approx(total)
        # the decoder and the training pass agree on what was drawn
        assert row["mismatch"] < 1e-5
        assert 1 <= row["completion_tokens"] <= 8
        assert 0 <= row["truncated"] <= 1
        assert row["entropy"] > 0
    validations = [row for row in rows_of(tmp_path / "run") if "val_reward" in row]
    assert {"val_pass_1", "val_pass_4"} <= validations[0].keys()
    assert validations[-1]["val_loss"] == -validations[-1]["val_reward"]
    for when, row in (("before", validations[0]), ("after", validations[-1])):
        parts = parts_in(tmp_path / "run" / run_dir.VERDICT, when)
        assert mean_of(parts["reward"]) == pytest.approx(row["val_reward"])
    (text,) = run_dir.verdict_texts(tmp_path / "run")
    assert "reward +" in text
    assert (
        result is not None and (result.folder / "final" / "adapter_config.json").is_file()
    )


def test_the_demo_is_known_by_its_name(tmp_path):
    for flag in (["--config", "grpo-demo"], ["--objective", "grpo"]):
        done = script("finetune/lora.py", *flag, "--dry_run", cwd=tmp_path)
        assert "120 steps of 32 prompts with 8 completions each" in done.stdout
        assert "rewards of the first 32 answers of the data: exact 1" in done.stdout
        assert "tuned" in done.stdout


def test_prompts_are_prepared_and_shown(model, prompts, tmp_path):
    flags = ["--checkpoint_dir", model, "--data.path", prompts, "--objective", "grpo"]
    flags += ["--max_new_tokens", "8", "--data.template", "chatml", "--show", "2"]
    done = script("scripts/prepare_data.py", *flags, cwd=tmp_path)
    assert "prompts with 8 completions each" in done.stdout
    assert done.stdout.count("and at most 8 of a completion") == 2


def test_what_is_drawn_depends_on_its_place_alone(flags, tmp_path):
    """Rows that are generated at once, and the other prompts, change nothing."""
    trainer = trainer_of(flags, tmp_path / "a")
    prompts = trainer.samples.of_step(0)
    many = trainer.rollouts.rate("step 0", prompts)
    trainer.rollouts.rows = 3
    few = trainer.rollouts.rate("step 0", prompts)
    assert [c.tokens for c in many.completions] == [c.tokens for c in few.completions]
    alone = trainer.rollouts.rate("step 0", prompts[:4])
    assert [c.tokens for c in many.completions[:4]] == [c.tokens for c in alone.completions]
    other = trainer.rollouts.rate("step 1", prompts)
    assert [c.tokens for c in many.completions] != [c.tokens for c in other.completions]
    assert len({tuple(c.tokens) for c in many.completions[:4]}) > 1
    trainer.rollouts.close()


def test_gradients_do_not_depend_on_the_layout(flags, tmp_path):
    args = replace(flags, grpo=replace(flags.grpo, beta=0.1, updates=2, loss="dapo"))
    trainer = trainer_of(args, tmp_path / "a")
    step = trainer.samples.of_step(0)
    results = []
    for layout in (BatchLayout(12), BatchLayout(1), BatchLayout(2, 64), BatchLayout(5)):
        samples, _ = trainer.rollouts.collect(0, step, layout)
        totals = trainer.objective.totals(samples)
        trainer.model.zero_grad()
        loss = 0.0
        for batch in layout.batches(samples):
            values = trainer.objective(trainer.model.train(), batch, totals)
            values[0].backward()
            loss += float(values[0])
        results.append((loss, {n: p.grad.clone() for n, p in trainer.trained.items()}))
    trainer.rollouts.close()
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, results[0][1][name], rtol=1e-4, atol=1e-6)


def test_groups_with_one_reward_are_drawn_again(flags, tmp_path):
    """A group depends on its place and attempt alone; one with several rewards stays."""
    args = replace(flags, grpo=replace(flags.grpo, resample=2, max_new_tokens=3))
    trainer = trainer_of(args, tmp_path / "a")
    rollouts = trainer.rollouts
    prompts = trainer.samples.of_step(0)
    first = rollouts.rate("step 0", prompts)

    def tokens(rated, place: int) -> list[list[int]]:
        return [
            completion.tokens for completion in rated.completions[4 * place : 4 * place + 4]
        ]

    # a reward that is one for all but the second prompt, until the second attempt
    calls = []

    def rewards_of(name: str, places: list[int]) -> torch.Tensor:
        calls.append((name, places))
        rewards = torch.zeros(len(places), 4, dtype=torch.float64)
        for number, place in enumerate(places):
            if place == 1 or name.endswith("draw 2"):
                rewards[number] = torch.arange(4.0) + place
        return rewards

    rate = rollouts.rate

    def rated(name, prompts, places=None):
        result = rate(name, prompts, places)
        return replace(result, rewards=rewards_of(name, places or [0, 1, 2]))

    rollouts.rate = rated
    result = rollouts._with_unequal_rewards("step 0", prompts)
    rollouts.close()
    assert calls == [
        ("step 0", [0, 1, 2]),
        ("step 0, draw 1", [0, 2]),
        ("step 0, draw 2", [0, 2]),
    ]
    assert (result.rewards == torch.arange(4.0) + torch.arange(3.0)[:, None]).all()
    assert tokens(result, 1) == tokens(first, 1)
    alone = rate("step 0, draw 2", prompts[8:], [2])
    assert tokens(result, 2) == tokens(alone, 0) != tokens(first, 2)


def test_the_plan_counts_the_rollouts_of_validation(flags):
    """Validation answers its prompts at once, and they may be more than those of a step."""
    few = prepare_run(replace(flags, train=replace(flags.train, global_batch_size=1)))
    without = replace(flags.data, val_fraction=0.0)
    none = prepare_run(
        replace(flags, data=without, train=replace(flags.train, global_batch_size=1))
    )
    dtype = torch.float32
    validated = len(few.schedule.data.val)
    assert validated > 1
    of_validation = rollout_bytes(few.setup, few.schedule, dtype)
    assert of_validation == validated * rollout_bytes(none.setup, none.schedule, dtype)


def test_what_does_not_apply_neither_passes_nor_fails():
    values = torch.tensor([[1.0, 0.0, torch.nan], [torch.nan] * 3, [0.0, 0.5, 0.0]])
    of_completions, of_prompts = _pass_rates(values)
    assert of_completions == pytest.approx(1 / 5) and of_prompts == pytest.approx(1 / 2)


def test_sets_count_what_is_rated_of_them():
    """Of the second set, one of ten prompts is rated, and none by the first function."""
    first = MeasuredRewards([-0.1, 0.1, 0.0, 0.0], [20, 20, 20, 10], of_prompts=[])
    second = MeasuredRewards([-1.0, 1.0, math.nan, math.nan], [2, 2, 0, 0], of_prompts=[])
    loss, reward, at_one, at_all = rewards_together([first, second], [1.0, 3.0])
    assert reward == pytest.approx((20 * 0.1 + 2 * 3 * 1.0) / 26)
    assert (loss, at_one, at_all) == (-reward, 0.0, 0.0)


@pytest.mark.slow
def test_what_was_forgotten_is_measured_at_temperature_1(flags, tmp_path):
    """The temperature of the rollouts is also that of the loss."""
    before = []
    for temperature in (1.0, 0.5):
        args = replace(
            flags,
            grpo=replace(flags.grpo, temperature=temperature),
            train=replace(flags.train, max_steps=1),
            eval=replace(flags.eval, forgetting=True),
            out_dir=str(tmp_path / str(temperature)),
        )
        run_finetuning(args)
        verdict = json.loads((tmp_path / str(temperature) / "verdict.json").read_text())
        before.append(verdict["before"]["loss on neutral text"])
        # the decoder's log-probabilities are known at temperature 1 alone
        rows = [row for row in rows_of(tmp_path / str(temperature)) if "reward" in row]
        assert rows and all(("mismatch" in row) == (temperature == 1) for row in rows)
    assert before[0] == before[1]


def test_a_first_function_that_never_applies(flags, tmp_path):
    """No completion passes or fails by it. The time of rewards is no waiting for data."""
    (tmp_path / "rewards.py").write_text(
        "import time\n\n\ndef none(completion):\n    time.sleep(0.03)\n    return None\n"
    )
    reward = [f"{tmp_path / 'rewards.py'}:none", "brief:6=0.5"]
    run_finetuning(replace(flags, reward=reward, out_dir=str(tmp_path / "run")))
    rows = rows_of(tmp_path / "run")
    assert any("val_reward" in row for row in rows)
    assert not any("val_pass_1" in row for row in rows)
    shares = [row["data_share"] for row in rows if "data_share" in row]
    assert shares and max(shares) < 0.3


def test_validation_sets_have_their_rewards(flags, prompts, tmp_path):
    args = replace(
        flags,
        data=replace(flags.data, val_path=[f"a={prompts}", f"b={prompts}"], val_fraction=0),
        train=replace(flags.train, max_steps=1),
        out_dir=str(tmp_path / "run"),
    )
    run_finetuning(args)
    (row, *_) = [row for row in rows_of(tmp_path / "run") if "val_reward" in row]
    assert row["val_reward_a"] == pytest.approx(row["val_reward"])
    assert row["val_reward_b"] > 0
    assert "reward on a" in (tmp_path / "run" / "report.html").read_text()


def test_large_rewards_are_no_divergence(flags, tmp_path):
    """Without division by the spread, the loss has the scale of the rewards, and begins at 0."""
    objective = prepare_run(flags).setup.objective
    uniform = objective.uniform_loss(512)
    schedule = prepare_run(flags).schedule
    guard = DivergenceGuard(flags.train, schedule, uniform, tmp_path, print)
    first = {"step": 1.0, "loss": 0.0, "grad_norm": 1.0}
    guard.check(first | {"step": 6.0, "loss": 78.12}, first)
    with pytest.raises(ValueError, match="the loss is nan"):
        guard.check(first | {"step": 6.0, "loss": math.nan}, first)


def test_answers_that_are_objects_are_for_functions_of_the_user(flags, tmp_path):
    """The dry run rates them, too."""
    records = [{"prompt": f"say {n} now", "answer": {"min": n}} for n in range(6)]
    path = write_records(tmp_path / "objects.jsonl", records)
    (tmp_path / "rewards.py").write_text(
        "def longer(completion, answer):\n    return float(len(completion) > answer['min'])\n"
    )
    data = replace(flags.data, path=[str(path)])
    reward = [f"{tmp_path / 'rewards.py'}:longer"]
    run = prepare_run(replace(flags, reward=reward, data=data))
    (line,) = reward_lines(run.setup.objective, run.schedule.data, run.setup.tokenizer)
    assert "longer 1" in line


def test_a_step_without_a_reward_is_said(flags, tmp_path, capsys):
    (tmp_path / "rewards.py").write_text("def none(completion):\n    return None\n")
    data = replace(flags.data, val_fraction=0.0)
    reward = [f"{tmp_path / 'rewards.py'}:none"]
    run_finetuning(replace(flags, reward=reward, data=data, out_dir=str(tmp_path / "run")))
    said = capsys.readouterr().out
    assert said.count("no reward function applies to a completion") == 1
    # which are of completions with an advantage
    assert not any("entropy" in row for row in rows_of(tmp_path / "run"))


@pytest.mark.parametrize("loss", ["grpo", "rloo"])
def test_the_reference_is_the_base(flags, tmp_path, loss):
    """At the start the method changes nothing, so the divergence is 0; later it is not."""
    args = replace(
        flags,
        out_dir=str(tmp_path / "run"),
        grpo=replace(flags.grpo, beta=0.1, loss=loss),
    )
    run_finetuning(args)
    kls = [row["kl"] for row in rows_of(tmp_path / "run") if "kl" in row]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[-1] > 1e-6


def test_the_reference_has_the_base_values_of_trained_base_weights(flags, tmp_path):
    args = replace(
        flags,
        out_dir=str(tmp_path / "run"),
        grpo=replace(flags.grpo, beta=0.1),
        lora=LoRAArgs(r=4, modules_to_save=["embed"]),
        train=replace(flags.train, freeze=["*.lora_a", "*.lora_b"]),
    )
    run_finetuning(args)
    kls = [row["kl"] for row in rows_of(tmp_path / "run") if "kl" in row]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[-1] > 1e-6


def test_the_reference_of_a_continued_adapter_is_the_adapter(flags, tmp_path):
    first = replace(flags, out_dir=str(tmp_path / "first"))
    run_finetuning(first)
    args = replace(
        flags,
        checkpoint_dir=str(tmp_path / "first" / "final"),
        out_dir=str(tmp_path / "second"),
        grpo=replace(flags.grpo, beta=0.1),
        lora=LoRAArgs(),
    )
    run_finetuning(args)
    kls = [row["kl"] for row in rows_of(tmp_path / "second") if "kl" in row]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[-1] > 1e-6


def full_flags(flags: LoRAFinetuneArgs, **changed) -> FullFinetuneArgs:
    """Return the flags of full fine-tuning, with a reference."""
    values = {}
    for item in fields(FullFinetuneArgs):
        values[item.name] = getattr(flags, item.name)
    args = FullFinetuneArgs(**values)
    grpo = replace(flags.grpo, beta=0.1)
    return replace(args, grpo=grpo, precision="fp32", **changed)


def test_full_fine_tuning_keeps_a_copy_as_its_reference(flags, tmp_path):
    """The copy has the base's log-probabilities after steps, and the weights are not changed by
    looking at it; a resumed run has the same reference."""
    args = full_flags(flags, save=replace(flags.save, interval=1))
    memory = prepare_run(args).settings.plan.memory
    assert memory.reference == pytest.approx(memory.weights, rel=0.01)
    trainer = trainer_of(args, tmp_path / "a")
    trainer.fit()
    weights = {name: p.detach().clone() for name, p in trainer.trained.items()}
    samples = trainer.samples.of_step(0)[:2]
    base = trainer_of(replace(args, grpo=flags.grpo), tmp_path / "b")
    expected = base.rollouts._log_probs(samples, BatchLayout(2))
    with trainer.rollouts._as_reference():
        actual = trainer.rollouts._log_probs(samples, BatchLayout(2))
    tuned = trainer.rollouts._log_probs(samples, BatchLayout(2))
    for one, other, own in zip(expected, actual, tuned, strict=True):
        assert torch.equal(one, other)
        assert not torch.allclose(own, other)
    assert all(torch.equal(p, weights[name]) for name, p in trainer.trained.items())
    for used in (trainer, base):
        used.rollouts.close()

    run_finetuning(
        replace(args, out_dir=str(tmp_path / "c"), train=replace(args.train, max_steps=2))
    )
    run_finetuning(replace(args, out_dir=str(tmp_path / "c"), resume=True))
    kls = []
    for name in ("a", "c"):
        kls.append([row["kl"] for row in rows_of(tmp_path / name) if "kl" in row])
    assert kls[0] == kls[1] and kls[0][-1] > 1e-6


@pytest.mark.slow
def test_shards_of_a_copy_are_the_reference_of_two_processes(flags, tmp_path):
    args = full_flags(flags, train=replace(flags.train, max_steps=3))
    run_finetuning(replace(args, out_dir=str(tmp_path / "one")))
    config = tmp_path / "one" / "config.yaml"
    two = ["--out_dir", tmp_path / "two", "--devices", "2", "--strategy", "fsdp"]
    script("finetune/full.py", "--config", config, *two, cwd=tmp_path)
    rows = [rows_of(tmp_path / name) for name in ("one", "two")]
    for one, other in zip(*rows, strict=True):
        for name in one.keys() & {"loss", "kl", "reward"}:
            assert other[name] == pytest.approx(one[name], abs=1e-5, rel=1e-3)


def test_a_second_update_has_other_ratios(flags, tmp_path):
    """At a high rate, the first update moves probabilities beyond the limits of the second."""
    shares = []
    for updates in (1, 2):
        args = replace(
            flags,
            out_dir=str(tmp_path / str(updates)),
            grpo=replace(flags.grpo, updates=updates, clip_low=0.01, clip_high=0.01),
            train=replace(flags.train, max_steps=3),
        )
        run_finetuning(args)
        rows = [row for row in rows_of(tmp_path / str(updates)) if "clipped" in row]
        shares.append(sum(row["clipped"] for row in rows))
    assert shares[0] == 0
    assert shares[1] > 0


def test_masked_completions_have_no_target(flags, tmp_path):
    args = replace(flags, grpo=replace(flags.grpo, max_new_tokens=2, mask_truncated=True))
    trainer = trainer_of(args, tmp_path / "a")
    samples, facts = trainer.rollouts.collect(
        0, trainer.samples.of_step(0), trainer.schedule.layout
    )
    trainer.rollouts.close()
    assert facts["truncated"] > 0
    masked = [sample for sample in samples if not sample.supervised]
    assert len(masked) == round(facts["truncated"] * len(samples))
    assert trainer.objective.totals(samples).samples == len(samples)


def test_a_killed_run_ends_the_same(flags, tmp_path):
    """kill -9 right after a checkpoint, and in the middle of a later step."""
    whole = replace(
        flags,
        grpo=replace(flags.grpo, updates=2, beta=0.05),
        train=replace(flags.train, max_steps=6),
        save=replace(flags.save, interval=1),
    )
    run_finetuning(replace(whole, out_dir=str(tmp_path / "whole")))
    config = tmp_path / "whole" / "config.yaml"
    killed = tmp_path / "killed"
    command = ["finetune/lora.py", "--config", config, "--out_dir", killed]
    kill_after(2, killed, *command, cwd=tmp_path)
    kill_after(4, killed, *command, "--resume", cwd=tmp_path)
    script(*command, "--resume", cwd=tmp_path)
    for name in ("final/adapter_model.safetensors", "metrics.csv"):
        if name == "metrics.csv":
            seconds = ("seconds", "tokens_per_second", "data_share", "memory_gib")
            rows = []
            for run in (tmp_path / "whole", killed):
                rows.append(
                    [
                        {k: v for k, v in row.items() if not k.endswith(seconds)}
                        for row in rows_of(run)
                    ]
                )
            assert rows[0] == rows[1]
        else:
            assert (tmp_path / "whole" / name).read_bytes() == (killed / name).read_bytes()


def test_a_resumed_run_keeps_the_first_of_equal_scores(flags, tmp_path):
    """metrics.csv has nine digits of them; the whole run compares the same numbers."""
    rewards = tmp_path / "third.py"
    rewards.write_text("def third(completion):\n    return 1 / 3\n")
    args = replace(
        flags,
        reward=[f"{rewards}:third"],
        train=replace(flags.train, max_steps=6),
        eval=replace(flags.eval, interval=1, patience=3, forgetting=False),
        save=replace(flags.save, interval=1, best=True),
    )
    whole = litft.finetune(replace(args, out_dir=str(tmp_path / "whole")))

    class Killed(Exception):
        pass

    def kill(row):
        if row["step"] == 2:
            raise Killed

    args = replace(args, out_dir=str(tmp_path / "killed"))
    with pytest.raises(Killed):
        litft.finetune(args, callback=kill)
    resumed = litft.finetune(replace(args, resume=True))
    steps = []
    for run in (whole, resumed):
        best = json.loads((run.folder / "best" / "litft.json").read_text())
        steps.append((best["step"], rows_of(run.folder)[-1]["step"]))
    assert steps == [(1, 4), (1, 4)]


def test_a_reward_function_that_fails_ends_the_run_with_its_state(flags, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(
        "calls = 0\ndef score(completion):\n    global calls\n    calls += 1\n"
        "    return 1 / (20 - calls)\n"
    )
    args = replace(flags, reward=[f"{file}:score"], out_dir=str(tmp_path / "run"))
    args = replace(args, data=replace(args.data, val_fraction=0.0))
    with pytest.raises(ValueError, match="ZeroDivisionError") as error:
        run_finetuning(args)
    assert "--resume --out_dir" in str(error.value)
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    file.write_text("def score(completion):\n    return len(completion)\n")
    run_finetuning(replace(args, resume=True))
    assert len([row for row in rows_of(tmp_path / "run") if "reward" in row]) == 4


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_processes_learn_as_one(flags, tmp_path, strategy):
    """The same completions, and losses equal to 1e-5: with a reference, and two updates a step."""
    args = replace(
        flags,
        grpo=replace(flags.grpo, updates=2, beta=0.1),
        train=replace(flags.train, max_steps=2),
        save=replace(flags.save, interval=0),
    )
    run_finetuning(replace(args, out_dir=str(tmp_path / "one")))
    config = tmp_path / "one" / "config.yaml"
    two = ["--out_dir", tmp_path / "two", "--devices", "2", "--strategy", strategy]
    script("finetune/lora.py", "--config", config, *two, cwd=tmp_path)
    rows = [rows_of(tmp_path / name) for name in ("one", "two")]
    assert len(rows[0]) == len(rows[1])
    exact = {"reward", "reward_vowels", "completion_tokens", "val_reward", "tokens"}
    near = {"loss", "kl", "grad_norm", "entropy"}
    for one, other in zip(*rows, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & exact:
            assert other[name] == pytest.approx(one[name], abs=1e-9)
        for name in one.keys() & near:
            assert other[name] == pytest.approx(one[name], abs=1e-5, rel=1e-4)
