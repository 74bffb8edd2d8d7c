"""The projections of multi-head attention."""

import torch.nn.functional as F
from torch import Tensor, nn


class Heads(nn.Module):
    """x -> q, k, v for each head, and back."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)  # one product instead of three
        self.out = nn.Linear(dim, dim)

    def split(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q from x, k and v from the context (x itself if there is none): [B, T, D] -> 3 x [B, T, H, D/H]."""
        if context is not None:
            return self.queries(x), *self.keys(context)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, dim=-1))
        return q, k, v

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, D] -> q [B, T, H, D/H]"""
        q = F.linear(x, self.qkv.weight[: self.dim], self.qkv.bias[: self.dim])
        return q.unflatten(-1, (self.heads, -1))

    def keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> k and v [B, S, H, D/H]"""
        both = F.linear(context, self.qkv.weight[self.dim :], self.qkv.bias[self.dim :])
        k, v = (t.unflatten(-1, (self.heads, -1)) for t in both.chunk(2, dim=-1))
        return k, v

    def merge(self, o: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]"""
        return self.out(o.flatten(-2))
