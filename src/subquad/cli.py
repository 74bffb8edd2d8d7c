"""The command line: parses, calls, prints."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from subquad.checks import refuse
from subquad.commands import LARGEST, app, bench, console, declare, failure, options_of, say
from subquad.disk import check_file, check_folder
from subquad.models.sampling import Sampling
from subquad.report.visible import Terminal
from subquad.serve.settings import ServeSettings
from subquad.studies.settings import GenerationSettings, Settings, parse_length, parse_lengths, parse_mechanisms

__all__ = ["app", "main"]
PICTURES = (".png", ".jpg", ".jpeg", ".svg", ".pdf")

AnyDevice = Annotated[str, Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Commit = Annotated[str | None, Option(help="Commit of this source, if git does not know it.")]


def _version(wanted: bool) -> None:
    if wanted:
        import torch

        import subquad

        console.print(f"subquad {subquad.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@declare("list")
def list_mechanisms() -> None:
    """List every mechanism: family, cost, traits, source."""
    from subquad.report.terminal import mechanisms_table

    console.print(mechanisms_table(console.width))


@declare()
def show(
    name: str,
    picture: Annotated[Path | None, Option(help="Draw who attends to whom into this PNG.")] = None,
    error: Annotated[bool, Option("--error", help="Measure the distance to exact softmax attention.")] = False,
) -> None:
    """Show one mechanism: equation, cost, options with defaults, source, how it was verified."""
    from subquad.report.terminal import mechanism_card, options_table

    if picture is not None:
        check_file("picture", picture, PICTURES)
    for text in mechanism_card(name, console.width):
        console.print(text, soft_wrap=True)
    console.print(options_table(name))
    if picture is not None:
        from subquad.mechanisms.picture import draw

        draw(name, picture)
        say(f"drawn: {picture}")
    if error:
        from subquad.mechanisms.error import error_table

        console.print(error_table(name))


@declare()
@options_of(Settings, "settings")
def compare(
    mechanisms: Annotated[str, Option(help="Names with commas between them, or all.")] = "all",
    lengths: Annotated[str, Option(help="Lengths with commas between them.")] = "512,1024,2048,4096,8192,16384",
    causal: Annotated[
        bool | None,
        Option(
            "--causal/--bidirectional", help="One form for all; by default causal where possible.", show_default=False
        ),
    ] = None,
    data: Annotated[Path | None, Option(help="Also measure quality on your tokens: a .npy array or any file.")] = None,
    memory: Annotated[float | None, Option(help="GB that may be used; by default most of what is free.")] = None,
    out: Annotated[Path, Option(help="Folder for results.json.")] = Path("runs/compare"),
    save: Annotated[Path | None, Option(help="Write the figures to this file as well.")] = None,
    *,
    settings: Settings,
) -> None:
    """Measure every mechanism against exact softmax: time, memory, decoding, state, growth and quality."""
    from subquad.studies.compare import compare as run
    from subquad.studies.compare import tables, whole
    from subquad.studies.results import save as write

    check_folder("out", out)
    if save is not None:
        check_file("save", save, (".json",))
    if memory is not None and not 0 < memory < LARGEST / 1e9:
        refuse("memory", memory, "a positive number of GB")
    settings = dataclasses.replace(
        settings, mechanisms=parse_mechanisms(mechanisms), lengths=parse_lengths(lengths), causal=causal,
        data=None if data is None else str(data), memory=None if memory is None else int(memory * 1e9),
    )  # fmt: skip
    results = run(settings, out, console)
    for table in tables(results, console.width):
        console.print(table)
    if results.interrupted:
        console.print("interrupted: what was measured is kept")
    if save is not None:
        write(results, save)
    how = "" if whole(results) else f" --from {out}"
    say(f"figures: {out / 'results.json'}; `subquad recommend{how}` uses them")
    if results.interrupted:
        raise typer.Exit(130)


@declare()
def recommend(
    length: Annotated[str, Option(metavar="<int>", help="Tokens in your sequences: 16000, 16k or 1m.")],
    causal: Annotated[bool, Option("--causal/--bidirectional", help="Causal: tokens see earlier ones only.")] = False,
    decode: Annotated[bool, Option("--decode", help="You will generate token by token.")] = False,
    cross: Annotated[bool, Option("--cross", help="You need attention to another sequence.")] = False,
    device: Annotated[str | None, Option(help="cpu or cuda; by default the one in --from, else cpu.")] = None,
    source: Annotated[Path | None, Option("--from", help="A results.json, or the folder of a comparison.")] = None,
) -> None:
    """Recommend the three best mechanisms for your length and device, from measured figures, with reasons."""
    from subquad.report.terminal import advice_lines
    from subquad.studies.recommend import Request
    from subquad.studies.recommend import recommend as choose

    request = Request(length=parse_length(length), causal=causal, decode=decode, cross=cross, device=device)
    for line in advice_lines(choose(request, source), console.width):
        console.print(line, soft_wrap=True, highlight=False)


@declare()
def demo(
    out: Annotated[Path, Option(help="Folder for figures, pictures and the report.")] = Path("runs/demo"),
    steps: Annotated[int | None, Option(help="Training steps of each mechanism; by default 150.")] = None,
    fresh: Annotated[bool, Option("--fresh", help="Start over: reuse no earlier stage.")] = False,
) -> None:
    """Train six mechanisms on handwritten digits, let them write new ones as RNNs, and time them to 16k tokens."""
    from subquad.report.drawing import Drawing
    from subquad.report.report import write
    from subquad.studies.demo import demo as run

    check_folder("out", out)
    try:
        run(out, console, Drawing, steps=steps, fresh=fresh)
        say(f"report: {write([out]).html}")
    except KeyboardInterrupt:
        console.print("interrupted: finished stages are kept, and the next run continues from there")
        raise typer.Exit(130) from None


@declare()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders, or JSON files of results.")],
    out: Annotated[Path | None, Option(help="The HTML file; by default report.html in the first run.")] = None,
) -> None:
    """Show runs as one HTML file that opens from disk, with CSV and PNG next to it."""
    from subquad.report.report import write

    if out is not None and (out.is_dir() or not out.suffix):
        check_folder("out", out)
    elif out is not None:
        check_file("out", out, (".html", ".htm"))
    written = write(runs, out)
    beside = ", ".join(path.name for path in written.beside) or "nothing"
    say(f"report: {written.html}\nbeside it: {beside}")


@declare()
def atlas(
    runs: Annotated[
        list[Path] | None, Argument(metavar="[RUN...]", help="Runs to show; by default of this machine, else shipped.")
    ] = None,
    out: Annotated[Path, Option(help="Folder of the site.")] = Path("site"),
) -> None:
    """Build the documentation: a page for each mechanism, lessons, and answers to the lectures' questions."""
    from subquad.report.atlas import build_atlas

    check_folder("out", out)
    console.print("building the pages and running their examples: about half a minute")
    say(f"atlas: {build_atlas(out, runs or ())}")


