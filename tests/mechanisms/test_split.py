"""Mechanisms over ranks that share the sequence: outputs, gradients and states equal those of one rank."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from subquad import MECHANISMS, build, ranks
from tests.together import together

SIZES = {2: ((23, 14), (1, 36)), 4: ((9, 2, 17, 9), (10, 9, 9, 9))}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DIM, HEADS, BATCH = 16, 4, 2


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every mechanism that can be split, with each of its small options, causal and not, and with rotary positions."""
    found = {}
    for name, cls in MECHANISMS.items():
        for number, small in enumerate(cls.small):
            for causal in (False, True):
                fits = cls.traits.causal if causal else cls.traits.bidirectional
                wrong = name == "mixed" and not all(MECHANISMS[part[0]].splits for part in small["parts"])
                if not cls.splits or not fits or wrong or (small.get("gate") and not causal):
                    continue
                options = {**small, "causal": causal}
                if cls.traits.fixed_length:
                    options["max_length"] = 40
                found[f"{name}-{number}-{'causal' if causal else 'both'}"] = name, options
    for name in ("linear", "softmax", "longformer", "compressed", "retnet"):
        options = {"window": 4, "global_tokens": 2} if name == "longformer" else {}
        for causal in (True,) if name == "retnet" else (False, True):
            found[f"{name}-rotary-{causal}"] = name, {**options, "causal": causal, "rotary": True}
    return found


CASES = cases()


def assert_close(found: Tensor, wanted: Tensor, part: slice = slice(None), name: str = "") -> None:
    tolerance = TOLERANCE[found.dtype]
    most = tolerance * float(wanted.detach().abs().max().clamp(min=1))
    torch.testing.assert_close(found, wanted[:, part], rtol=tolerance, atol=most, msg=lambda m: f"{name}: {m}")


def check(case: str, sizes: tuple[int, ...], padded: bool, dtype: torch.dtype) -> None:
    (name, options), rank, total = CASES[case], dist.get_rank(), sum(sizes)
    torch.manual_seed(0)
    one = build(name, dim=DIM, heads=HEADS, **options).to(dtype)
    if name == "mixed":
        torch.nn.init.eye_(one.into.weight)
    many = copy.deepcopy(one)
    x = torch.randn(BATCH, total, DIM, dtype=dtype)
    lengths = torch.tensor([total, total // 2]) if padded else None
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    own_x, own_lengths, _ = ranks.shard(x, dist.group.WORLD, sizes=sizes, lengths=lengths)
    own_x, x = own_x.clone().requires_grad_(), x.requires_grad_()
    expected = one(x, lengths)
    with ranks.sequence_parallel(dist.group.WORLD) as group:
        found = many(own_x, own_lengths)
    assert_close(found, expected, part)
    torch.manual_seed(1)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (found * weight[:, part]).sum().backward()
    group.sum_gradients(many)
    assert_close(own_x.grad, x.grad, part, "x")
    for (key, p), (_, other) in zip(many.named_parameters(), one.named_parameters(), strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        assert_close(p.grad.reshape(1, -1), wanted.reshape(1, -1), name=key)


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_the_parts_equal_the_whole(case: str, world: int) -> None:
    few, many = SIZES[world]
    for sizes, padded, dtype in (
        (few, False, torch.float64),
        (many, True, torch.float64),
        (few, True, torch.float32),
    ):
        together(world).run(check, case, sizes, padded, dtype)
