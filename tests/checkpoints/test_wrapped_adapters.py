"""Adapters of multimodal bases have the names that the class has which opens the folder, and apply
in it."""

import json
import shutil

import pytest
import torch
import transformers
from parity import draw, relative
from safetensors.torch import load_file, save_file
from tiny_wrappers import LINEAR, MROPE, QWEN_TOWER, SPARSE, TEXT, TOWER, random_wrapper

import litft
from litft.args import LoRAArgs
from litft.args.export import ExportArgs
from litft.checkpoints.adapter_reader import ADAPTER_CONFIG, read_tensors
from litft.checkpoints.weight_files import Checkpoint
from litft.commands.convert_to_hf import export
from litft.methods import LoRA
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve

EXPERTS = dict(intermediate_size_mlp=40, num_local_experts=4)
LLAMA4_TOWER = TOWER | dict(
    intermediate_size=64,
    vision_output_dim=16,
    projector_input_dim=16,
    projector_output_dim=16,
    pixel_shuffle_ratio=0.5,
)
PER_LAYER = dict(
    global_head_dim=12, hidden_size_per_layer_input=10, vocab_size_per_layer_input=96
)
# for language models whose heads divide the hidden size
WITHOUT_HEAD_DIM = {name: value for name, value in TEXT.items() if name != "head_dim"}
GLM_TOWER = TOWER | dict(depth=1, num_heads=2, out_hidden_size=32)
GLM_ROPE = MROPE | dict(mrope_section=[1, 0, 1], partial_rotary_factor=0.5)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
# class of transformers' config, less "Config"
NEMOTRON_OMNI = "NemotronH_Omni_Reasoning_V3_"
HYBRID = dict(
    model_type="nemotron_h",
    layer_types=["linear_attention", "full_attention", "full_attention", "moe"],
    mamba_num_heads=4,
    mamba_head_dim=8,
    n_groups=2,
    ssm_state_size=16,
    n_routed_experts=4,
    moe_shared_expert_intermediate_size=40,
)
RADIO = TOWER | dict(max_img_size=28, video_temporal_patch_size=2)
SIGLIP = TOWER | dict(model_type="siglip_vision_model")
CLIP = TOWER | dict(model_type="clip_vision_model")
# class of the wrapper -> (text_config, vision_config, other values); all kinds of adapters are
# tried with these
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
        dict(
            depth=1, hidden_size=16, num_heads=2, out_hidden_size=32, intermediate_size=24
        ),
        dict(tie_word_embeddings=False),
    ),
    "Qwen3VL": (TEXT | dict(rope_parameters=MROPE), QWEN_TOWER, {}),
    "Qwen3_5": (TEXT | LINEAR | dict(num_hidden_layers=4), QWEN_TOWER, {}),
    "SmolVLM": (TEXT | dict(model_type="llama"), TOWER, {}),
}
# the same; each with one kind of adapters
MORE_WRAPPERS = {
    "AyaVision": (
        WITHOUT_HEAD_DIM | dict(model_type="cohere2", sliding_window=6),
        SIGLIP,
        {},
    ),
    "Cohere2Vision": (
        WITHOUT_HEAD_DIM | dict(model_type="cohere2", sliding_window=6),
        SIGLIP,
        {},
    ),
    "Exaone4_5_": (
        TEXT | dict(model_type="exaone4", sliding_window=6),
        GLM_TOWER | dict(window_size=28),
        {},
    ),
    "Glm46V": (
        WITHOUT_HEAD_DIM | dict(model_type="glm4v_text", rope_parameters=GLM_ROPE),
        GLM_TOWER,
        {},
    ),
    "Glm4v": (WITHOUT_HEAD_DIM | dict(rope_parameters=GLM_ROPE), GLM_TOWER, {}),
    "Glm4vMoe": (
        TEXT
        | SPARSE
        | dict(rope_parameters=GLM_ROPE, n_routed_experts=4, n_shared_experts=1),
        GLM_TOWER,
        {},
    ),
    "Idefics3": (TEXT | dict(model_type="llama"), TOWER, {}),
    "InternVL": (TEXT | dict(model_type="qwen2"), TOWER, {}),
    "InternVL, Qwen 3": (TEXT | dict(model_type="qwen3"), TOWER, {}),
    "Kimi_K25": (
        WITHOUT_HEAD_DIM | SPARSE | LATENT | dict(model_type="deepseek_v3"),
        TOWER,
        {},
    ),
    "Lfm2Vl": (
        WITHOUT_HEAD_DIM
        | dict(model_type="lfm2", layer_types=["conv", "full_attention", "full_attention"]),
        TOWER | dict(model_type="siglip2_vision_model", num_patches=4),
        {},
    ),
    "Lfm3Vl": (
        WITHOUT_HEAD_DIM | dict(model_type="lfm3", bos_token_id=1, eos_token_id=2),
        TOWER,
        {},
    ),
    "Llava": (TEXT | dict(model_type="llama"), CLIP, {}),
    "LlavaNext": (TEXT | dict(model_type="mistral"), CLIP, {}),
    "LlavaOnevision": (TEXT | dict(model_type="qwen2"), SIGLIP, {}),
    "Qwen2VL": (
        TEXT | dict(rope_parameters=MROPE),
        dict(depth=1, hidden_size=32, num_heads=2, embed_dim=16),
        {},
    ),
    "Qwen3VLMoe": (
        TEXT | SPARSE | dict(num_experts=4, rope_parameters=MROPE),
        QWEN_TOWER,
        {},
    ),
    "VipLlava": (TEXT | dict(model_type="llama"), CLIP, {}),
    # transformers' wrapper leaves out logits_scaling, which is 1 here
    "LlavaNext, Granite": (
        TEXT
        | dict(model_type="granite", embedding_multiplier=3.0, attention_multiplier=0.2)
        | dict(residual_multiplier=0.5),
        SIGLIP,
        {},
    ),
    "MuseGlimmer": (
        TEXT | dict(num_hidden_layers=4, sliding_window=6),
        TOWER | dict(pos_emb_height=2, pos_emb_width=2),
        dict(out_hidden_size=64, projector_hidden_size=16),
    ),
    NEMOTRON_OMNI: (
        TEXT | SPARSE | HYBRID,
        RADIO,
        dict(vision_hidden_size=16, projector_hidden_size=16, audio_config=None),
    ),
    "Mistral3, Mistral 4": (
        WITHOUT_HEAD_DIM | SPARSE | LATENT | dict(model_type="mistral4"),
        TOWER,
        dict(tie_word_embeddings=False),
    ),
}
# transformers' multimodal class leaves out logit_scale, which its class of the language model has
WITHOUT_SCALE = {"AyaVision": 0.0625, "Cohere2Vision": 0.0625}


