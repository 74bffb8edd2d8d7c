"""Pretraining: hidden inputs of the training data, what counts, and the encoder that goes on to the task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from subquad.tasks.lra import fill, pathfinder
from subquad.tasks.lra.fill import Fill, Filler, best_weights, look
from subquad.tasks.lra.image import Image
from subquad.tasks.lra.listops import ListOps
from subquad.tasks.lra.pathfinder import Pathfinder
from subquad.tasks.lra.task import Labelled
from subquad.training.config import TrainingConfig
from subquad.training.train import train

TINY = {"mechanism": "linear", "dim": 8, "depth": 1, "heads": 2, "ff_dim": 8}
SETTINGS = {"train": 60, "held_out": 4, "pixels": "values"}


@pytest.fixture(autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path_factory.getbasetemp() / "fill"))
    monkeypatch.setattr(pathfinder, "CHUNK", 20)
    monkeypatch.setattr(pathfinder, "cores", lambda: 1)


def made(task: Fill, **fields: Any) -> Filler:
    torch.manual_seed(0)
    model = task.make_model({**task.model, **TINY, **fields})
    assert isinstance(model, Filler)
    return model


def pictures() -> Fill:
    return Fill(of="pathfinder", settings=SETTINGS, hidden=0.5)


def test_only_training_inputs_are_used() -> None:
    task, inner = pictures(), Pathfinder.from_options(SETTINGS)
    parts = [task.source(split) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [54, 3, 3]
    found = np.concatenate([part.batch(np.arange(len(part)), 0)["tokens"] for part in parts])
    train = inner.source("train").batch(np.arange(60), 0)
    assert (found == train["tokens"].numpy()).all()
    assert set(parts[0].batch(np.arange(2), 0)) == {"tokens"}  # no labels
    with pytest.raises(ValueError, match="accepted are 20 or more"):
        Fill(of="pathfinder", settings={"train": 12, "held_out": 4}).source("train")


@pytest.mark.parametrize("pixels", ["values", "tokens"])
def test_hidden_inputs_are_not_seen(pixels: str) -> None:
    task = Fill(of="pathfinder", settings={**SETTINGS, "pixels": pixels}, hidden=0.5)
    model = made(task).eval()
    tokens = task.source("train").batch(np.arange(2), 0)["tokens"]
    hidden = task.hide(tokens)
    assert 0.4 < float(hidden.float().mean()) < 0.6
    other = torch.where(hidden, 255 - tokens, tokens)
    with torch.no_grad():
        torch.testing.assert_close(task.filled(model, other, hidden), task.filled(model, tokens, hidden))
        seen = (task.filled(model, tokens, hidden) - task.filled(model, tokens, torch.zeros_like(hidden))).abs()
    assert float(seen.max()) > 1e-3  # the model knows where something is hidden


def test_squares_are_hidden_as_a_whole() -> None:
    task = Fill(of="pathfinder", settings=SETTINGS, hidden=0.5, patch=4)
    squares = task.hide(torch.zeros(3, 1024, dtype=torch.uint8)).view(3, 8, 4, 8, 4)
    assert (squares == squares[:, :, :1, :, :1]).all()
    assert task.way(causal=False) == "50 % hidden in squares of 4"
    for wrong in ({"of": "pathfinder", "patch": 5}, {"of": "listops", "patch": 2}, {"of": "pathfinder", "patch": 0}):
        with pytest.raises(ValueError, match="patch"):
            Fill(**wrong)


def test_the_loss_counts_hidden_places_only() -> None:
    task = pictures()
    model = made(task)
    batch = task.source("train").batch(np.arange(4), 0)
    torch.manual_seed(3)
    loss = task.loss(model, batch)
    torch.manual_seed(3)
    hidden = task.hide(batch["tokens"])
    logits = task.filled(model, batch["tokens"], hidden)
    targets = batch["tokens"].long() * 16 // 256
    expected = torch.nn.functional.cross_entropy(logits[hidden], targets[hidden], reduction="sum")
    torch.testing.assert_close(loss.total, expected)
    assert int(loss.count) == int(hidden.sum())
    model.eval()
    with torch.no_grad():
        first, second = task.measure(model, batch), task.measure(model, batch)
    assert float(first["loss"][0]) == float(second["loss"][0])  # the same places in every evaluation
    assert set(task.summary({k: (float(a), float(b)) for k, (a, b) in first.items()})) == {"loss", "right"}


def test_padding_is_no_target() -> None:
    task = Fill(of="listops", settings={"train": 60, "held_out": 4, "shortest": 4, "longest": 24}, hidden=0.9)
    batch = task.source("train").batch(np.arange(8), 0)
    loss = task.loss(made(task), batch)
    assert 0 < int(loss.count) <= int(batch["lengths"].sum())
    assert task.outputs == ListOps.vocab
    pooled = made(task, pooling="cls", mechanism=["linformer", {"rank": 4}])
    assert task.loss(pooled, batch).total.isfinite()  # a first position is not predicted


def test_a_causal_model_predicts_the_next_input() -> None:
    task = Fill(of="listops", settings={"train": 60, "held_out": 4, "shortest": 4, "longest": 24}, hidden=0.1)
    model = made(task, mechanism="gla")
    assert model.causal
    batch = task.source("train").batch(np.arange(8), 0)
    found = task.predictions(model, batch)
    assert int(found.counted.sum()) == int((batch["lengths"] - 1).sum())
    assert (found.targets == batch["tokens"][:, 1:].long()).all()
    assert task.way(causal=True) == "next input"


def test_brightness_is_predicted_by_its_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    arrays = Labelled(random.integers(0, 256, (40, 1024)).astype(np.uint8), np.zeros(40, np.uint8))
    monkeypatch.setattr(Image, "source", lambda *_: arrays)
    task = Fill(of="image", settings={"pixels": "values"}, hidden=0.5, predict="brightness")
    model, batch = made(task), task.source("train").batch(np.arange(4), 0)
    with torch.no_grad():
        measured = task.measure(model, batch)
    assert set(measured) == {"loss"}
    assert 0.4 < float(measured["loss"][0] / measured["loss"][1]) < 0.8  # of values between -1 and 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"of": "pathfindr"}, "pathfinder"), ({"hidden": 0.0}, "hidden=0"), ({"levels": 300}, "levels=300"),
        ({"of": "listops", "predict": "brightness"}, "has no pixels"), ({"predict": "colour"}, "predict"),
        ({"of": "pathfinder", "settings": {"trains": 3}}, "trains"),
    ],
)  # fmt: skip
def test_wrong_options_say_what_is_accepted(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Fill(**given)


def test_layers_that_pool_cannot_be_filled_in() -> None:
    with pytest.raises(ValueError, match="pool"):
        made(pictures(), pool=2)


def steps(count: int, **more: Any) -> TrainingConfig:
    return TrainingConfig(steps=count, batch=4, evaluate_batch=4, evaluate_batches=1, evaluate_every=2, **more)


def quiet() -> Console:
    return Console(quiet=True)


def test_the_encoder_goes_on_to_the_task(tmp_path: Path) -> None:
    task, inner = pictures(), Pathfinder.from_options(SETTINGS)
    train(task, steps(2), TINY, tmp_path / "before", device="cpu", console=quiet())
    look(tmp_path / "before", tmp_path / "filled.png", count=2)
    assert (tmp_path / "filled.png").read_bytes().startswith(b"\x89PNG")
    begun = steps(1, start=str(tmp_path / "before"), lr=1e-30, weight_decay=0.0)
    train(inner, begun, TINY, tmp_path / "on", device="cpu", console=quiet())
    from safetensors.torch import load_file

    before, on = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("before", "on"))
    assert {name for name in on if name.startswith("tower.")} == {n for n in before if n.startswith("tower.")}
    for name, tensor in on.items():
        if name.startswith("tower."):
            torch.testing.assert_close(tensor, before[name])
    # the folder may be gone once the run has a checkpoint
    again = train(inner, begun, TINY, tmp_path / "on", resume=True, device="cpu", console=quiet())
    assert again.steps == 1
    for fields, said in (
        ({**TINY, "depth": 2}, r"lacks tower\.transformer\.blocks\.1"),
        ({**TINY, "dim": 16}, r"tower\.embedding\.\S+ has shape \[\d+, 8\]: accepted is \[\d+, 16\]"),
    ):
        with pytest.raises(ValueError, match=said):
            train(inner, begun, fields, tmp_path / "wrong", device="cpu", console=quiet())
    assert not (tmp_path / "wrong").exists()
    missing = steps(1, start=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"training\.start=.*accepted is a finished run"):
        train(inner, missing, TINY, tmp_path / "wrong", device="cpu", console=quiet())


def test_what_cannot_be_looked_at_says_so(tmp_path: Path) -> None:
    task = Fill(of="listops", settings={"train": 60, "held_out": 4, "shortest": 4, "longest": 24})
    train(task, steps(1), TINY, tmp_path / "text", device="cpu", console=quiet())
    with pytest.raises(ValueError, match="accepted is pretraining on pictures"):
        look(tmp_path / "text", tmp_path / "x.png")
    assert best_weights(tmp_path / "nothing") is None
    assert fill.INNER.keys() == {"listops", "imdb", "retrieval", "image", "pathfinder", "pathx"}


def test_flips_and_crops_keep_the_pixels() -> None:
    torch.manual_seed(0)
    tokens = torch.arange(1, 1025).repeat(64, 1).to(torch.int64)
    flipped = Image(augment="flips").augmented({"tokens": tokens, "labels": tokens[:, 0]})["tokens"]
    mirrored = tokens.view(64, 32, 32).flip(2).flatten(1)
    kinds = {(row == tokens[0]).all().item() for row in flipped}
    assert kinds == {True, False}
    assert all((row == tokens[0]).all() or (row == mirrored[0]).all() for row in flipped)
    turned = Pathfinder(augment="flips").augmented({"tokens": tokens})["tokens"]
    assert len({tuple(row.tolist()) for row in turned}) == 8
    moved = Image(augment="flips+crops").augmented({"tokens": tokens})["tokens"].view(64, 32, 32)
    shifted = Image(augment="crops").augmented({"tokens": tokens})["tokens"].view(64, 32, 32)
    for picture in shifted:
        y, x = (int(place) for place in (picture == 16 * 32 + 16 + 1).nonzero()[0])  # where the middle went
        dy, dx = y - 16, x - 16
        assert max(abs(dy), abs(dx)) <= 4
        inner = picture[max(0, dy) : 32 + min(0, dy), max(0, dx) : 32 + min(0, dx)]
        whole = tokens[0].view(32, 32)
        assert (inner == whole[max(0, -dy) : 32 - max(0, dy), max(0, -dx) : 32 - max(0, dx)]).all()
        assert int((picture == 0).sum()) == 1024 - inner.numel()
    assert moved.shape == (64, 32, 32)
    assert (Image().augmented({"tokens": tokens})["tokens"] == tokens).all()
    for task, wrong in ((Pathfinder, "crops"), (Image, "flips+flips"), (Image, "turns")):
        with pytest.raises(ValueError, match=r"augment=.*none, flips"):
            task(augment=wrong)
