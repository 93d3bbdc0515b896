"""What the fields of the models must be, and what can be made of them; shared by both forms of the models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._devices import Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._descriptor import Descriptor
    from ._pydantic_models import SerializedDescriptor


def device(value: str) -> str:
    text = value.strip().lower()
    known = str(Device(text)) if text.startswith(("cpu", "cuda", "xpu")) else ""
    if not known or text not in (known, known.removesuffix(":0")):
        raise ValueError(f"device: {value!r:.80} is not cpu, cuda:N or xpu:N")
    return text


def ptr(value: int) -> int:
    if not 0 < value < 1 << 64:
        raise ValueError(f"ptr: {value} is not a token; one is never 0, negative or above 64 bits")
    return value


def size(value: int) -> int:
    if not 0 <= value < 1 << 63:
        raise ValueError(f"size: {value} is not a number of bytes")
    return value


def operation_kind(value: int) -> int:
    # The original lets this one through as it is, past pydantic.
    if value not in (1, 2):
        raise TypeError(f"operation_kind: {value} is neither 1 (READ) nor 2 (WRITE)")
    return int(value)


def to_descriptors(
    serialized: Sequence[SerializedDescriptor],
) -> Descriptor | list[Descriptor]:
    if not serialized:
        raise ValueError("descriptors: the metadata names none")
    some = [one.to_descriptor() for one in serialized]
    return some[0] if len(some) == 1 else some
