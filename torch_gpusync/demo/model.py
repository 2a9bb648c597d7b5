"""A byte-level decoder-only transformer, whole or one rank's share of it.

With ``sync=None`` this is the plain model. With a group, each rank holds the weights that ``split.shard``
gives it, and its activations are put together by ops inside the graph: ``copy_to_ranks`` where ranks begin
to compute different things from one input (their input gradients are summed), ``reduce_from_ranks`` where
their partial results are summed. Between the two, no rank needs another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from torch_gpusync.nn.functional import copy_to_ranks, reduce_from_ranks

from .config import VOCABULARY, Config
from .split import share

if TYPE_CHECKING:
    from torch_gpusync import SyncGroup


def _copy(x: torch.Tensor, sync: SyncGroup | None) -> torch.Tensor:
    return x if sync is None else copy_to_ranks(x, sync)


def _reduce(x: torch.Tensor, sync: SyncGroup | None) -> torch.Tensor:
    return x if sync is None else reduce_from_ranks(x, sync)


class Attention(nn.Module):
    """Causal attention over this rank's heads. In and out: [batch, context, width], equal on all ranks."""

    def __init__(self, config: Config, sync: SyncGroup | None) -> None:
        super().__init__()
        self.sync = sync
        self.head_size = config.head_size
        local = config.width // (1 if sync is None else sync.world_size)
        # Without biases: a key's has a gradient of exactly zero, so that only rounding noise would train it.
        self.qkv = nn.Linear(config.width, 3 * local, bias=False)
        self.out = nn.Linear(local, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, _ = x.shape
        qkv = self.qkv(_copy(x, self.sync)).view(batch, context, 3, -1, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return _reduce(self.out(mixed.transpose(1, 2).reshape(batch, context, -1)), self.sync)


class MLP(nn.Module):
    """Two matrices with a GELU between. In and out: [batch, context, width], equal on all ranks."""

    def __init__(self, config: Config, sync: SyncGroup | None) -> None:
        super().__init__()
        self.sync = sync
        local = 4 * config.width // (1 if sync is None else sync.world_size)
        self.up = nn.Linear(config.width, local)
        self.down = nn.Linear(local, config.width, bias=False)
        # Not part of ``down``: added after the sum, or it would count once per rank.
        self.bias = nn.Parameter(torch.zeros(config.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _reduce(self.down(F.gelu(self.up(_copy(x, self.sync)))), self.sync) + self.bias


class Block(nn.Module):
    """One pre-norm layer. In and out: [batch, context, width], equal on all ranks."""

    def __init__(self, config: Config, sync: SyncGroup | None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, sync)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config, sync)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """``forward(tokens, targets) -> (loss, logits)``.

    tokens, targets: int64 [batch, context]. loss: fp32 scalar, the mean cross-entropy in nats, the same on
    all ranks. logits: fp32 [batch, context, share of the vocabulary], detached.
    """

    def __init__(self, config: Config, sync: SyncGroup | None = None) -> None:
        super().__init__()
        self.sync = sync
        rank, ranks = (0, 1) if sync is None else (sync.rank, sync.world_size)
        first, stop = share(VOCABULARY, rank, ranks)
        self.local = stop - first
        # A tensor, not a constant of the graph: ranks with equal shares then generate the same code,
        # compiled once.
        self.first: torch.Tensor
        self.register_buffer("first", torch.tensor(first), persistent=False)
        self.embedding = nn.Embedding(self.local, config.width)
        self.position = nn.Parameter(torch.zeros(config.context, config.width))
        self.blocks = nn.ModuleList(Block(config, sync) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, self.local, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sync is not None:
            # All ranks begin together: the wait for a peer that is still in its last step's optimiser is
            # here, not in the first reduction.
            self.sync.barrier()
        x = self._embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(_copy(self.norm(x), self.sync))
        return self._loss(logits, targets), logits.detach()

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.sync is None:
            return self.embedding(tokens)  # type: ignore[no-any-return]
        index, mine = self._mine(tokens)
        return _reduce(self.embedding(index) * mine.unsqueeze(-1), self.sync)

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.sync is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        # Each rank has the logits of some bytes only. Subtracting the greatest of all keeps exp() finite;
        # it cancels in the result, so that no gradient needs to flow through it.
        largest = self.sync.all_reduce(logits.detach().amax(-1), "max")
        shifted = logits - largest.unsqueeze(-1)
        index, mine = self._mine(targets)
        target = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1) * mine
        total, picked = _reduce(torch.stack([shifted.exp().sum(-1), target]), self.sync).unbind(0)
        return (total.log() - picked).mean()

    def _mine(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The values' rows in this rank's share of the vocabulary, and which are in it (others get any)."""
        index = values - self.first
        mine = (index >= 0) & (index < self.local)
        return index.clamp(0, self.local - 1), mine
