"""Random features: maps φ with E[φ(x)·φ(y)] = κ(x, y), so that attention with a kernel κ becomes linear attention.

            κ                 features of one direction ω ~ N(0, I), each over √M for M directions
softmax     exp(x·y)          exp(ω·x - |x|²/2)                 positive: precise where exp(x·y) is small
hyperbolic  exp(x·y)          exp(±ω·x - |x|²/2) / √2           positive, and at most half that variance
trig        exp(x·y)          exp(|x|²/2) (sin ω·x, cos ω·x)    signed: precise where exp(x·y) is large
Gaussian    exp(-|x - y|²/2)  (sin ω·x, cos ω·x)                signed, bounded

exp(|x|²/2) overflows at |x| = 14. So the first three maps return features of moderate size and the logarithm of their
common factor. The caller keeps that logarithm, or gives a unit in which the product does not overflow.
Features are M/K times as large as tokens, so reading and writing them takes most of the time: only ω·x is in float32.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from subquad.gradients import once_differentiable
from subquad.ops.impl import exporting, transformed
from subquad.ops.precision import uncast, wide, wide_type

Norms = Literal["chi", "sqrt"]
SHORT = 1e-6  # vectors shorter than this are divided by this instead of their length


class Exponents(NamedTuple):
    """The exponents of positive features, without gradients; `positive` overwrites `scores`."""

    scores: Tensor  # [H, B*T, M] ω·x before the scale, at least float32
    largest: Tensor  # [B, T, H] the largest scaled score of a token
    half: Tensor  # [B, T, H] |x|²/2 + log(M)/2

    @property
    def factor(self) -> Tensor:
        """The logarithm of a token's largest feature."""
        return self.largest - self.half


