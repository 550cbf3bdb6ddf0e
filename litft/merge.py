"""A LoRA adapter and its base to one model folder, tensor by tensor: memory stays at one shard."""

import json
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor

from litft import runs
from litft.args import MergeArgs
from litft.folder import Source, copy_tokenizer, resolve
from litft.parallel import DTYPES
from litft.peft import LoRA, attach_values, merged
from litft.rules import Move, exporting
from litft.weights import Entry, check_weights, write_weights


def merge(args: MergeArgs) -> Path:
    """Write the merged model to `args.out_dir`; ValueError where the source is no adapter or the target is taken."""
    source = resolve(args.checkpoint_dir or runs.newest_finished(), args.base_dir)
    out = Path(args.out_dir)
    if source.adapter is None:
        raise ValueError(f"{source.folder} is no adapter (it has no adapter_config.json); there is nothing to merge")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out_dir {out} already exists and is not an empty folder; name another")
    dtype = source.dtype(None) if args.precision == "auto" else DTYPES[args.precision]
    entries, tokenizer = merged_entries(source, dtype), source.tokenizer()
    partial = out.with_name(f"{out.name}.partial")  # a folder under its own name is whole
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_weights(partial, entries)
    hf = {**source.hf, "torch_dtype": str(dtype).removeprefix("torch.")}
    hf.pop("dtype", None)  # transformers 5's name for the same
    (partial / "config.json").write_text(json.dumps(hf, indent=2) + "\n", "utf-8")
    if tokenizer:
        copy_tokenizer(tokenizer, partial)
    partial.replace(out)
    print(f"merged {source.folder} into its base {source.base}: {out} ({dtype})", file=sys.stderr)
    return out


def merged_entries(source: Source, dtype: torch.dtype) -> list[Entry]:
    """Every tensor of the base under the checkpoint's names, with the adapter's updates added in fp32."""
    model = source.meta_model()
    reads = {move.targets[0]: move for move in check_weights(model, source.checkpoint, source.rules)}
    method, values = LoRA.read(source.adapter, model, source.rules)
    names = [name for name, _ in model.named_parameters()]
    attach_values(model, method, values)

    def ours(name: str) -> Tensor:
        move = reads[name]
        (tensor,) = move.convert([source.checkpoint.read(theirs) for theirs in move.sources])
        site = name.removesuffix(".weight")
        if site in method.sites:
            tensor = merged(tensor, values[f"{site}.lora_a"], values[f"{site}.lora_b"], method.sites[site].scale)
        return tensor.to(dtype)

    def entry(move: Move, index: int, name: str) -> Entry:
        numel = sum(model.get_parameter(our).numel() for our in move.sources) // len(move.targets)
        return Entry(name, numel * dtype.itemsize, lambda: move.convert([ours(our) for our in move.sources])[index])

    moves = exporting(source.rules, names)
    return [entry(move, index, name) for move in moves for index, name in enumerate(move.targets)]
