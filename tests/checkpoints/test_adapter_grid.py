"""Every kind of LoRA adapter that PEFT saves: it is loaded, merged, trained on and returned to
PEFT, or refused."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from parity import relative
from safetensors.torch import load_file, save_file

import litft
from litft.args import LoRAFinetuneArgs, MergeArgs
from litft.args.parser import parse
from litft.commands.merge_lora import merge
from litft.pretrained.build import fill_model, unfilled_model
from litft.pretrained.folder import DEMO, resolve
from litft.training.network import build_trained_network
from litft.training.run_setup import resolve_setup

V = 1024
SIZES = dict(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=256)
BASES = {
    "tied": ("LlamaConfig", SIZES | dict(tie_word_embeddings=True)),
    "untied": ("LlamaConfig", SIZES | dict(tie_word_embeddings=False)),
    "biases": ("Qwen2Config", SIZES | dict(tie_word_embeddings=False)),
    "experts": ("MixtralConfig", SIZES | dict(num_local_experts=4)),
    "lfm2": ("Lfm2Config", SIZES | dict(layer_types=["conv", "full_attention", "conv"])),
    "gpt2": (
        "GPT2Config",
        dict(vocab_size=V, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    ),
}
QV = ["q_proj", "v_proj"]


class Kind(NamedTuple):
    """A base, settings of PEFT's LoraConfig, rows to add to the vocabulary, and how two adapters
    are summed."""

    base: str
    settings: dict
    resized: int = 0
    weighted: str = ""


def kind(base, resized=0, weighted="", targets=QV, **settings):
    """Return a kind of adapter."""
    return Kind(base, dict(target_modules=targets, **settings), resized, weighted)


ALL = [*QV, "embed_tokens", "lm_head"]
KINDS = {
    "q and v": kind("tied"),
    "all-linear": kind("untied", targets="all-linear"),
    "ranks": kind("untied", rank_pattern={"q_proj": 2}),
    "scales": kind("untied", alpha_pattern={"v_proj": 3}),
    "patterns": kind(
        "untied",
        rank_pattern={
            r"layers\.[01]\.self_attn\.q_proj": 2,
            "^model.layers.2.self_attn.v_proj": 5,
        },
        alpha_pattern={r".*layers\.2.*": 9},
    ),
    "regex": kind("untied", targets=r".*\.(q_proj|down_proj)"),
    "regex of layers": kind("untied", targets=r"model\.layers\.[02]\..*(k_proj|up_proj)"),
    "one layer": kind("untied", layers_to_transform=1),
    "some layers": kind("untied", layers_to_transform=[0, 2], layers_pattern="layers"),
    "excluded": kind("untied", targets="all-linear", exclude_modules=["down_proj"]),
    "rslora": kind("tied", use_rslora=True),
    "dora": kind("tied", targets="all-linear", use_dora=True),
    "dora, rslora": kind(
        "untied", use_dora=True, use_rslora=True, rank_pattern={"q_proj": 2}
    ),
    "dora, saved head": kind("untied", use_dora=True, modules_to_save=["lm_head"]),
    "biases": kind("biases", bias="all"),
    "biases of targets": kind("biases", bias="lora_only"),
    "saved, tied together": kind(
        "tied", modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "lora, tied together": kind(
        "tied", targets=[*QV, "embed_tokens"], ensure_weight_tying=True
    ),
    "init gaussian": kind("untied", init_lora_weights="gaussian"),
    "init orthogonal": kind("untied", init_lora_weights="orthogonal"),
    "init mica": kind("untied", init_lora_weights="mica"),
    "init off": kind("untied", init_lora_weights=False),
    "pissa": kind("untied", targets=[*QV, "down_proj"], init_lora_weights="pissa"),
    "pissa, rslora": kind(
        "untied", init_lora_weights="pissa", use_rslora=True, rank_pattern={"q_proj": 2}
    ),
    "pissa, dora": kind("untied", init_lora_weights="pissa", use_dora=True),
    "olora": kind("untied", init_lora_weights="olora"),
    "gpt2 pissa": kind(
        "gpt2", targets=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights="pissa"
    ),
    "experts": kind(
        "experts", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
    "experts alone": kind(
        "experts",
        targets=[],
        target_parameters=["mlp.experts.down_proj"],
        rank_pattern={"experts.down_proj": 2},
    ),
    "gpt2": kind("gpt2", targets=["c_attn"], fan_in_fan_out=True),
    "gpt2 dora": kind(
        "gpt2", targets=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, use_dora=True
    ),
    "gpt2 embedding": kind("gpt2", targets=["c_attn", "wte"], fan_in_fan_out=True),
    "tokens of the embedding, saved head": kind(
        "untied",
        trainable_token_indices={"embed_tokens": [5, 9]},
        modules_to_save=["lm_head"],
    ),
    "tokens of the embedding, lora of the head": kind(
        "untied", targets=[*QV, "lm_head"], trainable_token_indices={"embed_tokens": [5, 9]}
    ),
    "tokens, lora of the tied head": kind(
        "tied", targets=[*QV, "lm_head"], trainable_token_indices=[5, 9]
    ),
    "more rows, tokens of the embedding, saved head": kind(
        "untied", 4, trainable_token_indices=[5, 9], modules_to_save=["lm_head"]
    ),
    "own head, lfm2": kind("lfm2", modules_to_save=["lm_head"]),
    "pissa of tables": kind("untied", targets=ALL, init_lora_weights="pissa"),
    **{f"sum by {how}": kind("untied", weighted=how) for how in ("cat", "linear", "svd")},
}
for base in ("tied", "untied"):
    KINDS |= {
        f"saved {names}, {base}": kind(base, modules_to_save=names.split("+"))
        for names in ("lm_head", "embed_tokens", "embed_tokens+lm_head", "norm")
    }
    KINDS |= {
        f"lora of {names}, {base}": kind(base, targets=[*QV, *names.split("+")])
        for names in ("lm_head", "embed_tokens", "embed_tokens+lm_head")
    }
    tables = {"embed_tokens": [5, 9], "lm_head": [5, 9]}
    KINDS |= {
        f"tokens, {base}": kind(base, trainable_token_indices=[5, 9]),
        f"tokens of both tables, {base}": kind(base, trainable_token_indices=tables),
        f"more rows, {base}": kind(base, 4),
        f"fewer rows, {base}": kind(base, -12),
        f"more rows, tokens, {base}": kind(base, 4, trainable_token_indices=[V, V + 2]),
        f"more rows, saved, {base}": kind(
            base, 4, modules_to_save=["embed_tokens", "lm_head"]
        ),
        f"more rows, lora of tables, {base}": kind(base, 4, targets=ALL),
    }
REFUSED = {
    "pissa_niter_4": "pissa_niter_4",
    "corda": "corda",
    "loftq": "loftq",
    "lora_ga": "lora_ga",
    "an unknown init": "of tomorrow",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of random models, with the demo's tokenizer."""
    torch.manual_seed(0)
    folders = {}
    for name, (config, values) in BASES.items():
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**values)
        ).float()
        change(model.parameters(), 0.05)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        if name == "lfm2":
            rename_field(
                folders[name] / "config.json", "tie_word_embeddings", "tie_embedding"
            )
        for path in DEMO.glob("base/*token*"):
            shutil.copy(path, folders[name])
    return folders


