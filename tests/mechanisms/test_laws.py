"""Every law over every mechanism, causal and not, at options where forty tokens already show the approximation."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import subquad
from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.base import Mixer, Options
from subquad.mechanisms.card import card
from tests.mechanisms import laws
from tests.mechanisms.draws import directions
from tests.mechanisms.laws import DIM, HEADS, Case, T, tokens

few = settings(max_examples=6, deadline=None, derandomize=True)


def over(found: Any) -> Callable[[Any], Any]:
    found = list(found)
    return pytest.mark.parametrize("case", [case for _, case in found], ids=[name for name, _ in found])


def strict(found: Any) -> list[tuple[str, Case]]:
    return [(name, case) for name, case in found if case.options.get("strict_causal", True)]


def defaults(**wanted: bool) -> list[tuple[str, Case]]:
    """One case for each mechanism and direction, for laws about the default options."""
    return [(name[:-2], case) for name, case in laws.cases(**wanted) if name.endswith("-0")]


@over(laws.cases())
def test_1_forward_equals_reference(case: Case) -> None:
    laws.forward_equals_reference(case)


@over(laws.cases())
def test_1_large_tokens_equal_reference(case: Case) -> None:
    laws.large_tokens_equal_reference(case)


@over(laws.cases())
def test_1_and_4_ties_are_broken_alike(case: Case) -> None:
    laws.ties_are_broken_alike(case)


@over(laws.cases())
def test_1_gradient_is_the_slope(case: Case) -> None:
    laws.gradient_is_the_slope(case)


@over(defaults())
def test_1_second_derivative_is_right_or_refused(case: Case) -> None:
    laws.second_derivative_is_right_or_refused(case)


@over(laws.cases())
def test_1_torch_func_agrees(case: Case) -> None:
    laws.torch_func_agrees(case)


@over(laws.cases(cross=True))
def test_1_cross_attention_equals_reference(case: Case) -> None:
    laws.cross_equals_reference(case)


@over(strict(laws.cases(causal=True)))
def test_2_strictly_causal(case: Case) -> None:
    laws.strictly_causal(case)


@over(strict(laws.cases(causal=True, state=True)))
@given(
    splits=st.lists(st.sampled_from([1, 1, 1, 2, 3, 5, 9, 14]), min_size=4, max_size=12),
    first=st.lists(st.integers(1, 25), min_size=3, max_size=3),
)
@few
def test_3_recurrence_equals_forward(case: Case, splits: list[int], first: list[int]) -> None:
    laws.recurrence_equals_forward(case, splits, first)


@over(strict(laws.cases(causal=True, state=True)))
def test_3_state_is_a_value(case: Case) -> None:
    laws.state_is_a_value(case)


@over(strict(laws.cases(causal=True, state=True)))
def test_3_state_goes_into_a_rebuilt_module(case: Case) -> None:
    laws.state_goes_into_a_rebuilt_module(case)


@over(laws.cases())
@given(lengths=st.lists(st.integers(0, T), min_size=4, max_size=4))
@few
def test_4_padding_is_invisible(case: Case, lengths: list[int]) -> None:
    laws.padding_is_invisible(case, lengths)


@over(laws.cases())
def test_4_empty_rows_have_finite_gradients(case: Case) -> None:
    laws.empty_rows_have_finite_gradients(case)


@over(laws.cases())
def test_4_rows_are_independent(case: Case) -> None:
    laws.rows_are_independent(case)


@over(laws.cases())
def test_5_evaluation_is_deterministic(case: Case) -> None:
    laws.evaluation_is_deterministic(case)


@over((f"{name}-{causal}", laws.limit(MECHANISMS[name], causal)) for name in laws.LIMITS for causal in directions(name))
def test_6_limit_is_torch_attention(case: Case) -> None:
    laws.limit_is_torch_attention(case)


@over((name, laws.far(MECHANISMS[name])) for name in laws.FAR)
def test_3_far_positions_follow_the_definition(case: Case) -> None:
    laws.far_positions_follow_the_definition(case)


def test_3_every_state_with_positions_is_far() -> None:
    stateful = {name for name, cls in MECHANISMS.items() if cls.traits.state}
    assert stateful - set(laws.FAR) == {"additive"}  # it uses positions only as places in the cache


@over((name, case) for name, case in defaults(causal=True) if case.cls.traits.state == "constant")
def test_8_long_sums_keep_their_digits(case: Case) -> None:
    laws.long_sums_keep_their_digits(Case(case.cls, {**case.options, "dim": 16, "heads": 2}))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Additive attention makes T²·d elements in pieces. With smaller pieces, shorter sequences show how they grow."""
    monkeypatch.setattr("subquad.ops.additive.PAIRS", 1 << 16)


