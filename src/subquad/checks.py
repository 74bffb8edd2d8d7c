"""Checks of arguments: every error names the argument, the value and what is accepted.

`checked` and `check_methods` wrap public functions. They compare the arguments with the type hints before the function
runs, so the function itself only checks what a type cannot express (shapes, ranges, devices).
"""

import dataclasses
import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # types to compute in
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LARGEST = 2**63 - 1  # the largest integer in a tensor
LEAST_EPS = 1e-30  # the smallest denominator: in float32 a much smaller one becomes 0, or its reciprocal infinite
LONGEST_PATH = 500  # characters; errors show a text up to this length in full
# torch has no exception type for lack of CPU memory, so we match its message; its OutOfMemoryError, of a GPU, passes
ALLOCATION = re.compile(r"(?<=DefaultCPUAllocator: ).*allocate \d+ bytes|Storage size calculation overflowed")
MASKS = ("mask", "attn_mask", "attention_mask", "key_padding_mask", "src_key_padding_mask", "padding_mask")


def refuse(name: str, value: object, accepted: str) -> NoReturn:
    """Raise ValueError in the form that all errors about a value have."""
    raise ValueError(f"{name}={shown(value)} cannot work: accepted is {accepted}")


def shown(value: object) -> str:
    """A value as errors show it: its repr if that is short, otherwise its type and size."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"{kind}({value.dtype}, {list(value.shape)}, {value.device})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{kind}({value.dtype}, {list(value.shape)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = (f for f in dataclasses.fields(value) if getattr(value, f.name) != f.default)
        return f"{kind}({', '.join(f'{f.name}={shown(getattr(value, f.name))}' for f in changed)})"
    if isinstance(value, str):  # may be the path of a file, which must stay readable
        return repr(value) if len(value) <= LONGEST_PATH else f"{value[:40]!r}... ({len(value):,} characters)"
    if isinstance(value, bytes | list | tuple | dict | set | frozenset) and len(value) > 60:
        return f"<{kind} of length {len(value)}>"
    text = repr(value)
    return text if len(text) <= 120 else f"<{kind}>"


def at_least(options: object, **bounds: int) -> None:
    """Refuse options that are not integers of at least their bound."""
    for name, bound in bounds.items():
        check_count(name, getattr(options, name), bound)


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse anything but an integer of at least `least`, or a symbolic size, which exported programs have."""
    if isinstance(value, torch.SymInt):
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        refuse(name, value, f"an integer of at least {least}" + (", below 2**63" if _too_large(value) else ""))


def check_eps(eps: float, least: float = LEAST_EPS) -> None:
    """Refuse an eps so small that a query whose features match no key would become 0/0."""
    if not eps >= least:
        refuse("eps", eps, f"a number above 0, at least {least:g}")


def check_tensor(name: str, value: object) -> None:
    """Refuse anything but a dense tensor."""
    if not isinstance(value, Tensor):
        refuse(name, value, "a tensor")
    check_strided(name, value)


def check_heads(shape: str, **tensors: Tensor) -> None:
    """Refuse tensors of other dimensions than `shape`, such as "[B, T, H, D]", and of different types or devices."""
    first, like = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x.ndim != shape.count(",") + 1 or 0 in x.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: accepted is {shape} with no empty dimension")
        if x.dtype not in FLOATS or x.dtype != like.dtype or x.device != like.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, {first} {like.dtype} on {like.device}:"
                " accepted is one floating point type of at least 16 bits on one device"
            )
        check_strided(name, x)


def check_device(name: str, value: object, meta: bool = True) -> None:
    """Refuse a device that torch does not know or this machine does not have, and meta if `meta` is False."""
    try:
        if not meta and torch.device(value).type == "meta":  # type: ignore[call-overload]
            raise RuntimeError("meta holds no values")
        torch.empty(0, device=value)  # type: ignore[call-overload]
    except Exception as error:
        accepted = 'a device of this machine, such as "cpu"'
        raise ValueError(f"{name}={shown(value)} cannot work: accepted is {accepted}") from error


