"""The figures, each between this process and another one."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import towline

from . import _nixl
from ._peer import Peer, is_block, polled
from ._reference import Reference, zeroed
from ._rows import GIB, Row, Skipped, median, p99

BLOCK = 4096
TICK = 0.0005
"""How often the loop is asked to show that it is awake, in seconds."""
BATCH = 100
"""Messages that may be in flight at once."""


@dataclass(frozen=True)
class Pace:
    """How much is measured: rounds that alternate between Python and Rust, and the sizes of the shapes."""

    rounds: int = 9
    singles: int = 100
    notifications: int = 100_000
    large: int = 64 << 20
    blocks: int = 81_920

    @staticmethod
    def quick() -> Pace:
        return Pace(rounds=3, singles=50, notifications=20_000)


@dataclass(frozen=True)
class Bench:
    """What the figures share."""

    peer: Peer
    reference: Reference
    pace: Pace


class Lacking(Exception):
    """The machine lacks what a figure needs."""


Figure = Callable[[Bench], AsyncIterator[Row | Skipped]]


async def operation(bench: Bench) -> AsyncIterator[Row | Skipped]:
    """4 KiB read between two asyncio processes: from `begin_read` to the awaiting code on both sides."""
    async with towline.Connector("bench") as connector:
        local = _descriptor(connector, BLOCK)
        for polling in (False, True):
            times = []
            # The first ones make contact and warm both processes.
            for number in range(-10, bench.pace.rounds * (20 if polling else bench.pace.singles)):
                offered = bench.peer.ask(do="offer", bytes=BLOCK, polled=polling)
                remote = towline.RdmaMetadata.from_json(offered["metadata"])
                start = time.monotonic_ns()
                read = await connector.begin_read(remote, local)
                await (polled(read) if polling else read)
                ended = max(time.monotonic_ns(), bench.peer.answer()["ended"])
                if number >= 0:
                    times.append((ended - start) / 1e6)
            yield Row(
                name="py-4k-simulated-polling" if polling else "py-4k-operation",
                path=read.path,
                op="read",
                bytes=BLOCK,
                blocks=1,
                block_size=BLOCK,
                unit="ms",
                ours=median(times),
                p99=p99(times),
                target=None if polling else 0.3,
                rounds=len(times),
                against="the same operation, waited for as dynamo.nixl_connect does: simulated, without NIXL"
                if polling
                else "the time asked for",
            )
    yield await real_polling(bench, "dynamo.nixl_connect")
    yield nixl_polling(bench)


async def real_polling(bench: Bench, library: str) -> Row | Skipped:
    """The same by the library that users have today, where it is."""
    name = "py-4k-nixl"
    if reason := _no_nixl():
        return Skipped(name, reason)
    return await by_library(bench, library, name)


async def by_library(bench: Bench, library: str, name: str) -> Row:
    """4 KiB read by any library with the interface of `dynamo.nixl_connect`."""
    module = importlib.import_module(library)
    connector = module.Connector()
    local = module.Descriptor(bytearray(BLOCK))
    times = []
    for number in range(-2, bench.pace.rounds * 20):
        offered = bench.peer.ask(do="offer-like", library=library, bytes=BLOCK)
        remote = module.RdmaMetadata.model_validate_json(offered["metadata"])
        start = time.monotonic_ns()
        read = await connector.begin_read(remote, local)
        await read.wait_for_completion()
        ended = max(time.monotonic_ns(), bench.peer.answer()["ended"])
        if number >= 0:
            times.append((ended - start) / 1e6)
        # That library releases an operation only with its object.
        del read
    return Row(
        name=name,
        op="read",
        bytes=BLOCK,
        blocks=1,
        block_size=BLOCK,
        unit="ms",
        ours=median(times),
        p99=p99(times),
        rounds=len(times),
        against=f"the same operation by {library}",
    )


def nixl_polling(bench: Bench) -> Row | Skipped:
    """The same by NIXL alone, waited for in the same way. Registering and first contact are left out, in its favour."""
    name = "py-4k-nixl-polling"
    if _nixl.package() is None:
        return Skipped(name, f"nixl is not installed: none of {', '.join(_nixl.PACKAGES)} can be imported")
    times = []
    with Peer(_nixl.__name__, _nixl.ENVIRONMENT) as owner, Peer(_nixl.__name__, _nixl.ENVIRONMENT) as reader:
        try:
            reader.ask(**owner.ask(do="offer", bytes=BLOCK) | {"do": "know", "bytes": BLOCK})
        except RuntimeError as error:
            return Skipped(name, f"NIXL {_nixl.version()} cannot be used here: {error}")
        for number in range(-5, bench.pace.rounds * 20):
            # Both begin to look at the same moment, as they nearly do where one message starts them.
            for side, what in ((owner, "wait"), (reader, "read")):
                side.tell(do=what, key=str(number))
            read, ended = reader.answer(), owner.answer()["ended"]
            if number >= 0:
                times.append((max(read["ended"], ended) - read["began"]) / 1e6)
    return Row(
        name=name,
        op="read",
        bytes=BLOCK,
        blocks=1,
        block_size=BLOCK,
        unit="ms",
        ours=median(times),
        p99=p99(times),
        rounds=len(times),
        against=f"the same read by NIXL {_nixl.version()}, waited for as dynamo.nixl_connect does, memory and peer known before; both sides begin to poll when the read begins",
    )


def _no_nixl() -> str | None:
    """Why `dynamo.nixl_connect` cannot be measured here."""
    try:
        found = importlib.util.find_spec("dynamo.nixl_connect")
    except ImportError:
        found = None
    if found is None:
        return "dynamo.nixl_connect is not installed"
    if found.origin and os.path.dirname(towline.__file__) in found.origin:
        return "dynamo.nixl_connect is towline's own here"
    if importlib.util.find_spec("nixl") is None:
        return "nixl is not installed"
    return None


async def overhead(bench: Bench) -> AsyncIterator[Row | Skipped]:
    """What Python adds to a 4 KiB read, as an operation and as a transfer."""
    pace, reference = bench.pace, bench.reference
    ticket = bench.peer.ask(do="region", bytes=BLOCK)["ticket"]
    prepared = reference.prepare(ticket, BLOCK, BLOCK, None)
    times: dict[str, list[float]] = {"op": [], "rust op": [], "transfer": [], "rust transfer": []}
    async with towline.Connector("bench") as connector:
        endpoint = connector.endpoint
        remote = await endpoint.import_async(ticket)
        region = endpoint.register(zeroed(BLOCK), "none")
        local = _descriptor(connector, BLOCK)

        async def one_operation() -> float:
            offered = bench.peer.ask(do="offer", bytes=BLOCK, polled=False)["metadata"]
            metadata = towline.RdmaMetadata.from_json(offered)
            start = time.perf_counter()
            await (await connector.begin_read(metadata, local))
            took = time.perf_counter() - start
            bench.peer.answer()
            return took

        def one_rust_operation() -> float:
            offered = bench.peer.ask(do="offer", bytes=BLOCK, polled=False)["metadata"]
            took = reference.operation(offered, BLOCK)
            bench.peer.answer()
            return took

        async def one_transfer() -> float:
            start = time.perf_counter()
            await endpoint.read(remote, region)
            return time.perf_counter() - start

        warm = max(1, pace.singles // 10)
        for _ in range(pace.rounds):
            # The first ones warm what the other side has cooled.
            times["op"] += [await one_operation() for _ in range(warm + pace.singles)][warm:]
            times["rust op"] += [one_rust_operation() for _ in range(warm + pace.singles)][warm:]
            times["transfer"] += [await one_transfer() for _ in range(warm + pace.singles)][warm:]
            times["rust transfer"] += reference.transfers(prepared, warm + pace.singles)[warm:]
        path = remote.path
    middle = {name: median(some) * 1e6 for name, some in times.items()}
    for name, python, rust, target in (
        ("py-overhead", "op", "rust op", 60.0),
        ("py-overhead-transfer", "transfer", "rust transfer", 60.0),
        # The claim is part of an operation in every language, so nothing is asked of this one.
        ("py-operation-over-transfer", "op", "rust transfer", None),
    ):
        yield Row(
            name=name,
            path=path,
            op="read",
            bytes=BLOCK,
            blocks=1,
            block_size=BLOCK,
            unit="us",
            ours=middle[python] - middle[rust],
            target=target,
            rounds=len(times[python]),
            against=f"p50 {middle[python]:.1f} µs in Python less p50 {middle[rust]:.1f} µs by {reference.how}",
        )


async def notifications(bench: Bench) -> AsyncIterator[Row | Skipped]:
    """The next notification after many finished ones, beside one of a fresh endpoint."""
    pace = bench.pace
    async with towline.Endpoint("bench-used") as used, towline.Endpoint("bench-fresh") as fresh:
        regions, remotes = [], []
        for endpoint in (used, fresh):
            region = endpoint.register(towline.empty(BLOCK), "read")
            answer = bench.peer.ask(do="echo", ticket=str(region.ticket()))
            regions.append(region)
            remotes.append(await endpoint.import_async(answer["ticket"]))

        async def there_and_back(endpoint: towline.Endpoint, remote: towline.Remote) -> float:
            start = time.perf_counter()
            await endpoint.notify(remote, b"ping")
            await endpoint.receive_async()
            return time.perf_counter() - start

        for start in range(0, pace.notifications, BATCH):
            for _ in range(min(BATCH, pace.notifications - start) - 1):
                await used.notify(remotes[0], b"tick")
            await there_and_back(used, remotes[0])
        times: tuple[list[float], list[float]] = ([], [])
        sides = list(zip((used, fresh), remotes, times, strict=True))
        for number in range(pace.rounds * 2):
            for endpoint, remote, some in sides if number % 2 == 0 else reversed(sides):
                for _ in range(max(1, pace.singles // 10)):
                    await there_and_back(endpoint, remote)
                some += [await there_and_back(endpoint, remote) for _ in range(pace.singles)]
        path = remotes[0].path
    yield Row(
        name="py-notifications",
        path=path,
        unit="us",
        ours=median(times[0]) * 1e6,
        p99=p99(times[0]) * 1e6,
        limit=median(times[1]) * 1e6,
        goal=0.9,
        rounds=len(times[0]),
        against=f"a message there and one back after {pace.notifications} finished ones, and between fresh endpoints",
    )


async def large(bench: Bench) -> AsyncIterator[Row | Skipped]:
    """A large read: how long it keeps the event loop from anything else, and how fast it is."""
    pace, nbytes = bench.pace, bench.pace.large
    _room_for(6 * nbytes)
    name = f"py-{nbytes >> 20}m"
    async with towline.Connector("bench") as connector:
        reads = await _LargeReads.prepared(bench, connector)
        times: dict[str, list[float]] = {"operation": [], "transfer": []}
        rust: dict[str, list[float]] = {"operation": [], "transfer": []}
        pauses: list[float] = []
        idle: list[float] = []
        for number in range(-1, pace.rounds * 3):
            # The first one changes, so that neither always finds what the other left in the caches.
            for turn in (0, 1) if number % 2 == 0 else (1, 0):
                if turn == 0:
                    times["operation"].append(await reads.operation())
                    times["transfer"].append(await reads.transfer())
                else:
                    rust["operation"].append(reads.rust_operation())
                    rust["transfer"].append(reads.rust_transfer())
            pauses.append(await reads.pause())
            idle.append(await longest_pause(asyncio.sleep(times["operation"][-1])))
        for some in (*times.values(), *rust.values(), pauses, idle):
            # The first one of each made contact and warmed both sides.
            del some[0]
        reads.verify()
    shape: dict[str, Any] = {
        "path": reads.remote.path,
        "op": "read",
        "bytes": nbytes,
        "blocks": 1,
        "block_size": nbytes,
        "rounds": len(pauses),
    }
    yield Row(
        name=f"{name}-pause",
        unit="ms",
        ours=median(pauses) * 1e3,
        p99=max(pauses) * 1e3,
        limit=median(idle) * 1e3,
        target=5.0,
        against="the longest delay of a timer while as long a sleep is awaited; p99 is the longest of all reads",
        **shape,
    )
    for suffix, kind in (("", "operation"), ("-transfer", "transfer")):
        yield Row(
            name=name + suffix,
            unit="GiB/s",
            ours=nbytes / GIB / median(times[kind]),
            limit=nbytes / GIB / median(rust[kind]),
            goal=0.9,
            against=f"the same {kind} by {bench.reference.how}",
            **shape,
        )


@dataclass
class _LargeReads:
    bench: Bench
    connector: towline.Connector
    local: towline.Descriptor
    remote: towline.Remote
    region: towline.Region
    prepared_reference: int

    @staticmethod
    async def prepared(bench: Bench, connector: towline.Connector) -> _LargeReads:
        nbytes = bench.pace.large
        ticket = bench.peer.ask(do="region", bytes=nbytes)["ticket"]
        local = _descriptor(connector, nbytes)
        return _LargeReads(
            bench,
            connector,
            local,
            await connector.endpoint.import_async(ticket),
            connector.endpoint.register(local._data, "none"),
            bench.reference.prepare(ticket, nbytes, nbytes, None),
        )

    def _offered(self) -> str:
        metadata: str = self.bench.peer.ask(do="offer", bytes=self.local.size, polled=False)["metadata"]
        return metadata

    async def _read(self, remote: towline.RdmaMetadata) -> None:
        await (await self.connector.begin_read(remote, self.local))

    async def operation(self) -> float:
        remote = towline.RdmaMetadata.from_json(self._offered())
        start = time.perf_counter()
        await self._read(remote)
        took = time.perf_counter() - start
        self.bench.peer.answer()
        return took

    async def pause(self) -> float:
        remote = towline.RdmaMetadata.from_json(self._offered())
        pause = await longest_pause(self._read(remote))
        self.bench.peer.answer()
        return pause

    def rust_operation(self) -> float:
        took = self.bench.reference.operation(self._offered(), self.local.size)
        self.bench.peer.answer()
        return took

    async def transfer(self) -> float:
        start = time.perf_counter()
        await self.connector.endpoint.read(self.remote, self.region)
        return time.perf_counter() - start

    def rust_transfer(self) -> float:
        return self.bench.reference.transfers(self.prepared_reference, 1)[0]

    def verify(self) -> None:
        view = memoryview(self.local._data)
        if not all(is_block(view, at, at // BLOCK) for at in range(0, self.local.size, BLOCK)):
            raise RuntimeError("the bytes that were read are wrong")


async def longest_pause(during: Awaitable[None]) -> float:
    """The longest time by which a timer of this loop was late while that was awaited, in seconds."""
    loop = asyncio.get_running_loop()
    ticked = asyncio.Event()
    due, worst, watching = loop.time() + TICK, 0.0, True

    def tick() -> None:
        nonlocal due, worst
        worst = max(worst, loop.time() - due)
        due = loop.time() + TICK
        ticked.set()
        if watching:
            loop.call_later(TICK, tick)

    loop.call_later(TICK, tick)
    await ticked.wait()
    worst = 0.0
    await during
    watching = False
    return max(worst, loop.time() - due)


async def by_index(bench: Bench) -> AsyncIterator[Row | Skipped]:
    """Many blocks by index arrays."""
    pace, reference = bench.pace, bench.reference
    nbytes = pace.blocks * BLOCK
    _room_for(4 * nbytes)
    ticket = bench.peer.ask(do="region", bytes=nbytes)["ticket"]
    orders = [list(range(pace.blocks)), list(range(pace.blocks))]
    for seed, order in enumerate(orders):
        random.Random(seed).shuffle(order)
    there, here = (_indices(order) for order in orders)
    prepared = reference.prepare(ticket, nbytes, BLOCK, (orders[0], orders[1]))
    times: list[float] = []
    rust: list[float] = []
    async with towline.Endpoint("bench") as endpoint:
        memory = zeroed(nbytes)
        remote = await endpoint.import_async(ticket)
        local = endpoint.register(memory, "none")
        layout = towline.Layout.contiguous(nbytes, BLOCK)

        async def read() -> float:
            start = time.perf_counter()
            await endpoint.read(remote, local, blocks=(layout, there, layout, here))
            return time.perf_counter() - start

        await read()
        view = memoryview(memory)
        if not all(is_block(view, to * BLOCK, at) for at, to in zip(*orders, strict=True)):
            raise RuntimeError("the blocks that were read are wrong")
        reference.transfers(prepared, 1)
        for number in range(pace.rounds * 3):
            for turn in (0, 1) if number % 2 == 0 else (1, 0):
                if turn == 0:
                    times.append(await read())
                else:
                    rust += reference.transfers(prepared, 1)
        path = remote.path
    yield Row(
        name=f"py-{pace.blocks}x4k",
        path=path,
        op="read",
        bytes=nbytes,
        blocks=pace.blocks,
        block_size=BLOCK,
        unit="ms",
        ours=median(times) * 1e3,
        limit=median(rust) * 1e3,
        goal=round(1 / 1.05, 4),
        rounds=len(times),
        against=f"the same transfer by {reference.how}",
    )


FIGURES: list[tuple[tuple[str, ...], Figure]] = [
    (("py-4k-operation", "py-4k-simulated-polling", "py-4k-nixl", "py-4k-nixl-polling"), operation),
    (("py-overhead", "py-overhead-transfer", "py-operation-over-transfer"), overhead),
    (("py-notifications",), notifications),
    (("py-64m-pause", "py-64m", "py-64m-transfer"), large),
    (("py-81920x4k",), by_index),
]


def _indices(order: list[int]) -> Any:
    try:
        import numpy
    except ImportError:
        return array("q", order)
    return numpy.array(order, dtype=numpy.int64)


def _descriptor(connector: towline.Connector, nbytes: int) -> towline.Descriptor:
    descriptor = towline.Descriptor(zeroed(nbytes))
    descriptor.register_memory(connector)
    return descriptor


def _room_for(nbytes: int) -> None:
    with open("/proc/meminfo", encoding="ascii") as info:
        for line in info:
            name, _, rest = line.partition(":")
            if name == "MemAvailable" and int(rest.split()[0]) * 1024 < nbytes:
                raise Lacking(f"it needs {nbytes >> 20} MiB of memory, and {int(rest.split()[0]) >> 10} are available")
