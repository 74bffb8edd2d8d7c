"""Directions and features against the closed forms of the Performer paper's lemma 2 and theorem 2."""

import math

import pytest
import torch
from torch import Tensor

from subquad.ops.random_features import draw_directions, exponents, fourier, positive, project, trigonometric

DRAWS, WIDTH = 60_000, 8


def pair() -> tuple[Tensor, Tensor]:
    """Two short vectors: the estimates' tails are heavy for long ones."""
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, WIDTH, generator=g, dtype=torch.float64)
    return 0.5 * x / x.norm(), 0.4 * y / y.norm()


def exponential(x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Positive features and the logarithm of the factor to them."""
    found = exponents(x, directions)
    factor = found.factor
    return positive(x, directions, found), factor


def estimates(kernel: str, count: int, orthogonal: bool = False, draws: int = DRAWS) -> Tensor:
    """φ(x)·φ(y) for independent draws of the directions, [draws]; each draw is one head."""
    g = torch.Generator().manual_seed(count)
    w = draw_directions(draws, count, WIDTH, g, orthogonal=orthogonal).double()
    x, y = (t.expand(1, 1, draws, WIDTH) for t in pair())
    if kernel == "gaussian":
        return (fourier(x, w) * fourier(y, w)).sum(-1).flatten()
    w = torch.cat((w, -w), dim=1) if kernel == "hyperbolic" else w
    features = trigonometric if kernel == "trig" else exponential
    (a, log_a), (b, log_b) = features(x, w), features(y, w)
    return ((a * b).sum(-1) * (log_a + log_b).exp()).flatten()


def closed_form(kernel: str, count: int) -> tuple[float, float]:
    """The mean, and the variance with `count` independent directions."""
    x, y = pair()
    z, difference, sm = float((x + y).square().sum()), float((x - y).square().sum()), math.exp(float(x @ y))
    plus = math.exp(z) * sm**2 * (1 - math.exp(-z)) / count
    return {
        "softmax": (sm, plus),
        "hyperbolic": (sm, (1 - math.exp(-z)) / 2 * plus),
        "trig": (sm, math.exp(z) / sm**2 * (1 - math.exp(-difference)) ** 2 / (2 * count)),
        "gaussian": (math.exp(-difference / 2), (1 - math.exp(-difference)) ** 2 / (2 * count)),
    }[kernel]


@pytest.mark.parametrize("kernel", ["softmax", "hyperbolic", "trig", "gaussian"])
@pytest.mark.parametrize("count", [1, 5])
def test_mean_and_variance(kernel: str, count: int) -> None:
    got = estimates(kernel, count)
    mean, variance = closed_form(kernel, count)
    assert abs(float(got.mean()) - mean) < 4 * math.sqrt(variance / DRAWS)
    assert float(got.var()) == pytest.approx(variance, rel=0.06)


@pytest.mark.parametrize("kernel", ["softmax", "hyperbolic", "trig", "gaussian"])
def test_orthogonal_directions_are_unbiased_with_less_variance(kernel: str) -> None:
    got = estimates(kernel, WIDTH, orthogonal=True, draws=20_000)
    mean, variance = closed_form(kernel, WIDTH)
    assert abs(float(got.mean()) - mean) < 4 * math.sqrt(variance / 20_000)
    assert float(got.var()) < 0.9 * variance


def test_orthogonal_directions_gain_what_theorem_2_promises() -> None:
    x, y = pair()
    mean, variance = closed_form("softmax", WIDTH)
    far = math.exp(-float(x.square().sum() + y.square().sum()) / 2)
    gain = 2 * (WIDTH - 1) / (WIDTH * (WIDTH + 2)) * (mean - far) ** 2
    assert float(estimates("softmax", WIDTH, orthogonal=True, draws=20_000).var()) < 1.03 * (variance - gain)


def test_directions() -> None:
    w = draw_directions(3, 21, 8, torch.Generator().manual_seed(0))
    assert w.shape == (3, 21, 8)
    assert w.dtype == torch.float32
    for start in (0, 8, 16):
        block = w[:, start : start + 8]
        products = block @ block.mT
        off = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-5  # a last block of fewer rows included
    many = draw_directions(1, 4000, 8, torch.Generator().manual_seed(0))[0].double()
    squares = many.square().sum(-1)
    assert float(squares.mean()) == pytest.approx(
        8, rel=0.05
    )  # chi-square with 8 degrees of freedom: mean 8, variance 16
    assert float(squares.var()) == pytest.approx(16, rel=0.1)
    torch.testing.assert_close(many.mean(0), torch.zeros(8, dtype=torch.float64), atol=0.07, rtol=0)
    torch.testing.assert_close(many.mT @ many / 4000, torch.eye(8, dtype=torch.float64), atol=0.07, rtol=0)
    even = draw_directions(2, 5, 8, torch.Generator().manual_seed(0), norms="sqrt")
    torch.testing.assert_close(even.norm(dim=-1), torch.full((2, 5), math.sqrt(8)))
    again = draw_directions(3, 21, 8, torch.Generator().manual_seed(0))
    assert torch.equal(w, again)
    assert not torch.equal(w[0], w[1])


def test_many_features_reach_the_kernel() -> None:
    """The setting of fast-transformers' tests: width 32, 32k features, entries of 0.15."""
    g = torch.Generator().manual_seed(0)
    x, y = 0.15 * torch.randn(2, 1, 10, 1, 32, generator=g)
    w = draw_directions(1, 16_000, 32, g)
    distance = torch.cdist(x[0, :, 0], y[0, :, 0])
    gaussian = fourier(x, w)[0, :, 0] @ fourier(y, w)[0, :, 0].mT
    assert (gaussian - (-distance.square() / 2).exp()).square().mean() < 1e-4
    (a, log_a), (b, log_b) = exponential(x, w), exponential(y, w)
    favor = a[0, :, 0] @ b[0, :, 0].mT * (log_a[0] + log_b[0].mT).exp()
    assert (favor - (x[0, :, 0] @ y[0, :, 0].mT).exp()).square().mean() < 1e-3


def test_projection_is_exact_in_half_precision_and_under_autocast() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = (100 * torch.randn(1, 6, 2, 16, generator=g)).bfloat16(), draw_directions(2, 10, 16, g)
    want = torch.einsum("bthk,hmk->bthm", x.double(), w.double())
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            got = project(x, w)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)
    for features in (exponential, trigonometric):
        phi, exponent = features(x, w)
        assert torch.isfinite(phi).all()
        assert torch.isfinite(exponent).all()
        assert phi.abs().max() <= 1


