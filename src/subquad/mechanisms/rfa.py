"""Random feature attention: a Gaussian kernel on the unit sphere as sines and cosines, with a gate that forgets.

Paper       Peng et al. 2021, "Random Feature Attention", arXiv:2103.02143, §3
Definition  oₜ = φ(qₜ)ᵀSₜ / φ(qₜ)ᵀzₜ,  φ(x) = (sin Wx̂, cos Wx̂)/√M,  x̂ = x/|x|,  W = Ω diag(σ)/τ
            E φ(q)·φ(k) = exp(-|σ∘(q̂ - k̂)|²/2τ²), and for σ = 1 that is the softmax weight exp(q̂·k̂/τ²) up to a constant
            gate=False   Sₜ = Σₛ φ(kₛ)vₛᵀ,  zₜ = Σₛ φ(kₛ), with s ≤ t when causal, every s otherwise
            gate=True    Sₜ = gₜSₜ₋₁ + (1 - gₜ)φ(kₜ)vₜᵀ,  zₜ likewise,  gₜ = sigmoid(w·xₜ + b) a head; causal only
            Ω [features, K] for each head, Gaussian; σ [K] for each head, learned, 1 at first
Cost        train O(T·M·V) time, O(T·(M + V)) memory; decode O(M·V) a token; state H·M·(V + 1), with M = 2·features.
            On a GPU, kernels compute the features where they use them if there is no gate: O(T·(K + V)) memory
Departures  the denominator d can be near zero or negative, unlike a sum of Gaussians. We use sign(d)·max(|d|, eps·e)
            with its standard error e = √(Σₛ wₛ²/M) and the weight wₛ of key s, 1 without a gate: within e of zero, d is
            noise. √Σₛ wₛ² is rounded to a power of two. The authors' release raises d to at least 1. The paper draws Ω
            from a pool for each batch in training: call `redraw` before the batch
Verified    tests/mechanisms/test_rfa.py; the release's masked and incremental functions, which have no gate, in
            float64: 1e-15 with |x| in place of their |x| + 0.001, where d is above 1
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import check_eps, refuse
from subquad.mechanisms import base
from subquad.mechanisms.attention import QKV
from subquad.mechanisms.base import AtLeast1
from subquad.mechanisms.kernelised import Features, Kernelised, Memory
from subquad.ops.linear import LinearState, linear_attention, linear_attention_read, linear_attention_sums
from subquad.ops.linear.featured import Inputs, Result, Spec, featured_attention, featured_step, fuses
from subquad.ops.precision import wide, wide_type
from subquad.ops.random_features import SHORT, draw_directions, fourier


class State(NamedTuple):
    s: Tensor  # [B, H, M, V] at least float32
    z: Tensor  # [B, H, M]
    weight_squares: Tensor  # [B, H] Σ wₛ²
    position: Tensor  # [B]


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    features: AtLeast1 = 64  # directions; each gives a sine and a cosine
    gate: bool = False  # a learned decay, for recency
    tau: float = 1.0  # temperature: smaller is sharper
    orthogonal: bool = False  # features drawn orthogonal, which lowers their variance
    eps: float = 0.3  # the least size of a denominator, in units of its standard error

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tau > 0:
            refuse("tau", self.tau, "a number above 0")
        check_eps(self.eps, least=1e-20)  # it is divided by √(2·features)
        if self.gate and not self.causal:
            refuse("gate", self.gate, "False with causal=False, since forgetting needs an order")


class RFA(Kernelised):
    small = ({"features": 24}, {"features": 24, "gate": True}, {"features": 30, "orthogonal": True, "tau": 0.8})
    options: Options
    directions: Tensor  # [H, features, K], Ω

    def __init__(self, options: Options):
        super().__init__(options)
        self.sigma = nn.Parameter(torch.ones(options.heads, self.width))
        self.gate = nn.Linear(options.dim, options.heads) if options.gate else None
        self.register_buffer("directions", torch.empty(options.heads, options.features, self.width))
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        o, generator = self.options, generator or self._generator()
        self.directions.copy_(draw_directions(o.heads, o.features, self.width, generator, orthogonal=o.orthogonal))

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        q, k, v = self._project(x)
        causal = self.options.causal
        if self._fuses(q, k, v):
            squares = self._squares(None, None, x, None)[0] if causal else _counts(k, lengths)
            return self._merge(self._fused(q, k, v, squares, None if causal else lengths).o)
        features = self._prepare(x, q, k, v)
        gate = features.gate
        squares = self._squares(gate, None, x, None)[0] if causal else _counts(features.k, lengths)
        return self._merge(self._sum(_over_unit(features, squares), lengths, lengths))

    def _cross(self, x: Tensor, lengths: Tensor | None, context: Tensor, context_lengths: Tensor | None) -> Tensor:
        q, k, v = self._project(x, context)
        if self._fuses(q, k, v):
            return self._merge(self._fused(q, k, v, _counts(k, context_lengths), context_lengths).o)
        features = self._prepare(x, q, k, v)
        features = _over_unit(features, _counts(features.k, context_lengths))
        return self._merge(self._sum(features, lengths, context_lengths))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        start = self._init_state(x.shape[0], None) if state is None else state
        if self._continues_on_kernels(x, start):
            q, k, v = self._project(x, position=start.position)
            if self._fuses(q, k, v):
                squares, last = self._squares(None, start.weight_squares, x, lengths)
                done = self._fused(q, k, v, squares, lengths, start)
                return self._merge(done.o), State(done.s, done.z, last, self._advance(start.position, x, lengths))
        return super()._prefill(x, lengths, start)

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        if self._continues_on_kernels(x, state):
            q, k, v = (t.squeeze(1) for t in self._project(x[:, None], position=state.position))
            if self._fuses(q, k, v):
                d, sigma, eps = self.directions, self.sigma / self.options.tau, self._how()["eps"]
                o, (s, z, squares) = featured_step(q, k, v, d, sigma, state[:3], Spec("gaussian"), eps, inplace)
                position = state.position.add_(1) if inplace else state.position + 1
                return self._merge(o), State(s, z, squares, position)
        return super()._step(x, state, inplace)

    def _fuses(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return self.gate is None and fuses(self.options.impl, q, k, v, self.directions, self.options.causal)

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, squares: Tensor, lengths: Tensor | None, state: State | None = None
    ) -> Result:
        """By kernels that compute features where they use them; queries are not divided, but their least denominator
        grows instead."""
        least = (self._how()["eps"] / _unit_of(squares, squares)[..., 0]).expand(q.shape[:3]).contiguous()
        start = (None, None) if state is None else (state.s, state.z)
        x = Inputs(q, k, v, self.directions, least, self.sigma / self.options.tau, lengths, *start)
        return featured_attention(x, Spec("gaussian", causal=self.options.causal), state is not None)

    def _features(self, x: Tensor, lengths: Tensor | None, state: State) -> Features:
        features = self._prepare(x, *self._project(x, position=state.position))
        squares, last = self._squares(features.gate, state.weight_squares, x, lengths)
        return _over_unit(features, squares)._replace(more=(last,))

    def _init_state(self, batch: int, capacity: int | None) -> State:
        s, z, position = self._empty(batch, 2 * self.options.features)
        return State(s, z, torch.zeros_like(z[..., 0]), position)

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        k, v = self.heads.keys(context)
        k = fourier(k, self._frequencies(), unit=True)
        return self.memory_type(*linear_attention_sums(k, v, feature_map="identity", lengths=lengths), lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        q = fourier(self.heads.queries(x), self._frequencies(), unit=True)
        q, sums = q * _unit_of(_counts(q, memory.lengths), q), LinearState(memory.s, memory.z)
        return self._merge(linear_attention_read(q, sums, feature_map="identity", eps=self._how()["eps"]))

    def _frequencies(self) -> Tensor:
        return self.directions * self.sigma[:, None] / self.options.tau  # [H, features, K]

    def _prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Features:
        """Features of q and k, v, and the log gate; a gated key is scaled by 1 - g."""
        # float16 can hold neither a small 1 - g nor the gradient of a small denominator
        dtype = torch.float32 if v.dtype == torch.float16 else v.dtype
        frequencies = self._frequencies()
        q, k = (fourier(t, frequencies, unit=True, dtype=dtype) for t in (q, k))
        if self.gate is None:
            return Features(q, k, v.to(dtype))
        logit = self.gate(x).to(torch.promote_types(dtype, torch.float32))  # [B, T, H]
        return Features(q, (k * torch.sigmoid(-logit)[..., None]).to(dtype), v.to(dtype), F.logsigmoid(logit))

    @torch.no_grad()
    def _squares(
        self, gate: Tensor | None, start: Tensor | None, x: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Σ wₛ² up to each key, [B, T, H], and up to each row's last, [B, H]; `start` is the sum before the first."""
        exact = wide_type(self._like)
        start = x.new_zeros(x.shape[0], self.options.heads, dtype=exact) if start is None else start
        if gate is None:
            upto = ranks.positions(x.shape[1], x.device)[:, None] + 1
            return start[:, None] + upto, self._advance(start, x, None if lengths is None else lengths[:, None])
        gate = gate.to(exact)  # wₜ² = (1 - gₜ)², and what came before shrinks by gₜ²
        one, own = torch.ones_like(gate)[..., None], torch.expm1(gate).square()[..., None]
        before = LinearState(start[..., None, None], start[..., None])
        how = {**self._how(), "normalize": False, "return_state": True}
        sums, last = linear_attention(one, own, one, log_gate=2 * gate, lengths=lengths, initial_state=before, **how)
        return sums[..., 0], last.z[..., 0]

    def _how(self) -> dict[str, Any]:
        eps = self.options.eps / (2 * self.options.features) ** 0.5
        return {"feature_map": "identity", "eps": eps, "impl": self.options.impl}

    def _qkv(self, x: Tensor) -> QKV:
        """One more channel holds the part of a score that depends only on the key: its norm under σ, and the gates."""
        q, k, v = self._project(x)
        q, k = _unit(q), _unit(k)
        sigma = self.sigma / self.options.tau
        bias = -(k * sigma).square().sum(-1) / 2  # [B, T, H]
        if self.gate is not None:
            logit = self.gate(x).to(bias.dtype)
            bias = bias + F.logsigmoid(-logit) - F.logsigmoid(logit).cumsum(1)
        scale = (self.width + 1) ** 0.5  # softmax(q·k/√K) divides by it
        q = torch.cat((q * sigma * scale, torch.full_like(q[..., :1], scale)), dim=-1)
        return q, torch.cat((k * sigma, bias[..., None]), dim=-1), v

    def _define(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self._project(x, context)
        return self._weights(q, k, None if self.gate is None else torch.sigmoid(wide(self.gate(x)))), v

    def _weights(self, q: Tensor, k: Tensor, gate: Tensor | None = None) -> Tensor:
        """(1 - gₛ) gₛ₊₁ ... gₜ φ(qₜ)·φ(kₛ) over its sum, [B, H, T, S], with the gate [B, T, H]"""
        q, k = _unit(q), _unit(k)
        w = self.directions.to(q.dtype) * self.sigma.to(q.dtype)[:, None] / self.options.tau  # [H, features, K]
        q, k = (t.transpose(1, 2) @ w.mT for t in (q, k))  # [B, H, T, features]
        weights = (q.sin() @ k.sin().mT + q.cos() @ k.cos().mT) / self.options.features
        seen = torch.ones_like(weights)  # the weight of each key besides φ(q)·φ(k)
        if gate is not None:
            g = gate.mT  # [B, H, T]
            later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)  # s < r
            decay = torch.where(later, g[:, :, None], 1.0).cumprod(-1).mT  # product over s < r <= t, [B, H, T, S]
            seen = decay * (1 - g)[:, :, None]
        if self.options.causal:
            seen = seen.tril()
        unit = 2 ** (0.7 * (seen * seen).sum(-1, keepdim=True).clamp(min=1e-30)).log2().div(2).floor()
        weights = weights * seen
        d, least = weights.sum(-1, keepdim=True), self.options.eps * unit / math.sqrt(2 * self.options.features)
        return weights / torch.where(d < 0, torch.minimum(d, -least), torch.maximum(d, least))


def _counts(like: Tensor, lengths: Tensor | None) -> Tensor:
    """The number of keys [B, S, H, ·] of a row, which is Σ wₛ² for all its queries without a gate: [B, 1, 1]"""
    whole = ranks.whole_lengths(lengths)
    count = torch.full_like(like[:, 0, 0, 0], ranks.whole_length(like.shape[1])) if whole is None else whole
    return count[:, None, None].to(wide_type(like))


def _over_unit(features: Features, squares: Tensor) -> Features:
    """Divide queries by √Σ wₛ², so that the smallest denominator is the same for all of them."""
    return features._replace(q=features.q * _unit_of(squares, features.q))


def _unit_of(squares: Tensor, like: Tensor) -> Tensor:
    """1/√squares [B, T, H] as a factor of queries, rounded to a power of two, so that no digit of a quotient changes.

    The result changes where 0.7·squares is a power of 4. No number of keys is there, and no fully open gate.
    """
    exponent = (0.7 * squares.detach()).clamp(min=1e-30).log2().div(2).floor()
    return torch.exp2(-exponent)[..., None].to(like.dtype)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in at least float32."""
    return F.normalize(wide(x), dim=-1, eps=SHORT)
