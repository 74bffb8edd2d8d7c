import math

import pytest
import torch

from subquad.models.embedding import Grid, sinusoid


def test_sinusoid_is_the_papers_formula() -> None:
    table = sinusoid(torch.arange(50), 6, torch.float64)
    for p in (0, 1, 17, 49):
        for j in range(3):
            angle = p / 10000 ** (2 * j / 6)
            assert table[p, 2 * j].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[p, 2 * j + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_sinusoid_is_exact_far_out_in_sixteen_bits() -> None:
    far = torch.tensor([30_001])
    exact = sinusoid(far, 8, torch.float64)
    assert (sinusoid(far, 8, torch.bfloat16).double() - exact).abs().max() < 0.01
    assert sinusoid(far, 5, torch.float32).shape == (1, 5)


def test_grid_adds_row_column_and_channel() -> None:
    grid = Grid((2, 3, 4), 8)
    rows, columns, channels = grid.tables
    places = grid(torch.arange(24), torch.float32)
    for p in range(24):
        expected = rows[p // 12] + columns[p // 4 % 3] + channels[p % 4]
        torch.testing.assert_close(places[p], expected * math.sqrt(8))


@pytest.mark.parametrize("width", [36, 41])
def test_waves_tell_how_far_apart_two_places_are(width: int) -> None:
    """Before training, the similarity of two places depends only on the rows and columns between them."""
    grid = Grid((6, 5, 3), width, waves=True)
    places = grid(torch.arange(90), torch.float32).detach().view(6, 5, 3, width)[:, :, 0]
    assert places.square().sum(-1).flatten().tolist() == pytest.approx([width // 6 * 6] * 30, abs=1e-3)
    likeness = torch.einsum("rcd,sed->rcse", places, places)
    for rows, columns in ((1, 0), (0, 1), (2, 3)):
        same = torch.stack([likeness[r, c, r + rows, c + columns] for r in range(6 - rows) for c in range(5 - columns)])
        torch.testing.assert_close(same, same[:1].expand_as(same))
        assert same[0] < width // 6 * 6 - 0.1


@pytest.mark.parametrize("waves", [False, True])
@pytest.mark.parametrize(("shape", "width"), [((2, 1), 2), ((7, 3, 3), 7), ((1, 1), 1)])
def test_grids_of_odd_sizes_have_finite_places(shape: tuple[int, ...], width: int, waves: bool) -> None:
    places = Grid(shape, width, waves=waves)(torch.arange(math.prod(shape)), torch.float32)
    assert places.shape == (math.prod(shape), width)
    assert places.isfinite().all()
