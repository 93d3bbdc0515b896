"""What memory an object has, for descriptors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _native
from ._devices import HOST, Device, DeviceKind, as_device
from ._errors import Invalid


class Described(NamedTuple):
    """Where the memory of an object is. Without a native descriptor there is nothing that can be registered."""

    native: _native.Descriptor | None
    ptr: int
    size: int
    device: Device
    reference: object


def _known(native: _native.Descriptor, reference: object) -> Described:
    kind, number = native.device
    device = HOST if kind == DeviceKind.HOST else Device((DeviceKind(kind), number))
    return Described(native, native.ptr, native.size, device, reference)


def raw(ptr: int, size: int, device: Device, reference: object) -> Described:
    """Memory by its address."""
    native = None
    if 0 < ptr < 1 << 64 and 0 < size < 1 << 63:
        native = _native.Descriptor.raw(ptr, size, device.kind, device.id, reference)
    return Described(native, ptr, size, device, reference)


def _view(
    ptr: int, item: int, shape: Iterable[int], strides: Iterable[int], device: Device, reference: object
) -> Described:
    """An array by its first element, the bytes of one, its shape and its strides in bytes."""
    array = (item, list(shape), list(strides))
    native = _native.Descriptor.view(ptr, array, device.kind, device.id, reference)
    return Described(native, ptr, native.size, device, reference)


def is_torch(data: object) -> bool:
    """Whether it is a `torch.Tensor`, found out without importing torch."""
    return any(
        base.__name__ == "Tensor" and base.__module__.partition(".")[0] == "torch"
        for base in type(data).__mro__
    )


def of_torch(data: Any) -> Described:
    """The memory of a tensor, seen through a layout where it has gaps."""
    kind: str = data.device.type
    if data.is_cuda:
        kind = "cuda"
    if kind not in ("cpu", "cuda", "xpu"):
        raise Invalid(f"data: memory on the torch device {data.device} has no address here", op="descriptor")
    ptr, size = int(data.data_ptr()), int(data.numel()) * int(data.element_size())
    if data.is_conj() or data.is_neg():
        raise Invalid("data: the tensor is a lazy view; resolve_conj and resolve_neg it", op="descriptor")
    device = HOST if kind == "cpu" else Device(f"{kind}:{data.device.index or 0}")
    if data.is_contiguous():
        return raw(ptr, size, device, data)
    item = int(data.element_size())
    return _view(ptr, item, map(int, data.shape), (int(stride) * item for stride in data.stride()), device, data)


def of_object(data: Any, device: Device | None = None) -> Described:
    """The memory of anything that says where it is: by the buffer protocol, ``__array_interface__``, CUDA's, or DLPack."""
    interface = None
    if not isinstance(data, (bytes, bytearray, memoryview)):
        interface = getattr(data, "__cuda_array_interface__", None)
    if interface is None:
        described = _known(_native.Descriptor(data), data)
    else:
        there = device
        if there is None or there.kind is not DeviceKind.CUDA:
            there = Device((DeviceKind.CUDA, _cuda_device(interface, data)))
        described = _of_cuda(interface, there, data)
    if device is not None and device.kind is not described.device.kind:
        raise Invalid(
            f"data: the array is on {described.device}, and the device says {device}", op="descriptor"
        )
    return described


def _cuda_device(interface: Any, data: Any) -> int:
    """The number of the GPU: the driver knows, and without one the array may say it."""
    try:
        known = _native.cuda_device_of(int(interface["data"][0]))
    except (KeyError, TypeError, ValueError, OverflowError, IndexError):
        known = None
    return known if known is not None else int(getattr(getattr(data, "device", None), "id", 0) or 0)


def _of_cuda(interface: Any, device: Device, data: object) -> Described:
    try:
        ptr, read_only = interface["data"]
        typestr = interface["typestr"]
        if typestr[1:2] == "O":
            raise Invalid("data: its elements are Python objects; use numbers", op="descriptor")
        item = int(typestr[2:])
        shape = [int(length) for length in interface["shape"]]
        strides = interface.get("strides")
        stream = interface.get("stream")
        if stream is not None and (not is_number(stream) or not 0 < stream < 1 << 64):
            raise ValueError(f"its stream is {stream!r:.80}, which names none")
        if strides is None or 0 in shape:
            described = raw(int(ptr), item * math.prod(shape), device, data)
        else:
            described = _view(int(ptr), item, shape, map(int, strides), device, data)
    except Invalid:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise Invalid(
            f"data: its __cuda_array_interface__ is damaged: {error!r}", op="descriptor"
        ) from error
    if described.native is not None:
        if read_only:
            described.native.freeze()
        if stream is not None:
            # The array's own work is queued there, and operations wait for it.
            described.native.after(stream)
    return described


def is_number(value: object) -> bool:
    """Whether it is an integer, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def of_raw_tuple(data: tuple[Any, ...]) -> Described:
    """Address, size, device (the host if it is not there) and a reference that keeps the memory."""
    ptr, size, *rest = data
    device = as_device(rest[0], "data[2]") if rest else HOST
    return raw(ptr, size, device, rest[1] if len(rest) > 1 else None)
