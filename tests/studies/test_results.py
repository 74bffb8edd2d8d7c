import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from subquad.disk import read_object
from subquad.measure.cost import Row
from subquad.studies.columns import COLUMNS
from subquad.studies.results import (
    KINDS,
    ArenaTable,
    Comparison,
    ReproducedTable,
    continued,
    load,
    parse,
    save,
    to_json,
)

ROOT = Path(__file__).parents[2]
WRITTEN = [*ROOT.glob("results/**/*.json"), *ROOT.glob("src/subquad/studies/figures/*.json")]


def lost(before: Any, after: Any, where: str = "") -> list[str]:
    """The keys and values of a file that were lost when it was read."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [text for key, value in before.items() for text in lost(value, after.get(key), f"{where}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [text for one, other in zip(before, after, strict=True) for text in lost(one, other, where)]
    return [] if before == after else [where]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_nothing_of_a_file_that_was_ever_written_is_lost(path: Path) -> None:
    data = read_object(path)
    figures = parse(data, path)
    assert (figures is not None) == (data.get("kind") in {kind.kind for kind in KINDS})
    if figures is not None:
        assert lost(data, to_json(figures)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded_again_with_keys_that_are_not_known(kind: type[Any], tmp_path: Path) -> None:
    figures = kind(commit="abc", date="2026-01-02", machine={"device": "cpu"})
    save(figures, tmp_path / "new" / "a.json")
    assert load(tmp_path / "new" / "a.json", kind) == figures
    later = {**read_object(tmp_path / "new" / "a.json"), "of a later version": 1}
    (tmp_path / "b.json").write_text(json.dumps(later))
    assert load(tmp_path / "b.json", kind) == figures
    (tmp_path / "old.json").write_text(json.dumps({"kind": kind.kind}))
    assert load(tmp_path / "old.json", kind) == kind()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": 3}, "rows='3' is not"),
        ({"rows": [{"mechanism": "linear"}]}, "length"),
        ({"rows": [{"mechanism": "linear", "length": 0}]}, "length=0"),
        ({"rows": [{"mechanism": "linear", "length": True}]}, "length='True' is not int"),
        ({"rows": [{"mechanism": "linear", "length": 8, "peak_bytes": -1}]}, "peak_bytes=-1"),
        ({"rows": [{"mechanism": "linear", "length": 8, "training_ms": {"median": 1.0}}]}, "low"),
        ({"rows": [{"mechanism": "linear", "length": 8, "memory_ratio": "x"}]}, "memory_ratio='x' is not float"),
        ({"quality": [{"mechanism": "linear", "task": "copy", "metric": "m", "value": float("nan")}]}, "value='nan'"),
    ],
)
def test_a_value_that_cannot_be_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=r"x\.json is damaged, or not what subquad compare writes") as raised:
        parse({"kind": "compare", **changes}, Path("x.json"))
    assert named in str(raised.value)


def test_a_call_goes_on_from_its_own_kind_of_file_alone(tmp_path: Path) -> None:
    assert continued(tmp_path / "results.json", ArenaTable) == ArenaTable()
    save(ReproducedTable(table="copy"), tmp_path / "results.json")
    assert continued(tmp_path / "results.json", ReproducedTable).table == "copy"
    with pytest.raises(ValueError, match="is not what subquad lra wrote"):
        continued(tmp_path / "results.json", ArenaTable)
    with pytest.raises(ValueError, match="its kind is not"):
        load(tmp_path / "results.json", Comparison)


def test_every_column_shows_a_field_of_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(Row)}
    assert {column.field for column in COLUMNS} <= fields
    assert len({column.heading for column in COLUMNS}) == len(COLUMNS)
