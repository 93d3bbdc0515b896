"""The page on memory registration in nccl4py's documentation, sentence by sentence: each test says which one it holds."""

from __future__ import annotations

import array
import enum
import gc
import inspect
import time
import typing
import weakref
from typing import Any

import numpy
import pytest
from ranks import CudaArray, CudaTensor, config, every, outcomes

from towline import _native, nccl


class Tensor:
    """Memory by DLPack alone."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self.source.__dlpack__(**options)


class Array:
    """Memory by the array interface alone."""

    def __init__(self, source: Any) -> None:
        self.source = source

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return dict(self.source.__array_interface__)


def every_form(numbers: Any) -> tuple[Any, ...]:
    """24 bytes as an array, a buffer, and everything that is like one."""
    return (
        numbers,
        Tensor(numbers),
        Array(numbers),
        nccl.mem_alloc(24),
        nccl.empty(6, "float32"),
        bytearray(24),
        array.array("f", range(6)),
        memoryview(bytearray(24)),
    )


@pytest.fixture
def alone() -> Any:
    with nccl.Communicator.init(1, 0, nccl.get_unique_id(), config()) as comm:
        yield comm


# ---- the page ------------------------------------------------------------------------------------------------


def test_registration_is_by_methods_of_the_communicator() -> None:
    """"Methods on Communicator for registering buffers and windows for zero-copy and RMA operations.\""""
    for name in ("register_buffer", "register_window"):
        assert inspect.isfunction(getattr(nccl.Communicator, name))


def test_the_handle_classes_are_public_and_documented() -> None:
    """"The returned handle classes are documented under Memory Management.\""""
    for handle in (nccl.RegisteredBufferHandle, nccl.RegisteredWindowHandle):
        assert handle.__name__ in nccl.__all__ and handle.__doc__
        for name in ("handle", "size", "is_valid", "close"):
            assert inspect.getdoc(getattr(handle, name)), name


# ---- register_buffer -----------------------------------------------------------------------------------------


def test_register_buffer_takes_one_buffer_and_returns_a_handle(alone: nccl.Communicator) -> None:
    """"register_buffer(buffer) RegisteredBufferHandle" and "Returns: RegisteredBufferHandle for the registered buffer.\""""
    assert list(inspect.signature(nccl.Communicator.register_buffer).parameters) == ["self", "buffer"]
    handle = alone.register_buffer(nccl.empty(64))
    assert isinstance(handle, nccl.RegisteredBufferHandle)
    assert handle.is_valid and handle.handle != 0


def test_a_registered_buffer_is_communicated_without_copies_in_between() -> None:
    """"Registers a buffer with this communicator for zero-copy communication.\""""

    def body(comm: nccl.Communicator) -> str:
        numbers = nccl.empty(1 << 16, "float32")
        numbers[:] = comm.rank + 1
        comm.register_buffer(numbers)
        comm.allreduce(numbers, numbers, nccl.SUM)
        assert (numbers == 3).all()
        return comm.explain()

    for explained in every(2, body):
        assert ": direct, because" in explained


def test_registering_changes_how_fast_a_call_goes_and_not_what_it_gives() -> None:
    """"Registered buffers can enable performance optimizations in NCCL operations.\""""

    def body(comm: nccl.Communicator) -> tuple[str, str]:
        numbers = nccl.empty(1 << 16, "int64")
        said = []
        for registers in (False, True):
            numbers[:] = comm.rank + 5
            handle = comm.register_buffer(numbers) if registers else None
            comm.allreduce(numbers, numbers, nccl.PROD)
            assert (numbers == 5 * 6).all()
            said.append(comm.explain())
            if handle is not None:
                handle.close()
        return said[0], said[1]

    for unregistered, registered in every(2, body):
        assert ": staged, because" in unregistered and ": direct, because" in registered


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64"])
def test_the_size_of_a_buffer_is_its_count_times_its_element(alone: nccl.Communicator, dtype: str) -> None:
    """"Buffer size is automatically derived from buffer count and dtype." (buffers)"""
    for shape in (1, 12, (3, 4)):
        numbers = numpy.zeros(shape, dtype)
        assert alone.register_buffer(numbers).size == numbers.size * numbers.itemsize


