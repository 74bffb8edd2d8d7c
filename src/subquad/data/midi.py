"""Standard MIDI files, read and written with mido (subquad[midi]): notes in quarter notes."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from subquad.data import files

TICKS = 480  # a quarter note, in files written here
LONGEST = 100_000  # quarter notes in a file, 14 hours at 120 a minute: a damaged time could fill the memory


class Note(NamedTuple):
    start: float  # in quarter notes from the beginning
    end: float
    pitch: int  # 60 is middle C
    velocity: int = 80
    channel: int = 0  # 0 to 15; 9 is the drums


def require_mido() -> Any:
    """The package that reads and writes MIDI files."""
    return files.extra("mido", "midi", "MIDI files")


def read_midi(path: Path) -> list[Note]:
    """The notes of a file of format 0 or 1, sorted by start, then pitch. A note without an end ends with its track."""
    mido = require_mido()
    if files.read(path)[:4] != b"MThd":
        raise files.Broken(f"{path} is not a MIDI file: it does not begin with MThd")
    try:
        file = mido.MidiFile(path, clip=True)
    except EOFError:
        raise files.Broken(f"{path} is cut short, or holds a track that ends within an event") from None
    except (ArithmeticError, LookupError, OSError, ValueError, mido.KeySignatureError) as error:
        raise files.Broken(f"{path} is not a whole MIDI file: {error}") from error
    ticks = file.ticks_per_beat & 0xFFFF
    if file.type > 1 or ticks & 0x8000 or not ticks:
        kind = f"MIDI of format {file.type}, division {ticks}"
        raise files.Broken(f"{path} is {kind}: accepted are formats 0 and 1, in ticks")
    notes: list[Note] = []
    for track in file.tracks:
        if sum(message.time for message in track) > LONGEST * ticks:
            raise files.Broken(f"{path} lasts too long: accepted are at most {LONGEST:,} quarter notes")
        notes.extend(_read_track(track, ticks))
    return sorted(notes, key=lambda note: (note.start, note.pitch, note.channel))


def _read_track(track: Iterable[Any], ticks: int) -> Iterator[Note]:
    sounding: dict[tuple[int, int], list[tuple[float, int]]] = {}  # (channel, pitch) -> (start, velocity) of each
    now = 0
    for message in track:
        now += message.time
        if message.type == "end_of_track":
            break
        if message.type == "note_on" and message.velocity:
            sounding.setdefault((message.channel, message.note), []).append((now / ticks, message.velocity))
        elif message.type in ("note_on", "note_off") and sounding.get((message.channel, message.note)):
            start, velocity = sounding[message.channel, message.note].pop(0)
            yield Note(start, now / ticks, message.note, velocity, message.channel)
    for (channel, pitch), left in sounding.items():
        yield from (Note(start, now / ticks, pitch, velocity, channel) for start, velocity in left)


def write_midi(path: Path, notes: Iterable[Note], tempo: float = 100.0, programs: Sequence[int] = (0,)) -> None:
    """Write one track. `programs` are the instruments of channels 0, 1, ..: 0 piano, 19 church organ, 52 choir."""
    mido = require_mido()
    events = [(0, 0, mido.MetaMessage("set_tempo", tempo=round(60e6 / tempo)))]
    events += [(0, 0, mido.Message("program_change", channel=c, program=program)) for c, program in enumerate(programs)]
    for note in notes:
        if not (0 <= note.pitch < 128 and 0 < note.velocity < 128 and 0 <= note.channel < 16 and note.start >= 0):
            raise ValueError(f"{note} cannot be written: pitch and velocity are below 128, channels below 16")
        start, end = round(note.start * TICKS), round(note.end * TICKS)
        about = {"note": note.pitch, "channel": note.channel}
        events.append((start, 2, mido.Message("note_on", velocity=note.velocity, **about)))
        events.append((max(end, start + 1), 1, mido.Message("note_off", velocity=0, **about)))
    events.sort(key=lambda event: event[:2])  # notes that end come before notes that begin at the same time
    track = mido.MidiTrack()
    now = 0
    for when, _, message in events:
        track.append(message.copy(time=when - now))
        now = when
    mido.MidiFile(type=0, ticks_per_beat=TICKS, tracks=[track]).save(path)
