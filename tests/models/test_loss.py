import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from subquad.machine import allocation_peak
from subquad.models import LanguageModel
from subquad.models.loss import cross_entropy, pieces_of, shift


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


def model_and_batch(tie: bool, dtype: torch.dtype) -> tuple[LanguageModel, dict[str, Any]]:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"dim": 16, "depth": 1, "heads": 2, "mechanism": "linear", "tie": tie}
    targets = torch.randint(90, (3, 17))
    targets[0, 4:8] = 7
    batch = {"tokens": torch.randint(90, (3, 17)), "lengths": torch.tensor([17, 9, 0]), "targets": targets}
    return LanguageModel(vocab=90, **fields).to(dtype), {**batch, "ignore_index": 7}


def loss_and_gradients(model: LanguageModel, batch: dict[str, Any], bf16: bool = False, **how: Any) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model.loss(**batch, **how)
    return [loss.detach(), *torch.autograd.grad(3 * loss, list(model.parameters()))]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("pieces", [2, 5, 60])
def test_a_loss_in_pieces_is_the_loss(tie: bool, reduction: str, pieces: int) -> None:
    model, batch = model_and_batch(tie, torch.float64)
    whole, parts = (loss_and_gradients(model, batch, reduction=reduction, pieces=n) for n in (1, pieces))
    for got, want in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(**batch, reduction=reduction, pieces=pieces), parts[0])
    nothing = {**batch, "lengths": torch.zeros(3, dtype=torch.int64)}
    assert all((t == 0).all() for t in loss_and_gradients(model, nothing, reduction=reduction, pieces=pieces))


@pytest.mark.parametrize("bf16", [False, True])
def test_a_loss_in_pieces_is_as_exact(bf16: bool) -> None:
    exact = loss_and_gradients(*model_and_batch(False, torch.float64), pieces=1)
    whole, parts = (loss_and_gradients(*model_and_batch(False, torch.float32), bf16, pieces=n) for n in (1, 8))
    for a, b, want in zip(parts, whole, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - want).norm() <= 2 * (b - want).norm() + 1e-6 * want.norm()


def test_large_vocabularies_have_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2^26 logits on; the peak of memory falls by most of what the logits took."""
    assert pieces_of(torch.empty(2**11, 2**5, 1, device="meta"), torch.empty(2**10, 1, device="meta")) == 8
    assert pieces_of(torch.empty(2**11, 2**5, 1, device="meta"), torch.empty(2**10 - 1, 1, device="meta")) == 1
    assert pieces_of(torch.empty(2**16, 1, device="meta").half(), torch.empty(2**10, 1, device="meta")) == 1
    model = LanguageModel(vocab=4000, dim=8, depth=1, heads=1, mechanism="linear")
    tokens = torch.randint(4000, (4, 257))

    def peak() -> int:
        return allocation_peak(lambda: model.loss(tokens).backward())

    at_once = peak()
    monkeypatch.setattr("subquad.models.loss.LARGE", 2**20)
    logits = 4 * tokens[:, 1:].numel() * 4000
    assert peak() < at_once - 1.5 * logits
    assert at_once > 2 * logits


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, while it traces
def test_a_compiled_loss_in_pieces_takes_other_lengths() -> None:
    model, _ = model_and_batch(False, torch.float32)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda tokens: model.loss(tokens, pieces=4), backend=graphs, fullgraph=True)
    for size in (17, 25, 31, 17, 44):
        tokens = torch.randint(90, (3, size))
        loss = compiled(tokens)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        whole = loss_and_gradients(model, {"tokens": tokens}, pieces=1)
        torch.testing.assert_close(loss.detach(), whole[0])
        for got, want in zip(grads, whole[1:], strict=True):
            torch.testing.assert_close(3 * got, want, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
    assert graphs.frame_count == 2  # one for the first length, one for all others


def test_other_heads_are_called() -> None:
    """A layer that was put in the place of the head, or a hook on it, sees all vectors."""
    model, batch = model_and_batch(False, torch.float64)
    want = loss_and_gradients(model, batch)
    seen: list[Any] = []
    assert model.head is not None
    hook = model.head.register_forward_hook(lambda *given: seen.append(given))
    got = loss_and_gradients(model, batch)
    assert len(seen) == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match=r"pieces=2 cannot work: accepted is None or 1 with a mixture, or with a head"):
        model.loss(**batch, pieces=2)
    hook.remove()
    model.head = torch.nn.Sequential(model.head)  # type: ignore[assignment]
    torch.testing.assert_close(model.loss(**batch).detach(), want[0])
    model, batch = model_and_batch(False, torch.float64)
    with pytest.raises(ValueError, match="pieces=0 cannot work"):
        model.loss(**batch, pieces=0)
    with pytest.raises(ValueError, match='pieces=2 cannot work: accepted is None or 1 with reduction="none"'):
        model.loss(**batch, pieces=2, reduction="none")
