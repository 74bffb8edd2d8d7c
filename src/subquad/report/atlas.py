"""`subquad atlas`: the documentation as a small static site, made of docstrings, options, sources and results."""

import base64
import contextlib
import dataclasses
import html as entities
import inspect
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor

from subquad.data import digits
from subquad.measure.growth import growth_of_time
from subquad.measure.share import block_share
from subquad.mechanisms import MECHANISMS, build
from subquad.mechanisms.base import Mixer, Options
from subquad.mechanisms.card import Card, card, option_meanings
from subquad.report import charts
from subquad.report.charts import FAMILIES
from subquad.report.html import Cell, chart, code, escape, number, page, table, template
from subquad.report.published import beside
from subquad.report.runs import Json, Run, compared, find, read
from subquad.studies.published import TABLES

LESSONS = {
    "softmax": "Softmax attention and its cost",
    "kernels": "Kernels: similarity as features",
    "associativity": "(AB)C = A(BC): the order decides",
    "causal": "Causal masking is a running sum",
    "rnn": "Transformers are RNNs",
    "patterns": "Leaving pairs out: patterns and groups",
    "share": "What share of a block is attention?",
    "questions": "The lecture notes' questions, answered",
}
ABOUT = {
    "exact": "Every pair is scored. What all others approximate or replace.",
    "human patterns": "People decide beforehand which pairs can be left out: near ones stay, and a few that reach far.",
    "clustering": "Similar queries and keys are brought together first, and only pairs within a group are scored.",
    "learnable patterns": "A learned module decides which blocks should meet.",
    "fewer queries or keys": "The matrix has low rank, nearly: a few representatives stand for many.",
    "kernels": "With features in place of the exponential, keys and values are summed before the query is known.",
    "new frameworks": "Weights that do not come from comparing queries with keys.",
    "attention-free": "Tokens mixed by a Fourier transform or a learned matrix over positions.",
    "recurrence": "Segments read one after another, with a memory of what came before.",
    "hybrid": "Several of the above in one layer.",
}
DIM, HEADS = 32, 4  # of the modules that are drawn
FRAMED = 27  # the pixel whose row is shown first: near the middle, on the stroke of most digits


def build_atlas(out: Path, runs: Sequence[Path] = (), share: Mapping[str, Any] | None = None) -> Path:
    """Write the site into `out` and return its index. Without `runs`, what was measured here or ships is shown."""
    found = read(runs) if runs else find()
    known = next((run.data for run in found if run.kind == "share"), None)
    site = _Site(out, found, dict(share or known or block_share()))
    return site.write()