def rename_field(path: Path, name: str, published: str):
    """Give a field of a config.json the name that it has in published folders."""
    config = json.loads(path.read_text())
    config[published] = config.pop(name)
    path.write_text(json.dumps(config))


@torch.no_grad()
def change(parameters, by=0.1):
    """Add normal noise to parameters."""
    for parameter in parameters:
        parameter.add_(by * torch.randn(parameter.shape))


def write_with_peft(folder: Path, out: Path, item: Kind):
    """Save an adapter with random values; return PEFT's model and the adapter's folder."""
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if item.resized:
        model.resize_token_embeddings(V + item.resized)
    settings = dict(r=4, lora_alpha=7, task_type="CAUSAL_LM", **item.settings)
    model = get_peft_model(model, LoraConfig(**settings)).eval()
    change(p for n, p in model.named_parameters() if "lora_" in n or p.requires_grad)
    if not item.weighted:
        model.save_pretrained(out)
        return model, out
    model.add_adapter("second", LoraConfig(**settings | dict(lora_alpha=3)))
    change(p for n, p in model.named_parameters() if "second" in n)
    model.add_weighted_adapter(
        ["default", "second"], [0.7, 0.5], "sum", combination_type=item.weighted
    )
    model.set_adapter("sum")
    model.eval().save_pretrained(out, selected_adapters=["sum"])
    return model, out / "sum"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.halved
