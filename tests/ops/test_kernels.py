"""Runs the tests of the kernels in a process of their own: one for all, because each imports torch and Triton again."""

from pathlib import Path

import pytest

from tests.ops.own_process import interpret, outside

FOLDER = Path(__file__).parent
FILES = sorted(
    path
    for path in FOLDER.rglob("test_*.py")
    if "from tests.ops.own_process import" in path.read_text(encoding="utf-8")
)
FILES.remove(Path(__file__))


@outside
def test_kernels_in_their_own_process() -> None:
    pytest.importorskip("triton")
    interpret(FILES)


def test_every_file_of_kernels_is_run() -> None:
    marked = {path for path in FOLDER.rglob("test_*.py") if "\n@interpreted" in path.read_text(encoding="utf-8")}
    assert marked <= set(FILES)
    assert len(FILES) >= 7
