"""Standard MIDI files, read and written: notes with their times in quarter notes, and the tempo."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from subquad.data import files

TICKS = 480  # a quarter note, in files written here
LONGEST = 100_000  # quarter notes in a file, 14 hours at 120 a minute: a broken time would fill the memory
TEMPO, END = 0x51, 0x2F  # kinds of meta events


class Note(NamedTuple):
    start: float  # quarter notes from the beginning
    end: float
    pitch: int  # 60 is middle C
    velocity: int = 80
    channel: int = 0  # 0 to 15; 9 is the drums


class Song(NamedTuple):
    notes: list[Note]  # by start, then pitch
    tempos: list[tuple[float, float]]  # (from this quarter note on, quarter notes a minute)


def read_midi(path: Path) -> Song:
    """Formats 0 and 1. A note that is never ended ends with its track."""
    data = files.read(path)
    if data[:4] != b"MThd" or len(data) < 14:
        raise files.Broken(f"{path} is not a MIDI file: it does not begin with MThd")
    kind, tracks, ticks = struct.unpack(">HHH", data[8:14])
    if kind > 1 or ticks & 0x8000 or not ticks:
        raise files.Broken(f"{path} is MIDI of format {kind}, division {ticks}: accepted are formats 0 and 1, in ticks")
    at, notes, tempos = 8 + int.from_bytes(data[4:8], "big"), list[Note](), list[tuple[float, float]]()
    for _ in range(tracks):
        size = int.from_bytes(data[at + 4 : at + 8], "big")
        body, at = data[at + 8 : at + 8 + size], at + 8 + size
        if len(body) < size or not size:
            raise files.Broken(f"{path} is cut short: {tracks} tracks are promised, the last one here is not whole")
        try:
            _read_track(body, ticks, notes, tempos)
        except IndexError:
            raise files.Broken(f"{path} holds a track that ends within an event") from None
        except OverflowError:
            raise files.Broken(f"{path} lasts too long: accepted are at most {LONGEST:,} quarter notes") from None
    notes.sort(key=lambda note: (note.start, note.pitch, note.channel))
    return Song(notes, sorted(tempos) or [(0.0, 120.0)])


def _read_track(body: bytes, ticks: int, notes: list[Note], tempos: list[tuple[float, float]]) -> None:
    sounding: dict[tuple[int, int], list[tuple[float, int]]] = {}  # (channel, pitch) -> (start, velocity) of each
    at = now = status = 0
    while at < len(body):
        wait, at = _number(body, at)
        now += wait
        if now > LONGEST * ticks:
            raise OverflowError
        when = now / ticks
        if body[at] >= 0x80:
            status, at = body[at], at + 1  # else the last status goes on
        if status in (0xF0, 0xF7):
            size, at = _number(body, at)
            at += size
        elif status == 0xFF:
            meta = body[at]
            size, at = _number(body, at + 1)
            if meta == TEMPO and size == 3:
                tempos.append((when, 60e6 / max(1, int.from_bytes(body[at : at + 3], "big"))))
            at += size
            if meta == END:
                break
        else:
            channel, event = status & 15, status >> 4
            pitch, velocity = body[at], body[at + 1] if event not in (0xC, 0xD) else 0
            at += 1 if event in (0xC, 0xD) else 2
            if event == 9 and velocity:
                sounding.setdefault((channel, pitch), []).append((when, velocity))
            elif event in (8, 9) and sounding.get((channel, pitch)):
                start, loud = sounding[channel, pitch].pop(0)
                notes.append(Note(start, when, pitch, loud, channel))
    for (channel, pitch), left in sounding.items():
        notes.extend(Note(start, now / ticks, pitch, loud, channel) for start, loud in left)


def write_midi(path: Path, notes: Iterable[Note], tempo: float = 100.0, programs: Sequence[int] = (0,)) -> None:
    """One track. `programs` are the instruments of channels 0, 1, ..: 0 a piano, 19 a church organ, 52 a choir."""
    events = [(0, 0, bytes((0xFF, TEMPO, 3)) + round(60e6 / tempo).to_bytes(3, "big"))]
    events += [(0, 0, bytes((0xC0 | channel, program))) for channel, program in enumerate(programs)]
    for note in notes:
        if not (0 <= note.pitch < 128 and 0 < note.velocity < 128 and 0 <= note.channel < 16 and note.start >= 0):
            raise ValueError(f"{note} cannot be written: pitch and velocity are below 128, channels below 16")
        start, end = round(note.start * TICKS), round(note.end * TICKS)
        events.append((start, 2, bytes((0x90 | note.channel, note.pitch, note.velocity))))
        events.append((max(end, start + 1), 1, bytes((0x80 | note.channel, note.pitch, 0))))
    events.sort(key=lambda event: event[:2])  # at one time a note ends before the next of its pitch begins
    body, now = bytearray(), 0
    for when, _, message in events:
        body += bytes(_digits(when - now)) + message
        now = when
    body += bytes((0, 0xFF, END, 0))
    head = struct.pack(">4sIHHH", b"MThd", 6, 0, 1, TICKS)
    Path(path).write_bytes(head + struct.pack(">4sI", b"MTrk", len(body)) + body)


def _number(body: bytes, at: int) -> tuple[int, int]:
    """(a number of seven bits a byte, of which all but the last have the eighth set; the place after it)"""
    value = 0
    while True:
        value, at = value << 7 | body[at] & 0x7F, at + 1
        if body[at - 1] < 0x80:
            return value, at


def _digits(value: int) -> Iterator[int]:
    shift = max(0, (value.bit_length() - 1) // 7 * 7)
    while shift:
        yield 0x80 | value >> shift & 0x7F
        shift -= 7
    yield value & 0x7F
