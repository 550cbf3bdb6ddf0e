"""Training runs with random flags against a plain loop over transformers and PEFT: the loss, the
norm of the gradients and the learning rate of each step, and the final parameters.

Each step has all samples, as token ids, so the loop needs neither litft's order nor its tokens.
"""

import csv
import json
import math
import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import write_records
from peft import PeftModel

import litft

COUNT = 6  # samples
QUIET = {"eval_max_new_tokens": 0, "forgetting": False, "log_interval": 1}
TARGETS = [
    ["all-linear"],
    ["q_proj", "v_proj"],
    ["down_proj", "o_proj"],
    ["blocks.1.*"],
    ["all-linear", "lm_head"],
    ["blocks.0.attention.*", "embed"],
]
# what two computations of a run may differ by, relative to how far a parameter has moved
TOLERANCE = {"adamw": 5e-3, "sgd": 2e-3, "lion": 5e-2}


@dataclass
class Case:
    """A random run."""

    method: str
    lora: dict[str, object] = field(default_factory=dict)
    flags: dict[str, object] = field(default_factory=dict)
    layout: dict[str, object] = field(default_factory=dict)
    steps: int = 5

    def get(self, name, default):
        return self.flags.get(name, default)


def drawn(seed):
    """Return the case of a seed. A flag that is left out keeps its default."""
    draw = random.Random(seed)
    case = Case(method=draw.choice(["lora", "lora", "lora", "full"]))

    def maybe(target, share, **values):
        if draw.random() < share:
            for name, choices in values.items():
                target[name] = draw.choice(choices)

    case.lora["lora_targets"] = draw.choice(TARGETS)
    case.lora["lora_r"] = draw.choice([1, 4, 7])
    maybe(case.lora, 0.5, lora_alpha=[1.0, 3.5, 16.0])
    maybe(case.lora, 0.3, lora_rslora=[True])
    maybe(case.lora, 0.3, lora_dora=[True])
    maybe(case.lora, 0.3, lora_bias=["lora", "all"])
    maybe(case.lora, 0.3, lora_modules_to_save=[["norm"], ["blocks.2.mlp.*"]])
    maybe(case.lora, 0.3, lora_rank_pattern=[["*_proj=2"], ["*=3"]])
    maybe(case.lora, 0.3, lora_alpha_pattern=[["*_proj=9.5"], ["*=2"]])

    flags = case.flags
    flags["optimizer"] = draw.choice(["adamw", "adamw", "sgd", "lion"])
    flags["learning_rate"] = draw.choice([1e-3, 5e-3, 2e-2])
    if flags["optimizer"] == "lion":
        flags["learning_rate"] /= 10
    if flags["optimizer"] == "adamw":
        # with the default, a gradient of nearly zero makes a step of full size in either direction
        flags["eps"] = draw.choice([1e-5, 1e-4])
    maybe(flags, 0.5, weight_decay=[0.0, 0.1, 1.0])
    maybe(flags, 0.6, lr_schedule=["cosine", "linear", "constant", "wsd"])
    maybe(flags, 0.5, warmup_steps=[0, 1, 3, 9])
    maybe(flags, 0.4, min_lr_ratio=[0.0, 0.5])
    if flags.get("lr_schedule") == "wsd":
        maybe(flags, 0.5, decay_fraction=[0.4, 0.9])
    maybe(flags, 0.5, max_grad_norm=[0.0, 0.05, 5.0])
    if flags["optimizer"] != "sgd":
        maybe(flags, 0.3, betas=[[0.8, 0.9], [0.5, 0.99]])
    maybe(flags, 0.3, train_label_smoothing=[0.2])
    if case.method == "lora":
        maybe(flags, 0.3, lora_lr_ratio=[4.0, 0.5])

    case.layout["data_packing"] = draw.choice([True, False])
    case.layout["micro_batch_size"] = draw.choice([1, 2, 5])
    checkpointing = ["none", "full", "selective", "elementwise"]
    case.layout["activation_checkpointing"] = draw.choice(checkpointing)
    return case


def samples_of(seed, vocab_size):
    """Return samples of random tokens, of which about two thirds are learned."""
    draw = random.Random(seed)
    records = []
    for _ in range(COUNT):
        size = draw.randint(4, 40)
        ids = [draw.randrange(3, vocab_size) for _ in range(size)]
        labels = [token if draw.random() < 0.7 else -100 for token in ids]
        labels[-1] = ids[-1]
        records.append({"input_ids": ids, "labels": labels})
    return records


