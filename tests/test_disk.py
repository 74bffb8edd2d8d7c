import subprocess
import sys
from pathlib import Path

import pytest

from subquad.checks import plain_name
from subquad.disk import DEEPEST, lock_folder, parse_json, read_json, read_object, read_sealed, set_aside, write_sealed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", r"file\.json is not JSON: "),
        (b'{"a": "\xff"}', r"file\.json holds 0xff at byte 7: accepted is JSON in UTF-8"),
        (b"[" * 100_000 + b"]" * 100_000, r"file\.json is nested too deep: accepted are 100 levels"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, r"file\.json is nested too deep"),
        (b"9" * 10_000, r"file\.json is not JSON: .*digits"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "file.json").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "file.json")


def test_usual_nesting_is_read(tmp_path: Path) -> None:
    assert parse_json("[" * DEEPEST + "]" * DEEPEST, "it")
    (tmp_path / "file.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"holds a list: accepted is a JSON object"):
        read_object(tmp_path / "file.json")


def test_a_changed_sealed_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    data = {"b": (1, 2.5), "a": {"x": None, "é": "ü"}, "c": 1e-300}
    write_sealed(file, data)
    intact = {"b": [1, 2.5], "a": {"x": None, "é": "ü"}, "c": 1e-300}
    assert read_sealed(file) == (intact, True)
    written, refused = file.read_bytes(), 0
    for at in range(len(written)):
        for bit in range(8):
            flipped = bytearray(written)
            flipped[at] ^= 1 << bit
            file.write_bytes(flipped)
            try:
                assert read_sealed(file) == (intact, True)
            except ValueError:
                refused += 1
    assert refused > 8 * len(written) * 0.9


def test_an_old_file_without_digest_is_read(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"a": 1}')
    assert read_sealed(tmp_path / "file.json") == ({"a": 1}, False)


def test_set_aside_keeps_the_files(tmp_path: Path) -> None:
    for content in ("one", "two"):
        (tmp_path / "file").write_text(content)
        assert set_aside(tmp_path / "file") == tmp_path / "file.damaged"
    assert (tmp_path / "file.damaged").read_text() == "two"
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("name", ["../../evil", "/etc", "..", ".", "", ".hidden", "a/b", "a\\b", "a b", "a\n", "é"])
def test_only_plain_names_become_files(name: str) -> None:
    with pytest.raises(ValueError, match=r"^name=.* cannot work: accepted is a name of letters, digits"):
        plain_name("name", name)


def test_the_error_proposes_a_name() -> None:
    with pytest.raises(ValueError, match=r"such as 'evil-one'$"):
        plain_name("name", "../../evil one")
    assert plain_name("name", "mnist_linear-2.0") == "mnist_linear-2.0"


def test_a_locked_folder_is_refused_by_name_until_its_process_ends(tmp_path: Path) -> None:
    """Also when that process is killed."""
    hold = "import sys, time, pathlib; from subquad.disk import lock_folder\n"
    hold += "with lock_folder(pathlib.Path(sys.argv[1]), ''): print('locked', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with (
        pytest.raises(ValueError, match="is in use: somebody works there"),
        lock_folder(tmp_path, "somebody works there"),
    ):
        pass
    process.kill()
    process.wait()
    with lock_folder(tmp_path, "busy"), pytest.raises(ValueError, match="busy"), lock_folder(tmp_path, "busy"):
        pass
    with lock_folder(tmp_path, "released above"):
        pass


def test_neither_fcntl_nor_resource_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows does not have them."""
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "import sys\nsys.modules.update(fcntl=None, resource=None)\nfrom pathlib import Path\n"
    code += "import subquad.disk, subquad.machine, subquad.training.train, subquad.tasks\n"
    code += "from subquad.data import files\nassert files.prepared('x', Path.touch).is_file()"
    subprocess.run([sys.executable, "-c", code], check=True)
