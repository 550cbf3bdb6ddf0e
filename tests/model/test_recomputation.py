"""Outputs of norms and gates are computed again instead of saved, and only where that is right."""

import pytest
import torch

from litft.model.recomputation import recomputable, saving_recomputations


def saved_calls(change: bool):
    """Return how often a function ran in a forward and a backward pass over two products that save
    its output and a view of it, and the gradients. change: the output is changed in between."""
    calls = []

    def sine(x):
        calls.append(len(x))
        return x.sin()

    x = torch.arange(6.0).view(2, 3).requires_grad_()
    weights = torch.ones(3, 3, requires_grad=True)
    with saving_recomputations():
        y = recomputable(sine, x)
        if change:
            y = y.mul_(2)
        total = (y @ weights).sum() + (y[1:] @ weights).sum()
    total.backward()
    return len(calls), x.grad, weights.grad


def expected_gradients(factor):
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    weights = torch.ones(3, 3, requires_grad=True)
    y = x.sin() * factor
    ((y @ weights).sum() + (y[1:] @ weights).sum()).backward()
    return x.grad, weights.grad


@pytest.mark.parametrize("change, factor, calls", [(False, 1, 2), (True, 2, 1)])
def test_an_output_is_computed_again_once_and_only_if_it_is_unchanged(
    change, factor, calls
):
    count, *grads = saved_calls(change)
    assert count == calls
    for actual, expected in zip(grads, expected_gradients(factor), strict=True):
        assert torch.equal(actual, expected)


def test_a_small_input_is_copied():
    """FSDP frees the weight of a norm before the products after the norm ask for its output."""
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    scale = torch.tensor([1.0, 2.0, 3.0])
    weights = torch.ones(3, 3, requires_grad=True)
    with saving_recomputations():
        y = recomputable(lambda x, scale: x.sin() * scale, x, copied=(scale,)) @ weights
    expected = (x.sin() * scale).T @ torch.ones(2, 3)
    scale.zero_()
    (gradient,) = torch.autograd.grad(y.sum(), weights)
    torch.testing.assert_close(gradient, expected)


def test_nothing_is_remembered_outside_of_a_block_or_without_a_gradient():
    """Without a gradient, nothing else saves the inputs, so recomputing would keep more."""
    x = torch.ones(2, 2)
    weights = torch.ones(2, 2, requires_grad=True)
    calls = []

    def ones(x):
        calls.append(x)
        return x.exp()

    with saving_recomputations():
        y = recomputable(ones, x) @ weights
    y.sum().backward()
    (recomputable(ones, x.requires_grad_()) @ weights).sum().backward()
    assert len(calls) == 2
