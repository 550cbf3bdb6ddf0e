"""Models and LoRA adapters as GGUF files, and GGUF files as the source of a model folder."""

import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from litft.args import GgufExportArgs
from litft.checkpoints.peft_targets import LoraWeights, peft_targets
from litft.checkpoints.rules import InterleaveValueHeads, KeysAndValues, Reshape, Rule
from litft.checkpoints.weight_writer import LazyTensor
from litft.export.gguf import k_quants
from litft.export.gguf.families import gguf_architecture, gguf_rules
from litft.export.gguf.files import GgufFile, gguf
from litft.export.gguf.metadata import NEEDS_HEAD, GgufArchitecture
from litft.export.gguf.metadata_writer import to_gguf_architecture
from litft.export.gguf.modelfile import modelfile
from litft.export.gguf.tensor_types import OUTTYPES, ModelSizes, StoredTensor, tensor_types
from litft.export.gguf.vocabulary_writer import add_tokenizer, model_name
from litft.export.trained_model import TrainedModel
from litft.inference.generation_config import read_generation_config
from litft.methods import Method
from litft.methods.lora import LoRA
from litft.model.config import Config
from litft.pretrained.folder import PretrainedFolder
from litft.pretrained.save import model_entries

_TYPES = gguf.GGMLQuantizationType
K_QUANTS = {
    _TYPES.Q4_K: k_quants.quantize_q4_k,
    _TYPES.Q5_K: k_quants.quantize_q5_k,
    _TYPES.Q6_K: k_quants.quantize_q6_k,
}
# the package gguf needs memory for 16 candidates of each value
MXFP4_VALUES = 1 << 20
# for the small matrices of an adapter
ADAPTER_OUTTYPES = ("f32", "f16", "bf16", "q8_0")
QUANTIZATION_VERSION = 2
# what llama.cpp multiplies without looking for an adapter: tables, and Gemma 4's projection of them
NOT_ADAPTED = ("embed", "embed_positions", "per_layer.projection")


@dataclass(frozen=True)
class GgufFolder(PretrainedFolder):
    """A GGUF file as the source of a model folder."""

    file: GgufFile = field(kw_only=True)
    extra_layers: int = field(kw_only=True)  # for multi-token prediction

    @property
    def checkpoint(self) -> GgufFile:
        """The file's tensors."""
        return self.file

    @property
    def stored_rules(self) -> list[Rule]:
        """The mapping from llama.cpp's tensor names."""
        return gguf_rules(self.config, self.extra_layers)


