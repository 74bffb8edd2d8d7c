"""What `subquad generate` does: load a saved model, find the task that writes what it generates, and let it write."""

from rich.console import Console

from subquad.checks import refuse
from subquad.machine import available
from subquad.models import LanguageModel, shipped
from subquad.models.saving import check_finite, read_header
from subquad.tasks import writer_of
from subquad.training.task import WriteOptions, Written


def generate(checkpoint: str, options: WriteOptions, console: Console, device: str = "cpu") -> Written:
    """`checkpoint`: a run, a saved model's folder, or a shipped checkpoint's name. Options that do not apply to what
    the model writes raise ValueError."""
    folder = shipped.find(checkpoint)
    card, kind = shipped.card(folder), read_header(folder)["model"]
    if kind != LanguageModel.__name__:
        raise ValueError(f"{folder} is a saved {kind}, which generates nothing here: accepted is a language model")
    model = LanguageModel.load(folder, available(device))
    check_finite(model, folder)
    if device == "cpu":
        model = model.float()  # it is shipped in 16 bits, which are slow on CPUs
    task = writer_of(model, card, options.shape)
    for name, value in vars(options).items():
        if value is not None and name not in (*task.write_options, "sampling", "seed"):
            accepted = ", ".join(f"--{option}" for option in task.write_options)
            refuse(name, str(value), f"{accepted} and those of sampling for {folder}, which writes {task.writes}")
    data = card.get("data")
    return task.write(model, data if isinstance(data, dict) else {}, options, console)
