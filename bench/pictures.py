"""The README's pictures, from measured figures.

    python bench/pictures.py                        results/scaling.png and results/generated.png anew
    python bench/pictures.py --checkpoint DIR       writes 64 images with that model first: results/generated.json

A picture carries, as PNG text, the file it was drawn from and that file's SHA-256; a test holds the two together.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.models import LanguageModel
from subquad.models.loop import values_of
from subquad.models.sampling import Sampling
from subquad.models.store import read_header
from subquad.report.charts import curves, draw
from subquad.report.results import read
from subquad.tasks.generate import image_shape, save_sheet, write_images

ROOT = Path(__file__).parents[1]
SCALING = ROOT / "src/subquad/bench/figures/cpu_causal.json"
GENERATED = ROOT / "results/generated.json"
COUNT, SEED, TEMPERATURE = 64, 0, 0.8


def enlarged(images: Tensor, times: int) -> Tensor:
    """[N, rows, columns, channels] with every pixel as a square."""
    return images.repeat_interleave(times, 1).repeat_interleave(times, 2)


def origin(path: Path) -> dict[str, str]:
    return {"Source": str(path.relative_to(ROOT)), "SHA-256": hashlib.sha256(path.read_bytes()).hexdigest()}


def write(checkpoint: Path, device: str) -> None:
    """The images themselves, with what made them."""
    model = LanguageModel.load(checkpoint, device)
    shape = image_shape(model)
    if shape is None:
        raise ValueError(f"{checkpoint} is no model of images")
    result = checkpoint.parent / "result.json"
    found: dict[str, Any] = {
        "kind": "generated",
        "result": json.loads(result.read_text()) if result.exists() else None,
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
    """Training and decoding over length, of those that have a causal form."""
    (run,) = read([SCALING])
    causal = {row["mechanism"] for row in run.data["rows"] if row["causal"]}
    spec = curves(run, causal)
    if spec is None:
        raise ValueError(f"{SCALING} holds no figures")
    titles = [view["label"].split(":")[0] for view in spec["views"]]
    wanted = [titles.index("Training step"), titles.index("Decoding")]
    draw(spec, wanted, ROOT / "results/scaling.png", origin(SCALING))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.checkpoint is not None:
        write(options.checkpoint, options.device)
    if SCALING.exists():
        scaling()
    if GENERATED.exists():
        found = json.loads(GENERATED.read_text())
        images = torch.tensor(found["images"]).view(-1, *found["shape"])
        save_sheet(enlarged(images, 4), found["shades"], ROOT / "results/generated.png", origin(GENERATED), columns=16)


if __name__ == "__main__":
    main()
