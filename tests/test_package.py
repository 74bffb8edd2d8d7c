"""What importing the package loads, and what the wheel contains."""

import inspect
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest

import subquad
import subquad.models
from subquad.ops import linear_attention, sparse_attention
from subquad.ops.linear.api import _Options as LinearOptions
from subquad.ops.sparse.api import _Options as SparseOptions

HEAVY = (
    "triton",
    "matplotlib",
    "plotly",
    "transformers",
    "rich",
    "typer",
    "pandas",
    "scipy",
    "torchvision",
    "tensorboard",
)
MOST = 35_000_000  # bytes of the wheel: checkpoints of at most 30 MB, and the code


def test_importing_loads_nothing_heavy_beside_torch() -> None:
    code = "import sys, torch; before = set(sys.modules); import subquad; print(*(set(sys.modules) - before));"
    code += "import subquad.cli; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *loaded, theirs = done.stdout.split()
    assert theirs == "False"
    assert {"subquad.mechanisms.linear", "subquad.ops.linear.operators"} <= set(loaded)
    assert not {name for name in loaded if name.split(".")[0] in HEAVY}


def test_public_names_are_few_and_the_expected_ones() -> None:
    names = [name for name in subquad.__all__ if not isinstance(getattr(subquad, name), ModuleType)]
    assert len(names) <= 16
    assert {"Sampling", "Streams", "fork", "load_state", "save_state"} <= set(names)
    assert {"models", "nn", "ops"} <= set(subquad.__all__)
    assert {"fork", "load_state", "save_state"} <= set(subquad.models.__all__)
    assert all(hasattr(subquad, name) for name in subquad.__all__)


@pytest.mark.parametrize(
    ("function", "seen", "told_apart"),
    [(linear_attention, LinearOptions, "return_state"), (sparse_attention, SparseOptions, "return_lse")],
)
def test_type_checkers_see_every_option(function: Any, seen: Any, told_apart: str) -> None:
    hints = get_type_hints(function)
    keywords = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert get_type_hints(seen) == {name: hints[name] for name in keywords - {told_apart}}


def test_the_wheel_is_pure_python_and_carries_the_data(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    build = "from hatchling.build import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=root, capture_output=True, text=True, check=True
    )
    name = done.stdout.split()[-1]
    assert name.endswith("-py3-none-any.whl")
    held = zipfile.ZipFile(tmp_path / name).namelist()
    assert {"subquad/py.typed", "subquad/data/digits.npz", "subquad/mechanisms/linear.py"} <= set(held)
    shipped = {path.relative_to(root) for path in (root / "checkpoints").rglob("*") if path.is_file()}
    assert shipped
    assert {f"subquad/{path}" for path in shipped} <= set(held)
    assert (tmp_path / name).stat().st_size < MOST
    assert not [path for path in held if path.endswith((".so", ".c", ".cpp", ".cu"))]
