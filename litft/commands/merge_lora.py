"""The command `merge_lora`: write an adapter merged into its base."""

from pathlib import Path

from litft import run_dir
from litft.args import MergeArgs
from litft.export.trained_model import merge_result, write_merged
from litft.pretrained.folder import resolve


def merge(args: MergeArgs) -> Path:
    """Write an adapter merged into its base; raise ValueError if the source is not an adapter or
    --out_dir is not empty."""
    source = resolve(args.checkpoint_dir or run_dir.newest_finished(), args.base_dir)
    run = source.folder.resolve().parent
    if source.adapter is None and run_dir.is_run(run) and run_dir.method(run) == "full":
        raise ValueError(
            f"{source.folder} is a whole model already (full fine-tuning): there is nothing to "
            "merge"
        )
    if source.adapter is None:
        raise ValueError(
            f"{source.folder} is not an adapter (it has no adapter_config.json); pass an adapter "
            "or a LoRA run"
        )
    update = source.read_adapter()
    # the folder has an adapter
    assert update is not None
    return write_merged(
        args,
        source.folder,
        source,
        merge_result(source, update, source.record, args.dequantized_base),
    )
