"""What a model's tokens mean: bytes of text, tokens of a Hugging Face tokenizer, or numbers (pixels, notes, sound)."""

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from subquad.checks import refuse
from subquad.data import audio, files
from subquad.disk import blaming, read_object
from subquad.models.decoding import values_of
from subquad.models.saving import of_transformers
from subquad.tasks import writer_of
from subquad.tasks.images import Images
from subquad.tasks.text import BYTES, Text, number_tokens, prompt_tokens

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
TEMPLATE = "chat_template.jinja"
BYTE = re.compile("<0x([0-9A-F]{2})>")  # what tokenizers call the tokens of single bytes that they fall back to
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no text, or not yet
CONTEXT = 8  # tokens with which the next one is decoded: a character has at most 4 bytes, and each token has one
END_OF_TEXT = 0  # a zero byte, as between the novels of eltec-eng


class Decoder(Protocol):
    def push(self, token: int) -> str:
        """The text that became whole with this token."""

    def flush(self) -> str:
        """What is left, with a replacement character for a cut one."""


class Vocabulary(ABC):
    """Text to tokens and back."""

    kind: str = "text"
    template: str | None = None  # a chat template in Jinja, if there is one
    ends: tuple[int, ...] = ()  # tokens that end a text
    never: tuple[int, ...] = ()  # tokens that are never drawn

    def __init__(self, vocab: int, start: int):
        self.vocab, self.start = vocab, start  # `start` stands for an empty prompt

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decoder(self) -> Decoder: ...

    @abstractmethod
    def bytes_of(self, token: int) -> bytes:
        """What one token writes, which may be a part of a character."""

    def name_of(self, token: int) -> str:
        """A token as log-probabilities show it; a part of a character as OpenAI shows it, bytes:\\xc3."""
        written = self.bytes_of(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a chat, up to where the assistant's next message begins."""
        if self.template is None:
            accepted = f"a model whose folder has a {TEMPLATE}, or the option --chat-template; use /v1/completions"
            raise ValueError(f"messages cannot work: this model has no chat template; accepted is {accepted}")
        return self.encode(render_template(self.template, messages))


class Bytes(Vocabulary):
    """Byte-level models of `subquad train text`."""

    def __init__(self, vocab: int):
        super().__init__(vocab, prompt_tokens("", vocab)[0])
        self.ends = (END_OF_TEXT,)

    def encode(self, text: str) -> list[int]:
        return prompt_tokens(text, self.vocab) if text else []

    def decoder(self) -> Decoder:
        return _ByteDecoder()

    def bytes_of(self, token: int) -> bytes:
        return bytes((token,)) if token < BYTES else b""


class _ByteDecoder:
    __slots__ = ("inside", "utf8")

    def __init__(self) -> None:
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.inside = False  # a character

    def push(self, token: int) -> str:
        if token < 128 and not self.inside:  # almost every token
            return chr(token)
        text = self.utf8.decode(bytes((token,))) if token < BYTES else ""
        self.inside = bool(self.utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self.utf8.decode(b"", final=True)


class Numbers(Vocabulary):
    """Models of images, music and sound: the text of a token is its number, after a space."""

    def __init__(self, vocab: int, start: int, kind: str, never: tuple[int, ...] = ()):
        super().__init__(vocab, start)
        self.kind, self.never = kind, never

    def encode(self, text: str) -> list[int]:
        return number_tokens(text, self.vocab)

    def decoder(self) -> Decoder:
        return _NumberDecoder()

    def bytes_of(self, token: int) -> bytes:
        return f" {token}".encode()


class _NumberDecoder:
    def push(self, token: int) -> str:
        return f" {token}"

    def flush(self) -> str:
        return ""


class HuggingFace(Vocabulary):
    """A folder's own tokenizer, which `transformers` reads."""

    def __init__(self, folder: Path, vocab: int, ends: tuple[int, ...] = ()):
        """`ends`: tokens with which the model ends a text, besides the tokenizer's own."""
        transformers = files.extra("transformers", "hf", "folders with a tokenizer")
        import_module("subquad.hf")  # so that transformers knows our config.json, which lies beside the tokenizer
        with blaming(f"the tokenizer in {folder}", OSError, ValueError):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        if len(self.tokenizer) > vocab:
            accepted = f"at most {vocab:,}, the tokens of the model"
            raise ValueError(f"{folder} has a tokenizer of {len(self.tokenizer):,} tokens: accepted is {accepted}")
        end, begin = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        super().__init__(vocab, begin if begin is not None else end if end is not None else 0)
        self.ends = tuple(dict.fromkeys((*(() if end is None else (end,)), *ends)))
        self.byte_of = {
            char: byte for byte, char in import_module("transformers.convert_slow_tokenizer").bytes_to_unicode().items()
        }
        self.special = frozenset(self.tokenizer.all_special_ids)
        named = {number: BYTE.fullmatch(name) for name, number in self.tokenizer.get_vocab().items()}
        self.fallback = {number: bytes.fromhex(found[1]) for number, found in named.items() if found}
        self.template = getattr(self.tokenizer, "chat_template", None)

    def encode(self, text: str) -> list[int]:
        _check_utf8(text)
        return list(self.tokenizer.encode(text))

    def decoder(self) -> Decoder:
        return _TextDecoder(self.tokenizer, self.special, self.fallback)

    def bytes_of(self, token: int) -> bytes:
        if token >= len(self.tokenizer):
            return b""
        text: str = self.tokenizer.decode([token])
        return text.encode() if BROKEN not in text else self._part_of_character(token) or text.encode()

    def _part_of_character(self, token: int) -> bytes:
        """The bytes of a token whose name is <0xC3>, or a character for each byte, as byte-level tokenizers have."""
        name: str = self.tokenizer.convert_ids_to_tokens(token)
        if token in self.fallback:
            return self.fallback[token]
        return bytes(self.byte_of[char] for char in name) if self.byte_of.keys() >= set(name) else b""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self.template is None:
            return super().render(messages)
        with blaming("messages", Exception):
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=True
            )
        _check_utf8(text)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class _TextDecoder:
    """Decodes the last few tokens together: what is new in their text is written, but for a character that has begun.

    Of a character that has begun, and of bytes that are none, a tokenizer makes a replacement character each. So one at
    the end waits for the next token. Only tokens of single bytes, which some tokenizers fall back to, are decoded here:
    their tokenizers give none of the bytes that follow each other before all of them are characters.
    """

    def __init__(self, tokenizer: Any, special: frozenset[int], fallback: Mapping[int, bytes]):
        self.tokenizer, self.special, self.fallback = tokenizer, special, fallback
        self.tokens: list[int] = []
        self.given = 0  # characters of their text that are written
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self.special or token >= len(self.tokenizer):
            return ""
        if (byte := self.fallback.get(token)) is not None:
            new = self._rest() + self.utf8.decode(byte)
            self.tokens = [*self.tokens, token][-CONTEXT:]
            self.given = len(self._text())
            return new
        before = self.utf8.decode(b"", final=True)
        self.tokens.append(token)
        text = self._text()
        held = text.endswith(BROKEN)
        new = text[self.given : len(text) - held]
        if (new and not held) or len(self.tokens) > 2 * CONTEXT:
            # what is written is context enough for what comes
            self.tokens = [token] if not held else self.tokens[-CONTEXT:]
            text = self._text()
            self.given = len(text) - held
        else:
            self.given += len(new)
        return before + new

    def flush(self) -> str:
        return self._rest() + self.utf8.decode(b"", final=True)

    def _rest(self) -> str:
        """What waits for the rest of a character."""
        return self._text()[self.given :]

    def _text(self) -> str:
        text: str = self.tokenizer.decode(self.tokens)
        return text


def vocabulary_of(folder: Path, model: Any, card: Mapping[str, Any], template: Path | None) -> Vocabulary:
    """The vocabulary of a saved model: its folder's tokenizer, else what its task writes."""
    vocab, task = model.config.embedding.vocab or 0, writer_of(model, card)
    found: Vocabulary
    if any((folder / name).is_file() for name in TOKENIZER):
        found = HuggingFace(folder, vocab, getattr(model, "ends", ()))
    elif of_transformers(folder):
        raise ValueError(f"{folder} has no tokenizer: accepted is a folder with one of {', '.join(TOKENIZER)}")
    elif task is Text and vocab >= BYTES:
        found = Bytes(vocab)
    else:
        # sound begins with silence, anything else with the last token, which is no shade and no note
        sound = not issubclass(task, Images | Text) and vocab == audio.LEVELS
        start = audio.LEVELS // 2 if sound else vocab - 1
        drawn = sound or task is Text or start >= values_of(model)
        found = Numbers(vocab, start, "tokens" if task is Text else task.writes, () if drawn else (start,))
    chosen = template or (folder / TEMPLATE if found.template is None and (folder / TEMPLATE).is_file() else None)
    if chosen is not None:
        if isinstance(found, Numbers):
            refuse("chat_template", str(chosen), f"none for a model of {found.kind}")
        found.template = _read_template(chosen)
    return found


def _read_template(path: Path) -> str:
    """A chat template: a Jinja file, or a tokenizer_config.json that holds one."""
    if path.suffix == ".json":
        template = read_object(path).get("chat_template")
        if not isinstance(template, str):
            raise ValueError(f"{path} holds no chat_template: accepted is a Jinja file, or a JSON file that has one")
        return template
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        refuse("chat_template", str(path), "a Jinja file in UTF-8")


def render_template(template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of a chat, in a sandbox; ValueError if the template refuses the messages."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refused(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refused
    try:
        return environment.from_string(template).render(messages=list(messages), add_generation_prompt=True)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"messages cannot work with this model's chat template: {error}") from error


def _check_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse("prompt", text, "text in UTF-8")
