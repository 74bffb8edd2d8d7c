from typing import Any

import pytest
import torch
from torch import nn

from subquad.models import LanguageModel
from subquad.training.config import TrainingConfig
from subquad.training.optimisers import Optimiser, scale_and_clip


def _model(**fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(
        **{"vocab": 5, "dim": 8, "depth": 1, "heads": 2, "positions": "learned", "max_length": 6, **fields}
    )


def _decayed(optimiser: Optimiser) -> set[str]:
    names = {id(p): name for name, p in optimiser.named.items()}
    groups = [group for part in optimiser.parts for group in part.param_groups]
    return {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}


def test_matrices_decay_and_nothing_else() -> None:
    optimiser = Optimiser(TrainingConfig(weight_decay=0.1), _model())
    decayed = _decayed(optimiser)
    assert decayed
    assert all(optimiser.named[name].ndim >= 2 for name in decayed)
    assert not any("embedding" in name or name.endswith("bias") or "norm" in name for name in decayed)
    assert {"head.weight", "transformer.blocks.0.ff.inner.weight"} <= decayed
    tied = Optimiser(TrainingConfig(), _model(tie=True))
    assert "embedding.weight" not in _decayed(tied)


def test_muon_updates_the_inner_matrices() -> None:
    optimiser = Optimiser(TrainingConfig(optimiser="muon"), _model())
    names = {id(p): name for name, p in optimiser.named.items()}
    adam, muon = optimiser.parts
    assert isinstance(adam, torch.optim.AdamW)
    assert isinstance(muon, torch.optim.Muon)
    inside = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert "transformer.blocks.0.ff.inner.weight" in inside
    assert not any(name.startswith(("head.", "embedding.")) for name in inside)
    every = [id(p) for part in optimiser.parts for group in part.param_groups for p in group["params"]]
    assert sorted(every) == sorted(names)  # each exactly once


@pytest.mark.parametrize("name", ["radam", "adamw", "adam", "muon"])
def test_a_loaded_state_continues_exactly(name: Any) -> None:
    def steps(model: nn.Module, optimiser: Optimiser, seeds: range) -> None:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimiser.set_lr(0.01 * (seed + 1))
            optimiser.step()

    config = TrainingConfig(optimiser=name)
    one = _model()
    optimiser = Optimiser(config, one)
    steps(one, optimiser, range(7))  # RAdam changes its rule after five
    two = _model()
    two.load_state_dict(one.state_dict())
    again = Optimiser(config, two)
    saved = {key: value.clone() for key, value in optimiser.tensors().items()}
    state = again.empty_state({key: (value.shape, value.dtype) for key, value in saved.items()})
    for key, value in state.items():
        value.copy_(saved[key])
    again.load(state)
    steps(one, optimiser, range(7, 10))
    steps(two, again, range(7, 10))
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("by", ["norm", "tensor"])
def test_gradients_are_scaled_then_clipped(by: str) -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0, 4]), torch.full((2, 2), 6.0)
    norm = scale_and_clip(parameters, torch.tensor(0.5), 1.0, by, sharded=False)
    assert norm.item() == pytest.approx(
        (2.5**2 + 6**2) ** 0.5
    )  # before clipping; a parameter without gradient does not count
    first, second = parameters[0].grad, parameters[1].grad
    assert first is not None
    assert second is not None
    if by == "tensor":
        assert (first.norm().item(), second.norm().item()) == (pytest.approx(1), pytest.approx(1))
    else:
        assert torch.cat((first, second.flatten())).norm().item() == pytest.approx(1)
        assert (second.norm() / first.norm()).item() == pytest.approx(12 / 5)


def test_small_gradients_are_left_alone() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([0.1, 0.2])
    scale_and_clip([parameter], torch.tensor(1.0), 1.0, "norm", sharded=False)
    assert torch.equal(parameter.grad, torch.tensor([0.1, 0.2]))


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameters to train"):
        Optimiser(TrainingConfig(), nn.ReLU())
