"""Images from a saved model: find their shape, generate them, save them as PNG."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor

from subquad.checks import check_count, refuse
from subquad.disk import check_file
from subquad.machine import free_bytes
from subquad.models import LanguageModel
from subquad.models.decoding import values_of
from subquad.models.footprint import bytes_per_stream, largest_batch
from subquad.models.sampling import Sampling
from subquad.tasks.kinds import positions_of
from subquad.training.task import WriteOptions, Written

ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp")
LEGIBLE = 64  # pixels: smaller images are enlarged to about this side
Shape = tuple[int, int, int]  # rows, columns, channels


def image_shape(model: LanguageModel, asked: str | None = None, known: tuple[int, ...] | None = None) -> Shape | None:
    """Rows, columns and channels of the images a model writes; None if it writes something else.

    It is the first of these that exists: the shape `asked` for ("28x28", "32x32x3"), the model's own grid of positions,
    the `known` shape of its training data, and with a mixture head a square of max_length bytes.
    """
    if asked is not None:
        parts = asked.lower().split("x")
        if not 2 <= len(parts) <= 3 or not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
            raise ValueError(f"shape={asked!r} cannot work: accepted is rows x columns [x channels], such as 32x32x3")
        numbers = tuple(int(part) for part in parts)
    elif (given := model.config.embedding.shape or known) is not None:
        numbers = tuple(given)
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


def _square(pixels: int) -> Shape:
    for channels in (1, 3):
        side = math.isqrt(pixels // channels)
        if side * side * channels == pixels:
            return side, side, channels
    raise ValueError(f"max_length={pixels} is not a square image: pass its shape, such as --shape 28x28")


def write_images(
    model: LanguageModel,
    count: int,
    shape: Shape,
    *,
    upper: Tensor | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    compile: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """`count` images, in as few batches as memory allows: [count, rows, columns, channels] from 0 to the last shade.

    A sequence begins with the last token of the vocabulary. upper [pixels]: the first rows, which the model continues.
    """
    check_count("count", count)
    start = (model.config.embedding.vocab or 1) - 1
    sampling = sampling or Sampling()
    if values_of(model) > start:  # a pixel is a shade, never the start token
        sampling = Sampling(**{**vars(sampling), "exclude": (*sampling.exclude, start)})
    pixels = math.prod(shape)
    given = torch.zeros(0, dtype=torch.int64) if upper is None else upper.flatten().long()
    prompt = torch.cat((torch.tensor([start]), given))
    batch = max(1, largest_batch(model, pixels))
    parts = []
    for first in range(0, count, batch):
        size = min(batch, count - first)
        options: dict[str, Any] = {"sampling": sampling, "seed": seed + first, "compile": compile, "told": progress}
        new = model.generate(prompt.expand(size, -1), pixels - len(given), **options)
        parts.append(torch.cat((given.expand(size, -1), new.cpu()), 1))
    return torch.cat(parts).view(count, *shape)


def read_upper(path: Path, shape: Shape, shades: int) -> Tensor:
    """The upper half of an image file, in the model's shades: [pixels]."""
    from matplotlib.image import imread

    try:
        picture = torch.tensor(imread(path)).float()
    except Exception as error:  # each format has its own errors for a damaged file
        why = "there is no such file" if isinstance(error, FileNotFoundError) else "this is not one, or it is damaged"
        raise ValueError(f"complete={str(path)!r} cannot work: accepted is an image file, and {why}") from error
    picture = picture / 255 if float(picture.max()) > 1 else picture
    picture = picture[..., None] if picture.ndim == 2 else picture[..., :3]
    if tuple(picture.shape[:2]) != shape[:2]:
        raise ValueError(f"{path} has {tuple(picture.shape[:2])} pixels: accepted is {shape[:2]}")
    picture = picture.mean(-1, keepdim=True) if shape[2] == 1 else picture.expand(*shape)
    return (picture[: shape[0] // 2] * (shades - 1)).round().flatten().long()


def save_sheet(
    images: Tensor, shades: int, path: Path, origin: dict[str, str] | None = None, columns: int | None = None
) -> None:
    """Images side by side in one PNG, by default in a square; `origin` becomes text inside the file."""
    from matplotlib.image import imsave

    times = _enlargement(images.shape[1:])
    images = images.repeat_interleave(times, 1).repeat_interleave(times, 2)
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = -(-len(images) // columns)
    sheet = torch.zeros(rows * columns, *images.shape[1:])
    sheet[: len(images)] = images / (shades - 1)
    framed = torch.nn.functional.pad(sheet, (0, 0, 0, 1, 0, 1), value=0.5)
    picture = framed.unflatten(0, (rows, columns)).permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, picture.expand(-1, -1, 3).clamp(0, 1).numpy(), metadata=origin)


def write_png(
    model: LanguageModel, options: WriteOptions, console: Console, known: tuple[int, ...] | None = None
) -> Written:
    """Generate with a progress bar and save one sheet; `known` is the shape of the images it was trained on."""
    count, out = 64 if options.count is None else options.count, options.out or Path("generated.png")
    check_file("out", out, ENDINGS)
    shape = image_shape(model, options.shape, known)
    if shape is None:
        raise ValueError("neither this model nor its card gives the shape of its images: pass it, as in --shape 28x28")
    check_count("count", count)
    # a sheet needs memory for tokens of 8 bytes and for the enlarged pixels
    size = 16 * math.prod(shape) * (1 + _enlargement(shape) ** 2)
    most = free_bytes("cpu") // size
    if most < 1:
        refuse("shape", "x".join(map(str, shape)), f"a smaller one: an image takes {size:,} bytes of memory")
    if count > most:
        refuse("count", count, f"at most {most:,} at this shape: more do not fit into memory")
    shades = min(values_of(model), (model.config.embedding.vocab or 0) - 1)
    upper = None if options.complete is None else read_upper(options.complete, shape, shades)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    state = bytes_per_stream(model, math.prod(shape))
    console.print(f"{count} streams, {state:,} bytes of state each", highlight=False, soft_wrap=True)
    begun = time.perf_counter()
    with Progress(*columns, console=console) as bar:
        pixels = math.prod(shape) - (0 if upper is None else len(upper))
        task = bar.add_task(f"{count} images, pixel by pixel", total=pixels)
        images = write_images(
            model, count, shape, upper=upper, sampling=options.sampling, seed=options.seed, compile=options.compile,
            progress=lambda step: bar.update(task, completed=step),
        )  # fmt: skip
    rate = count / (time.perf_counter() - begun)
    save_sheet(images, shades, out)
    console.print(f"{count} images, {rate:.1f} images/s: {out}", soft_wrap=True)
    return Written([out], rate)


def _enlargement(shape: tuple[int, ...]) -> int:
    """The side of the square that a pixel of a small image becomes, so that a person can see it."""
    return max(1, LEGIBLE // max(shape[:2]))
