"""Memory with gaps: a source that arrives packed, and never a target."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy
import pytest
from conftest import MakeWorker
from numpy.lib.stride_tricks import as_strided
from test_buffers import Interface, Tensor
from test_connect import PATHS, Cuda, TorchTensor, moved, over, skip_if_unavailable

import towline
from towline import Connector, Descriptor, Layout, OperationStatus
from towline import nixl_connect as nc

GRID = numpy.arange(2 * 6 * 8, dtype=numpy.float32).reshape(2, 6, 8)

VIEWS = {
    "rows": GRID[:, ::2],
    "columns": GRID[:, :, 2:5],
    "elements": GRID[:, :, ::3],
    "a part": GRID[1:, 2:4, 1:2],
    "transposed": GRID.transpose(2, 0, 1),
    "a matrix transposed": GRID[0].T,
    "Fortran's order": numpy.asfortranarray(GRID),
    "single bytes": numpy.arange(100, dtype=numpy.uint8)[::7],
    "four dimensions": numpy.arange(5 * 6 * 7 * 8, dtype=numpy.int16).reshape(5, 6, 7, 8)[::2, ::3, ::2, ::3],
    "of bytes": memoryview(bytes(range(60)))[3:50:4],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_source_with_gaps_arrives_packed_in_the_order_of_its_elements(name: str) -> None:
    view = VIEWS[name]
    expected = view.tobytes()
    forms = [view, Descriptor(view)._data]
    if isinstance(view, numpy.ndarray):
        forms += [(view, "cpu"), Interface(view), Tensor(view), Tensor(view, old=True), TorchTensor(view)]
    for data in forms:
        descriptor = Descriptor(data)
        assert descriptor.size == descriptor.capacity == len(expected)
        assert descriptor.readonly and str(descriptor.device) == "cpu"
        assert isinstance(descriptor.layout, Layout) and len(descriptor.layout) > 1
        if isinstance(view, numpy.ndarray):
            assert descriptor.ptr == view.ctypes.data
        assert moved(data) == expected, type(data)


def test_memory_without_gaps_has_no_layout() -> None:
    some: list[Any] = [GRID, GRID[1:], GRID[1, 2:4], GRID[:1, :, None, :], numpy.float32(1), b"bytes"]
    for data in some:
        descriptor = Descriptor(data)
        assert descriptor.layout is None
        assert moved(data) == memoryview(data).tobytes()


def test_a_view_of_shared_memory_is_mapped() -> None:
    shared = towline.empty((64, 64), "float32")
    shared[:] = numpy.arange(64 * 64).reshape(64, 64)
    view = shared[8:24, 4:12]
    with over("mapped", "source") as source, over("mapped", "target") as target:
        readable = source.create_readable_sync(Descriptor(view))
        got = numpy.zeros((16, 8), numpy.float32)
        read = target.begin_read_sync(readable.metadata(), Descriptor(got))
        read.wait()
        assert read.path == "mapped" and (got == view).all()


@pytest.mark.parametrize("path", PATHS)
def test_another_process_reads_and_is_sent_a_view(path: str, worker: MakeWorker) -> None:
    peer = worker(path, "shared" if path == "mapped" else "plain")
    whole = towline.empty((200, 150), "float64") if path == "mapped" else numpy.zeros((200, 150))
    whole[:] = numpy.arange(200 * 150).reshape(200, 150)
    for view in (whole[::3, 10:90], whole.T, whole[1::2, ::2]):
        with over(path) as connector:
            expected = numpy.ascontiguousarray(view).tobytes()
            readable = connector.create_readable_sync(Descriptor(view))
            answer = peer.tell(f"read {readable.metadata().to_json()}")
            if "Unavailable" in answer:
                pytest.skip(f"{path} cannot be used here: {answer}")
            assert answer == "DONE"
            readable.wait(30)
            assert bytes.fromhex(peer.tell(f"bytes 0 {len(expected)}")) == expected

            writable = towline.RdmaMetadata.from_json(peer.tell(f"writable {len(expected)}"))
            try:
                connector.begin_write_sync(Descriptor(view), writable).wait()
            except towline.Error as error:
                skip_if_unavailable(error, path)
            assert peer.tell("wait") == "DONE"
            assert bytes.fromhex(peer.tell(f"bytes 0 {len(expected)}")) == expected


def test_many_small_blocks_move_in_portions_without_blocking_the_loop() -> None:
    whole = numpy.arange(400_000, dtype=numpy.uint32)
    view = whole[::2]

    async def run() -> None:
        async with Connector("source") as source, Connector("target") as target:
            got = numpy.zeros(200_000, numpy.uint32)
            readable = await source.create_readable(Descriptor(view))
            await (await target.begin_read(readable.metadata(), Descriptor(got)))
            await readable
            assert (got == view).all()
            writable = await target.create_writable(Descriptor(got))
            await (await source.begin_write(Descriptor(whole[1::2]), writable.metadata()))
            await writable
            assert (got == whole[1::2]).all()

    asyncio.run(run())


def test_a_view_is_refused_as_a_target() -> None:
    target = numpy.zeros((4, 4), numpy.uint8)
    with Connector() as connector:
        readable = connector.create_readable_sync(Descriptor(bytes(8)))
        for data in (target[:, ::2], (target[:, ::2], "cpu"), Tensor(target[:, ::2]), TorchTensor(target[:, ::2])):
            for attempt in (
                lambda local: connector.create_writable_sync(local),
                lambda local: connector.begin_read_sync(readable.metadata(), local),
            ):
                with pytest.raises(ValueError, match="local: descriptor 0 has gaps .*not contiguous"):
                    attempt(Descriptor(data))
        assert readable.status is OperationStatus.INITIALIZED
        assert not target.any()


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (GRID[0, 0, ::-1], "negative"),
        (GRID[::-1], "negative"),
        (numpy.broadcast_to(GRID[0, 0], (5, 8)), "stride of axis 0 is 0"),
        (as_strided(GRID, (4, 8), (16, 4)), "overlap"),
        (as_strided(GRID, (3, 2), (8, 12)), "overlap or interleave"),
        (numpy.zeros((3,) * 5 + (4,), numpy.uint8)[::2, ::2, ::2, ::2, ::2, ::3], "dimensions"),
    ],
)
def test_what_no_layout_can_say_is_refused_with_the_reason(view: Any, why: str) -> None:
    forms = [view, (view, "cpu"), Interface(view)]
    if view.flags["W"]:
        # DLPack knows no memory that is read-only, in its older form.
        forms.append(Tensor(view))
    for data in forms:
        with pytest.raises(ValueError, match=f"data: .*not contiguous.*{why}"):
            Descriptor(data)


def test_damaged_strides_are_refused() -> None:
    class Damaged:
        def __init__(self, strides: Any) -> None:
            self.__array_interface__ = dict(GRID.__array_interface__) | {"strides": strides}

    for wrong in ((4,), (192, 32, 4, 1), (1 << 62, 1 << 62, 1 << 62), (0, 0, 0)):
        with pytest.raises(ValueError, match="data"):
            Descriptor(Damaged(wrong))
    for damaged in ("x", (1.5, 2, 3), (1 << 70, 4, 4)):
        with pytest.raises(ValueError, match="strides"):
            Descriptor(Damaged(damaged))


def test_a_view_on_a_device_is_described_by_its_packed_size() -> None:
    with Connector() as connector:
        for data in (Cuda(strides=(32, 4)), Cuda(strides=(4, 16)), TorchTensor(GRID[:, ::2], "cuda:1")):
            descriptor = Descriptor(data)
            assert descriptor.layout is not None and descriptor.size in (32, 192)
            with pytest.raises(towline.Unsupported, match="cuda"):
                descriptor.register_memory(connector)
    for strides in ((-8, 4), (0, 4), (4, 4), (8,), (1 << 70, 4), "ab"):
        with pytest.raises(ValueError, match="data"):
            Descriptor(Cuda(strides=strides))
    assert Descriptor(Cuda(strides=(8, 4))).layout is None


def test_a_prefix_of_a_view_is_a_prefix_of_its_packed_bytes() -> None:
    view = GRID[:, :, 2:5]
    expected = view.tobytes()
    with Connector() as connector:
        for size in (1, 12, 13, 100):
            source = Descriptor(view)
            source.size = size
            got = bytearray(size)
            readable = connector.create_readable_sync(source)
            connector.begin_read_sync(readable.metadata(), Descriptor(got)).wait()
            assert got == expected[:size]
        with pytest.raises(ValueError, match=f"1 to {len(expected)}"):
            source.size = len(expected) + 1


def test_a_view_is_paired_by_its_packed_size() -> None:
    view = GRID[:, :, 2:5]
    with Connector() as connector:
        readable = connector.create_readable_sync(Descriptor(view))
        for wrong in (view.nbytes - 1, view.nbytes + 1, GRID.nbytes):
            with pytest.raises(ValueError, match="local bytes"):
                connector.begin_read_sync(readable.metadata(), Descriptor(bytearray(wrong)))
        assert readable.status is OperationStatus.INITIALIZED


def test_the_owner_of_a_view_is_kept_while_it_is_needed() -> None:
    class Owner(numpy.ndarray[Any, Any]):
        pass

    whole = numpy.arange(100, dtype=numpy.uint8).view(Owner)
    gone = weakref.ref(whole)
    with Connector() as connector:
        readable = connector.create_readable_sync(Descriptor(whole[::3]))
        expected = whole[::3].tobytes()
        del whole
        gc.collect()
        got = bytearray(34)
        connector.begin_read_sync(readable.metadata(), Descriptor(got)).wait()
        readable.wait()
        assert got == expected
        del readable
    gc.collect()
    assert gone() is None


def test_the_drop_in_describes_a_view_without_a_copy() -> None:
    numbers = numpy.arange(64, dtype=numpy.uint8).reshape(8, 8)
    connector = nc.Connector()

    async def run(source: nc.Descriptor, size: int) -> bytes:
        got = bytearray(size)
        readable = await connector.create_readable(source)
        read = await connector.begin_read(readable.metadata(), nc.Descriptor(got))
        await read.wait_for_completion()
        await readable.wait_for_completion()
        writable = await connector.create_writable(nc.Descriptor(sent := bytearray(size)))
        write = await connector.begin_write(source, writable.metadata())
        await write.wait_for_completion()
        await writable.wait_for_completion()
        assert sent == got
        return bytes(got)

    for view in (numbers[:, 1:4], numbers.T, numbers[::2]):
        for data in (TorchTensor(view), (view, "cpu")):
            descriptor = nc.Descriptor(data)
            assert descriptor.ptr == view.ctypes.data and descriptor.size == view.nbytes
            assert asyncio.run(run(descriptor, view.nbytes)) == view.tobytes()
            # What was described is the memory itself, not what it was like then.
            numbers += 1
            assert asyncio.run(run(descriptor, view.nbytes)) == view.tobytes()
            with pytest.raises(ValueError, match="not contiguous"):
                asyncio.run(connector.create_writable(descriptor))
    connector.close()
