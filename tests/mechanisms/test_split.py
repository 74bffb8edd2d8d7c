"""Mechanisms over ranks that share the sequence: outputs, gradients and states equal those of one rank."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from subquad import MECHANISMS, build, ranks
from subquad.ops.sparse import split
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


def check_prefill(case: str, sizes: tuple[int, ...], padded: bool, continued: bool) -> None:
    """A prompt over ranks, and then tokens on one, from the state that every rank has."""
    (name, options), rank, total = CASES[case], dist.get_rank(), sum(sizes)
    torch.manual_seed(0)
    mix = build(name, dim=DIM, heads=HEADS, **options).double()
    x, more = torch.randn(BATCH, total, DIM).double(), torch.randn(3, BATCH, DIM).double()
    lengths = torch.tensor([total, total // 3]) if padded else None
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    own_x, own_lengths, _ = ranks.shard(x, dist.group.WORLD, sizes=sizes, lengths=lengths)
    before = mix.prefill(torch.randn(BATCH, 5, DIM).double())[1] if continued else None
    expected, after = mix.prefill(x, lengths, before)
    with ranks.sequence_parallel(dist.group.WORLD):
        found, state = mix.prefill(own_x, own_lengths, before)
    assert_close(found, expected, part)
    for t in more:
        (y, state), (wanted, after) = mix.step(t, state), mix.step(t, after)
        assert_close(y, wanted)


def check_refused(case: str, message: str) -> None:
    name, options = CASES[case]
    mix = build(name, dim=DIM, heads=HEADS, **options)
    x = torch.randn(BATCH, 4, DIM)
    state = mix.prefill(x)[1]
    with ranks.sequence_parallel(dist.group.WORLD), pytest.raises(ValueError, match=message):
        mix.prefill(x, None, state)


def check_large_logits(sizes: tuple[int, ...]) -> None:
    """Exponentials in units that change from rank to rank."""
    for case in ("efficient-0-causal", "efficient-0-both", "performer-0-causal", "performer-0-both"):
        name, options = CASES[case]
        torch.manual_seed(0)
        mix = build(name, dim=DIM, heads=HEADS, **options).double()
        x = torch.randn(BATCH, sum(sizes), DIM).double() * torch.linspace(1, 40, sum(sizes))[:, None].double()
        own = ranks.shard(x, dist.group.WORLD, sizes=sizes)[0]
        part = slice(sum(sizes[: dist.get_rank()]), sum(sizes[: dist.get_rank() + 1]))
        with ranks.sequence_parallel(dist.group.WORLD):
            found = mix(own)
        assert_close(found, mix(x), part, case)
        with ranks.sequence_parallel(dist.group.WORLD):
            found = mix(ranks.shard(x.flip(1), dist.group.WORLD, sizes=sizes)[0])
        assert_close(found, mix(x.flip(1)), part, case)


def check_pieces(sizes: tuple[int, ...]) -> None:
    split.PIECE = 2 * len(sizes)  # two keys of each rank at once
    try:
        for case in ("softmax-0-causal", "softmax-0-both"):
            check(case, sizes, True, torch.float64)
    finally:
        split.PIECE = 1 << 16


FIRST = [case for case in CASES if "-0-" in case or "rotary" in case]
STATES = [
    case for case, (name, options) in CASES.items() if options["causal"] and name not in ("compressed", "linformer")
]


@pytest.mark.parametrize("case", CASES)
def test_the_parts_equal_the_whole(case: str) -> None:
    together(2).run(check, case, SIZES[2][0], True, torch.float64)
    if case in FIRST:
        together(2).run(check, case, SIZES[2][1], False, torch.float64)


@pytest.mark.parametrize("case", FIRST)
def test_the_parts_of_four_ranks_equal_the_whole(case: str) -> None:
    together(4).run(check, case, SIZES[4][0], True, torch.float32)


@pytest.mark.parametrize("case", STATES)
def test_a_prompt_over_ranks_continues_on_one(case: str) -> None:
    constant = MECHANISMS[CASES[case][0]].traits.state == "constant"
    together(2).run(check_prefill, case, SIZES[2][0], True, constant)
    if case in FIRST:
        together(2).run(check_prefill, case, SIZES[2][1], False, False)


def test_prompts_that_cannot_be_split_are_named() -> None:
    together(2).run(check_refused, "compressed-0-causal", "prefill of Compressed cannot work")
    together(2).run(check_refused, "softmax-0-causal", "a state before a prompt of Softmax cannot work")
    together(2).run(check_refused, "local-0-causal", "a state before a prompt of Local cannot work")


def test_exponentials_of_large_logits_stay_finite() -> None:
    for world in SIZES:
        together(world).run(check_large_logits, SIZES[world][0])


def test_keys_of_softmax_come_in_pieces() -> None:
    for world in SIZES:
        together(world).run(check_pieces, SIZES[world][0])
