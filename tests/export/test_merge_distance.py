"""A merge says how far its model is from the adapter on the quantized base."""

import math
import re

import pytest
import torch
from conftest import STORIES, copy_tokenizer
from method_cases import save_result
from parity import perturb

import litft
from litft.args import LoRAArgs, MergeArgs
from litft.commands.merge_lora import merge
from litft.evaluation.forgetting import neutral_samples
from litft.export import merge_distance
from litft.export.merge_distance import MergeDistance, distance
from litft.methods import LoRA
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve


@pytest.fixture
def quantized(tiny, tmp_path):
    """Return the folder of an adapter that was trained on an nf4 base."""
    source = resolve(tiny)
    method = LoRA(LoRAArgs(r=2))
    method.select_targets(source.meta_model(), source.adapter_rules)
    model = base_model(source, "fp32", quantize="nf4")
    method.attach(model)
    perturb(method.parameters(model).values())
    folder = save_result(model, method, source, tmp_path / "adapter", "nf4")
    copy_tokenizer(STORIES, folder)
    return folder


def test_distance_by_hand():
    """Two tokens, a vocabulary of two: p = (3/4, 1/4), q = (2/5, 3/5) and p = q."""
    before = torch.tensor([[0.75, 0.25], [0.4, 0.6]]).log()
    after = torch.tensor([[0.4, 0.6], [0.4, 0.6]]).log()
    first = 0.75 * math.log(0.75 / 0.4) + 0.25 * math.log(0.25 / 0.6)
    assert distance(before, after) == MergeDistance(pytest.approx(first / 2), 0.5, 2)


@torch.no_grad()
def test_the_distance_is_that_of_the_two_models(quantized, tmp_path, capsys):
    """The line's numbers are those of the folders as they are opened; with --dequantized_base both
    models are the same."""
    for name, dequantized in (("original", False), ("rounded", True)):
        out = str(tmp_path / name)
        merge(
            MergeArgs(
                checkpoint_dir=[str(quantized)], out_dir=out, dequantized_base=dequantized
            )
        )
        line = capsys.readouterr().err.splitlines()[-1]
        found = re.search(r"divergence of (\S+) nats .* after (\S+)% of 256 tokens", line)

        # the same texts, read by both folders
        trained, tokenizer = litft.load(quantized, quantize="nf4")
        merged, _ = litft.load(out)
        divergences = []
        total = 0
        for sample in neutral_samples(tokenizer, limit=256):
            ids = sample.tokens[: 256 - total][None]
            total += ids.numel()
            p = trained(ids).log_softmax(-1)
            q = merged(ids).log_softmax(-1)
            divergences.append((p.exp() * (p - q)).sum(-1).flatten())
            if total == 256:
                break
        expected = float(torch.cat(divergences).mean())
        if dequantized:
            assert abs(float(found[1])) < 1e-6 and found[2] == "100.0"
        else:
            assert float(found[1]) == pytest.approx(expected, rel=0.06) and expected > 1e-5


def test_a_model_beyond_the_memory_is_merged_but_not_compared(
    quantized, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(merge_distance, "device_memory", lambda device: 2**10)
    out = str(tmp_path / "merged")
    merge(MergeArgs(checkpoint_dir=[str(quantized)], out_dir=out))
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "not compared with the adapter on the quantized base: the weights"
    )
    assert litft.load(out)
