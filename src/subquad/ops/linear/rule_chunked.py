"""The torch path of the rules that multiply the state by a matrix: a step, and whole sequences in chunks of C tokens.

With g_t the sum of a chunk's logarithmic gates up to and with token t, and S the state that enters the chunk:

    P(x, k)[t, s] = Σ_c x_tc k_sc exp(g_tc - g_sc) for s <= t     how a row x_t meets the key of s, faded since s
    A = β ∘ P(k, k) below its diagonal,  T = (I + A)⁻¹            each token corrects what those before it wrote
    W = T(β e^g k),  U = T(β v) - W S                             what the tokens write; U = v without a delta rule
    o = (q e^g) S + P(q, k) U                                     what they read
    S ← Diag(e^(g_C)) S + (k e^(g_C - g))ᵀ U                      what leaves the chunk

All of it is products of small matrices for all chunks at once, apart from S, which goes from chunk to chunk in a loop.
Every exponent is at most 0, so that no decay is too strong.

As in chunked.py the work is done on slabs, some heads over a segment of tokens, and only the states between segments
are kept for the gradients. Legend, beside that of the package: C chunk, N chunks, G sequences = B·H, P = G·N, R rows of
states, D = K or 1: the width of the gates.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.ops.linear.chunked import FORGET, Layout, decay_between, divisor_of, each_slab, saturate
from subquad.ops.linear.rules import rule_step
from subquad.ops.linear.spec import RuleInputs
from subquad.ops.precision import uncast, wide_type

CHUNK = 32
SEGMENT = 512  # tokens that a CPU works on at once
HEADS = 8  # that it works on at once

Outputs = tuple[Tensor, Tensor, Tensor]  # o, the last state, the states between segments


def step(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None, s: Tensor, z: Tensor,
    normalize: bool, signed: bool, eps: float, inplace: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One token: q, k [B, H, K], v [B, H, V] -> o [B, H, V], s and z; z changes only if `normalize`."""
    dtype, (q, k, v) = v.dtype, (t.to(s.dtype) for t in (q, k, v))
    with uncast(q):
        o, s = rule_step(q, k, v, log_gate, beta, s, inplace)
        if normalize:
            d, column = rule_step(q, k, torch.ones_like(v[..., :1]), log_gate, beta, z[..., None], inplace)
            o, z = o / divisor_of(d, signed, eps), z if inplace else column[..., 0]
    return saturate(o, dtype).to(dtype), s, z


def outputs(x: RuleInputs, wide: bool, save: bool) -> Outputs:  # noqa: ARG001 (the gradients need all of them)
    """What `forward` fills, from shapes alone; the states between segments are [segments - 1, R, H, K, V]."""
    (batch, length, heads, width), dtype = x.v.shape, wide_type(x.v)
    state = x.sequences, heads, x.k.shape[-1], width
    cuts = 0 if x.cu_seqlens is not None else (length - 1) // _segment(x.v)
    return (
        x.v.new_empty(batch, length, heads, width, dtype=dtype if wide else x.v.dtype),
        x.v.new_empty(state, dtype=dtype),
        x.v.new_empty(cuts, *state, dtype=dtype),
    )


def forward(x: RuleInputs, wide: bool, save: bool) -> Outputs:
    o, s, kept = outputs(x, wide, save)
    start = torch.zeros_like(s) if x.s0 is None else x.s0

    def work(rows: slice, heads: slice) -> None:
        across = slice(None) if x.cu_seqlens is not None else rows
        now = start[across, heads]
        for i, part in enumerate(_segments(x)):
            if i > 0:
                kept[i - 1, across, heads] = now
            at = rows, part, heads
            c = _Chunks(at, x, now)
            c.layout.merge(c.read(), o[at])
            now = c.final
        s[across, heads] = now

    each_slab(work, x.q, _heads(x))
    return o, s, kept


