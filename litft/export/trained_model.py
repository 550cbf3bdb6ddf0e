"""What a run, a checkpoint or a model folder holds, merged and written one tensor at a time."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from litft import run_dir
from litft.args import ExportArgs, GgufExportArgs, MergedArgs
from litft.args.parser import finetune_args
from litft.checkpoints.adapter_reader import note_step, noted_step
from litft.checkpoints.hub import hub_id
from litft.data.tokenizer import Tokenizer
from litft.distributed.devices import DTYPES
from litft.export.merge_distance import merge_distance_line
from litft.export.model_folder import write_folder, written_dtype
from litft.families.wrappers import ONLY_WRAPPED
from litft.methods import AdapterTensors, Method
from litft.model.quantization import KINDS
from litft.pretrained.folder import PretrainedFolder, resolve
from litft.pretrained.save import (
    Result,
    WeightChange,
    check_written,
    copy_tokenizer,
    write_result,
)
from litft.training.output import run_checkpoints
from litft.training.resume_identity import identity_changes, setup_identity
from litft.training.run_setup import resolve_setup


class TrainedModel(NamedTuple):
    """Contents of a run, a checkpoint or any model folder, to be exported."""

    path: Path  # of the run or checkpoint, for messages
    source: PretrainedFolder
    # the method and its trained values; None: a folder with a full model
    update: tuple[Method, AdapterTensors] | None
    # recorded in the adapter or the checkpoint, such as quantize and precision
    settings: dict[str, Any]
    tokenizer: Tokenizer | None

    def result(self, dequantized: bool) -> Result | None:
        """Return what to merge into the base; None: the folder already has a full model."""
        if self.update is None and dequantized:
            raise ValueError(
                f"--dequantized_base: {self.path} is a full model, not an adapter; remove the flag"
            )
        if self.update:
            return merge_result(self.source, self.update, self.settings, dequantized)
        return None

    def adapter(self) -> tuple[Method, AdapterTensors]:
        """Return the method and its values; raise ValueError if this is a full model."""
        if self.update is None or self.update[0].saves_full_model:
            raise ValueError(
                f"{self.path} is a full model, so there is no adapter to write; remove --merge "
                "false"
            )
        return self.update


def read_trained(args: ExportArgs | GgufExportArgs) -> TrainedModel:
    """Read the folder --checkpoint_dir, or the newest finished run."""
    folder = Path(args.checkpoint_dir or run_dir.newest_finished())
    if folder.name.startswith("step-") and folder.parent.name == "checkpoints":
        step = folder
    else:
        step = None
    # an unfinished run stands for its newest checkpoint
    if step is None and run_dir.is_run(folder) and not run_dir.finished(folder):
        step = run_checkpoints.newest(folder)
        if step is not None:
            print(
                f"warning: the run {folder} has not finished; its newest checkpoint, {step.name}, "
                "is exported",
                file=sys.stderr,
            )
    if step is not None:
        return TrainedModel(step, *_read_step(step, args.base_dir))
    source = resolve(folder, args.base_dir)
    return TrainedModel(
        source.folder, source, source.read_adapter(), source.record, source.tokenizer()
    )


def merge_result(
    source: PretrainedFolder,
    update: tuple[Method, AdapterTensors],
    settings: dict[str, Any],
    dequantized: bool,
) -> Result:
    """Return the merge of an update into the original base or the dequantized base, and print which
    of the two.

    settings: recorded in the adapter or the checkpoint. Raise ValueError for `dequantized` if the
    base was not quantized.
    """
    kind = settings.get("quantize", "none")
    # the base itself is stored quantized: there are no other weights to add to
    if source.checkpoint.is_quantized:
        print(
            f"the base is quantized as {kind}; the updates are added to the dequantized weights",
            file=sys.stderr,
        )
        return Result(*update, trained_with=kind)
    # trained on unquantized weights
    if kind not in KINDS:
        if dequantized:
            raise ValueError(
                "--dequantized_base: the adapter was not trained on a quantized base; remove the "
                "flag"
            )
        return Result(*update)
    # trained on weights that were quantized while they were read
    if not dequantized:
        target = (
            "the original weights; --dequantized_base adds them to the dequantized weights"
        )
        print(
            f"the base was quantized as {kind} in training; the updates are added to {target}",
            file=sys.stderr,
        )
        return Result(*update, trained_with=kind)
    precision = settings.get("precision", "fp32")
    if not isinstance(precision, str) or precision not in DTYPES:
        raise ValueError(
            f"--dequantized_base: the recorded precision {precision!r} is not supported; remove "
            "the flag"
        )
    print(
        f"the updates are added to the dequantized weights of the base, quantized as {kind}",
        file=sys.stderr,
    )
    return Result(*update, quantize=kind, dtype=DTYPES[precision], trained_with=kind)


def keep_step(path: Path, folder: Path) -> None:
    """Note in an exported folder the step of its weights, where `path` holds those of an earlier
    step of a run: a checkpoint, or best/."""
    is_checkpoint = path.parent.name == "checkpoints" and path.name.startswith("step-")
    step = run_dir.checkpoint_step(path) if is_checkpoint else noted_step(path)
    if step is not None:
        note_step(folder, step)


def write_merged(
    args: MergedArgs,
    path: Path,
    source: PretrainedFolder,
    result: WeightChange | None,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write the base merged with `result`, and return the folder.

    path: of the run or the adapters, for the message. Raises ValueError for FP8 of fp16 weights.
    """
    dtype = written_dtype(source, args.precision)
    if args.quantize == "fp8" and dtype == torch.float16:
        raise ValueError(
            f"--quantize fp8: {source.base} is in fp16, in which small scales would be zero; add "
            "--precision bf16"
        )
    tokenizer = tokenizer or source.tokenizer()
    whole = _whole_model(source, args.base_dir) if args.multimodal else None

    def fill(folder: Path) -> None:
        in_fp8 = args.quantize == "fp8"
        write_result(folder, source, dtype, result, args.shard_gb, whole, in_fp8)
        # a folder without a tokenizer is still a model
        if tokenizer:
            copy_tokenizer(tokenizer, folder)
        check_written(folder, source)
        keep_step(path, folder)

    out = write_folder(args.target_dir, fill)
    name = str(dtype).removeprefix("torch.")
    print(
        f"exported {path} to {out} ({'merged with' if result else 'as'} {source.base}, in {name})",
        file=sys.stderr,
    )
    if whole is None and source.config.model_type in ONLY_WRAPPED:
        print(
            "note: transformers has no class for causal language models of "
            f"{source.config.model_type} alone; litft reads this folder; for other programs, "
            "write the whole model with --multimodal true",
            file=sys.stderr,
        )
    if isinstance(result, Result) and result.trained_with:
        precision = None if args.precision == "auto" else args.precision
        line = merge_distance_line(source, result, out, precision)
        if line:
            print(line, file=sys.stderr)
    return out


