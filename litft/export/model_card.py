"""A model card: what a run was trained on and how, what became of it, and how to load it. https://hf.co/docs/hub/model-cards"""

import csv
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from litft import __version__, run_dir
from litft.args import FinetuneArgs
from litft.checkpoints.hub import HubId, fetch, hub_id
from litft.data.sources import hub_data
from litft.pretrained import PretrainedFolder, resolve

# of the flags those that say how a model was trained, wherever that was; of these groups what was changed, too
TOLD = ("precision", "quantize", "seed", "train.epochs", "train.global_batch_size", "train.learning_rate", "train.optimizer")
GROUPS = ("train", "data", "lora", "adapter")
PLACES = ("path", "val_path", "template", "log_interval", "micro_batch_size")  # not told: of the machine
TITLES = {"lora": "LoRA", "adapter": "LLaMA-Adapter", "adapter_v2": "LLaMA-Adapter v2", "full": "full fine-tuning"}


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of its --max-lora-rank


class CardInfo(NamedTuple):
    """What a card is about."""

    repo_id: str  # where it will be
    source: PretrainedFolder
    run: Path | None  # whose result it is; None: not known
    trained: FinetuneArgs | None  # the run's flags
    base: HubId | None  # on the hub
    config: dict[str, Any]  # adapter_config.json; empty of a whole model
    licence: str | None

    @property
    def base_folder(self) -> Path:
        """Where the base is, or was when the run began."""
        named = Path(self.trained.checkpoint_dir) if self.trained and not self.source.adapter else self.source.base
        return fetch(wanted)[0] if (wanted := hub_id(named)) and wanted.is_pinned else named

    @property
    def base_name(self) -> str:
        """The base as people call it."""
        return self.base.name if self.base else self.base_folder.resolve().name

    @property
    def method(self) -> str | None:
        """How it was trained."""
        return run_dir.method(self.run) if self.run else None


def model_card(subject: CardInfo) -> str:
    """The card, Markdown with a head of YAML."""
    adapter = subject.source.adapter is not None
    paths = subject.trained.data.path if subject.trained else []
    head = {
        "base_model": subject.base and subject.base.name,
        "base_model_relation": ("adapter" if adapter else "finetune") if subject.base else None,
        "library_name": {None: "transformers", "LORA": "peft", "ADAPTION_PROMPT": "peft"}.get(_kind(subject), "litft"),
        "pipeline_tag": "text-generation",
        "license": subject.licence,
        "datasets": [wanted.name for path in paths if (wanted := hub_data(path))] or None,
        "tags": ["litft", *filter(None, [subject.method])],
    }
    given = {name: value for name, value in head.items() if value is not None}
    title = f"---\n{yaml.safe_dump(given, sort_keys=False)}---\n\n# {subject.repo_id.rpartition('/')[2]}\n"
    return "\n".join([title, *_about(subject), *_results(subject), *_settings(subject), *_loading(subject)]) + "\n"


def _kind(subject: CardInfo) -> str | None:
    """peft_type, of an adapter."""
    return str(subject.config.get("peft_type")) if subject.source.adapter else None


def licence_of(base: Path) -> str | None:
    """What the base's own card says."""
    try:
        _, head, _ = (base / "README.md").read_text("utf-8").split("---", 2)
        found = yaml.safe_load(head).get("license")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None
    return found if isinstance(found, str) else None


def _about(subject: CardInfo) -> Iterator[str]:
    base, licence = subject.base, subject.licence
    link = f"[{base.name}](https://huggingface.co/{base.name})" if base else subject.base_name
    at = f" (commit `{base.revision[:12]}`)" if base and base.revision else ""
    how = f" by {TITLES[subject.method]}" if subject.method else ""
    if subject.trained or subject.source.adapter:
        what = "An adapter of" if subject.source.adapter else "A model made from"
        yield f"{what} {link}{at}, trained{how} with litft {__version__}.\n"
    elif base:
        yield f"A model made from {link}{at}.\n"
    if licence or base or subject.trained:
        yield f"Licence: {licence or 'that of the base model, which see'}.\n"
    if subject.trained:
        names = [
            f"{hub_data(path)}" if hub_data(path) else f"`{Path(path).name}` (a file)" for path in subject.trained.data.path
        ]
        yield f"Data: {', '.join(names)}.\n"


