"""The flags of `run_eval`."""

from dataclasses import dataclass, field, fields, replace

from litft.args.data import DataArgs
from litft.args.inference import ModelArgs, OpenArgs
from litft.args.preference import Objectives
from litft.args.value_checks import below_minimum


@dataclass
class RunEvalArgs(OpenArgs):
    """Evaluate a model next to its base: on lm-evaluation-harness tasks, or loss and answers on
    your own examples."""

    # the flags that the command line or --config has given, also those with their default's value;
    # without a type, so that it is no flag itself
    given_flags = frozenset[str]()

    tasks: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness: names, or paths of YAML files. Several tasks: a,b."""
    include_path: str | None = None
    """A folder with additional task definitions (YAML files)."""
    num_fewshot: int | None = None
    """Number of solved examples before each question of a task. Default: the task's own number."""
    chat_template: bool = False
    """Apply the model's chat template to the questions of the tasks."""
    objective: Objectives | None = None
    """How to score the examples of --data: sft scores loss and exact match; dpo and kto score the
    log-probabilities of pairs and of labelled answers. Default: the objective of the run whose
    examples are scored; otherwise detected from the fields of the records."""
    reward: list[str] = field(default_factory=list)
    """Rate the model's answers to the prompts of --data with reward functions, instead of loss and
    exact match: number, exact, contains, math, regex:PATTERN, format:think, brief:TOKENS, or
    FILE.py:FUNCTION, each with an optional weight (tutorials/finetune_rewards.md)."""
    data: DataArgs = field(default_factory=lambda: DataArgs(val_fraction=0.0))
    against: str | None = None
    """The folder of another model to compare with. none: score this model only. Default: the base
    model of an adapter."""
    forgetting: bool = True
    """If two models are compared, also measure what the tuned one has forgotten: its loss on 50 kB
    of neutral text, and on its base's answers to 40 ordinary questions."""
    limit: int | None = None
    """Maximum number of examples of each task and of --data. Default: all."""
    batch_size: int = 8
    """Number of texts per forward pass."""
    max_new_tokens: int | None = None
    """Maximum length of an answer to an example of --data, in tokens. Default: that of the expected
    answer plus 8; with --reward, 256, or half of a length limit below 512."""
    show: int = 3
    """Number of answers to --data to print."""
    out: str | None = None
    """A JSON file to write with the flags, scores, all answers (of pairs and labelled answers their
    log-probabilities, and as many generated answers as --show) and the samples of the tasks.
    Default: no file."""

    def problems(self) -> list[str]:
        """Return the problems of the model flags plus those of the evaluation flags."""
        problems = (
            super().problems()
            + self.data.problems()
            + below_minimum(self, "", 1, "limit", "batch_size", "max_new_tokens")
        )
        problems += below_minimum(self, "", 0, "show", "num_fewshot")
        if self.reward and self.objective not in (None, "grpo"):
            problems.append(
                f"--objective {self.objective} scores examples otherwise than --reward; leave one "
                "out"
            )
        if self.tasks and self.reward and not self.data.path:
            problems.append(
                "--reward rates answers to --data, which is not given beside --tasks; leave it out"
            )
        if not self.tasks:
            of_tasks = {
                "num_fewshot": self.num_fewshot is not None,
                "chat_template": self.chat_template,
                "include_path": self.include_path,
            }
            for name, is_set in of_tasks.items():
                if is_set:
                    problems.append(
                        f"--{name} applies to --tasks, which is not given; leave it out"
                    )
        # flags of the data that only a training run uses
        for name in ("new_tokens", "weights", "replay"):
            if getattr(self.data, name):
                problems.append(f"--data.{name} applies only to training; leave it out")
        if self.devices > 1 and not self.layers_per_device:
            problems.append(
                f"--devices {self.devices}: evaluation needs whole layers on a device; use "
                "--layers_per_device auto"
            )
        return problems

    def model(self, folder: str | None, base_dir: str | None = None) -> ModelArgs:
        """Return the flags that open `folder` with these settings.

        No compilation: texts of many lengths would recompile.
        """
        # only the flags that open a model; those of generation keep their defaults
        settings = {item.name: getattr(self, item.name) for item in fields(OpenArgs)}
        settings["checkpoint_dir"] = folder
        settings["base_dir"] = base_dir
        return replace(ModelArgs(compile="false"), **settings)
