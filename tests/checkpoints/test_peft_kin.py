"""LoRA variants and LLaMA-Adapter against PEFT: files in both directions, logits, gradients, ten
training steps."""

import csv
import json
import shutil

import pytest
import torch
import transformers
from conftest import adapted, script
from parity import ROWS, build, draw, load_hf, perturb, relative
from peft_reference import peft_losses

import litft
from litft.args import AdapterArgs, DataArgs, LoRAArgs, MergeArgs
from litft.commands.merge_lora import merge
from litft.data.dataset import load_data
from litft.methods import Adapter, LoRA
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.pretrained.save import Result, write_result

TOKENS = draw(2, 23, seed=8)
VARIANTS = {
    "dora": (LoRAArgs(r=3, dora=True), dict(use_dora=True)),
    "dora of some, rslora": (
        LoRAArgs(r=3, dora=True, rslora=True, targets=["v_proj", "up_proj"]),
        dict(use_dora=True, use_rslora=True),
    ),
    "ends": (
        LoRAArgs(r=3, targets=["q_proj", "embed", "lm_head"]),
        dict(adapt_embeddings=True),
    ),
    "dora of ends": (
        LoRAArgs(r=3, dora=True, targets=["embed", "o_proj"]),
        dict(adapt_embeddings=True, use_dora=True),
    ),
    "biases of adapted": (
        LoRAArgs(r=3, targets=["q_proj", "up_proj"], bias="lora"),
        dict(bias="lora_only"),
    ),
    "all biases": (
        LoRAArgs(r=3, targets=["v_proj", "o_proj"], bias="all"),
        dict(bias="all"),
    ),
    "whole ends, norm": (
        LoRAArgs(r=3, targets=["k_proj"], modules_to_save=["embed", "lm_head", "norm"]),
        dict(save_modules=True),
    ),
}
FOLDERS = {
    "llama": dict(attention_bias=True, mlp_bias=True),
    "llama, tied": dict(tie_word_embeddings=True),
    "gpt_neox": {},
    "gpt2": dict(n_inner=56, max_position_embeddings=128),
    "phi3": {},
    "gemma": dict(num_key_value_heads=1, head_dim=16),
}


# every variant on the two families that differ most; DoRA and fully trained modules on the others,
# with other layouts
CASES = [(variant, family) for family in ("llama, tied", "gpt2") for variant in VARIANTS]
CASES += [
    (variant, family)
    for family in FOLDERS
    if family not in ("llama, tied", "gpt2")
    for variant in ("dora", "whole ends, norm")
]


@pytest.fixture(scope="module")
def folders(make_model):
    """Return a function from a family's name to its model folder, which is created on first use."""
    folder_by_name = {}

    def folder(name):
        if name not in folder_by_name:
            config_class = ROWS[name.partition(",")[0]][0]
            folder_by_name[name] = make_model(
                getattr(transformers, config_class), **FOLDERS[name]
            )[1]
        return folder_by_name[name]

    return folder


def attached(folder, method):
    """Return (model, source) with a method whose parameters are all nonzero."""
    source = resolve(folder)
    method.select_targets(source.meta_model(), source.adapter_rules)
    model = base_model(source, "fp32")
    torch.manual_seed(0)
    method.attach(model)
    perturb(method.parameters(model).values())
    return model, source


@pytest.mark.parametrize("variant, family", CASES)
@torch.no_grad()
def test_peft_reads_what_we_wrote(folders, tmp_path, family, variant):
    from peft import PeftModel

    folder, method = folders(family), LoRA(VARIANTS[variant][0])
    model, source = attached(folder, method)
    method.write(
        tmp_path, source, method.values(model), {"base_model_name_or_path": str(folder)}
    )
    reference = PeftModel.from_pretrained(load_hf(folder), tmp_path).eval()
    assert relative(reference(TOKENS).logits, model(TOKENS)) <= 1e-5
    assert relative(litft.load(folder)[0](TOKENS), model(TOKENS)) >= 1e-3


