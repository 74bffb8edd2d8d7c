"""Random command lines for every command: each exits with 0, or prints one line about what is wrong, never a traceback.

Options are read from the declarations of the commands, so new ones are included automatically. Work that would take
minutes is replaced by stubs: only the way there is tested.
$SUBQUAD_FUZZ: number of command lines; $SUBQUAD_FUZZ_SEED: first seed; $SUBQUAD_FUZZ_SECONDS: time limit for each.
"""

import inspect
import json
import os
import random
import re
import shutil
import signal
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from subquad.cli import app
from subquad.measure.cost import Row
from subquad.models import LSTM, LanguageModel
from subquad.studies.reproduce.tables import TABLES
from subquad.studies.results import EfficiencyRow
from subquad.tasks import TASKS
from subquad.tasks.music import START
from tests.report import runs as made_up

COUNT = int(os.environ.get("SUBQUAD_FUZZ", "25"))
SEED = int(os.environ.get("SUBQUAD_FUZZ_SEED", "0"))
SECONDS = int(os.environ.get("SUBQUAD_FUZZ_SECONDS", "0"))

NUMBERS = ("-1", "0", "1", "3", "100000000", "4611686018427387905", "99999999999999999999999", "abc", "1.5", "")
FLOATS = ("-1", "0", "0.5", "1e-9", "nan", "inf", "-inf", "1e308", "abc", "")
TEXTS = (
    "", "nonsense", "linear", "linear,softmax", "linformre", ",", "all", "16k", "8,16", "-5", "1x1", "2x2", "0x0",
    "1000000x1000000", "4x4x2", "99999999999999999999", "²", "😀", "\x1b[31mred", "\udcff", "a" * 3000, "../../evil",
    "cuda", "cpu", "cuda:99", "meta", "float32", "float8", "digits", "copy", "small", "published",
)  # fmt: skip
PATHS = (
    "missing", "notes.txt/inner", "x.exe", "new.json", "", "/proc/nowhere", "a\x1b[31mb", "\udcff", "n" * 300, ".", "/",
)  # fmt: skip
SETTINGS = (
    "", "=", "nonsense", "training.batch=100000000", "training.steps=0", "training.lr=nan", "training.lr=-1",
    "training.betas=[2, 3]", "training.batch=1e400", "training.seed=99999999999999999999999", "training.batch=true",
    "model.depth=300000", "model.dim=1000000000", "model.heads=7", "model.heads=0", "model.depth=-1", "model.unknown=1",
    "model.mechanism=linformre", 'model.mechanism=["linear", {"eps": "x"}]', "model.dim=null", "model=3",
    "model.dim.x=3", 'model.mechanism={"name": 3}', "data.unknown=1", "data.length=-1", "data.length=null",
    'data.length="x"',
    "data.length=1000000000000", "training.micro_batch=5000", "training.precision=fp8", "training.device=cuda",
    "training.minutes=-1", "training.minutes=inf", "training.compile=3", "text.length=-1", "listops.length=x",
)  # fmt: skip
SMALL = (
    "training.steps=1",
    "training.batch=2",
    "training.evaluate_batch=200",
    "model.dim=8",
    "model.depth=1",
    "model.heads=2",
)
# options that make a valid command cheap; random ones come later on the line and override them
CHEAP: dict[str, list[str]] = {
    "compare": ["--mechanisms", "linear", "--lengths", "16"],
    "train": [word for setting in SMALL for word in ("--set", setting)],
    "reproduce": [],
    "generate": ["--count", "1", "--shape", "2x2"],
    "recommend": ["--length", "4k"],
    "bench generation": ["--mechanisms", "linear", "--lengths", "8", "--batches", "1", "--most", "2", "--dim", "8",
                         "--depth", "1", "--heads", "1", "--steps", "2"],
    "lra": ["--tasks", "listops", "--mechanisms", "linear", "--steps", "1"],
}  # fmt: skip
# these would take minutes if valid, so they always get a wrong option
WRONG = {
    "demo": ["--steps", "0"], "atlas": ["--out", "notes.txt"], "serve": ["--slots", "0"],
    "linearise": ["--text", "missing"],  # before it looks for the model, maybe on the hub
}  # fmt: skip
MADE = ("listops", "pathfinder", "pathx", "fill")  # generating their data takes minutes
SENSIBLE: dict[str, list[str]] = {  # mostly valid values, so that commands get past their first check
    "task": ["digits", "copy", *(name for name in TASKS if name not in MADE)],
    "table": [*TABLES],
    "name": ["linear", "fnet"],
    "checkpoint": ["text", "images", "music", "lstm", "run"],
    "run": ["run", "damaged_result.json", "damaged_config.json"],
    "runs": ["compared", "run", "damaged_result.json", "damaged_metrics.jsonl", "damaged_config.json", "flipped.json"],
    "source": ["compared", "flipped.json", "rows.json", "kind.json"],
    "device": ["cpu", "auto"],
}
ENDS_BADLY = ("train", "reproduce", "lra")  # documented: exit code 1 if something failed on the way
DEPTHS = (
    "Traceback", "[Errno", "enforce fail", "Allocator", "aten::", "RuntimeError", "KeyError", "TypeError",
    "has no attribute", "positional argument", "unexpected keyword", "invalid literal", "not supported between",
    "out of range float", "codec can't", "\x1b",
)  # fmt: skip


