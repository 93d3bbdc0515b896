"""Collectives and messages from Python: what they give, which arguments they take, which types they know."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from ranks import config, every

from towline import nccl

N = 3
Body = Callable[[nccl.Communicator], None]


def reduced(op: nccl.NcclRedOp, rows: Any) -> Any:
    if op is nccl.AVG:
        return rows.sum(axis=0) / len(rows)
    combine: dict[nccl.NcclRedOp, Callable[..., Any]] = {
        nccl.SUM: numpy.sum,
        nccl.PROD: numpy.prod,
        nccl.MAX: numpy.max,
        nccl.MIN: numpy.min,
    }
    return combine[op](rows, axis=0)


@pytest.mark.parametrize("count", [0, 1, 100, 100_000])
@pytest.mark.parametrize("op", list(nccl.NcclRedOp))
def test_an_allreduce_combines_the_elements_of_all_ranks(op: nccl.NcclRedOp, count: int) -> None:
    rows = numpy.arange(1, N * count + 1, dtype=numpy.float64).reshape(N, count) / max(count, 1)

    def body(comm: nccl.Communicator) -> None:
        target = numpy.zeros(count)
        comm.allreduce(rows[comm.rank], target, op)
        assert numpy.allclose(target, reduced(op, rows))
        mine = rows[comm.rank].copy()
        comm.all_reduce(mine, mine, op, stream=0)
        assert numpy.array_equal(mine, target), "in place"

    every(N, body)


@pytest.mark.parametrize("name", ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32"])
def test_numbers_of_every_type_are_combined(name: str) -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = numpy.arange(7, dtype=name)
        comm.allreduce(numbers, numbers, nccl.SUM)
        assert numbers.tolist() == [N * value for value in range(7)]
        comm.allreduce(numbers, numbers, nccl.AVG)
        assert numbers.tolist() == [N * value for value in range(7)]

    every(N, body)


def test_bfloat16_is_combined() -> None:
    def body(comm: nccl.Communicator) -> None:
        numbers = nccl.empty(4, nccl.BFLOAT16)
        bits = numpy.frombuffer(numbers, numpy.uint16).reshape(-1)
        bits[:] = 0x3FC0  # 1.5
        comm.allreduce(numbers, numbers)
        assert bits.tolist() == [0x4090] * 4  # 4.5

    every(N, body)


def test_objects_that_are_no_numpy_arrays_say_their_type_too() -> None:
    def body(comm: nccl.Communicator) -> None:
        floats = array.array("f", [comm.rank + 0.5])
        comm.allreduce(floats, floats)
        assert floats[0] == 4.5
        octets = bytearray([comm.rank + 1])
        comm.allreduce(octets, octets, nccl.MAX)
        assert octets[0] == N

    every(N, body)


def test_truth_values_and_other_types_are_moved_and_combined_where_that_makes_sense() -> None:
    def body(comm: nccl.Communicator) -> None:
        truths = numpy.array([comm.rank == 1, True])
        comm.allreduce(truths, truths, nccl.MIN)
        assert truths.tolist() == [False, True]
        with pytest.raises(nccl.NcclInvalid, match="bool cannot be combined by sum"):
            comm.allreduce(truths, truths, nccl.SUM)
        waves = numpy.array([comm.rank * 1j])
        gathered = numpy.zeros(N, complex)
        comm.allgather(waves, gathered)
        assert gathered.tolist() == [0, 1j, 2j]
        with pytest.raises(nccl.NcclInvalid, match="complex128"):
            comm.allreduce(waves, waves)
        for wrong in (numpy.array([object()]), numpy.zeros(2, ">f4"), numpy.zeros(2, "datetime64[s]")):
            with pytest.raises(nccl.NcclInvalid, match="sendbuf"):
                comm.allgather(wrong, wrong)
        comm.barrier()

    every(N, body)


def test_reduce_gives_the_root_the_result_and_without_a_root_everybody() -> None:
    def body(comm: nccl.Communicator) -> None:
        mine = numpy.full(5, comm.rank + 1, numpy.int64)
        target = numpy.zeros(5, numpy.int64)
        comm.reduce(mine, target if comm.rank == 1 else None, nccl.SUM, root=1)
        assert target.tolist() == ([6] * 5 if comm.rank == 1 else [0] * 5)
        comm.reduce(mine, target, nccl.PROD)
        assert target.tolist() == [6] * 5

    every(N, body)


def test_broadcast_gives_everybody_the_root_s_elements() -> None:
    def body(comm: nccl.Communicator) -> None:
        mine = numpy.full(4, comm.rank, numpy.float32)
        target = numpy.zeros(4, numpy.float32)
        comm.broadcast(mine, target, root=2)
        assert (target == 2).all() and (mine == comm.rank).all()
        comm.broadcast(None, mine, 0) if comm.rank else comm.broadcast(mine, mine, 0)
        assert (mine == 0).all()

    every(N, body)


def test_gathers_scatters_and_exchanges_go_by_rank() -> None:
    def body(comm: nccl.Communicator) -> None:
        rank = comm.rank
        everything = numpy.zeros(2 * N, numpy.int32)
        comm.allgather(numpy.array([rank, -rank], numpy.int32), everything)
        assert everything.tolist() == [0, 0, 1, -1, 2, -2]
        comm.all_gather(everything[2 * rank :][:2], everything)  # in place
        assert everything.tolist() == [0, 0, 1, -1, 2, -2]

        gathered = numpy.zeros(N, numpy.int32)
        comm.gather(numpy.array([rank + 1], numpy.int32), gathered if rank == 0 else None, root=0)
        assert gathered.tolist() == ([1, 2, 3] if rank == 0 else [0, 0, 0])
        comm.gather(numpy.array([rank + 1], numpy.int32), gathered)
        assert gathered.tolist() == [1, 2, 3]

        mine = numpy.zeros(2, numpy.int32)
        comm.scatter(everything if rank == 1 else None, mine, root=1)
        assert mine.tolist() == [rank, -rank]

        exchanged = numpy.zeros(N, numpy.int32)
        comm.alltoall(numpy.arange(N, dtype=numpy.int32) + 10 * rank, exchanged)
        assert exchanged.tolist() == [rank, 10 + rank, 20 + rank]
        comm.all_to_all(exchanged.copy(), exchanged)

        block = numpy.zeros(2, numpy.int32)
        comm.reduce_scatter(numpy.arange(2 * N, dtype=numpy.int32), block)
        assert block.tolist() == [N * 2 * rank, N * (2 * rank + 1)]
        comm.barrier()

    every(N, body)


def test_messages_arrive_in_order() -> None:
    def body(comm: nccl.Communicator) -> None:
        if comm.rank == 0:
            for turn in range(5):
                comm.send(numpy.full(50_000, turn, numpy.int16), 2)
        elif comm.rank == 2:
            target = numpy.zeros(50_000, numpy.int16)
            for turn in range(5):
                comm.recv(target, 0)
                assert (target == turn).all()

    every(N, body)


def test_scaled_sums_multiply_by_each_rank_s_own_scalar() -> None:
    def body(comm: nccl.Communicator) -> None:
        with comm.create_pre_mul_sum(comm.rank + 0.5) as scaled:
            assert int(scaled) == scaled.op > 4 and scaled.datatype is nccl.FLOAT64
            numbers = numpy.array([2.0])
            comm.allreduce(numbers, numbers, scaled)
            assert numbers[0] == 2 * (0.5 + 1.5 + 2.5)
            with pytest.raises(nccl.NcclInvalid, match="float32"):
                comm.allreduce(numbers.astype(numpy.float32), numbers.astype(numpy.float32), scaled)
        with pytest.raises(RuntimeError):
            _ = scaled.op
        with pytest.raises(nccl.NcclInvalid, match="closed"):
            comm.allreduce(numbers, numbers, scaled)
        halves = comm.create_pre_mul_sum(numpy.array([0.5], numpy.float16))
        small = numpy.array([4.0], numpy.float16)
        comm.allreduce(small, small, halves)
        assert halves.datatype is nccl.FLOAT16 and small[0] == 6.0
        whole = comm.create_pre_mul_sum(-2, nccl.INT32)
        integers = numpy.array([3], numpy.int32)
        comm.allreduce(integers, integers, whole)
        assert integers[0] == -18
        for wrong in (numpy.zeros(2), True, numpy.array([1j])):
            with pytest.raises(nccl.NcclInvalid, match="scalar"):
                comm.create_pre_mul_sum(wrong)
        comm.barrier()

    every(N, body)


def test_the_algorithm_is_told_and_can_be_chosen() -> None:
    def body(comm: nccl.Communicator) -> None:
        assert "no collective" in comm.explain()
        numbers = numpy.ones(1 << 16, numpy.float32)
        for algorithm in ("ring", "tree", "staged"):
            comm.allreduce(numbers, numbers, nccl.MAX, algorithm=algorithm)
            assert f": {algorithm}, because the caller asked" in comm.explain()
        with pytest.raises(nccl.NcclInvalid, match="direct cannot do this"):
            comm.allreduce(numbers, numbers, nccl.MAX, algorithm="direct")
        with pytest.raises(nccl.NcclInvalid, match="no algorithm"):
            comm.allreduce(numbers, numbers, algorithm="magic")  # type: ignore[arg-type]
        comm.barrier()

    every(N, body)


# Each makes a call that is wrong on every rank; the pattern names what is.
WRONG: dict[str, tuple[Body, str]] = {
    "another type": (lambda c: _call(c, "allreduce", numpy.zeros(4), numpy.zeros(4, "f4")), "recvbuf: float32"),
    "too short": (lambda c: _call(c, "allreduce", numpy.zeros(4), numpy.zeros(3)), "room for 24"),
    "gather too short": (lambda c: _call(c, "allgather", numpy.zeros(4), numpy.zeros(11)), "room for 88"),
    "a remainder": (lambda c: _call(c, "alltoall", numpy.zeros(4), numpy.zeros(4)), "sendbuf: .*remainder"),
    "reduce remainder": (lambda c: _call(c, "reduce_scatter", numpy.zeros(4), numpy.zeros(4)), "remainder"),
    "no recvbuf": (lambda c: _call(c, "allreduce", numpy.zeros(4), None), "recvbuf"),
    "neither": (lambda c: _call(c, "allreduce", None, None), "neither"),
    "gaps": (lambda c: _call(c, "allreduce", numpy.zeros((4, 4))[:, 0], numpy.zeros(4)), "sendbuf: .*contiguous"),
    "target gaps": (lambda c: _call(c, "allreduce", numpy.zeros(2), numpy.zeros(4)[::2]), "recvbuf: .*contiguous"),
    "read-only": (lambda c: _call(c, "allreduce", bytes(4), bytes(4)), "recvbuf: .*read-only"),
    "an overlap": (lambda c: _overlap(c), "overlap"),
    "the root": (lambda c: _call(c, "broadcast", numpy.zeros(1), numpy.zeros(1), 7), "root 7"),
    "a negative root": (lambda c: _call(c, "broadcast", numpy.zeros(1), numpy.zeros(1), -1), "root"),
    "the peer": (lambda c: _call(c, "send", numpy.zeros(1), 3), "peer 3"),
    "the operation": (lambda c: _call(c, "allreduce", numpy.zeros(1), numpy.zeros(1), 9), "op: 9"),
}


def _call(comm: nccl.Communicator, name: str, *arguments: Any) -> None:
    getattr(comm, name)(*arguments)


def _overlap(comm: nccl.Communicator) -> None:
    numbers = numpy.zeros(8)
    comm.allreduce(numbers[:4], numbers[2:6])


@pytest.mark.parametrize("what", list(WRONG))
def test_wrong_arguments_are_invalid_and_leave_the_communicator_usable(what: str) -> None:
    call, pattern = WRONG[what]

    def body(comm: nccl.Communicator) -> None:
        with pytest.raises(nccl.NcclInvalid, match=pattern):
            call(comm)
        comm.barrier()

    every(N, body)


def test_a_stream_is_none_a_number_or_a_stream() -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0)

    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id(), config())
    for stream in (None, 0, 1 << 40, Stream()):
        comm.barrier(stream=stream)
    for wrong in (True, "stream", 1.5):
        with pytest.raises(TypeError, match="stream"):
            comm.barrier(stream=wrong)
    comm.destroy()


# Each is right on its own, and the ranks differ: rank 1 asks for something else.
DIFFER: dict[str, Callable[[nccl.Communicator, bool], Any]] = {
    "sizes": lambda c, odd: c.allreduce(numpy.zeros(5 if odd else 4), numpy.zeros(5)),
    "types": lambda c, odd: _in_place(c, "f4" if odd else "i4"),
    "operations": lambda c, odd: _in_place(c, "f8", nccl.MAX if odd else nccl.MIN),
    "roots": lambda c, odd: c.broadcast(numpy.zeros(4), numpy.zeros(4), 1 if odd else 0),
    "calls": lambda c, odd: c.barrier() if odd else _in_place(c, "f8"),
}


def _in_place(comm: nccl.Communicator, dtype: str, op: nccl.NcclRedOp = nccl.SUM) -> None:
    numbers = numpy.zeros(4, dtype)
    comm.allreduce(numbers, numbers, op)


@pytest.mark.parametrize("what", list(DIFFER))
def test_ranks_that_differ_are_named_on_every_rank(what: str) -> None:
    def body(comm: nccl.Communicator) -> tuple[int, ...]:
        with pytest.raises(nccl.NcclInvalid) as raised:
            DIFFER[what](comm, comm.rank == 1)
        comm.barrier()
        return raised.value.ranks

    assert every(N, body) == [(1,)] * N
