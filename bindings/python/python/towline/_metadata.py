"""What the passive side of an operation hands to the active one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from . import _native
from ._describe import is_number
from ._devices import Device, OperationKind
from ._errors import Invalid, Protocol

T = TypeVar("T")
_Fields = tuple[list[tuple[str, int, int]], str, str, int]


def _wrong_type(name: str, needed: str, value: object) -> TypeError:
    return TypeError(f"{name}: {needed} is needed, not {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class SerializedDescriptor:
    """One descriptor of the passive side, as the active side sees it."""

    device: str
    """Where the memory lives: ``cpu``, ``cuda:N`` or ``xpu:N``."""
    ptr: int
    """A number that names the memory. It is not an address and is never used as one; it is never 0."""
    size: int
    """How many bytes are offered."""

    def __post_init__(self) -> None:
        if not isinstance(self.device, str):
            raise _wrong_type("device", "a str", self.device)
        for name, value in (("ptr", self.ptr), ("size", self.size)):
            if not is_number(value):
                raise _wrong_type(name, "an int", value)
            if not 0 < value < 1 << (64 if name == "ptr" else 63):
                raise Invalid(f"{name}: {value} is not within its range", op="metadata")
        device = str(Device(self.device))
        if self.device.strip().lower() not in (device, device.removesuffix(":0")):
            raise Invalid(f"device: {self.device!r} is not written as {device!r}", op="metadata")
        object.__setattr__(self, "device", device)


@dataclass(frozen=True, slots=True)
class RdmaMetadata:
    """All that an active operation needs to know about its passive one.

    It is a capability: a peer that has it can claim the operation, so it belongs to the peer and in no log (``repr`` leaves the
    secret part out). ``to_json`` and ``to_dict`` give a form to send, with exactly the four keys of the fields.
    """

    descriptors: tuple[SerializedDescriptor, ...]
    """The memory that is offered: at most 1024 parts."""
    nixl_metadata: str = field(repr=False)
    """The operation and the tickets of its memory: opaque."""
    notification_key: str
    """The operation's number as a UUID, for logs."""
    operation_kind: OperationKind
    """What the active side has to do."""

    def __post_init__(self) -> None:
        if isinstance(self.descriptors, (str, bytes, Mapping)) or not isinstance(
            self.descriptors, Iterable
        ):
            raise _wrong_type("descriptors", "a list of SerializedDescriptor", self.descriptors)
        descriptors = tuple(self.descriptors)
        for one in descriptors:
            if not isinstance(one, SerializedDescriptor):
                raise _wrong_type("descriptors", "a list of SerializedDescriptor", one)
        for name in ("nixl_metadata", "notification_key"):
            if not isinstance(getattr(self, name), str):
                raise _wrong_type(name, "a str", getattr(self, name))
            if not getattr(self, name):
                raise Invalid(f"{name}: it is empty", op="metadata")
        if not is_number(self.operation_kind):
            raise _wrong_type("operation_kind", "an OperationKind", self.operation_kind)
        if self.operation_kind not in (OperationKind.READ, OperationKind.WRITE):
            raise Invalid(
                f"operation_kind: {int(self.operation_kind)} is neither 1 (read) nor 2 (write)",
                op="metadata",
            )
        if not descriptors:
            raise Invalid("descriptors: there are none", op="metadata")
        object.__setattr__(self, "descriptors", descriptors)
        object.__setattr__(self, "operation_kind", OperationKind(self.operation_kind))

    @classmethod
    def from_json(cls, text: str | bytes) -> RdmaMetadata:
        """Reads the JSON form; any text gives metadata or a ``Protocol`` error, and a long one an error at once."""
        if isinstance(text, (bytes, bytearray)):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise Protocol(f"text: it is not UTF-8: {error}", op="metadata") from error
        if not isinstance(text, str):
            raise _wrong_type("text", "a str or bytes", text)
        return cls._of(_native.metadata_from_json(text))

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RdmaMetadata:
        """Reads what ``to_dict`` wrote, or what a JSON reader made of the JSON form."""
        if not isinstance(values, Mapping):
            raise _wrong_type("values", "a mapping", values)
        _check_keys("values", values, cls)
        descriptors = values["descriptors"]
        if not isinstance(descriptors, (list, tuple)):
            raise Protocol("descriptors: a list is needed", op="metadata")
        try:
            read = []
            for one in descriptors:
                if not isinstance(one, SerializedDescriptor):
                    if not isinstance(one, Mapping):
                        raise Protocol("descriptors: a list of mappings is needed", op="metadata")
                    _check_keys("descriptors", one, SerializedDescriptor)
                    one = SerializedDescriptor(one["device"], one["ptr"], one["size"])
                read.append(one)
            return cls(
                tuple(read),
                values["nixl_metadata"],
                values["notification_key"],
                values["operation_kind"],
            )
        except TypeError as error:
            # Not the caller's code is wrong here but what a peer sent.
            raise Protocol(str(error), op="metadata") from error

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain values with four keys."""
        return {
            "descriptors": [
                {"device": one.device, "ptr": one.ptr, "size": one.size} for one in self.descriptors
            ],
            "nixl_metadata": self.nixl_metadata,
            "notification_key": self.notification_key,
            "operation_kind": int(self.operation_kind),
        }

    @classmethod
    def _of(cls, fields: _Fields) -> RdmaMetadata:
        descriptors, nixl_metadata, notification_key, kind = fields
        return _checked(
            cls,
            descriptors=tuple(
                _checked(SerializedDescriptor, device=device, ptr=ptr, size=size)
                for device, ptr, size in descriptors
            ),
            nixl_metadata=nixl_metadata,
            notification_key=notification_key,
            operation_kind=OperationKind(kind),
        )

    def _fields(self) -> _Fields:
        return (
            [(one.device, one.ptr, one.size) for one in self.descriptors],
            self.nixl_metadata,
            self.notification_key,
            int(self.operation_kind),
        )


def _checked(cls: type[T], **values: Any) -> T:
    """An instance with values from the native side, which has checked them: asking again would cost more than the rest."""
    made = cls.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _check_keys(name: str, values: Mapping[str, Any], of: type) -> None:
    known = set(of.__slots__)  # type: ignore[attr-defined]
    for wrong, what in ((known - set(values), "is missing"), (set(values) - known, "is not known")):
        for key in wrong:
            raise Protocol(f"{name}: the key {key!r:.80} {what}", op="metadata")
