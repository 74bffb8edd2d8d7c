"""What the rules of the running sum remember: the pictures and curves of the lesson on them, computed with the op."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.data import digits
from subquad.ops.linear.rules import RuleName
from subquad.report.charts import family
from subquad.report.runs import Json

FADE = 0.8  # what a gated rule keeps of its state at each pair, in the picture of digits
SLOW_FADE = 0.95  # and in the curves
OVERLAP = 0.3  # of the two keys of the picture: a · b
WIDTH, DRAWS = 32, 128  # the width of keys, and how many draws the curves average
COUNTS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of pairs in the first view of the curves
TOLD, AGES = 64, range(1, 65, 4)  # the pairs of the second view, and the ages of those whose errors it shows
SHOWN = (3, 7, 5)  # the digits that are written: for key a, then for key b, then for key a again


class Rule(NamedTuple):
    update: str
    takes: str
    forgets: str
    mechanisms: tuple[str, ...]


RULES: dict[RuleName, Rule] = {
    "linear": Rule("S ← S + k vᵀ", "", "nothing: all values under a key add up",
                   ("linear",)),
    "gated": Rule("S ← Diag(a) S + k vᵀ", "a in [0, 1]", "a little of everything at each token",
                  ("retnet", "gla", "mamba2")),
    "delta": Rule("S ← S + β k (v − Sᵀk)ᵀ", "β in [0, 1]", "only what the same key read before",
                  ("deltanet",)),
    "gated_delta": Rule("S ← Diag(a) S, then S ← S + β k (v − Sᵀk)ᵀ", "a and β",
                        "both: it can clear everything, or one key", ("gated_deltanet",)),
}  # fmt: skip


class Read(NamedTuple):
    """What a rule reads for each of two keys, after three pairs were written."""

    rule: str
    first: Tensor  # [8, 8]
    second: Tensor


def memory(rule: RuleName, keys: Tensor, values: Tensor, fade: float) -> Tensor:
    """The state [B, K, V] after writing pairs of keys [B, N, K] and values [B, N, V], with β = 1."""
    from subquad.ops import linear_attention

    k, v = keys[:, :, None], values[:, :, None]  # one head
    gate = k.new_full(k.shape[:3], math.log(fade)) if "gated" in rule else None
    beta = k.new_ones(k.shape[:3]) if "delta" in rule else None
    _, state = linear_attention(
        k, k, v, rule=rule, log_gate=gate, beta=beta,
        feature_map="identity", normalize=False, return_state=True, impl="torch",
    )  # fmt: skip
    return state.s[:, 0]


def written() -> list[Tensor]:
    """The three digits [8, 8] from 0 to 1: the first test image of each."""
    data = digits.load()[1]
    return [data.pixels[int((data.labels == n).nonzero()[0])].view(8, 8) / 16 for n in SHOWN]


def read_back() -> list[Read]:
    """For each rule, what keys a and b read after a was written, then b, then a again."""
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([OVERLAP, math.sqrt(1 - OVERLAP**2)])
    keys, values = torch.stack((a, b, a))[None], torch.stack(written()).flatten(1)[None]
    reads = []
    for rule in RULES:
        first, second = (torch.stack((a, b)) @ memory(rule, keys, values, FADE)[0]).view(2, 8, 8)
        reads.append(Read(rule, first, second))
    return reads


@functools.cache
def errors(rule: RuleName, pairs: int) -> Tensor:
    """The squared error of what each key reads after all pairs were written, over the squared value: [N], oldest first.

    Keys are random directions, values random numbers.
    """
    generator = torch.Generator().manual_seed(pairs)
    keys, values = (torch.randn(DRAWS, pairs, WIDTH, generator=generator) for _ in range(2))
    keys = torch.nn.functional.normalize(keys, dim=-1)
    missed = keys @ memory(rule, keys, values, SLOW_FADE) - values  # [B, N, V]
    return (missed.square().sum(-1) / values.square().sum(-1)).mean(0)


def curves() -> Json:
    """Two views: the error over the number of pairs, and over how long ago a pair was written."""
    by_count = {rule: [[n, float(errors(rule, n).mean())] for n in COUNTS] for rule in RULES}
    by_age = {rule: [[age, float(errors(rule, TOLD)[-age])] for age in AGES] for rule in RULES}
    count = {"label": "pairs written", "short": "pairs =", "unit": "tokens", "log": True}
    age = {"label": f"pairs ago, of {TOLD}", "short": "pairs ago =", "unit": ""}
    y = {"label": "error of what is read", "short": "error", "unit": ""}
    rising = {**y, "log": True}
    return {
        "views": [
            {"label": f"Error over pairs, keys of width {WIDTH}", "x": count, "y": rising, "series": _series(by_count)},
            {"label": f"Error over age, {TOLD} pairs in width {WIDTH}", "x": age, "y": y, "series": _series(by_age)},
        ],
        "chosen": list(RULES),
    }


def _series(points: dict[RuleName, list[list[float]]]) -> list[Json]:
    return [
        {"name": rule, "family": family(RULES[rule].mechanisms[0]), "points": line} for rule, line in points.items()
    ]
