"""The training loop: gradients are independent of the layout, schedules, runs that resume after a
kill."""

import csv
import json
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import (
    ROOT,
    STORIES,
    config_folder,
    copy_tokenizer,
    kill_after,
    script,
    write_records,
)
from lightning_fabric import Fabric

import litft
import litft.training.trainer
from litft.args import (
    DataArgs,
    DistillArgs,
    GrpoArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    PreferenceArgs,
    TrainArgs,
)
from litft.data.dataset import load_data
from litft.data.packing import BatchLayout
from litft.data.sample import Sample, TeacherValues
from litft.data.sampler import SampleOrder
from litft.methods import LoRA
from litft.model.loss import IGNORED
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.training.accumulation import accumulate
from litft.training.lr_schedule import learning_rate
from litft.training.memory.probe import MemoryProbe
from litft.training.objectives import GRPO, OBJECTIVES, Distill, Objective
from litft.training.schedule import planned_samples
from litft.training.trainer import Trainer

TIMED = ("tokens_per_second", "mfu", "memory_gib", "data_share", "seconds")


def ragged(count: int = 8) -> list[Sample]:
    """Samples of 3 to 60 tokens with 1 to 58 targets: a mean of means is far from the mean."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for n in range(count):
        length = 3 + n * n * 57 // max(1, count - 1) ** 2
        ids = torch.randint(512, (length + 1,), generator=generator)
        targets = ids[1:].clone()
        targets[: n % 3] = IGNORED
        samples.append(Sample(ids[:-1], targets))
    return samples


def ragged_preferences(count: int, objective: str) -> list[Sample]:
    """Pairs of ragged answers, or answers with labels and mismatches, with log-probabilities of a
    reference."""
    answers = ragged(2 * count)
    if objective == "kto":
        others = [
            replace(answer, desirable=True, reference=(-8.0 * answer.supervised,))
            for answer in answers[1:]
        ]
        references = [(-5.5 * answer.supervised,) for answer in answers]
        return [
            replace(
                answers[n],
                desirable=n % 3 > 0,
                reference=references[n],
                mismatch=others[n + count - 1],
            )
            for n in range(count)
        ]
    samples = []
    for chosen, rejected in zip(answers[::2], answers[:0:-2], strict=True):
        sides = chosen, rejected
        tokens, targets = (
            torch.cat([getattr(side, name) for side in sides])
            for name in ("tokens", "targets")
        )
        lengths = tuple(side.tokens.numel() for side in sides)
        reference = tuple(-6.0 * side.supervised for side in sides)
        samples.append(Sample(tokens, targets, documents=lengths, reference=reference))
    return samples


def samples_of(objective: str, count: int) -> list[Sample]:
    """Return ragged samples of an objective."""
    if objective in ("sft", "dft"):
        return ragged(count)
    if objective == "grpo":
        return completions(count)
    if objective == "distill":
        return judged(count)
    return ragged_preferences(count, objective)


def completions(count: int) -> list[Sample]:
    """Return ragged completions, with what a second update with a reference compares with."""
    samples = []
    for number, sample in enumerate(ragged(count)):
        generator = torch.Generator().manual_seed(number)
        near = 5 + torch.rand(2, sample.supervised, generator=generator)
        # gradients that do not cancel, or their sum would be little more than rounding errors
        samples.append(
            replace(sample, advantage=number + 1.0, old=-near[0], reference_tokens=-near[1])
        )
    return samples


def judged(count: int) -> list[Sample]:
    """Return ragged samples with what a teacher says of them; every third answer is the student's
    own."""
    samples = []
    for number, sample in enumerate(ragged(count)):
        generator = torch.Generator().manual_seed(number)
        order = torch.rand(sample.supervised, 100, generator=generator).argsort(1)
        log_probs = torch.randn(sample.supervised, 5, generator=generator).log_softmax(1)
        teacher = TeacherValues(order[:, :4].int(), log_probs.half())
        samples.append(replace(sample, teacher=teacher, is_own=number % 3 == 0))
    return samples


def make_objective(name: str) -> Objective:
    """Return an objective that also adds the loss of the chosen answers, where it can."""
    if name == "grpo":
        return GRPO(GrpoArgs(beta=0.1, updates=2), [])
    if name == "distill":
        return Distill(DistillArgs(beta=0.3, top_k=4))
    return OBJECTIVES[name](PreferenceArgs(sft_weight=0.3))


def trainable(folder, head: bool = False):
    """Return the tiny model with random LoRA factors, and those factors. head: also of the head,
    which is then not plain."""
    source = resolve(folder)
    model, method = (
        base_model(source),
        LoRA(LoRAArgs(r=4, alpha=8, targets=["all-linear"] + ["lm_head"] * head)),
    )
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    torch.manual_seed(1)
    parameters = method.parameters(model)
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter, std=0.1)
    return model, parameters


def gradients(
    folder,
    rows: int,
    count: int = 8,
    row_tokens: int | None = None,
    name: str = "sft",
    head: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return loss, scores and gradients of ragged samples in one process, with `rows` rows in a
    micro-batch."""
    model, parameters = trainable(folder, head)
    fabric, objective, layout = (
        Fabric(accelerator="cpu", devices=1),
        make_objective(name),
        BatchLayout(rows, row_tokens),
    )
    samples = samples_of(name, count)
    objective.before_step(fabric, model, samples, layout)
    values = accumulate(
        fabric,
        objective,
        fabric.setup_module(model),
        layout.batches(samples),
        objective.totals(samples),
    )
    return values.tolist(), {name: p.grad for name, p in parameters.items()}


