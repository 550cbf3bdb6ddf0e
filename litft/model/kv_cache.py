"""Keys and values of the tokens already seen, so that decoding runs each token through the network once.

A cache is memory of a fixed size with a row a text. Where all rows have come equally far, `length` says how far, and new
tokens go behind. Where they have not, the caller says each token's position, which is its place here too, and what lies at
later places is not seen: so rows of different lengths need no padding, and what was a wrong guess is written over.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from litft.model.config import Config

# B batch, K key/value heads, S capacity in tokens, D head dim, T tokens of a call


class Call(NamedTuple):
    """Where the tokens of one forward pass go."""

    start: int
    end: int
    positions: Tensor | None  # (B, T); None: from start to end, in every row
    masks: dict[int | None, Tensor | None]  # by window: what they see; empty: every key, or each what came before it


class LayerCache:
    """One layer's keys and values, (B, K, S, D) each."""

    def __init__(self, cache: "KVCache", keys: Tensor, values: Tensor) -> None:
        self.cache, self.keys, self.values = cache, keys, values

    def update(self, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Take in (B, K, T, D); returns the keys and values to look at, (B, K, S, D), and a mask where one is needed."""
        start, end, positions, masks = self.cache.call
        if positions is None:
            self.keys[:, :, start:end], self.values[:, :, start:end] = keys, values
        else:
            end, places = self.cache.bound, positions.to(keys.device)[:, None, :, None].expand_as(keys)
            self.keys.scatter_(2, places, keys)
            self.values.scatter_(2, places, values)
        mask = masks.get(window)
        return self.keys[:, :, :end], self.values[:, :, :end], mask if mask is None else mask.to(keys.device)


class KVCache:
    """A LayerCache a layer, passed to `model(tokens, cache=cache)`; `capacity` is the planned length in tokens."""

    def __init__(
        self,
        config: Config,
        batch: int,
        capacity: int,
        device: torch.device | str | list[torch.device] = "cpu",  # or one a layer
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (batch, config.n_kv_heads, capacity, config.head_dim)
        # zeros, since what is not seen yet has the weight 0, and 0 times NaN is NaN; two tensors, since the compiler goes
        # wrong where both are parts of one (torch 2.13, sizes not known)
        devices = device if isinstance(device, list) else [device] * len(config.layers)
        memory = [tuple(torch.zeros(shape, device=place, dtype=dtype) for _ in range(2)) for place in devices]
        self._fill(memory, config)

    def _fill(self, memory: list[tuple[Tensor, ...]], config: Config) -> None:
        self.config, self.capacity = config, memory[0][0].size(2)
        self.layers = [LayerCache(self, *layer) for layer in memory]
        self.length = 0  # tokens that have gone through every layer, where that is the same for all rows
        self.max_length: int | Tensor = self.capacity  # length, by which some ropes turn; of rows (B, 1, 1, 1)
        self.bound = self.capacity  # where positions are given: keys beyond are not looked at
        self.call = Call(0, 0, None, {})

    @staticmethod
    def token_bytes(config: Config, dtype: torch.dtype) -> int:
        """What a token of a row takes."""
        return 2 * len(config.layers) * config.n_kv_heads * config.head_dim * dtype.itemsize

    def rows(self, start: int, stop: int) -> "KVCache":
        """Some of the rows, in the same memory."""
        view = KVCache.__new__(KVCache)
        view._fill([(layer.keys[start:stop], layer.values[start:stop]) for layer in self.layers], self.config)
        return view

    def copy(self, other: "KVCache", length: int) -> None:
        """Hold the first `length` tokens of another cache with as many rows."""
        for layer, own in zip(self.layers, other.layers, strict=True):
            layer.keys[:, :, :length], layer.values[:, :, :length] = own.keys[:, :, :length], own.values[:, :, :length]

    def clear(self) -> None:
        """Hold zeros again."""
        for layer in self.layers:
            layer.keys.zero_()
            layer.values.zero_()

    def begin(self, tokens: Tensor, positions: Tensor | None) -> None:
        """Make room for a call's tokens (B, T), behind those held or at positions (B, T)."""
        count, device = tokens.size(1), tokens.device
        start, end = self.length, self.length + count
        if positions is None and end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} are needed; build it with more capacity")
        masks: dict[int | None, Tensor | None] = {}
        if positions is not None or (count > 1 and start):
            at = positions if positions is not None else torch.arange(start, end, device=device)[None]
            keys = self.bound if positions is not None else end
            masks = {window: causal_mask(at, keys, window) for window in {layer.window for layer in self.config.layers}}
        self.call = Call(start, end, positions, masks)

    def end(self) -> None:
        """The call's tokens have gone through every layer."""
        if self.call.positions is None:
            self.length = self.call.end


def causal_mask(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """Which of the first `keys` places the tokens at positions (B, T) see: booleans (B, 1, T, keys)."""
    places, at = torch.arange(keys, device=positions.device), positions[:, None, :, None]
    mask = places <= at
    return mask if window is None else mask & (places > at - window)
