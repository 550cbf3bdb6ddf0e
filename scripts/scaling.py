"""Compute the table of tutorials/scaling.md: what training Llama 3.1 on many devices needs, by the
plan of scripts/plan.py.

python scripts/scaling.py [--write]
"""

import json
import sys
import tempfile
from pathlib import Path

from tables import ROOT, main

sys.path[:0] = [str(ROOT)]

# the chip, the memory budget in GiB (of 80 GB), the devices per node and the tokens per row
CHIP = "H100"
BUDGET_GIB = 72
DEVICES = 8
TOKENS = 4096
MODELS = {  # by name: hidden size, layers, heads, intermediate size (arXiv 2407.21783, table 3)
    "8B": (4096, 32, 32, 14336),
    "70B": (8192, 80, 64, 28672),
    "405B": (16384, 126, 128, 53248),
}
ROWS = (  # model, method, base, strategy, nodes
    ("8B", "lora", "none", "ddp", 1),
    ("8B", "full", "none", "fsdp", 1),
    ("8B", "full", "none", "fsdp", 8),
    ("8B", "full", "none", "hsdp", 8),
    ("70B", "lora", "none", "fsdp", 1),
    ("70B", "lora", "nf4", "ddp", 1),
    ("70B", "lora", "none", "hsdp", 8),
    ("70B", "full", "none", "fsdp", 4),
    ("70B", "full", "none", "fsdp", 32),
    ("405B", "lora", "nf4-dq", "fsdp", 1),
    ("405B", "lora", "none", "fsdp", 4),
    ("405B", "lora", "none", "fsdp", 64),
    ("405B", "full", "none", "fsdp", 32),
    ("405B", "full", "none", "fsdp", 64),
)


def config(model: str) -> dict:
    """Return the content of the model's config.json."""
    hidden_dim, layers, heads, mlp_dim = MODELS[model]
    sizes = {
        "hidden_size": hidden_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp_dim,
    }
    fixed = {
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    }
    return {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **sizes,
        **fixed,
    }


def row(folder: str, model: str, method: str, base: str, strategy: str, nodes: int) -> str:
    """Return one table row: the plan with the highest share of peak FLOPs, with as little
    recomputation as fits."""
    from litft.args import PlanArgs
    from litft.commands.plan import plan_on_paper

    flags = {
        "checkpoint_dir": folder,
        "method": method,
        "quantize": base,
        "strategy": strategy,
        "num_nodes": nodes,
    }
    sizes = {
        "devices": DEVICES,
        "max_seq_length": TOKENS,
        "budget": f"{BUDGET_GIB}GiB",
        "chip": CHIP,
        "micro_batches": 2,
    }
    settings = (
        f"| {model} | {method}{'' if base == 'none' else f', {base}'} | {DEVICES * nodes} | "
        f"{strategy} |"
    )
    try:
        paper = plan_on_paper(PlanArgs(**flags, **sizes))
    except ValueError as error:
        return f"{settings} {str(error).split(': ', 1)[1].split(' with ')[0]}: too much | | | | |"
    fit = paper.fit
    volume = paper.communication_volume
    memory = f"{fit.plan.memory.peak / 2**30:.0f}"
    shape = f"{fit.rows} x {TOKENS:,}, {fit.recomputed}"
    traffic = [
        f"{size / 1e9:,.0f}" if size >= 1e11 else f"{size / 1e9:.3g}"
        for size in (volume.intra_node, volume.inter_node)
    ]
    return f"{settings} {memory} | {shape} | {traffic[0]} | {traffic[1]} | {volume.share:.0%} |"


def table() -> str:
    """Return the complete Markdown table. Each row is also printed to stderr when it is ready."""
    head = (
        "model | method | GPUs | strategy | memory of each, GiB | micro-batch, recomputed | GB "
        "from its node | from others"
    )
    lines = [f"| {head} | of the peak |", "|---" * 9 + "|"]
    for model, *rest in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config(model)))
            lines.append(row(folder, model, *rest))
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(__doc__, "tutorials/scaling.md", "scaling", table)
