"""Sound as one channel from −1 to 1: read WAV and other sound files, µ-law, resampling, log-mel features."""

import math
import struct
import wave
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.data import files

LEVELS = 256  # of µ-law
SLOWEST = 100  # the lowest sample rate for `log_mel`, which makes a frame every 10 ms
OTHERS = (".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".caf", ".w64")  # what soundfile reads
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # formats of a WAV file; EXTENSIBLE: a later field names the format


def sound_files(folder: Path) -> list[Path]:
    """The WAV files in a folder and its subfolders, sorted; if there are none, its sound files of other kinds."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [p for p in paths if p.suffix.lower() == ".wav"] or [p for p in paths if p.suffix.lower() in OTHERS]


def read_sound(path: Path) -> tuple[np.ndarray, int]:
    """(samples [T] float32, sample rate) of a WAV file; with subquad[audio] also of FLAC, Ogg and others. Channels are
    averaged."""
    if path.suffix.lower() not in OTHERS:
        return read_wav(path)
    soundfile = files.extra("soundfile", "audio", f"{path.suffix} files")
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise files.Broken(f"{path} is not a whole sound file: {error}") from error
    if not len(samples):
        raise files.Broken(f"{path} is a file without sound: accepted are one sample or more")
    return samples.mean(1), rate


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """(samples [T] float32, sample rate); channels are averaged. Accepted are integers of 8 to 32 bits and floats."""
    data = files.read(path)
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise files.Broken(f"{path} is not a WAV file: it does not begin with RIFF .. WAVE")
    chunks: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"data" and at + 8 + size > len(data):
            sizes = f"should hold {size:,} bytes of sound and holds {len(data) - at - 8:,}"
            raise files.Broken(f"{path} {sizes}: it is cut short")
        chunks.setdefault(name, data[at + 8 : at + 8 + size])
        at += 8 + size + size % 2  # chunks begin at even offsets
    form, body = chunks.get(b"fmt ", b""), chunks.get(b"data", b"")
    if len(form) < 16:
        raise files.Broken(f"{path} is a WAV file without a format")
    kind, channels, rate, _, width, bits = struct.unpack("<HHIIHH", form[:16])
    if kind == EXTENSIBLE and len(form) >= 26:
        kind = int.from_bytes(form[24:26], "little")
    if (kind, bits) not in {(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)} or channels < 1:
        raise files.Broken(f"{path} has format {kind} of {bits} bits: accepted are integers of 8 to 32 bits and floats")
    if width != channels * bits // 8:
        wanted = f"{channels * bits // 8}, for {channels} x {bits} bits"
        raise files.Broken(f"{path} has blocks of {width} bytes: accepted are {wanted}")
    if rate < 1:
        raise files.Broken(f"{path} has {rate} samples a second: accepted are 1 or more")
    body = body[: len(body) // width * width]
    if not body:
        raise files.Broken(f"{path} is a WAV file without sound: accepted are one sample or more")
    samples: np.ndarray
    if kind == FLOAT:
        samples = np.frombuffer(body, f"<f{bits // 8}").astype(np.float32)
    elif bits == 8:
        samples = np.frombuffer(body, np.uint8).astype(np.float32) / 128 - 1
    else:
        whole = np.zeros((8 * len(body) // bits, 4), np.uint8)
        whole[:, 4 - bits // 8 :] = np.frombuffer(body, np.uint8).reshape(-1, bits // 8)  # the upper bytes of 32 bits
        samples = whole.view("<i4")[:, 0].astype(np.float32) / 2**31
    return samples.reshape(-1, channels).mean(1), rate


def write_wav(path: Path, samples: np.ndarray | Tensor, rate: int) -> None:
    """Write one channel of 16 bits, which every player reads."""
    values = np.asarray(samples, dtype=np.float64).reshape(-1)
    body = (np.clip(values, -1, 1) * 32767).round().astype("<i2").tobytes()
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(body)


def mu_law(samples: np.ndarray) -> np.ndarray:
    """−1 to 1 -> 0 to 255, with finer steps for quiet sound: ITU-T G.711's curve, sgn(x) ln(1 + 255 |x|) / ln 256."""
    x = np.clip(samples, -1, 1)
    y = np.sign(x) * np.log1p((LEVELS - 1) * np.abs(x)) / math.log(LEVELS)
    return np.floor((y + 1) / 2 * (LEVELS - 1) + 0.5).astype(np.uint8)


def from_mu_law(tokens: np.ndarray) -> np.ndarray:
    y = 2 * np.asarray(tokens, np.float32) / (LEVELS - 1) - 1
    return np.sign(y) * np.expm1(np.abs(y) * np.float32(math.log(LEVELS))) / (LEVELS - 1)


def resample(samples: np.ndarray, rate: int, wanted: int, zeros: int = 6) -> np.ndarray:
    """The same sound at another rate, by a sinc with `zeros` zero crossings on each side under a Hann window."""
    if rate == wanted:
        return samples
    old, new = rate // math.gcd(rate, wanted), wanted // math.gcd(rate, wanted)
    cut = 0.99 * min(old, new)
    width = math.ceil(zeros * old / cut)
    t = -torch.arange(new, dtype=torch.float64)[:, None] / new + torch.arange(-width, width + old) / old  # [new, taps]
    t = (t * cut).clamp(-zeros, zeros)
    kernel = torch.sinc(t) * torch.cos(t * math.pi / zeros / 2) ** 2 * cut / old
    x = F.pad(torch.from_numpy(samples)[None, None], (width, width + old))
    y = F.conv1d(x, kernel[:, None].to(x.dtype), stride=old)  # [1, new, T / old]
    return y[0].T.flatten()[: math.ceil(len(samples) * new / old)].numpy()


def log_mel(samples: np.ndarray, rate: int, filters: int = 40) -> Tensor:
    """[T, filters] float32: log energies in triangular bands of equal width in mel. A frame is 25 ms long, and one
    begins every 10 ms."""
    if rate < SLOWEST:
        raise ValueError(f"rate={rate} cannot work: accepted is {SLOWEST} or more")
    window, hop = rate // 40, rate // 100
    size = max(512, 1 << (window - 1).bit_length())
    sound, hann = torch.from_numpy(samples), torch.hann_window(window)
    spectrum = torch.stft(sound, size, hop, window, hann, pad_mode="constant", return_complex=True)
    energy = spectrum.abs().square().T  # [T, size / 2 + 1]
    return (energy @ _bands(filters, size, rate)).clamp_min(1e-10).log()


def _bands(filters: int, size: int, rate: int, lowest: float = 20.0) -> Tensor:
    """[size / 2 + 1, filters], with mel = 2595 log₁₀(1 + f / 700)."""
    edges = 2595 * torch.log10(1 + torch.tensor((lowest, rate / 2)) / 700)
    edges = 700 * (10 ** (torch.linspace(float(edges[0]), float(edges[1]), filters + 2) / 2595) - 1)
    at = torch.linspace(0, rate / 2, size // 2 + 1)[:, None]
    rise = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    return torch.minimum(rise, fall).clamp_min(0)
