"""The user's own tokens, for `subquad compare --data`: each predicted from those before it.

An .npy file holds integers, [N] or [N, T] with one sequence per row. In any other file the tokens are its bytes.
The last tenth is for testing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from subquad.data.text import Windows
from subquad.models import LanguageModel
from subquad.tasks.text import part_of_windows, window_loss
from subquad.training.config import TrainingConfig
from subquad.training.task import Batch, Loss, Source, Split, Task

LONGEST = 256  # tokens of a window
VALUES = 65536  # largest vocabulary
LEAST = 32  # tokens, or sequences


@dataclass(frozen=True, eq=False)
class RowWindows:
    """One window from each of the sequences [N, T]; in each epoch it starts at another place."""

    rows: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:
        start = int(np.random.default_rng([epoch, int(indices[0])]).integers(self.rows.shape[1] - self.length))
        windows = np.ascontiguousarray(self.rows[indices, start : start + self.length + 1])
        return {"tokens": torch.from_numpy(windows), "first": torch.zeros(len(indices), dtype=torch.int64)}


@dataclass(frozen=True)
class Tokens(Task):
    path: str

    name: ClassVar[str] = "tokens"
    metric: ClassVar[str] = "bits/token"
    model: ClassVar[Mapping[str, Any]] = {"mechanism": "linear", "dim": 64, "depth": 2, "heads": 2}
    training: ClassVar[TrainingConfig] = TrainingConfig(steps=200, batch=32)

    @property
    def data_name(self) -> str:
        return Path(self.path).name

    @property
    def tokens(self) -> np.ndarray:
        return load_tokens(Path(self.path))

    @property
    def held_out(self) -> int:
        """Tokens, or sequences, for testing."""
        return max(1, len(self.tokens) // 10)

    @property
    def length(self) -> int:
        """Tokens a window holds."""
        return min(LONGEST, (self.tokens.shape[1] if self.tokens.ndim == 2 else self.held_out) - 1)

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        return LanguageModel(**{"vocab": int(self.tokens.max()) + 1, "max_length": self.length, **fields})

    def source(self, split: Split) -> Source:
        """Validation uses the test part too, because it chooses nothing here."""
        training = split == "train"
        part = self.tokens[: -self.held_out] if training else self.tokens[-self.held_out :]
        return RowWindows(part, self.length) if part.ndim == 2 else Windows(part, self.length, shifted=training)

    def part(self, batch: Batch, rank: int, world: int) -> Batch:
        return part_of_windows(batch, rank, world)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return window_loss(model, batch)


@lru_cache(maxsize=1)
def load_tokens(path: Path) -> np.ndarray:
    """The tokens of a file, as int64; raises ValueError that says what is accepted."""
    data = f"data={str(path)!r}"
    if not path.is_file():
        raise ValueError(f"{data} cannot work: there is no such file")
    if path.suffix != ".npy":
        tokens = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64)
    else:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)  # the header may claim more than the file holds
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"{data} cannot work: accepted is an .npy array of integers") from error
        if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
            accepted = "integer tokens, [N] or [N, T] with a sequence a row"
            raise ValueError(f"{data} holds {array.dtype} of shape {list(array.shape)}: accepted are {accepted}")
        tokens = array.astype(np.int64)
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < VALUES:
            values = f"{tokens.min()} to {tokens.max()}"
            raise ValueError(f"{data} holds tokens from {values}: accepted are 0 to {VALUES - 1}")
    if tokens.shape[0] < LEAST or tokens.shape[-1] < 2:
        accepted = f"at least {LEAST}, or {LEAST} sequences"
        raise ValueError(f"{data} holds {list(tokens.shape)} tokens: accepted are {accepted}")
    return tokens
