"""Operations: both pairings, what descriptors are made of, and what metadata looks like."""

from __future__ import annotations

import array
import asyncio
import doctest
import gc
import json
import pickle
import sys
import threading
import types
import weakref

from typing import Any

import numpy
import pytest
from conftest import MakeWorker, run_python
from test_buffers import Interface, Tensor

import towline
import towline._devices
import towline.connect
from towline import (
    Connector,
    Descriptor,
    Device,
    DeviceKind,
    OperationKind,
    OperationStatus,
    RdmaMetadata,
    _native,
)

PATHS = ["mapped", "cma", "unix", "tcp"]
SIZE = 100_000
PATTERN = (bytes(range(251)) * 400)[:SIZE]


def over(path: str, name: str = "test", **options: Any) -> Connector:
    """A connector whose endpoint takes only that path."""
    return Connector(endpoint=towline.Endpoint(name, require=path, **options))


def memory_for(path: str) -> str:
    return "shared" if path == "mapped" else "plain"


def target_of(size: int, path: str) -> Any:
    return towline.empty(size) if path == "mapped" else bytearray(size)


def skip_if_unavailable(error: towline.Error, path: str) -> None:
    if isinstance(error, towline.Unavailable):
        pytest.skip(f"{path} cannot be used here: {error.message.splitlines()[-1]}")
    raise error


@pytest.mark.parametrize("path", PATHS)
def test_a_read_from_another_process(path: str, worker: MakeWorker) -> None:
    peer = worker(path, memory_for(path))

    async def main() -> None:
        async with over(path) as connector:
            metadata = RdmaMetadata.from_json(peer.tell(f"readable {SIZE}"))
            target = bytearray(SIZE)
            try:
                read = await connector.begin_read(metadata, Descriptor(target))
            except towline.Error as error:
                skip_if_unavailable(error, path)
                raise
            async with read:
                await read.wait_for_completion()
                assert (read.path, read.peer, read.nbytes) == (path, "peer", SIZE)
                assert read.status is OperationStatus.COMPLETE and read.done() and read.quiet
                assert read.error is None and read.results() == read.descriptors
            assert target == PATTERN
            assert peer.tell("wait") == "DONE"

    asyncio.run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_write_to_another_process(path: str, worker: MakeWorker) -> None:
    peer = worker(path, memory_for(path))
    with over(path) as connector:
        metadata = RdmaMetadata.from_json(peer.tell(f"writable {SIZE}"))
        try:
            write = connector.begin_write_sync(Descriptor(PATTERN), metadata)
        except towline.Error as error:
            skip_if_unavailable(error, path)
            raise
        with write:
            write.wait(30)
            assert write.operation_kind is OperationKind.WRITE and write.path == path
        assert peer.tell("wait") == "DONE"
        assert bytes.fromhex(peer.tell(f"bytes 0 {SIZE}")) == PATTERN


@pytest.mark.parametrize("path", PATHS)
def test_another_process_reads_and_writes(path: str, worker: MakeWorker) -> None:
    peer = worker(path, "plain")

    async def main() -> None:
        async with over(path) as connector:
            source = target_of(SIZE, path)
            memoryview(source)[:] = PATTERN
            readable = await connector.create_readable(Descriptor(source))
            assert str(readable.status) == "INIT" and not readable.done()
            answer = peer.tell(f"read {readable.metadata().to_json()}")
            if "Unavailable" in answer:
                pytest.skip(f"{path} cannot be used here: {answer}")
            assert answer == "DONE"
            await readable
            assert readable.status is OperationStatus.COMPLETE
            assert bytes.fromhex(peer.tell(f"bytes 0 {SIZE}")) == PATTERN

            target = target_of(SIZE, path)
            async with await connector.create_writable(Descriptor(target)) as writable:
                peer.order(f"write {writable.metadata(hex_encode=True).to_json()}")
                await writable.wait_for_completion()
                assert bytes(memoryview(target)) == PATTERN
            assert peer.answer() == "DONE"
            assert connector.endpoint.stats().regions == 0

    asyncio.run(main())