@pytest.mark.parametrize("variant, family", CASES)
@torch.no_grad()
def test_reads_what_peft_wrote(folders, tmp_path, family, variant):
    from peft import LoraConfig, get_peft_model

    folder, values = folders(family), dict(VARIANTS[variant][1])
    base = load_hf(folder)
    embed = next(
        n for n, m in base.named_modules() if m is base.get_input_embeddings()
    ).rpartition(".")[2]
    head = next(n for n, m in base.named_modules() if m is base.get_output_embeddings())
    norm = (
        "model.norm"
        if hasattr(base, "model")
        else "final_layer_norm"
        if family == "gpt_neox"
        else "ln_f"
    )
    inner = (
        ["c_attn"]
        if family == "gpt2"
        else ["query_key_value"]
        if family == "gpt_neox"
        else ["o_proj", "down_proj"]
    )
    adapt_embeddings, save_modules = (
        values.pop("adapt_embeddings", False),
        values.pop("save_modules", False),
    )
    settings = dict(
        r=3,
        lora_alpha=7,
        target_modules=[*inner, embed] if adapt_embeddings else inner,
        **values,
    )
    if save_modules:
        settings |= dict(
            modules_to_save=[embed, norm]
            if base.config.tie_word_embeddings
            else [embed, head, norm]
        )
        settings["ensure_weight_tying"] = bool(base.config.tie_word_embeddings)
    reference = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    perturb(p for p in reference.parameters() if p.requires_grad)
    reference.save_pretrained(tmp_path)
    model, _ = litft.load(tmp_path, base_dir=folder)
    assert relative(model(TOKENS), reference(TOKENS).logits) <= 1e-5
    source, out = resolve(tmp_path, folder), tmp_path / "merged"
    out.mkdir()
    write_result(out, source, torch.float32, Result(*source.read_adapter()), 1.0)
    assert relative(litft.load(out)[0](TOKENS), model(TOKENS)) <= 1e-5
    assert relative(load_hf(out)(TOKENS).logits, model(TOKENS)) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "llama, tied", "gpt_neox"])
@torch.no_grad()
def test_new_tokens_match_pefts_trainable_tokens(folders, tmp_path, family):
    """The user resizes the base, as with adapters from PEFT; the rows come from the adapter."""
    from peft import PeftModel

    folder, method = folders(family), LoRA(LoRAArgs(r=3))
    method.tokens = {96: [5, 6], 97: [7], 40: [40]}
    model, source = attached(folder, method)
    method.write(
        tmp_path, source, method.values(model), {"base_model_name_or_path": str(folder)}
    )
    base = load_hf(folder)
    base.resize_token_embeddings(98, mean_resizing=False)
    tokens = TOKENS.clone()
    tokens[0, ::5] = torch.tensor([96, 97, 40, 96, 97])
    reference = PeftModel.from_pretrained(base, tmp_path).eval()
    assert relative(reference(tokens).logits, model(tokens)) <= 1e-5
    saved_values = sum(
        value.numel() for name, value in method.values(model).items() if "token" in name
    )
    assert saved_values == 3 * 32 * (1 if family.endswith("tied") else 2)


def prompts(model):
    """Return PEFT's prompts and gates by layer."""
    return [(n, p) for n, p in model.named_parameters() if "adaption_" in n]


