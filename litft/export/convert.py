"""Any source as a clean model folder: converted, merged, or out of a run; tensor by tensor, memory stays at one shard."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from litft import run_dir
from litft.args import ConvertArgs, ExportArgs, GgufExportArgs, MergeArgs
from litft.args.parser import finetune_args
from litft.checkpoints.hub import hub_id
from litft.checkpoints.weight_files import Checkpoint, LazyTensor
from litft.data.tokenizer import Tokenizer
from litft.distributed.devices import DTYPES
from litft.methods import Method, Values
from litft.model.quantization import KINDS
from litft.pretrained import PretrainedFolder, base_record, copy_files, copy_tokenizer, resolve
from litft.save_pretrained import Result, write_result
from litft.training import run_state
from litft.training.setup import Setup


def convert(args: ConvertArgs) -> Path:
    """Rewrite a base model's folder as safetensors in one dtype, and compare what was written with what was read."""
    source = resolve(args.checkpoint_dir)
    if source.adapter:
        raise ValueError(f"{source.folder} is an adapter, not a model; merge_lora merges it into its base")
    dtype = _dtype(source, args.precision)

    def fill(folder: Path) -> None:
        entries = write_result(folder, source, dtype, None, args.shard_gb)
        copy_files(source.folder, folder)
        compare(folder, entries)

    out = write_folder(args.out_dir, fill)
    count = len(Checkpoint(out).names)
    print(f"converted {source.folder}: {out} ({count} tensors in {dtype}, each compared)", file=sys.stderr)
    return out


def merge(args: MergeArgs) -> Path:
    """Write an adapter merged into its base; ValueError where the source is no adapter or the target is taken."""
    source = resolve(args.checkpoint_dir or run_dir.newest_finished(), args.base_dir)
    if source.adapter is None:
        raise ValueError(f"{source.folder} is no adapter (it has no adapter_config.json); there is nothing to merge")
    return _export(args, source.folder, source, _result(source, source.read_adapter(), source.record, args.dequantized_base))


def export(args: ExportArgs) -> Path:
    """Write a folder to open from a finished run, or from a checkpoint of one: merged, or the adapter by itself."""
    trained = read_trained(args)
    source, tokenizer = trained.source, trained.tokenizer
    if args.merge:
        return _export(args, trained.what, source, trained.result(args.dequantized_base), tokenizer)
    method, values = trained.adapter()

    def fill(partial: Path) -> None:
        record, own = base_record(source, Path(args.out_dir)), trained.own
        kept = {name: own[name] for name in ("quantize", "precision") if name in own}
        method.write(partial, source, values, record | {"litft": record["litft"] | kept})
        if tokenizer:
            copy_tokenizer(tokenizer, partial)

    out = write_folder(args.out_dir, fill)
    print(f"{trained.what}: {out} (an adapter of {source.base})", file=sys.stderr)
    return out


class TrainedModel(NamedTuple):
    """What a run, a checkpoint of one or any folder holds, for it to be written elsewhere."""

    what: Path  # to name it by
    source: PretrainedFolder
    held: tuple[Method, Values] | None  # None: a whole model's folder
    own: dict[str, Any]  # what the adapter or the checkpoint says of itself
    tokenizer: Tokenizer | None

    def result(self, dequantized: bool) -> Result | None:
        """What has been learned, to be added to the base; None: the folder holds a whole model."""
        if self.held is None and dequantized:
            raise ValueError(f"--dequantized_base: {self.what} holds a whole model and no adapter; leave it out")
        return _result(self.source, self.held, self.own, dequantized) if self.held else None

    def adapter(self) -> tuple[Method, Values]:
        """The method and its values by themselves; ValueError where that is a whole model."""
        if self.held is None or self.held[0].saves_full_model:
            raise ValueError(f"{self.what} holds no adapter but a whole model; there is nothing to write by itself")
        return self.held


def read_trained(args: MergeArgs | GgufExportArgs) -> TrainedModel:
    """Open what --checkpoint_dir names, or the newest finished run."""
    folder = Path(args.checkpoint_dir or run_dir.newest_finished())
    step = folder if folder.name.startswith("step-") and folder.parent.name == "checkpoints" else None
    if step is None and run_dir.is_run(folder) and not run_dir.finished(folder):
        step = run_state.newest(folder)
    if step is not None:
        return TrainedModel(step, *_of_checkpoint(step, args.base_dir))
    source = resolve(folder, args.base_dir)
    return TrainedModel(source.folder, source, source.read_adapter(), source.record, source.tokenizer())


