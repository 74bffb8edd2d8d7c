"""The laws can fail: each bug planted here is caught by the law named beside it.

A bug is a subclass of a mechanism, or a wrong line in a function of the package (tests/planting.py).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.mechanisms import MECHANISMS, linear_maps, nystrom, routing
from subquad.mechanisms.attention import Attention
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.bigbird import Bigbird
from subquad.mechanisms.clustered import Clustered
from subquad.mechanisms.compressed import Compressed
from subquad.mechanisms.deltanet import DeltaNet
from subquad.mechanisms.efficient import Efficient
from subquad.mechanisms.gated_deltanet import GatedDeltaNet
from subquad.mechanisms.gla import GLA
from subquad.mechanisms.linear import Linear, State
from subquad.mechanisms.mamba2 import Mamba2
from subquad.mechanisms.nystrom import Nystrom
from subquad.mechanisms.performer import Performer
from subquad.mechanisms.recurrent import Recurrent
from subquad.mechanisms.reformer import Reformer
from subquad.mechanisms.retnet import RetNet
from subquad.mechanisms.rfa import RFA
from subquad.mechanisms.routing import Routed, Routing
from subquad.mechanisms.sinkhorn import Sinkhorn
from subquad.mechanisms.softmax import Softmax
from subquad.mechanisms.transformer_xl import TransformerXL
from subquad.ops import feature_maps, relative, rotary
from subquad.ops.buckets import empty_lists, slot_attention
from subquad.ops.dense import counted_attention, dense_attention
from subquad.ops.linear import chunked
from subquad.ops.prefix import running_sum
from subquad.ops.short_conv import short_conv, short_conv_prefill, short_conv_step
from subquad.ops.sparse import SparseCache, cache, tiles
from tests.mechanisms import laws
from tests.mechanisms.draws import set_threshold
from tests.mechanisms.laws import DIM, HEADS, Case, tokens
from tests.planting import Slip, caught


class MaskOffByOne(Softmax):
    """The fast path sees one token of the future."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Any, key_lengths: Any) -> Tensor:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(1)
        return dense_attention(q, k, v, mask, scale=self.scale)


class LeakedScale(Linear):
    """Fast path and reference both divide by a maximum over all positions, the future included."""

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> Any:
        q, k, v = super()._project(x, context, position)
        return q, k, v / v.abs().amax(1, keepdim=True)


class GrowsWithLength(Softmax):
    """A choice that depends on T: earlier outputs change when the sequence grows."""

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> Any:
        q, k, v = super()._project(x, context, position)
        return q * (1 + x.shape[1] // 32), k, v


class PaddingForgotten(Softmax):
    """Padded keys are visible."""

    def _forward(self, x: Tensor, lengths: Any) -> Tensor:
        return super()._forward(x, None)


class ContextPaddingForgotten(Softmax):
    """Padded keys of a context are visible."""

    def _cross(self, x: Tensor, lengths: Any, context: Tensor, context_lengths: Any) -> Tensor:
        return super()._cross(x, lengths, context, None)


class StateOffByOne(Linear):
    """A step reads the state before its own key was added."""

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        _, new = super()._step(x, state, inplace)
        q = self._project(x[:, None], position=state.position)[0]
        n = torch.einsum("bhk,bhkv->bhv", self.map.apply(q[:, 0]), state.s)
        d = torch.einsum("bhk,bhk->bh", self.map.apply(q[:, 0]), state.z)
        return self.heads.merge(n / (d[..., None] + self.options.eps)), new


class PositionStuck(Softmax):
    """Positions do not advance over a ragged prompt: they count padding."""

    def _advance(self, position: Tensor, x: Tensor, lengths: Tensor | None) -> Tensor:
        return position + x.shape[1]


class StateEdited(Linear):
    """The step writes into the state it was given."""

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        y, new = super()._step(x, state, inplace)
        state.s.copy_(new.s)
        return y, new


class GradientLost(Linear):
    """Values are detached in the fast path and in the reference alike."""

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> Any:
        q, k, v = super()._project(x, context, position)
        return q, k, v.detach()


class GradientLostInFastPath(Linear):
    def _forward(self, x: Tensor, lengths: Any) -> Tensor:
        return super()._forward(x.detach(), lengths)


class RowsMixed(Linear):
    """Centred over the batch."""

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> Any:
        return super()._project(x - x.mean(0, keepdim=True), context, position)


class NoisyEvaluation(Linear):
    def _forward(self, x: Tensor, lengths: Any) -> Tensor:
        return super()._forward(x + 1e-3 * torch.randn_like(x), lengths)


class UnsavedDraw(Linear):
    """A random matrix that is no buffer: lost when the module is saved."""

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> Any:
        matrix = torch.randn(DIM, DIM, generator=self._generator()).to(x)
        return super()._project(x @ matrix, context, position)


class EmptyRowsPoison(Softmax):
    """A softmax over no keys for rows of length 0."""

    def _forward(self, x: Tensor, lengths: Any) -> Tensor:
        q, k, v = self._project(x)
        scores = torch.einsum("bthk,bshk->bhts", q, k) * self.scale
        if lengths is not None:
            hidden = torch.arange(x.shape[1]) >= lengths[:, None]
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        return self._merge(torch.einsum("bhts,bshv->bthv", scores.softmax(-1), v))


class Square(Linear):
    """The fast path is the reference."""

    def _forward(self, x: Tensor, lengths: Any) -> Tensor:
        return self.reference(x, lengths)


class OrderMatters(Linear):
    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> Any:
        ramp = torch.linspace(0, 1, x.shape[1]).to(x)[:, None]
        return super()._project(x + ramp, context, position)


class Overflow(Softmax):
    """Exponentials of the scores themselves, in place of their distance to the largest."""

    def _forward(self, x: Tensor, lengths: Any) -> Tensor:
        q, k, v = self._project(x)
        weights = (torch.einsum("bthk,bshk->bhts", q, k) * self.scale).exp()
        if lengths is not None:
            weights = weights * (torch.arange(x.shape[1]) < lengths.clamp(min=1)[:, None])[:, None, None]
        return self._merge(torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v))


