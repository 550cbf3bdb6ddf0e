"""The transformers + peft contender of scripts/benchmark.py: sdpa attention, no activation
checkpointing.

The loss is normalized as in transformers' Trainer: by the number of targets of the whole step.
"""

import os
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    DataCollatorForSeq2Seq,
)
from turns import Contender, Sample, run_contender

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Peft(Contender):
    """Train on micro-batches padded by transformers' collator; with one row per micro-batch,
    nothing is padded."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.rows = setup["rows"]
        self.device = setup["device"]
        # tests/gpu/README.md; it has no cuDNN, which SDPA prefers
        if "LITFT_PRETENDED_GPU" in os.environ:
            torch.backends.cuda.enable_cudnn_sdp(False)
        if setup["random"]:
            model = self.with_random_weights(setup)
        else:
            model = self.with_adapter(setup)
        self.model = model.to(self.device).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not setup["random"]:
            self.collator = self.padding_collator(setup)
        else:
            self.collator = _stack

    def with_adapter(self, setup: dict[str, Any]) -> PeftModel:
        """Return the model of the folder with the shared adapter."""
        settings = {"dtype": DTYPES[setup["precision"]], "attn_implementation": "sdpa"}
        base = AutoModelForCausalLM.from_pretrained(setup["checkpoint_dir"], **settings)
        return PeftModel.from_pretrained(base, setup["adapter"], is_trainable=True)

    def with_random_weights(self, setup: dict[str, Any]) -> PeftModel:
        """Return a model with random weights and a new adapter of all Linears."""
        config = AutoConfig.from_pretrained(setup["checkpoint_dir"])
        with torch.device(self.device):
            base = AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[setup["precision"]], attn_implementation="sdpa"
            )
        lora = setup["lora"]
        return get_peft_model(
            base,
            LoraConfig(r=lora["r"], lora_alpha=lora["alpha"], target_modules="all-linear"),
        )

    def padding_collator(self, setup: dict[str, Any]) -> DataCollatorForSeq2Seq:
        """Return transformers' collator with the folder's tokenizer."""
        tokenizer = AutoTokenizer.from_pretrained(setup["checkpoint_dir"])
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return DataCollatorForSeq2Seq(tokenizer)

    def accumulate(self, samples: list[Sample], count: int) -> torch.Tensor:
        """Accumulate gradients over micro-batches in the order of the samples, each padded to its
        longest sample."""
        total = torch.zeros((), device=self.device)
        for start in range(0, len(samples), self.rows):
            batch = self.collator(
                [_features(*sample[:2]) for sample in samples[start : start + self.rows]]
            ).to(self.device)
            loss = self.model(**batch, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        return total


def _stack(features: list[dict[str, list[int]]]) -> BatchEncoding:
    """Collate samples of equal length."""
    return BatchEncoding(
        {name: torch.tensor([sample[name] for sample in features]) for name in features[0]}
    )


def _features(tokens: list[int], targets: list[int]) -> dict[str, list[int]]:
    """Return a sample with unshifted labels for transformers' collator; the model shifts them."""
    ids = [*tokens, max(targets[-1], 0)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100, *targets]}


if __name__ == "__main__":
    run_contender(Peft)