def _results(subject: CardInfo) -> Iterator[str]:
    """Losses and amounts, out of metrics.csv."""
    try:
        with (subject.run / "metrics.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, TypeError):
        return
    if subject.source.folder.name == "best":  # the weights of an earlier step
        losses = {int(row["step"]): float(row["val_loss"]) for row in rows if row.get("val_loss") and row["step"] != "0"}
        rows = [row for row in rows if int(row["step"]) <= min(losses, key=losses.__getitem__, default=math.inf)]
    steps = [row for row in rows if row.get("loss")]
    checked = [row for row in rows if row.get("val_loss")]
    if not steps:
        return
    last = steps[-1]
    yield "## Results\n\n| | |\n|---|---|"
    yield f"| steps, samples, tokens | {int(last['step']):,}, {int(last['samples']):,}, {int(last['tokens']):,} |"
    yield f"| training loss, first and last step | {float(steps[0]['loss']):.4f}, {float(last['loss']):.4f} |"
    if checked:
        first, best = checked[0], min(checked, key=lambda row: float(row["val_loss"]))
        when = "before training" if first["step"] == "0" else f"after step {first['step']}"
        yield f"| validation loss, {when} | {float(first['val_loss']):.4f} |"
        yield f"| validation loss, at the end | {float(checked[-1]['val_loss']):.4f} |"
        yield f"| validation loss, lowest | {float(best['val_loss']):.4f} (step {best['step']}) |"
        if scored := [row for row in checked if row.get("exact_match") and row["step"] == last["step"]]:
            yield f"| exact match, at the end | {float(scored[-1]['exact_match']):.1%} |"
    yield ""


def _settings(subject: CardInfo) -> Iterator[str]:
    """The flags that made it what it is."""
    if subject.trained is None:
        return
    went_on = _went_on(subject.trained)
    given, usual = _flat(asdict(subject.trained)), _flat(asdict(type(subject.trained)()))
    yield "## Settings\n\n| flag | value |\n|---|---|"
    for name, value in given.items():
        group, _, leaf = name.rpartition(".")
        changed = group in GROUPS and value != usual.get(name) and leaf not in PLACES
        told = name in TOLD or changed or (group == "lora" and leaf in ("r", "alpha", "targets"))
        if told and value is not None and not (went_on and group == "lora"):
            yield f"| `--{name}` | {_word(value)} |"
    yield ""


def _went_on(trained: FinetuneArgs) -> bool:
    """Whether a run went on with an adapter, which has its own ranks and targets."""
    if hub_id(trained.checkpoint_dir):
        return False
    try:
        return resolve(trained.checkpoint_dir).adapter is not None
    except ValueError:  # it is not there any more
        return False


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _word(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _loading(subject: CardInfo) -> Iterator[str]:
    """How each program opens it, and only those that do."""
    here, base, kind = subject.repo_id, subject.base_name, _kind(subject)
    yield "## Loading\n"
    yield f"litft:\n\n```bash\nlitft chat --checkpoint_dir {here}\n```\n"
    if kind is None:
        yield _python(
            "transformers",
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n",
            f'model, tokenizer = (kind.from_pretrained("{here}") for kind in (AutoModelForCausalLM, AutoTokenizer))',
        )
        yield f"vLLM:\n\n```bash\nvllm serve {here}\n```\n"
    elif kind in ("LORA", "ADAPTION_PROMPT"):
        yield _python(
            "PEFT",
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n",
            f'tokenizer = AutoTokenizer.from_pretrained("{here}")',
            f'base = AutoModelForCausalLM.from_pretrained("{base}"{_revision(subject)})',
            *(["base.resize_token_embeddings(len(tokenizer))"] if _has_tokens(subject) else []),
            f'model = PeftModel.from_pretrained(base, "{here}")',
        )
    plain = kind == "LORA" and _is_plain(subject)
    if plain:
        name, rank = here.rpartition("/")[2], _rank(subject)
        flags = f"--enable-lora --max-lora-rank {rank} --lora-modules {name}={here}"
        yield f"vLLM:\n\n```bash\nvllm serve {base} {flags}\n```\n"
    if kind in (None, "LORA"):
        yield f"llama.cpp and Ollama:\n\n```bash\nlitft convert_to_gguf --checkpoint_dir {here} --out_dir gguf\n```"


def _python(title: str, *lines: str) -> str:
    body = "\n".join(lines)
    return f"{title}:\n\n```python\n{body}\n```\n"


def _revision(subject: CardInfo) -> str:
    return f', revision="{subject.base.revision}"' if subject.base and subject.base.revision else ""


def _has_tokens(subject: CardInfo) -> bool:
    return bool(subject.config.get("trainable_token_indices"))


def _is_plain(subject: CardInfo) -> bool:
    """Whether an adapter is LoRA of Linears alone, which vLLM takes."""
    config = subject.config
    more = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")
    return not any(config.get(name) for name in more) and config.get("bias", "none") == "none"


def _rank(subject: CardInfo) -> int:
    """The adapter's largest rank, rounded up to one that vLLM knows."""
    rank = max([subject.config.get("r", 8), *(subject.config.get("rank_pattern") or {}).values()])
    return next((known for known in VLLM_RANKS if known >= rank), rank)
