"""The report shows the figures of the JSON, in one file that needs no others."""

import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from subquad.cli import app
from subquad.mechanisms import MECHANISMS
from subquad.report.report import make, write
from subquad.report.runs import read
from tests.report import runs
from tests.report.browser import needs_chromium, visit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its report."""
    folder = runs.write(tmp_path_factory.mktemp("run"))
    write([folder])
    return folder


def specs(page: str) -> dict[str, dict]:  # type: ignore[type-arg]
    found = re.findall(r'<script type="application/json" id="([\w-]+)-data">(.*?)</script>', page, re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def test_it_loads_nothing(run: Path) -> None:
    page = (run / "report.html").read_text()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', re.sub(r"<a [^>]*>", "", page))
    assert all(address.startswith("data:") for address in loaded), loaded
    assert not re.search(r"@import|url\(|<iframe|<object|fetch\(|XMLHttpRequest|import\(", page)


def test_the_csv_holds_the_numbers_of_the_json(run: Path) -> None:
    data = json.loads((run / "results.json").read_text())
    with (run / "report_rows.csv").open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(data["rows"])
    for row, told in zip(data["rows"], written, strict=True):
        assert (told["mechanism"], int(told["length"])) == (row["mechanism"], row["length"])
        for key in ("training_ms", "forward_ms", "decode_ms", "training_ratio"):
            for part in ("median", "low", "high"):
                expected = row[key][part] if row[key] else None
                assert (float(told[f"{key}_{part}"]) if told[f"{key}_{part}"] else None) == expected
        assert (int(told["peak_bytes"]) if told["peak_bytes"] else None) == row["peak_bytes"]
        assert told["skipped"] == (row["skipped"] or "")
    with (run / "report_curves.csv").open() as file:
        curves = [(c["mechanism"], int(c["step"]), float(c["value"])) for c in csv.DictReader(file)]
    assert curves == [(q["mechanism"], s, v) for q in data["quality"] for s, v in q.get("curve", [])]
    for kind in ("growth", "crossovers", "quality"):
        with (run / f"report_{kind}.csv").open() as file:
            assert [r["mechanism"] for r in csv.DictReader(file)] == [r["mechanism"] for r in data[kind]]


def test_the_charts_hold_the_numbers_of_the_json(run: Path) -> None:
    data = json.loads((run / "results.json").read_text())
    charts = specs((run / "report.html").read_text())
    curves = charts["r0-curves-chart"]
    for view, key in ((0, "training_ms"), (1, "forward_ms"), (3, "decode_ms")):
        shown = {s["name"]: s["points"] for s in curves["views"][view]["series"]}
        for name in MECHANISMS:
            spreads = [(r["length"], r[key]) for r in data["rows"] if r["mechanism"] == name and r[key]]
            expected = [[length, s["median"], s["low"], s["high"]] for length, s in spreads]
            assert shown.get(name, []) == expected
    crossings = {c["mechanism"]: c["training"] for c in data["crossovers"] if c["training"]}
    assert curves["views"][0]["marks"] == crossings
    assert curves["chosen"] == ["softmax", "additive", "linear", "efficient", "performer"]  # and three that end lowest
    losses = {s["name"]: s["points"] for s in charts["r0-loss-chart"]["views"][0]["series"]}
    assert losses == {q["mechanism"]: q["curve"] for q in data["quality"] if "curve" in q}
    quality = charts["r0-quality-chart"]["views"]
    assert [v["x"]["label"] for v in quality[:2]] == ["seconds of training", "a training step at T = 512, ms"]
    assert {s["name"]: s["points"] for s in quality[0]["series"]}["linear"] == [[4.5, 2.1]]


def test_everything_a_run_holds_is_shown(run: Path) -> None:
    page = (run / "report.html").read_text()
    for text in ("Made-up 9000", "2.13.0", "0123abc", "needs 4.1 GB, &lt;3.2 GB are free", "made up &amp; escaped"):
        assert text in page, text
    for text in ("has no causal form", "Ours beside published", "linear &lt;/script&gt; generated"):
        assert text in page, text
    assert 'src="data:image/png;base64,iVBOR' in page
    assert "interrupted" not in page
    for kind in ("training", "forward", "memory", "decode", "quality", "losses"):
        assert (run / f"report_{kind}.png").read_bytes().startswith(b"\x89PNG")


def test_ours_stand_beside_published_as_ratios(run: Path) -> None:
    data = json.loads((run / "results.json").read_text())
    page = (run / "report.html").read_text()
    section = page[page.index('id="published-lra-speed"') :]
    row = re.search(r"<tr><td>Linear Trans\.</td>(.*?)</tr>", section, re.DOTALL)
    assert row
    values = re.findall(r'<td class="n( ours)?" data-v="([^"]*)"', row[1])
    ratio = {r["length"]: r["training_ratio"]["median"] for r in data["rows"] if r["mechanism"] == "linear"}
    assert values == [
        ("", "1.1"), (" ours", str(1 / ratio[1024])), ("", "1.9"), (" ours", str(1 / ratio[2048])), ("", "3.7"),
        ("", "5.6"), (" ours", str(1 / ratio[4096])),
    ]  # fmt: skip


def test_ours_of_the_arena_stand_beside_the_paper_s(tmp_path: Path) -> None:
    quality = [{"mechanism": "linear", "task": "ListOps", "metric": "accuracy", "value": 36.05, "curve": []}]
    (tmp_path / "arena.json").write_text(json.dumps({"kind": "lra", "quality": quality, "rows": []}))
    speeds = {"linear": 60.0, "softmax, naive": 10.0}
    rows = [{"mechanism": name, "length": 4096, "steps_per_second": rate} for name, rate in speeds.items()]
    (tmp_path / "speed.json").write_text(json.dumps({"kind": "lra-efficiency", "rows": rows}))
    page = write([tmp_path / "arena.json", tmp_path / "speed.json"]).html.read_text()
    for section, value in (("lra", "36.05"), ("lra-speed", "6.0")):
        part = page[page.index(f'id="published-{section}"') :]
        row = re.search(r"<tr><td>Linear Trans\.</td>(.*?)</tr>", part, re.DOTALL)
        assert row
        assert re.findall(r'<td class="n ours" data-v="([^"]*)"', row[1]) == [value]


def test_what_a_paper_did_not_try_gets_a_row_of_its_own(run: Path, tmp_path: Path) -> None:
    values = {"linear": 0.81, "linear-taps": 0.62}
    quality = [{"mechanism": n, "task": "mnist", "metric": "bits/dim", "value": v} for n, v in values.items()]
    about = {
        "table": "mnist",
        "title": "MNIST",
        "source": "a paper",
        "metric": "bits/dim",
        "differs": [],
        "results": {},
    }
    (tmp_path / "mnist.json").write_text(json.dumps({"kind": "reproduce", **about, "quality": quality}))
    page = make(read([tmp_path / "mnist.json"]))
    part = page[page.index('id="published-mnist"') :]
    for label, figures in (("Linear", ["0.644", "0.81", "142.8"]), ("linear-taps", ["", "0.62", ""])):
        row = re.search(rf"<tr><td>{label}</td>(.*?)</tr>", part, re.DOTALL)
        assert row
        assert re.findall(r'data-v="([^"]*)"', row[1]) == figures
    assert "Not in the paper: linear-taps." in part
    assert "Not in the paper" not in (run / "report.html").read_text()  # a comparison does not repeat a paper's table


def test_published_tables_stand_only_beside_the_same_thing(run: Path, tmp_path: Path) -> None:
    def tables(page: str) -> list[str]:
        return re.findall(r'id="published-([\w-]+)"', page)

    assert tables((run / "report.html").read_text()) == ["lra-speed", "lra-memory"]
    rows = [
        {"mechanism": name, "length": 3072, "steps_per_second": rate, "peak_bytes": 10}
        for name, rate in {"strided": 60.0, "linear": 60.0, "softmax, naive": 10.0}.items()
    ]
    arena = tmp_path / "arena.json"
    arena.write_text(json.dumps({"kind": "lra-efficiency", "rows": rows}))
    assert tables(make(read([arena]))) == ["lra-speed", "lra-memory"]  # not those of the Sparse Transformer
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"device": "cpu", "times": [{"T": 1024, "ms": 1.0}]}))
    page = make(read([other]))
    assert tables(page) == []
    assert 'id="published"' not in page
    assert "#published" not in page


def test_pictures_on_white_can_be_inverted(tmp_path: Path) -> None:
    import matplotlib.image
    import numpy as np

    drawn, photo = np.ones((8, 8, 3)), np.full((8, 8, 3), 0.6)
    drawn[2:4] = 0
    for name, pixels in (("drawn", drawn), ("photo", photo)):
        matplotlib.image.imsave(tmp_path / f"{name}.png", pixels)
    (tmp_path / "figure.svg").write_text("<svg/>")
    pictures = [{"title": name, "file": name} for name in ("drawn.png", "photo.png", "figure.svg")]
    page = make(read([runs.write(tmp_path, rows=[], quality=[], pictures=pictures)]))
    assert re.findall(r'<img(?: class="(\w+)")? alt="([\w.]+)"', page) == [
        ("ink", "drawn.png"), ("", "photo.png"), ("", "figure.svg"),
    ]  # fmt: skip


def test_what_a_table_of_a_paper_lacks_has_no_column(tmp_path: Path) -> None:
    results = {"linear": {"published": {}, "value": 0.5, "steps": 3}}
    about = {"table": "x", "title": "X", "source": "a paper", "metric": "m", "differs": []}
    (tmp_path / "x.json").write_text(json.dumps({"kind": "reproduce", **about, "results": results}))
    page = make(read([tmp_path / "x.json"]))
    assert re.findall(r'<th scope="col"[^>]*><button type="button">([^<]*)<', page) == ["row", "ours", "steps"]
    assert '<h1 id="top">The papers\' experiments, run here</h1>' in page


def test_several_runs_and_other_json(tmp_path: Path) -> None:
    few = [row for row in runs.results()["rows"] if row["mechanism"] in ("softmax", "linear", "rfa")]
    changes = {"machine": {"device": "NVIDIA H200"}, "interrupted": True, "pictures": [], "rows": few}
    other = runs.write(tmp_path / "gpu", **changes, quality=[])
    run = runs.write(tmp_path / "cpu", rows=few, quality=[])
    figures = tmp_path / "linear.json"
    record = {"T": 1024, "ours": 0.21, "peer": 1.33, "ok": True}
    nested = {"causal": {"a": {"ms": 0.5}, "b": {"ms": 0.7}}}
    told = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}}
    figures.write_text(json.dumps({**told, "times": [record], **nested}))
    written = write([run, other, figures], tmp_path / "both" / "all.html")
    assert written.html == tmp_path / "both" / "all.html"
    page = written.html.read_text()
    named = re.findall(r' id="([^"]+)"', page)
    assert len(named) == len(set(named))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(named)
    charts = specs(page)
    assert {"r0-curves-chart", "r1-curves-chart"} <= set(charts)
    assert "This run was interrupted" in page
    assert 'data-v="1.33"' in page
    assert "torch 2.11" in page
    assert "<td>b</td>" in page
    assert (tmp_path / "both" / "all_2_training.png").exists()
    with (tmp_path / "both" / "all_rows.csv").open() as file:
        assert {r["run"] for r in csv.DictReader(file)} == {"cpu", "gpu"}


def test_an_empty_run_is_a_page_all_the_same(tmp_path: Path) -> None:
    empty: dict[str, list[object]] = {"rows": [], "growth": [], "crossovers": [], "quality": [], "pictures": []}
    page = write([runs.write(tmp_path / "run", **empty)]).html.read_text()
    assert specs(page) == {}
    assert "Made-up 9000" in page


@pytest.mark.parametrize(
    ("content", "said"), [(None, "JSON file, or a folder"), ("{", "not JSON"), ("[]", "accepted is a JSON object")]
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "figures.json"
    if content is not None:
        path.write_text(content)
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["report", str(path)])
    assert result.exit_code == 2
    assert said in result.output
    assert "figures.json" in result.output


def test_the_command_says_where_the_report_is(tmp_path: Path) -> None:
    folder = runs.write(tmp_path / "run", rows=[], quality=[])
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["report", str(folder), "--out", str(tmp_path / "x.html")])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "x.html") in result.output
    assert (tmp_path / "x.html").exists()


PROBE = """
const q = (s) => Array.from(document.querySelectorAll(s));
const box = document.querySelector("#r0-curves-chart"), rows = document.querySelector("#r0-rows");
const column = (i) => Array.from(rows.tBodies[0].rows).map((r) => r.cells[i].dataset.v);
const few = q("#r0-curves-chart g.s").length, chosen = q("#r0-curves-chart g.s.on").map((g) => g.dataset.name).sort();
box.querySelector(".head input[type=checkbox]").click();
const lines = q("#r0-curves-chart g.s").map((g) => g.dataset.name).sort();
const button = box.querySelector('button[data-name="rfa"]');
button.click();
const pressed = button.getAttribute("aria-pressed"), after = q("#r0-curves-chart g.s.on").length;
const won = box.querySelector(".won").textContent;
const head = rows.querySelectorAll("thead button")[3];
head.click();
const up = column(3), sort = head.parentNode.getAttribute("aria-sort");
head.click();
const down = column(3);
const filter = document.querySelector("input[data-filter]");
filter.value = "performer"; filter.dispatchEvent(new Event("input"));
const kept = Array.from(rows.tBodies[0].rows).filter((r) => !r.hidden).map((r) => r.cells[0].textContent);
const svg = box.querySelector(".plot svg");
const dot = box.querySelector('g.s[data-name="linear"] path.dot').getBoundingClientRect();
const place = {clientX: dot.x + dot.width / 2, clientY: dot.y + dot.height / 2, bubbles: true};
svg.dispatchEvent(new PointerEvent("pointermove", place));
const tip = box.querySelector(".tip").textContent, hot = q("#r0-curves-chart g.s.hot").map((g) => g.dataset.name);
const select = box.querySelector("select");
select.value = "2"; select.dispatchEvent(new Event("change"));
const memory = box.querySelector("svg").getAttribute("aria-label");
result = {few, lines, chosen, pressed, after, won, up, down, sort, kept, tip, hot, memory,
  bands: q("#r0-curves-chart g.s.on path.band").length, points: q("#r0-quality-chart g.s path.dot").length,
  names: q("#r0-quality-chart g.s text.name").map((t) => t.textContent).sort(),
  loss: q("#r0-loss-chart g.s path.line").length, pictures: q(".pictures img").map((i) => i.naturalWidth),
  wide: document.documentElement.scrollWidth > window.innerWidth,
  paper: getComputedStyle(document.body).backgroundColor};
