import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import subquad
from subquad.cli import app
from subquad.models import LanguageModel, load, shipped

run = CliRunner(env={"COLUMNS": "160"})


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of the music task, in its own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    torch.manual_seed(0)
    model = LanguageModel(
        vocab=48, dim=16, depth=1, heads=2, mechanism="linear", positions="grid", shape=(8, 4), max_length=32
    )
    folder = tmp_path / "runs" / "music"
    model.save(folder / "model")
    config = {"task": "music", "data": {"rate": 8000}, "model": {}, "training": {"steps": 3}, "commit": "abc"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "result.json").write_text(json.dumps({"test": {"bits/token": 1.5}}))
    return folder


def test_a_released_checkpoint_is_found_by_name_in_half_the_bytes(trained: Path) -> None:
    folder = shipped.release(trained, "bach")
    assert folder == Path("checkpoints/bach")
    assert shipped.find("bach") == folder
    assert shipped.names()[0] == "bach"
    card = shipped.card(folder)
    assert card["result"]["test"]["bits/token"] == 1.5
    assert (card["task"], card["commit"], card["dtype"]) == ("music", "abc", "bfloat16")
    model = load(folder)
    assert model.dtype == torch.bfloat16
    original = load(trained / "model")
    for (name, ours), theirs in zip(model.state_dict().items(), original.state_dict().values(), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-2, atol=1e-2, msg=name)


def test_the_card_of_a_real_run_says_how_it_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = [f"--set={setting}" for setting in ("training.steps=1", "model.depth=1", "model.dim=16", "model.heads=2")]
    assert run.invoke(app, ["train", "digits", "--out", "tiny", *tiny]).exit_code == 0
    assert run.invoke(app, ["release", "tiny", "digits"]).exit_code == 0
    card = shipped.card(shipped.find("digits"))
    trained = json.loads(Path("tiny/config.json").read_text())
    assert card["machine"]["device"] == "cpu"
    assert (card["subquad"], card["machine"]["torch"]) == (subquad.__version__, torch.__version__)
    for key in ("task", "data", "model", "training", "commit", "date", "machine"):
        assert card[key] == trained[key]
    assert "bits/dim" in card["result"]["test"]


def test_paths_runs_and_names_all_lead_to_a_model(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped.find(trained) == trained / "model"
    assert shipped.find(trained / "model") == trained / "model"
    assert shipped.card(trained / "model")["task"] == "music"
    monkeypatch.setenv("SUBQUAD_DATA", str(trained))
    shipped.release(trained, "bach", trained / "checkpoints")
    assert shipped.find("bach") == trained / "checkpoints" / "bach"
    with pytest.raises(ValueError, match="did you mean 'bach'"):
        shipped.find("bahc")


def test_the_shipped_model_gives_its_own_images_high_probability() -> None:
    folder = shipped.find("mnist_linear")
    assert (folder / "model.safetensors").stat().st_size < shipped.LARGEST
    model = LanguageModel.load(folder).float().eval()
    written = json.loads((folder.parents[1] / "results" / "generated.json").read_text())
    assert written["checkpoint"] == "mnist_linear"
    images = torch.tensor(written["images"][:8])
    start = nn.functional.pad(images[:, :-1], (1, 0), value=256)
    with torch.no_grad():
        bits = model.loss(start, targets=images).item() / math.log(2)
    known = shipped.card(folder)["result"]["test"]["bits/dim"]
    assert known / 1.5 < bits < known * 1.5  # eight images; uniform noise has 8 bits


ENGLISH = (
    "The old house stood at the end of the lane, and nobody had lived in it since the winter in which the captain was "
    "lost at sea. His sister came every spring to open the windows, and to sit for an hour in the room that had been "
    "his; and when she went away again she said to the gardener, as she had said the year before, that it would be "
    "better to sell the place. But she did not sell it, and the gardener, who knew her well, had not thought she would."
)


def test_the_shipped_novels_model_knows_english() -> None:
    folder = shipped.find("novels_linear")
    card = shipped.card(folder)
    model = LanguageModel.load(folder).float().eval()
    text = torch.tensor([list(ENGLISH.encode())])
    with torch.no_grad():
        bits = [model.loss(tokens).item() / math.log(2) for tokens in (text, text.flip(1))]
    assert bits[0] < 1.5 * card["result"]["test"]["bits/byte"]
    assert bits[1] > 2 * bits[0]  # read from the back
    written = run.invoke(app, ["generate", "novels_linear", "--prompt", "She said that", "--steps", "12"])
    assert written.exit_code == 0, written.output
    assert written.output.startswith("She said that")
    assert len(written.output) > len("She said that") + 6


def test_all_shipped_checkpoints_are_small() -> None:
    files = list((shipped.find("novels_linear").parent).glob("*/model.safetensors"))
    assert len(files) >= 2
    assert max(path.stat().st_size for path in files) < 16_000_000
    assert sum(path.stat().st_size for path in files) < 30_000_000


def test_an_unfinished_or_too_large_model_is_not_released(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "LARGEST", 100)
    with pytest.raises(ValueError, match="at most 100"):
        shipped.release(trained, "bach")
    (trained / "result.json").unlink()
    with pytest.raises(ValueError, match="finished run"):
        shipped.release(trained, "bach")


def test_generate_takes_a_name_and_writes_music(trained: Path) -> None:
    assert run.invoke(app, ["release", str(trained), "bach"]).exit_code == 0
    result = run.invoke(app, ["generate", "bach", "--count", "2", "--out", "new/piece.mid"])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in Path("new").iterdir()) == ["piece_1.mid", "piece_2.mid"]
    result = run.invoke(app, ["generate", "mozart"])
    assert result.exit_code == 2
    assert "bach" in result.output


