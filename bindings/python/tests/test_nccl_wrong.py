"""Bad input to registrations and one-sided calls: `NcclInvalid` that names the argument, on every rank, and nobody hangs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from ranks import CudaArray, CudaTensor, config, every

from towline import _native, nccl


def read_only() -> Any:
    numbers = numpy.zeros(64, numpy.uint8)
    numbers.setflags(write=False)
    return numbers


# Buffers of 64 bytes that cannot be a window, and what the error says of them.
BUFFERS: dict[str, tuple[Callable[[], Any], str]] = {
    "gaps": (lambda: numpy.zeros((8, 16), numpy.uint8)[:, :8], "buffer: .*not contiguous"),
    "transposed": (lambda: numpy.zeros((8, 4), numpy.float32)[::2].T, "buffer: .*not contiguous"),
    "on a GPU (DLPack)": (CudaTensor, "buffer: .*host memory"),
    "on a GPU (CAI)": (CudaArray, "buffer: .*host memory"),
    "read-only": (read_only, "buffer: .*read-only"),
    "bytes": (lambda: bytes(64), "buffer: .*read-only"),
    "no bytes": (lambda: numpy.zeros(0), "buffer: a window of no bytes"),
    "objects": (lambda: numpy.array([object()]), "buffer: its elements are Python objects"),
    "foreign byte order": (lambda: numpy.zeros(16, ">f4"), "buffer: .*byte order"),
}


@pytest.mark.parametrize("what", list(BUFFERS))
def test_a_buffer_that_one_rank_cannot_register_is_invalid_on_every_rank(what: str) -> None:
    make, pattern = BUFFERS[what]

    def body(comm: nccl.Communicator) -> None:
        with pytest.raises(nccl.NcclInvalid, match=pattern) as raised:
            comm.register_window(make() if comm.rank == 1 else nccl.empty(64))
        assert raised.value.ranks == (1,)
        assert comm.register_window(nccl.empty(64)) is not None, "the communicator is not usable any more"
        comm.barrier()

    every(3, body)


@pytest.mark.parametrize("what", [name for name in BUFFERS if name != "no bytes"])
def test_a_buffer_that_cannot_be_registered_is_named(what: str) -> None:
    make, pattern = BUFFERS[what]
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    held = _native.held()
    with pytest.raises(nccl.NcclInvalid, match=pattern):
        comm.register_buffer(make())
    assert _native.held() == held and not comm._resources
    comm.destroy()


def test_what_has_no_memory_is_a_type_error_and_the_others_learn_of_it() -> None:
    def body(comm: nccl.Communicator) -> None:
        with pytest.raises(TypeError if comm.rank == 0 else nccl.NcclInvalid, match="buffer: NoneType"):
            comm.register_window(None if comm.rank == 0 else nccl.empty(64))
        comm.barrier()

    every(2, body)


@pytest.mark.parametrize("flags", [4, 1 << 31, 1 << 32, -1])
def test_unknown_flags_are_invalid_on_every_rank(flags: int) -> None:
    def body(comm: nccl.Communicator) -> None:
        with pytest.raises(nccl.NcclInvalid, match="flags"):
            comm.register_window(nccl.empty(64), flags if comm.rank == 0 else None)
        comm.barrier()

    every(2, body)


def test_flags_that_differ_are_invalid_on_every_rank() -> None:
    def body(comm: nccl.Communicator) -> None:
        with pytest.raises(nccl.NcclInvalid, match="flags differ"):
            comm.register_window(nccl.empty(64), nccl.WindowFlag(comm.rank))
        comm.barrier()

    every(2, body)


# One-sided calls that are refused before anything moves, on a window of 64 bytes and two ranks.
ACCESSES: dict[str, tuple[Callable[[nccl.Communicator, Any], Any], str]] = {
    "past the end": (lambda c, w: c.put(numpy.zeros(9), 1, w), "past the end of 64"),
    "an offset past the end": (lambda c, w: c.put(numpy.zeros(1), 1, w, 8), "past the end of 64"),
    "nothing past the end": (lambda c, w: c.put(numpy.zeros(0), 1, w, 9), "past the end of 64"),
    "get past the end": (lambda c, w: c.get(numpy.zeros(2), 1, w, 7), "past the end of 64"),
    "a negative offset": (lambda c, w: c.put(numpy.zeros(1), 1, w, -1), "peer_window_offset"),
    "a huge offset": (lambda c, w: c.put(numpy.zeros(1), 1, w, 1 << 62), "peer_window_offset"),
    "no such peer": (lambda c, w: c.put(numpy.zeros(1), 2, w), "no rank 2"),
    "a negative peer": (lambda c, w: c.get(numpy.zeros(1), -1, w), "peer: there is no rank -1"),
    "gaps": (lambda c, w: c.put(numpy.zeros(4)[::2], 1, w), "local_buffer: .*contiguous"),
    "a GPU": (lambda c, w: c.put(CudaTensor(), 1, w), "local_buffer: .*host memory"),
    "read-only target": (lambda c, w: c.get(bytes(8), 1, w), "local_buffer: .*read-only"),
    "an odd word": (lambda c, w: c.fetch_add(1, w, 8, 1), "past the end of 64"),
    "a large number": (lambda c, w: c.fetch_add(1, w, 0, 1 << 64), "add: .*64 bits"),
    "a counter": (lambda c, w: c.put_signal(numpy.zeros(1), 1, w, 0, 99), "no counter 99"),
    "a context": (lambda c, w: c.signal(1, 0, 99), "context 99"),
    "a negative counter": (lambda c, w: c.signal(1, -1), "signal_index: there is no -1"),
    "flags": (lambda c, w: c.put_signal(numpy.zeros(1), 1, w, flags=1), "flags: 1"),
    "no window": (lambda c, w: c.put(numpy.zeros(1), 1, None), "peer_window"),
    "a number": (lambda c, w: c.put(numpy.zeros(1), 1, w.handle), "peer_window"),
    "no signals": (lambda c, w: c.wait_signal([]), "desc: the list is empty"),
    "a count of none": (lambda c, w: c.wait_signal(nccl.WaitSignalDesc(1, 0)), "at least 1|less than 1|no signal"),
    "a negative count": (lambda c, w: c.wait_signal(nccl.WaitSignalDesc(1, -1)), "op_count"),
    "a wait for nobody": (lambda c, w: c.wait_signal(nccl.WaitSignalDesc(5)), "no rank 5"),
    "a view of nobody": (lambda c, w: w.peer_view(2), "no rank 2"),
}


@pytest.mark.parametrize("what", list(ACCESSES))
def test_a_wrong_access_is_invalid_and_touches_nothing(what: str) -> None:
    access, pattern = ACCESSES[what]

    def body(comm: nccl.Communicator) -> None:
        memory = nccl.empty(64)
        window = comm.register_window(memory)
        with pytest.raises(nccl.NcclInvalid, match=pattern):
            access(comm, window)
        comm.fence(window)
        assert not memory.any() and comm.signals(1 - comm.rank) == 0

    every(2, body)


def test_the_size_that_counts_is_that_of_the_target() -> None:
    def body(comm: nccl.Communicator) -> None:
        memory = nccl.empty(64 << comm.rank)
        window = comm.register_window(memory, unequal_sizes=True)
        comm.fence(window)
        if comm.rank == 0:
            comm.put(numpy.ones(128, numpy.uint8), 1, window)
        else:
            with pytest.raises(nccl.NcclInvalid, match="past the end of 64"):
                comm.put(numpy.ones(128, numpy.uint8), 0, window)
        comm.fence(window)
        assert memory.all() == (comm.rank == 1)

    every(2, body)


def test_a_window_of_another_communicator_is_refused() -> None:
    first, second = (nccl.Communicator.init(1, 0, nccl.get_unique_id(), config()) for _ in range(2))
    window = first.register_window(nccl.empty(64))
    with pytest.raises(nccl.NcclInvalid, match="another communicator"):
        second.put(numpy.zeros(1), 0, window)
    for comm in (first, second):
        comm.destroy()
    with pytest.raises(nccl.NcclInvalid, match="destroyed"):
        first.put(numpy.zeros(1), 0, window)


def test_everything_is_refused_after_the_end() -> None:
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    window = comm.register_window(nccl.empty(64))
    handle = comm.register_buffer(nccl.empty(64))
    scaled = comm.create_pre_mul_sum(2)
    assert window is not None
    view = window.peer_view(0)
    comm.destroy()
    numbers = numpy.zeros(1)
    calls: list[Callable[[], Any]] = [
        lambda: comm.allreduce(numbers, numbers),
        lambda: comm.put_signal(numbers, 0, window),
        lambda: comm.wait_signal(nccl.WaitSignalDesc(0)),
        lambda: comm.register_buffer(numbers),
        lambda: comm.rank,
        lambda: window.peer_view(0),
        lambda: window.size_of(0),
        lambda: view.read(),
        lambda: handle.handle,
        lambda: scaled.op,
    ]
    for call in calls:
        with pytest.raises(nccl.NcclInvalid):
            call()
    for close in (window.close, handle.close, scaled.close, view.close, comm.destroy):
        close()


def test_a_closed_window_takes_no_more_calls() -> None:
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    window = comm.register_window(nccl.empty(64))
    assert window is not None
    window.close()
    with pytest.raises(nccl.NcclInvalid, match="closed"):
        comm.put(numpy.zeros(1), 0, window)
    comm.destroy()


def test_one_buffer_can_be_registered_many_times() -> None:
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    numbers = numpy.zeros(64)
    gone = weakref.ref(numbers)
    handles = [comm.register_buffer(numbers) for _ in range(5)] + [comm.register_buffer(numbers[8:16])]
    assert len({handle.handle for handle in handles}) == 1, "a part shares the number of the whole"
    assert handles[-1].size == 64
    del numbers
    for handle in handles:
        gc.collect()
        assert gone() is not None
        handle.close()
    assert gone() is None
    comm.destroy()


def test_a_bytearray_cannot_be_resized_while_it_is_registered() -> None:
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    memory = bytearray(64)
    with comm.register_buffer(memory), pytest.raises(BufferError):
        memory.extend(b"x")
    memory.extend(b"x")
    comm.destroy()
