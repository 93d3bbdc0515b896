"""Ctrl-C ends every call that waits, and what was waited for is as it was.

Each call of the package that waits for others stands in one of these tables: one that is missing is one that nobody has tried.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from conftest import HERE, until_it_waits

PRELUDE = """
import asyncio, contextlib, json, os, signal, socket, sys, tempfile, threading, time
import towline
from towline import connect, nccl, nixl, nixl_connect

PEER, SETTINGS = int(sys.argv[1]), json.loads(sys.argv[2])
PATIENCE = 600.0

def runs(task):
    return open(f"/proc/{PEER}/task/{task}/stat").read().rpartition(")")[2].split()[0] != "T"

def stop():
    "All of its threads: one that still runs could answer."
    os.kill(PEER, signal.SIGSTOP)
    while any(runs(task) for task in os.listdir(f"/proc/{PEER}/task")):
        time.sleep(0.001)

def resume():
    os.kill(PEER, signal.SIGCONT)

def endpoint(path="unix"):
    return towline.Endpoint("user", timeout=PATIENCE, stall_timeout=PATIENCE, require=path)

def imported():
    user = endpoint()
    return user, user.import_(SETTINGS["tickets"][0])

def reading():
    "A read of which nothing comes any more."
    user, remote = imported()
    local = user.register(bytearray(32 << 20), "none")
    stop()
    return user, local, user.read(remote, local)

def visited(make):
    "Has the peer read memory that is made so, and stops it while it is inside."
    notifier = towline.Endpoint("notifier")
    door = notifier.import_(SETTINGS["tickets"][1])
    while True:
        owner, region, order = make()
        notifier.notify(door, json.dumps(order)).wait()
        time.sleep(0.3)
        stop()
        try:
            region.close(timeout=0)
        except towline.Timeout:
            return owner, region
        # It was between two reads.
        resume()
        owner.close()

def with_a_visitor():
    def make():
        user = endpoint("mapped")
        region = user.register(towline.empty(64 << 20), "read")
        return user, region, {"ticket": str(region.ticket())}
    return visited(make)

def agent_with_a_visitor():
    def make():
        agent, local, _ = agents()
        return agent, local, {"metadata": agent.metadata().hex(), "ranges": local.descriptors.ranges}
    return visited(make)

def agents():
    agent = nixl.Agent("user", engine="embedded")
    return agent, agent.register(bytearray(32 << 20)), agent.add_peer(bytes.fromhex(SETTINGS["agent"]))

RANGES = [tuple(one) for one in SETTINGS["ranges"]]
READABLE = connect.RdmaMetadata.from_json(SETTINGS["readable"])
MEETING = nccl.UniqueId.from_bytes(bytes.fromhex(SETTINGS["meeting"]))

def ranks(**settings):
    return nccl.Communicator.init_all(2, nccl.NCCLConfig(timeout=PATIENCE, **settings))

def beside(call, *arguments):
    threading.Thread(target=call, args=arguments, daemon=True).start()

async def leave(thing):
    async with thing:
        pass

# A program that is started in the background of a shell inherits that it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

BODY = """
began = time.monotonic()
print("waiting", flush=True)
try:
    {call}
    print("it has not waited", flush=True)
except KeyboardInterrupt:
    # The shortest of the limits that the calls have by themselves is five seconds.
    print("interrupted" if time.monotonic() - began < 4.5 else "it waited to its limit", flush=True)
"""

Case = tuple[str, str, str]
"""What comes before, the call that waits, and what is tried afterwards."""

