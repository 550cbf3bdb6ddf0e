"""Write a model folder: the tensors of the base model, merged with a method's values one at a time;
tokenizer files."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from litft.checkpoints.adapter_reader import (
    ADAPTER_CONFIG,
    adapter_tensor_names,
    read_adapter_config,
)
from litft.checkpoints.conversion import TensorMapping, mappings_to_hf
from litft.checkpoints.hub import PROCESSOR_FILES, TOKENIZER_FILES
from litft.checkpoints.peft_module_names import missing_modules
from litft.checkpoints.rules import Rule
from litft.checkpoints.weight_writer import LazyTensor, write_weights
from litft.data.declared_tokens import read_declared, read_json
from litft.data.tokenizer import NAMED_TEMPLATES, TEMPLATE_FILE, Tokenizer
from litft.families import family, peft_rules
from litft.methods import AdapterTensors, Method, read_method
from litft.model.config import Config
from litft.model.mlp import stored_dtype
from litft.model.placement import full_tensor
from litft.model.quantization import is_quantizable, quantize_dequantize
from litft.model.transformer import GPT
from litft.pretrained.folder import TIE_FIELDS, PretrainedFolder, resolve
from litft.pretrained.fp8 import fp8_entries, quantizable_linears, quantization_config


class WeightChange(Protocol):
    """What is merged into a base model."""

    def config(self, config: Config) -> Config:
        """Return the merged model's config, given the base's."""
        ...

    def check(self, names: list[str]) -> None:
        """Raise ValueError if it cannot be merged into base parameters with these names."""
        ...

    def replacement(self, name: str, base: GPT) -> Tensor | None:
        """Return the tensor to write instead of the base's, which then is not read; None if it
        depends on it."""
        ...

    def tensor(self, name: str, weight: Tensor, base: GPT) -> Tensor:
        """Return the merged tensor, given `weight`, the base's tensor `name`."""
        ...


@dataclass(frozen=True)
class Result:
    """A method and its values; `quantize` and `dtype` to merge them into the base as quantized in
    training."""

    method: Method
    values: AdapterTensors
    quantize: str | None = None
    # of the weights before quantization; without `quantize` it is not read
    dtype: torch.dtype = torch.float32
    # how the base was quantized in training, for comparison only; None: it was not
    trained_with: str | None = None

    def config(self, config: Config) -> Config:
        """Return the base's config with the new vocabulary size, untied if the method changes only
        embedding or head."""
        tied = config.tied and not self.method.unties_head()
        return replace(config, vocab_size=self.method.vocab_size(config), tied=tied)

    def check(self, names: list[str]) -> None:
        """Raise ValueError if the method cannot be merged into base parameters with these names."""
        self.method.check_merge(names, self.values)

    def replacement(self, name: str, base: GPT) -> Tensor | None:
        """Return the trained tensor if a whole model was trained, None for frozen tensors and for
        other methods."""
        if self.method.saves_full_model and not self.is_unchanged(name, base):
            return full_tensor(self.values[name])
        return None

    def is_unchanged(self, name: str, base: GPT) -> bool:
        """Whether to write the base's tensor: frozen values may have been rounded for training."""
        has_new_rows = self.method.tokens and name.startswith(("embed.", "lm_head."))
        return (
            name in self.method.frozen
            and not has_new_rows
            and self.values[name].shape == base.get_parameter(name).shape
        )

    def tensor(self, name: str, weight: Tensor, base: GPT) -> Tensor:
        """Merge the method's values into `weight`, the base's tensor `name`."""
        if self.quantize and is_quantizable(name, base):
            weight = quantize_dequantize(weight, self.quantize, self.dtype)
        return self.method.merged(name, weight, self.values)


def model_entries(
    source: PretrainedFolder,
    dtype: torch.dtype,
    result: WeightChange | None = None,
    rules: list[Rule] | None = None,
) -> list[LazyTensor]:
    """List all tensors of the base merged with `result`, named by `rules` (default: those of the
    family)."""
    base = source.outline
    mappings = source.checked_mappings
    locations = {}
    for mapping in mappings:
        for index, name in enumerate(mapping.targets):
            locations[name] = mapping, index
    if result:
        result.check(list(locations))
    config = result.config(source.config) if result else source.config
    with torch.device("meta"):
        model = GPT(config)

    # the parts of a fused tensor are requested in sequence
    @lru_cache(maxsize=1)
    def read(mapping: TensorMapping) -> list[Tensor]:
        return mapping.convert([source.checkpoint.read(name) for name in mapping.sources])

    base_dtype = source.dtype(None)

    def written_dtype(name: str) -> torch.dtype:
        # a 16-bit folder may have some tensors in fp32, such as routers, which stay so
        if dtype == base_dtype and name in locations:
            mapping, _ = locations[name]
            if all(map(source.checkpoint.is_stored_in_fp32, mapping.sources)):
                return torch.float32
        return stored_dtype(name, dtype)

    def litft_tensor(name: str) -> Tensor:
        replacement = result.replacement(name, base) if result else None
        if replacement is not None:
            return _rounded(replacement, name, written_dtype(name))
        # a head that the method has untied: the base has the embedding alone, from which it began
        mapping, index = locations[name if name in locations else "embed.weight"]
        tensor = read(mapping)[index]
        if result is not None:
            tensor = result.tensor(name, tensor, base)
        return _rounded(tensor, name, written_dtype(name))

    # the experts of a stack are requested in sequence, too
    @lru_cache(maxsize=1)
    def hf_tensors(mapping: TensorMapping) -> list[Tensor]:
        return mapping.convert([litft_tensor(name) for name in mapping.sources])

    def entry(mapping: TensorMapping, index: int, name: str) -> LazyTensor:
        # shape and dtype as they are written, on the meta device
        tensors = []
        for name_in_model in mapping.sources:
            parameter = model.get_parameter(name_in_model).detach()
            tensors.append(parameter.to(written_dtype(name_in_model)))
        like = mapping.convert(tensors)[index]
        return LazyTensor(name, like, lambda: hf_tensors(mapping)[index])

    rules = rules or family(config.model_type).rules(config)
    parameters = [name for name, _ in model.named_parameters()]
    entries = []
    for mapping in mappings_to_hf(rules, parameters):
        for index, name in enumerate(mapping.targets):
            entries.append(entry(mapping, index, name))
    return entries


