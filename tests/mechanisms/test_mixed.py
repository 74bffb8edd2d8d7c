import pytest
import torch

from subquad import build


def test_one_part_between_identities_is_that_part() -> None:
    mix = build("mixed", dim=8, heads=2, causal=True, parts=(("softmax", 2),)).double()
    with torch.no_grad():
        for layer in (mix.into, mix.out):
            layer.weight.copy_(torch.eye(8))
            layer.bias.zero_()
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    assert torch.equal(mix(x), mix.parts[0](x))


def test_four_linear_two_local_and_two_reformer_heads() -> None:
    parts = (("linear", 4), ("local", 2, {"window": 3}), ("reformer", 2, {"chunk": 4, "buckets": 4}))
    mix = build("mixed", dim=32, heads=8, causal=True, parts=parts).double().eval()
    x = torch.randn(2, 21, 32, dtype=torch.float64)
    torch.testing.assert_close(mix(x), mix.reference(x), rtol=1e-9, atol=1e-9)
    assert mix.pattern(x).shape == (2, 8, 21, 21)


def test_traits_are_those_all_parts_share() -> None:
    assert build("mixed", dim=8, heads=2, parts=(("linear", 1), ("softmax", 1))).traits.cross
    assert not build("mixed", dim=8, heads=2, parts=(("linear", 1), ("local", 1))).traits.cross
    states = {
        (("linear", 2),): "constant",
        (("linear", 1), ("local", 1)): "window",
        (("linear", 1), ("softmax", 1)): "growing",
        (("linear", 1), ("sinkhorn", 1)): None,
    }
    for parts, state in states.items():
        assert build("mixed", dim=8, heads=2, causal=True, parts=parts).traits.state == state


@pytest.mark.parametrize("parts", [(), (("linear", 3),), (("linear", 1), ("local", 0), ("softmax", 1)), ("linear",)])
def test_parts_that_do_not_add_up_are_refused(parts: object) -> None:
    with pytest.raises(ValueError, match="parts"):
        build("mixed", dim=8, heads=2, parts=parts)


def test_errors_of_a_part_come_through() -> None:
    with pytest.raises(TypeError, match="windo"):
        build("mixed", dim=8, heads=2, parts=(("local", 2, {"windo": 3}),))
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        build("mixed", dim=8, heads=2, parts=(("linaer", 2),))
    with pytest.raises(ValueError, match="causal"):
        build("mixed", dim=8, heads=2, causal=True, parts=(("fnet", 2),))


def test_gated_and_delta_rules_beside_exact_and_local_attention() -> None:
    """Forward, padding, and a ragged prompt with steps behind it: the states of all parts lie in one."""
    own = (("gla", 1), ("mamba2", 2, {"state": 4}), ("gated_deltanet", 1))
    mix = build("mixed", dim=36, heads=6, causal=True, parts=(("softmax", 1), *own, ("local", 1, {"window": 3})))
    mix = mix.double().eval()
    assert mix.traits.state == "growing"
    assert build("mixed", dim=16, heads=4, causal=True, parts=own).traits.state == "constant"
    x, lengths = torch.randn(2, 17, 36, dtype=torch.float64), torch.tensor([9, 4])
    want = mix(x)
    torch.testing.assert_close(want, mix.reference(x), rtol=1e-9, atol=1e-9)
    y, state = mix.prefill(x[:, :9], lengths)
    for row, n in enumerate(lengths):
        torch.testing.assert_close(y[row, :n], want[row, :n])
    for step in range(8):
        y, state = mix.step(torch.stack([x[row, n + step] for row, n in enumerate(lengths)]), state)
        torch.testing.assert_close(y, torch.stack([want[row, n + step] for row, n in enumerate(lengths)]))
    with pytest.raises(ValueError, match="causal=False cannot work: GLA is causal only"):
        build("mixed", dim=16, heads=4, parts=own)
