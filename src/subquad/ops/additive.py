"""Additive attention (arXiv:1409.0473): oₜ = Σₛ softmaxₛ(score·tanh(qₜ + kₛ)) vₛ over the first keys of each query."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subquad.checks import check_heads, checked
from subquad.ops.impl import Impl, choose
from subquad.ops.lengths import symbolic
from subquad.ops.opaque import attention_operator

PAIRS = 1 << 20  # elements of tanh(q + k) alive at once
GPU_PAIRS = 2**28  # the same on a GPU, which would be mostly idle with small pieces


@checked
def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, score: Tensor, *, dropout: float = 0.0, impl: Impl = "auto"
) -> Tensor:
    """q [B, T, H, U], k [B, S, H, U], v [B, S, H, V], score [H, U] -> [B, T, H, V].

    Query t sees the first counts[b, t] keys, at least one.
    """
    check_heads("[B, T, H, U]", q=q, k=k)
    check_heads("[B, S, H, V]", v=v)
    (B, T, H, U), S = q.shape, k.shape[1]
    if k.shape != (B, S, H, U) or v.shape[:3] != (B, S, H) or score.shape != (H, U) or counts.shape != (B, T):
        given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, score {tuple(score.shape)}"
        wanted = "k [B, S, H, U], v [B, S, H, V], score [H, U] and counts [B, T]"
        raise ValueError(f"{given}, counts {tuple(counts.shape)}: with q [B, T, H, U] accepted are {wanted}")
    if choose(impl, "additive_attention", q, _unsupported(q, v, dropout)) == "triton":
        k, v, counts = k.to(q.dtype), v.to(q.dtype), counts.to(torch.int32).contiguous()
        o: Tensor = torch.ops.subquad.additive_tiles(q, k, v, counts, score)[0]
        return o
    # into how many pieces a call is cut would be fixed in a compiled graph: there an operator cuts it
    if symbolic(T, B, S) or (torch.compiler.is_compiling() and _rows(k) < T):
        return _operator([q, k, v, counts, score], str(dropout), dropout > 0)
    return attend(q, k, v, counts, score, dropout)


def _unsupported(q: Tensor, v: Tensor, dropout: float) -> str | None:
    if dropout:
        return f"it never holds the weights, so it cannot drop them, got dropout={dropout}"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, not {q.dtype}"
    if v.shape[3] * q.dtype.itemsize > 512:
        return f"it holds values of at most 256, or 128 in float32, got V={v.shape[3]} in {q.dtype}"
    return None


def _rows(k: Tensor) -> int:
    """Queries to compute at a time."""
    return max(1, (GPU_PAIRS if k.is_cuda else PAIRS) // max(1, k.numel()))


def attend(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, score: Tensor, dropout: float) -> Tensor:
    """Compute some queries at a time, and again in backward, so that long inputs need no [T, S, hidden] tensor."""
    rows = _rows(k)
    if rows >= q.shape[1]:
        return attend_rows(q, k, v, counts, score, dropout)
    parts = [
        checkpoint(attend_rows, part, k, v, count, score, dropout, use_reentrant=False)
        for part, count in zip(q.split(rows, 1), counts.split(rows, 1), strict=True)
    ]
    return torch.cat(parts, dim=1)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, score: Tensor, dropout: float) -> Tensor:
    pairs = torch.tanh(q[:, :, None] + k[:, None])  # [B, T, S, H, hidden]
    scores = torch.einsum("btshm,hm->bhts", pairs, score.to(pairs.dtype))
    hidden = torch.arange(k.shape[1], device=k.device) >= counts[:, None, :, None]  # [B, 1, T, S]
    weights = F.dropout(scores.masked_fill(hidden, -torch.inf).softmax(-1), dropout)
    return torch.einsum("bhts,bshv->bthv", weights, v)


def _attend_inputs(inputs: Sequence[Tensor], dropout: str) -> Tensor:
    q, k, v, counts, score = inputs
    return attend(q, k, v, counts, score, float(dropout))


_operator = attention_operator("additive", _attend_inputs)


def _call(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, score: Tensor) -> Any:
    from subquad.ops.additive_triton import Call

    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return Call(q, k, v, counts, score)


@torch.library.custom_op("subquad::additive_tiles", mutates_args=())
def _tiles(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    from subquad.ops import additive_triton

    return additive_triton.forward(_call(q, k, v, counts, score))


@_tiles.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    B, T, H, _ = q.shape
    return v.new_empty((B, T, H, v.shape[3])), q.new_empty((B * H, T), dtype=torch.float32)


@torch.library.custom_op("subquad::additive_tiles_backward", mutates_args=())
def _tiles_backward(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, counts: Tensor, score: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from subquad.ops import additive_triton

    do = do if do.stride(-1) == 1 else do.contiguous()
    return additive_triton.backward(_call(q, k, v, counts, score), o, lse, do)


@_tiles_backward.register_fake
def _(do: Tensor, o: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG001
    q, k, v, _, score = inputs
    return tuple(t.new_empty(t.shape) for t in (q, k, v, score))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs)


def _backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    dq, dk, dv, dscore = _tiles_backward(do, *ctx.saved_tensors)
    return dq, dk, dv, None, dscore


_tiles.register_autograd(_backward, setup_context=_save)
