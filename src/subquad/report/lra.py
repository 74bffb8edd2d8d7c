"""The arena's tables: the accuracy of each mechanism beside the paper's, and its cost."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from subquad.disk import read_json
from subquad.measure.growth import grouped
from subquad.studies.columns import plain_table
from subquad.studies.lra.arena import budget_line, of_size, row_of
from subquad.studies.lra.recipes import PUBLISHED, RECIPES, directions, positions_of
from subquad.studies.published import TABLES
from subquad.studies.results import ArenaRun, ArenaTable

Json = dict[str, Any]
PAPER = TABLES["lra"]
AT_CHANCE = 2.0  # points above always giving the most frequent answer: up to here, nothing was learned
FAR = 8.0  # a figure this many points from the paper's needs a note
COSTS = (  # title, field of a run, in what unit, format
    ("seconds", "seconds", 1.0, "{:,.0f}"),
    ("peak memory, GB", "peak_bytes", 1e9, "{:.2f}"),
    ("steps", "steps", 1.0, "{:,.0f}"),
    ("parameters", "parameters", 1.0, "{:,.0f}"),
)


def published(mechanism: str, column: str) -> float | None:
    """The paper's accuracy, if its table has it."""
    titles = [c.title for c in PAPER.columns]
    printed = {name: dict(zip(titles, figures, strict=True)) for _, name, figures in PAPER.rows}
    value = printed.get(mechanism, {}).get(RECIPES[column].title)
    return float(value) if isinstance(value, int | float) else None


def cells(results: ArenaTable) -> dict[tuple[str, str], list[ArenaRun]]:
    """(row, column) -> the finished runs of all seeds. A row is a mechanism and how its runs started."""
    return grouped(((row_of(run), run.column), run) for run in of_size(results) if run.accuracy is not None)


def averages(results: ArenaTable, columns: Sequence[str]) -> dict[str, tuple[float, float | None]]:
    """mechanism -> (our average, the paper's) over these columns, for mechanisms that have all of them."""
    known = cells(results)
    averages = {}
    for mechanism in dict.fromkeys(m for m, _ in known):
        ours = [_mean(known[mechanism, c]) for c in columns if (mechanism, c) in known]
        theirs = [published(_named(mechanism), c) for c in columns]
        if columns and len(ours) == len(columns):
            paper = None if None in theirs else statistics.fmean(t for t in theirs if t is not None)
            averages[mechanism] = statistics.fmean(ours), paper
    return averages


def tables(results: ArenaTable, notes: dict[str, str] | None = None) -> list[Table]:
    """All tables; none before the first run is finished."""
    return [accuracy_table(results, notes), *how_tables(results), *cost_tables(results)] if cells(results) else []


def accuracy_table(results: ArenaTable, notes: dict[str, str] | None = None) -> Table:
    """Ours beside the paper's, their averages over the same columns, and mean and deviation over the mechanisms."""
    known, notes = cells(results), notes or {}
    columns = _columns(known)
    named = {c: next(r.task for (_, column), runs in known.items() if column == c for r in runs) for c in columns}
    real = {c: named[c] == RECIPES[c].title for c in columns}  # figures on a stand-in are not compared with the paper's
    counted = [c for c in columns if real[c] and c != "pathx"]
    average = averages(results, counted)
    budget = budget_line(results.budget.size, [r for runs in known.values() for r in runs])
    title = f"Long Range Arena: test accuracy in %, the paper's in brackets. {budget}"
    last = [f"average of {len(counted)}"] if counted else []
    table = plain_table(title, ["mechanism", *named.values(), *last], folds=[*named.values()])
    for mechanism in dict.fromkeys(row_of(r) for r in of_size(results)):  # including failed runs
        row = []
        for c in columns:
            paper = published(_named(mechanism), c) if real[c] else None
            theirs = None if paper is None else f"{paper:.2f}"
            theirs = "FAIL" if c == "pathx" and real[c] and _named(mechanism) in PUBLISHED else theirs
            row.append(_cell(known.get((mechanism, c), []), theirs, f"{c} {mechanism}" in notes))
        ours, mean = average.get(mechanism, (None, None))
        row.append("-" if ours is None else f"{ours:.2f}" + ("" if mean is None else f" ({mean:.2f})"))
        table.add_row(mechanism, *row[: len(columns) + len(last)])
    of_column = {c: [_mean(runs) for (_, column), runs in known.items() if column == c] for c in columns}
    overall = [ours for ours, _ in average.values()]
    for label, of in _summaries(known).items():
        row = [f"{of(of_column[c]):.2f}" for c in columns] + [f"{of(overall):.2f}" if overall else "-"]
        table.add_row(label, *row[: len(columns) + len(last)], style="dim")
    table.caption, table.caption_justify = caption(results) or None, "left"
    return table


