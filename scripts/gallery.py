"""Plan LoRA and QLoRA of published models on GPUs of four sizes, and print the table in
tutorials/gallery.md.

python scripts/gallery.py [--models qwen3-8b,phi-4] [--write]     (all: about half an hour)

The configurations are in scripts/configs; no weights are needed.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from tables import ROOT, parser, write

sys.path.insert(0, str(ROOT))

PAGE = "tutorials/gallery.md"
CONFIGS = ROOT / "scripts" / "configs"
TOKENS = 10_000_000
# memory of a GPU, and a GPU with it whose peak the hours are computed from
GPUS = {"12 GB": "RTX 3060", "24 GB": "RTX 4090", "48 GB": "L40S", "80 GB": "H100"}
# the folder of a configuration -> the published model
MODELS = {
    "lfm2.5-vl-1.6b": "LiquidAI/LFM2.5-VL-1.6B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "gemma-2-2b": "google/gemma-2-2b-it",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    "mistral-7b-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-vl-8b": "Qwen/Qwen3-VL-8B-Instruct",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "phi-4": "microsoft/phi-4",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "mistral-small-3.2-24b": "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    "qwen3.6-27b": "Qwen/Qwen3.6-27B",
    "gemma-3-27b": "google/gemma-3-27b-it",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "gemma-4-31b": "google/gemma-4-31B-it",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3.6-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
    "kimi-linear-48b-a3b": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
}


class Cell(NamedTuple):
    """What a model needs on a GPU."""

    recipe: str
    peak: str
    time: str
    longest: str  # row, in tokens


def planned(model: str, memory: str, chip: str) -> Cell | None:
    """Return the fastest settings for rows of 2,048 tokens; None if none fit.

    The longest row is that of the same weights.
    """
    from litft.args import PlanArgs
    from litft.commands.plan import longest_row, plan_on_paper, setting_flags
    from litft.training.memory.plan import format_bytes
    from litft.training.run_description import UTILIZATION, format_duration

    args = PlanArgs(
        checkpoint_dir=str(CONFIGS / model), budget=memory.replace(" ", ""), chip=chip
    )
    args.lora.r = 16
    try:
        plan = plan_on_paper(args)
    except ValueError:
        return None
    fit = plan.fit
    flops = fit.plan.flops.for_lengths([plan.tokens], [plan.tokens]) / plan.tokens * TOKENS
    assert plan.peak is not None
    seconds = flops * fit.slowdown / (plan.peak * UTILIZATION)
    args.quantize = fit.quantize
    if fit.cpu_offload == "parameters":
        args.cpu_offload = fit.cpu_offload
    # a longer one may be possible, but the model was not made for it
    longest = longest_row(args, at_most=plan.source.config.max_positions)
    return Cell(
        recipe=setting_flags(fit),
        peak=format_bytes(fit.plan.memory.peak),
        time=format_duration(seconds),
        longest=f"{longest.tokens:,}",
    )


def row(model: str, memory: str, cell: Cell | None) -> str:
    """Return the row of a model in the table of a GPU."""
    from litft.pretrained.folder import resolve

    folder = resolve(str(CONFIGS / model))
    name = f"| [{MODELS[model]}](https://huggingface.co/{MODELS[model]}) "
    name += f"| `{stored_type(CONFIGS / model)}` | {size(folder.outline)} "
    if cell is None:
        return f"{name}| does not fit | | | |"
    return f"{name}| `{cell.recipe}` | {cell.peak} | {cell.time} | {cell.longest} |"


def stored_type(folder: Path) -> str:
    """Return the model type that config.json names."""
    return json.loads((folder / "config.json").read_text("utf-8"))["model_type"]


def size(outline) -> str:
    """Return the parameters of a network, such as 8.2 B."""
    return f"{sum(p.numel() for p in outline.parameters()) / 1e9:.1f} B"


def table(memory: str, models: list[str]) -> str:
    """Return the Markdown table of a GPU."""
    lines = [
        "| model | model type | parameters | flags | planned peak | 10 M tokens | longest row |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in models:
        lines.append(row(model, memory, planned(model, memory, GPUS[memory])))
        print(memory, lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables. With --write, also put them into the page."""
    arguments = parser(__doc__, PAGE)
    arguments.add_argument("--models", help="Plan only these: a,b,c. Default: all.")
    args = arguments.parse_args()
    models = args.models.split(",") if args.models else list(MODELS)
    for memory in GPUS:
        text = table(memory, models)
        print(text)
        if args.write and not args.models:
            write(ROOT / PAGE, memory.replace(" ", ""), text)


if __name__ == "__main__":
    main()
