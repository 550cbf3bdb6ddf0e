"""Objectives: what training minimizes. One file each; `--objective` names them."""

from collections.abc import Sequence

from litft.args import FinetuneArgs
from litft.evaluation.rewards.reward import Reward
from litft.training.objectives.dft import DFT
from litft.training.objectives.distill import Distill
from litft.training.objectives.dpo import DPO
from litft.training.objectives.grpo import GRPO
from litft.training.objectives.ipo import IPO
from litft.training.objectives.kto import KTO
from litft.training.objectives.objective import Objective, Totals
from litft.training.objectives.orpo import ORPO
from litft.training.objectives.simpo import SimPO
from litft.training.objectives.supervised import Supervised

OBJECTIVES: dict[str, type[Objective]] = {
    cls.name: cls for cls in (Supervised, DFT, DPO, IPO, SimPO, ORPO, KTO, GRPO, Distill)
}


def objective_of(args: FinetuneArgs, rewards: Sequence[Reward] = ()) -> Objective:
    """Return the objective that the flags name; rewards: functions in place of those of
    --reward."""
    return OBJECTIVES[args.objective].of(args, rewards)


__all__ = [
    "GRPO",
    "OBJECTIVES",
    "Distill",
    "Objective",
    "Supervised",
    "Totals",
    "objective_of",
]
