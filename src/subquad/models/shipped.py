"""Trained models that ship with the project, by name: checkpoints/NAME/ with weights, config and a card.

    model.safetensors, config.json    written by Model.save, in bfloat16
    card.json                         its task, data and figures; how, when and on which machine it was trained

`subquad generate NAME` looks in ./checkpoints, in checkpoints/ of the data folder, in the installed package, which has
a copy, and in the source tree.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from subquad.checks import nearest, plain_name
from subquad.disk import read_sealed, write_sealed
from subquad.models import Model, load
from subquad.models.saving import CONFIG, WEIGHTS, check_finite

CARD, FOLDER = "card.json", "checkpoints"
LARGEST = 20_000_000  # bytes of weights that are shipped


class NotFound(FileNotFoundError, ValueError):
    """No saved model by that name or in that folder."""


def folders() -> Iterator[Path]:
    """The folders in which named checkpoints are searched."""
    yield Path(FOLDER)
    if os.environ.get("SUBQUAD_DATA"):
        yield Path(os.environ["SUBQUAD_DATA"]).expanduser() / FOLDER
    here = Path(__file__).resolve()
    yield here.parents[1] / FOLDER  # of an installed package
    yield here.parents[3] / FOLDER  # of a source tree


def names() -> list[str]:
    """The named checkpoints that exist."""
    return sorted({path.parent.name for folder in folders() for path in folder.glob(f"*/{WEIGHTS}")})


def find(name: str | Path, option: str = "checkpoint") -> Path:
    """The folder of a saved model: a path to one, a run folder that holds one in model/, or a checkpoint's name.

    `option`: what errors call it.
    """
    path = Path(name)
    for folder in (path, path / "model", *(folder / name for folder in folders())):
        if (folder / WEIGHTS).is_file():
            return folder
    if (path / "checkpoints").is_dir():
        raise NotFound(f"{path} is a run without a model yet: it is written when the run has finished")
    known = names()
    shipped = f"Checkpoints are {', '.join(known)}" if known else "There are no named checkpoints here"
    raise NotFound(
        f"{option}={str(name)!r} is neither a run, nor the folder of a saved model, nor a checkpoint's name"
        f"{nearest(str(name), known)} {shipped}; a saved model is a directory with {WEIGHTS} and {CONFIG}"
    )


def card(folder: Path) -> dict[str, Any]:
    """The card of a saved model, or the config of the run that trained it; empty if there is neither."""
    for file in (folder / CARD, folder.parent / CONFIG):
        if file.is_file():
            facts, _ = read_sealed(file)
            if "task" in facts:
                return facts
    return {}


def release(run: Path, name: str, into: Path = Path(FOLDER), dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write checkpoints/NAME from a finished run: its model in 16 bits, and a card.

    The card holds the run's config.json (task, settings, commit, date, machine and versions) and its result.
    """
    plain_name("name", name)
    model: Model = load(run).to(dtype)
    check_finite(model, run)
    if missing := [str(run / file) for file in (CONFIG, "result.json") if not (run / file).is_file()]:
        raise ValueError(f"{missing[0]} does not exist: accepted is the folder of a finished run of subquad train")
    config, result = (read_sealed(run / file)[0] for file in (CONFIG, "result.json"))
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    if size > LARGEST:
        raise ValueError(f"{run} holds {size:,} bytes of weights: a checkpoint that ships has at most {LARGEST:,}")
    folder = into / name
    model.save(folder)
    parameters = sum(p.numel() for p in model.parameters())
    about = {"parameters": parameters, "result": result, "dtype": str(dtype).removeprefix("torch.")}
    write_sealed(folder / CARD, {"name": name, **config, **about})
    return folder
