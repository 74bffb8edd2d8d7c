import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import subquad
from subquad.mechanisms.base import Mixer
from tests.mechanisms.laws import same_after


def build(**options: Any) -> Mixer:
    torch.manual_seed(0)
    return subquad.build("reformer", **{"dim": 16, "heads": 2, **options}).double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def shared_qk_attention(mix: Any, x: Tensor) -> Tensor:
    """Full attention with unit keys, where a token sees itself only if it sees nothing else."""
    q, v = (t.unflatten(-1, (mix.options.heads, -1)) for t in (mix.query(x), mix.value(x)))
    scores = torch.einsum("bthk,bshk->bhts", q, q / q.norm(dim=-1, keepdim=True))
    size = x.shape[1]
    seen = torch.ones(size, size, dtype=torch.bool).tril() if mix.options.causal else torch.ones(size, size).bool()
    seen = seen & ~torch.eye(size, dtype=torch.bool)
    seen[~seen.any(-1), ~seen.any(-1)] = True
    return mix.out(torch.einsum("bhts,bshv->bthv", scores.masked_fill(~seen, -math.inf).softmax(-1), v).flatten(-2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("chunk", [21, 30, 11])  # 11: all tokens in two chunks
@pytest.mark.parametrize("rounds", [1, 4])
def test_one_bucket_is_shared_qk_attention(causal: bool, strict: bool, chunk: int, rounds: int) -> None:
    mix = build(causal=causal, strict_causal=strict, chunk=chunk, rounds=rounds, buckets=1)
    x = tokens(2, 21, 16)
    torch.testing.assert_close(mix(x), shared_qk_attention(mix, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_rounds_that_agree_are_one_round(causal: bool) -> None:
    one, four = (build(causal=causal, chunk=4, buckets=4, rounds=rounds) for rounds in (1, 4))
    four.load_state_dict({**one.state_dict(), "rotation": one.rotation.expand(-1, 4, -1, -1)})
    x = tokens(2, 37, 16)
    torch.testing.assert_close(four(x), one(x), rtol=1e-10, atol=1e-10)


def test_more_rounds_see_more() -> None:
    x = tokens(1, 60, 16)
    seen = [(build(chunk=4, buckets=8, rounds=rounds).pattern(x) > 0).sum().item() for rounds in (1, 2, 4, 8)]
    assert seen == sorted(set(seen))


def test_a_token_attends_to_itself_only_when_alone() -> None:
    x = tokens(1, 40, 16)
    for causal in (False, True):
        pattern = build(causal=causal, chunk=4, buckets=8, rounds=2).pattern(x)
        own = pattern.diagonal(dim1=-2, dim2=-1)
        assert ((own == 0) | (own == 1)).all()
        torch.testing.assert_close(pattern.sum(-1), torch.ones_like(own))
    assert pattern[0, :, 0, 0].eq(1).all(), "the first token has nothing else"


def test_the_papers_chunks_let_the_future_decide_who_sees_whom() -> None:
    x = tokens(1, 40, 16)
    changed = x.clone()
    changed[:, 30:] = tokens(2, 10, 16)[1:]
    leaking, strict = (build(causal=True, strict_causal=s, chunk=3, buckets=4, rounds=2) for s in (False, True))
    assert not torch.allclose(leaking(changed)[:, :30], leaking(x)[:, :30])
    torch.testing.assert_close(strict(changed)[:, :30], strict(x)[:, :30])
    assert leaking.traits.state is None
    with pytest.raises(NotImplementedError, match="Reformer"):
        leaking.init_state(1)


def test_a_step_reads_only_the_lists_of_its_buckets() -> None:
    mix: Any = build(causal=True, chunk=3, buckets=4, rounds=2)
    x = tokens(2, 41, 16)
    _, state = mix.prefill(x[:, :40])
    listed = torch.zeros(2, 2, state.k.shape[1], dtype=torch.bool)
    reach = state.members.flatten(2)
    listed.scatter_(-1, reach.clamp(min=0).long(), reach >= 0)
    forgotten = ~listed.transpose(1, 2)[..., None]
    assert forgotten[:, :40].any()
    poisoned = state._replace(k=state.k.masked_fill(forgotten, 1e30), v=state.v.masked_fill(forgotten, 1e30))
    y, _ = mix.step(x[:, 40], poisoned)
    torch.testing.assert_close(y, mix(x)[:, 40])


def test_recomputing_layers_get_the_same_gradient() -> None:
    mix = build(causal=True, chunk=4, buckets=4).train()
    x = tokens(1, 30, 16).requires_grad_()
    (want,) = torch.autograd.grad(mix(x).square().sum(), x)
    (got,) = torch.autograd.grad(checkpoint(mix, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(got, want)


def test_factorised_buckets_are_all_in_use() -> None:
    mix: Any = build(rounds=1, buckets=(2, 4))
    found = mix._hash(tokens(1, 4000, 16).unflatten(-1, (2, 8)))
    assert sorted(found.unique().tolist()) == list(range(8))
    assert mix.rotation.shape[-1] == 3  # half of 2 + 4: that is what factors save


@pytest.mark.parametrize("buckets", [0, 3, -2, (), (4, 3), (4, 0), 2.0, True, "4"])
def test_impossible_buckets_raise(buckets: Any) -> None:
    with pytest.raises(ValueError, match="buckets="):
        build(buckets=buckets)


@pytest.mark.parametrize("option", ["rounds", "chunk"])
def test_impossible_sizes_raise(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0"):
        build(**{option: 0})


@pytest.mark.parametrize(("causal", "strict"), [(True, True), (True, False), (False, True)])
def test_few_tokens_take_all_pairs_and_get_what_slots_give(
    monkeypatch: pytest.MonkeyPatch, causal: bool, strict: bool
) -> None:
    options = {"rounds": 3, "chunk": 8 if strict and causal else 16, "buckets": 16}
    mix = subquad.build("reformer", dim=8, heads=2, causal=causal, strict_causal=strict, **options).double()
    x, lengths = torch.randn(2, 30, 8, dtype=torch.float64), torch.tensor([30, 17])
    called, short = [], mix._attend_short
    monkeypatch.setattr(mix, "_attend_short", lambda *given: called.append(1) or short(*given))  # type: ignore[func-returns-value]
    same_after(lambda: monkeypatch.setattr(mix, "_pairs", lambda _: 0), mix, x, lengths)
    assert len(called) == 1
