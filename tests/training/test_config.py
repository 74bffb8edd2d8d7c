import json
from typing import Any

import pytest

from subquad.training.config import RunConfig, TrainingConfig, differences


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("steps", 1.5),
        ("steps", True),
        ("batch", "32"),
        ("optimiser", "sgd"),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("betas", 0.9),
        ("clip", -1.0),
        ("clip_by", "value"),
        ("schedule", "polynomial"),
        ("final_lr", 1.5),
        ("factor", 1.0),
        ("ema", 1.0),
        ("precision", "fp8"),
        ("minutes", 0.0),
        ("micro_batch", 64),
        ("drop_at", 0),
        ("seed", -1),
        ("parallel", "tensor"),
        ("compile", 1),
        ("keep", 0),
    ],
)
def test_impossible_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}=.* cannot work: accepted is"):
        TrainingConfig(**{field: value})


def test_schedules_name_what_they_need() -> None:
    with pytest.raises(ValueError, match="drop_at=None"):
        TrainingConfig(schedule="step")
    with pytest.raises(ValueError, match="warmup=0"):
        TrainingConfig(schedule="inverse_sqrt")


def test_json_there_and_back() -> None:
    config = RunConfig(
        task="copy",
        data={"length": 128},
        model={"mechanism": ["linear", {"eps": 1e-4}]},
        training=TrainingConfig(betas=(0.9, 0.98), clip=None, minutes=9.0),
    )
    again = RunConfig.from_json(config.to_json())
    assert again == config
    assert again.training.betas == (0.9, 0.98)


def test_overrides_parse_json_else_text() -> None:
    config = RunConfig(task="copy", data={"length": 64, "set": "a"}, model={"depth": 2, "options": {"features": 8}})
    changed = config.override(
        [
            "training.lr=3e-4",
            "training.betas=[0.9, 0.98]",
            "training.clip=null",
            "training.minutes=None",
            "data.length=128",
            "data.set=mnist",
            "model.depth=16",
            "model.options.window=4",
            "model.mechanism=linear",
            "training.compile=True",
        ]
    )
    assert changed.training == TrainingConfig(lr=3e-4, betas=(0.9, 0.98), clip=None, compile=True)
    assert changed.data == {"length": 128, "set": "mnist"}
    assert changed.model == {"depth": 16, "options": {"features": 8, "window": 4}, "mechanism": "linear"}
    assert config.data == {"length": 64, "set": "a"}  # as it was
    assert config.model["options"] == {"features": 8}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("training.learning_rate=1", "no setting 'learning_rate'.*Accepted: steps, batch"),
        ("training.step=1", "did you mean 'steps'"),
        ("data.lenght=1", "did you mean 'length'"),
        ("train.lr=1", "did you mean 'training'"),
        ("lr=1", "names no setting"),
        ("training.lr", "accepted is KEY=VALUE"),
        (".=1", "accepted is KEY=VALUE"),
        ("training.lr=fast", "lr='fast' cannot work"),
        ("training.steps=1e3", "steps=1000.0 cannot work: accepted is an integer"),
        ("training.lr.x=1", "has no parts"),
    ],
)
def test_wrong_overrides_say_what_is_accepted(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunConfig(task="copy", data={"length": 64}).override([setting])


def test_differences_name_each_setting() -> None:
    ours = {"task": "copy", "training": {"lr": 0.1, "steps": 5}, "model": {"depth": 2}}
    theirs = json.loads(json.dumps(ours))
    assert differences(ours, theirs) == []
    theirs["training"]["lr"] = 0.2
    theirs["model"] = {"dim": 8}
    assert differences(ours, theirs) == [
        "training.lr is 0.1, was 0.2",
        "model.depth is new (2)",
        "model.dim is gone (8)",
    ]