class _Site:
    def __init__(self, out: Path, runs: Sequence[Run], share: Json):
        self.out, self.share = out, share
        self.runs, self.figures = compared(runs), runs
        self.pixels = digits.load()[1].images[4]  # [64], a test image
        self.pictures = {name: who_attends(name, self.pixels) for name in MECHANISMS}

    def write(self) -> Path:
        for folder in ("assets", "mechanisms", "lessons"):
            (self.out / folder).mkdir(parents=True, exist_ok=True)
        for asset in ("style.css", "page.js"):
            (self.out / "assets" / asset).write_text(template(asset), encoding="utf-8")
        self._page("index.html", "subquad: an atlas of efficient attention", self._index())
        for name in MECHANISMS:
            self._page(f"mechanisms/{name}.html", name, self._mechanism(name))
        for slug, title in LESSONS.items():
            self._page(f"lessons/{slug}.html", title, self._lesson(slug))
        self._page("measured.html", "Measured", self._measured())
        (self.out / "share.json").write_text(json.dumps(self.share, indent=1), encoding="utf-8")
        return self.out / "index.html"

    def _page(self, path: str, title: str, body: str) -> None:
        up = "../" * path.count("/")
        nav = [("subquad atlas", f"{up}index.html"), ("Mechanisms", f"{up}index.html#mechanisms")]
        nav += [("Lessons", f"{up}index.html#lessons"), ("Measured", f"{up}measured.html")]
        nav += [("Questions", f"{up}lessons/questions.html")]
        here = {"measured.html": "Measured", "lessons/questions.html": "Questions"}.get(path, "")
        self.out.joinpath(path).write_text(
            page(title, body, nav=nav, assets=f"{up}assets", here=here), encoding="utf-8"
        )

    # The index

    def _index(self) -> str:
        lessons = "".join(
            f'<li><a class="card plain" href="lessons/{slug}.html"><b>{escape(title)}</b>'
            f"<span>{_lead(slug)}</span></a></li>"
            for slug, title in LESSONS.items()
        )
        return (
            "<h1>An atlas of efficient attention</h1>"
            f'<p class="lead">{len(MECHANISMS)} ways to mix the tokens of a sequence, most of them cheaper than the '
            "square of its length. One page each: the equation, who attends to whom, what it costs, its options, an "
            "example that runs, its source, and what was verified.</p>"
            f'<h2 id="lessons">Lessons</h2><ul class="cards">{lessons}</ul>'
            '<h2 id="mechanisms">Mechanisms by family</h2><p class="note">The families of the lecture notes. Small '
            "pictures: which pixel of a digit (down) reads which (across), at options small enough to see.</p>"
            + "".join(self._family(family, title) for family, title in FAMILIES.items())
            + f"<h2>All at a glance</h2>{_overview()}"
        )

    def _family(self, family: str, title: str) -> str:
        names = [name for name, cls in MECHANISMS.items() if cls.family == family]
        cards = "".join(
            f'<li><a class="card" style="--c:{_colour(family)}" href="mechanisms/{name}.html">'
            f'<img alt="" src="{self.pictures[name][0][1][0]}"><div><b>{name}</b>'
            f"<span>{escape(_short(card(MECHANISMS[name]).title))}</span>"
            f"<span>{escape(card(MECHANISMS[name]).training_cost)}</span></div></a></li>"
            for name in names
        )
        said = f'<h3 id="{_anchor(family)}">{escape(title)}</h3><p class="note">{escape(ABOUT[family])}</p>'
        return f'{said}<ul class="cards">{cards}</ul>' if names else ""

    # A mechanism

    def _mechanism(self, name: str) -> str:
        cls, facts = MECHANISMS[name], card(MECHANISMS[name])
        module = sys.modules[cls.__module__]
        order = [n for family in FAMILIES for n, c in MECHANISMS.items() if c.family == family]
        index = order.index(name)
        parts = [
            f'<p class="note"><a href="../index.html#{_anchor(cls.family)}">{escape(FAMILIES[cls.family])}</a></p>',
            f'<h1 style="margin-top:.2rem">{name}</h1><p class="lead">{escape(facts.title)}</p>',
            f"<p>{_linked(facts.paper)}</p>",
            f'<h2>Definition</h2><div class="eq def">{_prose(facts.definition)}</div>',
            f'<p class="note">{escape(_legend())}</p>',
            f"<h2>Who attends to whom</h2>{self._who(name)}",
            f"<h2>Cost</h2><ul>{_clauses(facts.cost)}</ul>{self._cost(name)}",
            f"<h2>Options</h2>{_options(name)}",
            f"<h2>Example</h2>{_example(name)}",
            f"<h2>Departures from the paper</h2><p>{_prose(facts.departures)}</p>",
            f"<h2>Verified</h2><p>{_prose(facts.verified)}</p>{_laws(cls)}",
            f"<h2>Source</h2><details open><summary>src/{cls.__module__.replace('.', '/')}.py</summary>"
            f"{code(inspect.getsource(module))}</details>",
            _around([(f"{n}.html", n) for n in order], index),
        ]
        return "\n".join(parts)

    def _who(self, name: str) -> str:
        blocks = []
        for direction, images in self.pictures[name]:
            blocks.append(f"<h4>{direction}</h4>")
            for head, image in enumerate(images):
                label = f"{direction}, head {head}"
                blocks.append(f'<figure><img alt="{label}" src="{image}"><figcaption>head {head}</figcaption></figure>')
        options = ", ".join(f"{k}={v!r}" for k, v in MECHANISMS[name].small[0].items()) or "default options"
        return (
            f'<div class="who" data-row="{FRAMED}" data-pixels="{self.pixels.tolist()}"><div class="pix"><canvas '
            'aria-label="the digit, with the pixels that one pixel reads"></canvas><p class="say"></p></div>'
            f'<div><div class="maps">{"".join(blocks)}</div><p class="note">Queries down, keys across: the 64 '
            "pixels of a real digit, row by row, embedded at random with their row and column. Untrained, "
            f"{escape(options)}. Opacity is the root of the weight over the row's largest. Point at a row, or at a "
            "pixel.</p></div></div>"
        )

    def _cost(self, name: str) -> str:
        out = []
        for i, run in enumerate(self.runs):
            spec = charts.curves(run, {"softmax", name})
            if spec is None or not any(s["name"] == name for v in spec["views"] for s in v["series"]):
                continue
            out.append(chart(f"cost{i}", spec))
            growth = next((g for g in run.comparison.growth if g.mechanism == name), None)
            said = [f"Measured on {escape(_where(run))}, {escape(run.comparison.date[:10])}."]
            if growth and growth.time is not None:
                far = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in growth_of_time(growth)]
                said += far or [f"Its time grew about as T^{growth.time:.2g}, as documented."]
            if growth and growth.memory is not None:
                said.append(f"Its memory grew about as T^{growth.memory:.2g}.")
            win = charts.wins(run, "training").get(name)
            if win:
                said.append(f"A training step is faster than softmax {win.words()}.")
            out.append(f'<p class="note">{" ".join(said)}</p>')
        return "".join(out) or _not_measured()

    # Lessons

    def _lesson(self, slug: str) -> str:
        cards: dict[str, Card] = {name: card(cls) for name, cls in MECHANISMS.items()}
        filled = Template(template(f"lessons/{slug}.html")).substitute(
            {f"{name}_definition": escape(facts.definition) for name, facts in cards.items()}
            | {re.sub(r"\W", "_", family): _members(family) for family in FAMILIES}
            | {"crossovers": self._crossovers(), "states": _states(), "share": self._share()}
        )
        filled = re.sub(
            r'<pre class="run">(.*?)</pre>', lambda m: run_example(entities.unescape(m[1])), filled, flags=re.DOTALL
        )
        lessons = [(f"{s}.html", t) for s, t in LESSONS.items()]
        return f"<h1>{escape(LESSONS[slug])}</h1>{filled}{_around(lessons, list(LESSONS).index(slug))}"

    def _crossovers(self) -> str:
        out = []
        for run in self.runs:
            won = [charts.wins(run, what) for what in ("training", "forward")]
            never = Cell("not reached", float("inf"), "n")
            measured = {row.mechanism for row in run.rows if row.training_ratio}
            rows = [
                [Cell(name), *(w[name].cell() if name in w else never for w in won)]
                for name in MECHANISMS
                if name in measured and MECHANISMS[name].family == "kernels"
            ]
            dim, heads = (run.comparison.settings.get(key) for key in ("dim", "heads"))
            head = f" (d = {dim // heads})" if dim and heads else ""
            if rows:
                caption = f"measured crossover with exact softmax, {_where(run)}{head}"
                out.append(table(["mechanism", "training, T from", "forward, T from"], rows, caption=caption))
        return "".join(out) or _not_measured()

    def _share(self) -> str:
        settings, machine = self.share["settings"], self.share["machine"]
        dim = settings["dim"]
        rows = self.share["rows"]
        lengths = sorted({r["length"] for r in rows})
        points: dict[str, list[list[float]]] = {}
        for r in rows:
            points.setdefault(r["mechanism"], []).append([r["length"], r["share"]])
        series: list[Json] = [{"name": n, "family": charts.family(n), "points": p} for n, p in points.items()]
        counted = [[n, (4 * dim + 2 * n) / (12 * dim + 2 * n)] for n in lengths]
        series.append({"name": "softmax, counted", "family": "other", "points": counted})
        view = {
            "label": "Share of the mixer in a block's forward time",
            "x": {"label": "sequence length N", "short": "N =", "unit": "tokens", "log": True},
            "y": {"label": "share of the block", "short": "share", "unit": "share", "range": [0, 1]},
            "series": series,
        }
        cells = [
            [
                Cell(r["mechanism"]),
                number(r["length"]),
                number(r["mixer_ms"]),
                number(r["block_ms"]),
                number(100 * r["share"], unit="%"),
            ]
            for r in rows
        ]
        told = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in {**machine, **settings}.items())
        return (
            chart("share", {"views": [view], "chosen": [s["name"] for s in series]})
            + table(["mechanism", "N", "mixer, ms", "block, ms", "share"], cells, caption=f"measured on {told}")
            + '<p class="note">Measured and counted differ because multiplications are not all equally '
            "fast: flash attention, the feed-forward's large products and the norms each use the machine "
            "differently. The figures are in "
            '<a href="../share.json">share.json</a>.</p>'
        )

    def _measured(self) -> str:
        out = [
            '<h1>Measured</h1><p class="lead">Every mechanism beside exact softmax, and the papers\' own figures.</p>'
        ]
        for i, run in enumerate(self.runs):
            spec = charts.curves(run)
            if spec:
                out.append(f"<h2>{escape(_where(run))}</h2><p>{escape(_how(run))}</p>{chart(f'measured{i}', spec)}")
        out.append(f'<p class="note">{charts.PAIRED}</p>' if self.runs else _not_measured())
        out.append(f"<h2>Published, and ours beside it</h2>{beside(TABLES.values(), _by_device(self.figures))}")
        return "\n".join(out)


