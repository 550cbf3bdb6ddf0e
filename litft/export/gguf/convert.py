"""GGUF to a model folder, and runs, models and LoRA adapters to GGUF; tensor by tensor."""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from litft.args import GgufConvertArgs, GgufExportArgs
from litft.checkpoints.conversion import Rule
from litft.checkpoints.peft_format import peft_targets
from litft.checkpoints.weight_files import LazyTensor
from litft.data.tokenizer import Tokenizer
from litft.distributed.devices import DTYPES
from litft.export.convert import TrainedModel, compare, read_trained, write_folder
from litft.export.gguf.architecture import describe, described
from litft.export.gguf.files import GgufFile, gguf
from litft.export.gguf.modelfile import modelfile
from litft.export.gguf.vocabulary import add_tokenizer, model_name, write_tokenizer
from litft.families import gguf_architectures, gguf_rules, read_config
from litft.methods import Method
from litft.methods.lora import LoRA
from litft.pretrained import PretrainedFolder
from litft.save_pretrained import model_entries, write_result

_TYPES = gguf.GGMLQuantizationType
_FILE_TYPES = gguf.LlamaFileType
OUTTYPES = {
    "f32": (_TYPES.F32, _FILE_TYPES.ALL_F32),
    "f16": (_TYPES.F16, _FILE_TYPES.MOSTLY_F16),
    "bf16": (_TYPES.BF16, _FILE_TYPES.MOSTLY_BF16),
    "q8_0": (_TYPES.Q8_0, _FILE_TYPES.MOSTLY_Q8_0),
}
BLOCK = 32  # columns that share a scale in Q8_0
QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class GgufFolder(PretrainedFolder):
    """A GGUF file, as the source of a model folder."""

    file: GgufFile

    @property
    def checkpoint(self) -> GgufFile:
        """Its tensors."""
        return self.file

    @property
    def stored_rules(self) -> list[Rule]:
        """llama.cpp's names."""
        return gguf_rules(self.config)


def read(args: GgufConvertArgs) -> Path:
    """Write a GGUF file's model as a folder, and compare it with the file; ValueError for what litft does not know."""
    file = GgufFile(Path(args.checkpoint_dir))
    description = described(file)
    try:
        hf = description.hf() | _token_ids(file, description.vocab_size)
        config = read_config(hf)
        description.check_rotation(config)
    except ValueError as error:
        raise ValueError(f"{file.folder}: {error}") from None
    source = GgufFolder(file.folder, file.folder, None, hf, config, file)
    dtype = source.dtype(None) if args.precision == "auto" else DTYPES[args.precision]

    def fill(folder: Path) -> None:
        write_tokenizer(file, folder)
        if isinstance(licence := file.metadata.get("general.license"), str):
            (folder / "README.md").write_text(f"---\nlicense: {json.dumps(licence)}\n---\n", "utf-8")
        Tokenizer(folder)  # what would be refused later is refused now
        compare(folder, write_result(folder, source, dtype, None, args.shard_gb))

    out = write_folder(args.out_dir, fill)
    count = len(file.names)
    print(f"converted {file.folder}: {out} ({description.architecture}, {count} tensors in {dtype})", file=sys.stderr)
    return out


def _token_ids(file: GgufFile, size: int) -> dict[str, int | None]:
    """config.json's fields that transformers has defaults for which may lie outside of the vocabulary."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    stated = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: value if type(value) is int and 0 <= value < size else None for name, value in stated.items()}


def write(args: GgufExportArgs) -> Path:
    """Write a GGUF file, with Ollama's Modelfile beside a whole model; ValueError for what llama.cpp could not compute."""
    trained = read_trained(args)
    what = _write_model if args.merge else _write_adapter
    written: list[str] = []

    def fill(folder: Path) -> None:
        written.append(what(folder, trained, args))

    out = write_folder(args.out_dir, fill)
    print(f"{trained.what}: {out / written[0]}{', and a Modelfile for Ollama' if args.merge else ''}", file=sys.stderr)
    return out


def _write_model(folder: Path, trained: TrainedModel, args: GgufExportArgs) -> str:
    source, tokenizer = trained.source, trained.tokenizer
    if tokenizer is None:
        raise ValueError(f"{trained.what} has no tokenizer, and a GGUF file holds one; copy it into the folder")
    result = trained.result(args.dequantized_base)
    config = result.config(source.config) if result else source.config
    description = describe(config)
    if window := description.unheeded_window():
        reason = f"llama.cpp attends to all of a text here, and this model to {window} tokens"
        print(f"warning: {reason}; answers to longer texts will differ", file=sys.stderr)
    outtype = args.outtype
    if outtype == "auto":
        outtype = "bf16" if source.dtype(None) == torch.bfloat16 else "f16"
    name = f"model-{outtype.upper()}.gguf"
    writer = _writer(description.architecture, trained, outtype)
    for key, value in description.metadata.items():
        adders = {float: writer.add_float32, str: writer.add_string, int: writer.add_uint32}
        adders[type(value)](f"{description.architecture}.{key}", value)
    add_tokenizer(writer, tokenizer, config.vocab_size)
    entries = model_entries(source, torch.float32, result, gguf_rules(config))
    entries += [LazyTensor(name, factors, factors.float) for name, factors in description.factors.items()]
    _write_tensors(writer, folder / name, entries, outtype)
    (folder / "Modelfile").write_text(modelfile(name, tokenizer), "utf-8")
    return name


