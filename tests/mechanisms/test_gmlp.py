import pytest
import torch
import torch.nn.functional as F

from subquad import build


def test_starts_near_the_identity_gate() -> None:
    """At the start the gate is one, so the layer is a plain network on each token by itself."""
    mix = build("gmlp", dim=8, max_length=32)
    x = torch.randn(2, 32, 8)
    u = F.gelu(mix.into(x)).chunk(2, dim=-1)[0]
    torch.testing.assert_close(mix(x), mix.out(u), rtol=0, atol=2e-3)


def test_causal_zeroes_the_upper_triangle_of_the_weights() -> None:
    causal, free = (build("gmlp", dim=8, max_length=9, causal=c).double() for c in (True, False))
    free.load_state_dict(causal.state_dict())
    with torch.no_grad():
        causal.weight.normal_()
        free.weight.copy_(causal.weight.tril())
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(causal(x), free(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_tiny_attention_is_added_to_the_gate(causal: bool) -> None:
    mix = build("gmlp", dim=8, max_length=9, attention=4, causal=causal).double()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    assert not torch.allclose(mix(x), build("gmlp", dim=8, max_length=9, causal=causal).double()(x))
    torch.testing.assert_close(mix(x), mix.reference(x), rtol=1e-12, atol=1e-12)


def test_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="expansion=1"):
        build("gmlp", dim=9, max_length=4, expansion=1)
