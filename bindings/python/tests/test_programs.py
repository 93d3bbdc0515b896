"""Requests that are compiled once and started many times with new indices."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy
import pytest

import towline

LAYERS = 8
BLOCKS = 32
BLOCK = 512
SIZE = BLOCKS * BLOCK
PAGES = towline.Layout.blocks(BLOCK, BLOCKS)


class Cache:
    """The layers of an owner's cache, each with its number in every byte, and as many here."""

    def __init__(self, endpoint: towline.Endpoint, path: str) -> None:
        self.owner = towline.Endpoint("owner")
        self.theirs = [numpy.full(SIZE, layer + 1, numpy.uint8) for layer in range(LAYERS)]
        self.regions = [self.owner.register(layer, "read+write") for layer in self.theirs]
        self.remotes = [endpoint.import_(region.ticket(), require=path) for region in self.regions]
        self.ours = [numpy.zeros(SIZE, numpy.uint8) for _ in range(LAYERS)]
        self.locals = [endpoint.register(layer, "none") for layer in self.ours]
        self.program = endpoint.program(self.remotes, self.locals, PAGES)

    def check(self, blocks: list[int], layers: range = range(LAYERS)) -> None:
        """Those blocks of those layers were read, and no others; then forgets them."""
        for number, layer in enumerate(self.ours):
            wanted = numpy.zeros(SIZE, numpy.uint8)
            if number in layers:
                wanted.reshape(BLOCKS, BLOCK)[blocks] = number + 1
            assert (layer == wanted).all(), f"layer {number}"
            layer[:] = 0


@pytest.fixture(params=["inproc", "unix", "tcp"])
def cache(request: pytest.FixtureRequest, endpoint: towline.Endpoint) -> Cache:
    return Cache(endpoint, request.param)


def test_the_same_blocks_of_all_layers_are_read_again_and_again(cache: Cache) -> None:
    fixed = numpy.array([1, 2, 3], numpy.uint64)
    fixed.flags.writeable = False
    pairs: list[tuple[Any, Any]] = [
        ([3, 0, 9], [1, 5, 2]),
        (numpy.array([30], numpy.int32), numpy.array([31], numpy.int64)),
        (fixed, fixed),
        (range(4), (7, 6, 5, 4)),
        (None, None),
    ]
    for theirs, ours in pairs:
        transfer = cache.program.read(theirs, ours, notify="taken")
        transfer.wait()
        blocks = list(range(BLOCKS)) if ours is None else [int(block) for block in ours]
        assert transfer.nbytes == LAYERS * len(blocks) * BLOCK
        assert cache.owner.receive().message == b"taken"
        cache.check(blocks)


def test_some_layers_and_other_blocks_for_each(cache: Cache) -> None:
    first = cache.program.select(range(3))
    assert (len(first), len(cache.program), len(first.explain())) == (3, LAYERS, 3)
    first.read([4], [6]).wait()
    cache.check([6], range(3))
    cache.program.read_each(([layer], [layer]) for layer in range(LAYERS)).wait()
    for number, layer in enumerate(cache.ours):
        assert (layer.reshape(BLOCKS, BLOCK)[number] == number + 1).all()
        assert layer.sum() == BLOCK * (number + 1)
        layer[:] = number + 101
    cache.program.write_each(([layer + 1], [layer]) for layer in range(LAYERS)).wait()
    for number, layer in enumerate(cache.theirs):
        assert (layer.reshape(BLOCKS, BLOCK)[number + 1] == number + 101).all()
        assert (layer.reshape(BLOCKS, BLOCK)[number] == number + 1).all()


