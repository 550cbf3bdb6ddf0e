"""Compute the logits of models whose weights are sharded over two processes.

`logits` starts `python sharded_logits.py CASES OUT` once per process; the processes find each other
as under torchrun.
"""

import json
import sys
from pathlib import Path

import torch
from strategies import run_cases
from torch.distributed.device_mesh import init_device_mesh

PROCESSES = 2


def logits(cases: list[dict], out: Path) -> list[dict]:
    """Return of each case the logits (B, T, V), and the share of the weights that the first process
    holds.

    A case has "folder" and "tokens", optionally "quantize".
    """
    return run_cases(__file__, cases, PROCESSES, out)


@torch.no_grad()
def results_of(case: dict) -> dict:
    """Return the results of one case."""
    from litft.model.placement import local
    from litft.pretrained.folder import resolve
    from litft.pretrained.load import load_sharded

    mesh = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("shard",))
    model = load_sharded(resolve(case["folder"]), "fp32", "cpu", case.get("quantize"), mesh)
    held = sum(local(parameter).numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    return {"logits": model(torch.tensor(case["tokens"])), "share": held / whole}


def main() -> None:
    """Compute all cases in this process; the first process saves the results."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    results = [results_of(case) for case in json.loads(Path(sys.argv[1]).read_text())]
    if torch.distributed.get_rank() == 0:
        torch.save(results, sys.argv[2])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