def config_token_ids(file: GgufFile, size: int) -> dict[str, int | None]:
    """Return config.json's token ids, None where absent: transformers' defaults may be outside of
    the vocabulary."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {
        name: file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in keys.items()
    }
    for name, value in ids.items():
        if type(value) is not int or not 0 <= value < size:
            ids[name] = None
    return ids


def write_model_file(folder: Path, trained: TrainedModel, args: GgufExportArgs) -> str:
    """Write the merged model as a GGUF file, and a Modelfile beside it; return the file's name.

    Raises ValueError without a tokenizer, and for numbers that its type does not have.
    """
    source = trained.source
    tokenizer = trained.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{trained.path} has no tokenizer, which a GGUF file needs; copy its files into the "
            "folder"
        )
    result = trained.result(args.dequantized_base)
    if result:
        config = result.config(source.config)
    else:
        config = source.config
    architecture = to_gguf_architecture(config)
    _warn_of_differences(architecture, config)
    if args.outtype != "auto":
        outtype = args.outtype
    elif source.dtype(None) == torch.bfloat16:
        outtype = "bf16"
    else:
        outtype = "f16"
    name = f"model-{outtype.upper()}.gguf"
    writer = _writer(architecture.name, trained, outtype)
    _add_metadata(writer, architecture)
    add_tokenizer(writer, tokenizer, config.vocab_size)
    entries = model_entries(source, torch.float32, result, gguf_rules(config))
    # some architectures need the tensor of a head even if it is the embedding
    if config.tied and architecture.name in NEEDS_HEAD:
        for entry in list(entries):
            if entry.name == "token_embd.weight":
                entries.append(entry._replace(name="output.weight"))
    # divisors of the rotary frequencies are tensors, and not metadata
    for tensor_name, factors in architecture.factors.items():
        entries.append(LazyTensor(tensor_name, factors, factors.float))
    _write_tensors(writer, folder / name, entries, architecture.sizes, outtype)
    settings = read_generation_config([source.folder, source.base])
    (folder / "Modelfile").write_text(
        modelfile(name, tokenizer, settings.sampling), "utf-8"
    )
    return name


def _add_metadata(writer: gguf.GGUFWriter, architecture: GgufArchitecture) -> None:
    """Add what describes the network."""
    # by the exact type, since a bool is an int, too
    adders = {
        float: writer.add_float32,
        str: writer.add_string,
        int: writer.add_uint32,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in architecture.metadata.items():
        adders[type(value)](f"{architecture.name}.{key}", value)


def _warn_of_differences(architecture: GgufArchitecture, config: Config) -> None:
    """Print a warning for what llama.cpp computes in another way than the model."""
    window = architecture.ignored_window()
    if window:
        reason = f"llama.cpp ignores this model's sliding window of {window} tokens"
        print(f"warning: {reason}; answers to longer texts will differ", file=sys.stderr)
    if any(layer.rope and not layer.rope.truncate for layer in config.layers):
        reason = "llama.cpp rounds the bounds of YaRN's ramp, which this model does not"
        print(f"warning: {reason}; its logits will differ", file=sys.stderr)


def write_adapter_file(folder: Path, trained: TrainedModel, args: GgufExportArgs) -> str:
    """Write the LoRA matrices under the base's tensor names; llama.cpp scales each pair by alpha /
    rank."""
    if args.outtype not in ("auto", *ADAPTER_OUTTYPES):
        raise ValueError(
            f"--outtype {args.outtype} is for whole models; with --merge false, pass "
            f"{', '.join(ADAPTER_OUTTYPES)}"
        )
    method, values = trained.adapter()
    sites = _adapter_sites(method, trained)
    # it refuses all other methods
    assert isinstance(method, LoRA)
    if args.outtype == "auto":
        outtype = "f32"
    else:
        outtype = args.outtype
    factors = {site: method.factors(site, values) for site in sites}
    fused = _fused_pairs(trained, sites, factors)

    # The file has a single alpha, so B takes up other scales. It is never 0, which is none to
    # llama.cpp: the B of what is switched off is 0 instead.
    alphas = Counter(pair.scale * pair.a.size(-2) for pair in fused.values())
    alpha, _ = alphas.most_common(1)[0]
    writer = _writer(gguf_architecture(trained.source.config), trained, outtype, "adapter")
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    name = f"adapter-{outtype.upper()}.gguf"
    sizes = ModelSizes(writer.arch, num_layers=len(trained.source.config.layers))
    _write_tensors(writer, folder / name, _adapter_entries(fused, alpha), sizes, outtype)
    return name


def _adapter_entries(fused: dict[str, LoraWeights], alpha: float) -> list[LazyTensor]:
    """Return the file's tensors. alpha: that of the file."""
    entries = []
    for name, pair in fused.items():
        a = pair.a
        b = pair.b * (pair.scale * a.size(-2) / alpha)
        entries.append(LazyTensor(f"{name}.weight.lora_a", a, a.float))
        entries.append(LazyTensor(f"{name}.weight.lora_b", b, b.float))
    return entries


def _fused_pairs(
    trained: TrainedModel, sites: list[str], factors: dict[str, LoraWeights]
) -> dict[str, LoraWeights]:
    """Return the matrices of llama.cpp's tensors, which may fuse several Linears, by name; raise
    ValueError if it cannot have them."""
    targets = peft_targets(trained.source.outline, gguf_rules(trained.source.config))
    fused = {}
    for site in sites:
        target = targets[site]
        if isinstance(target.rule, InterleaveValueHeads | KeysAndValues | Reshape):
            raise ValueError(
                f"llama.cpp stores {site} in another form than an adapter can; leave --merge false "
                "out"
            )
        if target.name not in fused:
            # llama.cpp multiplies each expert by a matrix of its own, without PEFT's layout
            fused[target.name] = replace(target, experts=0).fuse(factors)
    return fused


