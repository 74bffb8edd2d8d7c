"""The tables of README.md, results/README.md and guides/mechanisms.md, written from the files they describe.

    python benchmarks/tables.py      rewrites every table; a test fails if one of them is out of date

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from subquad.measure.traffic import Call, ring, traffic
from subquad.mechanisms import MECHANISMS, build
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.card import card
from subquad.report.lra import averages, published
from subquad.report.recall import cells, columns, recalled
from subquad.studies.results import ArenaTable, ReproducedTable, load

ROOT = Path(__file__).parents[1]
WAYS = ("sdpa", "pattern")
PAGES = ("README.md", "results/README.md", "guides/mechanisms.md", "guides/sequence_parallel.md")
LENGTHS = (1024, 4096, 16384, 65536)
ARENA = ("listops", "text", "image", "pathfinder")


def results(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def pair(forward: float, both: float) -> str:
    return f"{forward:.2f} / {both:.2f}"


def times(ratio: float) -> str:
    return f"{ratio:.0f} x" if ratio >= 10 else f"{ratio:.1f} x"


def milliseconds(job: str, ours: float, other: str, theirs: float) -> tuple[str, ...]:
    return job, f"{ours:.2f} ms", f"{other}: {theirs:.1f} ms", times(theirs / ours)


def beside_others() -> str:
    """Our times beside those of what people use today, one row per job."""
    linear, sparse, images = results("linear"), results("sparse"), results("generation")
    bars = {(bar["pattern"], bar["T"]): bar for bar in sparse["bars"]}
    causal, flash = linear["ms in a CUDA graph"]["causal K=V=64 T=16384"], linear["ms"]["flash softmax T=16384"]
    window, strided, bigbird = (
        bars[key] for key in (("local 512", 16384), ("strided l=128", 65536), ("bigbird 64 r=3", 16384))
    )
    per_second = images["mnist"]["best"]["sequences_per_second"]
    faster = images["mnist: linear over"]["softmax with a cache"]["each at its best batch"]
    cpu = max(results("linear_cpu")["rows"], key=lambda row: row["T"])
    ours, theirs = (cpu[library]["forward_backward"]["median_ms"] for library in ("subquad", "fast-transformers"))
    return table(
        ("job", "subquad", "what people use today", "faster"),
        [
            milliseconds("causal linear attention, T = 16k", causal[1], "flash softmax", flash[1]),
            milliseconds("window of 512 keys, T = 16k", window["both_ms"], "flash softmax", window["dense_both_ms"]),
            milliseconds("strided pattern, T = 64k", strided["both_ms"], "flash softmax", strided["dense_both_ms"]),
            milliseconds(
                "BigBird, T = 16k", bigbird["both_ms"], "FlexAttention", sparse["flex, bigbird 64 r=3"]["both_ms"]
            ),
            (
                "MNIST images generated a second",
                f"{per_second:,.0f}",
                f"softmax with a key-value cache: {per_second / faster:,.0f}",
                times(faster),
            ),
            (
                f"causal linear attention, T = {cpu['T'] // 1024}k, two CPU cores",
                f"{ours:.0f} ms",
                f"fast-transformers (C++): {theirs:.0f} ms",
                times(cpu["fast_transformers_over_subquad"]["median_of_rounds"]),
            ),
        ],
    )


def linear_attention() -> str:
    linear = results("linear")

    def cells(milliseconds: dict[str, list[float]], key: str) -> list[str]:
        measured = (milliseconds.get(f"{key} T={length}") for length in LENGTHS)
        return [pair(*both) if both else "-" for both in measured]

    captured = linear["ms in a CUDA graph"]
    return table(
        ("linear attention, ms", "T = 1k", "4k", "16k", "64k"),
        [
            ["causal, elu+1, normalised", *cells(captured, "causal K=V=64")],
            ["bidirectional", *cells(captured, "bidirectional K=V=64")],
            ["flash softmax, causal", *cells(linear["ms"], "flash softmax")],
        ],
    )


def sparse_attention() -> str:
    sparse = results("sparse")
    rows = [
        [
            f"{bar['pattern']}, {'causal' if bar['causal'] else 'bidirectional'}",
            f"{bar['T'] // 1024}k",
            pair(bar["forward_ms"], bar["both_ms"]),
            pair(bar["dense_forward_ms"], bar["dense_both_ms"]),
        ]
        for bar in sparse["bars"]
    ]
    flex = sparse["flex, bigbird 64 r=3"]
    rows.append(
        ["the same bigbird by FlexAttention", f"{flex['T'] // 1024}k", pair(flex["forward_ms"], flex["both_ms"]), ""]
    )
    return table(("exact softmax over a pattern, ms", "T", "ours", "dense flash"), rows)


def recurrent_step() -> str:
    rows = [
        (batch, f"{step['ms']:.3f}", f"{step['share of copy']:.0%}")
        for batch, step in results("linear")["step"].items()
    ]
    return table(("batch", "ms a step", "of the bandwidth of a copy"), rows)


def generation() -> str:
    measured = results("generation")
    rivals = ("softmax with a cache", "softmax that recomputes", "LSTM")
    rows = []
    for model, name in (("mnist", "MNIST"), ("cifar10", "CIFAR-10")):
        over = [measured[f"{model}: linear over"][rival]["each at its best batch"] for rival in rivals]
        best = measured[model]["best"]["sequences_per_second"]
        rows.append((name, f"{best:,.0f}", f"{measured[model]['paper']}", *(f"{ratio:.3g}" for ratio in over)))
    return table(("linear", "images a second", "the paper's", *(f"over {rival}" for rival in rivals)), rows)


def depth() -> str:
    rows = []
    for model, measured in results("generation")["depth"].items():
        early, late = (statistics.median(measured[f"milliseconds at {position}"]) for position in (100, 100000))
        rows.append((model, f"{early:.3f}", f"{late:.3f}", f"{measured['ratio of medians']:.2f}"))
    return table(("model", "ms at position 100", "ms at 100,000", "ratio"), rows)


def training() -> str:
    """What models learned in minutes, beside the papers' figures."""
    rows = []
    for name in ("copy", "mnist", "cifar10", "speech"):
        file = results(name)
        unit = "{:.1f} % phone error" if file["metric"] == "per" else "{:.3f} " + file["metric"]
        for label, run in file["results"].items():
            paper = run["published"].get(file["metric"])
            rows.append(
                (
                    run.get("data", name),
                    label,
                    unit.format(run["value"]),
                    "-" if paper is None else f"{paper:g}",
                    f"{run['steps']:,} of {run['steps_wanted']:,}",
                    f"{run['seconds'] / 60:.1f} minutes",
                )
            )
    card = json.loads((ROOT / "checkpoints" / "novels_linear" / "card.json").read_text(encoding="utf-8"))
    run = card["result"]
    value, steps = (
        f"{run['test'][run['metric']]:.3f} {run['metric']}",
        f"{run['steps']:,} of {card['training']['steps']:,}",
    )
    rows.append(("novels", card["name"], value, "-", steps, f"{run['seconds'] / 60:.1f} minutes"))
    return table(("data", "model", "on test data", "the paper's", "steps made", "trained for"), rows)