def distance(actual: dict, expected: dict) -> float:
    """Return the 2-norm of the difference relative to that of the expected gradient."""
    difference = torch.cat(
        [(actual[name] - grad).flatten() for name, grad in expected.items()]
    )
    return float(
        difference.norm() / torch.cat([grad.flatten() for grad in expected.values()]).norm()
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_do_not_depend_on_micro_batches(tiny, name):
    loss, expected = gradients(tiny, 8, name=name)
    for rows, row_tokens in (
        (4, None),
        (3, None),
        (1, None),
        (8, 60),
        (2, 60),
        (1, 100),
        (1, 1000),
    ):
        other_loss, actual = gradients(
            tiny, rows, row_tokens=row_tokens and 2 * row_tokens, name=name
        )
        # without the decoder's log-probabilities, there is no mismatch
        assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-6, nan_ok=True)
        # the gradient of a ratio exp(new - old) has the absolute error of the log-probabilities,
        # whose unit in the last place is 4.8e-7 at -5
        bound = 2e-6 if name == "grpo" else 1e-6
        assert distance(actual, expected) <= bound, (rows, row_tokens)


def test_the_samples_are_ragged_enough_to_detect_means_of_means(tiny):
    """A mean of micro-batch means, as computed by other trainers, is off by more than 1e-3 on
    them."""
    _, expected = gradients(tiny, 8)
    model, parameters = trainable(tiny)
    for batch in BatchLayout(2).batches(ragged()):
        loss, count = model(batch.tokens, targets=batch.targets)
        (loss / count / 4).backward()
    assert distance({name: p.grad for name, p in parameters.items()}, expected) > 1e-3


WORKER = """
import sys, torch
sys.path[:0] = [{tests!r}, {tests!r} + "/training"]
from litft.args import LoRAFinetuneArgs
from litft.distributed.devices import make_fabric
from litft.data.packing import BatchLayout
from litft.training.accumulation import accumulate
from test_train import LAYOUTS, make_objective, samples_of, trainable
fabric = make_fabric(LoRAFinetuneArgs(accelerator="cpu", devices=2))
fabric.launch()
found, networks = {{}}, {{}}
for head in (False, True):
    model, parameters = trainable({folder!r}, head)
    networks[head] = model, parameters, *fabric.setup(model, torch.optim.SGD(parameters.values(), 0.1))
for name, (kind, count, rows, room) in LAYOUTS.items():
    model, parameters, wrapped, optimizer = networks["head" in name]
    samples, objective, layout = samples_of(kind, count), make_objective(kind), BatchLayout(rows, room, 2)
    batches = layout.batches(samples, fabric.global_rank)
    optimizer.zero_grad()
    objective.before_step(fabric, model, samples, layout)
    values = accumulate(fabric, objective, wrapped, batches, objective.totals(samples))
    found[name] = values.tolist(), {{n: p.grad.clone() for n, p in parameters.items()}}
if fabric.global_rank == 0:
    torch.save(found, {out!r})
"""
LAYOUTS = {  # objective, number of samples, rows of a micro-batch, tokens of a packed row
    "2x4": ("sft", 8, 4, None),
    "8x1": ("sft", 8, 1, None),
    "one rank is left over": ("sft", 3, 1, None),
    "packed": ("sft", 8, 2, 64),
    "packed, one rank without": ("sft", 1, 1, 64),
    "pairs, packed": ("dpo", 8, 2, 128),
    "pairs, one rank without": ("orpo", 1, 1, 64),
    "labels": ("kto", 5, 1, None),
    "labels, one rank without": ("kto", 1, 1, 64),
    "one rank without, an adapted head": ("sft", 1, 1, 64),
    "pairs, one rank without, an adapted head": ("dpo", 1, 1, 64),
}