def _result(source: PretrainedFolder, held: tuple[Method, Values], own: dict[str, Any], dequantized: bool) -> Result:
    """What a method has learned, to be added to the original base or to what it was rounded to; says which.

    own: what the adapter or the checkpoint says of itself. ValueError where the base was not quantized.
    """
    kind = own.get("quantize", "none")
    if source.checkpoint.is_quantized:
        print(f"the base is quantized as {kind}; the updates are added to what its bits stand for", file=sys.stderr)
        return Result(*held)
    if kind not in KINDS:
        if dequantized:
            raise ValueError("--dequantized_base: this was not trained on a quantized base; leave it out")
        return Result(*held)
    if not dequantized:
        what = "the original weights; --dequantized_base adds them to what they were trained on"
        print(f"the base was quantized as {kind} in training; its updates are added to {what}", file=sys.stderr)
        return Result(*held)
    precision = own.get("precision", "fp32")
    if not isinstance(precision, str) or precision not in DTYPES:
        raise ValueError(f"--dequantized_base: the adapter says that it learned in {precision!r}, which is not known")
    print(f"its updates are added to what they were trained on, the base quantized as {kind}", file=sys.stderr)
    return Result(*held, kind, DTYPES[precision])


def _export(
    args: MergeArgs, what: Path, source: PretrainedFolder, result: Result | None, tokenizer: Tokenizer | None = None
) -> Path:
    dtype, tokenizer = _dtype(source, args.precision), tokenizer or source.tokenizer()

    def fill(folder: Path) -> None:
        write_result(folder, source, dtype, result, args.shard_gb)
        if tokenizer:
            copy_tokenizer(tokenizer, folder)

    out = write_folder(args.out_dir, fill)
    print(f"{what}: {out} ({'merged into' if result else 'as'} {source.base}, {dtype})", file=sys.stderr)
    return out


def _of_checkpoint(
    step: Path, base_dir: str | None
) -> tuple[PretrainedFolder, tuple[Method, Values], dict[str, Any], Tokenizer | None]:
    """A run's state after some step: where its base is, what its method had learned, what it says of itself."""
    run = step.resolve().parent.parent
    if not step.is_dir():
        there = ", ".join(sorted(path.name for path in step.parent.glob("step-*"))) or "none"
        raise ValueError(f"{step} does not exist; the checkpoints there are: {there}")
    if not run_dir.is_run(run):
        raise ValueError(f"{step} lies in no run of litft: there is no {run_dir.CONFIG} two folders up")
    args = finetune_args(run)
    there = Path(args.checkpoint_dir).exists() or hub_id(args.checkpoint_dir)
    if not (there or base_dir):
        raise ValueError(
            f"{run} was trained on {args.checkpoint_dir}, which is not there; pass --base_dir with its place now"
        )
    source = resolve(args.checkpoint_dir, base_dir or args.base_dir) if there else resolve(base_dir)
    job = Setup(args, source)
    progress = run_state.read_progress(step)
    if changed := run_state.changes(progress, job.identity()):
        raise ValueError(f"{step} was saved with {'; '.join(changed)}; give it back what it was trained with")
    values = run_state.read_parameters(step)
    if {name: tuple(value.shape) for name, value in values.items()} != job.shapes():
        raise ValueError(f"{step} holds other parameters than {run / run_dir.CONFIG} says; it cannot be opened")
    try:
        job.tokenizer.choose_again(progress.get("tokenizer"))
    except ValueError as error:
        raise ValueError(f"{step}: {error}; its progress.json is damaged, take another step") from None
    return source, (job.method, values), progress.get("identity", {}), job.tokenizer


def _dtype(source: PretrainedFolder, precision: str) -> torch.dtype:
    return source.dtype(None) if precision == "auto" else DTYPES[precision]


def compare(folder: Path, entries: list[LazyTensor]) -> None:
    """Read everything again; a difference would be the disk's or ours, not the user's."""
    written = Checkpoint(folder)
    assert written.names == sorted(entry.name for entry in entries)
    for entry in entries:
        if not torch.equal(written.read(entry.name), entry.make()):
            raise OSError(0, f"{entry.name} did not come back from the disk as it was written", str(folder))


def write_folder(out_dir: str, fill: Callable[[Path], None]) -> Path:
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
