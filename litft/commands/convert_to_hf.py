"""The command `convert_to_hf`: write a run or a checkpoint as a folder that others load."""

import sys
from dataclasses import replace
from pathlib import Path

from litft.args import ExportArgs
from litft.export.model_folder import write_folder
from litft.export.trained_model import keep_step, read_trained, write_merged
from litft.pretrained.folder import base_record
from litft.pretrained.save import check_written, copy_tokenizer


def export(args: ExportArgs) -> Path:
    """Write a run, finished or not, or one of its checkpoints as a loadable folder: merged, or the
    adapter alone."""
    trained = read_trained(args)
    source = trained.source
    tokenizer = trained.tokenizer
    if args.merge:
        return write_merged(
            args, trained.path, source, trained.result(args.dequantized_base), tokenizer
        )

    # the adapter alone
    method, values = trained.adapter()
    if args.text_names:
        source.check_text_names("--text_names")
    source = replace(source, text_names=args.text_names)

    def fill(partial: Path) -> None:
        record = base_record(source, Path(args.target_dir))
        settings = trained.settings
        litft_settings = {}
        for name in ("quantize", "precision"):
            if name in settings:
                litft_settings[name] = settings[name]
        method.write(
            partial, source, values, record | {"litft": record["litft"] | litft_settings}
        )
        if tokenizer:
            copy_tokenizer(tokenizer, partial)
        check_written(partial, source)
        keep_step(trained.path, partial)

    out = write_folder(args.target_dir, fill)
    print(
        f"exported {trained.path} to {out} (an adapter for {source.base})", file=sys.stderr
    )
    return out
