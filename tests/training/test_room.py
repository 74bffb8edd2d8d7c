import pytest
import torch

from subquad.tasks.copy import Copy
from subquad.training import room
from subquad.training.weights import make_model


def test_a_sharded_model_needs_room_for_its_weights_and_an_unsharded_one_for_its_gradients_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, device = Copy(), torch.device("cpu")
    fields = {**task.model, "dim": 16, "heads": 2, "depth": room.DEEP + 1}
    weights = sum(p.numel() * p.element_size() for p in make_model(task, fields).parameters())
    monkeypatch.setattr(room, "free_bytes", lambda _: weights)
    room.check_model(task, fields, device, sharded=True)
    with pytest.raises(ValueError, match=f"model.depth={room.DEEP + 1} cannot work"):
        room.check_model(task, fields, device)
    monkeypatch.setattr(room, "free_bytes", lambda _: weights - 1)
    with pytest.raises(ValueError, match="fewer layers"):
        room.check_model(task, fields, device, sharded=True)
