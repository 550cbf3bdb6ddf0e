"""Learning from a teacher: the loss against closed forms and TRL, what a run reads and records,
processes, kills, and files that are damaged."""

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import copytree, rmtree

import pytest
import torch
from conftest import (
    STORIES,
    adapted,
    copy_tokenizer,
    kill_after,
    rows_of,
    script,
    write_records,
)
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2
from torch import nn

from litft.args import (
    DataArgs,
    DistillArgs,
    EvalArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    SaveArgs,
    TrainArgs,
)
from litft.commands.finetune import prepare_run, run_finetuning
from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.distributed.devices import make_fabric
from litft.distributed.process_group import Processes, launch
from litft.methods import LoRA
from litft.model import loss as chunked
from litft.model.distillation import (
    Distillation,
    TeacherQuestion,
    TeacherTargets,
    distillation_loss,
    divergence,
    likeliest_tokens,
    summed_losses,
)
from litft.model.loss import IGNORED
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.training import planned_run
from litft.training.memory.check import check_memory
from litft.training.teacher import TeacherFile
from litft.training.trainer import Trainer

COUNT, WIDTH, VOCABULARY = 37, 16, 50
# columns of metrics.csv that differ from run to run
TIMED = ("tokens_per_second", "mfu", "memory_gib", "data_share", "seconds")


def targets_of(top_k: int, temperature: float = 1.0) -> TeacherTargets:
    """Return what a random teacher says of COUNT targets, every fifth of which is no label."""
    generator = torch.Generator().manual_seed(top_k)
    logits = 3 * torch.randn(COUNT, VOCABULARY, generator=generator)
    log_probs = (logits / temperature).log_softmax(1)
    own, ids = log_probs.topk(top_k)
    if top_k < VOCABULARY:
        others = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        own = torch.cat([own, others], 1)
    return TeacherTargets(ids.int(), own, torch.arange(COUNT) % 5 > 0)


def head_and_input() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """Return a head, its input (1, COUNT + 3, WIDTH), and targets of all but the first three."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.randn(1, COUNT + 3, WIDTH, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (1, COUNT + 3))
    targets[0, :3] = IGNORED
    return head, hidden, targets


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("top_k", [1, 7, VOCABULARY])
def test_the_chunked_loss_equals_the_plain_one(top_k, softcap, monkeypatch):
    """Losses, sums and gradients, in chunks that end within the targets; also of a head that
    computes its own logits."""
    monkeypatch.setattr(chunked, "LOGIT_ROWS", 16)
    monkeypatch.setitem(chunked.SOFTMAX_CHUNK, "cpu", 5 * VOCABULARY)
    head, hidden, targets = head_and_input()

    class OwnHead(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    own_head = OwnHead(WIDTH, VOCABULARY)
    own_head.load_state_dict(head.state_dict())
    for beta, temperature, weights in product(
        (0.0, 0.3, 1.0), (1.0, 2.0), ((0.0, 1.0), (0.5, 0.5))
    ):
        teacher = targets_of(top_k, temperature)
        how = Distillation(teacher, *weights, beta=beta, temperature=temperature)
        logits = head(hidden[0, 3:])
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        part = how._replace(teacher=teacher.part(slice(None)))
        expected = summed_losses(logits, targets[0, 3:], part)
        slopes = torch.autograd.grad(expected[0], [hidden, head.weight, head.bias])
        for module in (head, own_head):
            actual = distillation_loss(hidden, module, targets, how, softcap)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
            gradients = torch.autograd.grad(actual[0], [hidden, module.weight, module.bias])
            for gradient, slope in zip(gradients, slopes, strict=True):
                torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_divergence_equals_trl(beta, temperature):
    from trl.experimental.gkd import GKDTrainer

    head, hidden, targets = head_and_input()
    teacher = targets_of(VOCABULARY, temperature)
    student = head(hidden[0, 3:])
    logits = torch.zeros(COUNT, VOCABULARY).scatter(
        1, teacher.ids.long(), teacher.log_probs * temperature
    )
    expected = GKDTrainer.generalized_jsd_loss(
        student[None], logits[None], beta=beta, temperature=temperature, reduction="sum"
    )
    how = Distillation(teacher, 0.0, 1.0, beta=beta, temperature=temperature)
    actual = distillation_loss(hidden, head, targets, how)[0]
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    (slope,) = torch.autograd.grad(expected, hidden, retain_graph=True)
    (gradient,) = torch.autograd.grad(actual, hidden)
    torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_few_tokens_give_the_divergence_of_their_events(beta):
    """The closed form: all tokens but the K likeliest count as one. It is below the divergence over
    the whole vocabulary, and grows to it with K."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 9, 12, generator=generator).double().log_softmax(-1)
    whole = divergence(student, teacher, beta)
    previous = torch.zeros(9).double()
    for top_k in (1, 3, 6, 11):
        _, ids = teacher.topk(top_k)
        events = []
        for log_probs in (student, teacher):
            own = log_probs.exp().gather(1, ids)
            events.append(torch.cat([own, 1 - own.sum(1, keepdim=True)], 1).log())
        few = divergence(*events, beta)
        how = Distillation(
            TeacherTargets(ids, events[1], torch.ones(9) > 0),
            0.0,
            1.0,
            beta=beta,
            temperature=1.0,
        )
        sums = summed_losses(student, torch.zeros(9, dtype=torch.int64), how)
        assert float(sums[2]) == pytest.approx(float(few.sum()), rel=1e-6)
        assert (few >= previous - 1e-12).all() and (few <= whole + 1e-12).all()
        previous = few
    # of 12 tokens, the 11 likeliest and the other one are all
    torch.testing.assert_close(previous, whole)


