"""Keys and values of the tokens already seen, so that decoding runs each token through the network once."""

import torch
from torch import Tensor

from litft.config import Config

# B batch, K key/value heads, S capacity in tokens, D head dim


class LayerCache:
    """One layer's keys and values, (B, K, S, D) each, of which the first `length` are filled."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, K, T, D) and return views on all that is filled, (B, K, length, D)."""
        end = self.length + keys.size(2)
        if end > self.keys.size(2):
            raise ValueError(f"the cache holds {self.keys.size(2)} tokens, {end} are needed; build it with more capacity")
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """A LayerCache a layer, passed to `model(tokens, cache=cache)`; `capacity` is the planned length in tokens."""

    def __init__(
        self, config: Config, batch: int, capacity: int, device: torch.device | str = "cpu", dtype=torch.float32
    ) -> None:
        self.capacity = capacity
        shape = (batch, config.n_kv_heads, capacity, config.head_dim)
        self.layers = [LayerCache(shape, torch.device(device), dtype) for _ in config.layers]

    @property
    def length(self) -> int:
        """Tokens that have gone through every layer."""
        return self.layers[-1].length

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        for layer in self.layers:
            layer.length = min(layer.length, length)
