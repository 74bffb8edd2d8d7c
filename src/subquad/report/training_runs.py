"""A run of `subquad train` for the page: its result and its curves."""

from pathlib import Path

from subquad.disk import blaming, read_sealed
from subquad.measure.growth import grouped
from subquad.report.html import number
from subquad.report.runs import Json, Run
from subquad.training.folder import CONFIG, RESULT, read_result
from subquad.training.history import METRICS
from subquad.training.log import logged

NOT_METRICS = ("step", "split", "seconds")


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() and (folder / CONFIG).is_file()


def load(folder: Path) -> Run:
    """Read a run's three files as one. A run that has not ended has no result yet."""
    config, _ = read_sealed(folder / CONFIG)
    with blaming(str(folder / CONFIG)):
        training = {key: value for key, value in config.pop("training").items() if value is not None}
        data: Json = {
            **config,
            "kind": "train",
            "settings": {"task": config["task"], **config.pop("data"), **config.pop("model"), **training},
        }
    data["result"] = read_result(folder) if (folder / RESULT).is_file() else None
    data["curves"] = logged(folder)
    run = Run(folder.resolve().name, folder / METRICS, data)
    with blaming(str(folder / METRICS), ValueError):
        curves(run)
    with blaming(str(folder / RESULT), ValueError):
        shown(run, "")
    return run


def shown(run: Run, anchor: str) -> Json:
    """The data of the run for the page."""
    data, result = run.data, run.data["result"]
    about: Json = {"anchor": anchor, "name": run.name, "task": data["task"], "curves": curves(run)}
    if result is None:
        return {**about, "finished": False, "steps": f"{data['curves'][-1]['step'] if data['curves'] else 0:,}"}
    metric = result["metric"]
    values = {split: (result.get(split) or {}).get(metric) for split in ("validation", "test")}
    reached = [f"{split} {number(value, 4).shown} {metric}" for split, value in values.items() if value is not None]
    counts = {key: f"{result[key]:,}" for key in ("best_step", "parameters", "steps")}
    return {
        **about,
        **counts,
        "finished": True,
        "reached": ", ".join(reached),
        "seconds": number(result["seconds"]).shown,
    }


def curves(run: Run) -> Json | None:
    """Values over training steps; a view for each split and metric."""
    points = grouped(
        ((line["split"], key), [line["step"], line[key]])
        for line in run.data["curves"]
        for key in (["loss"] if line["split"] == "train" else [key for key in line if key not in NOT_METRICS])
        if line["split"] != "test" and line.get(key) is not None
    )
    x = {"label": "training step", "short": "step", "unit": "steps"}
    views = []
    for (split, key), curve in points.items():
        label, y = ("Training loss", "loss") if split == "train" else (f"Validation: {key}", key)
        series = [{"name": run.name, "family": "other", "points": curve}]
        views.append({"label": label, "x": x, "y": {"label": y, "unit": ""}, "series": series})
    return {"views": views, "chosen": [run.name]} if views else None
