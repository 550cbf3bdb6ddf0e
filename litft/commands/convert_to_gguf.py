"""The command `convert_to_gguf`: write a run, a model or a LoRA adapter as a GGUF file."""

import sys
from pathlib import Path
from shlex import quote

from litft.args import GgufExportArgs
from litft.export.gguf.convert import write_adapter_file, write_model_file
from litft.export.model_folder import write_folder
from litft.export.trained_model import read_trained


def write(args: GgufExportArgs) -> Path:
    """Write a GGUF file, plus a Modelfile for a full model; raise ValueError if llama.cpp does not
    support the model."""
    trained = read_trained(args)
    write_file = write_model_file if args.merge else write_adapter_file
    file_names: list[str] = []

    def fill(folder: Path) -> None:
        file_names.append(write_file(folder, trained, args))

    # the file's name depends on its type, which `fill` finds out
    out = write_folder(args.target_dir, fill)
    print(
        f"exported {trained.path} to "
        f"{out / file_names[0]}{', with a Modelfile for Ollama' if args.merge else ''}",
        file=sys.stderr,
    )
    if args.merge:
        modelfile = quote(str(out / "Modelfile"))
        model = quote(str(out / file_names[0]))
        print(
            f"next: ollama create mine -f {modelfile}, or llama-cli -m {model}",
            file=sys.stderr,
        )
    return out
