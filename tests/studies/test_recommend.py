import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from subquad.cli import app
from subquad.measure.cost import Row, Spread
from subquad.measure.growth import crossovers, growths
from subquad.report.visible import Terminal
from subquad.studies import recommend as module
from subquad.studies.recommend import Request, find, recommend
from subquad.studies.results import Comparison, load, to_json

SHIPPED = module._shipped
LENGTHS = (1024, 4096, 16384)
# training ratio at each length, decode ratio at each length
CAUSAL: dict[str, tuple[tuple[float, ...], tuple[float, ...] | None]] = {
    "softmax": ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
    "linear": ((2.0, 0.5, 0.125), (1.0, 0.5, 0.1)),
    "local": ((1.6, 0.4, 0.1), (1.0, 0.9, 0.9)),
    "sinkhorn": ((1.2, 0.3, 0.05), None),  # has no state
    "performer": ((4.0, 2.0, 1.1), (1.0, 0.5, 0.1)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_shipped", list)  # else the quality of shipped figures would count
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def spread(value: float) -> Spread:
    return Spread(value, value, value)


def figures(path: Path, device: str = "cpu", quality: dict[str, float] | None = None, causal: bool = True) -> Path:
    rows = []
    for name, (training, decode) in CAUSAL.items():
        for n, (length, ratio) in enumerate(zip(LENGTHS, training, strict=True)):
            softmax = length**2 / 1e5
            row = Row(
                mechanism=name,
                length=length,
                causal=causal,
                training_ms=spread(ratio * softmax),
                training_ratio=spread(ratio),
                peak_bytes=1000 * length,
                memory_ratio=1.0,
            )
            if decode is not None:
                row.decode_ms, row.decode_ratio, row.state_bytes = spread(decode[n]), spread(decode[n]), 8192
            rows.append(row)
    results: dict[str, Any] = {
        "kind": "compare",
        "date": "2026-01-02T03:04:05",
        "machine": {"device": "Some GPU" if device == "cuda" else "cpu", "cpu": "Some CPU", "threads": 2},
        "settings": {"device": device, "dtype": "float32", "batch": 1, "dim": 64, "heads": 2},
        "rows": rows,
        "growth": growths(rows),
        "crossovers": crossovers(rows),
        "quality": [
            {"mechanism": name, "task": "digits", "metric": "bits/dim", "value": value, "lower_is_better": True,
             "steps": 100}
            for name, value in (quality or {}).items()
        ],
    }  # fmt: skip
    path.write_text(json.dumps(to_json(results)))
    return path


def names(request: Request, source: Path) -> list[str]:
    return [choice.mechanism for choice in recommend(request, source).choices]


def test_the_cheapest_three_first(tmp_path: Path) -> None:
    source = figures(tmp_path / "a.json")
    assert names(Request(length=16384, causal=True), source) == ["sinkhorn", "local", "linear"]
    advice = recommend(Request(length=16384, causal=True), source)
    assert advice.verdict == "use sinkhorn: 20 times as fast as exact softmax at T = 16,384"
    first = advice.choices[0].reasons
    assert first[0].startswith("a training step takes 134 ms at T = 16,384, 20 times as fast as exact softmax")
    assert any("faster than softmax from T = 1,2" in reason for reason in first)


def growth_reasons(source: Path, **growth: object) -> list[str]:
    results = json.loads(source.read_text())
    results["growth"] = [{**found, **growth} for found in results["growth"]]
    source.write_text(json.dumps(results))
    (choice, *_) = recommend(Request(length=16384, causal=True), source).choices
    return [reason for reason in choice.reasons if "T^" in reason]


def test_growth_is_said_where_it_differs_from_the_documented_one(tmp_path: Path) -> None:
    """ "T^0.41 as measured, T^1 as documented" looked like a bug: explain it, and only where the two differ."""
    source = figures(tmp_path / "a.json")
    assert growth_reasons(source, time=1.1, documented_time=1.0) == []
    (slow,) = growth_reasons(source, time=0.41, documented_time=1.0)
    assert "its time grew about as T^0.41 up to T = 16,384 here" in slow
    assert "fixed costs still hide the work, which is documented to grow as T^1" in slow
    (flat,) = growth_reasons(source, time=0.1, documented_time=1.0)
    assert "hardly grew up to" in flat
    (fast,) = growth_reasons(source, time=1.6, documented_time=1.0, lengths_used=[])
    assert "its time grew about as T^1.6 here" in fast
    assert "fixed costs" not in fast


def test_decoding_needs_a_state_and_counts(tmp_path: Path) -> None:
    source = figures(tmp_path / "a.json")
    request = Request(length=16384, causal=True, decode=True)
    assert names(request, source) == ["linear", "local", "performer"]  # sinkhorn cannot, sqrt(1.1 x 0.1) is third
    reasons = " ".join(recommend(request, source).choices[0].reasons)
    assert "decodes a token in 100 µs (10 times as fast as softmax with its cache)" in reasons
    assert "a state of 8.19 kB, the same at every length measured" in reasons


def test_below_the_crossover_exact_attention_wins(tmp_path: Path) -> None:
    advice = recommend(Request(length=1024, causal=True), figures(tmp_path / "a.json"))
    assert advice.choices[0].mechanism == "softmax"
    # sinkhorn: 1.2 at 1,024 and 0.3 at 4,096, so 1 lies at 1024 * 4^(log 1.2 / log 4)
    assert advice.verdict == "use flash softmax: you are below the crossover at T = 1,229 (sinkhorn, training time)"


def test_between_lengths_and_beyond_them(tmp_path: Path) -> None:
    source = figures(tmp_path / "a.json")
    assert "at T = 8,192" in recommend(Request(length=8192, causal=True), source).choices[0].reasons[0]
    beyond = recommend(Request(length=100_000, causal=True), source)
    assert beyond.verdict == (
        "use sinkhorn: 20 times as fast as exact softmax at T = 16,384; "
        "T = 100,000 was not measured, the nearest that was is 16,384"
    )


def test_mechanisms_without_a_figure_at_the_length_are_named(tmp_path: Path) -> None:
    source = figures(tmp_path / "a.json")
    data = json.loads(source.read_text())
    data["rows"] = [row for row in data["rows"] if (row["mechanism"], row["length"]) != ("linear", 16384)]
    source.write_text(json.dumps(data))
    at_8k, at_1k = (recommend(Request(length=n, causal=True), source).missing for n in (8192, 1024))
    assert set(at_8k) - set(at_1k) == {"linear"}
    assert "deltanet" in at_1k  # was not measured at all
    said = CliRunner().invoke(app, ["recommend", "--length", "8k", "--causal", "--from", str(source)]).output
    assert f"not compared, since not measured at this length: {', '.join(at_8k)}" in " ".join(said.split())


def test_a_clear_loss_of_quality_comes_after(tmp_path: Path) -> None:
    source = figures(tmp_path / "a.json", quality={"softmax": 2.0, "sinkhorn": 2.4, "local": 2.05, "linear": 2.05})
    advice = recommend(Request(length=16384, causal=True), source)
    assert [choice.mechanism for choice in advice.choices] == ["local", "linear", "softmax"]
    assert any("2.050 bits/dim, softmax 2.000, after 100 steps" in reason for reason in advice.choices[0].reasons)
    assert any(reason.endswith(", the same as that of softmax") for reason in advice.choices[0].reasons)


def test_quality_of_shipped_figures_serves_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = figures(tmp_path / "a.json")
    request = Request(length=16384, causal=True)
    assert "They hold no quality: this ranking is by speed alone" in recommend(request, source).figures
    other = load(figures(tmp_path / "b.json", quality={"softmax": 2.0, "sinkhorn": 2.4}), Comparison)
    monkeypatch.setattr(module, "_shipped", lambda: [other])
    advice = recommend(request, source)
    assert "They hold no quality: it is taken from the figures that ship" in advice.figures
    assert [choice.mechanism for choice in advice.choices] == ["local", "linear", "softmax"]


def test_only_what_was_measured_in_the_form_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="hold too few bidirectional measurements: run `subquad compare --bidirectional`"
    ):
        recommend(Request(length=1024), figures(tmp_path / "a.json"))
    both = figures(tmp_path / "b.json", causal=False)
    assert names(Request(length=16384, cross=True), both) == ["linear", "softmax", "performer"]


def test_this_machine_before_shipped_ones(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_shipped", SHIPPED)
    request = Request(length=4096, causal=True)
    shipped = find(request)
    assert "ship with subquad" in shipped.origin
    assert len(recommend(request).choices) == 3
    figures(cache / "compare_cpu.json")
    own = find(request)
    assert "this machine" in own.origin
    assert own.results.machine["cpu"] == "Some CPU"
    assert "Some CPU, 2 threads, float32, batch 1, width 64, 2 heads, 2026-01-02" in recommend(request).figures


def test_shipped_figures_that_come_nearer_to_the_length_before_this_machine_s(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = load(figures(tmp_path / "a.json"), Comparison)
    monkeypatch.setattr(module, "_shipped", lambda: [longer])
    short = json.loads(figures(cache / "compare_cpu.json").read_text())
    short["rows"] = [row for row in short["rows"] if row["length"] < 16384]
    (cache / "compare_cpu.json").write_text(json.dumps(short))
    assert "this machine (" in find(Request(length=4096, causal=True)).origin
    assert "this machine (" in find(Request(length=100, causal=True)).origin
    assert "ship with subquad" in find(Request(length=16384, causal=True)).origin


def test_named_figures_answer_for_their_own_device_only(tmp_path: Path) -> None:
    source = figures(tmp_path / "a.json")
    assert recommend(Request(length=4096, causal=True), source) == recommend(
        Request(length=4096, causal=True, device="cpu"), source
    )
    with pytest.raises(ValueError, match=r"device='cuda' cannot work: .*a\.json was measured on 'cpu'"):
        recommend(Request(length=4096, causal=True, device="cuda"), source)


def test_requests_and_files_that_cannot_work(tmp_path: Path) -> None:
    for wrong, message in (
        ({"length": 0}, "length=0"),
        ({"length": 5, "device": "tpu"}, "device='tpu'"),
        ({"length": 5, "decode": True}, "decode=True cannot work with causal=False"),
        ({"length": 5, "causal": True, "cross": True}, "cross=True cannot work"),
    ):
        with pytest.raises(ValueError, match=message):
            Request(**wrong)
    (tmp_path / "other.json").write_text('{"kind": "share"}')
    with pytest.raises(ValueError, match="kind is not"):
        recommend(Request(length=5), tmp_path / "other.json")
    with pytest.raises(ValueError, match="cannot be read"):
        recommend(Request(length=5), tmp_path / "nothing.json")


def test_no_line_is_longer_than_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.cli.console", Terminal(width=80))
    monkeypatch.chdir(tmp_path)
    figures(Path("results.json"), quality={"softmax": 2.2871, "linear": 2.2942})
    for decode in (["--decode"], []):
        arguments = ["recommend", "--length", "16k", "--causal", *decode, "--from", "results.json"]
        lines = CliRunner().invoke(app, arguments).output.splitlines()
        assert max(map(len, lines)) <= 80
        assert sum(line.startswith("     ") for line in lines) > 3  # continued lines are indented


def test_a_long_path_is_not_broken(tmp_path: Path) -> None:
    folder = tmp_path / "a" / ("long " * 3 + "x" * 90)
    folder.mkdir(parents=True)
    figures(folder / "results.json")
    result = CliRunner().invoke(app, ["recommend", "--length", "16k", "--causal", "--from", str(folder)])
    assert "x" * 90 + "/results.json" in result.output


def test_the_command_says_three_and_whose_figures(tmp_path: Path) -> None:
    run = CliRunner(env={"COLUMNS": "160"})
    source = figures(tmp_path / "results.json", device="cuda")
    arguments = ["recommend", "--length", "16k", "--causal", "--decode", "--device", "cuda", "--from", str(tmp_path)]
    result = run.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "use linear" in result.output
    assert all(f"{rank}. {name}" in result.output for rank, name in ((1, "linear"), (2, "local"), (3, "performer")))
    assert str(source) in result.output
    assert "Some GPU" in result.output
