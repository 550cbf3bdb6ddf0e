"""Objectives over preferences against TRL's trainers: the first gradients, and the losses of ten
steps."""

import json
from pathlib import Path

import pytest
import torch
from conftest import STORIES, adapted, copy_tokenizer, rows_of
from safetensors.torch import load_file

from litft.args import (
    DataArgs,
    EvalArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    PreferenceArgs,
    TrainArgs,
)
from litft.commands.finetune import prepare_run, run_finetuning
from litft.distributed.devices import make_fabric
from litft.distributed.process_group import Processes, launch
from litft.methods.lora import LoRA
from litft.pretrained.folder import resolve
from litft.training.accumulation import accumulate
from litft.training.run_samples import RunSamples
from litft.training.trainer import Trainer

pytestmark = pytest.mark.slow
STEPS, BATCH, RATE = 10, 8, 3e-4
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token if loop.first }}Question: {{ "
    "m.content }}\n"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
BETAS = {"dpo": 0.3, "ipo": 0.3, "simpo": 2.0, "orpo": None, "kto": 0.3}


@pytest.fixture(scope="module", params=["stories15M", "qwen3"])
def base(request, checkpoints, make_model) -> Path:
    """The folders of the models: a real one, and a tiny Qwen3."""
    if request.param == "stories15M":
        return checkpoints["stories15M"]
    from transformers import Qwen3Config

    _, folder = make_model(Qwen3Config, vocab_size=512, max_position_embeddings=256)
    copy_tokenizer(STORIES, folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    """The folder of a LoRA adapter with random factors, from which both go on: it is the reference
    too."""
    folder = adapted(
        base, tmp_path_factory.mktemp("trl") / "adapter", LoRA(LoRAArgs(r=4)), scale=0.1
    )
    copy_tokenizer(base, folder)
    return folder


def pairs() -> list[dict[str, str]]:
    """Ragged pairs."""
    words = (
        "once upon a time there was a little girl named Lily who "
        "loved to play outside in the park".split()
    )
    return [
        {
            "prompt": " ".join(words[: 3 + n % 4]),
            "chosen": " ".join(words[n % 7 : n % 7 + 2 + 3 * (n % 3)]),
            "rejected": " ".join(words[::-1][n % 5 : n % 5 + 3 + 2 * (n % 4)]),
        }
        for n in range(BATCH)
    ]


def write_data(folder: Path, objective: str) -> Path:
    """Write the records of an objective."""
    records = pairs()
    if objective == "kto":
        sides = [("chosen", True), ("rejected", False)]
        records = [
            {"prompt": r["prompt"], "completion": r[side], "label": label}
            for n, r in enumerate(records)
            for side, label in [sides[n % 3 > 0]]
        ]
    (folder / "template.jinja").write_text(TEMPLATE, "utf-8")
    (folder / "data.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records), "utf-8"
    )
    return folder / "data.jsonl"


def flags(adapter: Path, data: Path, objective: str) -> LoRAFinetuneArgs:
    return LoRAFinetuneArgs(
        checkpoint_dir=str(adapter),
        out_dir=str(data.parent / "run"),
        objective=objective,
        preference=PreferenceArgs(beta=BETAS[objective]),
        data=DataArgs(
            path=[str(data)], val_fraction=0.0, template=str(data.parent / "template.jinja")
        ),
        train=TrainArgs(
            max_steps=STEPS,
            global_batch_size=BATCH,
            learning_rate=RATE,
            lr_schedule="constant",
            warmup_fraction=0.0,
            max_grad_norm=0.0,
        ),
        eval=EvalArgs(max_new_tokens=0),
    )


def first_gradients(args: LoRAFinetuneArgs, folder: Path) -> dict[str, torch.Tensor]:
    """The gradients of litft's first step, by the names that PEFT gives the factors."""
    run = prepare_run(args)
    setup = run.setup
    schedule = run.schedule
    fabric = make_fabric(args, run.settings.strategy)
    trainer = Trainer(
        Processes(fabric, launch(fabric, args.timeout)), run, folder / "first"
    )
    trainer._compute_references()
    trainer.model.train()
    samples = trainer.samples.of_step(0)
    setup.objective.before_step(fabric, trainer.model, samples, schedule.layout)
    totals = setup.objective.totals(samples)
    accumulate(
        fabric,
        setup.objective,
        fabric.setup_module(trainer.model),
        schedule.layout.batches(samples),
        totals,
    )
    (folder / "gradients").mkdir()
    values = {name: parameter.grad for name, parameter in trainer.trained.items()}
    setup.method.write(
        folder / "gradients",
        setup.source,
        values,
        {"base_model_name_or_path": str(setup.source.base)},
    )
    return load_file(folder / "gradients" / "adapter_model.safetensors")


def trl_trainer(objective: str, adapter: Path, data: Path, order: list[int]):
    """TRL's trainer for the same run; order: of the records."""
    import trl
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter)
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = tokenizer.unk_token
    model = AutoModelForCausalLM.from_pretrained(resolve(adapter).base, dtype="float32")
    # in fp32, its rounding reaches 1e-4
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True).double()
    records = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    roles = {
        "prompt": "user",
        "chosen": "assistant",
        "rejected": "assistant",
        "completion": "assistant",
    }
    records = [
        {
            name: [{"role": roles[name], "content": text}] if name in roles else text
            for name, text in record.items()
        }
        for record in records
    ]
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    config, trainer, values = {
        "dpo": (trl.DPOConfig, trl.DPOTrainer, {"loss_type": "sigmoid"}),
        "ipo": (trl.DPOConfig, trl.DPOTrainer, {"loss_type": "ipo"}),
        "simpo": (
            CPOConfig,
            CPOTrainer,
            {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0},
        ),
        "orpo": (ORPOConfig, ORPOTrainer, {}),
        "kto": (trl.KTOConfig, trl.KTOTrainer, {}),
    }[objective]
    values |= {"beta": BETAS[objective] or 0.1, "disable_dropout": True}
    args = config(
        output_dir=str(data.parent / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **values,
    )
    return trainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([records[i] for i in order]),
        processing_class=tokenizer,
    )


def mean_answer_loss(trainer) -> None:
    """Make TRL's ORPO leave the prompt out of the chosen answer's loss, as litft and the paper's
    equation 2 do."""
    forward = trainer.concatenated_forward

    def concatenated_forward(model, batch):
        chosen_logps, rejected_logps, chosen_logits, *rest = forward(model, batch)
        labels = batch["chosen_labels"][:, 1:]
        logits = chosen_logits[:, : labels.size(1)]
        loss = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=-100
        )
        return chosen_logps, rejected_logps, chosen_logits, rest[0], loss, *rest[2:]

    trainer.concatenated_forward = concatenated_forward


