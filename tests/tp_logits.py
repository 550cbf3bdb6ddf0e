"""Compute the logits of models that are split over several processes.

`logits` starts `python tp_logits.py CASES OUT` once per process; the processes find each other as under
torchrun.
"""

import json
import sys
from pathlib import Path

import torch
from strategies import run_cases


def logits(cases: list[dict], out: Path, processes: int = 2) -> list[torch.Tensor | str]:
    """Return each case's logits (B, T, V), or the error message of a model that cannot be split.

    A case has "folder" and "tokens", optionally "quantize" and "precision". The second half of the
    tokens is computed with a KV cache, the last token in a step of its own.
    """
    return run_cases(__file__, cases, processes, out)


@torch.inference_mode()
def case_logits(case: dict, rank: int, processes: int) -> torch.Tensor | str:
    """Return the logits of one case, or the error message."""
    from litft.distributed.tensor_parallel import TensorParallelPlacement, check_divides
    from litft.inference.fused_linears import fuse_linears
    from litft.model.kv_cache import KVCache
    from litft.pretrained.folder import resolve
    from litft.pretrained.load import load_network

    source, tokens = resolve(case["folder"]), torch.tensor(case["tokens"])
    try:
        check_divides(source.config, processes)
    except ValueError as error:
        return str(error)
    slices = TensorParallelPlacement(source.config, rank, processes)
    model = load_network(
        source, case.get("precision", "fp32"), "cpu", case.get("quantize"), slices
    )
    fuse_linears(model, pack=True)
    cache = KVCache(model.config, tokens.size(0), tokens.size(1), dtype=model.dtype)
    middle = tokens.size(1) // 2
    pieces = [tokens[:, :middle], tokens[:, middle:-1], tokens[:, -1:]]
    return torch.cat([model(piece, cache=cache) for piece in pieces], 1)


def main() -> None:
    """Compute all cases in this process; rank 0 saves the logits."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    cases, out = Path(sys.argv[1]), Path(sys.argv[2])
    results = [case_logits(case, rank, processes) for case in json.loads(cases.read_text())]
    if rank == 0:
        torch.save(results, out)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
