"""Recurrent mixers: the recurrence in chunks equals a loop over tokens in fp64, and documents do
not affect each other."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch.nn.functional import softplus

from litft.families import read_config
from litft.model.config import DeltaNetConfig, Mamba2Config, ShortConvConfig
from litft.model.device_type import planned_for
from litft.model.linear import Linear
from litft.model.mixers import kernels, make_mixer
from litft.model.mixers.mixer import CausalConv, GatedNorm, causal_conv
from litft.model.mixers.recurrence import recurrence, recurrence_operator
from litft.model.packed_sequences import PackedSequences

B, T, H, K, V = 2, 150, 3, 6, 5  # more than two chunks


def loop(q, k, v, g, b, documents, state):
    """The recurrence of the module's docstring, token by token in fp64."""
    ids = documents.ids if documents else None
    q, k, v, g = (x.double() for x in (q, k, v, g))
    state = torch.zeros(B, H, K, V).double() if state is None else state.double()
    outputs = []
    for t in range(v.size(1)):
        if ids is not None and t:
            state = state * (ids[:, t] == ids[:, t - 1])[:, None, None, None]
        state = (
            state * (g[:, t, :, None, None] if g.dim() == 3 else g[:, t, :, :, None]).exp()
        )
        value = v[:, t]
        if b is not None:
            value = (value - (k[:, t, :, None] @ state).squeeze(-2)) * b[
                :, t, :, None
            ].double()
        state = state + k[:, t, :, :, None] * value[:, :, None]
        outputs.append((q[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, 1), None if documents else state


def inputs(by_row, delta):
    """Return q, k, v, g and b; keys have length 1, as the delta rule needs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g, b = (
        torch.randn(*shape, generator=generator)
        for shape in (
            (B, T, H, K),
            (B, T, H, K),
            (B, T, H, V),
            (B, T, H, K) if by_row else (B, T, H),
            (B, T, H),
        )
    )
    g = -softplus(g) / 20  # small decays, so that a token far back still counts
    return q, k / k.norm(dim=-1, keepdim=True), v, g, b.sigmoid() if delta else None


def documents():
    """Return documents that end within a chunk, at its end, and after one token."""
    return PackedSequences.of(
        torch.tensor([[0] * 64 + [1] * 20 + [2] + [3] * 65, [4] * 150])
    )


@pytest.mark.parametrize("by_row", [False, True], ids=["one decay", "a decay for each row"])
def test_strong_decays_of_packed_documents_have_finite_gradients(by_row):
    """The decay from a token of an earlier document to the end of the chunk would overflow."""
    q, k, v, g, b = (x.detach() for x in inputs(by_row, True))
    leaves = [x.requires_grad_() for x in (q, k, v, torch.full_like(g, -8.0), b)]
    # a long document, and few tokens of the next one in its chunk
    ids = torch.tensor([[0] * 50 + [1] * 100]).expand(B, -1)
    y, _ = recurrence(*leaves, PackedSequences.of(ids), None)
    assert all(
        gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), leaves)
    )


@pytest.mark.parametrize("by_row", [False, True], ids=["one decay", "a decay for each row"])
@pytest.mark.parametrize("delta", [False, True], ids=["linear attention", "delta rule"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_chunks_equal_a_loop_over_tokens(by_row, delta, packed):
    packing = documents() if packed else None
    results = []
    for compute in (loop, recurrence):
        leaves = [
            None if x is None else x.detach().requires_grad_()
            for x in inputs(by_row, delta)
        ]
        y, state = compute(*leaves, packing, None)
        weighted = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + (
            0 if packed else state.sum() / 7
        )
        results.append(
            (
                y,
                *torch.autograd.grad(weighted, [x for x in leaves if x is not None]),
                *([] if packed else [state]),
            )
        )
    torch.testing.assert_close(
        *([x.double() for x in result] for result in results), atol=2e-5, rtol=2e-5
    )
    with torch.no_grad():
        y, state = recurrence_operator(*inputs(by_row, delta), [*(packing or [])][:3], None)
    assert torch.equal(y, results[1][0])
    assert state.numel() == 0 if packed else torch.equal(state, results[1][-1])


@pytest.mark.parametrize("by_row", [False, True], ids=["one decay", "a decay for each row"])
@pytest.mark.parametrize("delta", [False, True], ids=["linear attention", "delta rule"])
def test_pieces_equal_the_whole(by_row, delta):
    """In pieces of any length, single tokens among them, with the state between them."""
    whole, expected_state = loop(*inputs(by_row, delta), None, None)
    parts = zip(
        *(
            [None] * 4 if x is None else x.split([70, 1, 1, 78], 1)
            for x in inputs(by_row, delta)
        ),
        strict=True,
    )
    state, outputs = torch.zeros(B, H, K, V), []
    for part in parts:
        y, state = recurrence(*part, None, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1).double(), whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state.double(), expected_state, atol=2e-5, rtol=2e-5)


def test_convolution_equals_torchs_and_stays_within_documents():
    conv, x, ids = (
        CausalConv(4, 3, bias=True),
        torch.randn(2, 20, 4),
        torch.tensor([[0] * 9 + [1] * 11, [2] * 20]),
    )
    torch.nn.init.normal_(conv.weight)
    torch.nn.init.normal_(conv.bias)

    def reference(x):
        padded = torch.nn.functional.pad(x.mT, (2, 0))
        return torch.nn.functional.conv1d(
            padded, conv.weight[:, None], conv.bias, groups=4
        ).mT

    torch.testing.assert_close(
        causal_conv(x, conv.weight, conv.bias, None, None), reference(x)
    )
    packed = causal_conv(x, conv.weight, conv.bias, PackedSequences.of(ids), None)
    torch.testing.assert_close(packed[0, 9:], reference(x[:1, 9:])[0])
    torch.testing.assert_close(packed[1], reference(x[1:])[0])


def test_a_convolution_in_bf16_is_rounded_once():
    """As torch's: its sum of four products is in fp32."""
    torch.manual_seed(0)
    x = torch.randn(2, 64, 16)
    weight = torch.randn(16, 4)
    bias = torch.randn(16)
    exact = causal_conv(x.bfloat16().float(), weight.bfloat16().float(), bias, None, None)
    found = causal_conv(x.bfloat16(), weight.bfloat16(), bias, None, None)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize(
    "mixer",
    [
        DeltaNetConfig(4, 2, 8, 8, 4, 1e-6),
        DeltaNetConfig(4, 4, 8, 8, 4, 1e-6, row_decay=True),
        Mamba2Config(4, 8, 2, 8, 4, 1e-6),
        ShortConvConfig(16, 3, bias=True),
    ],
    ids=["delta net", "KDA", "Mamba-2", "short convolution"],
)
def test_mixers_save_only_their_inputs(mixer):
    """Between its Linears, a mixer keeps nothing for the backward pass, which computes it again."""
    llama = dict(
        model_type="llama",
        vocab_size=8,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
    )
    config = read_config(llama | dict(num_attention_heads=2, max_position_embeddings=8))
    module = make_mixer(config, config.layers[0].with_mixer(mixer))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    known, saved = [*module.parameters()], []
    for part in module.modules():
        if isinstance(part, (Linear, GatedNorm)):
            part.register_forward_hook(
                lambda _, inputs, output: known.extend((*inputs, output))
            )
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x) or x, lambda x: x
    ):
        y = module(torch.randn(1, 130, 16, requires_grad=True), None, None)
    assert y.requires_grad
    storages = {x.untyped_storage().data_ptr() for x in known}
    assert saved
    assert all(x.untyped_storage().data_ptr() in storages for x in saved)


