"""Linear attention: o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t) with S = Σ φ(k)vᵀ and z = Σ φ(k), over s <= t when causal.

Causal sums run in chunks: inside a chunk of C tokens the masked scores are a small matrix, and between chunks one state
(s and z) is handed on, so time is O(T·(C + M)·V) and nothing of size [T, T] exists. Gates, and the borders of packed
sequences, only change how a state travels from chunk to chunk: it is multiplied by exp(g), or by zero. Other rules of
how a token changes the sums, such as the delta rule, stand in rules.py.

Legend: B batch, T queries, S keys, H heads, K key width, M features, V value width.
"""

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from subquad import ranks
from subquad.checks import check_eps, check_heads, check_strided, check_tensor, checked, shown
from subquad.ops.feature_maps import FeatureMap
from subquad.ops.feature_maps import feature_map as find_map
from subquad.ops.impl import Impl, choose
from subquad.ops.lengths import check_attention, readable, shape_of, zero_padding
from subquad.ops.linear import chunked, rule_chunked, rule_fused, split
from subquad.ops.linear.operators import attend, fused_step
from subquad.ops.linear.rules import RuleName, check_beta, check_gate, rule_of
from subquad.ops.linear.spec import Inputs, RuleInputs, Spec
from subquad.ops.precision import uncast, wide, wide_type

Map = str | Callable[[Tensor], Tensor]


class LinearState(NamedTuple):
    """Everything linear attention remembers of the tokens so far."""

    s: Tensor  # [B, H, M, V] at least float32
    z: Tensor  # [B, H, M]


class _Options(TypedDict, total=False):
    """What type checkers see of the signature of linear_attention, which a test compares."""

    causal: bool
    rule: RuleName | None
    feature_map: Map | None
    normalize: bool | None
    eps: float
    lengths: Tensor | None
    key_lengths: Tensor | None
    cu_seqlens: Tensor | None
    log_gate: Tensor | None
    beta: Tensor | None
    initial_state: LinearState | None
    impl: Impl


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[_Options]
) -> Tensor: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, LinearState]: ...
@checked
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    rule: RuleName | None = None,
    feature_map: Map | None = None,
    normalize: bool | None = None,
    eps: float = 1e-6,
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    log_gate: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    """q [B, T, H, K], k [B, S, H, K], v [B, S, H, V] -> o [B, T, H, V] in v's type; (o, state) with return_state.

    S may differ from T when not causal. Sums, states and denominators are at least float32.

    rule           how a token changes the sums: "linear", "gated", "delta" or "gated_delta", as rules.py defines them;
                   None means "gated" where log_gate is given and "linear" otherwise
    feature_map    a name of FEATURE_MAPS or a callable [..., K] -> [..., M], applied to q and k; None means "elu+1", or
                   "identity" for the delta rules, which are stable where |φ(k)| <= 1: that is up to you
    normalize      divide by d = φ(q)·z: by d + eps for positive maps, by sign(d)·max(|d|, eps) for signed ones; None
                   means True, or False for the delta rules
    lengths        [B] right padding of q, k and v alike: padded keys add nothing, padded outputs are zero, the state is
                   the one at the row's own length. Where T differs from S it is taken as key_lengths
    key_lengths    [B] right padding of keys and values alone, for cross-attention, where T may equal S by chance
    cu_seqlens     [N+1] rising from 0 to T: B is 1 and holds N sequences one after the other; states are [N, ...]
    log_gate       [B, T, H] or [B, T, H, M] <= 0, causal only: S_t = exp(g_t) S_{t-1} + φ(k_t) v_tᵀ, z likewise; -inf
                   forgets all
    beta           [B, T, H] in [0, 2], for the delta rules: how far a token moves what its key reads towards its value
    initial_state  added to the sums, decayed by the gates. With a delta rule or a gate for each channel, z is used and
                   changed only where normalize is on

    Inside `subquad.sequence_parallel` all tensors along T are this rank's part, and cu_seqlens has the borders that
    fall into it; initial_state is the one before the whole sequence, and the returned one that after it, on all ranks.
    """
    means = rule_of(rule, causal, log_gate, beta)
    feature_map = means.feature_map if feature_map is None else feature_map
    normalize = means.normalize if normalize is None else normalize
    phi = find_map(feature_map)
    check_attention(q, k, v, causal, lengths, key_lengths)
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has shape {shape_of(k)}, q {shape_of(q)}: accepted is the same width")
    check_eps(eps)
    if cu_seqlens is not None:
        if lengths is not None or key_lengths is not None:
            raise ValueError("cu_seqlens and lengths together: accepted is a pack or a padded batch")
        _check_pack(cu_seqlens, q, k)
    if beta is not None or (log_gate is not None and log_gate.dim() == 4):
        return _follow_rule(q, k, v, log_gate, beta, lengths, cu_seqlens, initial_state, phi, normalize, eps, impl,
                            return_state)  # fmt: skip
    _check_rule_inputs(log_gate, None, q, "[B, T, H]", lengths)
    spec = Spec(causal, _name_of(phi, feature_map), phi.signed, normalize, eps)
    shape = q.shape
    if key_lengths is not None and q.shape[1] == k.shape[1]:
        # the kernels would take lengths for queries and keys alike, so these keys are emptied here
        q, k, v = phi.apply(q), zero_padding(phi.apply(k), key_lengths), zero_padding(v, key_lengths)
        spec = spec._replace(feature_map="identity")
    else:
        lengths = lengths if key_lengths is None else key_lengths
        q, k = (q, k) if phi.fused is not None else (phi.apply(q), phi.apply(k))
    if phi.fused is None:
        _check_features(q, k, v, shape)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    s0, z0 = (None, None) if initial_state is None else _check_state("initial_state", initial_state, rows, q, v)
    impl = choose(impl, "linear_attention", q, _unsupported(q, v))
    o, s, z = split.attend(Inputs(q, k, v, log_gate, lengths, cu_seqlens, s0, z0), spec, impl, return_state)
    return (o, LinearState(s, z)) if return_state else o


