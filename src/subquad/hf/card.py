"""The README.md of a folder that goes to a hub."""

from typing import Any

TAGS = ("subquad", "efficient-attention")
PIPELINES = {"LanguageModel": "text-generation", "Classifier": "text-classification"}
AUTO = {"LanguageModel": "AutoModelForCausalLM", "Classifier": "AutoModelForSequenceClassification"}


def write_card(model: Any, name: str, tokenizer: bool) -> str:
    """A model card: what it is, and how to load it. `tokenizer`: whether the folder has one."""
    kind, config = type(model).__name__, model.config
    stack = config.transformer
    mechanisms = ", ".join(dict.fromkeys(spec.name for spec in stack.mechanism))
    count = sum(parameter.numel() for parameter in model.parameters())
    auto = AUTO[kind]
    words = [f'tokenizer = AutoTokenizer.from_pretrained("{name}")'] if tokenizer else []
    names = f"{auto}, AutoTokenizer" if tokenizer else auto
    lines = [
        "---", "library_name: transformers", f"pipeline_tag: {PIPELINES[kind]}",
        "tags:", *(f"- {tag}" for tag in dict.fromkeys((*TAGS, *mechanisms.split(", ")))), "---", "",
        f"# {name}", "",
        f"A {kind} of subquad: {stack.depth} layers of width {stack.dim} with "
        f"{stack.heads} heads, mechanism {mechanisms}, {count:,} parameters.", "",
        "```python", f"from transformers import {names}",
        "import subquad.hf  # pip install 'subquad[hf]'; no remote code", "",
        f'model = {auto}.from_pretrained("{name}")', *words, "```", "",
        "`subquad.load` reads the folder too.", "",
    ]  # fmt: skip
    return "\n".join(lines)
