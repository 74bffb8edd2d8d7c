"""How each task is trained, and the options of each mechanism. All mechanisms of a task have the same budget."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from subquad.checks import nearest
from subquad.mechanisms import causal_only, mechanism
from subquad.models.config import MixerLike, mixers
from subquad.studies.published import TABLES
from subquad.tasks.lra.task import SMALL

Size = Literal["small", "original", "deep"]
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A column of the published table."""

    task: str  # its name in TASKS
    title: str  # in the paper
    majority: float  # accuracy of always giving the most frequent answer, %
    training: Fields  # of the small model, for minutes instead of hours
    original: Fields  # the arena's own model ...
    original_training: Fields  # ... and how it is trained there
    deep: Fields  # the model of arXiv:2310.02980 ...
    deep_training: Fields  # ... and how it is trained on the task
    hidden: float  # the share of inputs that pretraining hides, there and here
    filling: Fields  # how every size is pretrained, where this differs from the training on the task
    data: Fields = field(default_factory=dict)  # for the small model
    original_data: Fields = field(default_factory=dict)  # for the arena's own
    model: Fields = field(default_factory=dict)  # of the small model, where it differs from other tasks
    deep_data: Fields = field(default_factory=dict)
    predict: Fields = field(default_factory=dict)  # options of the task `fill`

    def model_fields(self, size: Size) -> Fields:
        return {"small": self.model, "original": self.original, "deep": self.deep}[size]

    def training_fields(self, size: Size) -> Fields:
        return {"small": self.training, "original": self.original_training, "deep": self.deep_training}[size]

    def data_fields(self, size: Size) -> Fields:
        return {"small": self.data, "original": self.original_data, "deep": self.deep_data}[size]


WARM = {"warmup": 200, "evaluate_batch": 250, "evaluate_batches": 8, "keep": 1}
ADAM = {"betas": [0.9, 0.98], "eps": 1e-9, "keep": 1}
SLOW = {**ADAM, "batch": 32, "schedule": "inverse_sqrt", "weight_decay": 0.1}  # the original's training on text
READER = {"depth": 4, "positions": "sinusoidal", "pooling": "cls"}
# of arXiv:2310.02980: layers, widths, heads, learning rates, batches and hidden shares. Departures: far fewer updates,
# so the learning rate falls instead of staying; means instead of maxima over positions; sinusoidal positions beside
# rotary ones for text, rows and columns as waves for pictures
DEEP = {"schedule": "cosine", "evaluate_batch": 250, "evaluate_batches": 8, "keep": 1, "log_every": 100}
LAYERS = {"pooling": "mean", "dropout": 0.0}
FAR_APART = {**LAYERS, "positions": "sinusoidal", "rotary": True}  # rotary: if the mechanism has it
SELDOM = 50  # at least this many steps between evaluations: on a CPU an evaluation takes as long as 50 steps


def grid(side: int, positions: str = "grid") -> dict[str, Any]:
    """Positions that give a pixel its row and column: learning them from plain positions takes most of a short run."""
    return {"positions": positions, "shape": [side, side]}


