"""Where address space or threads run out, calls raise `Exhausted`: the process goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import HERE

import towline
from towline import OperationKind
from towline.nixl_connect import _over_nixl

LIMITED = """
import asyncio, ctypes, gc, json, os, resource, signal, sys, threading, time
import numpy
import towline
from towline import connect, nccl, nixl

SETTINGS = json.loads(sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def limit(more):
    "So much more address space than there is in use now."
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more,) * 2)

def attempt(name, call):
    try:
        print(f"{name}: {call()!r:.60}", flush=True)
    except towline.Exhausted as error:
        print(f"{name}: Exhausted", flush=True)
        print(f"{name}: {error}", file=sys.stderr)
"""

SIZES = """
owner, user = towline.Endpoint("owner"), towline.Endpoint("user")
source, target = owner.register(bytearray(1 << 20), "read+write"), user.register(bytearray(1 << 20), "none")
remote = user.import_(source.ticket())
layout = towline.Layout.contiguous(1 << 20, 64)
comms = nccl.Communicator.init_all(1)
agent, other = nixl.Agent("agent", engine="embedded"), nixl.Agent("other", engine="embedded")
lent, own, known = agent.register(bytearray(8)), other.register(bytearray(8)), other.add_peer(agent.metadata())
long = bytes(1 << 30)
ranges = [(1, 1, 0)] * (12 << 20)

def again(number, *shape):
    "One number, over and over: an array that takes no memory."
    return numpy.broadcast_to(number, shape)

def indices(many):
    return lambda: user.read(remote, target, blocks=(layout, many, layout, many)).wait()

def spans(many):
    return lambda: user.read(remote, target, spans=many).wait()

def parts(number):
    "More parts than there is room for: each is a few hundred bytes to the library, and a pointer in this list."
    many = [towline.Part(remote, target, at=8)] * number
    return lambda: user.read(many).wait()

def numbers():
    while True:
        yield 0, 0, 1

limit(256 << 20)
for name, call in {
    "shared memory": lambda: towline.empty(1 << 30),
    "shared memory beyond the machine's": lambda: towline.empty(1 << 50),
    "regions of an endpoint": lambda: towline.Endpoint("many", max_regions=(1 << 32) - 1),
    "indices of 32 bits": indices(again(numpy.uint32(0), 1 << 30)),
    "indices of 64 bits": indices(again(numpy.uint64(0), 1 << 30)),
    "signed indices of 32 bits": indices(again(numpy.int32(0), 1 << 30)),
    "signed indices of 64 bits": indices(again(numpy.int64(0), 1 << 30)),
    "indices of a range": indices(range(1 << 50)),
    "indices that are copied, for which a plan has no room": indices(numpy.zeros(8 << 20, numpy.uint32)),
    "indices that are lent, for which a plan has no room": indices(numpy.frombuffer(bytes(32 << 20), numpy.uint32)),
    "spans": spans(again(numpy.uint64(1), 1 << 30, 3)),
    "signed spans": spans(again(numpy.int64(1), 1 << 30, 3)),
    "spans without an end": spans(numbers()),
    "parts": parts(4 << 20),
    "parts of which there is room for some": parts(600_000),
    "ranges of an agent": lambda: agent._native.metadata(("DRAM", ranges)),
    "ranges that are packed": lambda: towline._native.nixl_pack("DRAM", ranges, "nixl_cu12"),
    "a notification of an agent": lambda: other.read(own, lent.descriptors, known, notification=long),
    "a message of an agent": lambda: other.notify(known, long),
    "memory of a communicator": lambda: nccl.empty(1 << 30),
}.items():
    attempt(name, call)
for name, call in {
    "dimensions": lambda: towline.Layout(0, 1, range(1 << 50)),
    "ranks": lambda: nccl.Communicator.init_all(1 << 60),
}.items():
    try:
        call()
    except towline.Invalid:
        attempt(name, lambda: "Invalid")
gc.collect()
user.read(remote, target).wait()
print("done")
"""

THREADS = """
owner, user = towline.Endpoint("owner"), towline.Endpoint("user", require="unix", stall_timeout=20)
source = owner.register(bytearray(1 << 20), "read+write")
remote = user.import_(SETTINGS["tickets"][0])
target = user.register(bytearray(32 << 20), "none")
agent = nixl.Agent("user", engine="embedded")
local, peer = agent.register(bytearray(32 << 20)), agent.add_peer(bytes.fromhex(SETTINGS["agent"]))
nonblocking = nccl.NCCLConfig(blocking=False)
comms, others, loose = nccl.Communicator.init_all(1), nccl.Communicator.init_all(1), nccl.Communicator.init_all(1, nonblocking)
connector = connect.Connector()
connector.endpoint
waiting, closing = towline.Endpoint("waiting"), towline.Endpoint("closing")