def test_an_adapter_is_loaded_merged_trained_on_and_returned(bases, tmp_path, capsys, name):
    from peft import PeftModel

    item = KINDS[name]
    base = bases[item.base]
    torch.manual_seed(1)
    tokens = torch.randint(V + min(item.resized, 0), (2, 19))
    with torch.no_grad():
        reference, folder = write_with_peft(base, tmp_path / "adapter", item)
        expected = reference(tokens).logits

    def error(logits) -> float:
        # a base may have more rows than the adapter
        width = min(logits.size(-1), expected.size(-1))
        return relative(logits[..., :width], expected[..., :width])

    with torch.no_grad():
        assert error(litft.load(folder, base_dir=base)[0](tokens)) <= 1e-5

    # as a run that continues from the adapter builds it; every parameter that it trains gets a
    # gradient
    args = parse(
        LoRAFinetuneArgs,
        ["--checkpoint_dir", str(folder), "--data.path", "x.jsonl", "--precision", "fp32"],
    )
    source = resolve(folder, base)
    setup = resolve_setup(args, source)
    if item.resized <= 0 and "trainable_token_indices" not in item.settings:
        assert not setup.method.tokens
    network = build_trained_network(setup, "fp32", torch.device("cpu"))
    model, parameters = network.model, network.parameters
    logits = model(tokens)
    assert error(logits.detach()) <= 1e-5
    logits.square().mean().backward()
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in trained
    )

    returned = tmp_path / "returned"
    returned.mkdir()
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    setup.method.write(returned, source, values, {"base_model_name_or_path": str(base)})
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    record = returned / "litft.json"
    size = json.loads(record.read_text()).get("vocab_size") if record.is_file() else None
    assert size == (V + item.resized if item.resized > 0 else None)
    if size:
        model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        assert (
            error(PeftModel.from_pretrained(model, returned).eval()(tokens).logits) <= 1e-5
        )
        assert error(litft.load(returned, base_dir=base)[0](tokens)) <= 1e-5

        flags = dict(checkpoint_dir=[str(folder)], base_dir=str(base), precision="fp32")
        merge(MergeArgs(out_dir=str(tmp_path / "merged"), **flags))
        merged = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float32
        )
        assert error(merged(tokens).logits) <= 1e-5
        config = json.loads((tmp_path / "merged" / "config.json").read_text())
        # the only base with this field gets a head of its own
        assert config.get("tie_embedding", False) is False


@pytest.mark.parametrize("name", REFUSED)
def test_an_initialization_that_changes_the_base_is_refused(bases, tmp_path, name):
    """PEFT repeats it, or keeps the changed base, when it opens the adapter: its files do not tell
    the result."""
    write_with_peft(bases["untied"], tmp_path, KINDS["ranks"])
    path = tmp_path / "adapter_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"init_lora_weights": REFUSED[name]})
    )
    with pytest.raises(
        ValueError,
        match=f"init_lora_weights '{REFUSED[name]}' changes the weights of the base",
    ):
        litft.load(tmp_path, base_dir=bases["untied"])


