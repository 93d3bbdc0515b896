"""Memory that windows map without copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _native, arrays
from .._errors import Error, Exhausted
from ._errors import NcclInvalid, _Exhausted
from ._types import NcclDataType, gpu_of


def empty(shape: int | Sequence[int], dtype: object = "uint8") -> Any:
    """An array of zeros in memory that windows map without copies: `towline.empty`, also with NCCL's types."""
    try:
        return arrays.empty(shape, dtype.type_name if isinstance(dtype, NcclDataType) else dtype)
    except Exhausted as error:
        raise _Exhausted(error.message, op="empty") from error
    except Error as error:
        raise NcclInvalid(error.message, op="empty") from error


def mem_alloc(size: int, device: object = None) -> _native.SharedArray | _native.DeviceArray:
    """Allocates bytes that windows accept: zeroed shared memory, or memory of a GPU by NCCL.

    On the host (``device`` is ``None``, ``-1`` or ``"cpu"``) the array speaks the buffer protocol, ``__array_interface__`` and
    DLPack; on a GPU (its number, ``"cuda:1"`` or a device) ``__cuda_array_interface__``, and what is in it is not defined.
    """
    gpu = None
    if device is not None and device != -1 and str(device) != "cpu":
        gpu = gpu_of(device, "mem_alloc")
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"size: an int is needed, not {type(size).__name__}")
    if size <= 0:
        raise NcclInvalid(f"size: there is no memory of {size} bytes", op="mem_alloc")
    if gpu is not None:
        return _native.DeviceArray(gpu, size, [size], "|u1")
    try:
        return _native.SharedArray([size], "uint8", "B", "|u1", 1, 8)
    except Error as error:
        raise NcclInvalid(error.message, op="mem_alloc") from error


def mem_free(buffer: _native.SharedArray | _native.DeviceArray | None) -> None:
    """Says that the memory of `mem_alloc` is not needed any more.

    It is freed when the last array over it is gone and no window or registered buffer holds it: nothing that is still in use
    is ever freed.
    """
    if buffer is not None and not isinstance(
        buffer, (_native.SharedArray, _native.DeviceArray)
    ):
        raise TypeError(f"buffer: memory of mem_alloc is needed, not {type(buffer).__name__}")
