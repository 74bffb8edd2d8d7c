from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.ops.buckets import (
    Lists,
    Slots,
    admit,
    asking_slots,
    empty_lists,
    give_back,
    in_reach,
    lookup,
    rank_slots,
    recall,
    rounds_together,
    same_bucket,
    slot_attention,
    sorted_slots,
    take,
)

few = settings(max_examples=40, deadline=None, derandomize=True)
tokens_of = st.lists(st.integers(-1, 3), min_size=1, max_size=23)


def chunks_by_rank(bucket: list[int], chunk: int) -> list[int]:
    return [bucket[:i].count(b) // chunk for i, b in enumerate(bucket)]


def chunks_by_sorting(bucket: list[int], chunk: int) -> list[int]:
    order = sorted((i for i, b in enumerate(bucket) if b >= 0), key=lambda i: (bucket[i], i))
    return [order.index(i) // chunk if b >= 0 else -1 for i, b in enumerate(bucket)]


def pairs(slots: Slots, visible: Tensor) -> list[tuple[int, int]]:
    """All (query, key) of the slots, as often as they occur."""
    shape = visible.shape
    query, key = slots.query[..., :, None].expand(shape), slots.key[..., None, :].expand(shape)
    return sorted(zip(query[visible].tolist(), key[visible].tolist(), strict=True))


@given(bucket=tokens_of, chunk=st.integers(1, 7))
@few
def test_rank_slots_pair_the_tokens_of_two_chunks(bucket: list[int], chunk: int) -> None:
    slots = rank_slots(torch.tensor(bucket), 4, chunk)
    at = chunks_by_rank(bucket, chunk)
    want = [
        (i, j) for i, b in enumerate(bucket) for j, c in enumerate(bucket) if b == c >= 0 and (at[i] - at[j]) in (0, 1)
    ]
    assert pairs(slots, same_bucket(torch.tensor(bucket), slots)) == want
    assert slots.query.numel() <= len(bucket) + 4 * chunk, "the layout must not grow beyond T + buckets·C"
    sitting = slots.query.flatten()
    for i, place in enumerate(slots.place.tolist()):
        assert place == -1 if bucket[i] < 0 else sitting[place] == i


@given(bucket=tokens_of, chunk=st.integers(1, 7), ahead=st.booleans())
@few
def test_sorted_slots_pair_the_tokens_of_neighbouring_chunks(bucket: list[int], chunk: int, ahead: bool) -> None:
    slots = sorted_slots(torch.tensor(bucket), chunk, ahead)
    at = chunks_by_sorting(bucket, chunk)
    near = (-1, 0, 1) if ahead else (0, 1)
    want = [
        (i, j) for i, b in enumerate(bucket) for j, c in enumerate(bucket) if b == c >= 0 and (at[i] - at[j]) in near
    ]
    assert pairs(slots, same_bucket(torch.tensor(bucket), slots)) == want


@given(data=st.data(), bucket=tokens_of, chunk=st.integers(1, 7))
@few
def test_asking_slots_find_the_newest_token_of_another_bucket(
    data: st.DataObject, bucket: list[int], chunk: int
) -> None:
    asked = data.draw(st.lists(st.integers(-1, 3), min_size=len(bucket), max_size=len(bucket)))
    keys, asking = torch.tensor(bucket), torch.tensor(asked)
    slots = asking_slots(rank_slots(keys, 4, chunk), keys, asking)
    visible = same_bucket(keys, slots, asking) & (slots.key[..., None, :] <= slots.query[..., :, None])
    at, want = chunks_by_rank(bucket, chunk), []
    for i, b in enumerate(asked):
        known = [j for j in range(i + 1) if bucket[j] == b >= 0]
        want += [(i, j) for j in known if at[known[-1]] - at[j] in (0, 1)]
    assert pairs(slots, visible) == want
    silent = [i for i, b in enumerate(asked) if not any(bucket[j] == b >= 0 for j in range(i + 1))]
    assert (slots.place[silent] == -1).all()


@given(bucket=tokens_of, chunk=st.integers(1, 5), cuts=st.lists(st.integers(0, 23), max_size=4))
@few
def test_lists_hold_the_two_newest_chunks_however_tokens_arrive(bucket: list[int], chunk: int, cuts: list[int]) -> None:
    lists = empty_lists((), 4, chunk, torch.device("cpu"))
    edges = sorted({0, *(min(c, len(bucket)) for c in cuts), len(bucket)})
    for start, stop in pairwise(edges):
        before = Lists(*(t.clone() for t in lists))
        new = admit(lists, torch.tensor(bucket[start:stop]), torch.arange(start, stop))
        assert all(torch.equal(a, b) for a, b in zip(before, lists, strict=True)), "the old lists were changed"
        lists = new
    at = chunks_by_rank(bucket, chunk)
    for b, found in enumerate(recall(lists)):
        members = [i for i, c in enumerate(bucket) if c == b]
        want = [i for i in members if at[i] >= at[members[-1]] - 1]
        assert [i for i in found.tolist() if i >= 0] == want


def test_in_reach_goes_on_where_the_lists_stopped() -> None:
    bucket = torch.tensor([[0, 1, 0, 0, 1, 0, 0]])
    lists = admit(empty_lists((1,), 2, 2, bucket.device), bucket[:, :5], torch.arange(5).expand(1, 5))
    buckets, positions = in_reach(lists, bucket[:, 5:], torch.tensor([5]))
    assert buckets.tolist() == [[0, 0, 0, -1, -1, -1, 1, 1, 0, 0]]
    assert positions[buckets >= 0].tolist() == [0, 2, 3, 1, 4, 5, 6]


def test_rounds_together_counts_the_rounds_that_see_a_pair() -> None:
    torch.manual_seed(0)
    bucket = torch.randint(0, 3, (4, 19))  # four rounds
    for slots, ahead in ((rank_slots(bucket, 3, 3), False), (sorted_slots(bucket, 4, ahead=True), True)):
        codes = slots.place // slots.query.shape[-1] + bucket * (slots.query.shape[-2] + 1)
        times = rounds_together(codes, slots.query, slots.key, ahead)
        seen = [
            set(pairs(Slots(*(t[r] for t in slots)), same_bucket(bucket[r], Slots(*(t[r] for t in slots)))))
            for r in range(4)
        ]
        visible = same_bucket(bucket, slots)
        query, key = (t.expand(visible.shape)[visible] for t in (slots.query[..., :, None], slots.key[..., None, :]))
        for i, j, n in zip(query.tolist(), key.tolist(), times[visible].tolist(), strict=True):
            assert n == sum((i, j) in s for s in seen)


def test_slot_attention_is_softmax_over_what_is_visible() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 11, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 11, 3, 5, dtype=torch.float64, requires_grad=True)
    bucket = torch.randint(0, 2, (2, 3, 11))
    slots = rank_slots(bucket, 2, 4)
    visible = same_bucket(bucket, slots) & (
        slots.key[..., None, :] < slots.query[..., :, None]
    )  # nothing for the first
    o, lse = slot_attention(q, k, v, slots.query, slots.key, visible, None, 0.0)
    o, lse = give_back(o, slots.place), give_back(lse[..., None], slots.place)[..., 0]

    seen = torch.zeros(2, 3, 11, 11, dtype=torch.bool)
    for b, h, n, c, w in visible.nonzero().tolist():
        seen[b, h, slots.query[b, h, n, c], slots.key[b, h, n, w]] = True
    scores = torch.einsum("bthk,bshk->bhts", q, k).masked_fill(~seen, -torch.inf)
    some = seen.any(-1)
    torch.testing.assert_close(lse[some], scores.logsumexp(-1)[some])
    want = torch.einsum("bhts,bshv->bhtv", scores.softmax(-1), v)
    torch.testing.assert_close(o[some], want[some])
    assert (o[~some] == 0).all()
    assert (lse[~some] < -1e30).all()
    o.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v) if t.grad is not None)