def _write_adapter(folder: Path, trained: TrainedModel, args: GgufExportArgs) -> str:
    """The factors under the names of the base's tensors; llama.cpp scales each pair by alpha / rank."""
    method, values = trained.adapter()
    sites = _adapter_sites(method, trained)
    outtype = "f32" if args.outtype == "auto" else args.outtype
    factors = {site: method.factors(site, values) for site in sites}
    of = peft_targets(trained.source.meta_model(), gguf_rules(trained.source.config))
    fused = {slot.name: slot.fuse(factors) for slot in dict.fromkeys(of[site] for site in sites)}
    alpha = Counter(pair.scale * pair.a.size(0) for pair in fused.values()).most_common(1)[0][0]
    writer = _writer(gguf_architectures()[trained.source.config.model_type], trained, outtype, "adapter")
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    entries = []
    for name, (a, b, scale, _) in fused.items():
        b = b * (scale * a.size(0) / alpha) if alpha else b
        entries += [LazyTensor(f"{name}.weight.lora_{end}", half, half.float) for end, half in (("a", a), ("b", b))]
    name = f"adapter-{outtype.upper()}.gguf"
    _write_tensors(writer, folder / name, entries, outtype)
    return name


def _adapter_sites(method: Method, trained: TrainedModel) -> list[str]:
    """The Linears that have factors; ValueError where the adapter is more than those."""
    config = trained.source.config
    odd = {
        f"is {method.title}": not isinstance(method, LoRA),
        "is DoRA": isinstance(method, LoRA) and method.args.dora,
        "has new tokens": bool(method.tokens),
        "trains whole modules or biases": isinstance(method, LoRA) and bool(method.trained),
    }
    sites = list(method.sites) if isinstance(method, LoRA) else []
    ends = [site for site in sites if site == "embed" or (site == "lm_head" and config.tied)]
    odd[f"adapts {' and '.join(ends)}"] = bool(ends)
    if reasons := [reason for reason, holds in odd.items() if holds]:
        remedy = "llama.cpp's adapters are plain LoRA of Linears; leave --merge false out"
        raise ValueError(f"{trained.what} {', '.join(reasons)}: {remedy}")
    return sites


def _writer(architecture: str, trained: TrainedModel, outtype: str, kind: str = "model") -> gguf.GGUFWriter:
    """With what every file says of itself."""
    writer = gguf.GGUFWriter(None, architecture)
    writer.add_type(kind)
    writer.add_name(model_name(trained.source.name, trained.tokenizer))
    writer.add_file_type(int(OUTTYPES[outtype][1]))
    writer.add_quantization_version(QUANTIZATION_VERSION)
    return writer


def _write_tensors(writer: gguf.GGUFWriter, path: Path, entries: list[LazyTensor], outtype: str) -> None:
    """Write the file, its tensors made one after the other."""
    kinds = [_kind(entry, OUTTYPES[outtype][0]) for entry in entries]
    for entry, kind in zip(entries, kinds, strict=True):
        shape = tuple(entry.like.shape)
        size = int(np.prod(gguf.quant_shape_to_byte_shape(shape, kind)))
        writer.add_tensor_info(entry.name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry, kind in zip(entries, kinds, strict=True):
            writer.write_tensor_data(_encoded(entry, kind))
    finally:
        writer.close()


def _kind(entry: LazyTensor, wanted: _TYPES) -> _TYPES:
    """What a tensor is stored in: llama.cpp wants vectors, norms and positions in fp32, and whole blocks in Q8_0."""
    plain = entry.name.endswith("_norm.weight") or entry.name.startswith(("position_embd", "rope_"))
    if entry.like.dim() < 2 or plain:
        return _TYPES.F32
    return _TYPES.F16 if wanted == _TYPES.Q8_0 and entry.like.size(-1) % BLOCK else wanted


def _encoded(entry: LazyTensor, kind: _TYPES) -> np.ndarray:
    tensor = entry.make().detach().cpu().contiguous()
    if kind == _TYPES.F16 and (largest := float(tensor.abs().max())) > torch.finfo(torch.float16).max:
        raise ValueError(f"{entry.name} holds {largest:.3g}, which fp16 does not; pass --outtype bf16")
    return gguf.quantize(tensor.numpy(), kind)
