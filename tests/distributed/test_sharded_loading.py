"""Frozen networks whose weights are sharded over processes: the teacher of a sharded student."""

import pytest
import sharded_logits
import torch
from conftest import adapted

from litft.args import AdapterArgs, AdapterV2Args, LoRAArgs
from litft.methods import Adapter, AdapterV2, LoRA
from litft.pretrained.folder import resolve
from litft.pretrained.load import load_network

METHODS = {
    "lora": lambda: LoRA(LoRAArgs(r=3, targets=["all-linear"])),
    "dora": lambda: LoRA(LoRAArgs(r=4, dora=True)),
    "full modules": lambda: LoRA(LoRAArgs(r=4, modules_to_save=["lm_head", "norm"])),
    "adapter": lambda: Adapter(AdapterArgs(start_layer=0)),
    "adapter_v2": lambda: AdapterV2(AdapterV2Args()),
}


@pytest.mark.slow
def test_a_sharded_network_has_the_logits_of_the_whole_one(tiny, tmp_path):
    """The base and adapters of every method, quantized too; each process holds about half."""
    tokens = torch.randint(0, 400, (2, 9), generator=torch.Generator().manual_seed(0))
    folders = {"base": tiny}
    for name, method in METHODS.items():
        folders[name] = adapted(tiny, tmp_path / name, method(), scale=0.1)
    cases = []
    for folder in folders.values():
        for quantize in ("none", "nf4"):
            cases.append(
                {"folder": str(folder), "tokens": tokens.tolist(), "quantize": quantize}
            )
    results = sharded_logits.logits(cases, tmp_path / "out")
    for case, result in zip(cases, results, strict=True):
        model = load_network(resolve(case["folder"]), "fp32", "cpu", case["quantize"])
        with torch.no_grad():
            expected = model(tokens)
        torch.testing.assert_close(result["logits"], expected, rtol=1e-4, atol=1e-5)
        assert result["share"] == pytest.approx(0.5, abs=0.02)
