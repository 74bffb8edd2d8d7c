"""The atlas has a page for everything, its links work, and its examples run."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
import torch

from subquad.data import digits
from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.card import card
from subquad.report import atlas, charts, recall
from subquad.report.atlas import LESSONS, build_atlas, embed, who_attends
from subquad.report.charts import FAMILIES
from subquad.report.html import template
from subquad.report.runs import find
from subquad.studies.results import ReproducedTable, TrainedRow, save
from tests.report import runs
from tests.report.browser import needs_chromium, visit

SHARE = {
    "kind": "share",
    "machine": {"device": "cpu", "torch": "2.13.0", "threads": 1},
    "settings": {"dim": 64, "heads": 2, "batch": 1},
    "rows": [
        {"mechanism": m, "length": n, "mixer_ms": s, "block_ms": 1.0, "share": s}
        for m, n, s in (("softmax", 64, 0.4), ("softmax", 4096, 0.9), ("linear", 64, 0.5), ("linear", 4096, 0.5))
    ],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("atlas")
    return build_atlas(folder / "site", [runs.write(folder / "run")], SHARE).parent


def pages(site: Path) -> dict[str, str]:
    return {str(path.relative_to(site)): path.read_text() for path in sorted(site.rglob("*.html"))}


def test_a_page_for_every_mechanism_and_lesson(site: Path) -> None:
    expected = {f"mechanisms/{name}.html" for name in MECHANISMS} | {f"lessons/{slug}.html" for slug in LESSONS}
    assert set(pages(site)) == expected | {"index.html", "measured.html"}


def test_every_family_has_a_place_in_the_index(site: Path) -> None:
    assert {cls.family for cls in MECHANISMS.values()} <= set(FAMILIES)
    index = pages(site)["index.html"]
    for title in FAMILIES.values():
        assert title in index
    for name in MECHANISMS:
        assert f'href="mechanisms/{name}.html"' in index


def test_measured_is_headed_in_words(site: Path) -> None:
    page = pages(site)["measured.html"]
    heading = "CPU (Made-up 9000, 2 threads), causal where there is a causal form"
    assert re.findall(r"<h2>(.*?)</h2>", page) == [heading, "Published, and ours beside it"]
    assert charts.PAIRED in page
    assert set(re.findall(r">(ours, [^<]*)<", page)) == {"ours, CPU"}


def test_a_page_says_from_where_on_its_ring_stands(site: Path) -> None:
    for name in ("linear", "rfa", "fnet"):
        page = pages(site)[f"mechanisms/{name}.html"]
        data = re.search(r'id="cost0-data">(.*?)</script>', page, re.DOTALL)
        said = re.search(r"A training step is faster than softmax from T = ([\d,]+)\.", page)
        assert data
        assert said
        assert int(said[1].replace(",", "")) == json.loads(data[1])["views"][0]["marks"][name]


def test_a_page_says_that_a_mechanism_never_wins(tmp_path: Path) -> None:
    data = runs.results()
    for row in data["rows"]:
        if row["mechanism"] == "rfa":
            row |= {"training_ratio": runs.spread(1.2), "decode_ratio": runs.spread(1.2 - row["length"] / 8192)}
        elif row["mechanism"] == "linear" and row["decode_ratio"]:
            row |= {"decode_ratio": runs.spread(1.5)}
    (tmp_path / "results.json").write_text(json.dumps(data))
    pages = build_atlas(tmp_path / "site", [tmp_path / "results.json"], SHARE).parent / "mechanisms"
    rfa, linear, softmax = ((pages / f"{name}.html").read_text() for name in ("rfa", "linear", "softmax"))
    assert "A training step is not faster than softmax at T = 8,192, the longest measured." in rfa
    assert re.search(r"Decoding a token is faster than softmax from T = [\d,]+\.", rfa)
    assert "Decoding a token is not faster than softmax at T = 8,192, the longest measured." in linear
    assert "faster than softmax" not in softmax[: softmax.index("<h2>Options")]


def test_the_table_of_recall_ships_with_the_package(tmp_path: Path) -> None:
    (shipped,) = (run for run in find(tmp_path) if run.kind == "reproduce")
    assert recall.page(shipped.reproduced) is not None
    measured = Path(__file__).parents[2] / "results" / shipped.path.name
    assert shipped.path.read_bytes() == measured.read_bytes(), f"copy {measured} to {shipped.path}"


def test_a_page_says_what_the_source_says(site: Path) -> None:
    for name, cls in MECHANISMS.items():
        page = re.sub(r"</?code>", "`", (site / "mechanisms" / f"{name}.html").read_text())
        text = unescape(re.sub(r"<[^>]+>", "", page))
        facts = card(cls)
        for part in (facts.title, facts.definition, facts.departures, facts.verified):
            assert part in text, (name, part)
        assert f'class="{cls.__name__}' in page or f"class {cls.__name__}" in text
        for option in cls.options_type.__dataclass_fields__:
            assert f"<td>{option}</td>" in page, (name, option)
        assert '<td class="long"></td>' not in page, f"an option of {name} has no comment that says what it means"
        for direction, can in (("causal", cls.traits.causal), ("bidirectional", cls.traits.bidirectional)):
            assert (f'<img alt="{direction}, head 0"' in page) == can, (name, direction)
        assert 'id="cost0"' in page


def test_links_are_relative_and_lead_somewhere(site: Path) -> None:
    for name, page in pages(site).items():
        for address in re.findall(r'(?:href|src)="([^"]*)"', page):
            if address.startswith(("data:", "https://arxiv.org/abs/", "https://openreview.net/forum?id=")):
                continue
            path, _, anchor = address.partition("#")
            target = (site / name).parent / path if path else site / name
            assert target.is_file(), (name, address)
            assert not anchor or f'id="{anchor}"' in target.read_text(), (name, address)
    for name, page in pages(site).items():
        loaded = re.findall(r'<(?:script|img|link)[^>]* (?:src|href)="([^"]*)"', page)
        assert all(a.startswith(("data:", "assets/", "../assets/")) for a in loaded), (name, loaded)


def test_examples_ran_and_agreed(site: Path) -> None:
    """Every example compares two results, and the site shows its output."""
    count = 0
    for name, page in pages(site).items():
        for printed in re.findall(r'<pre class="out">(.*?)</pre>', page, re.DOTALL):
            assert "True" in printed, name
            assert "False" not in printed, (name, printed)
            count += 1
    assert count == len(MECHANISMS) + sum(
        "{% filter example %}" in template(f"lessons/{slug}.html") for slug in LESSONS
    )


def test_a_wrong_example_stops_the_build() -> None:
    with pytest.raises(ZeroDivisionError):
        atlas.run_example("1 / 0")


def test_the_lecture_notes_questions_are_answered(site: Path) -> None:
    page = (site / "lessons" / "questions.html").read_text()
    assert page.count('<div class="answer">') >= 24
    lectures = re.findall(r'<li><a href="#(\w+)">', page)
    assert len(lectures) == 5
    assert re.findall(r'<h2 id="(\w+)">', page) == lectures
    formulas = (
        "softmax(Q Kᵀ / √d) V",
        "Σⱼ sim(qᵢ, kⱼ) vⱼ",
        "φ(qᵢ)ᵀ Σⱼ φ(kⱼ)vⱼᵀ",
        "Sᵢ₋₁ + φ(kᵢ)vᵢᵀ",
        "(d + d')N²",
        "2dd'N",
    )
    for formula in formulas:
        assert formula in page, formula
    assert "$" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_pictures_are_the_pattern_of_a_real_digit() -> None:
    from base64 import b64decode
    from io import BytesIO

    import matplotlib.image

    pixels = digits.load()[1].pixels.long()[4]
    assert embed(pixels).shape == (1, 64, atlas.DIM)
    pictures = dict(who_attends("local", pixels))
    assert set(pictures) == {"bidirectional", "causal"}
    image = torch.tensor(matplotlib.image.imread(BytesIO(b64decode(pictures["causal"][0].split(",")[1]))))
    seen = image[..., 3] > 0  # [T, T]
    at = torch.arange(64)
    window = MECHANISMS["local"].small[0]["window"]
    distance = at[:, None] - at
    assert not seen[(distance < 0) | (distance > window)].any()
    assert seen.diagonal().any()
    assert image[..., 3].amax(1).allclose(torch.ones(64))


def test_the_share_is_shown_as_measured(site: Path) -> None:
    assert json.loads((site / "share.json").read_text()) == SHARE
    page = (site / "lessons" / "share.html").read_text()
    found = re.search(r'id="share-data">(.*?)</script>', page, re.DOTALL)
    assert found
    series = {s["name"]: s["points"] for s in json.loads(found[1])["views"][0]["series"]}
    assert series["softmax"] == [[64, 0.4], [4096, 0.9]]
    assert series["softmax, counted"][0] == [64, (4 * 64 + 2 * 64) / (12 * 64 + 2 * 64)]


def test_the_table_of_recall_is_shown_where_it_was_run(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Not measured yet: <code>subquad reproduce recall" in (site / "lessons" / "rules.html").read_text()
    row = TrainedRow(
        mechanism="linear", variant="width 32", metric="accuracy", state=1056, test={"accuracy, 4 pairs": 0.75}
    )
    machine = {"device": "Made-up 9000"}
    save(ReproducedTable(table="recall", machine=machine, results={"a": row}, differs=["one lr"]), tmp_path / "r.json")
    monkeypatch.setattr(
        atlas, "MECHANISMS", {name: MECHANISMS[name] for name in ("softmax", "linear", "local", "additive")}
    )
    made = build_atlas(tmp_path / "site", [tmp_path / "r.json"], SHARE).parent
    page = (made / "lessons" / "rules.html").read_text()
    assert "Not measured yet" not in page
    assert "Measured on Made-up 9000" in page
    assert "<li>one lr</li>" in page
    assert re.search(r"<td>linear</td><td>width 32</td><td[^>]*>1,056</td><td[^>]*>75.0 %</td>", page)


def test_without_figures_the_pages_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas, "find", list)
    few = {name: MECHANISMS[name] for name in ("softmax", "linear", "local", "additive")}
    monkeypatch.setattr(atlas, "MECHANISMS", few)
    site = build_atlas(tmp_path / "site", share=SHARE).parent
    assert "Not measured yet" in (site / "mechanisms" / "linear.html").read_text()
    assert "Not measured yet" in (site / "measured.html").read_text()


WHO = """
const figure = document.querySelector(".who"), image = figure.querySelectorAll(".maps img")[0];
const before = figure.querySelector(".say").textContent, r = image.getBoundingClientRect();
const place = {clientX: r.x + 5, clientY: r.y + r.height * 40.5 / 64, bubbles: true};
image.dispatchEvent(new PointerEvent("pointermove", place));
result = {before, after: figure.querySelector(".say").textContent,
  drawn: document.querySelectorAll(".chart g.s").length,
  wide: document.documentElement.scrollWidth > window.innerWidth};
