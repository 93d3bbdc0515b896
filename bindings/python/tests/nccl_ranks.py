"""What ranks do that are processes of their own; for `test_nccl_processes.py`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy
from ranks import config

from towline import nccl


def work(rank: int, nranks: int, unique_id: nccl.UniqueId, settings: dict[str, Any]) -> dict[str, Any]:
    """A window, puts, gets, signals and collectives, then a clean end."""
    with nccl.Communicator.init(nranks, rank, unique_id, config(**settings)) as comm:
        numbers = nccl.empty(4096, "float64")
        window = comm.register_window(numbers)
        assert window is not None
        left, right = (rank - 1) % nranks, (rank + 1) % nranks
        comm.put_signal(numpy.full(8, rank + 1.0), right, window, 100)
        comm.wait_signal(nccl.WaitSignalDesc(left))
        came = float(numbers[100])
        total = comm.fetch_add(0, window, 0, rank).wait()
        comm.fence(window)
        counted = numpy.zeros(1, numpy.uint64)
        comm.get(counted, 0, window)
        large = nccl.empty(1 << 18, "float32")
        large[:] = rank + 1
        handle = comm.register_buffer(large)
        comm.allreduce(large, large)
        said = comm.explain()
        sums = {float(large[0]), float(large[-1])}
        handle.close()
        return {
            "came": came,
            "before": total,
            "counted": int(counted[0]),
            "sums": sums,
            "said": said,
            "path": window.path(right),
        }


def unequal(rank: int, nranks: int, unique_id: nccl.UniqueId) -> nccl.NcclInvalid | None:
    """Sizes that differ on the last rank, then equal ones."""
    with nccl.Communicator.init(nranks, rank, unique_id, config()) as comm:
        refused = None
        try:
            comm.register_window(nccl.empty(64 if rank < nranks - 1 else 65))
        except nccl.NcclInvalid as error:
            refused = error
        assert comm.register_window(nccl.empty(64)) is not None
        return refused


def bereft(rank: int, nranks: int, unique_id: nccl.UniqueId, victim: int, when: str) -> Any:
    """One rank is killed; the others say whom they name, then go on without it."""
    comm = nccl.Communicator.init(nranks, rank, unique_id, config(timeout=10.0))
    numbers = nccl.empty(1 << 16, "float32")
    window = comm.register_window(numbers)
    comm.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(10_000):
            if when == "collective":
                comm.allreduce(numbers, numbers, nccl.MAX)
            elif when == "registration":
                comm.register_window(nccl.empty(64))
            else:
                comm.wait_signal(nccl.WaitSignalDesc(victim))
    except nccl.NCCLError as error:
        took = time.monotonic() - started
        smaller = comm.shrink([victim])
        total = numpy.array([smaller.rank + 1])
        smaller.allreduce(total, total)
        del window
        comm.destroy()
        smaller.finalize()
        smaller.destroy()
        return error.ranks, error.status, took, int(total[0])
    return None