def _rounded(tensor: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the dtype that it is written in; raise ValueError if fp16 has no such
    numbers."""
    rounded = tensor.to(dtype)
    if (
        rounded.dtype == torch.float16
        and rounded.isinf().any()
        and not tensor.isinf().any()
    ):
        largest = float(tensor.abs().max())
        raise ValueError(
            f"{name} contains {largest:.3g}, which is out of range for fp16; pass --precision bf16"
        )
    return rounded


def write_result(
    folder: Path | None,
    source: PretrainedFolder,
    dtype: torch.dtype,
    result: WeightChange | None,
    shard_gb: float,
    whole: PretrainedFolder | None = None,
    in_fp8: bool = False,
) -> list[LazyTensor]:
    """Write weights and config.json of the base, merged with `result` if given; return the tensors
    written.

    folder: None on ranks that only join the all-gathers of sharded tensors, in the same order as
    the writing rank.
    whole: the multimodal model that the language model belongs to. Its other tensors and its
    processor are written, too. in_fp8: store the weights of Linears in FP8, not with `whole`.
    """
    # a multimodal file may store experts in another layout than the language model alone
    rules = whole.rules_of_files if whole else None
    entries = model_entries(source, dtype, result, rules)
    if whole:
        entries = _with_other_parts(entries, whole)
    quantization = {}
    if in_fp8:
        linears = quantizable_linears(source.outline, source.text_rules)
        if not linears:
            raise ValueError(
                "no weight of this model can be stored in FP8: it has no Linear but head, routers "
                "and experts (GPT-2's are of another class); leave --quantize out"
            )
        quantization = {"quantization_config": quantization_config(linears, entries)}
        entries = fp8_entries(entries, linears)
    write_weights(folder, entries, int(shard_gb * 1e9))
    if folder is None:
        return entries

    # config.json
    after = result.config(source.config) if result else source.config
    dtype_name = str(dtype).removeprefix("torch.")
    if whole:
        multimodal = whole.multimodal
        assert multimodal is not None  # `whole` is a multimodal model
        before = whole.config
        hf = _written_config(multimodal, before, after)
        hf["torch_dtype"] = dtype_name
        # older files have its fields beside the others
        if "text_config" in hf:
            hf["text_config"] = _written_config(hf["text_config"], before, after)
        copy_files(whole.base, folder, PROCESSOR_FILES)
    else:
        hf = _written_config(source.hf, source.config, after)
        hf["torch_dtype"] = dtype_name
    (folder / "config.json").write_text(
        json.dumps(hf | quantization, indent=2) + "\n", "utf-8"
    )
    return entries


def _written_config(hf: dict[str, Any], before: Config, after: Config) -> dict[str, Any]:
    """Return config.json for unquantized weights, with the new vocabulary size and tying of the
    embedding."""
    written = dict(hf)
    # transformers 5 reads dtype first; auto_map names code that is not in the folder
    for name in ("dtype", "torch_dtype", "quantization_config", "auto_map"):
        written.pop(name, None)
    if after.vocab_size != before.vocab_size:
        written["vocab_size"] = after.vocab_size
    if after.tied != before.tied:
        written["tie_word_embeddings"] = after.tied
    for name in TIE_FIELDS & written.keys():
        written[name] = after.tied
    return written


def _with_other_parts(
    entries: list[LazyTensor], whole: PretrainedFolder
) -> list[LazyTensor]:
    """Return the language model's tensors under the names of the multimodal checkpoint, and its
    other tensors unchanged.

    Raise ValueError for a quantized checkpoint: its other tensors may be quantized, too.
    """
    if whole.checkpoint.is_quantized or whole.hf.get("quantization_config"):
        raise ValueError(
            f"--multimodal: the weights of {whole.base} are quantized; leave it out, which writes "
            "the language model alone"
        )

    # from the names of the language model alone to those in the multimodal checkpoint
    stored = {}
    parameters = []
    names_of_text = set()
    for mapping in whole.checked_mappings:
        stored[mapping.targets] = mapping.sources
        parameters += mapping.targets
        names_of_text.update(mapping.sources)
    names = {}
    # a mapping to files has as sources the litft names that one from files has as targets
    for mapping in mappings_to_hf(whole.rules_of_files, parameters):
        names |= zip(mapping.targets, stored[mapping.sources], strict=True)
    written = []
    for entry in entries:
        name = names.get(entry.name, entry.name)
        written.append(entry._replace(name=name))
        names_of_text.add(name)

    # a tied head may be stored a second time, with the values before training
    read = whole.checkpoint.read
    for name in whole.checkpoint.names:
        if name not in names_of_text and not name.endswith("lm_head.weight"):
            written.append(
                LazyTensor(name, whole.checkpoint.meta(name), partial(read, name))
            )
    return written


def check_written(folder: Path, source: PretrainedFolder) -> None:
    """Open a written model or adapter once, on the meta device; raise RuntimeError if litft or PEFT
    could not.

    source: the base. An adapter's keys must be names in the class that opens the base: PEFT and
    vLLM pass over others.
    """
    fault = (
        "this is a fault of litft, please report it; the training state is in checkpoints/"
    )
    if not (folder / ADAPTER_CONFIG).is_file():
        resolve(folder).check()
        return
    if read_adapter_config(folder).get("peft_type") == "LORA":
        missing = missing_modules(
            adapter_tensor_names(folder),
            source.checkpoint.names,
            source.adapter_names,
            [rule.hf_name for rule in peft_rules(source.config)],
        )
        if missing:
            raise RuntimeError(
                f"{folder}: {missing[0]} is not in the base model, as it is opened elsewhere; "
                f"{fault}"
            )

    # the values must be those that the method expects
    method, values = read_method(folder, source)
    model = source.meta_model()
    method.attach(model)
    for name, parameter in method.parameters(model).items():
        if name not in values or values[name].shape != parameter.shape:
            raise RuntimeError(f"{folder}: {name} is not as it was trained; {fault}")


def copy_files(source: Path, folder: Path, names: Iterable[str] = TOKENIZER_FILES) -> None:
    """Copy files if they exist; by default tokenizer, chat template and generation config."""
    for name in names:
        if (path := source / name).is_file():
            shutil.copyfile(path, folder / name)
    if (source / NAMED_TEMPLATES).is_dir() and TEMPLATE_FILE in names:
        (folder / NAMED_TEMPLATES).mkdir(exist_ok=True)
        for path in (source / NAMED_TEMPLATES).glob("*.jinja"):
            shutil.copyfile(path, folder / NAMED_TEMPLATES / path.name)
    _drop_code(folder / "tokenizer_config.json")


def _drop_code(path: Path) -> None:
    """Remove the reference to the tokenizer's code, which is not copied."""
    config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if config.pop("auto_map", None) is not None:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def copy_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer with the chat template and stop tokens used in training to a model
    folder."""
    # a file of the tokenizer's own folder replaces it
    for base in tokenizer.generation_folders[1:]:
        copy_files(base, folder, ["generation_config.json"])
    copy_files(tokenizer.folder, folder)
    tokenizer.save_added(folder)
    _write_templates(tokenizer, folder)
    _name_end_token(tokenizer, folder)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    stops = tokenizer.stop_ids
    settings["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _name_end_token(tokenizer: Tokenizer, folder: Path) -> None:
    """Name the end token in the tokenizer_config.json of an adapter's folder, if no file does.

    The base's folder may lack the name, too: GPT-2's end token is that of the class that
    transformers chooses by config.json, which an adapter's folder does not have.
    """
    if (folder / "config.json").is_file() or "eos_token" in read_declared(folder).named:
        return
    path = folder / "tokenizer_config.json"
    config = read_json(path) | {"eos_token": tokenizer.special["eos_token"]}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _write_templates(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the chat templates to files, and remove them from tokenizer_config.json, which some
    programs prefer.

    Without a template of the model, none is written.
    """
    named = folder / NAMED_TEMPLATES
    shutil.rmtree(named, ignore_errors=True)
    # the second is that of older processors
    for path in (folder / TEMPLATE_FILE, folder / "chat_template.json"):
        path.unlink(missing_ok=True)
    if tokenizer.has_template:
        (folder / TEMPLATE_FILE).write_text(tokenizer.chat_template, "utf-8")
        for name, source in tokenizer.named_templates.items():
            named.mkdir(exist_ok=True)
            (named / f"{Path(name).name}.jinja").write_text(source, "utf-8")
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text("utf-8"))
    config.pop("chat_template", None)
    # as texts were tokenized in training
    if tokenizer.has_other_prefix(config):
        config["add_prefix_space"] = not config["add_prefix_space"]
    config.pop("split_special_tokens", None)
    # transformers 5 builds these tokenizers anew and splits spaces differently; others are read
    # from tokenizer.json
    if (
        str(config.get("tokenizer_class")).startswith(("Llama", "CodeLlama"))
        and (folder / "tokenizer.json").is_file()
    ):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
