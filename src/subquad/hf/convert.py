"""Folders that both sides read: what `subquad convert` writes."""

from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer, GenerationConfig

from subquad.checks import checked, refuse
from subquad.disk import check_folder, write_whole
from subquad.hf.card import write_card
from subquad.hf.configuration import WRAPPED, SubquadConfig
from subquad.hf.modeling import WRAPPERS, unwrap, wrap
from subquad.hf.tokenizer import BYTES, byte_tokenizer
from subquad.models import Model, load
from subquad.models.saving import CONFIG, WEIGHTS
from subquad.models.shipped import card, find

CARD = "README.md"


@checked
def convert(
    source: str | Path,
    out: str | Path,
    to: Literal["hf", "subquad"] = "hf",
    tokenizer: str | Path | None = None,
) -> Path:
    """Write a model into the folder `out`, for transformers (to="hf") or as `model.save` does (to="subquad").

    source      a run, the folder of a saved model, a shipped checkpoint's name, or a folder that transformers saved,
                in one file or in several
    tokenizer   "bytes", the folder of a tokenizer, or "none"; None: that of the source if it has one, and bytes for a
                model of `subquad train text`

    Weights keep every bit. The folder for transformers also has a tokenizer, settings of generate and a model card, and
    `subquad.load` reads it too.
    """
    out = Path(out)
    check_folder("out", out)
    if to == "subquad" and tokenizer is not None:
        refuse("tokenizer", tokenizer, 'None with to="subquad": its folders have none')
    folder = Path(source) if _sharded(Path(source)) else find(source)
    model = read(folder)
    if to == "subquad":
        model.save(out)
        return out
    if type(model).__name__ not in WRAPPERS:
        refuse("source", str(source), f"a {' or a '.join(WRAPPED)}: transformers has no place for this model")
    reads = _tokenizer(folder, model, tokenizer)
    wrapper = wrap(model)
    if reads is not None:
        size, vocab = len(reads), model.config.embedding.vocab
        if size > vocab:
            refuse("tokenizer", tokenizer, f"one with at most {vocab} tokens, as many as the model: this has {size}")
        wrapper.config.eos_token_id, wrapper.config.pad_token_id = reads.eos_token_id, reads.pad_token_id
        if wrapper.can_generate():
            wrapper.generation_config = GenerationConfig(
                eos_token_id=reads.eos_token_id, pad_token_id=reads.pad_token_id, bos_token_id=reads.bos_token_id
            )
    wrapper.save_pretrained(out)
    if reads is not None:
        reads.save_pretrained(out)
    write_whole(out / CARD, write_card(model, out.name, reads is not None).encode())
    return out


def read(folder: Path) -> Model:
    """Our model in a folder of ours or of transformers, also if its weights are in several files."""
    if not _sharded(folder):
        return load(folder)
    kind = SubquadConfig.from_pretrained(folder).model
    return unwrap(WRAPPERS[kind].from_pretrained(folder))


def _sharded(folder: Path) -> bool:
    return (folder / f"{WEIGHTS}.index.json").is_file() and (folder / CONFIG).is_file()


def _tokenizer(folder: Path, model: Model, name: str | Path | None) -> Any:
    if name is None and (folder / "tokenizer_config.json").is_file():
        name = folder
    vocab = model.config.embedding.vocab
    if name is None and vocab == BYTES and card(folder).get("task") == "text":
        name = "bytes"
    if name is None or str(name) == "none":
        return None
    if str(name) == "bytes":
        if vocab < BYTES:
            refuse("tokenizer", name, f"none: this model has {vocab} tokens, fewer than there are bytes")
        return byte_tokenizer(*(f"<{n}>" for n in range(BYTES, vocab)))
    if not Path(name).is_dir():
        refuse("tokenizer", str(name), '"bytes", "none" or the folder of a tokenizer')
    return AutoTokenizer.from_pretrained(name)
