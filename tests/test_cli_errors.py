"""Wrong options and files are refused at once: exit code 2, and one line that names the option or the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from subquad.cli import app
from subquad.measure import cost as measure
from subquad.models import LanguageModel
from subquad.studies import compare
from subquad.studies import compare_worker as worker
from subquad.studies.settings import Settings
from subquad.tasks.music import START
from tests.report import runs

SMALL: dict[str, Any] = {"dim": 8, "depth": 1, "heads": 2, "mechanism": "linear"}


def refused(*words: str | Path, code: int = 2) -> str:
    """The one line that a refused command prints."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    (line,) = result.output.splitlines()
    assert line.startswith("error ")
    assert "[Errno" not in line
    return line


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Saved models of images, text, notes and sound; nothing may be generated with them."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was not refused before the work")

    LanguageModel(vocab=17, positions="grid", shape=(8, 8), max_length=64, **SMALL).save(tmp_path / "images")
    LanguageModel(vocab=256, positions="learned", max_length=64, **SMALL).save(tmp_path / "text")
    LanguageModel(vocab=9, **SMALL).save(tmp_path / "numbers")
    LanguageModel(vocab=START + 1, max_length=64, **SMALL).save(tmp_path / "music")
    (tmp_path / "music" / "card.json").write_text('{"task": "music", "data": {"rate": 8000}}')
    (tmp_path / "text" / "card.json").write_text('{"task": "text", "data": {}}')
    monkeypatch.setattr("subquad.models.generation.generate", never)
    monkeypatch.setattr("subquad.models.generation.stream", never)
    monkeypatch.setattr(LanguageModel, "generate", never)
    monkeypatch.setattr(LanguageModel, "stream", never)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        ("images", ["--out", "x.exe"], "out='x.exe' cannot work: accepted is a file whose name ends in .png or .jpg"),
        ("images", ["--out", "x"], "out='x' cannot work"),
        ("images", ["--out", "."], "this is a folder"),
        ("images", ["--count", "-1"], "count=-1 cannot work"),
        ("images", ["--count", "1000000000000"], "count=1000000000000 cannot work: accepted is at most"),
        (
            "images",
            ["--shape", "1000000x1000000"],
            "shape='1000000x1000000' cannot work: accepted is at most 64 pixels",
        ),
        ("images", ["--shape", "²x2"], "shape='²x2' cannot work"),
        ("images", ["--prompt", "Once"], "prompt='Once' cannot work: accepted is --count, --out, --shape, --complete"),
        ("images", ["--steps", "5"], "steps='5' cannot work"),
        ("images", ["--complete", "missing.png"], "complete='missing.png' cannot work: accepted is an image file"),
        ("images", ["--seed", "99999999999999999999"], "seed=99999999999999999999 cannot work"),
        ("images", ["--temperature", "nan"], "temperature=nan cannot work"),
        ("numbers", ["--shape", "1000000x1000000"], "shape='1000000x1000000x1' cannot work: accepted is a smaller one"),
        ("numbers", ["--prompt", "3 11"], "prompt='3 11' cannot work: accepted is tokens from 0 to 8"),
        ("text", ["--shape", "2x2"], "shape='2x2' cannot work: accepted is --prompt, --steps"),
        ("text", ["--complete", "x.png"], "complete='x.png' cannot work"),
        ("text", ["--count", "3"], "count='3' cannot work"),
        ("text", ["--out", "x.png"], "out='x.png' cannot work"),
        ("text", ["--compile"], "compile='True' cannot work"),
        ("text", ["--steps", "0"], "steps=0 cannot work"),
        ("text", ["--steps", "65"], "steps=65 cannot work: accepted is at most 64"),
        ("text", ["--prompt", "a\udcff"], "prompt='a\\udcff' cannot work: accepted is text in UTF-8"),
        ("music", ["--prompt", "la"], "prompt='la' cannot work: accepted is --count, --out, --steps"),
        ("music", ["--shape", "2x2"], "shape='2x2' cannot work"),
        ("music", ["--count", "0"], "count=0 cannot work"),
        ("music", ["--steps", "65"], "steps=65 cannot work: accepted is at most 64"),
        ("music", ["--out", "x.exe"], "out='x.exe' cannot work: accepted is the beginning of names"),
    ],
)
def test_generate_refuses_options_that_a_model_does_not_use(
    models: Path, model: str, words: list[str], said: str
) -> None:
    assert said in refused("generate", models / model, *words)


