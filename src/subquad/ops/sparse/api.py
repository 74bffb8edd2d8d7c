"""The public function: checks its arguments and groups the heads whose patterns can be computed together."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from subquad import ranks
from subquad.checks import check_heads, checked
from subquad.ops.impl import Impl, choose
from subquad.ops.lengths import check_op_lengths
from subquad.ops.sparse import split
from subquad.ops.sparse.operator import attend
from subquad.ops.sparse.patterns import Pattern, Random, Summary
from subquad.ops.sparse.spec import Inputs, Spec

Fn = TypeVar("Fn")
Patterns = Pattern | Sequence[Pattern]


class _Options(TypedDict, total=False):
    """What type checkers see of the signature of sparse_attention, which a test compares."""

    causal: bool
    lengths: Tensor | None
    key_lengths: Tensor | None
    scale: float | None
    impl: Impl


@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Patterns, *, return_lse: Literal[False] = ..., **options: Unpack[_Options]
) -> Tensor: ...
@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Patterns, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@checked
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns,
    *,
    causal: bool = False,
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale·q·kᵀ) v over the pairs of `pattern`: q [B, T, H, D], k and v [B, S, Hkv, D] -> [B, T, H, D].

    `pattern` is one pattern, or one per query head. H is a multiple of Hkv: neighbouring query heads share a key head.
    `causal` keeps j <= i and needs S = T; otherwise S may differ, and positions count from 0 on both sides.
    `lengths` [B] is right padding: keys from there on are hidden, and outputs from there on are zero. `key_lengths`
    [B], for cross-attention, hides keys instead. A query that sees no key gives zeros.
    `return_lse` also returns log Σ exp(scale·q·k) [B, T, H], with gradients, and -inf where no key is visible.
    """
    check_heads("[B, T, H, D]", q=q, k=k, v=v)
    (B, T, H, D), S = q.shape, k.shape[1]
    if v.shape != k.shape or (k.shape[0], k.shape[3]) != (B, D):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{shapes}: q must be [B, T, H, D], and k and v [B, S, Hkv, D]")
    if H % k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: H must be a multiple of Hkv")
    if causal and T != S:
        raise ValueError(f"causal=True needs as many keys as queries, got T={T}, S={S}")
    if causal and key_lengths is not None:
        raise ValueError("key_lengths is for cross-attention; with causal=True use lengths")
    check_op_lengths("lengths", lengths, B, T if key_lengths is not None else max(T, S), q.device)
    check_op_lengths("key_lengths", key_lengths, B, S, q.device)
    scale = D**-0.5 if scale is None else float(scale)
    impl = choose(impl, "sparse_attention", q, _unsupported(q))
    if ranks.active() is not None:
        o, lse = _over_ranks(q, k, v, pattern, causal, lengths, key_lengths, scale, impl, return_lse)
        return (o, lse) if return_lse else o
    each = (pattern,) * H if isinstance(pattern, Pattern) else tuple(pattern)
    if not all(isinstance(one, Pattern) for one in each):
        raise ValueError(f"pattern: one Pattern, or one for each query head; got {pattern!r}")
    texts = tuple(one.text for one in each)
    groups = _groups(texts, H, k.shape[2], impl == "triton")
    parts: list[tuple[Tensor, Tensor]] = []
    hidden = lengths if key_lengths is None else key_lengths
    for group in groups:  # not unpacked: torch.compile of torch 2.11 cannot unpack a NamedTuple
        inputs = Inputs(_heads(q, group.heads), _heads(k, group.kv), _heads(v, group.kv), lengths, hidden)
        spec = Spec(group.pattern, group.draws, group.shifts, causal, scale, return_lse, impl)
        parts.append(attend(inputs, spec))
    o, lse = parts[0]
    if len(parts) > 1:
        order = [h for group in groups for h in group.heads]
        back = tuple(map(order.index, range(H)))
        o, lse = (_heads(torch.cat(same, 2), back) for same in zip(*parts, strict=True))
    return (o, lse) if return_lse else o