@declare()
@options_of(Sampling, "sampling")
def generate(
    checkpoint: Annotated[str, Argument(help="A checkpoint's name, a run, or the folder of a saved model.")],
    count: Annotated[int | None, Option(help="Images to make (default 64), or pieces of music (4).")] = None,
    out: Annotated[
        Path | None, Option(help="PNG file for images (default generated.png); for music, how file names begin.")
    ] = None,
    shape: Annotated[str | None, Option(help="Shape of images, as 28x28 or 32x32x3; by default the model's.")] = None,
    complete: Annotated[Path | None, Option(help="An image file: the model continues its upper half.")] = None,
    prompt: Annotated[str | None, Option(help="Text to continue.")] = None,
    steps: Annotated[int | None, Option(help="Tokens of text (default 500), or of a piece of music.")] = None,
    seed: Annotated[int, Option(help="The same seed gives the same output.")] = 0,
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    compile: Annotated[bool | None, Option(help="Compile the step; by default for long runs.")] = None,
    *,
    sampling: Sampling,
) -> None:
    """Generate with a saved model: images to a PNG, music to MIDI or WAV, text to the terminal as it comes."""
    from subquad.models.saving import of_transformers
    from subquad.tasks.generate import generate as run
    from subquad.training.task import WriteOptions

    options = WriteOptions(
        count=count, out=out, shape=shape, complete=complete, prompt=prompt, steps=steps, compile=compile,
        sampling=sampling, seed=seed,
    )  # fmt: skip
    if of_transformers(checkpoint):
        from subquad.hf.write import write_text

        write_text(Path(checkpoint), options, console, device)
        return
    run(checkpoint, options, console, device)


