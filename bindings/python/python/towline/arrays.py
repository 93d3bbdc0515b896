"""Arrays in shared memory, which peers on the same host map."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

from . import _native
from ._errors import Invalid


class _Type(NamedTuple):
    format: str
    """The buffer protocol's name, empty where it has none."""
    kind: str
    """The letter of ``__array_interface__``."""
    code: int
    """DLPack's number."""
    bits: int


_TYPES = {
    "bool": _Type("?", "b", 6, 8),
    "int8": _Type("b", "i", 0, 8),
    "int16": _Type("h", "i", 0, 16),
    "int32": _Type("i", "i", 0, 32),
    "int64": _Type("q", "i", 0, 64),
    "uint8": _Type("B", "u", 1, 8),
    "uint16": _Type("H", "u", 1, 16),
    "uint32": _Type("I", "u", 1, 32),
    "uint64": _Type("Q", "u", 1, 64),
    "float16": _Type("e", "f", 2, 16),
    "float32": _Type("f", "f", 2, 32),
    "float64": _Type("d", "f", 2, 64),
    "complex64": _Type("Zf", "c", 5, 64),
    "complex128": _Type("Zd", "c", 5, 128),
    "bfloat16": _Type("", "V", 4, 16),
    "float8_e4m3fn": _Type("", "V", 10, 8),
    "float8_e4m3fnuz": _Type("", "V", 11, 8),
    "float8_e5m2": _Type("", "V", 12, 8),
    "float8_e5m2fnuz": _Type("", "V", 13, 8),
}

_OWN: dict[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


def _type_name(dtype: object) -> str:
    """The name in `_TYPES` of a string, a NumPy or a torch type, or one of Python's own."""
    if isinstance(dtype, type) and dtype in _OWN:
        return _OWN[dtype]
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = dtype.__name__
    else:
        name = getattr(dtype, "name", None) or str(dtype)
    name = name.removeprefix("torch.").removeprefix("numpy.")
    name = {"bool_": "bool", "half": "float16", "float": "float32", "double": "float64"}.get(name, name)
    if name not in _TYPES:
        raise Invalid(f"dtype: {dtype!r} is not one of {', '.join(_TYPES)}", op="empty")
    return name


def empty(shape: int | Sequence[int], dtype: object = "uint8") -> Any:
    """An array of zeros in shared memory.

    Registering it, or a view of it, lets peers on the same host map it and copy without a system call. It is a NumPy
    array where NumPy is installed and knows the type, and a `SharedArray` otherwise; ``torch.from_dlpack`` takes either without
    a copy. The memory lives until the last array over it is gone.
    """
    try:
        lengths = [shape] if isinstance(shape, int) else [index(length) for length in shape]
    except TypeError as error:
        raise TypeError(f"shape: an integer or a sequence of integers is needed, not {shape!r:.80}") from error
    if any(length < 0 or length > sys.maxsize for length in lengths):
        raise Invalid(f"shape: {shape!r} has a length that is negative or too large", op="empty")
    name = _type_name(dtype)
    known = _TYPES[name]
    order = "|" if known.bits == 8 or known.kind == "V" else "<" if sys.byteorder == "little" else ">"
    array = _native.SharedArray(
        lengths, name, known.format, f"{order}{known.kind}{known.bits // 8}", known.code, known.bits
    )
    if not known.format:
        return array
    try:
        import numpy
    except ImportError:
        return array
    return numpy.asarray(array)
