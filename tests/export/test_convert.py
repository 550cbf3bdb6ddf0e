"""Conversion scripts: unusual source folders to clean ones, and a run's checkpoint to a loadable
folder."""

import json
import re
import shutil

import pytest
import torch
import transformers
from conftest import script
from parity import ROWS, draw, relative
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import litft
from litft.args import ConvertArgs, ExportArgs
from litft.checkpoints.weight_files import Checkpoint
from litft.commands.convert_hf_checkpoint import convert
from litft.commands.convert_to_hf import export
from litft.pretrained.folder import resolve

TOKENS = draw(1, 20, seed=9)


def rewrite_tensors(folder, change):
    """Change a folder's tensors and save them again."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def test_bin_shards_in_mixed_dtypes_become_one_dtype(tiny, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny, source, ignore=shutil.ignore_patterns("*.safetensors"))
    (source / "generation_config.json").write_text(
        '{"eos_token_id": 2, "temperature": 0.3}'
    )
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tensors = load_file(tiny / "model.safetensors")
    weight_map = {name: f"pytorch_model-{n % 2}.bin" for n, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {
            n: t.half() if "norm" not in n else t
            for n, t in tensors.items()
            if weight_map[n] == file
        }
        torch.save(part, source / file)
    (source / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    flags = [
        "--checkpoint_dir",
        source,
        "--out_dir",
        "clean",
        "--precision",
        "bf16",
        "--shard_gb",
        "0.00003",
    ]
    result = script("scripts/convert_hf_checkpoint.py", *flags, cwd=tmp_path)
    assert "tensors in torch.bfloat16, each compared" in result.stderr
    clean = tmp_path / "clean"
    files = list(clean.glob("model-*-of-*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 45_000 for file in files)
    assert {t.dtype for file in files for t in load_file(file).values()} == {torch.bfloat16}
    for name in ("tokenizer.model", "generation_config.json", "chat_template.jinja"):
        assert (clean / name).read_bytes() == (source / name).read_bytes()
    reference = transformers.AutoModelForCausalLM.from_pretrained(clean, dtype="float32")
    assert (
        relative(litft.load(clean, precision="fp32")[0](TOKENS), reference(TOKENS).logits)
        <= 1e-5
    )
    script("scripts/convert_hf_checkpoint.py", *flags, cwd=tmp_path, code=2)


TEXT = dict(
    vocab_size=640,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
)
TEXT |= dict(
    num_key_value_heads=2, head_dim=16, sliding_window=6, max_position_embeddings=64
)
QUERIES = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=8,
    llama_4_scaling_beta=0.3,
)
WRAPPED = {
    "Gemma3": (TEXT, dict(mm_tokens_per_image=4, image_token_id=90), "Gemma3ForCausalLM"),
    "Mistral3": (
        dict(TEXT, model_type="mistral"),
        dict(tie_word_embeddings=False),
        "MistralForCausalLM",
    ),
    "Mistral3, Ministral 3": (
        dict(
            TEXT, model_type="ministral3", rope_parameters=QUERIES, tie_word_embeddings=True
        ),
        dict(tie_word_embeddings=True),
        "Ministral3ForCausalLM",
    ),
}


@torch.no_grad()
def multimodal_model(name, folder):
    """Save a model of `WRAPPED` with random weights; return it."""
    text, values, _ = WRAPPED[name]
    name = name.partition(",")[0]
    vision = dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config_class, model_class = (
        getattr(transformers, f"{name}{end}")
        for end in ("Config", "ForConditionalGeneration")
    )
    torch.manual_seed(0)
    reference = model_class(
        config_class(text_config=text, vision_config=vision, **values)
    ).eval()
    for parameter in reference.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape))
    reference.save_pretrained(folder)
    return reference


def as_published(tensors):
    """Rename the tensors of a multimodal model from transformers 5's names to those of published
    checkpoints."""
    for name in list(tensors):
        tensor = tensors.pop(name)
        name = name.replace("model.language_model.", "language_model.model.").replace(
            "model.vision", "vision"
        )
        name = name.replace("model.multi_modal", "multi_modal")
        tensors[
            "language_model.lm_head.weight" if name.endswith("lm_head.weight") else name
        ] = tensor


@pytest.mark.parametrize("name", WRAPPED)
@torch.no_grad()
@pytest.mark.halved
def test_the_language_model_of_a_multimodal_folder(name, tmp_path):
    """With the published tensor names, with those of transformers 5, and as the converted text
    model."""
    reference = multimodal_model(name, tmp_path / "model")
    expected = reference(TOKENS).logits
    assert relative(litft.load(tmp_path / "model")[0](TOKENS), expected) <= 1e-5
    rewrite_tensors(tmp_path / "model", as_published)
    assert any(
        name.startswith("language_model.model.layers")
        for name in Checkpoint(tmp_path / "model").names
    )
    script(
        "scripts/convert_hf_checkpoint.py",
        "--checkpoint_dir",
        "model",
        "--out_dir",
        "text",
        cwd=tmp_path,
    )
    for folder in ("model", "text"):
        assert relative(litft.load(tmp_path / folder)[0](TOKENS), expected) <= 1e-5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert (
        type(model).__name__ == WRAPPED[name][2]
        and relative(model(TOKENS).logits, expected) <= 1e-5
    )


@pytest.mark.parametrize("published", [False, True])
@torch.no_grad()
@pytest.mark.halved
def test_a_whole_multimodal_model_is_written(published, tiny, tmp_path):
    """An adapter is merged into the language model; names, vision tensors and processor files stay
    as they were."""
    multimodal_model("Gemma3", tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").write_text('{"size": 28}')
    if published:
        rewrite_tensors(tmp_path / "base", as_published)
    script(
        "scripts/convert_hf_checkpoint.py",
        "--checkpoint_dir",
        "base",
        "--out_dir",
        "text",
        cwd=tmp_path,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    model = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    ).eval()
    for name, parameter in model.named_parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape) if "lora_B" in name else 0)
    model.save_pretrained(tmp_path / "adapter")
    shutil.copy(tiny / "tokenizer.model", tmp_path / "base")
    (tmp_path / "data.json").write_text(
        json.dumps([{"instruction": "a", "output": "b"}] * 9)
    )
    dry = [
        "--checkpoint_dir",
        "base",
        "--data.path",
        "data.json",
        "--data.max_seq_length",
        "60",
        "--dry_run",
    ]
    result = script("finetune/lora.py", *dry, "--data.template", "chatml", cwd=tmp_path)
    assert "(gemma3): only its language model is trained" in result.stdout
    flags = ["--base_dir", "base", "--multimodal", "true"]
    script(
        "scripts/merge_lora.py",
        "--checkpoint_dir",
        "adapter",
        "--out_dir",
        "whole",
        *flags,
        cwd=tmp_path,
    )
    before, after = Checkpoint(tmp_path / "base"), Checkpoint(tmp_path / "whole")
    assert (
        before.names == after.names
        and (tmp_path / "whole" / "preprocessor_config.json").is_file()
    )
    changed = [
        name
        for name in before.names
        if not torch.equal(before.read(name), after.read(name))
    ]
    assert len(changed) == 6 and not any("vision" in name for name in changed)
    merged = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    assert relative(merged(TOKENS).logits, model(TOKENS).logits) <= 1e-5
    # a language model alone, as full fine-tuning writes it, goes back into its multimodal folder
    script(
        "scripts/convert_to_hf.py",
        "--checkpoint_dir",
        "text",
        "--out_dir",
        "again",
        *flags,
        cwd=tmp_path,
    )
    again = Checkpoint(tmp_path / "again")
    assert again.names == before.names and all(
        torch.equal(before.read(name), again.read(name)) for name in before.names
    )
    result = script(
        "scripts/convert_to_hf.py",
        "--checkpoint_dir",
        "text",
        "--out_dir",
        "no",
        *flags[2:],
        cwd=tmp_path,
        code=2,
    )
    assert "pass the multimodal folder it comes from as --base_dir" in result.stderr
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    (tmp_path / "text" / "config.json").write_text(
        json.dumps(config | {"rms_norm_eps": 0.1})
    )
    with pytest.raises(ValueError, match=r"another one than .*norm"):
        export(
            ExportArgs(
                checkpoint_dir=str(tmp_path / "text"),
                out_dir=str(tmp_path / "no"),
                base_dir=str(tmp_path / "base"),
                multimodal=True,
            )
        )


SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=4,
)
SMALL |= dict(num_key_value_heads=2, head_dim=8, pad_token_id=0)
TOWER = dict(
    hidden_size=16,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    patch_size=14,
)
PROJECTOR = dict(
    image_size=28,
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
OTHERS = {
    "Llama4": (dict(intermediate_size_mlp=40, num_local_experts=4), TOWER | PROJECTOR),
    "Qwen3_5": (
        LINEAR,
        dict(
            depth=1,
            hidden_size=16,
            num_heads=2,
            out_hidden_size=32,
            num_position_embeddings=16,
        ),
    ),
    "Gemma4": (
        dict(
            global_head_dim=12,
            hidden_size_per_layer_input=10,
            vocab_size_per_layer_input=96,
        ),
        TOWER,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_a_multimodal_folder_is_read_and_written_unchanged(name, tmp_path):
    text, vision = OTHERS[name]
    config_class, model_class = (
        getattr(transformers, f"{name}{end}")
        for end in ("Config", "ForConditionalGeneration")
    )
    torch.manual_seed(0)
    reference = model_class(
        config_class(text_config=SMALL | text, vision_config=vision)
    ).eval()
    for parameter in reference.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    reference.save_pretrained(tmp_path / "base")
    # 5.23: Llama 4 needs an image
    expected = getattr(reference, "language_model", reference)(TOKENS).logits
    assert relative(litft.load(tmp_path / "base")[0](TOKENS), expected) <= 1e-5
    export(
        ExportArgs(
            checkpoint_dir=str(tmp_path / "base"),
            out_dir=str(tmp_path / "whole"),
            multimodal=True,
        )
    )
    before, after = Checkpoint(tmp_path / "base"), Checkpoint(tmp_path / "whole")
    assert before.names == after.names and all(
        torch.equal(before.read(name), after.read(name)) for name in before.names
    )


@torch.no_grad()
def test_mxfp4_is_dequantized_as_transformers_does(make_model, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values = dict(
        ROWS["gpt_oss"][1]["sinks, experts"], hidden_size=64, intermediate_size=96
    )
    reference, folder = make_model(transformers.GptOssConfig, **values)
    source = shutil.copytree(folder, tmp_path / "source")
    generator = torch.Generator().manual_seed(0)

    def quantize(tensors):
        for layer, block in enumerate(reference.model.layers):
            for name, (rows, width) in {
                "gate_up_proj": (192, 64),
                "down_proj": (64, 96),
            }.items():
                blocks = torch.randint(
                    256, (5, rows, width // 32, 16), dtype=torch.uint8, generator=generator
                )
                scales = torch.randint(
                    122, 127, (5, rows, width // 32), dtype=torch.uint8, generator=generator
                )
                key = f"model.layers.{layer}.mlp.experts.{name}"
                del tensors[key]
                tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
                getattr(block.mlp.experts, name).copy_(
                    convert_moe_packed_tensors(blocks, scales).float()
                )

    rewrite_tensors(source, quantize)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    expected = reference(TOKENS).logits
    assert relative(litft.load(source, precision="fp32")[0](TOKENS), expected) <= 1e-5
    script(
        "scripts/convert_hf_checkpoint.py",
        "--checkpoint_dir",
        "source",
        "--out_dir",
        "clean",
        cwd=tmp_path,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "clean", dtype="float32"
    )
    assert relative(model(TOKENS).logits, expected) <= 1e-5
    rewrite_tensors(
        source, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj_scales")
    )
    with pytest.raises(
        ValueError, match=r"missing model\.layers\.1\.mlp\.experts\.down_proj_scales"
    ):
        resolve(source).check()


@torch.no_grad()
def test_gpt2_without_its_prefix_and_with_its_masks(make_model, tmp_path):
    """The tensors of openai-community/gpt2 as published."""
    reference, folder = make_model(transformers.GPT2Config, **ROWS["gpt2"][1]["tied"])
    source = shutil.copytree(folder, tmp_path / "source")

    def as_published(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128).tril().bool()
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    rewrite_tensors(source, as_published)
    assert relative(litft.load(source)[0](TOKENS), reference(TOKENS).logits) <= 1e-5


@pytest.mark.slow
def test_a_run_checkpoint_converts_to_a_loadable_folder(tiny, examples, tmp_path):
    """The last step equals final/ bit for bit; merged or unmerged, also from a run that was
    killed."""
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    )
    (tmp_path / "mine.jinja").write_text(
        template + "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--out_dir",
        "run",
        "--train.max_steps",
        "4",
    ]
    flags += [
        "--data.template",
        "mine.jinja",
        "--save.interval",
        "2",
        "--train.micro_batch_size",
        "8",
    ]
    script("finetune/lora.py", *flags, cwd=tmp_path)
    command = ["scripts/convert_to_hf.py", "--checkpoint_dir"]
    script(
        *command,
        "run/checkpoints/step-000004",
        "--merge",
        "false",
        "--out_dir",
        "adapter",
        cwd=tmp_path,
    )
    expected, _ = litft.load(tmp_path / "run")
    model, tokenizer = litft.load(tmp_path / "adapter")
    tokens = draw(1, 20, seed=1)
    assert torch.equal(model(tokens), expected(tokens)) and tokenizer is not None
    script(*command, "run", "--out_dir", "merged", "--shard_gb", "0.00005", cwd=tmp_path)
    assert relative(litft.load(tmp_path / "merged")[0](tokens), expected(tokens)) <= 1e-5
    # the same template for training and serving
    for name in ("chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "adapter" / name).read_text() == (
            tmp_path / "run" / "final" / name
        ).read_text()
    assert template in (tmp_path / "adapter" / "chat_template.jinja").read_text()
    shutil.rmtree(tmp_path / "run" / "final")
    done = script(*command, "run", "--out_dir", "unfinished", cwd=tmp_path)
    assert (
        "warning: the run run has not finished; its newest checkpoint, step-" in done.stderr
    )
    assert (
        relative(litft.load(tmp_path / "unfinished")[0](tokens), expected(tokens)) <= 1e-5
    )
    script(*command, "run/checkpoints/step-000002", "--out_dir", "earlier", cwd=tmp_path)
    assert relative(litft.load(tmp_path / "earlier")[0](tokens), expected(tokens)) >= 1e-5
    config = (tmp_path / "run" / "config.yaml").read_text()
    early = "run/checkpoints/step-000002"
    for before, after, message in (
        ("  r: 32", "  r: 4", "was saved with lora.r 32, now 4"),
        (
            str(tiny),
            "moved",
            "was trained on moved, which does not exist; pass its current location as --base_dir",
        ),
    ):
        assert before in config
        (tmp_path / "run" / "config.yaml").write_text(config.replace(before, after))
        assert (
            message
            in script(*command, early, "--out_dir", "bad", cwd=tmp_path, code=2).stderr
        )
    script(*command, early, "--base_dir", tiny, "--out_dir", "again", cwd=tmp_path)
    assert (
        load_file(tmp_path / "again" / "model.safetensors").keys()
        == load_file(tiny / "model.safetensors").keys()
    )
    other = shutil.copytree(tiny, tmp_path / "other")
    rewrite_tensors(
        other, lambda tensors: [tensor.mul_(1.5) for tensor in tensors.values()]
    )
    result = script(
        *command, early, "--base_dir", other, "--out_dir", "bad", cwd=tmp_path, code=2
    )
    assert "was saved with base model" in result.stderr
    assert not (tmp_path / "bad").exists() and not list(tmp_path.glob("*.partial"))
    (tmp_path / "run" / "config.yaml").unlink()
    result = script(
        *command, "run/checkpoints/step-000002", "--out_dir", "lost", cwd=tmp_path, code=2
    )
    assert "is not inside a run of litft" in result.stderr


@pytest.mark.weekly
def test_memory_stays_at_one_shard(tmp_path):
    """Rewriting a model of 3 GB, in shards of at most 0.6 GB, takes at most the memory of one shard
    plus 1 GB."""
    from accelerate import init_empty_weights

    values = dict(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=23
    )
    config = transformers.LlamaConfig(
        **values, num_attention_heads=16, num_key_value_heads=4
    )
    with init_empty_weights():
        shapes = {
            n: t.shape
            for n, t in transformers.LlamaForCausalLM(config).state_dict().items()
        }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config.to_dict()))
    weight_map, shard, number = {}, {}, 0
    for index, (name, shape) in enumerate(shapes.items(), 1):
        shard[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        if sum(t.nbytes for t in shard.values()) > 4.5e8 or index == len(shapes):
            save_file(
                shard,
                tmp_path / "model" / f"model-{number}.safetensors",
                metadata={"format": "pt"},
            )
            weight_map |= dict.fromkeys(shard, f"model-{number}.safetensors")
            shard, number = {}, number + 1
    (tmp_path / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size > 2.9e9
    flags = ["--checkpoint_dir", "model", "--out_dir", "out", "--shard_gb", "0.6"]
    # not ru_maxrss, which includes the memory of pytest, the parent process
    code = "import sys, re; from litft.cli import run; run('convert_hf_checkpoint', sys.argv[1:])\n"
    code += "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    (tmp_path / "measured.py").write_text(code)
    result = script(tmp_path / "measured.py", *flags, cwd=tmp_path)
    peak = int(result.stdout.split()[-1]) * 1024
    print(f"peak memory {peak / 1e9:.2f} GB for {size / 1e9:.2f} GB in shards of 0.6 GB")
    assert peak < 0.6e9 + 1e9
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) >= 5


def test_unsupported_sources_are_refused(tiny, tmp_path):
    command = ["scripts/convert_hf_checkpoint.py", "--out_dir", "out"]
    assert "--checkpoint_dir is missing" in script(*command, cwd=tmp_path, code=2).stderr
    original = tmp_path / "original"
    original.mkdir()
    shutil.copyfile(tiny / "config.json", original / "config.json")
    (original / "consolidated.00.pth").write_bytes(b"x")
    result = script(*command, "--checkpoint_dir", original, cwd=tmp_path, code=2)
    assert "the original layout of Meta" in result.stderr
    quantized = shutil.copytree(tiny, tmp_path / "quantized")
    config = (quantized / "config.json").read_text()
    (quantized / "config.json").write_text(
        re.sub("^{", '{"quantization_config": {"quant_method": "gptq"},', config)
    )
    result = script(*command, "--checkpoint_dir", quantized, cwd=tmp_path, code=2)
    assert "its weights are quantized (gptq, None bits)" in result.stderr
    assert not (tmp_path / "out").exists()
    fp8 = shutil.copytree(tiny, tmp_path / "fp8")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite_tensors(
        fp8, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
    )
    assert (
        f"{name}: stored as torch.float8_e4m3fn"
        in script(*command, "--checkpoint_dir", fp8, cwd=tmp_path, code=2).stderr
    )
    with pytest.raises(ValueError, match="is a full model, not an adapter"):
        export(
            ExportArgs(
                checkpoint_dir=str(tiny),
                out_dir=str(tmp_path / "out"),
                dequantized_base=True,
            )
        )


def test_files_next_to_the_target_are_left_alone(tiny, tmp_path):
    """Also if the target is a link to an empty folder."""
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("keep")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for out in ("out", "link"):
        script(
            "scripts/convert_hf_checkpoint.py",
            "--checkpoint_dir",
            tiny,
            "--out_dir",
            out,
            cwd=tmp_path,
        )
        assert litft.load(tmp_path / out)[1] is not None
    assert (tmp_path / "out.partial" / "mine").read_text() == "keep"
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 4


def test_another_name_for_a_known_network_is_offered_and_converted(
    make_model, tmp_path, capsys
):
    """Remote code that is Llama under another name: offered, and read only when the family is
    named."""
    reference, folder = make_model(transformers.LlamaConfig, tie_word_embeddings=True)
    custom = tmp_path / "custom"
    custom.mkdir()
    (custom / "model.safetensors").symlink_to(folder / "model.safetensors")
    hf = json.loads((folder / "config.json").read_text("utf-8"))
    hf |= {
        "model_type": "mycompany",
        "auto_map": {"AutoModelForCausalLM": "modeling.Mine"},
        "secret_sauce": 3,
    }
    (custom / "config.json").write_text(json.dumps(hf))
    with pytest.raises(
        ValueError,
        match=r"'mycompany' is not supported.*\n.*names and shapes of llama.*--family llama",
    ):
        litft.load(custom)
    out = convert(
        ConvertArgs(
            checkpoint_dir=str(custom), out_dir=str(tmp_path / "out"), family="llama"
        )
    )
    assert "secret_sauce" in capsys.readouterr().err
    written = json.loads((out / "config.json").read_text("utf-8"))
    assert written["model_type"] == "llama" and "auto_map" not in written
    tokens = draw(1, 20, seed=1)
    with torch.no_grad():
        assert relative(litft.load(out)[0](tokens), reference(tokens).logits) <= 1e-5
    with pytest.raises(ValueError, match=r"do not match its config\.json"):
        convert(
            ConvertArgs(
                checkpoint_dir=str(custom), out_dir=str(tmp_path / "other"), family="qwen3"
            )
        )


def test_what_is_written_names_no_code_and_fp16_overflow_is_refused(tiny, tmp_path):
    """A repository's own code is not copied, so nothing may refer to it; fp16 has no numbers above
    65,504."""
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((base / name).read_text())
        (base / name).write_text(
            json.dumps(content | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}})
        )
    convert(ConvertArgs(checkpoint_dir=str(base), out_dir=str(tmp_path / "out")))
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "out" / name).read_text()), name
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float() + 70_000
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"norm.weight contains 7e\+04, which is out of range for fp16"
    ):
        convert(
            ConvertArgs(
                checkpoint_dir=str(base), out_dir=str(tmp_path / "half"), precision="fp16"
            )
        )
    convert(
        ConvertArgs(
            checkpoint_dir=str(base), out_dir=str(tmp_path / "bf16"), precision="bf16"
        )
    )


def test_a_merged_run_of_full_fine_tuning_is_a_whole_model_already(
    tiny, examples, tmp_path
):
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--train.max_steps",
        "1",
        "--out_dir",
        "run",
    ]
    script("finetune/full.py", *flags, "--eval.max_new_tokens", "0", cwd=tmp_path)
    done = script(
        "scripts/merge_lora.py",
        "--checkpoint_dir",
        "run",
        "--out_dir",
        "merged",
        cwd=tmp_path,
        code=2,
    )
    assert "is a whole model already" in done.stderr
