"""LoRA against PEFT: adapter files in both directions, ten training steps, dtypes, errors and
shared base weights."""

import csv
import json

import pytest
import torch
from conftest import adapted, script
from parity import load_hf, perturb
from peft_reference import TOKENS, peft_losses, write_adapter

import litft
from litft.args import AdapterV2Args, DataArgs, LoRAArgs
from litft.data.dataset import load_data
from litft.inference.fused_linears import pack_weights
from litft.methods import AdapterV2, LoRA, disabled
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.pretrained.load import load_models, load_network


def attached(folder, precision=None, **values):
    """Return (model, method, source) for a model with fresh LoRA factors."""
    source, method = resolve(folder), LoRA(LoRAArgs(**values))
    model = base_model(source, precision)
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    return model, method, source


@pytest.mark.parametrize(
    "values",
    [
        {},
        dict(target_modules=["q_proj", "v_proj"]),
        dict(use_rslora=True, r=6),
        dict(
            rank_pattern={"down_proj": 2, "layers.1.self_attn.q_proj": 7},
            alpha_pattern={"v_proj": 32},
        ),
        dict(alpha_pattern={r".*\.(q|k)_proj": 4, "layers.[01].mlp.*": 2}),
        dict(layers_to_transform=[1], target_modules=["o_proj", "up_proj"]),
    ],
    ids=["plain", "two targets", "rslora", "patterns", "expressions", "one layer"],
)
@torch.no_grad()
def test_reads_what_peft_wrote(tiny, tmp_path, values):
    reference = write_adapter(tiny, tmp_path, **values)
    model, _ = litft.load(tmp_path)
    torch.testing.assert_close(
        model(TOKENS), reference.eval()(TOKENS).logits, rtol=0, atol=1e-4
    )
    with disabled(model):
        assert torch.equal(model(TOKENS), litft.load(tiny)[0](TOKENS))


@pytest.mark.parametrize(
    "targets",
    [
        ["all-linear"],
        ["q_proj", "mlp.down_proj"],
        ["blocks.1.*"],
        ["model.layers.?.self_attn.o_proj"],
    ],
)
@torch.no_grad()
def test_peft_reads_what_we_wrote(tiny, tmp_path, targets):
    from peft import PeftModel

    model, method, source = attached(tiny, r=3, alpha=5, targets=targets)
    perturb(method.parameters(model).values())
    method.write(
        tmp_path, source, method.values(model), {"base_model_name_or_path": str(tiny)}
    )
    reference = PeftModel.from_pretrained(load_hf(tiny), tmp_path).eval()
    assert sum("lora_A" in name for name, _ in reference.named_parameters()) == len(
        method.specs
    )
    torch.testing.assert_close(model(TOKENS), reference(TOKENS).logits, rtol=0, atol=1e-4)
    reread, _ = litft.load(tmp_path)
    assert torch.equal(reread(TOKENS), model(TOKENS))


@pytest.mark.parametrize("rslora", [False, True])
def test_scales_equal_pefts(tiny, tmp_path, rslora):
    patterns = dict(rank_pattern={"down_proj": 2}, alpha_pattern={"v_proj": 32})
    reference = write_adapter(tiny, tmp_path, use_rslora=rslora, **patterns)
    expected = [m.scaling["default"] for m in reference.modules() if hasattr(m, "lora_A")]
    flags = dict(
        r=4,
        alpha=8,
        rank_pattern=["down_proj=2"],
        alpha_pattern=["v_proj=32"],
        rslora=rslora,
    )
    method = attached(tiny, **flags)[1]
    assert [site.scale for site in method.specs.values()] == pytest.approx(expected)
    assert len(set(expected)) == 3


