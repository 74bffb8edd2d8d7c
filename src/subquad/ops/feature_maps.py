"""Feature maps φ of linear attention: the similarity of q and k is φ(q)·φ(k).

name        φ(x)                    width   sign       range
elu+1       x + 1, eˣ below zero    K       positive   any finite x
relu        max(x, 0)               K       positive   any finite x
exp         eˣ                      K       positive   raw: keep |x| below 40, so that φ(q)·φ(k) fits in float32
identity    x                       K       signed     any finite x
quadratic   (x, x²)                 2K      signed     |x| below 1e4 in float32 and bfloat16, 250 in float16

A positive map divides by d + eps. A signed one, and any callable, may see d near or below zero and divides by
sign(d)·max(|d|, eps); its gradient grows as 1/d², and float16 does not hold what eps = 1e-6 allows.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class FeatureMap:
    apply: Callable[[Tensor], Tensor]  # [..., K] -> [..., M]
    signed: bool  # whether φ(q)·φ(k) can be negative, which decides how the denominator is kept away from zero
    fused: bool = False  # whether the kernels compute it themselves; the others are applied before


def _elu1(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _identity(x: Tensor) -> Tensor:
    return x


def _quadratic(x: Tensor) -> Tensor:
    return torch.cat((x, x * x), dim=-1)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu+1": FeatureMap(_elu1, signed=False, fused=True),
    "relu": FeatureMap(torch.relu, signed=False, fused=True),
    "exp": FeatureMap(torch.exp, signed=False, fused=True),
    "identity": FeatureMap(_identity, signed=True, fused=True),
    "quadratic": FeatureMap(_quadratic, signed=True),
}


def feature_map(name: str | Callable[[Tensor], Tensor]) -> FeatureMap:
    """The map of that name, or a callable taken as a signed map."""
    if callable(name):
        return FeatureMap(name, signed=True)
    if name in FEATURE_MAPS:
        return FEATURE_MAPS[name]
    near = [known for known in FEATURE_MAPS if known.startswith(str(name))]  # elu is meant for elu+1, not for relu
    near = near or difflib.get_close_matches(str(name), FEATURE_MAPS, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"feature_map={name!r}: accepted are {', '.join(FEATURE_MAPS)}, or any callable{hint}")
