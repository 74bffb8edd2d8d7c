"""Linear attention: o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t) with S = Σ φ(k)vᵀ and z = Σ φ(k), over s <= t when causal.

Causal sums run in chunks: inside a chunk of C tokens the masked scores are a small matrix, and between chunks one [M, V] state is
handed on, so time is O(T·(C + M)·V) and nothing of size [T, T] exists. z rides along as one more column of v.
Three things change how a state travels from chunk to chunk, and all are a decay of that step: gates multiply it by exp(g),
a packed sequence that starts multiplies it by zero, everything else by one.

Legend: B batch, T queries, S keys, H heads, K key width, M features, V value width, C chunk, N chunks, G = B·H.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.ops.feature_maps import FEATURE_MAPS, FeatureMap
from subquad.ops.feature_maps import feature_map as find_map
from subquad.ops.impl import Impl, choose

CHUNK = 64
BLOCK = 64  # chunks whose states are handed on by one matrix product
FORGET = -1000.0  # exp of this is zero even in float64, and differences of sums of it stay exact to 1e-11


class LinearState(NamedTuple):
    """Everything linear attention remembers of the tokens so far."""

    s: Tensor  # [B, H, M, V] at least float32
    z: Tensor  # [B, H, M]


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
) -> Any:
    """q [B, T, H, K], k [B, S, H, K], v [B, S, H, V] -> o [B, T, H, V] in v's type; with return_state, (o, LinearState).

    S may differ from T when not causal. Sums, states and denominators are at least float32.
    feature_map  a name of FEATURE_MAPS or a callable [..., K] -> [..., M], applied to q and k
    normalize    divide by d = φ(q)·z: by d + eps for positive maps, by sign(d)·max(|d|, eps) for signed ones and callables
    lengths      [B] right padding of q, k and v alike: padded keys add nothing, padded outputs are zero, and the state is the
                 one at the row's own length. Where T differs from S it is taken as key_lengths
    key_lengths  [B] right padding of keys and values alone, for cross-attention, where T may equal S by chance
    cu_seqlens   [N+1] from 0 to T, rising: B is 1 and holds N sequences one after the other; states are then [N, ...]
    log_gate     [B, T, H] <= 0, causal only: S_t = exp(g_t) S_{t-1} + φ(k_t) v_tᵀ and z likewise; -inf forgets everything
    initial_state  added to the sums, decayed by the gates
    """
    found = find_map(feature_map)
    _check_inputs(q, k, v, causal, eps)
    _check_masks(q, k, causal, lengths, key_lengths, cu_seqlens, log_gate)
    name = feature_map if found.fused and isinstance(feature_map, str) else "identity"
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
    if q.shape[:3] + k.shape[3:] != q.shape or q.dim() != 4:
        raise ValueError(
            f"feature_map gave shapes {tuple(q.shape)} and {tuple(k.shape)}: accepted is a map [..., K] -> [..., M]"
        )
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    s0, z0 = _check_state(initial_state, rows, q, v)
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
    """One token of causal linear attention: q_t, k_t [B, H, K], v_t [B, H, V], log_gate [B, H] -> o [B, H, V] and the new state.

    The old state is left alone unless `inplace`, which writes the new one over it and returns it.
    """
    found = find_map(feature_map)
    _check_step(q_t, k_t, v_t, log_gate, eps)
    name = feature_map if found.fused and isinstance(feature_map, str) else "identity"
    if not found.fused:
        q_t, k_t = found.apply(q_t), found.apply(k_t)
    s, z = _check_state(state, q_t.shape[0], q_t[:, None], v_t[:, None])
    if s is None or z is None:
        raise ValueError("state=None: accepted is a LinearState, such as the one linear_attention returns")
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
    o = (q[..., None, :] @ s)[..., 0, :]  # [B, H, V]
    if normalize:
        o = o / _divisor((q * z).sum(-1, keepdim=True), signed, eps)
    return o.to(v_t.dtype), s, z


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
    plan = (causal, feature_map, signed, normalize, eps)
    return _Chunked.apply(q, k, v, log_gate, s0, z0, lengths, cu_seqlens, plan)


class _Layout:
    """How tokens [B, T, H, D] are laid out in chunks [G, N, C, D], and how states [R, H, ...] of R sequences enter them.

    A packed sequence starts a new chunk. The number of chunks is an upper bound that does not depend on where sequences end,
    so nothing waits for the values of cu_seqlens; those left over stay empty.
    """

    def __init__(self, x: Tensor, size: int, lengths: Tensor | None, cu_seqlens: Tensor | None):
        batch, length, heads, _ = x.shape
        self.batch, self.length, self.heads, self.size = batch, length, heads, size
        self.first = self.last = None
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
            self.empty = (source >= cu[self.row + 1][:, None]).view(1, self.chunks, size, 1)
            self.source = source.clamp(max=length - 1).flatten()
            token = torch.arange(length, device=cu.device)
            row = torch.searchsorted(cu[1:], token, right=True).clamp(max=rows - 1)
            self.target = self.first[row] * size + token - cu[row]  # [T]
        else:
            self.chunks = -(-length // size)
            self.empty = None
            if lengths is not None:
                token = torch.arange(self.chunks * size, device=x.device)
                padded = (token >= lengths[:, None])[:, None].expand(-1, heads, -1)  # [B, H, N*C]
                self.empty = padded.reshape(batch * heads, self.chunks, size, 1)

    def split(self, x: Tensor, dtype: torch.dtype, name: str = "identity") -> Tensor:
        """[B, T, H, D] -> φ(x) as [G, N, C, D], zeros where there is no token."""
        batch, length, heads, width = x.shape
        phi = FEATURE_MAPS[name].apply
        if self.first is not None:
            x = phi(x[0].index_select(0, self.source).transpose(0, 1).to(dtype))
        else:
            x = phi(x.transpose(1, 2).to(dtype))
            x = torch.nn.functional.pad(x, (0, 0, 0, self.chunks * self.size - length))
        x = x.reshape(batch * heads, self.chunks, self.size, width)
        return x if self.empty is None else x.masked_fill(self.empty, 0)

    def merge(self, x: Tensor) -> Tensor:
        """[G, N, C, D] -> [B, T, H, D]"""
        x = x.reshape(self.batch, self.heads, self.chunks * self.size, -1)
        x = x.index_select(2, self.target) if self.first is not None else x[:, :, : self.length]
        return x.transpose(1, 2).contiguous()

    def split_state(self, s: Tensor) -> Tensor:
        """[R, H, ...] -> [G, 1 or R, F]: the sequences of a batch are rows, those of a pack stand behind each other."""
        if self.first is not None:
            return s.transpose(0, 1).flatten(2)  # [H, R, F]
        return s.flatten(0, 1).flatten(1)[:, None]  # [B*H, 1, F]

    def merge_state(self, s: Tensor) -> Tensor:
        if self.first is not None:
            return s.transpose(0, 1)
        return s.unflatten(0, (self.batch, self.heads))[:, :, 0]


def _divisor(d: Tensor, signed: bool, eps: float) -> Tensor:
    if not signed:
        return d + eps
    return torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps))


def _slope(phi: Tensor, name: str) -> Tensor | None:
    """The derivative of a map, from its value; None for one."""
    if name == "elu+1":
        return phi.clamp(max=1)
    if name == "relu":
        return (phi > 0).to(phi.dtype)
    return phi if name == "exp" else None


def _decay(cumulated: Tensor, dtype: torch.dtype, strict: bool) -> Tensor:
    """exp of the log decay between positions: [..., N] sums up to and with n -> [..., N, N], zero above the diagonal.

    strict: the decay from after m to before n, for n > m; otherwise from after m to after n, for n >= m.
    """
    size = cumulated.shape[-1]
    past = torch.ones(size, size, dtype=torch.bool, device=cumulated.device).tril(-1 if strict else 0)
    until = torch.nn.functional.pad(cumulated, (1, -1)) if strict else cumulated
    between = until[..., :, None] - cumulated[..., None, :]
    return between.to(dtype).masked_fill(~past, -torch.inf).exp()


def _hand_on(u: Tensor, log_decay: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """The states that enter each chunk: e_0 = start, e_n = exp(a_{n-1}) e_{n-1} + u_{n-1}; reversed, from the last chunk to the first.

    u [G, N, F], log_decay [G or 1, N] in float64, start [G, 1, F]. Long inputs go by blocks of blocks, so the cost stays linear.
    """
    n = u.shape[1]
    if n > BLOCK:
        pad = -n % BLOCK
        u = torch.nn.functional.pad(u, (0, 0, 0, pad)).unflatten(1, (-1, BLOCK))  # [G, N/BLOCK, BLOCK, F]
        log_decay = torch.nn.functional.pad(log_decay, (0, pad)).unflatten(1, (-1, BLOCK))
        total = log_decay.sum(-1)
        inner = _hand_on_block(u, log_decay, None, reverse)
        edge = 0 if reverse else -1
        after = inner[:, :, edge] * log_decay[:, :, edge].exp().to(u.dtype)[..., None] + u[:, :, edge]
        enter = _hand_on(after, total.clamp(min=FORGET), start, reverse)[:, :, None]  # [G, N/BLOCK, 1, F]
        cumulated = log_decay.cumsum(-1)
        if reverse:
            reach = cumulated[..., -1:] - cumulated
        else:
            reach = torch.nn.functional.pad(cumulated, (1, -1))
        return torch.addcmul(inner, reach.exp().to(u.dtype)[..., None], enter).flatten(1, 2)[:, :n]
    return _hand_on_block(u, log_decay, start, reverse)


def _hand_on_block(u: Tensor, log_decay: Tensor, start: Tensor | None, reverse: bool) -> Tensor:
    cumulated = log_decay.cumsum(-1)
    decay = _decay(cumulated, u.dtype, strict=True)
    e = (decay.mT if reverse else decay) @ u
    if start is None:
        return e
    reach = cumulated[..., -1:] - cumulated if reverse else torch.nn.functional.pad(cumulated, (1, -1))
    return torch.addcmul(e, reach.exp().to(u.dtype)[..., None], start)


def _states(
    u: Tensor, log_decay: Tensor, start: Tensor, layout: _Layout, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """States entering each chunk [G, N, F], and those after the last chunk of each sequence [G, 1 or R, F].

    Where a pack goes from one sequence to the next, the state is replaced by the next one's start: it decays by zero and gains that start.
    """
    if layout.first is None or layout.last is None:
        enter = _hand_on(u, log_decay, start, reverse)
        edge = slice(0, 1) if reverse else slice(-1, None)
        return enter, enter[:, edge] * log_decay[:, edge].exp().to(u.dtype)[..., None] + u[:, edge]
    edges = layout.first if reverse else layout.last
    change, starts = (edges[1:], start[:, :-1]) if reverse else (edges[:-1], start[:, 1:])
    begin = start[:, -1:] if reverse else start[:, :1]
    enter = _hand_on(u.index_copy(1, change, starts), log_decay.index_fill(1, change, FORGET), begin, reverse)
    return enter, enter[:, edges] * log_decay[:, edges].exp().to(u.dtype)[..., None] + u[:, edges]


class _Chunks:
    """Features, values and gates of one call, laid out in chunks."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gate: Tensor | None,
        s0: Tensor | None,
        z0: Tensor | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        plan: tuple[bool, str, bool, bool, float],
    ):
        self.causal, name = plan[:2]
        length, keys = q.shape[1], k.shape[1]
        dtype = torch.promote_types(v.dtype, torch.float32)
        whole = not self.causal and cu_seqlens is None
        self.k_layout = _Layout(k, keys if whole else min(CHUNK, keys), lengths, cu_seqlens)
        self.q_layout = self.k_layout
        if length != keys:
            self.q_layout = _Layout(q, length, None, None)
        self.q, self.k = self.q_layout.split(q, dtype, name), self.k_layout.split(k, dtype, name)
        self.v = torch.nn.functional.pad(self.k_layout.split(v, dtype), (0, 1), value=1.0)  # [G, N, C, V+1]
        if log_gate is None:
            self.reach: Tensor | float = 1.0
            self.rest: Tensor | float = 1.0
            self.q_in, self.k_out = self.q, self.k
            self.log_decay = torch.zeros(1, self.k_layout.chunks, dtype=torch.float64, device=k.device)
            size = self.k_layout.size
            self.within = torch.ones(size, size, dtype=dtype, device=k.device).tril() if self.causal else None
        else:
            gate = log_gate[..., None].to(torch.float64).clamp(min=FORGET)
            cumulated = self.k_layout.split(gate, torch.float64)[..., 0].cumsum(-1)  # [G, N, C]
            self.log_decay = cumulated[..., -1].clamp(min=FORGET)
            self.reach = cumulated.exp().to(dtype)[..., None]
            self.rest = (cumulated[..., -1:] - cumulated).exp().to(dtype)[..., None]
            self.q_in, self.k_out = self.q * self.reach, self.k * self.rest
            self.within = _decay(cumulated, dtype, strict=False)
        if s0 is None or z0 is None:
            rows = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
            self.start = self.v.new_zeros(self.v.shape[0], rows, q.shape[-1] * self.v.shape[-1])
        else:
            self.start = self.k_layout.split_state(torch.cat((s0, z0[..., None]), -1).to(dtype))
        self.u = self.k_out.mT @ self.v  # [G, N, M, V+1]

    def scores(self) -> Tensor:
        return (self.q @ self.k.mT) * self.within  # [G, N, C, C]

    def enter(self) -> tuple[Tensor, Tensor]:
        """The states that the queries of each chunk read [G, N, M, V+1], and the final ones [G, 1 or R, F]."""
        enter, final = self._travel(self.u, self.start, reverse=False)
        return enter, final

    def leave(self, denter: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of what each chunk adds to the state, and of the start."""
        return self._travel(denter, dfinal, reverse=True)

    def _travel(self, u: Tensor, start: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
        enter, final = _states(u.flatten(2), self.log_decay, start, self.k_layout, reverse)
        if not self.causal:  # every chunk sees the whole of its sequence
            enter = final if self.k_layout.first is None else final[:, self.k_layout.row]
        return enter.unflatten(-1, u.shape[-2:]), final


class _Chunked(torch.autograd.Function):
    """Chunked linear attention; the backward pass keeps the inputs and computes features, states and scores again."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gate: Tensor | None,
        s0: Tensor | None,
        z0: Tensor | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        plan: tuple[bool, str, bool, bool, float],
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, _, signed, normalize, eps = plan
        c = _Chunks(q, k, v, log_gate, s0, z0, lengths, cu_seqlens, plan)
        enter, final = c.enter()
        wide = c.q_in @ enter
        if causal:
            wide = wide + c.scores() @ c.v
        o = wide[..., :-1]
        d = wide[..., -1:] if normalize else None
        if d is not None:
            o = o / _divisor(d, signed, eps)
        o = c.q_layout.merge(o).to(v.dtype)
        final = c.k_layout.merge_state(final.unflatten(-1, (q.shape[-1], -1)))
        ctx.save_for_backward(q, k, v, log_gate, s0, z0, lengths, cu_seqlens, o, d)
        ctx.plan = plan
        return o, final[..., :-1].contiguous(), final[..., -1].contiguous()

    @staticmethod
    def backward(ctx: Any, do: Tensor, ds: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, log_gate, s0, z0, lengths, cu_seqlens, o, d = ctx.saved_tensors
        causal, name, signed, normalize, eps = ctx.plan
        c = _Chunks(q, k, v, log_gate, s0, z0, lengths, cu_seqlens, ctx.plan)
        enter, final = c.enter()
        dn = c.q_layout.split(do, c.v.dtype)
        if normalize:
            divisor = _divisor(d, signed, eps)
            dd = -(dn * c.q_layout.split(o, dn.dtype)).sum(-1, keepdim=True) / divisor
            if signed:
                dd = dd.masked_fill(d.abs() <= eps, 0)
            dn = torch.cat((dn / divisor, dd), -1)
        else:
            dn = torch.nn.functional.pad(dn, (0, 1))
        dfinal = c.k_layout.split_state(torch.cat((ds, dz[..., None]), -1).to(dn.dtype))
        du, dstart = c.leave(c.q_in.mT @ dn, dfinal)
        dq = (dn @ enter.mT) * c.reach
        dk = (c.v @ du.mT) * c.rest
        dv = (c.k_out @ du)[..., :-1]
        if causal:
            scores = c.scores()
            dv = dv + scores.mT @ dn[..., :-1]
            dscores = (dn @ c.v.mT) * c.within
            dq = dq + dscores @ c.k
            dk = dk + dscores.mT @ c.q
        dgate = None
        if log_gate is not None:
            dcum = (c.q * dq - c.k * dk).sum(-1)  # [G, N, C]
            after = enter * c.log_decay.exp().to(dq.dtype)[..., None, None] + c.u
            dcum[..., -1] += (du * after).sum((-1, -2))
            dgate = dcum.flip(-1).cumsum(-1).flip(-1)
            dgate = c.k_layout.merge(dgate[..., None])[..., 0]
            dgate = dgate.masked_fill(log_gate < FORGET, 0).to(log_gate.dtype)
        slope_q, slope_k = _slope(c.q, name), _slope(c.k, name)
        dq = dq if slope_q is None else dq * slope_q
        dk = dk if slope_k is None else dk * slope_k
        dstart = c.k_layout.merge_state(dstart.unflatten(-1, (q.shape[-1], -1)))
        return (
            c.q_layout.merge(dq if c.q_layout.empty is None else dq.masked_fill(c.q_layout.empty, 0)).to(q.dtype),
            c.k_layout.merge(dk if c.k_layout.empty is None else dk.masked_fill(c.k_layout.empty, 0)).to(k.dtype),
            c.k_layout.merge(dv).to(v.dtype),
            dgate,
            None if s0 is None else dstart[..., :-1].to(s0.dtype),
            None if z0 is None else dstart[..., -1].to(z0.dtype),
            None,
            None,
            None,
        )


def _unsupported(q: Tensor, v: Tensor) -> str | None:
    if q.dtype == torch.float64:
        return "float64"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"{q.shape[-1]} features and values of width {v.shape[-1]}, where at most 256 fit"
    return None


def _reading() -> bool:
    """Whether values may be looked at: not while a graph is being recorded."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool, eps: float) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: accepted is [B, T, H, D] with no empty dimension")
        if not x.is_floating_point() or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, q {q.dtype} on {q.device}: accepted is one floating point type on one device"
            )
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
    if eps < 0:
        raise ValueError(f"eps={eps}: accepted is a number of at least 0")


def _check_lengths(name: str, lengths: Tensor, rows: int, most: int, device: torch.device) -> None:
    if lengths.shape != (rows,) or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(
            f"{name} is {lengths.dtype} of shape {tuple(lengths.shape)}: accepted are integers of shape [B] = ({rows},)"
        )
    if lengths.device != device:
        raise ValueError(f"{name} is on {lengths.device}, q on {device}: accepted is one device")
    if _reading() and bool(((lengths < 0) | (lengths > most)).any()):
        raise ValueError(f"{name}={lengths.tolist()}: accepted are lengths from 0 to {most}")


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
        _check_lengths("lengths", lengths, batch, keys, q.device)
    if key_lengths is not None:
        if causal or lengths is not None:
            raise ValueError(
                "key_lengths with causal=True or lengths: accepted is key_lengths alone, with causal=False"
            )
        _check_lengths("key_lengths", key_lengths, batch, keys, q.device)
    if cu_seqlens is not None:
        if lengths is not None or key_lengths is not None:
            raise ValueError("cu_seqlens and lengths together: accepted is a pack or a padded batch")
        if batch != 1 or length != keys:
            raise ValueError(
                f"cu_seqlens with q {tuple(q.shape)} and k {tuple(k.shape)}: accepted is a batch of one, as many keys as queries"
            )
        whole = cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.shape[0] >= 2
        if not whole or cu_seqlens.device != q.device:
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)} on {cu_seqlens.device}:"
                f" accepted are int32 or int64 of shape [N+1] on {q.device}"
            )
        if _reading():
            ends = cu_seqlens.tolist()
            if ends[0] != 0 or ends[-1] != length or any(a > b for a, b in zip(ends, ends[1:], strict=False)):
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
    # on a GPU this look at every gate would make the host wait
    if log_gate.device.type == "cpu" and _reading() and not bool((log_gate.detach() <= 0).all()):
        raise ValueError("log_gate has values above 0 or NaN: accepted are logarithms of a decay in [0, 1]")


def _check_state(state: LinearState | None, rows: int, q: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """s and z, in at least float32; q [R, T, H, M] and v [R, T, H, V] give the widths."""
    if state is None:
        return None, None
    s, z = state
    shape = (rows, q.shape[2] if q.dim() == 4 else q.shape[1], q.shape[-1], v.shape[-1])
    dtype = torch.promote_types(v.dtype, torch.float32)
    for name, x, accepted in (("s", s, shape), ("z", z, shape[:-1])):
        if x.shape != accepted or x.device != q.device:
            raise ValueError(
                f"state.{name} has shape {tuple(x.shape)} on {x.device}: accepted is {accepted} on {q.device}"
            )
        if x.dtype != dtype:
            raise ValueError(f"state.{name} is {x.dtype}: accepted is {dtype} with {v.dtype} values")
    return s, z


def _check_step(q_t: Tensor, k_t: Tensor, v_t: Tensor, log_gate: Tensor | None, eps: float) -> None:
    for name, x in (("q_t", q_t), ("k_t", k_t), ("v_t", v_t)):
        if x.dim() != 3 or 0 in x.shape or x.shape[:2] != q_t.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, q_t {tuple(q_t.shape)}: accepted is [B, H, D], none of them zero"
            )
        if not x.is_floating_point() or x.dtype != q_t.dtype or x.device != q_t.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, q_t {q_t.dtype} on {q_t.device}: accepted is one floating point type on one device"
            )
    if k_t.shape != q_t.shape:
        raise ValueError(f"k_t has shape {tuple(k_t.shape)}: accepted is that of q_t, {tuple(q_t.shape)}")
    if eps < 0:
        raise ValueError(f"eps={eps}: accepted is a number of at least 0")
    if log_gate is not None:
        if log_gate.shape != q_t.shape[:2] or not log_gate.is_floating_point():
            raise ValueError(
                f"log_gate is {log_gate.dtype} of shape {tuple(log_gate.shape)}: accepted are floating point numbers [B, H] = {tuple(q_t.shape[:2])}"
            )
        _check_gate(log_gate)
