"""`subquad atlas`: the documentation as a small static site, made of docstrings, options, sources and results."""

import base64
import contextlib
import dataclasses
import inspect
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from subquad.data import digits
from subquad.measure.growth import Growth, grouped, growth_of_time
from subquad.measure.share import block_share
from subquad.mechanisms import MECHANISMS, build
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.card import card, option_meanings
from subquad.report import charts, recall, rules
from subquad.report.charts import FAMILIES
from subquad.report.html import Cell, code, environment, escape, number, render, template
from subquad.report.published import beside
from subquad.report.runs import Json, Run, compared, find, read
from subquad.report.terminal import options
from subquad.studies.published import TABLES

LESSONS = {
    "softmax": "Softmax attention and its cost",
    "kernels": "Kernels: similarity as features",
    "associativity": "(AB)C = A(BC): the order decides the cost",
    "causal": "Causal masking is a running sum",
    "rnn": "Transformers are RNNs",
    "rules": "Decays and delta rules",
    "patterns": "Leaving pairs out: patterns and groups",
    "share": "What share of a block is attention?",
    "questions": "The questions of five lectures, answered",
}
Page = tuple[str, str]  # its file and its title
DIM, HEADS = 32, 4  # of the modules whose patterns are drawn
FRAMED = 27  # the pixel whose row is shown first: near the middle, on the stroke of most digits


def build_atlas(out: Path, runs: Sequence[Path] = (), share: Mapping[str, Any] | None = None) -> Path:
    """Write the site into `out` and return its index page. Without `runs` it shows this machine's or shipped ones."""
    loaded = read(runs) if runs else find()
    known = next((run.data for run in loaded if run.kind == "share"), None)
    return _Site(out, loaded, dict(share or known or block_share())).write()


