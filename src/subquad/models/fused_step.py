"""A decoding step of a block in few operations, in place.

Between the products with the weights stands what a mechanism does with q, k and v of one token (`Mixer._decode`). What
surrounds them, such as norms, residual and activation, becomes a part of the products (`mix`, ops/row_linear.py). For
many rows the products are a library's, and residual and norm are one kernel between them (`mix_many`). Positions move
for all layers at once, at the end of the step. Blocks that are built otherwise take their usual step.
"""

from typing import Any

from torch import Tensor, nn

from subquad.mechanisms.attention import Attention, Heads
from subquad.mechanisms.checking import check_state
from subquad.ops.feed_forward import Mixed, feed_forward, pays
from subquad.ops.impl import watched
from subquad.ops.rotary import Turns
from subquad.ops.row_linear import MANY, Activation, Norm, norm_of, normalise, plain, row_linear


def mix(block: Any, x: Tensor, state: Any, turns: Turns | None, late: list[Tensor]) -> tuple[Tensor, Any, bool] | None:
    """The stream x [B, D] after the mixer on its residual, and the state; None if this block cannot.

    The third result says whether x has passed the feed-forward too: with many rows one kernel does both. `late`: the
    positions that the caller still has to move are added to it.
    """
    parts = _parts(block, x, state, turns)
    if parts is None:
        return None
    mixer, residual, taps = block.mixer, block.mixer_residual, block.taps
    into, out, norm, mixed, recent = parts
    before = None if residual.post else norm
    h = x
    if taps is not None:
        h = h if before is None else normalise(h, before)
        h, recent = taps.decode(h, recent)
        before = None
        late.append(recent.position)
    o, mixed = mixer._decode(row_linear(h, into.weight, into.bias, norm=before), mixed, turns)
    late.append(mixed.position)
    if recent is not None:
        mixed = type(state)(mixed, recent)
    fed = _finish(block, x, o, out, norm)
    if fed is not None:
        return fed, mixed, True
    x = row_linear(o, out.weight, out.bias, residual=x)
    return (normalise(x, norm) if residual.post else x), mixed, False


def _parts(block: Any, x: Tensor, state: Any, turns: Turns | None) -> tuple[Any, Any, Norm, Any, Any] | None:
    """Input and output layer of a mixer, the norm of its residual, and the states of mixer and taps.

    None if it is built so that its usual step must run.
    """
    mixer = block.mixer
    if not isinstance(mixer, Attention) or mixer.turn is not None or block.training or "step" in vars(mixer):
        return None  # the last: somebody replaced its step
    heads: Any = getattr(mixer, "heads", None)
    norm = norm_of(block.mixer_residual.norm, x.dtype)
    if norm is None or type(heads) is not Heads or watched(heads):
        return None
    into, out = heads.qkv, heads.out  # looked up once: attributes of modules are slow
    if not (plain(into) and plain(out)) or (turns is None) != (mixer.turn_width is None):
        return None
    mixed, recent = block._parts(state, x)
    if not mixer._decodes(mixed):
        return None
    if isinstance(mixed, mixer.state_type or object):
        check_state(mixer, mixed, x.shape[0])
    return into, out, norm, mixed, recent


def many(x: Tensor, ff: Any) -> bool:
    """Whether the stream x [B, D] has so many rows that `mix_many` takes it, and no kernel its whole feed-forward."""
    return x.is_cuda and x.shape[0] > MANY and (ff.gated or not pays(x, ff.inner.weight))


def mix_many(
    block: Any, stream: tuple[Tensor, ...], state: Any, turns: Turns | None, late: list[Tensor]
) -> tuple[tuple[Tensor, ...], Tensor, Any] | None:
    """The stream, what the mixer adds to it, and the state; None if this block cannot."""
    parts = _parts(block, stream[0], state, turns)
    if parts is None:
        return None
    into, out, _, mixed, recent = parts
    stream, h = block.mixer_residual.enter(stream, products=block.taps is None)
    if recent is not None:
        h, recent = block.taps.decode(h, recent)
        late.append(recent.position)
    o, mixed = block.mixer._decode(into(h), mixed, turns)
    late.append(mixed.position)
    return stream, out(o), mixed if recent is None else type(state)(mixed, recent)


def _finish(block: Any, x: Tensor, o: Tensor, out: Any, norm: Norm) -> Tensor | None:
    """The stream after the output layer of the mixer and the feed-forward in one kernel, where that is faster."""
    ff, post = block.ff, block.mixer_residual.post
    if ff.gated or not pays(x, ff.inner.weight) or not (plain(ff.inner) and plain(ff.out)) or watched(ff):
        return None
    second = norm_of(block.ff_residual.norm, x.dtype)
    if second is None or (second.kind, second.eps) != (norm.kind, norm.eps):
        return None
    mixed = Mixed(o, out.weight, out.bias, norm.weight if post else None, norm.bias if post else None)
    return feed_forward(
        x, ff.inner.weight, ff.inner.bias, ff.out.weight, ff.out.bias, second.weight, second.bias, eps=norm.eps,
        activation=ff.activation, norm=norm.kind, pre=not post, mixed=mixed,
    )  # fmt: skip


def feed(x: Tensor, ff: Any, residual: Any) -> Tensor | None:
    """The stream x [B, D] after the feed-forward on its residual; None if it is built otherwise."""
    norm, inner, out = norm_of(residual.norm, x.dtype), ff.inner, ff.out
    if norm is None or ff.training or not (plain(inner) and plain(out)) or watched(ff):
        return None
    before: Norm | None = None if residual.post else norm
    activation: Activation = "none" if ff.gated else ff.activation
    h = row_linear(x, inner.weight, inner.bias, norm=before, activation=activation)
    if ff.gated:
        gate, value = h.chunk(2, dim=-1)
        h = nn.functional.silu(gate) * value
    x = row_linear(h, out.weight, out.bias, residual=x)
    return normalise(x, norm) if residual.post else x
