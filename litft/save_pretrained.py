"""A model as a folder, the reverse of `pretrained.py`: the base's tensors as a method has changed them, one by one."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from litft.checkpoints.conversion import Rule, TensorMapping, mappings_to_hf
from litft.checkpoints.weight_files import LazyTensor, check_weights, write_weights
from litft.families import family
from litft.methods import Method, Values
from litft.model.config import Config
from litft.model.placement import full_tensor
from litft.model.quantization import is_quantizable, quantize_dequantize
from litft.model.transformer import GPT
from litft.pretrained import PretrainedFolder


@dataclass(frozen=True)
class Result:
    """A method with its values; `quantize` and `dtype`, where they are added to the base as it was rounded in training."""

    method: Method
    values: Values
    quantize: str | None = None
    dtype: torch.dtype | None = None  # of the weights when they were quantized

    def config(self, config: Config) -> Config:
        """The base's architecture, with the new tokens, and with a head of its own where the method changed just one."""
        tied = config.tied and not self.method.unties()
        return replace(config, vocab_size=self.method.vocab_size(config), tied=tied)

    def keeps(self, name: str, base: GPT) -> bool:
        """Whether a tensor is left as the base has it: frozen ones may have been rounded for training."""
        changed = self.method.tokens and name.startswith(("embed.", "lm_head."))  # which have the new tokens' rows
        return name in self.method.frozen and not changed and self.values[name].shape == base.get_parameter(name).shape

    def tensor(self, name: str, weight: Tensor, base: GPT) -> Tensor:
        """The base's tensor `name` as the method has changed it."""
        if self.quantize and is_quantizable(name, base):
            weight = quantize_dequantize(weight, self.quantize, self.dtype)
        return self.method.merged(name, weight, self.values)


def model_entries(
    source: PretrainedFolder, dtype: torch.dtype, result: Result | None = None, rules: list[Rule] | None = None
) -> list[LazyTensor]:
    """Every tensor of the base, as a method has changed it, under the names of `rules`, which default to the family's."""
    base = source.meta_model()
    mappings = check_weights(base, source.checkpoint, source.stored_rules)
    home = {name: (mapping, index) for mapping in mappings for index, name in enumerate(mapping.targets)}
    if result:
        result.method.check_merge(list(home), result.values)
    config = result.config(source.config) if result else source.config
    with torch.device("meta"):
        model = GPT(config)

    @lru_cache(maxsize=1)  # the parts of a fused tensor are asked for one after the other
    def read(mapping: TensorMapping) -> list[Tensor]:
        return mapping.convert([source.checkpoint.read(name) for name in mapping.sources])

    def ours(name: str) -> Tensor:
        if result and result.method.saves_full_model and not result.keeps(name, base):
            return full_tensor(result.values[name]).to(dtype)
        mapping, index = home[name if name in home else "embed.weight"]  # a head that is no longer tied
        tensor = read(mapping)[index]
        return (tensor if result is None else result.tensor(name, tensor, base)).to(dtype)

    @lru_cache(maxsize=1)  # and so are the experts of a stack
    def written(mapping: TensorMapping) -> list[Tensor]:
        return mapping.convert([ours(name) for name in mapping.sources])

    def entry(mapping: TensorMapping, index: int, name: str) -> LazyTensor:
        like = mapping.convert([model.get_parameter(our).detach().to(dtype) for our in mapping.sources])[index]
        return LazyTensor(name, like, lambda: written(mapping)[index])

    exports = mappings_to_hf(
        rules or family(config.model_type).rules(config), [name for name, _ in model.named_parameters()]
    )
    return [entry(mapping, index, name) for mapping in exports for index, name in enumerate(mapping.targets)]


def write_result(
    folder: Path | None, source: PretrainedFolder, dtype: torch.dtype, result: Result | None, shard_gb: float
) -> list[LazyTensor]:
    """A model's weights and config.json: the base's, or what a method has made of it; returns what was written.

    folder: None in a process that only takes part in gathering what is sharded, in the writer's order.
    """
    entries = model_entries(source, dtype, result)
    write_weights(folder, entries, int(shard_gb * 1e9))
    if folder is None:
        return entries
    hf = {**source.hf, "torch_dtype": str(dtype).removeprefix("torch.")}
    for name in ("dtype", "quantization_config"):  # transformers 5's name for the same; what is written is not quantized
        hf.pop(name, None)
    before, after = source.config, result.config(source.config) if result else source.config
    if after.vocab_size != before.vocab_size:
        hf["vocab_size"] = after.vocab_size
    if after.tied != before.tied:
        hf["tie_word_embeddings"] = after.tied
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", "utf-8")
    return entries
