import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from subquad.models import LanguageModel
from subquad.models.footprint import bytes_per_stream
from subquad.studies import generation
from subquad.studies.generation import START, bench, make_loop, measure, paper_model, rewind, run_steps
from subquad.studies.settings import GenerationSettings


def test_the_papers_models_have_the_papers_sizes() -> None:
    for name, depth, state in (("mnist", 8, 8), ("cifar10", 16, 16)):
        model = paper_model(name)
        assert len(model.transformer.blocks) == depth
        blocks = sum(p.numel() for p in model.transformer.blocks.parameters())
        assert abs(blocks / (depth * 12 * 256**2) - 1) < 0.01
        assert bytes_per_stream(model, 784) == depth * (8 * 32 * 33 * 4 + 8) + 8
        assert model.config.width == 30
        assert state == depth


def small(mechanism: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(vocab=START + 1, dim=16, depth=1, heads=2, mechanism=mechanism, max_length=24).eval()


@pytest.mark.parametrize("mechanism", ["linear", "softmax", "performer", "sinkhorn"])
def test_a_loop_rewound_repeats_itself_and_is_generate(mechanism: str) -> None:
    model = small(mechanism)
    loop = make_loop(model, 3, 12)
    first = run_steps(loop, 12)
    rewind(loop, START)
    assert torch.equal(run_steps(loop, 12), first)
    made = model.generate(torch.full((3, 1), START), 12, sampling=loop.sampling)
    assert torch.equal(made, first.T)
    assert made.max() < START


def test_whole_and_integrated_times_measure_the_same_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "seconds", lambda _, steps: 0.01 * steps)  # a clock with known times
    whole = measure(small("linear"), 2, 24)
    some = measure(small("linear"), 2, 24, at=[0, 10, 16], steps=8)
    assert whole["sequences_per_second"] == pytest.approx(2 / 0.24)
    assert some["sequences_per_second"] == pytest.approx(2 / 0.24)
    assert whole["timed"] == "whole loop"
    assert "positions [0, 10, 16]" in some["timed"]


def test_the_bench_writes_every_mechanism_at_every_size(tmp_path: Path) -> None:
    out = tmp_path / "a" / "generation.json"
    small = {"most": 4, "dim": 16, "depth": 1, "heads": 2, "steps": 2}
    options = GenerationSettings(mechanisms="linear,softmax,sinkhorn", lengths="8,16", batches="1,2", **small)
    bench(Console(quiet=True), out, options)
    figures = json.loads(out.read_text())
    assert {"device", "torch", "commit"} <= figures.keys()
    sizes = {(row["mechanism"], row["length"], row["batch"]) for row in figures["rows"]}
    assert sizes == {(m, n, b) for m in ("linear", "softmax", "sinkhorn") for n in (8, 16) for b in (1, 2, 4)}
    for row in figures["rows"]:
        assert row["tokens_per_second"] > 0
        assert row["largest_batch"] == (row["batch"] == 4)
    state = {(r["mechanism"], r["length"]): r["bytes_of_state_per_stream"] for r in figures["rows"]}
    assert state["linear", 8] == state["linear", 16]
    assert state["softmax", 16] > 1.8 * state["softmax", 8]


def test_wrong_requests_raise(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [{"mechanisms": "fnet"}, {"lengths": "8,x"}, {"dtype": "int8"}]
    for wrong in requests:
        with pytest.raises(ValueError, match="accepted"):
            bench(Console(quiet=True), tmp_path / "x.json", GenerationSettings(**wrong))
