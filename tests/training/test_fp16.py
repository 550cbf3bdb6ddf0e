"""Training in fp16: a scaled loss, updates that overflow, and resuming."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import kill_after, script
from test_train import rows_of, untimed
from torch.amp.grad_scaler import GradScaler

from litft.distributed import devices
from litft.families import fits_fp16, read_config
from litft.training.divergence import SMALLEST_SCALE
from litft.training.updates import Updates

FLAGS = "--data.val_fraction 0.2 --train.global_batch_size 2 --train.warmup_fraction 0.5".split()
FLAGS += "--save.interval 5 --eval.interval 10".split()


def train(kind, tiny, examples, folder, *flags):
    """Run a script of finetune/ in `folder`; return the rows of its metrics."""
    data = ["--checkpoint_dir", tiny, "--data.path", examples]
    script(f"finetune/{kind}.py", *data, *FLAGS, *flags, "--out_dir", "run", cwd=folder)
    return rows_of(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_losses_are_near_those_of_fp32(tiny, examples, tmp_path, kind):
    losses = {}
    for precision in ("fp16", "fp32"):
        folder = tmp_path / precision
        folder.mkdir()
        flags = ["--precision", precision, "--train.max_steps", "30"]
        # with fewer examples the first update of full fine-tuning overflows
        flags += ["--train.global_batch_size", "4"]
        rows = train(kind, tiny, examples, folder, *flags)
        losses[precision] = torch.tensor([float(row["loss"]) for row in rows[1:]])
        if precision == "fp16":
            assert {row["loss_scale"] for row in rows[1:]} == {"65536"}
            assert {row["skipped_updates"] for row in rows[1:]} == {"0"}
    assert len(losses["fp16"]) == 30
    # relative to losses near that of a guess; fp16 rounds by 5e-4, and steps add up: 1.1e-3 on an
    # Intel processor, below 1e-3 on an AMD one
    difference = (losses["fp16"] - losses["fp32"]).abs() / losses["fp32"]
    assert difference.max() <= 2e-3
    assert losses["fp16"][-1] < losses["fp16"][0]


@pytest.fixture
def updates():
    """The updates of one weight, without a network: its gradient is set by the test."""
    weight = torch.nn.Parameter(torch.ones(3))
    made = object.__new__(Updates)
    made.fabric = SimpleNamespace(global_rank=0, device=torch.device("cpu"))
    made.args = SimpleNamespace(
        seed=1,
        train=SimpleNamespace(
            optimizer_in_backward=False, max_grad_norm=0.0, skip_nan=False
        ),
    )
    made.objective = SimpleNamespace(updates=1)
    made.trained = {"weight": weight}
    made.mesh = None
    made.said = []

    def check(number, scale):
        made.said.append(number)
        if scale < SMALLEST_SCALE:
            raise ValueError("scale")

    made.divergence = SimpleNamespace(check_loss_scale=check, skipped=0)
    made.scaler = GradScaler("cpu", growth_interval=3)
    made.skipped = 0
    return made, weight, torch.optim.SGD([weight], lr=0.5)


def test_updates_that_overflow_are_left_out_by_torchs_rule(updates):
    made, weight, optimizer = updates
    reference = GradScaler("cpu", growth_interval=3)
    expected = weight.detach().clone().requires_grad_()
    plain = torch.optim.SGD([expected], lr=0.5)
    model = torch.nn.Module()
    for number, gradient in enumerate(
        [1.0, float("inf"), 2.0, 1.0, 1.0, float("nan"), 3.0]
    ):

        def backward(*_, gradient=gradient):
            weight.grad = torch.full((3,), gradient) * made.scaler.scale(torch.ones(()))
            return torch.ones(1)

        with mock.patch.object(Updates, "_backward", backward):
            _, norm = made.step(model, optimizer, [], number)
        expected.grad = torch.full((3,), gradient) * reference.scale(torch.ones(()))
        reference.unscale_(plain)
        reference.step(plain)
        reference.update()
        assert torch.equal(weight, expected)
        assert made.metrics()["loss_scale"] == reference.get_scale()
        if gradient == gradient and gradient < 10:
            assert float(norm) == pytest.approx(gradient * 3**0.5)
    assert made.skipped == 2 and made.said == [1, 5]
    # halved twice, doubled once after three in a row
    assert made.metrics()["loss_scale"] == 2**15

    state = json.loads(json.dumps(made.state()))
    other = object.__new__(Updates)
    other.scaler = GradScaler("cpu", growth_interval=3)
    other.restore(state)
    assert other.state() == made.state()


def test_losses_that_are_not_finite_are_reported_in_fp16_too(updates):
    """With --train.skip_nan, ten in a row end the run, as in other precisions."""
    made, weight, optimizer = updates
    made.args.train.skip_nan = True
    steps = []
    made.divergence.skip = steps.append

    def backward(*_):
        weight.grad = torch.full((3,), float("nan"))
        made.scaler.scale(torch.ones(()))
        return torch.full((1,), float("nan"))

    with mock.patch.object(Updates, "_backward", backward):
        for number in range(3):
            made.step(torch.nn.Module(), optimizer, [], number)
    assert steps == [0, 1, 2] and made.skipped == 0
    made.args.train.skip_nan = False
    with mock.patch.object(Updates, "_backward", backward):
        made.step(torch.nn.Module(), optimizer, [], 3)
    assert torch.equal(weight, torch.ones(3))


def test_a_run_whose_gradients_always_overflow_ends(updates):
    made, weight, optimizer = updates

    def backward(*_):
        weight.grad = torch.full((3,), float("inf"))
        # the scale exists once a loss is scaled
        made.scaler.scale(torch.ones(()))
        return torch.ones(1)

    with (
        mock.patch.object(Updates, "_backward", backward),
        pytest.raises(ValueError, match="scale"),
    ):
        for number in range(50):
            made.step(torch.nn.Module(), optimizer, [], number)
    assert made.skipped == 22 and torch.equal(weight, torch.ones(3))


def test_a_run_whose_updates_were_all_left_out_is_resumed(tiny, examples, tmp_path):
    """Its checkpoint has no state of the optimizer."""
    flags = ["--precision", "fp16", "--train.max_steps", "1", "--save.interval", "1"]
    rows = train("full", tiny, examples, tmp_path, *flags)
    assert rows[-1]["skipped_updates"] == "1"
    steps = ["--out_dir", "run", "--train.max_steps", "4"]
    script("finetune/full.py", "--resume", *steps, cwd=tmp_path)
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["step"] == "4" and int(rows[-1]["skipped_updates"]) < 4


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tiny, examples, tmp_path):
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        *FLAGS,
        "--precision",
        "fp16",
    ]
    flags += ["--train.max_steps", "24", "--train.learning_rate", "0.01"]
    script("finetune/lora.py", *flags, "--out_dir", "whole", cwd=tmp_path)
    killed = tmp_path / "killed"
    kill_after(10, killed, "finetune/lora.py", *flags, "--out_dir", "killed", cwd=tmp_path)
    progress = max((killed / "checkpoints").glob("step-*")) / "progress.json"
    assert json.loads(progress.read_text())["loss_scale"]["scale"] == 65536
    script("finetune/lora.py", "--resume", "--out_dir", "killed", cwd=tmp_path)
    assert untimed(killed) == untimed(tmp_path / "whole")
    name = "adapter_model.safetensors"
    whole = tmp_path / "whole" / "final" / name
    assert (killed / "final" / name).read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("capability", "in_range", "expected"),
    [
        ((9, 0), True, "bf16"),
        ((8, 0), False, "bf16"),
        ((7, 5), True, "fp16"),
        ((7, 0), True, "fp16"),
        ((7, 5), False, "fp32"),
        ((6, 1), True, "fp32"),
    ],
)
def test_precision_follows_the_compute_capability(
    monkeypatch, capability, in_range, expected
):
    """A T4 says that it has bf16, which it emulates."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    device = torch.device("cuda")
    assert devices.pick_precision("auto", device, in_range) == expected
    assert devices.pick_precision("fp32", device, in_range) == "fp32"
    note = devices.lacks_bf16(device, expected)
    if expected == "bf16":
        assert note is None
    else:
        assert f"precision auto is {expected}" in note
        assert ("does not suit this model" in note) == (not in_range)
    full = (
        devices.pick_full_precision("auto", device, 10, in_range)
        if expected != "bf16"
        else None
    )
    assert full in (None, expected)


def test_models_and_flags_that_do_not_work_in_fp16(tiny, examples, make_model, tmp_path):
    from conftest import STORIES, copy_tokenizer
    from transformers import Gemma3TextConfig

    _, gemma = make_model(Gemma3TextConfig, vocab_size=512, max_position_embeddings=256)
    copy_tokenizer(STORIES, gemma)
    assert not fits_fp16(read_config(json.loads((gemma / "config.json").read_text())))

    def message(kind, folder, *flags):
        words = [
            "--checkpoint_dir",
            folder,
            "--data.path",
            examples,
            "--precision",
            "fp16",
            *flags,
        ]
        return script(f"finetune/{kind}.py", *words, cwd=tmp_path, code=2).stderr

    assert "activations of gemma3_text models are beyond the range" in message(
        "lora", gemma
    )
    in_backward = ["--train.optimizer_in_backward", "--train.max_grad_norm", "0"]
    in_backward += ["--train.global_batch_size", "4", "--train.micro_batch_size", "4"]
    assert "before all gradients are known" in message("full", tiny, *in_backward)
    sharded = ["--devices", "2", "--strategy", "fsdp"]
    assert "would skip updates on some of the devices" in message("lora", tiny, *sharded)
