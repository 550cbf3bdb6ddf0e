"""Losses and gradients of --objective grpo against TRL's GRPOTrainer and RLOOTrainer, from fixed
completions and advantages."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import STORIES, copy_tokenizer

import litft
from litft.args import GrpoArgs
from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.model.loss import IGNORED
from litft.training.objectives.grpo import GRPO

pytestmark = pytest.mark.slow
# prompt and completion lengths of two groups of four; the last completion is cut at the limit
PROMPTS = [3, 3, 3, 3, 5, 5, 5, 5]
COMPLETIONS = [4, 1, 7, 2, 3, 9, 5, 9]
LIMIT = 9
REWARDS = torch.tensor(
    [[1.0, 0.0, 0.5, 0.25], [2.0, 1.0, torch.nan, -1.0]], dtype=torch.float64
)
# flags of TRL for each loss
LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    # its limit is that of the ratio itself
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "rloo": {},
}


@pytest.fixture(scope="module")
def folder(make_model) -> Path:
    from transformers import Qwen3Config

    _, path = make_model(Qwen3Config, vocab_size=512, max_position_embeddings=256)
    copy_tokenizer(STORIES, path)
    return path


@pytest.fixture(scope="module")
def texts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts and completions."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.randint(3, 512, (prompt + completion,), generator=generator)
        pairs.append((ids[:prompt], ids[prompt:]))
    return pairs


def near(texts, seed: int) -> list[torch.Tensor]:
    """Return log-probabilities of the targets that are not those of the model."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(len(answer), generator=generator) * 0.8 - 0.4 for _, answer in texts]


def make_trainer(folder: Path, loss: str, beta: float, output: Path):
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.unk_token
    config, trainer = (
        (trl.RLOOConfig, trl.RLOOTrainer)
        if loss == "rloo"
        else (trl.GRPOConfig, trl.GRPOTrainer)
    )
    args = config(
        output_dir=str(output),
        per_device_train_batch_size=len(PROMPTS),
        num_generations=4,
        max_completion_length=LIMIT,
        beta=beta,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **LOSSES[loss],
    )
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=tokenizer,
    )


def padded(rows: list[torch.Tensor], left: bool = False) -> torch.Tensor:
    longest = max(map(len, rows))
    pads = [torch.zeros(longest - len(row), dtype=row.dtype) for row in rows]
    pairs = [
        (pad, row) if left else (row, pad) for row, pad in zip(rows, pads, strict=True)
    ]
    return torch.stack([torch.cat(pair) for pair in pairs])


def trl_inputs(texts, is_masked: bool, advantages, old, reference) -> dict:
    prompts = [prompt for prompt, _ in texts]
    answers = [answer for _, answer in texts]
    mask = padded([torch.ones(len(answer), dtype=torch.int64) for answer in answers])
    if is_masked:
        mask[-1] = 0
    inputs = {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([torch.ones_like(prompt) for prompt in prompts], left=True),
        "completion_ids": padded(answers),
        "completion_mask": mask,
        "advantages": advantages.flatten().float(),
        "num_items_in_batch": mask.sum(),
    }
    if old is not None:
        inputs["old_per_token_logps"] = padded(old)
        inputs["old_logps"] = (padded(old) * mask).sum(1)
    if reference is not None:
        inputs["ref_per_token_logps"] = padded(reference)
    return inputs


def sample_of(prompt, answer, masked: bool) -> Sample:
    ids = torch.cat([prompt, answer])
    targets = ids[1:].clone()
    targets[: len(prompt) - 1] = IGNORED
    if masked:
        targets[:] = IGNORED
    return Sample(ids[:-1], targets)


CASES = []
for case in product(LOSSES, (0.0, 0.04), (1, 2), (False, True)):
    loss, beta, updates, masked = case
    # RLOO subtracts the divergence from the rewards, and always has the log-probabilities before
    if loss == "rloo" and (beta or updates == 1):
        continue
    # half of them have all pairs of settings
    is_in_half = (beta > 0) ^ (updates == 2) ^ masked
    CASES.append(pytest.param(*case, marks=[] if is_in_half else pytest.mark.weekly))


@pytest.mark.parametrize(("loss", "beta", "updates", "masked"), CASES)
def test_loss_and_gradients_equal_trls(
    folder, texts, tmp_path, loss, beta, updates, masked
):
    args = GrpoArgs(
        group_size=4,
        max_new_tokens=LIMIT,
        loss=loss,
        beta=beta,
        updates=updates,
        clip_high=0.3 if loss == "cispo" else 0.2,
    )
    objective = GRPO(args, [])
    model = litft.load(folder, precision="fp32")[0].requires_grad_(True).train()
    samples = [
        sample_of(*pair, masked=masked and number == len(texts) - 1)
        for number, pair in enumerate(texts)
    ]
    advantages = objective.advantages(REWARDS)

    # log-probabilities near those of the model, so that some ratios are clipped
    own = []
    for prompt, answer in texts:
        ids = torch.cat([prompt, answer])
        with torch.no_grad():
            logits = model(ids[None, :-1])[0]
        picked = logits.log_softmax(-1).gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
        own.append(picked)
    old = None
    reference = None
    if updates > 1:
        old = [a + b for a, b in zip(own, near(texts, 1), strict=True)]
    if beta:
        reference = [a + b for a, b in zip(own, near(texts, 2), strict=True)]

    # TRL's
    trainer = make_trainer(folder, loss, beta, tmp_path)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    expected = trainer._compute_loss(
        trainer.model, trl_inputs(texts, masked, advantages, old, reference)
    )
    expected.backward()
    # a constant of the masked completion, which has no gradient
    if loss == "rloo" and masked:
        expected = expected + advantages[-1, -1] / len(texts)

    # litft's, in micro-batches of three rows, the last of which is not full
    rows = []
    for number, sample in enumerate(samples):
        is_empty = masked and number == len(samples) - 1
        part = slice(0, 0) if is_empty else slice(None)
        rows.append(
            replace(
                sample,
                advantage=float(advantages.flatten()[number]),
                old=old[number][part] if old else None,
                reference_tokens=reference[number][part] if reference else None,
            )
        )
    totals = objective.totals(rows)
    values = torch.zeros(1 + len(objective.scores))
    for layout in (BatchLayout(3), BatchLayout(2, 24)):
        model.zero_grad()
        values.zero_()
        for batch in layout.batches(rows):
            part = objective(model, batch, totals)
            part[0].backward()
            values += part.detach()
        assert values[0].item() == pytest.approx(expected.item(), abs=1e-5, rel=1e-5)
        theirs = trainer.model.get_input_embeddings().weight.grad
        difference = (model.embed.weight.grad - theirs).abs().max()
        assert difference <= 1e-5 * max(1.0, theirs.abs().max().item())
