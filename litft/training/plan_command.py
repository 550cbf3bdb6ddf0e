"""The command `plan`: memory and time of a method for a model, from its config.json alone."""

from collections.abc import Callable
from typing import NamedTuple

from litft.args import AdapterFinetuneArgs, AdapterV2FinetuneArgs, FullFinetuneArgs, LoRAFinetuneArgs, PlanArgs, size
from litft.data.dataset import length_limit
from litft.distributed.devices import shards
from litft.methods import Method, method_of
from litft.pretrained import PretrainedFolder, resolve
from litft.training.activation_checkpointing import RECOMPUTED
from litft.training.communication_plan import Cluster, CommunicationVolume, communication_volume
from litft.training.dry_run import time_line
from litft.training.flops import peak_of
from litft.training.memory_plan import FILLED, Fit, Plan, fastest, in_words, predict
from litft.training.memory_trace import Shape

MOST_TOKENS = 32768  # of a micro-batch that --budget looks at: larger ones are no faster


class PlanOnPaper(NamedTuple):
    """A plan from a config.json alone."""

    source: PretrainedFolder
    method: Method
    tokens: int  # of a row
    fit: Fit
    peak: float | None  # of a chip
    communication_volume: CommunicationVolume | None  # between several


def plan(args: PlanArgs) -> None:
    """Say what a method needs for a model, from its config.json alone."""
    source, method, tokens, fit, peak, moved = plan_on_paper(args)
    if args.budget:
        room = in_words(size(args.budget) - int(FILLED * size(args.budget)))
        print(f"the fastest that fits into {args.budget}, of which {room} are left to CUDA: {setting_flags(fit)}")
    found, everywhere = fit.plan, args.devices * args.num_nodes
    flops = found.flops.of([tokens], [tokens]) / tokens * args.tokens
    what = f"{args.tokens:,} tokens, all of them learned, in examples of {tokens:,}"
    print(f"{source.folder}: {found.title_line(method.title)}")
    print(f"memory{'' if everywhere == 1 else ' of each'}: {found.memory.line()}")
    print(time_line(flops, fit.slower, what, args.chip, peak, everywhere))
    if moved:
        print(moved.line(args.micro_batches))


def plan_on_paper(args: PlanArgs) -> PlanOnPaper:
    """What a method needs for a model, with the settings asked for, or the fastest that fit; ValueError where none do."""
    finetuning = {
        "lora": LoRAFinetuneArgs(lora=args.lora),
        "adapter": AdapterFinetuneArgs(adapter=args.adapter),
        "adapter_v2": AdapterV2FinetuneArgs(adapter=args.adapter),
        "full": FullFinetuneArgs(),
    }
    source, method = resolve(args.checkpoint_dir), method_of(finetuning[args.method])
    if source.adapter:
        raise ValueError(f"{source.adapter} is an adapter; name its base, {source.base}, and the method's flags")
    method.choose(source.meta_model(), source.adapter_rules)
    source.check_length("--max_seq_length", args.max_seq_length)
    tokens, width = length_limit(args.max_seq_length, source.config.max_positions), shards(args, args.strategy)

    def planned(rows: int, recomputed: str, quantize: str, offload: str) -> Plan:
        shape, named = Shape(rows, tokens, args.micro_batches > 1), {"cpu_offload": offload, "shards": width}
        return predict(source, method, args.precision, quantize, shape, args.optimizer, recomputed, **named)

    if args.budget:
        fit = within_budget(args, tokens, planned)
    else:
        kind = args.activation_checkpointing or ("full" if args.cpu_offload == "parameters" else "none")
        setting = (args.micro_batch_size or 1, kind, args.quantize, args.cpu_offload)
        fit = Fit(*setting, planned(*setting))
    peak, moved = peak_of(args.chip, args.precision), None
    if args.devices * args.num_nodes > 1 and peak:
        cluster = Cluster(args.devices, args.num_nodes, width, args.node_gbs * 1e9, args.network_gbs * 1e9)
        batch = fit.plan.flops.of([tokens] * fit.rows, [tokens] * fit.rows)
        moved = communication_volume(fit.plan, cluster, args.micro_batches, batch, fit.slower, peak)
    return PlanOnPaper(source, method, tokens, fit, peak, moved)


def within_budget(args: PlanArgs, tokens: int, planned: Callable[[int, str, str, str], Plan]) -> Fit:
    """The fastest settings that fit, of those that the flags leave open; ValueError where none do."""
    rows = [count for count in (1, 2, 4, 8, 16, 32) if count == 1 or count * tokens <= MOST_TOKENS]
    rows = [args.micro_batch_size] if args.micro_batch_size else rows
    kinds = [args.activation_checkpointing] if args.activation_checkpointing else RECOMPUTED
    held = [(args.quantize, args.cpu_offload)]
    if held == [("none", "none")] and args.method != "full" and args.strategy == "ddp":
        held += [("nf4", "none")] + ([("none", "parameters")] if "full" in kinds else [])
    fit, smallest = fastest(planned, rows, kinds, held, int(FILLED * size(args.budget)))
    if fit is None:
        least = f"{in_words(round(smallest.plan.memory.peak / FILLED))} with {setting_flags(smallest)}"
        remedy = "shorten --max_seq_length, or choose another method"
        raise ValueError(f"--budget {args.budget}: the least that this needs is {least}; {remedy}")
    return fit


def setting_flags(fit: Fit) -> str:
    """Settings as the flags of a fine-tuning command."""
    flags = [f"--train.micro_batch_size {fit.rows}", f"--train.activation_checkpointing {fit.recomputed}"]
    flags += [f"--quantize {fit.quantize}"] if fit.quantize != "none" else []
    return " ".join(flags + ([f"--train.cpu_offload {fit.cpu_offload}"] if fit.cpu_offload != "none" else []))
