"""Find and read the JSON files of measurements: `results.json` of a run, or any file of results/."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from subquad.checks import refuse
from subquad.disk import cache_folder, read_object
from subquad.measure.cost import Row
from subquad.measure.growth import grouped
from subquad.studies.results import Comparison, Figures, Picture, Quality, ReproducedTable, parse

Json = dict[str, Any]
FIGURES = "what subquad compare, train, reproduce, lra or bench writes: JSON that names its kind, machine or device"


@dataclass(frozen=True)
class Run:
    name: str
    path: Path
    data: Json  # the whole file, for figures that have no type

    @functools.cached_property
    def figures(self) -> Figures | None:
        """The typed figures of the file, if its kind is one of studies/results.py."""
        return parse(self.data, self.path)

    @property
    def comparison(self) -> Comparison:
        assert isinstance(self.figures, Comparison)
        return self.figures

    @property
    def reproduced(self) -> ReproducedTable:
        assert isinstance(self.figures, ReproducedTable)
        return self.figures

    @property
    def rows(self) -> list[Row]:
        """Times and memory over length."""
        return [*self.figures.rows] if isinstance(self.figures, Comparison | ReproducedTable) else []

    @property
    def quality(self) -> list[Quality]:
        """The records of quality that have a figure."""
        records: list[Quality] = getattr(self.figures, "quality", [])
        return [record for record in records if record.value is not None]

    @property
    def pictures(self) -> list[Picture]:
        return self.figures.pictures if isinstance(self.figures, Comparison | ReproducedTable) else []

    @property
    def kind(self) -> str:
        """The command that wrote it. "train" is only a folder of `subquad train`, not any file that says so."""
        kind = str(self.data.get("kind", "figures"))
        return "figures" if kind == "train" and "curves" not in self.data else kind

    @property
    def machine(self) -> Json:
        """The machine it ran on; older files have some of this outside `machine`."""
        machine = self.data.get("machine")
        keys = ("device", "gpu", "cpu", "versions", "torch", "triton", "python", "threads")
        older = {key: self.data[key] for key in keys if key in self.data}
        return (
            {**machine, **{k: v for k, v in older.items() if k not in machine}} if isinstance(machine, dict) else older
        )

    @property
    def settings(self) -> Json:
        settings = self.data.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def title(self) -> str:
        """A name that tells runs apart: what ran, and where."""
        device = self.machine.get("device") or self.machine.get("gpu") or self.machine.get("cpu")
        return f"{self.name} ({device})" if isinstance(device, str) else self.name


def read(paths: Iterable[Path]) -> list[Run]:
    """The runs at these paths: JSON files, folders with a results.json or of `subquad train`, folders of JSON files."""
    from subquad.report import training_runs

    runs = []
    for path in paths:
        trained = training_runs.is_run(path)
        runs += [training_runs.load(path)] if trained else []
        if not trained or (path / "results.json").is_file():
            loaded = [_load(file) for file in _files(path)]
            # a folder may hold other JSON files; files of figures name their kind or their machine
            figures = [
                r for r in loaded if isinstance(r.data.get("kind"), str) or {"machine", "device"} & r.data.keys()
            ]
            if not figures:
                refuse("RUN", str(path), FIGURES)
            runs += figures
    if not runs:
        raise ValueError("no run was given: accepted are folders with a results.json and JSON files")
    return _with_distinct_names(runs)


def find(root: Path = Path()) -> list[Run]:
    """The figures to show if the user names none: for each kind of device and each form (causal, bidirectional, or
    mixed), the comparison that covers most mechanisms; then other figures, of results/ or shipped.

    This machine's comparisons are preferred to those of results/, and these to the shipped ones.
    """
    here = [_load(file) for file in sorted(cache_folder().glob("compare_*.json"))]
    kept = [_load(file) for file in sorted(root.glob("results/*.json"))]
    with as_file(files("subquad.studies").joinpath("figures")) as folder:
        shipped = [_load(file) for file in sorted(folder.glob("*.json"))]
        reproduced = [_load(file) for file in sorted(folder.glob("reproduced/*.json"))]
    best: dict[tuple[str, bool | None], Run] = {}
    for run in compared([*here, *kept, *shipped]):
        kind = str(run.settings.get("device", "cpu")).split(":")[0], run.settings.get("causal")
        if kind not in best or _covered(run) > _covered(best[kind]):
            best[kind] = run
    other = [run for run in kept if run.kind != "compare"]
    known = {run.path.name for run in other}
    other += [run for run in reproduced if run.path.name not in known]
    return _with_distinct_names([*best.values(), *other])


def _covered(run: Run) -> int:
    return len({row.mechanism for row in run.rows if row.training_ms})


def compared(runs: Iterable[Run]) -> list[Run]:
    """The runs that `subquad compare` wrote."""
    return [run for run in runs if run.kind == "compare"]


def by_task(run: Run) -> dict[tuple[str, str], list[Quality]]:
    """{(task, metric): the records of quality}"""
    return grouped(((quality.task, quality.metric), quality) for quality in run.quality)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif (path / "results.json").is_file():
        yield path / "results.json"
    elif path.is_dir() and any(path.glob("*.json")):
        yield from sorted(path.glob("*.json"))
    else:
        why = "cannot work" if path.exists() else "does not exist"
        raise ValueError(f"RUN={str(path)!r} {why}: accepted is a JSON file, or a folder that holds some")


def _load(file: Path) -> Run:
    run = Run(file.resolve().parent.name if file.name == "results.json" else file.stem, file, read_object(file))
    run.figures  # noqa: B018 -- read now, so that damage is refused before anything is shown
    return run


def _with_distinct_names(runs: list[Run]) -> list[Run]:
    out: list[Run] = []
    for n, run in enumerate(runs):
        before = sum(run.name == other.name for other in runs[:n])
        out.append(replace(run, name=f"{run.name} {before + 1}") if before else run)
    return out
