"""Models built on the mechanisms: a stack of blocks, and on it language models, classifiers and others."""

from pathlib import Path

import torch

from subquad.checks import check_device, checked
from subquad.models.classifier import Classifier, ClassifierConfig, Matcher, MatcherConfig
from subquad.models.config import EmbeddingConfig, MixerConfig, TransformerConfig
from subquad.models.language_model import LanguageModel, LanguageModelConfig
from subquad.models.lstm import LSTM, LSTMConfig
from subquad.models.sampling import Sampling
from subquad.models.saving import Model, read_header
from subquad.models.seq2seq import Seq2Seq, Seq2SeqConfig
from subquad.models.state import fork, load_state, save_state
from subquad.models.streams import Streams
from subquad.models.transformer import Transformer

KINDS: tuple[type[Model], ...] = (Transformer, LanguageModel, Classifier, Matcher, Seq2Seq, LSTM)
MODELS = {model.__name__: model for model in KINDS}


@checked
def load(directory: str | Path, device: str | torch.device = "cpu") -> Model:
    """The model of a run, of a saved model's folder, or of a shipped checkpoint by its name, in eval mode.

    load("runs/t1"), load("runs/t1/model") or load("mnist_linear"), like the argument of `subquad generate`.
    """
    from subquad.models.shipped import find

    check_device("device", device, meta=False)
    folder = find(directory)
    name = read_header(folder)["model"]
    if name not in MODELS:
        raise ValueError(f"{folder} holds a {name!r}: accepted are {', '.join(MODELS)}")
    return MODELS[name].load(folder, device)


__all__ = [
    "LSTM",
    "MODELS",
    "Classifier",
    "ClassifierConfig",
    "EmbeddingConfig",
    "LSTMConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "Matcher",
    "MatcherConfig",
    "MixerConfig",
    "Model",
    "Sampling",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Streams",
    "Transformer",
    "TransformerConfig",
    "fork",
    "load",
    "load_state",
    "save_state",
]
