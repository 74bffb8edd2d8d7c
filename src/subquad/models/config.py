"""Configs of models: frozen values that are checked when made, written as JSON and read back."""

import dataclasses
import itertools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from subquad.checks import check_count, check_methods, check_plain, counts, nearest, one_of, refuse, refuse_keyword
from subquad.disk import parse_json
from subquad.mechanisms import mechanism as mechanism_class

ACTIVATIONS = ("relu", "gelu", "swiglu")
NORMS = ("layer", "rms")
NORM_POSITIONS = ("pre", "post")
GRIDS = ("grid", "waves")  # one learned vector for each row, column and channel, initialised at random or as waves
POSITIONS = ("sinusoidal", "sinusoidal_concat", "learned", *GRIDS, "none")
MOST_LAYERS = 10_000  # more would take minutes to build and then not fit into memory

# "linear", ("linear", {"eps": 1e-4}), a MixerConfig, or a sequence of these (also "linear, linear, local")
MixerLike = Any
C = TypeVar("C", bound="Config")


@check_methods
@dataclass(frozen=True)
class Config:
    """Base of the configs: checks its fields, converts to and from JSON, and refuses unknown keys."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_methods(cls)

    def __post_init__(self) -> None:
        """Check fields: counts are at least 1, seeds at least 0, dropouts are probabilities, parts have their type."""
        for name, hint in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            probability = isinstance(value, int | float) and value is not False and 0 <= value < 1
            if hint is int or (hint == int | None and value is not None):
                check_count(name, value, 0 if name == "seed" else 1)
            elif hint is bool or (isinstance(hint, type) and issubclass(hint, Config)):
                check_plain(name, value, hint)
            elif hint is float and name.endswith("dropout") and not probability:
                refuse(name, value, "a probability in [0, 1)")
            if name == "depth" and value > MOST_LAYERS:
                refuse(name, value, f"an integer of at most {MOST_LAYERS:,}")

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = _plain(self, "")
        return plain

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The config that `to_dict` wrote."""
        known = [f.name for f in dataclasses.fields(cls)]
        accepted = f"ccepted in data: {', '.join(known)}"
        if not isinstance(data, Mapping):
            raise ValueError(f"{cls.__name__} cannot be made of {data!r:.100}: a{accepted}")
        for key in data:
            if key not in known:
                raise ValueError(f"{cls.__name__} has no key {key!r}{nearest(key, known)} A{accepted}")
        for name in _missing(cls, data):
            raise ValueError(f"{cls.__name__} lacks the key {name!r} in data")
        parts = _parts(cls)
        return cls(**{key: parts[key].from_dict(value) if key in parts else value for key, value in data.items()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The config that `to_json` wrote."""
        return cls.from_dict(parse_json(text, "text"))


@dataclass(frozen=True)
class MixerConfig(Config):
    """The name of a mechanism, and its options other than those the model sets itself."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        mechanism_class(self.name)  # an unknown name raises here
        object.__setattr__(self, "options", _check_options(self.options, "options"))


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """A stack of blocks: an encoder; with causal=True a decoder; with `cross` as well, a decoder over a memory."""

    dim: int
    depth: int = 6
    heads: int = 8
    mechanism: MixerLike = "softmax"  # several are cycled over the depth
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of every layer's mechanism
    causal: bool = False
    cross: MixerLike | None = None  # mechanism of attention to a memory, after each self-mixing
    rotary: bool = False  # rotary positions, inside the mixers that have them
    norm: str = "layer"
    norm_position: str = "pre"
    norm_eps: float = 1e-5
    final_norm: bool = True
    activation: str = "gelu"
    ff_dim: int | None = None  # None: 4·dim, or 8/3·dim for swiglu, which has three matrices
    ff_chunks: int = 1  # compute the feed-forward for this many pieces of the sequence, one after the other
    dropout: float = 0.0  # of what each branch adds to the residual
    ff_dropout: float = 0.0  # inside the feed-forward, after the activation
    attention_dropout: float = 0.0  # inside the mixers that have dropout
    taps: tuple[int, ...] = ()  # a convolution before each mixer reads tokens this far back and, if not causal, ahead
    pool: int | tuple[int, ...] = 1  # a layer with pool=n averages n positions into one (Funnel); several are cycled
    # recompute each block in backward. A number: also keep the inputs of at most so many blocks, and compute the others
    # once more; about √(2·depth) is the least
    checkpoint: bool | int = False
    reversible: bool = False  # recompute activations from the output in backward
    seed: int = 0  # of random features, hashes and so on; each layer draws its own
    max_length: int | None = None  # the longest sequence, for learned parts of that size
    memory_length: int | None = None  # the same for the memory; None: max_length

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, norm=NORMS, norm_position=NORM_POSITIONS, activation=ACTIVATIONS)
        check_plain("norm_eps", self.norm_eps, float)
        if not self.norm_eps > 0:
            refuse("norm_eps", self.norm_eps, "a positive number")
        object.__setattr__(self, "mechanism", mixers(self.mechanism, "mechanism"))
        object.__setattr__(self, "options", _check_options(self.options, "options"))
        object.__setattr__(self, "cross", None if self.cross is None else mixers(self.cross, "cross"))
        check_plain("pool", self.pool, int | Sequence[int])
        pools = (self.pool,) if isinstance(self.pool, int) else tuple(self.pool)
        if not pools or not counts(pools):
            refuse("pool", self.pool, "an integer of at least 1 or a sequence of them, cycled over the depth")
        object.__setattr__(self, "pool", pools)
        taps = tuple(self.taps) if isinstance(self.taps, (list, tuple)) else (0,)
        if not counts(taps) or len(set(taps)) < len(taps):
            refuse("taps", self.taps, "different integers of at least 1, such as (1, 2, 3)")
        object.__setattr__(self, "taps", taps)
        pooled = any(pool > 1 for pool in pools[: self.depth])
        if pooled and self.causal:
            refuse("pool", self.pool, "1 with causal=True: a mean over positions would show the future")
        if pooled and self.reversible:
            refuse("reversible", True, "False with pool > 1: a shortened sequence cannot be reconstructed")
        if self.reversible and self.norm_position == "post":
            refuse("reversible", True, 'False with norm_position="post": a norm of the sum cannot be undone')
        if not isinstance(self.checkpoint, bool):
            kept = self.checkpoint
            check_count("checkpoint", kept)
            least = next(n for n in itertools.count(1) if n * (n + 1) // 2 >= self.depth)
            if kept < least:
                refuse("checkpoint", kept, f"a bool, or at least {least} with depth={self.depth}")
        if self.reversible and self.checkpoint:
            refuse("checkpoint", self.checkpoint, "False with reversible=True, which recomputes every block already")

    def mixer_of(self, layer: int) -> MixerConfig:
        return self.mechanism[layer % len(self.mechanism)]

    def cross_of(self, layer: int) -> MixerConfig | None:
        return None if self.cross is None else self.cross[layer % len(self.cross)]

    def pool_of(self, layer: int) -> int:
        pools = typing.cast(tuple[int, ...], self.pool)
        return pools[layer % len(pools)]

    @property
    def inputs_kept(self) -> int:
        """Of how many blocks `checkpoint` keeps the inputs."""
        return self.depth if isinstance(self.checkpoint, bool) else min(self.checkpoint, self.depth)

    @property
    def ff_width(self) -> int:
        if self.ff_dim is not None:
            return self.ff_dim
        return -(-8 * self.dim // 24) * 8 if self.activation == "swiglu" else 4 * self.dim

    @property
    def kv_width(self) -> int:
        """The width of the keys, and of the values, that softmax attention keeps of a token."""
        return self.dim


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(Config):
    """How input becomes vectors: tokens of a vocabulary or frames of features, and their positions."""

    vocab: int | None = None
    features: int | None = None
    convolutions: int | None = None  # of frames: so many layers over each frame and its two neighbours; None: none
    positions: str = "sinusoidal"
    shape: tuple[int, ...] | None = None  # for "grid" and "waves": (rows, columns) or (rows, columns, channels)
    embedding_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.vocab is None) == (self.features is None):
            raise ValueError(f"vocab={self.vocab!r} and features={self.features!r} cannot work: pass one of the two")
        if isinstance(self.positions, str) and self.positions == "rotary":
            raise ValueError('positions="rotary" cannot work in an embedding: the mixers rotate, with rotary=True')
        if self.convolutions is not None and self.features is None:
            refuse("convolutions", self.convolutions, "None with vocab: they are for frames")
        one_of(self, positions=POSITIONS)
        if (self.shape is not None) != (self.positions in GRIDS):
            wanted = f'(rows, columns[, channels]) with positions="grid" or "waves", None with "{self.positions}"'
            refuse("shape", self.shape, wanted)
        if self.shape is not None:
            check_plain("shape", self.shape, Sequence[int])
            shape = tuple(self.shape)
            if len(shape) < 2 or not counts(shape):
                refuse("shape", self.shape, "two or three integers of at least 1: (rows, columns[, channels])")
            object.__setattr__(self, "shape", shape)


def mixers(value: MixerLike, name: str) -> tuple[MixerConfig, ...]:
    """Mechanisms in any accepted form -> a tuple of MixerConfig."""
    if isinstance(value, str):
        return tuple(MixerConfig(part.strip()) for part in value.split(","))
    if (one := _mixer(value)) is not None:
        return (one,)
    if not isinstance(value, Sequence) or not value:
        accepted = 'a name, a (name, options) pair, or a sequence of these such as ("linear", "linear", "local")'
        refuse(name, value, accepted)
    layers = []
    for part in value:
        if (layer := _mixer(part)) is None:
            refuse(name, part, 'a name or a (name, options) pair for each layer, such as ("local", {"window": 64})')
        layers.append(layer)
    return tuple(layers)


def _mixer(value: MixerLike) -> MixerConfig | None:
    """The mechanism of one layer: its name, MixerConfig, dict or (name, options) pair; None for anything else."""
    if isinstance(value, str | MixerConfig):
        return MixerConfig(value) if isinstance(value, str) else value
    if isinstance(value, Mapping):
        return MixerConfig.from_dict(value) if "name" in value and value.keys() <= {"name", "options"} else None
    pair = isinstance(value, Sequence) and len(value) == 2 and isinstance(value[1], Mapping)
    return MixerConfig(*value) if pair and isinstance(value[0], str) else None


def _check_options(options: object, name: str) -> dict[str, Any]:
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        refuse(name, options, "a dict of the mechanism's options")
    options = typing.cast(Mapping[str, Any], options)
    for taken in ("dim", "causal", "layer"):
        if taken in options:
            raise ValueError(f"{name} sets {taken}={options[taken]!r}: the model sets {taken} itself")
    return {key: _frozen(value) for key, value in options.items()}


def _frozen(value: Any) -> Any:
    """Lists become tuples, so that options read from JSON equal those that were written."""
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Config):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(v, f"{path}.{key}" if path else key) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{path}[{i}]") for i, v in enumerate(value)]
    raise ValueError(f"{path}={value!r} cannot be saved: accepted are numbers, text and lists of these, not code")


def _missing(cls: type[Config], given: Mapping[str, Any]) -> list[str]:
    """The fields without a default that are not given."""
    none, fields = dataclasses.MISSING, dataclasses.fields(cls)
    return [f.name for f in fields if f.default is none and f.default_factory is none and f.name not in given]


def _parts(cls: type[Config]) -> dict[str, type[Config]]:
    """The fields of a config that are configs themselves."""
    hints = typing.get_type_hints(cls)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Config)}


