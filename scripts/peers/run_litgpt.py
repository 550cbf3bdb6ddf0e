"""The litgpt 0.5 contender of scripts/benchmark.py: the steps of its finetune/lora.py, on a
converted copy of the folder.

litgpt initializes its own adapter and weights all micro-batches equally, so its losses are only
close to the others'.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from litgpt.utils import chunked_cross_entropy
from torch.nn.utils.rnn import pad_sequence
from turns import Contender, Sample, run_contender


class LitGPT(Contender):
    """Train on padded micro-batches, in the order of the samples."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.fabric = L.Fabric(
            accelerator=setup["device"],
            devices=1,
            precision={"bf16": "bf16-true", "fp32": "32-true"}[setup["precision"]],
        )
        targets = {
            f"lora_{name}": f"{prefix}_proj" in setup["lora"]["targets"]
            for name, prefix in NAMES.items()
        }
        with tempfile.TemporaryDirectory() as folder:
            source = Path(setup["checkpoint_dir"])
            copy = Path(folder) / Path(setup["checkpoint_dir"]).name
            shutil.copytree(source, copy)
            convert_hf_checkpoint(copy)
            r = setup["lora"]["r"]
            alpha = setup["lora"]["alpha"]
            config = Config.from_file(
                copy / "model_config.yaml",
                lora_r=r,
                lora_alpha=alpha,
                lora_dropout=0.0,
                **targets,
            )
            with self.fabric.init_module():
                model = GPT(config)
            mark_only_lora_as_trainable(model)
            model.max_seq_length = setup["longest"]
            weights = torch.load(copy / "lit_model.pth", weights_only=True, mmap=True)
            model.load_state_dict(weights, strict=False)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.model = self.fabric.setup_module(model).train()
        self.rows = setup["rows"]

    def accumulate(self, samples: list[Sample], count: int) -> torch.Tensor:
        """Accumulate gradients as litgpt's training loop does."""
        total = 0.0
        num_batches = -(-len(samples) // self.rows)
        for start in range(0, len(samples), self.rows):
            batch = samples[start : start + self.rows]
            tokens = pad_sequence(
                [torch.tensor(tokens) for tokens, _ in batch], batch_first=True
            ).to(self.fabric.device)
            targets = pad_sequence(
                [torch.tensor(t) for _, t in batch], batch_first=True, padding_value=-100
            )
            targets = targets.to(self.fabric.device)
            loss = chunked_cross_entropy(
                self.model(tokens, lm_head_chunk_size=128), targets
            )
            self.fabric.backward(loss / num_batches)
            total += loss.detach() * (targets >= 0).sum() / count
        return total


# by litgpt's name: the prefix in Hugging Face names
NAMES = {"query": "q", "key": "k", "value": "v", "projection": "o"}


if __name__ == "__main__":
    run_contender(LitGPT)