@pytest.mark.usefixtures("small_pieces")
@over((name, case) for name, case in defaults() if case.cls.memory < 2)
def test_7_nothing_is_square(case: Case) -> None:
    laws.nothing_is_square(case, 512 if case.cls is MECHANISMS["additive"] else 2048)


@pytest.mark.usefixtures("small_pieces")
@over(defaults())
def test_7_cost_grows_as_documented(case: Case) -> None:
    small = 256 if case.cls.exponent == 2 else 1024
    if case.cls is MECHANISMS["reformer"]:
        small = 2048  # below 1,300 tokens it computes all pairs, which is cheaper there
    laws.cost_grows_as_documented(case, small, 4 * small)


@over(laws.cases())
def test_8_one_token_works(case: Case) -> None:
    laws.one_token_works(case)


@over(laws.cases())
def test_8_large_half_precision_is_finite(case: Case) -> None:
    laws.large_half_precision_is_finite(case)


@over(laws.cases())
def test_8_autocast_is_half_precision(case: Case) -> None:
    laws.autocast_is_half_precision(case)


@over(laws.cases())
def test_8_half_precision_is_as_exact_as_the_definition(case: Case) -> None:
    laws.half_precision_is_as_exact_as_the_definition(case)


@over(laws.cases())
def test_8_inference_mode_works(case: Case) -> None:
    laws.inference_mode_works(case)


@over((name, case) for name, case in laws.cases(bidirectional=True) if case.build().equivariant)
def test_9_permutation_equivariant(case: Case) -> None:
    laws.permutation_equivariant(case)


@over(laws.cases())
def test_pattern_is_a_picture(case: Case) -> None:
    laws.pattern_is_a_picture(case)


@over(defaults())
def test_8_bad_input_raises_and_names_the_argument(case: Case) -> None:
    mix = case.build()
    x = tokens(2, 9, DIM)

    def raises(match: str, call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=match):
            call()

    raises(r"x .*\[2, 9\]", lambda: mix(x[..., 0]))
    raises("x .*24", lambda: mix(x[..., :24]))
    raises("x .*0", lambda: mix(x[:, :0]))
    raises("x .*float32", lambda: mix(x.float()))
    raises("x .*int64", lambda: mix(x.long()))
    raises("lengths .*10", lambda: mix(x, lengths=torch.tensor([9, 10])))
    raises("lengths .*-1", lambda: mix(x, lengths=torch.tensor([9, -1])))
    raises("lengths .*3", lambda: mix(x, lengths=torch.tensor([9, 9, 9])))
    raises("lengths .*float", lambda: mix(x, lengths=torch.tensor([9.0, 9.0])))
    raises("lengths", lambda: mix(x, lengths=[9, 9]))
    raises("context_lengths", lambda: mix(x, context_lengths=torch.tensor([9, 9])))
    if mix.traits.cross:
        raises("context .*24", lambda: mix(x, context=x[..., :24]))
        raises("context .*1", lambda: mix(x, context=x[:1]))
        raises("context .*float32", lambda: mix(x, context=x.float()))
        raises("context_lengths .*10", lambda: mix(x, context=x, context_lengths=torch.tensor([9, 10])))
    else:
        raises("context", lambda: mix(x, context=x))
    if mix.traits.fixed_length:
        raises("max_length", lambda: mix(tokens(1, T + 7, DIM)))
    if mix.traits.state is None:
        for call in (lambda: mix.init_state(2), lambda: mix.prefill(x), lambda: mix.step(x[:, 0], None)):
            with pytest.raises(NotImplementedError, match=case.cls.__name__):
                call()
        return
    state = mix.init_state(2)
    raises("x .*step", lambda: mix.step(x, state))
    raises("state .*3", lambda: mix.step(x[:, 0], mix.init_state(3)))
    raises("state .*3", lambda: mix.prefill(x, state=mix.init_state(3)))
    raises("state", lambda: mix.step(x[:, 0], tuple(state)))
    raises("batch", lambda: mix.init_state(0))
    raises("capacity", lambda: mix.init_state(1, capacity=0))