def _follow_rule(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, beta: Tensor | None, lengths: Tensor | None,
    cu_seqlens: Tensor | None, initial_state: LinearState | None, phi: FeatureMap, normalize: bool, eps: float,
    impl: Impl, return_state: bool,
) -> Tensor | tuple[Tensor, LinearState]:  # fmt: skip
    """linear_attention by a rule that multiplies the state by a matrix."""
    shape = q.shape
    q, k = phi.apply(q), phi.apply(k)
    _check_features(q, k, v, shape)
    _check_rule_inputs(log_gate, beta, q, "[B, T, H]", lengths)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    s, z = (None, None) if initial_state is None else _check_state("initial_state", initial_state, rows, q, v)
    x = RuleInputs(q, k, v, log_gate, beta, lengths, cu_seqlens, s)
    impl = choose(impl, "linear_attention", q, rule_fused.unsupported(x))
    o, s, z = _recur(x, z, normalize, phi.signed, eps, impl, return_state)
    return (o, LinearState(s, z)) if return_state else o


def _recur(
    x: RuleInputs, z: Tensor | None, normalize: bool, signed: bool, eps: float, impl: str, ends: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """o, s and z after checks. Where outputs are divided, z is one more column of s, for values of one."""
    if not normalize:
        o, s = split.recur(x, False, impl, ends)
        return o, s, s.new_zeros(s.shape[:-1]) if z is None else z
    s0 = None if x.s0 is None or z is None else torch.cat((x.s0, z[..., None]), -1)
    x = x._replace(v=torch.cat((x.v, torch.ones_like(x.v[..., :1])), -1), s0=s0)
    o, s = split.recur(x, True, impl, ends)
    o = o[..., :-1] / chunked.divisor_of(o[..., -1:], signed, eps)
    return chunked.saturate(o, x.v.dtype).to(x.v.dtype), s[..., :-1], s[..., -1]


@checked
def linear_attention_step(
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    state: LinearState,
    *,
    rule: RuleName | None = None,
    feature_map: Map | None = None,
    normalize: bool | None = None,
    eps: float = 1e-6,
    log_gate: Tensor | None = None,
    beta: Tensor | None = None,
    inplace: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, LinearState]:
    """One token, causal: q_t, k_t [B, H, K], v_t [B, H, V] -> o [B, H, V] and the new state.

    log_gate is [B, H] or [B, H, M], beta [B, H], the rest as for `linear_attention`. The old state is left alone unless
    `inplace`, which writes the new one over it and returns it.
    """
    ranks.refuse("linear_attention_step", "a token cannot be split; accepted is a step after the context")
    means = rule_of(rule, True, log_gate, beta)
    feature_map = means.feature_map if feature_map is None else feature_map
    normalize = means.normalize if normalize is None else normalize
    phi = find_map(feature_map)
    check_heads("[B, H, D]", q_t=q_t, k_t=k_t, v_t=v_t)
    if k_t.shape != q_t.shape:
        raise ValueError(f"k_t has shape {tuple(k_t.shape)}: accepted is that of q_t, {tuple(q_t.shape)}")
    if v_t.shape[:2] != q_t.shape[:2]:
        raise ValueError(f"v_t has shape {tuple(v_t.shape)}, q_t {tuple(q_t.shape)}: accepted is one batch and heads")
    check_eps(eps)
    follows = beta is not None or (log_gate is not None and log_gate.dim() == 3)
    if phi.fused is None or follows:
        shape = q_t.shape
        q_t, k_t = phi.apply(q_t), phi.apply(k_t)
        _check_features(q_t, k_t, v_t, shape)
    _check_rule_inputs(log_gate, beta, q_t, "[B, H]")
    s, z = _check_state("state", state, q_t.shape[0], q_t, v_t)
    spec = Spec(True, _name_of(phi, feature_map), phi.signed, normalize, eps)
    if follows:
        spec = spec._replace(feature_map="identity")
    impl = choose(impl, "linear_attention_step", q_t, _unsupported(q_t, v_t))
    tensors = q_t, k_t, v_t, log_gate, beta
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*tensors, s, z))
    if impl == "triton" and wanted and not inplace:  # the kernel has no gradients: take a sequence of one token
        q, k, v, gate, rate = (None if t is None else t[:, None] for t in tensors)
        if follows:
            x = RuleInputs(q, k, v, gate, rate, s0=s)  # type: ignore[arg-type]
            o, s, z = _recur(x, z, normalize, phi.signed, eps, impl)
        else:
            o, s, z = attend(Inputs(q, k, v, gate, s0=s, z0=z), spec, impl)  # type: ignore[arg-type]
        return o[:, 0], LinearState(s, z)
    if impl == "torch" and follows:
        o, s, z = rule_chunked.step(*tensors, s, z, normalize, phi.signed, eps, inplace)
    elif impl == "torch":
        o, s, z = chunked.step(q_t, k_t, v_t, log_gate, s, z, spec, inplace)
    else:
        o, s, z = fused_step(*tensors, s, z, spec, inplace)
    return o, LinearState(s, z)