@pytest.mark.parametrize(
    "values",
    [
        dict(rank_pattern={"down_proj": 2}, alpha_pattern={"v_proj": 32}),
        dict(use_rslora=True),
    ],
)
@torch.no_grad()
def test_reading_and_writing_an_adapter_preserves_it(tiny, tmp_path, values):
    from peft import PeftModel

    expected = write_adapter(tiny, tmp_path / "first", **values).eval()(TOKENS).logits
    source = resolve(tmp_path / "first")
    method, values = source.read_adapter()
    (tmp_path / "second").mkdir()
    method.write(
        tmp_path / "second", source, values, {"base_model_name_or_path": str(tiny)}
    )
    logits = (
        PeftModel.from_pretrained(load_hf(tiny), tmp_path / "second").eval()(TOKENS).logits
    )
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_ten_steps_match_peft(tiny, examples, tmp_path):
    """Start from random A *and* B, with micro-batches of 4 and a learning rate at which the loss
    falls by 0.3."""
    reference = write_adapter(tiny, tmp_path / "adapter").train()
    for path in tiny.glob("*token*"):
        (tmp_path / "adapter" / path.name).write_bytes(path.read_bytes())
    _, tokenizer = litft.load(tmp_path / "adapter")
    samples = load_data(
        DataArgs(path=[str(examples)], val_fraction=0), tokenizer, 512, 256
    ).train
    expected = peft_losses(reference, samples, 0.007, 10)
    flags = (
        f"--checkpoint_dir adapter --data.path {examples} --data.val_fraction 0 --out_dir run "
        "--train.max_steps 10 "
    )
    flags += (
        "--train.learning_rate 0.007 --train.lr_schedule constant --train.warmup_fraction 0 "
        "--train.weight_decay 0.01 "
    )
    flags += "--train.global_batch_size 30 --train.micro_batch_size 4"
    script("finetune/lora.py", *flags.split(), cwd=tmp_path)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert expected[0] - expected[-1] >= 0.3
    assert losses == pytest.approx(expected, abs=2e-5)
    model, _ = litft.load(tmp_path / "run")
    with torch.no_grad():
        torch.testing.assert_close(
            model(TOKENS), reference.eval()(TOKENS).logits, rtol=0, atol=2e-3
        )


@torch.no_grad()
def test_dropout_acts_in_training_only(tiny):
    model, method, _ = attached(tiny, dropout=0.5)
    perturb(method.parameters(model).values())
    assert torch.equal(model.eval()(TOKENS), model(TOKENS))
    assert not torch.equal(model.train()(TOKENS), model(TOKENS))


def test_factors_stay_fp32_on_a_bf16_base(tiny):
    model, method, _ = attached(tiny, "bf16")
    assert {p.dtype for p in method.parameters(model).values()} == {torch.float32}
    loss, _ = model(TOKENS[:, :-1], targets=TOKENS[:, 1:])
    loss.backward()
    assert model.embed.weight.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert {p.grad.dtype for p in method.parameters(model).values()} == {torch.float32}


@torch.no_grad()
def test_a_small_update_survives_a_bf16_base(tiny):
    """An update of 1e-3 of the output is added before rounding, as in PEFT; fp64 is the
    reference."""
    torch.manual_seed(0)
    from litft.methods.lora_modules import LoRALinear

    linear = torch.nn.Linear(64, 64, bias=False).bfloat16()
    x, weight = torch.randn(200, 64).bfloat16(), linear.weight.double()
    LoRALinear.convert_module(linear).add_factors(4, 1.0, 0.0)
    linear.reset_parameters()
    linear.lora_b.copy_(torch.randn(64, 4) * 2e-3)
    update = (x.double() @ linear.lora_a.double().T) @ linear.lora_b.double().T
    exact = (x.double() @ weight.T).bfloat16().double() + update
    # the factors themselves are rounded to bf16
    assert (linear(x) == exact.bfloat16()).float().mean() > 0.98
    projections = [
        ((y.double() - exact + update) * update).sum() / update.square().sum()
        for y in (linear(x), exact.bfloat16())
    ]
    assert float(projections[0]) == pytest.approx(float(projections[1]), rel=0.01)


@torch.no_grad()
def test_dora_leaves_a_row_of_zeros_unchanged(tiny):
    source = resolve(tiny)
    model, method = base_model(source), LoRA(LoRAArgs(dora=True))
    model.blocks[1].attention.o_proj.weight[3] = 0.0
    expected = model(TOKENS)
    method.select_targets(source.meta_model(), source.adapter_rules)
    method.attach(model)
    assert torch.equal(model(TOKENS), expected)