@declare()
@options_of(ServeSettings, "settings")
def serve(
    checkpoint: Annotated[
        str, Argument(help="A checkpoint's name, a run, or the folder of a saved model, also of one of `linearise`.")
    ],
    *,
    settings: ServeSettings,
) -> None:
    """Serve a saved language model over HTTP, in OpenAI's protocol: completions, chat, streams, metrics, a page."""
    from subquad.data.files import extra

    for package in ("starlette", "uvicorn", "prometheus_client"):
        extra(package, "serve", "servers")
    from subquad.serve.server import serve as run

    run(checkpoint, settings, console)


@declare()
def train(
    task: Annotated[str, Argument(help="digits, copy, images, text, ...; a wrong name lists them all.")],
    out: Annotated[Path | None, Option(help="Folder of the run; by default runs/TASK.")] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="model.depth=16, training.lr=3e-4, ...; repeatable."),
    ] = None,
    mechanism: Annotated[str | None, Option(help="The same as --set model.mechanism=...")] = None,
    data: Annotated[
        str | None, Option(help="Your own file (task text) or the name of a set. The same as --set data.set=...")
    ] = None,
    minutes: Annotated[
        float | None, Option(help="Minutes of training: the schedule ends with them, the test comes after.")
    ] = None,
    leg: Annotated[float | None, Option(help="Minutes until this call saves and stops (see --resume).")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the last checkpoint.")] = False,
    device: AnyDevice = "auto",
) -> None:
    """Train a model on a task; under torchrun on many GPUs. Ctrl-C saves.

    On your own text: subquad train text --data my.txt --out runs/mine, then subquad generate runs/mine.
    """
    from subquad.tasks.configure import start
    from subquad.training.loop import Stopped
    from subquad.training.signals import Interrupted

    given = list(settings or ())
    given += [] if mechanism is None else [f"model.mechanism={mechanism}"]
    given += [] if data is None else [f"data.set={json.dumps(data)}"]
    given += [] if minutes is None else [f"training.minutes={minutes}"]
    folder = Path("runs") / task if out is None else out
    rank_console = console if os.environ.get("RANK", "0") == "0" else Terminal(quiet=True)  # only rank 0 prints
    check_folder("out", folder)
    try:
        result = start(task, folder, given, resume=resume, device=device, leg=leg, console=rank_console)
    except Interrupted as interruption:
        rank_console.print(escape(str(interruption)), soft_wrap=True)
        raise typer.Exit(interruption.code) from None
    except KeyboardInterrupt:
        rank_console.print("interrupted: the last checkpoint is kept", soft_wrap=True)
        raise typer.Exit(130) from None
    except (OSError, Stopped) as error:  # the run had started, so no setting is wrong: exit code 1
        raise failure(error, 1) from None
    if result.ended_by != "leg":
        ended = escape(f"{result.steps:,} steps in {result.seconds:.0f} s: {folder}")
        rank_console.print(ended, soft_wrap=True, highlight=False)


