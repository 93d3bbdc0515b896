"""Who makes operations, and with whom."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import socket
import threading
import uuid
import zlib
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from .. import _native, aio
from ..nixl import named
from .._devices import OperationKind
from .._errors import Protocol, Timeout, Unavailable
from . import _over_nixl
from ._descriptor import Descriptor, original_errors
from ._models import RdmaMetadata

if TYPE_CHECKING:
    from typing import Self

    from ._operations import (
        ReadableOperation,
        ReadOperation,
        WritableOperation,
        WriteOperation,
    )
    from ._over_nixl import Side

Local = Descriptor | list[Descriptor]


Offer = Literal["towline", "nixl"]
"""Who can take part in a passive operation: peers that use Towline, or peers that use NIXL."""

_usual: Offer = "towline"
_usual_devices: tuple[str, ...] = ()


def _offer(offer: str | None) -> Offer:
    if offer is None:
        return _usual
    if offer == "nixl":
        return "nixl"
    if offer == "towline":
        return "towline"
    raise ValueError(f"offer: {offer!r:.80} is neither 'towline' nor 'nixl'")


def offer_by_default(offer: Offer | None, nixl_devices: Sequence[str] | None = None) -> None:
    """Sets it for connectors that set none: the original's constructor has no place for it."""
    global _usual, _usual_devices
    chosen = _offer(offer)
    if nixl_devices is not None:
        _usual_devices = named(nixl_devices, "nixl_devices")
    _usual = chosen


class Connector:
    """Makes operations. Its connection is opened when it is first needed.

    Active operations find out from the metadata whether the peer uses Towline or NIXL. A passive one has to choose: ``offer`` is
    ``"nixl"`` where peers run the original. Without it, it is what the drop-in was installed with, else ``"towline"``.

    NIXL's UCX listens on the network, and gives every program that reaches it all memory of this process. So it is started only where
    ``offer="nixl"`` or ``nixl_devices`` says so, never because a peer's metadata asks for it: then operations with the original raise
    `Unavailable`. ``nixl_devices`` names the network devices that UCX may use, such as ``["mlx5_0:1"]``, ``["lo"]``, or
    ``["tcp"]`` for all interfaces. Without it UCX takes RDMA devices alone, and where there are none, NIXL's operations raise `Unavailable`.
    """

    def __init__(
        self,
        worker_id: str | None = None,
        *,
        offer: Offer | None = None,
        nixl_devices: Sequence[str] | None = None,
    ) -> None:
        self._offer = _offer(offer)
        self._nixl_devices = (
            _usual_devices if nixl_devices is None else named(nixl_devices, "nixl_devices")
        )
        if worker_id is None:
            worker_id = uuid.uuid4().hex
        if not isinstance(worker_id, str) or not worker_id:
            raise TypeError(f"worker_id: a str that is not empty is needed, not {worker_id!r:.80}")
        self._worker_id = worker_id
        self._hostname = socket.gethostname()
        self._connection: Connection | None = None
        # A lock of threads, not of an event loop: connectors are made in one loop and used in others.
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The worker's id."""
        return self._worker_id

    @property
    def hostname(self) -> str:
        """The name of this host."""
        return self._hostname

    @cached_property
    def is_cuda_available(self) -> bool:
        """Whether CuPy or torch, where they are installed, find a CUDA device."""
        try:
            import cupy  # type: ignore[import-not-found, unused-ignore]

            return bool(cupy.cuda.runtime.getDeviceCount() > 0)
        except Exception:
            pass
        try:
            import torch  # type: ignore[import-not-found, unused-ignore]

            return bool(torch.cuda.is_available())
        except Exception:
            return False

    async def initialize(self) -> None:
        """Does nothing; kept for callers of older versions."""

    def _shared_connection(self) -> Connection:
        with self._lock:
            if self._connection is None:
                self._connection = Connection(self, 1)
            return self._connection

    async def _create_connection(self) -> Connection:
        return self._shared_connection()

    async def create_readable(self, local_descriptors: Local) -> ReadableOperation:
        """Offers memory for one peer to read, once."""
        from ._operations import ReadableOperation

        return ReadableOperation(await self._ready(), local_descriptors)

    async def create_writable(self, local_descriptors: Local) -> WritableOperation:
        """Offers memory for one peer to write, once."""
        from ._operations import WritableOperation

        return WritableOperation(await self._ready(), local_descriptors)

    async def _ready(self) -> Connection:
        """The connection, with its agent of NIXL where one is needed: making that takes a second, which is not the loop's."""
        connection = self._shared_connection()
        if self._offer == "nixl":
            await asyncio.to_thread(connection._side().agent)
        return connection

    async def begin_read(
        self, remote_metadata: RdmaMetadata, local_descriptors: Local
    ) -> ReadOperation:
        """Claims a readable operation and starts to read from it into local memory."""
        from ._operations import ReadOperation

        _check_begin(remote_metadata, local_descriptors, OperationKind.READ)
        operation = ReadOperation.__new__(ReadOperation)
        plan = operation._plan(self._shared_connection(), remote_metadata, local_descriptors)
        with original_errors("local_descriptors"):
            operation._adopt(await aio.begun(plan.begin()))
        return operation

    async def begin_write(
        self, local_descriptors: Local, remote_metadata: RdmaMetadata
    ) -> WriteOperation:
        """Claims a writable operation and starts to write local memory to it."""
        from ._operations import WriteOperation

        _check_begin(remote_metadata, local_descriptors, OperationKind.WRITE)
        operation = WriteOperation.__new__(WriteOperation)
        plan = operation._plan(self._shared_connection(), local_descriptors, remote_metadata)
        with original_errors("local_descriptors"):
            operation._adopt(await aio.begun(plan.begin()))
        return operation

    def close(self) -> None:
        """Ends every operation and closes the connection. Closing twice is harmless."""
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection._close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Connector) and self._worker_id == other._worker_id

    def __hash__(self) -> int:
        return hash(self._worker_id)

    def __str__(self) -> str:
        return self._worker_id

    def __repr__(self) -> str:
        return f"Connector(worker_id={self._worker_id!r}, hostname={self._hostname!r})"


