"""Learning from preferences: the objectives' closed forms, the reference, resumed runs, metrics and
memory."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    adapted,
    copy_tokenizer,
    kill_after,
    rows_of,
    script,
    start,
    write_records,
)
from torch import nn

import litft
from litft import run_dir
from litft.args import (
    AdapterArgs,
    AdapterFinetuneArgs,
    AdapterV2Args,
    AdapterV2FinetuneArgs,
    DataArgs,
    EvalArgs,
    FullFinetuneArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    PreferenceArgs,
    SaveArgs,
    TrainArgs,
)
from litft.commands.finetune import prepare_run, run_finetuning
from litft.data.packing import collate
from litft.data.sample import Sample
from litft.evaluation.log_probs import label_margins, wins
from litft.evaluation.verdict import mean_of, parts_in
from litft.methods.lora import LoRA
from litft.model.loss import IGNORED
from litft.training.objectives import OBJECTIVES, Totals
from litft.training.reference_values import FOLDER, LogProbFile
from litft.training.run_samples import RunSamples


class Given(nn.Module):
    """Stands for a network: its losses are a parameter, one for each target."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = nn.Parameter(torch.tensor(losses, dtype=torch.float64))

    def forward(self, tokens, *, targets, target_indices, reduction, **inputs):
        return self.losses


def pair(
    lengths: tuple[int, int], supervised: tuple[int, int], reference: tuple[float, float]
) -> Sample:
    targets = [
        torch.cat(
            (torch.full((length - count,), IGNORED), torch.ones(count, dtype=torch.int64))
        )
        for length, count in zip(lengths, supervised, strict=True)
    ]
    return Sample(
        torch.ones(sum(lengths), dtype=torch.int64),
        torch.cat(targets),
        documents=lengths,
        reference=reference,
    )


