"""Collectives and messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, cast

from .. import _native
from ._errors import invalid
from ._handles import CustomRedOp, Operation
from ._types import SUM, NcclRedOp

Algorithm = Literal["auto", "tiny", "direct", "staged", "ring", "tree"]


def check_stream(stream: object) -> int:
    """The handle of a stream: ``None`` (the default one), an int, or a stream of cuda.core, torch or CuPy.

    On the host streams mean nothing: there a call has ended when it returns, or when its operation has.
    """
    if stream is None:
        return 0
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        said = stream.__cuda_stream__
        return int((said() if callable(said) else said)[1])
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise TypeError(f"stream: None, an int or a stream is needed, not {type(stream).__name__}")


@contextlib.contextmanager
def in_stream(native: _native.Communicator, stream: object) -> Iterator[None]:
    """Lets the calls of a block go into a stream, where the communicator is on a GPU."""
    handle = check_stream(stream)
    if native.gpu is None or handle == 0:
        yield
        return
    _native.use_stream(handle)
    try:
        yield
    finally:
        _native.use_stream(None)


class Collectives:
    """What all ranks of a communicator do together.

    All ranks make the same calls in the same order. The number of elements follows from the buffers. Ranks that differ in
    size, type, operation or root all get `NcclInvalid`, and nothing has happened. Registered buffers and windows are
    used where they are, any others through channels; ``explain()`` says which, and ``algorithm`` overrides it, equally on all
    ranks. On the host ``stream`` is accepted and does nothing: on a blocking communicator a call has ended when it returns, on
    a non-blocking one when its `Operation` has. On a GPU a call has been put into ``stream`` when it returns, and NCCL chooses.
    """

    __slots__ = ()

    def _need(self, op: str) -> _native.Communicator:
        raise NotImplementedError

    def _collective(
        self,
        kind: str,
        sendbuf: Any,
        recvbuf: Any,
        op: NcclRedOp | CustomRedOp | int,
        root: int,
        stream: object,
        algorithm: Algorithm | None,
    ) -> Operation[None]:
        native = self._need(kind)
        scalar = None
        if isinstance(op, CustomRedOp):
            scalar = self._scalar(kind, op, sendbuf)
            op = SUM
        elif isinstance(op, bool) or not isinstance(op, int) or op not in _OPERATIONS:
            raise invalid(kind, f"op: {op!r} is neither one of SUM, PROD, MAX, MIN, AVG nor a CustomRedOp")
        with in_stream(native, stream):
            work = native.collective(kind, sendbuf, recvbuf, int(op), scalar, root, algorithm)
        return Operation(work, kind)

    def _scalar(self, kind: str, op: CustomRedOp, sendbuf: Any) -> int | float:
        if op._comm is not self or not op.is_valid:
            raise invalid(kind, "op: it is closed, or belongs to another communicator")
        name, _, _ = _native.array_type(sendbuf, self._need(kind).gpu)
        if name != op.datatype.type_name:
            raise invalid(kind, f"op: it is for {op.datatype.type_name}, and sendbuf has {name}")
        return op.scalar

    def allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: NcclRedOp | CustomRedOp = SUM,
        *,
        stream: object = None,
        algorithm: Algorithm | None = None,
    ) -> Operation[None]:
        """Combines the elements of all ranks and gives every rank the result.

        ``recvbuf`` has the type of ``sendbuf`` and is at least as long; in place: both start at the same byte.
        """
        return self._collective("all_reduce", sendbuf, recvbuf, op, 0, stream, algorithm)

    def reduce(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        op: NcclRedOp | CustomRedOp = SUM,
        root: int | None = None,
        *,
        stream: object = None,
        algorithm: Algorithm | None = None,
    ) -> Operation[None]:
        """Combines the elements of all ranks and gives the root the result; without a root, every rank.

        ``recvbuf`` is ignored on other ranks.
        """
        if root is None:
            return self.allreduce(sendbuf, recvbuf, op, stream=stream, algorithm=algorithm)
        recvbuf = recvbuf if root == self._rank("reduce") else None
        return self._collective("reduce", sendbuf, recvbuf, op, root, stream, algorithm)

    def broadcast(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int,
        *,
        stream: object = None,
        algorithm: Algorithm | None = None,
    ) -> Operation[None]:
        """Gives every rank the root's elements. ``sendbuf`` is ignored on other ranks; on the root both are as long."""
        sendbuf = sendbuf if root == self._rank("broadcast") else None
        return self._collective("broadcast", sendbuf, recvbuf, SUM, root, stream, algorithm)

    def allgather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        stream: object = None,
        algorithm: Algorithm | None = None,
    ) -> Operation[None]:
        """Gives every rank the elements of all ranks, by rank. In place: ``sendbuf`` is this rank's block of ``recvbuf``."""
        return self._collective("all_gather", sendbuf, recvbuf, SUM, 0, stream, algorithm)

    def gather(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        root: int | None = None,
        *,
        stream: object = None,
        algorithm: Algorithm | None = None,
    ) -> Operation[None]:
        """Gives the root the elements of all ranks, by rank; without a root, every rank. ``recvbuf`` is ignored elsewhere."""
        if root is None:
            return self.allgather(sendbuf, recvbuf, stream=stream, algorithm=algorithm)
        recvbuf = recvbuf if root == self._rank("gather") else None
        return self._collective("gather", sendbuf, recvbuf, SUM, root, stream, algorithm)

    def scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int,
        *,
        stream: object = None,
        algorithm: Algorithm | None = None,
    ) -> Operation[None]:
        """Gives each rank its block of the root's elements. ``sendbuf`` is ignored on other ranks."""
        sendbuf = sendbuf if root == self._rank("scatter") else None
        return self._collective("scatter", sendbuf, recvbuf, SUM, root, stream, algorithm)

    def reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: NcclRedOp | CustomRedOp = SUM,
        *,
        stream: object = None,
        algorithm: Algorithm | None = None,
    ) -> Operation[None]:
        """Combines the elements of all ranks and gives each rank its block of the result.

        Elements that do not divide among the ranks are refused.
        """
        return self._collective("reduce_scatter", sendbuf, recvbuf, op, 0, stream, algorithm)

    def alltoall(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        stream: object = None,
        algorithm: Algorithm | None = None,
    ) -> Operation[None]:
        """Gives each rank its block of every rank's elements, by rank. Elements that do not divide are refused."""
        return self._collective("all_to_all", sendbuf, recvbuf, SUM, 0, stream, algorithm)

    def barrier(self, *, stream: object = None) -> Operation[None]:
        """Ends when every rank has called it."""
        native = self._need("barrier")
        with in_stream(native, stream):
            return Operation(native.barrier(), "barrier")

    def send(self, sendbuf: Any, peer: int, *, stream: object = None) -> Operation[None]:
        """Sends elements to a rank that receives as many of the same type; has ended when they have arrived.

        Ranks that send to each other do so in a `group`.
        """
        return self._collective("send", sendbuf, None, SUM, peer, stream, None)

    def recv(self, recvbuf: Any, peer: int, *, stream: object = None) -> Operation[None]:
        """Receives elements from a rank that sends as many of the same type."""
        return self._collective("recv", None, recvbuf, SUM, peer, stream, None)

    all_reduce = allreduce
    all_gather = allgather
    all_to_all = alltoall

    def explain(self) -> str:
        """The algorithm of the latest collective call on this communicator, with its reason."""
        return self._need("explain").explain()

    def _rank(self, op: str) -> int:
        return self._need(op).rank()


_OPERATIONS = cast("frozenset[int]", frozenset(NcclRedOp))