class Option(NamedTuple):
    """A parameter of a command, from the declaration of its function."""

    name: str
    kind: type  # int, float, bool, str or Path
    flags: list[str]  # written before the value; empty for an argument
    many: bool
    required: bool


def commands() -> dict[str, list[Option]]:
    found = {}
    for prefix, group in [("", app), *((f"{inner.name} ", inner.typer_instance) for inner in app.registered_groups)]:
        for command in group.registered_commands if group is not None else ():
            function: Any = command.callback
            name = prefix + (command.name or function.__name__)
            found[name] = [option_of(parameter) for parameter in inspect.signature(function).parameters.values()]
    return found


def option_of(parameter: inspect.Parameter) -> Option:
    hint, info = typing.get_args(parameter.annotation)[:2] if typing.get_args(parameter.annotation) else (str, None)
    kinds = [
        hint,
        *typing.get_args(hint),
        *(inner for part in typing.get_args(hint) for inner in typing.get_args(part)),
    ]
    kind = next(kind for kind in (bool, int, float, Path, str) if kind in kinds)
    many = any(typing.get_origin(part) is list for part in kinds)
    declared = [flag for text in getattr(info, "param_decls", None) or () for flag in text.split("/")]
    spelt = parameter.name.replace("_", "-")
    flags = declared or [f"--{spelt}", *([f"--no-{spelt}"] if kind is bool else [])]
    argument = info is None or isinstance(info, typer.models.ArgumentInfo)
    required = parameter.default is inspect.Parameter.empty
    return Option(parameter.name, kind, [] if argument else flags, many, required)


COMMANDS = commands()


