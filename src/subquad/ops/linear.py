"""Linear attention: o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t) with S = Σ φ(k)vᵀ and z = Σ φ(k), over s <= t when causal.

Causal sums run in chunks: inside a chunk of C tokens the masked scores are a small matrix, and between chunks one state
(s and z) is handed on, so time is O(T·(C + M)·V) and nothing of size [T, T] exists. Gates, and the borders of packed
sequences, only change how a state travels from chunk to chunk: it is multiplied by exp(g), or by zero.

The torch path is one differentiable operator, so that torch.compile sees one node. It works on slabs, some heads over a
segment of tokens, that stay in the caches of a CPU; the state goes from segment to segment.

Legend: B batch, T queries, S keys, H heads, K key width, M features, V value width, C chunk, N chunks,
G sequences = B·H, P = G·N chunks in all, R rows of states, F = M·V + M numbers of a state.
"""

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.checks import check_eps, check_heads, check_strided, check_tensor, checked, shown
from subquad.ops.autocast import uncast
from subquad.ops.feature_maps import FEATURE_MAPS
from subquad.ops.feature_maps import feature_map as find_map
from subquad.ops.impl import Impl, choose
from subquad.ops.lengths import check_op_lengths, readable

SEGMENT = 4096  # tokens of a head that a CPU works on at once
BLOCK = 16  # chunks whose states are handed on by one matrix product
FORGET = -1000.0  # exp of this is zero even in float64, and differences of sums of it stay exact to 1e-11


class LinearState(NamedTuple):
    """Everything linear attention remembers of the tokens so far."""

    s: Tensor  # [B, H, M, V] at least float32
    z: Tensor  # [B, H, M]


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    feature_map: str | Callable[[Tensor], Tensor] = ...,
    normalize: bool = ...,
    eps: float = ...,
    lengths: Tensor | None = ...,
    key_lengths: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    log_gate: Tensor | None = ...,
    initial_state: LinearState | None = ...,
    return_state: Literal[False] = ...,
    impl: Impl = ...,
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    feature_map: str | Callable[[Tensor], Tensor] = ...,
    normalize: bool = ...,
    eps: float = ...,
    lengths: Tensor | None = ...,
    key_lengths: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    log_gate: Tensor | None = ...,
    initial_state: LinearState | None = ...,
    return_state: Literal[True],
    impl: Impl = ...,
) -> tuple[Tensor, LinearState]: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    feature_map: str | Callable[[Tensor], Tensor] = ...,
    normalize: bool = ...,
    eps: float = ...,
    lengths: Tensor | None = ...,
    key_lengths: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    log_gate: Tensor | None = ...,
    initial_state: LinearState | None = ...,
    return_state: bool,
    impl: Impl = ...,
) -> Tensor | tuple[Tensor, LinearState]: ...


@checked
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    feature_map: str | Callable[[Tensor], Tensor] = "elu+1",
    normalize: bool = True,
    eps: float = 1e-6,
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    log_gate: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    """q [B, T, H, K], k [B, S, H, K], v [B, S, H, V] -> o [B, T, H, V] in v's type; (o, state) with return_state.

    S may differ from T when not causal. Sums, states and denominators are at least float32.

    feature_map    a name of FEATURE_MAPS or a callable [..., K] -> [..., M], applied to q and k
    normalize      divide by d = φ(q)·z: by d + eps for positive maps, by sign(d)·max(|d|, eps) for signed ones
    lengths        [B] right padding of q, k and v alike: padded keys add nothing, padded outputs are zero, the state is
                   the one at the row's own length. Where T differs from S it is taken as key_lengths
    key_lengths    [B] right padding of keys and values alone, for cross-attention, where T may equal S by chance
    cu_seqlens     [N+1] rising from 0 to T: B is 1 and holds N sequences one after the other; states are [N, ...]
    log_gate       [B, T, H] <= 0, causal only: S_t = exp(g_t) S_{t-1} + φ(k_t) v_tᵀ, z likewise; -inf forgets all
    initial_state  added to the sums, decayed by the gates
    """
    found = find_map(feature_map)
    _check_inputs(q, k, v, causal, eps)
    _check_masks(q, k, causal, lengths, key_lengths, cu_seqlens, log_gate)
    name, shape = feature_map if found.fused and isinstance(feature_map, str) else "identity", q.shape
    if key_lengths is not None and q.shape[1] == k.shape[1]:
        # the kernels would take lengths for queries and keys alike, so these keys are emptied here
        padded = torch.arange(k.shape[1], device=k.device) >= key_lengths[:, None]  # [B, S]
        padded = padded[:, :, None, None]
        q, k, v = found.apply(q), found.apply(k).masked_fill(padded, 0), v.masked_fill(padded, 0)
        name = "identity"
    elif key_lengths is not None:
        lengths = key_lengths
    elif not found.fused:
        q, k = found.apply(q), found.apply(k)
    if not found.fused:
        _check_features(q, k, v, shape)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    s0, z0 = _check_state("initial_state", initial_state, rows, q, v)
    if choose(impl, "linear_attention", q, _unsupported(q, v)) == "triton":
        from subquad.ops.linear_fused import fused_linear_attention as core
    else:
        core = chunked_linear_attention
    o, s, z = core(
        q,
        k,
        v,
        causal=causal,
        feature_map=name,
        signed=found.signed,
        normalize=normalize,
        eps=eps,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        log_gate=log_gate,
        s0=s0,
        z0=z0,
    )
    return (o, LinearState(s, z)) if return_state else o