def assemble(
    cls: type[C],
    config: C | None,
    fields: Mapping[str, Any],
    homes: Mapping[str, tuple[str, ...]] = types.MappingProxyType({}),
    **defaults: Any,
) -> C:
    """The config as given, or made of flat keywords, such as vocab=10, dim=64, norm="rms".

    A keyword goes to every part that has such a field, or to the parts in `homes`. If two parts have the same type, a
    prefix sends a keyword to one of them: decoder_depth=2.
    """
    if config is not None:
        if fields:
            raise TypeError(f"{cls.__name__} and keywords ({', '.join(fields)}) came together: pass one or the other")
        if not isinstance(config, cls):
            raise TypeError(f"config is a {type(config).__name__}: accepted is a {cls.__name__}")
        return config
    parts = _parts(cls)
    names = {part: [f.name for f in dataclasses.fields(kind)] for part, kind in parts.items()}
    twins = len(set(parts.values())) < len(parts)
    accepted = {name: tuple(part for part in parts if name in names[part]) for part in parts for name in names[part]}
    accepted |= {f.name: ("",) for f in dataclasses.fields(cls)} | dict(homes)
    prefixed = {f"{part}_{name}": (part, name) for part in parts for name in names[part]} if twins else {}
    if "rotary" in accepted and isinstance(fields.get("positions"), str) and fields["positions"] == "rotary":
        fields = {**fields, "positions": "none", "rotary": True}  # the mixers rotate, not the embedding
    given: dict[str, dict[str, Any]] = {part: {} for part in ("", *parts)}
    for key, value in {**defaults, **fields}.items():
        if key in prefixed:
            part, name = prefixed[key]
            given[part][name] = value
        elif not accepted.get(key):
            refuse_keyword(f"{cls.__name__} has no field", key, accepted, prefixed)
        for part in accepted.get(key, ()):
            given[part].setdefault(key, value)
    own = given.pop("")
    for part in own.keys() & parts.keys():
        check_plain(part, own[part], parts[part])
    missing = [name for part in parts if part not in own for name in _missing(parts[part], given[part])]
    if missing:
        raise TypeError(f"{cls.__name__} needs {', '.join(dict.fromkeys(missing))}")
    return cls(**{part: parts[part](**values) for part, values in given.items() if part not in own}, **own)
