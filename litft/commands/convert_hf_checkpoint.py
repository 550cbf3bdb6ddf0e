"""The command `convert_hf_checkpoint`: rewrite a model folder as safetensors in one dtype."""

import sys
from pathlib import Path

from litft.args import ConvertArgs
from litft.checkpoints.weight_files import Checkpoint
from litft.export.model_folder import compare, write_folder, written_dtype
from litft.families import unread_fields
from litft.pretrained.folder import resolve
from litft.pretrained.save import copy_files, write_result


def convert(args: ConvertArgs) -> Path:
    """Rewrite a base model's folder as safetensors in one dtype, and compare the written tensors
    with the source."""
    source = resolve(args.source_dir, family=args.family)
    if source.adapter:
        raise ValueError(
            f"{source.folder} is an adapter, not a model; merge it into its base with merge_lora"
        )
    if args.family and (fields := unread_fields(source.hf)):
        print(
            "litft reads no field of these names, which may mean another network: "
            f"{', '.join(fields)}",
            file=sys.stderr,
        )
    dtype = written_dtype(source, args.precision)

    def fill(folder: Path) -> None:
        entries = write_result(folder, source, dtype, None, args.shard_gb)
        copy_files(source.folder, folder)
        compare(folder, entries)

    out = write_folder(args.target_dir, fill)
    count = len(Checkpoint(out).names)
    print(
        f"converted {source.folder} to {out} ({count} tensors in {dtype}, each compared)",
        file=sys.stderr,
    )
    return out
