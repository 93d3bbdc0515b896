"""Ids, settings, errors and types of `towline.nccl`, and how communicators come to be and end."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy
import pytest
from conftest import run_python
from ranks import config, every, outcomes

import towline
from towline import nccl

# ---- ids and settings ----------------------------------------------------------------------------------------


def test_an_id_travels_as_bytes_text_and_pickle() -> None:
    unique_id = nccl.get_unique_id()
    assert len(bytes(unique_id)) == 128 == len(unique_id.as_bytes)
    assert nccl.UniqueId.from_bytes(bytes(unique_id)) == unique_id
    assert nccl.UniqueId(str(unique_id)) == unique_id
    assert pickle.loads(pickle.dumps(unique_id)) == unique_id
    for number in (nccl.UniqueId, nccl.UniqueId.from_bytes):
        with pytest.raises(TypeError, match="int"):
            number(128)  # type: ignore[arg-type]
    assert hash(unique_id) == hash(nccl.UniqueId(bytes(unique_id)))
    assert unique_id.as_ndarray.tobytes() == bytes(unique_id)
    assert unique_id != nccl.get_unique_id() and unique_id != bytes(unique_id)


def test_the_repr_of_an_id_does_not_show_its_secret() -> None:
    unique_id = nccl.get_unique_id()
    shown = repr(unique_id)
    secret = bytes(unique_id)[8:40]
    assert shown.startswith("UniqueId(") and str(unique_id) not in shown
    assert secret.hex()[:16] not in shown and str(unique_id)[12:40] not in shown


def test_an_empty_id_names_no_meeting() -> None:
    empty = nccl.get_unique_id(empty=True)
    assert bytes(empty) == bytes(128) and empty.is_empty and "empty" in repr(empty)
    with pytest.raises(nccl.NcclInvalid, match="not an id"):
        nccl.Communicator.init(1, 0, empty)


@pytest.mark.parametrize("wrong", [b"", bytes(127), bytes(129), "not the text of an id"])
def test_what_is_not_an_id_is_refused(wrong: Any) -> None:
    with pytest.raises(nccl.NcclInvalid):
        nccl.UniqueId(wrong)


def test_a_damaged_id_is_refused() -> None:
    damaged = bytearray(bytes(nccl.get_unique_id()))
    damaged[77] ^= 1
    with pytest.raises(nccl.NcclInvalid, match="damaged"):
        nccl.Communicator.init(1, 0, nccl.UniqueId(bytes(damaged)))


def test_bytes_are_not_an_id() -> None:
    unique_id = nccl.get_unique_id()
    wrong: Any
    for wrong in (bytes(unique_id), None, [], [bytes(unique_id)]):
        with pytest.raises(nccl.NcclInvalid, match="unique_id"):
            nccl.Communicator.init(1, 0, wrong)
    nccl.Communicator.init(1, 0, [unique_id]).destroy()


def test_settings_are_by_keyword_and_read_at_every_use() -> None:
    with pytest.raises(TypeError):
        nccl.NCCLConfig(True)  # type: ignore[call-arg]
    settings = nccl.NCCLConfig(min_ctas=2, cta_policy=1, nvls_host_mode=0, split_share=True)
    settings.comm_name = "training"
    settings.num_rma_sig = 3
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), settings)
    assert comm.name == "training"
    comm.signal(0, signal_index=2)
    with pytest.raises(nccl.NcclInvalid, match="no counter 3"):
        comm.signal(0, signal_index=3)
    comm.destroy()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_rma_ctx": 0}, "contexts"),
        ({"num_rma_ctx": -1}, "num_rma_ctx"),
        ({"num_rma_sig": 1 << 40}, "num_rma_sig"),
        ({"timeout": -1.0}, "timeout"),
        ({"timeout": 0.0}, "timeout"),
        ({"comm_name": "x" * 100}, "name"),
        ({"listen": "nowhere"}, "listen"),
        ({"require": "pigeon"}, "pigeon"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(nccl.NcclInvalid, match=named):
        nccl.Communicator.init(1, 0, nccl.get_unique_id(), nccl.NCCLConfig(**settings))


# ---- errors and types ----------------------------------------------------------------------------------------


def test_errors_are_those_of_nccl4py_and_of_towline() -> None:
    error = nccl.NcclInvalid("differs", op="allreduce", ranks=[1, 3])
    assert error.msg == "differs" and error.ranks == (1, 3)
    assert isinstance(error, towline.Invalid) and isinstance(error, ValueError)
    assert str(error) == "allreduce: differs (Invalid, ranks 1, 3)"
    late = nccl.NCCLTimeout("nobody came", op="init", ranks=(2,))
    assert isinstance(late, nccl.NCCLError) and isinstance(late, TimeoutError)
    assert late.status is nccl.Result.TIMEOUT and late.retryable
    assert issubclass(nccl.NCCLDisconnected, towline.Disconnected)
    assert not issubclass(nccl.NcclInvalid, nccl.NCCLError)
    for one in (error, late, nccl.ClosedResource("closed")):
        again = pickle.loads(pickle.dumps(one))
        assert (type(again), again.args, again.ranks, str(again)) == (
            type(one),
            one.args,
            one.ranks,
            str(one),
        )


def test_results_have_the_numbers_of_nccl() -> None:
    assert [int(result) for result in nccl.Result] == list(range(9))
    assert int(nccl.Result.InProgress) == int(nccl.Result.IN_PROGRESS) == 7
    assert all(nccl.get_error_string(result) for result in nccl.Result)
    assert "unknown" in nccl.get_error_string(99)


def test_types_have_the_numbers_and_sizes_of_nccl() -> None:
    assert [int(one) for one in nccl.NcclDataType] == list(range(12))
    assert (nccl.HALF, nccl.FLOAT, nccl.DOUBLE, nccl.INT, nccl.CHAR) == (6, 7, 8, 2, 0)
    for one in nccl.NcclDataType:
        array = nccl.empty(3, one)
        assert array.nbytes == 3 * one.itemsize
        if one < nccl.BFLOAT16:
            assert array.dtype == one.numpy_dtype
    assert (nccl.SUM, nccl.PROD, nccl.MAX, nccl.MIN, nccl.AVG) == (0, 1, 2, 3, 4)


def test_the_version_is_that_of_towline() -> None:
    assert str(nccl.get_version()) == towline.__version__ == nccl.__version__


def test_memory_for_windows_can_be_allocated() -> None:
    memory = nccl.mem_alloc(4096)
    assert memory.nbytes == 4096 and not numpy.asarray(memory).any()
    nccl.mem_free(memory)
    for wrong in (0, -1, 1 << 62):
        with pytest.raises(nccl.NcclInvalid):
            nccl.mem_alloc(wrong)
    with pytest.raises(nccl.NcclInvalid, match="device"):
        nccl.mem_alloc(64, -2)
    with pytest.raises(TypeError, match="device"):
        nccl.mem_alloc(64, 1.5)
    with pytest.raises(TypeError):
        nccl.mem_free(bytearray(8))  # type: ignore[arg-type]
    with pytest.raises(nccl.NcclInvalid, match="dtype"):
        nccl.empty(4, "float7")


# ---- how communicators come to be ----------------------------------------------------------------------------


def test_a_communicator_says_what_it_is() -> None:
    def body(comm: nccl.Communicator) -> int:
        assert comm.nranks == 3 and comm.is_valid and comm.blocking and comm.ptr != 0
        assert (comm.device.device_id, str(comm.device)) == (-1, "cpu")
        properties = comm.properties
        assert (properties.rank, properties.nranks) == (comm.rank, 3)
        assert comm.host_rma_support and not comm.device_api_support and not comm.multimem_support
        assert (comm.gin_type, comm.cuda_dev, properties.n_lsa_teams) == (0, -1, 1)
        assert comm.is_near(0) and comm.dead_ranks() == []
        assert nccl.Communicator(comm.ptr).rank == comm.rank
        assert f"rank {comm.rank} of 3" in repr(comm)
        comm.barrier()
        return comm.rank

    assert every(3, body) == [0, 1, 2]


def test_a_null_communicator_refuses_everything_but_its_end() -> None:
    comm = nccl.Communicator()
    assert comm.ptr == 0 and not comm.is_valid and "no group" in repr(comm)
    for use in (
        lambda: comm.rank,
        lambda: comm.nranks,
        lambda: comm.device,
        lambda: comm.properties,
        lambda: comm.barrier(),
        lambda: comm.get_async_error(),
        lambda: comm.get_last_error(),
        lambda: comm.split(0),
        lambda: comm.signal(0),
        lambda: comm.revoke(),
    ):
        with pytest.raises(nccl.NcclInvalid, match="not initialized"):
            use()
    for end in (comm.finalize, comm.destroy, comm.abort, comm.close_all_resources):
        end()
    with pytest.raises(nccl.NcclInvalid, match="ptr"):
        nccl.Communicator(12345678)


def test_a_communicator_is_initialized_once() -> None:
    comm = nccl.Communicator()
    comm.initialize(1, 0, nccl.get_unique_id())
    with pytest.raises(nccl.NcclInvalid, match="already"):
        comm.initialize(1, 0, nccl.get_unique_id())
    comm.destroy()
    assert comm.ptr == 0 and not comm.is_valid
    comm.destroy()
    with pytest.raises(nccl.NcclInvalid, match="destroyed"):
        comm.barrier()


@pytest.mark.parametrize(("nranks", "rank"), [(0, 0), (-1, 0), (2, -1), (1, 1)])
def test_sizes_and_ranks_that_cannot_be_are_refused(nranks: int, rank: int) -> None:
    with pytest.raises(nccl.NcclInvalid):
        nccl.Communicator.init(nranks, rank, nccl.get_unique_id(), config(timeout=2.0))


def test_a_rank_that_comes_twice_is_named_on_every_rank() -> None:
    unique_id = nccl.get_unique_id()
    found: list[Any] = [None] * 3

    def join(index: int, rank: int) -> None:
        try:
            found[index] = nccl.Communicator.init(3, rank, unique_id, config(timeout=5.0))
        except nccl.NcclInvalid as error:
            found[index] = error

    threads = [threading.Thread(target=join, args=pair) for pair in enumerate((0, 1, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in found:
        assert isinstance(error, nccl.NcclInvalid) and error.ranks == (1,), error


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(nccl.NCCLTimeout) as raised:
        nccl.Communicator.init(3, 1, nccl.get_unique_id(), config(timeout=0.5))
    assert raised.value.ranks == (0, 2) and isinstance(raised.value, TimeoutError)


def test_a_launched_rank_finds_its_place_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TOWLINE_RANK", "TOWLINE_NRANKS", "TOWLINE_UNIQUE_ID")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(names, ("0", "1", str(nccl.get_unique_id())), strict=True):
        with pytest.raises(nccl.NcclInvalid, match="towline launch"):
            nccl.Communicator.from_env()
        monkeypatch.setenv(name, value)
    with nccl.Communicator.from_env(config()) as comm:
        assert (comm.rank, comm.nranks) == (0, 1)
    monkeypatch.setenv("TOWLINE_RANK", "first")
    with pytest.raises(nccl.NcclInvalid, match="TOWLINE_RANK"):
        nccl.Communicator.from_env()


def test_init_all_makes_a_group_in_this_process() -> None:
    assert nccl.Communicator.init_all(0) == nccl.Communicator.init_all([]) == []
    for devices in (2, [-1, "cpu"], (-1, -1)):
        comms = nccl.Communicator.init_all(devices)
        assert [comm.rank for comm in comms] == [0, 1]
        with nccl.group():
            for comm in comms:
                comm.barrier()
        for comm in comms:
            comm.destroy()
    assert len(nccl.Communicator.init_all()) == 1
    with pytest.raises(nccl.NcclInvalid, match="devices"):
        nccl.Communicator.init_all([0])
    with pytest.raises(TypeError):
        nccl.Communicator.init_all("all")


def test_a_split_orders_by_key_and_leaves_out_who_has_no_color() -> None:
    def body(comm: nccl.Communicator) -> tuple[bool, int, int]:
        color = None if comm.rank == 3 else comm.rank % 2
        child = comm.split(color, key=-comm.rank)
        if color is None:
            assert not child.is_valid and child.ptr == 0
            return (False, 0, 0)
        numbers = numpy.array([comm.rank], numpy.int32)
        child.allreduce(numbers, numbers, nccl.SUM)
        with child:
            return (True, child.rank, int(numbers[0]))

    assert every(5, body) == [(True, 2, 6), (True, 0, 1), (True, 1, 6), (False, 0, 0), (True, 0, 6)]


def test_survivors_shrink_also_after_a_revoke() -> None:
    def body(comm: nccl.Communicator) -> tuple[int, int] | None:
        for wrong in ((), (9,), (comm.rank,)):
            with pytest.raises(nccl.NcclInvalid):
                comm.shrink(wrong)
        comm.barrier()
        if comm.rank == 1:
            return None
        with comm.shrink([1], flag=nccl.CommShrinkFlag.ABORT) as smaller:
            smaller.barrier()
            return smaller.rank, smaller.nranks

    found = outcomes(3, body)
    assert found[0] == (0, 2) and found[2] == (1, 2)


def test_an_abort_unblocks_everybody() -> None:
    def body(comm: nccl.Communicator) -> None:
        if comm.rank == 0:
            comm.abort()
        else:
            comm.barrier()

    found = outcomes(3, body)
    assert found[0] is None
    for error in found[1:]:
        assert isinstance(error, nccl.NCCLError) and error.ranks == (0,), error


def test_a_with_block_ends_the_communicator_for_better_or_worse() -> None:
    def well(comm: nccl.Communicator) -> None:
        with comm:
            window = comm.register_window(nccl.empty(64))
        assert not comm.is_valid and window is not None and window.handle == 0

    every(2, well)

    def badly(comm: nccl.Communicator) -> None:
        with comm:
            if comm.rank == 0:
                raise KeyError("unforeseen")
            comm.barrier()

    found = outcomes(2, badly)
    assert isinstance(found[0], KeyError) and isinstance(found[1], nccl.NCCLError), found


def test_what_a_communicator_failed_with_can_be_asked() -> None:
    def body(comm: nccl.Communicator) -> tuple[nccl.Result, str] | None:
        if comm.rank == 1:
            return None
        assert comm.get_async_error() is nccl.Result.SUCCESS and comm.get_last_error() == ""
        with pytest.raises(nccl.NCCLError):
            comm.barrier()
        return comm.get_async_error(), comm.get_last_error()

    found = outcomes(2, body, config(timeout=1.0))[0]
    assert isinstance(found, tuple), found
    assert found[0] in (nccl.Result.TIMEOUT, nccl.Result.REMOTE_ERROR) and "rank 1" in found[1]


def test_a_finalized_communicator_takes_no_calls() -> None:
    def body(comm: nccl.Communicator) -> None:
        comm.finalize()
        comm.finalize()
        with pytest.raises(nccl.NcclInvalid, match="finalized"):
            comm.barrier()

    every(2, body)


def test_registering_and_closing_in_a_loop_keeps_nothing() -> None:
    def body(comm: nccl.Communicator) -> int:
        buffer = nccl.empty(4096)
        for _ in range(50):
            window = comm.register_window(buffer)
            assert window is not None
            window.close()
            comm.register_buffer(buffer).close()
        return len(comm._resources) + (comm._native.open_handles() if comm._native else 0)

    assert every(2, body) == [0, 0]


def test_a_forked_child_cannot_use_a_communicator() -> None:
    run_python(
        """
import os, towline
from towline import nccl
comm = nccl.Communicator.init(1, 0, nccl.get_unique_id())
window = comm.register_window(nccl.empty(64))
pid = os.fork()
if pid == 0:
    try:
        comm.barrier()
    except towline.Unavailable:
        del comm, window
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
comm.barrier()
"""
    )


def test_a_program_may_end_without_closing_anything() -> None:
    run_python(
        """
from towline import nccl
comms = nccl.Communicator.init_all(2)
with nccl.group():
    windows = [comm.register_window(nccl.empty(64)) for comm in comms]
handle = comms[0].register_buffer(bytearray(64))
"""
    )


def test_everything_that_is_public_is_exported_and_documented() -> None:
    for name in nccl.__all__:
        thing = getattr(nccl, name)
        if isinstance(thing, type) or callable(thing):
            assert thing.__doc__, name
