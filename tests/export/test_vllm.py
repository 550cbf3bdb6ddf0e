"""What litft writes in the real vLLM, if LITFT_VLLM_PYTHON names the interpreter of an environment
with it.

Merged folders and adapters of several families give litft's greedy tokens; `vllm serve` with the
flags of a model card
answers as litft does: chat template, end of answers, tool calls, new tokens.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
import torch
import transformers
from agents import ANSWER, ARGUMENTS, QUESTION, TOOL, follow_up, trained  # noqa: F401
from conftest import write_records

import litft
from litft.args import (
    DataArgs,
    EvalArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    MergeArgs,
    TrainArgs,
    UploadArgs,
)
from litft.commands.merge_lora import merge
from litft.export.model_card import model_card
from litft.export.upload_files import card_info
from litft.methods import LoRA
from litft.pretrained.build import base_model
from litft.pretrained.folder import DEMO, resolve

VLLM = os.environ.get("LITFT_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not VLLM,
        reason="set LITFT_VLLM_PYTHON to the interpreter of an environment with vLLM",
    ),
]
# head sizes that vLLM has on a CPU
TEXT = dict(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
)
TEXT |= dict(num_key_value_heads=2, head_dim=32, max_position_embeddings=512)
TEXT |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
TOWER = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
PER_LAYER = dict(
    global_head_dim=64,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=1024,
    sliding_window=16,
)
WRAPPERS = {
    "Gemma3": (
        TEXT | dict(sliding_window=16),
        TOWER,
        dict(mm_tokens_per_image=4, image_token_id=90),
    ),
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
    """Write the files of a processor, which vLLM opens even for text alone; Gemma 4's needs more
    than a tiny tower."""
    special = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    names = dict(zip(("boi_token", "eoi_token", "image_token"), special, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        folder, extra_special_tokens=names
    )
    tokenizer.add_tokens(special, special_tokens=True)
    images = transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28})
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(
        scratch
    )
    for path in scratch.glob("*" if name == "Gemma3" else "processor_config.json"):
        shutil.copy(path, folder)


EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
)
FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": dict(sliding_window=None),
    "Granite": dict(embedding_multiplier=2.0, logits_scaling=2.0),
    "Gemma3": dict(sliding_window=16, tie_word_embeddings=False),
    "Qwen3Moe": EXPERTS,
}


def tiny_base(name, folder):
    """Write a tiny random model of a family with the demo's tokenizer."""
    torch.manual_seed(0)
    config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**TEXT, **FAMILIES[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    change(model.parameters())
    model.save_pretrained(folder)
    for path in DEMO.glob("base/*token*"):
        shutil.copy(path, folder)


def write_adapter(base, folder):
    """Write a random LoRA of attention and dense MLPs."""
    source = resolve(base)
    model = base_model(source)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    method = LoRA(LoRAArgs(r=8, alpha=16, targets=targets))
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    change(method.parameters(model).values())
    folder.mkdir()
    method.write(
        folder, source, method.values(model), {"base_model_name_or_path": str(base)}
    )
    for path in DEMO.glob("base/*token*"):
        shutil.copy(path, folder)


def vllm_tokens(*words):
    """Return vLLM's greedy tokens by name; see vllm_greedy.py."""
    command = [VLLM, Path(__file__).parents[1] / "vllm_greedy.py", *words]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_and_merged_folders_give_the_same_tokens(tmp_path, name):
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    tiny_base(name, base)
    write_adapter(base, adapter)
    merge(
        MergeArgs(
            checkpoint_dir=[str(adapter)],
            base_dir=str(base),
            out_dir=str(merged),
            precision="fp32",
        )
    )
    expected = {"base": greedy_tokens(base, None), "adapter": greedy_tokens(adapter, base)}
    assert expected["base"] != expected["adapter"] == greedy_tokens(merged, None)
    if name != "Qwen3Moe":  # on a CPU, vLLM has no kernel for experts beside adapters
        assert vllm_tokens(base, adapter, NUM_TOKENS, PROMPT) == expected
    assert vllm_tokens(merged, "", NUM_TOKENS, PROMPT) == {"base": expected["adapter"]}


@pytest.fixture
def serve(tmp_path):
    """Return a function that starts `vllm serve` with these words and returns an OpenAI client."""
    processes = []

    def start(*words):
        port = free_port()
        settings = dict(
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            HF_HUB_OFFLINE="1",
        )
        command = [
            VLLM,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--port",
            port,
            "--dtype",
            "float32",
        ]
        command += ["--enforce-eager", "--max-num-seqs", "2", *words]
        with (tmp_path / "vllm.log").open("w") as log:
            process = subprocess.Popen(
                list(map(str, command)), env=os.environ | settings, stdout=log, stderr=log
            )
        processes.append(process)
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (
                tmp_path / "vllm.log"
            ).read_text()[-3000:]
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    return openai.OpenAI(
                        base_url=f"http://127.0.0.1:{port}/v1",
                        api_key="none",
                        max_retries=0,
                    )
            time.sleep(1)

    yield start
    for process in processes:
        process.terminate()
        process.wait(60)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def card_flags(folder, base):
    """Return the flags of `vllm serve` on the model card of a folder, with its path in place of the
    repository's name."""
    arguments = UploadArgs(
        repo_id="me/mine",
        checkpoint_dir=str(folder),
        base_model="me/base" if base else None,
    )
    card = model_card(card_info(resolve(folder, base), arguments))
    (command,) = re.findall(r"^vllm serve (.*)$", card, re.MULTILINE)
    command = command.replace("me/mine", str(folder)).replace("me/base", str(base))
    parser = re.search(r"add `(--enable-auto-tool-choice [^`]*)`", card)
    return ["--model", *command.split(), *(parser[1].split() if parser else [])]


@pytest.mark.parametrize("name", ["Qwen", "Llama"])
def test_served_with_the_flags_of_the_card_it_calls_tools(trained, serve, name):  # noqa: F811
    """A model with new tokens: its calls, the end of its answers and the text after a result are
    litft's."""
    folder = trained(name)
    client = serve(
        *card_flags(folder, None), "--served-model-name", "agent", "--max-model-len", "4096"
    )
    settings = dict(model="agent", tools=[TOOL], max_tokens=100, temperature=0)
    choice = client.chat.completions.create(messages=[QUESTION], **settings).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        ARGUMENTS,
    )
    messages = [QUESTION, *follow_up(choice.message.model_dump(exclude_none=True))]
    choice = client.chat.completions.create(messages=messages, **settings).choices[0]
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")


