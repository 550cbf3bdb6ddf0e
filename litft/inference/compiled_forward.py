"""Forward passes of a compiled decoder: compiled blocks, and on a GPU one CUDA graph a token."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from litft.model.compilation import compile_block
from litft.model.kv_cache import KVCache
from litft.model.transformer import GPT

# B rows, V vocabulary


def with_compiled_blocks(model: GPT) -> GPT:
    """Return a network with compiled blocks that shares all modules and weights with `model`, whose
    own blocks stay uncompiled."""
    blocks = nn.ModuleList()
    for block in model.blocks:
        compiled = copy.copy(block)
        compile_block(compiled)
        blocks.append(compiled)
    network = copy.copy(model)
    network._modules = {**model._modules, "blocks": blocks}
    return network


def compile_forward(model: GPT) -> tuple[Callable, Callable]:
    """Return the pass of a part of a prompt, and of one token for every row, both compiled.

    On a GPU, compiling the whole network would take minutes, and what it saves in launches a CUDA
    graph saves too. On a CPU it is faster than blocks are.
    """
    if model.device.type == "cuda":
        network = with_compiled_blocks(model)
        # experts in fp32 are multiplied in a loop, for which the host reads their numbers of rows
        has_experts = any(layer.experts for layer in model.config.layers)
        if has_experts and model.dtype == torch.float32:
            return network, network
        return network, TokenGraphs(network)
    forward_chunk = torch.compile(model.forward, dynamic=True)
    forward_token = torch.compile(model.forward, dynamic=False)
    return forward_chunk, forward_token


class TokenGraphs:
    """The pass of one token for every row, recorded as one CUDA graph for each number of keys.

    Launching the kernels of a pass takes the host longer than they run; a graph is one launch.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        # numbers of keys that a pass has attended to
        self._seen: set[int] = set()
        self._recorded: dict[int, RecordedPass] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Forget all graphs: the cache that they write to was replaced."""
        self._seen.clear()
        self._recorded.clear()

    def __call__(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Return the logits (B, 1, V) after tokens (B, 1) at positions (B, 1); a later call
        overwrites them."""
        assert cache.key_positions is not None  # a decoder with compiled code sets them
        num_keys = cache.key_positions.size(0)
        # The first pass compiles, which cannot be recorded. It counts: it changes the cache, and
        # states cannot be changed twice.
        if num_keys not in self._seen:
            self._seen.add(num_keys)
            return self.model(tokens, positions=positions, cache=cache)

        inputs = _inputs(tokens, positions, cache)
        if num_keys not in self._recorded:
            self._recorded[num_keys] = RecordedPass(self.model, inputs, cache, self._pool)
        return self._recorded[num_keys].replay(inputs)


class RecordedPass:
    """A CUDA graph of one pass, with the tensors that it reads and writes."""

    def __init__(
        self, model: GPT, inputs: dict[str, Tensor], cache: KVCache, pool: Any
    ) -> None:
        self.inputs = {}
        for name, tensor in inputs.items():
            # In inference mode, a normal tensor is copied to an inference tensor. Blocks would be
            # compiled again for it, which torch 2.15 refuses while a graph is recorded.
            with torch.inference_mode(tensor.is_inference()):
                self.inputs[name] = tensor.clone()
        cache.active = self.inputs.get("active")
        cache.max_length = self.inputs.get("max_length", cache.max_length)
        self.graph = torch.cuda.CUDAGraph()
        # other threads, such as a server's, may allocate meanwhile
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.logits = model(
                self.inputs["tokens"], positions=self.inputs["positions"], cache=cache
            )

    def replay(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the pass with other inputs of the same shapes; return its logits (B, 1, V)."""
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        return self.logits


def _inputs(tokens: Tensor, positions: Tensor, cache: KVCache) -> dict[str, Tensor]:
    """Return the tensors of a pass that differ from call to call, by name."""
    inputs = {"tokens": tokens, "positions": positions}
    if cache.active is not None:
        inputs["active"] = cache.active
    if isinstance(cache.max_length, Tensor):
        inputs["max_length"] = cache.max_length
    return inputs
