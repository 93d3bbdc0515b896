"""How operations end: cancelled, too late, with a dead peer, at exit; and what ten thousand leave behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from conftest import MakeWorker, Process, run_python
from test_connect import over
from test_process import resident, usage

import towline
from towline import Connector, Descriptor, OperationStatus, RdmaMetadata, _native

LARGE = 64 << 20
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


def stalled_read(connector: Connector, peer: Process) -> towline.ReadOperation:
    """A read that is in flight and does not move, since its peer is stopped."""
    for _ in range(20):
        metadata = RdmaMetadata.from_json(peer.tell(f"readable {LARGE}"))
        read = connector.begin_read_sync(metadata, Descriptor(bytearray(LARGE)))
        peer.stop()
        try:
            read.wait(0.05)
        except towline.Timeout:
            assert read.status is OperationStatus.IN_PROGRESS
            return read
        peer.resume()
    raise AssertionError("every read was over before its peer could be stopped")


def claimed_and_stopped(connector: Connector, peer: Process, kind: str) -> Any:
    """A passive operation whose claimer is stopped in the middle."""
    for _ in range(20):
        local = Descriptor(bytearray(LARGE))
        passive = (
            connector.create_readable_sync(local)
            if kind == "read"
            else connector.create_writable_sync(local)
        )
        peer.order(f"begin-and-stop {kind} {passive.metadata().to_json()}")
        peer.wait_until_stopped()
        if not passive.done():
            return passive
        peer.resume()
        peer.answer()
    raise AssertionError("every operation was over before its peer stopped")


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_cancelling_the_active_side_ends_both(path: str, worker: MakeWorker) -> None:
    peer = worker(path)
    with over(path) as connector:
        read = stalled_read(connector, peer)
        peer.resume()
        read.cancel()
        try:
            read.wait(30)
        except towline.Canceled as error:
            assert read.status is OperationStatus.CANCELLED
            assert "cancelled by the caller" in error.message
            assert str(read.error) == str(error)
            with pytest.raises(towline.Invalid, match="no results"):
                read.results()
            assert "STOP Canceled" in peer.tell("wait")
        else:
            assert peer.tell("wait") == "DONE"
        read.cancel()


def test_cancelling_the_passive_side_ends_both(worker: MakeWorker) -> None:
    peer = worker("unix")
    with over("unix") as connector:
        readable = claimed_and_stopped(connector, peer, "read")
        assert str(readable.status) == "PROC"
        readable.cancel()
        with pytest.raises(towline.Canceled):
            readable.wait(30)
        assert readable.status is OperationStatus.CANCELLED
        peer.resume()
        assert peer.answer() == "done"
        assert peer.tell("wait").startswith(("ERR Stale", "STOP"))


def test_an_unclaimed_operation_is_cancelled_and_its_metadata_stale() -> None:
    with Connector("one") as one, Connector("other") as other:
        readable = one.create_readable_sync(Descriptor(b"bytes"))
        metadata = readable.metadata()
        with readable:
            pass
        assert readable.status is OperationStatus.CANCELLED and readable.quiet
        with pytest.raises(towline.Stale):
            other.begin_read_sync(metadata, Descriptor(bytearray(5)))
        readable.cancel()
        readable.__exit__(None, None, None)


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_a_peer_that_dies_while_it_is_read_from(
    path: str, run: Run, worker: MakeWorker
) -> None:
    peer = worker(path)

    async def main() -> None:
        async with over(path) as connector:
            read = stalled_read(connector, peer)
            peer.kill()
            # On one host it is seen that the process has ended; a connection alone says nothing of that.
            with pytest.raises(towline.Stale if path == "unix" else towline.Disconnected) as caught:
                await read
            assert caught.value.peer == "peer"
            assert read.status is OperationStatus.ERRORED and read.quiet

    run(main())


@pytest.mark.parametrize("path", ["unix", "tcp"])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_peer_that_dies_after_it_has_claimed(path: str, kind: str, worker: MakeWorker) -> None:
    peer = worker(path)

    async def main() -> None:
        async with over(path) as connector:
            passive = claimed_and_stopped(connector, peer, kind)
            peer.kill()
            with pytest.raises(towline.Disconnected) as caught:
                await passive.wait_for_completion()
            assert caught.value.peer == "peer"
            assert passive.status is OperationStatus.ERRORED

    asyncio.run(main())


def test_a_dead_peers_metadata_is_refused(worker: MakeWorker) -> None:
    peer = worker("unix")
    metadata = RdmaMetadata.from_json(peer.tell("readable 100"))
    peer.kill()
    with over("unix") as connector:
        with pytest.raises(towline.Disconnected):
            connector.begin_read_sync(metadata, Descriptor(bytearray(100)))
        with pytest.raises(towline.Disconnected):
            asyncio.run(connector.begin_read(metadata, Descriptor(bytearray(100))))


def test_deadlines_end_operations(worker: MakeWorker) -> None:
    peer = worker("unix")
    with over("unix", timeout=1, stall_timeout=0.2) as connector:
        read = stalled_read(connector, peer)
        with pytest.raises(towline.Timeout):
            read.wait()
        assert read.status is OperationStatus.ERRORED
        peer.resume()
    other = worker("unix")
    with over("unix", timeout=1, stall_timeout=0.2) as connector:
        readable = claimed_and_stopped(connector, other, "read")
        with pytest.raises(towline.Timeout):
            readable.wait()
        assert readable.status is OperationStatus.ERRORED
    with Connector(unclaimed_timeout=0.05) as connector:
        for unclaimed in (
            connector.create_readable_sync(Descriptor(b"x")),
            connector.create_writable_sync(Descriptor(bytearray(1))),
            connector.create_readable_sync(Descriptor(b"x"), unclaimed_timeout=0),
        ):
            with pytest.raises(towline.Timeout):
                unclaimed.wait(30)
            assert unclaimed.status is OperationStatus.ERRORED
        patient = connector.create_readable_sync(Descriptor(b"x"), unclaimed_timeout=None)
        with pytest.raises(towline.Timeout, match="goes on"):
            patient.wait(0.2)
        assert not patient.done()


def test_waiting_can_be_given_up_while_the_operation_goes_on(run: Run) -> None:
    async def main() -> None:
        async with Connector() as connector:
            readable = await connector.create_readable(Descriptor(b"bytes"))
            for _ in range(50):
                with pytest.raises(towline.Timeout, match="goes on"):
                    await readable.wait_for_completion(timeout=0.001)
            with pytest.raises(TimeoutError):
                readable.wait(0)
            assert readable.status is OperationStatus.INITIALIZED
            target = bytearray(5)
            await (await connector.begin_read(readable.metadata(), Descriptor(target)))
            await readable.wait_for_completion(timeout=30)

    run(main())


def test_cancelling_the_task_cancels_the_operation(run: Run, worker: MakeWorker) -> None:
    peer = worker("unix")

    async def main() -> None:
        async with over("unix") as connector:
            readable = await connector.create_readable(Descriptor(b"bytes"))
            read = stalled_read(connector, peer)
            for operation in (readable, read):
                task = asyncio.ensure_future(operation.wait_for_completion())
                # It has come to its only await then.
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert operation.status is OperationStatus.CANCELLED and operation.quiet
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await (await connector.create_readable(Descriptor(b"x")))
        peer.resume()

    run(main())


def test_cancelling_the_task_of_a_claim_gives_it_back(worker: MakeWorker) -> None:
    peer = worker("unix")

    async def main() -> None:
        async with over("unix") as connector:
            metadata = RdmaMetadata.from_json(peer.tell("readable 1000"))
            target = bytearray(1000)
            peer.stop()
            task = asyncio.ensure_future(connector.begin_read(metadata, Descriptor(target)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            peer.resume()
            assert target == bytes(1000)
            # A new one works: the peer is as it was.
            metadata = RdmaMetadata.from_json(peer.tell("readable 1000"))
            await (await connector.begin_read(metadata, Descriptor(target)))
            assert target != bytes(1000)

    asyncio.run(main())


def test_a_second_claimer_is_refused() -> None:
    with Connector("one") as one, Connector("two") as two, Connector("three") as three:
        readable = one.create_readable_sync(Descriptor(b"bytes"))
        metadata = readable.metadata()
        two.begin_read_sync(metadata, Descriptor(bytearray(5))).wait()
        readable.wait()
        with pytest.raises((towline.Invalid, towline.Stale)):
            three.begin_read_sync(metadata, Descriptor(bytearray(5)))


def test_a_second_claimer_is_refused_while_the_first_one_is_at_work(worker: MakeWorker) -> None:
    peer = worker("unix")
    with over("unix") as connector, over("unix", "second") as second:
        readable = claimed_and_stopped(connector, peer, "read")
        with pytest.raises(towline.Invalid, match="claim"):
            second.begin_read_sync(readable.metadata(), Descriptor(bytearray(LARGE)))
        assert readable.status is OperationStatus.IN_PROGRESS


def test_closing_the_connector_ends_its_operations() -> None:
    connector = Connector()
    readable = connector.create_readable_sync(Descriptor(b"bytes"))
    waited: list[BaseException] = []

    def wait() -> None:
        try:
            readable.wait()
        except towline.Error as error:
            waited.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    connector.close()
    thread.join()
    assert len(waited) == 1 and readable.done()
    connector.close()


def test_other_event_loops_watch_a_descriptor() -> None:
    import select

    queue = towline.CompletionQueue()
    with Connector() as connector:
        readable = connector.create_readable_sync(Descriptor(b"bytes"))
        queue.add(readable)
        assert select.select([queue], [], [], 0)[0] == [] and len(queue) == 1
        target = bytearray(5)
        read = connector.begin_read_sync(readable.metadata(), Descriptor(target))
        queue.add(read)
        ended: list[object] = []
        while len(ended) < 2:
            assert select.select([queue], [], [], 30)[0] == [queue]
            ended += queue.ready()
        assert set(map(id, ended)) == {id(readable), id(read)} and target == b"bytes"


def test_ten_thousand_operations_leave_nothing_behind() -> None:
    async def main() -> None:
        one, other = over("mapped", "one"), over("mapped", "other")
        source, target = towline.empty(4096), bytearray(4096)

        async def move(count: int) -> None:
            for number in range(count):
                source[:8] = number % 251
                readable = await one.create_readable(Descriptor(source))
                read = await other.begin_read(readable.metadata(), Descriptor(target))
                await read
                await readable
                assert target[0] == number % 251

        await move(1000)
        before, held, memory = usage(), _native.held(), resident()
        await move(9000)
        after = usage()
        assert after[0] <= before[0] and after[1] <= before[1] + 2
        assert _native.held() == held
        assert resident() - memory < 4 << 20
        assert one.endpoint.stats().regions == other.endpoint.stats().regions == 0
        one.close()
        other.close()

    asyncio.run(main())


PENDING = """
import asyncio, os, sys, threading, time, signal
import towline
connector = towline.Connector("leaver")
readable = connector.create_readable_sync(towline.Descriptor(bytearray(1000)))
metadata = towline.RdmaMetadata.from_json(sys.argv[1])
pid = int(sys.argv[2])
async def wait(): await readable
"""

ENDINGS = {
    "by falling off the end": ("", 0),
    "by an exit code": ("sys.exit(7)", 7),
    "while a daemon thread waits": (
        "threading.Thread(target=readable.wait, daemon=True).start(); time.sleep(0.1)",
        0,
    ),
    "while a daemon thread runs a loop": (
        "threading.Thread(target=lambda: asyncio.run(wait()), daemon=True).start(); time.sleep(0.1)",
        0,
    ),
    "with a read that does not move": (
        """