class SquareDropout(Softmax):
    """All weights are computed at once if there is dropout."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Any, key_lengths: Any) -> Tensor:
        if not self.training:
            return super()._attend(q, k, v, lengths, key_lengths)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        dropout, causal = self.options.dropout, self.options.causal
        return F.scaled_dot_product_attention(q, k, v, None, dropout, causal).transpose(1, 2)


class WrongUnderAutocast(Linear):
    """A step drops its result to a few bits where autocast is on."""

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        y, new = super()._step(x, state, inplace)
        return (y * 4).round() / 4 if torch.is_autocast_enabled("cpu") else y, new


class OtherWaves(TransformerXL):
    """Sinusoids of other rates than the paper's."""

    def _relative(self, like: Tensor) -> Tensor:
        distances = self.options.memory - torch.arange(self.options.memory + self.after + 1)
        rates = 1000 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        angle = distances[:, None] * rates
        waves = torch.cat((angle.sin(), angle.cos()), dim=-1).to(like.dtype)
        return self.relative(waves).unflatten(-1, (HEADS, -1))


class BlocksOfPadding(Sinkhorn):
    """Blocks beyond a row's end take part in the sorting."""

    def _sort(self, q: Tensor, k: Tensor, n: Tensor) -> Tensor:
        return super()._sort(q, k, torch.full_like(n, q.shape[1]))


class SortedByTheNextQuery(Sinkhorn):
    """A block chooses by a query after its first one."""

    def _sort(self, q: Tensor, k: Tensor, n: Tensor) -> Tensor:
        return super()._sort(q.roll(-1, dims=1), k, n)


class LaterOfEqual(Routing):
    """Of equally near tokens the later is chosen."""

    def _balanced(self, routed: Routed, lengths: Tensor | None) -> Tensor:
        later = 1e-6 * torch.arange(routed.q.shape[1])
        return super()._balanced(routed._replace(near=tuple(near + later for near in routed.near)), lengths)


class ClusterForgets(Routing):
    """A step does not add its token to the list of its cluster."""

    def _step(self, x: Tensor, state: Any) -> Any:
        y, new = super()._step(x, state)
        return y, new._replace(members=state.members, total=state.total)


class UnfinishedSlotForgotten(Compressed):
    """The next prompt loses the unfinished slot of the prompt before."""

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: Any) -> Any:
        if state is not None:
            state = state._replace(last_k=torch.zeros_like(state.last_k))
        return super()._prefill(x, lengths, state)


