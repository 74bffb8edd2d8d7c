"""The settings of `subquad linearise`."""

import typing
from dataclasses import dataclass
from typing import Any, Literal

from subquad.checks import at_least, check_count, check_plain, refuse
from subquad.models.config import Config

RULES: dict[str, tuple[str, dict[str, Any]]] = {  # mechanism and options
    "gated_delta": ("gated_deltanet", {"expand_v": 1}),
    "linear": ("linear", {"feature_map": "hedgehog"}),
    "window": ("local", {}),
}
FREE_ON_RESUME = ("checkpoint_every",)  # these do not affect what is learned


@dataclass(frozen=True, kw_only=True)
class LineariseSettings(Config):
    """What is replaced, and how it learns. The same settings, text and device give the same student."""

    keep: float = 0.25  # share of all attention layers that keep softmax
    rule: Literal["gated_delta", "linear", "window"] = "gated_delta"  # window: only a window, for comparison
    layers: tuple[int, ...] | None = None  # those that may be replaced; None: all
    window: int | None = None  # tokens read exactly beside the running sum; None: no such window
    lora: int | None = None  # in distillation, train LoRA of this rank on all matrices instead of all weights
    align_steps: int = 400
    align_batch: int = 8  # rows
    align_length: int = 512
    align_lr: float = 1e-3  # falls to a hundredth along a cosine
    distil_steps: int = 400
    distil_batch: int = 8
    distil_length: int = 1024
    distil_lr: float = 1e-4  # falls to a tenth
    warmup: int = 10  # steps
    clip: float = 1.0
    held_out: float = 0.05  # share of the text
    evaluate_rows: int = 64  # rows of distil_length for a perplexity, at most
    compare_window: int = 64  # of the window-only model in the report, where `window` is None
    checkpoint_every: int = 200  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        given: Any = self.layers
        if isinstance(given, list):  # from JSON
            object.__setattr__(self, "layers", tuple(given))
        for name, hint in typing.get_type_hints(type(self)).items():
            check_plain(name, getattr(self, name), hint)
        counts = ("align_batch", "distil_batch", "evaluate_rows", "compare_window", "checkpoint_every")
        at_least(self, align_steps=0, distil_steps=0, warmup=0, seed=0, **dict.fromkeys(counts, 1))
        at_least(self, align_length=2, distil_length=2)
        for name in ("window", "lora"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        for name in ("align_lr", "distil_lr", "clip"):
            if not getattr(self, name) > 0:
                refuse(name, getattr(self, name), "a positive number")
        if not 0 <= self.keep < 1:
            refuse("keep", self.keep, "a share in [0, 1) of the attention layers")
        if not 0 < self.held_out < 1:
            refuse("held_out", self.held_out, "a share in (0, 1) of the text")
        if self.seed >= 2**40:
            refuse("seed", self.seed, "an integer below 2**40")
        if self.rule == "window" and self.window is None:
            refuse("window", None, 'a number of tokens with rule="window"')
        for layer in self.layers or ():
            check_count("layers", layer, 0)
        if self.layers is not None and (not self.layers or len(set(self.layers)) < len(self.layers)):
            refuse("layers", self.layers, "different numbers of layers, at least one")

    def replacement(self) -> dict[str, Any]:
        """What `subquad.hf.replace` takes, besides the layers."""
        mechanism, options = RULES[self.rule]
        if self.rule == "window":
            assert self.window is not None
            return {"mechanism": mechanism, "window": self.window - 1}
        beside = {} if self.window is None else {"exact_window": self.window}
        return {"mechanism": mechanism, **options, **beside}
