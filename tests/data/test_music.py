import io
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from subquad.data import audio, music
from subquad.data.files import Broken, Missing
from subquad.data.midi import Note, read_midi, write_midi

pitches = st.integers(35, 81).map(lambda pitch: 0 if pitch == 35 else pitch)
grids = arrays.arrays(np.int64, st.tuples(st.integers(1, 20), st.just(4)), elements=pitches)
few = settings(max_examples=40, deadline=None, derandomize=True)


def put(path: Path, **parts: list[np.ndarray]) -> None:
    """Arrays of arrays as NumPy writes them; silence is NaN."""
    made = {}
    for name, pieces in parts.items():
        made[name] = np.empty(len(pieces), object)
        for n, piece in enumerate(pieces):
            made[name][n] = np.where(piece == 0, np.nan, piece).astype(np.float16)
    np.savez(path, allow_pickle=True, **made)


def random_grids(count: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [np.where(draw.random((20 + n, 4)) < 0.1, 0, draw.integers(40, 70, (20 + n, 4))) for n in range(count)]


@few
@given(grids)
def test_tokens_and_grids_are_the_same(grid: np.ndarray) -> None:
    tokens = music.to_tokens(grid)
    assert tokens.max() < music.VOCAB
    np.testing.assert_array_equal(music.to_grid(tokens), grid)
    np.testing.assert_array_equal(music.to_grid(np.append(tokens, [3, 4, 5])), grid)  # an unfinished row


@few
@given(grids)
def test_a_piece_survives_as_a_midi_file(tmp_path_factory: pytest.TempPathFactory, grid: np.ndarray) -> None:
    grid[-1] = grid[0] = (60, 57, 52, 45)  # MIDI keeps no silence at the end and no silent voice
    path = tmp_path_factory.getbasetemp() / "piece.mid"
    music.save_midi(music.to_tokens(grid), path)
    np.testing.assert_array_equal(music.from_notes(read_midi(path)), grid)


def test_chords_of_one_channel_are_voices_from_the_top() -> None:
    notes = [Note(0, 1, 24), Note(0, 1, 60), Note(0, 0.5, 64), Note(0.5, 1, 100)]
    grid = music.from_notes(notes)
    assert grid.tolist() == [[64, 60, 36, 0]] * 2 + [[76, 60, 36, 0]] * 2


def test_chorales_are_read(data: Path) -> None:
    pieces = random_grids(6)
    put(data / "jsb16.npz", train=pieces[:3], valid=pieces[3:5], test=pieces[5:])
    found = music.chorales()
    assert [len(part) for part in found] == [3, 2, 1]
    for piece, read in zip(pieces, [*found.train, *found.validation, *found.test], strict=True):
        np.testing.assert_array_equal(read, piece)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (eval, ("1 / 0",))


def test_a_file_of_chorales_cannot_run_code(data: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    with zipfile.ZipFile(data / "jsb16.npz", "w") as packed:
        packed.writestr("train.npy", header.getvalue() + pickle.dumps([Evil()]))
    with pytest.raises(Broken, match=r"jsb16\.npz is not a whole file of chorales: builtins\.eval is not allowed"):
        music.chorales()


def test_a_broken_file_of_chorales_is_named(data: Path) -> None:
    put(data / "jsb16.npz", train=random_grids(2))
    with pytest.raises(Broken, match=r"jsb16\.npz is not a whole file of chorales.*valid\.npy"):
        music.chorales()
    body = (data / "jsb16.npz").read_bytes()
    (data / "jsb16.npz").write_bytes(body[:-30])
    with pytest.raises(Broken, match=r"jsb16\.npz is not a whole"):
        music.chorales()


def test_batches_of_pieces_are_padded_with_silence() -> None:
    pieces = random_grids(5)
    source = music.Pieces(pieces)
    batch = source.batch(np.array([0, 4]))
    assert len(source) == 5
    assert batch["lengths"].tolist() == [80, 96]
    assert batch["tokens"].shape == (2, 96)
    np.testing.assert_array_equal(batch["tokens"][0, :80], music.to_tokens(pieces[0]))
    assert not batch["tokens"][0, 80:].any()


def test_parts_move_by_epoch_and_keep_their_intervals() -> None:
    pieces = random_grids(5)
    source = music.Pieces(pieces, length=40, transpose=5)
    batches = [source.batch(np.array([2]), epoch)["tokens"][0] for epoch in range(30)]
    assert len({tuple(batch.tolist()) for batch in batches}) > 20
    assert (batches[3] == source.batch(np.array([2]), 3)["tokens"][0]).all()
    moves = set()
    for batch in batches:
        grid, places = music.to_grid(batch), [pieces[2][at : at + 10] for at in range(len(pieces[2]) - 9)]
        fits = [(grid - place)[place > 0] for place in places if np.array_equal(grid > 0, place > 0)]
        moves |= {int(fit[0]) for fit in fits if len(set(fit.tolist())) == 1}
    assert moves == set(range(-5, 6)) & moves
    assert len(moves) > 5


def test_impossible_pitches_are_named() -> None:
    with pytest.raises(ValueError, match="pitches 35 to 60 cannot be written: accepted are 0 and 36 to 81"):
        music.to_tokens(np.array([[60, 60, 60, 35]]))


def test_sound_is_split_by_files_and_plays_again(data: Path, tmp_path: Path) -> None:
    (data / "songs/deep").mkdir(parents=True)
    draw, parts = np.random.default_rng(0), []
    for n in range(20):
        parts.append(draw.uniform(-0.9, 0.9, 50 + n).astype(np.float32))
        audio.write_wav(data / f"songs/{'deep/' if n % 2 else ''}{n:02}.wav", parts[-1], 8000)
    corpus = music.sound("songs", 8000)
    assert corpus.name == "data/songs at 8,000 Hz"
    assert len(corpus.train) + len(corpus.validation) + len(corpus.test) == sum(map(len, parts))
    audio.write_wav(tmp_path / "out.wav", audio.from_mu_law(corpus.test), 8000)
    again, rate = audio.read_wav(tmp_path / "out.wav")
    assert rate == 8000
    files = sorted((data / "songs").rglob("*.wav"))
    expected = np.concatenate([audio.read_wav(path)[0] for path in files[9::10]])
    np.testing.assert_allclose(again, expected, atol=0.02)


def test_one_sound_is_split_by_time_and_resampled(data: Path, tmp_path: Path) -> None:
    audio.write_wav(tmp_path / "a.wav", np.sin(np.arange(4000) / 10), 16000)
    corpus = music.sound(tmp_path / "a.wav", 8000)
    assert [len(part) for part in corpus[1:]] == [1800, 100, 100]
    audio.write_wav(tmp_path / "short.wav", np.zeros(7), 8000)
    with pytest.raises(Broken, match=r"/short\.wav has 14 samples at 16,000 Hz, too few to split$"):
        music.sound(tmp_path / "short.wav", 16000)
    audio.write_wav(tmp_path / "empty.wav", np.zeros(0), 8000)
    with pytest.raises(Broken, match=r"/empty\.wav is a WAV file without sound"):
        music.sound(tmp_path / "empty.wav")
    with pytest.raises(Missing, match="none does not exist"):
        music.sound("none")
    (tmp_path / "few").mkdir()
    with pytest.raises(Broken, match="few holds 0 sound files"):
        music.sound(tmp_path / "few")


def test_sound_without_a_path_is_the_spoken_digits(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(
        Missing, match=r"fsdd/recordings is not in .*v1\.0\.9\.tar\.gz failed.*Put it there \(from http"
    ):
        music.sound()
    folder = data / "free-spoken-digit-dataset-1.0.9/recordings"
    folder.mkdir(parents=True)
    for n in range(10):
        audio.write_wav(folder / f"{n}_jackson_0.{'WAV' if n % 2 else 'wav'}", np.full(100, 0.5), 8000)
    corpus = music.sound()
    assert corpus.name == "free-spoken-digit-dataset-1.0.9/recordings at 8,000 Hz"
    assert [len(part) for part in corpus[1:]] == [800, 100, 100]


def test_a_folder_of_midi_files_is_split(tmp_path: Path) -> None:
    for n in range(20):
        write_midi(tmp_path / f"{n:02}.MID", [Note(0, 1, 40 + n)])
    found = music.midi_files(tmp_path)
    assert [len(part) for part in found] == [16, 2, 2]
    assert [int(grid[0, 0]) for grid in found.test] == [49, 59]
    with pytest.raises(Missing, match="holds 0 MIDI files"):
        music.midi_files(tmp_path / "none")
    for name in ("09", "19"):
        write_midi(tmp_path / f"{name}.MID", [])
    with pytest.raises(Broken, match=r"09\.MID holds no notes, like 2 of 20 files"):
        music.midi_files(tmp_path)


def test_a_short_last_note_is_kept() -> None:
    grid = music.from_notes([Note(0, 1, 60), Note(1, 1.1, 62)])
    assert grid[:, 0].tolist() == [60] * 4 + [62]