@torch.no_grad()
def perturb(parameters):
    """Change parameters a little: these networks are sensitive."""
    for parameter in parameters:
        parameter.add_(0.05 * torch.randn(parameter.shape))


TOKENS = draw(2, 23, seed=8) % 90
LANGUAGE_MODELS = {"Llama4": "language_model"}  # whose wrapper needs an image


def as_published(folder):
    """Give the language model of a Kimi the names of published files: transformers writes others,
    which it cannot read."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[
            name.replace("language_model.model.blocks", "language_model.model.layers")
        ] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module", params=(WRAPPERS | MORE_WRAPPERS))
def wrapper(request, tmp_path_factory):
    """The name of a wrapper, and the folder of a random model of it."""
    text, vision, values = (WRAPPERS | MORE_WRAPPERS)[request.param]
    name = request.param.partition(",")[0]
    model = random_wrapper(name, text, vision, **values)
    perturb(model.parameters())
    folder = tmp_path_factory.mktemp(name)
    model.save_pretrained(folder)
    if name == "Kimi_K25":
        as_published(folder)
    return name, folder


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
    method.write(
        out, source, method.values(model), {"base_model_name_or_path": str(folder)}
    )
    return model, source


def peft_logits(name, folder, adapter, kind, tokens=0):
    """Return the logits in PEFT, in the class `kind` of transformers."""
    from peft import PeftModel

    base = kind.from_pretrained(folder, dtype=torch.float32)
    if tokens:
        base.resize_token_embeddings(96 + tokens, mean_resizing=False)
    model = PeftModel.from_pretrained(base, adapter).eval().get_base_model()
    part = LANGUAGE_MODELS.get(name) if hasattr(model, "language_model") else None
    logits = (getattr(model, part) if part else model)(TOKENS).logits
    return logits * WITHOUT_SCALE.get(name, 1)


# modules other than stacked experts, of which PEFT has no DoRA
STACKED = {
    "Llama4": ["q_proj", "o_proj"],
    "Kimi_K25": ["q_b_proj", "o_proj"],
    "Qwen3VLMoe": ["q_proj", "o_proj"],
    "Glm4vMoe": ["q_proj", "o_proj"],
    NEMOTRON_OMNI: ["q_proj", "o_proj"],
}
# the language model's modules in a wrapper, if not model.language_model
MODULES = {
    "Llama4": r"language_model\.model",
    "SmolVLM": r"model\.text_model",
    "Idefics3": r"model\.text_model",
    NEMOTRON_OMNI: r"language_model\.model",
}
KINDS = {
    "lora": {},
    "rslora": dict(rslora=True, rank_pattern=["*.1.*=2"]),
    "dora": dict(dora=True),
    "embeddings": dict(targets=["o_proj", "embed_tokens"]),
    "a trained head": dict(targets=["v_proj"], modules_to_save=["lm_head"]),
    "new tokens": dict(tokens=2),
}


def pairs_of_wrappers_and_kinds():
    """Every kind with some wrappers, and one kind with each of the others."""
    pairs = [(name, kind) for name in WRAPPERS for kind in KINDS]
    for number, name in enumerate(MORE_WRAPPERS):
        pairs.append((name, list(KINDS)[number % len(KINDS)]))
    return pairs


@pytest.mark.parametrize(
    ("wrapper", "kind"), pairs_of_wrappers_and_kinds(), indirect=["wrapper"]
)
@torch.no_grad()
@pytest.mark.halved
def test_the_wrapper_applies_what_we_wrote(wrapper, tmp_path, kind):
    name, folder = wrapper
    flags = dict(KINDS[kind])
    if name in STACKED and kind == "dora":
        flags["targets"] = STACKED[name]
    model, _ = write_random_adapter(folder, tmp_path / "adapter", **flags)
    expected = model(TOKENS)
    assert relative(expected[..., :96], litft.load(folder)[0](TOKENS)) > 1e-2
    tokens = flags.get("tokens", 0)
    logits = peft_logits(
        name, folder, tmp_path / "adapter", transformers.AutoModelForImageTextToText, tokens
    )
    assert relative(logits, expected) <= 1e-5
    assert (
        relative(litft.load(tmp_path / "adapter", base_dir=folder)[0](TOKENS), expected)
        <= 1e-5
    )
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
    assert (
        relative(litft.load(tmp_path / "adapter", base_dir=folder)[0](TOKENS), expected)
        <= 1e-5
    )
    source = resolve(folder)
    if name not in ("Llama4", "Qwen3_5"):
        # transformers' class for causal language models opens the whole model
        with pytest.raises(ValueError, match="with the multimodal class alone"):
            source.check_text_names("--text_names")
    else:
        source.check_text_names("--text_names")
        logits = peft_logits(
            name, folder, tmp_path / "adapter", transformers.AutoModelForCausalLM
        )
        assert relative(logits, expected) <= 1e-5


@torch.no_grad()
def test_adapters_that_peft_wrote_for_a_wrapper(wrapper, tmp_path):
    """With full names, patterns of ranks and a regular expression of targets."""
    from peft import LoraConfig, get_peft_model

    name, folder = wrapper
    base = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    )
    prefix = MODULES.get(name, r"model\.language_model")
    first = "q_b_proj" if hasattr(base.config.text_config, "q_lora_rank") else "q_proj"
    second = {"Lfm2Vl": "out_proj", "Lfm3Vl": "out_proj"}.get(name, "o_proj")
    attention = "mixer" if name == NEMOTRON_OMNI else "self_attn"
    config = LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=rf"{prefix}\.layers\.\d+\.{attention}\.({first}|{second})",
        rank_pattern={rf"{prefix}\.layers\.1\.{attention}\.{first}": 2},
        alpha_pattern={
            # as the text model calls it: matches only where names of the class end so
            rf"model\.layers\.1\.{attention}\.{second}": 29,
            rf"{prefix}\.layers\.2\.{attention}\.{second}": 11,
        },
    )
    reference = get_peft_model(base, config).eval()
    perturb(p for n, p in reference.named_parameters() if "lora_" in n)
    reference.save_pretrained(tmp_path)
    model = reference.get_base_model()
    expected = (model.language_model if name == "Llama4" else model)(TOKENS).logits
    expected = expected * WITHOUT_SCALE.get(name, 1)
    assert relative(litft.load(tmp_path, base_dir=folder)[0](TOKENS), expected) <= 1e-5


@torch.no_grad()
def test_the_language_model_and_the_whole_model_are_written(wrapper, tmp_path):
    name, folder = wrapper
    export(ExportArgs(checkpoint_dir=str(folder), out_dir=str(tmp_path / "text")))
    expected = litft.load(folder)[0](TOKENS)
    text = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", dtype="float32"
    )
    assert relative(text(TOKENS).logits, expected) <= 1e-5
    # of Muse Glimmer's text, transformers has only a class without a head
    if name != "MuseGlimmer":
        assert text.config.architectures == [type(text).__name__]

    flags = ExportArgs(
        checkpoint_dir=str(folder), out_dir=str(tmp_path / "whole"), multimodal=True
    )
    export(flags)
    before = Checkpoint(folder)
    after = Checkpoint(tmp_path / "whole")
    assert set(before.names) == set(after.names)
    for tensor in before.names:
        assert torch.equal(before.read(tensor), after.read(tensor))


def test_targets_are_limited_to_the_language_model(wrapper, tmp_path):
    import re

    name, folder = wrapper
    write_random_adapter(folder, tmp_path, targets=["q_*proj", "down_proj"])
    regex = json.loads((tmp_path / ADAPTER_CONFIG).read_text())["target_modules"]
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    matched = [module for module, _ in base.named_modules() if re.fullmatch(regex, module)]
    assert matched and all(
        re.match(MODULES.get(name, r"model\.language_model"), module) for module in matched
    )
    assert {module.rpartition(".")[2] for module in matched} <= {
        "q_proj",
        "q_a_proj",
        "q_b_proj",
        "down_proj",
        "w2",
    }


def test_keys_that_are_not_in_the_base_are_an_error(wrapper, tmp_path):
    from litft.pretrained.save import check_written

    _, folder = wrapper
    _, source = write_random_adapter(folder, tmp_path / "adapter")
    check_written(tmp_path / "adapter", source)
    write_random_adapter(folder, tmp_path / "text", text_names=True)
    with pytest.raises(RuntimeError, match=r"layers\.0.* is not in the base model"):
        check_written(tmp_path / "text", source)
    shutil.rmtree(tmp_path / "text")
