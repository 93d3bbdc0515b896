"""The operations of the drop-in."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from .. import _native, aio
from .._devices import OperationKind, OperationStatus
from .._errors import Error, Stale, Timeout
from . import _over_nixl
from ._connector import Connection, Local, Remote
from ._descriptor import Descriptor, original_errors
from ._models import RdmaMetadata, SerializedDescriptor

if TYPE_CHECKING:
    from typing import Self


def _is_descriptors(value: object) -> bool:
    return isinstance(value, Descriptor) or (
        isinstance(value, list) and all(isinstance(one, Descriptor) for one in value)
    )


def _check_descriptors(value: object, argument: str) -> None:
    if not _is_descriptors(value):
        raise TypeError(
            f"{argument}: a Descriptor or a list of them is needed, not {type(value).__name__}"
        )


def _listed(value: Local) -> list[Descriptor]:
    return list(value) if isinstance(value, list) else [value]


def _check_key(key: object) -> str:
    if key is None:
        return str(uuid.uuid4())
    if not isinstance(key, str):
        raise TypeError(f"notification_key: a str is needed, not {type(key).__name__}")
    if not key:
        raise ValueError("notification_key: it is empty")
    return key


def _check_kind(kind: object, wrong_type: type[Exception]) -> None:
    if not isinstance(kind, OperationKind):
        raise wrong_type(f"operation_kind: an OperationKind is needed, not {kind!r:.80}")
    if kind not in (OperationKind.READ, OperationKind.WRITE):
        raise ValueError(f"operation_kind: {kind} is neither READ nor WRITE")


def _check_one_place(some: list[Descriptor], argument: str) -> None:
    for one in some:
        if one.device.kind is not some[0].device.kind:
            raise ValueError(
                f"{argument}: descriptors on {some[0].device} and on {one.device} cannot be mixed"
            )


class AbstractOperation(ABC):
    """What all operations have in common."""

    _native: _native.Operation | _over_nixl.Operation | None = None
    _cancelled_here = False

    def __init__(
        self,
        connection: Connection,
        operation_kind: OperationKind,
        local_descriptors: Local,
        remote_descriptors: Local | None,
        notification_key: str | None,
    ) -> None:
        if not isinstance(connection, Connection):
            raise TypeError(f"connection: a Connection is needed, not {type(connection).__name__}")
        _check_kind(operation_kind, ValueError)
        _check_descriptors(local_descriptors, "local_descriptors")
        if remote_descriptors is not None:
            _check_descriptors(remote_descriptors, "remote_descriptors")
        if isinstance(local_descriptors, list) and not local_descriptors:
            raise ValueError("local_descriptors: the list is empty")
        if isinstance(remote_descriptors, list) and not remote_descriptors:
            raise ValueError("remote_descriptors: the list is empty")
        self._notification_key = _check_key(notification_key)
        self._connection = connection
        self._operation_kind = operation_kind
        self._local = _listed(local_descriptors)
        _check_one_place(self._local, "local_descriptors")

    @property
    def connection(self) -> Connection:
        """The connection that made it."""
        return self._connection

    @property
    def operation_kind(self) -> OperationKind:
        """What the active side does."""
        return self._operation_kind

    @property
    def status(self) -> OperationStatus:
        """How far it is. What is final stays."""
        if self._native is None:
            return OperationStatus.UNINITIALIZED
        return OperationStatus(self._native.status())

    @property
    def error(self) -> Error | None:
        """Why it failed or was cancelled, where it was."""
        return None if self._native is None else self._native.error()

    @abstractmethod
    async def wait_for_completion(self, timeout: float | None = None) -> None:
        """Returns when it has ended.

        Raises RuntimeError where it failed, or where the other side cancelled it. With a timeout, raises TimeoutError when it
        has not ended by then; it goes on.
        """

    def cancel(self) -> None:
        """Stops it, and returns once the memory is safe to reuse. What has ended stays as it ended."""
        if self._native is not None and not self._native.done():
            self._cancelled_here = True
            self._native.cancel()
            self._native.wait()

    async def _wait(self, timeout: float | None) -> None:
        native = self._native
        if native is None:
            raise RuntimeError("the operation was never started")
        if not native.done() and not await aio.ended(native, timeout, self):
            raise Timeout(f"the operation goes on after {timeout} s ({self.status})", op="wait")
        error = native.error()
        if error is None or (self._cancelled_here and self.status is OperationStatus.CANCELLED):
            return
        raise RuntimeError(f"the operation has ended as {self.status}: {error}") from error

    def _release(self) -> None:
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._native is not None and not self._native.done():
            self._cancelled_here = True
            self._native.cancel()
            await aio.ended(self._native, key=self)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(operation_kind={self._operation_kind}, status={self.status}, "
            f"local_descriptors={self._local})"
        )


class PassiveOperation(AbstractOperation):
    """Memory that waits for a peer: without limit while nobody has claimed it."""

    def __init__(
        self, connection: Connection, operation_kind: OperationKind, local_descriptors: Local
    ) -> None:
        super().__init__(connection, operation_kind, local_descriptors, None, None)
        natives = [one._usable("local_descriptors") for one in self._local]
        with original_errors("local_descriptors"):
            if connection.connector._offer == "nixl":
                self._native = _over_nixl.Passive(connection._side(), operation_kind, self._local)
            else:
                self._native = connection._native.create(operation_kind, natives, None)

    def metadata(self, hex_encode: bool = False) -> RdmaMetadata:
        """What the peer needs to know; send it by any channel. The sizes are what the descriptors say now."""
        if self._native is None:
            raise RuntimeError("the operation was never started")
        with original_errors("local_descriptors"):
            try:
                for one in self._local:
                    one._usable("local_descriptors").check()
            except Stale:
                self.cancel()
                raise
            descriptors, text, key, kind = self._native.metadata(hex_encode)
        return RdmaMetadata(
            descriptors=[
                SerializedDescriptor(device=device, ptr=ptr, size=size)
                for device, ptr, size in descriptors
            ],
            nixl_metadata=text,
            notification_key=key,
            operation_kind=kind,
        )

    @abstractmethod
    async def wait_for_completion(self, timeout: float | None = None) -> None:
        """Returns when the peer is done."""


class ReadableOperation(PassiveOperation):
    """Memory that one peer may read, once."""

    def __init__(self, connection: Connection, local_descriptors: Local) -> None:
        super().__init__(connection, OperationKind.READ, local_descriptors)

    async def wait_for_completion(self, timeout: float | None = None) -> None:
        """Returns when the peer has read everything."""
        await self._wait(timeout)


class WritableOperation(PassiveOperation):
    """Memory that one peer may write, once."""

    def __init__(self, connection: Connection, local_descriptors: Local) -> None:
        super().__init__(connection, OperationKind.WRITE, local_descriptors)

    async def wait_for_completion(self, timeout: float | None = None) -> None:
        """Returns when the peer's bytes are there."""
        await self._wait(timeout)


