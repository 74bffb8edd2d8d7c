"""Runs the tests of the kernels in processes of their own: few of them, because each imports torch and Triton again."""

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
GROUPS = {  # two, so that two workers share them
    "linear": [path for path in FILES if "linear" in str(path.relative_to(FOLDER))],
    "others": [path for path in FILES if "linear" not in str(path.relative_to(FOLDER))],
}


@outside
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_in_their_own_process(group: str) -> None:
    pytest.importorskip("triton")
    interpret(GROUPS[group])


def test_every_file_of_kernels_is_run() -> None:
    marked = {path for path in FOLDER.rglob("test_*.py") if "\n@interpreted" in path.read_text(encoding="utf-8")}
    assert marked <= set(FILES)
    assert len(FILES) >= 7
