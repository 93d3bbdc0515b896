"""The models on pydantic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, field_validator

from . import _rules

if TYPE_CHECKING:
    from ._descriptor import Descriptor


class SerializedDescriptor(BaseModel):
    """One descriptor of the passive side, as the active side sees it."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_assignment=True)

    device: str = "cpu"
    ptr: int = 0
    size: int = 0

    def to_descriptor(self) -> Descriptor:
        """A descriptor of the peer's memory: it can be shown, not registered."""
        from ._descriptor import Descriptor

        return Descriptor.from_serialized(self)

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        return _rules.device(value)

    @field_validator("ptr")
    @classmethod
    def _ptr(cls, value: int) -> int:
        return _rules.ptr(value)

    @field_validator("size")
    @classmethod
    def _size(cls, value: int) -> int:
        return _rules.size(value)


class RdmaMetadata(BaseModel):
    """All that an active operation needs to know about its passive one."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_assignment=True)

    descriptors: list[SerializedDescriptor] = []
    nixl_metadata: str = Field(default="", repr=False)
    notification_key: str = ""
    operation_kind: int = 0

    def to_descriptors(self) -> Descriptor | list[Descriptor]:
        """The descriptors of the peer's memory: one, or a list of several."""
        return _rules.to_descriptors(self.descriptors)

    @field_validator("operation_kind")
    @classmethod
    def _operation_kind(cls, value: int) -> int:
        return _rules.operation_kind(value)

    __hash__ = None  # type: ignore[assignment]
