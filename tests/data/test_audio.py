import struct
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.data import audio
from subquad.data.files import Broken


def tone(rate: int, hertz: float = 440.0, seconds: float = 0.5) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def riff(
    kind: int,
    bits: int,
    body: bytes,
    channels: int = 1,
    rate: int = 8000,
    extra: bytes = b"",
    width: int | None = None,
) -> bytes:
    width = channels * bits // 8 if width is None else width
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits) + extra
    note = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # a chunk of odd size, to be skipped
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + note + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def test_written_files_can_be_read_by_us_and_by_others(tmp_path: Path) -> None:
    samples = tone(12000)
    audio.write_wav(tmp_path / "a.wav", samples, 12000)
    found, rate = audio.read_wav(tmp_path / "a.wav")
    assert rate == 12000
    np.testing.assert_allclose(found, samples, atol=1 / 32000)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.getparams()[:4] == (1, 2, 12000, 6000)
        played = np.frombuffer(file.readframes(6000), "<i2")
    np.testing.assert_allclose(played / 32767, samples, atol=1 / 32000)


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_integers_of_all_widths_are_read(tmp_path: Path, bits: int) -> None:
    samples = tone(8000)
    whole = np.round(samples * (2 ** (bits - 1) - 1)).astype(np.int64)
    if bits == 8:
        body = (whole + 128).astype(np.uint8).tobytes()
    else:
        body = whole.astype("<i4").view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()
    (tmp_path / "a.wav").write_bytes(riff(audio.PCM, bits, body))
    found, rate = audio.read_wav(tmp_path / "a.wav")
    assert rate == 8000
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, samples, atol=2 / 2 ** (bits - 1) + 1e-6)


def test_floats_channels_and_the_extensible_form_are_read(tmp_path: Path) -> None:
    left, right = tone(8000), tone(8000, 300)
    both = np.stack((left, right), 1)
    (tmp_path / "a.wav").write_bytes(riff(audio.FLOAT, 32, both.astype("<f4").tobytes(), channels=2))
    np.testing.assert_allclose(audio.read_wav(tmp_path / "a.wav")[0], (left + right) / 2, atol=1e-6)
    extra = struct.pack("<HHIH14s", 22, 16, 0, audio.PCM, b"\0" * 14)
    body = np.round(left * 32767).astype("<i2").tobytes()
    (tmp_path / "b.wav").write_bytes(riff(audio.EXTENSIBLE, 16, body, extra=extra))
    np.testing.assert_allclose(audio.read_wav(tmp_path / "b.wav")[0], left, atol=1e-4)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"ID3 music", "not a WAV file"),
        (riff(1, 16, b"\0" * 100)[:-10], "should hold 100 bytes of sound and holds 90: it is cut short"),
        (riff(1, 16, b"")[:12], "without a format"),
        (riff(1, 16, b"\0\0")[:36], "without sound"),
        (riff(0x55, 16, b"\0\0"), "format 85 of 16 bits: accepted are"),
        (riff(1, 12, b"\0\0"), "format 1 of 12 bits"),
        (riff(1, 16, b""), "without sound"),
        (riff(1, 16, b"\0"), "without sound"),  # half a sample
        (riff(1, 16, b"\0\0", rate=0), "0 samples a second: accepted are 1 or more"),
        (riff(1, 16, b"\0\0", width=0), "blocks of 0 bytes: accepted are 2, for 1 x 16 bits"),
        (riff(1, 16, b"\0" * 12, channels=2, width=3), "blocks of 3 bytes: accepted are 4, for 2 x 16 bits"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, body: bytes, said: str) -> None:
    (tmp_path / "a.wav").write_bytes(body)
    with pytest.raises(Broken, match=said) as error:
        audio.read_wav(tmp_path / "a.wav")
    assert str(tmp_path / "a.wav") in str(error.value)


