"""What a communicator hands out: operations in flight, registered buffers, windows, views, reductions."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from .. import _native, aio
from ._errors import ClosedResource, NCCLTimeout, NcclInvalid
from ._types import NcclDataType, WindowFlag

if TYPE_CHECKING:
    from typing import Self

    from ._communicator import Communicator

T_co = TypeVar("T_co", covariant=True)


class Operation(Generic[T_co]):
    """A call in flight: ``await`` it in any event loop, or ``wait()`` for it in code without one.

    On a blocking communicator it has ended when you get it. Dropping it does not stop it: the memory that it touches stays
    alive until it has ended.
    """

    __slots__ = ("_native", "_op", "__weakref__")

    def __init__(self, native: _native.Work, op: str) -> None:
        self._native = native
        self._op = op

    def __await__(self) -> Generator[object, None, T_co]:
        """Ends when the call has. The other ranks count on what was begun, so cancelling the task does not stop it, and the
        await ends only once the local memory is safe to reuse. Only `Communicator.signaled` is given up."""
        if not self._native.done():
            yield from aio.ended(self._native).__await__()
        return self.result()

    def wait(self, timeout: float | None = None) -> T_co:
        """Blocks until it has ended, without holding the GIL.

        Without a timeout that of the communicator bounds the wait. With one, raises `NCCLTimeout` when it is still in flight
        then; it goes on.
        """
        if not self._native.done() and not self._native.wait(timeout):
            raise NCCLTimeout(f"still in flight after {timeout} s", op=self._op)
        return self.result()

    def result(self) -> T_co:
        """What it gave, or raises why it failed; `NcclInvalid` while it is in flight."""
        return cast(T_co, self._native.result())

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._native.done()

    def __repr__(self) -> str:
        state = "ended" if self._native.done() else "in flight"
        return f"<Operation {self._op}, {state}>"


class CommResource:
    """What a communicator tracks: closed by `close`, or with the communicator."""

    __slots__ = ("_closed", "_comm", "__weakref__")

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._closed = False

    @property
    def is_valid(self) -> bool:
        """Whether it can be used."""
        return not self._closed

    def close(self) -> None:
        """Releases it, once the work in flight of the communicator has ended. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._comm._forget(self)
            self._release()

    def _release(self) -> None:
        pass

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedResource(f"the {what} is closed", op="handle")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RegisteredBufferHandle(CommResource):
    """A buffer that is registered with a communicator: calls on it, or on a part of it, are zero-copy.

    It keeps the buffer alive. A ``with`` block closes it.
    """

    __slots__ = ("_native",)

    def __init__(self, comm: Communicator, native: _native.RegisteredBuffer) -> None:
        super().__init__(comm)
        self._native = native

    @property
    def handle(self) -> int:
        """The number of the registration, never 0; raises once it is closed."""
        self._check_open("registered buffer")
        return self._native.handle

    @property
    def size(self) -> int:
        """How many bytes were registered; also after closing."""
        return self._native.size

    def _release(self) -> None:
        self._native.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"handle {self.handle}"
        return f"<RegisteredBufferHandle of {self.size} bytes, {state}>"