def test_kernels_equal_the_plain_forms():
    """Those of flash-linear-attention, in Triton's interpreter, with gradients: packed, and in
    pieces with a state."""
    pytest.importorskip("fla", reason="tutorials/families.md says how to install it")
    pytest.importorskip("triton", reason="tutorials/families.md says how to install it")
    script = [sys.executable, ROOT / "tests" / "triton_on_cpu.py"]
    done = subprocess.run(
        script,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert len(rows) == 16
    assert not [row for row in rows if float(row[0]) > 2e-6]


def test_missing_kernels_are_named(monkeypatch):
    """On a GPU, for a network that would use them, if they are not installed."""
    llama = dict(
        model_type="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
    )
    llama |= dict(num_attention_heads=2, max_position_embeddings=8)
    lfm2 = llama | dict(
        model_type="lfm2", layer_types=["conv", "full_attention"], num_key_value_heads=2
    )
    monkeypatch.setattr(kernels, "are_installed", lambda: False)
    notes = {
        kernels.note(read_config(config), device)
        for config in (llama, lfm2)
        for device in ("cpu", "cuda")
    }
    assert notes - {None} == {kernels.note(read_config(lfm2), "cuda")}
    assert "pip install 'litft[kernels]'" in kernels.note(read_config(lfm2), "cuda")
    monkeypatch.setattr(kernels, "are_installed", lambda: True)
    assert kernels.note(read_config(lfm2), "cuda") is None


def test_kernels_with_wrong_gradients_only_infer(monkeypatch):
    """On Hopper GPUs, flash-linear-attention refuses to train with some versions of Triton."""
    monkeypatch.setattr(kernels, "are_installed", lambda: True)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    triton = {}
    for installed in ("3.3.1", "3.6.0", "3.7.0+git1", "3.7.1"):
        monkeypatch.setattr(kernels, "version", lambda name, text=installed: text)
        kernels.triton_without_backward.cache_clear()
        triton[installed] = kernels.triton_without_backward() is None
    assert list(triton.values()) == [True, False, False, True]
    monkeypatch.setattr(kernels, "triton_without_backward", lambda: "3.6.0")
    frozen = torch.zeros(2, dtype=torch.bfloat16)
    trained = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    with planned_for("cuda"):
        assert kernels.can_run_recurrence(frozen, frozen)
        assert not kernels.can_run_recurrence(frozen, trained)
        with torch.no_grad():
            assert kernels.can_run_recurrence(frozen, trained)


def test_kernels_run_on_a_gpu_in_bf16(monkeypatch):
    """Not in fp32, which they round, on a CPU, or where equal runs must be equal to the bit."""
    monkeypatch.setattr(kernels, "are_installed", lambda: True)
    half, single = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    assert not kernels.can_run(half)
    with planned_for("cuda"):
        assert kernels.can_run(half) and kernels.can_run(single, half)
        assert not kernels.can_run(single)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not kernels.can_run(half)
