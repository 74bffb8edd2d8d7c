"""Sparse attention in plain torch: dense attention in each tile; the results of tiles are joined by their log-sum-exp.

The backward computes each tile again from the log-sum-exp of the whole union. Nothing of size [T, T] is made.
"""

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.ops.lengths import keep, zero_padding
from subquad.ops.precision import wide, wide_type
from subquad.ops.sparse.patterns import Summary
from subquad.ops.sparse.spec import Inputs, Spec
from subquad.ops.sparse.tiles import Job, cut


def forward(x: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    B, T, H, D = x.q.shape
    job, q, k, v = _prepare(x, spec)
    # the unused rows of tiles write to row T
    o = q.new_zeros(B, T + 1, H, D, dtype=wide_type(q))
    lse = q.new_full((B, T + 1, H), -inf, dtype=wide_type(q))
    for at, keys, mask, start, key_start in cut(job):
        qt, kt, vt = _gather(q, at, H, start), _gather(k, keys, H, key_start), _gather(v, keys, H, key_start)
        part, part_lse = attend_tiles(qt, kt, vt, _bias(mask, B, q.dtype), spec.scale)
        part_lse = part_lse.transpose(1, 2).unflatten(0, (B, -1))  # [B, N, m, H]
        if mask is not None:
            part_lse = part_lse.masked_fill(~mask.any(-1).mT, -inf)
        part_lse = part_lse.flatten(1, 2)
        part = part.transpose(1, 2).reshape(B, -1, H, D).to(o.dtype)
        rows = at.flatten().long() if start is None else slice(start, start + at.numel())
        old = lse[:, rows]
        both = torch.logaddexp(old, part_lse)
        safe = both.masked_fill(both == -inf, 0)
        part = part * torch.exp(part_lse - safe)[..., None]
        part += o[:, rows] * torch.exp(old - safe)[..., None]
        o[:, rows] = part
        lse[:, rows] = both
    o, lse = zero_padding(o[:, :T], x.lengths), lse[:, :T]
    present = keep(x.lengths, T)
    if present is not None:
        lse = lse.masked_fill(~present[..., None], -inf)
    return o.to(q.dtype).contiguous(), lse.contiguous()


def backward(
    x: Inputs, spec: Spec, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, D = x.q.shape
    job, q, k, v = _prepare(x, spec)
    do = zero_padding(do, x.lengths)
    # a row that sees nothing, such as padding, must not compute exp(-inf - -inf)
    lse = lse.masked_fill(lse == -inf, inf)
    if dlse is not None:
        # d lse/d s = p: the same as one more column of v, of ones, whose output is 0 and has gradient dlse
        q, k, o = (F.pad(t, (0, 1)) for t in (q, k, o))
        v = F.pad(v, (0, 1), value=1.0)
        do = torch.cat([do, dlse.masked_fill(lse == inf, 0).to(do.dtype)[..., None]], -1)
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide_type(t), device=t.device) for t in (q, k, v))
    for at, keys, mask, start, key_start in cut(job):
        qt, kt, vt = _gather(q, at, H, start), _gather(k, keys, H, key_start), _gather(v, keys, H, key_start)
        unused = (at >= T).expand(B, -1, -1).flatten(0, 1)[:, None]  # [B·N, 1, m]
        lt = _gather(lse[..., None], at, H, start)[..., 0].masked_fill(unused, inf).contiguous()
        dot, ot = _gather(do, at, H, start), _gather(o, at, H, start)
        dqt, dkt, dvt = _attend_backward(dot, qt, kt, vt, ot, lt, _bias(mask, B, q.dtype), spec.scale)
        _scatter(dq, at, dqt, start)
        _scatter(dk, keys, dkt, key_start)
        _scatter(dv, keys, dvt, key_start)
    dk, dv = _from_columns(job, dk), _from_columns(job, dv)
    dq, dk, dv = (g[..., :D].to(q.dtype).contiguous() for g in (dq, dk, dv))
    return dq, dk, dv


def _prepare(x: Inputs, spec: Spec) -> tuple[Job, Tensor, Tensor, Tensor]:
    """q, k and v with zeros in the padding (0·inf is not 0), and with the columns of every summary after the keys."""
    job = Job.of(x, spec)
    k, v = (_with_columns(job, zero_padding(t, x.key_lengths)) for t in (x.k, x.v))
    return job, zero_padding(x.q, x.lengths), k, v