def test_load_accepts_the_same_names_as_generate(trained: Path) -> None:
    shipped.release(trained, "bach")
    for name in (trained, str(trained), "runs/music", trained / "model", "bach", "checkpoints/bach", "mnist_linear"):
        assert isinstance(subquad.load(name), LanguageModel)
    assert torch.equal(subquad.load("runs/music").embedding.weight, load(trained / "model").embedding.weight)
    with pytest.raises(ValueError, match="did you mean 'bach'"):
        subquad.load("bahc")
    Path("runs/begun/checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="is a run without a model yet"):
        subquad.load("runs/begun")


@pytest.mark.parametrize("name", ["../../evil", "..", "/tmp/evil", "a/../../b", ""])
def test_a_checkpoint_is_released_into_its_folder_only(trained: Path, name: str) -> None:
    before = sorted(Path().parent.resolve().rglob("*"))
    result = run.invoke(app, ["release", str(trained), name, "--out", "ck"])
    assert result.exit_code == 2
    assert "cannot work: accepted is a name of letters, digits" in " ".join(result.output.split())
    assert sorted(Path().parent.resolve().rglob("*")) == before


def test_weights_that_are_no_numbers_are_neither_used_nor_released(trained: Path) -> None:
    model = load(trained)
    with torch.no_grad():
        model.get_parameter("embedding.weight").fill_(math.nan)
    model.save(trained / "model")
    for command in (["generate", str(trained)], ["release", str(trained), "bach"]):
        result = run.invoke(app, command)
        assert result.exit_code == 2
        assert "embedding.weight holds 768 of 768 values that are NaN" in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_flipped_bit_stops_generate(trained: Path, name: str) -> None:
    file = trained / "model" / name
    data = file.read_bytes()
    at = len(data) - 10 if name == "model.safetensors" else data.index(b"vocab") + 8
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert run.invoke(app, ["generate", str(trained), "--out", "piece.mid"]).exit_code == 2
    assert not list(Path().glob("piece*"))


def test_a_damaged_card_is_named(trained: Path) -> None:
    card = shipped.release(trained, "bach") / "card.json"
    card.write_text(card.read_text().replace("8000", "9000"))
    result = run.invoke(app, ["generate", "bach"])
    assert result.exit_code == 2
    assert "card.json is damaged" in " ".join(result.output.split())
    card.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        shipped.card(card.parent)
