"""Memory, as the drop-in describes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import _describe, _native
from .._devices import HOST, Device, as_device
from .._errors import Error, Invalid
from ._models import SerializedDescriptor

if TYPE_CHECKING:
    from ._connector import Connection, Connector


class Descriptor:
    """Memory that takes part in operations.

    ``data`` is a ``torch.Tensor``, a tuple of a NumPy or CuPy array and its device, ``bytes`` or a ``bytearray``, or a tuple of
    address, size in bytes, device and an object that keeps the memory alive (the last two may be left out).
    """

    # Callers shorten `_data_size` to move the first bytes of a larger buffer, and slice `_data_ref`: these are plain attributes.
    _data_ref: Any
    _data_ptr: int
    _data_size: int
    _data_device: Device
    _connection: Connection | None

    def __init__(self, data: Any) -> None:
        described = _described(data)
        self._native: _native.Descriptor | None = described.native
        self._is_remote = False
        self._connection = None
        self._data_ref = described.reference
        self._data_ptr = described.ptr
        self._data_size = described.size
        self._data_device = described.device

    @staticmethod
    def from_serialized(serialized: SerializedDescriptor) -> Descriptor:
        """The descriptor of a peer's memory: it can be shown, not registered."""
        if not isinstance(serialized, SerializedDescriptor):
            raise TypeError(
                f"serialized: a SerializedDescriptor is needed, not {type(serialized).__name__}"
            )
        descriptor = Descriptor.__new__(Descriptor)
        descriptor._native = None
        descriptor._is_remote = True
        descriptor._connection = None
        descriptor._data_ref = None
        descriptor._data_ptr = serialized.ptr
        descriptor._data_size = serialized.size
        descriptor._data_device = Device(serialized.device)
        return descriptor

    @property
    def device(self) -> Device:
        """Where the memory lives."""
        return self._data_device

    @property
    def ptr(self) -> int:
        """The address of the first byte; of a peer's memory, a number that names it."""
        return self._data_ptr

    @property
    def size(self) -> int:
        """How many bytes are used."""
        return self._data_size

    @property
    def is_registered(self) -> bool:
        """Whether it is registered: by the user, or by an operation that has not ended."""
        return self._native is not None and self._native.is_registered

    @property
    def metadata(self) -> SerializedDescriptor:
        """What can be said of it; peers need an operation's metadata."""
        return SerializedDescriptor(
            device=str(self._data_device), ptr=self._data_ptr, size=self._data_size
        )

    def register_memory(self, connector: Connector) -> None:
        """Registers the memory, whatever operations come and go. More than once has no effect."""
        from ._connector import Connector

        if not isinstance(connector, Connector):
            raise TypeError(f"connector: a Connector is needed, not {type(connector).__name__}")
        self.register_with_connector(connector._shared_connection())

    def register_with_connector(self, connection: Connection) -> None:
        """`register_memory` with a connection. More than once has no effect."""
        _check_connection(connection)
        native = self._usable("self")
        if self._connection is not None and self._connection is not connection:
            if self.is_registered:
                raise RuntimeError("connection: the descriptor is registered with another connection")
        with original_errors("connection"):
            native.register(connection._native)
        self._connection = connection

    def deregister_with_connector(self, connection: Connection) -> None:
        """Takes back what `register_with_connector` did; operations that use the memory go on."""
        _check_connection(connection)
        if self._native is None or self._connection is not connection:
            raise RuntimeError("connection: the descriptor is not registered with this connection")
        self._connection = None
        self._native.deregister(connection._native)

    def _usable(self, argument: str) -> _native.Descriptor:
        """The native descriptor with the size that `_data_size` has now."""
        if self._is_remote:
            raise ValueError(f"{argument}: the descriptor is of a peer's memory")
        if self._native is None:
            raise ValueError(
                f"{argument}: the descriptor has no memory ({self._data_size} bytes at {self._data_ptr:#x})"
            )
        if self._data_size != self._native.size:
            if not _describe.is_number(self._data_size):
                raise TypeError(f"{argument}: _data_size is an int, not {self._data_size!r:.80}")
            if not 0 < self._data_size <= self._native.capacity:
                raise ValueError(
                    f"{argument}: _data_size {self._data_size} is not within 1 to {self._native.capacity}"
                )
            self._native.set_size(self._data_size)
        return self._native

    def __repr__(self) -> str:
        return f"Descriptor(ptr={self._data_ptr:#x}, size={self._data_size}, device={self._data_device})"


def _check_connection(connection: object) -> None:
    from ._connector import Connection

    if not isinstance(connection, Connection):
        raise TypeError(f"connection: a Connection is needed, not {type(connection).__name__}")


@contextmanager
def original_errors(argument: str) -> Iterator[None]:
    """Raises what the original's callers expect: ValueError for a wrong value, RuntimeError for everything else."""
    try:
        yield
    except Error as error:
        if isinstance(error, Invalid) and "another connector" in error.message:
            raise RuntimeError(f"{argument}: {error}") from error
        if isinstance(error, (ValueError, RuntimeError)):
            raise
        raise RuntimeError(str(error)) from error


def _described(data: Any) -> _describe.Described:
    if data is None:
        raise ValueError("data: memory is needed, not None")
    if _describe.is_torch(data):
        try:
            return _describe.of_torch(data)
        except Invalid:
            if data.is_contiguous():
                raise
        # No layout can say it (it is expanded, or overlaps): the original copies, which is good for a source. As a target it would
        # leave the caller's tensor as it was, so it refuses to be one.
        described = _describe.of_torch(data.contiguous())
        if described.native is not None:
            described.native.freeze()
        return described
    if isinstance(data, (bytes, bytearray)):
        # Nothing can be registered of an empty one, which is said when it is tried.
        empty = _describe.Described(None, id(data), 0, HOST, data)
        return _describe.of_object(data) if data else empty
    if isinstance(data, tuple) and len(data) >= 2:
        if _describe.is_number(data[0]) and _describe.is_number(data[1]):
            return _describe.of_raw_tuple(data)
        if len(data) == 2 and _is_array(data[0]):
            return _describe.of_object(data[0], as_device(data[1], "data[1]"))
    raise TypeError(
        f"data: a torch.Tensor, bytes, bytearray, a tuple of array and device, or a tuple of address, size, "
        f"device and reference is needed, not {_kinds(data)}"
    )


def _is_array(value: object) -> bool:
    return hasattr(value, "__array_interface__") or hasattr(value, "__cuda_array_interface__")


def _kinds(data: object) -> str:
    if isinstance(data, tuple):
        return f"a tuple of {', '.join(type(one).__name__ for one in data[:5]) or 'nothing'}"
    return type(data).__name__
