"""Numbers that follow from a seed, a position and a place, so that they are the same wherever they are drawn."""

import torch
from torch import Tensor

MASK = (1 << 32) - 1
AT_ONCE = 1 << 22  # numbers drawn at once for dropout


def uniform(seeds: Tensor, position: Tensor, count: int) -> Tensor:
    """Independent numbers in (0, 1), float32 [B, count]: in steps of 2^-32 if small, at most 1 - 2^-24."""
    stream = _mix(_mix(_mix((seeds >> 32) & MASK) ^ (seeds & MASK)) ^ (position & MASK))  # [B]
    candidate = torch.arange(1, count + 1, device=seeds.device) * 0x1E3779B1
    bits = _mix((stream[:, None] + candidate) & MASK)
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def dropped(x: Tensor, seeds: Tensor, positions: Tensor, share: float) -> Tensor:
    """Dropout of x [..., D]: what is 0 follows from the seed and position [R] of each row, and from the column."""
    width = x.shape[-1]
    size = max(1, AT_ONCE // width)
    kept = [uniform(s, p, width) >= share for s, p in zip(seeds.split(size), positions.split(size), strict=True)]
    return x.masked_fill(~torch.cat(kept).view(x.shape), 0) * (1 / (1 - share))


def _mix(x: Tensor) -> Tensor:
    """A bijective hash of 32 bits in int64 (multipliers below 2^31, so that no product overflows)."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)
