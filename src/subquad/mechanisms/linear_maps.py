"""The feature maps of `linear`, as it computes with them: what it does to q and k before `ops` applies a map.

Most do nothing: `ops` has the map. cosformer needs the position and hedgehog has parameters, so they prepare q and k,
twice as wide, and leave relu to `ops`. The kernels take up to 256 features of any map, and apply elu+1, relu, exp and
identity themselves. Steps are deferred (ops/linear/deferred.py) for these four only.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.ops.feature_maps import feature_map
from subquad.ops.lengths import readable, symbolic
from subquad.ops.precision import wide, wide_type
from subquad.ops.random_features import project


class Given(nn.Module):
    """A map of `ops`, which takes q and k as they are."""

    positions: ClassVar[bool] = False  # whether a weight depends on where its tokens stand

    def __init__(self, map: str | Callable[[Tensor], Tensor], heads: int, width: int, length: int | None):
        super().__init__()
        self.map = map  # what `ops` applies to what is prepared

    def queries(self, q: Tensor, position: Tensor | None = None) -> Tensor:
        """What is prepared of q [B, T, H, K], whose rows start at `position` [B] (0 if None)."""
        return q

    def keys(self, k: Tensor, position: Tensor | None = None) -> Tensor:
        return k

    def check(self, length: int, lengths: Tensor | None = None, position: Tensor | None = None) -> None:
        """Refuse prompts of `length` tokens, or `lengths` [B] of them, behind `position` [B] that go too far."""

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q)·φ(k) by the definition, [B, H, T, S]."""
        phi = feature_map(self.map).apply
        return torch.einsum("bthm,bshm->bhts", wide(phi(q)), wide(phi(k)))


class Taylor(Given):
    """1 + s + s²/2 with s = q·k/√K."""

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        s = torch.einsum("bthk,bshk->bhts", wide(q), wide(k)) / math.sqrt(q.shape[-1])
        return 1 + s + s * s / 2


class Cosformer(Given):
    """relu(qᵢ)·relu(kⱼ) cos(π/2·(i - j)/length) = Σ of relu(qᵢ cos θᵢ) relu(kⱼ cos θⱼ) and the same with sines.

    θ = π/2·i/length. Sines and cosines of positions below `length` are not negative, so relu may come after them: it is
    applied by the kernels, and no feature is negative. Further positions are refused.
    """

    positions = True

    def __init__(self, map: str | Callable[[Tensor], Tensor], heads: int, width: int, length: int | None):
        super().__init__("relu", heads, width, length)
        self.length = length or 0

    def queries(self, q: Tensor, position: Tensor | None = None) -> Tensor:
        at = ranks.positions(q.shape[1], q.device)
        at = at if position is None else position[:, None] + at
        angle = at.to(wide_type(q))[..., None, None] * (math.pi / 2 / self.length)  # [T, 1, 1] or [B, T, 1, 1]
        return torch.cat((wide(q) * angle.cos(), wide(q) * angle.sin()), dim=-1).to(q.dtype)

    def keys(self, k: Tensor, position: Tensor | None = None) -> Tensor:
        return self.queries(k, position)

    def check(self, length: int, lengths: Tensor | None = None, position: Tensor | None = None) -> None:
        if symbolic(length):
            return
        size, reached = length, ranks.whole_length(length)
        if position is not None and readable(position):
            reached = max(reached, int((position + ranks.tokens_read(size, lengths)).max()))
        if reached > self.length:
            raise ValueError(f"x ends at position {reached}: this module was built with length={self.length}")

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        i, j = (torch.arange(t.shape[1], device=t.device, dtype=wide_type(t)) for t in (q, k))
        weights = torch.cos(math.pi / 2 * (i[:, None] - j) / self.length)
        return weights * torch.einsum("bthk,bshk->bhts", wide(q).clamp(min=0), wide(k).clamp(min=0))


class Hedgehog(Given):
    """(softmax(Wx), softmax(-Wx)) along the features, with matrices W for queries and for keys, the identity at first.

    These are the exponentials e^±Wx, each half over its sum. Nothing of another token is in them. `ops` takes them as
    they are; relu, which does not change them, tells it that none is negative.
    """

    def __init__(self, map: str | Callable[[Tensor], Tensor], heads: int, width: int, length: int | None):
        super().__init__("relu", heads, width, length)
        self.query, self.key = (nn.Parameter(torch.eye(width).repeat(heads, 1, 1)) for _ in range(2))  # [H, M, K]

    def queries(self, q: Tensor, position: Tensor | None = None) -> Tensor:
        return _softmax_features(q, self.query)

    def keys(self, k: Tensor, position: Tensor | None = None) -> Tensor:
        return _softmax_features(k, self.key)

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        parts = []
        for x, w in ((q, self.query), (k, self.key)):
            u = (wide(w) @ wide(x).movedim(1, 3)).mT  # [B, H, T, M]
            parts.append([(t - t.logsumexp(-1, keepdim=True)).exp() for t in (u, -u)])
        return parts[0][0] @ parts[1][0].mT + parts[0][1] @ parts[1][1].mT


def _softmax_features(x: Tensor, w: Tensor) -> Tensor:
    """[B, T, H, K], [H, M, K] -> [B, T, H, 2M]; the exponents are not rounded to 16 bits."""
    u = project(x, w)
    return torch.cat((u.softmax(-1), (-u).softmax(-1)), dim=-1).to(x.dtype)


OWN: dict[str, type[Given]] = {"cosformer": Cosformer, "hedgehog": Hedgehog, "taylor": Taylor}
