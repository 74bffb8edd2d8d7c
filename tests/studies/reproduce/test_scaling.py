import numpy as np
import pytest

from subquad.studies.reproduce import scaling
from subquad.studies.reproduce.scaling import CONTENDERS, Iteration, growth, iterations, layers
from subquad.tasks.copy import Copy

SMALL = {"tokens": 128, "dim": 16, "heads": 2, "samples": 1}


def test_every_contender_has_a_time_and_a_memory_a_sample() -> None:
    rows = list(layers(lengths=(64, 32), **SMALL))
    assert [(row.label, row.length, row.batch) for row in rows] == [
        (label, length, 128 // length) for label in CONTENDERS for length in (32, 64)
    ]
    assert all(row.training_ms.median > 0 and row.peak_bytes > 0 for row in rows)
    assert {row.mechanism for row in rows} == {"linear", "softmax", "reformer", "lstm"}
    memory = {found.mechanism: found.memory for found in growth(rows)}
    assert 0.3 < memory["linear"] < 1.3  # a sample of twice the length needs twice the memory, without parameters


def test_what_would_take_too_long_says_so_and_a_wrong_name_raises() -> None:
    rows = list(layers(lengths=(32, 64), contenders=("softmax",), limit=1e-9, **SMALL))
    assert rows[0].training_ms is not None
    assert rows[1].training_ms is None
    assert "too slow" in rows[1].skipped
    with pytest.raises(ValueError, match="reformer-4"):
        list(layers(contenders=("reformer",), **SMALL))


def test_iterations_stand_beside_the_first_model() -> None:
    task = Copy(length=24)
    batch = task.source("train").batch(np.arange(2), 0)

    def make(mechanism: str) -> Iteration:
        fields = {**task.model, "dim": 16, "depth": 1, "heads": 2, "mechanism": mechanism}
        return Iteration(task, task.make_model(fields), batch, precision="fp32")

    found = iterations({"dense": lambda: make("softmax"), "linear": lambda: make("linear")}, rounds=2)
    assert found["dense"]["ratio"]["median"] == 1.0
    assert found["linear"]["ratio"]["median"] > 0
    assert found["linear"]["iteration_ms"]["median"] > 0


def test_what_a_step_will_take_follows_from_a_sample() -> None:
    # batches of 1,024 tokens: 2 samples of 512, then 1 of 1,024; then 1 of 2,048
    assert scaling._expected("softmax", 512, 2, 10.0, 1024, 1) == 40.0
    assert scaling._expected("softmax", 1024, 1, 40.0, 2048, 1) == 160.0
    assert scaling._expected("linear", 1024, 1, 40.0, 2048, 1) == 80.0
    assert scaling._expected("lstm", 512, 2, 10.0, 1024, 1) == 40.0