def caption(results: ArenaTable) -> str:
    """What a reader of the accuracies must know: directions, stand-ins, what starts where."""
    known = cells(results)
    lines = [directions(_named(row) for row, _ in known)]
    for column, share in results.baselines.items():
        named = next((r.task for (_, c), runs in known.items() if c == column for r in runs), None)
        if named is not None:
            outside = f"{named} stand in for {RECIPES[column].title} and are outside the average"
            lines.append(f"{outside}: a bag of words with a threshold scores {share:.1f} % on them.")
    starts = {run.start for runs in known.values() for run in runs}
    if "pretrained" in starts:
        lines.append("pretrained: the encoder first filled in inputs of the training data, without labels.")
    if "control" in starts:
        lines.append("control: from scratch, for as many examples as pretraining and training together.")
    return "\n".join(line for line in lines if line)


def how_tables(results: ArenaTable) -> list[Table]:
    """For each task how its figures came about: pretraining, augmentation, positions, updates, examples and time."""
    jobs = max((run.jobs or 1 for runs in cells(results).values() for run in runs), default=1)
    tables = []
    for task, lines in grouped((line.task, line) for line in how(results)).items():
        title = f"{task}: how each figure came about; before + on the task"
        table = plain_table(title, ["mechanism", "%", "how", "updates", "examples", "GPU s"], folds=["how"])
        table.columns[2].min_width, table.columns[2].justify = 24, "left"
        for line in lines:
            about = [line.pretrained, line.augmentation, line.positions]
            about += [f"best of {line.seeds} seeds {line.best:.2f}"] if line.seeds > 1 else []
            counted = [_both(line.updates), _both(line.examples), f"{line.seconds:,.0f}"]
            table.add_row(line.row, f"{line.accuracy:.2f}", "; ".join(about), *counted)
        if jobs > 1:
            table.caption = f"GPU s: seconds of a run over the runs beside it on the device, {jobs} at most."
            table.caption_justify = "left"
        tables.append(table)
    return tables


class How(NamedTuple):
    """How the figure of one row came about on one task; means over its seeds."""

    task: str
    row: str
    accuracy: float
    best: float  # of the seeds
    seeds: int
    pretrained: str  # "not pretrained", "50 % hidden", "next input"
    augmentation: str  # "not augmented", "flips"
    positions: str
    updates: tuple[float, float]  # before, on the task
    examples: tuple[float, float]
    seconds: float  # of the device


def how(results: ArenaTable) -> list[How]:
    """A line for each figure, task by task."""
    known = cells(results)
    found = []
    for column in _columns(known):
        for (row, c), runs in known.items():
            if c != column:
                continue
            before = [run.pretraining for run in runs if run.pretraining is not None]
            settings = runs[0].settings
            batch = settings["training"]["batch"]
            ahead = statistics.fmean(b.steps for b in before) if before else 0.0
            steps = statistics.fmean(run.steps or 0 for run in runs)
            filled = ahead * settings.get("pretraining", settings)["training"]["batch"]
            found.append(
                How(
                    task=runs[0].task,
                    row=row,
                    accuracy=_mean(runs),
                    best=max(run.accuracy or 0.0 for run in runs),
                    seeds=len(runs),
                    pretrained=before[0].way if before else "not pretrained",
                    augmentation=_augmentation(settings),
                    positions=positions_of(settings.get("model", {})),
                    updates=(ahead, steps),
                    examples=(filled, steps * batch),
                    seconds=statistics.fmean(_device_seconds(run) for run in runs),
                )
            )
    return found


def _device_seconds(run: ArenaRun) -> float:
    """Seconds of both phases over the runs that shared the device."""
    before = 0.0 if run.pretraining is None else run.pretraining.seconds
    return (before + (run.seconds or 0.0)) / (run.jobs or 1)