def test_an_adapter_served_with_the_flags_of_the_card_has_its_template(
    serve, checkpoints, tmp_path
):
    """The base has another template, and another end token."""
    base = checkpoints["SmolLM2-135M-Instruct"]
    records = [
        {"prompt": f"What is {a} plus 2?", "completion": f"The sum is {a + 2}, friend."}
        for a in range(8)
    ] * 4
    args = LoRAFinetuneArgs(
        checkpoint_dir=str(base),
        out_dir=str(tmp_path / "run"),
        accelerator="cpu",
        data=DataArgs(
            path=[str(write_records(tmp_path / "data.jsonl", records))],
            template="zephyr",
            val_fraction=0,
        ),
        train=TrainArgs(max_steps=10, global_batch_size=8, learning_rate=2e-3),
        eval=EvalArgs(max_new_tokens=0),
    )
    litft.finetune(args)
    final = tmp_path / "run" / "final"
    messages = [{"role": "user", "content": "What is 3 plus 2?"}]
    expected = litft.generate(
        *litft.load(final), messages, temperature=0, max_new_tokens=40
    )
    assert expected.startswith("The sum is")
    client = serve(*card_flags(final, base), "--max-model-len", "256")
    choice = client.chat.completions.create(
        model="mine", messages=messages, temperature=0, max_tokens=40
    ).choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected, "stop")


@pytest.mark.parametrize("name", WRAPPERS)
def test_vllm_applies_an_adapter_of_a_multimodal_base(tmp_path, name):
    """It passes over modules that it does not know: with other names, the tokens were those of the
    base."""
    text, vision, values = WRAPPERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, **values
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    change(model.parameters())
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)
    for path in DEMO.glob("base/*token*"):
        shutil.copy(path, base)
    source = resolve(base)
    model, method = base_model(source), LoRA(LoRAArgs(r=8, alpha=16))
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    change(method.parameters(model).values())
    adapter.mkdir()
    method.write(
        adapter, source, method.values(model), {"base_model_name_or_path": str(base)}
    )
    expected = {"base": greedy_tokens(base, None), "adapter": greedy_tokens(adapter, base)}
    assert expected["base"] != expected["adapter"]
    if name != "Mistral3":
        add_processor(name, base, tmp_path / "processor")
    assert vllm_tokens(base, adapter, NUM_TOKENS, PROMPT) == expected
