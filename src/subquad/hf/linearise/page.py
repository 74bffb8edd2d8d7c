"""The report of a student: a JSON file, a page that is also its model card, and tables for the terminal."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from subquad.disk import read_object, write_whole
from subquad.hf.linearise.models import Teacher
from subquad.machine import readable

LEAST = 1.1  # times the perplexity with the linear parts switched off, or the student is no conversion
CARD = "README.md"
Cells = tuple[Sequence[str], list[list[str]]]


def read(path: Path) -> dict[str, Any]:
    report = read_object(path)
    if report.get("kind") != "linearise" or not isinstance(report.get("settings"), dict):
        raise ValueError(f"{path} is not what subquad linearise writes")
    return report


def report(learned: dict[str, Any], facts: dict[str, Any], teacher: Teacher) -> dict[str, Any]:
    """What was done to each layer, and why."""
    cost = {row["layer"]: row for row in facts["sweep"]["layers"]}
    kept, count = set(facts["kept"]), len(cost)
    layers = []
    for n in teacher.layers:
        row: dict[str, Any] = {"layer": n, "softmax": n in kept}
        if n in cost:
            own = cost[n]
            verb = "keeps softmax" if n in kept else "is replaced"
            row["why"] = f"{verb}: replacing it alone costs {own['kl']:.4f} nats a token, rank {own['rank']} of {count}"
            row |= {"kl": own["kl"], "perplexity_replaced_alone": own["perplexity"], "rank": own["rank"]}
            row["first_error"] = facts.get("first_error", {}).get(str(n))
            row["aligned_error"] = facts.get("aligned_error", {}).get(str(n))
        else:
            row["why"] = "keeps softmax: it is not among the layers that may be replaced"
        layers.append(row)
    found = {"kind": "linearise", **learned, "layers": layers}
    return {**found, "choosing": {"teacher_perplexity": facts["sweep"]["teacher_perplexity"]}}


def verdict(report: dict[str, Any]) -> dict[str, Any]:
    """Whether the student uses its linear parts."""
    values = report["perplexity"]
    ratios: dict[str, Any] = {"student_over_teacher": values["student"] / values["teacher"]}
    if "linear part off" not in values:
        return {**ratios, "converted": None, "verdict": "a window-only model: there is no linear part"}
    off = values["linear part off"] / values["student"]
    done = off >= LEAST
    how = f"with its linear parts switched off the student's perplexity is {off:.3g} times as high"
    bar = f"at least {LEAST:.1f} times is expected"
    said = f"{how}: it uses them" if done else f"NOT A CONVERSION: {how}, {bar}; the student does without them"
    return {**ratios, "linear_off_over_student": off, "converted": done, "verdict": said}


def tables(report: dict[str, Any]) -> Iterator[tuple[str, Cells]]:
    """Title, columns and rows of each table of figures."""
    values = report["perplexity"]
    window = f"window of {values['window']} only, untrained"
    names = {"window only, untrained": window, "linear part off": "student, linear parts switched off"}
    rows = [
        [names.get(name, name), f"{value:.3f}", f"{value / values['teacher']:.3f}"]
        for name, value in values.items()
        if name not in ("rows", "length", "window")
    ]
    yield "Perplexity on held-out text", (("model", "perplexity", "over teacher"), rows)
    rows = []
    for row in report["decoding"]:
        for name in ("teacher", "student"):
            own = row[name]
            if "failed" in own:
                rows.append([f"{row['length']:,}", name, own["failed"], "", "", ""])
                continue
            graph = f"{own['graph_tokens_per_second']:.1f}" if "graph_tokens_per_second" in own else "-"
            sizes = [readable(own[key]) for key in ("linear_state_bytes", "softmax_state_bytes")]
            rows.append([f"{row['length']:,}", name, f"{own['tokens_per_second']:.1f}", graph, *sizes])
    columns = ("length", "model", "tokens/s", "in a CUDA graph", "linear layers' state", "softmax layers' cache")
    yield f"Decoding, batch {report['decoding'][0]['batch'] if report['decoding'] else 1}", (columns, rows)
    rows = [
        [str(row["layer"]), "softmax" if row["softmax"] else "linear", row["why"], _number(row.get("aligned_error"))]
        for row in report["layers"]
    ]
    yield "Layers", (("layer", "now", "why", "error after alignment"), rows)


def terminal(report: dict[str, Any]) -> Iterator[Table]:
    for title, (columns, rows) in tables(report):
        table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*row)
        yield table


def write(report: dict[str, Any], folder: Path) -> None:
    """The page README.md."""
    settings, tokens = report["settings"], report["tokens"]
    count = sum(not row["softmax"] for row in report["layers"])
    lines = [
        "---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- subquad",
        "- linear-attention", "---", "", f"# {folder.resolve().name}", "",
        f"{report['model']} with {count} of {len(report['layers'])} attention layers replaced by `{settings['rule']}`"
        f"{_beside(settings)}, by `subquad linearise`. Trained on {tokens['train']:,} tokens of text: "
        f"{settings['align_steps']:,} steps of alignment, {settings['distil_steps']:,} of distillation.", "",
        report["verdict"][0].upper() + report["verdict"][1:] + ".", "",
        "```python", "import subquad.hf  # pip install 'subquad[hf]'; no remote code",
        "from transformers import AutoModelForCausalLM", "",
        f'model = AutoModelForCausalLM.from_pretrained("{folder.resolve().name}")', "```", "",
    ]  # fmt: skip
    for title, (columns, rows) in tables(report):
        cells = [columns, ["---"] * len(columns), *rows]
        lines += [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in cells), ""]
    if report["answers"]:
        lines += ["## Answers", ""]
    for one in report["answers"]:
        for name in ("prompt", "teacher", "student"):
            lines += [f"**{name}**", "", *(f"    {line}" for line in one[name].splitlines() or [""]), ""]
    lines += [f"All figures are in linearise.json. Measured on {report['machine']['device']}, {report['date']}.", ""]
    write_whole(folder / CARD, "\n".join(lines).encode())


def _beside(settings: dict[str, Any]) -> str:
    window = settings["window"]
    return f" of {window} tokens" if settings["rule"] == "window" else f" beside a window of {window}" if window else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
