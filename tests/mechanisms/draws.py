"""Random cases and thresholds, the same in every run: head widths, options and lengths that nobody chose by hand."""

import dataclasses
import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.base import Options
from tests.mechanisms.laws import Case

WIDTHS = (3, 5, 8, 12, 12, 20, 40)  # of a head; most are no power of two

# The values to draw each option from; a function takes the number of heads. test_draws checks that none is missing.
VALUES: dict[str, dict[str, tuple[Any, ...] | Callable[[random.Random, int], Any]]] = {
    "softmax": {"projections": (True, True, False), "scale": (None, None, 0.3)},
    "additive": {"hidden": (None, 1, 5)},
    "linear": {
        "feature_map": ("elu+1", "relu", "exp", "cosformer", "cosformer", "hedgehog", "taylor"),
        "eps": (1e-6, 1e-2),
        "features": (None, None, None, 2, 5),
        "length": (None, None, None, 60, 90),
    },
    "efficient": {"normalize": ("softmax", "scaling")},
    "rfa": {
        "features": (7, 24, 40),
        "gate": (False, True),
        "tau": (1.0, 0.5, 0.3),
        "orthogonal": (False, True),
        "eps": (0.3, 1.0),
    },
    "performer": {
        "features": (0, 9, 30),
        "kernel": ("softmax", "hyperbolic", "trig", "relu"),
        "orthogonal": (False, True),
        "norms": ("chi", "sqrt"),
        "eps": (None, None, 1e-2),
    },
    "local": {"window": (0, 1, 6, 19, 50)},
    "strided": {"stride": (1, 2, 9, 40), "combine": ("merge", "interleave", "heads")},
    "fixed": {"block": (1, 5, 9, 33, 50), "summary": (1, 2, 5), "combine": ("merge", "interleave", "heads")},
    "longformer": {
        "window": (0, 2, 9, 50),
        "dilation": lambda draw, heads: draw.choice((1, 3, tuple(draw.choice((1, 2, 5)) for _ in range(heads)))),
        "global_tokens": (0, 1, 4),
    },
    "bigbird": {"block": (1, 4, 7, 50), "random": (0, 1, 3), "construction": ("itc", "etc")},
    "reformer": {
        "rounds": (1, 2, 4),
        "chunk": (1, 3, 8, 50),
        "buckets": (1, 2, 6, (2, 4)),
        "strict_causal": (True, True, False),
    },
    "routing": {
        "clusters": (1, 3, 7),
        "window": (1, 4, 9, 50),
        "share_qk": (None, True, False),
        "decay": (0.999, 0.5),
        "scale": (None, None, 0.7),
        "strict_causal": (True, True, False),
    },
    "clustered": {
        "clusters": (1, 3, 9),
        "topk": (1, 4, 12, 60),
        "improved": (True, False),
        "bits": (5, 16, 63),
        "iterations": (0, 3),
        "block": (1, 2, 6, 16),
    },
    "sinkhorn": {
        "block": (1, 4, 9, 50),
        "iterations": (1, 5),
        "temperature": (0.75, 0.2),
        "sortcut": (None, None, 2),
    },
    "linformer": {"rank": (1, 5, 60), "share": ("none", "heads", "keyvalue", "layer")},
    "compressed": {"stride": (1, 2, 3, 5, 11)},
    "nystrom": {"landmarks": (1, 4, 9, 60), "conv": (0, 1, 5, 33), "iterations": (1, 6)},
    "synthesizer": {
        "kind": ("dense", "random", "fixed", "factorised_dense", "factorised_random", "dot", "dense+dot+fixed"),
        "rank": (1, 8),
    },
    "transformer_xl": {"memory": (1, 6, 17, 60)},
    "gmlp": {"expansion": (2, 4), "attention": (0, 3, 12)},
    "mlp_mixer": {"hidden": (1, 12)},
    "fnet": {},
    "retnet": {"expand_v": (1, 2, 3)},
    "gla": {"key_width": (None, 1, 5, 16), "rank": (1, 4, 16), "temperature": (1, 16)},
    "mamba2": {"expansion": (1, 2), "state": (1, 6, 20), "groups": (1, 2, 3)},
    "deltanet": {"expand_v": (1, 2, 3), "negative": (False, True)},
    "gated_deltanet": {"expand_v": (1, 2, 3), "negative": (False, True)},
    "mixed": {
        "parts": lambda draw, heads: (
            (draw.choice(("linear", "softmax")), heads - heads // 2),
            *([("local", heads // 2, {"window": draw.choice((2, 9))})] if heads > 1 else []),
        )
    },
}


# Sizes at which the package computes in another way, and smaller values, which sequences of the laws exceed. Results
# must be the same. test_draws checks that each is reached, and that no number in ops and mechanisms is missing.
Threshold = int | tuple[int, ...]
THRESHOLDS: dict[str, tuple[Threshold, ...]] = {
    "ops.additive.PAIRS": (1, 2000),
    "mechanisms.clustered.PAIRS_A_KEY": (0, 1000),
    "mechanisms.efficient.BLOCK": (2, 8),
    "mechanisms.efficient.LIMIT": (0, 1),
    "ops.convolve.BLOCK": (1, 7),
    "mechanisms.nystrom.PIECES": ((1,), (2, 1)),
    "ops.dense.PAIRS": (1, 300),
    "ops.dense.ROWS": (1, 5),
    "ops.linear.chunked.BLOCK": (2, 3),
    "ops.linear.chunked.SEGMENT": (64,),
    "ops.linear.rule_chunked.CHUNK": (1, 8),
    "ops.linear.rule_chunked.HEADS": (1, 3),
    "ops.linear.rule_chunked.SEGMENT": (7, 16),
    "ops.prefix.SUM_BLOCK": (2, 7),
    "ops.prefix.MAX_BLOCK": (1, 7),
    "ops.sparse.tiles.TILE": (1, 8),
    "ops.sparse.tiles.BUDGET": (1, 700),
    "ops.sparse.cache.ROWS": (1, 3),
    "ops.sparse.cache.GATHERED": (1, 400),
}


def drawn_case(name: str, causal: bool, number: int) -> Case:
    """The case with that number; its options are always valid."""
    cls, draw = MECHANISMS[name], random.Random(f"{name} {causal} {number}")
    while True:
        heads, length = draw.choice((1, 2, 3, 4)), draw.randint(34, 53)
        width = draw.choice([w for w in WIDTHS if heads * w <= 60])
        options: dict[str, Any] = {"dim": heads * width, "heads": heads, "causal": causal}
        options |= {"layer": draw.choice((0, 1)), "seed": draw.choice((0, 12345))}
        if "rotary" not in cls.unused and width % 2 == 0:
            options["rotary"] = draw.choice((False, False, True))
        if cls.traits.fixed_length:
            options["max_length"] = length + draw.choice((0, 6))
        for option, values in VALUES[name].items():
            options[option] = draw.choice(values) if isinstance(values, tuple) else values(draw, heads)
        try:
            cls(cls.options_type(**options))
        except ValueError:
            continue  # options that exclude each other
        return Case(cls, options, length)


def directions(name: str) -> Iterator[bool]:
    traits = MECHANISMS[name].traits
    yield from ([False] if traits.bidirectional else []) + ([True] if traits.causal else [])


def drawn_thresholds(seed: str) -> dict[str, Threshold]:
    """Some of the thresholds, lowered."""
    draw = random.Random(seed)
    return {name: draw.choice(values) for name, values in THRESHOLDS.items() if draw.random() < 0.6}


def set_threshold(monkeypatch: Any, name: str, value: Threshold) -> None:
    module, constant = name.rsplit(".", 1)
    monkeypatch.setattr(importlib.import_module(f"subquad.{module}"), constant, value)


def own_options(name: str) -> set[str]:
    base = {field.name for field in dataclasses.fields(Options)}
    return {field.name for field in dataclasses.fields(MECHANISMS[name].options_type)} - base - {"impl"}
