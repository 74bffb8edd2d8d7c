"""Performer (FAVOR+): random features whose products are, on average, the exponentials of softmax attention.

Paper       Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794, §2 and lemmas 1, 2
Definition  oₜ = Σₛ φ(qₜ)·φ(kₛ) vₛ / Σₛ φ(qₜ)·φ(kₛ), with s ≤ t when causal, every s otherwise; q, k over K^¼ beforehand
            kernel="softmax"     φ(x) = exp(Ωx - |x|²/2): E φ(q)·φ(k) = exp(q·k), the weight of softmax attention
            kernel="hyperbolic"  φ(x) = (exp(Ωx - |x|²/2), exp(-Ωx - |x|²/2)): the same mean, at most half the variance
            kernel="trig"        φ(x) = exp(|x|²/2) (sin Ωx, cos Ωx): the same mean, but signed
            kernel="relu"        φ(x) = ReLU(Ωx), the generalised attention; features=0: ReLU(x), as in Long Range Arena
            Ω [features, K] for each head: Gaussian rows, orthogonal within blocks of K rows
Cost        train O(T·M·V) time, O(T·(M + V)) memory; decode O(M·V) a token; state H·M·(V + 1),
            with M = features, twice that for trig and hyperbolic. On a GPU, kernels compute all features but those of
            trig where they use them, and memory is O(T·(K + V))
Departures  The authors subtract the largest exponent of all keys, which looks ahead; here it is the largest so far, and
            a new one rescales the sums like a gate. They add eps to features in units of that maximum; here the unit
            is the token's own largest feature, so all maxima cancel and the denominator stays above eps. With trig,
            eps is the least |denominator|, in units of the largest exp(|k|²/2), raised to a power of two: that key
            alone has a standard error of 1/√(2·features), and closer to zero the result is noise. Ω is drawn once, and
            again by `redraw`
Verified    tests/mechanisms/test_performer.py, tests/ops/test_random_features.py: means and variances of lemma 2;
            performer-pytorch 1.1.4 with copied Ω in float64: relu 1e-16 (causal 2e-6), softmax with eps=0 1e-13
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from subquad import ranks
from subquad.checks import at_least, check_eps, refuse
from subquad.mechanisms import base
from subquad.mechanisms.kernelised import Features, Kernelised, Memory
from subquad.ops.lengths import keep
from subquad.ops.linear import LinearState, linear_attention_read, linear_attention_sums
from subquad.ops.linear.featured import Inputs, Result, Spec, featured_attention, featured_step, fuses
from subquad.ops.precision import wide, wide_type
from subquad.ops.prefix import running_max
from subquad.ops.random_features import Exponents, Norms, draw_directions, exponents, positive, project, trigonometric

LOG_2 = math.log(2)
NOTHING = -1e30  # the largest exponent before the first key; finite, so that differences are numbers
KERNELS = {"softmax": 1e-9, "hyperbolic": 1e-9, "trig": 0.3, "relu": 1e-3}  # and their eps; for trig in standard errors


class State(NamedTuple):
    s: Tensor  # [B, H, M, V] at least float32, in units of exp(max)
    z: Tensor  # [B, H, M]
    max: Tensor  # [B, H], the largest exponent of a key so far
    position: Tensor  # [B]


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    features: int = 256  # random features of each head
    kernel: Literal["softmax", "hyperbolic", "trig", "relu"] = "softmax"  # see the definition
    orthogonal: bool = True  # features drawn orthogonal, which lowers their variance
    norms: Norms = "chi"  # lengths of orthogonal rows: drawn like those of Gaussian vectors, or all √K ("sqrt")
    eps: float | None = None  # None: 1e-9, 0.3/√(2·features) for trig, 1e-3 for relu

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, features=0 if self.kernel == "relu" else 1)
        if self.eps is not None and not self.eps >= 0:
            refuse("eps", self.eps, "None or a number of at least 0")
        if self.eps is not None and self.kernel == "trig":  # its denominator may be 0
            check_eps(self.eps)


class Performer(Kernelised):
    small = (
        {"features": 12},
        {"features": 8, "kernel": "hyperbolic", "norms": "sqrt"},
        {"features": 30, "kernel": "trig", "orthogonal": False},
        {"features": 5, "kernel": "relu"},
    )
    options: Options
    directions: Tensor  # [H, features, K]

    def __init__(self, options: Options):
        super().__init__(options)
        default = KERNELS[options.kernel] * ((2 * options.features) ** -0.5 if options.kernel == "trig" else 1)
        self.eps = default if options.eps is None else options.eps
        self.register_buffer("directions", torch.empty(options.heads, options.features, self.width))
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        o, generator = self.options, generator or self._generator()
        drawn = draw_directions(o.heads, o.features, self.width, generator, orthogonal=o.orthogonal, norms=o.norms)
        self.directions.copy_(drawn)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        if self._fuses(q, k, v):
            return self._fused(q, k, v, None if self.options.causal else key_lengths).o
        return self._sum(self._prepare(q, k, v, key_lengths, None), lengths, key_lengths)

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        start = self._init_state(x.shape[0], None) if state is None else state
        if self._continues_on_kernels(x, start):
            q, k, v = self._project(x, position=start.position)
            if self._fuses(q, k, v):
                done = self._fused(q, k, v, lengths, start)
                largest = start.max if self.options.kernel == "relu" else done.max
                return self._merge(done.o), State(done.s, done.z, largest, self._advance(start.position, x, lengths))
        return super()._prefill(x, lengths, start)

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        if self._continues_on_kernels(x, state):
            q, k, v = (t.squeeze(1) for t in self._project(x[:, None], position=state.position))
            if self._fuses(q, k, v):
                d, eps = self._signed(), self._how()["eps"]
                o, (s, z, most) = featured_step(q, k, v, d, None, state[:3], self._spec(), eps, inplace)
                position = state.position.add_(1) if inplace else state.position + 1
                return self._merge(o), State(s, z, most, position)
        return super()._step(x, state, inplace)

    def _fuses(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        # sines cancel until only the rounding errors of 16 bits are left
        return self.options.kernel != "trig" and fuses(self.options.impl, q, k, v, self.directions, self.options.causal)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, state: State | None = None) -> Result:
        """By kernels that compute features where they use them: nothing of size [B, T, H, M] exists."""
        relu = self.options.kernel == "relu"
        least = torch.full(q.shape[:3], self._how()["eps"], device=q.device, dtype=wide_type(q))
        start = (None, None, None) if state is None else (state.s, state.z, None if relu else state.max)
        x = Inputs(q, k, v, self._signed(), least, None, lengths, *start)
        return featured_attention(x, self._spec(), state is not None)

    def _spec(self) -> Spec:
        kind = "relu" if self.options.kernel == "relu" else "softmax"
        return Spec(kind, self.width**-0.25, self.eps, self.options.causal)

    def _features(self, x: Tensor, lengths: Tensor | None, state: State) -> Features:
        return self._prepare(*self._project(x, position=state.position), lengths, state.max)

    def _init_state(self, batch: int, capacity: int | None) -> State:
        twice = self.options.kernel in ("trig", "hyperbolic")
        s, z, position = self._empty(batch, (self.options.features or self.width) * (2 if twice else 1))
        return State(s, z, torch.full_like(z[..., 0], NOTHING), position)

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        k, v = self.heads.keys(context)
        k, v, _, _ = self._prepare_keys(k, v, lengths, None)
        return self.memory_type(*linear_attention_sums(k, v, feature_map="identity", lengths=lengths), lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        q = self._query_features(self.heads.queries(x), memory.s.dtype)
        o = linear_attention_read(q, LinearState(memory.s, memory.z), feature_map="identity", eps=self._how()["eps"])
        return self._merge(o)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        return None if self.options.kernel == "relu" else self._project(x)

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, largest: Tensor | None) -> Features:
        """The last item is the largest exponent so far. A query's factor cancels in the fraction, so it is left out."""
        k, v, gate, largest = self._prepare_keys(k, v, lengths, largest)
        return Features(self._query_features(q, v.dtype), k, v, gate, (largest,))

    def _prepare_keys(
        self, k: Tensor, v: Tensor, lengths: Tensor | None, largest: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Features of keys in units of the largest exponent so far; the gate rescales earlier sums to a new unit."""
        # small features underflow in float16, and sines cancel until only the rounding errors of 16 bits are left
        narrow = v.dtype == torch.bfloat16 and self.options.kernel != "trig"
        dtype = v.dtype if narrow else wide_type(v)
        v = v.to(dtype)
        if self.options.kernel == "relu":
            if largest is None:
                largest = k.new_full((k.shape[0], k.shape[2]), NOTHING, dtype=wide_type(k))
            return self._rectified(k).to(dtype), v, None, largest
        if self.options.kernel == "trig":
            phi, exponent = trigonometric(self._scaled(k), self.directions)
            # eps is in this unit, which is rounded, so that it does not follow each key and needs no gradient
            unit = (exponent.detach() / LOG_2).ceil() * LOG_2
            reached, gate, largest = self._reached(unit, lengths, largest)
            return (phi * (exponent - reached).exp()[..., None]).to(dtype), v, gate, largest
        parts = exponents(k, self._signed(), self.width**-0.25)
        reached, gate, largest = self._reached(parts.factor, lengths, largest)
        return self._exponentials(k, parts, dtype, reached), v, gate, largest

    def _reached(
        self, exponent: Tensor, lengths: Tensor | None, largest: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The unit of each key, the largest exponent so far; the log gate; and the largest after the last: [B, S, H]"""
        mask, gate = keep(lengths, exponent.shape[1]), None
        if mask is not None:
            exponent = exponent.masked_fill(~mask[..., None], NOTHING)
        if self.options.causal:
            start = torch.full_like(exponent[:, 0], NOTHING) if largest is None else largest
            if ranks.active() is not None:
                start = torch.maximum(start, ranks.largest_before(exponent.amax(1), NOTHING))
            reached = torch.maximum(running_max(exponent.mT).mT, start[:, None])
            before = torch.cat((start[:, None], reached[:, :-1]), dim=1)
            gate = (before - reached).masked_fill(before == NOTHING, 0)  # nothing to decay yet
        else:
            reached = ranks.largest(exponent.amax(dim=1, keepdim=True))
        largest = ranks.largest(reached[:, -1])
        if mask is not None:
            reached = torch.where(mask[..., None], reached, -NOTHING)  # in such units a padded key has weight 0
        return reached, gate, largest

    def _query_features(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """Features [B, T, H, M] without the factor of each query."""
        if self.options.kernel == "relu":
            return self._rectified(q).to(dtype)
        if self.options.kernel == "trig":
            return trigonometric(self._scaled(q), self.directions)[0].to(dtype)
        return self._exponentials(q, exponents(q, self._signed(), self.width**-0.25), dtype)

    def _exponentials(self, x: Tensor, parts: Exponents, dtype: torch.dtype, unit: Tensor | None = None) -> Tensor:
        scale = self.width**-0.25
        return positive(x, self._signed(), parts, scale=scale, unit=unit, eps=self.eps, dtype=dtype)

    def _signed(self) -> Tensor:
        d = self.directions
        return torch.cat((d, -d), dim=1) if self.options.kernel == "hyperbolic" else d

    def _rectified(self, x: Tensor) -> Tensor:
        x = self._scaled(x)
        return torch.relu(project(x, self.directions) if self.options.features else x) + self.eps

    def _scaled(self, x: Tensor) -> Tensor:
        return wide(x) * self.width**-0.25

    def _how(self) -> dict[str, Any]:
        # only the trigonometric denominator comes near zero; 1e-30 is for rows without any key
        eps = self.eps if self.options.kernel == "trig" else 1e-30
        return {"feature_map": "identity", "eps": eps, "impl": self.options.impl}

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q)·φ(k) over its sum, [B, H, T, S], in units of the largest exponent among the keys that a query sees."""
        kernel = self.options.kernel
        least = 0.3 / math.sqrt(2 * self.options.features) if kernel == "trig" else {"relu": 1e-3}.get(kernel, 1e-9)
        eps = least if self.options.eps is None else self.options.eps
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        seen = seen.tril() if self.options.causal else seen
        phi, exponents = [], []
        for t in (q, k):
            t = wide(t).transpose(1, 2) / math.sqrt(math.sqrt(t.shape[-1]))  # [B, H, T, K]
            p = t @ self.directions.to(t.dtype).mT if self.options.features else t
            p = torch.cat((p, -p), dim=-1) if kernel == "hyperbolic" else p
            half = (t * t).sum(-1) / 2
            if kernel == "relu":
                phi.append(p.clamp(min=0) + eps)
                exponents.append(torch.zeros_like(half))
            elif kernel == "trig":
                phi.append(torch.cat((p.sin(), p.cos()), dim=-1) / self.options.features**0.5)
                exponents.append(half)
            else:
                exponents.append((p - half[..., None]).max(-1).values)
                phi.append((p - half[..., None] - exponents[-1][..., None]).exp() + eps)
        exponent = exponents[1][:, :, None].masked_fill(~seen, -torch.inf)  # [B, H, T, S]
        unit = exponent.amax(-1, keepdim=True).detach()
        if kernel == "trig":
            unit = (unit / math.log(2)).ceil() * math.log(2)
        weights = phi[0] @ phi[1].mT * (exponent - unit).exp()
        d = weights.sum(-1, keepdim=True)
        if kernel == "trig":
            d = torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps))
        return (weights / d).to(q.dtype)
