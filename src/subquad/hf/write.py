"""`subquad generate` for folders that transformers saved: text with their tokenizer and their `generate`."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from subquad.checks import refuse
from subquad.hf.linearise.models import quiet
from subquad.machine import available
from subquad.training.task import WriteOptions

OPTIONS = ("prompt", "steps")


class Shown(TextStreamer):
    """Prints text as it comes."""

    def __init__(self, tokenizer: Any, console: Console):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.console.print(text, end="\n" if stream_end else "", markup=False, highlight=False, soft_wrap=True)


def write_text(folder: Path, options: WriteOptions, console: Console, device: str = "cpu") -> None:
    """Print the prompt and its continuation. Layers replaced by `replace` or `linearise` are made again."""
    for name, value in vars(options).items():
        if value is not None and name not in (*OPTIONS, "sampling", "seed"):
            accepted = ", ".join(f"--{option}" for option in OPTIONS)
            refuse(name, str(value), f"{accepted} and those of sampling for {folder}, which transformers saved")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be read: {error}") from error
    device = available(device)
    kind = torch.float32 if device == "cpu" else "auto"
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).to(device).eval()
    prompt, sampling = options.prompt or "", options.sampling
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if first is None:
            refuse("prompt", prompt, "a text of at least one token: this tokenizer has no token to begin with")
        ids = [first]
    how: dict[str, Any] = {"do_sample": sampling.temperature > 0, "repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature > 0:
        how |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}
        how["min_p"] = sampling.min_p or None
    console.print(prompt, end="", markup=False, highlight=False, soft_wrap=True)
    start = torch.tensor([ids], device=device)
    end = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    torch.manual_seed(options.seed)
    model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=500 if options.steps is None else options.steps,
        pad_token_id=end, streamer=Shown(tokenizer, console), **how,
    )  # fmt: skip
