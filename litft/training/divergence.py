"""Losses and gradients that are not finite, or have exploded: the run ends, or leaves such steps
out."""

import math
from collections.abc import Callable
from pathlib import Path

from litft.args import TrainArgs
from litft.training.output.metrics import Row
from litft.training.schedule import Schedule

# the run ends after this many consecutive steps without finite values, also with --train.skip_nan
MAX_SKIPPED = 10
# of the loss in fp16: a gradient that overflows with it is beyond 2^20 itself
SMALLEST_SCALE = 2.0**-4
# times the loss of the first step, or of a uniform guess: training does not recover from there
EXPLODED = 3


class DivergenceGuard:
    """Looks at every step's loss and gradient norm, and at the validation loss; ValueError where
    the run has diverged."""

    def __init__(
        self,
        train: TrainArgs,
        schedule: Schedule,
        uniform_loss: float,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self.train = train
        self.schedule = schedule
        # of a uniform guess
        self.uniform_loss = uniform_loss
        self.folder = folder
        self.say = say
        self.skipped = 0  # steps in a row, by --train.skip_nan
        self.has_overflowed = False  # whether the first overflow in fp16 was reported

    def check(self, row: Row, first: Row) -> None:
        """Raise ValueError where a step's row says that the run has diverged; `first` is the row of
        the first step."""
        if "loss" not in row:
            return
        step = int(row["step"])
        for column, name in (("loss", "loss"), ("grad_norm", "gradient's norm")):
            if not math.isfinite(row[column]):
                # in fp16, the update was left out, and the scale is lower now
                if column == "grad_norm" and "loss_scale" in row:
                    continue
                # the step was left out, and the weights are as before
                if self.train.skip_nan:
                    return
                raise ValueError(self._message(step, name, row[column]))
        if row["loss"] > EXPLODED * max(self.uniform_loss, first["loss"]):
            raise ValueError(
                self._message(step, "loss", row["loss"], f" and was {first['loss']:.3g}")
            )

    def check_validation(self, step: int, loss: float) -> None:
        """Raise ValueError where the validation loss after `step` steps is not finite."""
        if not math.isfinite(loss):
            raise ValueError(self._message(step, "validation loss", loss))

    def check_loss_scale(self, number: int, scale: float) -> None:
        """Report the first update that overflows; ValueError where the scale of the loss cannot be
        lowered further."""
        if scale < SMALLEST_SCALE:
            raise ValueError(
                f"update {number + 1}: gradients overflow fp16 although the loss is scaled by "
                f"{scale:.3g}; use --precision fp32 (or bf16, on a GPU that has it)"
            )
        if not self.has_overflowed:
            self.has_overflowed = True
            self.say(
                f"update {number + 1} is left out: its gradients overflow fp16 with the loss "
                f"scaled by {scale:g}, which is halved; metrics.csv counts such updates"
            )

    def skip(self, step: int) -> None:
        """Report the examples of a step that is left out; ValueError where that happens again and
        again."""
        self.skipped += 1
        if self.skipped >= MAX_SKIPPED:
            raise ValueError(
                f"step {step + 1}: {MAX_SKIPPED} steps in a row are not finite; {self._restart()}"
            )
        examples = ", ".join(map(str, self.schedule.step_indices(step)))
        self.say(
            f"step {step + 1} is left out: its loss or gradient is not finite; its training "
            f"examples: {examples}"
        )

    def _message(self, step: int, name: str, value: float, more: str = "") -> str:
        if step:
            remedy = self._restart()
        else:
            remedy = "look for NaN or infinity in its weights and config.json"
        examples = ""
        # only training losses belong to the examples of a step
        if step and name != "validation loss":
            numbers = ", ".join(map(str, self.schedule.step_indices(step - 1)))
            examples = f"; the step's training examples: {numbers}"
            # a finite loss is not left out
            if not math.isfinite(value):
                examples += " (--train.skip_nan leaves such steps out)"
        return (
            f"step {step}: the {name} is {value:.4g}{more}, so training cannot continue; "
            f"{remedy}{examples}"
        )

    def _restart(self) -> str:
        """What to do after a divergence; --resume would repeat it."""
        best = self.folder / "best"
        if best.is_dir():
            start = f", from {best} as its --checkpoint_dir"
        else:
            start = ""
        return (
            f"start another run{start} with a lower --train.learning_rate (now "
            f"{self.train.learning_rate:g})"
        )
