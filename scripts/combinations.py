"""Try every pair of methods, bases, objectives, strategies and so on, and print the tables in
tutorials/combinations.md from what is refused.

python scripts/combinations.py [--write]     (takes about two minutes)

Each pair is prepared as a run is, up to the plan, on a pretended GPU of 80 GB. The exports are
those of a run of one step.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tables import ROOT, parser, write

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

GPU_MEMORY = 80 << 30
PAGE = "tutorials/combinations.md"
# the columns of the first table: the method and its flags
METHODS = {
    "LoRA": ("lora", ""),
    "DoRA": ("lora", "--lora.dora true"),
    "PiSSA": ("lora", "--lora.init pissa"),
    "Adapter v1": ("adapter", ""),
    "Adapter v2": ("adapter_v2", ""),
    "full": ("full", ""),
}
OPTIMIZERS = (
    *("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
    *("lion", "adafactor", "muon", "sgd"),
)
# a kind, and its values: what the page calls them, and the flags; {folder} has models and data
VALUES = {
    "network": {
        "dense": "--checkpoint_dir {folder}/dense",
        "experts": "--checkpoint_dir {folder}/experts",
        "latent attention": "--checkpoint_dir {folder}/latent",
        "recurrent and attention layers": "--checkpoint_dir {folder}/hybrid",
        "recurrent layers first": "--checkpoint_dir {folder}/recurrent",
    },
    "base": {
        "`--quantize nf4`": "--quantize nf4",
        "`--quantize nf4-dq`": "--quantize nf4-dq",
        "`--quantize int8`": "--quantize int8",
    },
    "objective": {
        "`--objective dft`": "--objective dft",
        **{
            f"`--objective {name}`": f"--objective {name} --data.path {{folder}}/pairs.jsonl"
            for name in ("dpo", "ipo", "simpo", "orpo")
        },
        "`--objective kto`": "--objective kto --data.path {folder}/labels.jsonl",
        "`--objective grpo`": "--objective grpo --reward exact --grpo.max_new_tokens 8 "
        "--data.path {folder}/data.jsonl",
        "`--objective distill`": "--objective distill --teacher {folder}/dense "
        "--data.path {folder}/data.jsonl",
    },
    "devices": {
        "`--strategy ddp`": "--devices 2 --strategy ddp",
        "`--strategy fsdp`": "--devices 2 --strategy fsdp",
        "`--strategy hsdp`": "--devices 4 --strategy hsdp --shard_size 2",
    },
    "precision": {
        "`--precision bf16`": "--precision bf16",
        "`--precision fp16`": "--precision fp16",
        "`--precision fp32`": "--precision fp32",
    },
    "optimizer": {
        **{f"`{name}`": f"--train.optimizer {name}" for name in OPTIMIZERS},
        "`schedule_free`": "--train.optimizer schedule_free --train.lr_schedule constant",
    },
    "memory": {
        "`--train.compile true`": "--train.compile true",
        "`--train.activation_checkpointing full`": "--train.activation_checkpointing full",
        "`--train.cpu_offload activations`": "--train.cpu_offload activations",
        "`--train.cpu_offload parameters`": "--train.cpu_offload parameters",
        "`--train.oom_retry`": "--train.oom_retry true",
        "`--train.optimizer_in_backward`": "--train.optimizer_in_backward true "
        "--train.max_grad_norm 0 --train.global_batch_size 4 --train.micro_batch_size 4",
    },
    "data and loss": {
        "`--data.packing false`": "--data.packing false",
        "`--data.new_tokens`": "--data.new_tokens <a>",
        "`--data.mask_prompt false`": "--data.mask_prompt false",
        "`--train.neftune_alpha`": "--train.neftune_alpha 5",
        "`--train.label_smoothing`": "--train.label_smoothing 0.1",
        "`--train.skip_nan`": "--train.skip_nan true",
        "`--eval.exact_match`": "--eval.exact_match true",
        "`--data.val_fraction 0`": "--data.val_fraction 0",
        "`--save.best`": "--save.best true",
    },
}
# runs whose results are exported: the method and its flags
EXPORTED = {
    "LoRA": ("lora", ""),
    "rsLoRA": ("lora", "--lora.rslora true --lora.alpha 16"),
    "DoRA": ("lora", "--lora.dora true"),
    "PiSSA": ("lora", "--lora.init pissa"),
    "LoRA with `modules_to_save`": ("lora", "--lora.modules_to_save norm"),
    "LoRA with `--data.new_tokens`": ("lora", "--data.new_tokens <a>"),
    "LoRA with `--lora.bias lora`": ("lora", "--lora.bias lora"),
    "Adapter v1": ("adapter", ""),
    "Adapter v2": ("adapter_v2", ""),
    "Adapter v2 without prefixes": ("adapter_v2", "--adapter.prompt_length 0"),
    "Adapter v2 without prefixes and biases": (
        "adapter_v2",
        "--adapter.prompt_length 0 --adapter.bias false",
    ),
    "full": ("full", ""),
}
# the networks, as transformers' configurations of small models
NETWORKS = {
    "experts": (
        "Qwen3MoeConfig",
        dict(num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1),
    ),
    "latent": (
        "DeepseekV3Config",
        dict(
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
    ),
    "hybrid": ("Lfm2Config", dict(full_attn_idxs=[1, 2, 3])),
    "recurrent": ("Qwen3NextConfig", dict(num_experts=4, num_experts_per_tok=2)),
}
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
)


class Value(NamedTuple):
    """A value of one kind: what the page calls it, the command, and its flags."""

    kind: str
    name: str
    method: str
    flags: str


def values() -> list[Value]:
    """Return everything that is combined."""
    found = []
    for name, (method, flags) in METHODS.items():
        found.append(Value("method", name, method, flags))
    for kind, named in VALUES.items():
        for name, flags in named.items():
            found.append(Value(kind, name, "", flags))
    return found


def make_inputs(folder: Path) -> None:
    """Write small models of each kind of network, and examples of each kind of data."""
    import parity
    from conftest import copy_tokenizer

    from litft.pretrained.folder import DEMO

    base = DEMO / "base"
    (folder / "dense").symlink_to(base)
    vocab_size = json.loads((base / "config.json").read_text())["vocab_size"]
    for name, (config_class, special) in NETWORKS.items():
        parity.build(config_class, folder / name, vocab_size=vocab_size, **SIZES | special)
        copy_tokenizer(base, folder / name)

    lines = (DEMO / "train.jsonl").read_text("utf-8").splitlines()[:24]
    records = [json.loads(line) for line in lines]
    pairs = []
    labels = []
    for record in records:
        question, answer = record["instruction"], record["output"]
        pairs.append({"prompt": question, "chosen": answer, "rejected": "no"})
        labels.append(
            {"prompt": question, "completion": answer, "label": len(labels) % 2 == 0}
        )
    for name, written in (("data", records), ("pairs", pairs), ("labels", labels)):
        text = "\n".join(json.dumps(record) for record in written)
        (folder / f"{name}.jsonl").write_text(text + "\n", "utf-8")


@contextlib.contextmanager
def pretended_gpus() -> Iterator[None]:
    """Within the context, a run is planned for GPUs of 80 GB; nothing is computed on them."""
    with (
        mock.patch("litft.commands.finetune.pick_accelerator", lambda _: "cuda"),
        mock.patch("litft.commands.finetune.check_devices"),
        mock.patch("litft.training.planned_run.device_memory", lambda *_: GPU_MEMORY),
    ):
        yield


def refusal(folder: Path, *chosen: Value) -> str | None:
    """Return the first line of the message that refuses the values together; None if a run of them
    is prepared."""
    from litft.args import FINETUNE
    from litft.args.parser import parse
    from litft.commands.finetune import prepare_run

    method = "lora"
    words = [
        *("--checkpoint_dir", f"{folder}/dense", "--data.path", f"{folder}/data.jsonl"),
        *(
            "--precision",
            "bf16",
            "--train.global_batch_size",
            "4",
            "--data.max_seq_length",
            "128",
        ),
    ]
    for value in chosen:
        method = value.method or method
        words += value.flags.format(folder=folder).split()
    output = io.StringIO()
    try:
        with pretended_gpus(), contextlib.redirect_stderr(output):
            args = parse(FINETUNE[method], words)
            problems = args.problems()
            if problems:
                return problems[0]
            prepare_run(args)
    except ValueError as error:
        return str(error).splitlines()[0].replace(f"{folder}/", "")
    return None


def refusals(folder: Path) -> dict[tuple[Value, Value], str]:
    """Return the message of each pair of values that is refused."""
    found = {}
    for first, second in combinations(values(), 2):
        if first.kind != second.kind:
            message = refusal(folder, first, second)
            if message:
                found[first, second] = message
    return found


def without_values(message: str, value: Value) -> str:
    """Return a message without the words of the value, so that values that are refused for one
    reason have one text."""
    for word in value.flags.split():
        if not word.startswith("--"):
            message = re.sub(rf"\b{re.escape(word)}\b", "…", message)
    return message


def table_by_method(refused: dict[tuple[Value, Value], str]) -> str:
    """Return a Markdown table: a row a value, a column a method, and below it the messages."""
    methods = [value for value in values() if value.kind == "method"]
    others = [value for value in values() if value.kind != "method"]
    # the text without the value -> the first message of it
    notes: dict[str, str] = {}
    lines = [f"| | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
    for value in others:
        cells = []
        for method in methods:
            message = refused.get((method, value))
            if message is None:
                cells.append("yes")
                continue
            reason = without_values(message, value)
            notes.setdefault(reason, message)
            cells.append(f"no ({list(notes).index(reason) + 1})")
        lines.append(f"| {value.name} | {' | '.join(cells)} |")
    lines.append("")
    for number, message in enumerate(notes.values(), 1):
        lines.append(f"{number}. `{message}`")
    return "\n".join(lines) + "\n"


def table_of_refusals(refused: dict[tuple[Value, Value], str]) -> str:
    """Return a Markdown table of the pairs without a method that are refused, and the messages."""
    rows: dict[tuple[str, str], tuple[list[str], str]] = {}
    for (first, second), message in refused.items():
        if first.kind != "method":
            key = (second.name, without_values(message, first))
            names, _ = rows.setdefault(key, ([], message))
            names.append(first.name)
    lines = ["| this | does not go with | the message |", "|---|---|---|"]
    for (second, _), (names, message) in rows.items():
        lines.append(f"| {second} | {', '.join(names)} | `{message}` |")
    return "\n".join(lines) + "\n"


def export_row(name: str, method: str, flags: str, folder: Path) -> str:
    """Return a row of the table of exports: of a run of one step on the demo's model."""
    from litft.args import FINETUNE, GgufExportArgs, MergeArgs
    from litft.args.parser import parse
    from litft.checkpoints.adapter_reader import vllm_obstacles
    from litft.commands.convert_to_gguf import write
    from litft.commands.finetune import run_finetuning
    from litft.commands.merge_lora import merge

    run = folder / "runs" / re.sub(r"\W", "-", name)
    words = [
        *("--checkpoint_dir", f"{folder}/dense", "--data.path", f"{folder}/data.jsonl"),
        *("--out_dir", str(run), "--max_steps", "1", "--eval.max_new_tokens", "0"),
    ]
    run_finetuning(parse(FINETUNE[method], words + flags.split()))

    cells = [name]
    cells.append(
        "yes" if opens_elsewhere(folder / "dense", run / "final", method) else "no"
    )
    # a full model is not an adapter
    if method == "full":
        cells.append("as a model")
        cells.append("is a whole model")
    else:
        config = json.loads((run / "final" / "adapter_config.json").read_text())
        is_lora = config.get("peft_type") == "LORA"
        obstacles = vllm_obstacles(config) if is_lora else ["another method"]
        cells.append(f"no: {', '.join(obstacles)}" if obstacles else "yes")
        arguments = MergeArgs(checkpoint_dir=[str(run)], out_dir=str(run / "merged"))
        cells.append(allowed(lambda: merge(arguments)))
    gguf = GgufExportArgs(checkpoint_dir=str(run), out_dir=str(run / "gguf"))
    cells.append(allowed(lambda: write(gguf)))
    return f"| {' | '.join(cells)} |"


