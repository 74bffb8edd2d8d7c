"""The Triton paths of subquad.ops.clusters: products of tokens with few vectors, which stay on the chip."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.launch import Plan, blocks_of, fitting, launch, shared_memory, tile_of
from subquad.ops.sparse.kernels import _rows

TOKENS = 64  # of a program
SPLITS = 16  # of a row at most, in sums
LEAST = 1024  # tokens of a split


@triton.jit(do_not_specialize=["T", "N"])
def nearest_kernel(
    x, c, into, x_batch, x_head, c_batch, T, N, x_stride: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    SIGNED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """argmax of x·c over c [H, R, N, D], and over -c if SIGNED: into [B, H, R, T]. Of equals the first."""
    tiles = tl.cdiv(T, BT)
    i = tl.program_id(0) % tiles * BT + tl.arange(0, BT)
    h = tl.program_id(0) // tiles % H
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    r = tl.program_id(1)
    here = i < T
    xt = _rows(x + b * x_batch + h * x_head, i, here, x_stride, D, BD).to(c.dtype.element_ty)
    c += b * c_batch + (h * R + r) * N * D
    best = tl.full([BT], float("-inf"), tl.float32)
    at = tl.zeros([BT], tl.int32)
    worst = tl.full([BT], float("inf"), tl.float32)
    low = tl.zeros([BT], tl.int32)
    for f in tl.range(0, N, BN):
        n = f + tl.arange(0, BN)
        s = tl.dot(xt, _rows(c, n, n < N, D, D, BD).T, input_precision=PRECISION)
        up = tl.where((n < N)[None, :], s, float("-inf"))
        top = tl.max(up, 1)
        first = tl.min(tl.where(up == top[:, None], n[None, :], N - 1), 1)
        at = tl.where(top > best, first, at)
        best = tl.maximum(best, top)
        if SIGNED:
            down = tl.where((n < N)[None, :], s, float("inf"))
            top = tl.min(down, 1)
            first = tl.min(tl.where(down == top[:, None], n[None, :], N - 1), 1)
            low = tl.where(top < worst, first, low)
            worst = tl.minimum(worst, top)
    if SIGNED:
        at = tl.where(best >= -worst, at, N + low)
    tl.store(into + ((b * H + h) * R + r) * T + i, at, mask=here)


@triton.jit(do_not_specialize=["T", "N", "split", "splits"])
def sums_kernel(
    x, label, total, count, x_batch, x_head, T, N, split, splits, x_stride: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of the tokens of each label in one split of a row: total [splits, B, H, N, D], count [splits, B, H, N]."""
    piece = tl.program_id(0) % splits
    h = tl.program_id(0) // splits % H
    b = (tl.program_id(0) // splits // H).to(tl.int64)
    batches = tl.num_programs(0) // splits // H
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x += b * x_batch + h * x_head
    label += (b * H + h) * T
    acc = tl.zeros([BN, BD], tl.float32)
    many = tl.zeros([BN], tl.float32)
    for f in tl.range(piece * split, tl.minimum(piece * split + split, T), BT):
        i = f + tl.arange(0, BT)
        here = (i < T) & (i < piece * split + split)
        own = tl.load(label + i, mask=here, other=-1)
        member = own[None, :] == n[:, None]
        xt = _rows(x, i, here, x_stride, D, BD)
        acc = tl.dot(member.to(xt.dtype), xt, acc, input_precision=PRECISION)
        many += tl.sum(member.to(tl.float32), 1)
    row = (piece * batches + b) * H + h
    d = tl.arange(0, BD)
    tl.store(total + (row * N + n[:, None]) * D + d[None, :], acc, mask=(n < N)[:, None] & (d < D)[None, :])
    tl.store(count + row * N + n, many, mask=n < N)


@triton.jit(do_not_specialize=["T"])
def signs_kernel(
    x, planes, into, x_batch, x_head, T, x_stride: tl.constexpr, H: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """1 or -1: the side of x [B, T, H, D] of each of the planes [M, D + 1], whose last column is added."""
    tiles = tl.cdiv(T, BT)
    i = tl.program_id(0) % tiles * BT + tl.arange(0, BT)
    h = tl.program_id(0) // tiles % H
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    m = tl.program_id(1) * 16 + tl.arange(0, 16)
    xt = _rows(x + b * x_batch + h * x_head, i, i < T, x_stride, D, BD).to(planes.dtype.element_ty)
    side = tl.dot(xt, _rows(planes, m, m < M, D + 1, D, BD).T, input_precision=PRECISION)
    side += tl.load(planes + m * (D + 1) + D).to(tl.float32)[None, :]
    at = ((b * T + i[:, None]) * H + h) * M + m[None, :]
    tl.store(into + at, tl.where(side >= 0, 1.0, -1.0).to(tl.float16), mask=(i < T)[:, None])


def half_bits(x: Tensor, planes: Tensor) -> Tensor:
    """x [B, T, H, K], planes [M, K + 1] with M a multiple of 16 -> [B, T, H, M]"""
    x = x if x.stride(-1) == 1 else x.contiguous()
    same = x.dtype == planes.dtype
    planes = (planes if same else planes.to(torch.promote_types(x.dtype, planes.dtype))).contiguous()
    (batch, size, heads, width), number = x.shape, len(planes)
    into = torch.empty(batch, size, heads, number, dtype=torch.float16, device=x.device)
    constants = {
        "x_stride": x.stride(1), "H": heads, "M": number, "D": width, "BD": tile_of(width), "BT": TOKENS,
        "PRECISION": _precision(planes.dtype),
    }  # fmt: skip
    grid = (blocks_of(size, TOKENS) * batch * heads, number // 16)
    launch(signs_kernel, (x, planes, into), Plan(grid, (x.stride(0), x.stride(2), size), constants))
    return into


def _precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"


def nearest(x: Tensor, centroids: Tensor, signed: bool) -> Tensor:
    """x [B, T, H, K], centroids [H, R, N, K] or [B, H, R, N, K] -> [B, H, R, T]"""
    x = x if x.stride(-1) == 1 else x.contiguous()
    same = x.dtype == centroids.dtype
    c = (centroids if same else centroids.to(torch.promote_types(x.dtype, centroids.dtype))).contiguous()
    (batch, size, heads, width), (rounds, number) = x.shape, c.shape[-3:-1]
    into = torch.empty(batch, heads, rounds, size, dtype=torch.int32, device=x.device)
    wide = tile_of(width)
    block = min(64, tile_of(number)) if wide < 256 else 16
    tokens = fitting(
        (TOKENS, TOKENS // 2), lambda n: (2 * n + block) * wide * c.element_size(), shared_memory(x.device)
    )
    constants = {
        "x_stride": x.stride(1), "H": heads, "R": rounds, "SIGNED": signed, "D": width, "BD": wide, "BT": tokens,
        "BN": block, "PRECISION": _precision(c.dtype),
    }  # fmt: skip
    numbers = (x.stride(0), x.stride(2), c.stride(0) if c.ndim == 5 else 0, size, number)
    launch(
        nearest_kernel,
        (x, c, into),
        Plan((blocks_of(size, tokens) * batch * heads, rounds), numbers, constants, stages=2),
    )
    return into


def cluster_sums(x: Tensor, label: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """x [B, T, H, K], label [B, H, T] -> [B, H, N, K] and [B, H, N], float32"""
    x, label = x if x.stride(-1) == 1 else x.contiguous(), label.contiguous()
    batch, size, heads, width = x.shape
    splits = max(1, min(SPLITS, size // LEAST))
    split = blocks_of(blocks_of(size, splits), TOKENS) * TOKENS
    total = torch.empty(splits, batch, heads, clusters, width, device=x.device)
    count = torch.empty(splits, batch, heads, clusters, device=x.device)
    wide = tile_of(width)
    block = min(64, tile_of(clusters))
    constants = {
        "x_stride": x.stride(1), "H": heads, "D": width, "BD": wide, "BT": TOKENS if wide < 256 else 32, "BN": block,
        "PRECISION": _precision(x.dtype),
    }  # fmt: skip
    numbers = (x.stride(0), x.stride(2), size, clusters, split, splits)
    plan = Plan((splits * batch * heads, blocks_of(clusters, block)), numbers, constants, stages=2)
    launch(sums_kernel, (x, label, total, count), plan)
    return total.sum(0), count.sum(0)


@triton.jit(do_not_specialize=["T", "N"])
def steps_kernel(
    x, c, lengths, into, x_head, T, N, grid, x_stride: tl.constexpr, ROUND: tl.constexpr, LENGTHS: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x·c of one row, in multiples of the grid if ROUND: x [T, H, D], c [H, N, D] -> into [H, N, T]; -inf beyond its
    length."""
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    h = tl.program_id(2).to(tl.int64)
    xt = _rows(x + h * x_head, i, i < T, x_stride, D, BD).to(c.dtype.element_ty)
    s = tl.dot(_rows(c + h * N * D, n, n < N, D, D, BD), xt.T, input_precision=PRECISION)
    if ROUND:
        s = tl.floor(s / grid + 0.5)
    if LENGTHS:
        s = tl.where((i < tl.load(lengths))[None, :], s, float("-inf"))
    at = (h * N + n[:, None]).to(tl.int64) * T + i[None, :]
    tl.store(into + at, s, mask=(n < N)[:, None] & (i < T)[None, :])


@triton.jit(do_not_specialize=["T"])
def chosen_kernel(steps, least, equal, into, T, W: tl.constexpr, BT: tl.constexpr):
    """The positions of the values of a row above `least`, and of the first `equal` ones that equal it."""
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(least + row)
    ties = tl.load(equal + row)
    count = 0
    for f in tl.range(0, T, BT):
        i = f + tl.arange(0, BT)
        s = tl.load(steps + row * T + i, mask=i < T, other=float("-inf"))
        tie = ((s == low) & (s > float("-inf"))).to(tl.int32)
        seat = tl.cumsum(tie, 0)
        take = ((s > low) | ((tie > 0) & (seat <= ties))).to(tl.int32)
        tl.store(into + row * W + count + tl.cumsum(take, 0) - 1, i, mask=take > 0)
        count += tl.sum(take, 0)
        ties -= tl.sum(tie, 0)


def balanced(x: Tensor, centroids: Tensor, window: int, grid: float, lengths: Tensor | None) -> Tensor:
    """x [B, T, H, K], centroids [H, N, K] or [B, H, N, K] -> [B, H, N, window]"""
    x = x if x.stride(-1) == 1 else x.contiguous()
    same = x.dtype == centroids.dtype
    c = (centroids if same else centroids.to(torch.promote_types(x.dtype, centroids.dtype))).contiguous()
    (batch, size, heads, width), number = x.shape, c.shape[-2]
    into = torch.full((batch, heads, number, window), -1, dtype=torch.int32, device=x.device)
    wide = tile_of(width)
    block = 32 if wide == 256 else 64
    constants = {
        "x_stride": x.stride(1), "ROUND": grid > 0, "LENGTHS": lengths is not None, "D": width, "BD": wide,
        "BT": block, "BN": block, "PRECISION": _precision(c.dtype),
    }  # fmt: skip
    plan = Plan((blocks_of(size, block), blocks_of(number, block), heads), (x.stride(2), size, number, grid), constants)
    for b in range(batch):  # in turn, because scores of all tokens and centroids take room
        steps = torch.empty(heads, number, size, device=x.device)
        launch(steps_kernel, (x[b], c if c.ndim == 3 else c[b], c if lengths is None else lengths[b:], steps), plan)
        top = steps.topk(min(window, size), dim=-1, sorted=False).values
        least = top.amin(-1)
        equal = (top == least[..., None]).sum(-1, dtype=torch.int32)
        launch(
            chosen_kernel,
            (steps, least, equal, into[b]),
            Plan((heads * number,), (size,), {"W": window, "BT": 1024}, warps=4),
        )
    return into
