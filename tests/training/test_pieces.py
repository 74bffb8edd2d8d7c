"""Operations on many tensors at once: in smaller views they change the same numbers."""

import pytest
import torch
from torch import nn

from subquad import Classifier
from subquad.models.loss import cross_entropy
from subquad.training import pieces
from subquad.training.optimisers import _update_in_pieces, scale_and_clip
from subquad.training.precision import AtOnce


def test_views_cover_each_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "capturing", lambda _: True)
    tensors = [torch.zeros(shape) for shape in ((3, 5000), (0, 4), (), (8192,), (8193,))]
    others = [t.to(torch.bfloat16) for t in tensors]
    views, other_views = pieces.in_pieces(tensors, others)
    assert [len(v) for v in views] == [len(v) for v in other_views]
    assert max(len(v) for v in views) == pieces.SIZE
    torch._foreach_add_(views, 1)
    assert all(bool((t == 1).all()) for t in tensors)


def test_large_models_and_other_tensors_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(3, 5000)]
    assert pieces.in_pieces(tensors)[0] is tensors  # not recorded
    monkeypatch.setattr(pieces, "capturing", lambda _: True)
    turned = [torch.zeros(5000, 3).T]
    assert pieces.in_pieces(turned)[0] is turned
    large = [torch.zeros(pieces.SIZE * pieces.MOST + 1, dtype=torch.int8)]
    assert pieces.in_pieces(large)[0] is large


def test_updates_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for splits in (False, True):
        monkeypatch.setattr(pieces, "capturing", lambda _, splits=splits: splits)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in ((3, 5000), (40,), (), (9000,))]
        params.append(nn.Parameter(torch.randn(3)))  # without a gradient
        groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
        part = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), fused=True)
        for _ in range(3):
            for p in params[:-1]:
                p.grad = torch.randn_like(p)
            done = _update_in_pieces(part)
            assert done == (splits and bool(part.state))
            if not done:
                part.step()
        results.append([*params, *(part.state[p][key] for p in params[:-1] for key in ("step", "exp_avg_sq"))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_training_is_the_same(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Classifier(vocab=9, classes=3, dim=128, depth=1, heads=2)
    tokens, labels = torch.randint(9, (4, 7)), torch.arange(4) % 3
    results = []
    for splits in (False, True):
        monkeypatch.setattr(pieces, "capturing", lambda _, splits=splits: splits)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(AtOnce(model, torch.bfloat16)(tokens), labels)
        loss.backward()
        parameters: list[nn.Parameter] = list(model.parameters())
        norm = scale_and_clip(parameters, torch.tensor(0.5), clip, "norm", sharded=False)
        results.append([norm, *(p.grad for p in parameters)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