ENDPOINT: dict[str, Case] = {
    "an import whose owner takes the connection and says nothing": (
        """
silent = socket.create_server(("127.0.0.1", 0))
owner = towline.Endpoint("owner", advertise=f"127.0.0.1:{silent.getsockname()[1]}")
region = owner.register(bytearray(64))
ticket = region.ticket()
user = endpoint("tcp")
""",
        "user.import_(ticket)",
        "",
    ),
    "a first contact with an owner that is stopped": (
        "user = endpoint(); stop()",
        "user.import_(SETTINGS['tickets'][0])",
        "resume(); user.import_(SETTINGS['tickets'][0])",
    ),
    "a further import from an owner that is stopped": (
        "user, _ = imported(); stop()",
        "user.import_(SETTINGS['tickets'][1])",
        "resume(); user.import_(SETTINGS['tickets'][1])",
    ),
    "a transfer": ("user, local, transfer = reading()", "transfer.wait()", "resume(); transfer.wait()"),
    "an import while NIXL starts": (
        # It is loaded from a pipe into which nobody writes.
        """
library = os.path.join(tempfile.mkdtemp(), "libnixl_capi.so")
os.mkfifo(library)
os.environ["TOWLINE_NIXL"] = library
owner = towline.Endpoint("owner", nixl_lend_over="lo")
user = towline.Endpoint("user", timeout=PATIENCE, nixl_reach_over="lo")
region = owner.register(towline.empty(64), "read+write")
""",
        "user.import_(region.ticket(), require='nixl', timeout=PATIENCE)",
        "user.import_(region.ticket(), forbid='nixl')",
    ),
    "a message": ("user = endpoint()", "user.receive(PATIENCE)", "user.close()"),
    "a signal": (
        "user = endpoint(); region = user.register(bytearray(64), 'read+write')",
        "region.wait_signal(0, 1, PATIENCE)",
        "region.close()",
    ),
    "closing a region that is in use": (
        "user, local, transfer = reading()",
        "local.close()",
        "resume(); transfer.wait(); local.close(); assert local.closed",
    ),
    "leaving the block of a region": (
        "user, local, transfer = reading()",
        "local.__exit__(None, None, None)",
        "resume(); transfer.wait(); local.close(); assert local.closed",
    ),
    "closing an endpoint whose memory is in use": (
        "user, region = with_a_visitor()",
        "user.close()",
        "resume(); user.close()",
    ),
    "leaving the block of an endpoint": (
        "user, region = with_a_visitor()",
        "user.__exit__(None, None, None)",
        "resume(); user.close()",
    ),
}

CONNECT: dict[str, Case] = {
    "beginning an operation of a peer that is stopped": (
        "connector, target = connect.Connector(endpoint=endpoint()), bytearray(32 << 20); stop()",
        "connector.begin_read_sync(READABLE, connect.Descriptor(target))",
        "resume(); connector.close(); assert not any(target)",
    ),
    "an operation that nobody claims": (
        "connector = connect.Connector(); operation = connector.create_readable_sync(connect.Descriptor(bytearray(64)))",
        "operation.wait()",
        "assert operation.metadata(); operation.cancel()",
    ),
    "an operation that moves nothing any more": (
        "connector = connect.Connector(endpoint=endpoint())\n"
        "operation = connector.begin_read_sync(READABLE, connect.Descriptor(bytearray(32 << 20)))\n"
        "stop()",
        "operation.wait()",
        "resume(); operation.wait()",
    ),
    "closing a connector whose memory is in use": (
        "user, region = with_a_visitor(); connector = connect.Connector(endpoint=user)",
        "connector.close()",
        "resume(); connector.close(); user.close(timeout=0)",
    ),
    "an operation of the drop-in that nobody claims": (
        "connection = nixl_connect.Connection(nixl_connect.Connector(), 1)\n"
        "operation = nixl_connect.ReadableOperation(connection, nixl_connect.Descriptor(bytearray(64)))",
        "asyncio.run(operation.wait_for_completion())",
        "",
    ),
}

NIXL: dict[str, Case] = {
    "connecting to an agent that is stopped": (
        "agent, local, peer = agents(); stop()",
        "agent.connect(peer)",
        "resume(); agent.connect(peer)",
    ),
    "a transfer with an agent that is stopped": (
        "agent, local, peer = agents(); stop()",
        "agent.read(local, RANGES, peer)",
        "resume(); agent.read(local, RANGES, peer).wait()",
    ),
    "a message to an agent that is stopped": (
        "agent, local, peer = agents(); stop()",
        "agent.notify(peer, b'first')",
        "resume(); agent.notify(peer, b'second')",
    ),
    "a message of an agent": ("agent, local, peer = agents()", "agent.receive(None)", "agent.close()"),
    "closing a region that a peer reads": (
        "agent, local = agent_with_a_visitor()",
        "local.close()",
        "resume(); local.close(); assert local.closed",
    ),
}