class World(NamedTuple):
    path: Path
    files: list[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A folder with files of every kind that a command can take."""
    here: Path = tmp_path_factory.mktemp("world")
    made_up.write(here / "compared")
    flipped = json.dumps(made_up.results()).replace('"mechanism"', '"mechansm"', 3)
    for name, content in {
        "notes.txt": b"some notes\n", "empty": b"", "broken.json": b"{", "plain.json": b'{"a": 1}', "list.json": b"[]",
        "latin.json": b'{"kind": "\xe9"}', "deep.json": b"[" * 4000 + b"]" * 4000, "flipped.json": flipped.encode(),
        "kind.json": b'{"kind": "compare"}', "rows.json": b'{"kind": "compare", "rows": [3], "settings": 4}',
        "named.json": json.dumps({"kind": "\x1b[2Jgone", "machine": {"device": "\x1b]0;x\x07"}}).encode(),
        "table.json": b'{"kind": "reproduce", "table": "mnist"}', "picture.png": made_up.PIXEL,
    }.items():  # fmt: skip
        (here / name).write_bytes(content)
    (here / "folder").mkdir()
    small: dict[str, Any] = {"dim": 8, "depth": 1, "heads": 2, "mechanism": "linear"}
    LanguageModel(vocab=256, **small).save(here / "text")
    LanguageModel(vocab=17, positions="grid", shape=(8, 8), max_length=64, **small).save(here / "images")
    LanguageModel(vocab=START + 1, max_length=64, **small).save(here / "music")
    (here / "music" / "card.json").write_text('{"task": "music", "data": {}}')
    LSTM(vocab=9, dim=8, depth=1).save(here / "lstm")
    words = ["train", "digits", "--out", str(here / "run"), *CHEAP["train"], "--device", "cpu"]
    assert CliRunner().invoke(app, words).exit_code == 0
    for file, damage in {"result.json": b'"metric"', "config.json": b'"training"', "metrics.jsonl": b'"split"'}.items():
        copy = here / f"damaged_{file}"
        shutil.copytree(here / "run", copy)
        (copy / file).write_bytes((copy / file).read_bytes().replace(damage, b'"x\xe9"', 1))
    return World(here, sorted(path.name for path in here.iterdir()))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, world: World, tmp_path: Path) -> Path:
    """A copy of that folder to work in. Nothing is measured for minutes, downloaded, or started in another process."""

    def rows(settings: Any, jobs: Sequence[Any], _: Any) -> Iterator[dict[str, Any]]:
        for job in jobs:
            about = {"mechanism": job["mechanism"], "task": "x", "reason": "a stand-in"}
            yield (
                {"row": Row(**{key: job[key] for key in ("mechanism", "length", "causal")}, skipped="a stand-in")}
                if job["kind"] == "row"
                else {"quality": about}
            )

    def nothing(*_: Any, **__: Any) -> list[Any]:
        return []

    def failed(*_: Any, **__: Any) -> Any:
        raise OSError("there is no network here")

    here = Path(shutil.copytree(world.path, tmp_path / "here"))
    monkeypatch.chdir(here)
    monkeypatch.setenv("SUBQUAD_CACHE", str(here / "cache"))
    monkeypatch.setenv("SUBQUAD_DATA", str(here / "data"))
    monkeypatch.setattr("subquad.studies.compare._elsewhere", rows)
    monkeypatch.setattr(
        "subquad.studies.reproduce.run.run_all", lambda todo, *_: ((name, 1, "a stand-in") for name in todo)
    )
    for name in ("studies.reproduce.run.measure_scaling", "tasks.lra.pack.pack", "studies.lra.arena.side_by_side"):
        monkeypatch.setattr(f"subquad.{name}", nothing)
    monkeypatch.setattr("subquad.studies.lra.arena._prepare", lambda *_: {})
    monkeypatch.setattr(
        "subquad.studies.lra.efficiency._row",
        lambda name, *_: EfficiencyRow(mechanism=name, length=1, skipped="a stand-in"),
    )
    monkeypatch.setattr("subquad.data.files._download", failed)
    return here


def draw_command(dice: random.Random, files: Sequence[str]) -> tuple[str, list[str]]:
    (name,) = dice.choices([*COMMANDS], [1 + len(options) for options in COMMANDS.values()])
    words = (
        [] if name == "generate" and dice.random() < 0.5 else list(CHEAP.get(name, []))
    )  # not every model has a shape
    options = COMMANDS[name]
    drawn = dice.sample(options, min(len(options), dice.randint(0, 4)))
    for option in options:
        if not option.flags and (option.required or option in drawn):
            words += [draw_value(dice, option, files) for _ in range(dice.choice((1, 1, 2)) if option.many else 1)]
        elif option in drawn and option.kind is bool:
            words.append(
                option.flags[-1] if option.name == "compile" else dice.choice(option.flags)
            )  # compiling takes minutes
        elif option in drawn:
            words += [option.flags[0], draw_value(dice, option, files)]
    return name, words + WRONG.get(name, [])


def draw_value(dice: random.Random, option: Option, files: Sequence[str]) -> str:
    if option.name in SENSIBLE and dice.random() < 0.75:
        return dice.choice(SENSIBLE[option.name])
    if option.kind is str and option.many:
        return dice.choice(SETTINGS)
    if option.kind is Path:
        return dice.choice([*files, *PATHS])
    return dice.choice({int: NUMBERS, float: FLOATS}.get(option.kind, TEXTS))


def complaint(name: str, words: Sequence[str], result: Any, files: Sequence[str]) -> str | None:
    """What is wrong with the end of a command line, or None."""
    text = result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"a traceback: {result.exception!r}"
    if result.exit_code not in (0, 2) and not (result.exit_code == 1 and name in ENDS_BADLY):
        return f"exit code {result.exit_code}"
    deep = [sign for sign in DEPTHS if sign in text]
    if deep:
        return f"from the depths: {deep}"
    if result.exit_code != 2 or "Usage:" in text:
        return None
    said = [line for line in text.splitlines() if line.startswith("error ")]
    if len(said) != 1:
        return f"{len(said)} lines of errors"
    plain = re.sub(r"\W+", " ", said[0])
    named = {option.name for option in COMMANDS[name]} | {part for word in words for part in re.split(r"[=.,/]", word)}
    named |= {part for file in files for part in file.split(".")}  # one of a folder
    if not any(re.search(rf"\b{re.escape(part)}\b", plain) for part in named if part):
        return "nothing is named"
    return None


class TooLong(BaseException):
    """An error that nothing catches."""


def too_long(*_: Any) -> None:
    raise TooLong


@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.usefixtures("here")
def test_a_random_command_line_ends_well(number: int, world: World) -> None:
    dice = random.Random(f"{SEED} {number}")
    name, words = draw_command(dice, world.files)
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        result = CliRunner().invoke(app, [*name.split(), *words])
    except TooLong:
        pytest.fail(f"subquad {name} {words}: more than {SECONDS} s")
    finally:
        signal.alarm(0)
    wrong = complaint(name, words, result, world.files)
    assert wrong is None, f"subquad {name} {words}: {wrong}\n{result.output[-1500:]}"
