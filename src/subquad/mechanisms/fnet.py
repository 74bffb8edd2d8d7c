"""FNet: no attention at all; a Fourier transform over tokens and channels mixes everything with everything.

Paper       Lee-Thorp et al. 2021, "FNet: Mixing Tokens with Fourier Transforms", arXiv:2105.03824, §3.2
Definition  Y = Re(F_T X F_D), with the DFT matrices F_n[j, k] = exp(-2πi·jk/n); a row of length n uses F_n
Cost        train O(T·D·(log T + log D)) time, O(T·D) memory; no parameters; no decoding
Departures  padding is respected: a padded row is transformed at its own length, by the chirp-z transform, which turns
            a DFT of any size into one convolution, so that rows of different lengths share one FFT
Verified    tests/mechanisms/test_fnet.py: torch.fft.fft2 in float64, the DFT matrix twice is a reversal
"""

import math

import torch
from torch import Tensor

from subquad.mechanisms.base import Mixer, Traits
from subquad.ops.lengths import symbolic
from subquad.ops.precision import wide, wide_type


class FNet(Mixer):
    traits = Traits(causal=False, bidirectional=True)
    family, exponent = "attention-free", 1.0
    unused = Mixer.unused | {"heads", "dropout", "rotary"}
    _why_not_causal = "every output of a Fourier transform depends on every input"

    def _forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        channels = torch.fft.fft(wide(x), dim=2)
        mixed = torch.fft.fft(channels, dim=1) if lengths is None else chirp_z(channels, lengths)
        return mixed.real.to(x.dtype)

    def _reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        tokens, channels = (dft(size, x) for size in x.shape[1:])
        return (tokens @ x.to(tokens.dtype) @ channels).real.to(x.dtype)

    def _pattern(self, x: Tensor) -> Tensor:
        """The cosine part of the token transform; one head, since all channels are mixed in the same way."""
        return dft(x.shape[1], x).real.to(x.dtype).expand(x.shape[0], 1, -1, -1)


def dft(size: int, like: Tensor) -> Tensor:
    """The DFT matrix of that size, complex."""
    index = torch.arange(size, device=like.device)
    angle = -2 * math.pi * (index[:, None] * index % size).to(wide_type(like))
    return torch.polar(torch.ones_like(angle), angle / size)


def chirp_z(x: Tensor, lengths: Tensor) -> Tensor:
    """The DFT over dim 1 of each row's first n entries (Bluestein 1970): x [B, T, D] complex, zero beyond n.

    -2jk = (k - j)² - j² - k², so the transform is a convolution with a chirp between two products with chirps.
    """
    size = x.shape[1]
    n = lengths.clamp(min=1)[:, None]

    def make_chirp(index: Tensor) -> Tensor:
        # k² modulo 2n in integers: the angle stays exact however long the row
        angle = math.pi * (index.square() % (2 * n)).to(x.real.dtype) / n
        return torch.polar(torch.ones_like(angle), angle)

    chirp = make_chirp(torch.arange(size, device=x.device))  # [B, T]
    # `around` is the chirp at k - j, negative differences wrapped
    if symbolic(size):
        width = 2 * size
        index = torch.arange(width, device=x.device)
        around = make_chirp(torch.minimum(index, width - index))
    else:
        width = 1 << (2 * size - 2).bit_length()  # a power of two, which is twice as fast as 2T - 1
        between = chirp.new_zeros(len(chirp), width - 2 * size + 1)
        around = torch.cat((chirp, between, chirp[:, 1:].flip(1)), dim=1)
    kernel = torch.fft.fft(around, dim=1)
    signal = torch.fft.fft(x * chirp.conj()[..., None], n=width, dim=1)
    return torch.fft.ifft(signal * kernel[..., None], dim=1)[:, :size] * chirp.conj()[..., None]