def _summary_index(job: Job, atom: Summary, x: Tensor) -> Tensor:
    """The columns of a summary as an index to gather from x [B, S, Hkv, D]: [B, n, Hkv, D]."""
    columns = job.columns(atom)
    columns = columns[:: max(1, len(columns) // x.shape[2])]  # query heads that share a key head share the columns
    return columns.clamp(max=job.S - 1).long().mT[:, :, None].expand(len(x), -1, x.shape[2], x.shape[3])


def _with_columns(job: Job, x: Tensor) -> Tensor:
    """x [B, S, Hkv, D], followed by the columns of every summary."""
    columns = [x.gather(1, _summary_index(job, atom, x)) for atom in job.first_columns]
    return torch.cat([x, *columns], 1) if columns else x


def _from_columns(job: Job, grad: Tensor) -> Tensor:
    """The backward of `_with_columns`."""
    keys, columns = grad.tensor_split([job.S], 1)
    for atom in job.first_columns:
        index = _summary_index(job, atom, keys)
        own, columns = columns.tensor_split([index.shape[1]], 1)
        keys.scatter_add_(1, index, own)
    return keys


def _flat(at: Tensor, B: int, S: int) -> Tensor:
    """Positions [N, n] or [B, N, n] as rows of [B·S, ...]; unused positions become any row."""
    return (at.clamp(0, S - 1) + torch.arange(B, device=at.device)[:, None, None] * S).flatten()


def _gather(x: Tensor, at: Tensor, heads: int, start: int | None = None) -> Tensor:
    """Rows of x [B, S, Hkv, D] at positions [N, n] or [B, N, n] -> [B·N, heads, n, D]; unused ones read any row."""
    B, S, H, D = x.shape
    if start is not None:
        rows = x[:, start : start + at.numel()].reshape(-1, at.shape[-1], H, D)
    else:
        rows = x.reshape(B * S, H * D).index_select(0, _flat(at, B, S)).view(-1, at.shape[-1], H, D)
    if heads != H:
        rows = rows.repeat_interleave(heads // H, 2)
    return rows.transpose(1, 2)


def _scatter(into: Tensor, at: Tensor, rows: Tensor, start: int | None = None) -> None:
    """Adds rows [B·N, H, n, D] to `into` [B, S, Hkv, D] at positions `at`; the rows of unused positions are zero."""
    B, S, H, D = into.shape
    rows = rows.transpose(1, 2)  # [B·N, n, H, D]
    if rows.shape[2] != H:
        rows = rows.unflatten(2, (H, -1)).sum(3)
    if start is not None:
        into[:, start : start + at.numel()] += rows.reshape(B, -1, H, D)
    else:
        into.view(B * S, H * D).index_add_(0, _flat(at, B, S), rows.reshape(-1, H * D).to(into.dtype))


def _bias(mask: Tensor | None, B: int, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    if max(mask.shape[:2]) > 1:
        mask = mask.expand(B, -1, -1, -1, -1)
    mask = mask.flatten(0, 1)  # [1 or B·N, 1 or H, 1 or m, n]
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -inf)


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention of tiles [B·N, H, m, D], and its log-sum-exp; a row that sees nothing gives 0 and some lse."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
    s = torch.matmul(wide(q) * scale, wide(k).mT)
    s = s if bias is None else s + bias
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.clamp(min=torch.finfo(s.dtype).min)[..., None])
    return torch.matmul(p, v.to(p.dtype)).to(q.dtype), lse


def _attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of tiles, given o and lse of the whole union."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, False, attn_mask=bias, scale=scale
        )
    do, q, k, v, o = (wide(x) for x in (do, q, k, v, o))
    s = torch.matmul(q * scale, k.mT)
    p = torch.exp((s if bias is None else s + bias) - lse[..., None])
    ds = p * (torch.matmul(do, v.mT) - (do * o).sum(-1, keepdim=True)) * scale
    return torch.matmul(ds, k), torch.matmul(ds.mT, q), torch.matmul(p.mT, do)
