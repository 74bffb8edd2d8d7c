"""The exchanges between ranks that share a sequence: their results, gradients and bytes, on 2 and 4 processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import subquad
from subquad import ranks
from tests.together import together

SIZES: dict[int, list[tuple[int, ...]]] = {2: [(6, 3), (1, 8)], 4: [(3, 2, 5, 1), (1, 1, 1, 4)]}
WORLDS = sorted(SIZES)


def mesh_of(world: int) -> Any:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("sequence",))["sequence"]


def parts_of(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return x.split(list(sizes), 1)[dist.get_rank()]


def compare(
    function: Callable[[Tensor], Tensor], wanted: Callable[[Tensor], Tensor], sizes: tuple[int, ...], dtype: torch.dtype
) -> ranks.Group:
    """function of this rank's part equals what `wanted` gives for the whole, and so do the gradients."""
    torch.manual_seed(0)
    whole = torch.randn(2, sum(sizes), 4, 3, dtype=dtype)
    own = parts_of(whole, sizes).clone().requires_grad_()
    whole = whole.requires_grad_()
    with ranks.sequence_parallel(dist.group.WORLD) as group:
        found = function(own)
    expected = wanted(whole)
    torch.testing.assert_close(found, expected)
    torch.manual_seed(1 + dist.get_rank())
    weight = torch.randn_like(expected)
    found.backward(weight)  # after the context
    expected.backward(weight)
    dist.all_reduce(whole.grad)
    torch.testing.assert_close(own.grad, parts_of(whole.grad, sizes), rtol=3e-2 if dtype == torch.bfloat16 else None,
                               atol=3e-2 if dtype == torch.bfloat16 else None)  # fmt: skip
    return group


def check_halo(sizes: tuple[int, ...], before: int, after: int, dtype: torch.dtype) -> None:
    start = sum(sizes[: dist.get_rank()])
    size = sizes[dist.get_rank()]

    def wanted(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, before, after))
        return x[:, start : start + size + before + after]

    group = compare(lambda x: ranks.halo(x, before, after), wanted, sizes, dtype)
    row = 2 * 4 * 3 * dtype.itemsize
    got = min(before, start) + min(after, sum(sizes) - start - size)
    # backward sends back what came
    assert group.received["halo"] == row * got + group.sent["halo"] - row * got
    assert group.sent["halo"] + group.received["halo"] == 2 * group.sent["halo"]


def check_tokens(sizes: tuple[int, ...], start: int, stop: int) -> None:
    compare(lambda x: ranks.tokens_of(x, start, stop), lambda x: x[:, start:stop], sizes, torch.float64)


