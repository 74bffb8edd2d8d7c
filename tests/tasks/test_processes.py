import subquad
from subquad.tasks.processes import run_all


def test_commands_run_side_by_side_and_tell_what_they_say() -> None:
    lines: list[tuple[str, str]] = []
    commands = {"right": ["--version"], "wrong": ["show", "no such mechanism"]}
    found = {name: (code, last) for name, code, last in run_all(commands, 2, lambda *line: lines.append(line))}
    assert found["right"][0] == 0
    assert f"subquad {subquad.__version__}" in found["right"][1]
    assert found["wrong"][0] == 2
    assert any(name == "wrong" and "no such mechanism" in line for name, line in lines)
