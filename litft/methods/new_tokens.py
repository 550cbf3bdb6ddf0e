"""New tokens: rows of their own beside the embedding and the head, which stay as they are.

The ids may lie behind the base's vocabulary or in the padding at its end; the row of an id takes the place of the base's.
PEFT calls the same trainable tokens.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.methods.mixins import Mixin
from litft.model.transformer import GPT

# B batch, T tokens, C channels, V vocabulary, N new tokens

ROWS = ("embed.token_rows", "lm_head.token_rows")  # the second only where the head is not tied


class TokenRows(Mixin):
    """A module with `token_rows` (N, C), each of which begins at the mean of the rows that its text had."""

    reads_weight = True

    def reset_parameters(self) -> None:
        """The rows of the texts' `pieces`, in fp32."""
        super().reset_parameters()
        self.token_rows.copy_(first_rows(self.weight, self.pieces))


class TokenEmbedding(TokenRows):
    """An embedding that takes the rows of some ids from `token_rows` (N, C)."""

    def add_rows(self, ids: Tensor, pieces: list[list[int]], rows: nn.Parameter) -> None:
        """Register the rows of `ids` (N,)."""
        self.token_rows, self.pieces = rows, pieces
        row_of = torch.full((max(self.num_embeddings, int(ids.max()) + 1),), -1)
        row_of[ids] = torch.arange(len(ids))
        self.register_buffer("row_of", row_of if rows.is_meta else row_of.to(rows.device), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        y = super().forward(tokens.clamp(max=self.num_embeddings - 1))
        if not self.on:
            return y
        row = self.row_of[tokens]  # (B, T), -1 where the base's own is used
        return torch.where((row >= 0)[..., None], F.embedding(row.clamp(min=0), self.token_rows).to(y.dtype), y)

    def remove(self) -> None:
        """Undo `add_rows`."""
        del self.token_rows, self.pieces, self.row_of


class TokenHead(TokenRows):
    """A head whose logits of some ids come from `token_rows` (N, C); ids beyond its own rows have no bias."""

    def add_rows(self, ids: Tensor, pieces: list[list[int]], rows: nn.Parameter) -> None:
        """Register the rows of `ids` (N,)."""
        self.token_rows, self.pieces = rows, pieces
        self.register_buffer("token_ids", ids if rows.is_meta else ids.to(rows.device), persistent=False)
        self.beyond = max(0, int(ids.max()) + 1 - self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)  # (..., V)
        if not self.on:
            return logits
        new = F.linear(x, self.token_rows.to(x.dtype))
        if self.bias is not None:
            new = new + F.pad(self.bias, (0, self.beyond))[self.token_ids].to(x.dtype)
        return F.pad(logits, (0, self.beyond)).index_copy(-1, self.token_ids, new.to(logits.dtype))

    def remove(self) -> None:
        """Undo `add_rows`."""
        del self.token_rows, self.pieces, self.token_ids, self.beyond


def first_rows(table: Tensor, pieces: list[list[int]]) -> Tensor:
    """Where the rows begin: at the mean of the rows that the token's text had before it was a token, in fp32.

    A text of no known piece begins at the mean of all rows (Hewitt 2021, "Initializing New Word Embeddings").
    """
    everything = table.float().mean(0)
    return torch.stack([table[piece].float().mean(0) if piece else everything for piece in pieces])


def untrained(table: Tensor, ids: Iterable[int]) -> list[int]:
    """Those of `ids` whose rows look as if no text ever held them: next to nothing, or the same as another token's."""
    lengths = torch.linalg.vector_norm(table, dim=1, dtype=torch.float32)  # (V,), without a copy of the table
    least = 0.01 * lengths.median()

    def has_twin(token: int) -> bool:
        return (table[lengths == lengths[token]] == table[token]).all(1).sum() > 1

    return sorted(token for token in ids if lengths[token] < least or has_twin(token))


def add_tokens(model: GPT, ids: list[int], pieces: list[list[int]]) -> None:
    """Give the model rows for `ids`; `pieces`: the ids of each one's text before it was a token."""
    at, tied = torch.tensor(ids), model.config.tied
    table = model.embed.weight
    rows = [nn.Parameter(table.new_empty(len(ids), table.size(1), dtype=torch.float32)) for _ in range(1 if tied else 2)]
    TokenEmbedding.mix_over(model.embed).add_rows(at, pieces, rows[0])
    TokenHead.mix_over(model.lm_head).add_rows(at, pieces, rows[-1])
    model.set_vocabulary(max(model.config.vocab_size, max(ids) + 1))


def grown(table: Tensor, ids: list[int], rows: Tensor | None) -> Tensor:
    """A table (V, ...) that has a row for each of `ids`, these rows in their places; None: as they are, and zeros behind."""
    longer = max(0, max(ids) + 1 - table.size(0))
    out = torch.cat((table.float(), table.new_zeros((longer, *table.shape[1:]), dtype=torch.float32)))
    if rows is not None:
        out[torch.tensor(ids)] = rows.float()
    return out
