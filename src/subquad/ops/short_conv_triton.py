"""The kernel of `short_conv_step`: reads a few places of a ring, and writes the token into its own.

Legend: B rows, D channels, L places of the ring, J weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, blocks_of, launch, tile_of

WIDE = 1024  # channels of a program


@triton.jit
def shift(
    x, w, back, ring, position, bias, y, xb, rb, rl,
    D: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, J: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One row: y = w₀x + Σ wⱼ ring[position - backⱼ]; the place that x takes is read before it is overwritten."""
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = tl.load(position + b)
    ring += b * rb
    new = tl.load(x + b * xb + d, mask=d < D, other=0.0)
    acc = new.to(tl.float32) * tl.load(w + d, mask=d < D, other=0.0).to(tl.float32)
    for j in tl.static_range(1, J):
        place = (at - tl.load(back + j - 1)) % L
        place = tl.where(place < 0, place + L, place)  # Triton's remainder has the sign of what is divided
        old = tl.load(ring + place * rl + d, mask=d < D, other=0.0).to(tl.float32)
        acc += old * tl.load(w + j * D + d, mask=d < D, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y + b * D + d, acc.to(y.dtype.element_ty), mask=d < D)
    tl.store(ring + (at % L) * rl + d, new.to(ring.dtype.element_ty), mask=d < D)


def step(x: Tensor, weight: Tensor, back: Tensor, ring: Tensor, position: Tensor, bias: Tensor | None) -> Tensor:
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = min(WIDE, tile_of(width))
    constants = {"D": width, "BD": block, "L": ring.shape[1], "J": len(weight), "BIAS": bias is not None}
    numbers = (x.stride(0), *ring.stride()[:2])
    plan = Plan((rows, blocks_of(width, block)), numbers, constants, max(1, block // 256))
    launch(shift, (x, weight, back, ring, position, weight if bias is None else bias, y), plan)
    return y