def test_the_loss_includes_new_tokens_of_a_trained_head(tiny):
    """The loss treats a fully trained head like a plain Linear, unless token rows are applied on
    top of it."""
    source = resolve(tiny)
    method = LoRA(LoRAArgs(targets=["q_proj"], modules_to_save=["lm_head"]))
    method.tokens = {512: [3], 40: [4]}
    method.select_targets(source.meta_model(), source.adapter_rules)
    model = base_model(source)
    method.attach(model)
    tokens = TOKENS.masked_fill(TOKENS % 3 == 0, 512)
    loss, _ = model(tokens[:, :-1], targets=tokens[:, 1:])
    logits = model(tokens[:, :-1]).flatten(0, 1)
    torch.testing.assert_close(
        loss,
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"),
    )
    loss.backward()
    assert model.lm_head.token_rows.grad.any()


def test_invalid_ranks_and_unknown_modules_are_reported(tiny):
    source = resolve(tiny)
    for values, message in (
        (
            dict(rank_pattern=["nothing=3"]),
            "--lora.rank_pattern nothing=3: no adapted module has that name",
        ),
        (
            dict(targets=["q_proj"], alpha_pattern=["v_proj=3"]),
            "--lora.alpha_pattern v_proj=3: no adapted module",
        ),
        (
            dict(modules_to_save=["nothing"]),
            "--lora.modules_to_save nothing: no module of this model",
        ),
        (
            dict(targets=["q_proj"], modules_to_save=["q_proj"]),
            "all of them are in --lora.modules_to_save",
        ),
        (dict(r=65, init="pissa"), "--lora.r 65: --lora.init pissa allows at most rank 32"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRA(LoRAArgs(**values)).select_targets(
                source.meta_model(), source.adapter_rules
            )


@pytest.mark.parametrize(
    "targets, message",
    [
        (
            ["nothing"],
            "nothing: no Linear of this model has that name; choose from down_proj",
        ),
        (["norm"], "norm: no Linear"),
    ],
)
def test_an_unknown_target_is_reported(tiny, targets, message):
    source = resolve(tiny)
    with pytest.raises(ValueError, match=message):
        LoRA(LoRAArgs(targets=targets)).select_targets(
            source.meta_model(), source.adapter_rules
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_dora": 1}, "use_dora 1 is not valid"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "new tokens need"),
        ({"base_model_name_or_path": "far/away"}, "pass --base_dir"),
        ({"base_model_name_or_path": 5}, "must be text"),
        ({"lora_alpha": "16"}, "lora_alpha '16' is not valid"),
        ({"lora_alpha": None}, "lora_alpha None is not valid"),
        ({"alpha_pattern": {"(": 3}}, r"alpha_pattern '\(' is not valid"),
        ({"use_rslora": "no"}, "use_rslora 'no' is not valid"),
        ({"litft": [1]}, "record must be an object"),
    ],
)
def test_invalid_adapter_configs_are_refused(tiny, tmp_path, change, message):
    write_adapter(tiny, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        litft.load(tmp_path)


def test_an_adapter_of_another_base_is_refused(tiny, make_model, examples, tmp_path):
    from transformers import LlamaConfig

    script(
        *f"finetune/lora.py --checkpoint_dir {tiny} --data.path {examples} --train.max_steps 1 "
        "--out_dir run".split(),
        cwd=tmp_path,
    )
    other, folder = make_model(LlamaConfig, vocab_size=512, max_position_embeddings=256)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    other.save_pretrained(folder)
    with pytest.raises(ValueError, match="was trained on another base"):
        litft.load(tmp_path / "run", base_dir=folder)
    result = script(
        "generate/base.py",
        "--checkpoint_dir",
        "run",
        "--base_dir",
        folder,
        "--prompt",
        "a",
        cwd=tmp_path,
        code=2,
    )
    assert "was trained on another base" in result.stderr


@torch.no_grad()
@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_models_on_one_base_share_its_tensors(checkpoints, tmp_path, quantize):
    """Each gives the logits it gives when loaded alone, packed too; the base's weights are in
    memory once."""
    base = checkpoints["stories"]
    methods = [
        LoRA(LoRAArgs(targets=["all-linear"])),
        LoRA(LoRAArgs(dora=True, targets=["q_proj"])),
        AdapterV2(AdapterV2Args()),
    ]
    folders = [
        base,
        *(adapted(base, tmp_path / str(n), method) for n, method in enumerate(methods)),
    ]
    sources = [resolve(folder, base) for folder in folders]
    tokens = torch.randint(0, 500, (2, 9), generator=torch.Generator().manual_seed(0))
    separate_logits = [
        load_network(source, "fp32", "cpu", quantize)(tokens) for source in sources
    ]
    models = load_models(sources, "fp32", "cpu", quantize)
    assert all(
        torch.equal(model(tokens), expected)
        for model, expected in zip(models, separate_logits, strict=True)
    )
    assert (
        len({model.blocks[0].attention.o_proj.weight.data_ptr() for model in models}) == 1
    )
    pack_weights(models)
    for model, expected in zip(models, separate_logits, strict=True):
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)
    packed = [model.blocks[0].mlp.gate_proj.weight for model in models]
    assert all(weight is packed[0] for weight in packed)
    assert quantize or packed[0].is_mkldnn


def test_fully_trained_modules_on_a_quantized_base_must_be_loaded_alone(
    checkpoints, tmp_path
):
    base = checkpoints["stories"]
    adapter = adapted(
        base,
        tmp_path / "whole",
        LoRA(LoRAArgs(targets=["q_proj"], modules_to_save=["down_proj"])),
    )
    with pytest.raises(
        ValueError, match=r"5 modules .* nf4 for the others; load that adapter alone"
    ):
        load_models([resolve(base), resolve(adapter)], "fp32", "cpu", "nf4")
    assert len(load_models([resolve(base), resolve(adapter)], "fp32", "cpu", None)) == 2
    assert len(load_models([resolve(adapter)], "fp32", "cpu", "nf4")) == 1
    # norms, the embedding and the head are never quantized
    plain = adapted(
        base,
        tmp_path / "norms",
        LoRA(LoRAArgs(targets=["q_proj"], modules_to_save=["norm", "lm_head"])),
    )
    assert len(load_models([resolve(base), resolve(plain)], "fp32", "cpu", "nf4")) == 2


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_table_that_training_has_rounded_is_the_bases(tiny, tmp_path, module, dora):
    """PEFT saves the base's table beside the factors, in the dtype of the training."""
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", module], use_dora=dora)
    trained = get_peft_model(load_hf(tiny).to(torch.bfloat16), config)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    source = resolve(tmp_path / "adapter", tiny)
    method, _ = source.read_adapter()
    assert not method.tokens
    model = load_network(source, "fp32", "cpu", None)
    with torch.no_grad():
        logits = model(TOKENS)
        reference = PeftModel.from_pretrained(load_hf(tiny), tmp_path / "adapter")
        expected = reference.eval()(TOKENS).logits
    # PEFT puts the rounded table into the base
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < 0.02


def test_the_bases_bias_beside_a_saved_module_is_not_the_adapters(make_model, tmp_path):
    """PEFT writes both with bias="all"."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config

    _, folder = make_model(GPT2Config)
    config = LoraConfig(
        r=2,
        target_modules=["c_attn"],
        modules_to_save=["ln_f"],
        bias="all",
        fan_in_fan_out=True,
    )
    trained = get_peft_model(load_hf(folder), config).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    trained.save_pretrained(tmp_path / "adapter")
    model = load_network(resolve(tmp_path / "adapter", folder), "fp32", "cpu", None)
    tokens = TOKENS % model.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens), trained(tokens).logits, rtol=1e-4, atol=1e-5
        )


def test_a_heads_bias_beside_its_table_is_not_trained(make_model, tmp_path):
    """PEFT saves it with the base's table."""
    from peft import LoraConfig, get_peft_model
    from transformers import PhiConfig

    _, folder = make_model(PhiConfig)
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    trained = get_peft_model(load_hf(folder), config)
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    method, _ = resolve(tmp_path / "adapter", folder).read_adapter()
    assert method.trained_in_full == []