NCCL: dict[str, Case] = {
    "a meeting to which others do not come": (
        "",
        "nccl.Communicator.init(2, 0, MEETING, nccl.NCCLConfig(timeout=PATIENCE))",
        "",
    ),
    "a meeting whose root is stopped": (
        "stop()",
        "nccl.Communicator.init(2, 0, MEETING, nccl.NCCLConfig(timeout=PATIENCE))",
        "",
    ),
    "a barrier": ("comms = ranks()", "comms[0].barrier()", ""),
    "a collective": ("comms = ranks(); some = nccl.empty(64)", "comms[0].allreduce(some, some)", ""),
    "sending": ("comms = ranks(); some = nccl.empty(1 << 20)", "comms[0].send(some, 1)", ""),
    "receiving": ("comms = ranks(); some = nccl.empty(1 << 20)", "comms[0].recv(some, 1)", ""),
    "a message in each direction": (
        "comms = ranks(); some, other = nccl.empty(1 << 20), nccl.empty(1 << 20)\n"
        "beside(comms[1].recv, nccl.empty(1 << 20), 0)",
        "\n    with nccl.group():\n        comms[0].send(some, 1); comms[0].recv(other, 1)",
        "",
    ),
    "a window": ("comms = ranks()", "comms[0].register_window(nccl.empty(64))", ""),
    "a window without a usable buffer": (
        "comms = ranks()",
        "\n    try: comms[0].register_window(b'read-only')\n    except nccl.NcclInvalid as error: print(error)",
        "",
    ),
    "a signal of a rank": ("comms = ranks()", "comms[0].wait_signal(nccl.WaitSignalDesc(1))", "comms[0].abort()"),
    "a group of calls": (
        "comms = ranks()",
        "\n    with nccl.group(): comms[0].barrier()",
        "",
    ),
    "a group of calls on two communicators": (
        "comms, others = ranks(), ranks(); beside(comms[1].barrier)",
        "\n    with nccl.group(): comms[0].barrier(); others[0].barrier()",
        "",
    ),
    "ranks of one process that do not reach each other": (
        "silent = socket.create_server(('127.0.0.1', 0))\n"
        "where = f'127.0.0.1:{silent.getsockname()[1]}'\n"
        "config = nccl.NCCLConfig(timeout=PATIENCE, require='tcp', advertise=where)",
        "nccl.Communicator.init_all(2, config)",
        "assert len(nccl.Communicator.init_all(2)) == 2",
    ),
    "a split": ("comms = ranks()", "comms[0].split(0, 0)", ""),
    "a shrink": ("comms = nccl.Communicator.init_all(3)", "comms[1].shrink([2])", ""),
    "finalizing": ("comms = ranks()", "comms[0].finalize()", ""),
    "leaving the block": ("comms = ranks()", "comms[0].__exit__(None, None, None)", ""),
    "a call that is in flight": (
        "comms = ranks(blocking=False); barrier = comms[0].barrier()",
        "barrier.wait()",
        "assert not barrier.done(); comms[1].barrier().wait(); barrier.wait()",
    ),
    "all that is in flight": (
        "comms = ranks(blocking=False); barrier = comms[0].barrier()",
        "comms[0].synchronize()",
        "assert not barrier.done(); comms[1].barrier(); comms[0].synchronize()",
    ),
    "destroying while calls are in flight": (
        "comms = ranks(blocking=False); barrier = comms[0].barrier()",
        "comms[0].destroy()",
        "comms[0].destroy(); assert not comms[0].is_valid",
    ),
    "closing a window while calls are in flight": (
        "comms = ranks(blocking=False)\n"
        "windows = [comm.register_window(nccl.empty(64)) for comm in comms]\n"
        "for window in windows: window.wait()\n"
        "barrier = comms[0].barrier()",
        "windows[0].close()",
        "windows[0].close()",
    ),
}