def _where(run: Run) -> str:
    """The device and the form, in words: what tells comparisons apart."""
    machine, settings = run.machine, run.comparison.settings
    device = str(machine.get("device") or "an unknown device")
    if device == "cpu":
        threads = machine.get("threads")
        device = f"CPU ({machine.get('cpu', 'unknown')}" + (f", {threads} threads)" if threads else ")")
    form = charts.FORMS[settings.get("causal")]
    return f"{device}, {form}"


def _by_device(runs: Sequence[Run]) -> list[Run]:
    """Comparisons under the name of their device, where that tells them apart; a file's name says less to a reader."""
    devices = [str(run.machine.get("device", "")).replace("cpu", "CPU") for run in compared(runs)]
    if len(set(devices)) < len(devices) or not all(devices):
        return list(runs)
    names = iter(devices)
    return [dataclasses.replace(run, name=next(names)) if run.kind == "compare" else run for run in runs]


def _how(run: Run) -> str:
    """What was measured, of which layer, and the file it is from."""
    settings = run.comparison.settings
    words = {"dim": "width", "heads": "heads", "batch": "batch", "dtype": "numbers of type"}
    layer = ", ".join(f"{word} {settings[key]}" for key, word in words.items() if key in settings)
    return (
        f"Time, memory and state of one layer over the length of the sequence ({layer}). From {run.path.name}, "
        f"{run.comparison.date[:10] or 'undated'}."
    )


