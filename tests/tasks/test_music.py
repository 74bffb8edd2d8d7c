import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.data import music as data
from subquad.data.audio import write_wav
from subquad.data.midi import read_midi
from subquad.models import LanguageModel
from subquad.tasks import music
from subquad.tasks.music import LONGEST, START, Music, write_pieces
from subquad.training.task import WriteOptions

pytestmark = pytest.mark.usefixtures("no_gradients")

SMALL = {"dim": 16, "depth": 1, "heads": 2}


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> data.Grids:
    pieces = [np.random.default_rng(i).integers(48, 70, (5 + i, 4)) for i in range(3)]
    made = data.Grids(pieces, pieces[:1], pieces[1:])
    monkeypatch.setattr(music, "_grids", lambda _: made)
    return made


def test_every_note_of_a_chorale_counts_and_silence_behind_it_does_not(grids: data.Grids) -> None:
    task = Music()
    model = task.make_model({**task.model, **SMALL, "mechanism": "linear"}).eval()
    assert isinstance(model, LanguageModel)
    assert model.config.embedding.vocab == START + 1
    assert model.config.embedding.shape == (LONGEST // 4, 4)
    batch = task.source("test").batch(np.arange(2), 0)
    loss = task.loss(model, batch)
    assert int(loss.count) == 4 * (6 + 7)
    batch["tokens"][0, 24:] = 5
    torch.testing.assert_close(task.loss(model, batch).total, loss.total)
    found = task.summary({"nats": (float(loss.total), float(loss.count))})
    assert 3 < found["bits/token"] < 9


def test_every_note_of_a_piece_longer_than_any_chorale_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [np.random.default_rng(i).integers(48, 70, (rows, 4)) for i, rows in enumerate((4800, 640, 641, 9))]
    monkeypatch.setattr(music, "_grids", lambda _: data.Grids(pieces, pieces, pieces))
    source = Music().source("test")
    batch = source.batch(np.arange(len(source)), 0)
    assert batch["tokens"].shape == (8 + 1 + 2 + 1, LONGEST)
    assert int(batch["lengths"].sum()) == 4 * sum(map(len, pieces))
    rows = [row[:n] for row, n in zip(batch["tokens"], batch["lengths"], strict=True)]
    assert torch.cat(rows).tolist() == np.concatenate([data.to_tokens(piece) for piece in pieces]).tolist()


def test_sound_is_cut_into_windows(tmp_path: Path) -> None:
    write_wav(tmp_path / "tone.wav", np.sin(np.arange(4000) / 5) / 2, 8000)
    task = Music(set="audio", path=str(tmp_path / "tone.wav"), length=64)
    model = task.make_model({**task.model, **SMALL, "mechanism": ["strided", {"stride": 8}]}).eval()
    source = task.source("test")
    counts = [int(task.measure(model, source.batch(np.array([i]), 0))["nats"][1]) for i in range(len(source))]
    assert sum(counts) == 200 - 1
    assert len(task.source("train")) > len(source)


def test_pieces_can_be_played(tmp_path: Path, grids: data.Grids) -> None:
    notes = Music().make_model({**Music.model, **SMALL, "mechanism": "linear"})
    assert isinstance(notes, LanguageModel)
    paths = write_pieces(notes, WriteOptions(out=tmp_path / "a" / "piece", count=2, steps=64, seed=1))
    assert [path.name for path in paths] == ["piece_1.mid", "piece_2.mid"]
    played = read_midi(paths[0])
    assert played
    assert {note.channel for note in played} <= {0, 1, 2, 3}
    assert max(note.end for note in played) <= 4.0  # 16 sixteenths
    sound = Music(set="audio", length=64).make_model({**Music.model, **SMALL, "mechanism": "linear"})
    assert isinstance(sound, LanguageModel)
    (path,) = write_pieces(sound, WriteOptions(out=tmp_path / "sound", count=1), rate=4000)
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnframes(), file.getsampwidth()) == (4000, 64, 2)
    with pytest.raises(ValueError, match="vocab"):
        write_pieces(LanguageModel(vocab=9, **SMALL), WriteOptions(out=tmp_path / "none"))


def test_wrong_settings_raise() -> None:
    with pytest.raises(ValueError, match="chorales"):
        Music(set="opera")
    with pytest.raises(ValueError, match="length"):
        Music(length=1)
