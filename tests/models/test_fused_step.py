"""The step in few operations: it is the usual step, and blocks that are built otherwise take that one."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from subquad import LanguageModel
from subquad.models import blocks, fused_step, language_model, transformer
from subquad.models.state import leaves, map_state
from subquad.ops.feed_forward import feed_forward

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"mechanism": "linear", "positions": "rotary"},
    "softmax": {"mechanism": "softmax", "positions": "rotary", "activation": "gelu"},
    "both": {"mechanism": ["linear", "softmax"], "norm": "rms", "activation": "swiglu", "tie": True},
    "post": {"mechanism": ("linear", {"feature_map": "relu"}), "norm_position": "post", "positions": "learned"},
    "taps": {"mechanism": "softmax", "taps": (1, 3), "positions": "sinusoidal_concat"},
    "mixture": {"mechanism": "linear", "mixture": 3, "vocab": 257},
}


def make(**fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(**{"vocab": 23, "dim": 16, "depth": 3, "heads": 2, "max_length": 40, **fields}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return model


def compare(model: Any, steps: int = 5, exact: bool = True) -> None:
    """Steps in place beside pure ones, from a ragged prompt on."""
    with torch.no_grad():
        _, pure = model.prefill(torch.randint(20, (3, 6)), torch.tensor([6, 1, 4]), model.init_state(3, 20))
        state = map_state(torch.clone, pure)
        for token in torch.randint(20, (steps, 3)):
            wanted, pure = model.step(token, pure)
            got, state = model.step(token, state, inplace=True)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        for (name, tensor), (_, other) in zip(leaves(state), leaves(pure), strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_place_is_the_usual_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("mix", "feed"):
        fused = getattr(fused_step, name)

        def watch(*args: Any, fused: Any = fused, name: str = name) -> Any:
            made = fused(*args)
            calls.extend([name] if made is not None else [])
            return made

        monkeypatch.setattr(fused_step, name, watch)
    model = make(**KINDS[kind])
    compare(model, steps=5)
    assert calls.count("mix") == 5 * 3
    assert calls.count("feed") == 2 * 5 * 3  # also of the pure steps


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_many_rows_add_the_mixer_with_the_feed_forward(
    norm: Any, norm_position: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(mechanism="linear", norm=norm, norm_position=norm_position, activation="gelu")
    monkeypatch.setattr(fused_step, "pays", lambda *_: True)
    given: list[Any] = []

    def watch(*args: Any, **how: Any) -> Any:
        given.append(how["mixed"])
        return feed_forward(*args, **how)

    monkeypatch.setattr(fused_step, "feed_forward", watch)
    compare(model, steps=2)
    assert len(given) == 2 * 3


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_take_products_of_a_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixing, made = fused_step.mix_many, []

    def watch(*args: Any) -> Any:
        made.append(mixing(*args))
        return made[-1]

    monkeypatch.setattr(fused_step, "many", lambda *_: True)
    monkeypatch.setattr(fused_step, "mix_many", watch)
    monkeypatch.setattr(language_model, "MANY", 1)
    compare(make(**KINDS[kind]), steps=5)
    assert len(made) == 5 * 3
    assert None not in made


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_both_kinds_follow_each_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One leaves a branch to be added by the next one, as on a GPU; another takes the whole stream."""
    for module in (blocks, transformer):
        monkeypatch.setattr(module, "fuses", lambda *_: True)
    turns = itertools.cycle((True, False, False, True))
    monkeypatch.setattr(fused_step, "many", lambda *_: next(turns))
    compare(make(**KINDS[kind]), steps=3)


class Wrapped(nn.Linear):
    """As LoRA does it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def replace(model: Any) -> None:
    for block in model.transformer.blocks:
        block.mixer.heads.out = Wrapped(16, 16)
        block.ff.inner = Wrapped(16, 64)


def hook(model: Any) -> None:
    for module in model.modules():
        if type(module) in (nn.Linear, nn.LayerNorm):
            module.register_forward_hook(lambda *given: given[2] * 0.9)


def patch(model: Any) -> None:
    """As accelerate does it, to fetch weights from elsewhere."""
    for module in model.modules():
        if type(module) in (nn.Linear, nn.LayerNorm):
            module.forward = lambda x, own=module.forward: own(x) * 0.9


def turn(model: Any) -> None:
    model.transformer.blocks[1].mixer.turn = lambda q, k, _: (k, q)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("change", [replace, hook, patch, turn])
@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
def test_what_others_changed_is_respected(
    change: Any, mechanism: str, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_step, "many", lambda *_: many)
    model = make(mechanism=mechanism)
    change(model)
    compare(model)


@pytest.mark.parametrize("change", [replace, hook, patch])
def test_one_kernel_of_a_feed_forward_respects_it_too(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "pays", lambda *_: True)
    model, tokens = make(mechanism="linear", activation="gelu"), torch.randint(20, (3, 6))
    change(model)
    with torch.no_grad():
        _, state = model.prefill(tokens[:, :-1])
        torch.testing.assert_close(model.step(tokens[:, -1], state)[0], model(tokens)[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"mechanism": ("linear", {"feature_map": "hedgehog"})},
        {"mechanism": ("linear", {"feature_map": torch.exp})},
        {"mechanism": ("softmax", {"projections": False})},
        {"mechanism": "linear", "reversible": True},
        {"mechanism": ["gla", "local"]},
        {"mechanism": "linear", "final_norm": False},
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_other_blocks_take_the_usual_step(fields: dict[str, Any], many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_step, "many", lambda *_: many)
    compare(make(**fields))


def test_positions_move_once_also_where_layers_differ() -> None:
    model = make(mechanism=["linear", "local", "softmax"], taps=(1, 2))
    with torch.no_grad():
        _, state = model.prefill(torch.randint(20, (2, 4)), state=model.init_state(2, 9))
        for count in range(1, 4):
            _, state = model.step(torch.tensor([1, 2]), state, inplace=True)
            for name, tensor in leaves(state):
                if name.endswith("position"):
                    assert tensor.tolist() == [4 + count] * 2, name


def test_autocast_and_gradients_take_other_types_and_paths() -> None:
    model = make(mechanism="linear", positions="rotary")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logits, _ = model.step(torch.tensor([1, 2]), model.init_state(2), inplace=True)
        wanted, _ = model.step(torch.tensor([1, 2]), model.init_state(2))
    torch.testing.assert_close(logits, wanted, rtol=0.02, atol=0.02)
    model.step(torch.tensor([1, 2]), model.init_state(2), inplace=False)[0].sum().backward()
    assert model.head.weight.grad is not None
