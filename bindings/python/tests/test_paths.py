"""Every path between two processes, and what can be asked of a transfer."""

from __future__ import annotations

import array
import asyncio
import doctest

import numpy
import pytest
from conftest import MakePeer

import towline

PATTERN = bytes(range(251)) * 2000
ELSEWHERE = ["mapped", "cma", "unix", "tcp"]
SIZE = 1 << 16


def skip_unless_usable(endpoint: towline.Endpoint, ticket: str, path: str) -> towline.Remote:
    try:
        return endpoint.import_(ticket, require=path)
    except towline.Unavailable as error:
        pytest.skip(f"{path} cannot be used here: {error.message.splitlines()[-1]}")


@pytest.mark.parametrize("path", ELSEWHERE)
def test_bytes_go_both_ways_over_every_path(
    path: str, peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    owner = peer(SIZE)
    remote = skip_unless_usable(endpoint, owner.ticket, path)
    assert remote.path == path
    assert (remote.peer, remote.nbytes, len(remote), remote.access) == ("peer", SIZE, SIZE, "read+write")
    target = bytearray(SIZE)
    with endpoint.register(target, "none") as local:
        transfer = endpoint.read(remote, local, notify="taken")
        assert transfer.wait() is None
        assert (transfer.path, transfer.nbytes, transfer.done()) == (path, SIZE, True)
        assert target == PATTERN[:SIZE]
        assert bytes.fromhex(owner.tell("receive")) == b"taken"

        target[:8] = b"changed!"
        endpoint.write(remote, local.span(0, 8), at=4096, signal=(8, 3)).wait()
        assert owner.tell("signal 8 3").isdigit()
        assert bytes.fromhex(owner.tell("bytes 4096 4104")) == b"changed!"


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_large_read_is_awaited_over_every_path(
    path: str, peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    size = 16 << 20
    owner = peer(size)
    skip_unless_usable(endpoint, owner.ticket, path)

    async def read() -> bytearray:
        remote = await endpoint.import_async(owner.ticket, require=path)
        target = bytearray(size)
        with endpoint.register(target, "none") as local:
            await endpoint.read(remote, local)
        return target

    got = asyncio.run(read())
    assert got == (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize("path", ["inproc", *ELSEWHERE])
def test_a_large_copy_is_not_made_by_who_asks_for_it(path: str, peer: MakePeer, endpoint: towline.Endpoint) -> None:
    size = 64 << 20
    if path == "inproc":
        region = endpoint.register(towline.empty(size), "read")
        ticket = str(region.ticket())
    else:
        ticket = peer(size).ticket
        skip_unless_usable(endpoint, ticket, path)
    turns = 0

    async def main() -> None:
        nonlocal turns
        remote = await endpoint.import_async(ticket, require=path)
        with endpoint.register(bytearray(size), "none") as local:
            # On a busy machine a copy may be over before this code goes on, now and then.
            for _ in range(20):
                transfer = endpoint.read(remote, local)
                while not transfer.done():
                    turns += 1
                    await asyncio.sleep(0)
                await transfer
                if turns:
                    break

    asyncio.run(main())
    assert turns, "every copy was over before the event loop had a turn"


def test_within_a_process_bytes_go_by_a_copy(endpoint: towline.Endpoint) -> None:
    with towline.Endpoint("other") as other:
        source = endpoint.register(b"some bytes", "read")
        remote = other.import_(source.ticket())
        assert remote.path == "inproc"
        target = bytearray(10)
        other.read(remote, other.register(target, "none")).wait()
        assert target == b"some bytes"
        [path] = other.stats().paths
        assert (path.peer, path.path, path.reads, path.failures) == ("test", "inproc", (1, 10), 0)


def test_why_a_path_was_taken_can_be_asked(peer: MakePeer, endpoint: towline.Endpoint) -> None:
    remote = endpoint.import_(peer(memory="plain").ticket, forbid=["cma"])
    why = remote.explain()
    verdicts = {one.path: one.verdict for one in why.paths}
    assert verdicts["cma"] == "refused" and why.taken == remote.path
    assert "forbidden by the caller" in str(why)
    assert list(verdicts) == towline.paths()


def test_only_shared_memory_is_mapped(peer: MakePeer, endpoint: towline.Endpoint) -> None:
    assert endpoint.import_(peer(memory="shared").ticket).path == "mapped"
    assert endpoint.import_(peer(memory="plain").ticket).path != "mapped"


@pytest.mark.parametrize("path", [*ELSEWHERE])
def test_blocks_are_named_by_index_arrays(
    path: str, peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    owner = peer(SIZE)
    remote = skip_unless_usable(endpoint, owner.ticket, path)
    target = numpy.zeros((4, 256), numpy.uint8)
    local = endpoint.register(target, "none")
    theirs, ours = towline.Layout.contiguous(SIZE, 256), towline.Layout.blocks(256, 4)
    wanted = [7, 200, 3, 4]
    kinds: list[object] = [
        numpy.array(wanted, numpy.uint32),
        numpy.array(wanted, numpy.uint64),
        numpy.array(wanted, numpy.int64),
        numpy.repeat(numpy.array(wanted, numpy.uint64), 2)[::2],
        array.array("I", wanted),
        array.array("Q", wanted),
        memoryview(array.array("L", wanted)),
        wanted,
        tuple(wanted),
    ]
    for indices in kinds:
        target[:] = 0
        endpoint.read(remote, local, blocks=(theirs, indices, ours, None)).wait()
        for row, block in zip(target, wanted, strict=True):
            assert row.tobytes() == PATTERN[block * 256 : (block + 1) * 256]


@pytest.mark.parametrize("path", [*ELSEWHERE])
def test_long_index_arrays_are_read_behind_the_call(
    path: str, peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    owner = peer(SIZE)
    remote = skip_unless_usable(endpoint, owner.ticket, path)
    count = SIZE // 16
    target = numpy.zeros((count, 16), numpy.uint8)
    local = endpoint.register(target, "none")
    layout = towline.Layout.contiguous(SIZE, 16)
    order = numpy.random.default_rng(7).permutation(count)
    expected = numpy.frombuffer(PATTERN[:SIZE], numpy.uint8).reshape(count, 16)[order]
    for kind in (numpy.uint32, numpy.uint64, numpy.int32, numpy.int64):
        for writable in (True, False):
            indices = order.astype(kind)
            indices.flags.writeable = writable
            target[:] = 0
            transfer = endpoint.read(remote, local, blocks=(layout, indices, layout, None))
            if writable:
                # What can be changed was copied before the call returned.
                indices[:] = 0
            del indices
            transfer.wait()
            assert (target == expected).all()
    for indices in (order.astype(numpy.int64), order.astype(numpy.uint32)):
        indices[77] = count
        wrong = endpoint.read(remote, local, blocks=(layout, indices, layout, None))
        with pytest.raises(towline.Invalid, match=rf"remote index {count} \(at 77\)"):
            wrong.wait()
    negative = numpy.tile(order.astype(numpy.int64), 2)
    negative[5000] = -3
    everything = towline.Layout.blocks(16, 2 * count, stride=0)
    wrong = endpoint.read(remote, local, blocks=(layout, negative, everything, None))
    with pytest.raises(towline.Invalid, match=r"remote index -3 \(at 5000\) is negative"):
        wrong.wait()


def test_spans_come_as_tuples_or_as_an_array(endpoint: towline.Endpoint) -> None:
    source = endpoint.register(PATTERN, "read")
    with towline.Endpoint("other") as other:
        remote = other.import_(source.ticket())
        target = bytearray(100)
        local = other.register(target, "none")
        rows = [(10, 0, 5), (251 + 20, 50, 5)]
        for spans in (rows, iter(rows), numpy.array(rows), numpy.array(rows, numpy.uint64)):
            target[:] = bytes(100)
            other.read(remote, local, spans=spans).wait()
            assert bytes(target[:5]) == bytes(range(10, 15))
            assert bytes(target[50:55]) == bytes(range(20, 25))
        other.read(remote, local, at=(30, 60, 3)).wait()
        assert bytes(target[60:63]) == bytes(range(30, 33))


@pytest.mark.parametrize("path", ELSEWHERE)
def test_words_are_changed_atomically(path: str, peer: MakePeer, endpoint: towline.Endpoint) -> None:
    owner = peer(SIZE)
    remote = skip_unless_usable(endpoint, owner.ticket, path)
    try:
        first = endpoint.fetch_add(remote, 16, 5).wait()
    except towline.Unsupported:
        pytest.skip(f"{path} has no atomic operations")
    assert first == int.from_bytes(PATTERN[16:24], "little")
    assert endpoint.compare_swap(remote, 16, first + 5, 1).wait() == first + 5
    assert endpoint.compare_swap(remote, 16, 0, 9).wait() == 1
    assert bytes.fromhex(owner.tell("bytes 16 24")) == (1).to_bytes(8, "little")

    async def again() -> int:
        return await endpoint.fetch_add(remote, 16, 1)

    assert asyncio.run(again()) == 1


def test_messages_come_by_receive(peer: MakePeer, endpoint: towline.Endpoint) -> None:
    owner = peer()
    region = endpoint.register(b"x", "read")
    ticket = region.ticket()
    owner.tell(f"notify {ticket} hello")
    message = endpoint.receive(30)
    assert (message.sender, message.message) == ("peer", b"hello")
    with pytest.raises(towline.Timeout, match="receive"):
        endpoint.receive(0)

    async def receive() -> bytes:
        owner.tell(f"notify {ticket} again")
        return (await endpoint.receive_async(30)).message

    assert asyncio.run(receive()) == b"again"


def test_the_example_of_the_package_runs() -> None:
    failed, attempted = doctest.testmod(towline)
    assert attempted > 10 and failed == 0
