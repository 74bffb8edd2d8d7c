"""A short convolution: against torch's own, with padding, on both sides, and behind a ring."""

import math

import pytest
import torch
from torch import Tensor, nn

from subquad.ops.short_conv import ShortConv, offsets, short_conv


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def by_torch(x: Tensor, weight: Tensor, at: tuple[int, ...], bias: Tensor | None) -> Tensor:
    """A kernel that is zero between the offsets, in torch's convolution."""
    before, after = max(at), max(0, *(-n for n in at))
    kernel = torch.zeros(x.shape[-1], 1, before + after + 1, dtype=x.dtype)
    for back, row in zip(at, weight, strict=True):
        kernel[:, 0, before - back] += row
    return nn.functional.conv1d(nn.functional.pad(x.mT, (before, after)), kernel, bias, groups=x.shape[-1]).mT


@pytest.mark.parametrize("size", [1, 2, 6, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("back", [(1, 2, 3), (1, 5), (4,)])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_torchs(size: int, causal: bool, back: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    conv, x = ShortConv(3, back, causal, bias).double(), tokens(2, size, 3).requires_grad_()
    inputs = [x, *conv.parameters()]
    ours, theirs = conv(x), by_torch(x, conv.weight, conv.at, conv.bias)
    torch.testing.assert_close(ours, theirs)
    weights = tokens(*ours.shape)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_zeros_to_the_tokens_before_it(causal: bool) -> None:
    conv, x = ShortConv(3, (1, 4), causal).double(), tokens(3, 12, 3)
    lengths = torch.tensor([12, 5, 0])
    dirty = x.clone()
    dirty[1, 5:], dirty[2] = math.nan, math.inf
    y = conv(dirty, lengths)
    torch.testing.assert_close(y[0], conv(x[:1])[0])
    torch.testing.assert_close(y[1, :5], conv(x[1:2, :5])[0])


def test_causal_offsets_see_no_later_token_and_others_see_both_sides() -> None:
    assert offsets((1, 3), True) == (0, 1, 3)
    assert offsets((1, 3), False) == (0, 1, 3, -1, -3)
    pulse = torch.zeros(1, 9, 1)
    pulse[0, 4] = 1
    for causal, rows in ((True, [4, 5, 7]), (False, [1, 3, 4, 5, 7])):
        at = offsets((1, 3), causal)
        y = short_conv(pulse, torch.arange(1.0, len(at) + 1)[:, None], at)[0, :, 0]
        assert y.nonzero().flatten().tolist() == rows
        assert y[4] == 1


@pytest.mark.parametrize("bias", [False, True])
def test_a_ring_goes_on_where_a_ragged_prompt_ended(bias: bool) -> None:
    torch.manual_seed(0)
    conv, x = ShortConv(3, (1, 2, 3), bias=bias).double(), tokens(3, 20, 3)
    whole, lengths = conv(x), torch.tensor([9, 1, 0])
    y, ring = conv.advance(x[:, :9], conv.make_ring(3), torch.zeros(3, dtype=torch.int64), lengths)
    position = lengths.clone()
    for row, n in enumerate(lengths):
        torch.testing.assert_close(y[row, :n], whole[row, :n])
    for step in range(8):
        token = torch.stack([x[row, n + step] for row, n in enumerate(lengths)])
        before, inplace = ring.clone(), step % 2 == 1
        y, new = conv.advance_one(token, ring, position, inplace)
        assert torch.equal(ring, before) is not inplace
        torch.testing.assert_close(y, torch.stack([whole[row, n + step] for row, n in enumerate(lengths)]))
        ring, position = new, position + 1
