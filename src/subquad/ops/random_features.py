"""Random features: maps φ with E[φ(x)·φ(y)] = κ(x, y), so that a kernel κ becomes linear attention.

            κ                 features of one direction ω ~ N(0, I), each over √M for M directions
softmax     exp(x·y)          exp(ω·x - |x|²/2)                 positive: precise where exp(x·y) is small
hyperbolic  exp(x·y)          exp(±ω·x - |x|²/2) / √2           positive, and at most half that variance
trig        exp(x·y)          exp(|x|²/2) (sin ω·x, cos ω·x)    signed: precise where exp(x·y) is large
Gaussian    exp(-|x - y|²/2)  (sin ω·x, cos ω·x)                signed, bounded

exp(|x|²/2) overflows at |x| = 14, so the first three are returned as features of moderate size and the logarithm of the
factor to them, which the caller keeps in an exponent.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Norms = Literal["chi", "sqrt"]


def draw_directions(
    heads: int,
    count: int,
    width: int,
    generator: torch.Generator | None = None,
    *,
    orthogonal: bool = True,
    norms: Norms = "chi",
) -> Tensor:
    """`count` directions a head, [H, M, K] in float32.

    orthogonal  at right angles within blocks of K: still unbiased, with less variance
    norms       of orthogonal ones: "chi", as long as Gaussian vectors are, or "sqrt", all √K long
    """
    if not orthogonal:
        return torch.randn(heads, count, width, generator=generator)
    blocks = -(-count // width)
    gauss = torch.randn(heads * blocks, width, width, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gauss)
    # QR leaves the signs of q to the library; fixed by r, every rotation is equally likely
    q = q * r.diagonal(dim1=-2, dim2=-1).sgn()[:, None]
    rows = q.mT.reshape(heads, blocks * width, width)[:, :count]
    if norms == "sqrt":
        length = torch.full((heads, count), math.sqrt(width), dtype=torch.float64)
    else:
        length = torch.randn(heads, count, width, generator=generator, dtype=torch.float64).norm(dim=-1)
    return (rows * length[..., None]).float()


def project(x: Tensor, directions: Tensor) -> Tensor:
    """ω·x in at least float32, under autocast too: [B, T, H, K], [H, M, K] -> [B, T, H, M]."""
    exact = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("bthk,hmk->bthm", x.to(exact), directions.to(exact))


def fourier(x: Tensor, directions: Tensor) -> Tensor:
    """The Gaussian kernel's features, [B, T, H, 2M]."""
    p = project(x, directions)
    return torch.cat((p.sin(), p.cos()), dim=-1) / math.sqrt(directions.shape[-2])


def trigonometric(x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Features [B, T, H, 2M] and the logarithm of the factor to them, [B, T, H]."""
    return fourier(x, directions), _half_square(x)


def positive(x: Tensor, directions: Tensor, hyperbolic: bool = False) -> tuple[Tensor, Tensor]:
    """Features [B, T, H, M], or 2M, the largest of each token 1, and the logarithm of the factor to them, [B, T, H]."""
    p = project(x, directions)
    if hyperbolic:
        p = torch.cat((p, -p), dim=-1)
    largest = p.amax(-1)
    return (p - largest[..., None]).exp(), largest - _half_square(x) - math.log(p.shape[-1]) / 2


def _half_square(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1) / 2
