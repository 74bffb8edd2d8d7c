"""The torch path of linear attention: a step, and whole sequences in chunks of C tokens.

It works on slabs (some heads over a segment of tokens) that fit into the caches of a CPU, and passes the state from one
segment to the next. It keeps only the inputs, o and its divisor for the gradients, and computes the rest again there.

Legend, beside that of the package: C chunk, N chunks, G sequences = B·H, P = G·N chunks in all, R rows of states,
F = M·V + M numbers of a state.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.feature_maps import FEATURE_MAPS, FUSED, Fused
from subquad.ops.linear.spec import Inputs, Spec
from subquad.ops.precision import uncast, wide_type

SEGMENT = 4096  # tokens of a head that a CPU works on at once
BLOCK = 16  # chunks whose states are computed by one matrix product
FORGET = -1000.0  # smallest log gate: its exp is zero even in float64, and differences of its sums are exact to 1e-11

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # o, s, z, the divisor of each o, the states between segments


def step(
    q_t: Tensor, k_t: Tensor, v_t: Tensor, log_gate: Tensor | None, s: Tensor, z: Tensor, spec: Spec, inplace: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One token: q_t, k_t [B, H, K], v_t [B, H, V], log_gate [B, H] -> o [B, H, V], s and z."""
    phi = FEATURE_MAPS[spec.feature_map].apply
    q, k, x = phi(q_t.to(s.dtype)), phi(k_t.to(s.dtype)), v_t.to(s.dtype)
    if log_gate is not None:
        keep = log_gate.to(s.dtype).exp()[..., None]  # [B, H, 1]
        s, z = (s.mul_(keep[..., None]), z.mul_(keep)) if inplace else (s * keep[..., None], z * keep)
    if inplace:
        s.addcmul_(k[..., None], x[..., None, :])
    else:
        s = torch.addcmul(s, k[..., None], x[..., None, :])
    z = z.add_(k) if inplace else z + k
    with uncast(q):
        o = (q[..., None, :] @ s)[..., 0, :]  # [B, H, V]
    if spec.normalize:
        o = o / divisor_of((q * z).sum(-1, keepdim=True), spec.signed, spec.eps)
    return saturate(o, v_t.dtype).to(v_t.dtype), s, z


def outputs(x: Inputs, spec: Spec, save: bool) -> Outputs:  # noqa: ARG001 (the gradients need all of them)
    """Empty tensors for `forward` to fill; the states between segments are [segments - 1, R, H, F]."""
    batch, length, heads, features = x.q.shape
    v, rows, width = x.v, x.sequences, x.v.shape[-1]
    dtype = wide_type(v)
    cuts = 0 if x.cu_seqlens is not None or not spec.causal else (length - 1) // _segment(x.q)
    return (
        v.new_empty(batch, length, heads, width),
        v.new_empty(rows, heads, features, width, dtype=dtype),
        v.new_empty(rows, heads, features, dtype=dtype),
        v.new_empty((batch, length, heads) if spec.normalize else (0,), dtype=dtype),
        v.new_empty(cuts, rows, heads, features * (width + 1), dtype=dtype),
    )


