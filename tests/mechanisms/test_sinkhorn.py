import math
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import build
from subquad.machine import allocation_peak
from subquad.mechanisms import sinkhorn
from subquad.mechanisms.sinkhorn import Sinkhorn, balance, beside_sorted

BLOCK, WIDTH = 6, 16


def make(**options: object) -> Sinkhorn:
    torch.manual_seed(0)
    given = {"dim": WIDTH, "heads": 1, "block": BLOCK, **options}
    mix = build("sinkhorn", **given).double().eval()
    assert isinstance(mix, Sinkhorn)
    return mix


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def marked(size: int) -> Tensor:
    """Tokens whose first 8 channels encode their block; the others are random."""
    x = tokens(1, size, WIDTH)
    x[..., :8] = 3 * torch.nn.functional.one_hot(torch.arange(size) // BLOCK, 8)
    return x


def steered(wish: list[int], **options: object) -> Sinkhorn:
    """A module whose block n of queries is drawn to block wish[n] of keys, so strongly that R is a permutation."""
    mix = make(temperature=0.01, **options)
    with torch.no_grad():
        weight, bias = mix.heads.qkv.weight, mix.heads.qkv.bias
        weight[:32].zero_()
        bias[:32].zero_()
        for block, wanted in enumerate(wish):
            weight[wanted, block] = 1  # q
            weight[16 + block, block] = 1  # k
        weight[8:16, 8:].copy_(torch.eye(8))
        weight[24:32, 8:].copy_(tokens(8, 8, seed=5))
    return mix


def attention(mix: Sinkhorn, x: Tensor, visible: Tensor) -> Tensor:
    q, k, v = (t[:, :, 0] for t in mix.heads.split(x))
    scores = (q @ k.mT / 4).masked_fill(~visible, -math.inf)
    return mix.heads.merge((scores.softmax(-1) @ v)[:, :, None])


@pytest.mark.parametrize("size", [24, 27])
def test_the_identity_sort_is_local_attention(size: int) -> None:
    mix, x, block = steered([0, 1, 2, 3, 4]), marked(size), torch.arange(size) // BLOCK
    want = attention(mix, x, block[:, None] == block)
    torch.testing.assert_close(mix(x), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [24, 27])
def test_a_cyclic_sort_attends_to_the_own_and_the_next_block(size: int) -> None:
    count = -(-size // BLOCK)
    follower = [(n + 1) % count for n in range(count)]
    mix, x, block = steered(follower), marked(size), torch.arange(size) // BLOCK
    visible = (block[:, None] == block) | (torch.tensor(follower)[block][:, None] == block)
    torch.testing.assert_close(mix(x), attention(mix, x, visible), rtol=1e-9, atol=1e-9)
    assert float(mix.pattern(x)[0, 0].masked_fill(visible, 0).detach().abs().max()) < 1e-12


def test_a_causal_sort_attends_to_the_own_past_and_the_chosen_earlier_block() -> None:
    mix, x, block = steered([1] * 5, causal=True), marked(27), torch.arange(27) // BLOCK
    at = torch.arange(27)
    chosen = torch.tensor([-1, 0, 1, 1, 1])[block]  # block 0 has no past, block 1 only block 0
    visible = (block[:, None] == block) & (at <= at[:, None]) | (chosen[:, None] == block)
    torch.testing.assert_close(mix(x), attention(mix, x, visible), rtol=1e-9, atol=1e-9)


def test_sortcut_attends_to_the_first_sorted_blocks_only() -> None:
    mix, x, block = steered([3, 1, 2, 0], sortcut=2), marked(24), torch.arange(24) // BLOCK
    want = attention(mix, x, (block == 3) | (block == 1))
    torch.testing.assert_close(mix(x), want, rtol=1e-9, atol=1e-9)
    few = steered([3, 1, 2, 0], sortcut=9)  # more than there are: all
    torch.testing.assert_close(few(x), attention(few, x, block >= 0), rtol=1e-9, atol=1e-9)


def test_sorted_values_are_values() -> None:
    """Changing one block's values reaches the block that was sorted to it, and no other."""
    mix, x = steered([1, 2, 3, 0]), marked(24)
    before = mix(x)
    with torch.no_grad():  # the values of block 2 change, but no score does
        mix.heads.qkv.weight[32:, 2] += 1
    changed = (mix(x) - before).abs().amax(-1)[0] > 1e-6
    assert changed.view(4, BLOCK).all(-1).tolist() == [False, True, True, False]
    assert changed.view(4, BLOCK).any(-1).tolist() == [False, True, True, False]


def test_permuting_blocks_permutes_outputs_and_moves_a_sortcut() -> None:
    x, order = tokens(1, 24, WIDTH), torch.tensor([2, 0, 3, 1])

    def permute(t: Tensor) -> Tensor:
        return t.unflatten(1, (4, BLOCK))[:, order].flatten(1, 2)

    mix, cut = make(iterations=40), make(sortcut=1)
    torch.testing.assert_close(mix(permute(x)), permute(mix(x)), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(cut(permute(x)), permute(cut(x)), rtol=1e-3)


def test_balancing_makes_rows_and_columns_sum_to_one() -> None:
    r = balance(2 * tokens(3, 9, 9), 200)
    for dim in (-1, -2):
        torch.testing.assert_close(r.sum(dim), torch.ones(3, 9, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    few = balance(2 * tokens(3, 9, 9), 2)
    torch.testing.assert_close(few.sum(-1), torch.ones(3, 9, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    order = torch.tensor([2, 0, 3, 1])
    near = balance(50 * torch.eye(4, dtype=torch.float64)[order], 8)
    torch.testing.assert_close(near, torch.eye(4, dtype=torch.float64)[order])


@pytest.mark.parametrize("iterations", [1, 2, 8])
@pytest.mark.parametrize("size", [1, 30])
def test_balancing_is_the_plain_loop(iterations: int, size: float) -> None:
    """With blocks of padding, whose part of the matrix is the identity."""
    logits = size * tokens(2, 2, 7, 7)
    logits[1, :, 4:] = logits[1, :, :, 4:] = -math.inf
    logits[1, :, range(4, 7), range(4, 7)] = 0
    same_with_gradients(balance, sinkhorn._balance_plain, [logits.requires_grad_()], iterations)


def test_sorted_blocks_beside_their_own_are_a_plain_product() -> None:
    sort, wide = tokens(2, 3, 4, 4).requires_grad_(), tokens(2, 20, 9, 5).requires_grad_()
    ours, plain = (
        lambda sort, wide, f=f: f(sort, wide[:, :, 2:5]) for f in (beside_sorted, sinkhorn._beside_sorted_plain)
    )
    same_with_gradients(ours, plain, [sort, wide])


def same_with_gradients(ours: Any, plain: Any, inputs: list[Tensor], *more: Any) -> None:
    results = []
    for f in (ours, plain):
        o = f(*inputs, *more)
        results.append([o, *torch.autograd.grad((o * tokens(*o.shape, seed=2)).sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_gradient_of_the_balancing_cannot_be_differentiated() -> None:
    logits = tokens(4, 4).requires_grad_()
    (grad,) = torch.autograd.grad(balance(logits, 2).square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grad.sum(), logits)


def test_balancing_keeps_no_matrix_of_an_iteration() -> None:
    logits = tokens(200, 200).requires_grad_()

    def peak(iterations: int) -> int:
        return allocation_peak(lambda: balance(logits, iterations).sum().backward())

    assert peak(12) - peak(2) < logits.nbytes


@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_is_finite_for_large_tokens(causal: bool) -> None:
    """exp(logits) alone has rows and columns of zeros here."""
    mix, x = make(causal=causal, temperature=0.2), 30 * tokens(2, 27, WIDTH)
    torch.testing.assert_close(mix(x), mix.reference(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mix.pattern(x[:, :24]).sum(-1), torch.ones(2, 1, 24, dtype=torch.float64))


def test_r_counts_the_blocks_of_the_row() -> None:
    mix, x = make(heads=2), tokens(2, 27, WIDTH)
    q, k, _ = (t.clone() for t in mix.heads.split(x))
    q[1, 14:] = k[1, 14:] = 0
    r = mix._sort(q, k, torch.tensor([27, 14]))
    assert r.shape == (2, 2, 5, 5)
    torch.testing.assert_close(r[1:, :, :3, :3], mix._sort(q[1:, :14], k[1:, :14], torch.tensor([14])))
    assert (r[1, :, :3, 3:] == 0).all()


def test_gumbel_noise_in_training_only_and_of_the_right_law() -> None:
    """With a low temperature the noisy choice of an earlier block is a draw from the softmax of its scores."""
    mix = make(causal=True, temperature=1e-3)
    x = tokens(1, 24, WIDTH)
    assert torch.equal(mix(x), mix(x))
    q, k, _ = (t.detach() for t in mix.heads.split(x))
    q = 24 * q
    past = k[0, :18, 0].unflatten(0, (3, BLOCK)).mean(1)
    want = (past @ q[0, :19, 0].mean(0) / 4).softmax(0)  # three choices: two would hide a wrong sign of the noise
    assert float(want.max() - want.min()) > 0.3
    mix.train()
    torch.manual_seed(0)
    draws = 20_000
    many_q, many_k = q.expand(draws, -1, -1, -1), k.expand(draws, -1, -1, -1)
    chosen = mix._sort(many_q, many_k, torch.full((draws,), 24))[:, 0, 3, :3].mean(0)
    assert ((chosen - want).abs() < 5 * (want * (1 - want) / draws).sqrt()).all()
    for noisy in (make(causal=True).train(), make().train(), make(sortcut=1).train()):
        assert not torch.allclose(noisy(x), noisy(x))


def test_the_pattern_multiplies_the_values() -> None:
    for mix in (make(heads=2), make(heads=2, causal=True), make(heads=2, sortcut=2), make(heads=2, rotary=True)):
        x = tokens(2, 20, WIDTH)
        o = torch.einsum("bhts,bshv->bthv", mix.pattern(x), mix._qkv(x)[2])
        torch.testing.assert_close(mix.heads.merge(o), mix(x), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mix.pattern(x[:, :18]).sum(-1), torch.ones(2, 2, 18, dtype=torch.float64))


def test_what_cannot_work_raises() -> None:
    with pytest.raises(ValueError, match=r"sortcut=2.*causal"):
        make(causal=True, sortcut=2)
    with pytest.raises(ValueError, match="sortcut=0"):
        make(sortcut=0)
    with pytest.raises(ValueError, match="temperature=0"):
        make(temperature=0)
    with pytest.raises(ValueError, match="iterations=0"):
        make(iterations=0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sortcut": 2}])
def test_autocast(options: dict[str, object]) -> None:
    mix, x, lengths = make(heads=2, **options).float(), tokens(2, 27, WIDTH), torch.tensor([27, 8])
    with torch.autocast("cpu", torch.bfloat16):
        y = mix(x.float(), lengths=lengths)
        y.float().sum().backward()
    torch.testing.assert_close(y.double(), mix.double()(x, lengths=lengths), rtol=0.05, atol=0.05)
