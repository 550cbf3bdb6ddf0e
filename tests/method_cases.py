"""Methods and families that the tests of methods and of tensor parallelism share."""

import torch
from parity import draw

from litft.args import AdapterArgs, AdapterV2Args, FullFinetuneArgs, LoRAArgs
from litft.methods import Adapter, AdapterV2, Full, LoRA
from litft.pretrained.folder import base_record
from litft.pretrained.save import Result, write_result

FAMILIES = {
    "llama": "grouped",
    "gpt_neox": "parallel, partial",
    "falcon": "40B: groups, two norms",
    "gemma2": "soft caps, windows",
    "phi3": "fused",
    "qwen3_moe": "renormalized",
}
# with recurrent mixers, which tensor parallelism refuses
RECURRENT = {"lfm2": "bias", "falcon_h1": "side by side"}
FULLY_TRAINED = ["embed", "lm_head", "down_proj"]
TOKENS = draw(2, 23, seed=8)


def with_tokens(method):
    """Add two tokens after the vocabulary of 96, and one within it, to a method."""
    method.tokens = {96: [5, 6], 97: [], 40: [40]}
    return method


METHODS = {
    "full": lambda: Full(FullFinetuneArgs()),
    "lora": lambda: LoRA(LoRAArgs(r=3, alpha=5)),
    "rslora": lambda: LoRA(
        LoRAArgs(
            r=3,
            alpha=5,
            rslora=True,
            rank_pattern=["down_proj=2"],
            alpha_pattern=["v_proj=9"],
        )
    ),
    "dora": lambda: LoRA(LoRAArgs(r=3, alpha=5, dora=True)),
    "pissa": lambda: LoRA(LoRAArgs(r=3, alpha=5, init="pissa")),
    "olora": lambda: LoRA(LoRAArgs(r=3, alpha=5, init="olora")),
    "lora, all it has": lambda: LoRA(
        LoRAArgs(r=3, alpha=5, targets=["*"], bias="all", modules_to_save=["norm"])
    ),
    "lora, whole parts, new tokens": lambda: with_tokens(
        LoRA(LoRAArgs(targets=["q_proj"], modules_to_save=FULLY_TRAINED, bias="all"))
    ),
    "lora, whole ends": lambda: LoRA(
        LoRAArgs(r=3, targets=["q_proj"], bias="lora", modules_to_save=["embed", "lm_head"])
    ),
    "dora of some, pissa": lambda: LoRA(
        LoRAArgs(r=3, dora=True, targets=["v_proj", "up_proj", "embed"], init="pissa")
    ),
    "adapter": lambda: Adapter(AdapterArgs(prompt_length=4, start_layer=1)),
    "adapter_v2": lambda: AdapterV2(AdapterV2Args(prompt_length=4, start_layer=1)),
    "adapter_v2, no prefix": lambda: AdapterV2(AdapterV2Args(prompt_length=0, bias=False)),
    "lora, new tokens": lambda: with_tokens(LoRA(LoRAArgs(r=3))),
    "adapter, new tokens": lambda: with_tokens(Adapter(AdapterArgs(prompt_length=4))),
    "adapter_v2, no prefix, new tokens": lambda: with_tokens(
        AdapterV2(AdapterV2Args(prompt_length=0, bias=False))
    ),
    "full, new tokens": lambda: with_tokens(Full(FullFinetuneArgs())),
}


def tokens_for(method):
    """Return input ids that include the method's new tokens."""
    tokens = TOKENS.clone()
    if method.tokens:
        tokens[0, ::5] = torch.tensor([96, 97, 40, 96, 97])
    return tokens


def save_result(model, method, source, out, kind=None):
    """Save a method as a run would and return the folder."""
    out.mkdir(parents=True, exist_ok=True)
    values = method.values(model)
    if method.saves_full_model:
        write_result(out, source, torch.float32, Result(method, values), 1.0)
    else:
        record = base_record(source, out)
        settings = {"quantize": kind or "none", "precision": "fp32"}
        method.write(out, source, values, record | {"litft": record["litft"] | settings})
    return out
