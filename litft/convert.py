"""Any source as a clean model folder: converted, merged, or out of a run; tensor by tensor, memory stays at one shard."""

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from litft import checkpoint, cli, runs
from litft.adapter_files import Factors, write_adapter
from litft.args import ConvertArgs, ExportArgs, LoRAFinetuneArgs, MergeArgs
from litft.folder import Source, base_record, copy_files, copy_tokenizer, fingerprint, resolve
from litft.parallel import DTYPES
from litft.peft import LoRA, merged, method_of
from litft.rules import Move, exporting
from litft.weights import Checkpoint, Entry, check_weights, write_weights


def convert(args: ConvertArgs) -> Path:
    """Rewrite a base model's folder as safetensors in one dtype, and compare what was written with what was read."""
    source = resolve(args.checkpoint_dir)
    if source.adapter:
        raise ValueError(f"{source.folder} is an adapter, not a model; merge_lora merges it into its base")
    dtype = _dtype(source, args.precision)
    entries = model_entries(source, dtype)

    def fill(folder: Path) -> None:
        _write_model(folder, source, dtype, entries, args.shard_gb)
        copy_files(source.folder, folder)
        _compare(folder, entries)

    out = _write_folder(args.out_dir, fill)
    print(f"converted {source.folder}: {out} ({len(entries)} tensors in {dtype}, each compared)", file=sys.stderr)
    return out


def merge(args: MergeArgs) -> Path:
    """Write an adapter merged into its base; ValueError where the source is no adapter or the target is taken."""
    source = resolve(args.checkpoint_dir or runs.newest_finished(), args.base_dir)
    if source.adapter is None:
        raise ValueError(f"{source.folder} is no adapter (it has no adapter_config.json); there is nothing to merge")
    return _export(args, source.folder, source, adapter_factors(source))


def export(args: ExportArgs) -> Path:
    """Write a folder to open from a finished run, or from a checkpoint of one: merged, or the adapter by itself."""
    folder = Path(args.checkpoint_dir or runs.newest_finished())
    step = folder if folder.name.startswith("step-") and folder.parent.name == "checkpoints" else None
    if step is None and runs.is_run(folder) and not runs.finished(folder):
        step = checkpoint.newest(folder)
    if step is not None:
        source, factors = _of_checkpoint(step, args.base_dir)
    else:
        source = resolve(folder, args.base_dir)
        factors = adapter_factors(source) if source.adapter else {}
    if args.merge:
        return _export(args, step or source.folder, source, factors)
    if not factors:
        raise ValueError(f"{folder} holds no adapter but a whole model; there is nothing to write by itself")

    def fill(partial: Path) -> None:
        record = base_record(source, Path(args.out_dir))
        write_adapter(partial, source.meta_model(), source.adapter_rules, factors, {"lora_dropout": 0.0, **record})
        _copy_tokenizer(source, partial)

    out = _write_folder(args.out_dir, fill)
    print(f"{step or source.folder}: {out} (an adapter of {source.base})", file=sys.stderr)
    return out


def _export(args: MergeArgs, what: Path, source: Source, factors: dict[str, Factors]) -> Path:
    dtype = _dtype(source, args.precision)
    entries = model_entries(source, dtype, factors)

    def fill(folder: Path) -> None:
        _write_model(folder, source, dtype, entries, args.shard_gb)
        _copy_tokenizer(source, folder)

    out = _write_folder(args.out_dir, fill)
    print(f"{what}: {out} ({'merged into' if factors else 'as'} {source.base}, {dtype})", file=sys.stderr)
    return out


