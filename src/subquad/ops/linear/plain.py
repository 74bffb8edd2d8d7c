"""Linear attention by all rules in operations that torch itself differentiates, any number of times and in any mode.

The other paths write their gradients by hand, once. Second derivatives and the transforms of torch.func come here. It
takes more memory and time: all that autograd keeps.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from subquad.ops.feature_maps import FEATURE_MAPS
from subquad.ops.lengths import zero_padding
from subquad.ops.linear.chunked import FORGET, decay_between, divisor_of, saturate
from subquad.ops.linear.rules import rule_step
from subquad.ops.linear.spec import Inputs, RuleInputs, Spec
from subquad.ops.precision import uncast, wide_type

CHUNK = 32

Back = tuple[Tensor, Tensor, Tensor]  # of each token of a pack its sequence, its place there, and whether it has one


def attend(x: Inputs, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """o, s and z of `operators.attend`."""
    phi, dtype = FEATURE_MAPS[spec.feature_map].apply, wide_type(x.v)
    rows = RuleInputs(*x[:4], None, *x[4:7])
    rows = rows._replace(**{n: t.to(dtype) for n, t in zip("qkv", (phi(x.q), phi(x.k), x.v), strict=True)})
    one = torch.ones_like(rows.v[..., :1])
    start = None if x.s0 is None or x.z0 is None else torch.cat((x.s0, x.z0[..., None]), -1)
    rows = rows._replace(v=torch.cat((rows.v, one), -1), s0=start)  # z is one more column of s
    o, s = _of_rows(rows, _read_causal if spec.causal else _read_all)
    o, d = o[..., :-1], o[..., -1:]
    if spec.normalize:
        o = o / divisor_of(d, spec.signed, spec.eps)
    if x.q.shape[1] == x.k.shape[1]:
        o = zero_padding(o, x.lengths)
    return saturate(o, x.v.dtype).to(x.v.dtype), s[..., :-1], s[..., -1]


def recur(x: RuleInputs, wide: bool) -> tuple[Tensor, Tensor]:
    """o and s of `rule_operators.recur`."""
    dtype = wide_type(x.v)
    o, s = _of_rows(x._replace(q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype)), _read_causal)
    o = zero_padding(o, x.lengths)
    return o if wide else saturate(o, x.v.dtype).to(x.v.dtype), s


def gradients(
    compute: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of compute(*inputs) for those of its results, as expressions that can be differentiated again."""
    # views, since one input may have been computed from another
    inputs = [t.view_as(t) if t is not None and t.requires_grad else t for t in inputs]
    pairs = [(o, g) for o, g in zip(compute(*inputs), grads, strict=True) if g is not None and o.requires_grad]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    results, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(results, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def _of_rows(x: RuleInputs, read: Callable[[RuleInputs], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`read` of rows with zeros in their padding; a pack becomes padded rows."""
    back = None
    if x.cu_seqlens is not None:
        x, back = _unpack(x, x.cu_seqlens)
    # where there are more or fewer queries than keys, lengths are those of the keys alone
    q = x.q if x.q.shape[1] != x.k.shape[1] else zero_padding(x.q, x.lengths)
    k, v = (zero_padding(t, x.lengths) for t in (x.k, x.v))
    log_gate, beta = (None if t is None else zero_padding(t, x.lengths) for t in x[3:5])
    with uncast(x.v):
        o, s = read(x._replace(q=q, k=k, v=v, log_gate=log_gate, beta=beta))
    if back is not None:
        row, place, known = back
        o = o[row, place].masked_fill(~known[:, None, None], 0)[None]
    return o, s


def _unpack(x: RuleInputs, cu_seqlens: Tensor) -> tuple[RuleInputs, Back]:
    borders, length = cu_seqlens.long(), x.v.shape[1]
    sizes = borders.diff()
    longest = int(sizes.max())
    source = (borders[:-1, None] + torch.arange(longest, device=borders.device)).clamp(max=length - 1)
    token = torch.arange(length, device=borders.device)
    row = torch.searchsorted(borders[1:], token, right=True).clamp(max=len(sizes) - 1)
    back = row, (token - borders[row]).clamp(max=longest - 1), token < borders[-1]
    q, k, v = (t[0][source] for t in x[:3])
    log_gate, beta = (None if t is None else t[0][source] for t in x[3:5])
    return RuleInputs(q, k, v, log_gate, beta, sizes, None, x.s0), back


def _start(x: RuleInputs) -> Tensor:
    shape = x.v.shape[0], x.v.shape[2], x.k.shape[3], x.v.shape[3]
    return x.v.new_zeros(shape) if x.s0 is None else x.s0.to(x.v.dtype)


def _read_all(x: RuleInputs) -> tuple[Tensor, Tensor]:
    s = _start(x) + torch.einsum("bshm,bshv->bhmv", x.k, x.v)
    return torch.einsum("bthm,bhmv->bthv", x.q, s), s


def _read_causal(x: RuleInputs) -> tuple[Tensor, Tensor]:
    s, channels = _start(x), x.log_gate is not None and x.log_gate.dim() == 4
    size, parts = 1 if channels else CHUNK, [x.v[:, :0]]
    for start in range(0, x.v.shape[1], size):
        at = slice(start, start + size)
        q, k, v = (t[:, at].transpose(1, 2) for t in x[:3])  # [B, H, C, ...]
        log_gate, beta = (None if t is None else t[:, at].transpose(1, 2) for t in x[3:5])
        if log_gate is not None and channels:
            rate = None if beta is None else beta[:, :, 0]
            o, s = rule_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], log_gate[:, :, 0].clamp(min=FORGET), rate, s)
            o = o[:, :, None]
        else:
            o, s = _chunk(q, k, v, log_gate, beta, s)
        parts.append(o.transpose(1, 2))
    return torch.cat(parts, 1), s


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None, s: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The formulas of rule_chunked.py for one chunk: q, k [B, H, C, K], v [B, H, C, V] -> o [B, H, C, V], s."""
    within = torch.ones(q.shape[2], q.shape[2], dtype=v.dtype, device=v.device).tril()
    q_in, k_in, k_out, total = q, k, k, None
    if log_gate is not None:
        cumulated = log_gate.double().clamp(min=FORGET).cumsum(-1)  # [B, H, C]
        reach, rest = (g.exp().to(v.dtype)[..., None] for g in (cumulated, cumulated[..., -1:] - cumulated))
        within, total = decay_between(cumulated, v.dtype, strict=False), reach[..., -1:, :]
        q_in, k_in, k_out = q * reach, k * reach, k * rest
    if beta is not None:
        rate = beta[..., None].to(v.dtype)
        below = (rate * (k @ k.mT) * within).tril(-1)
        v = torch.linalg.solve_triangular(below, rate * (v - k_in @ s), upper=False, unitriangular=True)
    o = q_in @ s + ((q @ k.mT) * within) @ v
    return o, (s if total is None else s * total) + k_out.mT @ v
