"""A short convolution over time, channel by channel: each token with a few of its neighbours.

    yₜ = b + Σⱼ wⱼ ⊙ xₜ₋ₙⱼ    with x = 0 outside the sequence

n are offsets: how many tokens back each weight looks, 0 for the token itself and negative for later ones. Offsets that
are not negative make it causal; then the last max(n) inputs are all that later tokens need, and a ring holds them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.ops.impl import Impl, choose
from subquad.ops.lengths import zero_padding


def offsets(back: Sequence[int], causal: bool) -> tuple[int, ...]:
    """The token itself and those so many tokens back; where not causal, as many tokens ahead too."""
    return 0, *back, *([] if causal else [-n for n in back])


def short_conv(
    x: Tensor, weight: Tensor, at: Sequence[int], bias: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """x [B, T, D], weight [J, D], a row for each of the offsets `at`, bias [D] -> y [B, T, D].

    `lengths` [B]: right padding, which is zeros to the tokens before it.
    """
    before, after = max(0, *at), max(0, *(-n for n in at))
    seen = ranks.halo(zero_padding(x, lengths), before, after)
    return _sum(seen, before, x.shape[1], weight, at, bias)


def short_conv_prefill(
    x: Tensor,
    weight: Tensor,
    at: Sequence[int],
    ring: Tensor,
    position: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [B, T, D] behind a ring [B, L, D] and a position [B]: (y, the ring after the first `lengths` tokens).

    The token at position p is in place p modulo L of the ring, which is zeros where there was none yet; L = max(at).
    """
    reach = ring.shape[1]
    back = torch.arange(reach, device=x.device)
    oldest_first = ring.gather(1, _widen((position[:, None] + back) % reach, ring))
    seen = torch.cat((oldest_first.to(x.dtype), x), dim=1)  # [B, L + T, D]
    size = position.new_full(position.shape, x.shape[1]) if lengths is None else lengths
    if (cut := ranks.layout(x.shape[1])) is None:
        last = seen.gather(1, _widen(size[:, None] + back, seen)).to(ring.dtype)
    else:
        new, where = ranks.last_tokens(x, reach, lengths)
        old = oldest_first.gather(1, _widen((where + reach).clamp(0, reach - 1), ring))
        last, size = torch.where(where[..., None] < 0, old, new.to(ring.dtype)), where[:, -1] + 1
        halo = ranks.halo(zero_padding(x, lengths), reach, 0)
        seen = torch.cat((oldest_first[:, cut.offset :].to(x.dtype), halo[:, max(0, reach - cut.offset) :]), dim=1)
    places = (position + size)[:, None] + back  # modulo L, those of the last L tokens
    after = torch.empty_like(ring).scatter_(1, _widen(places % reach, ring), last)
    return _sum(seen, reach, x.shape[1], weight, at, bias), after


def short_conv_step(
    x: Tensor,
    weight: Tensor,
    back: Tensor,
    ring: Tensor,
    position: Tensor,
    bias: Tensor | None = None,
    inplace: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """One token, x [B, D], behind a ring and a position: (y [B, D], the new ring).

    The offsets are 0 and then `back`, a tensor, because a captured step cannot copy a list. The kernel writes in place.
    """
    if choose(impl, "short_conv_step", x, _unsupported(x, weight, ring, bias, inplace)) == "triton":
        return torch.ops.subquad.short_conv_step(x, weight, back, ring, position, bias), ring
    reach = ring.shape[1]
    places = (position[:, None] - back) % reach
    before = ring.gather(1, _widen(places, ring)).to(x.dtype)  # [B, J - 1, D]
    weight = weight.to(x.dtype)
    y = weight[0] * x + (weight[1:] * before).sum(1)
    y = y if bias is None else y + bias.to(x.dtype)
    place, new = _widen((position % reach)[:, None], ring), x[:, None].to(ring.dtype)
    return y, ring.scatter_(1, place, new) if inplace else ring.scatter(1, place, new)


def _unsupported(x: Tensor, weight: Tensor, ring: Tensor, bias: Tensor | None, inplace: bool) -> str | None:
    if not inplace:
        return "it writes in place"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, ring, bias)):
        return "it has no gradients"
    if x.dtype == torch.float64 or ring.stride(-1) != 1 or x.stride(-1) != 1 or not weight.is_contiguous():
        return "it takes types other than float64, with channels side by side"
    return None


torch.library.define(
    "subquad::short_conv_step",
    "(Tensor x, Tensor weight, Tensor back, Tensor(a!) ring, Tensor position, Tensor? bias) -> Tensor",
)


@torch.library.impl("subquad::short_conv_step", "CompositeExplicitAutograd")
def _(
    x: Tensor, weight: Tensor, back: Tensor, ring: Tensor, position: Tensor, bias: Tensor | None
) -> Tensor:  # fmt: skip
    from subquad.ops import short_conv_triton

    return short_conv_triton.step(x, weight, back, ring, position, bias)


@torch.library.register_fake("subquad::short_conv_step")
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


class ShortConv(nn.Module):
    """A short convolution with its weights: the token itself and those `back`, and ahead too where not causal."""

    def __init__(self, dim: int, back: Sequence[int], causal: bool = True, bias: bool = False):
        super().__init__()
        self.at, self.reach = offsets(back, causal), max(back)
        self.back: Tensor
        self._back = tuple(back)
        self.register_buffer("back", torch.tensor(self._back), persistent=False)
        self.weight = nn.Parameter(self._draw(len(self.at), dim))
        self.bias = nn.Parameter(self._draw(len(self.at), dim)[0]) if bias else None

    def _draw(self, count: int, dim: int) -> Tensor:
        """Initial weights, [J, D]."""
        return torch.empty(count, dim).uniform_(-(count**-0.5), count**-0.5)

    def restore(self) -> None:
        """Recompute what is not saved, after the module was made without values."""
        self.back.copy_(torch.tensor(self._back))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return short_conv(x, self.weight, self.at, self.bias, lengths)

    def make_ring(self, batch: int) -> Tensor:
        return self.weight.new_zeros(batch, self.reach, self.weight.shape[1])

    def advance(self, x: Tensor, ring: Tensor, position: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Many tokens behind a ring: (y, the ring after the first `lengths` of them)."""
        return short_conv_prefill(x, self.weight, self.at, ring, position, self.bias, lengths)

    def advance_one(self, x: Tensor, ring: Tensor, position: Tensor, inplace: bool) -> tuple[Tensor, Tensor]:
        """One token behind a ring, x [B, D]."""
        return short_conv_step(x, self.weight, self.back, ring, position, self.bias, inplace)

    def extra_repr(self) -> str:
        return f"dim={self.weight.shape[1]}, at={self.at}"


def _sum(seen: Tensor, start: int, size: int, weight: Tensor, at: Sequence[int], bias: Tensor | None) -> Tensor:
    """The convolution of the tokens start .. start + size of `seen`."""
    weight = weight.to(seen.dtype)
    y = weight[0] * seen[:, start - at[0] : start - at[0] + size]
    for back, scale in zip(at[1:], weight[1:], strict=True):
        y = y + scale * seen[:, start - back : start - back + size]
    return y if bias is None else y + bias.to(seen.dtype)


def _widen(at: Tensor, like: Tensor) -> Tensor:
    return at[..., None].expand(-1, -1, like.shape[-1])