def test_several_descriptors_make_one_operation() -> None:
    with Connector("one") as one, Connector("other") as other:
        sources = [Descriptor(bytes([number]) * (number + 1)) for number in range(20)]
        targets = [bytearray(number + 1) for number in range(20)]
        readable = one.create_readable_sync(sources)
        metadata = readable.metadata()
        assert [part.size for part in metadata.descriptors] == list(range(1, 21))
        read = other.begin_read_sync(metadata, tuple(map(Descriptor, targets)))
        read.wait()
        readable.wait()
        assert [bytes(target) for target in targets] == [
            bytes([number]) * (number + 1) for number in range(20)
        ]


def test_a_connector_can_be_on_both_ends() -> None:
    async def main() -> None:
        async with Connector() as connector:
            target = bytearray(5)
            readable = await connector.create_readable(Descriptor(b"bytes"))
            read = await connector.begin_read(readable.metadata(), Descriptor(target))
            await asyncio.gather(read, readable)
            assert target == b"bytes"

    asyncio.run(main())


def test_what_one_loop_makes_another_uses() -> None:
    connector = Connector("threads")
    target = bytearray(5)
    readable = asyncio.run(connector.create_readable(Descriptor(b"bytes")))
    failures: list[BaseException] = []

    async def await_it() -> None:
        await readable.wait_for_completion()

    def loop() -> None:
        try:
            asyncio.run(await_it())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop) for _ in range(3)]
    threads.append(threading.Thread(target=readable.wait))
    for thread in threads:
        thread.start()

    async def read() -> None:
        await (await connector.begin_read(readable.metadata(), Descriptor(target)))

    reader = threading.Thread(target=lambda: asyncio.run(read()))
    reader.start()
    for thread in [*threads, reader]:
        thread.join()
    assert not failures and target == b"bytes"
    connector.close()


def test_connectors_have_names_and_compare_by_them() -> None:
    one, same, other = Connector("a"), Connector("a"), Connector()
    assert one == same and hash(one) == hash(same) and one != other and one != "a"
    assert str(one) == one.name == "a" and len(other.name) == 32
    assert one.hostname == __import__("socket").gethostname()
    assert "'a'" in repr(one) or '"a"' in repr(one)
    assert one.endpoint.name == "a"
    for connector in (one, same, other):
        connector.close()
        connector.close()
        with pytest.raises(towline.Invalid, match="closed"):
            connector.create_readable_sync(Descriptor(b"x"))


def test_words_and_numbers_are_those_that_users_know() -> None:
    assert [(int(kind), str(kind), f"{kind}", kind.nixl_mem_type) for kind in DeviceKind] == [
        (0, "<invalid>", "<invalid>", "VRAM"),
        (1, "cpu", "cpu", "DRAM"),
        (2, "cuda", "cuda", "VRAM"),
        (3, "xpu", "xpu", "VRAM"),
    ]
    assert [(int(kind), str(kind), f"{kind:>6}") for kind in OperationKind] == [
        (0, "<invalid>", "<invalid>"),
        (1, "READ", "  READ"),
        (2, "WRITE", " WRITE"),
    ]
    assert [(int(status), f"{status}", status.is_final) for status in OperationStatus] == [
        (0, "<invalid>", False),
        (1, "INIT", False),
        (2, "PROC", False),
        (3, "DONE", True),
        (4, "STOP", True),
        (5, "ERR", True),
    ]