class LandmarksOfTheBatch(Nystrom):
    """Segments depend on the longest row instead of the row's own length."""

    def _landmarks(self, t: Tensor, lengths: Tensor | None) -> Tensor:
        return super()._landmarks(t, None)


class BlocksOfTheSeed(Bigbird):
    """Random blocks follow the option, not the draw that was loaded."""

    def _patterns(self, seed: int | None = None) -> Any:
        return super()._patterns(None)


class UnitForgotten(Performer):
    """Sums in units of the old largest exponent are not rescaled to the new one."""

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, largest: Tensor | None) -> Any:
        features = super()._prepare(q, k, v, lengths, largest)
        return features._replace(gate=None if features.gate is None else torch.zeros_like(features.gate))


class CentredHash(Reformer):
    """Buckets of queries less their mean over all positions, the future included."""

    def _hash(self, q: Tensor) -> Tensor:
        return super()._hash(q - q.mean(1, keepdim=True))


CAUGHT: list[tuple[type[Mixer], bool, Callable[[Case], None]]] = [
    (MaskOffByOne, True, laws.forward_equals_reference),
    (MaskOffByOne, True, laws.strictly_causal),
    (LeakedScale, True, laws.strictly_causal),
    (GrowsWithLength, True, laws.strictly_causal),
    (PaddingForgotten, False, lambda case: laws.padding_is_invisible(case, [41, 20, 3])),
    (ContextPaddingForgotten, False, laws.cross_equals_reference),
    (StateOffByOne, True, lambda case: laws.recurrence_equals_forward(case, [1, 1], [5, 3])),
    (StateOffByOne, True, laws.state_is_a_value),
    (StateOffByOne, True, laws.one_token_works),
    (PositionStuck, True, lambda case: laws.recurrence_equals_forward(case, [1, 1], [5, 3])),
    (StateEdited, True, lambda case: laws.recurrence_equals_forward(case, [1, 1], [5, 3])),
    (GradientLost, True, laws.gradient_is_the_slope),
    (GradientLostInFastPath, True, laws.forward_equals_reference),
    (RowsMixed, False, laws.rows_are_independent),
    (NoisyEvaluation, False, laws.evaluation_is_deterministic),
    (UnsavedDraw, False, laws.evaluation_is_deterministic),
    (EmptyRowsPoison, False, laws.empty_rows_have_finite_gradients),
    (Square, False, laws.nothing_is_square),
    (Square, True, laws.cost_grows_as_documented),
    (OrderMatters, False, laws.permutation_equivariant),
    (UnsavedDraw, True, laws.state_goes_into_a_rebuilt_module),
    (Overflow, False, laws.large_tokens_equal_reference),
    (SquareDropout, False, laws.nothing_is_square),
    (WrongUnderAutocast, True, laws.autocast_is_half_precision),
    (OtherWaves, True, laws.forward_equals_reference),
    (BlocksOfPadding, False, lambda case: laws.padding_is_invisible(case, [41, 20, 3])),
    (SortedByTheNextQuery, True, laws.strictly_causal),
    (LaterOfEqual, False, laws.ties_are_broken_alike),
    (ClusterForgets, True, lambda case: laws.recurrence_equals_forward(case, [1, 1, 1, 1, 1, 1], [5, 3])),
    (UnfinishedSlotForgotten, True, lambda case: laws.recurrence_equals_forward(case, [4, 4, 4], [5, 4])),
    (LandmarksOfTheBatch, False, lambda case: laws.padding_is_invisible(case, [41, 20, 3])),
    (BlocksOfTheSeed, False, laws.evaluation_is_deterministic),
    (UnitForgotten, True, laws.forward_equals_reference),
    (CentredHash, True, laws.strictly_causal),
]


@pytest.mark.parametrize(
    ("cls", "causal", "law"), CAUGHT, ids=[f"{c.__name__}-{n}" for n, (c, _, _) in enumerate(CAUGHT)]
)
def test_planted_bug_is_caught(cls: type[Mixer], causal: bool, law: Callable[[Case], None]) -> None:
    options = {"dim": DIM, "heads": HEADS, "causal": causal, **cls.small[0]}
    law(Case(cls.__mro__[1], options))  # the law holds without the bug
    with pytest.raises(AssertionError):
        law(Case(cls, options))


