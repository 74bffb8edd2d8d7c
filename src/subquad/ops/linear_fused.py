# ruff: noqa: ARG001 (fake kernels have the signature of the operator and read only shapes)
"""The fused kernels of linear attention as torch operators, so that autograd, torch.compile and CUDA graphs see them.

Registering costs nothing: triton is imported when an operator first runs. Shapes alone decide how the work is cut and
what is allocated, so nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

MAPS = ("elu+1", "relu", "exp", "identity")

# Measured on an H200, 132 multiprocessors: 256 causal walks fill it without being cut, fewer are cut into some four
# programs for each; the sums of the bidirectional form are shorter programs, and eight are better there.
WALKS = 256
PROGRAMS = 528
MIN_SEGMENT = 256

_OPTIONS = "bool causal, str feature_map, bool signed, bool normalize, float eps"
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? log_gate, Tensor? lengths, Tensor? cu_seqlens, Tensor? s0, Tensor? z0"


def fused_linear_attention(
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
    """o [B, T, H, V] and the states after the last token, s [N, H, K, V] and z [N, H, K]; `linear` checks."""
    if feature_map not in MAPS:
        raise ValueError(f"feature_map={feature_map!r}: the fused kernels accept {', '.join(map(repr, MAPS))}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    state = _state_type(q)
    if s0 is not None and z0 is None:
        z0 = s0.new_zeros(s0.shape[:-1])
    if z0 is not None and s0 is None:
        s0 = z0.new_zeros((*z0.shape, v.shape[-1]))
    s0, z0 = (None if x is None else x.to(state).contiguous() for x in (s0, z0))
    wanted = (x is not None and x.requires_grad for x in (q, k, v, log_gate, s0, z0))
    save = torch.is_grad_enabled() and any(wanted)
    work: Callable[..., Any] = torch.ops.subquad.linear_attention
    if _eager(q):
        work = _Eager.apply if save else _forward
    out = work(q, k, v, log_gate, lengths, cu_seqlens, s0, z0, causal, feature_map, signed, normalize, eps, save)
    return out[0], out[1], out[2]


def fused_linear_attention_step(
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
    """One token: q_t, k_t [B, H, K], v_t [B, H, V], log_gate [B, H] -> o [B, H, V], s [B, H, K, V], z [B, H, K]."""
    if feature_map not in MAPS:
        raise ValueError(f"feature_map={feature_map!r}: the fused kernels accept {', '.join(map(repr, MAPS))}")
    q_t, k_t, v_t = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_t, k_t, v_t))
    tensors = (q_t, k_t, v_t, s, z, log_gate)
    if inplace:
        if not (s[0, 0].is_contiguous() and z.stride(-1) == 1):
            raise ValueError(f"inplace=True with strides {s.stride()} of s: K and V of the state must be contiguous")
        o = torch.ops.subquad.linear_attention_step_(q_t, k_t, v_t, log_gate, s, z, feature_map, signed, normalize, eps)
        return o, s, z
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        gate = None if log_gate is None else log_gate[:, None]
        o, s, z = fused_linear_attention(
            q_t[:, None],
            k_t[:, None],
            v_t[:, None],
            causal=True,
            feature_map=feature_map,
            signed=signed,
            normalize=normalize,
            eps=eps,
            lengths=None,
            cu_seqlens=None,
            log_gate=gate,
            s0=s,
            z0=z,
        )
        return o[:, 0], s, z
    out = torch.ops.subquad.linear_attention_step(
        q_t, k_t, v_t, log_gate, s.contiguous(), z.contiguous(), feature_map, signed, normalize, eps
    )
    return out[0], out[1], out[2]


def _state_type(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _segment(q: Tensor, k: Tensor, log_gate: Tensor | None, causal: bool) -> int:
    """Tokens per segment: the shortest power of two that leaves no more programs than keep the chip busy.

    The gradient of a gate is a sum to the end of its segment, and the shorter that is, the less rounding adds up.
    """
    b, h = q.shape[0], q.shape[2]
    longest = max(q.shape[1], k.shape[1])
    length = MIN_SEGMENT
    programs = WALKS if causal and b * h >= WALKS else PROGRAMS if causal else 2 * PROGRAMS
    while log_gate is None and length < longest and b * h * longest > length * programs:
        length *= 2
    return length


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _slots(x: Tensor, segment: int, cu_seqlens: Tensor | None) -> int:
    """Rows of segment states; packed, an upper bound that needs no look at the lengths."""
    if cu_seqlens is not None:
        return x.shape[1] // segment + cu_seqlens.shape[0] - 1
    return x.shape[0] * -(-x.shape[1] // segment)


Outputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    normalize: bool,
    save: bool,
    segment: int,
) -> Outputs:
    """o, s, z, one over each denominator, and the state before each segment, z after s (None where not needed)."""
    h, width_k, width_v = k.shape[2], k.shape[3], v.shape[3]
    n, state = _sequences(q, cu_seqlens), _state_type(q)
    shape = (q.shape[0], q.shape[1], h, width_v)
    # packed: tokens after the last sequence belong to nobody and stay zero
    o = q.new_empty(shape) if cu_seqlens is None else q.new_zeros(shape)
    s = q.new_empty((n, h, width_k, width_v), dtype=state)
    z = q.new_empty((n, h, width_k), dtype=state)
    inv = q.new_empty(shape[:3], dtype=state) if save and normalize else None
    rows = None
    if save and causal and (cu_seqlens is not None or k.shape[1] > segment):
        rows = q.new_empty((_slots(k, segment, cu_seqlens), h, width_k * (width_v + 1)), dtype=state)
    return o, s, z, inv, rows


def _filled(q: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """An operator returns tensors: empty ones for None."""
    return tuple(q.new_empty((0,), dtype=_state_type(q)) if x is None else x for x in tensors)


torch.library.define(
    "subquad::linear_attention",
    f"({_INPUTS}, {_OPTIONS}, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    causal: bool,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
    save: bool,
) -> Outputs:
    from subquad.ops import linear_triton

    segment = _segment(q, k, log_gate, causal)
    outputs = o, s, z, inv, rows = _outputs(q, k, v, cu_seqlens, causal, normalize, save, segment)
    if rows is None and (cu_seqlens is not None or k.shape[1] > segment):
        rows = s.new_empty((_slots(k, segment, cu_seqlens), k.shape[2], k.shape[3] * (v.shape[3] + 1)))
    call = linear_triton.Call(
        q, k, v, log_gate, lengths, cu_seqlens, causal, feature_map, signed, normalize, eps, segment
    )
    init = None if s0 is None or z0 is None else (s0, z0)
    linear_triton.launch_forward(call, init, o, s, z, inv, rows)
    return outputs


@torch.library.impl("subquad::linear_attention", "CompositeExplicitAutograd")
def _(q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _filled(q, _forward(q, *rest))


@torch.library.register_fake("subquad::linear_attention")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    causal: bool,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
    save: bool,
) -> tuple[Tensor, ...]:
    segment = _segment(q, k, log_gate, causal)
    return _filled(q, _outputs(q, k, v, cu_seqlens, causal, normalize, save, segment))


torch.library.define(
    "subquad::linear_attention_backward",
    f"(Tensor do, Tensor? ds, Tensor? dz, {_INPUTS}, Tensor o, Tensor s, Tensor z, Tensor inv, Tensor rows,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _backward(
    do: Tensor,
    ds: Tensor | None,
    dz: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    o: Tensor,
    s: Tensor,
    z: Tensor,
    inv: Tensor | None,
    rows: Tensor | None,
    causal: bool,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
) -> tuple[Tensor | None, ...]:
    from subquad.ops import linear_triton

    dq, dk, dv = (x.new_empty(x.shape) if cu_seqlens is None else x.new_zeros(x.shape) for x in (q, k, v))
    ds0, dz0 = (None if x is None else x.new_empty(x.shape) for x in (s0, z0))
    if ds is None and dz is not None:
        ds = dz.new_zeros((*dz.shape, v.shape[3]))
    if dz is None and ds is not None:
        dz = ds.new_zeros(ds.shape[:-1])
    segment = _segment(q, k, log_gate, causal)
    call = linear_triton.Call(
        q, k, v, log_gate, lengths, cu_seqlens, causal, feature_map, signed, normalize, eps, segment
    )
    init = None if s0 is None or z0 is None else (s0, z0)
    if not causal:
        init = s, z
    elif rows is not None and len(rows):
        init = rows, rows
    dg = linear_triton.launch_backward(
        call,
        do if do.stride(-1) == 1 else do.contiguous(),
        None if ds is None or dz is None else (ds.contiguous(), dz.contiguous()),
        o,
        (s, z),
        s.new_empty((0,)) if inv is None else inv,
        init,
        dq,
        dk,
        dv,
        None if ds0 is None or dz0 is None else (ds0, dz0),
    )
    return dq, dk, dv, None if dg is None or log_gate is None else dg.to(log_gate.dtype), ds0, dz0


@torch.library.impl("subquad::linear_attention_backward", "CompositeExplicitAutograd")
def _(do: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _filled(do, _backward(do, *rest))


@torch.library.register_fake("subquad::linear_attention_backward")
def _(
    do: Tensor,
    ds: Tensor | None,
    dz: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return _filled(do, [None if x is None else x.new_empty(x.shape) for x in (q, k, v, log_gate, s0, z0)])


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, causal, feature_map, signed, normalize, eps, save = inputs
    ctx.options = causal, feature_map, signed, normalize, eps
    ctx.saved = save
    ctx.set_materialize_grads(False)
    if save:
        ctx.save_for_backward(*tensors, *output)


def _gradient(ctx, do, ds, dz, *unused):  # type: ignore[no-untyped-def]
    if not ctx.saved:
        raise RuntimeError("linear_attention was called with save=False, so it kept nothing for a backward pass")
    tensors = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(tensors[8])
    if _eager(do):
        dq, dk, dv, dg, ds0, dz0 = _backward(do, ds, dz, *tensors, *ctx.options)
    else:
        kept = _filled(do, tensors[8:])
        grads = torch.ops.subquad.linear_attention_backward(do, ds, dz, *tensors[:8], *kept, *ctx.options)
        of = (*tensors[:4], *tensors[6:8])
        dq, dk, dv, dg, ds0, dz0 = (None if x is None else d for x, d in zip(of, grads, strict=True))
    return dq, dk, dv, dg, None, None, ds0, dz0, None, None, None, None, None, None


torch.library.register_autograd("subquad::linear_attention", _gradient, setup_context=_setup)


class _Eager(torch.autograd.Function):
    """The same operator without the dispatcher, whose layers would take longer than the kernels."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        output = _forward(*inputs)
        _setup(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        return _gradient(ctx, *grads)


def _eager(x: Tensor) -> bool:
    """Whether nobody traces, fakes or counts: the work can be done at once."""
    return type(x) in (Tensor, Parameter) and not (
        torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    )


_STEP = "str feature_map, bool signed, bool normalize, float eps"


torch.library.define(
    "subquad::linear_attention_step",
    f"(Tensor q, Tensor k, Tensor v, Tensor? log_gate, Tensor s, Tensor z, {_STEP}) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("subquad::linear_attention_step", "CompositeExplicitAutograd")
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    s: Tensor,
    z: Tensor,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, ...]:
    from subquad.ops import linear_triton

    o, s_new, z_new = q.new_empty(v.shape), s.new_empty(s.shape), z.new_empty(z.shape)
    linear_triton.launch_step(q, k, v, log_gate, s, z, o, s_new, z_new, feature_map, signed, normalize, eps)
    return o, s_new, z_new


@torch.library.register_fake("subquad::linear_attention_step")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    s: Tensor,
    z: Tensor,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, ...]:
    return q.new_empty(v.shape), s.new_empty(s.shape), z.new_empty(z.shape)


torch.library.define(
    "subquad::linear_attention_step_",
    f"(Tensor q, Tensor k, Tensor v, Tensor? log_gate, Tensor(a!) s, Tensor(b!) z, {_STEP}) -> Tensor",
)


@torch.library.impl("subquad::linear_attention_step_", "CompositeExplicitAutograd")
def _step_inplace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    s: Tensor,
    z: Tensor,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
) -> Tensor:
    from subquad.ops import linear_triton

    o = q.new_empty(v.shape)
    linear_triton.launch_step(q, k, v, log_gate, s, z, o, s, z, feature_map, signed, normalize, eps)
    return o


@torch.library.register_fake("subquad::linear_attention_step_")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    s: Tensor,
    z: Tensor,
    feature_map: str,
    signed: bool,
    normalize: bool,
    eps: float,
) -> Tensor:
    return q.new_empty(v.shape)
