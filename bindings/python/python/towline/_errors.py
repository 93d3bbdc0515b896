"""The exceptions: one base, one subclass per kind, and a second parent where Python has a fitting one."""

from __future__ import annotations

from typing import Any, ClassVar


class Error(Exception):
    """What every call of Towline raises when it fails for a reason of Towline's own.

    Its subclass, or ``kind``, says what can be done about it.
    """

    kind: ClassVar[str] = "Internal"
    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without anything being changed."""

    op: str | None
    """The operation that failed."""
    transport: str | None
    """The path on which it failed, where one was chosen."""
    peer: str | None
    """The peer's name, where one was involved."""
    message: str
    """What happened, in words."""

    def __init__(
        self,
        message: str = "",
        *,
        op: str | None = None,
        transport: str | None = None,
        peer: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.op = op
        self.transport = transport
        self.peer = peer

    def __str__(self) -> str:
        details = [self.kind]
        if self.transport is not None:
            details.append(f"path {self.transport}")
        if self.peer is not None:
            details.append(f"peer {self.peer}")
        op = "" if self.op is None else f"{self.op}: "
        return f"{op}{self.message} ({', '.join(details)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.op, self.transport, self.peer))


def _rebuild(
    cls: type[Error], message: str, op: str | None, transport: str | None, peer: str | None
) -> Error:
    return cls(message, op=op, transport=transport, peer=peer)


class Canceled(Error):
    """The caller cancelled the operation. (A cancelled *task* sees ``asyncio.CancelledError`` as usual.)"""

    kind = "Canceled"


class Disconnected(Error, ConnectionError):
    """The connection to the peer broke, or nobody answers where the ticket says; whether the peer lives is not known.

    Ask again: an import and, over ``unix`` and ``tcp``, the next request connect anew, and say ``Stale`` where the peer
    is found to be gone.
    """

    kind = "Disconnected"
    retryable = True


class Exhausted(Error, OSError):
    """A limited resource is used up: descriptors, memory, table rows, queue space."""

    kind = "Exhausted"
    retryable = True


class Internal(Error, RuntimeError):
    """The library broke one of its own rules; please report it."""

    kind = "Internal"


class Invalid(Error, ValueError):
    """The request itself is wrong: a bad argument, a closed object, unequal lengths."""

    kind = "Invalid"


class Native(Error, OSError):
    """The operating system or a foreign library refused."""

    kind = "Native"


class NotFound(Error, LookupError):
    """What was named does not exist."""

    kind = "NotFound"


class PermissionDenied(Error, PermissionError):
    """The ticket, its lease, the secret or the credentials do not allow this."""

    kind = "PermissionDenied"


class Protocol(Error, ValueError):
    """Bytes from outside do not follow the wire format: a damaged ticket, for example."""

    kind = "Protocol"


class Stale(Error):
    """The memory is gone for good: deregistered or recycled, or its owner has closed, ended or restarted.

    The ticket never works again: ask for a new one. It is no ``ConnectionError``, since another connection does not help.
    """

    kind = "Stale"


class Timeout(Error, TimeoutError):
    """The deadline passed, or nothing moved for too long: the peer may be slow, stopped or out of reach. Ask again."""

    kind = "Timeout"
    retryable = True


class Unavailable(Error, RuntimeError):
    """A library, device, kernel facility or path is missing here: nothing changes before the machine or the routing does."""

    kind = "Unavailable"


class Unsupported(Error, NotImplementedError):
    """The path or the memory cannot do this."""

    kind = "Unsupported"


BY_KIND: dict[str, type[Error]] = {
    cls.kind: cls
    for cls in (
        Canceled,
        Disconnected,
        Exhausted,
        Internal,
        Invalid,
        Native,
        NotFound,
        PermissionDenied,
        Protocol,
        Stale,
        Timeout,
        Unavailable,
        Unsupported,
    )
}
