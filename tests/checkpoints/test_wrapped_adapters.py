"""Adapters of multimodal bases have the names that the class has which opens the folder, and apply
in it."""

import json
import shutil

import pytest
import torch
import transformers
from parity import draw, relative

import litft
from litft.args import LoRAArgs
from litft.checkpoints.adapter_reader import ADAPTER_CONFIG, read_tensors
from litft.methods import LoRA
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve

TEXT = dict(
    vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4
)
TEXT |= dict(num_key_value_heads=2, head_dim=8, pad_token_id=0)
TOWER = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    patch_size=14,
    image_size=28,
)
EXPERTS = dict(intermediate_size_mlp=40, num_local_experts=4)
LLAMA4_TOWER = TOWER | dict(
    intermediate_size=64,
    vision_output_dim=16,
    projector_input_dim=16,
    projector_output_dim=16,
    pixel_shuffle_ratio=0.5,
)
LINEAR = dict(
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
QWEN_TOWER = dict(
    depth=1, hidden_size=16, num_heads=2, out_hidden_size=32, num_position_embeddings=16
)
MROPE = dict(rope_type="default", rope_theta=1e6, mrope_section=[1, 1, 2])
PER_LAYER = dict(global_head_dim=12, hidden_size_per_layer_input=10, vocab_size_per_layer_input=96)
# class of the wrapper -> (text_config, vision_config, other values)
WRAPPERS = {
    "Gemma3": (
        TEXT | dict(sliding_window=6),
        TOWER,
        dict(mm_tokens_per_image=4, image_token_id=90),
    ),
    "Gemma4": (TEXT | PER_LAYER, TOWER, {}),
    "Gemma4Unified": (TEXT | dict(global_head_dim=12), {}, {}),
    "Mistral3": (TEXT | dict(model_type="mistral"), TOWER, dict(tie_word_embeddings=False)),
    "Llama4": (TEXT | EXPERTS, LLAMA4_TOWER, {}),
    "Qwen2_5_VL": (
        TEXT | dict(rope_parameters=MROPE),
        dict(depth=1, hidden_size=16, num_heads=2, out_hidden_size=32, intermediate_size=24),
        dict(tie_word_embeddings=False),
    ),
    "Qwen3VL": (TEXT | dict(rope_parameters=MROPE), QWEN_TOWER, {}),
    "Qwen3_5": (TEXT | LINEAR | dict(num_hidden_layers=4), QWEN_TOWER, {}),
}


@torch.no_grad()
def perturb(parameters):
    """Change parameters a little: these networks are sensitive."""
    for parameter in parameters:
        parameter.add_(0.05 * torch.randn(parameter.shape))


TOKENS = draw(2, 23, seed=8) % 90
LANGUAGE_MODELS = {"Llama4": "language_model"}  # whose wrapper needs an image


@pytest.fixture(scope="module", params=WRAPPERS)
def wrapper(request, tmp_path_factory):
    """The name of a wrapper, and the folder of a random model of it."""
    text, vision, values = WRAPPERS[request.param]
    config_class, model_class = (
        getattr(transformers, f"{request.param}{end}")
        for end in ("Config", "ForConditionalGeneration")
    )
    torch.manual_seed(0)
    model = model_class(config_class(text_config=text, vision_config=vision, **values)).eval()
    perturb(model.parameters())
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, folder


def write_random_adapter(folder, out, tokens=0, text_names=False, **flags):
    """Write an adapter with random values; return litft's model and the source."""
    source = resolve(folder)
    if text_names:
        import dataclasses

        source = dataclasses.replace(source, text_names=True)
    model, method = base_model(source), LoRA(LoRAArgs(**{"r": 3, "alpha": 5, **flags}))
    method.select_targets(model, source.adapter_rules)
    method.tokens = {96 + number: [number] for number in range(tokens)}
    method.attach(model)
    perturb(method.parameters(model).values())
    out.mkdir(exist_ok=True)
    method.write(out, source, method.values(model), {"base_model_name_or_path": str(folder)})
    return model, source


def peft_logits(name, folder, adapter, kind, tokens=0):
    """Return the logits in PEFT, in the class `kind` of transformers."""
    from peft import PeftModel

    base = kind.from_pretrained(folder, dtype=torch.float32)
    if tokens:
        base.resize_token_embeddings(96 + tokens, mean_resizing=False)
    model = PeftModel.from_pretrained(base, adapter).eval().get_base_model()
    part = LANGUAGE_MODELS.get(name) if hasattr(model, "language_model") else None
    return (getattr(model, part) if part else model)(TOKENS).logits


KINDS = {
    "lora": {},
    "rslora": dict(rslora=True, rank_pattern=["*.1.*=2"]),
    "dora": dict(dora=True),
    "embeddings": dict(targets=["q_proj", "embed_tokens"]),
    "a trained head": dict(targets=["v_proj"], modules_to_save=["lm_head"]),
    "new tokens": dict(tokens=2),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
@pytest.mark.halved
def test_the_wrapper_applies_what_we_wrote(wrapper, tmp_path, kind):
    name, folder = wrapper
    flags = dict(KINDS[kind])
    if name == "Llama4" and kind == "dora":
        flags["targets"] = ["q_proj", "o_proj"]  # PEFT has no DoRA of stacked experts
    model, _ = write_random_adapter(folder, tmp_path / "adapter", **flags)
    expected = model(TOKENS)
    assert relative(expected[..., :96], litft.load(folder)[0](TOKENS)) > 1e-2
    tokens = flags.get("tokens", 0)
    logits = peft_logits(
        name, folder, tmp_path / "adapter", transformers.AutoModelForImageTextToText, tokens
    )
    assert relative(logits, expected) <= 1e-5
    assert relative(litft.load(tmp_path / "adapter", base_dir=folder)[0](TOKENS), expected) <= 1e-5
    if name == "Gemma3":  # AutoModelForCausalLM opens the wrapper too
        logits = peft_logits(
            name, folder, tmp_path / "adapter", transformers.AutoModelForCausalLM, tokens
        )
        assert relative(logits, expected) <= 1e-5


@torch.no_grad()
def test_an_adapter_for_the_text_class(wrapper, tmp_path):
    """Names of the text model alone apply where transformers has a class for it."""
    name, folder = wrapper
    model, _ = write_random_adapter(folder, tmp_path / "adapter", text_names=True)
    expected = model(TOKENS)
    assert not any("language_model" in key for key in read_tensors(tmp_path / "adapter"))
    assert relative(litft.load(tmp_path / "adapter", base_dir=folder)[0](TOKENS), expected) <= 1e-5
    source = resolve(folder)
    if name not in ("Llama4", "Qwen3_5"):
        # transformers' class for causal language models opens the whole model
        with pytest.raises(ValueError, match="with the multimodal class alone"):
            source.check_text_names("--text_names")
    else:
        source.check_text_names("--text_names")
        logits = peft_logits(name, folder, tmp_path / "adapter", transformers.AutoModelForCausalLM)
        assert relative(logits, expected) <= 1e-5


@torch.no_grad()
def test_adapters_that_peft_wrote_for_a_wrapper(wrapper, tmp_path):
    """With full names, patterns of ranks and a regular expression of targets."""
    from peft import LoraConfig, get_peft_model

    name, folder = wrapper
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    prefix = r"language_model\.model" if name == "Llama4" else r"model\.language_model"
    config = LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=rf"{prefix}\.layers\.\d+\.self_attn\.(q_proj|o_proj)",
        rank_pattern={rf"{prefix}\.layers\.1\.self_attn\.q_proj": 2},
        alpha_pattern={rf"{prefix}\.layers\.2\.self_attn\.o_proj": 11},
    )
    reference = get_peft_model(base, config).eval()
    perturb(p for n, p in reference.named_parameters() if "lora_" in n)
    reference.save_pretrained(tmp_path)
    model = reference.get_base_model()
    expected = (model.language_model if name == "Llama4" else model)(TOKENS).logits
    assert relative(litft.load(tmp_path, base_dir=folder)[0](TOKENS), expected) <= 1e-5


def test_targets_are_limited_to_the_language_model(wrapper, tmp_path):
    import re

    _, folder = wrapper
    write_random_adapter(folder, tmp_path, targets=["q_proj", "down_proj"])
    regex = json.loads((tmp_path / ADAPTER_CONFIG).read_text())["target_modules"]
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    matched = [module for module, _ in base.named_modules() if re.fullmatch(regex, module)]
    assert matched and all("language_model" in module for module in matched)
    assert {module.rpartition(".")[2] for module in matched} <= {"q_proj", "down_proj"}


def test_keys_that_are_not_in_the_base_are_an_error(wrapper, tmp_path):
    from litft.pretrained.save import check_written

    _, folder = wrapper
    _, source = write_random_adapter(folder, tmp_path / "adapter")
    check_written(tmp_path / "adapter", source)
    write_random_adapter(folder, tmp_path / "text", text_names=True)
    with pytest.raises(RuntimeError, match=r"layers\.0.* is not in the base model"):
        check_written(tmp_path / "text", source)
    shutil.rmtree(tmp_path / "text")
