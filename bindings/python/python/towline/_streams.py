"""CUDA streams of other libraries, by their handles."""

from __future__ import annotations

from typing import Any


def handle_of(stream: Any) -> int | None:
    """The handle of a stream: of torch or CuPy, of anything with ``__cuda_stream__``, or a number.

    Numbers are handles of the driver, which is what DLPack and ``__cuda_array_interface__`` give: 1 is the default stream that
    waits for all others, 2 the default stream of the calling thread.

    >>> handle_of(None), handle_of(2)
    (None, 2)
    """
    if stream is None:
        return None
    handle = stream
    if not isinstance(stream, int):
        protocol = getattr(stream, "__cuda_stream__", None)
        if callable(protocol):
            handle = protocol()[1]
        elif protocol is not None:
            handle = protocol[1]
        else:
            # torch says ``cuda_stream``, CuPy ``ptr``, and Numba ``handle``, which is a value of ctypes.
            for name in ("cuda_stream", "ptr", "handle"):
                handle = getattr(stream, name, stream)
                if handle is not stream:
                    break
            if hasattr(handle, "value"):
                # ctypes says None for a null pointer, which is the default stream.
                handle = handle.value or 0
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise TypeError(f"stream: a CUDA stream or its handle is needed, not {type(stream).__name__}")
    return handle
