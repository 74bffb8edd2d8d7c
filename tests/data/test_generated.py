from pathlib import Path

import numpy as np
import pytest

from subquad.data.generated import kept


def test_arrays_are_made_once_and_mapped(tmp_path: Path) -> None:
    calls = []

    def make() -> dict[str, np.ndarray]:
        calls.append(1)
        return {"a": np.arange(5), "b": np.eye(2)}

    for _ in range(2):
        found = kept(tmp_path / "x" / "set", make)
        assert (found["a"] == np.arange(5)).all()
        assert isinstance(found["b"], np.memmap)
    assert len(calls) == 1
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["set"]


def test_a_failed_generation_leaves_no_data(tmp_path: Path) -> None:
    def broken() -> dict[str, np.ndarray]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        kept(tmp_path / "set", broken)
    assert not list(tmp_path.iterdir())
    (tmp_path / "set").mkdir()  # nothing is in it
    (tmp_path / "set" / "stray").touch()
    with pytest.raises(OSError, match="not empty"):
        kept(tmp_path / "set", lambda: {"a": np.zeros(1)})
    (tmp_path / "set" / "stray").unlink()
    assert kept(tmp_path / "set", lambda: {"a": np.zeros(1)})["a"].shape == (1,)


def test_a_second_process_uses_the_arrays_of_the_first(tmp_path: Path) -> None:
    def slow() -> dict[str, np.ndarray]:
        (tmp_path / "set").mkdir()
        np.save(tmp_path / "set" / "a.npy", np.array([1]))  # another process finished first
        return {"a": np.array([2])}

    assert kept(tmp_path / "set", slow)["a"][0] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["set"]
