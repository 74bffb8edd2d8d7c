"""A saved model writes: images to a PNG with a progress bar, text to the terminal as it comes."""

import codecs
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from subquad.checks import check_count, refuse
from subquad.machine import free_bytes
from subquad.models import LanguageModel
from subquad.models.config import GRIDS
from subquad.models.decoding import values_of
from subquad.models.footprint import bytes_per_stream, largest_batch
from subquad.models.sampling import Sampling
from subquad.tasks.images import SETS, Images

BYTES = 256
LEGIBLE = 64  # pixels of a side
Shape = tuple[int, int, int]  # rows, columns, channels
OPTIONS = {  # of the command line, by what a model writes; those on sampling are for all
    "images": ("count", "out", "shape", "complete", "compile"),
    "music": ("count", "out", "steps"),
    "text": ("prompt", "steps"),
}


def check_options(folder: Path, writes: str, given: Mapping[str, Any]) -> None:
    """Refuse options (those that are not None) that have no meaning for what this model writes."""
    for name, value in given.items():
        if value is not None and name not in OPTIONS[writes]:
            accepted = ", ".join(f"--{option}" for option in OPTIONS[writes])
            refuse(name, str(value), f"{accepted} and those of sampling for {folder}, which writes {writes}")


def image_shape(model: LanguageModel, asked: str | None = None, card: Mapping[str, Any] | None = None) -> Shape | None:
    """Rows, columns and channels of the images a model writes; None if it writes something else.

    As asked ("28x28", "32x32x3"), as the model's own grid of positions says, as the set has it that it was trained on
    by its card, or, for a mixture head, a square of max_length bytes.
    """
    if asked is not None:
        parts = asked.lower().split("x")
        if not 2 <= len(parts) <= 3 or not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
            raise ValueError(f"shape={asked!r} cannot work: accepted is rows x columns [x channels], such as 32x32x3")
        numbers = [int(part) for part in parts]
    elif model.config.embedding.shape is not None:
        numbers = list(model.config.embedding.shape)
    elif card and card.get("task") == Images.name:
        data = card.get("data")
        name = data.get("set") if isinstance(data, Mapping) else None
        if not isinstance(name, str) or name not in SETS:
            raise ValueError(f"the card of this model names no set of images that is known ({name!r}): pass its shape")
        numbers = list(SETS[name].shape)
    elif model.config.mixture is not None and model.config.transformer.max_length is not None:
        numbers = _square(model.config.transformer.max_length)
    else:
        return None
    longest = positions_of(model)
    if asked is not None and longest is not None and math.prod(numbers) > longest:
        refuse("shape", asked, f"at most {longest:,} pixels, the positions that this model has")
    rows, columns, channels = (*numbers, 1)[:3]
    if channels not in (1, 3):
        raise ValueError(f"channels={channels} cannot work: accepted is 1 (grey) or 3 (red, green, blue)")
    return rows, columns, channels


def positions_of(model: LanguageModel) -> int | None:
    """Tokens that a model can write at most; None where positions are not learned."""
    embedding = model.config.embedding
    if embedding.positions in GRIDS and embedding.shape is not None:
        return math.prod(embedding.shape)
    return model.config.transformer.max_length if embedding.positions == "learned" else None