class RegisteredWindowHandle(CommResource):
    """Memory that all ranks of a communicator have registered together.

    It keeps the buffer alive. Closing is local: ranks that still access the memory get an error, never bytes of something
    else. A ``with`` block closes it. On a non-blocking communicator, and inside a group, the registration is in flight: poll
    ``handle``, ``await`` the window or ``wait()`` for it.
    """

    __slots__ = ("_flags", "_native", "_registering")

    def __init__(
        self, comm: Communicator, native: _native.Window, registering: _native.Work, flags: WindowFlag
    ) -> None:
        super().__init__(comm)
        self._native = native
        self._registering: Operation[None] = Operation(registering, "register_window")
        self._flags = flags

    @property
    def handle(self) -> int:
        """The number of the window, equal on all ranks; 0 until it is registered, and once it is closed."""
        return 0 if self._closed else self._native.handle

    @property
    def is_valid(self) -> bool:
        """Whether it is registered and not closed."""
        return self.handle != 0

    @property
    def size(self) -> int:
        """How many bytes this rank has registered; also after closing."""
        return self._native.size

    @property
    def user_ptr(self) -> int:
        """The address of this rank's memory; raises once it is closed."""
        self._check_open("window")
        return self._native.addr

    @property
    def flags(self) -> WindowFlag:
        """The flags that it was registered with."""
        return self._flags

    def size_of(self, rank: int) -> int:
        """How many bytes that rank has registered."""
        return self._native.size_of(rank)

    def path(self, rank: int) -> str:
        """The path that accesses to that rank take: ``inproc`` and ``mapped`` are direct, any other is by requests."""
        return self._native.path(rank)

    def peer_view(self, rank: int) -> PeerView:
        """That rank's memory, mapped here; raises where it is not shared with this process."""
        return PeerView(self._native.peer_view(rank))

    def done(self) -> bool:
        """Whether the registration has ended, well or not."""
        return self._registering.done()

    def wait(self, timeout: float | None = None) -> Self:
        """Blocks until the registration has ended, and raises why it failed, if it did."""
        self._registering.wait(timeout)
        return self

    def __await__(self) -> Generator[object, None, Self]:
        """Ends when the registration has."""
        yield from self._registering.__await__()
        return self

    def _release(self) -> None:
        self._native.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"handle {self.handle}"
        return f"<RegisteredWindowHandle of {self.size} bytes, {state}>"


class PeerView:
    """Another rank's memory, mapped here: bytes are copied in and out without a system call.

    It holds a pin on that memory: close it, or use a ``with`` block. It ends when this rank or the other closes the
    window. Offsets are in bytes.
    """

    __slots__ = ("_native", "__weakref__")

    def __init__(self, native: _native.PeerView) -> None:
        self._native = native

    @property
    def rank(self) -> int:
        """The rank whose memory it is."""
        return self._native.rank

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self._native.size

    def __len__(self) -> int:
        return self._native.size

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Copies bytes out; all that follow, without a number."""
        _check_offset("read", offset)
        return self._native.read(offset, max(self.size - offset, 0) if nbytes is None else nbytes)

    def write(self, data: object, offset: int = 0) -> None:
        """Copies bytes in: those of anything with the buffer protocol."""
        _check_offset("write", offset)
        self._native.write(offset, memoryview(data).tobytes())  # type: ignore[arg-type]

    def load(self, offset: int = 0) -> int:
        """Reads an aligned 64-bit word; what was written before it was stored is visible."""
        _check_offset("load", offset)
        return self._native.load(offset)

    def store(self, value: int, offset: int = 0) -> None:
        """Writes an aligned 64-bit word, visible after everything that was written before."""
        _check_offset("store", offset)
        self._native.store(offset, value)

    def close(self) -> None:
        """Lets go of the memory. Closing twice is harmless."""
        self._native.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed here."""
        return self._native.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PeerView of {self.size} bytes of rank {self.rank}>"


def _check_offset(op: str, offset: int) -> None:
    if offset < 0:
        raise NcclInvalid(f"offset: {offset} is negative", op=op)


class CustomRedOp(CommResource):
    """A sum in which each rank's elements are multiplied by that rank's own scalar first."""

    __slots__ = ("_datatype", "_number", "_scalar")

    def __init__(
        self, comm: Communicator, number: int, scalar: int | float, datatype: NcclDataType
    ) -> None:
        super().__init__(comm)
        self._number = number
        self._scalar = scalar
        self._datatype = datatype

    @property
    def op(self) -> int:
        """The number of the operation, never one of NCCL's own; raises once it is closed."""
        self._check_open("reduction")
        return self._number

    @property
    def scalar(self) -> int | float:
        """What this rank's elements are multiplied by."""
        return self._scalar

    @property
    def datatype(self) -> NcclDataType:
        """The type of the elements that it is for."""
        return self._datatype

    def __int__(self) -> int:
        return self.op

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<CustomRedOp: sum of {self._scalar} times {self._datatype.type_name}{state}>"
