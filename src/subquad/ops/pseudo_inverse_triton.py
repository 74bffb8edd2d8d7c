"""The kernels of `pseudo_inverse`: a program iterates on one matrix, which stays with it.

With X = AZ, P = X (7 - X) and Q = X (15 - P), a round is Z ← ¼ (13 Z - Z Q). Products are almost as exact as float32's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, launch, tile_of


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3", out_dtype=tl.float32)


@triton.jit
def _tile(p, M: tl.constexpr, BM: tl.constexpr):
    i = tl.arange(0, BM)
    return p + i[:, None] * M + i[None, :], (i < M)[:, None] & (i < M)[None, :]


@triton.jit
def iterate(a, z, last, steps, B, ROUNDS, M: tl.constexpr, BM: tl.constexpr):
    """The last Z, and the Z before each round."""
    n = tl.program_id(0).to(tl.int64)
    p, inside = _tile(a + n * M * M, M, BM)
    ax = tl.load(p, mask=inside, other=0.0)
    p, inside = _tile(z + n * M * M, M, BM)
    zx = tl.load(p, mask=inside, other=0.0)
    for i in range(ROUNDS):
        p, inside = _tile(steps + (i * B + n) * M * M, M, BM)
        tl.store(p, zx, mask=inside)
        x = _dot(ax, zx)
        y = 7.0 * x - _dot(x, x)
        y = 15.0 * x - _dot(x, y)
        zx = 3.25 * zx - 0.25 * _dot(zx, y)
    p, inside = _tile(last + n * M * M, M, BM)
    tl.store(p, zx, mask=inside)


@triton.jit
def iterate_back(grad, a, steps, da, dz, B, ROUNDS, M: tl.constexpr, BM: tl.constexpr):
    """The gradients of A and of the first Z."""
    n = tl.program_id(0).to(tl.int64)
    p, inside = _tile(a + n * M * M, M, BM)
    ax = tl.load(p, mask=inside, other=0.0)
    p, inside = _tile(grad + n * M * M, M, BM)
    g = tl.load(p, mask=inside, other=0.0)
    ga = tl.zeros([BM, BM], tl.float32)
    for c in range(ROUNDS):
        p, inside = _tile(steps + ((ROUNDS - 1 - c) * B + n) * M * M, M, BM)
        zx = tl.load(p, mask=inside, other=0.0)
        x = _dot(ax, zx)
        y = 7.0 * x - _dot(x, x)
        dq = -0.25 * _dot(tl.trans(zx), g)
        g = 3.25 * g - 0.25 * _dot(g, tl.trans(15.0 * x - _dot(x, y)))
        dx = 15.0 * dq - _dot(dq, tl.trans(y))
        dp = -_dot(tl.trans(x), dq)
        dx += 7.0 * dp - _dot(dp, tl.trans(x)) - _dot(tl.trans(x), dp)
        ga += _dot(dx, tl.trans(zx))
        g += _dot(tl.trans(ax), dx)
    p, inside = _tile(da + n * M * M, M, BM)
    tl.store(p, ga, mask=inside)
    p, inside = _tile(dz + n * M * M, M, BM)
    tl.store(p, g, mask=inside)


def _plan(a: Tensor, rounds: int) -> Plan:
    batch, size = a.shape[:2]
    return Plan((batch,), (batch, rounds), {"M": size, "BM": tile_of(size)}, warps=8)


def forward(a: Tensor, z: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    last, steps = torch.empty_like(z), z.new_empty((rounds, *z.shape))
    launch(iterate, (a, z, last, steps), _plan(a, rounds))
    return last, steps


def backward(grad: Tensor, a: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    da, dz = torch.empty_like(a), torch.empty_like(a)
    launch(iterate_back, (grad, a, steps, da, dz), _plan(a, len(steps)))
    return da, dz
