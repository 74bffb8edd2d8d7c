import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from subquad import LanguageModel
from subquad.cli import app
from subquad.models import LSTM
from subquad.models.sampling import Sampling
from subquad.tasks import TASKS, writer_of
from subquad.tasks.digits import Digits
from subquad.tasks.images import Images
from subquad.tasks.text import Text
from subquad.tasks.write_images import image_shape, read_upper, save_sheet, write_images
from subquad.training.task import WriteOptions

run = CliRunner(env={"COLUMNS": "160"})
START = 17  # start token of the digits


def make_model() -> LanguageModel:
    return Digits().make_model({})


def test_the_shape_of_images_comes_from_the_model_or_the_user() -> None:
    sizes = {"dim": 16, "depth": 1, "heads": 2}
    assert image_shape(make_model()) == (8, 8, 1)
    assert image_shape(LanguageModel(vocab=257, mixture=10, max_length=784, **sizes)) == (28, 28, 1)
    assert image_shape(LanguageModel(vocab=257, mixture=10, max_length=3072, **sizes)) == (32, 32, 3)
    text = LanguageModel(vocab=256, **sizes)
    assert image_shape(text) is None
    assert image_shape(text, "4x5x3") == (4, 5, 3)
    assert image_shape(text, known=(32, 32, 3)) == (32, 32, 3)
    with pytest.raises(ValueError, match="card of this model does not name a known set of images"):
        Images.write(text, {"set": "mnits"}, WriteOptions(), Console(quiet=True))
    for wrong in ("4", "4x0", "axb", "4x4x2"):
        with pytest.raises(ValueError, match="cannot work"):
            image_shape(text, wrong)


def test_images_continue_an_upper_half_and_survive_a_file(tmp_path: Path) -> None:
    model = make_model().eval()
    images = write_images(model, 3, (8, 8, 1), seed=5)
    assert images.shape == (3, 8, 8, 1)
    assert images.max() < START
    save_sheet(images[:1], START, tmp_path / "one.png")
    save_sheet(images, START, tmp_path / "b" / "three.png")
    from matplotlib.image import imread, imsave

    assert imread(tmp_path / "b" / "three.png").shape[:2] == (130, 130)  # two of 64, where a pixel is 8 x 8, and a line
    imsave(tmp_path / "real.png", (images[1].expand(-1, -1, 3) / (START - 1)).numpy())
    upper = read_upper(tmp_path / "real.png", (8, 8, 1), START)
    assert torch.equal(upper, images[1, :4].flatten())
    again = write_images(model, 2, (8, 8, 1), upper=upper, seed=6)
    assert torch.equal(again[:, :4], images[1, :4].expand(2, 4, 8, 1))
    assert torch.equal(again[0], images[1])  # the same seed continues like the image
    with pytest.raises(ValueError, match="pixels"):
        read_upper(tmp_path / "b" / "three.png", (8, 8, 1), START)
    (tmp_path / "no.png").write_bytes(b"nothing")
    for wrong in ("missing.png", "no.png"):
        with pytest.raises(ValueError, match="accepted is an image file"):
            read_upper(tmp_path / wrong, (8, 8, 1), START)


def test_text_is_written_as_it_comes() -> None:
    torch.manual_seed(0)
    model = LanguageModel(vocab=256, dim=16, depth=1, heads=2, mechanism="linear")
    console = Console(record=True, width=80)
    Text.write(model, {}, WriteOptions(prompt="hé", steps=12), console)
    expected = "hé" + bytes(model.generate(list("hé".encode()), 12).tolist()).decode(errors="replace")
    assert [c for c in console.export_text() if c.isprintable()][:6] == [c for c in expected if c.isprintable()][:6]
    numbers = LanguageModel(vocab=9, dim=16, depth=1, heads=2, mechanism="linear")
    console = Console(record=True, width=80)
    Text.write(numbers, {}, WriteOptions(prompt="1 2", steps=3), console)
    assert console.export_text().split() == ["1", "2", *map(str, numbers.generate([1, 2], 3).tolist())]
    with pytest.raises(ValueError, match="9 tokens"):
        Text.write(numbers, {}, WriteOptions(prompt="hello"), console)


def test_the_command_line_makes_a_picture_and_says_how_fast(tmp_path: Path) -> None:
    make_model().save(tmp_path / "model")
    out = tmp_path / "digits.png"
    result = run.invoke(app, ["generate", str(tmp_path / "model"), "--count", "5", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "images/s" in result.output
    assert "5 streams" in result.output
    assert "bytes of state each" in result.output
    assert "64/64" in result.output
    assert out.read_bytes().startswith(b"\x89PNG")
    result = run.invoke(app, ["generate", str(tmp_path / "model"), "--count", "0", "--out", str(out)])
    assert result.exit_code == 2
    assert "count=0" in result.output
    LanguageModel(vocab=256, dim=16, depth=1, heads=2, mechanism="linear").save(tmp_path / "text")
    result = run.invoke(app, ["generate", str(tmp_path / "text"), "--prompt", "hello", "--steps", "4"])
    assert result.output.startswith("hello")


def test_what_writes_nothing_says_so(tmp_path: Path) -> None:
    LSTM(vocab=256, dim=8, depth=1).save(tmp_path)
    result = run.invoke(app, ["generate", str(tmp_path)])
    assert result.exit_code == 2
    assert "is a saved LSTM, which generates nothing here" in " ".join(result.output.split())


def test_a_run_over_images_writes_images_whatever_its_head(tmp_path: Path) -> None:
    LanguageModel(vocab=18, max_length=64, dim=16, depth=1, heads=2, mechanism="linear").save(tmp_path / "model")
    (tmp_path / "config.json").write_text('{"task": "images", "data": {"set": "digits"}}')
    out = tmp_path / "digits.png"
    result = run.invoke(app, ["generate", str(tmp_path), "--count", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_task_that_writes_is_that_of_the_card_else_what_the_model_looks_like() -> None:
    text = LanguageModel(vocab=256, dim=16, depth=1, heads=2)
    for name in ("images", "digits", "text", "music"):
        assert writer_of(text, {"task": name}) is TASKS[name]
    assert writer_of(text, {}) is writer_of(text, {"task": "copy"}) is writer_of(text, {"task": ["?"]}) is Text
    assert writer_of(text, {}, shape="4x4") is writer_of(make_model(), {}) is Images


def test_every_task_that_writes_says_which_options_it_uses() -> None:
    known = {field.name for field in dataclasses.fields(WriteOptions)} - {"sampling", "seed"}
    for task in TASKS.values():
        assert bool(task.writes) == bool(task.write_options)
        assert set(task.write_options) <= known
    assert WriteOptions().sampling == Sampling()
