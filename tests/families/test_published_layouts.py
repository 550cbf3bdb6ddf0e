"""Tensors that published files have and transformers does not write: layers for multi-token
prediction, and stacked experts."""

import pytest
import torch
import transformers
from parity import ROWS, draw, relative, tolerance
from safetensors.torch import load_file, save_file
from tiny_wrappers import LINEAR, QWEN_TOWER, SPARSE, TEXT, random_wrapper

import litft
from litft.args.export import ExportArgs
from litft.checkpoints.weight_files import Checkpoint
from litft.commands.convert_to_hf import export

TOKENS = draw(2, 20, seed=2)


def with_tensors(folder, out, change):
    """Write a copy of a folder whose tensors `change` has added to or replaced."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())


def first_variation(make_model, name):
    """Return a model of a family, and its folder."""
    class_name, variations = ROWS[name]
    values = next(iter(variations.values()))
    return make_model(getattr(transformers, class_name), **values)


# the prefix of names in folders that transformers writes, and that published ones lack
PREFIXES = {
    "gpt2": "transformer.",
    "openai-gpt": "transformer.",
    "bloom": "transformer.",
    "opt": "model.",
}


@pytest.mark.parametrize("name", PREFIXES)
@torch.no_grad()
def test_names_may_lack_the_prefix_of_the_class_with_a_head(make_model, tmp_path, name):
    reference, folder = first_variation(make_model, name)

    def shorten(tensors):
        for tensor_name in list(tensors):
            tensors[tensor_name.removeprefix(PREFIXES[name])] = tensors.pop(tensor_name)

    with_tensors(folder, tmp_path, shorten)
    model, _ = litft.load(tmp_path, "fp32")
    expected = reference(TOKENS).logits
    assert relative(model(TOKENS), expected) <= tolerance(model.config)


@pytest.mark.parametrize("padding", [1, 2, 5, None])
@torch.no_grad()
def test_the_table_of_xglm_is_0_at_its_padding_token(make_model, padding):
    _, variations = ROWS["xglm"]
    values = next(iter(variations.values())) | {"pad_token_id": padding}
    reference, folder = make_model(transformers.XGLMConfig, **values)
    model, _ = litft.load(folder, "fp32")
    expected = reference(TOKENS).logits
    assert relative(model(TOKENS), expected) <= tolerance(model.config)


# families whose layers for multi-token prediction follow the others
NUMBERED = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "solar_open",
    "exaone_moe",
    "mellum",
)


@pytest.mark.parametrize("name", NUMBERED)
@torch.no_grad()
def test_a_further_layer_for_multi_token_prediction_is_ignored(make_model, tmp_path, name):
    """As in DeepSeek V3, whose layer 61 is a whole layer with four more tensors."""
    reference, folder = first_variation(make_model, name)
    count = reference.config.num_hidden_layers

    def add_layer(tensors):
        last = f"model.layers.{count - 1}."
        for tensor_name in [key for key in tensors if key.startswith(last)]:
            copied = tensor_name.replace(last, f"model.layers.{count}.")
            tensors[copied] = tensors[tensor_name].clone()
        for extra in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head"):
            tensors[f"model.layers.{count}.{extra}.weight"] = torch.ones(32)

    with_tensors(folder, tmp_path, add_layer)
    logits = litft.load(tmp_path, "fp32")[0](TOKENS)
    assert relative(logits, reference(TOKENS).logits) <= 1e-5


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("exaone4", "mtp.layers.0.self_attn.q_proj.weight"),
        ("exaone_moe", "mtp.norm.weight"),
        ("mellum", "mtp.fc.weight"),
        ("nemotron_h", "mtp.layers.0.norm.weight"),
        ("qwen3_5_text", "mtp.fc.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.input_layernorm.weight"),
    ],
)
@torch.no_grad()
def test_named_layers_for_multi_token_prediction_are_ignored(
    make_model, tmp_path, name, extra
):
    reference, folder = first_variation(make_model, name)
    with_tensors(folder, tmp_path, lambda tensors: tensors.update({extra: torch.ones(32)}))
    logits = litft.load(tmp_path, "fp32")[0](TOKENS)
    assert relative(logits, reference(TOKENS).logits) <= tolerance(
        litft.load(folder)[0].config
    )


@torch.no_grad()
def test_stacked_experts_of_qwen3_5_are_read_and_written_back(tmp_path):
    """Published so; transformers 5 writes one tensor for each expert."""
    experts = SPARSE | dict(num_experts=4, shared_expert_intermediate_size=20)
    text = TEXT | LINEAR | experts | dict(num_hidden_layers=4)
    model = random_wrapper("Qwen3_5Moe", text, QWEN_TOWER)
    source = tmp_path / "source"
    model.save_pretrained(source)
    published = tmp_path / "published"
    published.mkdir()

    def stack(tensors):
        for layer in range(4):
            prefix = f"model.language_model.layers.{layer}.mlp.experts."
            if f"{prefix}0.gate_proj.weight" not in tensors:
                continue
            fused = []
            downs = []
            for expert in range(4):
                gate = tensors.pop(f"{prefix}{expert}.gate_proj.weight")
                up = tensors.pop(f"{prefix}{expert}.up_proj.weight")
                fused.append(torch.cat((gate, up)))
                downs.append(tensors.pop(f"{prefix}{expert}.down_proj.weight"))
            tensors[f"{prefix}gate_up_proj"] = torch.stack(fused)
            tensors[f"{prefix}down_proj"] = torch.stack(downs)

    with_tensors(source, published, stack)
    expected = model(TOKENS).logits
    for folder in (source, published):
        assert relative(litft.load(folder, "fp32")[0](TOKENS), expected) <= 3e-5
        out = tmp_path / f"{folder.name}-whole"
        export(ExportArgs(checkpoint_dir=str(folder), out_dir=str(out), multimodal=True))
        before = Checkpoint(folder)
        after = Checkpoint(out)
        assert set(before.names) == set(after.names)
        for name in before.names:
            assert torch.equal(before.read(name), after.read(name))