def _square(pixels: int) -> list[int]:
    for channels in (1, 3):
        side = math.isqrt(pixels // channels)
        if side * side * channels == pixels:
            return [side, side, channels]
    raise ValueError(f"max_length={pixels} is no square image: say its shape, such as --shape 28x28")


def write_images(
    model: LanguageModel,
    count: int,
    shape: Shape,
    *,
    upper: Tensor | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    compile: bool | None = None,
    told: Callable[[int], None] | None = None,
) -> Tensor:
    """`count` images, in as few batches as memory allows: [count, rows, columns, channels] from 0 to the last shade.

    A sequence begins with the last token of the vocabulary. upper [pixels]: the first rows, which are then continued.
    """
    if count < 1:
        raise ValueError(f"count={count} cannot work: accepted is an integer of at least 1")
    start = (model.config.embedding.vocab or 1) - 1
    sampling = sampling or Sampling()
    if values_of(model) > start:
        sampling = Sampling(**{**vars(sampling), "exclude": (*sampling.exclude, start)})
    pixels = math.prod(shape)
    given = torch.zeros(0, dtype=torch.int64) if upper is None else upper.flatten().long()
    prompt = torch.cat((torch.tensor([start]), given))
    most = max(1, largest_batch(model, pixels))
    parts = []
    for first in range(0, count, most):
        rows = min(most, count - first)
        new = model.generate(
            prompt.expand(rows, -1),
            pixels - len(given),
            sampling=sampling,
            seed=seed + first,
            compile=compile,
            told=told,
        )
        parts.append(torch.cat((given.expand(rows, -1), new.cpu()), 1))
    return torch.cat(parts).view(count, *shape)


def read_upper(path: Path, shape: Shape, shades: int) -> Tensor:
    """The upper half of an image file, in the model's shades: [pixels]."""
    from matplotlib.image import imread

    try:
        picture = torch.tensor(imread(path)).float()
    except Exception as error:  # each format has errors of its own for a damaged file
        why = "there is no such file" if isinstance(error, FileNotFoundError) else "this is none, or damaged"
        raise ValueError(f"complete={str(path)!r} cannot work: accepted is an image file, and {why}") from error
    picture = picture / 255 if float(picture.max()) > 1 else picture
    picture = picture[..., None] if picture.ndim == 2 else picture[..., :3]
    if tuple(picture.shape[:2]) != shape[:2]:
        raise ValueError(f"{path} has {tuple(picture.shape[:2])} pixels: accepted is {shape[:2]}")
    picture = picture.mean(-1, keepdim=True) if shape[2] == 1 else picture.expand(*shape)
    return (picture[: shape[0] // 2] * (shades - 1)).round().flatten().long()


def save_sheet(
    images: Tensor,
    shades: int,
    path: Path,
    origin: dict[str, str] | None = None,
    columns: int | None = None,
) -> None:
    """Images side by side in one PNG, by default as a square; `origin` becomes text inside the file."""
    from matplotlib.image import imsave

    times = _enlarged(images.shape[1:])
    images = images.repeat_interleave(times, 1).repeat_interleave(times, 2)
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = -(-len(images) // columns)
    sheet = torch.zeros(rows * columns, *images.shape[1:])
    sheet[: len(images)] = images / (shades - 1)
    framed = torch.nn.functional.pad(sheet, (0, 0, 0, 1, 0, 1), value=0.5)
    picture = framed.unflatten(0, (rows, columns)).permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, picture.expand(-1, -1, 3).clamp(0, 1).numpy(), metadata=origin)


def images_to_png(
    model: LanguageModel,
    out: Path,
    console: Console,
    *,
    count: int = 64,
    shape: Shape,
    complete: Path | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    compile: bool | None = None,
) -> float:
    """Generate with a progress bar, save, say how fast; returns images a second."""
    _check_room(count, shape)
    vocab = model.config.embedding.vocab or 0
    shades = min(values_of(model), vocab - 1)
    upper = None if complete is None else read_upper(complete, shape, shades)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    state = bytes_per_stream(model, math.prod(shape))
    console.print(f"{count} streams, {state:,} bytes of state each", highlight=False, soft_wrap=True)
    begun = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        pixels = math.prod(shape) - (0 if upper is None else len(upper))
        task = progress.add_task(f"{count} images, pixel by pixel", total=pixels)
        images = write_images(
            model, count, shape, upper=upper, sampling=sampling, seed=seed, compile=compile,
            told=lambda step: progress.update(task, completed=step),
        )  # fmt: skip
    rate = count / (time.perf_counter() - begun)
    save_sheet(images, shades, out)
    console.print(f"{count} images, {rate:.1f} images/s: {out}", soft_wrap=True)
    return rate


def _check_room(count: int, shape: Shape) -> None:
    """Refuse more images than fit into memory as a sheet, however fast they are written."""
    check_count("count", count)
    size = 16 * math.prod(shape) * (1 + _enlarged(shape) ** 2)  # tokens of 8 bytes, and pixels on their way to a file
    most = free_bytes("cpu") // size
    if most < 1:
        refuse("shape", "x".join(map(str, shape)), f"a smaller one: an image takes {size:,} bytes of memory")
    if count > most:
        refuse("count", count, f"at most {most:,} at this shape: more do not fit into memory")


def _enlarged(shape: tuple[int, ...]) -> int:
    """A pixel of a small image is a square of so many, so that a person can see it."""
    return max(1, LEGIBLE // max(shape[:2]))


def text_to_terminal(
    model: LanguageModel,
    console: Console,
    *,
    prompt: str = "",
    steps: int = 500,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> None:
    """Write byte by byte, as it comes; a model over other tokens writes their numbers."""
    vocab = model.config.embedding.vocab or 0
    check_count("steps", steps)
    try:
        tokens = list(prompt.encode())
    except UnicodeEncodeError:
        refuse("prompt", prompt, "text in UTF-8")
    tokens = tokens or [vocab - 1 if vocab > BYTES else ord("\n")]
    if vocab < BYTES:
        if prompt and not all(part.isdecimal() and len(part) < 10 for part in prompt.split()):
            raise ValueError(
                f"prompt={prompt!r} cannot work: this model has {vocab} tokens; give their numbers, as 3 1 4"
            )
        tokens = [int(part) for part in prompt.split()] or [vocab - 1]
        if max(tokens) >= vocab:
            refuse("prompt", prompt, f"tokens from 0 to {vocab - 1}")
    longest = positions_of(model)
    if longest is not None and len(tokens) + steps - 1 > longest:
        refuse("steps", steps, f"at most {longest:,} with the prompt's {len(tokens):,}, the positions of this model")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    console.print(prompt, end="", markup=False, highlight=False, soft_wrap=True)
    for token in model.stream(tokens, steps, sampling=sampling, seed=seed):
        part = f" {token}" if vocab < BYTES else decoder.decode(bytes([token])) if token < BYTES else ""
        console.print(part, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
