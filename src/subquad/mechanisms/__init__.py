"""The mechanisms, one file each; `MECHANISMS` is the whole list and `build` the way in."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from subquad.checks import nearest, refuse_keyword
from subquad.mechanisms.additive import Additive
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.bigbird import Bigbird
from subquad.mechanisms.clustered import Clustered
from subquad.mechanisms.compressed import Compressed
from subquad.mechanisms.deltanet import DeltaNet
from subquad.mechanisms.efficient import Efficient
from subquad.mechanisms.fixed import Fixed
from subquad.mechanisms.fnet import FNet
from subquad.mechanisms.gated_deltanet import GatedDeltaNet
from subquad.mechanisms.gla import GLA
from subquad.mechanisms.gmlp import GMLP
from subquad.mechanisms.linear import Linear
from subquad.mechanisms.linformer import Linformer
from subquad.mechanisms.local import Local
from subquad.mechanisms.longformer import Longformer
from subquad.mechanisms.mamba2 import Mamba2
from subquad.mechanisms.mixed import Mixed
from subquad.mechanisms.mlp_mixer import MLPMixer
from subquad.mechanisms.nystrom import Nystrom
from subquad.mechanisms.performer import Performer
from subquad.mechanisms.reformer import Reformer
from subquad.mechanisms.retnet import RetNet
from subquad.mechanisms.rfa import RFA
from subquad.mechanisms.routing import Routing
from subquad.mechanisms.sinkhorn import Sinkhorn
from subquad.mechanisms.softmax import Softmax
from subquad.mechanisms.strided import Strided
from subquad.mechanisms.synthesizer import Synthesizer
from subquad.mechanisms.transformer_xl import TransformerXL

MECHANISMS: dict[str, type[Mixer]] = {
    "softmax": Softmax,
    "additive": Additive,
    "linear": Linear,
    "efficient": Efficient,
    "performer": Performer,
    "rfa": RFA,
    "reformer": Reformer,
    "routing": Routing,
    "clustered": Clustered,
    "sinkhorn": Sinkhorn,
    "linformer": Linformer,
    "compressed": Compressed,
    "nystrom": Nystrom,
    "local": Local,
    "strided": Strided,
    "fixed": Fixed,
    "longformer": Longformer,
    "bigbird": Bigbird,
    "synthesizer": Synthesizer,
    "transformer_xl": TransformerXL,
    "fnet": FNet,
    "gmlp": GMLP,
    "mlp_mixer": MLPMixer,
    "retnet": RetNet,
    "gla": GLA,
    "mamba2": Mamba2,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "mixed": Mixed,
}


def mechanism(name: str) -> type[Mixer]:
    """The class of that name, or a ValueError with the nearest name."""
    if not isinstance(name, str) or name not in MECHANISMS:
        accepted = ", ".join(MECHANISMS)
        raise ValueError(f"unknown mechanism {name!r}{nearest(name, MECHANISMS)} Accepted as name: {accepted}")
    return MECHANISMS[name]


def causal_only(names: Iterable[str]) -> str:
    """Those of the mechanisms that read from left to right only, in words; "" if there are none."""
    one_way = [
        name for name in dict.fromkeys(names) if name in MECHANISMS and not MECHANISMS[name].traits.bidirectional
    ]
    return ", ".join(one_way)


def build(name: str, **options: Any) -> Mixer:
    """A mechanism by name: build("linear", dim=256, heads=8, causal=True).

    TypeError for an option the mechanism does not have, ValueError for a value that cannot work.
    """
    cls = mechanism(name)
    known = [field.name for field in dataclasses.fields(cls.options_type)]
    for option in options:
        if option not in known:
            refuse_keyword(f"{name} has no option", option, known)
    if "dim" not in options:
        raise TypeError(f"{name} needs dim, the width of x")
    return cls(cls.options_type(**options))