def test_many_starts_are_in_flight_from_threads_and_tasks(cache: Cache) -> None:
    def read(block: int) -> None:
        cache.program.read([block], [block]).wait()

    threads = [threading.Thread(target=read, args=(block,)) for block in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def rest() -> None:
        await asyncio.gather(*(cache.program.read([block], [block]) for block in range(16, BLOCKS)))

    asyncio.run(rest())
    cache.check(list(range(BLOCKS)))


def test_a_program_keeps_its_local_regions_and_is_stale_where_a_remote_one_is_gone(
    cache: Cache, endpoint: towline.Endpoint
) -> None:
    cache.locals.clear()
    gc.collect()
    cache.program.read([0], [0]).wait()
    cache.check([0])
    cache.regions[2].close()
    with pytest.raises(towline.Stale, match=f"part 2 of {LAYERS}"):
        cache.program.read([0], [0]).wait()
    for layer in cache.ours:
        layer[:] = 0
    region = cache.owner.register(cache.theirs[2], "read")
    remotes = [*cache.remotes[:2], endpoint.import_(region.ticket(), require=cache.remotes[0].path), *cache.remotes[3:]]
    cache.program.rebind(remotes).read([0], [0]).wait()
    cache.check([0])
    with pytest.raises(towline.Invalid, match="remote regions for"):
        cache.program.rebind(remotes[:2])


@pytest.mark.parametrize(
    ("theirs", "ours", "error", "says"),
    [
        ([BLOCKS], [0], towline.Invalid, f"part 0 of {LAYERS}: remote index {BLOCKS}"),
        ([0], [BLOCKS], towline.Invalid, f"local index {BLOCKS}"),
        ([0, 1], [0], towline.Invalid, "cannot pair"),
        ([-1], [0], (towline.Invalid, TypeError), "remote_blocks"),
        ([0.5], [0], TypeError, "remote_blocks"),
        (numpy.array([0.5]), [0], TypeError, "remote_blocks"),
        ([0], "0", TypeError, "local_blocks"),
    ],
)
def test_wrong_indices_name_the_part_and_the_index(
    cache: Cache, theirs: Any, ours: Any, error: Any, says: str
) -> None:
    with pytest.raises(error, match=says):
        cache.program.read(theirs, ours).wait()
    cache.check([])


def test_wrong_programs_are_refused(cache: Cache, endpoint: towline.Endpoint) -> None:
    long = towline.Layout.blocks(BLOCK, BLOCKS + 1)
    thin = towline.Layout.blocks(8, BLOCKS)
    pairs = [(PAGES, PAGES)] * LAYERS
    wrong: list[tuple[Any, str]] = [
        (long, f"part 0 of {LAYERS}: the remote layout"),
        ((PAGES, long), f"part 0 of {LAYERS}: the local layout"),
        ([*pairs[:-1], (PAGES, thin)], f"part {LAYERS - 1} of {LAYERS}: remote blocks have"),
        (pairs[:-1], "pairs of layouts for"),
    ]
    for layouts, says in wrong:
        with pytest.raises(towline.Invalid, match=says):
            endpoint.program(cache.remotes, cache.locals, layouts)
    with pytest.raises(TypeError, match="layouts"):
        endpoint.program(cache.remotes, cache.locals, [PAGES] * LAYERS)  # type: ignore[list-item]
    with pytest.raises(towline.Invalid, match="cannot pair"):
        endpoint.program(cache.remotes, cache.locals[:-1], PAGES)
    with pytest.raises(towline.Invalid, match="no parts"):
        endpoint.program([], [], PAGES)
    with pytest.raises(towline.Invalid, match="no part 99"):
        cache.program.select([99])
    with pytest.raises(towline.Invalid, match="another endpoint"):
        cache.owner.program(cache.remotes, cache.locals, PAGES)


def test_a_local_region_that_was_closed_or_is_read_only_is_refused(endpoint: towline.Endpoint) -> None:
    owner = towline.Endpoint("owner")
    region = owner.register(bytearray(SIZE), "read+write")
    remote = endpoint.import_(region.ticket())
    local = endpoint.register(numpy.zeros(SIZE, numpy.uint8), "none")
    program = endpoint.program([remote], [local], PAGES)
    program.read([0], [0]).wait()
    local.close()
    with pytest.raises(towline.Invalid, match="closed"):
        program.read([0], [0])
    fixed = endpoint.program([remote], [endpoint.register(bytes(SIZE), "none")], PAGES)
    fixed.write([0], [0]).wait()
    with pytest.raises(towline.Invalid, match="read-only"):
        fixed.read([0], [0])


def test_programs_that_are_dropped_leave_nothing(endpoint: towline.Endpoint) -> None:
    cache = Cache(endpoint, "unix")
    before = towline._native.held()
    for _ in range(200):
        endpoint.program(cache.remotes, cache.locals, PAGES).read([1], [1]).wait()
    gc.collect()
    assert towline._native.held() <= before
    assert repr(cache.program) == f"<Program of {LAYERS} parts, path unix>"


def test_many_tickets_are_imported_at_once(endpoint: towline.Endpoint) -> None:
    owner = towline.Endpoint("owner")
    regions = [owner.register(bytearray([number % 256]) * 64, "read") for number in range(300)]
    tickets = [str(region.ticket()) for region in regions]
    remotes = endpoint.import_many(tickets, require="unix")
    assert [remote.path for remote in remotes] == ["unix"] * 300
    target = bytearray(64)
    local = endpoint.register(target, "none")
    endpoint.read(remotes[255], local).wait()
    assert target == bytes([255]) * 64
    assert endpoint.import_many([]) == []
    regions[7].close()
    with pytest.raises(towline.Stale, match="ticket 7"):
        endpoint.import_many(tickets)
    with pytest.raises(towline.Protocol, match="not a ticket"):
        endpoint.import_many(["towline1:nonsense"])
    with pytest.raises(TypeError):
        endpoint.import_many([7])  # type: ignore[list-item]
