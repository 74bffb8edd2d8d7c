import pytest
import torch
import torch.nn.functional as F

from subquad import build


def test_equals_the_recurrence_of_the_paper() -> None:
    """Equations 16 to 20: s and z are running sums, and each token reads them once."""
    mix = build("linear", dim=8, heads=1, causal=True).double()
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    q, k, v = (t[0, :, 0] for t in mix.heads.split(x))
    s, z, rows = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64), []
    for t in range(12):
        s = s + torch.outer(F.elu(k[t]) + 1, v[t])
        z = z + F.elu(k[t]) + 1
        phi = F.elu(q[t]) + 1
        rows.append(phi @ s / (phi @ z + 1e-6))
    torch.testing.assert_close(mix(x)[0], mix.heads.out(torch.stack(rows)), rtol=1e-10, atol=1e-10)


def test_equal_keys_average_the_past() -> None:
    """With one key for all, token t gets the mean of v_1 .. v_t: 1, 1/2, 1/3 for a pulse at the start."""
    mix = build("linear", dim=4, heads=1, causal=True).double()
    with torch.no_grad():
        mix.heads.qkv.weight.zero_()
        mix.heads.qkv.bias.zero_()
        mix.heads.qkv.weight[8:] = torch.eye(4, dtype=torch.float64)
        mix.heads.out.weight.copy_(torch.eye(4))
        mix.heads.out.bias.zero_()
    x = torch.zeros(1, 5, 4, dtype=torch.float64)
    x[0, 0, 0] = 1
    torch.testing.assert_close(mix(x)[0, :, 0], 1 / torch.arange(1.0, 6, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["elu+1", "relu", "exp", "identity", "quadratic", torch.nn.functional.softplus])
@pytest.mark.parametrize("causal", [False, True])
def test_any_feature_map(name: object, causal: bool) -> None:
    mix = build("linear", dim=12, heads=3, causal=causal, feature_map=name).double()
    x = torch.randn(2, 19, 12, dtype=torch.float64)
    torch.testing.assert_close(mix(x), mix.reference(x), rtol=1e-6, atol=1e-6)
    if causal:
        _, state = mix.prefill(x[:, :11])
        y_t, _ = mix.step(x[:, 11], state)
        torch.testing.assert_close(y_t, mix(x)[:, 11], rtol=1e-6, atol=1e-6)


def test_the_state_does_not_grow() -> None:
    mix = build("linear", dim=12, heads=3, causal=True)
    _, short = mix.prefill(torch.randn(1, 3, 12))
    _, long = mix.prefill(torch.randn(1, 300, 12))
    assert [t.shape for t in short] == [t.shape for t in long]
    assert short.s.dtype == torch.float32
    assert mix.to(torch.bfloat16).init_state(1).s.dtype == torch.float32


def test_wrong_feature_map_is_named() -> None:
    with pytest.raises(ValueError, match=r"elu\+1"):
        build("linear", dim=8, feature_map="elu")


@pytest.mark.parametrize("eps", [0.0, -1.0, 1e-60])
def test_a_denominator_of_zero_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match=r"eps=.*above 0"):
        build("linear", dim=8, feature_map="relu", eps=eps)
