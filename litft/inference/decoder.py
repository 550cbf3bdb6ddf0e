"""Reading and continuing texts: a network with the keys and values of what it has read.

Two functions are worth compiling: reading a piece of a prompt, and one token more of every text.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from litft.data.tokenizer import common_prefix_length
from litft.distributed.devices import is_out_of_memory
from litft.errors import summary
from litft.model.kv_cache import KVCache
from litft.model.transformer import GPT

PIECE = 512  # tokens of a prompt that go through the network at once: what it needs besides the cache is bounded
NOT_A_NUMBER = "the model's logits are NaN; look for NaN or infinity in its weights"
PLANNED = ("dynamic", "longrope")  # ropes that turn by the planned length
BOUND = 256  # a compiled step looks at so many keys, or twice as many, or four times ...

# B rows, V vocabulary


class BrokenModel(ValueError):
    """What a network computes is no number."""


class Decoder:
    """A network and `rows` texts, of up to `capacity` tokens each; what texts have in common is read once."""

    def __init__(self, model: GPT, rows: int = 1, capacity: int | None = None, compiled: bool = False) -> None:
        self.model, self.compiled, self.device = model, compiled, model.device
        # what a network that is trained, and sharded maybe, gathers in inference mode could not be trained with afterwards
        trained = any(parameter.requires_grad for parameter in model.parameters())
        self._quietly = torch.no_grad if trained else torch.inference_mode
        self.ahead = self.device.type == "cuda"  # whether a step is begun before the host has seen the one before
        self._make_room(rows, capacity or model.config.max_positions)
        self.texts: list[list[int]] = [[] for _ in range(rows)]  # the tokens that each row holds
        self.lengths = [0] * rows  # and how many they are, where the host does not know yet which
        ropes = [layer.rope for layer in model.config.layers if layer.rope]
        self._turning = next((rope for rope in ropes if rope.rope_type in PLANNED), None)
        self.max_length = [self.capacity] * rows  # how long each text will be: some ropes turn by that
        self.processed = 0  # tokens that went through the network
        self._piece, self._token = compile_both(model) if compiled else (model, model)

    def _make_room(self, rows: int, capacity: int) -> None:
        self.capacity = min(capacity, self.model.config.max_positions)
        places = self.model.block_devices
        self.cache = KVCache(self.model.config, rows, self.capacity, places, self.model.dtype)
        self.views = [self.cache.rows(row, row + 1) for row in range(rows)]
        self._spans = {(row, row + 1): view for row, view in enumerate(self.views)} | {(0, rows): self.cache}
        # compiled code is made for one place in memory: there prompts are read apart, and what was read is copied
        apart = self.compiled and rows > 1
        self.apart = KVCache(self.model.config, 1, self.capacity, places, self.model.dtype) if apart else None
        for layer in [*self.cache.layers, *(self.apart.layers if apart else ())] if self.compiled else ():
            torch._dynamo.mark_static_address(layer.keys)  # or no CUDA graph is made of what writes there
            torch._dynamo.mark_static_address(layer.values)

    def reserve(self, tokens: int) -> None:
        """Have room for texts of so many tokens, as far as the context allows; at least twice as much as before."""
        if tokens <= self.capacity or self.capacity == self.model.config.max_positions:
            return
        before = self.cache
        self._make_room(len(self.texts), max(tokens, 2 * self.capacity))
        self.cache.copy(before, before.capacity)

    def read(self, row: int, ids: Sequence[int], planned: int | None = None) -> Tensor:
        """Have a row hold this text, and return the logits (V,) after it, in fp32.

        Only what no row has read already goes through the network, and the last token. planned: how long the text will
        be, default as long as there is room. ValueError for a text that is empty, too long, or not in the vocabulary, and
        for logits that are no numbers.
        """
        check_prompt(self.model, ids)
        if len(ids) > self.capacity:
            raise ValueError(f"the text has {len(ids)} tokens, and there is room for {self.capacity}; shorten it")
        planned = min(planned or self.capacity, self.capacity)
        alike = [self._factors(other) == self._factors(planned) for other in self.max_length]
        common = [common_prefix_length(text, ids) if same else 0 for text, same in zip(self.texts, alike, strict=True)]
        best = max(range(len(common)), key=lambda other: (common[other], other == row))
        held = min(common[best], len(ids) - 1)
        page = self.apart or self.views[row]
        if page is not self.views[best]:
            page.copy(self.views[best], held)
        self.texts[row], self.lengths[row], self.max_length[row] = list(ids[:held]), held, planned
        for start in range(held, len(ids), PIECE):
            logits = self.extend(row, ids[start : start + PIECE], page)
        if page is not self.views[row]:
            self.views[row].copy(page, len(ids))
        if logits.isnan().any():
            self.clear(row)
            raise BrokenModel(NOT_A_NUMBER)
        return logits[-1]

    def extend(self, row: int, ids: Sequence[int], page: KVCache | None = None) -> Tensor:
        """Add tokens to a row's text; returns the logits (T, V) after each; of a page that is read (1, V), the last's."""
        tokens, length = torch.tensor([ids]).to(self.device), self.lengths[row]
        logits_to_keep = None if page is None else torch.tensor([[len(ids) - 1]]).to(self.device)
        page, positions = page or self.views[row], None
        page.length = length
        if self._turning is not None:
            page.max_length = self.max_length[row]
        if self.compiled:
            page.bound, positions = self._bound(length + len(ids)), torch.arange(length, length + len(ids))[None]
            positions = positions.to(self.device)
        logits = self._through(self._piece, tokens, positions=positions, cache=page, logits_to_keep=logits_to_keep)
        self.texts[row] += ids
        self.lengths[row] += len(ids)
        self.processed += len(ids)
        return logits[0].to(torch.float32, copy=True)  # what comes out of inference mode itself cannot be written to

    def clear(self, row: int) -> None:
        """Have a row forget what is no number: what is not seen yet has the weight 0, and 0 times NaN is NaN."""
        self.truncate(row, 0)
        for page in filter(None, (self.views[row], self.apart)):
            page.clear()

    def truncate(self, row: int, length: int) -> None:
        """Have a row forget all but its first tokens."""
        del self.texts[row][length:]
        self.lengths[row] = length

    def step(self, tokens: Tensor, active: Sequence[bool]) -> Tensor:
        """Logits (B, V) after one token (B,) more of each row. Which it was the caller says with `hold`, in active rows.

        Of other rows those within `span` have a place written over: what they hold stays, but for the last token of a row
        that is full. The rest is not looked at, and has the logits 0.
        """
        rows = self.span(active)
        for row in range(rows.start, rows.stop):
            if self.lengths[row] == self.capacity:
                assert not active[row]
                self.truncate(row, self.capacity - 1)
        cache, positions, lengths = self._rows(rows), None, self.lengths[rows]
        if len(set(lengths)) == 1 and not self.compiled:
            cache.length = lengths[0]
        else:
            positions = torch.tensor(lengths)[:, None].to(self.device, non_blocking=True)
            cache.bound = self._bound(max(lengths) + 1)
        if self._turning is not None:
            cache.max_length = torch.tensor(self.max_length[rows]).to(self.device).view(-1, 1, 1, 1)
        logits = self._through(self._token, tokens[rows, None], positions=positions, cache=cache)[:, -1]
        self.lengths = [length + own for length, own in zip(self.lengths, active, strict=True)]
        self.processed += sum(active)
        if len(lengths) == len(active):
            return logits.to(torch.float32, copy=True)
        found = torch.zeros(len(active), logits.size(-1), device=self.device)
        found[rows] = logits
        return found

    def span(self, active: Sequence[bool]) -> slice:
        """The rows that a step computes: from the first to the last active one; all in compiled code, made for so many."""
        found = [row for row, own in enumerate(active) if own]
        return slice(0, len(active)) if self.compiled or not found else slice(found[0], found[-1] + 1)

    def _rows(self, rows: slice) -> KVCache:
        """A part of the cache."""
        key = rows.start, rows.stop
        if key not in self._spans:
            self._spans[key] = self.cache.rows(*key)
        return self._spans[key]

    def _through(self, network: Callable, tokens: Tensor, **inputs: Any) -> Tensor:
        """The network's logits; as it is written, with a warning, where what was compiled fails."""
        with self._quietly():
            try:
                return self._known(network(tokens, **inputs))
            except Exception as error:  # compilers raise many kinds
                if not self.compiled or is_out_of_memory(error):
                    raise
                warnings.warn(f"decoding runs uncompiled, since torch.compile fails: {summary(error)}", stacklevel=2)
                self._piece = self._token = self.model
                return self._known(self.model(tokens, **inputs))

    def _known(self, logits: Tensor) -> Tensor:
        """Of every token: a base knows none of those that its adapter has added."""
        missing = self.model.config.vocab_size - logits.size(-1)
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def hold(self, row: int, token: int) -> None:
        """Say which token a row was given."""
        self.texts[row].append(token)

    def _factors(self, planned: int) -> int:
        """What ropes turn by, of a text that is planned to be so long; the same for texts whose keys can be shared."""
        if self._turning is None:
            return 0
        context = self._turning.original_max_positions
        return int(planned > context) if self._turning.rope_type == "longrope" else max(planned, context)

    def _bound(self, needed: int) -> int:
        """How many keys to look at: exactly those there are, or in compiled code, which is made for each number, a few."""
        if not self.compiled:
            return needed
        bound = BOUND
        while bound < needed:
            bound *= 2
        return min(bound, self.capacity)


def compile_both(model: GPT) -> tuple[Callable, Callable]:
    """The network compiled for pieces of any length, and for one token a row; on a GPU that is one CUDA graph."""
    on_gpu = model.embed.weight.is_cuda
    piece = torch.compile(model.forward, dynamic=True)
    token = torch.compile(model.forward, dynamic=False, mode="reduce-overhead" if on_gpu else None)
    return piece, token


def check_prompt(model: GPT, ids: Sequence[int]) -> None:
    """ValueError for a prompt that is empty, longer than the context, or not in the model's vocabulary."""
    config = model.config
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    if len(ids) > config.max_positions:
        raise ValueError(f"the prompt has {len(ids)} tokens and the model's context is {config.max_positions}; shorten it")
    if max(ids) >= config.vocab_size:
        reason = f"token id {max(ids)} is outside the model's vocabulary of {config.vocab_size}"
        raise ValueError(f"{reason}; the tokenizer belongs to another model: copy the right one into the folder")
