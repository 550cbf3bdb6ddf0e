"""Any source as a clean model folder: converted, merged, or out of a run; tensor by tensor, memory stays at one shard."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from litft import checkpoint, cli, runs
from litft.adapter_files import read_adapter_config
from litft.args import ConvertArgs, ExportArgs, MergeArgs
from litft.folder import Source, base_record, copy_files, copy_tokenizer, resolve
from litft.job import Job
from litft.parallel import DTYPES
from litft.result import Result, write_result
from litft.tokenizer import Tokenizer
from litft.weights import Checkpoint, Entry


def convert(args: ConvertArgs) -> Path:
    """Rewrite a base model's folder as safetensors in one dtype, and compare what was written with what was read."""
    source = resolve(args.checkpoint_dir)
    if source.adapter:
        raise ValueError(f"{source.folder} is an adapter, not a model; merge_lora merges it into its base")
    dtype = _dtype(source, args.precision)

    def fill(folder: Path) -> None:
        entries = write_result(folder, source, dtype, None, args.shard_gb)
        copy_files(source.folder, folder)
        _compare(folder, entries)

    out = _write_folder(args.out_dir, fill)
    count = len(Checkpoint(out).names)
    print(f"converted {source.folder}: {out} ({count} tensors in {dtype}, each compared)", file=sys.stderr)
    return out


def merge(args: MergeArgs) -> Path:
    """Write an adapter merged into its base; ValueError where the source is no adapter or the target is taken."""
    source = resolve(args.checkpoint_dir or runs.newest_finished(), args.base_dir)
    if source.adapter is None:
        raise ValueError(f"{source.folder} is no adapter (it has no adapter_config.json); there is nothing to merge")
    method, values = source.read_adapter()
    quantize = trained_on(source, args.dequantized_base)
    return _export(args, source.folder, source, Result(method, values, *quantize))


def export(args: ExportArgs) -> Path:
    """Write a folder to open from a finished run, or from a checkpoint of one: merged, or the adapter by itself."""
    folder = Path(args.checkpoint_dir or runs.newest_finished())
    step = folder if folder.name.startswith("step-") and folder.parent.name == "checkpoints" else None
    if step is None and runs.is_run(folder) and not runs.finished(folder):
        step = checkpoint.newest(folder)
    if step is not None:
        source, result, tokenizer = _of_checkpoint(step, args.base_dir)
    else:
        source = resolve(folder, args.base_dir)
        held, tokenizer = source.read_adapter(), source.tokenizer()
        result = Result(*held, *trained_on(source, args.dequantized_base)) if held else None
    if args.merge:
        return _export(args, step or source.folder, source, result, tokenizer)
    if result is None or result.method.whole:
        raise ValueError(f"{folder} holds no adapter but a whole model; there is nothing to write by itself")

    def fill(partial: Path) -> None:
        result.method.write(partial, source, result.values, base_record(source, Path(args.out_dir)))
        if tokenizer:
            copy_tokenizer(tokenizer, partial)

    out = _write_folder(args.out_dir, fill)
    print(f"{step or source.folder}: {out} (an adapter of {source.base})", file=sys.stderr)
    return out


def trained_on(source: Source, dequantized: bool) -> tuple[str | None, torch.dtype | None]:
    """How the base was quantized when an adapter was trained on it, where that is asked for."""
    own = read_adapter_config(source.adapter).get("litft", {})
    kind = own.get("quantize", "none")
    if kind == "none" and dequantized and not source.checkpoint.is_quantized:
        raise ValueError(f"--dequantized_base: {source.adapter} was not trained on a quantized base; leave it out")
    if kind == "none":
        return None, None
    what = "what they were trained on" if dequantized else "the original weights; --dequantized_base takes"
    rest = "" if dequantized else " what they were trained on"
    print(f"the base was quantized as {kind} in training; its updates are added to {what}{rest}", file=sys.stderr)
    return (kind, DTYPES[own.get("precision", "fp32")]) if dequantized else (None, None)


def _export(args: MergeArgs, what: Path, source: Source, result: Result | None, tokenizer: Tokenizer | None = None) -> Path:
    dtype, tokenizer = _dtype(source, args.precision), tokenizer or source.tokenizer()

    def fill(folder: Path) -> None:
        write_result(folder, source, dtype, result, args.shard_gb)
        if tokenizer:
            copy_tokenizer(tokenizer, folder)

    out = _write_folder(args.out_dir, fill)
    print(f"{what}: {out} ({'merged into' if result else 'as'} {source.base}, {dtype})", file=sys.stderr)
    return out


def _of_checkpoint(step: Path, base_dir: str | None) -> tuple[Source, Result, Tokenizer | None]:
    """A run's state after some step: where its base is, and what its method had learned."""
    run = step.resolve().parent.parent
    if not step.is_dir():
        there = ", ".join(sorted(path.name for path in step.parent.glob("step-*"))) or "none"
        raise ValueError(f"{step} does not exist; the checkpoints there are: {there}")
    if not runs.is_run(run):
        raise ValueError(f"{step} lies in no run of litft: there is no {runs.CONFIG} two folders up")
    args = cli.finetune_args(run)
    there = Path(args.checkpoint_dir).exists()
    if not (there or base_dir):
        raise ValueError(
            f"{run} was trained on {args.checkpoint_dir}, which is not there; pass --base_dir with its place now"
        )
    source = resolve(args.checkpoint_dir, base_dir or args.base_dir) if there else resolve(base_dir)
    job = Job(args, source)
    if changed := checkpoint.changes(step, job.identity()):
        raise ValueError(f"{step} was saved with {'; '.join(changed)}; give it back what it was trained with")
    values = checkpoint.read_parameters(step)
    if {name: tuple(value.shape) for name, value in values.items()} != job.shapes():
        raise ValueError(f"{step} holds other parameters than {run / runs.CONFIG} says; it cannot be opened")
    return source, Result(job.method, values), job.tokenizer


def _dtype(source: Source, precision: str) -> torch.dtype:
    return source.dtype(None) if precision == "auto" else DTYPES[precision]


def _compare(folder: Path, entries: list[Entry]) -> None:
    """Read everything again; a difference would be the disk's or ours, not the user's."""
    written = Checkpoint(folder)
    assert written.names == sorted(entry.name for entry in entries)
    for entry in entries:
        if not torch.equal(written.read(entry.name), entry.make()):
            raise OSError(0, f"{entry.name} did not come back from the disk as it was written", str(folder))


def _write_folder(out_dir: str, fill: Callable[[Path], None]) -> Path:
    """Make the folder by `fill` under a name of its own first: one under the name asked for is whole."""
    out = Path(os.path.realpath(out_dir))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out_dir {out_dir} already exists and is not an empty folder; name another")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".partial", dir=out.parent))
    try:
        partial.chmod(out.parent.stat().st_mode & 0o777)  # mkdtemp's own is 0700
        fill(partial)
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Path(out_dir)
