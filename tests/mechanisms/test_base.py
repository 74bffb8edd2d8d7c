"""What the contract refuses, and what states and lengths may be."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import subquad
from subquad import build

BAD: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"eps": -1.0}),
    ("linear", {"eps": float("nan")}),
    ("linear", {"eps": "x"}),
    ("linear", {"feature_map": []}),
    ("linear", {"impl": "cuda"}),
    ("local", {"impl": "x"}),
    ("local", {"window": -1}),
    ("local", {"window": 2.5}),
    ("softmax", {"dropout": "a"}),
    ("softmax", {"dropout": None}),
    ("softmax", {"dropout": 1.0}),
    ("softmax", {"scale": 0.0}),
    ("softmax", {"scale": -1.0}),
    ("softmax", {"scale": float("inf")}),
    ("softmax", {"projections": "no"}),
    ("softmax", {"causal": 1}),
    ("softmax", {"seed": 2**70}),
    ("softmax", {"heads": "4"}),
    ("softmax", {"dim": 3.5}),
    ("rfa", {"gate": "x", "causal": True}),
    ("rfa", {"tau": "x"}),
    ("performer", {"eps": float("inf")}),
    ("sinkhorn", {"temperature": "x"}),
    ("routing", {"decay": (1,)}),
    ("reformer", {"strict_causal": ()}),
]


@pytest.mark.parametrize(("name", "options"), BAD, ids=[f"{n}-{o}" for n, o in BAD])
def test_impossible_values_raise_at_once_and_are_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        build(name, **{"dim": 16, "heads": 4, **options})


def test_a_missing_width_and_a_name_of_another_type_are_explained() -> None:
    with pytest.raises(TypeError, match="softmax needs dim"):
        build("softmax")
    with pytest.raises(ValueError, match="unknown mechanism"):
        build(["softmax"], dim=8)
    with pytest.raises(ValueError, match=r"unknown mechanism 'zzz'\. Accepted"):
        build("zzz", dim=8)


STRANGERS: list[tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = [
    (("strided", {"stride": 4}), ("bigbird", {"block": 4})),
    (("fixed", {"block": 4, "summary": 1}), ("local", {"window": 4})),
    (("local", {"window": 9}), ("local", {"window": 4})),
    (("compressed", {"stride": 3}), ("compressed", {"stride": 4})),
    (("transformer_xl", {"memory": 6}), ("transformer_xl", {"memory": 4})),
    (("routing", {"clusters": 4}), ("routing", {"clusters": 2})),
    (("reformer", {"chunk": 4}), ("reformer", {"chunk": 8})),
    (("softmax", {"heads": 4}), ("softmax", {"heads": 2})),
    (("linear", {}), ("softmax", {})),
]


@pytest.mark.parametrize(
    ("giver", "taker"), STRANGERS, ids=[f"{a[0]}-{b[0]}-{n}" for n, (a, b) in enumerate(STRANGERS)]
)
def test_a_state_of_another_module_is_refused(giver: tuple[str, Any], taker: tuple[str, Any]) -> None:
    base = {"dim": 16, "heads": 2, "causal": True}
    x = torch.randn(2, 7, 16)
    _, state = build(giver[0], **{**base, **giver[1]}).eval().prefill(x)
    with pytest.raises(ValueError, match="state"):
        build(taker[0], **{**base, **taker[1]}).eval().step(x[:, 0], state)


def test_a_state_of_another_type_is_refused() -> None:
    mix = build("softmax", dim=8, heads=2, causal=True)
    state = mix.init_state(2)
    for wrong in (state._replace(position=state.position.float()), state._replace(k=state.k.double())):
        with pytest.raises(ValueError, match=r"state\.\w+ is"):
            mix.step(torch.randn(2, 8), wrong)


@torch.no_grad()
def test_a_state_goes_into_a_rebuilt_module_and_through_pickle() -> None:
    parts = (("linear", 1), ("local", 1, {"window": 3}))
    mix = build("mixed", dim=8, heads=2, causal=True, parts=parts)
    again = build("mixed", dim=8, heads=2, causal=True, parts=parts)
    again.load_state_dict(mix.state_dict())
    x = torch.randn(2, 9, 8)
    _, state = mix.prefill(x[:, :8])
    want = mix.step(x[:, 8], state)[0]
    torch.testing.assert_close(again.step(x[:, 8], state)[0], want)
    torch.testing.assert_close(mix.step(x[:, 8], pickle.loads(pickle.dumps(state)))[0], want)
    torch.testing.assert_close(pickle.loads(pickle.dumps(mix)).step(x[:, 8], state)[0], want)
    torch.testing.assert_close(copy.deepcopy(mix).step(x[:, 8], copy.deepcopy(state))[0], want)


def test_parts_of_one_kind_draw_different_numbers() -> None:
    mix = build("mixed", dim=32, heads=4, parts=(("performer", 2), ("performer", 2)))
    assert not torch.equal(mix.parts[0].directions, mix.parts[1].directions)


def test_lengths_under_inference_mode_and_changed_in_place() -> None:
    mix = build("linear", dim=8, heads=2)
    x = torch.randn(2, 10, 8)
    with torch.inference_mode():
        mix(x, lengths=torch.tensor([10, 3]))
    numbers = np.array([10, 5])
    lengths = torch.from_numpy(numbers)
    mix(x, lengths=lengths)
    numbers[0] = 50
    with pytest.raises(ValueError, match="lengths"):
        mix(x, lengths=lengths)
    torch.testing.assert_close(
        mix(x, lengths=torch.tensor([10, 3], dtype=torch.uint16)), mix(x, lengths=torch.tensor([10, 3]))
    )


def test_double_precision_under_autocast_is_refused_by_name() -> None:
    mix = build("linear", dim=8, heads=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert mix(torch.randn(1, 4, 8)).dtype == torch.bfloat16
        with pytest.raises(ValueError, match="float64"):
            mix(torch.randn(1, 4, 8, dtype=torch.float64))


def test_approximation_error_is_zero_for_the_exact_and_refuses_bad_input() -> None:
    x = torch.randn(2, 12, 16)
    for options in ({}, {"causal": True}, {"projections": False}):
        assert subquad.approximation_error(build("softmax", dim=16, heads=4, **options), x).max() < 1e-5
    assert subquad.approximation_error(build("local", dim=16, heads=4, window=20), x).max() < 1e-5
    assert subquad.approximation_error(build("local", dim=16, heads=4, window=1), x).min() > 1e-2
    with pytest.raises(ValueError, match="x has shape"):
        subquad.approximation_error(build("softmax", dim=16, heads=4), x[..., :3])
