"""Folders of multimodal models as they are published: sizes left out, older names of tensors, and
fields side by side."""

import json

import pytest
import torch
import transformers
from parity import draw, relative
from safetensors.torch import load_file, save_file
from tiny_wrappers import MROPE, QWEN_TOWER, SPARSE, TEXT, TOWER, random_wrapper

import litft
from litft.families import read_config, text_config
from litft.families.wrappers import OF_7B, SAME_NETWORK, WRAPPERS
from litft.pretrained.folder import resolve

TOKENS = draw(2, 40, seed=1) % 90


def save_random(name, folder, text, tower=TOWER):
    """Save a model of a wrapper with random weights; return it."""
    model = random_wrapper(name, text, tower)
    model.save_pretrained(folder)
    return model


def rename_tensors(folder, rename):
    """Rename the tensors of a folder: `rename` takes a name and returns the new one."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[rename(name)] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# text_config as published folders have it -> transformers' config with its own defaults
SPARSE_FILES = {
    "llava-1.5-7b": (
        "llava",
        dict(model_type="llama", vocab_size=32064, max_position_embeddings=4096),
    ),
    "llava-v1.6-mistral-7b": (
        "llava_next",
        dict(
            model_type="mistral", vocab_size=32064, intermediate_size=14336, rope_theta=1e6
        ),
    ),
    "qwen3-vl": (
        "qwen3_vl",
        OF_7B
        | dict(model_type="qwen3_vl_text", vocab_size=151936, intermediate_size=22016)
        | dict(head_dim=128, num_key_value_heads=32),
    ),
    "qwen2-vl": ("qwen2_vl", dict(model_type="qwen2_vl_text")),
    "qwen2.5-vl": ("qwen2_5_vl", dict(model_type="qwen2_5_vl_text")),
    "smolvlm": ("smolvlm", dict(model_type="llama", head_dim=64)),
    "llava-onevision-qwen2-0.5b": (
        "llava_onevision",
        dict(
            model_type="qwen2",
            hidden_size=896,
            num_attention_heads=14,
            num_key_value_heads=2,
        ),
    ),
}


@pytest.mark.parametrize("name", SPARSE_FILES)
def test_sizes_that_are_left_out_are_those_of_transformers(name):
    model_type, text = SPARSE_FILES[name]
    kind = transformers.AutoConfig.for_model(model_type, text_config=dict(text))
    expected = kind.text_config.to_dict()
    expected.pop("layer_types", None)
    found = expected["model_type"]
    expected["model_type"] = SAME_NETWORK.get(found, found)
    ours = read_config(text_config({"model_type": model_type, "text_config": text}))
    theirs = read_config({**expected, "tie_word_embeddings": kind.tie_word_embeddings})
    assert ours == theirs
    assert (
        ours.dim == expected["hidden_size"]
        and len(ours.layers) == expected["num_hidden_layers"]
    )


def older_llava(name):
    """The names of published files: transformers renames them when it reads."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    name = name.replace("model.language_model.", "language_model.model.")
    return name.replace("model.vision_tower", "vision_tower").replace(
        "model.multi", "multi"
    )


def older_idefics(name):
    """As `older_llava`."""
    return name.replace("model.text_model.", "text_model.model.").replace(
        "lm_head", "lm_head"
    )


@pytest.mark.parametrize(
    ("name", "text", "rename"),
    [("Llava", "mistral", older_llava), ("SmolVLM", "llama", older_idefics)],
)
@torch.no_grad()
def test_older_names_of_tensors(tmp_path, name, text, rename):
    tower = TOWER | ({"model_type": "clip_vision_model"} if name == "Llava" else {})
    model = save_random(name, tmp_path, TEXT | {"model_type": text}, tower)
    rename_tensors(tmp_path, rename)
    first = "language_model.model." if name == "Llava" else "text_model.model."
    assert any(
        tensor.startswith(first) for tensor in load_file(tmp_path / "model.safetensors")
    )
    logits = litft.load(tmp_path, "fp32")[0](TOKENS)
    assert relative(logits, model(TOKENS).logits) <= 1e-5


@pytest.mark.parametrize(
    "width", [24, 32, 16], ids=["ragged", "square down", "square gate and up"]
)
@torch.no_grad()
def test_experts_of_qwen3_vl_in_both_layouts(tmp_path, width):
    """transformers tells them by their shapes when it reads, and writes only one of them."""
    text = TEXT | SPARSE | dict(rope_parameters=dict(MROPE), moe_intermediate_size=width)
    text |= dict(num_experts=4)
    model = save_random("Qwen3VLMoe", tmp_path, text, QWEN_TOWER)
    expected = model(TOKENS).logits
    assert relative(litft.load(tmp_path, "fp32")[0](TOKENS), expected) <= 1e-5
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert relative(litft.load(tmp_path, "fp32")[0](TOKENS), expected) <= 1e-5


def test_an_adapter_of_a_folder_without_text_config(tmp_path):
    """Qwen 2 and 2.5 VL are published so; transformers opens the wrapper nonetheless."""
    text = TEXT | {"rope_parameters": dict(MROPE)}
    tower = dict(depth=1, hidden_size=32, num_heads=2, embed_dim=16)
    save_random("Qwen2VL", tmp_path, text, tower)
    hf = json.loads((tmp_path / "config.json").read_text())
    flat = {**hf.pop("text_config"), **hf}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    source = resolve(tmp_path)
    assert source.multimodal == flat
    assert source.adapter_names.of("model.layers.0") == "model.language_model.layers.0"


@pytest.mark.parametrize("model_type", ["mamba", ["llama"], {}, 3])
def test_an_unknown_language_model_is_named(model_type):
    hf = {"model_type": "llava", "text_config": {"model_type": model_type}}
    with pytest.raises(ValueError, match="in text_config is not supported; supported: "):
        text_config(hf)


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_ties_are_as_in_transformers_where_no_file_says_so(model_type):
    # the hyphen is of early files
    kind = transformers.AutoConfig.for_model(model_type.replace("-", "_"))
    text = {"num_hidden_layers": 2}
    tied = text_config({"model_type": model_type, "text_config": text})[
        "tie_word_embeddings"
    ]
    # where a class has no such field, its text has no ties
    assert tied == getattr(kind, "tie_word_embeddings", False)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_ties_of_a_class_with_a_whole_language_model(outer, inner):
    """Nemotron 3 Omni contains the language model with its head; published files call its fields
    llm_config."""
    hf = {
        "model_type": "nemotron_h_omni",
        "tie_word_embeddings": outer,
        "llm_config": {"tie_word_embeddings": inner, "hidden_size": 64},
    }
    text = text_config(hf)
    assert text["tie_word_embeddings"] == inner
    assert text["model_type"] == "nemotron_h" and text["hidden_size"] == 64