read = connector.begin_read_sync(metadata, towline.Descriptor(bytearray(1 << 20)))
os.kill(pid, signal.SIGSTOP)
""",
        0,
    ),
    "with a claim in flight": (
        """
os.kill(pid, signal.SIGSTOP)
loop = asyncio.new_event_loop()
task = loop.create_task(connector.begin_read(metadata, towline.Descriptor(bytearray(1 << 20))))
loop.call_later(0.05, loop.stop)
loop.run_forever()
task._log_destroy_pending = False
""",
        0,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_exits_with_operations_pending(ending: str, worker: MakeWorker) -> None:
    source, code = ENDINGS[ending]
    peer = worker("unix")
    metadata = peer.tell(f"readable {1 << 20}")
    run_python(PENDING + source, metadata, str(peer.process.pid), code=code)


def test_a_keyboard_interrupt_ends_a_wait() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            """
import signal, towline
# A program that is started in the background by a shell inherits that it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
connector = towline.Connector()
readable = connector.create_readable_sync(towline.Descriptor(b"x"))
try:
    print("waiting", flush=True)
    readable.wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
""",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait() == 0


def test_a_forked_child_gets_errors_and_the_parent_goes_on() -> None:
    connector = Connector("forker")
    descriptor = Descriptor(bytearray(8))
    readable = connector.create_readable_sync(descriptor)
    metadata = readable.metadata()
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            calls: list[Callable[[], object]] = [
                lambda: Connector("child"),
                lambda: Descriptor(b"x"),
                lambda: connector.create_readable_sync(descriptor),
                lambda: connector.begin_read_sync(metadata, descriptor),
                lambda: connector.endpoint,
                lambda: connector.close(),
                lambda: descriptor.register_memory(connector),
                lambda: descriptor.is_registered,
                lambda: readable.wait(),
                lambda: readable.status,
                lambda: readable.cancel(),
                lambda: readable.metadata(),
                lambda: asyncio.run(readable.wait_for_completion()),
            ]
            for call in calls:
                try:
                    call()
                except towline.Unavailable:
                    continue
                os._exit(2)
            del calls, readable, descriptor, connector
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    target = bytearray(8)
    connector.begin_read_sync(metadata, Descriptor(target)).wait()
    readable.wait()
    connector.close()
