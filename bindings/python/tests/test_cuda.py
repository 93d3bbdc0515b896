"""Tensors and arrays on GPUs, between two processes. Runs where torch has a GPU, and is skipped elsewhere."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import towline

torch: Any = pytest.importorskip("torch", reason="torch is not installed here")
if not torch.cuda.is_available():
    pytest.skip("torch has no GPU here", allow_module_level=True)

NBYTES = 1 << 20


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


class OnlyDlpack:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(stream=options.get("stream"))

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def test_a_tensor_of_another_process_is_read_and_written(peer: Peer, endpoint: towline.Endpoint) -> None:
    remote = endpoint.import_(peer.ask("ticket"))
    assert remote.path == "cuda"
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
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
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    endpoint.read(remote, endpoint.register(OnlyDlpack(target), "none")).wait()
    assert torch.equal(target, expected())
    cupy = pytest.importorskip("cupy")
    array = cupy.zeros(NBYTES, dtype=cupy.uint8)
    endpoint.read(remote, endpoint.register(array, "none")).wait()
    assert bool((array == cupy.asarray(expected())).all())


def test_a_stream_orders_the_copy(peer: Peer, endpoint: towline.Endpoint) -> None:
    remote = endpoint.import_(peer.ask("ticket"))
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
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
        reasons = {one.path: one.reason for one in remote.explain().candidates}
        print("expandable segments:", remote.path, reasons["cuda"])
        assert remote.path == "cuda" or reasons["cuda"]
        target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        endpoint.read(remote, endpoint.register(target, "none")).wait()
        assert torch.equal(target, expected())
    finally:
        peer.close()


def test_operations_take_tensors(peer: Peer) -> None:
    with towline.Connector("user") as connector:
        metadata = towline.RdmaMetadata.from_json(peer.ask("readable"))
        assert str(metadata.descriptors[0].device) == "cuda:0"
        target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        descriptor = towline.Descriptor(target)
        assert str(descriptor.device) == "cuda:0"
        connector.begin_read_sync(metadata, descriptor).wait()
        peer.ask("wait")
        assert torch.equal(target, expected())


def test_memory_that_is_no_gpus_is_refused(endpoint: towline.Endpoint) -> None:
    class Freed:
        __cuda_array_interface__ = {"data": (0x1000, False), "typestr": "|u1", "shape": (64,), "version": 3}

    with pytest.raises(towline.Invalid, match="freed"):
        endpoint.register(Freed(), "read")
    with pytest.raises(towline.Invalid):
        towline.Descriptor((0x1000, 64, "cuda:0", None))


def test_what_python_adds_is_shown(peer: Peer, endpoint: towline.Endpoint) -> None:
    """Asserts no speed: the figures are for the report."""
    remote = endpoint.import_(peer.ask("ticket"))
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    region = endpoint.register(target, "none")

    def median(work: Any) -> float:
        times = []
        for _ in range(300):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    read = median(lambda: endpoint.read(remote, region, at=(0, 0, 4096)).wait())
    views = [target[at : at + 4096] for at in range(0, NBYTES, 4096)]
    register = median(lambda: endpoint.register(views[7], "read"))
    print(f"4 KiB read from Python: {read:.1f} us; registration of a view of a tensor: {register:.1f} us")
