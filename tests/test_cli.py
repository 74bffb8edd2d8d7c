import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from typer.testing import CliRunner

import subquad
from subquad.cli import app
from tests.training.tiny import start

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
    shown = run.invoke(app, ["show", "linear"]).output
    assert re.search(r"feature_map +'elu\+1' +a name, or any function of \[\.\.\., K\]", shown)
    assert re.search(r"max_length +None +has no effect here", shown)


def test_show_fits_the_terminal() -> None:
    for name in subquad.MECHANISMS:
        lines = run.invoke(app, ["show", name], env={"COLUMNS": "80"}).output.splitlines()
        assert max(map(len, lines)) <= 80, name
    assert "\n  R random, and lets i see\n" in run.invoke(app, ["show", "reformer"], env={"COLUMNS": "80"}).output


def test_a_wrong_name_suggests_the_nearest() -> None:
    result = run.invoke(app, ["show", "linformre"])
    assert result.exit_code == 2
    assert "did you mean 'linformer'" in result.output


def test_show_draws_and_measures(tmp_path: Path) -> None:
    result = run.invoke(app, ["show", "local", "--picture", str(tmp_path / "a" / "local.png"), "--error"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a" / "local.png").read_bytes().startswith(b"\x89PNG")
    assert "relative error" in result.output


def test_error_if_there_is_nothing_to_compare_with() -> None:
    result = run.invoke(app, ["show", "fnet", "--error"])
    assert result.exit_code == 2
    assert "approximates no softmax" in result.output


LISTING = """
import sys
from subquad.cli import app
for words in (["--help"], ["show", "--help"], ["list"]):
    try:
        app(words)
    except SystemExit as end:
        assert not end.code
print(*sys.modules, file=sys.stderr)
"""


def test_listing_and_help_load_no_more_than_the_package() -> None:
    """Code that measures, trains or draws is only loaded by commands that need it."""
    done = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=True)
    loaded = done.stderr.split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("subquad.")}
    assert "mechanisms" in rooms
    assert not rooms & {"bench", "data", "tasks", "training"}
    assert not {"matplotlib", "triton", "pandas", "tensorboard"} & set(loaded)


def _one_of_two(rank: int, folder: Path) -> None:
    """A rank as torchrun would start it, with its output in a file."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    small = ("training.steps=2", "training.batch=4", "training.evaluate_batch=200", "model.dim=16", "model.depth=1")
    settings = [word for setting in (*small, "model.heads=2") for word in ("--set", setting)]
    result = run.invoke(app, ["train", "digits", "--out", str(folder / "run"), "--device", "cpu", *settings])
    dist.destroy_process_group()
    (folder / f"said_{rank}").write_text(result.output)
    os._exit(result.exit_code)


def test_only_the_first_rank_prints(tmp_path: Path) -> None:
    ranks = [start(_one_of_two, rank, tmp_path) for rank in range(2)]
    for process in ranks:
        process.join(120)
    said = [(tmp_path / f"said_{rank}").read_text() for rank in range(2)]
    assert [process.exitcode for process in ranks] == [0, 0], said
    assert said[0].count("2 steps in") == 1
    assert said[1] == ""
