"""The block of a transformer: a mixer, attention to a memory if configured, and a feed-forward, each on a residual.

A `Stream` is passed from block to block: (x,), or with reversible residuals a pair (a, b). Each branch reads b and
adds to a: (a, b) -> (b, a + f(b)). This can be undone: (b, c) -> (c - f(b), b).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subquad import ranks
from subquad.mechanisms import build, mechanism
from subquad.mechanisms.base import Mixer
from subquad.models import fused_step
from subquad.models.config import MixerConfig, TransformerConfig
from subquad.models.dropout import Dropout
from subquad.models.taps import Recent, Taps
from subquad.ops.feed_forward import Activation, feed_forward, pays
from subquad.ops.impl import watched
from subquad.ops.layer_norm import Drop, LayerNorm, Norm, add_norm, fuses
from subquad.ops.lengths import zero_padding
from subquad.ops.perceptron import perceptron
from subquad.ops.precision import autocasts
from subquad.ops.projection import project, replaces
from subquad.ops.rotary import Turns
from subquad.ops.row_linear import plain

Stream = tuple[Any, ...]  # of tensors; a Waiting may have a Drop too
Write = Callable[[Stream, Tensor], Stream]
Branch = Callable[[Tensor, Tensor | None], Tensor]  # (what the branch reads, memory) -> what it adds


class Waiting(NamedTuple):
    """A stream to which a branch is yet to be added: the norm that reads it does so in the same pass, on a GPU."""

    x: Tensor
    added: Tensor
    drop: Drop | None


class Twice(NamedTuple):
    """A stream after a post-norm, which on a GPU writes it for products too, in the type of autocast."""

    x: Tensor
    short: Tensor


def paired(stream: Stream) -> bool:
    """Whether residuals are reversible."""
    return len(stream) == 2 and not isinstance(stream, Waiting | Twice)


def settled(stream: Stream) -> Stream:
    """The stream by itself, as a block takes it too."""
    if isinstance(stream, Waiting):
        x, added, drop = stream  # what is dropped need not follow from the seed here, where torch drops faster
        return (x + (added if drop is None else nn.functional.dropout(added, drop.share)),)
    return (stream.x,) if isinstance(stream, Twice) else stream


class FeedForward(nn.Module):
    """Two matrices around relu or gelu, or three around swiglu (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.activation, self.chunks = config.activation, config.ff_chunks
        self.gated = config.activation == "swiglu"
        self.inner = nn.Linear(config.dim, config.ff_width * (2 if self.gated else 1))
        self.out = nn.Linear(config.ff_width, config.dim)
        self.dropout = Dropout(config.ff_dropout)
        nn.init.zeros_(self.inner.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D]. In chunks along T, only one chunk's wide inner vectors exist at a time, also in backward."""
        if self.chunks == 1 or x.ndim < 3 or self._keeps_less(x):
            return self._apply_all(x)
        parts, seed = x.chunk(self.chunks, dim=-2), self.dropout.seed()
        at = [None] * len(parts) if seed is None else ranks.positions(x.shape[-2], x.device).chunk(self.chunks)
        pieces = [(part, seed, places) for part, places in zip(parts, at, strict=True)]
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(self._apply_all, *piece, use_reentrant=False) for piece in pieces], dim=-2)
        return torch.cat([self._apply_all(*piece) for piece in pieces], dim=-2)

    def _apply_all(self, x: Tensor, seed: int | None = None, positions: Tensor | None = None) -> Tensor:
        if self._keeps_less(x):
            inner, out = self.inner, self.out
            act: Activation = "relu" if self.activation == "relu" else "gelu"
            pieces = self.chunks if x.ndim > 2 else 1
            return perceptron(x, inner.weight, inner.bias, out.weight, out.bias, activation=act, pieces=pieces)
        h = project(x, self.inner)
        if self.gated:
            gate, value = h.chunk(2, dim=-1)
            h = nn.functional.silu(gate) * value
        else:
            h = nn.functional.relu(h) if self.activation == "relu" else nn.functional.gelu(h)
        return project(self.dropout(h, seed, positions) if self.dropout.p else h, self.out)

    def _keeps_less(self, x: Tensor) -> bool:
        drops = self.dropout.p > 0 and self.training
        return not self.gated and not drops and replaces(x, self.inner, self.out)