@pytest.mark.parametrize(
    ("text", "kind", "number", "shown"),
    [
        ("cuda", DeviceKind.CUDA, 0, "cuda:0"),
        (" CUDA:1 ", DeviceKind.CUDA, 1, "cuda:1"),
        ("gpu:2", DeviceKind.CUDA, 2, "cuda:2"),
        ("xpu:3", DeviceKind.XPU, 3, "xpu:3"),
        ("cpu:5", DeviceKind.HOST, 0, "cpu"),
        ("Host", DeviceKind.HOST, 0, "cpu"),
        ((DeviceKind.CUDA, 4), DeviceKind.CUDA, 4, "cuda:4"),
        ((DeviceKind.CUDA, True), DeviceKind.CUDA, 1, "cuda:1"),
        ((DeviceKind.HOST, 7), DeviceKind.HOST, 0, "cpu"),
    ],
)
def test_devices_are_named_in_the_ways_that_users_know(
    text: Any, kind: DeviceKind, number: int, shown: str
) -> None:
    device = Device(text)
    assert (device.kind, device.id, str(device)) == (kind, number, shown)
    assert device == Device((kind, number)) == pickle.loads(pickle.dumps(device))
    assert device != shown and len({device, Device(shown)}) == 1


def moved(data: Any) -> bytes:
    """What a peer reads from the memory of an object."""
    with Connector("source") as source, Connector("target") as target:
        descriptor = Descriptor(data)
        readable = source.create_readable_sync(descriptor)
        got = bytearray(descriptor.size)
        target.begin_read_sync(readable.metadata(), Descriptor(got)).wait()
        readable.wait()
        return bytes(got)


def test_descriptors_are_made_from_anything_with_memory() -> None:
    numbers = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    raw = numbers.tobytes()
    objects: list[Any] = [
        raw,
        bytearray(raw),
        memoryview(raw),
        array.array("f", numbers.ravel().tolist()),
        numbers,
        (numbers, "cpu"),
        (numbers, Device("host")),
        Interface(numbers),
        Tensor(numbers),
        Tensor(numbers, old=True),
        (numbers.ctypes.data, numbers.nbytes),
        (numbers.ctypes.data, numbers.nbytes, "cpu"),
        (numbers.ctypes.data, numbers.nbytes, Device("cpu"), numbers),
    ]
    for data in objects:
        descriptor = Descriptor(data)
        assert (descriptor.size, descriptor.capacity, str(descriptor.device)) == (48, 48, "cpu")
        assert descriptor.readonly == (isinstance(data, bytes) or data is objects[2])
        assert repr(descriptor) == f"Descriptor(ptr={descriptor.ptr:#x}, size=48, device=cpu)"
        assert moved(data) == raw, type(data)


class FakeTensor:
    """As much of a torch.Tensor as descriptors use."""

    def __init__(self, source: Any, device: str = "cpu") -> None:
        kind, _, index = device.partition(":")
        self.source = source
        self.device = types.SimpleNamespace(type=kind, index=int(index) if index else None)
        self.is_cuda = kind == "cuda"
        self.shape = source.shape

    def data_ptr(self) -> int:
        return int(self.source.ctypes.data)

    def numel(self) -> int:
        return int(self.source.size)

    def element_size(self) -> int:
        return int(self.source.itemsize)

    def is_contiguous(self) -> bool:
        return bool(self.source.flags.c_contiguous)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.source.itemsize for step in self.source.strides)

    def contiguous(self) -> Any:
        return type(self)(numpy.ascontiguousarray(self.source))

    def is_conj(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return False


TorchTensor = type("Tensor", (FakeTensor,), {"__module__": "torch"})
TorchParameter = type("Parameter", (TorchTensor,), {"__module__": "torch.nn.parameter"})


def test_a_tensor_of_torch_is_known_by_its_class_alone() -> None:
    assert "torch" not in sys.modules
    numbers = numpy.arange(6, dtype=numpy.float64)
    for kind in (TorchTensor, TorchParameter):
        assert moved(kind(numbers)) == numbers.tobytes()
    for device, shown in (("cuda:1", "cuda:1"), ("cuda", "cuda:0"), ("xpu:2", "xpu:2")):
        descriptor = Descriptor(TorchTensor(numbers, device))
        assert str(descriptor.device) == shown and descriptor.size == 48
        with pytest.raises(towline.Unsupported, match="cuda|xpu"):
            descriptor.register_memory(Connector())
    with pytest.raises(ValueError, match="data: .*not contiguous"):
        Descriptor(TorchTensor(numpy.broadcast_to(numbers, (2, 6))))
    for device in ("meta", "mps", "hpu:0"):
        with pytest.raises(ValueError, match="data: .*torch device"):
            Descriptor(TorchTensor(numbers, device))


class Cuda:
    """An array on a GPU, as far as it says so."""

    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 2),
            "typestr": "<f4",
            "data": (0x7000_0000_0000, False),
            "version": 3,
            "strides": None,
        } | changes