def test_a_buffer_can_be_released_by_close(alone: nccl.Communicator) -> None:
    """"The returned handle is tracked by the communicator and may be released explicitly via its close() method" (buffers)"""
    numbers = numpy.zeros(64)
    gone = weakref.ref(numbers)
    handle = alone.register_buffer(numbers)
    del numbers
    gc.collect()
    assert gone() is not None, "the registration does not keep the buffer"
    handle.close()
    assert not handle.is_valid and gone() is None
    handle.close()
    assert handle.size == 512
    with pytest.raises(RuntimeError, match="closed"):
        _ = handle.handle


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_buffer_is_released_with_its_communicator(end: str) -> None:
    """"or automatically when the communicator is destroyed or aborted." (buffers)"""
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    numbers = numpy.zeros(64)
    gone = weakref.ref(numbers)
    handle = comm.register_buffer(numbers)
    del numbers
    getattr(comm, end)()
    assert not handle.is_valid and gone() is None
    handle.close()


def test_a_handle_that_nobody_keeps_stays_registered() -> None:
    """"tracked by the communicator": dropping the handle releases nothing."""

    def body(comm: nccl.Communicator) -> str:
        numbers = nccl.empty(1 << 16, "float32")
        comm.register_buffer(numbers)
        gc.collect()
        comm.allreduce(numbers, numbers)
        return comm.explain()

    assert all(": direct, because" in said for said in every(2, body))


def test_a_buffer_is_an_array_a_buffer_or_anything_like_one(alone: nccl.Communicator) -> None:
    """"buffer - Buffer to register (array, Buffer, or buffer-like object).\""""
    for buffer in every_form(numpy.arange(6, dtype=numpy.float32)):
        with alone.register_buffer(buffer) as handle:
            assert handle.size == 24, type(buffer)


def test_a_buffer_on_the_wrong_device_is_invalid(alone: nccl.Communicator) -> None:
    """"Raises: NcclInvalid - If the buffer is on the wrong device" (buffers)"""
    for buffer in (CudaTensor(), CudaArray()):
        with pytest.raises(nccl.NcclInvalid, match="buffer: .*host"):
            alone.register_buffer(buffer)


def test_a_buffer_needs_an_initialized_communicator() -> None:
    """"or the communicator is not initialized." (buffers)"""
    with pytest.raises(nccl.NcclInvalid, match="not initialized"):
        nccl.Communicator().register_buffer(nccl.empty(8))


# ---- register_window -----------------------------------------------------------------------------------------


def test_register_window_takes_a_buffer_and_flags() -> None:
    """"register_window(buffer, flags: WindowFlag | None = None) RegisteredWindowHandle | None\""""
    parameters = inspect.signature(nccl.Communicator.register_window).parameters
    assert list(parameters)[:3] == ["self", "buffer", "flags"]
    assert parameters["flags"].default is None
    returned = typing.get_type_hints(
        nccl.Communicator.register_window, vars(inspect.getmodule(nccl.Communicator))
    )["return"]
    assert returned == nccl.RegisteredWindowHandle | None


def test_a_window_is_over_the_buffers_of_all_ranks() -> None:
    """"Collectively registers a local buffer into an NCCL window.\""""

    def body(comm: nccl.Communicator) -> int:
        numbers = nccl.empty(4, "int32")
        window = comm.register_window(numbers)
        assert window is not None and window.is_valid
        numbers[:] = 10 + comm.rank
        comm.barrier()
        theirs = numpy.zeros(4, numpy.int32)
        comm.get(theirs, (comm.rank + 1) % comm.nranks, window)
        assert (theirs == 10 + (comm.rank + 1) % comm.nranks).all()
        comm.barrier()
        return window.handle

    handles = every(3, body)
    assert len(set(handles)) == 1 and handles[0] != 0


def test_a_rank_that_does_not_take_part_is_named_by_the_others() -> None:
    """"This is a collective call: every rank in the communicator must participate\""""

    def body(comm: nccl.Communicator) -> None:
        if comm.rank != 1:
            comm.register_window(nccl.empty(64))

    found = outcomes(3, body, config(timeout=1.0))
    assert found[1] is None
    for rank in (0, 2):
        error = found[rank]
        assert isinstance(error, nccl.NCCLError) and error.ranks == (1,), error