async def leave():
    async with closing:
        pass

def group():
    with nccl.group():
        comms[0].barrier(); others[0].barrier()

# What is small comes from memory that the allocator has already, and threads of before have gone.
libc.mallopt(-1, 1 << 30), libc.mallopt(-3, 1 << 30), libc.mallopt(-8, 1)
blocks = [libc.malloc(1 << 20) for _ in range(96)]
for block in blocks:
    libc.free(block)
while len(os.listdir("/proc/self/task")) > 4:
    time.sleep(0.1)
limit(1 << 20)
for name, call in {
    "a thread": lambda: threading.Thread(target=print).start(),
}.items():
    try:
        call()
        print("there is room for a thread")
    except RuntimeError:
        pass
for name, call in {
    "an import of an event loop": lambda: asyncio.run(waiting.import_async(SETTINGS["tickets"][0])) and None,
    "a large read": lambda: user.read(remote, target).wait(),
    "a read of an agent": lambda: agent.read(local, [tuple(one) for one in SETTINGS["ranges"]], peer).wait(),
    "a claim": lambda: connector.begin_read_sync(
        connect.RdmaMetadata.from_json(SETTINGS["readable"]), connect.Descriptor(bytearray(32 << 20))
    ).wait(),
    "a meeting": lambda: nccl.get_unique_id() and None,
    "a group of ranks": lambda: nccl.Communicator.init_all(2) and None,
    "a call that returns at once": lambda: loose[0].barrier().wait(),
    "signals that are awaited": lambda: comms[0].signaled(nccl.WaitSignalDesc(0)) and None,
    "calls of two groups": group,
    "an async block": lambda: asyncio.run(leave()),
}.items():
    attempt(name, call)
print("done")
"""


@pytest.fixture
def settings() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, str(HERE / "waiting_peer.py"), "peer"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline()
        process.kill()


def outcomes(source: str, settings: str) -> tuple[dict[str, str], str]:
    """What each of the calls came to, and what their errors say; the process ends in order."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED + source, settings],
        capture_output=True,
        text=True,
        timeout=50,
        env=os.environ | {"PYTHONMALLOC": "malloc"},
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    *lines, last = done.stdout.splitlines()
    assert last == "done" and "there is room for a thread" not in lines
    return dict(line.rsplit(": ", 1) for line in lines), done.stderr


def test_a_size_for_which_there_is_no_memory_is_an_error(settings: str) -> None:
    found, _ = outcomes(SIZES, settings)
    assert found.pop("dimensions") == found.pop("ranks") == "'Invalid'"
    assert found and set(found.values()) == {"Exhausted"}, found


def test_where_no_thread_can_be_started_calls_do_without_or_say_so(settings: str) -> None:
    found, said = outcomes(THREADS, settings)
    # The C library keeps the stacks of a few threads that have ended.
    assert set(found.values()) == {"Exhausted", "None"}, found
    assert found["an async block"] == "None"
    named = ["towline-contact", "towline-root", "towline-comm", "towline-signal", "towline-group"]
    assert sum(f"cannot start the thread {name}" in said for name in named) >= 3, said


class Posted:
    """An agent of NIXL, and its one transfer, which is not over at once."""

    def __init__(self) -> None:
        self.over = False

    def read(self, *_: Any, **__: Any) -> Posted:
        return self

    def done(self) -> bool:
        return self.over

    def wait(self, _: float) -> None:
        self.over = True

    def error(self) -> None:
        return None


class Side(_over_nixl.Side):
    """A side without NIXL, which counts what is registered."""

    def __init__(self) -> None:
        super().__init__("side")
        self.posted: Any = Posted()
        self.enlisted = 0

    def agent(self) -> Any:
        return self.posted

    def meet(self, _: bytes) -> str:
        return "peer"

    def enlist(self, *_: object) -> list[Any]:
        self.enlisted += 1
        return []

    def delist(self, _: object) -> None:
        self.enlisted -= 1


def test_operations_over_nixl_do_without_a_thread_or_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    side = Side()
    active = _over_nixl.Active(side, OperationKind.READ, [], [], b"", "key")
    with pytest.raises(towline.Exhausted, match="towline-nixl-begin"):
        _over_nixl.Beginning(active)
    with pytest.raises(towline.Exhausted, match="cannot start the thread towline-nixl:"):
        _over_nixl.Passive(side, OperationKind.READ, [])
    assert side.enlisted == 0
    # What is in flight is waited for.
    active.start()
    assert active.done() and active.error() is None and side.enlisted == 0
