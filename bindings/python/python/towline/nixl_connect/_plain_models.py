"""The models where pydantic is not installed: the methods of pydantic's that callers use, and the same rules."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from . import _rules

if TYPE_CHECKING:
    from typing import Self

    from ._descriptor import Descriptor


class ValidationError(ValueError):
    """What a model refuses."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a str is needed")
    return value


def _number(value: Any) -> int:
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and len(value) < 80:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        raise ValueError("an int is needed")
    return int(value)


class _Model:
    _fields: ClassVar[dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]]

    def __init__(self, **values: Any) -> None:
        unknown = values.keys() - self._fields.keys()
        if unknown:
            raise ValidationError(
                f"{type(self).__name__}: extra inputs are not permitted: {sorted(unknown)!r:.200}"
            )
        for name, (default, check) in self._fields.items():
            if name in values:
                try:
                    value = check(values[name])
                except ValueError as error:
                    raise ValidationError(f"{type(self).__name__}.{name}: {error}") from error
            else:
                value = default()
            self.__dict__[name] = value

    def __setattr__(self, name: str, value: object) -> None:
        raise ValidationError(f"{type(self).__name__}.{name}: the instance is frozen")

    def __delattr__(self, name: str) -> None:
        raise ValidationError(f"{type(self).__name__}.{name}: the instance is frozen")

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """An instance from a mapping, or the instance itself."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping) or not all(isinstance(key, str) for key in obj):
            raise ValidationError(f"{cls.__name__}: a dict is needed, not {type(obj).__name__}")
        return cls(**obj)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray) -> Self:
        """An instance from JSON."""
        try:
            obj = json.loads(json_data)
        except (ValueError, RecursionError) as error:
            raise ValidationError(f"{cls.__name__}: the JSON is invalid: {error}") from error
        return cls.model_validate(obj)

    def model_dump(self, **options: object) -> dict[str, Any]:
        """A dict of plain values."""
        return {name: _plain(self.__dict__[name]) for name in self._fields}

    def model_dump_json(self, **options: object) -> str:
        """JSON."""
        return json.dumps(self.model_dump(), separators=(",", ":"))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Another instance, with some fields replaced, unchecked."""
        other = copy.deepcopy(self) if deep else copy.copy(self)
        other.__dict__.update(update or {})
        return other

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={self.__dict__[name]!r}" for name in self._fields if name != "nixl_metadata"
        )
        return f"{type(self).__name__}({shown})"


def _plain(value: Any) -> Any:
    if isinstance(value, _Model):
        return value.model_dump()
    return [_plain(one) for one in value] if isinstance(value, list) else value


class SerializedDescriptor(_Model):
    """One descriptor of the passive side, as the active side sees it."""

    device: str
    ptr: int
    size: int

    _fields = {
        "device": (lambda: "cpu", lambda value: _rules.device(_text(value))),
        "ptr": (int, lambda value: _rules.ptr(_number(value))),
        "size": (int, lambda value: _rules.size(_number(value))),
    }

    def to_descriptor(self) -> Descriptor:
        """A descriptor of the peer's memory: it can be shown, not registered."""
        from ._descriptor import Descriptor

        return Descriptor.from_serialized(self)  # type: ignore[arg-type]


def _descriptors(value: Any) -> list[SerializedDescriptor]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("a list is needed")
    return [SerializedDescriptor.model_validate(one) for one in value]


class RdmaMetadata(_Model):
    """All that an active operation needs to know about its passive one."""

    descriptors: list[SerializedDescriptor]
    nixl_metadata: str
    notification_key: str
    operation_kind: int

    _fields = {
        "descriptors": (list, _descriptors),
        "nixl_metadata": (str, _text),
        "notification_key": (str, _text),
        "operation_kind": (int, lambda value: _rules.operation_kind(_number(value))),
    }

    def to_descriptors(self) -> Descriptor | list[Descriptor]:
        """The descriptors of the peer's memory: one, or a list of several."""
        return _rules.to_descriptors(self.descriptors)  # type: ignore[arg-type]
