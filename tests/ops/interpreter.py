"""Triton's interpreter in half the time: what it derives again at each operation is derived once. Results are the same.

Only the versions of ops/launch.py are changed; any other runs as it came.
"""

import functools
from typing import Any

import numpy as np
import pytest
from triton.language import core
from triton.runtime import interpreter

from subquad.ops.launch import _is_known


class _Nothing:
    """A scope in which nothing was replaced, so that nothing is restored."""

    def restore(self) -> None:
        pass


def _replace_the_language_once() -> None:
    """A kernel replaces the functions of triton.language, and each call of a device function did so again."""
    replace = interpreter._patch_lang
    replaced: set[str] = set()

    @functools.cache
    def languages(fn: Any) -> frozenset[str]:
        return frozenset(m.__name__ for m in fn.__globals__.values() if m is interpreter.tl or m is core)

    def replace_once(fn: Any) -> Any:
        if languages(fn) <= replaced:
            return _Nothing()
        scope = replace(fn)
        restore = scope.restore

        def restore_and_forget() -> None:
            replaced.clear()
            restore()

        scope.restore = restore_and_forget
        replaced.update(languages(fn))
        return scope

    interpreter._patch_lang = replace_once


def _derive_types_once() -> None:
    """What follows from a type follows from its name."""
    derive, dtypes = interpreter._get_np_dtype, {}
    make_type, types = core.block_type.__init__, {}
    make_tensor, shapes = core.tensor.__init__, {}

    def np_dtype(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = derive(type)
        return dtypes[type.name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(core._unwrap_if_constexpr, shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(shapes[type.name], handle=handle, type=type, dtype=type.scalar)

    interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__ = np_dtype, block_type, tensor


def _scan_whole_slices() -> None:
    """What is combined is combined element by element, so all of a slice can be at once."""

    def scan(self: Any, input: Any) -> Any:
        def slices(arrays: Any, at: int) -> list[Any]:
            return [self.to_tensor(array[at], x.dtype) for array, x in zip(arrays, input, strict=True)]

        given = [np.moveaxis(x.handle.data, self.axis, 0) for x in input]
        scanned = [array.copy() for array in given]
        for at in range(1, len(given[0])):
            combined = self.combine_fn.fn(*slices(scanned, at - 1), *slices(given, at))
            for array, part in zip(scanned, combined if isinstance(combined, tuple) else (combined,), strict=True):
                array[at] = part.handle.data
        return [self.to_tensor(np.moveaxis(a, 0, self.axis), x.dtype) for a, x in zip(scanned, input, strict=True)]

    interpreter.ScanOps.generic_scan = scan


def multiply_as_a_gpu_does(monkeypatch: Any) -> None:
    """bfloat16 by rounding to nearest, where the interpreter truncates, and products of bfloat16, which it has not."""
    if not _is_known:
        pytest.skip("the interpreter of another version")
    convert = interpreter._convert_float

    def round_to_nearest(x: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if given != core.float32 or wanted != core.bfloat16:
            return convert(x, given, wanted, mode)
        bits = np.ascontiguousarray(x).view(np.uint32)
        return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)

    def dot(_self: Any, a: Any, b: Any, sum: Any, precision: Any, _imprecise: Any) -> Any:
        def factor(x: Any) -> Any:
            if x.dtype.scalar == core.bfloat16:
                return (x.data.astype(np.uint32) << 16).view(np.float32)
            if precision == interpreter._ir.INPUT_PRECISION.TF32:
                return (np.ascontiguousarray(x.data).view(np.uint32) & 0xFFFFE000).view(np.float32)
            return x.data

        return interpreter.TensorHandle(factor(a) @ factor(b) + sum.data, sum.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", round_to_nearest)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def hasten() -> None:
    if not _is_known:
        return
    _replace_the_language_once()
    _derive_types_once()
    _scan_whole_slices()
