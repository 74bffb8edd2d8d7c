"""The code and commands in the guides work."""

import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from subquad import ranks
from subquad.cli import app
from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.card import card
from subquad.models import LanguageModel, load
from subquad.tasks.configure import configure
from tests.mechanisms import laws
from tests.studies.in_process import work
from tests.together import together

GUIDES = Path(__file__).parents[1] / "guides"
NAMES = sorted(path.name for path in GUIDES.glob("*.md"))
SMALLER = (
    "training.steps=60", "training.batch=4", "training.lr=1e-2", "data.length=32", "model.dim=16", "model.depth=1",
    "model.heads=2",
)  # fmt: skip


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (GUIDES / name).read_text(), re.DOTALL)


def commands(name: str) -> list[list[str]]:
    """The words after `subquad` in every command, including `torchrun ... -m subquad.cli`."""
    lines = [line for block in blocks(name, "sh") for line in block.replace("\\\n", " ").splitlines()]
    calls = [re.sub(r"^torchrun .* -m subquad.cli ", "subquad ", line) for line in lines]
    return [shlex.split(call, comments=True)[1:] for call in calls if call.startswith("subquad ")]


def run(sources: list[str], name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, name, "exec"), names)
    return names


def settings_of(words: list[str]) -> list[str]:
    return [words[n + 1] for n, word in enumerate(words) if word == "--set"]


@pytest.mark.parametrize("name", [name for name in NAMES if commands(name)])
def test_every_command_exists(name: str) -> None:
    """Options are parsed as on the command line, and settings are checked against the task."""
    group: Any = typer.main.get_command(app)
    for command, *words in commands(name):
        group.commands[command].make_context(command, list(words))
        if command == "train":
            task, config = configure(words[0], settings_of(words))
            with torch.device("meta"):
                task.make_model(config.model)


def invoke(command: str, *words: str) -> None:
    done = CliRunner().invoke(app, [command, *words])
    assert done.exit_code == 0, done.output


def test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's commands in order, with a smaller model, then its Python code."""
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("The sea was grey and the ships lay still. " * 60)
    for command, *words in commands("own_text.md"):
        if command == "train" and "--resume" not in words:
            words += [word for setting in SMALLER for word in ("--set", setting)]
        if command == "generate":
            words += ["--steps", "20"]
        invoke(command, *words)
    names = run(blocks("own_text.md", "python"), "own_text.md")
    without = names["model"].generate(names["first"].tokens[:, -2:-1], 40, seed=1, state=names["first"].state)
    assert not torch.equal(without, names["rest"])  # the last token makes a difference


def test_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run([source for source in blocks("own_model.md", "python") if "lightning" not in source], "own_model.md")
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["written"].tolist() == [[1, 2, 3, 4, 1, 2, 3, 4]]
    assert names["z"].shape == (2, 30, 64)


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's commands and Python code in order, with fewer mechanisms, lengths and steps, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subquad.studies.compare._elsewhere", work)
    write, read = blocks("compare_own_data.md", "python")
    run([write], "compare_own_data.md")
    for command, *words in commands("compare_own_data.md"):
        smaller = {
            "compare": ["--mechanisms", "linear", "--lengths", "256,512", "--steps", "2", "--repeats", "1"],
            "recommend": ["--length", "512"],
            "report": [],
        }
        invoke(command, *words, *smaller[command])
    names = run([read], "compare_own_data.md")
    assert set(names["learned"]) == {"linear", "softmax"}
    assert Path("runs/mine/report.html").is_file()


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = run(blocks("generate.md", "python"), "generate.md")
    assert names["three"].shape == (3, 10)
    assert names["b"] in names["streams"].running


def _share_a_sequence() -> None:
    names = run(blocks("sequence_parallel.md", "python"), "sequence_parallel.md")
    assert names["written"].shape == (1, 8)
    assert names["group"].sent["states"] > 0
    assert ranks.active() is None


def test_sequence_parallel() -> None:
    """The guide's script on two ranks."""
    together(2).run(_share_a_sequence)


def test_gpu() -> None:
    run(blocks("gpu.md", "python"), "gpu.md")


def test_mechanisms() -> None:
    names = run(blocks("mechanisms.md", "python"), "mechanisms.md")
    assert names["o"].shape == (1, 1000, 4, 16)


def test_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's Python code against a server of text and one of images."""
    pytest.importorskip("starlette")
    from subquad.models import LanguageModel
    from subquad.serve.server import make_service
    from subquad.serve.settings import ServeSettings
    from tests.serve.test_http import Live

    sizes: dict[str, Any] = {"dim": 16, "depth": 1, "heads": 2, "mechanism": "linear"}
    LanguageModel(vocab=256, positions="none", **sizes).save(tmp_path / "text")
    LanguageModel(vocab=17, positions="grid", shape=(4, 4), max_length=16, **sizes).save(tmp_path / "images")
    options = ServeSettings(device="cpu", slots=4)
    text, images = (Live(make_service(str(tmp_path / name), options)) for name in ("text", "images"))
    try:
        for source in blocks("serve.md", "python"):
            names = run(
                [source.replace("http://127.0.0.1:8000", text.url).replace("http://127.0.0.1:8001", images.url)],
                "serve.md",
            )
    finally:
        text.stop()
        images.stop()
    assert max(names["pixels"]) < 16