@pytest.mark.parametrize("name", MECHANISMS)
def test_options(name: str) -> None:
    cls = MECHANISMS[name]
    base: dict[str, Any] = {"dim": DIM, "heads": HEADS, "causal": not cls.traits.bidirectional}
    if cls.traits.fixed_length:
        with pytest.raises(ValueError, match="max_length"):
            subquad.build(name, **base)
        base["max_length"] = 16
    mix = subquad.build(name, **base)
    assert isinstance(mix, Mixer)
    assert dataclasses.is_dataclass(mix.options)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mix.options.dim = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="did you mean 'heads'"):
        subquad.build(name, **base, head=2)
    with pytest.raises(ValueError, match="dim=-1"):
        subquad.build(name, **{**base, "dim": -1})
    with pytest.raises(ValueError, match="heads"):
        subquad.build(name, **{**base, "heads": 0})
    if "heads" not in cls.unused:
        with pytest.raises(ValueError, match="heads=5"):
            subquad.build(name, **{**base, "heads": 5})
    other = {"causal": not base["causal"], "dropout": 0.5, "rotary": True, "max_length": 16}
    meaningless = set(cls.unused)
    if not cls.traits.causal:
        meaningless.add("causal")
    for option in meaningless & set(other):
        with pytest.raises(ValueError, match=option):
            subquad.build(name, **{**base, option: other[option]})
    for option in set(other) - meaningless - {"causal"}:
        subquad.build(name, **{**base, option: other[option]})


@pytest.mark.parametrize("name", MECHANISMS)
def test_one_name_everywhere(name: str) -> None:
    cls = MECHANISMS[name]
    assert cls.__module__ == f"subquad.mechanisms.{name}"
    assert all(card(cls))
    assert {field.name for field in dataclasses.fields(Options)} <= {
        field.name for field in dataclasses.fields(cls.options_type)
    }
    cases = dict(laws.cases())
    directions = {case.options["causal"] for found, case in cases.items() if found.startswith(f"{name}-")}
    assert directions == {c for c, can in ((True, cls.traits.causal), (False, cls.traits.bidirectional)) if can}
    for number in range(len(cls.small)):
        assert any(found.startswith(f"{name}-") and found.endswith(f"-{number}") for found in cases)


def test_unknown_mechanism_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        subquad.build("linaer", dim=8)


@over((n, c) for n, c in defaults() if "rotary" not in c.cls.unused)
def test_rotary_changes_the_result_and_keeps_the_laws(case: Case) -> None:
    rotary = Case(case.cls, {**case.options, "rotary": True})
    x = tokens(2, T, DIM)
    assert not torch.allclose(rotary.build()(x), case.build()(x))
    laws.forward_equals_reference(rotary)
    laws.padding_is_invisible(rotary, [T, 13, 0, 1])
    if rotary.options["causal"]:
        laws.strictly_causal(rotary)
        if rotary.cls.traits.state:
            laws.recurrence_equals_forward(rotary, [1, 4, 1, 1, 7], [5, 11, 1])


@over((f"{name}-{c}", laws.dropping(MECHANISMS[name], c)) for name in laws.DROPPING for c in directions(name))
@pytest.mark.parametrize("pairs", [1 << 20, 300])
def test_dropout_has_its_rate(case: Case, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.ops.dense.PAIRS", pairs)
    laws.dropout_has_its_rate(case)


def test_both_factors_of_nystrom_are_dropped() -> None:
    laws.dropout_has_its_rate(laws.dropping(MECHANISMS["nystrom"], False, landmarks=1))


def test_every_dropout_is_measured() -> None:
    assert set(laws.DROPPING) == {name for name, cls in MECHANISMS.items() if "dropout" not in cls.unused}


@over((n, c) for n, c in defaults() if "dropout" not in c.cls.unused)
def test_dropout_only_in_training(case: Case) -> None:
    mix = case.build(dropout=0.5)
    x = tokens(2, T, DIM)
    assert torch.equal(mix(x), case.build()(x))
    mix.train()
    torch.manual_seed(0)
    y = mix(x)
    assert not torch.allclose(mix(x), y)
    assert math.isfinite(float(y.detach().sum()))