def test_a_teacher_equal_to_the_student_teaches_nothing():
    head, hidden, targets = head_and_input()
    head.weight.data *= 3
    ids, log_probs = likeliest_tokens(
        hidden[0, 3:], head, TeacherQuestion(5, VOCABULARY, 2.0)
    )
    teacher = TeacherTargets(ids, log_probs, torch.ones(COUNT) > 0)
    for beta in (0.0, 0.5, 1.0):
        how = Distillation(teacher, 0.0, 1.0, beta=beta, temperature=2.0)
        loss = distillation_loss(hidden, head, targets, how)[0]
        (gradient,) = torch.autograd.grad(loss, hidden)
        # fp16 log-probabilities are off by up to 2^-10 at -2 to -4
        assert abs(float(loss)) < 1e-5 * COUNT
        assert float(gradient.abs().max()) < 2e-3


def test_probabilities_are_among_the_tokens_of_the_student():
    head, hidden, _ = head_and_input()
    ids, log_probs = likeliest_tokens(hidden[0], head, TeacherQuestion(8, 20, 1.0))
    expected = head(hidden[0])[:, :20].log_softmax(-1)
    assert int(ids.max()) < 20
    torch.testing.assert_close(
        log_probs[:, :8].float(), expected.gather(1, ids.long()), rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(
        log_probs.float().exp().sum(1), torch.ones(len(ids)), rtol=0, atol=2e-3
    )


# ---- runs


@pytest.fixture(scope="module")
def models(make_model, tmp_path_factory) -> tuple[Path, Path]:
    """The folders of a student and of a teacher with random weights."""
    from transformers import LlamaConfig, Qwen3Config

    folders = []
    for config in (Qwen3Config, LlamaConfig):
        _, folder = make_model(config, vocab_size=512, max_position_embeddings=128)
        copy_tokenizer(STORIES, folder)
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture(scope="module")
def flags(models, tmp_path_factory) -> LoRAFinetuneArgs:
    path = tmp_path_factory.mktemp("examples") / "examples.jsonl"
    words = "the little girl went to play in the park with her red ball".split()
    records = []
    for number in range(12):
        question = " ".join(words[: 2 + number % 6])
        records.append({"prompt": question, "completion": " ".join(words[number % 7 :])})
    write_records(path, records)
    template = path.with_name("template.jinja")
    template.write_text(
        "{% for m in messages %}{{ m.content }}{{ ':' if m.role == 'user' else eos_token }}"
        "{% endfor %}"
    )
    student, teacher = models
    return LoRAFinetuneArgs(
        checkpoint_dir=str(student),
        objective="distill",
        teacher=str(teacher),
        distill=DistillArgs(top_k=16, on_policy=0.5, max_new_tokens=8),
        data=DataArgs(
            path=[str(path)], val_fraction=0.2, max_seq_length=64, template=str(template)
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


def short_run(
    flags: LoRAFinetuneArgs, teacher: Path, tmp_path: Path, steps: int, **changed
) -> LoRAFinetuneArgs:
    """Return the flags of a run in `run` that learns from the examples alone."""
    return replace(
        flags,
        teacher=str(teacher),
        distill=DistillArgs(top_k=4),
        out_dir=str(tmp_path / "run"),
        train=replace(flags.train, max_steps=steps),
        **changed,
    )


def test_a_run_learns_and_records_it(flags, tmp_path):
    """The divergence falls; the card says what the model has learned from; all files of the teacher
    are in the run's folder."""
    args = replace(
        flags,
        out_dir=str(tmp_path / "run"),
        distill=DistillArgs(top_k=16, alpha=0.25, temperature=1.0),
        train=replace(flags.train, max_steps=30, learning_rate=3e-2),
    )
    run_finetuning(args)
    rows = rows_of(tmp_path / "run")
    validations = [row for row in rows if "val_divergence" in row]
    assert validations[-1]["val_divergence"] < 0.9 * validations[0]["val_divergence"]
    for row in validations:
        weighted = 0.25 * row["val_cross_entropy"] + 0.75 * row["val_divergence"]
        assert row["val_loss"] == pytest.approx(weighted, rel=1e-5)
        assert "val_perplexity" not in row
    words = "--checkpoint_dir run --repo_id me/mine --base_model me/base --dry_run".split()
    card = script("scripts/upload.py", *words, cwd=tmp_path).stdout
    assert "trained by LoRA from a teacher with distillation ([2306.13649]" in card
    assert f"Teacher: `{Path(flags.teacher).name}`." in card
    assert "Divergence from the teacher" in (tmp_path / "run" / "report.html").read_text()
    kept = sorted(path.name for path in (tmp_path / "run" / "reference").iterdir())
    assert [name.split("-")[1] for name in kept] == ["train", "val"]


def test_what_the_teacher_says_is_its_own_forward_pass(flags, tmp_path):
    """Of each target, in the order of the sample, however the samples are laid out."""
    trainer = trainer_of(replace(flags, distill=DistillArgs(top_k=16)), tmp_path / "a")
    teacher = base_model(resolve(flags.teacher))
    for sample in trainer.samples.of_step(0):
        logits = teacher(sample.tokens[None])[0][sample.targets != IGNORED]
        expected = logits.log_softmax(-1).topk(16)
        assert sample.teacher is not None
        assert len(sample.teacher.ids) == sample.supervised
        torch.testing.assert_close(
            sample.teacher.log_probs[:, :16].float(), expected.values, rtol=2e-3, atol=2e-3
        )
    # a second run of the same folder reads the file alone
    size = sum(path.stat().st_size for path in (tmp_path / "a" / "reference").iterdir())
    again = trainer_of(
        replace(flags, resume=True, distill=DistillArgs(top_k=16)), tmp_path / "a"
    )
    assert again.own_answers is None
    assert size == sum(
        path.stat().st_size for path in (tmp_path / "a" / "reference").iterdir()
    )


def test_gradients_do_not_depend_on_the_layout(flags, tmp_path):
    """Also with the student's own answers, whose cross-entropy does not count."""
    trainer = trainer_of(flags, tmp_path / "a")
    step = trainer.samples.of_step(0)
    results = []
    for layout in (BatchLayout(3), BatchLayout(1), BatchLayout(2, 64)):
        samples, facts = trainer.own_answers.replaced(0, step, layout)
        assert 0 < facts["own_answers"] < 1
        totals = trainer.objective.totals(samples)
        assert 0 < totals.labels < totals.tokens
        trainer.model.zero_grad()
        values = torch.zeros(3)
        for batch in layout.batches(samples):
            of_batch = trainer.objective(trainer.model.train(), batch, totals)
            of_batch[0].backward()
            values += of_batch.detach()
        assert float(values[0]) == pytest.approx(float(values[1] + values[2]) / 2, rel=1e-5)
        results.append((values, {n: p.grad.clone() for n, p in trainer.trained.items()}))
    for values, gradients in results[1:]:
        torch.testing.assert_close(values, results[0][0], rtol=1e-4, atol=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, results[0][1][name], rtol=1e-3, atol=1e-5)


def test_own_answers_depend_on_their_place_alone(flags, tmp_path):
    trainer = trainer_of(
        replace(flags, distill=replace(flags.distill, on_policy=1.0)), tmp_path / "a"
    )
    samples = trainer.samples.of_step(0)
    layout = trainer.schedule.layout

    def tokens(step: int, part: list[Sample]) -> list[list[int]]:
        replaced, _ = trainer.own_answers.replaced(step, part, layout)
        assert all(sample.is_own for sample in replaced)
        return [sample.tokens.tolist() for sample in replaced]

    many = tokens(0, samples)
    trainer.own_answers.writer.rows = 1
    assert tokens(0, samples) == many
    assert tokens(0, samples[:2]) == many[:2]
    assert tokens(1, samples) != many


def test_a_killed_run_ends_the_same(flags, tmp_path):
    """kill -9 within the teacher's pass, and in the middle of a step."""
    whole = replace(
        flags, train=replace(flags.train, max_steps=5), save=SaveArgs(interval=1)
    )
    run_finetuning(replace(whole, out_dir=str(tmp_path / "whole")))
    config = tmp_path / "whole" / "config.yaml"
    killed = tmp_path / "killed"
    command = ["finetune/lora.py", "--config", config, "--out_dir", killed]
    kill_after(2, killed, *command, cwd=tmp_path)
    # as if it had been killed within the pass: an entry is cut short
    for path in (killed / "reference").glob("teacher-train-*"):
        os.truncate(path, path.stat().st_size - 7)
    resumed = script(*command, "--resume", cwd=tmp_path)
    assert "1 to compute" in resumed.stdout + resumed.stderr
    name = "final/adapter_model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (killed / name).read_bytes()
    rows = []
    for run in (tmp_path / "whole", killed):
        rows.append(
            [
                {key: value for key, value in row.items() if not key.endswith(TIMED)}
                for row in rows_of(run)
            ]
        )
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param("ddp", marks=pytest.mark.weekly), "fsdp"]
)
def test_two_processes_learn_as_one(flags, tmp_path, strategy):
    """With FSDP the head is trained, too, and the second process has no targets in some steps."""
    train = replace(flags.train, max_steps=3, micro_batch_size=1)
    args = replace(flags, train=train, save=SaveArgs(interval=0))
    if strategy == "fsdp":
        args = replace(
            args,
            lora=replace(flags.lora, targets=["all-linear", "lm_head"]),
            data=replace(flags.data, packing=False),
        )
    run_finetuning(replace(args, out_dir=str(tmp_path / "one")))
    config = tmp_path / "one" / "config.yaml"
    two = ["--out_dir", tmp_path / "two", "--devices", "2", "--strategy", strategy]
    script("finetune/lora.py", "--config", config, *two, cwd=tmp_path)
    rows = [rows_of(tmp_path / name) for name in ("one", "two")]
    exact = {"own_answers", "completion_tokens", "tokens"}
    near = {
        "loss",
        "divergence",
        "cross_entropy",
        "grad_norm",
        "val_loss",
        "val_divergence",
    }
    assert len(rows[0]) == len(rows[1])
    for one, other in zip(*rows, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & exact:
            assert other[name] == pytest.approx(one[name], abs=1e-9)
        for name in one.keys() & near:
            assert other[name] == pytest.approx(one[name], abs=1e-5, rel=1e-4)


def test_a_damaged_file_of_the_teacher_is_noticed(flags, tmp_path):
    """A flipped bit within an entry ends the run with the file's name; one that is cut is read
    again."""
    args = replace(flags, distill=DistillArgs(top_k=16), out_dir=str(tmp_path / "run"))
    run_finetuning(args)
    (path,) = (tmp_path / "run" / "reference").glob("teacher-train-*")
    content = bytearray(path.read_bytes())
    # in two examples, as the steps that follow may not need one of them
    for place in (len(content) // 3, -1):
        content[place] ^= 4
    path.write_bytes(content)
    longer = replace(args, resume=True, train=replace(args.train, max_steps=8))
    with pytest.raises(OSError, match=r"teacher-train.*is damaged at byte .*delete it"):
        run_finetuning(longer)
    path.unlink()
    run_finetuning(longer)
    assert rows_of(tmp_path / "run")[-1]["step"] == 8


def test_entries_of_unknown_samples_are_not_read(tmp_path):
    file = TeacherFile(tmp_path / "a.bin", torch.tensor([2, 1]).numpy(), 3, 100)
    (tmp_path / "a.bin").write_bytes(bytes(range(200)))
    file.open(is_writer=True)
    assert not file.offsets and not (tmp_path / "a.bin").stat().st_size
    assert file.read(0) is None


def test_a_teacher_of_another_vocabulary_is_refused(flags, models, tmp_path):
    """Compared by tokenizer: its size is the same."""
    other = tmp_path / "other"
    other.mkdir()
    for path in models[1].iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    vocabulary = sentencepiece_model_pb2.ModelProto()
    vocabulary.ParseFromString((other / "tokenizer.model").read_bytes())
    pieces = vocabulary.pieces
    pieces[400].piece, pieces[401].piece = pieces[401].piece, pieces[400].piece
    (other / "tokenizer.model").write_bytes(vocabulary.SerializeToString())
    with pytest.raises(
        ValueError, match=r"its vocabulary differs from the student's: .* is token"
    ):
        prepare_run(replace(flags, teacher=str(other)))


def test_a_run_is_not_resumed_as_another_one(flags, models, tmp_path):
    """With the base of the teacher's adapter, or without a teacher."""
    adapter = tmp_path / "adapter"
    adapted(models[1], adapter, LoRA(LoRAArgs(r=2)), scale=0.1)
    args = short_run(flags, adapter, tmp_path, steps=2)
    run_finetuning(args)
    args = replace(args, resume=True, train=replace(args.train, max_steps=4))
    with pytest.raises(ValueError, match=r"teacher.s adapter .*, now None"):
        run_finetuning(replace(args, teacher=flags.teacher))
    with pytest.raises(ValueError, match="objective distill, now None"):
        run_finetuning(replace(args, objective="sft", teacher=None, distill=DistillArgs()))


@pytest.mark.slow
def test_a_checkpoint_is_converted_without_its_teacher(flags, models, tmp_path):
    teacher = copytree(models[1], tmp_path / "teacher")
    args = short_run(flags, teacher, tmp_path, steps=2, save=SaveArgs(interval=1))
    run_finetuning(args)
    rmtree(teacher)
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    out = tmp_path / "out"
    script(
        "scripts/convert_to_hf.py", "--checkpoint_dir", step, "--out_dir", out, cwd=tmp_path
    )
    assert list(out.glob("*.safetensors"))


def test_a_teacher_that_has_changed_is_noticed(flags, models, tmp_path):
    """Its config, and a weight at a place that the fingerprint does not look at."""
    teacher = copytree(models[1], tmp_path / "teacher")
    args = short_run(flags, teacher, tmp_path, steps=2)
    run_finetuning(args)
    args = replace(args, resume=True, train=replace(args.train, max_steps=4))
    config = (teacher / "config.json").read_text()
    changed = json.loads(config) | {"rms_norm_eps": 10.0}
    (teacher / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"config\.json of the teacher"):
        run_finetuning(args)
    (teacher / "config.json").write_text(config)
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.embed_tokens.weight"][1, 0] += 1
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="a part of the teacher of what was trained"):
        run_finetuning(args)


def test_more_tokens_than_the_vocabulary_are_all_tokens(flags, tmp_path):
    args = replace(flags, distill=DistillArgs(top_k=9999, on_policy=0.5, max_new_tokens=4))
    trainer = trainer_of(args, tmp_path / "a")
    for sample in trainer.samples.of_step(0):
        assert sample.teacher is not None
        assert sample.teacher.log_probs.shape == (sample.supervised, 512)
    trainer.fit()
    assert trainer.metrics.newest["val_divergence"] > 0


def test_a_step_may_have_no_answer_of_its_own(flags, tmp_path):
    """Nor a label: then the cross-entropy has no value."""
    distill = replace(flags.distill, on_policy=0.1)
    train = replace(flags.train, max_steps=6, global_batch_size=1)
    run_finetuning(
        replace(flags, distill=distill, train=train, out_dir=str(tmp_path / "run"))
    )
    rows = [row for row in rows_of(tmp_path / "run") if "own_answers" in row]
    assert 0.0 in {row["own_answers"] for row in rows}
    distill = replace(flags.distill, on_policy=1.0)
    run_finetuning(
        replace(flags, distill=distill, train=train, out_dir=str(tmp_path / "own"))
    )
    rows = [row for row in rows_of(tmp_path / "own") if "own_answers" in row]
    assert rows and all("cross_entropy" not in row for row in rows)


def test_a_teacher_that_is_not_finite_is_named(flags, models, tmp_path):
    """What it says is not kept: a teacher that was mended reads the examples again."""
    teacher = copytree(models[1], tmp_path / "teacher")
    weights = load_file(teacher / "model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    whole = weights[name].clone()
    weights[name][-1, -1] = torch.nan
    save_file(weights, teacher / "model.safetensors", {"format": "pt"})
    args = short_run(flags, teacher, tmp_path, steps=1)
    with pytest.raises(ValueError, match=r"--teacher .*its logits are not all finite"):
        run_finetuning(args)
    save_file(weights | {name: whole}, teacher / "model.safetensors", {"format": "pt"})
    result = run_finetuning(replace(args, resume=True))
    assert result is not None and result.metrics["val_divergence"] > 0


def test_what_a_teacher_cannot_judge_is_refused(flags, make_model, tmp_path):
    from transformers import LlamaConfig

    _, short = make_model(LlamaConfig, vocab_size=512, max_position_embeddings=16)
    copy_tokenizer(STORIES, short)
    with pytest.raises(
        ValueError, match="reads at most 16 tokens, and examples have up to"
    ):
        prepare_run(replace(flags, teacher=str(short)))
    write_records(
        tmp_path / "texts.jsonl", [{"text": f"once upon a time {n}"} for n in range(20)]
    )
    texts = replace(flags.data, path=[str(tmp_path / "texts.jsonl")])
    with pytest.raises(ValueError, match="the examples have no questions"):
        prepare_run(replace(flags, data=texts))


def test_own_answers_have_tokens_of_the_teacher_alone(flags, make_model, tmp_path):
    """A student whose vocabulary is padded may draw others."""
    from transformers import LlamaConfig

    _, padded = make_model(LlamaConfig, vocab_size=4096, max_position_embeddings=128)
    copy_tokenizer(STORIES, padded)
    distill = replace(flags.distill, on_policy=1.0)
    args = replace(flags, checkpoint_dir=str(padded), distill=distill)
    trainer = trainer_of(args, tmp_path / "a")
    own, _ = trainer.own_answers.replaced(
        0, trainer.samples.of_step(0), trainer.schedule.layout
    )
    assert max(int(sample.tokens.max()) for sample in own) < 512


def test_flags_of_a_teacher(flags):
    for changed, message in (
        ({"teacher": None}, "--teacher is missing"),
        ({"objective": "sft"}, "--teacher applies only to --objective distill"),
        ({"distill": DistillArgs(alpha=1.0)}, "the teacher would have no effect"),
        ({"distill": DistillArgs(beta=1.5)}, r"--distill.beta 1.5: must lie in \[0, 1\]"),
        ({"distill": DistillArgs(top_k=0)}, "--distill.top_k 0"),
    ):
        problems = replace(flags, **changed).problems()
        with pytest.raises(ValueError, match=message):
            raise ValueError("\n".join(problems))


def test_the_plan_counts_the_teacher(flags):
    """Beside the student if it judges own answers, otherwise before it."""
    before = prepare_run(replace(flags, distill=DistillArgs(top_k=16))).settings.plan.memory
    beside = prepare_run(flags).settings.plan.memory
    model = base_model(resolve(flags.teacher))
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert before.teacher == before.rollouts == 0
    assert beside.teacher == pytest.approx(size, rel=0.05)
    assert beside.rollouts > 0

    # a shard of all weights, and whole what is gathered at once: the head, and the two largest of
    # the blocks and the embedding
    two = prepare_run(replace(flags, devices=2, strategy="fsdp")).settings.plan.memory
    units = []
    for module in (*model.blocks, model.embed):
        units.append(sum(tensor.nbytes for tensor in module.parameters()))
    gathered = model.lm_head.weight.nbytes + sum(sorted(units)[-2:])
    assert two.teacher == pytest.approx(size / 2 + gathered, rel=0.05)


def test_a_teacher_that_fits_only_in_shards_is_sharded(
    flags, make_model, tmp_path, monkeypatch
):
    """--strategy auto, where a device has room for all of the student."""
    from transformers import LlamaConfig

    _, large = make_model(
        LlamaConfig,
        vocab_size=512,
        max_position_embeddings=128,
        intermediate_size=4096,
        num_hidden_layers=24,
    )
    copy_tokenizer(STORIES, large)
    args = replace(flags, teacher=str(large), devices=2, distill=DistillArgs(top_k=16))
    weights = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    monkeypatch.setattr(planned_run, "device_memory", lambda *_: weights * 2)
    assert prepare_run(args).settings.strategy == "ddp"

    monkeypatch.setattr(planned_run, "device_memory", lambda *_: weights)
    settings = prepare_run(args).settings
    assert settings.strategy == "fsdp"
    assert settings.plan.memory.peak < 0.9 * weights
    assert "since each needs" in settings.reason
    check_memory(prepare_run(args))
    with pytest.raises(ValueError, match="shard it over several devices"):
        check_memory(prepare_run(replace(args, strategy="ddp")))