@pytest.mark.parametrize(
    "card", ['{"task": "music", "data": {"rate": "x"}}', '{"task": "images", "data": 3}', "\xff", "["]
)
def test_a_damaged_card_is_named(models: Path, card: str) -> None:
    (models / "music" / "card.json").write_bytes(card.encode("latin-1"))
    assert "card" in refused("generate", models / "music")


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "--out"), ("demo", "--out"), ("atlas", "--out"), ("train", "digits", "--out"),
        ("reproduce", "mnist", "--out"), ("lra", "--out"), ("lra", "--pack"), ("release", "run", "name", "--out"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inner", ["", "inner"])
def test_a_file_where_a_folder_belongs_is_refused_at_once(tmp_path: Path, words: tuple[str, ...], inner: str) -> None:
    (tmp_path / "file").write_text("")
    line = refused(*words, tmp_path / "file" / inner)
    assert f"{words[-1][2:]}='{tmp_path / 'file' / inner}' cannot work: accepted is a folder" in line
    assert f"{tmp_path / 'file'} is a file" in line


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "--save"), ("reproduce", "mnist", "--save"), ("bench", "generation", "--out"),
        ("show", "linear", "--picture"), ("report", "run", "--out"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    name = words[-1][2:]
    assert f"{name}='{tmp_path / 'x.exe'}' cannot work: accepted is" in refused(*words, tmp_path / "x.exe")
    refused(*words, tmp_path / "file" / "x.json")
    if words[0] != "report":  # report writes into a folder
        assert "this is a folder" in refused(*words, tmp_path / "folder.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("reproduce mnist --jobs 0", "jobs=0 cannot work: accepted is an integer of at least 1"),
        ("reproduce mnist --minutes -1", "minutes=-1.0 cannot work"),
        ("reproduce mnist --samples -1", "samples=-1 cannot work"),
        ("lra --seeds 100000000", "seeds=100000000 cannot work"),
        ("lra --efficiency --batch 100000000000", "batch=100000000000 cannot work"),
        ("bench generation --steps 0", "steps=0 cannot work"),
        ("bench generation --most 0", "most=0 cannot work"),
        ("bench generation --lengths ²", "lengths='²' cannot work"),
        ("bench generation --depth 100000000", "depth=100000000 cannot work: accepted is an integer of at most 10,000"),
        ("compare --memory nan", "memory=nan cannot work"),
        ("compare --memory inf", "memory=inf cannot work"),
        ("compare --lengths 99999999999999999999", "lengths='99999999999999999999' cannot work"),
        ("compare --batch 100000000", "batch=100000000 cannot work: accepted is at most"),
        ("compare --dim 100000000 --heads 1", "dim=100000000 cannot work: accepted is a smaller one"),
        ("compare --lengths 1000000000000", "lengths=1000000000000 cannot work: accepted is a shorter one"),
        ("compare --dim 99999999999999999999", "dim=99999999999999999999 cannot work"),
        ("train digits --set model.depth=300000", "depth=300000 cannot work"),
        ("train digits --set training.batch=100000000", "training.batch=100000000 in 1 micro-batches cannot work"),
        ("train digits --set model.dim=100000000000 --set model.heads=1", "not enough memory for"),
    ],
)
def test_values_that_cannot_work_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "_elsewhere", None)  # nothing is measured
    assert said in refused(*words.split())