@pytest.mark.parametrize(
    "objective",
    [
        "dpo",
        pytest.param("ipo", marks=pytest.mark.weekly),
        pytest.param("simpo", marks=pytest.mark.weekly),
        "orpo",
        "kto",
    ],
)
def test_gradients_and_ten_losses_equal_trls(objective, adapter, tmp_path, monkeypatch):
    from transformers import TrainerCallback

    data = write_data(tmp_path, objective)
    args = flags(adapter, data, objective)
    schedule = prepare_run(args).schedule
    order = schedule.order.indices(0, BATCH)

    def of_trl(self, position: int) -> tuple[int, int]:
        """TRL takes the answer of the record before, in the same batch of the data's order."""
        (index,) = self.schedule.order.indices(position, position + 1)
        return index, order[order.index(index) - 1]

    monkeypatch.setattr(RunSamples, "_train_partners", of_trl)
    expected = trl_trainer(objective, adapter, data, order)
    if objective == "orpo":
        mean_answer_loss(expected)
    gradients: dict[str, torch.Tensor] = {}

    def keep_first() -> None:
        named = expected.model.named_parameters()
        found = {
            name.replace(".default", ""): p.grad.clone()
            for name, p in named
            if p.grad is not None
        }
        gradients.update(gradients or found)

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *arguments, **values) -> None:
            keep_first()

    expected.add_callback(Keep())
    expected.train()
    losses = [row["loss"] for row in expected.state.log_history if "loss" in row]
    ours = first_gradients(args, tmp_path)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (ours[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name
    rows = rows_of(run_finetuning(args).folder)
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses, abs=1e-3)
    assert losses[0] - losses[-1] > 0.1