def check_transpose(sizes: tuple[int, ...]) -> None:
    rank, world = dist.get_rank(), len(sizes)
    own = slice(4 * rank // world, 4 * (rank + 1) // world)
    group = compare(ranks.to_heads, lambda x: x[:, :, own], sizes, torch.float64)
    assert group.sent["transpose"] + group.received["transpose"] == 2 * group.sent["transpose"]

    def twice(x: Tensor) -> Tensor:
        with ranks.laid_out(x.shape[1]):
            return ranks.to_tokens(ranks.to_heads(x).square(), 4)

    compare(twice, lambda x: parts_of(x, sizes).square(), sizes, torch.float64)


def check_sums(sizes: tuple[int, ...]) -> None:
    compare(lambda x: ranks.total(x.sum(1)), lambda x: x.sum(1), sizes, torch.float64)

    def product(x: Tensor) -> Tensor:
        return torch.stack([part.sum(1) for part in x.split(list(sizes), 1)]).prod(0)

    compare(lambda x: ranks.gather(x.sum(1)).prod(0), product, sizes, torch.float64)
    with ranks.sequence_parallel(dist.group.WORLD) as group:
        x = torch.tensor([float(group.rank)])
        assert ranks.largest(x) == group.world - 1
        assert ranks.largest_before(x, -9.0) == (group.rank - 1 if group.rank else -9)
        assert ranks.positions(sizes[group.rank], x.device).tolist() == list(
            range(sum(sizes[: group.rank]), sum(sizes[: group.rank + 1]))
        )
        assert ranks.whole_length(sizes[group.rank]) == sum(sizes)
        # a result: shares of gradients add up to those of one rank
        leaf = torch.tensor([2.0], requires_grad=True)
        ranks.result(leaf * (group.rank + 1)).backward()
        assert leaf.grad == group.rank + 1
        module = torch.nn.Linear(2, 1)
        module.weight.grad = torch.full((1, 2), 1.0 + group.rank)
        group.sum_gradients(module)
        assert module.weight.grad.tolist() == [[sum(range(1, group.world + 1))] * 2]
        assert module.bias.grad.tolist() == [0.0]
    assert ranks.active() is None


def check_prefix(kind: str, ends: bool, dtype: torch.dtype) -> None:
    """S <- A S + B over the ranks, with autograd over a loop for the gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    shape = {"factor": (2, 3, 1, 1), "columns": (2, 3, 4, 1), "matrix": (2, 3, 4, 4), "none": None}[kind]
    added = torch.randn(world, 2, 3, 4, 5, dtype=dtype, requires_grad=True)
    by = None if shape is None else torch.rand(world, *shape, dtype=dtype).requires_grad_()
    start = torch.randn(2, 3, 4, 5, dtype=dtype, requires_grad=True)
    states = [start]
    for r in range(world):
        moved = states[-1] if by is None else by[r] @ states[-1] if kind == "matrix" else by[r] * states[-1]
        states.append(moved + added[r])
    own = added.detach()[rank].clone().requires_grad_()
    own_by = None if by is None else by.detach()[rank].clone().requires_grad_()
    own_start = start.detach().clone().requires_grad_()
    with ranks.sequence_parallel(dist.group.WORLD) as group:
        before, after = ranks.prefix(ranks.Change(own, own_by, kind == "matrix"), own_start, ends)
    torch.testing.assert_close(before, states[rank])
    weights = torch.randn(world, 2, *before.shape, dtype=dtype)
    loss = (before * weights[rank, 0]).sum()
    expected: Any = sum((states[r] * weights[r, 0]).sum() for r in range(world))
    if ends:
        torch.testing.assert_close(after, states[-1])
        loss = loss + (after * weights[rank, 1]).sum()
        expected = expected + sum((states[-1] * weights[r, 1]).sum() for r in range(world))
    loss.backward()
    expected.backward()
    torch.testing.assert_close(own.grad, added.grad[rank])
    if by is not None:
        torch.testing.assert_close(own_by.grad, by.grad[rank])
    grad = torch.zeros_like(own_start) if own_start.grad is None else own_start.grad
    dist.all_reduce(grad)
    torch.testing.assert_close(grad, start.grad)
    size = 0 if by is None else by[0].numel()
    gradients = own.numel() * (2 if ends else 1)
    assert group.sent["states"] == (world - 1) * (own.numel() + size + gradients) * dtype.itemsize


def check_errors() -> None:
    world = dist.get_world_size()
    square = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "sequence"))
    with pytest.raises(ValueError, match=r'mesh has 2 dimensions .* accepted is .* mesh\["sequence"\]'):
        subquad.sequence_parallel(square).__enter__()
    with pytest.raises(ValueError, match="mesh=3 cannot work"):
        subquad.sequence_parallel(3).__enter__()
    with (
        subquad.sequence_parallel(square["sequence"]),
        pytest.raises(RuntimeError, match="one context at a time"),
        subquad.sequence_parallel(square["sequence"]),
    ):
        pass
    assert ranks.active() is None
    with subquad.sequence_parallel(square["sequence"]), ranks.laid_out(3):
        assert ranks.layout(3).sizes == (3,) * world
        with pytest.raises(ValueError, match="a part of 2 tokens in a call on parts of 3"):
            ranks.layout(2)
        with ranks.suspended():
            assert ranks.positions(2, torch.device("cpu")).tolist() == [0, 1]
    x, lengths = torch.arange(2 * world + 1)[None], torch.tensor([3])
    part, own, packed = ranks.shard(
        x, dist.group.WORLD, lengths=lengths, cu_seqlens=torch.tensor([0, 2, 2 * world + 1])
    )
    size = ranks.even_sizes(2 * world + 1, world)[dist.get_rank()]
    assert part.shape[1] == size
    assert own.item() == min(size, max(0, 3 - int(part[0, 0])))
    assert packed[-1] == size
    with pytest.raises(ValueError, match="accepted is at least one token for each"):
        ranks.shard(x[:, :1], dist.group.WORLD)
    with pytest.raises(ValueError, match="add up to"):
        ranks.shard(x, dist.group.WORLD, sizes=[1] * world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 3), (7, 7), (20, 1)])
def test_a_halo_may_span_several_ranks(world: int, before: int, after: int) -> None:
    for sizes in SIZES[world]:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            together(world).run(check_halo, sizes, before, after, dtype)


@pytest.mark.parametrize("world", WORLDS)
def test_some_tokens_of_the_whole_sequence(world: int) -> None:
    for sizes in SIZES[world]:
        for start, stop in ((0, 2), (1, 99), (3, 4), (5, 5)):
            together(world).run(check_tokens, sizes, start, stop)


@pytest.mark.parametrize("world", WORLDS)
def test_heads_for_tokens_and_back(world: int) -> None:
    for sizes in SIZES[world]:
        together(world).run(check_transpose, sizes)


@pytest.mark.parametrize("world", WORLDS)
def test_sums_and_positions(world: int) -> None:
    for sizes in SIZES[world]:
        together(world).run(check_sums, sizes)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["none", "factor", "columns", "matrix"])
def test_states_travel_from_rank_to_rank(world: int, kind: str) -> None:
    for ends in (False, True):
        for dtype in (torch.float64, torch.float32):
            together(world).run(check_prefix, kind, ends, dtype)


@pytest.mark.parametrize("world", WORLDS)
def test_what_cannot_be_split_is_named(world: int) -> None:
    together(world).run(check_errors)
