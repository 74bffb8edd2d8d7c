import gzip
import hashlib
import io
import lzma
import os
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from subquad.data import files
from subquad.data.files import Broken, File, Missing
from subquad.disk import user_cache

BODY = bytes(range(256)) * 300


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path != "/cut":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[:1000])  # and the connection breaks
        return None


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """(a folder, the address under which this machine serves it)"""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def everything(folder: Path) -> list[str]:
    """All files in a folder except the lock, which stays."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".lock")


def test_a_file_that_exists_is_not_downloaded(data: Path) -> None:
    file = File("set/a.bin", "home", also=("other/a",), url="http://127.0.0.1:9/a", sha256="0" * 64)
    (data / "other").mkdir()
    (data / "other/a").write_bytes(b"x")
    assert files.find(file) == files.get(file) == data / "other/a"
    (data / "set").mkdir()
    (data / "set/a.bin").write_bytes(b"y")
    assert files.get(file) == data / "set/a.bin"


def test_a_download_is_checked_and_put_in_its_place(data: Path, site: tuple[Path, str]) -> None:
    (site[0] / "a.bin").write_bytes(BODY)
    path = files.get(File("set/a.bin", "home", url=f"{site[1]}/a.bin", sha256=sha256(BODY)))
    assert path == data / "set/a.bin"
    assert path.read_bytes() == BODY
    assert everything(data) == ["set", "set/a.bin"]


def test_a_folder_that_does_not_exist_is_made(
    data: Path, site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(data / "new/place"))
    (site[0] / "a").write_bytes(BODY)
    assert files.get(File("a", "home", url=f"{site[1]}/a", sha256=sha256(BODY))).read_bytes() == BODY


def test_a_wrong_hash_fails_and_leaves_nothing(data: Path, site: tuple[Path, str]) -> None:
    (site[0] / "a.bin").write_bytes(BODY[:-1] + b"!")
    known = sha256(BODY)
    with pytest.raises(Broken, match=rf"a\.bin is not the file that subquad knows.*{known}") as error:
        files.get(File("set/a.bin", "http://home", url=f"{site[1]}/a.bin", sha256=known))
    assert "http://home" in str(error.value)
    assert everything(data) == []


@pytest.mark.parametrize("name", ["cut", "absent"])
def test_a_broken_connection_leaves_nothing_and_says_what_to_do(data: Path, site: tuple[Path, str], name: str) -> None:
    with pytest.raises(Missing, match="set/a") as error:
        files.get(File("set/a", "http://home", url=f"{site[1]}/{name}", sha256=sha256(BODY)))
    assert str(data) in str(error.value)
    assert "Put it there (from http://home)" in str(error.value)
    assert "SUBQUAD_DATA" in str(error.value)
    assert everything(data) == []


def test_without_a_network_the_message_names_file_and_folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(Missing) as error:
        files.get(File("mnist/x.gz", "http://home", url="http://127.0.0.1:9/x.gz", sha256="0" * 64))
    message = str(error.value)
    assert message == (
        f"mnist/x.gz is not in {data}, and downloading http://127.0.0.1:9/x.gz failed: the host cannot be reached. "
        "Put it there (from http://home), or set SUBQUAD_DATA to the folder that holds it"
    )


def test_without_pooch_the_message_says_so(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(Missing, match="the package pooch is not installed"):
        files.get(File("a", "home", url="http://127.0.0.1:9/a", sha256="0" * 64))


def test_without_a_public_file_nothing_is_tried(data: Path) -> None:
    with pytest.raises(Missing, match=r"an4 is not in .*no public file of known SHA-256.*http://an4"):
        files.get(File("an4", "http://an4"))


def test_archives_are_unpacked_whole(data: Path, site: tuple[Path, str]) -> None:
    with zipfile.ZipFile(site[0] / "a.zip", "w") as packed:
        packed.writestr("enwik8", BODY)
    with tarfile.open(site[0] / "b.tar.gz", "w:gz") as tar:
        for name in ("set/one", "set/two"):
            info = tarfile.TarInfo(name)
            info.size = len(BODY)
            tar.addfile(info, io.BytesIO(BODY))
    for name, path, kind in (("a.zip", "enwik8", "zip"), ("b.tar.gz", "set", "tar")):
        known = sha256((site[0] / name).read_bytes())
        assert files.get(File(path, "home", url=f"{site[1]}/{name}", sha256=known, unpack=kind)) == data / path
    assert (data / "enwik8").read_bytes() == BODY
    assert everything(data) == ["enwik8", "set", "set/one", "set/two"]


def test_an_archive_without_the_file_says_so(data: Path, site: tuple[Path, str]) -> None:
    with zipfile.ZipFile(site[0] / "a.zip", "w") as packed:
        packed.writestr("other", BODY)
    known = sha256((site[0] / "a.zip").read_bytes())
    with pytest.raises(Missing, match=r"a\.zip does not hold it"):
        files.get(File("enwik8", "home", url=f"{site[1]}/a.zip", sha256=known, unpack="zip"))


def pack(path: Path, kind: str, sizes: dict[str, int]) -> None:
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, size in sizes.items():
                packed.writestr(name, bytes(size))
        return
    mode: Any = f"w:{kind}"
    with tarfile.open(path, mode) as tar:
        for name, size in sizes.items():
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))


@pytest.mark.parametrize("kind", ["zip", "gz", "xz"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"set/a": 600, "set/b": 600}, r"unpacks to more than 1,000 bytes"),
        ({f"set/{n}": 1 for n in range(20)}, r"holds more than 10 files"),
        ({"set/a": 1, "../evil": 1}, r"holds '\.\./evil', which lies outside"),
        ({"/evil": 1}, r"holds '/evil', which lies outside"),
        ({"set/../../evil": 1}, r"which lies outside"),
    ],
)
def test_an_archive_keeps_to_its_limits_and_its_folder(
    data: Path,
    site: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    sizes: dict[str, int],
    message: str,
) -> None:
    monkeypatch.setattr(files, "LARGEST", 1000)
    monkeypatch.setattr(files, "MOST", 10)
    archive = site[0] / "set.archive"
    pack(archive, kind, sizes)
    known = sha256(archive.read_bytes())
    with pytest.raises(Broken, match=message):
        files.get(File("set", "home", url=f"{site[1]}/{archive.name}", sha256=known, unpack="zip"))
    assert everything(data) == []
    assert not list(data.parent.rglob("evil"))


@pytest.mark.parametrize(("kind", "pack"), [("gzip", gzip.compress), ("xz", lzma.compress)])
def test_a_compressed_file_has_a_limit(tmp_path: Path, kind: Any, pack: Any) -> None:
    path = tmp_path / "a"
    path.write_bytes(pack(bytes(10**6)))
    assert files.unpacked(path, kind, most=10**6) == bytes(10**6)
    with pytest.raises(Broken, match=r"a unpacks to more than 999,999 bytes"):
        files.unpacked(path, kind, most=10**6 - 1)
    path.write_bytes(pack(bytes(10**6))[:-8])
    with pytest.raises(Broken, match=f"a is not a whole {kind} file"):
        files.unpacked(path, kind)


def test_arrays_hold_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.arange(6).reshape(2, 3), y=np.zeros(100))
    assert (
        files.arrays(path)["x"].tolist()
        == files.arrays(path, path.read_bytes())["x"].tolist()
        == [[0, 1, 2], [3, 4, 5]]
    )
    with monkeypatch.context() as patch:
        patch.setattr(files, "LARGEST", 500)
        with pytest.raises(Broken, match="unpacks to more than 500 bytes"):
            files.arrays(path)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**15,)})
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("x.npy", header.getvalue())
    with pytest.raises(Broken, match=r"x\.npy should hold float64 \(1000000000000000,\) and holds 128 bytes"):
        files.arrays(path)
    path.write_bytes(b"nothing")
    with pytest.raises(Broken, match=r"a\.npz is not a whole npz file"):
        files.arrays(path)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "..\\x", "C:/x"])
def test_a_list_of_files_cannot_name_files_outside(tmp_path: Path, name: str) -> None:
    assert files.inside(tmp_path, "a/b.png", tmp_path / "list") == tmp_path / "a/b.png"
    with pytest.raises(Broken, match=r"list names .*, which lies outside"):
        files.inside(tmp_path, name, tmp_path / "list")


def test_the_folder_is_the_users_choice_or_their_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", "~/somewhere")
    assert files.folder() == Path.home() / "somewhere"
    monkeypatch.delenv("SUBQUAD_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform.startswith("linux"):
        assert files.folder() == tmp_path / "subquad"


def test_a_prepared_file_is_made_once_and_again_when_its_source_changes(data: Path) -> None:
    source, made = data / "source", []

    def make(new: Path) -> None:
        made.append(source.read_bytes())
        new.write_bytes(source.read_bytes().upper())

    source.write_bytes(b"one")
    first = files.prepared("name.bin", make, source)
    assert files.prepared("name.bin", make, source) == first
    assert first.read_bytes() == b"ONE"
    source.write_bytes(b"other")
    assert files.prepared("name.bin", make, source).read_bytes() == b"OTHER"
    assert made == [b"one", b"other"]


def test_a_failed_preparation_leaves_nothing(data: Path) -> None:
    def make(new: Path) -> None:
        new.mkdir()
        (new / "part").write_bytes(b"x")
        raise Broken("half way")

    with pytest.raises(Broken, match="half way"):
        files.prepared("name", make)
    assert everything(data) == ["prepared"]


def test_files_left_by_a_killed_process_are_removed(data: Path) -> None:
    path = files.prepared("x", Path.touch)
    path.unlink()
    (path.parent / f".{path.name}.123").mkdir()
    (path.parent / f".{path.name}.456").touch()
    assert files.prepared("x", Path.touch) == path
    assert everything(path.parent) == [path.name]


def test_a_read_only_folder_is_left_alone(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert files.prepared("x", Path.touch).is_relative_to(user_cache())
    assert everything(data) == []


def test_only_one_of_several_threads_prepares_a_file(data: Path) -> None:
    made, found = [], []

    def make(new: Path) -> None:
        made.append(new)
        time.sleep(0.1)
        new.write_bytes(b"x")

    asking = [threading.Thread(target=lambda: found.append(files.prepared("x", make).read_bytes())) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == [b"x"] * 4
    assert len(made) == 1


def test_a_lock_is_freed_when_its_holder_is_killed(data: Path) -> None:
    code = (
        "import time\nfrom subquad.data import files\n"
        "files.prepared('x', lambda new: (print('holds it', flush=True), time.sleep(600)))"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holds it\n"
    with pytest.raises(TimeoutError):
        files.lock(data / "prepared").acquire(timeout=0.1)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert files.prepared("x", Path.touch).is_file()


def test_a_folder_has_changed_when_anything_in_it_has(data: Path) -> None:
    (data / "set/class/images").mkdir(parents=True)
    picture = data / "set/class/images/1.png"
    picture.write_bytes(b"a")
    (data / "set/round").symlink_to(data / "set")

    def kept() -> Path:
        return files.prepared("x", lambda new: new.touch(), data / "set")

    first = kept()
    assert kept() == first
    time = picture.stat().st_mtime_ns
    os.utime(picture, ns=(time, time - 1))  # replaced by an older file of the same size
    second = kept()
    (data / "set/class/images/2.png").touch()
    assert len({first, second, kept()}) == 3


def test_a_bar_is_only_shown_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(files.shown("abc", "letters")) == ["a", "b", "c"]
    assert not capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert list(files.shown("abc", "letters")) == ["a", "b", "c"]
    assert capsys.readouterr().out


def test_pooch_is_imported_only_for_a_download() -> None:
    names = "digits mnist cifar10 imagenet64 tiny_imagenet text imdb music speech audio midi copy order files images"
    code = f"import importlib, sys\nfor n in '{names}'.split(): importlib.import_module('subquad.data.' + n)\n"
    code += "assert not {'pooch', 'requests', 'matplotlib'} & set(sys.modules), sorted(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_download_has_a_hash_and_a_home() -> None:
    from subquad.data import cifar10, imagenet64, imdb, mnist, music, speech, text, tiny_imagenet

    known = [*mnist.FILES.values(), *text.FILES.values(), cifar10.FOLDER, imdb.FOLDER, music.CHORALES]
    known += [speech.AN4, speech.FSDD, imagenet64.FOLDER, tiny_imagenet.FOLDER]
    for file in known:
        assert (file.url is None) == (file.sha256 is None)
        assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
        assert file.home


def test_another_or_a_changed_source_gets_another_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.tsv").write_text("1")
    first = files.mark(tmp_path / "one" / "a.tsv")
    assert first == files.mark(tmp_path / "one" / ".." / "one" / "a.tsv") != files.mark(tmp_path / "two" / "a.tsv")
    (tmp_path / "one" / "a.tsv").write_text("12")
    assert files.mark(tmp_path / "one" / "a.tsv") != first
    (tmp_path / "one" / "gone").symlink_to(tmp_path / "nowhere")
    before = files.mark(tmp_path / "one")
    (tmp_path / "one" / "a.tsv").write_text("123")
    assert files.mark(tmp_path / "one") != before
