"""Feature maps φ of linear attention: the similarity of q and k is φ(q)·φ(k).

name        φ(x)                    width   sign       range
elu+1       x + 1, eˣ below zero    K       positive   any finite x
relu        max(x, 0)               K       positive   any finite x
exp         eˣ                      K       positive   raw: keep |x| below 40, so that φ(q)·φ(k) fits in float32
identity    x                       K       signed     any finite x
quadratic   (x, x²)                 2K      signed     |x| below 1e4 in float32 and bfloat16, 250 in float16
taylor      (1, y, yᵢ²/√2, yᵢyⱼ)    M       positive   |q||k|/√K below 10 in 16 bits, 1e3 in float32, see below

taylor is the second order of the exponential: with y = x/K^¼, i < j and M = (K + 1)(K + 2)/2, φ(q)·φ(k) = 1 + s + s²/2
for s = q·k/√K, which is at least 1/2. Where q and k are long and nearly orthogonal, large terms of s² cancel: beyond
the range, rounding can make a weight negative. Mind the width: K = 16 gives 153 features, K = 64 gives 2,145.

A positive map divides by d + eps. A signed one, and any callable, may see d near or below zero and divides by
sign(d)·max(|d|, eps); its gradient grows as 1/d², and float16 does not hold what eps = 1e-6 allows.
A map of single numbers (elu+1, relu, exp, identity) is fused: the kernels apply it themselves. Any other map is applied
before the kernels, which then take its features as they are, up to 256 of them. Maps that learn or know the position
are not here: they stand in mechanisms/linear_maps.py.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.precision import wide


@dataclass(frozen=True)
class Fused:
    """A map of single numbers f = φ(x), as the chunked torch path and the Triton kernels apply it."""

    apply_: Callable[[Tensor], Tensor]  # φ(x), which may overwrite x
    pull_: Callable[[Tensor, Tensor], Tensor]  # d·φ'(x) from d and f, which may overwrite d
    triton: str  # φ(x) in Triton
    triton_pull: str  # d·φ'(x) from d and f, in Triton
    zero: float = 0.0  # an x at which φ is zero: it is loaded where there is no token


@dataclass(frozen=True)
class FeatureMap:
    apply: Callable[[Tensor], Tensor]  # [..., K] -> [..., M]
    signed: bool = True  # whether φ(q)·φ(k) can be negative, which decides how the denominator is kept away from zero
    fused: Fused | None = None


def _elu1(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _elu1_(x: Tensor) -> Tensor:
    # exp2 is several times as fast as exp and expm1 on a CPU
    return x.clamp(max=0).mul_(1 / math.log(2)).exp2_().add_(x.clamp_(min=0))


def _elu1_pull_(d: Tensor, f: Tensor) -> Tensor:
    return d.mul_(f.clamp(max=1))


def _relu_pull_(d: Tensor, f: Tensor) -> Tensor:
    return d.masked_fill_(f <= 0, 0)


def _identity(x: Tensor, _f: Tensor | None = None) -> Tensor:
    return x


def _quadratic(x: Tensor) -> Tensor:
    return torch.cat((x, x * x), dim=-1)


def _taylor(x: Tensor) -> Tensor:
    y = wide(x) * x.shape[-1] ** -0.25  # a feature is rounded once
    pairs = (y[..., i : i + 1] * y[..., i + 1 :] for i in range(x.shape[-1] - 1))
    return torch.cat((torch.ones_like(y[..., :1]), y, y * y * math.sqrt(0.5), *pairs), dim=-1).to(x.dtype)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu+1": FeatureMap(
        _elu1,
        signed=False,
        fused=Fused(
            _elu1_,
            _elu1_pull_,
            triton="tl.maximum(x, 0.0) + tl.exp2(tl.minimum(x, 0.0) * 1.4426950408889634)",
            triton_pull="d * tl.minimum(f, 1.0)",
            zero=-math.inf,
        ),
    ),
    "relu": FeatureMap(
        torch.relu,
        signed=False,
        fused=Fused(torch.relu_, _relu_pull_, triton="tl.maximum(x, 0.0)", triton_pull="tl.where(f > 0.0, d, 0.0)"),
    ),
    "exp": FeatureMap(
        torch.exp,
        signed=False,
        fused=Fused(torch.exp_, torch.Tensor.mul_, triton="tl.exp(x)", triton_pull="d * f", zero=-math.inf),
    ),
    # x + 0.0, so that the operand passes through registers: Triton 3.6 refills a loaded tile that a dot still reads
    "identity": FeatureMap(_identity, fused=Fused(_identity, _identity, triton="x + 0.0", triton_pull="d")),
    "quadratic": FeatureMap(_quadratic),
    "taylor": FeatureMap(_taylor, signed=False),
}
FUSED = {name: row.fused for name, row in FEATURE_MAPS.items() if row.fused is not None}


def feature_map(name: str | Callable[[Tensor], Tensor], others: Iterable[str] = ()) -> FeatureMap:
    """The map of that name, or a callable taken as a signed map. An error also names the `others` that a caller has."""
    if callable(name):
        return FeatureMap(name)
    if name in FEATURE_MAPS:
        return FEATURE_MAPS[name]
    names = (*FEATURE_MAPS, *others)
    near = [known for known in names if known.startswith(str(name))]  # elu is meant for elu+1, not for relu
    near = near or difflib.get_close_matches(str(name), names, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"feature_map={name!r}: accepted are {', '.join(names)}, or any callable{hint}")