"""
LIVE = """
const box = document.querySelector(".associativity"), [n, d, dd] = box.querySelectorAll("input");
const read = () => [".quadratic", ".linear", ".verdict"].map((part) => box.querySelector(part).textContent);
const set = (input, value) => { input.value = value; input.dispatchEvent(new Event("input")); };
const first = read();
set(n, 5); set(d, 6); set(dd, 8);
result = {first, second: read(), curves: box.querySelectorAll("svg path").length};
"""
RULES = """
const images = Array.from(document.querySelectorAll(".read img"));
result = {pictures: images.length, loaded: images.every((image) => image.naturalWidth === 8),
  drawn: document.querySelectorAll("#rules g.s").length,
  wide: document.documentElement.scrollWidth > window.innerWidth};
"""
SORT = """
const table = Array.from(document.querySelectorAll("table.sort")).pop();
const column = () => Array.from(table.tBodies[0].rows).map((r) => r.cells[0].textContent);
table.querySelector("thead button").click();
result = {names: column(), wide: document.documentElement.scrollWidth > window.innerWidth};
"""


@needs_chromium
def test_in_a_browser(site: Path, tmp_path: Path) -> None:
    """The pictures of who attends to whom react to the pointer, sliders compute, tables sort; no page has errors."""
    who = visit(site / "mechanisms" / "local.html", WHO, tmp_path / "a", width=390)
    assert who["problems"] == []
    window = MECHANISMS["local"].small[0]["window"]
    assert who["result"]["before"].startswith(f"bidirectional, head 0: pixel 27 (framed) reads {2 * window + 1} of 64")
    assert "pixel 40 (framed)" in who["result"]["after"]
    assert who["result"]["drawn"] == 2
    assert not who["result"]["wide"]

    live = visit(site / "lessons" / "associativity.html", LIVE, tmp_path / "b")
    assert live["problems"] == []
    n, d = 4096, 64
    assert live["result"]["first"][:2] == [f"{2 * d * n * n:,}", f"{2 * d * d * n:,}"]
    assert "64 times fewer" in live["result"]["first"][2]
    n, d, v = 32, 64, 256
    assert live["result"]["second"][:2] == [f"{(d + v) * n * n:,}", f"{2 * d * v * n:,}"]
    assert f"= {2 * d * v / (d + v):.4g}" in live["result"]["second"][2]
    assert live["result"]["curves"] == 2

    rules = visit(site / "lessons" / "rules.html", RULES, tmp_path / "d", width=390)
    assert rules["problems"] == []
    assert rules["result"] == {"pictures": 3 + 2 * 4, "loaded": True, "drawn": 4, "wide": False}

    index = visit(site / "index.html", SORT, tmp_path / "c", width=390)
    assert index["problems"] == []
    assert index["result"]["names"] == sorted(MECHANISMS)
    assert not index["result"]["wide"]
