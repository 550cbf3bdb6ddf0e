"""The TRL contender of scripts/benchmark.py: a DPO step of its trainer, on micro-batches that its
collator pads.

With `precomputed`, the reference's log-probabilities are computed before the steps, as litft does;
by default TRL computes them in each step.
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from run_peft import DTYPES
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from turns import Contender, Sample, run_contender


class Trl(Contender):
    """Train the shared adapter on pairs."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.rows = setup["rows"]
        self.precomputed = setup["precomputed"]
        tokenizer = AutoTokenizer.from_pretrained(setup["checkpoint_dir"])
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        settings = {"dtype": DTYPES[setup["precision"]], "attn_implementation": "sdpa"}
        base = AutoModelForCausalLM.from_pretrained(setup["checkpoint_dir"], **settings)
        model = PeftModel.from_pretrained(base, setup["adapter"], is_trainable=True)
        config = DPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_length=None,
            use_cpu=setup["device"] == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
        )
        # only to build the trainer
        record = {
            "prompt": "a",
            "chosen": " b",
            "rejected": " c",
        }
        dataset = Dataset.from_list([record])
        self.trainer = DPOTrainer(
            model=model, args=config, train_dataset=dataset, processing_class=tokenizer
        )
        self.trainer.precompute_ref_logps = self.precomputed
        self.model = self.trainer.model.to(setup["device"]).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def samples(self, samples: list[Sample]) -> list[dict[str, Any]]:
        """Return the pairs as TRL's collator takes them, with the reference if it is
        precomputed."""
        pairs = [_pair(*sample) for sample in samples]
        for pair in pairs if self.precomputed else ():
            batch = self.trainer._prepare_inputs(self.trainer.data_collator([pair]))
            chosen, rejected = self.trainer.compute_ref_log_probs(self.model, batch)
            pair |= {
                "ref_chosen_logps": float(chosen[0]),
                "ref_rejected_logps": float(rejected[0]),
            }
        return pairs

    def accumulate(self, samples: list[dict[str, Any]], count: int) -> torch.Tensor:
        """Accumulate gradients over micro-batches in the order of the samples."""
        total = 0.0
        for start in range(0, len(samples), self.rows):
            part = samples[start : start + self.rows]
            batch = self.trainer._prepare_inputs(self.trainer.data_collator(part))
            loss = self.trainer.compute_loss(self.model, batch) * (len(part) / len(samples))
            loss.backward()
            total += loss.detach()
        return total


def _pair(tokens: list[int], targets: list[int], lengths: list[int]) -> dict[str, Any]:
    """Return the ids of the prompt and of both answers."""
    first = lengths[0]
    (prompt, chosen), (_, rejected) = (
        _split(tokens[part], targets[part]) for part in (slice(first), slice(first, None))
    )
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def _split(tokens: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the answer; what a template adds after the answer is left
    out."""
    learned = []
    for n, target in enumerate(targets):
        if target >= 0:
            learned.append(n)
    return tokens[: learned[0] + 1], targets[learned[0] : learned[-1] + 1]


if __name__ == "__main__":
    run_contender(Trl)
