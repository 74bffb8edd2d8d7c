"""subquad: the efficient transformers of the literature under one contract.

mix = subquad.build("linear", dim=256, heads=8, causal=True)
y = mix(x)                                  # [B, T, 256] in parallel
y, state = mix.prefill(prompt)              # or as a recurrence
y_t, state = mix.step(x_t, state)

model = subquad.load("mnist_linear")        # a run, a saved model's folder, or a shipped model
tokens = model.generate(prompt, 100, temperature=0.8)
"""

from subquad import models, nn, ops
from subquad.mechanisms import MECHANISMS, build
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.error import approximation_error
from subquad.models import (
    Classifier,
    LanguageModel,
    Matcher,
    Sampling,
    Seq2Seq,
    Streams,
    Transformer,
    fork,
    load,
    load_state,
    save_state,
)
from subquad.ranks import sequence_parallel

__version__ = "0.1.0"

__all__ = [
    "MECHANISMS",
    "Classifier",
    "LanguageModel",
    "Matcher",
    "Mixer",
    "Sampling",
    "Seq2Seq",
    "Streams",
    "Transformer",
    "approximation_error",
    "build",
    "fork",
    "load",
    "load_state",
    "models",
    "nn",
    "ops",
    "save_state",
    "sequence_parallel",
]
