"""Weight files in every layout that Hugging Face writes, and the errors for broken folders."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import litft
import litft.cli
from litft.args import LoRAArgs
from litft.checkpoints.weight_files import Checkpoint
from litft.checkpoints.weight_writer import write_weights
from litft.methods import LoRA
from litft.pretrained.build import base_model
from litft.pretrained.folder import base_record, fingerprint, resolve
from litft.pretrained.save import model_entries


@pytest.fixture(scope="module")
def model_folder(make_model):
    from transformers import LlamaConfig

    return make_model(LlamaConfig)


@pytest.fixture
def folder(model_folder, tmp_path):
    """Return a copy of the model folder that a test may damage."""
    return shutil.copytree(model_folder[1], tmp_path / "model")


TOKENS = torch.randint(96, (1, 16), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_shards_bin_and_sharded_bin_are_the_same_model(model_folder, folder, tmp_path):
    reference, _ = model_folder
    expected = litft.load(folder)[0](TOKENS)
    reference.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2
    tensors = load_file(folder / "model.safetensors")
    for name in ("bin", "bins"):
        (tmp_path / name).mkdir()
        shutil.copyfile(folder / "config.json", tmp_path / name / "config.json")
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    weight_map = {name: f"pytorch_model-{n % 2}.bin" for n, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        torch.save(
            {n: t for n, t in tensors.items() if weight_map[n] == file},
            tmp_path / "bins" / file,
        )
    (tmp_path / "bins" / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    for name in ("shards", "bin", "bins"):
        assert torch.equal(litft.load(tmp_path / name)[0](TOKENS), expected), name


@torch.no_grad()
def test_one_file_is_read_before_an_index(folder):
    """As in transformers."""
    from transformers import AutoModelForCausalLM

    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: 2 * tensor for name, tensor in tensors.items()},
        folder / "model-1.safetensors",
    )
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
    torch.testing.assert_close(
        litft.load(folder)[0](TOKENS), expected, rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_a_stored_head_of_a_tied_model_is_used(make_model, tmp_path):
    """As in transformers; a head with the embedding's values changes nothing.

    Exports say that the model is not tied.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    _, folder = make_model(LlamaConfig, tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    save_file(tensors, path, metadata={"format": "pt"})
    assert resolve(folder).config.tied
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
    torch.testing.assert_close(
        litft.load(folder)[0](TOKENS), expected, rtol=1e-4, atol=1e-5
    )
    out = litft.cli.run(
        "convert_hf_checkpoint",
        ["--checkpoint_dir", str(folder), "--out_dir", str(tmp_path / "out")],
    )
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    torch.testing.assert_close(litft.load(out)[0](TOKENS), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_transformers_reads_our_weights(model_folder, folder, tmp_path):
    from transformers import AutoModelForCausalLM

    source = resolve(folder)
    out = tmp_path / "out"
    out.mkdir()
    write_weights(out, model_entries(source, torch.float32), shard_bytes=20_000)
    shutil.copyfile(folder / "config.json", out / "config.json")
    shards = list(out.glob("model-*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size < 25_000 for path in shards)
    assert all(path.stat().st_mode & 0o777 == 0o666 & out.stat().st_mode for path in shards)
    reread = AutoModelForCausalLM.from_pretrained(out, dtype="float32")
    expected = model_folder[0].state_dict()
    assert reread.state_dict().keys() == expected.keys()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in reread.state_dict().items()
    )


@torch.no_grad()
def test_dtype_is_that_of_the_folder_unless_requested(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in tensors.items()}, folder / "model.safetensors")
    assert {p.dtype for p in litft.load(folder)[0].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in litft.load(folder, precision="fp32")[0].parameters()} == {
        torch.float32
    }
    with pytest.raises(ValueError, match="precision 'int4' is not supported"):
        litft.load(folder, precision="int4")


def test_tensors_are_read_lazily(folder):
    """Names and shapes come from the header: a hole in place of the data is not noticed."""
    path = folder / "model.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.truncate(header)
        file.truncate(size)
    checkpoint = Checkpoint(folder)
    assert checkpoint.meta("model.norm.weight").shape == (32,)
    assert not checkpoint.sample("model.embed_tokens.weight", 1, 64)[0].any()
    resolve(folder).check()


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_misnamed_and_misshapen_tensors_are_listed_together(folder):
    def change(tensors):
        tensors["model.norm.wait"] = tensors.pop("model.norm.weight")
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].contiguous()

    rewrite(folder, change)
    with pytest.raises(ValueError) as caught:
        litft.load(folder)
    message = str(caught.value)
    assert (
        "missing model.norm.weight" in message and "unexpected model.norm.wait" in message
    )
    assert "lm_head.weight: expected shape (96, 32), found (96, 31)" in message
    assert "config.json and weights must come from the same model" in message


def truncate(folder):
    os.truncate(folder / "model.safetensors", 5000)


def drop_weights(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def lfs_pointer(folder):
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n"
    )


def lost_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stray_shard(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../../secret.safetensors"}})
    )


def bad_index(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


def evil_pickle(folder):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {folder / 'executed'}",)

    (folder / "model.safetensors").unlink()
    torch.save({"a": Evil()}, folder / "pytorch_model.bin")


def no_config(folder):
    (folder / "config.json").unlink()


def config(**values):
    def change(folder):
        stored = json.loads((folder / "config.json").read_text())
        stored = {
            name: value for name, value in {**stored, **values}.items() if value is not ...
        }
        (folder / "config.json").write_text(json.dumps(stored))

    return change


def torn_config(folder):
    (folder / "config.json").write_text('{"model_type": "llama",')


def stored_as(dtype):
    def change(folder):
        rewrite(
            folder,
            lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items()}),
        )

    return change