def test_hugging_face_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(blocks("hugging_face_attention.md", "python"), "hugging_face_attention.md")
    assert names["report"] == dict.fromkeys([1, 3], ("q", "k", "v", "o"))
    assert names["loss"] < 2.5
    assert names["second"].shape == (1, 40)


def test_linearise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's Python code, which makes the teacher, then its commands."""
    monkeypatch.chdir(tmp_path)
    names = run(blocks("linearise.md", "python"), "linearise.md")
    assert sum(row["softmax"] for row in names["report"]["layers"]) == 1
    assert names["written"].shape[1] > 7
    assert len(names["drawn"]) == 20
    Path("student").rename("made")
    for command, *words in commands("linearise.md"):
        small = ["align_steps=2", "align_length=64", "distil_steps=1", "distil_length=64"]
        more = ["--lengths", "32", *(word for setting in small for word in ("--set", setting))]
        if command == "serve":
            answers(words[0])
            continue
        invoke(command, *words, *(more if command == "linearise" else []))


def answers(folder: str) -> None:
    """A server of that folder, which otherwise would run on."""
    pytest.importorskip("starlette")
    from subquad.serve.server import make_service
    from subquad.serve.settings import ServeSettings
    from tests.serve.test_http import Live

    live = Live(make_service(folder, ServeSettings(device="cpu", slots=2)))
    done = live.post("/v1/completions", prompt="The sea", max_tokens=5, ignore_eos=True)
    live.stop()
    assert len(done.json()["choices"][0]["tokens"]) == 5


def test_add_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's mechanism obeys the laws, and its known answer holds."""
    definition, known_answer = blocks("add_mechanism.md", "python")
    module = types.ModuleType("subquad.mechanisms.decay")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(definition, "add_mechanism.md", "exec"), vars(module))
    decay = vars(module)["Decay"]
    monkeypatch.setitem(MECHANISMS, "decay", decay)
    for causal in (False, True):
        case = laws.Case(decay, {"dim": 12, "heads": 2, "causal": causal, "half_life": 3})
        laws.forward_equals_reference(case)
        laws.large_tokens_equal_reference(case)
        laws.padding_is_invisible(case, [laws.T, 13, 0, 1])
        laws.pattern_is_a_picture(case)
        laws.cost_grows_as_documented(case, 256, 1024)
    laws.strictly_causal(case)
    assert all(card(decay))
    torch.manual_seed(0)
    run([f"import torch\n{known_answer}"], "add_mechanism.md")


def test_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's command on a small run, then its Python code with fewer steps."""
    pytest.importorskip("transformers", reason="needs the extra: pip install 'subquad[hf]'")
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("The sea was grey and the ships lay still. " * 60)
    torch.manual_seed(0)
    LanguageModel(vocab=256, dim=16, depth=1, heads=2, positions="none").save("runs/mine/model")
    Path("runs/mine/config.json").write_text('{"task": "text"}')
    for command, *words in commands("hugging_face.md"):
        invoke(command, *words)
    small = 'max_steps=3, use_cpu=True, disable_tqdm=True, save_strategy="no"'
    names = run(
        [code.replace("max_steps=60", small) for code in blocks("hugging_face.md", "python")], "hugging_face.md"
    )
    assert all(text.lstrip("\0").startswith(("The sea ", "Ships ")) for text in names["written"])
    assert isinstance(load("trained"), LanguageModel)


class StandIn(types.ModuleType):
    """A stub with the parts of Lightning that the guide uses."""

    LightningModule = nn.Module

    class Trainer:
        def __init__(self, max_epochs: int, **_: Any):
            self.epochs = max_epochs

        def fit(self, module: Any, loader: Any) -> None:
            optimiser = module.configure_optimizers()
            for _ in range(self.epochs):
                for index, batch in enumerate(loader):
                    optimiser.zero_grad()
                    module.training_step(batch, index).backward()
                    optimiser.step()


@pytest.mark.filterwarnings("ignore")  # Lightning warns about loaders with few workers and about its dependencies
@pytest.mark.parametrize("real", [False, True])
def test_lightning(real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if real:
        pytest.importorskip("lightning", reason="Lightning is not a dependency; the guide also runs with a stand-in")
    else:
        monkeypatch.setitem(sys.modules, "lightning", StandIn("lightning"))
    monkeypatch.chdir(tmp_path)
    sources = blocks("own_model.md", "python")
    wanted = [source for source in sources if source.startswith("import ") or "def batch" in source]
    names = run([source.replace("range(60)", "range(1)") for source in wanted], "own_model.md")
    assert names["after"] < 0.5 * names["before"]
