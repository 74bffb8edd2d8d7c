import math

import pytest
import torch

from subquad.models.loss import cross_entropy, shift


def test_mean_skips_ignored_targets() -> None:
    logits = torch.randn(2, 4, 5, dtype=torch.float64)
    targets = torch.tensor([[1, 2, -100, 4], [0, 3, 99, 99]])
    nats = -logits.log_softmax(-1)
    there = [(0, 0, 1), (0, 1, 2), (0, 3, 4), (1, 0, 0), (1, 1, 3)]
    expected = torch.stack([nats[i] for i in there])
    lengths = torch.tensor([4, 2])
    torch.testing.assert_close(cross_entropy(logits, targets, lengths), expected.mean())
    torch.testing.assert_close(cross_entropy(logits, targets, lengths, reduction="sum"), expected.sum())
    each = cross_entropy(logits, targets, lengths, reduction="none")
    assert each.shape == (2, 4)
    assert each[0, 2] == each[1, 2] == each[1, 3] == 0
    torch.testing.assert_close(each.sum(), expected.sum())


def test_it_is_computed_in_float32() -> None:
    logits = torch.full((1, 3, 1000), 300.0, dtype=torch.float16)
    loss = cross_entropy(logits, torch.tensor([[0, 1, 2]]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(1000), rel=1e-6)


def test_no_target_is_no_loss() -> None:
    logits = torch.randn(1, 2, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((1, 2), -100))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_shift() -> None:
    inputs, targets, lengths = shift(torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 0]))
    assert inputs.tolist() == [[1, 2], [4, 0]]
    assert targets.tolist() == [[2, 3], [0, 0]]
    assert lengths is not None
    assert lengths.tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"target has shape \[2, 1\]: accepted is \[B, T >= 2\], to predict"):
        shift(torch.zeros(2, 1, dtype=torch.int64), None, "target")


def test_bad_input() -> None:
    logits = torch.randn(2, 4, 5)
    with pytest.raises(ValueError, match="labels ranges from 0 to 5: accepted are ids from 0 to 4"):
        cross_entropy(logits, torch.tensor([[0, 1, 2, 5]] * 2), name="labels")
    with pytest.raises(ValueError, match=r"targets has shape \[2, 3\]: accepted is \[2, 4\]"):
        cross_entropy(logits, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"targets has dtype torch.float32"):
        cross_entropy(logits, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="reduction='max' cannot work"):
        cross_entropy(logits, torch.zeros(2, 4, dtype=torch.int64), reduction="max")
