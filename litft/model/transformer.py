"""The network: one decoder for all model families.

Differences are values of `Config`, applied when it is built.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from litft.model.altup import AltUpBlock, Streams
from litft.model.attention import check_packed_backward
from litft.model.blocks import Block, ParallelBlock, PostNormBlock
from litft.model.config import Chunk, Config
from litft.model.device_type import device_type
from litft.model.distillation import (
    Distillation,
    TeacherQuestion,
    distillation_loss,
    likeliest_tokens,
)
from litft.model.kv_cache import KVCache
from litft.model.linear import Linear
from litft.model.loss import (
    IGNORED,
    apply_softcap,
    summed_cross_entropy,
    token_cross_entropy,
)
from litft.model.norm import Norm, apply_norm, scaled
from litft.model.packed_sequences import PackedSequences, document_lengths, document_starts
from litft.model.per_layer_input import BlockExtra, PerLayerEmbedding, SharedKeys
from litft.model.positions import sinusoids
from litft.model.rope import CosSin, RotaryEmbedding

# B batch, T tokens, C channels, H query heads, K key/value heads, D head dim, V vocabulary


def block_class(config: Config) -> type[Block]:
    """Return the class of the blocks of an architecture."""
    if config.parallel:
        return ParallelBlock
    if config.altup:
        return AltUpBlock
    if config.norm_position == "residual":
        return PostNormBlock
    return Block


class GPT(nn.Module):
    """A decoder-only transformer with the architecture of `config`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        num_positions = config.max_positions + config.position_offset
        if config.learned_positions:
            self.embed_positions = nn.Embedding(num_positions, config.dim)
        else:
            self.embed_positions = None
        if config.embed_norm:
            self.embed_norm = Norm(config.embed_norm, config.dim)
        else:
            self.embed_norm = None
        if config.per_layer_dim:
            self.per_layer = PerLayerEmbedding(config)
        else:
            self.per_layer = None
        self.streams = Streams(config, config.altup) if config.altup else None

        self.blocks = nn.ModuleList(
            block_class(config)(config, layer) for layer in config.layers
        )
        if config.final_norm is True:
            self.norm = Norm(config.norm, config.dim)
        elif config.final_norm:
            self.norm = Norm(config.final_norm, config.dim)
        else:
            self.norm = None
        self.lm_head = Linear(config.dim, config.vocab_size, bias=config.head_bias)
        self.tie()

        # layers with equal parameters share one table of cos and sin, which is computed once a pass
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope))
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope) for rope in ropes)
        self.ropes_read_length = any(rope.depends_on_length for rope in ropes)
        self.rotary_indices: list[int | None] = []
        for layer in config.layers:
            self.rotary_indices.append(ropes.index(layer.rope) if layer.rope else None)
        self.label_smoothing = self.neftune_alpha = 0.0  # set by the training loop
        self.loss_temperature = 1.0  # of the losses of single tokens
        # whether the loss is compiled in training
        self.compiled_loss = False
        # set if weights are offloaded to the host; None: the device of the weights
        self.compute_device: torch.device | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype; trained weights may be stored in a wider one."""
        return getattr(self.embed, "dtype", self.embed.weight.dtype)

    @property
    def device(self) -> torch.device:
        """The device that tokens must be on."""
        return self.compute_device or self.embed.weight.device

    @property
    def block_devices(self) -> list[torch.device]:
        """The compute device of each block."""
        return [
            self.compute_device or next(block.parameters()).device for block in self.blocks
        ]

    def set_vocabulary(self, size: int) -> None:
        """Set the config's vocabulary size after embedding and head were resized."""
        self.config = replace(self.config, vocab_size=size)

    def tie(self) -> None:
        """Make the head's weight the embedding's parameter, if the architecture ties them."""
        if self.config.tied:
            self.lm_head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: PackedSequences | Tensor | None = None,
        cache: KVCache | None = None,
        targets: Tensor | None = None,
        target_indices: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        reduction: Literal["sum", "none"] = "sum",
        distillation: Distillation | None = None,
        question: TeacherQuestion | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run tokens (B, T) through the network.

        positions: (B, T); default: counted from the cache's length, restarting at each document.
            With a cache they are also the indices at which keys and values are stored.
        documents: (B, T) integers with a different value for each packed sample of a row, or
            `PackedSequences`. Tokens of different documents do not attend to each other.
        cache: keys and values of previous tokens; those of `tokens` are added.
        targets: (B, T); `targets[b, t]` is the token after `tokens[b, t]`, or IGNORED.
        target_indices: (N,), indices of the targets among the flattened B x T positions; avoids a
        GPU sync.
        logits_to_keep: (B, N), indices of the tokens whose logits are computed; default: all.
        reduction: sum: the loss is summed over the targets; none: the loss of each target, (N,),
        without label smoothing.
        distillation: the loss is that of `distillation_loss`, (3,).
        question: return what `likeliest_tokens` says at each of `target_indices`, instead of a
        loss.

        Returns logits (B, T or N, V), or with targets the loss, and with sum the number of targets
        too. The head runs inside `forward`, so that DDP and FSDP handle it.
        """
        x = self.head_input(
            tokens,
            positions=positions,
            documents=documents,
            cache=cache,
            targets=targets,
            logits_to_keep=logits_to_keep,
        )
        if targets is None:
            return apply_softcap(self.lm_head(x), self.config.logit_softcap)
        if question is not None:
            assert target_indices is not None
            at_targets = x.flatten(0, 1).index_select(0, target_indices)  # (N, C)
            return likeliest_tokens(
                at_targets, self.lm_head, question, self.config.logit_softcap
            )
        if distillation is not None:
            return distillation_loss(
                x,
                self.lm_head,
                targets,
                distillation,
                softcap=self.config.logit_softcap,
                target_indices=target_indices,
            )
        return self._cross_entropy(x, targets, target_indices, reduction)

    def head_input(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: PackedSequences | Tensor | None = None,
        cache: KVCache | None = None,
        targets: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Return what the head reads, (B, T or N, C), of tokens (B, T); arguments as in
        `forward`."""
        if isinstance(documents, Tensor):
            documents = PackedSequences.of(documents)
        document_ids = documents.ids if documents else None
        uses_kernel = device_type(tokens) == "cuda" and self.dtype != torch.float32
        if documents is not None and uses_kernel and torch.is_grad_enabled():
            check_packed_backward(self.config, *documents.attended_sizes)

        # positions count the tokens that are cached already: `begin` prepares the cache, and only
        # `end` makes it longer
        if cache is not None:
            cache.begin(tokens, positions)
        if positions is None:
            start = cache.length if cache else 0
            positions = default_positions(tokens, document_ids, start)

        noise = None
        if self.training and self.neftune_alpha:
            noise = partial(
                add_neftune_noise,
                alpha=self.neftune_alpha,
                targets=targets,
                document_ids=document_ids,
            )
        x = self.embed_tokens(tokens, positions, noise)  # (B, T, C)
        cos_sin = self.cos_sin(positions, cache, x.dtype, document_ids)
        # further inputs of each block, and the documents as it sees them
        extras = self.block_extras(tokens, x)
        x = x if self.streams is None else self.streams.expand(x)
        block_documents = self.layer_documents(
            self.prepare_documents(documents, tokens), tokens
        )

        # x: (B, T, C), or (B, T, S C) with S residual streams
        for index, (block, rotary) in enumerate(
            zip(self.blocks, self.rotary_indices, strict=True)
        ):
            layer_cache = cache.layers[index] if cache else None
            rotation = cos_sin[rotary] if rotary is not None else None
            x = block(x, rotation, block_documents[index], layer_cache, *extras[index])
        if cache is not None:
            cache.end()

        # logits are the largest tensor of a pass: compute them only where they are needed
        if logits_to_keep is not None:
            x = x.gather(1, logits_to_keep[..., None].expand(-1, -1, x.size(2)))
        # The scale of the logits is applied to the head's input, which is much smaller.
        return scaled(self.final_norm(x), self.config.logit_scale)

    def _cross_entropy(
        self, x: Tensor, targets: Tensor, target_indices: Tensor | None, reduction: str
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss of the head's input x (B, T, C) as `forward` does: of each target, or
        the sum and the count."""
        if reduction == "none":
            return token_cross_entropy(
                x,
                self.lm_head,
                targets,
                softcap=self.config.logit_softcap,
                target_indices=target_indices,
                compiled=self.compiled_loss,
                temperature=self.loss_temperature,
            )
        return summed_cross_entropy(
            x,
            self.lm_head,
            targets,
            softcap=self.config.logit_softcap,
            smoothing=self.label_smoothing if self.training else 0.0,
            target_indices=target_indices,
            compiled=self.compiled_loss,
        )

    def final_norm(self, x: Tensor) -> Tensor:
        """Return what the head reads, (B, T, C), of the last block's output."""
        if self.streams is not None:
            x = self.streams.reduce(x)
        return apply_norm(self.norm, x)

    def prepare_documents(
        self, documents: PackedSequences | None, tokens: Tensor
    ) -> PackedSequences | None:
        """Return the documents of tokens (B, T) to pass to the blocks; overridden for compiled
        blocks."""
        return documents

    def layer_documents(
        self, documents: PackedSequences | None, tokens: Tensor
    ) -> list[PackedSequences | None]:
        """Return the documents of each block: those of tokens (B, T), or their chunks for a block
        with chunked attention."""
        windows = [layer.window for layer in self.config.layers]
        # a chunk that holds the whole row hides nothing
        chunks = set()
        for window in windows:
            if isinstance(window, Chunk) and window.size < tokens.size(1):
                chunks.add(window)
        if not chunks:
            return [documents] * len(windows)
        # without documents, each row is one, which is divided into chunks
        whole = documents
        if whole is None:
            batch, length = tokens.shape
            whole = PackedSequences.rows(batch, length, tokens.device)
        chunked = {chunk: whole.chunked(chunk.size) for chunk in chunks}
        return [chunked.get(window, documents) for window in windows]

    def block_extras(self, tokens: Tensor, x: Tensor) -> list[tuple[BlockExtra, ...]]:
        """Return the further argument of each block for tokens (B, T) with embedding x; an empty
        tuple if it has none."""
        shares = any(layer.kv_sharing != "none" for layer in self.config.layers)
        if self.per_layer is None and not shares:
            return [()] * len(self.blocks)
        if self.per_layer is None:
            inputs = [None] * len(self.blocks)
        else:
            inputs = self.per_layer(tokens, x).unbind()
        # one object for all blocks of this pass: early blocks fill it, later ones read it
        shared = SharedKeys()
        return [(BlockExtra(token_input, shared),) for token_input in inputs]

    def embed_tokens(
        self,
        tokens: Tensor,
        positions: Tensor,
        noise: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the input of the residual stream, (B, T, C), for tokens (B, T) at positions
        (B or 1, T).

        noise: adds noise to the embeddings (B, T, C), at `Config.noise_after`. The scale is rounded
        to the weights' dtype, as in Gemma's training.
        """

        def with_noise(x: Tensor, place: str) -> Tensor:
            if noise is None or place != self.config.noise_after:
                return x
            return noise(x)

        x = with_noise(self.embed(tokens), "lookup")
        if self.config.embed_scale != 1:
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype)
        x = with_noise(x, "scale")
        positions = positions + self.config.position_offset
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if self.config.sinusoidal_positions:
            sines = sinusoids(positions, x.size(-1), x.dtype)
            if self.config.zero_position is not None:
                is_zero = positions == self.config.zero_position
                sines = sines.masked_fill(is_zero[..., None], 0.0)
            x = x + sines
        return with_noise(apply_norm(self.embed_norm, x), "norm")

    def cos_sin(
        self,
        positions: Tensor,
        cache: KVCache | None,
        dtype: torch.dtype,
        document_ids: Tensor | None = None,
    ) -> list[CosSin]:
        """Return cos and sin for each distinct RopeConfig at positions (B, T).

        The length of each document, without documents that of each row, selects the factors of the
        types that depend on it; in generation the planned length.
        """
        # 0: not read by any rope
        lengths: Tensor | int = 0
        if self.ropes_read_length:
            if cache:
                lengths = cache.max_length
            else:
                lengths = text_lengths(positions, document_ids)
        return [rotary(positions, lengths, dtype) for rotary in self.rotaries]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the context, modules are created in this dtype."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a block of code, and then back into the mode it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def add_neftune_noise(
    x: Tensor, alpha: float, targets: Tensor | None, document_ids: Tensor | None
) -> Tensor:
    """Add NEFTune noise (arXiv 2310.05914) to embeddings (B, T, C): uniform within alpha / sqrt(L
    C).

    L is the length of the sample: the tokens of its document in a packed row, otherwise the tokens
    up to the row's last target, since later ones are padding or do not affect the loss. So the
    noise does not depend on the length of other rows. targets and document_ids are (B, T);
    documents need no targets.
    """
    if document_ids is None:
        assert targets is not None  # a pass that trains has them
        index = torch.arange(1, x.size(1) + 1, device=x.device)
        lengths = torch.where(targets != IGNORED, index, 1).amax(1, keepdim=True)  # (B, 1)
    else:
        lengths = document_lengths(document_ids)
    # (B, 1), or (B, T) with documents
    bound = alpha / (lengths * x.size(2)).sqrt()
    return x + ((torch.rand_like(x, dtype=torch.float32) * 2 - 1) * bound[..., None]).to(
        x.dtype
    )


def text_lengths(positions: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return the length of the document of each token, (B, 1, T, 1); without documents that of each
    row, (B, 1, 1, 1).

    positions: (B, T), counted from 0 in each row without documents; those of padding are below the
    row's length.
    """
    if document_ids is None:
        return (positions.amax(1) + 1)[:, None, None, None]
    return document_lengths(document_ids)[:, None, :, None]


def default_positions(tokens: Tensor, document_ids: Tensor | None, offset: int) -> Tensor:
    """Return positions `offset`, `offset` + 1, ..., restarting at 0 with each document; (1, T), or
    (B, T) with documents."""
    index = torch.arange(offset, offset + tokens.size(1), device=tokens.device)[None]
    if document_ids is None:
        return index
    return index - document_starts(document_ids)
