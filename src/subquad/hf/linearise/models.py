"""The teacher, and students made of it."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from subquad.checks import refuse
from subquad.hf.linearise.settings import LineariseSettings
from subquad.hf.replace import KNOWN, Replacement, attentions, replace
from subquad.ops.short_conv import ShortConv

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Teacher(NamedTuple):
    model: Any  # in float32, in eval mode, without gradients
    tokenizer: Any
    dtype: torch.dtype  # as it was saved
    layers: tuple[int, ...]  # numbers of its attention modules


def load_teacher(name: str | Path, device: str) -> Teacher:
    """A pretrained decoder and its tokenizer: a folder, a GGUF file, or a name on the hub."""
    path = Path(name)
    source, how = where(name)
    if path.is_dir() and not (path / "config.json").is_file():
        refuse("model", str(name), "a folder with config.json, which transformers' save_pretrained writes")
    elif path.is_file() and not how:
        refuse("model", str(name), "a folder, a file that ends in .gguf, or the name of a model on the hub")
    elif not path.exists() and (path.is_absolute() or str(name).startswith(".")):
        refuse("model", str(name), "a folder that exists, a .gguf file, or the name of a model on the hub")
    if path.is_dir() and not any((path / file).is_file() for file in TOKENIZERS):
        refuse("model", str(name), f"a folder with a tokenizer, but it has none of {', '.join(TOKENIZERS)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **how)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model={str(name)!r} cannot work: its tokenizer cannot be read ({error})") from error
    try:
        model = load_model(source, "auto", how)
    except (ValueError, OSError) as error:
        raise ValueError(f"model={str(name)!r} cannot work: accepted is a causal decoder ({error})") from error
    return check_teacher(Teacher(model, tokenizer, model.dtype, ()), str(name), device)


def where(name: str | Path) -> tuple[str | Path, dict[str, Any]]:
    """What from_pretrained takes for a folder, a GGUF file or a name."""
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return path.parent, {"gguf_file": path.name}
    return name, {}


def load_model(source: str | Path, dtype: Any, how: dict[str, Any]) -> Any:
    """A causal decoder; one from a GGUF file is one of plain weights, which can be trained and saved."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **how)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and how and all(p.is_floating_point() for p in model.parameters()):
        quantizer.remove_quantization_config(model)  # its weights are not quantized any more
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"{source} has quantized weights: accepted are floating point ones, or a GGUF file")
    return model


def check_teacher(teacher: Teacher, name: str, device: str) -> Teacher:
    """The teacher, ready on a device; refuses models that are no decoders, or whose attention is not known."""
    model, kind = teacher.model, type(teacher.model).__name__
    found = dict(attentions(model))
    if not found:
        refuse("model", name, f"a decoder whose attention modules are {KNOWN}, but this {kind} has none")
    if any(isinstance(one.module, Replacement) for one in found.values()):
        refuse("model", name, "one without replaced layers")
    if model.config.is_encoder_decoder or not all(getattr(one.module, "is_causal", False) for one in found.values()):
        refuse("model", name, f"a causal decoder, but this {kind} also reads what follows a token")
    size = model.get_input_embeddings().num_embeddings
    if len(teacher.tokenizer) > size:
        refuse(
            "model", name, f"one whose tokenizer has at most as many tokens as it, {size}: its {len(teacher.tokenizer)}"
        )
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        refuse("model", name, f"weights of float32, bfloat16 or float16, but these are {model.dtype}")
    model = model.float().to(device).eval().requires_grad_(False)
    return teacher._replace(model=model, layers=tuple(sorted(found)))


def candidates(teacher: Teacher, settings: LineariseSettings) -> tuple[int, ...]:
    """The layers that may be replaced; refuses numbers of no layer, and a keep that leaves none to replace."""
    layers = teacher.layers if settings.layers is None else tuple(sorted(settings.layers))
    if wrong := [n for n in layers if n not in teacher.layers]:
        refuse("layers", list(layers), f"numbers from 0 to {max(teacher.layers)}, without {wrong}")
    if kept_of(teacher, settings, layers) >= len(layers):
        share = f"{len(teacher.layers)} layers, of which {len(layers)} may be replaced"
        refuse("keep", settings.keep, f"a share that leaves a layer to replace: there are {share}")
    return layers


def kept_of(teacher: Teacher, settings: LineariseSettings, layers: Sequence[int]) -> int:
    """How many of the candidates keep softmax. Layers that are no candidates keep it and count."""
    whole = len(teacher.layers)
    return max(0, int(settings.keep * whole + 1e-9) - (whole - len(layers)))


def make_student(teacher: Teacher, layers: Sequence[int], settings: LineariseSettings) -> Any:
    """A copy of the teacher with these layers replaced; the same each time."""
    student = copy.deepcopy(teacher.model)
    device = teacher.model.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        replace(student, list(layers), **settings.replacement())
    for module in student.modules():
        if isinstance(module, ShortConv):  # begin with the token itself, as copied projections expect
            with torch.no_grad():
                module.weight.zero_()
                module.weight[0] = 1
    return student


def replaced(model: nn.Module) -> dict[int, Replacement]:
    """The replaced layers of a model, by number."""
    return {n: one.module for n, one in attentions(model) if isinstance(one.module, Replacement)}


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' warnings and progress bars."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
