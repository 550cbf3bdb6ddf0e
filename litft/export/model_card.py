"""Model cards: what a run was trained on and how, its results, and how to load it.
https://hf.co/docs/hub/model-cards"""

import csv
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from litft import __version__, run_dir
from litft.args import FinetuneArgs
from litft.checkpoints.adapter_reader import (
    adapter_tensor_names,
    noted_step,
    vllm_obstacles,
)
from litft.checkpoints.hub import HubId, fetch, hub_id
from litft.data.sources import hub_dataset
from litft.pretrained.folder import PretrainedFolder, resolve
from litft.training.objectives import OBJECTIVES

# what objectives learn from, other than preferences
LEARNED_FROM = {"dft": "", "grpo": " from rewards", "distill": " from a teacher"}
# the settings table lists these flags always, and those
# of LISTED_GROUPS if they differ from their defaults
ALWAYS_LISTED = (
    "precision",
    "quantize",
    "seed",
    "train.epochs",
    "train.global_batch_size",
    "train.learning_rate",
    "train.optimizer",
)
LISTED_GROUPS = ("train", "data", "preference", "grpo", "distill", "lora", "adapter")
# specific to the machine
UNLISTED = ("path", "val_path", "template", "log_interval", "micro_batch_size")
LICENCE_FIELDS = ("license", "license_name", "license_link")
TITLES = {
    "lora": "LoRA",
    "adapter": "LLaMA-Adapter",
    "adapter_v2": "LLaMA-Adapter v2",
    "full": "full fine-tuning",
}


# supported values of vLLM's --max-lora-rank
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


class CardInfo(NamedTuple):
    """Facts that a model card is written from."""

    repo_id: str  # the repository to upload to
    source: PretrainedFolder
    # the run that produced the model; None: unknown
    run: Path | None
    args: FinetuneArgs | None  # the run's flags
    base: HubId | None  # the base model on the hub
    # adapter_config.json; empty for a full model
    adapter_config: dict[str, Any]
    # the fields license, license_name and license_link of a card's header
    licence: dict[str, str]

    @property
    def base_folder(self) -> Path:
        """The folder of the base model, as recorded by the run or the adapter."""
        if self.args and not self.source.adapter:
            path = base_of_run(self.args)
        else:
            path = self.source.base
        repo = hub_id(path)
        if repo and repo.is_pinned:
            return fetch(repo)[0]
        return path

    @property
    def base_name(self) -> str:
        """The base's name on the hub, or else the name of its folder."""
        if self.base:
            return self.base.name
        return self.base_folder.resolve().name

    @property
    def method(self) -> str | None:
        """The fine-tuning method of the run, or None if the run is unknown."""
        if self.run:
            return run_dir.method(self.run)
        return None


def model_card(info: CardInfo) -> str:
    """Return the card: Markdown with a YAML header."""
    is_adapter = info.source.adapter is not None
    paths = _learned_paths(info.args) if info.args else []
    # the hub reads these fields
    header = {
        "base_model": info.base and info.base.name,
        "base_model_relation": ("adapter" if is_adapter else "finetune")
        if info.base
        else None,
        "library_name": {
            None: "transformers",
            "LORA": "peft",
            "ADAPTION_PROMPT": "peft",
        }.get(_peft_type(info), "litft"),
        "pipeline_tag": "text-generation",
        **info.licence,
        "datasets": [dataset.name for path in paths if (dataset := hub_dataset(path))]
        or None,
        "tags": ["litft", *filter(None, [info.method])],
    }
    values = {name: value for name, value in header.items() if value is not None}
    title = (
        "---\n"
        f"{yaml.safe_dump(values, sort_keys=False)}---\n"
        "\n"
        f"# {info.repo_id.rpartition('/')[2]}\n"
    )
    return (
        "\n".join(
            [title, *_about(info), *_results(info), *_settings(info), *_loading(info)]
        )
        + "\n"
    )


def _learned_paths(args: FinetuneArgs) -> list[str]:
    """Return the paths that the run learned from: not those with weight 0."""
    learned = []
    for item, weight in zip(args.data.paths, args.data.path_weights, strict=True):
        if weight:
            learned.append(item.path)
    return learned


def _peft_type(info: CardInfo) -> str | None:
    """Return the adapter's peft_type, or None for a full model."""
    if info.source.adapter:
        return str(info.adapter_config.get("peft_type"))
    return None