class Residual(nn.Module):
    """One residual connection: `read` gives the input of the branch, `write` adds its output.

    `enter` and `between` do the same, on a GPU in one pass over the stream.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm = make_norm(config)
        self.post = config.norm_position == "post"
        self.dropout = Dropout(config.dropout)

    def read(self, stream: Stream) -> Tensor:
        # a reversible stream is at least float32, even if the model computes in fewer bits
        x = stream[-1].to(self.norm.weight.dtype) if paired(stream) else stream[0]
        return x if self.post else self.norm(x)

    def write(self, stream: Stream, y: Tensor) -> Stream:
        if self.post and not paired(stream) and fuses(y, self.norm):
            return (self._add_norm(stream[0], *self._to_drop(y))[0],)
        y = self._dropped(y)
        if paired(stream):
            return stream[1], stream[0] + y
        x = stream[0] + y
        return (self.norm(x) if self.post else x,)

    def enter(self, stream: Stream, products: bool = False) -> tuple[Stream, Tensor]:
        """The stream, to be used in place of the one given, and what `read` gives; their gradients are added at once.

        `products`: only products with weights read it, so that under autocast it may be of their type.
        """
        if isinstance(stream, Twice) and products:
            return (stream.x,), stream.short
        if self.post or paired(stream) or not fuses(stream[0], self.norm):
            stream = settled(stream)
            return stream, self.read(stream)
        added, drop = stream[1:] if isinstance(stream, Waiting) else (None, None)
        x, h = self._add_norm(stream[0], added, drop, products)
        return (x,), h

    def between(self, stream: Stream, y: Tensor, following: "Residual", products: bool) -> tuple[Stream, Tensor]:
        """`write`, and then `enter` of the following residual."""
        norm = self if self.post else following
        if paired(stream) or not fuses(y, norm.norm):
            return following.enter(self.write(stream, y), products)
        x, h = norm._add_norm(stream[0], *self._to_drop(y), products)
        return (x,), h

    def leave(self, stream: Stream, y: Tensor) -> Stream:
        """`write`, with what the next `enter` may use, which may be of another block."""
        if paired(stream) or not fuses(y, self.norm):
            return self.write(stream, y)
        if not self.post:
            return Waiting(stream[0], *self._to_drop(y))
        x, short = self._add_norm(stream[0], *self._to_drop(y), autocasts(y.device))
        return (x,) if short is x else Twice(x, short)

    def _dropped(self, y: Tensor) -> Tensor:
        return self.dropout(y) if self.dropout.p else y  # without dropout a module's call is not free

    def _to_drop(self, y: Tensor) -> tuple[Tensor, Drop | None]:
        """What `add_norm` adds, and how it drops some of that; None if that was done."""
        drop = self.dropout.drop(y)
        return (self._dropped(y), None) if drop is None else (y, drop)

    def _add_norm(
        self, x: Tensor, y: Tensor | None, drop: Drop | None, products: bool = False
    ) -> tuple[Tensor, Tensor]:
        return add_and_norm(self.norm, x, y, drop, post=self.post, products=products)


class Tapped(NamedTuple):
    """The state of a block with taps."""

    mixer: Any
    recent: Recent


class Block(nn.Module):
    """Mixer, cross-attention if configured, and feed-forward; has `forward`, `prefill` and `step`, like a mixer."""

    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__()
        self.name = f"layer {layer} ({config.mixer_of(layer).name})"
        self.pool = config.pool_of(layer)
        self.mixer = make_mixer(config.mixer_of(layer), config, layer)
        self.taps = Taps(config.dim, config.taps, config.causal) if config.taps else None
        self.mixer_residual = Residual(config)
        cross = config.cross_of(layer)
        self.cross = None if cross is None else make_cross(cross, config, layer)
        self.cross_residual = None if cross is None else Residual(config)
        self.ff = FeedForward(config)
        self.ff_residual = Residual(config)

    def forward(
        self,
        stream: Stream,
        lengths: Tensor | None,
        memory: Tensor | None,
        memory_lengths: Tensor | None,
        turns: Turns | None = None,
    ) -> Stream:
        """The stream after this block, perhaps not `settled`; with pool > 1 it is shorter, `shorten(lengths, pool)`.

        `turns` of the positions, as the mixer takes them; the stack makes them once for all blocks.
        """
        if self.pool > 1:
            stream, y = self._mix_pooled(settled(stream), lengths, turns)
            lengths = shorten(lengths, self.pool)
        else:
            stream, h = self.mixer_residual.enter(stream, self.mixer.reads_products and self.taps is None)
            y = self._mix(h, lengths, turns)
        return self._rest(stream, y, lengths, memory, memory_lengths, self.ff_residual.leave)

    def init_state(self, batch: int, capacity: int | None) -> Any:
        state = self.mixer.init_state(batch, capacity)
        return state if self.taps is None else Tapped(state, self.taps.init_state(batch))

    def remember(self, memory: Tensor, memory_lengths: Tensor | None) -> Any:
        """Keys and values of a memory, computed once; `prefill` and `step` take them in place of the memory."""
        assert self.cross is not None
        return self.cross.remember(memory, memory_lengths)

    def prefill(
        self,
        stream: Stream,
        lengths: Tensor | None,
        state: Any,
        memory: Any,
        memory_lengths: Tensor | None,
        turns: Turns | None = None,
    ) -> tuple[Stream, Any]:
        stream, h = self.mixer_residual.enter(stream, self.mixer.reads_products and self.taps is None)
        mixed, recent = self._parts(state, h)
        if self.taps is not None:
            h, recent = self.taps.prefill(h, lengths, recent)
        y, mixed = self.mixer.prefill(h, lengths, mixed, turns)
        state = mixed if recent is None else Tapped(mixed, recent)
        return self._rest(stream, y, lengths, memory, memory_lengths, self.ff_residual.leave), state

    def step(
        self,
        stream: Stream,
        state: Any,
        memory: Any,
        memory_lengths: Tensor | None,
        inplace: bool = False,
        turns: Turns | None = None,
        late: list[Tensor] | None = None,
    ) -> tuple[Stream, Any]:
        """The stream of one token, [B, D].

        `late`: with it, and in place, positions may be left to the caller to move, who finds them there afterwards.
        """
        if inplace and late is not None and self.cross is None and not paired(stream):
            if fused_step.many(stream[0], self.ff):
                mixing = fused_step.mix_many(self, stream, state, turns, late)
                if mixing is not None:
                    stream, y, state = mixing
                    return self._fed(stream, y, self.mixer_residual, self.ff_residual.leave), state
            else:
                stream = settled(stream)  # another kind of block may have left it with a branch yet to be added
                fused = fused_step.mix(self, stream[0], state, turns, late)
                if fused is not None:
                    x, state, fed = fused
                    return ((x,) if fed else self._feed((x,))), state
        stream = settled(stream)
        h = self.mixer_residual.read(stream)
        mixed, recent = self._parts(state, h)
        if self.taps is not None and recent is not None:
            h, recent = self.taps.step(h, recent, inplace)
        y, mixed = self.mixer.step(h, mixed, inplace, turns)
        state = mixed if recent is None else Tapped(mixed, recent)
        before = self.mixer_residual
        if self.cross is not None and self.cross_residual is not None:
            stream, query = before.between(stream, y, self.cross_residual, products=False)
            y = self.cross(query[:, None], context=memory, context_lengths=memory_lengths)[:, 0]
            before = self.cross_residual
        return self._feed(before.write(stream, y)), state

    def _feed(self, stream: Stream) -> Stream:
        """The feed-forward of one token on its residual; for many rows without gradients, in one fused kernel."""
        ff, residual = self.ff, self.ff_residual
        usual = paired(stream) or self.training or ff.gated or watched(ff) or watched(residual.norm)
        usual = usual or not (plain(ff.inner) and plain(ff.out))
        if usual or not pays(stream[0], ff.inner.weight):
            fed = None if paired(stream) else fused_step.feed(stream[0], ff, residual)
            if fed is not None:
                return (fed,)
            stream, h = residual.enter(stream, products=True)
            return residual.write(stream, ff(h))
        (x,) = stream
        weight, bias, eps, norm = parts_of(residual.norm, x.dtype)
        y = feed_forward(
            x, ff.inner.weight, ff.inner.bias, ff.out.weight, ff.out.bias, weight, bias, eps=eps,
            activation="relu" if ff.activation == "relu" else "gelu", norm=norm, pre=not residual.post,
        )  # fmt: skip
        return (y,)

    def _fed(self, stream: Stream, y: Tensor, before: Residual, write: Write) -> Stream:
        stream, h = before.between(stream, y, self.ff_residual, products=True)
        return write(stream, self.ff(h))

    def branches(
        self, lengths: Tensor | None, memory_lengths: Tensor | None, turns: Turns | None = None
    ) -> Iterator[tuple[Residual, nn.Module, Branch]]:
        """The branches of `forward` in order: (its residual, its module, the function of what it reads)."""
        mixing = self.mixer if self.taps is None else nn.ModuleList([self.taps, self.mixer])
        yield self.mixer_residual, mixing, lambda h, _: self._mix(h, lengths, turns)
        cross = self.cross
        if cross is not None and self.cross_residual is not None:
            yield self.cross_residual, cross, lambda h, memory: cross(h, lengths, memory, memory_lengths)
        yield self.ff_residual, self.ff, lambda h, _: self.ff(h)

    def _parts(self, state: Any, h: Tensor) -> tuple[Any, Recent | None]:
        """The states of the mixer and of the taps; ValueError if the state is of another kind or for other taps."""
        if self.taps is None or state is None:
            return state, None
        if not isinstance(state, Tapped):
            kind = type(state).__name__
            raise ValueError(f"state is a {kind}: accepted is that of a model with taps={self.taps.taps}")
        self.taps.check(state.recent, h.shape[0])
        return state

    def _mix(self, h: Tensor, lengths: Tensor | None, turns: Turns | None) -> Tensor:
        return self.mixer(self._tap(h, lengths), lengths, turns=turns)

    def _tap(self, h: Tensor, lengths: Tensor | None) -> Tensor:
        return h if self.taps is None else self.taps(h, lengths)

    def _rest(
        self,
        stream: Stream,
        y: Tensor,
        lengths: Tensor | None,
        memory: Any,
        memory_lengths: Tensor | None,
        write: Write,
    ) -> Stream:
        """The stream after the output y of the mixer."""
        before = self.mixer_residual
        if self.cross is not None and self.cross_residual is not None:
            stream, query = before.between(stream, y, self.cross_residual, products=False)
            y, before = self.cross(query, lengths, memory, memory_lengths), self.cross_residual
        return self._fed(stream, y, before, write)

    def _mix_pooled(self, stream: Stream, lengths: Tensor | None, turns: Turns | None) -> tuple[Stream, Tensor]:
        """Queries are means of `pool` neighbours (Dai et al. 2020, arXiv:2006.03236, §2.2).

        They attend to every position if the mixer has cross-attention. Otherwise the mixed sequence is averaged. It is
        also averaged if means cannot be queries: with rotary, since x and its means have different positions, and if
        the mixer treats queries jointly, such as nystrom, whose convolution pairs a query with a value.
        """
        pooled = (mean_pool(stream[0], lengths, self.pool),)
        context = self._tap(self.mixer_residual.read(stream), lengths)
        if not self.mixer.traits.cross or self.mixer.options.rotary or self.mixer.joint_queries:
            return pooled, mean_pool(self.mixer(context, lengths, turns=turns), lengths, self.pool)
        queries = self.mixer_residual.read(pooled)  # means, which taps do not reach
        return pooled, self.mixer(queries, shorten(lengths, self.pool), context, lengths)


def shorten(lengths: Tensor | None, pool: int) -> Tensor | None:
    """Lengths after pooling; an incomplete last group counts as one."""
    return lengths if lengths is None or pool == 1 else (lengths + pool - 1) // pool


def mean_pool(x: Tensor, lengths: Tensor | None, pool: int) -> Tensor:
    """[B, T, D] -> [B, ceil(T/pool), D]: means over groups of `pool` positions, without padding."""
    batch, size, _ = x.shape
    missing = -size % pool
    counts = x.new_full((batch,), size, dtype=torch.int64) if lengths is None else lengths  # [B]
    starts = torch.arange(0, size, pool, device=x.device)
    counts = (counts[:, None] - starts).clamp(1, pool)  # [B, T/pool]; 1 for groups without tokens, whose sum is 0
    x = nn.functional.pad(zero_padding(x, lengths), (0, 0, 0, missing)).unflatten(1, (-1, pool))
    return x.sum(2) / counts[..., None].to(x.dtype)


def parts_of(norm: nn.LayerNorm | nn.RMSNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, float, Norm]:
    """Weight, bias, eps and kind of a norm of vectors of this type."""
    if isinstance(norm, nn.LayerNorm):
        return norm.weight, norm.bias, norm.eps, "layer"
    return norm.weight, None, torch.finfo(dtype).eps if norm.eps is None else norm.eps, "rms"


def add_and_norm(
    norm: Any, x: Tensor, added: Tensor | None, drop: Drop | None, post: bool = False, products: bool = False
) -> tuple[Tensor, Tensor]:
    """`add_norm` with the weights of a module.

    `products`: only products with weights read the norm, so that under autocast it may be of their type.
    """
    out = torch.get_autocast_dtype(x.device.type) if products and autocasts(x.device) else None
    weight, bias, eps, kind = parts_of(norm, x.dtype)
    return add_norm(x, added, weight, bias, eps, norm=kind, post=post, out=out, drop=drop)


def make_norm(config: TransformerConfig) -> nn.LayerNorm | nn.RMSNorm:
    kind = LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(config.dim, eps=config.norm_eps)


def make_mixer(spec: MixerConfig, config: TransformerConfig, layer: int) -> Mixer:
    """The mixer of a layer. Options of the whole model are passed to the mechanisms that have them."""
    options = {"rotary": config.rotary, "causal": config.causal, **config.options}
    return _build(spec, config, layer, options, config.max_length)


def make_cross(spec: MixerConfig, config: TransformerConfig, layer: int) -> Mixer:
    """Attention from the decoder to a memory; never rotary, since their positions are not comparable."""
    sizes = [n for n in (config.max_length, config.memory_length) if n is not None]
    mixer = _build(spec, config, layer, {"causal": False}, max(sizes, default=None))
    if not mixer.traits.cross:
        raise ValueError(f"cross={spec.name!r} cannot work: {type(mixer).__name__} has no cross-attention")
    if mixer.joint_queries and config.causal:
        why = "the output of a query depends on the other queries, so a token would see later ones"
        raise ValueError(f"cross={spec.name!r} cannot work with causal=True: {why}")
    return mixer


def _build(
    spec: MixerConfig, config: TransformerConfig, layer: int, options: dict[str, Any], max_length: int | None
) -> Mixer:
    cls = mechanism(spec.name)
    sizes = {"dim": config.dim, "heads": config.heads, "max_length": max_length}
    options = {**sizes, "dropout": config.attention_dropout, "layer": layer, "seed": config.seed, **options}
    needed = {"dim", "heads", "causal", *config.options}
    options = {name: value for name, value in options.items() if name in needed or name not in cls.unused}
    try:
        return build(spec.name, **{**options, **spec.options})
    except (TypeError, ValueError) as error:
        error.add_note(f"in layer {layer} ({spec.name})")
        raise