def test_memory_that_is_not_the_hosts_is_described_and_not_registered() -> None:
    class OnGpu(Tensor):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 1)

        def __dlpack__(self, **options: Any) -> Any:
            # The stream of a GPU, of which NumPy knows nothing.
            assert options.pop("stream") == -1
            return super().__dlpack__(**options)

    with Connector() as connector:
        for data, device, size in (
            (Cuda(), "cuda:0", 32),
            ((Cuda(strides=(8, 4)), "cuda:1"), "cuda:1", 32),
            ((0x1000, 64, "xpu:1"), "xpu:1", 64),
            ((0x1000, 64, Device("gpu:1"), None), "cuda:1", 64),
            (OnGpu(numpy.zeros(5, numpy.uint8)), "cuda:1", 5),
        ):
            descriptor = Descriptor(data)
            assert (str(descriptor.device), descriptor.size) == (device, size)
            with pytest.raises(towline.Unsupported, match=device):
                descriptor.register_memory(connector)
            with pytest.raises(towline.Unsupported, match=device):
                connector.create_readable_sync(descriptor)
            assert not descriptor.is_registered
        mixed = [Descriptor(b"host"), Descriptor((0x1000, 4, "cuda:0"))]
        with pytest.raises(ValueError, match="local: .*cpu and on cuda:0"):
            connector.create_readable_sync(mixed)


def test_arrays_of_empty_are_mapped_by_peers(worker: MakeWorker) -> None:
    with Connector() as connector:
        array_ = towline.empty((4, 1000), "uint8")
        array_[1] = 7
        for data in (array_[1], (array_[1], "cpu"), (array_.ctypes.data + 1000, 1000)):
            readable = connector.create_readable_sync(Descriptor(data))
            peer = worker("mapped")
            assert peer.tell(f"read {readable.metadata().to_json()}") == "DONE"
            assert bytes.fromhex(peer.tell("bytes 0 1000")) == bytes([7]) * 1000


def test_the_owner_lives_while_a_descriptor_or_an_operation_needs_it() -> None:
    class Owner:
        pass

    with Connector("owner") as connector:
        buffer = numpy.arange(100, dtype=numpy.uint8)
        owner = Owner()
        gone = weakref.ref(owner)
        readable = connector.create_readable_sync(
            Descriptor((buffer.ctypes.data, 100, "cpu", owner))
        )
        del owner
        gc.collect()
        assert gone() is not None
        got = bytearray(100)
        connector.begin_read_sync(readable.metadata(), Descriptor(got)).wait()
        assert got == buffer.tobytes()
        readable.wait()
        del readable
        gc.collect()
        assert gone() is None and _native.held() == 0


def test_a_bytearray_cannot_be_resized_while_it_is_described() -> None:
    data = bytearray(100)
    with Connector() as connector:
        descriptor = Descriptor(data)
        readable = connector.create_readable_sync(descriptor)
        with pytest.raises(BufferError):
            data.extend(b"more")
        del descriptor
        gc.collect()
        with pytest.raises(BufferError):
            data.clear()
        readable.cancel()
        del readable
        gc.collect()
        _native.held()
        data.extend(b"more")


def registered(descriptor: Descriptor) -> bool:
    return descriptor.is_registered


