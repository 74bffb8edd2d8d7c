"""The learning rate as a share of the highest: a function of the step, or of time if that runs out first.

Progress is the share of steps done or the share of minutes used, whichever is larger, so that a run that ends by
`minutes` still completes its schedule. Warm-up always counts steps.
"""

import math
from typing import Any

from subquad.training.config import TrainingConfig


class Schedule:
    def __init__(self, config: TrainingConfig, higher_is_better: bool = False):
        self.config = config
        self.sign = -1.0 if higher_is_better else 1.0
        self.best = math.inf  # these three are for "plateau" only
        self.waited = 0
        self.scale = 1.0

    def progress(self, step: int, seconds: float) -> float:
        """Progress after `step` updates in `seconds`: 0 at the beginning, 1 or more at the end of the run."""
        done = step / self.config.steps
        return done if self.config.minutes is None else max(done, seconds / (60 * self.config.minutes))

    def factor(self, step: int, seconds: float = 0.0) -> float:
        """The share of lr for the update after `step` updates."""
        config = self.config
        ramp = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
        progress = min(1.0, self.progress(step, seconds))
        warm = min(1.0, config.warmup / config.steps)
        after = 0.0 if warm == 1 else max(0.0, (progress - warm) / (1 - warm))  # progress after the warm-up
        match config.schedule:
            case "cosine":
                decay = config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * after))
            case "linear":
                decay = config.final_lr + (1 - config.final_lr) * (1 - after)
            case "inverse_sqrt":
                decay = math.sqrt(config.warmup / max(config.warmup, progress * config.steps + 1))
            case "step":
                assert config.drop_at is not None
                decay = 1.0 if progress * config.steps < config.drop_at else config.drop_to
            case "plateau":
                decay = self.scale
            case _:
                decay = 1.0
        return ramp * decay

    def evaluated(self, value: float) -> bool:
        """Note a validation measure; True if lr falls, after `patience` evaluations without improvement."""
        if self.config.schedule != "plateau":
            return False
        if self.sign * value < self.best:
            self.best, self.waited = self.sign * value, 0
            return False
        self.waited += 1
        if self.waited < self.config.patience:
            return False
        self.waited = 0
        self.scale *= self.config.factor
        return True

    def state(self) -> dict[str, Any]:
        return {"best": None if math.isinf(self.best) else self.best, "waited": self.waited, "scale": self.scale}

    def load(self, state: dict[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else state["best"]
        self.waited, self.scale = state["waited"], state["scale"]
