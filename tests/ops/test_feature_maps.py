import pytest
import torch
import torch.nn.functional as F

from subquad.ops.feature_maps import FEATURE_MAPS, feature_map


def test_named_maps_are_their_formulas() -> None:
    x = torch.linspace(-8, 8, 33, dtype=torch.float64)[:, None]
    wanted = {
        "elu+1": torch.where(x > 0, x + 1, x.exp()),
        "relu": x.clamp(min=0),
        "exp": x.exp(),
        "identity": x,
        "quadratic": torch.cat((x, x**2), -1),
    }
    assert set(wanted) == set(FEATURE_MAPS)
    for name, want in wanted.items():
        torch.testing.assert_close(feature_map(name).apply(x), want, rtol=1e-12, atol=1e-12)


def test_positive_maps_are_positive_and_the_others_signed() -> None:
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    for name, found in FEATURE_MAPS.items():
        y = found.apply(x)
        negative = bool(((y @ y.T) < 0).any())
        assert negative == found.signed, name


def test_a_callable_is_taken_as_signed() -> None:
    found = feature_map(F.softplus)
    assert found.apply is F.softplus
    assert found.signed
    assert not found.fused


@pytest.mark.parametrize(
    ("name", "near"),
    [("elu", "elu+1"), ("elu1", "elu+1"), ("Relu", "relu"), ("ident", "identity"), ("quad", "quadratic")],
)
def test_an_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match="accepted are elu") as error:
        feature_map(name)
    assert f"did you mean {near!r}" in str(error.value)


def test_a_name_near_nothing_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"feature_map=3: accepted are .* or any callable$"):
        feature_map(3)