def allowed(command: Callable[[], object]) -> str:
    """Return `yes` if a command runs, otherwise the reason of its refusal."""
    try:
        command()
    except ValueError as error:
        reason = str(error).partition(": ")[2].partition(";")[0]
        return f"no: {reason or error}"
    return "yes"


def opens_elsewhere(base: Path, final: Path, method: str) -> bool:
    """Return whether transformers opens a full model, or PEFT an adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if method == "full":
        AutoModelForCausalLM.from_pretrained(final)
        return True
    model = AutoModelForCausalLM.from_pretrained(base)
    config = json.loads((final / "adapter_config.json").read_text())
    if "peft_type" not in config:
        return False
    # new tokens, as the model card says
    for tokens in (config.get("trainable_token_indices") or {}).values():
        model.resize_token_embeddings(max(tokens) + 1)
    try:
        PeftModel.from_pretrained(model, final)
    except (ValueError, KeyError, RuntimeError, TypeError):
        return False
    return True


def table_of_exports(folder: Path) -> str:
    """Return a Markdown table: where the result of each method can be used."""
    lines = [
        "| trained with | opens in PEFT or transformers | vLLM loads it, as documented "
        "| `merge_lora` | GGUF |",
        "|---|---|---|---|---|",
    ]
    for name, (method, flags) in EXPORTED.items():
        lines.append(export_row(name, method, flags, folder))
    return "\n".join(lines) + "\n"


def tables() -> dict[str, str]:
    """Return the tables of the page by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for value in values():
            message = refusal(folder, value)
            assert message is None, f"{value.name} is refused by itself: {message}"
        refused = refusals(folder)
        exports = table_of_exports(folder)
    return {
        "methods": table_by_method(refused),
        "refusals": table_of_refusals(refused),
        "exports": exports,
    }


def print_tables() -> None:
    """Print the tables. With --write, also put them into the page."""
    args = parser(__doc__, PAGE).parse_args()
    for name, text in tables().items():
        print(text)
        if args.write:
            write(ROOT / PAGE, name, text)


if __name__ == "__main__":
    print_tables()