ASYNCIO: dict[str, Case] = {
    "an import": ("user = endpoint(); stop()", "asyncio.run(user.import_async(SETTINGS['tickets'][0]))", ""),
    "a message": ("user = endpoint()", "asyncio.run(user.receive_async(PATIENCE))", ""),
    "a transfer": (
        # What is cancelled is waited for, until the memory is quiet.
        "user, local, transfer = reading()\nasync def wait(): await transfer",
        "asyncio.run(wait())",
        "assert transfer.done() and transfer.quiet()",
    ),
    "leaving the block of an endpoint": (
        "user, region = with_a_visitor()",
        "asyncio.run(leave(user))",
        "resume(); user.close()",
    ),
    "leaving the block of a connector": (
        "user, region = with_a_visitor(); connector = connect.Connector(endpoint=user)",
        "asyncio.run(leave(connector))",
        "resume(); connector.close(); user.close(timeout=0)",
    ),
    "a call on a communicator": (
        "comms = ranks(blocking=False)\nasync def wait(): await comms[0].signaled(nccl.WaitSignalDesc(1))",
        "asyncio.run(wait())",
        "",
    ),
}

TABLES = {"endpoint": ENDPOINT, "connect": CONNECT, "nixl": NIXL, "nccl": NCCL, "asyncio": ASYNCIO}


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(HERE / "waiting_peer.py"), "peer"], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@contextmanager
def program(source: str, other: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A program that knows of the other process. It is killed long after a wait that is interrupted, and long before others end."""
    assert other.stdout is not None
    settings = json.loads(other.stdout.readline())
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + source, str(other.pid), json.dumps(settings)], stdout=subprocess.PIPE, text=True
    ) as process:
        alarm = threading.Timer(40, process.kill)
        alarm.start()
        try:
            yield process
        finally:
            alarm.cancel()
            process.kill()


@pytest.mark.parametrize(("table", "name"), [(table, name) for table in TABLES for name in TABLES[table]])
def test_ctrl_c_ends_a_wait(table: str, name: str, other: subprocess.Popen[str]) -> None:
    before, call, after = TABLES[table][name]
    source = "\n".join([before, BODY.format(call=call), after, "print('done', flush=True)"])
    with program(source, other) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        until_it_waits(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.stdout.readline() == "done\n"


LEAVING = """
user, region = with_a_visitor()

async def main():
    # A call that is inside goes on only if the loop does.
    asyncio.get_running_loop().call_later(0.5, resume)
    async with {thing}:
        pass

asyncio.run(main())
print(user.stats().regions, flush=True)
"""


@pytest.mark.parametrize("thing", ["user", "connect.Connector(endpoint=user)"])
def test_leaving_an_async_block_does_not_hold_up_the_event_loop(thing: str, other: subprocess.Popen[str]) -> None:
    with program(LEAVING.format(thing=thing), other) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()


IMPORTS = """
def threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum(name.startswith(("towline-contact", "towline-import")) for name in names)

user = endpoint()
for _ in range(20):
    user.import_(SETTINGS["tickets"][0])
before = threads()

async def main():
    stop()
    pending = [asyncio.ensure_future(towline.Endpoint(str(number)).import_async(SETTINGS["tickets"][0])) for number in range(50)]
    most, until = 0, time.monotonic() + 0.5
    while time.monotonic() < until:
        most = max(most, threads())
        await asyncio.sleep(0.005)
    resume()
    await asyncio.gather(*pending)
    print(before, 0 < most <= 32, flush=True)

asyncio.run(main())
"""


def test_imports_take_no_thread_and_those_of_an_event_loop_a_bounded_number(other: subprocess.Popen[str]) -> None:
    with program(IMPORTS, other) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0 True\n"