def rules() -> str:
    """Gated and delta rules beside flash-linear-attention, forward / forward + backward."""
    file = results("rules")
    names = {
        "gated": "gated, a number per head",
        "gla": "gated, a number per channel",
        "delta": "delta",
        "gated_delta": "gated delta",
    }

    def cell(times: Mapping[str, float]) -> str:
        both = f"{times['forward_backward']:.2f}" if "forward_backward" in times else "refused"
        return f"{times['forward']:.2f} / {both}"

    rows = [
        (
            f"{name}{'' if who == 'ours' else ', flash-linear-attention'}",
            *(cell(file["speed"][str(t)][rule][who]) for t in LENGTHS),
        )
        for rule, name in names.items()
        for who in ("ours", "fla")
    ]
    return table(("rule, ms", "T = 1k", "4k", "16k", "64k"), rows)


def rules_cpu() -> str:
    """How many times as long the loop over tokens takes as the chunks, on two CPU cores."""
    gates = {"channel": ", a gate per channel", "head": ", a gate per head", "none": ""}
    rows = [
        (
            row["rule"].replace("_", " ") + gates[row["gate"]],
            *(times(row[which]["loop_over_chunks"]["median_of_rounds"]) for which in ("forward", "forward_backward")),
        )
        for row in results("rules_cpu")["rows"]
    ]
    return table(("rule", "forward, T = 4k", "forward + backward, T = 1k"), rows)


