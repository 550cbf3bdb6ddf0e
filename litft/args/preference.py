"""The objective of training, and the flags of learning from preferences."""

from dataclasses import dataclass, fields
from typing import Literal

Objectives = Literal["sft", "dft", "dpo", "ipo", "simpo", "orpo", "kto", "grpo", "distill"]
DataKind = Literal["supervised", "pairs", "labels", "prompts"]
# the kind of examples that each objective learns from, see `Encoder`
DATA_KINDS: dict[str, DataKind] = {
    "sft": "supervised",
    "dft": "supervised",
    "dpo": "pairs",
    "ipo": "pairs",
    "simpo": "pairs",
    "orpo": "pairs",
    "kto": "labels",
    "grpo": "prompts",
    "distill": "supervised",
}


@dataclass
class PreferenceArgs:
    """Learning from preferences, for --objective dpo, ipo, simpo, orpo and kto."""

    beta: float | None = None
    """How closely the model is kept to the reference; with simpo, the scale of the rewards.
    Default: 0.1; with simpo, 2."""
    label_smoothing: float = 0.0
    """dpo, simpo: the assumed fraction of pairs whose answers are exchanged (conservative DPO)."""
    gamma: float = 1.0
    """simpo: the margin by which the reward of the chosen answer should exceed that of the rejected
    one."""
    orpo_lambda: float = 0.1
    """orpo: the weight of the odds ratio next to the loss of the chosen answer."""
    desirable_weight: float = 1.0
    """kto: the weight of desirable answers."""
    undesirable_weight: float = 1.0
    """kto: the weight of undesirable answers."""
    sft_weight: float = 0.0
    """dpo, ipo, simpo, kto: the weight of the loss of the chosen (desirable) answers, which is
    added."""

    def problems(self, objective: str) -> list[str]:
        """Return the problems of values that are out of range, or that the objective does not
        use."""
        problems = []
        for item in fields(self):
            value = getattr(self, item.name)
            # a flag that the objective would ignore
            if value != item.default and objective not in USED_BY[item.name]:
                users = ", ".join(USED_BY[item.name])
                problems.append(
                    f"--preference.{item.name} applies only to --objective {users}; leave it out"
                )
            elif value is not None and value < 0:
                problems.append(f"--preference.{item.name} {value}: must not be negative")
        # weights of 0 switch a term off, but beta scales all of the loss
        if self.beta == 0:
            problems.append("--preference.beta 0: must be above 0")
        if self.label_smoothing >= 0.5:
            problems.append(
                f"--preference.label_smoothing {self.label_smoothing}: must be below 0.5"
            )
        return problems


USED_BY = {  # the objectives that use a flag
    "beta": ("dpo", "ipo", "simpo", "kto"),
    "label_smoothing": ("dpo", "simpo"),
    "gamma": ("simpo",),
    "orpo_lambda": ("orpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "sft_weight": ("dpo", "ipo", "simpo", "kto"),
}
