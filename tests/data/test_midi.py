import struct
import sys
from pathlib import Path

import mido
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.files import Broken
from subquad.data.midi import Note, read_midi, write_midi


def song(*tracks: bytes, kind: int = 1, ticks: int = 96) -> bytes:
    head = struct.pack(">4sIHHH", b"MThd", 6, kind, len(tracks), ticks)
    return head + b"".join(b"MTrk" + struct.pack(">I", len(body)) + body for body in tracks)


END = b"\x00\xff\x2f\x00"


def test_a_file_written_by_others_is_read(tmp_path: Path) -> None:
    tempo = b"\x00\xff\x51\x03\x07\xa1\x20" + b"\x00\xff\x03\x04name" + END  # 500,000 µs a quarter, and a title
    notes = (
        b"\x00\xc0\x05"  # a program
        b"\x00\x90\x3c\x40"  # C, and by running status E after a quarter
        b"\x60\x40\x50"
        b"\x00\xf0\x03\x01\x02\xf7"  # system exclusive, skipped; it ends running status
        b"\x60\x90\x3c\x00"  # velocity 0 ends a note
        b"\x81\x40\x80\x40\x40"  # 192 ticks later, by two bytes
        b"\x00\x91\x30\x33"  # without an end: it ends with the track
        b"\x30\xe0\x00\x40"  # pitch bend
    ) + END
    (tmp_path / "a.mid").write_bytes(song(tempo, notes))
    found = read_midi(tmp_path / "a.mid")
    assert found == [Note(0, 2, 60, 64, 0), Note(1, 4, 64, 80, 0), Note(4, 4.5, 48, 51, 1)]


notes = st.lists(
    st.tuples(
        st.integers(0, 400), st.integers(1, 300), st.integers(0, 127), st.integers(1, 127), st.integers(0, 15)
    ).map(lambda n: Note(n[0] / 8, (n[0] + n[1]) / 8, n[2], n[3], n[4])),
    max_size=30,
    unique_by=lambda note: (note.pitch, note.channel),  # overlapping notes of one pitch cannot be told apart
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(notes, st.integers(20, 300))
def test_written_notes_are_read_back(tmp_path_factory: pytest.TempPathFactory, notes: list[Note], tempo: int) -> None:
    path = tmp_path_factory.getbasetemp() / "written.mid"
    write_midi(path, notes, tempo, programs=(52, 52))
    found = read_midi(path)
    assert found == sorted(notes, key=lambda note: (note.start, note.pitch, note.channel))
    (track,) = mido.MidiFile(path).tracks
    (event,) = (message for message in track if message.type == "set_tempo")
    assert event is track[0]
    assert event.time == 0
    assert 60e6 / event.tempo == pytest.approx(tempo, rel=1e-4)


def test_a_repeated_note_stays_two(tmp_path: Path) -> None:
    twice = [Note(0, 1, 60), Note(1, 2, 60)]
    write_midi(tmp_path / "a.mid", twice)
    assert read_midi(tmp_path / "a.mid") == twice


def test_the_bytes_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """The expected bytes were written before mido was used."""
    notes = [Note(0, 1, 60), Note(1, 2, 60), Note(0.5, 3.25, 64, 100, 3), Note(2, 2, 36, 1, 15)]
    write_midi(tmp_path / "a.mid", notes, 83.0, (52, 52, 0, 19))
    assert (tmp_path / "a.mid").read_bytes().hex() == (
        "4d546864000000060000000101e04d54726b0000003b00ff51030b07cc00c03400c13400c20000c31300903c508170934064817080"
        "3c0000903c508360803c00009f2401018f2400845783400000ff2f00"
    )


def test_without_mido_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mido", None)
    for use in (lambda: read_midi(tmp_path / "a.mid"), lambda: write_midi(tmp_path / "a.mid", [])):
        with pytest.raises(ImportError, match=r"MIDI files need the package mido.*pip install 'subquad\[midi\]'"):
            use()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"RIFF0000", "not a MIDI file"),
        (song(END, kind=2), "format 2"),
        (song(END, ticks=0xE728), "division 59176"),
        (song(END)[:-2], "cut short"),
        (song(END, END)[:-8], "cut short"),
        (song(b"\x00\x90\x3c"), "ends within an event"),
        (song(b"\x81\x81"), "ends within an event"),
        (song(b"\x00\x90\x3c\x40" + b"\xff\xff\xff\x7f\x3c\x00" + END), "lasts too long: accepted are at most 100,000"),
        (song(b"\xff" * 200 + END), "lasts too long"),  # more than a float can hold
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, body: bytes, said: str) -> None:
    (tmp_path / "a.mid").write_bytes(body)
    with pytest.raises(Broken, match=said) as error:
        read_midi(tmp_path / "a.mid")
    assert str(tmp_path / "a.mid") in str(error.value)


def test_an_impossible_note_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pitch=128"):
        write_midi(tmp_path / "a.mid", [Note(0, 1, 128)])
