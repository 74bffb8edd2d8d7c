"""Every public function called with one or two wrong arguments: a valid result, or an error that names the argument.

The functions come from the `__all__` of the package. A new one needs an entry in `CASES`; until then
`test_every_public_function_is_called` fails. SUBQUAD_FUZZ is the number of calls, SUBQUAD_FUZZ_SEED the first seed.
"""
# ruff: noqa: ARG005 (all cases are called with the same arguments, needed or not)

import inspect
import itertools
import os
import random
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

import subquad
from subquad import MECHANISMS, Classifier, LanguageModel, Matcher, Sampling, Seq2Seq, Streams, Transformer, build, ops
from subquad.models import LSTM, LSTMConfig, fork, load_state, save_state
from subquad.ops import LinearState, Local, SparseCache

CALLS = int(os.environ.get("SUBQUAD_FUZZ", "300"))
SEED = int(os.environ.get("SUBQUAD_FUZZ_SEED", "0"))
PACKAGE = str(Path(subquad.__file__).parent)
MODULES = (subquad, subquad.ops, subquad.models)

Call = tuple[Callable[..., Any], dict[str, Any]]

SMALL = {"dim": 8, "depth": 1, "heads": 2, "mechanism": "linear"}
DIM, HEADS, BATCH, SIZE = 8, 2, 2, 6


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, SIZE, DIM)))


def heads(*shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, SIZE, HEADS, 4)))


def ids(*shape: int, vocab: int = 11) -> Tensor:
    return torch.randint(0, vocab, shape or (BATCH, SIZE))


def lengths(size: int = SIZE) -> Tensor:
    return torch.tensor([size, size - 2])


