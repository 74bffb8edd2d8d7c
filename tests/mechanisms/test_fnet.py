import torch

from subquad import build
from subquad.mechanisms.fnet import chirp_z, dft


def test_equals_the_two_dimensional_transform() -> None:
    x = torch.randn(2, 13, 8, dtype=torch.float64)
    torch.testing.assert_close(build("fnet", dim=8).double()(x), torch.fft.fft2(x).real)


def test_the_transform_twice_is_a_reversal() -> None:
    x = torch.randn(9, dtype=torch.complex128)
    twice = dft(9, x.real) @ (dft(9, x.real) @ x)
    torch.testing.assert_close(twice, 9 * x[-torch.arange(9)])


def test_rows_of_every_length_share_one_transform() -> None:
    lengths = torch.arange(0, 24)
    x = torch.randn(24, 23, 3, dtype=torch.complex128)
    x = x * (torch.arange(23) < lengths[:, None])[..., None]
    got = chirp_z(x, lengths)
    for row, n in enumerate(lengths.tolist()):
        if n:
            torch.testing.assert_close(got[row, :n], torch.fft.fft(x[row, :n], dim=0))


def test_a_long_padded_row_stays_exact_in_float32() -> None:
    x = torch.randn(1, 20_000, 2)
    lengths = torch.tensor([19_997])
    x[:, 19_997:] = 0
    got = build("fnet", dim=2)(x, lengths=lengths)[:, :19_997]
    want = torch.fft.fft2(x[:, :19_997].double()).real
    assert (got - want).norm() / want.norm() < 1e-5
