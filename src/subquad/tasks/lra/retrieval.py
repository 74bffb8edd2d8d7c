"""Retrieval: do two texts belong together? The same encoder reads each text without seeing the other.

Data      the arena's pairs of ACL Anthology papers, if data.folder is the folder with its new_aan_pairs.*.tsv files
          (147,086 / 18,090 / 17,437 pairs, 4,000 bytes each). Otherwise a stand-in, "IMDb same-movie pairs": half are
          two reviews of the same film, half are reviews of two films. Training has no films of validation or test
"""

import ast
import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from subquad.checks import at_least
from subquad.data import files
from subquad.data.generated import Arrays, generated, kept
from subquad.data.order import permutation
from subquad.models import Matcher
from subquad.tasks.kinds import directed
from subquad.tasks.lra.task import Classification
from subquad.tasks.lra.text import Texts, stored
from subquad.training.task import SPLITS, Batch, Source, Split

WORD = re.compile(rb"[a-z0-9']+")
STAND_IN = "IMDb same-movie pairs"
FILES = {split: f"new_aan_pairs.{'eval' if split == 'validation' else split}.tsv" for split in SPLITS}
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
SHARES: dict[Split, tuple[float, float]] = {"train": (0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}  # of films


def pairs(
    films: np.ndarray, liked: np.ndarray, split: Split, count: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(pairs of reviews [count, 2], labels [count]): label 1 for reviews of the same film, 0 for two different films.

    A model must not guess the label without comparing the texts. So both kinds of pairs draw reviews in the same way,
    from films with at least two reviews, and the two reviews agree on liking the film equally often in both kinds.
    """
    names, numbers, sizes = np.unique(films, return_inverse=True, return_counts=True)
    low, high = (int(share * len(names)) for share in SHARES[split])
    chosen = permutation(len(names), seed, len(names))[low:high]
    chosen = chosen[sizes[chosen] >= 2]
    if len(chosen) < 2:
        raise files.Broken(f"{len(names)} films are too few for pairs: {split} has {len(chosen)} with two reviews")
    order = np.argsort(numbers, kind="stable")
    first = np.cumsum(sizes) - sizes  # where each film's reviews begin in `order`
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, low, count])))
    reviews = np.concatenate([order[first[film] : first[film] + sizes[film]] for film in chosen])
    for value in np.unique(liked[reviews]):
        if len(np.unique(numbers[reviews[liked[reviews] == value]])) < 2:
            raise files.Broken(f"{split} has only one film with reviews labelled {value}: pairs need two")
    left = reviews[(random.random(count) * len(reviews)).astype(np.int64)]
    film = numbers[left]
    step = 1 + (random.random(count) * (sizes[film] - 1)).astype(np.int64)  # to another review of the same film
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    same = order[first[film] + (place[left] - first[film] + step) % sizes[film]]
    other = reviews[(random.random(count) * len(reviews)).astype(np.int64)]
    while (again := (numbers[other] == film) | (liked[other] != liked[same])).any():
        other[again] = reviews[(random.random(int(again.sum())) * len(reviews)).astype(np.int64)]
    labels = (permutation(count, seed + 1, count) % 2).astype(np.uint8)
    return np.stack((left, np.where(labels == 1, same, other)), axis=1), labels


def bag_of_words(task: "Retrieval") -> float:
    """% of test pairs of the stand-in that a threshold on the words they share gets right; chosen on validation."""
    texts = stored()
    words: dict[bytes, int] = {}
    used: dict[int, np.ndarray] = {}
    chosen = {split: pairs(texts["films"], texts["labels"], split, task.held_out, task.seed) for split in SPLITS[1:]}
    for row in np.unique(np.concatenate([rows.ravel() for rows, _ in chosen.values()])).tolist():
        start = texts["starts"][row]
        text = bytes(texts["text"][start : min(texts["starts"][row + 1], start + task.length)])
        used[row] = np.array(sorted({words.setdefault(word, len(words)) for word in WORD.findall(text.lower())}), int)
    seen = np.bincount(np.concatenate([*used.values()]), minlength=len(words))
    weight = np.log(len(used) / np.maximum(seen, 1)) ** 3  # rare words say more
    norms = {row: np.sqrt(weight[mine].sum()) + 1e-9 for row, mine in used.items()}

    def alike(rows: np.ndarray) -> np.ndarray:
        shared = [
            weight[np.intersect1d(used[a], used[b], True)].sum() / (norms[a] * norms[b]) for a, b in rows.tolist()
        ]
        return np.array(shared)

    (rows, labels), (test_rows, test_labels) = chosen["validation"], chosen["test"]
    scores = alike(rows)
    order = scores.argsort()
    right = np.concatenate(([labels.sum()], labels.sum() + np.cumsum(1 - 2.0 * labels[order])))  # by how many are below
    best = int(right.argmax())
    threshold = -np.inf if best == 0 else scores[order[best - 1]]
    return float(100 * ((alike(test_rows) > threshold) == test_labels).mean())


def read_tsv(path: Path) -> Arrays:
    """Read lines of label, id, id, text, text. The result holds all texts joined, two for each pair."""
    pieces, labels = [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != 5:
                raise files.Broken(f"{path}:{number} has {len(fields)} fields: accepted are label, two ids, two texts")
            if fields[0] not in LABELS:
                raise files.Broken(f"{path}:{number} has the label {fields[0][:20]!r}: accepted is 0 or 1")
            labels.append(LABELS[fields[0]])
            pieces += [_bytes(text) for text in fields[3:]]
    if not labels:
        raise files.Broken(f"{path} is empty: accepted are lines of label, two ids, two texts")
    return {
        "text": np.frombuffer(b"".join(pieces), np.uint8),
        "starts": np.cumsum([0, *map(len, pieces)]),
        "labels": np.array(labels, np.uint8),
    }


def _bytes(text: bytes) -> bytes:
    """The bytes of a text. The arena's files write them as Python literals, b'...' or b"...", with escapes."""
    if text[:2] in (b"b'", b'b"') and text[-1:] == text[1:2]:
        with contextlib.suppress(ValueError, SyntaxError):
            literal = ast.literal_eval(text.decode("ascii"))
            return literal if isinstance(literal, bytes) else text
    return text


@dataclass(frozen=True)
class Retrieval(Classification):
    length: int = 1000  # bytes of each text; 4,000 in the paper
    train: int = 96_000  # training pairs of the stand-in
    held_out: int = 8_000  # pairs each for validation and test
    seed: int = 0
    folder: str | None = None  # the folder of the arena's tsv files; None: the stand-in

    name: ClassVar[str] = "retrieval"
    classes: ClassVar[int] = 2
    stand_in: ClassVar[str | None] = STAND_IN

    def __post_init__(self) -> None:
        at_least(self, length=1, train=1, held_out=1, seed=0)

    def make_model(self, fields: Any) -> nn.Module:
        return Matcher(**{"vocab": self.vocab, "max_length": self.length, **directed(fields)})

    def unlabelled(self, batch: Batch) -> Batch:
        sides = {"tokens": ("a", "b"), "lengths": ("a_lengths", "b_lengths")}
        return {name: torch.cat([batch[side] for side in both]) for name, both in sides.items()}

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["a"], batch["b"], batch["a_lengths"], batch["b_lengths"])

    def source(self, split: Split) -> Source:
        if self.folder is None:
            texts, count = stored(), self.train if split == "train" else self.held_out
            rows, labels = pairs(texts["films"], texts["labels"], split, count, self.seed)
        else:
            path = Path(self.folder).expanduser() / FILES[split]
            if not path.exists():
                raise files.Missing(f"{path} is missing: data.folder holds {', '.join(FILES.values())}")
            texts = kept(generated() / f"{path.stem}_{files.mark(path)}", lambda: read_tsv(path))
            labels = texts["labels"]
            rows = np.arange(2 * len(labels)).reshape(-1, 2)
        return Texts(texts, {"a": rows[:, 0], "b": rows[:, 1]}, labels, self.length)
