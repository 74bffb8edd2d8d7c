"""Change bytes on disk: either the result stays the same, or the damage is reported."""

import dataclasses
import io
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from subquad import models
from subquad.cli import app
from subquad.report import runs as results
from subquad.training import checkpoints, history
from subquad.training.log import logged
from subquad.training.loop import Result
from subquad.training.train import train
from tests.training.test_train import _die_at
from tests.training.tiny import Tiny, assert_same_run, curve, run, weights

FLIPS = int(os.environ.get("SUBQUAD_FLIPS", "6"))  # flips in each run; the full size is 200
MEASURED = ("test", "validation", "best_step", "steps")


class Backwards(Tiny):
    """The first evaluation is the best, so that the tested weights come from best/."""

    higher_is_better: ClassVar[bool] = True


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert run(out, task=Backwards()).best_step == 4
    return out


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("interrupted") / "run"
    _die_at(out, 8, task=Backwards())
    assert [path.name for path in checkpoints.names(out / "checkpoints")] == ["step_000003", "step_000006"]
    return out


def resume(out: Path) -> tuple[Result, str]:
    """Resume a run; returns the result and all output."""
    console = Console(file=io.StringIO(), width=400)
    result = train(Backwards(), out=out, resume=True, device="cpu", console=console)
    assert isinstance(console.file, io.StringIO)
    return result, console.file.getvalue()


def files_of(out: Path) -> list[Path]:
    found = (path.relative_to(out) for path in sorted(out.rglob("*")) if path.is_file() and path.stat().st_size)
    return [path for path in found if path.parts[0] != "tensorboard"]


def flip(file: Path, chance: random.Random) -> None:
    """Change one bit of a byte, or the whole byte."""
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    data[at] ^= chance.choice([1 << chance.randrange(8), chance.randrange(1, 256)])
    file.write_bytes(data)


def seen(out: Path) -> dict[str, Any]:
    """Everything users can read of a run; an error in place of a reading that fails."""

    def attempt(read: Any) -> Any:
        try:
            return read()
        except (ValueError, OSError) as error:
            return f"error: {error}"

    def generate() -> str:
        done = CliRunner().invoke(app, ["generate", str(out), "--steps", "5"])
        assert done.exit_code in (0, 2), done.output
        return done.output if done.exit_code == 0 else f"error: {done.output}"

    return {
        "model": attempt(lambda: {name: t.tolist() for name, t in models.load(out).state_dict().items()}),
        "generate": generate(),
        "report": attempt(lambda: json.dumps(results.read([out])[0].data)),
    }


def outcome(original: Path, whole: Path, copy: Path, seed: int) -> tuple[str, str]:
    """Flip one byte in a copy of a run; returns (file, effect). Fails if something changed without a message."""
    chance = random.Random(seed)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    before = seen(copy)
    file = chance.choice(files_of(copy))
    flip(copy / file, chance)
    for name, read in seen(copy).items():
        unchanged = read == before[name] or str(read).startswith("error: ")
        assert unchanged, f"flip {seed} of {file}: {name} changed without a word"
    if file.name == "result.json":
        with pytest.raises(ValueError, match=r"result\.json is not the result of a run .*: delete it to continue"):
            resume(copy)
        return str(file), "refused by name"
    result, said = resume(copy)
    expected = json.loads((whole / "result.json").read_text())
    same = {key: getattr(result, key) for key in MEASURED} == {key: expected[key] for key in MEASURED}
    assert same, f"flip {seed} of {file}: another result"
    assert_same_run(copy, whole)
    assert "error: " not in str(seen(copy)["model"]), f"flip {seed} of {file}: the model stays damaged"
    named = any(
        words in said for words in ("damaged", "new one was written", "is repeated", "makes these weights again")
    )
    return str(file), "named, the same result" if named else "the same result"


@pytest.mark.parametrize("kind", ["finished", "interrupted"])
def test_a_flipped_byte_is_harmless_or_reported(
    request: pytest.FixtureRequest, finished: Path, tmp_path: Path, kind: str
) -> None:
    original = request.getfixturevalue(kind)
    found = [outcome(original, finished, tmp_path / "run", seed) for seed in range(FLIPS)]
    if FLIPS > 50:
        for (file, what), count in sorted(Counter(found).items()):
            print(f"{kind}: {file}: {what}: {count}")  # noqa: T201, figures of a full-size run
    assert len(found) == FLIPS


def damage_state(text: str, how: str) -> bytes:
    state = json.loads(text)
    match how:
        case "renamed key":
            return text.replace('"totals"', '"totals_"').encode()
        case "changed best":
            return text.replace('"step": 4', '"step": 3').encode()
        case "changed number":
            state["facts"]["schedule"]["scale"] = 0.5
        case "another file table":
            state["files"] = {}
        case "not UTF-8":
            return text.encode()[:40] + b"\xff" + text.encode()[41:]
        case "deep":
            return b'{"facts":' * 100_000
        case "not an object":
            return b"[]"
    return json.dumps(state).encode()


