"""Adapters of multimodal bases in the real vLLM, if LITFT_VLLM_PYTHON names the interpreter of an environment with it."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

import litft
from litft.args import LoRAArgs
from litft.methods import LoRA
from litft.pretrained import DEMO, resolve

VLLM = os.environ.get("LITFT_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="set LITFT_VLLM_PYTHON to the interpreter of an environment with vLLM"),
]
# head sizes that vLLM has on a CPU
TEXT = dict(vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
TEXT |= dict(num_key_value_heads=2, head_dim=32, max_position_embeddings=512)
TEXT |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
TOWER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
PER_LAYER = dict(global_head_dim=64, hidden_size_per_layer_input=16, vocab_size_per_layer_input=1024, sliding_window=16)
WRAPPERS = {
    "Gemma3": (TEXT | dict(sliding_window=16), TOWER, dict(mm_tokens_per_image=4, image_token_id=90)),
    "Gemma4": (TEXT | PER_LAYER, TOWER, {}),
    "Mistral3": (TEXT | dict(model_type="mistral"), TOWER, dict(tie_word_embeddings=False)),
}
PROMPT, NUM_TOKENS = "The answer is", 16


@torch.no_grad()
def change(parameters):
    """Add normal noise to parameters."""
    for parameter in parameters:
        parameter.add_(0.1 * torch.randn(parameter.shape))


@torch.no_grad()
def greedy_tokens(folder, base):
    """Return litft's tokens."""
    model, tokenizer = litft.load(folder, base_dir=base)
    ids = tokenizer.encode(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-NUM_TOKENS:]


def add_processor(name, folder, scratch):
    """Write the files of a processor, which vLLM opens even for text alone; Gemma 4's needs more than a tiny tower."""
    special = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    names = dict(zip(("boi_token", "eoi_token", "image_token"), special, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=names)
    tokenizer.add_tokens(special, special_tokens=True)
    images = transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28})
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(scratch)
    for path in scratch.glob("*" if name == "Gemma3" else "processor_config.json"):
        shutil.copy(path, folder)


@pytest.mark.parametrize("name", WRAPPERS)
def test_vllm_applies_an_adapter_of_a_multimodal_base(tmp_path, name):
    """It passes over modules that it does not know: with other names, the tokens were those of the base."""
    text, vision, values = WRAPPERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **values)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    change(model.parameters())
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)
    for path in DEMO.glob("base/*token*"):
        shutil.copy(path, base)
    source = resolve(base)
    model, method = source.base_model(), LoRA(LoRAArgs(r=8, alpha=16))
    method.choose(model, source.adapter_rules)
    method.attach(model)
    change(method.parameters(model).values())
    adapter.mkdir()
    method.write(adapter, source, method.values(model), {"base_model_name_or_path": str(base)})
    expected = {"base": greedy_tokens(base, None), "adapter": greedy_tokens(adapter, base)}
    assert expected["base"] != expected["adapter"]
    if name != "Mistral3":
        add_processor(name, base, tmp_path / "processor")
    command = [VLLM, Path(__file__).parents[1] / "vllm_greedy.py", base, adapter, str(NUM_TOKENS), PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == expected
