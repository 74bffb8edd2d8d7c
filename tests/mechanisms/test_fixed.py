from typing import Any
from unittest.mock import Mock

import pytest
import torch

from subquad import build
from subquad.mechanisms.base import Mixer
from subquad.ops.sparse import torch_path
from tests.mechanisms.test_local import DIM, full, tokens

HEADS, T = 4, 30


def fixed(heads: int = HEADS, **options: Any) -> Mixer:
    return build("fixed", dim=DIM, heads=heads, **options).double()


def read(mix: Mixer) -> torch.Tensor:
    return mix.pattern(tokens(1, T, DIM))[0] > 0  # [H, T, T]


@pytest.mark.parametrize("causal", [False, True])
def test_rows_are_the_sets_of_the_paper(causal: bool) -> None:
    options = {"heads": 1, "block": 8, "summary": 2, "causal": causal}
    own, summary, merged = (
        read(fixed(**options, **how))[0]
        for how in ({"combine": "interleave", "layer": 0}, {"combine": "interleave", "layer": 1}, {})
    )
    for i in range(T):
        seen = range(i + 1) if causal else range(T)
        a1, a2 = {j for j in seen if j // 8 == i // 8}, {j for j in seen if j % 8 in (6, 7)}
        assert set(own[i].nonzero()[:, 0].tolist()) == a1
        assert set(summary[i].nonzero()[:, 0].tolist()) == a2
        assert set(merged[i].nonzero()[:, 0].tolist()) == a1 | a2


def test_heads_take_different_sub_blocks() -> None:
    options = {"block": 8, "combine": "interleave", "layer": 1}
    columns = [{int(j) % 8 for j in head.any(0).nonzero()[:, 0]} for head in read(fixed(**options, summary=2))]
    assert columns == [{6, 7}, {4, 5}, {2, 3}, {0, 1}]
    columns = [{int(j) % 8 for j in head.any(0).nonzero()[:, 0]} for head in read(fixed(**options, summary=3))]
    assert columns == [{5, 6, 7}, {5, 6, 7}, {2, 3, 4}, {2, 3, 4}]


def test_three_ways_to_combine() -> None:
    options = {"block": 8, "summary": 2}
    ways = {layer: read(fixed(**options, combine="interleave", layer=layer)) for layer in range(3)}
    assert torch.equal(ways[0], ways[2])
    assert torch.equal(read(fixed(**options)), ways[0] | ways[1])
    heads = read(fixed(**options, combine="heads"))
    assert torch.equal(heads[:2], ways[0][:2])
    assert torch.equal(heads[2:], ways[1][2:])


@pytest.mark.parametrize("causal", [False, True])
def test_one_block_is_full_attention(causal: bool) -> None:
    mix, x = fixed(block=T, summary=1, causal=causal), tokens(2, T, DIM)
    torch.testing.assert_close(mix(x), full(mix)(x), rtol=1e-12, atol=1e-12)
    mix = fixed(heads=1, block=7, summary=7, causal=causal)
    torch.testing.assert_close(mix(x), full(mix)(x), rtol=1e-12, atol=1e-12)


def test_two_layers_connect_every_pair() -> None:
    first, second = (
        fixed(heads=1, block=6, summary=2, combine="interleave", layer=layer, causal=True) for layer in (0, 1)
    )
    x = tokens(1, T, DIM).requires_grad_()
    hidden = x + first(x)
    y = hidden + second(hidden)
    for i in range(0, T, 7):
        (grad,) = torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)
        assert torch.equal(grad[0].abs().sum(-1) > 0, torch.arange(T) <= i)


def test_before_the_first_summary_there_is_nothing_to_read() -> None:
    mix = fixed(heads=1, block=8, summary=2, combine="interleave", layer=1, causal=True)
    y = mix(tokens(1, T, DIM))
    nothing = mix.heads.merge(torch.zeros(1, 1, 1, DIM, dtype=torch.float64))[0, 0]
    torch.testing.assert_close(y[0, :6], nothing.expand(6, DIM), rtol=0, atol=0)
    assert not torch.allclose(y[0, 6], nothing)


def test_the_state_is_the_open_block_and_the_summaries() -> None:
    mix = fixed(block=8, summary=2, causal=True)
    assert mix.traits.state == "growing"
    assert mix.init_state(1, capacity=800).k.shape[1] == 8 + 800 * 2 // 8
    x = tokens(2, 70, DIM)
    y, state = mix.prefill(x[:, :1])
    outputs = [y]
    for t in range(1, 70):
        y_t, state = mix.step(x[:, t], state)
        outputs.append(y_t[:, None])
    torch.testing.assert_close(torch.cat(outputs, 1), mix(x), rtol=1e-10, atol=1e-10)
    assert state.k.shape[1] < 70
    open_block = fixed(block=8, summary=2, causal=True, combine="interleave", layer=0)
    assert open_block.traits.state == "window"
    assert open_block.init_state(1, capacity=800).k.shape[1] == 8


@torch.no_grad()
def test_compiles_without_a_break() -> None:
    """Heads with different patterns are the harder case: the compiler must treat all of them as constants."""
    mix, x = fixed(block=8, summary=2, causal=True), tokens(2, 20, DIM)
    forward, step = (torch.compile(f, backend="eager", fullgraph=True) for f in (mix, mix.step))
    assert torch.equal(forward(x), mix(x))
    _, state = mix.prefill(x[:, :11], state=mix.init_state(2, capacity=20))
    assert torch.equal(step(x[:, 11], state)[0], mix.step(x[:, 11], state)[0])


@pytest.mark.parametrize(("combine", "calls"), [("merge", 1), ("interleave", 1), ("heads", 2)])
def test_heads_with_different_sub_blocks_are_computed_together(
    combine: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mock(wraps=torch_path.forward)
    monkeypatch.setattr(torch_path, "forward", run)
    fixed(block=8, summary=2, causal=True, combine=combine, layer=1)(tokens(1, T, DIM))
    assert [x.q.shape[2] for (x, _), _ in run.call_args_list] == [HEADS // calls] * calls


def test_options() -> None:
    for options, match in (
        ({"block": 0}, "block=0"),
        ({"summary": 0}, "summary=0"),
        ({"block": 16}, "summary=32.*block=16"),
        ({"combine": "both"}, "combine='both'"),
        ({"combine": "heads", "heads": 1}, "heads=1"),
    ):
        with pytest.raises(ValueError, match=match):
            fixed(**options)
