import pytest
import torch

from subquad.tasks.copy import Copy
from subquad.training import memory_check
from subquad.training.models import make_model


def test_a_sharded_model_needs_room_for_its_weights_and_an_unsharded_one_for_its_gradients_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, device = Copy(), torch.device("cpu")
    fields = {**task.model, "dim": 16, "heads": 2, "depth": memory_check.DEEP + 1}
    weights = sum(p.numel() * p.element_size() for p in make_model(task, fields).parameters())
    monkeypatch.setattr(memory_check, "free_bytes", lambda _: weights)
    memory_check.check_model(task, fields, device, sharded=True)
    with pytest.raises(ValueError, match=f"model.depth={memory_check.DEEP + 1} cannot work"):
        memory_check.check_model(task, fields, device)
    monkeypatch.setattr(memory_check, "free_bytes", lambda _: weights - 1)
    with pytest.raises(ValueError, match="fewer layers"):
        memory_check.check_model(task, fields, device, sharded=True)