def leaves() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(2, 5, 3, 6, generator=g, dtype=torch.float64)
    return x.requires_grad_(), torch.randn(3, 7, 6, generator=g, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("with_unit", [False, True])
def test_positive_features_and_their_gradients(eps: float, with_unit: bool) -> None:
    x, w = leaves()
    unit = torch.linspace(-1, 1, 30, dtype=torch.float64).view(2, 5, 3) if with_unit else None

    def plain(x: Tensor, w: Tensor) -> Tensor:
        y = 0.7 * x
        p = torch.einsum("bthk,hmk->bthm", y, w) - y.square().sum(-1, keepdim=True) / 2 - math.log(7) / 2
        largest = p.amax(-1, keepdim=True)
        return (p - (largest if unit is None else unit[..., None])).exp() + eps * (
            1 if unit is None else (largest - unit[..., None]).exp()
        )

    def features(x: Tensor, w: Tensor) -> Tensor:
        return positive(x, w, exponents(x, w, 0.7), scale=0.7, unit=unit, eps=eps)

    torch.testing.assert_close(features(x, w), plain(x, w))
    assert torch.autograd.gradcheck(features, (x, w))


@pytest.mark.parametrize("unit", [False, True])
def test_fourier_features_and_their_gradients(unit: bool) -> None:
    x, w = leaves()
    p = torch.einsum("bthk,hmk->bthm", torch.nn.functional.normalize(x, dim=-1) if unit else x, w)
    want = torch.cat((p.sin(), p.cos()), dim=-1) / math.sqrt(7)
    torch.testing.assert_close(fourier(x, w, unit=unit), want)
    assert torch.autograd.gradcheck(lambda x, w: fourier(x, w, unit=unit), (x, w))


def test_a_vector_without_a_direction_is_divided_by_a_constant() -> None:
    x = torch.full((1, 1, 1, 6), 1e-9, dtype=torch.float64, requires_grad=True)
    w = leaves()[1][:1].detach()
    torch.testing.assert_close(fourier(x, w, unit=True), fourier(x / 1e-6, w))
    assert torch.autograd.gradcheck(lambda x: fourier(x, w, unit=True), x, eps=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_in_half_precision_are_those_of_float64_rounded(dtype: torch.dtype) -> None:
    """Only the result is rounded: scores are exact, however long the vectors are."""
    g = torch.Generator().manual_seed(0)
    x, w = (5 * torch.randn(1, 40, 2, 16, generator=g)).to(dtype), draw_directions(2, 30, 16, g)
    weight = torch.randn(1, 40, 2, 60, generator=g).to(dtype)

    def run(x: Tensor, unit: bool, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        phi = fourier(x, w, unit=True, dtype=kind) if unit else positive(x, w, exponents(x, w), dtype=kind)
        assert phi.dtype == kind
        (phi * weight[..., : phi.shape[-1]].to(kind)).sum().backward()
        assert x.grad is not None
        return phi.detach().double(), x.grad.double()

    for unit in (False, True):
        (phi, grad), (exact, slope) = run(x, unit, dtype), run(x.double(), unit, torch.float64)
        assert float((phi - exact).norm() / exact.norm()) < 0.0025
        assert float((grad - slope).norm() / slope.norm()) < 0.0075  # of three products, each rounded