def similarity(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bthk,bshk->bhts", q, k).exp()


def mixer(rng: random.Random, needs: str = "") -> subquad.Mixer:
    """A mechanism, with a state or cross-attention if needed."""
    fitting = {
        "state": [name for name, cls in MECHANISMS.items() if cls.traits.state],
        "cross": [name for name, cls in MECHANISMS.items() if cls.traits.cross],
    }
    name = rng.choice(fitting.get(needs, list(MECHANISMS)))
    cls = MECHANISMS[name]
    options = dict(rng.choice(cls.small)) | {"dim": DIM, "heads": 4 if name == "mixed" else HEADS}
    options["causal"] = needs == "state" or not cls.traits.bidirectional
    if "max_length" not in cls.unused:
        options["max_length"] = 16
    for option in ("layer", "dilation", "gate"):  # these need other heads or causal=True
        options.pop(option, None)
    mix = build(name, **options).eval()
    fits = getattr(mix.traits, needs) if needs else True
    return mix if fits else mixer(rng, needs)  # a mixed layer only has what all its parts have


def language_model(rng: random.Random) -> LanguageModel:
    kind = rng.choice(["linear", "softmax", "local", "sinkhorn"])
    return LanguageModel(**{**SMALL, "vocab": 11, "mechanism": kind, "taps": rng.choice([(), (1, 2)])}).eval()


def seq2seq() -> Seq2Seq:
    return Seq2Seq(**{**SMALL, "vocab": 11}).eval()


def lstm(rng: random.Random) -> LSTM:
    return LSTM(vocab=11, dim=8, depth=1).eval()


def streams(rng: random.Random) -> Streams:
    made = Streams(language_model(rng), slots=3, capacity=12)
    made.admit([[1], [2, 3]])
    return made


def pattern(rng: random.Random) -> ops.Pattern:
    atoms = (Local(2), ops.Strided(3), ops.Block(4), ops.Summary(4, 1), ops.Global(1), ops.Random(1, 2), ops.Dense())
    return rng.choice(atoms) | rng.choice(atoms)


def method(owner: Any, name: str, /, **arguments: Any) -> Call:
    return getattr(owner, name), arguments


def mixed_call(name: str, needs: str = "", **arguments: Callable[[Any], Any]) -> Callable[[random.Random, Path], Call]:
    def case(rng: random.Random, folder: Path) -> Call:
        mix = mixer(rng, needs)
        return getattr(mix, name), {key: value(mix) for key, value in arguments.items()}

    return case


MIXER: dict[str, Callable[[random.Random, Path], Call]] = {
    "Mixer": lambda rng, _: (lambda mix: (type(mix), {"options": mix.options}))(mixer(rng)),
    "Mixer.forward": mixed_call("__call__", x=lambda _: x(), lengths=lambda _: lengths()),
    "Mixer.forward with context": mixed_call(
        "__call__", "cross", x=lambda _: x(), context=lambda _: x(2, 4, 8), context_lengths=lambda _: lengths(4)
    ),
    "Mixer.forward with memory": mixed_call("__call__", "cross", x=lambda _: x(), context=lambda m: m.remember(x())),
    "Mixer.reference": mixed_call("reference", x=lambda _: x(), lengths=lambda _: lengths()),
    "Mixer.remember": mixed_call("remember", "cross", context=lambda _: x(), context_lengths=lambda _: lengths()),
    "Mixer.pattern": mixed_call("pattern", x=lambda _: x()),
    "Mixer.init_state": mixed_call("init_state", "state", batch=lambda _: 2, capacity=lambda _: 7),
    "Mixer.prefill": mixed_call(
        "prefill", "state", x=lambda _: x(), lengths=lambda _: lengths(), state=lambda m: m.init_state(2)
    ),
    "Mixer.step": mixed_call(
        "step", "state", x=lambda _: x(2, 8), state=lambda m: m.init_state(2), inplace=lambda _: False
    ),
    "Mixer.redraw": mixed_call("redraw", generator=lambda _: torch.Generator()),
    "Mixer.restore": mixed_call("restore"),
    "Mixer.share_with": mixed_call("share_with", first=lambda m: m),
    "Mixer.defer": mixed_call("defer", "state", state=lambda m: m.init_state(2)),
    "Mixer.settle": mixed_call("settle", "state", state=lambda m: m.init_state(2), steps=lambda _: 3),
    "Mixer.extra_repr": mixed_call("extra_repr"),
}

OPS: dict[str, Callable[[random.Random, Path], Call]] = {
    "linear_attention": lambda rng, _: (
        ops.linear_attention,
        {
            **{name: heads() for name in "qkv"},
            "causal": True,
            "feature_map": rng.choice(["elu+1", "identity", torch.tanh]),
            "normalize": True,
            "eps": 1e-6,
            "lengths": lengths(),
            "log_gate": -torch.rand(2, 6, 2),
            "initial_state": LinearState(torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4)),
            "return_state": True,
            "impl": "auto",
        },
    ),
    "linear_attention of a pack": lambda rng, _: (
        ops.linear_attention,
        {**{name: heads(1, 6, 2, 4) for name in "qkv"}, "cu_seqlens": torch.tensor([0, 2, 6])},
    ),
    "linear_attention across": lambda rng, _: (
        ops.linear_attention,
        {
            "q": heads(2, 3, 2, 4),
            "k": heads(),
            "v": heads(),
            "causal": False,
            "key_lengths": lengths(),
        },
    ),
    "linear_attention_step": lambda rng, _: (
        ops.linear_attention_step,
        {
            **{name: heads(2, 2, 4) for name in ("q_t", "k_t", "v_t")},
            "state": LinearState(torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4)),
            "feature_map": "elu+1",
            "normalize": True,
            "eps": 1e-6,
            "log_gate": -torch.rand(2, 2),
            "inplace": False,
            "impl": "torch",
        },
    ),
    "sparse_attention": lambda rng, _: (
        ops.sparse_attention,
        {
            **{name: heads() for name in "qkv"},
            "pattern": rng.choice([pattern(rng), [Local(1), Local(2)]]),
            "causal": False,
            "lengths": lengths(),
            "key_lengths": lengths(),
            "scale": 0.5,
            "return_lse": True,
            "impl": "auto",
        },
    ),
    "similarity_attention": lambda rng, _: (
        ops.similarity_attention,
        {**{name: heads() for name in "qkv"}, "sim": similarity, "causal": True, "lengths": lengths(), "eps": 1e-6},
    ),
    "LinearState": lambda rng, _: (LinearState, {"s": x(), "z": x()}),
    "SparseState": lambda rng, _: (ops.SparseState, {"k": x(), "v": x(), "position": lengths()}),
    "SparseCache": lambda rng, _: (SparseCache, {"patterns": rng.choice([pattern(rng), [Local(1), Local(2)]])}),
    "SparseCache.size": lambda rng, _: method(SparseCache(pattern(rng)), "size", length=5),
    "SparseCache.empty": lambda rng, _: method(
        SparseCache(pattern(rng)), "empty", batch=2, heads=2, width=4, capacity=8, like=heads()
    ),
    "SparseCache.extend": lambda rng, _: _cached(rng, "extend", k=heads(), v=heads(), lengths=lengths()),
    "SparseCache.attend": lambda rng, _: _cached(
        rng, "attend", q=heads(), k=heads(), v=heads(), lengths=lengths(), scale=0.5
    ),
    "SparseCache.step": lambda rng, _: _cached(
        rng, "step", q=heads()[:, 0], k=heads()[:, 0], v=heads()[:, 0], scale=0.5, inplace=False
    ),
    "Local": lambda rng, _: (Local, {"before": 3, "after": 2}),
    "Dilated": lambda rng, _: (ops.Dilated, {"window": 3, "gap": 2}),
    "Strided": lambda rng, _: (ops.Strided, {"l": 3}),
    "Block": lambda rng, _: (ops.Block, {"l": 3, "before": 1, "after": 0}),
    "Summary": lambda rng, _: (ops.Summary, {"l": 6, "c": 2, "shift": 1}),
    "Global": lambda rng, _: (ops.Global, {"tokens": 3}),
    "Random": lambda rng, _: (
        ops.Random,
        {"blocks": 2, "block_size": 2, "seed": 0, "head": 0, "apart": 0, "first": 0, "last": 0},
    ),
    "Dense": lambda rng, _: (ops.Dense, {}),
    "Pattern.mask": lambda rng, _: method(
        pattern(rng), "mask", i=torch.arange(4)[:, None], j=torch.arange(5), causal=True, length=5, head=0
    ),
    "Pattern.keys": lambda rng, _: method(pattern(rng), "keys", i=torch.arange(4), S=5, causal=True, head=0),
    "Pattern.dense": lambda rng, _: method(pattern(rng), "dense", T=4, S=5, causal=False, device="cpu"),
    "Pattern.pairs": lambda rng, _: method(pattern(rng), "pairs", T=4, S=5, causal=False),
    "Pattern.draw": lambda rng, folder: method(
        pattern(rng), "draw", T=4, path=folder / "p.png", causal=False, title="a"
    ),
    "Pattern.to_json": lambda rng, _: method(pattern(rng), "to_json"),
    "Pattern.from_json": lambda rng, _: (
        ops.Pattern.from_json,
        {"text": rng.choice([pattern(rng).to_json(), "[3]", "{}", '[{"atom": "Local"}]', "["])},
    ),
    "Summary.columns": lambda rng, _: method(ops.Summary(4, 1), "columns", S=9, device=None),
    "Random.table": lambda rng, _: method(
        ops.Random(2, 2), "table", row=torch.arange(3), causal=False, length=9, head=1
    ),
}