def recall() -> str:
    """Right answers in key-value recall, by what a layer keeps and by the number of pairs."""
    rows = recalled(load(ROOT / "results" / "recall.json", ReproducedTable))
    return table(columns(rows), [[cell.shown for cell in row] for row in cells(rows)])


def cpu() -> str:
    peers = [row["fast_transformers_over_subquad"]["median_of_rounds"] for row in results("linear_cpu")["rows"]]
    dense = [row["dense_over_sparse"] for row in results("sparse_cpu")["rows"]]
    image, scaling = results("generation_cpu"), results("scaling_cpu")
    growth = {row["mechanism"]: row["time"] for row in scaling["growth"]}
    layers = {
        row["label"]: row["training_ms"]["median"] / 1000
        for row in scaling["rows"]
        if row["length"] == 32768 and row["training_ms"]
    }
    rows = [
        (
            "causal linear attention beside fast-transformers' C++ kernel",
            f"{min(peers):.1f} to {max(peers):.1f} times as fast",
        ),
        (
            "sparse patterns beside dense attention, T = 4k to 16k",
            f"{min(dense):.1f} to {max(dense):.1f} times as fast",
        ),
    ]
    for how in ("eager", "compiled"):
        rows.append(
            (f"one MNIST image beside softmax with a cache, {how}", f"{image[how]['ratio_median']:.2f} of its time")
        )
    for name in ("linear", "softmax"):
        job = f"one layer forward and back, a sample of 32,768 tokens, {name}"
        rows.append((job, f"{layers[name]:.2f} s; grows as N^{growth[name]:.2f}"))
    return table(("two CPU cores, float32", "measured"), rows)


def smollm2_cpu() -> str:
    """A pattern in the place of SmolLM2's full attention."""
    figures = results("smollm2_cpu")
    read = figures["perplexity"]
    rows = [
        (
            what.replace("pattern", read["over"].replace("|", "\\|"), 1),
            f"{read[what]['perplexity']:.3f}",
            f"{read[what]['forward_s']:.1f} s",
            *at,
        )
        for what, at in zip(
            ("full, sdpa", "pattern, eager with its dense mask", "pattern"),
            (
                [f"{row['sdpa_tokens_s']:.1f}" for row in figures["decode"]],
                ["" for _ in figures["decode"]],
                [f"{row['pattern_tokens_s']:.1f}" for row in figures["decode"]],
            ),
            strict=True,
        )
    ]
    after = [f"tokens a second after {row['prompt']:,}" for row in figures["decode"]]
    return table(("attention", "perplexity", f"forward, T = {read['tokens']:,}", *after), rows)


def smollm2() -> str:
    """The forward pass of a model of that size at long lengths, on a GPU."""
    figures = results("smollm2")["speed"]
    rows = []
    for row in sorted(figures, key=lambda row: row["length"]):
        memory = [
            f"{row[f'{what}_peak_bytes'] / 1e9:.2f} GB" if row["mode"] != "faster of both" else "" for what in WAYS
        ]
        times = (f"{row[f'{what}_ms']:.1f} ms" for what in WAYS)
        rows.append((f"{row['length']:,}", row["mode"], *times, f"{row['sdpa_over_pattern']:.2f}", *memory))
    pattern = figures[0]["pattern"].replace("|", "\\|")
    return table(("T", "mode", "sdpa", pattern, "sdpa over pattern", "memory of sdpa", "of the pattern"), rows)


def long_sequence() -> str:
    """A million tokens on one process, and over two."""
    figures = results("sequence")
    alone, ranks = figures["alone"], figures["ranks"]
    some = {
        "one sequence, `checkpoint=5`": alone["one sequence"],
        "64 sequences, `checkpoint=5`": alone["64 sequences"],
        "one sequence, `checkpoint=True`": alone["one sequence, the inputs of all blocks kept"],
    }
    rows = [
        (what, f"{row['peak_bytes'] / 1e9:.1f} GB", f"{row['tokens_per_second']['median']:,.0f}")
        for what, row in some.items()
    ]
    rate = ranks["tokens"] / ranks["seconds"]
    rows.append(
        (
            "one sequence over two processes on one GPU",
            f"{ranks['peak_bytes of a process'] / 1e9:.1f} GB each",
            f"{rate:,.0f}",
        )
    )
    return table((f"{alone['tokens']:,} tokens, forward and backward", "memory", "tokens a second"), rows)


