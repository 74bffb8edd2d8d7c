import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from subquad.cli import app
from subquad.measure.cost import Row, Spread
from subquad.pool import Died
from subquad.studies import compare as module
from subquad.studies.compare import compare, joined, plan, tables
from subquad.studies.compare_worker import Job
from subquad.studies.results import to_json
from subquad.studies.settings import Settings
from tests.studies.in_process import work

TINY: dict[str, Any] = {"dim": 8, "heads": 2, "repeats": 1, "threads": 1}
QUIET = Console(quiet=True)
# the keys that the report reads: a change here changes the file format
KEYS = {
    "kind", "subquad", "commit", "date", "machine", "settings", "rows", "growth", "crossovers", "quality",
    "quality_missing", "pictures", "interrupted",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def spread(value: float) -> Spread:
    return Spread(value, value, value)


def timed(name: str, length: int, milliseconds: float = 1.0) -> Row:
    return Row(
        mechanism=name,
        length=length,
        causal=True,
        training_ms=spread(milliseconds),
        forward_ms=spread(milliseconds / 3),
        training_ratio=spread(milliseconds / length),
        peak_bytes=10 * length,
    )


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def test_everything_measured_is_written_in_the_format_of_the_report(tmp_path: Path) -> None:
    settings = Settings(mechanisms=("linear", "fnet"), lengths=(16, 32), task="digits", steps=1, **TINY)
    results = compare(settings, tmp_path, QUIET, work=work)
    written = read(tmp_path)
    assert written == to_json(results)
    assert written.keys() == KEYS
    assert results.kind == "compare"
    assert not results.interrupted
    assert {(row.mechanism, row.length, row.causal) for row in results.rows} == {
        (name, n, name != "fnet") for name in ("softmax", "linear", "fnet") for n in (16, 32)
    }
    assert all(row.error is None and row.training_ms.median > 0 for row in results.rows)
    for found in written["growth"]:
        assert found.keys() == {
            "mechanism", "time", "memory", "documented_time", "documented_memory", "lengths_used"
        }  # fmt: skip
        assert found["lengths_used"] == [16, 32]
    assert {found.mechanism for found in results.crossovers} == {"softmax", "linear", "fnet"}
    for found in written["quality"]:
        assert found.keys() == {
            "mechanism", "task", "metric", "value", "lower_is_better", "steps", "seconds", "curve"
        }  # fmt: skip
    assert [found.metric for found in results.quality] == ["bits/dim", "bits/dim", "accuracy"]
    assert {"device", "cpu", "threads", "python", "torch", "triton", "memory_bytes"} <= results.machine.keys()


def test_only_a_whole_comparison_is_kept_for_advice(tmp_path: Path, cache: Path) -> None:
    def work(settings: Settings, jobs: list[Job], rows: list[Row]) -> Iterator[dict[str, Any]]:
        for job in jobs:
            yield {"begin": job}
            yield {"row": timed(job["mechanism"], job["length"])}

    def stopped(settings: Settings, jobs: list[Job], rows: list[Row]) -> Iterator[dict[str, Any]]:
        yield from work(settings, jobs[:3], rows)
        raise KeyboardInterrupt

    kept = cache / "compare_cpu.json"
    compare(Settings(mechanisms=("linear", "local"), lengths=(16,), **TINY), tmp_path, QUIET, work=work)
    compare(Settings(lengths=(16,), **TINY), tmp_path, QUIET, work=stopped)
    assert not kept.exists()
    compare(Settings(lengths=(16,), **TINY), tmp_path, QUIET, work=work)
    assert json.loads(kept.read_text())["rows"] == read(tmp_path)["rows"]
    before = kept.read_text()
    compare(Settings(mechanisms=("linear", "local"), lengths=(16,), **TINY), tmp_path, QUIET, work=work)
    assert kept.read_text() == before


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    def work(settings: Settings, jobs: list[Job], rows: list[Row]) -> Iterator[dict[str, Any]]:
        yield {"begin": jobs[0]}
        yield {"row": timed("softmax", 16)}
        yield {"begin": jobs[1]}
        raise KeyboardInterrupt

    settings = Settings(mechanisms=("linear",), lengths=(16, 32), **TINY)
    results = compare(settings, tmp_path, QUIET, work=work)
    assert results.interrupted
    assert read(tmp_path)["interrupted"]
    assert [row["mechanism"] for row in read(tmp_path)["rows"]] == ["softmax"]
    assert [row.mechanism for row in results.rows] == ["softmax"]
    assert tables(results)[0].row_count == 1


def test_each_figure_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    seen = []

    def work(settings: Settings, jobs: list[Job], rows: list[Row]) -> Iterator[dict[str, Any]]:
        for job in jobs:
            seen.append(len(read(tmp_path)["rows"]) if (tmp_path / "results.json").exists() else 0)
            yield {"begin": job}
            yield {"row": timed(job["mechanism"], job["length"])}

    compare(Settings(mechanisms=("linear", "local"), lengths=(16,), **TINY), tmp_path, QUIET, work=work)
    assert seen == [0, 1, 2]
    assert not list(tmp_path.glob(".results*"))


def test_a_process_that_dies_loses_only_what_it_was_at(tmp_path: Path) -> None:
    starts: list[list[tuple[str, int]]] = []

    def work(settings: Settings, jobs: list[Job], rows: list[Row]) -> Iterator[dict[str, Any]]:
        starts.append([(job["mechanism"], job["length"]) for job in jobs])
        for job in jobs:
            yield {"begin": job}
            if job["mechanism"] == "linear":
                raise Died("Killed")
            yield {"row": timed(job["mechanism"], job["length"])}

    results = compare(Settings(mechanisms=("linear", "local"), lengths=(16, 32), **TINY), tmp_path, QUIET, work=work)
    assert starts == [
        [(name, n) for n in (16, 32) for name in ("softmax", "linear", "local")],
        [("local", 16), ("softmax", 32), ("local", 32)],
    ]
    found = {(row.mechanism, row.length): row for row in results.rows}
    assert len(found) == 6
    assert found["linear", 16].error == "the measuring process died: Killed"
    assert found["linear", 32].skipped == "not tried: the process died at T = 16"
    assert all(found[name, n].training_ms for name in ("softmax", "local") for n in (16, 32))


def test_a_process_that_leaves_early_is_followed_by_another(tmp_path: Path) -> None:
    def work(settings: Settings, jobs: list[Job], rows: list[Row]) -> Iterator[dict[str, Any]]:
        yield {"begin": jobs[0]}
        yield {"row": timed(jobs[0]["mechanism"], jobs[0]["length"])}

    results = compare(Settings(mechanisms=("linear", "local"), lengths=(16,), **TINY), tmp_path, QUIET, work=work)
    assert [row.mechanism for row in results.rows] == ["softmax", "linear", "local"]


def test_a_real_process_measures_and_one_that_is_killed_is_noticed(tmp_path: Path) -> None:
    settings = Settings(mechanisms=("linear",), lengths=(16,), **TINY)
    jobs = plan(settings)
    broken = {"kind": "row", "mechanism": "linear"}  # an incomplete job: the process ends in a traceback
    events = module._elsewhere(settings, [*jobs, broken], [])
    measured = [next(events) for _ in range(2 * len(jobs))]
    assert [event["row"].error for event in measured if "row" in event] == [None, None]
    with pytest.raises(Died, match="exit code 1"):
        list(events)


def test_short_lengths_come_first_and_those_with_one_yardstick_together() -> None:
    settings = Settings(mechanisms=("fnet", "softmax", "linear"), lengths=(16, 32))
    assert [(job["mechanism"], job["length"]) for job in plan(settings)] == [
        (name, n) for n in (16, 32) for name in ("softmax", "linear", "fnet")
    ]
    assert all(job["causal"] == (job["mechanism"] != "fnet") for job in plan(settings))


def test_the_table_shows_the_longest_length_and_every_reason(tmp_path: Path) -> None:
    def work(settings: Settings, jobs: list[Job], rows: list[Row]) -> Iterator[dict[str, Any]]:
        for job in jobs:
            yield {"begin": job}
            row = timed(job["mechanism"], job["length"], milliseconds=job["length"] / 10)
            if job["mechanism"] == "additive" and job["length"] == 32:
                row = Row(mechanism="additive", length=32, causal=True, skipped="too slow [for a test]")
            yield {"row": row}

    settings = Settings(mechanisms=("additive", "linear"), lengths=(16, 32), **TINY)
    results = compare(settings, tmp_path, QUIET, work=work)
    console = Console(width=140, record=True, quiet=False, file=(tmp_path / "out.txt").open("w"))
    for table in tables(results, 140):
        console.print(table)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert any(line.startswith("linear 32 3.2 ms 0.10") and "1.00 (1)" in line for line in lines)
    assert any(line.startswith("softmax 32 3.2 ms 1.00 ") for line in lines)  # the ratio to itself is always 1
    assert any(line.startswith("additive 16 ") for line in lines)
    assert "additive 32 too slow [for a test]" in lines


def test_quality_is_shown_at_every_width(tmp_path: Path) -> None:
    settings = Settings(mechanisms=("linear",), lengths=(16,), task="digits", steps=1, **TINY)
    results = compare(settings, tmp_path, QUIET, work=work)
    for width in (80, 140):
        console = Console(width=width, record=True, file=(tmp_path / "out.txt").open("w"))
        for table in tables(results, width):
            console.print(table)
        text = console.export_text()
        assert "bits/dim" in text
        assert all(f"{found.value:.3f}" in text for found in results.quality)


def test_the_command_prints_a_table_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_elsewhere", work)
    run = CliRunner(env={"COLUMNS": "160"})
    out = tmp_path / "run"
    arguments = ["compare", "--mechanisms", "linear", "--lengths", "16,32", "--dim", "8", "--repeats", "1"]
    result = run.invoke(app, [*arguments, "--out", str(out), "--save", str(tmp_path / "new" / "cpu.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "new" / "cpu.json").read_text()) == read(out)
    assert "linear, T = 32: training" in result.output
    assert f"{out / 'results.json'}; `subquad recommend --from {out}` uses them" in result.output
    first = read(out)
    again = run.invoke(app, [*arguments, "--out", str(out)])
    assert f"the figures that were there are now {out / 'results.1.json'}" in again.output
    run.invoke(app, [*arguments, "--out", str(out)])
    assert json.loads((out / "results.1.json").read_text()) == first
    assert (out / "results.2.json").exists()
    wrong = run.invoke(app, ["compare", "--mechanisms", "linaer"])
    assert wrong.exit_code == 2
    assert "did you mean 'linear'" in wrong.output
    absent = run.invoke(app, ["compare", "--data", str(tmp_path / "absent.npy"), "--out", str(tmp_path / "none")])
    assert absent.exit_code == 2
    assert "there is no such file" in " ".join(absent.output.split())
    assert not (tmp_path / "none").exists()


def test_parts_are_joined_and_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    settings = Settings(mechanisms=("linear", "local"), lengths=(16, 32), **TINY)
    first = compare(dataclasses.replace(settings, lengths=(16,)), tmp_path / "a", QUIET, work=work)
    stopped = compare(settings, tmp_path / "b", QUIET, work=work, earlier=first.rows, seconds=0)
    assert stopped.interrupted
    assert not stopped.rows
    some = compare(
        dataclasses.replace(settings, mechanisms=("linear",)), tmp_path / "c", QUIET, work=work, earlier=first.rows
    )
    assert [(row.mechanism, row.length) for row in some.rows] == [("softmax", 32), ("linear", 32)]
    half = joined([first, stopped, some])
    assert half.interrupted, "local lacks a length"
    rest = compare(settings, tmp_path / "d", QUIET, work=work, earlier=half.rows)
    whole = joined([half, rest])
    assert not whole.interrupted
    names = ["softmax", "linear", "local"]
    assert [(row.mechanism, row.length) for row in whole.rows] == [(name, n) for n in (16, 32) for name in names]
    assert whole.settings["lengths"] == [16, 32]
    assert whole.settings["mechanisms"] == names
    assert [part["rows"] for part in whole.added or []] == [["softmax", "linear"], ["local"]]
    assert to_json(joined([whole, whole]))["rows"] == to_json(whole)["rows"]
    with pytest.raises(ValueError, match="dim is"):
        joined([whole, dataclasses.replace(rest, settings={**rest.settings, "dim": 4})])


def test_decoding_alone(tmp_path: Path) -> None:
    settings = Settings(mechanisms=("linear", "fnet"), lengths=(16,), batch=3, decode_only=True, **TINY)
    softmax, linear, fnet = sorted(compare(settings, tmp_path, QUIET, work=work).rows, key=lambda row: not row.causal)
    assert softmax.training_ms is None
    assert linear.peak_bytes is None
    assert linear.decode_ratio is not None
    assert linear.decode_ratio.median > 0
    assert fnet.skipped == "has no bidirectional decoding"
