"""A tokenizer for models that read bytes: token n is byte n, in a file that transformers reads by itself."""

from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from subquad.checks import refuse

BYTES = 256
END = "\0"  # byte 0, which texts do not contain: it ends a text, and pads


def byte_tokenizer(*more: str) -> Any:
    """The tokenizer of a model with vocab=256 + len(more): bytes, then special tokens by these names.

    It is a file, tokenizer.json, that AutoTokenizer loads without this package. Byte 0 ends texts and pads.
    """
    if len(set(more)) < len(more) or not all(isinstance(name, str) and len(name) > 1 for name in more):
        refuse("more", more, 'different names of special tokens, each longer than a character, such as "<s>"')
    names = _characters()
    vocab = {END if n == 0 else names[n]: n for n in range(BYTES)}
    vocab |= {name: BYTES + n for n, name in enumerate(more)}
    inner = Tokenizer(BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        additional_special_tokens=list(more) or None,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _characters() -> list[str]:
    """The visible character by which byte-level tokenizers write each byte: itself, or one from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(n) if n in visible else chr(next(hidden)) for n in range(BYTES)]
