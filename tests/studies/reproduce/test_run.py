import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from subquad.cli import app
from subquad.measure.cost import Spread
from subquad.models import LanguageModel
from subquad.report.report import write as report
from subquad.report.reproduce import beside, copy_to, draw
from subquad.studies.reproduce import run as module
from subquad.studies.reproduce.measurements import measure_iterations, write_samples
from subquad.studies.reproduce.row import Budget, Reproduction, command_of, gather, settings_of, state_of
from subquad.studies.reproduce.run import choose, reproduce
from subquad.studies.reproduce.tables import TABLES
from subquad.studies.results import ReproducedTable, ScalingRow, TrainedRow
from subquad.tasks.configure import configure, start
from subquad.training.folder import Folder, read_config
from subquad.training.task import WriteOptions

TINY = (
    "data.length=24", "model.dim=16", "model.depth=1", "model.heads=2", "training.steps=2", "training.batch=4",
    "training.log_every=1", "training.evaluate_batches=1", "training.drop_at=1",
)  # fmt: skip
BUDGET = Budget(device="cpu", settings=TINY)


def here(commands: dict[str, list[str]], jobs: int, told: Any) -> Any:
    """What run_all does, in this process."""
    for name, (_, task, *arguments) in commands.items():
        out = Path(arguments[arguments.index("--out") + 1])
        settings = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--set"]
        told(name, "begins")
        try:
            start(task, out, settings, resume=True, device="cpu", console=Console(quiet=True))
            yield name, 0, "done"
        except (TypeError, ValueError) as error:
            yield name, 1, str(error)


def begun(table: str, row: str, place: Path, budget: Budget = BUDGET) -> Path:
    """A row's folder before its first step."""
    (found,) = choose(TABLES[table], [row])
    _, config = configure(TABLES[table].task, settings_of(TABLES[table], found, budget))
    folder = Folder(place)
    folder.open(config, False, "cpu")
    folder.lock.close()
    return place


def finished(table: str, row: str, place: Path, budget: Budget = BUDGET) -> Path:
    """A row's folder after its last step, without the steps."""
    names = ("steps", "seconds", "examples_per_second", "peak_bytes", "parameters")
    result = {**dict.fromkeys(names, 2), "ended_by": "steps", "test": {TABLES[table].metric: 1.5}}
    (begun(table, row, place, budget) / "result.json").write_text(json.dumps(result))
    return place


def never(commands: dict[str, list[str]], *_: Any) -> Any:
    return pytest.fail(str(commands)) if commands else iter(())


def in_use(commands: dict[str, list[str]], *_: Any) -> Any:
    for name in commands:
        yield name, 2, f"error {name} is in use: another process is training there"


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.report.reproduce.draw", lambda *_: None)


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=160, quiet=False)


