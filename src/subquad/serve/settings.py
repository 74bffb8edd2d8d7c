"""The options of `subquad serve`, checked when they are made."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subquad.checks import at_least, check_plain, one_of, refuse
from subquad.disk import check_folder

GB, MB = 1_000_000_000, 1_000_000
SLOTS = {"cuda": 256, "cpu": 16}  # on a CPU, whose steps take longer with each slot, one answer is quick with a few


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Fields with a help text are options of `subquad serve`."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for all networks.")
    port: int = _option(8000, "0 takes a free one.")
    slots: int | None = _option(
        None, "Requests that run at the same time; by default 256 on a GPU and 16 on a CPU. A step computes all slots."
    )
    queue: int = _option(1024, "Requests that may wait for a slot; others are answered 429.")
    capacity: int | None = _option(None, "Tokens of a prompt with its answer; by default as many as the model allows.")
    cache_gb: float = _option(4.0, "Memory for states of prompts that were read; 0: none.")
    cache_dir: Path | None = field(
        default=None, metadata={"help": "Also keep these states in this folder, across restarts."}
    )
    draft: str | None = _option(None, "A smaller model that proposes tokens: a checkpoint, a run or a folder.")
    name: str | None = _option(None, "What clients call the model; by default the folder's name.")
    device: str = _option("auto", "cpu, cuda, or auto: a GPU if there is one.")
    dtype: str = _option("auto", "float32 or bfloat16; auto: float32 on a CPU, on a GPU as it was saved.")
    api_key_env: str | None = _option(None, "Environment variable that holds API keys, with commas between them.")
    cors: str | None = _option(None, "Origins of web pages that may call, with commas between them.")
    chat_template: Path | None = field(
        default=None, metadata={"help": "A chat template in Jinja; by default the folder's."}
    )
    body_mb: float = _option(16.0, "The largest body of a request.")
    drain: float = _option(30.0, "Seconds for requests to finish after SIGTERM or Ctrl-C.")
    log_prompts: bool = _option(False, "Also log prompts, as tokens.")

    def __post_init__(self) -> None:
        at_least(self, queue=1)
        for name in ("slots", "capacity"):
            if getattr(self, name) is not None:
                at_least(self, **{name: 1})
        if not 0 <= self.port <= 65535:
            refuse("port", self.port, "0 to 65535")
        one_of(self, dtype=("auto", "float32", "bfloat16"))
        for name, least, most in (("cache_gb", 0, 1e6), ("body_mb", 0.001, 1e5), ("drain", 0, 1e6)):
            check_plain(name, getattr(self, name), float)
            if not least <= getattr(self, name) <= most:
                refuse(name, getattr(self, name), f"a number from {least:g} to {most:g}")
        if self.cache_dir is not None:
            check_folder("cache_dir", self.cache_dir)
        if self.name is not None and not (0 < len(self.name) <= 200 and self.name.isprintable()):
            refuse("name", self.name, "1 to 200 printable characters")
        if self.chat_template is not None and not self.chat_template.is_file():
            refuse("chat_template", str(self.chat_template), "a file with a chat template")
