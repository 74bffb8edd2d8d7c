"""Linear attention over a sequence that several ranks share: they exchange states, and the kernels run as they are.

Causal: a rank computes the state after its own part from nothing, and by what its part multiplies the state before it:
exp of the sum of its gates, or for delta rules a matrix. From those of the ranks before it follows the state before its
first token, which the kernels take as the initial one. Bidirectional: the sums of all ranks are added up.

What is sent does not depend on T: [R, H, M, V + 1] numbers of at least float32 a rank, and [R, H, M, M] more for a
delta rule.
"""

import torch
from torch import Tensor

from subquad import ranks
from subquad.ops.feature_maps import FEATURE_MAPS
from subquad.ops.lengths import zero_padding
from subquad.ops.linear import operators, rule_operators
from subquad.ops.linear.chunked import FORGET
from subquad.ops.linear.spec import Inputs, RuleInputs, Spec
from subquad.ops.precision import uncast, wide_type


def attend(x: Inputs, spec: Spec, impl: str, ends: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`operators.attend`, over all ranks where sequences are split; the states are right only if `ends`."""
    if ranks.active() is None:
        return operators.attend(x, spec, impl)
    start = None if x.s0 is None or x.z0 is None else _joined(x.s0, x.z0)
    if not spec.causal:
        return _attend_both_ways(x, spec, impl, start)
    before, after = ranks.prefix(_change(x, spec, impl), start, ends)
    o, s, z = operators.attend(_from(x, before), spec, impl)
    return (o, after[..., :-1], after[..., -1]) if ends else (o, s, z)


def recur(x: RuleInputs, wide: bool, impl: str, ends: bool) -> tuple[Tensor, Tensor]:
    """`rule_operators.recur`, over all ranks where sequences are split; the state is right only if `ends`."""
    if ranks.active() is None:
        return rule_operators.recur(x, wide, impl)
    before, after = ranks.prefix(_rule_change(x, impl), x.s0, ends)
    o, s = rule_operators.recur(x._replace(s0=before), wide, impl)
    return o, after if ends else s


def _attend_both_ways(x: Inputs, spec: Spec, impl: str, start: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    own = _joined(*_sums(x, spec, impl))
    group = ranks.active()
    sums = ranks.total(own if start is None or (group is not None and group.rank > 0) else own + start, "states")
    s, z = sums[..., :-1].contiguous(), sums[..., -1].contiguous()
    if x.cu_seqlens is not None:  # a pack has as many keys as queries: begin with those of the other ranks
        return operators.attend(_from(x, sums - own), spec, impl)[0], s, z
    few = 1 if x.q.shape[1] > 1 else 2  # keys that nobody reads: not as many as queries, so that only they are padded
    k, v = (t.new_zeros(t.shape[0], few, *t.shape[2:]) for t in (x.k, x.v))
    none = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device)
    o, _, _ = operators.attend(Inputs(x.q, k, v, None, none, None, s, z), spec, impl)
    return (zero_padding(o, x.lengths) if x.q.shape[1] == x.k.shape[1] else o), s, z


def _sums(x: Inputs, spec: Spec, impl: str) -> tuple[Tensor, Tensor]:
    """s and z over this rank's keys, without a start."""
    spec = spec._replace(causal=False, normalize=False)
    if x.cu_seqlens is None:  # the keys alone: one query reads them for nobody
        x = x._replace(q=x.q[:, :1].detach())
    _, s, z = operators.attend(x._replace(log_gate=None, s0=None, z0=None), spec, impl)
    return s, z


def _change(x: Inputs, spec: Spec, impl: str) -> ranks.Change:
    if x.log_gate is None:
        return ranks.Change(_joined(*_sums(x, spec, impl)))
    gate = _gates(x.log_gate, x.lengths)
    by = _total(gate, x.cu_seqlens).exp().to(wide_type(x.k))[..., None, None]  # [R, H, 1, 1]
    if x.cu_seqlens is not None:
        _, s, z = operators.attend(x._replace(s0=None, z0=None), spec._replace(normalize=False), impl)
        return ranks.Change(_joined(s, z), by)
    with uncast(x.k):
        phi = FEATURE_MAPS[spec.feature_map].apply(x.k.to(wide_type(x.k))) * _until_end(gate, x.k)[..., None]
        x = x._replace(q=torch.zeros_like(phi[:, :1]), k=phi, v=x.v.to(phi.dtype))
        return ranks.Change(_joined(*_sums(x, spec._replace(feature_map="identity"), impl)), by)


def _rule_change(x: RuleInputs, impl: str) -> ranks.Change:
    width, keys = x.v.shape[-1], x.k.shape[-1]
    x = x._replace(q=x.q.detach(), s0=None)
    if x.beta is None:
        assert x.log_gate is not None
        gate = _gates(x.log_gate, x.lengths)
        by = _total(gate, x.cu_seqlens).exp().to(wide_type(x.k))[..., None]  # [R, H, K, 1]
        if x.cu_seqlens is not None:
            return ranks.Change(rule_operators.recur(x, True, impl)[1], by)
        k = x.k.to(wide_type(x.k)) * _until_end(gate, x.k)
        plain = Inputs(torch.zeros_like(k[:, :1]), k, x.v.to(k.dtype), None, x.lengths)
        return ranks.Change(_sums(plain, Spec(True, "identity"), impl)[0], by)
    # what the rule makes of the identity, with values of zero, is what multiplies any state before it
    one = torch.eye(keys, dtype=wide_type(x.v), device=x.v.device).expand(x.sequences, x.k.shape[2], keys, keys)
    none = x.v.new_zeros(*x.v.shape[:3], keys)
    if impl == "triton" and width + keys > 256:  # more than a kernel holds
        added = rule_operators.recur(x, True, impl)[1]
        return ranks.Change(added, rule_operators.recur(x._replace(v=none, s0=one), True, impl)[1], matrix=True)
    start = torch.cat((one.new_zeros(*one.shape[:3], width), one), -1)
    _, both = rule_operators.recur(x._replace(v=torch.cat((x.v, none), -1), s0=start), True, impl)
    return ranks.Change(both[..., :width], both[..., width:], matrix=True)


def _joined(s: Tensor, z: Tensor) -> Tensor:
    return torch.cat((s, z[..., None]), -1)


def _from(x: Inputs, state: Tensor) -> Inputs:
    return x._replace(s0=state[..., :-1].contiguous(), z0=state[..., -1].contiguous())


def _gates(log_gate: Tensor, lengths: Tensor | None) -> Tensor:
    """In float64, so that differences of their sums are exact; zero in the padding, and finite."""
    return zero_padding(log_gate, lengths).to(torch.float64).clamp(min=FORGET)


def _total(gate: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The sum of the gates of each sequence: [B, T, H] -> [R, H], and so on."""
    if cu_seqlens is None:
        return gate.sum(1)
    rows = cu_seqlens.shape[0] - 1
    token = torch.arange(gate.shape[1], device=gate.device)
    row = torch.searchsorted(cu_seqlens[1:].to(torch.int64), token, right=True).clamp(max=rows - 1)
    return gate.new_zeros(rows, *gate.shape[2:]).index_add(0, row, gate[0])


def _until_end(gate: Tensor, like: Tensor) -> Tensor:
    """How much of each token is left at the end of the part: exp of the gates after it."""
    return (gate.flip(1).cumsum(1).flip(1) - gate).exp().to(wide_type(like))
