"""The laws can fail: each bug planted here is caught by the law named beside it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.mechanisms.base import Mixer
from subquad.mechanisms.bigbird import Bigbird
from subquad.mechanisms.compressed import Compressed
from subquad.mechanisms.linear import Linear, State
from subquad.mechanisms.nystrom import Nystrom
from subquad.mechanisms.performer import Performer
from subquad.mechanisms.reformer import Reformer
from subquad.mechanisms.routing import Routed, Routing
from subquad.mechanisms.sinkhorn import Sinkhorn
from subquad.mechanisms.softmax import Softmax
from subquad.mechanisms.transformer_xl import TransformerXL
from tests.mechanisms import laws
from tests.mechanisms.laws import DIM, HEADS, Case


class MaskOffByOne(Softmax):
    """The fast path sees one token of the future."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        if causal:
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(1)
        return super()._attend(q, k, v, mask)


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
    """Padded keys are visible, in the fast path and in the reference."""

    def _forward(self, x: Tensor, lengths: Any, context: Any, context_lengths: Any) -> Tensor:
        return super()._forward(x, None, context, context_lengths)

    def _reference(self, x: Tensor, lengths: Any, context: Any, context_lengths: Any) -> Tensor:
        return super()._reference(x, None, context, context_lengths)


class ContextPaddingForgotten(Softmax):
    """Padded keys of a context are visible."""

    def _forward(self, x: Tensor, lengths: Any, context: Any, context_lengths: Any) -> Tensor:
        return super()._forward(x, lengths, context, None)


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
    def _forward(self, x: Tensor, lengths: Any, context: Any, context_lengths: Any) -> Tensor:
        return super()._forward(x.detach(), lengths, context, context_lengths)


class RowsMixed(Linear):
    """Centred over the batch."""

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> Any:
        return super()._project(x - x.mean(0, keepdim=True), context, position)


class NoisyEvaluation(Linear):
    def _forward(self, x: Tensor, lengths: Any, context: Any, context_lengths: Any) -> Tensor:
        return super()._forward(x + 1e-3 * torch.randn_like(x), lengths, context, context_lengths)


class UnsavedDraw(Linear):
    """A random matrix that is no buffer: lost when the module is saved."""

    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> Any:
        matrix = torch.randn(DIM, DIM, generator=self._generator()).to(x)
        return super()._project(x @ matrix, context, position)


class EmptyRowsPoison(Softmax):
    """A softmax over nothing for rows of length 0."""

    def _forward(self, x: Tensor, lengths: Any, context: Any, context_lengths: Any) -> Tensor:
        q, k, v = self._project(x, context)
        scores = torch.einsum("bthk,bshk->bhts", q, k) * self.scale
        if lengths is not None:
            hidden = torch.arange(x.shape[1]) >= lengths[:, None]
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        return self._merge(torch.einsum("bhts,bshv->bthv", scores.softmax(-1), v))


class Square(Linear):
    """The fast path is the reference."""

    def _forward(self, x: Tensor, lengths: Any, context: Any, context_lengths: Any) -> Tensor:
        return self._reference(x, lengths, context, context_lengths)


class OrderMatters(Linear):
    def _project(self, x: Tensor, context: Tensor | None = None, position: Tensor | None = None) -> Any:
        ramp = torch.linspace(0, 1, x.shape[1]).to(x)[:, None]
        return super()._project(x + ramp, context, position)


class Overflow(Softmax):
    """Exponentials of the scores themselves, in place of their distance to the largest."""

    def _forward(self, x: Tensor, lengths: Any, context: Any, context_lengths: Any) -> Tensor:
        q, k, v = self._project(x, context)
        weights = (torch.einsum("bthk,bshk->bhts", q, k) * self.scale).exp()
        if lengths is not None:
            weights = weights * (torch.arange(x.shape[1]) < lengths.clamp(min=1)[:, None])[:, None, None]
        return self._merge(torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v))


class SquareDropout(Softmax):
    """All weights at once where some are dropped."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        if not self.training:
            return super()._attend(q, k, v, mask, causal)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, self.options.dropout, causal).transpose(1, 2)


class WrongUnderAutocast(Linear):
    """A step drops its result to a few bits where autocast is on."""

    def _step(self, x: Tensor, state: State, inplace: bool = False) -> tuple[Tensor, State]:
        y, new = super()._step(x, state, inplace)
        return (y * 4).round() / 4 if torch.is_autocast_enabled("cpu") else y, new


class OtherWaves(TransformerXL):
    """Sinusoids of other rates than the paper's."""

    def _relative(self, like: Tensor) -> Tensor:
        distances = self.options.memory - torch.arange(self.options.memory + self._after() + 1)
        rates = 1000 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        angle = distances[:, None] * rates
        waves = torch.cat((angle.sin(), angle.cos()), dim=-1).to(like.dtype)
        return self.relative(waves).unflatten(-1, (HEADS, -1))


class BlocksOfPadding(Sinkhorn):
    """Blocks beyond a row's end take part in the sorting."""

    def _sort(self, q: Tensor, k: Tensor, n: Tensor) -> Tensor:
        return super()._sort(q, k, torch.full_like(n, q.shape[1]))


class SortedByTheNextQuery(Sinkhorn):
    """A block chooses by a query behind its first one."""

    def _sort(self, q: Tensor, k: Tensor, n: Tensor) -> Tensor:
        return super()._sort(q.roll(-1, dims=1), k, n)


class LaterOfEqual(Routing):
    """Of equally near tokens the later is chosen."""

    def _balanced(self, routed: Routed, lengths: Tensor | None) -> Tensor:
        later = 1e-6 * torch.arange(routed.q.shape[1])
        return super()._balanced(routed._replace(near=tuple(near + later for near in routed.near)), lengths)


class ClusterForgets(Routing):
    """A step does not enter its token into the list of its cluster."""

    def _step(self, x: Tensor, state: Any) -> Any:
        y, new = super()._step(x, state)
        return y, new._replace(members=state.members, total=state.total)


class UnfinishedSlotForgotten(Compressed):
    """What a prompt left of an unfinished slot is lost to the prompt behind it."""

    def _prefill(self, x: Tensor, lengths: Tensor | None, state: Any) -> Any:
        if state is not None:
            state = state._replace(last_k=torch.zeros_like(state.last_k))
        return super()._prefill(x, lengths, state)


class LandmarksOfTheBatch(Nystrom):
    """Segments follow the longest row, in place of the row's own length."""

    def _landmarks(self, t: Tensor, lengths: Tensor | None) -> Tensor:
        return super()._landmarks(t, None)


class BlocksOfTheSeed(Bigbird):
    """Random blocks follow the option, not the draw that was loaded."""

    def _patterns(self, seed: int | None = None) -> Any:
        return super()._patterns(None)


class UnitForgotten(Performer):
    """Sums in units of the old largest exponent are taken for sums in units of the new one."""

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, largest: Tensor | None) -> Any:
        q, k, v, gate, largest = super()._prepare(q, k, v, lengths, largest)
        return q, k, v, None if gate is None else torch.zeros_like(gate), largest


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
