"""The bytes that ranks send, by formula and as they are counted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from subquad import LanguageModel, build, ranks
from subquad.measure.traffic import FORMULAS, Call, ring, softmax, traffic
from tests.together import together

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"causal": True}) for name in FORMULAS if name != "linformer"},
    "local": ("local", {"causal": True, "window": 3}),
    "local_both": ("local", {"window": 2}),
    "linear_both": ("linear", {}),
    "taylor": ("linear", {"causal": True, "feature_map": "taylor", "features": 3}),
    "transformer_xl": ("transformer_xl", {"causal": True, "memory": 4}),
    "strided": ("strided", {"causal": True, "stride": 3}),
    "linformer": ("linformer", {"rank": 8, "max_length": 64}),
}
LONGER = ("softmax", "strided", "fixed")  # what they send grows with T


def count(name: str, length: int) -> int:
    mechanism, options = LAYERS[name]
    mix = build(mechanism, dim=16, heads=4, **options)
    x = torch.randn(2, length // dist.get_world_size(), 16, requires_grad=True)
    with ranks.sequence_parallel(dist.group.WORLD) as group:
        mix(x).sum().backward()
    return sum(bytes for what, bytes in group.sent.items() if what != "sizes")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_ranks_send_what_the_formula_says(name: str, world: int) -> None:
    mechanism, options = LAYERS[name]
    mix = build(mechanism, dim=16, heads=4, **options)
    for length in (32, 64):
        formula = traffic(mix, Call(2, length, world, 4))
        assert sum(together(world).run(count, name, length)) == formula
    assert (formula == traffic(mix, Call(2, 32, world, 4))) == (mechanism not in LONGER)


def count_states(checkpoint: bool | int, length: int) -> int:
    model = LanguageModel(vocab=11, dim=16, depth=6, heads=4, mechanism="linear", checkpoint=checkpoint)
    tokens = torch.randint(11, (2, length // dist.get_world_size()))
    with ranks.sequence_parallel(dist.group.WORLD) as group:
        model.loss(tokens).backward()
    return group.sent["states"]


@pytest.mark.parametrize(("checkpoint", "forwards"), [(False, 6), (True, 12), (3, 15)])
def test_blocks_that_are_computed_again_send_again(checkpoint: bool | int, forwards: int) -> None:
    """Six blocks; of three groups the first has three, two of which are computed again twice, and the second two."""
    once = traffic(build("linear", dim=16, heads=4, causal=True), Call(2, 32, 2, 4)) / 2  # forward or backward
    for length in (32, 64):
        assert sum(together(2).run(count_states, checkpoint, length)) == once * (forwards + 6)


def test_ring_attention_sends_as_much_as_an_all_gather() -> None:
    mix = build("softmax", dim=16, heads=4, causal=True)
    call = Call(1, 1 << 20, 64)
    assert ring(mix, call) == softmax(mix, call) == 3 * 63 * (1 << 20) * 2 * 16 * 2


def test_layers_without_a_formula_are_named() -> None:
    with pytest.raises(ValueError, match="mix='FNet' cannot work: accepted is one of linear, efficient"):
        traffic(build("fnet", dim=16), Call(1, 8, 2))
    with pytest.raises(ValueError, match="ranks=0 cannot work"):
        traffic(build("linear", dim=16), Call(1, 8, 0))
