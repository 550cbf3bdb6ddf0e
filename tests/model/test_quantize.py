"""Quantized base models: equal to bitsandbytes, small memory while loading, checkpoints that are
already quantized."""

import json
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ENV, ROOT, script
from parity import ROWS, draw, relative

import litft
from litft.args import ConvertArgs, LoRAArgs, LoRAFinetuneArgs
from litft.commands.convert_hf_checkpoint import convert
from litft.methods import LoRA
from litft.model.linear import Linear
from litft.model.quantization import (
    KINDS,
    QuantizedLinear,
    QuantizedTensor,
    quantize_dequantize,
)
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.training.run_setup import resolve_setup

TOKENS = draw(2, 23, seed=8)
WIDE = dict(hidden_size=64, intermediate_size=128)  # blocks of 64 do not cross rows
# of GPT-2, which `load_bnb` leaves in train mode
NO_DROPOUT = dict(n_inner=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def load_bnb(folder, kind, plain=()):
    """Load a folder in transformers with bitsandbytes layers, except the head and the modules in
    `plain`."""
    settings = (
        dict(load_in_8bit=True)
        if kind == "int8"
        else dict(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind[:3],
            bnb_4bit_use_double_quant=kind.endswith("dq"),
            bnb_4bit_compute_dtype=torch.float32,
        )
    )
    config = transformers.BitsAndBytesConfig(
        **settings, llm_int8_skip_modules=["lm_head", *plain]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    for module in model.modules():
        # otherwise some CPUs multiply 4-bit weights in bf16
        module.support_avx512bf16_for_cpu = False
    # in eval mode int8 would round activations, too; there is no dropout
    return model.train()


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_equal_bitsandbytes(kind):
    """Against bitsandbytes, and against the definition: each weight becomes the nearest code of its
    block or row."""
    import bitsandbytes as bnb

    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    if kind == "int8":
        parameter = bnb.nn.Int8Params(weight, requires_grad=False).to("cpu")
        quantized, expected = (
            parameter.CB,
            (weight / weight.abs().amax(1, keepdim=True) * 127).round(),
        )
        assert (expected - quantized).abs().max() <= 1  # bitsandbytes rounds to fp16 first
        dense_weight = expected * weight.abs().amax(1, keepdim=True) / 127
    else:
        nested = kind.endswith("dq")
        parameter = bnb.nn.Params4bit(
            weight, quant_type=kind[:3], compress_statistics=nested, requires_grad=False
        ).to("cpu")
        quantized, code = parameter.data, parameter.quant_state.code
        scaled = weight / weight.abs().amax(1, keepdim=True)
        dense_weight = code[
            (scaled[..., None] - code).abs().argmin(-1)
        ] * weight.abs().amax(1, keepdim=True)
    packed = QuantizedTensor.quantize(weight, kind)
    assert torch.equal(packed.data, quantized) and packed.dequantize().shape == (48, 64)
    assert relative(packed.dequantize(), dense_weight) <= 0.02
    assert torch.equal(
        quantize_dequantize(weight, kind, torch.float32), packed.dequantize()
    )


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_quantized_llama_equals_transformers(make_model, kind):
    _, folder = make_model(transformers.LlamaConfig, **WIDE)
    reference, (model, _) = (
        load_bnb(folder, kind),
        litft.load(folder, precision="fp32", quantize=kind),
    )
    assert sum(isinstance(m, QuantizedLinear) for m in model.modules()) == 3 * 7
    assert type(model.lm_head) is Linear
    assert relative(model(TOKENS), reference(TOKENS).logits) <= 1e-5
    assert relative(litft.load(folder)[0](TOKENS), model(TOKENS)) >= 1e-3


@pytest.mark.parametrize("family, name", [("gpt_oss", "sinks, experts"), ("gpt2", "tied")])
@torch.no_grad()
def test_weights_beside_packed_ones_keep_their_layout(make_model, tmp_path, family, name):
    """bitsandbytes packs Linears: not gpt-oss' stacked experts, nor a Conv1D that is left out."""
    config_class, variations = ROWS[family]
    values = {**variations[name], **WIDE}
    if family == "gpt2":
        values |= NO_DROPOUT
    _, folder = make_model(getattr(transformers, config_class), **values)
    reference = load_bnb(folder, "nf4", plain=["c_attn", "router"])
    reference.save_pretrained(tmp_path)
    model, _ = litft.load(tmp_path, precision="fp32")
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert relative(model(TOKENS), reference(TOKENS).logits) <= 1e-5


@pytest.mark.parametrize(
    "family, name",
    [("llama", "grouped"), ("gpt_neox", "parallel, partial"), ("gpt2", "tied")],
)
@pytest.mark.parametrize("kind", ["nf4", "fp4-dq", "int8"])
@torch.no_grad()
def test_a_quantized_checkpoint_is_loaded_and_converted(
    make_model, tmp_path, family, name, kind
):
    """The checkpoint is loaded unchanged and converted to unquantized weights.

    Those of GPT-2 are transposed.
    """
    config_class, variations = ROWS[family]
    values = NO_DROPOUT if family == "gpt2" else {}
    _, folder = make_model(
        getattr(transformers, config_class), **{**variations[name], **WIDE, **values}
    )
    reference = load_bnb(folder, kind)
    reference.save_pretrained(tmp_path / "quantized")
    model, _ = litft.load(tmp_path / "quantized", precision="fp32")
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    # fused tensors are split and quantized again, with the same scales
    assert relative(model(TOKENS), reference(TOKENS).logits) <= 1e-5
    convert(
        ConvertArgs(
            checkpoint_dir=str(tmp_path / "quantized"),
            out_dir=str(tmp_path / "plain"),
            precision="fp32",
        )
    )
    plain, _ = litft.load(tmp_path / "plain")
    assert relative(plain(TOKENS), reference(TOKENS).logits) <= 1e-5
    assert "quantization_config" not in json.loads(
        (tmp_path / "plain" / "config.json").read_text()
    )
    with pytest.raises(ValueError, match=f"is already quantized as {kind}"):
        resolve_setup(
            LoRAFinetuneArgs(quantize="nf4" if kind == "int8" else "int8"),
            resolve(tmp_path / "quantized"),
        )


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@torch.no_grad()
def test_unquantized_layers_of_a_quantized_checkpoint_stay_unquantized(
    make_model, tmp_path, kind
):
    _, folder = make_model(transformers.LlamaConfig, **WIDE)
    reference = load_bnb(folder, kind, plain=["q_proj"])
    reference.save_pretrained(tmp_path)
    model, _ = litft.load(tmp_path, precision="fp32")
    assert type(model.blocks[0].attention.q_proj) is Linear
    assert isinstance(model.blocks[0].attention.k_proj, QuantizedLinear)
    assert relative(model(TOKENS), reference(TOKENS).logits) <= 1e-5


@pytest.mark.parametrize("kind", ["nf4-dq", "int8"])
def test_quantization_statistics_move_with_the_weights(tiny, kind):
    """Those of quantized weights and the row norms of DoRA, with unchanged dtypes."""
    source, method = resolve(tiny), LoRA(LoRAArgs(dora=True))
    method.select_targets(source.meta_model(), source.adapter_rules)
    model = base_model(source, "fp32", quantize=kind)
    method.attach(model)
    before = model(TOKENS)
    assert torch.equal(model.to(torch.device("cpu"))(TOKENS), before)
    q = model.to("meta").blocks[0].attention.q_proj
    state, moved = q.state, [q.weight, q.base_row_squares]
    moved += (
        [state]
        if kind == "int8"
        else [
            state.absmax,
            state.code,
            state.offset,
            state.state2.absmax,
            state.state2.code,
        ]
    )
    assert (
        all(tensor.is_meta for tensor in moved)
        and q.base_row_squares.dtype == torch.float32
    )


@pytest.mark.slow
def test_training_on_a_quantized_base(tiny, examples, tmp_path):
    """With the scripts: two processes train as one, the result generates and merges both ways, with
    the right warnings."""
    flags = (
        f"--checkpoint_dir {tiny} --data.path {examples} --quantize nf4 --train.learning_rate 0.01 "
        "--train.max_steps 6"
    )
    for name, more_flags in (("one", ""), ("two", "--devices 2")):
        script(
            "finetune/lora.py",
            *f"{flags} --out_dir {name} {more_flags}".split(),
            cwd=tmp_path,
        )
    rows = [
        (tmp_path / name / "metrics.csv").read_text().splitlines()
        for name in ("one", "two")
    ]
    losses = [[float(line.split(",")[4]) for line in lines[2:]] for lines in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]
    ask = (
        "generate/base.py",
        "--checkpoint_dir",
        "one",
        "--prompt",
        "Say it",
        "--max_new_tokens",
        "4",
        "--quantize",
    )
    assert "warning" not in script(*ask, "nf4", cwd=tmp_path).stderr
    assert (
        "was trained with --quantize nf4, but is used with --quantize none"
        in script(*ask, "none", cwd=tmp_path).stderr
    )
    merged = script(
        "scripts/merge_lora.py",
        "--checkpoint_dir",
        "one",
        "--out_dir",
        "original",
        cwd=tmp_path,
    )
    assert (
        "quantized as nf4 in training; the updates are added to the original weights"
        in merged.stderr
    )
    merge = (
        "scripts/merge_lora.py",
        "--checkpoint_dir",
        "one",
        "--dequantized_base",
        "--out_dir",
        "rounded",
    )
    rounded = script(*merge, cwd=tmp_path).stderr
    assert "added to the dequantized weights of the base" in rounded
    # the merged models say how far they are from the adapter on the quantized base
    compared = r"a KL divergence of (\S+) nats per token.* after (\S+)% of 256 tokens"
    to_original = re.search(compared, merged.stderr)
    to_rounded = re.search(compared, rounded)
    assert float(to_original[1]) > 1e-6 > float(to_rounded[1])
    assert to_rounded[2] == "100.0"
    with torch.no_grad():
        expected = litft.load(tmp_path / "one", quantize="nf4")[0](TOKENS)
        assert relative(litft.load(tmp_path / "rounded")[0](TOKENS), expected) <= 1e-5
        assert relative(litft.load(tmp_path / "original")[0](TOKENS), expected) >= 1e-3
    resume = ("finetune/lora.py", "--resume", "--out_dir", "one", "--quantize", "int8")
    assert (
        "was saved with quantize nf4, now int8"
        in script(*resume, cwd=tmp_path, code=2).stderr
    )


def test_unsupported_quantization_is_refused(tiny, examples, tmp_path):
    flags = ["--checkpoint_dir", tiny, "--data.path", examples, "--quantize"]
    result = script("finetune/full.py", *flags, "nf4", cwd=tmp_path, code=2)
    assert "full fine-tuning cannot train quantized weights" in result.stderr
    assert "expected none" in script(
        "finetune/lora.py", *flags, "nf8", cwd=tmp_path, code=2
    ).stderr.replace("'", "")


LOADS = """
import re, sys, threading, time, torch
from pathlib import Path
import bitsandbytes
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
# anonymous memory only: pages of mapped files belong to the page cache, and the kernel may drop them
def rss(): return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
source = resolve(sys.argv[1])
from litft.model.quantization import QuantizedTensor
QuantizedTensor.quantize(torch.randn(64, 64), "nf4").dequantize()
before, peak = rss(), 0
def watch():
    global peak
    while True:
        peak = max(peak, rss())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
model = base_model(source, "bf16", quantize=sys.argv[2])
param_bytes = sum(p.nbytes for p in model.parameters())
print(before, param_bytes, peak)
"""


@pytest.mark.weekly
def test_memory_stays_near_the_quantized_size(tmp_path):
    """For a sharded model of 1.1 GB, the peak is the size of the parameters plus some copies of one
    Linear."""
    from safetensors.torch import save_file

    config = dict(
        model_type="llama",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=16,
    )
    config |= dict(vocab_size=512, num_key_value_heads=16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{name}_proj": (2048, 2048) for name in "qkvo"}
    shapes |= {
        "mlp.gate_proj": (8192, 2048),
        "mlp.up_proj": (8192, 2048),
        "mlp.down_proj": (2048, 8192),
    }
    index, weights = (
        {},
        {name: torch.randn(shape).bfloat16() * 0.02 for name, shape in shapes.items()},
    )
    for layer in range(8):
        file = f"model-{layer + 1:05d}-of-00008.safetensors"
        tensors = {
            f"model.layers.{layer}.{name}.weight": value for name, value in weights.items()
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {
            f"model.layers.{layer}.{name}.weight": torch.ones(2048).bfloat16()
            for name in norms
        }
        if layer == 0:
            tensors |= {
                name: torch.randn(512, 2048).bfloat16()
                for name in ("model.embed_tokens.weight", "lm_head.weight")
            }
            tensors["model.norm.weight"] = torch.ones(2048).bfloat16()
        save_file(tensors, tmp_path / file)
        index |= dict.fromkeys(tensors, file)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    for kind, max_ratio in (("nf4", 0.27), ("int8", 0.51)):
        command = [sys.executable, "-c", LOADS, str(tmp_path), kind]
        # without this threshold, glibc retains freed blocks of up to 32 MB, sometimes 1 GB in total
        env = ENV | {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "1000000"}
        result = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True
        )
        before, params, peak = map(int, re.findall(r"\d+", result.stdout)[-3:])
        print(
            f"{kind}: {on_disk / 1e9:.2f} GB on disk, {params / 1e9:.2f} kept, a peak of "
            f"{(peak - before) / 1e9:.2f} more"
        )
        assert params <= max_ratio * on_disk
        # bitsandbytes makes some fp32 copies of one Linear while it quantizes on a CPU
        assert peak - before <= params * 1.15 + 8 * 8192 * 2048 * 4


@pytest.mark.parametrize(
    "damage, message",
    [
        ("no absmax", "is quantized in a format unknown to bitsandbytes"),
        ("short absmax", "do not form a matrix of shape"),
        ("other shape", "expected shape"),
        ("no json", "is quantized in a format"),
        ("half the bits", "do not form a matrix of shape"),
    ],
)
def test_quantized_tensors_of_the_wrong_size_are_refused(
    make_model, tmp_path, damage, message
):
    """Compiled code would read out of bounds."""
    from safetensors.torch import load_file, save_file

    _, folder = make_model(transformers.LlamaConfig, **WIDE)
    load_bnb(folder, "nf4").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stem = "model.layers.1.mlp.up_proj.weight"
    state = f"{stem}.quant_state.bitsandbytes__nf4"
    if damage == "no absmax":
        del tensors[f"{stem}.absmax"]
    elif damage == "short absmax":
        tensors[f"{stem}.absmax"] = tensors[f"{stem}.absmax"][:3].clone()
    elif damage == "half the bits":
        tensors[stem] = tensors[stem][:100].clone()
    else:
        values = json.loads(bytes(tensors[state].tolist())) | {"shape": [64, 4096]}
        text = "{" if damage == "no json" else json.dumps(values)
        tensors[state] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        litft.load(tmp_path)


@pytest.mark.slow
def test_bitsandbytes_does_not_access_the_network(tmp_path):
    """On some CPUs its import would download code with `kernels`.

    Both the download and its warning are suppressed.
    """
    (tmp_path / "kernels.py").write_text("raise SystemExit('fetched from the hub')")
    code = (
        "from litft.model.quantization import bitsandbytes; bitsandbytes(); import sys; "
        "print('kernels' in sys.modules)"
    )
    env = ENV | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n" and not result.stderr


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    "shape", [(64, 64), (288, 288), (96, 32), (10, 96), (7, 100), (3, 33), (1, 5), (48, 56)]
)
def test_packed_codes_dequantize_as_in_the_paper(shape, kind):
    """The value of a code times the maximum of its block of 64 in row-major order, also if blocks
    cross rows."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = QuantizedTensor.quantize(weight, kind)
    count, codes = weight.numel(), packed.data.view(-1).to(torch.long)
    code_values = packed.state.code[
        torch.stack((codes >> 4, codes & 15), 1).view(-1)[:count]
    ]
    block_max = (
        F.pad(weight.view(-1), (0, -count % 64))
        .view(-1, 64)
        .abs()
        .amax(1)
        .repeat_interleave(64)[:count]
    )
    torch.testing.assert_close(
        packed.dequantize(), (code_values * block_max).view(shape), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        packed.dequantize(torch.bfloat16).float(), packed.dequantize(), rtol=8e-3, atol=0
    )


@pytest.mark.parametrize("order", [0, 2])
def test_int8_of_a_gpus_own_order_is_refused(order):
    """As older versions of bitsandbytes saved it: all shapes fit."""
    weight = QuantizedTensor.quantize(torch.randn(64, 32), "int8")
    stored = {"weight": weight.data, "SCB": weight.state}
    stored["weight_format"] = torch.tensor(order, dtype=torch.uint8)
    if order:
        with pytest.raises(ValueError, match=r"weight_format 2: only rows \(0\)"):
            QuantizedTensor.from_state(stored)
    else:
        assert torch.equal(QuantizedTensor.from_state(stored).data, weight.data)