def test_registrations_are_counted() -> None:
    with Connector() as connector, Connector() as other:
        descriptor = Descriptor(bytearray(10))
        first = connector.create_readable_sync(descriptor)
        second = connector.create_readable_sync(descriptor)
        assert registered(descriptor)
        first.cancel()
        assert registered(descriptor)
        with pytest.raises(ValueError, match="another connector"):
            other.create_readable_sync(descriptor)
        second.cancel()
        assert not registered(descriptor)
        descriptor.register_memory(connector)
        descriptor.register_memory(connector)
        with pytest.raises(ValueError, match="another connector"):
            descriptor.register_memory(other)
        with connector.create_readable_sync(descriptor):
            pass
        assert registered(descriptor) and connector.endpoint.stats().regions == 1
        descriptor.deregister_memory(connector)
        descriptor.deregister_memory(connector)
        assert not registered(descriptor)
        descriptor.register_memory(other)
    assert not registered(descriptor)


def test_a_prefix_of_a_larger_buffer_is_offered() -> None:
    with Connector() as connector:
        pool = Descriptor(bytearray(b"x" * 1000))
        readable = connector.create_readable_sync(pool)
        pool.size = 10
        metadata = readable.metadata()
        assert metadata.descriptors[0].size == 10
        target = bytearray(50)
        there = Descriptor(target)
        there.size = 10
        connector.begin_read_sync(metadata, there).wait()
        readable.wait()
        assert target == b"x" * 10 + bytes(40)
        pool.size = pool.capacity
        for size in (0, -1, 1001):
            with pytest.raises(ValueError, match="size"):
                pool.size = size
        with pytest.raises(TypeError, match="size"):
            pool.size = "5"  # type: ignore[assignment]


def test_metadata_has_plain_forms() -> None:
    with Connector() as connector:
        readable = connector.create_readable_sync([Descriptor(b"one"), Descriptor(b"other")])
        metadata = readable.metadata()
        text = metadata.to_json()
        assert json.loads(text) == metadata.to_dict()
        assert list(metadata.to_dict()) == [
            "descriptors",
            "nixl_metadata",
            "notification_key",
            "operation_kind",
        ]
        for copy in (
            RdmaMetadata.from_json(text),
            RdmaMetadata.from_json(text.encode()),
            RdmaMetadata.from_dict(json.loads(text)),
            pickle.loads(pickle.dumps(metadata)),
        ):
            assert copy == metadata and hash(copy) == hash(metadata)
        assert metadata.nixl_metadata.startswith("b64:")
        assert metadata.nixl_metadata not in repr(metadata)
        assert metadata.operation_kind is OperationKind.READ
        assert all(part.ptr != 0 and part.device == "cpu" for part in metadata.descriptors)
        hexed = readable.metadata(hex_encode=True)
        assert bytes.fromhex(hexed.nixl_metadata)[:4] == b"TOWC"
        readable.cancel()
        with pytest.raises(towline.Stale):
            readable.metadata()


def test_the_examples_in_the_modules_run() -> None:
    for module in (towline.connect, towline._devices):
        failed, attempted = doctest.testmod(module)
        assert attempted and not failed


def test_nothing_else_needs_to_be_installed() -> None:
    run_python(
        """
import sys
for name in ("numpy", "torch", "cupy", "pydantic", "nixl"):
    sys.modules[name] = None
import asyncio, towline, towline.nixl_connect as drop_in

async def main():
    async with towline.Connector() as connector:
        target = bytearray(4)
        readable = await connector.create_readable(towline.Descriptor(b"data"))
        await (await connector.begin_read(readable.metadata(), towline.Descriptor(target)))
        assert target == b"data"
    connector = drop_in.Connector()
    target = bytearray(4)
    with await connector.create_readable(drop_in.Descriptor(b"data")) as readable:
        metadata = drop_in.RdmaMetadata.model_validate_json(readable.metadata().model_dump_json())
        with await connector.begin_read(metadata, drop_in.Descriptor(target)) as read:
            await read.wait_for_completion()
        await readable.wait_for_completion()
    assert target == b"data"
    assert not connector.is_cuda_available

asyncio.run(main())
"""
    )


