"""What the README says is what the code does."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.card import card
from subquad.report.lra import averages, published
from subquad.studies.results import ArenaTable, load

README = Path(__file__).parents[1] / "README.md"


def table() -> str:
    lines = [
        "| name | family | training cost | causal | bidirectional | cross | state | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, cls in MECHANISMS.items():
        traits, facts = cls.traits, card(cls)
        marks = " | ".join("yes" if can else "-" for can in (traits.causal, traits.bidirectional, traits.cross))
        source = facts.source
        if re.fullmatch(r"\d{4}\.\d{4,5}", source):
            source = f"[{source}](https://arxiv.org/abs/{source})"
        elif f"OpenReview:{source}" in facts.paper:
            source = f"[{source}](https://openreview.net/forum?id={source})"
        lines.append(
            f"| `{name}` | {cls.family} | {facts.training_cost} | {marks} | {traits.state or '-'} | {source} |"
        )
    return "\n".join(lines)


def results(name: str) -> Any:
    return json.loads((README.parent / "results" / f"{name}.json").read_text())


def figures() -> str:
    """The measured tables, written from results/."""
    linear, sparse = results("linear"), results("sparse")
    lengths = (1024, 4096, 16384, 65536)

    def row(label: str, cells: dict[str, list[float]], key: str) -> str:
        found = (cells.get(f"{key} T={t}") for t in lengths)
        return f"| {label} | " + " | ".join(f"{c[0]:.2f} / {c[1]:.2f}" if c else "-" for c in found) + " |"

    lines = [
        "| linear attention, ms | T = 1k | 4k | 16k | 64k |",
        "|---|---|---|---|---|",
        row("causal, elu+1, normalised", linear["ms in a CUDA graph"], "causal K=V=64"),
        row("bidirectional", linear["ms in a CUDA graph"], "bidirectional K=V=64"),
        row("flash softmax, causal", linear["ms"], "flash softmax"),
        "",
        "| exact softmax over a pattern, ms | T | ours | dense flash |",
        "|---|---|---|---|",
    ]
    for bar in sparse["bars"]:
        ours, dense = (f"{bar[f'{p}forward_ms']:.2f} / {bar[f'{p}both_ms']:.2f}" for p in ("", "dense_"))
        kind = "causal" if bar["causal"] else "bidirectional"
        lines.append(f"| {bar['pattern']}, {kind} | {bar['T'] // 1024}k | {ours} | {dense} |")
    return "\n".join(lines)


def arena() -> str:
    """The Long Range Arena: ours, and the paper's in brackets."""
    found = load(README.parent / "results" / "lra" / "small.json", ArenaTable)
    columns = ("listops", "text", "image", "pathfinder")
    lines = ["| | ListOps | Text | Image | Pathfinder | average |", "|---|---|---|---|---|---|"]
    for mechanism, (ours, paper) in averages(found, columns).items():
        row = [f"{averages(found, (c,))[mechanism][0]:.1f} ({published(mechanism, c):.1f})" for c in columns]
        lines.append(f"| {mechanism} | " + " | ".join([*row, f"{ours:.1f} ({paper:.1f})"]) + " |")
    return "\n".join(lines)