def forward(x: Inputs, spec: Spec, save: bool) -> Outputs:
    o, s, z, divisor, starts = outputs(x, spec, save)
    state = _join(x.s0, x.z0, s, z)  # [R, H, F]

    def work(rows: slice, heads: slice) -> None:
        across = slice(None) if x.cu_seqlens is not None else rows
        now = state[across, heads]
        for i, part in enumerate(_segments(x, spec)):
            if i > 0:
                starts[i - 1, across, heads] = now
            at = rows, part, heads
            c = _Chunks(at, x, now, spec)
            scores = c.scores()
            n = torch.bmm(c.q_in, c.enter_s)  # Σ of score·v over all keys that a query sees [P, C, V]
            if scores is not None:
                n.baddbmm_(scores, c.v)
            if spec.normalize:
                d = torch.bmm(c.q_in, c.enter_z[..., None])  # Σ of scores [P, C, 1]
                d = divisor_of(d if scores is None else d.add_(scores.sum(-1, keepdim=True)), spec.signed, spec.eps)
                c.q_layout.merge(d, divisor[at][..., None])
                n.div_(d)
            c.q_layout.merge(n, o[at])
            now = c.final
        s[across, heads], z[across, heads] = _divide(now, x.v.shape[-1])

    each_slab(work, x.q, _segment(x.q) // _segments(x, spec)[0].stop)
    return o, s, z, divisor, starts


def backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, x: Inputs, spec: Spec, done: Outputs
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_gate, s0 and z0, given those of o, s and z, and `done`, the outputs of `forward`."""
    o, s, z, divisor, starts = done
    # without a gate or a start, the tensors made for their gradients are not used
    dq, dk, dv, dgate, ds0, dz0 = (
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (x.q, x.k, x.v, x.q[:0] if x.log_gate is None else x.log_gate, s, z)
    )
    state, dstate = _join(x.s0, x.z0, s, z), _join(ds, dz, s, z)

    def work(rows: slice, heads: slice) -> None:
        across = slice(None) if x.cu_seqlens is not None else rows
        dnow = dstate[across, heads]
        for i, part in reversed(list(enumerate(_segments(x, spec)))):
            now = starts[i - 1, across, heads] if i > 0 else state[across, heads]
            at = rows, part, heads
            c = _Chunks(at, x, now, spec)
            dn, dd = do[at], None
            if spec.normalize:
                d = divisor[at][..., None]
                dn = dn / d
                dd = torch.linalg.vecdot(dn, o[at].to(dn.dtype))[..., None].neg_()  # [B, T, H, 1]
                if spec.signed:
                    dd.masked_fill_(d.abs() <= spec.eps, 0)
                (dd,) = c.q_layout.split(dd)
            (dn,) = c.q_layout.split(dn)
            dfq, dfk, dfv, dlog = c.backward(dn, dd, dnow)
            c.q_layout.merge(c.map.pull_(dfq, c.q), dq[at])
            c.k_layout.merge(c.map.pull_(dfk, c.k), dk[rows, c.keys, heads])
            c.k_layout.merge(dfv, dv[rows, c.keys, heads])
            if dlog is not None:
                c.k_layout.merge(dlog.masked_fill_(c.forgets, 0), dgate[at][..., None])
            dnow = c.dstart
        ds0[across, heads], dz0[across, heads] = _divide(dnow, x.v.shape[-1])

    each_slab(work, x.q, _segment(x.q) // _segments(x, spec)[0].stop)
    return dq, dk, dv, None if x.log_gate is None else dgate, *((None, None) if x.s0 is None else (ds0, dz0))


def _segment(q: Tensor) -> int:
    """How many tokens of a head to compute at once: on a CPU as many as its caches hold, on a GPU enough to fill it."""
    return SEGMENT if q.device.type == "cpu" else 1 << 20


def _segments(x: Inputs, spec: Spec) -> list[slice]:
    length, size = x.q.shape[1], _segment(x.q)
    if x.cu_seqlens is not None or not spec.causal:
        return [slice(0, length)]
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def each_slab(work: Callable[[slice, slice], None], q: Tensor, count: int) -> None:
    """Run `work` on slabs that cover all rows and heads of q [B, T, H, K]: at most `count` heads of any rows at once.

    On a CPU each thread computes its own slabs, so that threads do not wait for each other after every small operation.
    """
    batch, _, heads, _ = q.shape
    threads = torch.get_num_threads() if q.device.type == "cpu" and q[..., 0].numel() > 2048 else 1
    count = max(1, min(count, batch * heads // threads))
    r, h = max(1, count // heads), min(count, heads)  # rows and heads of a slab
    slabs = [(slice(i, i + r), slice(j, j + h)) for i in range(0, batch, r) for j in range(0, heads, h)]

    def run(slab: tuple[slice, slice]) -> None:
        with torch.no_grad(), uncast(q):
            work(*slab)

    workers = min(threads, len(slabs))
    list(map(run, slabs) if workers == 1 else _pool(os.getpid(), workers, threads // workers).map(run, slabs))


@functools.lru_cache(maxsize=4)
def _pool(process: int, workers: int, threads: int) -> ThreadPoolExecutor:  # noqa: ARG001 (a forked process needs its own)
    """A pool of `workers` Python threads; torch uses `threads` threads in each of them."""
    before = torch.get_num_threads()
    started = threading.Barrier(workers + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call copies the global number into this thread, so it must come first
        torch.set_num_threads(threads)
        started.wait()

    pool = ThreadPoolExecutor(workers, "linear_attention", start)
    for _ in range(workers):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(before)  # each thread has its own number, but new threads start with the last one set
    return pool


def _join(s: Tensor | None, z: Tensor | None, s_like: Tensor, z_like: Tensor) -> Tensor:
    """s [R, H, M, V] and z [R, H, M] as one row of numbers [R, H, M*V + M]; zeros if there are none."""
    s, z = torch.zeros_like(s_like) if s is None else s, torch.zeros_like(z_like) if z is None else z
    return torch.cat((s.flatten(2), z), -1)


def _divide(state: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[..., M*V + M] -> s [..., M, V], z [..., M]"""
    features = state.shape[-1] // (width + 1)
    return state[..., : features * width].unflatten(-1, (features, width)), state[..., features * width :]


def divisor_of(d: Tensor, signed: bool, eps: float) -> Tensor:
    if not signed:
        return d + eps
    return torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps))


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp x to the range of float16, where a signed denominator near zero would give infinities."""
    return x.clamp(-65504, 65504) if dtype == torch.float16 else x


class Layout:
    """How tokens [B, T, H, D] are laid out in chunks [P, C, D], and how states [R, H, F] of R sequences enter them.

    Each sequence of a pack starts a new chunk. The number of chunks is an upper bound that needs only shapes, so that
    nothing waits for a GPU to read cu_seqlens; the chunks left over stay empty.
    """

    def __init__(self, shape: tuple[int, int, int], size: int, lengths: Tensor | None, cu_seqlens: Tensor | None):
        batch, length, heads = shape
        self.batch, self.length, self.heads, self.size = batch, length, heads, size
        self.packed = cu_seqlens is not None
        self.empty: Tensor | None = None
        if cu_seqlens is not None:
            cu = cu_seqlens.to(torch.int64)
            rows = cu.shape[0] - 1
            self.chunks = length // size + rows
            count = ((cu[1:] - cu[:-1] + size - 1) // size).clamp(min=1)
            end = count.cumsum(0)  # [R]
            self.first, self.last = end - count, end - 1
            chunk = torch.arange(self.chunks, device=cu.device)
            self.row = torch.searchsorted(end, chunk, right=True).clamp(max=rows - 1)  # [N]
            start = cu[self.row] + (chunk - self.first[self.row]) * size
            source = start[:, None] + torch.arange(size, device=cu.device)  # [N, C]
            empty = (source >= cu[self.row + 1][:, None]).expand(heads, -1, -1)  # [H, N, C]
            self.empty = empty.reshape(heads * self.chunks, size, 1)
            self.source = source.clamp(max=length - 1).flatten()
            token = torch.arange(length, device=cu.device)
            row = torch.searchsorted(cu[1:], token, right=True).clamp(max=rows - 1)
            self.target = self.first[row] * size + token - cu[row]  # [T]
        else:
            self.chunks = -(-length // size)
            if lengths is not None:
                token = torch.arange(self.chunks * size, device=lengths.device)
                padded = (token >= lengths[:, None])[:, None].expand(-1, heads, -1)  # [B, H, N*C]
                self.empty = padded.reshape(-1, size, 1)

    def split(self, *tokens: Tensor, phi: Fused = FUSED["identity"]) -> Tensor:
        """φ of n tensors [B, T, H, D] of one width -> [n, P, C, D], at least float32, zeros where no token is."""
        padded, width = self.chunks * self.size, tokens[0].shape[-1]
        shape = len(tokens), self.batch, self.heads, padded, width
        chunks = tokens[0].new_empty(shape, dtype=wide_type(tokens[0]))
        for out, x in zip(chunks, tokens, strict=True):
            if self.packed:
                out.copy_(x.index_select(1, self.source).transpose(1, 2))
            else:
                out[:, :, : self.length].copy_(x.transpose(1, 2))
        if padded > self.length and not self.packed:
            chunks[:, :, :, self.length :] = 0
        chunks = phi.apply_(chunks.view(len(tokens), -1, self.size, width))
        if self.empty is not None:
            chunks.masked_fill_(self.empty, 0)
        elif padded > self.length and phi.zero != 0:  # φ(0) is not zero
            chunks.view(shape)[:, :, :, self.length :] = 0
        return chunks

    def merge(self, x: Tensor, out: Tensor) -> None:
        """[P, C, D] -> [B, T, H, D], zeros where there is no token."""
        if self.empty is not None:
            x = x.masked_fill(self.empty, 0)
        x = x.view(self.batch, self.heads, self.chunks * self.size, -1)
        x = x.index_select(2, self.target) if self.packed else x[:, :, : self.length]
        out.copy_(saturate(x.transpose(1, 2), out.dtype))


class _Chunks:
    """Features, values, gates and states of some rows and heads over some tokens, laid out in chunks."""

    def __init__(self, at: tuple[slice, slice, slice], x: Inputs, start: Tensor, spec: Spec):
        rows, part, heads = at
        q, k, v, log_gate, lengths, cu_seqlens = x[:6]
        causal, self.map = spec.causal, FUSED[spec.feature_map]
        cross = q.shape[1] != k.shape[1]
        self.keys = slice(0, k.shape[1]) if cross else part
        q, k, v = q[at], k[rows, self.keys, heads], v[rows, self.keys, heads]
        if lengths is not None:
            lengths = lengths[rows] - self.keys.start
        self.causal = causal
        length, most = k.shape[1], max(q.shape[-1], v.shape[-1])
        size = length if not causal and cu_seqlens is None else min(length, 32 if most <= 32 else 64)
        self.k_layout = Layout((k.shape[0], length, k.shape[2]), size, lengths, cu_seqlens)
        if cross:
            self.q_layout = Layout((q.shape[0], q.shape[1], q.shape[2]), q.shape[1], None, None)
            (self.q,), (self.k,) = self.q_layout.split(q, phi=self.map), self.k_layout.split(k, phi=self.map)
        else:
            self.q_layout = self.k_layout
            self.q, self.k = self.k_layout.split(q, k, phi=self.map)
        (self.v,) = self.k_layout.split(v)
        self.q_in, self.k_out = self.q, self.k
        self.log_decay: Tensor | None = None
        if log_gate is None:
            self.within = torch.ones(size, size, dtype=self.q.dtype, device=q.device).tril_() if causal else None
        else:
            (gate,) = self.k_layout.split(log_gate[at][..., None].to(torch.float64))  # [P, C, 1]
            self.forgets = gate < FORGET
            cumulated = gate.clamp_(min=FORGET)[..., 0].cumsum(-1)  # [P, C]
            self.log_decay = cumulated[:, -1].clamp(min=FORGET).view(-1, self.k_layout.chunks)  # [G, N]
            self.reach = cumulated.exp().to(self.q.dtype)[..., None]
            self.rest = (cumulated[:, -1:] - cumulated).exp().to(self.q.dtype)[..., None]
            self.q_in, self.k_out = self.q * self.reach, self.k * self.rest
            self.within = decay_between(cumulated, self.q.dtype, strict=False)
        self.u = _outer(self.k_out, self.v, self.k_out.sum(1))
        self.enter, self.final = self._read_states(self.u, start)
        self.enter_s, self.enter_z = _divide(self.enter, v.shape[-1])

    def scores(self) -> Tensor | None:
        """φ(q)·φ(k) inside the chunks, decayed and masked [P, C, C]."""
        return None if self.within is None else torch.bmm(self.q, self.k.mT).mul_(self.within)

    def backward(self, dn: Tensor, dd: Tensor | None, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k (after the map), v and log_gate, given those of both sums in `forward` and the final state.

        It stores the gradient of the start in `dstart`.
        """
        q_in_dd = torch.zeros_like(self.enter_z) if dd is None else torch.bmm(self.q_in.mT, dd)[..., 0]
        du, self.dstart = self._read_states(_outer(self.q_in, dn, q_in_dd), dfinal, reverse=True)
        du_s, du_z = _divide(du, dn.shape[-1])
        dq = torch.bmm(dn, self.enter_s.mT)
        if dd is not None:
            dq.addcmul_(dd, self.enter_z[:, None])
        dk = torch.bmm(self.v, du_s.mT).add_(du_z[:, None])
        dv = torch.bmm(self.k_out, du_s)
        if self.log_decay is not None:
            dq.mul_(self.reach)
            dk.mul_(self.rest)
        scores = self.scores()
        if scores is not None and self.within is not None:
            dv.baddbmm_(scores.mT, dn)
            dscores = torch.bmm(dn, self.v.mT, out=scores)
            if dd is not None:
                dscores.add_(dd)
            dscores.mul_(self.within)
            dq.baddbmm_(dscores, self.k)
            dk.baddbmm_(dscores.mT, self.q)
        if self.log_decay is None:
            return dq, dk, dv, None
        # scores have a factor exp(cumulated_t - cumulated_s), states that leave a chunk exp(cumulated at its end)
        dcumulated = torch.linalg.vecdot(self.q, dq) - torch.linalg.vecdot(self.k, dk)  # [P, C]
        leave = torch.addcmul(self.u, self.enter, self.log_decay.exp().to(dq.dtype).view(-1, 1))
        dcumulated[:, -1] += torch.linalg.vecdot(du, leave)
        return dq, dk, dv, dcumulated.flip(-1).cumsum(-1).flip(-1)[..., None]

    def _read_states(self, u: Tensor, start: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """The states that each chunk reads [P, F] and the final ones [R, H, F], or with `reverse` their gradients."""
        layout = self.k_layout
        # [R, H, F] -> [G, 1, F], or [G, R, F] for a pack, where sequences follow each other
        start = start.transpose(0, 1) if layout.packed else start.flatten(0, 1)[:, None]
        enter, final = _states(u.unflatten(0, (-1, layout.chunks)), self.log_decay, start, layout, reverse)
        if not self.causal:  # every chunk reads its whole sequence
            enter = final[:, layout.row] if layout.packed else final
        final = final.transpose(0, 1) if layout.packed else final[:, 0].unflatten(0, (layout.batch, layout.heads))
        return enter.flatten(0, 1), final


def _outer(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """What each chunk adds to the state, Σ x yᵀ and z, as one row of numbers [P, F]."""
    return torch.cat((torch.bmm(x.mT, y).flatten(1), z), -1)


def _states(u: Tensor, log_decay: Tensor | None, start: Tensor, layout: Layout, reverse: bool) -> tuple[Tensor, Tensor]:
    """States entering each chunk [G, N, F], and those after the last chunk of each sequence [G, 1 or R, F].

    In a pack, the state is reset where a new sequence begins: it decays to zero, and the start of that sequence is
    added. With `reverse` everything runs from the last chunk to the first.
    """
    if layout.packed:
        edge: Tensor | slice = layout.first if reverse else layout.last
        change, starts = (layout.first[1:], start[:, :-1]) if reverse else (layout.last[:-1], start[:, 1:])
        begin = start[:, -1:] if reverse else start[:, :1]
        fade = u.new_zeros(1, u.shape[1], dtype=torch.float64) if log_decay is None else log_decay
        enter = _scan(u.index_copy(1, change, starts), fade.index_fill(1, change, FORGET), begin, reverse)
    else:
        edge = slice(0, 1) if reverse else slice(u.shape[1] - 1, None)
        enter = _scan(u, log_decay, start, reverse)
    if log_decay is None:
        return enter, enter[:, edge] + u[:, edge]
    return enter, torch.addcmul(u[:, edge], enter[:, edge], log_decay[:, edge].exp().to(u.dtype)[..., None])


def _scan(u: Tensor, log_decay: Tensor | None, start: Tensor, reverse: bool) -> Tensor:
    """States entering each chunk: e_0 = start, e_n = exp(a_{n-1}) e_{n-1} + u_{n-1}; with `reverse` from the end.

    u [G, N, F], log_decay a [G or 1, N] in float64 or None for no decay, start [G, 1, F]. A block of chunks is one
    product with a triangular matrix of decays; a recursive call computes the states entering the blocks, in O(N) time.
    """
    n = u.shape[1]
    size = min(n, BLOCK)
    if n % size:
        u = F.pad(u, (0, 0, 0, -n % size))
        log_decay = None if log_decay is None else F.pad(log_decay, (0, -n % size))
    u = u.unflatten(1, (-1, size))  # [G, N/size, size, F]
    if log_decay is None:
        decay = torch.ones(size, size, dtype=u.dtype, device=u.device).tril_(-1)
        after = u.sum(2) if n > size else None  # [G, N/size, F]
        reach = total = None
    else:
        log_decay = log_decay.unflatten(1, (-1, size))
        cumulated = log_decay.cumsum(-1)
        decay = decay_between(cumulated, u.dtype, strict=True)
        total = cumulated[..., -1].clamp(min=FORGET)
        before = F.pad(cumulated, (1, -1))
        reach = (cumulated[..., -1:] - cumulated if reverse else before).exp().to(u.dtype)[..., None]
        rest = (before if reverse else cumulated[..., -1:] - cumulated).exp().to(u.dtype)[..., None]
        after = (rest * u).sum(2) if n > size else None
    e = (decay.mT if reverse else decay) @ u
    enter = start if after is None else _scan(after, total, start, reverse)  # [G, N/size, F]
    e = e.add_(enter[:, :, None]) if reach is None else e.addcmul_(reach, enter[:, :, None])
    return e.flatten(1, 2)[:, :n]


def decay_between(cumulated: Tensor, dtype: torch.dtype, strict: bool) -> Tensor:
    """Decays between positions, zero above the diagonal: [..., N] sums of log decays up to n included -> [..., N, N].

    strict: the decay from after m to before n, for n > m; otherwise from after m to after n, for n >= m.
    """
    size = cumulated.shape[-1]
    past = torch.ones(size, size, dtype=torch.bool, device=cumulated.device).tril(-1 if strict else 0)
    until = F.pad(cumulated, (1, -1)) if strict else cumulated
    between = until[..., :, None] - cumulated[..., None, :]
    return between.to(dtype).masked_fill_(~past, -torch.inf).exp_()