def check_strided(name: str, x: Tensor) -> None:
    """Refuse tensors that are not dense, such as sparse ones."""
    if x.layout is not torch.strided:
        raise ValueError(f"{name} has layout {x.layout}: accepted is a dense tensor, such as {name}.to_dense()")


def counts(values: Iterable[object]) -> bool:
    """Whether all are integers of at least 1."""
    return all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= LARGEST for n in values)


def one_of(options: object, **choices: Iterable[str]) -> None:
    """Refuse options that are not among their choices."""
    for name, accepted in choices.items():
        value = getattr(options, name)
        if not isinstance(value, str) or value not in tuple(accepted):
            refuse(name, value, _or(f'"{choice}"' for choice in accepted))


PLAIN = {bool: "True or False", int: "an integer", float: "a finite number", str: "a name", type(None): "None"}


def check_plain(name: str, value: object, hint: Any) -> None:
    """Refuse a value that does not have the hinted type; NaN and infinity do not count as numbers."""
    if torch.compiler.is_compiling():
        return
    fits, words = _fitting(hint)
    if not fits(value):
        refuse(name, value, words + (" below 2**63" if _too_large(value) else ""))


def _too_large(value: object) -> bool:
    return isinstance(value, int) and abs(value) > LARGEST


Fits = Callable[[object], bool]