@pytest.mark.parametrize(
    "how",
    ["renamed key", "changed best", "changed number", "another file table", "not UTF-8", "deep", "not an object"],
)
def test_a_damaged_state_is_set_aside_and_the_one_before_used(
    interrupted: Path, finished: Path, tmp_path: Path, how: str
) -> None:
    shutil.copytree(interrupted, tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "step_000006" / "state.json"
    text = state.read_text()
    state.write_bytes(damage_state(text, how))
    assert state.read_text(errors="replace") != text
    _, said = resume(tmp_path / "run")
    assert "step_000006 is damaged: state.json cannot be read" in said
    assert "resuming from the checkpoint before it" in said
    assert (tmp_path / "run" / "checkpoints" / "step_000006.damaged").is_dir()
    assert_same_run(tmp_path / "run", finished)


def without_digests(out: Path) -> None:
    """A run in the old format, without digests."""
    for state in out.glob("checkpoints/*/state.json"):
        (state.parent / history.METRICS).unlink()
        found = json.loads(state.read_text())
        del found["sha256"], found["facts"]["best"], found["files"][history.METRICS]
        found["facts"]["best"] = None
        state.write_text(json.dumps(found))
    for file in (out / "config.json", out / "result.json"):
        found = json.loads(file.read_text()) if file.exists() else {}
        for key in ("sha256", "weights_sha256"):
            found.pop(key, None)
        if found:
            file.write_text(json.dumps(found))
    lines = [json.loads(line) for line in (out / history.METRICS).read_text().splitlines()]
    for line in lines:
        del line[history.CHECK]
    (out / history.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_old_run_without_digests_resumes_with_a_note(interrupted: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(interrupted, tmp_path / "run")
    without_digests(tmp_path / "run")
    _, said = resume(tmp_path / "run")
    assert "step_000006 was written by a version without digests: its state.json cannot be checked" in said
    assert curve(tmp_path / "run") == [
        {**line, **({} if line["split"] != "test" else {"perplexity": curve(tmp_path / "run")[-1]["perplexity"]})}
        for line in curve(finished)
    ]
    assert len(logged(tmp_path / "run")) == len(logged(finished))
    shutil.copytree(finished, tmp_path / "done")
    without_digests(tmp_path / "done")
    again, said = resume(tmp_path / "done")
    assert "is already finished" in said
    assert again.weights_sha256 is None


def test_a_state_without_digest_that_lacks_something_is_still_named(
    interrupted: Path, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(interrupted, tmp_path / "run")
    without_digests(tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "step_000006" / "state.json"
    state.write_text(state.read_text().replace('"totals"', '"total"'))
    _, said = resume(tmp_path / "run")
    assert "step_000006 is damaged: state.json lacks totals; resuming from the checkpoint before it" in said


@pytest.mark.parametrize("how", ["lost", "changed", "line lost", "line doubled", "cut", "not text", "empty"])
def test_a_damaged_history_is_restored_from_the_checkpoint(
    interrupted: Path, finished: Path, tmp_path: Path, how: str
) -> None:
    shutil.copytree(interrupted, tmp_path / "run")
    file = tmp_path / "run" / history.METRICS
    lines = file.read_bytes().splitlines(keepends=True)
    changed = {
        "lost": None,
        "changed": b"".join([lines[0].replace(b'"loss": ', b'"loss": 1'), *lines[1:]]),
        "line lost": b"".join(lines[1:]),
        "line doubled": b"".join([lines[0], *lines]),
        "cut": b"".join(lines)[:30],
        "not text": b"\xff" + b"".join(lines)[1:],
        "empty": b"",
    }[how]
    file.unlink() if changed is None else file.write_bytes(changed)
    _, said = resume(tmp_path / "run")
    assert f"{file} is damaged" in said
    assert_same_run(tmp_path / "run", finished)
    assert how == "lost" or (tmp_path / "run" / "metrics.jsonl.damaged").read_bytes() == changed


def test_a_lost_or_damaged_config_is_written_again_from_a_checkpoint(
    interrupted: Path, finished: Path, tmp_path: Path
) -> None:
    for damage in (None, b"{", b'{"task": "tiny"}'):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(interrupted, tmp_path / "run")
        file = tmp_path / "run" / "config.json"
        file.unlink() if damage is None else file.write_bytes(damage)
        _, said = resume(tmp_path / "run")
        assert "a new one was written from the settings in the checkpoints" in said
        assert_same_run(tmp_path / "run", finished)
        written = json.loads(file.read_text())
        assert written["training"] == json.loads((finished / "config.json").read_text())["training"]
    shutil.copytree(interrupted, tmp_path / "other")
    (tmp_path / "other" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"started with other settings: training\.lr is 1, was"):
        run(tmp_path / "other", task=Backwards(), resume=True, lr=1)


def test_an_old_config_is_compared_with_the_checkpoint(interrupted: Path, tmp_path: Path) -> None:
    """The check comes before the model is built, which would need 640 GB."""
    shutil.copytree(interrupted, tmp_path / "run")
    without_digests(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    written = json.loads(file.read_text())
    written["model"]["vocab"] = 10**10
    file.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"started with other settings: model\.vocab is new \(10000000000\)"):
        run(tmp_path / "run", {"vocab": 10**10}, task=Backwards(), resume=True)


def test_a_finished_run_with_a_damaged_model_is_tested_again(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    result, said = resume(tmp_path / "run")
    assert "the test is repeated from the last checkpoint" in said
    assert dataclasses.asdict(result)["test"] == json.loads((finished / "result.json").read_text())["test"]
    assert all(torch.equal(tensor, weights(finished)[name]) for name, tensor in weights(tmp_path / "run").items())


def test_a_damaged_history_is_not_shown(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / history.METRICS
    file.write_text(file.read_text().replace('"loss": ', '"loss": 1', 1))
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: line 1 was changed"):
        results.read([tmp_path / "run"])
    resume(tmp_path / "run")
    assert curve(tmp_path / "run") == curve(finished)
    results.read([tmp_path / "run"])
    file.write_bytes(file.read_bytes()[:-30])  # a process that was killed in the middle of a line
    assert len(logged(tmp_path / "run")) == len(logged(finished)) - 1
