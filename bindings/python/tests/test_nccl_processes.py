"""Ranks that are processes of their own: all of the work, differences, and deaths."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import nccl_ranks
import pytest
from conftest import run_python
from ranks import Processes, config

from towline import nccl


@pytest.mark.parametrize(
    ("settings", "path", "algorithm"),
    [({}, "mapped", "direct"), ({"forbid": ["inproc", "mapped", "cma"]}, "unix", "ring")],
    ids=["shared memory", "sockets"],
)
def test_processes_put_get_signal_and_reduce(settings: dict[str, Any], path: str, algorithm: str) -> None:
    with Processes(3, nccl_ranks.work, 3, nccl.get_unique_id(), settings) as ranks:
        found = ranks.outcomes()
    for rank, one in enumerate(found):
        assert isinstance(one, dict), one
        assert one["came"] == (rank - 1) % 3 + 1
        assert one["counted"] == 3 and one["sums"] == {6.0}
        assert one["path"] == path and f": {algorithm}, because" in one["said"]


def test_sizes_that_differ_are_invalid_in_every_process() -> None:
    with Processes(3, nccl_ranks.unequal, 3, nccl.get_unique_id()) as ranks:
        found = ranks.outcomes()
    for error in found:
        assert isinstance(error, nccl.NcclInvalid) and error.ranks == (2,), error
        assert "64, 64, 65" in error.msg, "the error lost its message on the way"


@pytest.mark.parametrize("when", ["collective", "registration", "wait"])
def test_a_killed_rank_is_named_by_the_others_which_go_on_without_it(when: str) -> None:
    with Processes(3, nccl_ranks.bereft, 3, nccl.get_unique_id(), 1, when) as ranks:
        found = [ranks.outcome(rank) for rank in (0, 2)]
    for one in found:
        assert isinstance(one, tuple), one
        named, status, took, total = one
        assert named == (1,) and status is nccl.Result.REMOTE_ERROR
        assert took < 8, "it took the deadline to notice"
        assert total == 3


def test_threads_and_processes_form_one_group() -> None:
    unique_id = nccl.get_unique_id()
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        found[rank] = _join(0, unique_id, rank)

    with Processes(1, _join, unique_id, 2) as ranks:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [7, 7] and ranks.outcome(0) == 7


def _join(_index: int, unique_id: nccl.UniqueId, rank: int) -> int:
    with nccl.Communicator.init(3, rank, unique_id, config()) as comm:
        numbers = bytearray([1 << rank])
        comm.allreduce(numbers, numbers)
        return numbers[0]


def test_an_id_whose_process_has_ended_is_refused_in_time() -> None:
    text = run_python("from towline import nccl; print(nccl.get_unique_id())").strip()
    with pytest.raises(nccl.NCCLError):
        nccl.Communicator.init(2, 0, nccl.UniqueId(text), nccl.NCCLConfig(timeout=2.0))


def test_errors_and_ids_can_be_sent_between_processes() -> None:
    unique_id = nccl.get_unique_id()
    for thing in (unique_id, nccl.NcclInvalid("no", op="init", ranks=(4,)), nccl.NCCLTimeout("late")):
        assert repr(pickle.loads(pickle.dumps(thing))) == repr(thing)


def test_groups_leave_nothing_behind() -> None:
    run_python(
        """
import gc, os
from towline import _native, nccl

def once():
    comms = nccl.Communicator.init_all(2)
    with nccl.group():
        windows = [comm.register_window(nccl.empty(4096)) for comm in comms]
    handles = [comm.register_buffer(bytearray(4096)) for comm in comms]
    comms[0].put_signal(bytes(8), 1, windows[0])
    comms[1].wait_signal(nccl.WaitSignalDesc(0))
    views = [windows[0].peer_view(1)]
    for comm in comms:
        comm.destroy()

def left():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), _native.held()

once(); once()
before = left()
for _ in range(10):
    once()
after = left()
assert after[0] <= before[0] + 2 and after[1] == before[1] == 0, (before, after)
""",
    )
    assert not [name for name in os.listdir("/dev/shm") if "towline" in name]


@pytest.mark.parametrize("call", ["init", "barrier", "window", "wait", "group"])
def test_ctrl_c_ends_a_blocking_call(call: str) -> None:
    printed = run_python(
        """
import signal, sys, threading
from towline import nccl
ids, call = nccl.get_unique_id(), sys.argv[1]
settings = nccl.NCCLConfig(timeout=50)
if call == "init":
    comm = None
else:
    comms = nccl.Communicator.init_all(2, settings)
    comm = comms[0]
signal.setitimer(signal.ITIMER_REAL, 0.3)
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    if call == "init":
        nccl.Communicator.init(2, 0, ids, settings)
    elif call == "barrier":
        comm.barrier()
    elif call == "window":
        comm.register_window(nccl.empty(64))
    elif call == "wait":
        comm.wait_signal(nccl.WaitSignalDesc(1))
    else:
        with nccl.group():
            comm.barrier()
except KeyboardInterrupt:
    print("interrupted")
if call in ("barrier", "window", "group"):
    try:
        comms[1].barrier()
    except nccl.NCCLCanceled as error:
        print("named", error.ranks)
""",
        call,
        timeout=30,
    )
    expected = ["interrupted"] + (["named (0,)"] if call in ("barrier", "window", "group") else [])
    assert printed.splitlines() == expected
