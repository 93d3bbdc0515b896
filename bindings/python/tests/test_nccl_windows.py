"""Windows and groups: puts, gets, signals, atomics, views; awaited, waited for, and inside groups."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy
import pytest
from ranks import config, every, outcomes

import towline
from towline import nccl


def window_of(
    comm: nccl.Communicator, buffer: Any, flags: nccl.WindowFlag | None = None
) -> nccl.RegisteredWindowHandle:
    window = comm.register_window(buffer, flags)
    assert window is not None
    return window


@pytest.fixture(params=["shared", "requests"])
def settings(request: pytest.FixtureRequest) -> nccl.NCCLConfig:
    """Ranks that map each other's memory, and ranks that send requests."""
    return config() if request.param == "shared" else config(require="tcp")


def test_a_put_lands_at_an_offset_in_elements(settings: nccl.NCCLConfig) -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = nccl.empty(8, "float64")
        window = window_of(comm, numbers)
        peer = 1 - comm.rank
        done = comm.put(numpy.array([1.5, 2.5]) * (comm.rank + 1), peer, window, 3)
        assert done.done() and done.wait() is None and done.result() is None
        comm.fence(window)
        assert numbers.tolist() == [0, 0, 0, 1.5 * (peer + 1), 2.5 * (peer + 1), 0, 0, 0]
        comm.fence(window)
        # The offset counts elements of the local buffer, not of the window.
        comm.put(numpy.array([7], numpy.uint8), peer, window, 63)
        comm.fence(window)
        assert numbers.view(numpy.uint8)[63] == 7
        comm.fence(window)

    every(2, body, settings)


def test_a_get_reads_what_is_there(settings: nccl.NCCLConfig) -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = nccl.empty(1000, "int32")
        numbers[:] = numpy.arange(1000) + 1000 * comm.rank
        window = window_of(comm, numbers)
        target = numpy.zeros(10, numpy.int32)
        comm.get(target, 1 - comm.rank, window, 990)
        assert target.tolist() == list(range(990 + 1000 * (1 - comm.rank), 1000 + 1000 * (1 - comm.rank)))
        comm.get(target[:4], comm.rank, window, 0)
        assert target[0] == 1000 * comm.rank, "a rank reaches itself"
        comm.fence(window)

    every(2, body, settings)


def test_data_is_visible_before_its_signal(settings: nccl.NCCLConfig) -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = nccl.empty(4096, "int64")
        window = window_of(comm, numbers)
        for turn in range(1, 20):
            if comm.rank == 0:
                comm.put_signal(numpy.full(4096, turn), 1, window, signal_index=3, context=1)
                comm.wait_signal(nccl.WaitSignalDesc(1))
            else:
                comm.wait_signal(nccl.WaitSignalDesc(0, signal_index=3, context=1))
                assert (numbers == turn).all()
                comm.signal(0)
        comm.barrier()

    every(2, body, settings)


def test_signals_are_counted_and_remembered() -> None:
    def body(comm: nccl.Communicator) -> None:
        window = window_of(comm, nccl.empty(64))
        if comm.rank == 0:
            for index in (0, 0, 0, 5):
                comm.signal(1, index)
            comm.put_signal(numpy.zeros(0), 1, window, signal_index=5)  # nothing only signals
            comm.barrier()
        else:
            comm.barrier()
            assert (comm.signals(0), comm.signals(0, 5)) == (3, 2)
            comm.wait_signal(nccl.WaitSignalDesc(0, op_count=2))
            comm.wait_signal([nccl.WaitSignalDesc(0), nccl.WaitSignalDesc(0, 2, signal_index=5)])
            with pytest.raises(nccl.NCCLTimeout) as raised:
                comm.signaled(nccl.WaitSignalDesc(0)).wait(0.05)
            assert "0.05" in str(raised.value)
        comm.barrier()

    every(2, body)


