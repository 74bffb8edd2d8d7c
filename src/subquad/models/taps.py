"""A short causal convolution before a mixer: a weighted sum of each token and a few earlier ones, per channel.

Paper       such as Fu et al. 2023 (H3), arXiv:2212.14052, §3.2; taps need not be adjacent, such as the pixel above
Definition  yₜ = w₀ ⊙ xₜ + Σⱼ wⱼ ⊙ xₜ₋ₙⱼ with x = 0 before the first token
Cost        O(T·D·J); a state of max(n)·D numbers
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Recent(NamedTuple):
    """The last inputs, in a ring: the token at position p is in place p modulo the ring's size."""

    ring: Tensor  # [B, L, D], zeros before the first token
    position: Tensor  # [B]


class Taps(nn.Module):
    """x [B, T, D] -> y [B, T, D]; `taps` are distances in tokens, looking back."""

    def __init__(self, dim: int, taps: Sequence[int]):
        super().__init__()
        self.taps, self.reach = tuple(taps), max(taps)
        self.back: Tensor
        # a buffer, because a captured step cannot copy a list
        self.register_buffer("back", torch.tensor(self.taps), persistent=False)
        self.weight = nn.Parameter(torch.cat((torch.ones(1, dim), 0.3 * torch.randn(len(self.taps), dim))))

    def forward(self, x: Tensor) -> Tensor:
        return self._sum(nn.functional.pad(x, (0, 0, self.reach, 0)), x.shape[1])

    def init_state(self, batch: int) -> Recent:
        ring = self.weight.new_zeros(batch, self.reach, self.weight.shape[1])
        return Recent(ring, torch.zeros(batch, dtype=torch.int64, device=ring.device))

    def check(self, state: Recent, batch: int) -> None:
        """Refuse a ring for other taps or another batch."""
        wanted = (batch, self.reach, self.weight.shape[1])
        if tuple(state.ring.shape) != wanted:
            raise ValueError(f"state.recent.ring is {list(state.ring.shape)}: taps={self.taps} keep {list(wanted)}")

    def prefill(self, x: Tensor, lengths: Tensor | None, state: Recent | None) -> tuple[Tensor, Recent]:
        """Read many tokens after those in the state: (y, the state after the first `lengths` of them)."""
        ring, position = self.init_state(x.shape[0]) if state is None else state
        back = torch.arange(self.reach, device=x.device)
        oldest_first = ring.take_along_dim(((position[:, None] + back) % self.reach)[..., None], 1)
        seen = torch.cat((oldest_first.to(x.dtype), x), dim=1)  # [B, L + T, D]
        size = position.new_full(position.shape, x.shape[1]) if lengths is None else lengths
        places = (position + size)[:, None] + back  # modulo L, the places of the last L tokens
        last = seen.take_along_dim((size[:, None] + back)[..., None], 1).to(ring.dtype)
        after = torch.empty_like(ring).scatter_(1, _wide(places % self.reach, ring), last)
        return self._sum(seen, x.shape[1]), Recent(after, position + size)

    def step(self, x: Tensor, state: Recent, inplace: bool = False) -> tuple[Tensor, Recent]:
        """One token, x [B, D] -> (y [B, D], the new state)."""
        ring, position = state
        places = (position[:, None] - self.back) % self.reach
        before = ring.take_along_dim(places[..., None], 1).to(x.dtype)  # [B, J, D]
        weight = self.weight.to(x.dtype)
        y = weight[0] * x + (weight[1:] * before).sum(1)
        place = _wide((position % self.reach)[:, None], ring)
        new = x[:, None].to(ring.dtype)
        if inplace:
            return y, Recent(ring.scatter_(1, place, new), position.add_(1))
        return y, Recent(ring.scatter(1, place, new), position + 1)

    def _sum(self, seen: Tensor, size: int) -> Tensor:
        """The convolution at the last T tokens of `seen` [B, L + T, D]."""
        weight = self.weight.to(seen.dtype)
        y = weight[0] * seen[:, self.reach :]
        for tap, scale in zip(self.taps, weight[1:], strict=True):
            y = y + scale * seen[:, self.reach - tap : self.reach - tap + size]
        return y

    def extra_repr(self) -> str:
        return f"taps={self.taps}"


def _wide(at: Tensor, like: Tensor) -> Tensor:
    return at[..., None].expand(-1, -1, like.shape[-1])
