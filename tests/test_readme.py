"""The README and the pages it links to agree with the files and the code."""

import hashlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
PROGRAM = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
PAGES, TABLES, renewed = PROGRAM["PAGES"], PROGRAM["TABLES"], PROGRAM["renewed"]
README, RESULTS = ROOT / "README.md", ROOT / "results"
LINKING = [*PAGES, "CONTRIBUTING.md", *(f"guides/{path.name}" for path in (ROOT / "guides").glob("*.md"))]


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_tables_agree_with_the_files(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- table " in text
    assert renewed(text) == text, "run: python benchmarks/tables.py"


def test_every_table_is_on_a_page() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert sorted(re.findall(r"<!-- table (\w+) -->", text)) == sorted(TABLES)


def test_a_wrong_figure_is_replaced() -> None:
    text = README.read_text()
    assert renewed(text.replace("1.02 ms", "1.01 ms")) == text != text.replace("1.02 ms", "1.01 ms")


@pytest.mark.parametrize("page", sorted(set(LINKING)))
def test_every_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    local = [target for target in targets if not target.startswith("http")]
    missing = [target for target in local if not ((ROOT / page).parent / target).exists()]
    assert not missing


def test_the_readme_fits_one_screen() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 65
    assert max(map(len, lines)) <= 150


def example(number: int) -> str:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[number]


def test_the_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(example(0), names)
    assert names["y_t"].shape == (2, 64)
    assert len(names["tokens"]) == 10


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_the_example_of_hugging_face_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from subquad.hf import byte_tokenizer

    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
    byte_tokenizer().save_pretrained("model")
    Path("my.txt").write_text("The sea was calm, and the ships lay still. " * 30)
    names: dict[str, Any] = {}
    exec(example(1), names)
    assert names["written"].startswith("The sea ")
    assert len(names["written"].encode()) >= len("The sea ") + 40
    assert json.loads(Path("mine/config.json").read_text())["subquad"]["replaced"][0]["layers"] == [1]


def test_every_result_says_how_to_take_it_again() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (RESULTS / "README.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w/]+\.(?:json|png))`", row)}
    assert named == {p.relative_to(RESULTS).as_posix() for p in RESULTS.rglob("*.*") if p.name != "README.md"}


@pytest.mark.parametrize("name", ["scaling", "generated", "lra/small", "train"])
def test_the_pictures_are_drawn_from_the_results(name: str) -> None:
    assert f"]({name}.png)" in (RESULTS / "README.md").read_text()
    origin = Image.open(RESULTS / f"{name}.png").info
    drawn_from = (ROOT / origin["Source"]).read_bytes()
    assert hashlib.sha256(drawn_from).hexdigest() == origin["SHA-256"], f"run benchmarks/pictures.py: {name}.png is old"


def test_the_generated_images_agree_with_the_results() -> None:
    images = results("generated")
    rows, columns, _ = images["shape"]
    sheet = np.asarray(Image.open(RESULTS / "generated.png").convert("L"), dtype=np.float64)
    times, frame = 2, 1  # each pixel is a square of this size, with a line below and beside each image
    first = sheet[: times * rows, : times * columns][::times, ::times]
    image = np.asarray(images["images"][0], dtype=np.float64).reshape(rows, columns)
    assert np.abs(first - image / (images["shades"] - 1) * 255).max() <= 1
    assert sheet.shape == (4 * (times * rows + frame), 16 * (times * columns + frame))


def test_every_place_named_exists() -> None:
    places = re.findall(
        r"^(?:src|benchmarks|results|checkpoints|guides|tests)/\S*",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    assert len(places) > 10
    for place in places:
        path = ROOT / place
        assert path.is_dir() if place.endswith("/") else path.is_file(), place