@dataclass(slots=True)
class _Plan:
    """An active operation that was checked and is not begun yet."""

    remote: Remote
    kind: OperationKind
    local: list[Descriptor]
    remote_descriptors: list[Descriptor]
    key: str

    def begin(self) -> _native.Beginning | _over_nixl.Beginning:
        if self.remote._agent is not None:
            side = self.remote.connection._side()
            return _over_nixl.begin(
                side, self.kind, self.local, self.remote_descriptors, self.remote._agent, self.key
            )
        there = [(str(one.device), one.ptr, one.size) for one in self.remote_descriptors]
        natives = [one._usable("local_descriptors") for one in self.local]
        fields = (there, self.remote._text, self.key, int(self.kind))
        return self.remote.connection._native.begin(self.kind, fields, natives)


def _planned(
    remote: Remote,
    kind: OperationKind,
    local: Local,
    remote_descriptors: Local,
    key: str | None,
) -> _Plan:
    if not isinstance(remote, Remote) or not isinstance(
        getattr(remote, "_connection", None), Connection
    ):
        raise TypeError(f"remote: a Remote is needed, not {type(remote).__name__}")
    _check_kind(kind, TypeError)
    _check_descriptors(local, "local_descriptors")
    _check_descriptors(remote_descriptors, "remote_descriptors")
    here: Local = local[0] if isinstance(local, list) and len(local) == 1 else local
    there: Local = (
        remote_descriptors[0]
        if isinstance(remote_descriptors, list) and len(remote_descriptors) == 1
        else remote_descriptors
    )
    if isinstance(here, list) != isinstance(there, list):
        raise ValueError(
            "local_descriptors: several descriptors here and one there, or the other way round"
        )
    ours, theirs = _listed(here), _listed(there)
    if len(ours) != len(theirs):
        raise ValueError(f"local_descriptors: {len(ours)} of them for {len(theirs)} remote ones")
    if not ours:
        raise ValueError("local_descriptors: the list is empty")
    for index, (one, other) in enumerate(zip(ours, theirs)):
        if one.size != other.size:
            raise ValueError(
                f"local_descriptors: number {index} has {one.size} bytes for {other.size} remote ones"
            )
    return _Plan(remote, kind, ours, theirs, _check_key(key))


