"""DFT (arXiv 2508.05629): its gradient is that of TRL's `loss_type="dft"`, its loss the
cross-entropy."""

import csv

import pytest
import torch
import torch.nn.functional as F
from conftest import write_records
from test_train import ragged, trainable

from litft.args import LoRAFinetuneArgs, PreferenceArgs, UploadArgs
from litft.args.parser import parse
from litft.cli import run
from litft.data.packing import BatchLayout
from litft.export.model_card import _losses, model_card
from litft.export.upload_files import card_info
from litft.pretrained.folder import resolve
from litft.training.objectives import OBJECTIVES

RECORDS = [{"prompt": f"Say {n}.", "completion": "once upon a time"} for n in range(24)]


@pytest.mark.parametrize("head", [False, True], ids=["frozen head", "trained head"])
def test_the_gradient_is_that_of_the_formula(tiny, head):
    samples = ragged(6)
    objective = OBJECTIVES["dft"](PreferenceArgs())
    totals = objective.totals(samples)
    (batch,) = BatchLayout(6).batches(samples)

    # TRL: sum(-log p x p.detach()) / tokens, from whole logits
    model, parameters = trainable(tiny, head)
    logits = model(batch.tokens).float()
    losses = F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="none"
    )
    probabilities = torch.where(
        batch.targets.flatten() == -100, 0.0, (-losses).exp().detach()
    )
    (losses * probabilities).sum().div(totals.tokens).backward()
    expected = {name: parameter.grad for name, parameter in parameters.items()}

    model, parameters = trainable(tiny, head)
    loss = objective(model, batch, totals)
    loss.sum().backward()
    assert float(loss) == pytest.approx(float(losses.sum()) / totals.tokens, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(parameters[name].grad, gradient, rtol=1e-4, atol=1e-7)


def test_an_improbable_token_has_nearly_no_gradient():
    """A token of probability p has the gradient p (softmax - 1): that of sft times p."""
    logits = torch.tensor([[8.0, 0.0], [0.0, 8.0]], requires_grad=True)

    def given(tokens, reduction, **_):
        return F.cross_entropy(logits, torch.tensor([0, 0]), reduction=reduction)

    class Batch:
        tokens = None

        def inputs(self):
            return {}

    objective = OBJECTIVES["dft"](PreferenceArgs())
    totals = objective.totals(ragged(1))._replace(tokens=1)
    objective(given, Batch(), totals).sum().backward()
    sure, improbable = logits.grad.abs().sum(1)
    probability = float(logits.softmax(1)[1, 0])
    assert float(improbable) == pytest.approx(2 * probability * (1 - probability), rel=1e-4)
    assert float(sure) == pytest.approx(float(improbable), rel=1e-3)


def test_a_run_reports_the_cross_entropy(tiny, tmp_path, capsys):
    """The first validation is that of sft, and the plan counts the losses of single tokens."""
    data = write_records(tmp_path / "data.jsonl", RECORDS)
    losses = {}
    for objective in ("sft", "dft"):
        folder = tmp_path / objective
        words = [
            "--checkpoint_dir",
            str(tiny),
            "--data.path",
            str(data),
            "--out_dir",
            str(folder),
        ]
        words += [
            "--objective",
            objective,
            "--train.max_steps",
            "2",
            "--data.val_fraction",
            "0.2",
        ]
        run("finetune lora", words)
        rows = list(csv.DictReader((folder / "metrics.csv").open()))
        losses[objective] = [
            (row["val_loss"], row["val_perplexity"]) for row in rows if row["val_loss"]
        ]
    assert losses["sft"][0] == losses["dft"][0] and losses["sft"][-1] != losses["dft"][-1]
    upload = UploadArgs(
        checkpoint_dir=str(tmp_path / "dft" / "final"),
        repo_id="me/mine",
        base_model="me/base",
    )
    card = model_card(card_info(resolve(upload.checkpoint_dir), upload))
    assert "with DFT ([2508.05629]" in card


def test_flags_of_other_programs():
    args = parse(LoRAFinetuneArgs, ["--checkpoint_dir", "m", "--data.path", "d"])
    assert args.objective == "sft"
    with pytest.raises(ValueError, match="--objective dft"):
        parse(LoRAFinetuneArgs, ["--checkpoint_dir", "m", "--use_dft_loss", "true"])
    words = ["--checkpoint_dir", "m", "--data.path", "d", "--objective", "dft"]
    assert not parse(LoRAFinetuneArgs, [*words, "--data.mask_prompt", "false"]).problems()
    with pytest.raises(ValueError, match=r"label_smoothing 0\.1: it does not apply"):
        parse(LoRAFinetuneArgs, [*words, "--train.label_smoothing", "0.1"])


def test_a_card_without_a_margin():
    """KTO has none where the validation examples have one label alone."""
    row = {"step": "2", "val_loss": "0.5", "val_accuracy": "0", "val_margin": ""}
    lines = list(_losses([row], "at the end", "2"))
    assert lines[-1] == "| validation accuracy, at the end | 0.0% |"
