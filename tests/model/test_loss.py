"""The chunked loss against the plain one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from litft.model import loss as loss_module
from litft.model.loss import IGNORED, summed_cross_entropy


def plain(hidden, head, targets, softcap=None, smoothing=0.0):
    """The whole batch's logits at once."""
    logits = head(hidden).float().flatten(0, 1)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)


@pytest.fixture
def batch(monkeypatch):
    """Hidden states and targets of which a third is ignored, cut into many chunks."""
    monkeypatch.setattr(loss_module, "CHUNK", 7)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 17, 12, generator=generator)
    targets = torch.randint(50, (3, 17), generator=generator)
    return hidden, targets.masked_fill(torch.rand(3, 17, generator=generator) < 0.33, IGNORED)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradients_are_the_plain_ones(batch, bias, frozen, softcap, smoothing):
    hidden, targets = batch
    head = nn.Linear(12, 50, bias=bias).requires_grad_(not frozen)
    results = []
    for function in (lambda *args: summed_cross_entropy(*args)[0], plain):
        x = hidden.clone().requires_grad_()
        head.zero_grad()
        value = function(x, head, targets, softcap, smoothing)
        (value * 0.37).backward()
        results.append([value, x.grad, *(p.grad for p in head.parameters())])
    assert all((a is None) == (b is None) for a, b in zip(*results, strict=True))
    for found, expected in zip(*results, strict=True):
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_frozen_head_gets_no_gradient_buffer(batch):
    hidden, targets = batch
    head = nn.Linear(12, 50, bias=False).requires_grad_(False)
    value, _ = summed_cross_entropy(hidden.requires_grad_(), head, targets)
    shapes = [tuple(t.shape) for t in value.grad_fn.saved_tensors if t is not None]
    assert shapes == [(int((targets != IGNORED).sum()), 12)]


def test_counts_what_is_supervised(batch):
    hidden, targets = batch
    _, count = summed_cross_entropy(hidden, nn.Linear(12, 50), targets)
    assert count == (targets != IGNORED).sum()


def test_no_target_at_all_is_zero_with_zero_gradients():
    hidden = torch.randn(1, 4, 12, requires_grad=True)
    value, count = summed_cross_entropy(hidden, nn.Linear(12, 50), torch.full((1, 4), IGNORED))
    value.backward()
    assert value == 0 and count == 0 and torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_bf16_accumulates_in_fp32(monkeypatch):
    """The sum of 4,000 losses of about 7 would stop growing at 2,048 in bf16 steps of 16."""
    monkeypatch.setattr(loss_module, "CHUNK", 8)
    hidden, targets = torch.randn(1, 4000, 16).bfloat16(), torch.randint(1000, (1, 4000))
    head = nn.Linear(16, 1000, bias=False).bfloat16().requires_grad_(False)
    value, _ = summed_cross_entropy(hidden, head, targets)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(float(plain(hidden, head, targets)), rel=1e-5)


def test_gradients_pass_a_finite_difference(batch):
    hidden, targets = batch
    torch.manual_seed(1)  # of a direction in which the loss hardly changes, its rounding would be all that is left
    head = nn.Linear(12, 50, bias=True)
    x = hidden.clone().requires_grad_()
    summed_cross_entropy(x, head, targets)[0].backward()
    direction = torch.randn_like(hidden)
    with torch.no_grad():
        up, down = (summed_cross_entropy(hidden + e * direction, head, targets)[0].double() for e in (1e-2, -1e-2))
    assert float((x.grad * direction).sum()) == pytest.approx(float(up - down) / 2e-2, rel=2e-3)