def sentences() -> list[str]:
    step = results("linear")["step"]["4096"]["share of copy"]
    best = max(row["sequences_per_second"] for row in results("generation")["mnist"]["table"].values())
    cpu = results("generation_cpu")
    peers = [row["fast_transformers_over_subquad"]["median_of_rounds"] for row in results("linear_cpu")["rows"]]
    dense = [row["dense_over_sparse"] for row in results("sparse_cpu")["rows"]]
    rivals = {model: results("generation")[f"{model}: linear over"] for model in ("mnist", "cifar10")}
    cached, recomputed, lstm = (
        [rivals[model][rival]["each at its best batch"] for model in rivals]
        for rival in ("softmax with a cache", "softmax that recomputes", "LSTM")
    )
    flex = results("sparse")["flex, bigbird 64 r=3"]
    long_text = results("train")["text"]["captured"]
    mnist, paper = (results("mnist")["results"][name] for name in ("linear-taps", "linear"))
    cifar10, speech = results("cifar10")["results"]["linear-taps"], results("speech")["results"]
    heard = ", ".join(f"{speech[name]['value']:.1f} % ({name})" for name in ("bi-lstm", "softmax", "linear"))
    longest = max(row["seconds"] for row in speech.values()) / 60
    arena = {(r["column"], r["mechanism"]): r["steps"] for r in results("lra/small")["runs"]}
    (cap,) = {
        60 * r["settings"]["training"]["minutes"] for r in results("lra/small")["runs"] if r["column"] == "pathfinder"
    }
    budgets = {
        r["column"]: (r["settings"]["training"]["steps"], r["settings"]["training"]["batch"])
        for r in results("lra/small")["runs"]
    }
    wandering = [steps for (column, _), steps in arena.items() if column == "pathfinder"]
    steps = {(r["mechanism"], r["length"]): r for r in results("lra/efficiency_h200")["rows"]}
    naive, flash = (
        [steps["linear", 4096][key] / steps[other, 4096][key] for key in ("steps_per_second", "peak_bytes")]
        for other in ("softmax, naive", "softmax")
    )
    fixed, strided, linear = (long_text[name]["ratio"]["median"] for name in ("fixed", "strided", "linear"))
    layer = {(r["label"], r["length"]): r["training_ms"]["median"] / 1000
             for r in results("scaling_cpu")["rows"] if r["training_ms"]}  # fmt: skip
    fast, exact = (layer[name, 32768] for name in ("linear", "softmax"))
    grown = {g["mechanism"]: g["time"] for g in results("scaling_cpu")["growth"]}
    return [
        f"in {fast:.2f} s with linear and {exact:.2f} s with softmax; time grows as N^{grown['linear']:.2f} and "
        f"N^{grown['softmax']:.2f}",
        f"moves its state at {step:.0%} of copy bandwidth",
        f"{best:,.0f} MNIST images/s",
        f"{results('generation')['cifar10']['best']['sequences_per_second']:,.0f} CIFAR-10 images/s",
        f"{cached[0]:.1f} and {cached[1]:.1f} times as many as softmax with a key-value cache",
        f"{recomputed[0]:,.0f} and {recomputed[1]:,.0f} times as many as softmax that recomputes",
        f"{1 / lstm[0]:.1f} and {1 / lstm[1]:.1f} times as many as linear",
        f"FlexAttention takes {flex['forward_ms']:.1f} / {flex['both_ms']:.1f} ms for the same bigbird",
        f"{mnist['value']:.3f} bits/dim on the test images after {mnist['seconds'] / 60:.1f} minutes",
        f"built as in the paper it is at {paper['value']:.3f} after {paper['seconds'] / 60:.1f} minutes",
        f"{cifar10['value']:.3f} bits/dim on the test images after {cifar10['seconds'] / 60:.1f} minutes in two legs",
        f"{heard} and {speech['reformer-4']['value']:.1f} % (reformer-4) after {longest:.1f} minutes at most",
        f"reformer-4 made {speech['bi-lstm']['steps']:,} and {speech['reformer-4']['steps']:,} of "
        f"{speech['bi-lstm']['steps_wanted']:,} steps",
        f"{naive[0]:.1f} times as fast as with softmax that keeps the T x T matrix, in {naive[1]:.2f} of its memory",
        f"{flash[0]:.2f} times as fast as with flash softmax, in {flash[1]:.2f} of its memory",
        f"reformer and sinkhorn made {arena['image', 'reformer']:,} and {arena['image', 'sinkhorn']:,}",
        "{:,} steps of {} for ListOps, ".format(*budgets["listops"])
        + "{:,} of {} for Text (1,000 bytes), ".format(*budgets["text"])
        + "{:,} of {} for Image".format(*budgets["image"]),
        "{:,} of {} for Pathfinder".format(*budgets["pathfinder"]),
        f"text at context {results('train')['text']['length']:,}",
        f"{cap:.0f} s at most: {min(wandering):,} to {max(wandering):,}",
        f"{fixed:.2f} (fixed), {strided:.2f} (strided) and {linear:.2f} (linear) of the time of dense flash attention",
        f"{cpu['eager']['ratio_median']:.2f} (eager) and {cpu['compiled']['ratio_median']:.2f} (compiled)",
        f"{min(peers):.1f} to {max(peers):.1f} times as fast as fast-transformers",
        f"{min(dense):.1f} to {max(dense):.1f} times as fast as dense attention",
    ]


def test_the_figures_are_those_of_the_results() -> None:
    text = README.read_text()
    for table in (figures(), arena()):
        assert table in text, f"put this into README.md:\n{table}"
    for sentence in sentences():
        assert sentence in text.replace("\n", " "), sentence


def test_every_result_says_how_to_take_it_again() -> None:
    folder = README.parent / "results"
    said = set(re.findall(r"`([\w/]+\.(?:json|png))`", (folder / "README.md").read_text()))
    assert said == {p.relative_to(folder).as_posix() for p in folder.rglob("*.*") if p.name != "README.md"}


def test_the_pictures_are_drawn_from_the_results() -> None:
    for name in ("scaling", "generated", "lra/small", "train"):
        path = README.parent / "results" / f"{name}.png"
        assert name == "train" or f"](results/{name}.png)" in README.read_text()
        said = Image.open(path).info
        drawn_from = (README.parent / said["Source"]).read_bytes()
        assert hashlib.sha256(drawn_from).hexdigest() == said["SHA-256"], (
            f"run benchmarks/pictures.py: {name}.png is old"
        )


def test_the_generated_images_are_those_of_the_results() -> None:
    found = results("generated")
    rows, columns, _ = found["shape"]
    sheet = np.asarray(Image.open(README.parent / "results" / "generated.png").convert("L"), dtype=np.float64)
    times, frame = 2, 1  # a pixel is a square, and a line stands below and beside each image
    first = sheet[: times * rows, : times * columns][::times, ::times]
    image = np.asarray(found["images"][0], dtype=np.float64).reshape(rows, columns)
    assert np.abs(first - image / (found["shades"] - 1) * 255).max() <= 1
    assert sheet.shape == (4 * (times * rows + frame), 16 * (times * columns + frame))


def test_the_table_of_mechanisms_is_current() -> None:
    assert table() in README.read_text(), f"put this into README.md:\n{table()}"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


def test_every_place_named_exists() -> None:
    root = README.parent
    for path in re.findall(
        r"^(src/\S+|benchmarks/|results/|checkpoints/|guides/|tests/)", README.read_text(), re.MULTILINE
    ):
        assert (root / path).is_dir() if path.endswith("/") else (root / path).is_file(), path
