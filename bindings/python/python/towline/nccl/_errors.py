"""What calls on a communicator raise: nccl4py's two exceptions, which are also those of `towline`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from .. import _errors, _native
from ._types import Result


class _GroupError(_errors.Error):
    """An error that names the ranks that it is about."""

    ranks: tuple[int, ...]
    """The ranks that it is about: those that did not arrive, died, or differ."""

    def __init__(
        self,
        msg: str = "",
        *,
        op: str | None = None,
        ranks: Iterable[int] = (),
        transport: str | None = None,
        peer: str | None = None,
    ) -> None:
        super().__init__(msg, op=op, transport=transport, peer=peer)
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        text = super().__str__()
        if not self.ranks:
            return text
        many = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{text[:-1]}, {many} {', '.join(map(str, self.ranks))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.op, self.ranks))


def _rebuild(cls: type[_GroupError], message: str, op: str | None, ranks: tuple[int, ...]) -> _GroupError:
    return cls(message, op=op, ranks=ranks)


class NcclInvalid(_GroupError, _errors.Invalid):
    """The call itself is wrong: a bad argument, a closed or uninitialised communicator, ranks that differ."""

    @property
    def msg(self) -> str:
        """What is wrong, in words."""
        return self.message


class ClosedResource(NcclInvalid, RuntimeError):
    """A handle was used after it had been closed."""


class NCCLError(_GroupError):
    """A call failed though it was right. Its subclasses are also the fitting exceptions of ``towline``."""

    status: ClassVar[Result] = Result.INTERNAL_ERROR
    """The number that NCCL would have returned."""


class NCCLTimeout(NCCLError, _errors.Timeout):
    """Some ranks did not arrive, or did not go on, in time: ``ranks`` are those. Also a ``TimeoutError``."""

    status = Result.TIMEOUT


class NCCLDisconnected(NCCLError, _errors.Disconnected):
    """A rank has died or cannot be reached any more: ``ranks`` names it."""

    status = Result.REMOTE_ERROR


class NCCLCanceled(NCCLError, _errors.Canceled):
    """The communicator was aborted or revoked, or what was asked for was never started."""

    status = Result.REMOTE_ERROR


class NCCLStale(NCCLError, _errors.Stale):
    """A rank has closed its window, or has died."""

    status = Result.REMOTE_ERROR


class _Protocol(NCCLError, _errors.Protocol):
    status = Result.REMOTE_ERROR


class _Exhausted(NCCLError, _errors.Exhausted):
    status = Result.SYSTEM_ERROR


class _Native(NCCLError, _errors.Native):
    status = Result.SYSTEM_ERROR


class _Internal(NCCLError, _errors.Internal):
    status = Result.INTERNAL_ERROR


class _NotFound(NCCLError, _errors.NotFound):
    status = Result.INVALID_USAGE


class _PermissionDenied(NCCLError, _errors.PermissionDenied):
    status = Result.INVALID_USAGE


class _Unavailable(NCCLError, _errors.Unavailable):
    status = Result.INVALID_USAGE


class _Unsupported(NCCLError, _errors.Unsupported):
    status = Result.INVALID_USAGE


BY_KIND: dict[str, type[_GroupError]] = {
    cls.kind: cls
    for cls in (
        NCCLCanceled,
        NCCLDisconnected,
        _Exhausted,
        _Internal,
        NcclInvalid,
        _Native,
        _NotFound,
        _PermissionDenied,
        _Protocol,
        NCCLStale,
        NCCLTimeout,
        _Unavailable,
        _Unsupported,
    )
}


def status_of(error: _errors.Error) -> Result:
    """NCCL's number for an error."""
    return error.status if isinstance(error, NCCLError) else Result.INVALID_ARGUMENT


def invalid(op: str, message: str) -> NcclInvalid:
    """The error for a wrong argument. Keeps the group that is open from being launched."""
    _native.group_poison(op, message)
    return NcclInvalid(message, op=op)