def serving() -> str:
    """`subquad serve` under load, on two CPU cores and, where it was measured, on a GPU."""
    names = {"two CPU cores": "serve_http_cpu", "H200": "serve_http"}
    found = {where: results(name) for where, name in names.items() if (ROOT / "results" / f"{name}.json").is_file()}
    rows: dict[str, list[str]] = {}
    for figures in found.values():
        soak, first = figures["soak"], figures["first_tokens"]
        alone = statistics.median(one["streams"]["tokens_per_second"] for one in figures["beside"]["rounds"])
        model = figures["sizes"]["model"]
        for what, value in (
            ("model", f"{figures['parameters'] / 1e6:.1f}M weights, {model['depth']} layers of {model['dim']}"),
            ("streams at once, for", f"{figures['sizes']['streams']:,}, {round(soak['minutes'], 1):g} minutes"),
            ("errors", f"{soak['errors']} in {soak['answers']:,} answers"),
            (
                "tokens a second, in events a second",
                f"{soak['tokens_per_second']:,.0f}, {soak['events_per_second']:,.0f}",
            ),
            ("tokens a second of `Streams` alone", f"{alone:,.0f}"),
            ("CPU time of a token over `Streams` alone", f"{figures['beside']['cpu_ratio']:.2f}"),
            ("memory of the process, its growth a minute", _memory(soak)),
            ("first token of a prompt, cold and cached", _first(first)),
            (f"{figures['connections']['connections']:,} connections at once", _connections(figures["connections"])),
        ):
            rows.setdefault(what, []).append(value)
    return table(("`subquad serve`", *found), ([what, *values] for what, values in rows.items()))


def _memory(soak: Mapping[str, Any]) -> str:
    return f"{soak['most'] / 1e6:,.0f} MB, {soak['growth_bytes_per_minute'] / 1e6:.1f} MB"


def _first(first: Mapping[str, Any]) -> str:
    return f"{first['prefix']:,} tokens: {1e3 * first['cold_seconds']:,.0f} and {1e3 * first['cached_seconds']:.0f} ms"


def _connections(many: Mapping[str, Any]) -> str:
    return f"{many['answers']:,} answers in {many['seconds']:.1f} s"


def long_text() -> str:
    text = results("train")["text"]
    rows = [
        [name, f"{row['iteration_ms']['median']:.1f}", f"{row['ratio']['median']:.2f}"]
        for name, row in text["captured"].items()
    ]
    return table(
        (f"30 layers of width 512, context {text['length']:,}", "ms a training step", "over dense flash"), rows
    )


def whole_classifier() -> str:
    found = results("whole_models")["classifier"]
    rows = [
        [key, f"{row['steps_per_second']:.0f}"]
        for key, row in found.items()
        if isinstance(row, dict) and "steps_per_second" in row
    ]
    return table(("classifier", "training steps a second"), rows)


def arena() -> str:
    """Accuracy on the Long Range Arena: ours, and the paper's in brackets."""
    file = load(ROOT / "results" / "lra" / "small.json", ArenaTable)
    rows = []
    for mechanism, (ours, paper) in averages(file, ARENA).items():
        columns = [f"{averages(file, (c,))[mechanism][0]:.1f} ({published(mechanism, c):.1f})" for c in ARENA]
        rows.append([mechanism, *columns, f"{ours:.1f} ({paper:.1f})"])
    return table(("accuracy, %", "ListOps", "Text", "Image", "Pathfinder", "average"), rows)


def arena_budgets() -> str:
    runs = results("lra/small")["runs"]
    rows = []
    for column in ARENA:
        steps = [run["steps"] for run in runs if run["column"] == column]
        training = next(run["settings"]["training"] for run in runs if run["column"] == column)
        wanted, seconds = f"{training['steps']:,} of {training['batch']}", f"{60 * training['minutes']:.0f} s"
        rows.append((column, wanted, seconds, f"{min(steps):,} to {max(steps):,}"))
    return table(("task", "steps of batch", "at most", "steps made"), rows)


