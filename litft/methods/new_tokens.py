"""New tokens: trained rows in addition to the embedding and the head, which stay frozen.

An id may be beyond the base's vocabulary or in the padding at its end; its trained row replaces the
base's. PEFT calls this trainable tokens.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.methods.mixins import Mixin
from litft.model.transformer import GPT

# B batch, T tokens, C channels, V vocabulary, N new tokens

# the second exists only if the head is not tied
TOKEN_ROW_PARAMETERS = ("embed.token_rows", "lm_head.token_rows")


class TokenRows(Mixin):
    """A module with trained `token_rows` (N, C), initialized as in `initial_rows`."""

    reads_weight = True
    weight: nn.Parameter  # (V, C), of the embedding or the head
    token_rows: nn.Parameter
    # the ids that the text of each token was encoded as before
    pieces: list[list[int]]

    def reset_parameters(self) -> None:
        """Initialize the rows from the weight and `pieces`, in fp32."""
        super().reset_parameters()
        self.token_rows.copy_(initial_rows(self.weight, self.pieces))


class TokenEmbedding(TokenRows):
    """An embedding that takes the rows of new tokens from `token_rows` (N, C)."""

    num_embeddings: int  # of the nn.Embedding
    row_of: Tensor  # see `add_rows`

    def add_rows(self, ids: Tensor, pieces: list[list[int]], rows: nn.Parameter) -> None:
        """Register `rows` (N, C) for `ids` (N,); pieces: as in `add_tokens`."""
        self.token_rows = rows
        self.pieces = pieces
        # (V,), the row of each id; -1: the base's row is used
        row_of = torch.full((max(self.num_embeddings, int(ids.max()) + 1),), -1)
        row_of[ids] = torch.arange(len(ids))
        if not rows.is_meta:
            row_of = row_of.to(rows.device)
        self.register_buffer("row_of", row_of, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (B, T, C) of tokens (B, T), whose ids may be beyond the table."""
        # ids beyond the table look up any row, which is replaced below
        y = super().forward(tokens.clamp(max=self.num_embeddings - 1))
        if not self.enabled:
            return y
        # (B, T), -1 for tokens that use the base's row
        row = self.row_of[tokens]
        return torch.where(
            (row >= 0)[..., None],
            F.embedding(row.clamp(min=0), self.token_rows).to(y.dtype),
            y,
        )

    def remove(self) -> None:
        """Undo `add_rows`."""
        del self.token_rows, self.pieces, self.row_of


class TokenHead(TokenRows):
    """A head that computes the logits of new tokens from `token_rows` (N, C).

    Ids beyond its weight have no bias.
    """

    # of the Linear
    out_features: int
    bias: nn.Parameter | None
    token_ids: Tensor  # (N,)

    def add_rows(self, ids: Tensor, pieces: list[list[int]], rows: nn.Parameter) -> None:
        """Register `rows` (N, C) for `ids` (N,); pieces: as in `add_tokens`."""
        self.token_rows = rows
        self.pieces = pieces
        token_ids = ids if rows.is_meta else ids.to(rows.device)
        self.register_buffer("token_ids", token_ids, persistent=False)
        # ids beyond the head's outputs; the other new ids are in the padding of its vocabulary
        self.num_beyond = max(0, int(ids.max()) + 1 - self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (..., V) of x (..., C), where V includes the new tokens if the rows are
        enabled."""
        logits = super().forward(x)  # (..., V)
        if not self.enabled:
            return logits
        new_logits = F.linear(x, self.token_rows.to(x.dtype))  # (..., N)
        # new tokens within the padding keep the base's bias
        if self.bias is not None:
            bias = F.pad(self.bias, (0, self.num_beyond))[self.token_ids]
            new_logits = new_logits + bias.to(x.dtype)
        # index_copy: the base's logits of these ids are replaced
        return F.pad(logits, (0, self.num_beyond)).index_copy(
            -1, self.token_ids, new_logits.to(logits.dtype)
        )

    def remove(self) -> None:
        """Undo `add_rows`."""
        del self.token_rows, self.pieces, self.token_ids, self.num_beyond


def initial_rows(table: Tensor, pieces: list[list[int]]) -> Tensor:
    """Return initial rows (N, C) in fp32: the mean of the rows of `table` (V, C) that `pieces`
    lists for each token.

    A token without pieces gets the mean of all rows (Hewitt 2021, "Initializing New Word
    Embeddings").
    """
    mean_row = table.float().mean(0)
    rows = []
    for ids in pieces:
        rows.append(table[ids].float().mean(0) if ids else mean_row)
    return torch.stack(rows)


def untrained_ids(table: Tensor, ids: Iterable[int]) -> list[int]:
    """Return those of `ids` whose rows of `table` (V, C) look untrained: almost zero, or equal to
    another token's row."""
    # (V,), without a copy of the table
    row_norms = torch.linalg.vector_norm(table, dim=1, dtype=torch.float32)
    min_norm = 0.01 * row_norms.median()

    def has_duplicate(token: int) -> bool:
        # equal rows have equal norms, so only few rows are compared in full
        is_equal = (table[row_norms == row_norms[token]] == table[token]).all(1)
        return bool(is_equal.sum() > 1)

    untrained = []
    for token in ids:
        if row_norms[token] < min_norm or has_duplicate(token):
            untrained.append(token)
    return sorted(untrained)


def add_tokens(
    model: GPT, ids: list[int], pieces: list[list[int]], untied: bool = False
) -> None:
    """Add trained rows for the tokens `ids`. pieces: the ids that each token's text was encoded as
    before.

    untied: give a head that is tied to the embedding rows of its own.
    """
    id_tensor = torch.tensor(ids)
    embed_rows = _empty_rows(model, len(ids))
    # a tied head shares the embedding's rows
    if model.config.tied and not untied:
        head_rows = embed_rows
    else:
        head_rows = _empty_rows(model, len(ids))
    TokenEmbedding.convert_module(model.embed).add_rows(id_tensor, pieces, embed_rows)
    TokenHead.convert_module(model.lm_head).add_rows(id_tensor, pieces, head_rows)
    model.set_vocabulary(max(model.config.vocab_size, max(ids) + 1))


def _empty_rows(model: GPT, count: int) -> nn.Parameter:
    """Return a parameter (count, C) in fp32 on the device of the embedding."""
    table = model.embed.weight
    return nn.Parameter(table.new_empty(count, table.size(1), dtype=torch.float32))


def extend_table(table: Tensor, ids: list[int], rows: Tensor | None) -> Tensor:
    """Return `table` (V, ...) in fp32, extended with zero rows to contain all `ids`, and with
    `rows` (N, ...) written there.

    rows: None leaves the values unchanged.
    """
    num_new = max(0, max(ids) + 1 - table.size(0))
    out = torch.cat(
        (table.float(), table.new_zeros((num_new, *table.shape[1:]), dtype=torch.float32))
    )
    if rows is not None:
        out[torch.tensor(ids)] = rows.float()
    return out
