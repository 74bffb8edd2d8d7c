"""Efficient attention: normalise q over features and k over positions, and no T x T matrix is needed.

Paper       Shen et al. 2021, "Efficient Attention: Attention with Linear Complexities", arXiv:1812.01243, §3
Definition  o = ρq(Q) (ρk(K)ᵀ V)
            normalize="softmax"  ρq a softmax over the features of each query, ρk a softmax over positions for each
                                 feature: oₜ = Σ_c softmax(qₜ)_c Σₛ e^kₛc vₛ / Σₛ e^kₛc
            normalize="scaling"  ρq(Q) = Q/√n, ρk(K) = K/√n with n keys: oₜ = Σₛ (qₜ·kₛ) vₛ / n
            causal: both sums over s ≤ t, and n = t, so each feature's normaliser changes with t
Cost        train O(T·K·V) time, O(T·(K + V)) memory; decode O(K·V) a token; state H·K·(V + 2)
Departures  the paper is bidirectional; the causal form is ours. The paper's residual belongs to the block around this
Verified    tests/mechanisms/test_efficient.py; the authors' release (softmax, bidirectional) with copied weights, 1e-15
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import ranks
from subquad.graphs import capturing
from subquad.mechanisms import base
from subquad.mechanisms.kernelised import Kernelised
from subquad.ops import linear
from subquad.ops.lengths import first, keep, padding, symbolic
from subquad.ops.linear.normalised import Inputs, fuses, normalised_attention, normalised_step
from subquad.ops.precision import uncast, wide, wide_type
from subquad.ops.prefix import running_sum

BLOCK = 64
LIMIT = 30.0  # up to this, exponentials of logits, their sums and quotients are far inside float32 and bfloat16
NOTHING = -1e30  # a feature's largest logit before the first key; finite, so that differences are numbers
PADDED = -1e38  # below NOTHING: a padded key has weight 0 even if it is the only one


class State(NamedTuple):
    s: Tensor  # [B, H, K, V] at least float32: sums of exp(k - max) v, or of k v with scaling
    z: Tensor  # [B, H, K] sums of exp(k - max), or of k
    max: Tensor  # [B, H, K] the largest k so far
    position: Tensor  # [B]


class Memory(NamedTuple):
    s: Tensor  # [B, H, K, V] at least float32: ρk(K)ᵀ V, or with scaling the mean of k v
    lengths: Tensor  # [B]


@dataclass(frozen=True, kw_only=True)
class Options(base.KernelOptions):
    normalize: Literal["softmax", "scaling"] = "softmax"  # see the definition


class Efficient(Kernelised):
    unused = Kernelised.unused | {"rotary"}
    small = ({}, {"normalize": "scaling"})
    options: Options

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        if not self.options.causal:
            return super()._forward(x, lengths)
        q, k, v = self.heads.split(x)
        if self._fuses(q, k, v):
            return self._merge(normalised_attention(Inputs(q, k, v), causal=True)[0])
        return self._prefill(x, lengths, None)[0]

    def _fuses(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether kernels compute both softmaxes where they use them."""
        return self.options.normalize == "softmax" and fuses(self.options.impl, q, k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_lengths: Tensor | None) -> Tensor:
        if self._fuses(q, k, v):
            return normalised_attention(Inputs(q, k, v, key_lengths), causal=False)[0]
        if self.options.normalize == "softmax":
            with uncast(v):
                weight, z = _exponentials(_mask(_roomy(k), key_lengths))
                # divide the queries by the normalisers of features, instead of a softmax over positions
                q = (q.softmax(-1, z.dtype) * z.reciprocal()[:, None]).to(weight.dtype)
            return linear.linear_attention(q, weight, _roomy(v), causal=False, **self._how()).to(v.dtype)
        n: int | Tensor = ranks.whole_length(k.shape[1])
        if (rows := ranks.whole_lengths(key_lengths)) is not None:
            n = rows.clamp(min=1).to(wide_type(k))[:, None, None, None]
        q, k = (q / n**0.5).to(v.dtype), (k / n**0.5).to(v.dtype)
        return linear.linear_attention(q, k, v, causal=False, key_lengths=key_lengths, **self._how())

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        state = self._init_state(x.shape[0], None) if state is None else state
        q, k, v = self.heads.split(x)
        position = self._advance(state.position, x, lengths)
        if self._continues_on_kernels(x, state) and self._fuses(q, k, v):
            o, last = normalised_attention(Inputs(q, k, v, lengths, *state[:3]), causal=True, state=True)
            return self._merge(o), State(*last, position)
        if self.options.normalize == "softmax" and ranks.active() is not None:
            return self._prefill_part(x, k, v, lengths, state)
        if self.options.normalize == "softmax":
            with uncast(x):
                if _moderate(k, state.max):
                    sums = self._plain_sums(_roomy(q), _mask(_roomy(k), lengths), _roomy(v), state)
                else:
                    sums = self._running_softmax(wide(q), _mask(wide(k), lengths), wide(v), state)
            return self._merge(sums[0]), State(*sums[1:], position)
        # divide by √t twice, as the paper divides both q and k, so that all numbers stay in the range of 16 bits
        n = state.position[:, None] + ranks.positions(x.shape[1], x.device) + 1
        root = n.to(state.s.dtype).sqrt()[..., None, None]  # [B, T, 1, 1]
        how = {"lengths": lengths, "initial_state": linear.LinearState(state.s, state.z), **self._how()}
        o, added = linear.linear_attention((q / root).to(v.dtype), k, v, return_state=True, **how)
        return self._merge(o / root), State(added.s, added.z, state.max, position)

    def _prefill_part(
        self, x: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """The part of a sequence that other ranks share: it continues the sums of the ranks before it."""
        k, v = _mask(wide(k), lengths), wide(v)
        most = k.detach().amax(1).clamp(min=NOTHING)  # [B, H, K]
        weight = (k - most[:, None]).exp()
        with uncast(x):
            s = torch.einsum("bthk,bthv->bhkv", weight, v)
        own = torch.cat((s, weight.sum(1)[..., None], most[..., None]), -1)
        *sums, peaks = ranks.gather(own, "states").split((v.shape[-1], 1, 1), -1)
        peaks = peaks.detach()  # [ranks, B, H, K, 1]

        def joined(upto: int) -> tuple[Tensor, Tensor, Tensor]:
            """s, z and the largest logit of the state and the ranks before `upto`."""
            largest = torch.cat((state.max[None, ..., None], peaks[:upto])).amax(0)
            before = (torch.arange(len(peaks), device=x.device) < upto).to(peaks.dtype)[:, None, None, None, None]
            units, old = (peaks - largest).clamp(max=0).exp() * before, (state.max[..., None] - largest).exp()
            s, z = ((part * units).sum(0) for part in sums)
            return s + state.s * old, z[..., 0] + state.z * old[..., 0], largest[..., 0]

        group = ranks.active()
        assert group is not None
        start = self.state_type(*joined(group.rank), state.position)
        with ranks.suspended():
            y, _ = self._prefill(x, lengths, start)
        return y, self.state_type(*joined(group.world), self._advance(state.position, x, lengths))

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        q, k, v = (t[:, 0] for t in self.heads.split(x[:, None]))  # [B, H, K]
        if self._continues_on_kernels(x, state) and self._fuses(q, k, v):
            o, (s, z, most) = normalised_step(q, k, v, state[:3], inplace)
            return self._merge(o), State(s, z, most, state.position.add_(1) if inplace else state.position + 1)
        if self.options.normalize == "scaling":
            root, before = (
                (state.position + 1).to(state.s.dtype).sqrt()[:, None, None],
                linear.LinearState(state.s, state.z),
            )
            o, added = linear.linear_attention_step((q / root).to(v.dtype), k, v, before, **self._how())
            return self._merge(o / root), State(*added, state.max, state.position + 1)
        q, k = wide(q), wide(k)
        largest = torch.maximum(state.max, k.detach())
        gain, gate = (k - largest).exp().flatten(1)[..., None], (state.max - largest).flatten(1)
        values = wide(v)[:, :, None].expand_as(state.s).flatten(1, 2)  # every feature sums all values: [B, H*K, V]
        before = linear.LinearState(state.s.flatten(1, 2)[:, :, None], state.z.flatten(1)[..., None])
        with uncast(x):
            _, sums = linear.linear_attention_step(
                torch.ones_like(gain), gain, values, before, log_gate=gate, **self._how()
            )
            s, z = sums.s.view_as(state.s), sums.z.view_as(state.z)
            o = (q.softmax(-1) / z)[:, :, None] @ s  # [B, H, 1, V]
        return self._merge(o[:, :, 0]), State(s, z, largest, state.position + 1)

    def _remember(self, context: Tensor, lengths: Tensor) -> Memory:
        k, v = self.heads.keys(context)
        if self.options.normalize == "softmax":
            weight, z = _exponentials(_mask(wide(k), lengths))
            sums = linear.linear_attention_sums(weight, v, feature_map="identity")
            return Memory(sums.s / z[..., None], lengths)
        k = wide(k) / lengths.clamp(min=1)[:, None, None, None]
        return Memory(linear.linear_attention_sums(k, v, feature_map="identity", lengths=lengths).s, lengths)

    def _recall(self, x: Tensor, lengths: Tensor | None, memory: Memory) -> Tensor:
        q = self.heads.queries(x)
        rho = wide(q).softmax(-1) if self.options.normalize == "softmax" else wide(q)
        sums = linear.LinearState(memory.s, memory.s[..., 0])  # z is not read, since there is no denominator
        return self._merge(linear.linear_attention_read(rho, sums, feature_map="identity", normalize=False))

    def _init_state(self, batch: int, capacity: int | None) -> State:
        s, z, position = self._empty(batch, self.width)
        return State(s, z, torch.full_like(z, NOTHING), position)

    def _plain_sums(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`_running_softmax` for logits up to LIMIT: their exponentials can be summed without rescaling."""
        weight, unit = k.exp(), state.max.clamp(-LIMIT, LIMIT).exp()
        before = linear.LinearState(state.s * unit[..., None], state.z * unit)
        z = running_sum(wide(weight).flatten(2), before.z.flatten(1)).unflatten(2, weight.shape[2:])
        z = z.clamp(min=math.exp(-LIMIT) / 2)  # smaller only if there is no key
        q = (q.softmax(-1, z.dtype) / z).to(weight.dtype)
        o, sums = linear.linear_attention(q, weight, v, initial_state=before, return_state=True, **self._how())
        largest = torch.maximum(state.max, k.detach().amax(1))
        unit = largest.clamp(-LIMIT, LIMIT).neg().exp()
        return o, sums.s * unit[..., None], sums.z * unit, largest

    def _running_softmax(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Causal softmax normalisation: o [B, T, H, V], and s, z, max after the last key.

        With L_tc the logarithm of a feature's normaliser up to t, key s has weight Σ_c exp(log ρ_tc + k_sc - L_tc) for
        query t: the exponent is never positive, but k_sc and L_tc may be large. So blocks of tokens are summed in units
        of each feature's largest logit so far. Gated linear attention carries these sums from block to block, with each
        feature as a head of width one. `_within` computes the pairs inside a block.
        """
        length = q.shape[1]
        # a graph that is compiled for any length has whole blocks: a smaller one would be for this length only
        whole = symbolic(length) or torch.compiler.is_compiling() or length > BLOCK // 2
        size = BLOCK if whole else 1 << (length - 1).bit_length()
        more = (0, 0, 0, padding(length, size))
        rho = F.pad(q.transpose(1, 2).log_softmax(-1), more).unflatten(2, (-1, size))  # [B, H, N, C, K]
        k = F.pad(k.transpose(1, 2), more, value=PADDED).unflatten(2, (-1, size))
        v = F.pad(v.transpose(1, 2), more).unflatten(2, (-1, size))

        largest = torch.cat((state.max[:, :, None], k.detach().amax(-2)), dim=2).cummax(dim=2).values  # [B, H, N+1, K]
        before, after = largest[:, :, :-1], largest[:, :, 1:]
        gate = (before - after).masked_fill(before == NOTHING, 0)  # nothing to decay yet
        gain = (k - after[..., None, :]).exp()
        added = gain.mT @ F.pad(v, (0, 1), value=1.0)  # [B, H, N, K, V+1], the last column for z
        start = torch.cat((state.s, state.z[..., None]), dim=-1)  # [B, H, K, V+1]
        tokens = added.transpose(1, 2).flatten(2, 3)  # [B, N, H*K, V+1]
        one = torch.ones_like(tokens[..., :1])
        before_all = linear.LinearState(start.flatten(1, 2)[:, :, None], torch.zeros_like(one[:, 0]))
        how = {"log_gate": gate.transpose(1, 2).flatten(2), "initial_state": before_all, **self._how()}
        sums = linear.linear_attention(one, one, tokens, **how)
        sums = sums.unflatten(2, start.shape[1:3]).transpose(1, 2)  # [B, H, N, K, V+1], after each block
        enter = torch.cat((start[:, :, None], sums[:, :, :-1]), dim=2)
        z = enter[..., -1].clamp(min=0.5)  # at least 1 if there was any key: the largest one adds 1
        past = (before + z.log())[..., None, :]  # [B, H, N, 1, K]
        normaliser = torch.logaddexp(past, k.logcumsumexp(-2))
        w = rho - normaliser
        o = (w + past).exp() @ (enter[..., :-1] / z[..., None]) + _within(w, normaliser, k, v)
        o = first(o.flatten(2, 3), length, 2).transpose(1, 2)
        return o, sums[:, :, -1, :, :-1], sums[:, :, -1, :, -1], largest[:, :, -1]

    def _how(self) -> dict[str, Any]:
        return {"feature_map": "identity", "normalize": False, "impl": self.options.impl}

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """ρq(Q) ρk(K)ᵀ, [B, H, T, S], one query at a time over the keys that it sees."""
        rows = []
        for t in range(q.shape[1]):
            q_t, seen = wide(q[:, t]), wide(k[:, : t + 1] if self.options.causal else k)
            if self.options.normalize == "softmax":
                row = torch.einsum("bhk,bshk->bhs", q_t.softmax(-1), seen.softmax(1))
            else:
                row = torch.einsum("bhk,bshk->bhs", q_t, seen) / seen.shape[1]
            rows.append(F.pad(row, (0, k.shape[1] - row.shape[-1])))
        return torch.stack(rows, dim=2).to(q.dtype)


def _within(w: Tensor, normaliser: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Σ_{s<=t} Σ_c exp(w_tc + k_sc) v_s in blocks of a power of two: w, normaliser, k [..., C, K], v [..., C, V].

    Computes each half by itself, then the weights of the first half's keys for the second half. The normaliser at the
    end of the first half is between these keys and the second half's normalisers: it splits the exponent into two <= 0.
    """
    if w.shape[-2] == 1:
        return (w + k).exp().sum(-1, keepdim=True) * v
    w, normaliser, k, v = (t.unflatten(-2, (2, -1)) for t in (w, normaliser, k, v))  # [..., 2, C/2, .]
    o = _within(w, normaliser, k, v)
    between = normaliser[..., 0, -1:, :]
    scores = (w[..., 1, :, :] + between).exp() @ (k[..., 0, :, :] - between).exp().mT  # [..., C/2, C/2]
    return torch.cat((o[..., 0, :, :], o[..., 1, :, :] + scores @ v[..., 0, :, :]), dim=-2)


def _exponentials(k: Tensor) -> tuple[Tensor, Tensor]:
    """exp(k - shift) [B, S, H, K], and its sum over positions in at least float32 [B, H, K].

    The shift brings a feature's largest logit to within LIMIT. It is usually zero, so that k - shift is not rounded in
    16 bits before the exponential. If it is not zero, the difference is exact for the keys close enough to matter.
    """
    largest = ranks.largest(k.detach().amax(1, keepdim=True))
    weight = (k - (largest - largest.clamp(-LIMIT, LIMIT))).exp_()
    return weight, ranks.total(weight.sum(1, dtype=wide_type(k)), "states")


def _moderate(k: Tensor, largest: Tensor) -> bool:
    """Whether all logits, including the state's, are within LIMIT; False while a graph is recorded."""
    if torch.compiler.is_compiling() or capturing(k):
        return False
    low, high = torch.aminmax(k.detach())
    past = (largest.abs() <= LIMIT) | (largest == NOTHING)
    return bool((low >= -LIMIT) & (high <= LIMIT) & past.all())


def _mask(k: Tensor, lengths: Tensor | None) -> Tensor:
    mask = keep(lengths, k.shape[1])
    return k if mask is None else k.masked_fill(~mask[..., None, None], PADDED)


def _roomy(x: Tensor) -> Tensor:
    """x in a type that can hold exp(±LIMIT), which float16 cannot."""
    return x.float() if x.dtype == torch.float16 else x