PAIRS = [pair((4, 6), (2, 3), (-2.0, -4.0)), pair((3, 2), (1, 1), (-0.5, -1.5))]
# chosen: 0.5 + 0.9; rejected: 0.7 + 1.1 + 0.3; chosen: 0.4; rejected: 2.1
LOSSES = [0.5, 0.9, 0.7, 1.1, 0.3, 0.4, 2.1]
ARGS = PreferenceArgs(
    beta=0.4,
    label_smoothing=0.1,
    gamma=0.6,
    orpo_lambda=0.3,
    sft_weight=0.2,
    desirable_weight=1.5,
    undesirable_weight=0.7,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def expected_loss(name: str) -> float:
    """The loss of PAIRS, written out number by number."""
    chosen, rejected = (-1.4, -0.4), (-2.1, -2.1)
    counts, references = ((2, 3), (1, 1)), ((-2.0, -4.0), (-0.5, -1.5))
    total = 0.0
    for c, r, (n_c, n_r), (ref_c, ref_r) in zip(
        chosen, rejected, counts, references, strict=True
    ):
        if name == "dpo":
            h = 0.4 * ((c - ref_c) - (r - ref_r))
            total += -0.9 * math.log(sigmoid(h)) - 0.1 * math.log(sigmoid(-h))
        elif name == "ipo":
            total += ((c - ref_c) / n_c - (r - ref_r) / n_r - 1 / (2 * 0.4)) ** 2
        elif name == "simpo":
            h = 0.4 * (c / n_c - r / n_r) - 0.6
            total += -0.9 * math.log(sigmoid(h)) - 0.1 * math.log(sigmoid(-h))
        else:
            odds = [math.exp(m) / (1 - math.exp(m)) for m in (c / n_c, r / n_r)]
            total += -0.3 * math.log(sigmoid(math.log(odds[0] / odds[1])))
    return total / 2 + (1.0 if name == "orpo" else 0.2) * (0.5 + 0.9 + 0.4) / 3


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_a_pairs_loss_equals_the_closed_form_and_finite_differences(name):
    objective, model = OBJECTIVES[name](ARGS), Given(LOSSES)
    batch, totals = collate([PAIRS]), objective.totals(PAIRS)
    assert totals == Totals(2, 3)
    values = objective(model, batch, totals)
    assert float(values[0]) == pytest.approx(expected_loss(name), rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda losses: _at(objective, losses, batch, totals), model.losses, atol=1e-7
    )
    scores = dict(zip(objective.scores, values[1:].tolist(), strict=True))
    assert scores["chosen_logp"] == pytest.approx(-0.9) and scores[
        "rejected_logp"
    ] == pytest.approx(-2.1)
    assert scores["margin"] == pytest.approx(
        scores["chosen_reward"] - scores["rejected_reward"]
    )


def _at(objective, losses, batch, totals):
    model = Given(LOSSES)
    model.forward = lambda *_, **__: losses
    return objective(model, batch, totals)[0]


class OneProcess:
    """What KTO needs of Fabric in one process."""

    device, global_rank = torch.device("cpu"), 0

    def all_reduce(self, values, reduce_op):
        return values


def test_ktos_loss_equals_the_closed_form():
    def answer(count: int, desirable: bool, reference: float) -> Sample:
        tokens = torch.ones(count + 1, dtype=torch.int64)
        targets = torch.cat((torch.tensor([IGNORED]), torch.ones(count, dtype=torch.int64)))
        return Sample(tokens, targets, desirable=desirable, reference=(reference,))

    samples = [answer(2, True, -2.1), answer(1, False, -0.5), answer(3, True, -4.0)]
    samples = [replace(sample, mismatch=answer(1, True, -1.3)) for sample in samples]
    objective = OBJECTIVES["kto"](ARGS)
    from litft.data.packing import BatchLayout

    objective.before_step(OneProcess(), Given([0.5, 0.9, 0.7]), samples, BatchLayout(8))
    kl = (3 * 1.3 - 0.5 - 0.9 - 0.7) / 3
    assert float(objective.kl) == pytest.approx(kl)
    values = objective(Given(LOSSES[:6]), collate([samples]), objective.totals(samples))
    ratios = [-1.4 + 2.1, -0.7 + 0.5, -1.8 + 4.0]
    losses = [
        1.5 * (1 - sigmoid(0.4 * (ratios[0] - kl))),
        0.7 * (1 - sigmoid(0.4 * (kl - ratios[1]))),
        1.5 * (1 - sigmoid(0.4 * (ratios[2] - kl))),
    ]
    assert float(values[0]) == pytest.approx(
        sum(losses) / 3 + 0.2 * (1.4 + 1.8) / 5, rel=1e-6
    )
    scores = dict(zip(objective.scores, values[1:].tolist(), strict=True))
    assert scores["chosen_reward"] == pytest.approx(
        0.4 * (ratios[0] + ratios[2]) / 2, rel=1e-6
    )
    assert scores["rejected_reward"] == pytest.approx(0.4 * ratios[1], rel=1e-6)
    assert scores["kl"] == pytest.approx(kl) and scores["accuracy"] == 1
    objective.before_step(OneProcess(), Given([1.5, 1.9, 1.7]), samples, BatchLayout(8))
    assert float(objective.kl) == 0  # a negative estimate


WORDS = (
    "once upon a time there was a little girl named Lily who loved to play outside in the park "
    "with her dog".split()
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Forty ragged pairs: the chosen answer has the words in order."""
    records = [
        {
            "prompt": f"Say {n} words",
            "chosen": " ".join(WORDS[n % 5 : n % 5 + 2 + n % 9]),
            "rejected": " ".join(WORDS[::-1][n % 7 : n % 7 + 3 + n % 4]),
        }
        for n in range(40)
    ]
    return write_records(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", records)


def flags(
    base: Path,
    data: Path,
    out: Path,
    kind=LoRAFinetuneArgs,
    objective: str = "dpo",
    **values,
):
    train = dict(max_steps=4, global_batch_size=8, learning_rate=5e-3) | values.pop(
        "train", {}
    )
    return kind(
        checkpoint_dir=str(base),
        out_dir=str(out),
        objective=objective,
        data=DataArgs(path=[str(data)], val_fraction=0.2),
        train=TrainArgs(**train),
        eval=EvalArgs(interval=2, max_new_tokens=0),
        save=SaveArgs(interval=2),
        **values,
    )


def reference_of(run: Path, part: str = "train") -> dict[int, list[float]]:
    """The stored log-probabilities of a run, by sample."""
    (path,) = (run / FOLDER).glob(f"{part}-*.bin")
    rows = LogProbFile(path, 2).rows()
    return dict(zip(rows["index"].tolist(), rows["values"].tolist(), strict=True))


def plain_log_probs(model: nn.Module, sample: Sample) -> list[float]:
    """Each side's log-probability from the whole logits of that side alone."""
    values = []
    for side in sample.split():
        with torch.no_grad():
            log_probs = model(side.tokens[None])[0].double().log_softmax(-1)
        mask = side.targets != IGNORED
        values.append(float(log_probs[mask].gather(1, side.targets[mask][:, None]).sum()))
    return values


METHODS = [
    (LoRAFinetuneArgs, {"lora": LoRAArgs(r=4)}),
    (FullFinetuneArgs, {}),
    (AdapterFinetuneArgs, {"adapter": AdapterArgs(start_layer=0)}),
    (AdapterV2FinetuneArgs, {"adapter": AdapterV2Args(start_layer=0)}),
]


@pytest.mark.parametrize(
    ("kind", "values"), METHODS, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.halved
def test_the_reference_is_the_frozen_start_of_every_method(
    tiny, pairs, tmp_path, kind, values
):
    args = flags(tiny, pairs, tmp_path / "run", kind, **values)
    run_finetuning(args)
    data, model = prepare_run(args).schedule.data, litft.load(tiny, precision="fp32")[0]
    for part, samples in (("train", data.train), ("val", data.val)):
        stored = reference_of(tmp_path / "run", part)
        assert len(stored) == min(32, len(samples))
        for index, actual in stored.items():
            assert actual == pytest.approx(plain_log_probs(model, samples[index]), rel=1e-6)
    rows = rows_of(tmp_path / "run")
    assert (
        rows[0]["val_loss"] == pytest.approx(math.log(2), abs=1e-6)
        and rows[0]["val_margin"] == 0
    )
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_the_reference_of_an_adapter_that_goes_on_is_that_adapter(tiny, pairs, tmp_path):
    adapter = adapted(tiny, tmp_path / "adapter", LoRA(LoRAArgs(r=4)))
    copy_tokenizer(tiny, adapter)
    args = flags(adapter, pairs, tmp_path / "run")
    run_finetuning(args)
    data, model = prepare_run(args).schedule.data, litft.load(adapter, precision="fp32")[0]
    base = litft.load(tiny, precision="fp32")[0]
    stored = reference_of(tmp_path / "run")
    for index, actual in stored.items():
        assert actual == pytest.approx(plain_log_probs(model, data.train[index]), rel=1e-6)
        assert actual != pytest.approx(plain_log_probs(base, data.train[index]), rel=1e-3)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.halved
def test_the_reference_of_a_quantized_base_is_the_quantized_base(
    tiny, pairs, tmp_path, quantize
):
    args = flags(tiny, pairs, tmp_path / "run", quantize=quantize)
    run_finetuning(args)
    assert rows_of(tmp_path / "run")[0]["val_loss"] == pytest.approx(math.log(2), abs=1e-6)
    data, model = (
        prepare_run(args).schedule.data,
        litft.load(tiny, precision="fp32", quantize=quantize)[0],
    )
    for index, actual in reference_of(tmp_path / "run").items():
        assert actual == pytest.approx(plain_log_probs(model, data.train[index]), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_learn_as_one(tiny, pairs, tmp_path, strategy):
    """Also with labels, whose KL divergence is that of the global batch."""
    common = f"--checkpoint_dir {tiny} --data.path {pairs} --data.val_fraction 0.2 --train.max_steps 3 "
    common += (
        "--train.global_batch_size 6 --eval.interval 2 --eval.max_new_tokens 0 "
        "--train.learning_rate 0.005"
    )
    results = {}
    for name, more in (("one", ""), ("two", f"--devices 2 --strategy {strategy}")):
        for objective in ("dpo", "kto"):
            out = f"{name}-{objective}"
            script(
                "finetune/lora.py",
                *common.split(),
                *more.split(),
                "--objective",
                objective,
                "--out_dir",
                out,
                cwd=tmp_path,
            )
            results[out] = rows_of(tmp_path / out)
    for objective in ("dpo", "kto"):
        one, two = results[f"one-{objective}"], results[f"two-{objective}"]
        for name in (
            "loss",
            "val_loss",
            "margin",
            "val_margin",
            "val_accuracy",
            "grad_norm",
            *["kl"] * (objective == "kto"),
        ):
            expected = [row[name] for row in one if name in row]
            assert expected and [row[name] for row in two if name in row] == pytest.approx(
                expected, rel=1e-5, abs=1e-6
            )


@pytest.mark.parametrize(
    "objective",
    ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kto", "orpo"))],
)
def test_an_interrupted_run_equals_an_uninterrupted_one(tiny, pairs, tmp_path, objective):
    common = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        pairs,
        "--data.val_fraction",
        "0.2",
        "--objective",
        objective,
    ]
    common += (
        "--train.max_steps 4 --train.global_batch_size 8 "
        "--eval.interval 2 --eval.max_new_tokens 0".split()
    )
    common += "--save.interval 2 --train.learning_rate 0.005".split()
    script("finetune/lora.py", *common, "--out_dir", "whole", cwd=tmp_path)
    kill_after(
        2,
        tmp_path / "killed",
        "finetune/lora.py",
        *common,
        "--out_dir",
        "killed",
        cwd=tmp_path,
    )
    # what was lost is computed with the weights of the start
    for path in (tmp_path / "killed" / FOLDER).glob("train-*"):
        path.unlink()
    script("finetune/lora.py", "--resume", "--out_dir", "killed", cwd=tmp_path)
    for name in ("adapter_model.safetensors",):
        whole, killed = (
            (tmp_path / run / "final" / name).read_bytes() for run in ("whole", "killed")
        )
        assert whole == killed
    timed = ("tokens_per_second", "mfu", "memory_gib", "data_share", "seconds")
    whole, killed = (
        [
            {name: value for name, value in row.items() if name not in timed}
            for row in rows_of(tmp_path / run)
        ]
        for run in ("whole", "killed")
    )
    assert whole == killed
    for name in ("whole", "killed"):
        check_verdict(tmp_path / name, objective)


def check_verdict(run: Path, objective: str) -> None:
    """Check that the compared scores are those of the last validation, and said in the end."""
    last = rows_of(run)[-1]
    after = parts_in(run / run_dir.VERDICT, "after")
    if objective == "kto":
        assert after.keys() == {"margin"}
    else:
        assert mean_of(after["accuracy"]) == pytest.approx(last["val_accuracy"])
    assert mean_of(after["margin"]) == pytest.approx(last["val_margin"], rel=1e-5)
    if objective != "orpo":
        before = parts_in(run / run_dir.VERDICT, "before")
        assert all(part.value == 0 for part in before["margin"].values())
    texts = run_dir.verdict_texts(run)
    assert len(texts) == len(after) and all("examples, and fewer" in text for text in texts)
    assert "not measured: what it forgot" in (run / "report.html").read_text()


def test_a_run_killed_within_the_reference_resumes_it(tiny, pairs, tmp_path, monkeypatch):
    args = flags(tiny, pairs, tmp_path / "run")
    run_finetuning(args)
    (path,) = (tmp_path / "run" / FOLDER).glob("train-*.bin")
    stored = path.read_bytes()
    rows = LogProbFile(path, 2).rows()
    assert len(rows) == 32 and len(stored) == rows.nbytes
    killed = tmp_path / "killed"
    (killed / FOLDER).mkdir(parents=True)
    (killed / "config.yaml").write_bytes((tmp_path / "run" / "config.yaml").read_bytes())
    file = LogProbFile(killed / FOLDER / path.name, 2)
    # as if computed elsewhere: such rows are not computed again
    marked = rows["values"][:10] + 1e-9
    file.append(rows["index"][:10].tolist(), marked)
    with file.path.open("ab") as stream:
        stream.write(b"torn")
    run_finetuning(replace(args, out_dir=str(killed), resume=True))
    resumed = file.rows()
    assert len(resumed) == len(rows) and file.path.stat().st_size == len(stored)
    assert (
        np.array_equal(resumed["values"][:10], marked)
        and len(set(resumed["index"].tolist())) == 32
    )


@pytest.mark.slow
def test_kill_9_within_the_reference_pass(checkpoints, tmp_path):
    """The pass over 400 pairs of a real model takes seconds; what was written stays, and the run
    goes on from there."""
    records = [
        {"prompt": f"Tell {n}", "chosen": "Once " * (20 + n % 30), "rejected": "upon " * 30}
        for n in range(400)
    ]
    data = write_records(tmp_path / "pairs.jsonl", records)
    common = [
        "--checkpoint_dir",
        checkpoints["stories15M"],
        "--data.path",
        data,
        "--objective",
        "dpo",
        "--out_dir",
        "run",
    ]
    common += (
        "--train.max_steps 60 --train.global_batch_size 8 --eval.max_new_tokens 0".split()
    )
    process = start("finetune/lora.py", *common, cwd=tmp_path)
    folder = tmp_path / "run" / FOLDER
    while not any(path.stat().st_size for path in folder.glob("train-*.bin")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    (path,) = folder.glob("train-*.bin")
    before = path.read_bytes()
    row_bytes = LogProbFile(path, 2).row.itemsize
    assert 0 < len(before) < row_bytes * 380
    script(
        "finetune/lora.py",
        "--resume",
        "--out_dir",
        "run",
        "--train.max_steps",
        "2",
        cwd=tmp_path,
    )
    assert (
        path.read_bytes()[: len(before) // row_bytes * row_bytes]
        == before[: len(before) // row_bytes * row_bytes]
    )


@pytest.mark.slow
def test_the_accuracy_rises_and_the_report_shows_it(tiny, pairs, tmp_path):
    run_finetuning(
        flags(
            tiny,
            pairs,
            tmp_path / "run",
            train={"max_steps": 30, "learning_rate": 1e-2, "global_batch_size": 16},
        )
    )
    rows = rows_of(tmp_path / "run")
    last = rows[-1]
    assert (
        last["val_accuracy"] >= 0.9
        and last["val_margin"] > 0.5
        and "val_perplexity" not in last
    )
    assert last["val_margin"] == pytest.approx(
        last["val_chosen_reward"] - last["val_rejected_reward"], rel=1e-6
    )
    words = "--checkpoint_dir run --repo_id me/mine --base_model me/base --dry_run".split()
    card = script("scripts/upload.py", *words, cwd=tmp_path).stdout
    assert "trained by LoRA from preferences with DPO ([2305.18290]" in card
    assert f"| validation accuracy, at the end | {last['val_accuracy']:.1%} |" in card
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    titles = (
        "Accuracy of the rewards",
        "Margin between the rewards",
        "Log-probability of the chosen",
    )
    for text in (*titles, "<th>accuracy</th>", "validation accuracy"):
        assert text in page


def test_log_probs_of_a_torn_file_are_read_up_to_the_tear(tmp_path):
    file = LogProbFile(tmp_path / "x" / "y.bin", 1)
    file.append([3, 1], np.array([[-1.0], [-2.0]]))
    size = file.path.stat().st_size
    with file.path.open("ab") as stream:
        stream.write(b"12345")
    values = np.full((5, 1), np.nan)
    file.read_into(values)
    assert values[[1, 3], 0].tolist() == [-2.0, -1.0] and np.isnan(values[[0, 2, 4]]).all()
    assert file.path.stat().st_size == size


def test_log_probs_with_a_flipped_bit_are_computed_again(tmp_path):
    file = LogProbFile(tmp_path / "x.bin", 2)
    expected = np.random.default_rng(0).normal(size=(3, 2))
    file.append([0, 1, 2], expected)
    content = file.path.read_bytes()
    row_bytes = len(content) // 3
    for position in range(row_bytes, 2 * row_bytes):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        file.path.write_bytes(changed)
        values = np.full((3, 2), np.nan)
        file.read_into(values)
        assert np.isnan(values[1]).all() and np.array_equal(
            values[[0, 2]], expected[[0, 2]]
        )
    file.append([1], expected[1:2])
    file.read_into(values)
    assert np.array_equal(values, expected)


def test_mismatches_are_drawn_by_seed_and_epoch(tiny, pairs, tmp_path):
    """Each position of the stream has the answer of another example, and another one in the next
    epoch."""
    args = flags(
        tiny,
        pairs,
        tmp_path / "run",
        objective="kto",
        train={"epochs": 2, "max_steps": None},
    )
    partners = {}
    for seed in (42, 42, 43):
        run = prepare_run(replace(args, seed=seed))
        schedule = run.schedule
        samples = RunSamples(run.setup.objective, schedule, [])
        drawn = [
            samples._train_partners(position) for position in range(schedule.num_samples)
        ]
        assert partners.setdefault(seed, drawn) == drawn and all(i != j for i, j in drawn)
        assert [i for i, _ in drawn] == schedule.order.indices(0, schedule.num_samples)
    size = len(partners[42]) // 2
    assert partners[42] != partners[43] and dict(partners[42][:size]) != dict(
        partners[42][size:]
    )


def test_a_run_that_cannot_be_resumed_computes_no_reference(tiny, pairs, tmp_path):
    """And one that can, from the command line, computes none again."""
    common = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        pairs,
        "--objective",
        "dpo",
        "--train.max_steps",
        "2",
    ]
    script(
        "finetune/lora.py",
        *common,
        "--eval.max_new_tokens",
        "0",
        "--out_dir",
        "run",
        cwd=tmp_path,
    )
    files = {path: path.read_bytes() for path in (tmp_path / "run" / FOLDER).iterdir()}
    script("finetune/lora.py", "--resume", "--out_dir", "run", cwd=tmp_path)
    flags = "--resume --out_dir run --preference.beta 0.3".split()
    assert (
        "preference.beta 0.1, now 0.3"
        in script("finetune/lora.py", *flags, cwd=tmp_path, code=2).stderr
    )
    assert files == {
        path: path.read_bytes() for path in (tmp_path / "run" / FOLDER).iterdir()
    }


def test_a_step_with_one_kind_of_labels_has_no_margin(tiny, tmp_path):
    records = [
        {"prompt": f"Say {n}", "completion": f"it is {n}", "label": True} for n in range(8)
    ]
    data = write_records(tmp_path / "labels.jsonl", records)
    run_finetuning(flags(tiny, data, tmp_path / "run", objective="kto"))
    for row in rows_of(tmp_path / "run"):
        names = {name.removeprefix("val_") for name in row}
        assert "chosen_reward" in names and not names & {
            "margin",
            "rejected_reward",
            "rejected_logp",
        }
    assert rows_of(tmp_path / "run")[0]["val_accuracy"] == 0.5


def test_flags_without_a_meaning_are_refused(tiny, pairs, tmp_path):
    cases = {
        "--preference.gamma applies only to --objective simpo": {
            "preference": PreferenceArgs(gamma=2.0)
        },
        "--preference.beta 0": {"preference": PreferenceArgs(beta=0.0)},
        "--data.mask_prompt false": {
            "data": DataArgs(path=[str(pairs)], mask_prompt=False)
        },
        "--train.label_smoothing 0.1": {"train": TrainArgs(label_smoothing=0.1)},
    }
    for message, values in cases.items():
        problems = replace(flags(tiny, pairs, tmp_path / "run"), **values).problems()
        assert any(problem.startswith(message) for problem in problems), message
    supervised = replace(
        flags(tiny, pairs, tmp_path / "run", objective="sft"),
        preference=PreferenceArgs(beta=0.2),
    )
    assert any(
        "--preference.beta applies only to" in problem for problem in supervised.problems()
    )


def test_default_learning_rates_depend_on_method_and_objective(tiny, pairs, tmp_path):
    expected = {
        (LoRAFinetuneArgs, "dpo"): 5e-5,
        (FullFinetuneArgs, "dpo"): 5e-6,
        (LoRAFinetuneArgs, "simpo"): 1e-5,
    }
    for (kind, objective), rate in expected.items():
        args = flags(
            tiny, pairs, tmp_path / "run", kind, objective, train={"learning_rate": None}
        )
        assert prepare_run(args).setup.args.train.learning_rate == pytest.approx(rate)
    supervised = LoRAFinetuneArgs(
        checkpoint_dir=str(tiny), data=DataArgs(path=[str(ROOT / "litft" / "demo")])
    )
    assert prepare_run(supervised).setup.args.train.learning_rate == 1e-3


def test_margins_do_not_depend_on_the_number_of_each_label():
    desirable = torch.tensor([True, False, False, False])
    rewards = torch.tensor([0.5, -1.0, -2.0, -1.5])
    # the mean of one answer, and of three
    assert float(label_margins(rewards, desirable).mean()) == 0.5 + 1.5
    # the rewards of all answers fall by the same amount
    assert float(label_margins(torch.full((4,), -1.0), desirable).mean()) == pytest.approx(
        0, abs=1e-6
    )
    assert float(label_margins(rewards, torch.zeros(4, dtype=torch.bool)).mean()) == 1.0


def test_the_spread_of_margins_is_that_of_a_difference_of_means():
    """What all rewards have in common is in no margin, also where answers stand for several."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(60)
    # the sets differ in their size and in their share of desirable answers
    desirable = torch.where(numbers < 30, numbers % 3 == 0, numbers % 5 == 0)
    noise = torch.randn(60, generator=generator, dtype=torch.float64)
    rewards = torch.where(desirable, 1.0, 0.0) + 0.1 * noise
    weights = torch.where(numbers < 30, 20.0, 1.0).double()
    for of_each in (torch.ones(60, dtype=torch.float64), weights):
        high = (rewards * of_each)[desirable].sum() / of_each[desirable].sum()
        low = (rewards * of_each)[~desirable].sum() / of_each[~desirable].sum()
        for shift in (0.0, -10.0):
            values = label_margins(rewards + shift, desirable, of_each.tolist())
            mean = (values * of_each).sum() / of_each.sum()
            assert float(mean) == pytest.approx(float(high - low))
            assert float(values.std()) < 1


def test_rounding_errors_are_ties():
    """Before the first step, all margins are 0 but for rounding."""
    assert wins(torch.tensor([1e-7, -1e-7, 0.0, 1e-3, -1e-3])).tolist() == [
        0.5,
        0.5,
        0.5,
        1.0,
        0.0,
    ]


@pytest.mark.slow
def test_pairs_are_scored_beside_the_base(tiny, pairs, tmp_path):
    """The run's own held-out pairs without flags; a file of pairs is recognised by its fields."""
    run_finetuning(
        flags(tiny, pairs, tmp_path / "run", train={"max_steps": 20, "learning_rate": 1e-2})
    )
    script(
        "scripts/run_eval.py",
        "--checkpoint_dir",
        "run/final",
        "--out",
        "scores.json",
        cwd=tmp_path,
    )
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]
    last = rows_of(tmp_path / "run")[-1]
    assert scores["tuned"]["margin over the base"] * 0.1 == pytest.approx(
        last["val_margin"], rel=1e-4
    )
    assert scores["tuned"]["accuracy over the base"] == last["val_accuracy"]
    found = json.loads((tmp_path / "scores.json").read_text())["verdicts"]
    by_score = {verdict["score"]: verdict["difference"] for verdict in found}
    # examples are prompts, as when they are divided into training and validation
    names = prepare_run(flags(tiny, pairs, tmp_path / "x")).schedule.data.val.names
    compared = parts_in(tmp_path / "run" / run_dir.VERDICT, "after")["margin"]
    assert compared.keys() == {tuple(name[:1]) for name in names}
    assert by_score["margin"] == pytest.approx(scores["tuned"]["margin over the base"])
    assert by_score["accuracy"] == pytest.approx(
        scores["tuned"]["accuracy"] - scores["base"]["accuracy"]
    )
    data, model = (
        prepare_run(flags(tiny, pairs, tmp_path / "x")).schedule.data,
        litft.load(tiny, precision="fp32")[0],
    )
    expected = np.array([plain_log_probs(model, data.val[n]) for n in range(len(data.val))])
    assert scores["base"]["margin"] == pytest.approx(
        float((expected[:, 0] - expected[:, 1]).mean()), rel=1e-5
    )
    script(
        "scripts/run_eval.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        pairs,
        "--out",
        "file.json",
        cwd=tmp_path,
    )
    written = json.loads((tmp_path / "file.json").read_text())
    ((name, only),) = written["scores"].items()
    assert only["pairs"] == 40 and 0 <= only["accuracy"] <= 1
    assert {"prompt", "chosen", "rejected"} <= written["answers"][0].keys()
    # every pair is written with its log-probabilities, which the scores are the means of
    values = np.array([item[f"{name}, log-probability"] for item in written["answers"]])
    assert values.shape == (40, 2)
    assert np.mean(values[:, 0] - values[:, 1]) == pytest.approx(only["margin"], rel=1e-5)
    # the default of --show
    assert sum(item[name] is not None for item in written["answers"]) == 3


@pytest.mark.slow
def test_answers_with_labels_are_scored_by_label(tiny, tmp_path):
    """Undesirable answers are not expected ones: a file of labels is recognised by its fields."""
    records = [
        {"prompt": f"Say {n}.", "completion": f"number {n}", "label": n % 3 > 0}
        for n in range(30)
    ]
    path = write_records(tmp_path / "labels.jsonl", records)
    args = flags(
        tiny,
        path,
        tmp_path / "run",
        objective="kto",
        train={"max_steps": 4, "learning_rate": 1e-2},
    )
    run_finetuning(args)
    done = script(
        "scripts/run_eval.py",
        "--checkpoint_dir",
        "run/final",
        "--out",
        "scores.json",
        cwd=tmp_path,
    )
    written = json.loads((tmp_path / "scores.json").read_text())
    data = prepare_run(args).schedule.data.val
    folders = {"base": tiny, "tuned": tmp_path / "run" / "final"}
    models = {
        name: litft.load(folder, precision="fp32")[0] for name, folder in folders.items()
    }
    sums = {
        name: [plain_log_probs(model, data[n])[0] for n in range(len(data))]
        for name, model in models.items()
    }
    for desirable, title in ((True, "desirable"), (False, "undesirable")):
        chosen = [n for n in range(len(data)) if data[n].desirable is desirable]
        means = {
            name: np.mean([values[n] for n in chosen]) for name, values in sums.items()
        }
        for name, mean in means.items():
            assert written["scores"][name][f"{title}: log-probability"] == pytest.approx(
                mean, rel=1e-5
            )
        gain = written["scores"]["tuned"][f"{title}: log-probability over the base"]
        assert gain == pytest.approx(means["tuned"] - means["base"], abs=1e-4)
    assert (
        "exact_match" not in written["scores"]["tuned"]
        and "tuned, log-probability:" in done.stdout
    )


@pytest.mark.slow
def test_preferences_with_a_cut_answer_are_written(tiny, tmp_path):
    """They are scored, and so they are in the file, without an answer to compare with."""
    pairs = [
        {"prompt": "What?", "chosen": "It " * 600, "rejected": "No"},
        {"prompt": "Who?", "chosen": "One.", "rejected": "Two."},
    ]
    labels = []
    for pair in pairs:
        labels.append(
            {"prompt": pair["prompt"], "completion": pair["chosen"], "label": True}
        )
    for title, records in (("chosen", pairs), ("desirable", labels)):
        write_records(tmp_path / "data.jsonl", records)
        script(
            "scripts/run_eval.py",
            "--checkpoint_dir",
            tiny,
            "--data.path",
            "data.jsonl",
            "--show",
            "2",
            "--out",
            "file.json",
            cwd=tmp_path,
        )
        answers = json.loads((tmp_path / "file.json").read_text())["answers"]
        assert len(answers) == 2
        lengths = sorted(len(answer[title].split()) for answer in answers)
        assert lengths[0] == 1 and 50 < lengths[1] < 600
        assert sum(answer[tiny.name] is None for answer in answers) == 1