def test_a_signal_that_never_comes_ends_at_the_deadline_and_names_its_source() -> None:
    def body(comm: nccl.Communicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(nccl.NCCLTimeout) as raised:
                comm.wait_signal([nccl.WaitSignalDesc(0, signal_index=1), nccl.WaitSignalDesc(1)])
            assert raised.value.ranks == (0, 1)
        else:
            done.wait(10)
        done.set()

    done = threading.Event()

    every(2, body, config(timeout=1.0))


def test_words_are_added_to_and_swapped_atomically(settings: nccl.NCCLConfig) -> None:
    def body(comm: nccl.Communicator) -> list[int]:
        words = nccl.empty(4, "uint64")
        window = window_of(comm, words)
        found = [comm.fetch_add(0, window, 2, 1).wait() for _ in range(50)]
        comm.fence(window)
        if comm.rank == 0:
            assert words[2] == 150
            assert comm.compare_swap(0, window, 2, 150, 7).wait() == 150
            assert comm.compare_swap(0, window, 2, 150, 8).wait() == 7
            assert comm.fetch_add(0, window, 2, -7).wait() == 7 and words[2] == 0
        comm.fence(window)
        return found

    found = every(3, body, settings)
    assert sorted(sum(found, [])) == list(range(150))


def test_blocks_move_by_layout_and_index(settings: nccl.NCCLConfig) -> None:
    def body(comm: nccl.Communicator) -> None:
        pages = nccl.empty((8, 16), "uint8")
        window = window_of(comm, pages)
        layout = towline.Layout.contiguous(128, 16)
        if comm.rank == 0:
            mine = numpy.arange(128, dtype=numpy.uint8).reshape(8, 16)
            comm.put(mine, 1, window, blocks=(layout, [6, 1], layout, [0, 7]))
            comm.put_signal(mine, 1, window, blocks=(layout, [3], layout, [2]))
            back = numpy.zeros((8, 16), numpy.uint8)
            comm.get(back, 1, window, blocks=(layout, [6], layout, [4]))
            assert (back[4] == mine[0]).all()
            with pytest.raises(nccl.NcclInvalid):
                comm.put(mine, 1, window, blocks=(layout, [8], layout, [0]))
        else:
            comm.wait_signal(nccl.WaitSignalDesc(0))
            assert [int(row[0]) for row in pages] == [0, 112, 0, 32, 0, 0, 0, 0]
        comm.fence(window)

    every(2, body, settings)


def test_a_view_copies_in_and_out_and_ends_at_the_close() -> None:
    def body(comm: nccl.Communicator) -> None:
        words = nccl.empty(8, "uint64")
        words[:] = comm.rank + 1
        window = window_of(comm, words)
        peer = 1 - comm.rank
        view = window.peer_view(peer)
        assert (view.rank, len(view), view.load(8)) == (peer, 64, peer + 1)
        comm.barrier()
        view.write(numpy.array([9.0]), 16)
        view.store(5, 24)
        comm.barrier()
        assert words.view(numpy.float64)[2] == 9.0 and words[3] == 5
        assert view.read(0, 8) == int(peer + 1).to_bytes(8, "little") and len(view.read(56)) == 8
        for wrong in (lambda: view.read(60, 8), lambda: view.read(-1), lambda: view.load(4)):
            with pytest.raises(nccl.NcclInvalid):
                wrong()
        comm.barrier()
        with comm.peer_view(window, peer) as other:
            assert other.read(8, 1)
        assert other.closed
        with pytest.raises(nccl.NcclInvalid, match="closed"):
            other.read()
        comm.barrier()
        window.close()
        with pytest.raises(nccl.NcclInvalid, match="closed"):
            view.read()
        comm.barrier()

    every(2, body)


def test_a_view_needs_memory_that_is_shared() -> None:
    def body(comm: nccl.Communicator) -> str:
        window = window_of(comm, nccl.empty(64))
        with pytest.raises(NotImplementedError):
            window.peer_view(1 - comm.rank)
        comm.barrier()
        return window.path(1 - comm.rank)

    assert every(2, body, config(require="tcp")) == ["tcp", "tcp"]


def test_a_rank_that_closes_its_window_gives_the_others_an_error_and_no_bytes() -> None:
    def body(comm: nccl.Communicator) -> None:
        window = window_of(comm, nccl.empty(64))
        if comm.rank == 1:
            window.close()
            comm.barrier()
        else:
            comm.barrier()
            with pytest.raises(nccl.NCCLStale) as raised:
                comm.put(bytes(8), 1, window)
            assert raised.value.ranks == (1,)
        comm.barrier()

    every(2, body)


@pytest.mark.parametrize("blocking", [True, False])
def test_one_sided_calls_and_collectives_can_be_awaited(blocking: bool) -> None:
    async def talk(comm: nccl.Communicator) -> list[float]:
        numbers = nccl.empty(16, "float32")
        window = comm.register_window(numbers)
        assert window is not None
        assert await window is window and window.handle != 0
        peer = 1 - comm.rank
        arrived = comm.signaled(nccl.WaitSignalDesc(peer))
        await comm.put_signal(numpy.full(16, comm.rank + 1, numpy.float32), peer, window)
        await asyncio.wait_for(arrived, 10)
        assert (numbers == peer + 1).all()
        word = await comm.fetch_add(comm.rank, window, 0, 0)
        assert isinstance(word, int)
        await comm.barrier()
        total = numpy.zeros(16, numpy.float32)
        await comm.allreduce(numbers, total, nccl.SUM)
        await comm.fence(window)
        return [float(number) for number in total[:2]]

    assert every(2, lambda comm: asyncio.run(talk(comm)), config(blocking=blocking)) == [[3.0, 3.0]] * 2


def test_a_non_blocking_communicator_returns_at_once() -> None:
    unique_id = nccl.get_unique_id()
    comms = [nccl.Communicator.init(2, rank, unique_id, config(blocking=False)) for rank in (0, 1)]
    numbers = [numpy.full(1000, rank + 1.0) for rank in (0, 1)]
    first = comms[0].allreduce(numbers[0], numbers[0])
    assert not first.done() and comms[0].get_async_error() is nccl.Result.IN_PROGRESS
    with pytest.raises(nccl.NcclInvalid, match="in flight"):
        first.result()
    with pytest.raises(TimeoutError):
        first.wait(0.05)
    assert "in flight" in repr(first)
    second = comms[1].allreduce(numbers[1], numbers[1])
    first.wait()
    second.wait()
    assert (numbers[0] == 3).all() and (numbers[1] == 3).all()
    for comm in comms:
        comm.synchronize()
        assert comm.get_async_error() is nccl.Result.SUCCESS
        comm.destroy()


def test_a_failure_of_a_non_blocking_communicator_is_told_by_its_operation_and_its_state() -> None:
    unique_id = nccl.get_unique_id()
    comms = [nccl.Communicator.init(2, rank, unique_id, config(blocking=False)) for rank in (0, 1)]
    windows = [comm.register_window(nccl.empty(64 << rank)) for rank, comm in enumerate(comms)]
    for comm, window in zip(comms, windows, strict=True):
        assert window is not None
        with pytest.raises(nccl.NcclInvalid, match="sizes differ"):
            window.wait()
        assert window.handle == 0
        while comm.get_async_error() is nccl.Result.IN_PROGRESS:
            pass
        assert comm.get_async_error() is nccl.Result.INVALID_ARGUMENT
        assert "sizes differ" in comm.get_last_error()
    for comm in comms:
        comm.destroy()


def test_a_completion_queue_tells_of_operations_too() -> None:
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config(blocking=False))
    queue = towline.CompletionQueue()
    barrier = comm.barrier()
    queue.add(barrier)
    barrier.wait()
    while not (ready := queue.ready()):
        pass
    assert ready == [barrier]
    comm.destroy()


