"""Sparse attention as one masked softmax, for the transforms of torch.func: it holds T x S weights."""

from math import inf

import torch
from torch import Tensor

from subquad.ops.lengths import keep, zero_padding
from subquad.ops.precision import uncast, wide
from subquad.ops.sparse.patterns import Pattern, Summary
from subquad.ops.sparse.spec import Inputs, Spec


def attend(x: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and its log-sum-exp of `operator.attend`."""
    size, heads = x.q.shape[1:3]
    mask = _mask(x, spec)
    seen = mask.any(-1, keepdim=True)
    q, (k, v) = zero_padding(x.q, x.lengths), (zero_padding(t, x.key_lengths) for t in (x.k, x.v))
    k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    with uncast(x.q):
        scores = torch.einsum("bthd,bshd->bhts", wide(q) * spec.scale, wide(k))
        lse = scores.masked_fill(~mask & seen, -inf).logsumexp(-1, keepdim=True)
        weights = (scores - lse).exp().masked_fill(~mask, 0)
        o = torch.einsum("bhts,bshd->bthd", weights, wide(v)).to(x.q.dtype)
    lse = lse.masked_fill(~seen, -inf)[..., 0].transpose(1, 2)
    present = keep(x.lengths, size)
    if present is not None:
        lse = lse.masked_fill(~present[..., None], -inf)
    return zero_padding(o, x.lengths), lse


def _mask(x: Inputs, spec: Spec) -> Tensor:
    """Which pairs are visible: [1 or B, 1 or H, T, S]."""
    pattern, size, keys = Pattern.from_json(spec.pattern), x.q.shape[1], x.k.shape[1]
    i, j = (torch.arange(n, device=x.q.device) for n in (size, keys))
    known = None if spec.causal else x.key_lengths
    length = keys if known is None else known[:, None, None]
    each = [pattern._with(Summary, shift=shift) for shift in spec.shifts] or [pattern]
    masks = [one._allowed(i[:, None], j, spec.causal, length) for one in each]
    mask = torch.stack([m.expand(1 if known is None else len(x.q), size, keys) for m in masks], 1)
    return mask if known is None else mask & (j < known[:, None])[:, None, None]
