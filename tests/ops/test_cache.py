import pytest
import torch
from torch import Tensor

from subquad.ops.cache import append, cached_attention
from subquad.ops.dense import counted_attention


def dense(q: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("bhk,bchk->bhc", q.double(), k.double()) * scale
    scores = scores.masked_fill(torch.arange(k.shape[1]) >= count[:, None, None], -torch.inf)
    return torch.einsum("bhc,bchv->bhv", scores.softmax(-1), v.double())


def inputs(batch: int, size: int, heads: int, key: int, value: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(size)
    shapes = (batch, heads, key), (batch, size, heads, key), (batch, size, heads, value)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


@pytest.mark.parametrize("counts", [[5, 5, 5], [1, 20, 33]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_what_is_in_use_is_read(counts: list[int], dtype: torch.dtype) -> None:
    q, k, v = inputs(3, 33, 2, 8, 12, dtype)
    count = torch.tensor(counts)
    expected = dense(q, k, v, count, 0.5)
    beyond = torch.arange(33) >= count[:, None]
    k[beyond], v[beyond] = 1e4, -1e4
    o = cached_attention(q, k, v, count, scale=0.5)
    assert o.dtype == dtype
    error = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=error)


@pytest.mark.parametrize("counts", [[7], [1, 20, 33]])
def test_grouped_queries_read_the_keys_of_their_group(counts: list[int]) -> None:
    _, k, v = inputs(len(counts), 33, 2, 8, 12, torch.float64)
    q = torch.randn(len(counts), 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    count = torch.tensor(counts)
    o = cached_attention(q, k, v, count, scale=0.5)
    keys, values = (x.repeat_interleave(3, 2) for x in (k, v))
    torch.testing.assert_close(o, dense(q, keys, values, count, 0.5))
    tokens = torch.stack((q, 2 * q), 1)  # [B, T, H, K]
    seen = torch.stack((count, count.clamp(max=4)), 1)
    o = counted_attention(tokens, k, v, seen, scale=0.5)
    for t in range(2):
        torch.testing.assert_close(o[:, t], dense(tokens[:, t], keys, values, seen[:, t], 0.5))


def test_gradients_reach_the_cache() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(2, 6, 2, 4, 4, torch.float64))
    count = torch.tensor([3, 6])
    assert torch.autograd.gradcheck(lambda *x: cached_attention(x[0], x[1], x[2], count), (q, k, v))


def test_compiled_programs_see_one_operator() -> None:
    q, k, v = inputs(2, 6, 2, 4, 4, torch.float32)
    torch.library.opcheck(torch.ops.subquad.cached_attention, (q, k, v, torch.tensor([3, 6]), 0.5, None, False))


def test_append_in_place_writes_where_the_cache_stands() -> None:
    cache, new, position = torch.zeros(2, 4, 3), torch.ones(2, 1, 3), torch.tensor([0, 2])
    other = append(cache, new, position)
    assert cache.sum() == 0
    assert append(cache, new, position, inplace=True) is cache
    assert torch.equal(cache, other)
    assert cache[..., 0].tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]


def test_an_explicit_choice_is_honoured_or_refused() -> None:
    q, k, v = inputs(1, 4, 1, 4, 4, torch.float64)
    with pytest.raises(ValueError, match="triton"):
        cached_attention(q, k, v, torch.tensor([2]), impl="triton")


def test_a_row_rounds_alike_whatever_the_others_hold() -> None:
    """On a CPU: bit by bit, so that a stream's text does not depend on its company."""
    torch.manual_seed(0)
    for length in (5, 64, 100, 130):
        q, k, v = torch.randn(3, 2, 16), torch.randn(3, 192, 2, 16), torch.randn(3, 192, 2, 16)
        rows = [
            cached_attention(q, k, v, torch.tensor([length, *others]))[0]
            for others in ((length, length), (1, 1), (192, 1), (length - 1, length))
        ]
        assert all(torch.equal(row, rows[0]) for row in rows), length
