from typing import Any

import pytest
import torch

from subquad.ops.rotary import Turns, rotate, turned, turns


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
    torch.testing.assert_close(rotate(x.float(), positions), want.float())  # angles are float64 for any type of x


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
    assert (y.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_gradients_have_at_most_the_error_of_the_plain_expression(dtype: torch.dtype) -> None:
    """The plain one, in its type: x cos + (-b, a) sin, with tables rounded to that type."""
    x, grad, positions = draw(2, 300, 3, 8).to(dtype), draw(2, 300, 3, 8).to(dtype), torch.arange(9000, 9300)

    def plain(x: torch.Tensor) -> torch.Tensor:
        angle = (positions[:, None, None].double() * 10000 ** (-torch.arange(4).double() / 4)).repeat(1, 1, 2)
        a, b = x.chunk(2, -1)
        return x * angle.cos().to(x.dtype) + torch.cat((-b, a), -1) * angle.sin().to(x.dtype)

    def both(function: Any, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        y = function(x)
        return [y.detach().double(), torch.autograd.grad(y, x, grad.to(y.dtype))[0].double()]

    exact, ours, theirs = both(plain, x.double()), both(lambda x: rotate(x, positions), x), both(plain, x)
    for a, b, want in zip(ours, theirs, exact, strict=True):
        assert (a - want).square().mean() <= (b - want).square().mean()
        assert (a - want).abs().max() <= (b - want).abs().max()


def test_gradients() -> None:
    x = draw(1, 3, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, torch.arange(3)), (x,))
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, torch.arange(3)), (x,))
    direction = draw(1, 3, 2, 4)
    (want,) = torch.autograd.grad((rotate(x, torch.arange(3)) * direction).sum(), x)
    got = torch.func.grad(lambda x: (rotate(x, torch.arange(3)) * direction).sum())(x.detach())
    torch.testing.assert_close(got, want)


def test_backward_keeps_the_turns_alone() -> None:
    x, by = draw(2, 5, 3, 8).requires_grad_(), turns(torch.arange(5), 8, torch.float64)
    kept: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        turned(x, by)
    assert [t.data_ptr() for t in kept] == [by.cos.data_ptr(), by.sin.data_ptr()]


def test_turned_back_is_x() -> None:
    x, by = draw(2, 5, 3, 8), turns(torch.arange(5), 8, torch.float64)
    torch.testing.assert_close(turned(turned(x, by), by, -1), x)


def test_a_compiled_program_computes_no_cosine_for_each_head() -> None:
    """Turns are one operator, so that a compiler cannot compute them again in the loops over heads."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def both(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by: Turns = turns(torch.arange(q.shape[1]), q.shape[-1], torch.float64)
        return turned(q, by), turned(k, by)

    torch._dynamo.reset()
    q, k = draw(2, 5, 3, 8), draw(2, 5, 1, 8)
    for got, want in zip(torch.compile(both, backend=keep, fullgraph=True)(q, k), both(q, k), strict=True):
        torch.testing.assert_close(got, want)
    torch._dynamo.reset()
    names = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("subquad.turns" in name for name in names) == 1
    assert not any(name in ("cos", "sin", "pow") for name in names)


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
