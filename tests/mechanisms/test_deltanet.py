"""The delta rule: memory that overwrites, and fla's naive function."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subquad
from subquad.mechanisms.deltanet import DeltaNet
from subquad.mechanisms.recurrent import corrected_sums
from tests.mechanisms.peers import convolved, fla_naive, same_gradients


def build(**options: Any) -> DeltaNet:
    torch.manual_seed(0)
    mix = subquad.build("deltanet", **{"dim": 12, "heads": 3, "causal": True, **options})
    assert isinstance(mix, DeltaNet)
    return mix.double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_key_written_twice_holds_the_last_value() -> None:
    """β = 1 and orthogonal keys are a table: each key reads back what was last written under it."""
    key = torch.tensor([0, 1, 2, 1, 0, 3])
    k = torch.eye(4, dtype=torch.float64)[key][None, :, None]
    v = tokens(1, 6, 1, 5)
    q = k[:, [0, 0, 1, 2, 3, 4]]  # each token after the first asks for the key before it
    o = corrected_sums(q, k, v, None, torch.ones(1, 6, 1, dtype=torch.float64))
    torch.testing.assert_close(o[0, 1:, 0], v[0, :5, 0])
    last = corrected_sums(torch.eye(4, dtype=torch.float64)[None, :, None].expand(-1, -1, 1, -1), k[:, [5] * 4],
                          v[:, [5] * 4], None, torch.ones(1, 4, 1, dtype=torch.float64))  # fmt: skip
    torch.testing.assert_close(last[0, 3, 0], v[0, 5, 0])
    torch.testing.assert_close(last[0, :3, 0], torch.zeros(3, 5, dtype=torch.float64))


@pytest.mark.parametrize("negative", [False, True])
def test_the_state_is_a_product_of_householder_like_matrices(negative: bool) -> None:
    """S = (I - β k kᵀ) S + β k vᵀ, matrix by matrix, from the module's own projections."""
    mix, x = build(negative=negative), tokens(1, 14, 12)
    assert mix.conv is not None
    raw, logits = mix.into(x).split((36, 3), -1)
    q, k, v = (t.unflatten(-1, (3, 4))[0] for t in convolved(raw, mix.conv.weight).split(12, -1))
    beta = torch.sigmoid(logits)[0] * (2 if negative else 1)
    want = torch.zeros(14, 3, 4, dtype=torch.float64)
    for h in range(3):
        s = torch.zeros(4, 4, dtype=torch.float64)
        for t in range(14):
            qt, kt = (u[t, h] / (u[t, h] @ u[t, h] + 1e-6).sqrt() for u in (q, k))
            s = (torch.eye(4) - beta[t, h] * torch.outer(kt, kt)) @ s + beta[t, h] * torch.outer(kt, v[t, h])
            o = s.T @ qt / 2
            want[t, h] = o / (o.square().mean() + 1e-5).sqrt()
    torch.testing.assert_close(mix(x)[0], mix.out(want.flatten(1)))
    torch.testing.assert_close(mix.prefill(x)[1].s[0, 2], s)


@pytest.mark.parametrize("function", ["delta_rule_recurrence", "delta_rule_chunkwise"])
def test_fla_naive_delta_rule(function: str) -> None:
    """Between the projections, the convolutions and the norm of fla's layer, token by token and in chunks."""
    naive = getattr(fla_naive("delta_rule"), function)
    mix, x = build(expand_v=2).float(), tokens(2, 64, 12).float().requires_grad_()
    assert mix.conv is not None
    raw, logits = mix.into(x).split((48, 3), -1)
    mixed = convolved(raw, mix.conv.weight).split((12, 12, 24), -1)
    q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in mixed)
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    o = naive(q, k, v, logits.sigmoid().transpose(1, 2))[0].transpose(1, 2)
    same_gradients(mix(x), mix.out(F.rms_norm(o, (8,), eps=1e-5).flatten(-2)), x, 2e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"causal": False}, "causal=False .*causal only"),
        ({"expand_v": 0}, "expand_v=0"),
        ({"rotary": True}, "rotary=True"),
        ({"negative": 1}, "negative=1"),
    ],
)
def test_impossible_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**options)