def arena_cost() -> str:
    rows = {(row["mechanism"], row["length"]): row for row in results("lra/efficiency_h200")["rows"]}
    linear = rows["linear", 4096]
    lines = []
    for other in ("softmax, naive", "softmax"):
        speed, memory = (linear[key] / rows[other, 4096][key] for key in ("steps_per_second", "peak_bytes"))
        name = "softmax that keeps the T x T matrix" if other != "softmax" else "flash softmax"
        lines.append([name, f"{speed:.2f}", f"{memory:.2f}"])
    return table(("linear at 4,096 bytes, over", "steps a second", "peak memory"), lines)


def mechanisms() -> str:
    rows = []
    for name, cls in MECHANISMS.items():
        traits, facts = cls.traits, card(cls)
        source = facts.source
        if re.fullmatch(r"\d{4}\.\d{4,5}", source):
            source = f"[{source}](https://arxiv.org/abs/{source})"
        elif f"OpenReview:{source}" in facts.paper:
            source = f"[{source}](https://openreview.net/forum?id={source})"
        can = ["yes" if trait else "-" for trait in (traits.causal, traits.bidirectional, traits.cross)]
        rows.append([f"`{name}`", cls.family, facts.training_cost, *can, traits.state or "-", source])
    return table(("name", "family", "training cost", "causal", "bidirectional", "cross", "state", "source"), rows)


def sequence_traffic() -> str:
    """What a rank sends for one layer, forward and backward, by the formulas that the tests check."""
    width, heads, million = 1024, 16, 1 << 20
    calls = [Call(1, length, ranks) for length in (million, 16 * million) for ranks in (8, 64, 512)]
    causal = {"dim": width, "heads": heads, "causal": True}
    with torch.device("meta"):
        layers: dict[str, Mixer] = {
            "linear, any feature map of width 64": build("linear", **causal),
            "retnet": build("retnet", **causal),
            "gla": build("gla", **causal),
            "mamba2": build("mamba2", **causal),
            "deltanet": build("deltanet", **causal),
            "gated_deltanet": build("gated_deltanet", **causal),
            "local, window 512": build("local", window=512, **causal),
            "transformer_xl, memory 512": build("transformer_xl", memory=512, **causal),
            "linformer, rank 256, bidirectional": build(
                "linformer", dim=width, heads=heads, rank=256, max_length=calls[-1].length
            ),
            "strided, fixed": build("strided", **causal),
            "softmax": build("softmax", **causal),
        }
    rows = []
    for name, mix in layers.items():
        most = heads if name.startswith("strided") else calls[-1].ranks  # its heads are shared out
        rows.append([name, *(size(traffic(mix, c) / c.ranks) if c.ranks <= most else "-" for c in calls)])
    rows.append(["ring attention", *(size(ring(layers["softmax"], call) / call.ranks) for call in calls)])
    return table(("a layer", *(f"{c.length // million}M tokens, {c.ranks} ranks" for c in calls)), rows)


def size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


TABLES: dict[str, Callable[[], str]] = {
    "sequence_traffic": sequence_traffic,
    "beside_others": beside_others,
    "linear_attention": linear_attention,
    "sparse_attention": sparse_attention,
    "recurrent_step": recurrent_step,
    "generation": generation,
    "depth": depth,
    "training": training,
    "recall": recall,
    "rules": rules,
    "rules_cpu": rules_cpu,
    "cpu": cpu,
    "smollm2_cpu": smollm2_cpu,
    "smollm2": smollm2,
    "long_sequence": long_sequence,
    "serving": serving,
    "long_text": long_text,
    "whole_classifier": whole_classifier,
    "arena": arena,
    "arena_budgets": arena_budgets,
    "arena_cost": arena_cost,
    "mechanisms": mechanisms,
}


def renewed(page: str) -> str:
    """The page with every table rewritten."""
    return re.sub(
        r"(<!-- table (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        (ROOT / page).write_text(renewed(text), encoding="utf-8")
