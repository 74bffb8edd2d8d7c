import json
from typing import Any

import pytest

from subquad.models import (
    Classifier,
    EmbeddingConfig,
    LanguageModel,
    LanguageModelConfig,
    Matcher,
    MixerConfig,
    Model,
    Seq2Seq,
    Transformer,
    TransformerConfig,
)


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ("linear", ["linear"] * 5),
        ("linear, linear, softmax", ["linear", "linear", "softmax", "linear", "linear"]),
        (("linear", "softmax"), ["linear", "softmax", "linear", "softmax", "linear"]),
        (["linear", ("softmax", {"scale": 0.5})], ["linear", "softmax", "linear", "softmax", "linear"]),
        (("linear", {"eps": 1e-3}), ["linear"] * 5),
        (MixerConfig("additive"), ["additive"] * 5),
        ([{"name": "linear", "options": {}}], ["linear"] * 5),
    ],
)
def test_one_argument_names_the_mechanism_of_every_layer(given: Any, layers: list[str]) -> None:
    config = TransformerConfig(dim=8, heads=2, depth=5, mechanism=given)
    assert [config.mixer_of(i).name for i in range(5)] == layers
    model = Transformer(config)
    assert [type(block.mixer).__name__.lower() for block in model.blocks] == layers
    assert [block.mixer.options.layer for block in model.blocks] == list(range(5))


def test_options_reach_every_layer_and_a_layers_own_win() -> None:
    model = Transformer(
        dim=8, heads=2, depth=2, mechanism=["linear", ("linear", {"eps": 0.5, "heads": 4})], options={"eps": 0.25}
    )
    first, second = (block.mixer.options for block in model.blocks)
    assert (first.eps, first.heads) == (0.25, 2)
    assert (second.eps, second.heads) == (0.5, 4)


def test_options_of_all_layers_go_to_the_mechanisms_that_have_them() -> None:
    model = Transformer(
        dim=8, heads=2, depth=2, mechanism="softmax, linear", rotary=True, attention_dropout=0.1, seed=7, max_length=9
    )
    exact, linear = (block.mixer.options for block in model.blocks)
    assert (exact.dropout, exact.rotary, exact.seed) == (0.1, True, 7)
    assert (linear.dropout, linear.rotary, linear.max_length) == (0.0, True, None)
    parts = (("softmax", 1), ("synthesizer", 1))
    mixed = Transformer(dim=8, heads=2, depth=1, mechanism=("mixed", {"parts": parts}), max_length=9)
    assert mixed.blocks[0].mixer.parts[1].options.max_length == 9
    fixed = Transformer(dim=8, heads=2, depth=1, mechanism="linformer", options={"rank": 4}, max_length=9)
    assert fixed.blocks[0].mixer.options.max_length == 9
    with pytest.raises(ValueError, match="rotary=True cannot work: none of the mechanisms"):
        Transformer(dim=8, heads=2, mechanism="additive", rotary=True)


def test_a_bad_layer_is_named() -> None:
    with pytest.raises(TypeError, match="no option 'windw'") as caught:
        Transformer(dim=8, heads=2, depth=3, mechanism=["linear", ("local", {"windw": 3})])
    assert caught.value.__notes__ == ["in layer 1 (local)"]


