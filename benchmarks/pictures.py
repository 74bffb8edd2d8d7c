"""Draw the pictures in results/.

    python benchmarks/pictures.py                        redraws scaling.png, generated.png, train.png, lra/small.png
    python benchmarks/pictures.py --checkpoint NAME      generates 64 images with it first: results/generated.json

A picture stores, as PNG text, the file it was drawn from and that file's SHA-256; a test fails if they do not match.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes

from subquad.models import LanguageModel
from subquad.models.decoding import values_of
from subquad.models.sampling import Sampling
from subquad.models.saving import read_header
from subquad.models.shipped import card, find
from subquad.report.charts import curves, draw
from subquad.report.lra import averages, published
from subquad.report.runs import read
from subquad.studies.lra.recipes import RECIPES
from subquad.studies.reproduce.tables import TABLES
from subquad.studies.results import ArenaTable, load
from subquad.tasks.write_images import image_shape, save_sheet, write_images

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
SCALING = ROOT / "src/subquad/studies/figures/cpu_causal.json"
GENERATED = ROOT / "results/generated.json"
TRAIN = ROOT / "results/train.json"
ARENA = ROOT / "results/lra/small.json"
ARENA_COLUMNS = ("listops", "text", "image", "pathfinder")
COUNT, SEED, TEMPERATURE = 64, 0, 1.0


def origin(path: Path) -> dict[str, str]:
    return {"Source": str(path.relative_to(ROOT)), "SHA-256": hashlib.sha256(path.read_bytes()).hexdigest()}


def write(name: str, device: str) -> None:
    """Generate the images and write them with the model and machine that made them."""
    checkpoint = find(name)
    model = LanguageModel.load(checkpoint, device).float()
    shape = image_shape(model)
    if shape is None:
        raise ValueError(f"{checkpoint} is not a model of images")
    found: dict[str, Any] = {
        "kind": "generated",
        "checkpoint": name,
        "result": card(checkpoint).get("result") or json.loads((checkpoint.parent / "result.json").read_text()),
        "config": read_header(checkpoint)["config"],
        "seed": SEED,
        "temperature": TEMPERATURE,
        "shape": list(shape),
        "shades": min(values_of(model), (model.config.embedding.vocab or 1) - 1),
        "images": write_images(model, COUNT, shape, sampling=Sampling(temperature=TEMPERATURE), seed=SEED)
        .flatten(1)
        .tolist(),
    }
    GENERATED.write_text(json.dumps(found) + "\n")


def scaling() -> None:
    """Time of training and decoding over length, for mechanisms with a causal form."""
    (run,) = read([SCALING])
    causal = {row.mechanism for row in run.rows if row.causal}
    spec = curves(run, causal)
    if spec is None:
        raise ValueError(f"{SCALING} holds no figures")
    titles = [view["label"].split(":")[0] for view in spec["views"]]
    wanted = [titles.index("Training step"), titles.index("Decoding")]
    draw(spec, wanted, ROOT / "results/scaling.png", origin(SCALING))


def bars(axis: Axes, names: list[str], values: list[float], marks: list[float | None], shape: str) -> None:
    """A bar for each name with its value, and a line at the value of the paper or of the comparison."""
    axis.barh(names, values, color="tab:blue")
    for row, (value, mark) in enumerate(zip(values, marks, strict=True)):
        axis.text(0, row, " " + shape.format(value), va="center", fontsize=8, color="white")
        if mark is not None:
            axis.plot([mark, mark], [row - 0.4, row + 0.4], color="black", linewidth=1.5)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)


def train() -> None:
    """Time of an iteration of whole models at a long context."""
    found = json.loads(TRAIN.read_text())
    text, size = found["text"], TABLES["enwik8"].model
    timed = {name: row["iteration_ms"]["median"] for name, row in text["captured"].items() if isinstance(row, dict)}
    figure, axis = plt.subplots(figsize=(7, 2.4), layout="constrained")
    limit = text["bar"]["must"] * timed["dense"]
    marks = [limit if name in ("fixed", "strided") else None for name in timed]
    bars(axis, list(timed), list(timed.values()), marks, "{:.0f} ms")
    axis.set_title(
        f"{size['depth']} layers of width {size['dim']}, context {text['length']:,}, batch {text['batch']}: "
        f"ms an iteration\n{found['machine']['device']}; line: {text['bar']['must']} of dense",
        fontsize=9,
    )
    figure.savefig(ROOT / "results/train.png", dpi=120, metadata=origin(TRAIN))
    plt.close(figure)


def arena() -> None:
    """Test accuracy of each mechanism on each task."""
    found = load(ARENA, ArenaTable)
    names = list(averages(found, ARENA_COLUMNS))
    figure, axes = plt.subplots(1, len(ARENA_COLUMNS), figsize=(13, 3.4), sharey=True, layout="constrained")
    for axis, column in zip(axes, ARENA_COLUMNS, strict=True):
        ours = averages(found, (column,))
        values = [ours[name][0] for name in names]
        bars(axis, names, values, [published(name, column) for name in names], "{:.1f}")
        axis.set_title(f"{RECIPES[column].title}, guessing {RECIPES[column].majority:.0f}", fontsize=9)
        axis.set_xlim(0, 100)
    figure.suptitle(f"Long Range Arena, test accuracy in %, {found.machine['device']}; line: the paper", fontsize=10)
    figure.savefig(ROOT / "results/lra/small.png", dpi=110, metadata=origin(ARENA))
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.checkpoint is not None:
        write(options.checkpoint, options.device)
    if SCALING.exists():
        scaling()
    train()
    arena()
    if GENERATED.exists():
        found = json.loads(GENERATED.read_text())
        images = torch.tensor(found["images"]).view(-1, *found["shape"])
        save_sheet(images, found["shades"], ROOT / "results/generated.png", origin(GENERATED), columns=16)


if __name__ == "__main__":
    main()