def _augmentation(settings: Json) -> str:
    chosen = str(settings.get("data", {}).get("augment", "none"))
    return "not augmented" if chosen == "none" else chosen


def _both(values: tuple[float, float]) -> str:
    before, after = (f"{v:,.0f}" if v < 10_000 else f"{v / 1000:,.0f}k" for v in values)
    return f"{before} + {after}" if values[0] else after


def _named(row: str) -> str:
    """The mechanism of a row, such as "linear, pretrained"."""
    return row.partition(",")[0]


def cost_tables(results: ArenaTable) -> list[Table]:
    """Seconds, memory, steps and parameters, each with mean and deviation over the mechanisms."""
    known = cells(results)
    columns = _columns(known)
    tables = []
    for title, field, unit, shape in COSTS:
        table = plain_table(title, ["mechanism", *(RECIPES[c].title for c in columns)])
        values = {key: statistics.fmean(getattr(r, field) / unit for r in runs) for key, runs in known.items()}
        for mechanism in dict.fromkeys(m for m, _ in known):
            row = [shape.format(values[mechanism, c]) if (mechanism, c) in values else "-" for c in columns]
            table.add_row(mechanism, *row)
        for label, over in _summaries(known).items():
            of_column = ([v for (_, column), v in values.items() if column == c] for c in columns)
            table.add_row(label, *(shape.format(over(column)) for column in of_column), style="dim")
        tables.append(table)
    return tables


def surprising(results: ArenaTable) -> dict[str, str]:
    """Cells of the table that need a note, such as "listops linear", and why each is surprising."""
    reasons = {}
    for (mechanism, c), runs in cells(results).items():
        ours, paper, chance = _mean(runs), published(_named(mechanism), c), RECIPES[c].majority
        if ours < chance + AT_CHANCE:
            reasons[f"{c} {mechanism}"] = f"{ours:.1f} %, no better than the most frequent answer ({chance:.0f} %)"
        elif paper is not None and abs(ours - paper) > FAR and RECIPES[c].title == runs[0].task:
            reasons[f"{c} {mechanism}"] = f"{ours:.1f} %, {paper:.1f} % in the paper"
    for run in of_size(results):
        if run.error is not None:
            reasons[f"{run.column} {row_of(run)}"] = run.error
    return reasons


def read_notes(path: Path) -> dict[str, str]:
    """Notes that a person wrote for cells: {"listops linear": "..."}, from their own file beside the figures."""
    if not path.is_file():
        return {}
    notes = read_json(path)
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise ValueError(f"{path} cannot work: accepted is an object of sentences, such as {{'listops linear': '...'}}")
    return {str(key): value for key, value in notes.items()}


def note_lines(results: ArenaTable, notes: dict[str, str]) -> list[str]:
    """The notes, then the surprising figures that still need one."""
    lines = [f"{cell}: {escape(sentence)}" for cell, sentence in notes.items()]
    missing = {cell: why for cell, why in surprising(results).items() if cell not in notes}
    failed = {f"{r.column} {row_of(r)}" for r in of_size(results) if r.error is not None}
    return lines + [
        f"{'failed' if cell in failed else 'needs a note'}: {cell}, {escape(why)}" for cell, why in missing.items()
    ]


def _columns(known: Iterable[tuple[str, str]]) -> list[str]:
    run = {column for _, column in known}
    return [column for column in RECIPES if column in run]


def _cell(runs: Sequence[ArenaRun], paper: str | None, noted: bool) -> str:
    beside = "" if paper is None else f" ({paper})"
    if not runs:
        return f"-{beside}"
    spread = "" if len(runs) == 1 else f" ±{_deviation([r.accuracy or 0.0 for r in runs]):.2f}"
    return f"{_mean(runs):.2f}{spread}{beside}" + ("*" if noted else "")


def _summaries(known: Iterable[tuple[str, str]]) -> dict[str, Callable[[Sequence[float]], float]]:
    """Summaries over all mechanisms, if there are several."""
    several = len({mechanism for mechanism, _ in known}) > 1
    return {"mean": statistics.fmean, "deviation": _deviation} if several else {}


def _mean(runs: Sequence[ArenaRun]) -> float:
    return statistics.fmean(r.accuracy or 0.0 for r in runs)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