def linear_attention_sums(
    k: Tensor, v: Tensor, *, feature_map: Map = "elu+1", lengths: Tensor | None = None
) -> LinearState:
    """What a context is to linear attention, in constant size: k [B, S, H, K], v [B, S, H, V] -> s [B, H, M, V], z.

    `linear_attention_read` then equals linear_attention(q, k, v, causal=False, key_lengths=lengths), in O(M·V) a query.
    """
    ranks.refuse("linear_attention_sums", "accepted is linear_attention, which adds up the sums of all ranks")
    phi = zero_padding(_wide_features(k, feature_map), lengths)
    with uncast(k):
        return LinearState(torch.einsum("bshm,bshv->bhmv", phi, wide(v)), phi.sum(1))


def linear_attention_read(
    q: Tensor, state: LinearState, *, feature_map: Map = "elu+1", normalize: bool = True, eps: float = 1e-6
) -> Tensor:
    """o = φ(q)ᵀs / φ(q)ᵀz of queries that see all of a state: q [B, T, H, K] -> o [B, T, H, V] in q's type."""
    phi = _wide_features(q, feature_map)
    with uncast(q):
        o = torch.einsum("bthm,bhmv->bthv", phi, state.s.to(phi.dtype))
        if normalize:
            d = torch.einsum("bthm,bhm->bth", phi, state.z.to(phi.dtype))
            o = o / chunked.divisor_of(d, find_map(feature_map).signed, eps)[..., None]
    return chunked.saturate(o, q.dtype).to(q.dtype)


