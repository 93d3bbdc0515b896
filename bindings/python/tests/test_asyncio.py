"""Awaiting: any loop, any thread, cancellation, no polling."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import numpy
import pytest
from conftest import MakePeer, Peer

import towline
from towline import _native, aio

SIZE = 1 << 16


def uvloop_runner(main: Coroutine[Any, Any, Any]) -> Any:
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return asyncio.run if request.param == "asyncio" else uvloop_runner


async def _goes_on(task: asyncio.Future[Any], time: float) -> None:
    """Waits that long for the task, which must not end meanwhile."""
    done, _ = await asyncio.wait([task], timeout=time)
    assert not done


class Stalled:
    """A transfer that is in flight until the peer is resumed, or is cancelled."""

    def __init__(self, endpoint: towline.Endpoint, owner: Peer) -> None:
        self.remote = endpoint.import_(owner.ticket, require="unix")
        self.endpoint = endpoint
        self.owner = owner
        self.target = bytearray(SIZE)
        self.local = endpoint.register(self.target, "none")
        owner.stop()

    def start(self) -> towline.Transfer[None]:
        return self.endpoint.read(self.remote, self.local)


def test_many_transfers_are_awaited_at_once(
    run: Callable[..., Any], peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    stalled = Stalled(endpoint, peer())

    async def main() -> None:
        transfers = [stalled.start() for _ in range(50)]
        assert not any(transfer.done() for transfer in transfers)
        stalled.owner.resume()
        await asyncio.gather(*transfers)
        assert stalled.target[:251] == bytes(range(251))

    run(main())


def test_a_transfer_is_awaited_by_several_loops_and_threads(
    peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    stalled = Stalled(endpoint, peer())
    transfer = stalled.start()
    started = threading.Barrier(5)
    ended: list[str] = []

    async def wait() -> None:
        task = asyncio.ensure_future(_awaited(transfer))
        await asyncio.sleep(0)
        started.wait()
        await task

    def loop() -> None:
        asyncio.run(wait())
        ended.append("loop")

    def block() -> None:
        started.wait()
        transfer.wait()
        ended.append("thread")

    threads = [threading.Thread(target=work) for work in (loop, loop, block, block)]
    for thread in threads:
        thread.start()
    started.wait()
    stalled.owner.resume()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["loop", "loop", "thread", "thread"]


async def _awaited(transfer: towline.Transfer[None]) -> None:
    await transfer


def test_cancelling_the_task_cancels_the_transfer_and_leaves_the_memory_quiet(
    run: Callable[..., Any], peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    stalled = Stalled(endpoint, peer())

    async def main() -> None:
        transfer = stalled.start()
        task = asyncio.ensure_future(_awaited(transfer))
        await _goes_on(task, 0.05)
        assert not transfer.done() and not transfer.quiet()
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.done() and transfer.quiet()
        with pytest.raises(towline.Canceled):
            transfer.result()
        with pytest.raises(towline.Canceled):
            await transfer

    run(main())
    before = bytes(stalled.target)
    stalled.owner.resume()
    stalled.owner.tell("bytes 0 1")
    assert stalled.target == before


def test_a_timeout_of_asyncio_ends_an_await(
    run: Callable[..., Any], peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    stalled = Stalled(endpoint, peer())

    async def main() -> None:
        transfer = stalled.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await transfer
        assert transfer.done()
        with pytest.raises(towline.Timeout):
            await endpoint.receive_async(0.01)

    run(main())


def test_the_loop_is_not_polled_while_a_transfer_is_in_flight(
    peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    stalled = Stalled(endpoint, peer())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(_awaited(stalled.start()))
        await _goes_on(task, 0.01)
        turns = 0

        class Counting:
            def __init__(self, selector: Any) -> None:
                self.selector = selector

            def __getattr__(self, name: str) -> Any:
                return getattr(self.selector, name)

            def select(self, timeout: float | None) -> Any:
                nonlocal turns
                turns += 1
                return self.selector.select(timeout)

        loop._selector = Counting(loop._selector)  # type: ignore[attr-defined]
        await _goes_on(task, 0.3)
        assert turns <= 4, turns
        stalled.owner.resume()
        await task

    asyncio.run(main())


def test_a_loop_has_one_descriptor_which_goes_with_it(
    run: Callable[..., Any], peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    owner = peer()

    async def main() -> None:
        for _ in range(5):
            remote = await endpoint.import_async(owner.ticket)
            with endpoint.register(bytearray(64), "none") as local:
                await endpoint.read(remote, local)

    run(main())
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        run(main())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_closed_loop_that_is_kept_costs_nothing_once_another_runs(
    endpoint: towline.Endpoint,
) -> None:
    async def main() -> asyncio.AbstractEventLoop:
        with pytest.raises(towline.Timeout):
            await endpoint.receive_async(0.001)
        return asyncio.get_running_loop()

    kept = [asyncio.run(main()) for _ in range(5)]
    assert sum(loop in aio._ports for loop in kept) == 1


def test_a_loop_releases_memory_by_itself(
    run: Callable[..., Any], peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    owner = peer()
    remote = endpoint.import_(owner.ticket, require="unix")

    async def main() -> None:
        warm = bytearray(64)
        with endpoint.register(warm, "none") as local:
            await endpoint.import_async(owner.ticket)
            await endpoint.read(remote, local)
        target = numpy.zeros(SIZE, numpy.uint8)
        loop, released = asyncio.get_running_loop(), asyncio.Event()
        gone = weakref.ref(target, lambda _: loop.call_soon_threadsafe(released.set))
        owner.stop()
        transfer = endpoint.read(remote, endpoint.register(target, "none"))
        del target, transfer
        gc.collect()
        # The region and the transfer are forgotten, and the bytes are still to come: the library holds the memory.
        assert gone() is not None
        owner.resume()
        await asyncio.wait_for(released.wait(), 30)

    run(main())


def test_messages_are_awaited_by_several_tasks_and_waiting_in_vain_costs_nothing(
    run: Callable[..., Any], endpoint: towline.Endpoint
) -> None:
    region = endpoint.register(bytes(8))
    remote = endpoint.import_(region.ticket())

    async def main() -> None:
        for _ in range(20):
            with pytest.raises(towline.Timeout):
                await endpoint.receive_async(0.001)
        tasks = [asyncio.ensure_future(endpoint.receive_async(10)) for _ in range(3)]
        cancelled = asyncio.ensure_future(endpoint.receive_async(10))
        await asyncio.sleep(0)
        cancelled.cancel()
        for number in range(3):
            await endpoint.notify(remote, f"message {number}")
        got = sorted(notification.message for notification in await asyncio.gather(*tasks))
        assert got == [b"message 0", b"message 1", b"message 2"]

    run(main())


def test_other_loops_watch_a_descriptor(peer: MakePeer, endpoint: towline.Endpoint) -> None:
    stalled = Stalled(endpoint, peer())
    queue = towline.CompletionQueue()
    transfers = [stalled.start() for _ in range(3)]
    for transfer in transfers:
        queue.add(transfer)
    assert select.select([queue], [], [], 0) == ([], [], []) and queue.ready() == [] and len(queue) == 3
    stalled.owner.resume()
    seen: list[object] = []
    while len(seen) < 3:
        assert select.select([queue], [], [], 30)[0]
        seen += queue.ready()
    assert set(seen) == set(transfers) and len(queue) == 0
    queue.add(transfers[0])
    assert queue.ready() == [transfers[0]]


def test_an_import_does_not_block_the_loop_and_can_be_cancelled(
    run: Callable[..., Any], peer: MakePeer
) -> None:
    owner = peer()
    owner.stop()

    async def main() -> None:
        async with towline.Endpoint("impatient", timeout=30, stall_timeout=30) as endpoint:
            task = asyncio.ensure_future(endpoint.import_async(owner.ticket))
            await _goes_on(task, 0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            other = asyncio.ensure_future(endpoint.import_async(owner.ticket))
            await _goes_on(other, 0.01)
            owner.resume()
            assert (await other).peer == "peer"

    run(main())


def test_an_import_has_a_limit_of_its_own(peer: MakePeer) -> None:
    owner = peer()

    async def main(endpoint: towline.Endpoint) -> None:
        owner.stop()
        # That of asyncio raises the class of Python.
        async with asyncio.timeout(60):
            with pytest.raises(towline.Timeout):
                await endpoint.import_async(owner.ticket, timeout=0.1)
            with pytest.raises(towline.Timeout):
                await asyncio.to_thread(endpoint.import_, owner.ticket, timeout=0.1)
        for wrong in (-1, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                endpoint.import_(owner.ticket, timeout=wrong)
            with pytest.raises(ValueError, match="timeout"):
                await endpoint.import_async(owner.ticket, timeout=wrong)
        owner.resume()
        await endpoint.import_async(owner.ticket, timeout=60)

    with towline.Endpoint("patient", stall_timeout=3600) as endpoint:
        asyncio.run(main(endpoint))


def test_a_task_that_is_thrown_away_cancels_its_transfer(
    peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    stalled = Stalled(endpoint, peer())
    transfer = stalled.start()

    async def main() -> None:
        coroutine = _awaited(transfer)
        coroutine.send(None)
        coroutine.close()

    asyncio.run(main())
    with pytest.raises(towline.Canceled):
        transfer.wait()


def test_a_waiting_thread_does_not_hold_the_lock_of_the_interpreter(
    peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    stalled = Stalled(endpoint, peer())
    transfer = stalled.start()
    waiting = threading.Thread(target=transfer.wait)
    waiting.start()
    receiving = threading.Thread(target=lambda: pytest.raises(towline.Timeout, endpoint.receive, 0.2))
    receiving.start()
    began = time.monotonic()
    while time.monotonic() - began < 0.05:
        pass
    assert waiting.is_alive()
    stalled.owner.resume()
    waiting.join()
    receiving.join()
    assert _native.held() >= 1
