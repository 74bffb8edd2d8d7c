"""Trained models that ship with the project, by name: checkpoints/NAME/ with weights, config and a card.

    model.safetensors, config.json    as Model.save writes them, in bfloat16
    card.json                         what it is: task, data, figures, how it was trained, commit

`subquad generate NAME` finds them in ./checkpoints, in checkpoints/ of the data folder, and in the source tree.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from subquad.checks import nearest
from subquad.disk import read_json, read_object
from subquad.models import Model, load
from subquad.models.store import CONFIG, WEIGHTS

CARD, FOLDER = "card.json", "checkpoints"
LARGEST = 20_000_000  # bytes of weights that are shipped


def folders() -> Iterator[Path]:
    """Where named checkpoints are looked for."""
    yield Path(FOLDER)
    if os.environ.get("SUBQUAD_DATA"):
        yield Path(os.environ["SUBQUAD_DATA"]).expanduser() / FOLDER
    yield Path(__file__).resolve().parents[3] / FOLDER  # of a source tree


def names() -> list[str]:
    """The checkpoints there are."""
    return sorted({path.parent.name for folder in folders() for path in folder.glob(f"*/{WEIGHTS}")})


def find(name: str | Path) -> Path:
    """The folder of a saved model: a path to one, a run folder that holds one in model/, or a checkpoint's name."""
    path = Path(name)
    candidates = [path, path / "model", *(folder / name for folder in folders())]
    for folder in candidates:
        if (folder / WEIGHTS).is_file():
            return folder
    known = names()
    shipped = f"checkpoints are {', '.join(known)}" if known else "there are no named checkpoints here"
    raise ValueError(
        f"checkpoint={str(name)!r} is neither the folder of a saved model nor a checkpoint's name"
        f"{nearest(str(name), known)} {shipped[0].upper()}{shipped[1:]}"
    )


def card(folder: Path) -> dict[str, Any]:
    """What is known of a saved model: its card, or the config of the run it was trained in; nothing of others."""
    for file in (folder / CARD, folder.parent / CONFIG):
        if file.is_file():
            found = read_json(file)
            if isinstance(found, dict) and "task" in found:
                return found
    return {}


def release(run: Path, name: str, into: Path = Path(FOLDER), dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write checkpoints/NAME from a finished run: its model in half the bytes, and a card of its figures."""
    model: Model = load(find(run)).to(dtype)
    config, result = (_read(run / file) for file in (CONFIG, "result.json"))
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    if size > LARGEST:
        raise ValueError(f"{run} holds {size:,} bytes of weights: a checkpoint that ships has at most {LARGEST:,}")
    folder = into / name
    model.save(folder)
    told = {key: config[key] for key in ("task", "data", "model", "training", "versions", "commit") if key in config}
    about = {"name": name, **told, "parameters": sum(p.numel() for p in model.parameters()), "result": dict(result)}
    text = json.dumps({**about, "dtype": str(dtype).removeprefix("torch.")}, indent=1)
    (folder / CARD).write_text(text + "\n", encoding="utf-8")
    return folder


def _read(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} does not exist: accepted is the folder of a finished run of subquad train")
    return read_object(file)