def licence_of(base_folder: Path, base: HubId | None) -> dict[str, str]:
    """Return what the base's own model card states of its licence; empty if the card is missing or
    does not state one.

    A licence named `other` has a name and a link, which may be a file of the base's repository.
    """
    try:
        # the header is between two lines of dashes
        _, header, _ = (base_folder / "README.md").read_text("utf-8").split("---", 2)
        fields = yaml.safe_load(header)
        found = {}
        for name in LICENCE_FIELDS:
            if isinstance(fields.get(name), str):
                found[name] = fields[name]
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError):
        return {}
    if "license" not in found:
        return {}
    # a link without a host is a file of the base's repository
    link = found.get("license_link", "")
    if link and "://" not in link and base is not None:
        found["license_link"] = f"https://huggingface.co/{base.name}/blob/main/{link}"
    return found


def _licence_text(licence: dict[str, str]) -> str:
    """Return a licence for people to read."""
    name = licence.get("license_name") or licence.get("license") or "see the base model"
    link = licence.get("license_link")
    if link:
        return f"[{name}]({link})"
    return name


def _about(info: CardInfo) -> Iterator[str]:
    """Yield base, method, licence and data."""
    base = info.base
    if base:
        link = f"[{base.name}](https://huggingface.co/{base.name})"
    else:
        link = info.base_name
    if base and base.revision:
        commit = f" (commit `{base.revision[:12]}`)"
    else:
        commit = ""

    # how it was trained
    method = f" by {TITLES[info.method]}" if info.method else ""
    if info.args and info.args.objective != "sft":
        objective = OBJECTIVES[info.args.objective]
        source = LEARNED_FROM.get(objective.name, " from preferences")
        method += (
            f"{source} with {objective.title} "
            f"([{objective.paper}](https://arxiv.org/abs/{objective.paper}))"
        )
    if info.args or info.source.adapter:
        if info.source.adapter:
            kind = "An adapter for"
        else:
            kind = "A model derived from"
        yield f"{kind} {link}{commit}, trained{method} with litft {__version__}.\n"
    elif base:
        yield f"A model derived from {link}{commit}.\n"
    # an earlier run is part of what the model has learned
    earlier = info.args and continued_adapter(info.args)
    if earlier:
        yield (
            f"The training continued from an adapter, `{earlier.folder.name}`, of an earlier run; "
            "the data and settings below are those of the last run.\n"
        )
    # without a licence, the text refers to the base model, which must then be named
    if info.licence or base or info.args:
        yield f"Licence: {_licence_text(info.licence)}.\n"

    # of a local folder or file only the name is published
    if info.args and info.args.teacher:
        yield f"Teacher: `{hub_id(info.args.teacher) or Path(info.args.teacher).name}`.\n"
    if info.args:
        names = []
        for path in _learned_paths(info.args):
            dataset = hub_dataset(path)
            names.append(f"{dataset}" if dataset else f"`{Path(path).name}` (a file)")
        yield f"Data: {', '.join(names)}.\n"


