import numpy as np
import pytest

from subquad.data import speech as speech_data
from subquad.studies.published import TABLES as PUBLISHED
from subquad.studies.reproduce.row import Budget, settings_of
from subquad.studies.reproduce.scaling import CONTENDERS
from subquad.studies.reproduce.tables import TABLES, Row, Table
from subquad.tasks import TASKS, speech
from subquad.tasks.configure import configure

TRAINED = [(table, row) for table in TABLES.values() if table.kind == "train" for row in table.rows]


@pytest.fixture(autouse=True)
def _made_up_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    one = speech_data.Utterances(
        ("a",), np.zeros((9, 13), np.float32), np.array([0, 9]), np.array([1]), np.array([0, 1]),
        np.zeros(13, np.float32), np.ones(13, np.float32),
    )  # fmt: skip
    monkeypatch.setattr(speech, "_load", lambda *_: speech_data.Speech("made up", one, one, one, ("", "A")))


def test_the_tables_are_those_of_the_command() -> None:
    wanted = {"mnist", "cifar10", "copy", "recall", "scaling", "enwik8", "context", "imagenet64", "music", "speech"}
    assert set(TABLES) == wanted
    assert all(table.name == name for name, table in TABLES.items())
    assert all(table.task in TASKS or table.kind == "scaling" for table in TABLES.values())
    assert [row.name for row in TABLES["scaling"].rows] == list(CONTENDERS)
    for table in TABLES.values():
        names = [row.name for row in table.rows]
        assert len(set(names)) == len(names)
        assert set(table.iterations) <= set(names)


@pytest.mark.parametrize(("table", "row"), TRAINED, ids=lambda part: part.name)
def test_every_row_is_understood_by_subquad_train(table: Table, row: Row) -> None:
    small = ["model.dim=16", "model.depth=1"]
    small += [] if row.mechanism == "lstm" else ["model.heads=2"]
    task, config = configure(table.task, settings_of(table, row, Budget(minutes=3, settings=tuple(small))))
    assert config.training.minutes == 3
    assert config.model["dim"] == 16
    assert task.metric == table.metric
    assert sum(p.numel() for p in task.make_model(config.model).parameters()) > 0


def test_published_figures_agree_with_those_of_the_report() -> None:
    shown = {table.name: {label: figures for label, _, figures in table.rows} for table in PUBLISHED.values()}
    ours = {table.name: {row.name: row.published for row in table.rows} for table in TABLES.values()}
    names = {"linear": "Linear", "softmax": "Softmax", "reformer-1": "LSH-1", "reformer-4": "LSH-4"}
    for table in ("mnist", "cifar10"):
        for row, label in names.items():
            assert ours[table][row]["bits/dim"] == shown[table][label][0]
    for row, label in {**names, "bi-lstm": "Bi-LSTM"}.items():
        if row != "reformer-1":
            assert (ours["speech"][row]["per"], ours["speech"][row]["epoch_s"]) == shown["speech"][label]
    for row, label in {"dense": "Dense attention", "fixed": "Fixed", "strided": "Strided"}.items():
        figures = shown["sparse-speed"][label]
        assert (ours["enwik8"][row]["bits/byte"], ours["enwik8"][row]["iteration_s"]) == figures[:2]
        sparse = ours["cifar10"][f"sparse-{row}"]
        assert (sparse["bits/dim"], sparse["iteration_s"]) == figures[3:5]
    for row, published in ours["context"].items():
        assert shown["sparse-context"][f"{row} tokens"] == (published["bits/byte"],)