@declare()
def reproduce(
    table: Annotated[
        str, Argument(help="mnist, cifar10, copy, recall, scaling, enwik8, context, imagenet64, music, speech.")
    ],
    rows: Annotated[str, Option(help="Rows with commas between them; by default all.")] = "",
    minutes: Annotated[float | None, Option(help="Minutes of training per row; by default the table's steps.")] = None,
    leg: Annotated[float | None, Option(help="Minutes per row now; repeat the command to continue.")] = None,
    jobs: Annotated[int, Option(help="Rows to train in parallel; for small models on one GPU.")] = 1,
    out: Annotated[Path, Option(help="Folder of the runs and of TABLE/results.json.")] = Path("runs/reproduce"),
    device: AnyDevice = "auto",
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="For every row, as in subquad train; repeatable.")
    ] = None,
    samples: Annotated[int, Option(help="How many images or pieces each trained model writes.")] = 0,
    timing: Annotated[bool | None, Option(help="Time iterations of whole models; by default on a GPU.")] = None,
    commit: Commit = None,
    save: Annotated[Path | None, Option(help="Also write the figures to this JSON, with a PNG beside it.")] = None,
) -> None:
    """Run a published table, or some of its rows, and print ours beside it. Resumes where it stopped."""
    from subquad.machine import tell_commit
    from subquad.report.recall import recalled, shown
    from subquad.report.reproduce import beside, copy_to, draw
    from subquad.studies.reproduce.row import Budget
    from subquad.studies.reproduce.run import reproduce as run

    check_folder("out", out)
    if save is not None:
        check_file("save", save, (".json",))
    tell_commit(commit)
    budget = Budget(minutes=minutes, leg=leg, jobs=jobs, device=device, settings=tuple(settings or ()))
    chosen = [name.strip() for name in rows.split(",") if name.strip()]
    results = run(table, out, console, budget, rows=chosen, timing=timing, samples=samples, draw=draw)
    console.print(beside(results))
    if answers := recalled(results):
        console.print(shown(answers))
    say(f"figures: {out / table / 'results.json'}")
    if save is not None:
        copy_to(results, save)
    if results.interrupted:
        console.print("interrupted: what was trained is kept; run the same command again to continue")
        raise typer.Exit(130)
    if results.failed:
        console.print(f"failed: {', '.join(results.failed)}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


@declare()
def lra(
    tasks: Annotated[
        str, Option(help="listops, text, retrieval, image, pathfinder, pathx; all: the first five.")
    ] = "all",
    mechanisms: Annotated[
        str, Option(help="Names with commas, linear+taps and linear+local too; or published, flagships, all.")
    ] = "all",
    pretrain: Annotated[
        bool, Option("--pretrain", help="Fill in hidden inputs of the training data first, then train on the task.")
    ] = False,
    control: Annotated[
        str | None, Option(help="With --pretrain: a mechanism to train from scratch as well, for as many examples.")
    ] = None,
    minutes: Annotated[float | None, Option(help="Minutes of this call; repeat the command to continue.")] = None,
    seeds: Annotated[int, Option(help="Runs per task and mechanism, with seeds 0, 1, ...")] = 1,
    size: Annotated[
        str | None,
        Option(help="small: 2 layers of width 64; original: as in the paper; deep: 3 to 6 layers, for --pretrain."),
    ] = None,
    steps: Annotated[int | None, Option(help="Steps of every run; by default those of the task's recipe.")] = None,
    pretrain_steps: Annotated[int | None, Option(help="Steps of every pretraining; by default the recipe's.")] = None,
    cap: Annotated[float | None, Option(help="Seconds per run; by default 1.5 times its share of --minutes.")] = None,
    jobs: Annotated[int, Option(help="Runs in parallel.")] = 1,
    device: AnyDevice = "auto",
    compile: Annotated[bool, Option(help="Use torch.compile: takes a minute per run, pays off in long runs.")] = False,
    capture: Annotated[bool, Option(help="Run updates as CUDA graphs, if the mechanism can.")] = True,
    data: Annotated[
        list[str] | None,
        Option(
            "--data", metavar="TASK.KEY=VALUE", help="text.length=2000, image.augment=flips+crops, ...; repeatable."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="TASK.PART.KEY=VALUE",
            help="PART is model, training, pretraining or fill: text.model.depth=4, ...; repeatable.",
        ),
    ] = None,
    prepare: Annotated[bool, Option("--prepare", help="Only make the data, on all cores, and keep it.")] = False,
    look: Annotated[
        bool, Option("--look", help="Only draw what pretrained models fill in so far, into PNG files in --out.")
    ] = False,
    efficiency: Annotated[bool, Option("--efficiency", help="Measure speed and memory by length instead.")] = False,
    lengths: Annotated[str, Option(help="Lengths for --efficiency.")] = "1k,2k,3k,4k,8k,16k",
    batch: Annotated[int, Option(help="Batch for --efficiency.")] = 32,
    pack: Annotated[Path | None, Option(help="Only pack the real data into small files in this folder.")] = None,
    commit: Commit = None,
    out: Annotated[Path, Option(help="Folder of runs, results.json and your notes.json.")] = Path("runs/lra"),
) -> None:
    """Run the Long Range Arena: every mechanism on every task, with the paper's table beside ours."""
    from subquad.machine import tell_commit
    from subquad.report import lra as table
    from subquad.studies.lra import arena as harness
    from subquad.studies.lra import efficiency as speed
    from subquad.studies.lra import recipes
    from subquad.studies.lra.plan import Arena
    from subquad.tasks.lra.pack import pack as write

    tell_commit(commit)
    check_folder("out", out)
    names = recipes.parse_mechanisms(mechanisms)
    if pack is not None:
        check_folder("pack", pack)
        for path in write(pack):
            say(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
        return
    if efficiency and minutes is not None:
        raise ValueError("--efficiency does not take --minutes: shorten it with --lengths and --mechanisms")
    if efficiency:
        speeds = speed.efficiency(
            names, out / "efficiency.json", console, device=device, lengths=parse_lengths(lengths), batch=batch
        )
        for shown in speed.efficiency_tables(speeds):
            console.print(shown)
        say(f"figures: {out / 'efficiency.json'}")
        if speeds.interrupted:
            raise typer.Exit(130)
        return
    chosen = recipes.check_size(("deep" if pretrain else "small") if size is None else size)
    arena = Arena(
        tasks=recipes.parse_tasks(tasks), mechanisms=names, seeds=seeds, size=chosen, pretrain=pretrain,
        control=control, minutes=minutes, steps=steps, pretrain_steps=pretrain_steps, cap=cap, jobs=jobs,
        device=device, compile=compile, capture=capture, data=tuple(data or ()), settings=tuple(settings or ()),
    )  # fmt: skip
    if prepare:
        harness.prepare(arena, out, console)
        return
    if look:
        for path in harness.look_at(arena, out):
            say(f"pictures: {path}")
        return
    notes = table.read_notes(out / "notes.json")
    results = harness.lra(arena, out, console)
    for shown in table.tables(results, notes):
        console.print(shown)
    for line in table.note_lines(results, notes):
        console.print(line, highlight=False, soft_wrap=True)
    say(f"figures: {out / 'results.json'}; write your notes on them into {out / 'notes.json'}")
    if results.left:
        left = "1 run is" if len(results.left) == 1 else f"{len(results.left)} runs are"
        console.print(f"{left} left: run the same command again to continue")
    if results.interrupted or results.failed:
        raise typer.Exit(130 if results.interrupted else 1)


@declare()
def release(
    run: Annotated[Path, Argument(help="The folder of a finished run of subquad train.")],
    name: Annotated[str, Argument(help="What subquad generate will call it.")],
    out: Annotated[Path, Option(help="Folder of checkpoints.")] = Path("checkpoints"),
) -> None:
    """Make a checkpoint to ship from a run: weights in bfloat16, config, and a card with its figures."""
    from subquad.models.shipped import release as write

    check_folder("out", out)
    say(f"checkpoint: {write(run, name, out)}")


@declare()
def convert(
    source: Annotated[
        str, Argument(help="A run, a saved model's folder, a checkpoint's name, or transformers' folder.")
    ],
    out: Annotated[Path, Option(help="Folder to write.")],
    to: Annotated[
        str, Option(help="hf: for transformers, with tokenizer and model card; subquad: as model.save.")
    ] = "hf",
    tokenizer: Annotated[
        str | None,
        Option(help="bytes, the folder of a tokenizer, or none; by default the source's, or bytes for text."),
    ] = None,
) -> None:
    """Write a model as a folder for Hugging Face transformers, or back. No weight changes."""
    from subquad.data.files import extra

    extra("transformers", "hf", "folders for Hugging Face").utils.logging.disable_progress_bar()
    from subquad.hf import convert as run

    say(f"written: {run(source, out, to, tokenizer)}")  # type: ignore[arg-type] # the function checks `to`


@declare()
def linearise(
    model: Annotated[str, Argument(help="A decoder: its folder, a .gguf file, or its name on the hub.")],
    out: Annotated[Path, Option(help="Folder for the student; the same command continues there.")],
    text: Annotated[
        list[Path] | None, Option(help="Text to learn from: a file or folder; repeatable. By default eltec-eng.")
    ] = None,
    keep: Annotated[float, Option(help="Share of the attention layers that keep softmax.")] = 0.25,
    rule: Annotated[
        str, Option(help="gated_delta, linear, or window: a window only, to compare with.")
    ] = "gated_delta",
    layers: Annotated[
        str | None, Option(help="Layers that may be replaced, as 0,1,5; by default all.", show_default=False)
    ] = None,
    window: Annotated[int | None, Option(help="Tokens that are read exactly beside the running sum.")] = None,
    lora: Annotated[int | None, Option(help="Distil by LoRA of this rank instead of all weights.")] = None,
    minutes: Annotated[float | None, Option(help="Minutes of this call; repeat the command to continue.")] = None,
    lengths: Annotated[str, Option(help="Lengths at which decoding is measured.")] = "1k,8k,32k",
    batch: Annotated[int, Option(help="Batch of that measurement.")] = 1,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="align_steps=1000, distil_lr=3e-5, seed=1, ...; repeatable."),
    ] = None,
    device: AnyDevice = "auto",
) -> None:
    """Make most attention layers of a pretrained decoder linear: align, choose, distil, and measure beside it."""
    from subquad.data import files
    from subquad.data.text import FILES
    from subquad.hf import LineariseSettings, Measures
    from subquad.hf import linearise as run
    from subquad.hf.linearise.page import terminal
    from subquad.training.config import parse
    from subquad.training.signals import Interrupted

    check_folder("out", out)
    given: dict[str, Any] = {"keep": keep, "rule": rule, "window": window, "lora": lora}
    if layers is not None:
        if not all(part.strip().isdecimal() and len(part) < 10 for part in layers.split(",")):
            refuse("layers", layers, "numbers with commas between them, such as 0,1,5")
        given["layers"] = [int(part) for part in layers.split(",")]
    given |= {".".join(path): value for path, value in map(parse, settings or ())}
    chosen = LineariseSettings.from_dict(given)
    measures = Measures(lengths=parse_lengths(lengths), batch=batch)
    source = [files.get(FILES["eltec-eng"])] if text is None else text
    try:
        report = run(
            model, out, source, minutes=minutes, device=device, measures=measures, console=console, **vars(chosen)
        )
    except Interrupted as interruption:
        console.print(escape(str(interruption)), soft_wrap=True)
        raise typer.Exit(interruption.code) from None
    except KeyboardInterrupt:
        console.print("interrupted: the last checkpoint is kept")
        raise typer.Exit(130) from None
    if report is None:
        return
    for table in terminal(report):
        console.print(table)
    console.print(escape(report["verdict"]), highlight=False, soft_wrap=True)
    say(f"student: {out}; figures: {out / 'linearise.json'}; page: {out / 'README.md'}")


@declare("generation", group=bench)
@options_of(GenerationSettings, "options")
def bench_generation(
    out: Annotated[Path, Option(help="JSON file.")] = Path("runs/bench/generation.json"), *, options: GenerationSettings
) -> None:
    """Measure generation: sequences/s, tokens/s, latency, bytes of state, at growing length and batch."""
    from subquad.studies.generation import bench as run

    check_file("out", out, (".json",))
    run(console, out, options)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