def few(name: str, causal: bool, **options: Any) -> Case:
    return Case(MECHANISMS[name], {"dim": 24, "heads": 2, "causal": causal, **options})


def in_pieces(case: Case) -> None:
    laws.recurrence_equals_forward(case, [9, 9, 1, 1], [5, 3, 1])


def lowered(threshold: str, value: int, law: Callable[[Case], None]) -> Callable[[Case], None]:
    """A law where a size threshold is passed by short sequences."""

    def check(case: Case) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            set_threshold(monkeypatch, threshold, value)
            law(case)

    return check


def limit(name: str) -> Case:
    return laws.limit(MECHANISMS[name], False)


def far(name: str) -> Case:
    return laws.far(MECHANISMS[name])


def long_at_a_border(case: Case) -> None:
    x = tokens(1, 574, case.dim)
    with torch.no_grad():
        laws.close(case.build()(x), case.build().reference(x))


def same_as_grouped_heads(case: Case) -> None:
    """Heads 0 and 1 read one group, 2 and 3 the other: the scores of two heads differ by their decay alone."""
    mix: Any = case.build()
    with torch.no_grad():
        mix.rate.fill_(-1e4)  # no decay
        weights = mix.pattern(tokens(1, 9, case.dim))[0]
    laws.close(weights[0], weights[1])
    laws.close(weights[2], weights[3])


def one_wider_than_a_power_of_two(name: str) -> Case:
    return Case(MECHANISMS[name], {"dim": 24, "heads": 2, "causal": False, **MECHANISMS[name].small[0]})


