"""What the README says is what the code does."""

import re
from pathlib import Path

from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.card import card

README = Path(__file__).parents[1] / "README.md"


def table() -> str:
    lines = [
        "| name | family | training cost | causal | bidirectional | cross | state | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, cls in MECHANISMS.items():
        traits, facts = cls.traits, card(cls)
        marks = " | ".join("yes" if can else "-" for can in (traits.causal, traits.bidirectional, traits.cross))
        source = facts.source
        if re.fullmatch(r"\d{4}\.\d{4,5}", source):
            source = f"[{source}](https://arxiv.org/abs/{source})"
        lines.append(
            f"| `{name}` | {cls.family} | {facts.training_cost} | {marks} | {traits.state or '-'} | {source} |"
        )
    return "\n".join(lines)


def test_the_table_of_mechanisms_is_current() -> None:
    assert table() in README.read_text(), f"put this into README.md:\n{table()}"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


def test_every_folder_named_exists() -> None:
    root = README.parent
    for path in re.findall(r"^(src/\S+|bench/|results/|tests/)", README.read_text(), re.MULTILINE):
        assert (root / path).is_dir(), path
