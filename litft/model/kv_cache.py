"""The KV cache: keys and values of previous tokens, so that decoding runs each token through the
network once.

A cache has a fixed size and one row per text. If all rows have the same length, `length` is that
length and new tokens are appended. Otherwise the caller passes the position of each token, which is
also its index in the cache; those of a row follow one another. A token does not see entries at
later positions. So rows of different lengths need no padding, and rejected draft tokens are
overwritten. The state of a recurrent mixer cannot be truncated: to drop tokens, restore an earlier
copy (inference/state_snapshots.py).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from litft.model.attention_mask import causal_mask
from litft.model.config import Chunk, Config
from litft.model.device_type import runs_flash_attention

# B batch, K key/value heads, S capacity in tokens, D head dim, T tokens of a call, N keys that a
# call attends to


class TextLengths(NamedTuple):
    """What a GPU's kernel reads instead of a mask: int32 tensors."""

    lengths: Tensor  # (B,), cached tokens of each text, those of this call included
    query_starts: Tensor  # (B + 1,), where the queries of each text start
    key_starts: Tensor  # (B + 1,), where the keys of each row of the cache start


class Call(NamedTuple):
    """Cache positions and attention masks of one forward pass."""

    start: int
    end: int  # the keys before it are attended to
    positions: Tensor | None  # (B, T); None: start to end in every row
    # by window; without a mask, all keys are seen, or those that `texts` says
    masks: dict[int | Chunk | None, Tensor | None]
    # (B,), rows whose states change; None: all
    active: Tensor | None = None
    # of the windows that have no mask, if they need more than the kernels' own causal mask
    texts: TextLengths | None = None


