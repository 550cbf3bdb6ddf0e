"""The command `merge_lora`: write an adapter, or several combined, merged into the base."""

import sys
from dataclasses import dataclass
from pathlib import Path

from litft import run_dir
from litft.args import MergeArgs
from litft.export.trained_model import merge_result, write_merged
from litft.pretrained.combination import CombinedResult
from litft.pretrained.folder import PretrainedFolder, resolve
from litft.pretrained.save import Result


@dataclass(frozen=True)
class _Adapter:
    """An adapter's folder, and what it changes."""

    source: PretrainedFolder
    result: Result


def merge(args: MergeArgs) -> Path:
    """Write one or several adapters merged into their base; raise ValueError if a source is not an
    adapter, their bases differ, or --out_dir is not empty."""
    folders = args.checkpoint_dir or [str(run_dir.newest_finished())]
    adapters = [_read(folder, args) for folder in folders]
    first = adapters[0].source
    if len(adapters) == 1 and args.weights in ([], [1.0]):
        return write_merged(args, first.folder, first, adapters[0].result)
    for adapter in adapters:
        base = adapter.source.base
        if base.resolve() != first.base.resolve():
            raise ValueError(
                f"{first.folder} and {adapter.source.folder} have different bases, {first.base} "
                f"and {base}; if these are the same model, name one with --base_dir"
            )
    templates = set()
    for adapter in adapters:
        tokenizer = adapter.source.tokenizer()
        templates.add(tokenizer.chat_template if tokenizer else "")
    if len(templates) > 1:
        print(
            "warning: the adapters were trained with different chat templates; that of "
            f"{first.folder} is written",
            file=sys.stderr,
        )
    combined = CombinedResult(
        results=[adapter.result for adapter in adapters],
        weights=args.weights or [1.0] * len(adapters),
        density=args.density if args.combination == "ties" else None,
    )
    return write_merged(args, Path(", ".join(folders)), first, combined)


def _read(folder: str, args: MergeArgs) -> _Adapter:
    """Return an adapter; raise ValueError if the folder has none."""
    source = resolve(folder, args.base_dir)
    run = source.folder.resolve().parent
    if source.adapter is None and run_dir.is_run(run) and run_dir.method(run) == "full":
        raise ValueError(
            f"{source.folder} is a whole model already (full fine-tuning): there is nothing to "
            "merge"
        )
    update = source.read_adapter()
    if update is None:
        raise ValueError(
            f"{source.folder} is not an adapter (it has no adapter_config.json); pass an adapter "
            "or a LoRA run"
        )
    return _Adapter(
        source, merge_result(source, update, source.record, args.dequantized_base)
    )
