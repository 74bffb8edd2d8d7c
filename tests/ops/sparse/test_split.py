"""Sparse attention over ranks that share the sequence equals that of one rank, the log-sum-exp included."""

from functools import reduce
from operator import or_
from typing import Any

import pytest
import torch
import torch.distributed as dist

from subquad import ranks
from subquad.ops import Block, Dense, Dilated, Global, Local, Pattern, Strided, Summary, sparse_attention
from tests.together import together

B, H, D = 2, 4, 3
SIZES = {2: ((11, 6), (2, 15)), 4: ((5, 2, 9, 1), (4, 4, 4, 5))}
PATTERNS: dict[str, list[Pattern]] = {
    "window": [Local(3)],
    "one-sided": [Local(2, 5)],
    "own key": [Local(0)],
    "window of all": [Local(40)],
    "global": [Global(6)],
    "global and window": [Local(2), Global(5)],
    "all": [Dense()],
    "stride and window": [Local(4, 0), Strided(4)],
    "blocks": [Block(3), Summary(3, 1)],
    "dilated": [Dilated(2, 3)],
}


def check(name: str, sizes: tuple[int, ...], causal: bool, padded: bool, shared: bool, dtype: torch.dtype) -> None:
    rank, total = dist.get_rank(), sum(sizes)
    pattern: Any = reduce(or_, PATTERNS[name]) if name != "heads" else [Local(1), Dense(), Local(1), Global(2)]
    torch.manual_seed(0)
    q = torch.randn(B, total, H, D, dtype=dtype)
    k, v = (torch.randn(B, total, 2 if shared else H, D, dtype=dtype) for _ in range(2))
    lengths = torch.tensor([total, total // 2]) if padded else None
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    whole: Any = [t.clone().requires_grad_() for t in (q, k, v)]
    own: Any = [t[:, part].clone().requires_grad_() for t in (q, k, v)]
    own_lengths = None if lengths is None else (lengths - part.start).clamp(0, sizes[rank])
    how: dict[str, Any] = {"causal": causal, "return_lse": True}
    attend: Any = sparse_attention
    expected, mass = attend(*whole, pattern, lengths=lengths, **how)
    with ranks.sequence_parallel(dist.group.WORLD):
        found, own_mass = attend(*own, pattern, lengths=own_lengths, **how)
    most = 1e-10 if dtype == torch.float64 else 1e-5
    tolerance = {"rtol": most, "atol": most}
    torch.testing.assert_close(found, expected[:, part], **tolerance)
    seen = torch.isfinite(mass)[:, part]
    torch.testing.assert_close(own_mass[seen], mass[:, part][seen], **tolerance)
    weight = torch.randn_like(expected)
    (expected * weight).sum().add(mass[torch.isfinite(mass)].sum()).backward()
    (found * weight[:, part]).sum().add(own_mass[seen].sum()).backward()
    for one, other in zip(own, whole, strict=True):
        torch.testing.assert_close(one.grad, other.grad[:, part], **tolerance)


def check_errors() -> None:
    q, k = torch.randn(1, 4, 1, 3), torch.randn(1, 2, 1, 3)
    with ranks.sequence_parallel(dist.group.WORLD):
        with pytest.raises(ValueError, match="2 ranks with 1 heads cannot work for Strided"):
            sparse_attention(q, q, q, Strided(2))
        with pytest.raises(ValueError, match="cross-attention cannot work inside sequence_parallel"):
            sparse_attention(q, k, k, Local(2))


@pytest.mark.parametrize("name", [*PATTERNS, "heads"])
def test_the_parts_equal_the_whole(name: str) -> None:
    few, many = SIZES[2]
    for causal in (False, True):
        together(2).run(check, name, few, causal, True, False, torch.float64)
        together(2).run(check, name, many, causal, False, True, torch.float64)
        together(4).run(check, name, SIZES[4][0], causal, True, False, torch.float32)
    together(4).run(check, name, SIZES[4][1], False, False, False, torch.float64)


def test_what_cannot_be_split_is_named() -> None:
    together(2).run(check_errors)