class ActiveOperation(AbstractOperation):
    """A read or a write, in flight from the start."""

    def __init__(
        self,
        remote: Remote,
        operation_kind: OperationKind,
        local_descriptors: Local,
        remote_descriptors: Local,
        notification_key: str | None,
    ) -> None:
        plan = _planned(
            remote, operation_kind, local_descriptors, remote_descriptors, notification_key
        )
        self._start(plan)

    def _start(self, plan: _Plan) -> None:
        """Blocks for the claim: one round trip, and contact with the peer if there was none."""
        self._check(plan)
        with original_errors("local_descriptors"):
            beginning = plan.begin()
            beginning.wait()
            self._adopt(beginning.result())

    def _check(self, plan: _Plan) -> None:
        AbstractOperation.__init__(
            self, plan.remote.connection, plan.kind, plan.local, plan.remote_descriptors, plan.key
        )
        _check_one_place(plan.remote_descriptors, "remote_descriptors")
        self._remote = plan.remote

    def _adopt(self, native: _native.Operation | _over_nixl.Operation) -> None:
        self._native = native

    def _planned_with(
        self, connection: Connection, kind: OperationKind, metadata: RdmaMetadata, local: Local
    ) -> _Plan:
        if not isinstance(connection, Connection):
            raise TypeError(f"connection: a Connection is needed, not {type(connection).__name__}")
        if not isinstance(metadata, RdmaMetadata):
            raise TypeError(
                f"remote_metadata: an RdmaMetadata is needed, not {type(metadata).__name__}"
            )
        if metadata.operation_kind != kind:
            raise ValueError(
                f"remote_metadata: it is for the operation kind {metadata.operation_kind}, not for {int(kind)} "
                f"({kind})"
            )
        remote = Remote(connection, metadata.nixl_metadata)
        plan = _planned(remote, kind, local, metadata.to_descriptors(), metadata.notification_key)
        self._check(plan)
        return plan

    @property
    def remote(self) -> Remote:
        """The peer."""
        return self._remote

    async def _wait_for_completion_(self, timeout: float | None = None) -> None:
        await self._wait(timeout)

    @abstractmethod
    async def wait_for_completion(self, timeout: float | None = None) -> None:
        """Returns when all bytes were moved."""


class ReadOperation(ActiveOperation):
    """A read from a peer's readable memory."""

    def __init__(
        self, connection: Connection, remote_metadata: RdmaMetadata, local_descriptors: Local
    ) -> None:
        self._start(self._plan(connection, remote_metadata, local_descriptors))

    def _plan(
        self, connection: Connection, remote_metadata: RdmaMetadata, local_descriptors: Local
    ) -> _Plan:
        return self._planned_with(connection, OperationKind.READ, remote_metadata, local_descriptors)

    def results(self) -> list[Descriptor]:
        """The local memory, filled; RuntimeError unless the operation is complete."""
        if self.status is not OperationStatus.COMPLETE:
            raise RuntimeError(f"there are no results: the status is {self.status}")
        return list(self._local)

    async def wait_for_completion(self, timeout: float | None = None) -> None:
        """Returns when all bytes are here."""
        await self._wait_for_completion_(timeout)


class WriteOperation(ActiveOperation):
    """A write to a peer's writable memory."""

    def __init__(
        self, connection: Connection, local_descriptors: Local, remote_metadata: RdmaMetadata
    ) -> None:
        self._start(self._plan(connection, local_descriptors, remote_metadata))

    def _plan(
        self, connection: Connection, local_descriptors: Local, remote_metadata: RdmaMetadata
    ) -> _Plan:
        return self._planned_with(connection, OperationKind.WRITE, remote_metadata, local_descriptors)

    async def wait_for_completion(self, timeout: float | None = None) -> None:
        """Returns when all bytes are there."""
        await self._wait_for_completion_(timeout)