RECIPES: dict[str, Recipe] = {
    "listops": Recipe(
        "listops", "ListOps", 17.0,
        {"steps": 2500, "batch": 32, "lr": 1e-3, **WARM},
        {**READER, "dim": 512, "heads": 8, "ff_dim": 1024, "head_hidden": 1024},
        {**SLOW, "steps": 5000, "lr": 1.6e-3, "warmup": 1000},
        {**FAR_APART, "dim": 512, "depth": 6, "heads": 8, "ff_dim": 2048},
        {**DEEP, "steps": 30_000, "batch": 32, "lr": 1e-4, "warmup": 1000},
        0.1,
        {"steps": 15_000, "batch": 32, "lr": 1e-3},
    ),
    "text": Recipe(
        "imdb", "Text", 50.0,
        {"steps": 2000, "batch": 32, "lr": 1e-3, **WARM},
        {**READER, "dim": 256, "heads": 4, "ff_dim": 1024, "head_hidden": 1024},
        {**SLOW, "steps": 20_000, "lr": 5.6e-4, "warmup": 8000},
        {**FAR_APART, "dim": 512, "depth": 6, "heads": 8, "ff_dim": 2048},
        {**DEEP, "steps": 20_000, "batch": 32, "lr": 1e-4, "warmup": 1000, "evaluate_batch": 100},
        0.15,
        {"steps": 20_000, "batch": 32, "lr": 5e-4},
        deep_data={"length": 4096},
    ),
    "retrieval": Recipe(
        "retrieval", "Retrieval", 50.0,
        {"steps": 2000, "batch": 32, "lr": 1e-3, **WARM},
        {**READER, "dim": 128, "heads": 4, "ff_dim": 512, "head_hidden": 512},
        {**SLOW, "steps": 5000, "lr": 5.6e-4, "warmup": 8000},
        {**FAR_APART, "dim": 128, "depth": 4, "heads": 4, "ff_dim": 512},
        {**DEEP, "steps": 20_000, "batch": 32, "lr": 5e-4, "warmup": 1000, "evaluate_batch": 100},
        0.15,
        {"steps": 10_000, "batch": 32, "lr": 5e-3},
        original_data={"length": 4000},
        deep_data={"length": 4000},
    ),
    "image": Recipe(
        "image", "Image", 10.0,
        {"steps": 8000, "batch": 64, "lr": 2e-3, **WARM},
        {"dim": 128, "depth": 1, "heads": 8, "ff_dim": 128, "positions": "learned", "pooling": "cls", "dropout": 0.3},
        {"steps": 35_000, "batch": 256, "lr": 5e-4, "warmup": 175, "schedule": "cosine", "weight_decay": 0.0, **ADAM},
        {**LAYERS, **grid(32, "waves"), "dim": 64, "depth": 3, "heads": 4, "ff_dim": 128},
        {**DEEP, "steps": 80_000, "batch": 50, "lr": 1e-3, "warmup": 2000},
        0.5,
        {"steps": 40_000, "batch": 32, "lr": 1e-3},
        data={"pixels": "values"},
        model=grid(32, "waves"),
        deep_data={"pixels": "values"},
        predict={"predict": "brightness"},
    ),
    "pathfinder": Recipe(
        "pathfinder", "Pathfinder", 50.0,
        {"steps": 14_000, "batch": 128, "lr": 6e-4, **WARM},
        {"dim": 128, "depth": 4, "heads": 8, "ff_dim": 128, "positions": "learned", "pooling": "mean"},
        {"steps": 62_400, "batch": 512, "lr": 1e-3, "warmup": 312, "schedule": "cosine", "weight_decay": 0.0, **ADAM},
        {**LAYERS, **grid(32, "waves"), "dim": 128, "depth": 4, "heads": 8, "ff_dim": 128},
        {**DEEP, "steps": 200_000, "batch": 32, "lr": 5e-4, "warmup": 4000},
        0.5,
        {"steps": 100_000, "batch": 32, "lr": 1e-3},
        data={"pixels": "values"},
        model={**grid(32, "waves"), "dropout": 0.0},
        deep_data={"pixels": "values"},
    ),
    "pathx": Recipe(
        "pathx", "Path-X", 50.0,
        {"steps": 1000, "batch": 16, "lr": 1e-3, "warmup": 100, "evaluate_batch": 32, "evaluate_batches": 16,
         "keep": 1},
        {"dim": 32, "depth": 1, "heads": 2, "ff_dim": 32, "positions": "learned", "pooling": "mean"},
        {"steps": 62_400, "batch": 64, "lr": 1e-3, "warmup": 312, "schedule": "cosine", "clip": 1.0, **ADAM},
        {**LAYERS, **grid(128, "waves"), "dim": 128, "depth": 4, "heads": 4, "ff_dim": 128},
        {**DEEP, "steps": 10_000, "batch": 16, "lr": 5e-4, "warmup": 500, "evaluate_batch": 32, "evaluate_batches": 16},
        0.5,
        {"steps": 10_000, "batch": 16, "lr": 5e-4},
        data={"train": 16_000, "held_out": 1_000},  # 200,000 take hours of a core each
        model={**grid(128), "dropout": 0.0},
        deep_data={"train": 16_000, "held_out": 1_000, "pixels": "values"},
    ),
}  # fmt: skip
NAMES = {"imdb": "text", "path-x": "pathx", "path_x": "pathx"}