def draw_directions(
    heads: int, count: int, width: int, generator: torch.Generator | None, orthogonal: bool = True, norms: Norms = "chi"
) -> Tensor:
    """`count` random directions per head, [H, M, K] in float32.

    orthogonal  orthogonal within blocks of K: unbiased too, with less variance
    norms       lengths of orthogonal directions: "chi", those of Gaussian vectors, or "sqrt", all √K
    """
    if not orthogonal:
        return torch.randn(heads, count, width, generator=generator)
    blocks = -(-count // width)
    gauss = torch.randn(heads * blocks, width, width, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gauss)
    # the signs of q depend on the library; with those of r, every rotation is equally likely
    q = q * r.diagonal(dim1=-2, dim2=-1).sgn()[:, None]
    rows = q.mT.reshape(heads, blocks * width, width)[:, :count]
    if norms == "sqrt":
        length = torch.full((heads, count), math.sqrt(width), dtype=torch.float64)
    else:
        length = torch.randn(heads, count, width, generator=generator, dtype=torch.float64).norm(dim=-1)
    return (rows * length[..., None]).float()


def project(x: Tensor, directions: Tensor) -> Tensor:
    """ω·x in at least float32, under autocast too: [B, T, H, K], [H, M, K] -> [B, T, H, M]."""
    with uncast(x):
        return torch.einsum("bthk,hmk->bthm", wide(x), directions.to(wide_type(x)))


def fourier(x: Tensor, directions: Tensor, *, unit: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Features of the Gaussian kernel, [B, T, H, 2M], in at least float32 or in `dtype`; with `unit`, of x/|x|."""
    if exporting() or transformed():
        return _plain_fourier(x, directions, unit, dtype or wide_type(x))
    with uncast(x):
        return _Fourier.apply(x, directions, unit, dtype or wide_type(x))


def trigonometric(x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Features [B, T, H, 2M] and the logarithm of their factor, [B, T, H]."""
    return fourier(x, directions), wide(x).square().sum(-1) / 2


@torch.no_grad()
def exponents(x: Tensor, directions: Tensor, scale: float = 1.0) -> Exponents:
    """The exponents of the positive features of scale·x."""
    x = x.detach()  # an exported program does not keep the no_grad above
    scores = _product(x, directions)
    largest = scale * _tokens(scores.amax(-1, keepdim=True), x)[..., 0]
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=scores.dtype)
    return Exponents(scores, largest, (scale * norm).square() / 2 + math.log(scores.shape[-1]) / 2)


def positive(
    x: Tensor,
    directions: Tensor,
    parts: Exponents,
    *,
    scale: float = 1.0,
    unit: Tensor | None = None,
    eps: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Positive features of scale·x, plus eps: [B, T, H, M]. `parts` are what `exponents` gives for the same arguments.

    unit   the logarithm of a constant to divide the features by; it broadcasts with [B, T, H]. Without it each token's
           largest feature is 1 + eps
    eps    in units of a token's own largest feature
    dtype  of the result: at least float32 by default
    """
    if exporting() or transformed():
        return _plain_positive(x, directions, scale, unit, eps, dtype or wide_type(x))
    origin = parts.largest if unit is None else parts.half + unit
    b = eps * (parts.largest - origin).exp()[..., None]
    with uncast(x):
        return _Positive.apply(x, directions, parts.scores, origin, b, scale, unit is not None, dtype or wide_type(x))


# An exported program loses the backward of an autograd.Function, and torch.func refuses one. So they get plain
# expressions: the same numbers, with more memory.


def _plain_fourier(x: Tensor, directions: Tensor, unit: bool, dtype: torch.dtype) -> Tensor:
    scores = project(x, directions)
    if unit:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=scores.dtype)
        scores = scores * norm.clamp(min=SHORT).reciprocal()
    return torch.cat((scores.sin(), scores.cos()), -1).to(dtype) * scores.shape[-1] ** -0.5


def _plain_positive(
    x: Tensor, directions: Tensor, scale: float, unit: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    scores = scale * project(x, directions)
    largest = scores.amax(-1, keepdim=True)
    origin = largest
    if unit is not None:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=scores.dtype)
        origin = (scale * norm).square() / 2 + math.log(scores.shape[-1]) / 2 + unit[..., None]
    return ((scores - origin).exp() + eps * (largest - origin).exp()).to(dtype)


# Inside an autograd.Function torch.compile(dynamic=True) cannot read a module's constants: hence 1e-6 instead of SHORT.


class _Fourier(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, directions, unit, dtype):  # type: ignore[no-untyped-def]
        scores = _product(x, directions)
        inverse = None
        if unit:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=scores.dtype)
            inverse = norm.clamp(min=1e-6).reciprocal()  # [B, T, H, 1]
            scores *= _rows(inverse)
        sin, cos = (torch.empty_like(scores, dtype=dtype) for _ in range(2))
        phi = torch.cat((torch.sin(scores, out=sin), torch.cos(scores, out=cos)), -1)
        phi *= scores.shape[-1] ** -0.5
        phi = _tokens(phi, x)
        ctx.save_for_backward(x, directions, phi, inverse)
        return phi

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, directions, phi, inverse = ctx.saved_tensors
        (sin, cos), (of_sin, of_cos) = phi.chunk(2, -1), grad.chunk(2, -1)
        of_scores = (cos * of_sin).addcmul_(sin, of_cos, value=-1)
        if inverse is not None:
            of_scores *= inverse.to(of_scores.dtype)
        dx, of_directions = _product_backward(ctx, of_scores, x, directions, 1.0)
        if inverse is not None and dx is not None:  # the gradient of a unit vector is orthogonal to it
            along = (dx * x).sum(-1, keepdim=True, dtype=inverse.dtype) * inverse.square()
            along.masked_fill_(inverse > 0.999e6, 0)
            dx = dx.addcmul(along.to(dx.dtype), x.to(dx.dtype), value=-1)
        return None if dx is None else dx.to(x.dtype), of_directions, None, None


class _Positive(torch.autograd.Function):
    """φ = exp(scale·ω·x - origin) + b, where b = eps·exp(largest - origin).

    The origin is the token's largest score, or moves with its |x|²/2 if `moves`.
    """

    @staticmethod
    def forward(ctx, x, directions, scores, origin, b, scale, moves, dtype):  # type: ignore[no-untyped-def]
        scores = torch.add(_rows(origin[..., None]).neg(), scores, alpha=scale, out=scores)
        phi = scores.exp_() if dtype == scores.dtype else torch.exp(scores, out=torch.empty_like(scores, dtype=dtype))
        phi += _rows(b).to(dtype)
        phi = _tokens(phi, x)
        ctx.save_for_backward(x, directions, phi, b)
        ctx.scale, ctx.moves = scale, moves
        return phi

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, directions, phi, b = ctx.saved_tensors
        of_scores = (phi - b.to(phi.dtype)).mul_(grad)
        total = of_scores.sum(-1, keepdim=True, dtype=b.dtype)  # [B, T, H, 1]
        of_largest = b * grad.sum(-1, keepdim=True, dtype=b.dtype) if ctx.moves else -total
        of_scores.scatter_add_(-1, phi.argmax(-1, keepdim=True), of_largest.to(of_scores.dtype))
        dx, of_directions = _product_backward(ctx, of_scores, x, directions, ctx.scale)
        if ctx.moves and dx is not None:
            dx = dx.addcmul((total + of_largest).to(dx.dtype), x.to(dx.dtype), value=-(ctx.scale**2))
        return None if dx is None else dx.to(x.dtype), of_directions, *(None for _ in range(6))


def _product(x: Tensor, directions: Tensor) -> Tensor:
    """ω·x in at least float32, [H, B*T, M], without a gradient."""
    rows, dtype = _rows(x), wide_type(x)
    if x.is_cuda and x.dtype != dtype:
        # 16-bit factors with sums in float32; float32 directions become two 16-bit parts
        columns = directions.to(x.dtype)
        if directions.dtype != x.dtype:
            rows, columns = torch.cat((rows, rows), -1), torch.cat((columns, (directions - columns).to(x.dtype)), -1)
        return torch.bmm(rows, columns.mT, out_dtype=dtype)
    return torch.bmm(rows.to(dtype), directions.to(dtype).mT)


def _product_backward(ctx, grad, x, directions, scale):  # type: ignore[no-untyped-def]
    """Gradients of x, in the type of `grad`, and of the directions, given that of scale·ω·x; None if not needed."""
    with uncast(x):
        grad, dx, of_directions = _rows(grad), None, None  # [H, B*T, M]
        if ctx.needs_input_grad[0]:
            empty = grad.new_empty(*grad.shape[:2], directions.shape[-1])
            dx = _tokens(torch.baddbmm(empty, grad, directions.to(grad.dtype), beta=0, alpha=scale), x)
        if ctx.needs_input_grad[1]:
            of_directions = (scale * torch.bmm(grad.mT, _rows(x).to(grad.dtype))).to(directions.dtype)
        return dx, of_directions


def _rows(x: Tensor) -> Tensor:
    """[B, T, H, D] -> [H, B*T, D]"""
    return x.flatten(0, 1).transpose(0, 1)


def _tokens(rows: Tensor, like: Tensor) -> Tensor:
    """[H, B*T, D] -> [B, T, H, D]"""
    return rows.unflatten(1, like.shape[:2]).permute(1, 2, 0, 3)
