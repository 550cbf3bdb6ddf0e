"""The transformers + peft contender of scripts/benchmark.py: sdpa attention, no activation checkpointing.

The loss is normalized as in transformers' Trainer: by the number of targets of the whole step.
"""

from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq
from turns import Contender, Sample, run_contender


class Peft(Contender):
    """Train on micro-batches padded by transformers' collator; with one row per micro-batch, nothing is padded."""

    def __init__(self, setup: dict[str, Any]) -> None:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[setup["precision"]]
        base = AutoModelForCausalLM.from_pretrained(setup["checkpoint_dir"], dtype=dtype, attn_implementation="sdpa")
        self.model = PeftModel.from_pretrained(base, setup["adapter"], is_trainable=True).to(setup["device"]).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        tokenizer = AutoTokenizer.from_pretrained(setup["checkpoint_dir"])
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self.collator = DataCollatorForSeq2Seq(tokenizer)
        self.rows, self.device = setup["rows"], setup["device"]

    def accumulate(self, samples: list[Sample], count: int) -> torch.Tensor:
        """Accumulate gradients over micro-batches in the order of the samples, each padded to its longest sample."""
        total = torch.zeros((), device=self.device)
        for start in range(0, len(samples), self.rows):
            batch = self.collator([_features(*sample) for sample in samples[start : start + self.rows]]).to(self.device)
            loss = self.model(**batch, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        return total


def _features(tokens: list[int], targets: list[int]) -> dict[str, list[int]]:
    """Return a sample with unshifted labels for transformers' collator; the model shifts them."""
    ids = [*tokens, max(targets[-1], 0)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100, *targets]}


if __name__ == "__main__":
    run_contender(Peft)
