"""Steps without gradients, in place and pure, by the plain path and by the kernels, equal forward.

The laws take steps with gradients, which have no kernels, and never in place.
"""

from typing import Any

import pytest
import torch

from subquad import LanguageModel, build
from tests.mechanisms import laws

OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"window": 5},
    "strided": {"stride": 4},
    "strided heads": {"stride": 4, "combine": "heads"},
    "fixed": {"block": 6, "summary": 2},
    "fixed heads": {"block": 6, "summary": 2, "combine": "heads"},
    "fixed interleave": {"block": 6, "summary": 2, "combine": "interleave", "layer": 1},
    "longformer": {"window": 3, "dilation": (1, 1, 2, 4), "global_tokens": 2},
    "bigbird": {"block": 3, "random": 2},
    "bigbird etc": {"block": 3, "random": 2, "construction": "etc"},
    "compressed": {},
    "compressed whole": {"stride": 1},
    "compressed rotary": {"rotary": True},
    "transformer_xl": {"memory": 5},
    "transformer_xl long": {"memory": 60},
    "local rotary": {"window": 5, "rotary": True},
    "bigbird etc rotary": {"block": 3, "random": 2, "construction": "etc", "rotary": True},
    "mixed": {"rotary": True},
}
T = 27


def decode(mix: Any, x: torch.Tensor, inplace: bool) -> torch.Tensor:
    """Outputs of ragged prompts and steps after them."""
    _, first = mix.prefill(x[:, :7], torch.tensor([7, 2, 0]), mix.init_state(3, T))
    assert all(a.shape[0] == 3 for a in first)
    before, state, outputs = [t.clone() for t in first], first, []
    at = first.position.clone()
    for step in range(T - 7):
        tokens = x[torch.arange(3), at + step]
        y, new = mix.step(tokens, state, inplace)
        outputs.append(y)
        same = [a.data_ptr() == b.data_ptr() for a, b in zip(new, state, strict=True) if a.numel()]
        assert all(same) is inplace
        assert inplace or not any(same)
        state = new
    assert inplace or all(torch.equal(a, b) for a, b in zip(before, first, strict=True))
    return torch.stack(outputs, 1)


def check(name: str, inplace: bool, tolerance: float, **changes: Any) -> None:
    torch.manual_seed(0)
    kind = name.split()[0]
    mix = build(kind, dim=laws.DIM, heads=laws.HEADS, causal=True, **OPTIONS[name], **changes).double().eval()
    x = laws.tokens(3, T, laws.DIM)
    with torch.no_grad():
        for p in mix.parameters():
            p.add_(0.1 * torch.randn_like(p))
        want = mix(x)
        if tolerance > 1e-6:
            mix, x = mix.float(), x.float()
        y = decode(mix, x, inplace)
    for b, start in enumerate((7, 2, 0)):
        torch.testing.assert_close(y[b].double(), want[b, start : start + T - 7], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_plain_steps_equal_forward(name: str, inplace: bool) -> None:
    check(name, inplace, 1e-9)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        *((name, "rotary") for name in ("local", "strided", "fixed", "longformer", "bigbird", "compressed")),
        *((name, "sinusoidal") for name in ("local", "bigbird", "compressed", "transformer_xl")),
    ],
)
def test_a_model_steps_between_its_projections(name: str, positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    options = OPTIONS[name]
    model = LanguageModel(vocab=11, dim=16, depth=2, heads=4, mechanism=(name, options), positions=positions).eval()
    fused = name != "bigbird" or positions != "rotary"
    mixer = model.transformer.blocks[0].mixer
    monkeypatch.setattr(mixer, "_step_inplace", None if fused else mixer._step_inplace)
    tokens = torch.randint(11, (2, 30))
    with torch.no_grad():
        want = model(tokens)
        _, state = model.prefill(tokens[:, :9])
        for t in range(9, 30):
            y, state = model.step(tokens[:, t], state, inplace=True)
            torch.testing.assert_close(y, want[:, t], rtol=1e-4, atol=1e-4)
            assert state.layers[1].position.tolist() == [t + 1, t + 1]