# ---- groups --------------------------------------------------------------------------------------------------


def test_one_thread_drives_several_ranks_by_a_group() -> None:
    comms = nccl.Communicator.init_all(3, config())
    numbers = [numpy.full(4, rank, numpy.int32) for rank in range(3)]
    with nccl.group():
        calls = [comm.allreduce(one, one) for comm, one in zip(comms, numbers, strict=True)]
        assert not any(call.done() for call in calls)
        with pytest.raises(nccl.NcclInvalid, match="end the group first"):
            calls[0].wait()
    assert all(call.done() for call in calls) and all((one == 3).all() for one in numbers)
    for comm in comms:
        comm.destroy()


def test_messages_in_a_group_cross() -> None:
    def body(comm: nccl.Communicator) -> int:
        mine = numpy.array([comm.rank + 10])
        theirs = numpy.zeros(1, numpy.int64)
        with nccl.group():
            comm.send(mine, (comm.rank + 1) % 3)
            comm.recv(theirs, (comm.rank + 2) % 3)
        return int(theirs[0])

    assert every(3, body) == [12, 10, 11]


def test_a_group_that_is_left_by_an_exception_launches_nothing() -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = numpy.ones(4)
        with pytest.raises(KeyError), nccl.group():
            call = comm.allreduce(numbers, numbers)
            comm.signal(1 - comm.rank)
            raise KeyError("unforeseen")
        with pytest.raises(nccl.NCCLCanceled, match="never started"):
            call.result()
        comm.barrier()
        assert comm.signals(1 - comm.rank) == 0 and (numbers == 1).all()
        comm.allreduce(numbers, numbers)
        assert (numbers == 2).all(), "the communicator is not usable any more"

    every(2, body)