def _of_checkpoint(step: Path, base_dir: str | None) -> tuple[Source, dict[str, Factors]]:
    """A run's state after some step: where its base is, and the factors as they were."""
    run = step.resolve().parent.parent
    if not step.is_dir():
        there = ", ".join(sorted(path.name for path in step.parent.glob("step-*"))) or "none"
        raise ValueError(f"{step} does not exist; the checkpoints there are: {there}")
    if not runs.is_run(run):
        raise ValueError(f"{step} lies in no run of litft: there is no {runs.CONFIG} two folders up")
    args = cli.parse(LoRAFinetuneArgs, ["--config", str(run / runs.CONFIG)])
    there = Path(args.checkpoint_dir).exists()
    if not (there or base_dir):
        raise ValueError(
            f"{run} was trained on {args.checkpoint_dir}, which is not there; pass --base_dir with its place now"
        )
    source = resolve(args.checkpoint_dir, base_dir or args.base_dir) if there else resolve(base_dir)
    method, model = method_of(args), source.meta_model()
    _check_identity(step, source, {method.name: dataclasses.asdict(method.args)})
    if held := source.attach_adapter(model):
        method = held
    else:
        method.choose(model, source.adapter_rules)
        method.attach(model)
    values = checkpoint.read_parameters(step)
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    if shapes != {name: tuple(parameter.shape) for name, parameter in method.parameters(model).items()}:
        raise ValueError(f"{step} holds other parameters than {run / runs.CONFIG} says; it cannot be opened")
    return source, {n: Factors(values[f"{n}.lora_a"], values[f"{n}.lora_b"], s.scale) for n, s in method.sites.items()}


def _check_identity(step: Path, source: Source, flags: dict[str, dict[str, Any]]) -> None:
    """ValueError where the base or the method's flags are not those that the checkpoint was saved with."""
    now = {f"{group}.{name}": value for group, values in flags.items() for name, value in values.items()}
    now["base model"] = fingerprint(source.checkpoint)
    if changed := checkpoint.changes(step, now):
        raise ValueError(f"{step} was saved with {'; '.join(changed)}; give it back what it was trained with")


def adapter_factors(source: Source) -> dict[str, Factors]:
    """The factors of an adapter's folder."""
    return LoRA.read(source.adapter, source.meta_model(), source.adapter_rules)[1]


def model_entries(source: Source, dtype: torch.dtype, factors: dict[str, Factors] | None = None) -> list[Entry]:
    """Every tensor of the base under the checkpoint's names, with updates added in fp32."""
    model, factors = source.meta_model(), factors or {}
    moves = check_weights(model, source.checkpoint, source.rules)
    home = {name: (move, index) for move in moves for index, name in enumerate(move.targets)}

    @lru_cache(maxsize=1)  # the parts of a fused tensor are asked for one after the other
    def read(move: Move) -> list[Tensor]:
        return move.convert([source.checkpoint.read(name) for name in move.sources])

    def ours(name: str) -> Tensor:
        move, index = home[name]
        tensor, site = read(move)[index], name.removesuffix(".weight")
        return (merged(tensor, factors[site]) if site in factors else tensor).to(dtype)

    @lru_cache(maxsize=1)  # and so are the experts of a stack
    def written(move: Move) -> list[Tensor]:
        return move.convert([ours(name) for name in move.sources])

    def entry(move: Move, index: int, name: str) -> Entry:
        numel = sum(model.get_parameter(our).numel() for our in move.sources) // len(move.targets)
        return Entry(name, numel * dtype.itemsize, lambda: written(move)[index])

    exports = exporting(source.rules, [name for name, _ in model.named_parameters()])
    return [entry(move, index, name) for move in exports for index, name in enumerate(move.targets)]


def _dtype(source: Source, precision: str) -> torch.dtype:
    return source.dtype(None) if precision == "auto" else DTYPES[precision]


def _write_model(folder: Path, source: Source, dtype: torch.dtype, entries: list[Entry], shard_gb: float) -> None:
    """Weights and config.json."""
    write_weights(folder, entries, int(shard_gb * 1e9))
    hf = {**source.hf, "torch_dtype": str(dtype).removeprefix("torch.")}
    for name in ("dtype", "quantization_config"):  # transformers 5's name for the same; what is written is not quantized
        hf.pop(name, None)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", "utf-8")


def _copy_tokenizer(source: Source, folder: Path) -> None:
    if tokenizer := source.tokenizer():
        copy_tokenizer(tokenizer, folder)


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
