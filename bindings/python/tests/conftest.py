"""Other processes for the tests, and a watchdog for what could hang."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import towline

HERE = Path(__file__).parent
LIMIT = 60.0
"""Seconds after which a test has hung."""


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Process:
    """A process that runs a script of this directory and follows its orders."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the peer has ended"
        return line

    def order(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def tell(self, command: str) -> str:
        self.order(command)
        return self.answer()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass


class Peer(Process):
    """A process that runs `peer.py`: it owns a region and gives its ticket."""

    def __init__(self, nbytes: int, access: str, memory: str) -> None:
        super().__init__("peer.py", str(nbytes), access, memory)
        self.ticket = self.answer()


MakePeer = Callable[..., Peer]
MakeWorker = Callable[..., Process]


@pytest.fixture
def peer() -> Iterator[MakePeer]:
    peers: list[Peer] = []

    def make(nbytes: int = 1 << 16, access: str = "read+write", memory: str = "shared") -> Peer:
        peers.append(Peer(nbytes, access, memory))
        return peers[-1]

    yield make
    for one in peers:
        one.close()


@pytest.fixture
def worker() -> Iterator[MakeWorker]:
    """Makes processes that run `connect_peer.py`, with operations over one path."""
    workers: list[Process] = []

    def make(path: str = "unix", memory: str = "plain") -> Process:
        workers.append(Process("connect_peer.py", path, memory))
        return workers[-1]

    yield make
    for one in workers:
        one.close()


@pytest.fixture
def endpoint() -> Iterator[towline.Endpoint]:
    with towline.Endpoint("test") as endpoint:
        yield endpoint


def until_it_waits(pid: int, task: int | None = None) -> None:
    """Waits until a thread of a process (its first where none is named) sleeps, and not only in passing."""
    deadline, asleep = time.monotonic() + LIMIT / 2, 0
    while asleep < 10:
        assert time.monotonic() < deadline, "it does not wait"
        stat = Path(f"/proc/{pid}/task/{task or pid}/stat").read_text()
        asleep = asleep + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.005)


def run_python(source: str, *arguments: str, code: int = 0, timeout: float = LIMIT) -> str:
    """Runs a program and returns what it printed; its exit code must be that."""
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == code, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    assert "panicked" not in done.stderr and "Fatal" not in done.stderr, done.stderr
    return done.stdout
