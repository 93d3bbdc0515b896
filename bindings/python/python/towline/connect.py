"""The operations API: a `Connector`, `Descriptor`s of memory, and four operations that pair up.

One worker offers memory, to be read or to be written: a *passive* operation. It sends the operation's metadata to another
worker by a channel of its own (an HTTP body, NATS, a file). That one pairs it with an *active* operation, which claims the
passive one, moves the bytes, and ends both.

>>> import asyncio, towline
>>> async def main() -> bytes:
...     async with towline.Connector("encode") as encode, towline.Connector("decode") as decode:
...         # one worker offers memory ...
...         readable = await encode.create_readable(towline.Descriptor(b"embeddings"))
...         sent = readable.metadata().to_json()
...         # ... and another one, usually in another process, reads it
...         target = bytearray(10)
...         remote = towline.RdmaMetadata.from_json(sent)
...         async with await decode.begin_read(remote, towline.Descriptor(target)) as read:
...             await read
...         await readable                        # the memory is free again
...         return bytes(target)
>>> asyncio.run(main())
b'embeddings'

A passive operation has one claimer. It ends when its claimer is done, or has failed or died; when nobody claimed it in time; or
when it is cancelled. Both sides learn why. When an operation has ended, nobody touches its memory any more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from . import _describe, _native, aio
from ._devices import Device, DeviceKind, OperationKind, OperationStatus, as_device
from ._endpoint import Endpoint
from ._errors import Error, Invalid, Stale, Timeout
from ._metadata import RdmaMetadata, SerializedDescriptor
from ._streams import handle_of

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "Connector",
    "Descriptor",
    "Device",
    "DeviceKind",
    "Operation",
    "OperationKind",
    "OperationStatus",
    "RdmaMetadata",
    "ReadOperation",
    "ReadableOperation",
    "SerializedDescriptor",
    "WritableOperation",
    "WriteOperation",
]

DEFAULT_UNCLAIMED_TIMEOUT = 600.0


class Descriptor:
    """Memory that takes part in operations: where it is, how long it is, and whether it is registered.

    ``data`` is one of

    * a ``torch.Tensor``;
    * a NumPy or CuPy array, or a tuple of one and its device (a `Device` or its name);
    * ``bytes`` (which can be read, not written), a ``bytearray``, or anything else with the buffer protocol;
    * anything with DLPack, ``__array_interface__`` or ``__cuda_array_interface__``;
    * a tuple of address, size in bytes, device, and an object that keeps the memory alive (the last two may be left out).

    Memory with gaps, such as a slice or a transposed array, can be read and not written: its elements arrive packed, in
    row-major order, and `size` is what they take. It is described by a `layout`, without a copy. Reversed, broadcast or overlapping
    memory, and more than four dimensions with gaps, no layout can say: these are refused.

    The memory is kept alive, and a ``bytearray`` cannot be resized, for as long as the descriptor or an operation needs it. Memory of
    an XPU, and of a GPU where there is no driver, can be described, and gives ``Unsupported`` when it is registered. An array of
    `towline.empty` is mapped by peers on the same host.

    Arrays that say in which CUDA stream their work is queued (by ``__cuda_array_interface__`` or DLPack, as CuPy's do) are used by
    operations only when what is queued there by now is done. Tensors of torch do not say: name a ``stream``, or wait.
    """

    __slots__ = ("_data", "_device", "_native", "__weakref__")

    def __init__(self, data: Any) -> None:
        described = _described(data)
        if described.native is None:
            raise Invalid(
                f"data: {described.size} bytes at {described.ptr:#x} are no memory", op="descriptor"
            )
        self._native = described.native
        self._device = described.device
        self._data = data

    @property
    def device(self) -> Device:
        """Where the memory lives."""
        return self._device

    @property
    def ptr(self) -> int:
        """The address of the first byte in this process."""
        return self._native.ptr

    @property
    def size(self) -> int:
        """How many bytes of it are used: all, unless set to less.

        What an operation offers is what this says when its metadata is asked for.
        """
        return self._native.size

    @size.setter
    def size(self, size: int) -> None:
        if not _describe.is_number(size):
            raise TypeError(f"size: an int is needed, not {type(size).__name__}")
        if not 0 < size <= self.capacity:
            raise Invalid(f"size: {size} is not within 1 to {self.capacity} bytes", op="descriptor")
        self._native.set_size(size)

    @property
    def capacity(self) -> int:
        """How many bytes there are, without gaps."""
        return self._native.capacity

    @property
    def layout(self) -> _native.Layout | None:
        """Which bytes from `ptr` on are meant, and in which order, where the memory has gaps."""
        return self._native.layout

    @property
    def readonly(self) -> bool:
        """Whether it refuses to be written."""
        return self._native.read_only

    @property
    def is_registered(self) -> bool:
        """Whether it is registered: by `register_memory`, or by an operation that has not ended."""
        return self._native.is_registered

    def register_memory(self, connector: Connector) -> None:
        """Registers the memory until `deregister_memory`, whatever operations come and go.

        Again with the same connector changes nothing. Operations register what they use by themselves, for as long as they
        last.
        """
        self._native.register(_connector(connector))

    def deregister_memory(self, connector: Connector) -> None:
        """Takes back what `register_memory` did; operations that use the memory go on."""
        self._native.deregister(_connector(connector))

    def __repr__(self) -> str:
        return f"Descriptor(ptr={self.ptr:#x}, size={self.size}, device={self.device})"


def _described(data: Any) -> _describe.Described:
    if data is None:
        raise Invalid("data: memory is needed, not None", op="descriptor")
    if isinstance(data, tuple):
        if len(data) >= 2 and _describe.is_number(data[0]) and _describe.is_number(data[1]):
            if len(data) > 4:
                raise TypeError("data: a tuple has at most address, size, device and owner")
            return _describe.of_raw_tuple(data)
        if len(data) != 2 or isinstance(data[0], (int, str, tuple, list)) or data[0] is None:
            raise TypeError(
                "data: a tuple holds an array and its device, or address, size, device and owner"
            )
        device = as_device(data[1], "data[1]")
        if _describe.is_torch(data[0]):
            return _describe.of_torch(data[0])
        return _describe.of_object(data[0], device)
    if _describe.is_torch(data):
        return _describe.of_torch(data)
    if isinstance(data, (bytes, bytearray)) and not data:
        raise Invalid("data: it is empty", op="descriptor")
    return _describe.of_object(data)


def _connector(connector: Connector) -> _native.Connector:
    if not isinstance(connector, Connector):
        raise TypeError(f"connector: a Connector is needed, not {type(connector).__name__}")
    return connector._native


Local = Descriptor | Sequence[Descriptor]


def _descriptors(local: Local) -> list[Descriptor]:
    some: list[Descriptor] = []
    for one in local if isinstance(local, (list, tuple)) else [local]:
        if not isinstance(one, Descriptor):
            raise TypeError(
                f"local: a Descriptor or a list of them is needed, not {type(one).__name__}"
            )
        some.append(one)
    if not some:
        raise Invalid("local: there are no descriptors", op="operation")
    return some


def _seconds(timeout: float | None, argument: str = "timeout") -> float | None:
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"{argument}: a number of seconds is needed, not {type(timeout).__name__}")
    if math.isnan(timeout) or timeout < 0:
        raise Invalid(f"{argument}: {timeout} is not a number of seconds", op="wait")
    return timeout


class Operation:
    """An operation in flight or over: what the four have in common.

    ``await`` it, or ``wait()`` for it in code without an event loop; both raise why it failed or was cancelled. Leaving a
    ``with`` or an ``async with`` block cancels what has not ended, and returns once the memory is safe to reuse. So does dropping
    the operation, without the waiting.
    """

    __slots__ = ("_connector", "_local", "_native", "__weakref__")
    _kind: OperationKind

    def __init__(
        self, connector: Connector, local: list[Descriptor], native: _native.Operation
    ) -> None:
        self._connector = connector
        self._local = local
        self._native = native

    @property
    def connector(self) -> Connector:
        """What made it."""
        return self._connector

    @property
    def operation_kind(self) -> OperationKind:
        """What the active side does."""
        return self._kind

    @property
    def descriptors(self) -> list[Descriptor]:
        """The local memory."""
        return list(self._local)

    @property
    def status(self) -> OperationStatus:
        """How far it is. What is final stays."""
        return OperationStatus(self._native.status())

    @property
    def error(self) -> Error | None:
        """Why it failed or was cancelled, where it was."""
        return self._native.error()

    @property
    def quiet(self) -> bool:
        """Whether nothing of it can touch the local memory any more.

        False after its end only where a stopped peer did not let go in time; the memory is then kept alive until it
        does.
        """
        return self._native.quiet()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._native.done()

    def result(self) -> None:
        """Raises why it failed or was cancelled, if it was; ``Invalid`` while it has not ended."""
        self._native.result()

    def cancel(self) -> None:
        """Asks it to stop; the other side learns of it. It ends, cancelled, once the memory is safe to reuse: wait for that.

        One that has ended stays as it ended.
        """
        self._native.cancel()

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until it has ended, without holding the GIL, and raises why it failed, if it did.

        Without a timeout its own limits bound the wait. With one, raises ``Timeout`` when it has not ended then; it goes on.
        """
        if not self._native.done() and not self._native.wait(_seconds(timeout)):
            raise self._late(timeout)
        self._native.result()

    async def wait_for_completion(self, timeout: float | None = None) -> None:
        """`wait` without blocking the event loop.

        Cancelling the task cancels the operation, and the await ends only once the local memory is safe to reuse. To give up
        waiting and let the operation go on, use ``timeout``.
        """
        timeout = _seconds(timeout)
        if not self._native.done() and not await aio.ended(self._native, timeout, self):
            raise self._late(timeout)
        self._native.result()

    def _late(self, timeout: float | None) -> Timeout:
        return Timeout(f"the operation goes on after {timeout} s ({self.status})", op="wait")

    def __await__(self) -> Generator[object, None, None]:
        return self.wait_for_completion().__await__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._native.done():
            self._native.cancel()
            self._native.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._native.done():
            self._native.cancel()
            await aio.ended(self._native, key=self)

    def __repr__(self) -> str:
        nbytes = sum(one.size for one in self._local)
        return f"<{type(self).__name__} of {nbytes} bytes, {self.status}>"


class _Passive(Operation):
    __slots__ = ()

    def metadata(self, hex_encode: bool = False) -> RdmaMetadata:
        """What the peer needs to know; send it by any channel. The sizes are what the descriptors say now.

        ``hex_encode`` writes the opaque part in hex, the older form. ``Stale`` once the operation has ended; and where the memory of a
        tensor or an array is not its own any more, which cancels it.
        """
        try:
            for one in self._local:
                one._native.check()
        except Stale:
            self.cancel()
            raise
        return RdmaMetadata._of(self._native.metadata(hex_encode))


class _Active(Operation):
    __slots__ = ()

    @property
    def peer(self) -> str:
        """The name of the peer whose memory it is."""
        return self._native.route()[0]

    @property
    def path(self) -> str:
        """The path that the bytes take."""
        return self._native.route()[1]

    @property
    def nbytes(self) -> int:
        """How many bytes are moved in all."""
        return self._native.route()[2]


class ReadableOperation(_Passive):
    """Memory that one peer may read, once. Made by `Connector.create_readable`."""

    __slots__ = ()
    _kind = OperationKind.READ


class WritableOperation(_Passive):
    """Memory that one peer may write, once. Made by `Connector.create_writable`.

    When it is complete, the peer's bytes are there.
    """

    __slots__ = ()
    _kind = OperationKind.WRITE


class ReadOperation(_Active):
    """A read from a peer's readable memory, in flight from the start. Made by `Connector.begin_read`."""

    __slots__ = ()
    _kind = OperationKind.READ

    def results(self) -> list[Descriptor]:
        """The local memory, filled; ``Invalid`` unless the operation is complete."""
        if self.status is not OperationStatus.COMPLETE:
            raise Invalid(f"there are no results: the status is {self.status}", op="read")
        return list(self._local)


class WriteOperation(_Active):
    """A write to a peer's writable memory, in flight from the start. Made by `Connector.begin_write`."""

    __slots__ = ()
    _kind = OperationKind.WRITE


class Connector:
    """Makes operations.

    Without a name it gets a random one. Its endpoint is opened when it is first needed, or is the one that is given, with
    settings of its own. ``unclaimed_timeout`` is how many seconds passive operations wait to be claimed where they do not
    say; ``None`` for ever.

    Use it in a ``with`` or an ``async with`` block, or ``close()`` it. Two are equal when their names are.
    """

    __slots__ = ("_native", "_unclaimed", "__weakref__")

    def __init__(
        self,
        name: str | None = None,
        *,
        endpoint: Endpoint | None = None,
        unclaimed_timeout: float | None = DEFAULT_UNCLAIMED_TIMEOUT,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name: a str is needed, not {type(name).__name__}")
        if name == "":
            raise Invalid("name: it is empty", op="connector")
        if endpoint is not None and not isinstance(endpoint, Endpoint):
            raise TypeError(f"endpoint: an Endpoint is needed, not {type(endpoint).__name__}")
        if name is not None and endpoint is not None:
            raise Invalid("name: the endpoint has one", op="connector")
        self._unclaimed = _seconds(unclaimed_timeout, "unclaimed_timeout")
        self._native = _native.Connector(name, None if endpoint is None else endpoint._native)

    @property
    def name(self) -> str:
        """Its name."""
        return self._native.name

    @property
    def hostname(self) -> str:
        """The name of this host."""
        return self._native.hostname

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint, opened now if it was not."""
        return Endpoint._of(self._native.endpoint())

    async def create_readable(
        self,
        local: Local,
        *,
        unclaimed_timeout: float | None | Literal["default"] = "default",
        stream: object = None,
    ) -> ReadableOperation:
        """Offers memory for one peer to read, once.

        With ``stream`` (of torch or CuPy, or a handle as DLPack and ``__cuda_array_interface__`` give it) a peer that comes
        early waits until the work is done that is queued in that CUDA stream by now. Nobody waits here.
        """
        return self.create_readable_sync(local, unclaimed_timeout=unclaimed_timeout, stream=stream)

    def create_readable_sync(
        self,
        local: Local,
        *,
        unclaimed_timeout: float | None | Literal["default"] = "default",
        stream: object = None,
    ) -> ReadableOperation:
        """`create_readable` for code without an event loop."""
        return ReadableOperation(*self._create(OperationKind.READ, local, unclaimed_timeout, stream))

    async def create_writable(
        self,
        local: Local,
        *,
        unclaimed_timeout: float | None | Literal["default"] = "default",
        stream: object = None,
    ) -> WritableOperation:
        """Offers memory for one peer to write, once.

        With ``stream`` (of torch or CuPy, or a handle as DLPack and ``__cuda_array_interface__`` give it) a peer that comes
        early waits until the work is done that is queued in that CUDA stream by now. Nobody waits here.
        """
        return self.create_writable_sync(local, unclaimed_timeout=unclaimed_timeout, stream=stream)

    def create_writable_sync(
        self,
        local: Local,
        *,
        unclaimed_timeout: float | None | Literal["default"] = "default",
        stream: object = None,
    ) -> WritableOperation:
        """`create_writable` for code without an event loop."""
        return WritableOperation(*self._create(OperationKind.WRITE, local, unclaimed_timeout, stream))

    def _create(
        self,
        kind: OperationKind,
        local: Local,
        unclaimed: float | None | Literal["default"],
        stream: object,
    ) -> tuple[Connector, list[Descriptor], _native.Operation]:
        descriptors = _descriptors(local)
        limit = (
            self._unclaimed
            if isinstance(unclaimed, str) and unclaimed == "default"
            else _seconds(unclaimed, "unclaimed_timeout")
        )
        natives = [one._native for one in descriptors]
        native = self._native.create(kind, natives, limit, handle_of(stream))
        return self, descriptors, native

    async def begin_read(
        self, remote_metadata: RdmaMetadata, local: Local, *, stream: object = None
    ) -> ReadOperation:
        """Claims a readable operation and starts to read from it into local memory.

        Waits for the claim: one round trip, and contact with the peer if there was none. An error means that no byte has
        moved.

        With ``stream`` (of torch or CuPy, or a handle as DLPack and ``__cuda_array_interface__`` give it) the copy is in the
        order of that CUDA stream: it begins when what is queued there is done, and what is queued there once this has returned
        sees the bytes, without waiting for the operation. Where a GPU cannot copy by itself the operation ends with
        ``Unsupported``. Without a stream, an operation that is complete means that the bytes are there.
        """
        beginning, descriptors = self._begin(OperationKind.READ, remote_metadata, local, stream)
        return ReadOperation(self, descriptors, await aio.begun(beginning))

    def begin_read_sync(
        self, remote_metadata: RdmaMetadata, local: Local, *, stream: object = None
    ) -> ReadOperation:
        """`begin_read` for code without an event loop."""
        beginning, descriptors = self._begin(OperationKind.READ, remote_metadata, local, stream)
        beginning.wait()
        return ReadOperation(self, descriptors, beginning.result())

    async def begin_write(
        self, local: Local, remote_metadata: RdmaMetadata, *, stream: object = None
    ) -> WriteOperation:
        """Claims a writable operation and starts to write local memory to it. Note the order of the arguments.

        With ``stream`` it writes what the work that is queued there leaves behind, as `begin_read` says.
        """
        beginning, descriptors = self._begin(OperationKind.WRITE, remote_metadata, local, stream)
        return WriteOperation(self, descriptors, await aio.begun(beginning))

    def begin_write_sync(
        self, local: Local, remote_metadata: RdmaMetadata, *, stream: object = None
    ) -> WriteOperation:
        """`begin_write` for code without an event loop."""
        beginning, descriptors = self._begin(OperationKind.WRITE, remote_metadata, local, stream)
        beginning.wait()
        return WriteOperation(self, descriptors, beginning.result())

    def _begin(
        self, kind: OperationKind, remote: RdmaMetadata, local: Local, stream: object
    ) -> tuple[_native.Beginning, list[Descriptor]]:
        if not isinstance(remote, RdmaMetadata):
            raise TypeError(
                f"remote_metadata: an RdmaMetadata is needed, not {type(remote).__name__}"
            )
        descriptors = _descriptors(local)
        natives = [one._native for one in descriptors]
        return self._native.begin(kind, remote._fields(), natives, handle_of(stream)), descriptors

    def close(self) -> None:
        """Ends every operation and closes the endpoint, and waits until nobody touches its memory any more, for the endpoint's
        ``stall_timeout`` at most; memory that is still used then is kept. Closing twice is harmless.
        """
        with contextlib.suppress(Timeout):
            self._native.close(None)

    async def close_async(self) -> None:
        """`close` without blocking the event loop. Leaving an ``async with`` block does the same."""
        with contextlib.suppress(Timeout):
            await aio.closed(self._native, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close_async()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Connector):
            return NotImplemented
        return self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{self._native!r}>"
