"""Find and read the JSON that measurements leave: `results.json` of a run, or any file of results/."""

from collections.abc import Iterable, Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

from subquad.checks import refuse
from subquad.disk import read_object
from subquad.studies.results import check_rows

Json = dict[str, Any]
FIGURES = "what subquad compare, train, reproduce, lra or bench writes: JSON that names its kind, machine or device"


class Run(NamedTuple):
    name: str
    path: Path
    data: Json

    @property
    def kind(self) -> str:
        """Which command wrote it; "train" is a folder of `subquad train`, not any file that says so."""
        kind = str(self.data.get("kind", "figures"))
        return "figures" if kind == "train" and "curves" not in self.data else kind

    @property
    def machine(self) -> Json:
        """What it ran on: `machine` of a compare run; of other files, whatever they say about device and versions."""
        machine = self.data.get("machine")
        known = dict(machine) if isinstance(machine, dict) else {}
        for key in ("device", "gpu", "cpu", "versions", "torch", "triton", "python", "threads"):
            if key in self.data and key not in known:
                known[key] = self.data[key]
        return known

    @property
    def settings(self) -> Json:
        settings = self.data.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def title(self) -> str:
        """A name that tells runs apart: what ran, where."""
        device = self.machine.get("device") or self.machine.get("gpu") or self.machine.get("cpu")
        return f"{self.name} ({device})" if isinstance(device, str) else self.name


def read(paths: Iterable[Path]) -> list[Run]:
    """The runs at these paths: JSON files, folders with a results.json or of `subquad train`, folders of JSON files."""
    from subquad.report import training_runs

    runs = []
    for path in paths:
        learning = training_runs.is_run(path)
        runs += [training_runs.load(path)] if learning else []
        if not learning or (path / "results.json").is_file():
            named = [_load(file) for file in _files(path)]
            figures = [run for run in named if _holds_figures(run.data)]  # the folder may hold other JSON files
            if not figures:
                refuse("RUN", str(path), FIGURES)
            runs += figures
    if not runs:
        raise ValueError("no run was given: accepted are folders with a results.json and JSON files")
    return _told_apart(runs)


def find(root: Path = Path()) -> list[Run]:
    """The runs to show when none is named: for each device and form (causal, bidirectional, or each mechanism its own)
    the comparison that covers most mechanisms, then the other files of results/.

    This machine's comparisons come before those of results/, and these before the shipped ones.
    """
    from subquad.disk import cache_folder

    here = [_load(file) for file in sorted(cache_folder().glob("compare_*.json"))]
    kept = [_load(file) for file in sorted(root.glob("results/*.json"))]
    with as_file(files("subquad.studies").joinpath("figures")) as folder:
        shipped = [_load(file) for file in sorted(folder.glob("*.json"))]
    best: dict[tuple[str, bool | None], Run] = {}
    for run in compared([*here, *kept, *shipped]):
        settings = run.data.get("settings", {})
        kind = str(settings.get("device", "cpu")).split(":")[0], settings.get("causal")
        if kind not in best or _covered(run) > _covered(best[kind]):
            best[kind] = run
    return _told_apart([*best.values(), *(run for run in kept if run.kind != "compare")])


def _covered(run: Run) -> int:
    return len({row["mechanism"] for row in run.data.get("rows", []) if row.get("training_ms")})


def compared(runs: Iterable[Run]) -> list[Run]:
    """The runs that `subquad compare` wrote."""
    return [run for run in runs if run.kind == "compare"]


def learned(run: Run) -> list[Json]:
    """The records of quality that have a figure; the others say why they have none."""
    return [q for q in run.data.get("quality", []) if q.get("value") is not None]


def by_task(run: Run) -> dict[tuple[str, str], list[Json]]:
    """{(task, metric): the records of quality}"""
    found: dict[tuple[str, str], list[Json]] = {}
    for q in learned(run):
        found.setdefault((q["task"], q["metric"]), []).append(q)
    return found


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
    data = read_object(file)
    if data.get("kind") == "compare":
        check_rows(data, file)
    name = file.resolve().parent.name if file.name == "results.json" else file.stem
    return Run(name, file, data)


def _holds_figures(data: Json) -> bool:
    """Every file of figures names its kind, or the machine it was measured on."""
    return isinstance(data.get("kind"), str) or any(key in data for key in ("machine", "device"))


def _told_apart(runs: list[Run]) -> list[Run]:
    seen: dict[str, int] = {}
    out = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        out.append(run if seen[run.name] == 1 else run._replace(name=f"{run.name} {seen[run.name]}"))
    return out