@pytest.mark.parametrize(
    "values", [{}, dict(num_key_value_heads=4), dict(num_key_value_heads=1)], ids=str
)
@pytest.mark.parametrize("config_class", ["LlamaConfig", "MistralConfig"])
def test_adapter_matches_pefts_adaption_prompt(make_model, tmp_path, config_class, values):
    """Compare logits and gradients with nonzero gates, and exchange files in both directions."""
    from peft import AdaptionPromptConfig, PeftModel, get_peft_model

    _, folder = make_model(getattr(transformers, config_class), sliding_window=9, **values)
    config = AdaptionPromptConfig(adapter_len=5, adapter_layers=2, task_type="CAUSAL_LM")
    reference = get_peft_model(load_hf(folder), config).eval()
    perturb([p for _, p in prompts(reference)], seed=7)
    reference.save_pretrained(tmp_path / "peft")
    source = resolve(tmp_path / "peft", folder)
    model = base_model(source, "fp32")
    method, tensors = source.read_adapter()
    method.load(model, tensors)
    losses = []
    for forward in (lambda t: model(t), lambda t: reference(t).logits):
        loss = torch.nn.functional.cross_entropy(
            forward(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten()
        )
        loss.backward()
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    parameters = list(method.parameters(model).values())
    assert len(parameters) == 4
    # a gate's own may cancel
    largest = max(float(parameter.grad.abs().max()) for parameter in parameters)
    for (_, reference_parameter), parameter in zip(
        prompts(reference), parameters, strict=True
    ):
        assert (
            float((parameter.grad - reference_parameter.grad).abs().max()) <= 1e-5 * largest
        )
    with torch.no_grad():
        assert relative(model(TOKENS), reference(TOKENS).logits) <= 1e-5
        assert relative(litft.load(folder)[0](TOKENS), model(TOKENS)) >= 1e-3
        (tmp_path / "litft").mkdir()
        method.write(
            tmp_path / "litft",
            source,
            method.values(model),
            {"base_model_name_or_path": str(folder)},
        )
        reread = PeftModel.from_pretrained(load_hf(folder), tmp_path / "litft").eval()
        assert relative(reread(TOKENS).logits, model(TOKENS)) <= 1e-5
    assert (
        json.loads((tmp_path / "litft" / "adapter_config.json").read_text())["peft_type"]
        == "ADAPTION_PROMPT"
    )


def test_adapters_that_peft_would_compute_differently_are_not_offered_to_it(
    folders, tmp_path
):
    """PEFT adds a Llama's o_proj bias twice and supports few families: other adapters have a type
    that PEFT rejects."""
    from peft import PeftConfig

    for number, name in enumerate(("llama", "gpt2", "phi3")):
        folder, method = folders(name), Adapter(AdapterArgs(prompt_length=4))
        model, source = attached(folder, method)
        out = tmp_path / str(number)
        out.mkdir()
        method.write(
            out, source, method.values(model), {"base_model_name_or_path": str(folder)}
        )
        assert (
            json.loads((out / "adapter_config.json").read_text())["peft_type"]
            == "LITFT_ADAPTER"
        )
        with pytest.raises(KeyError, match="LITFT_ADAPTER"):
            PeftConfig.from_pretrained(out)


FLAGS = (
    "--data.val_fraction 0 --train.max_steps 10 --train.lr_schedule constant "
    "--train.warmup_fraction 0 --train.global_batch_size 30 --train.micro_batch_size 30 "
    "--train.weight_decay 0 --train.learning_rate 0.003"
)
TEN_STEPS = {
    "lora": ("", {}),
    "rslora": ("", dict(use_rslora=True, r=6, lora_alpha=3)),
    "dora": ("", dict(use_dora=True)),
    "pissa": ("--lora.init pissa", dict(init_lora_weights="pissa")),
    "olora": (
        "--lora.init olora --lora.alpha 4",
        dict(init_lora_weights="olora", lora_alpha=4),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        "lora",
        pytest.param("rslora", marks=pytest.mark.weekly),
        "dora",
        pytest.param("pissa", marks=pytest.mark.weekly),
        pytest.param("olora", marks=pytest.mark.weekly),
    ],
)
@pytest.mark.halved
def test_ten_steps_match_peft(tiny, examples, tmp_path, variant):
    """Start from an adapter with random A and B; PiSSA and OLoRA start from their own
    initialization."""
    from peft import LoraConfig, get_peft_model

    flags, values = TEN_STEPS[variant]
    settings = dict(r=4, lora_alpha=8, target_modules="all-linear") | values
    if variant in ("pissa", "olora"):
        flags += " --lora.r 4" + (" --lora.alpha 8" if variant == "pissa" else "")
    reference = get_peft_model(
        load_hf(tiny), LoraConfig(task_type="CAUSAL_LM", **settings)
    ).train()
    checkpoint = tiny
    if "init_lora_weights" not in values:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "lora_A" in name or "lora_B" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        checkpoint, flags = tmp_path / "adapter", ""
        reference.save_pretrained(checkpoint)
        (checkpoint / "adapter_config.json").write_text(
            json.dumps(
                json.loads((checkpoint / "adapter_config.json").read_text())
                | {"base_model_name_or_path": str(tiny)}
            )
        )
    _, tokenizer = litft.load(tiny)
    samples = load_data(
        DataArgs(path=[str(examples)], val_fraction=0), tokenizer, 512, 256
    ).train
    expected = peft_losses(reference, samples, 0.003, 10, decay=0.0)
    command = f"--checkpoint_dir {checkpoint} --data.path {examples} --out_dir run {FLAGS} {flags}"
    script("finetune/lora.py", *command.split(), cwd=tmp_path)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert expected[0] - expected[-1] >= 0.3
    assert losses == pytest.approx(expected, abs=2e-5)


def test_patterns_name_the_modules_of_networks_with_experts(tmp_path):
    """PEFT before transformers 5 has adapted a shared expert's Linears as modules, whose names in
    alpha_pattern do not end with .weight."""
    config_class, variations = ROWS["qwen2_moe"]
    build(config_class, tmp_path / "base", **variations["shared expert"])
    method = LoRA(LoRAArgs(r=2, targets=["*.shared_expert.down_proj"]))
    adapter = adapted(tmp_path / "base", tmp_path / "adapter", method)
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    module = config["target_parameters"][0].removesuffix(".weight").rpartition(".")[2]
    for named_as, expected in (("a module", 32.0), ("a parameter", 4.0)):
        changed = {"alpha_pattern": {module: 64}, "lora_alpha": 8}
        if named_as == "a module":
            changed |= {"target_modules": [module], "target_parameters": None}
        path.write_text(json.dumps(config | changed))
        method, _ = LoRA.read(adapter, resolve(adapter))
        assert {spec.scale for spec in method.specs.values()} == {expected}, named_as


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["q_proj.weight", "q_proj"])
def test_a_linear_that_peft_adapts_as_a_parameter_has_the_patterns_of_one(
    make_model, tmp_path, pattern
):
    """PEFT looks for the parameter's name in alpha_pattern."""
    from peft import LoraConfig, get_peft_model

    _, folder = make_model(transformers.LlamaConfig)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[],
        target_parameters=["q_proj.weight"],
        alpha_pattern={pattern: 16},
    )
    model = get_peft_model(load_hf(folder), config).eval()
    perturb({name: p for name, p in model.named_parameters() if "lora_" in name}.values())
    model.save_pretrained(tmp_path)
    ours = litft.load(tmp_path, base_dir=folder)[0](TOKENS)
    assert relative(ours, model(TOKENS).logits) <= 1e-5


