import math

import torch

from subquad import build


def test_equals_an_explicit_loop_over_relative_positions() -> None:
    mix = build("transformer_xl", dim=8, heads=2, memory=3, causal=True).double()
    with torch.no_grad():
        mix.u.normal_()
        mix.w.normal_()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    q, k, v = (t[0] for t in mix.heads.split(x))
    rows = []
    for t in range(9):
        heads = []
        for h in range(2):
            seen = range(max(0, t - 3), t + 1)
            scores = []
            for s in seen:
                angles = [(t - s) * rate for rate in (1, 0.1, 0.01, 0.001)]  # 10000^(-i/4)
                waves = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
                r = mix.relative(torch.tensor(waves, dtype=torch.float64)).view(2, 4)[h]
                scores.append(((q[t, h] + mix.u[h]) @ k[s, h] + (q[t, h] + mix.w[h]) @ r) / math.sqrt(4))
            heads.append(torch.stack(scores).softmax(-1) @ v[list(seen), h])
        rows.append(torch.cat(heads))
    torch.testing.assert_close(mix(x)[0], mix.heads.out(torch.stack(rows)), rtol=1e-12, atol=1e-12)


def test_segment_by_segment_equals_one_pass() -> None:
    mix = build("transformer_xl", dim=8, heads=2, memory=6, causal=True).double()
    x = torch.randn(2, 40, 8, dtype=torch.float64)
    state, parts = None, []
    for segment in x.split(7, dim=1):
        y, state = mix.prefill(segment, state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), mix(x), rtol=1e-12, atol=1e-12)
    assert state.k.shape[1] == 6


def test_no_gradient_flows_into_the_memory() -> None:
    mix = build("transformer_xl", dim=8, heads=2, memory=6, causal=True)
    x = torch.randn(1, 5, 8, requires_grad=True)
    _, state = mix.prefill(x)
    assert not state.k.requires_grad


def test_a_memory_longer_than_the_input_is_full_relative_attention() -> None:
    wide, full = (build("transformer_xl", dim=8, heads=2, memory=m).double() for m in (20, 500))
    full.load_state_dict(wide.state_dict())
    x = torch.randn(1, 20, 8, dtype=torch.float64)
    torch.testing.assert_close(wide(x), full(x), rtol=1e-12, atol=1e-12)
