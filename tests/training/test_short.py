import pytest
import torch
from torch import nn

from subquad.training.short import short_run


def test_updates_are_warmed_up_decayed_and_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rates, norms = nn.Linear(3, 1, bias=False), [], []
    nn.init.ones_(model.weight)

    class Spy(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            rates.append(self.param_groups[0]["lr"])
            norms.append(float(model.weight.grad.norm()))
            super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    losses = short_run(model.eval(), lambda: 100 * model(torch.ones(3)).square().sum(), 40, lr=0.1, weight_decay=0.0)
    found = [float(loss) for loss in losses]
    assert len(found) == 40
    assert found[-1] < found[0]
    assert model.training
    assert rates[:2] == pytest.approx([0.05, 0.1], rel=0.01)  # a twentieth of the steps is two
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] < 0.001
    assert max(norms) == pytest.approx(1, rel=1e-4)


def test_the_loss_is_that_before_the_update_and_carries_no_graph() -> None:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    x = torch.ones(2)
    before = float(model(x).detach().square())
    first = next(short_run(model, lambda: model(x).square().sum(), 5, lr=0.1, weight_decay=0.0))
    assert float(first) == pytest.approx(before)
    assert not first.requires_grad
    assert float(model(x).detach().square()) < before
