import pytest
import torch

from subquad.ops.rotary import rotate


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_pairs_turn_as_complex_numbers() -> None:
    x, positions = draw(2, 5, 3, 8), torch.arange(5)
    turned = torch.complex(x[..., :4], x[..., 4:])
    for j in range(4):
        angle = positions.double() * 100.0 ** (-2 * j / 8)
        turned[..., j] *= torch.polar(torch.ones(5, dtype=torch.float64), angle)[None, :, None]
    torch.testing.assert_close(rotate(x, positions, base=100.0), torch.cat((turned.real, turned.imag), -1))


def test_far_positions_turn_as_complex_numbers() -> None:
    positions = torch.tensor([65_535, 65_536, 70_001, 2**24 + 1, 2**31 + 3])
    x = draw(1, 5, 1, 4)
    angles = positions.double()[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    turned = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    want = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotate(x, positions), want, rtol=1e-6, atol=1e-6)
    # in single precision an angle of p radians is off by p/2²⁴
    torch.testing.assert_close(rotate(x.float(), positions)[:, :3], want[:, :3].float(), rtol=0.02, atol=0.02)


def test_scores_depend_on_differences_of_positions_only() -> None:
    q, k = draw(1, 1, 1, 16), draw(1, 2, 1, 16)[:, 1:]

    def score(i: int, j: int) -> torch.Tensor:
        return (rotate(q, torch.tensor([i])) * rotate(k, torch.tensor([j]))).sum()

    torch.testing.assert_close(score(7, 3), score(1007, 1003))
    assert not torch.isclose(score(7, 3), score(3, 7))


def test_position_zero_and_the_norm_stay() -> None:
    x = draw(2, 6, 1, 4)
    y = rotate(x, torch.arange(6))
    torch.testing.assert_close(y[:, 0], x[:, 0])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_rows_have_their_own_positions_one_token_at_a_time() -> None:
    x = draw(2, 9, 3, 4)
    whole = rotate(x, torch.arange(9))
    step = rotate(x[[0, 1], [4, 7]][:, None], torch.tensor([[4], [7]]))
    torch.testing.assert_close(step, torch.stack((whole[0, 4:5], whole[1, 7:8])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_angles_are_exact_in_short_types_at_long_positions(dtype: torch.dtype) -> None:
    x, positions = draw(1, 3, 1, 4).to(dtype), torch.tensor([10, 5_001, 60_003])
    y = rotate(x, positions)
    assert y.dtype == dtype
    exact = rotate(x.double(), positions)
    assert (y.double() - exact).abs().max() < 4 * max(torch.finfo(dtype).eps, 60_003 * torch.finfo(torch.float32).eps)


def test_gradients() -> None:
    x = draw(1, 3, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, torch.arange(3)), (x,))


@pytest.mark.parametrize(
    ("message", "x", "positions", "base"),
    [
        ("even width", torch.zeros(1, 2, 1, 3), torch.arange(2), 1e4),
        ("x is", torch.zeros(2, 4), torch.arange(2), 1e4),
        ("x is", torch.zeros(1, 2, 1, 4, dtype=torch.int64), torch.arange(2), 1e4),
        ("positions has shape", torch.zeros(1, 2, 1, 4), torch.arange(3), 1e4),
        ("positions has type", torch.zeros(1, 2, 1, 4), torch.tensor([True, False]), 1e4),
        ("base", torch.zeros(1, 2, 1, 4), torch.arange(2), 0.0),
    ],
)
def test_wrong_arguments_are_named(message: str, x: torch.Tensor, positions: torch.Tensor, base: float) -> None:
    with pytest.raises(ValueError, match=message):
        rotate(x, positions, base)
