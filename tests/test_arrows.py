"""Which folder of the package may import which. All imports count, also those inside functions."""

import ast
from pathlib import Path

import pytest

import subquad

SOURCE = Path(subquad.__file__).parent

# Each folder may import only those above it in this list. Folders on the same line do not import each other.
PLAN = (
    ("checks", "gradients"),
    ("disk", "graphs", "machine", "pool", "ranks"),
    ("ops",),
    ("mechanisms",),
    ("nn", "models"),
    ("data",),
    ("training", "measure"),
    ("tasks",),
    ("studies",),
    ("report",),
    ("hf",),
    ("serve",),
    ("commands",),
    ("cli",),
)
FLOOR = {room: floor for floor, rooms in enumerate(PLAN) for room in rooms}


def room_of(module: str) -> str:
    """ "subquad.models.blocks" -> "models"; the package itself, "subquad", is not a folder."""
    return module.split(".")[1] if "." in module else ""


def imports(file: Path, known: set[str]) -> list[tuple[int, str]]:
    """(line, folder) of each import of this package in a file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, room_of(alias.name)) for alias in node.names if alias.name.startswith("subquad.")]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import hides which room it is from"
            if node.module == "subquad":
                found += [(node.lineno, alias.name) for alias in node.names if alias.name in known]
            elif node.module is not None and node.module.startswith("subquad."):
                found.append((node.lineno, room_of(node.module)))
    return found


def wrong_arrows(source: Path) -> list[str]:
    rooms = {path.stem: path for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    del rooms["__init__"]
    wrong = [f"{path}: the plan has no room {room!r}" for room, path in sorted(rooms.items()) if room not in FLOOR]
    for room in sorted(rooms.keys() & FLOOR.keys()):
        files = sorted(rooms[room].rglob("*.py")) if rooms[room].is_dir() else [rooms[room]]
        for file in files:
            for line, other in imports(file, rooms.keys() | FLOOR.keys()):
                if other != room and not (other in FLOOR and FLOOR[other] < FLOOR[room]):
                    wrong.append(f"{file}:{line}: {room} imports {other}")
    return wrong


def test_every_import_points_down() -> None:
    assert not wrong_arrows(SOURCE), "\n".join(wrong_arrows(SOURCE))


@pytest.mark.parametrize(
    ("room", "text", "message"),
    [
        ("models", "import subquad.training.loop\n", "models imports training"),
        ("ops", "def f():\n    from subquad.models import load\n", "ops imports models"),
        ("data", "from subquad import cli\n", "data imports cli"),
        ("training", "from subquad.measure.growth import exponent\n", "training imports measure"),
        ("attic", "", "the plan has no room 'attic'"),
    ],
)
def test_a_wrong_arrow_is_named(tmp_path: Path, room: str, text: str, message: str) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / room).mkdir()
    (tmp_path / room / "__init__.py").write_text(text)
    (wrong,) = wrong_arrows(tmp_path)
    assert message in wrong
    assert not text or f"__init__.py:{text.count(chr(10))}: " in wrong