def loss_of(model, records, smoothing):
    """Return the mean loss of all learned tokens."""
    total = 0.0
    count = 0
    for record in records:
        logits = model(torch.tensor([record["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(record["labels"][1:])
        total = total + F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=smoothing
        )
        count += int((labels != -100).sum())
    return total / count


def rate_at(case, step):
    """Return the learning rate of a step, which counts from 0."""
    peak = case.flags["learning_rate"]
    # the default is a share of the run
    warmup = case.get("warmup_steps", round(0.05 * case.steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, case.steps - warmup)
    schedule = case.get("lr_schedule", "cosine")
    if schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    elif schedule == "linear":
        share = 1 - progress
    elif schedule == "constant":
        share = 1.0
    else:
        decay = round(case.get("decay_fraction", 0.2) * case.steps)
        begun = max(0, step - (case.steps - decay))
        share = 1 - math.sqrt(begun / decay) if decay else 1.0
    lowest = case.get("min_lr_ratio", 0.1)
    return peak * (lowest + (1 - lowest) * share)


class PlainOptimizer:
    """AdamW, SGD with momentum, and Lion (arXiv 2302.06675), a parameter at a time."""

    def __init__(self, case, parameters):
        self.case = case
        self.parameters = parameters
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, rate):
        """Update all parameters by their gradients."""
        self.steps += 1
        for name, parameter in self.parameters.items():
            own_rate = rate
            # LoRA+ (arXiv 2402.12354)
            if "lora_B" in name or "lora_embedding_B" in name:
                own_rate *= self.case.get("lora_lr_ratio", 1.0)
            if parameter.dim() > 1:
                parameter.mul_(1 - own_rate * self.case.get("weight_decay", 0.0))
            parameter.sub_(own_rate * self._direction(name, parameter.grad))

    def _direction(self, name, grad):
        kind = self.case.flags["optimizer"]
        default = (0.9, 0.99) if kind == "lion" else (0.9, 0.95)
        beta1, beta2 = self.case.get("betas", default)
        first = self.first[name]
        second = self.second[name]
        if kind == "sgd":
            return first.mul_(0.9).add_(grad).clone()
        if kind == "lion":
            direction = torch.sign(beta1 * first + (1 - beta1) * grad)
            first.mul_(beta2).add_(grad, alpha=1 - beta2)
            return direction
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (second / (1 - beta2**self.steps)).sqrt()
        return first / (1 - beta1**self.steps) / (root + self.case.flags["eps"])


def opened(case, base, start):
    """Open the model that a run starts with, or has ended with, in transformers and PEFT."""
    folder = base if case.method == "lora" else start
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    # transformers does not train the row of the padding token, which is another token in texts
    model.get_input_embeddings().padding_idx = None
    if case.method == "lora":
        model = PeftModel.from_pretrained(model, start, is_trainable=True)
    return model.eval()


def plain_run(case, model, records):
    """Train a model as a run with these flags does; return (loss, norm, rate) of each step."""
    parameters = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameters[name] = parameter
    optimizer = PlainOptimizer(case, parameters)
    rows = []
    for step in range(case.steps):
        model.zero_grad()
        loss = loss_of(model, records, case.get("train_label_smoothing", 0.0))
        loss.backward()
        squares = [parameter.grad.pow(2).sum() for parameter in parameters.values()]
        norm = float(torch.stack(squares).sum().sqrt())
        limit = case.get("max_grad_norm", 1.0)
        if limit and norm > limit:
            for parameter in parameters.values():
                parameter.grad.mul_(limit / norm)
        rate = rate_at(case, step)
        rows.append((loss.item(), norm, rate))
        optimizer.step(rate)
    return rows


def logged_rows(run):
    """Return (loss, norm, rate) of each step of a run."""
    rows = []
    with open(run / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["loss"]:
                values = (row["loss"], row["grad_norm"], row["learning_rate"])
                rows.append(tuple(map(float, values)))
    return rows


@torch.no_grad()
def largest_difference(actual, model, begun):
    """Return by how much a parameter differs, relative to how far it has moved, and its name."""
    worst = (0.0, "")
    actual = dict(actual.named_parameters())
    for name, parameter in model.named_parameters():
        moved = float((parameter - begun[name]).norm())
        difference = float((actual[name] - parameter).norm())
        # a parameter that has not moved must be the same
        if not parameter.requires_grad or moved == 0:
            assert difference == 0, name
            continue
        # rounding of the values themselves
        difference -= 1e-6 * float(parameter.norm())
        worst = max(worst, (difference / moved, name))
    return worst


@pytest.mark.slow
def test_runs_with_random_flags_equal_a_plain_loop(tiny, tmp_path, cases):
    """24 seeds were tried (2026-11-30): `-m slow --stress 8`."""
    for seed in range(cases(3)):
        case = drawn(seed)
        records = samples_of(seed, vocab_size=512)
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = write_records(folder / "data.jsonl", records)
        shared = {"data": str(path), "data_val_fraction": 0.0, "global_batch_size": COUNT}
        shared |= QUIET
        start = tiny
        if case.method == "lora":
            # B is no longer zero, so that the gradients of A are none either
            litft.finetune(
                method="lora",
                model=str(tiny),
                max_steps=2,
                learning_rate=2e-2,
                out_dir=str(folder / "begin"),
                **shared,
                **case.lora,
            )
            start = folder / "begin" / "final"
        litft.finetune(
            method=case.method,
            model=str(start),
            max_steps=case.steps,
            out_dir=str(folder / "run"),
            **shared,
            **case.flags,
            **case.layout,
        )

        message = f"seed {seed}: {json.dumps(vars(case))}"
        model = opened(case, tiny, start)
        begun = {name: p.detach().clone() for name, p in model.named_parameters()}
        expected = plain_run(case, model, records)
        for row, logged in zip(expected, logged_rows(folder / "run"), strict=True):
            assert logged == pytest.approx(row, rel=2e-3, abs=1e-9), message
        final = opened(case, tiny, folder / "run" / "final")
        difference, name = largest_difference(final, model, begun)
        bound = TOLERANCE[case.flags["optimizer"]]
        assert difference <= bound, f"{name}: {difference:.2g}; {message}"
