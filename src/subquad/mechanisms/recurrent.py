"""What retnet, gla, mamba2, deltanet and gated_deltanet share: a running sum [K, V] a head that forgets or corrects.

One projection makes everything that a token contributes: `mixed`, which a short convolution with SiLU goes over where
the paper has one, and `plain`. The rules of the sum are in `subquad.ops.linear`. A mechanism writes what a rule takes
of these two, and what becomes of its output.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.mechanisms.base import KernelOptions, Mixer, Traits, own_type
from subquad.ops.linear import LinearState, linear_attention, linear_attention_step
from subquad.ops.linear.rules import RuleName
from subquad.ops.precision import wide, wide_type
from subquad.ops.short_conv import ShortConv

WIDTH = 4  # of the short convolution, in tokens
EPS = 1e-6  # added to the squared norm of a key or query


class Sums(NamedTuple):
    """The state of a mechanism without a convolution."""

    s: Tensor  # [B, H, K, V] at least float32
    position: Tensor  # [B]


class SumsAndInputs(NamedTuple):
    """The state of a mechanism with one."""

    s: Tensor  # [B, H, K, V] at least float32
    ring: Tensor  # [B, 3, C], the last inputs of the convolution; ops/short_conv.py
    position: Tensor  # [B]


class Tokens(NamedTuple):
    """What a rule takes of the tokens. By the definition the third is the decay itself, not its logarithm."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    log_gate: Tensor | None = None  # [B, T, H] or [B, T, H, K]
    beta: Tensor | None = None  # [B, T, H]