def _whole_model(source: PretrainedFolder, base_dir: str | None) -> PretrainedFolder:
    """Return the multimodal model around the exported language model; raise ValueError if it is not
    known."""
    if source.multimodal or base_dir is None:
        whole = source
    else:
        whole = resolve(base_dir)
    if whole.multimodal is None:
        raise ValueError(
            f"--multimodal: {whole.base} has a language model only; pass the multimodal folder it "
            "comes from as --base_dir"
        )
    own = source.config
    others = whole.config
    names = []
    for field in fields(own):
        if getattr(own, field.name) != getattr(others, field.name):
            names.append(field.name)
    # new tokens and an untied head do not make it another network
    names = [name for name in names if name not in ("vocab_size", "tied")]
    if names:
        raise ValueError(
            f"--multimodal: the language model of {whole.base} is another one than {source.base} "
            f"({', '.join(names)} differ)"
        )
    return whole


def _read_step(
    step: Path, base_dir: str | None
) -> tuple[
    PretrainedFolder, tuple[Method, AdapterTensors], dict[str, Any], Tokenizer | None
]:
    """Return the base, the method and its values, the recorded settings and the tokenizer of a
    checkpoint of a run."""
    run = step.resolve().parent.parent
    if not step.is_dir():
        available = (
            ", ".join(sorted(path.name for path in step.parent.glob("step-*"))) or "none"
        )
        raise ValueError(f"{step} does not exist; available checkpoints: {available}")
    if not run_dir.is_run(run):
        raise ValueError(
            f"{step} is not inside a run of litft: {run_dir.CONFIG} is missing two folders up"
        )

    # the base, which may have moved since
    args = finetune_args(run)
    if Path(args.model_dir).exists() or hub_id(args.model_dir):
        source = resolve(args.model_dir, base_dir or args.base_dir)
    elif base_dir:
        source = resolve(base_dir)
    else:
        raise ValueError(
            f"{run} was trained on {args.model_dir}, which does not exist; pass its current "
            "location as --base_dir"
        )

    # the checkpoint must fit the settings in the run's config
    # the teacher was of use to the training alone, and may be gone
    setup = resolve_setup(replace(args, teacher=None), source)
    progress = run_checkpoints.read_progress(step)
    changed = identity_changes(progress, setup_identity(setup), is_whole=False)
    if changed:
        raise ValueError(
            f"{step} was saved with {'; '.join(changed)}; restore what it was trained with"
        )
    values = run_checkpoints.read_parameters(step)
    if {name: tuple(value.shape) for name, value in values.items()} != setup.shapes():
        raise ValueError(
            f"the parameters in {step} do not match {run / run_dir.CONFIG}; restore the run's own "
            "config"
        )

    # the tokenizer as it was in training
    try:
        setup.tokenizer.restore_choices(progress.get("tokenizer"))
    except ValueError as error:
        raise ValueError(
            f"{step}: {error}; its progress.json is damaged, use another checkpoint"
        ) from None
    return source, (setup.method, values), progress.get("identity", {}), setup.tokenizer
