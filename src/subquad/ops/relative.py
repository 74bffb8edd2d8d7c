"""Attention over a band, with scores that depend on the distance as in Transformer-XL (arXiv:1901.02860, §3.3).

oₜ = Σⱼ softmaxⱼ(((qₜ + u)·kⱼ + (qₜ + w)·r_{j-t})·scale) vⱼ over the keys from `before` positions back to `after` ahead.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.checks import check_heads, checked
from subquad.ops.impl import Impl, choose
from subquad.ops.lengths import at_most, first, padding, symbolic

Ends = tuple[Tensor, Tensor]


@checked
def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    *,
    before: int,
    offset: int = 0,
    ends: Ends | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    impl: Impl = "auto",
) -> Tensor:
    """q [B, T, H, D], k and v [B, S, H, D], r [before + 1 + after, H, D], u and w [H, D] -> [B, T, H, D].

    r holds a row for each of the distances j - t = -before .. after. The first `offset` keys, at most `before`, are
    those before the first query. `ends` = (first, last), each [B]: a row has only the keys from `first` to before
    `last`. A query that sees no key may give anything finite.
    """
    check_heads("[B, T, H, D]", q=q, k=k, v=v)
    (B, T, H, D), span = q.shape, r.shape[0] - 1
    if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (B, H, D):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{shapes}: q must be [B, T, H, D], and k and v [B, S, H, D]")
    if r.shape[1:] != (H, D) or u.shape != (H, D) or w.shape != (H, D):
        shapes = f"r {tuple(r.shape)}, u {tuple(u.shape)}, w {tuple(w.shape)}"
        raise ValueError(f"{shapes}: r must be [distances, {H}, {D}], and u and w [{H}, {D}]")
    if not 0 <= before <= span:
        raise ValueError(f"before={before}: r has rows for {span + 1} distances; accepted is 0 to {span}")
    if not 0 <= offset <= before:
        raise ValueError(f"offset={offset}: accepted is 0 to before={before}")
    scale = D**-0.5 if scale is None else float(scale)
    if choose(impl, "relative_attention", q, _unsupported(q, dropout)) == "torch":
        return _blocks(q, k, v, r, u, w, before, offset, ends, scale, dropout)
    k, v, r = k.to(q.dtype), v.to(q.dtype), r.to(q.dtype)
    reach = min(before, offset + T - 1)  # no pair is further apart, so no longer scratch is needed
    r = r[before - reach : before + 1 + min(span - before, max(0, k.shape[1] - offset - 1))]
    low, high = (None, None) if ends is None else ends
    o: Tensor = torch.ops.subquad.relative([q, k, v, r.contiguous(), u, w], low, high, reach, offset, scale)[0]
    return o


def _unsupported(q: Tensor, dropout: float) -> str | None:
    if dropout:
        return f"it never holds the weights, so it cannot drop them, got dropout={dropout}"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, not {q.dtype}"
    if q.shape[3] * q.dtype.itemsize > 512:
        return f"it holds heads of at most 256, or 128 in float32, got D={q.shape[3]} in {q.dtype}"
    return None


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor, before: int, offset: int, ends: Ends | None,
    scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """Queries go in blocks of C, each against the C + span keys that some query of the block can see."""
    size, span = q.shape[1], r.shape[0] - 1
    slots = torch.arange(k.shape[1], device=q.device)
    seen = torch.ones_like(slots, dtype=torch.bool).expand(q.shape[0], -1)
    if ends is not None:
        seen = (slots >= ends[0][:, None]) & (slots < ends[1][:, None])
    # now keys start `before` positions before the first query, and end with those that the last one may see
    around = before - offset, offset + size + (span - before) - k.shape[1]
    k, v, seen = (F.pad(t, (0, 0) * (t.ndim - 2) + around) for t in (k, v, seen))
    c = at_most(max(before, 1), size)
    extra = padding(size, c)
    # flatten heads before padding: torch.compile(dynamic=True) fails on the gradient of padding in another layout
    q = F.pad(q.flatten(2), (0, 0, 0, extra)).unflatten(2, (q.shape[2], -1))
    q = q.unflatten(1, (-1, c))  # [B, N, C, H, K]
    k, v = (_windows(F.pad(t, (0, 0, 0, 0, 0, extra)), c, span, size) for t in (k, v))  # [B, N, H, K, C + span]
    seen = _windows(F.pad(seen, (0, extra)), c, span, size)  # [B, N, C + span]
    content = torch.einsum("bnchk,bnhks->bnhcs", q + u, k)
    offsets = torch.einsum("bnchk,ohk->bnhco", q + w, r)  # [B, N, H, C, span + 1]
    index = torch.arange(c + span, device=q.device) - torch.arange(c, device=q.device)[:, None]  # [C, C + span]
    position = offsets.gather(-1, index.clamp(0, span).expand(*offsets.shape[:3], -1, -1))
    visible = ((index >= 0) & (index <= span)) & seen[:, :, None]  # [B, N, C, C + span]
    visible = visible | ~visible.any(-1, keepdim=True)  # padded queries see all keys, to avoid NaN
    scores = (content + position) * scale
    weights = scores.masked_fill(~visible[:, :, None], -math.inf).softmax(-1)
    weights = F.dropout(weights, dropout)
    return first(torch.einsum("bnhcs,bnhvs->bnchv", weights, v).flatten(1, 2), size)


def _windows(x: Tensor, c: int, span: int, size: int) -> Tensor:
    """The keys of each block of queries: [B, S, ...] -> [B, N, ..., C + span]"""
    if not symbolic(size) and c == size:  # one block: the width of unfold's windows would be fixed in a compiled graph
        return x[:, None].movedim(2, -1)
    return x.unfold(1, c + span, c)


def _call(tensors: Sequence[Tensor], low: Tensor | None, high: Tensor | None, *numbers: Any) -> Any:
    from subquad.ops.relative_triton import Call

    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in tensors[:3])
    r, u, w = (t.contiguous() for t in tensors[3:])
    return Call(q, k, v, r, u, w, low, high, *numbers)


def _forward(
    tensors: Sequence[Tensor], low: Tensor | None, high: Tensor | None, before: int, offset: int, scale: float
) -> list[Tensor]:
    from subquad.ops import relative_triton

    return list(relative_triton.forward(_call(tensors, low, high, before, offset, scale)))


def _gradients(
    do: Tensor, o: Tensor, lse: Tensor, tensors: Sequence[Tensor], low: Tensor | None, high: Tensor | None, before: int,
    offset: int, scale: float,
) -> list[Tensor]:  # fmt: skip
    from subquad.ops import relative_triton

    do = do if do.stride(-1) == 1 else do.contiguous()
    return list(relative_triton.backward(_call(tensors, low, high, before, offset, scale), o, lse, do))


_operator = torch.library.custom_op("subquad::relative", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("subquad::relative_backward", _gradients, mutates_args=())


@_operator.register_fake
def _(tensors: Sequence[Tensor], *others: Any) -> list[Tensor]:  # noqa: ARG001
    (B, T, H, _), q = tensors[0].shape, tensors[0]
    return [q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)]


@_backward_operator.register_fake
def _(do: Tensor, o: Tensor, lse: Tensor, tensors: Sequence[Tensor], *others: Any) -> list[Tensor]:  # noqa: ARG001
    return [t.new_empty(t.shape) for t in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    tensors, low, high, *ctx.numbers = inputs
    ctx.save_for_backward(*output, low, high, *tensors)


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    o, lse, low, high, *tensors = ctx.saved_tensors
    return _backward_operator(grads[0], o, lse, tensors, low, high, *ctx.numbers), *(None,) * 5


_operator.register_autograd(_backward, setup_context=_save)
