"""What goes for a request as a whole, and how its arguments are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._streams import handle_of

Names = str | Iterable[str] | None


def names(value: Names, argument: str) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, Iterable):
        names = list(value)
        if all(isinstance(name, str) for name in names):
            return names
    raise TypeError(f"{argument}: a str or several are needed, not {value!r:.80}")


def octets(value: bytes | str, argument: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    try:
        # Of a number, `bytes` would make that many zeros.
        return bytes(memoryview(value))
    except TypeError:
        raise TypeError(f"{argument}: bytes or a str is needed, not {type(value).__name__}") from None


def request_terms(
    notify: bytes | str | None,
    signal: tuple[int, int] | tuple[int, int, int] | None,
    timeout: float | None,
    stall_timeout: float | None,
    require: Names,
    forbid: Names,
    stream: object,
) -> tuple[Any, Any, float | None, float | None, list[str], list[str], int | None]:
    """As the native module takes them."""
    return (
        None if notify is None else octets(notify, "notify"),
        signal if signal is None or len(signal) == 3 else (*signal, 0),
        timeout,
        stall_timeout,
        names(require, "require"),
        names(forbid, "forbid"),
        handle_of(stream),
    )
