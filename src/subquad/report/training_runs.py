"""A run of `subquad train`: what it reached, and its curves."""

from pathlib import Path

from subquad.disk import blaming, read_sealed
from subquad.report.html import chart, escape, number
from subquad.report.runs import Json, Run
from subquad.training.folder import CONFIG, RESULT, read_result
from subquad.training.history import METRICS
from subquad.training.log import logged

NOT_METRICS = ("step", "split", "seconds")


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() and (folder / CONFIG).is_file()


def load(folder: Path) -> Run:
    """Its three files as one; a run that has not ended has no result yet."""
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
    with blaming(str(folder / RESULT), ValueError):
        _sentence(data)
    with blaming(str(folder / METRICS), ValueError):
        curves(run)
    return run


def section(run: Run, name: str) -> str:
    """As HTML."""
    spec = curves(run)
    body = f"<p>{escape(_sentence(run.data))}</p>" + (chart(f"{name}-chart", spec) if spec else "")
    return f'<section><h2 id="{name}">{escape(run.name)}: training on {escape(run.data["task"])}</h2>{body}</section>'


def curves(run: Run) -> Json | None:
    """Of every split and metric the values over the steps, a view each."""
    points: dict[tuple[str, str], list[list[float]]] = {}
    for line in run.data["curves"]:
        measured = ["loss"] if line["split"] == "train" else [key for key in line if key not in NOT_METRICS]
        for key in measured if line["split"] != "test" else ():
            if line.get(key) is not None:
                points.setdefault((line["split"], key), []).append([line["step"], line[key]])
    x = {"label": "training step", "short": "step", "unit": "steps"}
    views = [
        {
            "label": "Training loss" if split == "train" else f"Validation: {key}",
            "x": x,
            "y": {"label": "loss" if split == "train" else key, "unit": ""},
            "series": [{"name": run.name, "family": "other", "points": found}],
        }
        for (split, key), found in points.items()
    ]
    return {"views": views, "chosen": [run.name]} if views else None


def _sentence(data: Json) -> str:
    result = data["result"]
    if result is None:
        steps = data["curves"][-1]["step"] if data["curves"] else 0
        return f"Not finished: {steps:,} steps so far."
    metric, reached = result["metric"], []
    for split in ("validation", "test"):
        value = (result.get(split) or {}).get(metric)
        reached += [] if value is None else [f"{split} {number(value, 4).shown} {metric}"]
    return (
        f"{', '.join(reached) or 'Nothing was evaluated'}, with the weights of step {result['best_step']:,}. "
        f"{result['parameters']:,} parameters, {result['steps']:,} steps in {number(result['seconds']).shown} s."
    )
