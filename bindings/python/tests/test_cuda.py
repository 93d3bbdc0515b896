"""Tensors and arrays on GPUs, between two processes. Runs where torch has a GPU, and is skipped elsewhere.

``TOWLINE_REQUIRE=cuda`` makes it a failure that there is none.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import towline
from towline import nixl_connect

REQUIRED = "cuda" in os.environ.get("TOWLINE_REQUIRE", "").split(",")


def missing(reason: str) -> None:
    if REQUIRED:
        raise RuntimeError(f"TOWLINE_REQUIRE=cuda, and {reason}")
    pytest.skip(reason, allow_module_level=True)


torch: Any = None
try:
    import torch  # type: ignore[no-redef, import-not-found, unused-ignore]
except ImportError:
    missing("torch is not installed here")
if not torch.cuda.is_available():
    missing("torch has no GPU here")

NBYTES = 1 << 20
LARGE = 64 << 20


class Peer:
    """A process that has a tensor on the GPU."""

    def __init__(self, **variables: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("cuda_peer.py")), str(NBYTES)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer, "the peer has died"
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def endpoint() -> Iterator[towline.Endpoint]:
    with towline.Endpoint("user") as endpoint:
        yield endpoint


def expected() -> Any:
    return (torch.arange(NBYTES, device="cuda") % 251).to(torch.uint8)


def zeros() -> Any:
    """A tensor whose zeros are there: what is read into it without a stream is in no order with torch's kernels."""
    tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return tensor


class OnlyDlpack:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(stream=options.get("stream", None))

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def test_a_tensor_of_another_process_is_read_and_written(peer: Peer, endpoint: towline.Endpoint) -> None:
    remote = endpoint.import_(peer.ask("ticket"))
    assert remote.path == "cuda"
    target = zeros()
    region = endpoint.register(target, "none")
    endpoint.read(remote, region).wait()
    assert torch.equal(target, expected())
    endpoint.write(remote, region).wait()
    assert int(peer.ask("sum")) == int(expected().to(torch.int64).sum().item())
    for other in (torch.zeros(NBYTES, dtype=torch.uint8), torch.zeros(NBYTES, dtype=torch.uint8).pin_memory()):
        endpoint.read(remote, endpoint.register(other, "none")).wait()
        assert torch.equal(other, expected().cpu())


def test_arrays_of_cupy_and_of_dlpack_are_targets(peer: Peer, endpoint: towline.Endpoint) -> None:
    remote = endpoint.import_(peer.ask("ticket"))
    target = zeros()
    endpoint.read(remote, endpoint.register(OnlyDlpack(target), "none")).wait()
    assert torch.equal(target, expected())
    cupy = pytest.importorskip("cupy")
    array = cupy.zeros(NBYTES, dtype=cupy.uint8)
    endpoint.read(remote, endpoint.register(array, "none")).wait()
    assert bool((array == cupy.asarray(expected())).all())


def test_a_stream_orders_the_copy(peer: Peer, endpoint: towline.Endpoint) -> None:
    remote = endpoint.import_(peer.ask("ticket"))
    target = zeros()
    region = endpoint.register(target, "none")
    stream = torch.cuda.Stream()
    for form in (stream, stream.cuda_stream):
        with torch.cuda.stream(stream):
            target.fill_(7)
            transfer = endpoint.read(remote, region, stream=form)
            # Launched before anybody has waited for the bytes.
            summed = target.to(torch.int64).sum()
        stream.synchronize()
        assert int(summed.item()) == int(expected().to(torch.int64).sum().item())
        transfer.wait()
    with pytest.raises(TypeError):
        endpoint.read(remote, region, stream="fast")
    host = endpoint.register(torch.zeros(8, dtype=torch.uint8), "none")
    with pytest.raises(towline.Unsupported):
        endpoint.read(remote, host, stream=stream).wait()


