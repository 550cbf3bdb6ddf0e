"""Objectives: what training minimizes. One file each; `--objective` names them."""

from litft.args import FinetuneArgs
from litft.training.objectives.dpo import DPO
from litft.training.objectives.ipo import IPO
from litft.training.objectives.kto import KTO
from litft.training.objectives.objective import Objective, Totals
from litft.training.objectives.orpo import ORPO
from litft.training.objectives.simpo import SimPO
from litft.training.objectives.supervised import Supervised

OBJECTIVES: dict[str, type[Objective]] = {
    cls.name: cls for cls in (Supervised, DPO, IPO, SimPO, ORPO, KTO)
}


def objective_of(args: FinetuneArgs) -> Objective:
    """Return the objective that the flags name."""
    return OBJECTIVES[args.objective](args.preference)


__all__ = ["OBJECTIVES", "Objective", "Supervised", "Totals", "objective_of"]
