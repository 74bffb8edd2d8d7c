"""Drawings and sentences follow the same rule, and no words cover lines or other words."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from subquad.measure.cost import Row
from subquad.measure.growth import between, crossovers
from subquad.mechanisms import MECHANISMS
from subquad.report import charts
from subquad.report.report import make
from subquad.report.runs import Run, read
from subquad.studies.results import from_json, to_json
from tests.report import runs
from tests.report.browser import needs_chromium, visit

Box = tuple[float, float, float, float]  # left, top, right, bottom
Line = tuple[float, float, float, float]  # x, y of either end


def unsteady() -> Run:
    """A machine that slowed down during the measurements: times and paired ratios disagree."""
    softmax = {512: 4.0, 1024: 10.0, 2048: 40.0, 4096: 160.0}
    speeds = {"softmax": 1.25, "linear": 1.0, "local": 0.8, "rfa": 1.1, "fnet": 1.0}
    costs = {"softmax": 1.0, "linear": 0.95, "local": 1.6, "rfa": 2.5, "fnet": 1.4}
    rows = []
    for (name, speed), (length, time) in itertools.product(speeds.items(), softmax.items()):
        ratio = 1.0 if name == "softmax" else costs[name] * (512 / length) ** 0.7
        usual = time * (1 if name != "fnet" else 2)  # bidirectional softmax scores twice the pairs
        row = {"mechanism": name, "length": length, "causal": name != "fnet"}
        row["training_ms"] = runs.spread(ratio * usual / speed)
        row["training_ratio"] = runs.spread(ratio)
        rows.append(row)
    crossed = to_json(crossovers(from_json(list[Row], rows, "rows")))
    return Run("unsteady", Path("results.json"), {"kind": "compare", "rows": rows, "crossovers": crossed})


def lines(view: dict[str, Any]) -> dict[str, tuple[list[int], list[float]]]:
    return {s["name"]: ([p[0] for p in s["points"]], s["drawn"]) for s in view["series"]}


def test_lines_cross_where_it_is_said() -> None:
    run = unsteady()
    spec = charts.curves(run)
    assert spec
    view = spec["views"][0]
    drawn = lines(view)
    measured = {(r["mechanism"], r["length"]): r["training_ms"]["median"] for r in run.data["rows"]}
    assert measured["linear", 512] > measured["softmax", 512]  # as measured, minutes apart
    assert view["throughout"] == ["linear"]
    assert all(ours < theirs for ours, theirs in zip(drawn["linear"][1], drawn["softmax"][1], strict=True))
    assert set(view["marks"]) == {"local", "rfa", "fnet"}
    for name, length in view["marks"].items():
        yardstick = "softmax, bidirectional" if name == "fnet" else "softmax"
        assert between(*drawn[name], length) == pytest.approx(between(*drawn[yardstick], length), rel=2e-3), name
    written = {c["mechanism"]: c["training"] for c in run.data["crossovers"] if c["mechanism"] != "softmax"}
    assert {name: win.length for name, win in charts.wins(run, "training").items()} == written


def test_a_view_of_ratios_has_softmax_at_one() -> None:
    spec = charts.curves(unsteady())
    assert spec
    view = next(v for v in spec["views"] if v["label"] == "Training step against softmax")
    assert next(s for s in view["series"] if s["name"] == "softmax")["drawn"] == [1.0] * 4


def test_a_mechanism_stands_beside_softmax_of_its_form() -> None:
    for name, yardstick in (("fnet", "softmax, bidirectional"), ("linear", "softmax")):
        spec = charts.curves(unsteady(), {"softmax", name})
        assert spec
        assert {s["name"] for s in spec["views"][0]["series"]} == {name, yardstick}


def test_sentence_table_and_ring_agree(tmp_path: Path) -> None:
    run = unsteady()
    (tmp_path / "results.json").write_text(json.dumps(run.data))
    page = make(read([tmp_path]))
    wins = charts.wins(run, "training")
    told = "linear at every T measured" + "".join(
        f"; {name} from T = {wins[name].length:,}" for name in ("fnet", "local", "rfa")
    )
    assert charts.in_words(wins) == told
    assert f"Mechanisms that train faster than exact softmax: {told}." in page
    table = page[page.index('id="r0-crossovers"') :]
    for name, win in wins.items():
        row = re.search(rf"<tr><td>{name}</td>(.*?)</tr>", table)
        assert row
        assert f">{'every T measured' if win.throughout else format(win.length, ',')}</td>" in row[1]


def test_softmax_is_advised_only_below_where_nothing_won() -> None:
    def said(ratios: list[float]) -> bool:
        rows = [
            {"mechanism": "linear", "length": 512 * 2**i, "causal": True, "training_ms": runs.spread(ratio)}
            | {"training_ratio": runs.spread(ratio)}
            for i, ratio in enumerate(ratios)
        ]
        return "use softmax there" in make([Run("run", Path("results.json"), {"kind": "compare", "rows": rows})])

    assert said([1.5, 1.2, 0.5])
    assert not said([0.8, 1.2, 0.5])  # it won at the shortest length, lost and won again
    assert not said([0.8, 0.7, 0.5])


def test_few_lines_are_shown_at_first() -> None:
    run = Run("run", Path("results.json"), runs.results())
    spec = charts.curves(run)
    assert spec
    ends = {name: line[-1] for name, (lengths, line) in lines(spec["views"][0]).items() if lengths[-1] == 8192}
    others = sorted((end, name) for name, end in ends.items() if name not in ("softmax", "linear"))
    assert set(spec["chosen"]) == {"softmax", "linear", *(name for _, name in others[:3])}


def test_pictures_name_at_least_three_marks_and_lay_no_words_on_each_other(tmp_path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    run = Run("run", Path("results.json"), runs.results())
    for spec in (charts.quality_against_cost(run), charts.curves(unsteady())):
        assert spec
        figure, axis = plt.subplots()
        charts._draw_view(axis, spec["views"][0], spec["chosen"])
        figure.canvas.draw()
        low, high = axis.get_xlim()
        named = [t.get_text() for t in axis.get_xticklabels() if low <= t.get_position()[0] <= high and t.get_text()]
        assert len(named) >= 3
        assert not any("10^" in text for text in named)
        boxes = [text.get_window_extent().extents for text in axis.texts]
        assert not any(overlap(a, b) for a, b in itertools.combinations(boxes, 2))
        assert all(box[2] <= axis.get_window_extent().x1 for box in boxes)
        labels = axis.get_legend_handles_labels()[1]
        plt.close(figure)
    assert "linear (wins at every T measured)" in labels
    assert f"rfa (wins from T = {charts.wins(unsteady(), 'training')['rfa'].length:,})" in labels


GEOMETRY = """
const all = (query, root) => Array.from(root.querySelectorAll(query));
const box = (e) => { const b = e.getBBox(); return [b.x, b.y, b.x + b.width, b.y + b.height]; };
const read = (chart) => {
  const numbers = (d) => d.slice(1).split("L").map((p) => p.split(",").map(Number));
  const path = (g) => (g.querySelector("path.line") ? numbers(g.querySelector("path.line").getAttribute("d")) : []);
  const centre = (c) => [c.cx.baseVal.value, c.cy.baseVal.value];
  const view = chart.querySelector(".plot svg").viewBox.baseVal;
  return {
    width: view.width,
    names: all("g.s text.name", chart).map((t) => ({text: t.textContent, box: box(t)})),
    from: all("g.cross.on text", chart).map((t) => ({text: t.textContent, box: box(t)})),
    drops: all("g.cross.on .drop", chart).length,
    rings: all("g.cross.on circle", chart).map((c) => ({name: c.parentNode.dataset.name, at: centre(c)})),
    paths: Object.fromEntries(all("g.s", chart).map((g) => [g.dataset.name, path(g)])),
    x: all("text.tick.x", chart).map((t) => ({text: t.textContent, box: box(t)})),
    y: all("text.tick.y", chart).map((t) => ({text: t.textContent, box: box(t)})),
    won: chart.querySelector(".won").textContent,
  };
};
const few = Object.fromEntries(all(".chart[data-spec]", document).map((chart) => [chart.id, read(chart)]));
const curves = document.querySelector("#r0-curves-chart");
curves.querySelector("[data-name=bigbird]").click(); curves.querySelector("[data-name=rfa]").click();
const more = read(curves);
curves.querySelector(".head button").click();
const every = read(curves), nav = document.querySelector("header nav"), table = document.querySelector(".scroll");
const filter = () => getComputedStyle(document.querySelector(".pictures img")).filter, automatic = filter();
const themes = [], button = document.querySelector("[data-theme-switch]");
for (let i = 0; i < 3; i++) { themes.push([button.textContent, filter()]); button.click(); }
result = {few, more, every, automatic, themes, nav: nav.scrollWidth <= nav.clientWidth,
  shadow: getComputedStyle(table).backgroundAttachment,
  wide: document.documentElement.scrollWidth > innerWidth, at: innerWidth};