def _adapter_sites(method: Method, trained: TrainedModel) -> list[str]:
    """Return the adapted Linears; raise ValueError if the adapter trains anything else."""
    config = trained.source.config
    unsupported = {
        f"is {method.title}": not isinstance(method, LoRA),
        "is DoRA": isinstance(method, LoRA) and method.args.dora,
        "has new tokens": bool(method.tokens),
        "trains whole modules or biases": isinstance(method, LoRA)
        and bool(method.trained_in_full),
    }
    sites = list(method.specs) if isinstance(method, LoRA) else []
    # llama.cpp's graphs multiply most of their weights without looking for an adapter
    has_latent = any(layer.latent for layer in config.layers)
    unsupported["is of a model with latent attention"] = has_latent
    unsupported["is of Kimi Linear"] = config.model_type == "kimi_linear" and not has_latent
    not_adapted = []
    for site in sites:
        # a tied head is the embedding
        if site.endswith(NOT_ADAPTED) or (site == "lm_head" and config.tied):
            not_adapted.append(site)
    # one of many blocks is enough
    shown = " and ".join(not_adapted[:2])
    unsupported[f"adapts {shown}"] = bool(not_adapted)
    reasons = []
    for reason, applies in unsupported.items():
        if applies:
            reasons.append(reason)
    if reasons:
        remedy = (
            "llama.cpp only supports plain LoRA of Linears as an adapter; "
            "leave --merge false out"
        )
        raise ValueError(f"{trained.path} {', '.join(reasons)}: {remedy}")
    return sites


def _writer(
    architecture: str, trained: TrainedModel, outtype: str, kind: str = "model"
) -> gguf.GGUFWriter:
    """Return a writer with the metadata that every file has."""
    writer = gguf.GGUFWriter(None, architecture)
    writer.add_type(kind)
    writer.add_name(model_name(trained.source.name, trained.tokenizer))
    writer.add_file_type(int(OUTTYPES[outtype][1]))
    writer.add_quantization_version(QUANTIZATION_VERSION)
    return writer


def _write_tensors(
    writer: gguf.GGUFWriter,
    path: Path,
    entries: list[LazyTensor],
    sizes: ModelSizes,
    outtype: str,
) -> None:
    """Write the file, computing one tensor at a time. outtype: a key of OUTTYPES."""
    stored = [StoredTensor(entry.name, tuple(entry.like.shape)) for entry in entries]
    types = tensor_types(stored, sizes, outtype)
    # the file begins with names, types and sizes of all tensors
    for entry in entries:
        tensor_type = types[entry.name]
        shape = tuple(entry.like.shape)
        size = int(np.prod(gguf.quant_shape_to_byte_shape(shape, tensor_type)))
        writer.add_tensor_info(
            entry.name, shape, np.dtype(np.float32), size, raw_dtype=tensor_type
        )
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(_encode(entry, types[entry.name]))
    finally:
        writer.close()


def _encode(entry: LazyTensor, tensor_type: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return a tensor's values, or its bytes if the type has blocks."""
    tensor = entry.make().detach().cpu().contiguous()
    # the blocks of K-quants have scales in fp16
    if tensor_type == _TYPES.F16 or tensor_type in K_QUANTS:
        largest = float(tensor.abs().max())
        # NaN is not in range either
        if not largest <= torch.finfo(torch.float16).max:
            raise ValueError(
                f"{entry.name} contains {largest:.3g}, which is out of range for fp16; pass "
                "--outtype bf16"
            )
    if tensor_type in K_QUANTS:
        return k_quants.in_tiles(K_QUANTS[tensor_type], tensor).numpy()
    if tensor_type != _TYPES.MXFP4:
        return gguf.quantize(tensor.numpy(), tensor_type)
    rows = tensor.flatten(0, -2)
    pieces = []
    for piece in rows.split(max(1, MXFP4_VALUES // rows.size(-1))):
        pieces.append(gguf.quantize(piece.numpy(), tensor_type))
    return np.concatenate(pieces).reshape(*tensor.shape[:-1], -1)
