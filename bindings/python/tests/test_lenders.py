"""Memory that its lender takes away: noticed where a call starts something, and never a crash of the owner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from conftest import MakePeer

import towline
from towline import _native, connect, nccl, nixl, nixl_connect

OWNER = """
import numpy, os, sys, towline
path, size = sys.argv[1], int(sys.argv[2])
numpy.full(size, 7, numpy.uint8).tofile(path)
array = numpy.memmap(path, numpy.uint8, "r+")
with towline.Endpoint("owner") as owner:
    region, other = owner.register(array, "read+write"), owner.register(bytearray(b"alive"))
    print(region.ticket(), other.ticket(), flush=True)
    os.truncate(path, 4096) if input() == "cut" else None
    print("cut", flush=True)
    input()
"""


@pytest.mark.parametrize("path", ["cma", "unix", "tcp"])
def test_an_owner_whose_mapped_file_is_cut_lives(path: str, tmp_path: Path) -> None:
    size = 1 << 20
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "file"), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner, towline.Endpoint("user", require=path) as user:
        assert owner.stdin is not None and owner.stdout is not None
        ticket, other = owner.stdout.readline().split()
        remote, alive = user.import_(ticket), user.import_(other)
        target = numpy.zeros(size, numpy.uint8)
        local = user.register(target, "none")
        user.read(remote, local).wait()
        assert target.min() == 7
        owner.stdin.write("cut\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "cut\n"
        for attempt in (user.read, user.write):
            with pytest.raises(towline.Stale):
                attempt(remote, local).wait()
        word = bytearray(5)
        user.read(alive, user.register(word, "none")).wait()
        assert word == b"alive"
        owner.stdin.write("\n")
        owner.stdin.close()
        assert owner.wait(30) == 0


def resized() -> Any:
    return numpy.zeros(1 << 16, numpy.uint8)


def take_away(array: Any) -> None:
    array.resize(16 << 20, refcheck=False)


def test_an_operation_that_lost_its_memory_is_not_offered() -> None:
    with connect.Connector() as connector:
        array = resized()
        readable = connector.create_readable_sync(connect.Descriptor((array.ctypes.data, array.nbytes, "cpu", array)))
        assert readable.metadata()
        take_away(array)
        with pytest.raises(towline.Stale):
            readable.metadata()
        with pytest.raises(towline.Canceled):
            readable.wait(30)


def test_an_operation_of_the_drop_in_that_lost_its_memory_is_not_offered() -> None:
    connection = nixl_connect.Connection(nixl_connect.Connector(), 1)
    array = resized()
    descriptor = nixl_connect.Descriptor((array.ctypes.data, array.nbytes, "cpu", array))
    readable = nixl_connect.ReadableOperation(connection, descriptor)
    assert readable.metadata()
    take_away(array)
    with pytest.raises(RuntimeError):
        readable.metadata()
    assert readable.status is nixl_connect.OperationStatus.CANCELLED
    connection.connector.close()


def test_an_agent_neither_moves_nor_offers_memory_that_is_lost() -> None:
    array, other = resized(), bytearray(1 << 16)
    with nixl.Agent("one", engine="embedded") as one, nixl.Agent("two", engine="embedded") as two:
        lent, kept = one.register((array.ctypes.data, array.nbytes, array)), one.register(other)
        theirs = two.register(bytearray(1 << 16))
        peer = one.add_peer(two.metadata())
        one.read(lent, theirs.descriptors, peer).wait()
        take_away(array)
        for attempt in (one.read, one.write):
            with pytest.raises(towline.Stale):
                attempt(lent, theirs.descriptors, peer)
        with pytest.raises(towline.Stale):
            one.metadata()
        one.read(kept, theirs.descriptors, peer).wait()
        lent.close()
        assert one.metadata()


def test_a_window_whose_memory_is_lost_is_closed_at_the_next_call() -> None:
    comm = nccl.Communicator.init_all(1)[0]
    array, source = resized(), numpy.zeros(64, numpy.uint8)
    window = comm.register_window((array.ctypes.data, array.nbytes, array))
    assert window is not None
    comm.put(source, 0, window)
    take_away(array)
    with pytest.raises(nccl.NCCLStale):
        comm.put(source, 0, window)
    with pytest.raises(nccl.NcclInvalid, match="closed"):
        comm.put(source, 0, window)
    comm.destroy()


def read_only_view(of: Any) -> Any:
    view = of[:]
    view.flags.writeable = False
    return view


VIEWS: dict[str, Callable[[Any], Any]] = {
    "a view of an array": lambda array: read_only_view(array),
    "a view of a view": lambda array: read_only_view(array[:][:]),
    "a memoryview": lambda array: memoryview(array).toreadonly(),
    "an array over a memoryview": lambda array: numpy.frombuffer(memoryview(array).toreadonly(), array.dtype),
}


@pytest.mark.parametrize("kind", ["uint32", "int64", "uint64"])
@pytest.mark.parametrize("view", VIEWS)
def test_indices_that_somebody_can_still_change_are_copied(
    view: str, kind: str, peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    blocks, count = 4096, 1 << 20
    owner = peer(blocks * 16)
    remote = endpoint.import_(owner.ticket, require="unix")
    layout, into = towline.Layout.contiguous(blocks * 16, 16), towline.Layout.contiguous(count * 16, 16)
    indices = (numpy.arange(count) * 7 % blocks).astype(kind)
    target = numpy.zeros((count, 16), numpy.uint8)
    local = endpoint.register(target, "none")
    held = _native.held()
    transfer = endpoint.read(remote, local, blocks=(layout, VIEWS[view](indices), into, None))
    assert _native.held() == held
    # The library's threads are still at the list.
    asked = indices.copy()
    indices[:] = 0
    transfer.wait()
    pattern = numpy.frombuffer((bytes(range(251)) * 262)[: blocks * 16], numpy.uint8).reshape(blocks, 16)
    assert (target == pattern[asked]).all()


def test_indices_that_nobody_can_change_are_taken_as_they_are(peer: MakePeer, endpoint: towline.Endpoint) -> None:
    remote = endpoint.import_(peer(1 << 16).ticket, require="unix")
    layout = towline.Layout.contiguous(1 << 16, 16)
    into = towline.Layout.contiguous(16 << 20, 16)
    local = endpoint.register(numpy.zeros(16 << 20, numpy.uint8), "none")
    for indices in (numpy.zeros(1 << 20, numpy.uint32), numpy.frombuffer(bytes(4 << 20), numpy.uint32)):
        indices.flags.writeable = False
        held = _native.held()
        transfer = endpoint.read(remote, local, blocks=(layout, indices, into, None))
        assert _native.held() == held + 1
        transfer.wait()