def who_attends(name: str, pixels: Tensor) -> list[tuple[str, list[str]]]:
    """`pattern` on the pixels of a digit: (direction, one picture a head) for each direction the mechanism has."""
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
    shades, rows, columns = (
        torch.randn(n, DIM, generator=generator) for n in (digits.SHADES, digits.SIDE, digits.SIDE)
    )
    place = torch.arange(len(pixels))
    return (shades[pixels] + rows[place // digits.SIDE] + columns[place % digits.SIDE])[None]


def _png(weights: Tensor) -> str:
    """Roots of weights in [0, 1] as the opacity of one colour: small ones show, on a light and on a dark page."""
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
    fixed = ", max_length=100" if length else ""
    causal = ", causal=True" if traits.causal else ""
    lines = [
        "import torch, subquad",
        "",
        f'mix = subquad.build("{name}", dim=64, heads=4{causal}{fixed}).eval()',
        "x = torch.randn(2, 100, 64)                              # [batch, tokens, dim]",
        "y = mix(x, lengths=torch.tensor([100, 37]))              # row 1 is padded after 37 tokens",
        'print("forward", list(y.shape), "as defined:", torch.allclose(mix(x), mix.reference(x), atol=1e-4))',
    ]
    if traits.state:
        lines += [
            "y, state = mix.prefill(x[:, :50])                        # a prompt, in parallel",
            "y_t, state = mix.step(x[:, 50], state)                   # then token by token",
            'print("as an RNN", list(y_t.shape), "same numbers:", torch.allclose(y_t, mix(x)[:, 50], atol=1e-4))',
        ]
    # on the class traits say what some options allow, on an instance what these do
    if traits.cross and build(name, dim=64, heads=4, **length).traits.cross:
        lines += [
            f'cross = subquad.build("{name}", dim=64, heads=4{fixed}).eval()',
            "y = cross(x, context=torch.randn(2, 30, 64))             # attend to another sequence",
            'print("cross-attention", list(y.shape))',
        ]
    return "\n".join(lines)


def run_example(source: str) -> str:
    """The program and what it printed when the site was built."""
    printed = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(printed), torch.no_grad():
        exec(compile(source, "<example>", "exec"), {"__name__": "example"})
    return code(source.strip() + "\n", "run") + f'<pre class="out">{escape(printed.getvalue())}</pre>'


def _example(name: str) -> str:
    return run_example(example(name))


def _options(name: str) -> str:
    cls = MECHANISMS[name]
    meanings = option_meanings(cls)
    shared = {field.name for field in dataclasses.fields(Options)}
    rows = []
    for option in sorted(dataclasses.fields(cls.options_type), key=lambda option: option.name in shared):
        default = "required" if option.default is dataclasses.MISSING else repr(option.default)
        if option.name == "max_length" and cls.traits.fixed_length:
            default = "required"
        meaning = meanings[option.name]
        kind = option.type if isinstance(option.type, str) else getattr(option.type, "__name__", str(option.type))
        kind = kind if kind not in ("Literal", "Union", "UnionType") else str(option.type)
        kind = re.sub(r"typing\.|collections\.abc\.|torch\.(?=Tensor)", "", kind)
        whose = "all mechanisms" if option.name in shared else name
        rows.append([Cell(option.name), Cell(default), Cell(kind), Cell(meaning, css="long"), Cell(whose)])
    return table(["option", "default", "type", "meaning", "of"], rows)


def _overview() -> str:
    rows = []
    for name, cls in MECHANISMS.items():
        traits, facts = cls.traits, card(cls)
        link = Cell(f'<a href="mechanisms/{name}.html">{name}</a>', name, raw=True)
        yes = [Cell("yes" if flag else "-") for flag in (traits.causal, traits.bidirectional, traits.cross)]
        cost = Cell(facts.training_cost, css="long")
        rows.append([link, Cell(cls.family), cost, *yes, Cell(traits.state or "-"), Cell(facts.source)])
    return table(["name", "family", "training cost", "causal", "bidirectional", "cross", "state", "source"], rows)


def _states() -> str:
    rows = [
        [
            Cell(f'<a href="../mechanisms/{name}.html">{name}</a>', name, raw=True),
            Cell(cls.traits.state or "-"),
            Cell(_decode(card(cls).cost), css="long"),
        ]
        for name, cls in MECHANISMS.items()
    ]
    return table(["mechanism", "state", "decoding"], rows)


def _decode(cost: str) -> str:
    """The part of a Cost field that speaks of decoding."""
    flat = " ".join(cost.split())
    at = flat.find("decode")
    return flat[at:] if at >= 0 else "no decoding"


def _laws(cls: type[Mixer]) -> str:
    can = ["equals its dense definition in value and gradient", "padding is invisible"]
    if cls.traits.causal:
        can.append("strictly causal")
    if cls.traits.state:
        can.append("prefill and step equal forward")
    if cls.equivariant:
        can.append("permuting tokens permutes the output")
    return f'<p class="note">With all mechanisms, by the laws in tests/mechanisms/laws.py: {"; ".join(can)}.</p>'


def _members(family: str) -> str:
    names = [name for name, cls in MECHANISMS.items() if cls.family == family]
    return ", ".join(f'<a href="../mechanisms/{name}.html">{name}</a>' for name in names)


def _around(pages: Sequence[tuple[str, str]], index: int) -> str:
    before = f'<a href="{pages[index - 1][0]}">← {escape(pages[index - 1][1])}</a>' if index else "<span></span>"
    after = f'<a href="{pages[index + 1][0]}">{escape(pages[index + 1][1])} →</a>' if index + 1 < len(pages) else ""
    return f'<div class="prevnext">{before}{after}</div>'


def _legend() -> str:
    """The legend of shapes, from the contract's docstring."""
    doc = inspect.cleandoc(sys.modules[Mixer.__module__].__doc__ or "")
    found = re.search(r"^ +(B batch.*?)\n\n", doc, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _lead(slug: str) -> str:
    found = re.search(r'<p class="lead">(.*?)</p>', template(f"lessons/{slug}.html"), re.DOTALL)
    return found[1] if found else ""


def _prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _clauses(cost: str) -> str:
    """train ...; decode ...; state ...: one to a line."""
    return "".join(f"<li>{_prose(clause.strip())}</li>" for clause in " ".join(cost.split()).split("; "))


def _short(title: str) -> str:
    """The sentence after the name, as on the cards of the index."""
    _, _, rest = title.partition(": ")
    return rest[:1].upper() + rest[1:] if rest else title


def _anchor(family: str) -> str:
    return family.replace(" ", "-")


def _colour(family: str) -> str:
    return f"var(--f-{re.sub(r'[^a-z]+', '-', family)})"


def _linked(paper: str) -> str:
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', escape(paper))
    return re.sub(r"OpenReview:(\w+)", r'<a href="https://openreview.net/forum?id=\1">OpenReview:\1</a>', text)


def _not_measured() -> str:
    return (
        '<p class="note">Not measured yet on this machine: <code>subquad compare</code>, then '
        "<code>subquad atlas</code> again, puts the curves here.</p>"
    )
