import math

import pytest
import torch

from subquad.models.positions import Grid, sinusoid


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