MODELS: list[Model] = [
    Transformer(dim=8, heads=2, depth=3, mechanism=["linear", ("local", {"window": 3})], pool=(1, 2), norm="rms"),
    LanguageModel(vocab=5, dim=8, heads=2, depth=1, positions="grid", shape=(2, 3), tie=True, options={"scale": 0.5}),
    LanguageModel(vocab=5, dim=8, heads=2, depth=1, positions="rotary", activation="swiglu", outputs=7),
    Classifier(classes=3, features=4, dim=8, heads=2, depth=1, pooling="cls", head_hidden=6),
    Matcher(vocab=5, dim=8, heads=2, depth=1, reversible=True),
    Seq2Seq(source_features=3, target_vocab=5, dim=8, heads=2, depth=1, cross="additive", decoder_depth=2, pool=2),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_config_goes_through_json(model: Model) -> None:
    text = model.config.to_json()
    again = type(model.config).from_json(text)
    assert again == model.config
    assert again.to_json() == text
    rebuilt = type(model)(again)
    assert {n: p.shape for n, p in rebuilt.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_options_with_tuples_survive_json() -> None:
    config = TransformerConfig(dim=8, mechanism=("linear", {"parts": (("a", 1), ("b", 2))}))
    assert TransformerConfig.from_json(config.to_json()) == config


def test_json_is_strict() -> None:
    data = json.loads(TransformerConfig(dim=8).to_json())
    with pytest.raises(ValueError, match="TransformerConfig has no key 'dept'; did you mean 'depth'"):
        TransformerConfig.from_dict({**data, "dept": 3})
    with pytest.raises(ValueError, match="TransformerConfig lacks the key 'dim'"):
        TransformerConfig.from_dict({"depth": 3})
    with pytest.raises(ValueError, match="cannot be made of 3"):
        LanguageModelConfig.from_dict({"embedding": 3, "transformer": data})


def test_code_does_not_go_to_json() -> None:
    config = TransformerConfig(dim=8, mechanism=("linear", {"feature_map": abs}))
    with pytest.raises(ValueError, match=r"mechanism\[0\].options.feature_map=.*cannot be saved"):
        config.to_json()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, "dim=0 cannot work"),
        ({"depth": 0}, "depth=0 cannot work"),
        ({"depth": 2.0}, "depth=2.0 cannot work"),
        ({"heads": 3}, "heads=3 cannot work: it must divide dim=8"),
        ({"mechanism": "lineer"}, "unknown mechanism 'lineer'; did you mean 'linear'"),
        ({"mechanism": []}, "mechanism=.* cannot work"),
        ({"mechanism": [3]}, "mechanism=3 cannot work"),
        ({"options": {"causal": True}}, "the model sets causal itself"),
        ({"options": 3}, "options=3 cannot work"),
        ({"norm": "batch"}, 'norm=\'batch\' cannot work: accepted is "layer" or "rms"'),
        ({"norm_position": "mid"}, 'accepted is "pre" or "post"'),
        ({"norm_eps": 0}, "norm_eps=0 cannot work"),
        ({"activation": "tanh"}, 'activation=\'tanh\' cannot work: accepted is "relu" or "gelu" or "swiglu"'),
        ({"dropout": 1.0}, "dropout=1.0 cannot work"),
        ({"ff_dropout": -0.1}, "ff_dropout=-0.1 cannot work"),
        ({"ff_chunks": 0}, "ff_chunks=0 cannot work"),
        ({"ff_dim": 0}, "ff_dim=0 cannot work"),
        ({"causal": 1}, "causal=1 cannot work"),
        ({"pool": 0}, "pool=0 cannot work"),
        ({"pool": 2, "causal": True}, "would show the future"),
        ({"pool": 2, "reversible": True}, "cannot be reconstructed"),
        ({"norm_position": "post", "reversible": True}, "cannot be undone"),
        ({"checkpoint": True, "reversible": True}, "recomputes every block already"),
        ({"checkpoint": 4, "depth": 12}, "checkpoint=4 cannot work: accepted is a bool, or at least 5 with depth=12"),
        ({"checkpoint": 0}, "checkpoint=0 cannot work"),
        ({"checkpoint": "all"}, "checkpoint='all' cannot work"),
        ({"cross": "local"}, "cross='local' cannot work: Local has no cross-attention"),
        ({"mechanism": "linformer"}, "max_length=None cannot work"),
    ],
)
def test_values_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(**{"dim": 8, "heads": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab": 0}, "vocab=0 cannot work"),
        ({"vocab": 5, "features": 3}, "pass one of the two"),
        ({"vocab": 5, "convolutions": 2}, "convolutions=2 cannot work: accepted is None with vocab"),
        ({}, "pass one of the two"),
        ({"vocab": 5, "positions": "rotory"}, "positions='rotory' cannot work: accepted is \"sinusoidal\""),
        ({"vocab": 5, "positions": "rotary"}, "the mixers rotate"),
        ({"vocab": 5, "positions": "grid"}, "shape=None cannot work"),
        ({"vocab": 5, "shape": (2, 3)}, "shape=.* cannot work"),
        ({"vocab": 5, "positions": "grid", "shape": (4,)}, "shape=.* cannot work"),
        ({"vocab": 5, "positions": "grid", "shape": (4, 0)}, "shape=.* cannot work"),
    ],
)
def test_embeddings_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingConfig(**fields)


def test_keywords_are_strict() -> None:
    with pytest.raises(TypeError, match="LanguageModelConfig has no field 'dept'; did you mean 'depth'"):
        LanguageModel(vocab=5, dim=8, dept=3)
    with pytest.raises(TypeError, match="no field 'decoder_dept'"):
        Seq2Seq(vocab=5, dim=8, decoder_dept=3)
    config = TransformerConfig(dim=8, heads=2, depth=1)
    with pytest.raises(TypeError, match="pass one or the other"):
        Transformer(config, depth=3)
    with pytest.raises(TypeError, match="accepted is a LanguageModelConfig"):
        LanguageModel(config)


def test_no_flat_keyword_has_two_homes() -> None:
    for model in MODELS[1:5]:
        names = [name for part in ("embedding", "transformer") for name in vars(getattr(model.config, part))]
        names += list(vars(model.config))
        assert len(names) == len(set(names))