def test_half_precision_errs_at_most_twice_as_much_as_the_plain_expression() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    everyone = torch.arange(64).expand(1, 2, 1, 64)
    visible = torch.ones(1, 2, 1, 64, 64, dtype=torch.bool)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhts,bshv->bhtv", torch.einsum("bthk,bshk->bhts", q, k).softmax(-1), v)

    q, k, v = (t.bfloat16() for t in (q, k, v))
    exact = plain(q.double(), k.double(), v.double())
    ours = slot_attention(q, k, v, everyone, everyone, visible, None, 0.0)[0][:, :, 0]
    assert (ours - exact).abs().max() <= 2 * (plain(q, k, v) - exact).abs().max()


def test_take_and_lookup_find_tokens_by_row_and_head() -> None:
    x = torch.arange(2 * 5 * 3).view(2, 5, 3, 1)
    index = torch.tensor([[[4, 0], [1, 1], [2, 3]], [[0, 0], [4, 2], [3, 1]]])
    found = take(x, index)[..., 0]
    for b in range(2):
        for h in range(3):
            assert found[b, h].tolist() == [int(x[b, i, h, 0]) for i in index[b, h].tolist()]
    assert lookup(torch.tensor([7, 8, 9]), torch.tensor([[2, -1], [0, 1]]), -5).tolist() == [[9, -5], [7, 8]]
