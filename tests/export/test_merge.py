"""A merged model equals the adapter on its base, for litft and for transformers."""

import json
import shutil

import pytest
import torch
from conftest import STORIES, adapted, copy_tokenizer, script
from parity import DEEPSEEK
from peft_reference import TOKENS, write_adapter
from safetensors.torch import load_file, save_file

import litft
from litft.args import ExportArgs, LoRAArgs, MergeArgs
from litft.checkpoints.weight_writer import write_weights
from litft.commands.convert_to_hf import export
from litft.commands.merge_lora import merge
from litft.methods import LoRA
from litft.pretrained.folder import resolve
from litft.pretrained.save import Result, model_entries


@pytest.fixture
def adapter(tiny, tmp_path):
    """Return the folder of an adapter whose ranks and scales differ between modules."""
    write_adapter(
        tiny,
        tmp_path / "adapter",
        rank_pattern={"down_proj": 2},
        alpha_pattern={"v_proj": 32},
    )
    for path in tiny.glob("*token*"):
        (tmp_path / "adapter" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "adapter"


@torch.no_grad()
def test_merged_equals_unmerged(adapter, tmp_path):
    from transformers import AutoModelForCausalLM

    expected = litft.load(adapter)[0](TOKENS)
    script(
        "scripts/merge_lora.py",
        "--checkpoint_dir",
        adapter,
        "--out_dir",
        "merged",
        cwd=tmp_path,
    )
    model, tokenizer = litft.load(tmp_path / "merged")
    assert (model(TOKENS) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert tokenizer.encode("Once") == litft.load(adapter)[1].encode("Once")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    assert (reference(TOKENS).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not (tmp_path / "merged" / "chat_template.jinja").exists()  # the base has none


@torch.no_grad()
def test_weights_are_summed_in_fp32(tiny, adapter, tmp_path):
    """A merge in bf16 would round twice; the fp32 sum is rounded once, to the requested dtype."""
    merge(
        MergeArgs(
            checkpoint_dir=[str(adapter)],
            precision="bf16",
            out_dir=str(tmp_path / "merged"),
        )
    )
    base, tuned = litft.load(tiny)[0], litft.load(adapter)[0]
    merged, _ = litft.load(tmp_path / "merged")
    assert (
        json.loads((tmp_path / "merged" / "config.json").read_text())["torch_dtype"]
        == "bfloat16"
    )
    linear = tuned.blocks[1].attention.v_proj
    exact = (
        base.blocks[1].attention.v_proj.weight
        + linear.lora_scale * linear.lora_b @ linear.lora_a
    )
    assert torch.equal(merged.blocks[1].attention.v_proj.weight, exact.bfloat16())


@torch.no_grad()
def test_a_tied_model_is_merged_in_shards(make_model, tmp_path):
    from transformers import LlamaConfig

    _, folder = make_model(LlamaConfig, vocab_size=512, tie_word_embeddings=True)
    write_adapter(folder, tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    source = resolve(tmp_path / "adapter")
    entries = model_entries(source, torch.float32, Result(*source.read_adapter()))
    write_weights(tmp_path / "out", entries, shard_bytes=30_000)
    (tmp_path / "out" / "config.json").write_bytes((folder / "config.json").read_bytes())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert (
        "lm_head.weight" not in index["weight_map"]
        and len(set(index["weight_map"].values())) > 2
    )
    expected = litft.load(tmp_path / "adapter")[0](TOKENS)
    model, _ = litft.load(tmp_path / "out")
    assert model.lm_head.weight is model.embed.weight
    assert (model(TOKENS) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("damage", ["no A", "no B", "wrong B", "flat A", "nan"])
def test_an_incomplete_adapter_is_not_merged(adapter, tmp_path, damage):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    a, b = (
        f"base_model.model.model.layers.1.self_attn.q_proj.lora_{leaf}.weight"
        for leaf in "AB"
    )
    if damage.startswith("no "):
        del tensors[{"no A": a, "no B": b}[damage]]
    elif damage == "nan":
        tensors[a][0, 0] = torch.nan
    else:
        name = b if damage == "wrong B" else a
        tensors[name] = (
            tensors[name][:-1].contiguous()
            if damage == "wrong B"
            else tensors[name].flatten()
        )
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"does not fit its base model: .*q_proj "):
        merge(MergeArgs(checkpoint_dir=[str(adapter)], out_dir=str(tmp_path / "out")))
    assert not list(tmp_path.glob("out*"))


def test_generation_settings_of_the_base_hold_for_an_adapter(tiny, tmp_path):
    """transformers and PEFT save an adapter with its tokenizer, and without a
    generation_config.json."""
    base = shutil.copytree(tiny, tmp_path / "base")
    settings = {"eos_token_id": [2, 7], "top_k": 5}
    (base / "generation_config.json").write_text(json.dumps(settings))
    write_adapter(base, tmp_path / "adapter")
    copy_tokenizer(STORIES, tmp_path / "adapter")
    assert litft.load(tmp_path / "adapter")[1].stop_ids == [2, 7]
    merge(
        MergeArgs(
            checkpoint_dir=[str(tmp_path / "adapter")], out_dir=str(tmp_path / "merged")
        )
    )
    assert (
        json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == settings
    )
    (tmp_path / "adapter" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 9})
    )
    assert litft.load(tmp_path / "adapter")[1].stop_ids == [9, 2]


@pytest.fixture
def two_adapters(tiny, tmp_path):
    """Return the folders of two adapters with other modules, ranks and scales."""
    folders = []
    for seed, (targets, rank) in enumerate([(["q_proj", "down_proj"], 4), (["q_proj"], 2)]):
        torch.manual_seed(seed)
        folder = tmp_path / f"adapter-{seed}"
        write_adapter(tiny, folder, target_modules=targets, r=rank)
        folders.append(folder)
    return folders


def combined_by_peft(base, folders, weights, **flags):
    """Return PEFT's model with adapters combined from their exact changes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    model = PeftModel.from_pretrained(model, folders[0], adapter_name="0")
    model.load_adapter(folders[1], adapter_name="1")
    model.add_weighted_adapter(["0", "1"], weights, "both", **flags)
    model.set_adapter("both")
    return model.merge_and_unload(adapter_names=["both"]).eval()


# the flags of merge_lora -> those of PEFT's method; a rank as large as the matrices is exact
COMBINATIONS = {
    "linear": ({}, dict(combination_type="cat")),
    "ties": (
        dict(combination="ties", density=0.3),
        dict(combination_type="ties_svd", density=0.3, svd_rank=32),
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
@torch.no_grad()
def test_combined_adapters_equal_those_of_peft(tiny, two_adapters, tmp_path, name):
    flags, peft_flags = COMBINATIONS[name]
    folders = [str(folder) for folder in two_adapters]
    weights = [0.7, -0.4]
    merge(
        MergeArgs(
            checkpoint_dir=folders,
            weights=weights,
            out_dir=str(tmp_path / "merged"),
            precision="fp32",
            **flags,
        )
    )
    expected = combined_by_peft(tiny, folders, weights, **peft_flags)
    logits = litft.load(tmp_path / "merged")[0](TOKENS)
    reference = expected(TOKENS).logits
    assert (logits - reference).abs().max() <= 1e-5 * reference.abs().max()
    alone = litft.load(folders[0], precision="fp32")[0](TOKENS)
    assert (logits - alone).abs().max() > 1e-2 * reference.abs().max()


@torch.no_grad()
def test_a_tied_table_and_a_head_are_combined(make_model, tmp_path, capsys):
    """One adapter trains the tied table, the other the head alone: with its weight at 0, nothing of
    the second is left."""
    from transformers import LlamaConfig

    _, base = make_model(LlamaConfig, vocab_size=512, tie_word_embeddings=True)
    copy_tokenizer(STORIES, base)
    table = LoRA(LoRAArgs(modules_to_save=["embed_tokens"]))
    head = LoRA(LoRAArgs(targets=["q_proj", "lm_head"]))
    folders = []
    for name, method in (("table", table), ("head", head)):
        folders.append(str(adapted(base, tmp_path / name, method)))
    merge(
        MergeArgs(
            checkpoint_dir=folders,
            weights=[1, 0],
            out_dir=str(tmp_path / "merged"),
            precision="fp32",
        )
    )
    expected = litft.load(folders[0], precision="fp32")[0](TOKENS)
    found = litft.load(tmp_path / "merged")[0](TOKENS)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_adapters_are_combined_by_the_command(two_adapters, tmp_path):
    first, second = (str(folder) for folder in two_adapters)
    flags = ["--weights", "0.5,0.5", "--precision", "fp32"]
    for number, folders in enumerate([[first, second], [f"{first},{second}"]]):
        script(
            "scripts/merge_lora.py",
            "--checkpoint_dir",
            *folders,
            *flags,
            "--out_dir",
            f"merged-{number}",
            cwd=tmp_path,
        )
    tensors = [load_file(tmp_path / f"merged-{n}" / "model.safetensors") for n in range(2)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_combinations_that_have_no_meaning(tiny, two_adapters, tmp_path):
    command = ["scripts/merge_lora.py", "--out_dir", "out", "--checkpoint_dir"]
    folders = [str(folder) for folder in two_adapters]

    def message(*flags):
        return script(*command, *folders, *flags, cwd=tmp_path, code=2).stderr

    assert "--weights has 3 numbers for 2 adapters" in message("--weights", "1,2,3")
    assert "--density 1.5: must be above 0" in message(
        "--combination", "ties", "--density", "1.5"
    )
    assert "--density is for --combination ties" in message("--density", "0.2")
    assert "--dequantized_base is for one adapter" in message("--dequantized_base")
    scaled = ["--dequantized_base", "--weights", "0.5"]
    alone = script(*command, folders[0], *scaled, cwd=tmp_path, code=2).stderr
    assert "--weights scales the update, and --dequantized_base also changes" in alone
    alone = script(
        *command, folders[0], "--combination", "ties", cwd=tmp_path, code=2
    ).stderr
    assert "--combination ties needs several adapters" in alone
    other = shutil.copytree(tiny, tmp_path / "other")
    write_adapter(other, tmp_path / "third")
    folders.append(str(tmp_path / "third"))
    assert "have different bases" in message()


def test_invalid_merges_are_refused(tiny, adapter, tmp_path):
    command = "scripts/merge_lora.py", "--checkpoint_dir"
    assert (
        "is not an adapter"
        in script(*command, tiny, "--out_dir", "out", cwd=tmp_path, code=2).stderr
    )
    assert "--out_dir is missing" in script(*command, adapter, cwd=tmp_path, code=2).stderr
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "a").touch()
    assert (
        "already exists"
        in script(*command, adapter, "--out_dir", "taken", cwd=tmp_path, code=2).stderr
    )


def test_tensors_that_are_wider_than_the_folder_stay_so(make_model, tmp_path):
    """Routers of published models are in fp32 beside bf16 weights."""
    from transformers import Glm4MoeConfig

    values = dict(head_dim=16, n_routed_experts=5, **DEEPSEEK)
    _, base = make_model(Glm4MoeConfig, **values)
    path = base / "model.safetensors"
    stored = {}
    for name, tensor in load_file(path).items():
        is_wide = name.endswith(("gate.weight", "correction_bias"))
        stored[name] = tensor if is_wide else tensor.bfloat16()
    save_file(stored, path, {"format": "pt"})
    adapter = adapted(base, tmp_path / "adapter", LoRA(LoRAArgs(r=2)))
    args = MergeArgs(checkpoint_dir=[str(adapter)], out_dir=str(tmp_path / "merged"))
    merged = merge(args)
    tensors = load_file(merged / "model.safetensors")
    for name, tensor in stored.items():
        assert tensors[name].dtype == tensor.dtype, name
    routers = [name for name in stored if name.endswith("gate.weight")]
    assert routers and all(torch.equal(tensors[name], stored[name]) for name in routers)


def test_a_quantized_folder_is_written_in_its_own_dtype(make_model, tmp_path):
    """Weights that are dequantized to fp32 are not stored in fp32."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

    _, folder = make_model(LlamaConfig, hidden_size=64, intermediate_size=128)
    quantized = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4"
        ),
        dtype=torch.bfloat16,
        device_map="cpu",
    )
    quantized.save_pretrained(tmp_path / "nf4")
    args = ExportArgs(checkpoint_dir=str(tmp_path / "nf4"), out_dir=str(tmp_path / "out"))
    tensors = load_file(export(args) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
