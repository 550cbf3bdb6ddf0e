"""Decoding with a KV cache: prefill prompts and run decode steps on a batch of rows.

Two forward passes are worth compiling: a chunk of a prompt, and one token for every row.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from litft.data.tokenizer_backends import common_prefix_length
from litft.distributed.devices import is_out_of_memory
from litft.errors import first_line
from litft.inference.compiled_forward import TokenGraphs, compile_forward
from litft.inference.state_snapshots import RowStates, Snapshot, best_start, take_snapshot
from litft.model.kv_cache import KVCache
from litft.model.transformer import GPT

# prompt tokens in one forward pass; bounds the memory for activations
PREFILL_CHUNK = 512
NOT_A_NUMBER = (
    "the model's logits are NaN; look for NaN or infinity in its weights, or, in fp16, pass "
    "--precision fp32: its activations may be too large"
)
# torch's attention on a CPU computes finite numbers from NaN for fewer queries
SHOWS_NAN = 16
# compiled code attends to this many keys, doubled until all cached keys fit
MIN_BOUND = 256

# B rows, V vocabulary


class PromptLogits(NamedTuple):
    """The newest prompt, its row, and the logits after it, (V,)."""

    ids: list[int]
    row: int
    rope_length: int  # what rotary frequencies depended on
    logits: Tensor


class BrokenModel(ValueError):
    """The logits of a model are NaN."""


class Decoder:
    """A model with a KV cache of `rows` texts, up to `capacity` tokens each; a prefix that texts
    share is computed once."""

    def __init__(
        self, model: GPT, rows: int = 1, capacity: int | None = None, compiled: bool = False
    ) -> None:
        self.model = model
        self.compiled = compiled
        self.device = model.device
        # weights that a sharded model gathers in inference
        # mode cannot be used for training afterwards
        trained = any(parameter.requires_grad for parameter in model.parameters())
        self._no_grad = torch.no_grad if trained else torch.inference_mode
        # launch a step before the host has the tokens of the last one
        self.async_steps = self.device.type == "cuda"
        self._allocate(rows, capacity or model.config.max_positions)
        # the token ids of each row, as far as the host has them
        self.texts: list[list[int]] = [[] for _ in range(rows)]
        # tokens in the cache of each row, including those the host does not have yet
        self.lengths = [0] * rows
        # for further rows with the same prompt
        self._newest: PromptLogits | None = None
        # of recurrent mixers; empty for other networks
        if KVCache.state_bytes(model.config):
            self.states = [RowStates() for _ in range(rows)]
        else:
            self.states = []
        # with such a rope, cached keys are valid only for texts of the same final length
        self._length_rope = None
        for layer in model.config.layers:
            if layer.rope and layer.rope.depends_on_length:
                self._length_rope = layer.rope
                break
        # final length of each text, for ropes that depend on it
        self.max_length = [self.capacity] * rows
        self.processed = 0  # tokens that went through the model
        # of a model in training, whose loss shows NaN;
        # ranks of a sharded one would wait for each other
        self._may_hide_nan = self.device.type == "cpu" and not trained
        self._forward_chunk: Callable = model
        self._forward_token: Callable = model
        self._has_run: set[Callable] = set()
        if compiled:
            self._forward_chunk, self._forward_token = compile_forward(model)

    def _allocate(self, rows: int, capacity: int) -> None:
        """Make an empty cache of so many rows, and what refers to its memory."""
        self.capacity = min(capacity, self.model.config.max_positions)
        devices = self.model.block_devices
        self.cache = KVCache(
            self.model.config, rows, self.capacity, devices, self.model.dtype
        )
        self.views = [self.cache.rows(row, row + 1) for row in range(rows)]
        # views of some rows, made once: a step would spend time on new views of every layer
        self._span_views = {}
        for row, view in enumerate(self.views):
            self._span_views[row, row + 1] = view
        self._span_views[0, rows] = self.cache
        # those of `_key_positions`, by number of keys: a recorded CUDA graph reads the same tensor
        # in each call
        self._key_ranges: dict[int, Tensor] = {}

    def reserve(self, tokens: int) -> None:
        """Grow the capacity to `tokens`, at least doubling it, up to the model's context length.

        Cached tokens are kept.
        """
        if tokens <= self.capacity or self.capacity == self.model.config.max_positions:
            return
        old_cache = self.cache
        # doubling keeps the number of copies of a growing text small
        self._allocate(len(self.texts), max(tokens, 2 * self.capacity))
        self.cache.copy(old_cache, old_cache.capacity)
        if isinstance(self._forward_token, TokenGraphs):
            self._forward_token.forget()

    def prefill(
        self, row: int, ids: Sequence[int], max_length: int | None = None
    ) -> Tensor:
        """Replace the text of a row by `ids` and return the logits (V,) after the last token, in
        fp32.

        The longest prefix that any row has cached is copied; the other tokens, at least the last
        one, go through the model.
        max_length: final length of the text, default the capacity. Raises ValueError if the text is
        empty, too long or outside the vocabulary, and BrokenModel if the logits are NaN.
        """
        check_prompt(self.model, ids)
        if len(ids) > self.capacity:
            raise ValueError(
                f"the text has {len(ids)} tokens and the cache has room for {self.capacity}; "
                "shorten it"
            )

        max_length = min(max_length or self.capacity, self.capacity)
        # several answers to one prompt: nothing is computed again
        newest = self._newest
        if newest is not None and self._has_prompt(newest, ids, max_length):
            if newest.row != row:
                self.views[row].copy(self.views[newest.row], len(ids))
            self.texts[row] = list(ids)
            self.lengths[row] = len(ids)
            self.max_length[row] = max_length
            return newest.logits.clone()
        source_row, num_cached, snapshot = self._longest_prefix(row, ids, max_length)

        # start from the cached prefix: its keys and values are copied if another row has them
        if source_row != row:
            self.views[row].copy(self.views[source_row], num_cached)
        self.texts[row] = list(ids[:num_cached])
        self.lengths[row] = num_cached
        self.max_length[row] = max_length
        if self.states:
            self._restore(row, num_cached, snapshot)
            # the whole prompt is a snapshot that knows its next logits: nothing is computed
            if num_cached == len(ids):
                assert snapshot is not None
                assert snapshot.logits is not None
                return snapshot.logits.clone()
        if self._may_hide_nan:
            self._check_weights(longest=len(ids) - num_cached)

        for start in range(num_cached, len(ids), PREFILL_CHUNK):
            logits = self._extend(row, ids[start : start + PREFILL_CHUNK], last_only=True)

        self._check_logits(row, logits)
        if self.states:
            self.states[row].prompt = take_snapshot(self.views[row], len(ids), logits[-1])
        else:
            # a network with states has a snapshot of the prompt instead
            rope_length = self._rope_length(max_length)
            self._newest = PromptLogits(list(ids), row, rope_length, logits[-1].clone())
        return logits[-1]

    def _check_logits(self, row: int, logits: Tensor) -> None:
        """Raise BrokenModel if logits are NaN, after clearing the row."""
        if logits.isnan().any():
            self.clear(row)
            raise BrokenModel(NOT_A_NUMBER)

    def _has_prompt(
        self, newest: PromptLogits, ids: Sequence[int], max_length: int
    ) -> bool:
        """Return whether a prompt is the newest one, and its row still has it."""
        if newest.ids != list(ids) or newest.rope_length != self._rope_length(max_length):
            return False
        return self.texts[newest.row][: len(ids)] == newest.ids

    def _check_weights(self, longest: int) -> None:
        """Raise BrokenModel if the model has NaN that the passes so far hide. longest: tokens of
        the pass that follows."""
        self._may_hide_nan = False
        # the pass itself will show them
        if longest >= SHOWS_NAN:
            return
        tokens = torch.arange(SHOWS_NAN)[None] % self.model.config.vocab_size
        with self._no_grad():
            if self.model(tokens).isnan().any():
                raise BrokenModel(NOT_A_NUMBER)

    def num_cached(
        self, row: int, ids: Sequence[int], max_length: int | None = None
    ) -> int:
        """Return how many tokens of a text `prefill` with the same arguments would copy rather than
        compute."""
        return self._longest_prefix(
            row, ids, min(max_length or self.capacity, self.capacity)
        )[1]

    def _longest_prefix(
        self, row: int, ids: Sequence[int], max_length: int
    ) -> tuple[int, int, Snapshot | None]:
        """Return the row that has the longest prefix of a text, the prefix's length, and the states
        after it, if any."""
        prefix_lengths = []
        for text, other_length in zip(self.texts, self.max_length, strict=True):
            # keys that were rotated with other frequencies cannot be used
            if self._rope_length(other_length) == self._rope_length(max_length):
                prefix_lengths.append(common_prefix_length(text, ids))
            else:
                prefix_lengths.append(0)
        if self.states:
            return best_start(self.states, prefix_lengths, len(ids), row)
        # of equal prefixes, that of the row itself, which needs no copy
        source_row = max(
            range(len(prefix_lengths)),
            key=lambda other: (prefix_lengths[other], other == row),
        )
        # the last token is computed in any case: its logits are needed
        return source_row, min(prefix_lengths[source_row], len(ids) - 1), None

    def _restore(self, row: int, length: int, snapshot: Snapshot | None) -> None:
        """Set the states of a row to those after the first `length` tokens: of a snapshot, or those
        that it has."""
        cache = self.views[row]
        # without a snapshot, and not at the start, the cache has the states after `length` tokens
        if snapshot:
            cache.restore(snapshot.states)
        elif not length:
            cache.clear_states()
        self.states[row] = RowStates()
        self.states[row].length = length
        if snapshot:
            self.states[row].piece = snapshot

    def _catch_up(self, row: int) -> None:
        """Bring the states of a row, whose text was cut, to the end of its text."""
        states = self.states[row]
        length = self.lengths[row]
        if states.length == length:
            return
        # start from the latest snapshot, and compute the tokens after it again
        snapshot = states.latest(length)
        ids = self.texts[row]
        prompt = states.prompt
        start = snapshot.length if snapshot else 0
        self._restore(row, start, snapshot)
        # `_restore` forgets the snapshots; that of the prompt is valid, since `truncate` has
        # dropped it if the text was cut before its end
        self.states[row].prompt = prompt
        self.texts[row] = ids[:start]
        self.lengths[row] = start
        for first in range(start, length, PREFILL_CHUNK):
            self._extend(row, ids[first : first + PREFILL_CHUNK], last_only=True)

    def extend(self, row: int, ids: Sequence[int]) -> Tensor:
        """Append T tokens to a row; return the fp32 logits (T, V) after each of them.

        Raises BrokenModel if they are NaN.
        """
        if self.states:
            self._catch_up(row)
            if len(ids) > 1:  # drafts, of which some may be rejected
                self.states[row].piece = take_snapshot(self.views[row], self.lengths[row])
        logits = self._extend(row, ids, last_only=False)
        self._check_logits(row, logits)
        return logits

    def _extend(self, row: int, ids: Sequence[int], last_only: bool) -> Tensor:
        """Append T tokens to a row whose states are at its end; return the fp32 logits (T, V), or
        those of the last token (1, V)."""
        cache = self.views[row]
        tokens = torch.tensor([ids]).to(self.device)
        logits_to_keep = None
        if last_only:
            logits_to_keep = torch.tensor([[len(ids) - 1]]).to(self.device)
        length = self.lengths[row]
        positions = None
        cache.length = length
        # the pass has one row: no other one is idle, whose states would have to stay
        cache.active = None
        if self._length_rope is not None:
            cache.max_length = self.max_length[row]
        # Compiled code always gets positions, so that the length of the text is a value, not a
        # constant of the graph.
        if self.compiled:
            cache.key_positions = self._key_positions(length + len(ids))
            positions = torch.arange(length, length + len(ids))[None].to(self.device)

        # until the pass has succeeded, it is unknown how many tokens the states contain
        self._invalidate_states([row])
        logits = self._forward(
            self._forward_chunk,
            tokens,
            positions=positions,
            cache=cache,
            logits_to_keep=logits_to_keep,
        )

        self.texts[row] += ids
        self.lengths[row] += len(ids)
        self.processed += len(ids)
        if self.states:
            self.states[row].length = self.lengths[row]
        # a copy from outside of inference mode, which callers may modify
        return logits[0].to(torch.float32, copy=True)

    def _invalidate_states(self, rows: Iterable[int]) -> None:
        """Mark the states of rows as unknown during a pass: an interrupted one leaves states of
        which some contain the tokens."""
        if self.states:
            for row in rows:
                self.states[row].length = None

    def clear(self, row: int) -> None:
        """Empty a row and zero its cache.

        Masked keys have weight 0, and 0 times NaN is NaN, so NaN must not stay.
        """
        self.truncate(row, 0)
        self.views[row].clear()
        if self.states:
            self.states[row] = RowStates()

    def truncate(self, row: int, length: int) -> None:
        """Keep only the first `length` tokens of a row."""
        del self.texts[row][length:]
        self.lengths[row] = length
        if self.states:
            self.states[row].truncate(length)

    def step(self, tokens: Tensor, active: Sequence[bool]) -> Tensor:
        """Run one decode step with tokens (B,) and return the logits (B, V) in fp32.

        The caller records the tokens of active rows with `append`. Inactive rows within `span` are
        computed too: the slot behind their text is overwritten, so a full row loses its last token.
        Rows outside `span` get zeros.
        """
        rows = self.span(active)
        # a full row has no slot for the token that is computed and ignored
        for row in range(rows.start, rows.stop):
            if self.lengths[row] == self.capacity:
                assert not active[row]
                self.truncate(row, self.capacity - 1)
        # a state cannot be cut like keys: after a truncation it is computed again
        if self.states:
            for row in range(rows.start, rows.stop):
                if active[row]:
                    self._catch_up(row)

        cache = self._cache_view(rows)
        positions = None
        lengths = self.lengths[rows]
        if self.states:
            cache.active = torch.tensor(active[rows]).to(self.device, non_blocking=True)
        # rows of one length need neither positions nor a mask
        if len(set(lengths)) == 1 and not self.compiled:
            cache.length = lengths[0]
        else:
            positions = torch.tensor(lengths)[:, None].to(self.device, non_blocking=True)
            cache.key_positions = self._key_positions(max(lengths) + 1)
        if self._length_rope is not None:
            cache.max_length = (
                torch.tensor(self.max_length[rows]).to(self.device).view(-1, 1, 1, 1)
            )

        self._invalidate_states(row for row, is_active in enumerate(active) if is_active)
        logits = self._forward(
            self._forward_token, tokens[rows, None], positions=positions, cache=cache
        )[:, -1]

        # the texts follow with `append`, when the host knows the tokens
        self.processed += sum(active)
        for row, is_active in enumerate(active):
            if is_active:
                self.lengths[row] += 1
                if self.states:
                    self.states[row].length = self.lengths[row]
        # a copy: compiled code may reuse the memory of its output
        if len(lengths) == len(active):
            return logits.to(torch.float32, copy=True)
        all_logits = torch.zeros(len(active), logits.size(-1), device=self.device)
        all_logits[rows] = logits
        return all_logits

    def span(self, active: Sequence[bool]) -> slice:
        """Return the rows that a step computes: from the first to the last active one, or all rows
        in compiled code."""
        active_rows = []
        for row, is_active in enumerate(active):
            if is_active:
                active_rows.append(row)
        # a graph is compiled for one number of rows
        if self.compiled or not active_rows:
            return slice(0, len(active))
        return slice(active_rows[0], active_rows[-1] + 1)

    def _cache_view(self, rows: slice) -> KVCache:
        """Return a view of some rows of the cache."""
        key = rows.start, rows.stop
        if key not in self._span_views:
            self._span_views[key] = self.cache.rows(*key)
        return self._span_views[key]

    def _forward(self, forward: Callable, tokens: Tensor, **inputs: Any) -> Tensor:
        """Run a forward pass; if compiled code fails, warn and continue with the uncompiled
        model."""
        cache: KVCache = inputs["cache"]
        # code that has run once is compiled: before, a block may fail after others have run
        states = None
        if self.compiled and forward not in self._has_run:
            states = [state.clone() for state in cache.states()]
        with self._no_grad():
            try:
                logits = self._pad_vocab(forward(tokens, **inputs))
                if self.compiled:
                    self._has_run.add(forward)
                return logits
            except Exception as error:  # compilers raise many types of errors
                if not self.compiled or is_out_of_memory(error):
                    raise
                warnings.warn(
                    f"decoding runs uncompiled, since torch.compile fails: {first_line(error)}",
                    stacklevel=2,
                )
                self._forward_chunk = self._forward_token = self.model
                if states is not None:
                    cache.restore(states)
                return self._pad_vocab(self.model(tokens, **inputs))

    def _pad_vocab(self, logits: Tensor) -> Tensor:
        """Pad logits to the full vocabulary with -inf: without the adapter, the tokens that it
        added have no logits."""
        num_missing = self.model.config.vocab_size - logits.size(-1)
        if num_missing:
            return F.pad(logits, (0, num_missing), value=-torch.inf)
        return logits

    def append(self, row: int, token: int) -> None:
        """Record the token that a step added to a row."""
        self.texts[row].append(token)

    def _rope_length(self, max_length: int) -> int:
        """Return the length that rotary frequencies depend on; texts with equal values can share
        cached keys."""
        if self._length_rope is None:
            return 0
        context = self._length_rope.original_max_positions
        if self._length_rope.rope_type == "longrope":
            # there are two sets of frequencies, within the original context and beyond it
            return int(max_length > context)
        # dynamic NTK: a set for each length beyond the original context
        return max(max_length, context)

    def _key_positions(self, num_keys: int) -> Tensor:
        """Return the positions of the keys to attend to, at least `num_keys`.

        Compiled code rounds them up to a power of two: a CUDA graph is recorded for each number. It
        is compiled only once, since the number is the size of a tensor.
        """
        if not self.compiled:
            return torch.arange(num_keys, device=self.device)
        bound = MIN_BOUND
        while bound < num_keys:
            bound *= 2
        bound = min(bound, self.capacity)
        if bound not in self._key_ranges:
            self._key_ranges[bound] = torch.arange(bound, device=self.device)
            torch._dynamo.maybe_mark_dynamic(self._key_ranges[bound], 0)
        return self._key_ranges[bound]


def check_prompt(model: GPT, ids: Sequence[int]) -> None:
    """Raise ValueError if a prompt is empty, longer than the context, or outside the model's
    vocabulary."""
    config = model.config
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    if len(ids) > config.max_positions:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and the model's context is {config.max_positions}; "
            "shorten it"
        )
    if max(ids) >= config.vocab_size:
        reason = (
            f"token id {max(ids)} is outside the model's vocabulary of {config.vocab_size}"
        )
        raise ValueError(
            f"{reason}; the tokenizer belongs to another model; copy the right one into the folder"
        )