def _cached(rng: random.Random, name: str, **arguments: Any) -> Call:
    cache = SparseCache(pattern(rng))
    return getattr(cache, name), {"state": cache.empty(2, 2, 4, 12, like=heads()), **arguments}


def generating(name: str) -> Callable[[random.Random, Path], Call]:
    def case(rng: random.Random, folder: Path) -> Call:
        model = rng.choice([language_model, lstm])(rng)
        arguments: dict[str, Any] = {
            "prompt": rng.choice([ids(), [1, 2], [[1, 2, 3], [4]]]),
            "steps": 3,
            "seed": 0,
            "stop": 1,
            "compile": False,
        }
        if isinstance(arguments["prompt"], Tensor) and rng.random() < 0.5:
            arguments |= {"lengths": lengths(), "state": model.init_state(2)} if can_step(model) else {}
        settings = {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
        arguments |= settings if rng.random() < 0.5 else {"sampling": Sampling(top_k=2)}
        if name == "generate":
            arguments |= {"logprobs": True, "lanes": 1, "full": True, "told": lambda n: None}
        else:
            arguments["capacity"] = 20
        return getattr(model, name), arguments

    return case


def can_step(model: Any) -> bool:
    return isinstance(model, LSTM) or model.transformer.traits.state is not None


def stepping(rng: random.Random) -> Any:
    return rng.choice([lstm, lambda _: LanguageModel(**{**SMALL, "vocab": 11, "taps": (1, 2)}).eval()])(rng)


def reading(rng: random.Random) -> tuple[Seq2Seq, Any]:
    model = seq2seq()
    return model, model.init_state(*model.encode(ids()))


def saved(model: Any, folder: Path) -> Path:
    model.save(folder / "model")
    return folder / "model"


def loss(model: Any, **arguments: Any) -> Call:
    return model.loss, {**arguments, "reduction": "mean"}


def model_config(kind: Any, **settings: Any) -> Any:
    return kind(**{**SMALL, "vocab": 11, **settings}).config


def remembering() -> Transformer:
    return Transformer(**SMALL, causal=True, cross="linear").eval()


def _same(function: Callable[..., Any], arguments: dict[str, Any], rng: random.Random, folder: Path) -> Call:
    return function, arguments


def _config_of(kind: Any, more: dict[str, Any], rng: random.Random, folder: Path) -> Call:
    config = model_config(kind, **more)
    return kind.config_type, {f.name: getattr(config, f.name) for f in fields(config)}


MODELS: dict[str, Callable[[random.Random, Path], Call]] = {
    "build": lambda rng, _: (build, _options(rng)),
    "approximation_error": lambda rng, _: (
        subquad.approximation_error,
        {"mix": build(rng.choice(["softmax", "local"]), dim=8, heads=2), "x": x()},
    ),
    "load": lambda rng, folder: (subquad.load, {"directory": saved(language_model(rng), folder), "device": "cpu"}),
    "Sampling": lambda rng, _: (
        Sampling,
        {"exclude": (1,), "repetition_penalty": 1.1, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    ),
    "Sampling.check": lambda rng, _: method(Sampling(exclude=(1,)), "check", values=5),
    "Sampling.of": lambda rng, _: (Sampling.of, {"sampling": None, "top_k": 3}),
    "Streams": lambda rng, _: (
        Streams,
        {
            "model": language_model(rng),
            "slots": 2,
            "capacity": 9,
            "temperature": 0.9,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "stop": [1],
            "compile": False,
            "sampling": None,
        },
    ),
    "Streams.admit": lambda rng, _: _admitting(rng),
    "Streams.propose": lambda rng, _: method(streams(rng), "propose", drafts={0: [1, 2], 1: []}),
    "Streams.step": lambda rng, _: method(streams(rng), "step"),
    "Streams.state": lambda rng, _: method(streams(rng), "state", id=0),
    "Streams.retire": lambda rng, _: method(streams(rng), "retire", id=1),
    "sequence_parallel": lambda rng, _: (_among_one, {"mesh": "all ranks"}),
    "fork": lambda rng, _: (fork, {"state": stepping(rng).init_state(1), "count": 3}),
    "save_state": lambda rng, folder: (
        save_state,
        {"state": stepping(rng).init_state(1), "path": folder / "state", "private": True},
    ),
    "load_state": lambda rng, folder: _loading(rng, folder),
    "LanguageModel": lambda rng, _: (LanguageModel, _fields(rng, subquad.models.LanguageModelConfig, vocab=11)),
    "LanguageModel.forward": lambda rng, _: (language_model(rng), {"tokens": ids(), "lengths": lengths()}),
    "LanguageModel.loss": lambda rng, _: loss(
        language_model(rng), tokens=ids(), lengths=lengths(), targets=ids(), ignore_index=-100
    ),
    "LanguageModel.generate": generating("generate"),
    "LanguageModel.stream": generating("stream"),
    "LanguageModel.init_state": lambda rng, _: method(stepping(rng), "init_state", batch=2, capacity=5),
    "LanguageModel.prefill": lambda rng, _: _prefilling(rng),
    "LanguageModel.step": lambda rng, _: _a_step(rng),
    "LanguageModel.save": lambda rng, folder: method(language_model(rng), "save", directory=folder / "m"),
    "LanguageModel.load": lambda rng, folder: (
        LanguageModel.load,
        {"directory": saved(language_model(rng), folder), "device": "cpu"},
    ),
    "LSTM": lambda rng, _: (LSTM, {"vocab": 11, "dim": 8, "depth": 1, "bidirectional": False, "dropout": 0.0}),
    "LSTM.forward": lambda rng, _: (lstm(rng), {"tokens": ids(), "lengths": lengths()}),
    "LSTM.loss": lambda rng, _: loss(lstm(rng), tokens=ids(), lengths=lengths(), targets=ids(), ignore_index=-1),
    "Classifier": lambda rng, _: (Classifier, _fields(rng, subquad.models.ClassifierConfig, vocab=11, classes=3)),
    "Classifier.forward": lambda rng, _: (
        Classifier(**SMALL, vocab=11, classes=3),
        {"tokens": ids(), "lengths": lengths()},
    ),
    "Classifier.loss": lambda rng, _: loss(
        Classifier(**SMALL, vocab=11, classes=3),
        tokens=ids(),
        labels=ids(2, vocab=3),
        lengths=lengths(),
        ignore_index=-100,
    ),
    "Matcher": lambda rng, _: (Matcher, _fields(rng, subquad.models.MatcherConfig, vocab=11)),
    "Matcher.forward": lambda rng, _: (
        Matcher(**SMALL, vocab=11),
        {"a": ids(), "b": ids(2, 4), "a_lengths": lengths(), "b_lengths": lengths(4)},
    ),
    "Matcher.loss": lambda rng, _: loss(
        Matcher(**SMALL, vocab=11),
        a=ids(),
        b=ids(2, 4),
        labels=ids(2, vocab=2),
        a_lengths=lengths(),
        b_lengths=lengths(4),
    ),
    "Seq2Seq": lambda rng, _: (Seq2Seq, {**SMALL, "vocab": 11, "cross": "linear", "share": False, "tie": False}),
    "Seq2Seq.forward": lambda rng, _: (
        seq2seq(),
        {"source": ids(), "target": ids(2, 4), "source_lengths": lengths(), "target_lengths": lengths(4)},
    ),
    "Seq2Seq.loss": lambda rng, _: loss(
        seq2seq(),
        source=ids(),
        target=ids(2, 4),
        source_lengths=lengths(),
        target_lengths=lengths(4),
        ignore_index=-100,
    ),
    "Seq2Seq.encode": lambda rng, _: method(seq2seq(), "encode", source=ids(), lengths=lengths()),
    "Seq2Seq.init_state": lambda rng, _: method(
        seq2seq(), "init_state", memory=x(), memory_lengths=lengths(), capacity=5
    ),
    "Seq2Seq.prefill": lambda rng, _: (
        lambda pair: method(pair[0], "prefill", target=ids(), state=pair[1], lengths=lengths())
    )(reading(rng)),
    "Seq2Seq.step": lambda rng, _: (lambda pair: method(pair[0], "step", tokens=ids(2), state=pair[1]))(reading(rng)),
    "Seq2Seq.generate": lambda rng, _: (
        lambda pair: method(pair[0], "generate", prompt=[[1], [2]], steps=2, state=pair[1])
    )(reading(rng)),
    "Transformer": lambda rng, _: (Transformer, _fields(rng, subquad.models.TransformerConfig)),
    "Transformer.forward": lambda rng, _: (
        remembering(),
        {"x": x(), "lengths": lengths(), "memory": x(2, 3, 8), "memory_lengths": lengths(3)},
    ),
    "Transformer.short_lengths": lambda rng, _: method(
        Transformer(**SMALL, pool=2), "short_lengths", lengths=lengths()
    ),
    "Transformer.init_state": lambda rng, _: method(remembering(), "init_state", batch=2, capacity=4),
    "Transformer.remember": lambda rng, _: method(remembering(), "remember", memory=x(), memory_lengths=lengths()),
    "Transformer.prefill": lambda rng, _: (
        lambda model: method(
            model, "prefill", x=x(), lengths=lengths(), state=model.init_state(2), memory=model.remember(x())
        )
    )(remembering()),
    "Transformer.step": lambda rng, _: (
        lambda model: method(
            model, "step", x=x(2, 8), state=model.init_state(2), memory=model.remember(x()), inplace=False
        )
    )(remembering()),
    "Transformer.check_state": lambda rng, _: (
        lambda model: method(model, "check_state", state=model.init_state(2), batch=2)
    )(remembering()),
    **{
        name: partial(_same, kind, settings)
        for name, kind, settings in (
            ("MixerConfig", subquad.models.MixerConfig, {"name": "linear", "options": {"eps": 1e-3}}),
            (
                "EmbeddingConfig",
                subquad.models.EmbeddingConfig,
                {"vocab": 11, "positions": "sinusoidal", "shape": None},
            ),
            ("TransformerConfig", subquad.models.TransformerConfig, SMALL),
            ("LSTMConfig", LSTMConfig, {"embedding": subquad.models.EmbeddingConfig(vocab=3), "dim": 8, "depth": 2}),
        )
    },
    **{
        f"{kind.__name__}Config": partial(_config_of, kind, more)
        for kind, more in ((LanguageModel, {}), (Classifier, {"classes": 3}), (Matcher, {}), (Seq2Seq, {}))
    },
    "Config.to_dict": lambda rng, _: method(model_config(LanguageModel), "to_dict"),
    "Config.to_json": lambda rng, _: method(model_config(LanguageModel), "to_json"),
    "Config.from_dict": lambda rng, _: (
        subquad.models.LanguageModelConfig.from_dict,
        {"data": model_config(LanguageModel).to_dict()},
    ),
    "Config.from_json": lambda rng, _: (
        subquad.models.LanguageModelConfig.from_json,
        {"text": rng.choice([model_config(LanguageModel).to_json(), "[1", "[1]", "[" * 9999])},
    ),
    "TransformerConfig.mixer_of": lambda rng, _: method(model_config(transformer), "mixer_of", layer=0),
    "TransformerConfig.cross_of": lambda rng, _: method(model_config(transformer), "cross_of", layer=0),
    "TransformerConfig.pool_of": lambda rng, _: method(model_config(transformer), "pool_of", layer=0),
}


def transformer(**settings: Any) -> Transformer:
    return Transformer(**{name: value for name, value in settings.items() if name != "vocab"})


CASES = {**OPS, **MIXER, **MODELS}


def _options(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(list(MECHANISMS))
    cls = MECHANISMS[name]
    options = {f.name: f.default for f in fields(cls.options_type) if f.name not in ("dim", "heads", "max_length")}
    options["causal"] = not cls.traits.bidirectional
    return {"name": name, "dim": 8, "heads": 2, **options} | (
        {"max_length": 9} if "max_length" not in cls.unused else {}
    )


def _fields(rng: random.Random, config: Any, **more: Any) -> dict[str, Any]:
    """Flat keywords of a model: some of its config and of the configs inside it."""
    parts = [
        kind for kind in typing.get_type_hints(config).values() if inspect.isclass(kind) and hasattr(kind, "to_dict")
    ]
    known = [f for kind in (config, *parts) for f in fields(kind) if f.name not in (*SMALL, "causal", "options")]
    chosen = rng.sample(known, 4)
    plain = {f.name: f.default for f in chosen if isinstance(f.default, (bool, int, float, str, type(None), tuple))}
    return {**plain, **SMALL, **more}


def _admitting(rng: random.Random) -> Call:
    made = streams(rng)
    arguments = {"prompts": rng.choice([[1, 2], [[3]], ids(1, 4)]), "seed": 3}
    arguments |= {"sampling": rng.choice([Sampling(top_k=2), [Sampling()]]), "stop": 3, "before": [[1]], "top": 0}
    if can_step(made.model) and rng.random() < 0.5:
        arguments["state"] = made.state(0)
    return made.admit, arguments


def _loading(rng: random.Random, folder: Path) -> Call:
    like = stepping(rng).init_state(1)
    save_state(like, folder / "s")
    return load_state, {"path": folder / "s", "like": like}


def _prefilling(rng: random.Random) -> Call:
    model = stepping(rng)
    return model.prefill, {"tokens": ids(), "lengths": lengths(), "state": model.init_state(2)}


def _among_one(mesh: Any) -> int:
    """sequence_parallel in a process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with subquad.sequence_parallel(dist.group.WORLD if mesh == "all ranks" else mesh) as group:
            return group.world
    finally:
        dist.destroy_process_group()


def _a_step(rng: random.Random) -> Call:
    model = stepping(rng)
    return model.step, {"tokens": ids(2), "state": model.init_state(2), "inplace": False}


def junk(rng: random.Random, value: Any) -> Any:
    """A value other than `value`."""
    strange: list[Any] = [
        None, True, False, 0, 1, -1, 3, 1000, 2**70, -(2**70), 1.5, float("inf"), float("nan"), -0.5, 1j, "", "x", "RO",
        b"x", [], [3], [1.5], ["a"], (), (1, 2), (None,), {}, {"a": 1}, {3}, range(3), object(), print, int,
        lambda *_: None, Path("nowhere"), np.zeros((2, 6, 8), np.float32), np.array([6, 4]), np.float32(1), np.int64(3),
        np.bool_(True),
        torch.float16, torch.device("cpu"), torch.device("meta"), torch.Generator(), torch.nn.Linear(2, 2), Sampling(),
        Local(2), torch.randn(2), torch.zeros(2, dtype=torch.int64), torch.tensor(3), torch.tensor(True),
        torch.empty(0), torch.randn(2, 6, 8), torch.randn(2, 6, 2, 4, device="meta"), torch.zeros(2, 6, 8).to_sparse(),
        LinearState(torch.randn(2), None), "cuda:99", "meta",
    ]  # fmt: skip
    near: list[Any] = []
    if isinstance(value, Tensor):
        value = value.detach()
        near = [
            value.to("meta"), value.numpy(), value.tolist(), value.double(), value.int(), value.bool(),
            value.to(torch.complex64), value[:0], value[:1], value[None], value[..., 0], value.half(), -value - 100,
            value.to_sparse(), value.float().to(torch.float8_e4m3fn), torch.nn.Parameter(value.float()), [value],
            (value,),         ]  # fmt: skip
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        value = typing.cast(Any, value)
        field = rng.choice(value._fields)
        near = [
            value._replace(**{field: rng.choice(strange)}), tuple(value), list(value), value._asdict(), value[:1],
            value[0],         ]  # fmt: skip
        parts = [part for part in value if isinstance(part, Tensor)]
        if parts:
            changed = getattr(value, field)
            if isinstance(changed, Tensor):
                near += [value._replace(**{field: junk(rng, changed)}) for _ in range(6)]
    elif isinstance(value, list) and value:
        near = [[junk(rng, value[0]), *value[1:]], [value], value * 3]
    return rng.choice(near if near and rng.random() < 0.6 else strange)


def public() -> Iterator[tuple[str, Any]]:
    """Every public function, class and method, by its name in CASES."""
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing):
                yield name, thing
            elif inspect.isclass(thing):
                if not inspect.isabstract(thing):
                    yield name, thing
                for owner in thing.__mro__:
                    if not owner.__module__.startswith("subquad"):
                        continue
                    for attribute, value in vars(owner).items():
                        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                        if inspect.isfunction(value) and not attribute.startswith("_"):
                            yield f"{owner.__name__}.{attribute}", value


# not called separately: classes that are never built directly, and methods that share a definition
SAME = {
    "Model": "LanguageModel",
    "Model.save": "LanguageModel.save",
    "Model.load": "LanguageModel.load",
    "LSTM.generate": "LanguageModel.generate",
    "LSTM.stream": "LanguageModel.stream",
    "LSTM.init_state": "LanguageModel.init_state",
    "LSTM.prefill": "LanguageModel.prefill",
    "LSTM.step": "LanguageModel.step",
    "Seq2Seq.stream": "LanguageModel.stream",
}


def test_every_public_function_is_called() -> None:
    called = {name.split(" ")[0] for name in CASES}
    missing = {name for name, _ in public()} - called - set(SAME)
    assert not missing, f"say in CASES how to call {sorted(missing)}"
    assert set(SAME.values()) <= called


def parameters(function: Callable[..., Any], arguments: dict[str, Any]) -> set[str]:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    return {name for name in inspect.signature(target).parameters if name != "self"} | set(arguments)


def must_refuse(function: Callable[..., Any], name: str, value: Any) -> bool:
    """Whether the type hint of a parameter clearly excludes this value."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    target = target.__init__ if inspect.isclass(target) else target
    hint = typing.get_type_hints(inspect.unwrap(getattr(target, "__func__", target))).get(name, Any)
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    plain = (Tensor, bool, int, float, type(None))
    if issubclass(getattr(target, "__self__", None).__class__, tuple) or any(kind not in plain for kind in kinds):
        return False
    accepted = [kind for kind in kinds if not (isinstance(value, bool) and kind in (int, float))]
    accepted += [int] if float in kinds and not isinstance(value, bool) else []
    return not isinstance(value, tuple(accepted))


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def complaint(function: Callable[..., Any], arguments: dict[str, Any], changed: dict[str, Any]) -> str | None:
    """What is wrong with the end of a call, or None."""
    try:
        result = function(**arguments)
        if isinstance(result, types.GeneratorType):
            result = list(itertools.islice(result, 2))
    except Exception as error:
        if any(isinstance(value, torch.nn.Module) or value is int for value in changed.values()):
            return None  # an argument was callable, was called and failed
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{type(error).__name__} from {frames[-1].filename}:{frames[-1].lineno}: {str(error)[:300]}"
        if not isinstance(error, TypeError | ValueError | NotImplementedError | FileNotFoundError):
            return place
        if not frames[-1].filename.startswith(PACKAGE):
            return place
        names = parameters(function, arguments)
        values = [
            str(arguments[name]) for name in ("path", "directory") if name in arguments
        ]  # an error may name the file instead
        named = any(re.search(rf"\b{re.escape(name)}\b", str(error)) for name in names)
        return (
            None if named or any(value in str(error) for value in values) else f"{place} names none of {sorted(names)}"
        )
    refused = [name for name, value in changed.items() if must_refuse(function, name, value)]
    if refused:
        return f"a result in spite of {refused}"
    given = [t for value in arguments.values() for t in tensors(value)]
    made = [t for t in tensors(result) if t.numel() and not any(t is other for other in given)]
    if any(t.is_meta for t in given) and any(not t.is_meta for t in made):
        return "numbers from tensors that have none"
    return None


def trial(seed: int, folder: Path) -> str | None:
    """Make one random call; returns what was wrong with its end, or None."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name = rng.choice(list(CASES))
    function, arguments = CASES[name](rng, folder)
    if not arguments:
        return None
    changed = {
        key: junk(rng, arguments[key])
        for key in rng.sample(list(arguments), min(len(arguments), rng.choice([1, 1, 2])))
    }
    if name in ("LinearState", "SparseState"):  # plain tuples, whose content is checked when they are used
        return None
    if changed.get("compile") is True:  # valid, and takes a minute
        return None
    wrong = complaint(function, {**arguments, **changed}, changed)
    return (
        wrong
        and f"seed {seed}: {name}({', '.join(f'{key}={value!r}'[:200] for key, value in changed.items())}): {wrong}"
    )


@pytest.mark.parametrize("part", range(4))
def test_wrong_arguments_are_refused_by_name(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seeds = range(SEED + part, SEED + CALLS, 4)
    bad = [wrong for seed in seeds if (wrong := trial(seed, tmp_path)) is not None]
    assert not bad, f"{len(bad)} of {len(seeds)} calls:\n" + "\n".join(bad)


@pytest.mark.parametrize("name", CASES)
def test_the_calls_are_valid_without_changes(name: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    function, arguments = CASES[name](rng, tmp_path)
    if "text" not in arguments:
        result = function(**arguments)
        if isinstance(result, types.GeneratorType):
            next(result)
