import math

import pytest
import torch

from subquad import LanguageModel
from subquad.models import logistic_mixture as lm


def outputs(rows: int, components: int = 10, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    weights, means = torch.randn(rows, components, generator=g), torch.randn(rows, components, generator=g) * 0.7
    scales = torch.rand(rows, components, generator=g) * 6 - 5
    return torch.cat((weights, means, scales), -1)


def test_probabilities_sum_to_one() -> None:
    hard = outputs(40)
    hard[0, 20:] = -50  # below the clamp: one cell each
    hard[1, 10:20] = 30.0  # all the mass beyond the last value
    hard[2, 10:20], hard[2, 20:] = -30.0, 3.0
    for dtype, error in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        total = lm.log_probs(hard.to(dtype)).exp().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=error)


def test_one_value_and_all_values_agree_with_the_definition() -> None:
    x = outputs(6).double()
    table = lm.log_probs(x)
    weights, means, scales = x.chunk(3, -1)
    pi, s = weights.softmax(-1), scales.clamp(min=-7).exp()
    for v in (0, 1, 100, 254, 255):
        at = 2 * v / 255 - 1
        high = torch.sigmoid((at + 1 / 255 - means) / s) if v < 255 else torch.ones_like(means)
        low = torch.sigmoid((at - 1 / 255 - means) / s) if v > 0 else torch.zeros_like(means)
        torch.testing.assert_close(table[:, v].exp(), (pi * (high - low)).sum(-1), rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(lm.log_prob(x, torch.full((6,), v)), table[:, v])


def test_gradients_are_finite_far_from_the_target() -> None:
    x = outputs(4).requires_grad_()
    far = torch.cat((torch.zeros(4, 10), torch.full((4, 10), 40.0), torch.full((4, 10), -20.0)), -1).requires_grad_()
    for out in (x, far):
        loss = lm.loss(out[None], torch.tensor([[0, 255, 3, 128]]))
        assert torch.isfinite(loss)
        (gradient,) = torch.autograd.grad(loss, out)
        assert torch.isfinite(gradient).all()


def misfit(drawn: torch.Tensor, x: torch.Tensor) -> float:
    """The distance of frequencies from probabilities, in standard deviations of the chi-square statistic."""
    expected = lm.log_probs(x)[0].double().exp()
    found = drawn.bincount(minlength=256).double() / len(drawn)
    enough = expected * len(drawn) > 20
    chi = ((found - expected) ** 2 / expected)[enough].sum() * len(drawn)
    freedom = int(enough.sum())
    assert abs(found[~enough].sum() - expected[~enough].sum()) < 2e-3
    return float(chi - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_sampler_draws_what_the_loss_scores(seed: int) -> None:
    count = 100_000
    x = outputs(1, seed=seed)
    seeds, at = torch.arange(count) + seed * count, torch.full((count,), 11)
    assert abs(misfit(lm.draw(x.expand(count, -1), seeds, at), x)) < 5
    # elu + 1.0001 is close to exp for small scales but not for wide ones, and this test must see that
    x[:, 20:] = torch.rand(1, 10) + 1
    assert abs(misfit(lm.draw(x.expand(count, -1), seeds, at), x)) < 5
    trap = x.clone()
    trap[:, 20:] = (torch.nn.functional.elu(x[:, 20:]) + 1.0001).log()
    assert misfit(lm.draw(trap.expand(count, -1), seeds, at), x) > 50


def test_a_model_with_a_mixture_trains_and_generates() -> None:
    torch.manual_seed(0)
    model = LanguageModel(vocab=257, mixture=4, dim=16, depth=1, heads=2, mechanism="linear")
    tokens = torch.cat((torch.full((3, 1), 256), torch.randint(256, (3, 9))), 1)
    loss = model.loss(tokens)
    each = model.loss(tokens, reduction="none")
    torch.testing.assert_close(each.mean(), loss)
    torch.testing.assert_close(each, -lm.log_prob(model(tokens[:, :-1]), tokens[:, 1:]))
    loss.backward()
    made = model.generate([[256], [256]], 5, full=True, logprobs=True)
    assert made.tokens.max() < 256
    whole = torch.cat((torch.full((2, 1), 256), made.tokens), 1)
    expected = -model.eval().loss(whole, reduction="none")
    torch.testing.assert_close(made.logprobs, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="targets ranges"):
        model.loss(torch.tensor([[0, 256]]))


def test_impossible_mixtures_raise() -> None:
    for wrong in ({"outputs": 30}, {"vocab": 20}, {"mixture": 0}, {"tie": True, "positions": "none"}):
        with pytest.raises(ValueError, match=r"mixture|outputs|tie"):
            LanguageModel(**{"vocab": 257, "dim": 8, "heads": 2, "mixture": 10, **wrong})