# Mechanisms of the published table come first, in its order. Sizes are those of PyTorch re-runs (arXiv:2102.03902 and
# Skyformer's) if they name one: rank 256, 2 rounds of hashing, 128 features; windows and blocks are near the arena's
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "local": {"window": 64},
    "fixed": {"block": 50, "summary": 10},
    "longformer": {"window": 256, "global_tokens": 1},
    "linformer": {"rank": 256},
    "reformer": {"rounds": 2, "chunk": 64, "buckets": 32},
    "sinkhorn": {"block": 64},
    "synthesizer": {"kind": "factorised_random", "rank": 32},
    "bigbird": {"block": 64, "random": 3},
    "linear": {},
    "performer": {"features": 128},
    "nystrom": {"landmarks": 64, "conv": 33},
    "rfa": {"features": 64},
    "efficient": {},
    "clustered": {"clusters": 64, "topk": 32},
    "routing": {"clusters": 16, "window": 128},
    "compressed": {"stride": 3},
    "fnet": {},
    "gmlp": {"expansion": 4},
    "retnet": {},
    "gla": {},
    "mamba2": {},
    "deltanet": {},
    "gated_deltanet": {},
    "mixed": {"parts": [["linear", 1], ["local", 1, {"window": 64}]]},
}
# ours: rows of a table that are several mechanisms, or one with a convolution before each layer
HYBRIDS: dict[str, dict[str, Any]] = {
    "linear+taps": {"mechanism": ["linear", {}], "taps": [1, 2, 3]},
    "linear+local": {"mechanism": [["linear", {}], ["local", {"window": 64}]]},
}
FLAGSHIPS = ("softmax", "linear", "linear+taps")
PUBLISHED = tuple(name for _, name, _ in TABLES["lra"].rows if name is not None)
# tasks whose picture width or length needs other sizes
BY_TASK: dict[tuple[str, str], dict[str, Any]] = {
    ("image", "fixed"): {"block": 32, "summary": 4},
    ("pathfinder", "fixed"): {"block": 32, "summary": 4},
    ("pathx", "fixed"): {"block": 128, "summary": 8},
    ("pathx", "local"): {"window": 128},
}


def parse_tasks(text: str) -> tuple[str, ...]:
    """ "listops, text", or "all": the five of the published average."""
    if text.strip() == "all":
        return tuple(name for name in RECIPES if name != "pathx")
    chosen = [NAMES.get(part.strip(), part.strip()) for part in text.split(",") if part.strip()]
    for name in (name for name in chosen if name not in RECIPES):
        wrong = f"tasks={text!r} names {name!r}{nearest(name, RECIPES)}"
        raise ValueError(f"{wrong} Accepted: all, {', '.join(RECIPES)}")
    return tuple(dict.fromkeys(chosen))


def parse_mechanisms(text: str) -> tuple[str, ...]:
    """ "linear, local"; "published", the eleven of the table; "flagships"; or "all" mechanisms, which adds ours."""
    groups = {"all": tuple(OPTIONS), "published": PUBLISHED, "flagships": FLAGSHIPS}
    if text.strip() in groups:
        return groups[text.strip()]
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    for name in chosen:
        if name not in HYBRIDS:
            check_row(name)
    return tuple(dict.fromkeys(chosen))


