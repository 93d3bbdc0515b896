"""Exit, fork, signals, threads, and what ten thousand transfers leave behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy
import pytest
from conftest import MakePeer, run_python

import towline
from towline import _native

PENDING = """
import sys, os, signal, asyncio, threading, time
import towline
endpoint = towline.Endpoint("leaver")
remote = endpoint.import_(sys.argv[1], require="unix")
os.kill(int(sys.argv[2]), signal.SIGSTOP)
# All of its threads: one that still runs could answer.
def runs(task):
    return open(f"/proc/{sys.argv[2]}/task/{task}/stat").read().rpartition(")")[2].split()[0] != "T"
while any(runs(task) for task in os.listdir(f"/proc/{sys.argv[2]}/task")):
    time.sleep(0.001)
target = bytearray(1 << 16)
local = endpoint.register(target, "none")
transfer = endpoint.read(remote, local)
"""

ENDINGS = {
    "by falling off the end": ("", 0),
    "by an exit code": ("sys.exit(7)", 7),
    "with an exception": ("raise SystemExit(3)", 3),
    "while a daemon thread waits": (
        "threading.Thread(target=transfer.wait, daemon=True).start(); time.sleep(0.1)",
        0,
    ),
    "while a daemon thread runs a loop": (
        """
async def wait(): await transfer
threading.Thread(target=lambda: asyncio.run(wait()), daemon=True).start()
time.sleep(0.1)
""",
        0,
    ),
    "with an unawaited loop": (
        """
async def wait(): await transfer
loop = asyncio.new_event_loop()
task = loop.create_task(wait())
loop.call_later(0.05, loop.stop)
loop.run_forever()
task._log_destroy_pending = False
""",
        0,
    ),
    "with an import in flight": (
        """
other = towline.Endpoint("second")
loop = asyncio.new_event_loop()
task = loop.create_task(other.import_async(sys.argv[1]))
loop.call_later(0.05, loop.stop)
loop.run_forever()
task._log_destroy_pending = False
""",
        0,
    ),
    "after the peer goes on": ("os.kill(int(sys.argv[2]), signal.SIGCONT)", 0),
}


SUBINTERPRETER = """
import sys
sys.path[:0] = {path!r}
try:
    import towline
except ImportError as error:
    sys.stdout.write(str(error))
    sys.stdout.flush()
else:
    raise SystemExit("it was imported")
"""


@pytest.mark.parametrize("first", ["", "import towline"])
def test_a_subinterpreter_is_refused_with_the_reason(first: str) -> None:
    try:
        modules = ["_interpreters", "_xxsubinterpreters"]
        name = next(name for name in modules if importlib.util.find_spec(name))
    except StopIteration:
        pytest.skip("this Python has no subinterpreters")
    inner = SUBINTERPRETER.format(path=sys.path)
    program = f"{first}\nimport {name} as inner\ninner.run_string(inner.create(), {inner!r})\n"
    assert "main interpreter only" in run_python(program)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_exits_with_transfers_pending(ending: str, peer: MakePeer) -> None:
    source, code = ENDINGS[ending]
    owner = peer()
    run_python(PENDING + source, owner.ticket, str(owner.process.pid), code=code)


def test_a_forked_child_gets_errors_and_the_parent_goes_on(
    peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    owner = peer()
    remote = endpoint.import_(owner.ticket, require="unix")
    target = bytearray(64)
    local = endpoint.register(target, "none")
    ticket = local.ticket()
    owner.stop()
    transfer = endpoint.read(remote, local)
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            import asyncio

            async def await_it() -> None:
                await transfer

            calls: list[Callable[[], object]] = [
                lambda: towline.Endpoint("child"),
                lambda: endpoint.register(bytearray(8)),
                lambda: endpoint.import_(ticket),
                lambda: endpoint.read(remote, local),
                lambda: endpoint.receive(10),
                lambda: endpoint.notify(remote, "x"),
                lambda: endpoint.stats(),
                lambda: endpoint.close(),
                lambda: local.ticket(),
                lambda: local.close(),
                lambda: transfer.wait(),
                lambda: transfer.cancel(),
                lambda: asyncio.run(await_it()),
                lambda: towline.CompletionQueue(),
            ]
            for call in calls:
                try:
                    call()
                except towline.Unavailable:
                    continue
                os._exit(2)
            del calls, transfer, local, remote, endpoint
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    owner.resume()
    transfer.wait()
    assert target == bytes(range(64))


def test_a_child_forked_before_the_first_endpoint_may_open_one() -> None:
    run_python(
        """
import os, towline
child = os.fork()
with towline.Endpoint("either") as endpoint:
    region = endpoint.register(b"abc")
    remote = endpoint.import_(region.ticket())
    assert remote.path == "inproc"
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    )


@pytest.mark.parametrize("call", ["transfer.wait()", "endpoint.receive(30)", "local.wait_signal(0, 1)"])
def test_a_keyboard_interrupt_ends_a_wait(call: str, peer: MakePeer) -> None:
    owner = peer()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PENDING
            + f"""
import signal
# Where the tests run in the background of a shell, the interrupt is ignored unless it is asked for.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("waiting", flush=True)
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
""",
            owner.ticket,
            str(owner.process.pid),
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


def test_threads_share_an_endpoint(peer: MakePeer, endpoint: towline.Endpoint) -> None:
    remote = endpoint.import_(peer().ticket)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(100):
                target = bytearray(251)
                with endpoint.register(target, "none") as local:
                    endpoint.read(remote, local, at=251 * ((seed + step) % 100)).wait()
                assert target == bytes(range(251))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def usage() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("path", ["mapped", "unix"])
def test_ten_thousand_transfers_leave_nothing_behind(
    path: str, peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    import asyncio

    remote = endpoint.import_(peer().ticket, require=path)
    target = numpy.zeros(4096, numpy.uint8)

    async def move(count: int) -> None:
        for number in range(count):
            with endpoint.register(target, "none") as local:
                await endpoint.read(remote, local, at=(number % 10) * 4096)

    async def main() -> None:
        await move(1000)
        before, held, memory = usage(), _native.held(), resident()
        await move(9000)
        after = usage()
        assert after[0] <= before[0] and after[1] <= before[1] + 2
        assert _native.held() == held
        assert resident() - memory < 4 << 20

    asyncio.run(main())
    assert endpoint.stats().regions == 0
