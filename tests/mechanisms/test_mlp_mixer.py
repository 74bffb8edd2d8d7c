import torch
from torch import nn

from subquad import build


def test_equals_two_linear_layers_on_the_transposed_input() -> None:
    mix = build("mlp_mixer", dim=6, max_length=11, hidden=5).double()
    into, out = nn.Linear(11, 5).double(), nn.Linear(5, 11).double()
    with torch.no_grad():
        for p, q in ((into.weight, mix.w1), (into.bias, mix.b1), (out.weight, mix.w2), (out.bias, mix.b2)):
            p.copy_(q.normal_())
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    torch.testing.assert_close(mix(x), out(nn.functional.gelu(into(x.mT))).mT, rtol=1e-12, atol=1e-12)
