"""The flags of learning from a teacher: --objective distill."""

from dataclasses import dataclass

from litft.args.methods import Quantization
from litft.args.value_checks import below_minimum, unused_group


@dataclass
class DistillArgs:
    """Learning from a teacher, for --objective distill."""

    alpha: float = 0.5
    """The weight of the cross-entropy of the data's answers; the divergence from the teacher has 1
    - alpha."""
    beta: float = 0.0
    """The divergence. 0: forward KL, which covers all that the teacher may say. 1: reverse KL,
    which keeps to what it says most. Between: the generalized Jensen-Shannon divergence."""
    temperature: float = 1.0
    """The logits of teacher and student are divided by it before they are compared."""
    top_k: int = 64
    """The teacher's likeliest tokens that are kept for each target, with the probability of all
    others together."""
    teacher_base_dir: str | None = None
    """The folder of the base of a teacher that is an adapter, if it has moved."""
    quantize: Quantization = "none"
    """Quantize the teacher's weights; it then takes less memory, and says something else."""
    on_policy: float = 0.0
    """The share of the examples whose answers the student writes itself, for the teacher to judge.
    Teacher and student are then in memory together."""
    max_new_tokens: int = 256
    """on_policy: the maximum length of an answer in tokens."""

    def problems(self, objective: str, teacher: str | None) -> list[str]:
        """Return the problems of values that are out of range, or of no use to the objective;
        teacher: --teacher."""
        problems = []
        if objective != "distill":
            if teacher:
                problems.append("--teacher applies only to --objective distill; add it")
            return problems + unused_group(self, "distill")
        if not teacher:
            problems.append(
                "--teacher is missing: name the folder of the model to learn from"
            )
        problems += below_minimum(self, "distill", 1, "top_k", "max_new_tokens")
        for name in ("alpha", "beta", "on_policy"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                problems.append(f"--distill.{name} {value}: must lie in [0, 1]")
        if self.alpha == 1:
            problems.append(
                "--distill.alpha 1: the teacher would have no effect; lower it, or use "
                "--objective sft"
            )
        if not 0 < self.temperature <= 100:
            problems.append(
                f"--distill.temperature {self.temperature}: must lie in (0, 100]"
            )
        return problems