@checked
def linear_attention_step(
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    state: LinearState,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "elu+1",
    normalize: bool = True,
    eps: float = 1e-6,
    log_gate: Tensor | None = None,
    inplace: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, LinearState]:
    """One token, causal: q_t, k_t [B, H, K], v_t [B, H, V], log_gate [B, H] -> o [B, H, V] and the new state.

    The old state is left alone unless `inplace`, which writes the new one over it and returns it.
    """
    found = find_map(feature_map)
    _check_step(q_t, k_t, v_t, log_gate, eps)
    name = feature_map if found.fused and isinstance(feature_map, str) else "identity"
    if not found.fused:
        shape = q_t.shape
        q_t, k_t = found.apply(q_t), found.apply(k_t)
        _check_features(q_t, k_t, v_t, shape)
    s, z = _check_state("state", state, q_t.shape[0], q_t[:, None], v_t[:, None])
    assert s is not None
    assert z is not None
    if choose(impl, "linear_attention_step", q_t, _unsupported(q_t, v_t)) == "triton":
        from subquad.ops.linear_fused import fused_linear_attention_step as core
    else:
        core = recurrent_linear_attention_step
    o, s, z = core(
        q_t,
        k_t,
        v_t,
        s,
        z,
        feature_map=name,
        signed=found.signed,
        normalize=normalize,
        eps=eps,
        log_gate=log_gate,
        inplace=inplace,
    )
    return o, LinearState(s, z)


def linear_attention_sums(
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "elu+1",
    lengths: Tensor | None = None,
) -> LinearState:
    """What a context is to linear attention, in constant size: k [B, S, H, K], v [B, S, H, V] -> s [B, H, M, V], z.

    `linear_attention_read` then equals linear_attention(q, k, v, causal=False, key_lengths=lengths), in O(M·V) a query.
    """
    phi, v = _wide_features(k, feature_map), v.to(torch.promote_types(v.dtype, torch.float32))
    if lengths is not None:
        padded = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]  # [B, S]
        phi = phi.masked_fill(padded[..., None, None], 0)
    with uncast(k):
        return LinearState(torch.einsum("bshm,bshv->bhmv", phi, v), phi.sum(1))


