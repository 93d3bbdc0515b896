"""Where memory lives, what operations do and how far they are: the words that both operations APIs share."""

from __future__ import annotations

from enum import IntEnum

from . import _native
from ._errors import Invalid


class DeviceKind(IntEnum):
    """A kind of device."""

    UNSPECIFIED = 0
    HOST = 1
    CUDA = 2
    XPU = 3

    @property
    def nixl_mem_type(self) -> str:
        """NIXL's word for the memory of such a device."""
        return "DRAM" if self is DeviceKind.HOST else "VRAM"

    def __str__(self) -> str:
        return ("<invalid>", "cpu", "cuda", "xpu")[self]

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class OperationKind(IntEnum):
    """What the active side of an operation does."""

    UNSPECIFIED = 0
    READ = 1
    """It reads the memory of the passive side."""
    WRITE = 2
    """It writes the memory of the passive side."""

    def __str__(self) -> str:
        return ("<invalid>", "READ", "WRITE")[self]

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class OperationStatus(IntEnum):
    """How far an operation is. The last three are final."""

    UNINITIALIZED = 0
    INITIALIZED = 1
    """It waits for a peer to claim it."""
    IN_PROGRESS = 2
    """Bytes are moving, or are about to."""
    COMPLETE = 3
    """All bytes were moved."""
    CANCELLED = 4
    """One of the two sides has cancelled it."""
    ERRORED = 5
    """It failed; its error says why."""

    @property
    def is_final(self) -> bool:
        """Whether it stays like this."""
        return self >= OperationStatus.COMPLETE

    def __str__(self) -> str:
        return ("<invalid>", "INIT", "PROC", "DONE", "STOP", "ERR")[self]

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Device:
    """A device: its kind, and its number among those of its kind.

    Made from a text (``"cpu"``, ``"cuda:1"``, ``"xpu"``; ``"gpu"`` and ``"host"`` are understood too) or from a tuple of kind
    and number. The host has only one, whatever its number.

    >>> str(Device("GPU:1")), Device("cuda").kind, Device((DeviceKind.XPU, 2)).id
    ('cuda:1', <DeviceKind.CUDA: 2>, 2)
    """

    __slots__ = ("_id", "_kind", "__weakref__")

    def __init__(self, metadata: str | tuple[DeviceKind, int]) -> None:
        if metadata is None:
            raise Invalid("metadata: a device is needed, not None", op="device")
        if isinstance(metadata, str):
            kind, number = _native.device_from_text(metadata)
        elif (
            isinstance(metadata, tuple)
            and len(metadata) == 2
            and isinstance(metadata[0], DeviceKind)
            and isinstance(metadata[1], int)
        ):
            kind, number = metadata[0], int(metadata[1])
            if not 0 <= number < 1 << 32:
                raise Invalid(f"metadata: {number} is not the number of a device", op="device")
        else:
            raise TypeError(
                f"metadata: a device is a str or a tuple of DeviceKind and int, not {metadata!r:.100}"
            )
        self._kind = DeviceKind(kind)
        self._id = 0 if self._kind is DeviceKind.HOST else number

    @property
    def id(self) -> int:
        """Which one of its kind."""
        return self._id

    @property
    def kind(self) -> DeviceKind:
        """What it is."""
        return self._kind

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Device):
            return NotImplemented
        return (self._kind, self._id) == (other._kind, other._id)

    def __hash__(self) -> int:
        return hash((self._kind, self._id))

    def __str__(self) -> str:
        numbered = self._kind in (DeviceKind.CUDA, DeviceKind.XPU)
        return f"{self._kind}:{self._id}" if numbered else str(self._kind)

    def __repr__(self) -> str:
        return f"Device(kind={self._kind}, id={self._id})"

    def __reduce__(self) -> tuple[type[Device], tuple[tuple[DeviceKind, int]]]:
        return (Device, ((self._kind, self._id),))


HOST = Device((DeviceKind.HOST, 0))


def as_device(value: object, argument: str) -> Device:
    """The device that an argument names."""
    if isinstance(value, Device):
        return value
    if isinstance(value, str):
        return Device(value)
    raise TypeError(f"{argument}: the device is a Device or a str, not {type(value).__name__}")