def _over_ranks(
    q: Tensor, k: Tensor, v: Tensor, pattern: Patterns, causal: bool, lengths: Tensor | None,
    key_lengths: Tensor | None, scale: float, impl: Impl, sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if key_lengths is not None or q.shape[1] != k.shape[1]:
        ranks.refuse("cross-attention", "accepted are as many keys as queries, with lengths")
    patterns = [pattern] * q.shape[2] if isinstance(pattern, Pattern) else list(pattern)
    if len(patterns) != q.shape[2] or not all(isinstance(one, Pattern) for one in patterns):
        raise ValueError(f"pattern: one Pattern, or one for each of the {q.shape[2]} query heads; got {len(patterns)}")
    return split.attention(alone(scale, impl), q, k, v, patterns, causal, lengths, sums)


def alone(scale: float | None, impl: Impl) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_attention of what this rank has, with its log-sum-exp."""

    def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Patterns, **how: Any) -> tuple[Tensor, Tensor]:
        with ranks.suspended():
            return sparse_attention(q, k, v, pattern, scale=scale, impl=impl, return_lse=True, **how)

    return attend


def _unsupported(q: Tensor) -> str | None:
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, not {q.dtype}"
    if q.shape[3] * q.dtype.itemsize > 512:
        return f"it holds heads of at most 256, or 128 in float32, got D={q.shape[3]} in {q.dtype}"
    return None


def _constant(function: Fn) -> Fn:
    """torch.compiler.assume_constant_result, which would import the whole compiler and Triton."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Group(NamedTuple):
    """Heads that are computed together: their patterns differ only in draws and shifts."""

    pattern: str  # as JSON
    draws: tuple[int, ...]  # as in Spec
    shifts: tuple[int, ...]  # as in Spec
    heads: tuple[int, ...]
    kv: tuple[int, ...]  # the key heads that they read


@_constant
def _groups(patterns: tuple[str, ...], H: int, Hkv: int, triton: bool) -> tuple[Group, ...]:
    """Groups the heads, given the pattern of each as JSON."""
    if len(patterns) != H:
        raise ValueError(f"pattern: one Pattern, or one for each of the {H} query heads; got {len(patterns)}")
    return _grouped(patterns, H // Hkv, triton)


@lru_cache(maxsize=256)
def _grouped(patterns: tuple[str, ...], share: int, triton: bool) -> tuple[Group, ...]:
    families = [_family(text, triton) for text in patterns]
    groups = []
    for family in dict.fromkeys(family for family, _, _ in families):
        heads = tuple(h for h, (own, _, _) in enumerate(families) if own == family)
        draws = tuple(draw for h in heads if (draw := families[h][1]) is not None)
        shifts = tuple(shift for h in heads if (shift := families[h][2]) is not None)
        kv = tuple(h // share for h in heads)
        # Query heads can share a key head if all of them are in this group, with one shift.
        # Otherwise each query head gets a copy of its key head.
        shared = kv[::share]
        whole = heads == tuple(h for g in shared for h in range(g * share, (g + 1) * share))
        whole = whole and all(len(set(shifts[n : n + share])) <= 1 for n in range(0, len(shifts), share))
        if len(set(shifts)) == 1:
            family, shifts = Pattern.from_json(family)._with(Summary, shift=shifts[0]).to_json(), ()
        groups.append(Group(family, draws, shifts, heads, shared if whole else kv))
    return tuple(groups)


def _family(text: str, triton: bool) -> tuple[str, int | None, int | None]:
    """What the heads of a group have in common: the pattern without its draw and without the shift of its summary.

    Also returns the draw and the shift; None if there is none, or if it stays in the pattern.
    """
    whole = Pattern.from_json(text)
    if not triton and any(isinstance(atom, Random) for atom in whole.atoms):
        return text, None, None  # in the torch path all heads of a random tile read the same keys
    pattern, draw = whole._without_head() if triton else (whole, None)
    shifts = [atom.shift for atom in pattern.atoms if isinstance(atom, Summary)]
    if len(shifts) != 1:
        return pattern.to_json(), draw, None
    return pattern._with(Summary, shift=0).to_json(), draw, shifts[0]


def _heads(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """These heads of x, by slices: copying an index to a GPU would wait, and cannot be captured in a CUDA graph."""
    ends = [n for n in range(1, len(heads)) if heads[n] != heads[n - 1] + 1]
    runs = [heads[a:b] for a, b in zip([0, *ends], [*ends, len(heads)], strict=True)]
    if len(runs) == 1 and len(heads) == x.shape[2]:
        return x
    parts = [x[:, :, run[0] : run[-1] + 1] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