class LayerCache:
    """One layer's keys and values, (B, K, S, D) each, and the states of a recurrent mixer, (B, ...)
    each."""

    def __init__(
        self, cache: "KVCache", keys: Tensor, values: Tensor, *states: Tensor
    ) -> None:
        """Keep the keys and values (B, K, S, D), and the states (B, ...), that belong to one layer.

        The sizes are those of `Config.cache_shape`: K is 0 without attention, and latent attention
        has K = 1, longer keys, and values of size 0.
        """
        self.cache = cache
        self.keys = keys
        self.values = values
        self.states = states

    def store(self, number: int, state: Tensor) -> None:
        """Replace state `number`, (B, ...), by `state` in the same shape, in the rows that this
        call computes."""
        active = self.cache.call.active
        if active is not None:
            active = active.to(state.device).view(-1, *(1,) * (state.dim() - 1))
            state = torch.where(active, state, self.states[number].to(state.dtype))
        self.states[number].copy_(state)

    def update(
        self, keys: Tensor, values: Tensor, window: int | Chunk | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store keys and values (B, K, T, D); return those to attend to, (B, K, N, D) each, and a
        mask (B or 1, 1, T, N) if one is needed."""
        start, end, positions, *_ = self.cache.call
        if positions is None:
            self.keys[:, :, start:end] = keys
            self.values[:, :, start:end] = values
        else:
            # each row writes at positions of its own; compiled, scatter_ would copy the whole cache
            at = positions.to(keys.device)
            rows = torch.arange(at.size(0), device=keys.device)[:, None]  # (B, 1)
            self.keys[rows, :, at] = keys.transpose(1, 2)  # (B, T, K, D)
            self.values[rows, :, at] = values.transpose(1, 2)
        return self.read(window)

    def read(self, window: int | Chunk | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the keys and values to attend to, (B, K, N, D) each, and a mask (B or 1, 1, T, N)
        if one is needed.

        N is the end of the call, or with positions the number of key positions, at most the
        capacity. Another layer has stored the keys and values of this call.
        """
        mask = self.cache.call.masks.get(window)
        end = self.cache.call.end
        return (
            self.keys[:, :, :end],
            self.values[:, :, :end],
            mask if mask is None else mask.to(self.keys.device),
        )

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of the tokens of this call, (B or 1, T)."""
        start, end, positions, *_ = self.cache.call
        if positions is None:
            return torch.arange(start, end, device=device)[None]
        return positions.to(device)


class KVCache:
    """One LayerCache per layer, passed to `model(tokens, cache=cache)`; `capacity` is the maximum
    length in tokens."""

    def __init__(
        self,
        config: Config,
        batch: int,
        capacity: int,
        device: torch.device | str | list[torch.device] = "cpu",  # or one per layer
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # zeros, since masked entries get weight 0 and 0 * NaN is NaN; two tensors, since
        # torch.compile gives wrong results for two views of one (torch 2.13, dynamic sizes)
        if isinstance(device, list):
            devices = device
        else:
            devices = [device] * len(config.layers)
        storage = []
        for on, layer in zip(devices, config.layers, strict=True):
            # a layer without attention, or one that reuses keys, has no heads
            heads, *sizes = config.cache_shape(layer)
            pair = []
            for size in sizes:
                pair.append(_zeros((batch, heads, capacity, size), torch.device(on), dtype))
            storage.append(pair)
        for index in range(len(storage)):
            # the same tensors, if a layer reuses keys and values
            storage[index] = storage[config.kv_source(index)]
        for layer, tensors, on in zip(config.layers, storage, devices, strict=True):
            state_shapes = layer.mixer.state_shapes if layer.mixer else ()
            # fp32
            tensors += [torch.zeros(batch, *shape, device=on) for shape in state_shapes]
        self._set_storage(storage, config)

    def _set_storage(self, storage: list[list[Tensor]], config: Config) -> None:
        self.config = config
        self.capacity = storage[0][0].size(2)
        # (B,), rows whose states the next call changes; None: all
        self.active: Tensor | None = None
        self.layers = [LayerCache(self, *layer) for layer in storage]
        self.length = 0  # cached tokens, if equal for all rows
        # final length, on which some rope types depend; per row as (B, 1, 1, 1)
        self.max_length: int | Tensor = self.capacity
        # with positions: the keys that are attended to; a tensor, whose size can differ between
        # calls of one compiled graph
        # 0, 1, ... (N,); None: the whole capacity
        self.key_positions: Tensor | None = None
        self.call = Call(0, 0, None, {})
        # windows whose layers need no masks, since a GPU's kernel takes the lengths of the texts
        self.unmasked = _unmasked_windows(config, storage[0][0])

    @staticmethod
    def token_bytes(config: Config, dtype: torch.dtype) -> int:
        """Return the bytes that one token takes in all layers."""
        shapes = (config.cache_shape(layer) for layer in config.layers)
        return sum(heads * (key + value) for heads, key, value in shapes) * dtype.itemsize

    @staticmethod
    def state_bytes(config: Config) -> int:
        """Return the bytes that the states of a text take in all layers, whatever its length."""
        count = 0
        for layer in config.layers:
            if layer.mixer:
                count += sum(math.prod(shape) for shape in layer.mixer.state_shapes)
        return count * torch.float32.itemsize

    def rows(self, start: int, stop: int) -> "KVCache":
        """Return a view of some rows, which shares this cache's memory."""
        view = KVCache.__new__(KVCache)
        storage = []
        for layer in self.layers:
            storage.append(
                [x[start:stop] for x in (layer.keys, layer.values, *layer.states)]
            )
        view._set_storage(storage, self.config)
        return view

    def copy(self, other: "KVCache", length: int) -> None:
        """Copy the first `length` tokens, and the states, of another cache with the same number of
        rows."""
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer.keys[:, :, :length] = source.keys[:, :, :length]
            layer.values[:, :, :length] = source.values[:, :, :length]
        self.restore(other.states())

    def states(self) -> list[Tensor]:
        """Return the states of all recurrent mixers, (B, ...) each, in the shapes of their
        `state_shapes`."""
        states = []
        for layer in self.layers:
            states += layer.states
        return states

    def restore(self, states: Sequence[Tensor]) -> None:
        """Copy `states`, (B, ...) each, as from the method of that name, into this cache."""
        for state, source in zip(self.states(), states, strict=True):
            state.copy_(source)

    def clear_states(self) -> None:
        """Set all states to zero."""
        for state in self.states():
            state.zero_()

    def clear(self) -> None:
        """Set all keys, values and states to zero."""
        for layer in self.layers:
            for tensor in (layer.keys, layer.values, *layer.states):
                tensor.zero_()

    def begin(self, tokens: Tensor, positions: Tensor | None) -> None:
        """Prepare for new tokens (B, T), appended or at positions (B, T); raise ValueError if the
        capacity is exceeded."""
        count = tokens.size(1)
        device = tokens.device
        start = self.length
        end = self.length + count
        if positions is None and end > self.capacity:
            raise ValueError(
                f"the KV cache has a capacity of {self.capacity} tokens, but {end} are needed; "
                "create a larger one"
            )

        # No mask tensor is needed for the first tokens of a text, where the kernels are causal, nor
        # for a single token at the end of every row, which sees all keys.
        masks: dict[int | Chunk | None, Tensor | None] = {}
        texts = None
        if positions is not None or (count > 1 and start):
            if positions is None:
                key_positions = torch.arange(end, device=device)
            elif self.key_positions is None:
                key_positions = torch.arange(self.capacity, device=device)
            else:
                key_positions = self.key_positions
            # With positions there are enough keys for the longest row; the mask of each row hides
            # what is beyond its position.
            end = key_positions.size(0)
            if positions is None:
                query_positions = key_positions[None, start:]
            else:
                query_positions = positions
            windows = {layer.window for layer in self.config.layers}
            for window in windows - self.unmasked:
                masks[window] = causal_mask(query_positions, key_positions, window)
            if self.unmasked:
                texts = self._text_lengths(query_positions, count)
        self.call = Call(start, end, positions, masks, self.active, texts)

    def _text_lengths(self, query_positions: Tensor, count: int) -> TextLengths:
        """Return the lengths of texts whose last `count` tokens are at query_positions (B or 1,
        count)."""
        rows = self.layers[0].keys.size(0)
        device = query_positions.device
        lengths = (query_positions[:, -1] + 1).int().expand(rows).contiguous()
        row_starts = torch.arange(rows + 1, device=device, dtype=torch.int32)
        return TextLengths(lengths, row_starts * count, row_starts * self.capacity)

    def end(self) -> None:
        """Finish a call, after its tokens have passed every layer."""
        # with positions, the caller keeps the lengths
        if self.call.positions is None:
            self.length = self.call.end


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros (B, K, S, D). On a GPU the heads of a token are stored side by side, as its
    kernel for packed sequences reads them."""
    if device.type != "cuda":
        return torch.zeros(shape, device=device, dtype=dtype)
    batch, heads, capacity, size = shape
    return torch.zeros(batch, capacity, heads, size, device=device, dtype=dtype).transpose(
        1, 2
    )


def _unmasked_windows(config: Config, keys: Tensor) -> set[int | Chunk | None]:
    """Return the windows all of whose layers attend with FlashAttention, given keys of the cache's
    dtype and device."""
    changes_scores = config.attention_softcap is not None or config.sinks or config.alibi
    if not keys.is_cuda or changes_scores:
        return set()
    windows = set()
    masked = set()
    for layer in config.layers:
        head_dim = layer.head_dim or config.head_dim
        fits = runs_flash_attention(keys, head_dim) and head_dim % 8 == 0
        is_plain = layer.latent is None and layer.kv_sharing == "none"
        if fits and is_plain and not isinstance(layer.window, Chunk):
            windows.add(layer.window)
        else:
            masked.add(layer.window)
    return windows - masked