def backward(do: Tensor, ds: Tensor | None, x: RuleInputs, done: Outputs) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, log_gate, beta and s0, from those of o and s and from what `forward` returned."""
    _, s, kept = done
    start, dstate = (torch.zeros_like(s) if t is None else t for t in (x.s0, ds))
    dq, dk, dv, dgate, dbeta = (
        None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in x[:5]
    )
    ds0 = torch.empty_like(s)

    def work(rows: slice, heads: slice) -> None:
        across = slice(None) if x.cu_seqlens is not None else rows
        dnow = dstate[across, heads]
        for i, part in reversed(list(enumerate(_segments(x)))):
            at = rows, part, heads
            c = _Chunks(at, x, kept[i - 1, across, heads] if i > 0 else start[across, heads])
            made = c.backward(c.split(do[at]), dnow)
            for gradient, out in zip(made[:-1], (dq, dk, dv, dgate, dbeta), strict=True):
                if gradient is not None and out is not None:
                    out = out[at]
                    c.layout.merge(gradient, out if out.dim() == 4 else out[..., None])
            dnow = made.start
        ds0[across, heads] = dnow

    each_slab(work, x.q, _heads(x))
    return dq, dk, dv, dgate, dbeta, None if x.s0 is None else ds0


def _segment(v: Tensor) -> int:
    """Tokens worked on at once: on a CPU what its caches hold, on a GPU what fills it."""
    return SEGMENT if v.device.type == "cpu" else 1 << 20


def _segments(x: RuleInputs) -> list[slice]:
    length, size = x.v.shape[1], _segment(x.v)
    if x.cu_seqlens is not None:
        return [slice(0, length)]
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def _heads(x: RuleInputs) -> int:
    """Heads of any rows worked on at once: more of them where sequences are short."""
    return HEADS * _segment(x.v) // _segments(x)[0].stop


class _Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_gate: Tensor | None
    beta: Tensor | None
    start: Tensor


class _Delta(NamedTuple):
    """What the delta rule needs of each chunk, before the state that enters it is known."""

    beta: Tensor  # [P, C, 1]
    k_in: Tensor  # e^g k [P, C, K]: how the keys read the state
    scores: Tensor  # P(k, k) below its diagonal [P, C, C]
    solve: Tensor  # T [P, C, C]
    w: Tensor  # W [P, C, K]
    tv: Tensor  # T(β v) [P, C, V], which becomes U


class _Chunks:
    """Some rows and heads over some tokens, laid out in chunks, with the state that enters each chunk."""

    def __init__(self, at: tuple[slice, slice, slice], x: RuleInputs, start: Tensor):
        rows, part, _ = at
        q, k, v = (t[at] for t in x[:3])
        batch, length, heads, _ = v.shape
        self.dtype = wide_type(v)
        lengths = None if x.lengths is None else x.lengths[rows] - part.start
        size = 1 << (min(length, CHUNK) - 1).bit_length()  # a power of two, to be halved
        self.layout = Layout((batch, length, heads), size, lengths, x.cu_seqlens)
        self.q, self.k, self.v = (self.split(t) for t in (q, k, v))
        self.gates = self._gates(None if x.log_gate is None else x.log_gate[at])
        readers = [self.q] if x.beta is None else [self.q, self.k]
        (self.scores, *kk), (self.q_in, *k_in), self.k_out = self.gates.meet(readers, self.k)
        self.delta = None if x.beta is None else self._delta(self.split(x.beta[at][..., None]), kk[0], k_in[0])
        # U without the part of the state, which `_travel` subtracts
        self.u = self.v if self.delta is None else self.delta.tv
        self.final = self._travel(start)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H, D] -> [P, C, D], zeros where no token is."""
        return self.layout.split(x if wide_type(x) == self.dtype else x.to(self.dtype))[0]

    def _gates(self, log_gate: Tensor | None) -> "_HeadGates | _ChannelGates":
        """[B, T, H], [B, T, H, K] or none"""
        if log_gate is None:
            return _HeadGates(None, self.k)
        if log_gate.dim() == 4:
            return _ChannelGates(self.split(log_gate))
        # differences of sums are float64, so that a strong gate costs those after it no precision
        (gate,) = self.layout.split(log_gate[..., None].to(torch.float64))
        return _HeadGates(gate, self.k)

    def _delta(self, beta: Tensor, scores: Tensor, k_in: Tensor) -> _Delta:
        scores.tril_(-1)
        solve = _inverse(beta * scores)
        writes = solve * beta.mT  # T diag(β)
        return _Delta(beta, k_in, scores, solve, torch.bmm(writes, k_in), torch.bmm(writes, self.v))

    def read(self) -> Tensor:
        """o [P, C, V]"""
        return torch.bmm(self.q_in, self.enter).baddbmm_(self.scores, self.u)

    def _travel(self, start: Tensor) -> Tensor:
        """Hand the state on from chunk to chunk: start [R, H, K, V] -> the states after each sequence.

        Leaves the state that enters each chunk, the one that leaves it [P, K, V], and U [P, C, V] in `self`.
        """
        packed = self.layout.packed
        k_out, total, u = self._by_chunk(self.k_out), self._by_chunk(self.gates.total), self._by_chunk(self.u)
        w = None if self.delta is None else self._by_chunk(self.delta.w)
        groups, chunks = u.shape[:2]
        enter = u.new_empty(groups, chunks, *start.shape[2:])
        if packed:
            starts, begins = start.transpose(0, 1).index_select(1, self.layout.row), self._edges(self.layout.first)
            leaves = list(torch.empty_like(enter).unbind(1))
            enter[:, 0] = starts[:, 0]
        else:
            leaves = [*enter.unbind(1)[1:], enter.new_empty(groups, *start.shape[2:])]
            enter[:, 0] = start.flatten(0, 1)  # [G, K, V]
        for n in range(chunks):
            if packed and n > 0:
                torch.where(begins[n], starts[:, n], leaves[n - 1], out=enter[:, n])
            s = enter[:, n]
            if w is not None:
                u[:, n].baddbmm_(w[:, n], s, alpha=-1)
            torch.mul(total[:, n], s, out=leaves[n]).baddbmm_(k_out[:, n].mT, u[:, n])
        self.enter, self.leave = enter.flatten(0, 1), leaves
        return self._at_edges(leaves, self.layout.last) if packed else leaves[-1].unflatten(0, (self.layout.batch, -1))

    def _travel_back(self, do: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of U, of the state that leaves each chunk, and of the start, from those of o and the end."""
        packed = self.layout.packed
        du = self._by_chunk(torch.bmm(self.scores.mT, do))
        denter = self._by_chunk(torch.bmm(self.q_in.mT, do))
        total, k_out = self._by_chunk(self.gates.total), self._by_chunk(self.k_out)
        w = None if self.delta is None else self._by_chunk(self.delta.w)
        if packed:
            ends, dfinals = self._edges(self.layout.last), dfinal.transpose(0, 1).index_select(1, self.layout.row)
            ds = torch.zeros_like(dfinals[:, 0])
        else:
            ds = dfinal.flatten(0, 1)
        dleave, dstarts = [], []
        for n in reversed(range(self.layout.chunks)):
            if packed:
                ds = torch.where(ends[n], dfinals[:, n], ds)
            dleave.append(ds)
            du[:, n].baddbmm_(k_out[:, n], ds)
            ds = torch.addcmul(denter[:, n], total[:, n], ds)
            if w is not None:
                ds.baddbmm_(w[:, n].mT, du[:, n], alpha=-1)
            dstarts.append(ds)
        dstart = (
            self._at_edges(dstarts[::-1], self.layout.first) if packed else ds.unflatten(0, (self.layout.batch, -1))
        )
        return du.flatten(0, 1), torch.stack(dleave[::-1], 1).flatten(0, 1), dstart

    def _by_chunk(self, x: Tensor) -> Tensor:
        """[P, ...] -> [G, N, ...]"""
        return x.unflatten(0, (-1, self.layout.chunks))

    def _edges(self, edge: Tensor) -> Tensor:
        """Whether each chunk is the first or the last one of its sequence: [R] -> [N]."""
        return torch.arange(self.layout.chunks, device=edge.device) == edge[self.layout.row]

    @staticmethod
    def _at_edges(states: list[Tensor], edge: Tensor) -> Tensor:
        """Those of N states [G, K, V] at the first or the last chunk of each sequence [R, H, K, V]."""
        return torch.stack(states).index_select(0, edge)

    def backward(self, do: Tensor, dfinal: Tensor) -> _Gradients:
        """Formula by formula from the last to the first, for gradients of o [P, C, V] and of the last states."""
        du, dleave, dstart = self._travel_back(do, dfinal)
        dq, dk_read = self.gates.pull(torch.bmm(do, self.u.mT), self.q, self.k)
        dq.addcmul_(torch.bmm(do, self.enter.mT), self.gates.reach)
        dk_out = torch.bmm(self.u, dleave.mT).mul_(self.gates.rest)
        # each product has a factor exp(g_t) of the token that reads and exp(-g_s) of the token that is read
        until, since = self.q * dq, dk_read.add_(dk_out)
        dk, dv, dbeta = since, du, None
        if self.delta is not None:
            beta, k_in, scores, solve, _, _ = self.delta
            dright = torch.bmm(solve.mT, du)  # the gradient of β(v - k_in S), which T maps to U
            da = torch.bmm(dright, self.u.mT).neg_().tril_(-1)
            error = torch.baddbmm(self.v, k_in, self.enter, alpha=-1)
            dbeta = torch.linalg.vecdot(dright, error).add_(torch.linalg.vecdot(da, scores))[..., None]
            dv = beta * dright
            dk_asks, dk_asked = self.gates.pull(beta * da, self.k, self.k)
            dk_asks.addcmul_(torch.bmm(dv, self.enter.mT), self.gates.reach, value=-1)
            until.addcmul_(self.k, dk_asks)
            since.add_(dk_asked)
            dk = since + dk_asks
        dgate = self.gates.gradient(until.addcmul_(self.k, since, value=-1), dleave, self._leaving())
        return _Gradients(dq, dk, dv, dgate, dbeta, dstart)

    def _leaving(self) -> Tensor:
        return torch.stack(self.leave, 1).flatten(0, 1)


class _HeadGates:
    """A gate for each head, or none: gate [P, C, 1] in float64, 0 where no token is."""

    def __init__(self, gate: Tensor | None, k: Tensor):
        size = k.shape[1]
        self.gate = gate
        if gate is None:
            self.within = torch.ones(size, size, dtype=k.dtype, device=k.device).tril_()
            self.reach = self.rest = self.total = k.new_ones(1).expand(k.shape[0], 1, 1)
        else:
            cumulated = gate.clamp(min=FORGET).cumsum(1)
            end = cumulated[:, -1:]
            self.reach, self.rest, self.total = (x.exp().to(k.dtype) for x in (cumulated, end - cumulated, end))
            self.within = decay_between(cumulated[..., 0], k.dtype, strict=False)

    def meet(self, rows: list[Tensor], k: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """P(x, k) [P, C, C] and e^g x for each x of rows, and e^(g_C - g) k."""
        scores = [torch.bmm(x, k.mT).mul_(self.within) for x in rows]
        return (scores, rows, k) if self.gate is None else (scores, [x * self.reach for x in rows], k * self.rest)

    def pull(self, dscores: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and k from those of P(x, k)."""
        dscores = dscores * self.within
        return torch.bmm(dscores, k), torch.bmm(dscores.mT, x)

    def gradient(self, dcumulated: Tensor, dleave: Tensor, leave: Tensor) -> Tensor | None:
        """The gradients of the gates from those of g [P, C, K], without the part through the state that leaves."""
        if self.gate is None:
            return None
        dcumulated = dcumulated.sum(-1, keepdim=True)
        dcumulated[:, -1, 0] += torch.linalg.vecdot(dleave.flatten(1), leave.flatten(1))
        return _uncumulate(dcumulated, self.gate)


class _ChannelGates:
    """A gate for each column of k: gate [P, C, K], 0 where no token is.

    P(x, k) is found in blocks of tokens, of two, of four and so on: the right half of a block reads the left one, with
    rows faded since the border between them, x exp(g_t - g_border), and keys faded until it, k exp(g_border - g_s).
    They are what the half blocks had, faded over the other half. As sums of gates are never subtracted, a strong gate
    costs the others no precision.
    """

    def __init__(self, gate: Tensor):
        self.gate = gate
        self.cut = gate.clamp(min=FORGET)
        self.total = self.cut.sum(1, keepdim=True).mT.exp()

    def meet(self, rows: list[Tensor], k: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """P(x, k) [P, C, C] and e^g x for each x of rows, and e^(g_C - g) k."""
        size, first = k.shape[1], self.cut.exp()
        scores = [torch.diag_embed(torch.linalg.vecdot(x, k)) for x in rows]
        rows, k = [x * first for x in rows], k.clone()
        half, sums = 1, self.cut
        while half < size:
            left, right = sums[:, ::2], sums[:, 1::2]  # of the gates of each half [P, C / 2·half, K]
            keys = _halves(k, half)[0]
            for x, product in zip(rows, scores, strict=True):
                readers = _halves(x, half)[1]
                _corners(product, half).copy_(readers @ keys.mT)
                readers.mul_(left.exp()[:, :, None])
            keys.mul_(right.exp()[:, :, None])
            sums = left + right
            half *= 2
        return scores, rows, k

    @functools.cached_property
    def _fades(self) -> tuple[list[tuple[int, Tensor, Tensor]], Tensor, Tensor]:
        """How the keys of a left half and the rows of a right one fade, for each size of half; e^g; e^(g_C - g)."""
        until = self.cut.clone()  # Σ of the gates of a block up to and with each token
        after = torch.zeros_like(until)  # Σ of those after it
        levels: list[tuple[int, Tensor, Tensor]] = []
        half = 1
        while half < until.shape[1]:
            (before, right), (left, _) = _halves(until, half), _halves(after, half)
            levels.append((half, left.exp(), right.exp()))
            left += right[:, :, -1:]
            right += before[:, :, -1:]
            half *= 2
        return levels, until.exp_(), after.exp_()

    @property
    def reach(self) -> Tensor:
        return self._fades[1]

    @property
    def rest(self) -> Tensor:
        return self._fades[2]

    def pull(self, dscores: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and k from those of P(x, k)."""
        diagonal = dscores.diagonal(0, 1, 2)[..., None]
        dx, dk = diagonal * k, diagonal * x
        for half, to_border, from_border in self._fades[0]:
            corner = _corners(dscores, half)
            rows, keys = _halves(x, half)[1] * from_border, _halves(k, half)[0] * to_border
            _halves(dx, half)[1].addcmul_(corner @ keys, from_border)
            _halves(dk, half)[0].addcmul_(corner.mT @ rows, to_border)
        return dx, dk

    def gradient(self, dcumulated: Tensor, dleave: Tensor, leave: Tensor) -> Tensor:
        """The gradients of the gates from those of g [P, C, K], without the part through the state that leaves."""
        dcumulated[:, -1] += torch.linalg.vecdot(dleave, leave)
        return _uncumulate(dcumulated, self.gate)


def _uncumulate(dcumulated: Tensor, gate: Tensor) -> Tensor:
    """The gradients of gates from those of their sums; one that was cut to FORGET has none."""
    return dcumulated.flip(1).cumsum(1).flip(1).masked_fill_(gate < FORGET, 0)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The left and the right halves of blocks of tokens: [P, C, D] -> two views [P, C / 2·half, half, D]."""
    left, right = x.unflatten(1, (-1, 2, half)).unbind(2)
    return left, right


def _corners(scores: Tensor, half: int) -> Tensor:
    """Where the right half of each block meets its left half: [P, C, C] -> a view [P, C / 2·half, half, half]."""
    blocks = scores.unflatten(2, (-1, 2, half)).unflatten(1, (-1, 2, half))  # [P, b, 2, half, b, 2, half]
    return blocks[:, :, 1, :, :, 0].diagonal(0, 1, 3).movedim(-1, 1)


def _inverse(a: Tensor) -> Tensor:
    """(I + a)⁻¹ for a [P, C, C] that is zero on and above its diagonal."""
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(a, one, upper=False, unitriangular=True)
