"""Model folders in FP8, as transformers and compressed-tensors open them."""

import json

import pytest
import torch
import transformers
from conftest import script
from parity import build, draw, relative
from safetensors.torch import load_file

import litft
from litft.args import ExportArgs
from litft.commands.convert_to_hf import export
from litft.pretrained.fp8 import quantize_rows

TOKENS = draw(2, 20, seed=1)
MODELS = {
    "Llama": ("LlamaConfig", {}),
    "fused": ("Phi3Config", dict(sliding_window=None)),
    "experts": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2)),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_folders_in_fp8_are_opened_by_transformers(tmp_path, name):
    class_name, values = MODELS[name]
    folder = tmp_path / "model"
    build(class_name, folder, **values)
    flags = ExportArgs(
        checkpoint_dir=str(folder), out_dir=str(tmp_path / "fp8"), quantize="fp8"
    )
    out = export(flags)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    stored = load_file(out / "model.safetensors")
    in_fp8 = {key for key, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert in_fp8 == {
        key.removesuffix("_scale") for key in stored if key.endswith("_scale")
    }
    if name == "Conv1D":
        assert not in_fp8
    else:
        assert any("self_attn" in key for key in in_fp8)
    assert "lm_head" in settings["ignore"] and not any("expert" in key for key in in_fp8)

    # near the original, row by row
    for key, tensor in load_file(folder / "model.safetensors").items():
        if key in in_fp8:
            meant = stored[key].float() * stored[f"{key}_scale"]
            largest = tensor.abs().amax(dim=1, keepdim=True)
            assert ((meant - tensor).abs() <= largest / 16).all()
        else:
            assert torch.equal(stored[key], tensor)
    if name == "experts":
        return

    # transformers' weights are these; its activations are rounded, too, unless that is disabled
    logits = litft.load(out, precision="fp32")[0](TOKENS)
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    reference = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for module in reference.modules():
        module.quantization_enabled = False
    assert relative(logits, reference(TOKENS).logits) <= 1e-5


def test_rows_of_zeros_and_of_large_numbers():
    weight = torch.tensor([[0.0, 0.0], [1.0, -448.0], [1e-6, 1e-7], [3e4, 1.0]])
    quantized, scale = quantize_rows(weight)
    assert quantized.float().isfinite().all()
    torch.testing.assert_close(quantized.float() * scale, weight, rtol=0.07, atol=40)
    assert quantized[1, 1] == -448 and (quantized[0] == 0).all()


def test_a_model_without_linears_is_refused(tmp_path):
    """Nothing of GPT-2 would be in FP8."""
    build("GPT2Config", tmp_path / "model")
    flags = dict(checkpoint_dir=str(tmp_path / "model"), quantize="fp8")
    with pytest.raises(ValueError, match="no weight of this model can be stored in FP8"):
        export(ExportArgs(out_dir=str(tmp_path / "fp8"), **flags))
    assert not (tmp_path / "fp8").exists()


def test_scales_that_fp16_does_not_have(tmp_path):
    folder = tmp_path / "model"
    build("LlamaConfig", folder).half().save_pretrained(folder)
    flags = dict(checkpoint_dir=str(folder), quantize="fp8")
    with pytest.raises(ValueError, match="is in fp16, in which small scales would be zero"):
        export(ExportArgs(out_dir=str(tmp_path / "fp8"), **flags))
    export(ExportArgs(out_dir=str(tmp_path / "fp8"), precision="bf16", **flags))
    quantized, scale = quantize_rows(torch.tensor([[1e-5, 0.0]]).half())
    assert quantized.float().isfinite().all() and scale.item() == 1


def test_what_cannot_be_quantized(tiny, tmp_path):
    flags = ["--checkpoint_dir", tiny, "--out_dir", "out", "--quantize", "fp8"]

    def message(*more):
        return script(
            "scripts/convert_to_hf.py", *flags, *more, cwd=tmp_path, code=2
        ).stderr

    assert "leave --multimodal out" in message("--multimodal", "true")
    assert "scales in bf16 or fp32" in message("--precision", "fp16")
    assert "--merge false writes the adapter unchanged" in message("--merge", "false")
