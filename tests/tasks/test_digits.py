import math
from pathlib import Path

import torch
from rich.console import Console

from subquad.data import digits
from subquad.studies.demo import picture
from subquad.tasks.digits import Digits
from subquad.tasks.write_images import write_images
from subquad.training.config import TrainingConfig
from subquad.training.log import logged
from subquad.training.train import learn, train

PIXELS, START = digits.SIDE**2, digits.SHADES


def test_the_data_is_the_published_one() -> None:
    training, test = digits.load()
    assert len(training.labels) == 1500
    assert len(test.labels) == 297
    assert training.pixels.shape == (1500, 64)
    images = torch.cat((training.pixels, test.pixels))
    assert images.min() == 0
    assert images.max() == digits.SHADES - 1
    counts = torch.cat((training.labels, test.labels)).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(digits.load()[0].pixels, training.pixels)


def test_generation_as_an_rnn_has_the_probabilities_of_the_parallel_form() -> None:
    model = Digits().make_model({}).eval()
    images = digits.load()[1].pixels[:3]
    start = torch.full((3, 1), START)
    parallel = model(torch.cat((start, images), dim=1)[:, :-1])
    state = model.init_state(3)
    for t in range(PIXELS):
        token = images[:, t - 1] if t else start[:, 0]
        logits, state = model.step(token, state)
        torch.testing.assert_close(logits, parallel[:, t], rtol=1e-4, atol=1e-4)
    made = write_images(model, 2, (8, 8, 1))
    assert made.shape == (2, 8, 8, 1)
    assert made.max() < digits.SHADES


def test_training_in_memory_learns_and_reports_each_step() -> None:
    watched: list[tuple[int, float]] = []
    training = TrainingConfig(steps=12, batch=8, lr=3e-3, log_every=1)
    fields = {"dim": 16, "depth": 1}
    learned = learn(Digits(), fields, training, watch=lambda step, nats: watched.append((step, nats)), examples=50)
    assert watched == learned.curve
    assert [step for step, _ in watched] == list(range(1, 13))
    assert learned.measures["bits/dim"] < watched[0][1] / math.log(2)


def test_training_in_memory_makes_the_updates_of_a_run(tmp_path: Path) -> None:
    training = TrainingConfig(steps=4, batch=8, log_every=2)
    result = train(Digits(), training, {"dim": 16, "depth": 1}, tmp_path, device="cpu", console=Console(quiet=True))
    learned = learn(Digits(), {**Digits.model, "dim": 16, "depth": 1}, training)
    lines = [line for line in logged(tmp_path) if line["split"] == "train"]
    assert learned.curve == [(line["step"], line["loss"]) for line in lines]
    assert result.best_step == 4  # so that both test the last weights
    assert learned.measures == result.test


def test_the_picture_shows_real_and_generated(tmp_path: Path) -> None:
    images = digits.load()[1].pixels[:32]
    picture(images, images, tmp_path / "digits.png", "generated")
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