def test_rows_are_run_once_and_stand_beside_the_published_ones(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", here)
    monkeypatch.setenv("SUBQUAD_COMMIT", "abc")
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear", "softmax"), draw=draw)
    assert list(found.results) == ["linear", "softmax"]
    assert found.commit == "abc"
    assert json.loads((tmp_path / "copy" / "linear" / "config.json").read_text())["commit"] == "abc"
    row = found.results["linear"]
    assert row.value == row.test["bits/symbol"] > 0
    assert (row.steps, row.steps_wanted, row.cut_short_by_time) == (2, 2, False)
    assert [step for step, _ in row.curve] == [1, 2]
    assert row.warm_up_counted  # two updates are not enough
    assert row.examples_per_second == row.examples_per_second_overall
    assert json.loads((tmp_path / "copy" / "results.json").read_text())["results"]["linear"]["value"] == row.value
    assert (tmp_path / "copy" / "copy.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(module, "run_all", never)
    again = reproduce("copy", tmp_path, console, BUDGET, rows=("linear",))
    assert again.results == found.results  # both rows: finished ones are kept
    assert "linear: done before" in console.export_text(clear=False)
    other = reproduce(
        "copy", tmp_path, console, Budget(device="cpu", settings=(*TINY, "training.lr=1e-2")), rows=("linear",)
    )
    assert other.results["linear"].value == row.value
    assert "training.lr is 0.01, was 0.001" in console.export_text()

    console.print(beside(found))
    shown = console.export_text()
    assert "linear" in shown
    assert "bits/symbol" in shown
    assert "what differs: hardware: cpu" in shown
    assert "warm-up counted" in " ".join(shown.split())
    copy_to(found, tmp_path / "results" / "copy.json")
    assert (tmp_path / "results" / "copy.png").exists()
    html = report([tmp_path / "copy"]).html.read_text()
    assert "bits/symbol" in html
    assert "not run" not in html


def test_published_figures_stand_there_without_ours_too(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", here)
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear",))
    assert found.published == {}  # the paper shows curves
    found.published = {"linear": 1.25, "other": 2.5}
    copy_to(found, tmp_path / "copy" / "results.json")
    console.export_text()
    console.print(beside(found))
    lines = [line.split() for line in console.export_text().splitlines() if "not run" in line]
    assert lines == [["other", "not", "run", "2.5"]]
    html = report([tmp_path / "copy"]).html.read_text()
    assert html.count("not run") == 1
    assert "2.5" in html


def test_speed_is_the_median_of_what_came_after_the_warm_up(tmp_path: Path) -> None:
    (row,) = choose(TABLES["copy"], ["linear"])
    start("copy", tmp_path, [*TINY, 'model.mechanism="linear"'], device="cpu", console=Console(quiet=True))
    rates = (None, 7.0, 100.0, 120.0, 3000.0, 110.0)
    lines = [{"step": n, "split": "train", "loss": 1.0, "examples_per_second": r} for n, r in enumerate(rates, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = gather(TABLES["copy"], row, tmp_path)
    assert found.examples_per_second == 110.0
    assert not found.warm_up_counted
    assert found.seconds_per_epoch * found.epochs == pytest.approx(2 * 4 / 110.0)  # two updates of four examples
    assert found.seconds == json.loads((tmp_path / "result.json").read_text())["seconds"]


def test_a_failed_row_says_why_and_costs_no_other(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", here)
    three = Budget(device="cpu", settings=(*TINY, "model.heads=3"))  # of 16; an LSTM has no heads
    found = reproduce("copy", tmp_path, console, three, rows=("lstm", "linear"))
    assert "heads" in found.results["linear"].error
    assert found.results["lstm"].value > 0
    console.print(beside(found))
    assert "failed" in console.export_text()


@pytest.mark.usefixtures("no_pictures")
def test_what_is_measured_afterwards_costs_no_table(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left\nand more of it")

    monkeypatch.setattr(module, "run_all", never)
    monkeypatch.setattr(module, "write_samples", full)
    monkeypatch.setattr(module, "measure_iterations", full)
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / "data"))  # nor does data that is missing or damaged
    (tmp_path / "data" / "cifar-10-batches-bin").mkdir(parents=True)
    (tmp_path / "data" / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(b"x")
    small = Budget(device="cpu", settings=tuple(s for s in TINY if not s.startswith("data.")))
    finished("cifar10", "linear", tmp_path / "cifar10" / "linear", small)
    found = reproduce("cifar10", tmp_path, console, small, rows=("linear",), timing=True, samples=1)
    assert found.failed == dict.fromkeys(("samples", "iterations"), "no memory is left")
    assert found.results["linear"].value == 1.5
    console.print(beside(found))
    assert "1.5 bits/dim" in console.export_text()


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_cannot_be_read_costs_no_other_row(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", never)
    for row in ("linear", "softmax"):
        finished("copy", row, tmp_path / "copy" / row)
    (tmp_path / "copy" / "linear" / "result.json").write_text("{")
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear", "softmax"), draw=draw)
    assert "result.json is not the result of a run" in found.failed["linear"]
    assert found.results["softmax"].value == 1.5


def test_an_lstm_goes_without_what_it_has_not(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", here)
    found = reproduce("copy", tmp_path / "a", console, BUDGET, rows=("lstm",))
    assert found.results["lstm"].value > 0
    wrong = Budget(device="cpu", settings=(*TINY, "model.haeds=3"))
    assert "haeds" in reproduce("copy", tmp_path / "b", console, wrong, rows=("lstm",)).failed["lstm"]
    assert "lstm: an LSTM has no model.heads=2: without it" in console.export_text()


def test_the_scaling_test_goes_on_where_it_stopped(tmp_path: Path, console: Console) -> None:
    tiny = ("tokens=64", "dim=16", "heads=2", "samples=1", "lengths=[32, 64]")
    budget = Budget(device="cpu", settings=tiny)
    first = reproduce("scaling", tmp_path, console, budget, rows=("linear",))
    assert [row.length for row in first.rows] == [32, 64]
    both = reproduce("scaling", tmp_path, console, budget, rows=("linear", "lstm"))
    assert both.rows[:2] == first.rows
    assert both.results["lstm"].longest == 64
    with pytest.raises(ValueError, match="tokens"):
        reproduce("scaling", tmp_path, console, Budget(device="cpu", settings=("depth=3",)))


def test_contexts_are_those_of_a_trained_model(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(torch.randint(97, 123, (4000,), generator=torch.Generator().manual_seed(0)).tolist()))
    monkeypatch.setattr(module, "run_all", here)
    small = (
        f"data.set={text}", "data.length=64", 'model.mechanism=["fixed", {"block": 8, "summary": 2}]', "model.dim=16",
        "model.depth=1", "model.heads=2", "training.steps=1", "training.batch=2", "training.micro_batch=2",
    )  # fmt: skip
    budget = Budget(device="cpu", settings=small)
    found = reproduce("context", tmp_path, console, budget, rows=("6,144", "9,216"))
    assert [row.context for row in found.results.values()] == [32, 48]
    assert all(row.bytes == 199 - 64 for row in found.results.values())
    assert found.results["6,144"].data == "text.txt"
    console.print(beside(found))
    assert "0.9952" in console.export_text()


def test_a_budget_becomes_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.studies.reproduce.row.available", lambda name: name)  # as on a machine with a GPU
    table = TABLES["mnist"]
    (row,) = choose(table, ["reformer-1"])
    budget = Budget(minutes=7, leg=2.5, device="cuda", settings=("training.lr=1e-4",))
    command = command_of(table, row, budget, tmp_path)
    assert command[:2] == ["train", "images"]
    assert command[command.index("--leg") + 1] == "2.5"
    assert 'model.mechanism=["reformer", {"rounds": 1, "chunk": 29, "buckets": 64}]' in command
    assert command.index("training.minutes=7") < command.index("training.lr=1e-4")
    assert "training.compile=true" in command
    on_cpu = command_of(table, row, Budget(minutes=7, device="cpu"), tmp_path)
    assert "training.compile=true" not in on_cpu  # it pays off on a GPU only


def test_wrong_names_are_one_line() -> None:
    run = CliRunner(env={"COLUMNS": "160"})
    result = run.invoke(app, ["reproduce", "mnits"])
    assert result.exit_code == 2
    assert "did you mean 'mnist'" in result.output
    result = run.invoke(app, ["reproduce", "mnist", "--rows", "linear,local"])
    assert result.exit_code == 2
    assert "reformer-4" in result.output
    assert [row.name for row in choose(TABLES["context"], ["9216", "6,144"])] == ["6,144", "9,216"]


def test_models_write_after_training(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES["mnist"]
    (row,) = choose(table, ["linear"])
    place = tmp_path / "linear"
    fields = {"vocab": 257, "mixture": 10, "max_length": 16, "dim": 16, "depth": 1, "heads": 2, "mechanism": "linear"}
    LanguageModel(**fields).save(place / "model")
    (place / "result.json").write_text("{}")
    results = ReproducedTable(results={"linear": TrainedRow(value=1.0)}, machine={"device": "cpu"}, metric="bits/dim")
    monkeypatch.setattr("subquad.report.reproduce.draw", lambda *_: None)
    write_samples(Reproduction(table, [row], BUDGET, tmp_path, console, results), 4)
    assert (tmp_path / "linear.png").exists()
    assert results.pictures[0].file == "linear.png"


def test_an_interruption_keeps_what_is_done_and_says_how_far_the_rest_came(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(commands: dict[str, list[str]], jobs: int, told: Any) -> Any:
        yield from here({"linear": commands["linear"]}, jobs, told)
        Folder(tmp_path / "copy" / "softmax").open(read_config(tmp_path / "copy" / "linear"), False, "cpu")
        yield "softmax", 130, "interrupted at step 1"

    monkeypatch.setattr(module, "run_all", interrupted)
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear", "softmax"), draw=draw)
    assert found.interrupted
    assert found.results["linear"].value > 0
    assert found.results["softmax"].unfinished
    console.print(beside(found))
    assert "unfinished" in console.export_text()


def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_all", never)
    run = CliRunner(env={"COLUMNS": "160"})
    for wrong, said in (("training.step=5", "did you mean 'steps'"), ("training.batch=0", "batch=0")):
        result = run.invoke(app, ["reproduce", "copy", "--out", str(tmp_path), "--set", wrong])
        assert result.exit_code == 2
        assert said in result.output
        assert "copy, row linear" in result.output
    assert not list(tmp_path.iterdir())
    result = run.invoke(app, ["reproduce", "copy", "--out", str(tmp_path), "--leg", "0"])
    assert "leg=0.0 cannot work: accepted is a positive number of minutes" in result.output


@pytest.mark.usefixtures("no_pictures")
def test_failed_rows_are_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_all", in_use)
    command = ["reproduce", "copy", "--rows", "linear,softmax", "--out", str(tmp_path), "--device", "cpu"]
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, command)
    assert result.exit_code == 1
    assert "failed: linear, softmax" in result.output


@pytest.mark.usefixtures("no_pictures")
def test_a_failed_row_that_was_finished_elsewhere_is_done(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", in_use)
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear",))
    assert "in use" in found.results["linear"].error
    finished("copy", "linear", tmp_path / "copy" / "linear")
    monkeypatch.setattr(module, "run_all", never)
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear",))
    assert found.results["linear"].value == 1.5
    assert found.results["linear"].error is None
    assert found.failed == {}


@pytest.mark.usefixtures("no_pictures")
def test_an_error_replaces_no_figure(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    finished("copy", "linear", tmp_path / "copy" / "linear")
    monkeypatch.setattr(module, "run_all", never)
    good = reproduce("copy", tmp_path, console, BUDGET, rows=("linear",)).results
    (tmp_path / "copy" / "linear" / "result.json").unlink()
    monkeypatch.setattr(module, "run_all", in_use)
    found = reproduce("copy", tmp_path, console, BUDGET, rows=("linear",))
    assert found.results == good
    assert "in use" in found.failed["linear"]


@pytest.mark.usefixtures("no_pictures")
def test_a_row_keeps_the_settings_that_it_was_trained_with(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", never)
    monkeypatch.setenv("SUBQUAD_COMMIT", "first")
    finished("copy", "linear", tmp_path / "copy" / "linear")
    first = reproduce("copy", tmp_path, console, BUDGET, rows=("linear",))
    assert sorted(first.results["linear"].settings) == sorted(TINY[:6] + TINY[7:])  # log_every may change
    first.results["linear"].iteration = {"iteration_ms": {"median": 3.0}}  # timed afterwards
    copy_to(first, tmp_path / "copy" / "results.json")

    monkeypatch.setenv("SUBQUAD_COMMIT", "second")
    other = Budget(device="cpu", jobs=3, settings=(*TINY, "training.steps=7"))
    found = reproduce("copy", tmp_path, console, other, rows=("linear",))  # trains nothing
    assert "training.steps is 7, was 2" in found.failed["linear"]
    assert found.results == first.results
    for key in ("commit", "date", "machine", "budget"):
        assert getattr(found, key) == getattr(first, key)
    console.export_text()
    console.print(beside(found))
    shown = " ".join(console.export_text().split())
    assert "set here: data.length=24" in shown
    assert "training.steps=2" in shown
    assert "training.steps=7" not in shown

    def trains(commands: dict[str, list[str]], *_: Any) -> Any:
        finished("copy", "softmax", tmp_path / "copy" / "softmax", other)
        yield "softmax", 0, "done"

    monkeypatch.setattr(module, "run_all", trains)
    found = reproduce("copy", tmp_path, console, other, rows=("softmax",))
    assert (found.commit, found.budget.settings[-1]) == ("second", "training.steps=7")
    console.print(beside(found))
    shown = " ".join(console.export_text().split())
    assert "set here for linear: data.length=24" in shown
    assert "set here for softmax: data.length=24" in shown


@pytest.mark.usefixtures("no_pictures")
def test_older_files_have_the_settings_of_the_whole(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", never)
    results = Path(__file__).parents[3] / "results"
    for name in ("mnist", "speech"):
        (tmp_path / name).mkdir()
        old = json.loads((results / f"{name}.json").read_text())
        for row in old["results"].values():
            row.pop("settings", None)  # each row has these today
        (tmp_path / name / "results.json").write_text(json.dumps(old))
        monkeypatch.setattr(module, "choose", lambda *_: [])  # nothing is run
        found = reproduce(name, tmp_path, console, Budget(device="cpu"))
        assert {tuple(row.settings) for row in found.results.values()} == {tuple(old["budget"]["settings"])}
        assert found.machine == old["machine"]
        console.print(beside(found))
    shown = " ".join(console.export_text().split())
    assert "set here: training.warmup=200" in shown
    assert "s an epoch (theirs 824 s)" in shown


def test_a_run_that_is_older_than_a_setting_of_its_data_is_done(tmp_path: Path) -> None:
    config = finished("copy", "linear", tmp_path) / "config.json"
    older = json.loads(config.read_text())
    del older["data"]["symbols"], older["sha256"]
    config.write_text(json.dumps(older))
    (row,) = choose(TABLES["copy"], ["linear"])
    assert state_of(TABLES["copy"], row, BUDGET, tmp_path) == ("done", "done before")
    other = Budget(device="cpu", settings=(*TINY, "data.symbols=3"))
    assert state_of(TABLES["copy"], row, other, tmp_path)[0] == "changed"


@pytest.mark.usefixtures("no_pictures")
def test_contexts_wait_for_their_model_and_have_its_settings(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = tmp_path / "enwik8" / "fixed"

    def leg(commands: dict[str, list[str]], *_: Any) -> Any:
        begun("enwik8", "fixed", trained, Budget(device="cpu"))
        yield "fixed", 0, "the leg is over"

    monkeypatch.setattr(module, "run_all", leg)
    monkeypatch.setattr("subquad.tasks.text.Text.data_name", "enwik8")
    found = reproduce("context", tmp_path, console, Budget(device="cpu", leg=0.01))
    assert (found.results, found.failed, found.interrupted) == ({}, {}, False)
    assert "context: the model is not finished yet" in console.export_text()

    finished("enwik8", "fixed", tmp_path / "other" / "enwik8" / "fixed", Budget(device="cpu"))
    with pytest.raises(ValueError, match=r'data\.set is "ptb", was "enwik8"'):
        reproduce("context", tmp_path / "other", console, Budget(device="cpu", settings=("data.set=ptb",)))


@pytest.mark.usefixtures("no_pictures")
def test_sound_is_written_at_the_rate_of_its_run(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []

    def pieces(_model: LanguageModel, options: WriteOptions, rate: int) -> list[Path]:
        rates.append(rate)
        assert options.out is not None
        assert options.count is not None
        return [options.out.with_name(f"{options.out.name}_{number}.wav") for number in range(options.count)]

    monkeypatch.setattr("subquad.tasks.music.write_pieces", pieces)
    table, name = TABLES["music"], "audio-linear"
    place = finished("music", name, tmp_path / name, Budget(device="cpu", settings=("data.rate=4000",)))
    LanguageModel(vocab=256, dim=16, depth=1, heads=2, mechanism="linear").save(place / "model")
    results = ReproducedTable(results={name: TrainedRow()})
    write_samples(Reproduction(table, choose(table, [name]), BUDGET, tmp_path, console, results), 1)
    assert rates == [4000]
    assert results.results[name].pieces == [f"{name}/piece_0.wav"]


@pytest.mark.usefixtures("no_pictures")
def test_images_without_a_mixture_have_the_shape_of_their_set(tmp_path: Path, console: Console) -> None:
    table = TABLES["mnist"]
    place = finished("mnist", "linear", tmp_path / "linear", Budget(device="cpu", settings=("data.set=digits",)))
    LanguageModel(vocab=18, max_length=64, dim=16, depth=1, heads=2, mechanism="linear").save(place / "model")
    results = ReproducedTable(results={"linear": TrainedRow(value=1.0)})
    write_samples(Reproduction(table, choose(table, ["linear"]), BUDGET, tmp_path, console, results), 2)
    assert (tmp_path / "linear.png").read_bytes().startswith(b"\x89PNG")


def test_timing_says_what_it_lacks(tmp_path: Path, console: Console) -> None:
    table = TABLES["mnist"]
    for rows in (["linear"], ["linear", "strided"]):
        measure_iterations(Reproduction(table, choose(table, rows), BUDGET, tmp_path, console, ReproducedTable()))
        assert "iterations: not timed: --rows must name softmax" in console.export_text()


@pytest.mark.usefixtures("no_pictures")
def test_measurements_under_other_settings_do_not_mix(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers(*, lengths: list[int], contenders: tuple[str], **_: Any) -> Any:
        for length in lengths:
            time = Spread(float(length), float(length), float(length))
            yield ScalingRow(mechanism="", label=contenders[0], length=length, peak_bytes=length, training_ms=time)

    monkeypatch.setattr("subquad.studies.reproduce.scaling.layers", layers)
    both = ("linear", "lstm")
    reproduce("scaling", tmp_path, console, Budget(device="cpu", settings=("lengths=2k,4k",)), rows=both)
    found = reproduce("scaling", tmp_path, console, Budget(device="cpu", settings=("lengths=[512, 2048]",)), rows=both)
    expected = [(name, length) for name in both for length in (512, 2048, 4096)]
    assert [(row.label, row.length) for row in found.rows] == expected
    assert found.growth[0].lengths_used == [512, 2048, 4096]
    assert found.results["linear"].longest == 4096
    kept = (tmp_path / "scaling" / "results.json").read_text()
    with pytest.raises(ValueError, match="samples is 2, was 3"):
        reproduce("scaling", tmp_path, console, Budget(device="cpu", settings=("samples=2",)), rows=("linear",))
    assert (tmp_path / "scaling" / "results.json").read_text() == kept


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("lengths=512,x", "lengths='512,x' cannot work: accepted is whole numbers with commas"),
        ("lengths=[0]", r"lengths=\(0,\) cannot work: accepted is integers of at least 1"),
        ("dim=abc", "dim='abc' cannot work: accepted is an integer of at least 1"),
        ("samples=0", "samples=0 cannot work"),
        ("heads=3", "heads=3 cannot work: accepted is a divisor of dim=256"),
        ("limit=-1", "limit=-1 cannot work: accepted is a positive number"),
        ("limit=Infinity", "limit=inf cannot work"),
        ("dtype=int8", "dtype='int8' cannot work: accepted is float32"),
        ("tokens", "cannot be read"),
    ],
)
def test_wrong_settings_of_the_scaling_test_are_named(
    tmp_path: Path, console: Console, setting: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        reproduce("scaling", tmp_path, console, Budget(device="cpu", settings=(setting,)))