def test_a_depth_that_does_not_fit_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subquad.training.memory_check.free_bytes", lambda _: 100_000_000)
    words = ("train", "digits", "--out", tmp_path / "run", "--set", "model.depth=9000")
    assert "model.depth=9000 cannot work: accepted is fewer layers" in refused(*words)
    assert not (tmp_path / "run").exists()


def test_a_batch_that_does_not_fit_is_found_with_one_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data would fit into memory, but its gradients and activations would not."""
    monkeypatch.setattr("subquad.training.memory_check.free_bytes", lambda _: 200_000_000)
    words = ("train", "digits", "--out", tmp_path / "run", "--device", "cpu", "--set", "training.batch=20000")
    line = refused(*words)
    assert "training.batch=20000" in line
    assert "smaller training.micro_batch" in line
    small = ["training.micro_batch=10", "training.steps=1", "training.batch=100", "model.dim=8", "model.depth=1"]
    result = CliRunner().invoke(app, [*map(str, words), *(word for key in small for word in ("--set", key))])
    assert result.exit_code == 0, result.output


def test_a_comparison_skips_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(mechanisms=("linear",), lengths=(16,), dim=8, heads=1, batch=1000)
    monkeypatch.setattr(worker, "free_bytes", lambda _: 1_000_000)
    row = worker.Bench(settings).row("linear", 16, True)
    assert row.error is None
    assert (row.skipped or "").startswith("does not fit: at least 2.05 MB for input and output")


def test_running_out_of_memory_is_not_reported_as_an_error_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 8000000000000 bytes. Error code 12 (Cannot allocate memory)"
        )

    monkeypatch.setattr(worker, "_build", full)
    row = worker.Bench(Settings(mechanisms=("linear",), lengths=(16,), dim=8, heads=1)).row("linear", 16, True)
    assert (row.error, row.skipped) == (None, "out of memory: 8000000000000 bytes were requested at once")
    assert measure.out_of_memory(ValueError("no")) is None
    monkeypatch.setattr("subquad.studies.generation.sweep", full)
    line = refused("bench", "generation", "--dim", "512")
    assert line == "error not enough memory for dim=512: 8000000000000 bytes were requested at once"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("trained") / "run"
    small = ("training.steps=1", "training.batch=2", "training.evaluate_batch=200", "model.dim=8", "model.depth=1")
    words = ["train", "digits", "--out", str(folder), "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, *(word for key in small for word in ("--set", key))])
    assert result.exit_code == 0, result.output
    return folder


def keys_of(data: Any) -> list[tuple[Any, ...]]:
    """The path to every key of nested data; only the first item of each list is used."""
    if isinstance(data, list):
        return [(0, *path) for path in keys_of(data[0])] if data else []
    found = [(key,) for key in data] if isinstance(data, dict) else []
    return found + [(key, *path) for (key,) in found for path in keys_of(data[key])]


def damaged(data: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    copy = json.loads(json.dumps(data))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return copy


def rename(holder: Any, key: Any) -> None:
    holder[f"{key}x"] = holder.pop(key)


def replace(value: Any) -> Callable[[Any, Any], None]:
    def change(holder: Any, key: Any) -> None:
        holder[key] = value

    return change


CHANGES = [rename, *map(replace, ("x", None, -1, [1], {"a": 1}))]


def shown_or_named(file: Path, *words: str | Path) -> None:
    """The command either reads the file in spite of the damage or prints one line that names it."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
    if result.exit_code:
        (line,) = result.output.splitlines()
        assert str(file) in line


@pytest.mark.parametrize("name", ["result.json", "config.json", "metrics.jsonl"])
def test_one_damaged_key_of_a_run_is_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("subquad.report.charts.draw", lambda *_: None)
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    whole = json.loads(
        (run / name).read_text().splitlines()[0] if name == "metrics.jsonl" else (run / name).read_text()
    )
    keys = keys_of(whole)
    for number, path in enumerate(keys):
        change = CHANGES[number % len(CHANGES)] if len(path) > 1 or name == "config.json" else rename
        (run / name).write_text(json.dumps(damaged(whole, path, change)))
        shown_or_named(run / name, "report", run)
    assert len(keys) > 5