"""


@needs_chromium
def test_in_a_browser(run: Path, tmp_path: Path) -> None:
    """Charts are drawn, names toggle lines, points show figures, tables sort; no requests and no errors."""
    data = json.loads((run / "results.json").read_text())
    seen = visit(run / "report.html", PROBE, tmp_path)
    assert seen["problems"] == []
    assert [a for a in seen["requested"] if not a.startswith("data:")] == []
    got = seen["result"]
    assert got["few"] == 5
    assert got["lines"] == sorted([*MECHANISMS, "softmax, bidirectional"])
    assert got["chosen"] == ["additive", "efficient", "linear", "performer", "softmax"]
    assert (got["pressed"], got["after"]) == ("true", 6)
    lengths = {c["mechanism"]: c["training"] for c in data["crossovers"]}
    told = [f"{name} from T = {lengths[name]:,}" for name in ("additive", "linear", "efficient", "performer", "rfa")]
    assert got["won"] == f"Faster than softmax: {'; '.join(told)}."
    times = [str(r["training_ms"]["median"]) for r in data["rows"] if r["training_ms"]]
    assert got["sort"] == "ascending"
    assert got["up"] == sorted(times, key=float)
    assert got["down"] == sorted(times, key=float, reverse=True)
    assert set(got["kept"]) == {"performer"}
    assert got["hot"] == ["linear"]
    assert got["tip"].startswith("linear, causal\nT = 512")
    assert "more than softmax" in got["tip"]
    assert got["memory"].startswith("Training step: peak memory")
    assert got["points"] == 3
    assert got["names"] == ["linear", "local", "softmax"]
    assert got["loss"] == 3
    assert got["pictures"] == [1]
    assert not got["wide"]


@needs_chromium
def test_on_a_phone_in_the_dark(run: Path, tmp_path: Path) -> None:
    seen = visit(run / "report.html", PROBE, tmp_path, width=390, dark=True)
    assert seen["problems"] == []
    assert not seen["result"]["wide"]
    assert len(seen["result"]["lines"]) == len(MECHANISMS) + 1
    red, green, blue = (int(v) for v in re.findall(r"\d+", seen["result"]["paper"])[:3])
    assert red + green + blue < 150


def test_a_training_run_is_shown_with_its_curves(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    told = {"task": "digits", "data": {}, "model": {"mechanism": "linear"}, "training": {"steps": 4, "lr": 0.003}}
    (folder / "config.json").write_text(json.dumps({**told, "machine": {"device": "cpu"}, "commit": "0123abc"}))
    lines = [{"step": 2, "split": "train", "loss": 1.5, "lr": 0.1}, {"step": 2, "split": "validation", "bits/dim": 2.5}]
    lines += [{"step": 4, "split": "train", "loss": 1.25, "lr": 0.1}, {"step": 4, "split": "test", "bits/dim": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 5, "sp')
    written = write([folder])
    page = written.html.read_text()
    views = specs(page)["l0-chart"]["views"]
    assert [(view["label"], view["series"][0]["points"]) for view in views] == [
        ("Training loss", [[2, 1.5], [4, 1.25]]),
        ("Validation: bits/dim", [[2, 2.5]]),
    ]
    assert "Not finished: 4 steps so far." in page
    assert [path.name for path in written.beside] == ["report_mine.png"]
    ended = {"metric": "bits/dim", "test": {"bits/dim": 2.0}, "best_step": 2, "steps": 4, "seconds": 3.2}
    (folder / "result.json").write_text(json.dumps({**ended, "parameters": 1234}))
    page = write([folder]).html.read_text()
    assert "test 2.000 bits/dim, with the weights of step 2. 1,234 parameters, 4 steps in 3.20 s." in page


@needs_chromium
def test_no_line_goes_on_where_nothing_was_measured(run: Path, tmp_path: Path) -> None:
    script = """document.querySelector("#r0-curves-chart .head input[type=checkbox]").click();
        result = [...document.querySelector("#r0-curves-chart svg").querySelectorAll("path.leader")].map(
        (line) => parseFloat(line.getAttribute("d").slice(1)));"""
    starts = visit(run / "report.html", script, tmp_path)["result"]
    assert len(starts) == len(MECHANISMS)  # with bidirectional softmax, and without gmlp, which ends before the others
    assert max(starts) - min(starts) < 0.1
