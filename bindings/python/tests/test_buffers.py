"""Which objects can be registered, how long they live, and arrays in shared memory."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, get_args

import numpy
import pytest
from conftest import MakePeer, run_python

import towline
from towline import _native


class Interface:
    """Memory by `__array_interface__` alone."""

    def __init__(self, source: numpy.ndarray[Any, Any]) -> None:
        self.source = source

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return dict(self.source.__array_interface__)


class Tensor:
    """Memory by DLPack alone."""

    def __init__(self, source: Any, old: bool = False) -> None:
        self.source, self.old = source, old

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.source.__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("an old producer knows no options")
        return self.source.__dlpack__(**options)


def read_back(endpoint: towline.Endpoint, region: towline.Region) -> bytes:
    with towline.Endpoint("reader") as reader:
        remote = reader.import_(region.ticket())
        target = bytearray(len(remote))
        with reader.register(target, "none") as local:
            reader.read(remote, local).wait()
        return bytes(target)


def test_anything_with_memory_can_be_registered(endpoint: towline.Endpoint) -> None:
    numbers = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    raw = numbers.tobytes()
    mapped = mmap.mmap(-1, len(raw))
    mapped[:] = raw
    objects: list[Any] = [
        raw,
        bytearray(raw),
        memoryview(raw),
        array.array("f", numbers.ravel().tolist()),
        (ctypes.c_char * len(raw)).from_buffer_copy(raw),
        mapped,
        numbers,
        Interface(numbers),
        Tensor(numbers),
        Tensor(numbers, old=True),
        (numbers.ctypes.data, numbers.nbytes, numbers),
        (numbers.ctypes.data, numbers.nbytes, None),
    ]
    for obj in objects:
        with endpoint.register(obj) as region:
            assert (region.nbytes, region.place, region.access) == (len(raw), "host", "read")
            assert read_back(endpoint, region) == raw, type(obj)


def test_fortran_order_is_contiguous_too(endpoint: towline.Endpoint) -> None:
    numbers = numpy.asfortranarray(numpy.arange(6, dtype=numpy.uint8).reshape(2, 3))
    assert read_back(endpoint, endpoint.register(numbers)) == numbers.tobytes(order="F")


def test_memory_with_gaps_is_refused(endpoint: towline.Endpoint) -> None:
    numbers = numpy.zeros((4, 4), numpy.float32)
    for gaps in (numbers[:, ::2], numbers[::2], numbers[:, 1:]):
        for obj in (gaps, Interface(gaps), Tensor(gaps)):
            with pytest.raises(ValueError, match="obj: .*not contiguous"):
                endpoint.register(obj)


def test_elements_that_are_pointers_are_refused(endpoint: towline.Endpoint) -> None:
    nested = numpy.dtype([("O", "i4"), ("inner", [("a", "f8"), ("b", object)])])
    pointers: list[Any] = [
        numpy.array([object(), "text"], dtype=object),
        numpy.array(object(), dtype=object),
        numpy.zeros(2, dtype=nested),
        numpy.zeros((2, 3), dtype=object)[:, ::2],
        (ctypes.c_void_p * 2)(),
        (ctypes.c_char_p * 2)(),
        (ctypes.c_wchar_p * 2)(),
        (ctypes.POINTER(ctypes.c_int) * 2)(),
    ]
    for array in pointers:
        with pytest.raises(towline.Invalid, match="pointers"):
            endpoint.register(array, "read+write")
        with pytest.raises(towline.Invalid, match="pointers"):
            towline.connect.Descriptor(array)

    for array in pointers[:3]:
        with pytest.raises(towline.Invalid, match="pointers"):
            endpoint.register(Interface(array), "read+write")
    # Names of fields and complex numbers only look like them.
    named = numpy.dtype([("O", "i4"), ("P", "c16"), ("z&X", "f4")])
    endpoint.register(numpy.zeros(2, dtype=named), "read+write").close()
    endpoint.register(numpy.zeros(2, dtype=numpy.complex64), "read+write").close()


class Either(ctypes.Union):
    _fields_ = [("pointer", ctypes.c_void_p), ("number", ctypes.c_uint64)]


class Packed(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("letter", ctypes.c_char), ("object", ctypes.py_object)]


class Around(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("rows", Either * 2)]


class Derived(Around):
    _fields_ = [("more", ctypes.c_int)]


class Call(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("letter", ctypes.c_char), ("function", ctypes.CFUNCTYPE(None))]


class Link(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("letter", ctypes.c_char), ("to", ctypes.POINTER(ctypes.c_int))]


class Plain(ctypes.Union):
    _fields_ = [("number", ctypes.c_uint64), ("bytes", ctypes.c_uint8 * 8)]


class PlainPacked(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("letter", ctypes.c_char), ("plain", Plain), ("real", ctypes.c_double)]


def test_pointers_that_no_format_tells_are_refused(endpoint: towline.Endpoint) -> None:
    # Of unions and packed structures ctypes says nothing but their bytes.
    hidden: list[Any] = [(kind * 2)() for kind in (Either, Packed, Around, Derived, Call, Link)]
    hidden += [Packed(), memoryview(Either()), memoryview((Packed * 2)()).cast("B")]
    # Fields in another order than their addresses can be described neither by a buffer nor by an array interface.
    def turned(kind: str) -> numpy.ndarray[Any, Any]:
        return numpy.zeros(
            4, numpy.dtype({"names": ["a", "b"], "formats": [kind, "i1"], "offsets": [8, 0], "itemsize": 16})
        )

    hidden += [turned("O"), turned("O")[::2]]
    for array in hidden:
        with pytest.raises(towline.Invalid, match="pointers"):
            endpoint.register(array, "read+write")
        with pytest.raises(towline.Invalid, match="pointers"):
            towline.connect.Descriptor(array)
    for plain in ((Plain * 2)(), PlainPacked(), memoryview((PlainPacked * 2)()), turned("i8")):
        endpoint.register(plain, "read+write").close()


def test_read_only_memory_is_never_written(endpoint: towline.Endpoint) -> None:
    frozen = numpy.zeros(8, numpy.uint8)
    frozen.setflags(write=False)
    for obj in (bytes(8), memoryview(bytes(8)), frozen, Interface(frozen)):
        for access in get_args(towline.Access)[2:]:
            with pytest.raises(ValueError, match="obj: .*read-only"):
                endpoint.register(obj, access)
        with endpoint.register(obj, "read") as region, towline.Endpoint("other") as other:
            assert region.readonly
            source = other.register(bytearray(8))
            remote = endpoint.import_(source.ticket())
            for local in (region, region.span(0, 4)):
                with pytest.raises(ValueError, match="local: .*read-only"):
                    endpoint.read(remote, local)


def test_objects_without_memory_are_refused_by_type(endpoint: towline.Endpoint) -> None:
    for obj in (None, 5, "text", object(), [1, 2], (1, 2), ("a", "b", None)):
        with pytest.raises(TypeError, match="obj"):
            endpoint.register(obj)


def test_device_memory_needs_a_driver_that_knows_it(endpoint: towline.Endpoint) -> None:
    class Device:
        __cuda_array_interface__ = {"shape": (1,), "typestr": "|u1", "data": (1, False), "version": 3}

    with pytest.raises((towline.Unavailable, towline.Invalid)):
        endpoint.register(Device())


def test_bad_addresses_and_interfaces_are_refused(endpoint: towline.Endpoint) -> None:
    for bad in ((0, 8, None), (4096, 0, None), (2**64 - 4, 8, None)):
        with pytest.raises(ValueError):
            endpoint.register(bad)
    with pytest.raises(ValueError):
        endpoint.register(b"")

    class Broken:
        __array_interface__ = {"shape": (2**40, 2**40), "typestr": "<f8", "data": (8, False)}

    with pytest.raises(ValueError, match="shape"):
        endpoint.register(Broken())


def test_an_object_lives_while_it_is_registered_and_no_longer(endpoint: towline.Endpoint) -> None:
    gc.collect()  # what tests before this one have left
    before = _native.held()
    source = numpy.zeros(64, numpy.uint8)
    gone = weakref.ref(source)
    region = endpoint.register(source)
    del source
    gc.collect()
    assert gone() is not None and _native.held() == before + 1
    region.close()
    assert gone() is None and _native.held() == before

    source = numpy.zeros(64, numpy.uint8)
    gone = weakref.ref(source)
    region = endpoint.register(source)
    del source, region
    gc.collect()
    assert gone() is None


def test_a_registered_bytearray_cannot_be_resized(endpoint: towline.Endpoint) -> None:
    source = bytearray(8)
    with endpoint.register(source), pytest.raises(BufferError):
        source.extend(b"x")
    source.extend(b"x")


def test_a_failed_registration_keeps_nothing(endpoint: towline.Endpoint) -> None:
    gc.collect()  # what tests before this one have left
    before = _native.held()
    endpoint.close()
    with pytest.raises(towline.Invalid, match="closed"):
        endpoint.register(bytearray(8))
    assert _native.held() == before


def test_shared_arrays_are_recognised_also_in_part(endpoint: towline.Endpoint) -> None:
    whole = towline.empty((8, 16), "float32")
    assert type(whole).__name__ == "ndarray" and whole.dtype == numpy.float32 and not whole.any()
    whole[:] = numpy.arange(128).reshape(8, 16)
    for part in (whole, whole[2:4], whole.reshape(-1)[5:9], whole.view(numpy.uint8), memoryview(whole)):
        with endpoint.register(part) as region:
            assert region.kind == "shared", region
            assert read_back(endpoint, region) == bytes(memoryview(part).cast("B"))
    assert endpoint.register(numpy.zeros(4)).kind == "external"


def test_shared_memory_lives_with_its_region(endpoint: towline.Endpoint, peer: MakePeer) -> None:
    array = towline.empty(4096)
    array[:] = 7
    region = endpoint.register(array)
    del array
    gc.collect()
    assert read_back(endpoint, region) == b"\7" * 4096


def test_shared_arrays_have_every_kind_of_element() -> None:
    for name in ("bool", "int8", "uint16", "int32", "uint64", "float16", "float64", "complex64"):
        array = towline.empty((2, 3), name)
        assert array.dtype == numpy.dtype(name) and array.shape == (2, 3)
    assert towline.empty(3, numpy.dtype("int16")).dtype == numpy.int16
    assert towline.empty(3, numpy.float32).dtype == numpy.float32
    assert towline.empty(3, float).dtype == numpy.float64
    odd = towline.empty((2, 3), "bfloat16")
    assert (odd.shape, odd.nbytes, len(odd), odd.dtype) == ((2, 3), 12, 2, "bfloat16")
    assert memoryview(odd).shape == (2, 3, 2)
    for bad in ("float31", object(), "O"):
        with pytest.raises(ValueError, match="dtype"):
            towline.empty(3, bad)
    for bad_shape in (0, (4, 0), -1, (2**62, 2**62), 2**63):
        with pytest.raises(ValueError, match="shape"):
            towline.empty(bad_shape)
    with pytest.raises(TypeError, match="shape"):
        towline.empty(1.5)  # type: ignore[arg-type]


def test_a_shared_array_is_exported_without_a_copy() -> None:
    shared: Any = _native.SharedArray([2, 3], "float32", "f", "<f4", 2, 32)
    by_buffer, by_dlpack = numpy.asarray(shared), numpy.from_dlpack(shared)
    by_buffer[1, 2] = 5
    assert by_dlpack[1, 2] == 5 and by_dlpack.shape == (2, 3)
    address, read_only = shared.__array_interface__["data"]
    assert address == by_buffer.ctypes.data and not read_only
    assert memoryview(shared)[1, 2] == 5
    capsule = shared.__dlpack__()
    before = sys.getrefcount(shared)
    del capsule
    assert sys.getrefcount(shared) == before
    with pytest.raises(BufferError):
        shared.__dlpack__(copy=True)
    del shared
    gc.collect()
    assert by_dlpack[1, 2] == 5


def test_shared_arrays_work_without_numpy() -> None:
    run_python(
        """
