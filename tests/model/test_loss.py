"""The chunked loss against the unchunked loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from litft.model import loss as loss_module
from litft.model.loss import IGNORED, summed_cross_entropy, token_cross_entropy


def unchunked_loss(hidden, head, targets, softcap=None, smoothing=0.0):
    """Compute the loss from the logits of the whole batch at once."""
    logits = head(hidden).float().flatten(0, 1)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(
        logits,
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )


@pytest.fixture
def batch(monkeypatch):
    """Hidden states, and targets of which a third is ignored, split into many chunks."""
    monkeypatch.setattr(loss_module, "LOGIT_ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 17, 12, generator=generator)
    targets = torch.randint(50, (3, 17), generator=generator)
    return hidden, targets.masked_fill(
        torch.rand(3, 17, generator=generator) < 0.33, IGNORED
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradients_equal_the_unchunked_ones(
    batch, bias, frozen, softcap, smoothing
):
    hidden, targets = batch
    head = nn.Linear(12, 50, bias=bias).requires_grad_(not frozen)
    results = []
    for function in (lambda *args: summed_cross_entropy(*args)[0], unchunked_loss):
        hidden_states = hidden.clone().requires_grad_()
        head.zero_grad()
        value = function(hidden_states, head, targets, softcap, smoothing)
        (value * 0.37).backward()
        results.append([value, hidden_states.grad, *(p.grad for p in head.parameters())])
    assert all((a is None) == (b is None) for a, b in zip(*results, strict=True))
    for actual, expected in zip(*results, strict=True):
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


class Doubled(nn.Linear):
    """A head that computes its own logits."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [nn.Linear, Doubled])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_token_losses_and_their_gradients_equal_the_unchunked_ones(
    batch, kind, frozen, softcap
):
    """Each token's loss has another weight, which is only known after all losses are."""
    hidden, targets = batch
    torch.manual_seed(0)
    head = kind(12, 50).requires_grad_(not frozen)
    weights = torch.linspace(-1, 2, int((targets != IGNORED).sum()))
    results = []
    for chunked in (True, False):
        hidden_states = hidden.clone().requires_grad_()
        head.zero_grad()
        if chunked:
            losses = token_cross_entropy(hidden_states, head, targets, softcap)
        else:
            logits = loss_module.apply_softcap(head(hidden_states), softcap)[
                targets != IGNORED
            ]
            losses = nn.functional.cross_entropy(
                logits, targets[targets != IGNORED], reduction="none"
            )
        (losses * weights).sum().pow(2).backward()
        results.append([losses, hidden_states.grad, *(p.grad for p in head.parameters())])
    for actual, expected in zip(*results, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:  # gradients of about 1,000 have larger rounding errors
            largest = expected.abs().max()
            torch.testing.assert_close(
                actual / largest, expected / largest, rtol=1e-5, atol=2e-6
            )


def test_token_losses_of_a_frozen_head_keep_one_tensor(batch):
    hidden, targets = batch
    head, hidden = nn.Linear(12, 50).requires_grad_(False), hidden.requires_grad_()
    saved = token_cross_entropy(hidden, head, targets).grad_fn.saved_tensors
    assert [tuple(tensor.shape) for tensor in saved] == [
        (int((targets != IGNORED).sum()), 12)
    ]
    losses = token_cross_entropy(hidden, head, torch.full_like(targets, IGNORED))
    losses.sum().backward()
    assert losses.shape == (0,) and torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_fused_form_equals_the_one_in_place(softcap, smoothing):
    """Values, and the gradient that replaces the logits."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = (
        torch.randn(9, 50, generator=generator) * 3,
        torch.randint(50, (9,), generator=generator),
    )
    results = []
    for function in (loss_module.fused_softmax_loss, loss_module._softmax_loss):
        gradient = logits.clone()
        results.append((function(gradient, targets, softcap, smoothing, True), gradient))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_a_frozen_head_gets_no_gradient_buffer(batch):
    hidden, targets = batch
    head = nn.Linear(12, 50, bias=False).requires_grad_(False)
    value, _ = summed_cross_entropy(hidden.requires_grad_(), head, targets)
    shapes = [tuple(t.shape) for t in value.grad_fn.saved_tensors if t is not None]
    assert shapes == [(int((targets != IGNORED).sum()), 12)]


def test_supervised_tokens_are_counted(batch):
    hidden, targets = batch
    _, count = summed_cross_entropy(hidden, nn.Linear(12, 50), targets)
    assert count == (targets != IGNORED).sum()


def test_without_targets_loss_and_gradients_are_zero():
    hidden = torch.randn(1, 4, 12, requires_grad=True)
    value, count = summed_cross_entropy(
        hidden, nn.Linear(12, 50), torch.full((1, 4), IGNORED)
    )
    value.backward()
    assert value == 0 and count == 0 and torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_bf16_accumulates_in_fp32(monkeypatch):
    """In bf16, a sum of 4,000 losses of about 7 stops growing at 2,048, where its resolution is
    16."""
    monkeypatch.setattr(loss_module, "LOGIT_ROWS", 8)
    hidden, targets = torch.randn(1, 4000, 16).bfloat16(), torch.randint(1000, (1, 4000))
    head = nn.Linear(16, 1000, bias=False).bfloat16().requires_grad_(False)
    value, _ = summed_cross_entropy(hidden, head, targets)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(
        float(unchunked_loss(hidden, head, targets)), rel=1e-5
    )


def test_gradients_equal_finite_differences(batch):
    hidden, targets = batch
    torch.manual_seed(1)  # in a direction of almost constant loss, rounding would dominate
    head = nn.Linear(12, 50, bias=True)
    hidden_states = hidden.clone().requires_grad_()
    summed_cross_entropy(hidden_states, head, targets)[0].backward()
    direction = torch.randn_like(hidden)
    with torch.no_grad():
        above, below = (
            summed_cross_entropy(hidden + epsilon * direction, head, targets)[0].double()
            for epsilon in (1e-2, -1e-2)
        )
    assert float((hidden_states.grad * direction).sum()) == pytest.approx(
        float(above - below) / 2e-2, rel=2e-3
    )
