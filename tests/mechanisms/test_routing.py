import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import subquad
from tests.mechanisms.laws import same_after


def build(**options: Any) -> Any:
    torch.manual_seed(0)
    return subquad.build("routing", **{"dim": 16, "heads": 2, **options}).double().eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def normed(mix: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = mix.qkv(x).unflatten(-1, (-1, mix.options.heads, mix.options.dim // mix.options.heads)).unbind(2)
    q, k = (t - t.mean(-1, keepdim=True) for t in (parts[0], parts[-2]))
    q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() for t in (q, k))
    return q, k, parts[-1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("share", [None, False, True])
@pytest.mark.parametrize("scale", [None, 1.0])
def test_one_cluster_is_full_attention_with_normed_q_and_k(
    causal: bool, strict: bool, share: bool | None, scale: float | None
) -> None:
    mix = build(causal=causal, strict_causal=strict, share_qk=share, clusters=1, window=30, scale=scale)
    x = tokens(2, 30, 16)
    q, k, v = (t.transpose(1, 2) for t in normed(mix, x))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)
    torch.testing.assert_close(mix(x), mix.out(want.flatten(-2)), rtol=1e-10, atol=1e-10)
    assert torch.equal(q, k) == (causal if share is None else share)


def test_two_chunks_of_one_cluster_are_full_causal_attention() -> None:
    x = tokens(1, 30, 16)
    wide, narrow = (build(causal=True, clusters=1, window=window) for window in (30, 15))
    torch.testing.assert_close(narrow(x), wide(x))


def test_unchosen_tokens_get_nothing_and_twice_chosen_ones_the_mean() -> None:
    x = tokens(2, 30, 16)
    one, two = build(clusters=1, window=7), build(clusters=2, window=7)
    two.centroids.copy_(one.centroids.expand(-1, 2, -1))
    torch.testing.assert_close(two(x), one(x))
    for mix in (one, two):
        assert ((mix.pattern(x) > 0).any(-1).sum(-1) == 7).all()
    mixed = build(clusters=4, window=12).pattern(x).sum(-1)
    torch.testing.assert_close(mixed[mixed > 0], torch.ones_like(mixed[mixed > 0]))


def test_the_balanced_choice_lets_the_future_decide() -> None:
    x = tokens(1, 40, 16)
    changed = x.clone()
    changed[:, 30:] = tokens(1, 10, 16, seed=2)
    leaking, strict = (build(causal=True, strict_causal=s, clusters=3, window=5) for s in (False, True))
    assert not torch.allclose(leaking(changed)[:, :30], leaking(x)[:, :30])
    torch.testing.assert_close(strict(changed)[:, :30], strict(x)[:, :30])
    with pytest.raises(NotImplementedError, match="Routing"):
        leaking.init_state(1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_training_forward_moves_the_centroids_and_routes_by_the_old_ones(causal: bool) -> None:
    mix = build(causal=causal, clusters=4, window=6, decay=0.9)
    x, lengths = tokens(2, 30, 16), torch.tensor([30, 12])
    before, want = mix.centroids.clone(), mix(x, lengths=lengths)
    assert torch.equal(mix.centroids, before), "evaluation moved the centroids"
    torch.testing.assert_close(mix.train()(x, lengths=lengths), want)

    q, k, _ = normed(mix, x)
    for h in range(2):
        real = torch.cat([t[b, :n, h] for t in ((q,) if causal else (q, k)) for b, n in enumerate((30, 12))])
        label = (real @ before[h].T).argmax(-1)
        for c in range(4):
            assert (label == c).any()
            moved = 0.9 * before[h, c] + 0.1 * real[label == c].mean(0)
            torch.testing.assert_close(mix.centroids[h, c], F.layer_norm(moved, (8,), eps=0))


def test_centroids_without_tokens_stay() -> None:
    mix = build(clusters=3).train()
    mix.centroids[:, 2] = mix.centroids[:, 0]  # of two equally near the first is taken
    before = mix.centroids.clone()
    mix(tokens(2, 30, 16))
    torch.testing.assert_close(mix.centroids[:, 2], before[:, 2])
    assert (mix.centroids[:, :2] != before[:, :2]).any(-1).all()


def test_training_finds_the_directions_of_the_data() -> None:
    mix = build(dim=16, heads=1, clusters=3, share_qk=True, decay=0.8).train()
    directions = F.layer_norm(tokens(3, 16, seed=5), (16,))
    with torch.no_grad():
        mix.qkv.weight[:16], mix.qkv.bias[:16] = torch.eye(16, dtype=torch.float64), 0.0
        mix.centroids.copy_(F.layer_norm(directions + 1.5 * tokens(3, 16, seed=6), (16,)))
        for step in range(60):
            mix((directions.repeat(10, 1) + 0.1 * tokens(30, 16, seed=step))[None])
    cosine = mix.centroids[0] @ directions.T / 16
    assert (cosine.amax(0) > 0.98).all()


def test_gradients_of_accumulated_micro_batches_add_up() -> None:
    batches = [tokens(2, 20, 16, seed=seed) for seed in (1, 2)]
    mix = build(clusters=4, window=6, decay=0.5).train()
    sum(
        (mix(x).square().sum() for x in batches), torch.zeros(())
    ).backward()  # centroids move between forward and backward
    got, moved = mix.qkv.weight.grad.clone(), mix.centroids.clone()
    again = build(clusters=4, window=6, decay=0.5).train()
    for x in batches:
        again(x).square().sum().backward()
    torch.testing.assert_close(got, again.qkv.weight.grad)
    torch.testing.assert_close(moved, again.centroids)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_layers_count_a_batch_once_and_route_it_the_same_way(reentrant: bool) -> None:
    x = tokens(2, 30, 16).requires_grad_()
    plain, again = (build(clusters=4, window=6, decay=0.1).train() for _ in range(2))
    (want,) = torch.autograd.grad(plain(x).square().sum(), x)
    checkpoint(again, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, want)
    assert torch.equal(plain.centroids, again.centroids)


def test_commitment_pulls_tokens_to_centroids_and_leaves_these_alone() -> None:
    mix = build(clusters=3)
    x, lengths = tokens(2, 10, 16), torch.tensor([10, 4])
    x[1, 4:] = math.nan
    q, k, _ = normed(mix, x)
    squares = []
    for t in (q, k):
        for b, n in enumerate((10, 4)):
            for h in range(2):
                own = mix.centroids[h][(t[b, :n, h] @ mix.centroids[h].T).argmax(-1)]
                squares.append((t[b, :n, h] - own).square())
    loss = mix.commitment(x, lengths)
    torch.testing.assert_close(loss, torch.cat(squares).mean())
    loss.backward()
    assert mix.qkv.weight.grad.abs().sum() > 0
    assert not mix.centroids.requires_grad
    with pytest.raises(ValueError, match="lengths"):
        mix.commitment(x, torch.tensor([11, 4]))


@pytest.mark.parametrize("options", [{}, {"causal": True, "strict_causal": False}])
def test_of_equal_tokens_the_earlier_are_chosen(options: dict[str, Any]) -> None:
    mix = build(clusters=4, window=5, **options)
    x = tokens(1, 1, 16).expand(1, 20, 16)
    used = (mix.pattern(x) > 0).any(-1)  # [B, H, T]
    assert (used == (torch.arange(20) < 5)).all()
    torch.testing.assert_close(mix(x), mix.reference(x))
    words = tokens(3, 16)[torch.randint(3, (3, 61), generator=torch.Generator().manual_seed(0))]
    y = mix(words, lengths=torch.tensor([61, 42, 30]))
    for row, n in enumerate((61, 42, 30)):
        torch.testing.assert_close(y[row, :n], mix(words[row : row + 1, :n])[0])


def test_a_step_drops_weights_in_training() -> None:
    mix, x = build(causal=True, clusters=1, window=8, dropout=0.5), tokens(1, 9, 16)
    _, state = mix.prefill(x[:, :8])
    want, _ = mix.step(x[:, 8], state)
    mix.train()
    torch.manual_seed(0)
    many = torch.stack([mix.step(x[:, 8], state)[0] for _ in range(400)])
    assert not torch.allclose(many[0], many[1])
    assert ((many.mean(0) - want).abs() < 5 * many.std(0) / 20).all()


def test_autocast_routes_in_single_precision() -> None:
    mix = build(clusters=4, window=5).float()
    with torch.autocast("cpu", torch.bfloat16):
        routed = mix._route(tokens(1, 20, 16).float())
    for near, t in zip(routed.near, routed.normed, strict=True):
        assert near.dtype == torch.float32
        want = torch.einsum("hck,bthk->bhct", mix.centroids.double(), t.double())
        torch.testing.assert_close(near.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "value"), [("clusters", 0), ("window", 0), ("decay", 1.5), ("scale", 0.0), ("share_qk", "yes")]
)
def test_impossible_options_raise(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}="):
        build(**{option: value})


@pytest.mark.parametrize("share", [True, False])
def test_few_tokens_take_all_pairs_and_get_what_slots_give(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    mix = build(causal=True, clusters=5, window=6, share_qk=share)
    x, lengths = tokens(2, 20, 16), torch.tensor([20, 13])
    called, short = [], mix._all_pairs
    monkeypatch.setattr(mix, "_all_pairs", lambda *given: called.append(1) or short(*given))  # type: ignore[func-returns-value]
    same_after(lambda: monkeypatch.setattr("subquad.ops.buckets.slot_pairs", lambda *_: 0), mix, x, lengths)
    assert len(called) == 1


def test_a_window_for_all_tokens_gives_what_one_cluster_gives() -> None:
    mix = build(causal=False, clusters=4, window=9)
    x, lengths = tokens(2, 9, 16), torch.tensor([9, 5])
    whole = mix(x, lengths)
    one = build(causal=False, clusters=1, window=9)
    one.load_state_dict({**mix.state_dict(), "centroids": mix.centroids[:, :1]})
    torch.testing.assert_close(whole, one(x, lengths), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(whole, mix.reference(x, lengths), rtol=1e-10, atol=1e-12)