@pytest.mark.parametrize("change", CHANGES[:5], ids=range(5))
def test_a_damaged_result_is_named_on_resume(trained: Path, tmp_path: Path, change: Any) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    whole = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(damaged(whole, ("steps",), change)))
    assert str(run / "result.json") in refused("train", "digits", "--out", run, "--resume", "--device", "cpu")


@pytest.mark.parametrize("command", ["report", "recommend"])
def test_one_damaged_key_of_a_comparison_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("subquad.report.charts.draw", lambda *_: None)
    folder = runs.write(tmp_path / "run", quality=runs.results()["quality"][:1])
    whole = json.loads((folder / "results.json").read_text())
    whole["settings"]["device"] = "cpu"
    for part in ("rows", "growth", "crossovers"):
        whole[part] = [found for found in whole[part] if found["mechanism"] in ("softmax", "linear")]
    words = ("report", folder) if command == "report" else ("recommend", "--length", "2k", "--causal", "--from", folder)
    for number, path in enumerate(keys_of(whole)):
        (folder / "results.json").write_text(json.dumps(damaged(whole, path, CHANGES[number % len(CHANGES)])))
        shown_or_named(folder / "results.json", *words)


def test_json_that_holds_no_figures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    line = refused("report", tmp_path / "a.json")
    assert f"RUN='{tmp_path / 'a.json'}' cannot work: accepted is what subquad compare, train" in line
    assert str(tmp_path) in refused("report", tmp_path)
    runs.write(tmp_path / "run", rows=[], quality=[])
    shutil.copy(tmp_path / "run" / "results.json", tmp_path / "compared.json")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])  # a folder may also hold other JSON
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[" * 5000, b"[1]", b"3", b""], ids=range(6))
def test_files_that_are_no_json_are_named(trained: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "notes.json").write_bytes(content)
    (tmp_path / "results.json").write_bytes(content)
    for words in (
        ("report", tmp_path / "results.json"),
        ("recommend", "--length", "4k", "--from", tmp_path / "results.json"),
        ("lra", "--tasks", "listops", "--mechanisms", "linear", "--out", tmp_path),
    ):
        assert "s.json" in refused(*words)
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    for file in ("config.json", "result.json"):
        before = (run / file).read_bytes()
        (run / file).write_bytes(content)
        assert str(run / file) in refused("report", run)
        assert str(run / file) in refused("release", run, "name", "--out", tmp_path / "checkpoints")
        again = ["train", "digits", "--out", str(run), "--resume", "--device", "cpu"]
        if file == "config.json":  # the checkpoints hold the same settings
            repaired = CliRunner().invoke(app, again)
            assert repaired.exit_code == 0
            assert "config.json is not the config of a run" in repaired.output.replace("\n", "")
        else:
            assert str(run / file) in refused(*again)
        (run / file).write_bytes(before)
    (run / "model" / "config.json").write_bytes(content)
    assert str(run / "model" / "config.json") in refused("generate", run)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"nonsense"])
def test_arrays_that_are_damaged_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    from subquad.data import generated as store
    from subquad.tasks.lra import pack

    (tmp_path / "tokens.npy").write_bytes(content)
    assert f"data='{tmp_path / 'tokens.npy'}'" in refused("compare", "--data", tmp_path / "tokens.npy")
    with pytest.raises(ValueError, match=r"tokens\.npy is damaged"):
        store.kept(tmp_path, dict)
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    (tmp_path / "lra").mkdir()
    (tmp_path / "lra" / "image.npz.xz").write_bytes(content)
    with pytest.raises(ValueError, match=r"image\.npz\.xz is damaged"):
        pack.packed("image")
    np.save(tmp_path / "tokens.npy", np.zeros((2, 2, 2)))
    assert "accepted are integer tokens" in refused("compare", "--data", tmp_path / "tokens.npy")