def _check_begin(remote: object, local: object, kind: OperationKind) -> None:
    if not isinstance(remote, RdmaMetadata):
        raise TypeError(f"remote_metadata: an RdmaMetadata is needed, not {type(remote).__name__}")
    if not isinstance(local, Descriptor) and not (
        isinstance(local, list) and all(isinstance(one, Descriptor) for one in local)
    ):
        raise TypeError(
            f"local_descriptors: a Descriptor or a list of them is needed, not {type(local).__name__}"
        )
    if remote.operation_kind != kind:
        raise RuntimeError(
            f"remote_metadata: it is for the operation kind {remote.operation_kind}, not for {int(kind)} ({kind})"
        )


class Connection:
    """One endpoint of a connector, open from the start."""

    def __init__(self, connector: Connector, number: int) -> None:
        if not isinstance(connector, Connector):
            raise TypeError(f"connector: a Connector is needed, not {type(connector).__name__}")
        if not isinstance(number, int):
            raise TypeError(f"number: an int is needed, not {type(number).__name__}")
        if number <= 0:
            raise ValueError(f"number: {number} is not above 0")
        self._connector = connector
        self._name = f"{connector.name}-{number}"
        self._lock = threading.Lock()
        self._remotes: dict[str, int] = {}
        self._is_initialized = False
        self._nixl: Side | None = None
        self._native = _native.Connector(self._name, None)
        self._native.endpoint()

    def _side(self) -> Side:
        """What speaks to peers that use NIXL, where the user has opted in."""
        devices = self._connector._nixl_devices
        if self._connector._offer != "nixl" and not devices:
            raise Unavailable(
                "the peer uses NIXL, which listens on the network and gives its peers all memory of this process: name the "
                'devices that it may use (nixl_devices=), or say offer="nixl" for the RDMA devices of this host',
                op="nixl",
            )
        with self._lock:
            if self._nixl is None:
                self._nixl = _over_nixl.Side(self._name, devices)
            return self._nixl

    def _close(self) -> None:
        with self._lock:
            side = self._nixl
        if side is not None:
            side.close()
        with contextlib.suppress(Timeout):
            self._native.close(None)

    @property
    def connector(self) -> Connector:
        """Whose it is."""
        return self._connector

    @property
    def name(self) -> str:
        """The connector's name and the number."""
        return self._name

    @property
    def metadata(self) -> bytes:
        """Who this is; peers need an operation's metadata."""
        endpoint = self._native.endpoint()
        return f"towline:{endpoint.name}:{endpoint.incarnation}".encode()

    async def initialize(self) -> None:
        """Notes that it was called."""
        self._is_initialized = True

    def acquire_remote_ref(self, name: str) -> None:
        """Counts one more user of a peer."""
        with self._lock:
            self._remotes[name] = self._remotes.get(name, 0) + 1

    def release_remote_ref(self, name: str) -> bool:
        """Counts one less; true where that was the last one."""
        with self._lock:
            left = self._remotes.get(name, 0) - 1
            if left > 0:
                self._remotes[name] = left
            else:
                self._remotes.pop(name, None)
            return left == 0

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"Connection(name={self._name!r})"


