"""The flags of `run_eval`."""

from dataclasses import dataclass, field, fields

from litft.args.checks import below
from litft.args.finetune import DataArgs
from litft.args.inference import ModelArgs, OpenArgs


@dataclass
class RunEvalArgs(OpenArgs):
    """Score a model, and its base beside it: lm-evaluation-harness tasks, or loss and answers on your own examples."""

    tasks: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness, by name or as the path of a YAML file."""
    include_path: str | None = None
    """A folder with more tasks."""
    num_fewshot: int | None = None
    """Examples before each question. Default: the task's own."""
    chat_template: bool = False
    """Put the tasks' questions into the model's chat template."""
    data: DataArgs = field(default_factory=lambda: DataArgs(val_fraction=0.0))
    against: str | None = None
    """Another model's folder to score beside this one; none: score this one alone. Default: of an adapter its base."""
    limit: int | None = None
    """Only so many examples, of each task and of --data."""
    batch_size: int = 8
    """Texts that go through the network at once."""
    max_new_tokens: int | None = None
    """Tokens of an answer to --data. Default: those of the expected one, and 8 more."""
    show: int = 3
    """How many answers to --data are printed."""
    out: str | None = None
    """Write flags, scores, all answers and the tasks' samples there, as JSON."""

    def problems(self) -> list[str]:
        """As for every model, and that there is something to score."""
        found = super().problems() + self.data.problems() + below(self, "", 1, "limit", "batch_size", "max_new_tokens")
        found += below(self, "", 0, "show", "num_fewshot")
        for name in ("new_tokens", "weights"):
            if getattr(self.data, name):
                found.append(f"--data.{name} is of training; leave it out")
        if self.devices > 1 and not self.layers_per_device:
            found.append(
                f"--devices {self.devices}: texts are scored whole; spread the layers with --layers_per_device auto"
            )
        return found

    def model(self, folder: str | None, base_dir: str | None = None) -> ModelArgs:
        """How a folder is opened, held as these say. Texts have all lengths: compiling would take longer than it gains."""
        held = {item.name: getattr(self, item.name) for item in fields(OpenArgs)}
        return ModelArgs(**held | {"checkpoint_dir": folder, "base_dir": base_dir}, compile="false")