import sys
sys.modules["numpy"] = None
import towline
array = towline.empty((2, 4), "uint32")
assert type(array) is towline.SharedArray
view = memoryview(array)
view[1, 3] = 9
with towline.Endpoint("a") as a, a.register(array) as region:
    assert region.kind == "shared"
    remote = a.import_(region.ticket())
    target = bytearray(32)
    a.read(remote, a.register(target, "none")).wait()
    assert target[28] == 9
"""
    )


@pytest.mark.skipif(
    int(numpy.__version__.partition(".")[0]) < 2, reason="StringDType is there from NumPy 2 on"
)
def test_strings_of_any_length_are_refused(endpoint: towline.Endpoint) -> None:
    # Each element is a length and a pointer to memory of NumPy's own.
    strings = numpy.array(["short", "x" * 1000, ""], dtype=numpy.dtypes.StringDType())
    for array in (strings, strings[::2], strings.reshape(3, 1)):
        with pytest.raises((towline.Invalid, TypeError)):
            endpoint.register(array, "read+write")
        with pytest.raises((towline.Invalid, TypeError, ValueError)):
            towline.connect.Descriptor(array)


def test_a_wait_for_a_signal_in_memory_that_goes_away_is_stale(tmp_path: Path) -> None:
    def cut(memory: Any) -> None:
        os.truncate(tmp_path / "mapped", 0)

    def resize(memory: Any) -> None:
        memory.resize((1 << 22,), refcheck=False)

    for take_away in (cut, resize):
        memory: Any = numpy.zeros(1 << 12, numpy.uint64)
        if take_away is cut:
            memory = numpy.memmap(tmp_path / "mapped", numpy.uint64, "w+", shape=(1 << 12,))
        with towline.Endpoint("owner") as owner:
            region = owner.register(memory, "read+write")
            timer = threading.Timer(0.3, take_away, [memory])
            timer.start()
            began = time.monotonic()
            with pytest.raises(towline.Stale):
                region.wait_signal(64, 1, timeout=30)
            assert 0.2 < time.monotonic() - began < 15
            timer.join()


# Of times NumPy exports no buffer.
@pytest.mark.parametrize("kind", ["uint64", "datetime64[s]"])
def test_an_array_that_was_resized_is_stale_to_its_owner_and_to_peers(kind: str) -> None:
    with towline.Endpoint("owner") as owner, towline.Endpoint("user") as user:
        array = numpy.arange(1 << 20, dtype=numpy.uint64).astype(kind)
        region = owner.register(array, "read+write")
        remote = user.import_(region.ticket(), require="unix")
        into = user.register(bytearray(64), "none")
        user.read(remote, into, at=(0, 0, 64)).wait()
        array.resize((1 << 22,), refcheck=False)
        with pytest.raises(towline.Stale, match="resized, moved or replaced"):
            region.ticket()
        with pytest.raises(towline.Stale):
            user.read(remote, into, at=(0, 0, 64)).wait()
        for unmovable in (bytearray(64), mmap.mmap(-1, 64)):
            kept = owner.register(unmovable)
            with pytest.raises(BufferError):
                unmovable.resize(8192) if isinstance(unmovable, mmap.mmap) else unmovable.extend(b"more")
            kept.close()