def invalid(**values):
    """Return a change that gives a field an invalid value, and the expected message."""
    ((name, value),) = values.items()
    return config(
        **values
    ), f"config.json: {name} must be .*, found {re.escape(repr(value))}"


def rope(**values):
    scaling = {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 1e4,
        **values,
    }
    ((name, value),) = values.items()
    return config(
        rope_parameters=scaling
    ), rf"rope_parameters\.{name} must be .*, found {re.escape(repr(value))}"


BROKEN = [
    (
        stored_as(torch.int8),
        "stored as torch.int8, but litft expects floating-point weights",
    ),
    (stored_as(torch.uint16), "stored as U16, not a weight dtype"),
    invalid(hidden_size="64"),
    invalid(hidden_size=None),
    invalid(num_attention_heads=0),
    invalid(num_hidden_layers=10**12),
    invalid(vocab_size=-1),
    invalid(max_position_embeddings=1.5),
    invalid(rms_norm_eps=-1),
    invalid(rope_theta="x"),
    invalid(sliding_window=-1),
    invalid(tie_word_embeddings="x"),
    invalid(hidden_act=["silu"]),
    invalid(rope_scaling=[1]),
    (
        config(num_hidden_layers=2_000),
        "num_hidden_layers must be a whole number from 1 to 1,000",
    ),
    rope(factor=0),
    rope(factor="2"),
    rope(beta_fast=-1),
    rope(original_max_position_embeddings="32"),
    rope(rope_theta=float("inf")),
    (truncate, "is truncated or not a safetensors file"),
    (
        drop_weights,
        r"holds no weights: expected model.safetensors, .* found config.json, .*weights.safetensors",
    ),
    (lfs_pointer, "is a git-lfs pointer"),
    (lost_shard, "lacks 2 of 2 weight files: model-00001-of-00002.safetensors"),
    (stray_shard, "not a plain file name; do not trust this folder"),
    (bad_index, "is not a valid index"),
    (evil_pickle, "litft does not execute pickles"),
    (no_config, "has no config.json"),
    (torn_config, "config.json is not valid JSON"),
    (
        config(model_type="mamba"),
        "'mamba' is not supported: it is a network with Mamba-1 layers",
    ),
    (
        config(model_type="gemma9", moe_intermediate_size=None, hidden_size="x"),
        "^config.json: model_type 'gemma9' is not supported",
    ),
    (config(model_type=...), "lacks the field 'model_type'"),
    (config(hidden_size=...), "lacks the field 'hidden_size'"),
    (config(hidden_act="swish9"), "activation 'swish9' is not supported; known: silu"),
    (config(num_key_value_heads=3), "4 query heads cannot share 3 key/value heads"),
    (
        config(intermediate_size=57),
        r"mlp.gate_proj.weight: expected shape \(57, 32\), found \(56, 32\)",
    ),
    (config(num_hidden_layers=4), "missing model.layers.3"),
    (config(attention_bias=True), "missing model.layers.0.self_attn.q_proj.bias"),
]


@pytest.mark.parametrize(
    "damage, message", BROKEN, ids=[message[:60] for _, message in BROKEN]
)
def test_broken_folders_are_reported(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        litft.load(folder)
    assert not (folder / "executed").exists()


def test_a_missing_folder_and_a_file_are_reported(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        litft.load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; name the folder"):
        litft.load(tmp_path / "file")


def test_a_fingerprint_looks_at_several_places(tiny, tmp_path):
    """Another model with the same first rows is another one."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    before = fingerprint(resolve(folder).checkpoint)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for tensor in tensors.values():
        if tensor.ndim > 1:
            tensor[2:] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    assert fingerprint(resolve(folder).checkpoint) != before


def test_a_template_in_an_adapters_folder_counts_without_a_tokenizer(tiny, tmp_path):
    base = resolve(tiny)
    method = LoRA(LoRAArgs(r=1))
    method.select_targets(base.outline, base.adapter_rules)
    model = base_model(base)
    method.attach(model)
    method.reset_parameters(model)
    method.write(tmp_path, base, method.values(model), base_record(base, tmp_path))
    (tmp_path / "chat_template.jinja").write_text("Frage: {{ messages[0].content }}")
    tokenizer = resolve(tmp_path).tokenizer()
    assert tokenizer.has_template and "Frage: " in tokenizer.chat_template
