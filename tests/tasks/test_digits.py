import json
import math
from pathlib import Path

import torch
from rich.console import Console

from subquad.data import digits
from subquad.tasks.digits import PIXELS, START, demo, generate, make_model, with_start


def test_the_data_is_the_published_one() -> None:
    training, test = digits.load()
    assert len(training.labels) == 1500
    assert len(test.labels) == 297
    assert training.images.shape == (1500, 64)
    images = torch.cat((training.images, test.images))
    assert images.min() == 0
    assert images.max() == digits.SHADES - 1
    counts = torch.cat((training.labels, test.labels)).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(digits.load()[0].images, training.images)


def test_generation_as_an_rnn_has_the_probabilities_of_the_parallel_form() -> None:
    model = make_model().eval()
    images = digits.load()[1].images[:3]
    parallel = model(with_start(images)[:, :-1])
    state = model.init_state(3)
    for t in range(PIXELS):
        token = images[:, t - 1] if t else torch.full((3,), START)
        logits, state = model.step(token, state)
        torch.testing.assert_close(logits, parallel[:, t], rtol=1e-4, atol=1e-4)
    made = generate(model, 2)
    assert made.shape == (2, PIXELS)
    assert made.max() < digits.SHADES


def test_the_demo_learns_and_saves(tmp_path: Path) -> None:
    figures = demo(tmp_path, steps=12, console=Console(quiet=True), count=16)
    assert figures["test_bits_per_dim"] < math.log2(digits.SHADES)
    assert (tmp_path / "digits.png").stat().st_size > 1000
    assert json.loads((tmp_path / "figures.json").read_text())["images_per_second"] > 0
    assert (tmp_path / "model" / "model.safetensors").exists()