def check_row(name: str) -> None:
    """Refuse a name that is neither a mechanism nor a hybrid."""
    if "+" in name:
        raise ValueError(f"mechanisms has no hybrid {name!r}{nearest(name, HYBRIDS)} Accepted: {', '.join(HYBRIDS)}")
    mechanism(name)  # an unknown name raises here


def check_size(text: str) -> Size:
    for size in get_args(Size):
        if text == size:
            return size
    raise ValueError(f'size={text!r} cannot work: accepted is "small", "original" or "deep"')


def mixer(task: str, name: str) -> list[Any]:
    """The `mechanism` setting of a model: the name and its options."""
    return [name, {**OPTIONS.get(name, {}), **BY_TASK.get((task, name), {})}]


def model_of(task: str, name: str, size: Size) -> dict[str, Any]:
    """Model arguments that override the task's defaults, which are those of the small model."""
    given = dict(RECIPES[task].model_fields(size))
    if name in HYBRIDS:
        return {**_turned(given, HYBRIDS[name]["mechanism"]), **HYBRIDS[name], **_taps(name, given)}
    named, options = mixer(task, name)
    if "parts" in options:  # each the same share of the heads
        share = given.get("heads", SMALL["heads"]) // len(options["parts"])
        options = {**options, "parts": [[part, share, *rest] for part, _, *rest in options["parts"]]}
    return {**_turned(given, named), "mechanism": [named, options], **direction(named, given)}


def _taps(name: str, given: Fields) -> dict[str, Any]:
    """In pictures the taps of a hybrid are the eight neighbours of a pixel."""
    if "taps" not in HYBRIDS[name] or "shape" not in given:
        return {}
    side = given["shape"][1]
    return {"taps": [1, side - 1, side, side + 1]}


def _turned(given: Fields, named: MixerLike) -> Fields:
    """The fields without rotary positions if not all of the mechanisms have them."""
    if "rotary" not in given or not any("rotary" in mechanism(m.name).unused for m in mixers(named, "mechanism")):
        return given
    return {key: value for key, value in given.items() if key != "rotary"}


def direction(name: str, given: Fields) -> dict[str, Any]:
    """Fields of a classifier whose mechanisms are causal only: it reads from left to right and takes a mean."""
    if not causal_only([name]):
        return {}
    pooling = given.get("pooling", SMALL["pooling"])  # a first position would see nothing but itself
    return {"causal": True, "pooling": "mean" if pooling == "cls" else pooling}


def directions(names: Iterable[str]) -> str:
    """What a table with these rows says about the direction of its models; "" if all of them see both sides."""
    one_way = causal_only(names)
    return f"Causal only, read from left to right, with a mean over all positions: {one_way}." if one_way else ""


def training_of(task: str, size: Size, steps: int | None, seed: int) -> dict[str, Any]:
    return {**_for_steps(RECIPES[task].training_fields(size), steps), "seed": seed}


def filling_of(task: str, size: Size, steps: int | None, seed: int) -> dict[str, Any]:
    """The training settings of pretraining."""
    recipe = RECIPES[task]
    fields = {**recipe.training_fields(size), **DEEP, **recipe.filling}
    fields["evaluate_batch"] = recipe.deep_training["evaluate_batch"]
    fields["warmup"] = max(1, fields["steps"] // 20)
    return {**_for_steps(fields, steps), "seed": seed}


def _for_steps(fields: Fields, steps: int | None) -> dict[str, Any]:
    chosen = dict(fields)
    if steps is not None:
        chosen["warmup"] = max(1, round(chosen["warmup"] * steps / chosen["steps"]))
        chosen["steps"] = steps
        if steps < 10 * SELDOM:
            chosen["evaluate_every"] = min(steps, SELDOM)
    return chosen


def positions_of(model: Fields) -> str:
    """The positions of a run's model, in words."""
    fields = {**SMALL, **model}
    return f"{fields['positions']} and rotary" if fields.get("rotary") else str(fields["positions"])