@pytest.mark.parametrize("ending", ["flac", "ogg", "aiff"])
def test_other_files_are_read_with_soundfile(tmp_path: Path, ending: str) -> None:
    import soundfile

    left, right = tone(8000), tone(8000, 300)
    soundfile.write(tmp_path / f"a.{ending}", np.stack((left, right), 1), 8000)
    assert audio.sound_files(tmp_path) == [tmp_path / f"a.{ending}"]
    found, rate = audio.read_sound(tmp_path / f"a.{ending}")
    assert (rate, found.shape) == (8000, left.shape)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, (left + right) / 2, atol=0.1 if ending == "ogg" else 1e-4)
    audio.write_wav(tmp_path / "a.wav", left, 8000)
    assert audio.sound_files(tmp_path) == [tmp_path / "a.wav"]  # if there are WAV files, only these are read
    (tmp_path / "b.flac").write_bytes(b"fLaC and nothing else")
    with pytest.raises(Broken, match=r"b\.flac is not a whole sound file"):
        audio.read_sound(tmp_path / "b.flac")


def test_without_soundfile_wav_is_read_and_for_others_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    audio.write_wav(tmp_path / "a.wav", tone(8000), 8000)
    assert audio.read_sound(tmp_path / "a.wav")[1] == 8000
    with pytest.raises(ImportError, match=r"\.flac files need the package soundfile.*'subquad\[audio\]'"):
        audio.read_sound(tmp_path / "a.flac")


def test_mu_law_is_the_curve_and_its_inverse() -> None:
    tokens = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(audio.mu_law(audio.from_mu_law(tokens)), tokens)
    assert audio.mu_law(np.array([-1.0, 0.0, 1.0, 2.0])).tolist() == [0, 128, 255, 255]
    x = np.linspace(-1, 1, 10001)
    error = np.abs(audio.from_mu_law(audio.mu_law(x)) - x)
    step = np.log(256) / 255  # half a step of the curve, and the curve's slope
    assert np.all(error <= 1.05 * step * (np.abs(x) + 1 / 255))


@pytest.mark.parametrize(
    ("rate", "wanted"), [(44100, 12000), (8000, 16000), (16000, 8000), (8000, 8000), (11025, 8000)]
)
def test_another_rate_is_the_same_sound(rate: int, wanted: int) -> None:
    found = audio.resample(tone(rate), rate, wanted)
    expected = tone(wanted)
    assert len(found) == -(-len(tone(rate)) * wanted // rate)
    inner = slice(200, min(len(found), len(expected)) - 200)
    np.testing.assert_allclose(found[inner], expected[inner], atol=2e-3)


def test_resampling_filters_out_high_frequencies() -> None:
    assert np.abs(audio.resample(tone(16000, 6000), 16000, 8000)[200:-200]).max() < 5e-3


@pytest.mark.parametrize("hertz", [200, 1000, 3000])
def test_a_tone_is_loudest_in_its_band(hertz: int) -> None:
    features = audio.log_mel(tone(8000, hertz), 8000)
    assert features.shape == (51, 40)
    assert features.dtype == torch.float32
    mel = 2595 * np.log10(1 + np.array([20, hertz, 4000]) / 700)
    band = (mel[1] - mel[0]) / (mel[2] - mel[0]) * 41 - 1
    assert bool(((features[5:-5].argmax(1) - band).abs() <= 1).all())


def test_silence_and_a_single_sample_have_finite_features() -> None:
    for samples in (np.zeros(8000, np.float32), np.ones(1, np.float32)):
        assert bool(audio.log_mel(samples, 8000).isfinite().all())


@pytest.mark.parametrize("rate", [0, 50, 99])
def test_a_rate_without_a_sample_for_each_frame_is_named(rate: int) -> None:
    with pytest.raises(ValueError, match=f"rate={rate} cannot work: accepted is 100 or more"):
        audio.log_mel(np.zeros(1000, np.float32), rate)
    assert bool(audio.log_mel(np.zeros(1000, np.float32), audio.SLOWEST).isfinite().all())