def test_gradients_do_not_depend_on_processes(tiny, tmp_path):
    """One pair of processes computes all layouts."""
    out = tmp_path / "gradients.pt"
    worker = WORKER.format(tests=str(ROOT / "tests"), folder=str(tiny), out=str(out))
    (tmp_path / "worker.py").write_text(worker)
    script(tmp_path / "worker.py", cwd=tmp_path)
    results = torch.load(out, weights_only=True)
    for name, (kind, count, _, _) in LAYOUTS.items():
        loss, expected = gradients(tiny, 8, count, name=kind, head="head" in name)
        assert results[name][0] == pytest.approx(loss, rel=1e-6, abs=1e-6, nan_ok=True), (
            name
        )
        assert distance(results[name][1], expected) <= 1e-6, name


def test_every_rank_runs_the_same_number_of_micro_batches():
    samples = ragged(11)
    for rows, ranks, row_tokens in product((1, 2, 3, 4, 16), (1, 2, 3, 5), (None, 60, 128)):
        layout = BatchLayout(rows, row_tokens, ranks)
        batches = [layout.batches(samples, rank) for rank in range(ranks)]
        assert len({len(group) for group in batches}) == 1
        assert all(batch.tokens.size(0) <= rows for group in batches for batch in group)
        assert row_tokens is None or all(
            batch.tokens.size(1) <= row_tokens for group in batches for batch in group
        )
        targets = sum(
            int((batch.targets != IGNORED).sum()) for group in batches for batch in group
        )
        assert targets == sum(sample.supervised for sample in samples)


def test_each_epoch_is_a_permutation():
    sampler = SampleOrder([10], seed=3)
    stream = sampler.indices(0, 30)
    assert all(sorted(stream[i : i + 10]) == list(range(10)) for i in (0, 10, 20))
    assert stream[:10] != stream[10:20] != stream[20:]
    assert SampleOrder([10], seed=3).indices(7, 25) == stream[7:25]
    assert SampleOrder([10], seed=4).indices(0, 10) not in (stream[:10], stream[10:20])


@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_rates_rise_and_fall(warmup, schedule):
    args = TrainArgs(
        learning_rate=1.0, warmup_fraction=warmup, lr_schedule=schedule, min_lr_ratio=0.1
    )
    rates = [learning_rate(args, step, 20) for step in range(20)]
    warmup_steps = round(warmup * 20)
    assert rates[:warmup_steps] == pytest.approx(
        [(step + 1) / warmup_steps for step in range(warmup_steps)]
    )
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True)
    if warmup_steps < 20:
        assert rates[warmup_steps] == 1.0
    assert learning_rate(args, 0, 1) == 1.0


def test_the_warmup_can_be_given_in_steps():
    rates = [
        learning_rate(TrainArgs(learning_rate=1.0, warmup_steps=4), step, 10)
        for step in range(10)
    ]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0]) and rates[5] < 1
    assert learning_rate(TrainArgs(learning_rate=1.0, warmup_steps=0), 0, 10) == 1.0
    # the run ends in the warmup
    assert learning_rate(TrainArgs(learning_rate=1.0, warmup_steps=40), 9, 10) == 0.25