def test_sizes_are_equal_among_ranks_by_default() -> None:
    """"and buffer size must be equal among ranks by default.\""""

    def body(comm: nccl.Communicator) -> tuple[Exception | None, int]:
        buffer = nccl.empty(128 if comm.rank == 2 else 64)
        refused = None
        try:
            comm.register_window(buffer)
        except nccl.NcclInvalid as error:
            refused = error
        window = comm.register_window(buffer, unequal_sizes=True)
        assert window is not None
        return refused, window.size_of(2)

    for error, size in every(3, body):
        assert isinstance(error, nccl.NcclInvalid) and error.ranks == (2,) and "64, 64, 128" in error.msg
        assert size == 128, "the caller may allow other sizes"


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16"])
def test_the_size_of_a_window_is_its_count_times_its_element(alone: nccl.Communicator, dtype: str) -> None:
    """"Buffer size is automatically derived from buffer count and dtype." (windows)"""
    numbers = nccl.empty((5, 3), dtype)
    window = alone.register_window(numbers)
    assert window is not None and window.size == 15 * numbers.itemsize == window.size_of(0)
    assert window.user_ptr == numbers.ctypes.data


def test_a_window_in_a_group_gets_its_handle_at_the_end() -> None:
    """"If called within a group, the handle value may not be filled until ncclGroupEnd completes.\""""

    def body(comm: nccl.Communicator) -> None:
        nccl.group_start()
        with nccl.group():
            window = comm.register_window(nccl.empty(64))
            assert window is not None and window.handle == 0 and not window.is_valid
            with pytest.raises(nccl.NcclInvalid, match="end the group first"):
                window.wait()
        assert not window.is_valid, "an inner end launches nothing"
        nccl.group_end()
        assert window.handle != 0
        comm.barrier()

    every(2, body)


def test_a_window_of_a_non_blocking_communicator_has_handle_0_until_success() -> None:
    """"For non-blocking communicators, the handle may remain 0 until get_async_error() reports success.\""""
    ids = nccl.get_unique_id()
    first = nccl.Communicator.init(2, 0, ids, config(blocking=False))
    assert first.get_async_error() is nccl.Result.IN_PROGRESS, "the second rank has not come"
    window = first.register_window(nccl.empty(64))
    assert window is not None and window.handle == 0 and not window.is_valid
    assert first.get_async_error() is nccl.Result.IN_PROGRESS
    second = nccl.Communicator.init(2, 1, ids, config(blocking=False))
    other = second.register_window(nccl.empty(64))
    assert other is not None
    while first.get_async_error() is nccl.Result.IN_PROGRESS:
        time.sleep(0.001)
    assert first.get_async_error() is nccl.Result.SUCCESS and window.handle != 0
    assert other.wait().handle == window.handle
    for comm in (first, second):
        comm.destroy()


def test_a_window_is_over_any_local_buffer(alone: nccl.Communicator) -> None:
    """"buffer - Local buffer to register as a window.\""""
    for buffer in every_form(numpy.arange(6, dtype=numpy.float32)):
        with alone.register_window(buffer) or pytest.fail("no window") as window:
            assert window.is_valid and window.size == 24, type(buffer)
            alone.put(numpy.full(2, 7, numpy.float32), 0, window, 4)
            there = numpy.zeros(2, numpy.float32)
            alone.get(there, 0, window, 4)
            assert (there == 7).all(), type(buffer)


def test_a_window_that_nobody_keeps_stays_registered() -> None:
    """"The returned RegisteredWindowHandle is tracked by the communicator": dropping the handle releases nothing."""

    def body(comm: nccl.Communicator) -> str:
        numbers = nccl.empty(1 << 16, "float32")
        numbers[:] = comm.rank + 1
        comm.register_window(numbers)
        gc.collect()
        comm.allreduce(numbers, numbers)
        assert (numbers == 3).all()
        comm.barrier()
        return comm.explain()

    assert all(": direct, because" in said for said in every(2, body))


def test_a_window_can_be_released_by_close(alone: nccl.Communicator) -> None:
    """"The returned handle is tracked by the communicator and may be released explicitly via its close() method" (windows)"""
    numbers = numpy.zeros(64)
    gone = weakref.ref(numbers)
    window = alone.register_window(numbers)
    assert window is not None
    del numbers
    gc.collect()
    assert gone() is not None, "the window does not keep the buffer"
    window.close()
    assert window.handle == 0 and not window.is_valid and gone() is None
    window.close()
    with pytest.raises(RuntimeError, match="closed"):
        _ = window.user_ptr


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_window_is_released_with_its_communicator(end: str) -> None:
    """"or automatically when the communicator is destroyed or aborted." (windows)"""
    held = _native.held()
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    numbers = numpy.zeros(64)
    gone = weakref.ref(numbers)
    window = comm.register_window(numbers)
    assert window is not None
    del numbers
    getattr(comm, end)()
    assert window.handle == 0 and not window.is_valid and gone() is None and _native.held() == held
    window.close()


