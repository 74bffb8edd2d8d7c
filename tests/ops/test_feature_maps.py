import pytest
import torch
import torch.nn.functional as F

from subquad.ops.feature_maps import FEATURE_MAPS, FUSED, feature_map
from tests.ops.own_process import interpreted


def test_named_maps_are_their_formulas() -> None:
    x = torch.linspace(-8, 8, 33, dtype=torch.float64)[:, None]
    wanted = {
        "elu+1": torch.where(x > 0, x + 1, x.exp()),
        "relu": x.clamp(min=0),
        "exp": x.exp(),
        "identity": x,
        "quadratic": torch.cat((x, x**2), -1),
        "taylor": torch.cat((torch.ones_like(x), x, x**2 / 2**0.5), -1),
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


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_taylor_is_the_second_order_of_the_exponential(width: int) -> None:
    q, k = torch.randn(2, 30, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    phi = feature_map("taylor").apply
    s = (q @ k.T) / width**0.5
    assert phi(q).shape == (30, 1 + width + width * (width + 1) // 2)
    torch.testing.assert_close(phi(q) @ phi(k).T, 1 + s + s**2 / 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "size", "most"),  # |q||k|/√K; twice the largest error that was found
    [(torch.bfloat16, 10.0, 0.5), (torch.float16, 10.0, 0.08), (torch.float32, 1e3, 0.4)],
)
def test_taylor_stays_positive_in_its_range(dtype: torch.dtype, size: float, most: float) -> None:
    for width in (4, 16, 64):
        x = torch.randn(2, 600, width, generator=torch.Generator().manual_seed(0))
        q, k = (F.normalize(x, dim=-1) * (size * width**0.5) ** 0.5).to(dtype)
        weights = feature_map("taylor").apply(q).double() @ feature_map("taylor").apply(k).double().T
        s = (q.double() @ k.double().T) / width**0.5
        assert weights.min() > 0
        assert (weights - (1 + s + s**2 / 2)).abs().max() < most


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_row_is_one_map_in_all_its_forms(name: str) -> None:
    row, x = FUSED[name], torch.linspace(-8, 8, 32, dtype=torch.float64, requires_grad=True)
    f, d = FEATURE_MAPS[name].apply(x), torch.linspace(3, -2, 32, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(f, x, d)
    torch.testing.assert_close(row.apply_(x.detach().clone()), f.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(row.pull_(d.clone(), f.detach()), wanted, rtol=1e-12, atol=1e-12)
    assert row.apply_(torch.tensor([row.zero])).item() == 0


@interpreted
@pytest.mark.parametrize("name", FUSED)
def test_the_triton_code_of_a_row_is_the_same_map(name: str) -> None:
    global phi, phi_pull, phi_zero, tl  # a kernel sees the names of its module alone
    import triton
    import triton.language as tl

    from subquad.ops.linear.maps_triton import phi, phi_pull, phi_zero

    @triton.jit
    def both(x, d, f, pulled, zero, MAP: tl.constexpr) -> None:  # type: ignore[no-untyped-def, name-defined]
        at = tl.arange(0, 32)
        y = phi(tl.load(x + at), MAP)
        tl.store(f + at, y)
        tl.store(pulled + at, phi_pull(tl.load(d + at), y, MAP))
        tl.store(zero + at, phi(tl.load(x + at, mask=at < 0, other=phi_zero(MAP)), MAP))

    row, x, d = FUSED[name], torch.linspace(-8, 8, 32), torch.linspace(3, -2, 32)
    f, pulled, zero = (torch.full_like(x, 7) for _ in range(3))
    both[(1,)](x, d, f, pulled, zero, MAP=name)
    torch.testing.assert_close(f, row.apply_(x.clone()))
    torch.testing.assert_close(pulled, row.pull_(d.clone(), f))
    assert not zero.any()


def test_a_callable_is_taken_as_signed() -> None:
    found = feature_map(F.softplus)
    assert found.apply is F.softplus
    assert found.signed
    assert not found.fused


def test_an_error_names_the_maps_that_a_caller_has_besides() -> None:
    with pytest.raises(ValueError, match=r"taylor, cosformer, or any callable; did you mean 'cosformer'\?$"):
        feature_map("cosforme", others=("cosformer",))


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