NEXT_POWER = "(1 << (self.width - 1).bit_length())"
LINES: dict[str, tuple[tuple[Slip, ...], Case, Callable[[Case], None]]] = {
    # constants: right for heads whose width is a power of two, or wrong in the fast path and in the reference alike
    "softmax scale": (
        (Slip(Softmax.__init__, "1 / math.sqrt(self.width)", f"1 / math.sqrt({NEXT_POWER})"),),
        one_wider_than_a_power_of_two("softmax"),
        laws.forward_equals_reference,
    ),
    "softmax scale, reference too": (
        (
            Slip(Softmax.__init__, "1 / math.sqrt(self.width)", f"1 / math.sqrt({NEXT_POWER})"),
            Slip(Softmax._weights, "q.shape[-1] ** -0.5", "(1 << (q.shape[-1] - 1).bit_length()) ** -0.5"),
        ),
        limit("softmax"),
        laws.limit_is_torch_attention,
    ),
    "clustered scale": (
        (Slip(Clustered.__init__, "self.width**-0.5", "16**-0.5"),),
        one_wider_than_a_power_of_two("clustered"),
        laws.forward_equals_reference,
    ),
    "performer scale, reference too": (
        (
            Slip(Performer._scaled, "self.width**-0.25", "16**-0.25"),
            Slip(Performer._weights, "math.sqrt(math.sqrt(t.shape[-1]))", "16**0.25"),
        ),
        limit("performer"),
        laws.limit_is_torch_attention,
    ),
    "performer scale of keys": (
        (Slip(Performer._exponentials, "self.width**-0.25", "16**-0.25"),),
        one_wider_than_a_power_of_two("performer"),
        laws.forward_equals_reference,
    ),
    "rotary base": (
        (Slip(rotary._turns, "base=base", "base=base / 10"),),
        far("softmax"),
        laws.far_positions_follow_the_definition,
    ),
    "rfa temperature, reference too": (
        (
            Slip(RFA._frequencies, " / self.options.tau", " / self.options.tau**0.5"),
            Slip(RFA._weights, " / self.options.tau", " / self.options.tau**0.5"),
        ),
        limit("rfa"),
        laws.limit_is_torch_attention,
    ),
    "layer norm of routing": (
        (Slip(routing._norm, "eps=eps", "eps=max(eps, 1e-3)"),),
        limit("routing"),
        laws.limit_is_torch_attention,
    ),
    "elu + 1": (
        (
            Slip(feature_maps._elu1, "F.elu(x) + 1", "F.elu(x) + 1.001"),
            Slip(feature_maps._elu1_, ".add_(x.clamp_(min=0))", ".add_(x.clamp_(min=0)).add_(0.001)"),
        ),
        limit("linear"),
        laws.limit_is_torch_attention,
    ),
    "cosformer counts from 0 behind a state": (
        (Slip(linear_maps.Cosformer.queries, "position[:, None] + at", "at"),),
        few("linear", True, feature_map="cosformer", length=60),
        in_pieces,
    ),
    "cosformer counts the keys of a batch from its first row": (
        (Slip(linear_maps.Cosformer.queries, "position[:, None] + at", "position[:1, None] + at"),),
        few("linear", True, feature_map="cosformer", length=60),
        in_pieces,
    ),
    "hedgehog with one matrix": (
        (Slip(linear_maps.Hedgehog.keys, "self.key", "self.query"),),
        few("linear", True, feature_map="hedgehog"),
        laws.forward_equals_reference,
    ),
    "taylor counts a square as a pair": (
        (Slip(feature_maps._taylor, " * math.sqrt(0.5)", ""),),
        few("linear", True, feature_map="taylor", features=3),
        laws.forward_equals_reference,
    ),
    "denominator without a floor": (
        (Slip(RFA._how, "self.options.eps /", "1e-9 *"),),
        Case(RFA, {"dim": 32, "heads": 2, "causal": True, "tau": 0.3}, 200),
        laws.gradients_are_sane,
    ),
    # gated and delta rules
    "decays of retnet": (
        (Slip(RetNet._tokens, "-5 - head", "-6 - head"),),
        few("retnet", True),
        laws.forward_equals_reference,
    ),
    "rotation of retnet starts again behind a state": (
        (Slip(RetNet._tokens, "at if position is None else position[:, None] + at", "at"),),
        few("retnet", True, rotary=True),
        in_pieces,
    ),
    "root of the decays of gla": (
        (Slip(GLA._tokens, " / self.options.temperature", ""),),
        few("gla", True),
        laws.forward_equals_reference,
    ),
    "values of mamba2 without their step": (
        (Slip(Mamba2._tokens, "(x * step[..., None])", "x"),),
        few("mamba2", True, state=5),
        laws.forward_equals_reference,
    ),
    "groups of mamba2 taken in turn": (
        (Slip(Mamba2._xbc_of, ".repeat_interleave(heads // groups, dim=2)", ".repeat(1, 1, heads // groups, 1)"),),
        Case(Mamba2, {"dim": 24, "heads": 4, "causal": True, "groups": 2, "state": 5}),
        same_as_grouped_heads,
    ),
    "keys of deltanet without their norm": (
        (Slip(DeltaNet._tokens, "unit(k)", "k"),),
        few("deltanet", True),
        laws.forward_equals_reference,
    ),
    "sign of a decay": (
        (Slip(GatedDeltaNet._define, "torch.exp(-torch.exp", "torch.exp(torch.exp"),),
        few("gated_deltanet", True),
        laws.forward_equals_reference,
    ),
    "a state that counts padding": (
        (Slip(Recurrent._prefill, "lengths=lengths, log_gate", "log_gate"),),
        few("gated_deltanet", True),
        in_pieces,
    ),
    "a state that is forgotten": (
        (Slip(Recurrent._prefill, "_without_divisor(state.s)", "_without_divisor(0 * state.s)"),),
        few("gla", True),
        in_pieces,
    ),
    "inputs of a convolution from the padding": (
        (Slip(short_conv_prefill, "last = seen", "size = torch.full_like(size, x.shape[1])\n        last = seen"),),
        few("mamba2", True, state=5),
        in_pieces,
    ),
    "a ring that is read one place too early": (
        (Slip(short_conv_step, "(position[:, None] - back)", "(position[:, None] - back - 1)"),),
        few("deltanet", True),
        in_pieces,
    ),
    "a convolution that looks ahead": (
        (Slip(short_conv, "lengths), before, after)", "lengths), before - 1, after + 1)"),),
        few("deltanet", True),
        laws.strictly_causal,
    ),
    # thresholds
    "later pieces of a continued prompt, gathered": (
        (Slip(SparseCache._gathered, "torch.arange(start, start + qs.shape[1]", "torch.arange(qs.shape[1]"),),
        few("strided", True, stride=5),
        lowered("ops.sparse.cache.GATHERED", 1, in_pieces),
    ),
    "later pieces of a continued prompt": (
        (Slip(counted_attention, "counts[:, n : n + ROWS]", "counts[:, : q.shape[1] - n][:, :ROWS]"),),
        few("softmax", True),
        lowered("ops.dense.ROWS", 4, in_pieces),
    ),
    "later rows of attention with dropout": (
        (Slip(dense_attention, "torch.arange(start, start + part.shape[2]", "torch.arange(part.shape[2]"),),
        laws.dropping(Softmax, True),
        lowered("ops.dense.PAIRS", 300, laws.dropout_has_its_rate),
    ),
    "sums of earlier blocks": (
        (Slip(running_sum, "running_sum(blocks[:, :-1].sum(2), start)", "running_sum(blocks[:, 1:].sum(2), start)"),),
        few("efficient", True),
        lowered("ops.prefix.SUM_BLOCK", 7, laws.forward_equals_reference),
    ),
    # borders
    "one tile too far": (
        (Slip(tiles._interior, "- first) // m\n    return", "- first + m - 1) // m\n    return"),),
        Case(MECHANISMS["local"], {"dim": 4, "heads": 1, "causal": False, "window": 63}),
        long_at_a_border,
    ),
    "the last key of a dilated tile": (
        (Slip(tiles._lattice, "a + m + atom.window, key_points", "a + m + atom.window - 1, key_points"),),
        few("longformer", False, window=3, dilation=2),
        lowered("ops.sparse.tiles.TILE", 4, laws.forward_equals_reference),
    ),
    "a short last block": (
        (Slip(Sinkhorn._sort, ".clamp(1, block)", ".clamp(block, block)"),),
        few("sinkhorn", False, block=6),
        laws.forward_equals_reference,
    ),
    "the ring is too short": (
        (Slip(cache._newest, "(before + 1) * l", "(before + 1) * l - 2"),),
        few("fixed", True, block=6, summary=2),
        in_pieces,
    ),
    # rates
    "half of the dropout": (
        (Slip(dense_attention, "dropout_p=dropout, is_causal", "dropout_p=dropout / 2, is_causal"),),
        laws.dropping(Softmax, False),
        laws.dropout_has_its_rate,
    ),
    "dropout that is not rescaled": (
        (
            Slip(
                relative._blocks,
                "F.dropout(weights, dropout)",
                "weights * (torch.rand_like(weights) >= dropout)",
            ),
        ),
        laws.dropping(TransformerXL, True),
        laws.dropout_has_its_rate,
    ),
    "half of the dropout behind a state": (
        (Slip(slot_attention, ".exp(), dropout)", ".exp(), dropout / 2)"),),
        laws.dropping(Reformer, True),
        laws.dropout_has_its_rate,
    ),
    "one factor of two dropped": (
        (Slip(nystrom._read, "dropout_p=dropout", "dropout_p=0.0"),),
        laws.dropping(Nystrom, False, landmarks=1),
        laws.dropout_has_its_rate,
    ),
    # long positions
    "rotary wraps at 65,536": (
        (Slip(rotary._turns, "positions[..., None, None]", "(positions % 65536)[..., None, None]"),),
        far("softmax"),
        laws.far_positions_follow_the_definition,
    ),
    "positions in float32": (
        (Slip(Attention._turns_at, "position[:, None] + at", "position[:, None].float() + at"),),
        far("linear"),
        laws.far_positions_follow_the_definition,
    ),
    "the ring wraps at 65,536": (
        (Slip(SparseCache._held, "last = seen - 1", "last = (seen - 1) % 65536"),),
        far("local"),
        laws.far_positions_follow_the_definition,
    ),
    "counts that wrap at 65,536": (
        (Slip(Efficient._step, "(state.position + 1)", "(state.position % 65536 + 1)"),),
        far("efficient"),
        laws.far_positions_follow_the_definition,
    ),
    "members of buckets in 16 bits": (
        (Slip(empty_lists, "torch.int32", "torch.int16"),),
        far("reformer"),
        laws.far_positions_follow_the_definition,
    ),
    # types of sums
    "a step rounds its sums": (
        (Slip(chunked.step, "s = torch.addcmul(s, k[..., None], x[..., None, :])",
              "s = torch.addcmul(s, k[..., None], x[..., None, :]).to(v_t.dtype).to(s.dtype)"),),
        few("performer", True, features=12),
        laws.long_sums_keep_their_digits,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_wrong_line_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slips, case, law = LINES[name]
    caught(monkeypatch, slips, lambda: law(case))