def test_flags_are_the_default_ones_if_none_are_given(alone: nccl.Communicator) -> None:
    """"flags - Window registration flags. Defaults to None (DEFAULT).\""""
    for given, expected in (
        (None, nccl.WindowFlag.DEFAULT),
        (nccl.WindowFlag.COLL_SYMMETRIC, nccl.WindowFlag.COLL_SYMMETRIC),
        (3, nccl.WindowFlag.COLL_SYMMETRIC | nccl.WindowFlag.STRICT_ORDERING),
    ):
        window = alone.register_window(nccl.empty(64), given)
        assert window is not None and window.flags == expected


def test_none_stands_for_windows_that_are_not_supported() -> None:
    """"RegisteredWindowHandle for the registered window, or None if NCCL returns a NULL handle (windows are unsupported)\""""
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    assert comm.host_rma_support and comm.register_window(nccl.empty(8)) is not None, "the host has windows"

    class Without:
        """A platform without windows, of which there is none yet."""

        def register_window(self, *_arguments: object) -> tuple[None, None]:
            return (None, None)

    native, comm._native = comm._native, typing.cast(Any, Without())
    assert comm.register_window(nccl.empty(8)) is None
    comm._native = native
    with pytest.raises(nccl.NcclInvalid, match="peer_window"):
        comm.put_signal(nccl.empty(8), 0, None)
    comm.destroy()


def test_a_window_on_the_wrong_device_is_invalid_on_every_rank() -> None:
    """"Raises: NcclInvalid - If the buffer is on the wrong device" (windows)"""

    def body(comm: nccl.Communicator) -> Exception:
        with pytest.raises(nccl.NcclInvalid) as raised:
            comm.register_window(CudaTensor() if comm.rank == 1 else nccl.empty(64))
        assert comm.register_window(nccl.empty(64)) is not None, "the communicator stays usable"
        return raised.value

    for error in every(3, body):
        assert isinstance(error, nccl.NcclInvalid)
        assert error.ranks == (1,) and "buffer: its memory is on DLPack device 2:0" in error.msg


def test_a_window_needs_an_initialized_communicator() -> None:
    """"or the communicator is not initialized." (windows)"""
    with pytest.raises(nccl.NcclInvalid, match="not initialized"):
        nccl.Communicator().register_window(nccl.empty(8))
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    comm.destroy()
    with pytest.raises(nccl.NcclInvalid, match="destroyed"):
        comm.register_window(nccl.empty(8))


# ---- WindowFlag ----------------------------------------------------------------------------------------------


def test_window_flags_are_an_int_flag() -> None:
    """"class nccl.core.WindowFlag(value, names=..., ...)" and "Bases: IntFlag\""""
    assert issubclass(nccl.WindowFlag, enum.IntFlag)
    both = nccl.WindowFlag.COLL_SYMMETRIC | nccl.WindowFlag.STRICT_ORDERING
    assert both == 3 and nccl.WindowFlag(3) is both


def test_the_flags_say_how_a_window_behaves(alone: nccl.Communicator) -> None:
    """"Window registration behavior flags for Communicator.register_window().\""""
    assert "register_window" in (inspect.getdoc(nccl.WindowFlag) or "")
    with pytest.raises(nccl.NcclInvalid, match="flags"):
        alone.register_window(nccl.empty(8), 1 << 9)


def test_default_is_0() -> None:
    """"DEFAULT = 0: Default window registration.\""""
    assert int(nccl.WindowFlag.DEFAULT) == 0 == int(nccl.WindowFlag.Default)

    def body(comm: nccl.Communicator) -> None:
        buffer = nccl.empty(256)
        # Without the flag, ranks may register different parts of their memory.
        window = comm.register_window(buffer[64 * comm.rank :][:64], nccl.WindowFlag.DEFAULT)
        assert window is not None and window.is_valid
        comm.barrier()

    every(2, body)