@pytest.mark.parametrize(
    "setting",
    [
        {"use_qalora": True},
        {"lora_bias": True},
        {"layer_replication": [[0, 2]]},
        {"kasa_config": {"a": 1}},
    ],
)
def test_another_variant_is_refused(bases, tmp_path, setting):
    write_with_peft(bases["untied"], tmp_path, KINDS["ranks"])
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    with pytest.raises(ValueError, match=f"{next(iter(setting))} .* is not supported"):
        litft.load(tmp_path, base_dir=bases["untied"])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lm_head.lora_B.weight": torch.ones(3)}, "lm_head should have two matrices"),
        ({"lm_head.lora_B.weight": None}, "lm_head lacks lora_B"),
        ({"lm_head.lora_A.weight": torch.ones(4, 64, 1)}, "lm_head should"),
        (
            {"model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(4, 64)},
            "matches no module of the base",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(bases, tmp_path, changes, message):
    write_with_peft(bases["untied"], tmp_path, KINDS["lora of lm_head, untied"])
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path) | {
        f"base_model.model.{name}": value for name, value in changes.items()
    }
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    with pytest.raises(ValueError, match=message):
        litft.load(tmp_path, base_dir=bases["untied"])


NARROWED = [
    ({"target_modules": ["q_proj"]}, "target_modules leave out .*v_proj"),
    ({"target_modules": None}, "target_modules leave out"),
    (
        {"target_modules": r".*\.layers\.0\..*"},
        r"target_modules leave out model\.layers\.1",
    ),
    ({"layers_to_transform": [0]}, r"layers_to_transform leave out model\.layers\.1"),
    (
        {"layers_to_transform": 1, "layers_pattern": "layers"},
        r"layers_to_transform leave out model\.layers\.0",
    ),
    ({"exclude_modules": ["v_proj"]}, "exclude_modules leave out .*v_proj"),
    ({"exclude_modules": r".*v_proj"}, "exclude_modules leave out .*v_proj"),
    ({"use_dora": True}, "use_dora is true, but .* has no magnitudes"),
    ({"r": 8}, "has the rank 8, but 4 in"),
    ({"rank_pattern": {"q_proj": 2}}, "has the rank 2, but 4 in"),
    ({"r": 4.0}, "r 4.0 is not valid"),
]


@pytest.mark.parametrize("changes, message", NARROWED, ids=lambda value: str(value)[:30])
def test_a_config_that_leaves_out_what_the_file_has_is_refused(
    bases, tmp_path, changes, message
):
    """PEFT ignores such weights, or does not open the folder."""
    write_with_peft(bases["untied"], tmp_path, kind("untied"))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        litft.load(tmp_path, base_dir=bases["untied"])


def test_pissa_of_a_tied_head_is_refused(bases, tmp_path):
    """PEFT then subtracts from the embedding, too."""
    item = kind("tied", targets=[*QV, "lm_head"], init_lora_weights="pissa")
    write_with_peft(bases["tied"], tmp_path, item)
    with pytest.raises(ValueError, match="'pissa' of lm_head is not supported"):
        litft.load(tmp_path, base_dir=bases["tied"])


@pytest.mark.parametrize("saved", [5, [5], "lm_head"])
def test_invalid_modules_to_save_are_refused(bases, tmp_path, saved):
    write_with_peft(bases["untied"], tmp_path, KINDS["ranks"])
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules_to_save": saved}))
    with pytest.raises(ValueError, match=r"modules_to_save .* is not valid"):
        litft.load(tmp_path, base_dir=bases["untied"])


def test_dora_of_a_table_with_new_tokens_is_refused_before_training(bases):
    flags = [
        "--data.path",
        "x.jsonl",
        "--data.new_tokens",
        "<x1>,<x2>",
        "--lora.dora",
        "true",
    ]
    args = parse(
        LoRAFinetuneArgs,
        ["--checkpoint_dir", "x", *flags, "--lora.targets", "q_proj,embed_tokens"],
    )
    with pytest.raises(
        ValueError, match=r"leave embed_tokens and lm_head out of --lora\.targets"
    ):
        resolve_setup(args, resolve(bases["untied"]))


def test_a_parameter_without_a_value_from_the_files_is_an_error(bases):
    """What is built on the meta device and not filled would be whatever memory held."""
    source = resolve(bases["tied"])
    model = unfilled_model(source, "fp32")
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.embed.weight))
    model.blocks[0].attention.q_proj.weight = model.blocks[1].attention.q_proj.weight
    # an untied head is filled, and tied parameters share their value
    fill_model(source, model, "fp32", "cpu")
    assert torch.equal(model.lm_head.weight, model.embed.weight)
    model.blocks[0].mlp.up_proj.weight = torch.nn.Parameter(torch.empty(96, 64))
    source.checked_mappings[:] = [
        m for m in source.checked_mappings if "blocks.0.mlp.up_proj.weight" not in m.targets
    ]
    with pytest.raises(
        RuntimeError, match=r"blocks\.0\.mlp\.up_proj\.weight was built, but not filled"
    ):
        fill_model(source, model, "fp32", "cpu")