@functools.lru_cache(maxsize=1024)
def _fitting(hint: Any) -> tuple[Fits, str]:
    """A function that tells whether a value has the hinted type, and the type in words. Unknown hints accept all."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [_fitting(part) for part in inner]
        return lambda value: any(fits(value) for fits, _ in parts), _or(words for _, words in parts)
    if origin is Literal:
        words = _or(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in inner)
        return lambda value: isinstance(value, str | int | None) and value in inner, words
    if hint is int:
        return lambda value: isinstance(value, int) and type(value) is not bool and abs(value) <= LARGEST, PLAIN[int]
    if hint is float:
        return _is_finite, PLAIN[float]
    if origin is Callable:
        return callable, "a callable"
    if origin in (Sequence, list, tuple) and inner and (len(inner) == 1 or inner[-1] is Ellipsis):
        item_fits, item_words = _fitting(inner[0])
        kinds = (Sequence,) if origin is Sequence else (list, tuple)  # a list is as good as a tuple
        words = "a list" if item_words == "anything" else f"a list of {_plural(item_words)}"
        return (
            lambda value: (
                isinstance(value, kinds) and not isinstance(value, str | bytes) and all(map(item_fits, value))
            ),
            words,
        )
    if origin in (Mapping, dict):
        return lambda value: isinstance(value, Mapping), "a dict"
    if isinstance(hint, type) and origin is None and hint not in (Any, object):
        name = {"Tensor": "tensor", "State": "state of init_state or prefill"}.get(hint.__name__, hint.__name__)
        article = "an" if name[0] in "AEIOUaeiou" else "a"
        return lambda value: isinstance(value, hint), PLAIN.get(hint, f"{article} {name}")
    return lambda _: True, "anything"


def _plural(words: str) -> str:
    """ "an integer" -> "integers", "a list of integers" -> "lists of integers"."""
    article, _, noun = words.partition(" ")
    if article not in ("a", "an") or " or " in words:
        return f"items that are each {words}"
    head, of, items = noun.partition(" of ")
    return f"{head}s{of}{items}"


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value)


def _or(words: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(words))


def checked(function: F) -> F:
    """Refuse arguments that are not of the types in the signature, and keywords that are not in it.

    Nothing is checked while a program is compiled or exported.
    """
    signature: _Signature | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal signature
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if signature is None:
            signature = _Signature(function)
        signature.check(args, kwargs)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            asked = ALLOCATION.search(str(error))
            if asked is None:
                raise
            given = ", ".join(signature.describe(args, kwargs))
            name = type(args[0]).__name__ if function.__name__ == "__init__" else signature.name
            raise MemoryError(f"{name} needs more memory than there is ({asked[0]}): {given}") from error

    return typing.cast(F, call)


def check_methods(cls: C) -> C:
    """Make the public methods that a class defines, and its constructor, `checked`."""
    for name, method in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(method, types.FunctionType):
            setattr(cls, name, checked(method))
        elif isinstance(method, classmethod | staticmethod):
            setattr(cls, name, type(method)(checked(method.__func__)))
    return cls


class _Signature:
    """The parameters of a function, prepared for checking its calls."""

    def __init__(self, function: Callable[..., Any]):
        hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
        self.name = function.__qualname__.removesuffix(".__init__")
        self.open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.accepted = {
            name: _Accepted.of(hints.get(name, Any))
            for name, p in parameters.items()
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        }
        for name, p in parameters.items():
            if p.kind is p.VAR_KEYWORD and typing.get_origin(hints.get(name)) is typing.Unpack:  # of a TypedDict
                keywords = typing.get_type_hints(typing.get_args(hints[name])[0])
                self.accepted |= {key: _Accepted.of(hint) for key, hint in keywords.items()}
                self.open = False
        self.checks_itself = self.open and function.__name__ == "__init__"  # the constructor of a model
        positional = (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        self.positional = [(name, self.accepted[name]) for name, p in parameters.items() if p.kind in positional]

    def describe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
        """The arguments of a call, as errors show them."""
        for name, value in (*zip(self.accepted, args, strict=False), *kwargs.items()):
            if name != "self":
                yield f"{name}={shown(value)}"

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.checks_itself:
            return
        for (name, accepted), value in zip(self.positional, args, strict=False):
            if type(value) not in accepted.quick and not accepted.fits(value):
                check_plain(name, value, accepted.hint)
        for name, value in kwargs.items():
            known = self.accepted.get(name)
            if known is not None:
                if type(value) not in known.quick and not known.fits(value):
                    check_plain(name, value, known.hint)
            elif not self.open:
                refuse_keyword(f"{self.name} has no argument", name, [key for key in self.accepted if key != "self"])


INSTEAD_OF_MASKS = (
    "pass lengths, the number of tokens in each row [B], for right padding; build with causal=True to hide the future; "
    "pass a pattern such as Local(256) | Global(4) to ops.sparse_attention for anything else"
)


def refuse_keyword(problem: str, name: str, known: Iterable[str], also: Iterable[str] = ()) -> NoReturn:
    """Raise TypeError for an unknown keyword. Names in `also` are suggested for a misspelt one, but not listed."""
    if name in MASKS:
        raise TypeError(f"{problem} {name!r}: {INSTEAD_OF_MASKS}")
    raise TypeError(f"{problem} {name!r}{nearest(name, (*known, *also))} Accepted: {', '.join(known)}")


class _Accepted(NamedTuple):
    """What a parameter accepts."""

    hint: Any
    quick: frozenset[type]  # types whose values all fit: looked up first, so that most calls cost a microsecond
    fits: Fits

    @classmethod
    def of(cls, hint: Any) -> "_Accepted":
        kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        plain = {kind for kind in kinds if isinstance(kind, type) and typing.get_origin(kind) is None} - {int, float}
        return cls(hint, frozenset(plain | ({nn.Parameter} if Tensor in plain else set())), _fitting(hint)[0])


def plain_name(name: str, value: str) -> str:
    """Return the name; refuse one that could lead to another folder, such as "../x"."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        near = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("._-")
        such = f", such as {near!r}" if near else ""
        refuse(name, value, f"a name of letters, digits, '-', '_' and '.' that begins with a letter or digit{such}")
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a misspelt name, or a full stop."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