def test_coll_symmetric_is_1_and_checked() -> None:
    """"COLL_SYMMETRIC = 1: Collective symmetric window registration.\""""
    assert int(nccl.WindowFlag.COLL_SYMMETRIC) == 1 == int(nccl.WindowFlag.CollSymmetric)

    def body(comm: nccl.Communicator) -> Exception:
        buffer = nccl.empty(256)
        assert comm.register_window(buffer[64:128], nccl.WindowFlag.COLL_SYMMETRIC) is not None
        with pytest.raises(nccl.NcclInvalid) as raised:
            comm.register_window(buffer[64 * comm.rank :][:64], nccl.WindowFlag.COLL_SYMMETRIC)
        return raised.value

    for error in every(2, body):
        assert "offsets differ" in str(error)


def test_strict_ordering_is_2_and_keeps_puts_in_order() -> None:
    """"STRICT_ORDERING = 2: Strict ordering for window operations.\""""
    assert int(nccl.WindowFlag.STRICT_ORDERING) == 2 == int(nccl.WindowFlag.StrictOrdering)

    def body(comm: nccl.Communicator) -> None:
        numbers = nccl.empty(2, "int64")
        window = comm.register_window(numbers, nccl.WindowFlag.STRICT_ORDERING)
        if comm.rank == 0:
            for turn in range(1, 200):
                comm.put(numpy.array([turn]), 1, window, 1)
                comm.put(numpy.array([turn]), 1, window, 0)
        else:
            seen = 0
            while seen < 199:
                seen = int(numbers[0])
                assert numbers[1] >= seen, "a later put was visible before an earlier one"
        comm.barrier()

    # Over a network the order is not there by itself.
    every(2, body, config(require="tcp"))


# ---- the page as a whole -------------------------------------------------------------------------------------

PAGE = (
    "Methods on Communicator for registering buffers and windows for zero-copy and RMA operations.",
    "The returned handle classes are documented under Memory Management.",
    # register_buffer
    "register_buffer(buffer) RegisteredBufferHandle",
    "Registers a buffer with this communicator for zero-copy communication.",
    "Registered buffers can enable performance optimizations in NCCL operations.",
    "Buffer size is automatically derived from buffer count and dtype. (buffers)",
    "handle is tracked by the communicator and may be released explicitly via its close() method (buffers)",
    "or automatically when the communicator is destroyed or aborted. (buffers)",
    "buffer - Buffer to register (array, Buffer, or buffer-like object).",
    "Returns: RegisteredBufferHandle for the registered buffer.",
    "Raises: NcclInvalid - If the buffer is on the wrong device (buffers)",
    "or the communicator is not initialized. (buffers)",
    # register_window
    "register_window(buffer, flags: WindowFlag | None = None) RegisteredWindowHandle | None",
    "Collectively registers a local buffer into an NCCL window.",
    "This is a collective call: every rank in the communicator must participate",
    "and buffer size must be equal among ranks by default.",
    "Buffer size is automatically derived from buffer count and dtype. (windows)",
    "If called within a group, the handle value may not be filled until ncclGroupEnd completes.",
    "For non-blocking communicators, the handle may remain 0 until get_async_error() reports success.",
    "handle is tracked by the communicator and may be released explicitly via its close() method (windows)",
    "or automatically when the communicator is destroyed or aborted. (windows)",
    "buffer - Local buffer to register as a window.",
    "flags - Window registration flags. Defaults to None (DEFAULT).",
    "RegisteredWindowHandle for the registered window, or None if NCCL returns a NULL handle",
    "Raises: NcclInvalid - If the buffer is on the wrong device (windows)",
    "or the communicator is not initialized. (windows)",
    # WindowFlag
    "class nccl.core.WindowFlag(value, names=..., ...)",
    "Bases: IntFlag",
    "Window registration behavior flags for Communicator.register_window().",
    "DEFAULT = 0: Default window registration.",
    "COLL_SYMMETRIC = 1: Collective symmetric window registration.",
    "STRICT_ORDERING = 2: Strict ordering for window operations.",
)
"""The page, sentence by sentence; what it says of buffers and of windows alike is here twice."""


def test_every_sentence_of_the_page_has_a_test_that_names_it() -> None:
    named = [
        (value.__doc__ or "").replace('"', "")
        for name, value in globals().items()
        if name.startswith("test_") and callable(value)
    ]
    assert [sentence for sentence in PAGE if not any(sentence in words for words in named)] == []