def linear_attention_read(
    q: Tensor,
    state: LinearState,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "elu+1",
    normalize: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """o = φ(q)ᵀs / φ(q)ᵀz of queries that see all of a state: q [B, T, H, K] -> o [B, T, H, V] in q's type."""
    phi = _wide_features(q, feature_map)
    with uncast(q):
        o = torch.einsum("bthm,bhmv->bthv", phi, state.s.to(phi.dtype))
        if normalize:
            d = torch.einsum("bthm,bhm->bth", phi, state.z.to(phi.dtype))
            o = o / _divisor(d, find_map(feature_map).signed, eps)[..., None]
    return _saturate(o, q.dtype).to(q.dtype)


def _wide_features(x: Tensor, feature_map: str | Callable[[Tensor], Tensor]) -> Tensor:
    """φ(x) in at least float32; a caller's own map sees x in its own type."""
    found, wide = find_map(feature_map), torch.promote_types(x.dtype, torch.float32)
    return found.apply(x.to(wide)) if found.fused else found.apply(x).to(wide)


def recurrent_linear_attention_step(
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    s: Tensor,
    z: Tensor,
    *,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
    log_gate: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    phi = FEATURE_MAPS[feature_map].apply
    q, k, x = phi(q_t.to(s.dtype)), phi(k_t.to(s.dtype)), v_t.to(s.dtype)
    if log_gate is not None:
        keep = log_gate.to(s.dtype).exp()[..., None]  # [B, H, 1]
        s, z = (s.mul_(keep[..., None]), z.mul_(keep)) if inplace else (s * keep[..., None], z * keep)
    if inplace:
        s.addcmul_(k[..., None], x[..., None, :])
        z.add_(k)
    else:
        s = torch.addcmul(s, k[..., None], x[..., None, :])
        z = z + k
    with uncast(q):
        o = (q[..., None, :] @ s)[..., 0, :]  # [B, H, V]
    if normalize:
        o = o / _divisor((q * z).sum(-1, keepdim=True), signed, eps)
    return _saturate(o, v_t.dtype).to(v_t.dtype), s, z


def chunked_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    log_gate: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The torch path: o and the final s and z. The signature is that of the fused path."""
    return _forward(q, k, v, log_gate, s0, z0, lengths, cu_seqlens, causal, feature_map, signed, normalize, eps)[:3]


@torch.library.custom_op("subquad::linear_chunked", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    name: str,
    signed: bool,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final s and z, the divisor of each o, and the states [segments - 1, R, H, F] between segments."""
    o, s, z, divisor, starts = _outputs(q, v, cu_seqlens, causal, normalize)
    state = _join(s0, z0, s, z)  # [R, H, F]

    def work(rows: slice, heads: slice) -> None:
        across = slice(None) if cu_seqlens is not None else rows
        now = state[across, heads]
        for i, part in enumerate(_segments(q, cu_seqlens, causal)):
            if i > 0:
                starts[i - 1, across, heads] = now
            at = rows, part, heads
            c = _Chunks(at, q, k, v, log_gate, now, lengths, cu_seqlens, causal, name)
            scores = c.scores()
            n = c.read(scores)
            if normalize:
                d = _divisor(c.read_z(scores), signed, eps)
                c.q_layout.merge(d, divisor[at][..., None])
                n.div_(d)
            c.q_layout.merge(n, o[at])
            now = c.final
        s[across, heads], z[across, heads] = _divide(now, v.shape[-1])

    _each_slab(work, q, cu_seqlens, causal)
    return o, s, z, divisor, starts


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # noqa: ARG001
    _, _, _, _, cu_seqlens, causal, _, _, normalize, _ = rest
    return _outputs(q, v, cu_seqlens, causal, normalize)


def _outputs(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, length, heads, features = q.shape
    width = v.shape[-1]
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.promote_types(v.dtype, torch.float32)
    cuts = 0 if cu_seqlens is not None or not causal else (length - 1) // _segment(q)
    return (
        v.new_empty(batch, length, heads, width),
        v.new_empty(rows, heads, features, width, dtype=dtype),
        v.new_empty(rows, heads, features, dtype=dtype),
        v.new_empty((batch, length, heads) if normalize else (0,), dtype=dtype),
        v.new_empty(cuts, rows, heads, features * (width + 1), dtype=dtype),
    )


@torch.library.custom_op("subquad::linear_chunked_backward", mutates_args=())
def _backward(
    do: Tensor,
    ds: Tensor,
    dz: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    divisor: Tensor,
    starts: Tensor,
    causal: bool,
    name: str,
    signed: bool,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dgate, ds0, dz0 = _gradients(q, k, v, log_gate, ds, dz)
    state, dstate = _join(s0, z0, ds, dz), _join(ds, dz, ds, dz)

    def work(rows: slice, heads: slice) -> None:
        across = slice(None) if cu_seqlens is not None else rows
        dnow = dstate[across, heads]
        for i, part in reversed(list(enumerate(_segments(q, cu_seqlens, causal)))):
            now = starts[i - 1, across, heads] if i > 0 else state[across, heads]
            at = rows, part, heads
            c = _Chunks(at, q, k, v, log_gate, now, lengths, cu_seqlens, causal, name)
            dn, dd = do[at], None
            if normalize:
                d = divisor[at][..., None]
                dn = dn / d
                dd = torch.linalg.vecdot(dn, o[at].to(dn.dtype))[..., None].neg_()  # [B, T, H, 1]
                if signed:
                    dd.masked_fill_(d.abs() <= eps, 0)
                (dd,) = c.q_layout.split(dd)
            (dn,) = c.q_layout.split(dn)
            dfq, dfk, dfv, dlog = c.backward(dn, dd, dnow)
            c.q_layout.merge(_through(dfq, c.q, name), dq[at])
            c.k_layout.merge(_through(dfk, c.k, name), dk[rows, c.keys, heads])
            c.k_layout.merge(dfv, dv[rows, c.keys, heads])
            if dlog is not None:
                c.k_layout.merge(dlog.masked_fill_(c.forgets, 0), dgate[at][..., None])
            dnow = c.dstart
        ds0[across, heads], dz0[across, heads] = _divide(dnow, v.shape[-1])

    _each_slab(work, q, cu_seqlens, causal)
    return dq, dk, dv, dgate, ds0, dz0


@_backward.register_fake
def _(do: Tensor, ds: Tensor, dz: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # noqa: ARG001
    q, k, v, log_gate = rest[:4]
    return _gradients(q, k, v, log_gate, ds, dz)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    o, _, _, divisor, starts = output
    ctx.save_for_backward(*inputs[:8], o, divisor, starts)
    ctx.plan = inputs[8:]
    ctx.mark_non_differentiable(divisor, starts)


def _differentiate(ctx: Any, do: Tensor, ds: Tensor, dz: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, log_gate, s0, z0, lengths, cu_seqlens, o, divisor, starts = ctx.saved_tensors
    dq, dk, dv, dgate, ds0, dz0 = _backward(
        do, ds, dz, q, k, v, log_gate, s0, z0, lengths, cu_seqlens, o, divisor, starts, *ctx.plan
    )
    of_gate = None if log_gate is None else dgate
    of_start = (None, None) if s0 is None else (ds0, dz0)
    return dq, dk, dv, of_gate, *of_start, *(None for _ in range(7))


# one autograd function: it keeps the inputs, o and its divisor, and computes features, states and scores again
_forward.register_autograd(_differentiate, setup_context=_remember)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, ds: Tensor, dz: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    contiguous = torch.contiguous_format
    dgate = q.new_empty(0) if log_gate is None else torch.empty_like(log_gate, memory_format=contiguous)
    dq, dk, dv, ds0, dz0 = (torch.empty_like(x, memory_format=contiguous) for x in (q, k, v, ds, dz))
    return dq, dk, dv, dgate, ds0, dz0


def _segment(q: Tensor) -> int:
    """Tokens of a head worked on at once: on a CPU what its caches hold, on a GPU what fills it."""
    return SEGMENT if q.device.type == "cpu" else 1 << 20


def _segments(q: Tensor, cu_seqlens: Tensor | None, causal: bool) -> list[slice]:
    length, size = q.shape[1], _segment(q)
    if cu_seqlens is not None or not causal:
        return [slice(0, length)]
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def _each_slab(work: Callable[[slice, slice], None], q: Tensor, cu_seqlens: Tensor | None, causal: bool) -> None:
    """Do the work for all rows and heads, several at once if they are short.

    On a CPU each thread takes slabs of its own, instead of all threads meeting at the end of every small operation.
    """
    batch, _, heads, _ = q.shape
    threads = torch.get_num_threads() if q.device.type == "cpu" and q[..., 0].numel() > 2048 else 1
    many = _segment(q) // _segments(q, cu_seqlens, causal)[0].stop  # heads of any rows
    many = max(1, min(many, batch * heads // threads))
    rows, some = max(1, many // heads), min(many, heads)
    slabs = [(slice(i, i + rows), slice(j, j + some)) for i in range(0, batch, rows) for j in range(0, heads, some)]

    def run(slab: tuple[slice, slice]) -> None:
        with torch.no_grad(), uncast(q):
            work(*slab)

    if threads == 1 or len(slabs) == 1:
        for slab in slabs:
            run(slab)
    else:
        workers = min(threads, len(slabs))
        list(_pool(os.getpid(), workers, threads // workers).map(run, slabs))


@functools.lru_cache(maxsize=4)
def _pool(process: int, workers: int, threads: int) -> ThreadPoolExecutor:  # noqa: ARG001 (a forked process needs its own)
    """Python threads whose torch operations use so many threads each."""
    before = torch.get_num_threads()
    started = threading.Barrier(workers + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread takes over the common number when it first asks
        torch.set_num_threads(threads)
        started.wait()

    pool = ThreadPoolExecutor(workers, "linear_attention", start)
    for _ in range(workers):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(before)  # the number is the thread's own, but the last one set is common to threads to come
    return pool


def _join(s: Tensor | None, z: Tensor | None, s_like: Tensor, z_like: Tensor) -> Tensor:
    """s [R, H, M, V] and z [R, H, M] as one row of numbers [R, H, M*V + M]; zeros if there are none."""
    s = torch.zeros_like(s_like) if s is None else s
    z = torch.zeros_like(z_like) if z is None else z
    return torch.cat((s.flatten(2), z), -1)


def _divide(state: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[..., M*V + M] -> s [..., M, V], z [..., M]"""
    features = state.shape[-1] // (width + 1)
    return state[..., : features * width].unflatten(-1, (features, width)), state[..., features * width :]


def _features(x: Tensor, name: str) -> Tensor:
    """φ of a tensor that may be overwritten."""
    if name == "elu+1":
        # exp2 is several times as fast as exp and expm1 on a CPU
        return x.clamp(max=0).mul_(1 / math.log(2)).exp2_().add_(x.clamp_(min=0))
    if name == "relu":
        return x.clamp_(min=0)
    return x.exp_() if name == "exp" else x


def _through(grad: Tensor, phi: Tensor, name: str) -> Tensor:
    """The gradient before a map, from the one after it and the map's value."""
    if name == "elu+1":
        return grad.mul_(phi.clamp(max=1))
    if name == "relu":
        return grad.masked_fill_(phi <= 0, 0)
    return grad.mul_(phi) if name == "exp" else grad


def _divisor(d: Tensor, signed: bool, eps: float) -> Tensor:
    if not signed:
        return d + eps
    return torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps))


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keep what float16 cannot hold at its largest number: a signed denominator near zero would give infinities."""
    return x.clamp(-65504, 65504) if dtype == torch.float16 else x


class _Layout:
    """How tokens [B, T, H, D] are laid out in chunks [P, C, D], and how states [R, H, F] of R sequences enter them.

    A packed sequence starts a new chunk. The number of chunks is an upper bound that does not depend on where sequences
    end, so nothing waits for the values of cu_seqlens; those left over stay empty.
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

    def split(self, *tokens: Tensor, name: str = "identity") -> Tensor:
        """Some [B, T, H, D] of one width -> φ of each as [P, C, D], at least float32, zeros where no token is."""
        dtype, width = torch.promote_types(tokens[0].dtype, torch.float32), tokens[0].shape[-1]
        padded = self.chunks * self.size
        chunks = tokens[0].new_empty(len(tokens), self.batch, self.heads, padded, width, dtype=dtype)
        for out, x in zip(chunks, tokens, strict=True):
            if self.packed:
                out.copy_(x.index_select(1, self.source).transpose(1, 2))
            else:
                out[:, :, : self.length].copy_(x.transpose(1, 2))
        if padded > self.length and not self.packed:
            chunks[:, :, :, self.length :] = 0
        chunks = _features(chunks.view(len(tokens), -1, self.size, width), name)
        if self.empty is not None:
            chunks.masked_fill_(self.empty, 0)
        elif padded > self.length and name in ("elu+1", "exp"):  # zero has features there
            chunks.view(len(tokens), self.batch, self.heads, padded, width)[:, :, :, self.length :] = 0
        return chunks

    def merge(self, x: Tensor, out: Tensor) -> None:
        """[P, C, D] -> [B, T, H, D], zeros where there is no token."""
        if self.empty is not None:
            x = x.masked_fill(self.empty, 0)
        x = x.view(self.batch, self.heads, self.chunks * self.size, -1)
        x = x.index_select(2, self.target) if self.packed else x[:, :, : self.length]
        out.copy_(_saturate(x.transpose(1, 2), out.dtype))

    def split_state(self, state: Tensor) -> Tensor:
        """[R, H, F] -> [G, 1, F], or [G, R, F] for a pack, whose sequences stand behind each other."""
        return state.transpose(0, 1) if self.packed else state.flatten(0, 1)[:, None]

    def merge_state(self, state: Tensor) -> Tensor:
        return state.transpose(0, 1) if self.packed else state[:, 0].unflatten(0, (self.batch, self.heads))


class _Chunks:
    """Features, values, gates and states of some rows and heads over some tokens, laid out in chunks."""

    def __init__(
        self,
        at: tuple[slice, slice, slice],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gate: Tensor | None,
        start: Tensor,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        causal: bool,
        name: str,
    ):
        rows, part, heads = at
        cross = q.shape[1] != k.shape[1]
        self.keys = slice(0, k.shape[1]) if cross else part
        q, k, v = q[at], k[rows, self.keys, heads], v[rows, self.keys, heads]
        if lengths is not None:
            lengths = lengths[rows] - self.keys.start
        self.causal = causal
        length, most = k.shape[1], max(q.shape[-1], v.shape[-1])
        size = length if not causal and cu_seqlens is None else min(length, 32 if most <= 32 else 64)
        self.k_layout = _Layout((k.shape[0], length, k.shape[2]), size, lengths, cu_seqlens)
        self.q_layout = self.k_layout
        if cross:
            self.q_layout = _Layout((q.shape[0], q.shape[1], q.shape[2]), q.shape[1], None, None)
        if cross:
            (self.q,), (self.k,) = self.q_layout.split(q, name=name), self.k_layout.split(k, name=name)
        else:
            self.q, self.k = self.k_layout.split(q, k, name=name)
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
            self.within = _decay(cumulated, self.q.dtype, strict=False)
        self.u = self._gather(self.k_out, self.v, self.k_out.sum(1))
        self.enter, final = self._travel(self.u, self.k_layout.split_state(start))
        self.enter_s, self.enter_z = _divide(self.enter, v.shape[-1])
        self.final = self.k_layout.merge_state(final)

    def scores(self) -> Tensor | None:
        """φ(q)·φ(k) inside the chunks, decayed and masked [P, C, C]."""
        return None if self.within is None else torch.bmm(self.q, self.k.mT).mul_(self.within)

    def read(self, scores: Tensor | None) -> Tensor:
        """Σ over all keys a query sees of score·v [P, C, V]."""
        o = torch.bmm(self.q_in, self.enter_s)
        return o if scores is None else o.baddbmm_(scores, self.v)

    def read_z(self, scores: Tensor | None) -> Tensor:
        """Σ over all keys a query sees of score [P, C, 1]."""
        d = torch.bmm(self.q_in, self.enter_z[..., None])
        return d if scores is None else d.add_(scores.sum(-1, keepdim=True))

    def backward(self, dn: Tensor, dd: Tensor | None, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k (after the map), v and log_gate, from those of `read`, `read_z` and the final state.

        The gradient of the start is left in `dstart`.
        """
        q_in_dd = torch.zeros_like(self.enter_z) if dd is None else torch.bmm(self.q_in.mT, dd)[..., 0]
        du, dstart = self._travel(self._gather(self.q_in, dn, q_in_dd), self.k_layout.split_state(dfinal), reverse=True)
        self.dstart = self.k_layout.merge_state(dstart)
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
        # each score holds exp(cumulated_t - cumulated_s), each state that leaves a chunk exp(cumulated of its end)
        dcumulated = torch.linalg.vecdot(self.q, dq) - torch.linalg.vecdot(self.k, dk)  # [P, C]
        leave = torch.addcmul(self.u, self.enter, self.log_decay.exp().to(dq.dtype).view(-1, 1))
        dcumulated[:, -1] += torch.linalg.vecdot(du, leave)
        return dq, dk, dv, dcumulated.flip(-1).cumsum(-1).flip(-1)[..., None]

    def _gather(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """What each chunk adds to the state: Σ x yᵀ, and z, as one row of numbers [P, F]."""
        return torch.cat((torch.bmm(x.mT, y).flatten(1), z), -1)

    def _travel(self, u: Tensor, start: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """The states each chunk reads [P, F] and the final ones [G, 1 or R, F], or their gradients in reverse."""
        layout = self.k_layout
        enter, final = _states(u.unflatten(0, (-1, layout.chunks)), self.log_decay, start, layout, reverse)
        if not self.causal:  # every chunk sees the whole of its sequence
            enter = final[:, layout.row] if layout.packed else final
        return enter.flatten(0, 1), final


def _states(
    u: Tensor, log_decay: Tensor | None, start: Tensor, layout: _Layout, reverse: bool
) -> tuple[Tensor, Tensor]:
    """States entering each chunk [G, N, F], and those after the last chunk of each sequence [G, 1 or R, F].

    Where a pack goes from one sequence to the next, the state is replaced by the next one's start: it decays by zero
    and gains that start. In reverse everything runs from the last chunk to the first.
    """
    if layout.packed:
        edge: Tensor | slice = layout.first if reverse else layout.last
        change, starts = (layout.first[1:], start[:, :-1]) if reverse else (layout.last[:-1], start[:, 1:])
        begin = start[:, -1:] if reverse else start[:, :1]
        fade = u.new_zeros(1, u.shape[1], dtype=torch.float64) if log_decay is None else log_decay
        enter = _hand_on(u.index_copy(1, change, starts), fade.index_fill(1, change, FORGET), begin, reverse)
    else:
        edge = slice(0, 1) if reverse else slice(u.shape[1] - 1, None)
        enter = _hand_on(u, log_decay, start, reverse)
    if log_decay is None:
        return enter, enter[:, edge] + u[:, edge]
    return enter, torch.addcmul(u[:, edge], enter[:, edge], log_decay[:, edge].exp().to(u.dtype)[..., None])


def _hand_on(u: Tensor, log_decay: Tensor | None, start: Tensor, reverse: bool) -> Tensor:
    """States entering each chunk: e_0 = start, e_n = exp(a_{n-1}) e_{n-1} + u_{n-1}; in reverse likewise.

    u [G, N, F], log_decay a [G or 1, N] in float64 or None for no decay, start [G, 1, F]. A block of chunks is one
    product with a triangular matrix of decays, and what enters a block is found the same way: the cost is linear in N.
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
        decay = _decay(cumulated, u.dtype, strict=True)
        total = cumulated[..., -1].clamp(min=FORGET)
        before = F.pad(cumulated, (1, -1))
        reach = (cumulated[..., -1:] - cumulated if reverse else before).exp().to(u.dtype)[..., None]
        rest = (before if reverse else cumulated[..., -1:] - cumulated).exp().to(u.dtype)[..., None]
        after = (rest * u).sum(2) if n > size else None
    e = (decay.mT if reverse else decay) @ u
    enter = start if after is None else _hand_on(after, total, start, reverse)  # [G, N/size, F]
    e = e.add_(enter[:, :, None]) if reach is None else e.addcmul_(reach, enter[:, :, None])
    return e.flatten(1, 2)[:, :n]


def _decay(cumulated: Tensor, dtype: torch.dtype, strict: bool) -> Tensor:
    """exp of the log decay between positions: [..., N] sums up to and with n -> [..., N, N], zero above the diagonal.

    strict: the decay from after m to before n, for n > m; otherwise from after m to after n, for n >= m.
    """
    size = cumulated.shape[-1]
    past = torch.ones(size, size, dtype=torch.bool, device=cumulated.device).tril(-1 if strict else 0)
    until = F.pad(cumulated, (1, -1)) if strict else cumulated
    between = until[..., :, None] - cumulated[..., None, :]
    return between.to(dtype).masked_fill_(~past, -torch.inf).exp_()


def _unsupported(q: Tensor, v: Tensor) -> str | None:
    if q.dtype == torch.float64:
        return "float64"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"{q.shape[-1]} features and values of width {v.shape[-1]}, where at most 256 fit"
    return None


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool, eps: float) -> None:
    check_heads("[B, T, H, D]", q=q, k=k, v=v)
    if k.shape != (q.shape[0], k.shape[1], q.shape[2], q.shape[3]):
        raise ValueError(
            f"k has shape {tuple(k.shape)}, q {tuple(q.shape)}: accepted is the same batch, heads and width"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}: accepted is the same batch, length and heads"
        )
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"causal=True with {q.shape[1]} queries and {k.shape[1]} keys: accepted is as many keys as queries"
        )
    check_eps(eps)


def _check_masks(
    q: Tensor,
    k: Tensor,
    causal: bool,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    log_gate: Tensor | None,
) -> None:
    batch, length, heads, _ = q.shape
    keys = k.shape[1]
    if lengths is not None:
        check_op_lengths("lengths", lengths, batch, keys, q.device)
    if key_lengths is not None:
        if causal or lengths is not None:
            raise ValueError(
                "key_lengths with causal=True or lengths: accepted is key_lengths alone, with causal=False"
            )
        check_op_lengths("key_lengths", key_lengths, batch, keys, q.device)
    if cu_seqlens is not None:
        if lengths is not None or key_lengths is not None:
            raise ValueError("cu_seqlens and lengths together: accepted is a pack or a padded batch")
        if batch != 1 or length != keys:
            raise ValueError(
                f"cu_seqlens with q {tuple(q.shape)} and k {tuple(k.shape)}:"
                " accepted is a batch of one with as many keys as queries"
            )
        whole = cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.shape[0] >= 2
        if not whole or cu_seqlens.device != q.device:
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)} on {cu_seqlens.device}:"
                f" accepted are int32 or int64 of shape [N+1] on {q.device}"
            )
        check_strided("cu_seqlens", cu_seqlens)
        if readable(cu_seqlens):
            ends = cu_seqlens.tolist()
            if ends[0] != 0 or ends[-1] != length or any(a > b for a, b in itertools.pairwise(ends)):
                raise ValueError(f"cu_seqlens={ends}: accepted are rising numbers from 0 to {length}")
    if log_gate is not None:
        if not causal:
            raise ValueError(
                "log_gate with causal=False: accepted is a gate with causal=True, since a decay needs an order"
            )
        if log_gate.shape != (batch, length, heads) or not log_gate.is_floating_point() or log_gate.device != q.device:
            raise ValueError(
                f"log_gate is {log_gate.dtype} of shape {tuple(log_gate.shape)} on {log_gate.device}:"
                f" accepted are floating point numbers of shape [B, T, H] = {(batch, length, heads)} on {q.device}"
            )
        _check_gate(log_gate)


def _check_gate(log_gate: Tensor) -> None:
    check_strided("log_gate", log_gate)
    if readable(log_gate) and not bool((log_gate.detach() <= 0).all()):
        raise ValueError("log_gate has values above 0 or NaN: accepted are logarithms of a decay in [0, 1]")


def _check_features(q: Any, k: Any, v: Tensor, shape: torch.Size) -> None:
    """Refuse what a caller's map made of q, which was of that shape, and k, if it is no map [..., K] -> [..., M]."""
    for x in (q, k):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.device != v.device:
            raise ValueError(f"feature_map gave {shown(x)}: accepted is a map of tensors [..., K] -> [..., M]")
    if q.shape[:-1] != shape[:-1] or k.shape != (*v.shape[:-1], *q.shape[-1:]) or 0 in q.shape:
        raise ValueError(
            f"feature_map gave shapes {tuple(q.shape)} and {tuple(k.shape)}: accepted is a map [..., K] -> [..., M]"
        )


def _check_state(
    which: str, state: LinearState | None, rows: int, q: Tensor, v: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """s and z, in at least float32; q [R, T, H, M] and v [R, T, H, V] give the widths."""
    if state is None:
        return None, None
    s, z = state
    shape = (rows, q.shape[2] if q.dim() == 4 else q.shape[1], q.shape[-1], v.shape[-1])
    dtype = torch.promote_types(v.dtype, torch.float32)
    for name, x, accepted in ((f"{which}.s", s, shape), (f"{which}.z", z, shape[:-1])):
        check_tensor(name, x)
        if x.shape != accepted or x.device != q.device:
            raise ValueError(f"{name} has shape {tuple(x.shape)} on {x.device}: accepted is {accepted} on {q.device}")
        if x.dtype != dtype:
            raise ValueError(f"{name} is {x.dtype}: accepted is {dtype} with {v.dtype} values")
    return s, z


def _check_step(q_t: Tensor, k_t: Tensor, v_t: Tensor, log_gate: Tensor | None, eps: float) -> None:
    check_heads("[B, H, D]", q_t=q_t, k_t=k_t, v_t=v_t)
    if k_t.shape != q_t.shape:
        raise ValueError(f"k_t has shape {tuple(k_t.shape)}: accepted is that of q_t, {tuple(q_t.shape)}")
    if v_t.shape[:2] != q_t.shape[:2]:
        raise ValueError(f"v_t has shape {tuple(v_t.shape)}, q_t {tuple(q_t.shape)}: accepted is one batch and heads")
    check_eps(eps)
    if log_gate is not None:
        if log_gate.shape != q_t.shape[:2] or not log_gate.is_floating_point() or log_gate.device != q_t.device:
            raise ValueError(
                f"log_gate is {log_gate.dtype} of shape {tuple(log_gate.shape)} on {log_gate.device}:"
                f" accepted are floating point numbers [B, H] = {tuple(q_t.shape[:2])} on {q_t.device}"
            )
        _check_gate(log_gate)
