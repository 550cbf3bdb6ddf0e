"""The flags of the training data, shared by fine-tuning, `prepare_data` and `run_eval`."""

from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from litft.args.data_path import DataPath, Formats
from litft.args.value_checks import below_minimum

# names of the files for validation in a folder, without their extension
VAL_NAMES = ("val", "valid", "validation", "dev")


@dataclass
class DataArgs:
    """The training and validation examples."""

    path: list[str] = field(default_factory=list)
    """Training examples: a .json, .jsonl, .csv, .tsv, .parquet or .txt file, optionally compressed
    (.gz, .zst); a folder with train.* and val.*; or the id of a Hugging Face hub dataset. Several
    paths: a,b. In a --config file, a path may be a mapping with its own format, columns, template,
    weight, limit, subset and split. Required with --checkpoint_dir."""
    weights: list[float] = field(default_factory=list)
    """One number per path: how many times an epoch uses its examples, such as 1,0.5; a path with 0
    is not read. Default: 1 for each path."""
    subset: str | None = None
    """The subset (configuration) of a hub dataset that has several."""
    split: str | None = None
    """The training split of hub datasets, such as train_sft. Default: train. For one of several
    paths: owner/name:split."""
    format: Formats | None = None
    """The format of the records. Default: detected from their field names."""
    columns: list[str] = field(default_factory=list)
    """Map litft's field names to those of your file, OURS=THEIRS:
    instruction=question,output=reply. Of two formats whose fields a record has, the one that is
    mapped counts."""
    skip_bad: float = 0.0
    """The fraction of a file's records that may be invalid, such as 0.01 for one in a hundred;
    invalid records are skipped. 0: the first one ends the run."""
    limit: int | None = None
    """Use only the first records of each path, this many. Files with validation examples are used
    whole, unless they have a limit of their own. Default: all."""
    dedup: Literal["none", "exact", "near"] = "none"
    """Leave out training records that copy an earlier one that stays. exact: with equal content.
    near: also those of which four fifths of the words, three in a row, are the same."""
    replay: float = 0.0
    """Also learn the model's own answers to ordinary questions, so that it forgets less: as many as
    this share of the training examples, such as 0.1. They are generated before the run, and only
    the answers are learned."""
    val_path: list[str] = field(default_factory=list)
    """Validation examples: a file, or a split of a hub dataset, owner/name:test_sft. Several sets,
    each with its own loss: code=a.jsonl,chat=b.jsonl. Default: val.* of the folder in `path`, or
    the validation split of the hub dataset; otherwise a held-out part of `path`."""
    val_fraction: float = 0.05
    """The fraction of the examples held out for validation if there is no validation file. 0: no
    validation."""
    template: str = "auto"
    """The chat template: auto (the checkpoint's own, or alpaca if it has none), the path of a Jinja
    file, or the name of a built-in one: alpaca, chatml, gemma, guanaco, llama2, llama3, mistral,
    phi-3, vicuna, zephyr; or plain, without marks."""
    template_args: list[str] = field(default_factory=list)
    """Arguments of the chat template, NAME=VALUE: enable_thinking=false. They become defaults of
    the saved template."""
    mask_prompt: bool = True
    """Compute the loss on the answers only. false: on every token, prompts included."""
    reasoning: Literal["learn", "learn_empty", "mask", "drop"] = "learn"
    """The reasoning of answers (reasoning_content, reasoning, thinking, or the text before
    </think>). learn: compute the loss on it. mask: show it to the model, without loss. drop: leave
    it out. An empty thought that the chat template writes, such as <think></think>, is a target
    with learn_empty only."""
    train_on: Literal["all", "last"] = "all"
    """Compute the loss on all answers of a conversation, or on the last one only."""
    max_seq_length: int | None = None
    """Maximum length of an example in tokens. Longer examples are truncated; longer plain texts are
    split into several.
    Default: the model's context length, at most 2048."""
    packing: bool = True
    """Pack the examples of a step into rows of at most max_seq_length tokens. Examples in a row do
    not attend to each other. false: one example per row, padded."""
    date: str | None = None
    """The date that chat templates insert as today's, such as 2026-11-21. Default: the day on which
    the run started."""
    new_tokens: list[str] = field(default_factory=list)
    """Strings to add to the vocabulary as single tokens. Their rows of the embedding and the output
    head are trained."""
    seed: int = 42
    """Random seed that selects the held-out examples."""

    @property
    def paths(self) -> list[DataPath]:
        """The items of `path`."""
        return [DataPath.parse(item) for item in self.path]

    @property
    def val_paths(self) -> list[DataPath]:
        """The items of `val_path`."""
        return [DataPath.parse(item) for item in self.val_path]

    @property
    def has_file_templates(self) -> bool:
        """Whether a file has a chat template of its own."""
        return any(item.template for item in (*self.paths, *self.val_paths))

    @property
    def path_weights(self) -> list[float]:
        """The weight of each path."""
        # a weight of the path itself has priority
        defaults = self.weights or [1.0] * len(self.path)
        weights = []
        for path, default in zip(self.paths, defaults, strict=True):
            if path.weight is None:
                weights.append(default)
            else:
                weights.append(path.weight)
        return weights

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is loaded."""
        problems = []
        for column in self.columns:
            # an = at the beginning or the end has no name on one side
            if "=" not in column.strip("="):
                problems.append(
                    f"--data.columns {column}: expected OURS=THEIRS, such as output=reply"
                )
        for item in self.template_args:
            if not (item.partition("=")[0].isidentifier() and "=" in item):
                problems.append(
                    f"--data.template_args {item}: expected NAME=VALUE, such as "
                    "enable_thinking=false"
                )
        problems += self._path_problems()
        if self.weights and len(self.weights) != len(self.path):
            problems.append(
                f"--data.weights has {len(self.weights)} numbers for {len(self.path)} paths; give "
                "one per path"
            )
        # weights of 0 for all paths would leave no example
        if any(weight < 0 for weight in self.weights) or (
            self.weights and not any(self.weights)
        ):
            problems.append(
                "--data.weights must not be negative, and at least one must be above 0"
            )
        if any(weight > 1000 for weight in self.weights):
            problems.append("--data.weights must be at most 1000")
        if not 0 <= self.val_fraction < 1:
            problems.append(
                f"--data.val_fraction {self.val_fraction}: must be at least 0, and less than 1"
            )
        if not 0 <= self.skip_bad <= 1:
            problems.append(f"--data.skip_bad {self.skip_bad}: must lie between 0 and 1")
        if not 0 <= self.replay <= 1:
            problems.append(f"--data.replay {self.replay:g}: must lie between 0 and 1")
        problems += below_minimum(self, "data", 1, "max_seq_length", "limit")
        if self.date is not None and not _is_day(self.date):
            problems.append(f"--data.date {self.date}: expected a date such as 2026-11-21")
        return problems

    def _path_problems(self) -> list[str]:
        """Return the problems of the items of `path` and `val_path`."""
        problems = []
        for flag, items in (("path", self.path), ("val_path", self.val_path)):
            for item in items:
                try:
                    path = DataPath.parse(item)
                    if path.name and flag == "path":
                        problems.append(
                            f"--data.path {item}: only validation sets have names; name a file or "
                            "a folder"
                        )
                    if path.weight is not None and flag == "val_path":
                        problems.append(
                            f"--data.val_path {item}: a validation set has no weight; leave it out"
                        )
                except ValueError as error:
                    problems.append(f"--data.{flag} {error}")
        return problems


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False
