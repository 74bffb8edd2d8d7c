from pathlib import Path

from typer.testing import CliRunner

import subquad
from subquad.cli import app

run = CliRunner(env={"COLUMNS": "160"})


def test_version() -> None:
    assert subquad.__version__ in run.invoke(app, ["--version"]).output


def test_list_names_every_mechanism() -> None:
    out = run.invoke(app, ["list"]).output
    for name in subquad.MECHANISMS:
        assert f"\n{name} " in out


def test_show_gives_equation_cost_options_source_and_verification() -> None:
    for name in subquad.MECHANISMS:
        out = run.invoke(app, ["show", name]).output
        for part in ("Paper", "Definition", "Cost", "Verified", "Options", "dim", "required"):
            assert part in out, (name, part)
    assert "feature_map" in run.invoke(app, ["show", "linear"]).output


def test_a_wrong_name_suggests_the_nearest() -> None:
    result = run.invoke(app, ["show", "linformre"])
    assert result.exit_code == 2
    assert "did you mean 'linformer'" in result.output


def test_show_draws_and_measures(tmp_path: Path) -> None:
    result = run.invoke(app, ["show", "local", "--picture", str(tmp_path / "a" / "local.png"), "--error"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a" / "local.png").read_bytes().startswith(b"\x89PNG")
    assert "relative error" in result.output


def test_error_where_there_is_nothing_to_compare_with() -> None:
    result = run.invoke(app, ["show", "fnet", "--error"])
    assert result.exit_code == 2
    assert "approximates no softmax" in result.output
