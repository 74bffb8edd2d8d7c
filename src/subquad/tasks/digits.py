"""The first demo: a small transformer learns real handwritten digits pixel by pixel, then writes new ones as an RNN."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from subquad.data import digits
from subquad.models import LanguageModel

PIXELS = digits.SIDE**2
START = digits.SHADES  # the token before the first pixel


def make_model(mechanism: str = "linear", **changes: Any) -> LanguageModel:
    """A pixel-by-pixel model of 8 x 8 images: 17 shades and a start token, positions by row and column."""
    return LanguageModel(
        **{
            "vocab": digits.SHADES + 1,
            "dim": 64,
            "depth": 3,
            "heads": 4,
            "mechanism": mechanism,
            "positions": "grid",
            "shape": (digits.SIDE, digits.SIDE),
            "max_length": PIXELS,
            "dropout": 0.1,
            **changes,
        }
    )


def with_start(images: Tensor) -> Tensor:
    """[N, 64] -> [N, 65]: every pixel, the first one included, is predicted from what comes before it."""
    return torch.cat((torch.full_like(images[:, :1], START), images), dim=1)


def train(model: LanguageModel, images: Tensor, steps: int, progress: Progress, batch: int = 64) -> list[float]:
    """AdamW with warm-up and cosine decay; returns bits/dim a step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, betas=(0.9, 0.98))
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda n: min((n + 1) / warmup, 0.5 * (1 + math.cos(math.pi * n / steps)))
    )
    generator = torch.Generator().manual_seed(0)
    task = progress.add_task("training", total=steps, info="")
    curve = []
    model.train()
    for _ in range(steps):
        rows = images[torch.randint(len(images), (batch,), generator=generator)]
        loss = model.loss(with_start(rows))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        curve.append(loss.item() / math.log(2))
        progress.update(task, advance=1, info=f"{curve[-1]:.3f} bits/dim")
    return curve


@torch.no_grad()
def bits_per_dim(model: LanguageModel, images: Tensor) -> float:
    model.eval()
    return float(model.loss(with_start(images))) / math.log(2)


@torch.no_grad()
def generate(model: LanguageModel, count: int, seed: int = 0) -> Tensor:
    """`count` images at once, one pixel a step, from a state of constant size: [count, 64]."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    state = model.init_state(count, capacity=PIXELS)
    token = torch.full((count,), START)
    pixels = []
    for _ in range(PIXELS):
        logits, state = model.step(token, state)
        shades = logits[:, : digits.SHADES].float().softmax(-1)  # a pixel is a shade, never the start token
        token = torch.multinomial(shades, 1, generator=generator)[:, 0]
        pixels.append(token)
    return torch.stack(pixels, dim=1)


def picture(real: Tensor, generated: Tensor, path: Path, columns: int = 16) -> None:
    """Two sheets one above the other: images of the data set, and images of the model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(8, 4.6), layout="constrained")
    for axis, images, title in zip(axes, (real, generated), ("real", "generated, one pixel at a time"), strict=True):
        rows = len(images) // columns
        sheet = images[: rows * columns].view(rows, columns, digits.SIDE, digits.SIDE)
        sheet = torch.nn.functional.pad(sheet, (1, 0, 1, 0)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        axis.imshow(sheet.numpy(), cmap="gray_r", vmin=0, vmax=digits.SHADES - 1)
        axis.set_title(title, fontsize=10)
        axis.set_axis_off()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def demo(out: Path, steps: int, console: Console, count: int = 64) -> dict[str, Any]:
    """Train, measure on images the model has not seen, generate, save; returns what it wrote to figures.json."""
    if steps < 1:
        raise ValueError(f"steps={steps} cannot work: accepted is an integer of at least 1")
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    training, test = digits.load()
    model = make_model()
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"linear transformer, {parameters:,} parameters; {len(training.images):,} digits of 8 x 8 pixels")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started = time.perf_counter()
    with Progress(*columns, TextColumn("{task.fields[info]}"), console=console) as progress:
        curve = train(model, training.images, steps, progress)
    trained = time.perf_counter() - started
    loss = bits_per_dim(model, test.images)
    started = time.perf_counter()
    images = generate(model, count)
    rate = count / (time.perf_counter() - started)
    model.save(out / "model")
    picture(test.images[:count], images, out / "digits.png")
    figures = {
        "test_bits_per_dim": loss,
        "uniform_bits_per_dim": math.log2(digits.SHADES),
        "images_per_second": rate,
        "generated": count,
        "steps": steps,
        "training_seconds": trained,
        "parameters": parameters,
        "training_bits_per_dim": curve,
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2))
    guess = figures["uniform_bits_per_dim"]
    console.print(f"test {loss:.3f} bits/dim (guessing: {guess:.3f}), trained in {trained:.0f} s")
    console.print(f"generated {count} digits as an RNN, {rate:.0f} images/s, state of constant size")
    console.print(f"picture: {out / 'digits.png'}   figures: {out / 'figures.json'}")
    return figures