@pytest.mark.parametrize("wrong", ["buffer", "peer", "window"])
def test_a_call_that_is_refused_inside_a_group_keeps_it_from_being_launched(wrong: str) -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = numpy.ones((4, 4))
        nccl.group_start()
        comm.signal(1 - comm.rank)
        with pytest.raises(nccl.NcclInvalid) as raised:
            if wrong == "buffer":
                comm.allreduce(numbers[:, 1], numbers[:, 1])
            elif wrong == "peer":
                comm.signal(-1)
            else:
                comm.put(numbers, 0, None)
        with pytest.raises(nccl.NcclInvalid) as ended:
            nccl.group_end()
        assert raised.value.msg in ended.value.msg
        comm.barrier()
        assert comm.signals(1 - comm.rank) == 0

    every(2, body)


def test_groups_nest_and_an_end_needs_a_start() -> None:
    with pytest.raises(nccl.NcclInvalid, match="no group"):
        nccl.group_end()
    with pytest.raises(nccl.NcclInvalid, match="simulate"):
        nccl.group_end(simulate=True)

    def body(comm: nccl.Communicator) -> None:
        with nccl.group():
            with nccl.group():
                comm.signal(0)
            assert comm.signals(comm.rank) == 0
            with pytest.raises(nccl.NcclInvalid, match="inside a group"):
                comm.split(0)

    with pytest.raises(nccl.NcclInvalid, match="inside a group"):
        every(1, body)


def test_a_window_in_a_group_that_fails_stays_without_a_handle() -> None:
    def body(comm: nccl.Communicator) -> None:
        with pytest.raises(nccl.NcclInvalid), nccl.group():
            window = comm.register_window(nccl.empty(64))
            comm.signal(-1)
        assert window is not None and window.handle == 0
        window.close()
        comm.barrier()

    every(2, body)


def test_operations_outlive_what_they_touch() -> None:
    found = outcomes(2, _send_what_is_forgotten, config(blocking=False))
    assert found == [0, 1000], found


def _send_what_is_forgotten(comm: nccl.Communicator) -> int:
    target = numpy.zeros(1000)
    if comm.rank == 0:
        comm.send(numpy.ones(1000), 1)
    else:
        comm.recv(target, 0).wait()
    comm.synchronize()
    return int(target.sum())


def test_a_buffer_that_is_closed_during_a_collective_is_let_go_of_after_it() -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = nccl.empty(1 << 16, "float32")
        numbers[:] = comm.rank + 1
        handle = comm.register_buffer(numbers)
        if comm.rank == 0:
            closing = threading.Thread(target=handle.close)
            started = comm.allreduce(numbers, numbers)
            closing.start()
            started.wait()
            closing.join()
        else:
            comm.allreduce(numbers, numbers).wait()
        assert (numbers == 3).all() and handle.is_valid == (comm.rank == 1)
        comm.synchronize()

    every(2, body, config(blocking=False))


def test_a_destroyed_communicator_lets_go_of_buffers_after_the_work_in_flight() -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = nccl.empty(1 << 16, "float32")
        numbers[:] = comm.rank + 1
        handle = comm.register_buffer(numbers)
        if comm.rank == 1:
            time.sleep(0.1)  # long after rank 0 has begun to destroy
        started = comm.allreduce(numbers, numbers)
        comm.destroy()
        assert not handle.is_valid and started.done() and (numbers == 3).all()

    every(2, body, config(blocking=False))


def test_an_aborted_communicator_ends_the_work_in_flight_before_it_lets_go_of_buffers() -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = nccl.empty(1 << 16, "float32")
        handle = comm.register_buffer(numbers)
        if comm.rank == 1:
            comm.signal(0).wait()
            with pytest.raises(nccl.NCCLError) as raised:
                comm.wait_signal(nccl.WaitSignalDesc(0)).wait()
            assert raised.value.ranks == (0,)
            return
        comm.wait_signal(nccl.WaitSignalDesc(1)).wait()
        started = comm.allreduce(numbers, numbers)  # rank 1 never comes
        comm.abort()
        assert not handle.is_valid and started.done()
        with pytest.raises(nccl.NCCLError):
            started.wait()
        assert not numbers.any(), "nothing has written to memory that was given back"

    every(2, body, config(blocking=False))


def test_a_timeout_gives_up_a_wait_for_signals() -> None:
    async def wait(comm: nccl.Communicator) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(comm.signaled(nccl.WaitSignalDesc(0)), 0.05)
        comm.signal(0)
        await asyncio.wait_for(comm.signaled(nccl.WaitSignalDesc(0)), 10)
        comm.signal(0)
        task = asyncio.ensure_future(_awaited(comm.signaled(nccl.WaitSignalDesc(0, 2))))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        comm.wait_signal(nccl.WaitSignalDesc(0))  # what came stays for the next

    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    asyncio.run(wait(comm))
    comm.destroy()


async def _awaited(operation: nccl.Operation[None]) -> None:
    await operation