def test_an_adapter_that_is_written_again_keeps_its_dropout(make_model, tmp_path):
    _, folder = make_model(transformers.LlamaConfig)
    first = adapted(folder, tmp_path / "first", LoRA(LoRAArgs(r=2, dropout=0.1)))
    source = resolve(first)
    method, values = LoRA.read(first, source)
    (tmp_path / "second").mkdir()
    method.write(tmp_path / "second", source, values, {})
    config = json.loads((tmp_path / "second" / "adapter_config.json").read_text())
    assert config["lora_dropout"] == 0.1

    path = first / "adapter_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"lora_dropout": "much"}))
    with pytest.raises(
        ValueError, match=r"lora_dropout must be at least 0 .* found 'much'"
    ):
        LoRA.read(first, source)


def test_an_adapter_opened_by_a_link_has_the_base_beside_the_folder(make_model, tmp_path):
    """Its path to the base is relative to the folder, not to the link."""
    _, made = make_model(transformers.LlamaConfig)
    folder = tmp_path / "deep" / "er" / "base"
    shutil.copytree(made, folder)
    adapter = tmp_path / "deep" / "er" / "run" / "final"
    adapter.parent.mkdir()
    adapted(folder, adapter, LoRA(LoRAArgs(r=2)))
    (tmp_path / "link").symlink_to(adapter)
    assert resolve(tmp_path / "link").base == folder


@torch.no_grad()
def test_an_update_of_the_embeddings_per_layer_is_merged(tmp_path):
    config_class, variations = ROWS["gemma3n_text"]
    build(config_class, tmp_path / "base", **variations["four streams, shared keys"])
    method = LoRA(LoRAArgs(r=2, targets=["embed_tokens_per_layer"]))
    adapter = adapted(tmp_path / "base", tmp_path / "adapter", method)
    tokens = draw(1, 20, seed=1)
    expected = litft.load(adapter)[0](tokens)
    assert relative(litft.load(tmp_path / "base")[0](tokens), expected) > 1e-3
    merge(MergeArgs(checkpoint_dir=[str(adapter)], out_dir=str(tmp_path / "merged")))
    assert relative(litft.load(tmp_path / "merged")[0](tokens), expected) <= 1e-5


@torch.no_grad()
def test_dora_with_trained_biases_keeps_the_dtype(tmp_path):
    """Trained biases are in fp32."""
    build("Qwen2Config", tmp_path / "base")
    source = resolve(tmp_path / "base")
    method = LoRA(LoRAArgs(r=2, dora=True, bias="all", targets=["q_proj", "v_proj"]))
    method.select_targets(source.outline, source.adapter_rules)
    model = base_model(source, "bf16")
    method.attach(model)
    assert model(draw(1, 20, seed=1)).isfinite().all()
    assert (
        model.blocks[0].attention.q_proj(torch.ones(1, 1, 32).bfloat16()).dtype
        == torch.bfloat16
    )