def test_schedules_have_their_closed_form():
    """Ten steps without warm-up, down to a tenth of the rate."""
    factors = {
        "cosine": [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)],
        "linear": [1 - step / 10 for step in range(10)],
        "constant": [1.0] * 10,
        # the last 40 % fall
        "wsd": [
            *[1.0] * 6,
            *[1 - math.sqrt(step / 4) for step in range(4)],
        ],
    }
    for schedule, expected in factors.items():
        args = TrainArgs(
            learning_rate=2.0,
            warmup_fraction=0.0,
            lr_schedule=schedule,
            min_lr_ratio=0.1,
            decay_fraction=0.4,
        )
        rates = [learning_rate(args, step, 10) for step in range(10)]
        assert rates == pytest.approx(
            [2.0 * (0.1 + 0.9 * factor) for factor in expected]
        ), schedule


def test_planned_samples():
    assert planned_samples(TrainArgs(), 10) == 30
    assert planned_samples(TrainArgs(epochs=0.5), 10) == 5
    assert planned_samples(TrainArgs(max_steps=4, global_batch_size=8), 10) == 32
    assert planned_samples(TrainArgs(max_steps=4, global_batch_size=8, epochs=1), 10) == 10


def rows_of(run) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def untimed(run) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without measured times and memory."""
    return [
        {name: value for name, value in row.items() if name not in TIMED}
        for row in rows_of(run)
    ]


FLAGS = (
    "--data.val_fraction 0.2 --train.epochs 2 --train.global_batch_size 1 --train.warmup_fraction "
    "0.9 --lora.dropout 0.3 --train.learning_rate 0.01 --save.interval 7 --eval.interval 5"
).split()


@pytest.fixture(scope="module")
def uninterrupted(tiny, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    flags = ["--checkpoint_dir", tiny, "--data.path", examples, *FLAGS]
    done = script("finetune/lora.py", *flags, "--out_dir", "run", cwd=folder)
    return folder / "run", flags, done


RUN = {
    "config.yaml",
    "metrics.csv",
    "samples.jsonl",
    "verdict.json",
    "checkpoints",
    "final",
}
RUN |= {"report.html", "data.json"}


def test_a_run_writes_what_the_readme_says(uninterrupted, examples, tiny):
    run, _, done = uninterrupted
    assert {path.name for path in run.iterdir()} == RUN
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-000042",
        "step-000048",
    ]
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
    } <= {path.name for path in (run / "final").iterdir()}
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (run / "final").iterdir())
    rows = rows_of(run)
    assert [int(row["step"]) for row in rows] == list(range(49))
    assert [n for n, row in enumerate(rows) if row["val_loss"]] == [0, *range(5, 49, 5), 48]
    _, tokenizer = litft.load(tiny)
    data = load_data(DataArgs(path=[str(examples)], val_fraction=0.2), tokenizer, 512, 256)
    assert int(rows[-1]["tokens"]) == 2 * sum(
        sample.tokens.numel() for sample in data.train
    )
    assert float(rows[-1]["epoch"]) == 2 and int(rows[-1]["samples"]) == 48
    # a CPU's peak is not known
    assert all(float(row["tokens_per_second"]) > 0 and not row["mfu"] for row in rows[1:])
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])
    assert (
        "next:" in done.stdout
        and "peak memory" in done.stdout
        and "tokens/s" in done.stdout
    )


def test_the_loss_of_a_step_is_measured_before_its_update(uninterrupted, examples, tiny):
    model, tokenizer = litft.load(tiny)
    data = load_data(DataArgs(path=[str(examples)], val_fraction=0.2), tokenizer, 512, 256)
    first = data.train[SampleOrder([len(data.train)], 42).indices(0, 1)[0]]
    with torch.no_grad():
        loss, count = model(first.tokens[None], targets=first.targets[None])
        val = [
            model(sample.tokens[None], targets=sample.targets[None]) for sample in data.val
        ]
    rows = rows_of(uninterrupted[0])
    assert float(rows[1]["loss"]) == pytest.approx(float(loss / count), rel=1e-5)
    mean = float(sum(loss for loss, _ in val) / sum(count for _, count in val))
    assert float(rows[0]["val_loss"]) == pytest.approx(mean, rel=1e-5)


def test_killed_and_resumed_equals_uninterrupted(uninterrupted, tmp_path):
    """kill -9 after the second checkpoint, with half a checkpoint and later rows left over; the
    newest run is resumed."""
    reference, flags, _ = uninterrupted
    run = tmp_path / "out" / "lora"
    kill_after(14, run, "finetune/lora.py", *flags, cwd=tmp_path)
    assert not (run / "final").exists()
    (run / "checkpoints" / "step-000099.partial").mkdir()
    (run / "checkpoints" / "step-000099.partial" / "__0_0.distcp").write_bytes(b"half")
    with (run / "metrics.csv").open("a") as file:
        file.write("47,9,9,9,9,,,9,9,9,,9,9,9,9\n")
    done = script("finetune/lora.py", "--resume", cwd=tmp_path)
    assert "continuing after step" in done.stdout
    first, last = (
        float(row["val_loss"]) for row in (rows_of(reference)[0], rows_of(reference)[-1])
    )
    assert f"validation loss: {first:.4f} -> {last:.4f}" in done.stdout
    assert untimed(run) == untimed(reference)
    name = "adapter_model.safetensors"
    assert (run / "final" / name).read_bytes() == (reference / "final" / name).read_bytes()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-000042",
        "step-000048",
    ]


def test_resume_without_a_checkpoint_starts_at_step_0(uninterrupted, tmp_path):
    _, flags, _ = uninterrupted
    command = [
        "finetune/lora.py",
        *flags,
        "--train.max_steps",
        "2",
        "--out_dir",
        "new",
        "--resume",
    ]
    assert (
        "no checkpoint to continue from; starting at step 0"
        in script(*command, cwd=tmp_path).stdout
    )
    assert len(rows_of(tmp_path / "new")) == 3
    again = script(*command, cwd=tmp_path).stdout
    assert (
        "all 2 steps are done, and final/ is written again; to train further, add" in again
    )


@pytest.mark.slow
def test_learned_positions_are_not_exceeded(make_model, examples, tmp_path):
    """GPT-2 has a table of positions.

    An index beyond it is out of range, on a GPU without a clear error.
    """
    from transformers import GPT2Config

    _, folder = make_model(
        GPT2Config, vocab_size=512, max_position_embeddings=192, n_inner=56
    )
    copy_tokenizer(STORIES, folder)
    command = [
        "finetune/lora.py",
        "--checkpoint_dir",
        folder,
        "--data.path",
        examples,
        "--train.max_steps",
        "2",
    ]
    done = script(*command, "--data.max_seq_length", "193", cwd=tmp_path, code=2)
    assert (
        "--data.max_seq_length 193: this model has only 192 learned positions"
        in done.stderr
    )
    script(*command, "--eval.exact_match", "--out_dir", "run", cwd=tmp_path)
    generate = [
        "generate/base.py",
        "--checkpoint_dir",
        "run",
        "--template",
        "none",
        "--max_new_tokens",
        "250",
    ]
    done = script(
        *generate,
        "--prompt",
        "once upon a time",
        "--temperature",
        "1.5",
        "--seed",
        "3",
        cwd=tmp_path,
    )
    assert done.stdout.strip()


def test_resume_with_another_lora_rank_is_refused(uninterrupted, tmp_path):
    run, _, _ = uninterrupted
    done = script(
        "finetune/lora.py",
        "--out_dir",
        run,
        "--resume",
        "--lora.r",
        "5",
        cwd=tmp_path,
        code=2,
    )
    assert (
        "was saved with lora.r 32, now 5; resume with the original settings" in done.stderr
    )
    assert not (tmp_path / "out").exists() and "r: 32" in (run / "config.yaml").read_text()


def test_two_processes_train_as_one(tiny, tmp_path):
    # examples that differ, and a third of them held out: otherwise the processes' parts of the
    # validation have one loss
    records = [
        {
            "instruction": f"Say {n}",
            "input": "",
            "output": "once upon a time " * (n % 7 + 1),
        }
        for n in range(30)
    ]
    data = write_records(tmp_path / "data.jsonl", records)
    flags = (
        f"--checkpoint_dir {tiny} --data.path {data} "
        "--data.val_fraction 0.3 --data.packing false".split()
    )
    flags += "--train.max_steps 5 --train.learning_rate 0.01".split()
    for devices in (1, 2):
        script(
            "finetune/lora.py",
            *flags,
            "--devices",
            devices,
            "--out_dir",
            f"run{devices}",
            cwd=tmp_path,
        )
    one, two = (rows_of(tmp_path / f"run{devices}") for devices in (1, 2))
    for name in ("loss", "grad_norm", "val_loss", "tokens", "learning_rate"):
        for a, b in zip(one, two, strict=True):
            assert (a[name] == b[name] == "") or float(b[name]) == pytest.approx(
                float(a[name]), rel=1e-5
            ), name


@pytest.mark.parametrize("row_tokens", [None, 128], ids=["rows", "packed"])
@pytest.mark.parametrize(
    "name",
    ["llama-3.2-1b", "gemma-2-2b", "pythia-6.9b", "phi-2", "qwen3-0.6b", "qwen3-30b-a3b"],
)
def test_a_step_reads_no_value_from_the_device(name, row_tokens):
    """Meta tensors have no values: reading one, which would wait for a GPU, raises an error."""
    source = resolve(config_folder(name))
    # with and without a window
    source = replace(source, config=replace(source.config, layers=source.config.layers[:2]))
    for with_indices in (True, False):
        model, method = source.meta_model().bfloat16(), LoRA(LoRAArgs(r=4, dropout=0.1))
        method.select_targets(model, source.adapter_rules)
        method.attach(model)
        model.train().neftune_alpha = 5.0
        batches = [
            batch.to(torch.device("meta"))
            for batch in BatchLayout(4, row_tokens).batches(ragged())
        ]
        if not with_indices:  # the mistake that this test detects
            with pytest.raises(NotImplementedError, match="nonzero"):
                model(batches[0].tokens, **{**batches[0].inputs(), "target_indices": None})
            continue
        total = torch.zeros((), device="meta")
        for batch in batches:
            loss, _ = model(batch.tokens, **batch.inputs())
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(method.parameters(model).values(), 1.0)


def test_the_memory_probe_has_as_many_targets_as_any_micro_batch(
    tiny, tmp_path, monkeypatch
):
    """Even if the micro-batch with the most tokens has few: the memory of the loss grows with the
    targets."""
    short, long = "once upon a time " * 3, "once upon a time " * 12
    records = [
        {"prompt": long, "completion": "Lily"},
        {"prompt": "Who?", "completion": short},
    ]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records * 4)
    )
    targets, probe = [], MemoryProbe._try_largest

    def probe_with_hook(self, model, optimizer, resumed):
        def count_targets(module, arguments, inputs):
            targets.append(len(inputs["target_indices"]))

        with self.network.model.register_forward_pre_hook(count_targets, with_kwargs=True):
            probe(self, model, optimizer, resumed)
        supervised = self.schedule.data.train.supervised
        assert max(supervised) == self.schedule.largest.max_targets > min(supervised)

    monkeypatch.setattr(MemoryProbe, "_try_largest", probe_with_hook)
    data = DataArgs(path=[str(tmp_path / "data.jsonl")], packing=False, val_fraction=0.0)
    train = TrainArgs(max_steps=1, micro_batch_size=1)
    result = litft.finetune(
        LoRAFinetuneArgs(str(tiny), data=data, train=train, out_dir=str(tmp_path / "run"))
    )
    assert targets[0] == max(targets) > 10 and result.metrics["step"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_does_not_wait_for_the_gpu(tiny, examples, tmp_path):
    """CUDA's sync debug mode raises if the host waits between two flushes of the metrics."""

    class CheckedTrainer(Trainer):
        def _train_step(self, *arguments):
            # the first step sets things up
            torch.cuda.set_sync_debug_mode("error" if self.metrics.last else "default")
            try:
                super()._train_step(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    args = LoRAFinetuneArgs(
        checkpoint_dir=str(tiny),
        out_dir=str(tmp_path / "run"),
        data=DataArgs(path=[str(examples)]),
        train=TrainArgs(max_steps=6, log_interval=2),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("litft.commands.finetune.Trainer", CheckedTrainer)
        assert litft.finetune(args).metrics["step"] == 6