class Recurrent(Mixer):
    """y = merge(o), o by one of the rules: causal only, in a state of constant size."""

    state_type: type[Any]
    traits = Traits(causal=True, bidirectional=False, state="constant")
    family, exponent = "gated and delta rules", 1.0
    splits = True
    unused = Mixer.unused | {"dropout", "rotary"}
    options: KernelOptions

    rule: ClassVar[RuleName]
    convolves: ClassVar[bool] = True  # a short convolution goes over `mixed`

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own_type(cls, "state_type", SumsAndInputs if cls.convolves else Sums)

    def __init__(self, options: KernelOptions, keys: int, values: int, mixed: int, plain: int, bias: bool = False):
        """`keys` and `values` are widths of a head, `mixed` and `plain` of all heads; `bias` is the convolution's."""
        super().__init__(options)
        self.keys, self.values, self.parts = keys, values, (mixed, plain)
        self.into = nn.Linear(options.dim, mixed + plain, bias=False)
        self.conv = ShortConv(mixed, range(1, WIDTH), bias=bias) if self.convolves else None
        self.out = nn.Linear(options.heads * values, options.dim, bias=False)

    # What a mechanism writes

    def _tokens(self, mixed: Tensor, plain: Tensor, position: Tensor | None) -> Tokens:
        """What the rule takes; rows start at `position` [B] (0 if None)."""
        raise NotImplementedError

    def _define(self, mixed: Tensor, plain: Tensor) -> Tokens:
        """The same as the paper writes it, for rows that start at 0, with the decay in the place of its logarithm."""
        raise NotImplementedError

    def _merge(self, o: Tensor, mixed: Tensor, plain: Tensor) -> Tensor:
        """o [B, T, H, V], in any type -> [B, T, D]: norm, gate and projection of the output."""
        raise NotImplementedError

    # What follows

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        mixed, plain = self.into(x).split(self.parts, dim=-1)
        if self.conv is not None:
            mixed = F.silu(self.conv(mixed))
        q, k, v, log_gate, beta = _exact(self._tokens(mixed, plain, None))
        o = linear_attention(q, k, v, lengths=lengths, log_gate=log_gate, beta=beta, **self._how())
        return self._merge(o, mixed, plain)

    def _init_state(self, batch: int, capacity: int | None) -> Any:
        s = self._zeros(batch, self.options.heads, self.keys, self.values, dtype=wide_type(self._like))
        ring = () if self.conv is None else (self.conv.make_ring(batch),)
        return self.state_type(s, *ring, self._zeros(batch, dtype=torch.int64))

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        state = self._init_state(x.shape[0], None) if state is None else state
        mixed, plain = self.into(x).split(self.parts, dim=-1)
        ring: tuple[Tensor, ...] = ()
        if self.conv is not None:
            mixed, after = self.conv.advance(mixed, state.ring, state.position, lengths)
            mixed, ring = F.silu(mixed), (after,)
        q, k, v, log_gate, beta = _exact(self._tokens(mixed, plain, state.position))
        how = {"initial_state": _without_divisor(state.s), "return_state": True, **self._how()}
        o, sums = linear_attention(q, k, v, lengths=lengths, log_gate=log_gate, beta=beta, **how)
        state = self.state_type(sums.s, *ring, self._advance(state.position, x, lengths))
        return self._merge(o, mixed, plain), state

    def _step(self, x: Tensor, state: Any, inplace: bool = False) -> tuple[Tensor, Any]:
        mixed, plain = self.into(x).split(self.parts, dim=-1)  # [B, ·]
        ring: tuple[Tensor, ...] = ()
        if self.conv is not None:
            mixed, after = self.conv.advance_one(mixed, state.ring, state.position, inplace)
            mixed, ring = F.silu(mixed), (after,)
        mixed, plain = mixed[:, None], plain[:, None]  # [B, 1, ·]
        tokens = _exact(self._tokens(mixed, plain, state.position))
        q, k, v = (t[:, 0] for t in tokens[:3])  # [B, H, ·]
        log_gate, beta = (None if t is None else t[:, 0] for t in tokens[3:])
        how = {"log_gate": log_gate, "beta": beta, "inplace": inplace, **self._how()}
        o, sums = linear_attention_step(q, k, v, _without_divisor(state.s), **how)
        position = state.position.add_(1) if inplace else state.position + 1
        return self._merge(o[:, None], mixed, plain)[:, 0], self.state_type(sums.s, *ring, position)

    def _step_inplace(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self._step(x, state, inplace=True)

    def _projections(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        heads = self.options.heads
        sizes = (heads * self.keys, heads * self.keys, heads * self.values)  # of q, k and v, the parts of `mixed`
        parts = self.into.weight[: self.parts[0]].split(sizes)
        return {**{name: (part, None) for name, part in zip("qkv", parts, strict=True)}, "o": (self.out.weight, None)}

    def _how(self) -> dict[str, Any]:
        return {"rule": self.rule, "feature_map": "identity", "normalize": False, "impl": self.options.impl}

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        mixed, plain = self._project_plainly(x)
        q, k, v, decay, beta = self._define(mixed, plain)
        if beta is None:
            o = torch.einsum("bhts,bshv->bthv", decayed_weights(q, k, decay), wide(v))
        else:
            o = corrected_sums(q, k, v, decay, beta)
        return self._merge(o, mixed, plain)

    def _pattern(self, x: Tensor) -> Tensor:
        """The weight of each value in each output, before norm and gate."""
        q, k, _, decay, beta = self._define(*self._project_plainly(x))
        if beta is None:
            return decayed_weights(q, k, decay).to(x.dtype)
        unit = torch.eye(x.shape[1], dtype=q.dtype, device=q.device)[:, None].expand(len(q), -1, q.shape[2], -1)
        return corrected_sums(q, k, unit, decay, beta).transpose(1, 2).to(x.dtype)  # value s is the unit vector s

    def _project_plainly(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`mixed` and `plain` by the definition."""
        mixed, plain = self.into(x).split(self.parts, dim=-1)
        if self.conv is not None:
            windows = F.pad(mixed, (0, 0, WIDTH - 1, 0)).unfold(1, WIDTH, 1)  # [B, T, C, 4], the last is the token's
            mixed = torch.einsum("btcw,wc->btc", windows, self.conv.weight.flip(0).to(mixed.dtype))
            mixed = F.silu(mixed if self.conv.bias is None else mixed + self.conv.bias)
        return mixed, plain


def decayed_weights(q: Tensor, k: Tensor, decay: Tensor | None) -> Tensor:
    """Σₖ qₜₖ kₛₖ aₛ₊₁ₖ ... aₜₖ for s <= t, [B, H, T, T]; the decay a is [B, T, H] or [B, T, H, K]."""
    assert decay is not None
    q, k, a = (t.transpose(1, 2) for t in (q, k, decay))  # [B, H, T, ·]
    later = torch.ones(a.shape[2], a.shape[2], dtype=torch.bool, device=a.device).triu(1)  # s < r

    def product(a: Tensor) -> Tensor:
        """[B, H, T] -> the product over s < r <= t, [B, H, T, S]"""
        return torch.where(later, a[:, :, None], 1.0).cumprod(-1).mT.tril()

    if a.dim() == 3:
        return (q @ k.mT).to(a.dtype) * product(a)
    columns = zip(q.unbind(-1), k.unbind(-1), a.unbind(-1), strict=True)
    return torch.stack([q[..., None] * k[..., None, :] * product(a) for q, k, a in columns]).sum(0)


def corrected_sums(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor) -> Tensor:
    """The delta rule, token by token: S ← a S, S ← S + β k (v - Sᵀk)ᵀ, o = Sᵀq; [B, T, H, V]."""
    s, outputs = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []  # [B, H, K, V]
    for t in range(q.shape[1]):
        if decay is not None:
            s = s * decay[:, t, :, None, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t])
        s = s + beta[:, t, :, None, None] * k[:, t, :, :, None] * error[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(outputs, 1)


def unit(x: Tensor) -> Tensor:
    """x / |x| along the last dimension, in x's type; zero for zero."""
    exact = wide(x)
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def draw_decay(heads: int, least: float) -> tuple[Tensor, Tensor]:
    """Parameters [H] of the decay exp(-exp(rate)·softplus(x + bias)), drawn as the release of Mamba-2 draws them.

    exp(rate) lies between `least` and 16, softplus(bias) between 0.001 and 0.1.
    """
    rate = torch.empty(heads).uniform_(least, 16).log()
    step = torch.empty(heads).uniform_(math.log(0.001), math.log(0.1)).exp()
    return rate, step + torch.log(-torch.expm1(-step))


def normalise(o: Tensor, norm: nn.RMSNorm) -> Tensor:
    """The norm of each head's output, in the module's type. Unlike the module it takes an o of any type."""
    return F.rms_norm(o, norm.normalized_shape, norm.weight.to(o.dtype), norm.eps).to(norm.weight.dtype)


def _exact(tokens: Tokens) -> Tokens:
    """In float32 instead of float16, beyond whose range products of q, k and v are before the norm."""
    if tokens.v.dtype != torch.float16:
        return tokens
    return tokens._replace(q=tokens.q.float(), k=tokens.k.float(), v=tokens.v.float())


def _without_divisor(s: Tensor) -> LinearState:
    """A state of the op; its z is not used here."""
    return LinearState(s, s.new_zeros(s.shape[:-1]))