def test_an_expandable_segment_is_read_or_the_reason_is_given(endpoint: towline.Endpoint) -> None:
    peer = Peer(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    try:
        remote = endpoint.import_(peer.ask("ticket"))
        reasons = {one.path: one.reason for one in remote.explain().paths}
        print("expandable segments:", remote.path, reasons["cuda"])
        assert remote.path == "cuda" or reasons["cuda"]
        target = zeros()
        endpoint.read(remote, endpoint.register(target, "none")).wait()
        assert torch.equal(target, expected())
    finally:
        peer.close()


def test_operations_take_tensors(peer: Peer) -> None:
    with towline.Connector("user") as connector:
        metadata = towline.RdmaMetadata.from_json(peer.ask("readable"))
        assert str(metadata.descriptors[0].device) == "cuda:0"
        target = zeros()
        descriptor = towline.Descriptor(target)
        assert str(descriptor.device) == "cuda:0"
        connector.begin_read_sync(metadata, descriptor).wait()
        peer.ask("wait")
        assert torch.equal(target, expected())


def total(tensor: Any) -> int:
    return int(tensor.to(torch.int64).sum().item())


def busy(tensor: Any, last: int, rounds: int = 300) -> None:
    """Queues much work, of which only the last bit leaves what must be seen."""
    for _ in range(rounds):
        tensor.fill_(1)
    tensor.fill_(last)


@pytest.fixture
def cupy() -> Any:
    module = pytest.importorskip("cupy", reason="CuPy is not installed here")
    # Compiled now, so that later it is work of the GPU alone.
    module.zeros(8, dtype=module.uint8).fill(1)
    return module


def test_a_readable_waits_for_the_work_in_its_stream(peer: Peer) -> None:
    stream = torch.cuda.Stream()
    tensor = torch.zeros(LARGE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with towline.Connector("owner") as connector:
        for form in (stream, stream.cuda_stream):
            with torch.cuda.stream(stream):
                busy(tensor, 5)
            readable = connector.create_readable_sync(towline.Descriptor(tensor), stream=form)
            asked = time.perf_counter()
            assert int(peer.ask("read-sum " + readable.metadata().to_json())) == 5 * LARGE
            print(f"read behind a stream after {(time.perf_counter() - asked) * 1e3:.1f} ms")
            readable.wait(30)
        # The stream that is current is the default one, whose handle is 0.
        busy(tensor, 6)
        readable = connector.create_readable_sync(
            towline.Descriptor(tensor), stream=torch.cuda.current_stream()
        )
        assert int(peer.ask("read-sum " + readable.metadata().to_json())) == 6 * LARGE
        readable.wait(30)
        with pytest.raises(TypeError):
            connector.create_readable_sync(towline.Descriptor(tensor), stream="fast")


def test_a_read_takes_its_place_in_a_stream(peer: Peer) -> None:
    stream = torch.cuda.Stream()
    target = zeros()
    torch.cuda.synchronize()
    with towline.Connector("user") as connector:
        for _ in range(3):
            metadata = towline.RdmaMetadata.from_json(peer.ask("readable"))
            with torch.cuda.stream(stream):
                busy(target, 7)
                read = connector.begin_read_sync(metadata, towline.Descriptor(target), stream=stream)
                # Launched before anybody has waited for the bytes.
                summed = target.to(torch.int64).sum()
                target.fill_(9)
            stream.synchronize()
            assert int(summed.item()) == total(expected())
            assert total(target) == 9 * NBYTES
            read.wait(30)
            peer.ask("wait")


def test_a_write_takes_the_bytes_of_its_moment(peer: Peer) -> None:
    stream = torch.cuda.Stream()
    source = zeros()
    torch.cuda.synchronize()
    with towline.Connector("user") as connector:
        metadata = towline.RdmaMetadata.from_json(peer.ask("writable"))
        with torch.cuda.stream(stream):
            busy(source, 3)
            write = connector.begin_write_sync(towline.Descriptor(source), metadata, stream=stream)
            source.fill_(4)
        peer.ask("wait")
        assert int(peer.ask("written")) == 3 * NBYTES
        write.wait(30)
        stream.synchronize()


def test_arrays_that_tell_their_stream_are_waited_for(peer: Peer, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros(LARGE, dtype=cupy.uint8)
    cupy.cuda.Device().synchronize()
    with towline.Connector("owner") as connector:
        for value, kind in enumerate((lambda one: one, lambda one: (one, "cuda:0"), OnlyDlpack), start=11):
            with stream:
                for _ in range(300):
                    array.fill(1)
                array.fill(value)
                # CuPy says which stream is current.
                readable = connector.create_readable_sync(towline.Descriptor(kind(array)))
            assert int(peer.ask("read-sum " + readable.metadata().to_json())) == value * LARGE
            readable.wait(30)
        with stream:
            for _ in range(300):
                array.fill(1)
            array.fill(21)
        readable = connector.create_readable_sync(towline.Descriptor(array), stream=stream)
        assert int(peer.ask("read-sum " + readable.metadata().to_json())) == 21 * LARGE
        readable.wait(30)


def test_a_stream_that_names_none_is_refused() -> None:
    tensor = torch.zeros(64, dtype=torch.uint8, device="cuda")

    class Tells:
        def __init__(self, stream: object) -> None:
            given = {**tensor.__cuda_array_interface__, "version": 3, "stream": stream}
            self.__cuda_array_interface__ = given

    for stream in (1, 2, torch.cuda.Stream().cuda_stream, None):
        assert towline.Descriptor(Tells(stream)).size == 64
    for stream in (0, -1, "1", True):
        with pytest.raises(towline.Invalid, match="stream"):
            towline.Descriptor(Tells(stream))


@pytest.mark.parametrize("sync", [True, False])
def test_operations_move_tensors_and_arrays_of_every_library(peer: Peer, cupy: Any, sync: bool) -> None:
    def targets() -> Iterator[tuple[Any, Any]]:
        tensor = zeros()
        yield tensor, tensor
        array = cupy.zeros(NBYTES, dtype=cupy.uint8)
        yield array, torch.as_tensor(array, device="cuda")
        other = zeros()
        yield OnlyDlpack(other), other
        host = torch.zeros(NBYTES, dtype=torch.uint8)
        yield host, host

    async def read(connector: towline.Connector, data: Any) -> None:
        metadata = towline.RdmaMetadata.from_json(peer.ask("readable"))
        async with await connector.begin_read(metadata, towline.Descriptor(data)) as operation:
            await operation
        # What is written comes back.
        metadata = towline.RdmaMetadata.from_json(peer.ask("writable"))
        async with await connector.begin_write(towline.Descriptor(data), metadata) as writing:
            await writing

    with towline.Connector("user") as connector:
        for data, seen in targets():
            torch.cuda.synchronize()
            if sync:
                metadata = towline.RdmaMetadata.from_json(peer.ask("readable"))
                with connector.begin_read_sync(metadata, towline.Descriptor(data)) as operation:
                    operation.wait(30)
                metadata = towline.RdmaMetadata.from_json(peer.ask("writable"))
                with connector.begin_write_sync(towline.Descriptor(data), metadata) as writing:
                    writing.wait(30)
            else:
                asyncio.run(read(connector, data))
            assert torch.equal(seen.cpu(), expected().cpu())
            peer.ask("wait")
            assert int(peer.ask("written")) == total(expected())


def test_the_drop_in_moves_cuda_tensors(peer: Peer, cupy: Any) -> None:
    async def run() -> None:
        connector = nixl_connect.Connector("user")
        assert connector.is_cuda_available
        tensor = zeros()
        array = cupy.zeros(NBYTES, dtype=cupy.uint8)
        for data, seen in ((tensor, tensor), ((array, "cuda:0"), torch.as_tensor(array, device="cuda"))):
            metadata = nixl_connect.RdmaMetadata.model_validate_json(peer.ask("drop-in readable"))
            assert metadata.descriptors[0].device.startswith("cuda")
            descriptor = nixl_connect.Descriptor(data)
            assert str(descriptor.device) == "cuda:0"
            read = await connector.begin_read(metadata, descriptor)
            await read.wait_for_completion()
            assert torch.equal(seen, expected())
            metadata = nixl_connect.RdmaMetadata.model_validate_json(peer.ask("drop-in writable"))
            write = await connector.begin_write(descriptor, metadata)
            await write.wait_for_completion()
            peer.ask("wait")
            assert int(peer.ask("written")) == total(expected())
        connector.close()

    asyncio.run(run())


def test_views_with_gaps_are_read_packed(peer: Peer) -> None:
    matrix = torch.randint(0, 255, (300, 257), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with towline.Connector("owner") as connector:
        for view in (matrix[3:200, 5:77], matrix.t(), matrix[::2]):
            readable = connector.create_readable_sync(towline.Descriptor(view))
            assert int(peer.ask("read-sum " + readable.metadata().to_json())) == total(view)
            readable.wait(30)


def test_a_tensor_of_random_bytes_arrives_at_every_alignment(peer: Peer, endpoint: towline.Endpoint) -> None:
    remote = endpoint.import_(peer.ask("ticket"))
    target = zeros()
    region = endpoint.register(target, "none")
    numbers = random.Random(7)
    whole = expected()
    for _ in range(200):
        length = min(int(2 ** numbers.uniform(0, 20)), NBYTES)
        far, near = (numbers.randrange(NBYTES - length + 1) for _ in range(2))
        target.fill_(0xEE)
        torch.cuda.synchronize()
        endpoint.read(remote, region, at=(far, near, length)).wait()
        assert torch.equal(target[near : near + length], whole[far : far + length])
        assert bool((target[:near] == 0xEE).all()) and bool((target[near + length :] == 0xEE).all())


def test_a_peer_that_is_killed_ends_operations_and_the_context_stays(endpoint: towline.Endpoint) -> None:
    peer = Peer()
    with towline.Connector("user") as connector:
        metadata = towline.RdmaMetadata.from_json(peer.ask("readable"))
        remote = endpoint.import_(peer.ask("ticket"))
        target = zeros()
        region = endpoint.register(target, "none")
        endpoint.read(remote, region).wait()
        peer.process.kill()
        peer.process.wait(30)
        with pytest.raises((towline.Disconnected, towline.Stale, towline.Timeout, towline.Unavailable)):
            connector.begin_read_sync(metadata, towline.Descriptor(target)).wait(30)
        with pytest.raises((towline.Disconnected, towline.Stale, towline.Timeout)):
            for _ in range(1000):
                endpoint.read(remote, region).wait()
                time.sleep(0.01)
    target.fill_(2)
    assert total(target) == 2 * NBYTES
    peer.close()


def test_memory_that_is_no_gpus_is_refused(endpoint: towline.Endpoint, cupy: Any) -> None:
    class Freed:
        __cuda_array_interface__ = {"data": (0x1000, False), "typestr": "|u1", "shape": (64,), "version": 3}

    with pytest.raises(towline.Invalid, match="freed"):
        endpoint.register(Freed(), "read")
    for data in (Freed(), (0x1000, 64, "cuda:0", None)):
        with pytest.raises(towline.Invalid, match="freed"):
            towline.Descriptor(data)
        if not isinstance(data, Freed):
            with pytest.raises(ValueError, match="freed"):
                nixl_connect.Descriptor(data)
    # Memory that was given back: the allocation is not the pool's any more, but nobody's.
    with cupy.cuda.using_allocator(None):
        array = cupy.zeros(4 << 20, dtype=cupy.uint8)
    address = int(array.data.ptr)
    assert towline.Descriptor((address, 4 << 20, "cuda:0", array)).size == 4 << 20
    del array
    gc.collect()
    with pytest.raises(towline.Invalid, match="freed"):
        towline.Descriptor((address, 4 << 20, "cuda:0", None))


def test_the_wrong_device_is_refused(cupy: Any) -> None:
    tensor = torch.zeros(64, dtype=torch.uint8, device="cuda")
    other = torch.cuda.device_count()
    for device in (f"cuda:{other}", f"cuda:{other + 7}"):
        with pytest.raises(towline.Error) as raised:
            towline.Descriptor((tensor.data_ptr(), 64, device, tensor))
        print("the wrong device:", raised.value)
    with pytest.raises(towline.Invalid):
        towline.Descriptor((cupy.zeros(8, dtype=cupy.uint8), "cpu"))
    with pytest.raises(towline.Invalid):
        # More than there is behind the address.
        towline.Descriptor((tensor.data_ptr(), 1 << 40, "cuda:0", tensor))


def test_what_python_adds_is_shown(peer: Peer, endpoint: towline.Endpoint) -> None:
    """Asserts no speed: the figures are for the report."""
    remote = endpoint.import_(peer.ask("ticket"))
    target = zeros()
    start = time.perf_counter()
    region = endpoint.register(target, "none")
    first = (time.perf_counter() - start) * 1e6

    def median(work: Any) -> float:
        times = []
        for _ in range(500):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    read = median(lambda: endpoint.read(remote, region, at=(0, 0, 4096)).wait())
    views = [target[at : at + 4096] for at in range(0, NBYTES, 4096)]
    register = median(lambda: endpoint.register(views[7], "read"))
    descriptor = median(lambda: towline.Descriptor(views[7]))
    print(f"4 KiB read from Python: {read:.1f} us")
    print(f"registration of a tensor: {first:.1f} us the first time; of views of it: {register:.1f} us")
    print(f"a descriptor of a view: {descriptor:.1f} us")
    with towline.Connector(endpoint=endpoint) as connector:
        one = towline.Descriptor(target)
        one.register_memory(connector)
        begin: list[float] = []
        for _ in range(100):
            metadata = towline.RdmaMetadata.from_json(peer.ask("readable"))
            start = time.perf_counter()
            connector.begin_read_sync(metadata, one).wait()
            begin.append(time.perf_counter() - start)
        print(f"1 MiB read by an operation, claim included: {statistics.median(begin) * 1e6:.1f} us")