class _Site:
    def __init__(self, out: Path, runs: Sequence[Run], share: Json):
        self.out, self.share = out, share
        self.runs, self.figures = compared(runs), runs
        self.pixels = digits.load()[1].pixels[4].long()  # [64], a test image
        self.pictures = {name: who_attends(name, self.pixels) for name in MECHANISMS}
        self.cards = {name: card(cls) for name, cls in MECHANISMS.items()}
        self.rules = _rules()
        names = grouped((cls.family, name) for name, cls in MECHANISMS.items())
        self.names = {family: names[family] for family in FAMILIES if family in names}
        environment().filters.update(prose=_prose, linked=_linked, short=_short, oneline=_one_line, example=run_example)

    def write(self) -> Path:
        for folder in ("assets", "mechanisms", "lessons"):
            (self.out / folder).mkdir(parents=True, exist_ok=True)
        for asset in ("style.css", "theme.js", "page.js"):
            (self.out / "assets" / asset).write_text(template(asset), encoding="utf-8")
        self._index()
        for name, before, after in _with_neighbours([(n, n) for names in self.names.values() for n in names]):
            self._mechanism(name, before=before, after=after)
        for slug, before, after in _with_neighbours(list(LESSONS.items())):
            self._lesson(slug, before=before, after=after)
        self._measured()
        (self.out / "share.json").write_text(json.dumps(self.share, indent=1), encoding="utf-8")
        return self.out / "index.html"

    def _page(self, path: str, source: str, title: str, /, **values: Any) -> None:
        common = {"families": FAMILIES, "names": self.names, "cards": self.cards, "up": "../" * path.count("/")}
        here = {"measured.html": "Measured", "lessons/questions.html": "Questions"}.get(path, "")
        page = render(source, title=title, here=here, **common, **values)
        self.out.joinpath(path).write_text(page, encoding="utf-8")

    def _index(self) -> None:
        lessons = []
        for slug, title in LESSONS.items():
            lesson = environment().get_template(f"lessons/{slug}.html")
            lessons.append((slug, title, Markup("".join(lesson.blocks["lead"](lesson.new_context())))))
        overview = []
        for name, cls in MECHANISMS.items():
            traits, facts = cls.traits, self.cards[name]
            yes = [Cell("yes" if flag else "-") for flag in (traits.causal, traits.bidirectional, traits.cross)]
            cost, state = Cell(facts.training_cost, css="long"), Cell(traits.state or "-")
            overview.append([_link(name, ""), Cell(cls.family), cost, *yes, state, Cell(facts.source)])
        self._page(
            "index.html",
            "atlas/index.html",
            "subquad: an atlas of efficient attention",
            lessons=lessons,
            mechanisms=MECHANISMS,
            pictures={name: shown[0][1][0] for name, shown in self.pictures.items()},
            overview=overview,
        )

    def _mechanism(self, name: str, **neighbours: Any) -> None:
        cls = MECHANISMS[name]
        self._page(
            f"mechanisms/{name}.html",
            "atlas/mechanism.html",
            name,
            name=name,
            cls=cls,
            card=self.cards[name],
            legend=_legend(),
            pictures=self.pictures[name],
            framed=FRAMED,
            pixels=str(self.pixels.tolist()),
            small=", ".join(f"{k}={v!r}" for k, v in cls.small[0].items()) or "default options",
            costs=self._costs(name),
            options=_options(name),
            example=run_example(example(name)),
            source=inspect.getsource(sys.modules[cls.__module__]),
            **neighbours,
        )

    def _costs(self, name: str) -> list[Json]:
        """For each comparison with this mechanism: its curves beside those of softmax, and what they show."""
        costs = []
        for i, run in enumerate(self.runs):
            spec = charts.curves(run, {"softmax", name})
            if spec is None or not any(s["name"] == name for v in spec["views"] for s in v["series"]):
                continue
            growth = next((g for g in run.comparison.growth if g.mechanism == name), Growth(mechanism=name))
            measured = {"time": growth.time, "memory": growth.memory}
            exponents = {key: None if value is None else f"{value:.2g}" for key, value in measured.items()}
            far = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in growth_of_time(growth)]
            about = {"where": _where(run), "date": run.comparison.date[:10], "beside": charts.beside_softmax(run, name)}
            costs.append({"anchor": f"cost{i}", "chart": spec, "far": far, **exponents, **about})
        return costs

    def _lesson(self, slug: str, **neighbours: Any) -> None:
        states = [
            [_link(name, "../"), Cell(cls.traits.state or "-"), Cell(_decoding(self.cards[name].cost), css="long")]
            for name, cls in MECHANISMS.items()
        ]
        self._page(
            f"lessons/{slug}.html",
            f"lessons/{slug}.html",
            LESSONS[slug],
            members=lambda family: Markup(", ").join(_link(name, "../").shown for name in self.names.get(family, ())),
            crossovers=self._crossovers(),
            states=states,
            share=self._share(),
            rules=self.rules,
            recall=self._recall(),
            **neighbours,
        )

    def _crossovers(self) -> list[Json]:
        """For each comparison: the lengths from which on kernels are faster than softmax."""
        tables = []
        for run in self.runs:
            won = [charts.wins(run, what) for what in ("training", "forward")]
            never = Cell("not reached", float("inf"), "n")
            measured = {row.mechanism for row in run.rows if row.training_ratio}
            rows = [
                [Cell(name), *(w[name].cell() if name in w else never for w in won)]
                for name in self.names.get("kernels", ())
                if name in measured
            ]
            dim, heads = run.settings.get("dim"), run.settings.get("heads")
            if rows:
                tables.append({"where": _where(run), "rows": rows, "width": dim // heads if dim and heads else None})
        return tables

    def _recall(self) -> list[Json]:
        """Each table of recall that was run: its figures, and where they come from."""
        tables = [run.reproduced for run in self.figures if run.kind == "reproduce"]
        pages = [(results, recall.page(results)) for results in tables]
        return [
            {**shown, "where": f"{results.machine.get('device', 'an unknown device')}, {results.date[:10]}",
             "differs": results.differs}
            for results, shown in pages if shown is not None
        ]  # fmt: skip

    def _share(self) -> Json:
        settings, machine, rows = self.share["settings"], self.share["machine"], self.share["rows"]
        dim = settings["dim"]
        points = grouped((r["mechanism"], [r["length"], r["share"]]) for r in rows)
        series: list[Json] = [{"name": n, "family": charts.family(n), "points": p} for n, p in points.items()]
        counted = [[n, (4 * dim + 2 * n) / (12 * dim + 2 * n)] for n in sorted({r["length"] for r in rows})]
        series.append({"name": "softmax, counted", "family": "other", "points": counted})
        x = {"label": "sequence length N", "short": "N =", "unit": "tokens", "log": True}
        y = {"label": "share of the block", "short": "share", "unit": "share", "range": [0, 1]}
        view = {"label": "Share of the mixer in a block's forward time", "x": x, "y": y, "series": series}
        keys = ("length", "mixer_ms", "block_ms")
        cells = [
            [Cell(r["mechanism"]), *(number(r[key]) for key in keys), number(100 * r["share"], unit="%")] for r in rows
        ]
        where = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in {**machine, **settings}.items())
        return {"chart": {"views": [view], "chosen": [s["name"] for s in series]}, "rows": cells, "where": where}

    def _measured(self) -> None:
        words = {"dim": "width", "heads": "heads", "batch": "batch", "dtype": "numbers of type"}
        runs = []
        for i, run in enumerate(self.runs):
            spec = charts.curves(run)
            layer = ", ".join(f"{word} {run.settings[key]}" for key, word in words.items() if key in run.settings)
            about = {"where": _where(run), "layer": layer, "file": run.path.name, "date": run.comparison.date[:10]}
            if spec:
                runs.append({"anchor": f"measured{i}", "chart": spec, **about})
        published = beside(TABLES.values(), _named_by_device(self.figures))
        values = {"runs": runs, "measured": self.runs, "paired": charts.PAIRED, "published": published}
        self._page("measured.html", "atlas/measured.html", "Measured", **values)


def _rules() -> Json:
    """What the lesson on the rules of the running sum shows: a table of them, what they read back, and their errors."""
    table = []
    for name, rule in rules.RULES.items():
        known = [_link(m, "../").shown if m in MECHANISMS else escape(m) for m in rule.mechanisms]
        cells = Cell(rule.update), Cell(rule.takes), Cell(rule.forgets, css="long"), Cell(Markup(", ").join(known))
        table.append([Cell(name), *cells])
    written, read = rules.written(), rules.read_back()
    most = max(float(image.max()) for image in (*written, *(image for _, *images in read for image in images)))
    drawn = [_png(image / most) for image in written]
    return {
        "table": table,
        "written": [
            (f"a {n}, written to key {key}", image) for n, key, image in zip(rules.SHOWN, "aba", drawn, strict=True)
        ],
        "read": [(rule, *(_png(image.clamp(min=0) / most) for image in images)) for rule, *images in read],
        "curves": rules.curves(),
    }


def _with_neighbours(pages: Sequence[Page]) -> list[tuple[str, Page | None, Page | None]]:
    """(page, the one before, the one after)"""
    slugs = [slug for slug, _ in pages]
    return list(zip(slugs, [None, *pages], [*pages[1:], None], strict=False))


def _where(run: Run) -> str:
    """The device and the form of a comparison in words, which tell comparisons apart."""
    machine = run.machine
    device = str(machine.get("device") or "an unknown device")
    if device == "cpu":
        threads = f", {machine['threads']} threads" if machine.get("threads") else ""
        device = f"CPU ({machine.get('cpu', 'unknown')}{threads})"
    return f"{device}, {charts.FORMS[run.settings.get('causal')]}"


def _named_by_device(runs: Sequence[Run]) -> list[Run]:
    """Name comparisons after their devices if all differ: a device tells readers more than a file name."""
    devices = [str(run.machine.get("device", "")).replace("cpu", "CPU") for run in compared(runs)]
    if len(set(devices)) < len(devices) or not all(devices):
        return list(runs)
    names = iter(devices)
    return [dataclasses.replace(run, name=next(names)) if run.kind == "compare" else run for run in runs]


def who_attends(name: str, pixels: Tensor) -> list[tuple[str, list[str]]]:
    """`pattern` on the pixels of a digit: (direction, one picture per head) for each direction the mechanism has."""
    cls, small = MECHANISMS[name], MECHANISMS[name].small[0]
    out = []
    for direction, causal in (("bidirectional", False), ("causal", True)):
        if not (cls.traits.causal if causal else cls.traits.bidirectional):
            continue
        torch.manual_seed(0)
        fixed = {"max_length": len(pixels)} if cls.traits.fixed_length else {}
        mix = build(name, dim=DIM, heads=HEADS, causal=causal, **fixed, **small).eval()
        with torch.no_grad():
            weights = mix.pattern(embed(pixels))[0].abs()  # [H, T, T]
        weights = weights / weights.amax(-1, keepdim=True).clamp(min=1e-9)
        out.append((direction, [_png(head) for head in weights]))
    return out


def embed(pixels: Tensor) -> Tensor:
    """A fixed random vector for each shade, row and column, added: [T] -> [1, T, DIM]."""
    generator = torch.Generator().manual_seed(0)
    sizes = (digits.SHADES, digits.SIDE, digits.SIDE)
    shades, rows, columns = (torch.randn(n, DIM, generator=generator) for n in sizes)
    place = torch.arange(len(pixels))
    return (shades[pixels] + rows[place // digits.SIDE] + columns[place % digits.SIDE])[None]


def _png(weights: Tensor) -> str:
    """Square roots of weights in [0, 1] as opacity of one colour: small weights are visible on light and dark pages."""
    import matplotlib.image
    import numpy as np

    colour = np.array([0x2F, 0x7F, 0xD6, 0], dtype=np.uint8)
    image = np.broadcast_to(colour, (*weights.shape, 4)).copy()
    image[..., 3] = (255 * weights.sqrt()).round().byte().numpy()
    file = io.BytesIO()
    matplotlib.image.imsave(file, image, format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def example(name: str) -> str:
    """A program that uses the mechanism in every way its traits allow."""
    traits = MECHANISMS[name].traits
    length = {"max_length": 100} if traits.fixed_length else {}
    # traits of the class say what some options allow, traits of an instance what its own options allow
    cross = traits.cross and build(name, dim=64, heads=4, **length).traits.cross
    return render("atlas/example.txt", name=name, traits=traits, cross=cross)


def run_example(source: str) -> Markup:
    """The program and what it printed when the site was built."""
    printed = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(printed), torch.no_grad():
        exec(compile(str(source), "<example>", "exec"), {"__name__": "example"})
    return code(str(source).strip() + "\n", "run") + Markup('<pre class="out">{}</pre>').format(printed.getvalue())


def _options(name: str) -> list[list[Cell]]:
    meanings = option_meanings(MECHANISMS[name])
    rows = []
    for option, default, shared in options(MECHANISMS[name]):
        kind = option.type if isinstance(option.type, str) else getattr(option.type, "__name__", str(option.type))
        kind = kind if kind not in ("Literal", "Union", "UnionType") else str(option.type)
        kind = re.sub(r"typing\.|collections\.abc\.|torch\.(?=Tensor)", "", kind)
        meaning, whose = Cell(meanings[option.name], css="long"), Cell("all mechanisms" if shared else name)
        rows.append([Cell(option.name), Cell(default), Cell(kind), meaning, whose])
    return rows


def _decoding(cost: str) -> str:
    """The part of a Cost field about decoding."""
    _, decode, rest = _one_line(cost).partition("decode")
    return decode + rest or "no decoding"


def _legend() -> str:
    """The legend of shapes, from the contract's docstring."""
    doc = inspect.cleandoc(sys.modules[Mixer.__module__].__doc__ or "")
    match = re.search(r"^ +(B batch.*?)\n\n", doc, re.MULTILINE | re.DOTALL)
    return _one_line(match[1]) if match else ""


def _link(name: str, up: str) -> Cell:
    return Cell(Markup('<a href="{}mechanisms/{}.html">{}</a>').format(up, name, name), name)


def _prose(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _linked(paper: str) -> Markup:
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', str(escape(paper)))
    return Markup(re.sub(r"OpenReview:(\w+)", r'<a href="https://openreview.net/forum?id=\1">OpenReview:\1</a>', text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(title: str) -> str:
    """The part of a title after the name, for the cards of the index."""
    _, _, rest = title.partition(": ")
    return rest[:1].upper() + rest[1:] if rest else title
