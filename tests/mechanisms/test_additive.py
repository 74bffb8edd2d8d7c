import pytest
import torch

from subquad import build
from subquad.ops import additive


@pytest.mark.parametrize("causal", [False, True])
def test_equals_a_scalar_loop_over_the_formula_of_the_paper(causal: bool) -> None:
    mix = build("additive", dim=6, heads=2, hidden=5, causal=causal).double()
    x = torch.randn(1, 7, 6, dtype=torch.float64)
    q, k, v = mix.query(x)[0].view(7, 2, 5), mix.key(x)[0].view(7, 2, 5), mix.value(x)[0].view(7, 2, 3)
    rows = []
    for t in range(7):
        heads = []
        for h in range(2):
            seen = t + 1 if causal else 7
            e = torch.stack([mix.score[h] @ torch.tanh(q[t, h] + k[s, h]) for s in range(seen)])
            a = e.exp() / e.exp().sum()
            heads.append(sum(a[s] * v[s, h] for s in range(seen)))
        rows.append(torch.cat(heads))
    torch.testing.assert_close(mix(x)[0], mix.out(torch.stack(rows)), rtol=1e-12, atol=1e-12)


def test_concatenated_scoring_equals_two_projections() -> None:
    """W[x; c] = W x + U c, which is why U c can be cached."""
    mix = build("additive", dim=4, heads=1).double()
    x, c = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    both = torch.cat((mix.query.weight, mix.key.weight), dim=1) @ torch.cat((x, c)) + mix.query.bias
    torch.testing.assert_close(both, mix.query(x) + mix.key(c))


def test_pieces_equal_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = build("additive", dim=8, heads=2, causal=True).double()
    x = torch.randn(2, 21, 8, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(mix(x).square().sum(), x)
    monkeypatch.setattr(additive, "PAIRS", 3 * 2 * 21 * 8)  # three rows at a time
    (pieces,) = torch.autograd.grad(mix(x).square().sum(), x)
    torch.testing.assert_close(pieces, whole)