def _results(info: CardInfo) -> Iterator[str]:
    """Yield losses and the amount of training, from metrics.csv."""
    if info.run is None:
        return
    try:
        with (info.run / "metrics.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError:
        return
    # the result before the run was continued, whose step no file tells
    if info.source.folder.name == run_dir.PREVIOUS:
        return
    # best/, a checkpoint, or what was exported from one
    weights_step = noted_step(info.source.folder)
    num_rows = len(rows)
    if weights_step is not None:
        rows = [row for row in rows if int(row["step"]) <= weights_step]
    is_end = len(rows) == num_rows
    end = "at the end" if is_end else f"after step {weights_step:,}"
    steps = [row for row in rows if row.get("loss")]
    validations = [row for row in rows if row.get("val_loss")]
    if not steps:
        return
    last = steps[-1]
    yield "## Results\n\n| | |\n|---|---|"
    yield (
        f"| steps, samples, tokens | {int(last['step']):,}, {int(last['samples']):,}, "
        f"{int(last['tokens']):,} |"
    )
    yield (
        f"| training loss, first and last step | {float(steps[0]['loss']):.4f}, "
        f"{float(last['loss']):.4f} |"
    )
    if validations and validations[0].get("val_reward"):
        # empty where no answer could be rated
        rewards = [float(row["val_reward"]) for row in validations if row["val_reward"]]
        yield f"| validation reward, first and last | {rewards[0]:.4f}, {rewards[-1]:.4f} |"
    elif validations:
        yield from _losses(validations, end, last["step"])
    yield ""
    # of the weights at the end
    verdicts = run_dir.verdict_texts(info.run)
    if verdicts and is_end and run_dir.finished(info.run):
        yield "Compared with the model before training:\n"
        yield from (f"- {verdict}" for verdict in verdicts)
        yield ""


def _losses(validations: list[dict[str, str]], end: str, last_step: str) -> Iterator[str]:
    """Yield the rows of a table with the losses and scores of validations; end: when the last was,
    in words."""
    first = validations[0]
    best = min(validations, key=lambda row: float(row["val_loss"]))
    if first["step"] == "0":
        when = "before training"
    else:
        when = f"after step {first['step']}"
    yield f"| validation loss, {when} | {float(first['val_loss']):.4f} |"
    # a checkpoint may be later than the last validation before it
    if validations[-1]["step"] != last_step:
        end = f"after step {int(validations[-1]['step']):,}"
    yield f"| validation loss, {end} | {float(validations[-1]['val_loss']):.4f} |"
    yield f"| validation loss, lowest | {float(best['val_loss']):.4f} (step {best['step']}) |"
    last_accuracy = validations[-1].get("val_accuracy")
    if last_accuracy:
        yield f"| validation accuracy, {end} | {float(last_accuracy):.1%} |"
    # KTO has no margin where all labels are the same
    last_margin = validations[-1].get("val_margin")
    if last_margin:
        yield f"| margin between the rewards, {end} | {float(last_margin):.3g} |"
    scored = [
        row for row in validations if row.get("exact_match") and row["step"] == last_step
    ]
    if scored:
        yield f"| exact match, {end} | {float(scored[-1]['exact_match']):.1%} |"


def _settings(info: CardInfo) -> Iterator[str]:
    """Yield a table of the flags that determine the result."""
    if info.args is None:
        return
    # an adapter that was continued has its own settings, whatever the flags say
    continued = continued_adapter(info.args) is not None
    values = _flatten(asdict(info.args))
    defaults = _flatten(asdict(type(info.args)()))
    yield "## Settings\n\n| flag | value |\n|---|---|"
    for name, value in values.items():
        group, _, leaf = name.rpartition(".")
        is_changed = (
            group in LISTED_GROUPS and value != defaults.get(name) and leaf not in UNLISTED
        )
        is_listed = (
            name in ALWAYS_LISTED
            or is_changed
            or (group == "lora" and leaf in ("r", "alpha", "targets"))
        )
        if is_listed and value is not None and not (continued and group == "lora"):
            yield f"| `--{name}` | {_table_text(value)} |"
    yield ""


def continued_adapter(args: FinetuneArgs) -> PretrainedFolder | None:
    """Return the adapter that a run continued from, whose ranks and targets replace those of the
    flags; None if it began with a whole model, or the folder no longer exists."""
    if hub_id(args.model_dir):
        return None
    try:
        start = resolve(args.model_dir, args.base_dir)
    except ValueError:  # the folder no longer exists
        return None
    return start if start.adapter else None


def base_of_run(args: FinetuneArgs) -> Path:
    """Return the folder of the base model of a run; that of its adapter if it continued one."""
    adapter = continued_adapter(args)
    if adapter:
        return adapter.base
    return Path(args.model_dir)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        flat |= (
            _flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat


def _table_text(value: Any) -> str:
    if isinstance(value, list):
        text = ", ".join(map(str, value))
    else:
        text = str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _loading(info: CardInfo) -> Iterator[str]:
    """Yield instructions for each program that can load the model."""
    repo_id = info.repo_id
    base = info.base_name
    kind = _peft_type(info)
    yield "## Loading\n"
    yield f"litft:\n\n```bash\nlitft chat --checkpoint_dir {repo_id}\n```\n"
    auto_class = _auto_class(info)
    if kind is None:
        yield _python(
            "transformers",
            f"from transformers import {auto_class}, AutoTokenizer\n",
            f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")',
            f'model = {auto_class}.from_pretrained("{repo_id}")',
        )
        yield _vllm(f"vllm serve {repo_id}", info)
    elif info.adapter_config.get("use_dora") and info.adapter_config.get(
        "target_parameters"
    ):
        yield (
            "PEFT has no DoRA for stacked experts; merge the adapter first: `litft merge_lora "
            f"--checkpoint_dir {repo_id} --out_dir merged`\n"
        )
    elif kind in ("LORA", "ADAPTION_PROMPT"):
        yield _python(
            "PEFT",
            f"from peft import PeftModel\nfrom transformers import {auto_class}, AutoTokenizer\n",
            f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")',
            f'base = {auto_class}.from_pretrained("{base}"{_revision(info)})',
            *_resizing(info),
            f'model = PeftModel.from_pretrained(base, "{repo_id}")',
        )

    # vLLM: directly, or merged
    if kind == "LORA":
        obstacles = vllm_obstacles(info.adapter_config)
    else:
        obstacles = []
    if obstacles:
        merge = f"litft merge_lora --checkpoint_dir {repo_id} --out_dir merged\nvllm serve merged"
        yield (
            f"vLLM does not load {', '.join(obstacles)} as an adapter; merge it first:\n"
            "\n"
            "```bash\n"
            f"{merge}\n"
            "```\n"
        )
    elif kind == "LORA":
        name = repo_id.rpartition("/")[2]
        rank = _vllm_rank(info)
        flags = f"--enable-lora --max-lora-rank {rank} --lora-modules {name}={repo_id}"
        # the chat template and the end tokens of the adapter, not of its base
        files = f"--tokenizer {repo_id} --generation-config {repo_id}"
        revision = info.base.revision if info.base else None
        if revision:
            flags = f"--revision {revision} {flags}"
        yield _vllm(f"vllm serve {base} {flags} {files}", info)
    if kind in (None, "LORA"):
        yield (
            "llama.cpp and Ollama:\n"
            "\n"
            "```bash\n"
            f"litft convert_to_gguf --checkpoint_dir {repo_id} --out_dir gguf\n"
            "```"
        )


def _vllm(command: str, info: CardInfo) -> str:
    """Return the command that serves the model in vLLM, and the flags for tools if its template has
    them."""
    text = f"vLLM:\n\n```bash\n{command}\n```\n"
    parser = _vllm_tool_parser(info)
    if parser:
        text += (
            f"\nFor tools, add `--enable-auto-tool-choice --tool-call-parser {parser}`.\n"
        )
    return text


# vLLM's parsers by the mark that opens calls
VLLM_TOOL_PARSERS = {
    "[TOOL_CALLS]": "mistral",
    "": "llama3_json",
    "<|tool_call_start|>": "lfm2",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "<minimax:tool_call>": "minimax_m2",
    "<seed:tool_call>": "seed_oss",
    "<|tools_prefix|>": "apertus",
    "<function_calls>": "olmo3",
}


def _vllm_tool_parser(info: CardInfo) -> str | None:
    """Return the name of vLLM's parser for the calls that the chat template writes; None if it is
    not known."""
    tokenizer = info.source.tokenizer()
    if tokenizer is None or not tokenizer.has_template:
        return None
    answer_format = tokenizer.answer_format
    if answer_format.channels:
        return "openai"
    if answer_format.calls is None:
        return None
    # the template's text tells families with the same mark apart
    template = tokenizer.template_for([{}])
    # which several families fill differently
    if answer_format.calls.opening == "<tool_call>":
        if "<function=" in template:
            return "qwen3_coder"
        if "<arg_key>" in template:
            return "glm45"
        return "hermes"
    return VLLM_TOOL_PARSERS.get(answer_format.calls.opening)


def _python(title: str, *lines: str) -> str:
    body = "\n".join(lines)
    return f"{title}:\n\n```python\n{body}\n```\n"


def _revision(info: CardInfo) -> str:
    if info.base and info.base.revision:
        return f', revision="{info.base.revision}"'
    return ""


def _auto_class(info: CardInfo) -> str:
    """Return the class of transformers that opens the model, or an adapter's base with the names
    that the adapter has."""
    if info.source.adapter is None:
        is_wrapper = info.source.multimodal is not None
    else:
        is_wrapper = any(
            "language_model." in key for key in adapter_tensor_names(info.source.adapter)
        )
    if is_wrapper:
        return "AutoModelForImageTextToText"
    return "AutoModelForCausalLM"


def _resizing(info: CardInfo) -> list[str]:
    """Return the command that gives the base as many rows as the adapter has tokens, if it has
    more."""
    size = info.adapter_config.get("litft", {}).get("vocab_size")
    if size:
        return [f"base.resize_token_embeddings({size})"]
    return []


def _vllm_rank(info: CardInfo) -> int:
    """Return the adapter's largest rank, rounded up to a value that vLLM supports."""
    rank = max(
        [
            info.adapter_config.get("r", 8),
            *(info.adapter_config.get("rank_pattern") or {}).values(),
        ]
    )
    return next((supported for supported in VLLM_RANKS if supported >= rank), rank)