class _Damaged(Protocol, zlib.error):
    """Metadata that is text, and of no peer: the original finds that it cannot be inflated."""


class Remote:
    """The peer that made some metadata."""

    # Until it is counted there is nothing to release.
    _released = True

    def __init__(self, connection: Connection, nixl_metadata: bytes | str) -> None:
        if not isinstance(connection, Connection):
            raise TypeError(f"connection: a Connection is needed, not {type(connection).__name__}")
        if not isinstance(nixl_metadata, (bytes, str)):
            raise TypeError(
                f"nixl_metadata: bytes or a str is needed, not {type(nixl_metadata).__name__}"
            )
        if not nixl_metadata:
            raise ValueError("nixl_metadata: it is empty")
        self._connection = connection
        self._text, packed = _text(nixl_metadata)
        self._agent = _over_nixl.inflated(packed)
        """The metadata of an agent of NIXL, where the peer uses that."""
        if self._agent is None:
            try:
                self._name = _native.metadata_owner(self._text)
            except Protocol as error:
                raise _Damaged(error.message, op=error.op) from error
        else:
            self._name = _over_nixl.agent_name(self._agent)
        connection.acquire_remote_ref(self._name)
        self._released = False

    @property
    def connection(self) -> Connection:
        """The connection to the peer."""
        return self._connection

    @property
    def name(self) -> str:
        """The peer's name."""
        return self._name

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._connection.release_remote_ref(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    def __del__(self) -> None:
        self._release()

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"Remote(name={self._name!r})"


# The core refuses longer ones; this is only to refuse them before they are decoded.
_LONGEST = 2 << 20


def _text(nixl_metadata: bytes | str) -> tuple[str, bytes]:
    """The text of the metadata and its bytes, with the errors that the original has for text that is damaged."""
    if len(nixl_metadata) > _LONGEST:
        raise ValueError(f"nixl_metadata: {len(nixl_metadata)} characters are too many")
    if isinstance(nixl_metadata, bytes):
        return nixl_metadata.hex(), nixl_metadata
    if nixl_metadata.startswith("b64:"):
        try:
            packed = base64.b64decode(nixl_metadata[4:], validate=True)
        except ValueError as error:
            raise binascii.Error(f"nixl_metadata: it is not base64: {error}") from error
    else:
        try:
            packed = bytes.fromhex(nixl_metadata)
        except ValueError as error:
            raise ValueError(f"nixl_metadata: it is neither base64 nor hex: {error}") from error
    return nixl_metadata, packed
