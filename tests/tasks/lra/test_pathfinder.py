from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.data import files
from subquad.tasks.lra import pathfinder
from subquad.tasks.lra.pathfinder import Pathfinder, make, read_folder


def test_a_set_is_the_same_however_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = make(32, 20, workers=1), make(32, 20, workers=2)
    assert (alone["tokens"] == together["tokens"]).all()
    assert alone["labels"].sum() == 10


def test_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    monkeypatch.setattr(pathfinder, "CHUNK", 6)
    task = Pathfinder(train=8, held_out=2)
    assert [len(task.source(split)) for split in ("train", "validation", "test")] == [8, 2, 2]
    batch = task.source("train").batch(np.array([0, 5]), 0)
    assert batch["tokens"].shape == (2, 1024)
    assert task.positions() == 1024


def test_pixels_are_tokens_or_brightness() -> None:
    batch = {"tokens": torch.tensor([[0, 255, 128, 64]], dtype=torch.uint8).repeat(2, 256)}
    fields = {"mechanism": "linear", "dim": 8, "depth": 1, "heads": 2}
    tokens, values = Pathfinder(), Pathfinder(pixels="values")
    assert tokens.logits(tokens.make_model(fields), batch).shape == (2, 2)
    model = values.make_model(fields)
    assert model.config.embedding.features == 1
    seen = torch.tensor([-1.0, 1.0, 128 / 127.5 - 1, 64 / 127.5 - 1]).repeat(2, 256)[..., None]
    torch.testing.assert_close(values.logits(model, batch), model(seen))
    with pytest.raises(ValueError, match="pixels"):
        Pathfinder(pixels="grey")


def release(folder: Path, count: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """A folder like the arena's: PNG files, and lists that are text files despite the ending .npy."""
    from matplotlib.image import imsave

    pictures = np.random.default_rng(0).integers(0, 256, (count, 32, 32)).astype(np.uint8)
    labels = np.arange(count) % 2
    (folder / "metadata").mkdir(parents=True)
    for part in (0, 1):
        (folder / "imgs" / str(part)).mkdir(parents=True)
        lines = []
        for n in range(part, count, 2):
            grey = np.dstack([pictures[n]] * 3)
            imsave(folder / "imgs" / str(part) / f"sample_{n}.png", grey)
            lines.append(f"imgs/{part} sample_{n}.png {n} {labels[n]} 1.0 14 4 2 0.5 1 1")
        (folder / "metadata" / f"{part}.npy").write_text("\n".join(lines) + "\n")
    return pictures, labels


def test_the_arena_s_pictures_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / "data"))
    pictures, labels = release(tmp_path / "curv_contour_length_14")
    (tmp_path / "curv_contour_length_14" / "imgs" / "0" / "sample_0.png").write_bytes(b"")  # known to be empty
    found = read_folder(tmp_path / "curv_contour_length_14", 32)
    known = {picture.tobytes(): label for picture, label in zip(pictures[1:], labels[1:], strict=True)}
    assert {row.tobytes(): label for row, label in zip(found["tokens"], found["labels"], strict=True)} == known
    task = Pathfinder(folder=str(tmp_path / "curv_contour_length_14"))
    assert [len(task.source(s)) for s in ("train", "validation", "test")] == [9, 1, 1]
    release(tmp_path / "other" / "curv_contour_length_14", count=30)
    (tmp_path / "other" / "curv_contour_length_14" / "metadata" / "combined.npy").write_text("")
    other = Pathfinder(folder=str(tmp_path / "other" / "curv_contour_length_14"))
    assert len(other.source("train")) == 24  # not those of the other folder with the same name


def test_splits_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    task = Pathfinder(train=12, held_out=4)
    parts = [task.source("train"), task.source("validation"), task.source("test")]
    found = np.concatenate([part.batch(np.arange(len(part)), 0)["tokens"] for part in parts])
    assert (found == make(32, 20)["tokens"]).all()
    with pytest.raises(ValueError, match="held_out=0"):
        Pathfinder(held_out=0)


def test_what_is_no_such_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(files.Missing, match="metadata"):
        read_folder(tmp_path, 32)
    release(tmp_path / "x")
    with pytest.raises(files.Broken, match=r"picture of .*: accepted are \(128, 128, 3\)"):
        read_folder(tmp_path / "x", 128)


def test_pictures_and_lists_that_are_broken_are_named(tmp_path: Path) -> None:
    release(tmp_path)
    good = (tmp_path / "metadata" / "0.npy").read_text()
    for line in ("", "imgs/0 sample_0.png 0 7", "imgs/0 sample_0.png 0 yes"):
        (tmp_path / "metadata" / "0.npy").write_text(f"{good}{line}\n")
        with pytest.raises(files.Broken, match=r"0\.npy:7 is .*accepted are a folder"):
            read_folder(tmp_path, 32)
    (tmp_path / "metadata" / "0.npy").write_text(f"{good}imgs/0 absent.png 0 1\n")
    with pytest.raises(files.Broken, match=r"absent\.png, which .*0\.npy:7 names"):
        read_folder(tmp_path, 32)
    (tmp_path / "metadata" / "0.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(files.Broken, match=r"0\.npy holds 0x93"):
        read_folder(tmp_path, 32)
    (tmp_path / "metadata" / "0.npy").write_text("")
    with pytest.raises(files.Broken, match="names 6 pictures: accepted are 10 or more"):
        read_folder(tmp_path, 32)
    picture = tmp_path / "imgs" / "1" / "sample_3.png"
    picture.write_bytes(picture.read_bytes()[:100])
    with pytest.raises(files.Broken, match=r"sample_3\.png.* cannot be read"):
        read_folder(tmp_path, 32)
