"""The command `convert_gguf_checkpoint`: write the model of a GGUF file as a model folder."""

import json
import sys
from pathlib import Path

from litft.args import GgufConvertArgs
from litft.data.tokenizer import Tokenizer
from litft.distributed.devices import DTYPES
from litft.export.gguf.convert import GgufFolder, config_token_ids
from litft.export.gguf.files import GgufFile
from litft.export.gguf.metadata import read_architecture
from litft.export.gguf.vocabulary import write_tokenizer
from litft.export.model_folder import compare, write_folder
from litft.families import read_config
from litft.pretrained.save import write_result


def read(args: GgufConvertArgs) -> Path:
    """Write a GGUF file's model as a folder, and compare it with the file; raise ValueError for
    unsupported models."""
    file = GgufFile(Path(args.source_dir))
    architecture = read_architecture(file)
    try:
        hf = architecture.to_hf() | config_token_ids(file, architecture.vocab_size)
        config = read_config(hf)
        architecture.check_rotation(config)
    except ValueError as error:
        raise ValueError(f"{file.folder}: {error}") from None

    # from here on the file is read like any model folder
    source = GgufFolder(
        file.folder,
        file.folder,
        None,
        hf,
        config,
        file=file,
        extra_layers=architecture.extra_layers,
    )
    if args.precision == "auto":
        dtype = source.dtype(None)
    else:
        dtype = DTYPES[args.precision]

    def fill(folder: Path) -> None:
        write_tokenizer(file, folder)
        if isinstance(licence := file.metadata.get("general.license"), str):
            (folder / "README.md").write_text(
                f"---\nlicense: {json.dumps(licence)}\n---\n", "utf-8"
            )
        # fail before the weights are written if it cannot be loaded
        Tokenizer(folder)
        compare(folder, write_result(folder, source, dtype, None, args.shard_gb))

    out = write_folder(args.target_dir, fill)
    count = len(file.names)
    print(
        f"converted {file.folder} to {out} ({architecture.name} in GGUF, {count} tensors in "
        f"{dtype})",
        file=sys.stderr,
    )
    return out