def _wide_features(x: Tensor, feature_map: Map) -> Tensor:
    """φ(x) in at least float32; a caller's own map sees x in its own type."""
    phi = find_map(feature_map)
    return phi.apply(x).to(wide_type(x)) if phi.fused is None else phi.apply(wide(x))


def _name_of(phi: FeatureMap, feature_map: Map) -> str:
    """The map that is left to the kernels."""
    return feature_map if phi.fused is not None and isinstance(feature_map, str) else "identity"


def _unsupported(q: Tensor, v: Tensor) -> str | None:
    if q.dtype == torch.float64:
        return "float64"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"{q.shape[-1]} features and values of width {v.shape[-1]}, where at most 256 fit"
    return None


def _check_pack(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    batch, length = q.shape[:2]
    if batch != 1 or length != k.shape[1]:
        accepted = "a batch of one with as many keys as queries"
        raise ValueError(f"cu_seqlens with q {shape_of(q)} and k {shape_of(k)}: accepted is {accepted}")
    whole = cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.shape[0] >= 2
    if not whole or cu_seqlens.device != q.device:
        accepted = f"int32 or int64 of shape [N+1] on {q.device}"
        raise ValueError(f"cu_seqlens is {shown(cu_seqlens)}: accepted are {accepted}")
    check_strided("cu_seqlens", cu_seqlens)
    if readable(cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != length or any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(f"cu_seqlens={ends}: accepted are rising numbers from 0 to {length}")


def _check_rule_inputs(
    log_gate: Tensor | None, beta: Tensor | None, q: Tensor, letters: str, lengths: Tensor | None = None
) -> None:
    if log_gate is not None:
        check_gate(log_gate, q, letters, lengths)
    if beta is not None:
        check_beta(beta, q, letters, lengths)


def _check_features(q: Any, k: Any, v: Tensor, shape: torch.Size) -> None:
    """Refuse what a caller's map made of q, which was of that shape, and k, if it is no map [..., K] -> [..., M]."""
    fits = all(isinstance(x, Tensor) and x.is_floating_point() and x.device == v.device for x in (q, k))
    if not fits or q.shape[:-1] != shape[:-1] or k.shape != (*v.shape[:-1], *q.shape[-1:]) or 0 in q.shape:
        raise ValueError(f"feature_map gave {shown(q)} and {shown(k)}: accepted is a map [..., K] -> [..., M]")


def _check_state(which: str, state: LinearState, rows: int, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """s and z, in at least float32; q [..., H, M] and v [..., H, V] give the widths."""
    s, z = state
    shape, dtype = (rows, *q.shape[-2:], v.shape[-1]), wide_type(v)
    for name, x, accepted in ((f"{which}.s", s, shape), (f"{which}.z", z, shape[:-1])):
        check_tensor(name, x)
        if x.shape != accepted or x.device != q.device:
            raise ValueError(f"{name} has shape {tuple(x.shape)} on {x.device}: accepted is {accepted} on {q.device}")
        if x.dtype != dtype:
            raise ValueError(f"{name} is {x.dtype}: accepted is {dtype} with {v.dtype} values")
    return s, z