"""


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def runs_through(line: Line, box: Box) -> bool:
    """Whether a straight line has a point inside the box."""
    (x1, y1, x2, y2), start, end = line, 0.0, 1.0
    for step, low, high in ((x2 - x1, box[0] - x1, box[2] - x1), (y2 - y1, box[1] - y1, box[3] - y1)):
        if step == 0:
            if low > 0 or high < 0:
                return False
            continue
        start, end = max(start, min(low / step, high / step)), min(end, max(low / step, high / step))
    return start <= end


def segments(path: list[list[float]]) -> list[Line]:
    return [(*a, *b) for a, b in itertools.pairwise(path)]  # type: ignore[misc]


def distance(point: list[float], path: list[list[float]]) -> float:
    def to(line: Line) -> float:
        (x1, y1, x2, y2), (x, y) = line, point
        share = ((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) / ((x2 - x1) ** 2 + (y2 - y1) ** 2)
        share = min(1.0, max(0.0, share))
        return math.hypot(x1 + share * (x2 - x1) - x, y1 + share * (y2 - y1) - y)

    return min(to(line) for line in segments(path))


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_words_lie_on_nothing(tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "report.html"
    page.write_text(make(read([runs.write(tmp_path / "run")])))
    seen = visit(page, GEOMETRY, tmp_path / "profile", width=width, dark=dark)
    assert seen["problems"] == []
    got = seen["result"]
    assert got["at"] == width
    for name, chart in {**got["few"], "more": got["more"], "every": got["every"]}.items():
        words = [*chart["names"], *chart["from"]]
        for a, b in itertools.combinations(words, 2):
            assert not overlap(a["box"], b["box"]), (name, a["text"], b["text"])
        for word, (series, path) in itertools.product(words, chart["paths"].items()):
            assert not any(runs_through(line, word["box"]) for line in segments(path)), (name, word["text"], series)
        for word in words:
            assert word["box"][0] >= 0, (name, word["text"])
            assert word["box"][2] <= chart["width"], (name, word["text"])
        assert chart["drops"] == len(chart["from"])  # no dotted line without words
        for axis in ("x", "y"):
            marks = [tick["text"] for tick in chart[axis]]
            assert len(marks) >= 3, (name, axis, marks)
            assert len(set(marks)) == len(marks), (name, axis, marks)
            boxes = [tick["box"] for tick in chart[axis]]
            assert not any(overlap(a, b) for a, b in itertools.combinations(boxes, 2)), (name, axis, marks)
    assert len(got["every"]["names"]) == len(MECHANISMS) + 1
    curves = got["more"]
    assert {ring["name"] for ring in curves["rings"]} == {
        "additive",
        "linear",
        "efficient",
        "performer",
        "bigbird",
        "rfa",
    }
    for ring in curves["rings"]:
        assert distance(ring["at"], curves["paths"][ring["name"]]) < 1
        assert distance(ring["at"], curves["paths"]["softmax"]) < 1
    told = re.findall(r"(\w+) from T = ([\d,]+)", curves["won"])
    lengths = [int(length.replace(",", "")) for _, length in told]
    assert len(lengths) == 6
    assert lengths == sorted(lengths)
    assert len(curves["from"]) >= 2
    assert got["nav"]
    assert not got["wide"]
    assert "local" in got["shadow"]
    # pictures do not glare, whether the system asks for dark pages or the reader does
    assert got["automatic"] == ("brightness(0.75)" if dark else "none")
    chosen = [["theme: light", "none"], ["theme: dark", "brightness(0.75)"]]
    assert got["themes"] == [["theme: auto", got["automatic"]], *chosen]
